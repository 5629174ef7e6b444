//! A text file that names one image a line: a path relative to the file, optionally a tab and a label, or several labels with a tab before each.
//!
//! * Blank lines and lines that begin with `#` are skipped; a byte order mark and Windows line ends are accepted.
//! * Labels are any text; the classes are the labels sorted by bytes. If every label is an integer, it is the class number.
//! * Where a line has several labels, or a tab and nothing (an image of none of the classes), the list is of several labels an image; a line without a tab stays
//!   unlabelled.
//! * `train.txt` has the test list `test.txt` or `val.txt` beside it (any common extension); its classes are those of the
//!   training list.
//! * Opening looks for the first image only; others that are missing are found when they are read.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::decode::{Decoded, decode_file};
use super::error::{Error, ImageError, shorten};
use super::source::{Fingerprint, Source, Split};

/// A class number above this is surely no class number, and a name for each up to it would fill the memory.
const MAX_CLASS: u32 = 1_000_000;

/// Images named by a text file.
#[derive(Debug)]
pub(super) struct List {
    /// Folder of the list file.
    root: PathBuf,
    /// As written in the list.
    paths: Vec<Box<Path>>,
    labels: Labels,
    classes: Vec<String>,
    max_pixels: u64,
}

/// Labels of the images of a list.
#[derive(Debug)]
enum Labels {
    /// At most one an image.
    One(Vec<Option<u32>>),
    /// Any number, ascending; nothing: not labelled.
    Many(Vec<Option<Box<[u32]>>>),
}

impl List {
    pub(super) fn open(path: &Path, split: Split, max_pixels: u64) -> Result<Self, Error> {
        let train = Lines::read(path)?;
        let classes = Classes::of(path, &train)?;
        let (list, lines) = match split {
            Split::Train => (path.to_owned(), train),
            Split::Test => {
                let list = test_list(path)?;
                let lines = Lines::read(&list)?;
                (list, lines)
            }
        };
        let root = list.parent().unwrap_or(Path::new("")).to_owned();
        check_first(&list, &root, &lines.0[0])?;
        let labels = classes.numbers(&list, &lines)?;
        let paths = lines.0.into_iter().map(|line| line.path).collect();
        Ok(Self { root, paths, labels, classes: classes.names(), max_pixels })
    }

    fn path(&self, index: usize) -> PathBuf {
        self.root.join(&self.paths[index])
    }
}

impl Source for List {
    fn len(&self) -> usize {
        self.paths.len()
    }

    fn decode(&self, index: usize) -> Result<Decoded, ImageError> {
        decode_file(&self.path(index), self.max_pixels)
    }

    fn label(&self, index: usize) -> Option<u32> {
        match &self.labels {
            Labels::One(labels) => labels[index],
            Labels::Many(_) => None,
        }
    }

    fn labels(&self, index: usize) -> Option<Vec<u32>> {
        match &self.labels {
            Labels::One(labels) => labels[index].map(|label| vec![label]),
            Labels::Many(labels) => labels[index].as_deref().map(<[u32]>::to_vec),
        }
    }

    fn is_multi_label(&self) -> bool {
        matches!(self.labels, Labels::Many(_))
    }

    fn name(&self, index: usize) -> String {
        self.path(index).display().to_string()
    }

    fn bytes(&self, index: usize) -> Option<u64> {
        std::fs::metadata(self.path(index)).ok().map(|metadata| metadata.len())
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn fingerprint(&self) -> String {
        let mut digest = Fingerprint::new("files");
        digest.add_classes(&self.classes);
        for (index, path) in self.paths.iter().enumerate() {
            digest.add_image(path.as_os_str().as_encoded_bytes(), self.bytes(index), self.label(index));
            if let Labels::Many(labels) = &self.labels {
                let bytes = labels[index].iter().flatten().flat_map(|label| label.to_le_bytes());
                digest.add(&bytes.chain([u8::from(labels[index].is_some())]).collect::<Vec<u8>>());
            }
        }
        digest.finish()
    }
}

/// One line that names an image.
struct Line {
    number: usize,
    path: Box<Path>,
    /// Nothing: no tab.
    labels: Option<Vec<String>>,
}

/// The lines of a list that name images; at least one.
struct Lines(Vec<Line>);

impl Lines {
    fn read(list: &Path) -> Result<Self, Error> {
        if list.is_dir() {
            return Err(Error::NotAFile { path: list.to_owned() });
        }
        let text = std::fs::read(list).map_err(|error| Error::io(list, "read the list", error))?;
        let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text);
        let lines = text
            .split(|&byte| byte == b'\n')
            .zip(1..)
            .map(|(line, number)| (line.strip_suffix(b"\r").unwrap_or(line), number))
            .filter(|(line, _)| !line.trim_ascii().is_empty() && !line.starts_with(b"#"))
            .map(|(line, number)| Line::parse(line, number, list))
            .collect::<Result<Vec<_>, _>>()?;
        if lines.is_empty() { Err(Error::EmptyList { path: list.to_owned() }) } else { Ok(Self(lines)) }
    }
}

impl Line {
    fn parse(line: &[u8], number: usize, list: &Path) -> Result<Self, Error> {
        let wrong = |problem: &str, hint: &str| Error::List {
            path: list.to_owned(),
            line: number,
            problem: problem.to_owned(),
            hint: hint.to_owned(),
        };
        let mut fields = line.split(|&byte| byte == b'\t');
        let path = fields.next().unwrap_or_default();
        if path.trim_ascii().is_empty() {
            return Err(wrong("no path before the tab", "write `path<TAB>label`, or remove the line"));
        }
        if path.contains(&0) {
            return Err(wrong("a zero byte", "save the list as UTF-8 text: UTF-16 and binary files are not lists"));
        }
        let path = os_string(path).ok_or_else(|| wrong("the path is not UTF-8", "save the list as UTF-8 text"))?;
        let labels: Vec<String> = fields
            .map(|label| std::str::from_utf8(label.trim_ascii()).map(str::to_owned))
            .collect::<Result<_, _>>()
            .map_err(|_| wrong("the label is not UTF-8", "save the list as UTF-8 text"))?;
        let labels = match labels.iter().filter(|label| label.is_empty()).count() {
            0 if labels.is_empty() => None,
            0 => Some(labels),
            1 if labels.len() == 1 => Some(Vec::new()),
            _ => {
                return Err(wrong(
                    "no label after a tab",
                    "write `path<TAB>label`, with a tab before each label if there are several",
                ));
            }
        };
        Ok(Self { number, path: PathBuf::from(path).into(), labels })
    }
}

#[cfg(unix)]
#[expect(clippy::unnecessary_wraps, reason = "other systems have paths that are no byte strings")]
fn os_string(bytes: &[u8]) -> Option<OsString> {
    use std::os::unix::ffi::OsStrExt;
    Some(OsStr::from_bytes(bytes).to_owned())
}

#[cfg(not(unix))]
fn os_string(bytes: &[u8]) -> Option<OsString> {
    std::str::from_utf8(bytes).ok().map(OsString::from)
}

/// Complains if the first image is missing: then most likely all are.
fn check_first(list: &Path, root: &Path, line: &Line) -> Result<(), Error> {
    let path = root.join(&line.path);
    let Err(error) = std::fs::metadata(&path) else { return Ok(()) };
    let hint = if line.labels.is_none() && line.path.as_os_str().as_encoded_bytes().contains(&b' ') {
        "separate path and label by a tab, not by spaces".to_owned()
    } else {
        format!("paths are relative to the list's folder, {}", root.join(".").display())
    };
    let problem = format!("{} cannot be read: {error}", path.display());
    Err(Error::List { path: list.to_owned(), line: line.number, problem, hint })
}

fn test_list(list: &Path) -> Result<PathBuf, Error> {
    let candidates = (list.file_stem() == Some(OsStr::new("train"))).then(|| {
        ["test", "val"].map(|stem| {
            let mut name = OsString::from(stem);
            if let Some(extension) = list.extension() {
                name.push(".");
                name.push(extension);
            }
            list.with_file_name(name)
        })
    });
    candidates.into_iter().flatten().find(|candidate| candidate.is_file()).ok_or_else(|| Error::NoTestSplit {
        path: list.to_owned(),
        hint: "name the lists `train.txt` and `test.txt` (or `val.txt`) and put them side by side".to_owned(),
    })
}

/// The classes of a list.
enum Classes {
    /// Every label is a class number; this is one more than the largest.
    Numbers(u32),
    /// Labels sorted by bytes.
    Names(Vec<String>),
}

impl Classes {
    fn of(list: &Path, lines: &Lines) -> Result<Self, Error> {
        let labelled =
            || lines.0.iter().flat_map(|line| line.labels.iter().flatten().map(move |label| (line, label.as_str())));
        let numbers: Option<Vec<u64>> = labelled().map(|(_, label)| label.parse().ok()).collect();
        let Some(numbers) = numbers else {
            let mut names: Vec<String> = labelled().map(|(_, label)| label.to_owned()).collect();
            names.sort_unstable();
            names.dedup();
            return Ok(Self::Names(names));
        };
        match labelled().zip(&numbers).find(|&(_, &number)| number >= u64::from(MAX_CLASS)) {
            Some(((line, label), _)) => Err(Error::List {
                path: list.to_owned(),
                line: line.number,
                problem: format!("class number {label} is not below {MAX_CLASS}"),
                hint: "number the classes from 0, or use names (a letter before the number is enough)".to_owned(),
            }),
            None => Ok(Self::Numbers(numbers.iter().max().map_or(0, |&largest| largest as u32 + 1))),
        }
    }

    /// Numbers the labels of all lines.
    fn numbers(&self, list: &Path, lines: &Lines) -> Result<Labels, Error> {
        let labels = lines.0.iter().map(|line| line.labels.as_deref());
        if labels.clone().flatten().all(|labels| labels.len() == 1) {
            let one = |labels: Option<&[String]>| labels.map(|labels| self.number(list, &labels[0])).transpose();
            return Ok(Labels::One(labels.map(one).collect::<Result<_, _>>()?));
        }
        let many = |labels: Option<&[String]>| -> Result<Option<Box<[u32]>>, Error> {
            let Some(labels) = labels else { return Ok(None) };
            let mut numbers =
                labels.iter().map(|label| self.number(list, label)).collect::<Result<Vec<u32>, Error>>()?;
            numbers.sort_unstable();
            numbers.dedup();
            Ok(Some(numbers.into()))
        };
        Ok(Labels::Many(labels.map(many).collect::<Result<_, _>>()?))
    }

    fn number(&self, list: &Path, label: &str) -> Result<u32, Error> {
        let number = match self {
            Self::Numbers(count) => label.parse().ok().filter(|number| number < count),
            Self::Names(names) => names.binary_search_by(|name| name.as_str().cmp(label)).ok().map(|at| at as u32),
        };
        number.ok_or_else(|| Error::UnknownClass {
            path: list.to_owned(),
            class: label.to_owned(),
            known: shorten(&self.names()),
        })
    }

    fn names(&self) -> Vec<String> {
        match self {
            Self::Numbers(count) => (0..*count).map(|number| number.to_string()).collect(),
            Self::Names(names) => names.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::decode::tests::picture;
    use super::*;

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("images")).unwrap();
        for name in ["a.png", "b.png", "with space.png"] {
            picture(3, 3, name.len() as u32).save(dir.path().join("images").join(name)).unwrap();
        }
        dir
    }

    fn open_text(text: impl AsRef<[u8]>) -> Result<List, Error> {
        let dir = folder();
        let path = dir.path().join("list.txt");
        fs::write(&path, text).unwrap();
        List::open(&path, Split::Train, 1 << 20)
    }

    fn failure(text: impl AsRef<[u8]>) -> String {
        open_text(text).err().unwrap().to_string()
    }

    fn labels(list: &List) -> Vec<Option<u32>> {
        (0..list.len()).map(|index| list.label(index)).collect()
    }

    #[test]
    fn paths_labels_comments_and_line_ends() {
        let text = "\u{feff}# animals\r\n\r\nimages/b.png\tdog\r\nimages/with space.png\tcat\n  \nimages/a.png\tdog";
        let dir = folder();
        let path = dir.path().join("list.txt");
        fs::write(&path, text).unwrap();
        let list = List::open(&path, Split::Train, 1 << 20).unwrap();
        assert_eq!(list.classes(), ["cat", "dog"]);
        assert_eq!(labels(&list), [Some(1), Some(0), Some(1)]);
        assert_eq!(list.load(1).unwrap(), picture(3, 3, 14));
        assert!(list.name(0).ends_with("images/b.png"));
        assert!(list.bytes(0).unwrap() > 0);
    }

    #[test]
    fn integers_stay_integers() {
        let list = open_text("images/a.png\t3\nimages/b.png\t1\n").unwrap();
        assert_eq!(labels(&list), [Some(3), Some(1)]);
        assert_eq!(list.classes(), ["0", "1", "2", "3"]);
        let mixed = open_text("images/a.png\t10\nimages/b.png\tx\nimages/a.png\t9\nimages/a.png\n").unwrap();
        assert_eq!(mixed.classes(), ["10", "9", "x"]);
        assert_eq!(labels(&mixed), [Some(0), Some(2), Some(1), None]);
        let none = open_text("images/a.png\n").unwrap();
        assert!(none.classes().is_empty());
        assert!(failure("images/a.png\t5000000000\n").contains("list.txt:1: class number 5000000000"));
    }

    #[test]
    fn images_may_have_several_labels_or_none() {
        let list = open_text("images/a.png\tdog\tcat\tdog\nimages/b.png\t\nimages/a.png\nimages/b.png\tcat\n").unwrap();
        assert_eq!(list.classes(), ["cat", "dog"]);
        assert!(list.is_multi_label());
        let all: Vec<_> = (0..4).map(|index| list.labels(index)).collect();
        assert_eq!(all, [Some(vec![0, 1]), Some(vec![]), None, Some(vec![0])]);
        assert_eq!(labels(&list), [None; 4], "a list of several labels has no class of an image");
        let other = open_text("images/a.png\tdog\tcat\nimages/b.png\t\nimages/a.png\t\nimages/b.png\tcat\n").unwrap();
        assert_ne!(list.fingerprint(), other.fingerprint());
        let one = open_text("images/a.png\tdog\n").unwrap();
        assert!(!one.is_multi_label());
        assert_eq!(one.labels(0), Some(vec![0]));
        let numbers = open_text("images/a.png\t3\t0\nimages/b.png\t1\n").unwrap();
        assert_eq!((numbers.classes().len(), numbers.labels(0)), (4, Some(vec![0, 3])));
    }

    #[test]
    fn errors_name_file_and_line() {
        assert!(failure("# x\nimages/a.png\tb\t\n").contains("list.txt:2: no label after a tab"));
        assert!(failure("\tb\n").contains("list.txt:1: no path"));
        assert!(failure("images/a.png\t\t\n").contains("list.txt:1: no label"));
        assert!(failure("\n\nimages/zzz.png\n").contains("list.txt:3: "));
        assert!(failure("images/a.png cat\n").contains("by a tab, not by spaces"));
        assert!(failure(b"\xff\xfea\0.\0").contains("UTF-8"));
        assert!(failure(b"images/a.png\t\xff\n").contains("label is not UTF-8"));
        assert!(failure("# nothing\n").contains("names no image"));
        let dir = folder();
        let of = |path: &Path| List::open(path, Split::Train, 1).err().unwrap().to_string();
        assert!(of(dir.path()).contains("is a folder"));
        assert!(of(&dir.path().join("none.txt")).contains("no such file"));
    }

    #[test]
    fn later_missing_files_are_errors_of_their_image() {
        let list = open_text("images/a.png\nimages/gone.png\n").unwrap();
        assert!(matches!(list.load(1), Err(ImageError::Read(_))));
    }

    #[test]
    fn test_list_stands_beside_the_training_list() {
        let dir = folder();
        let train = dir.path().join("train.txt");
        fs::write(&train, "images/a.png\tx\nimages/b.png\ty\n").unwrap();
        let open = || List::open(&train, Split::Test, 1 << 20);
        assert!(open().err().unwrap().to_string().contains("no test images"));
        fs::write(dir.path().join("val.txt"), "images/a.png\ty\n").unwrap();
        let list = open().unwrap();
        assert_eq!((labels(&list), list.classes().len()), (vec![Some(1)], 2));
        fs::write(dir.path().join("test.txt"), "images/a.png\tz\n").unwrap();
        assert!(open().err().unwrap().to_string().contains("class `z`"));
    }
}
