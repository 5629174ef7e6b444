//! CIFAR-10 and CIFAR-100 in the binary version (Krizhevsky, 2009, <https://www.cs.toronto.edu/~kriz/cifar.html>).
//!
//! A record is one label byte (CIFAR-100: coarse, then fine; the fine one is used) and 3072 bytes, the three channels one
//! after the other, each row by row. The files are kept in memory, 180 MB for either set.

use std::path::{Path, PathBuf};

use image::{Rgb, RgbImage};

use super::decode::{Decoded, Kind};
use super::error::{Error, ImageError};
use super::folder::check_folder;
use super::source::{Fingerprint, Source, Split};

const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;

/// Which of the two data sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    Cifar10,
    Cifar100,
}

impl Variant {
    fn source_kind(self) -> &'static str {
        match self {
            Self::Cifar10 => "cifar10",
            Self::Cifar100 => "cifar100",
        }
    }

    fn num_classes(self) -> usize {
        match self {
            Self::Cifar10 => 10,
            Self::Cifar100 => 100,
        }
    }

    /// Bytes before the pixels; the last one is the label.
    fn num_labels(self) -> usize {
        match self {
            Self::Cifar10 => 1,
            Self::Cifar100 => 2,
        }
    }

    fn record(self) -> usize {
        self.num_labels() + 3 * PLANE
    }

    fn names_file(self) -> &'static str {
        match self {
            Self::Cifar10 => "batches.meta.txt",
            Self::Cifar100 => "fine_label_names.txt",
        }
    }

    /// Name of the folder in the official archive.
    fn official_folder(self) -> &'static str {
        match self {
            Self::Cifar10 => "cifar-10-batches-bin",
            Self::Cifar100 => "cifar-100-binary",
        }
    }

    fn wanted(self, split: Split) -> &'static str {
        match (self, split) {
            (Self::Cifar10, Split::Train) => "`data_batch_*.bin`",
            (Self::Cifar10, Split::Test) => "`test_batch.bin`",
            (Self::Cifar100, Split::Train) => "`train.bin`",
            (Self::Cifar100, Split::Test) => "`test.bin`",
        }
    }

    fn is_wanted(self, split: Split, name: &str) -> bool {
        match (self, split) {
            (Self::Cifar10, Split::Train) => name.starts_with("data_batch_") && name.ends_with(".bin"),
            _ => self.wanted(split).trim_matches('`') == name,
        }
    }
}

/// One split of CIFAR-10 or CIFAR-100.
#[derive(Debug)]
pub(super) struct Cifar {
    variant: Variant,
    files: Vec<(PathBuf, Vec<u8>)>,
    /// For each file, the number of images before it; then the number of all.
    starts: Vec<usize>,
    classes: Vec<String>,
}

impl Cifar {
    pub(super) fn open(path: &Path, variant: Variant, split: Split) -> Result<Self, Error> {
        check_folder(path, variant.source_kind())?;
        let official = path.join(variant.official_folder());
        let folder = if official.is_dir() { official } else { path.to_owned() };
        let names = file_names(&folder)?;
        let mut files = Vec::new();
        let mut starts = vec![0];
        for name in names.iter().filter(|name| variant.is_wanted(split, name)) {
            let file = folder.join(name);
            let content = std::fs::read(&file).map_err(|error| Error::io(&file, "read the images", error))?;
            check(variant, &file, &content)?;
            starts.push(starts[files.len()] + content.len() / variant.record());
            files.push((file, content));
        }
        if files.is_empty() {
            let wanted = variant.wanted(split);
            return Err(Error::CifarMissing { wanted, hint: hint(variant, &names), path: folder });
        }
        Ok(Self { variant, files, starts, classes: class_names(variant, &folder)? })
    }

    /// Returns the file of an image and the image's place in it.
    fn place(&self, index: usize) -> (usize, usize) {
        assert!(index < self.len(), "image {index} of {}", self.len());
        let file = self.starts.partition_point(|&start| start <= index) - 1;
        (file, index - self.starts[file])
    }

    fn record(&self, index: usize) -> &[u8] {
        let (file, place) = self.place(index);
        let record = self.variant.record();
        &self.files[file].1[place * record..(place + 1) * record]
    }
}

impl Source for Cifar {
    fn len(&self) -> usize {
        self.starts[self.files.len()]
    }

    fn decode(&self, index: usize) -> Result<Decoded, ImageError> {
        let planes = &self.record(index)[self.variant.num_labels()..];
        let image = RgbImage::from_fn(SIDE as u32, SIDE as u32, |x, y| {
            let at = y as usize * SIDE + x as usize;
            Rgb([planes[at], planes[PLANE + at], planes[2 * PLANE + at]])
        });
        Ok(Decoded { image, kind: Kind { format: "CIFAR", color: "RGB, 8 bits".into() } })
    }

    fn label(&self, index: usize) -> Option<u32> {
        Some(u32::from(self.record(index)[self.variant.num_labels() - 1]))
    }

    fn name(&self, index: usize) -> String {
        let (file, place) = self.place(index);
        format!("{}#{place}", self.files[file].0.display())
    }

    fn bytes(&self, _: usize) -> Option<u64> {
        Some(self.variant.record() as u64)
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn fingerprint(&self) -> String {
        let mut digest = Fingerprint::new(self.variant.source_kind());
        digest.add_classes(&self.classes);
        self.files.iter().for_each(|(_, content)| digest.add(content));
        digest.finish()
    }
}

/// Lists the names in a folder that are UTF-8, sorted by bytes.
fn file_names(folder: &Path) -> Result<Vec<String>, Error> {
    let failed = |error| Error::io(folder, "list the folder", error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

fn check(variant: Variant, file: &Path, content: &[u8]) -> Result<(), Error> {
    let damaged = |problem| Err(Error::CifarDamaged { path: file.to_owned(), problem });
    let record = variant.record();
    if content.is_empty() || !content.len().is_multiple_of(record) {
        return damaged(format!("{} bytes are no whole number of images of {record} bytes", content.len()));
    }
    let label_at = variant.num_labels() - 1;
    let is_wrong = |image: &[u8]| usize::from(image[label_at]) >= variant.num_classes();
    match content.chunks_exact(record).position(is_wrong) {
        Some(image) => {
            let label = content[image * record + label_at];
            damaged(format!("image {image} has label {label}, and the classes are 0 to {}", variant.num_classes() - 1))
        }
        None => Ok(()),
    }
}

fn class_names(variant: Variant, folder: &Path) -> Result<Vec<String>, Error> {
    let path = folder.join(variant.names_file());
    let names: Vec<String> = match std::fs::read_to_string(&path) {
        Ok(text) => text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok((0..variant.num_classes()).map(|class| class.to_string()).collect());
        }
        Err(error) => return Err(Error::io(&path, "read the class names", error)),
    };
    if names.len() == variant.num_classes() {
        return Ok(names);
    }
    let problem = format!("{} class names, and there are {} classes", names.len(), variant.num_classes());
    Err(Error::CifarDamaged { path, problem })
}

fn hint(variant: Variant, names: &[String]) -> String {
    let has = |test: fn(&str) -> bool| names.iter().any(|name| test(name));
    if variant == Variant::Cifar100 && has(|name| name.starts_with("data_batch_") && name.ends_with(".bin")) {
        "these are files of CIFAR-10: set `data.source = \"cifar10\"`".to_owned()
    } else if variant == Variant::Cifar10 && has(|name| name == "train.bin") {
        "these are files of CIFAR-100: set `data.source = \"cifar100\"`".to_owned()
    } else if has(|name| name == "data_batch_1" || name == "cifar-10-batches-py" || name == "cifar-100-python") {
        "this is the Python version: download the binary version".to_owned()
    } else if has(|name| name.ends_with("-binary.tar.gz")) {
        "unpack the archive there with `tar -xzf`".to_owned()
    } else {
        format!("set `data.path` to the unpacked binary version, `{}`", variant.official_folder())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Makes a file of images whose pixel `(c, y, x)` is `image + 31 c + 7 y + x` modulo 256.
    fn images(labels: &[&[u8]]) -> Vec<u8> {
        let mut content = Vec::new();
        for (image, label) in labels.iter().enumerate() {
            content.extend(*label);
            let pixel = |at: usize| (image + 31 * (at / PLANE) + 7 * (at % PLANE / SIDE) + at % SIDE) as u8;
            content.extend((0..3 * PLANE).map(pixel));
        }
        content
    }

    fn failure(path: &Path, variant: Variant, split: Split) -> String {
        Cifar::open(path, variant, split).err().unwrap().to_string()
    }

    #[test]
    fn cifar10_reads_the_batches_in_order() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("data_batch_2.bin"), images(&[&[7]])).unwrap();
        fs::write(dir.path().join("data_batch_1.bin"), images(&[&[3], &[9]])).unwrap();
        fs::write(dir.path().join("test_batch.bin"), images(&[&[0]])).unwrap();
        let train = Cifar::open(dir.path(), Variant::Cifar10, Split::Train).unwrap();
        assert_eq!((0..3).map(|index| train.label(index)).collect::<Vec<_>>(), [Some(3), Some(9), Some(7)]);
        assert_eq!(train.load(1).unwrap().get_pixel(5, 2).0, [20, 51, 82]);
        assert!(train.name(2).ends_with("data_batch_2.bin#0"));
        assert_eq!(train.classes()[9], "9");
        fs::write(dir.path().join("batches.meta.txt"), "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n\n").unwrap();
        let test = Cifar::open(dir.path(), Variant::Cifar10, Split::Test).unwrap();
        assert_eq!((test.len(), test.classes()[9].as_str()), (1, "j"));
        assert_ne!(test.fingerprint(), train.fingerprint());
    }

    #[test]
    fn cifar100_uses_fine_labels_and_finds_the_official_folder() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("cifar-100-binary");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("train.bin"), images(&[&[19, 99], &[0, 5]])).unwrap();
        let train = Cifar::open(dir.path(), Variant::Cifar100, Split::Train).unwrap();
        assert_eq!((train.label(0), train.label(1)), (Some(99), Some(5)));
        assert_eq!(train.load(0).unwrap().get_pixel(0, 0).0, [0, 31, 62]);
        assert!(failure(dir.path(), Variant::Cifar100, Split::Test).contains("`test.bin` not found"));
    }

    #[test]
    fn damage_and_absence_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let message = failure(path, Variant::Cifar10, Split::Train);
        assert!(
            message.contains("`data_batch_*.bin` not found") && message.contains("cifar-10-batches-bin"),
            "{message}"
        );
        fs::write(path.join("data_batch_1"), "").unwrap();
        assert!(failure(path, Variant::Cifar10, Split::Train).contains("Python version"));
        fs::write(path.join("data_batch_1.bin"), &images(&[&[1]])[1..]).unwrap();
        let message = failure(path, Variant::Cifar10, Split::Train);
        assert!(message.contains("data_batch_1.bin: 3072 bytes are no whole number of images"), "{message}");
        fs::write(path.join("data_batch_1.bin"), images(&[&[1], &[10]])).unwrap();
        assert!(failure(path, Variant::Cifar10, Split::Train).contains("image 1 has label 10"));
        fs::write(path.join("data_batch_1.bin"), "").unwrap();
        assert!(failure(path, Variant::Cifar10, Split::Train).contains("0 bytes"));
        assert!(failure(path, Variant::Cifar100, Split::Train).contains("files of CIFAR-10"));
        fs::write(path.join("data_batch_1.bin"), images(&[&[1]])).unwrap();
        fs::write(path.join("batches.meta.txt"), "a\nb\n").unwrap();
        assert!(failure(path, Variant::Cifar10, Split::Train).contains("2 class names"));
        assert!(failure(&path.join("batches.meta.txt"), Variant::Cifar10, Split::Train).contains("is a file"));
    }
}
