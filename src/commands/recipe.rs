//! `autodidact recipe check|show|schema`.

use super::print;
use crate::cli::{RecipeArgs, RecipeCommand};
use crate::error::{Failure, Kind};
use crate::recipe::{self, Loaded};

pub(super) fn run(command: &RecipeCommand) -> Result<(), Failure> {
    match command {
        RecipeCommand::Check(args) => {
            let loaded = load(args)?;
            print(format_args!("{}: no problems found", loaded.path().display()))
        }
        RecipeCommand::Show(args) => {
            let shown = load(args)?.recipe.to_toml();
            print(shown.map_err(|error| Failure::new(Kind::Usage, error))?.trim_end())
        }
        RecipeCommand::Schema => print(format_args!("{:#}", recipe::schema())),
    }
}

fn load(args: &RecipeArgs) -> Result<Loaded, Failure> {
    Ok(recipe::load(&args.recipe, &args.overrides)?)
}
