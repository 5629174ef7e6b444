//! Order of the images: a keyed permutation of `0..n` for each epoch, computed element by element.
//!
//! A balanced Feistel network permutes the smallest domain of an even number of bits that holds `n`; values outside
//! `0..n` are sent through again until they fall inside ("cycle walking", Black and Rogaway, 2002,
//! <https://doi.org/10.1007/3-540-45760-7_9>). The domain is at most four times `n`, so an element takes four
//! passes on average at worst, and nothing is stored but ten keys.

use crate::rng::{Purpose, Stream};

/// Rounds of the network. Four are a pseudorandom permutation when the halves are wide (Luby and Rackoff, 1988), but
/// here a half may be one bit, where few rounds leave visible structure; ten is what NIST's FF1 (SP 800-38G) uses
/// for small domains, and costs some 20 ns, nothing beside decoding an image.
const ROUNDS: usize = 10;

/// A permutation of `0..n`, keyed by `(seed, epoch)`.
#[derive(Clone, Debug)]
pub struct Order {
    num_images: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Order {
    /// Makes the order of `num_images` images in `epoch`.
    ///
    /// # Panics
    /// When there are more than 2^62 images.
    #[must_use]
    pub fn new(seed: u64, epoch: u64, num_images: u64) -> Self {
        assert!(num_images <= 1 << 62, "the domain must fit 64 bits");
        let bits = u64::BITS - num_images.saturating_sub(1).leading_zeros();
        let mut stream = Stream::new(seed, Purpose::Order, &[epoch]);
        Self { num_images, half_bits: bits.div_ceil(2).max(1), keys: std::array::from_fn(|_| stream.bits()) }
    }

    /// Returns the image at `position`.
    ///
    /// # Panics
    /// When `position` is not below the number of images.
    #[must_use]
    pub fn at(&self, position: u64) -> u64 {
        assert!(position < self.num_images, "position {position} of {} images", self.num_images);
        let mut value = position;
        loop {
            value = self.permute(value);
            if value < self.num_images {
                return value;
            }
        }
    }

    fn permute(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// The finalizer of `SplitMix64` (Stafford's variant 13): every input bit reaches every output bit.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Says which image every place of every step holds: epoch = step / steps per epoch, and the places of an epoch run
/// through that epoch's [`Order`]. The remainder of an epoch that fills no global batch is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    seed: u64,
    num_images: u64,
    global: u64,
    micro: u64,
}

impl Schedule {
    /// Makes the schedule of batches of `global` images in micro-batches of `micro`.
    ///
    /// # Panics
    /// When `micro` does not divide `global`, or when there are fewer images than `global`.
    #[must_use]
    pub fn new(seed: u64, num_images: usize, global: usize, micro: usize) -> Self {
        assert!(micro > 0 && global > 0 && global.is_multiple_of(micro), "micro-batches of {micro} make no {global}");
        assert!(num_images >= global, "{num_images} images make no batch of {global}");
        Self { seed, num_images: num_images as u64, global: global as u64, micro: micro as u64 }
    }

    /// Returns the number of whole global batches in an epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.num_images / self.global
    }

    /// Returns the epoch of a step.
    pub fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch()
    }

    /// Returns the images of micro-batch `micro` of `step`, in order.
    ///
    /// # Panics
    /// When the global batch has no such micro-batch.
    #[must_use]
    pub fn images(&self, step: u64, micro: usize) -> Vec<u64> {
        assert!((micro as u64) < self.global / self.micro, "micro-batch {micro} of {}", self.global / self.micro);
        let order = Order::new(self.seed, self.epoch(step), self.num_images);
        let first = step % self.steps_per_epoch() * self.global + micro as u64 * self.micro;
        (first..first + self.micro).map(|position| order.at(position)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(seed: u64, epoch: u64, n: u64) -> Vec<u64> {
        let order = Order::new(seed, epoch, n);
        (0..n).map(|position| order.at(position)).collect()
    }

    fn is_permutation(mut images: Vec<u64>) -> bool {
        images.sort_unstable();
        images.iter().enumerate().all(|(at, &image)| at as u64 == image)
    }

    #[test]
    fn every_small_size_is_permuted() {
        for n in 1..2000 {
            assert!(is_permutation(all(n, 0, n)), "{n}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn large_sizes_are_permuted(seed: u64, epoch in 0u64..1000, n in 2_000u64..300_000) {
            prop_assert!(is_permutation(all(seed, epoch, n)));
        }

        #[test]
        fn huge_sizes_stay_in_range_without_repeats(seed: u64, n in (1u64 << 33)..(1 << 62), from: u64) {
            let order = Order::new(seed, 0, n);
            let from = from % (n - 1000);
            let mut images: Vec<u64> = (from..from + 1000).map(|position| order.at(position)).collect();
            images.sort_unstable();
            prop_assert!(images.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(images[999] < n);
        }
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own() {
        let reference = all(1, 0, 1000);
        for other in [all(1, 1, 1000), all(2, 0, 1000), (0..1000).collect()] {
            let same = reference.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same < 10, "{same} of 1000 places agree, about 1 is expected");
        }
    }

    /// Chi-squared statistic of counts that should be equal.
    fn chi_squared(counts: &[u32]) -> f64 {
        let expected = counts.iter().sum::<u32>() as f64 / counts.len() as f64;
        counts.iter().map(|&count| (count as f64 - expected).powi(2) / expected).sum()
    }

    #[test]
    fn places_are_uniform_over_epochs() {
        // 4 n epochs of 16000 / n or more draws; the bound is the mean of chi-squared plus five standard deviations.
        for n in [3u64, 4, 5, 7, 10, 16, 17, 50] {
            let mut counts = vec![0; (n * n) as usize];
            for epoch in 0..2000 * n {
                let order = Order::new(9, epoch, n);
                for position in 0..n {
                    counts[(position * n + order.at(position)) as usize] += 1;
                }
            }
            let freedom = ((n - 1) * (n - 1)) as f64;
            let bound = freedom + 5.0 * (2.0 * freedom).sqrt();
            let found = chi_squared(&counts);
            assert!(found < bound, "n = {n}: {found:.1}, at most {bound:.1} expected");
        }
    }

    #[test]
    fn neighbours_are_uniform() {
        // The image that follows another: all n - 1 differences modulo n occur equally often.
        let n = 101;
        let mut counts = vec![0; n as usize];
        for epoch in 0..500 {
            let images = all(4, epoch, n);
            images.windows(2).for_each(|pair| counts[((pair[1] + n - pair[0]) % n) as usize] += 1);
        }
        assert_eq!(counts[0], 0);
        let found = chi_squared(&counts[1..]);
        assert!(found < 99.0 + 5.0 * (2.0f64 * 99.0).sqrt(), "{found}");
    }

    #[test]
    fn schedule_covers_each_epoch_once_and_drops_the_rest() {
        let schedule = Schedule::new(3, 103, 20, 5);
        assert_eq!(schedule.steps_per_epoch(), 5);
        for epoch in 0..3 {
            let mut images: Vec<u64> = (epoch * 5..epoch * 5 + 5)
                .flat_map(|step| (0..4).flat_map(move |micro| schedule.images(step, micro)))
                .collect();
            assert_eq!(images.len(), 100);
            images.sort_unstable();
            images.dedup();
            assert_eq!(images.len(), 100);
            assert_eq!(schedule.epoch(epoch * 5 + 4), epoch);
        }
        // Cutting the global batch otherwise does not change which image is where.
        let whole = Schedule::new(3, 103, 20, 20).images(7, 0);
        let parts: Vec<u64> = (0..4).flat_map(|micro| schedule.images(7, micro)).collect();
        assert_eq!(whole, parts);
    }

    #[test]
    fn order_never_changes() {
        assert_eq!(all(0, 0, 10), [0; 10], "a change of this order changes every run: raise the plan's version");
    }
}
