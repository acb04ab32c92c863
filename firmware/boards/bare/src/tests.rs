//! Tests of the port and the control plane on an emulated network: a router connected to every stack.

use crate::control::{Control, ControlError, REDIAL};
use crate::options::{BoardOptions, OptionsError};
use crate::stack::{Buffers, RX_PACKETS, Stack, TX_PACKETS};
use core::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use core::num::NonZeroU32;
use core::time::Duration;
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::wire::{ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol, Ipv4Packet};
use std::boxed::Box;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::format;
use std::rc::Rc;
use std::vec;
use std::vec::Vec;
use sumac_hal::ctrl::{
    Announce, ChildMask, DeviceCapabilities as Capabilities, Envelope, FRAME_HEADER_LEN, GroupConfig, Hello, Order,
    Refusal, Request, Response, SharedLink, ZeroCopyRefusal, decode, encode, frame_len,
};
use sumac_hal::ids::{BootId, ChildIndex, Epoch, GroupId, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::port::conformance::{Testbed, run};
use sumac_hal::port::{Addr, Port};
use sumac_hal::time::Instant;
use sumac_hal::uplink::HopTimers;

mod keyed;

const ROUTER: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0xff, 0xff]);
const PORT: u16 = 7000;

/// Frames that a NIC buffers.
const INBOX_FRAMES: usize = 512;

#[derive(Debug, Default)]
struct Router {
    inboxes: Vec<VecDeque<Vec<u8>>>,
    places: BTreeMap<Ipv4Addr, usize>,
}

impl Router {
    fn deliver(&mut self, to: usize, frame: Vec<u8>) {
        if self.inboxes[to].len() < INBOX_FRAMES {
            self.inboxes[to].push_back(frame);
        }
    }

    /// Answer every ARP request with the router's address; deliver packets by their IP address.
    fn route(&mut self, from: usize, mut bytes: Vec<u8>) {
        let frame = EthernetFrame::new_checked(&bytes[..]).expect("a frame");
        let sender = frame.src_addr();
        match frame.ethertype() {
            EthernetProtocol::Arp => {
                let packet = ArpPacket::new_checked(frame.payload()).expect("an ARP packet");
                let ArpRepr::EthernetIpv4 {
                    operation: ArpOperation::Request,
                    source_protocol_addr,
                    target_protocol_addr,
                    ..
                } = ArpRepr::parse(&packet).expect("ARP for IPv4")
                else {
                    return;
                };
                let answer = ArpRepr::EthernetIpv4 {
                    operation: ArpOperation::Reply,
                    source_hardware_addr: ROUTER,
                    source_protocol_addr: target_protocol_addr,
                    target_hardware_addr: sender,
                    target_protocol_addr: source_protocol_addr,
                };
                let mut bytes = vec![0; 14 + answer.buffer_len()];
                let mut frame = EthernetFrame::new_unchecked(&mut bytes[..]);
                frame.set_dst_addr(sender);
                frame.set_src_addr(ROUTER);
                frame.set_ethertype(EthernetProtocol::Arp);
                answer.emit(&mut ArpPacket::new_unchecked(frame.payload_mut()));
                self.deliver(from, bytes);
            }
            EthernetProtocol::Ipv4 => {
                let to = Ipv4Packet::new_checked(frame.payload()).expect("an IP packet").dst_addr();
                let Some(&to) = self.places.get(&to) else { return };
                let mut frame = EthernetFrame::new_unchecked(&mut bytes[..]);
                frame.set_dst_addr(mac(to));
                frame.set_src_addr(ROUTER);
                self.deliver(to, bytes);
            }
            _ => {}
        }
    }
}

fn mac(place: usize) -> EthernetAddress {
    EthernetAddress([2, 0, 0, 0, 0, place as u8])
}

struct Nic {
    router: Rc<RefCell<Router>>,
    place: usize,
}

struct Frame(Vec<u8>);

impl RxToken for Frame {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

struct Wire<'a>(&'a Nic);

impl TxToken for Wire<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut bytes = vec![0; len];
        let result = f(&mut bytes);
        self.0.router.borrow_mut().route(self.0.place, bytes);
        result
    }
}

impl Device for Nic {
    type RxToken<'a> = Frame;
    type TxToken<'a> = Wire<'a>;

    fn receive(&mut self, _now: smoltcp::time::Instant) -> Option<(Frame, Wire<'_>)> {
        let frame = self.router.borrow_mut().inboxes[self.place].pop_front()?;
        Some((Frame(frame), Wire(self)))
    }

    fn transmit(&mut self, _now: smoltcp::time::Instant) -> Option<Wire<'_>> {
        Some(Wire(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        capabilities.checksum.udp = Checksum::Both;
        capabilities
    }
}

/// Stacks around one router, with buffers for these numbers of packets.
#[derive(Default)]
struct Bed<const RX: usize = RX_PACKETS, const TX: usize = TX_PACKETS> {
    router: Rc<RefCell<Router>>,
    now_us: u64,
}

impl<const RX: usize, const TX: usize> Bed<RX, TX> {
    fn options(place: usize) -> BoardOptions {
        let text = format!(
            "name=board-{place}\ncontroller=127.0.0.1:9\nip=10.0.{place}.2/24\ngateway=10.0.{place}.1\nlisten={PORT}"
        );
        BoardOptions::parse(&text).expect("options")
    }

    fn stack(&mut self) -> Stack<Nic> {
        let place = self.router.borrow().inboxes.len();
        let options = Self::options(place);
        let mut router = self.router.borrow_mut();
        router.inboxes.push(VecDeque::new());
        router.places.insert(options.ip.address(), place);
        drop(router);
        let nic = Nic { router: Rc::clone(&self.router), place };
        let buffers = Box::leak(Box::<Buffers<RX, TX>>::default());
        Stack::new(nic, mac(place).0, &options, buffers, place as u64, self.now())
    }
}

impl<const RX: usize, const TX: usize> Bed<RX, TX> {
    /// Resolve the next hops of a port's own and of an unreachable address. smoltcp sends one ARP request a second, and
    /// packets that wait for a reply delay the others. A board has one next hop, the gateway; the suite also has ports
    /// send to themselves.
    fn find_next_hops(&mut self, port: &mut Stack<Nic>) {
        use sumac_hal::port::TxToken as _;
        let (own, nowhere) = (port.local_addr(), self.unused_addr());
        for to in [own, nowhere] {
            port.transmit(self.now()).expect("room").consume(to, |buffer| (put(buffer, b"who?"), ()));
        }
        for _ in 0..20 {
            self.now_us += 100_000;
            let now = self.now();
            port.flush(now);
            while take(port, now).is_some() {}
        }
        assert_eq!(port.room(self.now()), TX, "both are resolved");
    }
}

impl<const RX: usize, const TX: usize> Testbed for Bed<RX, TX> {
    type Port = Stack<Nic>;

    fn ports(&mut self, n: usize) -> Vec<Stack<Nic>> {
        // Each check gets a new network, because addresses are bytes.
        self.router = Rc::default();
        let mut ports: Vec<_> = (0..n).map(|_| self.stack()).collect();
        ports.iter_mut().for_each(|port| self.find_next_hops(port));
        ports
    }

    fn addr_of(&self, port: &Stack<Nic>) -> Addr {
        port.local_addr()
    }

    fn unused_addr(&mut self) -> Addr {
        Addr::Udp(SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), PORT)))
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(self.now_us * 1_000)
    }

    fn advance(&mut self) {
        self.now_us += 10;
    }
}

#[test]
fn stack_passes_the_port_conformance_suite() {
    run(&mut Bed::<RX_PACKETS, TX_PACKETS>::default()).unwrap_or_else(|violation| panic!("{violation}"));
}

#[test]
fn stack_with_small_buffers_passes_the_port_conformance_suite() {
    if let Err(violation) = run(&mut Bed::<8, 4>::default()).and_then(|()| run(&mut Bed::<32, 16>::default())) {
        panic!("{violation}");
    }
}

/// The addresses of an emulated machine's host.
#[test]
fn host_behind_the_gateway_is_loopback_in_both_directions() {
    let mut bed = Bed::<RX_PACKETS, TX_PACKETS>::default();
    let (mut board, host) = (bed.stack(), bed.stack());
    // The host's address is the gateway's.
    bed.router.borrow_mut().places.insert(Ipv4Addr::new(10, 0, 0, 1), 1);
    let mut host = host;
    host.answer_as(Ipv4Addr::new(10, 0, 0, 1));
    let now = bed.now();
    let (loopback, board_addr) = (Addr::Udp(SocketAddr::from((Ipv4Addr::LOCALHOST, PORT))), board.local_addr());
    let send = |port: &mut Stack<Nic>, to, bytes: &[u8]| {
        use sumac_hal::port::TxToken as _;
        let token = port.transmit(now).expect("room");
        token.consume(to, |buffer| (put(buffer, bytes), ()));
        port.flush(now);
    };
    send(&mut board, loopback, b"up");
    assert_eq!(take(&mut host, now), Some((board_addr, b"up".to_vec())));
    send(&mut host, board_addr, b"down");
    assert_eq!(take(&mut board, now), Some((loopback, b"down".to_vec())));
}

fn put(buffer: &mut [u8], bytes: &[u8]) -> usize {
    buffer[..bytes.len()].copy_from_slice(bytes);
    bytes.len()
}

fn take(port: &mut Stack<Nic>, now: Instant) -> Option<(Addr, Vec<u8>)> {
    use sumac_hal::port::RxToken as _;
    port.receive(now).map(|token| token.consume(|from, bytes| (from, bytes.to_vec())))
}

/// A controller on a stack of its own, and a board's control connection to it.
struct Controlled {
    bed: Bed,
    board: Stack<Nic>,
    control: Control,
    controller: Stack<Nic>,
    received: Vec<u8>,
    executed: Vec<Request>,
}

const CONTROLLER: u16 = 4242;

impl Controlled {
    fn new() -> Self {
        let mut bed = Bed::<RX_PACKETS, TX_PACKETS>::default();
        let (board, mut controller) = (bed.stack(), bed.stack());
        let address = SocketAddrV4::new(Ipv4Addr::new(10, 0, 1, 2), CONTROLLER);
        controller.control().0.listen(CONTROLLER).expect("a port");
        let control = Control::new(address, announce(), None, 7);
        Self { bed, board, control, controller, received: Vec::new(), executed: Vec::new() }
    }

    /// Let a millisecond pass.
    fn pass(&mut self) -> Result<(), ControlError> {
        self.bed.now_us += 1_000;
        let now = self.bed.now();
        let executed = &mut self.executed;
        let result = self.control.poll(&mut self.board, now, |request| {
            executed.push(request.clone());
            Response::Done
        });
        self.board.poll(now);
        self.controller.poll(now);
        let socket = self.controller.control().0;
        if socket.can_recv() {
            let mut bytes = [0; 4096];
            let len = socket.recv_slice(&mut bytes).expect("bytes");
            self.received.extend_from_slice(&bytes[..len]);
        }
        result
    }

    /// Let time pass until the controller has received a message.
    fn receive<M: serde::de::DeserializeOwned>(&mut self) -> M {
        for _ in 0..1_000 {
            if let Some((message, len)) = decode(&self.received).expect("a message") {
                self.received.drain(..len);
                return message;
            }
            self.pass().expect("a connection");
        }
        panic!("the controller received nothing for a second");
    }

    fn send(&mut self, bytes: &[u8]) {
        let sent = self.controller.control().0.send_slice(bytes).expect("a connection");
        assert_eq!(sent, bytes.len());
    }

    /// Let time pass until the connection ends.
    fn end(&mut self) -> ControlError {
        (0..30_000).find_map(|_| self.pass().err()).expect("the connection ends")
    }
}

fn announce() -> Announce {
    let capabilities = Capabilities {
        max_packet_len_bytes: 1472,
        receive_buffer_bytes: 1 << 18,
        groups: 4,
        children: 8,
        slots: 64,
        slot_memory_bytes: 1 << 20,
        dtypes: 1,
        ops: 1,
        collectives: 1,
    };
    let name = "board".try_into().expect("a name");
    Announce { name, boot_id: BootId(5), capabilities, data_addrs: heapless::Vec::new(), attach: None, slots: None }
}

fn request(id: u32, message: Request) -> Vec<u8> {
    let mut bytes = [0; 4096];
    encode(&Envelope { id, message }, &mut bytes).expect("room").to_vec()
}

#[test]
fn board_sends_hello_and_answers_requests_in_order() {
    let mut bed = Controlled::new();
    assert_eq!(bed.receive::<Hello>(), Hello::Device(announce()));
    assert!(!bed.control.is_up(), "the controller has not sent a request yet");
    let remove = Request::RemoveTree(TreeId(3));
    let both = [request(1, Request::Identify), request(2, remove.clone())].concat();
    // In pieces, as from a stream.
    let (head, tail) = both.split_at(17);
    bed.send(head);
    bed.pass().expect("a connection");
    bed.send(tail);
    let expected = [(1, Response::Announce(announce())), (2, Response::Done)];
    for (id, message) in expected {
        assert_eq!(bed.receive::<Envelope<Response>>(), Envelope { id, message });
    }
    assert_eq!(bed.executed, [remove]);
    assert!(bed.control.is_up());
}

/// Multicast does not cross an emulated machine's network, and this board has no zero-copy ranks.
#[test]
fn group_gets_no_shared_address_and_zero_copy_is_refused() {
    let mut bed = Controlled::new();
    bed.receive::<Hello>();
    let addr = Addr::Udp(SocketAddr::from((Ipv4Addr::new(239, 255, 0, 1), PORT)));
    let config = GroupConfig { shared: Some(addr), parent_shared: Some(SharedLink { addr, key: 3 }), ..group() };
    let mut zero_copy = ChildMask::EMPTY;
    zero_copy.insert(ChildIndex(0));
    bed.send(&request(1, Request::CreateGroup(config)));
    bed.send(&request(2, Request::CreateGroup(GroupConfig { zero_copy, ..group() })));
    let refused = Response::Refused(Refusal::NoZeroCopy(ZeroCopyRefusal::Unsupported));
    for (id, message) in [(1, Response::Done), (2, refused)] {
        assert_eq!(bed.receive::<Envelope<Response>>(), Envelope { id, message });
    }
    assert_eq!(bed.executed, [Request::CreateGroup(group())]);
}

fn group() -> GroupConfig {
    GroupConfig {
        group: GroupId(1),
        tree: TreeId(1),
        epoch: Epoch { term: 1, counter: 1 },
        order: Order::Arrival,
        secret: GroupSecret([0; 16]),
        parent_key: 0,
        shared: None,
        parent_shared: None,
        window_max: 2,
        slots: 8,
        chunk_len_bytes: 64,
        ranks: NonZeroU32::MIN,
        lease_ms: 1_000,
        timers: HopTimers::DEFAULT.into(),
        zero_copy: ChildMask::EMPTY,
    }
}

#[test]
fn damaged_request_ends_the_connection_and_the_board_redials() {
    let mut bed = Controlled::new();
    bed.receive::<Hello>();
    let mut damaged = request(1, Request::Stats);
    *damaged.last_mut().expect("bytes") ^= 1;
    bed.send(&damaged);
    assert!(matches!(bed.end(), ControlError::Frame(_)));
    assert!(bed.executed.is_empty() && !bed.control.is_up());
    let at = bed.bed.now();
    assert_eq!(bed.control.poll_at(), Some(at + REDIAL));
    bed.controller.control().0.abort();
    bed.controller.control().0.listen(CONTROLLER).expect("a port");
    bed.received.clear();
    assert_eq!(bed.receive::<Hello>(), Hello::Device(announce()));
}

#[test]
fn request_beyond_the_buffer_is_refused_as_too_long() {
    let mut bed = Controlled::new();
    bed.receive::<Hello>();
    let mut long = request(1, Request::Stats);
    long[4..8].copy_from_slice(&5_000_u32.to_le_bytes());
    long.resize(FRAME_HEADER_LEN + 5_000, 0);
    assert_eq!(frame_len(&long), Ok(Some(long.len())));
    bed.send(&long[..4096]);
    assert_eq!(bed.end(), ControlError::TooLong);
}

#[test]
fn silent_controller_is_given_up_within_20_s() {
    let mut bed = Controlled::new();
    bed.receive::<Hello>();
    // No more packets are delivered.
    bed.bed.router.borrow_mut().places.clear();
    let before = bed.bed.now();
    assert_eq!(bed.end(), ControlError::Closed);
    assert!(bed.bed.now() - before < Duration::from_secs(20));
}

#[test]
fn closed_control_connection_is_detected() {
    let mut bed = Controlled::new();
    bed.receive::<Hello>();
    bed.controller.control().0.close();
    assert_eq!(bed.end(), ControlError::Closed);
    assert_eq!(bed.controller.control().0.state(), tcp::State::Closed);
}

#[test]
fn key_among_the_options_is_parsed_and_never_shown() {
    let text = |key: &str| {
        format!("name=leaf-1\ncontroller=127.0.0.1:7\nip=10.0.2.15/24\ngateway=10.0.2.2\nlisten=7000\nkey={key}\n")
    };
    let (good, secret) = (format!("sumac-key-v1 000000000000005a {}", "a7".repeat(32)), "a7a7");
    let options = BoardOptions::parse(&text(&good)).expect("options");
    assert_eq!(options.key, Some(keyed::key()));
    assert!(!format!("{options:?}").contains(secret));
    for wrong in [&good[..good.len() - 2], &good[13..], ""] {
        let error = BoardOptions::parse(&text(wrong)).expect_err("not a key");
        assert!(matches!(error, OptionsError::DeviceKey(_)), "{error}");
        assert!(!format!("{error}{error:?}").contains(secret), "{error}");
    }
}

#[test]
fn options_parse_or_name_the_error() {
    let text = "# a board\nname = leaf-1\ncontroller=127.0.0.1:7\nip=10.0.2.15/24\ngateway=10.0.2.2\nlisten=7000\n";
    let options = BoardOptions::parse(text).expect("options");
    assert_eq!((options.name.as_str(), options.data), ("leaf-1", "10.0.2.15:7000".parse().expect("an address")));
    let shard = options.shard(2).expect("a port");
    assert_eq!((shard.listen, shard.data.port()), (7002, 7002));
    assert_eq!(options.shard(60_000), None);
    assert_eq!(options.broker, None);
    let bus = BoardOptions::parse(&format!("{text}socket=s\nmachine=m\n")).expect("options").broker.expect("a broker");
    assert_eq!((bus.0.as_str(), bus.1.as_str()), ("m", "s"));
    assert_eq!((options.user, BoardOptions::parse(&format!("{text}user=1000\n")).expect("options").user), (0, 1000));
    let error = |text: &str| BoardOptions::parse(text).expect_err("an error");
    assert_eq!(error(&format!("{text}socket=s")), OptionsError::Missing { key: "machine" });
    assert_eq!(error(&format!("{text}machine=m")), OptionsError::Missing { key: "socket" });
    assert_eq!(error("name"), OptionsError::Line { line: 1 });
    assert_eq!(error("\ncolour=red"), OptionsError::Key { line: 2 });
    assert_eq!(error("name=a"), OptionsError::Missing { key: "ip" });
    for (wrong, says) in [
        ("listen=0", "listen=\"0\" is not a port from 1 to 65535"),
        ("ip=10.0.2.15", "ip=\"10.0.2.1\" is not an IPv4 address and prefix, such as 10.0.2.15/24"),
        ("name=", "name=\"\" is not 1 to 64 bytes"),
    ] {
        assert_eq!(format!("{}", error(wrong)), says);
    }
}
