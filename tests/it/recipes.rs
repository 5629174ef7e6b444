//! Every recipe in `recipes/` is read, shrunk and run: a new recipe is tested by being there.

use std::path::{Path, PathBuf};

use autodidact::recipe;
use toml_edit::{DocumentMut, Item, value};

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

/// Makes the network of a paper, with every value spelt out, one that runs in a second: few pixels, layers and channels.
fn shrink_network(recipe: &mut DocumentMut) {
    // 96 is a multiple of every number of heads that is in use, and of 12 images
    let narrow = |table: &mut Item| {
        for (_, item) in table.as_table_like_mut().unwrap().iter_mut() {
            if item.as_integer().is_some_and(|size| size > 96) {
                *item = value(96);
            }
        }
    };
    let patch = recipe["backbone"].get("vit").map(|vit| vit["patch"].as_integer().unwrap());
    if patch.is_some() {
        let vit = &mut recipe["backbone"]["vit"];
        (vit["dim"], vit["depth"], vit["heads"]) = (value(24), value(2), value(2));
    } else {
        recipe["backbone"]["resnet"]["width"] = value(0.125);
    }
    for view in recipe["views"].as_array_of_tables_mut().unwrap().iter_mut() {
        // a third of the side, in whole patches
        let patch = patch.unwrap_or(8);
        view["size"] = value(view["size"].as_integer().unwrap() / 3 / patch * patch);
    }
    for (_, method) in recipe["method"].as_table_mut().unwrap().iter_mut() {
        narrow(method);
    }
}

#[test]
fn every_recipe_runs_shrunk_and_bitwise_on_one_and_three_ranks() {
    let all = recipes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes"));
    assert!(all.len() >= 4, "{all:?}");
    for path in all {
        let loaded = recipe::load(&path, &[]).unwrap_or_else(|e| panic!("{}", e.render(false)));
        let mut recipe = loaded.recipe.to_toml().unwrap().parse::<DocumentMut>().unwrap();
        if path.parent().is_some_and(|folder| folder.ends_with("imagenet")) {
            shrink_network(&mut recipe);
        }
        recipe["data"]["source"] = value("sample");
        recipe["data"].as_table_mut().unwrap().remove("path");
        recipe["data"]["limit"] = value(24);
        recipe["batch"]["global"] = value(12);
        recipe["batch"]["micro"] = value(4);
        let schedule = recipe["schedule"].as_table_mut().unwrap();
        schedule.remove("epochs");
        schedule.insert("steps", value(3));
        schedule.insert("warmup_epochs", value(0.5));
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
