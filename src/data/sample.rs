//! The labelled images inside this repository (`datasets/SAMPLE.md`), compiled into the binary.

use super::decode::{Decoded, decode};
use super::error::{Error, ImageError};
use super::shard::{Sample, index};
use super::source::{Fingerprint, Source, Split};

static TRAIN: &[u8] = include_bytes!("../../datasets/sample-train.tar");
static TEST: &[u8] = include_bytes!("../../datasets/sample-test.tar");
static DESCRIPTION: &str = include_str!("../../datasets/sample.toml");

/// A tar archive of images in memory.
#[derive(Debug)]
pub(super) struct Archive {
    name: &'static str,
    content: &'static [u8],
    samples: Vec<Sample>,
    classes: Vec<String>,
    max_pixels: u64,
}

/// The part of `sample.toml` that is needed here.
#[derive(serde::Deserialize)]
struct Description {
    classes: Vec<String>,
}

/// Opens a split of the embedded images.
pub(super) fn open(split: Split, max_pixels: u64) -> Result<Archive, Error> {
    let (name, content) = match split {
        Split::Train => ("sample-train.tar", TRAIN),
        Split::Test => ("sample-test.tar", TEST),
    };
    let description: Description = toml::from_str(DESCRIPTION).expect("a test reads the embedded description");
    Archive::open(name, content, description.classes, max_pixels)
}

impl Archive {
    fn open(name: &'static str, content: &'static [u8], classes: Vec<String>, max_pixels: u64) -> Result<Self, Error> {
        let samples = index(name, content)?;
        match samples.iter().find(|sample| sample.label.is_some_and(|label| label as usize >= classes.len())) {
            Some(sample) => Err(Error::Archive {
                archive: name.to_owned(),
                problem: format!("the label of `{}` is none of the {} classes", sample.key, classes.len()),
                hint: "`.cls` members hold one integer in ASCII, from 0",
            }),
            None => Ok(Self { name, content, samples, classes, max_pixels }),
        }
    }
}

impl Source for Archive {
    fn len(&self) -> usize {
        self.samples.len()
    }

    fn decode(&self, index: usize) -> Result<Decoded, ImageError> {
        let range = &self.samples[index].image;
        decode(&self.content[range.start as usize..range.end as usize], self.max_pixels)
    }

    fn label(&self, index: usize) -> Option<u32> {
        self.samples[index].label
    }

    fn name(&self, index: usize) -> String {
        format!("{}#{}", self.name, self.samples[index].key)
    }

    fn bytes(&self, index: usize) -> Option<u64> {
        let range = &self.samples[index].image;
        Some(range.end - range.start)
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn fingerprint(&self) -> String {
        let mut digest = Fingerprint::new("archive");
        digest.add_classes(&self.classes);
        digest.add(self.content);
        digest.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::decode::tests::{encode, picture};
    use super::super::shard::tests::archive;
    use super::*;

    #[test]
    fn every_embedded_image_can_be_read() {
        for split in [Split::Train, Split::Test] {
            let source = open(split, 1 << 20).unwrap();
            assert!(source.len() > 100 && source.classes().len() > 1);
            let mut counts = vec![0; source.classes().len()];
            for index in 0..source.len() {
                source.load(index).unwrap_or_else(|error| panic!("{}: {error}", source.name(index)));
                counts[source.label(index).unwrap() as usize] += 1;
            }
            assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
        }
    }

    #[test]
    fn archives_are_read_in_place() {
        let png = encode(&picture(6, 4, 2).into(), image::ImageFormat::Png);
        let tar: &'static [u8] = archive(&[("000000.png", &png), ("000000.cls", b"1")]).leak();
        let classes = || vec!["a".to_owned(), "b".to_owned()];
        let source = Archive::open("tiny.tar", tar, classes(), 1 << 20).unwrap();
        assert_eq!(source.load(0).unwrap(), picture(6, 4, 2));
        assert_eq!((source.label(0), source.name(0).as_str()), (Some(1), "tiny.tar#000000"));
        assert_eq!(source.bytes(0), Some(png.len() as u64));
        let message = Archive::open("tiny.tar", tar, classes()[..1].to_vec(), 1).err().unwrap().to_string();
        assert!(message.contains("label of `000000` is none of the 1 classes"), "{message}");
    }
}
