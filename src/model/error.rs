//! What can be wrong with a `[backbone.*]` table.

/// A network that cannot be built as configured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}`: {problem}\nhint: {hint}")]
pub struct ConfigError {
    /// The offending key of the recipe.
    pub key: String,
    /// What is wrong, with the value and the limit.
    pub problem: String,
    /// What to change.
    pub hint: String,
}

impl ConfigError {
    pub(crate) fn new(key: &str, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { key: key.to_owned(), problem: problem.into(), hint: hint.into() }
    }
}
