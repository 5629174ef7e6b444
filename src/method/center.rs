//! The centre of a teacher's logits (DINO, equation 4).

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::Update;
use crate::loss::dino::centered_softmax;
use crate::model::Scope;

/// Moving average of the teacher's logits over the global batch. A step uses it first and moves it then.
#[derive(Module, Debug)]
pub(super) struct Center {
    mean: Param<Tensor<2>>,
    #[module(skip)]
    momentum: f64,
}

impl Center {
    /// Starts at zero.
    pub(super) fn new(prototypes: usize, momentum: f64, scope: &Scope) -> Self {
        Self { mean: scope.buffer("mean", vec![0.0; prototypes], [1, prototypes]), momentum }
    }

    /// Turns logits into distributions.
    ///
    /// # Shapes
    /// `[n, k]` to `[n, k]`.
    pub(super) fn softmax(&self, logits: Tensor<2>, temperature: f64) -> Tensor<2> {
        centered_softmax(logits, self.mean.val(), temperature)
    }

    /// Returns what [`Center::moved`] needs of the logits of a micro-batch: their sum and their number.
    pub(super) fn statistics(logits: Tensor<2>) -> [Tensor<1>; 2] {
        let [rows, prototypes] = logits.dims();
        let count = Tensor::full([1], rows as f32, &logits.device());
        [logits.sum_dim(0).reshape([prototypes]), count]
    }

    /// The same of no logits at all.
    pub(super) fn no_statistics(&self) -> [Tensor<1>; 2] {
        let mean = self.mean.val();
        [Tensor::zeros([mean.dims()[1]], &mean.device()), Tensor::zeros([1], &mean.device())]
    }

    /// Moves the centre towards the mean of the global batch; it stays where there were no logits.
    ///
    /// # Panics
    /// When the statistics are of other prototypes.
    pub(super) fn moved(&self, [sum, count]: [&[f32]; 2]) -> Update {
        let mut values = self.mean.val().into_data().try_to_vec::<f32>().expect("saved tensors are f32");
        assert_eq!((values.len(), count.len()), (sum.len(), 1), "statistics of another centre");
        if count[0] > 0.0 {
            for (value, sum) in values.iter_mut().zip(sum) {
                let mean = f64::from(*sum) / f64::from(count[0]);
                *value = (self.momentum * f64::from(*value) + (1.0 - self.momentum) * mean) as f32;
            }
        }
        Update { id: self.mean.id, values }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::loss::dino::update_center;

    #[test]
    fn moves_as_if_all_logits_were_in_one_place() {
        let device = Device::flex();
        let logits: Vec<f32> = (0..24).map(|i| (i * 7 % 11) as f32 / 4.0 - 1.0).collect();
        let logits = Tensor::<2>::from_data(TensorData::new(logits, [6, 4]), &device);
        let center = Center::new(4, 0.9, &Scope::new(0, &device).enter("center"));
        let mut sums = [vec![0.0; 4], vec![0.0]];
        for part in logits.clone().split(2, 0) {
            for (sum, statistic) in sums.iter_mut().zip(Center::statistics(part)) {
                let values = statistic.into_data().try_to_vec::<f32>().unwrap();
                sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
        }
        let expected = update_center(center.mean.val(), logits, 0.9).into_data().try_to_vec::<f32>().unwrap();
        let got = center.moved([&sums[0], &sums[1]]).values;
        assert!(got.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?} {expected:?}");
        let stays = center.no_statistics().map(|t| t.into_data().try_to_vec::<f32>().unwrap());
        assert_eq!(center.moved([&stays[0], &stays[1]]).values, [0.0; 4]);
    }
}
