//! Position embeddings: fixed sine-cosine tables and resizing of learned ones.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Returns MAE's fixed two-dimensional table, row by row, `[height * width, dim]`.
///
/// The first half of a vector encodes the column, the second the row, each as sines then cosines (`util/pos_embed.py` of
/// facebookresearch/mae; MoCo v3 has the halves the other way round).
///
/// # Panics
/// When `dim` is not a multiple of 4.
#[must_use]
pub fn sincos_table([height, width]: [usize; 2], dim: usize) -> Vec<f32> {
    assert!(dim.is_multiple_of(4), "a sine-cosine embedding needs a dimension divisible by 4, got {dim}");
    let quarter = dim / 4;
    let omegas: Vec<f64> = (0..quarter).map(|i| 10000f64.powf(-(i as f64) / quarter as f64)).collect();
    let mut table = Vec::with_capacity(height * width * dim);
    for row in 0..height {
        for column in 0..width {
            for at in [column, row] {
                table.extend(omegas.iter().map(|omega| (at as f64 * omega).sin() as f32));
                table.extend(omegas.iter().map(|omega| (at as f64 * omega).cos() as f32));
            }
        }
    }
    table
}

/// How a grid of embeddings is resized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Bicubic {
    /// The kernel widens when shrinking (torch's `antialias=True`, a = -0.5): timm.
    #[default]
    Antialias,
    /// Plain (a = -0.75, borders repeated): MAE, DINOv2 without offset, Hugging Face.
    Plain,
    /// Plain, with a grid a tenth of a cell larger than it is, as the code of DINO and iBOT has it against rounding down
    /// (`scale_factor = (n + 0.1) / m`); DINOv2's `interpolate_offset = 0.1`.
    #[serde(rename = "offset")]
    PlainOffset,
}

/// Returns the matrix that resizes a grid, `[to.0 * to.1, from.0 * from.1]`, row-major, as torch's bicubic `interpolate` with
/// `align_corners=False`.
#[must_use]
pub fn resize_matrix(from: [usize; 2], to: [usize; 2], kind: Bicubic) -> Vec<f32> {
    let rows = axis_weights(from[0], to[0], kind);
    let columns = axis_weights(from[1], to[1], kind);
    let mut matrix = Vec::with_capacity(to[0] * to[1] * from[0] * from[1]);
    for row in rows.chunks(from[0]) {
        for column in columns.chunks(from[1]) {
            matrix.extend(row.iter().flat_map(|r| column.iter().map(move |c| (r * c) as f32)));
        }
    }
    matrix
}

/// Returns the weights of one axis, `[to, from]`, row-major.
#[must_use]
pub fn axis_weights(from: usize, to: usize, kind: Bicubic) -> Vec<f64> {
    let offset = if kind == Bicubic::PlainOffset { 0.1 } else { 0.0 };
    let scale = from as f64 / (to as f64 + offset);
    let mut weights = vec![0.0; to * from];
    for (at, row) in weights.chunks_mut(from).enumerate() {
        let centre = scale * (at as f64 + 0.5);
        match kind {
            Bicubic::Antialias => {
                let stretch = scale.max(1.0);
                let first = (centre - 2.0 * stretch + 0.5).max(0.0) as usize;
                let end = ((centre + 2.0 * stretch + 0.5) as usize).min(from);
                for (j, weight) in row.iter_mut().enumerate().take(end).skip(first) {
                    *weight = cubic((j as f64 + 0.5 - centre) / stretch, -0.5);
                }
                let total: f64 = row.iter().sum();
                for weight in row.iter_mut() {
                    *weight /= total;
                }
            }
            Bicubic::Plain | Bicubic::PlainOffset => {
                let source = centre - 0.5;
                let floor = source.floor();
                for offset in -1..=2 {
                    let tap = floor + f64::from(offset);
                    let clamped = tap.clamp(0.0, (from - 1) as f64) as usize;
                    row[clamped] += cubic(source - tap, -0.75);
                }
            }
        }
    }
    weights
}

/// Keys' cubic kernel (1981).
fn cubic(x: f64, a: f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * a
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_half_varies_along_columns() {
        let table = sincos_table([2, 3], 8);
        let row = |index: usize| &table[index * 8..(index + 1) * 8];
        assert_eq!(row(0), [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]);
        let (sin, cos) = (1f64.sin() as f32, 1f64.cos() as f32);
        let (slow_sin, slow_cos) = (0.01f64.sin() as f32, 0.01f64.cos() as f32);
        assert_eq!(row(1), [sin, slow_sin, cos, slow_cos, 0.0, 0.0, 1.0, 1.0], "second column of the first row");
        assert_eq!(row(3), [0.0, 0.0, 1.0, 1.0, sin, slow_sin, cos, slow_cos], "first column of the second row");
    }

    #[test]
    fn resizing_keeps_constants_and_the_same_size_is_the_identity() {
        for kind in [Bicubic::Antialias, Bicubic::Plain, Bicubic::PlainOffset] {
            for (from, to) in [([4, 5], [7, 3]), ([14, 14], [5, 5]), ([2, 2], [9, 4])] {
                for row in resize_matrix(from, to, kind).chunks(from[0] * from[1]) {
                    assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5);
                }
            }
            if kind == Bicubic::PlainOffset {
                continue; // it resizes a grid to its own size too, where the code that has it does not call it
            }
            let same = resize_matrix([3, 4], [3, 4], kind);
            let expected = |i: usize| if i / 12 == i % 12 { 1.0 } else { 0.0 };
            assert!(same.iter().enumerate().all(|(i, &w)| (w - expected(i)).abs() < 1e-6), "{kind:?}");
        }
    }
}
