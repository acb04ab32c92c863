//! A lossy UDP relay for real processes: what stands between a device and its children.
//!
//! ```text
//! child A --\                  /-- back socket A --\
//!            front socket (addr)                    device
//! child B --/                  \-- back socket B --/
//! ```
//!
//! Every child has a back socket of its own towards the device, so that the device sees one address per child, as
//! behind address translation. Each packet, in either direction, suffers at most one fault, by a seeded generator: the
//! n-th packet of a seed meets the same die in every run, though which packet is the n-th is the kernel's to say.
//!
//! Invariants: one thread, which waits in `poll` alone; nothing depends on how fast it is. A packet that is held back
//! is let go after a number of *later packets*, not after a time, so it comes late by construction.

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use sumac_hal::emu::Rng;

/// The most children that get through.
const MAX_CLIENTS: usize = 64;

/// The longest UDP datagram, and a little more.
const PACKET_MAX_BYTES: usize = 1 << 16;

/// After how many later packets a held one is let go, at most.
const HOLD_MAX: u64 = 8;

/// What the relay's sockets hold for it, in bytes, as far as the system allows: a window of each child.
const BUFFER_BYTES: usize = 4 << 20;

/// Shares of packets in thousandths, in both directions.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Lost.
    pub(crate) drop: u16,
    /// Passed on, and once more later.
    pub(crate) duplicate: u16,
    /// Held back, so that later ones overtake them.
    pub(crate) delay: u16,
    /// Passed on with one to three bits flipped, or cut short.
    pub(crate) corrupt: u16,
}

/// What the relay has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Counts {
    /// Children seen.
    pub(crate) clients: usize,
    /// Packets that came in from children.
    pub(crate) up: u64,
    /// Packets that came in from the device.
    pub(crate) down: u64,
    /// Lost on purpose, on the way up.
    pub(crate) dropped_up: u64,
    /// Lost on purpose, on the way down.
    pub(crate) dropped_down: u64,
    /// Doubled.
    pub(crate) duplicated: u64,
    /// Held back.
    pub(crate) delayed: u64,
    /// Damaged.
    pub(crate) corrupted: u64,
    /// Put on a socket. The kernel may refuse some and drop some itself.
    pub(crate) sent: u64,
}

/// A running relay; its thread ends when this is dropped.
pub(crate) struct Relay {
    addr: SocketAddr,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<Counts>>,
}

impl Relay {
    /// Relay between children, who send to [`Relay::addr`], and a device at `device`, which need not be there yet.
    pub(crate) fn start(device: SocketAddr, faults: Faults, seed: u64) -> io::Result<Self> {
        let wire = Wire::new(device, faults, seed)?;
        let addr = wire.front.local_addr()?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("relay".into()).spawn(move || wire.run(&stopped))?;
        Ok(Self { addr, stop, thread: Some(thread) })
    }

    /// Return where children send to.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Stop, and return what was done.
    pub(crate) fn finish(mut self) -> Counts {
        self.end().expect("not finished before").expect("the relay's thread does not panic")
    }

    fn end(&mut self) -> Option<std::thread::Result<Counts>> {
        let thread = self.thread.take()?;
        rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).expect("an eventfd takes a 1");
        Some(thread.join())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // A panic of the thread has failed the test already, or shows in what the ranks report.
        let _ = self.end();
    }
}

/// The thread's side.
struct Wire {
    front: UdpSocket,
    device: SocketAddr,
    /// A child's address, and the socket that stands for it.
    backs: Vec<(SocketAddr, UdpSocket)>,
    held: Vec<Held>,
    faults: Faults,
    rng: Rng,
    counts: Counts,
}

/// A packet on its way; `back` is the index of its child's socket.
#[derive(Debug, Clone)]
struct Packet {
    back: usize,
    up: bool,
    bytes: Vec<u8>,
}

/// A packet that waits until `later` others have passed.
struct Held {
    later: u64,
    packet: Packet,
}

impl Wire {
    fn new(device: SocketAddr, faults: Faults, seed: u64) -> io::Result<Self> {
        let (front, rng, counts) = (socket()?, Rng::new(seed), Counts::default());
        Ok(Self { front, device, backs: Vec::new(), held: Vec::new(), faults, rng, counts })
    }

    fn run(mut self, stop: &OwnedFd) -> Counts {
        let mut buffer = vec![0; PACKET_MAX_BYTES];
        loop {
            let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let backs = self.backs.iter().map(|(_, back)| readable(back.as_fd()));
            let mut fds: Vec<_> =
                [readable(stop.as_fd()), readable(self.front.as_fd())].into_iter().chain(backs).collect();
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => continue,
                result => drop(result.expect("open sockets can be polled")),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return self.counts;
            }
            if ready[1] {
                self.take_front(&mut buffer);
            }
            // Sockets that were opened just now have nothing yet; `ready` ends before them.
            for (back, _) in ready[2..].iter().enumerate().filter(|(_, ready)| **ready) {
                self.take_back(back, &mut buffer);
            }
        }
    }

    fn take_front(&mut self, buffer: &mut [u8]) {
        while let Ok((len, from)) = self.front.recv_from(buffer) {
            self.counts.up += 1;
            if let Some(back) = self.back_of(from) {
                self.meet(Packet { back, up: true, bytes: buffer[..len].to_vec() });
            }
        }
    }

    fn take_back(&mut self, back: usize, buffer: &mut [u8]) {
        // An error other than "nothing there" is an ICMP message about an earlier packet: that one is lost.
        while let Ok(len) = self.backs[back].1.recv(buffer) {
            self.counts.down += 1;
            self.meet(Packet { back, up: false, bytes: buffer[..len].to_vec() });
        }
    }

    /// Return the socket that stands for a child, a new one if need be.
    fn back_of(&mut self, from: SocketAddr) -> Option<usize> {
        if let Some(known) = self.backs.iter().position(|(addr, _)| *addr == from) {
            return Some(known);
        }
        if self.backs.len() == MAX_CLIENTS {
            return None;
        }
        let back = socket().and_then(|back| back.connect(self.device).map(|()| back)).expect("a socket");
        self.backs.push((from, back));
        self.counts.clients += 1;
        Some(self.backs.len() - 1)
    }

    /// Let a packet meet its fate, and after it those that have waited long enough.
    fn meet(&mut self, mut packet: Packet) {
        self.held.iter_mut().for_each(|held| held.later -= 1);
        let due: Vec<Held> = self.held.extract_if(.., |held| held.later == 0).collect();
        // Two draws per packet, whatever comes of them: so a share that is changed leaves the others' dice alone.
        let die = self.rng.below(1000) as u16;
        let later = 1 + self.rng.below(HOLD_MAX);
        let Faults { drop, duplicate, delay, corrupt } = self.faults;
        if die < drop {
            *if packet.up { &mut self.counts.dropped_up } else { &mut self.counts.dropped_down } += 1;
        } else if die < drop + duplicate {
            self.counts.duplicated += 1;
            self.send(&packet);
            self.held.push(Held { later, packet });
        } else if die < drop + duplicate + delay {
            self.counts.delayed += 1;
            self.held.push(Held { later, packet });
        } else if die < drop + duplicate + delay + corrupt {
            self.counts.corrupted += 1;
            damage(&mut packet.bytes, &mut self.rng);
            self.send(&packet);
        } else {
            self.send(&packet);
        }
        due.iter().for_each(|held| self.send(&held.packet));
    }

    fn send(&mut self, packet: &Packet) {
        let (child, back) = &self.backs[packet.back];
        let sent = if packet.up { back.send(&packet.bytes) } else { self.front.send_to(&packet.bytes, child) };
        // What the kernel does not take is lost, as on any wire.
        self.counts.sent += u64::from(sent.is_ok());
    }
}

/// Cut the packet short, or flip one to three bits in a row.
fn damage(bytes: &mut Vec<u8>, rng: &mut Rng) {
    let flips = rng.below(4);
    if flips == 0 {
        bytes.truncate(rng.below(bytes.len() as u64) as usize);
        return;
    }
    let bits = bytes.len() * 8;
    let first = rng.below(bits as u64) as usize;
    for bit in (first..first + flips as usize).take(bits).map(|bit| bit % bits) {
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

fn socket() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.set_nonblocking(true)?;
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, BUFFER_BYTES)?;
    rustix::net::sockopt::set_socket_send_buffer_size(&socket, BUFFER_BYTES)?;
    Ok(socket)
}

mod tests {
    use super::*;

    fn open() -> UdpSocket {
        UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket")
    }

    /// Send `count` numbered packets of `len` bytes up, one after the other, and return what the device gets of
    /// them. Loopback delivers within the call that sends, so no thread and no waiting is needed.
    fn pass(faults: Faults, len: usize, count: u8) -> (Counts, Vec<Vec<u8>>) {
        let (device, child) = (open(), open());
        let mut wire = Wire::new(device.local_addr().expect("bound"), faults, 1).expect("a relay");
        child.connect(wire.front.local_addr().expect("bound")).expect("connected");
        let mut buffer = vec![0; 64];
        for number in 0..count {
            child.send(&vec![number; len]).expect("sent");
            wire.take_front(&mut buffer);
        }
        device.set_nonblocking(true).expect("set");
        let arrived = std::iter::from_fn(|| device.recv(&mut buffer).ok().map(|len| buffer[..len].to_vec()));
        (wire.counts, arrived.collect())
    }

    #[test]
    fn without_faults_all_arrives_and_each_child_has_an_address() {
        let (device, children) = (open(), [open(), open()]);
        let relay = Relay::start(device.local_addr().expect("bound"), Faults::default(), 1).expect("started");
        children.iter().for_each(|child| child.connect(relay.addr()).expect("connected"));
        let (mut seen, mut buffer) = (Vec::new(), [0; 64]);
        for round in 0..3_u8 {
            for (child, number) in children.iter().zip(0_u8..) {
                child.send(&[round, number]).expect("sent");
                let (len, from) = device.recv_from(&mut buffer).expect("a packet");
                assert_eq!(buffer[..len], [round, number]);
                seen.push(from);
                device.send_to(&[round, number, 9], from).expect("sent");
                let len = child.recv(&mut buffer).expect("the answer, from the relay's own address");
                assert_eq!(buffer[..len], [round, number, 9]);
            }
        }
        assert!(seen[0] != seen[1] && seen.chunks(2).all(|pair| pair == &seen[..2]), "{seen:?}");
        assert_eq!(relay.finish(), Counts { clients: 2, up: 6, down: 6, sent: 12, ..Counts::default() });
    }

    #[test]
    fn losses_come_in_the_share_asked_for() {
        let (counts, arrived) = pass(Faults { drop: 300, ..Faults::default() }, 1, 200);
        assert!((40..80).contains(&counts.dropped_up), "{counts:?}");
        assert_eq!((arrived.len() as u64, counts.sent), (200 - counts.dropped_up, 200 - counts.dropped_up));
        assert!(arrived.is_sorted(), "{arrived:?}");
    }

    #[test]
    fn held_packets_are_overtaken_and_come_once() {
        let (counts, arrived) = pass(Faults { delay: 300, ..Faults::default() }, 1, 200);
        let late = arrived.windows(2).filter(|pair| pair[1] < pair[0]).count();
        assert!(counts.delayed > 40 && late > 40, "{late} late, {counts:?}");
        assert!(arrived.iter().zip(0_u64..).all(|(bytes, at)| at.abs_diff(bytes[0].into()) <= HOLD_MAX), "{arrived:?}");
        let mut once = arrived.clone();
        once.sort();
        once.dedup();
        assert!(once.len() == arrived.len() && arrived.len() as u64 >= 200 - HOLD_MAX, "{arrived:?}");
    }

    #[test]
    fn doubled_packets_come_twice_and_damaged_ones_damaged() {
        let (counts, arrived) = pass(Faults { duplicate: 1000, ..Faults::default() }, 1, 100);
        // The copies of the last few wait for later packets.
        assert!(counts.duplicated == 100 && arrived.len() as u64 >= 200 - HOLD_MAX, "{arrived:?}");
        let (_, arrived) = pass(Faults { corrupt: 1000, ..Faults::default() }, 32, 100);
        assert_eq!(arrived.len(), 100);
        let damaged = |(bytes, number): (&Vec<u8>, u8)| *bytes != [number; 32] && bytes.len() <= 32;
        assert!(arrived.iter().zip(0..).all(damaged), "{arrived:?}");
        assert!(arrived.iter().any(|bytes| bytes.len() < 32) && arrived.iter().any(|bytes| bytes.len() == 32));
    }
}
