//! Autodidact: self-supervised pretraining of vision models.

pub mod augment;
pub mod backend;
pub mod checkpoint;
pub mod cli;
pub mod commands;
pub mod data;
pub mod engine;
pub mod error;
pub mod eval;
pub mod files;
pub mod interop;
pub mod loss;
pub mod machine;
pub mod mask;
pub mod method;
pub mod model;
pub mod ops;
pub mod optim;
pub mod parallel;
pub mod plan;
pub mod precision;
pub mod problem;
pub mod recipe;
pub mod report;
pub mod rng;
