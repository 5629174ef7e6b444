//! Patterns of parameter paths.

/// Tells whether a whole path matches one of the patterns between `|`; in each, `*` stands for any characters, dots included, or for none.
pub(super) fn matches(pattern: &str, path: &str) -> bool {
    pattern.split('|').any(|one| matches_one(one.trim(), path))
}

fn matches_one(pattern: &str, path: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == path };
    let Some(mut left) = path.strip_prefix(start) else { return false };
    let mut pieces: Vec<&str> = rest.split('*').collect();
    let end = pieces.pop().unwrap_or_default();
    for piece in pieces {
        // the first place is as good as any: what follows it is the longest
        let Some(at) = left.find(piece) else { return false };
        left = &left[at + piece.len()..];
    }
    left.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_anything() {
        let path = "backbone.blocks.10.attn.qkv.bias";
        for yes in [
            "*",
            "**",
            path,
            "*.bias",
            "backbone.*",
            "*blocks.10.*",
            "backbone*qkv*bias",
            "*b*b*b*",
            "x|*.bias",
            "x | *",
            "*.bias|",
        ] {
            assert!(matches(yes, path), "{yes}");
        }
        for no in ["", "bias", "*.weight", "blocks.*", "*blocks.1.*", "*qkv*attn*", "x|y"] {
            assert!(!matches(no, path), "{no}");
        }
        assert!(!matches("ab*ba", "aba"));
        assert!(matches("ab*ba", "abba"));
    }
}
