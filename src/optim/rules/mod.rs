//! The step of one parameter, an optimizer a file.
//!
//! Elements are computed in `f32` in torch's order of operations; what is the same for all elements of a parameter (bias corrections,
//! step sizes, norms) in `f64`. Nothing is allocated.

pub(super) mod adam;
pub(super) mod lamb;
pub(super) mod lars;
pub(super) mod lion;
pub(super) mod sgd;

/// What is the same for all elements of a parameter in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    /// Learning rate, the parameter's scale in it.
    pub(super) lr: f64,
    /// Weight decay.
    pub(super) weight_decay: f64,
    /// The step follows the norm of the parameter (LARS, LAMB).
    pub(super) adapt: bool,
    /// Steps of this parameter, this one included.
    pub(super) step: u64,
}

/// What a running mean of decay `beta` has of a whole average after `step` steps.
fn correction(beta: f64, step: u64) -> f64 {
    1.0 - beta.powf(step as f64)
}

/// The share of a gradient that a momentum takes: torch's buffer starts as the first gradient, whatever the dampening.
fn share(dampening: f64, now: Now) -> f32 {
    if now.step == 1 { 1.0 } else { (1.0 - dampening) as f32 }
}
