//! Renaming keys: `blocks.#.mlp.w12.*` to `blocks.$1.mlp.fc1.$2`.
//!
//! A pattern is matched segment by segment: `#` is a number (`layer_#` one behind a word), `*` any one segment, `**` all that follow. In what it becomes, `$1`, `$2`, ... are the segments
//! that were matched so, and `[0/3]` at the end says that the tensor is the first of three parts of the rows of another.

/// Which of how many parts of the rows of a tensor.
pub(super) type Part = (usize, usize);

/// A pattern and what a key that fits becomes.
pub(super) type Rename = (&'static str, &'static str);

/// Applies renames one after the other, each to what the last one left.
pub(super) fn rename(key: &str, renames: &[Rename]) -> (String, Option<Part>) {
    let (mut key, mut part) = (key.to_owned(), None);
    for (pattern, becomes) in renames {
        if let Some(found) = captures(pattern, &key) {
            (key, part) = fill(becomes, &found);
        }
    }
    (key, part)
}

/// Returns what the wildcards stand for, if the key fits.
fn captures<'a>(pattern: &str, key: &'a str) -> Option<Vec<&'a str>> {
    let mut found = Vec::new();
    let (mut rest, mut wanted) = (Some(key), pattern.split('.'));
    loop {
        match (wanted.next(), rest) {
            (None, None) => return Some(found),
            (Some("**"), Some(all)) => {
                found.push(all);
                return Some(found);
            }
            (Some(segment), Some(all)) => {
                let (first, after) = match all.split_once('.') {
                    Some((first, after)) => (first, Some(after)),
                    None => (all, None),
                };
                match segment {
                    "*" => found.push(first),
                    "#" if !first.is_empty() && first.bytes().all(|b| b.is_ascii_digit()) => found.push(first),
                    _ if segment == first => {}
                    // `layer_#`: a number behind a word
                    _ => {
                        let number = first.strip_prefix(segment.strip_suffix('#').filter(|word| !word.is_empty())?)?;
                        if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
                            return None;
                        }
                        found.push(number);
                    }
                }
                rest = after;
            }
            _ => return None,
        }
    }
}

fn fill(becomes: &str, found: &[&str]) -> (String, Option<Part>) {
    let (becomes, part) = match becomes.strip_suffix(']').and_then(|text| text.split_once('[')) {
        Some((path, part)) => (path, part.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)))),
        None => (becomes, None),
    };
    let segments = becomes.split('.').map(|segment| {
        let index = segment.strip_prefix('$').and_then(|digits| digits.parse::<usize>().ok());
        index.and_then(|index| found.get(index.checked_sub(1)?)).copied().unwrap_or(segment)
    });
    (segments.collect::<Vec<_>>().join("."), part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_renamed_one_rule_after_the_other() {
        let rules = [
            ("blocks.#.#.**", "blocks.$2.$3"),
            ("blocks.#.mlp.w12.*", "blocks.$1.mlp.fc1.$2"),
            ("blocks.#.q.*", "blocks.$1.attn.qkv.$2[0/3]"),
            ("token", "cls_token"),
            ("layer_#.*", "blocks.$1.$2"),
        ];
        let name = |key| rename(key, &rules);
        assert_eq!(name("blocks.1.7.mlp.w12.bias"), ("blocks.7.mlp.fc1.bias".to_owned(), None));
        assert_eq!(name("blocks.3.q.weight"), ("blocks.3.attn.qkv.weight".to_owned(), Some((0, 3))));
        assert_eq!(name("token"), ("cls_token".to_owned(), None));
        assert_eq!(name("layer_12.bias"), ("blocks.12.bias".to_owned(), None));
        for key in [
            "layer_.bias",
            "layer_a.bias",
            "blocks.1.mlp.fc1.bias",
            "blocks.x.mlp.w12.bias",
            "token.weight",
            "a.token",
            "",
            ".",
        ] {
            assert_eq!(name(key), (key.to_owned(), None));
        }
    }
}
