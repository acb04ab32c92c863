//! Controller, boards and communicators in one process, over real sockets; all parts are the production code.

mod common;

use common::{Cluster, over_udp, plain};
use std::time::Duration;
use std::{iter, thread};
use sumac::controller::{Controller, ControllerConfig};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, OpDesc, Order, Path, ReduceOp};
use sumac_hal::ctrl::{Counters, DropReason};
use sumac_hal::ids::Rank;
use sumac_hal::port::{Addr, MulticastPort};
use sumac_hal::udp::{UdpConfig, UdpPort};

fn input(rank: u32, i: usize) -> i64 {
    (i as i64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64) ^ i64::from(rank).wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn expected(world: u32, i: usize) -> i64 {
    (0..world).fold(0, |sum: i64, rank| sum.wrapping_add(input(rank, i)))
}

#[test]
fn every_path_gives_the_sum() {
    let cluster = Cluster::start(2, 2);
    let paths = cluster.run("paths", 4, plain, |comm| {
        let mut paths = Vec::new();
        for algo in [Algo::Tree, Algo::Ring, Algo::HalvingDoubling, Algo::Auto] {
            for count in [0, 1, 5, 4096, 100_001] {
                let mut buffer: Vec<i64> = (0..count).map(|i| input(comm.rank(), i)).collect();
                let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
                let outcome = comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options).expect("all-reduce");
                assert!(buffer.iter().enumerate().all(|(i, &x)| x == expected(4, i)), "{algo} x {count}");
                paths.push(outcome.path);
            }
        }
        comm.barrier().expect("barrier");
        comm.leave();
        paths
    });
    assert!(paths.windows(2).all(|pair| pair[0] == pair[1]), "ranks chose differently: {paths:?}");
    assert!(paths[0][..5].iter().all(|&path| path == Path::Tree));
    assert!(paths[0][5..10].iter().all(|&path| path == Path::Ring));
}

#[test]
fn started_operations_overlap() {
    let cluster = Cluster::start(1, 3);
    cluster.run("started", 3, plain, |comm| {
        let make = |k: usize| (0..1000).map(|i| input(comm.rank(), i + k)).collect::<Vec<i64>>();
        let mut handles: Vec<_> =
            (0..20).map(|k| comm.start_all_reduce(make(k), ReduceOp::Sum).expect("start")).collect();
        std::mem::forget(handles.remove(7));
        while !handles[0].test() {
            thread::yield_now();
        }
        for (k, handle) in (0..20).filter(|&k| k != 7).zip(handles) {
            let (buffer, outcome) = handle.wait().expect("wait");
            assert_eq!(outcome.path, Path::Tree);
            assert!(buffer.iter().enumerate().all(|(i, &x)| x == expected(3, i + k)));
        }
        comm.leave();
    });
}

#[test]
fn communicators_share_devices() {
    let cluster = Cluster::start(2, 2);
    thread::scope(|scope| {
        for job in ["a", "b", "c"] {
            let cluster = &cluster;
            scope.spawn(move || {
                cluster.run(job, 4, plain, |comm| {
                    for count in [1, 1000, 50_000] {
                        let mut buffer: Vec<i64> = (0..count).map(|i| input(comm.rank(), i)).collect();
                        comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("all-reduce");
                        assert!(buffer.iter().enumerate().all(|(i, &x)| x == expected(4, i)), "job {job}");
                    }
                    comm.leave();
                });
            });
        }
    });
}

#[test]
fn different_calls_are_the_same_error_everywhere() {
    let cluster = Cluster::start(2, 2);
    let mixes: [fn(u32) -> (Algo, usize); 6] = [
        |rank| (Algo::Tree, if rank == 2 { 1000 } else { 1001 }),
        |rank| (if rank == 3 { Algo::Ring } else { Algo::Tree }, 1000),
        // Not announced to the tree.
        |rank| (if rank == 3 { Algo::OneShot } else { Algo::Tree }, 4),
        |rank| (if rank == 3 { Algo::Tree } else { Algo::OneShot }, 4),
        |rank| (if rank == 1 { Algo::HalvingDoubling } else { Algo::Ring }, 5000),
        |rank| (Algo::Ring, if rank == 0 { 1000 } else { 64 }),
    ];
    for (number, mix) in mixes.into_iter().enumerate() {
        let errors = cluster.run(&format!("mismatch-{number}"), 4, plain, |comm| {
            let (algo, count) = mix(comm.rank());
            let options =
                CallOptions { algo: Some(algo), deadline: Some(Duration::from_secs(20)), ..CallOptions::default() };
            let error = comm.all_reduce_with(&mut vec![0_i64; count], ReduceOp::Sum, &options).expect_err("a mismatch");
            let again = comm.barrier().expect_err("the communicator is at its end");
            assert!(matches!(again, Error::Ended(_)), "{again}");
            error
        });
        assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{number}: {errors:?}");
        assert!(errors.windows(2).all(|pair| pair[0] == pair[1]), "{number}: {errors:?}");
    }
}

/// Short operations of one machine's ranks do not go through the tree, nor are they announced to it.
#[test]
fn call_in_the_tree_and_one_on_the_board_are_the_same_error_everywhere() {
    let cluster = Cluster::start(2, 2);
    let in_tree: [fn(u32) -> bool; 3] = [|rank| rank == 0, |rank| rank != 0, |rank| rank == 2];
    for (number, is_in_tree) in in_tree.into_iter().enumerate() {
        for is_started in [false, true] {
            let errors = cluster.run(&format!("board-{number}-{is_started}"), 3, plain, |comm| {
                let options = |algo| {
                    let deadline = Some(Duration::from_secs(20));
                    CallOptions { algo: Some(algo), deadline, ..CallOptions::default() }
                };
                let sum = |algo| comm.all_reduce_with(&mut [1_i64; 4], ReduceOp::Sum, &options(algo));
                // Until the board is there, and with calls of both kinds in between.
                for call in 0..300 {
                    sum(if call % 10 == 9 { Algo::Tree } else { Algo::OneShot }).expect("the same everywhere");
                }
                let algo = if is_in_tree(comm.rank()) { Algo::Tree } else { Algo::OneShot };
                if !is_started {
                    return sum(algo).expect_err("a mismatch");
                }
                let started = comm.start_all_reduce_with(vec![1_i64; 4], ReduceOp::Sum, &options(algo));
                started.expect("it begins").wait().expect_err("a mismatch").error
            });
            assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{number}: {errors:?}");
            assert!(errors.windows(2).all(|pair| pair[0] == pair[1]), "{number}: {errors:?}");
        }
    }
}

/// On one machine, no device compares a host collective in which each rank needs something from every other.
#[test]
fn call_in_the_tree_and_host_collective_are_the_same_error_everywhere() {
    let cluster = Cluster::start(2, 2);
    // Short transfers, long ones, and ones that are sent as references.
    let algos = [(Algo::Ring, 5_000), (Algo::HalvingDoubling, 100_000), (Algo::RecursiveDoubling, 3_000)];
    let in_tree: [fn(u32) -> bool; 4] = [|rank| rank == 0, |rank| rank == 3, |rank| rank != 1, |rank| rank % 2 == 0];
    for ((algo, count), (number, is_in_tree)) in
        algos.into_iter().flat_map(|algo| iter::repeat(algo).zip(in_tree.into_iter().enumerate()))
    {
        for is_started in [false, true] {
            let errors = cluster.run(&format!("schedule-{algo}-{number}-{is_started}"), 4, plain, |comm| {
                let options = |algo| {
                    let deadline = Some(Duration::from_secs(20));
                    CallOptions { algo: Some(algo), deadline, ..CallOptions::default() }
                };
                let sum = |algo| comm.all_reduce_with(&mut vec![1_i64; count], ReduceOp::Sum, &options(algo));
                for algo in [algo, Algo::Tree, algo] {
                    sum(algo).expect("the same everywhere");
                }
                let algo = if is_in_tree(comm.rank()) { Algo::Tree } else { algo };
                if !is_started {
                    return sum(algo).expect_err("a mismatch");
                }
                let started = comm.start_all_reduce_with(vec![1_i64; count], ReduceOp::Sum, &options(algo));
                started.expect("it begins").wait().expect_err("a mismatch").error
            });
            let name = format!("{algo} {number} {is_started}");
            assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{name}: {errors:?}");
            assert!(errors.windows(2).all(|pair| pair[0] == pair[1]), "{name}: {errors:?}");
        }
    }
}

/// Broadcasts are announced to the tree, which hears nothing from the others.
#[test]
fn broadcast_and_all_reduce_on_the_host_are_a_mismatch_on_all_ranks() {
    let cluster = Cluster::start(2, 2);
    for root in [0, 1, 2] {
        let by_binomial = |config: &mut JoinConfig| config.algo = Algo::Binomial;
        let errors = cluster.run(&format!("broadcast-{root}"), 3, by_binomial, |comm| {
            let options = |algo| {
                let deadline = Some(Duration::from_secs(20));
                CallOptions { algo: Some(algo), deadline, ..CallOptions::default() }
            };
            let mut data = vec![1_i64; 20_000];
            if comm.rank() != 1 {
                return comm.all_reduce_with(&mut data, ReduceOp::Sum, &options(Algo::Ring)).expect_err("a mismatch");
            }
            let broadcast = comm.broadcast(&mut data, root);
            // Its root may not hear of the others before its next call.
            let next = broadcast.and_then(|_| comm.all_reduce_with(&mut data, ReduceOp::Sum, &options(Algo::Ring)));
            next.expect_err("a mismatch")
        });
        assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{root}: {errors:?}");
        // In its next call the root compares that one.
        assert!(root == 1 || errors.windows(2).all(|pair| pair[0] == pair[1]), "{root}: {errors:?}");
    }
}

/// The other ranks have ended with the mismatch when it arrives, which must not look like failed ranks.
#[test]
fn late_rank_gets_the_mismatch_that_ended_its_job() {
    let mixes: [fn(u32) -> (Algo, usize); 4] = [
        |rank| (Algo::Tree, if rank == 0 { 1000 } else { 1001 }),
        |rank| (Algo::OneShot, if rank == 1 { 5 } else { 4 }),
        |rank| (if rank == 1 { Algo::HalvingDoubling } else { Algo::Ring }, 5000),
        |rank| (Algo::Ring, if rank == 0 { 1000 } else { 64 }),
    ];
    for (devices, mixes) in [(2, &mixes[..]), (0, &mixes[1..])] {
        let cluster = match devices {
            0 => Cluster::spare(0, ControllerConfig::new()),
            _ => Cluster::start(devices, 2),
        };
        for (number, mix) in mixes.iter().enumerate() {
            let gone = std::sync::Barrier::new(4);
            let errors = cluster.run(&format!("late-{number}"), 4, plain, |comm| {
                let (algo, count) = mix(comm.rank());
                let options =
                    CallOptions { algo: Some(algo), deadline: Some(Duration::from_secs(20)), ..CallOptions::default() };
                let call = |comm: &Communicator| {
                    comm.all_reduce_with(&mut vec![0_i64; count], ReduceOp::Sum, &options).expect_err("a mismatch")
                };
                if comm.rank() == 2 {
                    gone.wait();
                    return call(&comm);
                }
                let error = call(&comm);
                drop(comm);
                gone.wait();
                error
            });
            let all_alike = errors.windows(2).all(|pair| pair[0] == pair[1]);
            assert!(all_alike && matches!(errors[2], Error::Mismatch { .. }), "{devices} {number}: {errors:?}");
        }
    }
}

#[test]
fn missing_device_is_reported_as_fallback() {
    let controller = Controller::start(ControllerConfig::new()).expect("a controller on loopback");
    let cluster = Cluster { controller, boards: Vec::new() };
    cluster.run("fallback", 3, plain, |comm| {
        let outcome = comm.all_reduce(&mut [1_i64], ReduceOp::Sum).expect("a host collective");
        assert_ne!(outcome.path, Path::Tree);
        assert!(outcome.fallback.is_some_and(|why| why.contains("no device is connected")));
        let options = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
        let error = comm.all_reduce_with(&mut [1_i64], ReduceOp::Sum, &options).expect_err("no silent fallback");
        assert!(matches!(error, Error::NotPossible(_)) && error.to_string().contains("no device"), "{error}");
        assert_ne!(comm.barrier().expect("barrier").path, Path::Tree);
        comm.leave();
    });
    assert!(cluster.boards.is_empty());
}

/// Every run and every permitted host collective gives the tree's bits; the others report why they are ruled out.
#[test]
fn declared_order_gives_the_same_bits_by_every_path_that_keeps_it() {
    let cluster = Cluster::start(3, 3);
    let fold: fn(&mut JoinConfig) = |config| config.order = Order::TreeFold;
    let pairwise: fn(&mut JoinConfig) = |config| config.order = Order::TreePairwise;
    let always = [Path::Tree, Path::HostTree, Path::Pairwise];
    for (name, order) in [("fold", fold), ("pairwise", pairwise)] {
        for ranks in [4, 7, 8] {
            let results = cluster.run(&format!("{name}-{ranks}"), ranks, order, |comm| {
                let value = |i: usize| (1.0 + i as f32 * 0.37) * 3_f32.powi(comm.rank() as i32 * 5 - 7);
                let run = |algo| {
                    let mut buffer: Vec<f32> = (0..5_000).map(value).collect();
                    let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
                    let result = comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options);
                    result.map(|_| buffer.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
                };
                let tree = run(Algo::Tree).expect("tree");
                let mut kept = Vec::new();
                for algo in Algo::ALL {
                    match run(algo) {
                        Ok(bits) => {
                            assert!(bits == tree, "{name} {ranks}: {algo} gives different bits");
                            kept.push(algo.name());
                        }
                        Err(error @ Error::NotPossible(_)) => assert_ne!(algo, Algo::Auto, "{error}"),
                        Err(error) => panic!("{algo}: {error}"),
                    }
                }
                assert!(always.iter().all(|path| kept.contains(&path.name())), "{name} {ranks}: {kept:?}");
                let error = run(Algo::Ring).expect_err("ring adds up each block from another rank on").to_string();
                assert!(error.contains("cannot preserve the declared order"), "{error}");
                let explanation = comm.explain(&OpDesc::all_reduce(sumac::Dtype::F32, ReduceOp::Sum, 1), Algo::Auto);
                assert!(explanation.to_string().contains("ring          ruled out"), "{explanation}");
                comm.leave();
                tree
            });
            assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
        }
    }
}

#[test]
fn dead_rank_is_named_to_the_others() {
    let cluster = Cluster::start(1, 3);
    let errors = cluster.run("death", 3, plain, |comm| {
        comm.barrier().expect("all are there");
        if comm.rank() == 1 {
            return None;
        }
        comm.all_reduce(&mut vec![0_f32; 100_000], ReduceOp::Sum).err()
    });
    for error in [&errors[0], &errors[2]] {
        let failed = error.as_ref().expect("rank failed");
        // Operation 0 was the barrier.
        let is_named = matches!(failed, Error::RanksFailed { ranks, operation: 1, .. } if ranks[..] == [Rank(1)]);
        assert!(is_named, "{failed:?}");
    }
    // The controller detects the last rank's end when its connection closes.
    let begun = std::time::Instant::now();
    let status = loop {
        let status = sumac::controller::status(cluster.controller.local_addr()).expect("status");
        if status.jobs.is_empty() || begun.elapsed() > Duration::from_secs(20) {
            break status;
        }
        thread::yield_now();
    };
    assert!(status.jobs.is_empty(), "the job must end with its ranks: {:?}", status.jobs);
    assert!(status.devices.iter().all(|device| device.stats.as_ref().is_ok_and(|stats| stats.groups == 0)));
}

/// A loop that only calls `test` gets the error too, on every transport.
#[test]
fn handle_test_returns_the_error_when_a_rank_dies() {
    let cluster = Cluster::start(1, 2);
    for (job, attach) in [("packets", over_udp as fn(&mut JoinConfig)), ("zero-copy", plain)] {
        let has_begun = std::sync::Barrier::new(2);
        let errors = cluster.run(job, 2, attach, |comm| {
            comm.barrier().expect("all are there");
            if comm.rank() == 1 {
                has_begun.wait();
                return None;
            }
            let mut handle = comm.start_all_reduce(vec![0_f32; 100_000], ReduceOp::Sum).expect("started");
            has_begun.wait();
            let begun = std::time::Instant::now();
            while !handle.test() {
                assert!(begun.elapsed() < Duration::from_secs(20), "no error is reported");
                thread::yield_now();
            }
            handle.wait().err().map(Error::from)
        });
        let is_named =
            matches!(&errors[0], Some(Error::RanksFailed { ranks, operation: 1, .. }) if ranks[..] == [Rank(1)]);
        assert!(is_named, "{job}: {errors:?}");
    }
}

#[test]
fn stopped_device_is_a_lost_path() {
    for attach in [over_udp as fn(&mut JoinConfig), plain] {
        stop_a_device(attach);
    }
}

fn stop_a_device(attach: fn(&mut JoinConfig)) {
    let mut cluster = Cluster::start(1, 2);
    let board = cluster.boards.pop().expect("one board");
    let stop = std::sync::Mutex::new(Some(board));
    let without_recovery = |config: &mut JoinConfig| {
        attach(config);
        config.recover = false;
    };
    let errors = cluster.run("stop", 2, without_recovery, |comm| {
        comm.barrier().expect("all are there");
        if comm.rank() == 0 {
            drop(stop.lock().expect("not poisoned").take());
        }
        let options =
            CallOptions { algo: Some(Algo::Tree), deadline: Some(Duration::from_secs(30)), ..CallOptions::default() };
        comm.all_reduce_with(&mut vec![0_f32; 100_000], ReduceOp::Sum, &options).err()
    });
    // Rank 1 may have finished the barrier late; in any case no rank hangs or gets a sum.
    for error in errors {
        let named = matches!(error, Some(Error::PathLost | Error::RankLost { .. } | Error::DeviceLost { .. }));
        assert!(named, "{error:?}");
    }
}

/// Return the counters of root and leaves after four ranks on two leaves have added 586 chunks, more than fit in
/// flight.
fn multicast_counters(offered: bool, shards: u16) -> Vec<Counters> {
    let config = ControllerConfig { multicast_results: offered, chunk_max_bytes: 4096, ..ControllerConfig::new() };
    let cluster = Cluster::start_with(2, 2, shards, config);
    cluster.run("shared", 4, over_udp, |comm| {
        let mut buffer: Vec<i64> = (0..300_000).map(|i| input(comm.rank(), i)).collect();
        let options = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
        comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &options).expect("all-reduce");
        assert!(buffer.iter().enumerate().all(|(i, &x)| x == expected(4, i)));
    });
    let status = sumac::controller::status(cluster.controller.local_addr()).expect("status");
    let counters = status.devices.iter().map(|device| device.stats.as_ref().expect("it answers").counters);
    counters.filter(|counters| counters.completed > 0).collect()
}

#[test]
fn results_are_multicast_where_offered_and_supported() {
    assert!(multicast_counters(false, 1).iter().all(|node| node.answers_shared == 0));
    let mut port = UdpPort::bind(([127, 0, 0, 1], 0).into(), &UdpConfig::default()).expect("a port on loopback");
    if !port.join(Addr::Udp(([239, 255, 78, 1], 20_001).into())) {
        eprintln!("skipped: this machine does not let a socket join a multicast group on loopback");
        return;
    }
    for shards in [1, 2] {
        let nodes = multicast_counters(true, shards);
        // The root multicasts only to the leaves that requested it, and each shard of a leaf receives only its own
        // results.
        assert_eq!(nodes.len(), 3);
        assert!(nodes.iter().all(|node| node.answers_shared > 0), "{nodes:?}");
        assert!(nodes.iter().all(|node| node.dropped(DropReason::BadChild) == 0), "{nodes:?}");
    }
}
