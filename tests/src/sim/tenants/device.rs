//! Devices: a production node each, with a connection to the controller as a board's agent keeps it. Requests are
//! executed in order, a lost connection is redialled, and groups outlive it.

use super::TenantViolation as Violation;
use super::draw::{DeviceCapacity, Tenancy};
use super::watch::HeldGroup;
use super::wire::Message;
use super::world::{Actor, Alarm, World, device_addr};
use crate::oracle::weight;
use crate::sim::controller::Peer;
use crate::sim::coverage::Mark;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac_device::{Child, Event, Group, Node, NodeConfig, Slot, Storage};
use sumac_hal::ctrl::{Announce, DropReason, Envelope, Name, Refusal, Request, Response, TreeConfig};
use sumac_hal::emu::Delivery;
use sumac_hal::ids::{BootId, GroupId};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Kind, Packet, Repr};

/// The tables of one incarnation of a device.
pub(super) struct Tables {
    groups: Vec<Option<Group>>,
    trees: Vec<Option<TreeConfig>>,
    children: Vec<Child>,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
}

impl Tables {
    pub(super) fn new(capacity: &DeviceCapacity) -> Self {
        Self {
            groups: (0..capacity.groups).map(|_| None).collect(),
            trees: vec![None; capacity.groups],
            children: vec![Child::EMPTY; capacity.children],
            slots: vec![Slot::EMPTY; capacity.slots],
            bytes: vec![0; capacity.bytes],
        }
    }
}

/// A device.
pub(super) struct Device<'m> {
    pub(super) name: String,
    /// `None` while it is off.
    pub(super) node: Option<Node<'m>>,
    boot_id: BootId,
    incarnations: u64,
    spare: Vec<&'m mut Tables>,
    pub(super) conn: Option<ConnId>,
    pub(super) stalled_until: Instant,
    backlog: VecDeque<(ConnId, Envelope<Request>)>,
    /// Number of groups that it will refuse.
    pub(super) refuses: u32,
    /// Oracle state of its groups.
    pub(super) held: BTreeMap<GroupId, HeldGroup>,
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
            node: None,
            boot_id: BootId(0),
            incarnations: 0,
            spare: incarnations,
            conn: None,
            stalled_until: Instant::ZERO,
            backlog: VecDeque::new(),
            refuses: 0,
            held: BTreeMap::new(),
            disturbed: false,
        }
    }

    /// Start with empty tables.
    pub(super) fn start(&mut self, plan: &Tenancy, index: usize) {
        let Some(tables) = self.spare.pop() else { return };
        self.boot_id = BootId(weight(&[plan.seed, index as u64, self.incarnations]));
        self.incarnations += 1;
        let config = NodeConfig {
            shard: Shard::new(0, 1).expect("one shard"),
            boot_id: self.boot_id,
            max_packet_len_bytes: 65_507,
            receive_buffer_bytes: 1 << 20,
        };
        let Tables { groups, trees, children, slots, bytes } = tables;
        self.node = Some(plan.planted.node(Node::new(config, Storage { groups, trees, children, slots, bytes })));
        self.disturbed = false;
    }

    /// Return its announcement when it dials.
    pub(super) fn announce(&self, index: usize) -> Announce {
        let node = self.node.as_ref().expect("only a device that is on dials");
        Announce {
            name: Name::try_from(self.name.as_str()).expect("short"),
            boot_id: self.boot_id,
            capabilities: node.capabilities(),
            data_addrs: std::iter::once(device_addr(index)).collect(),
            attach: None,
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
        if device.node.is_none() || device.spare.is_empty() {
            return;
        }
        self.report.seen.note(Mark::LossDevice);
        self.turn_off(index);
        self.schedule(self.now + len, Alarm::Boot(index));
    }

    /// The process of a device ends.
    pub(super) fn turn_off(&mut self, index: usize) {
        let device = &mut self.devices[index];
        device.node = None;
        device.held.clear();
        device.backlog.clear();
        if let Some(conn) = device.conn.take() {
            self.conns.remove(&conn);
            self.send_message(Message::Gone(conn));
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
        let Some(node) = &mut device.node else { return Ok(Response::Refused(Refusal::Unknown)) };
        let response = node.control(request, now);
        match (request, &response) {
            (Request::CreateGroup(config), Response::Done) => {
                let bytes =
                    node.stats().slot_memory_used_bytes - device.held.values().map(|held| held.bytes).sum::<u64>();
                let held =
                    HeldGroup { slots: u64::from(config.slots), bytes, lease_ms: config.lease_ms, last_packet: now };
                device.held.insert(config.group, held);
                self.report.seen.note(Mark::GroupCreated);
            }
            (Request::CreateGroup(_), Response::Refused(_)) => self.report.seen.note(Mark::DeviceFull),
            (Request::ReleaseGroup(group), Response::Done) => {
                device.held.remove(group);
                self.report.seen.note(Mark::GroupReleased);
            }
            (Request::RenewGroup(group), Response::Done) => {
                if let Some(held) = device.held.get_mut(group) {
                    held.last_packet = now;
                }
            }
            _ => {}
        }
        self.touched.insert(Actor::Device(index));
        self.check_held(index)?;
        Ok(response)
    }

    pub(super) fn deliver_to_device(&mut self, index: usize, delivery: &Delivery) {
        let now = self.device_time(index);
        let device = &mut self.devices[index];
        let Some(node) = &mut device.node else { return };
        let drops = |node: &Node<'_>| DropReason::ALL.map(|reason| node.counters().dropped(reason)).iter().sum::<u64>();
        let dropped = drops(node);
        node.handle(now, delivery.from, delivery.ecn, &delivery.bytes);
        let group = Packet::new_checked(&delivery.bytes).ok().and_then(|packet| Repr::parse(&packet).ok());
        // Packets dropped as late or duplicate may have renewed the lease all the same; do not count on it.
        let group = group.filter(|repr| repr.kind != Kind::Status).map(|repr| repr.group);
        if let Some(held) = group.and_then(|group| device.held.get_mut(&group))
            && drops(node) == dropped
        {
            held.last_packet = now;
        }
        self.touched.insert(Actor::Device(index));
    }

    /// Process a device's events: a lease must not expire early.
    pub(super) fn note_events(&mut self, index: usize) -> Result<(), Violation> {
        let now = self.device_time(index);
        let device = &mut self.devices[index];
        let Some(node) = &mut device.node else { return Ok(()) };
        while let Some(event) = node.poll_event() {
            self.report.seen.device_event(event);
            let Event::LeaseExpired(group) = event else { continue };
            let held = device.held.remove(&group);
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
