//! Graphs of every structure, and the file read back by a decoder of a few lines. That ONNX Runtime computes the same is checked by tests/interop/exports.py.

use std::collections::BTreeMap;

use super::*;
use crate::interop::export::{Head, Input, Target, export};
use crate::model::{BackboneConfig, Tensors};

const INPUT: Input = Input { size: 32, shorter: 32, mean: [0.5, 0.4, 0.3], std: [0.2, 0.3, 0.4] };
const VIT: &str = "[vit]\npatch = 8\ndim = 16\ndepth = 2\nheads = 4\n";

fn arch(text: &str) -> Arch {
    let config: BackboneConfig = toml::from_str(text).unwrap();
    Arch::from_config(&config, 32).unwrap()
}

/// Values that are all different.
fn tensors(arch: &Arch) -> Tensors {
    let mut next = 0.0;
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let values = (0..shape.iter().product::<usize>()).map(|_| {
            next += 1.0 / 1024.0;
            1.0 + next
        });
        let values = values.collect();
        (name, (shape, values))
    };
    arch.tensors().into_iter().map(tensor).collect()
}

fn head(arch: &Arch) -> Head {
    let own = Own { arch, tensors: &Tensors::new(), head: None, input: &INPUT };
    let network = Tensors::from([
        ("head.weight".to_owned(), (vec![3, own.dim()], (0..3 * own.dim()).map(|value| value as f32).collect())),
        ("head.bias".to_owned(), (vec![3], vec![1.0, 2.0, 3.0])),
    ]);
    Head::of(&network, &["a", "b", "c \"quoted\""].map(str::to_owned)).unwrap()
}

#[test]
fn every_node_takes_what_is_there_and_every_tensor_is_taken() {
    let structures = [
        VIT.to_owned(),
        format!("{VIT}pool = \"mean\"\nlayer_scale = 0.1\nmlp = \"swiglu\"\nregisters = 2\nprefix_positions = true"),
        format!("{VIT}pool = \"mean\"\nclass_token = false\nfc_norm = true\nqk_norm = true\npre_norm = true"),
        format!("{VIT}position = \"sincos\"\nqkv_bias = false\nmlp = \"geglu\""),
        format!("{VIT}position = \"rope\"\nregisters = 1\nkey_bias = false"),
        "[resnet]\ndepth = 18\nwidth = 0.0625".to_owned(),
        "[resnet]\ndepth = 50\nwidth = 0.0625\nstem = \"cifar\"".to_owned(),
        "[convnext]\ndepths = [1, 2, 1, 1]\ndims = [4, 6, 8, 12]".to_owned(),
        "[convnext]\ndepths = [1, 1, 1, 1]\ndims = [4, 6, 8, 12]\npatch = 2\nkernel = 5\nlayer_scale = 0".to_owned(),
    ];
    for text in structures {
        let arch = arch(&text);
        let (tensors, head) = (tensors(&arch), head(&arch));
        for head in [None, Some(&head)] {
            let own = Own { arch: &arch, tensors: &tensors, head, input: &INPUT };
            let (builder, _, _, _, _) = network(&own, &tensors);
            assert_eq!(builder.graph.fault(), None, "{text}");
            let names = builder.graph.constants();
            // what goes into others: tokens into one tensor, scales into weights
            let inside = ["cls_token", "reg_token", ".gamma"];
            let missing = tensors
                .keys()
                .find(|name| !names.contains(name.as_str()) && !inside.iter().any(|inside| name.ends_with(inside)));
            assert_eq!(missing, None, "{text}");
        }
    }
}

#[test]
fn kinds_of_nodes_are_those_of_the_network() {
    let kinds = |text: &str| {
        let arch = arch(text);
        let tensors = tensors(&arch);
        let own = Own { arch: &arch, tensors: &tensors, head: None, input: &INPUT };
        network(&own, &tensors).0.graph.kinds()
    };
    let vit = kinds(VIT);
    for (kind, count) in
        [("Conv", 1), ("Softmax", 2), ("Erf", 2), ("LayerNormalization", 5), ("Gather", 1), ("Expand", 1)]
    {
        assert_eq!(vit[kind], count, "{kind} in {vit:?}");
    }
    assert_eq!(vit["MatMul"], 2 * (2 + 2 + 2));
    let resnet = kinds("[resnet]\ndepth = 50\nwidth = 0.0625");
    assert_eq!((resnet["Conv"], resnet["BatchNormalization"], resnet["Relu"], resnet["MaxPool"]), (53, 53, 49, 1));
    let bare = kinds(&format!("{VIT}pool = \"mean\"\nclass_token = false"));
    assert!(!bare.contains_key("Expand") && !bare.contains_key("Slice") && bare["ReduceMean"] == 1, "{bare:?}");
    let gated = kinds(&format!("{VIT}mlp = \"swiglu\"\nposition = \"rope\""));
    assert_eq!((gated["Sigmoid"], gated["Split"], gated.contains_key("Erf")), (2, 2 * (1 + 2 + 1), false));
}

/// Fields of a message: numbers, or bytes.
#[derive(Debug, PartialEq)]
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return value;
            }
        }
    }
    fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
        let (first, rest) = bytes.split_at(count);
        *bytes = rest;
        first
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => Field::Number(varint(&mut bytes)),
            2 => {
                let length = usize::try_from(varint(&mut bytes)).unwrap();
                Field::Bytes(take(&mut bytes, length))
            }
            5 => Field::Bytes(take(&mut bytes, 4)),
            wire => panic!("wire type {wire}"),
        };
        found.push((key >> 3, value));
    }
    found
}

fn bytes_of<'a>(message: &[(u64, Field<'a>)], field: u64) -> Vec<&'a [u8]> {
    let of = |(at, value): &(u64, Field<'a>)| match value {
        Field::Bytes(bytes) if *at == field => Some(*bytes),
        _ => None,
    };
    message.iter().filter_map(of).collect()
}

fn text_of<'a>(message: &[(u64, Field<'a>)], field: u64) -> &'a str {
    std::str::from_utf8(bytes_of(message, field)[0]).unwrap()
}

fn model(head: Option<&Head>, arch: &Arch, tensors: &Tensors) -> Vec<u8> {
    let Weights::Onnx(bytes) = export(Target::Onnx, arch, tensors, head, &INPUT).unwrap().weights else {
        panic!("another file")
    };
    bytes
}

#[test]
fn a_file_says_what_it_holds() {
    let arch = arch(VIT);
    let (tensors, head) = (tensors(&arch), head(&arch));
    let bytes = model(Some(&head), &arch, &tensors);
    assert_eq!(bytes, model(Some(&head), &arch, &tensors), "the same bytes again");
    let file = fields(&bytes);
    assert_eq!(file[0], (1, Field::Number(8)), "version of the format");
    assert_eq!(text_of(&file, 2), "autodidact");
    assert_eq!(fields(bytes_of(&file, 8)[0]), [(2, Field::Number(17))]);
    let told: BTreeMap<&str, &str> =
        bytes_of(&file, 14).into_iter().map(fields).map(|entry| (text_of(&entry, 1), text_of(&entry, 2))).collect();
    assert_eq!(told["class_names"], r#"["a","b","c \"quoted\""]"#);
    assert_eq!((told["image_size"], told["image_mean"]), ("32", "[0.5, 0.4, 0.3]"));

    let graph = fields(bytes_of(&file, 7)[0]);
    let constants: BTreeMap<&str, Vec<(u64, Field<'_>)>> =
        bytes_of(&graph, 5).into_iter().map(fields).map(|tensor| (text_of(&tensor, 8), tensor)).collect();
    let raw = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let norm = &constants["norm.weight"];
    assert_eq!(norm[..2], [(1, Field::Number(16)), (2, Field::Number(1))]);
    assert_eq!(bytes_of(norm, 9)[0], raw(&tensors["norm.weight"].1));
    assert_eq!(bytes_of(&constants["head.weight"], 9)[0], raw(head.weight()));
    // [48, 16] as [16, 48]
    let qkv = &constants["blocks.1.attn.qkv.weight"];
    assert_eq!(qkv[..2], [(1, Field::Number(16)), (1, Field::Number(48))]);
    let own = &tensors["blocks.1.attn.qkv.weight"].1;
    assert_eq!(bytes_of(qkv, 9)[0][..8], raw(&[own[0], own[16]]));
    for (field, name) in [(11, "images"), (12, "logits")] {
        assert_eq!(text_of(&fields(bytes_of(&graph, field)[0]), 1), name);
    }
    let features = model(None, &arch, &tensors);
    let graph = fields(&features).into_iter().find(|(field, _)| *field == 7).unwrap().1;
    let Field::Bytes(graph) = graph else { panic!("a number") };
    assert_eq!(text_of(&fields(bytes_of(&fields(graph), 12)[0]), 1), "features");
}

#[test]
fn scales_go_into_the_weights_in_front_of_them() {
    let arch = arch(&format!("{VIT}layer_scale = 0.1"));
    let tensors = tensors(&arch);
    let bytes = model(None, &arch, &tensors);
    let file = fields(&bytes);
    let graph = fields(bytes_of(&file, 7)[0]);
    let constants = bytes_of(&graph, 5).into_iter().map(fields);
    let bias = constants.into_iter().find(|tensor| text_of(tensor, 8) == "blocks.0.mlp.fc2.bias").unwrap();
    let (bias, own, gamma) =
        (bytes_of(&bias, 9)[0], &tensors["blocks.0.mlp.fc2.bias"].1, &tensors["blocks.0.ls2.gamma"].1);
    let expected: Vec<u8> = own.iter().zip(gamma).flat_map(|(bias, gamma)| (bias * gamma).to_le_bytes()).collect();
    assert_eq!(bias, expected);
}

#[test]
fn what_no_file_can_hold_is_refused() {
    check_size(86_000_000).unwrap();
    check_size(532_000_000).unwrap();
    let error = check_size(1_136_000_000).unwrap_err().to_string();
    assert_eq!(
        error,
        "an ONNX file cannot express 4.54 GB of weights: it is a message of Protocol Buffers, which end before 2 GiB\n\
         hint: use `--format timm` or `--format hf`"
    );
}
