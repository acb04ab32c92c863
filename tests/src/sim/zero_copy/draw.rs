//! What a seed draws for zero-copy ranks: which ranks, engines and rings, and mishaps. Everything else is in
//! [`Options`].

use super::super::Scenario;
use super::super::faults::{Faults, moment};
use super::super::options::{Draw, GroupOptions, Options, Sharing, draw_link, draw_ops, draw_shape};
use super::super::planted::Planted;
use super::super::wiring::{Wiring, count_nodes};
use crate::oracle::weight;
use std::collections::BTreeMap;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::dma::Profile;

/// Zero-copy ranks, and what goes wrong with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZeroCopy {
    /// Engines, rings and memory.
    pub setup: Setup,
    /// Mishaps besides link faults; a shrinker removes some.
    pub mishaps: Vec<Mishap>,
    /// A device stalls until ranks sever their memory from it, and goes on meanwhile.
    pub severs: bool,
}

/// Engines, rings and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// Share of zero-copy ranks, in thousandths; the others use packets.
    pub share: u64,
    /// The profile of every engine.
    pub profile: Profile,
    /// Maximum number of steps per chain.
    pub max_steps: u32,
    /// Descriptors that an engine queues.
    pub depth: u32,
    /// Alignment of an engine's addresses, in bytes.
    pub alignment_bytes: u32,
    /// Approximate duration of a step.
    pub step: Duration,
    /// Entries of a ring.
    pub ring: u32,
    /// Chunks that fit a bounce buffer.
    pub bounce_chunks: u64,
    /// Share of registered buffers, in thousandths.
    pub registered: u64,
    /// Maximum delay before a side polls its rings.
    pub lag: Duration,
    /// Time to sever memory from a device, which may continue meanwhile.
    pub severing: Duration,
}

/// A moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// At a time after the start.
    After(Duration),
    /// When a device reaches a point for the n-th time, counted from 1.
    Point(CrashPoint, u64),
}

/// A point in the processing of a zero-copy chunk at which a device may die.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CrashPoint {
    /// Some contributions are fetched, not all.
    Pulled,
    /// All are combined, and nothing is published.
    Reduced,
    /// The result is published, and nothing is written back.
    Published,
    /// The result is half-written to a rank's memory.
    Writing,
    /// The result is written everywhere, and the engine has not completed the chain.
    Written,
    /// The chain is complete, and the answer is not in the completion ring.
    Answering,
}

impl CrashPoint {
    /// All points.
    pub const ALL: [Self; 6] =
        [Self::Pulled, Self::Reduced, Self::Published, Self::Writing, Self::Written, Self::Answering];
}

/// The fate of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It dies for good; its redo slots remain readable.
    Dies,
    /// It restarts after this long, with another boot id and only its redo memory.
    Restarts(Duration),
    /// Its runtime stalls for this long, while its engine finishes its queue.
    Stands(Duration),
}

/// A mishap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mishap {
    /// A chain fails half-way: each device's n-th in each of its incarnations, from 0 on, after some steps and a half.
    Chain {
        /// Index of the device.
        device: usize,
        /// Index of the chain.
        nth: u64,
        /// Steps before the failure, modulo their number plus one.
        steps: usize,
    },
    /// A device is lost.
    Device {
        /// Which.
        device: usize,
        /// When.
        when: When,
        /// How.
        fate: Fate,
    },
    /// A rank dies.
    Rank {
        /// Which.
        rank: usize,
        /// When; points are those of its leaf device.
        when: When,
        /// True if its memory is revoked from the engine at once, false if the device releases it.
        is_revoked: bool,
    },
}

impl Setup {
    /// Return whether a rank is zero-copy in an incarnation of the group.
    pub(super) fn is_zero_copy(&self, seed: u64, incarnation: u64, rank: usize) -> bool {
        weight(&[seed, incarnation, rank as u64, 0x7368_6172]) % 1000 < self.share
    }
}

impl ZeroCopy {
    /// Return the chains of a device that fail.
    pub(super) fn failing(&self, of: usize) -> BTreeMap<u64, usize> {
        let chain = |mishap: &Mishap| match *mishap {
            Mishap::Chain { device, nth, steps } if device == of => Some((nth, steps)),
            _ => None,
        };
        self.mishaps.iter().filter_map(chain).collect()
    }
}

impl Options {
    /// Draw a cluster with zero-copy ranks.
    pub(in crate::sim) fn draw_zero_copy(seed: u64, kind: u64) -> Self {
        let mut draw = Draw::new(weight(&[seed, kind]));
        let ranks = draw.one_of(&[1, 2, 2, 3, 3, 4, 5, 6, 8]);
        let levels = draw.one_of(&[1, 1, 2, 2, 3]);
        let trees = vec![draw_shape(&mut draw, ranks, levels, &mut 0)];
        let chunk_len_bytes = 16 * (4 + draw.below(9) as u16);
        let most_chunks = (48 / ranks as u64).clamp(4, 16);
        let ops = draw_ops(&mut draw, ranks, chunk_len_bytes, most_chunks);
        let order = draw.one_of(&[Order::Arrival, Order::TreeFold, Order::TreePairwise]);
        let faults = Faults::draw(&mut draw);
        let skew_max = Duration::from_micros(draw.one_of(&[0, 50, 5_000]));
        let mut options = Self {
            seed,
            ranks,
            groups: vec![GroupOptions { tree: 0, order, ops }],
            shards: 1,
            window: draw.one_of(&[1, 2, 3, 8, 32]),
            chunk_len_bytes,
            link: draw_link(&mut draw),
            sharing: draw.one_of(&[Sharing::Off, Sharing::All, Sharing::Some]),
            spares: 0,
            faults,
            skew_max,
            scenario: Scenario::Calm,
            planted: Planted::default(),
            trees,
        };
        options.faults.spells = Faults::draw_spells(&mut draw, ranks, 1);
        // Drawn separately, so that the other draws of a seed stay the same.
        let mut apart = Draw::new(weight(&[seed, kind, 0x7365_7665]));
        let severing = Duration::from_millis(apart.one_of(&[0, 1, 1_000, 8_000, 8_000]));
        let setup = Setup { severing, ..draw_setup(&mut draw, chunk_len_bytes) };
        let mishaps = draw_mishaps(&mut draw, &options, &setup);
        // There is always another tree.
        options.spares = mishaps.iter().filter(|mishap| matches!(mishap, Mishap::Device { .. })).count();
        options.scenario = Scenario::ZeroCopy(ZeroCopy { setup, mishaps, severs: false });
        options
    }

    /// Draw a cluster with zero-copy ranks that sever their memory from a stalled device, which goes on meanwhile.
    pub(in crate::sim) fn draw_severing(seed: u64, kind: u64) -> Self {
        let mut options = Self::draw_zero_copy(seed, kind);
        let mut draw = Draw::new(weight(&[seed, kind, 0x7374_616e]));
        let leaves: Vec<usize> = {
            let wiring = Wiring::new(&options, 0, count_nodes(&options.trees[0]));
            wiring.ranks.iter().map(|&(node, ..)| wiring.nodes[node].device).collect()
        };
        // Few losses of other kinds, so that most devices that stall are still waited for.
        if let Scenario::ZeroCopy(by) = &mut options.scenario {
            (by.setup.share, by.setup.severing, by.severs) = (1000, Duration::from_secs(8), true);
            by.setup.registered = draw.one_of(&[1000, 1000, 500]);
            by.mishaps.retain(|mishap| matches!(mishap, Mishap::Chain { .. }));
            let when = When::Point(draw.one_of(&CrashPoint::ALL), 1 + draw.below(8));
            let fate = Fate::Stands(Duration::from_millis(draw.one_of(&[8_000, 10_000, 12_000])));
            by.mishaps.push(Mishap::Device { device: draw.one_of(&leaves), when, fate });
        }
        options.spares = 1;
        options
    }

    /// Keep only these of the mishaps, by index as drawn.
    pub fn keep_mishaps(&mut self, kept: &[usize]) {
        if let Scenario::ZeroCopy(by) = &mut self.scenario {
            let mut index = 0..;
            by.mishaps.retain(|_| index.next().is_some_and(|index| kept.contains(&index)));
        }
    }

    pub(in crate::sim) fn zero_copy(&self) -> Option<&ZeroCopy> {
        match &self.scenario {
            Scenario::ZeroCopy(by) => Some(by),
            _ => None,
        }
    }
}

fn draw_setup(draw: &mut Draw, chunk_len_bytes: u16) -> Setup {
    let max_steps = draw.one_of(&[9, 12, 32, 64]);
    let alignments: &[u32] = if chunk_len_bytes.is_multiple_of(64) { &[1, 1, 16, 64] } else { &[1, 1, 16] };
    Setup {
        share: draw.one_of(&[1000, 1000, 700, 400]),
        profile: draw.one_of(&Profile::ALL),
        max_steps,
        depth: max_steps * draw.one_of(&[1, 2, 8]),
        alignment_bytes: draw.one_of(alignments),
        step: Duration::from_nanos(draw.one_of(&[40, 400, 4_000, 100_000])),
        ring: draw.one_of(&[2, 4, 16, 64]),
        bounce_chunks: draw.one_of(&[2, 3, 16]),
        registered: draw.one_of(&[1000, 1000, 500, 0]),
        lag: Duration::from_nanos(draw.one_of(&[0, 1_000, 50_000, 2_000_000])),
        severing: Duration::ZERO,
    }
}

fn draw_mishaps(draw: &mut Draw, options: &Options, setup: &Setup) -> Vec<Mishap> {
    let wiring = Wiring::new(options, 0, count_nodes(&options.trees[0]));
    let leaf = |rank: usize| wiring.nodes[wiring.ranks[rank].0].device;
    let mut mishaps = Vec::new();
    let failing = draw.one_of(&[0, 0, 50, 300]);
    for device in 0..wiring.nodes.len() {
        let failed = (0..64).filter(|_| draw.chance(failing)).collect::<Vec<u64>>();
        mishaps.extend(failed.into_iter().map(|nth| Mishap::Chain { device, nth, steps: draw.below(64) as usize }));
    }
    // Most points are those of a leaf with zero-copy ranks.
    let referred: Vec<usize> = (0..options.ranks).filter(|&rank| setup.is_zero_copy(options.seed, 0, rank)).collect();
    let losses = draw.one_of(&[0, 1, 1, 1, 2, 3]);
    for _ in 0..losses {
        let any = draw.below(options.ranks as u64) as usize;
        let rank = if referred.is_empty() || draw.chance(100) { any } else { draw.one_of(&referred) };
        let point = draw.one_of(&CrashPoint::ALL);
        let most = draw.one_of(&[1, 2, 4, 20]);
        let nth = 1 + draw.below(most);
        let when = if draw.chance(850) { When::Point(point, nth) } else { When::After(moment(draw)) };
        if options.ranks > 1 && draw.chance(200) {
            mishaps.push(Mishap::Rank { rank, when, is_revoked: draw.chance(500) });
            continue;
        }
        let device = if draw.chance(850) { leaf(rank) } else { draw.below(wiring.nodes.len() as u64) as usize };
        let fate = match draw.below(5) {
            0 | 1 => Fate::Dies,
            2 | 3 => Fate::Restarts(Duration::from_millis(draw.one_of(&[1, 30, 2_000, 9_000]))),
            _ => Fate::Stands(Duration::from_millis(draw.one_of(&[20, 4_000, 8_000, 15_000]))),
        };
        mishaps.push(Mishap::Device { device, when, fate });
    }
    mishaps
}
