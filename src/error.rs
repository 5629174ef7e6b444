//! How a command fails: what is printed, and the exit code.

use std::fmt;

use crate::plan::FolderError;
use crate::recipe::{RecipeError, report};

/// Kind of a failure; decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Something went wrong on the way: exit code 1.
    Failure,
    /// The command line or the recipe is wrong: exit code 2.
    Usage,
    /// Interrupted before there was a checkpoint: exit code 130.
    Interrupted,
}

impl Kind {
    /// Returns the exit code of the process.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Failure => 1,
            Self::Usage => 2,
            Self::Interrupted => 130,
        }
    }
}

/// The failure of a command.
#[derive(Debug)]
pub struct Failure {
    kind: Kind,
    error: anyhow::Error,
    hint: Option<String>,
}

impl Failure {
    /// Wraps an error; the chain of its sources is printed.
    pub fn new(kind: Kind, error: impl Into<anyhow::Error>) -> Self {
        Self { kind, error: error.into(), hint: None }
    }

    /// Describes a failure in words.
    pub fn message(kind: Kind, message: impl fmt::Display) -> Self {
        Self { kind, error: anyhow::anyhow!("{message}"), hint: None }
    }

    /// Adds the remedy.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Returns the kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Tells whether the reader of our output has gone (`autodidact recipe schema | head`): no failure at all.
    pub fn is_broken_pipe(&self) -> bool {
        let io_errors = self.error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
        io_errors.into_iter().any(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    }

    /// Writes what is printed on the terminal: `error: ...` and `hint: ...`, with colours if `styled`.
    pub fn render(&self, styled: bool) -> String {
        if let Some(recipe) = self.error.downcast_ref::<RecipeError>() {
            return recipe.render(styled);
        }
        // A cause is left out when the message already quotes it; an error of ours may end with its own hint.
        let mut message = self.error.to_string();
        for cause in self.error.chain().skip(1).map(ToString::to_string) {
            if !message.contains(&cause) {
                message = format!("{message}: {cause}");
            }
        }
        let (message, own_hint) = match message.split_once("\nhint: ") {
            Some((message, hint)) => (message.to_owned(), Some(hint)),
            None => (message.clone(), None),
        };
        report(&message, self.hint.as_deref().or(own_hint), styled)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for Failure {}

impl From<RecipeError> for Failure {
    fn from(error: RecipeError) -> Self {
        Self::new(Kind::Usage, error)
    }
}

impl From<FolderError> for Failure {
    fn from(error: FolderError) -> Self {
        let hint = error.hint();
        Self::new(Kind::Usage, error).hint(hint)
    }
}

impl From<crate::engine::EngineError> for Failure {
    fn from(error: crate::engine::EngineError) -> Self {
        Self::new(Kind::Failure, error)
    }
}

impl From<crate::files::FileError> for Failure {
    fn from(error: crate::files::FileError) -> Self {
        Self::new(Kind::Failure, error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(Kind::Failure, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_prints_its_chain_and_its_hint() {
        let cause = std::io::Error::other("no space left on device");
        let error = anyhow::Error::new(cause).context("runs/a: cannot write the checkpoint");
        let failure = Failure::new(Kind::Failure, error).hint("free some space; the last checkpoint is intact");
        let expected = "error: runs/a: cannot write the checkpoint: no space left on device\n\
                        hint: free some space; the last checkpoint is intact";
        assert_eq!(failure.render(false), expected);
        assert_eq!(failure.kind().exit_code(), 1);
        assert!(failure.render(true).contains("\x1b[0m: runs/a"));
    }

    #[test]
    fn a_cause_that_is_quoted_is_not_repeated_and_a_hint_inside_the_message_is_one() {
        let cause = std::io::Error::other("disk is full");
        let error = anyhow::Error::new(cause).context("cannot write: disk is full\nhint: free some space");
        let failure = Failure::new(Kind::Failure, error);
        assert_eq!(failure.render(false), "error: cannot write: disk is full\nhint: free some space");
    }

    #[test]
    fn a_closed_pipe_is_told_apart() {
        let closed = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert!(Failure::from(closed()).is_broken_pipe());
        assert!(Failure::new(Kind::Failure, anyhow::Error::new(closed()).context("stdout")).is_broken_pipe());
        assert!(!Failure::message(Kind::Usage, "no").is_broken_pipe());
    }
}
