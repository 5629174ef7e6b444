//! I-JEPA's masks: a context block without the target blocks.

use std::collections::BTreeSet;

use super::blocks::{cells, place};
use crate::rng::{Purpose, Stream};

/// Placements by which the size of a step's contexts is found: the images of one GPU in the paper.
const REFERENCE: usize = 128;
/// Attempts to place an image's blocks so that the context is large enough.
const ATTEMPTS: usize = 100;

/// Multi-block masking (Assran et al., 2023, <https://arxiv.org/abs/2301.08243>, section 3 and appendix A.1), as in the released
/// `src/masks/multiblock.py`.
///
/// Of a step, all images have blocks of the same sizes, drawn by one number for scale and aspect ratio. Of an image, the places of
/// the blocks are drawn; its context is the context block without its target blocks.
///
/// Different from the released code, so that an image's mask depends on neither its neighbours nor the rank:
/// - Contexts of a batch must have equal numbers of patches. The released code cuts all to the smallest one of the batch on a GPU. Here the number is the
///   smallest one of 128 placements that are drawn for the step; an image whose context is smaller draws again.
/// - Of a larger context random patches stay. The released code takes the first ones, and so leaves out the lower right.
/// - Blocks may touch the last row and column, which the released code never reaches.
/// - When a context is too small, all blocks are placed again. The released code only moves the context block, then lets it overlap
///   targets, and on small grids looks for ever: see [`least`](Self::least).
#[derive(Clone, Debug, PartialEq)]
pub struct MultiBlock {
    /// Rows and columns of patches.
    pub grid: [usize; 2],
    /// Target blocks of an image.
    pub targets: usize,
    /// Area of a target block as a fraction of the grid.
    pub target_scale: [f64; 2],
    /// Height / width of a target block.
    pub target_aspect: [f64; 2],
    /// Area of the (square) context block.
    pub context_scale: [f64; 2],
    /// A context has more patches than this.
    pub min_keep: usize,
}

/// What is common to the masks of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepMasks {
    grid: [usize; 2],
    targets: usize,
    /// Height and width of the blocks.
    target: [usize; 2],
    context: [usize; 2],
    /// Patches of a context.
    keep: usize,
}

/// The mask of an image: patches of the context and of each target block, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageMask {
    /// What the encoder sees.
    pub context: Vec<usize>,
    /// What is predicted, block by block.
    pub targets: Vec<Vec<usize>>,
}

impl MultiBlock {
    /// Draws what the images of a step have in common.
    #[must_use]
    pub fn at_step(&self, seed: u64, step: u64) -> StepMasks {
        let mut stream = Stream::new(seed, Purpose::Mask, &[step]);
        let target = self.target(stream.unit());
        let context = self.context(stream.unit());
        let mut masks = StepMasks { grid: self.grid, targets: self.targets, target, context, keep: self.min_keep + 1 };
        masks.keep = (0..REFERENCE).map(|_| masks.place(&mut stream).context.len()).min().unwrap_or(0);
        masks
    }

    /// Returns the patches of the smallest target block, and of the roomiest context beside the most unfortunate sizes.
    #[must_use]
    pub fn least(&self) -> (usize, usize) {
        let draws = || (0..=1000).map(|i| f64::from(i) / 1000.0);
        let targets: BTreeSet<[usize; 2]> = draws().map(|draw| self.target(draw)).collect();
        let contexts: BTreeSet<[usize; 2]> = draws().map(|draw| self.context(draw)).collect();
        let smallest = targets.iter().map(|[height, width]| height * width).min().unwrap_or(0);
        let room = |target: [usize; 2], context: [usize; 2]| {
            let overlap = |axis: usize| (target[axis] + context[axis]).saturating_sub(self.grid[axis]);
            context[0] * context[1] - overlap(0) * overlap(1)
        };
        let rooms = targets.iter().flat_map(|&target| contexts.iter().map(move |&context| room(target, context)));
        (smallest, rooms.min().unwrap_or(0))
    }

    fn target(&self, draw: f64) -> [usize; 2] {
        block_size(self.grid, draw, self.target_scale, self.target_aspect)
    }

    fn context(&self, draw: f64) -> [usize; 2] {
        block_size(self.grid, draw, self.context_scale, [1.0; 2])
    }
}

/// The size for a number in [0, 1), smaller than the grid.
fn block_size([rows, columns]: [usize; 2], draw: f64, scale: [f64; 2], aspect: [f64; 2]) -> [usize; 2] {
    let between = |[low, high]: [f64; 2]| low + draw * (high - low);
    let area = ((rows * columns) as f64 * between(scale)).floor();
    let aspect = between(aspect);
    let side = |square: f64, whole: usize| (square.sqrt().round_ties_even() as usize).min(whole.saturating_sub(1));
    [side(area * aspect, rows), side(area / aspect, columns)]
}

impl StepMasks {
    /// Draws an image's mask.
    #[must_use]
    pub fn draw(&self, stream: &mut Stream) -> ImageMask {
        let mut mask = self.place(stream);
        stream.shuffle(&mut mask.context);
        mask.context.truncate(self.keep);
        mask.context.sort_unstable();
        mask
    }

    /// Places an image's blocks so that the context has at least `keep` patches; where chance doesn't find a way, with all targets in
    /// one corner and the context in the opposite one, than which there is no roomier one.
    fn place(&self, stream: &mut Stream) -> ImageMask {
        for _ in 0..ATTEMPTS {
            let mut corner =
                |[height, width]: [usize; 2]| [place(self.grid[0], height, stream), place(self.grid[1], width, stream)];
            let targets: Vec<_> = (0..self.targets).map(|_| corner(self.target)).collect();
            let mask = self.at(&targets, corner(self.context));
            if mask.context.len() >= self.keep {
                return mask;
            }
        }
        let opposite = [self.grid[0] - self.context[0], self.grid[1] - self.context[1]];
        self.at(&vec![[0, 0]; self.targets], opposite)
    }

    fn at(&self, targets: &[[usize; 2]], context: [usize; 2]) -> ImageMask {
        let [rows, columns] = self.grid;
        let targets: Vec<Vec<usize>> =
            targets.iter().map(|&corner| cells(corner, self.target, columns).collect()).collect();
        let mut hidden = vec![false; rows * columns];
        targets.iter().flatten().for_each(|&patch| hidden[patch] = true);
        let context = cells(context, self.context, columns).filter(|&patch| !hidden[patch]).collect();
        ImageMask { context, targets }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mask::stream;

    /// The paper's numbers.
    fn masks(grid: [usize; 2], min_keep: usize) -> MultiBlock {
        MultiBlock {
            grid,
            targets: 4,
            target_scale: [0.15, 0.2],
            target_aspect: [0.75, 1.5],
            context_scale: [0.85, 1.0],
            min_keep,
        }
    }

    #[test]
    fn sizes_are_those_of_the_released_code() {
        // `MaskCollator._sample_block_size` for `_rand` of 0, 0.5 and 0.999
        let masks = masks([16, 16], 10);
        assert_eq!([0.0, 0.5, 0.999].map(|draw| masks.target(draw)), [[5, 7], [7, 6], [9, 6]]);
        assert_eq!([0.0, 0.5, 0.999].map(|draw| masks.context(draw)), [[15, 15], [15, 15], [15, 15]]);
        assert_eq!(super::block_size([16, 16], 0.0, [0.5, 0.5], [1.0; 2]), [11, 11]);
    }

    #[test]
    fn grids_that_are_too_small_are_known_and_never_looped_on() {
        assert_eq!(
            masks([4, 4], 10).least(),
            (1, 8),
            "blocks of 1 patch; 3 x 3 but for a corner of 2 x 2 in the opposite corner"
        );
        assert_eq!(masks([2, 2], 0).least(), (0, 1));
        assert_eq!(masks([1, 1], 0).least(), (0, 0));
        // 9 patches are not more than 10: the roomiest placement is taken
        assert!((0..50).all(|step| (8..=9).contains(&masks([4, 4], 10).at_step(1, step).keep)));
        assert!(masks([16, 16], 10).least().1 > 150);
    }

    #[test]
    fn every_patch_is_seen_and_predicted() {
        let (mut seen, mut predicted) = (vec![0; 196], vec![0; 196]);
        for step in 0..20 {
            let masks = masks([14, 14], 10).at_step(7, step);
            for image in 0..50 {
                let mask = masks.draw(&mut stream(7, step, image, 0));
                mask.context.iter().for_each(|&patch| seen[patch] += 1);
                mask.targets.iter().flatten().for_each(|&patch| predicted[patch] += 1);
            }
        }
        assert!(seen.iter().all(|&times| times > 10), "{seen:?}");
        assert!(predicted.iter().all(|&times| times > 10), "{predicted:?}");
    }

    proptest! {
        /// All images of a step have equal counts, contexts show no target, and a mask follows from seed, step, epoch and image alone.
        #[test]
        fn masks_follow_their_key(
            side in 8usize..18, seed: u64, step in 0u64..10_000, ranks in 1usize..5,
        ) {
            let config = masks([side, side + 1], 3);
            let images: Vec<u64> = (0..12).map(|i| i * 7919 + seed % 1000).collect();
            let draw = |step, own: &[u64]| -> Vec<ImageMask> {
                let masks = config.at_step(seed, step);
                own.iter().map(|&image| masks.draw(&mut stream(seed, step / 10, image, 0))).collect()
            };
            let all = draw(step, &images);
            for mask in &all {
                prop_assert_eq!(mask.context.len(), all[0].context.len());
                prop_assert!(mask.context.len() > 3 && mask.targets.len() == 4);
                for target in &mask.targets {
                    prop_assert_eq!(target.len(), all[0].targets[0].len());
                    prop_assert!(!target.is_empty() && target.iter().all(|patch| !mask.context.contains(patch)));
                }
            }
            let mut by_rank: Vec<Vec<ImageMask>> =
                images.chunks(12usize.div_ceil(ranks)).rev().map(|own| draw(step, own)).collect();
            by_rank.reverse();
            prop_assert_eq!(by_rank.concat(), all.clone());
            prop_assert_ne!(draw(step + 10, &images), all.clone(), "another epoch");
            let others = all.iter().skip(1).filter(|mask| **mask != all[0]).count();
            prop_assert_eq!(others, 11);
        }
    }
}
