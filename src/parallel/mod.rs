//! Ranks and what they reduce: the canonical tree and the collectives over it.

mod collective;
mod tree;

pub use collective::{Aborted, Collective, Shared, ThreadRank, run_ranks, value_from_leader};
pub use tree::{Node, TreeSum, share};
