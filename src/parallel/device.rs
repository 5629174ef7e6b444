//! Processes whose messages a library of their devices moves. NCCL is one; a test has another.
//!
//! Such a library begins an operation and says at some time that it is done. It does not say who is missing, and nothing ends it but an abort. So every operation is
//! watched here: for errors of the library, for what other processes say through a [`Control`] beside it, and for the deadline; then they are asked who is there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::collective::Aborted;
use super::transport::{Control, Patience, Transport, pause};

/// How often it is asked what other processes say.
const ASK: Duration = Duration::from_millis(20);
/// How long to wait for a better reason than the library's: when a process is gone, its own word or its connection's end says more.
const BETTER_REASON: Duration = Duration::from_secs(2);

/// What a library does between processes: one operation at a time, which is begun, asked for and taken.
pub(super) trait Communicator: Send {
    /// Name in messages.
    const NAME: &'static str;

    /// Begins to give every process the bytes of all, as many from each.
    ///
    /// # Errors
    /// What the library says; as for all of them.
    fn all_gather(&mut self, own: &[u8]) -> Result<(), String>;

    /// Begins to send `parts[p]` to each process `p` and to receive `lengths[p]` bytes of it. This process's own part stays where it is: its length is 0.
    fn exchange(&mut self, parts: &[&[u8]], lengths: &[usize]) -> Result<(), String>;

    /// Begins to add up the values of all processes, in an order of its own.
    fn sum(&mut self, values: &[f32]) -> Result<(), String>;

    /// Tells whether what was begun is done. Does not wait.
    fn done(&mut self) -> Result<bool, String>;

    /// Returns what was received, in the order of processes.
    fn received(&mut self) -> Result<Vec<u8>, String>;

    /// Ends whatever is under way. Returns in any case, and nothing is begun after it.
    fn abort(&mut self);

    /// Begins to end the connection.
    fn finish(&mut self) -> Result<(), String>;
}

/// A transport over a communicator that is watched.
pub(super) struct DeviceTransport<C> {
    communicator: Mutex<C>,
    control: Arc<dyn Control>,
    deadline: Duration,
    over: Mutex<Option<Aborted>>,
}

impl<C: Communicator> DeviceTransport<C> {
    /// Watches `communicator`, with `control` between the same processes. An operation that is not done within `deadline` ends the run.
    pub(super) fn new(communicator: C, control: Arc<dyn Control>, deadline: Duration) -> Self {
        Self { communicator: Mutex::new(communicator), control, deadline, over: Mutex::new(None) }
    }

    /// Begins an operation, waits for its end and returns what `take` makes of it.
    ///
    /// # Errors
    /// When the library fails, another process stops, or it is not done by the deadline.
    pub(super) fn run<R>(
        &self,
        operation: &str,
        begin: impl FnOnce(&mut C) -> Result<(), String>,
        take: impl FnOnce(&mut C) -> Result<R, String>,
    ) -> Result<R, Aborted> {
        if let Some(aborted) = &*lock(&self.over) {
            return Err(aborted.clone());
        }
        let mut communicator = lock(&self.communicator);
        let outcome = self
            .watch(operation, &mut communicator, begin)
            .and_then(|()| take(&mut communicator).map_err(|reason| self.failed(operation, &reason)));
        outcome.inspect_err(|aborted| {
            // the others know by now: this may take its time
            communicator.abort();
            lock(&self.over).get_or_insert_with(|| aborted.clone());
        })
    }

    fn watch(
        &self,
        operation: &str,
        communicator: &mut C,
        begin: impl FnOnce(&mut C) -> Result<(), String>,
    ) -> Result<(), Aborted> {
        begin(communicator).map_err(|reason| self.failed(operation, &reason))?;
        let started = Instant::now();
        let mut asked = started;
        while !communicator.done().map_err(|reason| self.failed(operation, &reason))? {
            if asked.elapsed() > ASK {
                asked = Instant::now();
                if let Some(reason) = self.control.heard() {
                    return Err(Aborted { reason });
                }
            }
            if started.elapsed() > self.deadline {
                return Err(self.late(operation));
            }
            pause(started.elapsed());
        }
        Ok(())
    }

    /// The library says that something is wrong.
    fn failed(&self, operation: &str, reason: &str) -> Aborted {
        let noticed = Instant::now();
        while noticed.elapsed() < BETTER_REASON {
            if let Some(reason) = self.control.heard() {
                return Aborted { reason };
            }
            std::thread::sleep(ASK);
        }
        let reason = format!("{} failed at {operation}: {reason}", C::NAME);
        self.control.abort(&reason);
        Aborted { reason }
    }

    /// The deadline has passed: whoever is not here, or somewhere else, is named.
    fn late(&self, operation: &str) -> Aborted {
        let seconds = self.deadline.as_secs();
        let late = format!("{operation}, which {} did not finish within {seconds} s", C::NAME);
        if let Err(aborted) = self.control.all_gather(&late, &[], Patience::Brief) {
            return aborted;
        }
        let name = C::NAME;
        let reason = format!("{name} did not finish within {seconds} s, at {operation}, though every process is there");
        self.control.abort(&reason);
        Aborted { reason }
    }
}

impl<C: Communicator> Transport for DeviceTransport<C> {
    fn process(&self) -> usize {
        self.control.process()
    }

    fn processes(&self) -> usize {
        self.control.processes()
    }

    fn exchange(&self, operation: &str, parts: Vec<Arc<Vec<u8>>>, patience: Patience) -> Result<Vec<Vec<u8>>, Aborted> {
        let (me, processes) = (self.process(), self.processes());
        if patience != Patience::Deadline {
            // devices do not wait for long: processes meet first
            self.control.all_gather(operation, &[], patience)?;
        }
        let sizes: Vec<u64> = parts.iter().map(|part| part.len() as u64).collect();
        let all = self.run(operation, |c| c.all_gather(bytemuck::cast_slice(&sizes)), C::received)?;
        let all: Vec<u64> = bytemuck::pod_collect_to_vec(&all);
        let mut lengths: Vec<usize> = all.iter().skip(me).step_by(processes).map(|&length| length as usize).collect();
        lengths.resize(processes, 0);
        lengths[me] = 0;
        let mut sent: Vec<&[u8]> = parts.iter().map(|part| part.as_slice()).collect();
        sent[me] = &[];
        let received = self.run(operation, |c| c.exchange(&sent, &lengths), C::received)?;
        let mut rest = received.as_slice();
        let mut values: Vec<Vec<u8>> = Vec::with_capacity(processes);
        for length in lengths {
            let (value, tail) = rest.split_at(length.min(rest.len()));
            values.push(value.to_vec());
            rest = tail;
        }
        values[me] = Arc::unwrap_or_clone(parts.into_iter().nth(me).unwrap_or_default());
        Ok(values)
    }

    fn sum(&self, operation: &str, values: Vec<f32>) -> Result<Vec<f32>, Aborted> {
        if values.is_empty() {
            return Ok(values);
        }
        let total = self.run(operation, |c| c.sum(&values), C::received)?;
        Ok(bytemuck::pod_collect_to_vec(&total))
    }

    fn abort(&self, reason: &str) {
        // an operation under way on another thread hears of it through the control
        if lock(&self.over).is_none() {
            self.control.abort(reason);
        }
    }

    fn finish(&self) {
        // all is done and saved by now: if the end is not tidy, nothing is lost
        let _ = self.run("the end of the run", C::finish, |_| Ok(()));
        self.control.finish();
    }
}

/// Two processes that would compute on one device, if there are such. `places` has for each process what tells its device from all others.
pub(super) fn shared_device(places: &[String]) -> Option<(usize, usize)> {
    (0..places.len()).find_map(|second| {
        let first = places[..second].iter().position(|place| *place == places[second])?;
        Some((first, second))
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::collective::{Collective, Tensors, ThreadRank};
    use super::super::config::Reduction;
    use super::super::processes::ProcessRank;
    use super::super::store::Store;
    use super::super::transport::Link;
    use super::super::tree::{TreeSum, share};
    use super::*;

    /// Messages by sender and receiver.
    type Mail = Mutex<HashMap<(usize, usize), VecDeque<Vec<u8>>>>;

    /// A library whose devices are threads of the test.
    struct Memory {
        process: usize,
        processes: usize,
        mail: Arc<Mail>,
        waits: bool,
        adds: bool,
        received: Vec<u8>,
        operations: usize,
        fault: Fault,
        aborts: Arc<AtomicUsize>,
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Fault {
        None,
        /// From this operation on nothing leaves, and nothing arrives.
        Silent(usize),
        /// This operation fails.
        Error(usize),
    }

    impl Memory {
        fn post(&mut self, parts: &[&[u8]]) {
            self.operations += 1;
            self.waits = true;
            if matches!(self.fault, Fault::Silent(from) if from <= self.operations) {
                return;
            }
            let mut mail = lock(&self.mail);
            for (to, part) in parts.iter().enumerate() {
                mail.entry((self.process, to)).or_default().push_back(part.to_vec());
            }
        }
    }

    impl Communicator for Memory {
        const NAME: &'static str = "the library";

        fn all_gather(&mut self, own: &[u8]) -> Result<(), String> {
            self.adds = false;
            self.post(&vec![own; self.processes]);
            Ok(())
        }

        fn exchange(&mut self, parts: &[&[u8]], lengths: &[usize]) -> Result<(), String> {
            assert_eq!((parts[self.process].len(), lengths[self.process]), (0, 0));
            self.adds = false;
            self.post(parts);
            Ok(())
        }

        fn sum(&mut self, values: &[f32]) -> Result<(), String> {
            self.adds = true;
            self.post(&vec![bytemuck::cast_slice(values); self.processes]);
            Ok(())
        }

        fn done(&mut self) -> Result<bool, String> {
            if self.fault == Fault::Error(self.operations) {
                return Err("a cable is broken".to_owned());
            }
            let mut mail = lock(&self.mail);
            let from = |process: usize| (process, self.process);
            if !(0..self.processes).all(|process| mail.get(&from(process)).is_some_and(|queue| !queue.is_empty())) {
                return Ok(false);
            }
            let parts = (0..self.processes).filter_map(|process| mail.get_mut(&from(process))?.pop_front());
            let parts: Vec<Vec<u8>> = parts.collect();
            self.received = if self.adds {
                let values = parts.iter().map(|part| bytemuck::pod_collect_to_vec::<u8, f32>(part));
                let total = values.rev().reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect());
                bytemuck::cast_slice(&total.unwrap_or_default()).to_vec()
            } else {
                parts.concat()
            };
            self.waits = false;
            Ok(true)
        }

        fn received(&mut self) -> Result<Vec<u8>, String> {
            assert!(!self.waits, "asked for what is not there");
            Ok(std::mem::take(&mut self.received))
        }

        fn abort(&mut self) {
            self.aborts.fetch_add(1, Ordering::Relaxed);
        }

        fn finish(&mut self) -> Result<(), String> {
            self.adds = false;
            self.post(&vec![&[][..]; self.processes]);
            Ok(())
        }
    }

    /// Runs `work` in processes that are threads, which meet through a store on loopback; what they return, and the aborts.
    fn run<R: Send>(
        processes: usize,
        seconds: f32,
        faults: &[(usize, Fault)],
        work: impl Fn(&Arc<DeviceTransport<Memory>>) -> R + Sync,
    ) -> (Vec<R>, usize) {
        let deadline = Duration::from_secs_f32(seconds);
        let (mail, aborts) = (Arc::new(Mail::default()), Arc::new(AtomicUsize::new(0)));
        let transports: Vec<_> = Store::together(processes, Duration::from_secs(30))
            .into_iter()
            .enumerate()
            .map(|(process, store)| {
                let fault = faults.iter().find(|(whose, _)| *whose == process).map_or(Fault::None, |(_, fault)| *fault);
                let (mail, aborts) = (Arc::clone(&mail), Arc::clone(&aborts));
                let (waits, adds, received, operations) = (false, false, Vec::new(), 0);
                let memory = Memory { process, processes, mail, waits, adds, received, operations, fault, aborts };
                Arc::new(DeviceTransport::new(memory, Arc::new(store), deadline))
            })
            .collect();
        let work = &work;
        let results = std::thread::scope(|scope| {
            let threads: Vec<_> = transports.iter().map(|transport| scope.spawn(move || work(transport))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (results, aborts.load(Ordering::Relaxed))
    }

    fn rank(transport: &Arc<DeviceTransport<Memory>>, reduction: Reduction) -> (ProcessRank, Arc<Link>) {
        let transport: Arc<dyn Transport> = Arc::<DeviceTransport<Memory>>::clone(transport);
        let link = Arc::new(Link::new(transport));
        (ProcessRank::new(ThreadRank::world(1).remove(0), Arc::clone(&link), reduction), link)
    }

    fn leaf(index: usize) -> Tensors {
        let tensor = |length: usize| (0..length).map(|j| 1.0 / (index * 31 + j * 7 + 1) as f32).collect();
        vec![tensor(3), tensor(0), tensor(17), tensor(40)]
    }

    fn tree(leaves: usize) -> Tensors {
        let mut sum = TreeSum::new(leaves);
        (0..leaves).for_each(|index| sum.push_leaf(index, leaf(index)));
        sum.finish()
    }

    #[test]
    fn the_canonical_tree_has_the_same_bits_on_any_number_of_devices() {
        for leaves in [5, 8] {
            let expected = tree(leaves);
            for processes in 1..=5 {
                let (totals, aborts) = run(processes, 30.0, &[], |transport| {
                    let (rank, link) = rank(transport, Reduction::Canonical);
                    let mut sum = TreeSum::new(leaves);
                    share(leaves, rank.rank(), processes).for_each(|index| sum.push_leaf(index, leaf(index)));
                    let total = rank.reduce(leaves, sum.into_nodes()).unwrap().unwrap();
                    rank.wait_for_processes("a checkpoint").unwrap();
                    link.finish().unwrap();
                    total
                });
                assert!(totals.iter().all(|total| *total == expected), "{leaves} leaves on {processes}");
                assert_eq!(aborts, 0);
            }
        }
    }

    #[test]
    fn a_fast_sum_is_the_librarys_own() {
        let (totals, _) = run(3, 30.0, &[], |transport| {
            let (rank, _) = rank(transport, Reduction::Fast);
            let mut sum = TreeSum::new(6);
            share(6, rank.rank(), 3).for_each(|index| sum.push_leaf(index, leaf(index)));
            rank.reduce(6, sum.into_nodes()).unwrap().unwrap()
        });
        assert!(totals.iter().all(|total| *total == totals[0]));
        let expected = tree(6);
        for (got, expected) in totals[0].iter().flatten().zip(expected.iter().flatten()) {
            assert!((got - expected).abs() <= 1e-6, "{got} {expected}");
        }
    }

    #[test]
    fn messages_of_any_length_arrive_in_order() {
        let (all, _) = run(4, 30.0, &[], |transport| {
            let me = transport.process();
            let part = |to: usize| Arc::new(vec![(10 * me + to) as u8; me * to]);
            transport.exchange("an exchange", (0..4).map(part).collect(), Patience::Deadline).unwrap()
        });
        for (me, received) in all.iter().enumerate() {
            let expected: Vec<Vec<u8>> = (0..4).map(|from| vec![(10 * from + me) as u8; from * me]).collect();
            assert_eq!(*received, expected);
        }
    }

    #[test]
    fn a_device_that_never_answers_ends_all_at_the_deadline_with_the_operation() {
        // the second process has sent sizes, and then nothing; it waits itself, so every process is there
        let started = Instant::now();
        let (outcomes, aborts) = run(3, 1.0, &[(1, Fault::Silent(2))], |transport| {
            rank(transport, Reduction::Canonical).0.all_gather(vec![1.0]).unwrap_err().reason
        });
        for reason in &outcomes {
            let words = "the library did not finish within 1 s, at operation 0, all-gather of f32, though every process is there";
            assert!(reason.contains(words), "{reason}");
        }
        assert_eq!(aborts, 3);
        assert!(started.elapsed() < Duration::from_secs(8));
    }

    #[test]
    fn a_process_that_is_not_there_is_named_at_the_deadline() {
        let (outcomes, aborts) = run(3, 1.0, &[], |transport| {
            if transport.process() == 2 {
                // as if stopped: longer than the others wait, and ask
                let started = Instant::now();
                while transport.control.heard().is_none() && started.elapsed() < Duration::from_secs(20) {
                    std::thread::sleep(ASK);
                }
            }
            rank(transport, Reduction::Canonical).0.all_gather(vec![1.0]).unwrap_err().reason
        });
        for reason in &outcomes {
            let words = "process 2 was not heard of for 5 s, at operation 0, all-gather of f32, which the library did not finish within 1 s";
            assert_eq!(reason, words);
        }
        assert_eq!(aborts, 3);
    }

    #[test]
    fn an_error_of_the_library_ends_all_with_its_reason() {
        let (outcomes, aborts) = run(3, 30.0, &[(1, Fault::Error(2)), (2, Fault::Silent(2))], |transport| {
            rank(transport, Reduction::Canonical).0.all_gather(vec![1.0]).unwrap_err().reason
        });
        for reason in &outcomes {
            let words = "the library failed at operation 0, all-gather of f32: a cable is broken";
            assert!(reason.ends_with(words), "{reason}");
        }
        assert_eq!(aborts, 3);
    }

    #[test]
    fn a_failure_of_a_process_reaches_those_whose_devices_wait() {
        let (outcomes, aborts) = run(3, 30.0, &[], |transport| {
            if transport.process() == 1 {
                std::thread::sleep(Duration::from_millis(100));
                transport.abort("bad image");
                return "process 1 stopped: bad image".to_owned();
            }
            rank(transport, Reduction::Canonical).0.all_gather(vec![1.0]).unwrap_err().reason
        });
        assert_eq!(outcomes, ["process 1 stopped: bad image"; 3]);
        assert_eq!(aborts, 2);
    }

    #[test]
    fn processes_that_wait_at_different_places_are_both_named() {
        let (outcomes, _) = run(2, 1.0, &[], |transport| {
            let (rank, _) = rank(transport, Reduction::Canonical);
            let outcome = if transport.process() == 0 {
                rank.wait_for_processes("a checkpoint")
            } else {
                rank.all_gather(vec![1.0]).map(drop)
            };
            outcome.unwrap_err().reason
        });
        for reason in outcomes {
            assert!(reason.starts_with("processes do different things: process "), "{reason}");
            assert!(reason.contains("a checkpoint") && reason.contains("all-gather of f32"), "{reason}");
        }
    }

    #[test]
    fn two_processes_on_one_device_are_found() {
        let places = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<String>>();
        assert_eq!(shared_device(&places(&["a 0", "a 1", "b 0"])), None);
        assert_eq!(shared_device(&places(&["a 0", "a 1", "b 0", "a 1"])), Some((1, 3)));
    }
}
