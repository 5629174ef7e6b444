//! `autodidact launch-info`.

use super::{print, say};
use crate::error::{Failure, Kind};
use crate::parallel::Launch;

pub(super) fn run() -> Result<(), Failure> {
    let launch = Launch::detect().map_err(|error| Failure::new(Kind::Usage, error))?;
    if let Some(note) = &launch.note {
        say(&format!("note: {note}"));
    }
    let unknown = || "not said".to_owned();
    let number = |number: Option<usize>| number.map_or_else(unknown, |number| number.to_string());
    let rows = [
        ("launcher", launch.launcher.map_or_else(|| "none".to_owned(), |launcher| launcher.to_string())),
        ("process", format!("{} of {}", launch.process, launch.processes)),
        ("on this node", format!("{} of {}", launch.local, number(launch.local_processes))),
        ("node", number(launch.node)),
        ("master", launch.master.map_or_else(unknown, |master| master.to_string())),
        ("restarts", launch.restarts.to_string()),
    ];
    // one write, so that the tables of several processes do not mix
    let rows: Vec<String> = rows.iter().map(|(name, value)| format!("{name:<14} {value}")).collect();
    print(rows.join("\n"))
}
