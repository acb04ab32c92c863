//! NCCL, loaded at run time: one communicator for each rank, set up and used without blocking.
//!
//! The underlying crate panics if NCCL is missing, so its presence is checked first. Of the names in NCCL's packages it
//! knows only `libnccl.so`.

use super::{Cuda, CudaMemory, address};
use crate::gpu::group::SpinWait;
use crate::gpu::nccl::{Nccl, NcclId, why_not};
use crate::gpu::{GpuError, Part, Unavailable};
use cudarc::driver::{CudaContext, CudaStream};
use cudarc::nccl::sys;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// One rank of a communicator.
#[derive(Debug)]
pub struct CudaNccl {
    comm: Comm,
    context: Arc<CudaContext>,
    /// The thread that aborts it, if any.
    abort: Mutex<Option<JoinHandle<()>>>,
    is_aborted: AtomicBool,
}

/// A communicator of NCCL.
#[derive(Debug, Clone, Copy)]
struct Comm(sys::ncclComm_t);

// SAFETY: NCCL's communicators may be used from any thread, by one at a time.
unsafe impl Send for Comm {}
// SAFETY: what is shared is the pointer.
unsafe impl Sync for Comm {}

impl CudaNccl {
    fn new(comm: sys::ncclComm_t, context: Arc<CudaContext>) -> Self {
        Self { comm: Comm(comm), context, abort: Mutex::new(None), is_aborted: AtomicBool::new(false) }
    }

    /// Abort it on a thread of its own, and wait until that has ended, or until the deadline.
    fn abort(&self, until: Instant) -> bool {
        let mut abort = self.abort.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_aborted.swap(true, Ordering::AcqRel) {
            let (comm, context) = (self.comm, Arc::clone(&self.context));
            let run = move || {
                let Comm(comm) = { comm };
                if context.bind_to_thread().is_ok() {
                    // SAFETY: it was set up, and nobody uses it any more.
                    let _ = unsafe { sys::ncclCommAbort(comm) };
                }
            };
            // Without a thread it is leaked: aborting here might never return.
            *abort = std::thread::Builder::new().name("nccl-abort".into()).spawn(run).ok();
        }
        let mut spin = SpinWait::default();
        while abort.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if Instant::now() >= until {
                return false;
            }
            spin.wait();
        }
        true
    }

    /// Return the communicator, unless it was aborted.
    fn alive(&self, what: &'static str) -> Result<sys::ncclComm_t, GpuError> {
        match self.is_aborted.load(Ordering::Acquire) {
            true => Err(GpuError::Nccl { what, why: "the communicator was aborted".into() }),
            false => Ok(self.comm.0),
        }
    }
}

impl Drop for CudaNccl {
    fn drop(&mut self) {
        // Its operations are complete or were stopped; a lost peer must not block this one.
        self.abort(Instant::now() + ABORT_LIMIT);
    }
}

/// How long a communicator that is dropped may take to end; then it goes on in the background.
const ABORT_LIMIT: Duration = Duration::from_secs(2);

/// Convert an error; returns true if the operation is still in progress.
fn named(status: sys::ncclResult_t, what: &'static str) -> Result<bool, GpuError> {
    match status {
        sys::ncclResult_t::ncclSuccess => Ok(false),
        sys::ncclResult_t::ncclInProgress => Ok(true),
        other => {
            // SAFETY: it returns a text that lives for ever, for any number.
            let text = unsafe { sys::ncclGetErrorString(other) };
            let why = match text.is_null() {
                true => format!("{other:?}"),
                // SAFETY: as above.
                false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            };
            Err(GpuError::Nccl { what, why })
        }
    }
}

/// Check that NCCL is available.
fn check() -> Result<(), GpuError> {
    // SAFETY: loading it runs its initialisers, as any use of it does.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(Unavailable::Nccl.into()) }
}

/// Return NCCL's constant for a type.
const fn dtype_of(dtype: Dtype) -> Option<sys::ncclDataType_t> {
    use sys::ncclDataType_t as T;
    Some(match dtype {
        Dtype::I8 => T::ncclInt8,
        Dtype::U8 => T::ncclUint8,
        Dtype::I32 => T::ncclInt32,
        Dtype::U32 => T::ncclUint32,
        Dtype::I64 => T::ncclInt64,
        Dtype::U64 => T::ncclUint64,
        Dtype::F16 => T::ncclFloat16,
        Dtype::Bf16 => T::ncclBfloat16,
        Dtype::F32 => T::ncclFloat32,
        Dtype::F64 => T::ncclFloat64,
        _ => return None,
    })
}

/// Return NCCL's constant for an operator.
const fn op_of(op: ReduceOp) -> Option<sys::ncclRedOp_t> {
    use sys::ncclRedOp_t as O;
    Some(match op {
        ReduceOp::Sum => O::ncclSum,
        ReduceOp::Prod => O::ncclProd,
        ReduceOp::Min => O::ncclMin,
        ReduceOp::Max => O::ncclMax,
        ReduceOp::Avg => O::ncclAvg,
        _ => return None,
    })
}

/// Return a configuration with non-blocking mode and otherwise defaults, in the layout of 2.24.
fn config() -> sys::ncclConfig_t {
    // The magic number of NCCL's header, and its value for defaults.
    const MAGIC: u32 = 0xcafe_beef;
    const VERSION: u32 = 22_403;
    const UNDEFINED: c_int = c_int::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: MAGIC,
        version: VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: ptr::null(),
        splitShare: UNDEFINED,
    }
}

impl Nccl for Cuda {
    type Comm = CudaNccl;

    fn nccl_version(&self) -> Result<u32, GpuError> {
        check()?;
        let mut version = 0;
        // SAFETY: it writes one integer.
        named(unsafe { sys::ncclGetVersion(&raw mut version) }, "its version")?;
        Ok(version.unsigned_abs())
    }

    fn nccl_id(&self) -> Result<NcclId, GpuError> {
        check()?;
        self.bind()?;
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: it writes one id.
        named(unsafe { sys::ncclGetUniqueId(&raw mut id) }, "an id")?;
        Ok(NcclId(id.internal.iter().map(|&byte| byte as u8).collect()))
    }

    fn nccl_init(&self, id: &NcclId, rank: u32, ranks: u32) -> Result<CudaNccl, GpuError> {
        check()?;
        self.bind()?;
        let bytes: [u8; 128] =
            id.0.as_slice()
                .try_into()
                .map_err(|_| GpuError::Nccl { what: "an id", why: format!("{} bytes instead of 128", id.0.len()) })?;
        let id = sys::ncclUniqueId { internal: bytes.map(|byte| byte as c_char) };
        let (mut comm, mut config) = (ptr::null_mut(), config());
        // SAFETY: both are written or read during the call alone; the ranks agreed on the id.
        let begun =
            unsafe { sys::ncclCommInitRankConfig(&raw mut comm, ranks as c_int, id, rank as c_int, &raw mut config) };
        named(begun, "a communicator")?;
        Ok(CudaNccl::new(comm, Arc::clone(&self.context)))
    }

    fn nccl_is_ready(&self, comm: &CudaNccl) -> Result<bool, GpuError> {
        let what = "an operation";
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: it writes one number.
        named(unsafe { sys::ncclCommGetAsyncError(comm.alive(what)?, &raw mut state) }, what)?;
        Ok(!named(state, what)?)
    }

    fn nccl_all_reduce(
        &self,
        comm: &CudaNccl,
        on: &Arc<CudaStream>,
        (dtype, op): (Dtype, ReduceOp),
        (to, from): (Part<'_, CudaMemory>, Part<'_, CudaMemory>),
    ) -> Result<(), GpuError> {
        self.bind()?;
        let desc = OpDesc::all_reduce(dtype, op, 1);
        let refused = |why: String| GpuError::Kernel { kernel: format!("{dtype} {op}"), why };
        if let Some(why) = why_not(Order::Arrival, &desc) {
            return Err(refused(why.to_string()));
        }
        let (Some(its_dtype), Some(its_op)) = (dtype_of(dtype), op_of(op)) else {
            return Err(refused("NCCL does not support this reduction".into()));
        };
        if to.len_bytes != from.len_bytes {
            return Err(GpuError::Invalid(format!("{} bytes into {}", from.len_bytes, to.len_bytes)));
        }
        let (count, what) = (to.len_bytes / desc.element_bytes(), "an all-reduce");
        let (send, receive) = (address(&from) as usize as *const _, address(&to) as usize as *mut _);
        // SAFETY: both parts hold `count` elements and are kept by the caller until the stream has got there.
        let enqueued = unsafe {
            let on = on.cu_stream().cast();
            sys::ncclAllReduce(send, receive, count, its_dtype, its_op, comm.alive(what)?, on)
        };
        named(enqueued, what).map(|_| ())
    }

    fn nccl_abort(&self, comm: &CudaNccl, until: Instant) -> bool {
        comm.abort(until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Operations that pass [`why_not`] have NCCL types and operators.
    #[test]
    fn eligible_operations_have_nccl_types_and_operators() {
        for &dtype in Dtype::ALL {
            for &op in ReduceOp::ALL {
                let is_possible = why_not(Order::Arrival, &OpDesc::all_reduce(dtype, op, 1)).is_none();
                assert!(!is_possible || (dtype_of(dtype).is_some() && op_of(op).is_some()), "{dtype} {op}");
            }
        }
    }

    #[test]
    fn missing_nccl_is_reported() {
        match check() {
            Ok(()) => {}
            Err(error) => assert!(error.to_string().contains("libnccl.so"), "{error}"),
        }
    }
}
