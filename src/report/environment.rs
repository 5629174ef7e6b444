//! `environment.json`: on what a run ran.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::files::{FileError, write_json};

/// Libraries whose version can change the bits of a run, as locked in `Cargo.lock` (a test compares).
const LIBRARIES: [(&str, &str); 7] = [
    ("burn", "0.22.1"),
    ("burn-flex", "0.22.1"),
    ("fast_image_resize", "6.1.0"),
    ("gemm", "0.19.0"),
    ("image", "0.25.10"),
    ("rand_chacha", "0.10.0"),
    ("zune-jpeg", "0.5.15"),
];

/// Environment variables that change how a run computes.
const VARIABLES: [&str; 3] = ["AUTODIDACT_FAULT", "CUDA_VISIBLE_DEVICES", "RAYON_NUM_THREADS"];

/// What a process was and where it ran. Names neither host nor user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Start of the process, ISO 8601 in UTC.
    pub started: String,
    /// Command line.
    pub command: Vec<String>,
    /// Version of this package.
    pub version: String,
    /// Commit it was built from, when the builder set `AUTODIDACT_COMMIT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Whether CUDA is built in.
    pub cuda: bool,
    /// Versions of libraries that can change the bits.
    pub libraries: BTreeMap<String, String>,
    /// Version of the key derivation of random numbers.
    pub rng: String,
    /// Operating system.
    pub os: String,
    /// Processor architecture.
    pub arch: String,
    /// Vector instructions that kernels choose from.
    pub cpu_features: Vec<String>,
    /// Instruction set that our operations run with; results are the same bits on machines with the same one.
    pub instruction_set: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// Processes of the run.
    #[serde(default)]
    pub processes: usize,
    /// Rank threads of all of them.
    #[serde(default)]
    pub ranks: usize,
    /// Variables that are set and change how a run computes.
    pub variables: BTreeMap<String, String>,
}

impl Environment {
    /// Looks at the process and the machine.
    pub fn collect(command: Vec<String>, started: SystemTime, [processes, ranks]: [usize; 2]) -> Self {
        let variable = |name: &&str| Some(((*name).to_owned(), std::env::var(name).ok()?));
        Self {
            started: utc(started),
            command,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: option_env!("AUTODIDACT_COMMIT").map(str::to_owned),
            cuda: cfg!(feature = "cuda"),
            libraries: LIBRARIES.map(|(name, version)| (name.to_owned(), version.to_owned())).into(),
            rng: "autodidact rng v1 (BLAKE3 keys, ChaCha8)".to_owned(),
            os: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            cpu_features: cpu_features().into_iter().map(str::to_owned).collect(),
            instruction_set: crate::ops::instruction_set().to_owned(),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            processes,
            ranks,
            variables: VARIABLES.iter().filter_map(variable).collect(),
        }
    }

    /// Adds this start to `environment.json` in the run folder: an array, one object for each start of the run. A file
    /// that cannot be read as such is replaced.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), FileError> {
        let path = folder.join("environment.json");
        let old = std::fs::read(&path).ok();
        let mut starts: Vec<Self> = old.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        starts.push(self.clone());
        write_json(&path, &starts)
    }
}

/// Lists the vector instructions that kernels choose from, as the processor has them.
#[cfg(target_arch = "x86_64")]
pub(crate) fn cpu_features() -> Vec<&'static str> {
    let known = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    known.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
}

/// Lists the vector instructions that kernels choose from.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn cpu_features() -> Vec<&'static str> {
    if cfg!(target_feature = "neon") { vec!["neon"] } else { Vec::new() }
}

/// Writes a time as `2026-11-30T07:02:46Z`; times before 1970 as 1970.
pub fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // civil_from_days, https://howardhinnant.github.io/date_algorithms.html: eras of 400 years that begin on 1 March
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_in_utc() {
        let at = |seconds| utc(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(951_868_800), "2000-03-01T00:00:00Z");
        assert_eq!(at(1_767_225_599), "2025-12-31T23:59:59Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00Z");
        assert_eq!(utc(UNIX_EPOCH - Duration::from_secs(5)), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn library_versions_are_those_of_the_lock_file() {
        let lock = include_str!("../../Cargo.lock");
        for (name, version) in LIBRARIES {
            let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
            assert!(lock.contains(&entry), "Cargo.lock has another version of {name} than {version}");
        }
    }

    #[test]
    fn every_start_of_a_run_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let start = Environment::collect(vec!["autodidact".to_owned()], SystemTime::now(), [2, 4]);
        assert!(start.cores > 0);
        std::fs::write(folder.path().join("environment.json"), "torn").unwrap();
        start.write(folder.path()).unwrap();
        start.write(folder.path()).unwrap();
        let text = std::fs::read_to_string(folder.path().join("environment.json")).unwrap();
        let read: Vec<Environment> = serde_json::from_str(&text).unwrap();
        assert_eq!(read, [start.clone(), start]);
    }
}
