//! Handles and exchanged messages: valid, invalid, stale and malformed.

use super::*;
use crate::gpu::peers::{Handle, Peered, WhyStaged};
use crate::gpu::{Gpu, GpuError};
use crate::select::Algo;

#[test]
fn handle_opens_memory_until_it_is_freed() {
    let gpus = processes(1, &[0, 1]);
    let facts = gpus[0].facts().expect("facts");
    let whole = upload(&gpus[0], &[1, 2, 3, 4, 5, 6, 7, 8]);
    let handle = gpus[0].export(&gpus[0].part(&whole, 2, 4)).expect("a handle");
    let opened = gpus[1].open(&facts, &handle).expect("opened");
    assert_eq!(gpus[1].download_now(&opened), [3, 4, 5, 6]);
    let refused = |handle: &Handle, words: &str| match gpus[1].open(&facts, handle) {
        Err(GpuError::Handle(why)) => assert!(why.contains(words), "{why}"),
        other => panic!("{other:?}"),
    };
    refused(&Handle { ipc: Ok(vec![1, 2, 3]), ..handle.clone() }, "3 bytes are not a handle");
    refused(&Handle { ipc: Ok(vec![255; 8]), ..handle.clone() }, "has no memory");
    refused(&Handle { len_bytes: 7, ..handle.clone() }, "7 bytes at 2 of 8");
    refused(&Handle { at: u64::MAX, ..handle.clone() }, "of 8");
    let of_another = gpus[1].facts().expect("facts");
    assert!(matches!(gpus[1].open(&of_another, &handle), Err(GpuError::Handle(_))), "it is not that process's");
    drop(whole);
    refused(&handle, "has no memory");
    // Memory opened in time is stale too: the owner has freed it.
    let (stream, event) = (gpus[1].stream().expect("a stream"), gpus[1].event().expect("an event"));
    let to = gpus[1].alloc(4).expect("room");
    let part = |memory| crate::gpu::Part { memory, at: 0, len_bytes: 4 };
    gpus[1].copy(&stream, part(&to), part(&opened)).expect("handed over");
    gpus[1].record(&event, &stream).expect("recorded");
    let error = std::iter::from_fn(|| Some(gpus[1].is_done(&event))).find_map(Result::err).expect("an error");
    assert!(matches!(error, GpuError::IllegalAddress(_)), "{error}");
    // The owner's process is unaffected.
    assert!(gpus[0].alloc(1).is_ok());
}

/// A rank whose messages are altered in transit.
struct TamperingRank<'a> {
    board_rank: BoardRank<'a>,
    /// The round to alter, and how.
    alter: (usize, fn(&mut Vec<u8>)),
    rounds: Mutex<usize>,
}

impl Bootstrap for TamperingRank<'_> {
    fn rank(&self) -> u32 {
        self.board_rank.rank()
    }

    fn ranks(&self) -> u32 {
        self.board_rank.ranks()
    }

    fn exchange(&self, bytes: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, PeerError> {
        let mut bytes = bytes.to_vec();
        let mut round = self.rounds.lock().expect("no panic");
        if *round == self.alter.0 && self.board_rank.rank == 1 {
            self.alter.1(&mut bytes);
        }
        *round += 1;
        self.board_rank.exchange(&bytes, deadline)
    }

    fn all_reduce(&self, desc: &OpDesc, bytes: &mut [u8], deadline: Instant) -> Result<Reduced, PeerError> {
        self.board_rank.all_reduce(desc, bytes, deadline)
    }

    fn cost_s(&self, desc: &OpDesc) -> Option<f64> {
        self.board_rank.cost_s(desc)
    }
}

/// Join with an altered message of rank 1; returns the outcome at rank 0.
fn join_with_altered_message(round: usize, alter: fn(&mut Vec<u8>)) -> Result<Option<WhyStaged>, PeerError> {
    let (board, gpus) = (Board::new(2), processes(2, &[0, 0]));
    let mut ends = on_ranks(&board, &gpus, |gpu, board_rank| {
        let tampering = TamperingRank { board_rank, alter: (round, alter), rounds: Mutex::new(0) };
        let soon = Instant::now() + Duration::from_millis(500);
        PeerGroup::join(gpu, tampering, small(), soon).map(|peers| peers.why_staged().cloned())
    });
    ends.swap_remove(0)
}

#[test]
fn invalid_peer_messages_are_rejected() {
    let message = |end: Result<Option<WhyStaged>, PeerError>, words: &str| match end {
        Err(PeerError::Message { rank: 1, why }) => assert!(why.contains(words), "{why}"),
        other => panic!("{other:?}"),
    };
    assert_eq!(join_with_altered_message(99, |_| {}), Ok(None), "unaltered, they access each other");
    message(join_with_altered_message(0, |bytes| bytes.clear()), "unreadable message");
    message(join_with_altered_message(0, |bytes| bytes.truncate(9)), "unreadable message");
    message(join_with_altered_message(0, |bytes| bytes[0] = 7), "message version 7, expected 1");
    message(join_with_altered_message(0, |bytes| bytes[3] ^= 1), "options");
    message(join_with_altered_message(1, |bytes| bytes[0] = 9), "memory number 9, expected 0");
    message(join_with_altered_message(2, |bytes| bytes[0] = 77), "unreadable message");
    // A handle that opens nothing: all ranks stage, and report which rank could not open which memory.
    let opening = |end: Result<Option<WhyStaged>, PeerError>, words: &str| match end {
        Ok(Some(WhyStaged::Opening { rank: 0, peer: 1, why })) => assert!(why.contains(words), "{why}"),
        other => panic!("{other:?}"),
    };
    // The first byte of the handle follows number, result, address, result and length.
    opening(join_with_altered_message(1, |bytes| bytes[5] ^= 0x7f), "has no memory");
    // Shorter than what others will write: one byte, where two MiB take four bytes of the message.
    let short = |bytes: &mut Vec<u8>| {
        bytes.truncate(bytes.len() - 4);
        bytes.push(1);
    };
    opening(join_with_altered_message(1, short), "1 bytes, but 32 are required");
}

#[test]
fn unexportable_memory_is_staged() {
    let (board, gpus) = (Board::new(2), processes(3, &[0, 1]));
    on_ranks(&board, &gpus, |gpu, board_rank| {
        let rank = board_rank.rank;
        let memory = upload(&gpu, &input(Dtype::F32, ReduceOp::Sum, rank, 20));
        let mut peers = PeerGroup::join(gpu.clone(), board_rank, small(), long_deadline()).expect("joined");
        let sound = peers.share(&memory, long_deadline()).expect("shown");
        assert_eq!(sound.why_staged(), None);
        // From here on exports fail; earlier ones remain valid.
        peers.bootstrap().exchange(&[], long_deadline()).expect("a barrier");
        gpu.without_handles("of another allocator");
        peers.bootstrap().exchange(&[], long_deadline()).expect("a barrier");
        let shared = peers.share(&memory, long_deadline()).expect("told");
        let why = shared.why_staged().expect("no handle").to_string();
        assert!(why.contains("rank 0 could not open the memory of rank 1: ") && why.contains("of another"), "{why}");
        let types = (Dtype::F32, ReduceOp::Sum, Algo::Auto);
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 20);
        let error =
            peers.start(&shared, (&desc, Algo::Auto), &[], long_deadline()).map(|_| ()).expect_err("only staged");
        assert!(matches!(error, PeerError::Staged(WhyStaged::Opening { .. })), "{error}");
        let outcome = peers.all_reduce(&shared, types, &[], long_deadline()).expect("staged");
        assert_eq!(outcome.chunks, [Path::Tree; 2]);
        assert_eq!(gpu.download_now(&memory), sum_of(Dtype::F32, ReduceOp::Sum, 2, 20));
        peers.all_reduce(&sound, (Dtype::F32, ReduceOp::Sum, Algo::Ring), &[], long_deadline()).expect("directly");
    });
}

#[test]
fn orderly_leave_closes_all_memory() {
    let (board, gpus) = (Board::new(3), processes(4, &[0, 1, 0]));
    on_ranks(&board, &gpus, |gpu, board_rank| {
        let memory = upload(&gpu, &input(Dtype::Bf16, ReduceOp::Sum, board_rank.rank, 40));
        let mut peers = PeerGroup::join(gpu, board_rank, small(), long_deadline()).expect("joined");
        let shared = peers.share(&memory, long_deadline()).expect("shown");
        // Each of these needs its own partial values.
        for algo in [Algo::Binomial, Algo::Ring, Algo::HalvingDoubling] {
            peers.all_reduce(&shared, (Dtype::Bf16, ReduceOp::Sum, algo), &[], long_deadline()).expect("reduced");
        }
        peers.unshare(shared, long_deadline()).expect("closed");
        peers.leave(long_deadline()).expect("left");
    });
    assert_eq!(gpus[0].allocated_bytes(), 0);
    // A rank that drops without leaving keeps what others may still have open.
    on_ranks(&board, &gpus, |gpu, board_rank| {
        drop(PeerGroup::join(gpu, board_rank, small(), long_deadline()).expect("joined"));
    });
    assert!(gpus[0].allocated_bytes() > 0);
}
