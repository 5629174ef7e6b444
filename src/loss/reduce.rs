//! A sum whose order of additions depends on the shape alone.

use burn::tensor::Tensor;

/// Adjacent elements that are added first. Any value far below [`SHORT`] would do.
const ROW: usize = 1024;

/// Up to here `Tensor::sum` is one sequential loop; burn-flex hands 4 Mi elements and more to rayon, which adds them in any order.
const SHORT: usize = 1 << 20;

/// Sums all elements, in an order that depends on the number of elements alone: rows of 1024, then the rows' sums.
///
/// # Shapes
/// `[...]` to `[1]`.
#[must_use]
pub fn total<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    let len = tensor.dims().iter().product::<usize>();
    total_flat(tensor.reshape([len]))
}

fn total_flat(values: Tensor<1>) -> Tensor<1> {
    let [len] = values.dims();
    if len <= SHORT {
        return values.sum();
    }
    let whole = len / ROW * ROW;
    let rows = values.clone().narrow(0, 0, whole).reshape([whole / ROW, ROW]).sum_dim(1).reshape([whole / ROW]);
    if whole == len { total_flat(rows) } else { total_flat(rows) + values.narrow(0, whole, len - whole).sum() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

    #[test]
    fn adds_every_element_once() {
        for len in [1, 1000, SHORT, SHORT + 1, SHORT + ROW, 3 * SHORT + 17] {
            let values: Vec<f32> = (0..len).map(|i| ((i % 7) as f32) - 3.0).collect();
            let expected: f64 = values.iter().map(|&v| f64::from(v)).sum();
            let tensor = Tensor::<2>::from_data(TensorData::new(values, [1, len]), &Device::flex());
            let got: f32 = total(tensor).into_scalar();
            assert_eq!(f64::from(got), expected, "{len}");
        }
    }

    #[test]
    fn gradient_is_one_everywhere() {
        let len = SHORT + 3;
        let device = Device::flex().autodiff();
        let leaf = Tensor::<1>::zeros([len], &device).require_grad();
        let gradients = total(leaf.clone()).backward();
        let gradient: Vec<f32> = leaf.grad(&gradients).unwrap().into_data().try_to_vec().unwrap();
        assert!(gradient.len() == len && gradient.iter().all(|&g| g == 1.0));
    }
}
