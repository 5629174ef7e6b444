//! What leaves a run: features of images, and backbones for other programs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::finetune;
use crate::runs::{MAE, Place, SIMCLR};

pub(crate) fn autodidact(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_autodidact"));
    command.args(words).current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn must(words: &[&str]) {
    let output = autodidact(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", said(&output));
}

/// Runs what cannot work and returns what was said.
pub(crate) fn refused(words: &[&str], code: i32) -> String {
    let output = autodidact(words).output().unwrap();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(code), "{words:?}: {text}");
    assert!(text.contains("error: ") && !text.contains("panicked"), "{text}");
    text
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Files of a folder and their contents.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_file()).map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// Shape and numbers of an `.npy` file, read as NEP 1 says.
fn npy(path: &Path) -> (String, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let length = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert!((10 + length).is_multiple_of(64) && bytes[9 + length] == b'\n');
    (String::from_utf8(bytes[10..10 + length].to_vec()).unwrap(), bytes[10 + length..].to_vec())
}

/// A folder of `count` images in two classes; those of `broken` are text.
fn pictures(folder: &Path, count: u32, broken: &[u32]) {
    for index in 0..count {
        let class = folder.join(if index % 2 == 0 { "even" } else { "odd" });
        fs::create_dir_all(&class).unwrap();
        let path = class.join(format!("{index:04}.png"));
        if broken.contains(&index) {
            fs::write(path, "no image").unwrap();
        } else {
            let shade = |x: u32, y: u32| image::Rgb([(x * 7 + index) as u8, (y * 11) as u8, (index * 3) as u8]);
            image::RgbImage::from_fn(20 + index % 3, 18, shade).save(path).unwrap();
        }
    }
}

#[test]
fn features_are_those_of_the_images_whatever_the_threads_and_kills() {
    let place = Place::new(SIMCLR);
    place.run("run", &[]);
    let (run, images) = (place.path("run"), place.path("images"));
    pictures(&images, 2100, &[3, 1500]);
    let embed = |name: &str, more: &[&str]| {
        let output = place.path(name);
        let words = [&["embed", text(&run), text(&images), "--output", text(&output)], more].concat();
        (output.clone(), words.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let go = |words: &[String]| must(&words.iter().map(String::as_str).collect::<Vec<_>>());

    let (one, words) = embed("one.npy", &["--threads", "1"]);
    go(&words);
    let (header, values) = npy(&one);
    assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2098, 64,), }"), "{header}");
    assert_eq!(values.len(), 2098 * 64 * 4);
    let (header, labels) = npy(&place.path("one.labels.npy"));
    assert!(header.contains("'<i8'") && header.contains("(2098,)"), "{header}");
    let lines = fs::read_to_string(place.path("one.images.jsonl")).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2098);
    for (row, line) in lines.iter().enumerate() {
        let label = i64::from_le_bytes(labels[8 * row..8 * row + 8].try_into().unwrap());
        assert_eq!((line["row"].as_u64(), line["label"].as_i64()), (Some(row as u64), Some(label)));
        let path = line["path"].as_str().unwrap();
        assert!(path.contains(if label == 0 { "/even/" } else { "/odd/" }), "{path}");
        assert_eq!(line["class"].as_str().unwrap(), if label == 0 { "even" } else { "odd" });
    }
    let about: Value = serde_json::from_slice(&fs::read(place.path("one.json")).unwrap()).unwrap();
    assert_eq!((about["rows"].as_u64(), about["dim"].as_u64()), (Some(2098), Some(64)));
    let unreadable = about["unreadable"].as_array().unwrap();
    assert_eq!(unreadable.len(), 2);
    assert!(unreadable.iter().all(|bad| bad["reason"].as_str().unwrap().starts_with("not an image")), "{unreadable:?}");
    assert!(!place.path("one.npy.parts").exists());
    // a row is the image's: the same image twice gives the same numbers wherever it stands
    let alone = place.path("alone");
    fs::create_dir_all(&alone).unwrap();
    fs::copy(lines[700]["path"].as_str().unwrap(), alone.join("a.png")).unwrap();
    must(&["embed", text(&run), text(&alone), "--output", text(&place.path("alone.npy"))]);
    assert_eq!(npy(&place.path("alone.npy")).1, values[700 * 256..701 * 256]);
    assert!(!place.path("alone.labels.npy").exists());

    let (three, words) = embed("three.npy", &["--threads", "3"]);
    go(&words);
    assert!(npy(&three).1 == values, "threads change the features");

    // killed once a part is there; the same command goes on
    let (killed, words) = embed("killed.npy", &["--threads", "2"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut child = autodidact(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let part = place.path("killed.npy.parts/part-000000.safetensors");
    let start = Instant::now();
    while !part.exists() {
        assert!(start.elapsed() < Duration::from_mins(2), "no part within two minutes");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!killed.exists(), "killed too late to test anything");
    let first = fs::metadata(&part).unwrap().modified().unwrap();
    // other images or weights are not mixed in
    let student = refused(&[&words[..], &["--size", "32"]].concat(), 1);
    assert!(student.contains("a part of other features (`size` is 16 there and 32 here)"), "{student}");
    assert_eq!(fs::metadata(&part).unwrap().modified().unwrap(), first);
    // killed while all is put together, it has written some of what lies beside
    fs::write(place.path("killed.json"), "{}").unwrap();
    let output = autodidact(&words).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("going on: "), "{}", said(&output));
    assert!(npy(&killed).1 == values, "a kill changes the features");
    assert!(!place.path("killed.npy.parts").exists());

    // safetensors holds the same
    let (safe, words) = embed("safe.safetensors", &[]);
    go(&words);
    let bytes = fs::read(&safe).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("features").unwrap().shape(), [2098, 64]);
    assert!(file.tensor("features").unwrap().data() == values);
    assert_eq!(file.tensor("labels").unwrap().data(), labels);
    let indices = file.tensor("indices").unwrap();
    let index = |row: usize| i64::from_le_bytes(indices.data()[8 * row..8 * row + 8].try_into().unwrap());
    assert!((0..2098).all(|row| lines[row]["index"].as_i64() == Some(index(row))));

    // nor is anything overwritten that lies beside, where nothing was begun
    fs::write(place.path("theirs.json"), "mine").unwrap();
    let beside = refused(&["embed", text(&run), text(&images), "--output", text(&place.path("theirs.npy"))], 2);
    assert!(beside.contains("theirs.json: there is a file already"), "{beside}");
    assert_eq!(fs::read_to_string(place.path("theirs.json")).unwrap(), "mine");
    let there = refused(&["embed", text(&run), text(&images), "--output", text(&one)], 2);
    assert!(there.contains("there is a file already") && there.contains("--force"), "{there}");
    assert!(npy(&one).1 == values);
}

#[test]
fn a_damaged_part_is_named_and_a_disk_that_is_full_leaves_nothing_half_written() {
    let place = Place::new(SIMCLR);
    place.run("run", &["schedule.steps=1", "schedule.warmup_epochs=0"]);
    let (run, output) = (place.path("run"), place.path("features.npy"));
    let words = ["embed", text(&run), "sample", "--output", text(&output)];
    // no file of more than 16 KiB can be written
    let limited = |words: &[&str]| {
        let script = "trap '' XFSZ; ulimit -f 16; exec \"$@\"";
        let mut command = Command::new("bash");
        command.args(["-c", script, "bash", env!("CARGO_BIN_EXE_autodidact")]).args(words);
        command.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null()).output().unwrap()
    };
    let full = limited(&words);
    assert_eq!(full.status.code(), Some(1), "{}", said(&full));
    assert!(said(&full).contains("cannot write: ") && !said(&full).contains("panicked"), "{}", said(&full));
    assert!(!output.exists());
    let parts = place.path("features.npy.parts");
    assert!(contents(&parts).keys().all(|path| !path.to_string_lossy().contains("part-")), "nothing half-written");
    fs::write(parts.join("part-000000.safetensors"), "damaged").unwrap();
    let damaged = refused(&words, 1);
    assert!(damaged.contains("part-000000.safetensors: it is damaged: "), "{damaged}");
    assert!(damaged.contains("hint: remove it and run the same command again"), "{damaged}");
    fs::remove_file(parts.join("part-000000.safetensors")).unwrap();
    must(&words);
    assert!(output.exists());

    for (format, file) in [("safetensors", "model.safetensors"), ("onnx", "model.onnx")] {
        let folder = place.path("exported");
        let words = ["export", text(&run), "--format", format, "--output", text(&folder)];
        let before: Vec<PathBuf> = fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap().path()).collect();
        let full = limited(&words);
        assert_eq!(full.status.code(), Some(1), "{}", said(&full));
        assert!(said(&full).contains(&format!("exported/{file}: cannot write: ")), "{}", said(&full));
        let after: Vec<PathBuf> = fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(after.len(), before.len(), "nothing is left: {after:?}");
        must(&words);
        fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn an_export_is_a_whole_folder_that_is_replaced_only_when_asked_for() {
    let place = Place::new(MAE);
    place.run("run", &[]);
    let (run, folder) = (place.path("run"), place.path("exported"));
    let words = ["export", text(&run), "--format", "timm", "--output", text(&folder), "--license", "apache-2.0"];
    must(&words);
    let files = contents(&folder);
    let names: Vec<_> = files.keys().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["README.md", "config.json", "model.safetensors", "recipe.toml"]);
    let card = fs::read_to_string(folder.join("README.md")).unwrap();
    for words in
        ["license: \"apache-2.0\"", "library_name: timm", "local-dir:.", "| steps | 6 |", "| images | 80 images, "]
    {
        assert!(card.contains(words), "{words:?} is not in\n{card}");
    }
    assert!(!card.contains("began with the weights"), "its weights were drawn: {card}");
    let config: Value = serde_json::from_slice(&files[&folder.join("config.json")]).unwrap();
    assert_eq!(config["architecture"], "vit_base_patch16_224");
    assert_eq!(config["num_classes"], 0);
    assert_eq!(config["model_args"]["embed_dim"], 24);
    assert_eq!(config["pretrained_cfg"]["input_size"], serde_json::json!([3, 16, 16]));

    let there = refused(&words, 2);
    assert!(there.contains("there is a folder already") && there.contains("--force"), "{there}");
    assert_eq!(contents(&folder), files, "left as it was");
    must(&[&words[..], &["--force"]].concat());
    assert_eq!(contents(&folder), files, "the same bytes again");
    // a folder of something else is not removed
    let other = place.path("other");
    fs::create_dir_all(&other).unwrap();
    fs::write(other.join("thesis.tex"), "years of work").unwrap();
    let words = ["export", text(&run), "--format", "timm", "--output", text(&other), "--force"];
    assert!(refused(&words, 2).contains("this is none"));
    assert_eq!(fs::read_to_string(other.join("thesis.tex")).unwrap(), "years of work");
    let nowhere = place.path("no/such/place");
    let words = ["export", text(&run), "--format", "timm", "--output", text(&nowhere)];
    assert!(refused(&words, 1).contains("hint: the folder does not exist"));

    let place_of = place.path("larger");
    let words = ["export", text(&run), "--format", "timm", "--size", "32", "--output", text(&place_of)];
    assert!(refused(&words, 2).contains("its positions are for images of 16 px"));
    // what was exported is read like any folder of timm's, and gives the same features
    let (own, back) = (place.path("own.npy"), place.path("back.npy"));
    must(&["embed", text(&run), "sample", "--output", text(&own)]);
    must(&["embed", text(&folder), "sample", "--output", text(&back)]);
    assert!(npy(&own).1 == npy(&back).1);
    // and the mean of the patches is something else
    let mean = place.path("mean.npy");
    must(&["embed", text(&folder), "sample", "--output", text(&mean), "--pool", "mean"]);
    assert_eq!(npy(&mean).0, npy(&own).0);
    assert!(npy(&mean).1 != npy(&own).1);
}

#[test]
fn an_onnx_file_is_exported_like_any_other() {
    let place = Place::new(MAE);
    place.run("run", &["schedule.steps=1", "schedule.warmup_epochs=0"]);
    let (run, folder) = (place.path("run"), place.path("exported"));
    let words = ["export", text(&run), "--format", "onnx", "--output", text(&folder)];
    must(&words);
    let files = contents(&folder);
    let names: Vec<_> = files.keys().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["README.md", "config.json", "model.onnx", "recipe.toml"]);
    // version 8 of the format, by this program
    assert!(files[&folder.join("model.onnx")].starts_with(b"\x08\x08\x12\x0aautodidact"));
    let card = String::from_utf8(files[&folder.join("README.md")].clone()).unwrap();
    for words in ["library_name: onnx", "onnxruntime.InferenceSession(\"model.onnx\"", "def features(images)"] {
        assert!(card.contains(words), "{words:?} is not in\n{card}");
    }
    must(&[&words[..], &["--force"]].concat());
    assert_eq!(contents(&folder), files, "the same bytes again");
    let other = place.path("larger");
    let words = ["export", text(&run), "--format", "onnx", "--size", "32", "--output", text(&other)];
    assert!(refused(&words, 2).contains("its positions are for images of 16 px"));
    assert!(!other.exists());
}

/// Bytes of each tensor of a file.
fn tensors(file: &Path) -> BTreeMap<String, Vec<u8>> {
    let bytes = fs::read(file).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.iter().map(|(name, tensor)| (name.to_owned(), tensor.data().to_vec())).collect()
}

#[test]
fn a_fine_tuned_run_is_exported_with_its_classes() {
    let lora = "lora = { rank = 4 }\n";
    let place = Place::new(&finetune::VIT.replace("layer_decay = 0.7\nhead_epochs = 1\n", lora));
    place.run("run", &["schedule.steps=3"]);
    let run = place.path("run");
    let export = |name: &str, format: &str, more: &[&str]| {
        let folder = place.path(name);
        must(&[&["export", text(&run), "--format", format, "--output", text(&folder)], more].concat());
        folder
    };
    // adapters are in the weights, whichever network is asked for
    let merged = tensors(&run.join("merged.safetensors"));
    for which in ["eval", "student"] {
        let own = tensors(&export(which, "safetensors", &["--which", which]).join("model.safetensors"));
        assert_eq!(own.len(), merged.len());
        for (name, values) in own {
            let path = if name.starts_with("head.") { name.clone() } else { format!("backbone.{name}") };
            assert!(merged[&path] == values, "{which}: {name}");
        }
    }
    let timm = export("timm", "timm", &[]);
    let config: Value = serde_json::from_slice(&fs::read(timm.join("config.json")).unwrap()).unwrap();
    let classes = config["label_names"].as_array().unwrap();
    assert!(classes.len() > 1 && config["num_classes"] == classes.len(), "{config}");
    assert_eq!(tensors(&timm.join("model.safetensors"))["head.bias"], merged["head.bias"]);
    let card = fs::read_to_string(timm.join("README.md")).unwrap();
    let first = format!("Its {} classes: {}, ", classes.len(), classes[0].as_str().unwrap());
    for words in [
        "pipeline_tag: image-classification",
        "def logits(images)",
        "`autodidact finetune recipe.toml`",
        "| classification, top 1 | ",
        &first,
    ] {
        assert!(card.contains(words), "{words:?} is not in\n{card}");
    }
    assert!(!card.contains("- self-supervised"), "{card}");
    // its features are read like any others
    let (own, back) = (place.path("own.npy"), place.path("back.npy"));
    must(&["embed", text(&run), "sample", "--output", text(&own)]);
    must(&["embed", text(&timm), "sample", "--output", text(&back)]);
    assert!(npy(&own).1 == npy(&back).1);

    let backbone = export("backbone", "timm", &["--backbone-only", "--pool", "mean"]);
    let config: Value = serde_json::from_slice(&fs::read(backbone.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["num_classes"], config.get("label_names")), (&0.into(), None));
    assert!(!tensors(&backbone.join("model.safetensors")).contains_key("head.weight"));
    let card = fs::read_to_string(backbone.join("README.md")).unwrap();
    assert!(card.contains("pipeline_tag: image-feature-extraction") && card.contains("def features(images)"), "{card}");

    let out = place.path("out");
    let words = ["export", text(&run), "--format", "timm", "--output", text(&out)];
    let pool = refused(&[&words[..], &["--pool", "mean"]].concat(), 2);
    assert!(
        pool.contains("the classifier was trained on the features that it has") && pool.contains("hint: "),
        "{pool}"
    );
    let teacher = refused(&[&words[..], &["--which", "teacher"]].concat(), 2);
    assert!(teacher.contains("`classify` has no teacher"), "{teacher}");
    assert!(!out.exists());
    let onnx = fs::read(export("onnx", "onnx", &[]).join("model.onnx")).unwrap();
    let has = |words: &str| onnx.windows(words.len()).any(|part| part == words.as_bytes());
    assert!(has("logits") && has("class_names") && !has("features"));
}

#[test]
fn the_best_weights_of_a_run_that_may_stop_early_are_exported() {
    let recipe = finetune::RESNET.replace("steps = 6\nlr = 0.01", "steps = 60\nlr = 1e-9");
    let place = Place::new(&(recipe + "[early_stopping]\npatience = 1\n"));
    place.run("run", &["data.validation=0.2", "ema.momentum=0"]);
    let run = place.path("run");
    let latest = fs::read_to_string(run.join("checkpoints/latest")).unwrap();
    let checkpoint = run.join("checkpoints").join(latest.trim());
    let summary: Value = serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap();
    let best = tensors(&run.join("best.safetensors"));
    for (name, from, is_best) in [("of-run", &run, true), ("of-checkpoint", &checkpoint, false)] {
        let folder = place.path(name);
        must(&["export", text(from), "--format", "safetensors", "--backbone-only", "--output", text(&folder)]);
        let own = tensors(&folder.join("model.safetensors"));
        let same = own.iter().all(|(name, values)| best[&format!("backbone.{name}")] == *values);
        assert_eq!(same, is_best, "{name}");
        let card = fs::read_to_string(folder.join("README.md")).unwrap();
        assert_eq!(card.contains(&format!("| steps | {} |", summary["best_step"])), is_best, "{card}");
        assert_eq!(card.contains("best evaluation"), is_best, "{card}");
    }
}

#[test]
fn networks_of_a_run_are_told_apart() {
    let simclr = "[method.simclr]\nhidden = 32\nout = 16\n";
    let place = Place::new(&SIMCLR.replace(simclr, "[method.byol]\nhidden = 32\nout = 16\n"));
    place.run("run", &[]);
    let run = place.path("run");
    let weights = |which: &str| {
        let folder = place.path(which);
        must(&["export", text(&run), "--format", "safetensors", "--which", which, "--output", text(&folder)]);
        fs::read(folder.join("model.safetensors")).unwrap()
    };
    let (average, student, teacher) = (weights("eval"), weights("student"), weights("teacher"));
    assert!(average != student && student != teacher && average != teacher);
    // the student is what the checkpoint holds
    let latest = fs::read_to_string(run.join("checkpoints/latest")).unwrap();
    let held = fs::read(run.join("checkpoints").join(latest.trim()).join("model.safetensors")).unwrap();
    let held = safetensors::SafeTensors::deserialize(&held).unwrap();
    for (bytes, prefix) in [(&student, "backbone."), (&teacher, "teacher.backbone.")] {
        let file = safetensors::SafeTensors::deserialize(bytes).unwrap();
        assert!(file.names().len() > 50);
        for (name, tensor) in file.tensors() {
            assert!(tensor.data() == held.tensor(&format!("{prefix}{name}")).unwrap().data(), "{name}");
        }
    }
    let place = Place::new(SIMCLR);
    place.run("run", &["schedule.steps=1", "schedule.warmup_epochs=0"]);
    let run = place.path("run");
    let out = place.path("out");
    let words = ["export", text(&run), "--format", "safetensors", "--which", "teacher", "--output", text(&out)];
    assert!(refused(&words, 2).contains("`simclr` has no teacher"));
    let words = ["export", text(&run), "--format", "timm", "--output", text(&out)];
    let stem = refused(&words, 2);
    assert!(stem.contains("timm cannot express the 3 x 3 stem") && stem.contains("hint: use "), "{stem}");
    assert!(!out.exists());
}

#[test]
fn mistakes_are_said() {
    let place = Place::new(SIMCLR);
    place.run("run", &["schedule.steps=1", "schedule.warmup_epochs=0"]);
    let (run, out) = (place.path("run"), place.path("out.npy"));
    let (run, out) = (text(&run), text(&out));
    let says = |words: &[&str], expected: &str| {
        let told = refused(words, 2);
        assert!(told.contains(expected) && told.contains("hint: "), "{told}");
    };
    says(&["embed", run, "sample", "--output", "features.csv"], "written to .npy or .safetensors");
    says(&["embed", "nowhere", "sample", "--output", out], "nowhere: there is nothing of that name");
    says(&["embed", run, "nowhere", "--output", out], "nowhere");
    let latest = fs::read_to_string(place.path("run/checkpoints/latest")).unwrap();
    let file = place.path("run/checkpoints").join(latest.trim()).join("model.safetensors");
    says(&["embed", text(&file), "sample", "--output", out], "a file of a checkpoint");
    let none = place.path("none");
    pictures(&none, 2, &[0, 1]);
    let told = refused(&["embed", run, text(&none), "--output", out], 1);
    assert!(told.contains("none of 2 images can be read") && told.contains("not an image"), "{told}");
    let told = refused(&["embed", run, "sample", "--output", out, "--pool", "mean"], 2);
    assert!(told.contains("`--pool` is for vision transformers"), "{told}");
    for (option, value) in [("--mean", "1,2"), ("--std", "1,0,1"), ("--size", "0"), ("--heads", "0")] {
        let output = autodidact(&["embed", run, "sample", "--output", out, option, value]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{option} {value}: {}", said(&output));
    }
    assert!(!Path::new(out).exists());
}
