//! Control requests: trees and groups, reserved whole or not at all (PROTOCOL 10).

use super::View;
use super::operation::Operations;
use super::{Node, tree_is_valid};
use crate::node::group::{Child, ChildKind, Group, Hop, Parent, Window};
use crate::node::memory::{Span, first_fit};
use crate::sets::{MAX_SLOTS, SlotSet};
use crate::slot::Slot;
use crate::trace::Trace;
use sumac_hal::ctrl::{DeviceCapabilities, GroupConfig, Refusal, Request, Response, SharedLink, Stats, TreeConfig};
use sumac_hal::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank, TreeId};
use sumac_hal::op::{Collective, Dtype, ReduceOp};
use sumac_hal::planted;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::uplink::{MAX_WINDOW, SharedResults, Uplink};
use sumac_hal::wire::{MAX_CHILDREN, PACKET_LIMIT_MIN, SHORT_HEADER_LEN};

/// The smallest chunk: a few elements of the widest type.
const CHUNK_MIN_BYTES: u16 = 64;

impl Node<'_> {
    /// Execute a request. `Hello` is answered by the board, which knows the device's name.
    pub fn control(&mut self, request: &Request, now: Instant) -> Response {
        // Scan the table again: a new group has not had a turn.
        self.common.may_send = true;
        let done = match request {
            Request::InstallTree(tree) => self.install_tree(tree),
            Request::RemoveTree(tree) => self.remove_tree(*tree),
            Request::CreateGroup(config) => self.create_group(config, now),
            Request::RenewGroup(group) => self.renew_group(*group, now),
            Request::ReleaseGroup(group) => self.release_group(*group, now),
            Request::Stats => return Response::Stats(self.stats()),
            Request::ProbePath(group) => {
                let found = self.probe_path(*group, now);
                return found
                    .map_or_else(Response::Refused, |max_packet_len_bytes| Response::Path { max_packet_len_bytes });
            }
            Request::Reset => {
                (0..self.storage.groups.len()).for_each(|index| self.close_group(index));
                self.storage.trees.fill_with(|| None);
                Ok(())
            }
            _ => Err(Refusal::Unknown),
        };
        done.map_or_else(Response::Refused, |()| Response::Done)
    }

    /// Return this node's capabilities. A board with several shards has one such node per shard.
    pub fn capabilities(&self) -> DeviceCapabilities {
        fn mask<T: Copy>(all: &[T], number: fn(T) -> u8) -> u32 {
            all.iter().fold(0, |mask, &item| mask | 1 << number(item))
        }
        let offloadable =
            |mask, collective: &Collective| mask | u32::from(collective.is_offloadable()) << *collective as u8;
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        DeviceCapabilities {
            max_packet_len_bytes: narrow(self.common.config.max_packet_len_bytes),
            receive_buffer_bytes: narrow(self.common.config.receive_buffer_bytes),
            groups: self.storage.groups.len().min(usize::from(u16::MAX)) as u16,
            children: self.storage.children.len().min(MAX_CHILDREN) as u16,
            slots: narrow(self.storage.slots.len()),
            slot_memory_bytes: self.storage.bytes.len() as u64,
            dtypes: mask(Dtype::ALL, Dtype::to_wire),
            ops: mask(ReduceOp::ALL, ReduceOp::to_wire),
            collectives: Collective::ALL.iter().fold(0, offloadable),
        }
    }

    /// Return resources in use and counters.
    pub fn stats(&self) -> Stats {
        let groups = self.storage.groups.iter().flatten();
        Stats {
            boot_id: self.common.config.boot_id,
            groups: groups.clone().count() as u16,
            trees: self.storage.trees.iter().flatten().count() as u16,
            slots_used: groups.clone().map(|group| group.slots.len as u32).sum(),
            slot_memory_used_bytes: groups.map(|group| group.bytes.len as u64).sum(),
            counters: self.common.counters,
            stack: None,
        }
    }

    fn install_tree(&mut self, tree: &TreeConfig) -> Result<(), Refusal> {
        let limit = self.capabilities().children;
        if !tree_is_valid(tree) || tree.children > limit {
            return Err(Refusal::Children { children: tree.children, limit });
        }
        let own = self.common.config.shard.shards();
        if let Some(parent) = &tree.parent {
            let shards = parent.data_addrs.len() as u16;
            // An undivided node keeps a hop to each shard of its parent.
            if shards != own && (own != 1 || shards == 0 || usize::from(shards) > self.storage.hops.len()) {
                return Err(Refusal::Shards { parent: shards, own });
            }
        }
        if self.tree_in_use(tree.tree) {
            return Err(Refusal::TreeInUse(tree.tree));
        }
        let trees = &mut self.storage.trees;
        let known = trees.iter().position(|entry| entry.as_ref().is_some_and(|entry| entry.tree == tree.tree));
        let limit = trees.len() as u16;
        if let Some(free) = known.or_else(|| trees.iter().position(Option::is_none)) {
            trees[free] = Some(tree.clone());
            return Ok(());
        }
        // The client that installed a tree may be gone without removing it. The oldest tree without groups makes room;
        // trees behind it are newer, and their groups may be on their way.
        let groups = &self.storage.groups;
        let in_use = |tree: &TreeConfig| groups.iter().flatten().any(|group| group.config.tree == tree.tree);
        let unused = trees.iter().position(|entry| entry.as_ref().is_none_or(|entry| !in_use(entry)));
        let oldest = unused.ok_or(Refusal::NoEntry { limit })?;
        trees[oldest..].rotate_left(1);
        if let Some(last) = trees.last_mut() {
            *last = Some(tree.clone());
        }
        Ok(())
    }

    fn remove_tree(&mut self, tree: TreeId) -> Result<(), Refusal> {
        if self.tree_in_use(tree) {
            return Err(Refusal::TreeInUse(tree));
        }
        let entries = &mut self.storage.trees;
        let entry = entries.iter_mut().find(|entry| entry.as_ref().is_some_and(|entry| entry.tree == tree));
        *entry.ok_or(Refusal::NoTree(tree))? = None;
        Ok(())
    }

    fn tree_in_use(&self, tree: TreeId) -> bool {
        self.storage.groups.iter().flatten().any(|group| group.config.tree == tree)
    }

    fn renew_group(&mut self, id: GroupId, now: Instant) -> Result<(), Refusal> {
        let index = self.find(id).ok_or(Refusal::NoGroup(id))?;
        if let Some(group) = &mut self.storage.groups[index] {
            group.lease_until = now + group.lease();
        }
        Ok(())
    }

    fn release_group(&mut self, id: GroupId, now: Instant) -> Result<(), Refusal> {
        let index = self.find(id).ok_or(Refusal::NoGroup(id))?;
        self.close_group(index);
        self.common.trace.record(now, Trace::GroupReleased(id));
        Ok(())
    }

    fn create_group(&mut self, config: &GroupConfig, now: Instant) -> Result<(), Refusal> {
        if self.find(config.group).is_some() {
            return Err(Refusal::GroupExists(config.group));
        }
        let trees = self.storage.trees.iter().flatten();
        let tree = trees.clone().find(|tree| tree.tree == config.tree).ok_or(Refusal::NoTree(config.tree))?.clone();
        let limit = self.storage.groups.len() as u16;
        let entry = self.storage.groups.iter().position(Option::is_none).ok_or(Refusal::NoEntry { limit })?;
        self.check_sizes(config)?;

        let stages = config.order.stages(tree.children);
        let chunk = usize::from(config.chunk_len_bytes);
        let need = usize::from(config.slots) * stages * chunk;
        let used = self.storage.groups.iter().flatten();
        let children = first_fit(
            used.clone().map(|group| group.children),
            usize::from(tree.children),
            self.storage.children.len(),
        )
        .ok_or(Refusal::NoChildren { need: u32::from(tree.children) })?;
        let slots =
            first_fit(used.clone().map(|group| group.slots), usize::from(config.slots), self.storage.slots.len())
                .ok_or(Refusal::NoSlots { need: u32::from(config.slots) })?;
        let bytes = first_fit(used.clone().map(|group| group.bytes), need, self.storage.bytes.len())
            .ok_or(Refusal::NoMemory { need: need as u64 })?;
        let shards = tree.parent.as_ref().map_or(0, |parent| parent.data_addrs.len());
        let own = self.common.config.shard.shards();
        let hops = if own > 1 { shards.min(1) } else { shards };
        let hops = first_fit(used.map(Group::hops), hops, self.storage.hops.len())
            .ok_or(Refusal::Shards { parent: shards as u16, own })?;

        // Everything fits: nothing fails from here on.
        let epoch = self.key_epoch(config);
        for (i, child) in self.storage.children[children.range()].iter_mut().enumerate() {
            let key = config.secret.child_key(config.group, epoch, ChildIndex(i as u16));
            let kind = match tree.ranks.get(i) {
                None => ChildKind::Unknown,
                Some(&TreeConfig::NODE) => ChildKind::Node,
                Some(&rank) => ChildKind::Rank(Rank(rank.into())),
            };
            *child = Child { key, kind, ..Child::EMPTY };
        }
        self.storage.slots[slots.range()].fill(Slot::EMPTY);
        // Packets are padded with it, and no other group's data may be in them.
        self.storage.bytes[bytes.start..][..chunk].fill(0);
        self.groups_end = self.groups_end.max(entry + 1);
        self.set_up_hops(config, &tree, hops);
        self.storage.groups[entry] = Some(self.new_group(config, &tree, [children, slots, bytes, hops], now));
        self.common.trace.record(now, Trace::GroupCreated(config.group));
        Ok(())
    }

    /// Return the epoch that keys are derived from.
    fn key_epoch(&self, config: &GroupConfig) -> Epoch {
        if planted!(self.common, EpochUnchecked) { Epoch::default() } else { config.epoch }
    }

    fn check_sizes(&self, config: &GroupConfig) -> Result<(), Refusal> {
        let (window, slots) = (config.window_max, config.slots);
        let local = self.common.config.shard.max_in_window(u64::from(window));
        let early = [planted!(self.common, SlotReusedEarly), planted!(self.common, RedoReusedEarly)];
        let twice = 2 * local <= u64::from(slots) || early.contains(&true);
        let enough = twice && usize::from(slots) <= MAX_SLOTS;
        if window == 0 || u64::from(window) > MAX_WINDOW || !enough {
            return Err(Refusal::Window { window, slots });
        }
        let chunk_len_bytes = config.chunk_len_bytes;
        let longest = self.common.config.max_packet_len_bytes;
        let has_room = longest >= PACKET_LIMIT_MIN;
        let limit = if has_room { longest - SHORT_HEADER_LEN } else { 0 };
        if chunk_len_bytes < CHUNK_MIN_BYTES
            || !chunk_len_bytes.is_multiple_of(16)
            || usize::from(chunk_len_bytes) > limit
        {
            return Err(Refusal::Chunk { chunk_len_bytes, limit: limit as u32 });
        }
        Ok(())
    }

    /// Return the token of a group's contributions. It differs between boots and epochs, so that an old packet's token
    /// is not echoed.
    const fn token_of(&self, config: &GroupConfig) -> u32 {
        (self.common.config.boot_id.0 as u32) ^ config.epoch.to_bits() ^ config.group.0.rotate_left(16)
    }

    /// Set up the entries of a group's hops: to the parent's shard that is this node's, or, if this node is undivided,
    /// to all of them.
    fn set_up_hops(&mut self, config: &GroupConfig, tree: &TreeConfig, span: Span) {
        let (own, token) = (self.common.config.shard, self.token_of(config));
        let Some(parent) = &tree.parent else { return };
        let shards = parent.data_addrs.len() as u16;
        let of = |index: u16| if own.shards() > 1 { Some(own) } else { Shard::new(index, shards) };
        for (index, hop) in (0..).zip(&mut self.storage.hops[span.range()]) {
            let shard = of(index).unwrap_or(own);
            *hop = Hop {
                addr: parent.data_addrs[usize::from(shard.index())],
                shard,
                link: Uplink::new(config.timers.into(), token.rotate_left(index.into()) ^ 1 << 31),
                window: config.window_max,
                path: None,
            };
        }
    }

    fn new_group(&self, config: &GroupConfig, tree: &TreeConfig, spans: [Span; 4], now: Instant) -> Group {
        let [children, slots, bytes, hops] = spans;
        let shard = self.common.config.shard;
        let token = self.token_of(config);
        let parent = tree.parent.as_ref().map(|parent| Parent {
            child: parent.child,
            hops,
            window: config.window_max,
            stable: ChunkNo(0),
            // Only one shard of the parent sends there.
            shared_results: SharedResults::new(config.parent_shared.is_some() && hops.len == 1),
        });
        let shared = config.shared.and_then(|first| first.offset_by(shard.index())).map(|addr| {
            let key = config.secret.child_key(config.group, self.key_epoch(config), ChildIndex::ALL);
            SharedLink { addr, key }
        });
        let packet = usize::from(config.chunk_len_bytes) + SHORT_HEADER_LEN;
        let start = self.common.config.receive_buffer_bytes / (children.len * packet);
        let lease = core::time::Duration::from_millis(u64::from(config.lease_ms));
        Group {
            config: *config,
            children,
            slots,
            bytes,
            stages: config.order.stages(tree.children),
            parent,
            shared,
            window: Window::new(start, config.window_max),
            window_local: shard.max_in_window(u64::from(config.window_max)),
            min_have: ChunkNo(0),
            answered_below: 0,
            answered_top: 0,
            failed: None,
            refusal: None,
            lease_until: now + lease,
            up: SlotSet::EMPTY,
            down: SlotSet::EMPTY,
            deficit: 0,
            token,
            congested: false,
            zero_copy: None,
            view: View::new(tree, now),
            operations: Operations::default(),
        }
    }
}
