//! Probes of the path between a rank and its leaf device, before the rank takes its place in the tree (PROTOCOL 12).

use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::time::{Duration, Instant as Clock};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId};
use sumac_hal::path_mtu::PathSearch;
use sumac_hal::port::{Addr, RxToken, TxToken, WaitPort};
use sumac_hal::time::Instant;
use sumac_hal::wire::{HEADER_LEN, Kind, Packet, Repr, payload_crc};

/// A path that a rank is to probe: its link to the leaf.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathToProbe {
    /// The group.
    pub group: GroupId,
    /// The group's epoch.
    pub epoch: Epoch,
    /// The rank's index among the leaf's children.
    pub child: ChildIndex,
    /// The key of the link.
    pub key: u64,
    /// The receive addresses of the leaf's shards.
    pub parents: Vec<Addr>,
    /// The longest packet that the group would send, in bytes.
    pub packet_len_bytes: u32,
}

impl PathToProbe {
    /// Find the longest packet that the path carries in both directions, in bytes, within `limit`. `None` if the leaf
    /// does not answer, which says nothing about the path.
    ///
    /// Send from the port that contributes later: the leaf knows a child by the address of its first packet.
    pub fn probe(&self, port: &mut impl WaitPort, limit: Duration) -> Option<u32> {
        let began = Clock::now();
        let longest = self.packet_len_bytes as usize;
        // Shards differ by port only, as a rule, and then have one path.
        let mut probed: Vec<Option<IpAddr>> = Vec::new();
        let mut narrowest = None;
        for parent in &self.parents {
            let host = if let Addr::Udp(addr) = parent { Some(addr.ip()) } else { None };
            if probed.contains(&host) {
                continue;
            }
            probed.push(host);
            let found = self.search(*parent, port, longest, (began, limit))?;
            narrowest = Some(narrowest.map_or(found, |narrowest: u32| narrowest.min(found)));
        }
        narrowest
    }

    fn search(
        &self,
        parent: Addr,
        port: &mut impl WaitPort,
        longest: usize,
        (began, limit): (Clock, Duration),
    ) -> Option<u32> {
        let now = || Instant::from_nanos(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let mut salt = [0; 4];
        // Without randomness the key, which only this rank and its leaf know, still authenticates replies.
        let _ = rustix::rand::getrandom(&mut salt, rustix::rand::GetRandomFlags::empty());
        let mut search = PathSearch::new(longest, u32::from_le_bytes(salt), now());
        while let Some(due) = search.timeout().filter(|_| began.elapsed() < limit) {
            while let Some(probe) = search.poll(now()) {
                let Some(room) = port.transmit(now()) else { break };
                room.consume(parent, |buffer| (self.write(probe.len_bytes, probe.token, buffer), ()));
            }
            port.flush(now());
            port.wait(Some((due - now()).min(limit.saturating_sub(began.elapsed()))));
            while let Some(packet) = port.receive(now()) {
                let reply = packet.consume(|from, bytes| self.reply(bytes).filter(|_| from == parent));
                if let Some((token, len)) = reply {
                    search.on_reply(token, len, now());
                }
            }
        }
        search.result().map(|len| len as u32)
    }

    /// Write a probe to the start of the buffer, and return its length; 0 if the port sends no packets of that length.
    fn write(&self, len: usize, token: u32, buffer: &mut [u8]) -> usize {
        let Some(packet) = buffer.get_mut(..len) else { return 0 };
        let payload = &mut packet[HEADER_LEN..];
        payload.fill(0);
        let (crc, payload_len_bytes) = (payload_crc(payload), payload.len() as u16);
        let probe = Repr::new(Kind::Probe, self.group, self.epoch, self.child, self.key);
        Repr { token, payload_len_bytes, ..probe }.emit(&mut Packet::new_unchecked(packet), crc);
        len
    }

    /// Return the token and the length of the reply in a packet, if it is one to a probe of this path.
    fn reply(&self, bytes: &[u8]) -> Option<(u32, usize)> {
        let repr = Repr::parse(&Packet::new_checked(bytes).ok()?).ok()?;
        let is_here = (repr.group, repr.epoch, repr.child, repr.key) == (self.group, self.epoch, self.child, self.key);
        (is_here && repr.kind == Kind::Status && repr.count == 0).then_some((repr.token, bytes.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, UdpSocket};
    use std::thread;
    use sumac_hal::udp::{UdpConfig, UdpPort};

    /// Longer than any search takes.
    const LIMIT: Duration = Duration::from_secs(30);

    fn port() -> UdpPort {
        UdpPort::bind((Ipv4Addr::LOCALHOST, 0).into(), &UdpConfig::default()).expect("a port")
    }

    /// Start a leaf that answers each probe by packets that `answer` makes of it, until the port's last packet: an
    /// empty one. Returns the path to it.
    fn leaf(answer: impl Fn(&Repr) -> Vec<Repr> + Send + 'static) -> (PathToProbe, UdpSocket, thread::JoinHandle<()>) {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let path = PathToProbe {
            group: GroupId(3),
            epoch: Epoch { term: 1, counter: 1 },
            child: ChildIndex(2),
            key: 0xbeef,
            parents: vec![Addr::Udp(socket.local_addr().expect("bound")); 2],
            packet_len_bytes: 1472,
        };
        let stop = socket.try_clone().expect("a file");
        let serve = move || {
            let mut buffer = [0; 2000];
            loop {
                let (len, from) = socket.recv_from(&mut buffer).expect("a packet");
                if len == 0 {
                    return;
                }
                let probe =
                    Repr::parse(&Packet::new_checked(&buffer[..len]).expect("a packet")).expect("of this version");
                assert_eq!((probe.kind, probe.count, probe.packet_len()), (Kind::Probe, 0, len));
                for repr in answer(&probe) {
                    let payload = vec![0; repr.payload_len_bytes.into()];
                    let mut packet = repr.header(payload_crc(&payload)).to_vec();
                    packet.extend(payload);
                    socket.send_to(&packet, from).expect("it is there");
                }
            }
        };
        (path, stop, thread::spawn(serve))
    }

    fn probe(answer: impl Fn(&Repr) -> Vec<Repr> + Send + 'static, limit: Duration) -> Option<u32> {
        let (path, socket, serving) = leaf(answer);
        let found = path.probe(&mut port(), limit);
        socket.send_to(&[], socket.local_addr().expect("bound")).expect("it is there");
        serving.join().expect("probes only");
        found
    }

    fn status(probe: &Repr) -> Repr {
        Repr { kind: Kind::Status, ..*probe }
    }

    #[test]
    fn path_that_carries_what_is_wanted_is_found_wide() {
        assert_eq!(probe(|probe| vec![status(probe)], LIMIT), Some(1472));
    }

    #[test]
    fn path_is_found_as_narrow_as_it_is() {
        let carries = |probe: &Repr| if probe.packet_len() <= 1300 { vec![status(probe)] } else { Vec::new() };
        assert_eq!(probe(carries, LIMIT), Some(1296));
    }

    #[test]
    fn silent_leaf_says_nothing_about_the_path() {
        assert_eq!(probe(|_| Vec::new(), Duration::from_millis(50)), None);
    }

    #[test]
    fn packets_that_answer_no_probe_of_the_path_are_ignored() {
        let foreign = |probe: &Repr| {
            let long = Repr { payload_len_bytes: 1472 - HEADER_LEN as u16, ..status(probe) };
            let true_one = if probe.packet_len() <= 1300 { Some(status(probe)) } else { None };
            let wrong = [
                Repr { key: 1, ..long },
                Repr { group: GroupId(4), ..long },
                Repr { epoch: Epoch { term: 1, counter: 2 }, ..long },
                Repr { child: ChildIndex(3), ..long },
                Repr { token: probe.token.wrapping_add(1000), ..long },
                Repr { count: 1, ..long },
                Repr { kind: Kind::Probe, ..long },
            ];
            wrong.into_iter().chain(true_one).collect()
        };
        assert_eq!(probe(foreign, LIMIT), Some(1296));
    }
}
