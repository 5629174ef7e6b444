//! The JSON schema of recipes: for editors, and for our own check of keys and types.

use serde_json::{Map, Value};

use super::Recipe;

/// Returns the JSON schema of a recipe; titles and descriptions are the doc comments of the tables.
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(Recipe).to_value();
    remove_nulls(&mut schema);
    schema
}

/// TOML has no null: an optional key is absent. Removes what serde's `Option` left of it.
fn remove_nulls(node: &mut Value) {
    match node {
        Value::Object(map) => {
            if let Some(Value::Array(types)) = map.get_mut("type") {
                types.retain(|name| name != "null");
                if let [only] = types.as_slice() {
                    let only = only.clone();
                    map.insert("type".to_owned(), only);
                }
            }
            if let Some(Value::Array(options)) = map.get_mut("anyOf") {
                options.retain(|option| option.get("type").is_none_or(|name| name != "null"));
                if let [Value::Object(only)] = options.as_mut_slice() {
                    let only = std::mem::take(only);
                    map.remove("anyOf");
                    map.extend(only);
                }
            }
            if map.get("default").is_some_and(Value::is_null) {
                map.remove("default");
            }
            map.values_mut().for_each(remove_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

/// A schema node with its references followed.
#[derive(Clone, Copy)]
pub(super) struct Node<'a> {
    root: &'a Value,
    node: &'a Value,
}

/// What a schema node allows.
pub(super) enum Shape<'a> {
    /// A table with these keys.
    Table { keys: &'a Map<String, Value>, required: Vec<&'a str> },
    /// A table that holds exactly one of these tables.
    OneOf(Vec<(&'a str, Node<'a>)>),
    /// One of these strings.
    Words(Vec<&'a str>),
    /// A list.
    List { items: Option<Node<'a>>, min: Option<u64>, max: Option<u64> },
    /// A whole number.
    Integer { min: Option<i64>, max: Option<i64> },
    /// A number.
    Number,
    /// A string.
    Text,
    /// `true` or `false`.
    Bool,
    /// Anything that this reader does not know: left to serde.
    Other,
}

impl<'a> Node<'a> {
    pub(super) fn root(schema: &'a Value) -> Self {
        Self { root: schema, node: schema }
    }

    fn to(self, node: &'a Value) -> Self {
        let mut node = node;
        // A reference chain in a derived schema is one link long; the bound guards against a cycle.
        for _ in 0..8 {
            let Some(reference) = node.get("$ref").and_then(Value::as_str) else { break };
            let Some(target) = self.root.pointer(reference.trim_start_matches('#')) else { break };
            node = target;
        }
        Self { node, ..self }
    }

    pub(super) fn key(self, name: &str) -> Option<Self> {
        Some(self.to(self.node.get("properties")?.get(name)?))
    }

    pub(super) fn shape(self) -> Shape<'a> {
        if let Some(Value::Array(options)) = self.node.get("oneOf") {
            return self.one_of(options);
        }
        if let Some(Value::Array(words)) = self.node.get("enum") {
            return Shape::Words(words.iter().filter_map(Value::as_str).collect());
        }
        let number = |name: &str| self.node.get(name).and_then(Value::as_i64);
        match self.node.get("type").and_then(Value::as_str) {
            Some("object") => match self.node.get("properties") {
                Some(Value::Object(keys)) => {
                    let required = self.node.get("required").and_then(Value::as_array);
                    let required = required.into_iter().flatten().filter_map(Value::as_str).collect();
                    Shape::Table { keys, required }
                }
                _ => Shape::Other,
            },
            Some("array") => Shape::List {
                items: self.node.get("items").map(|items| self.to(items)),
                min: self.node.get("minItems").and_then(Value::as_u64),
                max: self.node.get("maxItems").and_then(Value::as_u64),
            },
            Some("integer") => Shape::Integer { min: number("minimum"), max: number("maximum") },
            Some("number") => Shape::Number,
            Some("string") => Shape::Text,
            Some("boolean") => Shape::Bool,
            _ => Shape::Other,
        }
    }

    /// Unit variants become words, newtype variants tables with one key.
    fn one_of(self, options: &'a [Value]) -> Shape<'a> {
        let mut words = Vec::new();
        let mut tables = Vec::new();
        for option in options {
            if let Some(word) = option.get("const").and_then(Value::as_str) {
                words.push(word);
            } else if let Some(Value::Array(more)) = option.get("enum") {
                words.extend(more.iter().filter_map(Value::as_str));
            } else if let Some((name, inner)) =
                option.get("properties").and_then(Value::as_object).and_then(|keys| keys.iter().next())
            {
                tables.push((name.as_str(), self.to(inner)));
            }
        }
        match (words.is_empty(), tables.is_empty()) {
            (false, true) => Shape::Words(words),
            (true, false) => Shape::OneOf(tables),
            _ => Shape::Other,
        }
    }

    /// Collects the paths of all tables that have a key of this name.
    pub(super) fn tables_with(self, key: &str, at: &str, found: &mut Vec<String>) {
        match self.shape() {
            Shape::Table { keys, .. } => {
                if keys.contains_key(key) {
                    found.push(at.to_owned());
                }
                for name in keys.keys() {
                    if let Some(inner) = self.key(name) {
                        inner.tables_with(key, &join(at, name), found);
                    }
                }
            }
            Shape::OneOf(tables) => {
                for (name, inner) in tables {
                    inner.tables_with(key, &join(at, name), found);
                }
            }
            Shape::List { items: Some(items), .. } => items.tables_with(key, at, found),
            _ => {}
        }
    }
}

pub(super) fn join(at: &str, key: impl std::fmt::Display) -> String {
    if at.is_empty() { key.to_string() } else { format!("{at}.{key}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doc_comments_become_descriptions_and_nothing_is_null() {
        let schema = schema();
        assert_eq!(schema["description"], "A complete run.");
        assert_eq!(schema["properties"]["seed"]["description"], "Seed of every random draw.");
        assert_eq!(schema["properties"]["name"]["type"], "string");
        assert!(!schema.to_string().contains("null"), "{schema:#}");
    }

    #[test]
    fn every_node_has_a_known_shape() {
        fn visit(node: Node<'_>, at: &str) {
            match node.shape() {
                Shape::Other => panic!("{at}: unknown shape {}", node.node),
                Shape::Table { keys, .. } => {
                    keys.keys().for_each(|key| visit(node.key(key).unwrap(), &join(at, key)));
                }
                Shape::OneOf(tables) => tables.into_iter().for_each(|(name, inner)| visit(inner, &join(at, name))),
                Shape::List { items, .. } => visit(items.unwrap(), &join(at, "*")),
                _ => {}
            }
        }
        visit(Node::root(&schema()), "");
    }
}
