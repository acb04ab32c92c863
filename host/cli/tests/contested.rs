//! Controllers that contend for the same ranks and devices, and failures during the takeover of a job.
//!
//! Controllers and devices are processes. Ranks are threads. Ranks and devices reach their controller through a relay
//! each, so that each of them can be redirected to another controller alone.

mod common;

use common::{Server, checked_sum, exit_status, serve, stderr, sumac};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use sumac::comm::{CallOptions, Canceller};
use sumac::controller::proto::{ClientReply, ClientRequest, JobStatus, Transport};
use sumac::controller::status;
use sumac::{Algo, Communicator, Error, JoinConfig, Path, ReduceOp};
use sumac_hal::ctrl::{FrameReader, Hello, send};

/// The limit of every wait; a passing test never reaches it.
const LONG: Duration = Duration::from_secs(30);

const POLL_INTERVAL: Duration = Duration::from_millis(10);

const RANKS: u32 = 3;

/// Elements of an operation: enough for several chunks.
const LEN: usize = 30_000;

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// Start a controller at this address; port 0 picks a free one.
fn controller(listen: SocketAddr) -> (Server, SocketAddr) {
    let mut controller = serve(&["controller", "--listen", &listen.to_string(), "--prefer-tree", "--lease", "2"]);
    let line = controller.line();
    let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok()).expect("an address");
    (controller, addr)
}

fn anywhere() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn device(name: &str, controller: SocketAddr) -> Server {
    let mut device = serve(&["device", "--name", name, "--controller", &controller.to_string()]);
    assert_eq!(device.line(), format!("ready {name}"));
    device
}

fn job(addr: SocketAddr, name: &str) -> Option<JobStatus> {
    status(addr).expect("a report").jobs.into_iter().find(|job| job.name == name)
}

fn has_device(addr: SocketAddr, name: &str) -> bool {
    status(addr).expect("a report").devices.iter().any(|device| device.name == name)
}

/// A relay between one rank or device and a controller, which can be redirected.
struct Relay {
    addr: SocketAddr,
    shared: Arc<Mutex<Target>>,
}

struct Target {
    to: SocketAddr,
    open: Vec<TcpStream>,
}

impl Relay {
    fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind(anywhere()).expect("a port");
        let addr = listener.local_addr().expect("bound");
        let shared = Arc::new(Mutex::new(Target { to, open: Vec::new() }));
        let target = Arc::clone(&shared);
        // The thread ends with the test's process.
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let to = target.lock().expect("no panic").to;
                let Ok(far) = TcpStream::connect(to) else { continue };
                let copy = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
                target.lock().expect("no panic").open.extend([copy(&near), copy(&far)]);
                for (mut from, mut to) in [(copy(&near), copy(&far)), (far, near)] {
                    thread::spawn(move || {
                        // However copying ends, close both connections.
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                        let _ = from.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { addr, shared }
    }

    /// Close all open connections and redirect new ones.
    fn redirect(&self, to: SocketAddr) {
        let mut target = self.shared.lock().expect("no panic");
        target.to = to;
        // Fails for a connection that has ended.
        target.open.drain(..).for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }
}

/// A rank that works on a thread of its own until it is stopped or fails.
struct Member {
    thread: JoinHandle<Result<(), Error>>,
    progress: Arc<Progress>,
    canceller: Canceller,
}

#[derive(Default)]
struct Progress {
    rounds: AtomicU64,
    in_tree: AtomicU64,
    /// Ends the work of all ranks, if it is set for rank 0.
    stops: AtomicBool,
    /// Why the rank has ended.
    error: OnceLock<String>,
}

/// Run rounds until rank 0 is to stop. All ranks stop after the same round.
fn work(comm: &Communicator, progress: &Progress) -> Result<(), Error> {
    let host_collective = CallOptions { algo: Some(Algo::RecursiveDoubling), ..CallOptions::default() };
    for round in 0.. {
        let outcome = checked_sum(comm, round, LEN)?;
        progress.rounds.fetch_add(1, Ordering::SeqCst);
        progress.in_tree.fetch_add((outcome.path == Path::Tree).into(), Ordering::SeqCst);
        let mut stops = [u64::from(comm.rank() == 0 && progress.stops.load(Ordering::SeqCst))];
        comm.all_reduce_with(&mut stops, ReduceOp::Max, &host_collective)?;
        if stops[0] > 0 {
            break;
        }
    }
    Ok(())
}

impl Member {
    /// Let all ranks join a job, each at its own address, and begin to work.
    fn join_all(name: &str, transport: Transport, addrs: [SocketAddr; RANKS as usize]) -> Vec<Self> {
        let joining = (0..).zip(addrs).map(|(rank, addr)| {
            let mut config = JoinConfig::new(addr, name, rank, RANKS);
            (config.transport, config.deadline) = (transport, Duration::from_secs(15));
            thread::spawn(move || Communicator::join(config).expect("join"))
        });
        let joining: Vec<_> = joining.collect();
        let comms = joining.into_iter().map(|rank| rank.join().expect("a rank panicked"));
        let members: Vec<Self> = comms
            .map(|comm| {
                let (canceller, progress) = (comm.canceller(), Arc::new(Progress::default()));
                let own = Arc::clone(&progress);
                let thread = thread::spawn(move || {
                    work(&comm, &own).inspect_err(|error| _ = own.error.set(error.to_string()))?;
                    comm.leave();
                    Ok(())
                });
                Self { thread, progress, canceller }
            })
            .collect();
        members[0].wait_for(|progress| &progress.rounds, 3);
        members
    }

    /// Wait until a counter has increased by `more`.
    fn wait_for(&self, counter: impl Fn(&Progress) -> &AtomicU64, more: u64) {
        let before = counter(&self.progress).load(Ordering::SeqCst);
        wait_until("the job makes no progress", || {
            assert!(!self.thread.is_finished(), "the rank has ended: {:?}", self.progress.error.get());
            counter(&self.progress).load(Ordering::SeqCst) >= before + more
        });
    }

    fn end(self) -> Result<(), Error> {
        wait_until("the rank does not end", || self.thread.is_finished());
        self.thread.join().expect("a rank panicked")
    }
}

/// End a job in order.
fn stop(members: Vec<Member>) {
    members[0].progress.stops.store(true, Ordering::SeqCst);
    members.into_iter().for_each(|member| member.end().expect("the job is intact"));
}

/// Assert that all survivors name the dead rank and the same first failed call.
fn expect_loss_of(dead: u32, survivors: Vec<Member>) {
    let errors: Vec<Error> = survivors.into_iter().map(|member| member.end().expect_err("a rank is dead")).collect();
    let calls: Vec<u64> = errors
        .iter()
        .map(|error| match error {
            Error::RanksFailed { ranks, operation, .. } if ranks.iter().map(|rank| rank.0).eq([dead]) => *operation,
            other => panic!("{other}"),
        })
        .collect();
    assert!(calls.windows(2).all(|pair| pair[0] == pair[1]), "first failed calls: {calls:?}");
}

#[test]
fn controller_at_a_used_address_exits_with_2_and_names_it() {
    let (_first, addr) = controller(anywhere());
    let _device = device("one", addr);
    let members = Member::join_all("job", Transport::Auto, [addr; 3]);
    let second = sumac(&["controller", "--listen", &addr.to_string()]);
    assert_eq!(exit_status(&second), 2);
    assert!(stderr(&second).contains(&addr.to_string()), "{}", stderr(&second));
    members[0].wait_for(|progress| &progress.in_tree, 5);
    assert_eq!(job(addr, "job").map(|job| job.view), Some(0), "the job was affected");
    stop(members);
}

/// Two controllers with devices and jobs of the same names are independent.
#[test]
fn jobs_of_the_same_name_at_two_controllers_are_independent() {
    for transport in [Transport::Udp, Transport::Shm] {
        let controllers = [controller(anywhere()), controller(anywhere())];
        let devices = [0, 1].map(|at| device("one", controllers[at].1));
        let [one, other] = [0, 1].map(|at| Member::join_all("job", transport, [controllers[at].1; 3]));
        one[0].wait_for(|progress| &progress.in_tree, 5);
        // One controller ends with its device; the other job continues in its tree.
        let [(first, _), (_second, addr)] = controllers;
        let [device, _other_device] = devices;
        first.kill();
        device.kill();
        one[0].wait_for(|progress| &progress.rounds, 5);
        let rounds = other[0].progress.rounds.load(Ordering::SeqCst);
        other[0].wait_for(|progress| &progress.in_tree, 10);
        assert!(other[0].progress.rounds.load(Ordering::SeqCst) > rounds);
        assert_eq!(job(addr, "job").map(|job| (job.view, job.joined)), Some((0, RANKS)));
        stop(one);
        stop(other);
    }
}

/// A redirected device serves only its new controller. The old controller's job continues without it, and a job of the
/// new one uses it.
#[test]
fn device_redirected_to_another_controller_serves_only_that_one() {
    let ((_first, of_first), (_second, of_second)) = (controller(anywhere()), controller(anywhere()));
    let relay = Relay::start(of_first);
    let _device = device("one", relay.addr);
    let members = Member::join_all("job", Transport::Udp, [of_first; 3]);
    members[0].wait_for(|progress| &progress.in_tree, 3);
    relay.redirect(of_second);
    wait_until("the device does not register", || has_device(of_second, "one"));
    wait_until("the device is still registered", || !has_device(of_first, "one"));
    members[0].wait_for(|progress| &progress.rounds, 5);
    // The first controller's group on the device expires without renewals.
    let others = Member::join_all("job", Transport::Udp, [of_second; 3]);
    others[0].wait_for(|progress| &progress.in_tree, 5);
    assert!(job(of_first, "job").is_some_and(|job| job.tree.is_none_or(|tree| tree.is_err())), "a tree of no device");
    members[0].wait_for(|progress| &progress.rounds, 5);
    stop(members);
    stop(others);
}

/// Two of three ranks are redirected to another controller, and each controller takes its absent ranks for lost.
/// Whatever the ranks decide, none returns a wrong sum, and every error names the reason.
#[test]
fn ranks_split_between_two_controllers_end_with_named_errors() {
    for transport in [Transport::Udp, Transport::Shm] {
        let ((_first, of_first), (_second, of_second)) = (controller(anywhere()), controller(anywhere()));
        let _devices = [device("one", of_first), device("two", of_second)];
        let relays = [(); 3].map(|()| Relay::start(of_first));
        let members = Member::join_all("job", transport, [0, 1, 2].map(|rank: usize| relays[rank].addr));
        relays[..2].iter().for_each(|relay| relay.redirect(of_second));
        // The first controller reports the two as dead to the third, which is then alone.
        let mut errors = members.into_iter().map(|member| member.end().expect_err("the job is torn"));
        let [zero, one, two] = [(); 3].map(|()| errors.next().expect("three"));
        for error in [&zero, &one, &two] {
            let is_named =
                matches!(error, Error::RanksFailed { .. } | Error::Partitioned { .. } | Error::OutcomeUnknown { .. });
            assert!(is_named, "{transport}: {zero}; {one}; {two}");
        }
        // The two ranks at the second controller agree.
        if let (Error::RanksFailed { ranks: a, operation: at, .. }, Error::RanksFailed { ranks: b, operation, .. }) =
            (&zero, &one)
        {
            assert_eq!((a, at), (b, operation), "{transport}");
        }
        for addr in [of_first, of_second] {
            wait_until("the torn job stays", || status(addr).expect("a report").jobs.is_empty());
        }
    }
}

/// A rank dies around the takeover of its job: after some ranks have reconnected, after all have, or while they
/// migrate.
#[test]
fn survivors_name_rank_killed_during_takeover() {
    for (nth, pause_ms) in [0, 150, 400, 700].into_iter().enumerate() {
        let transport = if nth % 2 == 0 { Transport::Shm } else { Transport::Udp };
        let (first, addr) = controller(anywhere());
        let _device = device("one", addr);
        let mut members = Member::join_all("job", transport, [addr; 3]);
        first.kill();
        let (_second, _) = controller(addr);
        // The sleep chooses a moment; nothing is synchronised by it.
        thread::sleep(Duration::from_millis(pause_ms));
        let dead = members.remove(nth % 3);
        dead.canceller.cancel();
        assert!(matches!(dead.end(), Err(Error::Cancelled)));
        expect_loss_of((nth % 3) as u32, members);
    }
}

/// How far a takeover gets before the controller is gone again.
#[derive(Clone, Copy)]
enum Until {
    /// All ranks have reconnected, and none has got a reply.
    Reconnected,
    /// So many ranks have got a reply.
    Resumed(u32),
    /// All ranks have got an offer, and so many the migration point.
    Migrating(u32),
}

/// Take over a job at the address of its former controller, up to a point.
fn take_over(addr: SocketAddr, until: Until) {
    let listener = TcpListener::bind(addr).expect("its port");
    let mut ranks: Vec<(u32, TcpStream, FrameReader<TcpStream>)> = Vec::new();
    let mut view = 0;
    while ranks.len() < RANKS as usize {
        let (stream, _) = listener.accept().expect("a connection");
        let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
        // Ignore devices, which connect as well.
        if let Ok(Hello::Client) = reader.recv() {
            let Ok(ClientRequest::Resume(known)) = reader.recv() else { panic!("a rank that resumes") };
            view = u32::max(view, known.view + 1);
            ranks.push((known.request.rank.0, stream, reader));
        }
    }
    ranks.sort_by_key(|(rank, ..)| *rank);
    let send_to = |ranks: &mut [(u32, TcpStream, FrameReader<TcpStream>)], some: u32, reply: ClientReply| {
        let some = ranks.iter_mut().take(some as usize);
        some.for_each(|(_, stream, _)| send(stream, &reply).expect("it listens"));
    };
    match until {
        Until::Reconnected => {}
        Until::Resumed(some) => send_to(&mut ranks, some, ClientReply::Resumed { view }),
        Until::Migrating(some) => {
            send_to(&mut ranks, RANKS, ClientReply::Resumed { view });
            send_to(&mut ranks, RANKS, ClientReply::Offer { view });
            let promised = ranks.iter_mut().map(|(_, _, reader)| {
                loop {
                    if let ClientRequest::Pause { at, .. } = reader.recv().expect("a reply") {
                        break at;
                    }
                }
            });
            let call = promised.max().expect("there are ranks");
            send_to(&mut ranks, some, ClientReply::MoveAt { view, call });
        }
    }
}

const POINTS: [Until; 6] = [
    Until::Reconnected,
    Until::Resumed(1),
    Until::Resumed(3),
    Until::Migrating(0),
    Until::Migrating(2),
    Until::Migrating(3),
];

/// A rank dies right after the controller. The survivors agree on the dead rank with the controller after that.
#[test]
fn survivors_name_rank_killed_with_a_controller_during_takeover() {
    for (nth, until) in POINTS.into_iter().enumerate() {
        let transport = if nth % 2 == 0 { Transport::Shm } else { Transport::Udp };
        let (first, addr) = controller(anywhere());
        let _device = device("one", addr);
        let mut members = Member::join_all("job", transport, [addr; 3]);
        first.kill();
        take_over(addr, until);
        let dead = members.remove(nth % 3);
        dead.canceller.cancel();
        let (_third, _) = controller(addr);
        assert!(matches!(dead.end(), Err(Error::Cancelled)));
        expect_loss_of((nth % 3) as u32, members);
    }
}

/// The device dies right after the controller. The ranks continue among themselves, then in the tree of the next
/// device.
#[test]
fn job_survives_device_killed_with_a_controller_during_takeover() {
    for (nth, until) in POINTS.into_iter().enumerate() {
        let transport = if nth % 2 == 0 { Transport::Udp } else { Transport::Shm };
        let (first, addr) = controller(anywhere());
        let old = device("one", addr);
        let members = Member::join_all("job", transport, [addr; 3]);
        first.kill();
        take_over(addr, until);
        old.kill();
        let (_third, _) = controller(addr);
        let _device = device("two", addr);
        members[0].wait_for(|progress| &progress.rounds, 5);
        wait_until("the job has no tree of the next device", || {
            let tree = job(addr, "job").and_then(|job| job.tree?.ok());
            tree.is_some_and(|tree| tree.devices == ["two"])
        });
        members[0].wait_for(|progress| &progress.in_tree, 3);
        stop(members);
    }
}
