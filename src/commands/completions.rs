//! `autodidact completions`.

use std::io::Write;

use clap::CommandFactory;

use crate::cli::{Cli, CompletionsArgs};
use crate::error::Failure;

pub(super) fn run(args: CompletionsArgs) -> Result<(), Failure> {
    // Into a buffer first: clap_complete panics when its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "autodidact", &mut script);
    Ok(std::io::stdout().lock().write_all(&script)?)
}
