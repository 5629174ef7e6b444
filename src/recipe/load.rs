//! From a file and overrides to a recipe, or to everything that is wrong with them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use toml_edit::{Document, DocumentMut};

use super::error::{Diagnostic, Origin, RecipeError};
use super::locate::locate;
use super::overrides::Override;
use super::schema::schema;
use super::{Recipe, structure};
use crate::problem::{Place, Problem, closest};

/// A recipe with the text it came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The recipe, overrides applied, values checked.
    pub recipe: Recipe,
    source: Source,
}

#[derive(Clone, Debug)]
struct Source {
    path: PathBuf,
    text: Arc<str>,
    document: Document<String>,
    overrides: Vec<Override>,
}

/// Reads a recipe, applies overrides and checks keys, types and values. `schedule.steps=...` takes the place of the file's `epochs`, and the other way round.
///
/// # Errors
/// [`RecipeError`] with every problem that was found. Values are only checked once keys and types are right.
pub fn load(path: &Path, overrides: &[String]) -> Result<Loaded, RecipeError> {
    let bytes = fs::read(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => missing(path),
        _ => RecipeError::Read { path: path.to_owned(), source },
    })?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        let bytes = error.as_bytes();
        let line = String::from_utf8_lossy(&bytes[..offset]).matches('\n').count() + 1;
        RecipeError::NotUtf8 { path: path.to_owned(), offset, line, value: bytes[offset] }
    })?;
    parse(path, &text, overrides)
}

/// As [`load`], from text; `path` only appears in messages and names the run.
///
/// # Errors
/// As [`load`].
pub fn parse(path: &Path, text: &str, overrides: &[String]) -> Result<Loaded, RecipeError> {
    let shared: Arc<str> = Arc::from(text);
    let document = Document::parse(text.to_owned()).map_err(|error| {
        let origin = Origin::File { path: path.to_owned(), text: Arc::clone(&shared), span: error.span() };
        RecipeError::Invalid(vec![Diagnostic { origin, message: sentence(error.message()), hint: None }])
    })?;
    let mut source = Source { path: path.to_owned(), text: shared, document, overrides: Vec::new() };

    let mut problems = Vec::new();
    let mut merged = source.document.clone().into_mut();
    for text in overrides {
        match Override::parse(text).and_then(|parsed| parsed.apply(&mut merged).map(|()| parsed)) {
            Ok(parsed) => source.overrides.push(parsed),
            Err(problem) => problems.push(problem),
        }
    }
    if !problems.is_empty() {
        return Err(RecipeError::Invalid(source.overrides_refused(problems)));
    }
    for other in source.overrides.iter().filter_map(Override::alternative) {
        // both on the command line contradict each other, and the checks below say so
        if source.overrides.iter().all(|given| given.path != other) {
            Override::remove(&other, &mut merged);
        }
    }
    let recipe = source.read(&merged)?;
    let problems = recipe.check();
    if problems.is_empty() { Ok(Loaded { recipe, source }) } else { Err(source.error(problems)) }
}

impl Loaded {
    /// Returns the path the recipe was read from.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// Returns the text of the recipe, as given.
    pub fn text(&self) -> &str {
        &self.source.text
    }

    /// Returns the overrides, as typed.
    pub fn overrides(&self) -> Vec<&str> {
        self.source.overrides.iter().map(|given| given.text.as_str()).collect()
    }

    /// Turns problems that were found later (by [`crate::plan`]) into an error that points into the text.
    pub fn error(&self, problems: Vec<Problem>) -> RecipeError {
        self.source.error(problems)
    }
}

impl Source {
    /// Checks keys and types, then lets serde build the recipe.
    fn read(&self, merged: &DocumentMut) -> Result<Recipe, RecipeError> {
        let text = if self.overrides.is_empty() { self.text.to_string() } else { merged.to_string() };
        let table: toml::Table = toml::from_str(&text).map_err(|error| self.refused_by_serde(&error))?;
        let problems = structure::check(&schema(), &table);
        if !problems.is_empty() {
            return Err(self.error(problems));
        }
        toml::from_str(&text).map_err(|error| self.refused_by_serde(&error))
    }

    /// The safety net: whatever serde refuses although the schema allows it.
    fn refused_by_serde(&self, error: &toml::de::Error) -> RecipeError {
        let span = error.span().filter(|_| self.overrides.is_empty());
        RecipeError::Invalid(vec![Diagnostic {
            origin: self.file(span),
            message: sentence(error.message()),
            hint: None,
        }])
    }

    fn file(&self, span: Option<std::ops::Range<usize>>) -> Origin {
        Origin::File { path: self.path.clone(), text: Arc::clone(&self.text), span }
    }

    fn error(&self, problems: Vec<Problem>) -> RecipeError {
        let mut diagnostics: Vec<Diagnostic> = problems.into_iter().map(|problem| self.diagnose(problem)).collect();
        diagnostics.sort_by_key(|diagnostic| match &diagnostic.origin {
            Origin::File { span, .. } => (0, span.as_ref().map_or(usize::MAX, |span| span.start)),
            Origin::Override { .. } => (1, 0),
            Origin::Argument { .. } => (2, 0),
        });
        RecipeError::Invalid(diagnostics)
    }

    fn diagnose(&self, problem: Problem) -> Diagnostic {
        let origin = match &problem.place {
            Place::Argument(text) => Origin::Argument { text: text.clone() },
            Place::Key(path) => self.origin_of(path, &problem),
        };
        Diagnostic { origin, message: problem.message, hint: problem.hint }
    }

    fn origin_of(&self, path: &str, problem: &Problem) -> Origin {
        let related = || problem.related.iter().find_map(|other| self.overriding(other));
        if let Some(given) = self.overriding(path).or_else(related) {
            return Origin::Override { text: given.text.clone() };
        }
        let (spans, found) = locate(&self.document, path);
        self.file(if problem.on_key || !found { spans.key } else { spans.value })
    }

    /// Finds the last override that set this key or a table it lies in; or else one that set something below it.
    fn overriding(&self, path: &str) -> Option<&Override> {
        let covers = |outer: &str, inner: &str| {
            inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let latest = || self.overrides.iter().rev();
        let above = latest().find(|given| covers(&given.path, path));
        above.or_else(|| latest().find(|given| covers(path, &given.path)))
    }

    fn overrides_refused(&self, problems: Vec<Problem>) -> Vec<Diagnostic> {
        problems
            .into_iter()
            .map(|problem| {
                let origin = match problem.place {
                    Place::Argument(text) => Origin::Override { text },
                    Place::Key(_) => self.file(None),
                };
                Diagnostic { origin, message: problem.message, hint: problem.hint }
            })
            .collect()
    }
}

/// Parser messages end without a period and may span lines; ours fit one.
fn sentence(message: &str) -> String {
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

fn missing(path: &Path) -> RecipeError {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let known = recipes_in(Path::new("recipes"));
    let here = recipes_in(folder);
    let wanted = stem(path);
    let names: Vec<(String, &PathBuf)> = here.iter().chain(&known).map(|path| (stem(path), path)).collect();
    let likely = names
        .iter()
        .find(|(name, _)| *name == wanted)
        .or_else(|| {
            let name = closest(&wanted, names.iter().map(|(name, _)| name.as_str()))?;
            names.iter().find(|(other, _)| other == name)
        })
        .map(|(_, path)| (*path).clone());
    RecipeError::Missing { path: path.to_owned(), likely, known }
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Lists the recipes of a folder and of its sub-folders, sorted.
fn recipes_in(folder: &Path) -> Vec<PathBuf> {
    let entries = walkdir::WalkDir::new(folder).max_depth(2).sort_by_file_name();
    let files = entries.into_iter().filter_map(Result::ok).map(|entry| match entry.path().strip_prefix(".") {
        Ok(inside) => inside.to_owned(),
        Err(_) => entry.into_path(),
    });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "toml")).collect()
}
