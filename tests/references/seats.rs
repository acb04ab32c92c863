//! Ranks that only join: what a controller gives to jobs of some shape.

use crate::common::{Cluster, job_name};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JoinRequest, Membership, Terms};
use sumac::controller::{Session, status};
use sumac::plan::Child;
use sumac::{Attach, Order};
use sumac_hal::ids::Rank;
use sumac_hal::shm::{DeviceUsers, machine};
use sumac_tests::oracle::Shape;

const LONG: Duration = Duration::from_secs(20);

/// Join all ranks of a job, ask what each was given, and leave.
pub(crate) fn memberships(
    cluster: &Cluster,
    job: &str,
    world: u32,
    (order, attach): (Order, Attach),
) -> Vec<Membership> {
    let join = |rank| {
        let request = JoinRequest {
            job: job_name(job),
            rank: Rank(rank),
            world,
            host: None,
            order,
            mesh_addr: ([127, 0, 0, 1], 9).into(),
            repair_addr: ([127, 0, 0, 1], 9).into(),
            max_packet_len_bytes: 65_000,
            attach,
            machine: machine(),
            device_users: DeviceUsers::own(),
            terms: Terms::default(),
        };
        Session::join(cluster.controller.local_addr(), request, LONG, |_| None).expect("join")
    };
    let seats: Vec<_> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
    });
    let left = |(session, membership): (Session, Membership)| {
        session.leave();
        membership
    };
    seats.into_iter().map(left).collect()
}

/// Wait until no job is left, and no group on any device: ranks do not wait for that when they leave.
pub(crate) fn wait_until_idle(cluster: &Cluster) {
    let deadline = Instant::now() + LONG;
    loop {
        let report = status(cluster.controller.local_addr()).expect("a report");
        let groups = report.devices.iter().map(|device| device.stats.as_ref().map(|stats| stats.groups));
        let groups: u16 = groups.sum::<Result<u16, _>>().expect("devices that answer");
        if report.jobs.is_empty() && groups == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "{groups} groups, {:?}", report.jobs);
        thread::yield_now();
    }
}

/// Return the tree that a job gets.
pub(crate) fn shape(cluster: &Cluster, world: u32, order: Order) -> Shape {
    let memberships = memberships(cluster, &format!("shape {order:?}"), world, (order, Attach::Shm));
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
