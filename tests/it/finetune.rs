//! Runs of `finetune`: bits, few labels, what stands still, early stopping, refusals.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::runs::Place;

/// Small; batch norm, drop path none, mixing, erasing, an average.
pub(crate) const RESNET: &str = r#"
[data]
source = "sample"
limit = 120
[[views]]
size = 16
crop = {}
flip = 0.5
erase = { prob = 0.5 }
[backbone.resnet]
depth = 18
width = 0.125
stem = "cifar"
[method.classify]
label_smoothing = 0.1
balance_classes = true
mix = { mixup = 0.8, cutmix = 1.0 }
[batch]
global = 32
micro = 8
[optimizer.adamw]
[schedule]
steps = 6
lr = 0.01
[ema]
momentum = 0.9
[checkpoint]
every_steps = 2
[eval]
max_test = 64
every_epochs = 1
"#;

pub(crate) const VIT: &str = r#"
[data]
source = "sample"
limit = 120
[[views]]
size = 16
[backbone.vit]
patch = 4
dim = 24
depth = 2
heads = 2
drop_path = 0.2
[method.classify]
layer_decay = 0.7
head_epochs = 1
[batch]
global = 32
micro = 8
[optimizer.adamw]
[schedule]
steps = 6
lr = 0.01
[checkpoint]
every_steps = 2
[eval]
max_test = 64
every_epochs = 1
"#;

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn weights(place: &Place, run: &str, step: &str) -> BTreeMap<String, Vec<u8>> {
    let file = fs::read(place.path(run).join("checkpoints").join(step).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&file).unwrap();
    file.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec())).collect()
}

#[test]
fn bitwise_on_any_ranks_and_resumed_and_evaluated_alike() {
    for recipe in [RESNET, VIT] {
        let place = Place::new(recipe);
        let one = place.run("1", &["--ranks", "1"]);
        for ranks in ["2", "3", "4"] {
            place.run(ranks, &["--ranks", ranks]).assert_same(&one, ranks);
        }
        let evaluations = |run: &str| fs::read_to_string(place.path(run).join("evaluations.jsonl")).unwrap();
        assert_eq!(evaluations("1").lines().count(), 2);
        assert_eq!(evaluations("1"), evaluations("4"));
        let classification = |run: &str| json(&place.path(run).join("summary.json"))["classification"].clone();
        let reference = classification("1");
        assert_eq!((&reference["on"], &reference["images"]), (&"test".into(), &120.into()));
        for step in ["step-00000004", "step-00000006"] {
            fs::remove_dir_all(place.path("4/checkpoints").join(step)).unwrap();
        }
        place.run("4", &["--ranks", "2"]).assert_same(&one, "resumed");
        assert_eq!((evaluations("4"), classification("4")), (evaluations("1"), reference));
        let classes = fs::read_to_string(place.path("1/classes.csv")).unwrap();
        assert_eq!((classes.lines().count(), classes.lines().nth(1).unwrap().split(',').next()), (21, Some("animals")));
        let confusion = fs::read_to_string(place.path("1/confusion.csv")).unwrap();
        let counted: u32 =
            confusion.lines().skip(1).flat_map(|row| row.split(',').skip(1)).map(|n| n.parse::<u32>().unwrap()).sum();
        assert_eq!(counted, 120);
    }
}

#[test]
fn a_head_learns_alone_and_then_with_the_network() {
    let place = Place::new(RESNET);
    let options = ["method.classify.head_epochs=1", "checkpoint.every_steps=1", "checkpoint.keep=9"];
    place.run("then", &options);
    // an epoch has 3 steps
    let steps: Vec<_> = ["1", "3", "4"].map(|step| weights(&place, "then", &format!("step-0000000{step}"))).into();
    let moved = |a: usize, b: usize, name: &str| steps[a][name] != steps[b][name];
    assert!(moved(0, 1, "head.weight") && moved(1, 2, "head.weight"));
    for name in steps[0].keys().filter(|name| name.starts_with("backbone.")) {
        assert!(!moved(0, 1, name), "{name} moved while the head learnt alone");
    }
    for name in ["backbone.conv1.weight", "backbone.bn1.weight", "backbone.bn1.running_mean"] {
        assert!(moved(1, 2, name), "{name} stands still behind it");
    }

    place.run(
        "linear",
        &[
            "method.classify.train=linear",
            "method.classify.layer_decay=0.5",
            "checkpoint.every_steps=1",
            "checkpoint.keep=9",
        ],
    );
    let (first, last) = (weights(&place, "linear", "step-00000001"), weights(&place, "linear", "step-00000006"));
    let changed: Vec<&str> = first.keys().filter(|&name| first[name] != last[name]).map(String::as_str).collect();
    assert_eq!(changed, ["head.bias", "head.weight", "head_norm.running_mean", "head_norm.running_var"]);
    let plan = fs::read_to_string(place.path("linear/plan.toml")).unwrap();
    assert!(plan.contains("`method.classify.layer_decay` is 0.5, which has no effect"), "{plan}");
    assert!(plan.contains("# parameters     1300"), "64 features and a bias for 20 classes: {plan}");
    // what a probe learnt on can be gone on from
    let init = format!("init={}", place.path("linear").display());
    place.run("on", &[&init]);
}

#[test]
fn few_labels_are_the_same_ones_on_any_ranks_and_of_every_class() {
    let place = Place::new(&RESNET.replace("limit = 120\n", ""));
    let options = ["data.label_fraction=0.02", "batch.micro=4", "batch.global=16", "eval.skip=true"];
    let two = place.run("2", &[&options[..], &["--ranks", "2"]].concat());
    place.run("1", &[&options[..], &["--ranks", "1"]].concat()).assert_same(&two, "few labels");
    let plan = fs::read_to_string(place.path("1/plan.toml")).unwrap();
    let images: usize = plan
        .lines()
        .find_map(|line| line.strip_prefix("# images "))
        .unwrap()
        .trim()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!((40..60).contains(&images), "2 % of 2409: {images}");
    let other = place.run("other", &[&options[..], &["seed=1"]].concat());
    assert_ne!(
        fs::read_to_string(place.path("other/plan.toml")).unwrap().lines().find(|l| l.starts_with("# data = ")),
        plan.lines().find(|l| l.starts_with("# data = "))
    );
    drop(other);
}

#[test]
fn training_stops_early_at_the_same_step_on_any_ranks_and_resumed() {
    // a rate at which nothing becomes better after the first epochs
    let recipe = RESNET.replace("steps = 6\nlr = 0.01", "steps = 60\nlr = 1e-9") + "[early_stopping]\npatience = 2\n";
    let place = Place::new(&recipe);
    let options = ["data.validation=0.2", "ema.momentum=0"];
    let one = place.run("1", &[&options[..], &["--ranks", "1"]].concat());
    let summary = json(&place.path("1/summary.json"));
    let steps = summary["steps"].as_u64().unwrap();
    let best = summary["best_step"].as_u64().unwrap();
    let evaluated = fs::read_to_string(place.path("1/evaluations.jsonl")).unwrap();
    // 96 images, an epoch of 3 steps
    assert!(steps < 60 && steps - best == 6 && evaluated.lines().count() as u64 == steps / 3, "{summary} {evaluated}");
    assert!(evaluated.lines().all(|line| line.contains("\"on\":\"validation\"")));
    assert_eq!(summary["classification"]["on"], "test");
    assert!(place.path("1/best.safetensors").is_file());
    place.run("2", &[&options[..], &["--ranks", "2"]].concat()).assert_same(&one, "2 ranks");
    // started again, it is over; killed before its last checkpoint, it comes to the same end
    place.run("2", &[&options[..], &["--ranks", "4"]].concat()).assert_same(&one, "again");
    let last = fs::read_to_string(place.path("2/checkpoints/latest")).unwrap();
    fs::remove_dir_all(place.path("2/checkpoints").join(last.trim())).unwrap();
    place.run("2", &[&options[..], &["--ranks", "4"]].concat()).assert_same(&one, "resumed");
    assert_eq!(fs::read_to_string(place.path("2/evaluations.jsonl")).unwrap(), evaluated);
}

fn refused(place: &Place, options: &[&str]) -> String {
    let output = place.output("refused", options);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !place.path("refused").exists(), "{text}");
    text
}

#[test]
fn what_cannot_be_learnt_or_measured_is_refused_in_words() {
    let place = Place::new(VIT);
    let folder = place.path("plain");
    fs::create_dir(&folder).unwrap();
    for index in 0..40u8 {
        image::RgbImage::from_pixel(16, 16, image::Rgb([index * 6; 3]))
            .save(folder.join(format!("{index}.png")))
            .unwrap();
    }
    let source = format!("data.path={}", folder.display());
    let unlabelled = refused(&place, &["data.source=folder", &source]);
    assert!(unlabelled.contains("`data` has no labels to learn from"), "{unlabelled}");
    for (class, shift) in [("a", 0u8), ("b", 100)] {
        fs::create_dir(folder.join(class)).unwrap();
        for index in 0..20u8 {
            fs::rename(
                folder.join(format!("{}.png", index + shift / 5)),
                folder.join(class).join(format!("{index}.png")),
            )
            .unwrap();
        }
    }
    let labelled = ["data.source=folder", &source];
    let nothing = refused(&place, &labelled);
    assert!(nothing.contains("neither a test split nor `data.validation`"), "{nothing}");
    // what is trained on is the test split of what is tested on
    let root = place.path("root");
    for class in ["a", "b"] {
        fs::create_dir_all(root.join("train").join(class)).unwrap();
        fs::create_dir_all(root.join("test").join(class)).unwrap();
        for index in 0..20 {
            let from = folder.join(class).join(format!("{index}.png"));
            fs::copy(&from, root.join("train").join(class).join(format!("{index}.png"))).unwrap();
            fs::copy(&from, root.join("test").join(class).join(format!("{index}.png"))).unwrap();
        }
    }
    let (train, test) = (format!("data.path={}/test", root.display()), format!("eval.test.path={}", root.display()));
    let same = refused(&place, &["data.source=folder", &train, "eval.test.source=folder", &test]);
    assert!(same.contains("`eval.test` are the training images"), "{same}");
    let early = refused(&place, &["early_stopping.patience=2"]);
    assert!(early.contains("`early_stopping` needs images"), "{early}");
    let weights = refused(&place, &["method.classify.class_weights=[1.0, 2.0]"]);
    assert!(weights.contains("has 2 weights, the data has 20 classes"), "{weights}");
    let fraction = refused(&place, &["data.label_fraction=2"]);
    assert!(fraction.contains("`data.label_fraction` is 2"), "{fraction}");

    place.run("aside", &[&labelled[..], &["data.validation=0.2"]].concat());
    let summary = json(&place.path("aside/summary.json"));
    assert_eq!(
        (&summary["classification"]["on"], &summary["classification"]["images"]),
        (&"validation".into(), &8.into())
    );
}

#[test]
fn each_command_has_its_recipes() {
    let place = Place::new(crate::runs::SIMCLR);
    let command = |task: &str, recipe: &Path| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_autodidact"))
            .arg(task)
            .arg(recipe)
            .arg("--dry-run")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let text = command("finetune", &place.path("recipe.toml"));
    assert!(text.contains("`method.simclr` learns without labels") && text.contains("autodidact pretrain"), "{text}");
    let text = command("pretrain", &Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/finetune.toml"));
    assert!(text.contains("`method.classify` learns from labels") && text.contains("autodidact finetune"), "{text}");
    let text = String::from_utf8_lossy(&place.output("x", &["data.label_fraction=0.1"]).stderr).into_owned();
    assert!(text.contains("`data.label_fraction` is for runs that learn from labels"), "{text}");
}

#[test]
fn adapters_learn_instead_of_the_backbone_and_merge_into_it() {
    let recipe = VIT.replace(
        "layer_decay = 0.7\nhead_epochs = 1\n",
        "lora = { rank = 4, alpha = 12.0, targets = [\"qkv\", \"proj\", \"fc1\"] }\n",
    );
    let place = Place::new(&recipe);
    place.run("base", &["method.classify.lora.rank=1"]);
    let init = format!("init={}", place.path("base").display());
    let one = place.run("1", &[&init, "--ranks", "1"]);
    place.run("4", &[&init, "--ranks", "4"]).assert_same(&one, "adapters");
    let (first, last) = (weights(&place, "1", "step-00000002"), weights(&place, "1", "step-00000006"));
    for name in first.keys() {
        let learns = name.ends_with(".lora.a") || name.ends_with(".lora.b") || name.starts_with("head.");
        assert_eq!(first[name] != last[name], learns, "{name}");
    }
    // what PEFT does with the file: W + alpha / r * B A, on the weights that the run started from
    let read = |path: &Path| {
        let bytes = fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let floats =
            |data: &[u8]| data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<f32>>();
        file.iter()
            .map(|(name, view)| (name.to_owned(), (view.shape().to_vec(), floats(view.data()))))
            .collect::<BTreeMap<_, _>>()
    };
    let config = json(&place.path("1/adapter/adapter_config.json"));
    assert_eq!((&config["r"], &config["lora_alpha"], &config["peft_type"]), (&4.into(), &12.0.into(), &"LORA".into()));
    let layers: Vec<&str> =
        config["target_modules"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(layers.len(), 6);
    let adapter = read(&place.path("1/adapter/adapter_model.safetensors"));
    let (start, merged) = (read(&place.path("1/init.safetensors")), read(&place.path("1/merged.safetensors")));
    assert_eq!(adapter.len(), 2 * 6 + 2);
    assert_eq!(adapter["base_model.model.head.weight"], merged["head.weight"]);
    for (name, (shape, weight)) in &start {
        let (same_shape, got) = &merged[&format!("backbone.{name}")];
        assert_eq!(shape, same_shape);
        let layer = layers.iter().find(|layer| *name == format!("{layer}.weight"));
        let Some(layer) = layer else {
            assert!(weight == got, "{name}");
            continue;
        };
        let part = |part: &str| &adapter[&format!("base_model.model.{layer}.lora_{part}.weight")];
        let ((a_shape, a), (b_shape, b)) = (part("A"), part("B"));
        let (rank, inputs) = (a_shape[0], a_shape[1]);
        assert_eq!((rank, inputs, b_shape.as_slice()), (4, shape[1], &[shape[0], 4][..]));
        let mut moved = 0.0f64;
        for (at, (&weight, &got)) in weight.iter().zip(got).enumerate() {
            let (row, column) = (at / inputs, at % inputs);
            let product: f64 =
                (0..rank).map(|r| f64::from(b[row * rank + r]) * f64::from(a[r * inputs + column])).sum();
            let expected = f64::from(weight) + 3.0 * product;
            assert!((f64::from(got) - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{name}: {got}, {expected}");
            moved = moved.max((expected - f64::from(weight)).abs());
        }
        assert!(moved > 1e-4, "{name} has not learnt: {moved}");
    }
    // as a checkpoint of its own, and by the run
    let file = format!("init={}", place.path("1/merged.safetensors").display());
    let folder = format!("init={}", place.path("1").display());
    let options = ["schedule.steps=1", "eval.skip=true"];
    let by_file = place.run("file", &[&options[..], &[&file]].concat());
    place.run("folder", &[&options[..], &[&folder]].concat()).assert_same(&by_file, "merged");
    let none = refused(&Place::new(&recipe), &["method.classify.lora.targets=[\"qkw\"]"]);
    assert!(none.contains("`qkw` is no linear layer"), "{none}");
}
