//! Measures of what a network learnt.
mod config;
pub use config::EvalConfig;
