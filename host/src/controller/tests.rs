//! Tests with a real controller, scripted devices and ranks. The tests here cover zero-copy and sizing.

mod attachment;
mod hostile;
mod hosts;
mod keyed;
mod leases;
mod links;
mod offers;
mod pair;
mod paths;
mod quotas;
mod rail_jobs;
mod rails;
mod replan;
mod reports;
mod resume;
mod session;
mod shapes;
mod stripes;
mod unlocked;
mod updates;
mod versions;

use super::limits::RANKS_MAX;
use super::proto::{JoinRequest, Membership, Terms, Transport, TreeMembership};
use super::*;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use sumac_hal::ctrl::{
    Announce, AttachPoint, ChildMask, DeviceCapabilities, DeviceUser, Envelope, FrameReader, GroupConfig, Hello, Name,
    Order, Refusal, Request, Response, ZeroCopyRefusal, send,
};
use sumac_hal::ids::{BootId, ChildIndex, GroupId, Rank};
use sumac_hal::port::Addr;
use sumac_hal::shm::DeviceUsers;

/// Longer than any step takes.
pub(super) const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Blocks the planner while a test holds its lock.
#[derive(Debug, Clone, Default)]
pub(super) struct Gate(Arc<Mutex<()>>);

impl Gate {
    pub(super) fn pass(&self) {
        drop(self.0.lock());
    }
}

/// The next boot id: each device is an incarnation of its own.
static INCARNATIONS: AtomicU64 = AtomicU64::new(1);

const HERE: &str = "here";

/// The packet limit of all ports: a header and a chunk of 960 bytes.
const PACKET_LEN: u32 = 960 + sumac_hal::wire::SHORT_HEADER_LEN as u32;

/// The length of a redo slot for such chunks, in bytes.
const REDO_SLOT: u64 = 64 + 2 * 960;

/// A scripted device on loopback. By default it acknowledges every request, except zero-copy groups if told to refuse
/// them.
struct Device {
    groups: Receiver<GroupConfig>,
    /// The groups that it was told to release.
    released: Receiver<GroupId>,
    /// The requests that it did not answer.
    stopped: Receiver<Request>,
    stream: TcpStream,
}

/// A scripted reply.
enum Reply {
    /// Acknowledge the request.
    Done,
    With(Box<Response>),
    /// No reply, now and to all later requests.
    Silent,
}

impl Reply {
    fn with(response: Response) -> Self {
        Self::With(Box::new(response))
    }
}

impl Device {
    fn start(controller: &Controller, name: &str, attach_point: Option<AttachPoint>, refusal: Option<Refusal>) -> Self {
        Self::with_shards(controller, name, 1, attach_point, refusal)
    }

    fn with_shards(
        controller: &Controller,
        name: &str,
        shards: u16,
        attach_point: Option<AttachPoint>,
        refusal: Option<Refusal>,
    ) -> Self {
        Self::serve(controller, announce(name, shards, attach_point), move |request| match (request, refusal) {
            (Request::CreateGroup(config), Some(refusal)) if !config.zero_copy.is_empty() => {
                Reply::with(Response::Refused(refusal))
            }
            _ => Reply::Done,
        })
    }

    /// A device that stops responding at the first request that `stops_at` selects.
    fn that_stops_responding(controller: &Controller, name: &str, stops_at: fn(&Request) -> bool) -> Self {
        let stops = move |request: &Request| if stops_at(request) { Reply::Silent } else { Reply::Done };
        Self::serve(controller, announce(name, 1, None), stops)
    }

    fn serve(controller: &Controller, announce: Announce, answer: impl Fn(&Request) -> Reply + Send + 'static) -> Self {
        Self::serve_as(controller, &Hello::Device(announce.clone()), announce, answer)
    }

    fn serve_as(
        controller: &Controller,
        hello: &Hello,
        announce: Announce,
        answer: impl Fn(&Request) -> Reply + Send + 'static,
    ) -> Self {
        let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
        send(&mut stream, hello).expect("it listens");
        let (created, groups) = channel();
        let (freed, released) = channel();
        let (stops, stopped) = channel();
        let control = stream.try_clone().expect("a file");
        let (welcomed, welcome) = channel();
        thread::spawn(move || {
            let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
            let mut silent = false;
            // Until the controller closes the connection.
            while let Ok(Envelope { id, message }) = reader.recv::<Envelope<Request>>() {
                let reply = if silent { Reply::Silent } else { answer(&message) };
                let message = match message {
                    message if matches!(reply, Reply::Silent) => {
                        silent = true;
                        let _ = stops.send(message);
                        continue;
                    }
                    Request::Identify => {
                        let _ = welcomed.send(());
                        Response::Announce(announce.clone())
                    }
                    Request::CreateGroup(config) => {
                        if matches!(reply, Reply::Done) {
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
        welcome.recv_timeout(TEST_TIMEOUT).expect("it is registered");
        Self { groups, released, stopped, stream: control }
    }

    fn group(&self) -> GroupConfig {
        self.groups.recv_timeout(TEST_TIMEOUT).expect("a group")
    }
}

fn announce(name: &str, shards: u16, attach_point: Option<AttachPoint>) -> Announce {
    Announce {
        name: text(name),
        boot_id: BootId(INCARNATIONS.fetch_add(1, Ordering::Relaxed)),
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
        attach: attach_point,
        slots: None,
    }
}

fn text(name: &str) -> Name {
    Name::try_from(name).expect("short")
}

fn attach_point(redo_memory_bytes: u64) -> Option<AttachPoint> {
    let user = DeviceUser::ROOT;
    Some(AttachPoint { machine: text(HERE), socket: text("socket"), user, redo_memory_bytes, remote: None })
}

fn controller() -> Controller {
    Controller::start(ControllerConfig::new()).expect("a port")
}

/// Join a job of ranks with these transports and machines, and return their memberships.
fn join(controller: &Controller, job: &str, ranks: &[(Transport, Option<&str>)]) -> Vec<(Session, Membership)> {
    join_in(controller, job, Order::Arrival, ranks)
}

fn join_in(
    controller: &Controller,
    job: &str,
    order: Order,
    ranks: &[(Transport, Option<&str>)],
) -> Vec<(Session, Membership)> {
    join_as(controller, job, order, DeviceUsers::own(), ranks)
}

fn join_as(
    controller: &Controller,
    job: &str,
    order: Order,
    device_users: DeviceUsers,
    ranks: &[(Transport, Option<&str>)],
) -> Vec<(Session, Membership)> {
    let addr = controller.local_addr();
    let joining: Vec<_> = (0..)
        .zip(ranks)
        .map(|(rank, &(transport, machine))| {
            let request = JoinRequest {
                job: job.to_owned(),
                rank: Rank(rank),
                world: ranks.len() as u32,
                host: None,
                order,
                mesh_addr: SocketAddr::from(([127, 0, 0, 1], 1)),
                recovery_addr: SocketAddr::from(([127, 0, 0, 1], 1)),
                max_packet_len_bytes: PACKET_LEN,
                transport,
                machine: machine.map(text),
                device_users,
                terms: Terms::default(),
            };
            thread::spawn(move || Session::join(addr, request, TEST_TIMEOUT, |_| None))
        })
        .collect();
    let joined = joining.into_iter().map(|rank| rank.join().expect("no panic"));
    joined.map(|joined| joined.expect("an answer")).collect()
}

fn tree(rank: &(Session, Membership)) -> &TreeMembership {
    rank.1.tree.as_ref().expect("a tree")
}

fn no_tree_reason_of(rank: &(Session, Membership)) -> &str {
    rank.1.tree.as_ref().expect_err("no tree")
}

fn children(mask: ChildMask) -> Vec<u16> {
    mask.iter().map(|ChildIndex(child)| child).collect()
}

const AUTO: (Transport, Option<&str>) = (Transport::Auto, Some(HERE));
const SHM: (Transport, Option<&str>) = (Transport::Shm, Some(HERE));

/// A zero-copy device reads and writes the memory of its ranks, so users must trust each other.
#[test]
fn untrusted_user_excludes_zero_copy_and_names_the_users() {
    let user = |uid, serves_all| {
        attach_point(1 << 20).map(|attach_point| AttachPoint { user: DeviceUser { uid, serves_all }, ..attach_point })
    };
    let rank = |own, named| DeviceUsers { own, named };
    let job = |attach_point: Option<AttachPoint>, users: DeviceUsers, ways: &[(Transport, Option<&str>)]| {
        let controller = controller();
        let _device = Device::start(&controller, "leaf0", attach_point, None);
        join_as(&controller, "job", Order::Arrival, users, ways)
    };
    // No exception for root's ranks, nor for ranks that the device would serve.
    for (attach_point, users, says) in [
        (user(1000, false), rank(0, None), "the device runs as user 1000; a rank of user 0 shares memory"),
        (user(1000, true), rank(1001, None), "the device runs as user 1000"),
        (user(1000, true), rank(0, Some(977)), "SUMAC_DEVICE_USER"),
        (
            user(977, false),
            rank(1001, Some(977)),
            "the device runs as user 977 and serves only ranks of its own user and of root",
        ),
        (
            user(0, false),
            rank(1001, None),
            "serves only ranks of its own user and of root; this rank runs as user 1001",
        ),
    ] {
        let ranks = job(attach_point.clone(), users, &[AUTO, AUTO]);
        for tree in ranks.iter().map(tree) {
            assert_eq!((tree.facts.zero_copy_ranks, &tree.attach), (0, &None));
            let why = tree.packets_reason.as_deref().expect("a reason");
            assert!(why.contains(says), "{why}");
        }
        let refused = job(attach_point, users, &[SHM, AUTO]);
        assert!(
            no_tree_reason_of(&refused[0]).contains("requires shared memory")
                && no_tree_reason_of(&refused[0]).contains(says)
        );
    }
    for (attach_point, users) in [
        (user(0, true), rank(1001, None)),
        (user(1001, false), rank(1001, None)),
        (user(977, true), rank(1001, Some(977))),
        (user(977, false), rank(0, Some(977))),
    ] {
        let ranks = job(attach_point, users, &[SHM, AUTO]);
        assert!(ranks.iter().map(tree).all(|tree| tree.facts.zero_copy_ranks == 2 && tree.packets_reason.is_none()));
    }
}

#[test]
fn ranks_on_the_devices_machine_use_zero_copy() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", attach_point(1 << 20), None);
    let ranks = join(&controller, "job", &[AUTO, SHM]);
    for tree in ranks.iter().map(tree) {
        assert_eq!((&tree.attach, tree.shared), (&attach_point(1 << 20), None));
        assert_eq!((tree.window_max, tree.window_start, tree.facts.zero_copy_ranks), (32, 32, 2));
    }
    let group = device.group();
    assert_eq!((children(group.zero_copy), group.shared, group.slots), (vec![0, 1], None, 64));
    let report = status(controller.local_addr()).expect("a report");
    let told = report.jobs[0].tree.as_ref().expect("complete").as_ref().expect("a tree");
    assert_eq!((told.zero_copy_ranks, &report.devices[0].attach), (2, &attach_point(1 << 20)));
}

/// Groups that devices or ranks still hold must not be mistaken for those of the controller's next incarnation
/// (PROTOCOL 4).
#[test]
fn restarted_controller_reuses_no_group_or_epoch() {
    let started_ms = 1_750_000_000_000;
    let views = [started_ms, started_ms + 1].map(|started_ms| {
        let config = ControllerConfig { started_ms: Some(started_ms), ..ControllerConfig::new() };
        let controller = Controller::start(config).expect("a port");
        let _device = Device::start(&controller, "leaf0", attach_point(1 << 20), None);
        let jobs = ["first", "second"].map(|job| join(&controller, job, &[AUTO]));
        jobs.map(|ranks| (tree(&ranks[0]).group, tree(&ranks[0]).epoch))
    });
    let [[a, b], [c, d]] = views;
    assert!(a != b && c != d && ![a, b].contains(&c) && ![a, b].contains(&d), "{views:?}");
}

#[test]
fn transport_is_chosen_per_rank() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", attach_point(1 << 30), None);
    let ways = [(Transport::Udp, Some(HERE)), AUTO, (Transport::Auto, Some("there")), (Transport::Auto, None)];
    let ranks = join(&controller, "job", &ways);
    let by_reference: Vec<bool> = ranks.iter().map(|rank| tree(rank).attach.is_some()).collect();
    assert_eq!(by_reference, [false, true, false, false]);
    for (rank, by_reference) in ranks.iter().zip(by_reference) {
        let tree = tree(rank);
        assert_eq!((tree.shared.is_none(), tree.facts.zero_copy_ranks), (by_reference, 1));
        // The initial window is what the device's port holds of four children or, for zero-copy, the whole window.
        assert_eq!((tree.window_max, tree.window_start), (256, if by_reference { 256 } else { 2 }));
    }
    let group = device.group();
    assert!(children(group.zero_copy) == [1] && group.shared.is_some(), "{group:?}");
}

#[test]
fn unavailable_shm_is_refused_with_the_reason_and_auto_uses_packets() {
    let cases = [
        (1, None, Some(HERE), "the device does not offer zero-copy"),
        (2, attach_point(1 << 20), Some(HERE), "the device has 2 shards"),
        (1, attach_point(1 << 20), Some("there"), "the rank is on machine there, the device on here"),
        (1, attach_point(1 << 20), None, "the rank's system does not name its machine"),
    ];
    for (shards, attach_point, machine, reason) in cases {
        let controller = controller();
        let _device = Device::with_shards(&controller, "leaf0", shards, attach_point, None);
        let ranks = join(&controller, "job", &[(Transport::Udp, None), (Transport::Shm, machine)]);
        for rank in &ranks {
            let why = no_tree_reason_of(rank);
            assert!(["rank 1", "leaf0", reason, "`udp`"].iter().all(|part| why.contains(part)), "{why}");
        }
        drop(ranks);
        let ranks = join(&controller, "auto", &[(Transport::Auto, machine)]);
        assert_eq!(tree(&ranks[0]).attach, None, "{reason}");
    }
}

#[test]
fn window_shrinks_to_the_free_redo_memory() {
    let controller = controller();
    let device = Device::start(&controller, "leaf0", attach_point(13 * REDO_SLOT), None);
    // 8 of 13 slots, then 4 of the remaining 5, then none of the last one.
    let first = join(&controller, "first", &[SHM, AUTO]);
    let second = join(&controller, "second", &[SHM, AUTO]);
    assert_eq!([&first, &second].map(|ranks| tree(&ranks[0]).window_max), [4, 2]);
    assert_eq!([device.group().slots, device.group().slots], [8, 4]);
    let third = join(&controller, "third", &[AUTO, AUTO]);
    assert!(third.iter().all(|rank| tree(rank).attach.is_none() && tree(rank).window_max == 256));
    assert!(device.group().zero_copy.is_empty());
    let fourth = join(&controller, "fourth", &[AUTO, SHM]);
    let free = format!("the device has {REDO_SLOT} bytes of redo memory free");
    let why = no_tree_reason_of(&fourth[0]);
    assert!(why.contains("rank 1") && why.contains(&free) && why.contains("leaf0"), "{why}");
    // A released group frees its memory.
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
fn leaf_that_falls_back_to_packets_uses_the_packet_chunk_length() {
    // Zero-copy chunks are 896 bytes, whole cache lines; packet chunks 944 bytes, or the configured limit.
    for (chunk_max_bytes, expected) in [(944, 944), (512, 512)] {
        let config = ControllerConfig { chunk_max_bytes, zero_copy_chunk_max_bytes: 896, ..ControllerConfig::new() };
        let controller = Controller::start(config).expect("a port");
        let device = Device::start(&controller, "leaf0", attach_point(4 * (64 + 2 * 896)), None);
        let first = join(&controller, "by-reference", &[AUTO, AUTO]);
        assert_eq!((tree(&first[0]).chunk_len_bytes, device.group().chunk_len_bytes), (896, 896));
        // No redo memory is left for another group.
        let second = join(&controller, "by-packets", &[AUTO, AUTO]);
        assert_eq!(tree(&second[0]).attach, None);
        assert_eq!((tree(&second[0]).chunk_len_bytes, device.group().chunk_len_bytes), (expected, expected));
    }
}

#[test]
fn device_that_refuses_zero_copy_gets_packets_unless_required() {
    for refusal in [Refusal::NoZeroCopy(ZeroCopyRefusal::Engine), Refusal::NoRedoMemory { need: 7 }] {
        let controller = controller();
        let device = Device::start(&controller, "leaf0", attach_point(1 << 20), Some(refusal));
        let ranks = join(&controller, "job", &[AUTO, AUTO]);
        assert!(ranks.iter().all(|rank| tree(rank).attach.is_none() && tree(rank).shared.is_some()));
        let group = device.group();
        assert!(group.zero_copy.is_empty() && group.shared.is_some(), "{group:?}");
        drop(ranks);
        let ranks = join(&controller, "insists", &[SHM, AUTO]);
        let why = no_tree_reason_of(&ranks[1]);
        assert!(why.contains("rank 0") && why.contains(&refusal.to_string()), "{why}");
    }
}

#[test]
fn zero_copy_window_out_of_range_is_refused() {
    for window in [0, 257] {
        let config = ControllerConfig { zero_copy_window_chunks: window, ..ControllerConfig::new() };
        let error = Controller::start(config).expect_err("out of range").to_string();
        assert_eq!(error, format!("zero_copy_window_chunks is {window}; it must be 1 to 256"));
    }
}
