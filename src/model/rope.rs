//! Rotary position embedding of patches.
//!
//! Su et al., 2021, <https://arxiv.org/abs/2104.09864>, in the two-dimensional form of `DINOv3` (Simeoni et al., 2025,
//! <https://arxiv.org/abs/2508.10104>; facebookresearch/dinov3 `layers/rope_position_encoding.py`): the centre of a patch has
//! coordinates `(row, column)` in [-1, 1], its angles are `2 pi coordinate / base^(4 k / h)` for `k < h / 4` with heads of `h` values, first of
//! the row, then of the column; value `i` of a query or key is turned together with value `i + h / 2` by angle `i`. Class and register
//! tokens stay as they are.
//!
//! Not here: `DINOv3`'s random shift, jitter and rescaling of coordinates while training. The periods are `f32`; the released weights
//! were trained with periods rounded to bfloat16.

use burn::tensor::{Device, Tensor, TensorData};

/// Cosines and sines for the tokens of a batch.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// `[batch or 1, tokens, 1, 1, head / 2]`.
    cos: Tensor<5>,
    sin: Tensor<5>,
}

impl Rotary {
    /// Computes the angles of `prefix` tokens without a place and the patches of a grid, row by row; or of those that are kept, a
    /// list for each image.
    ///
    /// # Panics
    /// When the lists differ in length or name a patch outside the grid, or heads are not a multiple of 4 wide.
    #[must_use]
    pub fn new(
        prefix: usize,
        grid: [usize; 2],
        kept: Option<&[Vec<usize>]>,
        head: usize,
        base: f64,
        device: &Device,
    ) -> Self {
        let half = head / 2;
        let angles = angles(grid, head, base);
        let all = [(0..grid[0] * grid[1]).collect()];
        let lists: &[Vec<usize>] = kept.unwrap_or(&all);
        let count = lists.first().map_or(0, Vec::len);
        let mut turns = Vec::with_capacity(lists.len() * (prefix + count) * half);
        for list in lists {
            assert_eq!(list.len(), count, "every image keeps the same number of patches");
            turns.extend(std::iter::repeat_n(0.0, prefix * half));
            turns.extend(list.iter().flat_map(|&patch| &angles[patch * half..(patch + 1) * half]));
        }
        let table = |f: fn(f64) -> f64| {
            let values = turns.iter().map(|&angle| f(angle) as f32).collect();
            Tensor::from_data(TensorData::new(values, [lists.len(), prefix + count, 1, 1, half]), device)
        };
        Self { cos: table(f64::cos), sin: table(f64::sin) }
    }

    /// Cosines and sines of `prefix` tokens without a place and the patches of a grid, each `[tokens, head / 2]`.
    ///
    /// # Panics
    /// When heads are not a multiple of 4 wide.
    #[must_use]
    pub fn tables(prefix: usize, grid: [usize; 2], head: usize, base: f64) -> (Vec<f32>, Vec<f32>) {
        let mut turns = vec![0.0; prefix * (head / 2)];
        turns.extend(angles(grid, head, base));
        let table = |f: fn(f64) -> f64| turns.iter().map(|&angle| f(angle) as f32).collect();
        (table(f64::cos), table(f64::sin))
    }

    /// Turns queries and keys.
    ///
    /// # Shapes
    /// `[batch, tokens, 3 * dim]` (queries, keys, values; heads in order within each) to the same.
    ///
    /// # Panics
    /// When there are other tokens than the angles are for.
    #[must_use]
    pub fn turn(&self, qkv: Tensor<3>, heads: usize) -> Tensor<3> {
        let [batch, tokens, packed] = qkv.dims();
        let (dim, half) = (packed / 3, packed / 6 / heads);
        let known = self.cos.dims()[1];
        assert_eq!(tokens, known, "rotary positions of {known} tokens, but there are {tokens}; name the grid");
        let pairs = qkv.clone().narrow(2, 0, 2 * dim).reshape([batch, tokens, 2 * heads, 2, half]);
        let (a, b) = (pairs.clone().narrow(3, 0, 1), pairs.narrow(3, 1, 1));
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        let first = a.clone() * cos.clone() - b.clone() * sin.clone();
        let second = b * cos + a * sin;
        let turned = Tensor::cat(vec![first, second], 3).reshape([batch, tokens, 2 * dim]);
        Tensor::cat(vec![turned, qkv.narrow(2, 2 * dim, dim)], 2)
    }
}

/// Angles of each patch of a grid, `[rows * columns, head / 2]`.
fn angles([rows, columns]: [usize; 2], head: usize, base: f64) -> Vec<f64> {
    assert!(head.is_multiple_of(4), "rotary positions turn heads whose width is a multiple of 4, got {head}");
    let centre = |at: usize, of: usize| 2.0 * (at as f64 + 0.5) / of as f64 - 1.0;
    let frequency = |k: usize| std::f64::consts::TAU * base.powf(-4.0 * k as f64 / head as f64);
    let mut angles = Vec::with_capacity(rows * columns * head / 2);
    for row in 0..rows {
        for column in 0..columns {
            for place in [centre(row, rows), centre(column, columns)] {
                angles.extend((0..head / 4).map(|k| place * frequency(k)));
            }
        }
    }
    angles
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
        x.into_data().try_to_vec().unwrap()
    }

    fn qkv(batch: usize, tokens: usize, packed: usize) -> Tensor<3> {
        let values: Vec<f32> = (0..batch * tokens * packed).map(|i| (i as f32 * 0.37).sin()).collect();
        Tensor::from_data(TensorData::new(values, [batch, tokens, packed]), &Device::flex())
    }

    #[test]
    fn rows_come_before_columns_and_patches_have_centres() {
        let (angles, tau) = (angles([2, 4], 8, 100.0), std::f64::consts::TAU);
        let expected = [-0.5 * tau, -0.05 * tau, 0.25 * tau, 0.025 * tau];
        assert!(angles[2 * 4..3 * 4].iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{angles:?}");
    }

    #[test]
    fn pairs_half_a_head_apart_are_turned_and_the_rest_stays() {
        let (heads, head, grid) = (2, 8, [2, 3]);
        let x = qkv(1, 7, 3 * 16);
        let got = values(Rotary::new(1, grid, None, head, 100.0, &Device::flex()).turn(x.clone(), heads));
        let (x, angles) = (values(x), angles(grid, head, 100.0));
        for (at, (got, x)) in got.chunks(48).zip(x.chunks(48)).enumerate() {
            assert_eq!(got[32..], x[32..], "values");
            if at == 0 {
                assert_eq!(got, x, "the class token");
                continue;
            }
            for start in (0..32).step_by(head) {
                for i in 0..4 {
                    let (a, b) = (f64::from(x[start + i]), f64::from(x[start + i + 4]));
                    let (sin, cos) = angles[(at - 1) * 4 + i].sin_cos();
                    assert!((f64::from(got[start + i]) - (a * cos - b * sin)).abs() < 1e-6);
                    assert!((f64::from(got[start + i + 4]) - (b * cos + a * sin)).abs() < 1e-6);
                }
            }
        }
    }

    #[test]
    fn kept_patches_keep_their_angles() {
        let device = Device::flex();
        let x = qkv(2, 7, 3 * 8);
        let all = values(Rotary::new(1, [2, 3], None, 8, 100.0, &device).turn(x.clone(), 1));
        let kept = [vec![4, 0], vec![5, 2]];
        let pick = |values: &[f32]| -> Vec<f32> {
            let token = |image: usize, token: usize| values[(image * 7 + token) * 24..][..24].to_vec();
            let tokens = |(image, list): (usize, &Vec<usize>)| {
                let places: Vec<usize> = std::iter::once(0).chain(list.iter().map(|patch| patch + 1)).collect();
                places.into_iter().flat_map(|place| token(image, place)).collect::<Vec<_>>()
            };
            kept.iter().enumerate().flat_map(tokens).collect()
        };
        let x = Tensor::from_data(TensorData::new(pick(&values(x)), [2, 3, 24]), &device);
        assert_eq!(values(Rotary::new(1, [2, 3], Some(&kept), 8, 100.0, &device).turn(x, 1)), pick(&all));
    }
}
