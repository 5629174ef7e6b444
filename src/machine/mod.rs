//! What the machine is and has left: read off the system, without a library of its own. What cannot be found out is `None`.

mod cgroup;
mod gpu;
mod memory;
mod processor;
mod storage;

pub use gpu::{Gpu, GpuError, Nvidia, device_memory, gpus, nvidia};
pub use memory::{Memory, memory, peak_resident};
pub use processor::{Cores, cores, processor};
pub use storage::{free_disk, on_path, open_files};

use std::fs;

/// Reads a file of the system; nothing where there is none, as on other systems than Linux.
fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Returns what follows `name` and a colon in the first such line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start().strip_prefix(':')?.trim()))
}

/// Reads a size in kibibytes, as `/proc` writes it.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    Some(field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}
