//! Mixed precision: products in half precision, everything between them in `f32`.
//!
//! Inside [`autocast`] each operation that multiplies matrices (linear layers, convolutions, attention) rounds what goes in (activations, weights,
//! biases) to the half type, multiplies with sums in `f32`, and rounds what comes out; the backward pass rounds the gradients that go in and
//! come out likewise. Norms, softmax, residual sums, pooling and all that belongs to losses see `f32`. That is Micikevicius et al., 2017,
//! <https://arxiv.org/abs/1710.03740>, section 3 (weights have a master copy in `f32`, which is the only one that is kept), and torch's autocast but for what
//! norms put out and residuals are: there half, here `f32`.
//!
//! On the CPU, which has no half-precision units worth using, values stay `f32` and are rounded to those that the half type has: the numbers of
//! mixed precision at no gain in speed. On other devices tensors are cast, and the device's half-precision products run.
//!
//! The setting belongs to the thread, as each rank is one.

use std::cell::Cell;

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::tensor::{DType, Tensor};

use super::bridge::{Operand, consume, primitive, record, register, slice};
use super::memory::buffer;
use super::simd::vectorized;

/// A type of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// 8 bits of exponent, as `f32`; 8 bits of precision.
    Bf16,
    /// 5 bits of exponent: up to 65504, normal down to 6.1e-5; 11 bits of precision.
    Fp16,
}

/// What products compute in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Autocast {
    /// The half type; none: `f32`.
    pub half: Option<Half>,
    /// Products outside the backbone stay `f32`.
    pub keep_heads: bool,
}

thread_local! {
    static CHOSEN: Cell<Autocast> = const { Cell::new(Autocast { half: None, keep_heads: false }) };
    static IN_BACKBONE: Cell<bool> = const { Cell::new(false) };
}

/// Puts a thread-local value back, also when a panic passes through.
struct Restore<T: Copy + 'static>(&'static std::thread::LocalKey<Cell<T>>, T);

impl<T: Copy> Drop for Restore<T> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Runs a forward pass in mixed precision. Its backward pass may run outside.
pub fn autocast<R>(chosen: Autocast, pass: impl FnOnce() -> R) -> R {
    let _before = Restore(&CHOSEN, CHOSEN.replace(chosen));
    pass()
}

/// Runs a part of the backbone: what [`Autocast::keep_heads`] does not keep.
pub fn in_backbone<R>(part: impl FnOnce() -> R) -> R {
    let _before = Restore(&IN_BACKBONE, IN_BACKBONE.replace(true));
    part()
}

/// Returns the type that products are to compute in now.
pub(super) fn active() -> Option<Half> {
    let Autocast { half, keep_heads } = CHOSEN.get();
    half.filter(|_| !keep_heads || IN_BACKBONE.get())
}

/// Runs operations in `f32`.
pub(super) fn off<R>(operations: impl FnOnce() -> R) -> R {
    autocast(Autocast::default(), operations)
}

impl Half {
    fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::Fp16 => DType::F16,
        }
    }

    /// Brings a tensor to this type, in front of a product: rounded where `f32` stays `f32`, else cast.
    pub(super) fn enter<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        self.rounded(&x).unwrap_or_else(|| x.cast(self.dtype()))
    }

    /// Brings what a product put out to this type and back to `f32`.
    pub(super) fn leave<const D: usize>(self, y: Tensor<D>) -> Tensor<D> {
        self.rounded(&y).unwrap_or_else(|| y.cast(DType::F32))
    }

    /// Rounds `f32` values on the CPU.
    fn rounded<const D: usize>(self, x: &Tensor<D>) -> Option<Tensor<D>> {
        let operand = Operand::new(x.clone(), x.is_autodiff())?;
        let mut rounded = buffer(operand.slice().len());
        self.round(operand.slice(), &mut rounded);
        Some(record(Rounding(self), [operand], primitive(rounded, x.dims()), |_| ()))
    }

    fn round(self, x: &[f32], rounded: &mut [f32]) {
        match self {
            Self::Bf16 => to_bf16(x, rounded),
            Self::Fp16 => to_fp16(x, rounded),
        }
    }
}

/// Rounds forward, and the gradient backward.
#[derive(Debug)]
struct Rounding(Half);

impl Backward<Flex, 1> for Rounding {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = consume(grads, &ops);
        register(grads, &ops, 0, || {
            let mut rounded = buffer(slice(&gradient).len());
            self.0.round(slice(&gradient), &mut rounded);
            let shape = gradient.layout().shape().clone();
            primitive(rounded, [shape.num_elements()]).reshape(shape)
        });
    }
}

/// Exponent of `f32` below which the spacing of `f16` no longer shrinks: 2^-14.
const FP16_NORMAL: u32 = 0x3880_0000;
/// First value that rounds to infinity: 65520.
const FP16_OVERFLOW: u32 = 0x477f_f000;
const INFINITY: u32 = 0x7f80_0000;
const SIGN: u32 = 0x8000_0000;

vectorized! {
    /// To the nearest value with the upper 16 bits of an `f32`, ties to even.
    fn to_bf16(x: &[f32], rounded: &mut [f32]) {
        for (rounded, x) in rounded.iter_mut().zip(x) {
            let bits = x.to_bits();
            let up = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
            // NaN stays one, whatever its lower bits say
            let is_nan = bits & !SIGN > INFINITY;
            *rounded = f32::from_bits(if is_nan { bits | 0x0040_0000 } else { up });
        }
    }

    /// To the nearest value of IEEE half precision, ties to even; from 65520 on infinity.
    fn to_fp16(x: &[f32], rounded: &mut [f32]) {
        for (rounded, x) in rounded.iter_mut().zip(x) {
            let (sign, size) = (x.to_bits() & SIGN, x.to_bits() & !SIGN);
            let normal = size.wrapping_add(0x0fff + ((size >> 13) & 1)) & 0xffff_e000;
            // below 2^-14 values are multiples of 2^-24, as is what lies between 0.5 and 1 in f32
            let small = (f32::from_bits(size) + 0.5) - 0.5;
            let finite = if size < FP16_NORMAL { small.to_bits() } else { normal };
            let finite_or_infinite = if size >= FP16_OVERFLOW { INFINITY } else { finite };
            let is_nan = size > INFINITY;
            *rounded = f32::from_bits(sign | if is_nan { size | 0x0040_0000 } else { finite_or_infinite });
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, bf16, f16};

    use super::super::testing::{flat, read, values};
    use super::*;

    fn rounded(half: Half, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        half.round(x, &mut out);
        out
    }

    /// Against the `half` crate: all upper bits with several lower ones, so that every exponent, tie and NaN is met.
    #[test]
    fn rounds_as_the_half_types() {
        let lower = [0, 1, 0x0fff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff];
        for low in lower {
            let x: Vec<f32> = (0..=u16::MAX).map(|high| f32::from_bits(u32::from(high) << 16 | low)).collect();
            for (half, exact) in [
                (Half::Bf16, (|x| bf16::from_f32(x).to_f32()) as fn(f32) -> f32),
                (Half::Fp16, |x| f16::from_f32(x).to_f32()),
            ] {
                for (x, found) in x.iter().zip(rounded(half, &x)) {
                    let exact = exact(*x);
                    let same = found.to_bits() == exact.to_bits() || (found.is_nan() && exact.is_nan());
                    assert!(same, "{half:?}: {x:e} becomes {found:e}, not {exact:e}");
                }
            }
        }
    }

    /// A product in half precision on rounded `f32` values has the bits of the product in `f32` of what was rounded, rounded; so has its gradient.
    #[test]
    fn products_see_rounded_values_and_gradients() {
        let device = Device::flex().autodiff();
        for half in [Half::Bf16, Half::Fp16] {
            let leaf = |len, seed| flat(&values(len, seed), &device).require_grad();
            let (x, w) = (leaf(24, 1), leaf(32, 2));
            let run = |x: &Tensor<1>, w: &Tensor<1>| {
                super::super::linear(x.clone().reshape([3, 8]), w.clone().reshape([4, 8]), None)
            };
            let y = autocast(Autocast { half: Some(half), keep_heads: false }, || run(&x, &w));
            let probe = flat(&values(12, 3), &device).reshape([3, 4]);
            let grads = (y.clone() * probe.clone()).sum().backward();

            let by_hand = |t: &Tensor<1>| flat(&rounded(half, &read(t.clone())), &device).require_grad();
            let (x2, w2) = (by_hand(&x), by_hand(&w));
            let y2 = run(&x2, &w2);
            assert_eq!(read(y), rounded(half, &read(y2.clone())));
            let probe = flat(&rounded(half, &read(probe)), &device).reshape([3, 4]);
            let grads2 = (y2 * probe).sum().backward();
            for (t, t2) in [(&x, &x2), (&w, &w2)] {
                let (found, exact) = (t.grad(&grads).unwrap(), t2.grad(&grads2).unwrap());
                assert_eq!(read(found), rounded(half, &read(exact)));
            }
        }
    }

    /// What makes numbers run over in half precision: large scores, rows of zeros, a variance near nothing, activations of 1e4. Ours and burn's operations, forward and
    /// backward, in the form that a network uses them: a norm or a product in front.
    #[test]
    fn fp16_stays_finite_where_its_range_allows() {
        let device = Device::flex().autodiff();
        let chosen = Autocast { half: Some(Half::Fp16), keep_heads: false };
        let times =
            |scale: f32, len: usize, seed: u64| values(len, seed).iter().map(|x| scale * x).collect::<Vec<f32>>();
        let cases = [
            ("large scores", times(300.0, 2 * 7 * 24, 1)),
            ("zeros", vec![0.0; 2 * 7 * 24]),
            ("tiny variance", times(1e-7, 2 * 7 * 24, 2).iter().map(|x| x + 1.0).collect()),
            ("1e4", times(1e4, 2 * 7 * 24, 3)),
        ];
        for plain in [false, true] {
            for (what, x) in &cases {
                let x = flat(x, &device).require_grad();
                let leaf = |scale: f32, len, seed| flat(&times(scale, len, seed), &device).require_grad();
                let (w, gamma, beta) = (leaf(0.2, 24 * 24, 4), leaf(1.0, 24, 5), leaf(1.0, 24, 6));
                // cast as other devices do where `plain`, else rounded
                let through = |x: Tensor<3>| if plain { x.cast(DType::F16) } else { x };
                let out = |y: Tensor<3>| y.cast(DType::F32).reshape([2 * 7 * 8]);
                let half = |f: &dyn Fn() -> Tensor<3>| if plain { f() } else { autocast(chosen, f) };
                let packed = || x.clone().reshape([2, 7, 24]);
                let attended = out(half(&|| super::super::attention(through(packed()), 2)));
                let projected = half(&|| {
                    let w = w.clone().reshape([24, 24]);
                    let w = if plain { w.cast(DType::F16) } else { w };
                    super::super::linear(through(packed()), w, None)
                });
                let normed = super::super::layer_norm(projected.cast(DType::F32), gamma.clone(), beta.clone(), 1e-6);
                let y = attended.sum() + normed.square().sum();
                let grads = y.clone().backward();
                assert!(read(y)[0].is_finite(), "{what}, plain {plain}");
                for t in [&x, &w, &gamma, &beta] {
                    assert!(
                        read(t.grad(&grads).unwrap()).iter().all(|g| g.is_finite()),
                        "{what}, plain {plain}: gradient"
                    );
                }
            }
        }
    }

    #[test]
    fn heads_can_be_kept_and_the_setting_ends_with_the_pass() {
        let chosen = Autocast { half: Some(Half::Fp16), keep_heads: true };
        autocast(chosen, || {
            assert_eq!(active(), None);
            assert_eq!(in_backbone(active), Some(Half::Fp16));
            off(|| assert_eq!(in_backbone(active), None));
        });
        let _ = std::panic::catch_unwind(|| autocast(chosen, || in_backbone(|| panic!("on purpose"))));
        assert_eq!((active(), in_backbone(active)), (None, None));
    }
}
