//! Where tensors live: the only place that names burn's devices.

use burn::tensor::Device;

use crate::precision::Bf16;

/// A device that was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA if this build and this machine have it, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device with this index, or the one that is this process's.
    Cuda(Option<usize>),
}

/// A device, and what the user should know about the choice.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// The device, without autodiff.
    pub device: Device,
    /// The device in words.
    pub description: String,
    /// One line to print, if the choice is not what the user may expect.
    pub note: Option<String>,
    /// What it makes of bf16.
    pub bf16: Bf16,
}

/// A device that is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}\nhint: {hint}")]
pub struct DeviceError {
    reason: String,
    hint: String,
}

/// Opens the device that was asked for.
///
/// # Errors
/// When CUDA was asked for by name and this build or this machine has none; `auto` falls back to the CPU and says so.
pub fn choose(choice: DeviceChoice) -> Result<Chosen, DeviceError> {
    match (choice, cuda_driver()) {
        (DeviceChoice::Cpu, _) => Ok(cpu(None)),
        (DeviceChoice::Auto, Driver::Absent) => {
            let note = "no CUDA driver was found (libcuda), so this runs on the CPU".to_owned();
            Ok(cpu(cfg!(feature = "cuda").then_some(note)))
        }
        (DeviceChoice::Auto, Driver::Present) if cfg!(feature = "cuda") => {
            Ok(cuda(0).unwrap_or_else(|error| cpu(Some(format!("{}, so this runs on the CPU", error.reason)))))
        }
        (DeviceChoice::Auto, Driver::Present) => {
            let note = "this machine has an NVIDIA driver, but this build is for the CPU; rebuild with `cargo build --features cuda`";
            Ok(cpu(Some(note.to_owned())))
        }
        (DeviceChoice::Cuda(index), Driver::Present) if cfg!(feature = "cuda") => cuda(index.unwrap_or(0)),
        (DeviceChoice::Cuda(_), driver) => Err(no_cuda(&driver)),
    }
}

/// Why CUDA cannot be had by name.
fn no_cuda(driver: &Driver) -> DeviceError {
    let (reason, hint) = match driver {
        Driver::Absent if cfg!(feature = "cuda") => {
            ("no CUDA driver was found (libcuda)", "install the NVIDIA driver, or use `--device cpu`")
        }
        _ => ("this build is for the CPU", "rebuild with `cargo build --features cuda`, or use `--device cpu`"),
    };
    DeviceError { reason: format!("`--device cuda`: {reason}"), hint: hint.to_owned() }
}

/// Tells whether a choice means a CUDA device here, without opening one.
///
/// # Errors
/// When it was asked for by name and this build or this machine has none.
pub fn means_cuda(choice: DeviceChoice) -> Result<bool, DeviceError> {
    match (choice, cuda_driver()) {
        (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, Driver::Absent) => Ok(false),
        (DeviceChoice::Auto, Driver::Present) => Ok(cfg!(feature = "cuda")),
        (DeviceChoice::Cuda(_), Driver::Present) if cfg!(feature = "cuda") => Ok(true),
        (DeviceChoice::Cuda(_), driver) => Err(no_cuda(&driver)),
    }
}

/// Returns the CPU, for what is computed beside a run.
#[must_use]
pub fn host() -> Device {
    Device::flex()
}

fn cpu(note: Option<String>) -> Chosen {
    Chosen { device: Device::flex(), description: "CPU".to_owned(), note, bf16: Bf16::Emulated }
}

/// Opens a CUDA device and computes something on it: a driver without a device is only noticed then, by a panic inside the backend.
#[cfg(feature = "cuda")]
fn cuda(index: usize) -> Result<Chosen, DeviceError> {
    let probe = || {
        let device = Device::cuda(index);
        let one = burn::tensor::Tensor::<1>::ones([1], &device).into_scalar::<f32>();
        (device, one)
    };
    match std::panic::catch_unwind(probe) {
        Ok((device, _)) => {
            let bf16 = if device.supports_dtype(burn::tensor::DType::BF16) { Bf16::Native } else { Bf16::No };
            Ok(Chosen { device, description: format!("CUDA device {index}"), note: None, bf16 })
        }
        Err(_) => Err(DeviceError {
            reason: format!("CUDA device {index} does not answer"),
            hint: "`nvidia-smi` lists the devices; or use `--device cpu`".to_owned(),
        }),
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda(_index: usize) -> Result<Chosen, DeviceError> {
    unreachable!("only builds with the `cuda` feature choose CUDA")
}

/// Tells whether the driver library of CUDA is installed; whether it works is another matter.
#[must_use]
pub fn has_cuda_driver() -> bool {
    matches!(cuda_driver(), Driver::Present)
}

enum Driver {
    Present,
    Absent,
}

/// Looks for the driver library where its installers put it, without loading it: a driver is a file until something asks for a device.
fn cuda_driver() -> Driver {
    let names: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
    let from_environment = std::env::var_os(if cfg!(windows) { "PATH" } else { "LD_LIBRARY_PATH" }).unwrap_or_default();
    let standard: &[&str] = if cfg!(windows) {
        &["C:\\Windows\\System32"]
    } else {
        &[
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
            "/usr/lib/wsl/lib",
            "/usr/local/nvidia/lib64",
            "/run/opengl-driver/lib",
        ]
    };
    let folders = std::env::split_paths(&from_environment).chain(standard.iter().map(std::path::PathBuf::from));
    let found = folders.into_iter().any(|folder| names.iter().any(|name| folder.join(name).exists()));
    if found { Driver::Present } else { Driver::Absent }
}
