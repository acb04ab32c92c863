//! The part of mlx5's own interface (`infiniband/mlx5dv.h`) that is used, loaded at run time, because hosts with other
//! devices do not have the library.
//!
//! Invariant: the structures have the layout of the header's; a test compiles this claim against the header.

mod devx;

pub(super) use devx::Devx;

use super::config::VerbsError;
use super::ibv;
use super::objects::Context;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use thiserror::Error;

/// The library, which libibverbs loads for mlx5 devices.
const LIBRARY: &CStr = c"libmlx5.so.1";

/// Why a device supports no DMA copies.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemcpyError {
    /// The library could not be loaded.
    #[error("{0}; Debian: apt-get install ibverbs-providers")]
    NoLibrary(String),
    /// The library lacks a function.
    #[error("libmlx5 has no {0}: install a newer rdma-core")]
    OldLibrary(&'static str),
    /// The device is not an mlx5 device.
    #[error("{0} is not an mlx5 device (ConnectX, BlueField)")]
    NotMlx5(String),
    /// The device lacks the engine, or does not expose it.
    #[error("{0} supports no DMA copies (mlx5 MMO): use BlueField-2 or later, with firmware and DEVX that allow them")]
    NoEngine(String),
    /// Another verbs error.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

/// `struct mlx5dv_context`, up to the requested field; the library fills in only that and the leading fields.
#[repr(C)]
struct DeviceAttr {
    version: u8,
    flags: u64,
    comp_mask: u64,
    before: [u64; 13],
    max_wr_memcpy_length: usize,
}

/// `struct mlx5dv_qp_init_attr`.
#[repr(C)]
struct PairAttr {
    comp_mask: u64,
    create_flags: u32,
    dc_init_attr: [u64; 2],
    send_ops_flags: u64,
}

/// `struct mlx5dv_qp_ex`, up to the operation used.
#[repr(C)]
pub(super) struct PairCalls {
    comp_mask: u64,
    before: [Option<unsafe extern "C" fn()>; 10],
    wr_memcpy: Option<Memcpy>,
}

type Memcpy = unsafe extern "C" fn(*mut PairCalls, u32, u64, u32, u64, usize);
type QueryDevice = unsafe extern "C" fn(*mut ibv::ibv_context, *mut DeviceAttr) -> c_int;
type CreatePair =
    unsafe extern "C" fn(*mut ibv::ibv_context, *mut ibv::ibv_qp_init_attr_ex, *mut PairAttr) -> *mut ibv::ibv_qp;
type CallsOf = unsafe extern "C" fn(*mut ibv::ibv_qp_ex) -> *mut PairCalls;

/// MLX5DV_CONTEXT_MASK_WR_MEMCPY_LENGTH
const QUERY_MEMCPY_LENGTH: u64 = 1 << 12;
/// MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS
const WITH_SEND_OPS: u64 = 1 << 2;
/// MLX5DV_QP_EX_WITH_MEMCPY
const WITH_MEMCPY: u64 = 1 << 4;

/// The library's functions; the library stays loaded.
#[derive(Clone, Copy)]
pub(super) struct Mlx5 {
    library: NonNull<c_void>,
    query_device: QueryDevice,
    create_pair: CreatePair,
    calls_of: CallsOf,
}

impl Mlx5 {
    /// Load the library.
    pub(super) fn load() -> Result<Self, MemcpyError> {
        // SAFETY: loading this library runs only its own initialisers; libibverbs does the same.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let library = NonNull::new(library).ok_or_else(|| MemcpyError::NoLibrary(loader_error()))?;
        let query_device = find(library, c"mlx5dv_query_device", "mlx5dv_query_device")?;
        let create_pair = find(library, c"mlx5dv_create_qp", "mlx5dv_create_qp")?;
        let calls_of = find(library, c"mlx5dv_qp_ex_from_ibv_qp_ex", "mlx5dv_qp_ex_from_ibv_qp_ex")?;
        // SAFETY: the functions of these names have these types (see the test), and the library is never closed.
        unsafe {
            Ok(Self {
                library,
                query_device: std::mem::transmute::<*mut c_void, QueryDevice>(query_device),
                create_pair: std::mem::transmute::<*mut c_void, CreatePair>(create_pair),
                calls_of: std::mem::transmute::<*mut c_void, CallsOf>(calls_of),
            })
        }
    }

    /// Return the interface for commands to a device that [`Mlx5::check_is_mlx5`] accepts.
    pub(super) fn devx(&self, context: &Arc<Context>) -> Result<Devx, MemcpyError> {
        Devx::new(self.library, context)
    }

    /// Check that this library drives the device.
    pub(super) fn check_is_mlx5(&self, context: &Context) -> Result<(), MemcpyError> {
        self.query(context, 0).map(drop)
    }

    /// Query a device's attributes, with these of the optional ones.
    fn query(&self, context: &Context, comp_mask: u64) -> Result<DeviceAttr, MemcpyError> {
        let mut attr = DeviceAttr { version: 0, flags: 0, comp_mask, before: [0; 13], max_wr_memcpy_length: 0 };
        // SAFETY: an open device, and room for the requested fields.
        match unsafe { (self.query_device)(context.raw.as_ptr(), &raw mut attr) } {
            0 => Ok(attr),
            libc::EOPNOTSUPP => Err(MemcpyError::NotMlx5(context.name.clone())),
            status => Ok(context.check(status, "query the device (mlx5)").map(|()| attr)?),
        }
    }

    /// Return the maximum length of a copy in bytes.
    pub(super) fn max_memcpy_len_bytes(&self, context: &Context) -> Result<u32, MemcpyError> {
        let attr = self.query(context, QUERY_MEMCPY_LENGTH)?;
        let is_reported = attr.comp_mask & QUERY_MEMCPY_LENGTH != 0;
        match u32::try_from(attr.max_wr_memcpy_length).unwrap_or(u32::MAX) {
            1.. if is_reported => Ok(u32::try_from(attr.max_wr_memcpy_length).unwrap_or(u32::MAX)),
            _ => Err(MemcpyError::NoEngine(context.name.clone())),
        }
    }

    /// Create a queue pair for copies; null, with `errno` set, on failure.
    ///
    /// # Safety
    /// The attributes refer to objects of this device.
    pub(super) unsafe fn create_pair(&self, context: &Context, mut attr: ibv::ibv_qp_init_attr_ex) -> *mut ibv::ibv_qp {
        let mut own =
            PairAttr { comp_mask: WITH_SEND_OPS, create_flags: 0, dc_init_attr: [0; 2], send_ops_flags: WITH_MEMCPY };
        // SAFETY: the caller ensures the attributes; both structures are valid for the call.
        unsafe { (self.create_pair)(context.raw.as_ptr(), &raw mut attr, &raw mut own) }
    }

    /// Return the operations of a queue pair created by [`Mlx5::create_pair`].
    ///
    /// # Safety
    /// `pair` was created by [`Mlx5::create_pair`], and the operations are used only while it exists.
    pub(super) unsafe fn calls_of(&self, pair: *mut ibv::ibv_qp_ex) -> *mut PairCalls {
        // SAFETY: the caller ensures that `pair` was created by this library and exists.
        unsafe { (self.calls_of)(pair) }
    }
}

impl PairCalls {
    /// Add a copy to the work request being built; false if the queue pair lacks the operation.
    ///
    /// # Safety
    /// `calls` belong to a queue pair that exists and on which a work request was started; source and destination stay
    /// registered until its completion.
    pub(super) unsafe fn memcpy(calls: *mut Self, dst: (u32, u64), src: (u32, u64), len_bytes: usize) -> bool {
        // SAFETY: the caller ensures that the queue pair exists.
        let Some(memcpy) = (unsafe { (*calls).wr_memcpy }) else { return false };
        // SAFETY: as above; a work request was started, and both ranges stay registered.
        unsafe { memcpy(calls, dst.0, dst.1, src.0, src.1, len_bytes) };
        true
    }
}

fn find(library: NonNull<c_void>, name: &CStr, text: &'static str) -> Result<*mut c_void, MemcpyError> {
    // SAFETY: a library that is open, and a name.
    let found = unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) };
    if found.is_null() { Err(MemcpyError::OldLibrary(text)) } else { Ok(found) }
}

/// Return the loader's message about its last failure.
fn loader_error() -> String {
    // SAFETY: a string that is valid until this thread's next call, or null.
    let text: *const c_char = unsafe { libc::dlerror() };
    if text.is_null() {
        return format!("can't load {}", LIBRARY.to_string_lossy());
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::devx::{DomainAttr, OBJECT_DOMAIN, Objects, PinAttr, RawPinned};
    use super::*;
    use std::io::Write;
    use std::mem::offset_of;
    use std::process::{Command, Stdio};

    /// The header is installed wherever this builds, along with the library.
    fn compile(program: &str) -> Result<(), String> {
        let mut compiler = Command::new("cc")
            .args(["-x", "c", "-fsyntax-only", "-Werror", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a C compiler");
        compiler.stdin.take().expect("a pipe").write_all(program.as_bytes()).expect("written");
        let output = compiler.wait_with_output().expect("it ends");
        if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
    }

    fn claims() -> String {
        let offset = |structure: &str, field: &str, at: usize| {
            format!("_Static_assert(offsetof(struct {structure}, {field}) == {at}, \"{structure}.{field}\");\n")
        };
        let constant = |name: &str, value: u64| format!("_Static_assert({name} == {value}, \"{name}\");\n");
        [
            "#include <infiniband/mlx5dv.h>\n#include <stddef.h>\n".to_owned(),
            offset("mlx5dv_context", "version", offset_of!(DeviceAttr, version)),
            offset("mlx5dv_context", "flags", offset_of!(DeviceAttr, flags)),
            offset("mlx5dv_context", "comp_mask", offset_of!(DeviceAttr, comp_mask)),
            offset("mlx5dv_context", "max_wr_memcpy_length", offset_of!(DeviceAttr, max_wr_memcpy_length)),
            offset("mlx5dv_qp_init_attr", "comp_mask", offset_of!(PairAttr, comp_mask)),
            offset("mlx5dv_qp_init_attr", "create_flags", offset_of!(PairAttr, create_flags)),
            offset("mlx5dv_qp_init_attr", "dc_init_attr", offset_of!(PairAttr, dc_init_attr)),
            offset("mlx5dv_qp_init_attr", "send_ops_flags", offset_of!(PairAttr, send_ops_flags)),
            format!("_Static_assert(sizeof(struct mlx5dv_qp_init_attr) == {}, \"\");\n", size_of::<PairAttr>()),
            offset("mlx5dv_qp_ex", "wr_memcpy", offset_of!(PairCalls, wr_memcpy)),
            offset("mlx5dv_devx_umem", "umem_id", offset_of!(RawPinned, umem_id)),
            offset("mlx5dv_devx_umem_in", "addr", offset_of!(PinAttr, addr)),
            offset("mlx5dv_devx_umem_in", "size", offset_of!(PinAttr, size)),
            offset("mlx5dv_devx_umem_in", "access", offset_of!(PinAttr, access)),
            offset("mlx5dv_devx_umem_in", "pgsz_bitmap", offset_of!(PinAttr, pgsz_bitmap)),
            offset("mlx5dv_devx_umem_in", "comp_mask", offset_of!(PinAttr, comp_mask)),
            offset("mlx5dv_devx_umem_in", "dmabuf_fd", offset_of!(PinAttr, dmabuf_fd)),
            format!("_Static_assert(sizeof(struct mlx5dv_devx_umem_in) == {}, \"\");\n", size_of::<PinAttr>()),
            offset("mlx5dv_pd", "pdn", offset_of!(DomainAttr, pdn)),
            offset("mlx5dv_pd", "comp_mask", offset_of!(DomainAttr, comp_mask)),
            offset("mlx5dv_obj", "pd.in", offset_of!(Objects, pd_in)),
            offset("mlx5dv_obj", "pd.out", offset_of!(Objects, pd_out)),
            constant("MLX5DV_OBJ_PD", OBJECT_DOMAIN),
            constant("MLX5DV_CONTEXT_MASK_WR_MEMCPY_LENGTH", QUERY_MEMCPY_LENGTH),
            constant("MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS", WITH_SEND_OPS),
            constant("MLX5DV_QP_EX_WITH_MEMCPY", WITH_MEMCPY),
            "int (*query)(struct ibv_context *, struct mlx5dv_context *) = mlx5dv_query_device;\n\
             struct ibv_qp *(*create)(struct ibv_context *, struct ibv_qp_init_attr_ex *, struct mlx5dv_qp_init_attr *)\n\
             = mlx5dv_create_qp;\n\
             struct mlx5dv_qp_ex *(*calls)(struct ibv_qp_ex *) = mlx5dv_qp_ex_from_ibv_qp_ex;\n\
             int (*execute)(struct ibv_context *, const void *, size_t, void *, size_t) = mlx5dv_devx_general_cmd;\n\
             struct mlx5dv_devx_obj *(*object)(struct ibv_context *, const void *, size_t, void *, size_t)\n\
             = mlx5dv_devx_obj_create;\n\
             int (*destroy)(struct mlx5dv_devx_obj *) = mlx5dv_devx_obj_destroy;\n\
             struct mlx5dv_devx_umem *(*pin)(struct ibv_context *, struct mlx5dv_devx_umem_in *)\n\
             = mlx5dv_devx_umem_reg_ex;\n\
             int (*unpin)(struct mlx5dv_devx_umem *) = mlx5dv_devx_umem_dereg;\n\
             int (*describe)(struct mlx5dv_obj *, uint64_t) = mlx5dv_init_obj;\n\
             void copy(struct mlx5dv_qp_ex *calls) {\n\
             void (*memcpy)(struct mlx5dv_qp_ex *, uint32_t, uint64_t, uint32_t, uint64_t, size_t) = calls->wr_memcpy;\n\
             (void)memcpy; }\n"
                .to_owned(),
        ]
        .concat()
    }

    #[test]
    fn structures_constants_and_functions_match_the_header() {
        compile(&claims()).expect("the header agrees");
        let wrong = claims().replace("wr_memcpy) == 88", "wr_memcpy) == 80");
        assert!(compile(&wrong).expect_err("a wrong offset").contains("mlx5dv_qp_ex.wr_memcpy"));
    }

    #[test]
    fn errors_name_the_device_or_library() {
        for (error, text) in [
            (MemcpyError::NotMlx5("rxe0".into()), "rxe0 is not an mlx5 device"),
            (MemcpyError::NoEngine("mlx5_0".into()), "BlueField-2"),
            (MemcpyError::OldLibrary("mlx5dv_create_qp"), "newer rdma-core"),
        ] {
            assert!(error.to_string().contains(text), "{error}");
        }
        // SAFETY: no library of this name exists.
        assert!(unsafe { libc::dlopen(c"libsumac-none.so.1".as_ptr(), libc::RTLD_NOW) }.is_null());
        assert!(
            MemcpyError::NoLibrary(loader_error()).to_string().contains("libsumac-none.so.1"),
            "the loader's own words"
        );
    }
}
