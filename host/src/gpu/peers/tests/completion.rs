//! Completion of operations between processes when a rank is missing, calls something else, gives up or dies.

use super::*;
use crate::gpu::peers::Shared;
use crate::gpu::{Gpu, GpuError};
use crate::select::Algo;

const SUM: OpDesc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 50);

/// Join and share at each rank, then run `body`.
fn each<R: Send>(
    gpus: &[FakeGpu],
    options: &PeerOptions,
    body: impl Fn(u32, &mut Peers<'_>, &Shared<FakeGpu>) -> R + Sync,
) -> Vec<R> {
    let board = Board::new(gpus.len() as u32);
    on_ranks(&board, gpus, |gpu, board_rank| {
        let rank = board_rank.rank;
        let memory = upload(&gpu, &input(Dtype::F32, ReduceOp::Sum, rank, 50));
        let mut peers = PeerGroup::join(gpu, board_rank, options.clone(), long_deadline()).expect("joined");
        let shared = peers.share(&memory, long_deadline()).expect("shown");
        body(rank, &mut peers, &shared)
    })
}

fn barrier(peers: &Peers<'_>) {
    peers.bootstrap().exchange(&[], long_deadline()).expect("a barrier");
}

#[test]
fn operations_are_ordered_without_the_host() {
    let gpus = processes(1, &[0, 1, 0]);
    each(&gpus, &small(), |rank, peers, shared| {
        let gpu = peers.gpu().clone();
        // All but the first wait for a producer; a consumer waits for the last.
        let (producer, produced) = (gpu.stream().expect("a stream"), gpu.event().expect("an event"));
        let gate = gpu.gate(&producer);
        gpu.record(&produced, &producer).expect("recorded");
        let first = peers.start(shared, (&SUM, Algo::Ring), &[&produced], long_deadline()).expect("started");
        let second = peers.start(shared, (&SUM, Algo::HalvingDoubling), &[], long_deadline()).expect("started");
        assert!(!peers.is_done(&second).expect("sound"));
        if rank == 1 {
            for _ in 0..100 {
                assert!(!peers.is_done(&first).expect("sound"), "its own producer has not produced");
            }
        }
        gate.open();
        peers.wait(second, long_deadline()).expect("done");
        peers.wait(first, long_deadline()).expect("done before");
        let once = sum_of(Dtype::F32, ReduceOp::Sum, 3, 50);
        let three = once.as_chunks().0.iter().flat_map(|sum| (f32::from_le_bytes(*sum) * 3.0).to_le_bytes());
        assert_eq!(gpu.download_now(&shared.own), three.collect::<Vec<u8>>());
        barrier(peers);
    });
}

#[test]
fn missing_rank_is_named_at_the_deadline() {
    let gpus = processes(2, &[0, 1, 2]);
    let outcomes = each(&gpus, &small(), |rank, peers, shared| {
        if rank == 2 {
            // Until the others have given up.
            barrier(peers);
            return (None, None);
        }
        let work = peers.start(shared, (&SUM, Algo::Ring), &[], long_deadline()).expect("started");
        let error = peers.wait(work, Instant::now() + Duration::from_millis(200)).expect_err("rank 2 is missing");
        barrier(peers);
        let next = peers.start(shared, (&SUM, Algo::Ring), &[], long_deadline()).map(|_| ()).expect_err("ended");
        (Some(error), Some(next))
    });
    for (error, next) in &outcomes[..2] {
        let error = error.as_ref().expect("an error");
        // One of them gives up first; the other sees that, or its own deadline.
        match error {
            PeerError::Deadline { missing, .. } => assert_eq!(missing, &[2], "{error}"),
            PeerError::GivenUp { rank, .. } => assert!(*rank < 2, "{error}"),
            other => panic!("{other}"),
        }
        assert_eq!(next.as_ref(), Some(&PeerError::Ended));
    }
    let text = |end: &(Option<PeerError>, Option<PeerError>)| end.0.as_ref().map(ToString::to_string);
    let texts: Vec<_> = outcomes.iter().filter_map(text).collect();
    assert!(texts.iter().any(|text| text.contains("rank 2 had not entered it")), "{texts:?}");
}

/// One rank gives up before its producer has produced. The device may still run all of its work before the rank looks,
/// or before it has said so; then the rank, or the other one, has the sum.
#[test]
fn giving_up_is_reported_to_waiting_ranks() {
    let given_up = || {
        let gpus = processes(3, &[0, 1]);
        let outcomes = each(&gpus, &small(), |rank, peers, shared| {
            let gpu = peers.gpu().clone();
            let (producer, produced) = (gpu.stream().expect("a stream"), gpu.event().expect("an event"));
            let gate = gpu.gate(&producer);
            gpu.record(&produced, &producer).expect("recorded");
            let after: &[_] = if rank == 0 { &[&produced] } else { &[] };
            let work = peers.start(shared, (&SUM, Algo::Ring), after, long_deadline()).expect("started");
            if rank == 0 {
                peers.canceller().cancel();
                gate.open();
            }
            let end = peers.wait(work, long_deadline());
            let found = gpu.download_now(&shared.own);
            barrier(peers);
            (end, found)
        });
        let named = [PeerError::Gpu(GpuError::Cancelled), PeerError::GivenUp { rank: 0, desc: SUM }];
        for ((end, found), named) in outcomes.iter().zip(named) {
            match end {
                Err(error) => assert_eq!(error, &named),
                Ok(()) => assert_eq!(found, &sum_of(Dtype::F32, ReduceOp::Sum, 2, 50), "done without the sum"),
            }
        }
        outcomes.iter().all(|(end, _)| end.is_err())
    };
    assert!((0..100).any(|_| given_up()), "no rank was told");
}

#[test]
fn mismatched_calls_are_reported() {
    let gpus = processes(4, &[0, 1]);
    let outcomes = each(&gpus, &small(), |rank, peers, shared| {
        let op = if rank == 0 { ReduceOp::Sum } else { ReduceOp::Max };
        let desc = OpDesc::all_reduce(Dtype::F32, op, 50);
        let work = peers.start(shared, (&desc, Algo::Ring), &[], long_deadline()).expect("started");
        let end = peers.wait(work, long_deadline());
        barrier(peers);
        end
    });
    for (rank, end) in outcomes.iter().enumerate() {
        let other = 1 - rank as u32;
        assert!(matches!(end, Err(PeerError::Mismatch { rank, .. }) if *rank == other), "{end:?}");
    }
}

#[test]
fn dead_process_ends_the_others_with_an_error() {
    // Killed before it enters: its memory is gone, and the first word written to its page fails.
    let gpus = processes(5, &[0, 1, 2]);
    let outcomes = each(&gpus, &small(), |rank, peers, shared| {
        barrier(peers);
        if rank == 2 {
            peers.gpu().kill();
            barrier(peers);
            barrier(peers);
            return None;
        }
        barrier(peers);
        let soon = Instant::now() + Duration::from_millis(300);
        let end = peers
            .start(shared, (&SUM, Algo::Ring), &[], soon)
            .and_then(|work| peers.wait(work, soon))
            .expect_err("rank 2 is dead");
        barrier(peers);
        Some(end)
    });
    for end in outcomes.iter().flatten() {
        let is_named = matches!(end, PeerError::Gpu(GpuError::IllegalAddress(_) | GpuError::Stuck))
            || matches!(end, PeerError::GivenUp { .. } | PeerError::Deadline { .. });
        assert!(is_named, "{end}");
    }
    assert!(outcomes[..2].iter().flatten().any(|end| matches!(end, PeerError::Gpu(GpuError::IllegalAddress(_)))));
}

/// The end of an operation is two writes to each page, which may arrive in either order.
#[test]
fn outcome_that_arrives_behind_its_counter_is_waited_for() {
    for seed in 0..50 {
        let gpus = processes(seed, &[0, 1]);
        gpus[0].delay_copies();
        let outcomes = each(&gpus, &small(), |rank, peers, shared| {
            let gpu = peers.gpu().clone();
            let work = peers.start(shared, (&SUM, Algo::Ring), &[], long_deadline()).expect("started");
            peers.wait(work, long_deadline()).expect("the outcomes of both ranks");
            // The next one has the same signature, and rank 0 gives it up.
            let (producer, produced) = (gpu.stream().expect("a stream"), gpu.event().expect("an event"));
            let gate = gpu.gate(&producer);
            gpu.record(&produced, &producer).expect("recorded");
            let after: &[_] = if rank == 0 { &[&produced] } else { &[] };
            let work = peers.start(shared, (&SUM, Algo::Ring), after, long_deadline()).expect("started");
            if rank == 0 {
                peers.canceller().cancel();
                gate.open();
            }
            let end = peers.wait(work, long_deadline());
            let found = gpu.download_now(&shared.own);
            barrier(peers);
            (end, found)
        });
        let twice = sum_of(Dtype::F32, ReduceOp::Sum, 2, 50);
        let twice = twice.as_chunks().0.iter().flat_map(|sum| (f32::from_le_bytes(*sum) * 2.0).to_le_bytes());
        let twice: Vec<u8> = twice.collect();
        for (end, found) in outcomes {
            assert!(end.is_err() || found == twice, "seed {seed}: done without the sum");
        }
    }
}

/// The driver's copies would go on reading it when passes have stopped.
#[test]
fn memory_of_a_killed_process_is_not_read_after_a_stop() {
    let gpus = processes(11, &[0, 1, 2]);
    each(&gpus, &small(), |rank, peers, shared| {
        barrier(peers);
        if rank == 2 {
            peers.gpu().kill_mapped();
            barrier(peers);
            barrier(peers);
            return;
        }
        barrier(peers);
        let work = peers.start(shared, (&SUM, Algo::Ring), &[], long_deadline()).expect("started");
        peers.wait(work, Instant::now() + Duration::from_millis(100)).expect_err("rank 2 is dead");
        barrier(peers);
    });
    assert_eq!(gpus[0].reads_of_killed(), 0, "copies from the killed rank's memory");
}

#[test]
fn hanging_nccl_is_aborted() {
    let options = PeerOptions { nccl: true, ..small() };
    let gpus = processes(6, &[0, 1]);
    let outcomes = each(&gpus, &options, |rank, peers, shared| {
        if rank == 1 {
            barrier(peers);
            return None;
        }
        let work = peers.start(shared, (&SUM, Algo::Nccl), &[], long_deadline()).expect("started");
        assert_eq!(work.path(), Path::Nccl);
        let end = peers.wait(work, Instant::now() + Duration::from_millis(100)).expect_err("rank 1 is missing");
        barrier(peers);
        Some(end)
    });
    assert_eq!(outcomes[0], Some(PeerError::Deadline { desc: SUM, missing: Vec::new() }));
}

/// NCCL's abort waits for the group's own stream, which waits for the missing rank: that wait must end first.
#[test]
fn abort_comes_after_the_own_waits_are_released() {
    let options = PeerOptions { nccl: true, ..small() };
    let gpus = processes(8, &[0, 1]);
    let outcomes = each(&gpus, &options, |rank, peers, shared| {
        if rank == 1 {
            barrier(peers);
            return None;
        }
        let work = peers.start(shared, (&SUM, Algo::Ring), &[], long_deadline()).expect("started");
        peers.start(shared, (&SUM, Algo::Nccl), &[], long_deadline()).expect("started");
        let end = peers.wait(work, Instant::now() + Duration::from_millis(50)).expect_err("rank 1 is missing");
        barrier(peers);
        Some(end)
    });
    assert_eq!(outcomes[0], Some(PeerError::Deadline { desc: SUM, missing: vec![1] }));
}

/// Memory that has nothing to do with the operation, too: a free waits for all streams.
#[test]
fn frees_do_not_wait_for_a_missing_rank() {
    let gpus = processes(9, &[0, 1]);
    each(&gpus, &small(), |rank, peers, shared| {
        if rank == 1 {
            barrier(peers);
            return;
        }
        let gpu = peers.gpu().clone();
        let (other, pinned) = (upload(&gpu, &[7; 1000]), gpu.pinned(100).expect("room"));
        let work = peers.start(shared, (&SUM, Algo::Ring), &[], long_deadline()).expect("started");
        while !gpu.is_waiting() {
            assert!(!peers.is_done(&work).expect("sound"));
        }
        let before = gpu.allocated_bytes();
        drop((other, pinned));
        assert_eq!(gpu.allocated_bytes(), before, "kept while the operation waits");
        peers.wait(work, Instant::now()).expect_err("rank 1 is missing");
        assert_eq!(gpu.allocated_bytes(), before - 1100, "freed when none waits any more");
        barrier(peers);
    });
}

#[test]
fn operation_that_holds_up_its_release_is_stuck() {
    let gpus = processes(10, &[0, 1]);
    gpus[0].with_one_queue();
    let outcomes = each(&gpus, &small(), |rank, peers, shared| {
        if rank == 1 {
            barrier(peers);
            return None;
        }
        let gpu = peers.gpu().clone();
        let work = peers.start(shared, (&SUM, Algo::Ring), &[], long_deadline()).expect("started");
        while !gpu.is_waiting() {
            assert!(!peers.is_done(&work).expect("sound"));
        }
        let end = peers.wait(work, Instant::now()).expect_err("rank 1 is missing");
        barrier(peers);
        Some(end)
    });
    assert_eq!(outcomes[0], Some(PeerError::Gpu(GpuError::Stuck)));
}

#[test]
fn trace_holds_only_own_passes() {
    let gpus = processes(7, &[0, 1]);
    each(&gpus, &small(), |rank, peers, shared| {
        peers.start_trace().expect("a trace");
        let work = peers.start(shared, (&SUM, Algo::Ring), &[], long_deadline()).expect("started");
        peers.wait(work, long_deadline()).expect("done");
        let timeline = peers.take_trace().expect("all is done");
        assert!(!timeline.spans.is_empty());
        assert!(timeline.spans.iter().all(|span| span.lane == format!("rank {rank}") && span.len_us > 0.0));
        barrier(peers);
    });
}
