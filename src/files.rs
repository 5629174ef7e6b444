//! Files that are either whole or not there.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A file operation that failed: where, what, why and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot {action}: {source}{}", path.display(), hint(source))]
pub struct FileError {
    /// File or folder.
    pub path: PathBuf,
    /// What was tried, as in "cannot write".
    pub action: &'static str,
    /// What the system said.
    pub source: io::Error,
}

impl FileError {
    /// Says where and what failed; for `map_err`.
    pub(crate) fn at(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { path, action, source }
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::StorageFull => "\nhint: the disk is full; free some space or choose another folder",
        ErrorKind::QuotaExceeded => "\nhint: the disk quota is used up; free some space or choose another folder",
        ErrorKind::ReadOnlyFilesystem => "\nhint: the file system is read-only; choose another folder",
        ErrorKind::PermissionDenied => {
            "\nhint: this user may not write there; change the permissions or choose another folder"
        }
        ErrorKind::NotFound => "\nhint: the folder does not exist",
        ErrorKind::AlreadyExists => "\nhint: a file has this name; choose another folder",
        ErrorKind::NotADirectory => "\nhint: a part of this path is a file; choose another folder",
        _ => "",
    }
}

/// Writes a file so that at any moment, power loss included, either the old or the new content is there: a temporary
/// file in the same folder, synced, renamed over `path`, and the folder synced.
///
/// # Errors
/// When the folder cannot be written or the disk is full; the old content is then untouched.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    write_atomically_with(path, |file| file.write_all(bytes).map_err(FileError::at(path, "write")))
}

/// As [`write_atomically`], with what `write` writes piece by piece.
///
/// # Errors
/// As there, and what `write` returns.
pub fn write_atomically_with<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    let folder = folder_of(path);
    let file = temporary(folder).map_err(FileError::at(path, "create a temporary file beside it"))?;
    let mut buffered = io::BufWriter::with_capacity(1 << 20, file);
    write(&mut buffered)?;
    let file = buffered.into_inner().map_err(|error| FileError::at(path, "write")(error.into_error()))?;
    file.as_file().sync_all().map_err(FileError::at(path, "write"))?;
    file.persist(path).map_err(|e| FileError { path: path.to_owned(), action: "replace", source: e.error })?;
    Ok(sync_folder(folder)?)
}

/// The folder that a file lies in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes a value as indented JSON, as [`write_atomically`] does.
///
/// # Errors
/// As there, and when the value has no JSON form (a path that is not UTF-8).
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<(), FileError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|e| FileError::at(path, "encode")(e.into()))?;
    text.push(b'\n');
    write_atomically(path, &text)
}

/// Creates a temporary file with the permissions of an ordinary new file (the crate's default is the owner's alone).
fn temporary(folder: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tmp-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        builder.permissions(std::fs::Permissions::from_mode(0o666)); // less the umask
    }
    builder.tempfile_in(folder)
}

/// Makes renames in a folder durable. File systems that cannot sync a folder are left alone.
///
/// # Errors
/// When the disk fails.
pub fn sync_folder(folder: &Path) -> Result<(), FileError> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    match File::open(folder).and_then(|opened| opened.sync_all()) {
        Err(e)
            if !matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported | ErrorKind::PermissionDenied) =>
        {
            Err(FileError::at(folder, "sync")(e))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_the_content_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        write_atomically(&path, b"first, and longer").unwrap();
        write_atomically(&path, b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn others_may_read_as_far_as_the_umask_lets_them() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (ours, plain) = (folder.path().join("ours"), folder.path().join("plain"));
        write_atomically(&ours, b"x").unwrap();
        std::fs::write(&plain, b"x").unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&plain));
    }

    #[test]
    fn a_missing_folder_is_named_with_a_hint() {
        let error = write_atomically(Path::new("/nonexistent/run/summary.json"), b"").unwrap_err().to_string();
        assert!(
            error.starts_with("/nonexistent/run/summary.json: cannot create a temporary file beside it: "),
            "{error}"
        );
        assert!(error.ends_with("hint: the folder does not exist"), "{error}");
    }

    #[test]
    fn a_full_disk_is_said() {
        let error = FileError::at(Path::new("run/x"), "write")(ErrorKind::StorageFull.into()).to_string();
        assert!(error.starts_with("run/x: cannot write: ") && error.contains("hint: the disk is full"), "{error}");
    }

    #[test]
    fn a_target_that_cannot_be_replaced_keeps_its_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        std::fs::create_dir_all(path.join("inside")).unwrap();
        let error = write_atomically(&path, b"x").unwrap_err().to_string();
        assert!(error.contains("cannot replace"), "{error}");
        assert!(path.join("inside").is_dir());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
