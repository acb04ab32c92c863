//! Paths that carry shorter packets than others, in one direction or in both, and become narrower or wider in a run.
//! Ranks and devices probe them ([`PathProber`], and a device's node), as the controller asks.
//!
//! Oracles:
//! - ranks are told of a tree only if each of its paths that was probed carries the tree's packets, in both directions.
//!   As long as nothing is lost, all are probed, and packets are as long as the narrowest path allows;
//! - a device sends no more about a path than it was sent, and only to who has the key of the link;
//! - the number of probes about a path is bounded.
//!
//! A stranger, who knows everything but keys, forges probes and answers in some runs.

use super::attack::{sealed, wrong_key};
use super::cluster::{Actor, Cluster};
use super::coverage::Mark;
use super::loss::{Loss, LossKind};
use super::options::{Draw, Options};
use super::report::Violation;
use super::wiring::{ATTACKER, node_addr, rank_addr};
use crate::oracle::weight;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use sumac::controller::proto::ClientRequest;
use sumac::transport::path::{PathProber, PathToProbe};
use sumac_hal::emu::LinkConfig;
use sumac_hal::ids::GroupId;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;
use sumac_hal::wire::{HEADER_LEN, Kind, Packet, Repr, SHORT_HEADER_LEN};

/// A host. Its ports have the same paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// Of a device.
    Device(usize),
    /// Of a rank.
    Rank(usize),
}

/// The ends of paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathEnds {
    /// All paths between a host and others.
    Of(Host),
    /// The path between a device, the upper end, and another host.
    Between(Host, usize),
    /// A link above a rank, in the tree that its first group then has.
    Hop {
        /// The rank.
        rank: usize,
        /// Nodes between the rank and the link, modulo the length of its path.
        hop: usize,
    },
}

/// Paths, and the longest packet that they carry from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathLimit {
    /// The paths.
    pub ends: PathEnds,
    /// Whether packets to the upper end are concerned, or those of the host.
    pub up: bool,
    /// Whether packets from there are concerned.
    pub down: bool,
    /// The longest packet, in bytes.
    pub max_packet_len_bytes: usize,
}

impl PathLimit {
    fn draw(draw: &mut Draw, options: &Options, is_known: bool) -> Self {
        let device = |draw: &mut Draw| draw.below(options.devices() as u64) as usize;
        let rank = |draw: &mut Draw| draw.below(options.ranks as u64) as usize;
        let ends = match draw.below(4) {
            0 => PathEnds::Of(Host::Rank(rank(draw))),
            1 => PathEnds::Of(Host::Device(device(draw))),
            _ if is_known => PathEnds::Hop { rank: rank(draw), hop: draw.below(4) as usize },
            2 => PathEnds::Between(Host::Rank(rank(draw)), device(draw)),
            _ => PathEnds::Between(Host::Device(device(draw)), device(draw)),
        };
        let (up, down) = draw.one_of(&[(true, true), (true, true), (true, false), (false, true)]);
        Self { ends, up, down, max_packet_len_bytes: draw_len(draw, options) }
    }
}

/// Draw the longest packet that a path carries: around that of the group, at the limits, or anything between.
fn draw_len(draw: &mut Draw, options: &Options) -> usize {
    let longest = longest_of(options.chunk_len_bytes);
    let between = LEAST_FOR_A_TREE + draw.below((longest - LEAST_FOR_A_TREE) as u64 + 1) as usize;
    match draw.below(12) {
        0 => longest,
        1 => longest - 1,
        2 => longest - 16,
        3 => LEAST_FOR_A_TREE,
        // A firewall: no packet passes.
        4 if draw.chance(250) => 0,
        // Too narrow for any tree, but not for packets without payload.
        4 => HEADER_LEN + draw.below((LEAST_FOR_A_TREE - HEADER_LEN) as u64) as usize,
        5 => UNLIMITED,
        _ => between,
    }
}

/// Draw the paths that are narrow from the start, and what happens in the run.
pub(super) fn draw_paths(options: &Options) -> (Vec<PathLimit>, Vec<Loss>) {
    let mut draw = Draw::new(weight(&[options.seed, 0x7061_7468]));
    let limits = (0..draw.one_of(&[0, 1, 1, 2, 4])).map(|_| PathLimit::draw(&mut draw, options, false)).collect();
    let mut losses = Vec::new();
    for nth in 0..draw.one_of(&[0, 1, 1, 2, 3]) {
        let kind = LossKind::Path(PathLimit::draw(&mut draw, options, true));
        losses.push(Loss { kind, when: Loss::draw_moment(&mut draw, options, nth == 0) });
    }
    if draw.chance(250) {
        losses.push(Loss::draw(&mut draw, options, options.devices(), false));
    }
    (limits, losses)
}

/// Return whether links have no faults. Half of the runs.
pub(super) fn is_calm(seed: u64) -> bool {
    weight(&[seed, 0x6361_6c6d]).is_multiple_of(2)
}

/// The paths of a run, and what was sent about them.
#[derive(Default)]
pub(super) struct Paths {
    /// From one host to another: how long packets may be, and since when.
    limits: BTreeMap<(Host, Host), Vec<(Instant, usize)>>,
    /// By group and child: when it knew the path to its parent.
    known: BTreeMap<(GroupId, Host), Instant>,
    /// By sender, receiver and group: the first probe, and their number.
    probes: BTreeMap<(Addr, Addr, GroupId), (Instant, u64)>,
    /// By node and child: the bytes of probes that were not answered.
    unanswered_bytes: BTreeMap<(Addr, Addr), usize>,
    forged: u64,
}

impl Paths {
    /// Return the longest packet that a path has carried since then.
    fn widest(&self, from: Host, to: Host, since: Instant) -> usize {
        let limits = self.limits.get(&(from, to)).map_or(&[][..], Vec::as_slice);
        let before = limits.iter().rev().find(|(at, _)| *at <= since).map_or(UNLIMITED, |(_, len)| *len);
        limits.iter().filter(|(at, _)| *at > since).map(|(_, len)| *len).fold(before, usize::max)
    }

    /// Return the longest packet that a path carries now.
    fn now(&self, from: Host, to: Host) -> usize {
        self.limits.get(&(from, to)).and_then(|limits| limits.last()).map_or(UNLIMITED, |(_, len)| *len)
    }

    /// Return how many probes about paths were sent. They have a limit of their own.
    pub(super) fn probes_sent(&self) -> u64 {
        self.probes.values().map(|(_, count)| count).sum()
    }

    /// A probe arrived that has the key of its link.
    pub(super) fn note_probe(&mut self, node: Addr, child: Addr, len_bytes: usize) {
        *self.unanswered_bytes.entry((node, child)).or_default() += len_bytes;
    }

    /// A device has told the controller what it knows of the path to its parent.
    pub(super) fn note_known(&mut self, group: GroupId, child: Host, now: Instant) {
        self.known.entry((group, child)).or_insert(now);
    }
}

/// What a rank probes for its session.
#[derive(Default)]
pub(super) struct RankProbes {
    asked: VecDeque<PathToProbe>,
    prober: Option<PathProber>,
}

impl Cluster<'_, '_> {
    /// Set up the paths that are narrow from the start.
    pub(super) fn narrow_paths(&mut self, limits: &[PathLimit]) {
        limits.iter().for_each(|limit| self.limit_paths(limit));
    }

    /// Limit the packets of some paths from now on.
    pub(super) fn limit_paths(&mut self, limit: &PathLimit) {
        let max_packet_len_bytes = Some(limit.max_packet_len_bytes);
        let link = LinkConfig { max_packet_len_bytes, ..self.options.link };
        for (low, up) in self.hosts_of(limit.ends) {
            let directions = [(limit.up, low, up), (limit.down, up, low)];
            for (_, from, to) in directions.into_iter().filter(|(is_concerned, ..)| *is_concerned) {
                self.paths.limits.entry((from, to)).or_default().push((self.now, limit.max_packet_len_bytes));
                for from in self.addrs_of(from) {
                    self.addrs_of(to).into_iter().for_each(|to| self.fabric.set_link(from, to, link));
                }
            }
        }
    }

    /// Return the hosts at the ends of paths: the one that is concerned or below, and the other.
    fn hosts_of(&self, ends: PathEnds) -> Vec<(Host, Host)> {
        let devices = (0..self.devices.len()).map(Host::Device);
        match ends {
            PathEnds::Of(host @ Host::Rank(_)) => devices.map(|device| (host, device)).collect(),
            PathEnds::Of(host) => {
                let others = devices.chain((0..self.options.ranks).map(Host::Rank)).filter(|other| *other != host);
                others.map(|other| (host, other)).collect()
            }
            PathEnds::Between(host, device) if host == Host::Device(device) => Vec::new(),
            PathEnds::Between(host, device) => vec![(host, Host::Device(device))],
            PathEnds::Hop { rank, hop } => {
                let Some(wiring) = self.members.get(rank).and_then(|_| self.wiring_of(rank, 0)) else {
                    return Vec::new();
                };
                let devices: Vec<usize> = wiring.path(rank).collect();
                let hop = hop % devices.len();
                let below = hop.checked_sub(1).map_or(Host::Rank(rank), |below| Host::Device(devices[below]));
                vec![(below, Host::Device(devices[hop]))]
            }
        }
    }

    fn addrs_of(&self, host: Host) -> Vec<Addr> {
        match host {
            Host::Device(device) => (0..self.options.shards).map(|shard| node_addr(device, shard)).collect(),
            Host::Rank(rank) => (0..self.options.groups.len()).map(|group| rank_addr(rank, group)).collect(),
        }
    }

    /// The controller asks a rank to probe its path. As a communicator, it answers only while it waits for a tree.
    pub(super) fn on_probe_path(&mut self, at: (usize, usize), path: PathToProbe) {
        let session = &mut self.control.sessions[at.0][at.1];
        if session.waits_for_tree() {
            session.probes.asked.push_back(path);
            self.touched.insert(Actor::Prober { rank: at.0, group: at.1 });
        }
    }

    /// Probe for a rank: send what is due, and report what was found. Returns when to go on.
    pub(super) fn poll_prober(&mut self, rank: usize, group: usize) -> Result<Option<Instant>, Violation> {
        let (now, from) = (self.rank_time(rank), rank_addr(rank, group));
        if self.deaths.is_dead(rank) {
            return Ok(None);
        }
        loop {
            let probes = &mut self.control.sessions[rank][group].probes;
            if probes.prober.is_none() {
                let Some(path) = probes.asked.pop_front() else { return Ok(None) };
                let salt = weight(&[self.options.seed, rank as u64, u64::from(path.group.0)]) as u32;
                let prober = PathProber::new(path, salt, now, PROBE_LIMIT);
                probes.prober = Some(self.options.planted.prober(prober));
            }
            let Some(prober) = &mut probes.prober else { return Ok(None) };
            prober.handle_timeout(now);
            let mut sent = Vec::new();
            let mut ready_at = self.fabric.ready_at(from);
            while ready_at <= self.now
                && let Some((to, probe)) = prober.poll_probe(now)
            {
                let len_bytes = prober.write(probe, &mut self.buffer);
                let to = super::wiring::emulated(to);
                self.fabric.send(self.now, from, to, &self.buffer[..len_bytes]);
                sent.push((to, self.buffer[..len_bytes].to_vec()));
                ready_at = self.fabric.ready_at(from);
            }
            let (due, found, path) = (prober.poll_timeout(), prober.result(), prober.path());
            let (path, wanted) = (path.group, path.packet_len_bytes);
            for (to, bytes) in sent {
                self.watch_sent(from, to, &bytes)?;
            }
            if let Some(due) = due {
                // A probe may wait for the link.
                return Ok(Some(if ready_at > self.now { ready_at } else { self.rank_when(rank, due) }));
            }
            self.control.sessions[rank][group].probes.prober = None;
            if let Some(found) = found {
                self.seen.note(if found < wanted { Mark::PathTooNarrow } else { Mark::PathKnown });
                self.paths.note_known(path, Host::Rank(rank), self.now);
            } else {
                self.seen.note(Mark::PathUnknown);
            }
            let answer = ClientRequest::PathProbed { group: path, max_packet_len_bytes: found };
            self.ask_controller((rank, group), answer);
        }
    }

    /// Hand a packet to a rank that probes its path.
    pub(super) fn deliver_to_prober(&mut self, (rank, group): (usize, usize), from: Addr, bytes: &[u8]) {
        if !self.options.has_paths() {
            return;
        }
        let now = self.rank_time(rank);
        let session = self.control.sessions[rank].get_mut(group);
        if let Some(prober) = session.and_then(|session| session.probes.prober.as_mut()) {
            prober.handle(from, bytes, now);
            self.touched.insert(Actor::Prober { rank, group });
        }
    }

    /// Watch a packet that is sent: is it about a path, and is that allowed?
    pub(super) fn watch_sent(&mut self, from: Addr, to: Addr, bytes: &[u8]) -> Result<(), Violation> {
        if !self.options.has_paths() {
            return Ok(());
        }
        let Ok(repr) = Repr::parse(&Packet::new_unchecked(bytes)) else { return Ok(()) };
        match repr.kind {
            Kind::Probe if repr.count == 0 => {
                self.forge(from, to, &repr);
                let (since, count) = self.paths.probes.entry((from, to, repr.group)).or_insert((self.now, 0));
                *count += 1;
                let limit = PROBES_PER_SEARCH * (2 + (self.now - *since).as_secs());
                let (what, found) = ("probes about a path", *count);
                if found > limit { Err(Violation::Limit { what, found, limit }) } else { Ok(()) }
            }
            Kind::Status if repr.count == 0 => {
                let unanswered = self.paths.unanswered_bytes.entry((from, to)).or_default();
                match unanswered.checked_sub(bytes.len()) {
                    Some(left) => {
                        *unanswered = left;
                        Ok(())
                    }
                    None => Err(Violation::Limit {
                        what: "bytes that answer probes",
                        found: bytes.len() as u64,
                        limit: *unanswered as u64,
                    }),
                }
            }
            _ => Ok(()),
        }
    }

    /// A stranger sees a probe, and sends an answer of the greatest length first, and a long probe of its own.
    fn forge(&mut self, from: Addr, to: Addr, probe: &Repr) {
        if !self.options.has_stranger() {
            return;
        }
        self.paths.forged += 1;
        let mut draw = Draw::new(weight(&[self.options.seed, 0x666f_7267, self.paths.forged]));
        let key = wrong_key(probe.key, &mut draw);
        let payload = vec![0; longest_of(self.options.chunk_len_bytes) - HEADER_LEN];
        let forged = |kind| sealed(Repr { kind, key, ..*probe }, &payload);
        let stranger = if draw.chance(500) { ATTACKER } else { from };
        self.fabric.send(self.now, to, from, &forged(Kind::Status));
        self.fabric.send(self.now, stranger, to, &forged(Kind::Probe));
        self.attacker.count(2);
    }

    /// Ranks are told of a tree: do its packets fit?
    pub(super) fn check_paths(&self, tree: usize) -> Result<(), Violation> {
        let assignment = &self.assignments[tree];
        let (wiring, since) = (&assignment.wiring, assignment.since);
        let wrong = |what: String| Err(Violation::Controller { what: format!("publishes {} {what}", assignment.id) });
        let len = longest_of(assignment.chunk_len_bytes);
        let device = |node: usize| Host::Device(wiring.nodes[node].device);
        let ranks = wiring.ranks.iter().enumerate().map(|(rank, (leaf, _))| (Host::Rank(rank), device(*leaf)));
        let nodes = wiring.nodes.iter().map(|node| (Host::Device(node.device), node.parent));
        let nodes = nodes.filter_map(|(host, parent)| Some((host, device(parent?.0))));
        // Faults begin with the first calls.
        let is_undisturbed = self.members.is_empty() && self.options.link.receive_queue_bytes.is_none();
        let mut narrowest = UNLIMITED;
        for (low, up) in ranks.chain(nodes) {
            let carried = self.paths.now(low, up).min(self.paths.now(up, low));
            narrowest = narrowest.min(carried);
            let known = self.paths.known.get(&(assignment.id, low));
            // A probe cannot tell a firewall from losses.
            if known.is_none() && is_undisturbed && carried >= HEADER_LEN {
                return wrong(format!("without knowing the path of {low:?} to {up:?}"));
            }
            // What was sent last may not have arrived.
            let is_known = known.is_some_and(|&at| at + MESSAGE_DELAY <= self.now);
            let widest = self.paths.widest(low, up, since).min(self.paths.widest(up, low, since));
            if is_known && widest < len {
                return wrong(format!("with packets of {len} bytes; {low:?} to {up:?} carries {widest}"));
            }
        }
        let longest = longest_of(self.options.chunk_len_bytes).min(narrowest) / 16 * 16;
        if is_undisturbed && len < longest {
            return wrong(format!("with packets of {len} bytes; all paths carry {longest}"));
        }
        Ok(())
    }
}

/// Return the length of a group's longest packet: a whole chunk, or a short one that has a full header for being too
/// short for the other.
fn longest_of(chunk_len_bytes: u16) -> usize {
    (usize::from(chunk_len_bytes) + SHORT_HEADER_LEN).max(LEAST_FOR_A_TREE)
}

/// The shortest packet limit with which there is a tree.
const LEAST_FOR_A_TREE: usize = 128;

const UNLIMITED: usize = 65_507;

/// The probes of a search: two an attempt.
const PROBES_PER_SEARCH: u64 = 200;

/// How long a rank probes, as a communicator does.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// How long a message to the controller may take.
const MESSAGE_DELAY: Duration = Duration::from_millis(20);
