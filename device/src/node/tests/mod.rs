//! Tests of one node, packet by packet: hand-made packets in, decoded packets out, and the invariants of the state
//! checked after each.

mod bounds;
mod control;
mod drops;
mod ends;
mod flow;
mod fuzz;
mod loss;
mod model;
mod operation;
mod parent_shards;
mod path;
mod sets;
mod shared;
mod straggler;
mod train;

use super::{Node, NodeConfig, Payload};
use crate::node::group::{Child, Hop};
use crate::node::memory::Storage;
use crate::slot::{Slot, State};
use core::num::NonZeroU32;
use std::vec;
use std::vec::Vec;
use sumac_hal::ctrl::{
    ChildMask, DropReason, GroupConfig, NodeParent, Order, Request, Response, SharedLink, TreeConfig,
};
use sumac_hal::driver::Transmit;
use sumac_hal::ids::{BootId, ChildIndex, ChunkNo, Epoch, GroupId, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::{Flags, Kind, NakReason, Packet, Repr, payload_crc};

pub(in crate::node) const PARENT: Addr = Addr::Emu(9000);
/// This node's child index below its parent.
pub(in crate::node) const OWN_PLACE: ChildIndex = ChildIndex(5);
pub(in crate::node) const PARENT_KEY: u64 = 0xfeed;
/// This node's own shared address, and its parent's.
pub(in crate::node) const SHARED: Addr = Addr::Emu(7000);
pub(in crate::node) const PARENT_SHARED: SharedLink = SharedLink { addr: Addr::Emu(7001), key: 0xfade };
pub(in crate::node) const EPOCH: Epoch = Epoch { term: 1, counter: 3 };
/// The operation that all children call unless a test says otherwise.
pub(in crate::node) const OP: OpDesc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1000);
/// The divisor of averages: deliberately not the number of any node's children.
pub(in crate::node) const RANKS: NonZeroU32 = NonZeroU32::new(7).unwrap();
pub(in crate::node) const LEASE_MS: u32 = 60_000;
const SECRET: GroupSecret = GroupSecret([9; 16]);

/// Configuration of a node under test. Group `i` has the id `7 + i`.
#[derive(Debug, Clone, Copy)]
pub(in crate::node) struct Setup {
    pub(in crate::node) children: u16,
    pub(in crate::node) window: u16,
    pub(in crate::node) slots: u16,
    pub(in crate::node) order: Order,
    pub(in crate::node) has_parent: bool,
    pub(in crate::node) shard: Shard,
    /// The number of the parent's shards; 0: as many as its own.
    pub(in crate::node) parent_shards: u16,
    pub(in crate::node) chunk_len_bytes: u16,
    pub(in crate::node) groups: usize,
    pub(in crate::node) receive_buffer_bytes: usize,
    /// Whether it has a shared address, and listens to its parent's.
    pub(in crate::node) shares: bool,
    /// The children's ranks, if the tree names them.
    pub(in crate::node) ranks: &'static [u16],
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            children: 2,
            window: 8,
            slots: 16,
            order: Order::Arrival,
            has_parent: false,
            shard: Shard::WHOLE,
            parent_shards: 0,
            chunk_len_bytes: 64,
            groups: 1,
            receive_buffer_bytes: 1 << 20,
            shares: false,
            ranks: &[],
        }
    }
}

/// A packet that the node sent.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::node) struct Sent {
    pub(in crate::node) to: Addr,
    pub(in crate::node) repr: Repr,
    pub(in crate::node) payload: Vec<u8>,
}

impl Sent {
    pub(in crate::node) fn floats(&self) -> Vec<f32> {
        let (words, rest) = self.payload.as_chunks::<4>();
        assert!(rest.is_empty());
        words.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }

    pub(in crate::node) fn is_nak(&self, reason: NakReason) -> bool {
        self.repr.kind == Kind::Nak && self.repr.reason == Some(reason)
    }
}

/// A node, a clock, and what its children have.
pub(in crate::node) struct Rig {
    pub(in crate::node) node: Node<'static>,
    pub(in crate::node) setup: Setup,
    pub(in crate::node) now: Instant,
    /// The `have` that each child reports in the packets that [`Rig::up`] makes, group 0.
    pub(in crate::node) have: Vec<u64>,
    buffer: Vec<u8>,
}

pub(in crate::node) fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(in crate::node) fn child_addr(child: u16) -> Addr {
    Addr::Emu(u32::from(child))
}

/// The address of a shard of the parent, if that has several.
pub(in crate::node) fn parent_shard(shard: u16) -> Addr {
    Addr::Emu(9000 + u32::from(shard))
}

pub(in crate::node) fn group_id(group: usize) -> GroupId {
    GroupId(7 + group as u32)
}

pub(in crate::node) fn key(group: usize, child: u16) -> u64 {
    SECRET.child_key(group_id(group), EPOCH, ChildIndex(child))
}

pub(in crate::node) fn token(child: u16) -> u32 {
    0xab00 + u32::from(child)
}

/// The group configuration that a controller would send.
pub(in crate::node) fn group_config(setup: &Setup, group: usize) -> GroupConfig {
    GroupConfig {
        group: group_id(group),
        tree: TreeId(1),
        epoch: EPOCH,
        order: setup.order,
        secret: SECRET,
        parent_key: if setup.has_parent { PARENT_KEY } else { 0 },
        shared: setup.shares.then_some(SHARED),
        parent_shared: (setup.shares && setup.has_parent).then_some(PARENT_SHARED),
        window_max: setup.window,
        slots: setup.slots,
        chunk_len_bytes: setup.chunk_len_bytes,
        ranks: RANKS,
        lease_ms: LEASE_MS,
        timers: HopTimers::DEFAULT.into(),
        zero_copy: ChildMask::EMPTY,
    }
}

pub(in crate::node) fn tree_config(setup: &Setup) -> TreeConfig {
    let addrs = match setup.parent_shards {
        0 => (0..setup.shard.shards()).map(|_| PARENT).collect(),
        shards => (0..shards).map(parent_shard).collect(),
    };
    let parent = setup.has_parent.then_some(NodeParent { data_addrs: addrs, child: OWN_PLACE });
    TreeConfig { tree: TreeId(1), parent, children: setup.children, ranks: setup.ranks.iter().copied().collect() }
}

/// A node without trees and groups, with exactly the memory that `setup` needs.
pub(in crate::node) fn bare(setup: &Setup) -> Node<'static> {
    let (config, storage) = parts(setup);
    Node::new(config, storage)
}

/// The parts of such a node.
pub(in crate::node) fn parts(setup: &Setup) -> (NodeConfig, Storage<'static>) {
    let slots = usize::from(setup.slots) * setup.groups;
    let bytes = slots * setup.order.stages(setup.children) * usize::from(setup.chunk_len_bytes);
    let config = NodeConfig {
        shard: setup.shard,
        boot_id: BootId(42),
        max_packet_len_bytes: 9000,
        receive_buffer_bytes: setup.receive_buffer_bytes,
    };
    let storage = Storage {
        groups: Vec::leak((0..setup.groups).map(|_| None).collect()),
        trees: Vec::leak(vec![None; setup.groups]),
        children: Vec::leak(vec![Child::EMPTY; usize::from(setup.children) * setup.groups]),
        hops: Vec::leak(vec![Hop::EMPTY; usize::from(setup.parent_shards.max(1)) * setup.groups]),
        slots: Vec::leak(vec![Slot::EMPTY; slots]),
        // What an earlier group has left.
        bytes: Vec::leak(vec![0xee; bytes]),
    };
    (config, storage)
}

impl Rig {
    pub(in crate::node) fn new(setup: Setup) -> Self {
        let node = bare(&setup);
        Self::with(setup, node)
    }

    /// Set up trees and groups on a bare node.
    pub(in crate::node) fn with(setup: Setup, mut node: Node<'static>) -> Self {
        let now = Instant::from_nanos(1_000_000);
        assert_eq!(node.control(&Request::InstallTree(tree_config(&setup)), now), Response::Done);
        for group in 0..setup.groups {
            assert_eq!(node.control(&Request::CreateGroup(group_config(&setup, group)), now), Response::Done);
        }
        Self { node, setup, now, have: vec![0; usize::from(setup.children)], buffer: vec![0; 9000] }
    }

    /// A header from a child, valid in every field.
    pub(in crate::node) fn up(&self, kind: Kind, child: u16, seq: u64) -> Repr {
        Repr {
            collective: Some(OP.collective),
            dtype: OP.dtype,
            op: OP.op,
            bits: OP.count,
            signature: OP.signature(Path::Tree, 1),
            flags: Flags::WANT,
            count: 1,
            seq: ChunkNo(seq),
            mark: ChunkNo(self.have[usize::from(child)]),
            token: token(child),
            ..Repr::new(kind, group_id(0), EPOCH, ChildIndex(child), key(0, child))
        }
    }

    /// A header from the parent, valid in every field; `token` is what it echoes.
    pub(in crate::node) fn down(&self, kind: Kind, seq: u64, token: u32) -> Repr {
        Repr {
            count: 1,
            seq: ChunkNo(seq),
            token,
            signature: OP.signature(Path::Tree, 1),
            window: self.setup.window,
            ..Repr::new(kind, group_id(0), EPOCH, OWN_PLACE, PARENT_KEY)
        }
    }

    /// Deliver a packet to the node.
    pub(in crate::node) fn put(&mut self, from: Addr, repr: Repr, payload: &[u8]) {
        let repr = Repr { payload_len_bytes: payload.len() as u16, ..repr };
        let mut bytes = vec![0; repr.packet_len()];
        bytes[repr.header_len()..].copy_from_slice(payload);
        repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(payload));
        self.put_bytes(from, &bytes);
    }

    pub(in crate::node) fn put_bytes(&mut self, from: Addr, bytes: &[u8]) {
        self.node.handle(self.now, from, Ecn::Unmarked, bytes);
        check_invariants(&mut self.node);
    }

    /// Let `child` contribute `values` to `seq`.
    pub(in crate::node) fn data(&mut self, child: u16, seq: u64, values: &[f32]) {
        let repr = self.up(Kind::Data, child, seq);
        self.put(child_addr(child), repr, &floats(values));
    }

    /// Let every child contribute its number to `seq`.
    pub(in crate::node) fn all(&mut self, seq: u64) {
        (0..self.setup.children).for_each(|child| self.data(child, seq, &[f32::from(child)]));
    }

    /// Let every child have everything below `have`, as their next packets report.
    pub(in crate::node) fn all_have(&mut self, have: u64) {
        self.have.fill(have);
    }

    pub(in crate::node) fn nak(&mut self, child: u16, reason: NakReason, seq: u64) {
        let repr = Repr { reason: Some(reason), ..self.up(Kind::Nak, child, seq) };
        self.put(child_addr(child), repr, &[]);
    }

    /// Let `child` probe `count` seqs from `seq` on, and request all answers but those it has (bits of `held`).
    pub(in crate::node) fn probe(&mut self, child: u16, seq: u64, count: u16, held: u64) {
        self.probe_for(child, seq, count, held, !held);
    }

    /// Let `child` probe `count` seqs from `seq` on, and request the answers that were lost (bits of `lost`).
    pub(in crate::node) fn probe_for(&mut self, child: u16, seq: u64, count: u16, held: u64, lost: u64) {
        let repr = Repr { count, bits: held, bits2: lost, token: 0x9999, ..self.up(Kind::Probe, child, seq) };
        self.put(child_addr(child), repr, &[]);
    }

    /// Take the node's next packet.
    pub(in crate::node) fn next(&mut self) -> Option<Sent> {
        let destination = self.node.poll_destination();
        let sent = self.node.poll_transmit(self.now);
        assert_eq!(destination, sent.as_ref().map(|sent| sent.to), "poll_destination and poll_transmit disagree");
        sent.map(|sent| self.written(&sent))
    }

    fn written(&mut self, sent: &Transmit<Payload>) -> Sent {
        let packet = sent.write(self.node.payload(sent), &mut self.buffer);
        let packet = Packet::new_checked(packet).expect("nodes send valid packets");
        let repr = Repr::parse(&packet).expect("nodes send packets of this version");
        Sent { to: sent.to, repr, payload: packet.payload().to_vec() }
    }

    /// Take all packets that the node has to send.
    pub(in crate::node) fn drain(&mut self) -> Vec<Sent> {
        let sent: Vec<Sent> = core::iter::from_fn(|| self.next()).collect();
        check_invariants(&mut self.node);
        sent
    }

    /// Take all packets that the node has to send, at most `packets_max` at a time.
    pub(in crate::node) fn drain_in_batches(&mut self, packets_max: usize) -> Vec<Sent> {
        let mut sent = Vec::new();
        loop {
            let mut batch = heapless::Vec::<_, 16>::new();
            self.node.poll_batch(self.now, packets_max, &mut batch);
            if batch.is_empty() {
                break;
            }
            sent.extend(batch.iter().map(|out| self.written(out)));
        }
        check_invariants(&mut self.node);
        sent
    }

    /// Advance the clock.
    pub(in crate::node) fn pass_ms(&mut self, ms: u64) {
        self.now = self.now + core::time::Duration::from_millis(ms);
        self.node.handle_timeout(self.now);
        check_invariants(&mut self.node);
    }

    pub(in crate::node) fn dropped(&self, reason: DropReason) -> u64 {
        self.node.counters().dropped(reason)
    }
}

/// Check the invariants that hold between any two calls.
pub(in crate::node) fn check_invariants(node: &mut Node<'_>) {
    let may_send = node.common.may_send;
    for index in 0..node.storage.groups.len() {
        let Some(ctx) = node.group_ctx(index) else { continue };
        let (group, shard) = (&ctx.group, ctx.common.config.shard);
        let remaining = ctx.children.iter().enumerate().filter(|(child, _)| !group.view.excluded.contains(*child));
        let least = remaining.map(|(_, child)| child.have).min().or(Some(group.min_have));
        assert!(may_send || !group.has_output(), "a group with output must be polled");
        assert_eq!(Some(group.min_have), least, "min_have is the minimum have");
        assert!(shard.below(group.min_have) <= group.answered_below, "no child has an unanswered chunk");
        assert!(ctx.children.iter().all(|child| child.credit <= Child::CREDIT_MAX));
        for (i, slot) in ctx.slots.iter().enumerate() {
            let full = slot.bits.len() == ctx.children.len();
            let (up, down) = (group.up.contains(i), group.down.contains(i));
            assert_eq!(down, !slot.pending.is_empty(), "pending answers are in the down queue");
            assert!(!up || matches!(slot.state, State::Up | State::Refused), "only contributions go up");
            assert!(slot.state == State::Free || slot.local % ctx.slots.len() as u64 == i as u64);
            assert!(slot.state == State::Free || slot.local < group.answered_below + group.window_local);
            assert!(!matches!(slot.state, State::Up | State::Answered) || full, "a completed slot has every child");
            for set in [&slot.data, &slot.want, &slot.shared, &slot.pending] {
                assert!((0..ctx.children.len()).all(|child| !set.contains(child) || slot.bits.contains(child)));
            }
        }
    }
}
