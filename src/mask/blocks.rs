//! Masks of a given number of patches that are made of blocks.

use crate::rng::Stream;

/// Attempts to place a block before single patches fill the rest, `BEiT`'s number.
const ATTEMPTS: usize = 10;
/// Least ratio of a block's sides, `BEiT`'s; the largest is its inverse.
const MIN_ASPECT: f64 = 0.3;

/// Masks `count` of the squares of `side` x `side` patches that tile the grid.
///
/// `SimMIM` (Xie et al., 2021, <https://arxiv.org/abs/2111.09886>, section 3.2): the first squares of a random permutation.
///
/// # Panics
/// When the squares don't tile the grid, or there are fewer than `count`.
#[must_use]
pub fn square_mask([rows, columns]: [usize; 2], side: usize, count: usize, stream: &mut Stream) -> Vec<bool> {
    assert!(
        side > 0 && rows.is_multiple_of(side) && columns.is_multiple_of(side),
        "squares of {side} patches don't tile {rows} x {columns}"
    );
    let across = columns / side;
    let mut squares: Vec<usize> = (0..rows / side * across).collect();
    assert!(count <= squares.len(), "cannot mask {count} of {} squares", squares.len());
    stream.shuffle(&mut squares);
    let mut masked = vec![false; rows * columns];
    for square in &squares[..count] {
        let corner = [square / across * side, square % across * side];
        cells(corner, [side; 2], columns).for_each(|patch| masked[patch] = true);
    }
    masked
}

/// Masks `count` patches, in rectangles of at least `smallest` patches as long as such fit.
///
/// `BEiT` (Bao et al., 2021, <https://arxiv.org/abs/2106.08254>, algorithm 1) as in the released `masking_generator.py`: area uniform between
/// `smallest` and what is left to mask, aspect ratio log-uniform between 0.3 and 1 / 0.3, any place. After ten rectangles in a row
/// that don't fit, `BEiT` leaves it at fewer patches; here, as in `BEiT` v2, single patches make up the number, so that it is always the same.
///
/// # Panics
/// When the grid has fewer than `count` patches.
#[must_use]
pub fn rectangle_mask(grid: [usize; 2], count: usize, smallest: usize, stream: &mut Stream) -> Vec<bool> {
    let mut masked = vec![false; grid[0] * grid[1]];
    assert!(count <= masked.len(), "cannot mask {count} of {} patches", masked.len());
    let mut left = count;
    while left > 0 {
        let Some(new) = (0..ATTEMPTS).find_map(|_| rectangle(grid, &masked, smallest, left, stream)) else { break };
        left -= new.len();
        for patch in new {
            masked[patch] = true;
        }
    }
    let mut open: Vec<usize> = (0..masked.len()).filter(|&patch| !masked[patch]).collect();
    stream.shuffle(&mut open);
    open[..left].iter().for_each(|&patch| masked[patch] = true);
    masked
}

/// Draws a rectangle and returns the patches that it masks anew, if there are some and not more than are left.
fn rectangle(
    [rows, columns]: [usize; 2],
    masked: &[bool],
    smallest: usize,
    left: usize,
    stream: &mut Stream,
) -> Option<Vec<usize>> {
    let area = stream.uniform(smallest as f64, left as f64);
    let aspect = stream.uniform(MIN_ASPECT.ln(), -MIN_ASPECT.ln()).exp();
    let [height, width] = [area * aspect, area / aspect].map(|square| square.sqrt().round_ties_even() as usize);
    if height >= rows || width >= columns {
        return None;
    }
    let corner = [place(rows, height, stream), place(columns, width, stream)];
    let new: Vec<usize> = cells(corner, [height, width], columns).filter(|&patch| !masked[patch]).collect();
    (!new.is_empty() && new.len() <= left).then_some(new)
}

/// Draws where a block of `size` begins on an axis of `whole`.
pub(super) fn place(whole: usize, size: usize, stream: &mut Stream) -> usize {
    usize::try_from(stream.below((whole - size + 1) as u64)).expect("below a usize")
}

/// Lists the patches of a block row by row.
pub(super) fn cells(
    [top, left]: [usize; 2],
    [height, width]: [usize; 2],
    columns: usize,
) -> impl Iterator<Item = usize> {
    (top..top + height).flat_map(move |row| (left..left + width).map(move |column| row * columns + column))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mask::stream;

    fn count(mask: &[bool]) -> usize {
        mask.iter().filter(|&&masked| masked).count()
    }

    #[test]
    fn squares_are_masked_as_wholes() {
        let mask = square_mask([6, 8], 2, 7, &mut stream(1, 0, 5, 0));
        assert_eq!(count(&mask), 7 * 4);
        for row in 0..6 {
            for column in 0..8 {
                assert_eq!(mask[row * 8 + column], mask[row / 2 * 16 + column / 2 * 2], "{row} {column}");
            }
        }
    }

    #[test]
    fn rectangles_are_as_large_as_those_of_the_released_code() {
        // 14 x 14 patches, 120 masked, at least 16 a block. In 500 masks of a Python transcription of the released code the right neighbour of a masked patch is
        // masked in a share of 0.94 (single patches: 0.61); corners are masked 41 times, the middle 479 times.
        let (mut pairs, mut seen) = (0, vec![0; 196]);
        for image in 0..500 {
            let mask = rectangle_mask([14, 14], 120, 16, &mut stream(3, 0, image, 0));
            assert_eq!(count(&mask), 120);
            for patch in (0..196).filter(|&patch| mask[patch]) {
                seen[patch] += 1;
                pairs += u32::from(patch % 14 < 13 && mask[patch + 1]);
            }
        }
        let neighbours = f64::from(pairs) / (500.0 * 120.0 * 13.0 / 14.0);
        assert!((neighbours - 0.94).abs() < 0.01, "{neighbours}");
        assert!((15..70).contains(&seen[0]) && (450..490).contains(&seen[6 * 14 + 7]), "{seen:?}");
    }

    proptest! {
        /// Counts are exact on any grid, masks differ with image and epoch, and it does not matter who draws them, and when.
        #[test]
        fn masks_follow_their_key(
            rows in 7usize..16, columns in 7usize..16, share in 0.2f64..0.8, smallest in 1usize..10,
            seed: u64, epoch in 0u64..1000, ranks in 1usize..5,
        ) {
            let grid = [rows, columns];
            let masked = (share * (rows * columns) as f64).ceil() as usize;
            let draw = |epoch, image| rectangle_mask(grid, masked, smallest, &mut stream(seed, epoch, image, 0));
            let images: Vec<u64> = (0..12).map(|i| i * 7919 + seed % 1000).collect();
            let all: Vec<Vec<bool>> = images.iter().map(|&image| draw(epoch, image)).collect();
            prop_assert!(all.iter().all(|mask| count(mask) == masked));
            let mut by_rank: Vec<Vec<Vec<bool>>> = images.chunks(12usize.div_ceil(ranks)).rev()
                .map(|own| own.iter().map(|&image| draw(epoch, image)).collect()).collect();
            by_rank.reverse();
            prop_assert_eq!(by_rank.concat(), all.clone());
            let next: Vec<Vec<bool>> = images.iter().map(|&image| draw(epoch + 1, image)).collect();
            prop_assert_ne!(&next, &all);
            prop_assert!(all.iter().any(|mask| *mask != all[0]), "other images");
        }
    }
}
