//! What is used of mlx5's own interface (`infiniband/mlx5dv.h`), found at run time: hosts with other devices do not have its
//! library, and need not.
//!
//! Invariant: the structures here are laid out as the header's; the test compiles that claim against it.

use super::config::VerbsError;
use super::objects::Context;
use ibverbs_sys as ibv;
use std::ffi::{CStr, c_char, c_int, c_void};
use thiserror::Error;

/// The library, which libibverbs itself loads for devices of mlx5.
const LIBRARY: &CStr = c"libmlx5.so.1";

/// Why a device does no DMA copies.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemcpyError {
    /// No library.
    #[error("{0}; Debian: apt-get install ibverbs-providers")]
    NoLibrary(String),
    /// A library without a function.
    #[error("libmlx5 has no {0}: install a newer rdma-core")]
    OldLibrary(&'static str),
    /// Another vendor's device.
    #[error("{0} is no device of mlx5 (ConnectX, BlueField)")]
    NotMlx5(String),
    /// One without the engine, or that does not give it away.
    #[error("{0} does no DMA copies (mlx5's MMO): BlueField-2 and later do, where firmware and DEVX allow it")]
    NoEngine(String),
    /// Something else.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

/// `struct mlx5dv_context`, up to what is asked for; a library fills in only that, and what stands first.
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

/// `struct mlx5dv_qp_ex`, up to what is called.
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
const ASK_MEMCPY_LENGTH: u64 = 1 << 12;
/// MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS
const WITH_SEND_OPS: u64 = 1 << 2;
/// MLX5DV_QP_EX_WITH_MEMCPY
const WITH_MEMCPY: u64 = 1 << 4;

/// The library's functions; it stays loaded.
#[derive(Clone, Copy)]
pub(super) struct Mlx5 {
    query_device: QueryDevice,
    create_pair: CreatePair,
    calls_of: CallsOf,
}

impl Mlx5 {
    /// Load the library.
    pub(super) fn load() -> Result<Self, MemcpyError> {
        // SAFETY: the name of a library whose loading runs no code but its own; libibverbs does the same.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(MemcpyError::NoLibrary(why()));
        }
        let query_device = find(library, c"mlx5dv_query_device", "mlx5dv_query_device")?;
        let create_pair = find(library, c"mlx5dv_create_qp", "mlx5dv_create_qp")?;
        let calls_of = find(library, c"mlx5dv_qp_ex_from_ibv_qp_ex", "mlx5dv_qp_ex_from_ibv_qp_ex")?;
        // SAFETY: functions of these names have these types (see the test), and a library that is never closed keeps them.
        unsafe {
            Ok(Self {
                query_device: std::mem::transmute::<*mut c_void, QueryDevice>(query_device),
                create_pair: std::mem::transmute::<*mut c_void, CreatePair>(create_pair),
                calls_of: std::mem::transmute::<*mut c_void, CallsOf>(calls_of),
            })
        }
    }

    /// Return how many bytes a copy of the device's may have.
    pub(super) fn max_memcpy_len_bytes(&self, context: &Context) -> Result<u32, MemcpyError> {
        let mut attr =
            DeviceAttr { version: 0, flags: 0, comp_mask: ASK_MEMCPY_LENGTH, before: [0; 13], max_wr_memcpy_length: 0 };
        // SAFETY: an open device, and room for what is asked for.
        match unsafe { (self.query_device)(context.raw.as_ptr(), &raw mut attr) } {
            0 => {}
            libc::EOPNOTSUPP => return Err(MemcpyError::NotMlx5(context.name.clone())),
            status => context.check(status, "query the device (mlx5)")?,
        }
        let is_told = attr.comp_mask & ASK_MEMCPY_LENGTH != 0;
        match u32::try_from(attr.max_wr_memcpy_length).unwrap_or(u32::MAX) {
            1.. if is_told => Ok(u32::try_from(attr.max_wr_memcpy_length).unwrap_or(u32::MAX)),
            _ => Err(MemcpyError::NoEngine(context.name.clone())),
        }
    }

    /// Make a queue pair that copies; null, and an error of the system, if that can't be.
    ///
    /// # Safety
    /// The attributes are of objects of this device.
    pub(super) unsafe fn create_pair(&self, context: &Context, mut attr: ibv::ibv_qp_init_attr_ex) -> *mut ibv::ibv_qp {
        let mut own =
            PairAttr { comp_mask: WITH_SEND_OPS, create_flags: 0, dc_init_attr: [0; 2], send_ops_flags: WITH_MEMCPY };
        // SAFETY: the caller's promise; both structures are valid for the call.
        unsafe { (self.create_pair)(context.raw.as_ptr(), &raw mut attr, &raw mut own) }
    }

    /// Return the calls of a queue pair that was made by [`Mlx5::create_pair`].
    ///
    /// # Safety
    /// It is one, and the calls are used as long as it lives.
    pub(super) unsafe fn calls_of(&self, pair: *mut ibv::ibv_qp_ex) -> *mut PairCalls {
        // SAFETY: the caller's promise.
        unsafe { (self.calls_of)(pair) }
    }
}

impl PairCalls {
    /// Build a copy into the work that was begun; false if the queue pair has no such call.
    ///
    /// # Safety
    /// `calls` are of a queue pair that lives, work was begun on it, and source and destination are registered, and stay so
    /// until its completion.
    pub(super) unsafe fn memcpy(calls: *mut Self, dst: (u32, u64), src: (u32, u64), len_bytes: usize) -> bool {
        // SAFETY: the caller's promise.
        let Some(memcpy) = (unsafe { (*calls).wr_memcpy }) else { return false };
        // SAFETY: the caller's promise.
        unsafe { memcpy(calls, dst.0, dst.1, src.0, src.1, len_bytes) };
        true
    }
}

fn find(library: *mut c_void, name: &CStr, text: &'static str) -> Result<*mut c_void, MemcpyError> {
    // SAFETY: a library that is open, and a name.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() { Err(MemcpyError::OldLibrary(text)) } else { Ok(found) }
}

/// Return what the loader says of its last failure.
fn why() -> String {
    // SAFETY: a string that is valid until this thread's next call, or null.
    let said: *const c_char = unsafe { libc::dlerror() };
    if said.is_null() {
        return format!("can't load {}", LIBRARY.to_string_lossy());
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::mem::offset_of;
    use std::process::{Command, Stdio};

    /// The header is there wherever this builds: it comes with what the library is linked by.
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
            constant("MLX5DV_CONTEXT_MASK_WR_MEMCPY_LENGTH", ASK_MEMCPY_LENGTH),
            constant("MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS", WITH_SEND_OPS),
            constant("MLX5DV_QP_EX_WITH_MEMCPY", WITH_MEMCPY),
            "int (*query)(struct ibv_context *, struct mlx5dv_context *) = mlx5dv_query_device;\n\
             struct ibv_qp *(*create)(struct ibv_context *, struct ibv_qp_init_attr_ex *, struct mlx5dv_qp_init_attr *)\n\
             = mlx5dv_create_qp;\n\
             struct mlx5dv_qp_ex *(*calls)(struct ibv_qp_ex *) = mlx5dv_qp_ex_from_ibv_qp_ex;\n\
             void copy(struct mlx5dv_qp_ex *calls) {\n\
             void (*memcpy)(struct mlx5dv_qp_ex *, uint32_t, uint64_t, uint32_t, uint64_t, size_t) = calls->wr_memcpy;\n\
             (void)memcpy; }\n"
                .to_owned(),
        ]
        .concat()
    }

    #[test]
    fn structures_constants_and_functions_are_the_headers() {
        compile(&claims()).expect("the header says the same");
        let wrong = claims().replace("wr_memcpy) == 88", "wr_memcpy) == 80");
        assert!(compile(&wrong).expect_err("a wrong offset").contains("mlx5dv_qp_ex.wr_memcpy"));
    }

    #[test]
    fn who_has_no_library_or_another_device_is_told_so() {
        for (error, said) in [
            (MemcpyError::NotMlx5("rxe0".into()), "rxe0 is no device of mlx5"),
            (MemcpyError::NoEngine("mlx5_0".into()), "BlueField-2"),
            (MemcpyError::OldLibrary("mlx5dv_create_qp"), "newer rdma-core"),
        ] {
            assert!(error.to_string().contains(said), "{error}");
        }
        // SAFETY: a name that is nobody's.
        assert!(unsafe { libc::dlopen(c"libsumac-none.so.1".as_ptr(), libc::RTLD_NOW) }.is_null());
        assert!(MemcpyError::NoLibrary(why()).to_string().contains("libsumac-none.so.1"), "the loader's own words");
    }
}
