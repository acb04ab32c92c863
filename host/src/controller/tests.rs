//! A controller, devices that answer as they are told, and ranks that join: who contributes by reference.

mod hostile;
mod leases;
mod links;
mod offers;
mod quotas;
mod replan;
mod resume;
mod unlocked;

use super::limits::RANKS_MAX;
use super::proto::{Attach, JoinRequest, Membership, Terms, TreeMembership};
use super::*;
use std::net::TcpStream;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use sumac_hal::ctrl::{
    Announce, Bus, BusUser, ChildMask, DeviceCapabilities, Envelope, FrameReader, Greeting, GroupConfig, Name, NoBus,
    Order, Refusal, Request, Response, send,
};
use sumac_hal::ids::{BootId, ChildIndex, GroupId, Rank};
use sumac_hal::port::Addr;
use sumac_hal::shm::DeviceUsers;

/// Longer than anything takes.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

/// What plans wait at: open unless a test holds it.
#[derive(Debug, Clone, Default)]
pub(super) struct Gate(Arc<Mutex<()>>);

impl Gate {
    pub(super) fn pass(&self) {
        drop(self.0.lock());
    }
}

/// Devices so far: each is a life of its own.
static LIVES: AtomicU64 = AtomicU64::new(1);

const HERE: &str = "here";

/// The longest chunk of ports of this kind: 960 bytes behind a header.
const PACKET_LEN: u32 = 960 + sumac_hal::wire::HEADER_LEN as u32;

/// A redo slot of such chunks, in bytes.
const REDO_SLOT: u64 = 64 + 2 * 960;

/// A device on loopback that says yes to everything, but to groups with contributions by reference if it is to refuse
/// them.
struct Device {
    groups: Receiver<GroupConfig>,
    /// The groups that it is told to release.
    released: Receiver<GroupId>,
    /// What it does not answer.
    stopped: Receiver<Request>,
    stream: TcpStream,
}

/// What a device says.
enum Reply {
    /// What is asked for is done.
    Yes,
    With(Box<Response>),
    /// Nothing, now and later.
    NoneAnyMore,
}

impl Reply {
    fn with(response: Response) -> Self {
        Self::With(Box::new(response))
    }
}

impl Device {
    fn start(controller: &Controller, name: &str, bus: Option<Bus>, refusal: Option<Refusal>) -> Self {
        Self::with_shards(controller, name, 1, bus, refusal)
    }

    fn with_shards(
        controller: &Controller,
        name: &str,
        shards: u16,
        bus: Option<Bus>,
        refusal: Option<Refusal>,
    ) -> Self {
        Self::serve(controller, announce(name, shards, bus), move |request| match (request, refusal) {
            (Request::CreateGroup(config), Some(refusal)) if !config.by_reference.is_empty() => {
                Reply::with(Response::Refused(refusal))
            }
            _ => Reply::Yes,
        })
    }

    /// A device that answers nothing more from the first request on that `stops_at` says.
    fn that_stops(controller: &Controller, name: &str, stops_at: fn(&Request) -> bool) -> Self {
        let stops = move |request: &Request| if stops_at(request) { Reply::NoneAnyMore } else { Reply::Yes };
        Self::serve(controller, announce(name, 1, None), stops)
    }

    fn serve(controller: &Controller, announce: Announce, answer: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
        send(&mut stream, &Greeting::Device(announce.clone())).expect("it listens");
        let (created, groups) = channel();
        let (freed, released) = channel();
        let (stops, stopped) = channel();
        let control = stream.try_clone().expect("a file");
        let (welcomed, welcome) = channel();
        thread::spawn(move || {
            let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
            let mut silent = false;
            // Until the controller ends.
            while let Ok(Envelope { id, message }) = reader.recv::<Envelope<Request>>() {
                let reply = if silent { Reply::NoneAnyMore } else { answer(&message) };
                let message = match message {
                    message if matches!(reply, Reply::NoneAnyMore) => {
                        silent = true;
                        let _ = stops.send(message);
                        continue;
                    }
                    Request::Hello => {
                        let _ = welcomed.send(());
                        Response::Hello(announce.clone())
                    }
                    Request::CreateGroup(config) => {
                        if matches!(reply, Reply::Yes) {
                            let _ = created.send(config);
                        }
                        Response::Done
                    }
                    Request::ReleaseGroup(group) => {
                        let _ = freed.send(group);
                        Response::Done
                    }
                    _ => Response::Done,
                };
                let message = if let Reply::With(other) = reply { *other } else { message };
                if send(&mut stream, &Envelope { id, message }).is_err() {
                    return;
                }
            }
        });
        welcome.recv_timeout(GREETING_TIMEOUT).expect("it is registered");
        Self { groups, released, stopped, stream: control }
    }

    fn group(&self) -> GroupConfig {
        self.groups.recv_timeout(GREETING_TIMEOUT).expect("a group")
    }
}

fn announce(name: &str, shards: u16, bus: Option<Bus>) -> Announce {
    Announce {
        name: text(name),
        boot_id: BootId(LIVES.fetch_add(1, Ordering::Relaxed)),
        capabilities: DeviceCapabilities {
            max_packet_len_bytes: PACKET_LEN,
            receive_buffer_bytes: 8 * PACKET_LEN,
            groups: 4,
            children: 8,
            slots: 1024,
            slot_memory_bytes: 1 << 30,
            dtypes: u32::MAX,
            ops: u32::MAX,
            collectives: u32::MAX,
        },
        data_addrs: (0..shards).map(|nth| Addr::Udp(SocketAddr::from(([127, 0, 0, 1], 9 + nth)))).collect(),
        bus,
    }
}

fn text(name: &str) -> Name {
    Name::try_from(name).expect("short")
}

fn bus(redo_memory_bytes: u64) -> Option<Bus> {
    let user = BusUser::ROOT;
    Some(Bus { machine: text(HERE), socket: text("socket"), user, redo_memory_bytes, remote: None })
}

fn controller() -> Controller {
    Controller::start(ControllerConfig::new()).expect("a port")
}

/// Join a job of ranks that ask for these ways on these machines, and return what each was told.
fn join(controller: &Controller, job: &str, ranks: &[(Attach, Option<&str>)]) -> Vec<(Session, Membership)> {
    join_in(controller, job, Order::Arrival, ranks)
}

fn join_in(
    controller: &Controller,
    job: &str,
    order: Order,
    ranks: &[(Attach, Option<&str>)],
) -> Vec<(Session, Membership)> {
    join_as(controller, job, order, DeviceUsers::own(), ranks)
}

fn join_as(
    controller: &Controller,
    job: &str,
    order: Order,
    device_users: DeviceUsers,
    ranks: &[(Attach, Option<&str>)],
) -> Vec<(Session, Membership)> {
    let addr = controller.local_addr();
    let joining: Vec<_> = (0..)
        .zip(ranks)
        .map(|(rank, &(attach, machine))| {
            let request = JoinRequest {
                job: job.to_owned(),
                rank: Rank(rank),
                world: ranks.len() as u32,
                host: None,
                order,
                mesh_addr: SocketAddr::from(([127, 0, 0, 1], 1)),
                repair_addr: SocketAddr::from(([127, 0, 0, 1], 1)),
                max_packet_len_bytes: PACKET_LEN,
                attach,
                machine: machine.map(text),
                device_users,
                terms: Terms::default(),
            };
            thread::spawn(move || Session::join(addr, request, GREETING_TIMEOUT, |_| None))
        })
        .collect();
    let joined = joining.into_iter().map(|rank| rank.join().expect("no panic"));
    joined.map(|joined| joined.expect("an answer")).collect()
}

fn tree(rank: &(Session, Membership)) -> &TreeMembership {
    rank.1.tree.as_ref().expect("a tree")
}

fn why_not(rank: &(Session, Membership)) -> &str {
    rank.1.tree.as_ref().expect_err("no tree")
}

fn children(mask: ChildMask) -> Vec<u16> {
    mask.iter().map(|ChildIndex(child)| child).collect()
}

const AUTO: (Attach, Option<&str>) = (Attach::Auto, Some(HERE));
const SHM: (Attach, Option<&str>) = (Attach::Shm, Some(HERE));

/// A device reads and writes the memory of its ranks.
#[test]
fn ranks_share_no_memory_with_devices_of_users_they_do_not_trust() {
    let user = |uid, serves_all| bus(1 << 20).map(|bus| Bus { user: BusUser { uid, serves_all }, ..bus });
    let rank = |own, named| DeviceUsers { own, named };
    let job = |bus: Option<Bus>, users: DeviceUsers, ways: &[(Attach, Option<&str>)]| {
        let controller = controller();
        let _device = Device::start(&controller, "leaf0", bus, None);
        join_as(&controller, "job", Order::Arrival, users, ways)
    };
    // The superuser's rank is no exception, and neither is one that the device would serve.
    for (bus, users, says) in [
        (user(1000, false), rank(0, None), "the device runs as user 1000, and the rank, of user 0, shares memory"),
        (user(1000, true), rank(1001, None), "the device runs as user 1000"),
        (user(1000, true), rank(0, Some(977)), "SUMAC_DEVICE_USER"),
        (
            user(977, false),
            rank(1001, Some(977)),
            "the device, of user 977, serves ranks of its own user and of root alone",
        ),
        (user(0, false), rank(1001, None), "serves ranks of its own user and of root alone, and the rank runs as 1001"),
    ] {
        let ranks = job(bus.clone(), users, &[AUTO, AUTO]);
        for tree in ranks.iter().map(tree) {
            assert_eq!((tree.facts.ranks_by_reference, &tree.bus), (0, &None));
            let why = tree.by_packets.as_deref().expect("a reason");
            assert!(why.contains(says), "{why}");
        }
        let refused = job(bus, users, &[SHM, AUTO]);
        assert!(why_not(&refused[0]).contains("asks for shared memory") && why_not(&refused[0]).contains(says));
    }
    for (bus, users) in [
        (user(0, true), rank(1001, None)),
        (user(1001, false), rank(1001, None)),
        (user(977, true), rank(1001, Some(977))),
        (user(977, false), rank(0, Some(977))),
    ] {
        let ranks = job(bus, users, &[SHM, AUTO]);
        assert!(ranks.iter().map(tree).all(|tree| tree.facts.ranks_by_reference == 2 && tree.by_packets.is_none()));
    }
}

#[test]
fn ranks_on_the_devices_machine_contribute_by_reference() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", bus(1 << 20), None);
    let ranks = join(&controller, "job", &[AUTO, SHM]);
    for tree in ranks.iter().map(tree) {
        assert_eq!((&tree.bus, tree.shared), (&bus(1 << 20), None));
        assert_eq!((tree.window_max, tree.window_start, tree.facts.ranks_by_reference), (32, 32, 2));
    }
    let group = device.group();
    assert_eq!((children(group.by_reference), group.shared, group.slots), (vec![0, 1], None, 64));
    let report = status(controller.local_addr()).expect("a report");
    let told = report.jobs[0].tree.as_ref().expect("complete").as_ref().expect("a tree");
    assert_eq!((told.by_reference, &report.devices[0].bus), (2, &bus(1 << 20)));
}

/// What a device or a rank has left from one life of the controller must not pass for the next one's (PROTOCOL 4).
#[test]
fn a_controller_that_starts_again_gives_out_no_view_of_before() {
    let started_ms = 1_750_000_000_000;
    let views = [started_ms, started_ms + 1].map(|started_ms| {
        let config = ControllerConfig { started_ms: Some(started_ms), ..ControllerConfig::new() };
        let controller = Controller::start(config).expect("a port");
        let _device = Device::start(&controller, "leaf0", bus(1 << 20), None);
        let jobs = ["first", "second"].map(|job| join(&controller, job, &[AUTO]));
        jobs.map(|ranks| (tree(&ranks[0]).group, tree(&ranks[0]).epoch))
    });
    let [[a, b], [c, d]] = views;
    assert!(a != b && c != d && ![a, b].contains(&c) && ![a, b].contains(&d), "{views:?}");
}

#[test]
fn each_rank_attaches_as_it_can_and_likes() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", bus(1 << 30), None);
    let ways = [(Attach::Udp, Some(HERE)), AUTO, (Attach::Auto, Some("there")), (Attach::Auto, None)];
    let ranks = join(&controller, "job", &ways);
    let by_reference: Vec<bool> = ranks.iter().map(|rank| tree(rank).bus.is_some()).collect();
    assert_eq!(by_reference, [false, true, false, false]);
    for (rank, by_reference) in ranks.iter().zip(by_reference) {
        let tree = tree(rank);
        assert_eq!((tree.shared.is_none(), tree.facts.ranks_by_reference), (by_reference, 1));
        // As much as the device's port holds of its four children, or all.
        assert_eq!((tree.window_max, tree.window_start), (256, if by_reference { 256 } else { 2 }));
    }
    let group = device.group();
    assert!(children(group.by_reference) == [1] && group.shared.is_some(), "{group:?}");
}

#[test]
fn a_rank_that_insists_on_what_cannot_be_gets_the_reason() {
    let cases = [
        (1, None, Some(HERE), "the device has no bus"),
        (2, bus(1 << 20), Some(HERE), "the device has 2 shards"),
        (1, bus(1 << 20), Some("there"), "the rank is on machine there, the device on here"),
        (1, bus(1 << 20), None, "the rank's system tells no name of its machine"),
    ];
    for (shards, bus, machine, reason) in cases {
        let controller = controller();
        let _device = Device::with_shards(&controller, "leaf0", shards, bus, None);
        let ranks = join(&controller, "job", &[(Attach::Udp, None), (Attach::Shm, machine)]);
        for rank in &ranks {
            let why = why_not(rank);
            assert!(["rank 1", "leaf0", reason, "`udp`"].iter().all(|part| why.contains(part)), "{why}");
        }
        drop(ranks);
        let ranks = join(&controller, "auto", &[(Attach::Auto, machine)]);
        assert_eq!(tree(&ranks[0]).bus, None, "{reason}");
    }
}

#[test]
fn the_window_fits_the_memory_for_redo_slots() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", bus(13 * REDO_SLOT), None);
    // 8 slots of 13, then 4 of the 5 that are left, then none of 1.
    let first = join(&controller, "first", &[SHM, AUTO]);
    let second = join(&controller, "second", &[SHM, AUTO]);
    assert_eq!([&first, &second].map(|ranks| tree(&ranks[0]).window_max), [4, 2]);
    assert_eq!([device.group().slots, device.group().slots], [8, 4]);
    let third = join(&controller, "third", &[AUTO, AUTO]);
    assert!(third.iter().all(|rank| tree(rank).bus.is_none() && tree(rank).window_max == 256));
    assert!(device.group().by_reference.is_empty());
    let fourth = join(&controller, "fourth", &[AUTO, SHM]);
    let free = format!("the device has {REDO_SLOT} bytes of memory for redo slots free");
    let why = why_not(&fourth[0]);
    assert!(why.contains("rank 1") && why.contains(&free) && why.contains("leaf0"), "{why}");
    // What a group took is free again.
    first.into_iter().for_each(|(session, _)| session.leave());
    while status(controller.local_addr()).expect("a report").jobs.iter().any(|job| job.name == "first") {
        thread::yield_now();
    }
    let fifth = join_in(&controller, "fifth", Order::TreePairwise, &[SHM, SHM, SHM]);
    // Three children combine pairwise in two accumulators: three chunks a slot.
    assert_eq!(tree(&fifth[0]).window_max, 2);
    assert_eq!(device.group().slots, 4);
}

#[test]
fn chunks_of_leaves_that_turn_to_packets_are_as_long_as_packets_carry() {
    // An engine takes 896 bytes in whole cache lines; packets, 944 or what they are limited to.
    for (chunk_max_bytes, expected) in [(944, 944), (512, 512)] {
        let config = ControllerConfig { chunk_max_bytes, reference_chunk_max_bytes: 896, ..ControllerConfig::new() };
        let controller = Controller::start(config).expect("a port");
        let device = Device::start(&controller, "leaf0", bus(4 * (64 + 2 * 896)), None);
        let first = join(&controller, "by-reference", &[AUTO, AUTO]);
        assert_eq!((tree(&first[0]).chunk_len_bytes, device.group().chunk_len_bytes), (896, 896));
        // No room for another's redo slots is left.
        let second = join(&controller, "by-packets", &[AUTO, AUTO]);
        assert_eq!(tree(&second[0]).bus, None);
        assert_eq!((tree(&second[0]).chunk_len_bytes, device.group().chunk_len_bytes), (expected, expected));
    }
}

#[test]
fn a_device_that_refuses_its_bus_gets_packets_unless_a_rank_insists() {
    for refusal in [Refusal::NoBus(NoBus::Engine), Refusal::NoRedoMemory { need: 7 }] {
        let controller = controller();
        let device = Device::start(&controller, "leaf0", bus(1 << 20), Some(refusal));
        let ranks = join(&controller, "job", &[AUTO, AUTO]);
        assert!(ranks.iter().all(|rank| tree(rank).bus.is_none() && tree(rank).shared.is_some()));
        let group = device.group();
        assert!(group.by_reference.is_empty() && group.shared.is_some(), "{group:?}");
        drop(ranks);
        let ranks = join(&controller, "insists", &[SHM, AUTO]);
        let why = why_not(&ranks[1]);
        assert!(why.contains("rank 0") && why.contains(&refusal.to_string()), "{why}");
    }
}

#[test]
fn by_reference_is_decided_leaf_by_leaf() {
    let fabric = "switch = [{ name = \"leaf0\", aggregation = true }, { name = \"leaf1\", aggregation = true }]\n\
                  host = [{ name = \"h0\" }, { name = \"h1\" }, { name = \"h2\" }, { name = \"h3\" }]\n\
                  link = [{ ends = [\"h0\", \"leaf0\"] }, { ends = [\"h1\", \"leaf0\"] }, { ends = [\"h2\", \"leaf1\"] }, \
                  { ends = [\"h3\", \"leaf1\"] }, { ends = [\"leaf0\", \"leaf1\"] }]\n";
    for (other, all) in [(None, false), (bus(1 << 20), true)] {
        let fabric = Some(Fabric::from_toml(fabric).expect("a fabric"));
        let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a port");
        let devices = [("leaf0", bus(1 << 20)), ("leaf1", other)];
        let _devices = devices.map(|(name, bus)| Device::start(&controller, name, bus, None));
        let ranks = join(&controller, "job", &[AUTO; 4]);
        let by_reference: Vec<bool> = ranks.iter().map(|rank| tree(rank).bus.is_some()).collect();
        assert_eq!(by_reference, [true, true, all, all]);
        for tree in ranks.iter().map(tree) {
            let by_reference = if all { 4 } else { 2 };
            assert_eq!((tree.facts.levels, tree.facts.ranks_by_reference), (2, by_reference));
            assert!(tree.window_max > 16, "packets go between the devices");
        }
    }
}

#[test]
fn a_window_that_is_none_is_refused() {
    for window in [0, 257] {
        let config = ControllerConfig { reference_window_chunks: window, ..ControllerConfig::new() };
        let error = Controller::start(config).expect_err("out of range").to_string();
        assert_eq!(error, format!("reference_window_chunks is {window}; it must be 1 to 256"));
    }
}
