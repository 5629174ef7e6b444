//! Where each parameter lies in the flat vector, and the rule that its optimizer step follows.

use std::fmt;
use std::ops::Range;

use super::config::OptimizerConfig;

/// A parameter as a stretch of the flat vectors of weights and gradients. Module visit order gives the order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Module path, which is the checkpoint key.
    pub path: String,
    /// Shape of the tensor; its length is the rank.
    pub shape: Vec<usize>,
    /// First element in the flat vector.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl ParamSpec {
    /// Lays parameters one behind the other, in the order given.
    pub fn layout(params: impl IntoIterator<Item = (String, Vec<usize>)>) -> Vec<Self> {
        let mut offset = 0;
        let place = |(path, shape): (String, Vec<usize>)| {
            let len = shape.iter().product();
            let spec = Self { path, shape, offset, len };
            offset += len;
            spec
        };
        params.into_iter().map(place).collect()
    }

    /// Returns its stretch of the flat vector.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// How the optimizer treats one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Weight decay.
    pub weight_decay: f64,
    /// Multiplies the learning rate.
    pub lr_scale: f64,
    /// LARS scales the step by the trust ratio; other optimizers ignore it.
    pub adapt: bool,
}

/// Every parameter with its group, in the order of the flat vector. `Display` prints the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Groups {
    params: Vec<(ParamSpec, Group)>,
}

impl Groups {
    /// Applies the rule of the recipe: tensors of rank <= 1 (biases, norms) are neither decayed, unless `decay_all` is set, nor
    /// adapted by LARS.
    ///
    /// The rank is what MoCo v3's LARS looks at; timm's rule (MAE) also exempts names that end in `.bias`, which have rank 1 in every network here.
    /// Tokens and position embeddings have rank 3 and are decayed, as both rules do.
    #[must_use]
    pub fn new(config: &OptimizerConfig, specs: &[ParamSpec]) -> Self {
        let (weight_decay, decay_all) = match config {
            OptimizerConfig::Sgd(sgd) => (sgd.weight_decay, sgd.decay_all),
            OptimizerConfig::Adamw(adamw) => (adamw.weight_decay, adamw.decay_all),
            OptimizerConfig::Lars(lars) => (lars.weight_decay, false),
        };
        let lars = matches!(config, OptimizerConfig::Lars(_));
        Self::from_rule(specs, |spec| {
            let matrix = spec.shape.len() > 1;
            Group {
                weight_decay: if matrix || decay_all { weight_decay } else { 0.0 },
                lr_scale: 1.0,
                adapt: lars && matrix,
            }
        })
    }

    /// Applies a rule of the caller's: layer-wise decay of the learning rate, frozen layers (scale 0), another choice of what is decayed.
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
        Self { params: specs.iter().map(|spec| (spec.clone(), rule(spec))).collect() }
    }

    /// Iterates over the parameters in the order of the flat vector.
    pub fn iter(&self) -> impl Iterator<Item = &(ParamSpec, Group)> {
        self.params.iter()
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

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shapes: Vec<String> = self.params.iter().map(|(spec, _)| format!("{:?}", spec.shape)).collect();
        let width = |names: &mut dyn Iterator<Item = usize>, title: &str| names.max().unwrap_or(0).max(title.len());
        let path = width(&mut self.params.iter().map(|(spec, _)| spec.path.len()), "parameter");
        let shape = width(&mut shapes.iter().map(String::len), "shape");
        writeln!(f, "{:<path$}  {:<shape$}  {:>12}  {:>8}  adapted", "parameter", "shape", "weight decay", "lr scale")?;
        for ((spec, group), size) in self.params.iter().zip(&shapes) {
            let adapted = if group.adapt { "yes" } else { "no" };
            writeln!(
                f,
                "{:<path$}  {size:<shape$}  {:>12}  {:>8}  {adapted}",
                spec.path, group.weight_decay, group.lr_scale
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::{AdamWConfig, LarsConfig};
    use super::*;

    fn specs() -> Vec<ParamSpec> {
        ParamSpec::layout([
            ("stem.weight".to_owned(), vec![4, 3]),
            ("stem.bias".to_owned(), vec![4]),
            ("scale".to_owned(), vec![]),
            ("cls_token".to_owned(), vec![1, 1, 4]),
        ])
    }

    fn adamw(decay_all: bool) -> OptimizerConfig {
        OptimizerConfig::Adamw(AdamWConfig { betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.05, decay_all })
    }

    fn decays(groups: &Groups) -> Vec<f64> {
        groups.iter().map(|(_, group)| group.weight_decay).collect()
    }

    #[test]
    fn parameters_lie_one_behind_the_other() {
        let ranges: Vec<_> = specs().iter().map(ParamSpec::range).collect();
        assert_eq!(ranges, [0..12, 12..16, 16..17, 17..21]);
        assert_eq!(Groups::new(&adamw(false), &specs()).len(), 21);
    }

    #[test]
    fn biases_norms_and_scalars_are_not_decayed() {
        assert_eq!(decays(&Groups::new(&adamw(false), &specs())), [0.05, 0.0, 0.0, 0.05]);
        assert_eq!(decays(&Groups::new(&adamw(true), &specs())), [0.05; 4]);
    }

    #[test]
    fn lars_adapts_what_it_decays() {
        let lars = OptimizerConfig::Lars(LarsConfig { momentum: 0.9, weight_decay: 1e-6, trust: 0.001 });
        let groups = Groups::new(&lars, &specs());
        assert!(groups.iter().all(|(spec, group)| group.adapt == (spec.shape.len() > 1)));
        assert!(Groups::new(&adamw(true), &specs()).iter().all(|(_, group)| !group.adapt));
    }

    #[test]
    fn table_has_a_line_a_parameter() {
        let table = Groups::new(&adamw(false), &specs()).to_string();
        assert_eq!(table.lines().count(), 5);
        assert!(table.contains("stem.weight  [4, 3]             0.05         1  no"), "{table}");
    }

    #[test]
    #[should_panic(expected = "parameter `b` starts at 3, the one before it ends at 2")]
    fn gaps_are_refused() {
        let spec = |path: &str, offset| ParamSpec { path: path.to_owned(), shape: vec![2], offset, len: 2 };
        let _ = Groups::new(&adamw(false), &[spec("a", 0), spec("b", 3)]);
    }
}
