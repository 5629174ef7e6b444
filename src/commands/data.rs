//! `autodidact data inspect`.

use std::fs;
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};

use super::print;
use crate::cli::{DataCommand, InspectArgs};
use crate::data::{self, DataConfig, SourceKind, Split};
use crate::error::{Failure, Kind};

pub(super) fn run(command: &DataCommand) -> Result<(), Failure> {
    let DataCommand::Inspect(args) = command;
    let kind = match args.kind {
        Some(kind) => kind.into(),
        None => guess(&args.source)?,
    };
    let source = data::open(&table(kind, args), Split::Train).map_err(|error| Failure::new(Kind::Usage, error))?;
    // Hidden when stderr is not a terminal.
    let bar = ProgressBar::new(source.len() as u64).with_style(
        ProgressStyle::with_template("reading {bar:40} {human_pos}/{human_len} images, {eta} left")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let report = data::inspect(source.as_ref(), &|done| bar.set_position(done as u64));
    bar.finish_and_clear();
    print(format_args!("source      {kind}, {}", args.source.display()))?;
    print(report.to_string().trim_end())
}

/// The `[data]` table that a recipe would have.
fn table(kind: SourceKind, args: &InspectArgs) -> DataConfig {
    DataConfig::new(kind, (kind != SourceKind::Sample).then(|| args.source.clone()))
}

/// Guesses the kind of a source from its name and contents.
pub(super) fn guess(path: &Path) -> Result<SourceKind, Failure> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(folder_kind(path)),
        Ok(_) if image::ImageFormat::from_path(path).is_ok() => {
            let text = format!("{}: an image, not a list of images", path.display());
            Err(Failure::message(Kind::Usage, text).hint("give its folder, or a text file with its name in a line"))
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_source_is_guessed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for (folder, file) in
            [("ten", "data_batch_1.bin"), ("hundred", "train.bin"), ("hundred", "test.bin"), ("a", "b.png")]
        {
            fs::create_dir_all(path(folder)).unwrap();
            fs::write(path(folder).join(file), "").unwrap();
        }
        fs::write(path("list.txt"), "").unwrap();
        let expected = [
            ("ten", SourceKind::Cifar10),
            ("hundred", SourceKind::Cifar100),
            ("a", SourceKind::Folder),
            ("list.txt", SourceKind::List),
        ];
        for (name, kind) in expected {
            assert_eq!(guess(&path(name)).unwrap(), kind);
        }
        assert_eq!(guess(Path::new("sample")).unwrap(), SourceKind::Sample);
        fs::write(path("cat.jpg"), "").unwrap();
        assert!(guess(&path("cat.jpg")).unwrap_err().render(false).contains("an image, not a list of images"));
        let failure = guess(&path("absent")).unwrap_err();
        assert_eq!(failure.kind(), Kind::Usage);
        assert!(failure.render(false).contains("absent: No such file or directory"), "{failure}");
    }
}
