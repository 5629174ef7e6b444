//! Whole runs in mixed precision: they follow fp32, ranks and restarts are no inputs, and what is not finite is caught, explained and replayed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use toml_edit::value;

use crate::recipes::{all, shrunk};
use crate::runs::{MAE, Place, Result, SIMCLR};

/// Runs with a fault (`src/parallel/fault.rs`).
fn with_fault(place: &Place, run: &str, fault: &str, options: &[&str]) -> Output {
    place.command(run, options).env("AUTODIDACT_FAULT", fault).output().unwrap()
}

fn replay(bundle: &Path, options: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_autodidact"));
    command.arg("replay").arg(bundle).args(options).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn manifest(place: &Place, run: &str, step: u64) -> Value {
    let file = place.path(run).join(format!("checkpoints/step-{step:08}/manifest.json"));
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

fn records(place: &Place, run: &str) -> Vec<Value> {
    let text = fs::read_to_string(place.path(run).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// How far the losses of 30 steps may lie from those in fp32: on average, relative to the largest of them.
const LIMIT: f64 = 0.03;
/// The same for losses that are steep: contrastive ones over batch norms of 8 images, and `SimSiam`'s, which starts near zero.
const STEEP: ([&str; 4], f64) = (["dcl", "nnclr", "simclr", "simsiam"], 0.25);

/// Each method, 30 steps at a hundredth of its recipe's rate: at the full one, with batches of 8, two runs in fp32 whose operations round differently (`ops.plain`) are
/// as far apart after ten steps as any in half precision.
/// Every other recipe, so that the two halves run beside each other.
fn follow(half: usize) {
    let own = |path: &PathBuf| path.parent().is_some_and(|parent| parent.ends_with("recipes"));
    let mut far = Vec::new();
    let mut tried = 0;
    for path in all().into_iter().filter(own).skip(half).step_by(2) {
        let mut recipe = shrunk(&path);
        let lr = recipe["schedule"]["lr"].as_float().unwrap();
        recipe["schedule"]["lr"] = value(0.01 * lr);
        recipe["schedule"]["steps"] = value(30);
        recipe["batch"]["global"] = value(8);
        recipe["batch"]["micro"] = value(8);
        let place = Place::new(&recipe.to_string());
        let losses = |compute: &str| -> Vec<f64> {
            let option = format!("precision.compute={compute}");
            place.run(compute, &["eval.skip=true", "checkpoint.every_steps=0", "--ranks", "1", &option]);
            records(&place, compute).iter().map(|step| step["loss"].as_f64().expect("a finite loss")).collect()
        };
        let full = losses("fp32");
        let size = full.iter().fold(0.0, |size: f64, loss| size.max(loss.abs()));
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let limit = if STEEP.0.contains(&name.as_str()) { STEEP.1 } else { LIMIT };
        for compute in ["bf16", "fp16"] {
            let losses = losses(compute);
            assert_eq!((full.len(), losses.len()), (30, 30));
            assert_ne!(full, losses, "{name}: nothing was rounded");
            let differences = full.iter().zip(&losses).map(|(full, loss)| (loss - full).abs() / size);
            let (first, mean) = ((losses[0] - full[0]).abs() / size, differences.sum::<f64>() / 30.0);
            eprintln!("{name:12} {compute} first step {:.3} %, mean of 30 steps {:.3} %", 100.0 * first, 100.0 * mean);
            if mean.is_nan() || mean > limit {
                far.push((name.clone(), compute, mean));
            }
        }
        // pixels of 1e4
        let wide =
            ["data.std=[1e-4, 1e-4, 1e-4]", "schedule.steps=1", "schedule.warmup_epochs=0", "precision.compute=fp16"];
        place.run("wide", &[&wide[..], &["eval.skip=true", "--ranks", "1"]].concat());
        assert!(records(&place, "wide")[0]["loss"].is_number(), "{name}");
        tried += 1;
    }
    assert!(tried >= 9, "{tried} methods");
    assert!(far.is_empty(), "too far from fp32: {far:?}");
}

#[test]
fn methods_follow_fp32() {
    follow(0);
}

#[test]
fn other_methods_follow_fp32() {
    follow(1);
}

/// Ranks, memory and accumulation are no inputs in half precision, either.
#[test]
fn bitwise_any_number_of_ranks_and_resumed() {
    for (recipe, compute) in [(SIMCLR, "bf16"), (MAE, "bf16"), (SIMCLR, "fp16"), (MAE, "fp16")] {
        let place = Place::new(recipe);
        let compute = format!("precision.compute={compute}");
        let run = |name: &str, options: &[&str]| place.run(name, &[&[compute.as_str()][..], options].concat());
        let one = run("one", &["--ranks", "1"]);
        run("three", &["--ranks", "3"]).assert_same(&one, &compute);
        run("four", &["--ranks", "4", "batch.memory=cache"]).assert_same(&one, &compute);
        fs::remove_dir_all(place.path("one/checkpoints/step-00000006")).unwrap();
        run("one", &["--ranks", "2"]).assert_same(&one, "resumed");
        let heads = run("heads", &["precision.keep_fp32=[\"heads\"]"]);
        assert!(heads.differs(&one), "{compute}: heads in fp32 have other numbers");
    }
}

/// Operations of burn cast to real half precision; numbers differ, not what is learnt.
#[test]
fn burns_half_precision_gives_nearly_the_same() {
    for (recipe, compute) in [(SIMCLR, "bf16"), (MAE, "fp16")] {
        let place = Place::new(recipe);
        let compute = format!("precision.compute={compute}");
        let losses = |run: &str, plain: &str| -> Vec<f64> {
            place.run(run, &[&compute, plain, "schedule.lr=0.001"]);
            records(&place, run).iter().map(|step| step["loss"].as_f64().unwrap()).collect()
        };
        let (ours, burns) = (losses("ours", "ops.plain=false"), losses("burns", "ops.plain=true"));
        for (ours, burns) in ours.iter().zip(&burns) {
            assert!((ours - burns).abs() < 0.02 * ours.abs(), "{compute}: {ours} and {burns}");
        }
    }
}

/// An infinite gradient on one rank of four: all try the step again at half the scale, and no weight knows of it.
#[test]
fn an_overflow_of_one_rank_is_an_overflow_of_all() {
    for recipe in [SIMCLR, MAE] {
        let place = Place::new(recipe);
        // no overflow of its own: gradients are small at this scale
        let options = ["precision.compute=fp16", "precision.scale.initial=256.0", "--ranks"];
        let run = |name: &str, fault: &str, ranks: &str| -> Result {
            let options = [&options[..], &[ranks]].concat();
            let output =
                if fault.is_empty() { place.output(name, &options) } else { with_fault(&place, name, fault, &options) };
            assert!(output.status.success(), "{}", said(&output));
            Result::of(&place.path(name))
        };
        let calm = run("calm", "", "4");
        let four = run("four", "inf@2:3", "4");
        let scales = |name: &str| -> Vec<(f64, u64)> {
            let of = |step: &Value| (step["loss_scale"].as_f64().unwrap(), step["overflows"].as_u64().unwrap_or(0));
            records(&place, name).iter().map(of).collect()
        };
        assert_eq!(scales("calm"), [(256.0, 0); 6]);
        assert_eq!(scales("four"), [(256.0, 0), (256.0, 0), (128.0, 1), (128.0, 1), (128.0, 1), (128.0, 1)]);
        assert_eq!(four.losses().take(3).collect::<Vec<_>>(), calm.losses().take(3).collect::<Vec<_>>());
        run("one", "inf@0:3", "1").assert_same(&four, "on one rank");
        // what a kill behind the overflow leaves, and one in front of it; the scale is the checkpoint's
        assert_eq!(manifest(&place, "four", 4)["precision"]["scale"], 128.0);
        fs::remove_dir_all(place.path("four/checkpoints/step-00000006")).unwrap();
        run("four", "", "3").assert_same(&four, "resumed behind it");
        for step in ["step-00000004", "step-00000006"] {
            fs::remove_dir_all(place.path("four/checkpoints").join(step)).unwrap();
        }
        run("four", "inf@1:3", "2").assert_same(&four, "resumed in front of it");
    }
}

/// At the smallest scale an overflow stops the run; the state before it is kept, explained, and gone on from.
#[test]
fn at_the_smallest_scale_the_run_stops_and_advises_bf16() {
    let place = Place::new(MAE);
    let options = ["precision.compute=fp16", "precision.scale.initial=1.0", "precision.scale.interval=100"];
    let calm = place.run("calm", &options);
    let output = with_fault(&place, "run", "inf@1:4", &[&options[..], &["--ranks", "4"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let text = said(&output);
    for words in [
        "step 4: the norm of the gradient is inf in fp16 at loss scale 1",
        "precision.compute=bf16",
        "autodidact replay",
    ] {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
    let saved = autodidact::checkpoint::list(&place.path("run/checkpoints"));
    assert_eq!(saved.last().unwrap().0, 3, "the state before the step");
    let bundle: Value = serde_json::from_slice(&fs::read(place.path("run/nonfinite-step-4.json")).unwrap()).unwrap();
    assert_eq!(bundle["step"], 4);
    assert_eq!(bundle["images"].as_array().unwrap().len(), 8);
    place.run("run", &options).assert_same(&calm, "without the fault the same command goes on");
}

/// What fp16 cannot hold: the first module is named, and `replay` computes it again.
#[test]
fn the_first_module_is_named_and_replayed() {
    let place = Place::new(SIMCLR);
    let options = ["precision.compute=fp16", "data.std=[1e-6, 1e-6, 1e-6]"];
    let output = place.output("run", &options);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("step 1: the loss is NaN in fp16"), "{text}");
    assert!(
        text.contains("`backbone.conv1` is the first module whose output is not finite, in micro-batch 1 (images "),
        "{text}"
    );
    let bundle = place.path("run/nonfinite-step-1.json");
    for ranks in ["1", "3"] {
        let replayed = replay(&bundle, &["--ranks", ranks]);
        assert!(replayed.status.success(), "{}", said(&replayed));
        let table = String::from_utf8_lossy(&replayed.stdout).into_owned();
        assert!(table.contains("weights as in the bundle") && table.contains("have the bundle's numbers"), "{table}");
        assert!(table.lines().any(|line| line.starts_with("backbone.conv1 ") && line.ends_with("/16384")), "{table}");
    }
    // bf16 has the range
    let options = ["precision.compute=bf16", "data.std=[1e-6, 1e-6, 1e-6]"];
    place.run("bf16", &options);
    // and the run may turn to it by itself
    let options = ["precision.compute=fp16", "precision.on_nonfinite=fallback-bf16", "data.std=[1e-6, 1e-6, 1e-6]"];
    let fallen = place.run("fallback", &options);
    assert!(said(&place.output("fallback2", &options)).contains("the run goes on in bf16 from this step on"));
    assert_eq!(manifest(&place, "fallback", 6)["precision"]["fell_back_after"], 0);
    fs::remove_dir_all(place.path("fallback/checkpoints/step-00000006")).unwrap();
    place.run("fallback", &options).assert_same(&fallen, "resumed in bf16");
}

/// A pixel that is no number: the step is passed over on all ranks, or explained.
#[test]
fn a_step_that_is_not_finite_can_be_passed_over() {
    let place = Place::new(MAE);
    let run = |name: &str, ranks: &str| -> Result {
        let options = ["precision.on_nonfinite=skip", "--ranks", ranks];
        let output = with_fault(&place, name, "nan@0:3", &options);
        let text = said(&output);
        assert!(output.status.success(), "{text}");
        assert!(
            text.contains("warning[W007]: step 3: the loss is NaN in fp32; view 0 of the input is not finite"),
            "{text}"
        );
        Result::of(&place.path(name))
    };
    let one = run("one", "1");
    run("four", "4").assert_same(&one, "four ranks");
    let steps = records(&place, "one");
    assert_eq!(steps.len(), 6);
    assert!(steps[2]["loss"].is_null() && steps[5]["loss"].is_number() && steps[5]["skipped"] == 1, "{steps:?}");
    // neither weights nor the optimizer's averages moved: the checkpoint behind the step differs from that in front of it by nothing
    fs::remove_dir_all(place.path("one/checkpoints/step-00000006")).unwrap();
    fs::remove_dir_all(place.path("one/checkpoints/step-00000004")).unwrap();
    run("one", "3").assert_same(&one, "resumed in front of it");
    let stopped = with_fault(&place, "stop", "nan@0:3", &[]);
    let text = said(&stopped);
    assert_eq!(stopped.status.code(), Some(1));
    assert!(text.contains("look at these images"), "{text}");
}

#[test]
fn mistakes_are_named() {
    let place = Place::new(SIMCLR);
    for (option, words) in [
        ("precision.compute=\"fp8\"", "unknown compute \"fp8\""),
        ("precision.scale.min=0", "`precision.scale.min`"),
        ("precision.scale.backoff=1.5", "`precision.scale.backoff`"),
        ("precision.scale.initial=0.5", "`precision.scale.initial`"),
        ("precision.on_nonfinite=fallback-bf16", "only a run in fp16"),
    ] {
        let output = place.output("mistake", &[option]);
        assert_eq!(output.status.code(), Some(2), "{option}");
        assert!(said(&output).contains(words), "{option}: {}", said(&output));
    }
    let bundle = place.path("bundle.json");
    fs::write(&bundle, "{}").unwrap();
    let output = replay(&bundle, &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("this is no bundle of a step"), "{}", said(&output));
}
