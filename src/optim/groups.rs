//! How each parameter is treated: the optimizer's own rule, then the recipe's and the method's.

use std::fmt::Write as _;

use super::config::OptimizerConfig;
use super::parameter_rule::ParameterRule;
use super::params::ParamSpec;

/// The weight decay of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// The optimizer's, which may move over a run, times this.
    Scaled(f64),
    /// This, from the first step to the last.
    Fixed(f64),
}

impl Decay {
    /// Returns the value where the optimizer's weight decay is `now`.
    #[must_use]
    pub fn at(self, now: f64) -> f64 {
        match self {
            Self::Scaled(scale) => scale * now,
            Self::Fixed(value) => value,
        }
    }
}

/// How the optimizer treats one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Weight decay.
    pub decay: Decay,
    /// Multiplies the learning rate.
    pub lr_scale: f64,
    /// The learning rate is the one after the warm-up, in every step.
    pub fixed_lr: bool,
    /// LARS and LAMB scale the step by the trust ratio; other optimizers ignore it.
    pub adapt: bool,
    /// Steps at the start in which it is not trained; the optimizer counts its steps from there, as torch does where gradients are missing.
    pub frozen_steps: u64,
}

impl Default for Group {
    /// The optimizer's weight decay and learning rate, not adapted.
    fn default() -> Self {
        Self { decay: Decay::Scaled(1.0), lr_scale: 1.0, fixed_lr: false, adapt: false, frozen_steps: 0 }
    }
}

/// Every parameter with its group, in the order of the flat vector.
#[derive(Clone, Debug, PartialEq)]
pub struct Groups {
    params: Vec<(ParamSpec, Group)>,
    /// What made each parameter's group, in words.
    origins: Vec<String>,
}

impl Groups {
    /// Applies the optimizer's rule, then `rules` one after another: those a method brings along first, so that the recipe has the last word.
    ///
    /// The optimizer's rule: tensors of rank <= 1 (biases, norms) are neither decayed nor adapted by LARS and LAMB, unless `decay_all` is set.
    /// The rank is what MoCo v3's LARS looks at; timm's rule (MAE) also exempts names that end in `.bias`, which have rank 1 in every network here.
    /// Tokens and position embeddings have rank 3 and are decayed, as both rules do. `published` has the rules of others.
    ///
    /// # Panics
    /// If the parameters don't lie one behind the other from offset 0.
    #[must_use]
    pub fn new(config: &OptimizerConfig, specs: &[ParamSpec], rules: &[ParameterRule], steps_per_epoch: u64) -> Self {
        let mut groups = Self::from_rule(specs, |spec| {
            let decayed = spec.shape.len() > 1 || config.decays_all();
            Group {
                decay: Decay::Scaled(f64::from(u8::from(decayed))),
                adapt: config.adapts(decayed),
                ..Group::default()
            }
        });
        for rule in rules {
            groups.apply(config, specs, rule, steps_per_epoch);
        }
        groups
    }

    /// Applies a rule of the caller's, whatever the optimizer.
    ///
    /// # Panics
    /// If the parameters don't lie one behind the other from offset 0.
    #[must_use]
    pub fn from_rule(specs: &[ParamSpec], rule: impl Fn(&ParamSpec) -> Group) -> Self {
        let mut end = 0;
        for spec in specs {
            assert!(
                spec.offset == end,
                "parameter `{}` starts at {}, the one before it ends at {end}",
                spec.path,
                spec.offset
            );
            end += spec.len;
        }
        let origin = |spec: &ParamSpec| if spec.shape.len() > 1 { "rank > 1" } else { "rank <= 1" }.to_owned();
        Self {
            params: specs.iter().map(|spec| (spec.clone(), rule(spec))).collect(),
            origins: specs.iter().map(origin).collect(),
        }
    }

    fn apply(&mut self, config: &OptimizerConfig, specs: &[ParamSpec], rule: &ParameterRule, steps_per_epoch: u64) {
        let layers = rule.layers(specs);
        for (index, (spec, group)) in self.params.iter_mut().enumerate() {
            if !rule.matches(spec) {
                continue;
            }
            let scale = rule.decay_scale.map(Decay::Scaled);
            if let Some(decay) = rule.weight_decay.map(Decay::Fixed).or(scale) {
                group.decay = decay;
                group.adapt = config.adapts(!matches!(decay, Decay::Fixed(0.0) | Decay::Scaled(0.0)));
            }
            let layer = layers.as_ref().and_then(|layers| layers[index]);
            group.lr_scale *= rule.lr_scale.unwrap_or(1.0) * layer.map_or(1.0, |(_, scale)| scale);
            group.adapt = rule.adapt.unwrap_or(group.adapt);
            group.fixed_lr = rule.fixed_lr.unwrap_or(group.fixed_lr);
            group.frozen_steps = rule.frozen_steps(steps_per_epoch).unwrap_or(group.frozen_steps);
            let origin = &mut self.origins[index];
            origin.push_str(", ");
            origin.push_str(&rule.pattern);
            if let Some((layer, _)) = layer {
                let _ = write!(origin, " layer {layer}");
            }
        }
    }

    /// Iterates over the parameters in the order of the flat vector.
    pub fn iter(&self) -> impl Iterator<Item = &(ParamSpec, Group)> {
        self.params.iter()
    }

    pub(super) fn as_slice(&self) -> &[(ParamSpec, Group)] {
        &self.params
    }

    /// Iterates over the places of the parameters.
    pub fn specs(&self) -> impl Iterator<Item = &ParamSpec> {
        self.params.iter().map(|(spec, _)| spec)
    }

    /// Iterates over the parameters with what made their groups.
    pub(super) fn with_origins(&self) -> impl Iterator<Item = (&str, &ParamSpec, &Group)> {
        self.origins.iter().zip(&self.params).map(|(origin, (spec, group))| (origin.as_str(), spec, group))
    }

    /// Sets the gradient of what is not trained in a step, counted from 0, to zero, so that it is in no norm: DINO's
    /// `cancel_gradients_last_layer` (released `utils.py`), `SwAV`'s `freeze_prototypes_niters`.
    ///
    /// # Panics
    /// If a parameter lies beyond the end of `gradients`.
    pub fn cancel_frozen(&self, step: u64, gradients: &mut [Vec<f32>]) {
        let frozen = self.params.iter().zip(gradients).filter(|((_, group), _)| step < group.frozen_steps);
        frozen.for_each(|(_, gradient)| gradient.fill(0.0));
    }

    /// Returns the length of the flat vector.
    #[must_use]
    pub fn len(&self) -> usize {
        self.params.last().map_or(0, |(spec, _)| spec.range().end)
    }

    /// Tells whether there is nothing to optimize.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs() -> Vec<ParamSpec> {
        ParamSpec::layout([
            ("b.patch_embed.proj.weight".to_owned(), vec![4, 3]),
            ("b.blocks.0.fc1.weight".to_owned(), vec![4, 4]),
            ("b.blocks.0.fc1.bias".to_owned(), vec![4]),
            ("b.scale".to_owned(), vec![]),
            ("b.cls_token".to_owned(), vec![1, 1, 4]),
            ("head.last_layer.weight".to_owned(), vec![2, 4]),
        ])
    }

    fn config(table: &str) -> OptimizerConfig {
        toml::from_str(table).unwrap()
    }

    fn groups(table: &str, rules: &[ParameterRule]) -> Groups {
        Groups::new(&config(table), &specs(), rules, 10)
    }

    fn each<T>(groups: &Groups, value: impl Fn(&Group) -> T) -> Vec<T> {
        groups.iter().map(|(_, group)| value(group)).collect()
    }

    fn decays(groups: &Groups) -> Vec<f64> {
        each(groups, |group| group.decay.at(0.05))
    }

    #[test]
    fn biases_norms_and_scalars_are_not_decayed() {
        assert_eq!(decays(&groups("[adamw]", &[])), [0.05, 0.05, 0.0, 0.0, 0.05, 0.05]);
        assert_eq!(decays(&groups("adamw = { decay_all = true }", &[])), [0.05; 6]);
    }

    #[test]
    fn lars_and_lamb_adapt_what_they_decay() {
        let adapted = |table: &str| each(&groups(table, &[]), |group| group.adapt);
        let matrices = [true, true, false, false, true, true];
        assert_eq!(adapted("[lars]"), matrices);
        assert_eq!(adapted("lars = { decay_all = true }"), [true; 6]);
        assert_eq!(adapted("[lamb]"), matrices);
        assert_eq!(adapted("lamb = { always_adapt = true }"), [true; 6]);
        assert_eq!(adapted("lamb = { weight_decay = 0.0 }"), [false; 6]);
        assert_eq!(adapted("adamw = { decay_all = true }"), [false; 6]);
    }

    #[test]
    fn rules_apply_in_order_scales_multiply_and_the_last_value_counts() {
        let rules = [
            ParameterRule { layer_decay: Some(0.5), ..ParameterRule::matching("b.*") },
            ParameterRule { lr_scale: Some(0.2), ..ParameterRule::matching("*patch_embed*") },
            ParameterRule { weight_decay: Some(0.3), decay_scale: None, ..ParameterRule::matching("*_token|*.weight") },
            ParameterRule { decay_scale: Some(0.0), ..ParameterRule::matching("*_token") },
            ParameterRule { max_rank: Some(1), fixed_lr: Some(true), ..ParameterRule::default() },
        ];
        let groups = groups("[lars]", &rules);
        assert_eq!(each(&groups, |group| group.lr_scale), [0.25 * 0.2, 0.5, 0.5, 1.0, 0.25, 1.0]);
        assert_eq!(decays(&groups), [0.3, 0.3, 0.0, 0.0, 0.0, 0.3]);
        assert_eq!(each(&groups, |group| group.adapt), [true, true, false, false, false, true]);
        assert_eq!(each(&groups, |group| group.fixed_lr), [false, false, true, true, false, false]);
    }

    #[test]
    fn frozen_gradients_are_cancelled_until_their_step() {
        let rules = [
            ParameterRule { freeze_epochs: Some(1.5), ..ParameterRule::matching("*last_layer*") },
            ParameterRule { frozen: Some(true), ..ParameterRule::matching("*patch_embed*") },
            ParameterRule { freeze_steps: Some(2), ..ParameterRule::matching("*cls_token") },
        ];
        let groups = groups("[adamw]", &rules);
        assert_eq!(each(&groups, |group| group.frozen_steps), [u64::MAX, 0, 0, 0, 2, 15]);
        let left = |step| {
            let mut gradients: Vec<Vec<f32>> = groups.specs().map(|spec| vec![1.0; spec.len]).collect();
            groups.cancel_frozen(step, &mut gradients);
            gradients.iter().map(|gradient| gradient.iter().sum()).collect::<Vec<f32>>()
        };
        assert_eq!(left(0), [0.0, 16.0, 4.0, 1.0, 0.0, 0.0]);
        assert_eq!(left(2), [0.0, 16.0, 4.0, 1.0, 4.0, 0.0]);
        assert_eq!(left(15), [0.0, 16.0, 4.0, 1.0, 4.0, 8.0]);
    }

    #[test]
    fn rules_without_effect_say_so() {
        let error = |rule: &ParameterRule| rule.check(&specs()).unwrap_err();
        let wrong = error(&ParameterRule::matching("fc1"));
        assert_eq!((wrong.key, wrong.problem.as_str()), ("match", "is \"fc1\", which no parameter matches"));
        assert_eq!(wrong.hint, "a pattern is about whole paths: `*fc1*` matches `b.blocks.0.fc1.weight`");
        assert_eq!(error(&ParameterRule::matching("x")).hint, "paths look like `b.patch_embed.proj.weight`");
        let no_layers = error(&ParameterRule { layer_decay: Some(0.9), ..ParameterRule::matching("head.*") });
        assert_eq!(no_layers.key, "layer_decay");
        assert!(no_layers.problem.contains("no numbered blocks"), "{no_layers}");
        assert_eq!(ParameterRule::default().check(&specs()), Ok(()));
    }

    #[test]
    #[should_panic(expected = "parameter `b` starts at 3, the one before it ends at 2")]
    fn gaps_are_refused() {
        let spec = |path: &str, offset| ParamSpec { path: path.to_owned(), shape: vec![2], offset, len: 2 };
        let _ = Groups::from_rule(&[spec("a", 0), spec("b", 3)], |_| Group::default());
    }
}
