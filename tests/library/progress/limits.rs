//! What ends operations early: deadlines, limits of waits, cancelling, a panic.

use super::*;
use std::sync::Mutex;
use std::sync::mpsc::Sender;

/// Where a rank waits until another one has come so far, or has panicked.
struct Gate {
    opener: Mutex<Option<Sender<()>>>,
    opened: Mutex<Receiver<()>>,
}

impl Gate {
    fn new() -> Self {
        let (opener, opened) = channel();
        Self { opener: Mutex::new(Some(opener)), opened: Mutex::new(opened) }
    }

    /// Return what opens the gate when it is dropped.
    fn opener(&self) -> Sender<()> {
        self.opener.lock().expect("no panic").take().expect("one rank opens it")
    }

    fn wait(&self) {
        // Nothing is sent: an error says that the opener is gone.
        _ = self.opened.lock().expect("no panic").recv();
    }
}

#[test]
fn operation_that_no_other_rank_enters_ends_by_its_deadline() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    let waited = Gate::new();
    let errors = run_with(&cluster, on_thread, |comm| {
        if comm.rank() == 1 {
            waited.wait();
            return comm.barrier().expect_err("the other rank has given up");
        }
        let _opener = waited.opener();
        let mut memory = Memory::new(vec![1; 8], 8);
        let mut request = memory.start(&comm, &sum_of(8), &CallOptions::default()).expect("it starts");
        let error = request.wait_for(Duration::from_millis(200)).expect_err("nobody comes");
        assert!(memory.is_free(), "nothing writes to it any more");
        error
    });
    assert!(matches!(errors[0], Error::Deadline { .. }), "{errors:?}");
}

#[test]
fn cancelling_ends_everything_that_waits() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    let cancelled = Gate::new();
    run_with(&cluster, on_thread, |comm| {
        if comm.rank() == 1 {
            cancelled.wait();
            return;
        }
        let _opener = cancelled.opener();
        for algo in [Algo::Ring, Algo::Tree] {
            let mut memory = Memory::new(vec![1; 8], 8);
            let started = memory.start(&comm, &sum_of(8), &by(algo));
            let receive = comm.start_receive::<u64>(1, 1, 9);
            if algo == Algo::Ring {
                let mut request = started.expect("it starts");
                thread::scope(|scope| {
                    let waiting = scope.spawn(|| request.wait());
                    comm.canceller().cancel();
                    let error = waiting.join().expect("no panic").expect_err("it was cancelled");
                    // The thread may have ended the communicator before it began this operation.
                    assert!(matches!(error, Error::Cancelled | Error::Ended(_)), "{error:?}");
                });
                receive.expect("it is posted").wait().expect_err("it was cancelled");
                assert!(memory.is_free());
            } else {
                let error = started.and_then(|mut request| request.wait()).expect_err("it has ended");
                assert!(matches!(error, Error::Ended(_)), "{error:?}");
            }
        }
    });
}

/// A rank dies while nothing is in flight: the next call says so itself, and the one after it that all has ended.
#[test]
fn end_between_calls_is_the_error_of_the_next_call() {
    let cluster = LocalCluster::start(3).expect("a cluster");
    run_with(&cluster, on_thread, |comm| {
        comm.barrier().expect("all are there");
        if comm.rank() == 2 {
            return;
        }
        let call = || comm.all_reduce(&mut [1_u32; 4], ReduceOp::Sum).expect_err("a rank is dead");
        assert!(matches!(call(), Error::RanksFailed { ranks, .. } if ranks[..] == [Rank(2)]));
        assert!(matches!(call(), Error::Ended(_)));
        assert_eq!(comm.shrink().expect("two survivors").size(), 2);
    });
}

/// Wait with a limit for an operation that no other rank enters; the communicator's own limit is a minute.
fn expect_deadline(request: &mut Request) {
    let began = Instant::now();
    let error = request.wait_for(Duration::from_millis(200)).expect_err("nobody comes");
    assert!(matches!(error, Error::Deadline { .. }), "{error:?}");
    assert!(began.elapsed() < LIMIT / 2, "it waited for {:?}", began.elapsed());
}

#[test]
fn limit_of_a_wait_ends_a_host_collective_that_runs() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    let waited = Gate::new();
    run_with(&cluster, on_thread, |comm| {
        if comm.rank() == 1 {
            waited.wait();
            return;
        }
        let _opener = waited.opener();
        let mut memories = [Memory::new(vec![1; 8], 8), Memory::new(vec![1; 8], 8)];
        let started = memories.each_mut().map(|memory| memory.start(&comm, &sum_of(8), &by(Algo::Ring)));
        let [mut first, mut second] = started.map(|started| started.expect("it starts"));
        // The second one has not begun, because the first one runs.
        expect_deadline(&mut second);
        assert!(matches!(first.wait(), Err(Error::Deadline { .. })));
        assert!(memories.iter().all(Memory::is_free));
    });
}

#[test]
fn limit_of_an_operation_is_its_own_beside_a_message_that_waits() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    let waited = Gate::new();
    run_with(&cluster, on_thread, |comm| {
        if comm.rank() == 1 {
            waited.wait();
            return;
        }
        let _opener = waited.opener();
        let receive = comm.start_receive::<u64>(1, 1, 9).expect("it is posted");
        let mut memory = Memory::new(vec![1; 8], 8);
        let mut request = memory.start(&comm, &sum_of(8), &by(Algo::Tree)).expect("it starts");
        expect_deadline(&mut request);
        receive.wait().expect_err("the communicator has ended");
    });
}

/// A limit that the clock cannot count is none.
#[test]
fn endless_limits_are_limits() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    for progress in [Progress::Caller, Progress::Thread] {
        let endless = |config: &mut JoinConfig| (config.progress, config.deadline) = (Some(progress), Duration::MAX);
        run_with(&cluster, endless, |comm| {
            let options = CallOptions { deadline: Some(Duration::MAX), ..by(Algo::Ring) };
            comm.all_reduce_with(&mut [1_u32; 4], ReduceOp::Sum, &options).expect("a sum");
            let mut memory = Memory::new(vec![1; 8], 8);
            let mut request = memory.start(&comm, &sum_of(8), &by(Algo::Tree)).expect("it starts");
            request.wait_for(Duration::MAX).expect("a sum");
            comm.send_receive((&[1_u32], 1 - comm.rank()), (&mut [0], 1 - comm.rank()), 1).expect("a swap");
            comm.leave_within(Duration::MAX);
        });
    }
}

/// What a callback does wrong fails the operations, and nobody waits for ever.
#[test]
fn panic_of_a_callback_ends_the_communicator() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    let is_set = Gate::new();
    run_with(&cluster, on_thread, |comm| {
        let opener = (comm.rank() == 0).then(|| is_set.opener());
        comm.barrier().expect("both are there");
        let mut memories = [Memory::new(vec![1; 8], 8), Memory::new(vec![1; 8], 8)];
        if comm.rank() == 1 {
            // Nothing can end before the callback is set.
            is_set.wait();
        }
        let started = memories.each_mut().map(|memory| memory.start(&comm, &sum_of(8), &by(Algo::Ring)));
        let [mut first, mut second] = started.map(|started| started.expect("it starts"));
        if comm.rank() == 0 {
            first.on_completion(|| panic!("planted"));
            drop(opener);
        }
        // Which operations were complete before is unknown.
        let _ = (first.wait(), second.wait());
        assert!(memories.iter().all(Memory::is_free));
        comm.barrier().expect_err("rank 0 is gone");
        let error = comm.barrier().expect_err("rank 0 is gone");
        assert!(matches!(error, Error::Ended(_)), "{error:?}");
    });
}
