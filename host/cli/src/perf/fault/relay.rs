//! The link between rank 0 and its leaf device, which can be cut: a relay of packets before each of the device's shards.
//!
//! The device has its children send to the relay. Each child has a socket of its own towards the device, so that the
//! device sees one address a child, as behind address translation. From the cut on, packets from and to ports of one
//! process are dropped. Ports that it opens later are others: a new tree is a new link.
//!
//! Results that a leaf sends once for all its children, to an address that they share, don't come by here. A rank whose
//! contributions are lost gets no more of them than it has contributed to.

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// The most children of a shard.
const MAX_CHILDREN: usize = 4096;

/// The longest UDP datagram, and a little more.
const PACKET_MAX_BYTES: usize = 1 << 16;

/// The first data port of the device, on an address that only this process uses.
const FIRST_PORT: u16 = 7900;

/// Ports whose packets are lost.
type Cut = Arc<Mutex<BTreeSet<u16>>>;

/// Relays before all shards of a device.
#[derive(Debug)]
pub(super) struct Link {
    bind: Ipv4Addr,
    /// Where children send to, a shard each.
    fronts: Vec<SocketAddr>,
    cut: Cut,
    stop: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Link {
    /// Start relays before the shards of a device that is started later, with [`Link::device_options`].
    pub(super) fn start(shards: u16) -> io::Result<Self> {
        let [_, a, b, c] = std::process::id().to_be_bytes();
        // A loopback address of this process's own, where ports below those that the system gives out are free.
        let bind = Ipv4Addr::new(127, 64 | a, b, c);
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let mut link = Self { bind, fronts: Vec::new(), cut: Cut::default(), stop, threads: Vec::new() };
        for shard in 0..shards {
            let front = socket()?;
            link.fronts.push(front.local_addr()?);
            let device = SocketAddr::from((bind, FIRST_PORT + shard));
            let wire = Wire { front, device, backs: Vec::new(), cut: Arc::clone(&link.cut) };
            let stop = Arc::clone(&link.stop);
            let thread = std::thread::Builder::new().name("relay".into());
            link.threads.push(thread.spawn(move || wire.run(&stop))?);
        }
        Ok(link)
    }

    /// Return what the device has to be started with.
    pub(super) fn device_options(&self) -> Vec<String> {
        let fronts: Vec<String> = self.fronts.iter().map(ToString::to_string).collect();
        vec![
            format!("--bind={}", self.bind),
            format!("--data-port={FIRST_PORT}"),
            format!("--advertise={}", fronts.join(",")),
        ]
    }

    /// Lose everything from and to the ports that a process has now.
    pub(super) fn cut(&self, process: u32) -> io::Result<()> {
        let ports = udp_ports(process)?;
        self.cut.lock().unwrap_or_else(PoisonError::into_inner).extend(ports);
        Ok(())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // An eventfd takes a 1. Should it not, the threads end with the process.
        if rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).is_ok() {
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        }
    }
}

/// The relay of one shard.
struct Wire {
    front: UdpSocket,
    device: SocketAddr,
    /// A child's address, and the socket that stands for it.
    backs: Vec<(SocketAddr, UdpSocket)>,
    cut: Cut,
}

impl Wire {
    fn run(mut self, stop: &OwnedFd) {
        let mut buffer = vec![0; PACKET_MAX_BYTES];
        loop {
            let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let backs = self.backs.iter().map(|(_, back)| readable(back.as_fd()));
            let mut fds: Vec<_> =
                [readable(stop.as_fd()), readable(self.front.as_fd())].into_iter().chain(backs).collect();
            if poll(&mut fds, None).is_err_and(|error| error != rustix::io::Errno::INTR) {
                return;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return;
            }
            if ready[1] {
                self.pass_up(&mut buffer);
            }
            // Sockets that were opened just now have nothing yet; `ready` ends before them.
            for (back, _) in ready[2..].iter().enumerate().filter(|(_, ready)| **ready) {
                self.pass_down(back, &mut buffer);
            }
        }
    }

    fn is_cut(&self, child: SocketAddr) -> bool {
        self.cut.lock().unwrap_or_else(PoisonError::into_inner).contains(&child.port())
    }

    // What a socket has no room for is lost, as on any link.

    fn pass_up(&mut self, buffer: &mut [u8]) {
        while let Ok((len, from)) = self.front.recv_from(buffer) {
            if !self.is_cut(from)
                && let Some(back) = self.back_of(from)
            {
                let _ = self.backs[back].1.send(&buffer[..len]);
            }
        }
    }

    fn pass_down(&self, back: usize, buffer: &mut [u8]) {
        let (child, back) = &self.backs[back];
        // An error other than "nothing there" is an ICMP message about an earlier packet: that one is lost.
        while let Ok(len) = back.recv(buffer) {
            if !self.is_cut(*child) {
                let _ = self.front.send_to(&buffer[..len], child);
            }
        }
    }

    /// Return the socket that stands for a child, a new one if need be and if the system has one.
    fn back_of(&mut self, from: SocketAddr) -> Option<usize> {
        if let Some(known) = self.backs.iter().position(|(addr, _)| *addr == from) {
            return Some(known);
        }
        if self.backs.len() == MAX_CHILDREN {
            return None;
        }
        let back = socket().and_then(|back| back.connect(self.device).map(|()| back)).ok()?;
        self.backs.push((from, back));
        Some(self.backs.len() - 1)
    }
}

fn socket() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Return the UDP ports that a process has open.
fn udp_ports(process: u32) -> io::Result<BTreeSet<u16>> {
    let links =
        fs::read_dir(format!("/proc/{process}/fd"))?.flatten().filter_map(|file| fs::read_link(file.path()).ok());
    let sockets: BTreeSet<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let table = fs::read_to_string(format!("/proc/{process}/net/udp"))?;
    Ok(ports_of(&table, &sockets))
}

/// Pick ports out of the system's table: address and port in hexadecimal in the second column, the inode in the tenth.
fn ports_of(table: &str, sockets: &BTreeSet<String>) -> BTreeSet<u16> {
    let port = |line: &str| {
        let mut words = line.split_whitespace();
        let (_, port) = words.nth(1)?.rsplit_once(':')?;
        let inode = words.nth(7)?;
        sockets.contains(&format!("socket:[{inode}]")).then(|| u16::from_str_radix(port, 16).ok())?
    };
    table.lines().skip(1).filter_map(port).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn this_process_finds_its_own_ports() {
        let sockets = [socket().expect("a socket"), socket().expect("a socket")];
        let own = sockets.map(|socket| (socket.local_addr().expect("bound").port(), socket));
        let found = udp_ports(std::process::id()).expect("/proc");
        assert!(own.iter().all(|(port, _)| found.contains(port)), "{found:?}");
        assert_eq!(
            ports_of("head\n 1: 0100007F:1EDC 0:0 07 0:0 0:0 0 0 0 77 2", &["socket:[77]".into()].into()),
            [7900].into()
        );
    }

    #[test]
    fn a_cut_child_gets_nothing_and_sends_nothing_and_others_do() {
        let blocking = |from: (Ipv4Addr, u16)| {
            let socket = UdpSocket::bind(from).expect("a socket");
            socket.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
            socket
        };
        let link = Link::start(1).expect("a relay");
        let device = blocking((link.bind, FIRST_PORT));
        let children = [(); 2].map(|()| blocking((Ipv4Addr::LOCALHOST, 0)));
        let mut buffer = [0; 16];
        let mut seen = Vec::new();
        for (child, number) in children.iter().zip(0_u8..) {
            child.connect(link.fronts[0]).expect("connected");
            child.send(&[number]).expect("sent");
            let (len, from) = device.recv_from(&mut buffer).expect("a packet");
            assert_eq!(buffer[..len], [number]);
            device.send_to(&[number, 9], from).expect("sent");
            assert_eq!(child.recv(&mut buffer).expect("the answer"), 2);
            seen.push(from);
        }
        let port = children[0].local_addr().expect("bound").port();
        link.cut.lock().expect("nobody panicked").insert(port);
        children[0].send(&[7]).expect("sent");
        device.send_to(&[7, 9], seen[0]).expect("sent");
        children[1].send(&[8]).expect("sent");
        let (len, _) = device.recv_from(&mut buffer).expect("a packet");
        assert_eq!(buffer[..len], [8], "what the cut child sent before is lost");
        device.send_to(&[8, 9], seen[1]).expect("sent");
        assert_eq!(children[1].recv(&mut buffer).expect("the answer"), 2);
        children[0].set_nonblocking(true).expect("set");
        assert!(children[0].recv(&mut buffer).is_err());
        drop(link);
    }
}
