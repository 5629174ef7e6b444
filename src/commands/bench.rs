//! `autodidact bench`: how fast a recipe's steps are here, and what of the machine's speed they use.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use burn::tensor::DType;
use serde::Serialize;

use super::finetune::Images;
use super::{pretrain, print, say, start};
use crate::backend::{self, Chosen, DeviceChoice};
use crate::cli::BenchArgs;
use crate::data::BadImages;
use crate::engine::{self, EngineError, Job, Lap};
use crate::error::{Failure, Kind};
use crate::files::write_json;
use crate::machine;
use crate::model::Macs;
use crate::parallel::Launch;
use crate::plan::{Plan, Request};
use crate::precision::{Bf16, Compute};
use crate::recipe::{self, Loaded};

/// Version of the JSON's format.
const FORMAT: u32 = 1;
/// Sides of the matrices whose product is measured, on the CPU and on other devices.
const SIDES: [usize; 2] = [2048, 8192];

/// What was measured.
#[derive(Clone, Debug, Serialize)]
struct Figures {
    format: u32,
    autodidact: &'static str,
    recipe: String,
    method: &'static str,
    device: String,
    compute: &'static str,
    instruction_set: &'static str,
    ranks: usize,
    global_batch: usize,
    micro_batch: usize,
    views: usize,
    parameters: Option<usize>,
    steps: usize,
    warmup: usize,
    step_s: Spread,
    images_per_s: f64,
    views_per_s: f64,
    /// Share of the steps' time that ranks waited for images.
    input_wait: f64,
    macs: MacsPerStep,
    flops_per_step: u64,
    flops_per_s: f64,
    product: Product,
    /// Share of the products' rate that the steps have.
    utilisation: f64,
    peak_resident_bytes: Option<u64>,
    device_memory: Option<DeviceMemory>,
}

/// Times in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Spread {
    median: f64,
    p10: f64,
    p90: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct MacsPerStep {
    trained: u64,
    fixed: u64,
}

#[derive(Clone, Debug, Serialize)]
struct Product {
    flops_per_s: f64,
    side: usize,
    threads: usize,
    r#type: &'static str,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct DeviceMemory {
    used_bytes: u64,
    total_bytes: u64,
}

pub(super) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let launch = Launch::detect().map_err(|error| Failure::new(Kind::Usage, error))?;
    if launch.processes > 1 {
        let text = format!("a launcher started {} processes, and `bench` measures one", launch.processes);
        return Err(Failure::message(Kind::Usage, text)
            .hint("start it without a launcher; `metrics.jsonl` of a run has the pace of several processes"));
    }
    let mut loaded = recipe::load(&args.recipe.recipe, &args.recipe.overrides)?;
    let chosen = backend::choose(args.device).map_err(|error| Failure::new(Kind::Usage, error))?;
    if let Some(note) = &chosen.note {
        say(&format!("note: {note}"));
    }
    let images = Images::open(&loaded.recipe)?;
    let plan = plan(args, &mut loaded, &images, &chosen)?;
    let max_bad = plan.recipe.data.max_bad;
    let bad_images = BadImages::open(None, images.train.len(), max_bad).map_err(EngineError::from)?;
    let never = AtomicBool::new(false);
    let job = Job {
        plan: &plan,
        source: Arc::clone(&images.train),
        bad_images: Arc::new(bad_images),
        device: chosen.device.clone(),
        link: None,
        folder: Path::new(""),
        resume: None,
        held_out: None,
        stop: &never,
    };
    say(&format!(
        "{} and {} steps on {}, {}",
        args.warmup,
        args.steps,
        plan.device,
        recipe::plural(plan.ranks, "rank")
    ));
    let laps = engine::bench(&job, u64::from(args.warmup) + u64::from(args.steps))?;
    // both before the products, which take memory, too
    let (resident, device) = (machine::peak_resident(), device_memory(&chosen, args.device));
    let mut figures = figures(&plan, &loaded, &laps, args.warmup as usize, product(&plan, &chosen)?);
    (figures.peak_resident_bytes, figures.device_memory) = (resident, device);
    match &args.json {
        Some(path) if path == Path::new("-") => {
            print(serde_json::to_string_pretty(&figures).expect("numbers and text are JSON"))
        }
        Some(path) => {
            write_json(path, &figures)?;
            print(figures.table())
        }
        None => print(figures.table()),
    }
}

/// Plans a run that is long enough; its length has no influence on a step's time.
fn plan(args: &BenchArgs, loaded: &mut Loaded, images: &Images, chosen: &Chosen) -> Result<Plan, Failure> {
    let request = Request {
        name: args.recipe.recipe.file_stem().map_or_else(|| "run".into(), |stem| stem.to_string_lossy().into_owned()),
        ranks: args.ranks,
        processes: 1,
        cores: pretrain::cores(),
        device: chosen.description.clone(),
        bf16: chosen.bf16,
    };
    let steps = u64::from(args.warmup) + u64::from(args.steps);
    let mut plan = pretrain::resolve(loaded, images, start::open(loaded, None)?, &request)?;
    if plan.steps < steps {
        let schedule = &mut loaded.recipe.schedule;
        (schedule.steps, schedule.epochs) = (Some(steps), None);
        plan = pretrain::resolve(loaded, images, start::open(loaded, None)?, &request)?;
    }
    // the network is built once, so that what does not fit together is said with its key
    pretrain::groups(&mut plan, loaded)?;
    Ok(plan)
}

/// Measures what products of matrices the device does beside all else.
fn product(plan: &Plan, chosen: &Chosen) -> Result<Product, Failure> {
    let on_cpu = chosen.bf16 == Bf16::Emulated;
    let (half, r#type) = match plan.recipe.precision.compute {
        // the CPU rounds to half types and multiplies in fp32
        Compute::Bf16 if !on_cpu => (Some(DType::BF16), "bf16"),
        Compute::Fp16 if !on_cpu => (Some(DType::F16), "fp16"),
        _ => (None, "fp32"),
    };
    let (side, threads) = if on_cpu { (SIDES[0], plan.ranks) } else { (SIDES[1], 1) };
    let flops_per_s = engine::product_rate(&chosen.device, threads, side, half)?;
    Ok(Product { flops_per_s, side, threads, r#type })
}

fn device_memory(chosen: &Chosen, choice: DeviceChoice) -> Option<DeviceMemory> {
    if chosen.bf16 == Bf16::Emulated {
        return None;
    }
    let gpu = if let DeviceChoice::Cuda(Some(gpu)) = choice { gpu } else { 0 };
    let [used_bytes, total_bytes] = machine::device_memory(gpu).ok()?;
    Some(DeviceMemory { used_bytes, total_bytes })
}

fn figures(plan: &Plan, loaded: &Loaded, laps: &[Vec<Lap>], warmup: usize, product: Product) -> Figures {
    let recipe = &plan.recipe;
    let measured = || laps.iter().map(|laps| &laps[warmup..]);
    let steps = laps[0].len() - warmup;
    // ranks begin and end a step together: the slowest one's time is the step's
    let slowest = (0..steps).map(|step| measured().map(|laps| laps[step].step).max().unwrap_or_default());
    let step_s = Spread::of(slowest.map(|time| time.as_secs_f64()).collect());
    let total = |time: fn(&Lap) -> Duration| measured().flatten().map(|lap| time(lap).as_secs_f64()).sum::<f64>();
    let macs = macs_of_step(&measured().collect::<Vec<_>>(), steps);
    let flops_per_step = macs.flops_of_step();
    let flops_per_s = flops_per_step as f64 / step_s.median;
    let (views, images_per_s) = (recipe.inputs().num_views(), recipe.batch.global as f64 / step_s.median);
    Figures {
        format: FORMAT,
        autodidact: env!("CARGO_PKG_VERSION"),
        recipe: loaded.path().display().to_string(),
        method: recipe.method.name(),
        device: plan.device.clone(),
        compute: recipe.precision.compute.name(),
        instruction_set: crate::ops::instruction_set(),
        ranks: plan.ranks,
        global_batch: recipe.batch.global,
        micro_batch: recipe.batch.micro,
        views,
        parameters: plan.parameters,
        steps,
        warmup,
        step_s,
        images_per_s,
        views_per_s: images_per_s * views as f64,
        input_wait: total(|lap| lap.input) / total(|lap| lap.step),
        macs: MacsPerStep { trained: macs.trained, fixed: macs.fixed },
        flops_per_step,
        flops_per_s,
        utilisation: flops_per_s / product.flops_per_s,
        product,
        peak_resident_bytes: None,
        device_memory: None,
    }
}

/// The median step's multiply-adds over all ranks: masks differ from step to step, and a step that overflows in fp16 runs twice.
fn macs_of_step(laps: &[&[Lap]], steps: usize) -> Macs {
    let mut all: Vec<Macs> = (0..steps)
        .map(|step| {
            let add = |sum: Macs, laps: &&[Lap]| {
                let Macs { trained, fixed } = laps[step].macs;
                Macs { trained: sum.trained + trained, fixed: sum.fixed + fixed }
            };
            laps.iter().fold(Macs::default(), add)
        })
        .collect();
    all.sort_by_key(|macs| macs.flops_of_step());
    all[(steps - 1) / 2]
}

impl Spread {
    /// Of at least one time; between two of them in proportion.
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = share * (times.len() - 1) as f64;
            let (below, above) = (times[place.floor() as usize], times[place.ceil() as usize]);
            below + (above - below) * place.fract()
        };
        Self { median: at(0.5), p10: at(0.1), p90: at(0.9) }
    }
}

impl Figures {
    fn table(&self) -> String {
        let mut text = String::new();
        let mut row = |name: &str, value: String| {
            let _ = writeln!(text, "{name:<12} {value}");
        };
        let ms = |seconds: f64| format!("{:.1} ms", 1000.0 * seconds);
        let mib = |bytes: u64| format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20));
        let ranks = recipe::plural(self.ranks, "rank");
        row("recipe", format!("{}, {}, batch {} in {}", self.recipe, self.method, self.global_batch, self.micro_batch));
        row("device", format!("{}, {ranks}, {}, {}", self.device, self.compute, self.instruction_set));
        let Spread { median, p10, p90 } = self.step_s;
        let counted = format!("{} after {} to warm up", recipe::plural(self.steps, "step"), self.warmup);
        row("step", format!("{} (10 to 90 %: {} to {}; {counted})", ms(median), ms(p10), ms(p90)));
        let views = recipe::plural(self.views, "view");
        row("speed", format!("{:.1} images/s, {:.1} views/s ({views} an image)", self.images_per_s, self.views_per_s));
        row("input", format!("{:.1} % of the step spent waiting for images", 100.0 * self.input_wait));
        let MacsPerStep { trained, fixed } = self.macs;
        let giga = |count: f64| count / 1e9;
        let passes =
            format!("{:.2} + {:.2} G multiply-adds forward, trained + fixed", giga(trained as f64), giga(fixed as f64));
        row("work", format!("{:.2} GFLOP a step ({passes})", giga(self.flops_per_step as f64)));
        let Product { flops_per_s, side, threads, r#type } = &self.product;
        let threads = recipe::plural(*threads, "thread");
        row("product", format!("{:.1} GFLOP/s ({side} x {side}, {type}, {threads})", giga(*flops_per_s)));
        let share = format!("{:.1} % of it", 100.0 * self.utilisation);
        row("utilisation", format!("{share}: {:.1} GFLOP/s", giga(self.flops_per_s)));
        row(
            "memory",
            self.peak_resident_bytes.map_or_else(|| "unknown".to_owned(), |peak| format!("{} at most", mib(peak))),
        );
        if let Some(DeviceMemory { used_bytes, total_bytes }) = self.device_memory {
            row("on device", format!("{} of {} taken", mib(used_bytes), mib(total_bytes)));
        }
        text.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_spread_as_sorted() {
        assert_eq!(Spread::of(vec![3.0]), Spread { median: 3.0, p10: 3.0, p90: 3.0 });
        let eleven = (0..=10).rev().map(f64::from).collect();
        assert_eq!(Spread::of(eleven), Spread { median: 5.0, p10: 1.0, p90: 9.0 });
        assert_eq!(Spread::of(vec![2.0, 1.0]).median, 1.5);
    }

    #[test]
    fn work_is_that_of_all_ranks_in_the_median_step() {
        let lap = |trained| Lap { step: Duration::ZERO, input: Duration::ZERO, macs: Macs { trained, fixed: 1 } };
        let (first, second) = ([lap(10), lap(40), lap(10)], [lap(5), lap(5), lap(6)]);
        assert_eq!(macs_of_step(&[&first, &second], 3), Macs { trained: 16, fixed: 2 });
    }
}
