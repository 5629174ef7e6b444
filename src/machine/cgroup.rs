//! Limits of control groups, in which containers and batch systems run a process; both versions.
//! <https://docs.kernel.org/admin-guide/cgroup-v2.html>

use std::fs;
use std::path::{Path, PathBuf};

use super::read;

/// Where they are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// The groups of a process, those around them included.
pub(super) struct Groups {
    root: PathBuf,
    /// `/proc/self/cgroup`.
    text: String,
}

impl Groups {
    /// Those of this process.
    pub(super) fn own() -> Self {
        Self { root: ROOT.into(), text: read("/proc/self/cgroup").unwrap_or_default() }
    }

    /// Returns how many cores' worth of time the process may use.
    pub(super) fn cores(&self) -> Option<f64> {
        let number = |text: &str| text.parse::<f64>().ok().filter(|number| *number > 0.0);
        let quota = |folder: &Path, unified: bool| {
            if unified {
                let text = value(folder, "cpu.max")?;
                let (quota, period) = text.split_once(' ')?;
                return Some(number(quota)? / number(period)?);
            }
            Some(number(&value(folder, "cpu.cfs_quota_us")?)? / number(&value(folder, "cpu.cfs_period_us")?)?)
        };
        self.folders("cpu").filter_map(|(folder, unified)| quota(&folder, unified)).reduce(f64::min)
    }

    /// Returns the smallest limit of memory, and what its group uses.
    pub(super) fn memory(&self) -> Option<(u64, Option<u64>)> {
        let limit = |folder: &Path, unified: bool| {
            let [limit, used] = if unified {
                ["memory.max", "memory.current"]
            } else {
                ["memory.limit_in_bytes", "memory.usage_in_bytes"]
            };
            let number = |name| value(folder, name)?.parse::<u64>().ok();
            // without a limit version 1 has a number near 2^63
            Some((number(limit).filter(|limit| *limit < 1 << 60)?, number(used)))
        };
        let limits = self.folders("memory").filter_map(|(folder, unified)| limit(&folder, unified));
        limits.min_by_key(|(limit, _)| *limit)
    }

    /// Lists the folders that limit what `controller` hands out, and whether they are of version 2.
    fn folders(&self, controller: &str) -> impl Iterator<Item = (PathBuf, bool)> {
        self.text
            .lines()
            .filter_map(move |line| {
                let mut parts = line.splitn(3, ':').skip(1);
                let (controllers, path) = (parts.next()?, parts.next()?);
                let unified = controllers.is_empty();
                if !unified && !controllers.split(',').any(|name| name == controller) {
                    return None;
                }
                let base = if unified { self.root.clone() } else { self.root.join(controller) };
                // a container may see its own group as the root
                let around = Path::new(path).ancestors().map(|path| base.join(path.strip_prefix("/").unwrap_or(path)));
                Some(around.map(move |folder| (folder, unified)).collect::<Vec<_>>())
            })
            .flatten()
    }
}

fn value(folder: &Path, name: &str) -> Option<String> {
    Some(fs::read_to_string(folder.join(name)).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(text: &str, files: &[(&str, &str)]) -> (Option<f64>, Option<(u64, Option<u64>)>) {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let groups = Groups { root: root.path().to_owned(), text: text.to_owned() };
        (groups.cores(), groups.memory())
    }

    #[test]
    fn the_tightest_group_counts_in_both_versions() {
        let unified = [
            ("a/b/cpu.max", "max 100000\n"),
            ("a/cpu.max", "150000 100000\n"),
            ("a/b/memory.max", "max\n"),
            ("a/memory.max", "4096\n"),
            ("a/memory.current", "1024\n"),
            ("memory.max", "8192\n"),
        ];
        assert_eq!(groups("0::/a/b\n", &unified), (Some(1.5), Some((4096, Some(1024)))));
        let first = [
            ("cpu/cpu.cfs_quota_us", "-1\n"),
            ("cpu/job/cpu.cfs_quota_us", "50000\n"),
            ("cpu/job/cpu.cfs_period_us", "100000\n"),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/job/memory.limit_in_bytes", "2048\n"),
        ];
        assert_eq!(groups("4:memory:/job\n1:cpu,cpuacct:/job\n", &first), (Some(0.5), Some((2048, None))));
    }

    #[test]
    fn without_groups_nothing_is_limited() {
        assert_eq!(groups("", &[]), (None, None));
        assert_eq!(groups("0::/gone\nnonsense\n", &[("cpu.max", "max 100000")]), (None, None));
    }
}
