//! Features on disk: in parts while they are computed, so that a kill loses little, then in one file.
//!
//! The folder `NAME.parts` beside the output holds `job.json` (what is computed: only the same job goes on) and one safetensors file a part, each whole or not
//! there. Nothing of a part depends on when or by how many threads it was computed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::extract::{BATCH, Extracted};
use crate::files::{FileError, write_atomically, write_atomically_with, write_json};

/// Images of a part, whole batches.
pub const PART: usize = 32 * BATCH;

/// Why features cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The disk.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another process writes the same.
    #[error("{}: another process computes these features\nhint: wait for it, or choose another output", .0.display())]
    Busy(PathBuf),
    /// There are parts of something else.
    #[error(
        "{}: it holds a part of other features ({differs})\nhint: give the images and the checkpoint that they were begun with, remove the folder, or start over with `--force`",
        folder.display()
    )]
    OtherJob {
        /// The folder of the parts.
        folder: PathBuf,
        /// What differs.
        differs: String,
    },
    /// A part is not what this program writes.
    #[error("{}: it is damaged: {reason}\nhint: remove it and run the same command again; only this part is computed anew", path.display())]
    Damaged {
        /// The part.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// An image without features.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoFeatures {
    /// Index of the image in its source.
    pub index: usize,
    /// Why it cannot be read.
    pub reason: String,
}

/// What one part holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Features, row by row.
    pub values: Vec<f32>,
    /// Width of a feature.
    pub dim: usize,
    /// Index of each row's image.
    pub kept: Vec<usize>,
    /// Images that cannot be read.
    pub unreadable: Vec<NoFeatures>,
}

impl Part {
    /// Tells whether it is of these images, each in one row or among the unreadable ones.
    fn is_of(&self, images: &[usize]) -> bool {
        let mut own: Vec<usize> =
            self.kept.iter().copied().chain(self.unreadable.iter().map(|bad| bad.index)).collect();
        own.sort_unstable();
        self.kept.is_sorted() && own == images
    }
}

/// A folder of parts, held by this process.
#[derive(Debug)]
pub struct Parts {
    folder: PathBuf,
    num_images: usize,
    /// Held until the process ends.
    _lock: File,
}

impl Parts {
    /// Opens the parts of `output` for a job, or begins them.
    ///
    /// # Errors
    /// When the folder cannot be written, another process holds it, or it holds parts of another job and `force` is not set.
    pub fn open(output: &Path, job: &Json, num_images: usize, force: bool) -> Result<Self, StoreError> {
        let folder = Self::folder(output);
        fs::create_dir_all(&folder).map_err(FileError::at(&folder, "create"))?;
        let lock_path = folder.join(".lock");
        let lock = File::create(&lock_path).map_err(FileError::at(&lock_path, "create"))?;
        if let Err(fs::TryLockError::WouldBlock) = lock.try_lock() {
            return Err(StoreError::Busy(folder));
        }
        let description = folder.join("job.json");
        let known: Option<Json> = fs::read(&description).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let differs = known.as_ref().and_then(|known| difference(known, job));
        match differs {
            Some(differs) if !force => return Err(StoreError::OtherJob { folder, differs }),
            None if known.is_some() && !force => {}
            // parts without a description, or of another job, are of no use
            _ => {
                for part in 0.. {
                    if fs::remove_file(part_path(&folder, part)).is_err() && part * PART >= num_images {
                        break;
                    }
                }
                write_json(&description, job)?;
            }
        }
        Ok(Self { folder, num_images, _lock: lock })
    }

    /// Names the folder of the parts of `output`.
    #[must_use]
    pub fn folder(output: &Path) -> PathBuf {
        let mut name = output.file_name().unwrap_or_default().to_owned();
        name.push(".parts");
        output.with_file_name(name)
    }

    /// Returns the number of parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.num_images.div_ceil(PART)
    }

    /// Tells whether there is nothing to compute.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.num_images == 0
    }

    /// Returns the images of a part.
    #[must_use]
    pub fn images(&self, part: usize) -> Vec<usize> {
        (part * PART..((part + 1) * PART).min(self.num_images)).collect()
    }

    /// Tells whether a part is there.
    #[must_use]
    pub fn has(&self, part: usize) -> bool {
        part_path(&self.folder, part).is_file()
    }

    /// Writes a part.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn put(&self, part: usize, extracted: &Extracted) -> Result<(), StoreError> {
        let path = part_path(&self.folder, part);
        let unreadable: Vec<NoFeatures> = extracted
            .unreadable
            .iter()
            .map(|(index, reason)| NoFeatures { index: *index, reason: reason.to_string() })
            .collect();
        let encoded = || -> io::Result<Vec<u8>> {
            let unreadable = serde_json::to_vec(&unreadable)?;
            let values: Vec<u8> = extracted.values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let kept: Vec<u8> = extracted.kept.iter().flat_map(|&index| (index as u64).to_le_bytes()).collect();
            let digest = digest(&[&values, &kept, &unreadable]);
            let view = |dtype, shape: Vec<usize>, bytes| TensorView::new(dtype, shape, bytes);
            let rows = extracted.kept.len();
            let views = [
                ("features", view(Dtype::F32, vec![rows, extracted.dim], &values)),
                ("kept", view(Dtype::U64, vec![rows], &kept)),
                ("unreadable", view(Dtype::U8, vec![unreadable.len()], &unreadable)),
                ("digest", view(Dtype::U8, vec![32], digest.as_bytes())),
            ];
            let views = views.into_iter().map(|(name, view)| view.map(|view| (name, view)));
            let views = views.collect::<Result<Vec<_>, _>>().map_err(io::Error::other)?;
            safetensors::serialize(views, None).map_err(io::Error::other)
        };
        let bytes = encoded().map_err(FileError::at(&path, "encode"))?;
        Ok(write_atomically(&path, &bytes)?)
    }

    /// Reads a part.
    ///
    /// # Errors
    /// When it cannot be read or is damaged.
    pub fn get(&self, part: usize) -> Result<Part, StoreError> {
        let path = part_path(&self.folder, part);
        let bytes = fs::read(&path).map_err(FileError::at(&path, "read"))?;
        let checked = decode(&bytes).and_then(|found| {
            let own = found.is_of(&self.images(part));
            if own { Ok(found) } else { Err("its images are not those of this part".to_owned()) }
        });
        checked.map_err(|reason| StoreError::Damaged { path, reason })
    }

    /// Removes the folder; the features lie elsewhere now.
    pub fn remove(self) {
        // what cannot be removed costs space, not correctness
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn part_path(folder: &Path, part: usize) -> PathBuf {
    folder.join(format!("part-{part:06}.safetensors"))
}

/// The first key whose value is another one.
fn difference(known: &Json, job: &Json) -> Option<String> {
    if known == job {
        return None;
    }
    let (Some(known), Some(job)) = (known.as_object(), job.as_object()) else {
        return Some("of another kind".to_owned());
    };
    let keys = known.keys().chain(job.keys());
    let key = keys.into_iter().find(|key| known.get(*key) != job.get(*key))?;
    let shown = |value: Option<&Json>| value.map_or_else(|| "absent".to_owned(), Json::to_string);
    Some(format!("`{key}` is {} there and {} here", shown(known.get(key)), shown(job.get(key))))
}

fn digest(contents: &[&[u8]]) -> blake3::Hash {
    let mut digest = blake3::Hasher::new();
    for content in contents {
        digest.update(&(content.len() as u64).to_le_bytes());
        digest.update(content);
    }
    digest.finalize()
}

fn decode(bytes: &[u8]) -> Result<Part, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let tensor = |name: &str, dtype| {
        let tensor = file.tensor(name).map_err(|error| error.to_string())?;
        if tensor.dtype() == dtype { Ok(tensor) } else { Err(format!("`{name}` is {:?}", tensor.dtype())) }
    };
    let contents = [tensor("features", Dtype::F32)?, tensor("kept", Dtype::U64)?, tensor("unreadable", Dtype::U8)?];
    let contents = contents.each_ref().map(TensorView::data);
    if tensor("digest", Dtype::U8)?.data() != digest(&contents).as_bytes() {
        return Err("its digest is another one".to_owned());
    }
    let features = tensor("features", Dtype::F32)?;
    let &[rows, dim] = features.shape() else { return Err(format!("`features` is {:?}", features.shape())) };
    let kept = tensor("kept", Dtype::U64)?;
    let kept: Vec<usize> = kept.data().as_chunks().0.iter().map(|&b| u64::from_le_bytes(b) as usize).collect();
    if kept.len() != rows {
        return Err(format!("{rows} rows for {} images", kept.len()));
    }
    let values = features.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
    let unreadable =
        serde_json::from_slice(tensor("unreadable", Dtype::U8)?.data()).map_err(|error| error.to_string())?;
    Ok(Part { values, dim, kept, unreadable })
}

/// Kind of the file that features end in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// `NumPy`'s `.npy` (NEP 1): the features alone, labels in a file of their own.
    Npy,
    /// safetensors: `features`, `labels` and `indices`.
    Safetensors,
}

impl Container {
    /// Tells the kind by the end of a file's name.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "npy" => Some(Self::Npy),
            "safetensors" => Some(Self::Safetensors),
            _ => None,
        }
    }
}

/// Puts the parts into one file, reading one at a time; `labels` of the rows, -1 where an image has none, go with it if there are any.
///
/// # Errors
/// When a part is damaged or the disk refuses.
pub fn join(
    parts: &Parts,
    path: &Path,
    container: Container,
    rows: usize,
    dim: usize,
    labels: &[i64],
) -> Result<(), StoreError> {
    let fault = |action| FileError::at(path, action);
    write_atomically_with(path, |file| {
        let header = match container {
            Container::Npy => npy_header("<f4", &[rows, dim]),
            Container::Safetensors => safetensors_header(rows, dim, !labels.is_empty()),
        };
        file.write_all(&header).map_err(fault("write"))?;
        for part in 0..parts.len() {
            for value in parts.get(part)?.values {
                file.write_all(&value.to_le_bytes()).map_err(fault("write"))?;
            }
        }
        if container == Container::Safetensors {
            for part in 0..parts.len() {
                for index in parts.get(part)?.kept {
                    // an index is no negative number, whose bits would differ
                    file.write_all(&(index as u64).to_le_bytes()).map_err(fault("write"))?;
                }
            }
            write_integers(file, labels).map_err(fault("write"))?;
        }
        Ok(())
    })
}

/// Writes integers as an `.npy` file.
///
/// # Errors
/// When the disk refuses.
pub fn write_npy(path: &Path, values: &[i64]) -> Result<(), FileError> {
    write_atomically_with(path, |file| {
        file.write_all(&npy_header("<i8", &[values.len()])).map_err(FileError::at(path, "write"))?;
        write_integers(file, values).map_err(FileError::at(path, "write"))
    })
}

fn write_integers(file: &mut dyn Write, values: &[i64]) -> io::Result<()> {
    values.iter().try_for_each(|value| file.write_all(&value.to_le_bytes()))
}

/// The header of an `.npy` file of version 1.0 (<https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>): its length is a multiple of 64.
fn npy_header(dtype: &str, shape: &[usize]) -> Vec<u8> {
    /// Magic, version and length.
    const START: usize = 10;
    // a tuple of one has a comma, too
    let sides: Vec<String> = shape.iter().map(|side| format!("{side},")).collect();
    let mut text = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({}), }}", sides.join(" "));
    let whole = (START + text.len() + 1).next_multiple_of(64);
    text.extend(std::iter::repeat_n(' ', whole - START - text.len() - 1));
    text.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((text.len() as u16).to_le_bytes());
    header.extend(text.bytes());
    header
}

/// The header of a safetensors file that is written piece by piece, which the safetensors crate cannot.
fn safetensors_header(rows: usize, dim: usize, labelled: bool) -> Vec<u8> {
    let mut end = 0;
    let mut table = serde_json::Map::new();
    let mut put = |name: &str, dtype: &str, shape: &[usize], size: usize| {
        let start = end;
        end += shape.iter().product::<usize>() * size;
        table.insert(name.to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    };
    put("features", "F32", &[rows, dim], 4);
    put("indices", "I64", &[rows], 8);
    if labelled {
        put("labels", "I64", &[rows], 8);
    }
    let mut text = Json::Object(table).to_string();
    // data begins at a multiple of 8
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
