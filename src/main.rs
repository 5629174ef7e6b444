//! The `autodidact` program: parses the command line, runs the command, prints its failure.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use autodidact::cli::Cli;
use autodidact::commands;
use clap::Parser;

/// Keeps its pages between steps (`ops::keep_pages`): page faults take a good part of a training step otherwise.
#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    autodidact::ops::keep_pages();
    match commands::run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has seen enough.
        Err(failure) if failure.is_broken_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            // When stderr is gone too, the exit code still tells.
            let _ = writeln!(io::stderr(), "{}", failure.render(use_colour()));
            ExitCode::from(failure.kind().exit_code())
        }
    }
}

fn use_colour() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
