//! Every recipe in `recipes/` is read, shrunk and run: a new recipe is tested by being there. Those of `recipes/imagenet/` are checked only.

use std::path::{Path, PathBuf};

use crate::runs::Place;

fn recipes(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
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

fn is_huge(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "imagenet")
}

#[test]
fn the_papers_own_settings_are_accepted() {
    let all = recipes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes"));
    for path in all.iter().filter(|path| is_huge(path)) {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_autodidact"));
        let output = command.args(["recipe", "check"]).arg(path).output().unwrap();
        assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn every_recipe_runs_shrunk_and_bitwise_on_one_and_three_ranks() {
    let all = recipes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes"));
    assert!(all.len() >= 4, "{all:?}");
    for path in all.iter().filter(|path| !is_huge(path)) {
        let text = std::fs::read_to_string(path).unwrap();
        let mut recipe = text.parse::<toml_edit::DocumentMut>().unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        recipe["data"]["source"] = toml_edit::value("sample");
        recipe["data"].as_table_mut().unwrap().remove("path");
        recipe["data"]["limit"] = toml_edit::value(24);
        recipe["batch"]["global"] = toml_edit::value(12);
        recipe["batch"]["micro"] = toml_edit::value(4);
        let schedule = recipe["schedule"].as_table_mut().unwrap();
        schedule.remove("epochs");
        schedule.insert("steps", toml_edit::value(3));
        schedule.insert("warmup_epochs", toml_edit::value(0.5));
        let place = Place::new(&recipe.to_string());
        let options = ["eval.max_train=20", "eval.max_test=20", "checkpoint.every_steps=2"];
        let one = place.run("one", &[&options[..], &["--ranks", "1"]].concat());
        let three = place.run("three", &[&options[..], &["--ranks", "3", "batch.memory=cache"]].concat());
        three.assert_same(&one, &path.display().to_string());
        let summary = std::fs::read_to_string(place.path("one/summary.json")).unwrap();
        let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
        assert!(summary["knn"]["top1"].is_number() && summary["last_loss"].is_number(), "{summary}");
    }
}
