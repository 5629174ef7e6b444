//! `metrics.jsonl`: one JSON object per optimizer step.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use crate::files::{FileError, write_atomically};

/// What one optimizer step measured. All but `time_s`, `images_per_s` and `pace` are a function of recipe, data and seed.
///
/// Numbers are written with the fewest digits that read back as the same number. JSON has no word for a number that is
/// not finite: it is written as `null`, and read back as NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Optimizer steps done, this one included: the first step is 1.
    pub step: u64,
    /// Passes over the data after this step, with fraction.
    pub epoch: f64,
    /// Loss of the global batch.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f32,
    /// Learning rate.
    pub lr: f64,
    /// Global norm of the gradient before clipping.
    #[serde(deserialize_with = "null_is_nan")]
    pub grad_norm: f32,
    /// Images seen since the start.
    pub images: u64,
    /// Named parts of the loss.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "nulls_are_nan")]
    pub parts: BTreeMap<String, f32>,
    /// Spread of the embeddings: 1 when they fill the sphere, 0 when they are all the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_spread: Option<f32>,
    /// Effective number of directions that the embeddings differ in, of at most 64 images: 1 when they lie on a line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_rank: Option<f32>,
    /// Scale of the loss after this step, in fp16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f32>,
    /// Attempts up to here that overflowed in fp16 and were made again at a smaller scale.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub overflows: u64,
    /// Steps up to here that were not finite and moved nothing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
    /// Seconds since this process started training.
    pub time_s: f64,
    /// Rate of this step.
    pub images_per_s: f64,
    /// What the ranks' time went to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<Pace>,
}

/// What a step's time went to, on the ranks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// Longest time that a rank waited for its images.
    pub input_s: f64,
    /// Time that the middle rank needed for forward and backward pass.
    pub median_s: f64,
    /// Time that the slowest one needed.
    pub slowest_s: f64,
    /// Which that was.
    pub slowest_rank: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f32::NAN))
}

fn nulls_are_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f32>, D::Error> {
    let parts = BTreeMap::<String, Option<f32>>::deserialize(deserializer)?;
    Ok(parts.into_iter().map(|(name, value)| (name, value.unwrap_or(f32::NAN))).collect())
}

/// Lines that [`MetricsLog::open`] removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Steps after the checkpoint, which run again.
    pub rerun: usize,
    /// Lines that a kill or power loss left unreadable.
    pub damaged: usize,
}

/// The open `metrics.jsonl` of a run.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    length: u64,
    removed: Removed,
}

impl MetricsLog {
    /// Opens the log in `folder` for a run whose next step is `next_step` (1 for a new run), creating it when there is
    /// none.
    ///
    /// Lines of that step and later ones belong to work that was lost with the last kill and runs again: they are
    /// removed, as are lines that cannot be read, such as a torn last one. The file is replaced in one piece.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn open(folder: &Path, next_step: u64) -> Result<Self, FileError> {
        let path = folder.join("metrics.jsonl");
        let old = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(FileError::at(&path, "read")(e)),
        };
        let (mut kept, mut removed) = (Vec::with_capacity(old.len()), Removed::default());
        for line in old.split_inclusive(|&byte| byte == b'\n') {
            match serde_json::from_slice::<StepRecord>(line) {
                Ok(record) if record.step >= next_step => removed.rerun += 1,
                Ok(_) => {
                    kept.extend_from_slice(line.trim_ascii_end());
                    kept.push(b'\n');
                }
                Err(_) => removed.damaged += 1,
            }
        }
        if kept != old {
            write_atomically(&path, &kept)?;
        }
        let open = OpenOptions::new().create(true).append(true).open(&path);
        let file = open.map_err(FileError::at(&path, "open for writing"))?;
        Ok(Self { path, file, length: kept.len() as u64, removed })
    }

    /// Returns what opening removed.
    pub fn removed(&self) -> Removed {
        self.removed
    }

    /// Appends one line, which then is in the hands of the operating system: a kill of the process does not lose it.
    ///
    /// # Errors
    /// When the disk is full or fails; the log then ends with its last whole line, if the disk lets it.
    pub fn append(&mut self, record: &StepRecord) -> Result<(), FileError> {
        let mut line = serde_json::to_vec(record).map_err(|e| FileError::at(&self.path, "encode")(e.into()))?;
        line.push(b'\n');
        if let Err(e) = self.file.write_all(&line) {
            // the write error is what matters; opening removes a torn line anyway
            let _ = self.file.set_len(self.length);
            return Err(FileError::at(&self.path, "write")(e));
        }
        self.length += line.len() as u64;
        Ok(())
    }

    /// Makes all lines survive a power loss. Call it before a checkpoint becomes visible, so that no checkpoint is
    /// ahead of its metrics.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn sync(&self) -> Result<(), FileError> {
        self.file.sync_data().map_err(FileError::at(&self.path, "sync"))
    }
}

/// Returns all readable records of a `metrics.jsonl`, in file order.
///
/// # Errors
/// When the file cannot be read.
pub fn read_metrics(path: &Path) -> Result<Vec<StepRecord>, FileError> {
    let bytes = std::fs::read(path).map_err(FileError::at(path, "read"))?;
    Ok(bytes.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(step: u64) -> StepRecord {
        StepRecord {
            step,
            epoch: step as f64 / 7.0,
            loss: 5.0 / step as f32,
            lr: 0.1 + 0.2,
            grad_norm: 1.5,
            images: 64 * step,
            parts: BTreeMap::from([("invariance".to_owned(), 0.1)]),
            embedding_spread: Some(0.9),
            embedding_rank: Some(7.5),
            loss_scale: None,
            overflows: 0,
            skipped: 0,
            time_s: 0.25,
            images_per_s: 1234.5,
            pace: None,
        }
    }

    fn log(folder: &Path, steps: std::ops::RangeInclusive<u64>) {
        let mut log = MetricsLog::open(folder, *steps.start()).unwrap();
        steps.for_each(|step| log.append(&record(step)).unwrap());
        log.sync().unwrap();
    }

    fn steps(folder: &Path) -> Vec<u64> {
        read_metrics(&folder.join("metrics.jsonl")).unwrap().iter().map(|record| record.step).collect()
    }

    #[test]
    fn lines_are_what_readers_expect_and_read_back_equal() {
        let folder = tempfile::tempdir().unwrap();
        log(folder.path(), 1..=2);
        let text = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
        let first = text.lines().next().unwrap();
        assert_eq!(
            first,
            r#"{"step":1,"epoch":0.14285714285714285,"loss":5.0,"lr":0.30000000000000004,"grad_norm":1.5,"images":64,"parts":{"invariance":0.1},"embedding_spread":0.9,"embedding_rank":7.5,"time_s":0.25,"images_per_s":1234.5}"#
        );
        assert_eq!(read_metrics(&folder.path().join("metrics.jsonl")).unwrap(), [record(1), record(2)]);
    }

    #[test]
    fn resuming_removes_steps_that_run_again() {
        let folder = tempfile::tempdir().unwrap();
        log(folder.path(), 1..=9);
        let opened = MetricsLog::open(folder.path(), 6).unwrap();
        assert_eq!(opened.removed(), Removed { rerun: 4, damaged: 0 });
        drop(opened);
        log(folder.path(), 6..=7);
        assert_eq!(steps(folder.path()), [1, 2, 3, 4, 5, 6, 7]);
        // a new run in the same folder
        assert_eq!(MetricsLog::open(folder.path(), 1).unwrap().removed().rerun, 7);
        assert_eq!(steps(folder.path()), [0; 0]);
    }

    #[test]
    fn a_torn_last_line_goes_wherever_it_was_torn() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        log(folder.path(), 1..=3);
        let whole = std::fs::read(&path).unwrap();
        let third = whole.len() / 3 * 2;
        for cut in (third + 1..whole.len()).step_by(7) {
            std::fs::write(&path, &whole[..cut]).unwrap();
            log(folder.path(), 3..=3);
            assert_eq!(std::fs::read(&path).unwrap(), whole, "torn at {cut}");
        }
        // whole but for its end: kept, and the next line is not glued to it
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        log(folder.path(), 4..=4);
        assert_eq!(steps(folder.path()), [1, 2, 3, 4]);
    }

    #[test]
    fn zeros_and_garbage_in_the_middle_do_not_cost_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        log(folder.path(), 1..=1);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.extend_from_slice(b"\0\0\0\0\n\xff\xfe\n\n");
        bytes.extend(serde_json::to_vec(&record(2)).unwrap());
        bytes.push(b'\n');
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(MetricsLog::open(folder.path(), 3).unwrap().removed(), Removed { rerun: 0, damaged: 3 });
        assert_eq!(steps(folder.path()), [1, 2]);
    }

    #[test]
    fn nothing_to_remove_leaves_the_file_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        log(folder.path(), 1..=3);
        let before = path.metadata().unwrap().modified().unwrap();
        assert_eq!(MetricsLog::open(folder.path(), 4).unwrap().removed(), Removed::default());
        assert_eq!(path.metadata().unwrap().modified().unwrap(), before);
    }

    #[test]
    fn unusable_folders_are_named() {
        let error = MetricsLog::open(Path::new("/nonexistent/run"), 1).unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent/run/metrics.jsonl: cannot open for writing: "), "{error}");
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("metrics.jsonl")).unwrap();
        let error = MetricsLog::open(folder.path(), 1).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl: cannot read: "), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_with_its_path() {
        let file = OpenOptions::new().append(true).open("/dev/full").unwrap();
        let path = PathBuf::from("run/metrics.jsonl");
        let mut log = MetricsLog { path, file, length: 0, removed: Removed::default() };
        let error = log.append(&record(1)).unwrap_err().to_string();
        assert!(error.starts_with("run/metrics.jsonl: cannot write: ") && error.contains("disk is full"), "{error}");
    }

    #[test]
    fn what_is_not_finite_is_null_and_the_line_stays_json() {
        let strange = StepRecord { loss: f32::NAN, grad_norm: f32::INFINITY, ..record(4) };
        let text = serde_json::to_string(&strange).unwrap();
        assert!(text.contains(r#""loss":null"#) && text.contains(r#""grad_norm":null"#), "{text}");
        let back: StepRecord = serde_json::from_str(&text).unwrap();
        assert!(back.loss.is_nan() && back.grad_norm.is_nan() && back.step == 4);
    }

    proptest! {
        #[test]
        fn finite_numbers_read_back_bit_for_bit(bits: u32, wide: u64) {
            let (loss, lr) = (f32::from_bits(bits), f64::from_bits(wide));
            prop_assume!(loss.is_finite() && lr.is_finite());
            let parts = BTreeMap::from([("part".to_owned(), loss)]);
            let text = serde_json::to_string(&StepRecord { loss, lr, parts, ..record(1) }).unwrap();
            let back: StepRecord = serde_json::from_str(&text).unwrap();
            prop_assert_eq!((back.loss.to_bits(), back.lr.to_bits()), (bits, wide));
            prop_assert_eq!(back.parts["part"].to_bits(), bits);
        }
    }
}
