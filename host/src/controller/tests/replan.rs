//! Lost trees: notification of the ranks, replacement, and refusals.

use super::super::proto::{AbortReason, ClientReply, ClientRequest, StatusReport};
use super::super::state::RECONNECT_GRACE;
use super::*;
use sumac_hal::ids::Epoch;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::shm::DeviceUsers;

/// Longer than any step here takes, and shorter than the controller's timeout for devices.
pub(super) const SOON: Duration = Duration::from_secs(4);

/// A rank's raw connection, driven message by message.
pub(super) struct Raw {
    stream: TcpStream,
    reader: FrameReader<TcpStream>,
}

impl Raw {
    fn join(controller: &Controller, rank: u32, world: u32, devices: &[&str]) -> Self {
        Self::join_with(controller, request(rank, world), devices)
    }

    pub(super) fn join_with(controller: &Controller, request: JoinRequest, devices: &[&str]) -> Self {
        let mut raw = Self::dial(controller);
        let devices = devices.iter().map(|&device| device.to_owned()).collect();
        raw.send(ClientRequest::JoinOn { request, devices });
        raw
    }

    pub(super) fn dial(controller: &Controller) -> Self {
        let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
        stream.set_read_timeout(Some(SOON)).expect("a socket");
        let reader = FrameReader::new(stream.try_clone().expect("a file"));
        send(&mut stream, &Hello::Client).expect("it listens");
        Self { stream, reader }
    }

    pub(super) fn send(&mut self, request: ClientRequest) {
        send(&mut self.stream, &request).expect("it listens");
    }

    /// Receive the next message except offers and queue positions, which any new device may cause.
    pub(super) fn recv(&mut self) -> ClientReply {
        loop {
            match self.recv_any() {
                ClientReply::Offer { .. } | ClientReply::Queued(_) => {}
                reply => return reply,
            }
        }
    }

    /// From now on wait longer than the controller's timeout for devices.
    pub(super) fn extend_timeout(&mut self) {
        self.stream.set_read_timeout(Some(2 * TEST_TIMEOUT)).expect("a socket");
    }

    pub(super) fn recv_any(&mut self) -> ClientReply {
        self.reader.recv().expect("an answer")
    }

    pub(super) fn joined(&mut self) -> Membership {
        let ClientReply::Joined(membership) = self.recv() else { panic!("all have joined") };
        *membership
    }

    pub(super) fn replanned(&mut self) -> (u32, Membership) {
        let reply = self.recv();
        let ClientReply::Replanned { view, membership } = reply else { panic!("all have asked: {reply:?}") };
        (view, *membership)
    }

    /// Receive the refusal of a replan: its view and reason.
    pub(super) fn refused(&mut self) -> (u32, String) {
        let reply = self.recv();
        let ClientReply::ReplanRefused { view, reason } = reply else { panic!("refused: {reply:?}") };
        (view, reason)
    }

    /// Request a report. All earlier requests have been handled by then, and nothing else may arrive before it.
    pub(super) fn report(&mut self) -> StatusReport {
        self.send(ClientRequest::Status);
        let reply = self.recv();
        let ClientReply::Status(report) = reply else { panic!("nothing was to be said: {reply:?}") };
        report
    }
}

pub(super) fn request(rank: u32, world: u32) -> JoinRequest {
    JoinRequest {
        job: "job".into(),
        rank: Rank(rank),
        world,
        host: None,
        order: Order::TreeFold,
        mesh_addr: SocketAddr::from(([127, 0, 0, 1], 1 + rank as u16)),
        recovery_addr: SocketAddr::from(([127, 0, 0, 1], 1 + rank as u16)),
        max_packet_len_bytes: PACKET_LEN,
        transport: Transport::Udp,
        machine: None,
        device_users: DeviceUsers::own(),
        terms: Terms { accepts_migration: true, ..Terms::default() },
    }
}

/// Join a job of `world` ranks, and return their memberships.
pub(super) fn join_all(controller: &Controller, world: u32, devices: &[&str]) -> (Vec<Raw>, Vec<Membership>) {
    let mut ranks: Vec<_> = (0..world).map(|rank| Raw::join(controller, rank, world, devices)).collect();
    let memberships = ranks.iter_mut().map(Raw::joined).collect();
    (ranks, memberships)
}

/// Let all ranks request a replacement for the tree of `view`.
pub(super) fn replan(ranks: &mut [Raw], view: u32) -> Vec<Membership> {
    ranks.iter_mut().for_each(|rank| rank.send(ClientRequest::Replan { view }));
    let told = ranks.iter_mut().map(|rank| {
        let (new, membership) = rank.replanned();
        assert_eq!(new, view + 1);
        membership
    });
    told.collect()
}

pub(super) fn tree_of(membership: &Membership) -> &TreeMembership {
    membership.tree.as_ref().expect("a tree")
}

pub(super) fn no_tree_reason(membership: &Membership) -> &str {
    membership.tree.as_ref().expect_err("no tree")
}

pub(super) fn recv_release(device: &Device) -> GroupId {
    device.released.recv_timeout(TEST_TIMEOUT).expect("an order")
}

/// Disconnect a device, and wait until the controller has noticed.
pub(super) fn disconnect_device(device: Device, controller: &Controller) {
    let devices = || status(controller.local_addr()).expect("a report").devices.len();
    let before = devices();
    device.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
    while devices() == before {
        thread::yield_now();
    }
}

/// Wait until the only job has no tree, and return the reason.
pub(super) fn wait_until_no_tree(controller: &Controller) -> String {
    loop {
        let report = status(controller.local_addr()).expect("a report");
        match report.jobs.into_iter().next().and_then(|job| job.tree) {
            Some(Err(why)) => return why,
            _ => thread::yield_now(),
        }
    }
}

#[test]
fn lost_tree_and_tree_on_a_gone_device_are_reported_as_none() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, _) = join_all(&controller, 2, &[]);
    let tree = |rank: &mut Raw| rank.report().jobs[0].tree.clone().expect("it runs");
    assert!(tree(&mut ranks[0]).is_ok());
    disconnect_device(device, &controller);
    // The ranks are notified after the grace period.
    assert_eq!(tree(&mut ranks[0]), Err("device leaf0 of its tree is not connected".into()));
    let _device = Device::start(&controller, "leaf0", None, None);
    assert!(ranks.iter_mut().all(|rank| rank.recv() == ClientReply::TreeLost { view: 0 }));
    let other = Device::start(&controller, "leaf1", None, None);
    let after = replan(&mut ranks[..], 0);
    assert!(after.iter().all(|membership| membership.tree.is_ok()));
    ranks[0].send(ClientRequest::Suspect { view: 1 });
    assert_eq!(ranks[0].recv(), ClientReply::TreeLost { view: 1 });
    assert_eq!(tree(&mut ranks[0]), Err("its tree is lost".into()));
    drop(other);
}

#[test]
fn replan_moves_the_job_and_releases_the_lost_group() {
    let controller = controller();
    let devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let (mut ranks, before) = join_all(&controller, 3, &[]);
    let after = replan(&mut ranks, 0);
    let group = tree_of(&after[0]).group;
    for (rank, (before, after)) in before.iter().zip(&after).enumerate() {
        let (old, new) = (tree_of(before), tree_of(after));
        assert_eq!((old.leaf.as_str(), new.leaf.as_str()), ("leaf0", "leaf1"));
        assert_eq!((old.epoch.counter, new.epoch), (1, Epoch { counter: 2, ..old.epoch }));
        assert_eq!((usize::from(new.child.0), &after.mesh), (rank, &before.mesh));
        assert!(new.group != old.group && new.group == group && new.key != old.key);
        assert_eq!((&after.secret, &after.expression), (&before.secret, &before.expression));
    }
    let created = devices[1].group();
    assert_eq!((created.group, created.epoch.counter), (group, 2));
    assert_eq!(recv_release(&devices[0]), tree_of(&before[0]).group);
    let job = ranks[0].report().jobs.remove(0);
    let tree = job.tree.expect("running").expect("a tree");
    assert_eq!((job.view, tree.group, tree.devices), (1, group, vec!["leaf1".to_owned()]));
    // And back to the first device, which is eligible again; but only once all ranks have asked again.
    ranks[2].send(ClientRequest::Replan { view: 1 });
    assert_eq!(ranks[2].report().jobs[0].view, 1);
    let third = replan(&mut ranks, 1);
    assert_eq!((tree_of(&third[2]).leaf.as_str(), tree_of(&third[2]).epoch.counter), ("leaf0", 3));
    assert_eq!(recv_release(&devices[1]), group);
}

#[test]
fn unresponsive_device_does_not_delay_the_release_of_a_lost_group() {
    let controller = controller();
    let stopped =
        Device::that_stops_responding(&controller, "leaf0", |request| matches!(request, Request::ReleaseGroup(_)));
    let _other = Device::start(&controller, "leaf1", None, None);
    let (mut ranks, before) = join_all(&controller, 2, &[]);
    let after = replan(&mut ranks, 0);
    assert_eq!(tree_of(&after[0]).leaf, "leaf1");
    let order = stopped.stopped.recv_timeout(TEST_TIMEOUT).expect("an order");
    assert_eq!(order, Request::ReleaseGroup(tree_of(&before[0]).group));
    // While that is not answered, the controller serves all the same.
    ranks[0].send(ClientRequest::Suspect { view: 1 });
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.recv(), ClientReply::TreeLost { view: 1 }));
    for rank in &mut ranks {
        rank.send(ClientRequest::Replan { view: 7 });
        assert_eq!(rank.refused().0, 7);
    }
    stopped.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
}

#[test]
fn unresponsive_device_does_not_delay_a_replan_during_renewal() {
    let config = ControllerConfig { lease: Duration::from_secs(1), ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let stopped =
        Device::that_stops_responding(&controller, "leaf0", |request| matches!(request, Request::RenewGroup(_)));
    let _other = Device::start(&controller, "leaf1", None, None);
    let (mut ranks, before) = join_all(&controller, 2, &[]);
    let renewal = stopped.stopped.recv_timeout(TEST_TIMEOUT).expect("a third of the lease is over");
    assert_eq!(renewal, Request::RenewGroup(tree_of(&before[0]).group));
    // While that is not answered, the job moves.
    assert_eq!(tree_of(&replan(&mut ranks, 0)[0]).leaf, "leaf1");
    stopped.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
}

#[test]
fn replan_without_another_device_yields_no_tree() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, before) = join_all(&controller, 2, &[]);
    let after = replan(&mut ranks, 0);
    for (before, after) in before.iter().zip(&after) {
        let why = no_tree_reason(after);
        assert!(["no device", "lost", "leaf0"].iter().all(|part| why.contains(part)), "{why}");
        let flat = vec![vec![crate::plan::Child::Rank(Rank(0)), crate::plan::Child::Rank(Rank(1))]];
        assert_eq!((&after.secret, &after.mesh, &after.expression), (&before.secret, &before.mesh, &flat));
    }
    assert_eq!(recv_release(&device), tree_of(&before[0]).group);
    let job = ranks[0].report().jobs.remove(0);
    assert!(job.running && job.view == 1 && job.tree.expect("running").is_err());
}

/// Even if the job had no tree in between.
#[test]
fn device_of_a_lost_tree_stays_excluded_in_later_views() {
    let controller = controller();
    let _lost = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, _) = join_all(&controller, 2, &[]);
    assert!(replan(&mut ranks, 0).iter().all(|membership| no_tree_reason(membership).contains("leaf0")));
    let _other = Device::start(&controller, "leaf1", None, None);
    assert!(replan(&mut ranks, 1).iter().all(|membership| tree_of(membership).leaf == "leaf1"));
}

/// The disconnected device was the cause of the loss, so the other one serves all ranks.
#[test]
fn devices_of_a_lost_tree_are_used_again_once_one_disconnects() {
    for is_gone_first in [true, false] {
        let fabric = super::quotas::two_leaves();
        let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a port");
        let _other = Device::start(&controller, "leaf0", None, None);
        let cause = Device::start(&controller, "leaf1", None, None);
        let any_order = |rank| JoinRequest { order: Order::Arrival, ..request(rank, 4) };
        let mut ranks: Vec<Raw> = (0..4).map(|rank| Raw::join_with(&controller, any_order(rank), &[])).collect();
        ranks.iter_mut().for_each(|rank| assert_eq!(tree_of(&rank.joined()).facts.levels, 2));
        let after = if is_gone_first {
            disconnect_device(cause, &controller);
            ranks.iter_mut().for_each(|rank| assert_eq!(rank.recv(), ClientReply::TreeLost { view: 0 }));
            replan(&mut ranks, 0)
        } else {
            let excluded = replan(&mut ranks, 0);
            assert!(no_tree_reason(&excluded[0]).contains("excluded devices (tree lost): leaf0, leaf1"));
            disconnect_device(cause, &controller);
            replan(&mut ranks, 1)
        };
        assert_eq!((tree_of(&after[0]).leaf.as_str(), tree_of(&after[0]).facts.levels), ("leaf0", 1));
    }
}

#[test]
fn restarted_device_is_used_again() {
    for pinned in [&[][..], &["leaf0"]] {
        let controller = controller();
        let first = Device::start(&controller, "leaf0", None, None);
        let (mut ranks, before) = join_all(&controller, 2, pinned);
        disconnect_device(first, &controller);
        let second = Device::start(&controller, "leaf0", None, None);
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.recv(), ClientReply::TreeLost { view: 0 }));
        let after = replan(&mut ranks, 0);
        assert_eq!(tree_of(&after[0]).leaf, "leaf0");
        assert_eq!(second.group().group, tree_of(&after[0]).group);
        assert_ne!(tree_of(&after[0]).group, tree_of(&before[0]).group);
        // The restarted device is not told to release the old group.
        ranks.into_iter().for_each(drop);
        assert_eq!(recv_release(&second), tree_of(&after[0]).group);
    }
}

#[test]
fn pinned_job_has_no_tree_until_its_device_restarts() {
    let controller = controller();
    let first = Device::start(&controller, "leaf1", None, None);
    let _other = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, _) = join_all(&controller, 2, &["leaf1"]);
    let after = replan(&mut ranks, 0);
    let reason = no_tree_reason(&after[1]);
    assert!(reason.starts_with("device leaf1 is pinned, but its tree was lost"), "{reason}");
    disconnect_device(first, &controller);
    let _second = Device::start(&controller, "leaf1", None, None);
    assert_eq!(tree_of(&replan(&mut ranks, 1)[0]).leaf, "leaf1");
}

#[test]
fn released_group_frees_its_resources() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", None, None);
    let _other = Device::start(&controller, "leaf1", None, None);
    let (mut ranks, before) = join_all(&controller, 2, &[]);
    replan(&mut ranks, 0);
    assert_eq!(recv_release(&device), tree_of(&before[0]).group);
    let other = JoinRequest { job: "other".into(), ..request(0, 1) };
    let (_session, membership) = Session::join(controller.local_addr(), other, SOON, |_| None).expect("an answer");
    // Slots for a window of 256 are half of what a device has.
    assert_eq!((tree_of(&membership).leaf.as_str(), tree_of(&membership).window_max), ("leaf0", 256));
}

#[test]
fn replan_for_another_view_is_refused() {
    let controller = controller();
    let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let mut alone = Raw::join(&controller, 0, 2, &[]);
    alone.send(ClientRequest::Replan { view: 0 });
    let (view, reason) = alone.refused();
    assert!(view == 0 && reason.contains("1 of its 2 ranks"), "{reason}");
    let mut ranks = [alone, Raw::join(&controller, 1, 2, &[])];
    ranks.iter_mut().for_each(|rank| drop(rank.joined()));
    ranks[0].send(ClientRequest::Replan { view: 1 });
    assert_eq!(ranks[0].refused(), (1, "job \"job\" is at view 0".into()));
    // A refused request does not count.
    ranks[1].send(ClientRequest::Replan { view: 0 });
    assert_eq!(ranks[1].report().jobs[0].view, 0);
    ranks[0].send(ClientRequest::Replan { view: 0 });
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.replanned().0, 1));
    ranks[1].send(ClientRequest::Replan { view: 0 });
    assert_eq!(ranks[1].refused(), (0, "job \"job\" is at view 1".into()));
    let mut stranger = Raw::join(&controller, 0, 2, &[]);
    assert!(matches!(stranger.recv(), ClientReply::Refused(_)), "the job runs");
    stranger.send(ClientRequest::Replan { view: 1 });
    assert_eq!(stranger.refused(), (1, "no job was joined on this connection".into()));
}

#[test]
fn repeated_replan_request_counts_once() {
    let controller = controller();
    let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let (mut ranks, _) = join_all(&controller, 2, &[]);
    (0..2).for_each(|_| ranks[0].send(ClientRequest::Replan { view: 0 }));
    assert_eq!(ranks[0].report().jobs[0].view, 0);
    ranks[1].send(ClientRequest::Replan { view: 0 });
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.replanned().0, 1));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.report().jobs[0].view, 1));
}

#[test]
fn pending_replan_is_refused_when_a_rank_is_gone() {
    for leaves in [false, true] {
        let controller = controller();
        let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
        let (mut ranks, _) = join_all(&controller, 3, &[]);
        ranks[0].send(ClientRequest::Replan { view: 0 });
        assert_eq!(ranks[0].report().jobs[0].joined, 3);
        let mut last = ranks.pop().expect("three");
        if leaves {
            last.send(ClientRequest::Leave);
            assert_eq!(last.recv(), ClientReply::Left);
        }
        drop(last);
        for rank in (!leaves).then_some(&mut ranks).into_iter().flatten() {
            assert_eq!(rank.recv(), ClientReply::RankLost(Rank(2)));
        }
        let reason = "rank 2 of job \"job\" is gone; a tree needs all ranks";
        assert_eq!(ranks[0].refused(), (0, reason.into()));
        // Later requests get the same refusal.
        ranks[1].send(ClientRequest::Replan { view: 0 });
        assert_eq!(ranks[1].refused(), (0, reason.into()));
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.report().jobs[0].view, 0));
    }
}

#[test]
fn lost_tree_is_notified_once_per_view() {
    let controller = controller();
    let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let mut alone = Raw::join(&controller, 0, 2, &[]);
    alone.send(ClientRequest::Suspect { view: 0 });
    assert!(!alone.report().jobs[0].running);
    let mut ranks = vec![alone, Raw::join(&controller, 1, 2, &[])];
    ranks.iter_mut().for_each(|rank| drop(rank.joined()));
    ranks[1].send(ClientRequest::Suspect { view: 1 });
    ranks[1].report();
    ranks[1].send(ClientRequest::Suspect { view: 0 });
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.recv(), ClientReply::TreeLost { view: 0 }));
    for rank in &mut ranks {
        rank.send(ClientRequest::Suspect { view: 0 });
        rank.report();
    }
    ranks.iter_mut().for_each(|rank| drop(rank.report()));
    replan(&mut ranks, 0);
    for view in [0, 1] {
        ranks[0].send(ClientRequest::Suspect { view });
    }
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.recv(), ClientReply::TreeLost { view: 1 }));
}

/// A device that reconnects in the same incarnation keeps its groups.
#[test]
fn device_gone_beyond_the_grace_period_or_restarted_loses_its_trees() {
    for comes_back in [false, true] {
        let controller = controller();
        let incarnation = announce("leaf0", 1, None);
        let device = Device::serve(&controller, incarnation.clone(), |_| Reply::Done);
        let mut ranks: Vec<_> = (0..2).map(|rank| Raw::join(&controller, rank, 2, &[])).collect();
        ranks.iter_mut().for_each(|rank| assert!(rank.joined().tree.is_ok()));
        device.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
        wait_for_devices(&controller, 0);
        let back = Device::serve(&controller, incarnation, |_| Reply::Done);
        wait_for_devices(&controller, 1);
        let expire = |later: Duration| {
            let mut machine = controller.shared.lock();
            let state = machine.state_mut();
            state.now = state.now + later;
            let next = state.expire_all();
            controller.shared.notifier.wake();
            next
        };
        assert_eq!(expire(2 * RECONNECT_GRACE), None);
        for rank in &mut ranks {
            rank.send(ClientRequest::Status);
            assert!(matches!(rank.recv(), ClientReply::Status(_)));
        }
        back.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
        wait_for_devices(&controller, 0);
        let _next = comes_back.then(|| Device::start(&controller, "leaf0", None, None));
        expire(if comes_back { Duration::ZERO } else { 2 * RECONNECT_GRACE });
        for rank in &mut ranks {
            assert_eq!(rank.recv(), ClientReply::TreeLost { view: 0 });
            rank.send(ClientRequest::Status);
            assert!(matches!(rank.recv(), ClientReply::Status(_)), "it is said once");
        }
    }
}

/// Wait until `count` devices are connected.
fn wait_for_devices(controller: &Controller, count: usize) {
    while status(controller.local_addr()).expect("a report").devices.len() != count {
        thread::yield_now();
    }
}

/// A rank that reaches a mismatch after the others are gone learns why.
#[test]
fn abort_is_notified_once_and_before_lost_ranks() {
    let controller = controller();
    let mut early = Raw::join(&controller, 0, 3, &[]);
    let desc = |count| OpDesc::all_reduce(Dtype::I64, ReduceOp::Sum, count);
    let over = |count| AbortReason::Mismatch { first: desc(count), other: desc(count + 1) };
    // An abort before the job has started is ignored.
    early.send(ClientRequest::Abort(over(1)));
    early.report();
    let mut ranks = vec![early, Raw::join(&controller, 1, 3, &[]), Raw::join(&controller, 2, 3, &[])];
    ranks.iter_mut().for_each(|rank| drop(rank.joined()));
    ranks[0].send(ClientRequest::Abort(over(2)));
    ranks[..2].iter_mut().for_each(|rank| assert_eq!(rank.recv(), ClientReply::Aborted(over(2))));
    ranks[1].send(ClientRequest::Abort(over(3)));
    ranks[1].report();
    let mut late = ranks.pop().expect("three");
    drop(ranks);
    assert_eq!(late.recv(), ClientReply::Aborted(over(2)));
    let mut lost = [late.recv(), late.recv()];
    lost.sort_by_key(|reply| format!("{reply:?}"));
    assert_eq!(lost, [0, 1].map(|rank| ClientReply::RankLost(Rank(rank))));
}
