//! Residual networks: torchvision's and Hugging Face's.

use std::collections::BTreeMap;

use autodidact::model::params::read_buffers;
use autodidact::model::{Boundary, Kind, Noise, Pass, ResNet, ResNetArch, ResidualKind, Scope, Segmented, Stem};
use burn::tensor::{Device, Tensor};

use super::super::{Array, Case, Checks, Outcome};
use super::*;

/// Hugging Face's ResNet names in torchvision's.
fn hf_resnet_name(name: &str) -> Option<Place> {
    if name.ends_with("num_batches_tracked") {
        return None;
    }
    let leaf = name.rsplit('.').next()?;
    let conv = name.contains(".convolution.");
    if name.starts_with("embedder.") {
        return Some((format!("{}1.{leaf}", if conv { "conv" } else { "bn" }), None));
    }
    let parts: Vec<&str> = name.split('.').collect(); // encoder stages S layers J (layer K | shortcut) kind leaf
    let stage = parts.get(2)?.parse::<usize>().ok()? + 1;
    let inner = match parts[5] {
        "shortcut" => format!("downsample.{}", usize::from(!conv)),
        _ => format!("{}{}", if conv { "conv" } else { "bn" }, parts[6].parse::<usize>().ok()? + 1),
    };
    Some((format!("layer{stage}.{}.{inner}.{leaf}", parts[4]), None))
}

fn spatial_mean(x: &Tensor<4>) -> Tensor<2> {
    let [batch, channels, height, width] = x.dims();
    x.clone().reshape([batch, channels, height * width]).mean_dim(2).reshape([batch, channels])
}

/// Runs the segments; hands over the map behind the stem and behind each stage, returns the pooled features.
fn run_stages(net: &ResNet, x: &Tensor<4>, pass: &mut Pass, mut seen: impl FnMut(&str, &Tensor<4>)) -> Tensor<2> {
    let mut at = Boundary::Map(x.clone());
    let stage = |index: usize| net.segment_name(index).split('.').next().unwrap().to_owned();
    for index in 0..net.num_segments() {
        at = net.forward_segment(index, at, pass);
        if let Boundary::Map(map) = &at
            && stage(index + 1) != stage(index)
        {
            seen(&stage(index), map);
        }
    }
    at.into_features().pooled
}

pub(super) fn torchvision(case: &Case) -> Outcome {
    let args = case.args();
    let counts = |name: &str| args[name].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect();
    let planes: Vec<usize> = counts("planes");
    let block = match args["block"].as_str() {
        Some("BasicBlock") => ResidualKind::Basic,
        Some("Bottleneck") => ResidualKind::Bottleneck,
        other => return Outcome::NotYet(format!("block {other:?}")),
    };
    let stem = match args["stem"].as_str() {
        Some("imagenet") => Stem::Imagenet,
        Some("cifar") => Stem::Cifar,
        other => return Outcome::NotYet(format!("stem {other:?}")),
    };
    let tensors = renamed(&checkpoint(case), same_name);
    let arch = ResNetArch {
        block,
        layers: counts("layers"),
        stem_planes: tensors["conv1.weight"].shape[0],
        planes,
        stem,
        channels: tensors["conv1.weight"].shape[1],
        num_classes: tensors.get("fc.weight").map_or(0, |fc| fc.shape[0]),
        zero_init_residual: false,
    };
    let scope = scope();
    let (net, layout) = load(ResNet::new(&arch, &scope), &tensors, scope.device());
    let x = input(case);

    let mut outputs = Outputs::new(case, "");
    add_stages(&net, &x, &mut Pass::eval(), &mut outputs, true);
    let gradients = outputs.backward(&x, &net, &layout);
    let mut checks = outputs.checks;
    compare_gradients(case, "grad.", &mut checks, &gradients, same_name, no_noise);

    if case.tensors.contains_key("train.out.pooled") {
        let rows: Vec<_> = (0..x.dims()[0] as u64).map(|image| (image, 0)).collect();
        let train = |x: &Tensor<4>| {
            let mut pass = Pass::train(Noise { seed: 0, step: 0, rows: rows.clone() });
            let mut outputs = Outputs::new(case, "train.");
            add_stages(&net, x, &mut pass, &mut outputs, false);
            let gradients = outputs.backward(x, &net, &layout);
            (outputs.checks, gradients, pass.take_batch_stats())
        };
        let (train_checks, gradients, stats) = train(&input(case));
        checks.merge(train_checks);
        // Statistics over a handful of values make these gradients ill-conditioned: moving the input by its last bit
        // alone moves some by 2e-5 of their maximum, and every layer rounds as well.
        let nudged = train(&nudged(case)).1;
        compare_gradients(case, "train.grad.", &mut checks, &gradients, same_name, |name, got| {
            let other = gradient_on_disk(&nudged, name, got.len(), same_name);
            let largest = got.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let moved = got.iter().zip(&other).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
            4.0 * f64::from(moved / largest)
        });
        let mut buffers = read_buffers(&net, &layout);
        for stats in stats {
            let [mean, var] = layout.places(&stats);
            let host = |tensor: Tensor<1>| tensor.into_data().try_to_vec::<f32>().unwrap();
            autodidact::model::params::fold(&mut buffers[mean], &host(stats.mean));
            autodidact::model::params::fold(&mut buffers[var], &host(stats.var));
        }
        for entry in layout.entries().iter().filter(|entry| entry.kind == Kind::Buffer) {
            let name = format!("train.state.{}", entry.path);
            if let Some(expected) = case.tensors.get(&name) {
                let got = &buffers[entry.offset..entry.offset + entry.len];
                checks.relative_to_max(&name, got, expected, tolerance(case, "rel_to_max"));
            }
        }
    }
    Outcome::Compared(checks)
}

/// The input with every value moved to a neighbouring float.
fn nudged(case: &Case) -> Tensor<4> {
    let mut x = case.tensor("x").clone();
    for (index, value) in x.values.iter_mut().enumerate() {
        let float = *value as f32;
        *value = f64::from(if splitmix64(index as u64) & 1 == 0 { float.next_up() } else { float.next_down() });
    }
    tensor::<4>(&x, &Device::flex().autodiff()).require_grad()
}

fn add_stages(net: &ResNet, x: &Tensor<4>, pass: &mut Pass, outputs: &mut Outputs<'_>, divide: bool) {
    let pooled = run_stages(net, x, pass, |stage, map| {
        let rank = outputs.case.tensors.get(&format!("{}out.{stage}", outputs.prefix)).map_or(0, |t| t.shape.len());
        match rank {
            2 => outputs.add(stage, &spatial_mean(map), divide),
            _ => outputs.add(stage, map, divide),
        }
    });
    outputs.add("pooled", &pooled, divide);
    if let Some(logits) = net.logits(pooled) {
        outputs.add("logits", &logits, divide);
    }
}

pub(super) fn hf(case: &Case) -> Outcome {
    let config = folder_config(case);
    let counts = |name: &str| -> Vec<usize> {
        config[name].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect()
    };
    let block = match config["layer_type"].as_str() {
        Some("basic") => ResidualKind::Basic,
        Some("bottleneck") => ResidualKind::Bottleneck,
        other => return Outcome::NotYet(format!("layer type {other:?}")),
    };
    for flag in ["downsample_in_first_stage", "downsample_in_bottleneck"] {
        if config[flag].as_bool() == Some(true) {
            return Outcome::NotYet(flag.to_owned());
        }
    }
    let tensors = renamed(&checkpoint(case), hf_resnet_name);
    let arch = ResNetArch {
        block,
        layers: counts("depths"),
        planes: counts("hidden_sizes").into_iter().map(|size| size / block.expansion()).collect(),
        stem_planes: tensors["conv1.weight"].shape[0],
        stem: Stem::Imagenet,
        channels: tensors["conv1.weight"].shape[1],
        num_classes: 0,
        zero_init_residual: false,
    };
    let scope = scope();
    let (net, layout) = load(ResNet::new(&arch, &scope), &tensors, scope.device());
    let x = input(case);
    let mut outputs = Outputs::new(case, "");
    let pooled = run_stages(&net, &x, &mut Pass::eval(), |stage, map| {
        if stage == "layer4" {
            outputs.add("last_hidden_state", map, true);
        }
    });
    outputs.add("pooler_output", &pooled, true);
    let gradients = outputs.backward(&x, &net, &layout);
    compare_gradients(case, "grad.", &mut outputs.checks, &gradients, hf_resnet_name, no_noise);
    Outcome::Compared(outputs.checks)
}

/// A network whose weights and input come from a counter generator.
pub(super) fn generated(case: &Case) -> Outcome {
    let seed = case.args()["seed"].as_u64().unwrap();
    let generate = |index: u64, count: usize, low: f64, high: f64| -> Vec<f64> {
        (0..count as u64)
            .map(|i| {
                let hash = splitmix64(seed.wrapping_add(index << 40).wrapping_add(i));
                f64::from((low + (high - low) * ((hash >> 40) as f64 / f64::from(1 << 24))) as f32)
            })
            .collect()
    };
    let mut tensors = BTreeMap::new();
    for row in case.manifest["tensor_table"]["rows"].as_array().unwrap() {
        let Some(low) = row[3].as_f64() else { continue }; // num_batches_tracked
        let shape: Vec<usize> = row[1].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect();
        let values = generate(row[2].as_u64().unwrap(), shape.iter().product(), low, row[4].as_f64().unwrap());
        tensors.insert(row[0].as_str().unwrap().to_owned(), Array { shape, values });
    }
    let args = case.args();
    let shape: Vec<usize> =
        args["input_shape"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect();
    let index = args["input_tensor_index"].as_u64().unwrap();
    let count = shape.iter().product();
    let x = Array { values: generate(index, count, case.arg_f64("input_lo"), case.arg_f64("input_hi")), shape };

    let mut checks = Checks::default();
    for (name, values) in [("x_head", &x.values), ("conv1_head", &tensors["conv1.weight"].values)] {
        let expected = case.tensor(name);
        let got: Vec<f32> = values[..expected.values.len()].iter().map(|&v| v as f32).collect();
        checks.absolute(name, &got, expected, 0.0);
    }
    let blocks = |stage: usize| {
        (0..1000).take_while(|i| tensors.contains_key(&format!("layer{stage}.{i}.conv1.weight"))).count()
    };
    let arch = ResNetArch {
        block: if tensors.contains_key("layer1.0.conv3.weight") {
            ResidualKind::Bottleneck
        } else {
            ResidualKind::Basic
        },
        layers: (1..=4).map(blocks).collect(),
        planes: (1..=4).map(|stage| tensors[&format!("layer{stage}.0.conv1.weight")].shape[0]).collect(),
        stem_planes: tensors["conv1.weight"].shape[0],
        stem: if tensors["conv1.weight"].shape[2] == 7 { Stem::Imagenet } else { Stem::Cifar },
        channels: tensors["conv1.weight"].shape[1],
        num_classes: tensors.get("fc.weight").map_or(0, |fc| fc.shape[0]),
        zero_init_residual: false,
    };
    let device = Device::flex();
    let (net, _) = load(ResNet::new(&arch, &Scope::new(0, &device)), &tensors, &device);
    let tolerance = tolerance(case, "rel_to_max");
    let mut compare = |name: &str, got: Vec<f32>| {
        if let Some(expected) = case.tensors.get(name) {
            checks.relative_to_max(name, &got, expected, tolerance);
        }
    };
    let pooled = run_stages(&net, &tensor(&x, &device), &mut Pass::eval(), |stage, map| {
        compare(stage, values(map));
        compare(&format!("{stage}_mean_c"), values(&spatial_mean(map)));
    });
    compare("pooled", values(&pooled));
    if let Some(logits) = net.logits(pooled) {
        compare("logits", values(&logits));
    }
    Outcome::Compared(checks)
}

fn splitmix64(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
