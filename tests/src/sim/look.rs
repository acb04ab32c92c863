//! Looking at a cluster from outside: what arrives, what slots go through, what all have counted in the end.

use super::clock::{Clock, Whose};
use super::cluster::Cluster;
use super::coverage::Mark;
use super::report::{Extents, Report, Violation};
use super::setup::Member;
use super::wiring::{Owner, child_key, count_levels, group_id, owner};
use sumac_hal::emu::Delivery;
use sumac_hal::time::Instant;
use sumac_hal::wire::{HEADER_LEN, Kind, Packet, Repr};

impl Cluster<'_, '_> {
    /// What a device's clock says.
    pub(super) fn device_time(&self, device: usize) -> Instant {
        Clock::draw(self.options.seed, Whose::Device(device)).at(self.now)
    }

    pub(super) fn rank_time(&self, rank: usize) -> Instant {
        Clock::draw(self.options.seed, Whose::Rank(rank)).at(self.now)
    }

    /// When a rank's clock says this.
    pub(super) fn rank_when(&self, rank: usize, local: Instant) -> Instant {
        Clock::draw(self.options.seed, Whose::Rank(rank)).when(local)
    }

    /// Count those without an end, once a group; a restart that is still to come makes everybody wait.
    pub(super) fn waiting(&self) -> usize {
        self.open().count() + self.restarts_to_come
    }

    /// Return who has no end yet.
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

    pub(super) fn look_at_slots(&mut self, device: usize, shard: usize) {
        for group in 0..self.options.all_groups() {
            let Some((wiring, life)) = self.wiring_at(device, group) else { continue };
            let Some(place) = wiring.nodes.iter().find(|node| node.device == device) else { continue };
            let is_root = place.parent.is_none();
            let slots = self.slots.entry((device, shard)).or_default();
            slots.look(&self.devices[device].shards[shard], (group_id(group), life), is_root, &mut self.seen);
        }
    }

    /// Note what arrived, if it is what it says. (A checksum is worth its time only where a damaged packet would pass
    /// for something rare.)
    pub(super) fn note_packet(&mut self, delivery: &Delivery) {
        let bytes = &delivery.bytes[..];
        if bytes.len() < HEADER_LEN {
            return;
        }
        let header = Packet::new_unchecked(bytes);
        let kind = Kind::from_wire(header.kind());
        let is_rare = matches!(kind, Some(Kind::Nak | Kind::Ref));
        let Some(repr) = Repr::parse(&header).ok().filter(|_| !is_rare || Packet::new_checked(bytes).is_ok()) else {
            return;
        };
        let (from, to) = (owner(delivery.from), owner(delivery.to));
        let below = |parent: usize| {
            let group = (repr.group.0.wrapping_sub(group_id(0).0)) as usize;
            let is_known = group < self.options.all_groups();
            is_known && child_key(self.options, parent, group, repr.epoch, repr.child) == repr.key
        };
        let is_up = match (&from, &to) {
            (_, Owner::Node { device, .. }) if below(*device) => true,
            (Owner::Node { device, .. }, _) if below(*device) => false,
            // Nobody's: forged.
            _ => return,
        };
        self.seen.packet(&repr, is_up);
    }

    /// How large the cluster is; whose its groups are does not matter here.
    fn extents(&self) -> Extents {
        let levels = self.options.trees.iter().map(|tree| u64::from(count_levels(tree)));
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
            took: self.ended_at - Instant::ZERO,
            packets: links.sent,
            in_flight_most: self.in_flight_most,
            incast_drops: links.dropped_by_queue,
            marked: links.marked,
            counters,
            attacks: self.attacker.sent(),
            seen: self.seen,
            extents: self.extents(),
            view_changes: self.view_changes,
            repairs: self.seen.count(Mark::OpRepaired),
            repair_bytes: self.repair_bytes,
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
