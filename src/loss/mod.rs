//! Losses: pure functions of tensors, sums that the caller divides by a global count.
//!
//! A loss that is a mean over images, anchors or masked patches is returned as a sum, and its doc comment names the count. A loss of
//! statistics of the batch (Barlow Twins, `VICReg`, `SIGReg`, ...) is its value, with count 1, for the batch it is given.

pub mod barlow_twins;
pub mod classification;
pub mod cosine;
pub mod dcl;
pub mod dino;
pub mod gram;
pub mod ibot;
pub mod info_nce;
pub mod koleo;
pub mod latent;
pub mod mae;
pub mod mmcr;
mod nt_xent;
mod reduce;
mod rows;
pub mod sigreg;
pub mod simmim;
mod sinkhorn;
mod slices;
pub mod swav;
#[cfg(test)]
mod testing;
pub mod tico;
pub mod vicreg;
pub mod vicregl;
pub mod visreg;

pub use nt_xent::{nt_xent, nt_xent_per_anchor};
pub use reduce::total;
pub use rows::{l2_normalize, soft_cross_entropy};
pub use sinkhorn::sinkhorn;
pub use slices::random_directions;
