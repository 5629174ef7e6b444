//! `logs/process-P.log`: what each process of a run did and when, for when one of them is to be found out about.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use crate::files::FileError;
use crate::report::utc;

/// The open log of this process.
#[derive(Debug)]
pub(super) struct ProcessLog {
    path: PathBuf,
    file: Mutex<File>,
}

impl ProcessLog {
    /// Opens the log of a process in a run folder, to go on writing it.
    pub(super) fn open(folder: &Path, process: usize) -> Result<Self, FileError> {
        let path = folder.join("logs").join(format!("process-{process}.log"));
        std::fs::create_dir_all(folder.join("logs")).map_err(FileError::at(&path, "create"))?;
        let file = OpenOptions::new().create(true).append(true).open(&path);
        Ok(Self { file: Mutex::new(file.map_err(FileError::at(&path, "open for writing"))?), path })
    }

    /// Writes a line with the time before it.
    pub(super) fn line(&self, text: &str) -> Result<(), FileError> {
        let line = format!("{} {}\n", utc(SystemTime::now()), text.replace('\n', "; "));
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(line.as_bytes()).map_err(FileError::at(&self.path, "write"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_goes_on_where_it_was() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["started", "failed: no\nreason"] {
            ProcessLog::open(folder.path(), 3).unwrap().line(text).unwrap();
        }
        let text = std::fs::read_to_string(folder.path().join("logs/process-3.log")).unwrap();
        let lines: Vec<&str> = text.lines().map(|line| line.split_once(' ').unwrap().1).collect();
        assert_eq!(lines, ["started", "failed: no; reason"]);
    }
}
