//! A pair of controllers: the standby takes over a running job when the first one is killed, stopped or cut off, and
//! the first one is refused when it comes back.
//!
//! Controllers and devices are processes; ranks are threads.

mod common;

use common::{Dir, Server, checked_sum, exit_status, serve, stderr, stdout, sumac};
use rustix::process::{Signal, kill_process};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JobStatus, PairRole, PairStatus, StatusReport};
use sumac::controller::{ControllerAddr, status};
use sumac::{Communicator, JoinConfig, Path};

/// The limit of every wait; a passing test never reaches it.
const LONG: Duration = Duration::from_secs(180);

/// How often to poll.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// After how many seconds of silence a controller counts as lost: a busy machine stalls for shorter.
const SILENCE_S: u64 = 10;

const RANKS: u32 = 3;

/// Elements of an operation: enough for several chunks.
const LEN: usize = 50_000;

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// Two controllers, of which either may run.
struct Pair {
    addrs: [SocketAddr; 2],
    controllers: [Option<Server>; 2],
}

impl Pair {
    fn start() -> Self {
        // Free ports; each controller has to know the other's.
        let ports = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"));
        let addrs = ports.each_ref().map(|port| port.local_addr().expect("bound"));
        drop(ports);
        let mut pair = Self { addrs, controllers: [None, None] };
        (0..2).for_each(|index| pair.start_controller(index));
        pair
    }

    fn start_controller(&mut self, index: usize) {
        let (listen, other) = (self.addrs[index].to_string(), self.addrs[1 - index].to_string());
        let (side, silence) = (["--peer", "--standby"][index], SILENCE_S.to_string());
        let mut controller =
            serve(&["controller", "--listen", &listen, side, &other, "--failover-after", &silence, "--prefer-tree"]);
        assert_eq!(controller.line(), format!("listening {listen}"));
        self.controllers[index] = Some(controller);
    }

    fn kill(&mut self, index: usize) {
        self.controllers[index].take().expect("it runs").kill();
    }

    fn signal(&self, index: usize, signal: Signal) {
        kill_process(self.controllers[index].as_ref().expect("it runs").pid(), signal).expect("it runs");
    }

    /// Both addresses, as users write them.
    fn text(&self) -> String {
        format!("{},{}", self.addrs[0], self.addrs[1])
    }

    fn addr(&self) -> ControllerAddr {
        ControllerAddr { alternatives: vec![self.addrs[1]], ..self.addrs[0].into() }
    }

    fn device(&self, name: &str, options: &[&str]) -> Server {
        let controller = self.text();
        let mut device = serve(&[&["device", "--name", name, "--controller", &controller], options].concat());
        assert_eq!(device.line(), format!("ready {name}"));
        device
    }

    fn report(&self) -> Option<StatusReport> {
        status(self.addr()).ok()
    }

    fn part(&self, index: usize) -> Option<PairStatus> {
        status(self.addrs[index]).ok()?.pair
    }

    fn wait_for_role(&self, index: usize, role: PairRole, term: u64) {
        let deadline = Instant::now() + LONG;
        loop {
            let part = self.part(index);
            if part.as_ref().is_some_and(|part| part.role == role && part.term == term) {
                return;
            }
            assert!(Instant::now() < deadline, "{index} is not {role} in term {term}, but {part:?}");
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Wait until the active controller has the whole job on a tree.
    fn wait_for_tree(&self, name: &str) {
        let has_tree = |job: &JobStatus| {
            job.name == name && job.running && job.joined == RANKS && job.tree.as_ref().is_some_and(Result::is_ok)
        };
        wait_until("the job has no tree", || self.report().is_some_and(|report| report.jobs.iter().any(has_tree)));
    }

    fn join(&self, job: &str, rank: u32, world: u32) -> Communicator {
        let mut config = JoinConfig::new(self.addrs[0], job, rank, world);
        config.controller_alternatives = vec![self.addrs[1]];
        Communicator::join(config).expect("join")
    }
}

/// The progress of the ranks.
#[derive(Default)]
struct Progress {
    rounds: AtomicU64,
    in_tree: AtomicU64,
    stops: AtomicBool,
}

impl Progress {
    fn wait_for(&self, what: &str, counter: &AtomicU64, more: u64) {
        let before = counter.load(Ordering::SeqCst);
        wait_until(what, || counter.load(Ordering::SeqCst) >= before + more);
    }
}

/// Stops the ranks when it is dropped, also if the script fails.
struct Stop<'p>(&'p Progress);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stops.store(true, Ordering::SeqCst);
    }
}

/// Run checked operations until all ranks are to stop, which rank 0 decides.
fn work(comm: &Communicator, progress: &Progress) {
    for round in 0.. {
        let outcome = checked_sum(comm, round, LEN).expect("a sum");
        let mut stops = [u64::from(comm.rank() == 0 && progress.stops.load(Ordering::SeqCst))];
        comm.all_reduce(&mut stops, sumac::ReduceOp::Max).expect("a maximum");
        if comm.rank() == 0 {
            progress.in_tree.fetch_add(u64::from(outcome.path == Path::Tree), Ordering::SeqCst);
            progress.rounds.fetch_add(1, Ordering::SeqCst);
        }
        if stops[0] > 0 {
            return;
        }
    }
}

/// Run a job, call `script` meanwhile, and end the job.
fn with_job(pair: &mut Pair, name: &str, script: impl FnOnce(&mut Pair, &Progress)) {
    let progress = Progress::default();
    let here = Pair { addrs: pair.addrs, controllers: [None, None] };
    thread::scope(|scope| {
        let stop = Stop(&progress);
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (progress, here) = (&progress, &here);
                scope.spawn(move || {
                    let comm = here.join(name, rank, RANKS);
                    work(&comm, progress);
                    comm.leave();
                })
            })
            .collect();
        wait_until("no round", || progress.rounds.load(Ordering::SeqCst) >= 3);
        script(pair, &progress);
        drop(stop);
        ranks.into_iter().for_each(|rank| rank.join().expect("a rank panicked"));
    });
}

#[test]
fn standby_takes_over_from_killed_first_and_hands_back_by_a_higher_term() {
    let mut pair = Pair::start();
    pair.wait_for_role(0, PairRole::Active, 1);
    pair.wait_for_role(1, PairRole::Standby, 1);
    let _device = pair.device("one", &[]);
    with_job(&mut pair, "job", |pair, progress| {
        pair.kill(0);
        progress.wait_for("no round without a controller", &progress.rounds, 3);
        pair.wait_for_role(1, PairRole::Active, 2);
        pair.wait_for_tree("job");
        progress.wait_for("no round in the tree", &progress.in_tree, 3);
        // The first one comes back without any memory, and does not interfere.
        pair.start_controller(0);
        pair.wait_for_role(0, PairRole::Standby, 2);
        progress.wait_for("no round in the tree", &progress.in_tree, 3);
        let sees_standby = |part: PairStatus| part.peer_role == Some(PairRole::Standby);
        wait_until("the active one does not see the other", || pair.part(1).is_some_and(sees_standby));
        pair.wait_for_role(1, PairRole::Active, 2);
        pair.kill(1);
        pair.wait_for_role(0, PairRole::Active, 3);
        pair.wait_for_tree("job");
        progress.wait_for("no round in the tree", &progress.in_tree, 3);
    });
}

#[test]
fn stopped_first_is_fenced_when_it_resumes_and_refuses_joins() {
    let mut pair = Pair::start();
    pair.wait_for_role(0, PairRole::Active, 1);
    let _device = pair.device("one", &[]);
    with_job(&mut pair, "job", |pair, progress| {
        // Its connections stay open, and it still accepts others.
        pair.signal(0, Signal::STOP);
        pair.wait_for_role(1, PairRole::Active, 2);
        pair.wait_for_tree("job");
        progress.wait_for("no round in the tree", &progress.in_tree, 3);
        pair.signal(0, Signal::CONT);
        pair.wait_for_role(0, PairRole::Standby, 2);
        progress.wait_for("no round in the tree", &progress.in_tree, 3);
    });
    let refused = Communicator::join(JoinConfig::new(pair.addrs[0], "other", 0, 1)).expect_err("a standby");
    let expected = format!("the standby of a pair, whose active controller is {}", pair.addrs[1]);
    assert!(refused.to_string().contains(&expected), "{refused}");
    // With both addresses the rank finds the active one.
    pair.join("other", 0, 1).leave();
    let shown = sumac(&["status", "--controller", &pair.addrs[0].to_string()]);
    assert!(stdout(&shown).contains("pair     standby, term 2"), "{}", stdout(&shown));
    let shown = sumac(&["status", "--controller", &pair.text()]);
    assert!(stdout(&shown).contains("pair     active, term 2"), "{}", stdout(&shown));
}

/// The device's process restarts while only the first controller, which has forgotten its term, is there.
#[test]
fn restarted_device_with_a_term_file_makes_the_first_choose_a_higher_term() {
    let dir = Dir::new("pair-term");
    let file = dir.write("term", b"8\n");
    let mut pair = Pair::start();
    pair.wait_for_role(0, PairRole::Active, 1);
    let device = pair.device("one", &["--term-file", &file]);
    pair.wait_for_role(0, PairRole::Active, 9);
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), "9\n");
    drop(device);
    dir.write("term", b"nine\n");
    let refused = sumac(&["device", "--name", "one", "--controller", &pair.text(), "--term-file", &file]);
    assert_eq!(exit_status(&refused), 2);
    assert!(stderr(&refused).contains("does not hold a term"), "{}", stderr(&refused));
    pair.kill(1);
}

#[test]
fn pair_that_is_set_up_wrongly_is_a_named_error() {
    let mut alone = serve(&["controller", "--listen", "127.0.0.1:0"]);
    let addr = alone.line().trim_start_matches("listening ").to_owned();
    let pair = Pair::start();
    let first = pair.addrs[0].to_string();
    let cases: [(&[&str], &str); 4] = [
        (&["--standby", &addr], "has no pair; start the first one with --peer"),
        (&["--peer", &first], "two first controllers in one pair"),
        (&["--peer", &first, "--standby", &first], "--standby"),
        (&["--standby", "127.0.0.1:0"], "is not the address of another controller"),
    ];
    for (options, says) in cases {
        let refused = sumac(&[&["controller", "--listen", "127.0.0.1:0"], options].concat());
        assert_eq!(exit_status(&refused), 2, "{options:?}");
        assert!(stderr(&refused).contains(says), "{options:?}: {}", stderr(&refused));
    }
}
