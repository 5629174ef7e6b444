//! `autodidact pretrain`.

use crate::cli::PretrainArgs;
use crate::error::{Failure, Kind};
use crate::recipe;

pub(super) fn run(args: &PretrainArgs) -> Result<(), Failure> {
    let loaded = recipe::load(&args.recipe.recipe, &args.recipe.overrides)?;
    Err(Failure::message(Kind::Failure, format_args!("{}: `pretrain` is not wired yet", loaded.path().display())))
}
