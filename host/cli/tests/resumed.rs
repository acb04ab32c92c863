//! A controller that is killed under a running job, and another that is started at its address: operations go on
//! meanwhile, the job is known to the next one by what its ranks say, and gets a tree there.
//!
//! Controller and devices are processes of their own; ranks are threads here, but for those that are killed.

mod common;

use common::{Server, serve};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::{CallOptions, ControllerState};
use sumac::controller::proto::{Attach, ClientReply, ClientRequest, JobStatus, StatusReport};
use sumac::controller::status;
use sumac::select::Algo;
use sumac::{Communicator, Error, JoinConfig, Outcome, Path, ReduceOp};
use sumac_hal::ctrl::{FrameReader, Greeting, send};
use sumac_hal::emu::Rng;

/// More than anything here takes.
const LONG: Duration = Duration::from_secs(30);

/// How often to look.
const LOOK_EVERY: Duration = Duration::from_millis(10);

const RANKS: u32 = 3;

/// Elements of an operation: enough for several chunks.
const LEN: usize = 100_000;

/// How long a group lives that nobody renews, in seconds.
const LEASE_S: u64 = 2;

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(LOOK_EVERY);
    }
}

/// A controller that may be killed, and started again.
struct Place {
    addr: SocketAddr,
    controller: Option<Server>,
}

impl Place {
    fn start() -> Self {
        let mut place = Self { addr: SocketAddr::from(([127, 0, 0, 1], 0)), controller: None };
        place.start_controller();
        place
    }

    fn start_controller(&mut self) {
        let (listen, lease) = (self.addr.to_string(), LEASE_S.to_string());
        let mut controller = serve(&["controller", "--listen", &listen, "--prefer-tree", "--lease", &lease]);
        let line = controller.line();
        self.addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok()).expect("an address");
        self.controller = Some(controller);
    }

    fn kill_controller(&mut self) {
        self.controller.take().expect("it runs").kill();
    }

    fn device(&self, name: &str) -> Server {
        let mut device = serve(&["device", "--name", name, "--controller", &self.addr.to_string()]);
        assert_eq!(device.line(), format!("ready {name}"));
        device
    }

    fn report(&self) -> StatusReport {
        status(self.addr).expect("a report")
    }

    fn job(&self, name: &str) -> Option<JobStatus> {
        self.report().jobs.into_iter().find(|job| job.name == name)
    }

    /// Wait until all ranks of a job are back, and it has a tree; returns its devices.
    fn wait_for_tree(&self, name: &str, ranks: u32) -> Vec<String> {
        let mut devices = Vec::new();
        wait_until("the job has no tree", || {
            let Some(job) = self.job(name) else { return false };
            let is_whole = job.running && (job.joined, job.world) == (ranks, ranks);
            devices = job.tree.and_then(Result::ok).map(|tree| tree.devices).unwrap_or_default();
            is_whole && !devices.is_empty()
        });
        devices
    }

    /// Wait until no device holds anything.
    fn wait_until_free(&self, devices: usize) {
        let deadline = Instant::now() + LONG;
        loop {
            let report = self.report();
            let stats = report.devices.iter().map(|device| device.stats.as_ref().expect("it answers"));
            let held: Vec<_> =
                stats.map(|stats| (stats.groups, stats.slots_used, stats.slot_memory_used_bytes)).collect();
            if held == vec![(0, 0, 0); devices] {
                return;
            }
            assert!(Instant::now() < deadline, "groups, slots and bytes that devices hold: {held:?}");
            thread::sleep(LOOK_EVERY);
        }
    }
}

/// What ranks have done so far.
#[derive(Default)]
struct Progress {
    rounds: AtomicU64,
    in_tree: AtomicU64,
    repaired: AtomicU64,
    /// They are to stop, all behind the same round.
    stops: AtomicBool,
    /// They are to make no calls for a while.
    rests: AtomicBool,
}

impl Progress {
    fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::SeqCst)
    }

    /// Wait until a counter has gone on by so many.
    fn wait_for(&self, what: &str, counter: impl Fn(&Self) -> &AtomicU64, more: u64) {
        let before = counter(self).load(Ordering::SeqCst);
        wait_until(what, || counter(self).load(Ordering::SeqCst) >= before + more);
    }
}

fn join(addr: SocketAddr, job: &str, rank: u32, attach: Attach) -> Communicator {
    let config = JoinConfig { attach, ..JoinConfig::new(addr, job, rank, RANKS) };
    Communicator::join(config).expect("join")
}

/// Add up, and look at every element.
fn add(comm: &Communicator, round: u64) -> Result<Outcome, Error> {
    let (ranks, rank) = (u64::from(comm.size()), u64::from(comm.rank()));
    let mut buffer: Vec<u64> = (0..LEN as u64).map(|i| round * i + rank).collect();
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum)?;
    let sum = |i: u64| ranks * round * i + ranks * (ranks - 1) / 2;
    assert!((0..).zip(&buffer).all(|(i, &x)| x == sum(i)), "round {round} is wrong");
    Ok(outcome)
}

/// Do rounds until all ranks are to stop. Around the operation that is counted, another is under way, so that a job moves
/// also between its start and its end.
fn work(comm: &Communicator, progress: &Progress) {
    for round in 0.. {
        let ones = vec![round + u64::from(comm.rank()); LEN / 4];
        let started = comm.start_all_reduce(ones, ReduceOp::Max).expect("a start");
        let outcome = add(comm, round).expect("a sum");
        let (maxima, _) = started.wait().expect("a maximum");
        assert!(maxima.iter().all(|&max| max == round + u64::from(RANKS) - 1), "round {round} is wrong");
        // By a schedule, beside which the tree is looked after.
        let by_schedule = CallOptions { algo: Some(Algo::RecursiveDoubling), ..CallOptions::default() };
        let mut stops = [u64::from(progress.stops.load(Ordering::SeqCst))];
        let told = comm.all_reduce_with(&mut stops, ReduceOp::Max, &by_schedule).expect("a maximum");
        if comm.rank() == 0 {
            let count = |counter: &AtomicU64, is_so| counter.fetch_add(u64::from(is_so), Ordering::SeqCst);
            count(&progress.in_tree, outcome.path == Path::Tree);
            count(&progress.repaired, outcome.repaired || told.repaired);
            count(&progress.rounds, true);
        }
        if stops[0] > 0 {
            return;
        }
        while progress.rests.load(Ordering::SeqCst) {
            thread::sleep(LOOK_EVERY);
        }
    }
}

/// Run a job while `script` does something to its surroundings, and end it.
fn under_a_job(place: &mut Place, name: &str, attach: Attach, script: impl FnOnce(&mut Place, &Progress)) {
    let progress = Progress::default();
    let addr = place.addr;
    thread::scope(|scope| {
        let stop = Stop(&progress);
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let progress = &progress;
                scope.spawn(move || {
                    let comm = join(addr, name, rank, attach);
                    work(&comm, progress);
                    comm.leave();
                })
            })
            .collect();
        wait_until("no round", || progress.rounds() >= 3);
        script(place, &progress);
        drop(stop);
        ranks.into_iter().for_each(|rank| rank.join().expect("a rank panicked"));
    });
}

/// Ends the ranks, also when the script fails.
struct Stop<'p>(&'p Progress);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.rests.store(false, Ordering::SeqCst);
        self.0.stops.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_job_goes_on_without_its_controller_and_with_the_next_one() {
    for attach in [Attach::Udp, Attach::Shm] {
        let mut place = Place::start();
        let mut devices: Vec<_> = ["one", "two"].map(|name| (name, place.device(name))).into();
        under_a_job(&mut place, "job", attach, |place, progress| {
            // In the middle of operations.
            place.kill_controller();
            progress.wait_for("no round without a controller", |progress| &progress.rounds, 5);
            assert_eq!(progress.rounds(), progress.in_tree.load(Ordering::SeqCst), "all of them in the tree");
            place.start_controller();
            let serving = place.wait_for_tree("job", RANKS);
            progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
            assert_eq!(progress.repaired.load(Ordering::SeqCst), 0, "nothing was lost");
            // The next controller sees to what happens from then on.
            let at = devices.iter().position(|(name, _)| *name == serving[0]).expect("a device of these");
            devices.remove(at).1.kill();
            progress.wait_for("no repair", |progress| &progress.repaired, 1);
            progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
            assert_eq!(place.wait_for_tree("job", RANKS), [devices[0].0]);
        });
        // What the job had of the tree before is free by then as well.
        place.wait_until_free(1);
        assert!(place.report().jobs.is_empty());
    }
}

#[test]
fn two_restarts_in_a_row_are_one_more() {
    let mut place = Place::start();
    let _device = place.device("one");
    under_a_job(&mut place, "job", Attach::Udp, |place, progress| {
        for _ in 0..2 {
            place.kill_controller();
            place.start_controller();
        }
        place.wait_for_tree("job", RANKS);
        // Some ranks may have found the one in between, and be on their way.
        for _ in 0..4 {
            place.kill_controller();
            progress.wait_for("no round", |progress| &progress.rounds, 2);
            place.start_controller();
            wait_until("the job is not known", || place.job("job").is_some());
        }
        place.wait_for_tree("job", RANKS);
        progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
    });
    place.wait_until_free(1);
}

/// Nobody renews the group of a job that rests: it has ended when the job goes on.
#[test]
fn a_job_that_rested_without_a_controller_for_longer_than_a_lease_gets_another_tree() {
    for attach in [Attach::Udp, Attach::Shm] {
        let mut place = Place::start();
        let device = place.device("one");
        under_a_job(&mut place, "job", attach, |place, progress| {
            progress.rests.store(true, Ordering::SeqCst);
            place.kill_controller();
            // That it is over nobody says.
            thread::sleep(Duration::from_secs(2 * LEASE_S));
            progress.rests.store(false, Ordering::SeqCst);
            progress.wait_for("no round", |progress| &progress.rounds, 3);
            place.start_controller();
            place.wait_for_tree("job", RANKS);
            progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
        });
        place.wait_until_free(1);
        drop(device);
    }
}

/// A device that dies while nobody is there is got over by schedules, and the next controller has another.
#[test]
fn a_device_that_dies_without_a_controller_is_replaced_by_the_next_one() {
    let mut place = Place::start();
    let device = place.device("one");
    under_a_job(&mut place, "job", Attach::Shm, |place, progress| {
        place.kill_controller();
        device.kill();
        progress.wait_for("no repair", |progress| &progress.repaired, 1);
        place.start_controller();
        wait_until("the job is not known", || place.job("job").is_some_and(|job| job.running));
        // It comes after the ranks.
        let device = place.device("two");
        assert_eq!(place.wait_for_tree("job", RANKS), ["two"]);
        progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
        std::mem::forget(device);
    });
}

/// A device of the tree from before, or of the one after, dies about when the ranks move.
#[test]
fn a_device_that_dies_while_its_job_moves_is_got_over() {
    for nth in 0..4 {
        let (attach, mut rng) = (if nth % 2 == 0 { Attach::Shm } else { Attach::Udp }, Rng::new(nth));
        let mut place = Place::start();
        let first = place.device("one");
        let mut second = None;
        under_a_job(&mut place, "job", attach, |place, progress| {
            second = Some(place.device("two"));
            place.kill_controller();
            place.start_controller();
            wait_until("the job is not offered a tree", || {
                place.job("job").is_some_and(|job| job.is_offered || job.tree.is_some_and(|tree| tree.is_ok()))
            });
            // Choosing a moment is all that this is for.
            thread::sleep(rng.duration_up_to(Duration::from_millis(40)));
            first.kill();
            progress.wait_for("no round", |progress| &progress.rounds, 10);
            assert_eq!(place.wait_for_tree("job", RANKS), ["two"], "seed {nth}");
            progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
        });
        drop(second);
    }
}

/// All that are left name the dead rank, whether before or after the next controller is there, and shrink with that.
#[test]
fn a_rank_that_dies_without_a_controller_is_lost_to_the_next_one_too() {
    let mut place = Place::start();
    let _device = place.device("one");
    let (died, is_back) = (AtomicBool::new(false), AtomicBool::new(false));
    let wait_for = |flag: &AtomicBool| wait_until("a flag", || flag.load(Ordering::SeqCst));
    let addr = place.addr;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (died, is_back) = (&died, &is_back);
                scope.spawn(move || {
                    let comm = join(addr, "job", rank, Attach::Shm);
                    (0..3).for_each(|round| drop(add(&comm, round).expect("a sum")));
                    wait_for(died);
                    if rank == 2 {
                        // As a process that ends: its connections close, and it says nothing.
                        return;
                    }
                    let error = (3..).find_map(|round| add(&comm, round).err()).expect("one ends it");
                    assert!(matches!(&error, Error::RanksFailed { ranks, .. } if ranks.len() == 1), "{error}");
                    wait_for(is_back);
                    wait_until("the controller does not take the job over", || {
                        comm.controller() == ControllerState::Present
                    });
                    let left = comm.shrink().expect("both are there");
                    assert_eq!((left.rank(), left.size()), (rank, 2));
                    assert_eq!(add(&left, 9).expect("a sum").path, Path::Tree);
                    left.leave();
                })
            })
            .collect();
        wait_until("no job", || place.job("job").is_some_and(|job| job.running));
        place.kill_controller();
        died.store(true, Ordering::SeqCst);
        place.start_controller();
        is_back.store(true, Ordering::SeqCst);
        ranks.into_iter().for_each(|rank| rank.join().expect("a rank panicked"));
    });
    place.wait_until_free(1);
}

/// A controller that takes a job over, offers it a tree, and is gone when it has told `told` of the ranks where to move.
fn tell_some_and_die(addr: SocketAddr, told: &[u32]) {
    let listener = TcpListener::bind(addr).expect("its port");
    let mut ranks: Vec<(u32, TcpStream, FrameReader<TcpStream>)> = Vec::new();
    let mut last_view = 0;
    while ranks.len() < RANKS as usize {
        let (stream, _) = listener.accept().expect("somebody dials");
        let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
        // Devices dial as well, and are left alone.
        if let Ok(Greeting::Client) = reader.recv() {
            let Ok(ClientRequest::Resume(known)) = reader.recv() else { panic!("a rank of before") };
            last_view = last_view.max(known.view);
            ranks.push((known.request.rank.0, stream, reader));
        }
    }
    let view = last_view + 1;
    for (_, stream, _) in &mut ranks {
        send(stream, &ClientReply::Resumed { view }).expect("it listens");
        send(stream, &ClientReply::Offer { view }).expect("it listens");
    }
    let promised = ranks.iter_mut().map(|(_, _, reader)| {
        loop {
            if let ClientRequest::Pause { at, .. } = reader.recv().expect("it answers") {
                break at;
            }
        }
    });
    let call = promised.max().expect("there are ranks");
    for (_, stream, _) in ranks.iter_mut().filter(|(rank, ..)| told.contains(rank)) {
        send(stream, &ClientReply::MoveAt { view, call }).expect("it listens");
    }
}

/// None of them goes where others do not follow, and none waits for those that do not come.
#[test]
fn a_controller_that_dies_when_it_has_told_some_ranks_where_to_move_parts_nobody() {
    for (told, attach) in
        [(&[][..], Attach::Shm), (&[0], Attach::Udp), (&[1, 2], Attach::Shm), (&[0, 1, 2], Attach::Udp)]
    {
        let mut place = Place::start();
        let _device = place.device("one");
        under_a_job(&mut place, "job", attach, |place, progress| {
            place.kill_controller();
            tell_some_and_die(place.addr, told);
            progress.wait_for("no round", |progress| &progress.rounds, 20);
            place.start_controller();
            place.wait_for_tree("job", RANKS);
            progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
        });
        place.wait_until_free(1);
    }
}
