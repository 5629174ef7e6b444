//! The two linear layers of a transformer block with GELU between.
//!
//! Per row, with `h = x W1^T + b1`,
//!
//! ```text
//! y = gelu(h) W2^T + b2          or    y + residual
//!
//! dW2 = dy^T gelu(h)        db2 = sum of dy        dh = (dy W2) gelu'(h)
//! dx = dh W1                dW1 = dh^T x           db1 = sum of dh              dresidual = dy
//! ```
//!
//! Rows go through all of it in blocks of 256, so that what is four times as wide as the rest stays in the cache: of it only `h` is written
//! out, and only if there will be a backward pass, which computes `gelu(h)` anew. That saves a quarter of a block's activations. Sums over
//! rows go block by block, in order.

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

use super::autocast;
use super::bridge::{Operand, consume, primitive, record, register, slice};
use super::gemm::{Matrix, matmul, transposed};
use super::linear::{biased, biased_sum, gelu, gelu_with_slope, linear, linear_gelu, linear_residual};
use super::memory::{buffer, work_area};
use super::simd::{add_row, add_to_totals, column_sums, multiply};

/// Rows per block.
const BLOCK: usize = 256;

/// A linear layer with its bias: `[out, in]`, `[out]`.
type Layer = (Tensor<2>, Tensor<1>);

/// Computes `gelu(x W1^T + b1) W2^T + b2`, plus `residual`. `[.., in]` -> `[.., out]`
///
/// # Panics
/// Panics if shapes do not fit together.
#[must_use]
pub fn mlp<const D: usize>(x: Tensor<D>, first: Layer, second: Layer, residual: Option<Tensor<D>>) -> Tensor<D> {
    if autocast::active().is_some() {
        let hidden = linear_gelu(x, first.0, Some(first.1));
        return match residual {
            Some(residual) => linear_residual(hidden, second.0, Some(second.1), residual),
            None => linear(hidden, second.0, Some(second.1)),
        };
    }
    let mut shape = x.dims();
    let ([hidden, ins], [outs, inner]) = (first.0.dims(), second.0.dims());
    assert_eq!(shape[D - 1], ins, "an MLP over {ins} features applied to {}", shape[D - 1]);
    assert_eq!(hidden, inner, "the layers of an MLP do not fit together");
    assert_eq!((first.1.dims(), second.1.dims()), ([hidden], [outs]), "a bias has one value per output");
    shape[D - 1] = outs;
    if let Some(residual) = &residual {
        assert_eq!(residual.dims(), shape, "residual and output of an MLP differ in shape");
    }
    let graph = x.is_autodiff()
        || [&first, &second].iter().any(|layer| layer.0.is_autodiff() || layer.1.is_autodiff())
        || residual.as_ref().is_some_and(Tensor::is_autodiff);
    let operands = || {
        let residual = residual.iter().map(|residual| Operand::new(residual.clone(), graph));
        let layers = [&first, &second].map(|(w, b)| [Operand::new(w.clone(), graph), Operand::new(b.clone(), graph)]);
        let x = Operand::new(x.clone(), graph);
        std::iter::once(x).chain(layers.into_iter().flatten()).chain(residual).collect::<Option<Vec<_>>>()
    };
    let Some(operands) = operands() else {
        return plain(x, first, second, residual);
    };
    let rows = shape[..D - 1].iter().product();
    let op = Mlp { rows, ins, hidden, outs, residual: residual.is_some() };
    let (y, h) = op.forward(&operands);
    let saved = [operands[0].share(), operands[1].share(), operands[3].share()];
    let state = |_: &FlexTensor| (saved, primitive(h.unwrap_or_default(), [rows * hidden]));
    let y = primitive(y, shape);
    match <[Operand; 5]>::try_from(operands) {
        Ok(operands) => record(op, operands, y, state),
        Err(operands) => record(op, <[Operand; 6]>::try_from(operands).expect("five or six operands"), y, state),
    }
}

/// The parents are input, first weight and bias, second weight and bias, then the residual if there is one.
#[derive(Debug)]
struct Mlp {
    rows: usize,
    ins: usize,
    hidden: usize,
    outs: usize,
    residual: bool,
}

impl Mlp {
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let rows = self.rows;
        (0..rows).step_by(BLOCK).map(move |start| start..rows.min(start + BLOCK))
    }

    /// Returns the output and, if a gradient will flow, what went into GELU.
    fn forward(&self, operands: &[Operand]) -> (Vec<f32>, Option<Vec<f32>>) {
        let Self { rows, ins, hidden, outs, .. } = *self;
        let [x, w1, b1, w2, b2] = [0, 1, 2, 3, 4].map(|i| operands[i].slice());
        let residual = self.residual.then(|| operands[5].slice());
        let (w1, w2) = (transposed(w1, hidden, ins), transposed(w2, outs, hidden));
        let (w1, w2) = (Matrix::new(&w1, ins, hidden), Matrix::new(&w2, hidden, outs));
        let mut y = buffer(rows * outs);
        let mut kept = operands.iter().any(Operand::is_tracked).then(|| buffer(rows * hidden));
        let most = BLOCK.min(rows);
        let mut passing = work_area(if kept.is_none() { most * hidden } else { 0 });
        let (mut active, mut product) = (work_area(most * hidden), work_area(most * outs));
        for block in self.blocks() {
            let (n, span) = (block.len(), block.start * outs..block.end * outs);
            let h = match &mut kept {
                Some(kept) => &mut kept[block.start * hidden..block.end * hidden],
                None => &mut passing[..n * hidden],
            };
            let (active, product) = (&mut active[..n * hidden], &mut product[..n * outs]);
            matmul(h, hidden, Matrix::new(&x[block.start * ins..], n, ins), w1, false);
            add_row(h, b1);
            gelu(h, active);
            matmul(product, outs, Matrix::new(active, n, hidden), w2, false);
            match residual {
                Some(residual) => biased_sum(product, b2, &residual[span.clone()], &mut y[span]),
                None => biased(product, b2, &mut y[span]),
            }
        }
        (y, kept)
    }

    /// Returns the gradients of input, first weight and bias, second weight and bias.
    fn backward(&self, [x, w1, w2]: [&[f32]; 3], h: &[f32], dy: &[f32]) -> [Vec<f32>; 5] {
        let Self { rows, ins, hidden, outs, .. } = *self;
        let (w1, w2) = (Matrix::new(w1, hidden, ins), Matrix::new(w2, outs, hidden));
        let mut dx = buffer(rows * ins);
        let (mut dw1, mut dw2) = (vec![0.0; hidden * ins], vec![0.0; outs * hidden]);
        let mut db1 = vec![0.0f64; hidden];
        let most = BLOCK.min(rows);
        let (mut active, mut slope, mut dh) =
            (work_area(most * hidden), work_area(most * hidden), work_area(most * hidden));
        for block in self.blocks() {
            let n = block.len();
            let wide = block.start * hidden..block.end * hidden;
            let (active, slope, dh) = (&mut active[..n * hidden], &mut slope[..n * hidden], &mut dh[..n * hidden]);
            gelu_with_slope(&h[wide], active, slope);
            let dy = Matrix::new(&dy[block.start * outs..], n, outs);
            matmul(&mut dw2, hidden, dy.t(), Matrix::new(active, n, hidden), true);
            matmul(dh, hidden, dy, w2, false);
            multiply(dh, slope);
            let x = Matrix::new(&x[block.start * ins..], n, ins);
            matmul(&mut dw1, ins, Matrix::new(dh, n, hidden).t(), x, true);
            matmul(&mut dx[block.start * ins..block.end * ins], ins, Matrix::new(dh, n, hidden), w1, false);
            add_to_totals(&mut db1, &column_sums(dh, hidden));
        }
        let db1 = db1.into_iter().map(|sum| sum as f32).collect();
        [dx, dw1, db1, dw2, column_sums(dy, outs)]
    }
}

impl<const N: usize> Backward<Flex, N> for Mlp {
    /// Input and weights; what went into GELU.
    type State = ([FlexTensor; 3], FlexTensor);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = consume(grads, &ops);
        let (saved, h) = &ops.state;
        let [x, w1, w2] = saved;
        let shape = x.layout().shape().clone();
        let [dx, dw1, db1, dw2, db2] =
            Self::backward(&self, [slice(x), slice(w1), slice(w2)], slice(h), slice(&gradient));
        let Self { rows, ins, hidden, outs, .. } = self;
        register(grads, &ops, 0, || primitive(dx, [rows * ins]).reshape(shape));
        register(grads, &ops, 1, || primitive(dw1, [hidden, ins]));
        register(grads, &ops, 2, || primitive(db1, [hidden]));
        register(grads, &ops, 3, || primitive(dw2, [outs, hidden]));
        register(grads, &ops, 4, || primitive(db2, [outs]));
        register(grads, &ops, 5, || gradient.clone());
    }
}

/// The same, layer by layer.
fn plain<const D: usize>(x: Tensor<D>, first: Layer, second: Layer, residual: Option<Tensor<D>>) -> Tensor<D> {
    let active = linear_gelu(x, first.0, Some(first.1));
    match residual {
        Some(residual) => linear_residual(active, second.0, Some(second.1), residual),
        None => super::linear(active, second.0, Some(second.1)),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::testing::{self, assert_close, assert_same_bits, flatten, gradients, probe, read, values, wide};
    use super::*;

    /// Rows, inputs, hidden, outputs, residual.
    const CASES: [(usize, usize, usize, usize, bool); 6] = [
        (1, 1, 1, 1, false),
        (5, 3, 7, 3, true),
        (300, 17, 33, 9, false),
        (513, 24, 96, 24, true),
        (257, 64, 16, 64, true),
        (256, 8, 32, 8, false),
    ];

    fn inputs((rows, ins, hidden, outs, _): (usize, usize, usize, usize, bool)) -> [Vec<f32>; 6] {
        let scaled = |len, seed, fan: usize| -> Vec<f32> {
            values(len, seed).into_iter().map(|w| w * 2.0 / (fan as f32).sqrt()).collect()
        };
        [
            values(rows * ins, 1),
            scaled(hidden * ins, 2, ins),
            values(hidden, 3),
            scaled(outs * hidden, 4, hidden),
            values(outs, 5),
            values(rows * outs, 6),
        ]
    }

    fn forward(t: &[Tensor<1>], case: (usize, usize, usize, usize, bool), composed: bool) -> Tensor<1> {
        let (rows, ins, hidden, outs, residual) = case;
        let x = t[0].clone().reshape([1, rows, ins]);
        let first = (t[1].clone().reshape([hidden, ins]), t[2].clone());
        let second = (t[3].clone().reshape([outs, hidden]), t[4].clone());
        let residual = residual.then(|| t[5].clone().reshape([1, rows, outs]));
        flatten(if composed { plain(x, first, second, residual) } else { mlp(x, first, second, residual) })
    }

    /// Output and the gradients of all inputs; the formulas, in float64.
    fn definition(case: (usize, usize, usize, usize, bool), inputs: &[Vec<f32>; 6]) -> Vec<Vec<f64>> {
        let (rows, ins, hidden, outs, residual) = case;
        let [x, w1, b1, w2, b2, extra] = inputs.each_ref().map(|values| wide(values));
        let dy = wide(&probe(rows * outs));
        let zeros = |like: &Vec<f64>| vec![0.0; like.len()];
        let (mut y, mut dx, mut dw1, mut db1, mut dw2, mut db2) =
            (zeros(&dy), zeros(&x), zeros(&w1), zeros(&b1), zeros(&w2), zeros(&b2));
        for r in 0..rows {
            let mut dactive = vec![0.0; hidden];
            let h: Vec<f64> =
                (0..hidden).map(|m| b1[m] + (0..ins).map(|i| x[r * ins + i] * w1[m * ins + i]).sum::<f64>()).collect();
            let cdf = |h: f64| 0.5 + 0.5 * testing::erf(h / 2.0f64.sqrt());
            let pdf = |h: f64| (-h * h / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
            for o in 0..outs {
                let at = r * outs + o;
                y[at] = b2[o] + if residual { extra[at] } else { 0.0 };
                db2[o] += dy[at];
                for m in 0..hidden {
                    let active = h[m] * cdf(h[m]);
                    y[at] += active * w2[o * hidden + m];
                    dw2[o * hidden + m] += dy[at] * active;
                    dactive[m] += dy[at] * w2[o * hidden + m];
                }
            }
            for m in 0..hidden {
                let dh = dactive[m] * (cdf(h[m]) + h[m] * pdf(h[m]));
                db1[m] += dh;
                for i in 0..ins {
                    dx[r * ins + i] += dh * w1[m * ins + i];
                    dw1[m * ins + i] += dh * x[r * ins + i];
                }
            }
        }
        vec![y, dx, dw1, db1, dw2, db2, if residual { dy } else { Vec::new() }]
    }

    #[test]
    fn against_float64_and_layer_by_layer() {
        let mut worst = 0.0f64;
        for case in CASES {
            let inputs = inputs(case);
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            let found = gradients(&leaves, |t| forward(t, case, false));
            worst = worst.max(assert_close(&format!("{case:?}"), &found, &definition(case, &inputs), 2e-6));
            let composed: Vec<_> = gradients(&leaves, |t| forward(t, case, true)).iter().map(|v| wide(v)).collect();
            assert_close("layer by layer", &found, &composed, 1e-5);
        }
        eprintln!("mlp: worst {worst:.1e}");
    }

    #[test]
    fn same_bits_however_called() {
        for case in CASES {
            let inputs = inputs(case);
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            assert_same_bits(&leaves, |t| forward(t, case, false));
        }
    }

    #[test]
    fn nothing_in_nothing_out() {
        let device = Device::flex();
        let layer = |outs, ins| (Tensor::<2>::ones([outs, ins], &device), Tensor::<1>::ones([outs], &device));
        assert_eq!(mlp(Tensor::<2>::zeros([0, 3], &device), layer(4, 3), layer(2, 4), None).dims(), [0, 2]);
        let y = mlp(Tensor::<2>::zeros([2, 3], &device), layer(0, 3), layer(2, 0), None);
        assert_eq!(read(y), [1.0; 4], "no hidden values: the bias");
    }
}
