//! What can be wrong with a recipe, and where.

mod numbers;

use std::fmt;

pub use numbers::{MAX_DEPTH, MAX_WIDTH, Numbers};

/// Where a problem lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A key of the recipe, as a dotted path (`method.simclr.temperature`, `views.0.size`); empty: the recipe as a whole.
    Key(String),
    /// An argument of the command line, such as `--ranks 9`.
    Argument(String),
}

/// One thing that is wrong with a recipe: place, message, remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where it is.
    pub place: Place,
    /// What is wrong: value and limit.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// Other keys of the conflict; an override of one of them is the likely culprit.
    pub(crate) related: Vec<&'static str>,
    /// Underlines the key itself instead of its value.
    pub(crate) on_key: bool,
}

impl Problem {
    /// Describes a problem with the value of a key.
    pub fn at(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { place: Place::Key(key.into()), message: message.into(), hint: None, related: Vec::new(), on_key: false }
    }

    /// Describes a problem with a key itself.
    pub(crate) fn of_key(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { on_key: true, ..Self::at(key, message) }
    }

    /// Describes a problem with an argument of the command line.
    pub fn argument(argument: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            place: Place::Argument(argument.into()),
            message: message.into(),
            hint: None,
            related: Vec::new(),
            on_key: false,
        }
    }

    /// Names another key that takes part in the conflict.
    #[must_use]
    pub(crate) fn against(mut self, key: &'static str) -> Self {
        self.related.push(key);
        self
    }

    /// Adds the remedy.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Argument(argument) => write!(f, "`{argument}`: {}", self.message),
            Place::Key(_) => f.write_str(&self.message),
        }
    }
}

/// Picks the candidate a misspelt word most likely stands for.
pub(crate) fn closest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&word.to_lowercase(), candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.chars().count().min(word.chars().count()) / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Writes a number with its noun: `1 image`, `2 images`.
pub(crate) fn plural(count: impl fmt::Display, noun: &str) -> String {
    let count = count.to_string();
    let ending = match count.as_str() {
        "1" => "",
        _ if noun.ends_with("ch") || noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{count} {noun}{ending}")
}

/// Writes words as `` `a`, `b` and `c` ``.
pub(crate) fn listing<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let words: Vec<String> = words.into_iter().map(|word| format!("`{word}`")).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        Some((last, _)) => last.clone(),
        None => String::new(),
    }
}

/// Requires a multiple of another key's value.
pub(crate) fn multiple(key: &str, value: usize, of: usize, of_key: &'static str, found: &mut Numbers) {
    if !value.is_multiple_of(of) {
        let message = format!("`{key}` is {value}, but must be a multiple of `{of_key}`, {of}");
        found.push(Problem::at(key, message).against(of_key).hint(near_multiples(value, of)));
    }
}

/// Requires a multiple of 4.
pub(crate) fn multiple_of_four(key: &str, value: usize, why: &str, why_key: &'static str, found: &mut Numbers) {
    if !value.is_multiple_of(4) {
        let message = format!("`{key}` is {value}, but must be a multiple of 4, as {why}");
        found.push(Problem::at(key, message).against(why_key).hint(near_multiples(value, 4)));
    }
}

/// Suggests the multiples on both sides.
pub(crate) fn near_multiples(value: usize, of: usize) -> String {
    let below = value / of * of;
    if below == 0 { format!("use {of}") } else { format!("use {below} or {}", below.saturating_add(of)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closest_finds_typos_and_nothing_else() {
        let keys = ["temperature", "hidden", "out", "layers"];
        assert_eq!(closest("temprature", keys), Some("temperature"));
        assert_eq!(closest("Hiden", keys), Some("hidden"));
        assert_eq!(closest("uot", keys), Some("out"));
        assert_eq!(closest("mask_ratio", keys), None);
        assert_eq!(closest("", keys), None);
    }

    #[test]
    fn listing_reads_as_prose() {
        assert_eq!(listing(["a"]), "`a`");
        assert_eq!(listing(["a", "b", "c"]), "`a`, `b` and `c`");
    }
}
