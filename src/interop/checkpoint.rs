//! A file or folder of weights, opened: what tensors there are, and their numbers on demand.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::dtype::Dtype;
use super::error::{ImportError, Refusal};
use super::safetensors;
use super::tensor::Tensor;
use super::torch::{self, Setting};

/// Largest `config.json` or index.
const MAX_JSON: u64 = 32 << 20;
/// How many numbers a view may repeat in a small file.
const SMALL: u64 = 1 << 16;
/// Names of weights in the folders of Hugging Face and timm, best first.
const IN_FOLDERS: [&str; 8] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_pytorch_model.bin",
    "model.pth",
];

/// Kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// safetensors.
    Safetensors,
    /// The archive of torch 1.6 and later.
    Torch,
    /// The pickles of torch before 1.6.
    TorchLegacy,
}

impl Format {
    /// Returns it in words.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::Torch => "PyTorch archive",
            Self::TorchLegacy => "PyTorch file of a version before 1.6",
        }
    }
}

/// Tells whether a folder holds weights as Hugging Face or timm save them, and is no run or checkpoint of ours.
#[must_use]
pub fn is_folder_of_weights(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).is_file();
    IN_FOLDERS.iter().any(|name| has(name)) && !has("plan.toml") && !has("manifest.json")
}

/// Weights as they lie on disk.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    format: Format,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Tensor>,
    settings: BTreeMap<String, Setting>,
    config: Option<Json>,
}

impl Checkpoint {
    /// Opens a file of weights (safetensors, or what `torch.save` wrote), the index of a file in parts, or a folder of Hugging Face's.
    ///
    /// Nothing is executed, and no numbers are read yet.
    ///
    /// # Errors
    /// When it is none of these, is damaged, or claims what cannot be: in one sentence, with a hint.
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let file = if path.is_dir() { in_folder(path).map_err(|refusal| refusal.at(path))? } else { path.to_owned() };
        let mut checkpoint = Self {
            path: path.to_owned(),
            format: Format::Safetensors,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            settings: BTreeMap::new(),
            config: None,
        };
        if file.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".index.json")) {
            checkpoint.add_parts(&file)?;
        } else {
            checkpoint.add(&file).map_err(|refusal| refusal.at(&file))?;
        }
        let config = file.with_file_name("config.json");
        // a file that is no JSON is no configuration of this checkpoint
        checkpoint.config = read_small(&config).ok().and_then(|text| serde_json::from_slice(&text).ok());
        Ok(checkpoint)
    }

    /// Returns what was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the kind of the file.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the number of files that hold the numbers.
    #[must_use]
    pub fn num_files(&self) -> usize {
        self.files.len()
    }

    /// Returns the tensors by name; names of nested containers are joined by `/`, as in `teacher/backbone.cls_token`.
    #[must_use]
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    /// Returns what else lies beside the tensors, by the same names.
    #[must_use]
    pub fn settings(&self) -> &BTreeMap<String, Setting> {
        &self.settings
    }

    /// Returns the `config.json` that lies beside the file.
    #[must_use]
    pub fn config(&self) -> Option<&Json> {
        self.config.as_ref()
    }

    /// Reads a tensor, row by row, in double precision.
    ///
    /// # Errors
    /// When there is none of that name, or the file cannot be read.
    pub fn read(&self, name: &str) -> Result<Vec<f64>, ImportError> {
        self.read_as(name, Dtype::decode)
    }

    /// Reads a tensor, row by row, in single precision.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, ImportError> {
        self.read_as(name, Dtype::decode_f32)
    }

    fn read_as<T: Copy>(
        &self,
        name: &str,
        decode: fn(Dtype, &[u8], bool) -> Option<Vec<T>>,
    ) -> Result<Vec<T>, ImportError> {
        let Some(tensor) = self.tensors.get(name) else {
            let refusal =
                Refusal::new(format!("it has no tensor {name:?}"), "`autodidact checkpoint inspect` lists what it has");
            return Err(refusal.at(&self.path));
        };
        let path = &self.files[tensor.storage.file];
        let values = File::open(path).map_err(Refusal::from).and_then(|file| tensor.read(&file, decode));
        values.map_err(|refusal| Refusal { problem: format!("{name:?}: {}", refusal.problem), ..refusal }.at(path))
    }

    /// Adds the tensors of a file.
    fn add(&mut self, path: &Path) -> Result<(), Refusal> {
        if !path.is_file() {
            let problem = if path.exists() { "it is no file" } else { "there is nothing of that name" };
            return Err(Refusal::new(problem, "name a file of weights, or a folder with `model.safetensors`"));
        }
        let mut file = File::open(path)?;
        let number = self.files.len();
        self.files.push(path.to_owned());
        let size = file.metadata()?.len();
        let mut start = Vec::new();
        file.by_ref().take(512).read_to_end(&mut start)?;
        file.rewind()?;
        self.format = recognise(&start, size)?;
        let tensors = match self.format {
            Format::Safetensors => safetensors::read(&file, number)?,
            Format::Torch | Format::TorchLegacy => {
                let contents = match self.format {
                    Format::Torch => torch::read_archive(&file, number)?,
                    _ => torch::read_legacy(&file, number)?,
                };
                self.settings.extend(contents.settings);
                contents.tensors
            }
        };
        for (name, tensor) in tensors {
            tensor
                .check(size.max(SMALL))
                .map_err(|refusal| Refusal { problem: format!("{name:?}: {}", refusal.problem), ..refusal })?;
            if self.tensors.contains_key(&name) {
                return Err(Refusal::malformed(format!("two tensors are called {name:?}")));
            }
            self.tensors.insert(name, tensor);
        }
        Ok(())
    }

    /// Adds the tensors of the files that an index lists.
    fn add_parts(&mut self, index: &Path) -> Result<(), ImportError> {
        let text = read_small(index).map_err(|refusal| refusal.at(index))?;
        let index_of: Index = serde_json::from_slice(&text)
            .map_err(|error| Refusal::damaged(format!("it is no index of weights: {error}")).at(index))?;
        let mut parts: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, part) in &index_of.weight_map.0 {
            parts.entry(part).or_default().push(name);
        }
        if parts.is_empty() {
            return Err(Refusal::damaged("it lists no files").at(index));
        }
        for (part, names) in parts {
            let plain = Path::new(part).file_name().is_some_and(|name| name == part) && !part.contains('\\');
            if !plain {
                return Err(Refusal::malformed(format!("it names {part:?}, which is not a file beside it")).at(index));
            }
            let path = index.with_file_name(part);
            if !path.is_file() {
                let refusal = Refusal::new(
                    format!("it names {part:?}, which is not there"),
                    "fetch all parts, into the folder of the index",
                );
                return Err(refusal.at(index));
            }
            self.add(&path).map_err(|refusal| refusal.at(&path))?;
            if let Some(name) = names.iter().find(|name| !self.tensors.contains_key(**name)) {
                return Err(
                    Refusal::damaged(format!("{name:?} is not in {part:?}, where the index says it is")).at(index)
                );
            }
        }
        Ok(())
    }
}

/// The index of a file in parts.
#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// Names and their files; a name that comes twice is an error, which a map would hide.
struct WeightMap(Vec<(String, String)>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = WeightMap;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("names and their files")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let (mut found, mut names) = (Vec::new(), std::collections::HashSet::new());
                while let Some((name, part)) = map.next_entry::<String, String>()? {
                    if !names.insert(name.clone()) {
                        return Err(serde::de::Error::custom(format!("{name:?} is there twice")));
                    }
                    found.push((name, part));
                }
                Ok(WeightMap(found))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

fn read_small(path: &Path) -> Result<Vec<u8>, Refusal> {
    let file = File::open(path)?;
    if file.metadata()?.len() > MAX_JSON {
        return Err(Refusal::malformed(format!("it has more than {MAX_JSON} bytes")));
    }
    let mut text = Vec::new();
    file.take(MAX_JSON).read_to_end(&mut text)?;
    Ok(text)
}

/// The file of weights in a folder.
fn in_folder(folder: &Path) -> Result<PathBuf, Refusal> {
    if let Some(path) = IN_FOLDERS.iter().map(|name| folder.join(name)).find(|path| path.is_file()) {
        return Ok(path);
    }
    let names = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = names
        .filter(|path| {
            path.extension()
                .is_some_and(|end| ["safetensors", "pth", "pt", "bin", "ckpt", "tar"].iter().any(|known| end == *known))
        })
        .collect();
    match (files.pop(), files.is_empty()) {
        (Some(only), true) => Ok(only),
        (Some(_), false) => Err(Refusal::new("it is a folder with several files of weights", "name one of them")),
        (None, _) => Err(Refusal::new(
            "it is a folder without weights",
            "a folder of Hugging Face's has `model.safetensors` or `pytorch_model.bin`; name the file if it is called otherwise",
        )),
    }
}

/// Tells the kind of a file by its first bytes.
fn recognise(start: &[u8], size: u64) -> Result<Format, Refusal> {
    let text = |words: &str| start.starts_with(words.as_bytes());
    if size == 0 {
        return Err(Refusal::damaged("it is empty"));
    }
    if text("PK\x03\x04") {
        return Ok(Format::Torch);
    }
    if start.first() == Some(&0x80) && start.get(1).is_some_and(|&protocol| protocol <= 5) {
        return Ok(Format::TorchLegacy);
    }
    if text("version https://git-lfs") {
        return Err(Refusal::new(
            "it is a pointer of git-lfs, not the file itself",
            "run `git lfs pull` where you cloned it",
        ));
    }
    let lower = String::from_utf8_lossy(&start[..start.len().min(64)]).trim_start().to_lowercase();
    if lower.starts_with("<!doctype") || lower.starts_with("<html") || lower.starts_with("<?xml") {
        return Err(Refusal::new(
            "it is a web page, not weights",
            "the download was answered with a page: open the address in a browser",
        ));
    }
    let other = if start.get(257..262) == Some(b"ustar") {
        Some(("a tar archive", "unpack it; if torch before 0.2 wrote it, load it with a later torch and save it again"))
    } else if start.starts_with(b"\x1f\x8b") {
        Some(("compressed with gzip", "unpack it with `gunzip`"))
    } else if start.starts_with(b"\x89HDF") {
        Some(("a file of HDF5, as Keras writes it", "convert the weights to safetensors in Python"))
    } else if text("GGUF") {
        Some(("a file of GGUF", "convert the weights to safetensors in Python"))
    } else if start.starts_with(b"\x08") && start.windows(7).any(|word| word == b"pytorch") {
        Some(("an ONNX file", "name the state dict that it was exported from"))
    } else {
        None
    };
    if let Some((what, hint)) = other {
        return Err(Refusal::new(format!("it is {what}"), hint));
    }
    if size >= 8 && start.get(8) == Some(&b'{') {
        return Ok(Format::Safetensors);
    }
    Err(Refusal::new(
        "it is neither a safetensors file nor one that `torch.save` wrote",
        "weights are read from .safetensors, .pth, .pt, .bin and .ckpt files; is the file whole?",
    ))
}
