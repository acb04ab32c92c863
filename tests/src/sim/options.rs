//! What a seed draws: the cluster, its operations and its faults.

use super::faults::Faults;
use super::planted::Planted;
use super::scenario::{Scenario, ScenarioKind};
use super::wiring::count_nodes;
use crate::oracle::{Shape, weight};
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::emu::LinkConfig;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::reduce::Kernel;

/// Draws of one seed, in a fixed order.
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

/// Who listens to shared addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// There are none.
    Off,
    /// Everybody.
    All,
    /// All but some in each group, who say so.
    Some,
    /// Everybody says so, but some hear nothing: their ports have joined in vain.
    Deaf,
}

impl Sharing {
    /// Tell whether a child of a device says that it listens.
    pub(super) fn claims(self, seed: u64, child: (usize, u16), group: usize) -> bool {
        match self {
            Self::Off => false,
            Self::All | Self::Deaf => true,
            Self::Some => !is_odd_one(seed, child, group),
        }
    }

    /// Tell whether it does.
    pub(super) fn hears(self, seed: u64, child: (usize, u16), group: usize) -> bool {
        self.claims(seed, child, group) && !(self == Self::Deaf && is_odd_one(seed, child, group))
    }
}

/// Every fourth.
fn is_odd_one(seed: u64, (device, child): (usize, u16), group: usize) -> bool {
    weight(&[seed, device as u64, u64::from(child), group as u64, 0x6561_7273]).is_multiple_of(4)
}

/// One communicator: all ranks, one tree, and what is called in it.
#[derive(Debug, Clone)]
pub struct GroupOptions {
    /// The index of its tree.
    pub tree: usize,
    /// The order in which contributions combine.
    pub order: Order,
    /// What every rank calls, unless the scenario says otherwise.
    pub ops: Vec<OpDesc>,
}

/// One cluster and what it does.
#[derive(Debug, Clone)]
pub struct Options {
    /// The seed that all this and the run are drawn from.
    pub seed: u64,
    /// Trees over the same ranks and the same devices.
    pub trees: Vec<Shape>,
    /// Ranks in each tree.
    pub ranks: usize,
    /// The communicators.
    pub groups: Vec<GroupOptions>,
    /// Shards of every device.
    pub shards: u16,
    /// `window_max` of every group.
    pub window: u16,
    /// Payload limit in bytes.
    pub chunk_len_bytes: u16,
    /// What every path is like.
    pub link: LinkConfig,
    /// Who listens to shared addresses.
    pub sharing: Sharing,
    /// Devices beyond those that the largest tree needs.
    pub spares: usize,
    /// What the links do wrong.
    pub faults: Faults,
    /// The most that a rank comes late with an operation.
    pub skew_max: Duration,
    /// What else happens.
    pub scenario: Scenario,
    /// What is wrong with the code.
    pub planted: Planted,
}

impl Options {
    /// Draw a cluster in which `kind` happens.
    pub fn draw(seed: u64, kind: ScenarioKind) -> Self {
        if kind == ScenarioKind::Reference {
            return Self::draw_by_reference(seed, kind as u64);
        }
        let mut draw = Draw::new(weight(&[seed, kind as u64]));
        let least = if matches!(kind, ScenarioKind::Mismatch | ScenarioKind::Ranks) { 2 } else { 1 };
        let ranks = draw_ranks(&mut draw).max(least);
        let trees = (0..1 + draw.below(2)).map(|_| draw_tree(&mut draw, ranks)).collect::<Vec<_>>();
        let chunk_len_bytes = 16 * (4 + draw.below(12) as u16);
        // Large clusters do little, so that every seed costs about the same.
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
            // Apart from the other draws, so that these stay what they were without it.
            sharing: Draw::new(weight(&[seed, kind as u64, 1])).one_of(&[
                Sharing::Off,
                Sharing::All,
                Sharing::All,
                Sharing::Some,
                Sharing::Deaf,
            ]),
            spares: if matches!(kind, ScenarioKind::Repair | ScenarioKind::Ranks) { draw_spares(seed) } else { 0 },
            faults,
            skew_max,
            scenario: Scenario::Calm,
            planted: Planted::default(),
        };
        // Apart from the other draws too. Half of the narrow links tell of congestion before they lose packets.
        let marks = Draw::new(weight(&[seed, kind as u64, 2])).chance(500);
        options.link.mark_queue_bytes = options.link.receive_queue_bytes.filter(|_| marks).map(|queue| queue / 2);
        let mut spells = Draw::new(weight(&[seed, kind as u64, 3]));
        options.faults.spells = Faults::draw_spells(&mut spells, ranks, options.trees.len());
        options.scenario = Scenario::draw(kind, &mut draw, &options);
        options
    }

    /// Return how many devices there are.
    pub(super) fn devices(&self) -> usize {
        self.trees.iter().map(count_nodes).max().unwrap_or(0) + self.spares
    }

    /// Tell whether ranks repair what they lose.
    pub(super) fn repairs(&self) -> bool {
        matches!(self.scenario, Scenario::Repair { .. } | Scenario::Ranks { .. })
    }

    /// Tell whether ranks die, and those that are left agree on that.
    pub(super) fn ranks_die(&self) -> bool {
        matches!(self.scenario, Scenario::Ranks { .. })
    }

    /// Return how many packets a port hands to its node in one go.
    pub(super) fn burst(&self) -> usize {
        if weight(&[self.seed, 0x6275_7273]).is_multiple_of(4) { 128 } else { 32 }
    }

    /// Return the order of a group; the attacker's own, behind the others, takes contributions as they come.
    pub(super) fn order(&self, group: usize) -> Order {
        self.groups.get(group).map_or(Order::Arrival, |group| group.order)
    }

    /// Return the index of a group's tree; the attacker's is on the first.
    pub(super) fn tree(&self, group: usize) -> usize {
        self.groups.get(group).map_or(0, |group| group.tree)
    }

    /// Return how many groups the devices serve, the attacker's too.
    pub(super) fn all_groups(&self) -> usize {
        self.groups.len() + usize::from(self.scenario == Scenario::Hostile)
    }

    /// Return what `rank` calls as operation `op` of `group`.
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

/// Enough for whole other trees, or for some, or none.
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

/// A collective of no elements yet, with a type and, where it combines, an operator that go together.
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

/// Links without limits, or narrow ones whose queues overflow when many send at once.
pub(super) fn draw_link(draw: &mut Draw) -> LinkConfig {
    let narrow = draw.chance(300);
    LinkConfig {
        latency: Duration::from_micros(draw.one_of(&[1, 5, 200])),
        bandwidth_bytes_per_s: narrow.then_some(1_000_000_000),
        receive_queue_bytes: narrow.then_some(4096 << draw.below(5)),
        mark_queue_bytes: None,
    }
}
