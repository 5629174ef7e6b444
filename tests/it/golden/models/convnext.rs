//! `ConvNeXt`: timm's and Hugging Face's.

use std::collections::BTreeMap;

use autodidact::model::{Boundary, ConvNext, ConvNextArch, Pass, Segmented};
use burn::tensor::Tensor;

use super::super::{Array, Case, Outcome};
use super::*;

/// Hugging Face's names in timm's.
#[expect(clippy::unnecessary_wraps, reason = "one of several")]
fn hf_name(name: &str) -> Option<Place> {
    let mut path = name.strip_prefix("convnext.").unwrap_or(name).to_owned();
    for (from, to) in [
        ("embeddings.patch_embeddings", "stem.0"),
        ("embeddings.layernorm", "stem.1"),
        ("encoder.stages", "stages"),
        ("downsampling_layer", "downsample"),
        (".layers.", ".blocks."),
        ("dwconv", "conv_dw"),
        ("layernorm", "norm"),
        ("pwconv1", "mlp.fc1"),
        ("pwconv2", "mlp.fc2"),
        ("layer_scale_parameter", "gamma"),
        ("classifier", "head.fc"),
    ] {
        path = path.replace(from, to);
    }
    if let Some(rest) = path.strip_prefix("norm.") {
        path = format!("head.norm.{rest}");
    }
    Some((path, None))
}

/// Reads what the weights tell; the reason where something is not supported.
fn arch(tensors: &BTreeMap<String, Array>, eps: f64, head_eps: f64) -> Result<ConvNextArch, String> {
    const KNOWN: [&str; 4] = ["stem.0.", "stem.1.", "stages.", "head."];
    let odd = |name: &&String| {
        !KNOWN.iter().any(|known| name.starts_with(known))
            || ["grn", "pre_logits", "shortcut"].iter().any(|part| name.contains(part))
    };
    if let Some(name) = tensors.keys().find(odd) {
        return Err(format!("`{name}`"));
    }
    let shape = |name: &str| tensors.get(name).unwrap_or_else(|| panic!("no `{name}`")).shape.as_slice();
    let gamma = |stage: usize, block: usize| format!("stages.{stage}.blocks.{block}.norm.weight");
    let stages = (0..100).take_while(|&stage| tensors.contains_key(&gamma(stage, 0))).count();
    let depth = |stage| (0..1000).take_while(|&block| tensors.contains_key(&gamma(stage, block))).count();
    Ok(ConvNextArch {
        depths: (0..stages).map(depth).collect(),
        dims: (0..stages).map(|stage| shape(&gamma(stage, 0))[0]).collect(),
        patch: shape("stem.0.weight")[2],
        shrink_first: tensors.contains_key("stages.0.downsample.1.weight"),
        kernel: shape("stages.0.blocks.0.conv_dw.weight")[2],
        layer_scale: tensors.contains_key("stages.0.blocks.0.gamma").then_some(1e-6),
        drop_path: 0.0,
        channels: shape("stem.0.weight")[1],
        num_classes: tensors.get("head.fc.weight").map_or(0, |fc| fc.shape[0]),
        eps,
        head_eps,
    })
}

fn run(
    case: &Case,
    arch: &ConvNextArch,
    tensors: &BTreeMap<String, Array>,
    [map_name, pooled_name]: [&str; 2],
    place: fn(&str) -> Option<Place>,
) -> Outcome {
    let scope = scope();
    let (net, layout) = load(ConvNext::new(arch, &scope).unwrap(), tensors, scope.device());
    let x = input(case);
    let (mut outputs, mut pass) = (Outputs::new(case, ""), Pass::eval());
    let mut at = Boundary::Map(x.clone());
    for index in 0..net.num_segments() - 1 {
        at = net.forward_segment(index, at, &mut pass);
    }
    let map: Tensor<4> = at.into_map();
    outputs.add(map_name, &map, true);
    let head = net.forward_segment(net.num_segments() - 1, Boundary::Map(map), &mut pass);
    let pooled = head.into_features().pooled;
    outputs.add(pooled_name, &pooled, true);
    if let Some(logits) = net.logits(pooled) {
        outputs.add("logits", &logits, true);
    }
    let gradients = outputs.backward(&x, &net, &layout);
    compare_gradients(case, "grad.", &mut outputs.checks, &gradients, place, no_noise);
    Outcome::Compared(outputs.checks)
}

pub(super) fn timm(case: &Case) -> Outcome {
    let args = case.args();
    if args["output_stride"].as_u64().is_some_and(|stride| stride != 32) {
        return Outcome::NotYet("dilation".to_owned());
    }
    match args["global_pool"].as_str() {
        None | Some("avg") => {}
        Some(other) => return Outcome::NotYet(format!("pooling `{other}`")),
    }
    let mut tensors = renamed(&checkpoint(case), same_name);
    // 1x1 convolutions in place of linear layers
    for (_, array) in tensors.iter_mut().filter(|(name, _)| name.contains(".mlp.fc")) {
        array.shape.truncate(2);
    }
    let eps = args["norm_eps"].as_f64().or(case.manifest["layernorm_eps"].as_f64()).unwrap_or(1e-6);
    match arch(&tensors, eps, eps) {
        Ok(arch) => run(case, &arch, &tensors, ["features", "pooled"], same_name),
        Err(what) => Outcome::NotYet(what),
    }
}

pub(super) fn hf(case: &Case) -> Outcome {
    let config = folder_config(case);
    if config["hidden_act"].as_str().is_some_and(|activation| activation != "gelu") {
        return Outcome::NotYet(format!("activation {}", config["hidden_act"]));
    }
    let tensors = renamed(&checkpoint(case), hf_name);
    match arch(&tensors, 1e-6, config["layer_norm_eps"].as_f64().unwrap_or(1e-12)) {
        Ok(arch) => run(case, &arch, &tensors, ["last_hidden_state", "pooler_output"], hf_name),
        Err(what) => Outcome::NotYet(what),
    }
}
