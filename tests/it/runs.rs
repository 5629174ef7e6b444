//! Whole runs of the program: the promise that ranks, threads, memory and restarts are not inputs, compared bit by bit.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Small enough for seconds, large enough for every mechanism: 8 micro-batches, an epoch boundary, batch norm or masks, an average.
pub(crate) const SIMCLR: &str = r#"
[data]
source = "sample"
limit = 80
[[views]]
count = 2
size = 16
crop = {}
flip = 0.5
jitter = { brightness = 0.4, contrast = 0.4, saturation = 0.4, hue = 0.1 }
grayscale = 0.2
blur = { prob = 0.5 }
[backbone.resnet]
depth = 18
width = 0.125
stem = "cifar"
[method.simclr]
hidden = 32
out = 16
[batch]
global = 32
micro = 4
[optimizer.lars]
[schedule]
steps = 6
lr = 0.5
warmup_epochs = 1
[ema]
momentum = 0.9
[checkpoint]
every_steps = 2
[eval]
skip = true
"#;

pub(crate) const MAE: &str = r#"
[data]
source = "sample"
limit = 80
[[views]]
size = 16
crop = { scale = [0.2, 1.0] }
flip = 0.5
[backbone.vit]
patch = 4
dim = 24
depth = 3
heads = 2
drop_path = 0.2
init = "xavier"
[method.mae]
decoder_dim = 16
decoder_depth = 1
decoder_heads = 2
[batch]
global = 32
micro = 4
[optimizer.adamw]
[schedule]
steps = 6
lr = 0.01
clip_norm = 1.0
[checkpoint]
every_steps = 2
[eval]
skip = true
"#;

/// A folder for one test, with its recipe.
pub(crate) struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new(recipe: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command that trains the recipe.
    pub(crate) fn task(&self) -> &'static str {
        let recipe = fs::read(self.path("recipe.toml")).unwrap_or_default();
        if String::from_utf8_lossy(&recipe).contains("[method.classify]") { "finetune" } else { "pretrain" }
    }

    pub(crate) fn command(&self, run: &str, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_autodidact"));
        command.arg(self.task()).arg(self.path("recipe.toml")).arg("--run-dir").arg(self.path(run)).args(options);
        command.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
        command
    }

    /// Runs to the end.
    pub(crate) fn output(&self, run: &str, options: &[&str]) -> Output {
        self.command(run, options).output().unwrap()
    }

    pub(crate) fn run(&self, run: &str, options: &[&str]) -> Result {
        let output = self.output(run, options);
        assert!(output.status.success(), "{run} {options:?}: {}", String::from_utf8_lossy(&output.stderr));
        Result::of(&self.path(run))
    }

    fn spawn(&self, run: &str, options: &[&str]) -> Child {
        self.command(run, options).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Waits until a run has logged `lines` steps.
    fn wait_for_steps(&self, run: &str, lines: usize) {
        let start = Instant::now();
        loop {
            let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap_or_default();
            if text.lines().count() >= lines {
                return;
            }
            assert!(start.elapsed() < Duration::from_mins(2), "no step {lines} within two minutes");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What a run came to, without clocks.
#[derive(Debug, PartialEq)]
pub(crate) struct Result {
    /// Every step's record, wall-clock fields left out.
    steps: Vec<Value>,
    /// Every tensor file of the last checkpoint.
    files: BTreeMap<String, Vec<u8>>,
}

impl Result {
    pub(crate) fn of(run: &Path) -> Self {
        let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let steps = text.lines().map(|line| {
            let mut step: Value = serde_json::from_str(line).unwrap();
            step.as_object_mut().unwrap().retain(|key, _| !["time_s", "images_per_s", "pace"].contains(&key.as_str()));
            step
        });
        let latest = fs::read_to_string(run.join("checkpoints/latest")).unwrap();
        let files =
            fs::read_dir(run.join("checkpoints").join(latest.trim())).unwrap().map(|entry| entry.unwrap().path());
        let tensors = files.filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
        let read = |path: PathBuf| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap());
        Self { steps: steps.collect(), files: tensors.map(read).collect() }
    }

    /// The loss of each step.
    pub(crate) fn losses(&self) -> impl Iterator<Item = f64> {
        self.steps.iter().map(|step| step["loss"].as_f64().unwrap())
    }

    /// Tells whether losses and files are others.
    pub(crate) fn differs(&self, other: &Self) -> bool {
        self.steps != other.steps && self.files != other.files
    }

    pub(crate) fn assert_same(&self, other: &Self, what: &str) {
        assert_eq!(self.steps, other.steps, "{what}: losses");
        assert!(!self.files.is_empty());
        assert!(self.files.keys().eq(other.files.keys()), "{what}: files");
        for (name, bytes) in &self.files {
            assert!(bytes == &other.files[name], "{what}: {name} differs");
        }
    }
}

fn both(test: impl Fn(&str, &Place)) {
    for (name, recipe) in [("simclr", SIMCLR), ("mae", MAE)] {
        test(name, &Place::new(recipe));
    }
}

#[test]
fn bitwise_any_number_of_ranks() {
    both(|name, place| {
        let one = place.run("1", &["--ranks", "1"]);
        assert_eq!(one.steps.len(), 6);
        for ranks in ["2", "3", "4", "8"] {
            place.run(ranks, &["--ranks", ranks]).assert_same(&one, &format!("{name}, {ranks} ranks"));
        }
    });
}

#[test]
fn bitwise_any_number_of_loader_threads_and_both_memories() {
    both(|name, place| {
        let reference = place.run("reference", &["--ranks", "1", "data.workers=1", "data.prefetch=1"]);
        place.run("threads", &["--ranks", "1", "data.workers=4", "data.prefetch=7"]).assert_same(&reference, name);
        place.run("cache", &["--ranks", "2", "batch.memory=cache"]).assert_same(&reference, name);
    });
}

#[test]
fn bitwise_whatever_activations_are_kept() {
    both(|name, place| {
        for compute in ["fp32", "bf16"] {
            let compute = format!("precision.compute={compute}");
            let kept = place.run("kept", &["--ranks", "1", &compute, "--resume", "never"]);
            for choice in ["block", "every:2", "every:100"] {
                let option = format!("batch.activation_checkpointing={choice}");
                let again = place.run(choice, &["--ranks", "2", &option, &compute, "--resume", "never"]);
                again.assert_same(&kept, &format!("{name}, {compute}, {choice}"));
            }
        }
        let output = place.output("wrong", &["batch.activation_checkpointing=every:0"]);
        assert!(String::from_utf8_lossy(&output.stderr).contains("`none`, `block` and `every:K`"));
    });
}

#[test]
fn bitwise_with_other_operations_and_each_has_its_own_bits() {
    both(|name, place| {
        let fast = place.run("fast", &[]);
        let plain = place.run("plain", &["--ranks", "1", "ops.plain=true"]);
        place.run("plain-2", &["--ranks", "2", "ops.plain=true", "batch.memory=cache"]).assert_same(&plain, name);
        assert_ne!(plain.steps, fast.steps, "{name}: burn's operations round differently");
        let (first, other) = (&fast.steps[0]["loss"], &plain.steps[0]["loss"]);
        let difference = first.as_f64().unwrap() - other.as_f64().unwrap();
        assert!(difference.abs() < 1e-4, "{name}: {first} and {other}");
        let exact = place.run("exact", &["ops.exact=true"]);
        // the vision transformer has no 3x3 convolution
        assert_eq!(exact.steps == fast.steps, name == "mae", "{name}");
    });
}

#[test]
fn different_seeds_differ() {
    both(|name, place| {
        let (a, b) = (place.run("a", &["seed=1"]), place.run("b", &["seed=2"]));
        assert_ne!(a.steps, b.steps, "{name}");
        assert_ne!(a.files, b.files, "{name}");
    });
}

#[test]
fn bitwise_with_rules_for_parameters_when_resumed_while_some_are_frozen() {
    let rules = "\n[[parameters]]\nmatch = \"backbone.*\"\nfreeze_steps = 3\nlr_scale = 0.5\n\
                 [[parameters]]\nmax_rank = 1\nfixed_lr = true\n";
    let lars = "[optimizer.lars]\nform = \"separate\"\neps = 1e-8\nweight_decay = 0.01\nnesterov = true";
    let recipes = [
        SIMCLR.replace("[optimizer.lars]", lars),
        MAE.replace("[optimizer.adamw]", "[optimizer.lamb]"),
        MAE.replace("[optimizer.adamw]", "[optimizer.lion]").replace("clip_norm", "clip_each_norm"),
    ];
    for recipe in recipes {
        let place = Place::new(&(recipe + rules));
        let options = ["schedule.weight_decay_end=0.2", "schedule.decay=linear", "schedule.warmup_lr=0.001"];
        let whole = place.run("run", &[&options[..], &["--ranks", "3"]].concat());
        let checkpoints = place.path("run/checkpoints");
        let weights = |step: &str| fs::read(checkpoints.join(step).join("model.safetensors")).unwrap();
        assert_ne!(weights("step-00000002"), weights("step-00000004"));
        for step in ["step-00000004", "step-00000006"] {
            fs::remove_dir_all(checkpoints.join(step)).unwrap();
        }
        place.run("run", &[&options[..], &["--ranks", "2"]].concat()).assert_same(&whole, "resumed");
    }
}

/// Method tables whose queues of 48 or 64 rows come round after 2 batches of 32, and again.
const QUEUES: [&str; 3] = [
    "[method.moco2]\nhidden = 32\nout = 16\nqueue = 64\nbatch_norm_groups = 2\n",
    "[method.nnclr]\nhidden = 32\nout = 16\npredictor_hidden = 32\nqueue = 64\n",
    "[method.swav]\nhidden = 32\nout = 16\nprototypes = 24\nfreeze_steps = 3\nqueue = 48\nqueue_start_epoch = 1\n",
];

#[test]
fn bitwise_with_queues_that_come_round() {
    let simclr = "[method.simclr]\nhidden = 32\nout = 16\n";
    for method in QUEUES {
        let place = Place::new(&SIMCLR.replace(simclr, method).replace("steps = 6", "steps = 8"));
        let whole = place.run("whole", &["--ranks", "1"]);
        assert_eq!(whole.steps.len(), 8);
        let name = method.lines().next().unwrap();
        let run = |options: &[&str]| place.run("run", options);
        run(&["--ranks", "3"]).assert_same(&whole, name);
        // goes on in the middle of a round, with fewer ranks
        let checkpoints = place.path("run/checkpoints");
        for step in ["step-00000006", "step-00000008"] {
            fs::remove_dir_all(checkpoints.join(step)).unwrap();
        }
        run(&["--ranks", "2"]).assert_same(&whole, &format!("{name}, resumed"));
    }
}

fn refused_with(place: &Place, options: &[&str], words: &str) {
    let output = place.output("refused", options);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains(words) && text.contains("recipe.toml") | text.contains("init="), "{text}");
    assert!(!place.path("refused").exists());
}

#[test]
fn a_run_starts_from_the_weights_of_another() {
    let place = Place::new(SIMCLR);
    place.run("first", &[]);
    let first = place.path("first");
    let weights = |run: &str, step: &str| -> BTreeMap<String, Vec<u8>> {
        let file = fs::read(place.path(run).join("checkpoints").join(step).join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&file).unwrap();
        file.iter().map(|(name, view)| (name.to_owned(), view.data().to_vec())).collect()
    };
    // what `eval` would evaluate: the moving average, where there is one
    let ema = fs::read(first.join("checkpoints/step-00000006/ema.safetensors")).unwrap();
    let ema = safetensors::SafeTensors::deserialize(&ema).unwrap();

    // another method, whose backbone stands still: all of its weights, and the teacher's, are the first run's
    let byol = SIMCLR.replace("[method.simclr]", "[method.byol]");
    let frozen = "\n[[parameters]]\nmatch = \"backbone.*\"\nfreeze_steps = 100\n";
    fs::write(place.path("recipe.toml"), format!("init = \"{}\"\n{byol}{frozen}", first.display())).unwrap();
    let whole = place.run("second", &["--ranks", "2"]);
    let second = weights("second", "step-00000006");
    let trained = ["weight", "bias"];
    let mut compared = 0;
    for (name, view) in ema.iter() {
        if name.starts_with("backbone.") && trained.iter().any(|end| name.ends_with(end)) {
            assert!(second[name] == view.data(), "{name}");
            assert!(second[&format!("teacher.{name}")] == view.data(), "teacher.{name}");
            compared += 1;
        }
    }
    assert!(compared > 50, "{compared}");

    // the same weights under another path are the same run; a teacher's are taken where the method evaluates it
    let copy = place.path("elsewhere.safetensors");
    fs::copy(first.join("checkpoints/step-00000006/ema.safetensors"), &copy).unwrap();
    let init = format!("init={}", copy.display());
    place.run("copy", &["--ranks", "1", &init]).assert_same(&whole, "the weights alone");

    // the run has its own copy: what it started from may go on training, or go
    fs::rename(&first, place.path("gone")).unwrap();
    fs::remove_dir_all(place.path("second/checkpoints/step-00000006")).unwrap();
    place.run("second", &["--ranks", "1"]).assert_same(&whole, "resumed");
    let plan = place.path("second/plan.toml");
    let again = Place::new(&fs::read_to_string(&plan).unwrap());
    again.run("again", &["--ranks", "1"]).assert_same(&whole, "the plan, again");
    let kept = place.path("second/init.safetensors");
    let bytes = fs::read(&kept).unwrap();
    fs::write(&kept, [&bytes[..bytes.len() - 1], &[bytes[bytes.len() - 1] ^ 1]].concat()).unwrap();
    let output = place.output("second", &[]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("not the weights that this run started from"), "{text}");
    fs::write(&kept, bytes).unwrap();
    fs::rename(place.path("gone"), &first).unwrap();

    let refused = |init: &str, words: &str| refused_with(&place, &[&format!("init={init}")], words);
    refused("nowhere", "there is nothing of that name");
    fs::write(place.path("bad.safetensors"), "no tensors").unwrap();
    refused(&place.path("bad.safetensors").display().to_string(), "neither a safetensors file nor one that");
    // DINO evaluates its teacher, so that is what another run starts from
    let dino = "[method.dino]\nprototypes = 32\nhidden = 32\nbottleneck = 8\nfreeze_steps = 0\n";
    let dino = SIMCLR.replace("[method.simclr]\nhidden = 32\nout = 16\n", dino).replace("[ema]\nmomentum = 0.9\n", "");
    let third = Place::new(&dino);
    third.run("dino", &[]);
    place.run("of-dino", &["--ranks", "1", &format!("init={}", third.path("dino").display())]);
    let dino = fs::read(third.path("dino/checkpoints/step-00000006/model.safetensors")).unwrap();
    let dino = safetensors::SafeTensors::deserialize(&dino).unwrap();
    let of_dino = weights("of-dino", "step-00000006");
    let data = |name: &str| dino.tensor(name).unwrap().data().to_vec();
    assert_ne!(data("teacher.backbone.conv1.weight"), data("backbone.conv1.weight"));
    assert_eq!(of_dino["backbone.conv1.weight"], data("teacher.backbone.conv1.weight"));

    // started from other weights: not the run in this folder
    let output = place.output("second", &["init=random"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("weights of `init` was") && text.contains("absent"), "{text}");
    let narrow = "backbone.resnet.width=0.0625";
    refused_with(&place, &[narrow], "has another backbone: `width` is 0.125 there and 0.0625 here");
    refused_with(&place, &[narrow, &init], "`bn1.bias` is [8] there and [4] in the recipe");
    refused_with(&place, &["init=/dev/null"], "neither a file nor a folder");
    refused_with(&place, &[&format!("init={}", place.path("").display())], "neither a run folder nor a checkpoint");
}

/// Writes tensors of single precision under other names.
fn write_renamed(path: &std::path::Path, from: &[u8], name: impl Fn(&str) -> Option<String>) {
    let file = safetensors::SafeTensors::deserialize(from).unwrap();
    let renamed = file.iter().filter_map(|(old, view)| Some((name(old)?, view)));
    fs::write(path, safetensors::serialize(renamed, None).unwrap()).unwrap();
}

#[test]
fn a_run_starts_from_the_weights_of_another_program() {
    let place = Place::new(SIMCLR);
    place.run("first", &["--ranks", "1"]);
    let file = place.path("first/checkpoints/step-00000006/ema.safetensors");
    let own = fs::read(&file).unwrap();
    let whole = place.run("own", &["--ranks", "1", &format!("init={}", file.display())]);

    // the same weights as MoCo calls them, beside its head and its second network: the same run
    let moco = place.path("moco.safetensors");
    write_renamed(&moco, &own, |name| match name.strip_prefix("backbone.") {
        Some(rest) => Some(format!("state_dict.module.encoder_q.{rest}")),
        None => Some(format!("state_dict.module.encoder_q.fc.{name}")),
    });
    let init = format!("init={}", moco.display());
    place.run("moco", &["--ranks", "2", &init]).assert_same(&whole, "other names");
    let output = place.output("moco", &["--ranks", "1", &init, "--dry-run"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("the peak rate is") && output.status.success(), "{text}");

    // one tensor of a hundred missing: drawn, and said; half of them: refused unless asked for
    let most = place.path("most.safetensors");
    write_renamed(&most, &own, |name| {
        Some(name.strip_prefix("backbone.")?.to_owned()).filter(|name| name != "bn1.bias")
    });
    let output = place.output("most", &["--ranks", "1", &format!("init={}", most.display())]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && text.contains("are drawn: `bn1.bias`"), "{text}");
    let half = place.path("half.safetensors");
    write_renamed(&half, &own, |name| {
        Some(name.strip_prefix("backbone.")?.to_owned()).filter(|name| !name.contains("bn2"))
    });
    let init = format!("init={}", half.display());
    refused_with(&place, &[&init], "tensors of the backbone are there)");
    let options = [init.as_str(), "init_allow_partial=true"];
    let partial = place.run("partial", &[&options[..], &["--ranks", "2"]].concat());
    fs::remove_dir_all(place.path("partial/checkpoints/step-00000006")).unwrap();
    place.run("partial", &[&options[..], &["--ranks", "1"]].concat()).assert_same(&partial, "resumed");

    // what is of another network is not half taken
    let more = place.path("more.safetensors");
    write_renamed(&more, &own, |name| Some(name.strip_prefix("backbone.")?.replace("layer4.1", "layer4.2")));
    refused_with(&place, &[&format!("init={}", more.display())], "the recipe's backbone has not");
}

/// Long enough that a signal arrives before the end.
const LONG: [&str; 2] = ["schedule.steps=40", "checkpoint.every_steps=7"];

#[test]
fn bitwise_after_sigkill_and_resume_on_another_number_of_ranks() {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos();
    let random = 1 + clock as usize % 25;
    both(|name, place| {
        let whole = place.run("whole", &[&LONG[..], &["--ranks", "2"]].concat());
        // right after the first step, between two checkpoints, anywhere
        for (kill_after, first, second) in [(1, "1", "2"), (10, "2", "3"), (random, "3", "1")] {
            let run = format!("killed-{kill_after}-{first}");
            let mut child = place.spawn(&run, &[&LONG[..], &["--ranks", first]].concat());
            place.wait_for_steps(&run, kill_after);
            child.kill().unwrap();
            assert!(!child.wait().unwrap().success(), "{name}: it ended before it was killed");
            let resumed = place.run(&run, &[&LONG[..], &["--ranks", second]].concat());
            resumed.assert_same(&whole, &format!("{name}, killed after {kill_after}"));
        }
    });
}

#[cfg(unix)]
#[test]
fn bitwise_after_an_interruption_which_writes_a_checkpoint() {
    both(|name, place| {
        let options = ["schedule.steps=40", "checkpoint.every_steps=0"];
        let whole = place.run("whole", &options);
        for signal in ["-INT", "-TERM"] {
            let run = format!("interrupted{signal}");
            let mut child = place.spawn(&run, &options);
            place.wait_for_steps(&run, 2);
            assert!(Command::new("kill").arg(signal).arg(child.id().to_string()).status().unwrap().success());
            assert_eq!(child.wait().unwrap().code(), Some(0), "{name}: a clean stop");
            let saved = autodidact::checkpoint::list(&place.path(&run).join("checkpoints"));
            assert!(saved.len() == 1 && saved[0].0 < 40, "{name}: {saved:?}");
            place.run(&run, &options).assert_same(&whole, name);
        }
    });
}

#[test]
fn starting_over_never_touches_a_run_that_is_under_way() {
    let place = Place::new(SIMCLR);
    let mut child = place.spawn("run", &["schedule.steps=200"]);
    place.wait_for_steps("run", 1);
    let output = place.output("run", &["schedule.steps=200", "--resume", "never"]);
    child.kill().unwrap();
    child.wait().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("another process is training in this folder"), "{said}");
    assert!(!place.path("run.1").exists());
}

#[test]
fn a_future_that_was_given_up_goes() {
    let place = Place::new(MAE);
    place.run("run", &["checkpoint.keep=3"]);
    for step in ["step-00000004", "step-00000006"] {
        fs::write(place.path("run/checkpoints").join(step).join("model.safetensors"), b"").unwrap();
    }
    let output = place.output("run", &["checkpoint.keep=1", "checkpoint.every_steps=3"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (newest, damaged) = autodidact::checkpoint::newest(&place.path("run/checkpoints"));
    assert_eq!(newest.unwrap().0.step, 6);
    assert!(damaged.is_empty());
}

#[test]
fn a_run_without_its_plan_is_not_written_over() {
    let place = Place::new(MAE);
    place.run("run", &[]);
    fs::remove_file(place.path("run/plan.toml")).unwrap();
    let before = fs::read(place.path("run/metrics.jsonl")).unwrap();
    let output = place.output("run", &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("holds a run without its plan.toml"));
    assert_eq!(fs::read(place.path("run/metrics.jsonl")).unwrap(), before);
}

#[test]
fn the_plan_runs_to_the_same_bits() {
    both(|name, place| {
        let first = place.run("first", &["seed=3"]);
        fs::copy(place.path("first/plan.toml"), place.path("recipe.toml")).unwrap();
        place.run("again", &[]).assert_same(&first, name);
    });
}

#[test]
fn a_damaged_newest_checkpoint_falls_back() {
    let place = Place::new(SIMCLR);
    let whole = place.run("run", &[]);
    for damage in ["flip", "truncate", "remove"] {
        let newest = place.path("run/checkpoints/step-00000006");
        let file = newest.join("model.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        match damage {
            "flip" => {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                fs::write(&file, bytes).unwrap();
            }
            "truncate" => fs::write(&file, &bytes[..bytes.len() / 3]).unwrap(),
            _ => fs::remove_file(newest.join("manifest.json")).unwrap(),
        }
        let output = place.output("run", &[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("warning[W005]") && said.contains("going back to step 4"), "{damage}: {said}");
        Result::of(&place.path("run")).assert_same(&whole, damage);
    }
}

#[test]
fn every_checkpoint_damaged_is_an_error_and_never_starts_over() {
    let place = Place::new(MAE);
    place.run("run", &[]);
    for (_, path) in autodidact::checkpoint::list(&place.path("run/checkpoints")) {
        fs::write(path.join("optimizer.safetensors"), b"").unwrap();
    }
    let before = fs::read(place.path("run/metrics.jsonl")).unwrap();
    let output = place.output("run", &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("every checkpoint of this run is damaged") && said.contains("--resume never"), "{said}");
    assert_eq!(fs::read(place.path("run/metrics.jsonl")).unwrap(), before, "nothing was lost");
    let output = place.output("run", &["--resume", "never"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read(place.path("run.1/metrics.jsonl")).unwrap(), before, "the old run is beside the new one");
}

#[test]
fn a_finished_run_is_not_trained_again_and_old_checkpoints_go() {
    let place = Place::new(MAE);
    let first = place.run("run", &["checkpoint.keep=2"]);
    let output = place.output("run", &["checkpoint.keep=2"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("is complete"));
    Result::of(&place.path("run")).assert_same(&first, "second start");
    let steps: Vec<u64> = autodidact::checkpoint::list(&place.path("run/checkpoints")).iter().map(|c| c.0).collect();
    assert_eq!(steps, [4, 6]);
    // a kill between the last rename and the rewrite of `latest`
    fs::write(place.path("run/checkpoints/latest"), "step-00000004").unwrap();
    fs::create_dir(place.path("run/checkpoints/.writing-x")).unwrap();
    place.run("run", &["checkpoint.keep=2"]).assert_same(&first, "third start");
    assert!(!place.path("run/checkpoints/.writing-x").exists());
}

#[test]
fn resume_from_a_named_checkpoint() {
    let place = Place::new(SIMCLR);
    let whole = place.run("whole", &[]);
    let from = place.path("whole/checkpoints/step-00000002").display().to_string();
    let output = place.output("branch", &["--resume", &from]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(Result::of(&place.path("branch")).files, whole.files);
    let output = place.output("other", &["--resume", &from, "schedule.lr=0.1"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("written by another recipe"), "{said}");
}

/// A file system in memory with the options of `mount`, or nothing where this user may not mount one.
#[cfg(target_os = "linux")]
pub(crate) fn disk(at: &Path, options: &str) -> Option<impl Drop + use<>> {
    struct Mounted(PathBuf);
    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
    fs::create_dir_all(at).unwrap();
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).stderr(Stdio::null());
    mount.status().ok().filter(std::process::ExitStatus::success).map(|_| Mounted(at.to_owned()))
}

#[cfg(target_os = "linux")]
#[test]
fn a_read_only_folder_is_one_sentence() {
    let place = Place::new(SIMCLR);
    let at = place.path("disk");
    let Some(_mounted) = disk(&at, "ro") else {
        eprintln!("skipped: this user may not mount a file system");
        return;
    };
    let output = place.output("disk/run", &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error: ") && said.contains("Read-only file system") && said.contains("hint: "), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_sentence_and_no_half_written_checkpoint() {
    let place = Place::new(SIMCLR);
    let whole = place.run("whole", &[]);
    let checkpoint: u64 = whole.files.values().map(|bytes| bytes.len() as u64).sum();
    let at = place.path("disk");
    // room for one checkpoint and the logs, not for two
    let size = format!("size={}k", checkpoint * 3 / 2 / 1024);
    let Some(_mounted) = disk(&at, &size) else {
        eprintln!("skipped: this user may not mount a file system");
        return;
    };
    let output = place.output("disk/run", &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("No space left on device") && said.contains("hint: "), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    let names: Vec<String> = fs::read_dir(at.join("run/checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert!(names.iter().all(|name| name == "latest" || name.starts_with("step-")), "{names:?}");
    for (_, path) in autodidact::checkpoint::list(&at.join("run/checkpoints")) {
        autodidact::checkpoint::verify(&path).unwrap();
    }
}

#[test]
fn two_processes_do_not_train_in_one_folder() {
    let place = Place::new(SIMCLR);
    let mut child = place.spawn("run", &["schedule.steps=200"]);
    place.wait_for_steps("run", 1);
    let output = place.output("run", &["schedule.steps=200"]);
    child.kill().unwrap();
    child.wait().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("another process is training in this folder"), "{said}");
}

#[test]
fn a_damaged_image_is_replaced_the_same_way_everywhere() {
    let place = Place::new(
        &SIMCLR.replace("source = \"sample\"\nlimit = 80", "source = \"folder\"\npath = \"PATH\"\nmax_bad = 0.1"),
    );
    let images = place.path("images");
    fs::create_dir(&images).unwrap();
    for i in 0..40u8 {
        let image = image::RgbImage::from_fn(20, 24, |x, y| image::Rgb([i.wrapping_mul(7), x as u8 * 9, y as u8 * 5]));
        image.save(images.join(format!("{i:02}.png"))).unwrap();
    }
    fs::write(images.join("13.png"), b"not an image").unwrap();
    let text = fs::read_to_string(place.path("recipe.toml")).unwrap();
    fs::write(place.path("recipe.toml"), text.replace("PATH", &images.display().to_string())).unwrap();
    let one = place.run("one", &["--ranks", "1", "data.workers=1"]);
    place.run("four", &["--ranks", "4", "data.workers=4"]).assert_same(&one, "substitutes");
    let list = fs::read_to_string(place.path("four/bad-images.jsonl")).unwrap();
    assert_eq!(list.lines().count(), 1);
    assert!(list.contains("13.png"), "{list}");
    let output = place.output("fail", &["data.on_error=fail"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("13.png"), "{said}");
    let output = place.output("limit", &["data.max_bad=0.01"]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
}
