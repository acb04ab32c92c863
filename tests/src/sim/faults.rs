//! Link faults: probabilities, spells on single links, or a script that replays another run's faults.
//!
//! Swarm testing (Groce et al. 2012): each seed draws which kinds of fault occur at all, so that rare mixes appear and
//! no kind hides what another would show.

use super::options::Draw;
use super::wiring::{Wiring, node_addr, rank_addr};
use std::time::Duration;
use sumac_hal::emu::{Fabric, NthPacket, Partition, RandomFaults, Script, SlowLink};
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;

/// Link faults; shares are in thousandths of the packets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// Lost packets.
    pub loss: u16,
    /// Packets delivered twice.
    pub duplicate: u16,
    /// Packets delayed by up to `delay_max`, so that later ones overtake them.
    pub reorder: u16,
    /// Damaged packets.
    pub corrupt: u16,
    /// Maximum extra delay.
    pub delay_max: Duration,
    /// Links that are cut or slow for a while.
    pub spells: Vec<Spell>,
    /// Replaces all random faults: a recorded script. Spell lengths still extend the deadlines for errors.
    pub script: Option<Vec<NthPacket>>,
}

/// A period in which one direction of a link is cut or slow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spell {
    /// A rank with the link on its path to the root.
    pub rank: usize,
    /// Index of the tree.
    pub tree: usize,
    /// Nodes above the rank, modulo the length of its path.
    pub hop: usize,
    /// True if packets to the parent are affected, false if those to the child.
    pub up: bool,
    /// When it starts.
    pub start: Duration,
    /// How long it lasts.
    pub len: Duration,
    /// Extra delay of packets; `None` if they are lost.
    pub delay: Option<Duration>,
}

impl Faults {
    /// Draw probabilities: each kind of fault is off in six of ten cases.
    pub(super) fn draw(draw: &mut Draw) -> Self {
        let mut permille = |most: u64| if draw.chance(400) { draw.below(most + 1) as u16 } else { 0 };
        Self {
            loss: permille(300),
            duplicate: permille(300),
            reorder: permille(300),
            corrupt: permille(100),
            delay_max: Duration::from_micros(u64::from(permille(1000)) * 10),
            ..Self::default()
        }
    }

    /// Draw spells: cuts in one of five cases, slow links likewise, up to three of each.
    pub(super) fn draw_spells(draw: &mut Draw, ranks: usize, trees: usize) -> Vec<Spell> {
        let cuts = if draw.chance(200) { 1 + draw.below(3) } else { 0 };
        let slow = if draw.chance(200) { 1 + draw.below(3) } else { 0 };
        let spell = |n: u64| {
            let (start, len) = (moment(draw), moment(draw));
            let delay = Duration::from_micros(draw.one_of(&[1, 30, 1_000, 30_000]));
            Spell {
                rank: draw.below(ranks as u64) as usize,
                tree: draw.below(trees as u64) as usize,
                hop: draw.below(4) as usize,
                up: draw.chance(500),
                start,
                len,
                delay: (n >= cuts).then_some(delay),
            }
        };
        (0..cuts + slow).map(spell).collect()
    }

    /// Return the total length of spells: the extension of every deadline for errors.
    pub(super) fn spells_len(&self) -> Duration {
        self.spells.iter().map(|spell| spell.len + spell.delay.unwrap_or_default()).sum()
    }

    /// Install these faults on the links, of the trees that have a wiring. The run begins at `began`.
    pub(super) fn apply<'w>(
        &self,
        fabric: &mut Fabric,
        wiring: impl Fn(usize) -> Option<&'w Wiring>,
        (shards, groups): (u16, usize),
        began: Instant,
    ) {
        if let Some(script) = &self.script {
            fabric.add_rule(Script::new(script));
            return;
        }
        // Random faults first: they draw for every packet, whatever spells there are.
        fabric.add_rule(RandomFaults {
            loss_per_mille: self.loss,
            duplicate_per_mille: self.duplicate,
            reorder_per_mille: self.reorder,
            corrupt_per_mille: self.corrupt,
            delay_max: self.delay_max,
        });
        for (spell, wiring) in self.spells.iter().filter_map(|spell| Some((spell, wiring(spell.tree)?))) {
            let (from, to) = spell.ends(wiring, shards, groups);
            let during = began + spell.start..began + spell.start + spell.len;
            match spell.delay {
                Some(delay) => fabric.add_rule(SlowLink { from, to, during, delay }),
                None => fabric.add_rule(Partition { from, to, during }),
            };
        }
    }
}

impl Spell {
    /// Return the sending and receiving addresses.
    fn ends(&self, wiring: &Wiring, shards: u16, groups: usize) -> (Vec<Addr>, Vec<Addr>) {
        let devices: Vec<usize> = wiring.path(self.rank).collect();
        let hop = self.hop % devices.len();
        let device = |device: usize| (0..shards).map(|shard| node_addr(device, shard)).collect();
        let below = match hop.checked_sub(1) {
            Some(below) => device(devices[below]),
            None => (0..groups).map(|group| rank_addr(self.rank, group)).collect(),
        };
        let above = device(devices[hop]);
        if self.up { (below, above) } else { (above, below) }
    }
}

/// Draw a time or duration. Most runs take less than a hundred round trips, so a time among those is likely to hit
/// something. The maximum is 0.54 s: spells together stay well below `T_dead`.
pub(super) fn moment(draw: &mut Draw) -> Duration {
    let scale = draw.one_of(&[14, 17, 20, 23, 29]);
    Duration::from_nanos(draw.below(1 << scale))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::wiring::count_nodes;
    use crate::sim::{Options, ScenarioKind, record};
    use std::collections::BTreeSet;
    use sumac_hal::emu::Verdict;

    /// Among two thousand seeds each mix of fault kinds occurs, including none.
    #[test]
    fn every_mix_of_fault_kinds_is_drawn() {
        let mixes: BTreeSet<[bool; 6]> = (0..2000)
            .map(|seed| {
                let Faults { loss, duplicate, reorder, corrupt, spells, .. } =
                    Options::draw(seed, ScenarioKind::Calm).faults;
                let cut = spells.iter().any(|spell| spell.delay.is_none());
                let slow = spells.iter().any(|spell| spell.delay.is_some());
                [loss > 0, duplicate > 0, reorder > 0, corrupt > 0, cut, slow]
            })
            .collect();
        assert_eq!(mixes.len(), 64);
    }

    /// A spell affects one direction of one link while it lasts, and nothing else.
    #[test]
    fn spell_affects_one_direction_of_one_link() {
        let delay = Duration::from_micros(30);
        for (seed, verdict) in (0..10).flat_map(|seed| [Verdict::Drop, Verdict::Deliver { delay }].map(|v| (seed, v))) {
            let mut options = Options::draw(seed, ScenarioKind::Calm);
            let spell = Spell {
                rank: options.ranks - 1,
                tree: options.groups[0].tree,
                hop: 0,
                up: seed % 2 == 0,
                start: Duration::ZERO,
                len: Duration::from_millis(500),
                delay: (verdict != Verdict::Drop).then_some(delay),
            };
            options.faults = Faults { spells: vec![spell.clone()], ..Faults::default() };
            let wiring = Wiring::new(&options, spell.tree, options.trees.iter().map(count_nodes).max().unwrap());
            let (from, to) = spell.ends(&wiring, options.shards, options.groups.len());
            let (outcome, faults) = record(&options);
            assert!(outcome.is_ok(), "{seed}: {outcome:?}");
            assert!(!faults.is_empty(), "{seed}: the link is used");
            let hit =
                |fault: &NthPacket| fault.verdict == verdict && from.contains(&fault.from) && to.contains(&fault.to);
            assert!(faults.iter().all(hit), "{seed}: {faults:?}");
        }
    }
}
