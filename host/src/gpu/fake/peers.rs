//! The fake GPU's memory, accessed by other processes.

use super::state::Task;
use super::{Block, FakeGpu, FakeMemory, FakeStream, place};
use crate::gpu::direct::{DmaBuf, Exported, WhyPinned};
use crate::gpu::peers::{Handle, PeerFacts, Peered, Reach, WhyStaged};
use crate::gpu::{Gpu, GpuError, Part};
use std::fs::File;
use std::sync::Arc;

impl FakeGpu {
    /// Identify the machine.
    fn host(&self) -> String {
        format!("double {:p}", Arc::as_ptr(&self.state))
    }
}

impl Exported for FakeGpu {
    fn dma_buf(&self, memory: &FakeMemory) -> Result<DmaBuf, WhyPinned> {
        let refused = |why: &dyn std::fmt::Display| WhyPinned::Gpu(why.to_string());
        if let Some(why) = &self.lock().machine.no_dma_buf {
            return Err(refused(why));
        }
        // Any descriptor: registration looks at the address only.
        let fd = File::open("/dev/null").map_err(|error| refused(&error))?.into();
        let address = self.addresses(memory).start;
        Ok(DmaBuf { fd, at: memory.at as u64, len_bytes: memory.len_bytes as u64, address })
    }
}

impl Peered for FakeGpu {
    fn facts(&self) -> Result<PeerFacts, GpuError> {
        let state = self.lock();
        Ok(PeerFacts {
            host: self.host(),
            process: self.process,
            gpu: format!("gpu {}", self.gpu),
            shares: state.machine.no_handles.clone().map_or(Ok(()), Err),
            nccl: state.machine.nccl.version(),
        })
    }

    fn reach(&self, peer: &PeerFacts) -> Result<Reach, WhyStaged> {
        let theirs = peer.gpu.strip_prefix("gpu ").and_then(|gpu| gpu.parse().ok()).unwrap_or(u8::MAX);
        match self.lock().machine.are_apart(self.gpu, theirs) {
            true => Err(WhyStaged::NoPeerAccess { from: format!("gpu {}", self.gpu), to: peer.gpu.clone() }),
            false if self.gpu == theirs => Ok(Reach::SameGpu),
            false => Ok(Reach::OtherGpu),
        }
    }

    fn export(&self, memory: &FakeMemory) -> Result<Handle, GpuError> {
        if let Some(why) = &self.lock().machine.no_handles {
            return Err(GpuError::Handle(why.clone()));
        }
        Ok(Handle {
            address: memory.block.id,
            ipc: Ok(memory.block.id.to_le_bytes().to_vec()),
            at: memory.at as u64,
            len_bytes: memory.len_bytes as u64,
        })
    }

    fn open(&self, peer: &PeerFacts, handle: &Handle) -> Result<FakeMemory, GpuError> {
        let refused = |why: String| Err(GpuError::Handle(why));
        if peer.host != self.host() {
            return refused("it belongs to another machine".into());
        }
        let ipc = handle.ipc.as_ref().map_err(|why| GpuError::Handle(why.clone()))?;
        let Ok(id) = <[u8; 8]>::try_from(ipc.as_slice()).map(u64::from_le_bytes) else {
            return refused(format!("{} bytes are not a handle", ipc.len()));
        };
        let mut state = self.lock();
        let Some(block) = state.memory.get(&id).filter(|block| block.process == peer.process) else {
            return refused(format!("process {} has no memory {id}", peer.process));
        };
        let (at, len_bytes) = (handle.at as usize, handle.len_bytes as usize);
        if at.checked_add(len_bytes).is_none_or(|end| end > block.bytes.len()) {
            return refused(format!("{len_bytes} bytes at {at} of {}", block.bytes.len()));
        }
        *state.opened.entry((self.process, id)).or_default() += 1;
        let block = Block { id, process: self.process, is_opened: true, state: Arc::clone(&self.state) };
        Ok(FakeMemory { block: Arc::new(block), at, len_bytes })
    }

    fn signal(&self, on: &FakeStream, to: Part<'_, FakeMemory>, value: u32) -> Result<(), GpuError> {
        self.lock().push(on.0, Task::Signal { to: place(&to), value })
    }

    fn await_signal(&self, on: &FakeStream, at: Part<'_, FakeMemory>, value: u32) -> Result<(), GpuError> {
        self.lock().push(on.0, Task::Await { at: place(&at), value })
    }

    fn set_now(&self, to: Part<'_, FakeMemory>, words: &[u32]) -> Result<(), GpuError> {
        self.check_queues()?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.lock().write(self.process, &place(&to))?.copy_from_slice(&bytes);
        Ok(())
    }

    fn hold_frees(&self) {
        self.lock().graveyards.entry(self.process).or_default().hold();
    }

    fn release_frees(&self) {
        let state = &mut *self.lock();
        let dead = state.graveyards.entry(self.process).or_default().release();
        dead.into_iter().for_each(|dead| state.release(self.process, dead));
    }

    fn get_now(&self, from: Part<'_, FakeMemory>) -> Result<Vec<u32>, GpuError> {
        self.check_queues()?;
        let state = self.lock();
        let bytes = state.read(self.process, &place(&from))?;
        Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}
