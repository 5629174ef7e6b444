//! Times training steps of whole networks against PyTorch on the CPU, and their memory.
//!
//!     cargo bench --profile dev --bench step -- --python PYTHON [--rounds 5] [--steps 2] [--channels-last] [MODEL ...]
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
use autodidact::engine::{EngineError, Memory, Settings, Trainer};
use autodidact::method::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, learner};
use autodidact::model::layers::Linear;
use autodidact::model::{Backbone, BackboneConfig, ConfigError, Pass, Scope};
use autodidact::ops;
use autodidact::optim::{AdamWConfig, Clip, OptimizerConfig, Ramp, Schedule};
use autodidact::parallel::{Collective, ThreadRank, run_ranks, share, value_from_leader};
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
    if let [flag, name] = arguments.as_slice()
        && flag == "--worker"
    {
        return work(name);
    }
    let (mut python, mut rounds, mut steps, mut channels_last, mut names) = (None, 5, 2, false, Vec::new());
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--python" => python = Some(value()?),
            "--rounds" => rounds = value()?.parse()?,
            "--steps" => steps = value()?.parse()?,
            "--channels-last" => channels_last = true,
            name if MODELS.iter().any(|model| model.0 == name) => names.push(argument.clone()),
            other => {
                bail!("{other} is neither an option nor a model; models: {}", MODELS.map(|model| model.0).join(", "))
            }
        }
    }
    println!("{} cores, instruction set {}", cores(), ops::instruction_set());
    println!("model          batch    ours img/s   MiB      torch img/s   MiB     speed  memory");
    for (name, _, _, batch) in MODELS {
        if names.is_empty() || names.iter().any(|chosen| chosen == name) {
            compare(name, batch, python.as_deref(), rounds, steps, channels_last)?;
        }
    }
    Ok(())
}

fn compare(name: &str, batch: usize, python: Option<&str>, rounds: usize, steps: usize, last: bool) -> Result<()> {
    let mut ours = Side::start(Command::new(std::env::current_exe()?).args(["--worker", name]))?;
    let mut theirs = match python {
        Some(python) => {
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/step.py");
            let layout = if last { "channels_last" } else { "contiguous" };
            Some(Side::start(Command::new(python).args([script, name, layout, &cores().to_string()]))?)
        }
        None => None,
    };
    // threads of a pool that has just worked spin for a while before they sleep
    let settle = || std::thread::sleep(std::time::Duration::from_millis(500));
    for _ in 0..rounds {
        settle();
        ours.run(steps)?;
        if let Some(theirs) = &mut theirs {
            settle();
            theirs.run(steps)?;
        }
    }
    let rate = |side: &Side| batch as f64 / median(&side.seconds);
    let (fast, memory) = (rate(&ours), ours.peer.peak_mib());
    print!("{name:14} {batch:5}  {fast:11.1} {memory:6.0}");
    if let Some(theirs) = &theirs {
        let (torch, torch_memory) = (rate(theirs), theirs.peer.peak_mib());
        print!("   {torch:13.1} {torch_memory:6.0}   {:6.2}x  {:5.2}x", fast / torch, memory / torch_memory);
    }
    println!();
    Ok(())
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
fn work(name: &str) -> Result<()> {
    let model = MODELS.into_iter().find(|model| model.0 == name).context("the name of a model")?;
    let panicked = |rank, text| EngineError::Panicked { rank, text };
    run_ranks(cores().min(model.3), panicked, |ranks| rank(&ranks, model))?;
    Ok(())
}

fn rank(ranks: &ThreadRank, (_, backbone, size, batch): (&str, &str, u32, usize)) -> Result<(), EngineError> {
    let device = Device::flex().autodiff();
    let scope = Scope::new(0, &device);
    let config: BackboneConfig = toml::from_str(backbone).expect("the table above is right");
    let backbone = Backbone::new(&config, size, &scope.enter("backbone"))?;
    let head = Linear::torch_default(backbone.dim(), OUTPUTS, true, &scope.enter("head"));
    let learner = learner(Squares { backbone, head }, &device);
    let world = ranks.world_size();
    let settings = Settings {
        seed: 0,
        micro_batches: world,
        memory: Memory::Keep,
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
    };
    let micro = share(world, ranks.rank(), world);
    let images: Vec<u64> = share(batch, ranks.rank(), world).map(|image| image as u64).collect();
    let mut noise = Stream::new(0, Purpose::Evaluation, &[ranks.rank() as u64]);
    let pixels = (0..images.len() * 3 * (size * size) as usize).map(|_| noise.normal() as f32).collect();
    let batch = HostBatch { step: 0, micro: micro.start, images, views: vec![HostView { size, pixels }] };
    let mut trainer = Trainer::start(settings, device, micro, learner, ranks, None)?;
    loop {
        let line = ranks.leads().then(|| std::io::stdin().lines().next().and_then(Result::ok));
        let Some(line) = &*value_from_leader(ranks, line)? else { return Ok(()) };
        let mut seconds = Vec::new();
        for _ in 0..line.trim().parse().unwrap_or(0) {
            let batches = vec![batch.clone()];
            let start = Instant::now();
            trainer.step(batches)?;
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
