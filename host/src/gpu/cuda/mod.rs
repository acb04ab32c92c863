//! CUDA backend: GPU memory through NVIDIA's driver, which is loaded at run time.
//!
//! [`Cuda`] is a [`Gpu`] for [`Group`](super::Group). Memory is its own or borrowed (PyTorch's tensors, by pointer and
//! length), streams likewise. Kernels are compiled on first use ([`compile`]) or loaded from a folder of compiled ones.
//!
//! Without a driver, GPU or compiler nothing panics: [`Cuda::open`] and [`Cuda::load`] return what is missing. The
//! underlying crate panics if a library or symbol is missing, so presence and version of driver and compiler are
//! checked first.
//!
//! Invariants:
//! - Every pointer passed to a launch lies in memory of which the caller holds a share, and within its length.
//! - The context is current whenever the driver is called.

mod bulk;
pub mod compile;
mod control;
mod direct;
mod launch;
mod memory;
mod nccl;
mod peers;
mod product;

pub use compile::{CompiledKernel, Target};
pub(crate) use direct::probe_direct;
pub use memory::{CudaMemory, CudaPinned};
pub use nccl::CudaNccl;
pub use product::Product;

use super::{Fused, Gpu, GpuError, Part, Unavailable};
use control::Control;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaGraph, CudaModule, CudaStream, DriverError, result, sys,
};
use launch::Loaded;
use memory::Block;
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The CUDA version that a driver must support, 12.4 (R550): the one whose symbols this is built for, and that loads
/// shipped PTX ([`compile::SHIPPED_PTX_VERSION`]).
const NEEDED_VERSION: i32 = 12_040;

/// Selects the GPU and the source of its kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaOptions {
    /// The GPU's number, from 0.
    pub ordinal: usize,
    /// Whether to compile kernels, if the compiler is available.
    pub compiles: bool,
    /// Folder of compiled kernels ([`CompiledKernel::file_name`]), for machines without the compiler.
    pub kernels: Option<PathBuf>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { ordinal: 0, compiles: true, kernels: None }
    }
}

/// A GPU.
#[derive(Debug)]
pub struct Cuda {
    context: Arc<CudaContext>,
    options: CudaOptions,
    /// Compute capability: 90 for 9.0.
    capability: u32,
    multiprocessors: u32,
    /// Flags of waits for words.
    wait_flags: u32,
    /// The word that disables passes, and what sets it.
    stop: CudaMemory,
    control: Control,
    /// Loaded code.
    loaded: Arc<Loads>,
}

/// Code loaded into the GPU.
#[derive(Debug, Default)]
struct Loads {
    kernels: Mutex<HashMap<Kernel, Loaded>>,
    bulk: Mutex<HashMap<(Dtype, ReduceOp), CudaFunction>>,
    publish: Mutex<Option<CudaFunction>>,
}

impl Cuda {
    /// Open a GPU.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`] names what is missing; otherwise the driver's error.
    pub fn open(options: CudaOptions) -> Result<Self, GpuError> {
        let ordinal = options.ordinal;
        let absent = |error: DriverError| Unavailable::Device { ordinal, why: words(error) };
        let devices = Self::count()?;
        if ordinal >= devices {
            return Err(Unavailable::Device { ordinal, why: format!("it finds {devices}") }.into());
        }
        let context = CudaContext::new(ordinal).map_err(absent)?;
        // SAFETY: memory and order are `Group`'s affair, which keeps both by events of its own.
        unsafe { context.disable_event_tracking() };
        let attribute = |which| context.attribute(which).map_err(|error| driver("an attribute", error));
        let multiprocessors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let (major, minor) = context.compute_capability().map_err(|error| driver("its capability", error))?;
        let capability = (major * 10 + minor).unsigned_abs();
        Self::with((context, options), (capability, multiprocessors.unsigned_abs().max(1)), Arc::default())
    }

    /// Return the number of GPUs that this process sees.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn count() -> Result<usize, GpuError> {
        check_driver()?;
        let absent = |error: DriverError| Unavailable::Device { ordinal: 0, why: words(error) };
        let devices = result::init().and_then(|()| CudaContext::device_count()).map_err(absent)?;
        Ok(usize::try_from(devices).unwrap_or(0))
    }

    /// Return the same GPU for another group, sharing loaded code: a group that stops its operations disables only its
    /// own passes.
    ///
    /// # Errors
    /// The driver's error.
    pub fn another(&self) -> Result<Self, GpuError> {
        let from = (Arc::clone(&self.context), self.options.clone());
        Self::with(from, (self.capability, self.multiprocessors), Arc::clone(&self.loaded))
    }

    fn with(
        (context, options): (Arc<CudaContext>, CudaOptions),
        (capability, multiprocessors): (u32, u32),
        loaded: Arc<Loads>,
    ) -> Result<Self, GpuError> {
        let control = Control::new(&context)?;
        let stop = Block::alloc(&context, size_of::<u32>())?;
        let wait_flags = peers::wait_flags(&context)?;
        let cuda = Self { context, options, capability, multiprocessors, wait_flags, stop, control, loaded };
        cuda.stop(false)?;
        Ok(cuda)
    }

    /// Return the GPU's name, capability and memory, for tables.
    ///
    /// # Errors
    /// The driver's error.
    pub fn describe(&self) -> Result<String, GpuError> {
        let name = self.context.name().map_err(|error| driver("its name", error))?;
        let bytes = self.context.total_mem().map_err(|error| driver("its memory", error))?;
        let version = driver_version()?;
        let (gib, capability) = (bytes as f64 / f64::from(1 << 30), f64::from(self.capability) / 10.0);
        Ok(format!(
            "{name}, sm_{}, capability {capability:.1}, {gib:.0} GiB, driver for CUDA {}.{}",
            self.capability,
            version / 1000,
            version % 1000 / 10
        ))
    }

    /// Return the compute capability: 90 for 9.0.
    pub const fn capability(&self) -> u32 {
        self.capability
    }

    /// Borrow memory, such as that of PyTorch's tensors.
    ///
    /// # Safety
    /// The bytes are memory of this GPU, valid in its primary context, until every share of the result is dropped and
    /// every operation on it is done.
    pub unsafe fn borrow(&self, address: u64, len_bytes: usize) -> CudaMemory {
        Block::borrow(&self.context, address, len_bytes)
    }

    /// Borrow a stream, such as PyTorch's current one.
    ///
    /// # Safety
    /// `handle` is a `CUstream` of the GPU's primary context, and lives until the result is dropped.
    pub unsafe fn borrow_stream(&self, handle: u64) -> Arc<CudaStream> {
        // SAFETY: the caller's.
        unsafe { self.context.wrap_borrowed_stream(handle as usize as sys::CUstream) }
    }

    /// Copy to memory, and wait for completion.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] if the lengths differ; the driver's error.
    pub fn write(&self, to: &CudaMemory, bytes: &[u8]) -> Result<(), GpuError> {
        self.fits(to, bytes.len())?;
        // SAFETY: `to` is as long as `bytes`.
        let copied = unsafe { result::memcpy_htod_sync(to.address(), bytes) };
        // From unpinned memory the last bytes may still be in flight then.
        copied.and_then(|()| self.context.default_stream().synchronize()).map_err(|error| driver("a copy", error))
    }

    /// Copy from memory, and wait for completion.
    ///
    /// # Errors
    /// As for [`Self::write`].
    pub fn read(&self, bytes: &mut [u8], from: &CudaMemory) -> Result<(), GpuError> {
        self.fits(from, bytes.len())?;
        // SAFETY: `from` is as long as `bytes`.
        unsafe { result::memcpy_dtoh_sync(bytes, from.address()) }.map_err(|error| driver("a copy", error))
    }

    fn fits(&self, memory: &CudaMemory, len_bytes: usize) -> Result<(), GpuError> {
        if memory.len_bytes() != len_bytes {
            let what = format!("{len_bytes} bytes for {} bytes of the GPU", memory.len_bytes());
            return Err(GpuError::Invalid(what));
        }
        self.bind()
    }

    fn bind(&self) -> Result<(), GpuError> {
        self.context.bind_to_thread().map_err(|error| driver("its context", error))
    }

    /// Return compiled code, from the compiler or from the folder.
    fn code(
        &self,
        file_name: String,
        compile: impl FnOnce(Target) -> Result<CompiledKernel, GpuError>,
    ) -> Result<CompiledKernel, GpuError> {
        compile::provide(&self.options, compile::is_available(), file_name, || {
            compile(compile::best_target(self.capability, driver_version()?)?)
        })
    }
}

/// Check that there is a driver, and that it is new enough.
fn check_driver() -> Result<(), GpuError> {
    // SAFETY: loading the driver runs its initialisers, as any use of it does.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::Driver.into());
    }
    supported(driver_version()?).map_err(GpuError::from)
}

fn supported(has: i32) -> Result<(), Unavailable> {
    if has < NEEDED_VERSION { Err(Unavailable::OldDriver { has, needs: NEEDED_VERSION }) } else { Ok(()) }
}

/// Return the newest CUDA that the driver supports: 13000 for 13.0.
fn driver_version() -> Result<i32, GpuError> {
    let mut version = 0;
    // SAFETY: it writes one integer.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(|error| driver("its version", error))?;
    Ok(version)
}

/// Return the driver's message for an error.
fn words(error: DriverError) -> String {
    let text =
        |words: Result<&std::ffi::CStr, DriverError>| words.ok().map(|words| words.to_string_lossy().into_owned());
    match (text(error.error_name()), text(error.error_string())) {
        (Some(name), Some(string)) => format!("{string} ({name})"),
        _ => format!("error {}", error.0 as u32),
    }
}

/// Convert an error of the driver.
fn driver(what: &'static str, error: DriverError) -> GpuError {
    use sys::cudaError_enum as E;
    let why = words(error);
    match error.0 {
        E::CUDA_ERROR_ILLEGAL_ADDRESS | E::CUDA_ERROR_MISALIGNED_ADDRESS | E::CUDA_ERROR_INVALID_ADDRESS_SPACE => {
            GpuError::IllegalAddress(why)
        }
        E::CUDA_ERROR_DEINITIALIZED
        | E::CUDA_ERROR_DEVICE_UNAVAILABLE
        | E::CUDA_ERROR_NO_DEVICE
        | E::CUDA_ERROR_INVALID_DEVICE
        | E::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | E::CUDA_ERROR_ECC_UNCORRECTABLE
        | E::CUDA_ERROR_HARDWARE_STACK_ERROR
        | E::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | E::CUDA_ERROR_LAUNCH_FAILED
        | E::CUDA_ERROR_LAUNCH_TIMEOUT
        | E::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | E::CUDA_ERROR_SYSTEM_NOT_READY
        | E::CUDA_ERROR_UNKNOWN => GpuError::Lost(why),
        _ => GpuError::Driver { what, why },
    }
}

/// Convert an error of an allocation.
fn no_room(what: &'static str, len_bytes: usize, error: DriverError) -> GpuError {
    match error.0 {
        sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY => GpuError::OutOfMemory { len_bytes },
        _ => driver(what, error),
    }
}

/// The address of part of memory.
fn address(part: &Part<'_, CudaMemory>) -> u64 {
    debug_assert!(part.at + part.len_bytes <= part.memory.len_bytes());
    part.memory.address() + part.at as u64
}

impl Gpu for Cuda {
    type Memory = CudaMemory;
    type Stream = Arc<CudaStream>;
    type Event = CudaEvent;
    type Kernel = Loaded;
    type Graph = CudaGraph;
    type Pinned = CudaPinned;

    fn alloc(&self, len_bytes: usize) -> Result<CudaMemory, GpuError> {
        Block::alloc(&self.context, len_bytes)
    }

    fn part(&self, memory: &CudaMemory, at: usize, len_bytes: usize) -> CudaMemory {
        memory.part(at, len_bytes)
    }

    fn addresses(&self, memory: &CudaMemory) -> Range<u64> {
        memory.address()..memory.address() + memory.len_bytes() as u64
    }

    fn stream(&self) -> Result<Arc<CudaStream>, GpuError> {
        self.context.new_stream().map_err(|error| driver("a stream", error))
    }

    fn event(&self) -> Result<CudaEvent, GpuError> {
        self.context.new_event(None).map_err(|error| driver("an event", error))
    }

    fn load(&self, kernel: &Kernel) -> Result<Loaded, GpuError> {
        let loaded = || self.loaded.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = loaded().get(kernel) {
            return Ok(known.clone());
        }
        // Without the lock: several threads may compile at a time.
        let code = self.code(CompiledKernel::file_name(kernel), |target| compile::compile(kernel, target))?;
        let new = Loaded::new(&self.context, kernel, code)?;
        Ok(loaded().entry(*kernel).or_insert(new).clone())
    }

    fn copy(&self, on: &Arc<CudaStream>, to: Part<'_, CudaMemory>, from: Part<'_, CudaMemory>) -> Result<(), GpuError> {
        debug_assert_eq!(to.len_bytes, from.len_bytes);
        self.bind()?;
        // SAFETY: both parts are within memory of this GPU, which the caller keeps.
        unsafe { result::memcpy_dtod_async(address(&to), address(&from), from.len_bytes, on.cu_stream()) }
            .map_err(|error| driver("a copy", error))
    }

    fn land(&self, on: &Arc<CudaStream>, kernel: &Loaded, fused: &Fused<'_, CudaMemory>) -> Result<(), GpuError> {
        kernel.land(on, self.multiprocessors, fused, self.stop.address())
    }

    fn scale(
        &self,
        on: &Arc<CudaStream>,
        kernel: &Loaded,
        to: Part<'_, CudaMemory>,
        from: Part<'_, CudaMemory>,
        scalar: f64,
    ) -> Result<(), GpuError> {
        kernel.scale(on, self.multiprocessors, (&to, &from), scalar, self.stop.address())
    }

    fn record(&self, event: &CudaEvent, on: &Arc<CudaStream>) -> Result<(), GpuError> {
        event.record(on).map_err(|error| driver("an event", error))
    }

    fn wait(&self, on: &Arc<CudaStream>, event: &CudaEvent) -> Result<(), GpuError> {
        on.wait(event).map_err(|error| driver("a wait", error))
    }

    fn is_done(&self, event: &CudaEvent) -> Result<bool, GpuError> {
        self.bind()?;
        event.try_is_complete().map_err(|error| driver("an operation", error))
    }

    fn timer(&self) -> Result<CudaEvent, GpuError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        self.context.new_event(flags).map_err(|error| driver("an event", error))
    }

    fn elapsed_us(&self, from: &CudaEvent, to: &CudaEvent) -> Result<f64, GpuError> {
        let elapsed_ms = from.elapsed_ms(to).map_err(|error| driver("a time", error))?;
        Ok(f64::from(elapsed_ms) * 1e3)
    }

    fn capture(
        &self,
        on: &Arc<CudaStream>,
        body: &mut dyn FnMut() -> Result<(), GpuError>,
    ) -> Result<CudaGraph, GpuError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        on.begin_capture(mode).map_err(|error| driver("a capture", error))?;
        let result = body();
        // End the capture even if its body failed.
        let graph = on.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(|error| driver("a capture", error));
        result?;
        graph?.ok_or_else(|| GpuError::Driver { what: "a capture", why: "it captured nothing".into() })
    }

    fn launch(&self, graph: &CudaGraph, _: &Arc<CudaStream>) -> Result<(), GpuError> {
        // It runs on the stream that it was captured on: a group has only one that captures.
        graph.launch().map_err(|error| driver("a graph", error))
    }

    fn stop(&self, is_stopped: bool) -> Result<(), GpuError> {
        self.write_words(self.stop.address(), &[u32::from(is_stopped)])
    }

    fn pinned(&self, len_bytes: usize) -> Result<CudaPinned, GpuError> {
        CudaPinned::new(&self.context, len_bytes)
    }

    fn host<'p>(&self, pinned: &'p mut CudaPinned) -> Result<&'p mut [u8], GpuError> {
        pinned.host()
    }

    fn download(&self, on: &Arc<CudaStream>, to: &mut CudaPinned, from: Part<'_, CudaMemory>) -> Result<(), GpuError> {
        to.download(on, address(&from), from.len_bytes)
    }

    fn upload(&self, on: &Arc<CudaStream>, to: Part<'_, CudaMemory>, from: &mut CudaPinned) -> Result<(), GpuError> {
        from.upload(on, address(&to), to.len_bytes)
    }
}

/// Load code into the GPU; on failure, name the kernel.
fn module(
    context: &Arc<CudaContext>,
    code: CompiledKernel,
    whose: impl FnOnce() -> String,
) -> Result<Arc<CudaModule>, GpuError> {
    context.load_module(code.into_module()).map_err(|error| match driver("a kernel", error) {
        GpuError::Driver { why, .. } => GpuError::Kernel { kernel: whose(), why },
        other => other,
    })
}

/// Look up a function of a module.
fn function(module: &Arc<CudaModule>, name: &'static str) -> Result<CudaFunction, GpuError> {
    module.load_function(name).map_err(|error| driver(name, error))
}

#[cfg(test)]
mod compare;
#[cfg(test)]
mod tests;
