//! Why a recipe cannot be used, with the place underlined.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use super::locate::line_column;

/// Why a recipe cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// There is no such file.
    #[error("{}: no such recipe", path.display())]
    Missing {
        /// The path that was given.
        path: PathBuf,
        /// The recipe that was probably meant.
        likely: Option<PathBuf>,
        /// Recipes that are there.
        known: Vec<PathBuf>,
    },
    /// The file cannot be read.
    #[error("{}: cannot read the recipe: {source}", path.display())]
    Read {
        /// The path that was given.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is not text.
    #[error("{}:{line}: not UTF-8 at byte {offset} (value 0x{value:02x})", path.display())]
    NotUtf8 {
        /// The path that was given.
        path: PathBuf,
        /// Offset of the first byte that is not UTF-8, from 0.
        offset: usize,
        /// Its line, from 1.
        line: usize,
        /// The byte.
        value: u8,
    },
    /// The contents are wrong, at every place listed.
    #[error("{}", headlines(.0))]
    Invalid(Vec<Diagnostic>),
}

impl RecipeError {
    /// Returns what to do, unless each problem carries its own remedy.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Missing { likely: Some(likely), .. } => Some(format!("did you mean `{}`?", likely.display())),
            Self::Missing { known, .. } if !known.is_empty() => {
                let known: Vec<_> = known.iter().map(|path| path.display().to_string()).collect();
                Some(format!("recipes here: {}", known.join(", ")))
            }
            Self::Missing { .. } => Some("give the path of a TOML file, such as `recipes/simclr.toml`".to_owned()),
            Self::Read { path, .. } if path.is_dir() => {
                Some("this is a folder; give the path of a TOML file".to_owned())
            }
            Self::NotUtf8 { value: 0xff | 0xfe, offset: 0, .. } => {
                Some("this looks like UTF-16; save the file as UTF-8".to_owned())
            }
            Self::NotUtf8 { .. } => Some("save the file as UTF-8".to_owned()),
            Self::Read { .. } | Self::Invalid(_) => None,
        }
    }

    /// Writes the whole report, each problem with its line underlined, with colours if `styled`.
    pub fn render(&self, styled: bool) -> String {
        match self {
            Self::Invalid(diagnostics) => {
                let reports: Vec<String> = diagnostics.iter().map(|diagnostic| diagnostic.render(styled)).collect();
                reports.join("\n\n")
            }
            other => report(&other.to_string(), other.hint().as_deref(), styled),
        }
    }
}

/// One problem, located.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    pub(super) origin: Origin,
    pub(super) message: String,
    pub(super) hint: Option<String>,
}

/// The text a problem lies in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The recipe; no span: the recipe as a whole.
    File { path: PathBuf, text: std::sync::Arc<str>, span: Option<Range<usize>> },
    /// An override.
    Override { text: String },
    /// An argument of the command line.
    Argument { text: String },
}

impl Diagnostic {
    /// Returns the one-line form: place and message.
    pub fn headline(&self) -> String {
        let Self { message, .. } = self;
        match &self.origin {
            Origin::File { path, text, span: Some(span) } => {
                let (line, column) = line_column(text, span.start);
                format!("{}:{line}:{column}: {message}", path.display())
            }
            Origin::File { path, span: None, .. } => format!("{}: {message}", path.display()),
            Origin::Override { text } => format!("override `{text}`: {message}"),
            Origin::Argument { text } => format!("`{text}`: {message}"),
        }
    }

    /// Returns the remedy.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    fn render(&self, styled: bool) -> String {
        let Origin::File { text, span: Some(span), .. } = &self.origin else {
            return report(&self.headline(), self.hint(), styled);
        };
        let (source, line, span) = line_of(text, span);
        let snippet = Snippet::source(source).line_start(line).annotation(AnnotationKind::Primary.span(span));
        let mut groups = vec![Level::ERROR.primary_title(self.headline()).element(snippet)];
        groups.extend(self.hint().map(|hint| Group::with_title(Level::HELP.with_name("hint").secondary_title(hint))));
        let renderer = if styled { Renderer::styled() } else { Renderer::plain() };
        renderer.render(&groups)
    }
}

/// Cuts the first line of the span out of the text, so that a long value is shown by its first line.
fn line_of<'a>(text: &'a str, span: &Range<usize>) -> (&'a str, usize, Range<usize>) {
    let start = span.start.min(text.len());
    let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
    let line_end = text[start..].find('\n').map_or(text.len(), |newline| start + newline);
    let line = text[line_start..line_end].trim_end_matches('\r');
    let end = span.end.clamp(start, line_start + line.len().max(start - line_start));
    (line, line_column(text, start).0, start - line_start..end - line_start)
}

/// Writes an error without a source line: `error: ...`, `hint: ...`.
pub(crate) fn report(message: &str, hint: Option<&str>, styled: bool) -> String {
    let (red, cyan, plain) = if styled { ("\x1b[1;91m", "\x1b[1;96m", "\x1b[0m") } else { ("", "", "") };
    let hint = hint.map_or(String::new(), |hint| format!("\n{cyan}hint{plain}: {hint}"));
    format!("{red}error{plain}: {message}{hint}")
}

fn headlines(diagnostics: &[Diagnostic]) -> impl fmt::Display {
    let lines: Vec<String> = diagnostics.iter().map(Diagnostic::headline).collect();
    lines.join("\n")
}
