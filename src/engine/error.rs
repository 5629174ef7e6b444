//! Why training stopped.

use crate::checkpoint::CheckpointError;
use crate::parallel::Aborted;

/// Why training stopped before its end.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The images.
    #[error(transparent)]
    Data(#[from] crate::data::Error),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The network.
    #[error(transparent)]
    Network(#[from] crate::model::ConfigError),
    /// The run folder.
    #[error(transparent)]
    File(#[from] crate::files::FileError),
    /// The features of the evaluation.
    #[error(transparent)]
    Evaluation(#[from] crate::eval::EvalError),
    /// Test images of several labels, where one is learnt.
    #[error(
        "the test images have several labels or none, the training images one each\nhint: leave one label in each line of the test list, or set `method.classify.multi_label = true`"
    )]
    TestIsMultiLabel,
    /// Training and test images of an evaluation that have other classes.
    #[error(
        "`eval.test` has other classes than the training images: class {index} is `{test}` there and `{train}` here\nhint: use folders with the same class names, or `eval.skip = true`"
    )]
    OtherClasses {
        /// The first class that differs.
        index: usize,
        /// Its name among the test images.
        test: String,
        /// Its name among the training images.
        train: String,
    },
    /// A supervised run without labelled images to evaluate on.
    #[error(
        "there are no labelled images to evaluate on: neither a test split nor `data.validation`\nhint: set `data.validation=0.1` to hold a tenth of the training images back, name others with `eval.test`, or `eval.skip=true`"
    )]
    NothingHeldOut,
    /// Test images that are the training images.
    #[error(
        "`eval.test` are the training images: an accuracy on them says nothing\nhint: name images of their own, or remove `eval.test` and set `data.validation=0.1`"
    )]
    TestIsTraining,
    /// The user asked to stop while the evaluation ran.
    #[error("the evaluation was stopped")]
    Stopped,
    /// Another rank.
    #[error("{}", with_hint(.0))]
    Aborted(#[from] Aborted),
    /// Ranks that must agree do not.
    #[error(
        "rank {rank} has {} {what} than rank {other} in front of step {step}: they do not train the same network\nhint: compare the images under `data.path`, the memory and the processor of their nodes; nothing since the newest checkpoint is kept, and the same command goes on from there",
        if what.ends_with('s') { "other" } else { "another" }
    )]
    Diverged {
        /// The step, counted from 1 as in the logs.
        step: u64,
        /// The rank that differs.
        rank: usize,
        /// One that has what most have.
        other: usize,
        /// What differs.
        what: &'static str,
    },
    /// The loss or the gradient is NaN or infinite.
    #[error(transparent)]
    NotFinite(Box<NotFinite>),
    /// A step that was to be measured.
    #[error(
        "step {step} is not finite, so what it takes says nothing\nhint: `autodidact pretrain` (or `finetune`) with this recipe names the layer"
    )]
    UnmeasuredStep {
        /// The step, counted from 1.
        step: u64,
    },
    /// A step in front of the one to be replayed.
    #[error(
        "step {step}, on the way to step {wanted}, is not finite here, though it was in the run\nhint: replay on the machine type and the device of the run, with its images"
    )]
    EarlierStep {
        /// The step, counted from 1.
        step: u64,
        /// The one to be replayed.
        wanted: u64,
    },
    /// The optimizer made weights that are NaN or infinite of a finite gradient.
    #[error(
        "step {step}: an updated weight is {value}\nhint: nothing of this step is saved; the same command goes on from the newest checkpoint, if there is one; lower `schedule.lr`, lengthen `schedule.warmup_epochs` or set `schedule.clip_norm = 1.0`"
    )]
    WeightsNotFinite {
        /// The step, counted from 1 as in the logs.
        step: u64,
        /// The first such value.
        value: f32,
    },
    /// A defect of ours.
    #[error(
        "rank {rank} panicked: {text}\nhint: this is a defect of autodidact; the same command goes on from the newest checkpoint, if there is one"
    )]
    Panicked {
        /// The rank.
        rank: usize,
        /// What it said.
        text: String,
    },
}

/// A loss or gradient that is NaN or infinite.
#[derive(Debug, thiserror::Error)]
#[error("step {step}: the {what} is {value} in {precision}; {place}\nhint: {advice}; {saved}")]
pub struct NotFinite {
    /// The step, counted from 1 as in the logs.
    pub step: u64,
    /// Loss or gradient norm.
    pub what: String,
    /// Its value.
    pub value: String,
    /// What it was computed in, with the scale of the loss.
    pub precision: String,
    /// Where the first value was that is not finite.
    pub place: String,
    /// What may help.
    pub advice: String,
    /// Where the state before the step is, and the bundle; or why they could not be written.
    pub saved: String,
}

fn with_hint(aborted: &Aborted) -> String {
    match aborted.hint() {
        "" => aborted.to_string(),
        hint => format!("{aborted}\nhint: {hint}"),
    }
}
