//! A controller with devices and clients that send arbitrary messages in any order.
//!
//! Input: a byte (even: with a fabric), then steps, each a byte for its kind and its arguments. The controller is the
//! production one without its threads and sockets ([`Machine`]).

use crate::Cursor;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use sumac::Order;
use sumac::controller::ControllerConfig;
use sumac::controller::limits::REPLY_LEN_MAX;
use sumac::controller::machine::{ConnId, Entropy, Frames, Machine, Output};
use sumac::controller::proto::{ClientReply, ClientRequest, JoinRequest, ResumeRequest, Terms, Transport};
use sumac::exec::JobSecret;
use sumac::topo::Fabric;
use sumac_hal::ctrl::{
    Announce, AttachPoint, DeviceCapabilities, DeviceUser, Envelope, FrameBuffer, Name, Refusal, Request, Response,
};
use sumac_hal::ids::{BootId, GroupId, Rank};
use sumac_hal::port::Addr;
use sumac_hal::shm::DeviceUsers;
use sumac_hal::time::Instant;

/// Two leaves and a spine, each with a device.
const FABRIC_TOML: &str = r#"
    switch = [{ name = "d0", aggregation = true }, { name = "d1", aggregation = true }, { name = "d2", aggregation = true }]
    host = [{ name = "h0" }, { name = "h1" }, { name = "h2" }, { name = "h3" }]
    link = [
        { ends = ["h0", "d0"] }, { ends = ["h1", "d0"] }, { ends = ["h2", "d1"] }, { ends = ["h3", "d1"] },
        { ends = ["d0", "d2"] }, { ends = ["d1", "d2"] },
    ]
"#;

/// Parsed once, not for each input.
static FABRIC: LazyLock<Fabric> = LazyLock::new(|| Fabric::from_toml(FABRIC_TOML).expect("a fabric"));

/// The maximum number of steps of an input: enough for several jobs, and few enough for many inputs per second.
const STEPS_MAX: usize = 128;

/// The number of slots of a device, and its other sizes.
const SLOTS: u32 = 256;

/// Run the target.
///
/// # Panics
/// If an invariant is violated.
pub fn run(data: &[u8]) {
    run_steps(data, &mut |_| {});
}

fn run_steps(data: &[u8], observe: &mut dyn FnMut(&Sent)) {
    let mut cursor = Cursor(data);
    let has_fabric = cursor.byte() % 2 == 0;
    let config = ControllerConfig {
        fabric: has_fabric.then(|| FABRIC.clone()),
        multicast_results: false,
        lease: Duration::from_secs(3),
        ..ControllerConfig::new()
    };
    let config = Arc::new(config);
    let mut world = World {
        controller: Machine::new(Arc::clone(&config), STARTED_MS, Entropy::Seeded(1), Instant::ZERO).expect("valid"),
        config,
        now: Instant::ZERO,
        devices: BTreeMap::new(),
        clients: BTreeMap::new(),
        dialled: 0,
        capable: BTreeMap::new(),
    };
    for _ in 0..STEPS_MAX {
        if cursor.is_empty() {
            break;
        }
        world.step(&mut cursor);
        world.deliver(observe);
        world.check();
    }
    // After all connections have closed and all leases have expired, the controller holds nothing.
    for conn in world.clients.keys().chain(world.devices.keys()).copied().collect::<Vec<_>>() {
        world.controller.handle_disconnects([conn], world.now);
    }
    world.devices.clear();
    for _ in 0..STEPS_MAX {
        if world.is_idle() {
            break;
        }
        world.now = world.now.max(world.controller.poll_timeout());
        world.work();
        while world.controller.poll_transmit().is_some() {}
    }
    assert_eq!(world.controller.report().jobs.len(), 0, "jobs without ranks");
    assert!(world.controller.has_no_drafts(), "requests to disconnected peers are pending");
    assert!(world.controller.claims().is_empty(), "resources are allocated without a job");
}

/// When the controller has started.
const STARTED_MS: u64 = 1_000_000;

/// What the controller sends.
enum Sent {
    Request(Envelope<Request>),
    Reply(Box<ClientReply>),
    Close,
}

struct World {
    controller: Machine,
    config: Arc<ControllerConfig>,
    now: Instant,
    /// The unanswered requests to each device.
    devices: BTreeMap<ConnId, VecDeque<Envelope<Request>>>,
    /// The connected clients.
    clients: BTreeMap<ConnId, ()>,
    dialled: u64,
    /// The slots of each connected device, by its name.
    capable: BTreeMap<String, u64>,
}

impl World {
    fn step(&mut self, cursor: &mut Cursor<'_>) {
        match cursor.byte() % 12 {
            0 => self.dial_device(cursor, false),
            1 => self.dial_device(cursor, true),
            2 => {
                let conn = self.dial();
                self.controller.connect_client(conn);
                self.clients.insert(conn, ());
            }
            3 | 4 => {
                let request = ClientRequest::Join(join(cursor));
                self.request(cursor, request);
            }
            5 => {
                let devices = (0..cursor.byte() % 4).map(|_| format!("d{}", cursor.byte() % 4)).collect();
                let request = ClientRequest::JoinOn { request: join(cursor), devices };
                self.request(cursor, request);
            }
            6 => {
                let resumption = ResumeRequest {
                    request: join(cursor),
                    devices: (0..cursor.byte() % 3).map(|_| format!("d{}", cursor.byte() % 4)).collect(),
                    view: number(cursor),
                    shrink_count: number(cursor),
                    secret: JobSecret::new([cursor.byte(); 32]),
                    expression: Vec::new(),
                };
                self.request(cursor, ClientRequest::Resume(Box::new(resumption)));
            }
            7 => {
                let len = usize::from(cursor.u16() % 512);
                let bytes = cursor.take(len);
                if let Ok((request, _)) = postcard::take_from_bytes::<ClientRequest>(bytes) {
                    self.request(cursor, request);
                }
            }
            8 => self.answer(cursor),
            9 => {
                let all: Vec<ConnId> = self.clients.keys().chain(self.devices.keys()).copied().collect();
                if let Some(conn) = pick(&all, cursor) {
                    self.clients.remove(&conn);
                    self.devices.remove(&conn);
                    self.controller.handle_disconnects([conn], self.now);
                }
            }
            10 => {
                self.now = self.now + Duration::from_millis(u64::from(cursor.u16() % 4096));
                self.work();
            }
            _ => {
                let request = match cursor.byte() % 8 {
                    0 => ClientRequest::Leave,
                    1 => ClientRequest::Suspect { view: number(cursor) },
                    2 => ClientRequest::Replan { view: number(cursor) },
                    3 => ClientRequest::Survivors,
                    4 => ClientRequest::Pause { view: number(cursor), at: cursor.u64() },
                    5 => ClientRequest::Decline { view: number(cursor), device: Some("d0".into()), why: "no".into() },
                    6 => ClientRequest::AbandonReplan { view: number(cursor) },
                    _ => ClientRequest::Status,
                };
                self.request(cursor, request);
            }
        }
    }

    fn dial(&mut self) -> ConnId {
        self.dialled += 1;
        ConnId(self.dialled)
    }

    fn dial_device(&mut self, cursor: &mut Cursor<'_>, says_anything: bool) {
        let conn = self.dial();
        let announce = if says_anything {
            let len = usize::from(cursor.u16() % 512);
            match postcard::take_from_bytes::<Announce>(cursor.take(len)) {
                Ok((announce, _)) => announce,
                Err(_) => return,
            }
        } else {
            device(cursor)
        };
        let (name, slots) = (announce.name.to_string(), u64::from(announce.capabilities.slots));
        let shards = announce.data_addrs.len().max(1) as u64;
        if self.controller.connect_device(conn, announce, self.now) {
            self.devices.insert(conn, VecDeque::new());
            let most = self.capable.entry(name).or_default();
            *most = (*most).max(slots * shards);
        }
    }

    fn request(&mut self, cursor: &mut Cursor<'_>, request: ClientRequest) {
        let clients: Vec<ConnId> = self.clients.keys().copied().collect();
        match (pick(&clients, cursor), request) {
            (_, ClientRequest::Status) => assert!(self.controller.report().jobs.len() <= self.dialled as usize),
            (Some(conn), request) => assert!(self.controller.handle_request(conn, request, self.now)),
            (None, _) => {}
        }
    }

    /// A device answers its oldest request, or sends an arbitrary message.
    fn answer(&mut self, cursor: &mut Cursor<'_>) {
        let devices: Vec<ConnId> = self.devices.keys().copied().collect();
        let Some(conn) = pick(&devices, cursor) else { return };
        let kind = cursor.byte();
        let asked = self.devices.get_mut(&conn).and_then(VecDeque::pop_front);
        let id = asked.as_ref().map_or_else(|| cursor.u32(), |asked| asked.id);
        let message = match (asked.map(|asked| asked.message), kind % 8) {
            (_, 7) => {
                let len = usize::from(cursor.u16() % 512);
                match postcard::take_from_bytes::<Response>(cursor.take(len)) {
                    Ok((response, _)) => response,
                    Err(_) => return,
                }
            }
            (_, 6) => Response::Refused(Refusal::NoSlots { need: cursor.u32() }),
            (Some(Request::RenewGroup(_)), 5) => Response::Refused(Refusal::NoGroup(GroupId(cursor.u32()))),
            (Some(Request::Identify), _) => Response::Announce(device(cursor)),
            _ => Response::Done,
        };
        self.controller.handle_response(conn, Envelope { id, message }, self.now);
    }

    /// Let the controller do due work.
    fn work(&mut self) {
        while self.controller.poll_timeout() <= self.now || self.controller.has_plan() {
            self.controller.handle_timeout(self.now);
            if let Some(plan) = self.controller.poll_plan() {
                self.controller.handle_plan(plan.run(&self.config), self.now);
            }
        }
    }

    /// Deliver the controller's messages.
    fn deliver(&mut self, observe: &mut dyn FnMut(&Sent)) {
        self.work();
        while let Some((conn, output)) = self.controller.poll_transmit() {
            let Output::Frames(parts) = output else {
                observe(&Sent::Close);
                let was_there = self.clients.remove(&conn).is_some() | self.devices.remove(&conn).is_some();
                if was_there {
                    self.controller.handle_disconnects([conn], self.now);
                }
                continue;
            };
            let mut frames = FrameBuffer::new(REPLY_LEN_MAX);
            parts.iter().map(Frames::bytes).for_each(|bytes| frames.push(bytes));
            if let Some(asked) = self.devices.get_mut(&conn) {
                while let Some(request) = frames.take_message::<Envelope<Request>>().expect("a request") {
                    observe(&Sent::Request(request.clone()));
                    asked.push_back(request);
                }
            } else if self.clients.contains_key(&conn) {
                while let Some(reply) = frames.take_message::<ClientReply>().expect("a reply") {
                    observe(&Sent::Reply(Box::new(reply)));
                }
            }
        }
    }

    /// Return whether the controller has no peers and holds no resources.
    fn is_idle(&self) -> bool {
        self.controller.claims().is_empty()
            && self.controller.has_no_drafts()
            && self.controller.report().jobs.is_empty()
    }

    /// Check that no device has more resources allocated than it has ever reported.
    fn check(&self) {
        let mut allocated: BTreeMap<&str, u64> = BTreeMap::new();
        let all = self.controller.claims();
        for group in &all {
            *allocated.entry(&group.device).or_default() += group.slots;
        }
        for (device, slots) in allocated {
            let most = self.capable.get(device).copied().unwrap_or_default();
            assert!(slots <= most, "{device} has {slots} slots allocated, but {most} in total");
        }
    }
}

fn pick(all: &[ConnId], cursor: &mut Cursor<'_>) -> Option<ConnId> {
    let index = usize::from(cursor.byte());
    (!all.is_empty()).then(|| all[index % all.len()])
}

/// Mostly a small number, sometimes any number.
fn number(cursor: &mut Cursor<'_>) -> u32 {
    match cursor.byte() {
        255 => cursor.u32(),
        small => u32::from(small % 8),
    }
}

fn device(cursor: &mut Cursor<'_>) -> Announce {
    let name = format!("d{}", cursor.byte() % 4);
    let bits = cursor.byte();
    let bus = (bits & 1 != 0).then(|| AttachPoint {
        machine: Name::try_from("m0").expect("short"),
        socket: Name::try_from(name.as_str()).expect("short"),
        user: DeviceUser { uid: u32::from(bits >> 1) % 4, serves_all: bits & 8 != 0 },
        redo_memory_bytes: 1 << 22,
        remote: None,
    });
    Announce {
        name: Name::try_from(name.as_str()).expect("short"),
        boot_id: BootId(u64::from(bits >> 6)),
        capabilities: DeviceCapabilities {
            max_packet_len_bytes: 1500,
            receive_buffer_bytes: 1 << 20,
            groups: 8,
            children: 16,
            slots: SLOTS,
            slot_memory_bytes: 1 << 20,
            dtypes: u32::MAX,
            ops: u32::MAX,
            collectives: u32::MAX,
        },
        data_addrs: (0..1 + u32::from(bits >> 4 & 1)).map(Addr::Emu).collect(),
        attach: bus,
        slots: None,
    }
}

fn join(cursor: &mut Cursor<'_>) -> JoinRequest {
    let bits = cursor.byte();
    let host = |cursor: &mut Cursor<'_>| format!("h{}", cursor.byte() % 5);
    let mut request = JoinRequest {
        job: format!("j{}", bits & 3),
        rank: Rank(number(cursor)),
        world: number(cursor),
        host: (bits & 4 != 0).then(|| host(cursor)),
        order: [Order::Arrival, Order::TreeFold, Order::TreePairwise][usize::from(bits >> 3) % 3],
        mesh_addr: SocketAddr::from(([127, 0, 0, 1], 1)),
        recovery_addr: SocketAddr::from(([127, 0, 0, 1], 2)),
        max_packet_len_bytes: if bits & 0x20 != 0 { cursor.u32() } else { 1500 },
        transport: Transport::ALL[usize::from(cursor.byte()) % Transport::ALL.len()],
        machine: (bits & 0x40 != 0).then(|| Name::try_from("m0").expect("short")),
        device_users: DeviceUsers { own: 0, named: None },
        terms: Terms::default(),
    };
    let whose = cursor.byte();
    request.device_users =
        DeviceUsers { own: u32::from(whose / 3 % 4), named: (whose / 12 % 5).checked_sub(1).map(u32::from) };
    request.terms = Terms {
        tenant: format!("t{}", whose % 3),
        wait_ms: if bits & 0x80 != 0 { cursor.u32() } else { 0 },
        accepts_migration: cursor.byte() & 1 != 0,
        hierarchical: whose & 1 != 0,
        ..Terms::default()
    };
    request
}

/// Return a device's first message, as a seed of other targets.
pub fn announce() -> Announce {
    device(&mut Cursor(&[0, 1]))
}

/// Return a rank's request to join, as a seed of other targets.
pub fn joining() -> JoinRequest {
    join(&mut Cursor(&[0x44, 0, 2, 0]))
}

/// Steps by which three devices connect and answer their requests.
const DEVICES: [u8; 9] = [0, 0, 1, 0, 1, 1, 0, 2, 1];

/// A join of rank `rank` of two, by the client with the same number.
fn joins(kind: u8, rank: u8) -> Vec<u8> {
    vec![2, kind, 0x04, rank, 2, rank, 0, 0, 0, rank]
}

/// Answers of all devices, three times.
fn answers() -> Vec<u8> {
    (0..9).flat_map(|turn| [8, turn % 3, 0]).collect()
}

/// Return inputs for this target.
pub fn inputs() -> Vec<(String, Vec<u8>)> {
    let front = |fabric: u8| [&[fabric][..], &DEVICES, &answers()].concat();
    let tree = [front(0), joins(3, 0), joins(3, 1), answers(), answers()].concat();
    let flat = [front(1), joins(3, 0), joins(3, 1), answers(), answers()].concat();
    // Rank 0 suspects the tree; both request another one.
    let replan = [&tree[..], &[11, 1, 0, 0], &[11, 2, 0, 0, 11, 2, 0, 1], &answers(), &answers()].concat();
    let lost = [&tree[..], &[9, 0, 11, 3, 1, 11, 0, 0]].concat();
    let leases = [&tree[..], &[10, 0xff, 0x0f], &answers(), &[10, 0xff, 0x0f, 10, 0xff, 0x0f]].concat();
    let on = [&front(0)[..], &[2, 5, 1, 0, 0x04, 0, 1, 0, 0, 0, 0], &answers(), &answers()].concat();
    let resume =
        [&front(0)[..], &[2, 6, 0x04, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0], &answers()].concat();
    [
        ("tree", tree),
        ("flat", flat),
        ("replan", replan),
        ("lost", lost),
        ("leases", leases),
        ("on-devices", on),
        ("resume", resume),
    ]
    .map(|(name, bytes)| (name.to_owned(), bytes))
    .to_vec()
}

/// Return every message that the controller sends for these inputs, with the number of its type in the target
/// `control`.
pub fn controller_messages() -> Vec<(u8, Vec<u8>)> {
    let mut messages: Vec<(u8, Vec<u8>)> = Vec::new();
    for (_, bytes) in inputs() {
        run_steps(&bytes, &mut |sent| {
            let message = match sent {
                Sent::Request(request) => (0, postcard::to_stdvec(request)),
                Sent::Reply(reply) => (5, postcard::to_stdvec(reply)),
                Sent::Close => return,
            };
            let message = (message.0, message.1.expect("memory"));
            // One of each kind is enough: the tag of a request follows its number.
            let kind = |(of, bytes): &(u8, Vec<u8>)| (*of, bytes[usize::from(*of == 0)]);
            if !messages.iter().any(|other| kind(other) == kind(&message)) {
                messages.push(message);
            }
        });
    }
    messages
}
