//! Devices: a production node for each shard, with a connection to the controller as a board's agent keeps it. Requests
//! are executed in order, on all shards or on none; a lost connection is redialled, and groups outlive it.

use super::TenantViolation as Violation;
use super::draw::{DeviceCapacity, Tenancy};
use super::watch::HeldGroup;
use super::wire::Message;
use super::world::{Actor, Alarm, World, shard_addr};
use crate::oracle::weight;
use crate::sim::controller::Peer;
use crate::sim::coverage::Mark;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac_device::{Child, Event, Group, Hop, Node, NodeConfig, Slot, Storage};
use sumac_hal::ctrl::shards::{merge, undo};
use sumac_hal::ctrl::{Announce, DropReason, Envelope, Name, Refusal, Request, Response, TreeConfig};
use sumac_hal::emu::Delivery;
use sumac_hal::ids::{BootId, GroupId};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Kind, Packet, Repr};

/// The tables of one incarnation of a shard.
pub(super) struct Tables {
    groups: Vec<Option<Group>>,
    trees: Vec<Option<TreeConfig>>,
    children: Vec<Child>,
    hops: Vec<Hop>,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
}

impl Tables {
    /// Return tables of a capacity, with so many hops to parents for each group.
    pub(super) fn new(capacity: &DeviceCapacity, hops: usize) -> Self {
        Self {
            groups: (0..capacity.groups).map(|_| None).collect(),
            trees: vec![None; capacity.groups],
            children: vec![Child::EMPTY; capacity.children],
            hops: vec![Hop::EMPTY; capacity.groups * hops],
            slots: vec![Slot::EMPTY; capacity.slots],
            bytes: vec![0; capacity.bytes],
        }
    }
}

/// A shard of a device that is on.
pub(super) struct ShardOf<'m> {
    pub(super) node: Node<'m>,
    /// Oracle state of its groups.
    pub(super) held: BTreeMap<GroupId, HeldGroup>,
    /// Until then its packets are lost, in both directions.
    pub(super) mute_until: Instant,
}

/// A device.
pub(super) struct Device<'m> {
    pub(super) name: String,
    /// None while it is off.
    pub(super) shards: Vec<ShardOf<'m>>,
    boot_id: BootId,
    incarnations: u64,
    spare: Vec<&'m mut Tables>,
    pub(super) conn: Option<ConnId>,
    pub(super) stalled_until: Instant,
    backlog: VecDeque<(ConnId, Envelope<Request>)>,
    /// Number of groups that it will refuse.
    pub(super) refuses: u32,
    /// It has missed requests of the controller, so it may hold orphaned groups until their leases expire.
    pub(super) disturbed: bool,
}

impl<'m> Device<'m> {
    pub(super) fn new(plan: &Tenancy, index: usize, incarnations: Vec<&'m mut Tables>) -> Self {
        let mut device = Self::off(format!("d{index}"), incarnations);
        device.start(plan, index);
        device
    }

    /// One that does not run yet.
    pub(super) fn off(name: String, mut incarnations: Vec<&'m mut Tables>) -> Self {
        incarnations.reverse();
        Self {
            name,
            shards: Vec::new(),
            boot_id: BootId(0),
            incarnations: 0,
            spare: incarnations,
            conn: None,
            stalled_until: Instant::ZERO,
            backlog: VecDeque::new(),
            refuses: 0,
            disturbed: false,
        }
    }

    /// Start with empty tables.
    pub(super) fn start(&mut self, plan: &Tenancy, index: usize) {
        let shards = plan.shards_of(index);
        if self.spare.len() < usize::from(shards) {
            return;
        }
        self.boot_id = BootId(weight(&[plan.seed, index as u64, self.incarnations]));
        self.incarnations += 1;
        let tables = self.spare.split_off(self.spare.len() - usize::from(shards));
        let start = |(shard, tables): (u16, &'m mut Tables)| {
            let config = NodeConfig {
                shard: Shard::new(shard, shards).expect("drawn within limits"),
                boot_id: self.boot_id,
                max_packet_len_bytes: 65_507,
                receive_buffer_bytes: 1 << 20,
            };
            let Tables { groups, trees, children, hops, slots, bytes } = tables;
            let storage = Storage { groups, trees, children, hops, slots, bytes };
            ShardOf {
                node: plan.planted.node(Node::new(config, storage)),
                held: BTreeMap::new(),
                mute_until: Instant::ZERO,
            }
        };
        self.shards = (0..).zip(tables).map(start).collect();
        self.disturbed = false;
    }

    pub(super) const fn is_on(&self) -> bool {
        !self.shards.is_empty()
    }

    /// Return its groups, slots and bytes in use; `None` while it is off.
    pub(super) fn in_use(&self) -> Option<(u16, u32, u64)> {
        let stats = merge(self.shards.iter().map(|shard| Response::Stats(shard.node.stats())))?;
        let Response::Stats(stats) = stats else { return None };
        Some((stats.groups, stats.slots_used, stats.slot_memory_used_bytes))
    }

    /// Return the groups that some of its shards hold.
    pub(super) fn groups_held(&self) -> impl Iterator<Item = &GroupId> {
        self.shards.iter().flat_map(|shard| shard.held.keys())
    }

    /// Return the slots and bytes that a group holds in a shard, at most.
    pub(super) fn held(&self, group: GroupId) -> [u64; 2] {
        let held = self.shards.iter().filter_map(|shard| shard.held.get(&group));
        held.fold([0; 2], |[slots, bytes], held| [slots.max(held.slots), bytes.max(held.bytes)])
    }

    /// Return its announcement when it dials.
    pub(super) fn announce(&self, index: usize) -> Announce {
        let shard = self.shards.first().expect("only a device that is on dials");
        Announce {
            name: Name::try_from(self.name.as_str()).expect("short"),
            boot_id: self.boot_id,
            capabilities: shard.node.capabilities(),
            data_addrs: (0..self.shards.len()).map(|shard| shard_addr(index, shard)).collect(),
            attach: None,
            slots: None,
        }
    }

    pub(super) const fn boot_id(&self) -> BootId {
        self.boot_id
    }
}

impl World<'_, '_> {
    pub(super) fn kill_device(&mut self, index: usize, len: Duration) {
        let device = &self.devices[index];
        // The last incarnation must stay up.
        if !device.is_on() || device.spare.is_empty() {
            return;
        }
        self.report.seen.note(Mark::LossDevice);
        self.turn_off(index);
        self.schedule(self.now + len, Alarm::Boot(index));
    }

    /// The process of a device ends.
    pub(super) fn turn_off(&mut self, index: usize) {
        let device = &mut self.devices[index];
        device.shards.clear();
        device.backlog.clear();
        if let Some(conn) = device.conn.take() {
            self.conns.remove(&conn);
            self.send_message(Message::Gone(conn));
        }
    }

    /// A shard loses its link, or its thread hangs.
    pub(super) fn mute_shard(&mut self, (device, shard): (usize, usize), len: Duration) {
        let until = self.now + len;
        if let Some(shard) = self.devices[device].shards.get_mut(shard) {
            shard.mute_until = shard.mute_until.max(until);
            self.report.seen.note(Mark::ShardMute);
        }
    }

    pub(super) fn boot(&mut self, index: usize) {
        let plan = self.plan;
        self.devices[index].start(plan, index);
        self.report.seen.note(Mark::LossRestart);
        self.dial_device(index);
    }

    pub(super) fn ask_of_device(
        &mut self,
        index: usize,
        conn: ConnId,
        request: Envelope<Request>,
    ) -> Result<(), Violation> {
        self.devices[index].backlog.push_back((conn, request));
        self.answer_backlog(index)
    }

    /// Execute pending requests, unless the device is stalled.
    pub(super) fn answer_backlog(&mut self, index: usize) -> Result<(), Violation> {
        while self.devices[index].stalled_until <= self.now {
            let Some((conn, Envelope { id, message })) = self.devices[index].backlog.pop_front() else { break };
            if let Request::CreateGroup(config) = &message {
                self.check_creator(config.group, conn)?;
            }
            if !matches!(message, Request::Rejected(_)) {
                self.note_request(index, conn);
            }
            let response = self.control(index, &message)?;
            if self.conns.get(&conn) == Some(&Peer::Device(index)) {
                self.send_message(Message::FromDevice(conn, Envelope { id, message: response }));
            }
        }
        Ok(())
    }

    fn control(&mut self, index: usize, request: &Request) -> Result<Response, Violation> {
        let now = self.device_time(index);
        let announce = (*request == Request::Identify).then(|| self.devices[index].announce(index));
        if let Some(announce) = announce {
            return Ok(Response::Announce(announce));
        }
        let device = &mut self.devices[index];
        if matches!(request, Request::CreateGroup(_)) && device.refuses > 0 {
            device.refuses -= 1;
            self.report.seen.note(Mark::DeviceRefuses);
            return Ok(Response::Refused(Refusal::Unknown));
        }
        let responses: Vec<Response> =
            device.shards.iter_mut().map(|shard| note_control(shard, request, now)).collect();
        let response = merge(responses.clone()).unwrap_or(Response::Refused(Refusal::Unknown));
        if let (Response::Refused(_), Some(undo)) = (&response, undo(request)) {
            let done = device.shards.iter_mut().zip(responses).filter(|(_, done)| *done == Response::Done);
            done.for_each(|(shard, _)| _ = note_control(shard, &undo, now));
        }
        match (request, &response) {
            (Request::CreateGroup(_), Response::Done) => self.report.seen.note(Mark::GroupCreated),
            (Request::CreateGroup(_), Response::Refused(_)) => self.report.seen.note(Mark::DeviceFull),
            (Request::ReleaseGroup(_), Response::Done) => self.report.seen.note(Mark::GroupReleased),
            _ => {}
        }
        self.touched.insert(Actor::Device(index));
        self.check_held(index)?;
        Ok(response)
    }

    pub(super) fn deliver_to_device(&mut self, (index, shard): (usize, usize), delivery: &Delivery) {
        let (global, now) = (self.now, self.device_time(index));
        let shard = self.devices[index].shards.get_mut(shard).filter(|shard| shard.mute_until <= global);
        let Some(ShardOf { node, held, .. }) = shard else { return };
        let drops = |node: &Node<'_>| DropReason::ALL.map(|reason| node.counters().dropped(reason)).iter().sum::<u64>();
        let dropped = drops(node);
        node.handle(now, delivery.from, delivery.ecn, &delivery.bytes);
        let group = Packet::new_checked(&delivery.bytes).ok().and_then(|packet| Repr::parse(&packet).ok());
        // Packets dropped as late or duplicate may have renewed the lease all the same; do not count on it.
        let group = group.filter(|repr| repr.kind != Kind::Status).map(|repr| repr.group);
        if let Some(held) = group.and_then(|group| held.get_mut(&group))
            && drops(node) == dropped
        {
            held.last_packet = now;
        }
        self.touched.insert(Actor::Device(index));
    }

    /// Process a device's events: a lease must not expire early.
    pub(super) fn note_events(&mut self, index: usize) -> Result<(), Violation> {
        let now = self.device_time(index);
        let shards = &mut self.devices[index].shards;
        while let Some((held, event)) =
            shards.iter_mut().find_map(|shard| Some((&mut shard.held, shard.node.poll_event()?)))
        {
            self.report.seen.device_event(event);
            let Event::LeaseExpired(group) = event else { continue };
            let held = held.remove(&group);
            let lease = held.map(|held| (held.last_packet, Duration::from_millis(held.lease_ms.into())));
            if let Some((last_packet, lease)) = lease.filter(|(last_packet, lease)| now < *last_packet + *lease) {
                let what = format!(
                    "device {index} released {group} {:?} after a valid packet, with a lease of {lease:?}",
                    now - last_packet
                );
                return Err(Violation { oracle: "lease cut short", what });
            }
        }
        self.check_held(index)
    }
}

/// Let a shard carry out a request, and record what it holds then.
fn note_control(shard: &mut ShardOf<'_>, request: &Request, now: Instant) -> Response {
    let ShardOf { node, held, .. } = shard;
    let response = node.control(request, now);
    match (request, &response) {
        (Request::CreateGroup(config), Response::Done) => {
            let bytes = node.stats().slot_memory_used_bytes - held.values().map(|held| held.bytes).sum::<u64>();
            let group =
                HeldGroup { slots: u64::from(config.slots), bytes, lease_ms: config.lease_ms, last_packet: now };
            held.insert(config.group, group);
        }
        (Request::ReleaseGroup(group), Response::Done) => _ = held.remove(group),
        (Request::RenewGroup(group), Response::Done) => {
            held.get_mut(group).into_iter().for_each(|held| held.last_packet = now);
        }
        _ => {}
    }
    response
}
