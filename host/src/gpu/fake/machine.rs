//! The machine of the fake GPUs: its processes and GPUs, and injected faults.

use super::nccl::Library;
use super::state::State;
use super::{FIRST_PROCESS, FakeGpu};
use crate::gpu::GpuError;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// State of a machine beside memory and streams.
#[derive(Debug, Default)]
pub(super) struct Machine {
    processes: u64,
    /// Pairs of GPUs without peer access, the lower number first.
    apart: BTreeSet<(u8, u8)>,
    /// Why memory cannot be exported to other processes, if so.
    pub(super) no_handles: Option<String>,
    pub(super) has_no_compiler: bool,
    /// Why memory cannot be exported as dma-buf, if so.
    pub(super) no_dma_buf: Option<String>,
    pub(super) nccl: Library,
    /// Whether all streams of a process share one queue of the hardware.
    pub(super) has_one_queue: bool,
    /// Whether copies to other processes' memory arrive late.
    pub(super) delays_copies: bool,
    /// Processes that were killed, and whose memory the others still have open.
    pub(super) killed: BTreeSet<u64>,
}

/// How long a call blocks that on hardware would never return.
pub(super) const BLOCKED: Duration = Duration::from_secs(2);

/// Block like a call that waits for all streams of a process, which runs them; returns whether they got past what they
/// wait for by `until`. The machine must not be locked.
pub(super) fn block(state: &Mutex<State>, process: u64, until: Instant) -> bool {
    loop {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.waits_for_peer(process) {
            return true;
        }
        state.run_some();
        if Instant::now() >= until {
            return false;
        }
        drop(state);
        std::thread::yield_now();
    }
}

impl Machine {
    pub(super) fn are_apart(&self, a: u8, b: u8) -> bool {
        self.apart.contains(&(a.min(b), a.max(b)))
    }
}

impl FakeGpu {
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

    /// Disable peer access between two GPUs.
    pub fn disable_peer_access(&self, a: u8, b: u8) {
        self.lock().machine.apart.insert((a.min(b), a.max(b)));
    }

    /// Make exports to other processes fail with this reason.
    pub fn without_handles(&self, why: &str) {
        self.lock().machine.no_handles = Some(why.into());
    }

    /// Remove the compiler and compiled kernels.
    pub fn without_compiler(&self) {
        self.lock().machine.has_no_compiler = true;
    }

    /// Make exports as dma-buf fail with this reason.
    pub fn without_dma_buf(&self, why: &str) {
        self.lock().machine.no_dma_buf = Some(why.into());
    }

    /// Let all streams of a process share one queue of the hardware, as with `CUDA_DEVICE_MAX_CONNECTIONS=1` where
    /// priorities do not help: a stream that waits for another process holds up the others.
    pub fn with_one_queue(&self) {
        self.lock().machine.has_one_queue = true;
    }

    /// Return the calls that on hardware would not have returned.
    pub fn blocked(&self) -> Vec<String> {
        self.lock().blocked.clone()
    }

    /// Return whether a stream of this process has to wait for another process.
    pub fn is_waiting(&self) -> bool {
        self.lock().waits_for_peer(self.process)
    }

    /// Check that words which bypass the streams get past them.
    pub(super) fn check_queues(&self) -> Result<(), GpuError> {
        let state = self.lock();
        let is_stuck = state.machine.has_one_queue && state.waits_for_peer(self.process);
        if is_stuck { Err(GpuError::Stuck) } else { Ok(()) }
    }

    /// Make this process lose its GPU: nothing that it has enqueued runs any more.
    pub fn lose(&self, why: &str) {
        self.lock().faults.insert(self.process, GpuError::Lost(why.into()));
    }

    /// Let copies to other processes' memory arrive after words that were written behind them, as on GPUs that cannot
    /// flush remote writes.
    pub fn delay_copies(&self) {
        self.lock().machine.delays_copies = true;
    }

    /// Kill this process: its streams stop where they are, but its memory stays while other processes have it open.
    pub fn kill_mapped(&self) {
        let process = self.process;
        let state = &mut *self.lock();
        state.machine.killed.insert(process);
        state.faults.insert(process, GpuError::Lost("the process was killed".into()));
        state.streams.iter_mut().filter(|stream| stream.process == process).for_each(|stream| stream.queue.clear());
    }

    /// Return how often stopped processes have read the memory of killed ones.
    pub fn reads_of_killed(&self) -> usize {
        self.lock().reads_of_killed
    }

    /// Kill this process: its streams stop where they are, and its memory is gone.
    pub fn kill(&self) {
        let process = self.process;
        let state = &mut *self.lock();
        state.faults.insert(process, GpuError::Lost("the process was killed".into()));
        state.streams.iter_mut().filter(|stream| stream.process == process).for_each(|stream| stream.queue.clear());
        state.memory.retain(|_, block| block.process != process);
    }
}
