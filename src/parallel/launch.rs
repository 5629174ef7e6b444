//! Who this process is among the processes of a run, as its launcher says in environment variables.
//!
//! Understood are torchrun (and what follows it: Lightning, Kubeflow's `PyTorchJob`), Slurm's `srun`, Open MPI and PRRTE, MPICH, Intel MPI and everything with
//! Hydra, Cray's PALS, and indexed jobs of Kubernetes. Launchers nest (`srun` starts one `mpirun` or `torchrun` a node), so several may have left their
//! variables: they must tell the same, except that an outer Slurm with one task a node gives way.

use std::fmt;

/// A launcher of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Open MPI or PRRTE.
    OpenMpi,
    /// MPICH, Intel MPI and others with the Hydra launcher.
    Hydra,
    /// Cray's PALS.
    Pals,
    /// Slurm's `srun`.
    Slurm,
    /// torchrun and launchers that set the same variables.
    Torchrun,
    /// An indexed job of Kubernetes.
    Kubernetes,
}

impl Launcher {
    /// Tells whether it starts processes for MPI. (`srun` may or may not.)
    #[must_use]
    pub fn is_mpi(self) -> bool {
        matches!(self, Self::OpenMpi | Self::Hydra | Self::Pals)
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenMpi => "Open MPI",
            Self::Hydra => "MPICH (Hydra)",
            Self::Pals => "PALS",
            Self::Slurm => "Slurm (srun)",
            Self::Torchrun => "torchrun",
            Self::Kubernetes => "Kubernetes (indexed job)",
        })
    }
}

/// Where processes that no MPI connects meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Master {
    /// Name or address of the host of the first process.
    pub host: String,
    /// Port that the first process listens on.
    pub port: u16,
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// One process of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Who started it; nothing: it runs alone.
    pub launcher: Option<Launcher>,
    /// Number of this process, from 0.
    pub process: usize,
    /// Number of processes.
    pub processes: usize,
    /// Number of this process on its node, from 0.
    pub local: usize,
    /// Processes on this node, if the launcher says so.
    pub local_processes: Option<usize>,
    /// Number of this node, if the launcher says so.
    pub node: Option<usize>,
    /// What the launcher calls the master (`MASTER_ADDR`, `MASTER_PORT`), or the first host of a Slurm job.
    pub master: Option<Master>,
    /// Where processes meet without MPI: at the master, on a port that nobody else listens on.
    pub meeting: Option<Master>,
    /// Name of the job, which tells it from others, and from itself before a restart; empty if the launcher gives none.
    pub job: String,
    /// How often the launcher has started this job again.
    pub restarts: u32,
    /// What the user may not expect.
    pub note: Option<String>,
}

/// Why it cannot be told who this process is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Some variables of a launcher are there, others are not.
    #[error(
        "{present} is set and {missing} is not, as {launcher} would have it\nhint: start every process with the launcher, or unset {present} to run alone"
    )]
    Partial {
        /// Whose variables.
        launcher: Launcher,
        /// One that is set.
        present: &'static str,
        /// One that is not.
        missing: &'static str,
    },
    /// A variable holds no number.
    #[error(
        "{name} is {value:?}, not a whole number\nhint: {name} comes from the launcher; see what sets it, or unset it to run alone"
    )]
    NoNumber {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// A variable holds no port.
    #[error(
        "{name} is {value:?}, not a port from 1 to 65535\nhint: set {name} to a free port, the same for all processes"
    )]
    NoPort {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// More processes on a node than GPUs.
    #[error(
        "process {local} of its node has no GPU: {visible} are visible, and processes of a node are counted from 0\nhint: start one process for each GPU, or see CUDA_VISIBLE_DEVICES; `--device cpu` computes without"
    )]
    NoGpu {
        /// Number of the process on its node.
        local: usize,
        /// GPUs that it may use.
        visible: usize,
    },
    /// A process number beyond the number of processes.
    #[error("{rank_name} is {rank}, but there are {size} processes, 0 to {last} ({size_name})\nhint: count processes from 0", last = size.saturating_sub(1))]
    OutOfRange {
        /// Variable of the number.
        rank_name: &'static str,
        /// The number.
        rank: usize,
        /// Variable of the size.
        size_name: &'static str,
        /// The size.
        size: usize,
    },
    /// Two launchers tell different things.
    #[error(
        "two launchers disagree: {first} ({first_says}) and {second} ({second_says})\nhint: unset the variables of the one that did not start these processes"
    )]
    Disagree {
        /// One.
        first: Launcher,
        /// What its variables say.
        first_says: String,
        /// The other.
        second: Launcher,
        /// What its variables say.
        second_says: String,
    },
}

/// Variables of a launcher.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    local: &'static str,
    local_size: &'static str,
    node: &'static str,
}

/// The innermost first.
const LAUNCHERS: [Names; 6] = [
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        node: "",
    },
    Names {
        launcher: Launcher::Pals,
        rank: "PALS_RANKID",
        size: "PMI_SIZE",
        local: "PALS_LOCAL_RANKID",
        local_size: "PALS_LOCAL_SIZE",
        node: "PALS_NODEID",
    },
    Names {
        launcher: Launcher::Hydra,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        node: "",
    },
    Names {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        size: "WORLD_SIZE",
        local: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
        node: "GROUP_RANK",
    },
    Names {
        launcher: Launcher::Kubernetes,
        rank: "JOB_COMPLETION_INDEX",
        size: "WORLD_SIZE",
        local: "",
        local_size: "",
        node: "JOB_COMPLETION_INDEX",
    },
    // SLURM_NTASKS and SLURM_PROCID are also there in a batch script that starts the program without `srun`; the step's variables are not
    Names {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local: "SLURM_LOCALID",
        local_size: "",
        node: "SLURM_NODEID",
    },
];

/// Port of a master that is named without one; torch's.
const DEFAULT_PORT: u16 = 29_500;

impl Launch {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// When a launcher left only some of its variables, or two disagree.
    pub fn detect() -> Result<Self, LaunchError> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    /// Reads variables through `get`.
    ///
    /// # Errors
    /// As [`detect`](Self::detect).
    pub fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, LaunchError> {
        let get = |name: &str| if name.is_empty() { None } else { get(name).filter(|value| !value.trim().is_empty()) };
        let mut found: Vec<(&Names, usize, usize)> = Vec::new();
        let mut partial = None;
        for names in &LAUNCHERS {
            match names.read(&get) {
                Ok(None) => {}
                Ok(Some((rank, size))) => found.push((names, rank, size)),
                // scripts export MASTER_ADDR and WORLD_SIZE beside a launcher that says everything
                Err(error @ LaunchError::Partial { .. }) => {
                    partial.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        if let (Some(error), true) = (partial, found.is_empty()) {
            return Err(error);
        }
        let nodes = number("SLURM_STEP_NUM_NODES", &get)?.or(number("SLURM_NNODES", &get)?);
        if found.len() > 1
            && found.iter().any(|(names, _, size)| names.launcher == Launcher::Slurm && Some(*size) == nodes)
        {
            // one task a node, which started another launcher
            found.retain(|(names, ..)| names.launcher != Launcher::Slurm);
        }
        if let [first, others @ ..] = found.as_slice()
            && let Some(other) = others.iter().find(|other| (other.1, other.2) != (first.1, first.2))
        {
            let says =
                |(names, rank, size): &(&Names, usize, usize)| format!("{} {rank}, {} {size}", names.rank, names.size);
            return Err(LaunchError::Disagree {
                first: first.0.launcher,
                first_says: says(first),
                second: other.0.launcher,
                second_says: says(other),
            });
        }
        let batch = get("SLURM_NTASKS").filter(|tasks| tasks != "1" && get("SLURM_STEP_NUM_TASKS").is_none());
        let Some((names, process, processes)) = found.first() else {
            let note = batch.map(|tasks| {
                format!("this Slurm job has {tasks} tasks, but the program was started without `srun`: one process runs alone")
            });
            return Ok(Self { note, ..Self::alone() });
        };
        let restarts = number("TORCHELASTIC_RESTART_COUNT", &get)?.or(number("SLURM_RESTART_COUNT", &get)?);
        let restarts = restarts.unwrap_or(0) as u32;
        let master = master(names.launcher, &get)?;
        Ok(Self {
            launcher: Some(names.launcher),
            process: *process,
            processes: *processes,
            local: number(names.local, &get)?.unwrap_or(0),
            local_processes: number(names.local_size, &get)?,
            node: number(names.node, &get)?,
            meeting: meeting(master.as_ref(), &get)?,
            master,
            job: job(restarts, &get),
            restarts,
            note: None,
        })
    }

    /// Returns which of the `visible` GPUs this process computes on: the one that it sees alone (`CUDA_VISIBLE_DEVICES` of each task), or the one with its number on the node.
    ///
    /// # Errors
    /// When there is none for it.
    pub fn gpu(&self, visible: usize) -> Result<usize, LaunchError> {
        match visible {
            1 => Ok(0),
            visible if self.local < visible => Ok(self.local),
            visible => Err(LaunchError::NoGpu { local: self.local, visible }),
        }
    }

    /// A process that nobody launched.
    #[must_use]
    pub fn alone() -> Self {
        Self {
            launcher: None,
            process: 0,
            processes: 1,
            local: 0,
            local_processes: Some(1),
            node: None,
            master: None,
            meeting: None,
            job: String::new(),
            restarts: 0,
            note: None,
        }
    }
}

impl Names {
    /// Returns number and count of processes; nothing if this launcher did not start them.
    fn read(&self, get: &dyn Fn(&str) -> Option<String>) -> Result<Option<(usize, usize)>, LaunchError> {
        // a pod of an indexed job that started torchrun
        if self.launcher == Launcher::Kubernetes && get("RANK").is_some() {
            return Ok(None);
        }
        let is_set = |name: &'static str| get(name).is_some();
        match (is_set(self.rank), is_set(self.size)) {
            (true, true) => {}
            // outside a step Slurm's variables say what a job may use, not who this is
            (true, false) if self.launcher == Launcher::Slurm => return Ok(None),
            (true, false) => {
                // the index of an indexed job is there for every program, the size only if somebody asks for it
                if self.launcher == Launcher::Kubernetes {
                    return Ok(None);
                }
                return Err(self.partial(self.rank, self.size));
            }
            (false, true) => {
                // another launcher's variable
                let shared = |other: &&Names| other.size == self.size && other.rank != self.rank && is_set(other.rank);
                if LAUNCHERS.iter().any(|other| shared(&other))
                    || self.launcher == Launcher::Kubernetes
                    || self.launcher == Launcher::Pals
                {
                    return Ok(None);
                }
                return Err(self.partial(self.size, self.rank));
            }
            (false, false) => {
                if self.launcher == Launcher::Torchrun && is_set(self.local) {
                    return Err(self.partial(self.local, self.rank));
                }
                return Ok(None);
            }
        }
        let (rank, size) = (number(self.rank, get)?.unwrap_or(0), number(self.size, get)?.unwrap_or(0));
        if rank >= size {
            return Err(LaunchError::OutOfRange { rank_name: self.rank, rank, size_name: self.size, size });
        }
        Ok(Some((rank, size)))
    }

    fn partial(&self, present: &'static str, missing: &'static str) -> LaunchError {
        LaunchError::Partial { launcher: self.launcher, present, missing }
    }
}

fn number(name: &'static str, get: &dyn Fn(&str) -> Option<String>) -> Result<Option<usize>, LaunchError> {
    let Some(value) = get(name) else { return Ok(None) };
    match value.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(LaunchError::NoNumber { name, value }),
    }
}

/// A port that a variable names.
fn port(name: &'static str, get: &dyn Fn(&str) -> Option<String>) -> Result<Option<u16>, LaunchError> {
    let Some(value) = get(name) else { return Ok(None) };
    let port = value.trim().parse::<u16>().ok().filter(|&port| port > 0);
    port.map(Some).ok_or(LaunchError::NoPort { name, value })
}

/// Where processes meet: `AUTODIDACT_STORE_PORT` of the master if it is set; else its own port, except where torchrun's agent listens there
/// (`TORCHELASTIC_USE_AGENT_STORE` is `True`, as torch's `env://` rendezvous reads it): then the port after it.
fn meeting(master: Option<&Master>, get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Master>, LaunchError> {
    let own = port("AUTODIDACT_STORE_PORT", get)?;
    let agent = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.trim() == "True");
    Ok(master.map(|master| {
        // the last port has none after it
        let after = master.port.checked_add(1).unwrap_or(master.port - 1);
        let port = own.unwrap_or(if agent { after } else { master.port });
        Master { host: master.host.clone(), port }
    }))
}

/// What the launcher calls the job, and how often it was started again.
fn job(restarts: u32, get: &dyn Fn(&str) -> Option<String>) -> String {
    let slurm = || get("SLURM_JOB_ID").map(|job| format!("{job}.{}", get("SLURM_STEP_ID").unwrap_or_default()));
    let name = get("AUTODIDACT_JOB").or_else(|| get("TORCHELASTIC_RUN_ID")).or_else(slurm).unwrap_or_default();
    if restarts == 0 { name } else { format!("{name}, restart {restarts}") }
}

/// `MASTER_ADDR` and `MASTER_PORT`, or the first host of a Slurm job and a port that follows from the job's number.
fn master(launcher: Launcher, get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Master>, LaunchError> {
    let port = port("MASTER_PORT", get)?;
    if let Some(host) = get("MASTER_ADDR") {
        return Ok(Some(Master { host, port: port.unwrap_or(DEFAULT_PORT) }));
    }
    if launcher != Launcher::Slurm {
        return Ok(None);
    }
    let hosts = get("SLURM_STEP_NODELIST").or_else(|| get("SLURM_JOB_NODELIST"));
    let job = number("SLURM_JOB_ID", get)?.unwrap_or(0);
    let by_job = 10_000 + (job % 50_000) as u16;
    Ok(hosts.map(|hosts| Master { host: first_host(&hosts), port: port.unwrap_or(by_job) }))
}

/// The first host of a list as Slurm writes it: `gpu[03-07,12]-ib,login` begins with `gpu03-ib`.
fn first_host(list: &str) -> String {
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().unwrap_or_default().trim().to_owned();
    };
    let (numbers, rest) = rest.split_once(']').unwrap_or((rest, ""));
    let first = numbers.split([',', '-']).next().unwrap_or_default();
    let suffix = rest.split(',').next().unwrap_or_default();
    format!("{}{first}{suffix}", prefix.trim())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn launch(variables: &str) -> Result<Launch, LaunchError> {
        let variables: BTreeMap<&str, &str> =
            variables.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
        Launch::from_variables(&|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    fn told(variables: &str) -> (Option<Launcher>, usize, usize, usize) {
        let launch = launch(variables).unwrap();
        (launch.launcher, launch.process, launch.processes, launch.local)
    }

    fn refused(variables: &str) -> String {
        launch(variables).unwrap_err().to_string()
    }

    #[test]
    fn nobody_launched_it() {
        assert_eq!(launch("PATH=/bin HOME=/root"), Ok(Launch::alone()));
        assert_eq!(launch("RANK= WORLD_SIZE="), Ok(Launch::alone()));
        // a pod of an indexed job that asks for nothing
        assert_eq!(launch("JOB_COMPLETION_INDEX=3"), Ok(Launch::alone()));
    }

    #[test]
    fn every_launcher() {
        let torchrun = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=a MASTER_PORT=1234 \
                        TORCHELASTIC_RESTART_COUNT=2";
        let expected = Launch {
            launcher: Some(Launcher::Torchrun),
            process: 5,
            processes: 8,
            local: 1,
            local_processes: Some(4),
            node: Some(1),
            master: Some(Master { host: "a".to_owned(), port: 1234 }),
            meeting: Some(Master { host: "a".to_owned(), port: 1234 }),
            job: ", restart 2".to_owned(),
            restarts: 2,
            note: None,
        };
        assert_eq!(launch(torchrun), Ok(expected));
        let open =
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2";
        assert_eq!(told(open), (Some(Launcher::OpenMpi), 3, 4, 1));
        assert_eq!(launch(open).unwrap().local_processes, Some(2));
        let hydra = "PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1";
        assert_eq!(told(hydra), (Some(Launcher::Hydra), 2, 3, 0));
        assert_eq!(told("PALS_RANKID=6 PALS_LOCAL_RANKID=2 PMI_RANK=6 PMI_SIZE=8"), (Some(Launcher::Pals), 6, 8, 2));
        assert_eq!(
            told("JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 MASTER_ADDR=job-0.svc"),
            (Some(Launcher::Kubernetes), 3, 4, 0)
        );
        let slurm = "SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_JOB_ID=123456 \
                     SLURM_STEP_NODELIST=gpu[03-04,09] SLURM_NNODES=3 SLURM_RESTART_COUNT=1 SLURM_NTASKS=16";
        let slurm = launch(slurm).unwrap();
        assert_eq!((slurm.launcher, slurm.process, slurm.processes, slurm.local), (Some(Launcher::Slurm), 9, 16, 1));
        assert_eq!((slurm.node, slurm.restarts), (Some(2), 1));
        assert_eq!(slurm.master.unwrap().to_string(), "gpu03:33456");
    }

    #[test]
    fn launchers_nest() {
        let inner = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1";
        // one torchrun a node, started by srun
        let outer = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=0";
        assert_eq!(told(&format!("{inner} {outer}")), (Some(Launcher::Torchrun), 5, 8, 1));
        // a wrapper that hands Open MPI's numbers on
        let wrapped = "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 RANK=5 WORLD_SIZE=8 MASTER_ADDR=n0";
        let wrapped = launch(wrapped).unwrap();
        assert_eq!((wrapped.launcher, wrapped.process), (Some(Launcher::OpenMpi), 5));
        assert_eq!(wrapped.master.unwrap().to_string(), "n0:29500");
        assert_eq!(
            told("JOB_COMPLETION_INDEX=1 RANK=5 WORLD_SIZE=8 LOCAL_RANK=1"),
            (Some(Launcher::Torchrun), 5, 8, 1)
        );
        let exported = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 WORLD_SIZE=2 MASTER_ADDR=n0 LOCAL_RANK=1";
        assert_eq!(told(exported), (Some(Launcher::OpenMpi), 1, 2, 0));
        // a batch script that forgot srun
        let batch = launch("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=1").unwrap();
        assert_eq!((batch.launcher, batch.processes), (None, 1));
        assert!(batch.note.unwrap().contains("without `srun`"));
    }

    #[test]
    fn half_of_the_variables_or_two_truths_are_refused() {
        let partial = refused("RANK=1");
        assert!(partial.starts_with("RANK is set and WORLD_SIZE is not, as torchrun would have it"), "{partial}");
        assert!(refused("WORLD_SIZE=4").starts_with("WORLD_SIZE is set and RANK is not"));
        assert!(refused("LOCAL_RANK=0").starts_with("LOCAL_RANK is set and RANK is not"));
        assert!(refused("OMPI_COMM_WORLD_RANK=0").contains("OMPI_COMM_WORLD_SIZE is not"));
        assert!(refused("PMI_RANK=0").contains("PMI_SIZE is not"));
        assert!(refused("RANK=x WORLD_SIZE=4").starts_with("RANK is \"x\", not a whole number"));
        assert!(
            refused("RANK=4 WORLD_SIZE=4").starts_with("RANK is 4, but there are 4 processes, 0 to 3 (WORLD_SIZE)")
        );
        assert!(refused("RANK=0 WORLD_SIZE=0").starts_with("RANK is 0, but there are 0 processes"));
        assert!(refused("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=99999").starts_with("MASTER_PORT is \"99999\""));
        let two = refused("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 RANK=1 WORLD_SIZE=4");
        assert!(
            two.starts_with(
                "two launchers disagree: Open MPI (OMPI_COMM_WORLD_RANK 0, OMPI_COMM_WORLD_SIZE 2) and torchrun"
            ),
            "{two}"
        );
        // four tasks on two nodes, each of which claims to be a whole world
        let slurm = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2";
        assert!(refused(&format!("RANK=0 WORLD_SIZE=2 {slurm}")).contains("torchrun (RANK 0, WORLD_SIZE 2) and Slurm"));
    }

    #[test]
    fn processes_meet_where_nobody_else_listens() {
        let place = |variables: &str| {
            let launch = launch(&format!("RANK=0 WORLD_SIZE=2 {variables}")).unwrap();
            (launch.meeting.map(|meeting| meeting.port), launch.job)
        };
        let master = "MASTER_ADDR=a MASTER_PORT=1234";
        assert_eq!(place(""), (None, String::new()));
        assert_eq!(place(master), (Some(1234), String::new()));
        // the agent of torchrun has its own store there
        let torchrun = "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=x";
        assert_eq!(place(&format!("{master} {torchrun}")), (Some(1235), "x".to_owned()));
        let last = place(&format!("MASTER_ADDR=a MASTER_PORT=65535 {torchrun} TORCHELASTIC_RESTART_COUNT=1"));
        assert_eq!(last, (Some(65534), "x, restart 1".to_owned()));
        assert_eq!(place(&format!("{master} TORCHELASTIC_USE_AGENT_STORE=False")).0, Some(1234));
        assert_eq!(
            place(&format!("{master} {torchrun} AUTODIDACT_STORE_PORT=99 AUTODIDACT_JOB=y")),
            (Some(99), "y".to_owned())
        );
        assert_eq!(place(&format!("{master} SLURM_JOB_ID=7 SLURM_STEP_ID=3")).1, "7.3");
        let wrong = refused(&format!("RANK=0 WORLD_SIZE=2 {master} AUTODIDACT_STORE_PORT=0"));
        assert!(wrong.starts_with("AUTODIDACT_STORE_PORT is \"0\", not a port"), "{wrong}");
    }

    #[test]
    fn every_process_of_a_node_has_a_gpu_or_is_refused() {
        let launch = launch("RANK=6 WORLD_SIZE=8 LOCAL_RANK=2").unwrap();
        assert_eq!([8, 3, 1].map(|visible| launch.gpu(visible)), [Ok(2), Ok(2), Ok(0)]);
        for visible in [0, 2] {
            let refused = launch.gpu(visible).unwrap_err().to_string();
            assert!(
                refused.starts_with(&format!("process 2 of its node has no GPU: {visible} are visible")),
                "{refused}"
            );
        }
        assert_eq!(Launch::alone().gpu(4), Ok(0));
    }

    #[test]
    fn the_first_host_of_a_list() {
        for (list, first) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("gpu[03-07,12]", "gpu03"),
            ("gpu[3]-ib,login", "gpu3-ib"),
            ("login,gpu[1-2]", "login"),
        ] {
            assert_eq!(first_host(list), first);
        }
    }
}
