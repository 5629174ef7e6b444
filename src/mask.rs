//! Which patches the encoder sees.

mod blocks;
mod multi_block;

pub use blocks::{rectangle_mask, square_mask};
pub use multi_block::{ImageMask, MultiBlock, StepMasks};

use crate::rng::{Purpose, Stream};

/// Opens the stream of an image's mask. No rank, no place in a batch is part of its key.
#[must_use]
pub fn stream(seed: u64, epoch: u64, image: u64, view: u64) -> Stream {
    Stream::new(seed, Purpose::Mask, &[epoch, image, view])
}

/// Returns how many of `num_patches` stay at a mask ratio: rounded down, as in MAE.
#[must_use]
pub fn num_kept(num_patches: usize, mask_ratio: f64) -> usize {
    (num_patches as f64 * (1.0 - mask_ratio)) as usize
}

/// Draws the patches of one view that stay visible, in random order.
///
/// MAE (He et al., 2021, <https://arxiv.org/abs/2111.06377>): a uniform number per patch, the `keep` smallest stay, in the order of
/// their numbers. The draw is keyed by `(seed, epoch, image, view)`.
#[must_use]
pub fn random_mask(seed: u64, epoch: u64, image: u64, view: u64, num_patches: usize, keep: usize) -> Vec<usize> {
    let mut stream = stream(seed, epoch, image, view);
    let noise: Vec<f64> = (0..num_patches).map(|_| stream.unit()).collect();
    keep_smallest(&noise, keep)
}

/// Returns the indices of the `keep` smallest numbers in ascending order of the numbers; of equal ones the first comes first.
///
/// # Panics
/// When `keep` exceeds the numbers.
#[must_use]
pub fn keep_smallest(noise: &[f64], keep: usize) -> Vec<usize> {
    assert!(keep <= noise.len(), "cannot keep {keep} of {} patches", noise.len());
    let mut order: Vec<usize> = (0..noise.len()).collect();
    order.sort_by(|&a, &b| noise[a].total_cmp(&noise[b]));
    order.truncate(keep);
    order
}

/// Tells for each patch whether it is removed.
///
/// # Panics
/// When a kept index is not below `num_patches`.
#[must_use]
pub fn removed(kept: &[usize], num_patches: usize) -> Vec<bool> {
    let mut removed = vec![true; num_patches];
    for &patch in kept {
        removed[patch] = false;
    }
    removed
}

/// Draws rectangles of patches until `target` patches are hidden, or ten draws in a row do not fit; true is hidden.
///
/// Block-wise masking of `BEiT` (Bao et al., 2021, <https://arxiv.org/abs/2106.08254>, algorithm 1) as in the code of iBOT and `DINOv2`: a rectangle has
/// an area between `least` and what is still missing, a ratio of height to width drawn log-uniformly from `aspect`, is smaller than
/// the grid both ways, and may overlap others.
///
/// # Panics
/// When the range of `aspect` is not positive.
#[must_use]
pub fn block_mask(
    stream: &mut Stream,
    [height, width]: [usize; 2],
    target: usize,
    least: usize,
    aspect: [f64; 2],
) -> Vec<bool> {
    assert!(aspect[0] > 0.0 && aspect[0] <= aspect[1], "a range of ratios, got {aspect:?}");
    let mut hidden = vec![false; height * width];
    let mut count = 0;
    while count < target {
        let missing = target - count;
        let block = (0..10).find_map(|_| {
            let area = stream.uniform(least as f64, missing as f64);
            let ratio = stream.uniform(aspect[0].ln(), aspect[1].ln()).exp();
            let [rows, columns] = [area * ratio, area / ratio].map(|square| square.sqrt().round() as usize);
            if rows >= height || columns >= width {
                return None;
            }
            let top = stream.below((height - rows) as u64 + 1) as usize;
            let left = stream.below((width - columns) as u64 + 1) as usize;
            let places =
                (top..top + rows).flat_map(|row| (left..left + columns).map(move |column| row * width + column));
            let new: Vec<usize> = places.filter(|&patch| !hidden[patch]).collect();
            (1..=missing).contains(&new.len()).then_some(new)
        });
        let Some(block) = block else { break };
        count += block.len();
        for patch in block {
            hidden[patch] = true;
        }
    }
    hidden
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_round_down() {
        assert_eq!(num_kept(196, 0.75), 49);
        assert_eq!(num_kept(16, 0.75), 4);
        assert_eq!(num_kept(10, 0.75), 2);
        assert_eq!(num_kept(64, 0.6), 25);
    }

    #[test]
    fn smallest_in_order_of_their_numbers() {
        assert_eq!(keep_smallest(&[0.4, 0.1, 0.3, 0.1], 3), [1, 3, 2]);
    }

    #[test]
    fn a_mask_depends_on_its_key_alone_and_is_uniform() {
        let draw = |seed, epoch, image, view| random_mask(seed, epoch, image, view, 49, 12);
        let reference = draw(1, 2, 3, 0);
        assert_eq!(reference, draw(1, 2, 3, 0));
        for other in [draw(2, 2, 3, 0), draw(1, 3, 3, 0), draw(1, 2, 4, 0), draw(1, 2, 3, 1)] {
            assert_ne!(reference, other);
        }
        let mut counts = [0u32; 49];
        for image in 0..4000 {
            let kept = draw(7, 0, image, 0);
            assert_eq!(removed(&kept, 49).iter().filter(|&&r| !r).count(), 12, "12 different patches");
            for patch in kept {
                counts[patch] += 1;
            }
        }
        // 4000 * 12 / 49 = 980, deviation 27
        assert!(counts.iter().all(|&c| (860..1100).contains(&c)), "{counts:?}");
    }

    #[test]
    fn blocks_hide_at_most_the_target_and_nearly_reach_it() {
        let (mut hidden_in_all, mut alone, targets) = (0, 0, 98 * 500);
        for image in 0..500 {
            let mut stream = Stream::new(1, Purpose::Mask, &[0, image, 0]);
            let mask = block_mask(&mut stream, [14, 14], 98, 16, [0.3, 1.0 / 0.3]);
            let hidden = mask.iter().filter(|&&hidden| hidden).count();
            assert!(hidden <= 98);
            hidden_in_all += hidden;
            // patches come in blocks: almost none is hidden without a neighbour
            let at = |row: i32, column: i32| {
                (0..14).contains(&row) && (0..14).contains(&column) && mask[(row * 14 + column) as usize]
            };
            alone += (0..196)
                .map(|patch| (patch / 14, patch % 14))
                .filter(|&(r, c)| at(r, c) && !at(r - 1, c) && !at(r + 1, c) && !at(r, c - 1) && !at(r, c + 1))
                .count();
        }
        assert!(hidden_in_all * 10 > targets * 8, "{hidden_in_all} of {targets}");
        assert!(alone * 100 < hidden_in_all, "{alone} of {hidden_in_all}");
        let none = block_mask(&mut Stream::new(1, Purpose::Mask, &[0]), [14, 14], 0, 16, [0.3, 3.0]);
        assert!(none.iter().all(|hidden| !hidden));
    }
}
