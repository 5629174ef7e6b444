//! Processes that MPI connects, through rsmpi (feature `mpi`).
//!
//! rsmpi and not ferrompi: it is the older and more used of the two, and works with the Open MPI 4 that distributions have, where ferrompi wants Open MPI 5 or
//! MPICH 4; the price is libclang while building. Its communicators cannot leave their thread, so one thread makes all calls and MPI need only
//! support that (`MPI_THREAD_FUNNELED`).
//!
//! Messages go from process to process, not through MPI's collectives: so the order of additions is ours, and a process that doesn't answer is known by name.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::request::{Request, StaticScope};
use mpi::topology::{Process, SimpleCommunicator};
use mpi::traits::{Communicator, Destination, MatchedReceiveVec, Source};

use super::collective::Aborted;
use super::transport::{Patience, Transport};

/// Tag of the messages of an operation.
const DATA: i32 = 1;
/// Tag of a reason to stop.
const STOP: i32 = 2;
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
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

enum Command {
    Exchange { operation: String, parts: Vec<Arc<Vec<u8>>>, deadline: Option<Duration>, reply: Reply },
    Stop { reason: String, said: Sender<()> },
    Finish,
}

type Reply = Sender<Result<Vec<Vec<u8>>, Aborted>>;

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
            serve(&world, &inbox, deadline);
            drop(universe); // MPI_Finalize, which waits for the others
        };
        let thread = thread::Builder::new().name("mpi".to_owned()).spawn(serve).map_err(|_| MpiError::NotStarted)?;
        let (process, processes) = told.recv().map_err(|_| MpiError::Started)?;
        Ok(Self { process, processes, commands: Mutex::new(commands), over: AtomicBool::new(false), thread: Mutex::new(Some(thread)) })
    }

    fn send(&self, command: Command) {
        // a thread that is gone answers nothing, which the caller notices
        let _ = self.commands.lock().unwrap_or_else(PoisonError::into_inner).send(command);
    }
}

impl Transport for Mpi {
    fn process(&self) -> usize {
        self.process
    }

    fn processes(&self) -> usize {
        self.processes
    }

    fn exchange(
        &self,
        operation: &str,
        parts: Vec<Arc<Vec<u8>>>,
        patience: Patience,
    ) -> Result<Vec<Vec<u8>>, Aborted> {
        let (reply, answer) = channel();
        let deadline = (patience == Patience::Deadline).then_some(Duration::ZERO);
        self.send(Command::Exchange { operation: operation.to_owned(), parts, deadline, reply });
        let outcome =
            answer.recv().unwrap_or_else(|_| Err(Aborted { reason: "the thread that speaks MPI is gone".to_owned() }));
        if outcome.is_err() {
            self.over.store(true, Ordering::Relaxed);
        }
        outcome
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

fn serve(world: &SimpleCommunicator, inbox: &Receiver<Command>, deadline: Duration) {
    while let Ok(command) = inbox.recv() {
        match command {
            Command::Exchange { operation, parts, deadline: limited, reply } => {
                let deadline = limited.map(|_| deadline);
                mpi::request::scope(|scope| {
                    let me = world.rank() as usize;
                    let peers = || (0..parts.len()).filter(|&peer| peer != me);
                    let mut sends: Vec<Request<'_, [u8], _>> = peers()
                        .map(|peer| at(world, peer).immediate_send_with_tag(scope, parts[peer].as_slice(), DATA))
                        .collect();
                    let mut received: Vec<Option<Vec<u8>>> = vec![None; parts.len()];
                    received[me] = Some(parts[me].to_vec());
                    let started = Instant::now();
                    let failure = loop {
                        for peer in peers() {
                            if received[peer].is_none()
                                && let Some(message) = at(world, peer).immediate_matched_probe_with_tag(DATA)
                            {
                                received[peer] = Some(message.matched_receive_vec().0);
                            }
                        }
                        sends = sends.into_iter().filter_map(|request| request.test().err()).collect();
                        if sends.is_empty() && received.iter().all(Option::is_some) {
                            break None;
                        }
                        if let Some(message) = world.any_process().immediate_matched_probe_with_tag(STOP) {
                            let (text, status): (Vec<u8>, _) = message.matched_receive_vec();
                            let text = String::from_utf8_lossy(&text);
                            break Some(format!("process {} stopped: {text}", status.source_rank()));
                        }
                        if let Ok(Command::Stop { reason, said }) = inbox.try_recv() {
                            say(world, &reason);
                            let _ = said.send(());
                            break Some(reason);
                        }
                        if deadline.is_some_and(|deadline| started.elapsed() > deadline) {
                            let reason = missing(&operation, &received, started.elapsed());
                            say(world, &reason);
                            break Some(reason);
                        }
                        pause(started.elapsed());
                    };
                    let Some(reason) = failure else {
                        let _ = reply.send(Ok(received.into_iter().flatten().collect()));
                        return;
                    };
                    let _ = reply.send(Err(Aborted { reason }));
                    // What was sent may never arrive, and MPI keeps its buffers until then: they stay, with this thread, until the process ends.
                    loop {
                        thread::park();
                    }
                });
            }
            Command::Stop { reason, said } => {
                say(world, &reason);
                let _ = said.send(());
            }
            Command::Finish => return,
        }
    }
}

fn at(world: &SimpleCommunicator, process: usize) -> Process<'_> {
    world.process_at_rank(process as i32)
}

/// Who has not been heard of, in words.
fn missing(operation: &str, received: &[Option<Vec<u8>>], waited: Duration) -> String {
    let absent: Vec<String> =
        (0..received.len()).filter(|&peer| received[peer].is_none()).map(|peer| peer.to_string()).collect();
    let seconds = waited.as_secs();
    match absent.as_slice() {
        [] => format!("the other processes did not take what was sent to them within {seconds} s, at {operation}"),
        [one] => format!("process {one} was not heard of for {seconds} s, at {operation}"),
        many => format!("processes {} were not heard of for {seconds} s, at {operation}", many.join(", ")),
    }
}

/// Tells every other process why to stop, and waits a little for that to leave.
fn say(world: &SimpleCommunicator, reason: &str) {
    // for ever, as a message to a process that is gone never leaves
    let text: &'static [u8] = Box::leak(reason.as_bytes().to_vec().into_boxed_slice());
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

/// Waits a moment: not at all at first, so that small messages are fast; then longer, so that a core is free for those that are waited for.
fn pause(waited: Duration) {
    match waited.as_micros() {
        0..50 => std::hint::spin_loop(),
        50..2000 => thread::sleep(Duration::from_micros(20)),
        _ => thread::sleep(Duration::from_micros(200)),
    }
}
