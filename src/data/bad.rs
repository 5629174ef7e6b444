//! The register of images that turned out to be unreadable, shared by all loaders of a process.

use std::collections::{BTreeSet, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::error::Error;

/// One line of `bad-images.jsonl`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadImage {
    /// Index of the image in its source.
    pub index: u64,
    /// Its name: a path, or a place within a file.
    pub path: String,
    /// Size of the encoded image, if it can be told.
    pub bytes: Option<u64>,
    /// Why it cannot be used.
    pub reason: String,
    /// Index of the image that takes its place; none when the run stops.
    pub substitute: Option<u64>,
}

/// Counts and lists distinct unreadable images, and says when they are too many.
///
/// The decision depends on the set of images seen so far only, so it does not depend on who meets them in which order.
#[derive(Debug)]
pub struct BadImages {
    path: Option<PathBuf>,
    num_images: usize,
    max_bad: f64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    seen: HashSet<u64>,
    /// Opened at the first bad image of this run.
    file: Option<File>,
}

impl BadImages {
    /// Makes a register for a source of `num_images`. What `path` lists already counts and is not listed again, so that a
    /// resumed run goes on where it stopped; a file that was cut in the middle of a line is accepted.
    ///
    /// # Errors
    /// When the list exists and cannot be read.
    pub fn open(path: Option<&Path>, num_images: usize, max_bad: f64) -> Result<Self, Error> {
        let mut seen = HashSet::new();
        if let Some(path) = path {
            match std::fs::read(path) {
                Ok(text) => {
                    let lines = text.split(|&byte| byte == b'\n');
                    let known = lines.filter_map(|line| serde_json::from_slice::<BadImage>(line).ok());
                    seen.extend(known.map(|bad| bad.index).filter(|&index| index < num_images as u64));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io(path, "read the list of unreadable images", error)),
            }
        }
        let state = Mutex::new(State { seen, file: None });
        Ok(Self { path: path.map(Path::to_owned), num_images, max_bad, state })
    }

    /// Returns the number of distinct unreadable images.
    pub fn count(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).seen.len()
    }

    /// Returns which those are.
    pub fn indices(&self) -> BTreeSet<u64> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).seen.iter().copied().collect()
    }

    /// Notes an unreadable image; the first time it is also appended to the list.
    ///
    /// # Errors
    /// When the images noted so far are more than allowed, or when the list cannot be written.
    pub fn record(&self, bad: &BadImage) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.seen.insert(bad.index)
            && let Some(path) = &self.path
        {
            append(&mut state.file, path, bad)
                .map_err(|error| Error::io(path, "write the list of unreadable images", error))?;
        }
        drop(state);
        self.judge()
    }

    /// Decides on the images noted so far, those of earlier starts included.
    ///
    /// # Errors
    /// When they are more than allowed.
    pub fn judge(&self) -> Result<(), Error> {
        let count = self.count();
        if count as f64 <= self.max_bad * self.num_images as f64 {
            return Ok(());
        }
        Err(Error::TooManyBad {
            bad: count,
            num_images: self.num_images,
            max_bad: self.max_bad,
            listed_in: self.path.clone(),
        })
    }
}

/// Appends a line in one write, so that processes that share the list do not mix their lines.
fn append(file: &mut Option<File>, path: &Path, bad: &BadImage) -> io::Result<()> {
    let mut line = Vec::new();
    let file = if let Some(file) = file {
        file
    } else {
        if std::fs::read(path).is_ok_and(|text| text.last().is_some_and(|&byte| byte != b'\n')) {
            line.push(b'\n'); // a crash left half a line
        }
        file.insert(OpenOptions::new().create(true).append(true).open(path)?)
    };
    serde_json::to_writer(&mut line, bad)?;
    line.push(b'\n');
    file.write_all(&line)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn bad(index: u64) -> BadImage {
        BadImage { index, path: format!("{index}.jpg"), bytes: Some(7), reason: "why".to_owned(), substitute: Some(1) }
    }

    #[test]
    fn each_image_is_listed_once_even_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bad-images.jsonl");
        let register = BadImages::open(Some(&path), 100, 0.5).unwrap();
        assert!(!path.exists());
        for index in [3, 5, 3] {
            register.record(&bad(index)).unwrap();
        }
        assert_eq!(register.count(), 2);
        let line = r#"{"index":3,"path":"3.jpg","bytes":7,"reason":"why","substitute":1}"#;
        assert_eq!(fs::read_to_string(&path).unwrap().lines().next(), Some(line));
        // A crash left half a line.
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str(r#"{"index":9,"pa"#);
        fs::write(&path, text).unwrap();
        let register = BadImages::open(Some(&path), 100, 0.5).unwrap();
        assert_eq!(register.count(), 2);
        for index in [5, 9] {
            register.record(&bad(index)).unwrap();
        }
        let again = BadImages::open(Some(&path), 100, 0.5).unwrap();
        assert_eq!(again.count(), 3);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 4);
    }

    #[test]
    fn too_many_stop_the_run_with_the_place_of_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bad-images.jsonl");
        let register = BadImages::open(Some(&path), 200, 0.01).unwrap();
        register.record(&bad(0)).unwrap();
        register.record(&bad(1)).unwrap();
        register.record(&bad(1)).unwrap();
        let message = register.record(&bad(2)).unwrap_err().to_string();
        let start = "3 of 200 images cannot be read (1.500 %), more than `data.max_bad` = 0.01 (1.000 %) allows; ";
        assert!(message.starts_with(start), "{message}");
        assert!(message.contains("listed in") && message.contains("bad-images.jsonl\nhint: "), "{message}");
        let silent = BadImages::open(None, 10, 0.0).unwrap();
        assert!(!silent.record(&bad(0)).unwrap_err().to_string().contains("listed"));
    }

    #[test]
    fn a_list_that_cannot_be_written_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let register = BadImages::open(Some(&dir.path().join("none/bad.jsonl")), 10, 1.0).unwrap();
        assert!(matches!(register.record(&bad(0)), Err(Error::Missing { .. })));
    }
}
