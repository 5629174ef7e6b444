//! Gram anchoring: the similarities of an image's patches stay those of an earlier teacher.
//!
//! Simeoni et al., 2025 (`DINOv3`), <https://arxiv.org/abs/2508.10104>, equation 3: the squared difference of the Gram matrices of normalised
//! patch features, as a mean. Negative similarities may count as zero.

use burn::tensor::Tensor;

use super::reduce::total;
use super::rows::l2_normalize;

/// Smallest norm a patch is divided by, torch's.
const MIN_NORM: f64 = 1e-12;

/// What becomes of negative similarities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Negatives {
    /// They count.
    Keep,
    /// They are zero, of both networks.
    Zero,
    /// They are zero in the teacher, and in the student where the teacher's is negative too.
    ZeroOfTeacher,
}

/// Returns the mean squared difference of each image's Gram matrices, summed over the b images; divide by b.
///
/// For one Gram matrix over all the patches of a batch (the official option `img_level = false`) pass them as one image,
/// `[1, b * n, d]`; the count is 1 then.
///
/// # Shapes
/// - `student`, `teacher`: `[b, n, d]`, patch features; no gradient reaches the teacher.
/// - `normalize`: whether features are divided by their length first.
/// - output: `[1]`
///
/// # Panics
/// If the numbers of images or patches differ.
#[must_use]
pub fn gram(student: Tensor<3>, teacher: Tensor<3>, normalize: bool, negatives: Negatives) -> Tensor<1> {
    let [batch, patches, _] = student.dims();
    assert_eq!(teacher.dims()[..2], [batch, patches], "the teacher sees the student's patches");
    let matrix = |features: Tensor<3>| {
        let features = if normalize { l2_normalize(features, MIN_NORM) } else { features };
        features.clone().matmul(features.transpose()) // [b, n, n]
    };
    let (student, teacher) = (matrix(student), matrix(teacher.detach()));
    let (student, teacher) = match negatives {
        Negatives::Keep => (student, teacher),
        Negatives::Zero => (student.clamp_min(0.0), teacher.clamp_min(0.0)),
        Negatives::ZeroOfTeacher => {
            let both = student.clone().detach().lower_elem(0.0).bool_and(teacher.clone().lower_elem(0.0));
            (student.mask_fill(both, 0.0), teacher.clamp_min(0.0))
        }
    };
    total((student - teacher).square()) / (patches * patches) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, norm, tensor, values};

    #[test]
    fn agrees_with_the_definition() {
        let (batch, n, dim) = (2, 4, 3);
        let teacher = values(batch * n * dim, 0.6);
        for (normalize, negatives) in [
            (true, Negatives::Zero),
            (true, Negatives::Keep),
            (false, Negatives::Zero),
            (false, Negatives::ZeroOfTeacher),
            (true, Negatives::ZeroOfTeacher),
        ] {
            let dot = |x: &[f64], b: usize, i: usize, j: usize| {
                let row = |i: usize| &x[(b * n + i) * dim..(b * n + i + 1) * dim];
                let length = |i: usize| if normalize { norm(row(i), 1e-12) } else { 1.0 };
                row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum::<f64>() / length(i) / length(j)
            };
            let naive = |x: &[Vec<f64>]| {
                let mut sum = 0.0;
                for b in 0..batch {
                    for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))) {
                        let (mut s, mut t) = (dot(&x[0], b, i, j), dot(&teacher, b, i, j));
                        if negatives == Negatives::Zero || (negatives == Negatives::ZeroOfTeacher && t < 0.0) {
                            s = s.max(0.0);
                        }
                        if negatives != Negatives::Keep {
                            t = t.max(0.0);
                        }
                        sum += (s - t).powi(2) / (n * n) as f64;
                    }
                }
                sum
            };
            let loss = |x: Vec<Tensor<3>>| gram(x[0].clone(), tensor(&teacher, [batch, n, dim]), normalize, negatives);
            agrees(&[(values(batch * n * dim, 0.1), [batch, n, dim])], loss, naive);
        }
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for x in [vec![0.0; 12], vec![2.0; 12], values(3, 0.1).repeat(4)] {
            for negatives in [Negatives::Keep, Negatives::Zero, Negatives::ZeroOfTeacher] {
                let shape = [2, 2, 3];
                finite(&[(x.clone(), shape), (vec![0.0; 12], shape)], |x| {
                    gram(x[0].clone(), x[1].clone(), true, negatives)
                        + gram(x[1].clone(), x[0].clone(), true, negatives)
                });
            }
        }
    }
}
