//! Every recipe in `recipes/` is read, shrunk and run: a new recipe, and with it a new method, is tested by being there.
//! Those of `recipes/imagenet/`, the papers' own settings, are checked only: their networks take minutes to draw.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toml_edit::{DocumentMut, value};

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

fn all() -> Vec<PathBuf> {
    recipes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes"))
}

fn is_huge(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "imagenet")
}

/// Four micro-batches, an epoch of two steps.
fn shrunk(path: &Path) -> DocumentMut {
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
        let four = place.run("four", &[&options[..], &["--ranks", "4", "batch.memory=cache"]].concat());
        four.assert_same(&one, &name);
        let summary = fs::read_to_string(place.path("run/summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        assert!(summary["knn"]["top1"].is_number() && summary["last_loss"].is_number(), "{summary}");
        // what a kill during the last step leaves: queues, centres and teachers come from the checkpoint before
        fs::remove_dir_all(place.path("run/checkpoints/step-00000003")).unwrap();
        let resumed = place.run("run", &[&options[..], &["--ranks", "2"]].concat());
        resumed.assert_same(&one, &format!("{name}, resumed"));
    }
}

/// Images that tell a method nothing: duplicates, one colour, black (zero vectors wherever a network has no bias).
#[test]
fn every_method_stays_finite_on_images_without_content() {
    let folder = tempfile::tempdir().unwrap();
    for (index, shade) in [0u8, 0, 127, 127, 127, 255, 0, 127].into_iter().enumerate() {
        let image = image::RgbImage::from_pixel(40, 40, image::Rgb([shade; 3]));
        image.save(folder.path().join(format!("{index}.png"))).unwrap();
    }
    for path in all().into_iter().filter(|path| path.parent().is_some_and(|parent| parent.ends_with("recipes"))) {
        let mut recipe = shrunk(&path);
        recipe["data"]["source"] = value("folder");
        recipe["data"]["path"] = value(folder.path().to_str().unwrap());
        let place = Place::new(&recipe.to_string());
        let run = |name: &str, options: &[&str]| {
            place.output(
                name,
                &[&["eval.skip=true", "schedule.warmup_epochs=0", "schedule.steps=2"][..], options].concat(),
            )
        };
        let ended = run("content", &["batch.global=8", "batch.micro=4"]);
        assert!(ended.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&ended.stderr));
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
    assert_eq!(alarms("dino.toml", &["schedule.epochs=12", "method.dino.center_momentum=0.99999"]), ["collapse"]);
}
