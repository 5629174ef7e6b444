//! Random directions that a sliced loss looks along.

use burn::tensor::{Device, Tensor, TensorData};

use super::rows::l2_normalize;
use crate::rng::Stream;

/// Draws directions uniformly, one a column, each of length one. One stream a step: what crosses images is the same for every rank.
///
/// # Shapes
/// `[dim, slices]`.
#[must_use]
pub fn random_directions(stream: &mut Stream, dim: usize, slices: usize, device: &Device) -> Tensor<2> {
    let values: Vec<f32> = (0..dim * slices).map(|_| stream.normal() as f32).collect();
    unit_columns(Tensor::from_data(TensorData::new(values, [dim, slices]), device))
}

/// Divides each column by its length.
pub(super) fn unit_columns(directions: Tensor<2>) -> Tensor<2> {
    l2_normalize(directions.detach().transpose(), 1e-12).transpose()
}

/// Projects each embedding of each view on each direction.
///
/// # Shapes
/// `[v, b, d]` and `[d, s]` to `[v, b, s]`.
pub(super) fn project(views: Tensor<3>, directions: Tensor<2>) -> Tensor<3> {
    let ([count, batch, dim], [width, slices]) = (views.dims(), directions.dims());
    assert_eq!(width, dim, "directions and embeddings have one width");
    views.reshape([count * batch, dim]).matmul(unit_columns(directions)).reshape([count, batch, slices])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::numbers;
    use crate::rng::Purpose;

    #[test]
    fn directions_are_unit_keyed_and_fill_the_space() {
        let draw = |step: u64| {
            let mut stream = Stream::new(1, Purpose::Mask, &[step]);
            numbers(random_directions(&mut stream, 5, 200, &Device::flex()))
        };
        let got = draw(3);
        for slice in 0..200 {
            let length: f64 = (0..5).map(|i| got[i * 200 + slice].powi(2)).sum();
            assert!((length - 1.0).abs() < 1e-5);
        }
        assert!((0..5).all(|i| (got[i * 200..(i + 1) * 200].iter().sum::<f64>() / 200.0).abs() < 0.15));
        assert!(got == draw(3) && got != draw(4));
    }
}
