//! From a key path to the bytes of the recipe that hold it.

use std::ops::Range;

use toml_edit::{Document, Item, TableLike, Value};

/// Spans of a key and of its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spans {
    pub(super) key: Option<Range<usize>>,
    pub(super) value: Option<Range<usize>>,
}

/// Finds `path` (dotted) in the document, or else its nearest ancestor that is there.
/// Returns the spans and whether the path itself was found.
pub(super) fn locate(document: &Document<String>, path: &str) -> (Spans, bool) {
    let mut node = Node::Table(document.as_table());
    let mut spans = Spans::default();
    for segment in path.split('.').filter(|segment| !segment.is_empty()) {
        let Some((found, next)) = node.child(segment) else { return (spans, false) };
        // A key without a span of its own (an index, a table that only a sub-table's header implies) keeps its parent's.
        spans = Spans { key: found.key.or(spans.key), value: found.value };
        node = next;
    }
    (spans, true)
}

/// Line and column (both from 1, columns in characters) of a byte offset.
pub(super) fn line_column(text: &str, offset: usize) -> (usize, usize) {
    let offset = (0..=offset.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let before = &text[..offset];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

enum Node<'a> {
    Table(&'a dyn TableLike),
    Tables(&'a toml_edit::ArrayOfTables),
    Array(&'a toml_edit::Array),
    Leaf,
}

impl<'a> Node<'a> {
    fn child(&self, segment: &str) -> Option<(Spans, Node<'a>)> {
        match self {
            Node::Table(table) => {
                let (key, item) = table.get_key_value(segment)?;
                // The span of a table is its header; underlining the key in it reads better.
                let value = if item.is_table() || item.is_array_of_tables() { key.span() } else { item.span() };
                Some((Spans { key: key.span(), value }, Node::of(item)))
            }
            Node::Tables(tables) => {
                let table = tables.get(segment.parse().ok()?)?;
                Some((Spans { key: table.span(), value: table.span() }, Node::Table(table)))
            }
            Node::Array(array) => {
                let value = array.get(segment.parse().ok()?)?;
                Some((Spans { key: value.span(), value: value.span() }, Node::of_value(value)))
            }
            Node::Leaf => None,
        }
    }

    fn of(item: &'a Item) -> Self {
        match item {
            Item::Table(table) => Node::Table(table),
            Item::ArrayOfTables(tables) => Node::Tables(tables),
            Item::Value(value) => Node::of_value(value),
            Item::None => Node::Leaf,
        }
    }

    fn of_value(value: &'a Value) -> Self {
        match value {
            Value::InlineTable(table) => Node::Table(table),
            Value::Array(array) => Node::Array(array),
            _ => Node::Leaf,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "seed = 1\n[method.simclr]\ntemperature = 0.5\n[[views]]\nsize = 32\ncrop = { scale = [0.2, 1] }\n";

    fn text_at(path: &str) -> (&'static str, &'static str, bool) {
        let document = Document::parse(TEXT.to_owned()).unwrap();
        let (spans, found) = locate(&document, path);
        (spans.key.map_or("", |span| &TEXT[span]), spans.value.map_or("", |span| &TEXT[span]), found)
    }

    #[test]
    fn every_kind_of_key_is_found() {
        assert_eq!(text_at("seed"), ("seed", "1", true));
        assert_eq!(text_at("method.simclr"), ("simclr", "simclr", true));
        assert_eq!(text_at("method.simclr.temperature"), ("temperature", "0.5", true));
        assert_eq!(text_at("views.0.size"), ("size", "32", true));
        assert_eq!(text_at("views.0.crop.scale"), ("scale", "[0.2, 1]", true));
        assert_eq!(text_at("views.0.crop.scale.1"), ("1", "1", true));
    }

    #[test]
    fn what_is_not_there_falls_back_to_its_ancestor() {
        assert_eq!(text_at("method.simclr.hidden"), ("simclr", "simclr", false));
        assert_eq!(text_at("views.7.size"), ("views", "views", false));
        assert_eq!(text_at("batch.global"), ("", "", false));
    }

    #[test]
    fn lines_and_columns_count_characters() {
        assert_eq!(line_column("é = 1\nab", 0), (1, 1));
        assert_eq!(line_column("é = 1\nab", 3), (1, 3));
        assert_eq!(line_column("é = 1\nab", 1), (1, 1));
        assert_eq!(line_column("é = 1\nab", 8), (2, 2));
        assert_eq!(line_column("", 10), (1, 1));
    }
}
