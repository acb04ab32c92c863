//! Takeover of a running job: its controller is killed and another one starts at the same address. Operations continue
//! meanwhile, the ranks report their job to the new controller, and it assigns a tree.
//!
//! Controllers and devices are processes; ranks are threads.

mod common;

use common::{Server, checked_sum, serve};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::{CallOptions, ControllerState};
use sumac::controller::proto::{ClientReply, ClientRequest, JobStatus, StatusReport, Transport};
use sumac::controller::status;
use sumac::select::Algo;
use sumac::{Communicator, Error, JoinConfig, Path, ReduceOp};
use sumac_hal::ctrl::{FrameReader, Hello, send};
use sumac_hal::emu::Rng;

/// The limit of every wait; a passing test never reaches it.
const LONG: Duration = Duration::from_secs(120);

/// How often to poll.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

const RANKS: u32 = 3;

/// Elements of an operation: enough for several chunks.
const LEN: usize = 100_000;

/// The lease of groups, in seconds.
const LEASE_S: u64 = 2;

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// A controller that can be killed and restarted.
struct Restartable {
    addr: SocketAddr,
    controller: Option<Server>,
}

impl Restartable {
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

    /// Wait until all ranks of a job have reconnected and it has a tree; return the tree's devices.
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

    /// Wait until no device holds groups, slots or memory.
    fn wait_until_free(&self, devices: usize) {
        let deadline = Instant::now() + LONG;
        loop {
            let report = self.report();
            let stats = report.devices.iter().map(|device| device.stats.as_ref().expect("a reply"));
            let held: Vec<_> =
                stats.map(|stats| (stats.groups, stats.slots_used, stats.slot_memory_used_bytes)).collect();
            if held == vec![(0, 0, 0); devices] {
                return;
            }
            assert!(Instant::now() < deadline, "groups, slots and bytes that devices hold: {held:?}");
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// The progress of the ranks.
#[derive(Default)]
struct Progress {
    rounds: AtomicU64,
    in_tree: AtomicU64,
    /// As rank 0 counts them, within operations and between them.
    recoveries: AtomicU64,
    /// Tells the ranks to stop; all stop after the same round.
    stops: AtomicBool,
    /// Tells the ranks to make no calls for a while.
    rests: AtomicBool,
}

impl Progress {
    fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::SeqCst)
    }

    /// Wait for the first recovery. It may have been before this call.
    fn wait_for_recovery(&self) {
        wait_until("no recovery", || self.recoveries.load(Ordering::SeqCst) > 0);
    }

    /// Wait until a counter has increased by `more`.
    fn wait_for(&self, what: &str, counter: impl Fn(&Self) -> &AtomicU64, more: u64) {
        let before = counter(self).load(Ordering::SeqCst);
        wait_until(what, || counter(self).load(Ordering::SeqCst) >= before + more);
    }
}

fn join(addr: SocketAddr, job: &str, rank: u32, transport: Transport) -> Communicator {
    let config = JoinConfig { transport, ..JoinConfig::new(addr, job, rank, RANKS) };
    Communicator::join(config).expect("join")
}

/// Run rounds until all ranks are to stop. Another operation is in flight around the counted one, so that a job also
/// migrates between its start and its end.
fn work(comm: &Communicator, progress: &Progress) {
    for round in 0.. {
        let ones = vec![round + u64::from(comm.rank()); LEN / 4];
        let started = comm.start_all_reduce(ones, ReduceOp::Max).expect("a start");
        let outcome = checked_sum(comm, round, LEN).expect("a sum");
        let (maxima, _) = started.wait().expect("a maximum");
        assert!(maxima.iter().all(|&max| max == round + u64::from(RANKS) - 1), "round {round} is wrong");
        // A host collective, during which the rank also advances the tree.
        let host_collective = CallOptions { algo: Some(Algo::RecursiveDoubling), ..CallOptions::default() };
        let mut stops = [u64::from(progress.stops.load(Ordering::SeqCst))];
        comm.all_reduce_with(&mut stops, ReduceOp::Max, &host_collective).expect("a maximum");
        if comm.rank() == 0 {
            // A device may also be lost when none of these operations needs it.
            progress.recoveries.store(comm.recoveries().count.into(), Ordering::SeqCst);
            progress.in_tree.fetch_add(u64::from(outcome.path == Path::Tree), Ordering::SeqCst);
            progress.rounds.fetch_add(1, Ordering::SeqCst);
        }
        if stops[0] > 0 {
            return;
        }
        while progress.rests.load(Ordering::SeqCst) {
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Run a job, call `script` meanwhile, and end the job.
fn with_job(
    place: &mut Restartable,
    name: &str,
    transport: Transport,
    script: impl FnOnce(&mut Restartable, &Progress),
) {
    let progress = Progress::default();
    let addr = place.addr;
    thread::scope(|scope| {
        let stop = Stop(&progress);
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let progress = &progress;
                scope.spawn(move || {
                    let comm = join(addr, name, rank, transport);
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

/// Stops the ranks when it is dropped, also if the script fails.
struct Stop<'p>(&'p Progress);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.rests.store(false, Ordering::SeqCst);
        self.0.stops.store(true, Ordering::SeqCst);
    }
}

#[test]
fn job_continues_without_controller_and_with_the_next_one() {
    for transport in [Transport::Udp, Transport::Shm] {
        let mut place = Restartable::start();
        let mut devices: Vec<_> = ["one", "two"].map(|name| (name, place.device(name))).into();
        with_job(&mut place, "job", transport, |place, progress| {
            // Operations are in flight.
            place.kill_controller();
            progress.wait_for("no round without a controller", |progress| &progress.rounds, 5);
            assert_eq!(progress.rounds(), progress.in_tree.load(Ordering::SeqCst), "all of them in the tree");
            place.start_controller();
            let serving = place.wait_for_tree("job", RANKS);
            progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
            assert_eq!(progress.recoveries.load(Ordering::SeqCst), 0, "nothing was lost");
            // The next controller handles later failures.
            let at = devices.iter().position(|(name, _)| *name == serving[0]).expect("a device of these");
            devices.remove(at).1.kill();
            progress.wait_for_recovery();
            progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
            assert_eq!(place.wait_for_tree("job", RANKS), [devices[0].0]);
        });
        // The resources of the former tree are free by then, too.
        place.wait_until_free(1);
        assert!(place.report().jobs.is_empty());
    }
}

#[test]
fn job_survives_repeated_controller_restarts() {
    let mut place = Restartable::start();
    let _device = place.device("one");
    with_job(&mut place, "job", Transport::Udp, |place, progress| {
        for _ in 0..2 {
            place.kill_controller();
            place.start_controller();
        }
        place.wait_for_tree("job", RANKS);
        // Some ranks may have found the controller in between and be migrating.
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

/// The group of an idle job is not renewed and expires before the job continues.
#[test]
fn job_idle_without_controller_for_longer_than_a_lease_gets_another_tree() {
    for transport in [Transport::Udp, Transport::Shm] {
        let mut place = Restartable::start();
        let device = place.device("one");
        with_job(&mut place, "job", transport, |place, progress| {
            progress.rests.store(true, Ordering::SeqCst);
            place.kill_controller();
            // Wait for the lease to expire, which no message reports.
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

/// The job survives by host collectives, and the next controller provides another device.
#[test]
fn device_killed_without_controller_is_replaced_by_the_next_controller() {
    let mut place = Restartable::start();
    let device = place.device("one");
    with_job(&mut place, "job", Transport::Shm, |place, progress| {
        place.kill_controller();
        device.kill();
        progress.wait_for_recovery();
        place.start_controller();
        wait_until("the job is not known", || place.job("job").is_some_and(|job| job.running));
        // The device registers after the ranks.
        let device = place.device("two");
        assert_eq!(place.wait_for_tree("job", RANKS), ["two"]);
        progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
        std::mem::forget(device);
    });
}

/// The device of the former tree dies around the migration of the ranks.
#[test]
fn job_survives_device_killed_during_migration() {
    for nth in 0..4 {
        let (transport, mut rng) = (if nth % 2 == 0 { Transport::Shm } else { Transport::Udp }, Rng::new(nth));
        let mut place = Restartable::start();
        let first = place.device("one");
        let mut second = None;
        with_job(&mut place, "job", transport, |place, progress| {
            second = Some(place.device("two"));
            place.kill_controller();
            place.start_controller();
            wait_until("the job is not offered a tree", || {
                place.job("job").is_some_and(|job| job.is_offered || job.tree.is_some_and(|tree| tree.is_ok()))
            });
            // The sleep chooses a moment; nothing is synchronised by it.
            thread::sleep(rng.duration_up_to(Duration::from_millis(40)));
            first.kill();
            progress.wait_for("no round", |progress| &progress.rounds, 10);
            assert_eq!(place.wait_for_tree("job", RANKS), ["two"], "seed {nth}");
            progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
        });
        drop(second);
    }
}

/// The survivors name the dead rank, whether before or after the takeover, and shrink with the new controller.
#[test]
fn rank_lost_without_controller_is_lost_for_the_next_one_too() {
    let mut place = Restartable::start();
    let _device = place.device("one");
    let (died, is_back) = (AtomicBool::new(false), AtomicBool::new(false));
    let wait_for = |flag: &AtomicBool| wait_until("a flag", || flag.load(Ordering::SeqCst));
    let addr = place.addr;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let (died, is_back) = (&died, &is_back);
                scope.spawn(move || {
                    let comm = join(addr, "job", rank, Transport::Shm);
                    (0..3).for_each(|round| drop(checked_sum(&comm, round, LEN).expect("a sum")));
                    wait_for(died);
                    if rank == 2 {
                        // Like a process that ends: its connections close without a message.
                        return;
                    }
                    let error = (3..).find_map(|round| checked_sum(&comm, round, LEN).err()).expect("one ends it");
                    assert!(matches!(&error, Error::RanksFailed { ranks, .. } if ranks.len() == 1), "{error}");
                    wait_for(is_back);
                    wait_until("the controller does not take the job over", || {
                        comm.controller() == ControllerState::Connected
                    });
                    let shrunk = comm.shrink().expect("both are there");
                    assert_eq!((shrunk.rank(), shrunk.size()), (rank, 2));
                    assert_eq!(checked_sum(&shrunk, 9, LEN).expect("a sum").path, Path::Tree);
                    shrunk.leave();
                })
            })
            .collect();
        wait_until("no job", || place.job("job").is_some_and(|job| job.running));
        place.kill_controller();
        died.store(true, Ordering::SeqCst);
        place.start_controller();
        // Otherwise the survivors' job may be planned before the device has registered again.
        wait_until("the device does not return", || !place.report().devices.is_empty());
        is_back.store(true, Ordering::SeqCst);
        ranks.into_iter().for_each(|rank| rank.join().expect("a rank panicked"));
    });
    place.wait_until_free(1);
}

/// Take over a job, offer it a tree, and end after the ranks in `notified` have got the migration point.
fn notify_some_and_end(addr: SocketAddr, notified: &[u32]) {
    let listener = TcpListener::bind(addr).expect("its port");
    let mut ranks: Vec<(u32, TcpStream, FrameReader<TcpStream>)> = Vec::new();
    let mut last_view = 0;
    while ranks.len() < RANKS as usize {
        let (stream, _) = listener.accept().expect("a connection");
        let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
        // Ignore devices, which connect as well.
        if let Ok(Hello::Client) = reader.recv() {
            let Ok(ClientRequest::Resume(known)) = reader.recv() else { panic!("a rank that resumes") };
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
            if let ClientRequest::Pause { at, .. } = reader.recv().expect("a reply") {
                break at;
            }
        }
    });
    let call = promised.max().expect("there are ranks");
    for (_, stream, _) in ranks.iter_mut().filter(|(rank, ..)| notified.contains(rank)) {
        send(stream, &ClientReply::MoveAt { view, call }).expect("it listens");
    }
}

/// No rank migrates without the others, and none waits for ranks that do not migrate.
#[test]
fn ranks_stay_together_if_controller_dies_while_it_announces_a_migration() {
    for (notified, transport) in
        [(&[][..], Transport::Shm), (&[0], Transport::Udp), (&[1, 2], Transport::Shm), (&[0, 1, 2], Transport::Udp)]
    {
        let mut place = Restartable::start();
        let _device = place.device("one");
        with_job(&mut place, "job", transport, |place, progress| {
            place.kill_controller();
            notify_some_and_end(place.addr, notified);
            progress.wait_for("no round", |progress| &progress.rounds, 20);
            place.start_controller();
            place.wait_for_tree("job", RANKS);
            progress.wait_for("no round in the tree", |progress| &progress.in_tree, 3);
        });
        place.wait_until_free(1);
    }
}
