//! Linear centred kernel alignment.

use super::features::Features;
use super::linalg::{centered_columns, dot, products};

/// Returns how alike two representations of the same images are, from 0 to 1:
/// `|Y'X|^2 / (|X'X| |Y'Y|)` with centred columns and Frobenius norms (Kornblith et al., 2019,
/// <https://arxiv.org/abs/1905.00414>, equation 5, biased HSIC). A constant representation is like none: 0.
///
/// # Panics
/// When the numbers of images differ.
pub fn linear_cka(x: &Features, y: &Features) -> f64 {
    assert_eq!(x.rows(), y.rows(), "two representations of the same images");
    let (left, right) = (centered_columns(&x.to_f64(), x.dim()), centered_columns(&y.to_f64(), y.dim()));
    let squared_norm = |a: &[f64], b: &[f64]| {
        let product = products(a, b, x.rows());
        dot(&product, &product)
    };
    let own = (squared_norm(&left, &left) * squared_norm(&right, &right)).sqrt();
    if own > 0.0 { squared_norm(&right, &left) / own } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_shift_and_rotation_do_not_matter() {
        let values: Vec<f32> = (0..24u32).map(|i| (f64::from(i * i) * 0.61).cos() as f32).collect();
        let x = Features::new(values.clone(), 2).unwrap();
        let turned: Vec<f32> = values.chunks(2).flat_map(|p| [3.0 * p[1] + 1.0, -3.0 * p[0]]).collect();
        assert!((linear_cka(&x, &Features::new(turned, 2).unwrap()) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_constant_representation_is_like_none() {
        let x = Features::new(vec![1.0, 2.0, 3.0], 1).unwrap();
        assert_eq!(linear_cka(&x, &Features::new(vec![5.0; 6], 2).unwrap()), 0.0);
    }
}
