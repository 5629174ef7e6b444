//! Processes that MPI connects, through rsmpi (feature `mpi`).
//!
//! rsmpi and not ferrompi: it is the older and more used of the two, and works with the Open MPI 4 that distributions have, where ferrompi wants Open MPI 5 or
//! MPICH 4; the price is libclang while building. Its communicators cannot leave their thread, so one thread makes all calls and MPI need only
//! support that (`MPI_THREAD_FUNNELED`).
//!
//! Messages go from process to process, not through MPI's collectives: so the order of additions is ours, and a process that doesn't answer is known by name. Only
//! the fast reduction is MPI's all-reduce; a check of the operation goes before it, process to process.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::collective::SystemOperation;
use mpi::request::{Request, Scope, StaticScope};
use mpi::topology::{Process, SimpleCommunicator};
use mpi::traits::{Communicator, CommunicatorCollectives, Destination, Equivalence, MatchedReceiveVec, Source};

use super::collective::Aborted;
use super::transport::{BRIEF, Control, Patience, Transport, missing, pause};

/// Tag of the messages of an operation.
const DATA: i32 = 1;
/// Tag of a reason to stop.
const STOP: i32 = 2;
/// Bytes of a reason to stop that travel.
const LONGEST: usize = 1024;
/// How long a reason to stop may take to leave.
const FAREWELL: Duration = Duration::from_secs(3);

/// Why MPI could not be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MpiError {
    /// Somebody else did.
    #[error("MPI was started before in this process")]
    Started,
    /// The thread is gone.
    #[error("MPI did not start")]
    NotStarted,
}

/// This process among those of `MPI_COMM_WORLD`.
pub struct Mpi {
    process: usize,
    processes: usize,
    commands: Mutex<Sender<Command>>,
    /// An operation has failed, or this process has said why to stop: the others know.
    over: AtomicBool,
    /// What another process has said while nothing was exchanged.
    heard: Mutex<Option<String>>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

enum Command {
    Exchange { operation: String, parts: Vec<Arc<Vec<u8>>>, patience: Patience, reply: Reply<Vec<Vec<u8>>> },
    Sum { operation: String, values: Vec<f32>, reply: Reply<Vec<f32>> },
    Stop { reason: String, said: Sender<()> },
    Heard { reply: Sender<Option<String>> },
    Finish,
}

type Reply<T> = Sender<Result<T, Aborted>>;

impl Mpi {
    /// Starts MPI. A process that is not heard of for `deadline` in an operation ends the run.
    ///
    /// # Errors
    /// When it is running already.
    pub fn start(deadline: Duration) -> Result<Self, MpiError> {
        let (commands, inbox) = channel();
        let (tell, told) = channel();
        let serve = move || {
            let Some((universe, _)) = mpi::initialize_with_threading(Threading::Funneled) else { return };
            let world = universe.world();
            let _ = tell.send((world.rank() as usize, world.size() as usize));
            if serve(&world, &inbox, deadline) {
                drop(universe); // MPI_Finalize, which waits for the others
            } else {
                // the process is about to end with an error; to finalize meanwhile would be a race
                loop {
                    thread::park();
                }
            }
        };
        let thread = thread::Builder::new().name("mpi".to_owned()).spawn(serve).map_err(|_| MpiError::NotStarted)?;
        let (process, processes) = told.recv().map_err(|_| MpiError::Started)?;
        Ok(Self {
            process,
            processes,
            commands: Mutex::new(commands),
            over: AtomicBool::new(false),
            heard: Mutex::new(None),
            thread: Mutex::new(Some(thread)),
        })
    }

    fn send(&self, command: Command) {
        // a thread that is gone answers nothing, which the caller notices
        let _ = self.commands.lock().unwrap_or_else(PoisonError::into_inner).send(command);
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, Aborted> {
        let (reply, answer) = channel();
        self.send(command(reply));
        let outcome =
            answer.recv().unwrap_or_else(|_| Err(Aborted { reason: "the thread that speaks MPI is gone".to_owned() }));
        if outcome.is_err() {
            self.over.store(true, Ordering::Relaxed);
        }
        outcome
    }
}

impl Transport for Mpi {
    fn process(&self) -> usize {
        self.process
    }

    fn processes(&self) -> usize {
        self.processes
    }

    fn exchange(&self, operation: &str, parts: Vec<Arc<Vec<u8>>>, patience: Patience) -> Result<Vec<Vec<u8>>, Aborted> {
        let operation = operation.to_owned();
        self.ask(|reply| Command::Exchange { operation, parts, patience, reply })
    }

    fn sum(&self, operation: &str, values: Vec<f32>) -> Result<Vec<f32>, Aborted> {
        let operation = operation.to_owned();
        self.ask(|reply| Command::Sum { operation, values, reply })
    }

    fn abort(&self, reason: &str) {
        if self.over.swap(true, Ordering::Relaxed) {
            return;
        }
        let (said, left) = channel();
        self.send(Command::Stop { reason: reason.to_owned(), said });
        // until it has left, or there is nobody to hear it
        let _ = left.recv_timeout(2 * FAREWELL);
    }

    fn finish(&self) {
        self.send(Command::Finish);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// Beside NCCL.
impl Control for Mpi {
    fn process(&self) -> usize {
        self.process
    }

    fn processes(&self) -> usize {
        self.processes
    }

    fn all_gather(&self, operation: &str, value: &[u8], patience: Patience) -> Result<Vec<Vec<u8>>, Aborted> {
        let part = Arc::new([operation.as_bytes(), &[0], value].concat());
        let received = Transport::exchange(self, operation, vec![part; self.processes], patience)?;
        let mut values = Vec::with_capacity(received.len());
        for (process, message) in received.iter().enumerate() {
            let (theirs, value) = message.split_at(message.iter().position(|&byte| byte == 0).unwrap_or(message.len()));
            if theirs != operation.as_bytes() {
                let theirs = String::from_utf8_lossy(theirs);
                let reason = format!(
                    "processes do different things: process {} is at {operation}, process {process} at {theirs}",
                    self.process
                );
                Transport::abort(self, &reason);
                return Err(Aborted { reason });
            }
            values.push(value.get(1..).unwrap_or_default().to_vec());
        }
        Ok(values)
    }

    fn heard(&self) -> Option<String> {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        // after a failure the thread answers no more
        if heard.is_none() && !self.over.load(Ordering::Relaxed) {
            let (reply, answer) = channel();
            self.send(Command::Heard { reply });
            *heard = answer.recv_timeout(FAREWELL).ok().flatten();
            if heard.is_some() {
                self.over.store(true, Ordering::Relaxed);
            }
        }
        heard.clone()
    }

    fn abort(&self, reason: &str) {
        Transport::abort(self, reason);
    }

    fn finish(&self) {
        Transport::finish(self);
    }
}

/// Does what it is told; true: until told that all is done.
fn serve(world: &SimpleCommunicator, inbox: &Receiver<Command>, deadline: Duration) -> bool {
    while let Ok(command) = inbox.recv() {
        match command {
            Command::Exchange { operation, parts, patience, reply } => {
                let deadline = match patience {
                    Patience::Deadline => Some(deadline),
                    Patience::Brief => Some(BRIEF),
                    Patience::Endless => None,
                };
                let received = exchange(world, inbox, &operation, &parts, deadline, &reply);
                let _ = reply.send(Ok(received));
            }
            Command::Sum { operation, values, reply } => {
                let total = sum(world, inbox, &operation, &values, deadline, &reply);
                let _ = reply.send(Ok(total));
            }
            Command::Stop { reason, said } => {
                say(world, &reason);
                let _ = said.send(());
            }
            Command::Heard { reply } => drop(reply.send(stopped_by_another(world))),
            Command::Finish => return true,
        }
    }
    false
}

/// Returns what every process sent. When that fails it answers itself and never returns ([`fail`]).
fn exchange(
    world: &SimpleCommunicator,
    inbox: &Receiver<Command>,
    operation: &str,
    parts: &[Arc<Vec<u8>>],
    deadline: Option<Duration>,
    reply: &Reply<Vec<Vec<u8>>>,
) -> Vec<Vec<u8>> {
    let me = world.rank() as usize;
    let peers = || (0..parts.len()).filter(|&peer| peer != me);
    let mut bodies: Vec<Vec<u8>> = vec![Vec::new(); parts.len()];
    bodies[me] = parts[me].to_vec();
    mpi::request::scope(|scope| {
        let mut sends: Vec<(usize, Request<'_, [u8], _>)> = peers()
            .map(|peer| (peer, at(world, peer).immediate_send_with_tag(scope, parts[peer].as_slice(), DATA)))
            .collect();
        // those whose message has not begun, and those whose message is under way
        let mut waiting: Vec<(usize, &mut Vec<u8>)> =
            bodies.iter_mut().enumerate().filter(|(peer, _)| *peer != me).collect();
        let mut receives: Vec<(usize, Request<'_, [u8], _>)> = Vec::new();
        let started = Instant::now();
        let reason = loop {
            for (peer, body) in std::mem::take(&mut waiting) {
                match at(world, peer).immediate_matched_probe_with_tag(DATA) {
                    Some((message, status)) => {
                        body.resize(status.count(u8::equivalent_datatype()) as usize, 0);
                        receives.push((peer, message.immediate_matched_receive_into(scope, body.as_mut_slice())));
                    }
                    None => waiting.push((peer, body)),
                }
            }
            receives = under_way(receives);
            sends = under_way(sends);
            if sends.is_empty() && receives.is_empty() && waiting.is_empty() {
                return;
            }
            if let Some(reason) = stopped(world, inbox) {
                break reason;
            }
            if deadline.is_some_and(|deadline| started.elapsed() > deadline) {
                // whoever sent nothing, or has not taken what was sent
                let absent = waiting.iter().map(|(peer, _)| *peer);
                let absent = absent.chain(receives.iter().chain(&sends).map(|(peer, _)| *peer));
                let absent = absent.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>();
                let reason = missing(operation, &absent, started.elapsed());
                say(world, &reason);
                break reason;
            }
            pause(started.elapsed());
        };
        fail(reply, reason)
    });
    bodies
}

/// Returns the sum over all processes, by MPI's all-reduce. When that fails it answers itself and never returns ([`fail`]).
fn sum(
    world: &SimpleCommunicator,
    inbox: &Receiver<Command>,
    operation: &str,
    values: &[f32],
    deadline: Duration,
    reply: &Reply<Vec<f32>>,
) -> Vec<f32> {
    let mut total = vec![0.0; values.len()];
    mpi::request::scope(|scope| {
        let started = Instant::now();
        let add = SystemOperation::sum();
        let mut request = world.immediate_all_reduce_into(scope, values, total.as_mut_slice(), add);
        let reason = loop {
            request = match request.test() {
                Ok(_) => return,
                Err(request) => request,
            };
            if let Some(reason) = stopped(world, inbox) {
                break reason;
            }
            if started.elapsed() > deadline {
                let seconds = started.elapsed().as_secs();
                let reason =
                    format!("MPI did not finish within {seconds} s, at {operation} of {} values", values.len());
                say(world, &reason);
                break reason;
            }
            pause(started.elapsed());
        };
        fail(reply, reason)
    });
    total
}

/// Answers that an operation failed, and ends here: what was sent may not arrive, and MPI keeps its buffers until then.
fn fail<T>(reply: &Reply<T>, reason: String) -> ! {
    let _ = reply.send(Err(Aborted { reason }));
    loop {
        thread::park();
    }
}

/// Why to stop, where another process or this one has said so.
fn stopped(world: &SimpleCommunicator, inbox: &Receiver<Command>) -> Option<String> {
    if let Some(reason) = stopped_by_another(world) {
        return Some(reason);
    }
    let Ok(Command::Stop { reason, said }) = inbox.try_recv() else { return None };
    say(world, &reason);
    let _ = said.send(());
    Some(reason)
}

/// Why to stop, where another process has said so.
fn stopped_by_another(world: &SimpleCommunicator) -> Option<String> {
    let message = world.any_process().immediate_matched_probe_with_tag(STOP)?;
    let (text, status): (Vec<u8>, _) = message.matched_receive_vec();
    Some(format!("process {} stopped: {}", status.source_rank(), String::from_utf8_lossy(&text)))
}

/// Keeps the requests that are not done.
fn under_way<'a, S: Scope<'a>>(requests: Vec<(usize, Request<'a, [u8], S>)>) -> Vec<(usize, Request<'a, [u8], S>)> {
    requests.into_iter().filter_map(|(peer, request)| Some((peer, request.test().err()?))).collect()
}

fn at(world: &SimpleCommunicator, process: usize) -> Process<'_> {
    world.process_at_rank(i32::try_from(process).expect("MPI counts processes with an int"))
}

/// Tells every other process why to stop, and waits a little for that to leave.
fn say(world: &SimpleCommunicator, reason: &str) {
    // short, so that it leaves even to a process that does not ask for it; kept for ever, as a message to one that is gone never leaves
    let short: Vec<u8> = reason.bytes().take(LONGEST).collect();
    let text: &'static [u8] = Box::leak(short.into_boxed_slice());
    let peers = (0..world.size()).filter(|&peer| peer != world.rank());
    let mut sends: Vec<Request<'static, [u8], StaticScope>> =
        peers.map(|peer| world.process_at_rank(peer).immediate_send_with_tag(StaticScope, text, STOP)).collect();
    let started = Instant::now();
    while !sends.is_empty() && started.elapsed() < FAREWELL {
        sends = sends.into_iter().filter_map(|request| request.test().err()).collect();
        pause(started.elapsed());
    }
    sends.into_iter().for_each(std::mem::forget);
}
