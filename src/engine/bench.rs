//! The first steps of a run against the clock: nothing is written.

use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::error::EngineError;
use super::train::{Job, loader_plan, settings};
use super::trainer::Trainer;
use crate::data::{HostBatch, Loader};
use crate::model::{Macs, counted};
use crate::ops;
use crate::parallel::{Collective, run_ranks};

/// What a step took, on one rank.
#[derive(Clone, Copy, Debug)]
pub struct Lap {
    /// From the wish for images until weights had moved.
    pub step: Duration,
    /// The wait for images in it.
    pub input: Duration,
    /// Multiply-adds of this rank's forward passes; of a pass that is computed again for lack of memory, once.
    pub macs: Macs,
}

/// Runs the first `steps` of a run; returns what they took, for each rank in order. The job's folder, link and evaluation are not looked at.
///
/// # Errors
/// When images cannot be read, or a step is not finite.
pub fn bench(job: &Job<'_>, steps: u64) -> Result<Vec<Vec<Lap>>, EngineError> {
    ops::configure(job.plan.recipe.ops);
    let panicked = |rank, text| EngineError::Panicked { rank, text };
    run_ranks(job.plan.threads(), panicked, |rank| bench_rank(job, steps, &rank))
}

fn bench_rank(job: &Job<'_>, steps: u64, ranks: &dyn Collective) -> Result<Vec<Lap>, EngineError> {
    let plan = job.plan;
    let device = job.device.clone().autodiff();
    let learner = plan.recipe.method.build(&plan.recipe.inputs(), &plan.scope(&device))?;
    let mine = plan.owned_by(ranks.rank());
    let mut trainer = Trainer::start(settings(plan), device, mine.clone(), learner, ranks, None)?;
    let mut loader = Loader::start(loader_plan(job, ranks, 0..steps, mine.clone()))?;
    let mut laps = Vec::new();
    for step in 1..=steps {
        let start = Instant::now();
        let batches: Vec<HostBatch> = loader.by_ref().take(mine.len()).collect::<Result<_, _>>()?;
        let input = start.elapsed();
        let (stepped, macs) = counted(|| trainer.step(batches, false));
        if stepped?.finding.is_some() {
            return Err(EngineError::UnmeasuredStep { step });
        }
        // no rank begins the next step before all have done this one
        ranks.all_gather_f64(Vec::new())?;
        laps.push(Lap { step: start.elapsed(), input, macs });
    }
    Ok(laps)
}

/// Products of which each thread's fastest counts, after one that warms up.
const PRODUCTS: usize = 8;

/// Measures how many floating-point operations a second a device does in products of square matrices: on each of `threads` threads, as each rank of a run is one,
/// its own product at a time. `half`: the type of the matrices, else fp32.
///
/// # Errors
/// When the device fails.
pub fn product_rate(device: &Device, threads: usize, side: usize, half: Option<DType>) -> Result<f64, EngineError> {
    let panicked = |rank, text| EngineError::Panicked { rank, text };
    let rates = run_ranks(threads, panicked, |ranks| -> Result<f64, EngineError> {
        let numbers: Vec<f32> = (0..side * side).map(|index| (index as f32).sin()).collect();
        let matrix = Tensor::<2>::from_data(TensorData::new(numbers, [side, side]), device);
        let matrix = matrix.cast(half.unwrap_or(DType::F32));
        let mut best = f64::INFINITY;
        for attempt in 0..=PRODUCTS {
            ranks.all_gather_f64(Vec::new())?;
            let start = Instant::now();
            let product = ops::linear(matrix.clone(), matrix.clone(), None);
            // another device is done when something of it has been read
            let _ = product.slice([0..1, 0..1]).into_data();
            if attempt > 0 {
                best = best.min(start.elapsed().as_secs_f64());
            }
        }
        Ok(2.0 * (side as f64).powi(3) / best)
    })?;
    Ok(rates.iter().sum())
}
