//! What happens between the copy that a plan is made of and its outcome: the state step by step, without threads.

use super::super::admit::Unreserved;
use super::super::device::{DeviceError, DeviceSession};
use super::super::line::{Frames, Line, NoLine};
use super::super::proto::{ClientReply, JobStatus};
use super::super::state::{Client, State};
use super::replan::request;
use super::*;
use sumac_hal::ctrl::{Counters, FrameBuffer, Stats};

/// Keeps what is sent, each time by itself.
#[derive(Debug, Clone, Default)]
struct Kept(Arc<Mutex<Vec<Vec<u8>>>>);

impl Line for Kept {
    fn put(&self, parts: &[Frames]) -> bool {
        let bytes: Vec<&[u8]> = parts.iter().map(Frames::bytes).collect();
        self.0.lock().expect("no panic").push(bytes.concat());
        true
    }

    fn hang_up(&self) {}
}

struct Steps {
    state: State,
    config: ControllerConfig,
}

impl Steps {
    fn new() -> Self {
        let config = ControllerConfig::new();
        Self { state: State::new(&config, 1, Entropy::System, Arc::default()), config }
    }

    /// Connect a device with room for one group.
    fn add_device(&mut self, name: &str) -> Arc<DeviceSession> {
        let mut announce = announce(name, 1, None);
        announce.capabilities.groups = 1;
        let session = Arc::new(DeviceSession::on(announce, Box::new(NoLine)));
        self.state.add_device(&self.config, &session).expect("there is room");
        session
    }

    fn join(&mut self, job: &str, place: (u32, u32), wait_ms: u32, line: impl Line + 'static) -> Arc<Client> {
        self.join_on(&[], job, place, wait_ms, line)
    }

    fn join_on(
        &mut self,
        devices: &[&str],
        job: &str,
        (rank, world): (u32, u32),
        wait_ms: u32,
        line: impl Line + 'static,
    ) -> Arc<Client> {
        let client = Arc::new(Client::new(Box::new(line)));
        let terms = Terms { moves: true, wait_ms, ..Terms::default() };
        let request = JoinRequest { job: job.into(), terms, ..request(rank, world) };
        let pinned = devices.iter().map(|&device| device.to_owned()).collect();
        self.state.join(&self.config, request, pinned, &client).expect("it may");
        client
    }

    fn plan(&mut self) {
        while let Some(plan) = self.state.next_plan() {
            let planned = plan.run(&self.config);
            self.state.planned(&self.config, planned);
        }
    }

    /// Devices say yes to what is drafted.
    fn settle(&mut self) {
        while let Some(draft) = self.state.ready.pop_front() {
            assert!(self.state.settle(&self.config, draft, Ok(())).is_none());
        }
    }

    /// A round of leases, of which no device says anything.
    fn renew(&mut self) {
        let renewed = self.state.round().ask().answered(Instant::now());
        self.state.renewed(renewed);
    }

    fn job(&self, name: &str) -> JobStatus {
        let report = self.state.report(&self.config).without_devices();
        report.jobs.into_iter().find(|job| job.name == name).expect("it is there")
    }
}

#[test]
fn job_that_got_its_tree_while_its_wait_was_planned_waits_no_more() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let first = steps.join("first", (0, 1), 0, NoLine);
    steps.plan();
    steps.settle();
    let _next = steps.join("next", (0, 1), 60_000, NoLine);
    steps.plan();
    assert!(steps.job("next").queue.is_some(), "the only place is taken");
    steps.state.depart(("first", Rank(0)), &first, true);
    let serves = steps.state.next_plan().expect("there is a place");
    // Comes while that is planned, and lets all that wait be looked at again.
    steps.add_device("leaf1");
    let served = serves.run(&steps.config);
    steps.state.planned(&steps.config, served);
    let enters = steps.state.next_plan();
    steps.settle();
    if let Some(enters) = enters {
        let entered = enters.run(&steps.config);
        steps.state.planned(&steps.config, entered);
    }
    steps.plan();
    let next = steps.job("next");
    assert!(matches!(next.tree, Some(Ok(_))), "{next:?}");
    assert_eq!((next.queue, next.is_offered), (None, false), "it has a tree");
}

#[test]
fn job_of_the_name_of_one_that_has_ended_takes_no_place_for_it() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let _first = steps.join("first", (0, 1), 0, NoLine);
    steps.plan();
    steps.settle();
    let next = steps.join("next", (0, 1), 0, NoLine);
    let sought = steps.state.next_plan().expect("all are there").run(&steps.config);
    steps.state.planned(&steps.config, sought);
    let enters = steps.state.next_plan().expect("it runs without a tree");
    steps.state.depart(("next", Rank(0)), &next, true);
    let _other = steps.join("next", (0, 2), 0, NoLine);
    let entered = enters.run(&steps.config);
    steps.state.planned(&steps.config, entered);
    steps.plan();
    assert_eq!(steps.job("next").queue, None, "it has not begun");
}

#[test]
fn ranks_that_die_together_are_told_of_together() {
    let mut steps = Steps::new();
    let kept = Kept::default();
    let _left = steps.join("job", (0, 100), 0, kept.clone());
    let others: Vec<_> = (1..100).map(|rank| (steps.join("job", (rank, 100), 0, NoLine), rank)).collect();
    steps.plan();
    kept.0.lock().expect("no panic").clear();
    let gone = others.into_iter().map(|(client, rank)| (client, ("job".to_owned(), Rank(rank))));
    steps.state.depart_all(gone.collect());
    let puts = kept.0.lock().expect("no panic").clone();
    assert_eq!(puts.len(), 1, "one entry of its queue for all");
    let mut told = FrameBuffer::new(1 << 20);
    told.push(&puts[0]);
    for rank in 1..100 {
        let reply = told.take_message::<ClientReply>().expect("frames");
        assert_eq!(reply, Some(ClientReply::RankLost(Rank(rank))));
    }
}

#[test]
fn job_whose_wait_ends_as_its_place_is_freed_comes_before_later_ones() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let first = steps.join("first", (0, 1), 0, NoLine);
    steps.plan();
    steps.settle();
    let _early = steps.join("early", (0, 1), 300, NoLine);
    steps.plan();
    let _later = steps.join("later", (0, 1), 60_000, NoLine);
    steps.plan();
    steps.state.now += Duration::from_secs(1);
    steps.state.expire_all();
    steps.state.depart(("first", Rank(0)), &first, true);
    steps.plan();
    steps.settle();
    let (early, later) = (steps.job("early"), steps.job("later"));
    assert!(early.is_offered, "{early:?}");
    assert!(later.queue.is_some() && later.tree.is_none(), "{later:?}");
}

#[test]
fn plan_for_a_later_job_yields_what_is_freed_meanwhile_to_an_earlier_one() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    steps.add_device("leaf1");
    let on0 = steps.join_on(&["leaf0"], "on0", (0, 1), 0, NoLine);
    let on1 = steps.join_on(&["leaf1"], "on1", (0, 1), 0, NoLine);
    steps.plan();
    steps.settle();
    let _early = steps.join_on(&["leaf0", "leaf1"], "early", (0, 1), 60_000, NoLine);
    steps.plan();
    let _later = steps.join_on(&["leaf1"], "later", (0, 1), 60_000, NoLine);
    steps.plan();
    steps.state.depart(("on1", Rank(0)), &on1, true);
    // The early one does not fit, the later one does.
    let none = steps.state.next_plan().expect("there is a place").run(&steps.config);
    steps.state.planned(&steps.config, none);
    let serves = steps.state.next_plan().expect("there is a place for it");
    steps.state.depart(("on0", Rank(0)), &on0, true);
    let served = serves.run(&steps.config);
    steps.state.planned(&steps.config, served);
    steps.plan();
    steps.settle();
    let (early, later) = (steps.job("early"), steps.job("later"));
    assert!(matches!(early.tree, Some(Ok(_))), "{early:?}");
    assert!(later.queue.is_some() && later.tree.is_none(), "{later:?}");
}

#[test]
fn job_is_served_though_every_plan_for_it_is_overtaken() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    steps.add_device("leaf1");
    let _on0 = steps.join_on(&["leaf0"], "on0", (0, 1), 0, NoLine);
    let on1 = steps.join_on(&["leaf1"], "on1", (0, 1), 0, NoLine);
    let others: Vec<_> = (0..8).map(|index| (format!("spare{index}"), format!("other{index}"))).collect();
    let mut place = |(device, job): (String, String)| {
        steps.add_device(&device);
        (steps.join_on(&[&device], &job, (0, 1), 0, NoLine), (job, Rank(0)))
    };
    let others: Vec<_> = others.into_iter().map(&mut place).collect();
    steps.plan();
    steps.settle();
    let _early = steps.join_on(&["leaf0"], "early", (0, 1), 60_000, NoLine);
    steps.plan();
    let _later = steps.join_on(&["leaf1"], "later", (0, 1), 60_000, NoLine);
    steps.plan();
    steps.state.depart(("on1", Rank(0)), &on1, true);
    let mut overtaken = 0;
    for (client, (job, rank)) in &others {
        let none = steps.state.next_plan().expect("the early one is looked at").run(&steps.config);
        steps.state.planned(&steps.config, none);
        let serves = steps.state.next_plan().expect("there is a place for the later one");
        // The world changes under each plan.
        steps.state.depart((job, *rank), client, true);
        let served = serves.run(&steps.config);
        steps.state.planned(&steps.config, served);
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
fn job_whose_ranks_declined_a_tree_that_came_too_late_is_offered_one_again() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let client = steps.join("job", (0, 1), 0, NoLine);
    steps.plan();
    steps.settle();
    let place = ("job".to_owned(), Rank(0));
    for view in 0..100 {
        steps.state.decline((Some(&place), &client), view, (None, "it came too late for a rank".into()));
        steps.plan();
        let job = steps.job("job");
        assert!(job.queue.is_some() && !job.is_offered, "not at once: {job:?}");
        steps.renew();
        steps.plan();
        if !steps.job("job").is_offered {
            assert_eq!(view, 8, "it was offered one so often");
            return;
        }
        steps.state.replan(Some(&place), &client, view);
        steps.plan();
        steps.settle();
        let job = steps.job("job");
        assert!(matches!(job.tree, Some(Ok(_))), "{job:?}");
    }
    panic!("it is offered trees for ever");
}

#[test]
fn job_finds_a_device_that_answers_again_while_it_is_planned_without() {
    let mut steps = Steps::new();
    let device = steps.add_device("leaf0");
    let _client = steps.join("job", (0, 1), 0, NoLine);
    steps.plan();
    let asked = device.post(Request::Hello).expect("it is connected");
    device.done(&asked, Instant::now()).expect_err("it is silent");
    let draft = steps.state.ready.pop_front().expect("a draft");
    let silent = Unreserved { index: 0, error: DeviceError::Gone, slots_used: None };
    assert!(steps.state.settle(&steps.config, draft, Err(silent)).is_none());
    let without = steps.state.next_plan().expect("another is sought").run(&steps.config);
    device.take(Envelope { id: 0, message: Response::Done });
    steps.renew();
    steps.state.planned(&steps.config, without);
    steps.plan();
    steps.settle();
    let job = steps.job("job");
    assert!(matches!(job.tree, Some(Ok(_))) || job.is_offered, "{job:?}");
}

#[test]
fn job_that_a_device_refuses_finds_one_that_came_meanwhile() {
    let mut steps = Steps::new();
    steps.add_device("leaf0");
    let _client = steps.join("job", (0, 1), 0, NoLine);
    steps.plan();
    let draft = steps.state.ready.pop_front().expect("a draft");
    steps.add_device("leaf1");
    steps.plan();
    let refused = Unreserved { index: 0, error: DeviceError::Answer, slots_used: None };
    assert!(steps.state.settle(&steps.config, draft, Err(refused)).is_none());
    steps.plan();
    let job = steps.job("job");
    assert!(job.is_offered, "{job:?}");
}

#[test]
fn job_refused_anew_just_before_the_device_counts_fewer_slots_is_tried_again() {
    let mut steps = Steps::new();
    let device = steps.add_device("leaf0");
    let client = steps.join_on(&["leaf0"], "job", (0, 1), 0, NoLine);
    let refuse = |steps: &mut Steps, slots_used: u64| {
        steps.plan();
        let draft = steps.state.ready.pop_front().expect("a draft");
        let error = DeviceError::Refused(Refusal::NoSlots { need: 1 });
        let refused = Unreserved { index: 0, error, slots_used: Some(slots_used as u32) };
        assert!(steps.state.settle(&steps.config, draft, Err(refused)).is_none());
        steps.plan();
        let job = steps.job("job");
        assert!(job.queue.is_some() && !job.is_offered, "{job:?}");
    };
    refuse(&mut steps, device.room().slots);
    // Something changes, for which it is offered a tree there.
    steps.add_device("leaf1");
    steps.plan();
    assert!(steps.job("job").is_offered);
    steps.state.replan(Some(&("job".to_owned(), Rank(0))), &client, 0);
    // What was left there ends after the refusal.
    refuse(&mut steps, 0);
    let round = steps.state.round().ask();
    let stats = Stats {
        boot_id: device.announce.boot_id,
        groups: 0,
        trees: 0,
        slots_used: 0,
        slot_memory_used_bytes: 0,
        stack: None,
        counters: Counters::default(),
    };
    // Whichever its number is.
    (0..100).for_each(|id| device.take(Envelope { id, message: Response::Stats(stats) }));
    steps.state.renewed(round.answered(Instant::now()));
    steps.plan();
    let job = steps.job("job");
    assert!(job.is_offered, "{job:?}");
}
