//! Prepared operations: their results are those of calls, whatever happens between two runs.

use sumac::comm::Prepared;
use sumac::testing::{LocalCluster, LocalClusterConfig};
use sumac::{
    Algo, CallOptions, Collective, Communicator, Dtype, Error, OpDesc, OwnedBuffer, Path, ReduceOp, StartError,
};
use sumac_hal::ids::Rank;

const LEN: usize = 6;
const RANKS: u32 = 3;

fn by(algo: Algo) -> CallOptions {
    CallOptions { algo: Some(algo), ..CallOptions::default() }
}

/// What a rank contributes in a round.
fn inputs(rank: u32, round: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 1000 * round + 10 * i + rank).collect()
}

fn sums(round: u32) -> Vec<u32> {
    let all = (0..RANKS).map(|rank| inputs(rank, round, LEN));
    all.reduce(|sum, part| sum.iter().zip(part).map(|(a, b)| a + b).collect()).expect("ranks")
}

/// Run five rounds, started and waited for in the odd ones. Rank 1 calls what the others have prepared.
fn check_all_reduce(comm: &Communicator, algo: Algo, path: Path) {
    let desc = OpDesc::all_reduce(Dtype::U32, ReduceOp::Sum, LEN as u64);
    let mut prepared = comm.prepare(&desc, vec![0; LEN], None, &by(algo)).expect("possible");
    for round in 0..5 {
        let mine = inputs(comm.rank(), round, LEN);
        if comm.rank() == 1 {
            let mut buffer = mine;
            let outcome = comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &by(algo)).expect("a sum");
            assert_eq!((outcome.path, buffer), (path, sums(round)), "{algo}");
            continue;
        }
        prepared.buffer().expect("at rest").copy_from_slice(&mine);
        let outcome = match round % 2 {
            0 => prepared.run(),
            _ => prepared.start().and_then(|()| {
                assert!(prepared.buffer().is_none() && matches!(prepared.run(), Err(Error::Argument(_))));
                prepared.wait()
            }),
        };
        assert_eq!(outcome.expect("a sum").path, path, "{algo}");
        assert_eq!(prepared.buffer().expect("at rest"), &sums(round), "{algo}");
    }
    assert!(matches!(prepared.wait(), Err(Error::Argument(_))), "nothing is started");
    assert_eq!(prepared.into_buffers().expect("at rest").1, None);
}

#[test]
fn prepared_runs_give_the_results_of_calls() {
    LocalCluster::start(RANKS).expect("a cluster").run(|comm| {
        for (algo, path) in [
            (Algo::Tree, Path::Tree),
            (Algo::OneShot, Path::OneShot),
            (Algo::RecursiveDoubling, Path::RecursiveDoubling),
            (Algo::Ring, Path::Ring),
        ] {
            check_all_reduce(&comm, algo, path);
        }
        // With an output of its own.
        let desc = OpDesc::all_gather(Dtype::U32, u64::from(RANKS) * 2);
        let output = Some(vec![0; 2 * RANKS as usize]);
        let mut gather = comm.prepare(&desc, inputs(comm.rank(), 7, 2), output, &by(Algo::OneShot)).expect("possible");
        for _ in 0..2 {
            gather.output().expect("at rest").fill(0);
            gather.run().expect("a gather");
            let all: Vec<u32> = (0..RANKS).flat_map(|rank| inputs(rank, 7, 2)).collect();
            assert_eq!(gather.output(), Some(&mut all.clone()));
            assert_eq!(gather.buffer(), Some(&mut inputs(comm.rank(), 7, 2)), "an input is not changed");
        }
        comm.leave();
    });
}

#[test]
fn impossible_operation_is_refused_when_it_is_prepared() {
    LocalCluster::start(2).expect("a cluster").run(|comm| {
        let refused = |desc: &OpDesc, len: usize, algo| {
            let refused = comm.prepare(desc, vec![7_u32; len], None, &by(algo)).map(drop);
            let StartError { error, buffer } = refused.expect_err("it is not possible");
            assert_eq!(buffer, vec![7; len], "{error}");
            error
        };
        let sum = OpDesc::all_reduce(Dtype::U32, ReduceOp::Sum, LEN as u64);
        assert!(matches!(refused(&sum, LEN + 1, Algo::Auto), Error::Argument(_)), "a wrong length");
        assert!(matches!(refused(&sum, LEN, Algo::Bruck), Error::NotPossible(_)), "no such schedule");
        let rooted = OpDesc { collective: Collective::Reduce, root: Rank(2), ..sum };
        assert!(matches!(refused(&rooted, LEN, Algo::Auto), Error::Argument(_)), "no such root");
        comm.barrier().expect("nothing was sent");
        comm.leave();
    });
}

/// The owner of a vector may change its length between two runs.
#[test]
fn buffer_of_another_length_is_refused_and_has_no_effect() {
    LocalCluster::start(2).expect("a cluster").run(|comm| {
        for algo in [Algo::Tree, Algo::OneShot] {
            let desc = OpDesc::all_reduce(Dtype::U32, ReduceOp::Sum, LEN as u64);
            let mut prepared = comm.prepare(&desc, vec![1; LEN], None, &by(algo)).expect("possible");
            prepared.run().expect("a sum");
            for len in [LEN - 1, LEN + 1, 0] {
                prepared.buffer().expect("at rest").resize(len, 1);
                for refused in [prepared.run().map(drop), prepared.start()] {
                    assert!(matches!(refused, Err(Error::Argument(_))), "{algo}, {len}: {refused:?}");
                }
            }
            *prepared.buffer().expect("at rest") = vec![1; LEN];
            prepared.run().expect("a sum");
            assert_eq!(prepared.buffer(), Some(&mut vec![2; LEN]));
        }
        comm.leave();
    });
}

/// The run that finds the tree gone, and those after it, are decided anew.
#[test]
fn prepared_operation_outlives_its_tree() {
    let cluster = LocalCluster::start_with(LocalClusterConfig::new(RANKS)).expect("a cluster");
    cluster.run(|comm| {
        let options = [Algo::Auto, Algo::OneShot].map(by);
        let desc = OpDesc::all_reduce(Dtype::U32, ReduceOp::Sum, LEN as u64);
        let mut prepared = options.map(|options| comm.prepare(&desc, vec![0; LEN], None, &options).expect("possible"));
        let run = |round: u32, prepared: &mut Prepared<Vec<u32>>| {
            prepared.buffer().expect("at rest").copy_from_slice(&inputs(comm.rank(), round, LEN));
            let outcome = prepared.run().expect("a sum");
            assert_eq!(prepared.buffer().expect("at rest"), &sums(round));
            outcome
        };
        for prepared in &mut prepared {
            (0..3).for_each(|round| drop(run(round, prepared)));
        }
        comm.barrier().expect("a barrier");
        if comm.rank() == 0 {
            cluster.kill_device(0);
        }
        let mut recovered = [0];
        while recovered[0] < comm.size() {
            recovered = [u32::from(comm.recoveries().count == 1)];
            comm.all_reduce(&mut recovered, ReduceOp::Sum).expect("a sum");
        }
        for (round, prepared) in (3..).zip(&mut prepared) {
            for again in 0..3 {
                let outcome = run(10 * round + again, prepared);
                assert!(outcome.path != Path::Tree, "{outcome:?}");
            }
        }
        comm.leave();
    });
}

/// A started run that nobody waits for completes, and its buffers are freed.
#[test]
fn dropped_run_is_completed_for_the_other_ranks() {
    LocalCluster::start(2).expect("a cluster").run(|comm| {
        let mut buffer = comm.alloc::<u32>(LEN).expect("memory");
        buffer.values_mut().fill(1);
        let mut prepared = comm.prepare_all_reduce(buffer, ReduceOp::Sum).expect("possible");
        prepared.start().expect("started");
        if comm.rank() == 0 {
            drop(prepared);
        } else {
            prepared.wait().expect("a sum");
            assert!(prepared.buffer().expect("at rest").iter().all(|&sum| sum == 2));
        }
        comm.barrier().expect("a barrier");
        assert_eq!(comm.outstanding().bytes, 0);
        comm.leave();
    });
}
