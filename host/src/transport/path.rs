//! Probes of the path between a rank and its leaf device, before the rank takes its place in the tree (PROTOCOL 12).

use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::time::{Duration, Instant as Clock};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId};
use sumac_hal::path_mtu::{PathProbe, PathSearch};
use sumac_hal::planted;
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
        let now = || Instant::from_nanos(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let mut salt = [0; 4];
        // Without randomness the key, which only this rank and its leaf know, still authenticates replies.
        let _ = rustix::rand::getrandom(&mut salt, rustix::rand::GetRandomFlags::empty());
        let mut prober = PathProber::new(self.clone(), u32::from_le_bytes(salt), now(), limit);
        loop {
            while let Some((to, probe)) = prober.poll_probe(now()) {
                let Some(room) = port.transmit(now()) else { break };
                room.consume(to, |buffer| (prober.write(probe, buffer), ()));
            }
            port.flush(now());
            let Some(due) = prober.poll_timeout() else { return prober.result() };
            port.wait(Some(due - now()));
            while let Some(packet) = port.receive(now()) {
                packet.consume(|from, bytes| prober.handle(from, bytes, now()));
            }
            prober.handle_timeout(now());
        }
    }
}

/// The search for the longest packet on the path of a rank, sans I/O.
///
/// Call [`PathProber::poll_probe`] until it returns `None`, again after [`PathProber::handle`], and at
/// [`PathProber::poll_timeout`], behind [`PathProber::handle_timeout`].
#[derive(Debug)]
pub struct PathProber {
    path: PathToProbe,
    /// One address of each of the leaf's hosts; the last one is searched now. Shards differ by port only, as a rule,
    /// and then have one path.
    parents: Vec<Addr>,
    search: PathSearch,
    /// What was found of the others.
    narrowest: Option<u32>,
    until: Instant,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
}

impl PathProber {
    /// Begin to probe a path, for at most `limit`. `salt` should differ between searches.
    pub fn new(path: PathToProbe, salt: u32, now: Instant, limit: Duration) -> Self {
        let mut parents: Vec<Addr> = Vec::new();
        for parent in path.parents.iter().rev() {
            parents.retain(|other| host_of(other) != host_of(parent));
            parents.push(*parent);
        }
        Self {
            search: PathSearch::new(path.packet_len_bytes as usize, salt, now),
            path,
            parents,
            narrowest: None,
            until: now + limit,
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    /// Plant a bug in this prober.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        self.bug = Some(bug);
    }

    /// Return the path.
    pub const fn path(&self) -> &PathToProbe {
        &self.path
    }

    /// Return the next probe that is due, and where it goes; `None` if there is none at `now`.
    #[must_use]
    pub fn poll_probe(&mut self, now: Instant) -> Option<(Addr, PathProbe)> {
        loop {
            let parent = *self.parents.last()?;
            if let Some(probe) = self.search.poll(now) {
                return Some((parent, probe));
            }
            if self.search.timeout().is_some() {
                return None;
            }
            self.end_search(now);
        }
    }

    /// The search of a parent has ended. If it was in vain, nothing is known about the path.
    fn end_search(&mut self, now: Instant) {
        let found = self.search.result().map(|len| len as u32);
        self.parents.pop();
        match found {
            Some(found) => self.narrowest = self.narrowest.into_iter().chain([found]).min(),
            None => (self.parents, self.narrowest) = (Vec::new(), None),
        }
        self.search = PathSearch::new(self.path.packet_len_bytes as usize, self.search.last_token(), now);
    }

    /// Write a probe to the start of the buffer, and return its length; 0 if it does not fit.
    pub fn write(&self, probe: PathProbe, buffer: &mut [u8]) -> usize {
        let Some(packet) = buffer.get_mut(..probe.len_bytes) else { return 0 };
        let payload = &mut packet[HEADER_LEN..];
        payload.fill(0);
        let (crc, payload_len_bytes) = (payload_crc(payload), payload.len() as u16);
        let PathToProbe { group, epoch, child, key, .. } = self.path;
        let header = Repr::new(Kind::Probe, group, epoch, child, key);
        Repr { token: probe.token, payload_len_bytes, ..header }.emit(&mut Packet::new_unchecked(packet), crc);
        probe.len_bytes
    }

    /// Handle a packet. What answers no probe of this path is ignored.
    pub fn handle(&mut self, from: Addr, bytes: &[u8], now: Instant) {
        if self.parents.last() != Some(&from) {
            return;
        }
        if let Some((token, len)) = self.reply(bytes) {
            self.search.on_reply(token, len, now);
        }
    }

    /// Return the token and the length of the reply in a packet, if it is one to a probe of this path.
    fn reply(&self, bytes: &[u8]) -> Option<(u32, usize)> {
        let repr = Repr::parse(&Packet::new_checked(bytes).ok()?).ok()?;
        let path = &self.path;
        let key = if planted!(self, PathKeyUnchecked) { path.key } else { repr.key };
        let is_here = (repr.group, repr.epoch, repr.child, key) == (path.group, path.epoch, path.child, path.key);
        let len = if planted!(self, ShortAnswerAccepted) { path.packet_len_bytes as usize } else { bytes.len() };
        (is_here && repr.kind == Kind::Status && repr.count == 0).then_some((repr.token, len))
    }

    /// End if the time is over, with what is known by then. If the wanted length does not arrive, what does is only the
    /// better for being too short.
    pub fn handle_timeout(&mut self, now: Instant) {
        if now < self.until || self.parents.is_empty() {
            return;
        }
        self.search.give_up();
        let found = self.search.result().filter(|len| *len > HEADER_LEN).map(|len| len as u32);
        self.narrowest = self.narrowest.into_iter().chain(found).min();
        self.parents.clear();
    }

    /// Return when to call [`PathProber::handle_timeout`] and [`PathProber::poll_probe`] next; `None` at the end.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.parents.last()?;
        // At the end of a search, the next one begins at once.
        Some(self.search.timeout().map_or(self.until, |due| due.min(self.until)))
    }

    /// Return the longest length that is known to arrive, in bytes. `None` before the end, or if nothing is known.
    pub fn result(&self) -> Option<u32> {
        self.narrowest.filter(|_| self.parents.is_empty())
    }
}

/// Return the host that an address is on.
fn host_of(addr: &Addr) -> Option<IpAddr> {
    if let Addr::Udp(addr) = addr { Some(addr.ip()) } else { None }
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

    /// Probe a path of 1300 bytes whose leaf takes 20 ms to answer, for as long as `limit`.
    fn probe_slowly(limit: Duration) -> Option<u32> {
        let parent = Addr::Udp("10.0.0.1:7000".parse().expect("an address"));
        let (group, epoch, child) = (GroupId(3), Epoch { term: 1, counter: 1 }, ChildIndex(2));
        let path = PathToProbe { group, epoch, child, key: 0xbeef, parents: vec![parent], packet_len_bytes: 1472 };
        let mut now = Instant::ZERO;
        let mut prober = PathProber::new(path, 7, now, limit);
        let (mut buffer, mut answers) = ([0; 1472], std::collections::VecDeque::new());
        while prober.poll_timeout().is_some() {
            while let Some((_, probe)) = prober.poll_probe(now) {
                let len = prober.write(probe, &mut buffer);
                let repr = Repr::parse(&Packet::new_checked(&buffer[..len]).expect("a packet")).expect("a probe");
                let mut answer = repr.header(0).to_vec();
                answer.resize(len, 0);
                status(&repr).emit(&mut Packet::new_unchecked(&mut answer), payload_crc(&buffer[HEADER_LEN..len]));
                answers.extend((len <= 1300).then_some((now + Duration::from_millis(20), answer)));
            }
            now = now + Duration::from_millis(1);
            while let Some((_, answer)) = answers.pop_front_if(|(at, _)| *at <= now) {
                prober.handle(parent, &answer, now);
            }
            prober.handle_timeout(now);
        }
        prober.result()
    }

    #[test]
    fn search_without_enough_time_finds_a_length_that_arrives() {
        assert_eq!(probe_slowly(LIMIT), Some(1296));
        let found: Vec<_> = (0..2000).step_by(10).map(|ms| probe_slowly(Duration::from_millis(ms))).collect();
        assert!(found.is_sorted(), "{found:?}");
        assert_eq!((found[0], found[199]), (None, Some(1296)), "nothing is known at first");
        assert!(found.iter().flatten().any(|len| *len < 1296), "{found:?}");
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
