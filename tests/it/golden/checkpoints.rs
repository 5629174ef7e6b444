//! Golden cases of kind `checkpoints`: what lies in files of other programs, and the features of the backbones in them.

use std::collections::BTreeMap;

use autodidact::interop::{Arch, Checkpoint, Found, Hints, Setting};
use autodidact::model::{ConvNext, Pass, ResNet, Vit};
use burn::tensor::Tensor;
use serde_json::Value;

use super::models::{input, load, scope, values};
use super::{Array, Case, Checks, Outcome};

pub(super) fn run(case: &Case) -> Outcome {
    let path = case.root.join(case.manifest["file"].as_str().expect("the manifest names a file"));
    let checkpoint = Checkpoint::open(&path).unwrap_or_else(|e| panic!("{e}"));
    let mut checks = Checks::default();
    contents(case, &checkpoint, &mut checks);
    if case.tensors.keys().any(|name| name.starts_with("out.")) {
        let args = case.args();
        let side = |value: &Value| value.as_u64().map(|side| side as usize);
        let image = match &args["img_size"] {
            Value::Array(sides) => side(&sides[0]).zip(side(&sides[1])).map(|(height, width)| [height, width]),
            value => side(value).map(|side| [side; 2]),
        };
        let hints = Hints { heads: side(&args["num_heads"]), image };
        let found = Found::find(&checkpoint, &hints).unwrap_or_else(|e| panic!("{e}"));
        place(case, &found);
        features(case, &found, &mut checks);
    }
    Outcome::Compared(checks)
}

/// Largest difference as a part of what is allowed: `abs + rel * |expected|`.
fn compare(case: &Case, checks: &mut Checks, what: &str, got: &[f64], expected: &Array) {
    let (abs, rel) = (case.tolerance("abs"), case.tolerance("rel"));
    assert_eq!(got.len(), expected.values.len(), "{what}: number of values");
    let parts = got.iter().zip(&expected.values).map(|(g, e)| (g - e).abs() / (abs + rel * e.abs()));
    checks.note(what, parts.fold(0.0, |most, part| if part.is_nan() || part > most { part } else { most }), 1.0);
}

/// Compares keys, types, shapes and values of everything in the file.
fn contents(case: &Case, checkpoint: &Checkpoint, checks: &mut Checks) {
    if let Some(listed) = case.manifest["tensors_in_file"].as_object() {
        let ours: Vec<&String> = checkpoint.tensors().keys().collect();
        let mut theirs: Vec<&String> = listed.keys().collect();
        theirs.sort();
        assert_eq!(ours, theirs, "keys");
        for (name, about) in listed {
            let tensor = &checkpoint.tensors()[name];
            assert_eq!(about[0].as_str(), Some(tensor.dtype().name()), "{name}: type");
            let shape: Vec<usize> = serde_json::from_value(about[1].clone()).unwrap();
            assert_eq!(tensor.shape(), shape, "{name}: shape");
        }
    }
    for (what, expected) in &case.tensors {
        let Some((kind, name)) = what.split_once('/') else { continue };
        let all = checkpoint.read(name).unwrap_or_else(|e| panic!("{e}"));
        let got = match kind {
            "value" => all,
            "sumabs" => vec![all.iter().map(|value| value.abs()).sum()],
            "sample" => {
                let (n, m) = (all.len(), all.len().min(8));
                (0..m).map(|i| all[if m == 1 { 0 } else { i * (n - 1) / (m - 1) }]).collect()
            }
            other => panic!("{what}: nothing compares `{other}`"),
        };
        compare(case, checks, what, &got, expected);
    }
    for (name, expected) in case.manifest["scalars"].as_object().into_iter().flatten() {
        let got = match checkpoint.settings().get(name) {
            Some(Setting::None) => Value::Null,
            Some(Setting::Bool(value)) => (*value).into(),
            Some(Setting::Int(value)) => (*value).into(),
            Some(Setting::Float(value)) => (*value).into(),
            Some(Setting::Text(text)) => text.clone().into(),
            None => panic!("no setting `{name}`"),
        };
        assert_eq!(&got, expected, "{name}");
    }
}

/// The backbone is taken from where the manifest says that it lies.
fn place(case: &Case, found: &Found<'_>) {
    let layout = &case.manifest["layout"];
    let Some(strip) = layout["strip_prefix"].as_str() else { return };
    let container = layout["container"].as_str().map_or_else(String::new, |name| format!("{name}/"));
    assert_eq!(found.prefix(), format!("{container}{strip}"), "place of the backbone ({})", found.layout());
}

/// Runs the backbone with the file's weights.
fn features(case: &Case, found: &Found<'_>, checks: &mut Checks) {
    let arch = found.arch();
    let fit = found.fit(arch);
    assert_eq!(fit.num_matched(), fit.rows.len(), "{:?}", fit.rows);
    assert!(fit.left_over.is_empty(), "left over: {:?}", fit.left_over);
    let tensors = found.load(arch).unwrap_or_else(|e| panic!("{e}"));
    let tensors: BTreeMap<String, Array> = tensors
        .into_iter()
        .map(|(name, (shape, values))| (name, Array { shape, values: values.into_iter().map(f64::from).collect() }))
        .collect();
    let (scope, x) = (scope(), input(case));
    let mut pass = Pass::eval();
    let mut outputs: BTreeMap<&str, Vec<f32>> = BTreeMap::new();
    match arch {
        Arch::Vit(arch) => {
            let (net, _) = load(Vit::new(arch, &scope).unwrap(), &tensors, scope.device());
            let tokens: Tensor<3> = net.encode_tokens(net.embed_patches(x.clone()), &mut pass);
            outputs.insert("out.pooled", values(&net.pool(tokens.clone())));
            outputs.insert("out.tokens", values(&tokens));
        }
        Arch::ResNet(arch) => {
            let (net, _) = load(ResNet::new(arch, &scope), &tensors, scope.device());
            outputs.insert("out.pooled", values(&net.forward(x, &mut pass).pooled));
        }
        Arch::ConvNext(arch) => {
            let (net, _) = load(ConvNext::new(arch, &scope).unwrap(), &tensors, scope.device());
            outputs.insert("out.pooled", values(&net.forward(x, &mut pass).pooled));
        }
    }
    for (what, expected) in case.tensors.iter().filter(|(name, _)| name.starts_with("out.")) {
        let got = outputs.get(what.as_str()).unwrap_or_else(|| panic!("nothing computes `{what}`"));
        let got: Vec<f64> = got.iter().copied().map(f64::from).collect();
        compare(case, checks, what, &got, expected);
    }
}
