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

fn tensors_of(exported: &Exported) -> &Tensors {
    match &exported.weights {
        Weights::Tensors(tensors) => tensors,
        Weights::Onnx(_) => panic!("an ONNX file has no tensors of its own"),
    }
}

/// A classifier of three classes behind a norm.
fn head(arch: &Arch) -> Head {
    let dim = Own { arch, tensors: &Tensors::new(), head: None, input: &INPUT }.dim();
    let tensor = |name: &str, shape: &[usize]| {
        let values = (0..shape.iter().product::<usize>()).map(|value| 1.0 + (value % 7) as f32 / 8.0);
        (name.to_owned(), (shape.to_vec(), values.collect()))
    };
    let network =
        [("weight", &[3, dim][..]), ("bias", &[3])].map(|(leaf, shape)| tensor(&format!("head.{leaf}"), shape));
    let norm = ["mean", "var"].map(|leaf| tensor(&format!("head_norm.running_{leaf}"), &[dim]));
    Head::of(&network.into_iter().chain(norm).collect(), &["a", "b", "c"].map(str::to_owned)).unwrap()
}

/// Writes an export and reads it with our own reader.
fn read_back(exported: &Exported) -> (Arch, Tensors) {
    let folder = tempfile::tempdir().unwrap();
    let weights = checkpoint::encode_tensors(tensors_of(exported)).unwrap();
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
            let head = head(&arch);
            for head in [None, Some(&head)] {
                match export(target, &arch, &tensors, head, &INPUT) {
                    Ok(exported) => {
                        assert!(can.contains(letter), "{target:?} takes {text}");
                        let (again, loaded) = read_back(&exported);
                        // the mean of `ViT`'s patches is classified by DINOv2, which has a LayerScale
                        if exported.architecture == "Dinov2ForImageClassification"
                            && !tensors.contains_key("blocks.0.ls1.gamma")
                        {
                            continue;
                        }
                        assert_eq!(bits(&loaded), bits(&tensors), "{target:?}: {text}");
                        assert_same(&again, &arch, &format!("{target:?}: {text}"));
                    }
                    Err(error) => {
                        assert!(
                            !can.contains(letter) || error.to_string().contains("a classifier with"),
                            "{text}: {error}"
                        );
                    }
                }
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
        let error = export(target, &arch, &tensors(&arch), None, &INPUT).expect_err(&text).to_string();
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
    let exported = export(Target::HuggingFace, &arch, &own, None, &INPUT).unwrap();
    assert_eq!(exported.architecture, "Dinov2WithRegistersModel");
    let scale = &tensors_of(&exported)["encoder.layer.1.layer_scale2.lambda1"];
    assert_eq!(scale, &(vec![16], vec![1.0; 16]));
    // positions of registers are added to them; that of the class token stays
    let (_, positions) = &own["pos_embed"];
    let (_, registers) = &own["reg_token"];
    let sums: Vec<f32> = registers.iter().zip(&positions[16..48]).map(|(a, b)| a + b).collect();
    assert_eq!(tensors_of(&exported)["embeddings.register_tokens"], (vec![1, 2, 16], sums));
    let mut expected = positions[..16].to_vec();
    expected.extend(&positions[48..]);
    assert_eq!(tensors_of(&exported)["embeddings.position_embeddings"], (vec![1, 17, 16], expected));
}

#[test]
fn a_classifier_is_put_where_each_program_has_it() {
    let vit = arch(VIT);
    let mean = arch(&format!("{VIT}pool = \"mean\""));
    let resnet = arch("[resnet]\ndepth = 18");
    let convnext = arch("[convnext]\ndepths = [1, 2, 1, 1]\ndims = [4, 6, 8, 12]");
    let cases = [
        (Target::Timm, &vit, "head"),
        (Target::Timm, &resnet, "fc"),
        (Target::Timm, &convnext, "head.fc"),
        (Target::HuggingFace, &vit, "classifier"),
        (Target::HuggingFace, &resnet, "classifier.1"),
        (Target::HuggingFace, &convnext, "classifier"),
        (Target::Torchvision, &vit, "heads.head"),
        (Target::Torchvision, &resnet, "fc"),
        (Target::Torchvision, &convnext, "classifier.2"),
        (Target::Plain, &vit, "head"),
        (Target::Plain, &resnet, "head"),
        (Target::Plain, &convnext, "head"),
    ];
    for (target, arch, layer) in cases {
        let head = head(arch);
        let exported = export(target, arch, &tensors(arch), Some(&head), &INPUT).unwrap();
        let own = tensors_of(&exported);
        assert_eq!(own[&format!("{layer}.weight")].1, head.weight(), "{target:?}: {layer}");
        assert_eq!(own[&format!("{layer}.bias")], (vec![3], head.bias().to_vec()));
        assert!(exported.python.contains("def logits("), "{}", exported.python);
        let names = if target == Target::HuggingFace {
            serde_json::json!(["a", "b", "c"].map(|name| exported.config["label2id"][name].clone()))
        } else {
            exported.config["label_names"].clone()
        };
        let expected = if target == Target::HuggingFace {
            serde_json::json!([0, 1, 2])
        } else {
            serde_json::json!(["a", "b", "c"])
        };
        assert_eq!(names, expected, "{target:?}");
    }
    // the mean of the patches is the second half of what DINOv2's classifier sees
    let head = head(&mean);
    let exported = export(Target::HuggingFace, &mean, &tensors(&mean), Some(&head), &INPUT).unwrap();
    assert_eq!(exported.architecture, "Dinov2ForImageClassification");
    assert_eq!(tensors_of(&exported)["classifier.weight"], (vec![3, 32], head.doubled(false).weight().to_vec()));
    assert!(tensors_of(&exported).contains_key("dinov2.layernorm.weight"));
    let rotary = arch(&format!("{VIT}position = \"rope\""));
    let error = export(Target::HuggingFace, &rotary, &tensors(&rotary), Some(&head), &INPUT).unwrap_err().to_string();
    assert_eq!(
        error,
        "transformers cannot express a classifier with rotary positions: its DINOv3 has none\n\
         hint: use `--format timm`, or `--backbone-only` for the features"
    );
}

#[test]
fn a_hidden_width_survives_the_product_with_its_ratio() {
    for dim in [16, 48, 192, 384, 1000, 1536] {
        for hidden in (1..5000).step_by(7) {
            assert_eq!((dim as f64 * ratio(hidden, dim)) as usize, hidden, "{hidden} of {dim}");
        }
    }
}
