//! NCCL between processes that have a GPU each (feature `nccl`, part of `cuda`).
//!
//! What the engine reduces are vectors on the host, so a message is copied into memory of the GPU, sent from there (`NVLink`, `InfiniBand`, whatever NCCL finds) and copied back;
//! the canonical tree is added up on the host, by the same code as under MPI, so the bits are the same. `reduction = "fast"` is NCCL's all-reduce in fp32. [`Nccl`] has the operations on memory of the
//! GPU too; the engine does not use those yet.
//!
//! NCCL is opened at run time, and not through cudarc's bindings: these look for `libnccl.so`, where installations without headers have `libnccl.so.2` alone; they panic when a function is missing; and
//! they read results as a Rust enum, which a newer NCCL with one more code would make undefined behaviour. Of cudarc the driver's functions are used, whose memory burn's tensors are in as well.
//!
//! Communicators are non-blocking (`blocking = 0` in the configuration), so that no call waits for another process: [`super::device`] asks whether an operation is done, and aborts it. (`NCCL_COMM_BLOCKING=1`
//! in the environment overrides that, and with it the deadline of NCCL's start.) <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html>
#![expect(unsafe_code, reason = "functions of libraries in C")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::result as driver;
use cudarc::driver::sys;

use super::collective::Aborted;
use super::device::{Communicator, DeviceTransport, shared_device};
use super::transport::{Control, Patience, Transport};

/// Names of the library, as installations have it.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The oldest NCCL whose configuration has the fields of [`Config`].
const OLDEST: c_int = 21_800;
/// How long an abort may take before it is left alone.
const ABORT: Duration = Duration::from_secs(10);

/// Results of NCCL's functions; all others are failures.
/// <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclresult-t>
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// Types of values (`ncclDataType_t`) and the sum (`ncclRedOp_t`).
const UINT8: c_int = 1;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// Why GPUs cannot be connected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library is not installed.
    #[error(
        "NCCL, which connects GPUs, cannot be opened: {0}\nhint: install NVIDIA's package `libnccl2`, or `pip install nvidia-nccl-cu12` and put its folder `nvidia/nccl/lib` into LD_LIBRARY_PATH"
    )]
    Missing(String),
    /// It is too old.
    #[error("NCCL {0} is too old\nhint: install 2.18 or newer")]
    Old(String),
    /// CUDA's driver does not do its part.
    #[error(
        "CUDA's driver failed to {what}: {cause}\nhint: `nvidia-smi` shows whether the driver and its GPUs are well"
    )]
    Driver {
        /// What was to be done.
        what: &'static str,
        /// What it says.
        cause: String,
    },
    /// A function of NCCL failed.
    #[error("NCCL failed to {what}: {cause}\nhint: NCCL_DEBUG=INFO makes it say more")]
    Call {
        /// What was to be done.
        what: &'static str,
        /// What it says.
        cause: String,
    },
    /// Two processes compute on one GPU.
    #[error(
        "processes {first} and {second} have the same GPU ({gpu}), and NCCL wants one for each\nhint: start one process for each GPU (`--nproc-per-node` of torchrun, `--gpus-per-task 1` of srun), without a number in `--device cuda`"
    )]
    SharedGpu {
        /// One.
        first: usize,
        /// The other.
        second: usize,
        /// The GPU of both.
        gpu: String,
    },
    /// Processes have different versions.
    #[error(
        "processes differ: process 0 has NCCL {first}, process {process} {other}\nhint: use the same installation on all nodes"
    )]
    Versions {
        /// Of process 0.
        first: String,
        /// A process that has another.
        process: usize,
        /// Its version.
        other: String,
    },
    /// Another process failed, or this one while connecting.
    #[error(transparent)]
    Aborted(#[from] Aborted),
}

type Comm = *mut c_void;
type Stream = *mut c_void;
type Data = *const c_void;
type DataMut = *mut c_void;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId {
    internal: [c_char; 128],
}

/// `ncclConfig_t` of NCCL 2.18. Later versions have more fields behind these and go by `size` and `version`.
/// <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclconfig-t>
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// As the macro `NCCL_CONFIG_INITIALIZER`, but non-blocking.
    fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

macro_rules! functions {
    ($($field:ident: $symbol:literal = fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of NCCL that are used; the library is never closed.
        struct Library {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
            _opened: libloading::Library,
        }

        impl Library {
            fn find(library: libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the signatures are those of nccl.h, and the library stays open as long as they are there
                    $($field: *unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol) }?,)*
                    _opened: library,
                })
            }
        }
    };
}

// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
functions! {
    get_version: b"ncclGetVersion\0" = fn(*mut c_int) -> c_int;
    get_unique_id: b"ncclGetUniqueId\0" = fn(*mut UniqueId) -> c_int;
    get_error_string: b"ncclGetErrorString\0" = fn(c_int) -> *const c_char;
    get_last_error: b"ncclGetLastError\0" = fn(Comm) -> *const c_char;
    comm_init_rank_config: b"ncclCommInitRankConfig\0" = fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
    comm_get_async_error: b"ncclCommGetAsyncError\0" = fn(Comm, *mut c_int) -> c_int;
    comm_abort: b"ncclCommAbort\0" = fn(Comm) -> c_int;
    comm_finalize: b"ncclCommFinalize\0" = fn(Comm) -> c_int;
    comm_destroy: b"ncclCommDestroy\0" = fn(Comm) -> c_int;
    group_start: b"ncclGroupStart\0" = fn() -> c_int;
    group_end: b"ncclGroupEnd\0" = fn() -> c_int;
    all_reduce: b"ncclAllReduce\0" = fn(Data, DataMut, usize, c_int, c_int, Comm, Stream) -> c_int;
    reduce_scatter: b"ncclReduceScatter\0" = fn(Data, DataMut, usize, c_int, c_int, Comm, Stream) -> c_int;
    all_gather: b"ncclAllGather\0" = fn(Data, DataMut, usize, c_int, Comm, Stream) -> c_int;
    broadcast: b"ncclBroadcast\0" = fn(Data, DataMut, usize, c_int, c_int, Comm, Stream) -> c_int;
    send: b"ncclSend\0" = fn(Data, usize, c_int, c_int, Comm, Stream) -> c_int;
    recv: b"ncclRecv\0" = fn(DataMut, usize, c_int, c_int, Comm, Stream) -> c_int;
}

impl Library {
    /// Opens NCCL, once in a process.
    fn get() -> Result<&'static Self, NcclError> {
        static LIBRARY: OnceLock<Result<Library, NcclError>> = OnceLock::new();
        LIBRARY.get_or_init(|| Self::open(&NAMES)).as_ref().map_err(Clone::clone)
    }

    fn open(names: &[&str]) -> Result<Self, NcclError> {
        let mut cause = String::new();
        for name in names {
            // SAFETY: what NCCL does when it is opened is what every program with NCCL relies on
            match unsafe { libloading::Library::new(*name) }.and_then(Self::find) {
                Ok(library) => {
                    let version = library.number()?;
                    return if version < OLDEST { Err(NcclError::Old(version_text(version))) } else { Ok(library) };
                }
                Err(error) if cause.is_empty() => {
                    cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                }
                Err(_) => {}
            }
        }
        Err(NcclError::Missing(cause))
    }

    fn number(&self) -> Result<c_int, NcclError> {
        let mut version = 0;
        // SAFETY: the pointer is valid during the call
        let code = unsafe { (self.get_version)(&raw mut version) };
        self.check("tell its version", code).map(|()| version)
    }

    /// What another process needs to connect.
    fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId { internal: [0; 128] };
        // SAFETY: the pointer is valid during the call
        let code = unsafe { (self.get_unique_id)(&raw mut id) };
        self.check("make a unique id", code).map(|()| id)
    }

    fn check(&self, what: &'static str, code: c_int) -> Result<(), NcclError> {
        if code == SUCCESS {
            Ok(())
        } else {
            Err(NcclError::Call { what, cause: self.explain(std::ptr::null_mut(), code) })
        }
    }

    /// A result in words, with the details that the library remembers.
    fn explain(&self, comm: Comm, code: c_int) -> String {
        // SAFETY: both return texts of the library's own, or nothing; the last error may be asked for without a communicator
        let [short, long] = unsafe { [text((self.get_error_string)(code)), text((self.get_last_error)(comm))] };
        match long.lines().next().map(str::trim) {
            Some(long) if !long.is_empty() => format!("{short} ({long})"),
            _ => short,
        }
    }
}

/// # Safety
/// `pointer` is null or a text that ends with 0 and stays during the call.
unsafe fn text(pointer: *const c_char) -> String {
    // SAFETY: as above
    if pointer.is_null() { String::new() } else { unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned() }
}

/// `NCCL_VERSION_CODE` as people write it.
fn version_text(code: c_int) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}

/// Returns NCCL's version.
///
/// # Errors
/// When there is none, or too old a one.
pub fn nccl_version() -> Result<String, NcclError> {
    Library::get().and_then(Library::number).map(version_text)
}

/// Returns how many GPUs this process may use (`CUDA_VISIBLE_DEVICES`).
///
/// # Errors
/// When CUDA's driver is not there or doesn't work.
pub fn gpus() -> Result<usize, NcclError> {
    initialize()?;
    let count = driver::device::get_count().map_err(driver_error("count GPUs"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Starts the driver; without it every function of cudarc would panic.
fn initialize() -> Result<(), NcclError> {
    let what = "start";
    // SAFETY: opens and closes libraries whose names are the driver's
    if !unsafe { sys::is_culib_present() } {
        return Err(NcclError::Driver { what, cause: "libcuda.so.1 cannot be opened".to_owned() });
    }
    driver::init().map_err(driver_error(what))
}

fn driver_error(what: &'static str) -> impl Fn(driver::DriverError) -> NcclError {
    move |error| NcclError::Driver { what, cause: describe(error) }
}

fn describe(error: driver::DriverError) -> String {
    error.error_string().map_or_else(|_| error.to_string(), |text| text.to_string_lossy().into_owned())
}

/// A GPU, with a stream of operations.
struct Gpu {
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Marks the end of what was begun last.
    event: sys::CUevent,
    /// Tells it from all others.
    uuid: String,
    /// After an abort its memory is not given back: something may still write there, and the process is about to end.
    lost: AtomicBool,
}

// SAFETY: handles of the driver may be used by any thread that has made the context its own, which every function below does first
unsafe impl Send for Gpu {}
// SAFETY: the driver's functions are thread-safe
unsafe impl Sync for Gpu {}

impl Gpu {
    fn open(index: usize) -> Result<Self, NcclError> {
        initialize()?;
        let device =
            driver::device::get(c_int::try_from(index).unwrap_or(c_int::MAX)).map_err(driver_error("find the GPU"))?;
        let uuid = driver::device::get_uuid(device).map_err(driver_error("name the GPU"))?;
        // SAFETY: the device exists; its primary context, which burn's tensors live in too, is never released
        let context = unsafe { driver::primary_ctx::retain(device) }.map_err(driver_error("open the GPU"))?;
        // SAFETY: the context is valid
        unsafe { driver::ctx::set_current(context) }.map_err(driver_error("open the GPU"))?;
        let stream =
            driver::stream::create(driver::stream::StreamKind::NonBlocking).map_err(driver_error("make a stream"))?;
        let event = driver::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(driver_error("make an event"))?;
        let bytes: [u8; 16] = bytemuck::cast(uuid.bytes);
        let uuid = format!("{:032x}", u128::from_be_bytes(bytes));
        Ok(Self { context, stream, event, uuid, lost: AtomicBool::new(false) })
    }

    fn make_current(&self) -> Result<(), String> {
        // SAFETY: the context is never released
        unsafe { driver::ctx::set_current(self.context) }.map_err(describe)
    }

    /// Marks what was begun so far.
    fn mark(&self) -> Result<(), String> {
        // SAFETY: event and stream live as long as `self`
        unsafe { driver::event::record(self.event, self.stream) }.map_err(describe)
    }

    /// Tells whether what was marked is done.
    fn is_done(&self) -> Result<bool, String> {
        // SAFETY: the event lives as long as `self`
        match unsafe { driver::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(describe(error)),
        }
    }

    fn stream(&self) -> Stream {
        self.stream.cast()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !*self.lost.get_mut() && self.make_current().is_ok() {
            // SAFETY: nobody has them any more
            unsafe {
                let _ = driver::event::destroy(self.event);
                let _ = driver::stream::destroy(self.stream);
            }
        }
    }
}

/// Memory of a GPU.
pub struct DeviceMemory {
    pointer: sys::CUdeviceptr,
    bytes: usize,
    owned: bool,
    gpu: Arc<Gpu>,
}

impl DeviceMemory {
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, String> {
        gpu.make_current()?;
        // SAFETY: what it holds is written before it is read
        let pointer = unsafe { driver::malloc_sync(bytes.max(1)) }.map_err(describe)?;
        Ok(Self { pointer, bytes, owned: true, gpu: Arc::clone(gpu) })
    }

    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Tells whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies from the host; what was begun on the GPU's stream before is done first.
    fn upload(&mut self, at: usize, from: &[u8]) -> Result<(), String> {
        assert!(at + from.len() <= self.bytes, "copy beyond the end of memory of the GPU");
        self.gpu.make_current()?;
        // SAFETY: the range lies in this memory, and pageable host memory has been read when the call returns
        unsafe { driver::memcpy_htod_async(self.pointer + at as u64, from, self.gpu.stream) }.map_err(describe)
    }

    /// Copies to the host. Nothing is under way on the stream, so it does not wait for other processes.
    fn download(&self, to: &mut [u8]) -> Result<(), String> {
        assert!(to.len() <= self.bytes, "copy beyond the end of memory of the GPU");
        self.gpu.make_current()?;
        // SAFETY: the range lies in this memory; `to` is written before the stream is in step again, which is waited for
        unsafe {
            driver::memcpy_dtoh_async(to, self.pointer, self.gpu.stream).map_err(describe)?;
            driver::stream::synchronize(self.gpu.stream).map_err(describe)
        }
    }

    fn at(&self, range: &Range<usize>) -> Data {
        assert!(range.end <= self.bytes, "range beyond the end of memory of the GPU");
        (self.pointer + range.start as u64) as Data
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.owned && !self.gpu.lost.load(Ordering::Relaxed) && self.gpu.make_current().is_ok() {
            // SAFETY: allocated by `new`; operations that use it were waited for, or the GPU is lost
            let _ = unsafe { driver::free_sync(self.pointer) };
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes on GPU {}", self.bytes, self.gpu.uuid)
    }
}

/// What is under way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// NCCL has not put everything on the stream yet.
    Queued,
    /// It has, and the event marks the end.
    Running,
}

/// A communicator of NCCL.
struct NcclCommunicator {
    library: &'static Library,
    gpu: Arc<Gpu>,
    process: usize,
    processes: usize,
    /// Null before it is connected and after its end.
    comm: Comm,
    state: State,
    finalized: bool,
    /// Memory that messages leave from and arrive in.
    outgoing: Option<DeviceMemory>,
    incoming: Option<DeviceMemory>,
    received: usize,
}

// SAFETY: NCCL's communicators may be used by any thread, one at a time
unsafe impl Send for NcclCommunicator {}

/// A communicator that nobody else has any more.
struct Last(Comm);
// SAFETY: as for `NcclCommunicator`
unsafe impl Send for Last {}

impl NcclCommunicator {
    fn connect(&mut self, id: UniqueId) -> Result<(), String> {
        self.gpu.make_current()?;
        let mut config = Config::non_blocking();
        let [processes, process] = [count(self.processes)?, count(self.process)?];
        // SAFETY: the pointers are valid during the call, the context is that of the GPU
        let code = unsafe {
            (self.library.comm_init_rank_config)(&raw mut self.comm, processes, id, process, &raw mut config)
        };
        self.begun(code)
    }

    /// Notes that an operation was begun, unless its result is a failure.
    fn begun(&mut self, code: c_int) -> Result<(), String> {
        match code {
            SUCCESS | IN_PROGRESS => {
                self.state = State::Queued;
                Ok(())
            }
            code => Err(self.library.explain(self.comm, code)),
        }
    }

    /// Tells whether NCCL has put on the stream what was begun.
    fn queued(&self) -> Result<bool, String> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is valid, even while it is being connected
        let code = unsafe { (self.library.comm_get_async_error)(self.comm, &raw mut state) };
        match (code, state) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS | IN_PROGRESS, SUCCESS | IN_PROGRESS) => Ok(false),
            (SUCCESS | IN_PROGRESS, code) | (code, _) => Err(self.library.explain(self.comm, code)),
        }
    }

    /// Runs `begin` on a connected communicator with its stream.
    fn begin(&mut self, begin: impl FnOnce(&Library, Comm, Stream) -> c_int) -> Result<(), String> {
        if self.comm.is_null() {
            return Err("it is not connected".to_owned());
        }
        self.gpu.make_current()?;
        let code = begin(self.library, self.comm, self.gpu.stream());
        self.begun(code)
    }

    /// Memory with place for `bytes`, that of `slot` if it has it.
    fn place(gpu: &Arc<Gpu>, slot: &mut Option<DeviceMemory>, bytes: usize) -> Result<(), String> {
        if slot.as_ref().is_none_or(|memory| memory.bytes < bytes) {
            *slot = None; // given back before more is asked for
            *slot = Some(DeviceMemory::new(gpu, bytes.next_power_of_two())?);
        }
        Ok(())
    }

    /// The two pieces of memory, with place for that many bytes.
    fn places(&mut self, outgoing: usize, incoming: usize) -> Result<(&mut DeviceMemory, &mut DeviceMemory), String> {
        Self::place(&self.gpu, &mut self.outgoing, outgoing)?;
        Self::place(&self.gpu, &mut self.incoming, incoming)?;
        self.received = incoming;
        let places = self.outgoing.as_mut().zip(self.incoming.as_mut());
        places.ok_or_else(|| "no memory of the GPU".to_owned())
    }
}

impl Communicator for NcclCommunicator {
    const NAME: &'static str = "NCCL";

    fn all_gather(&mut self, own: &[u8]) -> Result<(), String> {
        let all = own.len() * self.processes;
        let (outgoing, incoming) = self.places(own.len(), all)?;
        outgoing.upload(0, own)?;
        let (from, to) = (outgoing.at(&(0..own.len())), incoming.at(&(0..all)));
        // SAFETY: both ranges are memory of the GPU that stays until the operation is done or the GPU lost
        self.begin(|nccl, comm, stream| unsafe {
            (nccl.all_gather)(from, to.cast_mut(), own.len(), UINT8, comm, stream)
        })
    }

    fn exchange(&mut self, parts: &[&[u8]], lengths: &[usize]) -> Result<(), String> {
        let ranges = |lengths: &mut dyn Iterator<Item = usize>| -> Vec<Range<usize>> {
            lengths.scan(0, |end, length| Some(std::mem::replace(end, *end + length)..*end)).collect()
        };
        let sends = ranges(&mut parts.iter().map(|part| part.len()));
        let receives = ranges(&mut lengths.iter().copied());
        let end = |ranges: &[Range<usize>]| ranges.last().map_or(0, |last| last.end);
        let (outgoing, incoming) = self.places(end(&sends), end(&receives))?;
        for (part, range) in parts.iter().zip(&sends).filter(|(part, _)| !part.is_empty()) {
            outgoing.upload(range.start, part)?;
        }
        let sends: Vec<(Data, usize)> = sends.iter().map(|range| (outgoing.at(range), range.len())).collect();
        let receives: Vec<(Data, usize)> = receives.iter().map(|range| (incoming.at(range), range.len())).collect();
        let peers = count(self.processes)?;
        self.begin(|nccl, comm, stream| {
            // SAFETY: the ranges are memory of the GPU that stays until the operation is done or the GPU lost; every group that begins ends
            unsafe {
                let mut codes = vec![(nccl.group_start)()];
                for ((peer, (from, sent)), (to, received)) in (0..peers).zip(&sends).zip(&receives) {
                    if *sent > 0 {
                        codes.push((nccl.send)(*from, *sent, UINT8, peer, comm, stream));
                    }
                    if *received > 0 {
                        codes.push((nccl.recv)(to.cast_mut(), *received, UINT8, peer, comm, stream));
                    }
                }
                let end = (nccl.group_end)();
                codes.into_iter().find(|code| ![SUCCESS, IN_PROGRESS].contains(code)).unwrap_or(end)
            }
        })
    }

    fn sum(&mut self, values: &[f32]) -> Result<(), String> {
        let bytes = size_of_val(values);
        let (_, incoming) = self.places(0, bytes)?;
        incoming.upload(0, bytemuck::cast_slice(values))?;
        let place = incoming.at(&(0..bytes));
        // SAFETY: as above; in place
        self.begin(|nccl, comm, stream| unsafe {
            (nccl.all_reduce)(place, place.cast_mut(), values.len(), FLOAT32, SUM, comm, stream)
        })
    }

    fn done(&mut self) -> Result<bool, String> {
        self.gpu.make_current()?;
        if self.state == State::Idle {
            return Ok(true);
        }
        if !self.queued()? {
            return Ok(false);
        }
        if self.state == State::Queued {
            self.gpu.mark()?;
            self.state = State::Running;
        }
        let done = self.gpu.is_done()?;
        if done {
            self.state = State::Idle;
        }
        Ok(done)
    }

    fn received(&mut self) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; self.received];
        if let Some(incoming) = self.incoming.as_ref().filter(|_| !bytes.is_empty()) {
            incoming.download(&mut bytes)?;
        }
        Ok(bytes)
    }

    fn abort(&mut self) {
        self.gpu.lost.store(true, Ordering::Relaxed);
        let comm = std::mem::replace(&mut self.comm, std::ptr::null_mut());
        if comm.is_null() {
            return;
        }
        let last = Last(comm);
        let (library, gpu) = (self.library, Arc::clone(&self.gpu));
        let (tell, told) = channel();
        let abort = move || {
            let Last(comm) = { last };
            let _ = gpu.make_current();
            // SAFETY: the communicator is valid, and gone after this call
            unsafe { (library.comm_abort)(comm) };
            let _ = tell.send(());
        };
        // on a thread of its own, so that the process ends even if this does not
        if std::thread::Builder::new().name("nccl-abort".to_owned()).spawn(abort).is_ok() {
            let _ = told.recv_timeout(ABORT);
        }
    }

    fn finish(&mut self) -> Result<(), String> {
        self.finalized = true;
        // SAFETY: the communicator is valid
        self.begin(|nccl, comm, _| unsafe { (nccl.comm_finalize)(comm) })
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if self.finalized && self.state == State::Idle && !self.comm.is_null() {
            // SAFETY: finalized, and nobody else has it
            unsafe { (self.library.comm_destroy)(self.comm) };
        } else {
            self.abort();
        }
    }
}

/// The GPUs of all processes, connected by NCCL.
///
/// As a [`Transport`] it moves what the engine has on the host. Its own operations work on memory of the GPU; every process calls the same ones with the same sizes.
pub struct Nccl {
    transport: DeviceTransport<NcclCommunicator>,
    gpu: Arc<Gpu>,
    processes: usize,
}

impl Nccl {
    /// Connects the GPU with number `gpu` of this process with those of the others, which `control` reaches.
    ///
    /// # Errors
    /// When NCCL or the GPU is not there, two processes have the same GPU, or another process fails.
    pub fn start(control: Arc<dyn Control>, gpu: usize, deadline: Duration) -> Result<Self, NcclError> {
        let library = Library::get()?;
        let gpu = Arc::new(Gpu::open(gpu)?);
        let version = version_text(library.number()?);
        let (process, processes) = (control.process(), control.processes());
        let facts = format!("{version}\n{}", gpu.uuid);
        let all = control.all_gather("NCCL and GPUs", facts.as_bytes(), Patience::Deadline)?;
        let all: Vec<String> = all.iter().map(|facts| String::from_utf8_lossy(facts).into_owned()).collect();
        let (versions, gpus): (Vec<String>, Vec<String>) = all
            .iter()
            .filter_map(|facts| facts.split_once('\n'))
            .map(|(version, gpu)| (version.to_owned(), gpu.to_owned()))
            .unzip();
        if let Some((process, other)) = versions.iter().enumerate().find(|(_, other)| **other != versions[0]) {
            return Err(NcclError::Versions { first: versions[0].clone(), process, other: other.clone() });
        }
        // a GPU's number is its own on every host
        if let Some((first, second)) = shared_device(&gpus) {
            return Err(NcclError::SharedGpu { first, second, gpu: format!("GPU-{}", gpus[first]) });
        }
        let own: Vec<u8> =
            if process == 0 { bytemuck::cast_slice(&library.unique_id()?.internal).to_vec() } else { Vec::new() };
        let ids = control.all_gather("NCCL's unique id", &own, Patience::Deadline)?;
        let mut id = UniqueId { internal: [0; 128] };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut id.internal);
        bytes.iter_mut().zip(ids.first().into_iter().flatten()).for_each(|(to, from)| *to = *from);
        let communicator = NcclCommunicator {
            library,
            gpu: Arc::clone(&gpu),
            process,
            processes,
            comm: std::ptr::null_mut(),
            state: State::Idle,
            finalized: false,
            outgoing: None,
            incoming: None,
            received: 0,
        };
        let transport = DeviceTransport::new(communicator, control, deadline);
        transport.run("NCCL's start", |nccl| nccl.connect(id), |_| Ok(()))?;
        Ok(Self { transport, gpu, processes })
    }

    /// Returns memory of the GPU with copies of these bytes.
    ///
    /// # Errors
    /// When there is not enough.
    pub fn memory(&self, bytes: &[u8]) -> Result<DeviceMemory, NcclError> {
        let failed = |cause| NcclError::Driver { what: "give memory", cause };
        let mut memory = DeviceMemory::new(&self.gpu, bytes.len()).map_err(failed)?;
        memory.upload(0, bytes).map_err(failed)?;
        Ok(memory)
    }

    /// Returns memory of the GPU that somebody else owns, such as a tensor's.
    ///
    /// # Safety
    /// `pointer` is that of `bytes` bytes on this GPU, which stay and which nobody else uses as long as the result is there; what was to be written to them has been (burn: after `sync`).
    /// When an operation on it fails, the bytes stay until the process ends.
    #[must_use]
    pub unsafe fn borrow(&self, pointer: u64, bytes: usize) -> DeviceMemory {
        DeviceMemory { pointer, bytes, owned: false, gpu: Arc::clone(&self.gpu) }
    }

    /// Returns a copy of what is in memory of the GPU.
    ///
    /// # Errors
    /// When the driver fails.
    pub fn read(&self, memory: &DeviceMemory) -> Result<Vec<u8>, NcclError> {
        let mut bytes = vec![0; memory.bytes];
        memory.download(&mut bytes).map_err(|cause| NcclError::Driver { what: "read memory", cause })?;
        Ok(bytes)
    }

    /// Replaces fp32 values by their sums over all processes, in NCCL's order.
    ///
    /// # Errors
    /// As [`Transport::sum`].
    pub fn all_reduce(&self, operation: &str, values: &mut DeviceMemory) -> Result<(), Aborted> {
        let (place, number) = (values.at(&(0..values.bytes)), values.bytes / size_of::<f32>());
        // SAFETY: the memory stays until the operation is done, which is waited for, or the GPU lost; so for all of these
        self.wait(operation, |nccl, comm, stream| unsafe {
            (nccl.all_reduce)(place, place.cast_mut(), number, FLOAT32, SUM, comm, stream)
        })
    }

    /// Writes this process's share of the sums of fp32 values over all processes to `share`, in NCCL's order.
    ///
    /// # Errors
    /// As [`Transport::sum`].
    ///
    /// # Panics
    /// When `values` is not as large as the shares of all.
    pub fn reduce_scatter(
        &self,
        operation: &str,
        values: &DeviceMemory,
        share: &mut DeviceMemory,
    ) -> Result<(), Aborted> {
        assert_eq!(values.bytes, share.bytes * self.processes, "values for the shares of all processes");
        let (from, to) = (values.at(&(0..values.bytes)), share.at(&(0..share.bytes)));
        let number = share.bytes / size_of::<f32>();
        // SAFETY: as in `all_reduce`
        self.wait(operation, |nccl, comm, stream| unsafe {
            (nccl.reduce_scatter)(from, to.cast_mut(), number, FLOAT32, SUM, comm, stream)
        })
    }

    /// Writes the shares of all processes to `all`, in their order.
    ///
    /// # Errors
    /// As [`Transport::exchange`].
    ///
    /// # Panics
    /// When `all` is not as large as the shares of all.
    pub fn all_gather(&self, operation: &str, share: &DeviceMemory, all: &mut DeviceMemory) -> Result<(), Aborted> {
        assert_eq!(all.bytes, share.bytes * self.processes, "place for the shares of all processes");
        let (from, to) = (share.at(&(0..share.bytes)), all.at(&(0..all.bytes)));
        let number = share.bytes;
        // SAFETY: as in `all_reduce`
        self.wait(operation, |nccl, comm, stream| unsafe {
            (nccl.all_gather)(from, to.cast_mut(), number, UINT8, comm, stream)
        })
    }

    /// Replaces values by those of process `root`.
    ///
    /// # Errors
    /// As [`Transport::exchange`].
    pub fn broadcast(&self, operation: &str, values: &mut DeviceMemory, root: usize) -> Result<(), Aborted> {
        let (place, number, root) = (values.at(&(0..values.bytes)), values.bytes, peer(root));
        // SAFETY: as in `all_reduce`
        self.wait(operation, |nccl, comm, stream| unsafe {
            (nccl.broadcast)(place, place.cast_mut(), number, UINT8, root, comm, stream)
        })
    }

    /// Sends values to process `to`, which receives as many.
    ///
    /// # Errors
    /// As [`Transport::exchange`].
    pub fn send(&self, operation: &str, values: &DeviceMemory, to: usize) -> Result<(), Aborted> {
        let (from, number, to) = (values.at(&(0..values.bytes)), values.bytes, peer(to));
        // SAFETY: as in `all_reduce`
        self.wait(operation, |nccl, comm, stream| unsafe { (nccl.send)(from, number, UINT8, to, comm, stream) })
    }

    /// Receives values of process `from`, which sends as many.
    ///
    /// # Errors
    /// As [`Transport::exchange`].
    pub fn recv(&self, operation: &str, values: &mut DeviceMemory, from: usize) -> Result<(), Aborted> {
        let (place, number, from) = (values.at(&(0..values.bytes)).cast_mut(), values.bytes, peer(from));
        // SAFETY: as in `all_reduce`
        self.wait(operation, |nccl, comm, stream| unsafe { (nccl.recv)(place, number, UINT8, from, comm, stream) })
    }

    /// Runs an operation on memory of the GPU to its end.
    fn wait(&self, operation: &str, begin: impl FnOnce(&Library, Comm, Stream) -> c_int) -> Result<(), Aborted> {
        self.transport.run(operation, |communicator| communicator.begin(begin), |_| Ok(()))
    }
}

impl Transport for Nccl {
    fn process(&self) -> usize {
        self.transport.process()
    }

    fn processes(&self) -> usize {
        self.processes
    }

    fn exchange(&self, operation: &str, parts: Vec<Arc<Vec<u8>>>, patience: Patience) -> Result<Vec<Vec<u8>>, Aborted> {
        self.transport.exchange(operation, parts, patience)
    }

    fn sum(&self, operation: &str, values: Vec<f32>) -> Result<Vec<f32>, Aborted> {
        self.transport.sum(operation, values)
    }

    fn abort(&self, reason: &str) {
        self.transport.abort(reason);
    }

    fn finish(&self) {
        self.transport.finish();
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of {} on GPU {}", self.process(), self.processes, self.gpu.uuid)
    }
}

/// A process as NCCL counts them; one that is too large for it is none that it knows, and it says so.
fn peer(process: usize) -> c_int {
    c_int::try_from(process).unwrap_or(c_int::MAX)
}

/// A number of processes as NCCL takes it.
fn count(number: usize) -> Result<c_int, String> {
    c_int::try_from(number).map_err(|_| format!("NCCL counts processes with an int, and there are {number}"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::collective::{Collective, Tensors, ThreadRank};
    use super::super::config::Reduction;
    use super::super::processes::ProcessRank;
    use super::super::store::Store;
    use super::super::transport::Link;
    use super::super::tree::{TreeSum, share};
    use super::*;

    /// Tells whether there is a GPU and NCCL, and says so if not.
    fn there_is_no_gpu(test: &str) -> bool {
        let missing = gpus().and_then(|gpus| nccl_version().map(|_| gpus));
        match missing {
            Ok(gpus) if gpus > 0 => false,
            Ok(_) => {
                eprintln!("skipped {test}: no GPU is visible");
                true
            }
            Err(error) => {
                eprintln!("skipped {test}: {}", error.to_string().lines().next().unwrap_or_default());
                true
            }
        }
    }

    /// Connects processes that are threads of the test, each with the GPU that `gpu` names for it, and runs `work` in each.
    fn run<R: Send>(
        processes: usize,
        seconds: u64,
        gpu: impl Fn(usize) -> usize + Sync,
        work: impl Fn(Nccl) -> R + Sync,
    ) -> Vec<Result<R, String>> {
        let stores = Store::together(processes, Duration::from_mins(1));
        let (gpu, work) = (&gpu, &work);
        std::thread::scope(|scope| {
            let start = |store: Store| {
                scope.spawn(move || {
                    let gpu = gpu(store.process());
                    let nccl = Nccl::start(Arc::new(store), gpu, Duration::from_secs(seconds));
                    nccl.map(work).map_err(|error| error.to_string())
                })
            };
            let threads: Vec<_> = stores.into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn gpu_one_process_does_every_operation() {
        if there_is_no_gpu("gpu_one_process_does_every_operation") {
            return;
        }
        let nccl = run(1, 60, |_| 0, |nccl| nccl).remove(0).unwrap();
        let sum = nccl.sum("a sum", vec![0.1, 1e-40, -3.0]).unwrap();
        assert_eq!(sum, [0.1, 1e-40, -3.0]);
        let message = Arc::new(b"to itself".to_vec());
        let received = nccl.exchange("an exchange", vec![Arc::clone(&message)], Patience::Endless).unwrap();
        assert_eq!(received, [message.to_vec()]);
        let bytes: &[u8] = bytemuck::cast_slice(&[1.5f32, 2.5, -7.0]);
        let mut values = nccl.memory(bytes).unwrap();
        let mut other = nccl.memory(&[0; 12]).unwrap();
        nccl.all_reduce("all-reduce", &mut values).unwrap();
        nccl.broadcast("broadcast", &mut values, 0).unwrap();
        nccl.reduce_scatter("reduce-scatter", &values, &mut other).unwrap();
        nccl.all_gather("all-gather", &other, &mut values).unwrap();
        assert_eq!(nccl.read(&values).unwrap(), bytes);
        nccl.finish();
    }

    #[test]
    fn gpu_two_processes_on_one_gpu_are_refused() {
        if there_is_no_gpu("gpu_two_processes_on_one_gpu_are_refused") {
            return;
        }
        for outcome in run(2, 60, |_| 0, drop) {
            let error = outcome.unwrap_err();
            assert!(error.starts_with("processes 0 and 1 have the same GPU (GPU-"), "{error}");
            assert!(error.contains("hint: start one process for each GPU"), "{error}");
        }
    }

    #[test]
    fn gpu_several_follow_the_canonical_tree_and_move_memory() {
        let test = "gpu_several_follow_the_canonical_tree_and_move_memory";
        if there_is_no_gpu(test) {
            return;
        }
        let gpus = gpus().unwrap();
        if gpus < 2 {
            eprintln!("skipped {test}: one GPU only");
            return;
        }
        let leaves = 6;
        let leaf = |index: usize| -> Tensors {
            let tensor = |length: usize| (0..length).map(|j| 1.0 / (index * 31 + j * 7 + 1) as f32).collect();
            vec![tensor(3), tensor(0), tensor(4001)]
        };
        let mut sum = TreeSum::new(leaves);
        (0..leaves).for_each(|index| sum.push_leaf(index, leaf(index)));
        let expected = sum.finish();
        for processes in 2..=gpus.min(4) {
            let outcomes = run(
                processes,
                60,
                |process| process,
                |nccl| {
                    let me = nccl.process();
                    let floats = |values: &[f32]| nccl.memory(bytemuck::cast_slice(values)).unwrap();
                    let read =
                        |memory: &DeviceMemory| bytemuck::pod_collect_to_vec::<u8, f32>(&nccl.read(memory).unwrap());
                    // process p has p + 1 for everyone
                    let (mut all, mut own) = (floats(&vec![me as f32 + 1.0; processes]), floats(&[0.0]));
                    nccl.reduce_scatter("reduce-scatter", &all, &mut own).unwrap();
                    let total = (processes * (processes + 1) / 2) as f32;
                    assert_eq!(read(&own), [total]);
                    nccl.all_reduce("all-reduce", &mut own).unwrap();
                    assert_eq!(read(&own), [total * processes as f32]);
                    let mut mine = floats(&[me as f32]);
                    nccl.all_gather("all-gather", &mine, &mut all).unwrap();
                    assert_eq!(read(&all), (0..processes).map(|process| process as f32).collect::<Vec<_>>());
                    nccl.broadcast("broadcast", &mut mine, 1).unwrap();
                    assert_eq!(read(&mine), [1.0]);
                    match me {
                        0 => nccl.send("send", &floats(&[-0.0]), 1).unwrap(),
                        1 => nccl.recv("recv", &mut mine, 0).unwrap(),
                        _ => {}
                    }
                    assert!(me != 1 || read(&mine)[0].is_sign_negative());

                    let mut totals = Vec::new();
                    let link = Arc::new(Link::new(Arc::new(nccl)));
                    for reduction in [Reduction::Canonical, Reduction::Fast] {
                        let rank = ProcessRank::new(ThreadRank::world(1).remove(0), Arc::clone(&link), reduction);
                        let mut sum = TreeSum::new(leaves);
                        share(leaves, me, processes).for_each(|index| sum.push_leaf(index, leaf(index)));
                        totals.push(rank.reduce(leaves, sum.into_nodes()).unwrap().unwrap());
                    }
                    link.finish().unwrap();
                    totals
                },
            );
            for totals in outcomes {
                let totals = totals.unwrap();
                assert_eq!(totals[0], expected, "{processes} processes");
                for (got, expected) in totals[1].iter().flatten().zip(expected.iter().flatten()) {
                    assert!((got - expected).abs() <= 1e-6, "{got} {expected}");
                }
            }
        }
    }

    /// The reason that ends an operation of three processes against the stand-in, unless it is not set up to fail.
    fn ends_with(setting: &str, seconds: u64) -> Option<Vec<String>> {
        std::env::var_os(setting)?;
        let outcomes = run(
            3,
            seconds,
            |process| process,
            |nccl| {
                let link = Arc::new(Link::new(Arc::new(nccl)));
                let rank = ProcessRank::new(ThreadRank::world(1).remove(0), link, Reduction::Canonical);
                let outcome = (0..3).try_for_each(|_| rank.all_gather(vec![1.0]).map(drop));
                outcome.unwrap_err().reason
            },
        );
        Some(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|error| error)).collect())
    }

    #[test]
    fn stand_in_that_fails_ends_all_with_its_words() {
        let Some(reasons) = ends_with("STAND_IN_FAIL", 60) else { return };
        for reason in reasons {
            let words = "at operation 0, all-gather of f32: remote process exited or there was a network error (stand-in: on purpose)";
            assert!(reason.contains("NCCL failed ") && reason.ends_with(words), "{reason}");
        }
    }

    #[test]
    fn stand_in_that_never_answers_ends_all_at_the_deadline() {
        let Some(reasons) = ends_with("STAND_IN_SILENT", 1) else { return };
        for reason in reasons {
            let words =
                "NCCL did not finish within 1 s, at operation 0, all-gather of f32, though every process is there";
            assert!(reason.ends_with(words), "{reason}");
        }
    }

    #[test]
    fn stand_in_that_is_too_old_is_refused() {
        let Some(reasons) = ends_with("STAND_IN_VERSION", 60) else { return };
        for reason in reasons {
            assert!(reason.starts_with("NCCL 2.10.3 is too old\nhint: "), "{reason}");
        }
    }

    /// Runs the tests above again, with libraries that stand in for CUDA's driver and NCCL on the host's memory.
    #[test]
    fn the_calls_fit_together_against_stand_ins_of_the_libraries() {
        let folder = tempfile::tempdir().unwrap();
        let driver = folder.path().join("libcuda.so.1");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in/cuda_and_nccl.c");
        let flags = ["-std=c11", "-O1", "-shared", "-fPIC", "-pthread", source, "-o"];
        match Command::new("cc").args(flags).arg(&driver).output() {
            Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => {
                eprintln!("skipped: no C compiler `cc` ({error})");
                return;
            }
        }
        std::fs::hard_link(&driver, folder.path().join("libnccl.so.2")).unwrap();
        let paths = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let paths = std::iter::once(folder.path().to_owned()).chain(std::env::split_paths(&paths));
        let paths = std::env::join_paths(paths).unwrap();
        for (setting, value, tests, count) in [
            ("STAND_IN_GPUS", "4", "gpu_", 3),
            ("STAND_IN_FAIL", "3", "stand_in_that_fails", 1),
            ("STAND_IN_SILENT", "1", "stand_in_that_never_answers", 1),
            ("STAND_IN_VERSION", "21003", "stand_in_that_is_too_old", 1),
        ] {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([&format!("parallel::nccl::tests::{tests}"), "--nocapture"]);
            let output = command.env("LD_LIBRARY_PATH", &paths).env(setting, value).output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && !said.contains("skipped"), "{setting}={value}: {said}");
            assert!(said.contains(&format!("test result: ok. {count} passed")), "{setting}={value}: {said}");
        }
    }

    #[test]
    fn a_missing_library_is_told_with_what_to_install() {
        let error = Library::open(&["libnccl-of-nobody.so"]).err().unwrap().to_string();
        let (first, hint) = error.split_once('\n').unwrap();
        assert!(first.starts_with("NCCL, which connects GPUs, cannot be opened: libnccl-of-nobody.so"), "{first}");
        assert!(hint.contains("libnccl2") && hint.contains("LD_LIBRARY_PATH"), "{hint}");
        assert_eq!([21_805, 23_004].map(version_text), ["2.18.5", "2.30.4"]);
    }

    #[test]
    fn structs_are_as_large_as_in_c() {
        // offsets of NCCL 2.18's nccl.h on 64 bits
        assert_eq!((size_of::<UniqueId>(), size_of::<Config>()), (128, 48));
        assert_eq!((std::mem::offset_of!(Config, net_name), std::mem::offset_of!(Config, split_share)), (32, 40));
    }
}
