//! Joins ranks without creating a communicator, to inspect what the controller assigns to a job.

use crate::common::{Cluster, job_name};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JoinRequest, Membership, Terms};
use sumac::controller::{Session, status};
use sumac::plan::Child;
use sumac::{Order, Transport};
use sumac_hal::ids::Rank;
use sumac_hal::shm::{DeviceUsers, machine};
use sumac_tests::oracle::Shape;

const LONG: Duration = Duration::from_secs(60);

/// Join all ranks of a job, leave, and return the membership of each.
pub(crate) fn memberships(
    cluster: &Cluster,
    job: &str,
    world: u32,
    (order, transport): (Order, Transport),
) -> Vec<Membership> {
    let join = |rank| {
        let request = JoinRequest {
            job: job_name(job),
            rank: Rank(rank),
            world,
            host: None,
            order,
            mesh_addr: ([127, 0, 0, 1], 9).into(),
            recovery_addr: ([127, 0, 0, 1], 9).into(),
            max_packet_len_bytes: 65_000,
            transport,
            machine: machine(),
            device_users: DeviceUsers::own(),
            terms: Terms::default(),
        };
        Session::join(cluster.controller.local_addr(), request, LONG, |_| None).expect("join")
    };
    let joined: Vec<_> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    });
    let leave = |(session, membership): (Session, Membership)| {
        session.leave();
        membership
    };
    joined.into_iter().map(leave).collect()
}

/// Wait until there are no jobs and no groups on any device. Leaving does not wait for the group's removal.
pub(crate) fn wait_until_idle(cluster: &Cluster) {
    let deadline = Instant::now() + LONG;
    loop {
        let report = status(cluster.controller.local_addr()).expect("a report");
        let groups = report.devices.iter().map(|device| device.stats.as_ref().map(|stats| stats.groups));
        // A device on a busy machine may answer late.
        let groups = groups.sum::<Result<u16, _>>();
        if report.jobs.is_empty() && groups == Ok(0) {
            return;
        }
        assert!(Instant::now() < deadline, "{groups:?} groups, {:?}", report.jobs);
        thread::yield_now();
    }
}

/// Return the shape of the tree that the controller builds for a job.
pub(crate) fn shape(cluster: &Cluster, world: u32, order: Order) -> Shape {
    let memberships = memberships(cluster, &format!("shape {order:?}"), world, (order, Transport::Shm));
    let nodes = &memberships[0].expression;
    below(nodes, 0)
}

fn below(nodes: &[Vec<Child>], node: usize) -> Shape {
    let child = |child: &Child| match *child {
        Child::Rank(rank) => Shape::Rank(rank.0 as usize),
        Child::Node(node) => below(nodes, node),
    };
    Shape::Node(nodes[node].iter().map(child).collect())
}
