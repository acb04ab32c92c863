//! What happens between the copy that a plan is made of and its outcome: the state step by step, without threads.

use super::super::device::DeviceSession;
use super::super::line::{Frames, Line, NoLine};
use super::super::proto::{ClientReply, JobStatus};
use super::super::state::{Client, State};
use super::replan::request;
use super::*;
use sumac_hal::ctrl::FrameBuffer;

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
    fn add_device(&mut self, name: &str) {
        let mut announce = announce(name, 1, None);
        announce.capabilities.groups = 1;
        let session = Arc::new(DeviceSession::on(announce, Box::new(NoLine)));
        self.state.add_device(&self.config, &session).expect("there is room");
    }

    fn join(&mut self, job: &str, (rank, world): (u32, u32), wait_ms: u32, line: impl Line + 'static) -> Arc<Client> {
        let client = Arc::new(Client::new(Box::new(line)));
        let terms = Terms { moves: true, wait_ms, ..Terms::default() };
        let request = JoinRequest { job: job.into(), terms, ..request(rank, world) };
        self.state.join(&self.config, request, Vec::new(), &client).expect("it may");
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
