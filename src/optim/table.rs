//! Parameter groups in print: the table of `pretrain --dry-run`.

use std::fmt;

use super::groups::{Decay, Group, Groups};
use super::ramp::Ramp;

const TITLES: [&str; 7] = ["group", "tensors", "parameters", "lr scale", "weight decay", "adapted", "frozen until"];

/// A table with a line for each group of parameters that are treated alike.
#[derive(Clone, Debug)]
pub struct Table {
    rows: Vec<[String; 7]>,
}

impl Groups {
    /// Returns the table of these groups; `weight_decay` is the optimizer's over the run.
    #[must_use]
    pub fn table(&self, weight_decay: &Ramp) -> Table {
        let mut lines: Vec<(&str, &Group, usize, usize)> = Vec::new();
        for (origin, spec, group) in self.with_origins() {
            match lines.iter_mut().find(|line| (line.0, line.1) == (origin, group)) {
                Some((.., tensors, parameters)) => (*tensors, *parameters) = (*tensors + 1, *parameters + spec.len),
                None => lines.push((origin, group, 1, spec.len)),
            }
        }
        let row = |(origin, group, tensors, parameters): (&str, &Group, usize, usize)| {
            [
                origin.to_owned(),
                tensors.to_string(),
                parameters.to_string(),
                lr_scale(group),
                decay(group.decay, weight_decay),
                if group.adapt { "yes" } else { "no" }.to_owned(),
                match group.frozen_steps {
                    0 => "-".to_owned(),
                    u64::MAX => "the end".to_owned(),
                    steps => format!("step {steps}"),
                },
            ]
        };
        Table { rows: lines.into_iter().map(row).collect() }
    }
}

fn lr_scale(group: &Group) -> String {
    let scale = number(group.lr_scale);
    if group.fixed_lr { format!("{scale} fixed") } else { scale }
}

fn decay(decay: Decay, optimizer: &Ramp) -> String {
    let (start, end) = (decay.at(optimizer.start), decay.at(optimizer.end));
    if start == end { number(start) } else { format!("{} to {}", number(start), number(end)) }
}

/// Six significant digits, for reading.
fn number(value: f64) -> String {
    let rounded: f64 = format!("{value:.5e}").parse().unwrap_or(value);
    if rounded != 0.0 && rounded.abs() < 1e-4 { format!("{rounded:e}") } else { rounded.to_string() }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let titles = TITLES.map(str::to_owned);
        let rows = || std::iter::once(&titles).chain(&self.rows);
        let widths: [usize; 7] =
            std::array::from_fn(|column| rows().map(|row| row[column].chars().count()).max().unwrap_or(0));
        for row in rows() {
            write!(f, "{:<1$}", row[0], widths[0])?;
            for (cell, &width) in row[1..].iter().zip(&widths[1..]) {
                write!(f, "  {cell:>width$}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::OptimizerConfig;
    use super::super::parameter_rule::ParameterRule;
    use super::super::params::ParamSpec;
    use super::super::ramp::RampConfig;
    use super::*;

    #[test]
    fn parameters_that_are_treated_alike_share_a_line() {
        let specs = ParamSpec::layout([
            ("b.patch_embed.proj.weight".to_owned(), vec![400, 3]),
            ("b.blocks.0.fc1.weight".to_owned(), vec![4, 4]),
            ("b.blocks.0.fc1.bias".to_owned(), vec![4]),
            ("b.blocks.0.fc2.weight".to_owned(), vec![4, 4]),
            ("head.last_layer.weight".to_owned(), vec![2, 4]),
            ("predictor.weight".to_owned(), vec![2, 4]),
        ]);
        let rules = [
            ParameterRule { layer_decay: Some(0.65), ..ParameterRule::matching("b.*") },
            ParameterRule { lr_scale: Some(0.0001), frozen: Some(true), ..ParameterRule::matching("*patch_embed*") },
            ParameterRule { freeze_epochs: Some(1.0), ..ParameterRule::matching("*last_layer*") },
            ParameterRule { fixed_lr: Some(true), weight_decay: Some(1e-6), ..ParameterRule::matching("predictor.*") },
        ];
        let config: OptimizerConfig = toml::from_str("[adamw]").unwrap();
        let decay = RampConfig { end: 0.4, ..RampConfig::constant(0.04) }.resolve(100, 10);
        let expected = "\
group                                 tensors  parameters  lr scale  weight decay  adapted  frozen until
rank > 1, b.* layer 0, *patch_embed*        1        1200  4.225e-5   0.04 to 0.4       no       the end
rank > 1, b.* layer 1                       2          32      0.65   0.04 to 0.4       no             -
rank <= 1, b.* layer 1                      1           4      0.65             0       no             -
rank > 1, *last_layer*                      1           8         1   0.04 to 0.4       no      step 313
rank > 1, predictor.*                       1           8   1 fixed          1e-6       no             -
";
        let shown = Groups::new(&config, &specs, &rules, 313).table(&decay).to_string();
        assert_eq!(shown, expected);
    }
}
