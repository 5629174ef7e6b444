//! The likeliest mistakes: each gets the place, the reason and the remedy, and nothing is written.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::runs::{MAE, Place, SIMCLR};

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs a recipe that cannot work and returns what was said; the run folder must not exist afterwards.
fn refused(recipe: &str, options: &[&str], code: i32) -> String {
    let place = Place::new(recipe);
    let output = place.output("run", options);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    assert!(!place.path("run").exists(), "nothing may be written: {text}");
    text
}

#[test]
fn a_misspelt_key_is_underlined_with_a_suggestion() {
    let text = refused(&SIMCLR.replace("hidden = 32", "hiden = 32"), &[], 2);
    assert!(
        text.contains("recipe.toml:") && text.contains("`hiden`") && text.contains("did you mean `hidden`?"),
        "{text}"
    );
    assert!(text.contains("^^^^^"), "{text}");
}

#[test]
fn values_out_of_range_name_value_and_limit() {
    let text = refused(SIMCLR, &["method.simclr.temperature=-1"], 2);
    assert!(text.contains("method.simclr.temperature") && text.contains("-1"), "{text}");
    let text = refused(SIMCLR, &["batch.micro=5"], 2);
    assert!(text.contains("batch") && text.contains('5') && text.contains("hint"), "{text}");
    let text = refused(SIMCLR, &["batch.micro=128", "batch.global=128"], 2);
    assert!(text.contains("128") && text.contains("80"), "{text}");
    let text = refused(SIMCLR, &["--ranks", "9"], 2);
    assert!(text.contains("--ranks 9") && text.contains("1 to 8"), "{text}");
}

#[test]
fn sizes_beyond_any_memory_are_refused() {
    let text = refused(SIMCLR, &["method.simclr.hidden=99999999999"], 2);
    assert!(text.contains("method.simclr.hidden") && text.contains("65536"), "{text}");
    let text = refused(MAE, &["method.mae.decoder_depth=100000000"], 2);
    assert!(text.contains("method.mae.decoder_depth") && text.contains("1000"), "{text}");
}

#[test]
fn a_test_source_is_checked_before_training() {
    let recipe = SIMCLR.replace("skip = true", "[eval.test]\nsource = \"folder\"\npath = \"nowhere\"");
    let text = refused(&recipe, &[], 1);
    assert!(text.contains("nowhere"), "{text}");
}

#[test]
fn networks_that_do_not_fit_are_explained() {
    let resnet = "[backbone.resnet]\ndepth = 18\n[method.mae]";
    let start = MAE.find("[backbone.vit]").unwrap();
    let end = MAE.find("[method.mae]").unwrap();
    let recipe = format!("{}{resnet}{}", &MAE[..start], &MAE[end + "[method.mae]".len()..]);
    let text = refused(&recipe, &[], 2);
    assert!(text.contains("mae") && text.contains("resnet") && text.contains("vit"), "{text}");
    let text = refused(MAE, &["views.0.size=18"], 2);
    assert!(text.contains("18") && text.contains('4'), "{text}");
}

#[test]
fn sources_without_images_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = |path: &Path| {
        SIMCLR
            .replace("source = \"sample\"\nlimit = 80", &format!("source = \"folder\"\npath = \"{}\"", path.display()))
    };
    let missing = folder.path().join("missing");
    let text = refused(&recipe(&missing), &[], 2);
    assert!(text.contains(&missing.display().to_string()), "{text}");
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let text = refused(&recipe(&empty), &[], 2);
    assert!(text.contains("empty"), "{text}");
    fs::write(empty.join("notes.txt"), "no image").unwrap();
    let text = refused(&recipe(&empty), &[], 2);
    assert!(text.contains("jpg") && text.contains('1'), "{text}");
}

#[test]
fn a_recipe_that_is_not_utf8_or_not_there() {
    let place = Place::new("");
    fs::write(place.path("recipe.toml"), b"seed = 1\nname = \"caf\xe9\"\n").unwrap();
    let output = place.output("run", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("recipe.toml:2: not UTF-8 at byte 20"), "{}", said(&output));
    fs::remove_file(place.path("recipe.toml")).unwrap();
    let output = place.output("run", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("recipe.toml"), "{}", said(&output));
}

#[test]
fn a_run_folder_of_another_recipe_is_refused_with_the_differences() {
    let place = Place::new(SIMCLR);
    place.run("run", &["schedule.steps=2"]);
    let before = fs::read(place.path("run/metrics.jsonl")).unwrap();
    let output = place.output("run", &["schedule.steps=2", "schedule.lr=0.25"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("`schedule.lr` was 0.5, is 0.25") && text.contains("--resume never"), "{text}");
    assert_eq!(fs::read(place.path("run/metrics.jsonl")).unwrap(), before);
}

#[test]
fn a_checkpoint_of_another_network_is_named() {
    let place = Place::new(SIMCLR);
    place.run("run", &["schedule.steps=2"]);
    let from = place.path("run/checkpoints/step-00000002").display().to_string();
    let output = place.output("other", &["schedule.steps=4", "backbone.resnet.width=0.25", "--resume", &from]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("written by another recipe") && text.contains("hint"), "{text}");
}

#[cfg(unix)]
#[test]
fn a_folder_that_cannot_be_written_is_one_sentence() {
    let place = Place::new(SIMCLR);
    // a file where the folder should be: also refused to root, unlike permissions
    fs::write(place.path("file"), "").unwrap();
    let output = place.output("file/run", &[]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("cannot create the run folder") && text.lines().filter(|l| l.starts_with("error")).count() == 1,
        "{text}"
    );
}

#[test]
fn a_loss_that_explodes_stops_with_advice_and_a_good_checkpoint() {
    let place = Place::new(&MAE.replace("clip_norm = 1.0\n", ""));
    let output = place.output("run", &["schedule.lr=1e30", "checkpoint.every_steps=1"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("lower `schedule.lr`"), "{text}");
    for (_, path) in autodidact::checkpoint::list(&place.path("run/checkpoints")) {
        autodidact::checkpoint::verify(&path).unwrap();
    }
}

#[test]
fn dry_run_prints_the_plan_and_writes_nothing() {
    let place = Place::new(SIMCLR);
    let output = place.output("run", &["--dry-run"]);
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("80") && text.contains("rank > 1"), "{text}");
    assert!(!place.path("run").exists());
}

#[test]
fn dry_run_prints_the_groups_of_parameters() {
    let rules = r#"
[[parameters]]
match = "backbone.*"
layer_decay = 0.5
[[parameters]]
match = "*cls_token"
decay_scale = 0
[[parameters]]
match = "*.decoder_pred.*"
freeze_steps = 2
fixed_lr = true
weight_decay = 0.3
"#;
    let place = Place::new(&format!("{MAE}{rules}"));
    let output = place.output("run", &["--dry-run", "schedule.weight_decay_end=0.2"]);
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    let expected = "\
group                                     tensors  parameters  lr scale  weight decay  adapted  frozen until
rank > 1, backbone.* layer 0, *cls_token        1          24    0.0625             0       no             -
rank > 1, backbone.* layer 0                    2        1560    0.0625   0.05 to 0.2       no             -
rank <= 1, backbone.* layer 0                   1          24    0.0625             0       no             -
rank <= 1, backbone.* layer 1                   8         312     0.125             0       no             -
rank > 1, backbone.* layer 1                    4        6912     0.125   0.05 to 0.2       no             -
rank <= 1, backbone.* layer 2                   8         312      0.25             0       no             -
rank > 1, backbone.* layer 2                    4        6912      0.25   0.05 to 0.2       no             -
rank <= 1, backbone.* layer 3                   8         312       0.5             0       no             -
rank > 1, backbone.* layer 3                    4        6912       0.5   0.05 to 0.2       no             -
rank <= 1, backbone.* layer 4                   2          48         1             0       no             -
rank > 1                                        6        3472         1   0.05 to 0.2       no             -
rank <= 1                                      11         256         1             0       no             -
rank > 1, *.decoder_pred.*                      1         768   1 fixed           0.3       no        step 2
rank <= 1, *.decoder_pred.*                     1          48   1 fixed           0.3       no        step 2";
    let table = text.split("\n\n").nth(1).unwrap_or_default();
    assert_eq!(table.trim_end(), expected, "{text}");
}

#[test]
fn a_rule_that_no_parameter_matches_is_refused() {
    let rule = "\n[[parameters]]\nmatch = \"conv1\"\nlr_scale = 0.1\n";
    let text = refused(&format!("{SIMCLR}{rule}"), &[], 2);
    assert!(text.contains("`parameters.0.match` is \"conv1\", which no parameter matches"), "{text}");
    assert!(text.contains("hint: a pattern is about whole paths: `*conv1*` matches `backbone.conv1.weight`"), "{text}");
}

#[test]
fn exit_codes_and_help() {
    let run = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_autodidact")).args(args).output().unwrap();
    assert_eq!(run(&["--help"]).status.code(), Some(0));
    assert_eq!(run(&["pretrain"]).status.code(), Some(2));
    assert_eq!(run(&["eval", "knn", "nowhere"]).status.code(), Some(2));
    assert_eq!(run(&["pretrain", "x.toml", "--device", "gpu"]).status.code(), Some(2));
    let schema = run(&["recipe", "schema"]);
    assert!(serde_json::from_slice::<serde_json::Value>(&schema.stdout).is_ok());
    assert!(!run(&["completions", "bash"]).stdout.is_empty());
}

#[test]
fn eval_knn_repeats_what_the_run_said() {
    let place = Place::new(&SIMCLR.replace("skip = true", "max_train = 60\nmax_test = 30"));
    place.run("run", &["schedule.steps=2"]);
    let summary: serde_json::Value =
        serde_json::from_slice(&fs::read(place.path("run/summary.json")).unwrap()).unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_autodidact")).args(["eval", "knn"]).arg(place.path("run")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", said(&output));
    let top1 = format!("{:5.1} %", 100.0 * summary["knn"]["top1"].as_f64().unwrap());
    assert!(text.contains(&top1), "{top1} in {text}");
}

#[test]
fn a_path_that_would_be_ignored_is_refused() {
    let text = refused(SIMCLR, &["data.path=~/pictures"], 2);
    assert!(text.contains("data.path") && text.contains("data.source=folder"), "{text}");
}

#[test]
fn weights_that_are_not_finite_never_reach_a_checkpoint() {
    let place = Place::new(MAE);
    let output = place.output("run", &["schedule.lr=1e30", "optimizer.adamw.weight_decay=1e30", "schedule.steps=2"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("nothing of this step is saved") && text.contains("updated weight"), "{text}");
    assert!(autodidact::checkpoint::list(&place.path("run/checkpoints")).is_empty());
}

#[test]
fn resuming_from_something_else_says_what_a_checkpoint_is() {
    let place = Place::new(SIMCLR);
    let from = place.path("").display().to_string();
    let output = place.output("run", &["--resume", &from]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        said(&output).contains("this is no checkpoint") && said(&output).contains("step-00000100"),
        "{}",
        said(&output)
    );
}
