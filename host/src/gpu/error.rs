//! What can go wrong with a GPU.

use crate::exec::ExecError;
use thiserror::Error;

/// Why an operation on a GPU's memory failed, or why there is no GPU.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no GPU to be used; the rest says what is missing and what to do.
    #[error("no CUDA here, because {0}")]
    Absent(Absent),
    /// The GPU's memory is full.
    #[error("the GPU has no room for {len_bytes} bytes: free memory, or use smaller buckets")]
    OutOfMemory {
        /// What was asked for.
        len_bytes: usize,
    },
    /// A kernel reached memory that is not there: a borrowed pointer was wrong, or its memory was freed too early.
    #[error("the GPU met an illegal address: {0}; its context can't be used any more")]
    IllegalAddress(String),
    /// The GPU is gone or its context broken.
    #[error("the GPU is lost: {0}")]
    Lost(String),
    /// The handle of a peer's memory is wrong, or of memory that is gone.
    #[error("memory of another process or GPU can't be opened: {0}")]
    Handle(String),
    /// NCCL refused something.
    #[error("NCCL refused {what}: {why}")]
    Nccl {
        /// What was tried.
        what: &'static str,
        /// Its words.
        why: String,
    },
    /// The driver refused something else.
    #[error("the driver refused {what}: {why}")]
    Driver {
        /// What was tried.
        what: &'static str,
        /// The driver's name for the reason.
        why: String,
    },
    /// A kernel can't be had for this type and operator.
    #[error("no kernel for {kernel}: {why}")]
    Kernel {
        /// The type and the operator.
        kernel: String,
        /// The compiler's or the driver's words.
        why: String,
    },
    /// The arguments contradict each other. Nothing has begun.
    #[error("invalid call: {0}")]
    Invalid(String),
    /// The deadline passed. The operation has ended, and its output holds anything.
    #[error("the operation was not done by its deadline; nothing of it runs any more")]
    Deadline,
    /// It was cancelled. The operation has ended, and its output holds anything.
    #[error("the operation was cancelled; nothing of it runs any more")]
    Cancelled,
    /// This process was forked from the one that set the group up, and its GPU is not this one's. Nothing has begun.
    #[error("this process was forked from the one that set the group up: only that one can use it")]
    Forked,
    /// The operation could not be ended: its memory is kept until the GPU has let go of it, and the group is unusable.
    #[error("an operation was given up and still waits on the GPU: its memory is kept, and the group can't be used")]
    Stuck,
}

/// Which part of CUDA is missing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Absent {
    /// No driver library.
    #[error("there is no driver: libcuda.so.1 can't be loaded; install NVIDIA's driver, or pass it into the container")]
    Driver,
    /// The driver is older than what this program uses.
    #[error(
        "the driver supports CUDA {}.{}, and {}.{} is needed: update it",
        has / 1000, has % 1000 / 10, needs / 1000, needs % 1000 / 10
    )]
    OldDriver {
        /// As `cuDriverGetVersion` has it.
        has: i32,
        /// The same.
        needs: i32,
    },
    /// There is a driver, and no GPU that it knows.
    #[error("the driver finds no GPU number {ordinal}: {why}")]
    Device {
        /// Which one was asked for, from 0.
        ordinal: usize,
        /// The driver's reason.
        why: String,
    },
    /// Neither a compiler nor compiled kernels.
    #[error(
        "there is no compiler, nvrtc, and no compiled kernel {wanted}: install nvidia-cuda-nvrtc and put its folder \
         into LD_LIBRARY_PATH, or name the folder of the compiled kernels"
    )]
    Compiler {
        /// The file that would do.
        wanted: String,
    },
    /// NCCL can't be loaded.
    #[error(
        "there is no NCCL under the name libnccl.so: install it, and where the file is called libnccl.so.2, put a link \
         of that name beside it and the folder into LD_LIBRARY_PATH"
    )]
    Nccl,
    /// This program was built without it.
    #[error("this program was built without the feature cuda")]
    Feature,
}

/// Why a GPU's buffer did not get through the network.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum StagedError {
    /// On the way between the GPU and this process.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// On the way between the ranks: the communicator's error, which says what it means for later calls.
    #[error(transparent)]
    Network(#[from] crate::comm::Error),
}

impl From<Absent> for GpuError {
    fn from(absent: Absent) -> Self {
        Self::Absent(absent)
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
