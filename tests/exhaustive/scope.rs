//! The bounds of a search: the cluster, the calls of its ranks, and the number of faults of network and devices.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::Range;
use std::time::Duration;
use sumac::transport::packets::EndpointConfig;
use sumac_hal::ctrl::{ChildMask, GroupConfig, NodeParent, Order, TreeConfig};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::op::{Collective, Dtype, OpDesc, ReduceOp};
use sumac_hal::port::Addr;
use sumac_hal::uplink::HopTimers;
use sumac_tests::oracle::Shape;

/// Rules that a search breaks on purpose, to show that it detects their violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Rules {
    /// Nodes neither enforce windows nor wait for `have`: they reuse a slot once its result is sent. The search then
    /// ignores drops for lack of room, and `stable`.
    pub(crate) trusting: bool,
    /// Ranks count the chunks in flight instead of using a window that starts at `have`.
    pub(crate) counted: bool,
    /// A restart does not change the epoch (PROTOCOL 4).
    pub(crate) one_epoch: bool,
    /// Timers never fire.
    pub(crate) timeless: bool,
}

/// The bounds of one search.
#[derive(Debug, Clone)]
pub(crate) struct Scope {
    /// Nodes and ranks.
    pub(crate) shape: Shape,
    /// W of PROTOCOL 1.
    pub(crate) window: u16,
    /// S of PROTOCOL 1, for every node.
    pub(crate) slots: u16,
    /// The operations of every rank, grouped by simultaneous calls.
    pub(crate) calls: Vec<Vec<OpDesc>>,
    /// The maximum number of lost packets.
    pub(crate) losses: u8,
    /// The maximum number of duplicated packets.
    pub(crate) duplicates: u8,
    /// The maximum number of timers that fire while packets are in flight. Otherwise any timer may fire.
    pub(crate) early_timers: u8,
    /// The maximum number of device restarts; the controller starts a new epoch after each.
    pub(crate) restarts: u8,
    /// The maximum number of answers that a node queues for a child: fewer than in production, to limit the states.
    pub(crate) credit_max: u16,
    /// Whether a machine may receive two packets before it sends.
    pub(crate) bursts: bool,
    /// The broken rules.
    pub(crate) rules: Rules,
}

impl Scope {
    /// Create a scope of one all-reduce of `chunks` chunks, without faults.
    pub(crate) fn new(shape: Shape, (window, slots): (u16, u16), chunks: usize) -> Self {
        Self {
            shape,
            window,
            slots,
            calls: vec![vec![all_reduce(chunks)]],
            losses: 0,
            duplicates: 0,
            early_timers: 0,
            restarts: 0,
            credit_max: 2,
            bursts: false,
            rules: Rules::default(),
        }
    }

    /// Set the numbers of losses, duplicates and early timers.
    pub(crate) fn with_faults(self, losses: u8, duplicates: u8, early_timers: u8) -> Self {
        Self { losses, duplicates, early_timers, ..self }
    }

    /// Set the calls.
    pub(crate) fn with_calls(self, calls: Vec<Vec<OpDesc>>) -> Self {
        Self { calls, ..self }
    }

    /// Set the number of restarts.
    pub(crate) fn with_restarts(self, restarts: u8) -> Self {
        Self { restarts, ..self }
    }

    /// Allow bursts of two packets.
    pub(crate) fn with_bursts(self) -> Self {
        Self { bursts: true, ..self }
    }

    /// Break these rules.
    pub(crate) fn with_rules(self, rules: Rules) -> Self {
        Self { rules, ..self }
    }

    /// All operations in the order of their calls, with their seqs.
    pub(crate) fn ops(&self) -> Vec<(OpDesc, Range<u64>)> {
        let mut next = 0;
        let calls = self.calls.iter().flatten();
        calls
            .map(|desc| {
                let first = next;
                next += desc.count.div_ceil(ELEMENTS).max(1);
                (*desc, first..next)
            })
            .collect()
    }

    /// Whether there are enough slots for the window, so that a device accepts the group.
    pub(crate) fn is_sound(&self) -> bool {
        2 * self.window <= self.slots
    }

    /// The epoch in which a run with all its restarts ends.
    pub(crate) fn last_epoch(&self) -> u16 {
        1 + u16::from(self.restarts)
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { window, slots, losses, duplicates, early_timers, restarts, bursts, .. } = self;
        let chunks = self.ops().last().map_or(0, |(_, seqs)| seqs.end);
        write!(f, "{} ({window},{slots}), {chunks} chunks in {} calls, ", outline(&self.shape), self.calls.len())?;
        write!(f, "{losses} losses, {duplicates} duplicates, {early_timers} early timers, {restarts} restarts")?;
        f.write_str(if *bursts { ", bursts" } else { "" })?;
        let Rules { trusting, counted, one_epoch, timeless } = self.rules;
        let rules = [(trusting, "trusting"), (counted, "counted"), (one_epoch, "one epoch"), (timeless, "timeless")];
        rules.iter().filter(|rule| rule.0).try_for_each(|rule| write!(f, ", {}", rule.1))
    }
}

/// Return a shape with nodes as brackets.
fn outline(shape: &Shape) -> String {
    match shape {
        Shape::Rank(rank) => rank.to_string(),
        Shape::Node(children) => format!("[{}]", children.iter().map(outline).collect::<Vec<_>>().join(" ")),
    }
}

/// An all-reduce of `chunks` chunks, the last one short.
pub(crate) fn all_reduce(chunks: usize) -> OpDesc {
    OpDesc::all_reduce(Dtype::U64, ReduceOp::Sum, (chunks as u64 - 1) * ELEMENTS + 1)
}

/// Ranks below one node.
pub(crate) fn one_level(ranks: usize) -> Shape {
    Shape::Node((0..ranks).map(Shape::Rank).collect())
}

/// A root above nodes with these numbers of ranks; 0 stands for a rank attached to the root itself.
pub(crate) fn two_levels(leaves: &[usize]) -> Shape {
    let mut next = 0;
    let mut rank = || {
        next += 1;
        Shape::Rank(next - 1)
    };
    let leaf = |&ranks: &usize| match ranks {
        0 => rank(),
        _ => Shape::Node((0..ranks).map(|_| rank()).collect()),
    };
    Shape::Node(leaves.iter().map(leaf).collect())
}

/// A device and its neighbours.
#[derive(Debug)]
pub(crate) struct Place {
    /// Its parent and its child index there.
    pub(crate) parent: Option<(usize, u16)>,
    /// The number of its children.
    pub(crate) children: u16,
    /// The ranks of its subtree.
    pub(crate) ranks: Vec<usize>,
}

/// The tree's connections.
#[derive(Debug, Default)]
pub(crate) struct Wiring {
    /// Devices, parents first.
    pub(crate) devices: Vec<Place>,
    /// Each rank's device and its child index there.
    pub(crate) ranks: Vec<(usize, u16)>,
}

impl Wiring {
    /// Wire a shape.
    pub(crate) fn new(shape: &Shape) -> Self {
        let mut wiring = Self::default();
        wiring.add(shape, None);
        wiring
    }

    fn add(&mut self, shape: &Shape, parent: Option<(usize, u16)>) {
        match shape {
            Shape::Rank(rank) => {
                assert_eq!(*rank, self.ranks.len(), "ranks are numbered from left to right");
                self.ranks.push(parent.expect("the root is a node"));
                let above = std::iter::successors(parent, |&(device, _)| self.devices[device].parent);
                let above: Vec<usize> = above.map(|(device, _)| device).collect();
                above.into_iter().for_each(|device| self.devices[device].ranks.push(*rank));
            }
            Shape::Node(children) => {
                let device = self.devices.len();
                self.devices.push(Place { parent, children: children.len() as u16, ranks: Vec::new() });
                for (i, child) in children.iter().enumerate() {
                    self.add(child, Some((device, i as u16)));
                }
            }
        }
    }

    /// Return the machine that an address belongs to: devices first, then ranks.
    pub(crate) fn machine(&self, addr: Addr) -> usize {
        match addr {
            Addr::Emu(n) if n >= RANKS_FROM => self.devices.len() + (n - RANKS_FROM) as usize,
            Addr::Emu(n) => n as usize,
            other => panic!("{other} is not wired"),
        }
    }

    /// Return a machine's address.
    pub(crate) fn addr(&self, machine: usize) -> Addr {
        match machine.checked_sub(self.devices.len()) {
            Some(rank) => Addr::Emu(RANKS_FROM + rank as u32),
            None => Addr::Emu(machine as u32),
        }
    }

    /// Return a machine's name in traces.
    pub(crate) fn name(&self, machine: usize) -> String {
        match machine.checked_sub(self.devices.len()) {
            Some(rank) => format!("rank {rank}"),
            None => format!("device {machine}"),
        }
    }

    /// Return a device's position in the tree.
    pub(crate) fn tree(&self, device: usize) -> TreeConfig {
        let place = &self.devices[device];
        let parent = place.parent.map(|(parent, child)| NodeParent {
            data_addrs: std::iter::once(self.addr(parent)).collect(),
            child: ChildIndex(child),
        });
        TreeConfig { tree: TREE, parent, children: place.children, ranks: Default::default() }
    }

    /// Return the group as it is on a device.
    pub(crate) fn group(&self, scope: &Scope, device: usize, epoch: u16) -> GroupConfig {
        let epoch = on_wire(scope, epoch);
        let key = |(parent, child): (usize, u16)| secret(parent).child_key(GROUP, epoch, ChildIndex(child));
        // A device refuses too few slots: unsound sizes are set after it has accepted the group.
        let (window, slots) = if scope.is_sound() { (scope.window, scope.slots) } else { (1, scope.slots.max(2)) };
        GroupConfig {
            group: GROUP,
            tree: TREE,
            epoch,
            order: Order::Arrival,
            secret: secret(device),
            parent_key: self.devices[device].parent.map_or(0, key),
            shared: None,
            parent_shared: None,
            window_max: window,
            slots,
            chunk_len_bytes: CHUNK_LEN_BYTES,
            ranks: NonZeroU32::new(self.ranks.len() as u32).expect("a cluster has ranks"),
            lease_ms: 3_600_000,
            timers: TIMERS.into(),
            zero_copy: ChildMask::EMPTY,
        }
    }

    /// Return a rank's endpoint.
    pub(crate) fn endpoint(&self, scope: &Scope, rank: usize, epoch: u16) -> EndpointConfig {
        let (device, child) = self.ranks[rank];
        let salt = 0x5a17_0000 | (rank as u32) << 8 | u32::from(epoch);
        let epoch = on_wire(scope, epoch);
        EndpointConfig {
            group: GROUP,
            epoch,
            rank: Rank(rank as u32),
            ranks: self.ranks.len() as u32,
            child: ChildIndex(child),
            key: secret(device).child_key(GROUP, epoch, ChildIndex(child)),
            shared_key: None,
            parents: vec![self.addr(device)],
            window_max: if scope.rules.counted { u16::MAX } else { scope.window },
            window_start: scope.window,
            chunk_len_bytes: CHUNK_LEN_BYTES,
            timers: TIMERS,
            table_version: 1,
            salt,
        }
    }
}

/// Timers that no round-trip time of a walk reaches (`packing`): once a hop has measured one, it is shorter.
const TIMERS: HopTimers =
    HopTimers { probe_max: Duration::from_secs(100), dead: Duration::from_secs(3600), ..HopTimers::DEFAULT };

/// Return an epoch as packets carry it.
fn on_wire(scope: &Scope, epoch: u16) -> Epoch {
    Epoch { term: 1, counter: if scope.rules.one_epoch { 1 } else { epoch } }
}

fn secret(device: usize) -> GroupSecret {
    GroupSecret([device as u8 + 1; 16])
}

/// The contents of each rank's buffer before and after an operation. Each rank, chunk and epoch has a distinct power of
/// two, so that missing, doubled and stale contributions are visible.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Data {
    ranks: usize,
    epoch: u16,
}

impl Data {
    /// The data of an epoch.
    pub(crate) fn new(ranks: usize, epoch: u16) -> Self {
        Self { ranks, epoch }
    }

    fn weight(self, rank: usize, seq: u64) -> u64 {
        let bit = usize::from(self.epoch - 1) * 32 + seq as usize * self.ranks + rank;
        assert!(bit < 64 && seq as usize * self.ranks < 32, "too many chunks for powers of two");
        1 << bit
    }

    /// Return an element of chunk `seq` of `rank`'s buffer before the operation.
    pub(crate) fn before(self, desc: &OpDesc, rank: usize, seq: u64) -> u64 {
        match desc.collective {
            Collective::Broadcast if desc.root.0 as usize != rank => u64::MAX,
            _ => self.weight(rank, seq),
        }
    }

    /// Return the expected element after the operation.
    pub(crate) fn after(self, desc: &OpDesc, rank: usize, seq: u64) -> u64 {
        let is_root = desc.root.0 as usize == rank;
        match desc.collective {
            Collective::AllReduce => (0..self.ranks).map(|rank| self.weight(rank, seq)).sum(),
            Collective::Reduce if is_root => (0..self.ranks).map(|rank| self.weight(rank, seq)).sum(),
            Collective::Broadcast => self.weight(desc.root.0 as usize, seq),
            Collective::Barrier | Collective::Reduce => self.before(desc, rank, seq),
            other => panic!("the oracle does not know {other}"),
        }
    }
}

/// The group of every scope.
pub(crate) const GROUP: GroupId = GroupId(7);
/// Elements in a chunk.
pub(crate) const ELEMENTS: u64 = CHUNK_LEN_BYTES as u64 / 8;
const CHUNK_LEN_BYTES: u16 = 64;
const TREE: TreeId = TreeId(1);
const RANKS_FROM: u32 = 1 << 16;
