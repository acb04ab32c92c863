//! Controller, devices and ranks, each a process of its own, and what the others see when one is killed or stopped at
//! any moment: a named error within the deadline, buffers that are chunk by chunk old or new, and nothing left behind.
//!
//! The moments are drawn by a seeded generator; what a process does at a moment is the machine's to say. A failure
//! names its seed.

mod common;
mod members;

use common::{Server, children, serve, serve_with};
use members::{DeviceMemory, Ending, Later, Member, Memory, Sockets, Task, be_a_rank, dev_shm, now_ns, signal};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sumac::controller::ControllerConfig;
use sumac_hal::emu::Rng;

/// Elements of each all-reduce: 4 MiB, in 69 chunks of which the last is shorter.
const ELEMENTS: usize = 1 << 20;

/// More rounds than any test waits for.
const FOR_EVER: u64 = 1 << 40;

/// Two leaves of two hosts each, and so of two ranks each. The planner takes the first leaf for the root.
const FABRIC: &str = r#"
switch = [{ name = "leaf0", aggregation = true }, { name = "leaf1", aggregation = true }, { name = "spine0" }]
host = [{ name = "h0" }, { name = "h1" }, { name = "h2" }, { name = "h3" }]
link = [
    { ends = ["h0", "leaf0"] },
    { ends = ["h1", "leaf0"] },
    { ends = ["h2", "leaf1"] },
    { ends = ["h3", "leaf1"] },
    { ends = ["leaf0", "spine0"] },
    { ends = ["leaf1", "spine0"] },
]
"#;

/// How long a call may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long the way back from a failed call may take beyond its deadline: a fence that is not answered, the memory that
/// is taken away then, and a machine that does something else.
const WAY_BACK: Duration = Duration::from_secs(5);

/// How long ranks take to start and to join, about.
const JOINING: Duration = Duration::from_millis(12);

/// How long they may take where one of them is killed meanwhile: the others wait for one that has not come that long.
const JOIN_DEADLINE: Duration = Duration::from_secs(4);

/// One cluster at a time, so that every child of this process is the cluster's.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
#[ignore = "a rank of other tests"]
fn rank_process() {
    be_a_rank();
}

/// A controller, and the jobs that it was given.
struct Cluster {
    controller: Option<Server>,
    addr: SocketAddr,
    has_fabric: bool,
    jobs: u32,
    shm: Vec<String>,
    _alone: MutexGuard<'static, ()>,
}

impl Cluster {
    /// Start a controller without a fabric: jobs have trees of one device.
    fn start() -> Self {
        Self::on("")
    }

    fn on(fabric: &str) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (shm, has_fabric) = (dev_shm(), !fabric.is_empty());
        let topology: &[_] = if has_fabric { &["--topology", "-"] } else { &[] };
        let mut controller = serve_with(&[&["controller", "--listen", "127.0.0.1:0"], topology].concat(), fabric);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok()).expect("an address");
        Self { controller: Some(controller), addr, has_fabric, jobs: 0, shm, _alone: alone }
    }

    /// Start a device, and wait until the controller knows it.
    fn device(&self, name: &str) -> Server {
        self.device_with(name, "full")
    }

    /// Start one with another engine.
    fn device_with(&self, name: &str, profile: &str) -> Server {
        let controller = self.addr.to_string();
        let mut device = serve(&["device", "--name", name, "--controller", &controller, "--dma-profile", profile]);
        assert_eq!(device.line(), format!("ready {name}"));
        device
    }

    /// Describe the first rank of a new job.
    fn task(&mut self, ranks: u32, memory: Memory, rounds: u64, deadline: Duration) -> Task {
        self.jobs += 1;
        let limits = ControllerConfig::new();
        // As the controller does it: whole cache lines where an engine is in the way.
        let chunk_bytes = usize::from(match (memory, self.has_fabric) {
            (Memory::Packets, _) => limits.chunk_max_bytes,
            (_, true) => limits.chunk_max_bytes / 64 * 64,
            (_, false) => limits.reference_chunk_max_bytes,
        });
        let (controller, job, deadline_ms) = (self.addr, format!("job{}", self.jobs), deadline.as_millis() as u64);
        let (elements, rounds_values) = (ELEMENTS, false);
        Task { controller, job, rank: 0, ranks, memory, elements, rounds_values, chunk_bytes, rounds, deadline_ms }
    }

    /// Start a job's ranks.
    fn job(&mut self, ranks: u32, memory: Memory, rounds: u64, deadline: Duration) -> Vec<Member> {
        start(&self.task(ranks, memory, rounds, deadline))
    }

    /// Run a job of two ranks that goes well.
    fn run_well(&mut self, memory: Memory, context: &str) {
        let mut members = self.job(2, memory, 2, DEADLINE);
        let endings: Vec<_> = members.iter_mut().map(Member::ending).collect();
        assert!(endings.iter().all(|ending| ending.error.is_none() && ending.rounds == 2), "{context}: {endings:?}");
        members.into_iter().for_each(Member::end);
    }

    fn kill_controller(&mut self) {
        self.controller.take().expect("killed once").kill();
    }

    /// End what is left in order, and see that this was all.
    fn end(mut self, devices: Vec<Server>) {
        let sockets: Vec<_> = devices.iter().map(|device| Sockets::of(device.pid())).collect();
        for mut server in devices.into_iter().chain(self.controller.take()) {
            server.interrupt_and_expect_success();
        }
        sockets.iter().for_each(|sockets| sockets.wait_until_gone("at the end"));
        let left: Vec<_> = children(std::process::id()).into_iter().map(|child| child.command).collect();
        assert!(left.is_empty(), "left: {left:?}");
        assert_eq!(dev_shm(), self.shm, "files are left");
    }
}

/// Start all ranks of a job that is described by the task of its first.
fn start(task: &Task) -> Vec<Member> {
    (0..task.ranks).map(|rank| Member::start(&Task { rank, ..task.clone() })).collect()
}

/// What a test has seen, for its summary.
#[derive(Debug, Default)]
struct Seen {
    endings: usize,
    mixed: usize,
    old: usize,
    new: usize,
    /// How often each error came, and how many milliseconds the slowest took.
    errors: BTreeMap<String, (usize, u64)>,
}

impl Seen {
    /// Check how a rank's work ended after something was done to its surroundings, and note it.
    fn note(&mut self, ending: &Ending, since_ns: u64, limit: Duration, expected: &[&str], context: &str) {
        let error = ending.error.as_deref().unwrap_or("none");
        assert!(expected.contains(&error), "{context}: {ending:?}");
        assert_eq!(ending.torn, 0, "{context}: {ending:?}");
        let took = Duration::from_nanos(ending.at_ns.saturating_sub(since_ns));
        assert!(took < limit, "{context}: {took:?}: {ending:?}");
        self.endings += 1;
        self.mixed += usize::from(ending.old > 0 && ending.new > 0);
        self.old += ending.old;
        self.new += ending.new;
        let (count, slowest_ms) = self.errors.entry(error.to_owned()).or_default();
        (*count, *slowest_ms) = (*count + 1, (*slowest_ms).max(took.as_millis() as u64));
    }
}

/// Wait until all members begin an operation, and then until a random moment of it, or a little after.
fn wait_within_an_operation(members: &mut [Member], rng: &mut Rng) {
    let first = members.iter_mut().map(Member::second_round).min().expect("a member");
    // Choosing the moment is all that this sleep is for.
    std::thread::sleep(rng.duration_up_to(first + first / 4));
}

/// The memory of the nth repetition: mostly registered, where the device writes by itself; seldom in packets, where a
/// device that is gone is known by its silence alone, which takes seconds.
fn memory_of(nth: u64) -> Memory {
    match nth % 20 {
        3 | 8 | 13 | 18 => Memory::Plain,
        19 => Memory::Packets,
        _ => Memory::Registered,
    }
}

/// See that buffers are still what they were when the call returned.
fn nothing_changed(members: &mut [Member], context: &str) {
    for member in members {
        let Later { changed } = member.look_again();
        assert_eq!(changed, 0, "{context}: elements changed after the call had returned");
    }
}

#[test]
fn a_device_that_is_killed_at_any_moment_loses_no_input() {
    const KILLS: u64 = 44;
    let mut cluster = Cluster::start();
    let mut seen = Seen::default();
    for nth in 0..KILLS {
        let memory = memory_of(nth);
        let profile = ["full", "full", "inline-reduce", "copy-only"][(nth % 4) as usize];
        let rounds_values = nth % 3 == 1;
        let context = format!("kill {nth}, seed {nth}, {memory:?}, engine {profile}, rounded: {rounds_values}");
        let mut rng = Rng::new(nth);
        let device = cluster.device_with(&format!("device{nth}"), profile);
        let sockets = Sockets::of(device.pid());
        let is_joining = nth % 8 == 6;
        let deadline = if is_joining { JOIN_DEADLINE } else { DEADLINE };
        let task = cluster.task(2, memory, FOR_EVER, deadline);
        let mut members = start(&Task { rounds_values, ..task });
        if is_joining {
            // Choosing the moment is all that this sleep is for.
            std::thread::sleep(rng.duration_up_to(JOINING));
        } else {
            wait_within_an_operation(&mut members, &mut rng);
        }
        let killed = now_ns();
        device.kill();
        let expected: &[&str] = match memory {
            Memory::Packets => &["PathLost", "RankLost"],
            _ if is_joining => &["JoinAttach", "AllocMemory", "NotPossible", "DeviceLost", "RankLost"],
            _ => &["DeviceLost", "RankLost"],
        };
        for member in &mut members {
            seen.note(&member.ending(), killed, DEADLINE, expected, &context);
        }
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        sockets.wait_until_gone(&context);
    }
    println!("{KILLS} kills of a device: {seen:?}");
    assert!(seen.mixed > 0, "no kill was in the middle of an operation: {seen:?}");
    cluster.end(Vec::new());
}

#[test]
fn a_rank_that_is_killed_at_any_moment_is_named_and_its_device_lives_on() {
    const KILLS: u64 = 22;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let (mut working, mut joining) = (Seen::default(), Seen::default());
    for nth in 0..KILLS {
        let memory = memory_of(nth);
        let context = format!("kill {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let is_joining = nth % 4 == 0;
        let deadline = if is_joining { JOIN_DEADLINE } else { DEADLINE };
        let mut members = cluster.job(3, memory, FOR_EVER, deadline);
        if is_joining {
            // Choosing the moment is all that this sleep is for.
            std::thread::sleep(rng.duration_up_to(JOINING));
        } else {
            wait_within_an_operation(&mut members, &mut rng);
        }
        // The one that was started last is least likely to have joined.
        let victim = if is_joining { 2 } else { rng.below(3) };
        let killed = now_ns();
        members.remove(victim as usize).kill();
        for member in &mut members {
            let ending = member.ending();
            if is_joining {
                joining.note(&ending, killed, DEADLINE, &["JoinController", "RankLost"], &context);
            } else {
                working.note(&ending, killed, DEADLINE, &["RankLost"], &context);
                assert!(ending.text.starts_with(&format!("rank {victim} is lost;")), "{context}: {ending:?}");
            }
        }
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        cluster.run_well(memory, &context);
        before.wait_for(device.pid(), &context);
    }
    println!("{KILLS} kills of a rank: while working {working:?}, while joining {joining:?}");
    assert!(working.mixed > 0, "no kill was in the middle of an operation: {working:?}");
    cluster.end(vec![device]);
}

#[test]
fn a_device_that_is_stopped_writes_nothing_more_when_it_goes_on() {
    const STOPS: u64 = 8;
    const SHORT: Duration = Duration::from_millis(1500);
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    let mut seen = Seen::default();
    for nth in 0..STOPS {
        let memory = if nth % 4 == 3 { Memory::Plain } else { Memory::Registered };
        let context = format!("stop {nth}, seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut members = cluster.job(2, memory, FOR_EVER, SHORT);
        wait_within_an_operation(&mut members, &mut rng);
        let stopped = now_ns();
        signal(device.pid(), Signal::STOP);
        for member in &mut members {
            seen.note(&member.ending(), stopped, SHORT + WAY_BACK, &["Deadline"], &context);
        }
        signal(device.pid(), Signal::CONT);
        // What the device had in its hands it has finished, when it has served all of a later job.
        cluster.run_well(memory, &context);
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
    }
    println!("{STOPS} stops of a device: {seen:?}");
    assert!(seen.mixed > 0, "no stop was in the middle of an operation: {seen:?}");
    cluster.end(vec![device]);
}

#[test]
fn a_device_that_pauses_for_less_than_the_deadline_costs_nothing_else() {
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let mut rng = Rng::new(nth);
        let mut members = cluster.job(2, memory, 4, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        signal(device.pid(), Signal::STOP);
        // What is chosen here is how long the pause is.
        std::thread::sleep(rng.duration_up_to(Duration::from_millis(500)));
        signal(device.pid(), Signal::CONT);
        for member in &mut members {
            let ending = member.ending();
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, 4), "seed {nth}, {memory:?}: {ending:?}");
        }
        members.into_iter().for_each(Member::end);
    }
    cluster.end(vec![device]);
}

#[test]
fn a_controller_that_is_killed_is_missed_by_no_operation() {
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let context = format!("seed {nth}, {memory:?}");
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let before = DeviceMemory::of(device.pid());
        let mut rng = Rng::new(nth);
        let mut members = cluster.job(2, memory, 6, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        cluster.kill_controller();
        for member in &mut members {
            let ending = member.ending();
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, 6), "{context}: {ending:?}");
        }
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        cluster.end(vec![device]);
    }
}

/// Nobody tells the others then.
#[test]
fn a_rank_that_is_killed_after_its_controller_costs_the_others_no_more_than_their_deadline() {
    const SHORT: Duration = Duration::from_millis(1500);
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let context = format!("seed {nth}, {memory:?}");
        let mut cluster = Cluster::start();
        let device = cluster.device("device");
        let before = DeviceMemory::of(device.pid());
        let mut rng = Rng::new(nth);
        let mut members = cluster.job(3, memory, FOR_EVER, SHORT);
        wait_within_an_operation(&mut members, &mut rng);
        cluster.kill_controller();
        let killed = now_ns();
        members.remove(rng.below(3) as usize).kill();
        let mut seen = Seen::default();
        for member in &mut members {
            seen.note(&member.ending(), killed, SHORT + WAY_BACK, &["Deadline"], &context);
        }
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        println!("{context}: {seen:?}");
        cluster.end(vec![device]);
    }
}

#[test]
fn either_device_of_two_levels_may_be_killed() {
    const KILLS: u64 = 8;
    let mut cluster = Cluster::on(FABRIC);
    let mut seen = Seen::default();
    for nth in 0..KILLS {
        let context = format!("kill {nth}, seed {nth}");
        let mut rng = Rng::new(nth);
        let mut devices: Vec<_> = ["leaf0", "leaf1"].iter().map(|name| cluster.device(name)).collect();
        let mut members = cluster.job(4, Memory::Registered, FOR_EVER, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        let killed = now_ns();
        let victim = (nth % 2) as usize;
        devices.remove(victim).kill();
        // Those at the dead device know at once; the others when these are gone.
        members.rotate_left(2 * victim);
        for (place, mut member) in members.into_iter().enumerate() {
            let expected: &[&str] = if place < 2 { &["DeviceLost"] } else { &["RankLost", "PathLost"] };
            seen.note(&member.ending(), killed, DEADLINE, expected, &context);
            nothing_changed(std::slice::from_mut(&mut member), &context);
            member.end();
        }
        devices.iter_mut().for_each(Server::interrupt_and_expect_success);
    }
    println!("{KILLS} kills of a leaf or the root: {seen:?}");
    assert!(seen.mixed > 0, "no kill was in the middle of an operation: {seen:?}");
    cluster.end(Vec::new());
}

#[test]
fn a_rank_that_is_killed_does_not_disturb_another_job_on_its_device() {
    const KILLS: u64 = 4;
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    for nth in 0..KILLS {
        let context = format!("kill {nth}, seed {nth}");
        let mut rng = Rng::new(nth);
        let mut others = cluster.job(2, Memory::Registered, 8, DEADLINE);
        let mut members = cluster.job(2, Memory::Registered, FOR_EVER, DEADLINE);
        wait_within_an_operation(&mut members, &mut rng);
        members.remove(rng.below(2) as usize).kill();
        assert_eq!(members[0].ending().error.as_deref(), Some("RankLost"), "{context}");
        for member in &mut others {
            let ending = member.ending();
            assert_eq!((ending.error.as_deref(), ending.rounds), (None, 8), "{context}: {ending:?}");
        }
        nothing_changed(&mut members, &context);
        members.into_iter().chain(others).for_each(Member::end);
        before.wait_for(device.pid(), &context);
    }
    cluster.end(vec![device]);
}

#[test]
fn a_rank_that_is_stopped_costs_the_others_no_more_than_their_deadline() {
    const SHORT: Duration = Duration::from_millis(1500);
    let mut cluster = Cluster::start();
    let device = cluster.device("device");
    let before = DeviceMemory::of(device.pid());
    for (nth, memory) in (0..).zip([Memory::Registered, Memory::Plain, Memory::Packets]) {
        let context = format!("seed {nth}, {memory:?}");
        let mut rng = Rng::new(nth);
        let mut seen = Seen::default();
        let mut members = cluster.job(3, memory, FOR_EVER, SHORT);
        wait_within_an_operation(&mut members, &mut rng);
        let stopped = now_ns();
        let victim = members.remove(rng.below(3) as usize);
        signal(victim.pid(), Signal::STOP);
        for member in &mut members {
            seen.note(&member.ending(), stopped, SHORT + WAY_BACK, &["Deadline"], &context);
        }
        let continued = now_ns();
        signal(victim.pid(), Signal::CONT);
        members.push(victim);
        let last = members.last_mut().expect("the victim");
        seen.note(&last.ending(), continued, SHORT + WAY_BACK, &["Deadline"], &context);
        cluster.run_well(memory, &context);
        nothing_changed(&mut members, &context);
        members.into_iter().for_each(Member::end);
        before.wait_for(device.pid(), &context);
        println!("{context}: {seen:?}");
    }
    cluster.end(vec![device]);
}
