//! Changes between a plan's snapshot and its result: the state machine step by step, without threads.

use super::super::device::{Device, DeviceError, OnTimeout, REPLY_TIMEOUT};
use super::super::machine::{ConnId, Frames, Output};
use super::super::proto::{ClientReply, JobStatus};
use super::super::state::{Draft, Purpose, ReservationFailure, State};
use super::replan::request;
use super::{Entropy, HERE, announce};
use crate::controller::ControllerConfig;
use crate::controller::proto::{JoinRequest, Terms};
use crate::topo::Fabric;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::{Counters, Envelope, FrameBuffer, Refusal, Request, Response, Stats};
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

struct Steps {
    state: State,
    config: ControllerConfig,
    conns: u64,
}

impl Steps {
    fn new() -> Self {
        let config = ControllerConfig::new();
        Self { state: State::new(&config, 1, Entropy::System, Instant::ZERO), config, conns: 0 }
    }

    fn conn(&mut self) -> ConnId {
        self.conns += 1;
        ConnId(self.conns)
    }

    /// Connect a device with room for one group.
    fn add_device(&mut self, name: &str) -> Arc<Device> {
        let mut announce = announce(name, 1, None);
        announce.capabilities.groups = 1;
        let device = Arc::new(Device { conn: self.conn(), announce });
        self.state.add_device(&self.config, &device).expect("there is room");
        device
    }

    fn join(&mut self, job: &str, place: (u32, u32), wait_ms: u32) -> ConnId {
        self.join_on(&[], job, place, wait_ms)
    }

    fn join_on(&mut self, devices: &[&str], job: &str, (rank, world): (u32, u32), wait_ms: u32) -> ConnId {
        let client = self.conn();
        let terms = Terms { accepts_migration: true, wait_ms, ..Terms::default() };
        let request = JoinRequest { job: job.into(), terms, ..request(rank, world) };
        let pinned = devices.iter().map(|&device| device.to_owned()).collect();
        self.state.join(&self.config, request, pinned, client).expect("it may");
        client
    }

    /// Answer all requests of exchanges with `response`.
    fn answer(&mut self, device: &Device, response: &Response) {
        // The ids of the requests are unknown, so answer all.
        (0..100).for_each(|id| {
            self.state.links.handle_response(device.conn, Envelope { id, message: response.clone() });
        });
        self.proceed();
    }

    fn proceed(&mut self) {
        while let Some((purpose, replies)) = self.state.links.poll_finished() {
            self.state.proceed(&self.config, purpose, replies);
        }
    }

    fn next_draft(&mut self) -> Draft {
        self.state.ready.pop_front().expect("a draft")
    }

    fn plan(&mut self) {
        while let Some(plan) = self.state.next_plan() {
            let apply_plan = plan.run(&self.config);
            self.state.apply_plan(&self.config, apply_plan);
        }
    }

    /// All devices accept the pending drafts.
    fn settle(&mut self) {
        while let Some(draft) = self.state.ready.pop_front() {
            let others = self.state.ready.len();
            self.state.finish_reservation(&self.config, draft, Ok(()));
            assert_eq!(self.state.ready.len(), others);
        }
    }

    /// A round of renewals without responses.
    fn renew(&mut self) {
        self.state.start_lease_round();
        self.state.now = self.state.now + REPLY_TIMEOUT;
        self.state.links.expire(self.state.now);
        self.proceed();
    }

    fn job(&self, name: &str) -> JobStatus {
        let report = self.state.report(&self.config).without_devices();
        report.jobs.into_iter().find(|job| job.name == name).expect("it is there")
    }
}

#[test]
fn job_placed_during_its_queue_plan_is_not_queued() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let first = steps.join("first", (0, 1), 0);
    steps.plan();
    steps.settle();
    let _next = steps.join("next", (0, 1), 60_000);
    steps.plan();
    assert!(steps.job("next").queue.is_some(), "the only place is taken");
    steps.state.depart(("first", Rank(0)), first, true);
    let serves = steps.state.next_plan().expect("there is a place");
    // Connects during the plan, and makes all waiting jobs be reconsidered.
    steps.add_device("leaf1");
    let served = serves.run(&steps.config);
    steps.state.apply_plan(&steps.config, served);
    let enters = steps.state.next_plan();
    steps.settle();
    if let Some(enters) = enters {
        let entered = enters.run(&steps.config);
        steps.state.apply_plan(&steps.config, entered);
    }
    steps.plan();
    let next = steps.job("next");
    assert!(matches!(next.tree, Some(Ok(_))), "{next:?}");
    assert_eq!((next.queue, next.is_offered), (None, false), "it has a tree");
}

#[test]
fn stale_queue_plan_does_not_queue_a_new_job_of_that_name() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let _first = steps.join("first", (0, 1), 0);
    steps.plan();
    steps.settle();
    let next = steps.join("next", (0, 1), 0);
    let sought = steps.state.next_plan().expect("all are there").run(&steps.config);
    steps.state.apply_plan(&steps.config, sought);
    let enters = steps.state.next_plan().expect("it runs without a tree");
    steps.state.depart(("next", Rank(0)), next, true);
    let _other = steps.join("next", (0, 2), 0);
    let entered = enters.run(&steps.config);
    steps.state.apply_plan(&steps.config, entered);
    steps.plan();
    assert_eq!(steps.job("next").queue, None, "it has not begun");
}

#[test]
fn ranks_lost_together_are_notified_in_one_entry() {
    let mut steps = Steps::new();
    let left = steps.join("job", (0, 100), 0);
    let others: Vec<_> = (1..100).map(|rank| (steps.join("job", (rank, 100), 0), rank)).collect();
    steps.plan();
    while steps.state.output.pop().is_some() {}
    let gone = others.into_iter().map(|(client, rank)| (client, ("job".to_owned(), Rank(rank))));
    steps.state.depart_all(gone.collect(), false);
    let outputs = std::iter::from_fn(|| steps.state.output.pop()).filter(|(conn, _)| *conn == left);
    let puts: Vec<Vec<u8>> = outputs
        .map(|(_, output)| match output {
            Output::Frames(parts) => parts.iter().map(Frames::bytes).collect::<Vec<_>>().concat(),
            Output::Close => panic!("it is there"),
        })
        .collect();
    assert_eq!(puts.len(), 1, "one entry of its queue for all");
    let mut told = FrameBuffer::new(1 << 20);
    told.push(&puts[0]);
    for rank in 1..100 {
        let reply = told.take_message::<ClientReply>().expect("frames");
        assert_eq!(reply, Some(ClientReply::RankLost(Rank(rank))));
    }
}

#[test]
fn job_that_times_out_as_resources_are_freed_precedes_later_jobs() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let first = steps.join("first", (0, 1), 0);
    steps.plan();
    steps.settle();
    let _early = steps.join("early", (0, 1), 300);
    steps.plan();
    let _later = steps.join("later", (0, 1), 60_000);
    steps.plan();
    steps.state.now = steps.state.now + Duration::from_secs(1);
    steps.state.expire_all();
    steps.state.depart(("first", Rank(0)), first, true);
    steps.plan();
    steps.settle();
    let (early, later) = (steps.job("early"), steps.job("later"));
    assert!(early.is_offered, "{early:?}");
    assert!(later.queue.is_some() && later.tree.is_none(), "{later:?}");
}

#[test]
fn resources_freed_during_a_plan_go_to_the_earlier_job() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    steps.add_device("leaf1");
    let on0 = steps.join_on(&["leaf0"], "on0", (0, 1), 0);
    let on1 = steps.join_on(&["leaf1"], "on1", (0, 1), 0);
    steps.plan();
    steps.settle();
    let _early = steps.join_on(&["leaf0", "leaf1"], "early", (0, 1), 60_000);
    steps.plan();
    let _later = steps.join_on(&["leaf1"], "later", (0, 1), 60_000);
    steps.plan();
    steps.state.depart(("on1", Rank(0)), on1, true);
    // The early job does not fit, the later one does.
    let none = steps.state.next_plan().expect("there is a place").run(&steps.config);
    steps.state.apply_plan(&steps.config, none);
    let serves = steps.state.next_plan().expect("there is a place for it");
    steps.state.depart(("on0", Rank(0)), on0, true);
    let served = serves.run(&steps.config);
    steps.state.apply_plan(&steps.config, served);
    steps.plan();
    steps.settle();
    let (early, later) = (steps.job("early"), steps.job("later"));
    assert!(matches!(early.tree, Some(Ok(_))), "{early:?}");
    assert!(later.queue.is_some() && later.tree.is_none(), "{later:?}");
}

#[test]
fn job_is_served_after_four_overtaken_plans() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    steps.add_device("leaf1");
    let _on0 = steps.join_on(&["leaf0"], "on0", (0, 1), 0);
    let on1 = steps.join_on(&["leaf1"], "on1", (0, 1), 0);
    let others: Vec<_> = (0..8).map(|index| (format!("spare{index}"), format!("other{index}"))).collect();
    let mut place = |(device, job): (String, String)| {
        steps.add_device(&device);
        (steps.join_on(&[&device], &job, (0, 1), 0), (job, Rank(0)))
    };
    let others: Vec<_> = others.into_iter().map(&mut place).collect();
    steps.plan();
    steps.settle();
    let _early = steps.join_on(&["leaf0"], "early", (0, 1), 60_000);
    steps.plan();
    let _later = steps.join_on(&["leaf1"], "later", (0, 1), 60_000);
    steps.plan();
    steps.state.depart(("on1", Rank(0)), on1, true);
    let mut overtaken = 0;
    for (client, (job, rank)) in &others {
        let none = steps.state.next_plan().expect("the early one is looked at").run(&steps.config);
        steps.state.apply_plan(&steps.config, none);
        let serves = steps.state.next_plan().expect("there is a place for the later one");
        // The state changes during each plan.
        steps.state.depart((job, *rank), *client, true);
        let served = serves.run(&steps.config);
        steps.state.apply_plan(&steps.config, served);
        if !steps.state.ready.is_empty() {
            break;
        }
        overtaken += 1;
    }
    assert_eq!(overtaken, 4, "no more plans are discarded in a row");
    steps.settle();
    let later = steps.job("later");
    assert!(matches!(later.tree, Some(Ok(_))), "{later:?}");
}

#[test]
fn declined_tree_is_offered_again_eight_times() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let client = steps.join("job", (0, 1), 0);
    steps.plan();
    steps.settle();
    let place = ("job".to_owned(), Rank(0));
    for view in 0..100 {
        steps.state.decline((Some(&place), client), view, (None, "it arrived after a rank had stopped waiting".into()));
        steps.plan();
        let job = steps.job("job");
        assert!(job.queue.is_some() && !job.is_offered, "not at once: {job:?}");
        steps.renew();
        steps.plan();
        if !steps.job("job").is_offered {
            assert_eq!(view, 8, "it was offered one so often");
            return;
        }
        steps.state.replan(Some(&place), client, view);
        steps.plan();
        steps.settle();
        let job = steps.job("job");
        assert!(matches!(job.tree, Some(Ok(_))), "{job:?}");
    }
    panic!("it is offered trees for ever");
}

#[test]
fn device_that_recovers_during_a_plan_is_used() {
    let mut steps = Steps::new();
    let device = steps.add_device("leaf0");
    let _client = steps.join("job", (0, 1), 0);
    steps.plan();
    // It does not respond to a renewal of its groups.
    let draft = steps.next_draft();
    let silent = ReservationFailure { index: 0, error: DeviceError::Unreachable, slots_used: None };
    steps.state.links.exchange(
        &mut steps.state.output,
        (Purpose::Stop, OnTimeout::Normal, Instant::ZERO),
        [(Arc::clone(&device), Request::Identify)],
    );
    steps.state.links.expire(Instant::ZERO);
    assert!(steps.state.links.poll_finished().is_some());
    assert!(!steps.state.links.is_responsive(&device));
    steps.state.finish_reservation(&steps.config, draft, Err(silent));
    assert!(steps.state.ready.is_empty());
    let without = steps.state.next_plan().expect("another is sought").run(&steps.config);
    steps.state.links.handle_response(device.conn, Envelope { id: 0, message: Response::Done });
    steps.renew();
    steps.state.apply_plan(&steps.config, without);
    steps.plan();
    steps.settle();
    let job = steps.job("job");
    assert!(matches!(job.tree, Some(Ok(_))) || job.is_offered, "{job:?}");
}

#[test]
fn device_that_connects_during_a_reservation_is_offered() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let _client = steps.join("job", (0, 1), 0);
    steps.plan();
    let draft = steps.next_draft();
    steps.add_device("leaf1");
    steps.plan();
    let refused = ReservationFailure { index: 0, error: DeviceError::UnexpectedResponse, slots_used: None };
    steps.state.finish_reservation(&steps.config, draft, Err(refused));
    assert!(steps.state.ready.is_empty());
    steps.plan();
    let job = steps.job("job");
    assert!(job.is_offered, "{job:?}");
}

#[test]
fn refused_job_is_retried_when_the_device_reports_free_slots() {
    let mut steps = Steps::new();
    let device = steps.add_device("leaf0");
    let client = steps.join_on(&["leaf0"], "job", (0, 1), 0);
    let refuse = |steps: &mut Steps, slots_used: u64| {
        steps.plan();
        let draft = steps.next_draft();
        let error = DeviceError::Refused(Refusal::NoSlots { need: 1 });
        let refused = ReservationFailure { index: 0, error, slots_used: Some(slots_used as u32) };
        steps.state.finish_reservation(&steps.config, draft, Err(refused));
        assert!(steps.state.ready.is_empty());
        steps.plan();
        let job = steps.job("job");
        assert!(job.queue.is_some() && !job.is_offered, "{job:?}");
    };
    refuse(&mut steps, device.capacity().slots);
    // A change makes the job be offered a tree there.
    steps.add_device("leaf1");
    steps.plan();
    assert!(steps.job("job").is_offered);
    steps.state.replan(Some(&("job".to_owned(), Rank(0))), client, 0);
    // The old group ends after the refusal.
    refuse(&mut steps, 0);
    steps.state.start_lease_round();
    let stats = Stats {
        boot_id: device.announce.boot_id,
        groups: 0,
        trees: 0,
        slots_used: 0,
        slot_memory_used_bytes: 0,
        stack: None,
        counters: Counters::default(),
    };
    steps.answer(&device, &Response::Stats(stats));
    steps.plan();
    let job = steps.job("job");
    assert!(job.is_offered, "{job:?}");
}

/// Plans work on snapshots: while one is made, the state goes on to renew the leases of all groups.
#[test]
fn leases_are_renewed_while_a_plan_on_a_fabric_is_made() {
    let fabric = format!(
        "switch = [{{ name = \"leaf0\", aggregation = true }}]\nhost = [{{ name = \"{HERE}\" }}]\n\
         link = [{{ ends = [\"{HERE}\", \"leaf0\"] }}]"
    );
    let mut steps = Steps::new();
    steps.config.fabric = Some(Fabric::from_toml(&fabric).expect("valid"));
    let mut announce = announce("leaf0", 1, None);
    announce.capabilities.groups = 100;
    let device = Arc::new(Device { conn: steps.conn(), announce });
    steps.state.add_device(&steps.config, &device).expect("there is room");
    for round in 0..2 {
        let job = format!("job{round}");
        let _client = steps.join(&job, (0, 1), 0);
        let plan = steps.state.next_plan().expect("its only rank has joined");
        while steps.state.output.pop().is_some() {}
        steps.state.start_lease_round();
        let sent = std::iter::from_fn(|| steps.state.output.pop()).filter(|(conn, _)| *conn == device.conn).count();
        // Before the first job there is nothing to renew.
        assert_eq!(sent > 0, round > 0, "round {round}: {sent} renewals are sent while a plan is being made");
        if sent > 0 {
            steps.answer(&device, &Response::Done);
        }
        let result = plan.run(&steps.config);
        steps.state.apply_plan(&steps.config, result);
        steps.plan();
        steps.settle();
        assert!(matches!(steps.job(&job).tree, Some(Ok(_))), "{:?}", steps.job(&job));
    }
}
