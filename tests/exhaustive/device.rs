//! A device: one node, packed between two events.

use crate::machine::{Act, Event, Facts, Machine, ViolationKind};
use crate::scope::{GROUP, Scope, Wiring};
use sumac_device::{Child, Group, Hop, Node, NodeConfig, NodeSnapshot, Slot, Storage};
use sumac_hal::ctrl::{Counters, DropReason, Request, Response, TreeConfig};
use sumac_hal::ids::BootId;
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::uplink::Uplink;
use sumac_hal::wire::{Flags, Kind, Packet, Repr, payload_crc};

/// A packed device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Device {
    index: usize,
    incarnation: u8,
    /// 0 if the device has had no group since it booted.
    epoch: u16,
    credit_max: u16,
    node: NodeSnapshot,
    groups: Vec<Option<Group>>,
    trees: Vec<Option<TreeConfig>>,
    children: Vec<Child>,
    hops: Vec<Hop>,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
}

/// More than a rank has in flight in any scope, so that nodes never enforce it.
const WINDOW_OF_ANY_RANK: u16 = 16;

impl Device {
    /// Create a device that has just booted.
    fn booted(scope: &Scope, wiring: &Wiring, index: usize, incarnation: u8) -> Self {
        let config = NodeConfig {
            shard: Shard::WHOLE,
            boot_id: BootId(0x1000 * (index as u64 + 1) + u64::from(incarnation)),
            max_packet_len_bytes: 1500,
            receive_buffer_bytes: 1 << 20,
        };
        let group = wiring.group(scope, index, 1);
        let slots = usize::from(group.slots);
        let mut groups = vec![None];
        let mut trees = vec![None];
        let mut children = vec![Child::EMPTY; usize::from(wiring.devices[index].children)];
        let mut hops = vec![Hop::EMPTY];
        let mut bytes = vec![0; slots * usize::from(group.chunk_len_bytes)];
        let mut slots = vec![Slot::EMPTY; slots];
        let storage = Storage {
            groups: &mut groups,
            trees: &mut trees,
            children: &mut children,
            hops: &mut hops,
            slots: &mut slots,
            bytes: &mut bytes,
        };
        let node = Node::new(config, storage).into_snapshot(scope.credit_max);
        Self {
            index,
            incarnation,
            epoch: 0,
            credit_max: scope.credit_max,
            node,
            groups,
            trees,
            children,
            hops,
            slots,
            bytes,
        }
    }

    /// Create a device with its group installed.
    pub(crate) fn installed(scope: &Scope, wiring: &Wiring, index: usize) -> Self {
        let mut device = Self::booted(scope, wiring, index, 0);
        device.renew(scope, wiring, 1);
        device
    }

    /// Install the group in `epoch`, replacing any other.
    fn renew(&mut self, scope: &Scope, wiring: &Wiring, epoch: u16) {
        let (index, has_group) = (self.index, self.epoch != 0);
        self.epoch = epoch;
        self.awake(|node| {
            let mut ask = |request| assert_eq!(node.control(&request, Uplink::RESUME_AT), Response::Done);
            if has_group {
                ask(Request::ReleaseGroup(GROUP));
            } else {
                ask(Request::InstallTree(wiring.tree(index)));
            }
            ask(Request::CreateGroup(wiring.group(scope, index, epoch)));
            let slots = usize::from(scope.slots);
            if scope.rules.trusting {
                node.reshape(GROUP, WINDOW_OF_ANY_RANK, slots);
            } else if !scope.is_sound() {
                node.reshape(GROUP, scope.window, slots);
            }
        });
    }

    /// Unpack the node, run something on it, collect the packets that it sends, and pack it.
    fn awake(&mut self, run: impl FnOnce(&mut Node<'_>)) -> (Vec<(Addr, Vec<u8>)>, Counters) {
        let storage = Storage {
            groups: &mut self.groups,
            trees: &mut self.trees,
            children: &mut self.children,
            hops: &mut self.hops,
            slots: &mut self.slots,
            bytes: &mut self.bytes,
        };
        let mut node = self.node.restore(storage);
        run(&mut node);
        let sent = transmit(&mut node, Uplink::RESUME_AT);
        let counters = *node.counters();
        self.node = node.into_snapshot(self.credit_max);
        (sent, counters)
    }

    /// Unpack a copy of the node that stays unpacked.
    pub(crate) fn live(&self) -> Node<'static> {
        let Self { groups, trees, children, hops, slots, bytes, .. } = self.clone();
        self.node.restore(Storage {
            groups: groups.leak(),
            trees: trees.leak(),
            children: children.leak(),
            hops: hops.leak(),
            slots: slots.leak(),
            bytes: bytes.leak(),
        })
    }

    /// Apply an event.
    pub(crate) fn act(&self, scope: &Scope, wiring: &Wiring, event: Event<'_>) -> Act {
        let mut next = self.clone();
        let (mut sent, mut counters) = (Vec::new(), Counters::default());
        let mut awake = |run: &dyn Fn(&mut Node<'_>)| (sent, counters) = next.awake(|node| run(node));
        match event {
            Event::Packets(packets) => awake(&|node| {
                for (from, bytes) in packets {
                    node.handle(Uplink::RESUME_AT, *from, Ecn::Unmarked, bytes);
                    if scope.rules.trusting {
                        node.assume_delivered(GROUP);
                    }
                }
            }),
            Event::Timer => awake(&|node| node.handle_timeout(Uplink::RESUME_AT)),
            Event::Calm => awake(&|node| node.forget_probes()),
            Event::Restart => next = Self::booted(scope, wiring, self.index, self.incarnation + 1),
            Event::Renew => next.renew(scope, wiring, scope.last_epoch()),
            Event::Call => panic!("devices call nothing"),
        }
        let sent = searched_of(scope, sent);
        let parent = wiring.devices[self.index].parent.map(|(parent, _)| wiring.addr(parent));
        let from_child = matches!(event, Event::Packets([(from, _)]) if Some(*from) != parent);
        // A late packet stays without effect, unless the device forgets that it arrived. A packet from the parent may
        // still change the granted window.
        let late = [DropReason::Stale, DropReason::Duplicate].iter().any(|&reason| counters.dropped(reason) > 0)
            && from_child
            && self.epoch == scope.last_epoch();
        let foreign =
            [DropReason::UnknownGroup, DropReason::WrongEpoch].iter().any(|&reason| counters.dropped(reason) > 0);
        let inert = sent.is_empty() && (late || foreign) && next == *self;
        let flaw = refused(scope, &counters).map(|reason| (ViolationKind::Refused, format!("refused: {reason}")));
        Act { next: Machine::Device(next), sent, inert, flaw }
    }

    /// Return the facts for the oracles.
    pub(crate) fn facts(&self) -> Facts {
        let mut device = self.clone();
        let mut facts = Facts { epoch: self.epoch, done: true, ..Facts::default() };
        device.awake(|node| {
            facts.armed = node.is_armed();
            for (index, local) in node.held(GROUP).enumerate() {
                let slots = node.held(GROUP).count();
                let before = (index as u64..local.unwrap_or(0)).step_by(slots);
                facts.passed |= before.fold(0, |passed, local| passed | 1 << local);
            }
        });
        facts
    }
}

/// Poll all packets that a node sends, as it sends them.
pub(crate) fn transmit(node: &mut Node<'_>, now: Instant) -> Vec<(Addr, Vec<u8>)> {
    let mut buffer = [0; 1500];
    let mut sent = Vec::new();
    while let Some(out) = node.poll_transmit(now) {
        sent.push((out.to, out.write(node.payload(&out), &mut buffer).to_vec()));
    }
    sent
}

/// Return packets as the search has them: see [`searched`].
pub(crate) fn searched_of(scope: &Scope, sent: Vec<(Addr, Vec<u8>)>) -> Vec<(Addr, Vec<u8>)> {
    sent.into_iter().filter_map(|(to, bytes)| searched(scope, &bytes).map(|bytes| (to, bytes))).collect()
}

/// Return a packet as the search has it, if it has it. It leaves out the report of the slowest rank, which depends on
/// the clock, and nothing depends on it. And each contribution describes its operation: descriptions as packets of
/// their own would multiply the states. (The simulator loses and reorders those.)
pub(crate) fn searched(scope: &Scope, bytes: &[u8]) -> Option<Vec<u8>> {
    let packet = Packet::new_unchecked(bytes);
    let mut repr = Repr::parse(&packet).expect("machines send packets of this version");
    (repr.slowest, repr.late_us) = (None, 0);
    match repr.kind {
        Kind::Operation => return None,
        Kind::Data if repr.flags.contains(Flags::SHORT) => {
            let (desc, _) = scope.ops().into_iter().find(|(_, seqs)| seqs.contains(&repr.seq.0))?;
            repr.set_op(&desc);
            repr.flags.remove(Flags::SHORT);
        }
        _ => {}
    }
    let crc = payload_crc(packet.payload());
    Some([&repr.header(crc)[..], packet.payload()].concat())
}

/// Return the reason of a drop that correct peers never cause.
fn refused(scope: &Scope, counters: &Counters) -> Option<DropReason> {
    let usual = |reason: DropReason| match reason {
        DropReason::Stale | DropReason::Duplicate | DropReason::Unexpected => true,
        DropReason::UnknownGroup | DropReason::WrongEpoch => scope.restarts > 0,
        DropReason::SlotBusy | DropReason::OverWindow => scope.rules.trusting,
        _ => false,
    };
    DropReason::ALL.into_iter().find(|&reason| counters.dropped(reason) > 0 && !usual(reason))
}
