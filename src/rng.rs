//! Content-keyed randomness: every draw is a function of what it is for, never of who asks first.
//!
//! A [`Stream`] is a `ChaCha8` generator whose 256-bit key is the BLAKE3 hash of the run's seed, a [`Purpose`] and the
//! coordinates of the draw (epoch, image index, view, ...). Ranks, threads, prefetch depth and restarts are not
//! coordinates, so they cannot change a result. Eight rounds are ample for simulation (Aumasson, 2019,
//! <https://eprint.iacr.org/2019/1492>) and twice as fast as twenty.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// What a stream is used for. The name enters the key, so two purposes never share numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Initial weights; coordinates: none, the parameter's path is part of the key.
    Weights,
    /// Order of the images in an epoch; coordinates: epoch.
    Order,
    /// Augmentation; coordinates: epoch, image, view, operation.
    Augment,
    /// Patch masks; coordinates: epoch, image, view; of what the images of a step share: step.
    Mask,
    /// Stochastic depth; coordinates: step, image, view, layer.
    DropPath,
    /// Choice of images for an evaluation; coordinates: free.
    Evaluation,
    /// Choice of the labels that a run learns from; coordinates: class.
    Labels,
    /// Mixing of images; coordinates: step, image, what is drawn.
    Mix,
    /// Substitute for an unreadable image; coordinates: image, attempt.
    Substitute,
    /// Random directions that features are projected on; coordinates: step.
    Directions,
}

impl Purpose {
    fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Order => "order",
            Self::Augment => "augment",
            Self::Mask => "mask",
            Self::DropPath => "drop-path",
            Self::Evaluation => "evaluation",
            Self::Labels => "labels",
            Self::Mix => "mix",
            Self::Substitute => "substitute",
            Self::Directions => "directions",
        }
    }
}

/// A stream of random numbers for one purpose at one place.
#[derive(Clone, Debug)]
pub struct Stream {
    generator: ChaCha8Rng,
}

impl Stream {
    /// Opens the stream of `(seed, purpose, coordinates)`.
    #[must_use]
    pub fn new(seed: u64, purpose: Purpose, coordinates: &[u64]) -> Self {
        Self::with_path(seed, purpose, "", coordinates)
    }

    /// Opens the stream of `(seed, purpose, path, coordinates)`; `path` names a parameter or a layer.
    #[must_use]
    pub fn with_path(seed: u64, purpose: Purpose, path: &str, coordinates: &[u64]) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(b"autodidact rng v1\0");
        hash.update(&seed.to_le_bytes());
        hash.update(purpose.name().as_bytes());
        hash.update(&[0]);
        hash.update(path.as_bytes());
        hash.update(&[0]);
        for coordinate in coordinates {
            hash.update(&coordinate.to_le_bytes());
        }
        Self { generator: ChaCha8Rng::from_seed(*hash.finalize().as_bytes()) }
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.generator.next_u64()
    }

    /// Returns a number in `[0, 1)` with 53 random bits.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Returns a number in `[low, high)`; `low` when the range is empty.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Returns an integer in `0..bound` without bias (Lemire, 2019, <https://arxiv.org/abs/1805.10941>).
    ///
    /// # Panics
    /// When `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "an empty range has no element to draw");
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.bits()) * u128::from(bound);
            if (product as u64) >= threshold {
                return (product >> 64) as u64;
            }
        }
    }

    /// Returns true with the given probability; one draw whatever the probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Returns a standard normal number (Box-Muller, one of the pair is dropped to keep draws countable).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Permutes a slice (Fisher-Yates, from the end).
    ///
    /// # Panics
    /// Never: an index of a slice fits a `usize`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = usize::try_from(self.below(last as u64 + 1)).expect("below a usize");
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_key_same_numbers_and_any_change_of_key_changes_them() {
        let draw = |seed, purpose, path: &str, at: &[u64]| Stream::with_path(seed, purpose, path, at).bits();
        let reference = draw(1, Purpose::Augment, "", &[0, 1, 2]);
        assert_eq!(reference, draw(1, Purpose::Augment, "", &[0, 1, 2]));
        for other in [
            draw(2, Purpose::Augment, "", &[0, 1, 2]),
            draw(1, Purpose::Mask, "", &[0, 1, 2]),
            draw(1, Purpose::Augment, "a", &[0, 1, 2]),
            draw(1, Purpose::Augment, "", &[0, 1, 3]),
            draw(1, Purpose::Augment, "", &[0, 1]),
            draw(1, Purpose::Augment, "", &[0, 1, 2, 0]),
        ] {
            assert_ne!(reference, other);
        }
    }

    #[test]
    fn numbers_are_uniform_and_normal() {
        let mut stream = Stream::new(7, Purpose::Evaluation, &[]);
        let n = 20_000;
        let mean = (0..n).map(|_| stream.unit()).sum::<f64>() / f64::from(n);
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let squares = (0..n).map(|_| stream.normal().powi(2)).sum::<f64>() / f64::from(n);
        assert!((squares - 1.0).abs() < 0.05, "{squares}");
        let mut counts = [0u32; 7];
        (0..n).for_each(|_| counts[stream.below(7) as usize] += 1);
        assert!(counts.iter().all(|&c| c.abs_diff(n as u32 / 7) < 300), "{counts:?}");
    }

    #[test]
    fn shuffle_is_a_permutation() {
        let mut items: Vec<u32> = (0..100).collect();
        Stream::new(1, Purpose::Order, &[]).shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }
}
