//! The classifier of a fine-tuned network, as other programs have one: a linear layer on the features.

use crate::model::Tensors;

/// Epsilon of the batch norm in front of a head (`model::layers::BatchNorm`).
const EPS: f64 = 1e-5;

/// A linear layer on the features, `[classes, dim]`, and the names of its outputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    weight: Vec<f32>,
    bias: Vec<f32>,
    classes: Vec<String>,
    several: bool,
}

impl Head {
    /// The same, of a network that tells several classes an image.
    #[must_use]
    pub fn several(self, several: bool) -> Self {
        Self { several, ..self }
    }

    /// Tells whether an image may have several classes.
    #[must_use]
    pub fn tells_several(&self) -> bool {
        self.several
    }

    /// Takes `head` out of the tensors of a network; `head_norm`, a batch norm without affine parameters in front of it, goes into its weights.
    ///
    /// Nothing, when there is no head of so many classes.
    #[must_use]
    pub fn of(network: &Tensors, classes: &[String]) -> Option<Self> {
        let values = |name: &str| network.get(name).map(|(_, values)| values.as_slice());
        let (shape, weight) = network.get("head.weight")?;
        let bias = values("head.bias")?;
        let &[outputs, dim] = shape.as_slice() else { return None };
        if outputs != classes.len() || bias.len() != outputs || dim == 0 {
            return None;
        }
        let mut head = Self { weight: weight.clone(), bias: bias.to_vec(), classes: classes.to_vec(), several: false };
        if let (Some(mean), Some(var)) = (values("head_norm.running_mean"), values("head_norm.running_var")) {
            head.fold(mean, var);
        }
        Some(head)
    }

    /// `w (x - mean) / sqrt(var + eps) + b`, as a layer on `x`.
    fn fold(&mut self, mean: &[f32], var: &[f32]) {
        let scale: Vec<f64> = var.iter().map(|&var| 1.0 / (f64::from(var) + EPS).sqrt()).collect();
        for (row, bias) in self.weight.chunks_exact_mut(scale.len()).zip(&mut self.bias) {
            let mut shift = 0.0;
            for ((weight, scale), &mean) in row.iter_mut().zip(&scale).zip(mean) {
                let scaled = f64::from(*weight) * scale;
                shift += scaled * f64::from(mean);
                *weight = scaled as f32;
            }
            *bias = (f64::from(*bias) - shift) as f32;
        }
    }

    /// Tells whether all its numbers are finite.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        self.weight.iter().chain(&self.bias).all(|value| value.is_finite())
    }

    /// Weights, a row a class.
    #[must_use]
    pub fn weight(&self) -> &[f32] {
        &self.weight
    }

    /// Biases.
    #[must_use]
    pub fn bias(&self) -> &[f32] {
        &self.bias
    }

    /// Names of the classes, in the order of the outputs.
    #[must_use]
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Adds it to tensors.
    pub(super) fn put(&self, tensors: &mut Tensors, name: &str) {
        let (classes, dim) = (self.classes.len(), self.weight.len() / self.classes.len().max(1));
        tensors.insert(format!("{name}.weight"), (vec![classes, dim], self.weight.clone()));
        tensors.insert(format!("{name}.bias"), (vec![classes], self.bias.clone()));
    }

    /// The weights of a layer on twice the features: on these (`first`) or those behind them, and zero for the others.
    pub(super) fn doubled(&self, first: bool) -> Self {
        let dim = self.weight.len() / self.classes.len().max(1);
        let zeros = vec![0.0; dim];
        let rows = self.weight.chunks_exact(dim.max(1));
        let weight = rows.flat_map(|row| if first { [row, &zeros] } else { [&zeros, row] }.concat()).collect();
        Self { weight, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> Tensors {
        let tensor = |name: &str, shape: &[usize], values: &[f32]| (name.to_owned(), (shape.to_vec(), values.to_vec()));
        Tensors::from([
            tensor("head.weight", &[2, 3], &[1.0, -2.0, 0.5, 0.0, 3.0, 1.0]),
            tensor("head.bias", &[2], &[0.25, -1.0]),
            tensor("head_norm.running_mean", &[3], &[0.5, -0.25, 2.0]),
            tensor("head_norm.running_var", &[3], &[4.0, 0.01, 1.0]),
        ])
    }

    #[test]
    fn a_norm_goes_into_the_layer_behind_it() {
        let names = ["cat", "dog"].map(str::to_owned);
        let head = Head::of(&network(), &names).unwrap();
        let x = [0.3f64, 0.7, -1.2];
        let network = network();
        for (class, bias) in [0.25, -1.0].into_iter().enumerate() {
            let value = |name: &str, at: usize| f64::from(network[name].1[at]);
            let normed = |at: usize| {
                (x[at] - value("head_norm.running_mean", at)) / (value("head_norm.running_var", at) + 1e-5).sqrt()
            };
            let expected = bias + (0..3).map(|at| value("head.weight", 3 * class + at) * normed(at)).sum::<f64>();
            let row = &head.weight()[3 * class..3 * class + 3];
            let got = f64::from(head.bias()[class]) + row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
            assert!((got - expected).abs() < 1e-5, "{got} {expected}");
        }
        assert_eq!(head.doubled(true).weight()[3..6], [0.0; 3]);
        assert_eq!(head.doubled(false).weight()[3..6], head.weight()[..3]);
        assert_eq!(head.doubled(false).weight()[9..], head.weight()[3..]);
    }

    #[test]
    fn without_norm_it_stays_as_it_is_and_another_number_of_classes_is_no_head() {
        let mut network = network();
        let names = ["cat", "dog"].map(str::to_owned);
        network.retain(|name, _| name.starts_with("head."));
        let head = Head::of(&network, &names).unwrap();
        assert_eq!((head.weight(), head.bias()), (&*network["head.weight"].1, &*network["head.bias"].1));
        assert!(head.is_finite());
        assert_eq!(Head::of(&network, &names[..1]), None);
        if let Some((_, bias)) = network.get_mut("head.bias") {
            bias[1] = f32::NAN;
        }
        assert!(!Head::of(&network, &names).unwrap().is_finite());
        assert_eq!(Head::of(&Tensors::new(), &names), None);
    }
}
