//! Words that the host writes and reads past all streams.
//!
//! Streams share the hardware's queues, so a write that is to end a stream's wait may queue behind that wait. The
//! control stream has the highest priority, but with `CUDA_DEVICE_MAX_CONNECTIONS=1` an H100 holds it up all the same.
//! So nothing here waits without a limit: what is held up ends with [`GpuError::Stuck`].

use super::memory::CudaPinned;
use super::{Cuda, CudaMemory, address, driver};
use crate::gpu::group::SpinWait;
use crate::gpu::{Gpu, GpuError, Part};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The control stream, and pinned memory to read words into.
#[derive(Debug)]
pub(super) struct Control {
    stream: Arc<CudaStream>,
    page: Mutex<CudaPinned>,
}

impl Control {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, GpuError> {
        let new = || -> Result<Arc<CudaStream>, DriverError> {
            context.bind_to_thread()?;
            let (_, highest) = result::stream::get_priority_range()?;
            context.new_stream_with_priority(highest)
        };
        let stream = new().map_err(|error| driver("a stream", error))?;
        Ok(Self { stream, page: Mutex::new(CudaPinned::new(context, PAGE_BYTES)?) })
    }
}

impl Cuda {
    /// Write words of memory, past all streams.
    pub(super) fn write_words(&self, to: u64, words: &[u32]) -> Result<(), GpuError> {
        self.bind()?;
        let on = self.control.stream.cu_stream();
        for (index, &word) in words.iter().enumerate() {
            // SAFETY: the words lie within memory that the caller keeps.
            unsafe { sys::cuMemsetD32Async(to + 4 * index as u64, word, 1, on) }
                .result()
                .map_err(|error| driver("words", error))?;
        }
        self.control_done()
    }

    /// Read words of memory, past all streams.
    pub(super) fn read_words(&self, from: Part<'_, CudaMemory>) -> Result<Vec<u32>, GpuError> {
        let mut page = self.control.page.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, mut words) = (address(&from), Vec::with_capacity(from.len_bytes / size_of::<u32>()));
        for at in (0..from.len_bytes).step_by(PAGE_BYTES) {
            let len_bytes = PAGE_BYTES.min(from.len_bytes - at);
            page.download(&self.control.stream, start + at as u64, len_bytes)?;
            self.control_done()?;
            words.extend(page.host()?[..len_bytes].as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)));
        }
        Ok(words)
    }

    /// Wait until the control stream is done.
    fn control_done(&self) -> Result<(), GpuError> {
        let done = self.event()?;
        self.record(&done, &self.control.stream)?;
        let (until, mut spin) = (Instant::now() + LIMIT, SpinWait::default());
        while !self.is_done(&done)? {
            if Instant::now() >= until {
                return Err(GpuError::Stuck);
            }
            spin.wait();
        }
        Ok(())
    }
}

/// How long the control stream may take: it has microseconds of work.
const LIMIT: Duration = Duration::from_secs(2);

/// Bytes read at a time.
const PAGE_BYTES: usize = 4096;
