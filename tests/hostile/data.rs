//! Attacks on the data ports of devices and ranks: forged and replayed packets.

use crate::controller::{Client, request};
use crate::testbed::{JobConfig, LONG, TestBed, Tools, wait_until};
use crate::traffic::{Flood, Random};
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, recv, socket_with};
use rustix::net::{RecvFlags, sockopt};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::num::NonZeroU32;
use std::time::Duration;
use sumac::controller::proto::{ClientReply, ClientRequest, TreeMembership};
use sumac::{OpDesc, ReduceOp, Transport};
use sumac_hal::ctrl::DropReason;
use sumac_hal::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank};
use sumac_hal::op::Dtype;
use sumac_hal::wire::{Flags, Kind, NakReason, Packet, Repr, SHORT_HEADER_LEN, pack_op, payload_crc};

const OVER_UDP: JobConfig = JobConfig { transport: Transport::Udp, schedules: false };

/// Join a job of one rank; any tenant can learn this membership.
pub(crate) fn membership(testbed: &TestBed<'_>, name: &str) -> (Client, TreeMembership) {
    let mut client = Client::open(testbed.addr);
    client.ask(&ClientRequest::Join(request(name, (0, 1), "default")));
    let Ok(ClientReply::Joined(membership)) = client.answer() else { panic!("a job of one rank may join") };
    (client, membership.tree.expect("a tree"))
}

/// Return a packet with valid checksums.
fn sealed(repr: Repr, payload: &[u8]) -> Vec<u8> {
    let repr = Repr { payload_len_bytes: payload.len() as u16, ..repr };
    let mut bytes = vec![0; repr.packet_len()];
    bytes[repr.header_len()..].copy_from_slice(payload);
    repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(payload));
    bytes
}

/// Return a packet of any kind to the victim's group, with the tenant's own key or a random one.
pub(crate) fn forge(own: &TreeMembership, victim: GroupId, random: &mut Random) -> Vec<u8> {
    let kinds = [Kind::Data, Kind::Data, Kind::Data, Kind::Empty, Kind::Probe, Kind::Nak, Kind::Result, Kind::Late];
    let kind = kinds[random.below(8) as usize];
    let key = if random.below(2) == 0 { own.key } else { random.next() };
    let epoch = Epoch { counter: own.epoch.counter.wrapping_add(random.below(2) as u16), ..own.epoch };
    let op = OpDesc::all_reduce(Dtype::U64, ReduceOp::Sum, 6_000);
    let repr = Repr {
        collective: Some(op.collective),
        dtype: op.dtype,
        op: op.op,
        bits: op.count,
        bits2: pack_op(&op),
        reason: (kind == Kind::Nak).then(|| NakReason::from_wire(1 + random.below(9) as u8)).flatten(),
        count: 1,
        seq: ChunkNo(random.below(1 << 20)),
        mark: ChunkNo(random.below(1 << 20)),
        token: random.next() as u32,
        root: Rank(0),
        ..Repr::new(kind, victim, epoch, ChildIndex(random.below(4) as u16), key)
    };
    let payload = if matches!(kind, Kind::Data | Kind::Result) { random.bytes(64) } else { Vec::new() };
    sealed(repr, &payload)
}

/// Return the data ports of the job's devices and ranks.
pub(crate) fn data_ports(testbed: &TestBed<'_>) -> Vec<SocketAddr> {
    let ports: Vec<SocketAddr> = testbed.devices.iter().chain(&testbed.ranks).flat_map(|of| of.udp_ports()).collect();
    ports.into_iter().filter(|port| !port.ip().is_multicast()).collect()
}

pub(crate) fn victim(testbed: &TestBed<'_>) -> GroupId {
    testbed.job_status("work").and_then(|job| job.tree?.ok()).expect("the job has a tree").group
}

/// Send the packets to the ports in turn, `a_second` times a second.
pub(crate) fn flood(packets: Vec<Vec<u8>>, to: &[SocketAddr], a_second: u32) -> Flood {
    let sockets: Vec<UdpSocket> = to
        .iter()
        .map(|port| {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            socket.connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port.port()))).expect("an address");
            socket
        })
        .collect();
    let mut nth = 0_usize;
    Flood::start(a_second, move || {
        nth += 1;
        // Dropped if the receiver has no room.
        let _ = sockets[nth % sockets.len()].send(&packets[nth / sockets.len() % packets.len()]);
    })
}

/// Return the number of packets that the device has dropped.
fn dropped(testbed: &TestBed<'_>) -> u64 {
    let counters = testbed.device_status("one").stats.expect("it answers").counters;
    DropReason::ALL.into_iter().map(|reason| counters.dropped(reason)).sum()
}

/// Packets that are valid except for their key or source address.
pub(crate) fn forged(tools: &Tools) {
    for transport in [Transport::Udp, Transport::Shm] {
        let mut testbed = TestBed::start(tools).with_job(JobConfig { transport, ..OVER_UDP });
        let (_client, own) = membership(&testbed, "own");
        let (before, victim, mut random) = (testbed.count(), victim(&testbed), Random(5));
        let packets = (0..2_000).map(|_| forge(&own, victim, &mut random)).collect();
        let (drops, ports) = (dropped(&testbed), data_ports(&testbed));
        let flood = flood(packets, &ports, 20_000);
        wait_until("10,000 packets are dropped", || dropped(&testbed) > drops + 10_000);
        testbed.wait_for_rounds(20);
        drop(flood);
        testbed.check_unaffected(&before);
    }
}

/// Capture packets between ranks and devices.
fn capture(count: usize, is_of: impl Fn(SocketAddr) -> bool) -> Vec<(SocketAddr, Vec<u8>)> {
    // ETH_P_IP, in the network's order.
    let protocol = NonZeroU32::new(u32::from(0x0800_u16.to_be())).map(Protocol::from_raw);
    let socket = socket_with(AddressFamily::PACKET, SocketType::DGRAM, SocketFlags::CLOEXEC, protocol);
    let socket = socket.expect("the superuser may listen");
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(LONG)).expect("a socket");
    let (mut captured, mut buffer) = (Vec::new(), vec![0; 70_000]);
    while captured.len() < count {
        let (len, _) = recv(&socket, &mut buffer[..], RecvFlags::empty()).expect("there is traffic");
        let packet = &buffer[..len];
        let ip_len = usize::from(packet[0] & 15) * 4;
        // UDP, and not a later fragment.
        if packet[9] != 17 || packet.len() < ip_len + 8 + SHORT_HEADER_LEN || packet[6] & 0x1f != 0 || packet[7] != 0 {
            continue;
        }
        let udp = &packet[ip_len..];
        let ip: [u8; 4] = std::array::from_fn(|byte| packet[16 + byte]);
        let to = SocketAddr::from((ip, u16::from_be_bytes([udp[2], udp[3]])));
        if is_of(to) {
            captured.push((to, udp[8..].to_vec()));
        }
    }
    captured
}

/// An attacker that has captured packets sends them, and others with their keys, from its own socket.
pub(crate) fn replayed(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_UDP);
    let (before, mut random) = (testbed.count(), Random(6));
    let device: Vec<u16> = testbed.devices[0].udp_ports().iter().map(SocketAddr::port).collect();
    let ports: Vec<u16> = data_ports(&testbed).iter().map(SocketAddr::port).collect();
    let captured = capture(2_000, |to| ports.contains(&to.port()) && !to.ip().is_multicast());
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let drops = dropped(&testbed);
    let mut sent = 0;
    for (to, bytes) in &captured {
        // Dropped if the receiver has no room.
        let _ = socket.send_to(bytes, to);
        let Ok(packet) = Packet::new_checked(&bytes[..]) else { continue };
        let Ok(mut repr) = Repr::parse(&packet) else { continue };
        if !device.contains(&to.port()) {
            continue;
        }
        let mut payload = packet.payload().to_vec();
        payload.iter_mut().for_each(|byte| *byte ^= random.next() as u8);
        repr.seq = ChunkNo(repr.seq.0 + random.below(64));
        for kind in [repr.kind, Kind::Probe, Kind::Nak] {
            let reason = (kind == Kind::Nak).then_some(NakReason::Mismatch);
            let (payload, flags) = match kind == repr.kind {
                true => (&payload[..], repr.flags),
                // These have full headers only.
                false => (&[][..], repr.flags - Flags::SHORT),
            };
            let _ = socket.send_to(&sealed(Repr { kind, reason, flags, ..repr }, payload), to);
            sent += 1;
        }
        if sent % 64 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(sent > 500, "only {sent} of {} captured packets were for the device", captured.len());
    let dropped = dropped(&testbed) - drops;
    assert!(dropped > sent / 4, "of {sent} packets the device has dropped {dropped}");
    testbed.check_unaffected(&before);
}
