//! What every source of images offers, and how a recipe's `[data]` table opens one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use image::RgbImage;

use super::cifar::{Cifar, Variant};
use super::config::{DataConfig, SourceKind};
use super::decode::{DECODER, Decoded};
use super::error::{Error, ImageError};
use super::folder::Folder;
use super::list::List;
use super::sample;

/// Images with random access. An index means the same image in every run over the same data.
pub trait Source: Send + Sync {
    /// Returns the number of images; never zero for a source that [`open`] returned.
    fn len(&self) -> usize;

    /// Says whether there is no image.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Decodes an image and says what its file was.
    ///
    /// # Errors
    /// Says in words why the image cannot be used.
    ///
    /// # Panics
    /// When `index` is not below the length, as every method that takes one.
    fn decode(&self, index: usize) -> Result<Decoded, ImageError>;

    /// Decodes an image.
    ///
    /// # Errors
    /// Says in words why the image cannot be used.
    fn load(&self, index: usize) -> Result<RgbImage, ImageError> {
        self.decode(index).map(|decoded| decoded.image)
    }

    /// Returns the class of an image, an index into [`Self::classes`].
    fn label(&self, index: usize) -> Option<u32>;

    /// Returns every class of an image, ascending; nothing for an image without a label.
    fn labels(&self, index: usize) -> Option<Vec<u32>> {
        self.label(index).map(|label| vec![label])
    }

    /// Tells whether an image may have several classes, or none of them; [`Self::label`] then knows nothing.
    fn is_multi_label(&self) -> bool {
        false
    }

    /// Returns a name for messages: a path, or a place within a file.
    fn name(&self, index: usize) -> String;

    /// Returns the size of the encoded image, if it can be told.
    fn bytes(&self, index: usize) -> Option<u64>;

    /// Returns the names of the classes; empty when the images have no labels.
    fn classes(&self) -> &[String];

    /// Returns a digest of what the images are: names relative to the source, sizes, labels and decoder versions, or the
    /// content where it is in memory. Moving a folder does not change it. May ask the file system for every file's size.
    fn fingerprint(&self) -> String;
}

/// Which images of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The images to learn from; all of them where a source knows no splits.
    Train,
    /// The images held back.
    Test,
}

/// Opens the source that a recipe names. `limit` keeps so many images of either split, evenly spread.
///
/// # Errors
/// When the files are missing, unreadable or hold no images; the message says what to do.
pub fn open(config: &DataConfig, split: Split) -> Result<Arc<dyn Source>, Error> {
    if config.limit == Some(0) {
        return Err(Error::ZeroLimit);
    }
    let expanded = config.path.as_deref().map(expand_home);
    let path = |source_kind, example| expanded.as_deref().ok_or(Error::NoPath { source_kind, example });
    let source: Arc<dyn Source> = match config.source {
        SourceKind::Sample => Arc::new(sample::open(split, config.max_pixels)?),
        SourceKind::Folder => Arc::new(Folder::open(path("folder", "images/")?, split, config.max_pixels)?),
        SourceKind::List => Arc::new(List::open(path("list", "images.txt")?, split, config.max_pixels)?),
        SourceKind::Cifar10 => open_cifar(path("cifar10", "cifar-10-batches-bin")?, Variant::Cifar10, split)?,
        SourceKind::Cifar100 => open_cifar(path("cifar100", "cifar-100-binary")?, Variant::Cifar100, split)?,
    };
    Ok(match config.limit {
        Some(limit) if limit < source.len() => Arc::new(Spread { source, len: limit }),
        _ => source,
    })
}

/// Opens the images that `eval.test` names: the test split, or all of a source that has no splits.
///
/// # Errors
/// As [`open`].
pub fn open_test(config: &DataConfig) -> Result<Arc<dyn Source>, Error> {
    match open(config, Split::Test) {
        Err(Error::NoTestSplit { .. }) => open(config, Split::Train),
        opened => opened,
    }
}

/// Replaces a leading `~/`, which a shell leaves alone in `data.path=~/pictures`.
fn expand_home(path: &Path) -> PathBuf {
    match (path.strip_prefix("~"), std::env::var_os("HOME")) {
        (Ok(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.to_owned(),
    }
}

fn open_cifar(path: &Path, variant: Variant, split: Split) -> Result<Arc<dyn Source>, Error> {
    Ok(Arc::new(Cifar::open(path, variant, split)?))
}

/// Every n-th image of another source: sources are often sorted by class, so the first ones would be of one class.
struct Spread {
    source: Arc<dyn Source>,
    len: usize,
}

impl Spread {
    fn at(&self, index: usize) -> usize {
        assert!(index < self.len, "image {index} of {}", self.len);
        (index as u128 * self.source.len() as u128 / self.len as u128) as usize
    }
}

impl Source for Spread {
    fn len(&self) -> usize {
        self.len
    }

    fn decode(&self, index: usize) -> Result<Decoded, ImageError> {
        self.source.decode(self.at(index))
    }

    fn label(&self, index: usize) -> Option<u32> {
        self.source.label(self.at(index))
    }

    fn labels(&self, index: usize) -> Option<Vec<u32>> {
        self.source.labels(self.at(index))
    }

    fn is_multi_label(&self) -> bool {
        self.source.is_multi_label()
    }

    fn name(&self, index: usize) -> String {
        self.source.name(self.at(index))
    }

    fn bytes(&self, index: usize) -> Option<u64> {
        self.source.bytes(self.at(index))
    }

    fn classes(&self) -> &[String] {
        self.source.classes()
    }

    fn fingerprint(&self) -> String {
        let mut digest = Fingerprint::new("spread");
        digest.add(&(self.len as u64).to_le_bytes());
        digest.add(self.source.fingerprint().as_bytes());
        digest.finish()
    }
}

/// Digest of a source's content, every part preceded by its length.
pub(super) struct Fingerprint(blake3::Hasher);

impl Fingerprint {
    pub(super) fn new(kind: &str) -> Self {
        let mut digest = Self(blake3::Hasher::new());
        digest.add(b"autodidact data v1");
        digest.add(DECODER.as_bytes());
        digest.add(kind.as_bytes());
        digest
    }

    pub(super) fn add(&mut self, part: &[u8]) {
        self.0.update(&(part.len() as u64).to_le_bytes());
        self.0.update(part);
    }

    pub(super) fn add_image(&mut self, name: &[u8], bytes: Option<u64>, label: Option<u32>) {
        self.add(name);
        self.add(&bytes.unwrap_or(u64::MAX).to_le_bytes());
        self.add(&label.map_or(u64::MAX, u64::from).to_le_bytes());
    }

    pub(super) fn add_classes(&mut self, classes: &[String]) {
        for class in classes {
            self.add(class.as_bytes());
        }
    }

    pub(super) fn finish(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::PathBuf;

    use super::super::config::OnError;
    use super::*;

    /// A `[data]` table for a path.
    pub(crate) fn config(source: SourceKind, path: &Path) -> DataConfig {
        DataConfig {
            source,
            path: Some(path.to_owned()),
            on_error: OnError::Substitute,
            max_bad: 0.01,
            limit: None,
            label_fraction: None,
            validation: None,
            workers: 1,
            prefetch: 2,
            max_pixels: 1 << 20,
            mean: [0.5; 3],
            std: [0.25; 3],
        }
    }

    /// Images in memory; those in `bad` cannot be decoded.
    pub(crate) struct Memory {
        pub(crate) images: Vec<RgbImage>,
        pub(crate) bad: Vec<usize>,
    }

    impl Source for Memory {
        fn len(&self) -> usize {
            self.images.len()
        }

        fn decode(&self, index: usize) -> Result<Decoded, ImageError> {
            if self.bad.contains(&index) {
                return Err(ImageError::Empty);
            }
            let kind = super::super::decode::Kind { format: "raw", color: "RGB".into() };
            Ok(Decoded { image: self.images[index].clone(), kind })
        }

        fn label(&self, _: usize) -> Option<u32> {
            None
        }

        fn name(&self, index: usize) -> String {
            format!("memory/{index}")
        }

        fn bytes(&self, _: usize) -> Option<u64> {
            Some(0)
        }

        fn classes(&self) -> &[String] {
            &[]
        }

        fn fingerprint(&self) -> String {
            String::new()
        }
    }

    #[test]
    fn a_path_is_asked_for() {
        for source in [SourceKind::Folder, SourceKind::List, SourceKind::Cifar10, SourceKind::Cifar100] {
            let config = DataConfig { path: None, ..config(source, &PathBuf::new()) };
            let message = open(&config, Split::Train).err().unwrap().to_string();
            assert!(message.contains("`data.path` is not set") && message.contains("hint: set"), "{message}");
        }
    }

    #[test]
    fn limit_keeps_the_first_images() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.png", "b.png", "c.png"] {
            super::super::decode::tests::picture(4, 4, u32::from(name.as_bytes()[0]))
                .save(dir.path().join(name))
                .unwrap();
        }
        let whole = DataConfig { limit: Some(5), ..config(SourceKind::Folder, dir.path()) };
        let part = DataConfig { limit: Some(2), ..whole.clone() };
        let (whole, part) = (open(&whole, Split::Train).unwrap(), open(&part, Split::Train).unwrap());
        assert_eq!((whole.len(), part.len()), (3, 2));
        assert_eq!(part.load(1).unwrap(), whole.load(1).unwrap());
        assert_ne!(part.fingerprint(), whole.fingerprint());
        let zero = DataConfig { limit: Some(0), ..config(SourceKind::Folder, dir.path()) };
        assert!(matches!(open(&zero, Split::Train), Err(Error::ZeroLimit)));
    }
}
