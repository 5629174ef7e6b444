//! `TensorBoard` event files: scalars only, written by hand (the crate for it is unmaintained).
//!
//! A file is a sequence of `TFRecord`s (<https://www.tensorflow.org/tutorials/load_data/tfrecord>), each a serialised
//! `tensorflow.Event` (`tensorboard/compat/proto/event.proto`, `summary.proto`).

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::metrics::StepRecord;
use crate::files::FileError;

/// An open event file of a run.
#[derive(Debug)]
pub struct EventLog {
    path: PathBuf,
    file: File,
}

impl EventLog {
    /// Creates a new event file in `folder`, for a process whose next step is `next_step`.
    ///
    /// Files of earlier processes are never touched. The new one begins with the mark of a restart, at which
    /// `TensorBoard` forgets what they said of `next_step` and later steps.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn create(folder: &Path, next_step: u64, now: SystemTime) -> Result<Self, FileError> {
        let seconds = unix_seconds(now);
        // TensorBoard reads files in the order of their names
        let mut path = PathBuf::new();
        for number in 0..1000 {
            path = folder.join(format!("events.out.tfevents.{:010}.autodidact.{number:03}", seconds as u64));
            match OpenOptions::new().create_new(true).append(true).open(&path) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(FileError::at(&path, "create")(e)),
                Ok(file) => {
                    let mut log = Self { path, file };
                    log.write(&[
                        event(seconds, 0, |e| bytes_field(e, 3, b"brain.Event:2")),
                        event(seconds, next_step, |e| bytes_field(e, 7, &[0x08, 1])), // SessionLog { status: START }
                    ])?;
                    return Ok(log);
                }
            }
        }
        Err(FileError { path, action: "create", source: ErrorKind::AlreadyExists.into() })
    }

    /// Appends a step: loss, its parts, learning rate, gradient norm and speed.
    ///
    /// # Errors
    /// When the disk is full or fails.
    pub fn append(&mut self, record: &StepRecord, now: SystemTime) -> Result<(), FileError> {
        let mut scalars = vec![
            ("train/loss".to_owned(), record.loss),
            ("train/lr".to_owned(), record.lr as f32),
            ("train/grad_norm".to_owned(), record.grad_norm),
            ("speed/images_per_s".to_owned(), record.images_per_s as f32),
        ];
        scalars.extend(record.pace.iter().flat_map(|pace| {
            let times = [("input_s", pace.input_s), ("median_s", pace.median_s), ("slowest_s", pace.slowest_s)];
            times.map(|(name, seconds)| (format!("speed/{name}"), seconds as f32))
        }));
        scalars.extend(record.parts.iter().map(|(name, &value)| (format!("train/parts/{name}"), value)));
        scalars.extend(record.embedding_spread.map(|spread| ("train/embedding_spread".to_owned(), spread)));
        scalars.extend(record.loss_scale.map(|scale| ("train/loss_scale".to_owned(), scale)));
        scalars.extend(record.embedding_rank.map(|rank| ("train/embedding_rank".to_owned(), rank)));
        self.scalars(record.step, &scalars, now)
    }

    /// Appends named numbers of a step.
    ///
    /// # Errors
    /// When the disk is full or fails.
    pub fn scalars(&mut self, step: u64, scalars: &[(String, f32)], now: SystemTime) -> Result<(), FileError> {
        let mut summary = Vec::new();
        for (tag, value) in scalars {
            let mut item = Vec::new();
            bytes_field(&mut item, 1, tag.as_bytes());
            item.push(2 << 3 | 5); // simple_value, 32 bits
            item.extend(value.to_le_bytes());
            bytes_field(&mut summary, 1, &item);
        }
        self.write(&[event(unix_seconds(now), step, |e| bytes_field(e, 5, &summary))])
    }

    fn write(&mut self, events: &[Vec<u8>]) -> Result<(), FileError> {
        let bytes: Vec<u8> = events.iter().flat_map(|event| framed(event)).collect();
        self.file.write_all(&bytes).map_err(FileError::at(&self.path, "write"))
    }
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Serialises an `Event`: `wall_time = 1` (double), `step = 2` (int64) and what `fill` adds.
fn event(wall_time: f64, step: u64, fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = vec![1 << 3 | 1];
    out.extend(wall_time.to_le_bytes());
    out.push(2 << 3);
    varint(&mut out, step);
    fill(&mut out);
    out
}

/// Appends a length-delimited field: a string, or a message inside another.
fn bytes_field(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    out.push(number << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Frames a record: length, masked checksum of the length, content, masked checksum of the content.
fn framed(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    let mut out = length.to_vec();
    out.extend(masked(crc32c(&length)).to_le_bytes());
    out.extend(content);
    out.extend(masked(crc32c(content)).to_le_bytes());
    out
}

fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Castagnoli checksum (RFC 3720, appendix B.4), a bit at a time: an event has some 200 bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::time::Duration;

    #[test]
    fn checksums_match_rfc_3720() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
    }

    /// Splits a file into records, checking their frames.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let content = bytes[12..12 + length].to_vec();
            assert_eq!(framed(&content), bytes[..length + 16]);
            bytes = &bytes[length + 16..];
            out.push(content);
        }
        out
    }

    #[test]
    fn a_restart_makes_a_new_file_and_leaves_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let now = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let record = StepRecord {
            step: 300,
            epoch: 1.0,
            loss: 4.5,
            lr: 0.1,
            grad_norm: 2.0,
            images: 0,
            parts: BTreeMap::from([("a".to_owned(), 1.0)]),
            embedding_spread: None,
            embedding_rank: None,
            loss_scale: None,
            overflows: 0,
            skipped: 0,
            time_s: 0.0,
            images_per_s: 10.0,
            pace: None,
        };
        EventLog::create(folder.path(), 1, now).unwrap().append(&record, now).unwrap();
        EventLog::create(folder.path(), 200, now).unwrap();
        let first = folder.path().join("events.out.tfevents.1700000000.autodidact.000");
        let records = records(&std::fs::read(first).unwrap());
        assert_eq!(records.len(), 3);
        assert_eq!(records[0][9..], *b"\x10\x00\x1a\x0dbrain.Event:2");
        assert_eq!(records[1][9..], [0x10, 1, 0x3a, 2, 0x08, 1]);
        assert_eq!(records[2][..9], [&[0x09][..], &1_700_000_000f64.to_le_bytes()].concat());
        // step 300, then the summary with its first value
        assert_eq!(records[2][9..12], [0x10, 0xac, 0x02]);
        let loss = [&b"\x0a\x11\x0a\x0atrain/loss\x15"[..], &4.5f32.to_le_bytes()].concat();
        assert!(records[2].windows(loss.len()).any(|window| window == loss));
        assert!(folder.path().join("events.out.tfevents.1700000000.autodidact.001").exists());
    }

    #[test]
    fn an_unusable_folder_is_named() {
        let error = EventLog::create(Path::new("/nonexistent"), 1, UNIX_EPOCH).unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent/events.out.tfevents.") && error.contains("cannot create"), "{error}");
    }
}
