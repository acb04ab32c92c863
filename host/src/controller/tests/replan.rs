//! Jobs whose tree is lost: who is told, what they get instead, and when not.

use super::super::proto::{ClientReply, ClientRequest, Over, StatusReport};
use super::super::state::ABSENCE;
use super::super::{ClientError, Notice};
use super::*;
use std::time::Instant;
use sumac_hal::ids::Epoch;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::shm::DeviceUsers;

/// Longer than anything here takes, and shorter than a controller waits for a device.
pub(super) const SOON: Duration = Duration::from_secs(4);

/// One rank's end of its connection, each message by hand.
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
        raw.say(ClientRequest::JoinOn { request, devices });
        raw
    }

    pub(super) fn dial(controller: &Controller) -> Self {
        let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
        stream.set_read_timeout(Some(SOON)).expect("a socket");
        let reader = FrameReader::new(stream.try_clone().expect("a file"));
        send(&mut stream, &Greeting::Client).expect("it listens");
        Self { stream, reader }
    }

    pub(super) fn say(&mut self, request: ClientRequest) {
        send(&mut self.stream, &request).expect("it listens");
    }

    /// Return what is said next, but offers and places in the queue: a device that comes may be one for a job without a
    /// tree.
    pub(super) fn hear(&mut self) -> ClientReply {
        loop {
            match self.hear_all() {
                ClientReply::Offer { .. } | ClientReply::Queued(_) => {}
                reply => return reply,
            }
        }
    }

    /// Wait longer from now on than for a device that does not answer.
    pub(super) fn patient(&mut self) {
        self.stream.set_read_timeout(Some(2 * GREETING_TIMEOUT)).expect("a socket");
    }

    pub(super) fn hear_all(&mut self) -> ClientReply {
        self.reader.recv().expect("an answer")
    }

    pub(super) fn joined(&mut self) -> Membership {
        let ClientReply::Joined(membership) = self.hear() else { panic!("all have joined") };
        *membership
    }

    pub(super) fn replanned(&mut self) -> (u32, Membership) {
        let reply = self.hear();
        let ClientReply::Replanned { view, membership } = reply else { panic!("all have asked: {reply:?}") };
        (view, *membership)
    }

    /// Return the view that another tree was refused for, and why.
    pub(super) fn refused(&mut self) -> (u32, String) {
        let reply = self.hear();
        let ClientReply::NotReplanned { view, reason } = reply else { panic!("refused: {reply:?}") };
        (view, reason)
    }

    /// Return the controller's state, once it has done what this rank asked before. Nothing else was said.
    pub(super) fn report(&mut self) -> StatusReport {
        self.say(ClientRequest::Status);
        let reply = self.hear();
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
        repair_addr: SocketAddr::from(([127, 0, 0, 1], 1 + rank as u16)),
        max_packet_len_bytes: PACKET_LEN,
        attach: Attach::Udp,
        machine: None,
        device_users: DeviceUsers::own(),
        terms: Terms { moves: true, ..Terms::default() },
    }
}

/// Join a job of `world` ranks, and return what each was told.
pub(super) fn begin(controller: &Controller, world: u32, devices: &[&str]) -> (Vec<Raw>, Vec<Membership>) {
    let mut ranks: Vec<_> = (0..world).map(|rank| Raw::join(controller, rank, world, devices)).collect();
    let memberships = ranks.iter_mut().map(Raw::joined).collect();
    (ranks, memberships)
}

/// Let all ranks ask for another tree than that of `view`.
pub(super) fn replan(ranks: &mut [Raw], view: u32) -> Vec<Membership> {
    ranks.iter_mut().for_each(|rank| rank.say(ClientRequest::Replan { view }));
    let told = ranks.iter_mut().map(|rank| {
        let (new, membership) = rank.replanned();
        assert_eq!(new, view + 1);
        membership
    });
    told.collect()
}

pub(super) fn of(membership: &Membership) -> &TreeMembership {
    membership.tree.as_ref().expect("a tree")
}

pub(super) fn why(membership: &Membership) -> &str {
    membership.tree.as_ref().expect_err("no tree")
}

pub(super) fn released(device: &Device) -> GroupId {
    device.released.recv_timeout(GREETING_TIMEOUT).expect("an order")
}

/// End a device, and wait until the controller knows.
pub(super) fn end(device: Device, controller: &Controller) {
    let devices = || status(controller.local_addr()).expect("a report").devices.len();
    let before = devices();
    device.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
    while devices() == before {
        thread::yield_now();
    }
}

#[test]
fn report_shows_no_tree_that_is_lost_or_of_a_device_that_is_gone() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, _) = begin(&controller, 2, &[]);
    let tree = |rank: &mut Raw| rank.report().jobs[0].tree.clone().expect("it runs");
    assert!(tree(&mut ranks[0]).is_ok());
    end(device, &controller);
    // The ranks have a second to find out.
    assert_eq!(tree(&mut ranks[0]), Err("device leaf0 of its tree is not connected".into()));
    let _device = Device::start(&controller, "leaf0", None, None);
    assert!(ranks.iter_mut().all(|rank| rank.hear() == ClientReply::Repair { view: 0 }));
    let other = Device::start(&controller, "leaf1", None, None);
    let after = replan(&mut ranks[..], 0);
    assert!(after.iter().all(|membership| membership.tree.is_ok()));
    ranks[0].say(ClientRequest::Suspect { view: 1 });
    assert_eq!(ranks[0].hear(), ClientReply::Repair { view: 1 });
    assert_eq!(tree(&mut ranks[0]), Err("its tree is lost".into()));
    drop(other);
}

#[test]
fn a_job_moves_to_the_other_device_and_the_first_one_is_freed() {
    let controller = controller();
    let devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let (mut ranks, before) = begin(&controller, 3, &[]);
    let after = replan(&mut ranks, 0);
    let group = of(&after[0]).group;
    for (rank, (before, after)) in before.iter().zip(&after).enumerate() {
        let (old, new) = (of(before), of(after));
        assert_eq!((old.leaf.as_str(), new.leaf.as_str()), ("leaf0", "leaf1"));
        assert_eq!((old.epoch.counter, new.epoch), (1, Epoch { counter: 2, ..old.epoch }));
        assert_eq!((usize::from(new.child.0), &after.mesh), (rank, &before.mesh));
        assert!(new.group != old.group && new.group == group && new.key != old.key);
        assert_eq!((after.mesh_token, &after.expression), (before.mesh_token, &before.expression));
    }
    let created = devices[1].group();
    assert_eq!((created.group, created.epoch.counter), (group, 2));
    assert_eq!(released(&devices[0]), of(&before[0]).group);
    let job = ranks[0].report().jobs.remove(0);
    let tree = job.tree.expect("running").expect("a tree");
    assert_eq!((job.view, tree.group, tree.devices), (1, group, vec!["leaf1".to_owned()]));
    // And from there to the first one, which is lost no more than any other; not before all have asked anew.
    ranks[2].say(ClientRequest::Replan { view: 1 });
    assert_eq!(ranks[2].report().jobs[0].view, 1);
    let third = replan(&mut ranks, 1);
    assert_eq!((of(&third[2]).leaf.as_str(), of(&third[2]).epoch.counter), ("leaf0", 3));
    assert_eq!(released(&devices[1]), group);
}

#[test]
fn nobody_waits_for_a_device_that_has_stopped_to_free_the_lost_group() {
    let controller = controller();
    let stopped = Device::that_stops(&controller, "leaf0", |request| matches!(request, Request::ReleaseGroup(_)));
    let _other = Device::start(&controller, "leaf1", None, None);
    let (mut ranks, before) = begin(&controller, 2, &[]);
    let after = replan(&mut ranks, 0);
    assert_eq!(of(&after[0]).leaf, "leaf1");
    let order = stopped.stopped.recv_timeout(GREETING_TIMEOUT).expect("an order");
    assert_eq!(order, Request::ReleaseGroup(of(&before[0]).group));
    // While that is not answered, the controller serves all the same.
    ranks[0].say(ClientRequest::Suspect { view: 1 });
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), ClientReply::Repair { view: 1 }));
    for rank in &mut ranks {
        rank.say(ClientRequest::Replan { view: 7 });
        assert_eq!(rank.refused().0, 7);
    }
    stopped.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
}

#[test]
fn nobody_waits_for_a_device_that_has_stopped_to_renew_a_lease() {
    let config = ControllerConfig { lease: Duration::from_secs(1), ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let stopped = Device::that_stops(&controller, "leaf0", |request| matches!(request, Request::RenewGroup(_)));
    let _other = Device::start(&controller, "leaf1", None, None);
    let (mut ranks, before) = begin(&controller, 2, &[]);
    let renewal = stopped.stopped.recv_timeout(GREETING_TIMEOUT).expect("a third of the lease is over");
    assert_eq!(renewal, Request::RenewGroup(of(&before[0]).group));
    // While that is not answered, the job moves.
    assert_eq!(of(&replan(&mut ranks, 0)[0]).leaf, "leaf1");
    stopped.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
}

#[test]
fn a_job_has_no_tree_where_only_the_lost_one_s_device_is_there() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, before) = begin(&controller, 2, &[]);
    let after = replan(&mut ranks, 0);
    for (before, after) in before.iter().zip(&after) {
        let why = why(after);
        assert!(["no device", "lost", "leaf0"].iter().all(|part| why.contains(part)), "{why}");
        let flat = vec![vec![crate::plan::Child::Rank(Rank(0)), crate::plan::Child::Rank(Rank(1))]];
        assert_eq!((after.mesh_token, &after.mesh, &after.expression), (before.mesh_token, &before.mesh, &flat));
    }
    assert_eq!(released(&device), of(&before[0]).group);
    let job = ranks[0].report().jobs.remove(0);
    assert!(job.running && job.view == 1 && job.tree.expect("running").is_err());
}

/// Also where the job had no tree in between.
#[test]
fn a_device_whose_tree_is_lost_is_not_asked_while_it_lives() {
    let controller = controller();
    let _lost = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, _) = begin(&controller, 2, &[]);
    assert!(replan(&mut ranks, 0).iter().all(|membership| why(membership).contains("leaf0")));
    let _other = Device::start(&controller, "leaf1", None, None);
    assert!(replan(&mut ranks, 1).iter().all(|membership| of(membership).leaf == "leaf1"));
}

#[test]
fn a_device_that_restarted_is_taken_again() {
    for pinned in [&[][..], &["leaf0"]] {
        let controller = controller();
        let first = Device::start(&controller, "leaf0", None, None);
        let (mut ranks, before) = begin(&controller, 2, pinned);
        end(first, &controller);
        let second = Device::start(&controller, "leaf0", None, None);
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), ClientReply::Repair { view: 0 }));
        let after = replan(&mut ranks, 0);
        assert_eq!(of(&after[0]).leaf, "leaf0");
        assert_eq!(second.group().group, of(&after[0]).group);
        assert_ne!(of(&after[0]).group, of(&before[0]).group);
        // Whoever greets again has no groups: the old one is no business of it.
        ranks.into_iter().for_each(drop);
        assert_eq!(released(&second), of(&after[0]).group);
    }
}

#[test]
fn a_pinned_job_stays_without_a_tree_until_its_device_restarts() {
    let controller = controller();
    let first = Device::start(&controller, "leaf1", None, None);
    let _other = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, _) = begin(&controller, 2, &["leaf1"]);
    let after = replan(&mut ranks, 0);
    let reason = why(&after[1]);
    assert!(reason.starts_with("device leaf1 is pinned, and the tree there is lost"), "{reason}");
    end(first, &controller);
    let _second = Device::start(&controller, "leaf1", None, None);
    assert_eq!(of(&replan(&mut ranks, 1)[0]).leaf, "leaf1");
}

#[test]
fn what_a_job_left_counts_against_nothing() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", None, None);
    let _other = Device::start(&controller, "leaf1", None, None);
    let (mut ranks, before) = begin(&controller, 2, &[]);
    replan(&mut ranks, 0);
    assert_eq!(released(&device), of(&before[0]).group);
    let other = JoinRequest { job: "other".into(), ..request(0, 1) };
    let (_session, membership) = Session::join(controller.local_addr(), other, SOON, |_| None).expect("an answer");
    // Slots for a window of 256 are half of what a device has.
    assert_eq!((of(&membership).leaf.as_str(), of(&membership).window_max), ("leaf0", 256));
}

#[test]
fn a_view_that_is_not_the_jobs_is_refused_at_once() {
    let controller = controller();
    let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let mut alone = Raw::join(&controller, 0, 2, &[]);
    alone.say(ClientRequest::Replan { view: 0 });
    let (view, reason) = alone.refused();
    assert!(view == 0 && reason.contains("1 of its 2 ranks"), "{reason}");
    let mut ranks = [alone, Raw::join(&controller, 1, 2, &[])];
    ranks.iter_mut().for_each(|rank| drop(rank.joined()));
    ranks[0].say(ClientRequest::Replan { view: 1 });
    assert_eq!(ranks[0].refused(), (1, "job \"job\" is at view 0".into()));
    // Who was refused has not asked.
    ranks[1].say(ClientRequest::Replan { view: 0 });
    assert_eq!(ranks[1].report().jobs[0].view, 0);
    ranks[0].say(ClientRequest::Replan { view: 0 });
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.replanned().0, 1));
    ranks[1].say(ClientRequest::Replan { view: 0 });
    assert_eq!(ranks[1].refused(), (0, "job \"job\" is at view 1".into()));
    let mut stranger = Raw::join(&controller, 0, 2, &[]);
    assert!(matches!(stranger.hear(), ClientReply::Refused(_)), "the job runs");
    stranger.say(ClientRequest::Replan { view: 1 });
    assert_eq!(stranger.refused(), (1, "no job was joined on this connection".into()));
}

#[test]
fn who_asks_twice_is_one_rank() {
    let controller = controller();
    let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let (mut ranks, _) = begin(&controller, 2, &[]);
    (0..2).for_each(|_| ranks[0].say(ClientRequest::Replan { view: 0 }));
    assert_eq!(ranks[0].report().jobs[0].view, 0);
    ranks[1].say(ClientRequest::Replan { view: 0 });
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.replanned().0, 1));
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.report().jobs[0].view, 1));
}

#[test]
fn ranks_that_wait_hear_of_one_that_is_gone() {
    for leaves in [false, true] {
        let controller = controller();
        let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
        let (mut ranks, _) = begin(&controller, 3, &[]);
        ranks[0].say(ClientRequest::Replan { view: 0 });
        assert_eq!(ranks[0].report().jobs[0].joined, 3);
        let mut last = ranks.pop().expect("three");
        if leaves {
            last.say(ClientRequest::Leave);
            assert_eq!(last.hear(), ClientReply::Left);
        }
        drop(last);
        for rank in (!leaves).then_some(&mut ranks).into_iter().flatten() {
            assert_eq!(rank.hear(), ClientReply::RankLost(Rank(2)));
        }
        let reason = "rank 2 of job \"job\" is gone, and a tree is for all its ranks";
        assert_eq!(ranks[0].refused(), (0, reason.into()));
        // And so it is for who comes later.
        ranks[1].say(ClientRequest::Replan { view: 0 });
        assert_eq!(ranks[1].refused(), (0, reason.into()));
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.report().jobs[0].view, 0));
    }
}

#[test]
fn all_ranks_are_told_once_that_a_tree_is_lost() {
    let controller = controller();
    let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let mut alone = Raw::join(&controller, 0, 2, &[]);
    alone.say(ClientRequest::Suspect { view: 0 });
    assert!(!alone.report().jobs[0].running);
    let mut ranks = vec![alone, Raw::join(&controller, 1, 2, &[])];
    ranks.iter_mut().for_each(|rank| drop(rank.joined()));
    ranks[1].say(ClientRequest::Suspect { view: 1 });
    ranks[1].report();
    ranks[1].say(ClientRequest::Suspect { view: 0 });
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), ClientReply::Repair { view: 0 }));
    for rank in &mut ranks {
        rank.say(ClientRequest::Suspect { view: 0 });
        rank.report();
    }
    ranks.iter_mut().for_each(|rank| drop(rank.report()));
    replan(&mut ranks, 0);
    for view in [0, 1] {
        ranks[0].say(ClientRequest::Suspect { view });
    }
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.hear(), ClientReply::Repair { view: 1 }));
}

/// Wait until the only job has no tree, and return why.
pub(super) fn until_without(controller: &Controller) -> String {
    loop {
        let report = status(controller.local_addr()).expect("a report");
        match report.jobs.into_iter().next().and_then(|job| job.tree) {
            Some(Err(why)) => return why,
            _ => thread::yield_now(),
        }
    }
}

#[test]
fn sessions_hear_of_a_lost_tree_and_get_another_one() {
    let controller = controller();
    let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let addr = controller.local_addr();
    let (told, notices) = channel();
    let joining: Vec<_> = (0..2)
        .map(|rank| {
            let told = told.clone();
            let told = move |notice| {
                if !matches!(notice, Notice::Withdrawn | Notice::Queued(_) | Notice::ControllerLost) {
                    told.send((rank, notice)).expect("somebody listens");
                }
                None
            };
            thread::spawn(move || Session::join(addr, request(rank, 2), SOON, told).expect("an answer"))
        })
        .collect();
    let ranks: Vec<_> = joining.into_iter().map(|rank| rank.join().expect("no panic")).collect();
    ranks[1].0.suspect(0);
    let mut heard = [(); 2].map(|()| notices.recv_timeout(SOON).expect("a notice"));
    heard.sort_by_key(|(rank, _)| *rank);
    assert_eq!(heard, [0, 1].map(|rank| (rank, Notice::Repair { view: 0 })));
    // Before its time is up the other one is not there. Its wish stands, but it does not wait for the tree any more: that is
    // no tree for the job.
    let error = ranks[0].0.replan(0, Instant::now()).expect_err("alone");
    assert!(matches!(error, ClientError::ReplanTimeout { view: 0, .. }), "{error}");
    let later = Instant::now() + SOON;
    let second = ranks[1].0.replan(0, later).expect("all have asked");
    assert_eq!(of(&second).leaf, "leaf1");
    let declined = until_without(&controller);
    assert_eq!(declined, "rank 0 declined its tree: it came too late for a rank");
    let error = ranks[0].0.replan(0, later).expect_err("stale").to_string();
    assert_eq!(error, "no other tree than that of view 0: job \"job\" is at view 1");
    thread::scope(|scope| {
        let first = scope.spawn(|| ranks[0].0.replan(1, later));
        let second = ranks[1].0.replan(1, later).expect("all have asked");
        let first = first.join().expect("no panic").expect("all have asked");
        assert_eq!([&first, &second].map(|membership| of(membership).epoch.counter), [3; 2]);
    });
    let error = ranks[0].0.replan(1, later).expect_err("stale").to_string();
    assert_eq!(error, "no other tree than that of view 1: job \"job\" is at view 2");
}

/// A controller that answers one Join, and each Replan with what it is given, and then is gone.
fn scripted(answers: Vec<ClientReply>) -> (SocketAddr, thread::JoinHandle<()>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let addr = listener.local_addr().expect("bound");
    let serve = move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
        assert_eq!(reader.recv::<Greeting>().expect("a greeting"), Greeting::Client);
        assert!(matches!(reader.recv(), Ok(ClientRequest::Join(_))));
        send(&mut stream, &ClientReply::Joined(Box::new(nowhere(1)))).expect("a client");
        assert_eq!(reader.recv::<ClientRequest>().expect("a wish"), ClientRequest::Replan { view: 3 });
        answers.iter().for_each(|answer| send(&mut stream, answer).expect("a client"));
    };
    (addr, thread::spawn(serve))
}

fn nowhere(mesh_token: u64) -> Membership {
    let table = crate::select::CostTable::EMULATED;
    Membership {
        tree: Err("none".into()),
        queue: None,
        mesh: Vec::new(),
        repair_mesh: Vec::new(),
        mesh_token,
        expression: Vec::new(),
        table,
    }
}

#[test]
fn answers_of_other_views_are_dropped() {
    let replanned = |view| ClientReply::Replanned { view, membership: Box::new(nowhere(view.into())) };
    let stale = ClientReply::NotReplanned { view: 2, reason: "stale".into() };
    let (addr, serving) = scripted(vec![replanned(0), stale, replanned(3), replanned(5), replanned(4)]);
    let (session, _) = Session::join(addr, request(0, 1), SOON, |_| None).expect("an answer");
    assert_eq!(session.replan(3, Instant::now() + SOON).expect("an answer").mesh_token, 4);
    serving.join().expect("as scripted");
}

#[test]
fn a_controller_that_is_gone_ends_the_wait() {
    fn shared<T: Send + Sync>(session: T) -> T {
        session
    }
    let (addr, serving) = scripted(Vec::new());
    let (session, _) = Session::join(addr, request(0, 1), SOON, |_| None).expect("an answer");
    let session = shared(session);
    // The deadline is beyond what the test may take.
    let error = session.replan(3, Instant::now() + Duration::from_secs(3600)).expect_err("it is gone");
    assert!(matches!(error, ClientError::Ended { view: 3 }), "{error}");
    serving.join().expect("as scripted");
    // Nobody hears it, and nobody needs to.
    session.suspect(3);
}

/// A connection that breaks is no death: a device that is back in the same life has its groups.
#[test]
fn a_device_that_stays_away_or_comes_in_another_life_has_lost_its_trees() {
    for comes_back in [false, true] {
        let controller = controller();
        let life = announce("leaf0", 1, None);
        let device = Device::serve(&controller, life.clone(), |_| Reply::Yes);
        let mut ranks: Vec<_> = (0..2).map(|rank| Raw::join(&controller, rank, 2, &[])).collect();
        ranks.iter_mut().for_each(|rank| assert!(rank.joined().tree.is_ok()));
        device.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
        until_devices(&controller, 0);
        let back = Device::serve(&controller, life, |_| Reply::Yes);
        until_devices(&controller, 1);
        let expire = |later: Duration| {
            let mut state = controller.shared.lock();
            state.now += later;
            state.expire_all()
        };
        assert_eq!(expire(2 * ABSENCE), None);
        for rank in &mut ranks {
            rank.say(ClientRequest::Status);
            assert!(matches!(rank.hear(), ClientReply::Status(_)));
        }
        back.stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
        until_devices(&controller, 0);
        let _next = comes_back.then(|| Device::start(&controller, "leaf0", None, None));
        expire(if comes_back { Duration::ZERO } else { 2 * ABSENCE });
        for rank in &mut ranks {
            assert_eq!(rank.hear(), ClientReply::Repair { view: 0 });
            rank.say(ClientRequest::Status);
            assert!(matches!(rank.hear(), ClientReply::Status(_)), "it is said once");
        }
    }
}

/// Wait until so many devices are connected.
fn until_devices(controller: &Controller, count: usize) {
    while status(controller.local_addr()).expect("a report").devices.len() != count {
        thread::yield_now();
    }
}

/// A rank that comes to a mismatch when the others are gone hears why they are.
#[test]
fn all_other_ranks_are_told_once_why_a_job_is_over_and_before_they_hear_of_deaths() {
    let controller = controller();
    let mut early = Raw::join(&controller, 0, 3, &[]);
    let desc = |count| OpDesc::all_reduce(Dtype::I64, ReduceOp::Sum, count);
    let over = |count| Over::Mismatch { first: desc(count), other: desc(count + 1) };
    // Before it has begun, nothing is over.
    early.say(ClientRequest::Over(over(1)));
    early.report();
    let mut ranks = vec![early, Raw::join(&controller, 1, 3, &[]), Raw::join(&controller, 2, 3, &[])];
    ranks.iter_mut().for_each(|rank| drop(rank.joined()));
    ranks[0].say(ClientRequest::Over(over(2)));
    ranks[..2].iter_mut().for_each(|rank| assert_eq!(rank.hear(), ClientReply::Over(over(2))));
    ranks[1].say(ClientRequest::Over(over(3)));
    ranks[1].report();
    let mut late = ranks.pop().expect("three");
    drop(ranks);
    assert_eq!(late.hear(), ClientReply::Over(over(2)));
    let mut lost = [late.hear(), late.hear()];
    lost.sort_by_key(|reply| format!("{reply:?}"));
    assert_eq!(lost, [0, 1].map(|rank| ClientReply::RankLost(Rank(rank))));
}
