//! Lossy or cut links between devices and their children: a packet proxy ([`crate::chaos`]) in front of each shard.
//!
//! The proxy's first rule drops packets of cut ports; the other rules are those of `--chaos`. A device directs its
//! children to the proxy and sees one address per child. A cut drops all packets from and to the ports that one process
//! has open. Ports that the process opens later work: a new tree is a new link. Because the system reuses ports, each
//! row starts without cuts and with fresh client sockets ([`Link::renew`]).
//!
//! Multicast results, which a leaf sends once for all its children, bypass the proxy. A rank whose contributions are
//! lost receives no more of them than it has contributed to.

use super::PerfArgs;
use super::fault::Fault;
use super::output::Output;
use crate::chaos::{self, Clients, Lane, LinkCounters, Proxy, RuleArgs};
use crate::exit::Failure;
use crate::layout::Layout;
use anyhow::{Context, anyhow};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use sumac_hal::emu::{Frame, Rng, Rule, Verdict};
use sumac_hal::port::Addr;

/// The most children of a shard.
const MAX_CHILDREN: usize = 4096;

/// The first data port of the first device, on a loopback address that only this process uses.
const FIRST_PORT: u16 = 7900;

/// The distance between two devices' first data ports: the maximum number of shards.
const PORTS: usize = 64;

/// Ports whose packets are dropped.
#[derive(Debug, Clone, Default)]
struct Cut(Arc<Mutex<BTreeSet<u16>>>);

impl Cut {
    fn ports(&self) -> MutexGuard<'_, BTreeSet<u16>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepend a rule to the lane that drops packets from and to these ports.
    fn prepend_to(&self, mut lane: Lane) -> Lane {
        lane.rules.insert(0, Box::new(self.clone()));
        lane
    }
}

impl Rule for Cut {
    fn on_packet(&mut self, frame: &Frame<'_>, _rng: &mut Rng) -> Verdict {
        let ports = self.ports();
        let is_cut = |addr| matches!(addr, Addr::Udp(addr) if ports.contains(&addr.port()));
        if is_cut(frame.from) || is_cut(frame.to) { Verdict::Drop } else { Verdict::Pass }
    }
}

/// Start proxies: in front of every device with `--chaos`, else in front of the device whose link is to be cut.
pub(super) fn start(args: &PerfArgs, layout: &Layout) -> Result<Vec<Link>, Failure> {
    let leaf = layout.leaves.first().copied().unwrap_or(0);
    let devices: Vec<usize> = match (&args.chaos, args.fault) {
        (Some(_), _) => (0..layout.devices.len()).collect(),
        (None, Some(Fault::CutLink)) => vec![leaf],
        (None, _) => Vec::new(),
    };
    let rules = args.chaos.clone().map_or_else(|| "".parse().map_err(Failure::run), Ok)?;
    devices.into_iter().map(|device| Link::start(device, args.shards, &rules)).collect()
}

/// The proxies in front of all shards of a device.
#[derive(Debug)]
pub(super) struct Link {
    /// The device's index.
    pub(super) device: usize,
    bind: Ipv4Addr,
    /// The device's first data port.
    port: u16,
    proxy: Proxy,
    cut: Cut,
}

impl Link {
    /// Relay to the shards of a device that is yet to be started, with [`Link::device_options`].
    fn start(device: usize, shards: u16, rules: &RuleArgs) -> Result<Self, Failure> {
        let [_, a, b, c] = std::process::id().to_be_bytes();
        // A loopback address of this process's own: there, ports below the ephemeral range are free.
        let bind = Ipv4Addr::new(127, 64 | a, b, c);
        let most = (usize::from(u16::MAX) + 1 - usize::from(FIRST_PORT)) / PORTS;
        let too_many = || Failure::Input(anyhow!("--chaos supports at most {most} devices; use a smaller fabric"));
        let port = device.checked_mul(PORTS).filter(|_| device < most).ok_or_else(too_many)?;
        let port = FIRST_PORT + u16::try_from(port).map_err(|_| too_many())?;
        let cut = Cut::default();
        let targets = (0..shards).map(|shard| SocketAddr::from((bind, port + shard)));
        let lanes = rules.lanes(usize::from(shards)).context("--chaos").map_err(Failure::Input)?;
        let links = targets.clone().zip(lanes).map(|(target, (up, down))| chaos::Link {
            target,
            up: cut.prepend_to(up),
            down: cut.prepend_to(down),
            clients: Clients::new(MAX_CHILDREN),
        });
        let engine = rules.engine(links.collect());
        let fronts = targets.map(|target| Ok((chaos::front((Ipv4Addr::LOCALHOST, 0).into())?, target)));
        let proxy = fronts.collect::<io::Result<_>>().and_then(|fronts| Proxy::start(engine, fronts, || ()));
        let proxy = proxy.context("cannot relay the link of a device").map_err(Failure::Run)?;
        Ok(Self { device, bind, port, proxy, cut })
    }

    /// Return the options with which the device must be started.
    pub(super) fn device_options(&self) -> Vec<String> {
        let fronts: Vec<String> = self.proxy.fronts().iter().map(ToString::to_string).collect();
        vec![
            format!("--bind={}", self.bind),
            format!("--data-port={}", self.port),
            format!("--advertise={}", fronts.join(",")),
        ]
    }

    /// Drop everything from and to the ports that a process has open now.
    pub(super) fn cut(&self, process: u32) -> io::Result<()> {
        let ports = udp_ports(process)?;
        self.cut.ports().extend(ports);
        Ok(())
    }

    /// Print the packet counters.
    pub(super) fn print_counters(&self, name: &str, output: &Output<'_>) {
        for LinkCounters { clients, up, down, .. } in self.proxy.counters() {
            let [received, sent] = [up.received + down.received, up.sent + down.sent];
            let (lost, duplicated) = (up.lost + down.lost, up.duplicated + down.duplicated);
            let (corrupted, reordered) = (up.corrupted + down.corrupted, up.reordered + down.reordered);
            let overflowed = up.overflowed + down.overflowed;
            output.remark(&format!(
                "chaos on device {name}: {clients} clients, {received} packets, {sent} relayed, {lost} lost, \
                 {duplicated} duplicated, {corrupted} corrupted, {reordered} reordered, {overflowed} overflowed"
            ));
        }
    }

    /// Remove all cuts and forget all clients.
    pub(super) fn renew(&self) {
        self.cut.ports().clear();
        self.proxy.forget();
    }
}

/// Return the UDP ports that a process has open.
fn udp_ports(process: u32) -> io::Result<BTreeSet<u16>> {
    let links =
        fs::read_dir(format!("/proc/{process}/fd"))?.flatten().filter_map(|file| fs::read_link(file.path()).ok());
    let sockets: BTreeSet<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let table = fs::read_to_string(format!("/proc/{process}/net/udp"))?;
    Ok(ports_of(&table, &sockets))
}

/// Parse `/proc/PID/net/udp`: the second column holds address and port in hexadecimal, the tenth the inode.
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
    use std::net::UdpSocket;
    use std::time::Duration;

    #[test]
    fn udp_ports_lists_the_ports_of_this_process() {
        let open = || UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        let sockets = [open(), open()];
        let own = sockets.map(|socket| (socket.local_addr().expect("bound").port(), socket));
        let found = udp_ports(std::process::id()).expect("/proc");
        assert!(own.iter().all(|(port, _)| found.contains(port)), "{found:?}");
        assert_eq!(
            ports_of("head\n 1: 0100007F:1EDC 0:0 07 0:0 0:0 0 0 0 77 2", &["socket:[77]".into()].into()),
            [7900].into()
        );
    }

    /// A device behind a link, and its children. Only one test at a time can have the device's port.
    struct Bench {
        link: Link,
        device: UdpSocket,
        children: [UdpSocket; 2],
    }

    fn blocking(from: (Ipv4Addr, u16)) -> UdpSocket {
        let socket = UdpSocket::bind(from).expect("a socket");
        socket.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        socket
    }

    impl Bench {
        fn new() -> Self {
            let link = Link::start(0, 1, &"".parse().expect("no options")).expect("a relay");
            let device = blocking((link.bind, FIRST_PORT));
            let children = [(); 2].map(|()| blocking((Ipv4Addr::LOCALHOST, 0)));
            children.iter().for_each(|child| child.connect(link.proxy.fronts()[0]).expect("connected"));
            Self { link, device, children }
        }

        /// Send a packet from a child, and return its source address at the device.
        fn pass(&self, child: usize, number: u8) -> SocketAddr {
            let mut buffer = [0; 16];
            self.children[child].send(&[number]).expect("sent");
            let (len, from) = self.device.recv_from(&mut buffer).expect("a packet");
            assert_eq!(buffer[..len], [number], "packets of a cut child are dropped");
            self.device.send_to(&[number, 9], from).expect("sent");
            assert_eq!(self.children[child].recv(&mut buffer).expect("the answer"), 2);
            from
        }
    }

    #[test]
    fn cut_stops_one_child_both_ways_until_renewed() {
        let bench = Bench::new();
        let seen = [bench.pass(0, 0), bench.pass(1, 1)];
        assert_ne!(seen[0], seen[1], "one address per child");
        let port = bench.children[0].local_addr().expect("bound").port();
        bench.link.cut.ports().insert(port);
        bench.children[0].send(&[7]).expect("sent");
        bench.device.send_to(&[7, 9], seen[0]).expect("sent");
        assert_eq!(bench.pass(1, 8), seen[1]);
        bench.children[0].set_nonblocking(true).expect("set");
        assert!(bench.children[0].recv(&mut [0; 16]).is_err());
        bench.children[0].set_nonblocking(false).expect("set");
        // The next row's ranks may be given the same ports.
        bench.link.renew();
        bench.pass(0, 10);
        bench.pass(1, 11);
        let counters = bench.link.proxy.counters()[0];
        assert_eq!((counters.clients, counters.up.lost, counters.down.lost), (4, 1, 1), "{counters:?}");
    }
}
