//! What a schedule's messages load onto each link of a topology, counted without a simulator.
//!
//! The k-th steps with messages of all ranks are taken together, as if all began at once. In such a step a link carries
//! every message whose route includes it. The step takes as long as its busiest link, so the sum over steps of the
//! busiest link's elements is what the links' rate bounds: the *congestion* term of the papers on torus algorithms
//! (Sack and Gropp, "Collective algorithms for multiported torus networks", ACM TOPC 1(2), 2015).
//!
//! Routes are shortest ones, and the same for each pair: on tori and meshes by dimensions, the first one first; at half
//! of a ring upward. Links are one-way.

use super::{Schedule, Send, StepBuffer};
use std::collections::{BTreeMap, HashMap};

/// Ranks and the links between them.
pub trait Topology {
    /// Call `visit` for each link, by number, on the way from one rank to another.
    fn route(&self, from: u32, to: u32, visit: &mut dyn FnMut(u32));
}

/// A torus, or a mesh if it does not wrap around. Rank numbers run through the last dimension first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grid {
    /// The ranks along each dimension.
    pub dims: Vec<u32>,
    /// Whether the ends of each dimension are linked.
    pub wraps: bool,
}

impl Topology for Grid {
    /// Link `2 (rank D + d) + 1` leads from a rank upward along dimension d, the one before it downward.
    fn route(&self, from: u32, to: u32, visit: &mut dyn FnMut(u32)) {
        let mut at = from;
        let mut stride: u32 = self.dims.iter().product();
        for (nth, &dim) in self.dims.iter().enumerate() {
            stride /= dim;
            let (mut own, goal) = (at / stride % dim, to / stride % dim);
            let above = (goal + dim - own) % dim;
            let is_upward = if self.wraps { 2 * above <= dim } else { goal > own };
            while own != goal {
                visit(2 * (at * self.dims.len() as u32 + nth as u32) + u32::from(is_upward));
                let next = if is_upward { (own + 1) % dim } else { (own + dim - 1) % dim };
                at = at - own * stride + next * stride;
                own = next;
            }
        }
    }
}

/// A full mesh: a link for each pair of ranks and direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FullMesh {
    /// The number of ranks.
    pub ranks: u32,
}

impl Topology for FullMesh {
    fn route(&self, from: u32, to: u32, visit: &mut dyn FnMut(u32)) {
        visit(from * self.ranks + to);
    }
}

/// Groups of consecutive ranks with a link for each pair of groups and direction, as in a dragonfly. Links inside a
/// group are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dragonfly {
    /// The ranks of a group.
    pub group: u32,
    /// The place of rank 0 in its group.
    pub offset: u32,
    /// The number of groups.
    pub groups: u32,
}

impl Topology for Dragonfly {
    fn route(&self, from: u32, to: u32, visit: &mut dyn FnMut(u32)) {
        let [from, to] = [from, to].map(|rank| (rank + self.offset) / self.group);
        if from != to {
            visit(from * self.groups + to);
        }
    }
}

/// A fat tree of two levels: leaves with consecutive ranks, and spines, of which each receiver has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FatTree {
    /// The ranks below a leaf.
    pub leaf: u32,
    /// The number of spines, each with a link to every leaf.
    pub spines: u32,
    /// The number of ranks.
    pub ranks: u32,
}

impl Topology for FatTree {
    /// Links from ranks come first, then those to ranks, from leaves, and to leaves.
    fn route(&self, from: u32, to: u32, visit: &mut dyn FnMut(u32)) {
        visit(from);
        let (below, above, spine) = (from / self.leaf, to / self.leaf, to % self.spines);
        if below != above {
            let links = self.ranks.div_ceil(self.leaf) * self.spines;
            visit(2 * self.ranks + below * self.spines + spine);
            visit(2 * self.ranks + links + above * self.spines + spine);
        }
        visit(self.ranks + to);
    }
}

/// Elements on links: on the busiest one of each step, and on each one over all steps.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Loads {
    busiest: Vec<u64>,
    totals: BTreeMap<u32, u64>,
}

impl Loads {
    /// Count the messages of all ranks' schedules. One step of one rank is in memory at a time, and the links that a
    /// step of all ranks uses.
    pub fn count(schedules: impl IntoIterator<Item = Schedule>, topology: &(impl Topology + ?Sized)) -> Self {
        let mut loads = Self::default();
        // Each with the index of its next step.
        let mut ranks: Vec<(Schedule, usize)> = schedules.into_iter().map(|schedule| (schedule, 0)).collect();
        let (mut step, mut links) = (StepBuffer::default(), HashMap::new());
        loop {
            let mut is_over = true;
            for (schedule, next) in &mut ranks {
                if read_messages(schedule, next, &mut step) {
                    is_over = false;
                    for Send { peer, from } in &step.sends {
                        topology.route(schedule.place().rank().0, peer.0, &mut |link| {
                            *links.entry(link).or_default() += from.span.len as u64;
                        });
                    }
                }
            }
            if is_over {
                return loads;
            }
            loads.busiest.push(links.values().copied().max().unwrap_or(0));
            for (link, elements) in links.drain() {
                *loads.totals.entry(link).or_default() += elements;
            }
        }
    }

    /// The elements on the busiest link of each step.
    pub fn busiest(&self) -> impl Iterator<Item = u64> {
        self.busiest.iter().copied()
    }

    /// The elements that the links' rate bounds: the busiest links' of all steps.
    pub fn congestion(&self) -> u64 {
        self.busiest().sum()
    }

    /// The elements on each link that carries any, over all steps.
    pub const fn totals(&self) -> &BTreeMap<u32, u64> {
        &self.totals
    }
}

/// Read the next step that has messages, if there is one.
fn read_messages(schedule: &Schedule, next: &mut usize, step: &mut StepBuffer) -> bool {
    while schedule.read(*next, step) {
        *next += 1;
        if step.step().has_messages() {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::swing::all_reduce_on_torus;
    use crate::schedule::{
        Place, Shape, bine, full_mesh, halving_doubling, hierarchical_pairwise, hierarchical_ring, mesh_2d, pairwise,
        ring, ring_2d, swing, torus_2d, tree::Tree,
    };
    use sumac_hal::ctrl::Order;

    fn route(topology: &impl Topology, from: u32, to: u32) -> Vec<u32> {
        let mut links = Vec::new();
        topology.route(from, to, &mut |link| links.push(link));
        links
    }

    #[test]
    fn routes_match_hand_computation() {
        let torus = Grid { dims: vec![4, 4], wraps: true };
        // Upward along the second dimension from ranks 0 and 1; down across the end.
        assert_eq!(route(&torus, 0, 2), [3, 7]);
        assert_eq!(route(&torus, 0, 3), [2]);
        assert_eq!(route(&torus, 0, 5), [1, 19]);
        let mesh = Grid { wraps: false, ..torus };
        assert_eq!(route(&mesh, 0, 3), [3, 7, 11]);
        let tree = FatTree { leaf: 2, spines: 2, ranks: 4 };
        assert_eq!(route(&tree, 0, 1), [0, 5]);
        assert_eq!(route(&tree, 0, 3), [0, 9, 15, 7]);
        assert_eq!(route(&Dragonfly { group: 4, offset: 3, groups: 2 }, 0, 1), [1]);
    }

    /// The limits of arXiv 2401.09356, table 2, are 1.19, 1.03 and 1.008 for any size; these are for 4096 ranks.
    #[test]
    fn swing_on_tori_is_as_congested_as_its_paper_says() {
        for (dims, expected) in [(vec![64, 64], 1.185), (vec![16, 16, 16], 1.034), (vec![8, 8, 8, 8], 1.007)] {
            let links = 2 * dims.len();
            let (ranks, count) = (dims.iter().product::<u32>(), links * 4096 * 4);
            let schedules = Place::all(ranks).map(|place| all_reduce_on_torus(place, count, &dims).expect("a torus"));
            let loads = Loads::count(schedules, &Grid { dims: dims.clone(), wraps: true });
            let uncongested = 2.0 * count as f64 * f64::from(ranks - 1) / f64::from(ranks) / links as f64;
            let found = loads.congestion() as f64 / uncongested;
            assert!((found - expected).abs() <= 0.002, "{dims:?}: {found}");
        }
    }

    fn grid(extents: &[u32]) -> Shape {
        Shape::grid(extents).expect("a grid")
    }

    #[test]
    fn swing_by_its_shape_is_swing_on_the_torus() {
        for dims in [&[4, 4][..], &[2, 8], &[4, 2, 2], &[2, 2, 2, 2]] {
            let ranks = dims.iter().product();
            for place in Place::all(ranks) {
                assert!(
                    Ok(swing::all_reduce(place, 777, grid(dims))) == all_reduce_on_torus(place, 777, dims),
                    "{dims:?}"
                );
            }
        }
    }

    /// How busy a rank's least busy link is of those that lead upward along each dimension, while the busiest ones are.
    fn least_busy(dims: &[u32], schedule: impl Fn(Place) -> Schedule) -> f64 {
        let ranks: u32 = dims.iter().product();
        let loads = Loads::count(Place::all(ranks).map(schedule), &Grid { dims: dims.to_vec(), wraps: true });
        let totals = loads.totals();
        let upward = (0..ranks * dims.len() as u32).map(|link| totals.get(&(2 * link + 1)).copied().unwrap_or(0));
        upward.min().unwrap_or(0) as f64 / loads.congestion() as f64
    }

    #[test]
    fn torus_keeps_the_links_of_every_dimension_busy() {
        for dims in [&[4, 4][..], &[8, 8], &[16, 16], &[6, 6], &[4, 4, 4]] {
            let count = 12 * dims.iter().product::<u32>() as usize;
            let torus = least_busy(dims, |place| torus_2d::all_reduce(place, count, grid(dims)));
            assert!(torus >= 0.95, "{dims:?}: {torus}");
            // One dimension after the other leaves the links of the later ones idle.
            let rings = least_busy(dims, |place| ring_2d::all_reduce(place, count, grid(dims)));
            assert!(rings < 0.25, "{dims:?}: {rings}");
        }
    }

    #[test]
    fn torus_is_as_fast_as_its_links_allow() {
        let (ranks, count) = (64, 2 * 64 * 10);
        let of = |schedule: fn(Place, usize, Shape) -> Schedule| {
            let schedules = Place::all(ranks).map(|place| schedule(place, count, grid(&[8, 8])));
            Loads::count(schedules, &Grid { dims: vec![8, 8], wraps: true }).congestion()
        };
        // 2n(p-1)/p over two links, or over one.
        assert_eq!(of(torus_2d::all_reduce), 63 * 20);
        assert_eq!(of(ring_2d::all_reduce), 2 * 63 * 20);
        assert_eq!(of(torus_2d::reduce_scatter) + of(torus_2d::all_gather), 63 * 20);
    }

    /// Messages go to neighbours, so no link carries what is for others.
    #[test]
    fn mesh_sends_between_neighbours_only() {
        let (ranks, count) = (20, 20 * 12);
        let mesh = Grid { dims: vec![4, 5], wraps: false };
        for schedule in [mesh_2d::all_reduce, mesh_2d::reduce_scatter, mesh_2d::all_gather] {
            let schedules: Vec<_> = Place::all(ranks).map(|place| schedule(place, count, grid(&[4, 5]))).collect();
            let sent: u64 = schedules.iter().map(|schedule| schedule.sent_bytes(1, 1)).sum();
            for parts in &schedules {
                parts.steps().for_each(|step| {
                    for Send { peer, .. } in step.sends {
                        assert_eq!(route(&mesh, parts.place().rank().0, peer.0).len(), 1);
                    }
                });
            }
            assert_eq!(Loads::count(schedules, &mesh).totals().values().sum::<u64>(), sent);
        }
        // A link with few blocks in the reduce-scatter has the others in the all-gather: n in rows, n/5 in columns.
        let schedules = Place::all(ranks).map(|place| mesh_2d::all_reduce(place, count, grid(&[4, 5])));
        let totals = Loads::count(schedules, &mesh).totals().clone();
        assert_eq!(totals.len(), 2 * (4 * 4 + 3 * 5));
        let in_rows = |link: u32| link / 2 % 2 == 1;
        assert!(
            totals.iter().all(|(&link, &sum)| sum == count as u64 / if in_rows(link) { 1 } else { 5 }),
            "{totals:?}"
        );
    }

    #[test]
    fn hierarchical_ring_sends_its_share_between_servers() {
        let (servers, each, count) = (4, 6, 24 * 10);
        let shape = Shape::Servers(std::num::NonZeroU32::new(each).expect("not 0"));
        let groups = Dragonfly { group: each, offset: 0, groups: servers };
        let between = |schedule: &dyn Fn(Place) -> Schedule| {
            Loads::count(Place::all(servers * each).map(schedule), &groups).totals().values().sum::<u64>()
        };
        // 2(n/m)(G-1)/G a rank.
        let found = between(&|place| hierarchical_ring::all_reduce(place, count, shape));
        assert_eq!(found, u64::from(servers * each) * 2 * (count as u64 / 6) * 3 / 4);
        // A ring in rank order sends all but a block across each border, twice.
        assert_eq!(between(&|place| ring::all_reduce(place, count)), u64::from(servers) * 2 * count as u64 * 23 / 24);
    }

    #[test]
    fn hierarchical_all_to_all_sends_each_block_between_servers_once() {
        let (servers, each, count) = (4, 6, 24 * 10);
        let shape = Shape::Servers(std::num::NonZeroU32::new(each).expect("not 0"));
        let groups = Dragonfly { group: each, offset: 0, groups: servers };
        let between = |schedule: &dyn Fn(Place) -> Schedule| {
            Loads::count(Place::all(servers * each).map(schedule), &groups).totals().values().sum::<u64>()
        };
        let found = between(&|place| hierarchical_pairwise::all_to_all(place, count, shape));
        assert_eq!(found, u64::from(servers * each) * count as u64 * 3 / 4);
        assert_eq!(between(&|place| pairwise::all_to_all(place, count)), found, "the same bytes in fewer messages");
    }

    #[test]
    fn ring_on_a_ring_uses_one_direction_without_congestion() {
        let schedules = Place::all(8).map(|place| ring::all_reduce(place, 800));
        let loads = Loads::count(schedules, &Grid { dims: vec![8], wraps: true });
        assert!(loads.busiest().all(|elements| elements == 100), "{loads:?}");
        assert_eq!((loads.congestion(), loads.totals().len()), (1400, 8));
        // Without the link around the end all others carry what goes around.
        let schedules = Place::all(8).map(|place| ring::all_reduce(place, 800));
        let mesh = Loads::count(schedules, &Grid { dims: vec![8], wraps: false });
        assert_eq!((mesh.congestion(), mesh.totals().len()), (1400, 14));
    }

    /// A group of 4 on a full mesh of 8 uses 3 of a rank's 7 links.
    #[test]
    fn full_mesh_uses_the_links_of_its_group() {
        let tree = |ranks| Tree::flat(ranks, Order::TreeFold).expect("a tree");
        for (ranks, links) in [(2, 1), (4, 3), (8, 7)] {
            let tree = tree(ranks);
            let schedules = Place::all(ranks).map(|place| full_mesh::all_reduce(place, 840, &tree));
            let totals = Loads::count(schedules, &FullMesh { ranks: 8 }).totals().clone();
            assert_eq!(totals.keys().filter(|&&link| link / 8 == 0).count(), links, "{ranks}");
            assert!(totals.values().all(|&elements| elements == 2 * 840 / u64::from(ranks)), "{totals:?}");
        }
    }

    /// The elements between groups of consecutive ranks, in multiples of n, for 256 ranks in a row.
    fn between(group: u32, offset: u32, schedule: impl Fn(Place) -> Schedule) -> f64 {
        let groups = Dragonfly { group, offset, groups: 256_u32.div_ceil(group) + 1 };
        Loads::count(Place::all(256).map(schedule), &groups).totals().values().sum::<u64>() as f64 / 2560.0
    }

    #[test]
    fn bine_sends_less_between_groups_that_are_not_aligned_powers_of_two() {
        let halving = |group, offset| between(group, offset, |place| halving_doubling::all_reduce(place, 2560));
        let bine = |group, offset| between(group, offset, |place| bine::all_reduce(place, 2560));
        for (group, of_halving, of_bine) in [(12, 115.0, 92.0), (20, 78.0, 62.0), (24, 67.0, 53.0)] {
            let mean = |of: &dyn Fn(u32, u32) -> f64| {
                (0..group).map(|offset| of(group, offset)).sum::<f64>() / f64::from(group)
            };
            let (halving, bine) = (mean(&halving), mean(&bine));
            assert_eq!((halving.round(), bine.round()), (of_halving, of_bine), "{group}");
            assert!(bine <= 0.85 * halving, "{group}: {bine} against {halving}");
        }
        // Aligned groups of 16 are what halving-doubling is made for.
        assert_eq!((halving(16, 0).round(), bine(16, 0).round()), (30.0, 60.0));
    }

    #[test]
    fn fat_tree_with_fewer_uplinks_is_busiest_between_leaves() {
        let halving = |spines| {
            let schedules = Place::all(16).map(|place| halving_doubling::all_reduce(place, 1600));
            Loads::count(schedules, &FatTree { leaf: 4, spines, ranks: 16 }).congestion()
        };
        // Near steps carry 800 and 400 elements; far ones 200 and 100, each in both halves.
        assert_eq!(halving(4), 2 * 1500);
        assert_eq!(halving(1), 2 * (800 + 400 + 4 * (200 + 100)));
    }
}
