//! `evaluations.jsonl`: one JSON object per evaluation while training; and the tables of the last one.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::eval::Classification;
use crate::files::{FileError, write_atomically};

/// One evaluation while training; a function of recipe, data and seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRecord {
    /// Optimizer steps done.
    pub step: u64,
    /// Passes over the data, with fraction.
    pub epoch: f64,
    /// What the images are: `test` or `validation`.
    pub on: String,
    /// Number of images.
    pub images: usize,
    /// Share with the right class first.
    pub top1: f64,
    /// Share with the right class among the first five.
    pub top5: f64,
    /// Mean cross-entropy.
    pub loss: f64,
    /// Mean F1.
    pub macro_f1: f64,
    /// Expected calibration error.
    pub calibration_error: f64,
}

/// The evaluations of a run.
#[derive(Debug)]
pub struct EvaluationLog {
    path: PathBuf,
    records: Vec<EvaluationRecord>,
}

impl EvaluationLog {
    /// Reads the log in `folder` of a run that has done `done` steps. Later evaluations, and lines that cannot be read, are forgotten.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub fn open(folder: &Path, done: u64) -> Result<Self, FileError> {
        let path = folder.join("evaluations.jsonl");
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(FileError::at(&path, "read")(error)),
        };
        let lines = bytes.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
        let records = lines.filter(|record: &EvaluationRecord| record.step <= done).collect();
        Ok(Self { path, records })
    }

    /// Returns the evaluations so far, in order.
    #[must_use]
    pub fn records(&self) -> &[EvaluationRecord] {
        &self.records
    }

    /// Adds one and writes the file, in one piece.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn push(&mut self, record: EvaluationRecord) -> Result<(), FileError> {
        self.records.push(record);
        let mut text = Vec::new();
        for record in &self.records {
            serde_json::to_writer(&mut text, record).map_err(|e| FileError::at(&self.path, "encode")(e.into()))?;
            text.push(b'\n');
        }
        write_atomically(&self.path, &text)
    }
}

/// Writes `classes.csv`, a line a class, and `confusion.csv`, a row a class and a column an answer.
///
/// # Errors
/// When they cannot be written.
pub fn write_tables(folder: &Path, names: &[String], result: &Classification) -> Result<(), FileError> {
    let mut classes = "class,images,precision,recall,f1\n".to_owned();
    for (name, class) in names.iter().zip(&result.classes) {
        // writing to a string cannot fail
        let _ =
            writeln!(classes, "{},{},{},{},{}", quoted(name), class.images, class.precision, class.recall, class.f1);
    }
    write_atomically(&folder.join("classes.csv"), classes.as_bytes())?;
    let header: Vec<String> = names.iter().map(|name| quoted(name)).collect();
    let mut confusion = format!("class \\ answer,{}\n", header.join(","));
    for (name, row) in header.iter().zip(result.confusion.chunks_exact(names.len().max(1))) {
        let row: Vec<String> = row.iter().map(ToString::to_string).collect();
        let _ = writeln!(confusion, "{name},{}", row.join(","));
    }
    write_atomically(&folder.join("confusion.csv"), confusion.as_bytes())
}

/// A field of a CSV file (RFC 4180).
fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64) -> EvaluationRecord {
        EvaluationRecord {
            step,
            epoch: step as f64 / 10.0,
            on: "validation".to_owned(),
            images: 7,
            top1: 0.1,
            top5: 0.7,
            loss: 2.0 / 3.0,
            macro_f1: 0.05,
            calibration_error: 0.2,
        }
    }

    #[test]
    fn evaluations_after_the_checkpoint_are_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = EvaluationLog::open(folder.path(), 0).unwrap();
        for step in [10, 20, 30] {
            log.push(record(step)).unwrap();
        }
        let path = folder.path().join("evaluations.jsonl");
        let whole = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{whole}{{\"step\":4")).unwrap();
        let mut resumed = EvaluationLog::open(folder.path(), 20).unwrap();
        assert_eq!(resumed.records(), [record(10), record(20)]);
        resumed.push(record(30)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), whole);
    }

    #[test]
    fn tables_name_the_classes() {
        let folder = tempfile::tempdir().unwrap();
        let result = Classification::of("test", vec![1.0, 0.0, 2.0, 0.0, 0.0, 1.0], 2, &[0, 1, 1]).unwrap();
        write_tables(folder.path(), &["a cat".to_owned(), "a \"dog\", small".to_owned()], &result).unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let classes = "class,images,precision,recall,f1\na cat,1,0.5,1,0.6666666666666666\n\"a \"\"dog\"\", small\",2,1,0.5,0.6666666666666666\n";
        assert_eq!(read("classes.csv"), classes);
        assert_eq!(
            read("confusion.csv"),
            "class \\ answer,a cat,\"a \"\"dog\"\", small\"\na cat,1,0\n\"a \"\"dog\"\", small\",1,1\n"
        );
    }
}
