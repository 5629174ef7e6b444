//! Our backbones as other programs read them: names, shapes and configuration.
//!
//! What a program cannot express is refused: weights that load and compute something else are worse than none.

mod hugging_face;
mod timm;
mod torchvision;

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

/// A backbone as another program reads it.
#[derive(Clone, Debug)]
pub struct Exported {
    /// Tensors under its names.
    pub tensors: Tensors,
    /// `config.json`.
    pub config: Json,
    /// `preprocessor_config.json`.
    pub preprocessor: Option<Json>,
    /// Name of the class or the architecture there.
    pub architecture: String,
    /// Python that loads it and defines `features(images)`, `[batch, 3, h, w]` to `[batch, dim]`; run in the folder.
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

/// Writes a backbone for a program.
///
/// # Errors
/// When the program has no such network: what, why, and what to use instead.
///
/// # Panics
/// When the tensors are not those of the structure ([`Arch::tensors`]).
pub fn export(target: Target, arch: &Arch, tensors: &Tensors, input: &Input) -> Result<Exported, Inexpressible> {
    let wanted = arch.tensors();
    for (name, shape) in &wanted {
        let there = tensors.get(name).map(|(shape, _)| shape);
        assert_eq!(there, Some(shape), "`{name}` of the backbone");
    }
    let own = || Own { arch, tensors, input };
    match target {
        Target::Timm => timm::export(&own()),
        Target::HuggingFace => hugging_face::export(&own()),
        Target::Torchvision => torchvision::export(&own()),
        Target::Plain => Ok(plain(&own())),
    }
}

/// What is exported.
struct Own<'a> {
    arch: &'a Arch,
    tensors: &'a Tensors,
    input: &'a Input,
}

impl Own<'_> {
    /// The tensors; biases of keys that the network leaves out are zero.
    fn tensors(&self) -> Tensors {
        let mut tensors = self.tensors.clone();
        if let Arch::Vit(vit) = self.arch
            && vit.qkv_bias
            && !vit.key_bias
        {
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

fn plain(own: &Own<'_>) -> Exported {
    let mut config = serde_json::json!({
        "architecture": "autodidact",
        "description": own.arch.describe(),
        "pretrained_cfg": timm::pretrained_cfg(own.input),
    });
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
    Exported {
        tensors: own.tensors(),
        config,
        preprocessor: None,
        architecture: own.arch.describe(),
        python: "from safetensors.torch import load_file\n\nstate = load_file(\"model.safetensors\")".to_owned(),
        notes: vec![format!("the names of its tensors are {names}")],
    }
}

#[cfg(test)]
mod tests;
