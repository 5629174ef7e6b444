//! `autodidact launch-info`.

use super::processes::{Meets, meets};
use super::{print, say};
use crate::error::{Failure, Kind};
use crate::parallel::Launch;

pub(super) fn run() -> Result<(), Failure> {
    let launch = Launch::detect().map_err(|error| Failure::new(Kind::Usage, error))?;
    if let Some(note) = &launch.note {
        say(&format!("note: {note}"));
    }
    let unknown = || "not said".to_owned();
    let number = |number: Option<usize>| number.map_or_else(unknown, |number| number.to_string());
    let mut rows = vec![
        ("launcher", launch.launcher.map_or_else(|| "none".to_owned(), |launcher| launcher.to_string())),
        ("process", format!("{} of {}", launch.process, launch.processes)),
        ("on this node", format!("{} of {}", launch.local, number(launch.local_processes))),
        ("node", number(launch.node)),
        ("master", launch.master.as_ref().map_or_else(unknown, ToString::to_string)),
        ("job", if launch.job.is_empty() { unknown() } else { launch.job.clone() }),
        ("restarts", launch.restarts.to_string()),
    ];
    if launch.processes > 1 {
        rows.push(("on CPUs", on_cpus(&launch)));
        rows.push(("on GPUs", on_gpus(&launch)));
    }
    // one write, so that the tables of several processes do not mix
    let rows: Vec<String> = rows.iter().map(|(name, value)| format!("{name:<14} {value}")).collect();
    print(rows.join("\n"))
}

/// What would connect processes that compute on CPUs.
fn on_cpus(launch: &Launch) -> String {
    match meets(launch) {
        Meets::Mpi => "MPI".to_owned(),
        _ if cfg!(feature = "mpi") => "nothing: start them with `mpirun` or `srun`".to_owned(),
        _ => "nothing: this build has no MPI (`cargo build --features mpi`)".to_owned(),
    }
}

/// What would connect their GPUs.
#[cfg(feature = "nccl")]
fn on_gpus(launch: &Launch) -> String {
    use crate::parallel::{gpus, nccl_version};

    let place = match (meets(launch), &launch.meeting) {
        (Meets::Mpi, _) => "through MPI".to_owned(),
        (Meets::Store, Some(meeting)) => format!("at {meeting}"),
        _ => "nowhere: set MASTER_ADDR and MASTER_PORT".to_owned(),
    };
    let gpu = match gpus().map(|visible| (visible, launch.gpu(visible))) {
        Ok((visible, Ok(gpu))) => format!("GPU {gpu} of {visible}"),
        Ok((visible, Err(_))) => format!("no GPU for this process, {visible} visible"),
        Err(error) => first_line(&error),
    };
    let version = nccl_version().unwrap_or_else(|error| format!("missing ({})", first_line(&error)));
    format!("NCCL {version}; {gpu}; processes meet {place}")
}

#[cfg(feature = "nccl")]
fn first_line(error: &crate::parallel::NcclError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

#[cfg(not(feature = "nccl"))]
fn on_gpus(_launch: &Launch) -> String {
    "nothing: this build is for the CPU (`cargo build --features cuda`)".to_owned()
}
