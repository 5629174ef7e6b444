//! `autodidact doctor`: what this machine has for training, and what it costs where something lacks.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};

use super::print;
use crate::backend;
use crate::cli::DoctorArgs;
use crate::error::Failure;
use crate::machine::{self, Gpu, GpuError};
use crate::ops;
use crate::report::cpu_features;

/// Version of the JSON's format.
const FORMAT: u32 = 1;
const GIB: u64 = 1 << 30;
/// Weights and two moments of `AdamW` of a ViT-B take 12 bytes for each of 86 million parameters.
const DISK: u64 = 2 * GIB;
/// docs/cpu-speed.md has steps of 0.6 to 2.2 GiB.
const MEMORY: u64 = 4 * GIB;
const OPEN_FILES: u64 = 256;

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// As it should be.
    Ok,
    /// Not there.
    Missing,
    /// There, and something is to be known about it.
    Note,
}

/// One line.
#[derive(Clone, Debug, Serialize)]
struct Check {
    key: &'static str,
    state: State,
    text: String,
    /// What it costs, and what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
    /// The same for machines.
    facts: Value,
}

impl Check {
    fn ok(key: &'static str, text: impl Into<String>, facts: Value) -> Self {
        Self { key, state: State::Ok, text: text.into(), advice: None, facts }
    }

    fn missing(self, advice: impl Into<String>) -> Self {
        Self { state: State::Missing, advice: Some(advice.into()), ..self }
    }

    fn note(self, advice: impl Into<String>) -> Self {
        Self { state: State::Note, advice: Some(advice.into()), ..self }
    }

    /// The same, with advice where there is some.
    fn noted(self, advice: Option<impl Into<String>>) -> Self {
        match advice {
            Some(advice) => self.note(advice),
            None => self,
        }
    }
}

pub(super) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let mut checks = vec![build(), processor(), instructions(), cores(), memory()];
    checks.push(disk("disk", "the current folder", Path::new(".")));
    checks.push(disk("run-disk", &args.run_dir.display().to_string(), &args.run_dir));
    checks.push(open_files());
    checks.extend(cuda());
    checks.extend([nccl(), mpi()]);
    if args.json {
        let all = json!({ "format": FORMAT, "autodidact": env!("CARGO_PKG_VERSION"), "checks": checks });
        return print(format_args!("{all:#}"));
    }
    print(table(&checks))
}

fn table(checks: &[Check]) -> String {
    let mut text = String::new();
    for Check { key, state, text: value, advice, .. } in checks {
        let state = match state {
            State::Ok => "ok",
            State::Missing => "missing",
            State::Note => "note",
        };
        let _ = writeln!(text, "{state:<8} {key:<12} {value}");
        if let Some(advice) = advice {
            let _ = writeln!(text, "{:<8} {:<12}   {advice}", "", "");
        }
    }
    text.trim_end().to_owned()
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / GIB as f64)
}

fn build() -> Check {
    let all = [("cuda", cfg!(feature = "cuda")), ("nccl", cfg!(feature = "nccl")), ("mpi", cfg!(feature = "mpi"))];
    let features: Vec<&str> = all.into_iter().filter_map(|(name, has)| has.then_some(name)).collect();
    let (version, commit) = (env!("CARGO_PKG_VERSION"), option_env!("AUTODIDACT_COMMIT"));
    let shown = if features.is_empty() { "none (for the CPU)".to_owned() } else { features.join(", ") };
    let from = commit.map_or(String::new(), |commit| format!(" of commit {commit}"));
    let facts = json!({ "version": version, "commit": commit, "features": features });
    Check::ok("build", format!("autodidact {version}{from}, features: {shown}"), facts)
}

fn processor() -> Check {
    let (name, arch, os) = (machine::processor(), std::env::consts::ARCH, std::env::consts::OS);
    let facts = json!({ "name": name, "arch": arch, "os": os });
    Check::ok("processor", format!("{}, {arch}, {os}", name.unwrap_or_else(unknown)), facts)
}

fn instructions() -> Check {
    let (features, set) = (cpu_features(), ops::instruction_set());
    let facts = json!({ "features": features, "instruction_set": set });
    let advice = match set {
        "avx512f" => None,
        "avx2+fma" => Some(
            "no AVX-512: matrix products take AVX2, and AVX-512 made them about half as fast again where it was measured; the bits of results are those of AVX2 machines",
        ),
        "neon" => {
            Some("NEON: operations are compiled for it, and have not been measured or tested on such a processor")
        }
        _ => Some(
            "no AVX2 and FMA: operations are compiled for the oldest processors of this kind and are slow; use another machine for more than small tests",
        ),
    };
    let has = if features.is_empty() { "none that matter".to_owned() } else { features.join(", ") };
    Check::ok("instructions", format!("{has}; operations run with {set}"), facts).noted(advice)
}

fn cores() -> Check {
    let machine::Cores { usable, machine, allowed, quota } = machine::cores();
    let facts = json!({ "usable": usable, "machine": machine, "affinity": allowed, "cgroup": quota });
    let of = machine.map_or(String::new(), |machine| format!(" of {machine}"));
    let check = Check::ok("cores", format!("{usable}{of} usable"), facts);
    let kept = match (machine, allowed, quota) {
        (Some(machine), _, Some(quota)) if quota < machine as f64 => {
            Some(format!("a control group allows the time of {quota}"))
        }
        (Some(machine), Some(allowed), _) if allowed < machine => {
            Some("the affinity mask of this process leaves out the others".to_owned())
        }
        _ => None,
    };
    match kept {
        Some(kept) => check.note(format!("{kept}: `--ranks auto` starts no more than {usable} ranks, which is what uses cores; ask the container, batch system or `mpirun --bind-to none` for more")),
        None if usable == 1 => check.note("one core: images are decoded on the core that trains, and there is nothing for a second rank"),
        None => check,
    }
}

fn memory() -> Check {
    let Some(memory) = machine::memory() else { return Check::ok("memory", unknown(), Value::Null) };
    let machine::Memory { total, available, limit, limit_used } = memory;
    let usable = memory.usable();
    let facts = json!({ "total_bytes": total, "available_bytes": available, "cgroup_bytes": limit, "cgroup_used_bytes": limit_used, "usable_bytes": usable });
    let mut text = format!("{} free of {}", gib(available), gib(total));
    if let Some(limit) = limit {
        let used = limit_used.map_or(String::new(), |used| format!(", {} of it used", gib(used)));
        let _ = write!(text, "; a control group allows {}{used}", gib(limit));
    }
    let advice = (usable < MEMORY).then(|| {
        format!("{} are little: the training steps in docs/cpu-speed.md take 0.6 to 2.2 GiB; a smaller `batch.micro` or fewer ranks take less", gib(usable))
    });
    Check::ok("memory", text, facts).noted(advice)
}

fn disk(key: &'static str, name: &str, folder: &Path) -> Check {
    let free = machine::free_disk(folder);
    let facts = json!({ "folder": folder.display().to_string(), "free_bytes": free });
    let Some(free) = free else { return Check::ok(key, format!("{name}: {}", unknown()), facts) };
    let advice = (free < DISK).then_some(
        "a checkpoint of 86 million parameters with AdamW takes 1 GiB, and `checkpoint.keep` of them are kept; free some space, or train elsewhere with `--run-dir`",
    );
    Check::ok(key, format!("{} free in {name}", gib(free)), facts).noted(advice)
}

fn open_files() -> Check {
    let limit = machine::open_files();
    let facts = json!({ "limit": limit.filter(|limit| *limit != u64::MAX), "unlimited": limit == Some(u64::MAX) });
    let text = match limit {
        None => unknown(),
        Some(u64::MAX) => "no limit".to_owned(),
        Some(limit) => format!("at most {limit}"),
    };
    let advice = limit.filter(|limit| *limit < OPEN_FILES).map(|_| {
        "few: loader threads, logs, a file of weights in many parts and connections to other processes each take one; `ulimit -n 1024` raises it"
    });
    Check::ok("open-files", text, facts).noted(advice)
}

/// The driver, and a line for each GPU.
fn cuda() -> Vec<Check> {
    let (found, nvidia, asked) = (backend::has_cuda_driver(), machine::nvidia(), machine::gpus());
    let driver = nvidia.as_ref().and_then(|nvidia| nvidia.driver.clone());
    let (cuda, gpus) = match &asked {
        Ok((cuda, gpus)) => (Some(cuda), gpus.as_slice()),
        Err(_) => (None, [].as_slice()),
    };
    let facts = json!({ "found": found || asked.is_ok(), "version": driver, "cuda": cuda });
    let version = driver.map_or(String::new(), |version| format!(" {version}"));
    let check = |text: String| Check::ok("cuda-driver", text, facts.clone());
    let to_build = "training runs on the CPU; `cargo build --features cuda` builds for GPUs";
    let check = match &asked {
        Ok((cuda, _)) if cfg!(feature = "cuda") => check(format!("driver{version}, CUDA {cuda}")),
        Ok((cuda, _)) => {
            check(format!("driver{version}, CUDA {cuda}")).note(format!("this build has no `cuda`: {to_build}"))
        }
        Err(GpuError::NotBuiltIn) if found || nvidia.is_some() => {
            check(format!("driver{version} is installed")).note(format!("this build is for the CPU: {to_build}"))
        }
        Err(error @ GpuError::Driver { .. }) => check(error.to_string())
            .note("training runs on the CPU; `nvidia-smi` shows whether the driver and its GPUs are well"),
        Err(_) => check("none found".to_owned()).missing("no CUDA driver: training runs on the CPU"),
    };
    let mut checks = vec![check];
    checks.extend(gpus.iter().enumerate().map(|(index, gpu)| gpu_line(index, gpu)));
    if gpus.is_empty() {
        // of those that the driver cannot be asked about the kernel knows the names
        let names = nvidia.map_or_else(Vec::new, |nvidia| nvidia.names);
        let line = |(index, name): (usize, &String)| {
            Check::ok("gpu", format!("{index}: {name}"), json!({ "index": index, "name": name }))
        };
        checks.extend(names.iter().enumerate().map(line));
    }
    checks
}

fn gpu_line(index: usize, gpu: &Gpu) -> Check {
    let Gpu { name, memory, capability: [major, minor] } = gpu;
    let bf16 = gpu.has_bf16();
    let has = if bf16 { "bf16" } else { "no bf16" };
    let text = format!("{index}: {name}, {}, compute capability {major}.{minor}, {has}", gib(*memory));
    let facts = json!({ "index": index, "name": name, "memory_bytes": memory, "compute_capability": [major, minor], "bf16": bf16 });
    let advice = (!bf16).then_some(
        "`precision.compute` is \"fp32\" by default here; \"fp16\", with its scale of the loss, takes half the memory for what products see",
    );
    Check::ok("gpu", text, facts).noted(advice)
}

#[cfg(feature = "nccl")]
fn nccl() -> Check {
    let version = crate::parallel::nccl_version();
    let check = |text: String| Check::ok("nccl", text, json!({ "built_in": true, "version": version.as_ref().ok() }));
    match &version {
        Ok(version) => check(version.clone()),
        Err(error) => {
            let text = error.to_string();
            let (text, hint) = text.split_once("\nhint: ").unwrap_or((&text, "see docs/distributed.md"));
            check(text.to_owned()).missing(format!("a run has one process, with one GPU; {hint}"))
        }
    }
}

#[cfg(not(feature = "nccl"))]
fn nccl() -> Check {
    let facts = json!({ "built_in": false, "version": null });
    Check::ok("nccl", "not in this build", facts)
        .missing("GPUs of several processes cannot be connected; `cargo build --features cuda` has it")
}

fn mpi() -> Check {
    let launcher = ["mpirun", "mpiexec", "srun"].into_iter().find(|name| machine::on_path(name).is_some());
    let built_in = cfg!(feature = "mpi");
    let facts = json!({ "built_in": built_in, "launcher": launcher });
    let started = launcher
        .map_or_else(|| "no launcher (`mpirun`, `srun`) in PATH".to_owned(), |name| format!("`{name}` is in PATH"));
    let check = Check::ok("mpi", format!("{} this build; {started}", if built_in { "in" } else { "not in" }), facts);
    match (built_in, launcher) {
        (true, Some(_)) => check,
        (true, None) => check.note("a run has one process; install the MPI that autodidact was built with, or put its folder into PATH"),
        (false, _) => check.missing("a run on CPUs has one process, whose ranks use the cores of one machine; `cargo build --features mpi` connects several"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_that_is_not_ok_says_what_to_do() {
        let mut checks = vec![build(), processor(), instructions(), cores(), memory(), open_files(), nccl(), mpi()];
        checks.extend(cuda());
        let old = Gpu { name: "Old".to_owned(), memory: 16 * GIB, capability: [7, 5] };
        checks.extend([gpu_line(0, &old), gpu_line(1, &Gpu { capability: [9, 0], ..old.clone() })]);
        for check in &checks {
            assert_eq!(check.state == State::Ok, check.advice.is_none(), "{check:?}");
            assert!(!check.text.is_empty() && !check.text.contains('\n'), "{check:?}");
        }
        let text = table(&checks);
        assert!(text.contains("note     gpu          0: Old, 16.0 GiB, compute capability 7.5, no bf16\n"), "{text}");
        assert!(text.contains("ok       gpu          1: Old, 16.0 GiB, compute capability 9.0, bf16"), "{text}");
    }
}
