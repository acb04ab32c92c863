//! Whether a controller with a large fabric renews the groups of idle jobs in time while other jobs come and go.
//!
//! ```text
//! cargo bench -p sumac --bench controller              # a fat tree of radix 74 (101,306 hosts), for a minute
//! cargo bench -p sumac --bench controller -- 24 10     # of radix 24, for ten seconds
//! ```
//!
//! A load generator in this process connects scripted devices, at most 1,000, as switches of the first pods and as
//! cores above them. Idle jobs of 8 ranks keep their groups throughout. Each second a job of 8 to 64 ranks on random
//! hosts below these switches joins; ten seconds later it leaves. A renewal is late by the time since the one before,
//! or since the group was created, less a third of the lease. The first one after a group was created may come sooner.
//! Devices and ranks run on the controller's processors, and their delays count, too.
//!
//! `join` is the time from the first rank's request until the last rank has its tree.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::{HashMap, VecDeque};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::proto::{JoinRequest, Terms, Transport};
use sumac::controller::{Controller, ControllerConfig, Session};
use sumac::topo::{Fabric, Rate};
use sumac_hal::ctrl::{
    Announce, DeviceCapabilities, Envelope, FrameReader, Hello, Name, Order, Request, Response, send,
};
use sumac_hal::ids::{BootId, GroupId, Rank};
use sumac_hal::port::Addr;
use sumac_hal::shm::DeviceUsers;

const DEVICES_MAX: usize = 1000;
const IDLE_JOBS: usize = 50;
const IDLE_JOB_RANKS: usize = 8;
/// Groups are renewed three times in that time.
const LEASE: Duration = Duration::from_secs(3);
const JOB_LIFETIME_SECONDS: usize = 10;
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);
const PACKET_LEN_BYTES: u32 = 1472;

/// How late each renewal was, in ms, over all devices.
type Lateness = Arc<Mutex<Vec<f64>>>;

fn main() {
    let mut given = std::env::args().skip(1).filter_map(|text| text.parse::<usize>().ok());
    let (radix, seconds) = (given.next().unwrap_or(74), given.next().unwrap_or(60));
    raise_file_limit();
    let fabric = Fabric::fat_tree(radix, Rate::from_gbits(400.0)).expect("a possible radix");
    let hosts = fabric.hosts().len();
    let (switches, hosts_below) = switches_of_devices(radix);
    let config = ControllerConfig { fabric: Some(fabric), lease: LEASE, ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let addr = controller.local_addr();
    let lateness = Lateness::default();
    for (number, name) in switches.iter().enumerate() {
        start_device(addr, name, number, &lateness);
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let idle: Vec<_> = (0..IDLE_JOBS)
        .map(|job| join(addr, &format!("idle{job}"), &random.hosts(IDLE_JOB_RANKS, hosts_below)).0)
        .collect();
    lateness.lock().expect("no panic").clear();

    let (mut running, mut joins_ms) = (VecDeque::new(), Vec::new());
    let began = Instant::now();
    for second in 0..seconds {
        if running.len() == JOB_LIFETIME_SECONDS {
            running.pop_front().into_iter().for_each(leave);
        }
        let ranks = 8 + random.below(57);
        let (sessions, join_ms) = join(addr, &format!("job{second}"), &random.hosts(ranks, hosts_below));
        running.push_back(sessions);
        joins_ms.push(join_ms);
        thread::sleep(Duration::from_secs(second as u64 + 1).saturating_sub(began.elapsed()));
    }
    let mut late_ms = std::mem::take(&mut *lateness.lock().expect("no panic"));
    running.into_iter().chain(idle).for_each(leave);
    drop(controller);

    println!("{hosts} hosts, {} devices, {seconds} jobs beside {IDLE_JOBS} idle ones", switches.len());
    println!("{:>12} {:>9} {:>9} {:>9} {:>9}", "", "count", "p50 ms", "p99 ms", "max ms");
    print_row("renewal late", &mut late_ms);
    print_row("join", &mut joins_ms);
}

/// The names of the switches that have devices, and the number of hosts in the pods where all switches have one.
fn switches_of_devices(radix: usize) -> (Vec<String>, usize) {
    let half = radix / 2;
    let pods = radix.min(DEVICES_MAX * 9 / 10 / radix);
    let of_pod = |pod| (0..half).flat_map(move |i| [format!("edge{pod}-{i}"), format!("agg{pod}-{i}")]);
    let cores = (0..half * half).map(|core| format!("core{core}"));
    let switches = (0..pods).flat_map(of_pod).chain(cores).take(DEVICES_MAX).collect();
    (switches, pods * half * half)
}

/// Connect a device that confirms every request and records how late its groups' renewals are, until the controller
/// closes the connection.
fn start_device(controller: SocketAddr, name: &str, number: usize, lateness: &Lateness) {
    let announce = Announce {
        name: Name::try_from(name).expect("a short name"),
        boot_id: BootId(number as u64 + 1),
        capabilities: DeviceCapabilities {
            max_packet_len_bytes: PACKET_LEN_BYTES,
            receive_buffer_bytes: 1 << 20,
            groups: 1024,
            children: 256,
            slots: 1 << 20,
            slot_memory_bytes: 1 << 40,
            dtypes: u32::MAX,
            ops: u32::MAX,
            collectives: u32::MAX,
        },
        data_addrs: [Addr::Udp(SocketAddr::from(([127, 0, 0, 1], 9)))].into_iter().collect(),
        attach: None,
        slots: None,
    };
    let mut stream = TcpStream::connect(controller).expect("a controller");
    send(&mut stream, &Hello::Device(announce.clone())).expect("it listens");
    let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
    let lateness = Arc::clone(lateness);
    let serve = move || {
        let mut renewed: HashMap<GroupId, Instant> = HashMap::new();
        while let Ok(Envelope { id, message }) = reader.recv::<Envelope<Request>>() {
            let now = Instant::now();
            let message = match message {
                Request::Identify => Response::Announce(announce.clone()),
                Request::CreateGroup(config) => {
                    renewed.insert(config.group, now);
                    Response::Done
                }
                Request::RenewGroup(group) => {
                    if let Some(before) = renewed.insert(group, now) {
                        let late_s = (now - before).as_secs_f64() - LEASE.as_secs_f64() / 3.0;
                        lateness.lock().expect("no panic").push(late_s.max(0.0) * 1e3);
                    }
                    Response::Done
                }
                Request::ReleaseGroup(group) => {
                    renewed.remove(&group);
                    Response::Done
                }
                _ => Response::Done,
            };
            if send(&mut stream, &Envelope { id, message }).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().stack_size(256 << 10).spawn(serve).expect("a thread");
}

/// Join a job with a rank on each of these hosts. Returns the ranks' sessions, and the time that it took in ms.
fn join(controller: SocketAddr, job: &str, hosts: &[usize]) -> (Vec<Session>, f64) {
    let began = Instant::now();
    let joining: Vec<_> = (0..)
        .zip(hosts)
        .map(|(rank, host)| {
            let request = JoinRequest {
                job: job.to_owned(),
                rank: Rank(rank),
                world: hosts.len() as u32,
                host: Some(format!("h{host}")),
                order: Order::Arrival,
                mesh_addr: SocketAddr::from(([127, 0, 0, 1], 1)),
                recovery_addr: SocketAddr::from(([127, 0, 0, 1], 1)),
                max_packet_len_bytes: PACKET_LEN_BYTES,
                transport: Transport::Udp,
                machine: None,
                device_users: DeviceUsers::own(),
                terms: Terms::default(),
            };
            thread::spawn(move || Session::join(controller, request, JOIN_TIMEOUT, |_| None))
        })
        .collect();
    let sessions = joining.into_iter().map(|rank| {
        let (session, membership) = rank.join().expect("no panic").expect("a membership");
        membership.tree.expect("a tree");
        session
    });
    let sessions = sessions.collect();
    (sessions, began.elapsed().as_secs_f64() * 1e3)
}

fn leave(sessions: Vec<Session>) {
    sessions.into_iter().for_each(Session::leave);
}

/// Each device takes two files in this process and one in the controller's part of it.
fn raise_file_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).expect("a process may raise it so far");
}

fn print_row(what: &str, values: &mut [f64]) {
    values.sort_by(f64::total_cmp);
    let at = |percent: usize| values[(values.len() - 1) * percent / 100];
    println!("{what:>12} {:>9} {:>9.1} {:>9.1} {:>9.1}", values.len(), at(50), at(99), at(100));
}

/// A generator of numbers (xorshift64*), so that each run draws the same jobs.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }

    /// Draw `count` different hosts of the first `limit`.
    fn hosts(&mut self, count: usize, limit: usize) -> Vec<usize> {
        let mut hosts = Vec::with_capacity(count);
        while hosts.len() < count {
            let host = self.below(limit);
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
        hosts
    }
}
