//! The fake GPU as a [`Gpu`].

use super::state::{EventState, LandTask, StreamState, Task};
use super::{Block, FakeEvent, FakeGpu, FakeGraph, FakeMemory, FakePinned, FakeStream, Place, place};
use crate::gpu::{Fused, Gpu, GpuError, Part, Unavailable};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use sumac_hal::reduce::Kernel;

impl Gpu for FakeGpu {
    type Memory = FakeMemory;
    type Stream = FakeStream;
    type Event = FakeEvent;
    type Kernel = Kernel;
    type Graph = FakeGraph;
    type Pinned = FakePinned;

    fn alloc(&self, len_bytes: usize) -> Result<FakeMemory, GpuError> {
        let id = self.lock().add(self.process, len_bytes)?;
        let block = Block { id, process: self.process, is_opened: false, state: Arc::clone(&self.state) };
        Ok(FakeMemory { block: Arc::new(block), at: 0, len_bytes })
    }

    fn part(&self, memory: &FakeMemory, at: usize, len_bytes: usize) -> FakeMemory {
        assert!(at + len_bytes <= memory.len_bytes, "{len_bytes} bytes at {at} of {}", memory.len_bytes);
        FakeMemory { block: Arc::clone(&memory.block), at: memory.at + at, len_bytes }
    }

    fn addresses(&self, memory: &FakeMemory) -> Range<u64> {
        let start = (memory.block.id << 40) + memory.at as u64;
        start..start + memory.len_bytes as u64
    }

    fn stream(&self) -> Result<FakeStream, GpuError> {
        let mut state = self.lock();
        let clock_ns = state.host_ns;
        state.streams.push(StreamState { process: self.process, queue: VecDeque::new(), clock_ns });
        Ok(FakeStream(state.streams.len() - 1))
    }

    fn event(&self) -> Result<FakeEvent, GpuError> {
        let mut state = self.lock();
        state.events.push(EventState::default());
        Ok(FakeEvent(state.events.len() - 1))
    }

    fn load(&self, kernel: &Kernel) -> Result<Kernel, GpuError> {
        if self.lock().machine.has_no_compiler {
            return Err(Unavailable::Compiler { wanted: format!("{}-{}.ptx", kernel.dtype(), kernel.op()) }.into());
        }
        Ok(*kernel)
    }

    fn copy(&self, on: &FakeStream, to: Part<'_, FakeMemory>, from: Part<'_, FakeMemory>) -> Result<(), GpuError> {
        assert_eq!(to.len_bytes, from.len_bytes, "a copy of as many bytes as it writes");
        self.lock().push(on.0, Task::Copy { to: place(&to), from: place(&from) })
    }

    fn land(&self, on: &FakeStream, kernel: &Kernel, fused: &Fused<'_, FakeMemory>) -> Result<(), GpuError> {
        let Fused { is_partial, is_finished, count, ranks, .. } = *fused;
        let own = fused.own.as_ref().map(|(part, is_partial)| (place(part), *is_partial));
        let (from, to) = (place(&fused.from), place(&fused.to));
        let land = LandTask { kernel: *kernel, from, is_partial, own, to, is_finished, count, ranks };
        self.lock().push(on.0, Task::Land(Box::new(land)))
    }

    fn scale(
        &self,
        on: &FakeStream,
        kernel: &Kernel,
        to: Part<'_, FakeMemory>,
        from: Part<'_, FakeMemory>,
        scalar: f64,
    ) -> Result<(), GpuError> {
        kernel.scale(&mut [], &[], scalar).map_err(|error| GpuError::Invalid(error.to_string()))?;
        self.lock().push(on.0, Task::Scale { kernel: *kernel, to: place(&to), from: place(&from), scalar })
    }

    fn record(&self, event: &FakeEvent, on: &FakeStream) -> Result<(), GpuError> {
        let mut state = self.lock();
        state.events[event.0].recorded += 1;
        let version = state.events[event.0].recorded;
        state.push(on.0, Task::Record(event.0, version))
    }

    fn wait(&self, on: &FakeStream, event: &FakeEvent) -> Result<(), GpuError> {
        let mut state = self.lock();
        let version = state.events[event.0].recorded;
        state.push(on.0, Task::Wait(event.0, version))
    }

    fn is_done(&self, event: &FakeEvent) -> Result<bool, GpuError> {
        let mut state = self.lock();
        state.run_some();
        if let Some(fault) = state.faults.get(&self.process) {
            return Err(fault.clone());
        }
        let EventState { recorded, done, at_ns } = state.events[event.0];
        if done >= recorded {
            state.host_ns = at_ns.max(state.host_ns);
        }
        Ok(done >= recorded)
    }

    fn timer(&self) -> Result<FakeEvent, GpuError> {
        self.event()
    }

    fn elapsed_us(&self, from: &FakeEvent, to: &FakeEvent) -> Result<f64, GpuError> {
        let state = self.lock();
        let at_ns = |event: &FakeEvent| state.events[event.0].at_ns as f64;
        Ok((at_ns(to) - at_ns(from)) / 1e3)
    }

    fn capture(&self, on: &FakeStream, body: &mut dyn FnMut() -> Result<(), GpuError>) -> Result<FakeGraph, GpuError> {
        self.lock().captures.insert(self.process, (on.0, Vec::new()));
        let result = body();
        let (origin, captured) = self.lock().captures.remove(&self.process).unwrap_or_default();
        result?;
        // The last task of every other stream must be an event that the first stream waits for.
        let streams: BTreeSet<usize> = captured.iter().map(|(stream, _)| *stream).collect();
        for stream in streams.into_iter().filter(|&stream| stream != origin) {
            let last = captured.iter().rfind(|(other, _)| *other == stream);
            let is_joined = matches!(last, Some((_, Task::Record(event, version))) if captured.iter().any(
                |(other, task)| *other == origin && matches!(task, Task::Wait(e, v) if (e, v) == (event, version))));
            if !is_joined {
                return Err(GpuError::Driver { what: "a capture", why: format!("stream {stream} was not joined") });
            }
        }
        Ok(FakeGraph(Arc::new(captured)))
    }

    fn launch(&self, graph: &FakeGraph, on: &FakeStream) -> Result<(), GpuError> {
        let state = &mut *self.lock();
        state.launches += 1;
        state.push(on.0, Task::Graph(Arc::clone(&graph.0)))
    }

    fn stop(&self, is_stopped: bool) -> Result<(), GpuError> {
        self.check_queues()?;
        let stopped = &mut self.lock().stopped;
        let _ = if is_stopped { stopped.insert(self.process) } else { stopped.remove(&self.process) };
        Ok(())
    }

    fn pinned(&self, len_bytes: usize) -> Result<FakePinned, GpuError> {
        let id = self.lock().add(self.process, len_bytes)?;
        let block = Block { id, process: self.process, is_opened: false, state: Arc::clone(&self.state) };
        Ok(FakePinned { block, bytes: vec![0; len_bytes], last: self.event()? })
    }

    fn host<'p>(&self, pinned: &'p mut FakePinned) -> Result<&'p mut [u8], GpuError> {
        while !self.is_done(&pinned.last)? {}
        if let Some(block) = self.lock().memory.get(&pinned.block.id) {
            pinned.bytes.copy_from_slice(&block.bytes);
        }
        Ok(&mut pinned.bytes)
    }

    fn download(&self, on: &FakeStream, to: &mut FakePinned, from: Part<'_, FakeMemory>) -> Result<(), GpuError> {
        let place_of = Place { id: to.block.id, bytes: 0..from.len_bytes };
        self.lock().push(on.0, Task::Copy { to: place_of, from: place(&from) })?;
        self.record(&to.last, on)
    }

    fn upload(&self, on: &FakeStream, to: Part<'_, FakeMemory>, from: &mut FakePinned) -> Result<(), GpuError> {
        // The process writes to its own view; this copies it to the GPU's.
        if let Some(block) = self.lock().memory.get_mut(&from.block.id) {
            block.bytes.copy_from_slice(&from.bytes);
        }
        let place_of = Place { id: from.block.id, bytes: 0..to.len_bytes };
        self.lock().push(on.0, Task::Copy { to: place(&to), from: place_of })?;
        self.record(&from.last, on)
    }
}
