//! Valid files with bytes changed, cut, doubled and moved: no panic, no hang, no more memory than the file can back.
//!
//! A few thousand changes, always the same, with `cargo test`; ten minutes of others with
//!
//!     AUTODIDACT_FUZZ_SECONDS=600 cargo test --lib interop::tests::fuzz
//!
//! The changes run in a process of their own, so that its memory is theirs alone.

use std::process::Command;
use std::time::{Duration, Instant};

use super::write::{archive, legacy, safetensors, training};
use super::{tiny_vit, use_up};

const CHILD: &str = "AUTODIDACT_FUZZ_CHILD";
const SECONDS: &str = "AUTODIDACT_FUZZ_SECONDS";
const CHANGES: u64 = 4000;
/// More than this beyond what the process had before: far above what files of 5 kB need, far below what they can claim.
const MOST_MEMORY: u64 = 64 << 20;

fn seeds() -> Vec<Vec<u8>> {
    let tensors = tiny_vit().tensors();
    let (pickle, storages) = training(&tensors);
    let members: Vec<(&str, &[u8])> = storages.iter().map(|(key, bytes)| (key.as_str(), bytes.as_slice())).collect();
    let counted: Vec<(&str, u64, &[u8])> =
        storages.iter().map(|(key, bytes)| (key.as_str(), bytes.len() as u64 / 4, bytes.as_slice())).collect();
    vec![safetensors(&tensors), archive(&pickle, &members), legacy(&pickle, &counted)]
}

#[test]
fn the_files_that_are_changed_are_valid() {
    for seed in seeds() {
        let (_folder, path) = super::on_disk("weights", &seed);
        assert!(use_up(&path).is_ok(), "{:?}", use_up(&path));
    }
}

/// Splitmix64 (Steele, Lea, Flood, 2014).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

fn change(file: &mut Vec<u8>, draws: &mut Draws) {
    const NUMBERS: [u64; 8] = [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, u64::MAX / 2, u64::MAX];
    // structure lies in front and at the end, numbers in the middle
    let len = file.len();
    let at = match draws.below(3) {
        0 => draws.below(len.min(512)),
        1 => len.saturating_sub(1 + draws.below(len.min(2048))),
        _ => draws.below(len),
    };
    match draws.below(8) {
        0 => file[at] ^= 1 << draws.below(8),
        1 => file[at] = draws.next() as u8,
        2 => {
            let number = NUMBERS[draws.below(NUMBERS.len())].to_le_bytes();
            let count = [1, 2, 4, 8][draws.below(4)].min(len - at);
            file[at..at + count].copy_from_slice(&number[..count]);
        }
        3 => file.truncate(at.max(1)),
        4 => {
            let end = (at + 1 + draws.below(16)).min(len);
            file.drain(at..end);
        }
        5 => {
            let end = (at + 1 + draws.below(64)).min(len);
            let part = file[at..end].to_vec();
            file.splice(at..at, part);
        }
        6 => {
            let (from, count) = (draws.below(len), 1 + draws.below(32));
            for i in 0..count {
                if from + i < len && at + i < len {
                    file[at + i] = file[from + i];
                }
            }
        }
        _ => file.insert(at, draws.next() as u8),
    }
    if file.is_empty() {
        file.push(0);
    }
}

/// Most memory that this process has had.
fn peak() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
}

#[test]
fn changed_files_are_read_or_refused() {
    if std::env::var_os(CHILD).is_none() {
        let name = std::thread::current().name().expect("tests have names").to_owned();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env(CHILD, "1")
            .output();
        let output = child.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        return;
    }
    let seconds: Option<u64> = std::env::var(SECONDS).ok().and_then(|text| text.parse().ok());
    let begun = Instant::now();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    let seeds = seeds();
    let before = peak();
    let (mut number, mut taken) = (0, 0);
    while seconds.map_or(number < CHANGES, |seconds| begun.elapsed() < Duration::from_secs(seconds)) {
        let mut draws = Draws(number);
        let mut file = seeds[number as usize % seeds.len()].clone();
        for _ in 0..=draws.below(4) {
            change(&mut file, &mut draws);
        }
        std::fs::write(&path, &file).unwrap();
        let started = Instant::now();
        let outcome = std::panic::catch_unwind(|| use_up(&path).is_ok());
        assert!(outcome.is_ok(), "change {number} panics");
        assert!(started.elapsed() < Duration::from_secs(10), "change {number} takes {:?}", started.elapsed());
        taken += u64::from(outcome.unwrap_or(false));
        number += 1;
    }
    if let (Some(before), Some(after)) = (before, peak()) {
        assert!(after - before < MOST_MEMORY, "{} bytes more than before", after - before);
    }
    eprintln!("{number} changed files, {taken} of them still valid, {:?}", begun.elapsed());
}
