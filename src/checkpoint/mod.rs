//! Checkpoints: everything a run needs to go on with the same bits.
//!
//! `checkpoints/step-00000120/` holds `model.safetensors` (trained and untrained tensors under their module paths, loadable by
//! anything that reads safetensors), `optimizer.safetensors` (one tensor per parameter and state, `momentum/backbone.conv1.weight`),
//! `ema.safetensors` where the recipe asks for it, and `manifest.json` with the step and the BLAKE3 hash of each file.
//! Ranks, threads and prefetch are not part of the state: what a data loader and the random streams need is the step.
//!
//! A checkpoint is written into a hidden temporary folder, every file synced, and renamed into place; it exists whole or not at all.

mod files;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::files::{FileError, sync_folder, write_atomically};
use crate::model::params::Layout;
use crate::model::{Kind, Tensors};
use crate::precision::PrecisionState;

/// Version of the format.
const FORMAT: u32 = 1;
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const EMA: &str = "ema.safetensors";
const MANIFEST: &str = "manifest.json";
/// Start of the names of folders that are no checkpoints (yet, or any more).
const TEMPORARY: &str = ".writing-";

/// The state of a run between two steps, to be written.
#[derive(Clone, Debug)]
pub struct Snapshot<'a> {
    /// Optimizer steps done.
    pub step: u64,
    /// Trained parameters, flat.
    pub weights: &'a [f32],
    /// Saved but untrained tensors (running statistics, fixed embeddings), flat.
    pub buffers: &'a [f32],
    /// Optimizer state: name and flat values, as long as `weights`.
    pub optimizer: Vec<(&'static str, &'a [f32])>,
    /// Moving average of the weights, if the recipe has one.
    pub ema: Option<&'a [f32]>,
    /// Scale of the loss, and what was skipped.
    pub precision: &'a PrecisionState,
}

/// The state of a run between two steps, as read.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Optimizer steps done.
    pub step: u64,
    /// Trained parameters, flat.
    pub weights: Vec<f32>,
    /// Saved but untrained tensors (running statistics, fixed embeddings), flat.
    pub buffers: Vec<f32>,
    /// Optimizer state: name and flat values, as long as `weights`.
    pub optimizer: Vec<(String, Vec<f32>)>,
    /// Moving average of the weights, if the recipe has one.
    pub ema: Option<Vec<f32>>,
    /// Scale of the loss, and what was skipped.
    pub precision: PrecisionState,
}

/// What belongs to a checkpoint besides its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format.
    pub format: u32,
    /// Version of the program that wrote it.
    pub autodidact: String,
    /// Optimizer steps done.
    pub step: u64,
    /// Digest of everything in the plan that determines the result.
    pub plan: String,
    /// Scale of the loss, and what was skipped.
    #[serde(default)]
    pub precision: PrecisionState,
    /// Size and BLAKE3 hash of each file.
    pub files: BTreeMap<String, FileRecord>,
}

/// Size and hash of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Bytes.
    pub bytes: u64,
    /// BLAKE3, hexadecimal.
    pub blake3: String,
}

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Writing failed; nothing half-written is left.
    #[error("cannot write checkpoint {}: {source}\nhint: {kept}; free some space or choose another --run-dir, then run the same command to resume", path.display())]
    Write {
        /// The checkpoint.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
        /// What is still there to resume from.
        kept: String,
    },
    /// Reading failed.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is not what the manifest says.
    #[error("{} is damaged: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The tensors do not fit the network.
    #[error("checkpoint {} is of another network: {reason}\nhint: resume with the recipe that wrote it (plan.toml in its run folder), or train anew with --resume never", path.display())]
    OtherNetwork {
        /// The checkpoint.
        path: PathBuf,
        /// The first difference.
        reason: String,
    },
}

/// Writes `state` as a checkpoint below `folder` (the run's `checkpoints/`) and removes all but the newest `keep`.
///
/// # Errors
/// When the system refuses; then the temporary files are removed and earlier checkpoints are untouched.
pub fn save(
    folder: &Path,
    layout: &Layout,
    state: &Snapshot<'_>,
    plan: &str,
    keep: usize,
) -> Result<PathBuf, CheckpointError> {
    let path = folder.join(name_of(state.step));
    let write = || -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        remove_left_overs(folder);
        let temporary = tempfile::Builder::new().prefix(TEMPORARY).tempdir_in(folder)?;
        let mut records = BTreeMap::new();
        let mut put = |name: &str, bytes: &[u8]| -> io::Result<()> {
            files::write_synced(&temporary.path().join(name), bytes)?;
            let record = FileRecord { bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() };
            records.insert(name.to_owned(), record);
            Ok(())
        };
        put(MODEL, &files::encode(&named(layout, state.weights, state.buffers))?)?;
        let states = state.optimizer.iter();
        let states = states
            .flat_map(|(name, values)| trained(layout, values).map(move |(path, t)| (format!("{name}/{path}"), t)));
        put(OPTIMIZER, &files::encode(&states.collect::<Vec<_>>())?)?;
        if let Some(ema) = state.ema {
            put(EMA, &files::encode(&named(layout, ema, state.buffers))?)?;
        }
        let manifest = Manifest {
            format: FORMAT,
            autodidact: env!("CARGO_PKG_VERSION").to_owned(),
            step: state.step,
            plan: plan.to_owned(),
            precision: state.precision.clone(),
            files: records,
        };
        files::write_synced(&temporary.path().join(MANIFEST), &serde_json::to_vec_pretty(&manifest)?)?;
        sync_folder(temporary.path()).map_err(into_io)?;
        // a damaged checkpoint of the same step steps aside first; what it is called then is removed with the left-overs
        if path.exists() {
            std::fs::rename(&path, folder.join(format!("{TEMPORARY}replaced-{}", state.step)))?;
        }
        std::fs::rename(temporary.path(), &path)?;
        remove_left_overs(folder);
        sync_folder(folder).map_err(into_io)?;
        write_atomically(&folder.join("latest"), name_of(state.step).as_bytes()).map_err(into_io)
    };
    write().map_err(|source| {
        let kept = match list(folder).into_iter().rfind(|(step, _)| *step != state.step) {
            Some((step, _)) => format!("the checkpoint of step {step} is intact"),
            None => "there is no earlier checkpoint".to_owned(),
        };
        CheckpointError::Write { path: path.clone(), source, kept }
    })?;
    // steps beyond this one belong to a future that was given up (resumed from an older checkpoint, or damaged)
    let (later, own): (Vec<_>, Vec<_>) = list(folder).into_iter().partition(|(step, _)| *step > state.step);
    let surplus = own.len().saturating_sub(keep.max(1));
    for (_, old) in later.iter().chain(&own[..surplus]) {
        // an old checkpoint that cannot be removed costs space, not correctness
        let _ = std::fs::remove_dir_all(old);
    }
    Ok(path)
}

/// Puts right what a kill between two steps of [`save`] left: `latest` names the checkpoint of `step`, left-overs are gone.
///
/// # Errors
/// When `latest` cannot be written.
pub fn tidy(folder: &Path, step: u64) -> Result<(), FileError> {
    remove_left_overs(folder);
    let latest = folder.join("latest");
    if std::fs::read(&latest).is_ok_and(|name| name == name_of(step).as_bytes()) {
        return Ok(());
    }
    write_atomically(&latest, name_of(step).as_bytes())
}

/// Removes what a killed process left half-written. The run folder's lock makes sure that nobody else is writing.
fn remove_left_overs(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
            // what cannot be removed costs space, not correctness
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns the checkpoints below `folder`, oldest first.
#[must_use]
pub fn list(folder: &Path) -> Vec<(u64, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let step = entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?;
            Some((step, entry.path()))
        })
        .collect();
    found.sort();
    found
}

/// Returns the newest checkpoint below `folder` whose files are whole, and what is wrong with those that are newer.
#[must_use]
pub fn newest(folder: &Path) -> (Option<(Manifest, PathBuf)>, Vec<CheckpointError>) {
    let mut damaged = Vec::new();
    for (step, path) in list(folder).into_iter().rev() {
        match verify(&path) {
            Ok(manifest) if manifest.step == step => return (Some((manifest, path)), damaged),
            Ok(manifest) => damaged.push(CheckpointError::Damaged {
                path: path.join(MANIFEST),
                reason: format!("it says step {}, the folder says {step}", manifest.step),
            }),
            Err(error) => damaged.push(error),
        }
    }
    (None, damaged)
}

/// Reads the manifest of one checkpoint and verifies every file against it.
///
/// # Errors
/// When a file is missing or damaged.
pub fn verify(path: &Path) -> Result<Manifest, CheckpointError> {
    let damaged = |file: &str, reason: String| CheckpointError::Damaged { path: path.join(file), reason };
    let text = read(&path.join(MANIFEST))?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|e| damaged(MANIFEST, e.to_string()))?;
    if manifest.format != FORMAT {
        let reason = format!("format {}, this program reads format {FORMAT}", manifest.format);
        return Err(damaged(MANIFEST, reason));
    }
    for (name, record) in &manifest.files {
        let bytes = read(&path.join(name))?;
        if bytes.len() as u64 != record.bytes {
            return Err(damaged(name, format!("{} bytes, {} were written", bytes.len(), record.bytes)));
        }
        if blake3::hash(&bytes).to_hex().as_str() != record.blake3 {
            return Err(damaged(name, "its BLAKE3 hash is not the one in manifest.json".to_owned()));
        }
    }
    Ok(manifest)
}

/// Reads a verified checkpoint into the flat order of `layout`. `optimizer` names the optimizer's states.
///
/// # Errors
/// When a file is missing or damaged, or the tensors are not those of the network.
pub fn load(path: &Path, layout: &Layout, optimizer: &[&str]) -> Result<(State, Manifest), CheckpointError> {
    let manifest = verify(path)?;
    let (weights, buffers) = load_network(path, MODEL, layout)?;
    let mut tensors = tensors_of(path, OPTIMIZER)?;
    let mut states = Vec::new();
    for &name in optimizer {
        let prefixed = |entry: &str| format!("{name}/{entry}");
        let values = gather(path, layout, Kind::Trained, &mut tensors, prefixed)?;
        states.push((name.to_owned(), values));
    }
    let ema = if manifest.files.contains_key(EMA) { Some(load_network(path, EMA, layout)?.0) } else { None };
    let precision = manifest.precision.clone();
    Ok((State { step: manifest.step, weights, buffers, optimizer: states, ema, precision }, manifest))
}

/// Reads the weights and buffers of a checkpoint for evaluation: the moving average where there is one.
///
/// # Errors
/// As [`load`].
pub fn load_for_evaluation(path: &Path, layout: &Layout) -> Result<(Vec<f32>, Vec<f32>, Manifest), CheckpointError> {
    let manifest = verify(path)?;
    let file = if manifest.files.contains_key(EMA) { EMA } else { MODEL };
    let (weights, buffers) = load_network(path, file, layout)?;
    Ok((weights, buffers, manifest))
}

fn load_network(path: &Path, file: &str, layout: &Layout) -> Result<(Vec<f32>, Vec<f32>), CheckpointError> {
    let mut tensors = tensors_of(path, file)?;
    let weights = gather(path, layout, Kind::Trained, &mut tensors, str::to_owned)?;
    let buffers = gather(path, layout, Kind::Buffer, &mut tensors, str::to_owned)?;
    match tensors.keys().next() {
        Some(extra) => Err(CheckpointError::OtherNetwork {
            path: path.to_owned(),
            reason: format!("it has `{extra}`, the recipe's network has not"),
        }),
        None => Ok((weights, buffers)),
    }
}

/// Reads a file of fp32 tensors.
///
/// # Errors
/// When it cannot be read, is no safetensors file, or holds tensors of another type.
pub fn read_tensors(file: &Path) -> Result<Tensors, CheckpointError> {
    files::decode(&read(file)?).map_err(|reason| CheckpointError::Damaged { path: file.to_owned(), reason })
}

/// Encodes fp32 tensors as a safetensors file.
///
/// # Errors
/// When safetensors refuses, as for an empty name.
pub fn encode_tensors(tensors: &Tensors) -> io::Result<Vec<u8>> {
    let slices = tensors.iter().map(|(name, (shape, values))| (name.clone(), (shape.as_slice(), values.as_slice())));
    files::encode(&slices.collect::<Vec<_>>())
}

fn tensors_of(path: &Path, file: &str) -> Result<Tensors, CheckpointError> {
    read_tensors(&path.join(file))
}

fn read(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    std::fs::read(path).map_err(|source| CheckpointError::Read { path: path.to_owned(), source })
}

/// Takes the tensors of one kind in flat order.
fn gather(
    path: &Path,
    layout: &Layout,
    kind: Kind,
    tensors: &mut Tensors,
    key: impl Fn(&str) -> String,
) -> Result<Vec<f32>, CheckpointError> {
    let other = |reason| CheckpointError::OtherNetwork { path: path.to_owned(), reason };
    let mut flat = Vec::new();
    for entry in layout.entries().iter().filter(|entry| entry.kind == kind) {
        let key = key(&entry.path);
        let (shape, values) = tensors.remove(&key).ok_or_else(|| other(format!("it has no `{key}`")))?;
        if shape != entry.shape {
            return Err(other(format!("`{key}` is {shape:?} there and {:?} in the recipe's network", entry.shape)));
        }
        flat.extend(values);
    }
    Ok(flat)
}

fn trained<'a>(layout: &'a Layout, values: &'a [f32]) -> impl Iterator<Item = (String, files::Slice<'a>)> {
    let entries = layout.entries().iter().filter(|entry| entry.kind == Kind::Trained);
    entries.map(|entry| (entry.path.clone(), (entry.shape.as_slice(), &values[entry.offset..entry.offset + entry.len])))
}

fn named<'a>(layout: &'a Layout, weights: &'a [f32], buffers: &'a [f32]) -> Vec<(String, files::Slice<'a>)> {
    let of = |entry: &'a crate::model::params::Entry| {
        let values = if entry.kind == Kind::Trained { weights } else { buffers };
        (entry.path.clone(), (entry.shape.as_slice(), &values[entry.offset..entry.offset + entry.len]))
    };
    layout.entries().iter().map(of).collect()
}

fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

fn into_io(error: FileError) -> io::Error {
    error.source
}
