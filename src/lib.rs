//! Autodidact: self-supervised pretraining of vision models.

pub mod augment;
pub mod data;
pub mod engine;
pub mod eval;
pub mod method;
pub mod model;
pub mod ops;
pub mod optim;
pub mod recipe;
pub mod rng;
