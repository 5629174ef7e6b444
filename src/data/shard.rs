//! Index of a tar archive in `WebDataset` layout, for random access without unpacking.
//!
//! Members that belong together share their name up to the first dot and follow one another: an image
//! (`000000.png`) and, optionally, its class number in ASCII (`000000.cls`).

use std::collections::HashSet;
use std::io::Read;
use std::ops::Range;

use super::error::Error;

/// What the archive holds about one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    /// Name up to the first dot, with its folder.
    pub(super) key: String,
    /// Place of the encoded image in the archive.
    pub(super) image: Range<u64>,
    pub(super) label: Option<u32>,
}

/// Lists the samples of an archive in its order. `name` is for messages.
pub(super) fn index(name: &str, archive: impl Read) -> Result<Vec<Sample>, Error> {
    let mut archive = tar::Archive::new(archive);
    let broken = |error: std::io::Error| Error::Archive {
        archive: name.to_owned(),
        problem: format!("not a readable tar archive: {error}"),
        hint: "copy the archive again: it is truncated or damaged",
    };
    let mut samples = Vec::new();
    let mut group = Group::default();
    let mut finished = HashSet::new();
    for entry in archive.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let Some((key, extension)) = split(&path) else { continue };
        if key != group.key {
            finished.insert(std::mem::take(&mut group.key));
            samples.extend(group.finish());
            if finished.contains(key) {
                return Err(Error::Archive {
                    archive: name.to_owned(),
                    problem: format!("the members of `{key}` do not follow one another"),
                    hint: "write the archive sorted by name (`tar --sort=name`)",
                });
            }
            group = Group { key: key.to_owned(), ..Group::default() };
        }
        match extension.to_ascii_lowercase().as_str() {
            "jpg" | "jpeg" | "png" | "webp" => {
                let start = entry.raw_file_position();
                group.image = Some(start..start + entry.size());
            }
            "cls" => {
                let mut text = String::new();
                entry.read_to_string(&mut text).map_err(broken)?;
                let label = text.trim().parse().map_err(|_| Error::Archive {
                    archive: name.to_owned(),
                    problem: format!("`{path}` holds `{}`, no class number", text.trim()),
                    hint: "`.cls` members hold one integer in ASCII, from 0",
                })?;
                group.label = Some(label);
            }
            _ => {}
        }
    }
    samples.extend(group.finish());
    if samples.is_empty() {
        return Err(Error::Archive {
            archive: name.to_owned(),
            problem: "no image in it (looked for members `*.jpg`, `*.jpeg`, `*.png`, `*.webp`)".to_owned(),
            hint: "see the WebDataset layout: `000000.jpg`, `000000.cls`, `000001.jpg`, ...",
        });
    }
    Ok(samples)
}

/// Members met so far that share a key.
#[derive(Default)]
struct Group {
    key: String,
    image: Option<Range<u64>>,
    label: Option<u32>,
}

impl Group {
    /// Returns the group as a sample, if it holds an image.
    fn finish(self) -> Option<Sample> {
        self.image.map(|image| Sample { key: self.key, image, label: self.label })
    }
}

/// Splits a member's path at the first dot of its name; nothing for hidden and dotless names.
fn split(path: &str) -> Option<(&str, &str)> {
    let name_at = path.rfind('/').map_or(0, |slash| slash + 1);
    let dot = name_at + path[name_at..].find('.')?;
    (dot > name_at).then(|| (&path[..dot], &path[dot + 1..]))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Makes an archive of `(name, content)`.
    pub(in super::super) fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, content) in members {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, name, *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn failure(bytes: &[u8]) -> String {
        index("x.tar", bytes).err().unwrap().to_string()
    }

    #[test]
    fn members_are_grouped_up_to_the_first_dot() {
        let bytes = archive(&[
            ("0.png", b"first"),
            ("0.cls", b"4\n"),
            ("1.cls", b"2"),
            ("1.seg.png", b"a mask, no image"),
            ("1.JPG", b"second"),
            ("1.json", b"{}"),
            ("folder.d/2.webp", b"third"),
            ("README", b"text"),
            (".hidden", b"text"),
        ]);
        let samples = index("x.tar", bytes.as_slice()).unwrap();
        let found: Vec<_> = samples
            .iter()
            .map(|s| (s.key.as_str(), &bytes[s.image.start as usize..s.image.end as usize], s.label))
            .collect();
        assert_eq!(found, [("0", &b"first"[..], Some(4)), ("1", b"second", Some(2)), ("folder.d/2", b"third", None)]);
    }

    #[test]
    fn damage_is_named() {
        let scattered = archive(&[("0.png", b"a"), ("1.png", b"b"), ("0.cls", b"1")]);
        assert!(failure(&scattered).contains("members of `0` do not follow one another"));
        assert!(failure(&archive(&[("0.png", b"a"), ("0.cls", b"cat")])).contains("`0.cls` holds `cat`"));
        assert!(failure(&archive(&[("0.txt", b"a")])).contains("no image in it"));
        assert!(failure(&[7; 1024]).contains("not a readable tar archive"));
        let whole = archive(&[("0.png", &[1; 5000]), ("1.png", &[2; 5000])]);
        assert!(failure(&whole[..7000]).contains("truncated"));
    }
}
