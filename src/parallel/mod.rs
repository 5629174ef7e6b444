//! Ranks and what they reduce: the canonical tree and the collectives over it.

mod collective;
mod tree;

pub use collective::{Aborted, Collective, ThreadRank, run_ranks};
pub use tree::{Node, TreeSum, share};
