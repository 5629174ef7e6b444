//! Ranks and what they reduce: the canonical tree and the collectives over it.

mod collective;
mod config;
#[cfg(any(feature = "nccl", test))]
mod device;
mod fault;
mod launch;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod processes;
mod store;
mod timed;
mod transport;
mod tree;

pub use collective::{Aborted, Collective, Shared, Tensors, ThreadRank, run_ranks, value_from_leader};
pub use config::{ParallelConfig, Reduction};
pub use fault::Fault;
pub use launch::{Launch, LaunchError, Launcher, Master};
#[cfg(feature = "mpi")]
pub use mpi::{Mpi, MpiError};
#[cfg(feature = "nccl")]
pub use nccl::{DeviceMemory, Nccl, NcclError, gpus, nccl_version};
pub use processes::ProcessRank;
pub use store::{Meeting, Store, StoreError};
pub use timed::Timed;
pub use transport::{Control, Link, Patience, Transport};
pub use tree::{Node, Summand, TreeSum, share, share_tensors};
