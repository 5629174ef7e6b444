//! Files of `torch.save`: archives (since 1.6) and runs of pickles followed by storages (before).
//!
//! Both as `torch/serialization.py` reads them (<https://github.com/pytorch/pytorch/blob/main/torch/serialization.py>, `_load` and `_legacy_load`).

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};

use zip::{CompressionMethod, ZipArchive};

use super::dtype::Dtype;
use super::error::Refusal;
use super::pickle::{self, Object, Pickle, StorageId, Value};
use super::tensor::{Storage, Tensor};

/// First number of a file before torch 1.6.
const MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;
/// Deepest nesting of dictionaries and lists that is looked into.
const MAX_DEPTH: usize = 64;
/// Most values that are looked at, counting a value once for every way that leads to it.
const MAX_VISITS: usize = 1 << 20;
/// Longest key of a tensor.
const MAX_KEY: usize = 512;
/// Most bytes of all keys together.
const MAX_KEYS: usize = 64 << 20;
/// Longest text that is kept as a setting.
const MAX_SETTING: usize = 256;

/// What a file holds: tensors by their keys, keys of nested containers joined by `/`, and settings in the same way.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) tensors: Vec<(String, Tensor)>,
    pub(super) settings: BTreeMap<String, Setting>,
}

/// A value beside the tensors.
#[derive(Clone, Debug, PartialEq)]
pub enum Setting {
    /// `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Another number.
    Float(f64),
    /// Text.
    Text(String),
}

// ---- archives --------------------------------------------------------------------------------------------------------

/// Reads an archive of torch 1.6 or later.
pub(super) fn read_archive(file: &File, number: usize) -> Result<Contents, Refusal> {
    let broken = |error: zip::result::ZipError| match error {
        zip::result::ZipError::Io(error) => error.into(),
        error => Refusal::damaged(format!("it begins like an archive of torch and is none: {error}")),
    };
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(broken)?;
    if archive.has_duplicate_names() {
        return Err(Refusal::malformed("its archive has two members of one name"));
    }
    if archive.has_overlapping_entries().map_err(broken)? {
        return Err(Refusal::malformed("members of its archive claim the same bytes"));
    }
    let names: Vec<String> = archive.file_names().filter_map(|name| Some(name.ok()?.into_owned())).collect();
    let with = |end: &str| names.iter().any(|name| name.ends_with(end));
    let Some(root) = names
        .iter()
        .find_map(|name| name.strip_suffix("data.pkl").filter(|root| root.ends_with('/') || root.is_empty()))
    else {
        return Err(if with(".npy") {
            Refusal::new(
                "it is an archive of NumPy arrays, as JAX projects write them, not of torch",
                "convert it in Python first, such as with timm's `create_model(..., checkpoint_path=...)`",
            )
        } else {
            Refusal::new(
                "it is a zip archive without `data.pkl`, so torch did not write it",
                "unpack it, and name the file of weights inside",
            )
        });
    };
    if names.contains(&format!("{root}constants.pkl")) {
        return Err(Refusal::new(
            "it is a TorchScript program, not a state dict",
            "in Python: `torch.save(torch.jit.load(\"FILE\").state_dict(), \"weights.pth\")`",
        ));
    }
    let size = file.metadata()?.len();
    // where a member's bytes lie: they are stored as they are, or not read at all
    let mut place = |name: &str| -> Result<Option<(u64, u64)>, Refusal> {
        let Some(index) = archive.index_for_name(name) else { return Ok(None) };
        let member = archive.by_index_raw(index).map_err(broken)?;
        if member.compression() != CompressionMethod::Stored || member.encrypted() {
            return Err(Refusal::new(
                format!("`{name}` in its archive is compressed or encrypted, and torch stores members as they are"),
                "load it with torch and save it again",
            ));
        }
        let (start, bytes) = (member.data_start().unwrap_or(u64::MAX), member.size());
        if member.compressed_size() != bytes || start.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(Refusal::damaged(format!("`{name}` in its archive claims {bytes} bytes, more than are there")));
        }
        Ok(Some((start, bytes)))
    };
    let big_endian = match place(&format!("{root}byteorder"))? {
        Some((start, bytes)) => {
            let mut order = [0; 3];
            let mut input = part(file, start, bytes.min(3))?;
            input.read_exact(&mut order[..bytes.min(3) as usize])?;
            order == *b"big"
        }
        None => false,
    };
    let (start, bytes) = place(&format!("{root}data.pkl"))?.ok_or_else(|| Refusal::damaged("its pickle is gone"))?;
    let (pickle, _) = pickle::read(part(file, start, bytes)?, bytes)?;
    let mut known: HashMap<String, Storage> = HashMap::new();
    let mut storage = |id: &StorageId| -> Result<Storage, Refusal> {
        let found = if let Some(found) = known.get(&id.key) {
            *found
        } else {
            let name = format!("{root}data/{}", id.key);
            let Some((start, bytes)) = place(&name)? else {
                return Err(Refusal::damaged(format!("`{name}` is missing in its archive")));
            };
            let storage = Storage { file: number, start, bytes, big_endian };
            known.insert(id.key.clone(), storage);
            storage
        };
        let size = id.dtype.map_or(1, Dtype::size) as u64;
        if id.len.checked_mul(size).is_none_or(|bytes| bytes > found.bytes) {
            return Err(Refusal::damaged(format!(
                "storage `{}` claims {} numbers, and has {} bytes",
                id.key, id.len, found.bytes
            )));
        }
        Ok(found)
    };
    flatten(&pickle, &mut storage)
}

fn part(mut file: &File, start: u64, bytes: u64) -> Result<BufReader<std::io::Take<&File>>, Refusal> {
    file.seek(SeekFrom::Start(start))?;
    Ok(BufReader::new(file.take(bytes)))
}

// ---- before 1.6 ------------------------------------------------------------------------------------------------------

/// Reads a file of torch before 1.6: magic number, version, machine, the object, keys of storages, storages.
pub(super) fn read_legacy(mut file: &File, number: usize) -> Result<Contents, Refusal> {
    let size = file.metadata()?.len();
    file.rewind()?;
    let mut input = BufReader::new(file);
    let mut at = 0;
    let mut next = |input: &mut BufReader<&File>| -> Result<(Pickle, u64), Refusal> {
        let (pickle, used) = pickle::read(&mut *input, size - at)?;
        at += used;
        Ok((pickle, at))
    };
    let (magic, _) = next(&mut input)?;
    if magic.object(magic.root) != Some(&Object::Long(Some(MAGIC))) {
        return Err(Refusal::new(
            "it is a pickle, but not one that `torch.save` wrote",
            "load it in Python and save its state dict with `torch.save` or safetensors' `save_file`",
        ));
    }
    let _version = next(&mut input)?;
    let _machine = next(&mut input)?;
    let (pickle, _) = next(&mut input)?;
    let (keys, mut at) = next(&mut input)?;
    let Some(Object::List(order)) = keys.object(keys.root) else {
        return Err(Refusal::damaged("the list of its storages is missing"));
    };
    // the type of a storage, which tells its bytes, is said where it is first used
    let mut claims: HashMap<&str, &StorageId> = HashMap::new();
    for object in &pickle.objects {
        if let Object::Storage(id) = object {
            claims.entry(&id.key).or_insert(id);
        }
    }
    let mut known: HashMap<String, Storage> = HashMap::new();
    for &key in order {
        let key = match key {
            Value::Int(number) => number.to_string(),
            key => keys.text(key).ok_or_else(|| Refusal::damaged("a storage has no name"))?.to_owned(),
        };
        let Some(claim) = claims.get(key.as_str()) else {
            return Err(Refusal::damaged(format!("storage `{key}` is of no tensor")));
        };
        let mut count = [0; 8];
        input.read_exact(&mut count)?;
        at += 8;
        let count = u64::from_le_bytes(count);
        let bytes = count.checked_mul(claim.dtype.map_or(1, Dtype::size) as u64);
        let Some(bytes) = bytes.filter(|&bytes| bytes <= size - at) else {
            return Err(Refusal::damaged(format!("storage `{key}` claims {count} numbers, more than follow")));
        };
        if count != claim.len {
            return Err(Refusal::damaged(format!(
                "storage `{key}` has {count} numbers, and its tensor says {}",
                claim.len
            )));
        }
        let storage = Storage { file: number, start: at, bytes, big_endian: false };
        if known.insert(key.clone(), storage).is_some() {
            return Err(Refusal::malformed(format!("storage `{key}` is there twice")));
        }
        input.seek_relative(i64::try_from(bytes).map_err(|_| Refusal::damaged("a storage is too large"))?)?;
        at += bytes;
    }
    let mut storage = |id: &StorageId| -> Result<Storage, Refusal> {
        let whole = known.get(&id.key).ok_or_else(|| Refusal::damaged(format!("storage `{}` is missing", id.key)))?;
        let size = id.dtype.map_or(1, Dtype::size) as u64;
        let beyond = || Refusal::damaged(format!("storage `{}` is shorter than its tensors say", id.key));
        if id.len.checked_mul(size).is_none_or(|bytes| bytes > whole.bytes) {
            return Err(beyond());
        }
        let Some((from, count)) = id.view else { return Ok(*whole) };
        let (from, bytes) = from.checked_mul(size).zip(count.checked_mul(size)).ok_or_else(beyond)?;
        if from.checked_add(bytes).is_none_or(|end| end > whole.bytes) {
            return Err(beyond());
        }
        Ok(Storage { start: whole.start + from, bytes, ..*whole })
    };
    flatten(&pickle, &mut storage)
}

// ---- containers ------------------------------------------------------------------------------------------------------

/// Lists the tensors and settings in nested dictionaries, lists and tuples.
fn flatten(
    pickle: &Pickle,
    storage: &mut dyn FnMut(&StorageId) -> Result<Storage, Refusal>,
) -> Result<Contents, Refusal> {
    let mut contents = Contents::default();
    let mut waiting = vec![(String::new(), pickle.root, 0, true)];
    let (mut visits, mut bytes) = (0, 0);
    let mut names = std::collections::HashSet::new();
    while let Some((key, value, depth, open)) = waiting.pop() {
        visits += 1;
        bytes += key.len();
        if visits > MAX_VISITS || bytes > MAX_KEYS {
            return Err(Refusal::malformed(format!("its dictionaries lead to more than {MAX_VISITS} values")));
        }
        if key.len() > MAX_KEY {
            return Err(Refusal::malformed(format!("a key has more than {MAX_KEY} bytes")));
        }
        let setting = match value {
            Value::None => Some(Setting::None),
            Value::Bool(value) => Some(Setting::Bool(value)),
            Value::Int(value) => Some(Setting::Int(value)),
            Value::Float(value) => Some(Setting::Float(value)),
            Value::Object(_) => {
                pickle.text(value).filter(|text| text.len() <= MAX_SETTING).map(|text| Setting::Text(text.to_owned()))
            }
        };
        if let Some(setting) = setting {
            contents.settings.insert(key, setting);
            continue;
        }
        let inner: Vec<(String, Value)> = match pickle.object(value) {
            Some(Object::Tensor(tensor)) if open => {
                let Some(dtype) = tensor.dtype else {
                    return Err(Refusal::new(
                        format!("{key:?} is of a type that is not read"),
                        "save the weights as float32, float16 or bfloat16",
                    ));
                };
                let read = Tensor {
                    dtype,
                    shape: tensor.shape.clone(),
                    strides: tensor.strides.clone(),
                    offset: tensor.offset,
                    storage: storage(&tensor.storage)?,
                };
                if !names.insert(key.clone()) {
                    return Err(Refusal::malformed(format!("two tensors are called {key:?}")));
                }
                contents.tensors.push((key, read));
                continue;
            }
            Some(Object::List(values) | Object::Tuple(values)) => {
                values.iter().enumerate().map(|(index, &value)| (index.to_string(), value)).collect()
            }
            Some(Object::Dict(items)) => named(pickle, items),
            // the attributes of an unknown object are settings, never weights
            Some(Object::Box { items, state }) => {
                let mut inner = named(pickle, items);
                if let Some(Object::Dict(attributes)) = pickle.object(*state) {
                    inner.extend(named(pickle, attributes));
                }
                waiting_settings(&mut waiting, &key, depth, inner);
                continue;
            }
            _ => continue,
        };
        if inner.is_empty() {
            continue;
        }
        if depth == MAX_DEPTH {
            return Err(Refusal::malformed(format!("its dictionaries are nested more than {MAX_DEPTH} deep")));
        }
        if visits + waiting.len() + inner.len() > 2 * MAX_VISITS {
            return Err(Refusal::malformed(format!("its dictionaries lead to more than {MAX_VISITS} values")));
        }
        waiting.extend(inner.into_iter().rev().map(|(name, value)| (join(&key, &name), value, depth + 1, open)));
    }
    Ok(contents)
}

type Waiting = Vec<(String, Value, usize, bool)>;

/// Looks for settings alone, and no deeper than a few levels.
fn waiting_settings(waiting: &mut Waiting, key: &str, depth: usize, inner: Vec<(String, Value)>) {
    if depth < 8 && waiting.len() + inner.len() <= MAX_VISITS {
        waiting.extend(inner.into_iter().map(|(name, value)| (join(key, &name), value, depth + 1, false)));
    }
}

fn join(key: &str, name: &str) -> String {
    if key.is_empty() { name.to_owned() } else { format!("{key}/{name}") }
}

/// Items whose keys are text or numbers.
fn named(pickle: &Pickle, items: &[(Value, Value)]) -> Vec<(String, Value)> {
    let name = |key: Value| match key {
        Value::Int(number) => Some(number.to_string()),
        Value::Bool(value) => Some(value.to_string()),
        key => pickle.text(key).map(|text| text.chars().take(MAX_KEY + 1).collect()),
    };
    items.iter().filter_map(|&(key, value)| Some((name(key)?, value))).collect()
}
