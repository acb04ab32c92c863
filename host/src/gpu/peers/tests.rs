//! Ranks in processes of their own on the double's machine, each on a thread: what they decide, and how they end.

mod ends;
mod handles;
mod ways;

use super::{Bootstrap, MESSAGE_BYTES_MAX, PeerError, PeerGroup, PeerOptions, Reduced};
use crate::exec::tests::{contribution, expected};
use crate::gpu::{Double, DoubleMemory, GroupOptions};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

/// Long enough for any machine; no test waits for it.
const FAR: Duration = Duration::from_secs(60);
const ROOM: usize = 1 << 26;

fn far() -> Instant {
    Instant::now() + FAR
}

/// What the ranks of a test say to each other: a round's messages, by rank, and how many have read them.
#[derive(Default)]
struct Round {
    said: Vec<Option<Vec<u8>>>,
    read: usize,
}

/// A board that all ranks write to and read.
struct Board {
    round: Mutex<Round>,
    moved: Condvar,
    ranks: u32,
    /// What each chunk through the network costs, and from which chunk on there is no tree.
    cost_s: f64,
    tree_chunks: usize,
}

impl Board {
    fn new(ranks: u32) -> Self {
        let round = Mutex::new(Round { said: vec![None; ranks as usize], read: 0 });
        Self { round, moved: Condvar::new(), ranks, cost_s: 1.0, tree_chunks: usize::MAX }
    }
}

/// One rank's end of the board.
struct Seat<'a> {
    board: &'a Board,
    rank: u32,
    chunks: Mutex<usize>,
}

impl Seat<'_> {
    fn round(&self, bytes: &[u8], deadline: Instant) -> Option<Vec<Vec<u8>>> {
        let ranks = self.board.ranks as usize;
        let left = deadline.saturating_duration_since(Instant::now());
        let round = self.board.round.lock().expect("no panic");
        let free = |round: &mut Round| round.said[self.rank as usize].is_some();
        let (mut round, _) = self.board.moved.wait_timeout_while(round, left, free).expect("no panic");
        round.said[self.rank as usize] = Some(bytes.to_vec());
        self.board.moved.notify_all();
        let incomplete = |round: &mut Round| round.said.iter().any(Option::is_none);
        let (mut round, late) = self.board.moved.wait_timeout_while(round, left, incomplete).expect("no panic");
        if late.timed_out() {
            round.said[self.rank as usize] = None;
            return None;
        }
        let said = round.said.iter().flatten().cloned().collect();
        round.read += 1;
        if round.read == ranks {
            *round = Round { said: vec![None; ranks], read: 0 };
            self.board.moved.notify_all();
        } else {
            // Nobody begins another round before all have read this one.
            let left = deadline.saturating_duration_since(Instant::now());
            let others = |round: &mut Round| round.read != 0;
            drop(self.board.moved.wait_timeout_while(round, left, others).expect("no panic"));
        }
        Some(said)
    }
}

impl Bootstrap for Seat<'_> {
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
        Ok(Reduced { path: if has_tree { Path::Tree } else { Path::Ring }, fallback, repaired: false })
    }

    fn cost_s(&self, _: &OpDesc) -> Option<f64> {
        // Ranks see the network differently: rank 0's word counts.
        Some(if self.rank == 0 { self.board.cost_s } else { 1.0 - self.board.cost_s })
    }
}

type Peers<'a> = PeerGroup<Double, Seat<'a>>;

fn small() -> PeerOptions {
    let group = GroupOptions { piece_bytes: 64, grace: Duration::from_millis(500), ..PeerOptions::default().group };
    PeerOptions { group, chunk_bytes: 64, nccl: false, ..PeerOptions::default() }
}

/// Run every rank on a thread of its own with its GPU, and return what each returned.
fn on_ranks<R: Send>(board: &Board, gpus: &[Double], body: impl Fn(Double, Seat<'_>) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let body = &body;
        let run = |(rank, gpu): (usize, &Double)| {
            let (gpu, seat) = (gpu.clone(), Seat { board, rank: rank as u32, chunks: Mutex::new(0) });
            scope.spawn(move || body(gpu, seat))
        };
        let ranks: Vec<_> = gpus.iter().enumerate().map(run).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// Processes of one machine, on GPUs of these numbers.
fn processes(seed: u64, gpus: &[u8]) -> Vec<Double> {
    let machine = Double::new(seed, ROOM);
    gpus.iter().map(|&gpu| machine.process(gpu)).collect()
}

fn input(dtype: Dtype, op: ReduceOp, rank: u32, count: usize) -> Vec<u8> {
    (0..count).flat_map(|element| contribution(dtype, op, rank, element)).collect()
}

fn sum_of(dtype: Dtype, op: ReduceOp, ranks: u32, count: usize) -> Vec<u8> {
    (0..count).flat_map(|element| expected(dtype, op, ranks, element)).collect()
}

fn upload(gpu: &Double, bytes: &[u8]) -> DoubleMemory {
    gpu.upload_now(bytes).expect("room")
}
