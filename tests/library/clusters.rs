//! Clusters for users' own tests.

use std::net::TcpStream;
use sumac::controller::keys::read_key;
use sumac::controller::status;
use sumac::testing::{LocalCluster, LocalClusterConfig, LocalClusterError, RankError};
use sumac::{Communicator, Error, JoinConfig, Outcome, Path, ReduceOp, Transfer, Transport};

fn sum(comm: &Communicator) -> Outcome {
    let mut values = [comm.rank() + 1; 100];
    let outcome = comm.all_reduce(&mut values, ReduceOp::Sum).expect("a sum");
    assert_eq!(values, [(1..=comm.size()).sum::<u32>(); 100]);
    outcome
}

#[test]
fn results_are_in_the_order_of_ranks_and_jobs_follow_each_other() {
    let cluster = LocalCluster::start(3).expect("a cluster");
    for job in ["local-0", "local-1"] {
        let ranks = cluster.run(|comm| {
            assert_eq!(sum(&comm).path, Path::Tree);
            let seen = (comm.rank(), comm.name());
            comm.leave();
            seen
        });
        assert_eq!(ranks, [0, 1, 2].map(|rank| (rank, job.to_owned())));
    }
}

#[test]
fn options_choose_levels_and_transport() {
    for (levels, devices, transport, transfer) in [
        (1, 1, Transport::Shm, Transfer::Bounced),
        (1, 1, Transport::Udp, Transfer::Packets),
        (2, 2, Transport::Shm, Transfer::Bounced),
        (2, 3, Transport::Udp, Transfer::Packets),
    ] {
        let config = LocalClusterConfig { levels, devices, transport, ..LocalClusterConfig::new(4) };
        let cluster = LocalCluster::start_with(config.clone()).expect("a cluster");
        cluster.run(|comm| {
            let outcome = sum(&comm);
            assert_eq!((outcome.path, outcome.transfer), (Path::Tree, Some(transfer)), "{config:?}");
            // With a third device, on a spine, that is the root: nearer to both leaves than they are to each other.
            assert_eq!(cluster.devices_in_use().len(), devices, "{config:?}");
            comm.leave();
        });
    }
}

#[test]
fn panic_is_a_dead_rank_to_the_others_and_named() {
    let cluster = LocalCluster::start(3).expect("a cluster");
    let results = cluster.try_run(|comm| {
        sum(&comm);
        assert!(comm.rank() != 1, "rank 1 has a bug");
        comm.barrier().expect_err("a rank is dead")
    });
    let is_told = |error: &Error| matches!(error, Error::RanksFailed { ranks, .. } if ranks[..] == [sumac::Rank(1)]);
    let [Ok(first), Err(RankError::Panic { rank: 1, message }), Ok(last)] = &results[..] else { panic!("{results:?}") };
    assert!(is_told(first) && is_told(last), "{results:?}");
    assert_eq!(message, "rank 1 has a bug");
    let run = std::panic::AssertUnwindSafe(|| cluster.run(|comm| assert!(comm.rank() != 2, "late")));
    let panic = std::panic::catch_unwind(run).expect_err("rank 2 panics");
    assert_eq!(panic.downcast_ref::<String>().expect("a message"), "rank 2 panicked: late");
}

#[test]
fn killed_device_is_replaced_by_a_spare_and_then_by_host_collectives() {
    let config = LocalClusterConfig { devices: 2, ..LocalClusterConfig::new(2) };
    let cluster = LocalCluster::start_with(config).expect("a cluster");
    assert_eq!(cluster.device_names(), ["device0", "device1"]);
    cluster.run(|comm| {
        assert_eq!((sum(&comm).path, comm.recoveries().count), (Path::Tree, 0));
        for (lost, is_tree) in [(1, true), (2, false)] {
            comm.barrier().expect("a barrier");
            if comm.rank() == 0 {
                let used = cluster.devices_in_use();
                assert_eq!(used.len(), 1);
                cluster.kill_device(used[0]);
                cluster.kill_device(used[0]);
            }
            // Ranks must agree on when all have recovered, or they would make different calls.
            let mut recovered = [0];
            while recovered[0] < comm.size() {
                recovered = [u32::from(comm.recoveries().count == lost)];
                comm.all_reduce(&mut recovered, ReduceOp::Sum).expect("a sum");
            }
            let outcome = sum(&comm);
            assert_eq!((outcome.path == Path::Tree, outcome.fallback.is_none()), (is_tree, is_tree), "{outcome:?}");
        }
        comm.leave();
    });
    assert_eq!(cluster.devices_in_use(), [0; 0]);
    cluster.start_device(1).expect("it starts again");
    cluster.run(|comm| {
        assert_eq!(sum(&comm).path, Path::Tree);
        comm.leave();
    });
}

#[test]
fn unknown_peer_learns_nothing_of_a_cluster_and_its_owner_all() {
    let cluster = LocalCluster::start(1).expect("a cluster");
    let addr = cluster.controller_addr();
    let refused = status(addr).expect_err("no key").to_string();
    assert!(refused.contains("keys only"), "{refused}");
    let refused = Communicator::join(JoinConfig::new(addr, "other", 0, 1)).expect_err("no key").to_string();
    assert!(refused.contains("keys only"), "{refused}");
    let key = read_key(&cluster.operator_key_file()).expect("private");
    assert_eq!(cluster.operator_addr().key, Some(key));
    let report = status(cluster.operator_addr()).expect("an operator");
    assert_eq!((report.devices.len(), report.jobs.len()), (1, 0));
}

#[test]
fn dropped_cluster_stops_its_controller() {
    let cluster = LocalCluster::start(1).expect("a cluster");
    let addr = cluster.controller_addr();
    assert!(TcpStream::connect(addr).is_ok());
    drop(cluster);
    assert!(TcpStream::connect(addr).is_err());
}

#[test]
fn impossible_cluster_is_refused() {
    let config = LocalClusterConfig { levels: 2, ..LocalClusterConfig::new(2) };
    let error = LocalCluster::start_with(config).expect_err("one device has no two levels");
    assert!(matches!(error, LocalClusterError::Config(_)), "{error}");
}
