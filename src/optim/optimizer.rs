//! Optimizers over one flat vector of parameters on the host.
//!
//! Elements are computed in `f32` in torch's order of operations; what is the same for all elements of a parameter (bias corrections,
//! step sizes, norms) in `f64`. Nothing is allocated in a step.

use super::config::OptimizerConfig;
use super::norm::{norm, norm_of_sum};
use super::params::{Group, Groups, ParamSpec};
use crate::ops::simd::vectorized;

/// An optimizer with its state.
#[derive(Clone, Debug)]
pub struct Optimizer {
    groups: Groups,
    rule: Rule,
    steps: u64,
}

#[derive(Clone, Debug)]
enum Rule {
    Sgd { momentum: f64, nesterov: bool, buffer: Vec<f32> },
    AdamW { betas: [f64; 2], eps: f64, mean: Vec<f32>, square: Vec<f32> },
    Lars { momentum: f64, trust: f64, buffer: Vec<f32> },
}

/// A saved state that doesn't belong to this optimizer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A vector of the state is missing.
    #[error("the optimizer state has no `{0}`: it was saved by another optimizer")]
    Missing(&'static str),
    /// The state has a vector that this optimizer doesn't have.
    #[error("the optimizer state has `{0}`, which this optimizer doesn't: it was saved by another optimizer")]
    Unexpected(String),
    /// A vector of the state has another length than the parameters.
    #[error(
        "`{name}` of the optimizer state has {found} values, the network has {expected}: it was saved with another network"
    )]
    Length {
        /// Which vector.
        name: String,
        /// Its length.
        found: usize,
        /// The number of parameters.
        expected: usize,
    },
}

impl Optimizer {
    /// Makes an optimizer with an empty state and the recipe's rule for what is decayed.
    ///
    /// # Panics
    /// If the parameters don't lie one behind the other from offset 0.
    #[must_use]
    pub fn new(config: &OptimizerConfig, specs: &[ParamSpec]) -> Self {
        Self::with_groups(config, Groups::new(config, specs))
    }

    /// Makes an optimizer whose weight decays and learning-rate scales come from `groups`, not from `config`.
    #[must_use]
    pub fn with_groups(config: &OptimizerConfig, groups: Groups) -> Self {
        let zeros = || vec![0.0; groups.len()];
        let rule = match config {
            OptimizerConfig::Sgd(sgd) => Rule::Sgd {
                momentum: sgd.momentum,
                nesterov: sgd.nesterov,
                buffer: if sgd.momentum == 0.0 { Vec::new() } else { zeros() },
            },
            OptimizerConfig::Adamw(adamw) => {
                Rule::AdamW { betas: adamw.betas, eps: adamw.eps, mean: zeros(), square: zeros() }
            }
            OptimizerConfig::Lars(lars) => Rule::Lars { momentum: lars.momentum, trust: lars.trust, buffer: zeros() },
        };
        Self { groups, rule, steps: 0 }
    }

    /// Moves the weights by one step of size `lr`.
    ///
    /// # Panics
    /// If `weights` or `gradients` don't have one value a parameter element.
    pub fn step(&mut self, weights: &mut [f32], gradients: &[f32], lr: f64) {
        assert_eq!(weights.len(), self.groups.len(), "one weight a parameter element");
        assert_eq!(gradients.len(), self.groups.len(), "one gradient a parameter element");
        self.steps += 1;
        for (spec, group) in self.groups.iter() {
            let range = spec.range();
            let (weights, gradients) = (&mut weights[range.clone()], &gradients[range.clone()]);
            let lr = lr * group.lr_scale;
            match &mut self.rule {
                Rule::Sgd { momentum: 0.0, .. } => descend(weights, gradients, group.weight_decay as f32, lr as f32),
                Rule::Sgd { momentum, nesterov, buffer } => {
                    let (decay, momentum) = (group.weight_decay as f32, *momentum as f32);
                    sgd(weights, gradients, &mut buffer[range], decay, momentum, *nesterov, lr as f32);
                }
                Rule::AdamW { betas, eps, mean, square } => {
                    let moments = (&mut mean[range.clone()], &mut square[range]);
                    adamw(weights, gradients, moments, group, *betas, *eps, self.steps, lr);
                }
                Rule::Lars { momentum, trust, buffer } => {
                    lars(weights, gradients, &mut buffer[range], group, *momentum, *trust, lr);
                }
            }
        }
    }

    /// Returns how each parameter is treated.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns the number of steps taken, which `AdamW`'s bias correction needs.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the state under torch's names, each vector as long as the parameters.
    #[must_use]
    pub fn state(&self) -> Vec<(&'static str, &[f32])> {
        match &self.rule {
            Rule::Sgd { buffer, .. } if buffer.is_empty() => Vec::new(),
            Rule::Sgd { buffer, .. } => vec![("momentum_buffer", buffer)],
            Rule::AdamW { mean, square, .. } => vec![("exp_avg", mean), ("exp_avg_sq", square)],
            Rule::Lars { buffer, .. } => vec![("mu", buffer)],
        }
    }

    /// Takes over a state that [`Self::steps`] and [`Self::state`] gave.
    ///
    /// # Errors
    /// If a vector is missing, unknown or of another length; the state is as before then.
    pub fn load_state<'a>(
        &mut self,
        steps: u64,
        state: impl IntoIterator<Item = (&'a str, &'a [f32])>,
    ) -> Result<(), StateError> {
        let expected = self.groups.len();
        let state: Vec<(&str, &[f32])> = state.into_iter().collect();
        let mut own = self.state_mut();
        for (name, values) in &state {
            if !own.iter().any(|(known, _)| known == name) {
                return Err(StateError::Unexpected((*name).to_owned()));
            }
            if values.len() != expected {
                return Err(StateError::Length { name: (*name).to_owned(), found: values.len(), expected });
            }
        }
        if let Some((name, _)) = own.iter().find(|(known, _)| !state.iter().any(|(name, _)| name == known)) {
            return Err(StateError::Missing(name));
        }
        for (known, target) in &mut own {
            for (_, values) in state.iter().filter(|(name, _)| name == known) {
                target.copy_from_slice(values);
            }
        }
        self.steps = steps;
        Ok(())
    }

    fn state_mut(&mut self) -> Vec<(&'static str, &mut [f32])> {
        match &mut self.rule {
            Rule::Sgd { buffer, .. } if buffer.is_empty() => Vec::new(),
            Rule::Sgd { buffer, .. } => vec![("momentum_buffer", buffer)],
            Rule::AdamW { mean, square, .. } => vec![("exp_avg", mean), ("exp_avg_sq", square)],
            Rule::Lars { buffer, .. } => vec![("mu", buffer)],
        }
    }
}

vectorized! {
    /// Plain gradient descent: `p -= lr * (g + wd * p)`.
    fn descend(weights: &mut [f32], gradients: &[f32], decay: f32, lr: f32) {
        for (p, &g) in weights.iter_mut().zip(gradients) {
            *p -= lr * (g + decay * *p);
        }
    }

    /// torch's SGD with dampening 0: `d = g + wd * p; m = momentum * m + d; p -= lr * m`, or `p -= lr * (d + momentum * m)` for Nesterov.
    ///
    /// torch's buffer is the first gradient itself; starting from zero gives the same.
    fn sgd(weights: &mut [f32], gradients: &[f32], buffer: &mut [f32], decay: f32, momentum: f32, nesterov: bool, lr: f32) {
        for ((p, &g), m) in weights.iter_mut().zip(gradients).zip(buffer) {
            let d = g + decay * *p;
            *m = momentum * *m + d;
            *p -= lr * if nesterov { d + momentum * *m } else { *m };
        }
    }

    /// The elements of [`adamw`]: decay, moments, step.
    fn adamw_elements(
        weights: &mut [f32], gradients: &[f32], mean: &mut [f32], square: &mut [f32],
        take1: f32, beta2: f32, take2: f32, keep: f32, size: f32, root: f32, eps: f32,
    ) {
        for (((p, &g), m), v) in weights.iter_mut().zip(gradients).zip(mean).zip(square) {
            *m += take1 * (g - *m);
            *v = beta2 * *v + take2 * g * g;
            *p = keep * *p - size * *m / (v.sqrt() / root + eps);
        }
    }

    /// The elements of [`lars`].
    fn lars_elements(
        weights: &mut [f32], gradients: &[f32], buffer: &mut [f32], decay: f32, ratio: f32, momentum: f32, lr: f32,
    ) {
        for ((p, &g), m) in weights.iter_mut().zip(gradients).zip(buffer) {
            let d = (g + decay * *p) * ratio;
            *m = momentum * *m + d;
            *p -= lr * *m;
        }
    }
}

/// torch's `AdamW` (Loshchilov & Hutter, 2017, <https://arxiv.org/abs/1711.05101>, algorithm 2 with the learning rate in the decay):
/// decay first, eps added to the bias-corrected root.
#[expect(clippy::too_many_arguments, reason = "one call, the names of the paper")]
fn adamw(
    weights: &mut [f32],
    gradients: &[f32],
    (mean, square): (&mut [f32], &mut [f32]),
    group: &Group,
    [beta1, beta2]: [f64; 2],
    eps: f64,
    step: u64,
    lr: f64,
) {
    let correction = |beta: f64| 1.0 - beta.powf(step as f64);
    let keep = (1.0 - lr * group.weight_decay) as f32;
    let size = (lr / correction(beta1)) as f32;
    let root = correction(beta2).sqrt() as f32;
    let (take1, beta2, take2, eps) = ((1.0 - beta1) as f32, beta2 as f32, (1.0 - beta2) as f32, eps as f32);
    adamw_elements(weights, gradients, mean, square, take1, beta2, take2, keep, size, root, eps);
}

/// LARS as released with MoCo v3, BYOL, Barlow Twins and `VICReg`: `d = g + wd * p`; if the parameter is adapted and neither norm is zero,
/// `d *= trust * |p| / |d|`; then `m = momentum * m + d; p -= lr * m`.
///
/// You, Gitman, Ginsburg, 2017, <https://arxiv.org/abs/1708.03888>, algorithm 1, which instead divides by `|g| + wd * |p|` and scales the
/// step before the momentum by the learning rate. Barlow Twins and `VICReg` adapt a scalar (rank 0); here, as in MoCo v3, rank <= 1 isn't adapted.
fn lars(weights: &mut [f32], gradients: &[f32], buffer: &mut [f32], group: &Group, momentum: f64, trust: f64, lr: f64) {
    let decay = group.weight_decay as f32;
    let mut ratio = 1.0;
    if group.adapt {
        let (weight_norm, step_norm) = (norm(weights), norm_of_sum(gradients, decay, weights));
        if weight_norm > 0.0 && step_norm > 0.0 {
            ratio = trust * weight_norm / step_norm;
        }
    }
    let (momentum, ratio, lr) = (momentum as f32, ratio as f32, lr as f32);
    lars_elements(weights, gradients, buffer, decay, ratio, momentum, lr);
}

#[cfg(test)]
mod tests {
    use super::super::config::{AdamWConfig, LarsConfig, SgdConfig};
    use super::*;

    fn sgd(momentum: f64, nesterov: bool, weight_decay: f64) -> OptimizerConfig {
        OptimizerConfig::Sgd(SgdConfig { momentum, nesterov, weight_decay, decay_all: false })
    }

    fn adamw() -> OptimizerConfig {
        OptimizerConfig::Adamw(AdamWConfig { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, decay_all: false })
    }

    fn lars() -> OptimizerConfig {
        OptimizerConfig::Lars(LarsConfig { momentum: 0.9, weight_decay: 0.01, trust: 0.001 })
    }

    /// A matrix of 6 and a bias of 3.
    fn specs() -> Vec<ParamSpec> {
        ParamSpec::layout([("w".to_owned(), vec![2, 3]), ("b".to_owned(), vec![3])])
    }

    fn values(seed: f32) -> Vec<f32> {
        (0..9).map(|i| (i as f32 * 1.7 + seed).sin()).collect()
    }

    fn run(config: &OptimizerConfig, steps: usize) -> (Optimizer, Vec<f32>) {
        let (mut optimizer, mut weights) = (Optimizer::new(config, &specs()), values(0.0));
        for step in 0..steps {
            optimizer.step(&mut weights, &values(1.0 + step as f32), 0.1);
        }
        (optimizer, weights)
    }

    fn close(got: &[f32], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (g, e) in got.iter().zip(expected) {
            assert!((f64::from(*g) - e).abs() < 1e-6, "{got:?} {expected:?}");
        }
    }

    /// Runs `rule(p, g, memory, i)` in `f64`, each element with two numbers of memory.
    fn definition(steps: usize, mut rule: impl FnMut(f64, f64, &mut [f64; 2], usize, usize) -> f64) -> Vec<f64> {
        let mut weights: Vec<f64> = values(0.0).into_iter().map(f64::from).collect();
        let mut memory = [[0.0; 2]; 9];
        for step in 0..steps {
            for (i, g) in values(1.0 + step as f32).into_iter().enumerate() {
                weights[i] = rule(weights[i], f64::from(g), &mut memory[i], i, step);
            }
        }
        weights
    }

    #[test]
    fn sgd_follows_the_definition() {
        for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
            let expected = definition(4, |p, g, memory, i, step| {
                let d = g + if i < 6 { 0.01 * p } else { 0.0 };
                memory[0] = if step == 0 { d } else { momentum * memory[0] + d };
                p - 0.1 * if nesterov { d + momentum * memory[0] } else { memory[0] }
            });
            close(&run(&sgd(momentum, nesterov, 0.01), 4).1, &expected);
        }
    }

    #[test]
    fn adamw_follows_the_definition() {
        let expected = definition(5, |p, g, memory, i, step| {
            let p = if i < 6 { p * (1.0 - 0.1 * 0.1) } else { p };
            *memory = [0.9 * memory[0] + 0.1 * g, 0.95 * memory[1] + 0.05 * g * g];
            let t = step as f64 + 1.0;
            let (mean, square) = (memory[0] / (1.0 - 0.9f64.powf(t)), memory[1] / (1.0 - 0.95f64.powf(t)));
            p - 0.1 * mean / (square.sqrt() + 1e-8)
        });
        close(&run(&adamw(), 5).1, &expected);
    }

    #[test]
    fn lars_moves_a_matrix_by_the_trust_ratio_and_a_bias_by_its_gradient() {
        let (start, gradient) = (values(0.0), values(1.0));
        let (_, moved) = run(&lars(), 1);
        let decayed: Vec<f64> = (0..6).map(|i| f64::from(gradient[i]) + 0.01 * f64::from(start[i])).collect();
        let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
        let weights: Vec<f64> = start.iter().map(|&v| f64::from(v)).collect();
        let ratio = 0.001 * norm(&weights[..6]) / norm(&decayed);
        let step = |i: usize| if i < 6 { ratio * decayed[i] } else { f64::from(gradient[i]) };
        close(&moved, &(0..9).map(|i| weights[i] - 0.1 * step(i)).collect::<Vec<_>>());
    }

    #[test]
    fn lars_leaves_the_zero_matrix_unscaled_and_stays_finite() {
        let mut optimizer = Optimizer::new(&lars(), &specs());
        let mut weights = vec![0.0; 9];
        optimizer.step(&mut weights, &[0.0; 9], 1.0);
        assert_eq!(weights, [0.0; 9]);
        optimizer.step(&mut weights, &[1.0; 9], 1.0);
        assert_eq!(weights, [-1.0; 9]);
    }

    #[test]
    fn a_scale_multiplies_the_learning_rate() {
        let group = |lr_scale| Group { weight_decay: 0.0, lr_scale, adapt: false };
        let groups = Groups::from_rule(&specs(), |spec| group(if spec.path == "w" { 0.0 } else { 0.5 }));
        for config in [sgd(0.9, false, 0.0), adamw(), lars()] {
            let mut weights = values(0.0);
            Optimizer::with_groups(&config, groups.clone()).step(&mut weights, &values(1.0), 0.1);
            let mut half = values(0.0);
            let whole = Groups::from_rule(&specs(), |_| group(1.0));
            Optimizer::with_groups(&config, whole).step(&mut half, &values(1.0), 0.05);
            assert_eq!(weights[..6], values(0.0)[..6]);
            assert_eq!(weights[6..], half[6..]);
        }
    }

    #[test]
    fn a_reloaded_state_continues_to_the_bit() {
        for config in [sgd(0.0, false, 0.1), sgd(0.9, true, 0.1), adamw(), lars()] {
            let (mut optimizer, mut weights) = run(&config, 3);
            let mut other = Optimizer::new(&config, &specs());
            other.load_state(optimizer.steps(), optimizer.state()).unwrap();
            let mut copied = weights.clone();
            optimizer.step(&mut weights, &values(9.0), 0.1);
            other.step(&mut copied, &values(9.0), 0.1);
            assert_eq!(weights, copied);
            assert_eq!(optimizer.state(), other.state());
        }
    }

    #[test]
    fn states_of_others_are_refused() {
        let mut optimizer = Optimizer::new(&adamw(), &specs());
        let zeros = [0.0f32; 9];
        let full: &[f32] = &zeros;
        assert_eq!(optimizer.load_state(1, [("exp_avg", full)]), Err(StateError::Missing("exp_avg_sq")));
        assert_eq!(optimizer.load_state(1, [("mu", full)]), Err(StateError::Unexpected("mu".to_owned())));
        let short = optimizer.load_state(1, [("exp_avg", &zeros[..2]), ("exp_avg_sq", full)]);
        assert_eq!(short, Err(StateError::Length { name: "exp_avg".to_owned(), found: 2, expected: 9 }));
        assert_eq!(optimizer.steps(), 0);
    }
}
