//! What the tests of the operations share.

use burn::tensor::{Device, Tensor, TensorData};

/// Values in (-1, 1) that look random and depend on the arguments alone.
pub(super) fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32) / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// The same values in float64.
pub(super) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// A flat tensor.
pub(super) fn flat(values: &[f32], device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), device)
}

/// The values of a tensor.
pub(super) fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Flattens a tensor of any rank.
pub(super) fn flatten<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    let len = tensor.shape().num_elements();
    tensor.reshape([len])
}

/// What arrives from above in the backward pass of [`gradients`].
pub(super) fn probe(len: usize) -> Vec<f32> {
    values(len, 99)
}

/// Runs a function of leaves and returns its value and the gradients of `sum(value * probe)`.
pub(super) fn gradients(inputs: &[&[f32]], f: impl Fn(&[Tensor<1>]) -> Tensor<1>) -> Vec<Vec<f32>> {
    let device = Device::flex().autodiff();
    let leaves: Vec<_> = inputs.iter().map(|values| flat(values, &device).require_grad()).collect();
    let y = f(&leaves);
    let value = read(y.clone());
    let grads = (y * flat(&probe(value.len()), &device)).sum().backward();
    let gradient = |leaf: &Tensor<1>| leaf.grad(&grads).map_or_else(Vec::new, read);
    std::iter::once(value).chain(leaves.iter().map(gradient)).collect()
}

/// Largest difference, relative to the largest expected value; or to one, the size of the terms, where sums cancel to less.
pub(super) fn error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1.0, |max: f64, value| max.max(value.abs()));
    let difference = |(found, expected): (&f32, &f64)| (f64::from(*found) - expected).abs();
    found.iter().zip(expected).map(difference).fold(0.0, |max: f64, x| if x > max || x.is_nan() { x } else { max })
        / scale
}

/// Asserts that each result is within `tolerance` of float64, and returns the worst error.
#[track_caller]
pub(super) fn assert_close(what: &str, found: &[Vec<f32>], expected: &[Vec<f64>], tolerance: f64) -> f64 {
    assert_eq!(found.len(), expected.len(), "{what}");
    let mut worst = 0.0f64;
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = error(found, expected);
        assert!(error <= tolerance, "{what}: result {i} is off by {error:.2e}");
        worst = worst.max(error);
    }
    worst
}

/// Asserts that a function gives the same bits on plain tensors, on untracked and on tracked ones, and on threads of pools
/// of one and of two.
#[track_caller]
pub(super) fn assert_same_bits(inputs: &[&[f32]], f: impl Fn(&[Tensor<1>]) -> Tensor<1> + Sync) {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let on = |device: &Device, track: bool| {
        let leaf = |values: &&[f32]| flat(values, device).set_require_grad(track);
        bits(read(f(&inputs.iter().map(leaf).collect::<Vec<_>>())))
    };
    let plain = on(&Device::flex(), false);
    assert_eq!(plain, on(&Device::flex().autodiff(), false), "untracked");
    assert_eq!(plain, on(&Device::flex().autodiff(), true), "tracked");
    let all = || gradients(inputs, &f).into_iter().map(bits).collect::<Vec<_>>();
    let here = all();
    assert_eq!(here[0], plain);
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(all), here, "in a pool of {threads}");
    }
}

/// The error function in float64, by its Taylor series.
pub(super) fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..120 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}
