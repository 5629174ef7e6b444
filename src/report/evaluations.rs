//! `evaluations.jsonl`: one JSON object per evaluation while training; and the tables of the last one.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::eval::{Classification, Classified, MultiLabel};
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
    /// Share with the right class first, where each image has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top1: Option<f64>,
    /// Share with the right class among the first five, where each image has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top5: Option<f64>,
    /// Mean average precision, where an image may have several classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_average_precision: Option<f64>,
    /// Mean cross-entropy.
    pub loss: f64,
    /// Mean F1.
    pub macro_f1: f64,
    /// F1 over all pairs of image and class, where an image may have several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_f1: Option<f64>,
    /// Expected calibration error, where each image has one class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration_error: Option<f64>,
}

impl EvaluationRecord {
    /// Notes what was measured after `step` steps.
    #[must_use]
    pub fn new(step: u64, epoch: f64, result: &Classified) -> Self {
        match result {
            Classified::One(result) => Self {
                step,
                epoch,
                on: result.on.to_owned(),
                images: result.images,
                top1: Some(result.top1),
                top5: Some(result.top5),
                mean_average_precision: None,
                loss: result.loss,
                macro_f1: result.macro_f1,
                micro_f1: None,
                calibration_error: Some(result.calibration_error),
            },
            Classified::Several(result) => Self {
                step,
                epoch,
                on: result.on.to_owned(),
                images: result.images,
                top1: None,
                top5: None,
                mean_average_precision: Some(result.mean_average_precision),
                loss: result.loss,
                macro_f1: result.macro_f1,
                micro_f1: Some(result.micro_f1),
                calibration_error: None,
            },
        }
    }
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

/// Writes `classes.csv`, a line a class; and `confusion.csv`, a row a class and a column an answer, where each image has one class.
///
/// # Errors
/// When they cannot be written.
pub fn write_tables(folder: &Path, names: &[String], result: &Classified) -> Result<(), FileError> {
    match result {
        Classified::One(result) => {
            write_classes(folder, names, result)?;
            write_confusion(folder, names, result)
        }
        Classified::Several(result) => write_labels(folder, names, result),
    }
}

fn write_classes(folder: &Path, names: &[String], result: &Classification) -> Result<(), FileError> {
    let mut classes = "class,images,precision,recall,f1\n".to_owned();
    for (name, class) in names.iter().zip(&result.classes) {
        let name = csv_field(name);
        // writing to a string cannot fail
        let _ = writeln!(classes, "{name},{},{},{},{}", class.images, class.precision, class.recall, class.f1);
    }
    write_atomically(&folder.join("classes.csv"), classes.as_bytes())
}

/// A matrix of more classes than this is a list of its pairs instead: it would be nothing but zeros.
const MATRIX: usize = 1000;

fn write_confusion(folder: &Path, names: &[String], result: &Classification) -> Result<(), FileError> {
    let header: Vec<String> = names.iter().map(|name| csv_field(name)).collect();
    let mut confusion = String::new();
    if names.len() <= MATRIX {
        let _ = writeln!(confusion, "class \\ answer,{}", header.join(","));
        for (class, name) in header.iter().enumerate() {
            let of = |answer: usize| result.confusion.get(&(class, answer)).copied().unwrap_or(0).to_string();
            let row: Vec<String> = (0..names.len()).map(of).collect();
            let _ = writeln!(confusion, "{name},{}", row.join(","));
        }
    } else {
        confusion += "class,answer,images\n";
        for (&(class, answer), images) in &result.confusion {
            let _ = writeln!(confusion, "{},{},{images}", header[class], header[answer]);
        }
    }
    write_atomically(&folder.join("confusion.csv"), confusion.as_bytes())
}

fn write_labels(folder: &Path, names: &[String], result: &MultiLabel) -> Result<(), FileError> {
    let mut classes = "class,images,precision,recall,f1,average_precision,auroc\n".to_owned();
    let known = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    for (name, class) in names.iter().zip(&result.classes) {
        let (precision, auroc) = (known(class.average_precision), known(class.auroc));
        let name = csv_field(name);
        let _ = writeln!(
            classes,
            "{name},{},{},{},{},{precision},{auroc}",
            class.images, class.precision, class.recall, class.f1
        );
    }
    write_atomically(&folder.join("classes.csv"), classes.as_bytes())
}

/// A field of a CSV file (RFC 4180).
#[must_use]
pub fn csv_field(field: &str) -> String {
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
            top1: Some(0.1),
            top5: Some(0.7),
            mean_average_precision: None,
            loss: 2.0 / 3.0,
            macro_f1: 0.05,
            micro_f1: None,
            calibration_error: Some(0.2),
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
        let names = ["a cat".to_owned(), "a \"dog\", small".to_owned()];
        write_tables(folder.path(), &names, &Classified::One(result)).unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let classes = "class,images,precision,recall,f1\na cat,1,0.5,1,0.6666666666666666\n\"a \"\"dog\"\", small\",2,1,0.5,0.6666666666666666\n";
        assert_eq!(read("classes.csv"), classes);
        assert_eq!(
            read("confusion.csv"),
            "class \\ answer,a cat,\"a \"\"dog\"\", small\"\na cat,1,0\n\"a \"\"dog\"\", small\",1,1\n"
        );
        let several = MultiLabel::of("test", vec![1.0, -1.0, 2.0, 1.0], 2, &[vec![0], vec![0, 1]]).unwrap();
        write_tables(folder.path(), &names, &Classified::Several(several)).unwrap();
        let classes = "class,images,precision,recall,f1,average_precision,auroc\na cat,2,1,1,1,1,\n\"a \"\"dog\"\", small\",1,1,1,1,1,1\n";
        assert_eq!(read("classes.csv"), classes);
    }
}
