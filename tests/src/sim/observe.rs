//! Observes a cluster from outside: packets delivered, slot states, final counters.

use super::assignments::Assignment;
use super::clock::{Clock, ClockOwner};
use super::cluster::Cluster;
use super::coverage::Mark;
use super::report::{Extents, Report, Violation};
use super::setup::Member;
use super::wiring::{Owner, Wiring, child_key, group_id, owner};
use sumac_hal::emu::Delivery;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Kind, Packet, Repr};

impl Cluster<'_, '_> {
    /// Return the reading of a device's clock.
    pub(super) fn device_time(&self, device: usize) -> Instant {
        Clock::draw(self.options.seed, ClockOwner::Device(device)).at(self.now)
    }

    pub(super) fn rank_time(&self, rank: usize) -> Instant {
        Clock::draw(self.options.seed, ClockOwner::Rank(rank)).at(self.now)
    }

    /// Return when a rank's clock reads `local`.
    pub(super) fn rank_when(&self, rank: usize, local: Instant) -> Instant {
        Clock::draw(self.options.seed, ClockOwner::Rank(rank)).when(local)
    }

    /// Return whether a rank has no end. Looked at before each event, so it stops at the first.
    pub(super) fn is_waiting(&self) -> bool {
        self.pending_restarts > 0 || self.open().next().is_some()
    }

    /// Count ranks without an end, once per group. A pending restart makes every rank wait.
    fn waiting(&self) -> usize {
        self.open().count() + self.pending_restarts
    }

    /// Return the members without an end.
    fn open(&self) -> impl Iterator<Item = (usize, usize, &Member)> {
        let members = self.members.iter().enumerate();
        let live = members.filter(|(rank, _)| !self.deaths.is_dead(*rank));
        let all = live.flat_map(|(rank, members)| members.iter().enumerate().map(move |(group, m)| (rank, group, m)));
        all.filter(|(_, group, member)| {
            let lacks = member.error.is_none() && member.done < self.options.groups[*group].ops.len() as u64;
            member.membership.changing.is_some() || member.membership.end.is_none() && lacks
        })
    }

    pub(super) fn hang(&self) -> Violation {
        let (rank, group, done) =
            self.open().next().map_or((0, 0, 0), |(rank, group, member)| (rank, group, member.done));
        Violation::Hang { at: self.now - Instant::ZERO, waiting: self.waiting(), group, rank, done }
    }

    pub(super) fn observe_slots(&mut self, device: usize, shard: usize) {
        if self.options.recovers() {
            for &(_, tree) in self.placed.range((device, 0)..=(device, usize::MAX)) {
                let Assignment { wiring, id, .. } = &self.assignments[tree];
                let slots = self.slots.entry((device, shard)).or_default();
                let node = &self.devices[device].shards[shard];
                slots.look(node, (*id, tree as u32), wiring.has_root(device), &mut self.seen);
            }
            return;
        }
        for group in 0..self.options.all_groups() {
            let wiring = &self.wirings[self.options.tree(group)];
            if wiring.nodes.iter().any(|node| node.device == device) {
                let slots = self.slots.entry((device, shard)).or_default();
                let (node, of) = (&self.devices[device].shards[shard], (group_id(group), self.incarnation as u32));
                slots.look(node, of, wiring.has_root(device), &mut self.seen);
            }
        }
    }

    /// Record a delivered packet if it is genuine. Checksums are verified only where a damaged packet would count as
    /// something rare.
    pub(super) fn note_packet(&mut self, delivery: &Delivery) {
        let bytes = &delivery.bytes[..];
        let Ok(repr) = Repr::parse(&Packet::new_unchecked(bytes)) else { return };
        let is_rare = matches!(repr.kind, Kind::Nak | Kind::Ref);
        if is_rare && Packet::new_checked(bytes).is_err() {
            return;
        }
        let (from, to) = (owner(delivery.from), owner(delivery.to));
        let below = |parent: usize| {
            if self.options.recovers() {
                return self.key_of(repr.group, repr.epoch, parent, repr.child) == Some(repr.key);
            }
            let group = (repr.group.0.wrapping_sub(group_id(0).0)) as usize;
            let is_known = group < self.options.all_groups();
            is_known && child_key(self.options, parent, group, repr.epoch, repr.child) == repr.key
        };
        let is_up = match (&from, &to) {
            (_, Owner::Node { device, .. }) if below(*device) => true,
            (Owner::Node { device, .. }, _) if below(*device) => false,
            // Forged: no such sender.
            _ => return,
        };
        if is_up && repr.kind == Kind::Probe && repr.count == 0 && Packet::new_checked(bytes).is_ok() {
            self.paths.note_probe(delivery.to, delivery.from, bytes.len());
        }
        self.seen.packet(&repr, is_up);
    }

    /// Return the size of the cluster, regardless of the owners of its groups.
    fn extents(&self) -> Extents {
        let recovers = self.options.recovers();
        let fixed = self.wirings.iter().filter(|_| !recovers).map(Wiring::levels);
        let levels = fixed.chain(self.assignments.iter().map(|assignment| assignment.wiring.levels()));
        let levels = levels.fold([u64::MAX, 0], |[least, most], n| [least.min(n), most.max(n)]);
        let (devices, ranks) = (self.devices.len() as u64, self.options.ranks as u64);
        Extents { of: [[devices, devices], levels, [ranks, ranks], [u64::MAX, 0]] }
    }

    pub(super) fn report(&self) -> Report {
        let mut counters = self.past;
        let nodes = self.devices.iter().flat_map(|device| &device.shards);
        nodes.for_each(|node| counters.merge(node.counters()));
        let links = self.fabric.counters();
        let mut report = Report {
            log_hash: self.fabric.log_hash(),
            took: self.ended_at - self.began,
            packets: links.sent,
            in_flight_most: self.in_flight_most,
            incast_drops: links.dropped_by_queue,
            marked: links.marked,
            counters,
            attacks: self.attacker.sent(),
            seen: self.seen,
            extents: self.extents(),
            view_changes: self.view_changes,
            recoveries: self.seen.count(Mark::OpRecovered),
            recovery_bytes: self.recovery_bytes,
            ..Report::default()
        };
        self.count_survivors(&mut report);
        for (rank, member) in self.members.iter().enumerate().flat_map(|(rank, m)| m.iter().map(move |m| (rank, m))) {
            let stats = member.endpoint.stats();
            report.retransmits += stats.retransmits;
            report.probes += stats.probes;
            report.rank_drops += stats.dropped;
            report.shared_results += stats.shared_results;
            if !self.deaths.is_dead(rank) && member.membership.end.is_none() {
                report.count_end(member.error);
            }
        }
        report
    }
}
