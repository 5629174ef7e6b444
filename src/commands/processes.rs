//! The processes of a run, as `pretrain` sees them: usually one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::say;
use crate::error::{Failure, Kind};
use crate::parallel::{Aborted, Launch, Link};

/// This process among those of the run.
pub(super) struct Processes {
    launch: Launch,
    link: Option<Arc<Link>>,
}

impl Processes {
    /// Finds out who launched this process, and connects it with the others.
    pub(super) fn connect(deadline: Duration) -> Result<Self, Failure> {
        let launch = Launch::detect().map_err(|error| Failure::new(Kind::Usage, error))?;
        let link = if launch.processes > 1 { Some(Arc::new(connect(&launch, deadline)?)) } else { None };
        let processes = Self { launch, link };
        if let Some(note) = &processes.launch.note {
            processes.say(&format!("note: {note}"));
        }
        processes.agree("version of autodidact", env!("CARGO_PKG_VERSION"))?;
        processes.agree("instruction set", crate::ops::instruction_set())?;
        Ok(processes)
    }

    /// Number of processes.
    pub(super) fn count(&self) -> usize {
        self.launch.processes
    }

    /// Tells whether this is the first process, which alone writes and speaks.
    pub(super) fn leads(&self) -> bool {
        self.launch.process == 0
    }

    /// Returns the connection to the others.
    pub(super) fn link(&self) -> Option<&Arc<Link>> {
        self.link.as_ref()
    }

    /// Returns this process's share of the cores: those it is bound to, or, where the launcher bound nothing, a part of the node's.
    pub(super) fn cores(&self, visible: usize) -> usize {
        if online_cores().is_some_and(|online| visible < online) {
            return visible;
        }
        (visible / self.launch.local_processes.unwrap_or(1).max(1)).max(1)
    }

    /// Says a line once.
    pub(super) fn say(&self, text: &str) {
        if self.leads() {
            say(text);
        }
    }

    /// Returns a file name of this process's own.
    pub(super) fn own_name(&self, stem: &str, extension: &str) -> String {
        if self.leads() { format!("{stem}.{extension}") } else { format!("{stem}.{}.{extension}", self.launch.process) }
    }

    /// Requires something to be the same everywhere.
    pub(super) fn agree(&self, what: &str, value: &str) -> Result<(), Failure> {
        let Some(link) = &self.link else { return Ok(()) };
        let all = link.all_gather_text(what, value).map_err(stopped)?;
        match all.iter().position(|other| other != &all[0]) {
            None => Ok(()),
            Some(process) => {
                let text = format!("processes differ: the {what} of process 0 is {}, of process {process} {}", all[0], all[process]);
                let hint = "start every process with the same program, recipe, overrides and images, on the same type of processor";
                Err(Failure::message(Kind::Usage, text).hint(hint))
            }
        }
    }

    /// Gives every process the path that the first one has.
    pub(super) fn from_first(&self, what: &str, path: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
        let Some(link) = &self.link else { return Ok(path.map(Path::to_owned)) };
        let text = path.map_or_else(String::new, |path| path.display().to_string());
        let mut all = link.all_gather_text(what, &text).map_err(stopped)?;
        let first = all.swap_remove(0);
        Ok((!first.is_empty()).then(|| first.into()))
    }

    /// Ends together: in peace, or with the reason of whoever failed.
    pub(super) fn end(&self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        let Some(link) = &self.link else { return outcome };
        match outcome {
            Ok(()) => link.finish().map_err(stopped),
            Err(failure) => {
                let text = failure.render(false);
                let text = text.lines().next().unwrap_or_default();
                link.abort(text.strip_prefix("error: ").unwrap_or(text));
                Err(failure)
            }
        }
    }
}

/// Number of cores of the node (Linux).
fn online_cores() -> Option<usize> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    let ranges = text.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()? + 1 - first.parse::<usize>().ok()?)
    });
    ranges.sum()
}

fn stopped(aborted: Aborted) -> Failure {
    Failure::new(Kind::Failure, aborted)
}

#[cfg(feature = "mpi")]
fn connect(launch: &Launch, deadline: Duration) -> Result<Link, Failure> {
    use crate::parallel::{Mpi, Transport};

    let mpi = Mpi::start(deadline).map_err(|error| Failure::new(Kind::Failure, error))?;
    if (mpi.process(), mpi.processes()) != (launch.process, launch.processes) {
        let text = format!(
            "{} says process {} of {}, MPI says {} of {}",
            launch.launcher.map_or_else(String::new, |launcher| launcher.to_string()),
            launch.process,
            launch.processes,
            mpi.process(),
            mpi.processes()
        );
        let hint = "start processes with the `mpirun` of the MPI that autodidact was built with, or with `srun --mpi=pmix` (or pmi2)";
        return Err(Failure::message(Kind::Usage, text).hint(hint));
    }
    Ok(Link::new(Arc::new(mpi)))
}

#[cfg(not(feature = "mpi"))]
fn connect(launch: &Launch, _deadline: Duration) -> Result<Link, Failure> {
    let launcher = launch.launcher.map_or_else(|| "a launcher".to_owned(), |launcher| launcher.to_string());
    let text = format!("{launcher} started {} processes, but this build cannot connect them", launch.processes);
    let hint = "rebuild with `cargo build --features mpi`, or start one process (`--ranks N` uses the cores of one machine)";
    Err(Failure::message(Kind::Usage, text).hint(hint))
}
