//! Ranks and what they reduce: the canonical tree and the collectives over it.

mod collective;
mod config;
mod fault;
mod launch;
#[cfg(feature = "mpi")]
mod mpi;
mod processes;
mod timed;
mod transport;
mod tree;

pub use collective::{Aborted, Collective, Shared, Tensors, ThreadRank, run_ranks, value_from_leader};
pub use config::{ParallelConfig, Reduction};
pub use fault::Fault;
pub use launch::{Launch, LaunchError, Launcher, Master};
#[cfg(feature = "mpi")]
pub use mpi::{Mpi, MpiError};
pub use processes::ProcessRank;
pub use timed::Timed;
pub use transport::{Link, Patience, Transport};
pub use tree::{Node, Summand, TreeSum, share, share_tensors};
