//! What a seed draws: the cluster, its operations and its faults.

use super::faults::Faults;
use super::paths::is_calm;
use super::planted::Planted;
use super::scenario::{Scenario, ScenarioKind};
use super::wiring::{count_nodes, on_network};
use crate::oracle::{Shape, weight};
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::emu::LinkConfig;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::port::Addr;
use sumac_hal::reduce::Kernel;

/// The random draws of one seed, in a fixed order.
#[derive(Debug, Clone)]
pub struct Draw {
    seed: u64,
    count: u64,
}

impl Draw {
    /// Start drawing from `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { seed, count: 0 }
    }

    /// Return 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.count += 1;
        weight(&[self.seed, self.count])
    }

    /// Return a number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// Return one of `items`.
    pub fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }

    /// Return true in `permille` of a thousand cases.
    pub fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }
}

/// Which children listen to shared addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// No shared addresses.
    Off,
    /// All children listen.
    All,
    /// Some children of each group do not listen, and do not claim to.
    Some,
    /// All claim to listen, but some receive nothing: their ports joined in vain.
    Deaf,
}

impl Sharing {
    /// Return whether a child of a device claims to listen.
    pub(super) fn claims_to_listen(self, seed: u64, child: (usize, u16), group: usize) -> bool {
        match self {
            Self::Off => false,
            Self::All | Self::Deaf => true,
            Self::Some => !is_fourth(seed, child, group),
        }
    }

    /// Return whether it receives shared packets.
    pub(super) fn receives(self, seed: u64, child: (usize, u16), group: usize) -> bool {
        self.claims_to_listen(seed, child, group) && !(self == Self::Deaf && is_fourth(seed, child, group))
    }
}

/// Selects every fourth child.
fn is_fourth(seed: u64, (device, child): (usize, u16), group: usize) -> bool {
    weight(&[seed, device as u64, u64::from(child), group as u64, 0x6561_7273]).is_multiple_of(4)
}

/// One communicator: all ranks, one tree, and the operations called in it.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// Index of its tree, unless a controller plans one.
    pub tree: usize,
    /// The order in which contributions combine.
    pub order: Order,
    /// The calls of every rank, unless the scenario differs.
    pub ops: Vec<OpDesc>,
}

/// One cluster and its workload.
#[derive(Debug, Clone)]
pub struct Options {
    /// The seed of this cluster and of the run.
    pub seed: u64,
    /// Trees over the same ranks and the same devices; with a controller, the fabric on which it plans its own.
    pub trees: Vec<Shape>,
    /// Ranks in each tree.
    pub ranks: usize,
    /// The communicators.
    pub groups: Vec<GroupOptions>,
    /// Shards of every device.
    pub shards: u16,
    /// `window_max` of every group; with a controller, of most.
    pub window: u16,
    /// Payload limit, in bytes.
    pub chunk_len_bytes: u16,
    /// Properties of every path.
    pub link: LinkConfig,
    /// Which children listen to shared addresses.
    pub sharing: Sharing,
    /// Devices beyond those that the largest tree needs.
    pub spares: usize,
    /// Link faults.
    pub faults: Faults,
    /// Maximum lateness of a rank's call.
    pub skew_max: Duration,
    /// The scenario.
    pub scenario: Scenario,
    /// The planted bug, if any.
    pub planted: Planted,
}

impl Options {
    /// Draw a cluster for a scenario of `kind`.
    pub fn draw(seed: u64, kind: ScenarioKind) -> Self {
        if kind == ScenarioKind::ZeroCopy {
            return Self::draw_zero_copy(seed, kind as u64);
        }
        if kind == ScenarioKind::Severing {
            return Self::draw_severing(seed, kind as u64);
        }
        let mut draw = Draw::new(weight(&[seed, kind as u64]));
        let least = if matches!(kind, ScenarioKind::Mismatch | ScenarioKind::Ranks) { 2 } else { 1 };
        let ranks = draw_ranks(&mut draw).max(least);
        let trees = (0..1 + draw.below(2)).map(|_| draw_tree(&mut draw, ranks)).collect::<Vec<_>>();
        let chunk_len_bytes = 16 * (4 + draw.below(12) as u16);
        // Longer ones leave room for narrow paths.
        let times = Draw::new(weight(&[seed, kind as u64, 4])).one_of(&[1, 2, 4]);
        let chunk_len_bytes = if kind == ScenarioKind::Paths { times * chunk_len_bytes } else { chunk_len_bytes };
        // Large clusters have few operations, so that every seed costs about the same.
        let most_chunks = (400 / ranks as u64).clamp(2, 40);
        let groups = (0..1 + draw.below(3))
            .map(|_| GroupOptions {
                tree: draw.below(trees.len() as u64) as usize,
                order: draw.one_of(&[Order::Arrival, Order::TreeFold, Order::TreePairwise]),
                ops: draw_ops(&mut draw, ranks, chunk_len_bytes, most_chunks),
            })
            .collect();
        let faults = Faults::draw(&mut draw);
        let skew_max = Duration::from_micros(draw.one_of(&[0, 50, 5_000, 500_000]));
        let mut options = Self {
            seed,
            trees,
            ranks,
            groups,
            shards: draw.one_of(&[1, 1, 2, 3]),
            window: draw.one_of(&[1, 2, 3, 8, 32]),
            chunk_len_bytes,
            link: draw_link(&mut draw),
            // Drawn separately, so that the other draws of a seed stay the same.
            sharing: Draw::new(weight(&[seed, kind as u64, 1])).one_of(&[
                Sharing::Off,
                Sharing::All,
                Sharing::All,
                Sharing::Some,
                Sharing::Deaf,
            ]),
            spares: match kind {
                ScenarioKind::Recovery | ScenarioKind::Ranks | ScenarioKind::Paths => draw_spares(seed),
                _ => 0,
            },
            faults,
            skew_max,
            scenario: Scenario::Calm,
            planted: Planted::default(),
        };
        // Also drawn separately. Half of the narrow links mark packets before they drop them.
        let marks = Draw::new(weight(&[seed, kind as u64, 2])).chance(500);
        options.link.mark_queue_bytes = options.link.receive_queue_bytes.filter(|_| marks).map(|queue| queue / 2);
        let mut spells = Draw::new(weight(&[seed, kind as u64, 3]));
        options.faults.spells = Faults::draw_spells(&mut spells, ranks, options.trees.len());
        if kind == ScenarioKind::Paths && is_calm(seed) {
            options.faults = Faults::default();
        }
        options.scenario = Scenario::draw(kind, &mut draw, &options);
        options
    }

    /// Return the number of devices.
    pub(super) fn devices(&self) -> usize {
        self.trees.iter().map(count_nodes).max().unwrap_or(0) + self.spares
    }

    /// Return whether ranks recover from lost trees.
    pub(super) fn recovers(&self) -> bool {
        matches!(self.scenario, Scenario::Recovery { .. } | Scenario::Ranks { .. } | Scenario::Paths { .. })
    }

    /// Return whether paths carry packets of different lengths, so that components know addresses that they probe.
    pub(super) fn has_paths(&self) -> bool {
        matches!(self.scenario, Scenario::Paths { .. })
    }

    /// Return the address by which components know a port.
    pub(super) fn address(&self, addr: Addr) -> Addr {
        if self.has_paths() { on_network(addr) } else { addr }
    }

    /// Return whether a stranger forges packets about paths.
    pub(super) fn has_stranger(&self) -> bool {
        self.has_paths() && weight(&[self.seed, 0x7374_7261]).is_multiple_of(4)
    }

    /// Return whether ranks die and the survivors agree on that.
    pub(super) fn ranks_die(&self) -> bool {
        matches!(self.scenario, Scenario::Ranks { .. })
    }

    /// Return how many packets a port returns per burst.
    pub(super) fn burst(&self) -> usize {
        if weight(&[self.seed, 0x6275_7273]).is_multiple_of(4) { 128 } else { 32 }
    }

    /// Return whether ports return trains, as with receive offload.
    pub(super) fn has_trains(&self) -> bool {
        weight(&[self.seed, 0x7472_6169]).is_multiple_of(2)
    }

    /// Return the order of a group. The attacker's group, after all others, uses order of arrival.
    pub(super) fn order(&self, group: usize) -> Order {
        self.groups.get(group).map_or(Order::Arrival, |group| group.order)
    }

    /// Return the index of a group's tree. The attacker's group uses the first.
    pub(super) fn tree(&self, group: usize) -> usize {
        self.groups.get(group).map_or(0, |group| group.tree)
    }

    /// Return how many groups the devices serve, including the attacker's.
    pub(super) fn all_groups(&self) -> usize {
        self.groups.len() + usize::from(self.scenario == Scenario::Hostile)
    }

    /// Return the call of `rank` as operation `op` of `group`.
    pub fn call(&self, group: usize, rank: usize, op: usize) -> OpDesc {
        let common = self.groups[group].ops[op];
        match &self.scenario {
            Scenario::Mismatch { group: wrong, op: at, calls } if (*wrong, *at) == (group, op) => {
                calls.iter().find(|(caller, _)| *caller == rank).map_or(common, |(_, desc)| *desc)
            }
            _ => common,
        }
    }
}

/// Draw spares: enough for whole other trees, for some nodes, or none.
fn draw_spares(seed: u64) -> usize {
    Draw::new(weight(&[seed, 0x7370_6172])).one_of(&[0, 1, 2, 4, 20])
}

fn draw_ranks(draw: &mut Draw) -> usize {
    if draw.chance(50) { draw.one_of(&[33, 64, 256]) } else { draw.one_of(&[1, 2, 3, 4, 5, 7, 8, 9, 13, 21]) }
}

fn draw_tree(draw: &mut Draw, ranks: usize) -> Shape {
    let levels = 1 + draw.below(4);
    draw_shape(draw, ranks, levels, &mut 0)
}

pub(super) fn draw_shape(draw: &mut Draw, ranks: usize, levels: u64, next: &mut usize) -> Shape {
    let mut children = Vec::new();
    let mut left = ranks;
    while left > 0 {
        let take = if levels > 1 { 1 + draw.below(left as u64) as usize } else { 1 };
        if take == 1 && (levels == 1 || draw.chance(300)) {
            children.push(Shape::Rank(*next));
            *next += 1;
        } else {
            children.push(draw_shape(draw, take, levels - 1, next));
        }
        left -= take;
    }
    Shape::Node(children)
}

pub(super) fn draw_ops(draw: &mut Draw, ranks: usize, chunk_len_bytes: u16, most_chunks: u64) -> Vec<OpDesc> {
    let count = 1 + draw.below(6);
    (0..count)
        .map(|_| {
            if draw.chance(200) {
                return OpDesc::barrier();
            }
            let desc = draw_op(draw, ranks);
            let chunk = u64::from(chunk_len_bytes) / desc.partial_bytes() as u64;
            let most = chunk * most_chunks;
            let count = draw.one_of(&[0, 1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, most]);
            let count = if draw.chance(500) { count } else { draw.below(most) };
            OpDesc { count, ..desc }
        })
        .collect()
}

/// Draw a collective without a count: with a type and, if it combines, a matching operator.
pub(super) fn draw_op(draw: &mut Draw, ranks: usize) -> OpDesc {
    let dtype = draw.one_of(Dtype::ALL);
    let ops: Vec<ReduceOp> = ReduceOp::ALL.iter().copied().filter(|&op| Kernel::new(dtype, op).is_some()).collect();
    let (op, root) = (draw.one_of(&ops), Rank(draw.below(ranks as u64) as u32));
    match draw.below(8) {
        0 => OpDesc::reduce(dtype, op, root, 0),
        1 => OpDesc::broadcast(dtype, root, 0),
        2 => OpDesc::reduce_scatter(dtype, op, 0),
        3 => OpDesc::all_gather(dtype, 0),
        _ => OpDesc::all_reduce(dtype, op, 0),
    }
}

/// Draw links: unlimited, or narrow ones whose queues overflow when many send at once.
pub(super) fn draw_link(draw: &mut Draw) -> LinkConfig {
    let narrow = draw.chance(300);
    LinkConfig {
        latency: Duration::from_micros(draw.one_of(&[1, 5, 200])),
        bandwidth_bytes_per_s: narrow.then_some(1_000_000_000),
        receive_queue_bytes: narrow.then_some(4096 << draw.below(5)),
        mark_queue_bytes: None,
        max_packet_len_bytes: None,
    }
}
