//! `key.sub=value` arguments, applied to the parsed recipe.

use toml_edit::{DocumentMut, Item, Value};

use crate::problem::{Problem, plural};

/// Keys of one table of which a recipe has one: an override with one replaces the other.
const ALTERNATIVES: [[&str; 2]; 2] = [["epochs", "steps"], ["freeze_epochs", "freeze_steps"]];

/// One parsed override.
#[derive(Clone, Debug)]
pub(super) struct Override {
    /// As typed.
    pub(super) text: String,
    /// Dotted key path.
    pub(super) path: String,
    value: Value,
}

impl Override {
    /// Parses `key.sub=value`. The value is TOML; a bare word is a string.
    pub(super) fn parse(text: &str) -> Result<Self, Problem> {
        let problem = |message: String| Problem::argument(text, message);
        let Some((path, value)) = text.split_once('=') else {
            return Err(problem("an override has the form `key.sub=value`".to_owned())
                .hint("options such as `--ranks 2` begin with two dashes"));
        };
        let (path, value) = (path.trim(), value.trim());
        if path.is_empty() || path.split('.').any(|segment| !is_bare_key(segment)) {
            return Err(problem(format!("`{path}` is not a key path"))
                .hint("a path is made of keys and list indices: `method.simclr.temperature`, `views.0.size`"));
        }
        if value.is_empty() {
            return Err(problem("no value after `=`".to_owned()).hint("for an empty string write `key='\"\"'`"));
        }
        let value = match value.parse::<Value>() {
            // Only strings can hold what looks like a date in a recipe.
            Ok(Value::Datetime(_)) => Value::from(value),
            Ok(value) => value,
            Err(_) if !value.starts_with(['"', '\'', '[', '{']) => Value::from(value),
            Err(error) => {
                let message = error.message().lines().next().unwrap_or_default().to_owned();
                return Err(problem(format!("`{value}` is not a TOML value: {message}"))
                    .hint("the shell removes quotes; put the whole override in single quotes"));
            }
        };
        Ok(Self { text: text.to_owned(), path: path.to_owned(), value })
    }

    /// The path of the key that this one stands in place of.
    pub(super) fn alternative(&self) -> Option<String> {
        let last = self.path.rsplit('.').next()?;
        let other = ALTERNATIVES.iter().find_map(|pair| {
            let at = pair.iter().position(|key| *key == last)?;
            Some(pair[1 - at])
        })?;
        Some(format!("{}{other}", &self.path[..self.path.len() - last.len()]))
    }

    /// Takes a key out of the document, if it is there.
    pub(super) fn remove(path: &str, document: &mut DocumentMut) {
        let mut segments: Vec<&str> = path.split('.').collect();
        let Some(last) = segments.pop() else { return };
        let mut item = document.as_item_mut();
        for segment in segments {
            let index = index_of(segment).filter(|_| list_length(item).is_some());
            let inner = if let Some(index) = index { item.get_mut(index) } else { item.get_mut(segment) };
            let Some(inner) = inner else { return };
            item = inner;
        }
        if let Some(table) = item.as_table_like_mut() {
            table.remove(last);
        }
    }

    /// Sets the value in the document; tables on the way are made.
    pub(super) fn apply(&self, document: &mut DocumentMut) -> Result<(), Problem> {
        let mut segments: Vec<&str> = self.path.split('.').collect();
        let Some(last) = segments.pop() else { return Ok(()) };
        let mut item = document.as_item_mut();
        let mut at = String::new();
        for segment in segments {
            item = self.enter(item, segment, &at)?;
            at = super::schema::join(&at, segment);
        }
        let mut value = self.value.clone();
        if let Some(table) = item.as_table_like_mut() {
            // Keeps the comment behind the old value.
            if let Some(old) = table.get(last).and_then(Item::as_value) {
                *value.decor_mut() = old.decor().clone();
            }
            match table.get_mut(last) {
                Some(old) => *old = Item::Value(value),
                None => drop(table.insert(last, Item::Value(value))),
            }
            return Ok(());
        }
        let length = list_length(item);
        if item.is_array_of_tables() && index_of(last).is_some_and(|index| Some(index) < length) {
            return Err(self.problem(format!("`{at}.{last}` is a table; set one of its keys")));
        }
        let slot = item.as_array_mut().and_then(|array| array.get_mut(index_of(last)?));
        *slot.ok_or_else(|| self.no_element(&at, last, length))? = value;
        Ok(())
    }

    fn enter<'a>(&self, item: &'a mut Item, segment: &str, at: &str) -> Result<&'a mut Item, Problem> {
        let length = list_length(item);
        let inline = item.is_inline_table();
        // Item::get_mut knows tables, inline tables, arrays of tables and arrays by key or index.
        if let Item::ArrayOfTables(_) | Item::Value(Value::Array(_)) = item {
            let index = index_of(segment).filter(|&index| Some(index) < length);
            let Some(index) = index else { return Err(self.no_element(at, segment, length)) };
            return item.get_mut(index).ok_or_else(|| self.no_element(at, segment, length));
        }
        let Some(table) = item.as_table_like_mut() else {
            return Err(self.problem(format!("`{at}` is not a table, it has no key `{segment}`")));
        };
        if !table.contains_key(segment) {
            let new = if inline { toml_edit::Item::Value(toml_edit::InlineTable::new().into()) } else { implicit() };
            table.insert(segment, new);
        }
        table.get_mut(segment).ok_or_else(|| self.problem(format!("`{at}` has no key `{segment}`")))
    }

    fn no_element(&self, at: &str, segment: &str, length: Option<usize>) -> Problem {
        match length {
            Some(0) => self.problem(format!("`{at}` is empty")),
            Some(length) if index_of(segment).is_some() => {
                self.problem(format!("`{at}` has {}, the last is `{at}.{}`", plural(length, "element"), length - 1))
            }
            Some(_) => self.problem(format!("`{at}` is a list; write an index, such as `{at}.0.{segment}`")),
            None => self.problem(format!("`{at}` is not a table, it has no key `{segment}`")),
        }
    }

    fn problem(&self, message: String) -> Problem {
        Problem::argument(&self.text, message)
    }
}

fn is_bare_key(segment: &str) -> bool {
    !segment.is_empty() && segment.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

fn index_of(segment: &str) -> Option<usize> {
    segment.parse().ok()
}

fn list_length(item: &Item) -> Option<usize> {
    item.as_array().map(toml_edit::Array::len).or_else(|| item.as_array_of_tables().map(toml_edit::ArrayOfTables::len))
}

fn implicit() -> Item {
    let mut table = toml_edit::Table::new();
    table.set_implicit(true);
    Item::Table(table)
}
