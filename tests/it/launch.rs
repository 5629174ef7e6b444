//! Processes that launchers other than MPI's started: what is found out, and what is refused and how.

use std::process::{Command, Output};

use crate::runs::{Place, SIMCLR};

const PROGRAM: &str = env!("CARGO_BIN_EXE_autodidact");

/// Variables of launchers that this test may itself run under.
const OTHERS: [&str; 12] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
];

fn under(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    for name in OTHERS {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).args(arguments).output().unwrap()
}

/// As torchrun starts the second of two processes.
const TORCHRUN: [(&str, &str); 8] = [
    ("RANK", "1"),
    ("WORLD_SIZE", "2"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "127.0.0.1"),
    ("MASTER_PORT", "29400"),
    ("TORCHELASTIC_RUN_ID", "exp7"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

#[test]
fn processes_of_torchrun_on_cpus_are_refused_with_advice_before_anything_is_written() {
    let place = Place::new(SIMCLR);
    let (recipe, run) = (place.path("recipe.toml"), place.path("run"));
    let arguments = ["pretrain", recipe.to_str().unwrap(), "--run-dir", run.to_str().unwrap(), "--device", "cpu"];
    let output = under(&TORCHRUN, &arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("error: torchrun started 2 processes, "), "{said}");
    assert!(said.contains("hint: ") && said.contains("`mpirun`"), "{said}");
    assert!(!run.exists());
}

#[cfg(not(feature = "cuda"))]
#[test]
fn gpus_are_refused_by_a_build_for_the_cpu() {
    let place = Place::new(SIMCLR);
    let recipe = place.path("recipe.toml");
    let output = under(&TORCHRUN, &["pretrain", recipe.to_str().unwrap(), "--device", "cuda"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("`--device cuda`: this build is for the CPU\nhint: rebuild with"), "{said}");
}

#[test]
fn launch_info_tells_what_would_connect_the_processes() {
    let output = under(&TORCHRUN, &["launch-info"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for row in
        ["launcher       torchrun", "process        1 of 2", "master         127.0.0.1:29400", "job            exp7"]
    {
        assert!(said.lines().any(|line| line == row), "{row}: {said}");
    }
    assert!(said.contains("on CPUs        nothing: ") && said.contains("on GPUs        "), "{said}");
    if cfg!(feature = "nccl") {
        // not on the port of torchrun's own store
        assert!(said.contains("processes meet at 127.0.0.1:29401"), "{said}");
    }
    let alone = under(&[], &["launch-info"]);
    let said = String::from_utf8_lossy(&alone.stdout);
    assert!(said.contains("process        0 of 1") && !said.contains("on GPUs"), "{said}");
}
