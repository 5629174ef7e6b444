//! One file a command: parse, plan, run, report. No mathematics here.

mod bench;
mod checkpoint;
mod completions;
mod data;
mod doctor;
mod embed;
mod encoder;
mod eval;
mod export;
mod finetune;
mod launch_info;
mod predict;
mod pretrain;
mod processes;
mod recipe;
mod replay;
mod start;

use std::io::Write;

use crate::cli::{Cli, Command};
use crate::error::Failure;
use crate::files::folder_of;

/// Runs the command of a parsed command line.
///
/// # Errors
/// With what is to be printed, and the exit code.
pub fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Pretrain(args) => pretrain::run(&args, finetune::Task::Pretrain),
        Command::Finetune(args) => pretrain::run(&args, finetune::Task::Finetune),
        Command::Eval(command) => eval::run(&command),
        Command::Embed(args) => embed::run(&args),
        Command::Predict(args) => predict::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Recipe(command) => recipe::run(&command),
        Command::Data(command) => data::run(&command),
        Command::Checkpoint(command) => checkpoint::run(&command),
        Command::Bench(args) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::LaunchInfo => launch_info::run(),
        Command::Completions(args) => completions::run(args),
    }
}

/// Prints results on stdout, so that a closed pipe is an error that `main` can ignore instead of a panic.
fn print(text: impl std::fmt::Display) -> Result<(), Failure> {
    Ok(writeln!(std::io::stdout().lock(), "{text}")?)
}

/// Says a line on stderr; when that is closed there is nobody to tell.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
