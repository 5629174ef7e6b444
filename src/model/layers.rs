//! Layers with torch's weight layout and torch's key names.
//!
//! burn's own layers are not used: their weights are transposed, their initializers draw from a process-global generator, and
//! their normalisations and attention run fused kernels that differ between a pass with and without gradient. The heavy parts are
//! [`crate::ops`], the rest is composed from plain tensor operations, so that a pass gives the same bits whether or not it is recorded.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};

use super::lora::Lora;
use super::macs::multiplied;
use super::pass::{BatchStats, Pass};
use super::scope::{Init, Scope};
use super::trace::seen;
use crate::ops;
use crate::rng::{Purpose, Stream};

/// `x W^T + b`, as `torch.nn.Linear`.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Param<Tensor<2>>,
    /// `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// Low-rank adapter of the weight.
    pub lora: Option<Lora>,
}

impl Linear {
    /// Builds a layer in the place `scope`; without `bias` it has none.
    #[must_use]
    pub fn new(inputs: usize, outputs: usize, weight: Init, bias: Option<Init>, scope: &Scope) -> Self {
        Self {
            weight: scope.param("weight", [outputs, inputs], weight),
            bias: bias.map(|init| scope.param("bias", [outputs], init)),
            lora: Lora::of(inputs, outputs, scope),
        }
    }

    /// Returns the weight, adapter included.
    ///
    /// # Shapes
    /// `[out, in]`.
    #[must_use]
    pub fn adapted_weight(&self) -> Tensor<2> {
        let weight = self.weight.val();
        match &self.lora {
            Some(lora) => lora.added_to(weight),
            None => weight,
        }
    }

    /// Builds a layer with torch's default initialization: weight and bias uniform within `1 / sqrt(inputs)`.
    #[must_use]
    pub fn torch_default(inputs: usize, outputs: usize, bias: bool, scope: &Scope) -> Self {
        let init = Init::Uniform(1.0 / (inputs as f64).sqrt());
        Self::new(inputs, outputs, init, bias.then_some(init), scope)
    }

    /// Applies the layer to the last dimension.
    ///
    /// # Shapes
    /// `[.., in]` to `[.., out]`.
    ///
    /// # Panics
    /// When the last dimension is not the layer's input.
    #[must_use]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let inputs = self.weight.dims()[1];
        assert_eq!(x.dims()[D - 1], inputs, "a linear layer of {inputs} inputs got {:?}", x.dims());
        let y = ops::linear(x, self.adapted_weight(), self.bias.as_ref().map(Param::val));
        multiplied(&y, inputs);
        seen(self.weight.id, &y);
        y
    }

    /// Returns weight and bias of the layer whose outputs are multiplied by `scale`, if there is one.
    ///
    /// # Shapes
    /// `[out]` to `[out, in]` and `[out]`.
    #[must_use]
    pub fn scaled(&self, scale: Option<Tensor<1>>) -> (Tensor<2>, Option<Tensor<1>>) {
        let (weight, bias) = (self.adapted_weight(), self.bias.as_ref().map(Param::val));
        match scale {
            Some(scale) => (weight * scale.clone().unsqueeze_dim(1), bias.map(|bias| bias * scale)),
            None => (weight, bias),
        }
    }

    /// Applies the layer, multiplies by `scale` and adds `residual`, if there are such.
    ///
    /// # Shapes
    /// `[.., in]`, `[out]` and `[.., out]` to `[.., out]`.
    #[must_use]
    pub fn forward_branch<const D: usize>(
        &self,
        x: Tensor<D>,
        scale: Option<Tensor<1>>,
        residual: Option<Tensor<D>>,
    ) -> Tensor<D> {
        let (weight, bias) = self.scaled(scale);
        let y = match residual {
            Some(residual) => ops::linear_residual(x, weight, bias, residual),
            None => ops::linear(x, weight, bias),
        };
        multiplied(&y, self.weight.dims()[1]);
        seen(self.weight.id, &y);
        y
    }
}

/// Layer norm over the last dimension, as `torch.nn.LayerNorm`.
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// `[dim]`.
    pub weight: Param<Tensor<1>>,
    /// `[dim]`.
    pub bias: Param<Tensor<1>>,
    #[module(skip)]
    eps: f64,
}

impl LayerNorm {
    /// Builds the identity scaling.
    #[must_use]
    pub fn new(dim: usize, eps: f64, scope: &Scope) -> Self {
        Self { weight: scope.param("weight", [dim], Init::Ones), bias: scope.param("bias", [dim], Init::Zeros), eps }
    }

    /// Normalises the last dimension.
    ///
    /// # Shapes
    /// `[.., dim]` to the same.
    #[must_use]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let y = ops::layer_norm(x, self.weight.val(), self.bias.val(), self.eps);
        seen(self.weight.id, &y);
        y
    }
}

/// Two-dimensional convolution with a square kernel, as `torch.nn.Conv2d`.
#[derive(Module, Debug)]
pub struct Conv2d {
    /// `[out, in, kernel, kernel]`.
    pub weight: Param<Tensor<4>>,
    /// `[out]`.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    stride: usize,
    #[module(skip)]
    padding: usize,
}

/// Sizes of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct ConvArch {
    /// Input channels.
    pub inputs: usize,
    /// Output channels.
    pub outputs: usize,
    /// Side of the kernel.
    pub kernel: usize,
    /// Step between windows.
    pub stride: usize,
    /// Zeros added at each border.
    pub padding: usize,
}

impl Conv2d {
    /// Builds a layer; without `bias` it has none.
    #[must_use]
    pub fn new(arch: ConvArch, weight: Init, bias: Option<Init>, scope: &Scope) -> Self {
        let ConvArch { inputs, outputs, kernel, stride, padding } = arch;
        Self {
            weight: scope.param("weight", [outputs, inputs, kernel, kernel], weight),
            bias: bias.map(|init| scope.param("bias", [outputs], init)),
            stride,
            padding,
        }
    }

    /// Convolves channels-last images.
    ///
    /// # Shapes
    /// `[batch, h, w, in]` to `[batch, h', w', out]`.
    #[must_use]
    pub fn forward_nhwc(&self, x: Tensor<4>) -> Tensor<4> {
        self.forward_rebuilt(x, None)
    }

    /// Convolves what a norm makes of `x`, rectified. The activations between the two are not kept for the backward pass, which computes them again.
    ///
    /// # Shapes
    /// As [`Self::forward_nhwc`].
    ///
    /// # Panics
    /// As [`BatchNorm::forward`].
    #[must_use]
    pub fn forward_after(&self, norm: &BatchNorm, x: Tensor<4>, pass: &mut Pass) -> Tensor<4> {
        if !pass.is_train() {
            return self.forward_nhwc(norm.forward_relu(x, pass));
        }
        let (gamma, beta) = norm.scale_and_offset(&x.device());
        let (normed, rebuild) = ops::batch_norm_rebuilt(x, gamma, beta, norm.eps);
        self.forward_rebuilt(norm.told(normed, pass), rebuild)
    }

    fn forward_rebuilt(&self, x: Tensor<4>, rebuild: Option<ops::Rebuild>) -> Tensor<4> {
        let bias = self.bias.as_ref().map(Param::val);
        let y = ops::conv2d_after_norm(x, rebuild, self.weight.val(), bias, [self.stride; 2], [self.padding; 2]);
        multiplied(&y, self.weight.dims()[1..].iter().product());
        seen(self.weight.id, &y);
        y
    }
}

/// Depthwise convolution with stride 1 that keeps the size, as `torch.nn.Conv2d` with as many groups as channels.
#[derive(Module, Debug)]
pub struct DepthwiseConv {
    /// `[channels, 1, kernel, kernel]`.
    pub weight: Param<Tensor<4>>,
    /// `[channels]`.
    pub bias: Param<Tensor<1>>,
}

impl DepthwiseConv {
    /// Builds a layer with an odd kernel; its bias starts at zero.
    #[must_use]
    pub fn new(channels: usize, kernel: usize, weight: Init, scope: &Scope) -> Self {
        Self {
            weight: scope.param("weight", [channels, 1, kernel, kernel], weight),
            bias: scope.param("bias", [channels], Init::Zeros),
        }
    }

    /// Convolves channels-last images.
    ///
    /// # Shapes
    /// `[batch, h, w, channels]` to the same.
    #[must_use]
    pub fn forward_nhwc(&self, x: Tensor<4>) -> Tensor<4> {
        let padding = self.weight.dims()[2] / 2;
        let y = ops::depthwise_conv2d_nhwc(x, self.weight.val(), Some(self.bias.val()), padding);
        multiplied(&y, self.weight.dims()[2..].iter().product());
        seen(self.weight.id, &y);
        y
    }
}

/// What batch norm learns beside the statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Affine {
    /// Scale and offset.
    #[default]
    Full,
    /// Scale only: the last norm of SimCLR's head.
    Scale,
    /// Neither: torch's `affine=False`.
    None,
}

/// Batch norm of the last dimension: rows (`[batch, channels]`) or channels-last maps, else as torch's `BatchNorm1d` and `BatchNorm2d`.
///
/// A training pass normalises with the statistics of what it is given (one micro-batch: "ghost" batch norm) and hands
/// them to the [`Pass`]; the layer never changes itself. torch's `num_batches_tracked` is not kept: it only matters with
/// `momentum=None`, which nothing here uses.
#[derive(Module, Debug)]
pub struct BatchNorm {
    /// `[channels]`.
    pub weight: Option<Param<Tensor<1>>>,
    /// `[channels]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// `[channels]`, not trained.
    pub running_mean: Param<Tensor<1>>,
    /// `[channels]`, not trained.
    pub running_var: Param<Tensor<1>>,
    #[module(skip)]
    eps: f64,
}

impl BatchNorm {
    /// Builds a layer with torch's `eps` of 1e-5.
    #[must_use]
    pub fn new(channels: usize, affine: Affine, scope: &Scope) -> Self {
        Self::with_scale(channels, affine, Init::Ones, scope)
    }

    /// The same, its scale starting as `scale` says.
    #[must_use]
    pub fn with_scale(channels: usize, affine: Affine, scale: Init, scope: &Scope) -> Self {
        Self {
            weight: (affine != Affine::None).then(|| scope.param("weight", [channels], scale)),
            bias: (affine == Affine::Full).then(|| scope.param("bias", [channels], Init::Zeros)),
            running_mean: scope.buffer("running_mean", vec![0.0; channels], [channels]),
            running_var: scope.buffer("running_var", vec![1.0; channels], [channels]),
            eps: 1e-5,
        }
    }

    /// Normalises each channel.
    ///
    /// # Shapes
    /// `[.., channels]` to the same.
    ///
    /// # Panics
    /// While training, when a channel has one value only: its variance is unknown.
    #[must_use]
    pub fn forward<const D: usize>(&self, x: Tensor<D>, pass: &mut Pass) -> Tensor<D> {
        self.forward_fused(x, None, false, pass)
    }

    /// Normalises each channel, then rectifies.
    ///
    /// # Shapes
    /// As [`Self::forward`].
    ///
    /// # Panics
    /// As [`Self::forward`].
    #[must_use]
    pub fn forward_relu<const D: usize>(&self, x: Tensor<D>, pass: &mut Pass) -> Tensor<D> {
        self.forward_fused(x, None, true, pass)
    }

    /// Normalises each channel, adds the shortcut, then rectifies: the end of a residual block.
    ///
    /// # Shapes
    /// As [`Self::forward`]; `shortcut` as `x`.
    ///
    /// # Panics
    /// As [`Self::forward`].
    #[must_use]
    pub fn forward_residual<const D: usize>(&self, x: Tensor<D>, shortcut: Tensor<D>, pass: &mut Pass) -> Tensor<D> {
        self.forward_fused(x, Some(shortcut), true, pass)
    }

    fn forward_fused<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Option<Tensor<D>>,
        relu: bool,
        pass: &mut Pass,
    ) -> Tensor<D> {
        let (gamma, beta) = self.scale_and_offset(&x.device());
        if pass.is_train() {
            self.told(ops::batch_norm_train(x, gamma, beta, self.eps, residual, relu), pass)
        } else {
            let (mean, var) = (self.running_mean.val(), self.running_var.val());
            let y = ops::batch_norm_eval(x, gamma, beta, mean, var, self.eps, residual, relu);
            seen(self.running_mean.id, &y);
            y
        }
    }

    fn scale_and_offset(&self, device: &Device) -> (Tensor<1>, Tensor<1>) {
        let constant = |value: f32| Tensor::full(self.running_mean.dims(), value, &device.clone().without_autodiff());
        let gamma = self.weight.as_ref().map_or_else(|| constant(1.0), Param::val);
        (gamma, self.bias.as_ref().map_or_else(|| constant(0.0), Param::val))
    }

    /// Hands the statistics of a batch to the pass.
    fn told<const D: usize>(&self, normed: ops::BatchNorm<D>, pass: &mut Pass) -> Tensor<D> {
        let ops::BatchNorm { output, mean, var } = normed;
        let (running_mean, running_var) = (self.running_mean.id, self.running_var.id);
        pass.push_batch_stats(BatchStats { running_mean, running_var, mean, var });
        seen(running_mean, &output);
        output
    }
}

/// Learned scale of a residual branch (Touvron et al., 2021, <https://arxiv.org/abs/2103.17239>).
///
/// The branch's last layer takes it into its weights ([`Linear::scaled`]): no pass over the activations, forward or backward.
#[derive(Module, Debug)]
pub struct LayerScale {
    /// `[dim]`.
    pub gamma: Param<Tensor<1>>,
}

impl LayerScale {
    /// Builds a scale of `init` everywhere.
    #[must_use]
    pub fn new(dim: usize, init: f64, scope: &Scope) -> Self {
        Self { gamma: scope.param("gamma", [dim], Init::Constant(init)) }
    }
}

/// Stochastic depth (Huang et al., 2016, <https://arxiv.org/abs/1603.09382>): drops the residual branch of a whole row of the batch and
/// scales the others by `1 / (1 - rate)`, as timm's `DropPath`.
///
/// Whether a row is dropped is a function of `(seed, step, image, view, layer)`, not of where the row lies in a batch.
#[derive(Clone, Copy, Debug)]
pub struct DropPath {
    rate: f64,
    layer: u64,
}

impl DropPath {
    /// Drops with probability `rate` (below 1); `layer` tells the branches of a network apart.
    #[must_use]
    pub fn new(rate: f64, layer: u64) -> Self {
        Self { rate, layer }
    }

    /// Returns the probability.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// Adds a residual branch to `x`. The branch is asked to add what it is given, unless rows are to be dropped before.
    ///
    /// # Shapes
    /// `[batch, tokens, dim]` to the same.
    #[must_use]
    pub fn add(&self, x: Tensor<3>, pass: &Pass, branch: impl FnOnce(Option<Tensor<3>>) -> Tensor<3>) -> Tensor<3> {
        if self.rate == 0.0 || pass.noise().is_none() {
            return branch(Some(x));
        }
        x + self.forward(branch(None), pass)
    }

    /// Drops rows of the batch while training.
    ///
    /// # Shapes
    /// `[batch, tokens, dim]` to the same.
    ///
    /// # Panics
    /// When the pass has not one key per row of the batch.
    #[must_use]
    pub fn forward(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        let Some(noise) = pass.noise().filter(|_| self.rate > 0.0) else { return x };
        let [batch, _, _] = x.dims();
        assert_eq!(noise.rows.len(), batch, "a pass needs one noise key per row of the batch");
        let kept = (1.0 / (1.0 - self.rate)) as f32;
        let scales: Vec<f32> = noise
            .rows
            .iter()
            .map(|&(image, view)| {
                let mut stream = Stream::new(noise.seed, Purpose::DropPath, &[noise.step, image, view, self.layer]);
                if stream.chance(self.rate) { 0.0 } else { kept }
            })
            .collect();
        let scales = Tensor::<3>::from_data(TensorData::new(scales, [batch, 1, 1]), &x.device());
        x * scales
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::model::pass::Noise;

    fn scope() -> Scope {
        Scope::new(5, &Device::flex())
    }

    fn ramp<const D: usize>(shape: [usize; D]) -> Tensor<D> {
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| (i as f32 * 0.7).sin() + 0.3).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    }

    fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
        x.into_data().try_to_vec().unwrap()
    }

    fn noise(rows: &[(u64, u64)]) -> Noise {
        Noise { seed: 1, step: 2, rows: rows.to_vec() }
    }

    #[test]
    fn linear_multiplies_by_the_transpose() {
        let layer = Linear::torch_default(3, 2, true, &scope());
        let (w, b) = (values(layer.weight.val()), values(layer.bias.as_ref().unwrap().val()));
        let x = values(ramp([2, 2, 3]));
        let y = values(layer.forward(ramp([2, 2, 3])));
        for row in 0..4 {
            for out in 0..2 {
                let expected = b[out] + (0..3).map(|i| w[out * 3 + i] * x[row * 3 + i]).sum::<f32>();
                assert!((y[row * 2 + out] - expected).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn batch_norm_uses_and_hands_over_the_statistics_of_the_micro_batch() {
        let norm = BatchNorm::new(3, Affine::Full, &scope());
        let x = ramp([2, 2, 2, 3]);
        let mut pass = Pass::train(noise(&[(0, 0), (1, 0)]));
        let y = values(norm.forward(x.clone(), &mut pass));
        let stats = pass.take_batch_stats().pop().unwrap();
        assert_eq!((stats.running_mean, stats.running_var), (norm.running_mean.id, norm.running_var.id));
        let (mean, var) = (values(stats.mean), values(stats.var));
        let x = values(x);
        for channel in 0..3 {
            let at = |i: usize| 3 * i + channel;
            let expected_mean = (0..8).map(|i| f64::from(x[at(i)])).sum::<f64>() / 8.0;
            let squares = (0..8).map(|i| (f64::from(x[at(i)]) - expected_mean).powi(2)).sum::<f64>();
            assert!((f64::from(mean[channel]) - expected_mean).abs() < 1e-6);
            assert!((f64::from(var[channel]) - squares / 7.0).abs() < 1e-6, "unbiased");
            for i in 0..8 {
                let expected = (f64::from(x[at(i)]) - expected_mean) / (squares / 8.0 + 1e-5).sqrt();
                assert!((f64::from(y[at(i)]) - expected).abs() < 1e-5, "normalised with the biased variance");
            }
        }
        assert_eq!(values(norm.running_mean.val()), [0.0; 3], "the layer does not change itself");
        let mut pass = Pass::eval();
        let y = values(norm.forward(ramp([2, 2, 2, 3]), &mut pass));
        assert!(y.iter().zip(&x).all(|(y, x)| (y - x).abs() < 1e-4), "running statistics are those of a new layer");
        assert!(pass.take_batch_stats().is_empty());
    }

    #[test]
    #[should_panic(expected = "more than one value per channel")]
    fn batch_norm_of_one_row_has_no_variance() {
        let norm = BatchNorm::new(3, Affine::None, &scope());
        let _ = norm.forward(ramp([1, 3]), &mut Pass::train(noise(&[(0, 0)])));
    }

    #[test]
    fn drop_path_follows_the_image_not_the_row() {
        let drop = DropPath::new(0.5, 3);
        let keys: Vec<(u64, u64)> = (0..32).map(|i| (i / 2, i % 2)).collect();
        let ones = |n| Tensor::<3>::ones([n, 1, 1], &Device::flex());
        let all = values(drop.forward(ones(32), &Pass::train(noise(&keys))));
        assert!(all.contains(&0.0) && all.contains(&2.0) && all.iter().all(|&v| v == 0.0 || v == 2.0));
        let part: Vec<(u64, u64)> = keys[8..16].iter().rev().copied().collect();
        let part = values(drop.forward(ones(8), &Pass::train(noise(&part))));
        assert_eq!(part, all[8..16].iter().rev().copied().collect::<Vec<_>>());
        let other = values(DropPath::new(0.5, 4).forward(ones(32), &Pass::train(noise(&keys))));
        assert_ne!(other, all, "another layer");
        assert_eq!(values(drop.forward(ones(32), &Pass::eval())), [1.0; 32]);
    }

    #[test]
    fn layer_norm_has_mean_zero_and_unit_variance() {
        let y = values(LayerNorm::new(6, 1e-6, &scope()).forward(ramp([2, 6])));
        for row in y.chunks(6) {
            let mean = row.iter().sum::<f32>() / 6.0;
            assert!(mean.abs() < 1e-6);
            assert!((row.iter().map(|v| v * v).sum::<f32>() / 6.0 - 1.0).abs() < 1e-4);
        }
    }
}
