//! Batch norm over channels-last activations, with the residual addition and the rectifier that follow it in a residual network.
//!
//! Over the `n` rows of a micro-batch, per channel, with `xhat = (x - mean) rstd` and `rstd = 1 / sqrt(var + eps)` (`var` with
//! divisor `n`),
//!
//! ```text
//! y = relu(gamma xhat + beta + residual)
//!
//! g = dy where y > 0          dresidual = g        dbeta = sum g        dgamma = sum g xhat
//! dx = gamma rstd (g - dbeta / n - xhat dgamma / n)          evaluation: dx = gamma rstd g
//! ```
//!
//! Reductions go in blocks of rows (in `f32`, top to bottom), blocks are merged in `f64` in order (means and squared
//! deviations by Chan's formula), so neither many rows nor a mean far from zero costs digits.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use burn::tensor::activation;

use super::bridge::{self, Operand, consume, primitive, record, register, slice, wants};
use super::memory::buffer;
use super::rebuild::Rebuild;
use super::simd::{add_to_totals, mul_add, vectorized};

/// What batch norm gives while training.
#[derive(Debug)]
pub struct BatchNorm<const D: usize> {
    /// The normalised (added, rectified) activations.
    pub output: Tensor<D>,
    /// Mean of each channel over this micro-batch; outside autodiff. `[channels]`
    pub mean: Tensor<1>,
    /// Unbiased variance of each channel, what torch folds into the running variance; outside autodiff. `[channels]`
    pub var: Tensor<1>,
}

/// Normalises by the statistics of the batch; adds `residual` and rectifies if asked to. `[.., channels]` -> the same
///
/// # Panics
/// Panics if there are fewer than two rows (no variance), or shapes do not fit together.
#[must_use]
pub fn batch_norm_train<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    eps: f64,
    residual: Option<Tensor<D>>,
    relu: bool,
) -> BatchNorm<D> {
    let (rows, channels) = check(&x, &[&gamma, &beta], residual.as_ref());
    assert!(rows > 1 || channels == 0, "batch norm needs more than one value per channel while training, found {rows}");
    let Some(operands) = Operands::new(&x, &gamma, &beta, residual.as_ref()) else {
        return plain_train(x, gamma, beta, eps, residual, relu);
    };
    let (op, mean, var) = Normalization::by_batch(operands.x.slice(), channels, eps, relu);
    BatchNorm { output: normalize(operands, x.dims(), op, None), mean, var }
}

/// [`batch_norm_train`] rectified and without residual, for a convolution that is handed what builds its input again
/// ([`super::conv2d_after_norm`]): neither keeps the activations between them.
///
/// # Panics
/// As [`batch_norm_train`].
#[must_use]
pub fn batch_norm_rebuilt(
    x: Tensor<4>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    eps: f64,
) -> (BatchNorm<4>, Option<Rebuild>) {
    let (rows, channels) = check(&x, &[&gamma, &beta], None);
    assert!(rows > 1 || channels == 0, "batch norm needs more than one value per channel while training, found {rows}");
    let Some(operands) = Operands::new(&x, &gamma, &beta, None) else {
        return (plain_train(x, gamma, beta, eps, None, true), None);
    };
    let (op, mean, var) = Normalization::by_batch(operands.x.slice(), channels, eps, true);
    let scale = op.scale(operands.gamma.slice());
    let rebuild = Rebuild::new(operands.x.share(), op.mean.clone(), scale, operands.beta.share());
    let output = normalize(operands, x.dims(), op, Some(rebuild.clone()));
    (BatchNorm { output, mean, var }, Some(rebuild))
}

/// Normalises by given statistics; adds `residual` and rectifies if asked to. `[.., channels]` -> the same
///
/// The statistics are constants: no gradient flows into them.
///
/// # Panics
/// Panics if shapes do not fit together.
#[must_use]
#[expect(clippy::too_many_arguments)]
pub fn batch_norm_eval<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    running_mean: Tensor<1>,
    running_var: Tensor<1>,
    eps: f64,
    residual: Option<Tensor<D>>,
    relu: bool,
) -> Tensor<D> {
    check(&x, &[&gamma, &beta, &running_mean, &running_var], residual.as_ref());
    let (mean, var) = (running_mean.without_autodiff(), running_var.without_autodiff());
    let operands = || {
        let (mean, var) = (Operand::new(mean.clone(), false)?, Operand::new(var.clone(), false)?);
        Some((Operands::new(&x, &gamma, &beta, residual.as_ref())?, mean, var))
    };
    let Some((operands, mean, var)) = operands() else {
        return plain(x, gamma, beta, mean, var, eps, residual, relu);
    };
    let rstd = var.slice().iter().map(|var| (1.0 / (f64::from(*var) + eps).sqrt()) as f32).collect();
    normalize(operands, x.dims(), Normalization { mean: mean.slice().to_vec(), rstd, relu, batch: false }, None)
}

/// Checks shapes and returns rows and channels.
fn check<const D: usize>(x: &Tensor<D>, vectors: &[&Tensor<1>], residual: Option<&Tensor<D>>) -> (usize, usize) {
    let shape = x.dims();
    let channels = shape[D - 1];
    for vector in vectors {
        assert_eq!(vector.dims(), [channels], "batch norm over {channels} channels with a vector of another length");
    }
    if let Some(residual) = residual {
        assert_eq!(residual.dims(), shape, "residual and activations differ in shape");
    }
    (shape[..D - 1].iter().product(), channels)
}

/// The differentiable inputs.
struct Operands {
    x: Operand,
    gamma: Operand,
    beta: Operand,
    residual: Option<Operand>,
}

impl Operands {
    fn new<const D: usize>(
        x: &Tensor<D>,
        gamma: &Tensor<1>,
        beta: &Tensor<1>,
        residual: Option<&Tensor<D>>,
    ) -> Option<Self> {
        let graph =
            x.is_autodiff() || gamma.is_autodiff() || beta.is_autodiff() || residual.is_some_and(Tensor::is_autodiff);
        Some(Self {
            x: Operand::new(x.clone(), graph)?,
            gamma: Operand::new(gamma.clone(), graph)?,
            beta: Operand::new(beta.clone(), graph)?,
            residual: match residual {
                Some(residual) => Some(Operand::new(residual.clone(), graph)?),
                None => None,
            },
        })
    }
}

/// Backward pass; the parents are activations, gamma, beta and, if there is one, the residual.
#[derive(Debug)]
struct Normalization {
    mean: Vec<f32>,
    rstd: Vec<f32>,
    relu: bool,
    /// Whether mean and rstd are the batch's own, so that they depend on the input.
    batch: bool,
}

impl Normalization {
    /// Takes the statistics of a batch; returns also what [`BatchNorm`] tells of them.
    fn by_batch(x: &[f32], channels: usize, eps: f64, relu: bool) -> (Self, Tensor<1>, Tensor<1>) {
        let rows = (x.len() / channels.max(1)) as f64;
        let (mean, var) = statistics(x, channels);
        let rstd = var.iter().map(|var| (1.0 / (var + eps).sqrt()) as f32).collect();
        let mean: Vec<f32> = mean.into_iter().map(|mean| mean as f32).collect();
        let var = var.into_iter().map(|var| (var * (rows / (rows - 1.0))) as f32).collect();
        let told = bridge::plain(mean.clone(), [channels]);
        (Self { mean, rstd, relu, batch: true }, told, bridge::plain(var, [channels]))
    }

    fn scale(&self, gamma: &[f32]) -> Vec<f32> {
        gamma.iter().zip(&self.rstd).map(|(gamma, rstd)| gamma * rstd).collect()
    }
}

/// What the backward pass has of the output.
#[derive(Clone, Debug)]
enum Output {
    /// Nothing: it is not rectified.
    None,
    Kept(FlexTensor),
    Rebuilt(Rebuild),
}

fn normalize<const D: usize>(
    operands: Operands,
    shape: [usize; D],
    op: Normalization,
    rebuild: Option<Rebuild>,
) -> Tensor<D> {
    let Operands { x, gamma, beta, residual } = operands;
    let mut y = buffer(x.slice().len());
    let scale = op.scale(gamma.slice());
    apply(x.slice(), &op.mean, &scale, beta.slice(), residual.as_ref().map(Operand::slice), op.relu, &mut y);
    let y = primitive(y, shape);
    let (values, gammas, relu) = (x.share(), gamma.share(), op.relu);
    let output = |y: &FlexTensor| match rebuild {
        Some(rebuild) => Output::Rebuilt(rebuild),
        None if relu => Output::Kept(y.clone()),
        None => Output::None,
    };
    let state = |y: &FlexTensor| (values, gammas, output(y));
    match residual {
        Some(residual) => record(op, [x, gamma, beta, residual], y, state),
        None => record(op, [x, gamma, beta], y, state),
    }
}

impl<const N: usize> Backward<Flex, N> for Normalization {
    /// Activations, gamma and, if rectified, the output.
    type State = (FlexTensor, FlexTensor, Output);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Self { mean, rstd, batch, .. } = self;
        let gradient = consume(grads, &ops);
        let (values, gamma, output) = &ops.state;
        let rebuilt = if let Output::Rebuilt(rebuild) = output { Some(rebuild.take()) } else { None };
        let y = match (&rebuilt, output) {
            (Some(values), _) => Some(values.as_slice()),
            (None, Output::Kept(y)) => Some(slice(y)),
            _ => None,
        };
        let (x, gamma, mut dy) = (slice(values), slice(gamma), slice(&gradient));
        let shape = values.layout().shape().clone();
        let like_x = |values: Vec<f32>| primitive(values, [x.len()]).reshape(shape.clone());

        // The residual's gradient is dy behind the rectifier; once it is there, it serves the rest.
        let mut masked = None;
        let mut mask = y;
        if wants(&ops, 3)
            && let Some(y) = y
        {
            let mut g = buffer(dy.len());
            rectify(dy, y, &mut g);
            masked = Some(g);
            mask = None;
        }
        if let Some(g) = &masked {
            dy = g;
        }
        let (dbeta, dgamma) = sums(x, dy, mask, &mean, &rstd);
        if wants(&ops, 0) {
            let n = (x.len() / mean.len().max(1)) as f32;
            let scale: Vec<f32> = gamma.iter().zip(&rstd).map(|(gamma, rstd)| gamma * rstd).collect();
            let (shift, slope) = if batch {
                let slope = dgamma.iter().zip(&rstd).map(|(dgamma, rstd)| dgamma * rstd / n).collect();
                (dbeta.iter().map(|dbeta| dbeta / n).collect(), slope)
            } else {
                (vec![0.0; scale.len()], vec![0.0; scale.len()])
            };
            let mut dx = buffer(x.len());
            input_gradient(x, dy, mask, &mean, &scale, &shift, &slope, &mut dx);
            register(grads, &ops, 0, || like_x(dx));
        }
        let channels = mean.len();
        register(grads, &ops, 1, || primitive(dgamma, [channels]));
        register(grads, &ops, 2, || primitive(dbeta, [channels]));
        register(grads, &ops, 3, || masked.map_or_else(|| gradient.clone(), like_x));
    }
}

/// Rows per block of the reductions: few enough that a block stays in the cache between two passes over it and that
/// `f32` sums stay exact to some digits, many enough that merging does not show.
fn block_rows(channels: usize) -> usize {
    (16384 / channels.max(1)).clamp(32, 128)
}

/// Returns mean and variance (divisor `n`) of each channel.
fn statistics(x: &[f32], channels: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut mean, mut squares) = (vec![0.0f64; channels], vec![0.0f64; channels]);
    let (mut block_mean, mut block_squares) = (vec![0.0f32; channels], vec![0.0f32; channels]);
    let mut rows = 0.0;
    for block in x.chunks((block_rows(channels) * channels).max(1)) {
        let block_rows = (block.len() / channels) as f64;
        block_statistics(block, &mut block_mean, &mut block_squares);
        let total = rows + block_rows;
        let (gain, cross) = (block_rows / total, rows * block_rows / total);
        for c in 0..channels {
            let delta = f64::from(block_mean[c]) - mean[c];
            mean[c] += delta * gain;
            squares[c] += f64::from(block_squares[c]) + delta * delta * cross;
        }
        rows = total;
    }
    let var = squares.into_iter().map(|squares| squares / f64::max(rows, 1.0)).collect();
    (mean, var)
}

/// Returns `dbeta` and `dgamma`: per channel the sums of `g` and of `g xhat`, where `g` is `dy`, masked by `y > 0` if given.
fn sums(x: &[f32], dy: &[f32], y: Option<&[f32]>, mean: &[f32], rstd: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let channels = mean.len();
    let size = (block_rows(channels) * channels).max(1);
    let (mut dbeta, mut dgamma) = (vec![0.0f64; channels], vec![0.0f64; channels]);
    let (mut block_beta, mut block_gamma) = (vec![0.0f32; channels], vec![0.0f32; channels]);
    for (i, (x, dy)) in x.chunks(size).zip(dy.chunks(size)).enumerate() {
        let y = y.map(|y| &y[i * size..][..x.len()]);
        block_sums(x, dy, y, mean, &mut block_beta, &mut block_gamma);
        add_to_totals(&mut dbeta, &block_beta);
        add_to_totals(&mut dgamma, &block_gamma);
    }
    let dgamma = dgamma.iter().zip(rstd).map(|(sum, rstd)| (sum * f64::from(*rstd)) as f32).collect();
    (dbeta.into_iter().map(|sum| sum as f32).collect(), dgamma)
}

vectorized! {
    /// Writes mean and sum of squared deviations from it, per channel, of one block of rows.
    fn block_statistics(block: &[f32], mean: &mut [f32], squares: &mut [f32]) {
        let channels = mean.len();
        let mut first = 0;
        while first < channels {
            first += match channels - first {
                32.. => group_statistics::<FMA, 32>(block, channels, first, mean, squares),
                8..32 => group_statistics::<FMA, 8>(block, channels, first, mean, squares),
                _ => group_statistics::<FMA, 1>(block, channels, first, mean, squares),
            };
        }
    }

    /// `y = relu((x - mean) scale + beta + residual)`
    pub(super) fn apply(
        x: &[f32], mean: &[f32], scale: &[f32], beta: &[f32], residual: Option<&[f32]>, relu: bool, y: &mut [f32],
    ) {
        let channels = mean.len();
        if channels == 0 {
            return;
        }
        let (scale, beta) = (&scale[..channels], &beta[..channels]);
        let floor = if relu { 0.0 } else { f32::NEG_INFINITY };
        let rows = x.chunks_exact(channels).zip(y.chunks_exact_mut(channels));
        match residual {
            Some(residual) => {
                for ((x, y), residual) in rows.zip(residual.chunks_exact(channels)) {
                    let (x, y, residual) = (&x[..channels], &mut y[..channels], &residual[..channels]);
                    for c in 0..channels {
                        let value = mul_add::<FMA>(x[c] - mean[c], scale[c], beta[c]) + residual[c];
                        y[c] = at_least(value, floor);
                    }
                }
            }
            None => {
                for (x, y) in rows {
                    let (x, y) = (&x[..channels], &mut y[..channels]);
                    for c in 0..channels {
                        y[c] = at_least(mul_add::<FMA>(x[c] - mean[c], scale[c], beta[c]), floor);
                    }
                }
            }
        }
    }

    /// `g = dy where y > 0`
    fn rectify(dy: &[f32], y: &[f32], g: &mut [f32]) {
        for ((g, dy), y) in g.iter_mut().zip(dy).zip(y) {
            *g = if *y > 0.0 { *dy } else { 0.0 };
        }
    }

    /// Writes the sums of `g` and of `g (x - mean)` over a block of rows, where `g` is `dy`, masked by `y > 0` if given.
    fn block_sums(x: &[f32], dy: &[f32], y: Option<&[f32]>, mean: &[f32], beta: &mut [f32], gamma: &mut [f32]) {
        let channels = mean.len();
        let mut first = 0;
        while first < channels {
            first += match channels - first {
                32.. => group_sums::<FMA, 32>(x, dy, y, mean, first, beta, gamma),
                8..32 => group_sums::<FMA, 8>(x, dy, y, mean, first, beta, gamma),
                _ => group_sums::<FMA, 1>(x, dy, y, mean, first, beta, gamma),
            };
        }
    }

    /// `dx = scale (g - shift - (x - mean) slope)`
    fn input_gradient(
        x: &[f32], dy: &[f32], y: Option<&[f32]>, mean: &[f32], scale: &[f32], shift: &[f32], slope: &[f32],
        dx: &mut [f32],
    ) {
        let channels = mean.len();
        if channels == 0 {
            return;
        }
        let (scale, shift, slope) = (&scale[..channels], &shift[..channels], &slope[..channels]);
        let rows = x.chunks_exact(channels).zip(dy.chunks_exact(channels)).zip(dx.chunks_exact_mut(channels));
        match y {
            Some(y) => {
                for (((x, dy), dx), y) in rows.zip(y.chunks_exact(channels)) {
                    let (x, dy, dx, y) = (&x[..channels], &dy[..channels], &mut dx[..channels], &y[..channels]);
                    for c in 0..channels {
                        let g = if y[c] > 0.0 { dy[c] } else { 0.0 };
                        dx[c] = scale[c] * mul_add::<FMA>(mean[c] - x[c], slope[c], g - shift[c]);
                    }
                }
            }
            None => {
                for ((x, dy), dx) in rows {
                    let (x, dy, dx) = (&x[..channels], &dy[..channels], &mut dx[..channels]);
                    for c in 0..channels {
                        dx[c] = scale[c] * mul_add::<FMA>(mean[c] - x[c], slope[c], dy[c] - shift[c]);
                    }
                }
            }
        }
    }
}

// Channels go in groups of so many that their sums stay in registers. Each channel's order of additions is that of the rows, in any group.

/// [`block_statistics`] of `N` channels from `first`; returns `N`.
#[inline(always)]
fn group_statistics<const FMA: bool, const N: usize>(
    block: &[f32],
    channels: usize,
    first: usize,
    mean: &mut [f32],
    squares: &mut [f32],
) -> usize {
    let rows = block.len() / channels;
    let mut sums = [0.0f32; N];
    for row in 0..rows {
        let values: &[f32; N] = block[row * channels + first..].first_chunk().expect("a group ends within a row");
        for i in 0..N {
            sums[i] += values[i];
        }
    }
    let inverse = 1.0 / rows as f32;
    for sum in &mut sums {
        *sum *= inverse;
    }
    let mut deviations = [0.0f32; N];
    for row in 0..rows {
        let values: &[f32; N] = block[row * channels + first..].first_chunk().expect("a group ends within a row");
        for i in 0..N {
            let deviation = values[i] - sums[i];
            deviations[i] = mul_add::<FMA>(deviation, deviation, deviations[i]);
        }
    }
    mean[first..first + N].copy_from_slice(&sums);
    squares[first..first + N].copy_from_slice(&deviations);
    N
}

/// [`block_sums`] of `N` channels from `first`; returns `N`.
#[inline(always)]
fn group_sums<const FMA: bool, const N: usize>(
    x: &[f32],
    dy: &[f32],
    y: Option<&[f32]>,
    mean: &[f32],
    first: usize,
    beta: &mut [f32],
    gamma: &mut [f32],
) -> usize {
    #[inline(always)]
    fn group<const N: usize>(values: &[f32], at: usize) -> &[f32; N] {
        values[at..].first_chunk().expect("a group ends within a row")
    }
    let channels = mean.len();
    let mean = *group::<N>(mean, first);
    let (mut sums, mut dots) = ([0.0f32; N], [0.0f32; N]);
    for row in 0..x.len() / channels {
        let at = row * channels + first;
        let (x, mut g) = (group::<N>(x, at), *group::<N>(dy, at));
        if let Some(y) = y {
            let y = group::<N>(y, at);
            for i in 0..N {
                g[i] = if y[i] > 0.0 { g[i] } else { 0.0 };
            }
        }
        for i in 0..N {
            sums[i] += g[i];
            dots[i] = mul_add::<FMA>(g[i], x[i] - mean[i], dots[i]);
        }
    }
    beta[first..first + N].copy_from_slice(&sums);
    gamma[first..first + N].copy_from_slice(&dots);
    N
}

/// Returns `value`, or `floor` if it is smaller; NaN stays NaN, so that a diverged network is seen.
#[inline(always)]
fn at_least(value: f32, floor: f32) -> f32 {
    if value < floor { floor } else { value }
}

/// Training by burn's operations.
pub(super) fn plain_train<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    eps: f64,
    residual: Option<Tensor<D>>,
    relu: bool,
) -> BatchNorm<D> {
    let shape = x.dims();
    let channels = shape[D - 1];
    let rows = shape[..D - 1].iter().product::<usize>();
    let x = x.reshape([rows, channels]);
    let mean = x.clone().mean_dim(0);
    let centered = x - mean.clone();
    let var = centered.clone().powf_scalar(2.0).mean_dim(0);
    let normal = centered / (var.clone() + eps).sqrt();
    let y = (normal * gamma.reshape([1, channels]) + beta.reshape([1, channels])).reshape(shape);
    let y = residual.map_or(y.clone(), |residual| y + residual);
    let unbiased = rows as f64 / (rows as f64 - 1.0);
    BatchNorm {
        output: if relu { activation::relu(y) } else { y },
        mean: mean.without_autodiff().reshape([channels]),
        var: var.without_autodiff().reshape([channels]) * unbiased,
    }
}

/// Evaluation by burn's operations.
#[expect(clippy::too_many_arguments)]
pub(super) fn plain<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    mean: Tensor<1>,
    var: Tensor<1>,
    eps: f64,
    residual: Option<Tensor<D>>,
    relu: bool,
) -> Tensor<D> {
    let mut wide = [1; D];
    wide[D - 1] = x.dims()[D - 1];
    let scale = gamma.reshape(wide) / (var.reshape(wide) + eps).sqrt();
    let y = (x - mean.reshape(wide)) * scale + beta.reshape(wide);
    let y = residual.map_or(y.clone(), |residual| y + residual);
    if relu { activation::relu(y) } else { y }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::testing::{
        assert_close, assert_same_bits, error, flat, flatten, gradients, probe, read, values, wide,
    };
    use super::*;

    const EPS: f64 = 1e-5;

    struct Case {
        rows: usize,
        channels: usize,
        residual: bool,
        relu: bool,
        batch: bool,
        offset: f32,
    }

    const CASES: [Case; 8] = [
        Case { rows: 5, channels: 1, residual: false, relu: false, batch: true, offset: 0.0 },
        Case { rows: 600, channels: 48, residual: false, relu: false, batch: true, offset: 0.0 },
        Case { rows: 601, channels: 33, residual: false, relu: true, batch: true, offset: 2.0 },
        Case { rows: 130, channels: 7, residual: true, relu: true, batch: true, offset: 0.0 },
        Case { rows: 97, channels: 512, residual: true, relu: false, batch: true, offset: 0.0 },
        Case { rows: 5000, channels: 64, residual: true, relu: true, batch: true, offset: 100.0 },
        Case { rows: 33, channels: 20, residual: true, relu: true, batch: false, offset: 0.0 },
        Case { rows: 1, channels: 9, residual: false, relu: false, batch: false, offset: 0.0 },
    ];

    impl Case {
        /// Activations, gamma, beta, residual, running mean, running variance.
        fn inputs(&self) -> [Vec<f32>; 6] {
            let n = self.rows * self.channels;
            let x = values(n, 1).into_iter().map(|x| 2.0 * x + self.offset).collect();
            let var = values(self.channels, 6).into_iter().map(|v| v + 1.5).collect();
            let c = self.channels;
            [x, values(c, 2), values(c, 3), values(n, 4), values(c, 5), var]
        }

        fn forward(&self, t: &[Tensor<1>], burns: bool) -> Tensor<1> {
            let shape = [self.rows, 1, self.channels];
            let x = t[0].clone().reshape(shape);
            let (gamma, beta) = (t[1].clone(), t[2].clone());
            let residual = self.residual.then(|| t[3].clone().reshape(shape));
            flatten(if self.batch {
                let run = if burns { plain_train } else { batch_norm_train };
                run(x, gamma, beta, EPS, residual, self.relu).output
            } else {
                let run = if burns { plain } else { batch_norm_eval };
                run(x, gamma, beta, t[4].clone(), t[5].clone(), EPS, residual, self.relu)
            })
        }

        /// Output and the gradients of activations, gamma, beta and residual; the formulas, in float64.
        fn definition(&self, inputs: &[Vec<f32>; 6]) -> Vec<Vec<f64>> {
            let [x, gamma, beta, residual, mean, var] = inputs.each_ref().map(|values| wide(values));
            let (rows, channels) = (self.rows, self.channels);
            let dy = wide(&probe(x.len()));
            let mut out = vec![x.clone(), x.clone(), gamma.clone(), gamma.clone(), x.clone()];
            for c in 0..channels {
                let column = |values: &[f64]| (0..rows).map(|r| values[r * channels + c]).collect::<Vec<_>>();
                let n = rows as f64;
                let (x, mut g) = (column(&x), column(&dy));
                let mean = if self.batch { x.iter().sum::<f64>() / n } else { mean[c] };
                let var = if self.batch { x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n } else { var[c] };
                let rstd = 1.0 / (var + EPS).sqrt();
                let xhat: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
                for r in 0..rows {
                    let mut y = gamma[c] * xhat[r] + beta[c];
                    if self.residual {
                        y += residual[r * channels + c];
                    }
                    if self.relu && y <= 0.0 {
                        (y, g[r]) = (0.0, 0.0);
                    }
                    out[0][r * channels + c] = y;
                    out[4][r * channels + c] = g[r];
                }
                let (sum, dot) = (g.iter().sum::<f64>(), g.iter().zip(&xhat).map(|(g, x)| g * x).sum::<f64>());
                for r in 0..rows {
                    let correction = if self.batch { (sum + xhat[r] * dot) / n } else { 0.0 };
                    out[1][r * channels + c] = gamma[c] * rstd * (g[r] - correction);
                }
                (out[2][c], out[3][c]) = (dot, sum);
            }
            if !self.residual {
                out.pop();
            }
            out
        }
    }

    #[test]
    fn against_float64() {
        let mut worst = [0.0f64; 2];
        for case in &CASES {
            let inputs = case.inputs();
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            let expected = case.definition(&inputs);
            let mut found = gradients(&leaves, |t| case.forward(t, false));
            found.truncate(expected.len());
            // A value that is rounded to the other side of the ReLU's corner has a wrong gradient, rightly: none here.
            let far = case.offset > 10.0;
            let error = assert_close("batch norm", &found, &expected, if far { 2e-5 } else { 2e-6 });
            worst[usize::from(far)] = worst[usize::from(far)].max(error);
        }
        eprintln!("batch norm: worst {:.1e}, with mean 50 deviations from zero {:.1e}", worst[0], worst[1]);
    }

    #[test]
    fn agrees_with_burn() {
        for case in CASES.iter().filter(|case| case.offset < 10.0) {
            let inputs = case.inputs();
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            let mut ours = gradients(&leaves, |t| case.forward(t, false));
            let mut burns = gradients(&leaves, |t| case.forward(t, true));
            let used = if case.residual { 5 } else { 4 };
            ours.truncate(used);
            burns.truncate(used);
            let burns: Vec<_> = burns.iter().map(|values| wide(values)).collect();
            assert_close("against burn", &ours, &burns, 1e-5);
        }
    }

    #[test]
    fn same_bits_however_called() {
        for case in &CASES[2..] {
            let inputs = case.inputs();
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            assert_same_bits(&leaves, |t| case.forward(t, false));
        }
    }

    #[test]
    fn statistics_are_torchs() {
        let device = Device::flex();
        for rows in [2, 127, 128, 129, 1000] {
            let x = values(rows * 3, 7);
            let (gamma, beta) = (flat(&[1.0; 3], &device), flat(&[0.0; 3], &device));
            let norm = batch_norm_train(flat(&x, &device).reshape([rows, 3]), gamma, beta, EPS, None, false);
            let x = wide(&x);
            let mean: Vec<f64> = (0..3).map(|c| x.iter().skip(c).step_by(3).sum::<f64>() / rows as f64).collect();
            let square = |c: usize| x.iter().skip(c).step_by(3).map(|x| (x - mean[c]).powi(2)).sum::<f64>();
            let var: Vec<f64> = (0..3).map(|c| square(c) / (rows as f64 - 1.0)).collect();
            assert!(error(&read(norm.mean), &mean) < 1e-6);
            assert!(error(&read(norm.var), &var) < 1e-6);
        }
    }

    #[test]
    fn nothing_in_nothing_out() {
        let device = Device::flex();
        let one = || flat(&[1.0, 1.0], &device);
        let x = Tensor::<2>::zeros([0, 2], &device);
        assert_eq!(batch_norm_eval(x, one(), one(), one(), one(), EPS, None, true).dims(), [0, 2]);
        let norm = batch_norm_train(
            Tensor::<2>::zeros([3, 0], &device),
            flat(&[], &device),
            flat(&[], &device),
            EPS,
            None,
            true,
        );
        assert_eq!(norm.output.dims(), [3, 0]);
    }

    #[test]
    fn not_a_number_is_not_hidden() {
        let device = Device::flex();
        let one = || flat(&[1.0], &device);
        let x = flat(&[f32::NAN, 1.0], &device).reshape([2, 1]);
        let y = read(batch_norm_train(x, one(), one(), EPS, None, true).output);
        assert!(y.iter().all(|y| y.is_nan()));
    }

    #[test]
    #[should_panic(expected = "more than one value per channel")]
    fn one_row_has_no_variance() {
        let device = Device::flex();
        let one = || flat(&[1.0], &device);
        let _ = batch_norm_train(one().reshape([1, 1]), one(), one(), EPS, None, false);
    }
}
