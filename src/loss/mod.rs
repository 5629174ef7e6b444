//! Losses: pure functions of tensors, sums that the caller divides by a global count.
//!
//! A loss that is a mean over images, anchors or masked patches is returned as a sum, and its doc comment names the count. A loss of
//! statistics of the batch (Barlow Twins, `VICReg`, `SIGReg`, ...) is its value, with count 1, for the batch it is given.

pub mod cosine;
pub mod dcl;
pub mod info_nce;
pub mod mae;
mod nt_xent;
mod reduce;
mod rows;
#[cfg(test)]
mod testing;

pub use nt_xent::{nt_xent, nt_xent_per_anchor};
pub use reduce::total;
pub use rows::{l2_normalize, soft_cross_entropy};
