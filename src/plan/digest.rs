//! What influences a result, its hash, and the comparison with the plan of an existing run folder.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{DataFacts, Plan};
use crate::recipe::Recipe;

/// Keys, and tables of keys, that change what is written or how fast, never the result.
const NO_INFLUENCE: &[&str] = &[
    "name",
    "init",
    "init_allow_partial", // what it lets through is part of the weights' own digest
    "log",
    "checkpoint",
    "eval",
    "data.path",
    "data.on_error",
    "data.max_bad",
    "data.workers",
    "data.prefetch",
    "batch.memory",
    "batch.activation_checkpointing",
];

/// Prefix of the line of `plan.toml` that records what the images are.
pub(super) const DATA: &str = "# data = ";
/// The same of the weights it starts from.
pub(super) const START: &str = "# init = ";
/// What named those weights.
pub(super) const START_FROM: &str = "# init from = ";

/// A key whose value is not what it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Dotted key path.
    pub key: String,
    /// Value in the run folder; none: absent.
    pub old: Option<String>,
    /// Value now; none: absent.
    pub new: Option<String>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".to_owned());
        let key = if self.key.contains(' ') { self.key.clone() } else { format!("`{}`", self.key) };
        write!(f, "{key} was {}, is {}", shown(&self.old), shown(&self.new))
    }
}

/// Why a run folder cannot be continued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// It was written by another recipe or other data.
    #[error("{}: written by another recipe: {}", folder.display(), list(differences))]
    OtherRecipe {
        /// The run folder.
        folder: PathBuf,
        /// All keys that differ.
        differences: Vec<Difference>,
    },
    /// Its plan cannot be read.
    #[error("{}: cannot read the plan of this run: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl FolderError {
    /// Returns what to do.
    pub fn hint(&self) -> String {
        match self {
            Self::OtherRecipe { .. } => {
                "use another folder (`--run-dir DIR`), undo the change, or start over in this one (`--resume never`)"
                    .to_owned()
            }
            Self::Unreadable { .. } => {
                "use another folder (`--run-dir DIR`), or start over in this one (`--resume never`)".to_owned()
            }
        }
    }
}

impl Plan {
    /// Tells whether a folder holds a run of this very plan (true) or no run at all (false).
    ///
    /// # Errors
    /// When it holds the run of another recipe, with every key that differs.
    pub fn continues(&self, folder: &Path) -> Result<bool, FolderError> {
        let path = folder.join("plan.toml");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(false);
            }
            Err(error) => return Err(FolderError::Unreadable { path, reason: error.to_string() }),
        };
        let unreadable = |reason: String| FolderError::Unreadable { path: path.clone(), reason };
        let old = influences(&text, recorded(&text, DATA), recorded(&text, START))
            .map_err(|error| unreadable(error.message().to_owned()))?;
        let new = self.recipe.to_toml().map_err(|error| unreadable(error.to_string()))?;
        let new = influences(&new, Some(self.data.identity()), self.start.as_ref().map(|start| start.digest()))
            .map_err(|error| unreadable(error.message().to_owned()))?;
        let differences = differences(&old, &new);
        if differences.is_empty() {
            return Ok(true);
        }
        Err(FolderError::OtherRecipe { folder: folder.to_owned(), differences })
    }
}

impl DataFacts {
    /// Says in one line what the images are.
    pub(super) fn identity(&self) -> String {
        format!("{} images, {}", self.images, self.fingerprint).replace(char::is_control, " ")
    }
}

/// Hashes what influences the result of a resolved recipe on these images.
pub(super) fn of(recipe: &Recipe, data: &DataFacts, start: Option<String>) -> Result<String, toml::ser::Error> {
    // Through text, so that a plan and the same plan read back agree on every digit.
    let text = recipe.to_toml()?;
    let values = influences(&text, Some(data.identity()), start).unwrap_or_default();
    let mut hash = blake3::Hasher::new();
    hash.update(b"autodidact plan v1\0");
    for (key, value) in values {
        hash.update(key.as_bytes());
        hash.update(b" = ");
        hash.update(value.as_bytes());
        hash.update(b"\n");
    }
    Ok(hash.finalize().to_hex().to_string())
}

/// Returns what named the weights that a run in `folder` started from, and their digest; nothing where they were drawn, or where there is no run.
pub fn recorded_start(folder: &Path) -> Option<(String, String)> {
    let plan = fs::read_to_string(folder.join("plan.toml")).ok()?;
    Some((recorded(&plan, START_FROM)?, recorded(&plan, START)?))
}

/// Returns what a `plan.toml` records of its images: their number and fingerprint.
pub fn recorded_data(plan: &str) -> Option<String> {
    recorded(plan, DATA)
}

fn influences(
    text: &str,
    data: Option<String>,
    start: Option<String>,
) -> Result<BTreeMap<String, String>, toml::de::Error> {
    let table: toml::Table = toml::from_str(text)?;
    let mut values = BTreeMap::new();
    flatten(&toml::Value::Table(table), "", &mut values);
    values.retain(|key, _| !NO_INFLUENCE.iter().any(|none| is_within(key, none)));
    values.extend(data.map(|data| ("images of `data`".to_owned(), data)));
    values.extend(start.map(|start| ("weights of `init`".to_owned(), start)));
    Ok(values)
}

fn is_within(key: &str, table: &str) -> bool {
    key.strip_prefix(table).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Lists every leaf by its dotted path; a table or list without leaves counts as one.
pub(super) fn flatten(value: &toml::Value, at: &str, values: &mut BTreeMap<String, String>) {
    let join = |key: &dyn fmt::Display| if at.is_empty() { key.to_string() } else { format!("{at}.{key}") };
    match value {
        toml::Value::Table(table) if !table.is_empty() => {
            table.iter().for_each(|(key, value)| flatten(value, &join(key), values));
        }
        toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
            items.iter().enumerate().for_each(|(index, value)| flatten(value, &join(&index), values));
        }
        leaf => drop(values.insert(at.to_owned(), leaf.to_string())),
    }
}

fn differences(old: &BTreeMap<String, String>, new: &BTreeMap<String, String>) -> Vec<Difference> {
    let mut keys: Vec<&String> = old.keys().chain(new.keys()).collect();
    keys.sort();
    keys.dedup();
    keys.into_iter()
        .filter(|key| old.get(*key) != new.get(*key))
        .map(|key| Difference { key: key.clone(), old: old.get(key).cloned(), new: new.get(key).cloned() })
        .collect()
}

fn recorded(plan: &str, prefix: &str) -> Option<String> {
    plan.lines().find_map(|line| Some(line.strip_prefix(prefix)?.trim().to_owned()))
}

fn list(differences: &[Difference]) -> String {
    differences.iter().map(Difference::to_string).collect::<Vec<_>>().join("; ")
}
