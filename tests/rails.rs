//! Servers with two adapters: each tree of a communicator goes over a rail of its own, through the ranks' addresses of
//! that rail, and the death of a rail's device is repaired in its share alone.

mod common;

use common::over_udp;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use sumac::controller::{Controller, ControllerConfig, status};
use sumac::select::CostTable;
use sumac::topo::generate;
use sumac::{Communicator, JoinConfig, Outcome, Path, ReduceOp};
use sumac_firmware::emulated::{Board, BoardConfig};
use sumac_hal::uplink::HopTimers;

const RANKS: u32 = 3;
const RAILS: u8 = 2;

/// A passing test never reaches it.
const LONG: Duration = Duration::from_secs(30);

/// Elements of an operation that is large enough for two trees.
const LARGE: usize = 2 * (64 << 10) / 4;

/// The address of a rank on a rail.
fn rank_addr(rank: u32, rail: u8) -> IpAddr {
    Ipv4Addr::new(127, 0, 10 + rail, 1 + rank as u8).into()
}

/// Stands before a device, and records the addresses that packets come from.
struct Relay {
    addr: SocketAddr,
    sources: Arc<Mutex<BTreeSet<IpAddr>>>,
    has_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    fn start(device: SocketAddr) -> Self {
        let socket = socket_at(device.ip());
        let addr = socket.local_addr().expect("bound");
        let sources: Arc<Mutex<BTreeSet<IpAddr>>> = Arc::default();
        let has_ended = Arc::new(AtomicBool::new(false));
        let (seen, ends) = (Arc::clone(&sources), Arc::clone(&has_ended));
        let thread = thread::spawn(move || relay(&socket, device, &seen, &ends));
        Self { addr, sources, has_ended, thread: Some(thread) }
    }

    fn sources(&self) -> BTreeSet<IpAddr> {
        self.sources.lock().expect("not poisoned").clone()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no relay panics");
        }
    }
}

fn socket_at(addr: IpAddr) -> UdpSocket {
    let socket = UdpSocket::bind((addr, 0)).expect("a free port");
    socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a limit");
    socket
}

/// Receive until the end. A port that nobody listens on is no error: the device may be gone.
fn receive(socket: &UdpSocket, ends: &AtomicBool, mut each: impl FnMut(&[u8], SocketAddr)) {
    let mut packet = vec![0; 1 << 16];
    while !ends.load(Ordering::Relaxed) {
        match socket.recv_from(&mut packet) {
            Ok((len, from)) => each(&packet[..len], from),
            Err(error) => assert!(
                matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::ConnectionRefused),
                "{error}"
            ),
        }
    }
}

/// Pass packets on to the device, those of each source from a socket of its own, and the answers back.
fn relay(socket: &UdpSocket, device: SocketAddr, sources: &Mutex<BTreeSet<IpAddr>>, ends: &AtomicBool) {
    thread::scope(|scope| {
        let mut towards_device: Vec<(SocketAddr, Arc<UdpSocket>)> = Vec::new();
        receive(socket, ends, |packet, from| {
            sources.lock().expect("not poisoned").insert(from.ip());
            let known = towards_device.iter().find(|(source, _)| *source == from).map(|(_, known)| Arc::clone(known));
            let onward = known.unwrap_or_else(|| {
                let onward = Arc::new(socket_at(device.ip()));
                towards_device.push((from, Arc::clone(&onward)));
                let back = Arc::clone(&onward);
                // What is lost here is sent again.
                scope.spawn(move || receive(&back, ends, |answer, _| _ = socket.send_to(answer, from)));
                onward
            });
            _ = onward.send_to(packet, device);
        });
    });
}

/// A controller with two rails, and a device with a relay before it on each.
struct Cluster {
    controller: Controller,
    boards: Vec<Mutex<Option<Board>>>,
    relays: Vec<Relay>,
}

impl Cluster {
    fn start() -> Self {
        let servers = RANKS as usize;
        let shape = generate::Rails { servers, rails: RAILS.into(), servers_per_leaf: servers, spines: 0, rate: None };
        let fabric = Some(generate::rails(shape).expect("a possible shape"));
        let table = CostTable::emulated().with_overrides("[[override]]\npath = \"tree\"\n").expect("an override file");
        let timers = HopTimers { dead: Duration::from_secs(2), ..HopTimers::DEFAULT };
        let config = ControllerConfig { table, timers, fabric, ..ControllerConfig::new() };
        let controller = Controller::start(config).expect("a controller on loopback");
        let (mut boards, mut relays) = (Vec::new(), Vec::new());
        for rail in 0..RAILS {
            let bind: IpAddr = Ipv4Addr::new(127, 0, 10 + rail, 100).into();
            // Free again once the socket is dropped.
            let port = socket_at(bind).local_addr().expect("bound").port();
            let relay = Relay::start((bind, port).into());
            let board = Board::start(BoardConfig {
                bind,
                data_port: Some(port),
                advertise: Some(vec![relay.addr]),
                zero_copy: None,
                ..BoardConfig::new(format!("leaf{rail}-0"), controller.local_addr())
            });
            let board = board.expect("a board on loopback");
            assert!(board.wait_registered(LONG), "the board is not registered");
            boards.push(Mutex::new(Some(board)));
            relays.push(relay);
        }
        Self { controller, boards, relays }
    }

    /// Run a rank on each thread. Each names its server.
    fn run(&self, configure: impl Fn(&mut JoinConfig) + Sync, run: impl Fn(Communicator) + Sync) {
        thread::scope(|scope| {
            for rank in 0..RANKS {
                let (configure, run) = (&configure, &run);
                scope.spawn(move || {
                    let mut config = JoinConfig::new(self.controller.local_addr(), "rails", rank, RANKS);
                    over_udp(&mut config);
                    (config.join_timeout, config.deadline, config.trees) = (LONG, LONG, RAILS);
                    (config.host, config.bind) = (Some(format!("n{rank}")), rank_addr(rank, 0));
                    config.rails = (1..RAILS).map(|rail| rank_addr(rank, rail)).collect();
                    configure(&mut config);
                    run(Communicator::join(config).expect("join"));
                });
            }
        });
    }

    /// The group of each tree: the communicator's own, and that of the other one.
    fn groups(&self) -> [Option<u32>; 2] {
        let report = status(self.controller.local_addr()).expect("a report");
        let job = report.jobs.into_iter().find(|job| job.name == "rails").expect("it runs");
        let own = job.tree.as_ref().and_then(|tree| tree.as_ref().ok()).map(|tree| tree.group.0);
        let further = job.stripes.first().and_then(|stripe| stripe.tree.as_ref().ok()).map(|tree| tree.group.0);
        [own, further]
    }
}

/// All-reduce values that depend on the rank, the element and `call`, and check every one.
fn checked_sum(comm: &Communicator, call: u32) -> Outcome {
    let value = |rank: u32, at: usize| (rank + 1).wrapping_mul(at as u32 ^ call.wrapping_mul(0x9e37_79b9));
    let mut buffer: Vec<u32> = (0..LARGE).map(|at| value(comm.rank(), at)).collect();
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
    let sum = |at| (0..comm.size()).fold(0_u32, |sum, rank| sum.wrapping_add(value(rank, at)));
    let wrong = buffer.iter().enumerate().filter(|&(at, &found)| found != sum(at)).count();
    assert_eq!(wrong, 0, "call {call}");
    outcome
}

#[test]
fn each_tree_takes_packets_from_the_addresses_of_its_rail() {
    // 0: as many as are faster.
    for wanted in [RAILS, 0] {
        let cluster = Cluster::start();
        cluster.run(
            |config| config.trees = wanted,
            |comm| {
                assert_eq!((comm.trees().shares.len(), comm.trees().reason), (usize::from(RAILS), None));
                for call in 0..5 {
                    let outcome = checked_sum(&comm, call);
                    assert_eq!((outcome.path, outcome.trees), (Path::Tree, RAILS.into()));
                }
                comm.leave();
            },
        );
        for (rail, relay) in (0..).zip(&cluster.relays) {
            assert_eq!(relay.sources(), (0..RANKS).map(|rank| rank_addr(rank, rail)).collect(), "rail {rail}");
        }
    }
}

#[test]
fn rank_with_one_address_keeps_its_job_on_one_rail_with_the_reason() {
    let cluster = Cluster::start();
    let one_address = |config: &mut JoinConfig| {
        if config.rank == 1 {
            config.rails.clear();
        }
    };
    cluster.run(one_address, |comm| {
        let trees = comm.trees();
        let why = trees.reason.expect("there are two rails");
        assert!(trees.shares.len() == 1 && why.contains("rank 1 has one address"), "{why}");
        assert_eq!(checked_sum(&comm, 0).trees, 1);
        comm.leave();
    });
    assert!(cluster.relays[1].sources().is_empty());
}

#[test]
fn death_of_a_rail_is_repaired_in_its_share_alone() {
    for victim in [0, 1] {
        let cluster = Cluster::start();
        let (at_same_call, before) = (Barrier::new(RANKS as usize), Mutex::new([None; 2]));
        cluster.run(
            |_| (),
            |comm| {
                assert_eq!(checked_sum(&comm, 0).trees, u32::from(RAILS));
                if at_same_call.wait().is_leader() {
                    *before.lock().expect("not poisoned") = cluster.groups();
                    drop(cluster.boards[victim].lock().expect("not poisoned").take());
                }
                let (mut call, mut recovered) = (1, [0]);
                while recovered == [0] {
                    let outcome = checked_sum(&comm, call);
                    assert!(outcome.trees >= 1, "{outcome:?}");
                    call += 1;
                    // All ranks stop at the same call.
                    recovered = [comm.recoveries().count];
                    comm.all_reduce(&mut recovered, ReduceOp::Min).expect("the least");
                }
                let outcome = checked_sum(&comm, call);
                assert_eq!((outcome.path, outcome.trees), (Path::Tree, 1));
                if at_same_call.wait().is_leader() {
                    let (before, after) = (*before.lock().expect("not poisoned"), cluster.groups());
                    assert!(before[1 - victim].is_some() && before[1 - victim] == after[1 - victim], "{before:?}");
                    assert_ne!(before[victim], after[victim]);
                }
                comm.barrier().expect("all are there");
                comm.leave();
            },
        );
    }
}
