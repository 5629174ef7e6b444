//! `doctor` and `bench`: what they say of this machine, what of recipes, and that they leave nothing behind.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::recipes::{all, shrunk};
use crate::runs::{MAE, Place, SIMCLR};

fn program(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_autodidact"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Measures two steps of the place's recipe; returns the figures.
fn bench(place: &Place, arguments: &[&str]) -> Value {
    let always = ["bench", "recipe.toml", "--steps", "2", "--warmup", "1", "--json", "-", "--device", "cpu"];
    let output = program(&place.path(""), &[&always[..], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn doctor_tells_every_line_to_people_and_to_machines() {
    let folder = tempfile::tempdir().unwrap();
    let people = program(folder.path(), &["doctor"]);
    let machines = program(folder.path(), &["doctor", "--json", "--run-dir", "runs/of/tomorrow"]);
    assert!(people.status.success() && machines.status.success(), "{}", text(&machines.stderr));
    let people = text(&people.stdout);
    let machines: Value = serde_json::from_slice(&machines.stdout).unwrap();
    assert_eq!(machines["format"], 1);
    let keys = [
        "build",
        "processor",
        "instructions",
        "cores",
        "memory",
        "disk",
        "run-disk",
        "open-files",
        "cuda-driver",
        "nccl",
        "mpi",
    ];
    let checks = machines["checks"].as_array().unwrap();
    for key in keys {
        let check = checks.iter().find(|check| check["key"] == key).unwrap_or_else(|| panic!("no {key}: {machines}"));
        let state = check["state"].as_str().unwrap();
        assert!(["ok", "missing", "note"].contains(&state), "{check}");
        assert_eq!(state == "ok", check.get("advice").is_none(), "{check}");
        assert!(people.lines().any(|line| line.starts_with(&format!("{state:<8} {key:<12} "))), "{key}: {people}");
    }
    let fact = |key: &str, fact: &str| &checks.iter().find(|check| check["key"] == key).unwrap()["facts"][fact];
    assert!(fact("cores", "usable").as_u64().unwrap() > 0);
    assert!(fact("instructions", "instruction_set").is_string());
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none(), "nothing is written");
}

#[test]
fn bench_counts_measures_and_writes_nothing() {
    let place = Place::new(SIMCLR);
    let one = bench(&place, &["--ranks", "1"]);
    for name in ["format", "parameters", "images_per_s", "views_per_s", "flops_per_step", "utilisation"] {
        assert!(one[name].as_f64().unwrap() > 0.0, "{name}: {one}");
    }
    let ratio = one["views_per_s"].as_f64().unwrap() / one["images_per_s"].as_f64().unwrap();
    assert!((ratio - 2.0).abs() < 1e-9, "{one}");
    assert!((0.0..1.0).contains(&one["input_wait"].as_f64().unwrap()), "{one}");
    let step = ["p10", "median", "p90"].map(|name| one["step_s"][name].as_f64().unwrap());
    assert!(step[0] > 0.0 && step.is_sorted(), "{one}");
    // the work is the recipe's, not that of how it is done
    for options in [
        &["--ranks", "3"][..],
        &["batch.memory=cache"],
        &["batch.micro=16"],
        &["precision.compute=bf16"],
        &["batch.activation_checkpointing=block"],
    ] {
        let other = bench(&place, options);
        assert_eq!(other["macs"], one["macs"], "{options:?}");
    }
    let twice = bench(&place, &["batch.global=64", "--ranks", "2"]);
    assert_eq!(twice["flops_per_step"].as_u64(), one["flops_per_step"].as_u64().map(|flops| 2 * flops));
    let left: Vec<_> = fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["recipe.toml"]);
}

#[test]
fn teachers_count_once_and_masked_patches_not_at_all() {
    let place = Place::new(MAE);
    let [most, least] =
        ["method.mae.mask_ratio=0.5", "method.mae.mask_ratio=0.75"].map(|ratio| bench(&place, &[ratio]));
    let macs = |figures: &Value, kind: &str| figures["macs"][kind].as_u64().unwrap();
    assert!(macs(&most, "trained") > macs(&least, "trained") && macs(&most, "fixed") == 0, "{most} {least}");
    let byol = SIMCLR.replace("[method.simclr]\nhidden = 32\nout = 16", "[method.byol]\nhidden = 32\nout = 16");
    let byol = bench(&Place::new(&byol), &[]);
    // the same backbone and projector; the student has a predictor, too
    let (trained, fixed) = (macs(&byol, "trained"), macs(&byol, "fixed"));
    assert!(fixed > 0 && trained > fixed && trained < fixed + fixed / 10, "{byol}");
    assert_eq!(byol["flops_per_step"], 2 * (3 * trained + fixed));
}

#[test]
fn bench_runs_every_method() {
    for path in all().into_iter().filter(|path| path.parent().is_some_and(|parent| parent.ends_with("recipes"))) {
        let figures = bench(&Place::new(&shrunk(&path).to_string()), &["--ranks", "2"]);
        assert!(figures["flops_per_s"].as_f64().unwrap() > 0.0, "{}: {figures}", path.display());
    }
}

#[test]
fn what_bench_cannot_do_is_refused_in_a_line_and_a_hint() {
    let place = Place::new(SIMCLR);
    let refused = |arguments: &[&str], envs: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_autodidact"));
        command.args(["bench", "recipe.toml"]).args(arguments).envs(envs.iter().copied()).current_dir(place.path(""));
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(output.stdout.is_empty() && said.contains("error: ") && !said.contains("panicked"), "{said}");
        said
    };
    let several = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")];
    let said = refused(&[], &several);
    assert!(said.contains("started 2 processes, and `bench` measures one\nhint: "), "{said}");
    assert!(refused(&["--ranks", "9"], &[]).contains("--ranks 9"));
    assert!(refused(&["--steps", "0"], &[]).contains("--steps"));
    assert!(refused(&["data.source=cifar10", "data.path=nowhere"], &[]).contains("nowhere"));
    let file = place.path("no/such/folder/figures.json");
    let output = program(&place.path(""), &["bench", "recipe.toml", "--steps", "1", "--json", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("figures.json: cannot "), "{}", text(&output.stderr));
}

#[test]
fn bench_prints_a_table_beside_its_json() {
    let place = Place::new(SIMCLR);
    // longer than the run is
    let output =
        program(&place.path(""), &["bench", "recipe.toml", "--steps", "7", "--warmup", "0", "--json", "f.json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for name in ["recipe", "device", "step", "speed", "input", "work", "product", "utilisation", "memory"] {
        assert!(table.lines().any(|line| line.starts_with(&format!("{name:<12} "))), "{name}: {table}");
    }
    let figures: Value = serde_json::from_slice(&fs::read(place.path("f.json")).unwrap()).unwrap();
    assert_eq!((&figures["steps"], &figures["warmup"]), (&Value::from(7), &Value::from(0)));
}
