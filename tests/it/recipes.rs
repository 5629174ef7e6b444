//! Every recipe in `recipes/` is read, shrunk and run: a new recipe, and with it a new method, is tested by being there.
//! Those of `recipes/imagenet/`, the papers' own settings, are checked only: their networks take minutes to draw.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use autodidact::method::{Labels, MicroBatch, Outputs, Progress, RunFacts, Sees};
use autodidact::model::{Noise, Pass, Scope};
use burn::tensor::{Device, Tensor, TensorData};
use toml_edit::{Array, DocumentMut, value};

use crate::runs::Place;

fn recipes(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(recipes(&path));
        } else if path.extension().is_some_and(|extension| extension == "toml") {
            found.push(path);
        }
    }
    found.sort();
    found
}

pub(crate) fn all() -> Vec<PathBuf> {
    recipes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes"))
}

fn is_huge(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "imagenet")
}

/// Four micro-batches, an epoch of two steps.
pub(crate) fn shrunk(path: &Path) -> DocumentMut {
    let text = fs::read_to_string(path).unwrap();
    let mut recipe = text.parse::<DocumentMut>().unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    recipe["data"]["source"] = value("sample");
    recipe["data"].as_table_mut().unwrap().remove("path");
    recipe["data"]["limit"] = value(32);
    recipe["batch"]["global"] = value(16);
    recipe["batch"]["micro"] = value(4);
    let schedule = recipe["schedule"].as_table_mut().unwrap();
    schedule.remove("epochs");
    schedule.insert("steps", value(3));
    schedule.insert("warmup_epochs", value(0.5));
    recipe
}

#[test]
fn the_papers_own_settings_are_accepted() {
    let huge: Vec<PathBuf> = all().into_iter().filter(|path| is_huge(path)).collect();
    assert!(huge.len() >= 20, "{huge:?}");
    for path in huge {
        let mut command = Command::new(env!("CARGO_BIN_EXE_autodidact"));
        let output = command.args(["recipe", "check"]).arg(&path).output().unwrap();
        assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn every_recipe_runs_shrunk_and_bitwise_on_any_ranks_and_resumed() {
    let all: Vec<PathBuf> = all().into_iter().filter(|path| !is_huge(path)).collect();
    assert!(all.len() >= 4, "{all:?}");
    for path in all {
        let place = Place::new(&shrunk(&path).to_string());
        let name = path.display().to_string();
        let options = ["eval.max_train=20", "eval.max_test=20", "checkpoint.every_steps=2"];
        let one = place.run("run", &[&options[..], &["--ranks", "1"]].concat());
        let two = place.run("two", &[&options[..], &["--ranks", "2", "batch.activation_checkpointing=block"]].concat());
        two.assert_same(&one, &name);
        let four = place.run(
            "four",
            &[&options[..], &["--ranks", "4", "batch.memory=cache", "batch.activation_checkpointing=every:2"]].concat(),
        );
        four.assert_same(&one, &name);
        let summary = fs::read_to_string(place.path("run/summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        let measured = if summary["classification"].is_object() { "classification" } else { "knn" };
        assert!(summary[measured]["top1"].is_number() && summary["last_loss"].is_number(), "{summary}");
        // what a kill during the last step leaves: queues, centres and teachers come from the checkpoint before
        fs::remove_dir_all(place.path("run/checkpoints/step-00000003")).unwrap();
        let resumed = place.run("run", &[&options[..], &["--ranks", "2"]].concat());
        resumed.assert_same(&one, &format!("{name}, resumed"));
    }
}

/// Images that tell a method nothing: duplicates, one colour, black, which are zero vectors as pixels are not normalised here.
#[test]
fn every_method_stays_finite_on_images_without_content() {
    let folder = tempfile::tempdir().unwrap();
    for (index, shade) in [0u8, 0, 127, 127, 127, 255, 0, 127].into_iter().enumerate() {
        let image = image::RgbImage::from_pixel(40, 40, image::Rgb([shade; 3]));
        let class = folder.path().join(if index % 2 == 0 { "even" } else { "odd" });
        fs::create_dir_all(&class).unwrap();
        image.save(class.join(format!("{index}.png"))).unwrap();
    }
    let mut tried = 0;
    for path in all().into_iter().filter(|path| path.parent().is_some_and(|parent| parent.ends_with("recipes"))) {
        let mut recipe = shrunk(&path);
        recipe["data"]["source"] = value("folder");
        recipe["data"]["path"] = value(folder.path().to_str().unwrap());
        recipe["data"]["mean"] = value(Array::from_iter([0.0; 3]));
        recipe["data"]["std"] = value(Array::from_iter([1.0; 3]));
        tried += 1;
        let place = Place::new(&recipe.to_string());
        let run = |name: &str, options: &[&str]| {
            place.output(
                name,
                &[&["eval.skip=true", "schedule.warmup_epochs=0", "schedule.steps=2"][..], options].concat(),
            )
        };
        let ended = run("content", &["batch.global=8", "batch.micro=4"]);
        assert!(ended.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&ended.stderr));
        // zero vectors and variances of nothing, in fp16
        let half = run("half", &["batch.global=8", "batch.micro=4", "precision.compute=fp16"]);
        assert!(half.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&half.stderr));
        // the smallest batch works, or is refused in words
        let pair = run("pair", &["batch.global=2", "batch.micro=2"]);
        let stderr = String::from_utf8_lossy(&pair.stderr);
        let refused = pair.status.code() == Some(2) && stderr.contains("batch.");
        assert!(pair.status.success() || refused, "{}: {stderr}", path.display());
        let single = run("single", &["batch.global=1", "batch.micro=1"]);
        let stderr = String::from_utf8_lossy(&single.stderr);
        assert!(
            matches!(single.status.code(), Some(0 | 2)) && !stderr.contains("panicked"),
            "{}: {stderr}",
            path.display()
        );
    }
    assert!(tried >= 19, "{tried} methods");
}

/// A loss by micro-batch is a sum over images: of shards of a batch, sums, counts and gradients are those of the whole.
#[test]
fn losses_of_micro_batches_add_up() {
    let device = Device::flex().autodiff();
    let mut tried = Vec::new();
    for path in all().into_iter().filter(|path| path.parent().is_some_and(|parent| parent.ends_with("recipes"))) {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        // Sinkhorn-Knopp sees one micro-batch, and KoLeo is a loss of one by definition
        let options = ["method.dinov2.centering=softmax", "method.dinov2.koleo_weight=0"].map(str::to_owned);
        let options = if name == "dinov2" { &options[..] } else { &[] };
        let mut recipe = autodidact::recipe::load(&path, options).unwrap().recipe;
        let classes = ["a", "b", "c"].map(|name| (name.to_owned(), 3)).to_vec();
        recipe.method.resolve(&RunFacts {
            images: 1000,
            steps: 10,
            steps_per_epoch: 5,
            labels: Labels { classes, several: false },
        });
        let inputs = recipe.inputs();
        let learner = recipe.method.build(&inputs, &Scope::new(1, &device)).unwrap();
        if learner.sees() == Sees::GlobalBatch {
            continue;
        }
        let images = 8;
        let views: Vec<(Vec<f32>, usize)> = inputs
            .view_sizes()
            .enumerate()
            .map(|(view, size)| {
                let len = images * 3 * (size * size) as usize;
                ((0..len).map(|i| ((i * 37 + view * 11) % 101) as f32 / 50.0 - 1.0).collect(), size as usize)
            })
            .collect();
        let progress = Progress { seed: 1, step: 3, steps: 10, steps_per_epoch: 5 };
        let encode = |range: Range<usize>| {
            let part = |(pixels, size): &(Vec<f32>, usize)| {
                let image = 3 * size * size;
                let data = pixels[range.start * image..range.end * image].to_vec();
                Tensor::<4>::from_data(TensorData::new(data, [range.len(), 3, *size, *size]), &device)
            };
            let numbers: Vec<u64> = range.clone().map(|image| image as u64).collect();
            let rows = (0..inputs.num_views()).flat_map(|view| numbers.iter().map(move |&image| (image, view as u64)));
            let mut pass = Pass::train(Noise { seed: 1, step: 3, rows: rows.collect() });
            let views = views.iter().map(part).collect();
            let labels = numbers.iter().map(|number| vec![*number as u32 % 3]).collect();
            learner.encode(&MicroBatch { progress, images: numbers, labels, views }, &mut pass)
        };
        let outputs = encode(0..images);
        let host = |tensors: &[Tensor<2>]| -> Vec<(Vec<f32>, usize)> {
            tensors.iter().map(|t| (t.to_data().try_to_vec().unwrap(), t.dims()[1])).collect()
        };
        let by_image = outputs.tensors.iter().chain(&outputs.constants).all(|t| t.dims()[0] == images);
        let (tensors, constants) = (host(&outputs.tensors), host(&outputs.constants));
        // sum, count, and gradients: of the outputs where they have a row for each image, else (networks without batch norm) of the weights
        let shard = |range: Range<usize>| -> (f64, f64, Vec<Vec<f32>>) {
            if !by_image {
                let loss = learner.loss(encode(range), &progress);
                let sum = f64::from(loss.sum.clone().into_scalar::<f32>());
                return (sum, loss.count, learner.gradients(&mut loss.sum.backward()));
            }
            let part = |(values, width): &(Vec<f32>, usize)| {
                let data =
                    TensorData::new(values[range.start * width..range.end * width].to_vec(), [range.len(), *width]);
                Tensor::<2>::from_data(data, &device)
            };
            let leaves: Vec<_> = tensors.iter().map(|t| part(t).require_grad()).collect();
            let outputs = Outputs { tensors: leaves.clone(), constants: constants.iter().map(part).collect() };
            let loss = learner.loss(outputs, &progress);
            let sum = f64::from(loss.sum.clone().into_scalar::<f32>());
            let gradients = loss.sum.backward();
            let of = |leaf: &Tensor<2>| match leaf.grad(&gradients) {
                Some(gradient) => gradient.into_data().try_to_vec::<f32>().unwrap(),
                None => vec![0.0; leaf.dims().iter().product()],
            };
            (sum, loss.count, leaves.iter().map(of).collect())
        };
        let whole = shard(0..images);
        for shards in [2, 4] {
            let size = images / shards;
            let parts: Vec<_> = (0..shards).map(|index| shard(index * size..(index + 1) * size)).collect();
            let sum: f64 = parts.iter().map(|part| part.0).sum();
            assert!((sum - whole.0).abs() <= 1e-5 * whole.0.abs().max(1.0), "{name}: {sum}, whole {}", whole.0);
            // SimMIM's count has its epsilon of 1e-5 in each
            let count: f64 = parts.iter().map(|part| part.1).sum();
            assert!((count - whole.1).abs() <= 1e-8 * whole.1, "{name}: {count}, whole {}", whole.1);
            for (index, gradient) in whole.2.iter().enumerate() {
                let joined: Vec<f32> = if by_image {
                    parts.iter().flat_map(|part| &part.2[index]).copied().collect()
                } else {
                    (0..gradient.len()).map(|i| parts.iter().map(|part| part.2[index][i]).sum()).collect()
                };
                let largest = gradient.iter().fold(1e-6f32, |m, g| m.max(g.abs()));
                assert_eq!(joined.len(), gradient.len(), "{name}");
                let worst = joined.iter().zip(gradient).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(worst <= 1e-5 * largest, "{name}, output {index}: {worst} of {largest}");
            }
        }
        tried.push(name);
    }
    let expected = ["byol", "data2vec", "dino", "dinov2", "finetune", "ibot", "ijepa", "mae", "simmim", "simsiam"];
    assert_eq!(tried, expected);
}

/// Trains a recipe of the sample set on little data and returns the alarms it raised.
fn alarms(name: &str, options: &[&str]) -> Vec<String> {
    let recipe = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes").join(name)).unwrap();
    let place = Place::new(&recipe);
    let small = ["data.limit=512", "batch.global=32", "batch.micro=32", "eval.skip=true"];
    let output = place.output("run", &[&small[..], options].concat());
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    let summary = fs::read_to_string(place.path("run/summary.json")).unwrap();
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    let codes =
        summary["warnings"].as_array().unwrap().iter().map(|warning| warning["code"].as_str().unwrap().to_owned());
    codes.collect()
}

#[test]
fn planted_failures_raise_alarms_within_200_steps_and_good_settings_none() {
    let narrow = ["backbone.resnet.width=0.125", "views.0.size=16", "schedule.epochs=10"];
    let with = |planted: &[&'static str]| [&narrow[..], planted].concat();
    assert_eq!(alarms("simclr.toml", &narrow), [""; 0]);
    assert_eq!(alarms("simclr.toml", &with(&["method.simclr.temperature=10"])), ["loss-plateau"]);
    let no_momentum = ["method.moco2.momentum.start=0", "method.moco2.momentum.end=0", "method.moco2.queue=512"];
    assert!(!alarms("moco2.toml", &with(&no_momentum)).is_empty(), "a key encoder without momentum");
    assert_eq!(alarms("simsiam.toml", &with(&["method.simsiam.predictor_hidden=0"])), ["collapse"]);
    assert_eq!(alarms("simsiam.toml", &narrow), [""; 0]);
    assert_eq!(alarms("dino.toml", &["schedule.epochs=12", "method.dino.center_momentum=0.99999"]), ["collapse"]);
    assert_eq!(alarms("dino.toml", &["schedule.epochs=12"]), [""; 0]);
}
