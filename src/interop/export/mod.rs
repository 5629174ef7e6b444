//! Our backbones as other programs read them: names, shapes and configuration.
//!
//! What a program cannot express is refused: weights that load and compute something else are worse than none.

mod head;
mod hugging_face;
mod onnx;
mod timm;
mod torchvision;

use std::borrow::Cow;

pub use head::Head;
use serde_json::Value as Json;

use super::arch::Arch;
use crate::model::{MlpKind, Pool, Tensors};

/// A program that backbones are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// timm.
    Timm,
    /// Hugging Face's transformers.
    HuggingFace,
    /// torchvision.
    Torchvision,
    /// The tensors alone, under our names: those of timm and torchvision.
    Plain,
    /// ONNX: the network and its weights, for any program that runs such files.
    Onnx,
}

/// How images are prepared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Input {
    /// Height and width in pixels.
    pub size: u32,
    /// Pixels of the shorter side before the centre is cut out.
    pub shorter: u32,
    /// Mean of each channel.
    pub mean: [f32; 3],
    /// Standard deviation of each channel.
    pub std: [f32; 3],
}

/// What `model.*` holds.
#[derive(Clone, Debug)]
pub enum Weights {
    /// Tensors under the names of the program, for `model.safetensors`.
    Tensors(Tensors),
    /// The contents of `model.onnx`.
    Onnx(Vec<u8>),
}

/// A network as another program reads it.
#[derive(Clone, Debug)]
pub struct Exported {
    /// Its weights.
    pub weights: Weights,
    /// `config.json`.
    pub config: Json,
    /// `preprocessor_config.json`.
    pub preprocessor: Option<Json>,
    /// Name of the class or the architecture there.
    pub architecture: String,
    /// Python that loads it and defines `features(images)`, `[batch, 3, h, w]` to `[batch, dim]`, or `logits(images)`, to `[batch, classes]`; run in the folder.
    pub python: String,
    /// What the reader should know, a sentence each.
    pub notes: Vec<String>,
}

/// What another program cannot express.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{program} cannot express {what}: {why}\nhint: {instead}")]
pub struct Inexpressible {
    program: &'static str,
    what: String,
    why: String,
    instead: String,
}

/// Writes a backbone, or a classifier, for a program.
///
/// # Errors
/// When the program has no such network: what, why, and what to use instead.
///
/// # Panics
/// When the tensors are not those of the structure ([`Arch::tensors`]), or the head is for features of another width.
pub fn export(
    target: Target,
    arch: &Arch,
    tensors: &Tensors,
    head: Option<&Head>,
    input: &Input,
) -> Result<Exported, Inexpressible> {
    let wanted = arch.tensors();
    for (name, shape) in &wanted {
        let there = tensors.get(name).map(|(shape, _)| shape);
        assert_eq!(there, Some(shape), "`{name}` of the backbone");
    }
    let own = Own { arch, tensors, head, input };
    if let Some(head) = head {
        assert_eq!(head.weight().len(), head.classes().len() * own.dim(), "a head for other features");
    }
    match target {
        Target::Timm => timm::export(&own),
        Target::HuggingFace => hugging_face::export(&own),
        Target::Torchvision => torchvision::export(&own),
        Target::Plain => Ok(plain(&own)),
        Target::Onnx => onnx::export(&own),
    }
}

/// What is exported.
struct Own<'a> {
    arch: &'a Arch,
    tensors: &'a Tensors,
    head: Option<&'a Head>,
    input: &'a Input,
}

impl Own<'_> {
    /// Width of the features.
    fn dim(&self) -> usize {
        match self.arch {
            Arch::Vit(vit) => vit.dim,
            Arch::ResNet(net) => net.dim(),
            Arch::ConvNext(net) => net.dim(),
        }
    }

    /// The tensors of the backbone; biases of keys that the network leaves out are zero.
    fn tensors(&self) -> Tensors {
        self.tensors_here().into_owned()
    }

    /// The same, not copied where they are as they should be.
    fn tensors_here(&self) -> Cow<'_, Tensors> {
        let mut tensors = Cow::Borrowed(self.tensors);
        if let Arch::Vit(vit) = self.arch
            && vit.qkv_bias
            && !vit.key_bias
        {
            let tensors = tensors.to_mut();
            for (_, (_, values)) in tensors.iter_mut().filter(|(name, _)| name.ends_with("attn.qkv.bias")) {
                let third = values.len() / 3;
                values[third..2 * third].fill(0.0);
            }
        }
        tensors
    }
}

/// Cuts the rows of a tensor into equal parts.
fn rows(shape: &[usize], values: &[f32], parts: usize) -> Vec<(Vec<usize>, Vec<f32>)> {
    let mut part = shape.to_vec();
    if let Some(first) = part.first_mut() {
        *first /= parts;
    }
    values.chunks_exact(values.len() / parts).map(|chunk| (part.clone(), chunk.to_vec())).collect()
}

/// The factor that gives a hidden width when it is multiplied and rounded down, as Python does.
fn ratio(hidden: usize, dim: usize) -> f64 {
    let exact = hidden as f64 / dim as f64;
    if (dim as f64 * exact) as usize == hidden { exact } else { (hidden as f64 + 0.5) / dim as f64 }
}

fn python_list(values: &[usize]) -> String {
    let values: Vec<String> = values.iter().map(ToString::to_string).collect();
    format!("[{}]", values.join(", "))
}

/// `config.json` of files that no program has a configuration for.
fn described(own: &Own<'_>) -> Json {
    let mut config = serde_json::json!({
        "architecture": "autodidact",
        "description": own.arch.describe(),
        "num_classes": own.head.map_or(0, |head| head.classes().len()),
        "num_features": own.dim(),
        "pretrained_cfg": timm::pretrained_cfg(own),
    });
    if let Some(head) = own.head {
        config["label_names"] = head.classes().into();
    }
    config
}

fn plain(own: &Own<'_>) -> Exported {
    let mut config = described(own);
    if let Arch::Vit(vit) = own.arch {
        config["num_heads"] = vit.heads.into();
        config["image_size"] = serde_json::json!(vit.image);
        config["layer_norm_eps"] = vit.eps.into();
        config["rope_theta"] = vit.rope_base.into();
        if vit.mlp == MlpKind::Geglu {
            config["mlp"] = "geglu".into();
        }
        config["global_pool"] = if vit.pool == Pool::Class { "token" } else { "avg" }.into();
    }
    let names = match own.arch {
        Arch::ResNet(_) => "torchvision's",
        _ => "timm's",
    };
    let mut tensors = own.tensors();
    let mut python = "from safetensors.torch import load_file\n\nstate = load_file(\"model.safetensors\")".to_owned();
    let mut notes = vec![format!("the names of its tensors are {names}")];
    if let Some(head) = own.head {
        head.put(&mut tensors, "head");
        python += "\n\n\ndef logits(features):\n    return features @ state[\"head.weight\"].T + state[\"head.bias\"]";
        notes.push("`head.weight` and `head.bias` are a linear layer on its features".to_owned());
    }
    Exported {
        weights: Weights::Tensors(tensors),
        config,
        preprocessor: None,
        architecture: own.arch.describe(),
        python,
        notes,
    }
}

#[cfg(test)]
mod tests;
