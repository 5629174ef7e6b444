//! Layer norm over the last dimension.
//!
//! Per row of `d` values, with `xhat = (x - mean) rstd`, `rstd = 1 / sqrt(var + eps)` (divisor `d`),
//!
//! ```text
//! y = gamma xhat + beta
//!
//! dx = rstd (dy gamma - mean(dy gamma) - xhat mean(dy gamma xhat))        dgamma = sum dy xhat        dbeta = sum dy
//! ```
//!
//! Mean and rstd are kept for the backward pass, `xhat` is not. The sums over rows go in blocks of 128 rows, added up in `f64`.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

use super::bridge::{Operand, consume, primitive, record, register, slice, wants};
use super::memory::buffer;
use super::simd::{SUM_ROWS, add_to_totals, mul_add, reduce, vectorized};

/// Normalises each row. `[.., d]`, `[d]`, `[d]` -> `[.., d]`
///
/// # Panics
/// Panics if shapes do not fit together.
#[must_use]
pub fn layer_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, beta: Tensor<1>, eps: f64) -> Tensor<D> {
    let shape = x.dims();
    let d = shape[D - 1];
    assert_eq!(gamma.dims(), [d], "layer norm over {d} values with a gamma of another length");
    assert_eq!(beta.dims(), [d], "layer norm over {d} values with a beta of another length");
    let graph = x.is_autodiff() || gamma.is_autodiff() || beta.is_autodiff();
    let operand = |vector: &Tensor<1>| Operand::new(vector.clone(), graph);
    let (Some(values), Some(scale), Some(shift)) = (Operand::new(x.clone(), graph), operand(&gamma), operand(&beta))
    else {
        return plain(x, gamma, beta, eps);
    };
    let mut y = buffer(values.slice().len());
    let mut statistics = buffer(2 * shape[..D - 1].iter().product::<usize>());
    forward(values.slice(), scale.slice(), shift.slice(), eps as f32, &mut y, &mut statistics);
    let (x, gamma) = (values.share(), scale.share());
    record(LayerNorm, [values, scale, shift], primitive(y, shape), |_| {
        let len = statistics.len();
        (x, gamma, primitive(statistics, [len]))
    })
}

/// Backward pass; the parents are input, gamma and beta.
#[derive(Debug)]
struct LayerNorm;

impl Backward<Flex, 3> for LayerNorm {
    /// Input, gamma, and mean and rstd of each row.
    type State = (FlexTensor, FlexTensor, FlexTensor);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = consume(grads, &ops);
        let (x, gamma, statistics) = &ops.state;
        let shape = x.layout().shape().clone();
        let (x, gamma, statistics, dy) = (slice(x), slice(gamma), slice(statistics), slice(&gradient));
        let d = gamma.len();
        if wants(&ops, 0) {
            let mut dx = buffer(x.len());
            input_gradient(x, gamma, statistics, dy, &mut dx);
            register(grads, &ops, 0, || primitive(dx, [x.len()]).reshape(shape));
        }
        if wants(&ops, 1) || wants(&ops, 2) {
            let (mut dgamma, mut dbeta) = (vec![0.0f64; d], vec![0.0f64; d]);
            let (mut block_gamma, mut block_beta) = (vec![0.0f32; d], vec![0.0f32; d]);
            let size = (SUM_ROWS * d).max(1);
            for ((x, dy), statistics) in x.chunks(size).zip(dy.chunks(size)).zip(statistics.chunks(2 * SUM_ROWS)) {
                block_gamma.fill(0.0);
                block_beta.fill(0.0);
                block_sums(x, statistics, dy, &mut block_gamma, &mut block_beta);
                add_to_totals(&mut dgamma, &block_gamma);
                add_to_totals(&mut dbeta, &block_beta);
            }
            let narrow = |totals: Vec<f64>| totals.into_iter().map(|total| total as f32).collect();
            register(grads, &ops, 1, || primitive(narrow(dgamma), [d]));
            register(grads, &ops, 2, || primitive(narrow(dbeta), [d]));
        }
    }
}

vectorized! {
    /// Normalises the rows and writes mean and rstd of each.
    fn forward(x: &[f32], gamma: &[f32], beta: &[f32], eps: f32, y: &mut [f32], statistics: &mut [f32]) {
        let d = gamma.len();
        if d == 0 {
            return;
        }
        let beta = &beta[..d];
        for ((x, y), kept) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(statistics.chunks_exact_mut(2)) {
            let mean = reduce(x, x, x, |x, _, _| x) / d as f32;
            let var = reduce(x, x, x, |x, _, _| (x - mean) * (x - mean)) / d as f32;
            let rstd = 1.0 / (var + eps).sqrt();
            let (x, y) = (&x[..d], &mut y[..d]);
            for i in 0..d {
                y[i] = mul_add::<FMA>((x[i] - mean) * rstd, gamma[i], beta[i]);
            }
            (kept[0], kept[1]) = (mean, rstd);
        }
    }

    /// `dx = rstd (dy gamma - mean(dy gamma) - xhat mean(dy gamma xhat))`
    fn input_gradient(x: &[f32], gamma: &[f32], statistics: &[f32], dy: &[f32], dx: &mut [f32]) {
        let d = gamma.len();
        if d == 0 {
            return;
        }
        let rows = x.chunks_exact(d).zip(dy.chunks_exact(d)).zip(dx.chunks_exact_mut(d));
        for (((x, dy), dx), kept) in rows.zip(statistics.chunks_exact(2)) {
            let (mean, rstd) = (kept[0], kept[1]);
            let (x, dy, dx) = (&x[..d], &dy[..d], &mut dx[..d]);
            let shift = reduce(dy, gamma, gamma, |dy, gamma, _| dy * gamma) / d as f32;
            let slope = reduce(dy, gamma, x, |dy, gamma, x| dy * gamma * (x - mean)) * rstd * rstd / d as f32;
            for i in 0..d {
                dx[i] = rstd * mul_add::<FMA>(mean - x[i], slope, mul_add::<FMA>(dy[i], gamma[i], -shift));
            }
        }
    }

    /// Adds the sums of `dy xhat` and `dy` over a block of rows.
    fn block_sums(x: &[f32], statistics: &[f32], dy: &[f32], dgamma: &mut [f32], dbeta: &mut [f32]) {
        let d = dgamma.len();
        let dbeta = &mut dbeta[..d];
        for ((x, dy), kept) in x.chunks_exact(d).zip(dy.chunks_exact(d)).zip(statistics.chunks_exact(2)) {
            let (mean, rstd) = (kept[0], kept[1]);
            let (x, dy) = (&x[..d], &dy[..d]);
            for i in 0..d {
                dgamma[i] = mul_add::<FMA>(dy[i], (x[i] - mean) * rstd, dgamma[i]);
                dbeta[i] += dy[i];
            }
        }
    }
}

/// The same by burn's operations.
fn plain<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, beta: Tensor<1>, eps: f64) -> Tensor<D> {
    burn::tensor::module::layer_norm(x, gamma, Some(beta), eps)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::testing::{assert_close, assert_same_bits, flat, flatten, gradients, probe, values, wide};
    use super::*;

    const EPS: f64 = 1e-6;

    fn inputs(rows: usize, d: usize, offset: f32) -> [Vec<f32>; 3] {
        let x = values(rows * d, 1).into_iter().map(|x| 2.0 * x + offset).collect();
        [x, values(d, 2), values(d, 3)]
    }

    fn ours(t: &[Tensor<1>], rows: usize, d: usize) -> Tensor<1> {
        flatten(layer_norm(t[0].clone().reshape([rows, 1, d]), t[1].clone(), t[2].clone(), EPS))
    }

    fn definition(inputs: &[Vec<f32>; 3], rows: usize, d: usize) -> Vec<Vec<f64>> {
        let [x, gamma, beta] = inputs.each_ref().map(|values| wide(values));
        let dy = wide(&probe(x.len()));
        let (mut y, mut dx, mut dgamma, mut dbeta) = (dy.clone(), dy.clone(), vec![0.0; d], vec![0.0; d]);
        let n = d as f64;
        for r in 0..rows {
            let x = &x[r * d..(r + 1) * d];
            let mean = x.iter().sum::<f64>() / n;
            let rstd = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n + EPS).sqrt();
            let xhat: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
            let g: Vec<f64> = (0..d).map(|i| dy[r * d + i] * gamma[i]).collect();
            let (shift, slope) = (g.iter().sum::<f64>() / n, g.iter().zip(&xhat).map(|(g, x)| g * x).sum::<f64>() / n);
            for i in 0..d {
                y[r * d + i] = gamma[i] * xhat[i] + beta[i];
                dx[r * d + i] = rstd * (g[i] - shift - xhat[i] * slope);
                dgamma[i] += dy[r * d + i] * xhat[i];
                dbeta[i] += dy[r * d + i];
            }
        }
        vec![y, dx, dgamma, dbeta]
    }

    #[test]
    fn against_float64_and_burn() {
        let mut worst = 0.0f64;
        for (rows, d, offset) in [(1, 5, 0.0), (7, 31, 0.0), (300, 192, 1.0), (129, 33, 0.0), (20, 768, 3.0)] {
            let inputs = inputs(rows, d, offset);
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            let found = gradients(&leaves, |t| ours(t, rows, d));
            let what = format!("{rows} rows of {d}");
            worst = worst.max(assert_close(&what, &found, &definition(&inputs, rows, d), 2e-6));
            let burns = gradients(&leaves, |t| {
                flatten(plain(t[0].clone().reshape([rows, 1, d]), t[1].clone(), t[2].clone(), EPS))
            });
            assert_close("against burn", &found, &burns.iter().map(|v| wide(v)).collect::<Vec<_>>(), 1e-5);
        }
        eprintln!("layer norm: worst {worst:.1e}");
    }

    #[test]
    fn same_bits_however_called() {
        for (rows, d) in [(1, 1), (300, 192), (129, 33)] {
            let inputs = inputs(rows, d, 0.5);
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            assert_same_bits(&leaves, |t| ours(t, rows, d));
        }
    }

    #[test]
    fn nothing_in_nothing_out() {
        let device = Device::flex();
        let one = || flat(&[1.0, 1.0], &device);
        assert_eq!(layer_norm(Tensor::<2>::zeros([0, 2], &device), one(), one(), EPS).dims(), [0, 2]);
    }
}
