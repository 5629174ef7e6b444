//! Round trips through our own reader, and refusals.

use std::fs;

use super::*;
use crate::checkpoint;
use crate::interop::{Checkpoint, Found, Hints};
use crate::model::BackboneConfig;

const INPUT: Input = Input { size: 32, shorter: 32, mean: [0.5, 0.4, 0.3], std: [0.2, 0.3, 0.4] };
const VIT: &str = "[vit]\npatch = 8\ndim = 16\ndepth = 2\nheads = 4\n";
const TARGETS: [Target; 4] = [Target::Timm, Target::HuggingFace, Target::Torchvision, Target::Plain];

fn arch(text: &str) -> Arch {
    let config: BackboneConfig = toml::from_str(text).unwrap();
    Arch::from_config(&config, 32).unwrap()
}

/// Values that are all different, positive.
fn tensors(arch: &Arch) -> Tensors {
    let mut next = 0;
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let values = (0..shape.iter().product::<usize>()).map(|_| {
            next += 1;
            1.0 + next as f32 / 65536.0
        });
        let values = values.collect();
        (name, (shape, values))
    };
    arch.tensors().into_iter().map(tensor).collect()
}

/// Writes an export and reads it with our own reader.
fn read_back(exported: &Exported) -> (Arch, Tensors) {
    let folder = tempfile::tempdir().unwrap();
    let weights = checkpoint::encode_tensors(&exported.tensors).unwrap();
    fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    fs::write(folder.path().join("config.json"), exported.config.to_string()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let found = Found::find(&checkpoint, &Hints::default()).unwrap();
    let fit = found.fit(found.arch());
    assert!(fit.left_over.is_empty(), "{:?}", fit.left_over);
    let loaded = found.load(found.arch()).unwrap();
    (found.arch().clone(), loaded)
}

fn bits(tensors: &Tensors) -> Vec<(&String, &Vec<usize>, Vec<u32>)> {
    tensors.iter().map(|(name, (shape, values))| (name, shape, values.iter().map(|v| v.to_bits()).collect())).collect()
}

#[test]
fn our_own_reader_gets_the_same_bits_back() {
    let (timm, hf, tv, all) = ("t", "h", "v", "thvp");
    let cases = [
        (VIT.to_owned(), all),
        (format!("{VIT}norm_eps = 1e-5"), all),
        (format!("{VIT}pool = \"mean\""), "thp"),
        (format!("{VIT}pool = \"mean\"\nfc_norm = true\nqk_norm = true\npre_norm = true\nnorm_eps = 1e-5"), "tp"),
        (format!("{VIT}pool = \"mean\"\nclass_token = false\nqkv_bias = false"), "tp"),
        (format!("{VIT}layer_scale = 1e-5"), "thp"),
        (format!("{VIT}layer_scale = 1e-5\nmlp = \"swiglu\""), "thp"),
        (format!("{VIT}layer_scale = 1e-5\nmlp = \"geglu\""), "p"),
        (
            format!("{VIT}layer_scale = 1e-5\nposition = \"rope\"\nregisters = 2\nnorm_eps = 1e-5\nrope_base = 50"),
            "thp",
        ),
        (format!("{VIT}layer_scale = 1e-5\nposition = \"rope\"\nregisters = 1\nmlp = \"swiglu\""), "thp"),
        (
            format!("{VIT}layer_scale = 1e-5\nposition = \"rope\"\nregisters = 1\nmlp = \"geglu\"\nqkv_bias = false"),
            "hp",
        ),
        (format!("{VIT}layer_scale = 1e-5\nposition = \"rope\""), "thp"),
        ("[resnet]\ndepth = 18".to_owned(), all),
        ("[resnet]\ndepth = 50\nwidth = 0.0625".to_owned(), "hp"),
        ("[resnet]\ndepth = 18\nwidth = 0.125\nstem = \"cifar\"".to_owned(), "p"),
        ("[convnext]\ndepths = [1, 2, 1, 1]\ndims = [4, 6, 8, 12]".to_owned(), all),
        (
            "[convnext]\ndepths = [1, 1, 1, 1]\ndims = [4, 6, 8, 12]\npatch = 2\nkernel = 5\nlayer_scale = 0"
                .to_owned(),
            "tp",
        ),
        ("[convnext]\ndepths = [1, 1, 1, 1]\ndims = [4, 6, 8, 12]\npatch = 1\nlayer_scale = 0".to_owned(), "thp"),
    ];
    assert!([timm, hf, tv].iter().all(|one| all.contains(one)));
    for (text, can) in cases {
        let arch = arch(&text);
        let tensors = tensors(&arch);
        for (target, letter) in TARGETS.into_iter().zip(["t", "h", "v", "p"]) {
            match export(target, &arch, &tensors, &INPUT) {
                Ok(exported) => {
                    assert!(can.contains(letter), "{target:?} takes {text}");
                    let (again, loaded) = read_back(&exported);
                    assert_eq!(bits(&loaded), bits(&tensors), "{target:?}: {text}");
                    assert_same(&again, &arch, &format!("{target:?}: {text}"));
                }
                Err(error) => assert!(!can.contains(letter), "{text}: {error}"),
            }
        }
    }
}

/// Compares what decides on features; how weights are drawn and regularised is in no file.
fn assert_same(again: &Arch, arch: &Arch, what: &str) {
    let mut again = again.clone();
    match (&mut again, arch) {
        (Arch::Vit(again), Arch::Vit(arch)) => {
            (again.layer_scale, again.init) = (arch.layer_scale, arch.init);
            if arch.position == crate::model::PositionEmbedding::Rope || arch.num_prefix() == 0 {
                again.prefix_positions = arch.prefix_positions; // there are none
            }
            if !arch.qkv_bias {
                again.key_bias = arch.key_bias; // there are no biases
            }
        }
        (Arch::ConvNext(again), Arch::ConvNext(arch)) => again.layer_scale = arch.layer_scale,
        _ => {}
    }
    assert_eq!(&again, arch, "{what}");
}

#[test]
fn what_cannot_be_expressed_is_refused_in_a_sentence_with_a_way_out() {
    let convnext = "[convnext]\ndepths = [1, 1, 1, 1]\ndims = [4, 6, 8, 12]\n";
    let vit = |more: &str| format!("{VIT}{more}");
    let cases = [
        (Target::Timm, "[resnet]\ndepth = 18\nstem = \"cifar\"".to_owned(), "the 3 x 3 stem"),
        (Target::Timm, "[resnet]\ndepth = 18\nwidth = 0.5".to_owned(), "a stem of 32 channels"),
        (Target::Timm, vit("mlp = \"geglu\""), "an MLP gated by GELU"),
        (Target::Timm, vit("mlp = \"geglu\"\nposition = \"rope\""), "an MLP gated by GELU"),
        (Target::Timm, vit("norm_eps = 1e-12"), "epsilon 1e-12"),
        (Target::Timm, vit("norm_eps = 1e-12\nposition = \"rope\""), "epsilon 1e-12"),
        (Target::Timm, vit("norm_eps = 1e-5\nmlp = \"swiglu\""), "epsilon 1e-5"),
        (Target::Timm, format!("{convnext}patch = 8"), "patches of 8 px"),
        (Target::HuggingFace, "[resnet]\ndepth = 18\nstem = \"cifar\"".to_owned(), "the 3 x 3 stem"),
        (Target::HuggingFace, vit("class_token = false\npool = \"mean\""), "without class token"),
        (Target::HuggingFace, vit("qk_norm = true"), "norms of queries and keys"),
        (Target::HuggingFace, vit("pre_norm = true"), "a norm before the blocks"),
        (Target::HuggingFace, vit("pool = \"mean\"\nfc_norm = true"), "the final norm after pooling"),
        (Target::HuggingFace, vit("registers = 1\nmlp_ratio = 2.5"), "a hidden width of 40"),
        (Target::HuggingFace, vit("mlp = \"geglu\""), "an MLP gated by GELU"),
        (Target::HuggingFace, format!("{convnext}kernel = 5"), "kernels of 5 px"),
        (Target::HuggingFace, format!("{convnext}patch = 2"), "patches of 2 px"),
        (Target::Torchvision, "[resnet]\ndepth = 18\nstem = \"cifar\"".to_owned(), "the 3 x 3 stem"),
        (Target::Torchvision, "[resnet]\ndepth = 18\nwidth = 0.5".to_owned(), "channels [32, 64, 128, 256]"),
        (Target::Torchvision, vit("class_token = false\npool = \"mean\""), "without class token"),
        (Target::Torchvision, vit("pool = \"mean\""), "the mean of the patches"),
        (Target::Torchvision, vit("registers = 1"), "register tokens"),
        (Target::Torchvision, vit("prefix_positions = false"), "a class token without position"),
        (Target::Torchvision, vit("layer_scale = 1.0"), "LayerScale"),
        (Target::Torchvision, vit("mlp = \"swiglu\""), "a gated MLP"),
        (Target::Torchvision, vit("qkv_bias = false"), "without biases"),
        (Target::Torchvision, vit("qk_norm = true"), "norms of queries and keys"),
        (Target::Torchvision, vit("pre_norm = true"), "a norm before the blocks"),
        (Target::Torchvision, vit("position = \"rope\""), "rotary positions"),
        (Target::Torchvision, format!("{convnext}kernel = 5"), "kernels of 5 px"),
        (Target::Torchvision, format!("{convnext}patch = 2"), "patches of 2 px"),
        (Target::Torchvision, format!("{convnext}layer_scale = 0"), "without LayerScale"),
    ];
    for (target, text, words) in cases {
        let arch = arch(&text);
        let error = export(target, &arch, &tensors(&arch), &INPUT).expect_err(&text).to_string();
        let (problem, hint) = error.split_once("\nhint: ").unwrap();
        assert!(problem.contains(" cannot express ") && problem.contains(words), "{error}");
        assert!(problem.contains(": ") && hint.starts_with("use ") && !hint.contains('\n'), "{error}");
    }
}

#[test]
fn what_changes_nothing_fills_what_is_not_there() {
    let text = format!("{VIT}registers = 2\nprefix_positions = true");
    let arch = arch(&text);
    let own = tensors(&arch);
    let exported = export(Target::HuggingFace, &arch, &own, &INPUT).unwrap();
    assert_eq!(exported.architecture, "Dinov2WithRegistersModel");
    let scale = &exported.tensors["encoder.layer.1.layer_scale2.lambda1"];
    assert_eq!(scale, &(vec![16], vec![1.0; 16]));
    // positions of registers are added to them; that of the class token stays
    let (_, positions) = &own["pos_embed"];
    let (_, registers) = &own["reg_token"];
    let sums: Vec<f32> = registers.iter().zip(&positions[16..48]).map(|(a, b)| a + b).collect();
    assert_eq!(exported.tensors["embeddings.register_tokens"], (vec![1, 2, 16], sums));
    let mut expected = positions[..16].to_vec();
    expected.extend(&positions[48..]);
    assert_eq!(exported.tensors["embeddings.position_embeddings"], (vec![1, 17, 16], expected));
}

#[test]
fn a_hidden_width_survives_the_product_with_its_ratio() {
    for dim in [16, 48, 192, 384, 1000, 1536] {
        for hidden in (1..5000).step_by(7) {
            assert_eq!((dim as f64 * ratio(hidden, dim)) as usize, hidden, "{hidden} of {dim}");
        }
    }
}
