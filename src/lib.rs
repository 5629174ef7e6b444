//! Autodidact: self-supervised pretraining of vision models.

pub mod augment;
pub mod cli;
pub mod commands;
pub mod data;
pub mod engine;
pub mod error;
pub mod eval;
pub mod mask;
pub mod loss;
pub mod method;
pub mod model;
pub mod optim;
pub mod plan;
pub mod recipe;
pub mod rng;
