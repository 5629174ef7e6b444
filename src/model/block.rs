//! Pre-norm transformer blocks with timm's structure and key names.
//!
//! Vaswani et al., 2017, <https://arxiv.org/abs/1706.03762>; options as in timm's `Block` and, for gated MLPs, rotary positions and
//! the missing key bias, facebookresearch/dinov3 `layers/`.

use burn::module::{Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, TensorData};

use super::config::MlpKind;
use super::layers::{DropPath, LayerNorm, LayerScale, Linear};
use super::macs::multiplied;
use super::pass::Pass;
use super::rope::Rotary;
use super::scope::{Init, Scope};
use super::trace::seen;
use crate::ops;

/// Options of a transformer block.
#[derive(Clone, Copy, Debug)]
pub struct BlockArch {
    /// Width of the tokens.
    pub dim: usize,
    /// Attention heads; divides `dim`.
    pub heads: usize,
    /// Outputs of the MLP's first layer, both halves of a gated one.
    pub hidden: usize,
    /// Kind of the MLP.
    pub mlp: MlpKind,
    /// Biases of the qkv projection.
    pub qkv_bias: bool,
    /// Biases of the keys among them.
    pub key_bias: bool,
    /// Layer norm of queries and keys.
    pub qk_norm: bool,
    /// Initial LayerScale.
    pub layer_scale: Option<f64>,
    /// Epsilon of the layer norms.
    pub eps: f64,
    /// How linear weights are drawn; biases start at zero.
    pub init: LinearInit,
}

/// How the linear weights of a transformer are drawn; biases start at zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LinearInit {
    /// Normal of this deviation, cut at +-2 (timm: 0.02).
    TruncatedNormal(f64),
    /// Uniform within `sqrt(6 / (in + out))` (Glorot and Bengio, 2010); MAE.
    Xavier,
}

impl LinearInit {
    /// Builds a layer drawn this way.
    #[must_use]
    pub fn linear(self, inputs: usize, outputs: usize, bias: bool, scope: &Scope) -> Linear {
        let weight = match self {
            Self::TruncatedNormal(std) => Init::TruncatedNormal(std),
            Self::Xavier => Init::Uniform((6.0 / (inputs + outputs) as f64).sqrt()),
        };
        Linear::new(inputs, outputs, weight, bias.then_some(Init::Zeros), scope)
    }
}

/// Two linear layers with GELU between, or timm's packed gated MLP (`GluMlp`, `SwiGLUPacked`).
#[derive(Module, Debug)]
pub struct Mlp {
    /// `[hidden, dim]`.
    pub fc1: Linear,
    /// `[dim, hidden]`, or `[dim, hidden / 2]` when gated.
    pub fc2: Linear,
    #[module(skip)]
    kind: MlpKind,
}

impl Mlp {
    /// Builds the MLP. A gated one splits the output of `fc1` in two halves and computes `act(first) * second`
    /// (Shazeer, 2020, <https://arxiv.org/abs/2002.05202>).
    #[must_use]
    pub fn new(dim: usize, hidden: usize, kind: MlpKind, init: LinearInit, scope: &Scope) -> Self {
        let inner = if kind.is_gated() { hidden / 2 } else { hidden };
        Self {
            fc1: init.linear(dim, hidden, true, &scope.enter("fc1")),
            fc2: init.linear(inner, dim, true, &scope.enter("fc2")),
            kind,
        }
    }

    /// Applies the MLP to every token, multiplies by `scale` and adds `residual`, if there are such.
    ///
    /// # Shapes
    /// `[batch, tokens, dim]`, `[dim]` and `[batch, tokens, dim]` to `[batch, tokens, dim]`.
    #[must_use]
    #[expect(clippy::missing_panics_doc, reason = "both layers have a bias")]
    pub fn forward(&self, x: Tensor<3>, scale: Option<Tensor<1>>, residual: Option<Tensor<3>>) -> Tensor<3> {
        let activation = match self.kind {
            MlpKind::Gelu => {
                let with_bias = |(weight, bias): (_, Option<_>)| (weight, bias.expect("`new` gives layers a bias"));
                let (first, second) = (self.fc1.scaled(None), self.fc2.scaled(scale));
                let y = ops::mlp(x, with_bias(first), with_bias(second), residual);
                // two products of one size
                multiplied(&y, 2 * self.fc2.weight.dims()[1]);
                seen(self.fc2.weight.id, &y);
                return y;
            }
            MlpKind::Swiglu => |x: Tensor<3>| x.clone() * sigmoid(x),
            MlpKind::Geglu => |x: Tensor<3>| x.clone() * ((x / std::f64::consts::SQRT_2).erf() + 1.0) * 0.5,
        };
        let x = self.fc1.forward(x);
        let half = x.dims()[2] / 2;
        let x = activation(x.clone().narrow(2, 0, half)) * x.narrow(2, half, half);
        self.fc2.forward_branch(x, scale, residual)
    }
}

/// Multi-head self-attention with timm's packed projection.
#[derive(Module, Debug)]
pub struct Attention {
    /// `[3 * dim, dim]`, rows of all queries, then keys, then values; within each, head by head.
    pub qkv: Linear,
    /// Norm of each query, `[dim / heads]`.
    pub q_norm: Option<LayerNorm>,
    /// Norm of each key.
    pub k_norm: Option<LayerNorm>,
    /// `[dim, dim]`.
    pub proj: Linear,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    key_bias: bool,
}

impl Attention {
    /// Builds the layer.
    #[must_use]
    pub fn new(arch: &BlockArch, scope: &Scope) -> Self {
        let BlockArch { dim, heads, eps, .. } = *arch;
        let norm = |name| arch.qk_norm.then(|| LayerNorm::new(dim / heads, eps, &scope.enter(name)));
        Self {
            qkv: arch.init.linear(dim, 3 * dim, arch.qkv_bias, &scope.enter("qkv")),
            q_norm: norm("q_norm"),
            k_norm: norm("k_norm"),
            proj: arch.init.linear(dim, dim, true, &scope.enter("proj")),
            heads,
            key_bias: arch.key_bias,
        }
    }

    /// Lets every token attend to all; queries and keys are turned by `rotary`, the result multiplied by `scale` and added to
    /// `residual`, if there are such.
    ///
    /// # Shapes
    /// `[batch, tokens, dim]`, `[dim]` and `[batch, tokens, dim]` to `[batch, tokens, dim]`.
    #[must_use]
    pub fn forward(
        &self,
        x: Tensor<3>,
        rotary: Option<&Rotary>,
        scale: Option<Tensor<1>>,
        residual: Option<Tensor<3>>,
    ) -> Tensor<3> {
        let qkv = ops::linear(x, self.qkv.adapted_weight(), self.qkv_bias());
        multiplied(&qkv, self.qkv.weight.dims()[1]);
        seen(self.qkv.weight.id, &qkv);
        let qkv = self.normed(qkv);
        let qkv = match rotary {
            Some(rotary) => rotary.turn(qkv, self.heads),
            None => qkv,
        };
        let y = ops::attention(qkv, self.heads);
        // queries with keys, weights with values
        multiplied(&y, 2 * y.dims()[1]);
        self.proj.forward_branch(y, scale, residual)
    }

    /// Biases of queries, keys and values. As in `DINOv3`, a bias of the keys that is not wanted has a place and stays out of use.
    fn qkv_bias(&self) -> Option<Tensor<1>> {
        let bias = self.qkv.bias.as_ref().map(Param::val)?;
        if self.key_bias {
            return Some(bias);
        }
        let dim = bias.dims()[0] / 3;
        let mask: Vec<f32> = (0..3 * dim).map(|i| if i / dim == 1 { 0.0 } else { 1.0 }).collect();
        let mask = Tensor::from_data(TensorData::new(mask, [3 * dim]), &bias.device());
        Some(bias * mask)
    }

    /// Normalises each query and each key.
    fn normed(&self, qkv: Tensor<3>) -> Tensor<3> {
        let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) else { return qkv };
        let [batch, tokens, packed] = qkv.dims();
        let dim = packed / 3;
        let part = |index: usize| qkv.clone().narrow(2, index * dim, dim);
        let heads = |x: Tensor<3>| x.reshape([batch, tokens, self.heads, dim / self.heads]);
        let q = q_norm.forward(heads(part(0))).reshape([batch, tokens, dim]);
        let k = k_norm.forward(heads(part(1))).reshape([batch, tokens, dim]);
        Tensor::cat(vec![q, k, part(2)], 2)
    }
}

/// Pre-norm transformer block, timm's `Block`.
#[derive(Module, Debug)]
pub struct Block {
    /// Norm before the attention.
    pub norm1: LayerNorm,
    /// Attention.
    pub attn: Attention,
    /// Scale of the attention branch.
    pub ls1: Option<LayerScale>,
    /// Norm before the MLP.
    pub norm2: LayerNorm,
    /// MLP.
    pub mlp: Mlp,
    /// Scale of the MLP branch.
    pub ls2: Option<LayerScale>,
    #[module(skip)]
    drop_path: [DropPath; 2],
}

impl Block {
    /// Builds block `index`, whose branches are dropped with probability `drop_rate` while training.
    #[must_use]
    pub fn new(arch: &BlockArch, index: usize, drop_rate: f64, scope: &Scope) -> Self {
        let norm = |name| LayerNorm::new(arch.dim, arch.eps, &scope.enter(name));
        let scale = |name| arch.layer_scale.map(|init| LayerScale::new(arch.dim, init, &scope.enter(name)));
        let layer = 2 * index as u64;
        Self {
            norm1: norm("norm1"),
            attn: Attention::new(arch, &scope.enter("attn")),
            ls1: scale("ls1"),
            norm2: norm("norm2"),
            mlp: Mlp::new(arch.dim, arch.hidden, arch.mlp, arch.init, &scope.enter("mlp")),
            ls2: scale("ls2"),
            drop_path: [DropPath::new(drop_rate, layer), DropPath::new(drop_rate, layer + 1)],
        }
    }

    /// Returns the rates at which the two branches are dropped while training.
    #[must_use]
    pub fn drop_path(&self) -> [f64; 2] {
        self.drop_path.map(|branch| branch.rate())
    }

    /// Applies the block.
    ///
    /// # Shapes
    /// `[batch, tokens, dim]` to the same.
    #[must_use]
    pub fn forward(&self, x: Tensor<3>, pass: &Pass) -> Tensor<3> {
        self.forward_rotary(x, None, pass)
    }

    /// Applies the block with rotary positions, if there are such.
    ///
    /// # Shapes
    /// As [`Self::forward`].
    #[must_use]
    pub fn forward_rotary(&self, x: Tensor<3>, rotary: Option<&Rotary>, pass: &Pass) -> Tensor<3> {
        let scale = |scale: &Option<LayerScale>| scale.as_ref().map(|scale| scale.gamma.val());
        let y = self.norm1.forward(x.clone());
        let x = self.drop_path[0].add(x, pass, |to| self.attn.forward(y, rotary, scale(&self.ls1), to));
        let y = self.norm2.forward(x.clone());
        self.drop_path[1].add(x, pass, |to| self.mlp.forward(y, scale(&self.ls2), to))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::model::params::Layout;

    fn arch() -> BlockArch {
        BlockArch {
            dim: 8,
            heads: 2,
            hidden: 16,
            mlp: MlpKind::Gelu,
            qkv_bias: true,
            key_bias: true,
            qk_norm: false,
            layer_scale: None,
            eps: 1e-6,
            init: LinearInit::Xavier,
        }
    }

    fn tokens(device: &Device) -> Tensor<3> {
        let values: Vec<f32> = (0..2 * 5 * 8).map(|i| (i as f32 * 0.7).sin()).collect();
        Tensor::from_data(TensorData::new(values, [2, 5, 8]), device)
    }

    fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
        x.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn a_scale_in_the_weights_is_a_scale_of_the_branch() {
        let device = Device::flex();
        for mlp in [MlpKind::Gelu, MlpKind::Swiglu, MlpKind::Geglu] {
            let scope = Scope::new(1, &device);
            let with = Block::new(&BlockArch { mlp, layer_scale: Some(0.25), ..arch() }, 0, 0.0, &scope);
            let x = tokens(&device);
            let y = x.clone() + with.attn.forward(with.norm1.forward(x), None, None, None) * 0.25;
            let y = y.clone() + with.mlp.forward(with.norm2.forward(y), None, None) * 0.25;
            let got = values(with.forward(tokens(&device), &Pass::eval()));
            assert!(got.iter().zip(values(y)).all(|(a, b)| (a - b).abs() < 1e-6), "{mlp:?}");
        }
    }

    #[test]
    fn gates_are_those_of_the_paper() {
        let scope = Scope::new(1, &Device::flex());
        for (kind, gate) in [(MlpKind::Swiglu, 0.731_058_6), (MlpKind::Geglu, 0.841_344_7)] {
            let mut mlp = Mlp::new(1, 2, kind, LinearInit::Xavier, &scope);
            for layer in [&mut mlp.fc1, &mut mlp.fc2] {
                layer.weight = layer.weight.clone().map(|weight| weight.ones_like());
            }
            let y = values(mlp.forward(Tensor::ones([1, 1, 1], &Device::flex()), None, None));
            assert!((y[0] - gate).abs() < 1e-6, "{kind:?} of 1: {y:?}");
        }
    }

    #[test]
    fn keys_without_bias_keep_its_place_unused() {
        let device = Device::flex().autodiff();
        let scope = Scope::new(1, &device);
        let build = |key_bias| {
            let mut layer = Attention::new(&BlockArch { key_bias, ..arch() }, &scope);
            layer.qkv.bias = layer.qkv.bias.map(|bias| bias.map(|bias| bias.detach().ones_like().require_grad()));
            layer
        };
        let without = build(false);
        assert_eq!(Layout::of(&without).num_weights(), Layout::of(&build(true)).num_weights());
        let gradients = without.forward(tokens(&device), None, None, None).powi_scalar(2).sum().backward();
        let gradient = values(without.qkv.bias.as_ref().unwrap().val().grad(&gradients).unwrap());
        assert!(gradient[8..16].iter().all(|&g| g == 0.0) && gradient[16..].iter().all(|&g| g != 0.0), "{gradient:?}");
    }
}
