//! Golden cases of kind `adapters`: position embeddings that are computed or resized, patches and channels that are, tensors of other names.

use std::collections::BTreeMap;

use autodidact::interop::{Arch, Checkpoint, Found, Hints, adapt_channels, resample_patches};
use autodidact::model::position::{Bicubic, resize_matrix, sincos_table};
use autodidact::model::{Pass, Vit};
use burn::tensor::{Tensor, TensorData};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use super::models::{load, scope, values};
use super::{Array, Case, Checks, Outcome};

pub(super) fn run(case: &Case) -> Outcome {
    let name = case.name.as_str();
    if name.starts_with("sincos_pos_embed") {
        sincos(case)
    } else if name.starts_with("timm_pos_embed") {
        let bicubic = [("out_bicubic_aa", Bicubic::Antialias), ("out_bicubic_noaa", Bicubic::Plain)];
        resized(case, &bicubic, case.arg_usize("num_prefix_tokens"))
    } else if name.starts_with("mae_pos_embed") {
        resized(case, &[("out", Bicubic::Plain)], 1)
    } else if name.starts_with("dinov2_pos_embed") {
        let kinds = [
            ("out_offset0_aa", Bicubic::Antialias),
            ("out_offset0_noaa", Bicubic::Plain),
            ("out_offset01_noaa", Bicubic::PlainOffset),
        ];
        resized(case, &kinds, 1)
    } else if name.starts_with("dino_pos_embed") {
        resized(case, &[("out_offset01", Bicubic::PlainOffset)], 1)
    } else if name.starts_with("qkv_fold") {
        folded(case)
    } else if name.starts_with("hf_vit_to_timm") {
        renamed(case)
    } else if name.starts_with("timm_patch_embed") {
        patches(case)
    } else if name.starts_with("timm_adapt_input_conv") {
        channels(case)
    } else {
        Outcome::NotYet("no runner for this adapter yet".to_owned())
    }
}

fn patches(case: &Case) -> Outcome {
    let (from, to, weight) = (pair(case, "old"), pair(case, "new"), case.tensor("weight"));
    let mut checks = Checks::default();
    for (name, kind) in [("out_aa", Bicubic::Antialias), ("out_noaa", Bicubic::Plain)] {
        let Some(expected) = case.tensors.get(name) else { continue };
        let got = resample_patches(&weight.f32(), from, to, kind).expect("resizing has a pseudo-inverse");
        checks.relative_to_max(name, &got, expected, case.tolerance("rel_to_max"));
    }
    Outcome::Compared(checks)
}

fn channels(case: &Case) -> Outcome {
    let weight = case.tensor("weight");
    let area = weight.shape[2] * weight.shape[3];
    let mut checks = Checks::default();
    for (name, expected) in case.tensors.iter().filter(|(name, _)| name.starts_with("out_")) {
        let got = adapt_channels(&weight.f32(), weight.shape[1], expected.shape[1], area);
        checks.absolute(name, &got, expected, case.tolerance("abs"));
    }
    Outcome::Compared(checks)
}

/// Tensors of a file, written and read as those of other programs are; the folder must outlive them.
fn read_back(tensors: &BTreeMap<String, Array>) -> (TempDir, Checkpoint) {
    let bytes: Vec<Vec<u8>> =
        tensors.values().map(|array| array.f32().iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, array), bytes)| {
        (name, TensorView::new(Dtype::F32, array.shape.clone(), bytes).expect("as many values as the shape says"))
    });
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, safetensors::serialize(views, None).expect("names are unique")).expect("written");
    let checkpoint = Checkpoint::open(&path).unwrap_or_else(|e| panic!("{e}"));
    (folder, checkpoint)
}

/// A vision transformer as Hugging Face names its tensors becomes one as timm does, bit for bit.
fn renamed(case: &Case) -> Outcome {
    let under = |prefix: &str| -> BTreeMap<String, Array> {
        let inside = case.tensors.iter().filter_map(|(name, array)| Some((name.strip_prefix(prefix)?, array)));
        inside.map(|(name, array)| (name.to_owned(), array.clone())).collect()
    };
    let (_folder, checkpoint) = read_back(&under("hf/"));
    let hints = Hints { heads: Some(case.arg_usize("heads")), image: Some([case.arg_usize("img"); 2]) };
    let found = Found::find(&checkpoint, &hints).unwrap_or_else(|e| panic!("{e}"));
    let loaded = found.load(found.arch()).unwrap_or_else(|e| panic!("{e}"));
    let expected = under("timm/");
    assert_eq!(loaded.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "names");
    let mut checks = Checks::default();
    for (name, (shape, values)) in &loaded {
        assert_eq!(shape, &expected[name].shape, "{name}: shape");
        checks.absolute(name, values, &expected[name], 0.0);
    }
    let Arch::Vit(arch) = found.arch() else { panic!("a ViT") };
    let scope = scope();
    let (net, _) = load(Vit::new(arch, &scope).expect("a network"), &expected, scope.device());
    let x = case.tensor("x");
    let shape: [usize; 4] = x.shape.clone().try_into().expect("images");
    let images = Tensor::<4>::from_data(TensorData::new(x.f32(), shape), scope.device());
    let tokens: Tensor<3> = net.encode_tokens(net.embed_patches(images), &mut Pass::eval());
    checks.absolute("tokens", &values(&tokens), case.tensor("tokens"), case.tolerance("abs"));
    Outcome::Compared(checks)
}

/// Queries, keys and values of a block become one matrix, in a network of which nothing else matters.
fn folded(case: &Case) -> Outcome {
    let dim = case.arg_usize("dim");
    let zeros = |shape: &[usize]| Array { shape: shape.to_vec(), values: vec![0.0; shape.iter().product()] };
    let around = |embeddings: &str, block: &str, norms: [&str; 3], mlp: [&str; 2], out: &str| {
        let mut tensors: BTreeMap<String, Array> = BTreeMap::new();
        let mut put = |name: String, shape: &[usize]| drop(tensors.insert(name, zeros(shape)));
        put(format!("{embeddings}.weight"), &[dim, 3, 4, 4]);
        put(format!("{embeddings}.bias"), &[dim]);
        for norm in norms {
            put(format!("{norm}.weight"), &[dim]);
            put(format!("{norm}.bias"), &[dim]);
        }
        for (name, rows, columns) in [(mlp[0], 4 * dim, dim), (mlp[1], dim, 4 * dim), (out, dim, dim)] {
            put(format!("{block}.{name}.weight"), &[rows, columns]);
            put(format!("{block}.{name}.bias"), &[rows]);
        }
        tensors
    };
    let hints = Hints { heads: Some(1), image: Some([8; 2]) };
    let mut checks = Checks::default();
    let mut compare = |tensors: &BTreeMap<String, Array>, pairs: &[(&str, &str)]| {
        let (_folder, checkpoint) = read_back(tensors);
        let found = Found::find(&checkpoint, &hints).unwrap_or_else(|e| panic!("{e}"));
        let loaded = found.load(found.arch()).unwrap_or_else(|e| panic!("{e}"));
        for (ours, theirs) in pairs {
            let (shape, values) = &loaded[&format!("blocks.0.attn.qkv.{ours}")];
            assert_eq!(shape, &case.tensor(theirs).shape, "{theirs}: shape");
            checks.absolute(theirs, values, case.tensor(theirs), case.tolerance("abs"));
        }
    };

    // Hugging Face's names
    let block = "encoder.layer.0";
    let norms = [&format!("{block}.layernorm_before"), &format!("{block}.layernorm_after"), "layernorm"];
    let mlp = ["intermediate.dense", "output.dense"];
    let mut tensors = around("embeddings.patch_embeddings.projection", block, norms, mlp, "attention.output.dense");
    tensors.insert("embeddings.cls_token".to_owned(), zeros(&[1, 1, dim]));
    tensors.insert("embeddings.position_embeddings".to_owned(), zeros(&[1, 5, dim]));
    for (theirs, part) in [("query", "q"), ("key", "k"), ("value", "v")] {
        for kind in ["weight", "bias"] {
            let tensor = case.tensor(&format!("{part}.{kind}")).clone();
            tensors.insert(format!("{block}.attention.attention.{theirs}.{kind}"), tensor);
        }
    }
    compare(&tensors, &[("weight", "qkv.weight"), ("bias", "qkv.bias")]);

    // BEiT's, without a bias of keys
    if case.tensors.contains_key("qkv.bias_nokey") {
        let norms = ["blocks.0.norm1", "blocks.0.norm2", "norm"];
        let mut tensors = around("patch_embed.proj", "blocks.0", norms, ["mlp.fc1", "mlp.fc2"], "attn.proj");
        tensors.insert("cls_token".to_owned(), zeros(&[1, 1, dim]));
        tensors.insert("pos_embed".to_owned(), zeros(&[1, 5, dim]));
        tensors.insert("blocks.0.attn.qkv.weight".to_owned(), case.tensor("qkv.weight").clone());
        tensors.insert("blocks.0.attn.q_bias".to_owned(), case.tensor("q.bias").clone());
        tensors.insert("blocks.0.attn.v_bias".to_owned(), case.tensor("v.bias").clone());
        compare(&tensors, &[("weight", "qkv.weight"), ("bias", "qkv.bias_nokey")]);
    }
    Outcome::Compared(checks)
}

/// A count or a pair of them.
fn pair(case: &Case, name: &str) -> [usize; 2] {
    let value = &case.args()[name];
    let count = |value: &serde_json::Value| value.as_u64().map(|n| n as usize);
    let both = value.as_array().map_or([count(value); 2], |pair| [count(&pair[0]), count(&pair[1])]);
    both.map(|n| n.unwrap_or_else(|| panic!("{}: args.{name} is no size", case.name)))
}

/// The table of MAE; that of MoCo v3 is read from checkpoints, not computed.
fn sincos(case: &Case) -> Outcome {
    let dim = case.arg_usize("dim");
    let mut checks = Checks::default();
    let mut table = vec![0.0; dim];
    table.extend(sincos_table(pair(case, "mae_grid"), dim));
    checks.absolute("mae", &table, case.tensor("mae"), case.tolerance("abs"));
    Outcome::Compared(checks)
}

fn resized(case: &Case, kinds: &[(&str, Bicubic)], num_prefix: usize) -> Outcome {
    let (from, to) = (pair(case, "old"), pair(case, "new"));
    let table = case.tensor("pos_embed");
    let dim = table.shape[2];
    let mut checks = Checks::default();
    for (name, kind) in kinds {
        let Some(expected) = case.tensors.get(*name) else { continue };
        let got = resize(table, from, to, *kind, num_prefix * dim, dim);
        checks.absolute(name, &got, expected, case.tolerance("abs"));
    }
    Outcome::Compared(checks)
}

fn resize(table: &Array, from: [usize; 2], to: [usize; 2], kind: Bicubic, prefix: usize, dim: usize) -> Vec<f32> {
    let (fixed, grid) = table.values.split_at(prefix);
    let mut out: Vec<f32> = fixed.iter().map(|&value| value as f32).collect();
    for row in resize_matrix(from, to, kind).chunks(from[0] * from[1]) {
        for channel in 0..dim {
            let value: f64 = row.iter().zip(grid.chunks(dim)).map(|(w, token)| f64::from(*w) * token[channel]).sum();
            out.push(value as f32);
        }
    }
    out
}
