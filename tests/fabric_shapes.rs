//! Ranks that name their hosts of a fabric: algorithms of several dimensions run by the groups and grids of its cables,
//! with no shape set.

mod common;

use common::over_udp;
use std::net::Ipv4Addr;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;
use sumac::controller::{Controller, ControllerConfig};
use sumac::topo::generate::{self, Dragonfly};
use sumac::topo::{Fabric, LeafSpine};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, Path, ReduceOp};

/// All-reduce over ranks at these hosts, each on a machine of its own, by each algorithm that needs a shape, and return
/// the paths taken; those that are refused are left out.
fn paths(fabric: Fabric, hosts: &[usize]) -> Vec<Path> {
    let names: Vec<String> = hosts.iter().map(|host| fabric.hosts()[*host].name.clone()).collect();
    let config = ControllerConfig { fabric: Some(fabric), ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let barrier = Barrier::new(hosts.len());
    let join = |rank: usize| {
        let mut config = JoinConfig::new(controller.local_addr(), "shaped", rank as u32, hosts.len() as u32);
        over_udp(&mut config);
        config.bind = Ipv4Addr::new(127, 0, 1, 1 + rank as u8).into();
        (config.host, config.deadline) = (Some(names[rank].clone()), Duration::from_secs(30));
        let comm = Communicator::join(config).expect("it joins");
        let paths: Vec<Option<Path>> = [Algo::Ring2d, Algo::Torus2d, Algo::Mesh2d, Algo::HierarchicalRing]
            .map(|algo| all_reduce(&comm, algo))
            .into();
        barrier.wait();
        paths
    };
    let found: Vec<Vec<Option<Path>>> = thread::scope(|scope| {
        let join = &join;
        let ranks: Vec<_> = (0..hosts.len()).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    });
    assert!(found.iter().all(|paths| *paths == found[0]), "{found:?}");
    found[0].iter().flatten().copied().collect()
}

/// The path of an all-reduce whose result is checked; `None` if the ranks have no shape for it.
fn all_reduce(comm: &Communicator, algo: Algo) -> Option<Path> {
    const COUNT: usize = 1003;
    let mut data: Vec<i64> = (0..COUNT).map(|at| i64::from(comm.rank()) * 1000 + at as i64).collect();
    let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
    match comm.all_reduce_with(&mut data, ReduceOp::Sum, &options) {
        Ok(outcome) => {
            let ranks = i64::from(comm.size());
            let expected = |at: usize| ranks * (ranks - 1) / 2 * 1000 + ranks * at as i64;
            assert!(data.iter().enumerate().all(|(at, sum)| *sum == expected(at)), "{algo:?}");
            Some(outcome.path)
        }
        Err(Error::NotPossible(_)) => None,
        Err(error) => panic!("{algo:?}: {error}"),
    }
}

const ALL: [Path; 4] = [Path::Ring2d, Path::Torus2d, Path::Mesh2d, Path::HierarchicalRing];

#[test]
fn ranks_in_groups_of_a_dragonfly_run_hierarchical_algorithms() {
    let fabric = || generate::dragonfly(Dragonfly { routers: 4, global: 1, hosts: 1, rate: None }).expect("valid");
    assert_eq!(paths(fabric(), &[0, 1, 2, 4, 5, 6]), ALL);
    assert_eq!(paths(fabric(), &[0, 4, 1, 5]), []);
}

#[test]
fn ranks_below_leaves_run_hierarchical_algorithms() {
    let fabric = LeafSpine { leaves: 4, spines: 2, hosts_per_leaf: 2, cables: 1, rate: None };
    let fabric = || Fabric::leaf_spine(fabric).expect("valid");
    assert_eq!(paths(fabric(), &[0, 1, 2, 3, 4, 5, 6, 7]), ALL);
    assert_eq!(paths(fabric(), &[0, 1, 2, 3, 4]), []);
}

#[test]
fn ranks_on_a_torus_run_algorithms_of_its_dimensions() {
    let fabric = || generate::torus(&[3, 3], 1, None).expect("valid");
    assert_eq!(paths(fabric(), &[0, 1, 2, 3, 4, 5, 6, 7, 8]), ALL);
    assert_eq!(paths(fabric(), &[0, 1, 2]), []);
}
