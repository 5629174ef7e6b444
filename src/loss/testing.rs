//! What the tests of the losses share: inputs, a float64 reference for value and gradient, and a check that nothing overflows.

use burn::tensor::{Device, Tensor, TensorData};

/// Values in [-1, 1), spread evenly, the same on every machine.
pub(crate) fn values(len: usize, seed: f64) -> Vec<f64> {
    (0..len)
        .map(|i| ((i as f64 + 1.0) * 0.618_033_988_749_894_9 + seed).fract() * 2.0 - 1.0)
        .map(|v| f64::from(v as f32))
        .collect()
}

/// A tensor that records gradients.
pub(crate) fn tensor<const D: usize>(values: &[f64], shape: [usize; D]) -> Tensor<D> {
    let data: Vec<f32> = values.iter().map(|&v| v as f32).collect();
    Tensor::from_data(TensorData::new(data, shape), &Device::flex().autodiff())
}

pub(crate) fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().try_to_vec::<f32>().unwrap().into_iter().map(f64::from).collect()
}

/// The loss and its gradient for each input; zeros for an input that no gradient reaches.
pub(crate) fn graph<const D: usize>(
    inputs: &[(Vec<f64>, [usize; D])],
    loss: impl Fn(Vec<Tensor<D>>) -> Tensor<1>,
) -> (f64, Vec<Vec<f64>>) {
    let leaves: Vec<Tensor<D>> = inputs.iter().map(|(v, shape)| tensor(v, *shape).require_grad()).collect();
    let value = loss(leaves.clone());
    let gradients = value.backward();
    let of = |leaf: &Tensor<D>| leaf.grad(&gradients).map_or_else(|| vec![0.0; leaf.dims().iter().product()], numbers);
    (numbers(value)[0], leaves.iter().map(of).collect())
}

/// Compares a loss with its definition in float64, and its gradients with central differences of the definition.
pub(crate) fn agrees<const D: usize>(
    inputs: &[(Vec<f64>, [usize; D])],
    loss: impl Fn(Vec<Tensor<D>>) -> Tensor<1>,
    naive: impl Fn(&[Vec<f64>]) -> f64,
) {
    let (value, gradients) = graph(inputs, loss);
    let points: Vec<Vec<f64>> = inputs.iter().map(|(values, _)| values.clone()).collect();
    let expected = naive(&points);
    assert!((value - expected).abs() < 1e-5 * expected.abs().max(1.0), "loss: {value}, expected {expected}");
    let h = 1e-6;
    for (which, gradient) in gradients.iter().enumerate() {
        for (i, got) in gradient.iter().enumerate() {
            let moved = |by: f64| {
                let mut points = points.clone();
                points[which][i] += by;
                naive(&points)
            };
            let expected = (moved(h) - moved(-h)) / (2.0 * h);
            assert!(
                (got - expected).abs() < 2e-4 * expected.abs().max(1.0),
                "gradient {i} of input {which}: {got}, expected {expected}"
            );
        }
    }
}

/// Checks that loss and gradients are finite, and returns the loss.
pub(crate) fn finite<const D: usize>(
    inputs: &[(Vec<f64>, [usize; D])],
    loss: impl Fn(Vec<Tensor<D>>) -> Tensor<1>,
) -> f64 {
    let (value, gradients) = graph(inputs, loss);
    assert!(value.is_finite(), "loss: {value}");
    assert!(gradients.iter().flatten().all(|g| g.is_finite()), "gradients: {gradients:?}");
    value
}

/// Pairs of `[batch, dim]` inputs that break careless code: zeros, constants, duplicates, opposites, large and tiny values.
pub(crate) fn ugly_pairs(batch: usize, dim: usize) -> Vec<[(Vec<f64>, [usize; 2]); 2]> {
    let len = batch * dim;
    let (plain, other) = (values(len, 0.2), values(len, 0.7));
    let row = values(dim, 0.4);
    let scaled = |by: f64| plain.iter().map(|v| v * by).collect::<Vec<_>>();
    let mut one_zero = plain.clone();
    one_zero[..dim].fill(0.0);
    [
        (vec![0.0; len], vec![0.0; len]),
        (one_zero, other.clone()),
        (vec![0.3; len], vec![0.3; len]),
        (row.repeat(batch), row.repeat(batch)),
        (plain.clone(), scaled(-1.0)),
        (scaled(1e4), other.clone()),
        (scaled(1e-7), other),
    ]
    .map(|(a, b)| [(a, [batch, dim]), (b, [batch, dim])])
    .into()
}

/// The Euclidean norm of a row, at least `min`.
pub(crate) fn norm(row: &[f64], min: f64) -> f64 {
    row.iter().map(|v| v * v).sum::<f64>().sqrt().max(min)
}

/// The cosine of two rows, zero rows as in `l2_normalize`.
pub(crate) fn cosine(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() / norm(a, 1e-6) / norm(b, 1e-6)
}
