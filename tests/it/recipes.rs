//! Every recipe in `recipes/` is read, shrunk and run: a new recipe is tested by being there.

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

#[test]
fn every_recipe_runs_shrunk_and_bitwise_on_one_and_three_ranks() {
    let all = recipes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes"));
    assert!(all.len() >= 4, "{all:?}");
    // networks of full size: `recipe::tests` checks them, training one takes minutes even when shrunk
    for path in all.into_iter().filter(|path| !path.parent().is_some_and(|folder| folder.ends_with("imagenet"))) {
        let text = std::fs::read_to_string(&path).unwrap();
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
