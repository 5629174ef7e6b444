//! Messages between the processes of a run.
//!
//! A [`Transport`] moves bytes; MPI is one. [`Link`] checks what it moves: every message says which operation of the sender it belongs to, so that
//! processes that have parted ways stop, and say where, instead of adding up the wrong numbers or waiting for ever.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::collective::Aborted;
use super::fault::Fault;

/// How long an operation waits for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Until the transport's deadline.
    Deadline,
    /// As long as it takes: the first process is busy with what only it does.
    Endless,
    /// Five seconds: all have waited before, and it is to be told who is missing.
    Brief,
}

/// How long [`Patience::Brief`] is.
pub(super) const BRIEF: std::time::Duration = std::time::Duration::from_secs(5);

/// Moves messages between processes. One thread of a process calls it.
pub trait Transport: Send + Sync {
    /// This process's number, from 0.
    fn process(&self) -> usize;

    /// Number of processes.
    fn processes(&self) -> usize;

    /// Sends `parts[p]` to process `p`, for every process, and returns what each process sent to this one, in their order.
    ///
    /// `operation` says in words what is waited for.
    ///
    /// # Errors
    /// When a process has failed, or is not heard of until the deadline.
    fn exchange(&self, operation: &str, parts: Vec<Arc<Vec<u8>>>, patience: Patience) -> Result<Vec<Vec<u8>>, Aborted>;

    /// Returns the sum of the values of all processes, in an order of the transport's own.
    ///
    /// # Errors
    /// When a process has failed, or the sum is not there until the deadline.
    fn sum(&self, operation: &str, values: Vec<f32>) -> Result<Vec<f32>, Aborted>;

    /// Tells every process to stop, and why. Any thread may call it.
    fn abort(&self, reason: &str);

    /// Ends the connection, when all is done. Every process does.
    fn finish(&self) {}
}

/// Small messages between processes, beside a transport that moves large ones by means that say neither who is missing nor why (NCCL). Any thread may call it.
pub trait Control: Send + Sync {
    /// This process's number, from 0.
    fn process(&self) -> usize;

    /// Number of processes.
    fn processes(&self) -> usize;

    /// Gives every process the bytes of all, in their order. All must be at the same `operation`.
    ///
    /// # Errors
    /// When a process has failed, is at another operation, or is not heard of until the deadline; all then stop.
    fn all_gather(&self, operation: &str, value: &[u8], patience: Patience) -> Result<Vec<Vec<u8>>, Aborted>;

    /// Returns why to stop, if another process has said so or is gone. Does not wait.
    fn heard(&self) -> Option<String>;

    /// Tells every process to stop, and why.
    fn abort(&self, reason: &str);

    /// Ends the connection, when all is done. Every process does.
    fn finish(&self);
}

/// Who has not been heard of, in words.
pub(super) fn missing(operation: &str, absent: &[usize], waited: std::time::Duration) -> String {
    let absent: Vec<String> = absent.iter().map(ToString::to_string).collect();
    let seconds = waited.as_secs();
    match absent.as_slice() {
        [one] => format!("process {one} was not heard of for {seconds} s, at {operation}"),
        many => format!("processes {} were not heard of for {seconds} s, at {operation}", many.join(", ")),
    }
}

/// Waits a moment: not at all at first, so that small messages are fast; then longer, so that a core is free for those that are waited for.
#[cfg(any(feature = "mpi", feature = "nccl", test))]
pub(super) fn pause(waited: std::time::Duration) {
    match waited.as_micros() {
        0..50 => std::hint::spin_loop(),
        50..2000 => std::thread::sleep(std::time::Duration::from_micros(20)),
        _ => std::thread::sleep(std::time::Duration::from_micros(200)),
    }
}

/// Types that travel, as the bytes that they are in memory: processes run on one type of processor.
pub(super) trait Element: bytemuck::Pod + Send + Sync {
    /// Name in messages.
    const NAME: &'static str;
}

impl Element for f32 {
    const NAME: &'static str = "f32";
}

impl Element for f64 {
    const NAME: &'static str = "f64";
}

impl Element for u64 {
    const NAME: &'static str = "u64";
}

impl Element for u8 {
    const NAME: &'static str = "u8";
}

/// A transport whose messages are checked.
pub struct Link {
    transport: Arc<dyn Transport>,
    /// Operations so far.
    sequence: AtomicU64,
    /// Bytes that this process has sent to others.
    sent: AtomicU64,
    fault: Option<Fault>,
}

impl Link {
    /// Checks the messages of a transport.
    #[must_use]
    pub fn new(transport: Arc<dyn Transport>) -> Self {
        Self {
            transport,
            sequence: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            fault: Fault::from_env().unwrap_or_default(),
        }
    }

    /// This process's number, from 0.
    #[must_use]
    pub fn process(&self) -> usize {
        self.transport.process()
    }

    /// Number of processes.
    #[must_use]
    pub fn processes(&self) -> usize {
        self.transport.processes()
    }

    /// Bytes that this process has sent to others, without those of [`Transport::sum`].
    #[must_use]
    pub fn bytes_sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Tells every process to stop, and why.
    pub fn abort(&self, reason: &str) {
        self.transport.abort(reason);
    }

    /// Waits until every process is here, however long that takes, and ends the connection.
    ///
    /// # Errors
    /// When a process has failed.
    pub fn finish(&self) -> Result<(), Aborted> {
        self.barrier("end of the run")?;
        self.transport.finish();
        Ok(())
    }

    /// Sends values to each process and returns what each sent here. `size` must be the same everywhere.
    pub(super) fn exchange<T: Element>(&self, name: &str, size: usize, parts: &[&[T]]) -> Result<Vec<Vec<T>>, Aborted> {
        let header = self.header::<T>(name, size);
        let parts = parts.iter().map(|part| {
            let mut bytes = Vec::with_capacity(header.len() + 1 + size_of_val(*part));
            bytes.extend_from_slice(header.as_bytes());
            bytes.push(0);
            bytes.extend_from_slice(bytemuck::cast_slice(part));
            Arc::new(bytes)
        });
        self.move_checked(&header, parts.collect(), Patience::Deadline)
    }

    /// Replaces values by their sum over all processes, in an order of the transport's own; all bring as many, in pieces of `piece`.
    pub(super) fn sum(&self, name: &str, tensors: &mut [Vec<f32>], piece: usize) -> Result<(), Aborted> {
        let size = tensors.iter().map(Vec::len).sum();
        let nothing: &[f32] = &[];
        self.exchange(name, size, &vec![nothing; self.processes()])?;
        let mut bucket: Vec<f32> = Vec::new();
        for start in (0..size).step_by(piece) {
            let range = start..size.min(start + piece);
            bucket.clear();
            cut(tensors, range.clone()).for_each(|values| bucket.extend_from_slice(values));
            bucket = self.transport.sum(name, bucket)?;
            put(tensors, range, &bucket);
        }
        Ok(())
    }

    /// Gives every process the values of all, in their order; lengths may differ.
    pub(super) fn all_gather<T: Element>(&self, name: &str, values: &[T]) -> Result<Vec<Vec<T>>, Aborted> {
        self.gather_patiently(name, values, Patience::Deadline)
    }

    fn gather_patiently<T: Element>(
        &self,
        name: &str,
        values: &[T],
        patience: Patience,
    ) -> Result<Vec<Vec<T>>, Aborted> {
        let header = self.header::<T>(name, 0);
        let mut bytes = header.clone().into_bytes();
        bytes.push(0);
        bytes.extend_from_slice(bytemuck::cast_slice(values));
        let bytes = Arc::new(bytes);
        self.move_checked(&header, vec![bytes; self.processes()], patience)
    }

    /// Waits until every process is here, however long that takes.
    ///
    /// # Errors
    /// When a process has failed.
    pub fn barrier(&self, name: &str) -> Result<(), Aborted> {
        self.gather_patiently::<u8>(name, &[], Patience::Endless).map(drop)
    }

    /// Gives every process the text of each.
    ///
    /// # Errors
    /// When a process has failed.
    pub fn all_gather_text(&self, name: &str, text: &str, patience: Patience) -> Result<Vec<String>, Aborted> {
        let all = self.gather_patiently(name, text.as_bytes(), patience)?;
        Ok(all.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect())
    }

    /// What an operation is, for people: the header of its messages.
    fn header<T: Element>(&self, name: &str, size: usize) -> String {
        let number = self.sequence.fetch_add(1, Ordering::Relaxed);
        if self.fault.is_some_and(|fault| fault.strike(self.process(), number)) {
            let _ = self.gather_patiently::<u8>("an extra gather", &[], Patience::Deadline);
        }
        let size = if size == 0 { String::new() } else { format!(", {size} values") };
        format!("operation {number}, {name} of {}{size}", T::NAME)
    }

    fn move_checked<T: Element>(
        &self,
        header: &str,
        parts: Vec<Arc<Vec<u8>>>,
        patience: Patience,
    ) -> Result<Vec<Vec<T>>, Aborted> {
        let others = parts.iter().enumerate().filter(|(process, _)| *process != self.process());
        self.sent.fetch_add(others.map(|(_, part)| part.len() as u64).sum(), Ordering::Relaxed);
        let received = self.transport.exchange(header, parts, patience)?;
        let mut values = Vec::with_capacity(received.len());
        for (process, bytes) in received.iter().enumerate() {
            let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
            let (theirs, rest) = bytes.split_at(end);
            if theirs != header.as_bytes() {
                let reason = format!(
                    "processes do different things: process {} is at {header}, process {process} at {}",
                    self.process(),
                    String::from_utf8_lossy(theirs)
                );
                self.abort(&reason);
                return Err(Aborted { reason });
            }
            values.push(bytemuck::pod_collect_to_vec(rest.get(1..).unwrap_or_default()));
        }
        Ok(values)
    }
}

/// The part of each tensor that lies in a range of their values, counted through all of them.
pub(super) fn cut(tensors: &[Vec<f32>], range: Range<usize>) -> impl Iterator<Item = &[f32]> {
    tensors.iter().scan(0, move |start, values| Some(&values[within(start, values.len(), &range)]))
}

/// Writes values to a range of them.
pub(super) fn put(tensors: &mut [Vec<f32>], range: Range<usize>, mut from: &[f32]) {
    let mut start = 0;
    for values in tensors {
        let within = within(&mut start, values.len(), &range);
        let (own, others) = from.split_at(within.len());
        values[within].copy_from_slice(own);
        from = others;
    }
}

/// Where `range` lies in a tensor of `length` that begins at `start`, which moves on to the next tensor.
fn within(start: &mut usize, length: usize, range: &Range<usize>) -> Range<usize> {
    let place = |at: usize| at.saturating_sub(*start).min(length);
    let within = place(range.start)..place(range.end);
    *start += length;
    within
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} of {}", self.process(), self.processes())
    }
}
