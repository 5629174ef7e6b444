//! The labelled images that a supervised run learns from, and those of them that are set aside.
//!
//! Both choices are stratified and keyed: each class's images are put in an order drawn from `(seed, class)` and counted off from its beginning. Where an image
//! may have several classes, all labelled images are put in one order instead: the share of a class is then left to chance.
//! So they are the same on any rank, and the images of a small fraction are among those of a larger one.

use std::collections::BTreeMap;
use std::sync::Arc;

use image::RgbImage;

use super::decode::Decoded;
use super::error::ImageError;
use super::source::{Fingerprint, Source};
use crate::rng::{Purpose, Stream};

/// What a supervised run does with the images of its training split.
pub struct Portion {
    /// Images to learn from, all of them labelled.
    pub train: Arc<dyn Source>,
    /// Images set aside, if any were asked for.
    pub validation: Option<Arc<dyn Source>>,
    /// Images without a label, which are left out.
    pub unlabelled: usize,
    /// Images of each class in `train`.
    pub counts: Vec<usize>,
}

impl Portion {
    /// Keeps `fraction` of each class's labelled images (of all, where an image may have several), rounded, at least one; of these, `validation` are set aside, as long as one is left to learn from.
    #[must_use]
    pub fn of(source: &Arc<dyn Source>, fraction: Option<f64>, validation: Option<f64>, seed: u64) -> Self {
        let mut classes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for index in 0..source.len() {
            let class = if source.is_multi_label() { source.labels(index).map(|_| 0) } else { source.label(index) };
            if let Some(class) = class {
                classes.entry(class).or_default().push(index);
            }
        }
        let labelled: usize = classes.values().map(Vec::len).sum();
        let (mut train, mut aside) = (Vec::new(), Vec::new());
        let mut counts = vec![0; source.classes().len()];
        for (&class, images) in &mut classes {
            Stream::new(seed, Purpose::Labels, &[u64::from(class)]).shuffle(images);
            let share = |of: usize, fraction: f64| (of as f64 * fraction).round() as usize;
            images.truncate(share(images.len(), fraction.unwrap_or(1.0)).clamp(1, images.len()));
            let held = validation.map_or(0, |fraction| share(images.len(), fraction).max(1).min(images.len() - 1));
            let rest = images.len() - held;
            for label in images[..rest].iter().flat_map(|&index| source.labels(index).unwrap_or_default()) {
                if let Some(count) = counts.get_mut(label as usize) {
                    *count += 1;
                }
            }
            train.extend_from_slice(&images[..rest]);
            aside.extend_from_slice(&images[rest..]);
        }
        let some = |mut indices: Vec<usize>| -> Arc<dyn Source> {
            indices.sort_unstable();
            if indices.len() == source.len() {
                return Arc::clone(source);
            }
            Arc::new(Chosen { source: Arc::clone(source), indices })
        };
        Self {
            train: some(train),
            validation: validation.is_some().then(|| some(aside)),
            unlabelled: source.len() - labelled,
            counts,
        }
    }
}

/// Some images of another source, in its order.
struct Chosen {
    source: Arc<dyn Source>,
    indices: Vec<usize>,
}

impl Source for Chosen {
    fn len(&self) -> usize {
        self.indices.len()
    }

    fn decode(&self, index: usize) -> Result<Decoded, ImageError> {
        self.source.decode(self.indices[index])
    }

    fn load(&self, index: usize) -> Result<RgbImage, ImageError> {
        self.source.load(self.indices[index])
    }

    fn label(&self, index: usize) -> Option<u32> {
        self.source.label(self.indices[index])
    }

    fn labels(&self, index: usize) -> Option<Vec<u32>> {
        self.source.labels(self.indices[index])
    }

    fn is_multi_label(&self) -> bool {
        self.source.is_multi_label()
    }

    fn name(&self, index: usize) -> String {
        self.source.name(self.indices[index])
    }

    fn bytes(&self, index: usize) -> Option<u64> {
        self.source.bytes(self.indices[index])
    }

    fn classes(&self) -> &[String] {
        self.source.classes()
    }

    fn fingerprint(&self) -> String {
        let mut digest = Fingerprint::new("chosen");
        for &index in &self.indices {
            digest.add(&(index as u64).to_le_bytes());
        }
        digest.add(self.source.fingerprint().as_bytes());
        digest.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Class of each image; none: unlabelled.
    struct Labelled(Vec<Option<u32>>, Vec<String>);

    impl Source for Labelled {
        fn len(&self) -> usize {
            self.0.len()
        }
        fn decode(&self, _: usize) -> Result<Decoded, ImageError> {
            Err(ImageError::Empty)
        }
        fn label(&self, index: usize) -> Option<u32> {
            self.0[index]
        }
        fn name(&self, index: usize) -> String {
            index.to_string()
        }
        fn bytes(&self, _: usize) -> Option<u64> {
            None
        }
        fn classes(&self) -> &[String] {
            &self.1
        }
        fn fingerprint(&self) -> String {
            "labelled".to_owned()
        }
    }

    /// 1000 images: one in ten without a label, class 0 as frequent as 1 and 2 together, class 3 with a single image.
    fn source() -> Arc<dyn Source> {
        let label = |index: usize| match index {
            777 => Some(3),
            _ if index.is_multiple_of(10) => None,
            _ => Some([0, 1, 0, 2][index % 4]),
        };
        let classes = (0..4).map(|class| format!("class {class}")).collect();
        Arc::new(Labelled((0..1000).map(label).collect(), classes))
    }

    fn names(source: &Arc<dyn Source>) -> Vec<usize> {
        (0..source.len()).map(|index| source.name(index).parse().unwrap()).collect()
    }

    #[test]
    fn classes_keep_their_shares_and_none_is_lost() {
        let source = source();
        let whole = Portion::of(&source, None, None, 1);
        assert_eq!((whole.train.len(), whole.unlabelled, whole.validation.is_none()), (900, 100, true));
        assert!((0..900).all(|index| whole.train.label(index).is_some()));
        let tenth = Portion::of(&source, Some(0.1), None, 1);
        let expected: Vec<usize> =
            whole.counts.iter().map(|&count| ((count as f64 * 0.1).round() as usize).max(1)).collect();
        assert_eq!(tenth.counts, expected);
        assert_eq!(tenth.counts[3], 1);
        assert_eq!(tenth.train.len(), tenth.counts.iter().sum::<usize>());
        assert_ne!(tenth.train.fingerprint(), whole.train.fingerprint());
    }

    #[test]
    fn the_choice_is_keyed_and_nested() {
        let source = source();
        let of = |fraction, seed| names(&Portion::of(&source, Some(fraction), None, seed).train);
        assert_eq!(of(0.1, 1), of(0.1, 1));
        assert_ne!(of(0.1, 1), of(0.1, 2));
        let (few, more) = (of(0.02, 1), of(0.1, 1));
        assert!(few.iter().all(|image| more.contains(image)));
        assert!(few.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn what_is_set_aside_is_not_trained_on() {
        let source = source();
        let portion = Portion::of(&source, Some(0.5), Some(0.2), 3);
        let (train, aside) = (names(&portion.train), names(portion.validation.as_ref().unwrap()));
        assert!(aside.iter().all(|image| !train.contains(image)));
        let half = Portion::of(&source, Some(0.5), None, 3);
        let mut both = [train, aside.clone()].concat();
        both.sort_unstable();
        assert_eq!(both, names(&half.train));
        for class in 0..3 {
            let held = aside.iter().filter(|&&image| source.label(image) == Some(class)).count();
            assert_eq!(held, (half.counts[class as usize] as f64 * 0.2).round() as usize);
        }
        assert_eq!(portion.counts[3], 1, "a class of one image is learnt from, not set aside");
    }
}
