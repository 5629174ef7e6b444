//! The processes of a run, as `pretrain` sees them: usually one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::say;
use crate::error::{Failure, Kind};
use crate::parallel::{Aborted, Launch, Link, Patience};

/// This process among those of the run.
pub(super) struct Processes {
    launch: Launch,
    link: Option<Arc<Link>>,
    /// Cores for each process: as many as the one with the fewest has, shared with those that may use the same.
    cores: usize,
}

impl Processes {
    /// Finds out who launched this process, and connects it with the others.
    pub(super) fn connect(deadline: Duration) -> Result<Self, Failure> {
        let launch = Launch::detect().map_err(|error| Failure::new(Kind::Usage, error))?;
        let link = if launch.processes > 1 { Some(Arc::new(connect(&launch, deadline)?)) } else { None };
        let visible = super::pretrain::cores();
        let mut processes = Self { launch, link, cores: visible };
        if let Some(note) = &processes.launch.note {
            processes.say(&format!("note: {note}"));
        }
        if let Some(link) = &processes.link {
            let own = cores_of_this_process();
            let all = link.all_gather_text("cores", &own, Patience::Deadline).map_err(stopped)?;
            let sharing = all.iter().filter(|other| **other == own).count().max(1);
            let share = (visible / sharing).max(1).to_string();
            let shares = link.all_gather_text("cores of a process", &share, Patience::Deadline).map_err(stopped)?;
            processes.cores = shares.iter().filter_map(|share| share.parse().ok()).min().unwrap_or(1);
            processes.agree("program", &digest_of_this_program())?;
            processes.agree("instruction set", crate::ops::instruction_set())?;
        }
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

    /// Returns how many cores each process may use, the same number on all.
    pub(super) fn cores(&self) -> usize {
        self.cores
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
        self.agree_on(what, value, value)
    }

    /// The same of a digest; `text` is what it is of, a value a line.
    pub(super) fn agree_on(&self, what: &str, digest: &str, text: &str) -> Result<(), Failure> {
        let Some(link) = &self.link else { return Ok(()) };
        let all = link.all_gather_text(what, &format!("{digest}\n{text}"), Patience::Deadline).map_err(stopped)?;
        let digest = |text: &str| text.lines().next().map(str::to_owned);
        let Some(process) = all.iter().position(|other| digest(other) != digest(&all[0])) else { return Ok(()) };
        let mut lines = all[0].lines().skip(1).zip(all[process].lines().skip(1));
        let (first, other) =
            lines.find(|(first, other)| first != other).unwrap_or(("the same text", "another image set"));
        let text = format!("processes differ: the {what} of process 0 has `{first}`, of process {process} `{other}`");
        let hint =
            "start every process with the same program, recipe, overrides and images, on the same type of processor";
        Err(Failure::message(Kind::Usage, text).hint(hint))
    }

    /// Returns the numbers that any process has.
    pub(super) fn union(&self, own: BTreeSet<u64>) -> Result<BTreeSet<u64>, Failure> {
        let Some(link) = &self.link else { return Ok(own) };
        let text = own.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        let all = link.all_gather_text("images that cannot be read", &text, Patience::Endless).map_err(stopped)?;
        Ok(all.iter().flat_map(|text| text.split(' ')).filter_map(|number| number.parse().ok()).collect())
    }

    /// Gives every process the path that the first one has.
    pub(super) fn share_path(&self, what: &str, path: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
        let Some(link) = &self.link else { return Ok(path.map(Path::to_owned)) };
        let text = path.map_or_else(String::new, |path| path.display().to_string());
        let mut all = link.all_gather_text(what, &text, Patience::Endless).map_err(stopped)?;
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

/// Host and cores that the launcher left to this process (Linux; elsewhere the host alone).
fn cores_of_this_process() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let status = read("/proc/self/status");
    let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
    format!("{} {}", read("/proc/sys/kernel/hostname").trim(), cores.trim())
}

/// Tells builds of one version apart.
fn digest_of_this_program() -> String {
    let file = std::env::current_exe().and_then(std::fs::File::open);
    let mut hash = blake3::Hasher::new();
    match file.and_then(|file| hash.update_reader(file).map(drop)) {
        Ok(()) => hash.finalize().to_hex()[..16].to_owned(),
        // a program that was deleted meanwhile still runs
        Err(_) => env!("CARGO_PKG_VERSION").to_owned(),
    }
}

fn stopped(aborted: Aborted) -> Failure {
    let hint = aborted.hint();
    let failure = Failure::new(Kind::Failure, aborted);
    if hint.is_empty() { failure } else { failure.hint(hint) }
}

#[cfg(feature = "mpi")]
fn connect(launch: &Launch, deadline: Duration) -> Result<Link, Failure> {
    use crate::parallel::{Launcher, Mpi, Transport};

    if let Some(launcher) = launch.launcher.filter(|launcher| !launcher.is_mpi() && *launcher != Launcher::Slurm) {
        let text = format!("{launcher} started {} processes, and only MPI connects processes so far", launch.processes);
        return Err(
            Failure::message(Kind::Usage, text).hint("start them with `mpirun` or `srun`; see docs/distributed.md")
        );
    }
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
    let hint =
        "rebuild with `cargo build --features mpi`, or start one process (`--ranks N` uses the cores of one machine)";
    Err(Failure::message(Kind::Usage, text).hint(hint))
}
