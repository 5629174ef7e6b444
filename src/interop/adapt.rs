//! Tensors made to fit: patches and positions resampled, input channels folded, sides of 1 dropped.

use super::arch::Arch;
use crate::model::PositionEmbedding;
use crate::model::position::{Bicubic, axis_weights, resize_matrix};

/// How a tensor of a file becomes one of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// As it is.
    Same,
    /// The same values, sides of 1 more or fewer.
    Reshape,
    /// Kernels and input channels of a first convolution.
    Stem,
    /// Rows of a position embedding.
    Positions,
}

/// Finds how a tensor of shape `there` becomes one of shape `here` of the same name.
pub(super) fn step(path: &str, there: &[usize], here: &[usize], from: &Arch, to: &Arch) -> Option<Step> {
    if there == here {
        return Some(match path {
            // the same number of rows may be another grid, or other prefixes
            "pos_embed"
                if grids(there, from, to).is_some_and(|g| g.old != g.new || g.prefix_there != g.prefix_here) =>
            {
                Step::Positions
            }
            _ => Step::Same,
        });
    }
    let sides = |shape: &[usize]| shape.iter().copied().filter(|&side| side != 1).collect::<Vec<_>>();
    if path == "pos_embed" {
        let fits = grids(there, from, to)?;
        let rows = fits.prefix_here + fits.new[0] * fits.new[1];
        return (here.get(1) == Some(&rows) && there.last() == here.last()).then_some(Step::Positions);
    }
    if sides(there) == sides(here) {
        return Some(Step::Reshape);
    }
    let stem = matches!(path, "patch_embed.proj.weight" | "conv1.weight" | "stem.0.weight");
    let (&[outputs, _, rows, columns], &[wanted, _, to_rows, to_columns]) = (there, here) else { return None };
    let same_side = (rows, columns) == (to_rows, to_columns);
    (stem && outputs == wanted && (same_side || path == "patch_embed.proj.weight")).then_some(Step::Stem)
}

/// Describes what is done to a tensor.
pub(super) fn describe(step: Step, there: &[usize], here: &[usize], from: &Arch, to: &Arch) -> String {
    match step {
        Step::Same => String::new(),
        Step::Reshape => "sides of 1 dropped or added".to_owned(),
        Step::Stem => {
            let mut done = Vec::new();
            if there.get(2..) != here.get(2..) {
                done.push(format!(
                    "patches of {} px resampled to {} px (FlexiViT's pseudo-inverse)",
                    there[2], here[2]
                ));
            }
            if there.get(1) != here.get(1) {
                done.push(format!("{} input channels made {}", there[1], here[1]));
            }
            done.join(", ")
        }
        Step::Positions => match grids(there, from, to) {
            Some(Grids { old, new, .. }) if old != new => {
                format!(
                    "positions of {} x {} patches resampled to {} x {} (bicubic, antialiased)",
                    old[0], old[1], new[0], new[1]
                )
            }
            Some(Grids { prefix_there, prefix_here, .. }) if prefix_there > prefix_here => {
                "the class token's position added to the token".to_owned()
            }
            _ => "positions of zero for the class token".to_owned(),
        },
    }
}

/// Grids of a position embedding, and rows in front of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grids {
    pub(super) old: [usize; 2],
    pub(super) new: [usize; 2],
    pub(super) prefix_there: usize,
    pub(super) prefix_here: usize,
}

/// Compares the position embeddings of two networks; `there`: the shape of the one in the file.
pub(super) fn grids(there: &[usize], from: &Arch, to: &Arch) -> Option<Grids> {
    let (Arch::Vit(from), Arch::Vit(to)) = (from, to) else { return None };
    if to.position == PositionEmbedding::Rope || to.num_prefix() != from.num_prefix() {
        return None;
    }
    let rows = *there.get(there.len().checked_sub(2)?)?;
    let (old, new) = (from.grid(), to.grid());
    let prefix_there = rows.checked_sub(old[0] * old[1])?;
    let prefix_here = if to.prefix_positions { to.num_prefix() } else { 0 };
    (prefix_there <= to.num_prefix()).then_some(Grids { old, new, prefix_there, prefix_here })
}

/// Resamples the rows of a position embedding: bicubic with antialiasing, as timm's `resample_abs_pos_embed`.
///
/// # Shapes
/// `[old.0 * old.1, dim]` to `[new.0 * new.1, dim]`.
///
/// # Panics
/// When the table has another size.
#[must_use]
pub fn resample_positions(table: &[f32], old: [usize; 2], new: [usize; 2], kind: Bicubic) -> Vec<f32> {
    let rows = old[0] * old[1];
    assert!(rows > 0 && table.len().is_multiple_of(rows), "{} values in {rows} rows", table.len());
    if old == new {
        return table.to_vec();
    }
    let dim = table.len() / rows;
    let mut out = Vec::with_capacity(new[0] * new[1] * dim);
    for weights in resize_matrix(old, new, kind).chunks(rows) {
        let mut row = vec![0.0f64; dim];
        for (weight, values) in weights.iter().zip(table.chunks(dim)).filter(|(weight, _)| **weight != 0.0) {
            for (sum, value) in row.iter_mut().zip(values) {
                *sum += f64::from(*weight) * f64::from(*value);
            }
        }
        out.extend(row.into_iter().map(|value| value as f32));
    }
    out
}

/// Resamples the kernels of a patch embedding so that resampled patches give the same tokens as nearly as can be: the pseudo-inverse of bicubic resizing
/// (Beyer et al., 2022, <https://arxiv.org/abs/2212.08013>, section 3.4; timm's `resample_patch_embed`, which antialiases).
///
/// None: the resizing has no such inverse.
///
/// # Shapes
/// `[.., old.0, old.1]` to `[.., new.0, new.1]`.
#[must_use]
pub fn resample_patches(kernels: &[f32], old: [usize; 2], new: [usize; 2], kind: Bicubic) -> Option<Vec<f32>> {
    if old == new {
        return Some(kernels.to_vec());
    }
    // resizing is separable, and so is its pseudo-inverse
    let (down, across) = (pseudo_inverse(old[0], new[0], kind)?, pseudo_inverse(old[1], new[1], kind)?);
    let mut out = Vec::with_capacity(kernels.len() / (old[0] * old[1]) * new[0] * new[1]);
    for kernel in kernels.chunks_exact(old[0] * old[1]) {
        let mut half = vec![0.0f64; old[0] * new[1]];
        for (row, values) in kernel.chunks_exact(old[1]).enumerate() {
            for (column, weights) in across.chunks_exact(old[1]).enumerate() {
                half[row * new[1] + column] = weights.iter().zip(values).map(|(w, v)| w * f64::from(*v)).sum();
            }
        }
        for weights in down.chunks_exact(old[0]) {
            for column in 0..new[1] {
                let value: f64 = weights.iter().enumerate().map(|(row, w)| w * half[row * new[1] + column]).sum();
                out.push(value as f32);
            }
        }
    }
    Some(out)
}

/// Returns the pseudo-inverse of the transposed matrix that resizes an axis, `[to, from]`.
fn pseudo_inverse(from: usize, to: usize, kind: Bicubic) -> Option<Vec<f64>> {
    let resize = axis_weights(from, to, kind); // [to, from]
    let row = |i: usize| &resize[i * from..(i + 1) * from];
    if to <= from {
        // (A A^T)^-1 A
        let gram: Vec<f64> = (0..to * to).map(|k| dot(row(k / to), row(k % to))).collect();
        return solve(gram, to, resize.clone(), from);
    }
    // A (A^T A)^-1, by its transpose
    let mut gram = vec![0.0; from * from];
    let mut transposed = vec![0.0; from * to];
    for (i, values) in resize.chunks_exact(from).enumerate() {
        for (j, value) in values.iter().enumerate() {
            transposed[j * to + i] = *value;
            for (k, other) in values.iter().enumerate() {
                gram[j * from + k] += value * other;
            }
        }
    }
    let solved = solve(gram, from, transposed, to)?; // [from, to]
    Some((0..to * from).map(|k| solved[k % from * to + k / from]).collect())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Solves `M X = B` for a symmetric positive matrix of side `n` and `columns` columns, by Gauss's elimination with pivots.
fn solve(mut m: Vec<f64>, n: usize, mut b: Vec<f64>, columns: usize) -> Option<Vec<f64>> {
    for at in 0..n {
        let pivot = (at..n).max_by(|&i, &j| m[i * n + at].abs().total_cmp(&m[j * n + at].abs()))?;
        if m[pivot * n + at].abs() < 1e-9 {
            return None;
        }
        if pivot != at {
            (0..n).for_each(|k| m.swap(pivot * n + k, at * n + k));
            (0..columns).for_each(|k| b.swap(pivot * columns + k, at * columns + k));
        }
        for row in (0..n).filter(|&row| row != at) {
            let factor = m[row * n + at] / m[at * n + at];
            if factor != 0.0 {
                for k in at..n {
                    m[row * n + k] -= factor * m[at * n + k];
                }
                for k in 0..columns {
                    b[row * columns + k] -= factor * b[at * columns + k];
                }
            }
        }
    }
    for row in 0..n {
        let scale = m[row * n + row];
        b[row * columns..(row + 1) * columns].iter_mut().for_each(|value| *value /= scale);
    }
    Some(b)
}

/// Makes a convolution of `from` input channels one of `to`: one is the sum of all, other numbers repeat them in turn, times `from / to` (timm's
/// `adapt_input_conv`, which knows 3 channels only).
///
/// # Shapes
/// `[outputs, from, area]` to `[outputs, to, area]`.
///
/// # Panics
/// When the weights do not divide so.
#[must_use]
pub fn adapt_channels(weights: &[f32], from: usize, to: usize, area: usize) -> Vec<f32> {
    assert!(from * area > 0 && weights.len().is_multiple_of(from * area), "{} weights", weights.len());
    if from == to {
        return weights.to_vec();
    }
    let scale = from as f64 / to as f64;
    let outputs = weights.chunks_exact(from * area);
    let adapted = outputs.flat_map(|kernel| {
        let channel = move |index: usize| &kernel[index * area..(index + 1) * area];
        (0..to).flat_map(move |index| {
            (0..area).map(move |at| {
                if to == 1 {
                    (0..from).map(|index| f64::from(channel(index)[at])).sum::<f64>() as f32
                } else {
                    (f64::from(channel(index % from)[at]) * scale) as f32
                }
            })
        })
    });
    adapted.collect()
}
