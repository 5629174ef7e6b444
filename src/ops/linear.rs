//! Linear layer with what follows it in a transformer block.
//!
//! With `h = x W^T + b` per row,
//!
//! ```text
//! y = h        or    y = gelu(h) = h Phi(h)        or    y = h + residual
//!
//! dh = dy            dh = dy (Phi(h) + h phi(h))         dh = dresidual = dy
//! dx = dh W          dW = dh^T x                         db = sum of dh over rows
//! ```
//!
//! where `Phi` is the normal distribution function `(1 + erf(h / sqrt 2)) / 2` and `phi` its density. Bias, GELU and residual meet a block of the product
//! in the cache. GELU's gradient comes from the saved `h`.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::{Tensor, activation};

use super::autocast;
use super::bridge::{Operand, consume, primitive, record, register, slice, wants};
use super::gemm::{Matrix, matmul, matmul_by_blocks, product, transposed};
use super::memory::{buffer, work_area};
use super::simd::{add_row, column_sums, erf, exp, mul_add, vectorized};

/// Computes `x W^T + b`. `[.., in]`, `[out, in]`, `[out]` -> `[.., out]`
///
/// # Panics
/// Panics if shapes do not fit together.
#[must_use]
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    run(x, weight, bias, None, false)
}

/// Computes `gelu(x W^T + b)`, GELU in its exact form. `[.., in]`, `[out, in]`, `[out]` -> `[.., out]`
///
/// # Panics
/// Panics if shapes do not fit together.
#[must_use]
pub fn linear_gelu<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    run(x, weight, bias, None, true)
}

/// Computes `x W^T + b + residual`. `[.., in]`, `[out, in]`, `[out]`, `[.., out]` -> `[.., out]`
///
/// # Panics
/// Panics if shapes do not fit together.
#[must_use]
pub fn linear_residual<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    residual: Tensor<D>,
) -> Tensor<D> {
    run(x, weight, bias, Some(residual), false)
}

fn run<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<D>>,
    gelu: bool,
) -> Tensor<D> {
    if let Some(half) = autocast::active() {
        let (x, weight, bias) = (half.enter(x), half.enter(weight), bias.map(|bias| half.enter(bias)));
        let y = half.leave(autocast::off(|| run(x, weight, bias, None, gelu)));
        return match residual {
            Some(residual) => y + residual,
            None => y,
        };
    }
    let mut shape = x.dims();
    let [outs, ins] = weight.dims();
    assert_eq!(shape[D - 1], ins, "linear layer over {ins} features applied to {}", shape[D - 1]);
    shape[D - 1] = outs;
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [outs], "bias of a linear layer has one value per output");
    }
    if let Some(residual) = &residual {
        assert_eq!(residual.dims(), shape, "residual and output of a linear layer differ in shape");
    }
    let graph = x.is_autodiff()
        || weight.is_autodiff()
        || bias.as_ref().is_some_and(Tensor::is_autodiff)
        || residual.as_ref().is_some_and(Tensor::is_autodiff);
    let operands = || {
        let bias = bias.iter().map(|bias| Operand::new(bias.clone(), graph));
        let residual = residual.iter().map(|residual| Operand::new(residual.clone(), graph));
        let all = [Operand::new(x.clone(), graph), Operand::new(weight.clone(), graph)];
        all.into_iter().chain(bias).chain(residual).collect::<Option<Vec<_>>>()
    };
    let Some(operands) = operands() else {
        return plain(x, weight, bias, residual, gelu);
    };
    let rows = shape[..D - 1].iter().product();
    let op = Linear { rows, ins, outs, gelu, bias: bias.is_some(), residual: residual.is_some() };
    let (y, h) = op.forward(&operands);
    let (x, weight) = (operands[0].share(), operands[1].share());
    let state = |_: &FlexTensor| (x, weight, h.map(|h| primitive(h, [rows * outs])));
    let y = primitive(y, shape);
    match operands.len() {
        2 => record(op, array::<2>(operands), y, state),
        3 => record(op, array::<3>(operands), y, state),
        _ => record(op, array::<4>(operands), y, state),
    }
}

fn array<const N: usize>(operands: Vec<Operand>) -> [Operand; N] {
    operands.try_into().expect("matched by length")
}

/// The parents are input, weight, then bias and residual if there are such.
#[derive(Debug)]
struct Linear {
    rows: usize,
    ins: usize,
    outs: usize,
    gelu: bool,
    bias: bool,
    residual: bool,
}

impl Linear {
    /// Returns the output and, if a gradient will flow through GELU, what went into it.
    fn forward(&self, operands: &[Operand]) -> (Vec<f32>, Option<Vec<f32>>) {
        let Self { rows, ins, outs, .. } = *self;
        let (x, weight) = (operands[0].slice(), transposed(operands[1].slice(), outs, ins));
        let weight = Matrix::new(&weight, ins, outs);
        let bias = self.bias.then(|| operands[2].slice());
        let residual = self.residual.then(|| operands[operands.len() - 1].slice());
        let mut y = buffer(rows * outs);
        let mut kept = (self.gelu && operands.iter().any(Operand::is_tracked)).then(|| buffer(rows * outs));
        matmul_by_blocks(Matrix::new(x, rows, ins), weight, |rows, product| {
            let span = rows.start * outs..rows.end * outs;
            let y = &mut y[span.clone()];
            match (self.gelu, bias, residual) {
                (true, bias, _) => {
                    if let Some(bias) = bias {
                        add_row(product, bias);
                    }
                    gelu(product, y);
                    if let Some(kept) = &mut kept {
                        kept[span].copy_from_slice(product);
                    }
                }
                (false, Some(bias), Some(residual)) => biased_sum(product, bias, &residual[span], y),
                (false, Some(bias), None) => biased(product, bias, y),
                (false, None, Some(residual)) => sum(product, &residual[span], y),
                (false, None, None) => y.copy_from_slice(product),
            }
        });
        (y, kept)
    }
}

impl<const N: usize> Backward<Flex, N> for Linear {
    /// Input, weight and, with GELU, what went into it.
    type State = (FlexTensor, FlexTensor, Option<FlexTensor>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Self { rows, ins, outs, .. } = self;
        let gradient = consume(grads, &ops);
        let (x, weight, h) = &ops.state;
        let shape = x.layout().shape().clone();
        let mut behind_gelu = work_area(if self.gelu { rows * outs } else { 0 });
        let dh = match h {
            Some(h) => {
                gelu_gradient(slice(h), slice(&gradient), &mut behind_gelu);
                &*behind_gelu
            }
            None => slice(&gradient),
        };
        if wants(&ops, 0) {
            let dx = product(Matrix::new(dh, rows, outs), Matrix::new(slice(weight), outs, ins));
            register(grads, &ops, 0, || primitive(dx, [rows * ins]).reshape(shape));
        }
        register(grads, &ops, 1, || {
            let mut dw = buffer(outs * ins);
            matmul(&mut dw, ins, Matrix::new(dh, rows, outs).t(), Matrix::new(slice(x), rows, ins), false);
            primitive(dw, [outs, ins])
        });
        if self.bias {
            register(grads, &ops, 2, || primitive(column_sums(dh, outs), [outs]));
        }
        if self.residual {
            register(grads, &ops, 2 + usize::from(self.bias), || gradient.clone());
        }
    }
}

/// `phi(0)`
const DENSITY_AT_0: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2 / 2.0;

vectorized! {
    /// `y = h + bias`
    pub(super) fn biased(h: &[f32], bias: &[f32], y: &mut [f32]) {
        for (h, y) in h.chunks_exact(bias.len().max(1)).zip(y.chunks_exact_mut(bias.len().max(1))) {
            for ((y, h), bias) in y.iter_mut().zip(h).zip(bias) {
                *y = *h + *bias;
            }
        }
    }

    /// `y = h + residual`
    fn sum(h: &[f32], residual: &[f32], y: &mut [f32]) {
        for ((y, h), residual) in y.iter_mut().zip(h).zip(residual) {
            *y = *h + *residual;
        }
    }

    /// `y = h + bias + residual`
    pub(super) fn biased_sum(h: &[f32], bias: &[f32], residual: &[f32], y: &mut [f32]) {
        let width = bias.len().max(1);
        let rows = h.chunks_exact(width).zip(residual.chunks_exact(width)).zip(y.chunks_exact_mut(width));
        for ((h, residual), y) in rows {
            for (((y, h), residual), bias) in y.iter_mut().zip(h).zip(residual).zip(bias) {
                *y = (*h + *bias) + *residual;
            }
        }
    }

    /// `y = h Phi(h)`
    pub(super) fn gelu(h: &[f32], y: &mut [f32]) {
        for (y, h) in y.iter_mut().zip(h) {
            let half = 0.5 * *h;
            *y = mul_add::<FMA>(half, erf::<FMA>(*h * std::f32::consts::FRAC_1_SQRT_2), half);
        }
    }

    /// `y = h Phi(h)` and its slope `Phi(h) + h phi(h)`
    pub(super) fn gelu_with_slope(h: &[f32], y: &mut [f32], slope: &mut [f32]) {
        for ((y, slope), h) in y.iter_mut().zip(slope).zip(h) {
            let (h, half) = (*h, 0.5 * *h);
            let erf = erf::<FMA>(h * std::f32::consts::FRAC_1_SQRT_2);
            *y = mul_add::<FMA>(half, erf, half);
            let density = exp::<FMA>(-0.5 * h * h) * DENSITY_AT_0;
            *slope = mul_add::<FMA>(h, density, mul_add::<FMA>(0.5, erf, 0.5));
        }
    }

    /// `dh = dy (Phi(h) + h phi(h))`
    fn gelu_gradient(h: &[f32], dy: &[f32], dh: &mut [f32]) {
        for ((dh, h), dy) in dh.iter_mut().zip(h).zip(dy) {
            let h = *h;
            let distribution = mul_add::<FMA>(0.5, erf::<FMA>(h * std::f32::consts::FRAC_1_SQRT_2), 0.5);
            let density = exp::<FMA>(-0.5 * h * h) * DENSITY_AT_0;
            *dh = *dy * mul_add::<FMA>(h, density, distribution);
        }
    }
}

/// The same by burn's operations.
fn plain<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<D>>,
    gelu: bool,
) -> Tensor<D> {
    let y = burn::tensor::module::linear(x, weight.transpose(), bias);
    let y = if gelu { activation::gelu(y) } else { y };
    match residual {
        Some(residual) => y + residual,
        None => y,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::testing::{
        self, assert_close, assert_same_bits, flat, flatten, gradients, probe, read, values, wide,
    };
    use super::*;

    #[derive(Clone, Copy, Debug)]
    struct Case {
        rows: usize,
        ins: usize,
        outs: usize,
        bias: bool,
        residual: bool,
        gelu: bool,
    }

    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for (rows, ins, outs) in [(1, 1, 1), (5, 3, 7), (300, 65, 33), (513, 192, 96)] {
            for (bias, residual, gelu) in [
                (true, false, false),
                (true, false, true),
                (true, true, false),
                (false, false, false),
                (false, true, false),
                (false, false, true),
            ] {
                cases.push(Case { rows, ins, outs, bias, residual, gelu });
            }
        }
        cases
    }

    impl Case {
        fn inputs(&self) -> [Vec<f32>; 4] {
            let scale = 3.0 / (self.ins as f32).sqrt();
            let weight = values(self.ins * self.outs, 2).into_iter().map(|w| w * scale).collect();
            [values(self.rows * self.ins, 1), weight, values(self.outs, 3), values(self.rows * self.outs, 4)]
        }

        fn forward(&self, t: &[Tensor<1>], burns: bool) -> Tensor<1> {
            let x = t[0].clone().reshape([1, self.rows, self.ins]);
            let weight = t[1].clone().reshape([self.outs, self.ins]);
            let bias = self.bias.then(|| t[2].clone());
            let residual = self.residual.then(|| t[3].clone().reshape([1, self.rows, self.outs]));
            flatten(if burns {
                plain(x, weight, bias, residual, self.gelu)
            } else {
                run(x, weight, bias, residual, self.gelu)
            })
        }

        /// Output and the gradients of input, weight, bias and residual; the formulas, in float64.
        fn definition(&self, inputs: &[Vec<f32>; 4]) -> Vec<Vec<f64>> {
            let [x, w, b, residual] = inputs.each_ref().map(|values| wide(values));
            let dy = wide(&probe(self.rows * self.outs));
            let (mut y, mut dx, mut dw, mut db) =
                (dy.clone(), vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; b.len()]);
            for r in 0..self.rows {
                for o in 0..self.outs {
                    let at = r * self.outs + o;
                    let mut h: f64 = (0..self.ins).map(|i| x[r * self.ins + i] * w[o * self.ins + i]).sum();
                    h += if self.bias { b[o] } else { 0.0 };
                    let (cdf, pdf) = (
                        0.5 + 0.5 * testing::erf(h / 2.0f64.sqrt()),
                        (-h * h / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt(),
                    );
                    let dh = if self.gelu { dy[at] * (cdf + h * pdf) } else { dy[at] };
                    y[at] = if self.gelu { h * cdf } else { h } + if self.residual { residual[at] } else { 0.0 };
                    db[o] += dh;
                    for i in 0..self.ins {
                        dx[r * self.ins + i] += dh * w[o * self.ins + i];
                        dw[o * self.ins + i] += dh * x[r * self.ins + i];
                    }
                }
            }
            let none = Vec::new;
            vec![y, dx, dw, if self.bias { db } else { none() }, if self.residual { dy } else { none() }]
        }
    }

    #[test]
    fn against_float64_and_burn() {
        let mut worst = 0.0f64;
        for case in cases() {
            let inputs = case.inputs();
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            let found = gradients(&leaves, |t| case.forward(t, false));
            worst = worst.max(assert_close(&format!("{case:?}"), &found, &case.definition(&inputs), 1e-6));
            let burns: Vec<_> = gradients(&leaves, |t| case.forward(t, true)).iter().map(|v| wide(v)).collect();
            assert_close("against burn", &found, &burns, 1e-5);
        }
        eprintln!("linear: worst {worst:.1e}");
    }

    #[test]
    fn same_bits_however_called() {
        for case in cases() {
            let inputs = case.inputs();
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            assert_same_bits(&leaves, |t| case.forward(t, false));
        }
    }

    #[test]
    fn nothing_in_nothing_out_and_views() {
        let device = Device::flex();
        let weight = flat(&values(15, 1), &device).reshape([3, 5]);
        assert_eq!(linear_gelu(Tensor::<2>::zeros([0, 5], &device), weight.clone(), None).dims(), [0, 3]);
        let wide = flat(&values(70, 2), &device).reshape([7, 10]);
        let view = wide.clone().transpose().slice([2..7, 0..5]);
        let copy = flat(&read(view.clone()), &device).reshape([5, 5]);
        assert_eq!(read(linear(view, weight.clone(), None)), read(linear(copy, weight, None)));
    }
}
