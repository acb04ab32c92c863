//! Errors of GPU operations.

use crate::exec::ExecError;
use thiserror::Error;

/// Why an operation on a GPU's memory failed, or why there is no GPU.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No usable GPU; the payload names what is missing and what to do.
    #[error("CUDA unavailable: {0}")]
    Unavailable(Unavailable),
    /// The GPU's memory is full.
    #[error("the GPU is out of memory: cannot allocate {len_bytes} bytes; free memory, or use smaller buckets")]
    OutOfMemory {
        /// The requested length.
        len_bytes: usize,
    },
    /// A kernel accessed unmapped memory: a borrowed pointer was wrong, or its memory was freed too early.
    #[error("illegal memory access on the GPU: {0}; its context is unusable from now on")]
    IllegalAddress(String),
    /// The GPU is lost or its context broken.
    #[error("the GPU is lost: {0}")]
    Lost(String),
    /// The handle of a peer's memory is invalid, or its memory is gone.
    #[error("cannot open memory of another process or GPU: {0}")]
    Handle(String),
    /// A call to NCCL failed.
    #[error("NCCL failed: {what}: {why}")]
    Nccl {
        /// The failed call.
        what: &'static str,
        /// NCCL's message.
        why: String,
    },
    /// Another call to the driver failed.
    #[error("the CUDA driver failed: {what}: {why}")]
    Driver {
        /// The failed call.
        what: &'static str,
        /// The driver's message.
        why: String,
    },
    /// No kernel is available for this type and operator.
    #[error("no kernel for {kernel}: {why}")]
    Kernel {
        /// The type and the operator.
        kernel: String,
        /// The message of the compiler or the driver.
        why: String,
    },
    /// Invalid arguments. Nothing was enqueued.
    #[error("invalid call: {0}")]
    Invalid(String),
    /// The deadline passed. The operation has ended; its output is unspecified.
    #[error("the operation missed its deadline and was stopped")]
    Deadline,
    /// It was cancelled. The operation has ended; its output is unspecified.
    #[error("the operation was cancelled and has stopped")]
    Cancelled,
    /// This process was forked from the one that set the group up, and cannot use its GPU. Nothing was enqueued.
    #[error("the group belongs to the parent of this forked process; set up a new one")]
    Forked,
    /// The operation could not be stopped: its memory is kept until the GPU releases it, and the group is unusable.
    #[error(
        "an abandoned operation is still waiting on the GPU: its memory is kept, and the group is unusable; restart the \
         process, without CUDA_DEVICE_MAX_CONNECTIONS=1"
    )]
    Stuck,
}

/// What is missing for CUDA.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// No driver library.
    #[error("cannot load the driver libcuda.so.1; install NVIDIA's driver, or pass it into the container")]
    Driver,
    /// The driver is too old.
    #[error(
        "the driver supports CUDA {}.{}, but {}.{} is required: update NVIDIA's driver to R550 or later",
        has / 1000, has % 1000 / 10, needs / 1000, needs % 1000 / 10
    )]
    OldDriver {
        /// The supported version, as reported by `cuDriverGetVersion`.
        has: i32,
        /// The required version.
        needs: i32,
    },
    /// The driver does not find the GPU.
    #[error("the driver does not find GPU {ordinal}: {why}")]
    Device {
        /// The requested GPU, from 0.
        ordinal: usize,
        /// The driver's reason.
        why: String,
    },
    /// Neither the compiler nor a compiled kernel is available.
    #[error(
        "neither the compiler nvrtc nor the compiled kernel {wanted} is available: install nvidia-cuda-nvrtc-cu12 and \
         put its folder into LD_LIBRARY_PATH, or name the folder of the compiled kernels; where the file is called \
         libnvrtc.so.13, put a link libnvrtc.so beside it"
    )]
    Compiler {
        /// The missing file.
        wanted: String,
    },
    /// NCCL cannot be loaded.
    #[error(
        "cannot load libnccl.so: install NCCL; where the file is called libnccl.so.2, put a link \
         of that name beside it and the folder into LD_LIBRARY_PATH"
    )]
    Nccl,
    /// This program was built without the feature.
    #[error("this program was built without the feature cuda")]
    Feature,
}

/// Why a staged operation on a GPU's buffer failed.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum StagedError {
    /// Between the GPU and this process.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Between the ranks: the communicator's error, which says what it means for later calls.
    #[error(transparent)]
    Network(#[from] crate::comm::Error),
}

impl From<Unavailable> for GpuError {
    fn from(absent: Unavailable) -> Self {
        Self::Unavailable(absent)
    }
}

impl From<ExecError> for GpuError {
    fn from(error: ExecError) -> Self {
        match error {
            ExecError::Invalid { what } => Self::Invalid(what),
            other => Self::Invalid(other.to_string()),
        }
    }
}
