//! The conformance suite on real sockets, and tests specific to UDP.

use super::*;
use crate::port::conformance::{Testbed, Violation, WaitTestbed, run, run_wait};
use std::net::{Ipv4Addr, Ipv6Addr};

const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

struct UdpBed {
    addr: SocketAddr,
    config: UdpConfig,
    start: std::time::Instant,
    /// The address of a socket that was closed.
    gone: Option<SocketAddr>,
}

impl UdpBed {
    fn new(addr: SocketAddr, config: UdpConfig) -> Self {
        Self { addr, config, start: std::time::Instant::now(), gone: None }
    }
}

impl Testbed for UdpBed {
    type Port = UdpPort;

    fn ports(&mut self, n: usize) -> Vec<UdpPort> {
        (0..n).map(|_| UdpPort::bind(self.addr, &self.config).unwrap()).collect()
    }

    fn addr_of(&self, port: &UdpPort) -> Addr {
        port.local_addr()
    }

    fn unused_addr(&mut self) -> Addr {
        let addr = *self.gone.get_or_insert_with(|| UdpSocket::bind(self.addr).unwrap().local_addr().unwrap());
        Addr::Udp(addr)
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    fn advance(&mut self) {
        std::thread::yield_now();
    }
}

impl WaitTestbed for UdpBed {
    fn waker(&mut self, port: &UdpPort) -> Box<dyn Fn() + Send> {
        let waker = port.waker();
        Box::new(move || waker.wake())
    }
}

fn conforms(addr: SocketAddr, config: UdpConfig) {
    // Small enough to be filled quickly, several times over.
    let config = UdpConfig { receive_buffer_bytes: 1 << 20, ..config };
    let mut bed = UdpBed::new(addr, config);
    assert_eq!(run(&mut bed), Ok(()));
    assert_eq!(run_wait(&mut bed), Ok(()));
}

#[test]
fn conforms_with_offloads() {
    conforms(LOOPBACK, UdpConfig::default());
}

#[test]
fn conforms_without_offloads() {
    conforms(LOOPBACK, UdpConfig { gso: Offload::Off, gro: Offload::Off, ..UdpConfig::default() });
}

#[test]
fn conforms_with_one_offload_only() {
    conforms(LOOPBACK, UdpConfig { gro: Offload::Off, spin: Duration::ZERO, ..UdpConfig::default() });
    conforms(LOOPBACK, UdpConfig { gso: Offload::Off, spin: Duration::from_micros(50), ..UdpConfig::default() });
}

#[test]
fn conforms_with_packets_of_an_ethernet_frame() {
    conforms(LOOPBACK, UdpConfig { max_packet_len_bytes: Some(1472), ..UdpConfig::default() });
}

#[test]
fn conforms_over_ipv6() {
    let addr = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
    if UdpSocket::bind(addr).is_err() {
        eprintln!("skipped: this machine has no IPv6 loopback");
        return;
    }
    conforms(addr, UdpConfig::default());
}

/// A port whose `wait` ignores packets or wakes.
struct FaultyPort {
    inner: UdpPort,
    ignores_packets: bool,
}

impl Port for FaultyPort {
    type Rx<'a> = UdpRx<'a>;
    type Tx<'a> = UdpTx<'a>;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn receive(&mut self, now: Instant) -> Option<UdpRx<'_>> {
        self.inner.receive(now)
    }

    fn transmit(&mut self, now: Instant) -> Option<UdpTx<'_>> {
        self.inner.transmit(now)
    }

    fn flush(&mut self, now: Instant) {
        self.inner.flush(now);
    }
}

impl WaitPort for FaultyPort {
    fn wait(&mut self, _timeout: Option<Duration>) -> Wake {
        match self.inner.wait(Some(Duration::ZERO)) {
            Wake::Packet if self.ignores_packets => Wake::Timeout,
            Wake::Woken if !self.ignores_packets => Wake::Timeout,
            other => other,
        }
    }
}

struct FaultyTestbed {
    bed: UdpBed,
    ignores_packets: bool,
}

impl Testbed for FaultyTestbed {
    type Port = FaultyPort;

    fn ports(&mut self, n: usize) -> Vec<FaultyPort> {
        let ignores_packets = self.ignores_packets;
        self.bed.ports(n).into_iter().map(|inner| FaultyPort { inner, ignores_packets }).collect()
    }

    fn addr_of(&self, port: &FaultyPort) -> Addr {
        port.inner.local_addr()
    }

    fn unused_addr(&mut self) -> Addr {
        self.bed.unused_addr()
    }

    fn now(&self) -> Instant {
        self.bed.now()
    }

    fn advance(&mut self) {
        self.bed.advance();
    }
}

impl WaitTestbed for FaultyTestbed {
    fn waker(&mut self, port: &FaultyPort) -> Box<dyn Fn() + Send> {
        self.bed.waker(&port.inner)
    }
}

#[test]
fn conformance_rejects_a_port_whose_wait_ignores_packets_or_wakes() {
    for (ignores_packets, expected) in [(true, Wake::Packet), (false, Wake::Woken)] {
        let bed = UdpBed::new(LOOPBACK, UdpConfig::default());
        let found = run_wait(&mut FaultyTestbed { bed, ignores_packets });
        assert!(matches!(found, Err(Violation::WrongWake { expected: other, .. }) if other == expected), "{found:?}");
    }
}

#[test]
fn invalid_configurations_are_refused() {
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    assert!(matches!(UdpPort::bind(any, &UdpConfig::default()), Err(UdpError::Unspecified { addr }) if addr == any));
    for requested in [0, MAX_DATAGRAM_LEN_BYTES + 1] {
        let config = UdpConfig { max_packet_len_bytes: Some(requested), ..UdpConfig::default() };
        assert!(
            matches!(UdpPort::bind(LOOPBACK, &config), Err(UdpError::PacketLength { requested: a }) if a == requested)
        );
    }
    let taken = UdpPort::bind(LOOPBACK, &UdpConfig::default()).unwrap();
    let error = UdpPort::bind(taken.local_addr, &UdpConfig::default()).unwrap_err();
    assert!(error.to_string().contains(&taken.local_addr.to_string()), "{error}");
}

#[test]
fn loopback_port_takes_the_longest_datagram() {
    let port = UdpPort::bind(LOOPBACK, &UdpConfig::default()).unwrap();
    assert_eq!(port.capabilities().max_packet_len_bytes, MAX_DATAGRAM_LEN_BYTES);
    let peer = Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
    let towards = UdpPort::bind(LOOPBACK, &UdpConfig { peer, ..UdpConfig::default() }).unwrap();
    assert_eq!(towards.capabilities(), port.capabilities());
}

fn send(port: &mut UdpPort, to: Addr, len: usize) {
    port.transmit(Instant::ZERO).unwrap().consume(to, |buffer| (buffer[..len].fill(7), (len, ())).1);
}

#[test]
fn invalid_destinations_are_dropped_and_counted() {
    let mut port = UdpPort::bind(LOOPBACK, &UdpConfig::default()).unwrap();
    send(&mut port, Addr::Emu(1), 10);
    send(&mut port, Addr::Udp(SocketAddr::from((Ipv6Addr::LOCALHOST, 9))), 10);
    send(&mut port, Addr::Udp(LOOPBACK), 10);
    assert_eq!(port.stats().send_dropped_packets, 3);
    // The kernel refuses a broadcast on a socket without SO_BROADCAST, also as a run; runs still work afterwards.
    let broadcast = Addr::Udp(SocketAddr::from((Ipv4Addr::BROADCAST, 9)));
    (0..5).for_each(|_| send(&mut port, broadcast, 10));
    let own = port.local_addr();
    (0..5).for_each(|_| send(&mut port, own, 10));
    let offloads = port.offloads();
    port.flush(Instant::ZERO);
    assert_eq!(port.offloads(), offloads);
    assert_eq!((port.stats().send_dropped_packets, port.stats().sent_packets), (8, 5));
}

/// Another loopback address acts as the host of an emulated machine.
#[test]
fn loopback_addresses_translate_to_the_emulated_machines_host() {
    let at = Ipv4Addr::new(127, 0, 0, 2);
    let host = UdpSocket::bind((at, 0)).unwrap();
    host.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let known = SocketAddr::from((Ipv4Addr::LOCALHOST, host.local_addr().unwrap().port()));
    let mut port = UdpPort::bind(LOOPBACK, &UdpConfig { loopback_at: Some(at), ..UdpConfig::default() }).unwrap();
    send(&mut port, Addr::Udp(known), 10);
    port.flush(Instant::ZERO);
    let mut buffer = [0; 20];
    let (len, from) = host.recv_from(&mut buffer).expect("the packet has gone to the host");
    assert_eq!((len, from), (10, port.local_addr));
    host.send_to(&buffer[..len], from).unwrap();
    assert_eq!(port.wait(Some(Duration::from_secs(30))), Wake::Packet);
    let packet = port.receive(Instant::ZERO).expect("a packet");
    assert_eq!(packet.consume(|from, bytes| (from, bytes.len())), (Addr::Udp(known), 10));
    assert!(!port.join(Addr::Udp("239.255.1.2:20000".parse().unwrap())), "the host can't share its addresses");
}

#[test]
fn runs_to_four_destinations_take_one_call_with_gso() {
    let config = UdpConfig { max_packet_len_bytes: Some(1472), ..UdpConfig::default() };
    let mut ports = UdpBed::new(LOOPBACK, config).ports(5);
    let mut device = ports.pop().unwrap();
    for _ in 0..40 {
        for child in &ports {
            send(&mut device, child.local_addr(), 1472);
        }
    }
    device.flush(Instant::ZERO);
    let stats = device.stats();
    assert_eq!((stats.sent_packets, stats.sent_bytes), (160, 160 * 1472));
    let calls = if device.offloads().0 { 1 } else { 3 };
    assert_eq!(stats.send_calls, calls);
    for child in &mut ports {
        let mut packets = 0;
        while child.receive(Instant::ZERO).is_some() {
            packets += 1;
        }
        assert_eq!((packets, child.stats().received_packets), (40, 40));
    }
}

#[test]
fn train_has_the_packets_of_one_message_and_no_more_than_wanted() {
    for gro in [Offload::Auto, Offload::Off] {
        let mut a = UdpPort::bind(LOOPBACK, &UdpConfig::default()).unwrap();
        let mut b = UdpPort::bind(LOOPBACK, &UdpConfig { gro, ..UdpConfig::default() }).unwrap();
        let lens = [1000, 1000, 1000, 1000, 300];
        lens.iter().for_each(|&len| send(&mut a, b.local_addr(), len));
        a.flush(Instant::ZERO);
        let mut trains: Vec<Vec<usize>> = Vec::new();
        while let Some(token) = b.receive_train(Instant::ZERO, 3) {
            trains.push(token.consume_train(|_, train| train.packets().map(<[u8]>::len).collect()));
        }
        assert_eq!(trains.concat(), lens);
        let longest = if b.offloads().1 { 3 } else { 1 };
        assert!(trains.iter().all(|train| train.len() <= longest), "{trains:?}");
        lens.iter().for_each(|&len| send(&mut a, b.local_addr(), len));
        a.flush(Instant::ZERO);
        let received =
            std::iter::from_fn(|| b.receive(Instant::ZERO).map(|token| token.consume(|_, bytes| bytes.len())));
        assert_eq!(received.collect::<Vec<_>>(), lens, "one by one");
    }
}

#[test]
fn overlong_packets_are_dropped_and_counted() {
    for gro in [Offload::Auto, Offload::Off] {
        let mut a = UdpPort::bind(LOOPBACK, &UdpConfig::default()).unwrap();
        let config = UdpConfig { max_packet_len_bytes: Some(100), gro, ..UdpConfig::default() };
        let mut b = UdpPort::bind(LOOPBACK, &config).unwrap();
        for len in [101, 5000, 100] {
            send(&mut a, b.local_addr(), len);
        }
        a.flush(Instant::ZERO);
        assert_eq!(b.receive(Instant::ZERO).unwrap().consume(|_, bytes| bytes.len()), 100);
        assert!(b.receive(Instant::ZERO).is_none());
        assert_eq!(b.stats().receive_truncated, 2);
    }
}

#[test]
fn empty_datagram_is_dropped_and_counted() {
    let mut port = UdpPort::bind(LOOPBACK, &UdpConfig::default()).unwrap();
    let foreign = UdpSocket::bind(LOOPBACK).unwrap();
    foreign.send_to(&[], port.local_addr).unwrap();
    foreign.send_to(&[1], port.local_addr).unwrap();
    assert_eq!(port.receive(Instant::ZERO).unwrap().consume(|_, bytes| bytes.to_vec()), [1]);
    assert_eq!(port.stats().receive_errors, 1);
}

/// A sender, and two ports that have joined one group; `None` if this kernel has no multicast on loopback.
fn shared() -> Option<(UdpPort, [UdpPort; 2], Addr)> {
    let mut ports = UdpBed::new(LOOPBACK, UdpConfig::default()).ports(3);
    let (a, mut b, mut c) = (ports.pop()?, ports.pop()?, ports.pop()?);
    // A port number that is not in use: the sender's, whose socket is bound to another address.
    let Addr::Udp(own) = a.local_addr() else { return None };
    let group = Addr::Udp(SocketAddr::from((Ipv4Addr::new(239, 255, 77, 1), own.port())));
    if !b.join(group) {
        eprintln!("skipped: this machine does not let a socket join a multicast group on loopback");
        return None;
    }
    assert!(c.join(group), "as the first one could");
    Some((a, [b, c], group))
}

fn wait_for(port: &mut UdpPort) -> (Addr, usize) {
    loop {
        assert_eq!(port.wait(Some(Duration::from_secs(10))), Wake::Packet, "nothing arrived");
        if let Some(token) = port.receive(Instant::ZERO) {
            return token.consume(|from, bytes| (from, bytes.len()));
        }
    }
}

#[test]
fn packet_to_a_group_reaches_each_member_from_its_sender() {
    let Some((mut sender, mut members, group)) = shared() else { return };
    for len in [60_000, 1000, 1000, 999] {
        send(&mut sender, group, len);
    }
    sender.flush(Instant::ZERO);
    assert_eq!(sender.stats().sent_packets, 4);
    for member in &mut members {
        for len in [60_000, 1000, 1000, 999] {
            assert_eq!(wait_for(member), (sender.local_addr(), len));
        }
        assert!(member.receive(Instant::ZERO).is_none());
        send(&mut sender, member.local_addr(), 5);
        sender.flush(Instant::ZERO);
        assert_eq!(wait_for(member), (sender.local_addr(), 5), "the member's own address still works");
    }
    assert!(sender.receive(Instant::ZERO).is_none(), "the sender has not joined");
}

#[test]
fn poll_fd_is_readable_for_own_and_group_address() {
    use rustix::event::{PollFd, PollFlags, poll};
    let Some((mut sender, [mut member, _other], group)) = shared() else { return };
    for to in [group, member.local_addr()] {
        send(&mut sender, to, 10);
        sender.flush(Instant::ZERO);
        let fd = PollFd::from_borrowed_fd(member.poll_fd(), PollFlags::IN);
        let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(poll(&mut [fd], Some(&limit)), Ok(1), "{to}");
        assert!(member.receive(Instant::ZERO).is_some() && member.receive(Instant::ZERO).is_none());
    }
}

#[test]
fn own_and_group_address_do_not_starve_each_other() {
    let Some((mut sender, [mut member, _other], group)) = shared() else { return };
    let own = member.local_addr();
    for _ in 0..20 {
        send(&mut sender, group, 50_000);
        send(&mut sender, own, 40_000);
        sender.flush(Instant::ZERO);
    }
    let lens: Vec<usize> = (0..40).map(|_| wait_for(&mut member).1).collect();
    let others = |len: usize| lens.iter().take(36).filter(|&&l| l == len).count();
    assert!(others(50_000) >= 16 && others(40_000) >= 16, "{lens:?}");
}

#[test]
fn port_that_left_a_group_receives_nothing_until_it_joins_again() {
    let Some((mut sender, [mut member, mut leaver], group)) = shared() else { return };
    assert!(!member.join(group), "joined already");
    assert!(!member.join(sender.local_addr()) && !member.join(Addr::Emu(1)), "not multicast addresses");
    leaver.leave(group);
    send(&mut sender, group, 10);
    sender.flush(Instant::ZERO);
    // A packet that reached one member would have reached the other.
    assert_eq!(wait_for(&mut member).1, 10);
    assert!(leaver.receive(Instant::ZERO).is_none());
    assert!(leaver.join(group));
    send(&mut sender, group, 11);
    sender.flush(Instant::ZERO);
    assert_eq!(wait_for(&mut leaver).1, 11);
}

/// Congestion marks are reported for the packets that carry them, also when the kernel coalesces others.
#[test]
fn congestion_marks_are_reported_per_packet() {
    let mut port = UdpPort::bind(LOOPBACK, &UdpConfig::default()).unwrap();
    let sender = std::net::UdpSocket::bind(LOOPBACK).unwrap();
    let Addr::Udp(to) = port.local_addr() else { panic!("a UDP port") };
    for (tos, expected) in [(0, false), (0b10, false), (0b01, false), (0b11, true), (0b1011_1011, true)] {
        rustix::net::sockopt::set_ip_tos(&sender, tos).unwrap();
        sender.send_to(&[tos; 9], to).unwrap();
        assert_eq!(port.wait(None), Wake::Packet);
        let token = port.receive(Instant::ZERO).expect("a packet");
        assert_eq!((token.ecn().is_ce(), token.consume(|_, bytes| bytes.to_vec())), (expected, vec![tos; 9]));
    }
    // The port's own packets declare ECN capability.
    rustix::net::sockopt::set_ip_recvtos(&sender, true).unwrap();
    assert_eq!(rustix::net::sockopt::ip_tos(&port.socket).unwrap(), 0b10);
}

/// Receive one packet with raw calls; return the byte of its IP header that has DSCP and ECN.
fn received_class(socket: &std::net::UdpSocket) -> u8 {
    #[repr(C, align(8))]
    struct Control([u8; 64]);
    let (mut payload, mut control) = ([0_u8; 64], Control([0; 64]));
    let mut piece = libc::iovec { iov_base: payload.as_mut_ptr().cast(), iov_len: payload.len() };
    // SAFETY: all fields are integers or pointers, which may be zero.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut piece, 1);
    (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), control.0.len() as _);
    // SAFETY: the buffers of the header are alive and as long as it says.
    let received = unsafe { libc::recvmsg(std::os::fd::AsRawFd::as_raw_fd(socket), &raw mut header, 0) };
    assert!(received > 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel has filled the control buffer as the header says.
    let cmsg = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    assert!(!cmsg.is_null(), "the class is reported");
    // SAFETY: not null, so it is within the control buffer, with its data behind it. IPv4's is a byte, IPv6's an
    // integer.
    unsafe {
        match (*cmsg).cmsg_level {
            libc::IPPROTO_IP => *libc::CMSG_DATA(cmsg),
            _ => u8::try_from(libc::CMSG_DATA(cmsg).cast::<libc::c_int>().read_unaligned()).expect("a byte"),
        }
    }
}

#[test]
fn packets_have_the_traffic_class_beside_ecn() {
    use crate::traffic_class::TrafficClass;
    for (ip, ecn) in [("127.0.0.1:0", 0b10), ("[::1]:0", 0)] {
        let Ok(receiver) = std::net::UdpSocket::bind(ip) else {
            eprintln!("SKIPPED: no {ip} here");
            continue;
        };
        receiver.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        if receiver.local_addr().unwrap().is_ipv4() {
            rustix::net::sockopt::set_ip_recvtos(&receiver, true).unwrap();
        } else {
            rustix::net::sockopt::set_ipv6_recvtclass(&receiver, true).unwrap();
        }
        for bits in [0, 0xb8, 0xfc] {
            let traffic_class = TrafficClass::try_from(bits).unwrap();
            let config = UdpConfig { traffic_class, ..UdpConfig::default() };
            let mut port = UdpPort::bind(ip.parse().unwrap(), &config).unwrap();
            send(&mut port, Addr::Udp(receiver.local_addr().unwrap()), 7);
            port.flush(Instant::ZERO);
            assert_eq!(received_class(&receiver), bits | ecn, "{ip}");
        }
    }
}
