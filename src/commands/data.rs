//! `autodidact data inspect`.

use std::fs;
use std::path::Path;

use crate::cli::{DataCommand, InspectArgs};
use crate::data::SourceKind;
use crate::error::{Failure, Kind};

pub(super) fn run(command: &DataCommand) -> Result<(), Failure> {
    let DataCommand::Inspect(args) = command;
    let kind = match args.kind {
        Some(kind) => kind.into(),
        None => guess(args)?,
    };
    Err(Failure::message(
        Kind::Failure,
        format_args!("{}: `data inspect` of a {kind:?} is not wired yet", args.source.display()),
    ))
}

/// Guesses the kind of a source from its name and contents.
fn guess(args: &InspectArgs) -> Result<SourceKind, Failure> {
    let path = &args.source;
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(folder_kind(path)),
        Ok(_) => Ok(SourceKind::List),
        Err(_) if path.as_os_str() == "sample" => Ok(SourceKind::Sample),
        Err(error) => {
            let failure = Failure::new(Kind::Usage, anyhow::Error::new(error).context(path.display().to_string()));
            Err(failure.hint("give a folder, a list file, or `sample` for the images inside this program"))
        }
    }
}

fn folder_kind(folder: &Path) -> SourceKind {
    let has = |name: &str| folder.join(name).is_file();
    if has("data_batch_1.bin") || has("test_batch.bin") {
        SourceKind::Cifar10
    } else if has("train.bin") && has("test.bin") {
        SourceKind::Cifar100
    } else {
        SourceKind::Folder
    }
}
