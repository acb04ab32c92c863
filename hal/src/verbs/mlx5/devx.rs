//! Commands to a device, which the library passes to the kernel, and the kernel to the firmware (DevX).

use super::{MemcpyError, find};
use crate::dma::DmaMemory;
use crate::verbs::alias::Commands;
use crate::verbs::ibv;
use crate::verbs::objects::{Context, Domain};
use std::ffi::{c_int, c_void};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// `struct mlx5dv_devx_obj`
#[repr(C)]
pub(in crate::verbs) struct RawObject {
    _private: [u8; 0],
}

/// `struct mlx5dv_devx_umem`
#[repr(C)]
pub(in crate::verbs) struct RawPinned {
    pub(super) umem_id: u32,
}

/// `struct mlx5dv_devx_umem_in`
#[repr(C)]
pub(super) struct PinAttr {
    pub(super) addr: *mut c_void,
    pub(super) size: usize,
    pub(super) access: u32,
    pub(super) pgsz_bitmap: u64,
    pub(super) comp_mask: u64,
    pub(super) dmabuf_fd: c_int,
}

/// `struct mlx5dv_pd`
#[repr(C)]
pub(super) struct DomainAttr {
    pub(super) pdn: u32,
    pub(super) comp_mask: u64,
}

/// `struct mlx5dv_obj`, of which only the last pair is used.
#[repr(C)]
pub(super) struct Objects {
    before: [*mut c_void; 12],
    pub(super) pd_in: *mut ibv::ibv_pd,
    pub(super) pd_out: *mut DomainAttr,
}

/// MLX5DV_OBJ_PD
pub(super) const OBJECT_DOMAIN: u64 = 1 << 6;

type Execute = unsafe extern "C" fn(*mut ibv::ibv_context, *const c_void, usize, *mut c_void, usize) -> c_int;
type Create = unsafe extern "C" fn(*mut ibv::ibv_context, *const c_void, usize, *mut c_void, usize) -> *mut RawObject;
type Destroy = unsafe extern "C" fn(*mut RawObject) -> c_int;
type Pin = unsafe extern "C" fn(*mut ibv::ibv_context, *mut PinAttr) -> *mut RawPinned;
type Unpin = unsafe extern "C" fn(*mut RawPinned) -> c_int;
type Describe = unsafe extern "C" fn(*mut Objects, u64) -> c_int;

/// The functions; the library stays loaded.
#[derive(Clone, Copy)]
struct Calls {
    execute: Execute,
    create: Create,
    destroy: Destroy,
    pin: Pin,
    unpin: Unpin,
    describe: Describe,
}

impl Calls {
    fn of(library: NonNull<c_void>) -> Result<Self, MemcpyError> {
        let execute = find(library, c"mlx5dv_devx_general_cmd", "mlx5dv_devx_general_cmd")?;
        let create = find(library, c"mlx5dv_devx_obj_create", "mlx5dv_devx_obj_create")?;
        let destroy = find(library, c"mlx5dv_devx_obj_destroy", "mlx5dv_devx_obj_destroy")?;
        let pin = find(library, c"mlx5dv_devx_umem_reg_ex", "mlx5dv_devx_umem_reg_ex")?;
        let unpin = find(library, c"mlx5dv_devx_umem_dereg", "mlx5dv_devx_umem_dereg")?;
        let describe = find(library, c"mlx5dv_init_obj", "mlx5dv_init_obj")?;
        // SAFETY: the functions of these names have these types (see the test), and the library is never closed.
        unsafe {
            Ok(Self {
                execute: std::mem::transmute::<*mut c_void, Execute>(execute),
                create: std::mem::transmute::<*mut c_void, Create>(create),
                destroy: std::mem::transmute::<*mut c_void, Destroy>(destroy),
                pin: std::mem::transmute::<*mut c_void, Pin>(pin),
                unpin: std::mem::transmute::<*mut c_void, Unpin>(unpin),
                describe: std::mem::transmute::<*mut c_void, Describe>(describe),
            })
        }
    }
}

/// An open device that takes commands.
#[derive(Clone)]
pub(in crate::verbs) struct Devx {
    calls: Calls,
    context: Arc<Context>,
}

impl Devx {
    pub(super) fn new(library: NonNull<c_void>, context: &Arc<Context>) -> Result<Self, MemcpyError> {
        Ok(Self { calls: Calls::of(library)?, context: Arc::clone(context) })
    }
}

/// An object of the device, which exists until it is destroyed.
pub(in crate::verbs) struct DevxObject(NonNull<RawObject>);

// SAFETY: the library's calls on an object may come from any thread, and the object belongs to this value.
unsafe impl Send for DevxObject {}

/// Pinned memory, until it is unpinned.
pub(in crate::verbs) struct DevxPinned(NonNull<RawPinned>);

// SAFETY: as of `DevxObject`.
unsafe impl Send for DevxPinned {}

/// Turn what the library returns, zero or a number of an error, into a result.
fn checked(status: c_int) -> io::Result<()> {
    match status {
        0 => Ok(()),
        _ if status < 0 => Err(io::Error::last_os_error()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

impl Commands for Devx {
    type Object = DevxObject;
    type Pinned = DevxPinned;

    fn name(&self) -> &str {
        &self.context.name
    }

    fn execute(&self, request: &[u8], answer: &mut [u8]) -> io::Result<()> {
        let (from, to) = (request.as_ptr().cast(), answer.as_mut_ptr().cast());
        // SAFETY: an open device, and two buffers with their lengths, which are used during the call only.
        checked(unsafe { (self.calls.execute)(self.context.raw.as_ptr(), from, request.len(), to, answer.len()) })
    }

    fn create(&self, request: &[u8], answer: &mut [u8]) -> io::Result<DevxObject> {
        let (from, to) = (request.as_ptr().cast(), answer.as_mut_ptr().cast());
        // SAFETY: as in `execute`.
        let raw = unsafe { (self.calls.create)(self.context.raw.as_ptr(), from, request.len(), to, answer.len()) };
        NonNull::new(raw).map(DevxObject).ok_or_else(io::Error::last_os_error)
    }

    unsafe fn destroy(&self, object: &mut DevxObject) -> io::Result<()> {
        // SAFETY: the caller ensures that it exists; the device is open as long as `self`.
        checked(unsafe { (self.calls.destroy)(object.0.as_ptr()) })
    }

    unsafe fn pin(&self, memory: &dyn DmaMemory, page_log: u8) -> io::Result<(DevxPinned, u32)> {
        use ibv::ibv_access_flags as flags;
        let access = flags::IBV_ACCESS_LOCAL_WRITE | flags::IBV_ACCESS_REMOTE_WRITE | flags::IBV_ACCESS_REMOTE_READ;
        let mut attr = PinAttr {
            addr: memory.base().as_ptr().cast(),
            size: memory.len_bytes(),
            access: access.0,
            pgsz_bitmap: 1 << page_log,
            comp_mask: 0,
            dmabuf_fd: 0,
        };
        // SAFETY: an open device; the caller ensures that the memory is valid until it is unpinned.
        let raw = unsafe { (self.calls.pin)(self.context.raw.as_ptr(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: just created.
        Ok((DevxPinned(raw), unsafe { raw.as_ref() }.umem_id))
    }

    unsafe fn unpin(&self, pinned: &mut DevxPinned) -> io::Result<()> {
        // SAFETY: as in `destroy`.
        checked(unsafe { (self.calls.unpin)(pinned.0.as_ptr()) })
    }

    fn domain_number(&self, domain: &Domain) -> io::Result<u32> {
        let mut attr = DomainAttr { pdn: 0, comp_mask: 0 };
        let mut objects = Objects { before: [ptr::null_mut(); 12], pd_in: domain.raw.as_ptr(), pd_out: &raw mut attr };
        // SAFETY: a protection domain of this device, and room for its attributes; the other objects are not used.
        checked(unsafe { (self.calls.describe)(&raw mut objects, OBJECT_DOMAIN) })?;
        Ok(attr.pdn)
    }
}
