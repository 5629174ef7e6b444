//! Why a file cannot be read or used.

use std::io;
use std::path::{Path, PathBuf};

/// A checkpoint that is refused: where, what, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}\nhint: {}", path.display(), .refusal.problem, .refusal.hint)]
pub struct ImportError {
    path: PathBuf,
    refusal: Refusal,
}

impl ImportError {
    /// Returns what is wrong, in one sentence.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.refusal.problem
    }

    /// Returns what to do about it.
    #[must_use]
    pub fn hint(&self) -> &str {
        &self.refusal.hint
    }
}

/// What is wrong and what to do, before it is known in which file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) problem: String,
    pub(super) hint: String,
}

impl Refusal {
    pub(super) fn new(problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { problem: problem.into(), hint: hint.into() }
    }

    /// The file ends too early, or its parts contradict each other.
    pub(super) fn damaged(problem: impl Into<String>) -> Self {
        Self::new(
            problem,
            "the file is damaged or was not copied whole: fetch it again and compare its size or checksum",
        )
    }

    /// The file is not what any program writes.
    pub(super) fn malformed(problem: impl Into<String>) -> Self {
        Self::new(problem, "no program that saves weights writes such a file: do not trust where it came from")
    }

    pub(super) fn at(self, path: &Path) -> ImportError {
        ImportError { path: path.to_owned(), refusal: self }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            return Self::damaged("the file ends in the middle of a value");
        }
        Self::new(format!("cannot read it: {error}"), "check that the file exists and may be read")
    }
}
