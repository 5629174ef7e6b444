//! Ranks and what they reduce: the canonical tree and the collectives over it.

mod collective;
mod launch;
#[cfg(feature = "mpi")]
mod mpi;
mod processes;
mod transport;
mod tree;

pub use collective::{Aborted, Collective, Shared, ThreadRank, run_ranks, value_from_leader};
pub use launch::{Launch, LaunchError, Launcher, Master};
#[cfg(feature = "mpi")]
pub use mpi::{Mpi, MpiError};
pub use processes::ProcessRank;
pub use transport::{Link, Patience, Transport};
pub use tree::{Node, TreeSum, share};
