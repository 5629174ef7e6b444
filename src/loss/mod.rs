//! Losses: pure functions of tensors, sums that the caller divides by a global count.

pub mod mae;
mod nt_xent;
mod reduce;

pub use nt_xent::{nt_xent, nt_xent_per_anchor};
pub use reduce::total;
