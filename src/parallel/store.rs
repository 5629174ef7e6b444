//! Where processes meet that no MPI connects: those of torchrun, of an indexed job of Kubernetes, of `srun` without MPI.
//!
//! The first process listens, every process (it too) connects, and who is there says who it is. Then they share small values, collectively: NCCL's unique id, facts of
//! the launch, at the end the reason of one that fails. It carries no gradients, and nothing larger than [`LARGEST`]; that is NCCL's business.
//!
//! A gather takes the place of the set, get and barrier of other stores: whoever waits for a key that is never set cannot say who should have set it, whereas a gather knows
//! who is missing and at which operation everybody is.
//!
//! Messages are a length, a kind and a body; what is read is bounded in size and, until a process has said who it is, in time. The name of the job in the first message keeps jobs apart that meet
//! on one port by mistake. It is no secret: the port belongs into the cluster's own network.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::collective::Aborted;
use super::launch::Master;
use super::transport::{BRIEF, Control, Patience, missing};

/// First bytes of each side.
const MAGIC: &[u8; 16] = b"autodidact-store";
/// Version of what follows them.
const PROTOCOL: u32 = 1;
/// Bytes of the message in which a process says who it is.
const LONGEST_HELLO: usize = 4 << 10;
/// Bytes of a value, and of a reason to stop.
const LARGEST: usize = 64 << 10;
/// How long a connection may take to say who it is, and to take what is sent to it.
const PROMPT: Duration = Duration::from_secs(10);
/// How long an attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(3);
/// How much longer than its deadline a process waits for the one that listens to say who is missing.
const GRACE: Duration = Duration::from_secs(10);
/// How long a reason to stop, and the end of all, may take to arrive.
const FAREWELL: Duration = Duration::from_secs(3);
/// Memory of the thread of a connection: there is one for each process.
const STACK: usize = 256 << 10;

/// Who meets, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Where the first process listens.
    pub master: Master,
    /// Name of the job, the same for all its processes and no other job's.
    pub job: String,
    /// This program, as far as it must be the same everywhere.
    pub build: String,
    /// Number of this process, from 0.
    pub process: usize,
    /// Number of processes.
    pub processes: usize,
    /// How long to wait for the others.
    pub deadline: Duration,
}

/// Why processes do not meet.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another program has the port.
    #[error(
        "process 0 cannot listen on port {port}: it is in use\nhint: another program has it, perhaps a run that has not ended; set MASTER_PORT or AUTODIDACT_STORE_PORT to a free one, the same for all processes"
    )]
    PortInUse {
        /// The port.
        port: u16,
    },
    /// The port cannot be had.
    #[error(
        "process 0 cannot listen on port {port}: {cause}\nhint: ports below 1024 are the system's; set MASTER_PORT or AUTODIDACT_STORE_PORT, the same for all processes"
    )]
    NoPort {
        /// The port.
        port: u16,
        /// What the system says.
        cause: io::Error,
    },
    /// The name of the first process's host is unknown.
    #[error(
        "process {process} cannot find the host `{host}` (MASTER_ADDR) within {seconds} s: {cause}\nhint: `getent hosts {host}` on its node tells what the name is; an address does too"
    )]
    UnknownHost {
        /// This process.
        process: usize,
        /// The name.
        host: String,
        /// How long it was tried.
        seconds: u64,
        /// What the system says.
        cause: String,
    },
    /// Nobody listens.
    #[error(
        "process {process} cannot reach process 0 at {master} within {seconds} s: {cause}\nhint: process 0 may not have started, or a firewall is between the nodes; MASTER_ADDR and MASTER_PORT are where it listens, see `autodidact launch-info`"
    )]
    Unreachable {
        /// This process.
        process: usize,
        /// Where.
        master: Master,
        /// How long it was tried.
        seconds: u64,
        /// The last failure.
        cause: String,
    },
    /// Somebody else listens.
    #[error(
        "another program listens at {master} (it said {said}), where process 0 should\nhint: set MASTER_PORT or AUTODIDACT_STORE_PORT to a free port, the same for all processes"
    )]
    Stranger {
        /// Where.
        master: Master,
        /// Its first bytes.
        said: String,
    },
    /// Process 0 does not want this one.
    #[error(
        "process 0 at {master} refuses process {process}: {reason}\nhint: every process of a job needs its own number, and the same job, program and number of processes; `autodidact launch-info` shows them"
    )]
    Refused {
        /// This process.
        process: usize,
        /// Where.
        master: Master,
        /// Why.
        reason: String,
    },
    /// The system gives no thread.
    #[error("no thread for the meeting of processes: {0}\nhint: `ulimit -u` limits them")]
    NoThread(io::Error),
    /// A process failed, or did not come.
    #[error(transparent)]
    Aborted(#[from] Aborted),
}

/// What a process says first.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Hello {
    protocol: u32,
    job: String,
    build: String,
    process: usize,
    processes: usize,
    /// Host and process id, for people.
    place: String,
    /// When it started, in nanoseconds: tells a second attempt of one process from two processes.
    started: u128,
}

impl Hello {
    fn of(meeting: &Meeting) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let started = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self {
            protocol: PROTOCOL,
            job: meeting.job.clone(),
            build: meeting.build.clone(),
            process: meeting.process,
            processes: meeting.processes,
            place: format!("{}, pid {}", host.trim(), std::process::id()),
            started: started.as_nanos(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    /// Who it is.
    Hello = 1,
    /// It may stay.
    Welcome,
    /// It may not, and why.
    Refused,
    /// A value for all.
    Gather,
    /// The values of all.
    All,
    /// Why to stop.
    Stop,
    /// All is done.
    Bye,
}

impl Kind {
    fn read(byte: u8) -> Option<Self> {
        use Kind::{All, Bye, Gather, Hello, Refused, Stop, Welcome};
        [Hello, Welcome, Refused, Gather, All, Stop, Bye].into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// The connection of a process with the others.
pub struct Store {
    process: usize,
    processes: usize,
    master: Master,
    deadline: Duration,
    stream: Mutex<TcpStream>,
    inbox: Arc<Inbox>,
    /// Gathers so far.
    number: Mutex<u64>,
    /// In the first process.
    hub: Option<Arc<Hub>>,
}

/// What the others have sent to a process.
#[derive(Default)]
struct Inbox {
    state: Mutex<Received>,
    changed: Condvar,
}

#[derive(Default)]
struct Received {
    /// The gather that is complete, and its values.
    all: Option<(u64, Vec<Vec<u8>>)>,
    stopped: Option<String>,
    done: bool,
}

impl Store {
    /// Meets the other processes: the first one listens, all connect, and each waits until every one is there.
    ///
    /// # Errors
    /// When the first process cannot listen, another cannot reach it or is not wanted, or not all have come by the deadline.
    pub fn open(meeting: &Meeting) -> Result<Self, StoreError> {
        let listener = if meeting.process == 0 { Some(listen(meeting.master.port)?) } else { None };
        Self::join(meeting, listener)
    }

    /// The same with a listener that is there already, in the first process.
    fn join(meeting: &Meeting, listener: Option<TcpListener>) -> Result<Self, StoreError> {
        let started = Instant::now();
        let hello = Hello::of(meeting);
        let mut hub = None;
        let mut master = meeting.master.clone();
        if let Some(listener) = listener {
            master.port = listener.local_addr().map_or(master.port, |address| address.port());
            hub = Some(Hub::start(listener, &hello).map_err(StoreError::NoThread)?);
        }
        // the first process need not find itself by a name that may be meant for others
        let own = hub.is_some().then(|| {
            vec![
                SocketAddr::from((Ipv4Addr::LOCALHOST, master.port)),
                SocketAddr::from((Ipv6Addr::LOCALHOST, master.port)),
            ]
        });
        let connected = connect(meeting, &master, own.as_deref(), &hello, started);
        if let (Err(_), Some(hub)) = (&connected, &hub) {
            hub.close();
        }
        let stream = connected?;
        let inbox = Arc::new(Inbox::default());
        let reader = stream.try_clone().map_err(StoreError::NoThread)?;
        let received = Arc::clone(&inbox);
        let thread = thread::Builder::new().name("store".to_owned()).stack_size(STACK);
        thread.spawn(move || received.fill(reader)).map_err(StoreError::NoThread)?;
        let store = Self {
            process: meeting.process,
            processes: meeting.processes,
            master,
            deadline: meeting.deadline,
            stream: Mutex::new(stream),
            inbox,
            number: Mutex::new(0),
            hub,
        };
        store.gather("the start", &[], Some(meeting.deadline.saturating_sub(started.elapsed())))?;
        Ok(store)
    }

    fn send(&self, kind: Kind, body: &[u8]) -> io::Result<()> {
        write_frame(&mut lock(&self.stream), kind, body)
    }

    fn gather(&self, operation: &str, value: &[u8], deadline: Option<Duration>) -> Result<Vec<Vec<u8>>, Aborted> {
        if value.len() > LARGEST {
            let reason =
                format!("{operation} has {} bytes, and the store of the launch carries {LARGEST}", value.len());
            self.abort(&reason);
            return Err(Aborted { reason });
        }
        let mut count = lock(&self.number);
        *count += 1;
        let number = *count;
        let body = encode_gather(number, deadline, operation, value);
        if let Err(error) = self.send(Kind::Gather, &body) {
            self.inbox.stop(format!("process 0 is gone ({error})"));
        }
        // process 0 says who is missing; where it does not, it is missing itself
        let limit = deadline.map(|deadline| deadline + GRACE);
        let started = Instant::now();
        let mut state = lock(&self.inbox.state);
        loop {
            // what has arrived counts, even if the others have ended since
            if let Some((_, values)) = state.all.take_if(|(complete, _)| *complete == number) {
                return Ok(values);
            }
            if let Some(reason) = &state.stopped {
                return Err(Aborted { reason: reason.clone() });
            }
            let left = limit.map(|limit| limit.saturating_sub(started.elapsed()));
            if left == Some(Duration::ZERO) {
                return Err(Aborted { reason: missing(operation, &[0], started.elapsed()) });
            }
            let wait = left.unwrap_or(GRACE);
            state = self.inbox.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Control for Store {
    fn process(&self) -> usize {
        self.process
    }

    fn processes(&self) -> usize {
        self.processes
    }

    fn all_gather(&self, operation: &str, value: &[u8], patience: Patience) -> Result<Vec<Vec<u8>>, Aborted> {
        let deadline = match patience {
            Patience::Deadline => Some(self.deadline),
            Patience::Brief => Some(BRIEF),
            Patience::Endless => None,
        };
        self.gather(operation, value, deadline)
    }

    fn heard(&self) -> Option<String> {
        lock(&self.inbox.state).stopped.clone()
    }

    fn abort(&self, reason: &str) {
        if self.heard().is_some() || self.send(Kind::Stop, shorten(reason).as_bytes()).is_err() {
            return;
        }
        // it comes back when the others have it
        let state = lock(&self.inbox.state);
        let waiting = |state: &mut Received| state.stopped.is_none();
        drop(self.inbox.changed.wait_timeout_while(state, FAREWELL, waiting));
    }

    fn finish(&self) {
        lock(&self.inbox.state).done = true;
        let _ = self.send(Kind::Bye, &[]);
        if let Some(hub) = &self.hub {
            hub.wait_for_goodbyes();
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = lock(&self.stream).shutdown(Shutdown::Both);
        if let Some(hub) = &self.hub {
            hub.close();
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {} at {}", self.process, self.processes, self.master)
    }
}

impl Inbox {
    /// Reads what comes, until the connection ends.
    fn fill(&self, mut stream: TcpStream) {
        loop {
            match read_frame(&mut stream, usize::MAX) {
                Ok((Kind::All, body)) => {
                    lock(&self.state).all = decode_all(&body);
                    self.changed.notify_all();
                }
                Ok((Kind::Stop, body)) => self.stop(String::from_utf8_lossy(&body).into_owned()),
                Ok(_) => {}
                Err(error) => {
                    if !lock(&self.state).done {
                        self.stop(format!("process 0 is gone ({error})"));
                    }
                    return;
                }
            }
        }
    }

    /// The first reason stays.
    fn stop(&self, reason: String) {
        lock(&self.state).stopped.get_or_insert(reason);
        self.changed.notify_all();
    }
}

/// What the first process does for all.
struct Hub {
    hello: Hello,
    members: Mutex<Members>,
    changed: Condvar,
}

struct Members {
    peers: Vec<Option<Peer>>,
    /// The gather that is under way.
    gather: Option<Gathering>,
    stopped: Option<String>,
    /// Connections that were none of ours.
    strangers: Vec<String>,
    closed: bool,
}

struct Peer {
    hello: Hello,
    stream: TcpStream,
    left: bool,
}

struct Gathering {
    number: u64,
    /// Who came first, and for what.
    first: (usize, String),
    started: Instant,
    /// The first of the deadlines of those that wait.
    until: Option<Instant>,
    values: Vec<Option<Vec<u8>>>,
}

impl Hub {
    fn start(listener: TcpListener, hello: &Hello) -> io::Result<Arc<Self>> {
        let peers = (0..hello.processes).map(|_| None).collect();
        let members = Members { peers, gather: None, stopped: None, strangers: Vec::new(), closed: false };
        let hub = Arc::new(Self { hello: hello.clone(), members: Mutex::new(members), changed: Condvar::new() });
        listener.set_nonblocking(true)?;
        let own = Arc::clone(&hub);
        thread::Builder::new().name("store-hub".to_owned()).spawn(move || own.listen(&listener))?;
        Ok(hub)
    }

    /// Takes connections, and sees to deadlines.
    fn listen(self: &Arc<Self>, listener: &TcpListener) {
        while !lock(&self.members).closed {
            match listener.accept() {
                Ok((stream, address)) => {
                    let hub = Arc::clone(self);
                    let thread = thread::Builder::new().name("store-peer".to_owned()).stack_size(STACK);
                    // without a thread the connection ends, and the other side tries again
                    let _ = thread.spawn(move || hub.receive(stream, address));
                    continue;
                }
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
            let mut members = lock(&self.members);
            let late =
                members.gather.as_ref().filter(|gather| gather.until.is_some_and(|until| until <= Instant::now()));
            if let Some(gather) = late {
                let reason = members.missing(gather);
                self.stop(&mut members, &reason);
            }
        }
    }

    /// Serves a connection until it ends.
    fn receive(&self, mut stream: TcpStream, address: SocketAddr) {
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_nodelay(true);
        let _ = stream.set_write_timeout(Some(PROMPT));
        let hello = match read_hello(&mut stream, Instant::now() + PROMPT) {
            Ok(hello) => hello,
            Err(said) => {
                lock(&self.members)
                    .strangers
                    .push(format!("{} {said}", SocketAddr::new(address.ip().to_canonical(), address.port())));
                return;
            }
        };
        let _ = stream.set_read_timeout(None);
        let process = hello.process;
        if let Err(refusal) = self.admit(hello, &stream) {
            let _ = stream.write_all(MAGIC).and_then(|()| write_frame(&mut stream, Kind::Refused, refusal.as_bytes()));
            // until the other side has read it
            let _ = stream.set_read_timeout(Some(FAREWELL));
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read(&mut [0]);
            return;
        }
        let why = loop {
            match read_frame(&mut stream, 2 * LARGEST) {
                Ok((Kind::Gather, body)) => match decode_gather(&body) {
                    Some((number, deadline, operation, value)) => {
                        self.gather(process, number, deadline, &operation, value);
                    }
                    None => break format!("process {process} sends what is no gather"),
                },
                Ok((Kind::Stop, body)) => {
                    break format!("process {process} stopped: {}", String::from_utf8_lossy(&body));
                }
                Ok((Kind::Bye, _)) => {
                    if let Some(peer) = &mut lock(&self.members).peers[process] {
                        peer.left = true;
                    }
                    self.changed.notify_all();
                    return;
                }
                Ok((kind, _)) => break format!("process {process} sends a {kind:?}, which is not its part"),
                Err(error) => {
                    break format!("process {process} is gone: its connection ended without a word ({error})");
                }
            }
        };
        let mut members = lock(&self.members);
        // a process that connected again has another connection now
        let current = members.peers[process].as_ref().and_then(|peer| peer.stream.peer_addr().ok());
        if current == Some(address) {
            self.stop(&mut members, &why);
        }
    }

    /// Makes a connection that of a process, or says why not.
    fn admit(&self, hello: Hello, stream: &TcpStream) -> Result<(), String> {
        let own = &self.hello;
        let process = hello.process;
        if hello.job != own.job {
            let refusal = format!("it belongs to job `{}`, this is job `{}`", hello.job, own.job);
            // another job's process is no reason to end this one
            lock(&self.members).strangers.push(format!("a process of job `{}` ({})", hello.job, hello.place));
            return Err(refusal);
        }
        let mut members = lock(&self.members);
        let taken = members.peers.get(process).and_then(Option::as_ref);
        let reason = if hello.protocol != own.protocol || hello.build != own.build {
            let (theirs, ours) =
                (format!("{} ({})", hello.build, hello.protocol), format!("{} ({})", own.build, own.protocol));
            Some(format!("processes differ: the program of process 0 is {ours}, of process {process} {theirs}"))
        } else if hello.processes != own.processes {
            let (theirs, ours) = (hello.processes, own.processes);
            Some(format!(
                "processes differ: process 0 counts {ours} processes, process {process} ({}) {theirs}",
                hello.place
            ))
        } else if process >= own.processes {
            Some(format!("there is no process {process}, only 0 to {} ({})", own.processes - 1, hello.place))
        } else if let Some(peer) =
            taken.filter(|peer| (peer.hello.started, &peer.hello.place) != (hello.started, &hello.place))
        {
            Some(format!("two processes say that they are process {process}: {} and {}", peer.hello.place, hello.place))
        } else {
            None
        };
        if let Some(reason) = reason {
            self.stop(&mut members, &reason);
            return Err(reason);
        }
        if let Some(reason) = &members.stopped {
            return Err(reason.clone());
        }
        let copy = stream.try_clone();
        let mut copy = copy.map_err(|error| error.to_string())?;
        copy.write_all(MAGIC)
            .and_then(|()| write_frame(&mut copy, Kind::Welcome, &[]))
            .map_err(|error| error.to_string())?;
        members.peers[process] = Some(Peer { hello, stream: copy, left: false });
        Ok(())
    }

    fn gather(&self, process: usize, number: u64, deadline: Option<Duration>, operation: &str, value: Vec<u8>) {
        let mut members = lock(&self.members);
        let processes = members.peers.len();
        let gather = members.gather.get_or_insert_with(|| Gathering {
            number,
            first: (process, operation.to_owned()),
            started: Instant::now(),
            until: None,
            values: vec![None; processes],
        });
        let until = deadline.map(|deadline| Instant::now() + deadline);
        gather.until = gather.until.into_iter().chain(until).min();
        if (gather.number, gather.first.1.as_str()) != (number, operation) {
            let (first, name) = &gather.first;
            let reason = format!(
                "processes do different things: process {first} is at {name}, process {process} at {operation}"
            );
            self.stop(&mut members, &reason);
            return;
        }
        gather.values[process] = Some(value);
        if gather.values.iter().all(Option::is_some) {
            let values: Vec<Vec<u8>> =
                members.gather.take().into_iter().flat_map(|gather| gather.values).flatten().collect();
            members.send_all(Kind::All, &encode_all(number, &values));
        }
    }

    /// Tells all why to stop; the first reason stays.
    fn stop(&self, members: &mut Members, reason: &str) {
        members.gather = None;
        if members.stopped.is_none() && !members.closed {
            members.stopped = Some(reason.to_owned());
            members.send_all(Kind::Stop, reason.as_bytes());
        }
        self.changed.notify_all();
    }

    /// Waits a little until every process has said that it is done.
    fn wait_for_goodbyes(&self) {
        let here =
            |members: &mut Members| members.stopped.is_none() && members.peers.iter().flatten().any(|peer| !peer.left);
        drop(self.changed.wait_timeout_while(lock(&self.members), PROMPT, here));
        self.close();
    }

    fn close(&self) {
        let mut members = lock(&self.members);
        members.closed = true;
        for peer in members.peers.iter().flatten() {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Members {
    /// Sends to all, the first process last: what it has got back has left.
    fn send_all(&mut self, kind: Kind, body: &[u8]) {
        for peer in self.peers.iter_mut().rev().flatten().filter(|peer| !peer.left) {
            // one that is gone is noticed by who reads from it
            let _ = write_frame(&mut peer.stream, kind, body);
        }
    }

    /// Who does not take part in a gather, in words.
    fn missing(&self, gather: &Gathering) -> String {
        let absent: Vec<usize> = (0..self.peers.len()).filter(|&process| gather.values[process].is_none()).collect();
        let waited = gather.started.elapsed();
        if absent.iter().all(|&process| self.peers[process].is_some()) {
            return missing(&gather.first.1, &absent, waited);
        }
        let never: Vec<usize> = absent.into_iter().filter(|&process| self.peers[process].is_none()).collect();
        let text = missing("the start", &never, waited).replace(" not heard of for ", " not there within ");
        match self.strangers.last() {
            Some(stranger) => format!("{text} (of others, {stranger})"),
            None => text,
        }
    }
}

/// Listens on all addresses of this host.
fn listen(port: u16) -> Result<TcpListener, StoreError> {
    // both IP versions where the system has version 6
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
        io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => Err(error),
        _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
    });
    listener.map_err(|cause| match cause.kind() {
        io::ErrorKind::AddrInUse => StoreError::PortInUse { port },
        _ => StoreError::NoPort { port, cause },
    })
}

/// Connects with process 0, again and again until the deadline.
fn connect(
    meeting: &Meeting,
    master: &Master,
    known: Option<&[SocketAddr]>,
    hello: &Hello,
    started: Instant,
) -> Result<TcpStream, StoreError> {
    let process = meeting.process;
    let mut pause = Duration::from_millis(20);
    loop {
        let left = meeting.deadline.saturating_sub(started.elapsed());
        let seconds = meeting.deadline.as_secs();
        let found = known.map_or_else(|| resolve(master, left), |known| Ok(known.to_vec()));
        let cause = match &found {
            Ok(addresses) => match attempt(addresses, master, hello, left) {
                Ok(stream) => return Ok(stream),
                Err(Attempt::Stranger(said)) => return Err(StoreError::Stranger { master: master.clone(), said }),
                Err(Attempt::Refused(reason)) => {
                    return Err(StoreError::Refused { process, master: master.clone(), reason });
                }
                Err(Attempt::Failed(cause)) => cause,
            },
            Err(cause) => cause.clone(),
        };
        if started.elapsed() + pause >= meeting.deadline {
            return Err(match found {
                Ok(_) => StoreError::Unreachable { process, master: master.clone(), seconds, cause },
                Err(cause) => StoreError::UnknownHost { process, host: master.host.clone(), seconds, cause },
            });
        }
        thread::sleep(pause);
        pause = (2 * pause).min(Duration::from_secs(1));
    }
}

/// Addresses of a name. The system's resolver knows no deadline, so that a thread waits for it.
fn resolve(master: &Master, left: Duration) -> Result<Vec<SocketAddr>, String> {
    let (tell, told) = channel();
    let name = (master.host.clone(), master.port);
    let ask = move || {
        let found = name.to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        let _ = tell.send(found.map_err(|error| error.to_string()));
    };
    thread::Builder::new().name("resolve".to_owned()).spawn(ask).map_err(|error| error.to_string())?;
    match told.recv_timeout(left) {
        Ok(Ok(addresses)) if addresses.is_empty() => Err("the name has no address".to_owned()),
        Ok(found) => found,
        Err(_) => Err("the resolver does not answer".to_owned()),
    }
}

enum Attempt {
    /// To be tried again.
    Failed(String),
    /// Another program answers; its first bytes.
    Stranger(String),
    /// Process 0 says no.
    Refused(String),
}

fn attempt(addresses: &[SocketAddr], master: &Master, hello: &Hello, left: Duration) -> Result<TcpStream, Attempt> {
    let failed = |error: io::Error| Attempt::Failed(error.to_string());
    let mut outcome = Err(Attempt::Failed("the name has no address".to_owned()));
    for address in addresses {
        match TcpStream::connect_timeout(address, left.clamp(Duration::from_millis(1), ATTEMPT)) {
            // a port of this host's own that connects to itself, where nobody listens
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                outcome = Err(Attempt::Failed("nobody listens".to_owned()));
            }
            Ok(stream) => {
                outcome = Ok(stream);
                break;
            }
            Err(error) => outcome = Err(failed(error)),
        }
    }
    let mut stream = outcome?;
    let _ = stream.set_nodelay(true);
    stream.set_write_timeout(Some(PROMPT)).map_err(failed)?;
    let body = serde_json::to_vec(hello).map_err(|error| Attempt::Failed(error.to_string()))?;
    stream.write_all(MAGIC).and_then(|()| write_frame(&mut stream, Kind::Hello, &body)).map_err(failed)?;
    let until = Instant::now() + left.min(PROMPT);
    let mut magic = [0; MAGIC.len()];
    let mut got = 0;
    let read = fill(&mut stream, &mut magic, &mut got, until);
    if magic[..got] != MAGIC[..got] {
        return Err(Attempt::Stranger(quote(&magic[..got])));
    }
    if let Err(error) = read {
        let cause = match error.kind() {
            io::ErrorKind::TimedOut => format!("what listens at {master} says nothing"),
            _ => format!("what listens at {master} ends the connection"),
        };
        return Err(Attempt::Failed(cause));
    }
    match read_bounded(&mut stream, 2 * LARGEST, until) {
        Ok((Kind::Welcome, _)) => {}
        Ok((Kind::Refused, reason)) => return Err(Attempt::Refused(String::from_utf8_lossy(&reason).into_owned())),
        Ok((kind, _)) => return Err(Attempt::Failed(format!("process 0 answers with {kind:?}"))),
        Err(error) => return Err(failed(error)),
    }
    stream.set_read_timeout(None).map_err(failed)?;
    Ok(stream)
}

/// Who connects; or what a stranger said.
fn read_hello(stream: &mut TcpStream, until: Instant) -> Result<Hello, String> {
    let mut magic = [0; MAGIC.len()];
    let mut got = 0;
    if let Err(error) = fill(stream, &mut magic, &mut got, until) {
        return Err(match (got, error.kind()) {
            (0, io::ErrorKind::TimedOut) => "connected and said nothing".to_owned(),
            (0, _) => "connected and left".to_owned(),
            _ => format!("said {}", quote(&magic[..got])),
        });
    }
    if &magic != MAGIC {
        return Err(format!("said {}", quote(&magic)));
    }
    let nonsense = || "said who it is in words unknown here: another version?".to_owned();
    match read_bounded(stream, LONGEST_HELLO, until) {
        Ok((Kind::Hello, body)) => serde_json::from_slice(&body).map_err(|_| nonsense()),
        _ => Err(nonsense()),
    }
}

/// Fills a buffer until a moment; `got` bytes are there, even if it fails.
fn fill(stream: &mut TcpStream, buffer: &mut [u8], got: &mut usize, until: Instant) -> io::Result<()> {
    while *got < buffer.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer[*got..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => *got += read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads a message that is no longer than `largest`, until a moment.
fn read_bounded(stream: &mut TcpStream, largest: usize, until: Instant) -> io::Result<(Kind, Vec<u8>)> {
    let mut head = [0; 5];
    fill(stream, &mut head, &mut 0, until)?;
    let (kind, length) = head_of(head, largest)?;
    let mut body = vec![0; length];
    fill(stream, &mut body, &mut 0, until)?;
    Ok((kind, body))
}

/// Reads a message that is no longer than `largest`, however long that takes.
fn read_frame(stream: &mut TcpStream, largest: usize) -> io::Result<(Kind, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let (kind, length) = head_of(head, largest)?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok((kind, body))
}

fn head_of(head: [u8; 5], largest: usize) -> io::Result<(Kind, usize)> {
    let [a, b, c, d, kind] = head;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    let kind = Kind::read(kind).filter(|_| length <= largest);
    Ok((kind.ok_or(io::ErrorKind::InvalidData)?, length))
}

fn write_frame(stream: &mut TcpStream, kind: Kind, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut frame = Vec::with_capacity(5 + body.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.push(kind as u8);
    frame.extend_from_slice(body);
    stream.write_all(&frame)
}

/// Number, deadline in milliseconds (0: none), the operation's name, 0, the value.
fn encode_gather(number: u64, deadline: Option<Duration>, operation: &str, value: &[u8]) -> Vec<u8> {
    let milliseconds = deadline.map_or(0, |deadline| (deadline.as_millis() as u64).max(1));
    let mut body = [number.to_le_bytes(), milliseconds.to_le_bytes()].concat();
    body.extend(operation.bytes().filter(|&byte| byte != 0));
    body.push(0);
    body.extend_from_slice(value);
    body
}

fn decode_gather(body: &[u8]) -> Option<(u64, Option<Duration>, String, Vec<u8>)> {
    let (number, rest) = body.split_first_chunk::<8>()?;
    let (milliseconds, rest) = rest.split_first_chunk::<8>()?;
    let end = rest.iter().position(|&byte| byte == 0)?;
    let milliseconds = u64::from_le_bytes(*milliseconds);
    let deadline = (milliseconds > 0).then(|| Duration::from_millis(milliseconds));
    let operation = String::from_utf8_lossy(&rest[..end]).into_owned();
    Some((u64::from_le_bytes(*number), deadline, operation, rest[end + 1..].to_vec()))
}

/// Number, then length and bytes of each value.
fn encode_all(number: u64, values: &[Vec<u8>]) -> Vec<u8> {
    let mut body = number.to_le_bytes().to_vec();
    for value in values {
        body.extend_from_slice(&(value.len() as u32).to_le_bytes());
        body.extend_from_slice(value);
    }
    body
}

fn decode_all(body: &[u8]) -> Option<(u64, Vec<Vec<u8>>)> {
    let (number, mut rest) = body.split_first_chunk::<8>()?;
    let mut values = Vec::new();
    while !rest.is_empty() {
        let (length, tail) = rest.split_first_chunk::<4>()?;
        let (value, tail) = tail.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        values.push(value.to_vec());
        rest = tail;
    }
    Some((u64::from_le_bytes(*number), values))
}

/// The beginning of a reason that is too long to travel.
fn shorten(reason: &str) -> &str {
    let end = (0..=reason.len().min(LARGEST / 2)).rev().find(|&at| reason.is_char_boundary(at));
    &reason[..end.unwrap_or(0)]
}

/// Bytes of a stranger, for people.
fn quote(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes.escape_ascii())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // what is behind these mutexes is consistent at any moment
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
impl Store {
    /// Processes that are threads of a test.
    pub(super) fn together(processes: usize, deadline: Duration) -> Vec<Self> {
        let (listener, port) = tests::port();
        let meetings =
            (0..processes).map(|process| Meeting { deadline, ..tests::meeting(process, processes, port, 0.0) });
        tests::meet(listener, meetings.collect()).into_iter().map(Result::unwrap).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn meeting(process: usize, processes: usize, port: u16, seconds: f32) -> Meeting {
        Meeting {
            master: Master { host: "127.0.0.1".to_owned(), port },
            job: "test".to_owned(),
            build: "a".to_owned(),
            process,
            processes,
            deadline: Duration::from_secs_f32(seconds),
        }
    }

    /// A listener of process 0 on a free port.
    pub(super) fn port() -> (TcpListener, u16) {
        let listener = listen(0).unwrap();
        let port = listener.local_addr().unwrap().port();
        (listener, port)
    }

    pub(super) type Outcome = Result<Store, StoreError>;

    /// Starts the processes of `meetings`, those with number 0 and a listener first; their outcomes in that order.
    pub(super) fn meet(listener: TcpListener, meetings: Vec<Meeting>) -> Vec<Outcome> {
        let mut listener = Some(listener);
        thread::scope(|scope| {
            let start = |meeting: Meeting| {
                let listener = if meeting.process == 0 { listener.take() } else { None };
                scope.spawn(move || Store::join(&meeting, listener))
            };
            let threads: Vec<_> = meetings.into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn together(processes: usize) -> Vec<Store> {
        Store::together(processes, Duration::from_secs(20))
    }

    fn each<R: Send>(stores: &[Store], work: impl Fn(&Store) -> R + Sync) -> Vec<R> {
        let work = &work;
        thread::scope(|scope| {
            let threads: Vec<_> = stores.iter().map(|store| scope.spawn(move || work(store))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn reason(outcome: &Outcome) -> String {
        outcome.as_ref().unwrap_err().to_string()
    }

    #[test]
    fn processes_meet_share_values_and_part() {
        for processes in [1, 2, 5] {
            let stores = together(processes);
            let all = each(&stores, |store| {
                let mine = vec![store.process() as u8; store.process()];
                for round in 0..20 {
                    let all = store.all_gather(&format!("round {round}"), &mine, Patience::Deadline).unwrap();
                    let expected: Vec<Vec<u8>> = (0..processes).map(|process| vec![process as u8; process]).collect();
                    assert_eq!(all, expected);
                }
                store.all_gather("the end", &[], Patience::Endless).unwrap();
                store.finish();
                store.heard()
            });
            assert_eq!(all, vec![None; processes]);
        }
    }

    #[test]
    fn a_port_that_is_in_use_is_named() {
        let (_listener, port) = port();
        let error = Store::open(&meeting(0, 2, port, 5.0)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("process 0 cannot listen on port {port}: it is in use\nhint: ")), "{error}");
    }

    #[test]
    fn a_master_that_nobody_reaches_is_named() {
        let port = port().1; // whose listener is gone
        let started = Instant::now();
        let error = Store::open(&meeting(1, 2, port, 0.6)).unwrap_err().to_string();
        assert!(
            error.contains(&format!("process 1 cannot reach process 0 at 127.0.0.1:{port} within 0 s: ")),
            "{error}"
        );
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_name_that_does_not_resolve_is_named() {
        let mut meeting = meeting(1, 2, 1234, 0.5);
        "no-such-host.invalid".clone_into(&mut meeting.master.host);
        let started = Instant::now();
        let error = Store::open(&meeting).unwrap_err().to_string();
        assert!(error.contains("cannot find the host `no-such-host.invalid` (MASTER_ADDR)"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn processes_that_do_not_come_are_named() {
        let (listener, port) = port();
        let outcomes = meet(listener, vec![meeting(0, 4, port, 0.7), meeting(2, 4, port, 20.0)]);
        for outcome in &outcomes {
            let reason = reason(outcome);
            assert!(reason.contains("processes 1, 3 were not there within 0 s, at the start"), "{reason}");
        }
    }

    #[test]
    fn who_differs_is_named_on_both_sides() {
        let change = |change: &dyn Fn(&mut Meeting)| {
            let (listener, port) = port();
            let mut other = meeting(1, 2, port, 20.0);
            change(&mut other);
            let outcomes = meet(listener, vec![meeting(0, 2, port, 20.0), other]);
            [reason(&outcomes[0]), reason(&outcomes[1])]
        };
        for (how, words) in [
            (
                &(|other: &mut Meeting| other.processes = 3) as &dyn Fn(&mut Meeting),
                "process 0 counts 2 processes, process 1 (",
            ),
            (
                &|other: &mut Meeting| "b".clone_into(&mut other.build),
                "the program of process 0 is a (1), of process 1 b (1)",
            ),
            (&|other: &mut Meeting| other.process = 7, "there is no process 7, only 0 to 1"),
        ] {
            let [first, second] = change(how);
            assert!(first.contains(words) && second.contains(words), "{first}\n{second}");
            assert!(second.starts_with("process 0 at 127.0.0.1:"), "{second}");
        }
    }

    #[test]
    fn two_processes_with_one_number_are_named() {
        let (listener, port) = port();
        let outcomes = meet(listener, [0, 1, 1].map(|process| meeting(process, 3, port, 20.0)).to_vec());
        for outcome in &outcomes {
            assert!(reason(outcome).contains("two processes say that they are process 1: "), "{outcome:?}");
        }
    }

    #[test]
    fn a_process_of_another_job_is_refused_and_the_others_go_on() {
        let (listener, port) = port();
        let mut other = meeting(1, 2, port, 20.0);
        "elsewhere".clone_into(&mut other.job);
        thread::scope(|scope| {
            let first = scope.spawn(move || Store::join(&meeting(0, 2, port, 20.0), Some(listener)));
            let refused = reason(&Store::open(&other));
            assert!(refused.contains("it belongs to job `elsewhere`, this is job `test`"), "{refused}");
            let second = Store::open(&meeting(1, 2, port, 20.0)).unwrap();
            let first = first.join().unwrap().unwrap();
            assert!(first.heard().is_none() && second.heard().is_none());
        });
    }

    #[test]
    fn strangers_that_say_nothing_or_nonsense_disturb_nobody_and_are_told_of() {
        let (listener, port) = port();
        let silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut loud = TcpStream::connect(("127.0.0.1", port)).unwrap();
        loud.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        // the right beginning, and then a message of 4 GiB
        let mut huge = TcpStream::connect(("127.0.0.1", port)).unwrap();
        huge.write_all(MAGIC).and_then(|()| huge.write_all(&[255, 255, 255, 255, 1])).unwrap();
        thread::scope(|scope| {
            let first = scope.spawn(move || Store::join(&meeting(0, 2, port, 20.0), Some(listener)));
            let second = Store::open(&meeting(1, 2, port, 20.0)).unwrap();
            let first = first.join().unwrap().unwrap();
            let all =
                each(&[first, second], |store| store.all_gather("a value", b"x", Patience::Deadline).unwrap().len());
            assert_eq!(all, [2, 2]);
        });
        drop(silent);
        let (listener, port) = self::port();
        let mut loud = TcpStream::connect(("127.0.0.1", port)).unwrap();
        loud.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let said = reason(&Store::join(&meeting(0, 2, port, 0.7), Some(listener)));
        assert!(said.contains("process 1 was not there within 0 s, at the start (of others, 127.0.0.1:"), "{said}");
        assert!(said.contains("said \"GET / HTTP/1.1"), "{said}");
    }

    #[test]
    fn another_program_on_the_port_is_named() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
                let _ = stream.read(&mut [0; 64]);
                // and one that says nothing
                let (stream, _) = listener.accept().unwrap();
                thread::sleep(Duration::from_millis(700));
                drop(stream);
            });
            let error = Store::open(&meeting(1, 2, port, 10.0)).unwrap_err().to_string();
            assert!(error.contains("(it said \"HTTP/1.1 400 Bad\"), where process 0 should"), "{error}");
            let error = Store::open(&meeting(1, 2, port, 0.5)).unwrap_err().to_string();
            assert!(error.contains("says nothing"), "{error}");
        });
    }

    #[test]
    fn a_process_that_dies_ends_those_that_wait_for_it() {
        for dying in [2, 0] {
            let mut stores = together(3);
            let dead = stores.remove(dying);
            thread::scope(|scope| {
                let waiting =
                    scope.spawn(|| each(&stores, |store| store.all_gather("a value", &[], Patience::Endless)));
                thread::sleep(Duration::from_millis(100));
                drop(dead); // as the system closes the connections of a process that is killed
                for outcome in waiting.join().unwrap() {
                    let reason = outcome.unwrap_err().reason;
                    assert!(reason.starts_with(&format!("process {dying} is gone")), "{reason}");
                }
            });
        }
    }

    #[test]
    fn a_failure_reaches_all_with_its_reason_even_while_nobody_waits() {
        for failing in [0, 1] {
            let stores = together(3);
            stores[failing].abort("bad image");
            let expected = format!("process {failing} stopped: bad image");
            let reasons = each(&stores, |store| {
                let started = Instant::now();
                while store.heard().is_none() && started.elapsed() < FAREWELL {
                    thread::sleep(Duration::from_millis(5));
                }
                store.all_gather("a value", &[], Patience::Deadline).unwrap_err().reason
            });
            assert_eq!(reasons, vec![expected; 3]);
        }
    }

    #[test]
    fn processes_at_different_operations_are_both_named() {
        let stores = together(2);
        let reasons = each(&stores, |store| {
            let name = format!("operation {}", 7 + store.process());
            store.all_gather(&name, &[], Patience::Deadline).unwrap_err().reason
        });
        for reason in reasons {
            assert!(reason.starts_with("processes do different things: process "), "{reason}");
            assert!(reason.contains("at operation 7") && reason.contains("at operation 8"), "{reason}");
        }
    }

    #[test]
    fn a_process_that_does_not_answer_is_named_with_the_operation() {
        let stores = Store::together(3, Duration::from_secs(1));
        let outcomes = each(&stores[..2], |store| store.all_gather("operation 5", &[], Patience::Deadline));
        for outcome in outcomes {
            assert_eq!(outcome.unwrap_err().reason, "process 2 was not heard of for 1 s, at operation 5");
        }
    }

    #[test]
    fn a_value_that_is_too_large_is_refused() {
        let stores = together(1);
        let reason = stores[0].all_gather("a plan", &vec![0; LARGEST + 1], Patience::Deadline).unwrap_err().reason;
        assert!(reason.contains("a plan has 65537 bytes"), "{reason}");
    }

    #[test]
    fn messages_survive_their_encoding_and_nonsense_is_none() {
        let body = encode_gather(3, Some(Duration::from_millis(1500)), "a\0b", b"\0value");
        let decoded = (3, Some(Duration::from_millis(1500)), "ab".to_owned(), b"\0value".to_vec());
        assert_eq!(decode_gather(&body), Some(decoded));
        assert_eq!(decode_gather(&body[..17]), None);
        let values = vec![b"one".to_vec(), Vec::new(), vec![7; 300]];
        let body = encode_all(9, &values);
        assert_eq!(decode_all(&body), Some((9, values)));
        assert_eq!(decode_all(&body[..body.len() - 1]), None);
        assert_eq!(shorten(&"ä".repeat(LARGEST)).len(), LARGEST / 2);
    }
}
