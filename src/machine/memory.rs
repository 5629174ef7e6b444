//! Memory: of the machine, and of this process.

use super::cgroup::Groups;
use super::{kibibytes, read};

/// Memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// What the machine has.
    pub total: u64,
    /// What could be had without swapping.
    pub available: u64,
    /// The limit of this process's control groups.
    pub limit: Option<u64>,
    /// What is used of that.
    pub limit_used: Option<u64>,
}

impl Memory {
    /// Returns what this process can still have.
    #[must_use]
    pub fn usable(&self) -> u64 {
        let within = self.limit.map(|limit| limit.saturating_sub(self.limit_used.unwrap_or(0)));
        within.map_or(self.available, |within| within.min(self.available))
    }
}

/// Looks at the memory.
#[must_use]
pub fn memory() -> Option<Memory> {
    let text = read("/proc/meminfo")?;
    let (limit, limit_used) = Groups::own().memory().unzip();
    Some(Memory {
        total: kibibytes(&text, "MemTotal")?,
        available: kibibytes(&text, "MemAvailable")?,
        limit,
        limit_used: limit_used.flatten(),
    })
}

/// Returns the most memory that this process has had at a time, in bytes.
#[must_use]
pub fn peak_resident() -> Option<u64> {
    kibibytes(&read("/proc/self/status")?, "VmHWM")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_usable_ends_at_the_tighter_limit() {
        let memory = Memory { total: 100, available: 60, limit: None, limit_used: None };
        assert_eq!(memory.usable(), 60);
        assert_eq!(Memory { limit: Some(50), limit_used: Some(20), ..memory }.usable(), 30);
        assert_eq!(Memory { limit: Some(90), ..memory }.usable(), 60);
        assert_eq!(Memory { limit: Some(10), limit_used: Some(20), ..memory }.usable(), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_some() {
        let memory = memory().unwrap();
        assert!(memory.total > memory.available && memory.available > 0, "{memory:?}");
        assert!((1 << 20..memory.total).contains(&peak_resident().unwrap()));
    }
}
