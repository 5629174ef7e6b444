//! `autodidact eval knn`.

use crate::cli::EvalCommand;
use crate::error::{Failure, Kind};

pub(super) fn run(command: &EvalCommand) -> Result<(), Failure> {
    let EvalCommand::Knn(args) = command;
    let target = args.target.display();
    Err(Failure::message(Kind::Failure, format_args!("{target}: `eval knn` is not wired yet")))
}
