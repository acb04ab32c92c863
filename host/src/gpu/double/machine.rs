//! The machine around the doubles: its processes and GPUs, and what goes wrong with them.

use super::nccl::Library;
use super::{Double, FIRST_PROCESS};
use crate::gpu::GpuError;
use std::collections::BTreeSet;

/// What a machine has beside memory and streams.
#[derive(Debug, Default)]
pub(super) struct Machine {
    processes: u64,
    /// Pairs of GPUs that don't reach each other, the lower number first.
    apart: BTreeSet<(u8, u8)>,
    /// Why no process can hand its memory to another, if that is so.
    pub(super) no_handles: Option<String>,
    pub(super) has_no_compiler: bool,
    /// Why memory can't be exported as dma-buf, if that is so.
    pub(super) no_dma_buf: Option<String>,
    pub(super) nccl: Library,
}

impl Machine {
    pub(super) fn are_apart(&self, a: u8, b: u8) -> bool {
        self.apart.contains(&(a.min(b), a.max(b)))
    }
}

impl Double {
    /// Start another process of the same machine, on the GPU of this number.
    #[must_use]
    pub fn process(&self, gpu: u8) -> Self {
        let mut state = self.lock();
        state.machine.processes += 1;
        Self { state: self.state.clone(), process: FIRST_PROCESS + state.machine.processes, gpu }
    }

    /// Return the same process on another GPU.
    #[must_use]
    pub fn on_gpu(&self, gpu: u8) -> Self {
        Self { gpu, ..self.clone() }
    }

    /// Let two GPUs not reach each other's memory.
    pub fn part_gpus(&self, a: u8, b: u8) {
        self.lock().machine.apart.insert((a.min(b), a.max(b)));
    }

    /// Let no process hand its memory to another, and say why.
    pub fn without_handles(&self, why: &str) {
        self.lock().machine.no_handles = Some(why.into());
    }

    /// Let there be neither compiler nor compiled kernels.
    pub fn without_compiler(&self) {
        self.lock().machine.has_no_compiler = true;
    }

    /// Let no memory be exported as dma-buf, and say why.
    pub fn without_dma_buf(&self, why: &str) {
        self.lock().machine.no_dma_buf = Some(why.into());
    }

    /// Let this process lose its GPU: nothing that it has handed over happens any more.
    pub fn lose(&self, why: &str) {
        self.lock().faults.insert(self.process, GpuError::Lost(why.into()));
    }

    /// End this process as a signal would: its streams stop where they are, and its memory is gone.
    pub fn kill(&self) {
        let process = self.process;
        let state = &mut *self.lock();
        state.faults.insert(process, GpuError::Lost("the process was killed".into()));
        state.streams.iter_mut().filter(|stream| stream.process == process).for_each(|stream| stream.queue.clear());
        state.memory.retain(|_, block| block.process != process);
    }
}
