//! Handles, and what ranks tell each other: right, wrong, stale, of another form.

use super::*;
use crate::gpu::peers::{Handle, Peered, WhyStaged};
use crate::gpu::{Gpu, GpuError};
use crate::select::Algo;

#[test]
fn a_handle_opens_memory_until_it_is_freed() {
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
    refused(&Handle { ipc: Ok(vec![1, 2, 3]), ..handle.clone() }, "3 bytes are no handle");
    refused(&Handle { ipc: Ok(vec![255; 8]), ..handle.clone() }, "has no memory");
    refused(&Handle { len_bytes: 7, ..handle.clone() }, "7 bytes at 2 of 8");
    refused(&Handle { at: u64::MAX, ..handle.clone() }, "of 8");
    let of_another = gpus[1].facts().expect("facts");
    assert!(matches!(gpus[1].open(&of_another, &handle), Err(GpuError::Handle(_))), "it is not that process's");
    drop(whole);
    refused(&handle, "or has none any more");
    // What was opened in time is stale too: the owner has freed it.
    let (stream, event) = (gpus[1].stream().expect("a stream"), gpus[1].event().expect("an event"));
    let to = gpus[1].alloc(4).expect("room");
    let part = |memory| crate::gpu::Part { memory, at: 0, len_bytes: 4 };
    gpus[1].copy(&stream, part(&to), part(&opened)).expect("handed over");
    gpus[1].record(&event, &stream).expect("recorded");
    let error = std::iter::from_fn(|| Some(gpus[1].is_done(&event))).find_map(Result::err).expect("an error");
    assert!(matches!(error, GpuError::IllegalAddress(_)), "{error}");
    // The process that owned it has met nothing.
    assert!(gpus[0].alloc(1).is_ok());
}

/// A rank whose messages are changed on the way.
struct Liar<'a> {
    seat: Seat<'a>,
    /// In which round, and how.
    lie: (usize, fn(&mut Vec<u8>)),
    rounds: Mutex<usize>,
}

impl Bootstrap for Liar<'_> {
    fn rank(&self) -> u32 {
        self.seat.rank()
    }

    fn ranks(&self) -> u32 {
        self.seat.ranks()
    }

    fn exchange(&self, bytes: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, PeerError> {
        let mut bytes = bytes.to_vec();
        let mut round = self.rounds.lock().expect("no panic");
        if *round == self.lie.0 && self.seat.rank == 1 {
            self.lie.1(&mut bytes);
        }
        *round += 1;
        self.seat.exchange(&bytes, deadline)
    }

    fn all_reduce(&self, desc: &OpDesc, bytes: &mut [u8], deadline: Instant) -> Result<Reduced, PeerError> {
        self.seat.all_reduce(desc, bytes, deadline)
    }

    fn cost_s(&self, desc: &OpDesc) -> Option<f64> {
        self.seat.cost_s(desc)
    }
}

/// Join with a lie of rank 1, and return what became of rank 0.
fn lied(round: usize, lie: fn(&mut Vec<u8>)) -> Result<Option<WhyStaged>, PeerError> {
    let (board, gpus) = (Board::new(2), processes(2, &[0, 0]));
    let mut ends = on_ranks(&board, &gpus, |gpu, seat| {
        let liar = Liar { seat, lie: (round, lie), rounds: Mutex::new(0) };
        let soon = Instant::now() + Duration::from_millis(500);
        PeerGroup::join(gpu, liar, small(), soon).map(|peers| peers.why_staged().cloned())
    });
    ends.swap_remove(0)
}

#[test]
fn nothing_that_a_peer_says_is_believed_unchecked() {
    let message = |end: Result<Option<WhyStaged>, PeerError>, words: &str| match end {
        Err(PeerError::Message { rank: 1, why }) => assert!(why.contains(words), "{why}"),
        other => panic!("{other:?}"),
    };
    assert_eq!(lied(99, |_| {}), Ok(None), "without a lie they reach each other");
    message(lied(0, |bytes| bytes.clear()), "can't be read");
    message(lied(0, |bytes| bytes.truncate(9)), "can't be read");
    message(lied(0, |bytes| bytes[0] = 7), "of form 7, here they are of form 1");
    message(lied(0, |bytes| bytes[3] ^= 1), "options");
    message(lied(1, |bytes| bytes[0] = 9), "memory number 9, where this rank shows number 0");
    message(lied(2, |bytes| bytes[0] = 77), "can't be read");
    // A handle that opens nothing: all stage, and say who could not open what.
    let opening = |end: Result<Option<WhyStaged>, PeerError>, words: &str| match end {
        Ok(Some(WhyStaged::Opening { rank: 0, peer: 1, why })) => assert!(why.contains(words), "{why}"),
        other => panic!("{other:?}"),
    };
    // Behind number, result, address, result and length: the handle's first byte.
    opening(lied(1, |bytes| bytes[5] ^= 0x7f), "has no memory");
    // Shorter than what others will write to: one byte, where two MiB take four of the message's.
    let short = |bytes: &mut Vec<u8>| {
        bytes.truncate(bytes.len() - 4);
        bytes.push(1);
    };
    opening(lied(1, short), "1 bytes of it, and 32 are needed");
}

#[test]
fn memory_that_can_not_be_shown_is_staged_alone() {
    let (board, gpus) = (Board::new(2), processes(3, &[0, 1]));
    on_ranks(&board, &gpus, |gpu, seat| {
        let rank = seat.rank;
        let memory = upload(&gpu, &input(Dtype::F32, ReduceOp::Sum, rank, 20));
        let mut peers = PeerGroup::join(gpu.clone(), seat, small(), far()).expect("joined");
        let sound = peers.share(&memory, far()).expect("shown");
        assert_eq!(sound.why_staged(), None);
        // From here on no handles are handed out: what was shown before stays.
        peers.bootstrap().exchange(&[], far()).expect("a barrier");
        gpu.without_handles("of another allocator");
        peers.bootstrap().exchange(&[], far()).expect("a barrier");
        let shared = peers.share(&memory, far()).expect("told");
        let why = shared.why_staged().expect("no handle").to_string();
        assert!(why.contains("rank 0 could not open the memory of rank 1: ") && why.contains("of another"), "{why}");
        let types = (Dtype::F32, ReduceOp::Sum, Algo::Auto);
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 20);
        let error = peers.start(&shared, (&desc, Algo::Auto), &[], far()).map(|_| ()).expect_err("only staged");
        assert!(matches!(error, PeerError::Staged(WhyStaged::Opening { .. })), "{error}");
        let outcome = peers.all_reduce(&shared, types, &[], far()).expect("staged");
        assert_eq!(outcome.chunks, [Path::Tree; 2]);
        assert_eq!(gpu.download_now(&memory), sum_of(Dtype::F32, ReduceOp::Sum, 2, 20));
        peers.all_reduce(&sound, (Dtype::F32, ReduceOp::Sum, Algo::Ring), &[], far()).expect("directly");
    });
}

#[test]
fn who_leaves_in_good_order_leaves_nothing_open() {
    let (board, gpus) = (Board::new(3), processes(4, &[0, 1, 0]));
    on_ranks(&board, &gpus, |gpu, seat| {
        let memory = upload(&gpu, &input(Dtype::Bf16, ReduceOp::Sum, seat.rank, 40));
        let mut peers = PeerGroup::join(gpu, seat, small(), far()).expect("joined");
        let shared = peers.share(&memory, far()).expect("shown");
        // Partial values of its own for each of these.
        for algo in [Algo::Binomial, Algo::Ring, Algo::HalvingDoubling] {
            peers.all_reduce(&shared, (Dtype::Bf16, ReduceOp::Sum, algo), &[], far()).expect("reduced");
        }
        peers.unshare(shared, far()).expect("closed");
        peers.leave(far()).expect("left");
    });
    assert_eq!(gpus[0].allocated_bytes(), 0);
    // Who goes without a word keeps what others may still have open.
    on_ranks(&board, &gpus, |gpu, seat| {
        drop(PeerGroup::join(gpu, seat, small(), far()).expect("joined"));
    });
    assert!(gpus[0].allocated_bytes() > 0);
}
