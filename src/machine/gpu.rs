//! NVIDIA's GPUs: what the kernel says of them, and in builds with `nccl` or `cuda` what the driver does.
//!
//! The driver is opened at run time, function by function: one that is missing is an error and no panic, which cudarc's bindings would make of it.

use std::fs;

use super::{field, read};

/// What the kernel says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvidia {
    /// Version of the driver, as in 550.54.15.
    pub driver: Option<String>,
    /// Name of each GPU.
    pub names: Vec<String>,
}

/// Looks for NVIDIA's kernel module (Linux).
#[must_use]
pub fn nvidia() -> Option<Nvidia> {
    let version = read("/proc/driver/nvidia/version")?;
    let folders = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let texts = folders.filter_map(|gpu| fs::read_to_string(gpu.path().join("information")).ok());
    let mut names: Vec<String> = texts.filter_map(|text| field(&text, "Model").map(str::to_owned)).collect();
    names.sort();
    Some(Nvidia { driver: version_in(&version).map(str::to_owned), names })
}

fn version_in(text: &str) -> Option<&str> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version)
}

/// A GPU that this process may use (`CUDA_VISIBLE_DEVICES`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Compute capability, as in 9.0.
    pub capability: [u32; 2],
}

impl Gpu {
    /// Tells whether it multiplies in bf16: from Ampere, compute capability 8.0, on.
    #[must_use]
    pub fn has_bf16(&self) -> bool {
        self.capability[0] >= 8
    }
}

/// Why GPUs cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// This build has nothing to ask them with.
    #[error("this build is for the CPU")]
    NotBuiltIn,
    /// The driver cannot be opened, or lacks a function.
    #[error("{0}")]
    NoDriver(String),
    /// A function of the driver failed.
    #[error("CUDA's driver fails to {what}: error {code}")]
    Driver {
        /// What was to be done.
        what: &'static str,
        /// Its `CUresult`.
        code: i32,
    },
}

/// Returns the CUDA version of the driver, as in 12.4, and the GPUs.
///
/// # Errors
/// When this build or this machine has none, or the driver does not work.
pub fn gpus() -> Result<(String, Vec<Gpu>), GpuError> {
    #[cfg(feature = "nccl")]
    return driver::Driver::get()?.gpus();
    #[cfg(not(feature = "nccl"))]
    return Err(GpuError::NotBuiltIn);
}

/// Returns the bytes of a GPU's memory that all processes together have taken, and all that it has.
///
/// # Errors
/// As [`gpus`].
pub fn device_memory(gpu: usize) -> Result<[u64; 2], GpuError> {
    #[cfg(feature = "nccl")]
    return driver::Driver::get()?.memory(gpu);
    #[cfg(not(feature = "nccl"))]
    {
        let _ = gpu;
        Err(GpuError::NotBuiltIn)
    }
}

#[cfg(feature = "nccl")]
#[expect(unsafe_code, reason = "functions of a library in C")]
mod driver {
    use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
    use std::sync::OnceLock;

    use super::{Gpu, GpuError};

    const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
    /// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`.
    const CAPABILITY: [c_int; 2] = [75, 76];
    const LONGEST_NAME: c_int = 256;

    macro_rules! functions {
        ($($field:ident: $symbol:literal = fn($($argument:ty),*);)*) => {
            /// The functions that are asked; the library is never closed.
            pub(super) struct Driver {
                $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
                _opened: libloading::Library,
            }

            impl Driver {
                fn find(library: libloading::Library) -> Result<Self, libloading::Error> {
                    Ok(Self {
                        // SAFETY: the signatures are those of cuda.h, and the library stays open as long as they are there
                        $($field: *unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($symbol) }?,)*
                        _opened: library,
                    })
                }
            }
        };
    }

    // https://docs.nvidia.com/cuda/cuda-driver-api/
    functions! {
        init: b"cuInit\0" = fn(c_uint);
        version: b"cuDriverGetVersion\0" = fn(*mut c_int);
        count: b"cuDeviceGetCount\0" = fn(*mut c_int);
        device: b"cuDeviceGet\0" = fn(*mut c_int, c_int);
        name: b"cuDeviceGetName\0" = fn(*mut c_char, c_int, c_int);
        total: b"cuDeviceTotalMem_v2\0" = fn(*mut usize, c_int);
        attribute: b"cuDeviceGetAttribute\0" = fn(*mut c_int, c_int, c_int);
        retain: b"cuDevicePrimaryCtxRetain\0" = fn(*mut *mut c_void, c_int);
        set_current: b"cuCtxSetCurrent\0" = fn(*mut c_void);
        memory_info: b"cuMemGetInfo_v2\0" = fn(*mut usize, *mut usize);
    }

    fn check(what: &'static str, code: c_int) -> Result<(), GpuError> {
        if code == 0 { Ok(()) } else { Err(GpuError::Driver { what, code }) }
    }

    impl Driver {
        /// Opens the driver, once in a process.
        pub(super) fn get() -> Result<&'static Self, GpuError> {
            static DRIVER: OnceLock<Result<Driver, GpuError>> = OnceLock::new();
            DRIVER.get_or_init(Self::open).as_ref().map_err(Clone::clone)
        }

        fn open() -> Result<Self, GpuError> {
            let mut cause = String::new();
            for name in NAMES {
                // SAFETY: what the driver does when it is opened is what every program with CUDA relies on
                match unsafe { libloading::Library::new(*name) }.and_then(Self::find) {
                    Ok(driver) => {
                        // SAFETY: as cuda.h has it
                        check("start", unsafe { (driver.init)(0) })?;
                        return Ok(driver);
                    }
                    Err(error) if cause.is_empty() => cause = error.to_string(),
                    Err(_) => {}
                }
            }
            Err(GpuError::NoDriver(cause))
        }

        pub(super) fn gpus(&self) -> Result<(String, Vec<Gpu>), GpuError> {
            let (mut version, mut count) = (0, 0);
            // SAFETY: the pointers are valid during the calls
            unsafe {
                check("tell its version", (self.version)(&raw mut version))?;
                check("count GPUs", (self.count)(&raw mut count))?;
            }
            let gpus = (0..count).map(|index| self.gpu(index)).collect::<Result<_, _>>()?;
            Ok((format!("{}.{}", version / 1000, version % 1000 / 10), gpus))
        }

        fn device(&self, index: c_int) -> Result<c_int, GpuError> {
            let mut device = 0;
            // SAFETY: the pointer is valid during the call
            check("find a GPU", unsafe { (self.device)(&raw mut device, index) })?;
            Ok(device)
        }

        fn gpu(&self, index: c_int) -> Result<Gpu, GpuError> {
            let device = self.device(index)?;
            let mut name: [c_char; LONGEST_NAME as usize] = [0; LONGEST_NAME as usize];
            let mut memory = 0;
            let mut capability: [c_int; 2] = [0; 2];
            // SAFETY: the pointers are valid during the calls, and the name is as long as said; its last byte stays 0
            let name = unsafe {
                check("name a GPU", (self.name)(name.as_mut_ptr(), LONGEST_NAME - 1, device))?;
                check("tell a GPU's memory", (self.total)(&raw mut memory, device))?;
                for (value, attribute) in capability.iter_mut().zip(CAPABILITY) {
                    check("tell a GPU's capability", (self.attribute)(value, attribute, device))?;
                }
                CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
            };
            Ok(Gpu { name, memory: memory as u64, capability: capability.map(|part| u32::try_from(part).unwrap_or(0)) })
        }

        pub(super) fn memory(&self, index: usize) -> Result<[u64; 2], GpuError> {
            let device = self.device(c_int::try_from(index).unwrap_or(c_int::MAX))?;
            let mut context = std::ptr::null_mut();
            let [mut free, mut total] = [0; 2];
            // SAFETY: the pointers are valid during the calls; the primary context, which burn's tensors live in too, is never released
            unsafe {
                check("open a GPU", (self.retain)(&raw mut context, device))?;
                check("open a GPU", (self.set_current)(context))?;
                check("tell a GPU's memory", (self.memory_info)(&raw mut free, &raw mut total))?;
            }
            Ok([total.saturating_sub(free) as u64, total as u64])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_the_kernel_says() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  12.2.0";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@x)";
        assert_eq!([closed, open, "", "nothing"].map(version_in), [Some("535.104.05"), Some("570.86.15"), None, None]);
    }

    #[test]
    fn asking_a_machine_without_gpus_is_an_error_and_no_panic() {
        if let (Err(error), Err(memory)) = (gpus(), device_memory(0)) {
            assert_eq!(error, memory);
            assert!(!error.to_string().is_empty());
        }
        let gpu = |capability| Gpu { name: String::new(), memory: 0, capability };
        assert_eq!([[7, 5], [8, 0], [12, 1]].map(|capability| gpu(capability).has_bf16()), [false, true, true]);
    }

    #[cfg(feature = "nccl")]
    #[test]
    fn stand_in_gpus_are_told() {
        if std::env::var_os("STAND_IN_GPUS").is_none() {
            eprintln!("skipped: not run by the test below");
            return;
        }
        let (cuda, gpus) = gpus().unwrap();
        let gpu = |name: &str, major| Gpu { name: name.to_owned(), memory: 80 << 30, capability: [major, 0] };
        assert_eq!((cuda.as_str(), gpus), ("12.4", vec![gpu("Stand-in 0", 7), gpu("Stand-in 1", 9)]));
        assert_eq!(device_memory(1), Ok([20 << 30, 80 << 30]));
        assert_eq!(device_memory(2), Err(GpuError::Driver { what: "find a GPU", code: 101 }));
    }

    /// Runs the test above again, with a library that stands in for CUDA's driver.
    #[cfg(feature = "nccl")]
    #[test]
    fn the_driver_is_asked_as_it_wants_to_be() {
        use std::process::Command;

        let folder = tempfile::tempdir().unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in/cuda_and_nccl.c");
        let flags = ["-std=c11", "-O1", "-shared", "-fPIC", "-pthread", source, "-o"];
        match Command::new("cc").args(flags).arg(folder.path().join("libcuda.so.1")).output() {
            Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => {
                eprintln!("skipped: no C compiler `cc` ({error})");
                return;
            }
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["machine::gpu::tests::stand_in", "--nocapture"]);
        command.env("LD_LIBRARY_PATH", folder.path()).env("STAND_IN_GPUS", "2");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains("1 passed") && !said.contains("skipped"), "{said}");
    }
}
