//! The command line: types only.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::backend::DeviceChoice;
use crate::data::SourceKind;
use crate::plan::Ranks;

/// Self-supervised pretraining of vision models: one binary, one recipe, exact to the bit.
#[derive(Debug, Parser)]
#[command(
    version,
    arg_required_else_help = true,
    max_term_width = 120,
    after_help = "\
Examples:
  autodidact pretrain recipes/simclr.toml
  autodidact pretrain recipes/simclr.toml schedule.epochs=5 --dry-run
  autodidact finetune recipes/finetune.toml init=runs/simclr
  autodidact eval knn runs/simclr
  autodidact data inspect ~/pictures
  autodidact checkpoint inspect dinov2_vits14_pretrain.pth
  autodidact embed runs/simclr ~/pictures --output features.npy
  autodidact predict runs/finetune ~/pictures --output predictions.csv
  autodidact export runs/mae --format timm --output exported

Exit codes: 0 done, 1 failed, 2 wrong usage or recipe, 130 interrupted before a checkpoint."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a network on unlabelled images, as a recipe says
    #[command(after_help = "\
Examples:
  autodidact pretrain recipes/simclr.toml
  autodidact pretrain recipes/simclr.toml seed=1 schedule.lr=0.2 --run-dir runs/lower-lr
  autodidact pretrain recipes/cifar10/mae-vit.toml data.path=~/cifar-10-batches-bin --ranks 4
  autodidact pretrain runs/simclr/plan.toml --run-dir runs/again     # the same bits again

A second run in the same folder continues it. Ranks, threads and restarts never change the result.")]
    Pretrain(TrainArgs),
    /// Teach a pretrained network the classes of labelled images
    #[command(after_help = "\
Examples:
  autodidact finetune recipes/finetune.toml init=runs/simclr
  autodidact finetune recipes/finetune.toml init=runs/simclr data.label_fraction=0.1 --run-dir runs/few-labels
  autodidact finetune recipes/finetune.toml init=runs/simclr method.classify.train=linear
  autodidact finetune recipes/finetune.toml init=random     # from scratch, to compare

`init` is a run folder, a checkpoint in one, or weights of another program; docs/finetune.md has all settings. A second run in the same folder continues it.")]
    Finetune(TrainArgs),
    /// Measure what a network learnt
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Write the features of images
    Embed(EmbedArgs),
    /// Write the classes of images, as a fine-tuned network tells them
    Predict(PredictArgs),
    /// Write a backbone as other programs read it
    Export(ExportArgs),
    /// Compute a step that was not finite once more, and print what every layer put out
    #[command(after_help = "\
Examples:
  autodidact replay runs/simclr/nonfinite-step-120.json
  autodidact replay runs/simclr/nonfinite-step-120.json --json > layers.json

The step starts from the newest checkpoint in front of it; steps in between are computed again. Nothing is written. docs/precision.md explains the bundle.")]
    Replay(ReplayArgs),
    /// Check recipes and write their schema
    #[command(subcommand)]
    Recipe(RecipeCommand),
    /// Look at image sources
    #[command(subcommand)]
    Data(DataCommand),
    /// Look at weights of other programs
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Measure a recipe's training steps; nothing is kept
    #[command(after_help = "\
Examples:
  autodidact bench recipes/simclr.toml
  autodidact bench recipes/cifar10/mae-vit.toml data.path=~/cifar-10-batches-bin --ranks 2 --steps 50
  autodidact bench recipes/finetune.toml init=random --json - | jq .images_per_s

docs/machine.md says what is counted, and what the keys mean.")]
    Bench(BenchArgs),
    /// Look at this machine: what there is, what lacks, what that costs
    #[command(after_help = "\
Examples:
  autodidact doctor
  autodidact doctor --run-dir /scratch/runs
  autodidact doctor --json | jq '.checks[] | select(.state != \"ok\")'

The exit code is 0 whatever lacks. docs/machine.md lists the keys.")]
    Doctor(DoctorArgs),
    /// Print who this process is among those that a launcher started
    #[command(after_help = "\
Examples:
  autodidact launch-info
  mpirun -n 2 autodidact launch-info
  srun -n 2 autodidact launch-info")]
    LaunchInfo,
    /// Write completions for a shell
    Completions(CompletionsArgs),
}

/// A recipe and changes to it.
#[derive(Clone, Debug, Args)]
pub struct RecipeArgs {
    /// Recipe (a TOML file)
    pub recipe: PathBuf,
    /// Changes, such as `schedule.epochs=5` or `views.0.size=32`
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

/// Arguments of `pretrain` and `finetune`.
#[derive(Clone, Debug, Args)]
pub struct TrainArgs {
    /// The recipe.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// What to do with checkpoints in the run folder: `auto` continues from the newest, `never` starts over, a path
    /// continues from that checkpoint
    #[arg(long, value_name = "auto|never|PATH", default_value_t)]
    pub resume: Resume,
    /// Rank threads of each process; `auto` takes as many as there are cores and micro-batches
    #[arg(long, value_name = "N|auto", default_value_t)]
    pub ranks: Ranks,
    /// Seconds without a word from another process that end the run
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
    /// Device to compute on
    #[arg(long, value_name = "auto|cpu|cuda[:I]", default_value_t)]
    pub device: DeviceChoice,
    /// Print what would happen, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Folder of the run [default: runs/NAME, after the recipe]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
}

/// Commands of `eval`.
#[derive(Clone, Debug, Subcommand)]
pub enum EvalCommand {
    /// Classify by the nearest neighbours among a run's features
    #[command(after_help = "\
Examples:
  autodidact eval knn runs/simclr
  autodidact eval knn runs/simclr/checkpoints/step-00000500
  autodidact eval knn runs/simclr eval.k=5")]
    Knn(EvalArgs),
    /// Train a linear classifier on a run's features, beside the nearest neighbours
    #[command(after_help = "\
Examples:
  autodidact eval linear runs/simclr
  autodidact eval linear runs/simclr eval.linear_c=1 eval.max_train=50000")]
    Linear(EvalArgs),
}

/// Arguments of `eval`.
#[derive(Clone, Debug, Args)]
pub struct EvalArgs {
    /// Run folder (its newest checkpoint is used) or checkpoint
    #[arg(value_name = "RUN|CHECKPOINT")]
    pub target: PathBuf,
    /// Changes to the run's recipe, such as `eval.k=5`
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Device to compute on
    #[arg(long, value_name = "auto|cpu|cuda[:I]", default_value_t)]
    pub device: DeviceChoice,
}

/// Arguments of `replay`.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// `nonfinite-step-N.json` of a run folder
    #[arg(value_name = "BUNDLE")]
    pub bundle: PathBuf,
    /// Folder of the run, if the bundle does not lie in it
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Rank threads; any number gives the same numbers
    #[arg(long, value_name = "N|auto", default_value_t)]
    pub ranks: Ranks,
    /// Device to compute on
    #[arg(long, value_name = "auto|cpu|cuda[:I]", default_value_t)]
    pub device: DeviceChoice,
    /// Print the layers as JSON, in the form of the bundle
    #[arg(long)]
    pub json: bool,
}

/// Commands of `recipe`.
#[derive(Clone, Debug, Subcommand)]
pub enum RecipeCommand {
    /// Check keys, types and values of a recipe
    #[command(after_help = "\
Examples:
  autodidact recipe check recipes/simclr.toml
  autodidact recipe check recipes/simclr.toml method.simclr.temperature=0.5")]
    Check(RecipeArgs),
    /// Print a recipe with every default spelt out
    #[command(after_help = "\
Examples:
  autodidact recipe show recipes/simclr.toml
  autodidact recipe show recipes/simclr.toml batch.global=512 > mine.toml")]
    Show(RecipeArgs),
    /// Print the JSON schema of recipes, for completion in editors
    #[command(after_help = "\
Examples:
  autodidact recipe schema > recipes/recipe.schema.json

Then write `#:schema recipe.schema.json` in the first line of a recipe beside it; Taplo and Even Better TOML read it.")]
    Schema,
}

/// Commands of `data`.
#[derive(Clone, Debug, Subcommand)]
pub enum DataCommand {
    /// Count the images of a source and try to read them
    #[command(after_help = "\
Examples:
  autodidact data inspect sample
  autodidact data inspect ~/pictures
  autodidact data inspect cifar-10-batches-bin
  autodidact data inspect images.txt --source list")]
    Inspect(InspectArgs),
}

/// Arguments of `data inspect`.
#[derive(Clone, Debug, Args)]
pub struct InspectArgs {
    /// Folder of images, list file, folder of CIFAR binaries, or `sample`
    pub source: PathBuf,
    /// Kind of the source [default: guessed]
    #[arg(long = "source", value_name = "KIND")]
    pub kind: Option<SourceArg>,
}

/// Kinds of sources, as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SourceArg {
    /// The images inside this program
    Sample,
    /// A folder of image files
    Folder,
    /// A text file of image paths
    List,
    /// CIFAR-10 binary files
    Cifar10,
    /// CIFAR-100 binary files
    Cifar100,
}

impl From<SourceArg> for SourceKind {
    fn from(kind: SourceArg) -> Self {
        match kind {
            SourceArg::Sample => Self::Sample,
            SourceArg::Folder => Self::Folder,
            SourceArg::List => Self::List,
            SourceArg::Cifar10 => Self::Cifar10,
            SourceArg::Cifar100 => Self::Cifar100,
        }
    }
}

/// A backbone, and how images are prepared for it.
#[derive(Clone, Debug, Args)]
pub struct EncoderArgs {
    /// Run folder (its newest checkpoint is used; its best weights where it may stop early), checkpoint, or weights of another program
    #[arg(value_name = "RUN|CHECKPOINT|FILE")]
    pub checkpoint: PathBuf,
    /// Which network of a run: the one that `eval` measures, the student or the teacher as they are
    #[arg(long, value_name = "eval|student|teacher", default_value = "eval", hide_possible_values = true)]
    pub which: Which,
    /// What stands for an image in a vision transformer [default: what the recipe or the file says]
    #[arg(long, value_name = "class|mean", hide_possible_values = true)]
    pub pool: Option<PoolArg>,
    /// Height and width of the images in pixels [default: those of the recipe or the file]
    #[arg(long, value_name = "PIXELS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub size: Option<u32>,
    /// Mean of each channel, as in 0.5,0.5,0.5 [default: that of the recipe or the file, else of ImageNet]
    #[arg(long, value_name = "R,G,B", value_parser = channels)]
    pub mean: Option<[f32; 3]>,
    /// Standard deviation of each channel [default: as for the mean]
    #[arg(long, value_name = "R,G,B", value_parser = deviations)]
    pub std: Option<[f32; 3]>,
    /// Attention heads of a vision transformer of another program, whose file may not tell
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub heads: Option<u16>,
}

/// Reads a number for each channel.
fn channels(text: &str) -> Result<[f32; 3], String> {
    let numbers: Option<Vec<f32>> =
        text.split(',').map(|number| number.trim().parse().ok().filter(|number: &f32| number.is_finite())).collect();
    let three = numbers.and_then(|numbers| numbers.try_into().ok());
    three.ok_or_else(|| "write three numbers, as in 0.485,0.456,0.406".to_owned())
}

fn deviations(text: &str) -> Result<[f32; 3], String> {
    let three = channels(text)?;
    let positive = three.iter().all(|&number| number > 0.0);
    if positive { Ok(three) } else { Err("deviations are larger than 0".to_owned()) }
}

/// Which network of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// The one that is evaluated, its moving average if there is one
    Eval,
    /// The student as it was trained
    Student,
    /// The teacher
    Teacher,
}

/// What stands for an image, as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PoolArg {
    /// The class token
    Class,
    /// The mean of the patches
    Mean,
}

/// Which images of a source, as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SplitArg {
    /// The training images; all where there are no others
    Train,
    /// The test images
    Test,
}

/// Images to look at, and what with.
#[derive(Clone, Debug, Args)]
pub struct ImagesArgs {
    /// Folder of images, list file, folder of CIFAR binaries, or `sample`
    pub source: PathBuf,
    /// Kind of the source [default: guessed]
    #[arg(long = "source", value_name = "KIND")]
    pub kind: Option<SourceArg>,
    /// Which images, where a source has two kinds
    #[arg(long, value_name = "train|test", default_value = "train", hide_possible_values = true)]
    pub split: SplitArg,
    /// Threads [default: one a core]; they do not change the result
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// Device to compute on
    #[arg(long, value_name = "auto|cpu|cuda[:I]", default_value_t)]
    pub device: DeviceChoice,
}

/// Arguments of `embed`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  autodidact embed runs/simclr ~/pictures --output features.npy
  autodidact embed runs/dino/checkpoints/step-00000500 cifar-10-batches-bin --split test --output features.safetensors
  autodidact embed dinov2_vits14_pretrain.pth images.txt --size 224 --output features.npy

The same command goes on after a kill. Beside the features lie NAME.images.jsonl (index, path and label of each row), NAME.labels.npy and NAME.json (settings, and
images that cannot be read). docs/export.md has more.")]
pub struct EmbedArgs {
    /// The backbone.
    #[command(flatten)]
    pub encoder: EncoderArgs,
    /// The images.
    #[command(flatten)]
    pub images: ImagesArgs,
    /// File to write, .npy or .safetensors
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Replace the file, and start over
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `predict`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  autodidact predict runs/finetune ~/pictures --output predictions.csv
  autodidact predict runs/finetune cifar-10-batches-bin --split test --top 3 --output predictions.jsonl
  autodidact predict runs/tags images.txt --threshold 0.3 --output tags.csv

A line for each image, in the order of the source, with class and probability; images that cannot be read have an error instead. Where the images have labels that the
network knows, they are in the file, too. The same command goes on after a kill.")]
pub struct PredictArgs {
    /// Run folder of a `finetune`, or a checkpoint in one
    pub run: PathBuf,
    /// The images.
    #[command(flatten)]
    pub images: ImagesArgs,
    /// File to write, .csv or .jsonl
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// Most probable classes of each image
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub top: Option<u16>,
    /// Probability from which a class is told, where an image may have several [default: 0.5]
    #[arg(long, value_name = "P", value_parser = probability)]
    pub threshold: Option<f64>,
    /// Replace the file, and start over
    #[arg(long)]
    pub force: bool,
}

fn probability(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "write a number from 0 to 1".to_owned())
}

/// Programs that backbones are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// timm: `timm.create_model("local-dir:DIR", pretrained=True)`
    Timm,
    /// Hugging Face: `AutoModel.from_pretrained(DIR)`
    Hf,
    /// torchvision: a state dict
    Torchvision,
    /// The tensors alone, under the names of timm or torchvision
    Safetensors,
    /// ONNX: network and weights in one file, for ONNX Runtime and others
    Onnx,
}

/// Arguments of `export`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  autodidact export runs/dino --format timm --output dino-vit
  autodidact export runs/dino --format hf --which student --output dino-hf --license cc-by-4.0
  autodidact export dinov2_vits14_pretrain.pth --format hf --output dinov2
  autodidact export runs/finetune --format onnx --output flowers

A run of `finetune` is exported as a classifier. The folder has weights, configuration and a README.md whose code loads them. docs/export.md says what each program can express.")]
pub struct ExportArgs {
    /// The backbone.
    #[command(flatten)]
    pub encoder: EncoderArgs,
    /// Program to write for
    #[arg(long, short)]
    pub format: FormatArg,
    /// Folder to write
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// Leave out the classifier of a run of `finetune`
    #[arg(long)]
    pub backbone_only: bool,
    /// Licence that the model card names, such as apache-2.0
    #[arg(long, value_name = "ID", default_value = "unknown")]
    pub license: String,
    /// Replace the folder
    #[arg(long)]
    pub force: bool,
}

/// Commands of `checkpoint`.
#[derive(Clone, Debug, Subcommand)]
pub enum CheckpointCommand {
    /// Say what network a file holds, and what of it a recipe could start from
    #[command(after_help = "\
Examples:
  autodidact checkpoint inspect dinov2_vits14_pretrain.pth
  autodidact checkpoint inspect folder-from-hugging-face/ --json
  autodidact checkpoint inspect checkpoint.pth --recipe recipes/mae.toml backbone.vit.patch=16

Reads safetensors, files of `torch.save` of any version, and folders of Hugging Face's; nothing in them is executed. docs/checkpoints.md lists the layouts.")]
    Inspect(CheckpointArgs),
}

/// Arguments of `checkpoint inspect`.
#[derive(Clone, Debug, Args)]
pub struct CheckpointArgs {
    /// File of weights, index of a file in parts, or folder
    pub file: PathBuf,
    /// Changes to the recipe, such as `backbone.vit.patch=16`
    #[arg(value_name = "KEY=VALUE", requires = "recipe")]
    pub overrides: Vec<String>,
    /// Compare with the backbone of this recipe [default: with the backbone that the file itself has]
    #[arg(long, value_name = "RECIPE")]
    pub recipe: Option<PathBuf>,
    /// Be content with less than 95 % of the backbone
    #[arg(long)]
    pub allow_partial: bool,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// The recipe.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Steps to measure
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub steps: u32,
    /// Steps in front of them that do not count
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub warmup: u32,
    /// Rank threads; `auto` takes as many as there are cores and micro-batches
    #[arg(long, value_name = "N|auto", default_value_t)]
    pub ranks: Ranks,
    /// Device to compute on
    #[arg(long, value_name = "auto|cpu|cuda[:I]", default_value_t)]
    pub device: DeviceChoice,
    /// Write the figures as JSON; `-` prints them in place of the table
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// Arguments of `doctor`.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Folder that runs will be written to
    #[arg(long, alias = "out", value_name = "DIR", default_value = "runs")]
    pub run_dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `completions`.
#[derive(Clone, Copy, Debug, Args)]
#[command(after_help = "\
Examples:
  autodidact completions bash > ~/.local/share/bash-completion/completions/autodidact
  autodidact completions zsh > ~/.zfunc/_autodidact
  autodidact completions fish > ~/.config/fish/completions/autodidact.fish")]
pub struct CompletionsArgs {
    /// Shell
    pub shell: clap_complete::Shell,
}

/// What to do with checkpoints that are there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// Continue from the newest, if there is one.
    #[default]
    Auto,
    /// Start over.
    Never,
    /// Continue from this one.
    From(PathBuf),
}

impl FromStr for Resume {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Auto,
            "never" => Self::Never,
            path => Self::From(path.into()),
        })
    }
}

impl fmt::Display for Resume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Never => f.write_str("never"),
            Self::From(path) => path.display().fmt(f),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(None)),
            (_, Some(Ok(index))) => Ok(Self::Cuda(Some(index))),
            _ => Err("write `auto`, `cpu`, `cuda` or `cuda:1`".to_owned()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(index)) => write!(f, "cuda:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples() {
        fn visit(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            if command.has_subcommands() {
                command.get_subcommands().for_each(|sub| visit(sub, &path));
            } else {
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Examples:"), "{path} has no examples");
            }
        }
        visit(&Cli::command(), "");
    }

    #[test]
    fn pretrain_takes_overrides_and_options_in_any_order() {
        let line =
            ["autodidact", "pretrain", "a.toml", "seed=1", "--ranks", "3", "batch.micro=8", "--device", "cuda:1"];
        let Command::Pretrain(args) = Cli::try_parse_from(line).unwrap().command else { panic!("another command") };
        assert_eq!(args.recipe.overrides, ["seed=1", "batch.micro=8"]);
        assert_eq!(
            (args.ranks, args.device, args.resume),
            (Ranks::Count(3), DeviceChoice::Cuda(Some(1)), Resume::Auto)
        );
    }

    #[test]
    fn wrong_options_say_what_is_right() {
        let message = |option: &str, value: &str| {
            Cli::try_parse_from(["autodidact", "pretrain", "a.toml", option, value]).unwrap_err().to_string()
        };
        assert!(message("--ranks", "0").contains("write a whole number from 1, or `auto`"));
        assert!(message("--device", "gpu").contains("write `auto`, `cpu`, `cuda` or `cuda:1`"));
    }
}
