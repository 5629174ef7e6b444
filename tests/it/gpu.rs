//! What only a GPU can show. Listed by name and left out without one:
//!
//! ```text
//! cargo test --features cuda --test it gpu:: -- --ignored
//! ```
//!
//! `AUTODIDACT_TEST_DEVICE` names another device than `cuda`. On a build or machine without it these tests fail with the program's own sentence.

use std::fs;

use serde_json::Value;

use crate::runs::{MAE, Place, SIMCLR};

fn device() -> String {
    std::env::var("AUTODIDACT_TEST_DEVICE").unwrap_or_else(|_| "cuda".to_owned())
}

fn losses(place: &Place, run: &str, device: &str, options: &[&str]) -> Vec<f64> {
    let common = ["schedule.steps=20", "schedule.lr=0.001", "--device", device];
    place.run(run, &[&common[..], options].concat());
    let text = fs::read_to_string(place.path(run).join("metrics.jsonl")).unwrap();
    let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap();
    text.lines().map(loss).collect()
}

/// Twenty steps follow those on the CPU, relative to the loss.
fn follows(compute: &str, limit: f64) {
    for (name, recipe) in [("simclr", SIMCLR), ("mae", MAE)] {
        let place = Place::new(recipe);
        let here = losses(&place, "cpu", "cpu", &[]);
        let there = losses(&place, "device", &device(), &[&format!("precision.compute={compute}")]);
        for (step, (here, there)) in here.iter().zip(&there).enumerate() {
            assert!((here - there).abs() <= limit * here.abs(), "{name}, step {}: {here} and {there}", step + 1);
        }
    }
}

#[test]
#[ignore = "needs a GPU: cargo test --features cuda --test it gpu:: -- --ignored"]
fn fp32_follows_the_cpu() {
    follows("fp32", 0.01);
}

#[test]
#[ignore = "needs a GPU: cargo test --features cuda --test it gpu:: -- --ignored"]
fn bf16_follows_the_cpu() {
    follows("bf16", 0.05);
}

#[test]
#[ignore = "needs a GPU: cargo test --features cuda --test it gpu:: -- --ignored"]
fn fp16_follows_the_cpu() {
    follows("fp16", 0.03);
}

#[test]
#[ignore = "needs a GPU: cargo test --features cuda --test it gpu:: -- --ignored"]
fn a_run_is_repeated_and_resumed_to_the_bit() {
    for recipe in [SIMCLR, MAE] {
        let place = Place::new(recipe);
        let device = device();
        let options = ["--device", device.as_str()];
        let whole = place.run("whole", &options);
        place.run("again", &options).assert_same(&whole, "again");
        fs::remove_dir_all(place.path("again/checkpoints/step-00000006")).unwrap();
        place.run("again", &options).assert_same(&whole, "resumed");
    }
}

#[test]
#[ignore = "needs a GPU: cargo test --features cuda --test it gpu:: -- --ignored"]
fn evaluation_and_features_agree_with_the_cpu() {
    let place = Place::new(&MAE.replace("skip = true", "max_train = 40\nmax_test = 40"));
    let accuracy = |run: &str, device: &str| -> f64 {
        place.run(run, &["--device", device, "schedule.lr=0.001"]);
        let summary: Value = serde_json::from_slice(&fs::read(place.path(run).join("summary.json")).unwrap()).unwrap();
        summary["knn"]["top1"].as_f64().unwrap()
    };
    let (here, there) = (accuracy("cpu", "cpu"), accuracy("device", &device()));
    assert!((here - there).abs() <= 0.1, "{here} and {there}");
}
