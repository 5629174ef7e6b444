//! The processor and how much of it this process may use.

use super::cgroup::Groups;
use super::{field, read};

/// Returns the processor's name.
#[must_use]
pub fn processor() -> Option<String> {
    let text = read("/proc/cpuinfo")?;
    field(&text, "model name").filter(|name| !name.is_empty()).map(str::to_owned)
}

/// Cores, and who keeps some from this process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// What this process may use at a time.
    pub usable: usize,
    /// What the machine has.
    pub machine: Option<usize>,
    /// Those in the process's affinity mask.
    pub allowed: Option<usize>,
    /// Cores' worth of time that its control groups allow.
    pub quota: Option<f64>,
}

/// Counts the cores.
#[must_use]
pub fn cores() -> Cores {
    let status = read("/proc/self/status");
    let allowed = status.as_deref().and_then(|status| field(status, "Cpus_allowed_list"));
    Cores {
        usable: std::thread::available_parallelism().map_or(1, usize::from),
        machine: read("/sys/devices/system/cpu/online").and_then(|text| count(text.trim())),
        allowed: allowed.and_then(count),
        quota: Groups::own().cores(),
    }
}

/// Counts a list such as `0-3,8`.
fn count(list: &str) -> Option<usize> {
    list.split(',')
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            (last.parse::<usize>().ok()? + 1).checked_sub(first.parse().ok()?)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_counted() {
        let counts = ["0", "0-3", "0-3,8", "1,3-4", "", "x", "3-1"].map(count);
        assert_eq!(counts, [Some(1), Some(4), Some(5), Some(3), None, None, None]);
        assert!(cores().usable > 0);
    }
}
