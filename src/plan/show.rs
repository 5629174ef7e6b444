//! The plan in print: the table of `--dry-run`, and `plan.toml`.

use std::collections::BTreeMap;
use std::fmt;

use super::Plan;
use super::digest::{DATA, START, START_FROM, flatten};
use crate::optim::{Clip, Each, LrDecay, Ramp};
use crate::recipe::plural;

impl Plan {
    /// Returns the plan as rows of (name, value).
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let recipe = &self.recipe;
        let views = recipe.views.iter().map(|view| format!("{} of {} px", view.count, view.size));
        let classes = self.data.classes.map_or(String::new(), |classes| format!(", {classes} classes"));
        let left_out = self.data.images as u64 - self.steps_per_epoch * recipe.batch.global as u64;
        let limit = |step: u64| if step == 0 { "only at the end".to_owned() } else { format!("every {step} steps") };
        let memory = table(&recipe.batch.memory);
        let mut rows = vec![
            ("run", self.name.clone()),
            ("images", format!("{} ({}{classes})", self.data.images, self.data.description)),
            ("views", views.collect::<Vec<_>>().join(", ")),
            ("backbone", variant(&recipe.backbone)),
            ("init", self.init()),
            ("method", variant(&recipe.method)),
            (
                "parameters",
                self.parameters.map_or_else(|| "counted when the network is built".to_owned(), |n| n.to_string()),
            ),
            ("optimizer", variant(&recipe.optimizer)),
            (
                "batch",
                format!("{} = {} micro-batches of {}", recipe.batch.global, self.micro_batches, recipe.batch.micro),
            ),
            ("memory", memory),
            ("epochs", format!("{}", round(self.epochs()))),
            (
                "steps",
                format!("{} ({} an epoch, {left_out} images left out each epoch)", self.steps, self.steps_per_epoch),
            ),
            ("warm-up", self.warmup()),
            ("learning rate", format!("{} ({}), {}", round(self.lr), self.lr_rule, self.decay())),
            ("weight decay", self.weight_decay()),
            ("clipping", clipping(recipe.schedule.clip())),
            ("seed", recipe.seed.to_string()),
            ("ranks", format!("{}{} ({})", self.ranks, self.spread(), self.shares())),
            ("device", self.device.clone()),
            ("loader", format!("{} threads, {} micro-batches ahead of each rank", self.workers, recipe.data.prefetch)),
            (
                "checkpoints",
                format!("{}, the last {} are kept", limit(recipe.checkpoint.every_steps), recipe.checkpoint.keep),
            ),
            ("digest", self.digest[..16].to_owned()),
        ];
        let after = rows.iter().position(|(name, _)| *name == "method").map_or(0, |at| at + 1);
        rows.splice(after..after, self.notes.iter().map(|note| ("note", note.clone())));
        rows
    }

    /// Writes `plan.toml`: a recipe with every default spelt out, under a header with what follows from it.
    ///
    /// # Errors
    /// When a value has no TOML form, see [`crate::recipe::Recipe::to_toml`].
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        let rows = self.rows().into_iter().filter(|(name, _)| !matches!(*name, "run" | "digest"));
        let rows: Vec<String> =
            rows.map(|(name, value)| format!("# {name:<14} {}", value.replace(char::is_control, " "))).collect();
        Ok(format!(
            "# Plan of `{}`, written by autodidact {}. It is a recipe itself, every default spelt out:\n\
             # running it on the same data gives the same bits.\n#\n{DATA}{}\n{}# digest = \"{}\"\n#\n{}\n\n{}",
            self.name,
            env!("CARGO_PKG_VERSION"),
            self.data.identity(),
            self.start().map_or_else(String::new, |start| {
                let typed = start.typed().replace(char::is_control, " ");
                format!("{START}{}\n{START_FROM}{typed}\n", start.digest())
            }),
            self.digest,
            rows.join("\n"),
            self.recipe.to_toml()?
        ))
    }

    fn init(&self) -> String {
        self.start().map_or_else(
            || String::from(self.recipe.init.clone()),
            |start| {
                let (tensors, values) = start.size();
                format!("{}: {tensors} tensors, {values} values", start.origin())
            },
        )
    }

    fn warmup(&self) -> String {
        let from = if self.warmup_lr == 0.0 { String::new() } else { format!(", from {}", round(self.warmup_lr)) };
        format!("{} ({}){from}", plural(self.warmup_steps, "step"), epochs(self.recipe.schedule.warmup_epochs))
    }

    fn decay(&self) -> String {
        let schedule = &self.recipe.schedule;
        let way = match schedule.decay {
            LrDecay::Cosine => format!("cosine to {}", round(self.min_lr)),
            LrDecay::Linear => format!("straight to {}", round(self.min_lr)),
            LrDecay::Multistep => format!("times {} from each of epoch {:?} on", schedule.gamma, schedule.milestones),
            LrDecay::Constant => "constant".to_owned(),
        };
        if schedule.each == Each::Epoch { way + ", moving between epochs" } else { way }
    }

    fn weight_decay(&self) -> String {
        let Ramp { start, end, .. } = self.weight_decay;
        if start == end { format!("{start}") } else { format!("{start}, cosine to {end}") }
    }

    fn spread(&self) -> String {
        if self.processes == 1 { String::new() } else { format!(" in {} processes", self.processes) }
    }

    fn shares(&self) -> String {
        let counts: Vec<usize> = (0..self.ranks).map(|rank| self.owned_by(rank).len()).collect();
        match (counts.iter().min(), counts.iter().max()) {
            (Some(least), Some(most)) if least != most => format!("{least} or {most} micro-batches each"),
            (Some(count), _) => format!("{} each", plural(count, "micro-batch")),
            _ => String::new(),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows().iter().try_for_each(|(name, value)| writeln!(f, "{name:<14} {value}"))
    }
}

fn clipping(clip: Clip) -> String {
    match clip {
        Clip::None => "none".to_owned(),
        Clip::Global(norm) => format!("the whole gradient to norm {norm}"),
        Clip::Each(norm) => format!("each parameter's gradient to norm {norm}"),
    }
}

/// Writes a table with one variant, such as `[method.simclr]`, as `simclr: temperature 0.1, ...`.
fn variant(config: &impl serde::Serialize) -> String {
    let Ok(toml::Value::Table(table)) = toml::Value::try_from(config) else { return String::new() };
    let Some((name, settings)) = table.iter().next() else { return String::new() };
    let mut values = BTreeMap::new();
    flatten(settings, "", &mut values);
    let values: Vec<String> =
        values.into_iter().map(|(key, value)| format!("{key} {}", value.replace('"', ""))).collect();
    format!("{name}: {}", values.join(", "))
}

fn table(config: &impl serde::Serialize) -> String {
    toml::Value::try_from(config).map_or(String::new(), |value| value.to_string().replace('"', ""))
}

/// Rounds to six significant digits, for reading.
fn round(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

fn epochs(count: f64) -> String {
    format!("{} epoch{}", round(count), if count == 1.0 { "" } else { "s" })
}
