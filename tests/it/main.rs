//! One test binary: every binary links all of burn.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, fail by panicking")]

mod architecture;
mod exports;
mod finetune;
mod golden;
mod gpu;
mod launch;
mod machine;
mod mistakes;
mod precision;
mod predictions;
#[cfg(feature = "mpi")]
mod processes;
mod recipes;
mod runs;
mod toy_method;
