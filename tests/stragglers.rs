//! Ranks that come late, or never: whole clusters over real sockets and shared memory, in one process.

mod common;

use common::{Cluster, by_packets, plain};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use sumac::{
    Algo, Attach, Buffer, CallOptions, Communicator, Error, JoinConfig, OpDesc, Order, Outcome, Rank, ReduceOp,
    Straggler,
};
use sumac_hal::op::Dtype;

const RANKS: u32 = 4;
const COUNT: usize = 30_000;
/// Long beside what a loaded machine keeps a rank from running.
const LIMIT: Duration = Duration::from_secs(1);

fn partial(_: u32) -> CallOptions {
    CallOptions { straggler: Some(Straggler::Partial(LIMIT)), ..CallOptions::default() }
}

fn input(rank: u32, i: usize) -> f32 {
    (1.0 + i as f32 * 0.37) * 3_f32.powi(rank as i32 * 5 - 7)
}

/// Memory that the device reaches, by reference, with the rank's input.
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

/// The sum over some ranks on two leaves, two on each, folded node by node.
fn folded(members: &[u32]) -> Vec<u32> {
    let plus = |a: Option<f32>, b: f32| Some(a.map_or(b, |a| a + b));
    let fold = |ranks: &[u32], i| {
        ranks.iter().filter(|rank| members.contains(rank)).fold(None, |sum, &rank| plus(sum, input(rank, i)))
    };
    let both = |i| [fold(&[0, 1], i), fold(&[2, 3], i)].into_iter().flatten().fold(None, plus);
    (0..COUNT).map(|i| both(i).expect("somebody is there").to_bits()).collect()
}

/// How the ranks of a job attach: all by packets, all by reference, or every other one.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ways {
    Packets,
    Reference,
    Mixed,
}

impl Ways {
    const ALL: [Self; 3] = [Self::Packets, Self::Reference, Self::Mixed];

    fn attach(self, rank: u32) -> Attach {
        match self {
            Self::Packets => Attach::Udp,
            Self::Reference => Attach::Shm,
            Self::Mixed if rank.is_multiple_of(2) => Attach::Shm,
            Self::Mixed => Attach::Udp,
        }
    }
}

/// Two leaves and a spine, each with a bus.
fn buses() -> Cluster {
    Cluster::start_on(2, 2, Default::default(), Default::default())
}

fn folding(config: &mut JoinConfig, ways: Ways) {
    config.attach = ways.attach(config.rank);
    config.order = Order::TreeFold;
    config.deadline = Duration::from_secs(20);
}

fn members(outcome: &Outcome) -> Vec<u32> {
    (0..RANKS).filter(|&rank| !outcome.missing.contains(Rank(rank))).collect()
}

#[test]
fn the_slowest_is_named_by_packets_and_by_reference() {
    let cluster = Cluster::start_on(2, 2, Default::default(), Default::default());
    for (job, attach) in [("packets", by_packets as fn(&mut JoinConfig)), ("reference", plain)] {
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

/// One rank comes when the others have gone on: they have the sum over themselves, to the bit; it has an error.
#[test]
fn the_others_go_on_over_two_levels() {
    for (straggler, ways) in (0..RANKS).zip(Ways::ALL.into_iter().cycle()).chain([(1, Ways::Reference)]) {
        let cluster = buses();
        let [gone_on, excluded, ended] = [(); 3].map(|()| Barrier::new(RANKS as usize));
        let results = cluster.run(
            "partial",
            RANKS,
            |config| folding(config, ways),
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
                    assert!(is_old, "{ways:?}: nothing is written to who is left out, then or later");
                    return Err(result.expect_err("too late"));
                }
                let begun = Instant::now();
                let first = sum(&comm, &partial(comm.rank()));
                let took = begun.elapsed();
                // Later operations are over the same ranks, with a limit or without, and wait for nobody else.
                let second = sum(&comm, &CallOptions::default());
                let begun = Instant::now();
                let third = sum(&comm, &partial(comm.rank()));
                let again = begun.elapsed();
                gone_on.wait();
                let (bits, outcome) = whole.expect("all were there");
                assert!(bits == folded(&[0, 1, 2, 3]) && outcome.missing.is_empty());
                let later = [first, second, third].map(|result| result.expect("goes on"));
                assert!(took >= LIMIT / 2 && took < LIMIT * 10 && again < LIMIT, "{took:?}, {again:?}");
                // The straggler's end is nobody's.
                excluded.wait();
                for _ in 0..20 {
                    sum(&comm, &CallOptions::default()).expect("goes on");
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
                        assert_eq!(members(&outcome), others, "{ways:?}: rank {rank} without {straggler}");
                        assert!(bits == folded(&others), "{ways:?}: rank {rank} without {straggler}");
                    }
                }
                Err(error) => assert_eq!((rank, error), (straggler, Error::Excluded)),
            }
        }
    }
}

/// A whole leaf is late: nobody there can say so of itself.
#[test]
fn a_leaf_without_anybody_is_left_out() {
    for ways in Ways::ALL {
        let cluster = buses();
        let [gone_on, ended] = [(); 2].map(|()| Barrier::new(RANKS as usize));
        let results = cluster.run(
            "leaf",
            RANKS,
            |config| folding(config, ways),
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
            let (bits, outcome) = result.as_ref().expect("goes on");
            assert!(members(outcome) == [0, 1] && *bits == folded(&[0, 1]), "{ways:?}");
        }
        let late: Vec<_> = results[2..].iter().map(|result| result.as_ref().err()).collect();
        assert_eq!(late, [Some(&Error::Excluded); 2], "{ways:?}");
    }
}

#[test]
fn a_deadline_names_who_was_missing_in_the_tree_and_beside_it() {
    let deadline = Some(Straggler::Deadline(LIMIT));
    let trees = Ways::ALL.map(|ways| (Algo::Tree, ways));
    for (algo, ways) in trees.into_iter().chain([(Algo::Ring, Ways::Packets), (Algo::Ring, Ways::Reference)]) {
        let cluster = buses();
        let [over, ended] = [(); 2].map(|()| Barrier::new(RANKS as usize));
        let errors = cluster.run(
            "deadline",
            RANKS,
            |config| config.attach = ways.attach(config.rank),
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
                // Who leaves is lost to those that come.
                ended.wait();
                result.expect_err("rank 2 is late")
            },
        );
        for (rank, error) in errors.iter().enumerate() {
            let named = matches!(error, Error::Stragglers { missing } if missing.iter().eq([Rank(2)]));
            assert!(named, "{algo}, {ways:?}: rank {rank}: {error}");
        }
    }
}

#[test]
fn what_can_not_go_on_without_ranks_says_so_and_changes_nothing() {
    let cluster = Cluster::start_on(2, 2, Default::default(), Default::default());
    let refused = |comm: &Communicator, desc: &OpDesc, options: &CallOptions, why: &str| {
        let mut buffer = vec![0; 4 * desc.count as usize];
        let error = comm.run(desc, &mut buffer[..], options).expect_err("not possible");
        assert!(matches!(error, Error::NotPossible(_)) && error.to_string().contains(why), "{error}");
    };
    let sum = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 4);
    cluster.run("packets", RANKS, by_packets, |comm| {
        refused(&comm, &OpDesc::all_gather(Dtype::F32, 4), &partial(0), "the block of a rank that is missing");
        let ring = CallOptions { algo: Some(Algo::Ring), ..partial(0) };
        refused(&comm, &sum, &ring, "only the root of a tree");
        comm.barrier_with(&partial(0)).expect("nothing has changed");
        comm.leave();
    });
    let by_default = |config: &mut JoinConfig| config.straggler = Straggler::Partial(LIMIT);
    Cluster::start_with(2, 2, 2, Default::default()).run("shards", RANKS, by_default, |comm| {
        refused(&comm, &sum, &CallOptions::default(), "more than one shard");
        let explained = comm.explain(&sum, Algo::Auto).to_string();
        assert!(
            explained.contains("tree          ruled out: tree can't go on without ranks that are late"),
            "{explained}"
        );
        comm.barrier_with(&CallOptions { straggler: Some(Straggler::Wait), ..CallOptions::default() }).expect("waits");
        comm.leave();
    });
}

/// Limits are part of what ranks have to agree on.
#[test]
fn other_limits_are_other_operations() {
    let cluster = Cluster::start(2, 2);
    let errors = cluster.run("limits", RANKS, by_packets, |comm| {
        let options = if comm.rank() == 3 { CallOptions::default() } else { partial(0) };
        sum(&comm, &CallOptions { algo: Some(Algo::Tree), ..options }).expect_err("ranks differ")
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{errors:?}");
}

/// A rank of [`the_others_go_on_when_a_process_is_stopped`], as a process of its own: adds until ranks are missing, and a
/// while longer.
#[test]
#[ignore = "run by another test"]
fn rank_process() {
    let config = JoinConfig { straggler: Straggler::Partial(LIMIT), ..JoinConfig::from_env().expect("as launched") };
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
                println!("ended: {error:?}");
                let whole = [(1 << RANKS) - 1, op * u64::from(RANKS)];
                // It may have come while it was stopped; nothing comes that it has no part in.
                assert!(buffer[..] == own || buffer[..] == whole, "{:?}", &buffer[..]);
                return println!("memory is whole");
            }
        };
        let members: u64 = members(&outcome).iter().map(|rank| 1 << rank).sum();
        assert_eq!(buffer[..], [members, op * u64::from(members.count_ones())]);
        if op == 10 {
            println!("has added");
        }
        without += u32::from(!outcome.missing.is_empty());
        if without == 100 {
            return println!("went on without {}", outcome.missing);
        }
    }
}

#[test]
fn the_others_go_on_when_a_process_is_stopped() {
    let two_levels = Ways::ALL.map(|ways| (2, ways));
    for (leaves, ways) in two_levels.into_iter().chain([(1, Ways::Reference), (1, Ways::Mixed)]) {
        let hosts = RANKS as usize / leaves;
        let cluster = Cluster::start_on(leaves, hosts, Default::default(), Default::default());
        let mut ranks: Vec<_> = (0..RANKS).map(|rank| Process::start(&cluster, rank, ways)).collect();
        ranks[2].wait_for("has added");
        ranks[2].signal("-STOP");
        for rank in [0, 1, 3] {
            ranks[rank].wait_for("went on without 2");
        }
        ranks[2].signal("-CONT");
        ranks[2].wait_for("ended: Excluded");
        ranks[2].wait_for("memory is whole");
    }
}

/// A rank of its own; killed when it is dropped.
struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(cluster: &Cluster, rank: u32, ways: Ways) -> Self {
        let attach = if ways.attach(rank) == Attach::Shm { "shm" } else { "udp" };
        let mut command = Command::new(std::env::current_exe().expect("this test's file"));
        command.args(["rank_process", "--exact", "--ignored", "--nocapture"]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string()).env("MASTER_ADDR", "127.0.0.1");
        command.env("SUMAC_PORT", cluster.controller.local_addr().port().to_string()).env("SUMAC_ATTACH", attach);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Self { child, lines }
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().expect("kill runs");
        assert!(sent.success(), "{sent}");
    }

    /// Read until it says this; its calls have deadlines, so it ends.
    fn wait_for(&mut self, text: &str) {
        let mut said = Vec::new();
        for line in self.lines.by_ref() {
            let line = line.expect("text");
            if line.contains(text) {
                return;
            }
            said.push(line);
        }
        panic!("{text:?} was never said: {said:?}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
