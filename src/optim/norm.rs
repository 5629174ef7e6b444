//! Euclidean norms of flat vectors with one order of additions on every machine.

#![allow(clippy::inline_always, reason = "a function takes on its caller's target features by being inlined")]

use std::array;

use crate::ops::simd::vectorized;

/// Independent accumulators: what vector units of 512 bits add at once, and enough to hide the latency of narrower ones.
pub(super) const LANES: usize = 8;

vectorized! {
    /// Returns the sum of squares in `f64`.
    ///
    /// The order is fixed: element `i` goes to lane `i % 8`, each lane adds from left to right, and the lanes are added as
    /// `((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))`. A square of an `f32` is exact in `f64`, so only the additions round.
    pub fn sum_of_squares(values: &[f32]) -> f64 {
        let (rows, rest) = values.as_chunks::<LANES>();
        let mut lanes = [0.0f64; LANES];
        for row in rows {
            for i in 0..LANES {
                lanes[i] += f64::from(row[i]) * f64::from(row[i]);
            }
        }
        add_rest(lanes, rest.iter().copied())
    }
}

/// Returns the Euclidean norm; see [`sum_of_squares`] for the order of additions.
#[must_use]
pub fn norm(values: &[f32]) -> f64 {
    sum_of_squares(values).sqrt()
}

/// Returns the Euclidean norm of several vectors together: their sums of squares added up one after another.
#[must_use]
pub fn global_norm(tensors: &[impl AsRef<[f32]>]) -> f64 {
    tensors.iter().map(|values| sum_of_squares(values.as_ref())).sum::<f64>().sqrt()
}

/// Returns the Euclidean norm of `left + scale * right`, computed in `f32` as an optimizer does and summed as in [`sum_of_squares`].
pub(super) fn norm_of_sum(left: &[f32], scale: f32, right: &[f32]) -> f64 {
    let ((rows, rest), (right_rows, right_rest)) = (left.as_chunks(), right.as_chunks());
    let rows = rows
        .iter()
        .zip(right_rows)
        .map(|(a, b): (&[f32; LANES], &[f32; LANES])| array::from_fn(|i| a[i] + scale * b[i]));
    add_squares(rows, rest.iter().zip(right_rest).map(|(a, b)| a + scale * b)).sqrt()
}

fn add_squares(rows: impl Iterator<Item = [f32; LANES]>, rest: impl Iterator<Item = f32>) -> f64 {
    let mut lanes = [0.0f64; LANES];
    for row in rows {
        for (lane, value) in lanes.iter_mut().zip(row) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    add_rest(lanes, rest)
}

#[inline(always)]
pub(super) fn add_rest(mut lanes: [f64; LANES], rest: impl Iterator<Item = f32>) -> f64 {
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(value) * f64::from(value);
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_a_plain_sum() {
        for len in [0, 1, 7, 8, 9, 1000] {
            let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
            let plain: f64 = values.iter().map(|&v| f64::from(v).powi(2)).sum();
            assert!((sum_of_squares(&values) - plain).abs() <= 1e-12 * plain, "{len}");
        }
    }

    #[test]
    fn norm_of_a_sum_is_the_norm_of_the_sums() {
        let (left, right): (Vec<f32>, Vec<f32>) = (0..21).map(|i| ((i as f32).sin(), (i as f32).cos())).unzip();
        let sums: Vec<f32> = left.iter().zip(&right).map(|(a, b)| a + 0.3 * b).collect();
        assert_eq!(norm_of_sum(&left, 0.3, &right), norm(&sums));
    }

    #[test]
    fn neither_overflows_nor_hides_nan() {
        assert_eq!(norm(&[3e30, 4e30]), f64::from(3e30f32).hypot(f64::from(4e30f32)));
        assert!(norm(&[1.0, f32::NAN]).is_nan());
        assert_eq!(norm(&[1.0, f32::INFINITY]), f64::INFINITY);
    }
}
