//! `predict`, and networks that tell several labels an image.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::exports::{autodidact, must, refused, text};
use crate::runs::{Place, SIMCLR};

/// Tells red and bright images, in few steps.
const TAGS: &str = r#"
[data]
source = "list"
path = "train.txt"
[[views]]
size = 16
flip = 0.5
[backbone.resnet]
depth = 18
width = 0.125
stem = "cifar"
[method.classify]
label_smoothing = 0.1
balance_classes = true
mix = { mixup = 0.2, prob = 0.3 }
[batch]
global = 32
micro = 8
[optimizer.adamw]
[schedule]
steps = 40
lr = 0.01
[checkpoint]
every_steps = 10
[eval]
every_epochs = 2
"#;

/// Images of noise that are red, bright, both or neither, and lists of them; every twentieth is in the list without a label.
fn tagged(folder: &Path) -> PathBuf {
    fs::create_dir_all(folder.join("images")).unwrap();
    let mut lists = [String::new(), String::new()];
    for index in 0..240u32 {
        let (red, bright) = (index % 2 == 1, index % 3 == 0);
        let noise = |x: u32, y: u32, c: u32| (index * 71 + x * 13 + y * 29 + c * 7) % 50;
        let light = if bright { 120 } else { 20 };
        let color = |x, y| {
            let plain = |c| (light + noise(x, y, c)) as u8;
            image::Rgb([plain(0) + if red { 80 } else { 0 }, plain(1), plain(2)])
        };
        let name = format!("images/{index:03}.png");
        image::RgbImage::from_fn(16, 16, color).save(folder.join(&name)).unwrap();
        let list = &mut lists[usize::from(index >= 180)];
        if index % 20 == 7 {
            writeln!(list, "{name}").unwrap();
        } else {
            let labels = [(bright, "bright"), (red, "red, very")];
            let labels: Vec<&str> = labels.iter().filter(|(is, _)| *is).map(|(_, label)| *label).collect();
            writeln!(list, "{name}\t{}", labels.join("\t")).unwrap();
        }
    }
    fs::write(folder.join("train.txt"), &lists[0]).unwrap();
    fs::write(folder.join("test.txt"), &lists[1]).unwrap();
    folder.join("train.txt")
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn several_labels_are_learnt_alike_by_any_ranks_and_told() {
    let place = Place::new(TAGS);
    let list = tagged(&place.path("data"));
    let source = format!("data.path={}", text(&list));
    let one = place.run("1", &[&source, "--ranks", "1"]);
    for ranks in ["2", "4"] {
        place.run(ranks, &[&source, "--ranks", ranks]).assert_same(&one, ranks);
    }
    // resumed from the middle
    let checkpoints = place.path("2/checkpoints");
    fs::remove_dir_all(checkpoints.join("step-00000040")).unwrap();
    place.run("2", &[&source, "--ranks", "3"]).assert_same(&one, "resumed");
    let summary = json(&place.path("1/summary.json"));
    let result = &summary["classification"];
    assert_eq!((&result["on"], &result["images"]), (&"test".into(), &57.into()), "{summary}");
    assert!(result["mean_average_precision"].as_f64().unwrap() > 0.95, "{summary}");
    assert!(result["chance"].as_f64().unwrap() < 0.5, "{summary}");
    let evaluated = lines(&place.path("1/evaluations.jsonl"));
    assert!(!evaluated.is_empty());
    assert!(evaluated.iter().all(|line| line["mean_average_precision"].is_f64() && line["top1"].is_null()));
    let classes = fs::read_to_string(place.path("1/classes.csv")).unwrap();
    assert!(classes.starts_with("class,images,precision,recall,f1,average_precision,auroc\nbright,"), "{classes}");
    assert!(classes.contains("\n\"red, very\","), "{classes}");
    assert!(!place.path("1/confusion.csv").exists());

    let csv = place.path("tags.csv");
    let told = autodidact(&["predict", text(&place.path("1")), text(&list), "--split", "test", "-o", text(&csv)]);
    let told = { told }.output().unwrap();
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    let written = fs::read_to_string(&csv).unwrap();
    assert_eq!(written.lines().count(), 61, "{written}");
    // three images have no label, so there is no column of labels
    assert_eq!(written.lines().next(), Some("path,classes,p:bright,\"p:red, very\",error"));
    let both = written.lines().filter(|line| line.contains(",\"bright|red, very\",")).count();
    assert!((8..=12).contains(&both), "{both} of 10 images are both\n{written}");
    // another program is told that they are several
    let exported = place.path("onnx");
    must(&["export", text(&place.path("1")), "--format", "onnx", "-o", text(&exported)]);
    let card = fs::read_to_string(exported.join("README.md")).unwrap();
    assert!(card.contains("the sigmoid of its score") && card.contains("| mean average precision |"), "{card}");
    let all = place.path("all.jsonl");
    let said = refused(&["predict", text(&place.path("1")), text(&list), "--top", "2", "-o", "x.csv"], 2);
    assert!(said.contains("tells several"), "{said}");
    must(&["predict", text(&place.path("1")), text(&list), "--threshold", "0", "-o", text(&all)]);
    assert!(lines(&all).iter().all(|line| line["classes"].as_array().unwrap().len() == 2));
}

#[test]
fn labels_of_another_kind_are_refused_in_words() {
    let place = Place::new(TAGS);
    let list = tagged(&place.path("data"));
    let source = format!("data.path={}", text(&list));
    let recipe = place.path("recipe.toml");
    let refuse = |more: &[&str]| {
        refused(&[&["finetune", text(&recipe), "--run-dir", text(&place.path("no")), &source], more].concat(), 2)
    };
    let said = refuse(&["method.classify.multi_label=false"]);
    assert!(said.contains("has images of several labels or of none"), "{said}");
    let said = refuse(&["data.validation=0.2", "early_stopping.patience=2", "early_stopping.metric=top1"]);
    assert!(said.contains("`early_stopping.metric` is \"top1\", but an image may have several labels"), "{said}");
    assert!(!place.path("no").exists());
    // where each image has one label, the test list has several
    fs::write(place.path("data/train.txt"), "images/000.png\tbright\nimages/001.png\tred, very\n".repeat(40)).unwrap();
    let output =
        autodidact(&["finetune", text(&recipe), "--run-dir", text(&place.path("no")), &source]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("the test images have several labels or none"), "{said}");
    // a list without a test list beside it is the test images that it names
    let list = tagged(&place.path("data"));
    let (source, test) = (format!("data.path={}", text(&list)), place.path("data/own.txt"));
    fs::rename(place.path("data/test.txt"), &test).unwrap();
    let test = format!("eval.test.path={}", text(&test));
    place.run("own", &[&source, "eval.test.source=list", &test, "schedule.steps=5"]);
    let result = &json(&place.path("own/summary.json"))["classification"];
    assert_eq!((&result["on"], &result["images"]), (&"test".into(), &57.into()));
    // a share of the labelled images, and early stopping by the mean average precision
    let list = tagged(&place.path("data"));
    let source = format!("data.path={}", text(&list));
    let options = ["data.validation=0.2", "early_stopping.patience=9", "schedule.steps=8", "data.label_fraction=0.5"];
    place.run("early", &[&[source.as_str()], &options[..]].concat());
    let plan = fs::read_to_string(place.path("early/plan.toml")).unwrap();
    assert!(plan.contains("metric = \"map\"") && plan.contains("multi_label = true"), "{plan}");
    assert!(plan.contains("# images         69"), "half of 171 without a fifth of it: {plan}");
}

#[test]
fn predictions_are_those_of_the_run_whatever_the_threads_and_kills() {
    let recipe = TAGS
        .replace("source = \"list\"\npath = \"train.txt\"", "source = \"sample\"\nlimit = 200")
        .replace("steps = 40", "steps = 6");
    let place = Place::new(&recipe);
    place.run("run", &["eval.every_epochs=1"]);
    let run = place.path("run");
    let top1 = json(&place.path("run/summary.json"))["classification"]["top1"].as_f64().unwrap();
    let (one, three, again) = (place.path("one.jsonl"), place.path("three.jsonl"), place.path("again.jsonl"));
    let predict = |output: &Path, more: &[&str]| {
        must(&[&["predict", text(&run), "sample", "--split", "test", "-o", text(output)], more].concat());
    };
    predict(&one, &["--threads", "1", "--top", "3"]);
    predict(&three, &["--threads", "3", "--top", "3"]);
    assert_eq!(fs::read(&one).unwrap(), fs::read(&three).unwrap());
    let all = lines(&one);
    assert_eq!(all.len(), 426);
    for line in &all {
        let top = line["top"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert_eq!(top[0]["class"], line["class"]);
        assert!(top[0]["probability"].as_f64().unwrap() >= top[1]["probability"].as_f64().unwrap());
    }
    // the run was measured on 200 of the test images
    let of = |index: usize| &all[index * 426 / 200];
    let right = (0..200).filter(|&index| of(index)["class"] == of(index)["label"]).count();
    assert!((right as f64 / 200.0 - top1).abs() < 1e-9, "{right} of 200, {top1}");
    // a file that is there stays
    let said = refused(&["predict", text(&run), "sample", "-o", text(&one)], 2);
    assert!(said.contains("there is a file already"), "{said}");
    // what a killed process left is gone on with
    fs::create_dir(place.path("again.jsonl.parts")).unwrap();
    predict(&again, &["--top", "3"]);
    assert_eq!(fs::read(&one).unwrap(), fs::read(&again).unwrap());
    assert!(!place.path("again.jsonl.parts").exists());
}

#[test]
fn unreadable_images_have_a_line_and_other_networks_are_refused() {
    let recipe = TAGS
        .replace("source = \"list\"\npath = \"train.txt\"", "source = \"sample\"\nlimit = 64")
        .replace("steps = 40", "steps = 1");
    let place = Place::new(&recipe);
    place.run("run", &["eval.skip=true"]);
    let run = place.path("run");
    let images = place.path("pictures");
    fs::create_dir(&images).unwrap();
    image::RgbImage::from_pixel(9, 30, image::Rgb([200, 10, 10])).save(images.join("a, \"b\".png")).unwrap();
    fs::write(images.join("broken.png"), "no image").unwrap();
    image::GrayImage::from_pixel(1, 1, image::Luma([9])).save(images.join("z.png")).unwrap();
    let csv = place.path("out.csv");
    must(&["predict", text(&run), text(&images), "-o", text(&csv), "--top", "2"]);
    let written = fs::read_to_string(&csv).unwrap();
    let rows: Vec<&str> = written.lines().collect();
    assert_eq!(rows[0], "path,class,probability,class_2,probability_2,error");
    assert_eq!(rows.len(), 4, "{written}");
    assert!(rows[1].starts_with('"') && rows[1].contains("a, \"\"b\"\".png\",") && rows[1].ends_with(','), "{written}");
    assert!(rows[2].contains("broken.png,,,,,\"not an image"), "{written}");
    assert!(rows[3].matches(',').count() == 5, "{written}");

    // mended, the image is read by the same command, though its file is as long as it was
    let blank = place.path("mended");
    fs::create_dir(&blank).unwrap();
    let good = fs::read(images.join("z.png")).unwrap();
    fs::write(blank.join("a.png"), vec![0; good.len()]).unwrap();
    let output = place.path("mended.csv");
    let again = ["predict", text(&run), text(&blank), "-o", text(&output)];
    assert!(!autodidact(&again).output().unwrap().status.success());
    fs::write(blank.join("a.png"), good).unwrap();
    must(&again);
    // a folder of somebody else is not replaced
    let theirs = place.path("theirs");
    must(&["export", text(&run), "--format", "safetensors", "-o", text(&theirs)]);
    must(&["export", text(&run), "--format", "onnx", "-o", text(&theirs), "--force"]);
    fs::write(theirs.join("tokenizer.json"), "mine").unwrap();
    let said = refused(&["export", text(&run), "--format", "onnx", "-o", text(&theirs), "--force"], 2);
    assert!(said.contains("replaces exported folders") && theirs.join("tokenizer.json").exists(), "{said}");

    fs::remove_file(images.join("z.png")).unwrap();
    fs::remove_file(images.join("a, \"b\".png")).unwrap();
    let none =
        autodidact(&["predict", text(&run), text(&images), "-o", text(&place.path("none.csv"))]).output().unwrap();
    let said = String::from_utf8_lossy(&none.stderr);
    assert!(!none.status.success() && said.contains("none of 1 image can be read"), "{said}");
    assert!(!place.path("none.csv").exists());
    let refuse = |words: &[&str]| refused(&[&["predict"], words].concat(), 2);
    let output = place.path("x.csv");
    assert!(refuse(&[text(&run), "sample", "-o", "x.txt"]).contains("written to .csv or .jsonl"));
    assert!(refuse(&[text(&run), "sample", "-o", text(&output), "--threshold", "0.5"]).contains("tells one"));
    assert!(refuse(&[text(&run), "sample", "-o", text(&output), "--threshold", "1.5"]).contains("from 0 to 1"));
    assert!(refuse(&[text(&place.path("gone")), "sample", "-o", text(&output)]).contains("nothing of that name"));
    let other = Place::new(SIMCLR);
    other.run("run", &["schedule.steps=1", "schedule.warmup_epochs=0", "eval.skip=true"]);
    let said = refuse(&[text(&other.path("run")), "sample", "-o", text(&output)]);
    assert!(said.contains("`simclr` knows no classes") && said.contains("autodidact finetune"), "{said}");
}
