//! Times training steps of whole networks against PyTorch on the CPU, and their memory.
//!
//!     cargo bench --profile dev --bench step -- --python PYTHON [--rounds 5] [--steps 2] [--channels-last] [MODEL ...]
//!     cargo bench --profile dev --bench step -- --ranks [MODEL ...]
//!
//! The second form has no PyTorch side: it compares one rank thread with one a core, on the same micro-batches, one a core.
//!
//! PYTHON is an interpreter with torch, torchvision and timm. Both sides are processes of their own with the same network, the
//! same batch in `f32`, AdamW and the mean of the squared outputs as the loss; ours has one rank thread per core, PyTorch one compute thread
//! per core. They take turns: in each round ours runs `--steps` steps, then PyTorch's. Prints medians of images/s, their
//! ratio, and the peak of resident memory of the process (Linux; PyTorch's has Python and its libraries in it, some 300 MiB; ours keeps what it
//! has freed). Batch norm takes its statistics over a rank's part of the batch on our side. Without `--python` only ours runs. The first step of each side (fresh memory) is left out.
#![allow(clippy::print_stdout, clippy::doc_markdown, missing_docs)]

mod peer;

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use autodidact::data::{HostBatch, HostView};
use autodidact::engine::{ActivationCheckpointing, EngineError, Memory, Settings, Trainer};
use autodidact::method::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, learner};
use autodidact::model::layers::Linear;
use autodidact::model::{Backbone, BackboneConfig, ConfigError, Pass, Scope};
use autodidact::ops;
use autodidact::optim::{AdamWConfig, Clip, OptimizerConfig, Ramp, Schedule};
use autodidact::parallel::{Collective, ThreadRank, run_ranks, share, value_from_leader};
use autodidact::precision::PrecisionConfig;
use autodidact::problem::Numbers;
use autodidact::rng::{Purpose, Stream};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use peer::{Peer, median};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Name (the Python side has the same), backbone, image size, batch.
const MODELS: [(&str, &str, u32, usize); 6] = [
    ("vit-ti4-32", "[vit]\nsize = \"tiny\"\npatch = 4", 32, 64),
    ("resnet18-32", "[resnet]\ndepth = 18\nstem = \"cifar\"", 32, 64),
    ("vit-s16-224", "[vit]\nsize = \"small\"\npatch = 16", 224, 16),
    ("resnet50-224", "[resnet]\ndepth = 50", 224, 16),
    ("vit-b16-224", "[vit]\nsize = \"base\"\npatch = 16", 224, 8),
    ("convnext-t-224", "[convnext]\nsize = \"tiny\"", 224, 16),
];
const OUTPUTS: usize = 128;

fn main() -> Result<()> {
    ops::keep_pages();
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if let [flag, name, ranks] = arguments.as_slice()
        && flag == "--worker"
    {
        return work(name, ranks.parse()?);
    }
    let (mut python, mut rounds, mut steps, mut channels_last, mut names) = (None, 5, 2, false, Vec::new());
    let mut scaling = false;
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--python" => python = Some(value()?),
            "--rounds" => rounds = value()?.parse()?,
            "--steps" => steps = value()?.parse()?,
            "--channels-last" => channels_last = true,
            "--ranks" => scaling = true,
            name if MODELS.iter().any(|model| model.0 == name) => names.push(argument.clone()),
            other => {
                bail!("{other} is neither an option nor a model; models: {}", MODELS.map(|model| model.0).join(", "))
            }
        }
    }
    println!("{} cores, instruction set {}", cores(), ops::instruction_set());
    if scaling {
        println!("model          batch   1 rank img/s   MiB    {:2} ranks img/s   MiB     speed  memory", cores());
    } else {
        println!("model          batch    ours img/s   MiB      torch img/s   MiB     speed  memory");
    }
    for (name, _, _, batch) in MODELS {
        if !names.is_empty() && !names.iter().any(|chosen| chosen == name) {
            continue;
        }
        let ours = |ranks: usize| {
            Side::start(Command::new(std::env::current_exe()?).args(["--worker", name, &ranks.to_string()]))
        };
        if scaling {
            let [one, all] = turns([ours(1)?, ours(cores())?], batch, rounds, steps)?;
            println!(
                "{name:14} {batch:5}  {:13.1} {:6.0} {:16.1} {:6.0}   {:6.2}x  {:5.2}x",
                one.0,
                one.1,
                all.0,
                all.1,
                all.0 / one.0,
                all.1 / one.1
            );
        } else if let Some(python) = &python {
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/step.py");
            let layout = if channels_last { "channels_last" } else { "contiguous" };
            let theirs = Side::start(Command::new(python).args([script, name, layout, &cores().to_string()]))?;
            let [fast, torch] = turns([ours(cores())?, theirs], batch, rounds, steps)?;
            println!(
                "{name:14} {batch:5}  {:11.1} {:6.0}   {:13.1} {:6.0}   {:6.2}x  {:5.2}x",
                fast.0,
                fast.1,
                torch.0,
                torch.1,
                fast.0 / torch.0,
                fast.1 / torch.1
            );
        } else {
            let [fast] = turns([ours(cores())?], batch, rounds, steps)?;
            println!("{name:14} {batch:5}  {:11.1} {:6.0}", fast.0, fast.1);
        }
    }
    Ok(())
}

/// Lets sides run in turns; images a second and MiB of each.
fn turns<const N: usize>(mut sides: [Side; N], batch: usize, rounds: usize, steps: usize) -> Result<[(f64, f64); N]> {
    for _ in 0..rounds {
        for side in &mut sides {
            // threads of a pool that has just worked spin for a while before they sleep
            std::thread::sleep(std::time::Duration::from_millis(500));
            side.run(steps)?;
        }
    }
    Ok(sides.map(|side| (batch as f64 / median(&side.seconds), side.peer.peak_mib())))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// One side and its times.
struct Side {
    peer: Peer,
    seconds: Vec<f64>,
}

impl Side {
    fn start(command: &mut Command) -> Result<Self> {
        let mut side = Self { peer: Peer::start(command)?, seconds: Vec::new() };
        side.run(1)?;
        side.seconds.clear();
        Ok(side)
    }

    fn run(&mut self, steps: usize) -> Result<()> {
        self.seconds.extend(self.peer.ask(&steps.to_string())?);
        Ok(())
    }
}

/// Our side: steps of the real engine, on batches of noise.
fn work(name: &str, ranks: usize) -> Result<()> {
    let model = MODELS.into_iter().find(|model| model.0 == name).context("the name of a model")?;
    let panicked = |rank, text| EngineError::Panicked { rank, text };
    let micros = cores().min(model.3);
    run_ranks(ranks.min(micros), panicked, |ranks| rank(&ranks, model, micros))?;
    Ok(())
}

fn rank(
    ranks: &ThreadRank,
    (_, backbone, size, batch): (&str, &str, u32, usize),
    micros: usize,
) -> Result<(), EngineError> {
    let device = Device::flex().autodiff();
    let scope = Scope::new(0, &device);
    let config: BackboneConfig = toml::from_str(backbone).expect("the table above is right");
    let backbone = Backbone::new(&config, size, &scope.enter("backbone"))?;
    let head = Linear::torch_default(backbone.dim(), OUTPUTS, true, &scope.enter("head"));
    let learner = learner(Squares { backbone, head }, &device);
    let world = ranks.world_size();
    let settings = Settings {
        seed: 0,
        micro_batches: micros,
        memory: Memory::Keep,
        activation_checkpointing: ActivationCheckpointing::None,
        steps: 1_000_000,
        steps_per_epoch: 1_000_000,
        optimizer: OptimizerConfig::Adamw(AdamWConfig {
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.01,
            decay_all: false,
        }),
        parameters: Vec::new(),
        schedule: Schedule { lr: 1e-3, steps_per_epoch: 1_000_000, ..Schedule::default() },
        weight_decay: Ramp::constant(0.01),
        clip: Clip::None,
        ema: None,
        precision: PrecisionConfig::default(),
        images: batch,
        plan: String::new(),
    };
    let mine = share(micros, ranks.rank(), world);
    let batches: Vec<HostBatch> = mine
        .clone()
        .map(|micro| {
            let images: Vec<u64> = share(batch, micro, micros).map(|image| image as u64).collect();
            let mut noise = Stream::new(0, Purpose::Evaluation, &[micro as u64]);
            let pixels = (0..images.len() * 3 * (size * size) as usize).map(|_| noise.normal() as f32).collect();
            HostBatch { step: 0, micro, images, labels: Vec::new(), views: vec![HostView { size, pixels }] }
        })
        .collect();
    let mut trainer = Trainer::start(settings, device, mine, learner, ranks, None)?;
    loop {
        let line = ranks.leads().then(|| std::io::stdin().lines().next().and_then(Result::ok));
        let Some(line) = &*value_from_leader(ranks, line)? else { return Ok(()) };
        let mut seconds = Vec::new();
        for _ in 0..line.trim().parse().unwrap_or(0) {
            let batches = batches.clone();
            let start = Instant::now();
            trainer.step(batches, false)?;
            seconds.push(start.elapsed().as_secs_f64().to_string());
        }
        if ranks.leads() {
            println!("{}", seconds.join(" "));
        }
    }
}

/// A backbone with a linear head; the loss is the mean of the squared outputs.
#[derive(Module, Debug)]
struct Squares {
    backbone: Backbone,
    head: Linear,
}

impl Method for Squares {
    type Config = ();
    const SEES: Sees = Sees::MicroBatch;

    fn build((): &(), _: &Inputs<'_>, _: &Scope) -> Result<Self, ConfigError> {
        unreachable!("built by hand above")
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let pooled = self.backbone.forward(batch.views[0].clone(), pass).pooled;
        Outputs { tensors: vec![self.head.forward(pooled)], constants: Vec::new() }
    }

    fn check((): &(), _: &Inputs<'_>, _: &mut Numbers) {}

    fn loss(&self, outputs: Outputs, _: &Progress) -> Loss {
        let outputs: Tensor<2> = outputs.tensors.into_iter().next().expect("`encode` returns one");
        let count = outputs.shape().num_elements() as f64;
        Loss::new(outputs.powf_scalar(2.0).sum(), count)
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}
