//! Fused operations for the CPU, with hand-written backward passes.
//!
//! Each operation is one file: the mathematics in its doc comment, the kernel, the backward pass and a plain composition
//! of burn's operations. The composition is the reference in tests and the path for everything that is not an `f32`
//! tensor on flex (another device, another precision, burn's own activation checkpointing).
//!
//! # One thread, one order
//!
//! An operation runs on the thread that calls it, start to end: no rayon, no atomics, matrix products with
//! `Parallelism::None`. Ranks are the way to use cores. What is left of the promise "the same bits" is then a matter of
//! the order of additions, and that depends on shapes alone: reductions over rows go in blocks whose number of rows depends on the shape
//! (see each file) and over the elements of a row in 32 interleaved sums, added up in a fixed order. A tensor
//! with and without gradient goes through the same kernel.
//!
//! # Mixed precision
//!
//! Operations that multiply matrices first ask [`autocast`] for the type to do it in, and then come here again with rounded operands.
//!
//! # Instruction sets
//!
//! Loops are written once and compiled for AVX-512, for AVX2 with FMA and for the baseline (`simd`); the choice is made at run
//! time. Fused multiply-adds round once, so the baseline differs in the last bit. Matrix products are the `gemm` crate's, which chooses in the
//! same way and has its own order of additions for each: one machine type gives one result. [`instruction_set`] names the path for
//! the environment record.

#![allow(clippy::inline_always, reason = "a function takes on its caller's target features by being inlined")]
#![allow(clippy::needless_range_loop, reason = "formulas with several tensors under one index")]

mod attention;
mod autocast;
mod batch_norm;
mod bridge;
mod config;
mod conv2d;
mod depthwise;
mod gemm;
mod im2col;
mod layer_norm;
mod linear;
mod memory;
mod mlp;
mod panel;
mod pool;
mod rebuild;
pub(crate) mod simd;
#[cfg(test)]
mod testing;
mod winograd;

pub use attention::attention;
pub use autocast::{Autocast, Half, autocast, in_backbone};
pub use batch_norm::{BatchNorm, batch_norm_eval, batch_norm_rebuilt, batch_norm_train};
pub use config::{OpsConfig, configure};
pub use conv2d::{conv2d_after_norm, conv2d_nhwc, to_nchw, to_nhwc};
pub use depthwise::depthwise_conv2d_nhwc;
pub use layer_norm::layer_norm;
pub use linear::{linear, linear_gelu, linear_residual};
pub use memory::keep_pages;
pub use mlp::mlp;
pub use pool::{max_pool2d_nhwc, mean_pool_nhwc};
pub use rebuild::Rebuild;
pub use simd::instruction_set;

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Tensor, activation};

    use super::testing::{error, flat, flatten, values};
    use super::{batch_norm, batch_norm_train, conv2d, conv2d_nhwc};

    const IMAGES: usize = 8;
    const SIZE: usize = 16;
    /// Output channels and stride of each residual block, after a stem with 16 channels.
    const BLOCKS: [(usize, usize); 6] = [(16, 1), (16, 1), (32, 2), (32, 1), (64, 2), (64, 1)];

    #[derive(Clone, Copy, PartialEq)]
    enum By {
        Ours,
        Burn,
        Float64,
    }

    /// A residual network in the making: draws parameters in order, or takes those drawn before.
    struct Network {
        by: By,
        device: Device,
        seed: u64,
        leaves: Vec<Tensor<1>>,
        /// Which activations got through a rectifier.
        masks: Vec<bool>,
    }

    impl Network {
        fn leaf(&mut self, values: &[f32]) -> Tensor<1> {
            let leaf = flat(values, &self.device);
            let leaf = if self.by == By::Float64 { leaf.cast(DType::F64) } else { leaf }.detach().require_grad();
            self.leaves.push(leaf.clone());
            leaf
        }

        fn layer(
            &mut self,
            x: Tensor<4>,
            out: usize,
            [kernel, stride]: [usize; 2],
            residual: Option<Tensor<4>>,
            relu: bool,
        ) -> Tensor<4> {
            let channels = x.dims()[3];
            let seed = 1000 * self.seed + self.leaves.len() as u64;
            let scale = (6.0 / (channels * kernel * kernel) as f32).sqrt();
            let weight: Vec<f32> =
                values(out * channels * kernel * kernel, seed).into_iter().map(|w| w * scale).collect();
            let weight = self.leaf(&weight).reshape([out, channels, kernel, kernel]);
            let (gamma, beta) = (self.leaf(&vec![1.0; out]), self.leaf(&vec![0.0; out]));
            let (stride, padding) = ([stride; 2], [kernel / 2; 2]);
            let y = if self.by == By::Burn {
                let x = conv2d::plain(x, weight, None, stride, padding);
                batch_norm::plain_train(x, gamma, beta, 1e-5, residual, relu).output
            } else {
                let x = conv2d_nhwc(x, weight, None, stride, padding);
                batch_norm_train(x, gamma, beta, 1e-5, residual, relu).output
            };
            if relu {
                self.masks.extend(y.clone().inner().greater_elem(0.0).into_data().iter::<bool>());
            }
            y
        }

        /// Returns the gradients of all parameters, and the masks of all rectifiers.
        fn gradients(by: By, seed: u64) -> (Vec<Vec<f64>>, Vec<bool>) {
            let device = Device::flex().autodiff();
            let mut network = Network { by, device, seed, leaves: Vec::new(), masks: Vec::new() };
            let images = values(IMAGES * SIZE * SIZE * 3, 1000 * seed + 77);
            let mut x = network.leaf(&images).reshape([IMAGES, SIZE, SIZE, 3]);
            x = network.layer(x, 16, [3, 1], None, true);
            for (out, stride) in BLOCKS {
                let shortcut = if x.dims()[3] == out {
                    x.clone()
                } else {
                    network.layer(x.clone(), out, [1, stride], None, false)
                };
                x = network.layer(x, out, [3, stride], None, true);
                x = network.layer(x, out, [3, 1], Some(shortcut), true);
            }
            let [b, h, w, c] = x.dims();
            let loss = activation::sigmoid(x.reshape([b, h * w, c]).mean_dim(1)).powf_scalar(2.0).sum();
            let grads = loss.backward();
            let read = |leaf: &Tensor<1>| leaf.grad(&grads).unwrap().cast(DType::F64).into_data().try_to_vec().unwrap();
            (network.leaves.iter().map(read).collect(), network.masks)
        }
    }

    /// Half precision goes through burn's operations: the same type out, values near those of `f32`.
    #[test]
    fn half_precision_falls_back() {
        let device = Device::flex();
        let vector = |len: usize, seed: u64| flat(&values(len, seed), &device);
        for dtype in [DType::F16, DType::BF16] {
            let check = |what: &str, f: &dyn Fn(&[Tensor<1>]) -> Tensor<1>, inputs: &[Tensor<1>]| {
                let full = f(inputs);
                let half = f(&inputs.iter().map(|x| x.clone().cast(dtype)).collect::<Vec<_>>());
                assert_eq!(half.dtype(), dtype, "{what}");
                let error = (half.cast(DType::F32) - full).abs().max().into_scalar::<f32>();
                assert!(error < 0.1, "{what} in {dtype:?} is off by {error}");
            };
            let linear = |t: &[Tensor<1>]| {
                let (x, w) = (t[0].clone().reshape([3, 8]), t[1].clone().reshape([4, 8]));
                flatten(super::linear_gelu(x, w, Some(t[2].clone())))
            };
            check("linear", &linear, &[vector(24, 1), vector(32, 2), vector(4, 3)]);
            let attend = |t: &[Tensor<1>]| flatten(super::attention(t[0].clone().reshape([1, 5, 24]), 2));
            check("attention", &attend, &[vector(120, 4)]);
            let norm = |t: &[Tensor<1>]| {
                flatten(super::layer_norm(t[0].clone().reshape([5, 8]), t[1].clone(), t[2].clone(), 1e-5))
            };
            check("layer norm", &norm, &[vector(40, 5), vector(8, 6), vector(8, 7)]);
            let batch = |t: &[Tensor<1>]| {
                let x = t[0].clone().reshape([6, 4]);
                flatten(batch_norm_train(x, t[1].clone(), t[2].clone(), 1e-5, None, true).output)
            };
            check("batch norm", &batch, &[vector(24, 8), vector(4, 9), vector(4, 10)]);
            let pool = |t: &[Tensor<1>]| {
                let x = t[0].clone().reshape([1, 4, 4, 3]);
                flatten(super::mean_pool_nhwc(super::max_pool2d_nhwc(x, [3, 3], [2, 2], [1, 1])))
            };
            check("pooling", &pool, &[vector(48, 11)]);
        }
    }

    /// Gradients of a whole network differ from burn's by up to some percent of a tensor's largest value, now and then, though
    /// no single operation does. The reason: an activation within rounding of zero, on either side of the rectifier. Where all
    /// masks agree with float64, gradients do to five digits; where one does not, they do not; for burn's operations as for ours.
    #[test]
    fn a_residual_network_against_float64() {
        let mut flipped = [0; 2];
        for seed in 0..8 {
            let (exact, exact_masks) = Network::gradients(By::Float64, seed);
            for (i, by) in [By::Ours, By::Burn].into_iter().enumerate() {
                let (found, masks) = Network::gradients(by, seed);
                let flips = masks.iter().zip(&exact_masks).filter(|(a, b)| a != b).count();
                let narrow = |values: &Vec<f64>| values.iter().map(|x| *x as f32).collect::<Vec<_>>();
                let errors = found.iter().zip(&exact).map(|(found, exact)| error(&narrow(found), exact));
                let worst = errors.fold(0.0, f64::max);
                eprintln!("seed {seed} {}: {flips} flips, worst {worst:.1e}", ["ours", "burn"][i]);
                assert!(flips > 0 || worst < 2e-4, "no flip explains an error of {worst:.1e}");
                assert!(flips < 10, "{flips} of {} activations on the wrong side", masks.len());
                flipped[i] += usize::from(flips > 0);
            }
        }
        eprintln!("networks with a flip: ours {}, burn {}", flipped[0], flipped[1]);
    }
}
