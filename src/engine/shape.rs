//! How the embeddings of a batch lie on the sphere: all at a point, along a line, or spread over it.

use burn::tensor::Tensor;

/// Rows that the rank is taken of, the first; more would cost and say little.
const ROWS: usize = 64;
/// Rows below which a rank means little.
const FEWEST: usize = 8;

/// Numbers that shrink when embeddings collapse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Standard deviation of the rows, scaled to length 1, times the root of the dimension: about 1 when they fill the sphere, 0 when they are a point
    /// (`SimSiam`, Chen & He, 2020, <https://arxiv.org/abs/2011.10566>, figure 2).
    pub spread: f64,
    /// Effective number of directions they differ in: `(sum e)^2 / sum e^2` of the eigenvalues of their covariance (participation ratio). From 1,
    /// a line, to the dimension or one less than the rows; nothing for fewer than 8 rows, of which two always lie on a line.
    pub rank: Option<f64>,
}

impl Shape {
    /// Measures rows `[images, dim]`; one row has no shape.
    pub(super) fn of(embeddings: Tensor<2>) -> Option<Self> {
        let [images, dim] = embeddings.dims();
        if images < 2 {
            return None;
        }
        let mut values = embeddings.into_data().try_to_vec::<f32>().expect("networks compute in fp32");
        for row in values.chunks_exact_mut(dim.max(1)) {
            let norm = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt().max(1e-12);
            for x in row {
                *x = (f64::from(*x) / norm) as f32;
            }
        }
        let rows: Vec<&[f32]> = values.chunks_exact(dim.max(1)).collect();
        // rows have length 1, so the variances of all dimensions add up to 1 - |mean|^2
        let length = mean(&rows).iter().map(|m| m * m).sum::<f64>();
        Some(Self {
            spread: (1.0 - length).max(0.0).sqrt(),
            rank: (images >= FEWEST).then(|| rank(&rows[..images.min(ROWS)])),
        })
    }
}

fn mean(rows: &[&[f32]]) -> Vec<f64> {
    let mut mean = vec![0.0f64; rows[0].len()];
    for row in rows {
        for (mean, &x) in mean.iter_mut().zip(*row) {
            *mean += f64::from(x) / rows.len() as f64;
        }
    }
    mean
}

/// The covariance and the matrix of the rows' inner products have the same eigenvalues, and sums of those and of their squares are a trace and a
/// squared norm.
fn rank(rows: &[&[f32]]) -> f64 {
    let mean = mean(rows);
    let centred: Vec<Vec<f32>> =
        rows.iter().map(|row| row.iter().zip(&mean).map(|(&x, m)| (f64::from(x) - m) as f32).collect()).collect();
    let (mut trace, mut squares) = (0.0, 0.0);
    for (index, row) in centred.iter().enumerate() {
        let own = dot(row, row);
        trace += own;
        squares += own * own + 2.0 * centred[..index].iter().map(|other| dot(row, other).powi(2)).sum::<f64>();
    }
    // rows that are all the same differ in no direction
    if squares > 0.0 {
        trace * trace / squares
    } else if squares == 0.0 {
        0.0
    } else {
        squares
    }
}

/// In lanes, so that it compiles to vector instructions.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0.0f32; 16];
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    fn shape(rows: &[Vec<f32>]) -> Option<Shape> {
        let data = TensorData::new(rows.concat(), [rows.len(), rows[0].len()]);
        Shape::of(Tensor::from_data(data, &Device::flex()))
    }

    #[test]
    fn a_point_a_line_and_a_sphere() {
        assert_eq!(shape(&[vec![1.0, 2.0]]), None);
        assert_eq!(shape(&vec![vec![3.0, 4.0, 0.0]; 7]).unwrap().rank, None);
        let point = shape(&vec![vec![3.0, 4.0, 0.0]; 8]).unwrap();
        assert!(point.spread < 1e-3 && point.rank.unwrap() < 1.1, "{point:?}");
        // both ends of a line: spread without rank
        let line: Vec<_> = (0..40).map(|i| vec![if i % 2 == 0 { 1.0 } else { -1.0 }, 0.0, 0.0]).collect();
        let line = shape(&line).unwrap();
        assert!((line.spread - 1.0).abs() < 1e-6 && (line.rank.unwrap() - 1.0).abs() < 1e-6, "{line:?}");
        // the corners of a cross in 20 dimensions (more than the lanes of a register)
        let corner = |i: usize| (0..20).map(|d| if d == i / 2 { 1.0 - 2.0 * (i % 2) as f32 } else { 0.0 }).collect();
        let cross = shape(&(0..40).map(corner).collect::<Vec<Vec<f32>>>()).unwrap();
        assert!((cross.spread - 1.0).abs() < 1e-6 && (cross.rank.unwrap() - 20.0).abs() < 1e-4, "{cross:?}");
    }

    #[test]
    fn what_is_not_a_number_stays_so() {
        let mut rows = vec![vec![1.0, 0.0]; 8];
        rows[3][1] = f32::NAN;
        let bad = shape(&rows).unwrap();
        assert!(bad.rank.unwrap().is_nan(), "{bad:?}");
        assert_eq!(shape(&vec![vec![0.0, 0.0]; 8]).unwrap().rank, Some(0.0));
    }
}
