//! Disks, open files and programs.

use std::path::{Path, PathBuf};

use super::read;

/// Returns the bytes that this user can still write to a folder, or to the first one around it that is there.
#[must_use]
pub fn free_disk(folder: &Path) -> Option<u64> {
    let whole = std::path::absolute(folder).ok()?;
    free(whole.ancestors().find(|folder| folder.is_dir())?)
}

#[cfg(unix)]
fn free(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(unix))]
fn free(_folder: &Path) -> Option<u64> {
    None
}

/// Returns how many files this process may have open; `u64::MAX` stands for no limit.
#[must_use]
pub fn open_files() -> Option<u64> {
    soft_limit(&read("/proc/self/limits")?)
}

fn soft_limit(text: &str) -> Option<u64> {
    let limit = text.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?;
    if limit == "unlimited" { Some(u64::MAX) } else { limit.parse().ok() }
}

/// Finds a program as a shell would.
#[must_use]
pub fn on_path(program: &str) -> Option<PathBuf> {
    let name = format!("{program}{}", std::env::consts::EXE_SUFFIX);
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(&name)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read() {
        let text = "Limit  Soft Limit  Hard Limit  Units\nMax processes  5  6  processes\nMax open files            1024     4096      files\n";
        assert_eq!(soft_limit(text), Some(1024));
        assert_eq!(soft_limit("Max open files  unlimited  unlimited  files"), Some(u64::MAX));
        assert_eq!(soft_limit("Max processes  5  6  processes"), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_is_not_there_lies_on_the_disk_around_it() {
        let folder = tempfile::tempdir().unwrap();
        let found = free_disk(&folder.path().join("runs/of/tomorrow")).unwrap();
        assert!(found > 0 && free_disk(folder.path()).is_some());
        assert!(on_path("sh").is_some() && on_path("no such program").is_none());
    }
}
