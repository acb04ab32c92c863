//! Ranks in separate processes of the fake machine, each on a thread: decisions and completion.

mod completion;
mod handles;
mod transports;

use super::{Bootstrap, MESSAGE_BYTES_MAX, PeerError, PeerGroup, PeerOptions, Reduced};
use crate::exec::tests::{contribution, expected};
use crate::gpu::{FakeGpu, FakeMemory, GroupOptions};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

/// Long enough for any machine; no test waits for it.
const LONG: Duration = Duration::from_secs(60);
const ROOM: usize = 1 << 26;

fn long_deadline() -> Instant {
    Instant::now() + LONG
}

/// One exchange of a test's ranks: messages by rank, and how many ranks have read them.
#[derive(Default)]
struct Round {
    messages: Vec<Option<Vec<u8>>>,
    read: usize,
}

/// A bootstrap board that all ranks write to and read.
struct Board {
    round: Mutex<Round>,
    moved: Condvar,
    ranks: u32,
    /// Cost of each chunk through the network, and from which chunk on there is no tree.
    cost_s: f64,
    tree_chunks: usize,
}

impl Board {
    fn new(ranks: u32) -> Self {
        let round = Mutex::new(Round { messages: vec![None; ranks as usize], read: 0 });
        Self { round, moved: Condvar::new(), ranks, cost_s: 1.0, tree_chunks: usize::MAX }
    }
}

/// One rank's end of the board.
struct BoardRank<'a> {
    board: &'a Board,
    rank: u32,
    chunks: Mutex<usize>,
}

impl BoardRank<'_> {
    fn round(&self, bytes: &[u8], deadline: Instant) -> Option<Vec<Vec<u8>>> {
        let ranks = self.board.ranks as usize;
        let remaining = deadline.saturating_duration_since(Instant::now());
        let round = self.board.round.lock().expect("no panic");
        let free = |round: &mut Round| round.messages[self.rank as usize].is_some();
        let (mut round, _) = self.board.moved.wait_timeout_while(round, remaining, free).expect("no panic");
        round.messages[self.rank as usize] = Some(bytes.to_vec());
        self.board.moved.notify_all();
        let incomplete = |round: &mut Round| round.messages.iter().any(Option::is_none);
        let (mut round, late) = self.board.moved.wait_timeout_while(round, remaining, incomplete).expect("no panic");
        if late.timed_out() {
            round.messages[self.rank as usize] = None;
            return None;
        }
        let messages = round.messages.iter().flatten().cloned().collect();
        round.read += 1;
        if round.read == ranks {
            *round = Round { messages: vec![None; ranks], read: 0 };
            self.board.moved.notify_all();
        } else {
            // No rank begins another exchange before all have read this one.
            let remaining = deadline.saturating_duration_since(Instant::now());
            let others = |round: &mut Round| round.read != 0;
            drop(self.board.moved.wait_timeout_while(round, remaining, others).expect("no panic"));
        }
        Some(messages)
    }
}

impl Bootstrap for BoardRank<'_> {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.board.ranks
    }

    fn exchange(&self, bytes: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, PeerError> {
        assert!(bytes.len() <= MESSAGE_BYTES_MAX, "{} bytes", bytes.len());
        self.round(bytes, deadline).ok_or(PeerError::Bootstrap(crate::comm::Error::Cancelled))
    }

    fn all_reduce(&self, desc: &OpDesc, bytes: &mut [u8], deadline: Instant) -> Result<Reduced, PeerError> {
        let all = self.exchange(bytes, deadline)?;
        let kernel = desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op)).expect("a kernel");
        let mut accumulators = vec![0; bytes.len() / kernel.element_bytes() * kernel.accumulator_bytes()];
        kernel.load(&mut accumulators, &all[0], false);
        all[1..].iter().for_each(|each| kernel.combine(&mut accumulators, each, false));
        kernel.store(bytes, &accumulators, self.board.ranks);
        let mut chunks = self.chunks.lock().expect("no panic");
        *chunks += 1;
        let has_tree = *chunks <= self.board.tree_chunks;
        let fallback = (!has_tree).then(|| "there is no tree: its device died".to_owned());
        Ok(Reduced { path: if has_tree { Path::Tree } else { Path::Ring }, fallback, recovered: false })
    }

    fn cost_s(&self, _: &OpDesc) -> Option<f64> {
        // Ranks estimate the network differently: rank 0's estimate counts.
        Some(if self.rank == 0 { self.board.cost_s } else { 1.0 - self.board.cost_s })
    }
}

type Peers<'a> = PeerGroup<FakeGpu, BoardRank<'a>>;

fn small() -> PeerOptions {
    let group = GroupOptions { piece_bytes: 64, grace: Duration::from_millis(500), ..PeerOptions::default().group };
    PeerOptions { group, chunk_bytes: 64, nccl: false, ..PeerOptions::default() }
}

/// Run each rank on its own thread with its GPU, and return the results.
fn on_ranks<R: Send>(board: &Board, gpus: &[FakeGpu], body: impl Fn(FakeGpu, BoardRank<'_>) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let body = &body;
        let run = |(rank, gpu): (usize, &FakeGpu)| {
            let (gpu, board_rank) = (gpu.clone(), BoardRank { board, rank: rank as u32, chunks: Mutex::new(0) });
            scope.spawn(move || body(gpu, board_rank))
        };
        let ranks: Vec<_> = gpus.iter().enumerate().map(run).collect();
        let results = ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
        gpus.iter().for_each(|gpu| assert_eq!(gpu.blocked(), [""; 0], "calls that would hang on hardware"));
        results
    })
}

/// Processes of one machine, on GPUs with these numbers.
fn processes(seed: u64, gpus: &[u8]) -> Vec<FakeGpu> {
    let machine = FakeGpu::new(seed, ROOM);
    gpus.iter().map(|&gpu| machine.process(gpu)).collect()
}

fn input(dtype: Dtype, op: ReduceOp, rank: u32, count: usize) -> Vec<u8> {
    (0..count).flat_map(|element| contribution(dtype, op, rank, element)).collect()
}

fn sum_of(dtype: Dtype, op: ReduceOp, ranks: u32, count: usize) -> Vec<u8> {
    (0..count).flat_map(|element| expected(dtype, op, ranks, element)).collect()
}

fn upload(gpu: &FakeGpu, bytes: &[u8]) -> FakeMemory {
    gpu.upload_now(bytes).expect("room")
}
