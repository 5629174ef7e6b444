//! Low-rank adapters: a linear layer's weight plus a product of two thin matrices, which alone learn.
//!
//! Hu et al., 2021, <https://arxiv.org/abs/2106.09685>, section 4.1; names, scale and first values as in Hugging Face's PEFT (`lora_A` uniform within
//! `1 / sqrt(inputs)`, `lora_B` zero, scale `alpha / rank`). The product is added to the weight in front of the forward pass: the same function as PEFT's branch
//! beside the layer, for one small matrix product instead of two over all tokens.
//!
//! Deviation: no dropout in front of the adapters, which that form has no place for.

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::scope::{Init, Scope};
use super::start::Tensors;

/// Which layers get adapters.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraArch {
    /// Rank of the product.
    pub rank: usize,
    /// The product is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Last parts of the paths of linear layers: `qkv`, `attn.proj`, `fc1`.
    pub targets: Vec<String>,
}

impl LoraArch {
    /// Tells whether the layer at `path` gets an adapter.
    #[must_use]
    pub fn targets(&self, path: &str) -> bool {
        let ends = |target: &str| path.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        self.targets.iter().any(|target| ends(target))
    }
}

/// An adapter of a linear layer, below its path.
#[derive(Module, Debug)]
pub struct Lora {
    /// `[rank, in]`.
    a: Param<Tensor<2>>,
    /// `[out, rank]`.
    b: Param<Tensor<2>>,
    /// `[1]`, saved with the adapter so that whoever reads it can merge it; not trained.
    scale: Param<Tensor<1>>,
}

impl Lora {
    /// Builds the adapter of the layer in the place `scope`, if that has one.
    pub(super) fn of(inputs: usize, outputs: usize, scope: &Scope) -> Option<Self> {
        let (arch, scope) = scope.adapter()?;
        Some(Self {
            a: scope.param("a", [arch.rank, inputs], Init::Uniform(1.0 / (inputs as f64).sqrt())),
            b: scope.param("b", [outputs, arch.rank], Init::Zeros),
            scale: scope.buffer("scale", vec![(arch.alpha / arch.rank as f64) as f32], [1]),
        })
    }

    /// Adds the product to a weight.
    ///
    /// # Shapes
    /// `[out, in]` to the same.
    pub(super) fn added_to(&self, weight: Tensor<2>) -> Tensor<2> {
        let scaled = self.b.val() * self.scale.val().unsqueeze::<2>();
        weight + scaled.matmul(self.a.val())
    }
}

/// Path of a tensor of an adapter below its layer.
const PARTS: [&str; 3] = [".lora.a", ".lora.b", ".lora.scale"];

/// Tells whether a path is one of an adapter's tensors.
#[must_use]
pub fn is_adapter(path: &str) -> bool {
    PARTS.iter().any(|part| path.ends_with(part))
}

/// An adapter's matrices.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Path of the layer.
    pub layer: String,
    /// Shape and values of `[rank, in]`.
    pub a: (Vec<usize>, Vec<f32>),
    /// Shape and values of `[out, rank]`.
    pub b: (Vec<usize>, Vec<f32>),
    /// `alpha / rank`.
    pub scale: f32,
}

/// Takes the adapters out of a network's tensors, and adds each to the weight of its layer.
pub fn merge(tensors: &mut Tensors) -> Vec<Adapter> {
    let layers: Vec<String> = tensors.keys().filter_map(|name| Some(name.strip_suffix(PARTS[0])?.to_owned())).collect();
    let mut adapters = Vec::new();
    for layer in layers {
        let mut take = |part: &str| tensors.remove(&format!("{layer}{part}"));
        let (Some(a), Some(b), Some((_, scale))) = (take(PARTS[0]), take(PARTS[1]), take(PARTS[2])) else { continue };
        let scale = scale.first().copied().unwrap_or(1.0);
        let (rank, inputs) = (a.0[0], a.0[1]);
        if let Some((_, weight)) = tensors.get_mut(&format!("{layer}.weight")) {
            for (row, factors) in weight.chunks_exact_mut(inputs.max(1)).zip(b.1.chunks_exact(rank.max(1))) {
                for (column, value) in row.iter_mut().enumerate() {
                    let product = factors.iter().zip(a.1.iter().skip(column).step_by(inputs));
                    let sum: f64 = product.map(|(&b, &a)| f64::from(b) * f64::from(a)).sum();
                    *value = (f64::from(*value) + f64::from(scale) * sum) as f32;
                }
            }
        }
        adapters.push(Adapter { layer, a, b, scale });
    }
    adapters
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::model::layers::Linear;
    use crate::model::params::{Layout, read_weights};

    fn arch() -> LoraArch {
        LoraArch { rank: 2, alpha: 6.0, targets: vec!["qkv".to_owned(), "attn.proj".to_owned()] }
    }

    #[test]
    fn layers_are_chosen_by_the_ends_of_their_paths() {
        let arch = arch();
        for (path, is) in [
            ("backbone.blocks.0.attn.qkv", true),
            ("qkv", true),
            ("blocks.0.attn.proj", true),
            ("patch_embed.proj", false),
            ("blocks.0.attn.myqkv", false),
            ("blocks.0.attn.qkv.norm", false),
        ] {
            assert_eq!(arch.targets(path), is, "{path}");
        }
    }

    #[test]
    fn an_adapter_begins_as_nothing_and_alone_is_trained() {
        let device = Device::flex().autodiff();
        let scope = Scope::new(3, &device);
        let plain = Linear::torch_default(5, 4, true, &scope.enter("qkv"));
        let layer = Linear::torch_default(5, 4, true, &scope.adapted(&arch()).enter("qkv"));
        let x = Tensor::<2>::from_data(
            TensorData::new((0..15).map(|i| (i as f32).sin()).collect::<Vec<f32>>(), [3, 5]),
            &device,
        );
        let values = |x: Tensor<2>| x.into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(values(layer.forward(x.clone())), values(plain.forward(x.clone())));
        let layout = Layout::of(&layer);
        assert_eq!(layout.num_weights(), 2 * 5 + 4 * 2);
        assert!(read_weights(&layer, &layout)[..10].iter().all(|a| a.abs() <= 1.0 / 5.0f32.sqrt()));
        // at the start only `b` gets a gradient, as `b` is zero
        let gradients = layer.forward(x).sum().backward();
        let lora = layer.lora.as_ref().unwrap();
        assert!(values(Tensor::from_inner(lora.b.val().grad(&gradients).unwrap())).iter().any(|g| *g != 0.0));
        assert!(layer.weight.val().grad(&gradients).is_none());
    }

    #[test]
    fn merged_weights_are_the_weights_of_the_forward_pass() {
        let tensor = |shape: &[usize], factor: f32| {
            (
                shape.to_vec(),
                (0..shape.iter().product()).map(|i: usize| (i as f32 * factor).sin()).collect::<Vec<f32>>(),
            )
        };
        let (weight, a, b) = (tensor(&[4, 5], 0.3), tensor(&[2, 5], 0.7), tensor(&[4, 2], 1.1));
        let mut tensors = Tensors::from([
            ("qkv.weight".to_owned(), weight.clone()),
            ("qkv.bias".to_owned(), tensor(&[4], 0.2)),
            ("qkv.lora.a".to_owned(), a.clone()),
            ("qkv.lora.b".to_owned(), b.clone()),
            ("qkv.lora.scale".to_owned(), (vec![1], vec![3.0])),
        ]);
        let adapters = merge(&mut tensors);
        assert_eq!(adapters, [Adapter { layer: "qkv".to_owned(), a: a.clone(), b: b.clone(), scale: 3.0 }]);
        assert_eq!(tensors.keys().map(String::as_str).collect::<Vec<_>>(), ["qkv.bias", "qkv.weight"]);
        for row in 0..4 {
            for column in 0..5 {
                let product: f64 = (0..2).map(|r| f64::from(b.1[row * 2 + r]) * f64::from(a.1[r * 5 + column])).sum();
                let expected = f64::from(weight.1[row * 5 + column]) + 3.0 * product;
                assert!((f64::from(tensors["qkv.weight"].1[row * 5 + column]) - expected).abs() < 1e-6);
            }
        }
    }
}
