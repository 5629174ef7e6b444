//! Self-attention over packed queries, keys and values.
//!
//! Per image and head, with `Q`, `K`, `V` the head's columns of the packed tensor (`n` tokens of `h` values) and `s = 1 / sqrt(h)`,
//!
//! ```text
//! P = softmax(s Q K^T)        O = P V
//!
//! dV = P^T dO        dP = dO V^T        dS = s P (dP - rowsum(dO O))        dQ = dS K        dK = dS^T Q
//! ```
//!
//! A head's columns are copied to the cache (transposed where a product wants it) and its results from there, which costs `n h` moves
//! for `n n h` products; no permuted copy of a whole tensor is made, and one or two `n x n` matrices are alive at a time. `P` is not kept: the backward pass rebuilds it, bit by bit, from the scores' maximum and the inverse sum of each row.
//! `rowsum(dO O)` equals the softmax gradient's `rowsum(dP P)` (Dao et al., <https://arxiv.org/abs/2205.14135>, appendix B).

use std::ops::Range;

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor, activation};

use super::autocast;
use super::bridge::{Operand, consume, primitive, record, register, slice};
use super::gemm::{Matrix, matmul, transpose};
use super::memory::{buffer, work_area};
use super::simd::{LANES, exp, mul_add, reduce, vectorized};

/// Attends within each image. `[batch, n, 3 * d]` (queries, keys, values; heads in order within each) -> `[batch, n, d]`
///
/// # Panics
/// Panics if the last dimension is not `3 * heads` times something.
#[must_use]
pub fn attention(qkv: Tensor<3>, heads: usize) -> Tensor<3> {
    if let Some(half) = autocast::active() {
        let qkv = half.enter(qkv);
        return half.leave(autocast::off(|| attention(qkv, heads)));
    }
    let [batch, tokens, packed] = qkv.dims();
    assert!(
        heads > 0 && packed.is_multiple_of(3 * heads),
        "{packed} values are not queries, keys and values of {heads} heads"
    );
    let op = Attention { batch, tokens, heads, size: packed / 3 / heads };
    let Some(operand) = Operand::new(qkv.clone(), qkv.is_autodiff()) else {
        return plain(qkv, heads);
    };
    let (output, statistics) = op.forward(operand.slice());
    let packed = operand.share();
    let shape = [batch, tokens, op.width()];
    record(op, [operand], primitive(output, shape), |output| {
        let len = statistics.len();
        (packed, output.clone(), primitive(statistics, [len]))
    })
}

/// Largest finite value of IEEE half precision.
const FP16_MAX: f32 = 65504.0;

#[derive(Clone, Copy, Debug)]
struct Attention {
    batch: usize,
    tokens: usize,
    heads: usize,
    /// Values per head.
    size: usize,
}

impl Attention {
    fn width(&self) -> usize {
        self.heads * self.size
    }

    fn scale(&self) -> f32 {
        (1.0 / (self.size.max(1) as f64).sqrt()) as f32
    }

    /// Calls `each` for each head of each image.
    fn heads(&self) -> impl Iterator<Item = Head> {
        let op = *self;
        (0..op.batch).flat_map(move |image| {
            (0..op.heads).map(move |head| {
                let packed = image * op.tokens * 3 * op.width() + head * op.size;
                let rows = (image * op.heads + head) * op.tokens;
                Head {
                    q: packed,
                    k: packed + op.width(),
                    v: packed + 2 * op.width(),
                    output: image * op.tokens * op.width() + head * op.size,
                    statistics: 2 * rows..2 * (rows + op.tokens),
                }
            })
        })
    }

    /// Returns the output and, for each row of scores, the scaled maximum and the inverse sum.
    fn forward(&self, qkv: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (n, size, width) = (self.tokens, self.size, self.width());
        let mut output = buffer(self.batch * n * width);
        let mut statistics = buffer(2 * self.batch * self.heads * n);
        if size == 0 || n == 0 {
            statistics.fill(0.0);
            return (output, statistics);
        }
        let (mut k, mut scores) = (work_area(n * size), work_area(n * n));
        for head in self.heads() {
            let q = Matrix::with_stride(&qkv[head.q..], n, size, 3 * width);
            let v = Matrix::with_stride(&qkv[head.v..], n, size, 3 * width);
            transpose(&qkv[head.k..], 3 * width, size, &mut k, n);
            matmul(&mut scores, n, q, Matrix::new(&k, size, n), false);
            softmax(&mut scores, self.scale(), &mut statistics[head.statistics.clone()]);
            matmul(&mut output[head.output..], width, Matrix::new(&scores, n, n), v, false);
        }
        (output, statistics)
    }

    fn backward(&self, qkv: &[f32], output: &[f32], statistics: &[f32], dy: &[f32]) -> Vec<f32> {
        let (n, size, width) = (self.tokens, self.size, self.width());
        let mut gradient = buffer(qkv.len());
        if size == 0 || n == 0 {
            return gradient;
        }
        let mut turned = work_area(n * size);
        let (mut probs, mut scores) = (work_area(n * n), work_area(n * n));
        for head in self.heads() {
            let [q, k] = [head.q, head.k].map(|at| Matrix::with_stride(&qkv[at..], n, size, 3 * width));
            let dout = Matrix::with_stride(&dy[head.output..], n, size, width);

            transpose(&qkv[head.k..], 3 * width, size, &mut turned, n);
            matmul(&mut probs, n, q, Matrix::new(&turned, size, n), false);
            softmax_again(&mut probs, self.scale(), &statistics[head.statistics.clone()]);
            matmul(&mut gradient[head.v..], 3 * width, Matrix::new(&probs, n, n).t(), dout, false);

            transpose(&qkv[head.v..], 3 * width, size, &mut turned, n);
            matmul(&mut scores, n, dout, Matrix::new(&turned, size, n), false);
            let (dy, output) = (&dy[head.output..], &output[head.output..]);
            softmax_gradient(&mut scores, &probs, dy, output, size, width, self.scale());
            matmul(&mut gradient[head.q..], 3 * width, Matrix::new(&scores, n, n), k, false);
            matmul(&mut gradient[head.k..], 3 * width, Matrix::new(&scores, n, n).t(), q, false);
        }
        gradient
    }
}

/// Where a head's values start.
struct Head {
    q: usize,
    k: usize,
    v: usize,
    output: usize,
    statistics: Range<usize>,
}

impl Backward<Flex, 1> for Attention {
    /// Packed input, output, and the maximum and inverse sum of each row of scores.
    type State = (FlexTensor, FlexTensor, FlexTensor);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = consume(grads, &ops);
        let (qkv, output, statistics) = &ops.state;
        let shape = [self.batch, self.tokens, 3 * self.width()];
        let values = Self::backward(&self, slice(qkv), slice(output), slice(statistics), slice(&gradient));
        register(grads, &ops, 0, || primitive(values, shape));
    }
}

vectorized! {
    /// Turns rows of scores into probabilities; keeps the scaled maximum and the inverse sum of each row.
    fn softmax(scores: &mut [f32], scale: f32, statistics: &mut [f32]) {
        let rows = statistics.len() / 2;
        let n = scores.len() / rows;
        for (row, kept) in scores.chunks_exact_mut(n).zip(statistics.chunks_exact_mut(2)) {
            let max = maximum(row) * scale;
            for value in row.iter_mut() {
                *value = exp::<FMA>(mul_add::<FMA>(*value, scale, -max));
            }
            let inverse = 1.0 / reduce(row, row, row, |x, _, _| x);
            for value in row.iter_mut() {
                *value *= inverse;
            }
            (kept[0], kept[1]) = (max, inverse);
        }
    }

    /// Turns the same scores into the same probabilities.
    fn softmax_again(scores: &mut [f32], scale: f32, statistics: &[f32]) {
        let n = scores.len() / (statistics.len() / 2);
        for (row, kept) in scores.chunks_exact_mut(n).zip(statistics.chunks_exact(2)) {
            let (max, inverse) = (kept[0], kept[1]);
            for value in row.iter_mut() {
                *value = exp::<FMA>(mul_add::<FMA>(*value, scale, -max)) * inverse;
            }
        }
    }

    /// `dP -> dS = s P (dP - rowsum(dO O))`, in place
    fn softmax_gradient(
        grad: &mut [f32], probs: &[f32], dy: &[f32], output: &[f32], size: usize, stride: usize, scale: f32,
    ) {
        let n = probs.len().isqrt();
        for (r, (grad, probs)) in grad.chunks_exact_mut(n).zip(probs.chunks_exact(n)).enumerate() {
            let (dy, output) = (&dy[r * stride..][..size], &output[r * stride..][..size]);
            let mean = reduce(dy, output, output, |dy, output, _| dy * output);
            for (grad, prob) in grad.iter_mut().zip(probs) {
                *grad = *prob * (*grad - mean) * scale;
            }
        }
    }
}

/// Returns the largest value; skips NaN.
#[inline(always)]
fn maximum(row: &[f32]) -> f32 {
    let mut lanes = [f32::MIN; LANES];
    let (whole, rest) = row.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    let larger = |max: f32, value: &f32| if *value > max { *value } else { max };
    rest.iter().fold(lanes.iter().fold(f32::MIN, larger), larger)
}

/// The same by burn's operations.
#[expect(clippy::needless_pass_by_value, reason = "the signature of the operation it stands in for")]
fn plain(qkv: Tensor<3>, heads: usize) -> Tensor<3> {
    let [batch, tokens, packed] = qkv.dims();
    let (width, size) = (packed / 3, packed / 3 / heads);
    let part = |i: usize| {
        let part = qkv.clone().slice([0..batch, 0..tokens, i * width..(i + 1) * width]);
        part.reshape([batch, tokens, heads, size]).swap_dims(1, 2)
    };
    let dtype = qkv.dtype();
    let queries = part(0) * (1.0 / (size as f64).sqrt());
    let scores = queries.matmul(part(1).swap_dims(2, 3));
    let weights = if dtype == DType::F32 || dtype == DType::F64 {
        activation::softmax(scores, 3)
    } else {
        // in f32; a score beyond what fp16 holds counts as the largest that it does, where a softmax has one weight of 1 anyway
        let scores = scores.cast(DType::F32).clamp(-FP16_MAX, FP16_MAX);
        activation::softmax(scores, 3).cast(dtype)
    };
    weights.matmul(part(2)).swap_dims(1, 2).reshape([batch, tokens, width])
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::testing::{assert_close, assert_same_bits, flat, flatten, gradients, probe, read, values, wide};
    use super::*;

    const CASES: [[usize; 4]; 5] = [[1, 1, 1, 1], [2, 5, 3, 4], [2, 65, 3, 32], [1, 33, 2, 7], [1, 70, 1, 64]];

    fn input([batch, tokens, heads, size]: [usize; 4]) -> Vec<f32> {
        values(batch * tokens * 3 * heads * size, 1).into_iter().map(|x| 3.0 * x).collect()
    }

    fn ours(t: &[Tensor<1>], [batch, tokens, heads, size]: [usize; 4]) -> Tensor<1> {
        flatten(attention(t[0].clone().reshape([batch, tokens, 3 * heads * size]), heads))
    }

    fn definition(qkv: &[f32], [batch, n, heads, size]: [usize; 4]) -> Vec<Vec<f64>> {
        let (qkv, width) = (wide(qkv), heads * size);
        let mut output = vec![0.0; batch * n * width];
        let dy = wide(&probe(output.len()));
        let mut gradient = vec![0.0; qkv.len()];
        let scale = 1.0 / (size as f64).sqrt();
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let at = |part: usize, t: usize, i: usize| ((b * n + t) * 3 + part) * width + h * size + i;
            let out = |t: usize, i: usize| (b * n + t) * width + h * size + i;
            for t in 0..n {
                let scores: Vec<f64> = (0..n)
                    .map(|u| scale * (0..size).map(|i| qkv[at(0, t, i)] * qkv[at(1, u, i)]).sum::<f64>())
                    .collect();
                let max = scores.iter().fold(f64::MIN, |max, s| max.max(*s));
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
                let dp: Vec<f64> =
                    (0..n).map(|u| (0..size).map(|i| dy[out(t, i)] * qkv[at(2, u, i)]).sum::<f64>()).collect();
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for u in 0..n {
                    let ds = scale * p[u] * (dp[u] - mean);
                    for i in 0..size {
                        output[out(t, i)] += p[u] * qkv[at(2, u, i)];
                        gradient[at(0, t, i)] += ds * qkv[at(1, u, i)];
                        gradient[at(1, u, i)] += ds * qkv[at(0, t, i)];
                        gradient[at(2, u, i)] += p[u] * dy[out(t, i)];
                    }
                }
            }
        }
        vec![output, gradient]
    }

    #[test]
    fn against_float64_and_burn() {
        let mut worst = 0.0f64;
        for case in CASES {
            let qkv = input(case);
            let found = gradients(&[&qkv], |t| ours(t, case));
            worst = worst.max(assert_close(&format!("{case:?}"), &found, &definition(&qkv, case), 3e-6));
            let [batch, tokens, heads, size] = case;
            let burns =
                gradients(&[&qkv], |t| flatten(plain(t[0].clone().reshape([batch, tokens, 3 * heads * size]), heads)));
            assert_close("against burn", &found, &burns.iter().map(|v| wide(v)).collect::<Vec<_>>(), 1e-5);
        }
        eprintln!("attention: worst {worst:.1e}");
    }

    #[test]
    fn same_bits_however_called() {
        for case in CASES {
            assert_same_bits(&[&input(case)], |t| ours(t, case));
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let case = [1, 40, 2, 16];
        let qkv: Vec<f32> = input(case).iter().map(|x| x * 10.0).collect();
        let found = gradients(&[&qkv], |t| ours(t, case));
        assert_close("large scores", &found, &definition(&qkv, case), 1e-4);
    }

    #[test]
    fn nothing_in_nothing_out() {
        let device = Device::flex();
        for shape in [[0, 5, 12], [2, 0, 12], [2, 5, 0]] {
            let y = attention(Tensor::<3>::zeros(shape, &device), 2);
            assert_eq!(y.dims(), [shape[0], shape[1], shape[2] / 3]);
        }
    }

    #[test]
    fn views_are_as_good_as_copies() {
        let device = Device::flex();
        let view = flat(&values(2 * 7 * 30, 1), &device).reshape([2, 7, 30]).slice([0..2, 1..6, 4..28]);
        let copy = flat(&read(view.clone()), &device).reshape([2, 5, 24]);
        assert_eq!(read(attention(view, 4)), read(attention(copy, 4)));
    }
}
