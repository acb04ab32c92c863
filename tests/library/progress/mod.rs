//! Progress: operations that go on while nobody calls, on memory that stays the caller's.

mod limits;

use std::any::Any;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Barrier, Weak};
use std::thread;
use std::time::{Duration, Instant};
use sumac::testing::{LocalCluster, LocalClusterConfig};
use sumac::{
    Algo, CallOptions, Collective, Communicator, Counts, Dtype, Error, JoinConfig, OpDesc, Path, Progress, RawBuffers,
    ReduceOp, Request,
};
use sumac_hal::ids::Rank;

/// Tests that would wait for ever fail after this.
const LIMIT: Duration = Duration::from_secs(60);

fn by(algo: Algo) -> CallOptions {
    CallOptions { algo: Some(algo), ..CallOptions::default() }
}

/// Run `rank` on a thread for each rank, with this progress.
fn run_with<R: Send>(
    cluster: &LocalCluster,
    configure: impl Fn(&mut JoinConfig) + Sync,
    rank: impl Fn(Communicator) -> R + Sync,
) -> Vec<R> {
    let (configure, rank) = (&configure, &rank);
    let join = |mut config: JoinConfig| {
        configure(&mut config);
        rank(Communicator::join(config).expect("it joins"))
    };
    thread::scope(|scope| {
        let ranks: Vec<_> =
            cluster.join_configs().into_iter().map(|config| scope.spawn(move || join(config))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    })
}

fn on_thread(config: &mut JoinConfig) {
    config.progress = Some(Progress::Thread);
}

/// Memory of an operation, whose end can be observed.
struct Memory {
    input: Vec<u32>,
    output: Vec<u32>,
    keep: Arc<()>,
}

impl Memory {
    fn new(input: Vec<u32>, output_len: usize) -> Self {
        Self { input, output: vec![u32::MAX; output_len], keep: Arc::new(()) }
    }

    fn buffers(&mut self) -> RawBuffers {
        RawBuffers::Separate {
            input: self.input.as_ptr().cast(),
            input_len: 4 * self.input.len(),
            output: self.output.as_mut_ptr().cast(),
            output_len: 4 * self.output.len(),
        }
    }

    fn keep(&self) -> Box<dyn Any + Send> {
        Box::new(Arc::clone(&self.keep))
    }

    /// Start an operation on this memory.
    fn start(&mut self, comm: &Communicator, desc: &OpDesc, options: &CallOptions) -> Result<Request, Error> {
        let (buffers, keep) = (self.buffers(), self.keep());
        // SAFETY: each test waits for the request, or for the end of `keep`, before it touches the memory.
        unsafe { comm.start_raw(desc, buffers, keep, options) }
    }

    /// Return whether nothing has the memory.
    fn is_free(&self) -> bool {
        Arc::strong_count(&self.keep) == 1
    }
}

fn sum_of(count: usize) -> OpDesc {
    OpDesc::all_reduce(Dtype::U32, ReduceOp::Sum, count as u64)
}

/// Return a request's end as a message.
fn end_of(request: &mut Request) -> Receiver<()> {
    let (ended, end) = channel();
    request.on_completion(move || ended.send(()).expect("the test waits"));
    end
}

/// What every collective leaves at `rank` of 3, whose rank r contributes 100 r + index.
fn expected(collective: Collective, rank: u32) -> (Vec<u32>, Vec<u32>) {
    let of = |rank: u32, len: u32| (0..len).map(move |i| 100 * rank + i);
    let all: Vec<u32> = (0..6).map(|i| 300 + 3 * i).collect();
    let gathered: Vec<u32> = (0..3).flat_map(|rank| of(rank, 2)).collect();
    let block = 2 * rank as usize;
    let at_root = |values: Vec<u32>| if rank == 1 { values } else { Vec::new() };
    match collective {
        Collective::AllReduce => (of(rank, 6).collect(), all),
        Collective::Reduce => (of(rank, 6).collect(), at_root(all)),
        Collective::Broadcast => (at_root(of(1, 6).collect()), of(1, 6).collect()),
        Collective::ReduceScatter => (of(rank, 6).collect(), all[block..block + 2].to_vec()),
        Collective::AllGather => (of(rank, 2).collect(), gathered),
        Collective::Gather => (of(rank, 2).collect(), at_root(gathered)),
        Collective::Scatter => (at_root(of(1, 6).collect()), of(1, 6).skip(block).take(2).collect()),
        Collective::AllToAll => {
            (of(rank, 6).collect(), (0..3).flat_map(|from| of(from, 6).skip(block).take(2)).collect())
        }
        _ => (Vec::new(), Vec::new()),
    }
}

#[test]
fn every_collective_is_started_on_memory_of_the_caller() {
    let collectives = [
        Collective::AllReduce,
        Collective::Reduce,
        Collective::Broadcast,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::Barrier,
    ];
    let cluster = LocalCluster::start(3).expect("a cluster");
    for progress in [Progress::Caller, Progress::Thread] {
        run_with(
            &cluster,
            |config| config.progress = Some(progress),
            |comm| {
                let mut started: Vec<(Collective, Memory, Request)> = Vec::new();
                for collective in collectives {
                    let (input, output) = expected(collective, comm.rank());
                    let mut memory = Memory::new(input, output.len());
                    let op = collective.reduces().then_some(ReduceOp::Sum);
                    let dtype = (collective != Collective::Barrier).then_some(Dtype::U32);
                    let count = if dtype.is_some() { 6 } else { 0 };
                    let root = Rank(u32::from(collective.is_rooted()));
                    let desc = OpDesc { collective, dtype, op, root, count };
                    let request = memory.start(&comm, &desc, &CallOptions::default()).expect("it starts");
                    started.push((collective, memory, request));
                }
                // In another order than that of the starts.
                for (collective, memory, mut request) in started.into_iter().rev() {
                    let outcome = request.wait().expect("a result");
                    assert!(outcome.is_some() && request.test() && memory.is_free(), "{collective:?}");
                    assert_eq!(memory.output, expected(collective, comm.rank()).1, "{collective:?} {progress:?}");
                    assert!(matches!(request.wait(), Err(Error::Argument(_))), "it was waited for");
                }
                comm.leave();
            },
        );
    }
}

#[test]
fn uneven_blocks_and_messages_are_started_on_memory_of_the_caller() {
    let cluster = LocalCluster::start(3).expect("a cluster");
    for progress in [Progress::Caller, Progress::Thread] {
        run_with(
            &cluster,
            |config| config.progress = Some(progress),
            |comm| {
                let rank = comm.rank();
                // Rank r sends r + s elements to rank s.
                let counts: Vec<usize> = (0..3).map(|other| (rank + other) as usize).collect();
                let len = counts.iter().sum();
                let mut memory = Memory::new(vec![rank; len], len);
                let (buffers, keep) = (memory.buffers(), memory.keep());
                let both = Counts::Exchange { send: counts.clone(), recv: counts };
                let desc = OpDesc { collective: Collective::AllToAll, ..sum_of(0) };
                let desc = OpDesc { op: None, ..desc };
                // SAFETY: waited for below, before the memory is touched.
                let request = unsafe { comm.start_raw_v(&desc, both, buffers, keep, &CallOptions::default()) };
                let mut exchange = request.expect("it starts");
                let (mut to, mut from) = (vec![rank; 5], vec![0_u32; 5]);
                let (next, last) = ((rank + 1) % 3, (rank + 2) % 3);
                // SAFETY: waited for below.
                let received = unsafe { comm.start_receive_raw(last, 7, (from.as_mut_ptr().cast(), 20), Box::new(())) };
                // SAFETY: waited for below.
                let sent = unsafe { comm.start_send_raw(next, 7, (to.as_ptr().cast(), 20), Box::new(())) };
                for request in [received, sent] {
                    let mut request = request.expect("it is posted");
                    assert_eq!(request.wait(), Ok(None));
                }
                exchange.wait().expect("an exchange");
                let expected: Vec<u32> = (0..3).flat_map(|from| vec![from; (from + rank) as usize]).collect();
                assert_eq!((memory.output, &from, &to), (expected, &vec![last; 5], &vec![rank; 5]));
                to.clear();
                comm.leave();
            },
        );
    }
}

#[test]
fn started_operations_end_while_nobody_calls() {
    let cluster = LocalCluster::start(3).expect("a cluster");
    run_with(&cluster, on_thread, |comm| {
        for (algo, path) in [(Algo::Ring, Path::Ring), (Algo::Tree, Path::Tree)] {
            let mut memories: Vec<_> = (0..4).map(|nth| Memory::new(vec![nth; 100_000], 100_000)).collect();
            let started = memories.iter_mut().map(|memory| memory.start(&comm, &sum_of(100_000), &by(algo)));
            let mut requests: Vec<_> = started.map(|started| started.expect("it starts")).collect();
            let ends: Vec<_> = requests.iter_mut().map(end_of).collect();
            for end in ends {
                end.recv_timeout(LIMIT).expect("it ends by itself");
            }
            for (mut request, (nth, memory)) in requests.into_iter().zip((0..).zip(&memories)) {
                assert!(request.test());
                assert_eq!(request.wait().expect("a sum").expect("an outcome").path, path);
                assert!(memory.output.iter().all(|&sum| sum == 3 * nth), "{algo}");
            }
        }
        comm.leave();
    });
}

/// The peers of a host collective may wait for a message before they enter it.
#[test]
fn message_goes_out_beside_a_collective_that_waits_for_its_receiver() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    for algo in [Algo::Dissemination, Algo::Tree] {
        run_with(&cluster, on_thread, |comm| {
            let mut memory = Memory::new(Vec::new(), 0);
            if comm.rank() == 0 {
                let mut barrier = memory.start(&comm, &OpDesc::barrier(), &by(algo)).expect("it starts");
                // Another thread's blocking call does not hold up this one's.
                thread::scope(|scope| {
                    scope.spawn(|| comm.receive(&mut [0_u64], 1, 2).expect("a message"));
                    comm.send(&[7_u64], 1, 1).expect("a message");
                });
                barrier.wait().expect("a barrier");
            } else {
                comm.receive(&mut [0_u64], 0, 1).expect("a message");
                comm.send(&[7_u64], 0, 2).expect("a message");
                comm.barrier_with(&by(algo)).expect("a barrier");
            }
            comm.leave();
        });
    }
}

/// A short message may complete while it is posted, before anybody waits for it.
#[test]
fn message_that_completes_when_it_is_posted_is_reported_at_once() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    run_with(&cluster, on_thread, |comm| {
        let began = Instant::now();
        for _ in 0..20 {
            if comm.rank() == 0 {
                comm.start_send(vec![7_u64], 1, 1).expect("it starts").wait().expect("a message");
            } else {
                comm.start_receive::<u64>(1, 0, 1).expect("it starts").wait().expect("a message");
            }
            comm.barrier().expect("a barrier");
        }
        // Unreported, they last until their deadline of a minute.
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        comm.leave();
    });
}

#[test]
fn test_of_an_operation_that_waits_for_others_returns_at_once() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    let (entered, tested) = (Barrier::new(2), Barrier::new(2));
    run_with(&cluster, on_thread, |comm| {
        let mut memory = Memory::new(vec![1; 1000], 1000);
        if comm.rank() == 0 {
            let mut request = memory.start(&comm, &sum_of(1000), &by(Algo::Ring)).expect("it starts");
            entered.wait();
            // The other rank enters only after these.
            assert!((0..1000).all(|_| !request.test()));
            tested.wait();
            request.wait().expect("a sum");
        } else {
            entered.wait();
            tested.wait();
            memory.start(&comm, &sum_of(1000), &by(Algo::Ring)).expect("it starts").wait().expect("a sum");
        }
        assert_eq!(memory.output, vec![2; 1000]);
        comm.leave();
    });
}

#[test]
fn lost_tree_is_recovered_while_nobody_calls() {
    let cluster = LocalCluster::start_with(LocalClusterConfig::new(3)).expect("a cluster");
    let (started, killed) = (Barrier::new(3), Barrier::new(3));
    run_with(&cluster, on_thread, |comm| {
        comm.barrier().expect("a barrier");
        let mut memories: Vec<_> = (0..3).map(|_| Memory::new(vec![1; 1 << 20], 1 << 20)).collect();
        let mut requests = Vec::new();
        for (nth, memory) in memories.iter_mut().enumerate() {
            // The last rank starts the last one only when the device is dead.
            if nth == 2 {
                started.wait();
                if comm.rank() == 0 {
                    cluster.kill_device(0);
                }
                killed.wait();
            }
            requests.push(memory.start(&comm, &sum_of(1 << 20), &CallOptions::default()).expect("it starts"));
        }
        let ends: Vec<_> = requests.iter_mut().map(end_of).collect();
        ends.iter().for_each(|end| end.recv_timeout(LIMIT).expect("it ends by itself"));
        for (mut request, memory) in requests.into_iter().zip(&memories) {
            request.wait().expect("a sum");
            assert!(memory.output.iter().all(|&sum| sum == 3));
        }
        comm.leave();
    });
}

#[test]
fn dropped_request_completes_and_frees_its_memory() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    run_with(&cluster, on_thread, |comm| {
        let mut memory = Memory::new(vec![1; 1000], 1000);
        let (keep, released) = channel::<()>();
        let buffers = memory.buffers();
        // SAFETY: `keep` is dropped before the memory is touched.
        let request = unsafe { comm.start_raw(&sum_of(1000), buffers, Box::new(keep), &by(Algo::Ring)) };
        drop(request.expect("it starts"));
        assert!(released.recv_timeout(LIMIT) == Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
        assert_eq!(memory.output, vec![2; 1000]);
        comm.leave();
    });
}

/// What a buffer is kept alive by may be what keeps the communicator alive.
#[test]
fn last_share_may_be_dropped_by_the_progress_thread() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    let observed: Vec<Weak<Communicator>> = run_with(&cluster, on_thread, |comm| {
        let comm = Arc::new(comm);
        let mut memory = Memory::new(vec![1; 1000], 1000);
        let buffers = memory.buffers();
        // SAFETY: the memory is not touched before the communicator, which is kept by it, is gone.
        let request = unsafe { comm.start_raw(&sum_of(1000), buffers, Box::new(Arc::clone(&comm)), &by(Algo::Ring)) };
        drop(request.expect("it starts"));
        let observed = Arc::downgrade(&comm);
        drop(comm);
        let until = Instant::now() + LIMIT;
        while observed.strong_count() > 0 && Instant::now() < until {
            thread::yield_now();
        }
        observed
    });
    assert!(observed.iter().all(|comm| comm.strong_count() == 0));
}

#[test]
fn impossible_memory_and_wrong_lengths_are_refused_at_the_start() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    run_with(&cluster, on_thread, |comm| {
        let mut memory = Memory::new(vec![1; 8], 8);
        for (desc, options) in [
            (sum_of(9), CallOptions::default()),
            (OpDesc { op: None, ..sum_of(8) }, CallOptions::default()),
            (OpDesc::broadcast(Dtype::U32, Rank(2), 8), CallOptions::default()),
            (sum_of(8), CallOptions { scalar: Some(2.0), ..CallOptions::default() }),
        ] {
            let refused = memory.start(&comm, &desc, &options).map(drop);
            assert!(matches!(refused, Err(Error::Argument(_))), "{desc}: {refused:?}");
            assert!(memory.is_free());
        }
        let overlapping = RawBuffers::Separate {
            input: memory.output.as_ptr().cast(),
            input_len: 32,
            output: memory.output.as_mut_ptr().cast(),
            output_len: 32,
        };
        // SAFETY: it is refused.
        let refused = unsafe { comm.start_raw(&sum_of(8), overlapping, memory.keep(), &CallOptions::default()) };
        assert!(matches!(refused.map(drop), Err(Error::Argument(_))));
        comm.barrier().expect("nothing was sent");
        comm.leave();
    });
}

/// A small message is complete when it is posted, before anybody looks.
#[test]
fn messages_that_are_complete_at_once_are_reported() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    run_with(&cluster, on_thread, |comm| {
        let other = 1 - comm.rank();
        for round in 0..100_u32 {
            let mut received = [0];
            comm.send_receive((&[10 * round + comm.rank()], other), (&mut received, other), round).expect("a swap");
            assert_eq!(received, [10 * round + other]);
        }
        assert_eq!(comm.outstanding().messages, 0);
        comm.leave();
    });
}

#[test]
fn outstanding_counts_what_was_not_waited_for() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    run_with(&cluster, on_thread, |comm| {
        let mut memories = [Memory::new(vec![1; 100], 100), Memory::new(vec![1; 100], 100)];
        let started = memories.each_mut().map(|memory| memory.start(&comm, &sum_of(100), &by(Algo::Ring)));
        let [mut first, mut second] = started.map(|started| started.expect("it starts"));
        end_of(&mut second).recv_timeout(LIMIT).expect("it ends by itself");
        let held = comm.outstanding();
        assert_eq!((held.operations, held.bytes), (2, 1600), "both have ended, and nobody has waited");
        first.wait().expect("a sum");
        drop(second);
        assert_eq!((comm.outstanding().operations, comm.outstanding().bytes), (0, 0));
        comm.leave();
    });
}
