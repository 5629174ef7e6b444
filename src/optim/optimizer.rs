//! Optimizers over one flat vector of parameters on the host; [`super::rules`] has the step of a parameter.

use super::config::{LarsForm, OptimizerConfig};
use super::groups::{Group, Groups};
use super::params::ParamSpec;
use super::rules::{Now, adam, lamb, lars, lion, sgd};

/// An optimizer with its state.
#[derive(Clone, Debug)]
pub struct Optimizer {
    config: OptimizerConfig,
    groups: Groups,
    /// Name and values of each vector of the state.
    state: Vec<(&'static str, Vec<f32>)>,
    steps: u64,
    threads: usize,
}

/// What is the same for all parameters in a step.
#[derive(Clone, Copy)]
struct Step<'a> {
    config: &'a OptimizerConfig,
    rates: &'a Rates,
    shrink: f64,
    steps: u64,
}

/// Some parameters that lie one behind the other, with their gradients and their part of each flat vector.
struct Part<'a> {
    parameters: &'a [(ParamSpec, Group)],
    weights: &'a mut [f32],
    gradients: &'a [Vec<f32>],
    state: Vec<&'a mut [f32]>,
}

impl Part<'_> {
    /// Cuts in two between parameters, the first with about `share` of the values.
    fn split(self, share: f64) -> (Self, Self) {
        let start = self.parameters.first().map_or(0, |(spec, _)| spec.offset);
        let wanted = start + (self.weights.len() as f64 * share) as usize;
        let count = self.parameters.partition_point(|(spec, _)| spec.range().end <= wanted);
        let (head, tail) = self.parameters.split_at(count);
        let at = tail.first().map_or(self.weights.len(), |(spec, _)| spec.offset - start);
        let (weights, more_weights) = self.weights.split_at_mut(at);
        let (gradients, more_gradients) = self.gradients.split_at(count);
        let (state, more_state) = self.state.into_iter().map(|values| values.split_at_mut(at)).unzip();
        (
            Self { parameters: head, weights, gradients, state },
            Self { parameters: tail, weights: more_weights, gradients: more_gradients, state: more_state },
        )
    }
}

impl Step<'_> {
    fn run(self, part: Part<'_>, threads: usize) {
        if threads <= 1 {
            return self.run_here(part);
        }
        let (own, others) = part.split(1.0 / threads as f64);
        std::thread::scope(|scope| {
            scope.spawn(|| self.run_here(own));
            self.run(others, threads - 1);
        });
    }

    fn run_here(self, part: Part<'_>) {
        let Self { config, rates, shrink, steps } = self;
        let Part { parameters, weights, gradients, mut state } = part;
        let start = parameters.first().map_or(0, |(spec, _)| spec.offset);
        for ((spec, group), g) in parameters.iter().zip(gradients).filter(|((_, group), _)| group.frozen_steps < steps)
        {
            let range = spec.range().start - start..spec.range().end - start;
            let p = &mut weights[range.clone()];
            let now = Now {
                lr: group.lr_scale * if group.fixed_lr { rates.fixed_lr } else { rates.lr },
                weight_decay: group.decay.at(rates.weight_decay),
                adapt: group.adapt,
                step: steps - group.frozen_steps,
            };
            match (config, state.as_mut_slice()) {
                (OptimizerConfig::Sgd(_), []) => sgd::descend(p, g, now),
                (OptimizerConfig::Sgd(sgd), [m]) => sgd::step(sgd, p, g, &mut m[range], now),
                (OptimizerConfig::Lars(lars), [m]) => lars::step(lars, p, g, &mut m[range], now),
                (OptimizerConfig::Lion(lion), [m]) => lion::step(lion.betas, p, g, &mut m[range], now),
                (config, [mean, square]) => {
                    let moments = (&mut mean[range.clone()], &mut square[range]);
                    match config {
                        OptimizerConfig::Adamw(c) => adam::step(c.betas, c.eps, true, p, g, moments, now),
                        OptimizerConfig::Adam(c) => adam::step(c.betas, c.eps, false, p, g, moments, now),
                        OptimizerConfig::Lamb(lamb) => lamb::step(lamb, shrink, p, g, moments, now),
                        _ => unreachable!("no other optimizer was given two vectors"),
                    }
                }
                _ => unreachable!("the state was made for this optimizer"),
            }
        }
    }
}

/// What moves from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Learning rate.
    pub lr: f64,
    /// Learning rate of groups whose rate doesn't move.
    pub fixed_lr: f64,
    /// The optimizer's weight decay.
    pub weight_decay: f64,
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
    /// Makes an optimizer with an empty state.
    #[must_use]
    pub fn new(config: &OptimizerConfig, groups: Groups) -> Self {
        let names: &[&'static str] = match config {
            OptimizerConfig::Sgd(sgd) if sgd.momentum == 0.0 => &[],
            OptimizerConfig::Sgd(_) => &["momentum_buffer"],
            OptimizerConfig::Adamw(_) | OptimizerConfig::Adam(_) | OptimizerConfig::Lamb(_) => {
                &["exp_avg", "exp_avg_sq"]
            }
            OptimizerConfig::Lars(lars) if lars.form == LarsForm::Separate => &["momentum_buffer"],
            OptimizerConfig::Lars(_) => &["mu"],
            OptimizerConfig::Lion(_) => &["exp_avg"],
        };
        let state = names.iter().map(|&name| (name, vec![0.0; groups.len()])).collect();
        Self { config: config.clone(), groups, state, steps: 0, threads: 1 }
    }

    /// Steps on so many threads; parameters are shared out whole, so the result is the same.
    #[must_use]
    pub fn on_threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Moves the weights by one step; `gradients` has a vector for each parameter. What is frozen in it stays, without decay, and so does its state.
    ///
    /// # Panics
    /// If `weights` or `gradients` don't have one value a parameter element.
    pub fn step(&mut self, weights: &mut [f32], gradients: &[Vec<f32>], rates: &Rates) {
        assert_eq!(weights.len(), self.groups.len(), "one weight a parameter element");
        let lengths = self.groups.specs().map(|spec| spec.len);
        assert!(lengths.eq(gradients.iter().map(Vec::len)), "one gradient a parameter element");
        self.steps += 1;
        let shrink = if let OptimizerConfig::Lamb(lamb) = &self.config { lamb::shrink(lamb, gradients) } else { 1.0 };
        let now = Step { config: &self.config, rates, shrink, steps: self.steps };
        let part = Part {
            parameters: self.groups.as_slice(),
            weights,
            gradients,
            state: self.state.iter_mut().map(|(_, values)| values.as_mut_slice()).collect(),
        };
        now.run(part, self.threads);
    }

    /// Returns how each parameter is treated.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns the number of steps taken, which bias corrections and frozen parameters need.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the state under the names of torch and of the released code, each vector as long as the parameters.
    #[must_use]
    pub fn state(&self) -> Vec<(&'static str, &[f32])> {
        self.state.iter().map(|(name, values)| (*name, values.as_slice())).collect()
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
        for (name, values) in &state {
            if !self.state.iter().any(|(known, _)| known == name) {
                return Err(StateError::Unexpected((*name).to_owned()));
            }
            if values.len() != expected {
                return Err(StateError::Length { name: (*name).to_owned(), found: values.len(), expected });
            }
        }
        if let Some((name, _)) = self.state.iter().find(|(known, _)| !state.iter().any(|(name, _)| name == known)) {
            return Err(StateError::Missing(name));
        }
        for (known, target) in &mut self.state {
            for (_, values) in state.iter().filter(|(name, _)| name == known) {
                target.copy_from_slice(values);
            }
        }
        self.steps = steps;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
