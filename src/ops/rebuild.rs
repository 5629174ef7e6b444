//! Rectified batch norm that is computed again in the backward pass instead of being kept for it.
//!
//! Between two convolutions a network keeps two tensors: what the first put out (batch norm's input) and what the second takes in. The second
//! follows from the first by one pass over memory, with the same bits. So neither batch norm nor the convolution keeps it: the convolution's backward
//! pass builds it, and batch norm's, which comes next, takes it over for its mask.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::flex::FlexTensor;

use super::batch_norm::apply;
use super::bridge::slice;
use super::memory::buffer;

/// What a rectified batch norm put out, and how to compute it again.
#[derive(Clone, Debug)]
pub struct Rebuild(Arc<Recipe>);

#[derive(Debug)]
struct Recipe {
    x: FlexTensor,
    mean: Vec<f32>,
    scale: Vec<f32>,
    beta: FlexTensor,
    built: Mutex<Option<Arc<Vec<f32>>>>,
}

impl Rebuild {
    /// For `relu((x - mean) scale + beta)`.
    pub(super) fn new(x: FlexTensor, mean: Vec<f32>, scale: Vec<f32>, beta: FlexTensor) -> Self {
        Self(Arc::new(Recipe { x, mean, scale, beta, built: Mutex::default() }))
    }

    /// Returns the values, which stay until [`Self::take`].
    pub(super) fn values(&self) -> Arc<Vec<f32>> {
        let mut built = self.0.built.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(built.get_or_insert_with(|| Arc::new(self.0.build())))
    }

    /// Returns the values for the last time.
    pub(super) fn take(&self) -> Arc<Vec<f32>> {
        let built = self.0.built.lock().unwrap_or_else(PoisonError::into_inner).take();
        built.unwrap_or_else(|| Arc::new(self.0.build()))
    }
}

impl Recipe {
    fn build(&self) -> Vec<f32> {
        let x = slice(&self.x);
        let mut y = buffer(x.len());
        apply(x, &self.mean, &self.scale, slice(&self.beta), None, true, &mut y);
        y
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::super::testing::{flat, flatten, gradients, read, values};
    use super::super::{batch_norm_rebuilt, batch_norm_train, conv2d_after_norm};

    /// Norm and convolution; the second convolution sees the same input, so that something is left to whoever comes last.
    fn run(t: &[Tensor<1>], rebuilt: bool) -> Tensor<1> {
        let (x, weight) = (t[0].clone().reshape([2, 6, 6, 8]), t[1].clone().reshape([16, 8, 3, 3]));
        let (gamma, beta) = (t[2].clone(), t[3].clone());
        let (y, rebuild) = if rebuilt {
            let (normed, rebuild) = batch_norm_rebuilt(x, gamma, beta, 1e-5);
            assert!(rebuild.is_some());
            (normed.output, rebuild)
        } else {
            (batch_norm_train(x, gamma, beta, 1e-5, None, true).output, None)
        };
        let fast = conv2d_after_norm(y.clone(), rebuild.clone(), weight.clone(), None, [1, 1], [1, 1]);
        let slow = conv2d_after_norm(y, rebuild, weight, None, [2, 2], [1, 1]);
        Tensor::cat(vec![flatten(fast), flatten(slow)], 0)
    }

    #[test]
    fn what_is_built_again_has_the_bits_of_what_is_kept() {
        let [x, weight, gamma, beta] =
            [(2 * 36 * 8, 1), (16 * 8 * 9, 2), (8, 3), (8, 4)].map(|(len, seed)| values(len, seed));
        let inputs: [&[f32]; 4] = [&x, &weight, &gamma, &beta];
        let kept = gradients(&inputs, |t| run(t, false));
        assert_eq!(gradients(&inputs, |t| run(t, true)), kept);
        // without gradients, too
        let plain = inputs.map(|values| flat(values, &Device::flex()));
        assert_eq!(read(run(&plain, true)), read(run(&plain, false)));
    }
}
