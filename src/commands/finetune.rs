//! What `autodidact finetune` has beside `pretrain`: labels, and images held out to classify.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn::tensor::Device;

use super::pretrain::cores;
use super::say;
use crate::backend;
use crate::checkpoint;
use crate::data::{self, Portion, Source, Split};
use crate::engine::{self, EngineError, HeldOut, Trained};
use crate::error::{Failure, Kind as Exit};
use crate::files::{FileError, write_atomically, write_json};
use crate::method::{Labels, Learner};
use crate::model::params::Entry;
use crate::model::{Kind, Start, Tensors, merge};
use crate::plan::Plan;
use crate::recipe::{Loaded, Problem, Recipe, plural};
use crate::report::{Summary, write_tables};

/// Which of the two commands trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// `pretrain`: without labels.
    Pretrain,
    /// `finetune`: from labels.
    Finetune,
}

impl Task {
    /// Returns the command's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pretrain => "pretrain",
            Self::Finetune => "finetune",
        }
    }

    /// Requires the recipe's method to be one of this command.
    pub(super) fn check(self, loaded: &Loaded) -> Result<(), Failure> {
        let method = &loaded.recipe.method;
        let (problem, hint) = match (self, method.is_supervised()) {
            (Self::Pretrain, true) => {
                ("learns from labels, and `pretrain` has none", "run `autodidact finetune` with this recipe")
            }
            (Self::Finetune, false) => (
                "learns without labels: there is nothing to fine-tune",
                "run `autodidact pretrain` with this recipe; `recipes/finetune.toml` is one to fine-tune with",
            ),
            _ => return Ok(()),
        };
        let at = format!("method.{}", method.name());
        Err(loaded.error(vec![Problem::at(&at, format!("`{at}` {problem}")).hint(hint)]).into())
    }
}

/// The images of a run.
pub(super) struct Images {
    /// Those that it learns from.
    pub(super) train: Arc<dyn Source>,
    /// The training split that they are of.
    pub(super) whole: Arc<dyn Source>,
    /// Those set aside.
    pub(super) validation: Option<Arc<dyn Source>>,
    /// The labels, where they matter.
    pub(super) labels: Labels,
    unlabelled: usize,
}

impl Images {
    /// Opens the images of a recipe, and chooses those that it learns from.
    pub(super) fn open(recipe: &Recipe) -> Result<Self, Failure> {
        let whole = data::open(&recipe.data, Split::Train).map_err(|error| Failure::new(Exit::Usage, error))?;
        if !recipe.method.is_supervised() {
            let train = Arc::clone(&whole);
            return Ok(Self { train, whole, validation: None, labels: Labels::default(), unlabelled: 0 });
        }
        let Portion { train, validation, unlabelled, counts } =
            Portion::of(&whole, recipe.data.label_fraction, recipe.data.validation, recipe.seed);
        let classes = whole.classes().iter().cloned().zip(counts).collect();
        let labels = Labels { classes, several: whole.is_multi_label() };
        Ok(Self { train, whole, validation, labels, unlabelled })
    }

    /// Says what the user may not expect of the choice.
    pub(super) fn note(&self) -> Option<String> {
        (self.unlabelled > 0).then(|| format!("{} without a label left out", plural(self.unlabelled, "image")))
    }

    /// Chooses what is classified at the end and on the way.
    pub(super) fn held_out(&self, recipe: &Recipe) -> Result<Option<HeldOut>, Failure> {
        let wanted = recipe.method.is_supervised() && !recipe.eval.skip;
        Ok(wanted.then(|| HeldOut::choose(recipe, &self.whole, self.validation.as_ref())).transpose()?)
    }
}

/// The weights that are the result of a run, in flat order, with the network that they are of.
pub(super) struct Outcome {
    learner: Box<dyn Learner>,
    weights: Vec<f32>,
    buffers: Vec<f32>,
}

impl Outcome {
    /// Takes the best weights of a run that may stop early, else the moving average, else the last ones.
    pub(super) fn of(plan: &Plan, folder: &Path, trained: &Trained) -> Result<Self, Failure> {
        let learner = plan
            .recipe
            .method
            .build(&plan.recipe.inputs(), &plan.scope(&backend::host()))
            .map_err(EngineError::from)?;
        if let Some((step, true)) = trained.best {
            say(&format!("stopped early: nothing better since step {step}, whose weights are the result"));
        }
        let (weights, buffers) = if trained.best.is_some() {
            engine::best_weights(folder, learner.as_ref())?
        } else {
            let weights = trained.state.ema.as_ref().unwrap_or(&trained.state.weights);
            (weights.clone(), trained.state.buffers.clone())
        };
        Ok(Self { learner, weights, buffers })
    }

    /// Writes adapters in PEFT's layout, and the network with its adapters merged; nothing where there are none.
    pub(super) fn write_adapters(&self, plan: &Plan, folder: &Path) -> Result<(), Failure> {
        let place = |entry: &Entry| {
            let values = if entry.kind == Kind::Trained { &self.weights } else { &self.buffers };
            (entry.path.clone(), (entry.shape.clone(), values[entry.range()].to_vec()))
        };
        let mut network: Tensors = self.learner.layout().entries().iter().map(place).collect();
        let adapters = merge(&mut network);
        let Some(first) = adapters.first() else { return Ok(()) };
        let name = |path: &str| format!("base_model.model.{}", path.strip_prefix("backbone.").unwrap_or(path));
        let mut file = Tensors::new();
        for adapter in &adapters {
            file.insert(format!("{}.lora_A.weight", name(&adapter.layer)), adapter.a.clone());
            file.insert(format!("{}.lora_B.weight", name(&adapter.layer)), adapter.b.clone());
        }
        // the head is trained, too: PEFT's `modules_to_save`
        let head = network.iter().filter(|(path, _)| path.starts_with("head."));
        file.extend(head.map(|(path, tensor)| (name(path), tensor.clone())));
        let rank = first.a.0[0];
        let layers: Vec<&str> = adapters.iter().filter_map(|adapter| adapter.layer.strip_prefix("backbone.")).collect();
        let config = serde_json::json!({
            "peft_type": "LORA",
            "base_model_name_or_path": plan.start().map(Start::typed),
            "r": rank,
            "lora_alpha": f64::from(first.scale) * rank as f64,
            "lora_dropout": 0.0,
            "target_modules": layers,
            "modules_to_save": ["head"],
            "bias": "none",
            "fan_in_fan_out": false,
            "use_rslora": false,
            "inference_mode": true,
            "task_type": null,
        });
        let adapter = folder.join("adapter");
        fs::create_dir_all(&adapter).map_err(FileError::at(&adapter, "create"))?;
        write_atomically(&adapter.join("adapter_model.safetensors"), &checkpoint::encode_tensors(&file)?)?;
        write_json(&adapter.join("adapter_config.json"), &config)?;
        write_atomically(&folder.join("merged.safetensors"), &checkpoint::encode_tensors(&network)?)?;
        Ok(())
    }
}

/// Classifies what is held out with the weights that are the result, and writes the tables.
pub(super) fn measure(
    plan: &Plan,
    held_out: &HeldOut,
    folder: &Path,
    outcome: &Outcome,
    device: &Device,
    stop: &AtomicBool,
    summary: &mut Summary,
) -> Result<(), Failure> {
    let result = match held_out.finish(plan, (&outcome.weights, &outcome.buffers), device, cores(), stop) {
        Err(EngineError::Stopped) => {
            say("trained; the evaluation was stopped (the same command does it again)");
            return Ok(());
        }
        result => result?,
    };
    let names: Vec<String> = plan.data.labels.classes.iter().map(|(name, _)| name.clone()).collect();
    write_tables(folder, &names, &result)?;
    summary.classification = Some(result);
    Ok(())
}
