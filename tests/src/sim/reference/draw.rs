//! What a seed draws of contributions by reference: who makes them, with which engine and rings, and what goes wrong
//! there. Everything else is [`Options`]'.

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

/// Contributions by reference, and what goes wrong with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByReference {
    /// Engines, rings and memory.
    pub setup: Setup,
    /// What goes wrong, besides the links: what a shrinker makes fewer.
    pub mishaps: Vec<Mishap>,
}

/// Engines, rings and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    /// Of a thousand ranks, how many contribute by reference; the others by packets.
    pub share: u64,
    /// What every engine can do.
    pub profile: Profile,
    /// The most steps of a chain.
    pub max_steps: u32,
    /// Descriptors that wait in an engine.
    pub depth: u32,
    /// What an engine's addresses are multiples of, in bytes.
    pub alignment_bytes: u32,
    /// How long a step takes, about.
    pub step: Duration,
    /// Places of a ring.
    pub ring: u32,
    /// Chunks that fit a bounce buffer.
    pub bounce_chunks: u64,
    /// Of a thousand buffers, how many are registered.
    pub registered: u64,
    /// The most that a side takes to look at its rings.
    pub lag: Duration,
    /// How long it takes to take memory away from a device, which may go on meanwhile.
    pub severing: Duration,
}

/// A moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// This long after the beginning.
    After(Duration),
    /// When a device comes to a point for the so-manieth time, from 1 on.
    Point(CrashPoint, u64),
}

/// A point in the life of a chunk by reference at which a device may die.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CrashPoint {
    /// A contribution was fetched, not all of them.
    Pulled,
    /// All are combined, and nothing is published.
    Reduced,
    /// The result is published, and nothing is written back.
    Published,
    /// A result is half-written to a rank's memory.
    Writing,
    /// It is written back everywhere, and the engine has not said so.
    Written,
    /// The device knows it, and has not put the answer into the completion ring.
    Answering,
}

impl CrashPoint {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Pulled, Self::Reduced, Self::Published, Self::Writing, Self::Written, Self::Answering];
}

/// What becomes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is gone for good; its redo slots are not.
    Dies,
    /// It is gone, and is there again after this long, with another boot id and nothing but its redo memory.
    Restarts(Duration),
    /// Its runtime stands still for so long, while its engine finishes what it has.
    Stands(Duration),
}

/// Something that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mishap {
    /// A chain fails half-way: each device's so-manieth in each of its lives, from 0 on, after so many steps and a half.
    Chain {
        /// Which device.
        device: usize,
        /// Which of its chains.
        nth: u64,
        /// After how many steps, modulo their number and one.
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
        /// When; a point is one of its leaf's.
        when: When,
        /// Its memory is taken away from the engine at once, and not when the device lets go of it.
        is_revoked: bool,
    },
}

impl Setup {
    /// Tell whether a rank contributes by reference in one of the group's lives.
    pub(super) fn is_by_reference(&self, seed: u64, life: u64, rank: usize) -> bool {
        weight(&[seed, life, rank as u64, 0x7368_6172]) % 1000 < self.share
    }
}

impl ByReference {
    /// Return which chains of a device fail.
    pub(super) fn failing(&self, of: usize) -> BTreeMap<u64, usize> {
        let chain = |mishap: &Mishap| match *mishap {
            Mishap::Chain { device, nth, steps } if device == of => Some((nth, steps)),
            _ => None,
        };
        self.mishaps.iter().filter_map(chain).collect()
    }
}

impl Options {
    /// Draw a cluster with contributions by reference.
    pub(in crate::sim) fn draw_by_reference(seed: u64, kind: u64) -> Self {
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
        // Drawn apart: what else seeds draw stays what it was.
        let mut apart = Draw::new(weight(&[seed, kind, 0x7365_7665]));
        let severing = Duration::from_millis(apart.one_of(&[0, 1, 1_000, 8_000, 8_000]));
        let setup = Setup { severing, ..draw_setup(&mut draw, chunk_len_bytes) };
        let mishaps = draw_mishaps(&mut draw, &options, &setup);
        // There is always another tree.
        options.spares = mishaps.iter().filter(|mishap| matches!(mishap, Mishap::Device { .. })).count();
        options.scenario = Scenario::Reference(ByReference { setup, mishaps });
        options
    }

    /// Leave only these of the mishaps by reference, counted as they were drawn.
    pub fn keep_mishaps(&mut self, kept: &[usize]) {
        if let Scenario::Reference(by) = &mut self.scenario {
            let mut index = 0..;
            by.mishaps.retain(|_| index.next().is_some_and(|index| kept.contains(&index)));
        }
    }

    pub(in crate::sim) fn by_reference(&self) -> Option<&ByReference> {
        match &self.scenario {
            Scenario::Reference(by) => Some(by),
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
    // Most points are those of a leaf with ranks by reference.
    let referred: Vec<usize> =
        (0..options.ranks).filter(|&rank| setup.is_by_reference(options.seed, 0, rank)).collect();
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
