//! A process that is asked in lines and answers each with a line of numbers.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each bench uses a part")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};

pub struct Peer {
    process: Child,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let answers = BufReader::new(process.stdout.take().context("a pipe")?);
        Ok(Self { process, answers })
    }

    pub fn ask(&mut self, question: &str) -> Result<Vec<f64>> {
        writeln!(self.process.stdin.as_mut().context("a pipe")?, "{question}")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the other side ended early; is everything that it imports installed?");
        let number = |word: &str| word.parse().with_context(|| format!("the other side said: {line}"));
        line.split_whitespace().map(number).collect()
    }

    /// Peak of resident memory so far (Linux).
    pub fn peak_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
        kib.map_or(f64::NAN, |kib| kib / 1024.0)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.process.stdin.take()); // tells it to end
        let _ = self.process.wait();
    }
}

pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
