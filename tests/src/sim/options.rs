//! What a seed draws: the cluster, its operations and its faults.

use crate::oracle::{Shape, weight};
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

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

/// Faults of the links, in parts per thousand of the packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Lost.
    pub loss: u32,
    /// Delivered twice.
    pub duplicate: u32,
    /// Delayed by up to `delay_max`, so that later ones overtake.
    pub reorder: u32,
    /// Damaged.
    pub corrupt: u32,
    /// The most extra delay.
    pub delay_max: Duration,
}

/// One cluster and what it does.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where everything else was drawn from.
    pub seed: u64,
    /// The tree over the ranks.
    pub shape: Shape,
    /// Ranks of the tree.
    pub ranks: usize,
    /// Communicators over the same ranks and nodes.
    pub groups: usize,
    /// Workers a node.
    pub shards: u16,
    /// Chunks in flight.
    pub window: u16,
    /// Payload bytes a packet.
    pub chunk_len_bytes: u16,
    /// The declared order.
    pub order: Order,
    /// What every rank calls, one list a group.
    pub ops: Vec<Vec<OpDesc>>,
    /// The links' faults.
    pub faults: Faults,
    /// The most that a rank comes late with an operation.
    pub skew_max: Duration,
}

impl Options {
    /// Draw a cluster.
    pub fn draw(seed: u64) -> Self {
        let mut draw = Draw::new(seed);
        let ranks = 1 + draw.one_of(&[0, 1, 2, 3, 3, 4, 6, 7, 8, 12, 20]) as usize;
        let levels = 1 + draw.below(3);
        let mut next = 0;
        let shape = draw_shape(&mut draw, ranks, levels, &mut next);
        let order = draw.one_of(&[Order::Arrival, Order::TreeFold, Order::TreePairwise]);
        let chunk_len_bytes = 16 * (4 + draw.below(12) as u16);
        let groups = 1 + draw.below(3) as usize;
        let ops = (0..groups).map(|_| draw_ops(&mut draw, chunk_len_bytes)).collect();
        let (faults, skew_max) = draw_faults(&mut draw);
        Self {
            seed,
            shape,
            ranks,
            groups,
            shards: draw.one_of(&[1, 1, 2, 3]),
            window: draw.one_of(&[1, 2, 3, 8, 32]),
            chunk_len_bytes,
            order,
            ops,
            faults,
            skew_max,
        }
    }
}

fn draw_shape(draw: &mut Draw, ranks: usize, levels: u64, next: &mut usize) -> Shape {
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

fn draw_ops(draw: &mut Draw, chunk_len_bytes: u16) -> Vec<OpDesc> {
    let count = 1 + draw.below(6);
    (0..count)
        .map(|_| {
            if draw.chance(200) {
                return OpDesc::barrier();
            }
            let dtype = draw.one_of(Dtype::ALL);
            let chunk = u64::from(chunk_len_bytes) / dtype.accumulator().size_bytes() as u64;
            let most = chunk * 40;
            let count = draw.one_of(&[0, 1, 2, chunk - 1, chunk, chunk + 1, 3 * chunk, most]);
            let count = if draw.chance(500) { count } else { draw.below(most) };
            OpDesc::all_reduce(dtype, draw.one_of(ReduceOp::ALL), count)
        })
        .collect()
}

/// Swarm testing: whole kinds of fault are off at random, so that rare mixes appear.
fn draw_faults(draw: &mut Draw) -> (Faults, Duration) {
    let mut permille = |most: u64| if draw.chance(400) { draw.below(most + 1) as u32 } else { 0 };
    let faults = Faults {
        loss: permille(300),
        duplicate: permille(300),
        reorder: permille(500),
        corrupt: permille(100),
        delay_max: Duration::from_micros(u64::from(permille(1000)) * 10),
    };
    (faults, Duration::from_micros(draw.one_of(&[0, 50, 5_000, 500_000])))
}
