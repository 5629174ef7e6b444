//! Keys and types, compared with the schema: every mistake is found at once, each with its own words.

use toml::Value;

use super::schema::{Node, Shape, join};
use crate::problem::{Problem, closest, listing, plural};

/// Compares a parsed recipe with the schema.
pub(super) fn check(schema: &serde_json::Value, recipe: &toml::Table) -> Vec<Problem> {
    let mut walk = Walk { root: Node::root(schema), problems: Vec::new() };
    walk.table(walk.root, recipe, "");
    walk.problems
}

struct Walk<'a> {
    root: Node<'a>,
    problems: Vec<Problem>,
}

impl<'a> Walk<'a> {
    fn value(&mut self, node: Node<'a>, value: &Value, at: &str) {
        match (node.shape(), value) {
            (Shape::Other | Shape::Table { .. } | Shape::OneOf(_), Value::Table(table)) => self.table(node, table, at),
            (Shape::Words(words), Value::String(word)) => self.word(&words, word, at),
            (Shape::List { items, min, max }, Value::Array(values)) => {
                let count = values.len() as u64;
                if min.is_some_and(|min| count < min) || max.is_some_and(|max| count > max) {
                    let wanted = max.or(min).unwrap_or_default();
                    self.push(Problem::at(at, format!("`{at}` has {}, but needs {wanted}", plural(count, "element"))));
                } else if let Some(items) = items {
                    for (index, value) in values.iter().enumerate() {
                        self.value(items, value, &join(at, index));
                    }
                }
            }
            (Shape::Integer { min, max }, Value::Integer(value)) => {
                let low = min.filter(|min| value < min).map(|min| format!("at least {min}"));
                let high = max.filter(|max| value > max).map(|max| format!("at most {max}"));
                if let Some(limit) = low.or(high) {
                    self.push(Problem::at(at, format!("`{at}` is {value}, but must be {limit}")));
                }
            }
            (Shape::Number, Value::Integer(_) | Value::Float(_))
            | (Shape::Text, Value::String(_))
            | (Shape::Bool, Value::Boolean(_))
            | (Shape::Other, _) => {}
            (shape, value) => self.wrong_type(&shape, value, at),
        }
    }

    fn table(&mut self, node: Node<'a>, table: &toml::Table, at: &str) {
        match node.shape() {
            Shape::Table { keys, required } => {
                for (key, value) in table {
                    match node.key(key) {
                        Some(inner) => self.value(inner, value, &join(at, key)),
                        None => self.unknown(key, keys.keys().map(String::as_str), at),
                    }
                }
                for key in required.into_iter().filter(|key| !table.contains_key(*key)) {
                    self.missing(node, key, at);
                }
            }
            Shape::OneOf(variants) => self.variant(&variants, table, at),
            _ => {}
        }
    }

    /// A table such as `[method.simclr]`: exactly one variant.
    fn variant(&mut self, variants: &[(&'a str, Node<'a>)], table: &toml::Table, at: &str) {
        let names = || variants.iter().map(|(name, _)| *name);
        let mut known = Vec::new();
        for (key, value) in table {
            if let Some((name, inner)) = variants.iter().find(|(name, _)| name == key) {
                known.push((*name, *inner, value));
            } else {
                self.push(
                    Problem::of_key(join(at, key), format!("unknown {at} `{key}`")).hint(suggestion(key, names())),
                );
            }
        }
        match known.as_slice() {
            [(name, inner, value)] => self.value(*inner, value, &join(at, name)),
            [] if table.is_empty() => {
                self.push(
                    Problem::at(at, format!("`{at}` names no {at}"))
                        .hint(format!("write one of {}", listing_of_tables(at, names()))),
                );
            }
            [] => {}
            _ => {
                let listed = listing(known.iter().map(|(name, ..)| *name));
                self.push(
                    Problem::of_key(at, format!("`{at}` must be one table, but there are {}: {listed}", known.len()))
                        .hint(format!("keep one; an override cannot switch the {at}, start from a recipe that has it")),
                );
            }
        }
    }

    fn unknown(&mut self, key: &str, allowed: impl Iterator<Item = &'a str> + Clone, at: &str) {
        let path = join(at, key);
        let hint = if let Some(likely) = closest(key, allowed.clone()) {
            format!("did you mean `{likely}`?")
        } else {
            let mut elsewhere = Vec::new();
            self.root.tables_with(key, "", &mut elsewhere);
            match elsewhere.as_slice() {
                [] => format!("allowed {}: {}", within(at), listing(allowed)),
                [table] if table.is_empty() => format!("`{key}` belongs at the top, before the first table"),
                tables => {
                    let named = tables.iter().filter(|table| !table.is_empty()).map(String::as_str);
                    let top = if tables.iter().any(String::is_empty) { "belongs at the top, and " } else { "" };
                    format!("`{key}` {top}is a key of {}", listing(named))
                }
            }
        };
        self.push(Problem::of_key(path, format!("unknown key `{key}`")).hint(hint));
    }

    fn missing(&mut self, node: Node<'a>, key: &str, at: &str) {
        let path = join(at, key);
        let what = match node.key(key).map(Node::shape) {
            Some(Shape::Table { .. }) => format!("missing table `[{path}]`"),
            Some(Shape::OneOf(variants)) => {
                let names = listing_of_tables(&path, variants.iter().map(|(name, _)| *name));
                self.push(Problem::of_key(path, format!("missing table: one of {names}")));
                return;
            }
            Some(Shape::List { items: Some(items), .. }) if matches!(items.shape(), Shape::Table { .. }) => {
                format!("missing table `[[{path}]]`")
            }
            _ => format!("missing key `{key}`{}", if at.is_empty() { String::new() } else { format!(" in `{at}`") }),
        };
        self.push(Problem::of_key(path, what));
    }

    fn word(&mut self, words: &[&'a str], word: &str, at: &str) {
        if !words.contains(&word) {
            let key = at.rsplit('.').next().unwrap_or(at);
            self.push(
                Problem::at(at, format!("unknown {key} \"{word}\"")).hint(suggestion(word, words.iter().copied())),
            );
        }
    }

    fn wrong_type(&mut self, shape: &Shape<'a>, value: &Value, at: &str) {
        let (wanted, hint) = match shape {
            Shape::Table { .. } => ("a table".to_owned(), Some(format!("write `[{at}]` with its keys below"))),
            Shape::OneOf(variants) => {
                let tables = listing_of_tables(at, variants.iter().map(|(name, _)| *name));
                (format!("a table, one of {tables}"), value.as_str().map(|word| format!("write `[{at}.{word}]`")))
            }
            Shape::Words(words) => (format!("one of {}", quoted(words)), None),
            Shape::List { items: Some(items), .. } if matches!(items.shape(), Shape::Table { .. }) => {
                ("a list of tables".to_owned(), Some(format!("write `[[{at}]]`, with two brackets")))
            }
            Shape::List { max: Some(count), .. } => (format!("a list of {count} values"), None),
            Shape::List { .. } => ("a list".to_owned(), None),
            Shape::Integer { .. } => ("a whole number".to_owned(), None),
            Shape::Number => ("a number".to_owned(), None),
            Shape::Text => ("a string".to_owned(), Some(format!("put it in quotes: `\"{value}\"`"))),
            Shape::Bool => ("`true` or `false`".to_owned(), None),
            Shape::Other => return,
        };
        let hint = if matches!(value, Value::Table(_) | Value::Array(_)) && matches!(shape, Shape::Text) {
            None
        } else {
            hint
        };
        let mut problem = Problem::at(at, format!("`{at}` must be {wanted}, found {}", describe(value)));
        problem.hint = hint;
        self.push(problem);
    }

    fn push(&mut self, problem: Problem) {
        self.problems.push(problem);
    }
}

fn suggestion<'a>(word: &str, allowed: impl Iterator<Item = &'a str> + Clone) -> String {
    match closest(word, allowed.clone()) {
        Some(likely) => format!("did you mean `{likely}`?"),
        None => format!("allowed: {}", listing(allowed)),
    }
}

fn within(at: &str) -> String {
    if at.is_empty() { "at the top".to_owned() } else { format!("in `{at}`") }
}

fn listing_of_tables<'a>(at: &str, names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`[{at}.{name}]`")).collect::<Vec<_>>().join(", ")
}

fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ")
}

fn describe(value: &Value) -> String {
    match value {
        Value::String(text) => format!("the string {text:?}"),
        Value::Integer(value) => format!("the number {value}"),
        Value::Float(value) => format!("the number {value}"),
        Value::Boolean(value) => format!("`{value}`"),
        Value::Datetime(value) => format!("the date {value}"),
        Value::Array(values) => format!("a list of {} values", values.len()),
        Value::Table(_) => "a table".to_owned(),
    }
}
