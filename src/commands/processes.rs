//! The processes of a run, as `pretrain` sees them: usually one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::say;
use crate::backend::{self, DeviceChoice};
use crate::error::{Failure, Kind};
use crate::parallel::{Aborted, Launch, Launcher, Link, Patience, Transport};

/// This process among those of the run.
pub(super) struct Processes {
    launch: Launch,
    link: Option<Arc<Link>>,
    device: DeviceChoice,
    /// Cores for each process: as many as the one with the fewest has, shared with those that may use the same.
    cores: usize,
}

impl Processes {
    /// Finds out who launched this process, and connects it with the others: CPUs by MPI, GPUs by NCCL.
    pub(super) fn connect(deadline: Duration, device: DeviceChoice) -> Result<Self, Failure> {
        let launch = Launch::detect().map_err(|error| Failure::new(Kind::Usage, error))?;
        let (link, device) = if launch.processes > 1 {
            let (transport, device) = connect(&launch, deadline, device)?;
            (Some(Arc::new(Link::new(transport))), device)
        } else {
            (None, device)
        };
        let visible = super::pretrain::cores();
        let mut processes = Self { launch, link, device, cores: visible };
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

    /// Returns the device of this process.
    pub(super) fn device(&self) -> DeviceChoice {
        self.device
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
                link.abort(&first_line(&failure));
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

/// What processes meet through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meets {
    /// MPI, which started them.
    Mpi,
    /// The store of the launch.
    Store,
    /// Nothing that is known.
    Nowhere,
}

/// Says through what the processes of a launch meet. (`srun` starts processes for MPI or for nobody; in a build with MPI they are MPI's.)
pub(super) fn meets(launch: &Launch) -> Meets {
    let for_mpi = launch.launcher.is_some_and(|launcher| launcher.is_mpi() || launcher == Launcher::Slurm);
    if for_mpi && cfg!(feature = "mpi") {
        Meets::Mpi
    } else if launch.meeting.is_some() {
        Meets::Store
    } else {
        Meets::Nowhere
    }
}

/// Connects this process with the others of its launch; returns the device that it computes on, too.
fn connect(
    launch: &Launch,
    deadline: Duration,
    device: DeviceChoice,
) -> Result<(Arc<dyn Transport>, DeviceChoice), Failure> {
    let launcher = launch.launcher.map_or_else(|| "a launcher".to_owned(), |launcher| launcher.to_string());
    let started = format!("{launcher} started {} processes", launch.processes);
    // found out before anything is connected: a process that cannot go on says so at once
    let cuda = backend::means_cuda(device).map_err(|error| Failure::new(Kind::Usage, error))?;
    let cuda = cuda && (device != DeviceChoice::Auto || has_gpu());
    match (meets(launch), cuda) {
        (Meets::Mpi, _) => over_mpi(launch, deadline, device, cuda),
        (Meets::Store, true) => over_store(launch, deadline, device),
        (Meets::Nowhere, true) => {
            let text = format!("{started}, and MASTER_ADDR does not say where their GPUs can meet");
            let hint = "set MASTER_ADDR and MASTER_PORT to a name and a port of process 0's host, or start them with `mpirun` and a build with `--features cuda,mpi`";
            Err(Failure::message(Kind::Usage, text).hint(hint))
        }
        (_, false) if cfg!(feature = "mpi") => {
            let text = format!("{started}, and processes on CPUs are connected by MPI alone");
            let hint = "start them with `mpirun` or `srun`; on GPUs, `--device cuda` in a build with `--features cuda`; see docs/distributed.md";
            Err(Failure::message(Kind::Usage, text).hint(hint))
        }
        (_, false) => {
            let text = format!("{started}, but this build cannot connect them");
            let hint = "rebuild with `cargo build --features mpi` and start them with `mpirun` or `srun`, or start one process (`--ranks N` uses the cores of one machine)";
            Err(Failure::message(Kind::Usage, text).hint(hint))
        }
    }
}

#[cfg(feature = "mpi")]
fn over_mpi(
    launch: &Launch,
    deadline: Duration,
    device: DeviceChoice,
    cuda: bool,
) -> Result<(Arc<dyn Transport>, DeviceChoice), Failure> {
    use crate::parallel::{Control, Mpi};

    let mpi = Arc::new(Mpi::start(deadline).map_err(|error| Failure::new(Kind::Failure, error))?);
    let [process, processes] = [Transport::process(&*mpi), Transport::processes(&*mpi)];
    if (process, processes) != (launch.process, launch.processes) {
        let text = format!(
            "{} says process {} of {}, MPI says {process} of {processes}",
            launch.launcher.map_or_else(String::new, |launcher| launcher.to_string()),
            launch.process,
            launch.processes,
        );
        let hint = "start processes with the `mpirun` of the MPI that autodidact was built with, or with `srun --mpi=pmix` (or pmi2)";
        return Err(Failure::message(Kind::Usage, text).hint(hint));
    }
    let own = if cuda { "GPU" } else { "CPU" };
    let all = mpi.all_gather("kind of device", own.as_bytes(), Patience::Deadline).map_err(stopped)?;
    if let Some(other) = all.iter().position(|kind| kind != &all[0]) {
        let kind = |process: usize| String::from_utf8_lossy(&all[process]).into_owned();
        let text =
            format!("processes differ: process 0 computes on the {}, process {other} on the {}", kind(0), kind(other));
        let hint = "`--device cpu` or `--device cuda` for all; `autodidact launch-info` shows what each process has";
        return Err(Failure::message(Kind::Usage, text).hint(hint));
    }
    if !cuda {
        return Ok((mpi, DeviceChoice::Cpu));
    }
    over_nccl(launch, &(mpi as Arc<dyn Control>), deadline, device)
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(
    _launch: &Launch,
    _deadline: Duration,
    _device: DeviceChoice,
    _cuda: bool,
) -> Result<(Arc<dyn Transport>, DeviceChoice), Failure> {
    Err(Failure::message(Kind::Usage, "this build has no MPI").hint("rebuild with `cargo build --features mpi`"))
}

#[cfg(feature = "nccl")]
fn over_store(
    launch: &Launch,
    deadline: Duration,
    device: DeviceChoice,
) -> Result<(Arc<dyn Transport>, DeviceChoice), Failure> {
    use crate::parallel::{Control, Meeting, Store};

    let Some(master) = launch.meeting.clone() else {
        return Err(Failure::message(Kind::Usage, "MASTER_ADDR does not say where processes meet"));
    };
    let meeting = Meeting {
        master,
        job: launch.job.clone(),
        build: digest_of_this_program(),
        process: launch.process,
        processes: launch.processes,
        deadline,
    };
    let store = Store::open(&meeting).map_err(|error| Failure::new(Kind::Failure, error))?;
    over_nccl(launch, &(Arc::new(store) as Arc<dyn Control>), deadline, device)
}

#[cfg(not(feature = "nccl"))]
fn over_store(
    _launch: &Launch,
    _deadline: Duration,
    _device: DeviceChoice,
) -> Result<(Arc<dyn Transport>, DeviceChoice), Failure> {
    Err(no_nccl())
}

/// Connects the GPUs of processes that have met.
#[cfg(feature = "nccl")]
fn over_nccl(
    launch: &Launch,
    control: &Arc<dyn crate::parallel::Control>,
    deadline: Duration,
    device: DeviceChoice,
) -> Result<(Arc<dyn Transport>, DeviceChoice), Failure> {
    use crate::parallel::{Nccl, gpus};

    let start = || {
        let gpu = if let DeviceChoice::Cuda(Some(gpu)) = device {
            gpu
        } else {
            let visible = gpus().map_err(|error| Failure::new(Kind::Failure, error))?;
            launch.gpu(visible).map_err(|error| Failure::new(Kind::Usage, error))?
        };
        let nccl =
            Nccl::start(Arc::clone(control), gpu, deadline).map_err(|error| Failure::new(Kind::Failure, error))?;
        let transport: Arc<dyn Transport> = Arc::new(nccl);
        Ok((transport, DeviceChoice::Cuda(Some(gpu))))
    };
    // one that cannot go on says why, so that the others end with it
    start().inspect_err(|failure: &Failure| control.abort(&first_line(failure)))
}

#[cfg(all(feature = "mpi", not(feature = "nccl")))]
fn over_nccl(
    _launch: &Launch,
    _control: &Arc<dyn crate::parallel::Control>,
    _deadline: Duration,
    _device: DeviceChoice,
) -> Result<(Arc<dyn Transport>, DeviceChoice), Failure> {
    Err(no_nccl())
}

#[cfg(not(feature = "nccl"))]
fn no_nccl() -> Failure {
    Failure::message(Kind::Usage, "this build is for the CPU").hint("rebuild with `cargo build --features cuda`")
}

/// Tells whether there is a GPU, not only a driver.
#[cfg(feature = "nccl")]
fn has_gpu() -> bool {
    crate::parallel::gpus().is_ok_and(|visible| visible > 0)
}

#[cfg(not(feature = "nccl"))]
fn has_gpu() -> bool {
    false
}

/// What a failure is, without its hint.
fn first_line(failure: &Failure) -> String {
    let text = failure.render(false);
    let text = text.lines().next().unwrap_or_default();
    text.strip_prefix("error: ").unwrap_or(text).to_owned()
}
