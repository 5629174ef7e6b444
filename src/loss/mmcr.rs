//! MMCR: centroids of images span much, views of one image little.
//!
//! Yerxa, Kuang, Simoncelli, Chung, 2023, <https://arxiv.org/abs/2303.03307>, equation 3: `-|C|_* + lambda mean |Z_b|_*`, nuclear norms of the
//! matrix of centroids and of each image's views. Embeddings are taken as they come; the paper normalises them first.
//!
//! The norm's gradient `U V^T` comes from a singular value decomposition on the host in float64 (one-sided Jacobi rotations), at a cost of
//! about `8 max(b, d) min(b, d)^2` multiplications a sweep. Deviation: directions without extent get the gradient zero, where an
//! automatic derivative takes arbitrary vectors.

use burn::tensor::{Tensor, TensorData};

use super::reduce::total;

/// Returns the loss of a batch; its count is 1.
///
/// # Shapes
/// - `online`, `momentum`: `[b, k, d]`, embeddings of `k` views of each image by both networks; no gradient reaches `momentum`.
/// - output: `[1]`
///
/// # Panics
/// If the shapes differ.
#[must_use]
pub fn mmcr(online: Tensor<3>, momentum: Tensor<3>, lambda: f64) -> Tensor<1> {
    let [batch, views, dim] = online.dims();
    assert_eq!(momentum.dims(), [batch, views, dim], "both networks see the same views");
    let all = Tensor::cat(vec![online, momentum.detach()], 1); // [b, 2 * k, d]
    let centroids = all.clone().mean_dim(1).reshape([1, batch, dim]);
    nuclear_norms(all) * (lambda / batch as f64) - nuclear_norms(centroids)
}

/// Returns the sum of the nuclear norms of `n` matrices, `[n, rows, columns]` to `[1]`.
fn nuclear_norms(matrices: Tensor<3>) -> Tensor<1> {
    let [count, rows, columns] = matrices.dims();
    let data: Vec<f32> = matrices.clone().detach().into_data().try_to_vec().expect("embeddings are float32");
    let polar = data.chunks(rows * columns).flat_map(|matrix| polar_factor(matrix, columns)).collect();
    let polar = Tensor::<3>::from_data(TensorData::new(polar, [count, rows, columns]), &matrices.device());
    // the norm is the inner product with its own gradient
    total(matrices * polar)
}

/// Returns `U V^T` of the decomposition `U S V^T` of a matrix, row by row.
fn polar_factor(matrix: &[f32], columns: usize) -> Vec<f32> {
    let rows = matrix.len() / columns;
    let at = |row: usize, column: usize| f64::from(matrix[row * columns + column]);
    // the shorter side is rotated: vectors of the longer length, as many as the shorter side has
    let tall = rows >= columns;
    let (count, length) = if tall { (columns, rows) } else { (rows, columns) };
    let entry = |vector: usize, i: usize| if tall { at(i, vector) } else { at(vector, i) };
    let mut vectors: Vec<Vec<f64>> = (0..count).map(|v| (0..length).map(|i| entry(v, i)).collect()).collect();
    let mut rotation: Vec<Vec<f64>> =
        (0..count).map(|v| (0..count).map(|i| if i == v { 1.0 } else { 0.0 }).collect()).collect();
    orthogonalize(&mut vectors, &mut rotation);

    let lengths: Vec<f64> = vectors.iter().map(|v| dot(v, v).sqrt()).collect();
    let smallest = lengths.iter().fold(0.0f64, |m, &l| m.max(l)) * 1e-7; // what float32 inputs can tell from zero
    let mut polar = vec![0.0f64; rows * columns];
    for ((vector, turned), &size) in vectors.iter().zip(&rotation).zip(&lengths) {
        if size <= smallest {
            continue;
        }
        for (i, v) in vector.iter().enumerate() {
            for (j, r) in turned.iter().enumerate() {
                polar[if tall { i * columns + j } else { j * columns + i }] += v / size * r;
            }
        }
    }
    polar.into_iter().map(|v| v as f32).collect()
}

/// Rotates pairs of vectors until all are orthogonal (Hestenes, 1958), and `rotation` with them.
fn orthogonalize(vectors: &mut [Vec<f64>], rotation: &mut [Vec<f64>]) {
    for _ in 0..60 {
        let mut rotated = false;
        for second in 1..vectors.len() {
            for first in 0..second {
                let (a, b) = (dot(&vectors[first], &vectors[first]), dot(&vectors[second], &vectors[second]));
                let c = dot(&vectors[first], &vectors[second]);
                if c.abs() <= 1e-15 * (a * b).sqrt() {
                    continue;
                }
                rotated = true;
                let zeta = (b - a) / (2.0 * c);
                let tangent = zeta.signum() / (zeta.abs() + zeta.hypot(1.0));
                let cosine = 1.0 / tangent.hypot(1.0);
                rotate(vectors, first, second, cosine, tangent * cosine);
                rotate(rotation, first, second, cosine, tangent * cosine);
            }
        }
        if !rotated {
            break;
        }
    }
}

fn rotate(vectors: &mut [Vec<f64>], first: usize, second: usize, cosine: f64, sine: f64) {
    let (head, tail) = vectors.split_at_mut(second);
    for (x, y) in head[first].iter_mut().zip(&mut tail[0]) {
        (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, graph, tensor, values};

    #[test]
    fn a_polar_factor_is_orthogonal_and_completes_to_a_symmetric_matrix() {
        for (rows, columns) in [(3, 3), (7, 4), (4, 7), (1, 5)] {
            let matrix: Vec<f32> = values(rows * columns, 0.2).iter().map(|&v| v as f32).collect();
            let polar = polar_factor(&matrix, columns);
            let n = rows.min(columns);
            let at = |m: &[f32], vector: usize, i: usize| {
                f64::from(if rows >= columns { m[i * columns + vector] } else { m[vector * columns + i] })
            };
            let product = |x: &[f32], y: &[f32], a: usize, b: usize| {
                (0..rows.max(columns)).map(|i| at(x, a, i) * at(y, b, i)).sum::<f64>()
            };
            for (a, b) in (0..n).flat_map(|a| (0..n).map(move |b| (a, b))) {
                assert!((product(&polar, &polar, a, b) - f64::from(u8::from(a == b))).abs() < 1e-5);
                assert!((product(&polar, &matrix, a, b) - product(&polar, &matrix, b, a)).abs() < 1e-5);
            }
        }
    }

    /// The nuclear norm of a matrix of two rows: `sqrt(|A|_F^2 + 2 sqrt(det(A A^T)))`.
    fn two_rows(a: &[f64], b: &[f64]) -> f64 {
        (dot(a, a) + dot(b, b) + 2.0 * (dot(a, a) * dot(b, b) - dot(a, b).powi(2)).sqrt()).sqrt()
    }

    #[test]
    fn agrees_with_the_closed_form_of_two_images_with_one_view() {
        let (dim, lambda) = (4, 0.3);
        let momentum = values(2 * dim, 0.6);
        let naive = |x: &[Vec<f64>]| {
            let mean = |b: usize| {
                (0..dim).map(|i| f64::midpoint(x[0][b * dim + i], momentum[b * dim + i])).collect::<Vec<_>>()
            };
            let views = |b: usize| two_rows(&x[0][b * dim..(b + 1) * dim], &momentum[b * dim..(b + 1) * dim]);
            lambda * (views(0) + views(1)) / 2.0 - two_rows(&mean(0), &mean(1))
        };
        let loss = |x: Vec<Tensor<3>>| mmcr(x[0].clone(), tensor(&momentum, [2, 1, dim]), lambda);
        agrees(&[(values(2 * dim, 0.1), [2, 1, dim])], loss, naive);
    }

    #[test]
    fn collapse_stays_finite() {
        for x in
            [vec![0.0; 24], vec![1.0; 24], values(4, 0.2).repeat(6), values(24, 0.1).iter().map(|v| v * 1e6).collect()]
        {
            finite(&[(x, [2, 3, 4])], |x| mmcr(x[0].clone(), x[0].clone(), 0.005));
        }
        let (_, gradients) = graph(&[(values(12, 0.1), [3, 2, 2])], |x| {
            mmcr(Tensor::zeros([3, 2, 2], &x[0].device()), x[0].clone(), 0.1)
        });
        assert!(gradients[0].iter().all(|&g| g == 0.0), "the momentum network has no gradient");
    }
}
