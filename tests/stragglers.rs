//! Straggler policies: ranks that are late, stopped or missing, over real sockets and shared memory.

mod common;

use common::{Cluster, over_udp, plain};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use sumac::{
    Algo, Buffer, CallOptions, Communicator, Error, JoinConfig, OpDesc, Order, Outcome, Rank, ReduceOp, Straggler,
    Transport,
};
use sumac_hal::op::Dtype;

const RANKS: u32 = 4;
const COUNT: usize = 30_000;
/// Long compared with the scheduling delays of a loaded machine.
const LIMIT: Duration = Duration::from_secs(1);

fn partial(_: u32) -> CallOptions {
    CallOptions { straggler: Some(Straggler::Partial(LIMIT)), ..CallOptions::default() }
}

fn input(rank: u32, i: usize) -> f32 {
    (1.0 + i as f32 * 0.37) * 3_f32.powi(rank as i32 * 5 - 7)
}

/// Allocate registered memory with the rank's input.
fn filled(comm: &Communicator) -> Result<Buffer<f32>, Error> {
    let mut buffer = comm.alloc::<f32>(COUNT)?;
    buffer.iter_mut().enumerate().for_each(|(i, x)| *x = input(comm.rank(), i));
    Ok(buffer)
}

/// All-reduce once, and return the result's bits with the outcome.
fn sum(comm: &Communicator, options: &CallOptions) -> Result<(Vec<u32>, Outcome), Error> {
    let mut buffer = filled(comm)?;
    let outcome = comm.all_reduce_with(&mut buffer[..], ReduceOp::Sum, options)?;
    Ok((buffer.iter().map(|x| x.to_bits()).collect(), outcome))
}

/// The bits of the sum over `members`, two per leaf, folded node by node.
fn folded(members: &[u32]) -> Vec<u32> {
    let plus = |a: Option<f32>, b: f32| Some(a.map_or(b, |a| a + b));
    let fold = |ranks: &[u32], i| {
        ranks.iter().filter(|rank| members.contains(rank)).fold(None, |sum, &rank| plus(sum, input(rank, i)))
    };
    let both = |i| [fold(&[0, 1], i), fold(&[2, 3], i)].into_iter().flatten().fold(None, plus);
    (0..COUNT).map(|i| both(i).expect("at least one member").to_bits()).collect()
}

/// The transports of a job's ranks: UDP, shared memory, or alternating.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Transports {
    Packets,
    ZeroCopy,
    Mixed,
}

impl Transports {
    const ALL: [Self; 3] = [Self::Packets, Self::ZeroCopy, Self::Mixed];

    fn transport(self, rank: u32) -> Transport {
        match self {
            Self::Packets => Transport::Udp,
            Self::ZeroCopy => Transport::Shm,
            Self::Mixed if rank.is_multiple_of(2) => Transport::Shm,
            Self::Mixed => Transport::Udp,
        }
    }
}

/// Two leaves with two hosts each, and a spine; all devices offer zero-copy.
fn two_leaves() -> Cluster {
    Cluster::start_zero_copy(2, 2, Default::default(), Default::default())
}

fn folding(config: &mut JoinConfig, transports: Transports) {
    config.transport = transports.transport(config.rank);
    config.order = Order::TreeFold;
    config.deadline = Duration::from_secs(20);
}

fn members(outcome: &Outcome) -> Vec<u32> {
    (0..RANKS).filter(|&rank| !outcome.missing.contains(Rank(rank))).collect()
}

#[test]
fn slowest_rank_is_named_on_every_transport() {
    let cluster = Cluster::start_zero_copy(2, 2, Default::default(), Default::default());
    for (job, attach) in [("packets", over_udp as fn(&mut JoinConfig)), ("zero-copy", plain)] {
        let late = Duration::from_millis(200);
        cluster.run(job, RANKS, attach, |comm| {
            let options = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
            for slow in 0..RANKS {
                comm.barrier_with(&options).expect("barrier");
                if comm.rank() == slow {
                    let until = Instant::now() + late;
                    while let Some(left) = until.checked_duration_since(Instant::now()) {
                        thread::park_timeout(left);
                    }
                }
                let (_, outcome) = sum(&comm, &options).expect("all-reduce");
                let slowest = outcome.slowest.expect("the tree knows");
                assert_eq!(slowest.rank, Rank(slow), "{job}");
                assert!(u128::from(slowest.late_us) > late.as_micros() / 2, "{job}: {slowest}");
                assert!(outcome.missing.is_empty());
            }
            comm.leave();
        });
    }
}

/// One rank calls after the others have completed without it: they get the exact sum of their own inputs, it gets
/// [`Error::Excluded`].
#[test]
fn partial_result_over_two_levels_excludes_the_late_rank() {
    for (straggler, transports) in
        (0..RANKS).zip(Transports::ALL.into_iter().cycle()).chain([(1, Transports::ZeroCopy)])
    {
        let cluster = two_leaves();
        let [gone_on, excluded, ended] = [(); 3].map(|()| Barrier::new(RANKS as usize));
        let results = cluster.run(
            "partial",
            RANKS,
            |config| folding(config, transports),
            |comm| {
                comm.barrier().expect("all are there");
                let whole = sum(&comm, &partial(comm.rank()));
                if comm.rank() == straggler {
                    gone_on.wait();
                    let mut buffer = filled(&comm).expect("memory");
                    let result = comm.all_reduce_with(&mut buffer[..], ReduceOp::Sum, &partial(straggler));
                    assert!(matches!(comm.barrier(), Err(Error::Ended(_))));
                    excluded.wait();
                    ended.wait();
                    let is_old = buffer.iter().enumerate().all(|(i, x)| *x == input(straggler, i));
                    assert!(is_old, "{transports:?}: the buffer of an excluded rank is never written");
                    return Err(result.expect_err("too late"));
                }
                let begun = Instant::now();
                let first = sum(&comm, &partial(comm.rank()));
                let took = begun.elapsed();
                // Later operations, with and without a limit, include the same ranks and do not wait for the excluded
                // one.
                let second = sum(&comm, &CallOptions::default());
                // Any of them may take long on a busy machine, but each would wait that long.
                let timed = [(); 3].map(|()| (Instant::now(), sum(&comm, &partial(comm.rank())), Instant::now()));
                let again = timed.iter().map(|(begun, _, ended)| *ended - *begun).min().expect("three");
                gone_on.wait();
                let (bits, outcome) = whole.expect("all ranks called");
                assert!(bits == folded(&[0, 1, 2, 3]) && outcome.missing.is_empty());
                let [third, fourth, fifth] = timed.map(|(_, result, _)| result);
                let later = [first, second, third, fourth, fifth];
                let later = later.map(|result| result.expect("the operation completes"));
                assert!(took >= LIMIT / 2 && took < LIMIT * 10 && again < LIMIT, "{took:?}, {again:?}");
                // The end of the excluded rank does not affect the others.
                excluded.wait();
                for _ in 0..20 {
                    sum(&comm, &CallOptions::default()).expect("the operation completes");
                }
                ended.wait();
                Ok(later)
            },
        );
        let others: Vec<u32> = (0..RANKS).filter(|&rank| rank != straggler).collect();
        for (rank, result) in (0..).zip(results) {
            match result {
                Ok(results) => {
                    for (bits, outcome) in results {
                        assert_eq!(members(&outcome), others, "{transports:?}: rank {rank} without {straggler}");
                        assert!(bits == folded(&others), "{transports:?}: rank {rank} without {straggler}");
                    }
                }
                Err(error) => assert_eq!((rank, error), (straggler, Error::Excluded)),
            }
        }
    }
}

/// All ranks of a leaf are late, so the leaf has no rank from which to learn of the operation.
#[test]
fn leaf_with_only_late_ranks_is_excluded() {
    for transports in Transports::ALL {
        let cluster = two_leaves();
        let [gone_on, ended] = [(); 2].map(|()| Barrier::new(RANKS as usize));
        let results = cluster.run(
            "leaf",
            RANKS,
            |config| folding(config, transports),
            |comm| {
                let is_late = comm.rank() >= 2;
                if is_late {
                    gone_on.wait();
                }
                let result = sum(&comm, &partial(comm.rank()));
                if !is_late {
                    gone_on.wait();
                }
                ended.wait();
                result
            },
        );
        for result in &results[..2] {
            let (bits, outcome) = result.as_ref().expect("the operation completes");
            assert!(members(outcome) == [0, 1] && *bits == folded(&[0, 1]), "{transports:?}");
        }
        let late: Vec<_> = results[2..].iter().map(|result| result.as_ref().err()).collect();
        assert_eq!(late, [Some(&Error::Excluded); 2], "{transports:?}");
    }
}

#[test]
fn straggler_deadline_names_the_missing_ranks() {
    let deadline = Some(Straggler::Deadline(LIMIT));
    let trees = Transports::ALL.map(|transports| (Algo::Tree, transports));
    for (algo, transports) in
        trees.into_iter().chain([(Algo::Ring, Transports::Packets), (Algo::Ring, Transports::ZeroCopy)])
    {
        let cluster = two_leaves();
        let [over, ended] = [(); 2].map(|()| Barrier::new(RANKS as usize));
        let errors = cluster.run(
            "deadline",
            RANKS,
            |config| config.transport = transports.transport(config.rank),
            |comm| {
                if comm.rank() == 2 {
                    over.wait();
                }
                let begun = Instant::now();
                let options = CallOptions { algo: Some(algo), straggler: deadline, ..CallOptions::default() };
                let result = sum(&comm, &options);
                let took = begun.elapsed();
                if comm.rank() != 2 {
                    over.wait();
                    assert!(took < LIMIT * 10, "{took:?}");
                }
                // A rank that left early would be lost to the late one.
                ended.wait();
                result.expect_err("rank 2 is late")
            },
        );
        for (rank, error) in errors.iter().enumerate() {
            let named = matches!(error, Error::Stragglers { missing } if missing.iter().eq([Rank(2)]));
            assert!(named, "{algo}, {transports:?}: rank {rank}: {error}");
        }
    }
}

#[test]
fn partial_policy_is_refused_where_it_is_not_possible() {
    let cluster = Cluster::start_zero_copy(2, 2, Default::default(), Default::default());
    let refused = |comm: &Communicator, desc: &OpDesc, options: &CallOptions, why: &str| {
        let mut buffer = vec![0; 4 * desc.count as usize];
        let error = comm.run(desc, &mut buffer[..], options).expect_err("the call is refused");
        assert!(matches!(error, Error::NotPossible(_)) && error.to_string().contains(why), "{error}");
    };
    let sum = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 4);
    cluster.run("packets", RANKS, over_udp, |comm| {
        refused(&comm, &OpDesc::all_gather(Dtype::F32, 4), &partial(0), "the block of a missing rank");
        let ring = CallOptions { algo: Some(Algo::Ring), ..partial(0) };
        refused(&comm, &sum, &ring, "only the root of a tree");
        comm.barrier_with(&partial(0)).expect("a refused call changes nothing");
        comm.leave();
    });
    let partial_by_default = |config: &mut JoinConfig| config.straggler = Straggler::Partial(LIMIT);
    Cluster::start_with(2, 2, 2, Default::default()).run("shards", RANKS, partial_by_default, |comm| {
        refused(&comm, &sum, &CallOptions::default(), "several shards");
        let explained = comm.explain(&sum, Algo::Auto).to_string();
        assert!(explained.contains("tree          ruled out: tree cannot complete without late ranks"), "{explained}");
        comm.barrier_with(&CallOptions { straggler: Some(Straggler::Wait), ..CallOptions::default() }).expect("waits");
        comm.leave();
    });
}

/// All ranks must call with the same limit.
#[test]
fn different_straggler_limits_are_a_mismatch() {
    let cluster = Cluster::start(2, 2);
    let errors = cluster.run("limits", RANKS, over_udp, |comm| {
        let options = if comm.rank() == 3 { CallOptions::default() } else { partial(0) };
        sum(&comm, &CallOptions { algo: Some(Algo::Tree), ..options }).expect_err("ranks differ")
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{errors:?}");
}

/// A rank of [`partial_result_excludes_a_stopped_process`] in a process of its own: adds until 100 operations have
/// completed without a rank.
#[test]
#[ignore = "run by another test"]
fn rank_process() {
    let config = JoinConfig {
        straggler: Straggler::Partial(LIMIT),
        ..JoinConfig::from_env().expect("the variables of a launcher")
    };
    let comm = Communicator::join(config).expect("join");
    comm.barrier_with(&CallOptions { straggler: Some(Straggler::Wait), ..CallOptions::default() }).expect("barrier");
    let mut without = 0;
    let mut buffer = comm.alloc::<u64>(2).expect("memory");
    for op in 0..100_000_u64 {
        let own = [1_u64 << comm.rank(), op];
        buffer.copy_from_slice(&own);
        let outcome = match comm.all_reduce(&mut buffer[..], ReduceOp::Sum) {
            Ok(outcome) => outcome,
            Err(error) => {
                println!("ended: {error:#?}");
                let whole = [(1 << RANKS) - 1, op * u64::from(RANKS)];
                // The result may have arrived while the process was stopped, but never one that excludes it.
                assert!(buffer[..] == own || buffer[..] == whole, "{:?}", &buffer[..]);
                return println!("memory intact");
            }
        };
        let members: u64 = members(&outcome).iter().map(|rank| 1 << rank).sum();
        assert_eq!(buffer[..], [members, op * u64::from(members.count_ones())]);
        if op == 10 {
            println!("has added");
        }
        without += u32::from(!outcome.missing.is_empty());
        if without == 100 {
            return println!("completed without {}", outcome.missing);
        }
    }
}

#[test]
fn partial_result_excludes_a_stopped_process() {
    let two_levels = Transports::ALL.map(|transports| (2, transports));
    for (leaves, transports) in two_levels.into_iter().chain([(1, Transports::ZeroCopy), (1, Transports::Mixed)]) {
        let hosts = RANKS as usize / leaves;
        let cluster = Cluster::start_zero_copy(leaves, hosts, Default::default(), Default::default());
        let mut ranks: Vec<_> = (0..RANKS).map(|rank| Process::start(&cluster, rank, transports)).collect();
        ranks[2].wait_for("has added");
        ranks[2].signal("-STOP");
        for rank in [0, 1, 3] {
            ranks[rank].wait_for("completed without 2");
        }
        ranks[2].signal("-CONT");
        ranks[2].wait_for("ended: Excluded");
        ranks[2].wait_for("memory intact");
    }
}

/// A rank's process; dropping it kills the process.
struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(cluster: &Cluster, rank: u32, transports: Transports) -> Self {
        let transport = if transports.transport(rank) == Transport::Shm { "shm" } else { "udp" };
        let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
        command.args(["rank_process", "--exact", "--ignored", "--nocapture"]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string()).env("MASTER_ADDR", "127.0.0.1");
        command.env("SUMAC_PORT", cluster.controller.local_addr().port().to_string()).env("SUMAC_TRANSPORT", transport);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Self { child, lines }
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().expect("kill runs");
        assert!(sent.success(), "{sent}");
    }

    /// Read lines until one contains `text`. The process ends at its deadline at the latest.
    fn wait_for(&mut self, text: &str) {
        let mut lines = Vec::new();
        for line in self.lines.by_ref() {
            let line = line.expect("text");
            if line.contains(text) {
                return;
            }
            lines.push(line);
        }
        panic!("{text:?} was never printed: {lines:?}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
