//! Runs of several processes under `mpirun`: the same bits as one process, and an end for all when one fails. Needs the feature `mpi` and Open MPI's `mpirun`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::finetune::RESNET;
use crate::runs::{MAE, Place, Result, SIMCLR, disk};

const PROGRAM: &str = env!("CARGO_BIN_EXE_autodidact");

fn mpirun() -> Command {
    let mut command = Command::new("mpirun");
    // as root and on two cores, as in a container; a process of a test must not be bound to a core of another
    command.args(["--oversubscribe", "--bind-to", "none", "--tag-output"]).stdin(Stdio::null());
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

/// Adds `processes` of one run to a command.
fn add(command: &mut Command, place: &Place, run: &str, processes: usize, options: &[&str]) {
    command.args(["-n", &processes.to_string(), PROGRAM, place.task()]).arg(place.path("recipe.toml"));
    command.arg("--run-dir").arg(place.path(run)).args(options);
}

fn launch(place: &Place, run: &str, processes: usize, options: &[&str]) -> Output {
    let mut command = mpirun();
    add(&mut command, place, run, processes, options);
    command.output().expect("mpirun is installed")
}

fn bits(place: &Place, run: &str, processes: usize, options: &[&str]) -> Result {
    let output = launch(place, run, processes, options);
    assert!(output.status.success(), "{processes} processes {options:?}: {}", String::from_utf8_lossy(&output.stderr));
    Result::of(&place.path(run))
}

#[test]
fn bitwise_any_processes_and_threads_and_resumed_across_them() {
    let _alone = alone();
    for (name, recipe) in [("simclr", SIMCLR), ("mae", MAE)] {
        let place = Place::new(recipe);
        let whole = place.run("whole", &["--ranks", "1"]);
        for (run, processes, threads) in [("1", 1, "1"), ("2", 2, "1"), ("4", 4, "1"), ("2x2", 2, "2"), ("3", 3, "1")] {
            bits(&place, run, processes, &["--ranks", threads])
                .assert_same(&whole, &format!("{name}, {run} processes"));
        }
        let forget = |run: &str, steps: &[u64]| {
            let folder = place.path(run).join("checkpoints");
            for step in steps {
                fs::remove_dir_all(folder.join(format!("step-{step:08}"))).unwrap();
            }
        };
        // from 2 x 2 to 3 processes to 1, and from 1 to 4 to 2
        forget("2x2", &[4, 6]);
        let again = bits(&place, "2x2", 3, &["--ranks", "1"]);
        again.assert_same(&whole, &format!("{name}, resumed by 3 processes"));
        forget("2x2", &[6]);
        place.run("2x2", &["--ranks", "2"]).assert_same(&whole, &format!("{name}, resumed by one process"));
        for (processes, lost) in [(4, &[4, 6][..]), (2, &[6][..])] {
            forget("whole", lost);
            let again = bits(&place, "whole", processes, &["--ranks", "1"]);
            again.assert_same(&whole, &format!("{name}, resumed by {processes} processes"));
        }
    }
}

#[test]
fn fine_tuning_and_its_early_end_are_the_same_in_any_processes() {
    let _alone = alone();
    // a rate at which nothing becomes better after the first epochs
    let recipe = RESNET.replace("steps = 6\nlr = 0.01", "steps = 60\nlr = 1e-9") + "[early_stopping]\npatience = 2\n";
    let place = Place::new(&recipe);
    let options = ["data.validation=0.2", "ema.momentum=0", "--ranks", "1"];
    let whole = place.run("whole", &options);
    let evaluated = |run: &str| fs::read_to_string(place.path(run).join("evaluations.jsonl")).unwrap();
    for processes in [2, 3] {
        let run = processes.to_string();
        bits(&place, &run, processes, &options).assert_same(&whole, &format!("{processes} processes"));
        assert_eq!(evaluated(&run), evaluated("whole"));
        let best = |run: &str| fs::read(place.path(run).join("best.safetensors")).unwrap();
        assert!(best(&run) == best("whole"));
    }
}

/// Long enough that something can happen to it.
const LONG: [&str; 4] = ["schedule.steps=4000", "checkpoint.every_steps=5", "--ranks", "1"];

/// These tests start processes on cores that others would need; one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Running {
    child: Option<Child>,
    run: PathBuf,
}

impl Drop for Running {
    /// A test that fails leaves nothing running.
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            self.ids().into_iter().for_each(|id| drop(Command::new("kill").args(["-KILL", &id.to_string()]).status()));
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Running {
    /// Starts a run and waits until it has done some steps.
    fn start(mut command: Command, run: &Path, steps: usize) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun is installed");
        let mut running = Self { child: Some(child), run: run.to_owned() };
        let started = Instant::now();
        while fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count() < steps {
            let ended = running.child.as_mut().and_then(|child| child.try_wait().unwrap());
            assert!(ended.is_none(), "it ended: {}", running.end().0);
            assert!(started.elapsed() < Duration::from_mins(2), "no step {steps} within two minutes");
            std::thread::sleep(Duration::from_millis(20));
        }
        running
    }

    /// Process ids of the program, first process first (they are started in order).
    fn ids(&self) -> Vec<u32> {
        let pattern = format!("^{PROGRAM} pretrain .*--run-dir {}", self.run.display());
        let listing = Command::new("pgrep").args(["-f", &pattern]).output().expect("pgrep is installed (procps)");
        String::from_utf8(listing.stdout).unwrap().lines().map(|id| id.parse().unwrap()).collect()
    }

    fn signal(&self, process: usize, signal: &str) {
        let ids = self.ids();
        assert_eq!(ids.len(), 2, "{ids:?}");
        assert!(Command::new("kill").args([signal, &ids[process].to_string()]).status().unwrap().success());
    }

    /// Waits for the end, a minute at most; what was said, after how long, and whether it was a good one.
    fn end(mut self) -> (String, Duration, bool) {
        let started = Instant::now();
        let child = self.child.as_mut().unwrap();
        while child.try_wait().unwrap().is_none() {
            assert!(started.elapsed() < Duration::from_mins(1), "it does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = self.child.take().unwrap().wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        (said, started.elapsed(), output.status.success())
    }
}

#[test]
fn a_killed_process_ends_all_and_the_run_goes_on_from_its_checkpoint() {
    let _alone = alone();
    let place = Place::new(SIMCLR);
    let run = place.path("run");
    let mut command = mpirun();
    add(&mut command, &place, "run", 2, &LONG);
    let running = Running::start(command, &run, 7);
    running.signal(1, "-KILL");
    let (said, after, success) = running.end();
    assert!(!success && after < Duration::from_secs(10), "{after:?}: {said}");
    let (newest, damaged) = autodidact::checkpoint::newest(&run.join("checkpoints"));
    assert!(damaged.is_empty() && newest.unwrap().0.step >= 5);
    // asked to stop at once, it goes on with one process, and writes one more
    let before = autodidact::checkpoint::list(&run.join("checkpoints")).last().unwrap().0;
    let mut command = Command::new(PROGRAM);
    command.args(["pretrain"]).arg(place.path("recipe.toml")).arg("--run-dir").arg(&run).args(LONG);
    let logged = fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().count();
    let running = Running::start(command, &run, logged + 2);
    let id = running.child.as_ref().unwrap().id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    let (said, _, success) = running.end();
    assert!(success && said.contains("resuming"), "{said}");
    assert!(autodidact::checkpoint::list(&run.join("checkpoints")).last().unwrap().0 > before);
}

#[test]
fn a_signal_to_any_process_finishes_the_step_and_writes_a_checkpoint() {
    let _alone = alone();
    let place = Place::new(SIMCLR);
    let run = place.path("run");
    let mut command = mpirun();
    add(&mut command, &place, "run", 2, &["schedule.steps=4000", "checkpoint.every_steps=0", "--ranks", "1"]);
    let running = Running::start(command, &run, 3);
    running.signal(1, "-TERM");
    let (said, _, success) = running.end();
    assert!(success && said.contains("its checkpoint is written"), "{said}");
    assert_eq!(autodidact::checkpoint::list(&run.join("checkpoints")).len(), 1);
}

#[test]
fn a_silent_process_is_named_when_the_deadline_has_passed() {
    let _alone = alone();
    let place = Place::new(SIMCLR);
    let run = place.path("run");
    let mut command = mpirun();
    let options = ["schedule.steps=40000", "checkpoint.every_steps=0", "--ranks", "1", "--timeout", "8"];
    add(&mut command, &place, "run", 2, &options);
    let running = Running::start(command, &run, 3);
    running.signal(1, "-STOP");
    let (said, after, success) = running.end();
    assert!(!success && said.contains("process 1 was not heard of for 8 s, at operation"), "{said}");
    assert!(after < Duration::from_secs(30), "{after:?}");
}

#[test]
fn processes_of_different_runs_are_told_apart() {
    let _alone = alone();
    for (first, second, words) in [
        (&["schedule.lr=0.1"][..], &["schedule.lr=0.2"][..], "processes differ: the plan of process 0 has"),
        (&[][..], &["data.limit=64"][..], "processes differ: the plan of process 0 has"),
        (
            &["--ranks", "1"][..],
            &["--ranks", "2"][..],
            "processes differ: the number of rank threads (`--ranks`) of process 0 has `1`, of process 1 `2`",
        ),
        // one of them has an error of its own, and the other ends with it
        (&[][..], &["schedule.lr=-1"][..], "`schedule.lr` is -1"),
    ] {
        let place = Place::new(SIMCLR);
        let mut command = mpirun();
        add(&mut command, &place, "run", 1, first);
        command.arg(":");
        add(&mut command, &place, "run", 1, second);
        let started = Instant::now();
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{said}");
        assert!(started.elapsed() < Duration::from_secs(20));
        assert!(!place.path("run").exists(), "nothing was written");
    }
}

#[test]
fn a_failure_of_the_first_process_alone_reaches_the_others() {
    let _alone = alone();
    let place = Place::new(SIMCLR);
    // another program holds the run folder
    fs::create_dir_all(place.path("run")).unwrap();
    let held = fs::File::create(place.path("run/.lock")).unwrap();
    held.lock().unwrap();
    let started = Instant::now();
    let output = launch(&place, "run", 2, &["--ranks", "1"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("another process is training in this folder"), "{said}");
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_process_with_other_pixels_is_named() {
    let _alone = alone();
    let place = Place::new(&SIMCLR.replace("source = \"sample\"", "source = \"folder\""));
    for (folder, shade) in [("a", 10u8), ("b", 11)] {
        fs::create_dir(place.path(folder)).unwrap();
        for index in 0..40u8 {
            // the same names and sizes: uncompressed
            let image = image::RgbImage::from_pixel(16, 16, image::Rgb([shade, index, 7]));
            image.save(place.path(folder).join(format!("{index}.bmp"))).unwrap();
        }
    }
    let mut command = mpirun();
    let option = |folder: &str| format!("data.path={}", place.path(folder).display());
    add(&mut command, &place, "run", 1, &["--ranks", "1", &option("a")]);
    command.arg(":");
    add(&mut command, &place, "run", 1, &["--ranks", "1", &option("b")]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let words = "rank 1 has another image after augmentation than rank 0 in front of step 1";
    assert!(!output.status.success() && said.contains(words), "{said}");
    assert!(autodidact::checkpoint::list(&place.path("run/checkpoints")).is_empty());
}

#[test]
fn a_dry_run_is_printed_once() {
    let _alone = alone();
    let output = launch(&Place::new(SIMCLR), "run", 2, &["--dry-run", "--ranks", "2"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.matches("4 in 2 processes (2 micro-batches each)").count(), 1, "{said}");
}

/// Runs two processes of one thread each with a fault; what was said, after how long, and whether it went well.
fn with_fault(fault: &str, place: &Place, run: &str, options: &[&str]) -> (String, Duration, bool) {
    let mut command = mpirun();
    command.env("AUTODIDACT_FAULT", fault).args(["-x", "AUTODIDACT_FAULT"]);
    add(&mut command, place, run, 2, &["--ranks", "1", "--timeout", "8"]);
    let started = Instant::now();
    let output = command.args(options).output().unwrap();
    (String::from_utf8_lossy(&output.stderr).into_owned(), started.elapsed(), output.status.success())
}

#[test]
fn a_process_that_dies_at_any_operation_ends_all_and_nothing_is_half_written() {
    let _alone = alone();
    let place = Place::new(SIMCLR);
    let whole = place.run("whole", &["--ranks", "1"]);
    // the program's digest, the plan's, places in the tree, a bucket, a checkpoint; each process once
    for (process, operation) in [(1, 1), (0, 3), (1, 9), (0, 17), (1, 40)] {
        let fault = format!("kill@{process}:{operation}");
        let (said, after, success) = with_fault(&fault, &place, "run", &[]);
        assert!(!success && after < Duration::from_secs(20), "{fault}: {after:?}: {said}");
        let (_, damaged) = autodidact::checkpoint::newest(&place.path("run/checkpoints"));
        assert!(damaged.is_empty(), "{fault}: {damaged:?}");
    }
    bits(&place, "run", 2, &["--ranks", "1"]).assert_same(&whole, "after every one of them");
}

#[test]
fn a_process_that_stops_answering_or_does_too_much_is_named_with_the_operation() {
    let _alone = alone();
    let place = Place::new(SIMCLR);
    let (said, after, success) = with_fault("stop@1:30", &place, "stop", &[]);
    assert!(!success && said.contains("process 1 was not heard of for 8 s, at operation 30, "), "{said}");
    assert!(after < Duration::from_secs(30), "{after:?}");
    Command::new("pkill").args(["-KILL", "-f", &place.path("stop").display().to_string()]).status().unwrap();
    let (said, after, success) = with_fault("extra@1:30", &place, "extra", &[]);
    assert!(!success && said.contains("processes do different things: process"), "{said}");
    assert!(said.contains("at operation 30, ") && said.contains("at operation 31, an extra gather of u8"), "{said}");
    assert!(after < Duration::from_secs(20), "{after:?}");
}

#[test]
fn a_pixel_of_one_rank_that_is_no_number_stops_all_before_it_is_saved() {
    let _alone = alone();
    let place = Place::new(MAE);
    let (said, after, success) = with_fault("nan@1:4", &place, "run", &[]);
    assert!(!success && said.contains("step 4: the loss is NaN"), "{said}");
    assert!(after < Duration::from_secs(20), "{after:?}");
    let saved = autodidact::checkpoint::list(&place.path("run/checkpoints"));
    // the last one is the state before the step
    assert_eq!(saved.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [2, 3]);
    // each process has written down why it ended
    for process in 0..2 {
        let log = fs::read_to_string(place.path(&format!("run/logs/process-{process}.log"))).unwrap();
        assert!(log.contains("step 2: rank ") && log.lines().last().unwrap().contains("NaN"), "{log}");
    }
}

/// What one process alone sees, all decide on: an overflow in fp16, and a step that is passed over; the bits are those of one process.
#[test]
fn what_is_not_finite_is_agreed_on_by_processes() {
    let _alone = alone();
    let place = Place::new(MAE);
    let scaled = ["precision.compute=fp16", "precision.scale.initial=256.0"];
    for (fault, options) in [("inf@1:3", &scaled[..]), ("nan@1:3", &["precision.on_nonfinite=skip"])] {
        let (said, _, success) = with_fault(fault, &place, "two", &[&["--resume", "never"], options].concat());
        assert!(success, "{fault}: {said}");
        let alone = [&["--resume", "never", "--ranks", "2"], options].concat();
        let output = place.command("one", &alone).env("AUTODIDACT_FAULT", fault).output().unwrap();
        assert!(output.status.success(), "{fault}: {}", String::from_utf8_lossy(&output.stderr));
        Result::of(&place.path("two")).assert_same(&Result::of(&place.path("one")), fault);
        let last = fs::read_to_string(place.path("two/metrics.jsonl")).unwrap();
        let counted = last.contains(r#""overflows":1"#) || last.contains(r#""skipped":1"#);
        assert!(counted, "{fault}: {last}");
    }
    let bundle = fs::read_to_string(place.path("two/nonfinite-step-3.json")).unwrap();
    assert!(bundle.contains(r#""path": "view 0""#), "{bundle}");
}

#[test]
fn a_slow_rank_is_named() {
    let _alone = alone();
    let place = Place::new(SIMCLR);
    let (said, _, success) =
        with_fault("slow@1:400", &place, "run", &["schedule.steps=25", "checkpoint.every_steps=0"]);
    assert!(success && said.contains("note: rank 1 needs "), "{said}");
    assert_eq!(said.matches("in the middle: all ranks wait for it").count(), 1, "{said}");
}

#[test]
fn processes_of_different_builds_are_told_apart() {
    let _alone = alone();
    let place = Place::new(SIMCLR);
    let other = place.path("other-build");
    let mut program = fs::read(PROGRAM).unwrap();
    program.push(0); // what follows a program's sections is of no consequence, but it is another file
    fs::write(&other, program).unwrap();
    assert!(Command::new("chmod").arg("+x").arg(&other).status().unwrap().success());
    let mut command = mpirun();
    add(&mut command, &place, "run", 1, &[]);
    command.args([":", "-n", "1"]).arg(&other).arg("pretrain").arg(place.path("recipe.toml"));
    command.arg("--run-dir").arg(place.path("run"));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("processes differ: the program of process 0 has"), "{said}");
    assert!(!place.path("run/plan.toml").exists());
}

#[test]
fn a_full_disk_of_the_first_process_ends_all() {
    let _alone = alone();
    let place = Place::new(SIMCLR);
    let Some(_mounted) = disk(&place.path("disk"), "size=300k") else {
        eprintln!("skipped: this user may not mount a file system");
        return;
    };
    let started = Instant::now();
    let output = launch(&place, "disk/run", 2, &["--ranks", "1"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("No space left on device"), "{said}");
    assert!(!said.contains("panicked") && started.elapsed() < Duration::from_secs(20), "{said}");
    let (_, damaged) = autodidact::checkpoint::newest(&place.path("disk/run/checkpoints"));
    assert!(damaged.is_empty(), "{damaged:?}");
}

#[test]
fn a_fast_reduction_trains_the_same_network_to_a_few_digits() {
    let _alone = alone();
    for recipe in [SIMCLR, MAE] {
        let place = Place::new(recipe);
        // at the recipe's rate the last bits of SimCLR's gradient are digits of its loss after five steps
        let slow = "schedule.lr=0.01";
        let canonical = place.run("canonical", &["--ranks", "1", slow]);
        let fast = bits(&place, "fast", 3, &["--ranks", "1", slow, "parallel.reduction=\"fast\""]);
        for (a, b) in canonical.losses().zip(fast.losses()) {
            assert!((a - b).abs() <= 2e-3 * a.abs(), "{a} {b}");
        }
        // its own promise: the same number of processes gives the same bits
        bits(&place, "again", 3, &["--ranks", "1", slow, "parallel.reduction=\"fast\""]).assert_same(&fast, "again");
    }
}

#[test]
fn processes_with_other_numbers_of_cores_take_as_many_as_the_poorest_has() {
    let _alone = alone();
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        eprintln!("skipped: one core only");
        return;
    }
    let place = Place::new(SIMCLR);
    let whole = place.run("whole", &["--ranks", "1"]);
    let mut command = mpirun();
    command.args(["-n", "1", "taskset", "-c", "0", PROGRAM, "pretrain"]).arg(place.path("recipe.toml"));
    command.arg("--run-dir").arg(place.path("run")).arg(":");
    add(&mut command, &place, "run", 1, &[]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Result::of(&place.path("run")).assert_same(&whole, "one core and more");
    let log = fs::read_to_string(place.path("run/logs/process-1.log")).unwrap();
    assert!(log.contains("ranks 1 to 1 of 2"), "{log}");
}

#[test]
fn images_that_any_process_could_not_read_are_counted_once() {
    let _alone = alone();
    let place = Place::new(&SIMCLR.replace("source = \"sample\"", "source = \"folder\"\nmax_bad = 0.5"));
    fs::create_dir(place.path("images")).unwrap();
    for index in 0..40u8 {
        let path = place.path("images").join(format!("{index}.bmp"));
        image::RgbImage::from_pixel(16, 16, image::Rgb([index, 5, 7])).save(&path).unwrap();
        if index % 10 == 0 {
            fs::write(&path, "BM, and nothing else").unwrap();
        }
    }
    let data = format!("data.path={}", place.path("images").display());
    let output = launch(&place, "run", 3, &["--ranks", "1", "schedule.steps=4", &data]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("4 replaced, see bad-images*.jsonl"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_fault_that_is_none_is_refused() {
    let _alone = alone();
    let (said, _, success) = with_fault("boom@1", &Place::new(SIMCLR), "run", &[]);
    assert!(!success && said.contains("AUTODIDACT_FAULT is \"boom@1\", which is no fault"), "{said}");
}
