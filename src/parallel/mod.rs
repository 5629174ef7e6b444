//! Ranks and what they reduce: the canonical tree and the collectives over it.

mod collective;
mod launch;
mod processes;
mod transport;
mod tree;

pub use collective::{Aborted, Collective, Shared, ThreadRank, run_ranks, value_from_leader};
pub use launch::{Launch, LaunchError, Launcher, Master};
pub use processes::ProcessRank;
pub use transport::{Link, Transport};
pub use tree::{Node, TreeSum, share};
