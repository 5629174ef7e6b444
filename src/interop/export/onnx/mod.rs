//! ONNX: the network with its weights in one file, `model.onnx`, which runs without Python.
//!
//! Operators of version 17, of 2022, the oldest with `LayerNormalization`; `images` go in, `[batch, channels, size, size]` of any batch, and `features` or `logits` come out.
//! Linear weights are stored as `MatMul` takes them, `[in, out]`, with LayerScale inside; all other tensors are as they are, under their own names.

mod convnext;
mod graph;
mod layers;
mod proto;
mod resnet;
mod vit;

use graph::Attribute::Int;
use layers::Builder;
use proto::Message;
use serde_json::json;

use super::{Exported, Inexpressible, Own, Weights};
use crate::interop::arch::Arch;
use crate::model::Tensors;

/// Version of the operators.
const OPSET: i64 = 17;
/// Version of the file format that came with them.
const IR: i64 = 8;
/// A message of Protocol Buffers, and so a file, ends before 2 GiB; what is not weights is far below 16 MiB.
const MOST_WEIGHTS: usize = (1 << 31) - (1 << 24);

pub(super) fn export(own: &Own<'_>) -> Result<Exported, Inexpressible> {
    check_size(own.tensors.values().map(|(_, values)| values.len()).sum())?;
    let tensors = own.tensors_here();
    let (graph, output) = graph(own, &tensors);
    let mut told = vec![
        ("architecture", own.arch.describe()),
        ("image_size", own.input.size.to_string()),
        ("image_shorter_side", own.input.shorter.to_string()),
        ("image_interpolation", "bicubic".to_owned()),
        ("image_mean", format!("{:?}", own.input.mean)),
        ("image_std", format!("{:?}", own.input.std)),
    ];
    if let Some(head) = own.head {
        told.push(("class_names", json!(head.classes()).to_string()));
    }
    // `ModelProto`: ir_version 1, producer_name 2, producer_version 3, graph 7, opset_import 8, metadata_props 14; `OperatorSetIdProto`: version 2;
    // `StringStringEntryProto`: key 1, value 2
    let mut model = Message::default().int(1, IR).text(2, "autodidact").text(3, env!("CARGO_PKG_VERSION"));
    model = model.message(8, &Message::default().int(2, OPSET));
    for (key, value) in told {
        model = model.message(14, &Message::default().text(1, key).text(2, &value));
    }
    let bytes = model.message(7, &graph).into_bytes();
    let (size, shape) = (own.input.size, if own.head.is_some() { "[batch, classes]" } else { "[batch, dim]" });
    let python = format!(
        "import onnxruntime\n\nsession = onnxruntime.InferenceSession(\"model.onnx\", providers=[\"CPUExecutionProvider\"])\n\n\n\
         def {output}(images):  # NumPy, float32, [batch, 3, {size}, {size}] to {shape}\n    return session.run([\"{output}\"], {{\"images\": images}})[0]"
    );
    let mut config = super::described(own);
    config["opset"] = OPSET.into();
    Ok(Exported {
        weights: Weights::Onnx(bytes),
        config,
        preprocessor: None,
        architecture: format!("ONNX, operators of version {OPSET}"),
        python,
        notes: Vec::new(),
    })
}

fn check_size(values: usize) -> Result<(), Inexpressible> {
    if values <= MOST_WEIGHTS / size_of::<f32>() {
        return Ok(());
    }
    Err(Inexpressible {
        program: "an ONNX file",
        what: format!("{:.2} GB of weights", values as f64 * 4e-9),
        why: "it is a message of Protocol Buffers, which end before 2 GiB".to_owned(),
        instead: "use `--format timm` or `--format hf`".to_owned(),
    })
}

/// The network, and the name of what comes out.
fn graph(own: &Own<'_>, tensors: &Tensors) -> (Message, &'static str) {
    let (builder, value, image, name, width) = network(own, tensors);
    (builder.graph.finish(&own.arch.describe(), image, (&value, name, width)), name)
}

fn network<'a>(own: &Own<'_>, tensors: &'a Tensors) -> (Builder<'a>, graph::Value, [usize; 3], &'static str, usize) {
    let mut builder = Builder::new(tensors);
    let side = own.input.size as usize;
    let (features, channels, dim) = match own.arch {
        Arch::Vit(arch) => (vit::features(&mut builder, arch, [side; 2]), arch.channels, arch.dim),
        Arch::ResNet(arch) => (resnet::features(&mut builder, arch), arch.channels, arch.dim()),
        Arch::ConvNext(arch) => (convnext::features(&mut builder, arch), arch.channels, arch.dim()),
    };
    let image = [channels, side, side];
    let Some(head) = own.head else { return (builder, features, image, "features", dim) };
    let classes = head.classes().len();
    let weight = builder.graph.weights("head.weight", &[classes, dim], head.weight());
    let bias = builder.graph.weights("head.bias", &[classes], head.bias());
    let logits = builder.graph.node("head", "Gemm", &[&features, &weight, &bias], &[("transB", Int(1))]);
    (builder, logits, image, "logits", classes)
}

#[cfg(test)]
mod tests;
