//! Controllers that contend for the same ranks and devices, and what dies while a job is taken over.
//!
//! Controllers and devices are processes of their own. Ranks are threads, and reach their controller through a relay each,
//! as do the devices, so that each of them may be turned to another controller alone.

mod common;

use common::{Server, exit_status, serve, stderr, sumac};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use sumac::comm::{CallOptions, Canceller};
use sumac::controller::proto::{Attach, ClientReply, ClientRequest, JobStatus};
use sumac::controller::status;
use sumac::{Algo, Communicator, Error, JoinConfig, Outcome, Path, ReduceOp};
use sumac_hal::ctrl::{FrameReader, Greeting, send};

/// More than anything here takes.
const LONG: Duration = Duration::from_secs(30);

const LOOK_EVERY: Duration = Duration::from_millis(10);

const RANKS: u32 = 3;

/// Elements of an operation: enough for several chunks.
const LEN: usize = 30_000;

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(LOOK_EVERY);
    }
}

/// A controller at this address; port 0 is any that is free.
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

/// The way of one rank or device to a controller, which may be turned to another one.
struct Relay {
    addr: SocketAddr,
    shared: Arc<Mutex<Turned>>,
}

struct Turned {
    to: SocketAddr,
    open: Vec<TcpStream>,
}

impl Relay {
    fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind(anywhere()).expect("a port");
        let addr = listener.local_addr().expect("bound");
        let shared = Arc::new(Mutex::new(Turned { to, open: Vec::new() }));
        let turned = Arc::clone(&shared);
        // It goes with the test's process.
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let to = turned.lock().expect("no panic").to;
                let Ok(far) = TcpStream::connect(to) else { continue };
                let copy = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
                turned.lock().expect("no panic").open.extend([copy(&near), copy(&far)]);
                for (mut from, mut to) in [(copy(&near), copy(&far)), (far, near)] {
                    thread::spawn(move || {
                        // Whichever way it ends, it ends.
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                        let _ = from.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { addr, shared }
    }

    /// Cut what is open, and lead there what comes from now on.
    fn turn(&self, to: SocketAddr) {
        let mut turned = self.shared.lock().expect("no panic");
        turned.to = to;
        // One that has ended is fine.
        turned.open.drain(..).for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }
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

/// What a rank does in a thread of its own, until it is stopped or fails.
struct Member {
    thread: JoinHandle<Result<(), Error>>,
    progress: Arc<Progress>,
    canceller: Canceller,
}

#[derive(Default)]
struct Progress {
    rounds: AtomicU64,
    in_tree: AtomicU64,
    /// Of rank 0, it is what all do.
    stops: AtomicBool,
}

/// Add up until rank 0 is to stop, all behind the same round.
fn work(comm: &Communicator, progress: &Progress) -> Result<(), Error> {
    let by_schedule = CallOptions { algo: Some(Algo::RecursiveDoubling), ..CallOptions::default() };
    for round in 0.. {
        let outcome = add(comm, round)?;
        progress.rounds.fetch_add(1, Ordering::SeqCst);
        progress.in_tree.fetch_add((outcome.path == Path::Tree).into(), Ordering::SeqCst);
        let mut stops = [u64::from(comm.rank() == 0 && progress.stops.load(Ordering::SeqCst))];
        comm.all_reduce_with(&mut stops, ReduceOp::Max, &by_schedule)?;
        if stops[0] > 0 {
            break;
        }
    }
    Ok(())
}

impl Member {
    /// Join a job, each rank at its own address, and begin to work.
    fn join_all(name: &str, attach: Attach, addrs: [SocketAddr; RANKS as usize]) -> Vec<Self> {
        let joining = (0..).zip(addrs).map(|(rank, addr)| {
            let mut config = JoinConfig::new(addr, name, rank, RANKS);
            (config.attach, config.deadline) = (attach, Duration::from_secs(15));
            thread::spawn(move || Communicator::join(config).expect("join"))
        });
        let joining: Vec<_> = joining.collect();
        let comms = joining.into_iter().map(|rank| rank.join().expect("a rank panicked"));
        let members: Vec<Self> = comms
            .map(|comm| {
                let (canceller, progress) = (comm.canceller(), Arc::new(Progress::default()));
                let own = Arc::clone(&progress);
                let thread = thread::spawn(move || {
                    work(&comm, &own)?;
                    comm.leave();
                    Ok(())
                });
                Self { thread, progress, canceller }
            })
            .collect();
        members[0].wait_for(|progress| &progress.rounds, 3);
        members
    }

    /// Wait until a counter has gone on by so many.
    fn wait_for(&self, counter: impl Fn(&Progress) -> &AtomicU64, more: u64) {
        let before = counter(&self.progress).load(Ordering::SeqCst);
        wait_until("the job does not go on", || {
            assert!(!self.thread.is_finished(), "the rank has ended");
            counter(&self.progress).load(Ordering::SeqCst) >= before + more
        });
    }

    fn end(self) -> Result<(), Error> {
        wait_until("the rank does not end", || self.thread.is_finished());
        self.thread.join().expect("a rank panicked")
    }
}

/// End a job in good order.
fn stop(members: Vec<Member>) {
    members[0].progress.stops.store(true, Ordering::SeqCst);
    members.into_iter().for_each(|member| member.end().expect("nothing happened to it"));
}

/// Check that the ranks that are left name the dead one, at the same call.
fn expect_loss_of(dead: u32, left: Vec<Member>) {
    let errors: Vec<Error> = left.into_iter().map(|member| member.end().expect_err("a rank is dead")).collect();
    let calls: Vec<u64> = errors
        .iter()
        .map(|error| match error {
            Error::RanksFailed { ranks, operation, .. } if ranks.iter().map(|rank| rank.0).eq([dead]) => *operation,
            other => panic!("{other}"),
        })
        .collect();
    assert!(calls.windows(2).all(|pair| pair[0] == pair[1]), "they fail from call {calls:?} on");
}

#[test]
fn controller_at_a_taken_address_ends_with_2_and_names_it() {
    let (_first, addr) = controller(anywhere());
    let _device = device("one", addr);
    let members = Member::join_all("job", Attach::Auto, [addr; 3]);
    let second = sumac(&["controller", "--listen", &addr.to_string()]);
    assert_eq!(exit_status(&second), 2);
    assert!(stderr(&second).contains(&addr.to_string()), "{}", stderr(&second));
    members[0].wait_for(|progress| &progress.in_tree, 5);
    assert_eq!(job(addr, "job").map(|job| job.view), Some(0), "the job has heard of it");
    stop(members);
}

/// Two controllers with devices and jobs of the same names have nothing to do with each other.
#[test]
fn same_names_at_two_controllers_are_two_jobs() {
    for attach in [Attach::Udp, Attach::Shm] {
        let controllers = [controller(anywhere()), controller(anywhere())];
        let devices = [0, 1].map(|at| device("one", controllers[at].1));
        let [one, other] = [0, 1].map(|at| Member::join_all("job", attach, [controllers[at].1; 3]));
        one[0].wait_for(|progress| &progress.in_tree, 5);
        // One of them ends with all that it has: the other job goes on in its tree.
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

/// The device does what its new controller says, and no longer what the old one did: that job goes on without it, and
/// another one has it.
#[test]
fn device_that_is_turned_to_another_controller_serves_that_one_alone() {
    let ((_first, of_first), (_second, of_second)) = (controller(anywhere()), controller(anywhere()));
    let way = Relay::start(of_first);
    let _device = device("one", way.addr);
    let members = Member::join_all("job", Attach::Udp, [of_first; 3]);
    members[0].wait_for(|progress| &progress.in_tree, 3);
    way.turn(of_second);
    wait_until("it has not come", || has_device(of_second, "one"));
    wait_until("it has not gone", || !has_device(of_first, "one"));
    members[0].wait_for(|progress| &progress.rounds, 5);
    // What the first controller has made there is not the second's, and goes when nobody renews it.
    let others = Member::join_all("job", Attach::Udp, [of_second; 3]);
    others[0].wait_for(|progress| &progress.in_tree, 5);
    assert!(job(of_first, "job").is_some_and(|job| job.tree.is_none_or(|tree| tree.is_err())), "a tree of no device");
    members[0].wait_for(|progress| &progress.rounds, 5);
    stop(members);
    stop(others);
}

/// Two of three ranks find another controller where theirs was, while the third is still at the old one: each controller
/// takes who is not there for lost. Whatever is decided, no rank returns a wrong sum, and every error names what happened.
#[test]
fn ranks_at_two_controllers_end_by_name() {
    for attach in [Attach::Udp, Attach::Shm] {
        let ((_first, of_first), (_second, of_second)) = (controller(anywhere()), controller(anywhere()));
        let _devices = [device("one", of_first), device("two", of_second)];
        let ways = [(); 3].map(|()| Relay::start(of_first));
        let members = Member::join_all("job", attach, [0, 1, 2].map(|rank: usize| ways[rank].addr));
        ways[..2].iter().for_each(|way| way.turn(of_second));
        // To the first controller the two are dead, which it tells the third: it is alone.
        let mut errors = members.into_iter().map(|member| member.end().expect_err("the job is torn"));
        let [zero, one, two] = [(); 3].map(|()| errors.next().expect("three"));
        for error in [&zero, &one, &two] {
            let is_named =
                matches!(error, Error::RanksFailed { .. } | Error::Partitioned { .. } | Error::OutcomeUnknown { .. });
            assert!(is_named, "{attach}: {zero}; {one}; {two}");
        }
        // Those that are together agree.
        if let (Error::RanksFailed { ranks: a, operation: at, .. }, Error::RanksFailed { ranks: b, operation, .. }) =
            (&zero, &one)
        {
            assert_eq!((a, at), (b, operation), "{attach}");
        }
        for addr in [of_first, of_second] {
            wait_until("the torn job stays", || status(addr).expect("a report").jobs.is_empty());
        }
    }
}

/// A rank dies about when the next controller takes its job over: when some ranks have found it, or all, or move.
#[test]
fn rank_that_dies_while_its_job_is_taken_over_is_named() {
    for (nth, pause_ms) in [0, 150, 400, 700].into_iter().enumerate() {
        let attach = if nth % 2 == 0 { Attach::Shm } else { Attach::Udp };
        let (first, addr) = controller(anywhere());
        let _device = device("one", addr);
        let mut members = Member::join_all("job", attach, [addr; 3]);
        first.kill();
        let (_second, _) = controller(addr);
        // Choosing a moment is all that this is for.
        thread::sleep(Duration::from_millis(pause_ms));
        let dead = members.remove(nth % 3);
        dead.canceller.cancel();
        assert!(matches!(dead.end(), Err(Error::Cancelled)));
        expect_loss_of((nth % 3) as u32, members);
    }
}

/// What a controller that takes a job over comes to before it is gone again.
#[derive(Clone, Copy)]
enum Until {
    /// All ranks have come back, and none has heard so.
    Come,
    /// These have heard.
    Resumed(u32),
    /// All know of an offer, and so many where to move.
    Told(u32),
}

/// Take a job over from a controller that was at this address, up to a point.
fn take_over(addr: SocketAddr, until: Until) {
    let listener = TcpListener::bind(addr).expect("its port");
    let mut ranks: Vec<(u32, TcpStream, FrameReader<TcpStream>)> = Vec::new();
    let mut view = 0;
    while ranks.len() < RANKS as usize {
        let (stream, _) = listener.accept().expect("somebody dials");
        let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
        // Devices dial as well, and are left alone.
        if let Ok(Greeting::Client) = reader.recv() {
            let Ok(ClientRequest::Resume(known)) = reader.recv() else { panic!("a rank of before") };
            view = u32::max(view, known.view + 1);
            ranks.push((known.request.rank.0, stream, reader));
        }
    }
    ranks.sort_by_key(|(rank, ..)| *rank);
    let tell = |ranks: &mut [(u32, TcpStream, FrameReader<TcpStream>)], some: u32, reply: ClientReply| {
        let some = ranks.iter_mut().take(some as usize);
        some.for_each(|(_, stream, _)| send(stream, &reply).expect("it listens"));
    };
    match until {
        Until::Come => {}
        Until::Resumed(some) => tell(&mut ranks, some, ClientReply::Resumed { view }),
        Until::Told(some) => {
            tell(&mut ranks, RANKS, ClientReply::Resumed { view });
            tell(&mut ranks, RANKS, ClientReply::Offer { view });
            let promised = ranks.iter_mut().map(|(_, _, reader)| {
                loop {
                    if let ClientRequest::Pause { at, .. } = reader.recv().expect("it answers") {
                        break at;
                    }
                }
            });
            let call = promised.max().expect("there are ranks");
            tell(&mut ranks, some, ClientReply::MoveAt { view, call });
        }
    }
}

const POINTS: [Until; 6] =
    [Until::Come, Until::Resumed(1), Until::Resumed(3), Until::Told(0), Until::Told(2), Until::Told(3)];

/// With a rank's death right after it, the others agree on who is dead, with the controller after that.
#[test]
fn rank_that_dies_with_a_controller_in_mid_change_is_named() {
    for (nth, until) in POINTS.into_iter().enumerate() {
        let attach = if nth % 2 == 0 { Attach::Shm } else { Attach::Udp };
        let (first, addr) = controller(anywhere());
        let _device = device("one", addr);
        let mut members = Member::join_all("job", attach, [addr; 3]);
        first.kill();
        take_over(addr, until);
        let dead = members.remove(nth % 3);
        dead.canceller.cancel();
        let (_third, _) = controller(addr);
        assert!(matches!(dead.end(), Err(Error::Cancelled)));
        expect_loss_of((nth % 3) as u32, members);
    }
}

/// With the device's death right after it, the ranks go on among themselves, and in the tree of the next device.
#[test]
fn device_that_dies_with_a_controller_in_mid_change_is_got_over() {
    for (nth, until) in POINTS.into_iter().enumerate() {
        let attach = if nth % 2 == 0 { Attach::Udp } else { Attach::Shm };
        let (first, addr) = controller(anywhere());
        let old = device("one", addr);
        let members = Member::join_all("job", attach, [addr; 3]);
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
