//! The speed of the emulated DMA engine at reducing N registered buffers in place, compared with a bare loop.
//!
//! The bare loop does only the work itself. Two threads split N buffers of P bytes into 128 KiB segments, copy the
//! first into a private accumulator, add the others, and copy the result to all, without protocol, checks or redo
//! slots. The engine does the same work with one chain per chunk: retract the slot's header, load, reduce, round,
//! publish with the result's checksum, copy to all. Both are measured alternately in one run and compared by median and
//! minimum, because the speed of shared virtual machines drifts.
//!
//! With `-- redo` it measures what redo slots cost instead (PROTOCOL 7), at a device's own chunk length: few slots and
//! many, out of place with and without the checksum, and *direct*: the sum is built in the first output and copied to
//! the others, and only a record is written. No device uses direct chains: `hal/PROTOCOL.md` says why.
//!
//! Run with `cargo bench -p sumac-hal --features emu --bench dma`. It asserts nothing about results; the tests check
//! them.

use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;
use sumac_hal::dma::{
    Address, Chain, Completion, Coverage, DmaMemory, Engine, Profile, RegionKey, Scope, Status, Step, Tag, WaitEngine,
};
use sumac_hal::emu::dma::{DmaConfig, EmuEngine, HeapMemory};
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The length of a segment of the bare loop, in bytes.
const SEGMENT_LEN_BYTES: usize = 128 << 10;

/// The length of a chunk, which one chain reduces, in bytes.
const CHUNK_LEN_BYTES: usize = 128 << 10;

/// The length of a chunk of a tree of one device, in bytes.
const DEVICE_CHUNK_LEN_BYTES: usize = 60 << 10;

/// The length of a slot's header, in bytes.
const HEADER_LEN_BYTES: usize = 128;

/// Chunks in flight.
const SLOTS: usize = 8;

/// Chunks in flight of a tree of one device.
const DEVICE_SLOTS: usize = 64;

const THREADS: usize = 2;

/// Where results go, and what is kept of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeping {
    /// Results replace inputs; redo slots keep them, with a checksum.
    InPlace,
    /// The same, to outputs of their own.
    OutOfPlace,
    /// Redo slots keep results without a checksum.
    Unsummed,
    /// Nothing is kept: the sum is built in the first output.
    Direct,
}

/// What a chain does, and over how many slots.
#[derive(Debug, Clone, Copy)]
struct Setup {
    keeping: Keeping,
    slots: usize,
    chunk_len_bytes: usize,
}

fn main() {
    // `cargo bench` passes `--bench`. `cargo test --benches` does not; there is nothing to test.
    if !std::env::args().any(|arg| arg == "--bench") {
        println!("nothing measured: use `cargo bench`, or pass --bench");
        return;
    }
    println!("f32 sum in place, {THREADS} threads; traffic is 2 x N x P; engine and bare loop in turns");
    println!(
        "{:>3} {:>5}  {:>10} {:>10} {:>7}  {:>10} {:>10} {:>7}  {:>8}",
        "N", "MiB", "bare ms", "engine ms", "ratio", "bare best", "eng. best", "ratio", "GB/s"
    );
    if std::env::args().any(|arg| arg == "redo") {
        return measure_redo_slots();
    }
    let setup = Setup { keeping: Keeping::InPlace, slots: SLOTS, chunk_len_bytes: CHUNK_LEN_BYTES };
    for ranks in [2, 4, 8] {
        for mib in [1, 4, 16, 64] {
            measure(ranks, mib << 20, setup);
        }
    }
}

fn measure_redo_slots() {
    let many = |keeping| (keeping, DEVICE_SLOTS);
    let few = [8, 16, 32].map(|slots| (Keeping::InPlace, slots));
    let all = [Keeping::InPlace, Keeping::OutOfPlace, Keeping::Unsummed, Keeping::Direct].map(many);
    for ranks in [2, 4] {
        for mib in [1, 4, 16] {
            for (keeping, slots) in few.into_iter().chain(all) {
                print!("{keeping:?}, {slots} slots: ");
                measure(ranks, mib << 20, Setup { keeping, slots, chunk_len_bytes: DEVICE_CHUNK_LEN_BYTES });
            }
        }
    }
}

fn measure(ranks: usize, len_bytes: usize, setup: Setup) {
    // Inputs, and outputs that only some setups use.
    let buffers: Vec<_> = (0..2 * ranks).map(|_| Arc::new(HeapMemory::new(len_bytes))).collect();
    for buffer in &buffers {
        let values: Vec<u8> = (0..len_bytes / 4).flat_map(|_| 1e-20_f32.to_le_bytes()).collect();
        buffer.write(0, &values);
    }
    let rounds = (4 << 30) / (ranks * len_bytes * 8);
    let rounds = rounds.clamp(9, 201);
    let mut engine = Reducer::new(&buffers, setup);
    let mut took = [Vec::new(), Vec::new()];
    let bases: Vec<usize> = buffers.iter().map(|buffer| buffer.base().addr().get()).collect();
    let (inputs, outputs) = bases.split_at(ranks);
    let outputs = if setup.keeping == Keeping::InPlace { inputs } else { outputs };
    bare_loop((inputs, outputs), len_bytes, rounds, |pass| {
        let start = Instant::now();
        pass();
        took[0].push(start.elapsed().as_secs_f64() * 1e3);
        let start = Instant::now();
        engine.all_reduce(ranks, len_bytes);
        took[1].push(start.elapsed().as_secs_f64() * 1e3);
    });
    let [bare, dma] = took.map(|mut took| {
        took.sort_by(f64::total_cmp);
        (took[took.len() / 2], took[0])
    });
    let traffic = 2.0 * (ranks * len_bytes) as f64;
    println!(
        "{ranks:>3} {:>5}  {:>10.3} {:>10.3} {:>6.0}%  {:>10.3} {:>10.3} {:>6.0}%  {:>8.1}",
        len_bytes >> 20,
        bare.0,
        dma.0,
        bare.0 / dma.0 * 100.0,
        bare.1,
        dma.1,
        bare.1 / dma.1 * 100.0,
        traffic / dma.0 / 1e6,
    );
}

/// The engine, with the state that a device keeps for one group.
struct Reducer {
    engine: EmuEngine,
    setup: Setup,
    busy: Vec<bool>,
    steps: Vec<Step>,
}

impl Reducer {
    fn new(buffers: &[Arc<HeapMemory>], setup: Setup) -> Self {
        let mut engine = EmuEngine::start(DmaConfig { on_start: Some(pin), ..DmaConfig::new(Profile::Full, THREADS) })
            .expect("threads");
        let slots = Arc::new(HeapMemory::new(setup.slots * (HEADER_LEN_BYTES + setup.chunk_len_bytes)));
        for (index, memory) in std::iter::once(&slots).chain(buffers).enumerate() {
            engine.map(key(index), memory.clone()).expect("a free entry");
        }
        Self { engine, setup, busy: vec![false; setup.slots], steps: Vec::new() }
    }

    fn all_reduce(&mut self, ranks: usize, len_bytes: usize) {
        let Setup { slots, chunk_len_bytes, .. } = self.setup;
        let chunks = len_bytes.div_ceil(chunk_len_bytes);
        let (mut next, mut done) = (0, 0);
        while done < chunks {
            // Chunk k occupies slot k % S.
            while next < chunks && !self.busy[next % slots] {
                let slot = (next % slots) as u32;
                self.busy[next % slots] = true;
                let offset = next * chunk_len_bytes;
                let count = (len_bytes - offset).min(chunk_len_bytes) / 4;
                self.chunk(ranks, slot, offset as u64, count as u32, next as u64);
                next += 1;
            }
            self.engine.wait(None);
            let mut completions = [Completion { tag: Tag::default(), status: Status::Done, step: 0 }; DEVICE_SLOTS];
            let taken = self.engine.poll(&mut completions);
            for completion in &completions[..taken] {
                assert_eq!(completion.status, Status::Done, "{completion:?}");
                self.busy[completion.tag.slot as usize] = false;
            }
            done += taken;
        }
    }

    fn chunk(&mut self, ranks: usize, slot: u32, offset_bytes: u64, count: u32, seq: u64) {
        let keeping = self.setup.keeping;
        let slot_offset = slot as usize * (HEADER_LEN_BYTES + self.setup.chunk_len_bytes);
        let header = address(0, slot_offset as u64);
        let (op, f32) = (ReduceOp::Sum, Dtype::F32);
        let input = |rank: usize| address(1 + rank, offset_bytes);
        let output = |rank: usize| if keeping == Keeping::InPlace { input(rank) } else { input(ranks + rank) };
        let slot_acc = address(0, (slot_offset + HEADER_LEN_BYTES) as u64);
        let acc = if keeping == Keeping::Direct { output(0) } else { slot_acc };
        self.steps.clear();
        self.steps.push(Step::Publish { dst: header, words: [0, 0], covers: Coverage::NONE });
        self.steps.push(Step::Load { source: f32, accumulator: f32, src: input(0), dst: acc, count });
        self.steps.extend((1..ranks).map(|rank| Step::Reduce {
            op,
            source: f32,
            accumulator: f32,
            src: input(rank),
            dst: acc,
            count,
        }));
        let all = ranks as u32;
        self.steps.push(Step::Store { op, accumulator: f32, output: f32, src: acc, dst: acc, count, ranks: all });
        let covered = Coverage { offset_bytes: HEADER_LEN_BYTES as u32, len_bytes: count * 4 };
        let sums = matches!(keeping, Keeping::InPlace | Keeping::OutOfPlace);
        let covers = if sums { covered } else { Coverage::NONE };
        let publish = Step::Publish { dst: header, words: [1, seq], covers };
        let copy = |rank: usize| Step::Copy { src: acc, dst: output(rank), len_bytes: count * 4 };
        if keeping == Keeping::Direct {
            self.steps.extend((1..ranks).map(copy));
            self.steps.push(publish);
        } else {
            self.steps.push(publish);
            self.steps.extend((0..ranks).map(copy));
        }
        let tag = Tag { seq, slot, attempt: 0 };
        self.engine.submit(Chain { tag, scope: Scope(0), steps: &self.steps }).expect("room for a chain a slot");
    }
}

/// Pin this thread to one core.
fn pin(thread: usize) {
    #[cfg(target_os = "linux")]
    {
        let mut cores = rustix::thread::CpuSet::new();
        cores.set(thread);
        // If the core is not available, the thread is not pinned.
        let _ = rustix::thread::sched_setaffinity(None, &cores);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = thread;
}

fn key(index: usize) -> RegionKey {
    RegionKey { index: index as u16, generation: 1 }
}

fn address(index: usize, offset_bytes: u64) -> Address {
    Address { region: key(index), offset_bytes }
}

/// Start the threads of the bare loop. Call `turn` once per round with a function that makes them run one pass.
fn bare_loop(
    (inputs, outputs): (&[usize], &[usize]),
    len_bytes: usize,
    rounds: usize,
    mut turn: impl FnMut(&dyn Fn()),
) {
    let barrier = Barrier::new(THREADS + 1);
    thread::scope(|scope| {
        for id in 0..THREADS {
            let barrier = &barrier;
            scope.spawn(move || {
                pin(id);
                let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("f32 sums are supported");
                let mut acc = vec![0; SEGMENT_LEN_BYTES];
                for _ in 0..rounds {
                    barrier.wait();
                    for at in (id * SEGMENT_LEN_BYTES..len_bytes).step_by(THREADS * SEGMENT_LEN_BYTES) {
                        let len_bytes = SEGMENT_LEN_BYTES.min(len_bytes - at);
                        segment(&kernel, (inputs, outputs), at, &mut acc[..len_bytes]);
                    }
                    barrier.wait();
                }
            });
        }
        for _ in 0..rounds {
            turn(&|| {
                barrier.wait();
                barrier.wait();
            });
        }
    });
}

fn segment(kernel: &Kernel, (inputs, outputs): (&[usize], &[usize]), at: usize, acc: &mut [u8]) {
    for (rank, &base) in inputs.iter().enumerate() {
        // SAFETY: the range lies within the buffer, which outlives the threads' scope. Each segment is used by one
        // thread, and the engine has no chain in flight during a pass.
        let from = unsafe { std::slice::from_raw_parts((base + at) as *const u8, acc.len()) };
        if rank == 0 { acc.copy_from_slice(from) } else { kernel.combine(acc, black_box(from), false) }
    }
    for &base in outputs {
        // SAFETY: see above.
        unsafe { std::slice::from_raw_parts_mut((base + at) as *mut u8, acc.len()) }.copy_from_slice(acc);
    }
}
