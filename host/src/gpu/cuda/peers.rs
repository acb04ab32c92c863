//! Memory of other processes and GPUs: CUDA's IPC handles, peer access, and the words by which streams synchronize.
//!
//! A handle opens the whole allocation of the memory; the driver counts how often. Streams write words and wait for
//! them with the driver's memory operations, which first make earlier work visible.

use super::memory::{self, Block};
use super::{Cuda, CudaMemory, address, driver, words};
use crate::gpu::nccl::Nccl;
use crate::gpu::peers::{Handle, PeerFacts, Peered, Reach, WhyStaged};
use crate::gpu::{GpuError, Part};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::ffi::c_char;
use std::sync::Arc;

/// Length of the driver's handle in bytes.
const HANDLE_BYTES: usize = 64;

impl Cuda {
    /// Return the GPU's unique name: its UUID.
    fn uuid(&self) -> Result<String, GpuError> {
        self.context.uuid().map(hex).map_err(|error| driver("its UUID", error))
    }

    /// Return the ordinal of a GPU, if this process sees it.
    fn ordinal_of(&self, uuid: &str) -> Option<i32> {
        let devices = CudaContext::device_count().ok()?;
        (0..devices).find(|&ordinal| {
            let found = result::device::get(ordinal).and_then(result::device::get_uuid);
            found.is_ok_and(|found| hex(found) == uuid)
        })
    }

    /// Return address and length of the allocation that contains an address.
    fn allocation(&self, at: u64) -> Result<(u64, u64), DriverError> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: it writes two integers.
        unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut len, at) }.result()?;
        Ok((base, len as u64))
    }

    /// Enable access to another GPU's memory in the same process.
    fn enable(&self, ordinal: i32) -> Result<(), DriverError> {
        let peer = CudaContext::new(ordinal as usize)?;
        self.context.bind_to_thread()?;
        // SAFETY: both contexts are alive.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.cu_ctx(), 0) } {
            sys::cudaError_enum::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            other => other.result(),
        }
    }

    fn open_handle(&self, handle: &Handle) -> Result<CudaMemory, GpuError> {
        let refused = |why: String| GpuError::Handle(why);
        let ipc = handle.ipc.as_ref().map_err(|why| refused(format!("its owner could not export it: {why}")))?;
        let bytes: [u8; HANDLE_BYTES] =
            ipc.as_slice().try_into().map_err(|_| refused(format!("{} bytes are not a handle", ipc.len())))?;
        let raw = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as c_char) };
        let lazy = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: it writes one address; a handle that is none is an error of the driver.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut base, raw, lazy) }.result();
        opened.map_err(|error| refused(words(error)))?;
        // From here on it is closed on every path.
        let block = Block::opened(&self.context, base);
        let end = handle.at.checked_add(handle.len_bytes);
        let (_, len) = self.allocation(base).map_err(|error| refused(words(error)))?;
        match end.filter(|&end| end <= len) {
            Some(_) => Ok(block.part(handle.at, handle.len_bytes)),
            None => Err(refused(format!("{} bytes at {} of an allocation of {len}", handle.len_bytes, handle.at))),
        }
    }
}

fn hex(uuid: sys::CUuuid) -> String {
    uuid.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect()
}

/// Identify the running system; unique to the process if the kernel does not tell.
fn host(process: u64) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    boot.map_or_else(|_| format!("unknown host of process {process}"), |id| id.trim().to_owned())
}

/// Identify this process on its host, even where containers number processes separately.
fn process() -> u64 {
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok();
    let digits = |name: &std::path::PathBuf| name.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    let namespace = namespace.as_ref().map(digits).and_then(|digits: String| digits.parse::<u64>().ok());
    // Linux numbers at most 2^22 processes.
    namespace.unwrap_or(0) << 22 | u64::from(std::process::id())
}

/// Return the flags of a wait for a word. Where the GPU can, it also waits for other GPUs' earlier writes to its
/// memory, which may take another way than the word.
pub(super) fn wait_flags(context: &CudaContext) -> Result<u32, GpuError> {
    use sys::CUstreamWaitValue_flags as Flags;
    let can_flush = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES;
    let can_flush = context.attribute(can_flush).map_err(|error| driver("an attribute", error))? == 1;
    let flush = if can_flush { Flags::CU_STREAM_WAIT_VALUE_FLUSH as u32 } else { 0 };
    Ok(Flags::CU_STREAM_WAIT_VALUE_GEQ as u32 | flush)
}

impl Peered for Cuda {
    fn facts(&self) -> Result<PeerFacts, GpuError> {
        let unified = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING;
        let unified = self.context.attribute(unified).map_err(|error| driver("an attribute", error))?;
        let process = process();
        Ok(PeerFacts {
            host: host(process),
            process,
            gpu: self.uuid()?,
            shares: if unified == 1 { Ok(()) } else { Err("its addresses are not those of the host".into()) },
            nccl: self.nccl_version().map_err(|error| error.to_string()),
        })
    }

    fn reach(&self, peer: &PeerFacts) -> Result<Reach, WhyStaged> {
        let from = self.uuid().unwrap_or_else(|error| error.to_string());
        if from == peer.gpu {
            return Ok(Reach::SameGpu);
        }
        let none = |to: String| WhyStaged::NoPeerAccess { from: from.clone(), to };
        let ordinal = self.ordinal_of(&peer.gpu);
        let ordinal = ordinal.ok_or_else(|| none(format!("{}, which this process does not see", peer.gpu)))?;
        let mut can = 0;
        let asked = result::device::get(ordinal).and_then(|theirs| {
            // SAFETY: it writes one integer.
            unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.context.cu_device(), theirs) }.result()
        });
        match asked {
            Ok(()) if can == 1 => Ok(Reach::OtherGpu),
            Ok(()) => Err(none(peer.gpu.clone())),
            Err(error) => Err(none(format!("{}: {}", peer.gpu, words(error)))),
        }
    }

    fn export(&self, memory: &CudaMemory) -> Result<Handle, GpuError> {
        self.bind()?;
        let refused = |error: DriverError| GpuError::Handle(words(error));
        let (base, _) = self.allocation(memory.address()).map_err(refused)?;
        let mut raw = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: it writes one handle.
        let got = unsafe { sys::cuIpcGetMemHandle(&raw mut raw, base) }.result();
        Ok(Handle {
            address: memory.address(),
            ipc: got.map(|()| raw.reserved.map(|byte| byte as u8).to_vec()).map_err(words),
            at: memory.address() - base,
            len_bytes: memory.len_bytes() as u64,
        })
    }

    fn open(&self, peer: &PeerFacts, handle: &Handle) -> Result<CudaMemory, GpuError> {
        self.bind()?;
        if peer.host != host(process()) {
            return Err(GpuError::Handle("it belongs to another machine".into()));
        }
        if peer.process != process() {
            return self.open_handle(handle);
        }
        if self.uuid()? != peer.gpu {
            let ordinal = self.ordinal_of(&peer.gpu);
            let ordinal = ordinal.ok_or_else(|| GpuError::Handle(format!("this process does not see {}", peer.gpu)))?;
            self.enable(ordinal).map_err(|error| GpuError::Handle(words(error)))?;
        }
        Ok(Block::borrow(&self.context, handle.address, handle.len_bytes as usize))
    }

    fn signal(&self, on: &Arc<CudaStream>, to: Part<'_, CudaMemory>, value: u32) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: the word lies within memory that the caller keeps.
        unsafe { sys::cuStreamWriteValue32_v2(on.cu_stream(), address(&to), value, 0) }
            .result()
            .map_err(|error| driver("a signal", error))
    }

    fn await_signal(&self, on: &Arc<CudaStream>, at: Part<'_, CudaMemory>, value: u32) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: as above.
        unsafe { sys::cuStreamWaitValue32_v2(on.cu_stream(), address(&at), value, self.wait_flags) }
            .result()
            .map_err(|error| driver("a wait for a signal", error))
    }

    fn hold_frees(&self) {
        memory::hold_frees();
    }

    fn release_frees(&self) {
        memory::release_frees();
    }

    fn set_now(&self, to: Part<'_, CudaMemory>, words: &[u32]) -> Result<(), GpuError> {
        debug_assert_eq!(to.len_bytes, size_of_val(words));
        self.write_words(address(&to), words)
    }

    fn get_now(&self, from: Part<'_, CudaMemory>) -> Result<Vec<u32>, GpuError> {
        self.read_words(from)
    }
}
