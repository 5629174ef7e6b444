//! Guards: what is likely to disappoint, with the reason and what to do instead.

use std::fmt;

use super::Plan;
use crate::precision::{Bf16, Compute};
use crate::recipe::plural;

/// Below this many images pretraining from scratch rarely beats a foundation checkpoint.
const FEW_IMAGES: usize = 1_000_000;
/// Below this many images contrastive methods gain soonest; see README's table.
const CONTRASTIVE_ONLY: usize = 100_000;
/// Below this many steps an epoch, warm-up and cosine are coarse and epochs-based settings lose their meaning.
const FEW_STEPS: u64 = 10;

/// Something the user should know before a run starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Stable code.
    pub code: &'static str,
    /// What is so, and why it matters.
    pub message: String,
    /// What to do instead, a line each.
    pub advice: Vec<String>,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "warning[{}]: {}", self.code, self.message)?;
        self.advice.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

pub(super) fn warnings(plan: &Plan, cores: usize) -> Vec<Warning> {
    [few_images(plan), few_steps(plan), large_batch(plan), crowded(plan, cores), fp16(plan)]
        .into_iter()
        .flatten()
        .collect()
}

/// fp16 where bf16 can be had.
fn fp16(plan: &Plan) -> Option<Warning> {
    let chosen = plan.recipe.precision.compute == Compute::Fp16 && plan.bf16 == Bf16::Native;
    chosen.then(|| Warning {
        code: "W006",
        message: format!(
            "`precision.compute` is \"fp16\", whose largest number is 65504: losses that grow end in NaN; {} computes in bf16 as fast, with the range of fp32",
            plan.device
        ),
        advice: vec!["use `precision.compute=bf16`".to_owned()],
    })
}

fn few_images(plan: &Plan) -> Option<Warning> {
    let images = plan.data.images;
    if plan.recipe.method.is_supervised() {
        return from_scratch(plan);
    }
    if plan.start().is_some() {
        return (images < FEW_IMAGES).then(|| Warning {
            code: "W001",
            message: format!("{images} images, fewer than {FEW_IMAGES}: going on with so few can lose more of what `init` knows than it adds"),
            advice: vec![
                "where the images have labels, the run ends with the accuracy before and after; fine-tuning uses them:".to_owned(),
                "  autodidact finetune RECIPE init=FILE".to_owned(),
            ],
        });
    }
    (images < FEW_IMAGES).then(|| Warning {
        code: "W001",
        message: format!(
            "{images} images, fewer than {FEW_IMAGES}: pretraining from scratch on so few rarely beats a foundation model's features"
        ),
        advice: foundation(plan).into_iter().chain(small(plan)).chain(go_on()).collect(),
    })
}

/// A supervised run of drawn weights on few labels.
fn from_scratch(plan: &Plan) -> Option<Warning> {
    let images = plan.data.images;
    (images < FEW_IMAGES && plan.start().is_none()).then(|| Warning {
        code: "W001",
        message: format!(
            "{images} labelled images, fewer than {FEW_IMAGES}, and drawn weights: from pretrained ones the same labels teach more"
        ),
        advice: vec![
            "pretrain on the images without their labels, or take a foundation checkpoint, and start from it:".to_owned(),
            "  autodidact finetune RECIPE init=runs/NAME     # a run of the same backbone".to_owned(),
            "  autodidact checkpoint inspect FILE            # prints the `[backbone]` table to copy, then init=FILE".to_owned(),
        ],
    })
}

/// The commands that go on from a foundation checkpoint.
fn foundation(plan: &Plan) -> Vec<String> {
    vec![
        "for a result rather than an experiment, start from a foundation checkpoint, such as a DINOv2 or MAE of timm or Hugging Face:".to_owned(),
        "  autodidact checkpoint inspect FILE     # prints the `[backbone]` table to copy into the recipe".to_owned(),
        format!("  autodidact finetune recipes/finetune.toml init=FILE{}   # learns your labels", data_of(plan)),
        "  autodidact pretrain RECIPE init=FILE   # continues from it on these images".to_owned(),
    ]
}

/// The command that goes on from an earlier run instead of from random weights.
fn go_on() -> Vec<String> {
    vec![
        "with a run of this backbone on similar images, go on from its weights: `init=runs/NAME` behind the recipe"
            .to_owned(),
    ]
}

/// The command that trains, on the same data, what is measured to gain on so many images; nothing where that is what is being run.
fn small(plan: &Plan) -> Vec<String> {
    let contrastive = ["simclr", "dcl", "moco2", "moco3", "nnclr"].contains(&plan.recipe.method.name());
    if contrastive || plan.data.images >= CONTRASTIVE_ONLY {
        return Vec::new();
    }
    let command = format!("  autodidact pretrain recipes/simclr.toml{}", data_of(plan));
    vec!["for an experiment, a small network with a method of few settings gains soonest:".to_owned(), command]
}

/// The overrides that name the same data.
fn data_of(plan: &Plan) -> String {
    let data = &plan.recipe.data;
    let Some(path) = &data.path else { return String::new() };
    let path = format!("data.path={}", path.display());
    let path = if path.contains(char::is_whitespace) { format!("\"{path}\"") } else { path };
    format!(" data.source={} {path}", data.source)
}

fn few_steps(plan: &Plan) -> Option<Warning> {
    let steps = plan.steps_per_epoch;
    (steps < FEW_STEPS).then(|| Warning {
        code: "W002",
        message: format!("{} an epoch, fewer than {FEW_STEPS}: few updates for the images seen", plural(steps, "step")),
        advice: vec![format!(
            "use a smaller `batch.global` (at most {} makes {FEW_STEPS} steps) or more epochs",
            (plan.data.images / FEW_STEPS as usize).max(1)
        )],
    })
}

fn large_batch(plan: &Plan) -> Option<Warning> {
    let (global, images) = (plan.recipe.batch.global, plan.data.images);
    let left_out = images % global;
    (left_out * 10 > images).then(|| Warning {
        code: "W003",
        message: format!(
            "each epoch leaves out {left_out} of {images} images, those that do not fill a batch of {global}"
        ),
        advice: vec![
            "others each epoch, so that all are seen in a long run; a smaller `batch.global` leaves out fewer"
                .to_owned(),
        ],
    })
}

fn crowded(plan: &Plan, cores: usize) -> Option<Warning> {
    (plan.threads() > cores).then(|| Warning {
        code: "W004",
        message: format!(
            "{} ranks on {}: the result is the same, but it takes longer",
            plan.threads(),
            plural(cores, "core")
        ),
        advice: vec![format!("use `--ranks {cores}` or `--ranks auto`")],
    })
}
