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
//! the order of additions, and that depends on shapes alone: reductions over rows go in blocks of a fixed number of rows
//! (see each file) and over the elements of a row in [`simd::LANES`] interleaved sums, added up in a fixed order. A tensor
//! with and without gradient goes through the same kernel.
//!
//! # Instruction sets
//!
//! Loops are written once and compiled for AVX2 with FMA and for the baseline (`simd`); the choice is made at run time. Fused
//! multiply-adds round once, so the two differ in the last bit: one machine type gives one result. [`instruction_set`] names
//! the path for the environment record. Matrix products are the `gemm` crate's, which chooses on its own.

#![allow(clippy::inline_always, reason = "a function takes on its caller's target features by being inlined")]
#![allow(clippy::needless_range_loop, reason = "formulas with several tensors under one index")]

mod attention;
mod batch_norm;
mod bridge;
mod conv2d;
mod gemm;
mod im2col;
mod layer_norm;
mod linear;
mod memory;
mod simd;
#[cfg(test)]
mod testing;
mod winograd;

use std::sync::atomic::{AtomicBool, Ordering};

pub use attention::attention;
pub use batch_norm::{BatchNorm, batch_norm_eval, batch_norm_train};
pub use conv2d::{conv2d, conv2d_nhwc, to_nchw, to_nhwc};
pub use layer_norm::layer_norm;
pub use linear::{linear, linear_gelu, linear_residual};
pub use simd::instruction_set;

/// Set once, from the recipe, before the first pass.
static EXACT: AtomicBool = AtomicBool::new(false);

/// Chooses between speed and the last digits: `true` computes every convolution as a plain matrix product, `false` (the
/// default) lets 3x3 convolutions use Winograd's algorithm, whose error is up to twice as large (see [`conv2d_nhwc`]).
///
/// A process has one setting; call this before the first forward pass. A graph recorded before the call keeps its algorithm.
pub fn set_exact(exact: bool) {
    EXACT.store(exact, Ordering::Relaxed);
}

/// Tells what [`set_exact`] chose.
pub fn is_exact() -> bool {
    EXACT.load(Ordering::Relaxed)
}
