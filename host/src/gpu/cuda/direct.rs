//! GPUDirect RDMA: exporting GPU memory as dma-buf, and the verbs that register it, both loaded at run time.
//!
//! libibverbs is loaded here directly, so that a build without the feature `verbs` can report what the machine
//! supports. This is a probe: nothing is sent, and the registration ends with it.

use super::{Cuda, CudaMemory, CudaOptions, words};
use crate::gpu::direct::{Adapter, DmaBuf, Exported, Route, WhyPinned, route};
use crate::gpu::{Gpu, GpuError};
use cudarc::driver::sys;
use libloading::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

/// dma-bufs cover whole host pages of at least this size.
const PAGE_BYTES: u64 = 4096;

/// `ibv_access_flags`: local and remote writes, and remote reads.
const ACCESS: c_int = 1 | 2 | 4;

impl Exported for Cuda {
    fn dma_buf(&self, memory: &CudaMemory) -> Result<DmaBuf, WhyPinned> {
        let refused = |why: String| WhyPinned::Gpu(why);
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
        match self.context.attribute(attribute) {
            Ok(1) => {}
            Ok(_) => {
                return Err(refused("not supported by the driver; NVIDIA's open kernel modules support it".into()));
            }
            Err(error) => return Err(refused(words(error))),
        }
        self.bind().map_err(|error| refused(error.to_string()))?;
        let start = memory.address() / PAGE_BYTES * PAGE_BYTES;
        let end = (memory.address() + memory.len_bytes() as u64).next_multiple_of(PAGE_BYTES);
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let mut fd: c_int = -1;
        // SAFETY: it writes one descriptor.
        let got = unsafe {
            let to = (&raw mut fd).cast::<c_void>();
            sys::cuMemGetHandleForAddressRange(to, start, (end - start) as usize, kind, 0)
        };
        got.result().map_err(|error| refused(words(error)))?;
        // SAFETY: the driver has made it for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let (at, len_bytes) = (memory.address() - start, memory.len_bytes() as u64);
        Ok(DmaBuf { fd, at, len_bytes, address: memory.address() })
    }
}

type Pointer = *mut c_void;

/// A device of libibverbs, and a protection domain on it.
struct VerbsCard {
    library: Arc<Library>,
    name: String,
    context: Pointer,
    domain: Pointer,
}

/// Memory that a device has registered.
pub(crate) struct VerbsRegion {
    library: Arc<Library>,
    region: Pointer,
}

/// Look up a function of libibverbs.
fn symbol<'l, F>(library: &'l Library, name: &str) -> Result<Symbol<'l, F>, WhyPinned> {
    // SAFETY: the callers name functions of libibverbs with their types.
    unsafe { library.get(name.as_bytes()) }
        .map_err(|_| WhyPinned::Library(format!("function {name} is missing; update it")))
}

impl VerbsCard {
    /// Open the first device.
    fn open() -> Result<Self, WhyPinned> {
        // SAFETY: loading it runs its initialisers, as any use of it does.
        let library = unsafe { Library::new("libibverbs.so.1") };
        let library = library
            .map_err(|_| WhyPinned::Library("cannot load libibverbs.so.1; on Debian install libibverbs1".into()))?;
        symbol::<unsafe extern "C" fn()>(&library, "ibv_reg_dmabuf_mr")?;
        let get: Symbol<'_, unsafe extern "C" fn(*mut c_int) -> *mut Pointer> =
            symbol(&library, "ibv_get_device_list")?;
        let free: Symbol<'_, unsafe extern "C" fn(*mut Pointer)> = symbol(&library, "ibv_free_device_list")?;
        let name: Symbol<'_, unsafe extern "C" fn(Pointer) -> *const c_char> = symbol(&library, "ibv_get_device_name")?;
        let open: Symbol<'_, unsafe extern "C" fn(Pointer) -> Pointer> = symbol(&library, "ibv_open_device")?;
        let alloc: Symbol<'_, unsafe extern "C" fn(Pointer) -> Pointer> = symbol(&library, "ibv_alloc_pd")?;
        let mut count = 0;
        // SAFETY: it writes one integer, and returns an array of as many devices, or null.
        let list = unsafe { get(&raw mut count) };
        if list.is_null() {
            return Err(WhyPinned::NoDevice);
        }
        if count == 0 {
            // SAFETY: it is the list.
            unsafe { free(list) };
            return Err(WhyPinned::NoDevice);
        }
        // SAFETY: the list has a first device, which is used before the list is freed.
        let (device, context) = unsafe {
            let first = *list;
            let device = CStr::from_ptr(name(first)).to_string_lossy().into_owned();
            let context = open(first);
            free(list);
            (device, context)
        };
        let refused = |why: io::Error| WhyPinned::Refused { device: device.clone(), why: why.to_string() };
        if context.is_null() {
            return Err(refused(io::Error::last_os_error()));
        }
        // SAFETY: the device is open.
        let domain = unsafe { alloc(context) };
        let failed = domain.is_null().then(|| refused(io::Error::last_os_error()));
        let card = Self { library: Arc::new(library), name: device, context, domain };
        failed.map_or(Ok(card), Err)
    }

    /// Call the function that destroys an object, if available.
    fn end(library: &Library, name: &str, object: Pointer) {
        if let Ok(end) = symbol::<unsafe extern "C" fn(Pointer) -> c_int>(library, name)
            && !object.is_null()
        {
            // SAFETY: it is the object's own end, and nobody uses it any more.
            let _ = unsafe { end(object) };
        }
    }
}

impl Drop for VerbsCard {
    fn drop(&mut self) {
        Self::end(&self.library, "ibv_dealloc_pd", self.domain);
        Self::end(&self.library, "ibv_close_device", self.context);
    }
}

impl Drop for VerbsRegion {
    fn drop(&mut self) {
        VerbsCard::end(&self.library, "ibv_dereg_mr", self.region);
    }
}

impl Adapter for VerbsCard {
    type Region = VerbsRegion;

    fn register(&self, memory: DmaBuf) -> Result<VerbsRegion, WhyPinned> {
        type Register = unsafe extern "C" fn(Pointer, u64, usize, u64, c_int, c_int) -> Pointer;
        let register: Symbol<'_, Register> = symbol(&self.library, "ibv_reg_dmabuf_mr")?;
        let DmaBuf { fd, at, len_bytes, address } = memory;
        // SAFETY: the domain is alive, and the descriptor for as long as the call; the kernel keeps the memory.
        let region = unsafe { register(self.domain, at, len_bytes as usize, address, fd.as_raw_fd(), ACCESS) };
        if ptr::eq(region, ptr::null_mut()) {
            let why = io::Error::last_os_error().to_string();
            return Err(WhyPinned::Refused { device: self.name.clone(), why });
        }
        Ok(VerbsRegion { library: Arc::clone(&self.library), region })
    }
}

/// Try it with real memory; see [`crate::gpu::direct::probe_direct`].
pub(crate) fn probe_direct() -> Result<Result<String, WhyPinned>, GpuError> {
    let cuda = Cuda::open(CudaOptions::default())?;
    // A whole block of the driver: parts of one may not be exported.
    let memory = cuda.alloc(2 << 20)?;
    let card = VerbsCard::open();
    let tried = match &card {
        Ok(card) => route(&cuda, &memory, Ok(card)),
        Err(why) => route::<_, VerbsCard>(&cuda, &memory, Err(why.clone())),
    };
    Ok(match (tried, card) {
        (Route::Direct(region), Ok(card)) => {
            drop(region);
            Ok(card.name.clone())
        }
        (Route::Pinned(why), _) | (_, Err(why)) => Err(why),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With or without a device: no panic, and what is missing is named.
    #[test]
    fn missing_verbs_support_is_named() {
        match VerbsCard::open() {
            Ok(card) => assert!(!card.name.is_empty()),
            Err(WhyPinned::Library(why)) => assert!(why.contains("libibverbs") || why.contains("ibv_"), "{why}"),
            Err(why) => assert!(matches!(why, WhyPinned::NoDevice | WhyPinned::Refused { .. }), "{why}"),
        }
    }
}
