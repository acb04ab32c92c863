//! A GPU made of ordinary memory, for tests: streams are queues, and what runs next is drawn.
//!
//! It is stricter than the real one: a stream runs ahead or lags as the seed wants, memory that was freed too early is
//! an illegal address, and a captured stream that was not forked off or not joined is an error. Nothing runs by itself:
//! whoever asks whether an event is done lets a drawn number of things happen first, so one seed gives one order.

mod bulk;

use super::error::GpuError;
use super::{Fused, Gpu, Part};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use sumac_hal::reduce::Kernel;

/// The double. Clones are the same GPU.
#[derive(Debug, Clone)]
pub struct Double {
    state: Arc<Mutex<State>>,
}

/// Memory of the double.
#[derive(Debug, Clone)]
pub struct DoubleMemory {
    block: Arc<Block>,
    at: usize,
    len_bytes: usize,
}

#[derive(Debug)]
struct Block {
    id: u64,
    state: Arc<Mutex<State>>,
}

/// A stream of the double.
#[derive(Debug)]
pub struct DoubleStream(usize);

/// An event of the double.
#[derive(Debug)]
pub struct DoubleEvent(usize);

/// Holds a stream up until it is opened: a producer that takes its time.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<AtomicBool>);

impl Gate {
    /// Let the streams behind it go on.
    pub fn open(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What was captured.
#[derive(Debug)]
pub struct DoubleGraph(Arc<Vec<(usize, Task)>>);

/// Memory of the process, and the last event that it waits for.
#[derive(Debug)]
pub struct DoublePinned {
    id: u64,
    bytes: Vec<u8>,
    last: DoubleEvent,
}

#[derive(Debug, Clone)]
struct Place {
    id: u64,
    bytes: Range<usize>,
}

#[derive(Debug, Clone)]
enum Task {
    Copy { to: Place, from: Place },
    Land(Box<LandTask>),
    Scale { kernel: Kernel, to: Place, from: Place, scalar: f64 },
    Bulk { kernel: Kernel, to: Place, from: Place },
    Publish { to: Place, words: [u64; 2] },
    Record(usize, u64),
    Wait(usize, u64),
    Gate(Gate),
    Graph(Arc<Vec<(usize, Task)>>),
}

#[derive(Debug, Clone)]
struct LandTask {
    kernel: Kernel,
    from: Place,
    is_partial: bool,
    own: Option<(Place, bool)>,
    to: Place,
    is_finished: bool,
    count: usize,
    ranks: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct EventState {
    recorded: u64,
    done: u64,
}

#[derive(Debug, Default)]
struct State {
    draws: u64,
    memory: BTreeMap<u64, Vec<u8>>,
    next_id: u64,
    room_bytes: usize,
    streams: Vec<VecDeque<Task>>,
    events: Vec<EventState>,
    is_stopped: bool,
    /// What is captured, from which stream on.
    capture: Option<(usize, Vec<(usize, Task)>)>,
    /// The error that ended everything.
    fault: Option<GpuError>,
    /// Passes that ran, and that did nothing because they were stopped.
    passes: (usize, usize),
}

impl Double {
    /// Make a GPU of `room_bytes` bytes whose timing follows from `seed`.
    pub fn new(seed: u64, room_bytes: usize) -> Self {
        let state = State { draws: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, room_bytes, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Return memory that holds `bytes`.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    pub fn upload_now(&self, bytes: &[u8]) -> Result<DoubleMemory, GpuError> {
        let memory = self.alloc(bytes.len())?;
        if let Some(block) = self.lock().memory.get_mut(&memory.block.id) {
            block.copy_from_slice(bytes);
        }
        Ok(memory)
    }

    /// Return what memory holds now.
    pub fn download_now(&self, memory: &DoubleMemory) -> Vec<u8> {
        let range = memory.at..memory.at + memory.len_bytes;
        self.lock().memory.get(&memory.block.id).map_or_else(Vec::new, |block| block[range].to_vec())
    }

    /// Hold a stream up.
    pub fn gate(&self, on: &DoubleStream) -> Gate {
        let gate = Gate::default();
        self.lock().streams[on.0].push_back(Task::Gate(gate.clone()));
        gate
    }

    /// Return how many passes ran, and how many did nothing because they were stopped.
    pub fn passes(&self) -> (usize, usize) {
        self.lock().passes
    }

    /// Return the bytes that are allocated.
    pub fn allocated_bytes(&self) -> usize {
        self.lock().memory.values().map(Vec::len).sum()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).memory.remove(&self.id);
    }
}

fn place(part: &Part<'_, DoubleMemory>) -> Place {
    let start = part.memory.at + part.at;
    Place { id: part.memory.block.id, bytes: start..start + part.len_bytes }
}

impl State {
    fn draw(&mut self, below: usize) -> usize {
        // xorshift64*: any order will do, the same one every time.
        self.draws ^= self.draws >> 12;
        self.draws ^= self.draws << 25;
        self.draws ^= self.draws >> 27;
        (self.draws.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below.max(1)
    }

    fn push(&mut self, stream: usize, task: Task) -> Result<(), GpuError> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let Some((origin, captured)) = &mut self.capture else {
            self.streams[stream].push_back(task);
            return Ok(());
        };
        let records = |captured: &[(usize, Task)], event: usize| {
            captured.iter().any(|(_, task)| matches!(task, Task::Record(other, _) if *other == event))
        };
        let is_in = stream == *origin || captured.iter().any(|(other, _)| *other == stream);
        match &task {
            Task::Wait(event, _) if !is_in && !records(captured, *event) => {
                self.streams[stream].push_back(task);
            }
            _ if !is_in && !matches!(task, Task::Wait(..)) => {
                return Err(GpuError::Driver { what: "a capture", why: format!("stream {stream} was not forked off") });
            }
            _ => captured.push((stream, task)),
        }
        Ok(())
    }

    /// Let some things happen.
    fn run_some(&mut self) {
        for _ in 0..self.draw(8) + 1 {
            let ready: Vec<usize> =
                (0..self.streams.len()).filter(|&stream| self.is_ready(self.streams[stream].front())).collect();
            if ready.is_empty() || self.fault.is_some() {
                return;
            }
            let stream = ready[self.draw(ready.len())];
            if let Some(task) = self.streams[stream].pop_front()
                && let Err(fault) = self.run(task)
            {
                self.fault = Some(fault);
            }
        }
    }

    fn is_ready(&self, task: Option<&Task>) -> bool {
        match task {
            None => false,
            Some(Task::Wait(event, version)) => self.events[*event].done >= *version,
            Some(Task::Gate(gate)) => gate.0.load(Ordering::Relaxed),
            Some(_) => true,
        }
    }

    fn run(&mut self, task: Task) -> Result<(), GpuError> {
        match task {
            Task::Copy { to, from } => {
                let bytes = self.read(&from)?.to_vec();
                self.write(&to)?.copy_from_slice(&bytes);
            }
            Task::Land(..) | Task::Scale { .. } | Task::Bulk { .. } if self.is_stopped => self.passes.1 += 1,
            Task::Land(land) => {
                self.passes.0 += 1;
                self.land(&land)?;
            }
            Task::Scale { kernel, to, from, scalar } => {
                self.passes.0 += 1;
                let bytes = self.read(&from)?.to_vec();
                let scaled = kernel.scale(self.write(&to)?, &bytes, scalar);
                scaled.map_err(|error| GpuError::Invalid(error.to_string()))?;
            }
            Task::Bulk { kernel, to, from } => {
                self.passes.0 += 1;
                self.bulk(kernel, &to, &from)?;
            }
            Task::Publish { to, words } => {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                self.write(&to)?.copy_from_slice(&bytes);
            }
            Task::Record(event, version) => self.events[event].done = version,
            Task::Wait(..) | Task::Gate(_) => {}
            Task::Graph(tasks) => self.run_graph(&tasks)?,
        }
        Ok(())
    }

    fn land(&mut self, land: &LandTask) -> Result<(), GpuError> {
        let kernel = land.kernel;
        let mut accumulators = vec![0; land.count * kernel.accumulator_bytes()];
        if let Some((own, is_partial)) = &land.own {
            kernel.load(&mut accumulators, self.read(own)?, *is_partial);
            kernel.combine(&mut accumulators, self.read(&land.from)?, land.is_partial);
        } else {
            kernel.load(&mut accumulators, self.read(&land.from)?, land.is_partial);
        }
        let to = self.write(&land.to)?;
        if land.is_finished {
            kernel.store(to, &accumulators, land.ranks);
        } else {
            to.copy_from_slice(&accumulators);
        }
        Ok(())
    }

    /// Reduce in the element type, which rounds.
    fn bulk(&mut self, kernel: Kernel, to: &Place, from: &Place) -> Result<(), GpuError> {
        let bytes = self.read(from)?.to_vec();
        let to = self.write(to)?;
        let mut accumulators = vec![0; bytes.len() / kernel.element_bytes() * kernel.accumulator_bytes()];
        kernel.load(&mut accumulators, to, false);
        kernel.combine(&mut accumulators, &bytes, false);
        kernel.store(to, &accumulators, 1);
        Ok(())
    }

    /// Run what was captured, in any order that its streams and events allow.
    fn run_graph(&mut self, tasks: &[(usize, Task)]) -> Result<(), GpuError> {
        let mut queues: BTreeMap<usize, VecDeque<&Task>> = BTreeMap::new();
        for (stream, task) in tasks {
            queues.entry(*stream).or_default().push_back(task);
        }
        let mut recorded = Vec::new();
        loop {
            let can_run = |task: &Task| match task {
                Task::Wait(event, version) => recorded.contains(&(*event, *version)),
                _ => true,
            };
            let ready: Vec<usize> = queues
                .iter()
                .filter(|(_, queue)| queue.front().is_some_and(|task| can_run(task)))
                .map(|(&at, _)| at)
                .collect();
            let Some(&stream) = ready.get(self.draw(ready.len())) else { break };
            match queues.get_mut(&stream).and_then(VecDeque::pop_front) {
                Some(&Task::Record(event, version)) => recorded.push((event, version)),
                Some(Task::Wait(..)) | None => {}
                Some(task) => self.run(task.clone())?,
            }
        }
        match queues.values().all(VecDeque::is_empty) {
            true => Ok(()),
            false => Err(GpuError::Lost("a captured operation waits for what never comes".into())),
        }
    }

    fn read(&self, place: &Place) -> Result<&[u8], GpuError> {
        let block = self.memory.get(&place.id).and_then(|block| block.get(place.bytes.clone()));
        block.ok_or_else(|| GpuError::IllegalAddress(format!("a read of {place:?}")))
    }

    fn write(&mut self, place: &Place) -> Result<&mut [u8], GpuError> {
        let block = self.memory.get_mut(&place.id).and_then(|block| block.get_mut(place.bytes.clone()));
        block.ok_or_else(|| GpuError::IllegalAddress(format!("a write of {place:?}")))
    }

    fn add(&mut self, len_bytes: usize) -> Result<u64, GpuError> {
        let used: usize = self.memory.values().map(Vec::len).sum();
        if len_bytes > self.room_bytes.saturating_sub(used) {
            return Err(GpuError::OutOfMemory { len_bytes });
        }
        // Old contents, as real memory has them.
        let fill = self.draw(256) as u8;
        self.next_id += 1;
        self.memory.insert(self.next_id, vec![fill; len_bytes]);
        Ok(self.next_id)
    }
}

impl Gpu for Double {
    type Memory = DoubleMemory;
    type Stream = DoubleStream;
    type Event = DoubleEvent;
    type Kernel = Kernel;
    type Graph = DoubleGraph;
    type Pinned = DoublePinned;

    fn alloc(&self, len_bytes: usize) -> Result<DoubleMemory, GpuError> {
        let id = self.lock().add(len_bytes)?;
        Ok(DoubleMemory { block: Arc::new(Block { id, state: Arc::clone(&self.state) }), at: 0, len_bytes })
    }

    fn part(&self, memory: &DoubleMemory, at: usize, len_bytes: usize) -> DoubleMemory {
        assert!(at + len_bytes <= memory.len_bytes, "{len_bytes} bytes at {at} of {}", memory.len_bytes);
        DoubleMemory { block: Arc::clone(&memory.block), at: memory.at + at, len_bytes }
    }

    fn addresses(&self, memory: &DoubleMemory) -> Range<u64> {
        let start = (memory.block.id << 40) + memory.at as u64;
        start..start + memory.len_bytes as u64
    }

    fn stream(&self) -> Result<DoubleStream, GpuError> {
        let mut state = self.lock();
        state.streams.push(VecDeque::new());
        Ok(DoubleStream(state.streams.len() - 1))
    }

    fn event(&self) -> Result<DoubleEvent, GpuError> {
        let mut state = self.lock();
        state.events.push(EventState::default());
        Ok(DoubleEvent(state.events.len() - 1))
    }

    fn load(&self, kernel: &Kernel) -> Result<Kernel, GpuError> {
        Ok(*kernel)
    }

    fn copy(
        &self,
        on: &DoubleStream,
        to: Part<'_, DoubleMemory>,
        from: Part<'_, DoubleMemory>,
    ) -> Result<(), GpuError> {
        assert_eq!(to.len_bytes, from.len_bytes, "a copy of as many bytes as it writes");
        self.lock().push(on.0, Task::Copy { to: place(&to), from: place(&from) })
    }

    fn land(&self, on: &DoubleStream, kernel: &Kernel, fused: &Fused<'_, DoubleMemory>) -> Result<(), GpuError> {
        let Fused { is_partial, is_finished, count, ranks, .. } = *fused;
        let own = fused.own.as_ref().map(|(part, is_partial)| (place(part), *is_partial));
        let (from, to) = (place(&fused.from), place(&fused.to));
        let land = LandTask { kernel: *kernel, from, is_partial, own, to, is_finished, count, ranks };
        self.lock().push(on.0, Task::Land(Box::new(land)))
    }

    fn scale(
        &self,
        on: &DoubleStream,
        kernel: &Kernel,
        to: Part<'_, DoubleMemory>,
        from: Part<'_, DoubleMemory>,
        scalar: f64,
    ) -> Result<(), GpuError> {
        kernel.scale(&mut [], &[], scalar).map_err(|error| GpuError::Invalid(error.to_string()))?;
        self.lock().push(on.0, Task::Scale { kernel: *kernel, to: place(&to), from: place(&from), scalar })
    }

    fn record(&self, event: &DoubleEvent, on: &DoubleStream) -> Result<(), GpuError> {
        let mut state = self.lock();
        state.events[event.0].recorded += 1;
        let version = state.events[event.0].recorded;
        state.push(on.0, Task::Record(event.0, version))
    }

    fn wait(&self, on: &DoubleStream, event: &DoubleEvent) -> Result<(), GpuError> {
        let mut state = self.lock();
        let version = state.events[event.0].recorded;
        state.push(on.0, Task::Wait(event.0, version))
    }

    fn is_done(&self, event: &DoubleEvent) -> Result<bool, GpuError> {
        let mut state = self.lock();
        state.run_some();
        match &state.fault {
            Some(fault) => Err(fault.clone()),
            None => Ok(state.events[event.0].done >= state.events[event.0].recorded),
        }
    }

    fn capture(
        &self,
        on: &DoubleStream,
        body: &mut dyn FnMut() -> Result<(), GpuError>,
    ) -> Result<DoubleGraph, GpuError> {
        self.lock().capture = Some((on.0, Vec::new()));
        let result = body();
        let (origin, captured) = self.lock().capture.take().unwrap_or_default();
        result?;
        // The last thing of every other stream is an event that the first stream waits for.
        let streams: std::collections::BTreeSet<usize> = captured.iter().map(|(stream, _)| *stream).collect();
        for stream in streams.into_iter().filter(|&stream| stream != origin) {
            let last = captured.iter().rfind(|(other, _)| *other == stream);
            let is_joined = matches!(last, Some((_, Task::Record(event, version))) if captured.iter().any(
                |(other, task)| *other == origin && matches!(task, Task::Wait(e, v) if (e, v) == (event, version))));
            if !is_joined {
                return Err(GpuError::Driver { what: "a capture", why: format!("stream {stream} was not joined") });
            }
        }
        Ok(DoubleGraph(Arc::new(captured)))
    }

    fn launch(&self, graph: &DoubleGraph, on: &DoubleStream) -> Result<(), GpuError> {
        self.lock().push(on.0, Task::Graph(Arc::clone(&graph.0)))
    }

    fn stop(&self, is_stopped: bool) -> Result<(), GpuError> {
        self.lock().is_stopped = is_stopped;
        Ok(())
    }

    fn pinned(&self, len_bytes: usize) -> Result<DoublePinned, GpuError> {
        let id = self.lock().add(len_bytes)?;
        Ok(DoublePinned { id, bytes: vec![0; len_bytes], last: self.event()? })
    }

    fn host<'p>(&self, pinned: &'p mut DoublePinned) -> Result<&'p mut [u8], GpuError> {
        while !self.is_done(&pinned.last)? {}
        if let Some(block) = self.lock().memory.get(&pinned.id) {
            pinned.bytes.copy_from_slice(block);
        }
        Ok(&mut pinned.bytes)
    }

    fn download(&self, on: &DoubleStream, to: &mut DoublePinned, from: Part<'_, DoubleMemory>) -> Result<(), GpuError> {
        let place_of = Place { id: to.id, bytes: 0..from.len_bytes };
        self.lock().push(on.0, Task::Copy { to: place_of, from: place(&from) })?;
        self.record(&to.last, on)
    }

    fn upload(&self, on: &DoubleStream, to: Part<'_, DoubleMemory>, from: &mut DoublePinned) -> Result<(), GpuError> {
        // The process writes to its own view; here it reaches what the GPU sees.
        if let Some(block) = self.lock().memory.get_mut(&from.id) {
            block.copy_from_slice(&from.bytes);
        }
        let place_of = Place { id: from.id, bytes: 0..to.len_bytes };
        self.lock().push(on.0, Task::Copy { to: place(&to), from: place_of })?;
        self.record(&from.last, on)
    }
}
