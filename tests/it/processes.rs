//! Runs of several processes under `mpirun`: the same bits as one process, and an end for all when one fails. Needs the feature `mpi` and Open MPI's `mpirun`.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::runs::{MAE, Place, Result, SIMCLR};

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
    command.args(["-n", &processes.to_string(), PROGRAM, "pretrain"]).arg(place.path("recipe.toml"));
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
    for (name, recipe) in [("simclr", SIMCLR), ("mae", MAE)] {
        let place = Place::new(recipe);
        let whole = place.run("whole", &["--ranks", "1"]);
        for (run, processes, threads) in [("1", 1, "1"), ("2", 2, "1"), ("4", 4, "1"), ("2x2", 2, "2"), ("3", 3, "1")] {
            bits(&place, run, processes, &["--ranks", threads]).assert_same(&whole, &format!("{name}, {run} processes"));
        }
        // from 2 x 2 to 3 processes to 1
        let forget = |step: &str| fs::remove_dir_all(place.path("2x2/checkpoints").join(step)).unwrap();
        ["step-00000004", "step-00000006"].iter().for_each(|step| forget(step));
        let stopped = bits(&place, "2x2", 3, &["--ranks", "1"]);
        stopped.assert_same(&whole, &format!("{name}, resumed by 3 processes"));
        forget("step-00000006");
        place.run("2x2", &["--ranks", "2"]).assert_same(&whole, &format!("{name}, resumed by one process"));
    }
}

/// Long enough that something can happen to it.
const LONG: [&str; 4] = ["schedule.steps=4000", "checkpoint.every_steps=5", "--ranks", "1"];

struct Running {
    child: Child,
    started: Instant,
}

impl Running {
    fn start(mut command: Command, run: &Path, steps: usize) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun is installed");
        let started = Instant::now();
        while fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count() < steps {
            assert!(started.elapsed() < Duration::from_mins(2), "no step {steps} within two minutes");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { child, started: Instant::now() }
    }

    /// Process ids of the program, first process first (they are started in order).
    fn ids(&self, run: &Path) -> Vec<u32> {
        let listing = Command::new("pgrep").args(["-f", &format!("pretrain .*--run-dir {}", run.display())]).output();
        let listing = String::from_utf8(listing.expect("pgrep is installed").stdout).unwrap();
        listing.lines().map(|id| id.parse().unwrap()).filter(|&id: &u32| id != self.child.id()).collect()
    }

    fn signal(id: u32, signal: &str) {
        assert!(Command::new("kill").args([signal, &id.to_string()]).status().unwrap().success());
    }

    /// Waits for the end; what was said, and after how long.
    fn end(self) -> (String, Duration) {
        let output = self.child.wait_with_output().unwrap();
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        (said, self.started.elapsed())
    }
}

#[test]
fn a_killed_process_ends_all_and_leaves_a_checkpoint() {
    let place = Place::new(SIMCLR);
    let run = place.path("run");
    let mut command = mpirun();
    add(&mut command, &place, "run", 2, &LONG);
    let running = Running::start(command, &run, 7);
    let ids = running.ids(&run);
    assert_eq!(ids.len(), 2, "{ids:?}");
    Running::signal(ids[1], "-KILL");
    let (said, after) = running.end();
    assert!(after < Duration::from_secs(10), "{after:?}: {said}");
    let done = autodidact::checkpoint::list(&run.join("checkpoints")).last().unwrap().0;
    assert!(done >= 5);
}

#[test]
fn a_silent_process_is_named_when_the_deadline_has_passed() {
    let place = Place::new(SIMCLR);
    let run = place.path("run");
    let mut command = mpirun();
    add(&mut command, &place, "run", 2, &[&LONG[..], &["--timeout", "3"]].concat());
    let running = Running::start(command, &run, 3);
    let ids = running.ids(&run);
    Running::signal(ids[1], "-STOP");
    let (said, after) = running.end();
    assert!(said.contains("process 1 was not heard of for 3 s, at operation"), "{said}");
    assert!(after < Duration::from_secs(20), "{after:?}");
}

#[test]
fn processes_of_different_runs_are_told_apart() {
    for (first, second, words) in [
        (&["schedule.lr=0.1"][..], &["schedule.lr=0.2"][..], "processes differ: the plan of process 0 is"),
        (&[][..], &["data.limit=64"][..], "processes differ: the plan of process 0 is"),
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
        assert!(started.elapsed() < Duration::from_secs(10));
        assert!(!place.path("run").exists(), "nothing was written");
    }
}

#[test]
fn a_failure_of_the_first_process_alone_reaches_the_others() {
    let place = Place::new(SIMCLR);
    // another program holds the run folder
    fs::create_dir_all(place.path("run")).unwrap();
    let held = fs::File::create(place.path("run/.lock")).unwrap();
    held.lock().unwrap();
    let started = Instant::now();
    let output = launch(&place, "run", 2, &["--ranks", "1"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("another process is training in this folder"), "{said}");
    assert!(said.contains("process 0 stopped: "), "{said}");
    assert!(started.elapsed() < Duration::from_secs(10));
}
