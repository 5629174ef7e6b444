//! A step of a run once more, with every layer looked at: nothing is written.

use burn::tensor::Device;

use super::error::EngineError;
use super::finding::Finding;
use super::train::{Job, loader_plan, settings};
use super::trainer::Trainer;
use crate::data::{HostBatch, Loader};
use crate::ops;
use crate::parallel::{Collective, run_ranks};

/// Runs the passes of the bundle's step from `job.resume`, a state in front of it, and tells what layers put out.
///
/// # Errors
/// When images or the checkpoint cannot be read, or a step in between is not finite.
pub fn replay(job: &Job<'_>, bundle: &Finding) -> Result<Finding, EngineError> {
    ops::configure(job.plan.recipe.ops);
    let panicked = |rank, text| EngineError::Panicked { rank, text };
    let mut found =
        run_ranks(job.plan.threads(), panicked, |rank| replay_rank(job, bundle, &rank, job.device.clone().autodiff()))?;
    Ok(found.swap_remove(0))
}

fn replay_rank(
    job: &Job<'_>,
    bundle: &Finding,
    ranks: &dyn Collective,
    device: Device,
) -> Result<Finding, EngineError> {
    let plan = job.plan;
    let learner = plan.recipe.method.build(&plan.recipe.inputs(), &plan.scope(&device))?;
    let mine = plan.owned_by(ranks.rank());
    let mut trainer = Trainer::start(settings(plan), device, mine.clone(), learner, ranks, job.resume.as_deref())?;
    let first = trainer.steps_done();
    let mut loader = Loader::start(loader_plan(job, ranks, first..bundle.step, mine.clone()))?;
    let mut load = || loader.by_ref().take(mine.len()).collect::<Result<Vec<HostBatch>, _>>();
    while trainer.steps_done() + 1 < bundle.step {
        let stepped = trainer.step(load()?, false)?;
        if stepped.stops {
            let step = trainer.steps_done() + 1;
            return Err(EngineError::EarlierStep { step, wanted: bundle.step });
        }
    }
    trainer.set_precision(bundle.precision.clone());
    trainer.look(load()?, bundle.micro_batch)
}
