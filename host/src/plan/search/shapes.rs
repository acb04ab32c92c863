//! Builds trees of several shapes for a root.
//!
//! | shape | good for |
//! |---|---|
//! | all leaves below the root | small messages: fewest nodes on the way |
//! | leaves joined where their routes meet, gathered or spread | large messages: few edges on a cable |
//! | before either, close leaves joined at one of them, once or twice | large messages where there are no devices on the way |

use super::draft::{Draft, Places};
use super::{Found, Search};
use crate::plan::index::{Distances, Hop, Turn};
use crate::plan::route::{Load, route};
use crate::topo::LinkId;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

/// For every node but the root: its parent and the route to it.
type Parents = BTreeMap<u32, (u32, Vec<LinkId>)>;

/// How branches are joined towards the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Join {
    /// Only at the root.
    Star,
    /// Wherever they meet, and they are led to meet: fewer nodes.
    Gather,
    /// Wherever they meet, and they are led apart: fewer children per node.
    Spread,
}

/// A branch on its way to the root.
struct Branch {
    node: u32,
    route: Vec<LinkId>,
    has_gone_down: bool,
}

impl Search<'_> {
    /// Build the trees for these leaves and keep the best.
    pub(super) fn try_roots(&self, places: &Rc<Places>, load: &mut Load<'_>, found: &mut Found) {
        let leaves: Vec<u32> = places.leaves.keys().copied().collect();
        if let [root] = leaves[..] {
            let draft = Draft { root, parents: Parents::new(), places: Rc::clone(places) };
            return self.consider(draft, load, found);
        }
        let mut stages = vec![(leaves.clone(), Parents::new())];
        let mut has_all_stages = false;
        let slowest_uplink_s = places.leaves.values().map(super::draft::Leaf::slowest_s).fold(0.0, f64::max);
        let roots_max = (EDGES_MAX / leaves.len()).clamp(ROOTS_MIN, ROOTS_MAX);
        for root in self.roots(&leaves, load).into_iter().take(roots_max) {
            if !self.may_improve(root, found) {
                found.roots.entry(root.switch).or_default();
                continue;
            }
            self.try_shapes(root.switch, &stages[..1], (places, load), found);
            // Joining close leaves takes longer, and pays only where it takes edges off the busiest cable.
            if found.busiest_s() <= root.slowest_s.max(slowest_uplink_s) * (1.0 + super::EQUAL) {
                continue;
            }
            while !has_all_stages && stages.len() <= STAGES_MAX {
                let (ends, joined) = &stages[stages.len() - 1];
                match self.join_close(places, (ends, joined), load) {
                    Some(stage) => stages.push(stage),
                    None => has_all_stages = true,
                }
            }
            self.try_shapes(root.switch, &stages[1..], (places, load), found);
        }
    }

    fn try_shapes(
        &self,
        root: u32,
        stages: &[(Vec<u32>, Parents)],
        (places, load): (&Rc<Places>, &mut Load<'_>),
        found: &mut Found,
    ) {
        for (ends, joined) in stages {
            for join in [Join::Gather, Join::Star, Join::Spread] {
                let is_worth_it = match join {
                    Join::Gather => true,
                    // A star with too many branches would have to be joined again.
                    Join::Star => found.candidates.is_empty() || ends.len() <= self.node(root).children_max,
                    // Fewer children per node count only where there were too many.
                    Join::Spread => found.error.is_some(),
                };
                if !is_worth_it {
                    continue;
                }
                load.clear();
                places.routes.values().for_each(|route| load.add(route));
                joined.values().for_each(|(_, route)| load.add(route));
                if let Some(parents) = self.join(root, (ends, joined), join, load) {
                    self.consider(without_single_branch(root, parents, places), load, found);
                }
            }
        }
    }

    fn join(&self, root: u32, (ends, joined): (&[u32], &Parents), join: Join, load: &mut Load<'_>) -> Option<Parents> {
        // A leaf that was joined to another one cannot be the root.
        if joined.contains_key(&root) {
            return None;
        }
        let mut parents = joined.clone();
        match join {
            Join::Star => {
                for &end in ends.iter().filter(|end| **end != root) {
                    parents.insert(end, (root, self.route(end, root, load)?));
                }
            }
            Join::Gather | Join::Spread => self.join_by_layers((root, ends), &mut parents, join, load)?,
        }
        Some(parents)
    }

    /// Join the ends towards the root, the farthest switches first, aggregating wherever branches meet.
    fn join_by_layers(
        &self,
        (root, ends): (u32, &[u32]),
        parents: &mut Parents,
        join: Join,
        load: &mut Load<'_>,
    ) -> Option<()> {
        let distances = self.distances(root);
        let is_end: BTreeSet<u32> = ends.iter().copied().collect();
        let mut taken: BTreeSet<u32> = parents.iter().flat_map(|(node, (parent, _))| [*node, *parent]).collect();
        let mut waiting: BTreeMap<(Reverse<u16>, u32), Vec<Branch>> = BTreeMap::new();
        for &end in ends {
            if !distances.reaches(end) {
                return None;
            }
            waiting.insert((Reverse(distances.of(end)), end), Vec::new());
        }
        let mut done: BTreeSet<u32> = BTreeSet::new();
        while let Some(((_, at), mut here)) = waiting.pop_first() {
            let joins = done.insert(at) && (is_end.contains(&at) || !taken.contains(&at));
            let is_node = is_end.contains(&at) || (self.is_usable(at) && here.len() > 1);
            if at == root {
                here.into_iter().for_each(|branch| drop(parents.insert(branch.node, (root, branch.route))));
                continue;
            }
            if joins && is_node {
                here.drain(..).for_each(|branch| drop(parents.insert(branch.node, (at, branch.route))));
                taken.insert(at);
                here.push(Branch { node: at, route: Vec::new(), has_gone_down: false });
            }
            for mut branch in here {
                let cost = |to: u32, cable_s: f64| {
                    let key = (Reverse(distances.of(to)), to);
                    let there =
                        waiting.get(&key).map_or(0, |branches| branches.len() + usize::from(is_end.contains(&to)));
                    let crowd = if join == Join::Gather { usize::from(there == 0) } else { there };
                    (cable_s, crowd, to)
                };
                let hops = distances.next(self.index, self.routing, (at, branch.has_gone_down));
                let hops = hops.map(|(hop, down)| {
                    let (link, cable_s) = load.cable(self.index, hop);
                    (cost(hop.to, cable_s), link, down)
                });
                let best = hops.min_by(|(a, _, _), (b, _, _)| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
                let ((_, _, to), link, down) = best?;
                load.add(&[link]);
                branch.route.push(link);
                branch.has_gone_down = down;
                waiting.entry((Reverse(distances.of(to)), to)).or_default().push(branch);
            }
        }
        Some(())
    }

    /// Join the ends that are closest to each other at one of them. `None` if that joins nothing, or all of them.
    fn join_close(
        &self,
        places: &Places,
        (ends, joined): (&[u32], &Parents),
        load: &mut Load<'_>,
    ) -> Option<(Vec<u32>, Parents)> {
        let clusters = self.clusters(ends)?;
        load.clear();
        joined.values().for_each(|(_, route)| load.add(route));
        let mut parents = joined.clone();
        let mut taken: BTreeMap<u32, usize> = BTreeMap::new();
        joined.values().for_each(|(parent, _)| *taken.entry(*parent).or_default() += 1);
        let mut left = Vec::with_capacity(clusters.len());
        for cluster in clusters {
            let more = cluster.len() - 1;
            let fits = |end: &&u32| {
                let ranks = places.leaves.get(*end).map_or(0, |leaf| leaf.ranks);
                more == 0 || ranks + taken.get(*end).unwrap_or(&0) + more <= self.node(**end).children_max
            };
            let intake = |end: &u32| self.intake_s(*end, cluster.len(), load);
            let by_intake = |a: &&u32, b: &&u32| intake(a).total_cmp(&intake(b)).then(a.cmp(b));
            let head = *cluster.iter().filter(fits).min_by(by_intake)?;
            let members: Vec<u32> = cluster.iter().copied().filter(|end| *end != head).collect();
            let distances = Distances::of_sources(self.index, self.routing, head, &members);
            for member in members {
                let route = route(self.index, self.routing, &distances, member, load)?;
                parents.insert(member, (head, route));
            }
            left.push(head);
        }
        left.sort_unstable();
        Some((left, parents))
    }

    /// Partition the ends into those whose ways up meet first. `None` if all of them meet at once.
    fn clusters(&self, ends: &[u32]) -> Option<Vec<Vec<u32>>> {
        let mut union = Union::new(ends.len());
        let mut owner: HashMap<u32, usize> = ends.iter().copied().zip(0..).collect();
        let mut layer: Vec<u32> = ends.to_vec();
        while !layer.is_empty() && union.sets == ends.len() {
            let mut next = Vec::new();
            for at in layer {
                let own = owner[&at];
                for hop in self.index.hops(at).iter().filter(|hop| self.rises(hop)) {
                    match owner.get(&hop.to) {
                        Some(other) => union.join(own, *other),
                        None => {
                            owner.insert(hop.to, own);
                            next.push(hop.to);
                        }
                    }
                }
            }
            layer = next;
        }
        if union.sets == 1 || union.sets == ends.len() {
            return None;
        }
        let mut clusters: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for (nth, end) in ends.iter().enumerate() {
            clusters.entry(union.find(nth)).or_default().push(*end);
        }
        Some(clusters.into_values().collect())
    }

    fn rises(&self, hop: &Hop) -> bool {
        self.routing.turn(hop.turn) != Turn::Down
    }
}

/// Drop a root that has a single branch and no ranks.
pub(super) fn without_single_branch(root: u32, mut parents: Parents, places: &Rc<Places>) -> Draft {
    let mut root = root;
    while !places.leaves.contains_key(&root) {
        let mut below = parents.iter().filter(|(_, (parent, _))| *parent == root).map(|(node, _)| *node);
        let (Some(only), None) = (below.next(), below.next()) else { break };
        parents.remove(&only);
        root = only;
    }
    Draft { root, parents, places: Rc::clone(places) }
}

/// Disjoint sets.
struct Union {
    parent: Vec<usize>,
    sets: usize,
}

impl Union {
    fn new(len: usize) -> Self {
        Self { parent: (0..len).collect(), sets: len }
    }

    fn find(&mut self, mut one: usize) -> usize {
        while self.parent[one] != one {
            self.parent[one] = self.parent[self.parent[one]];
            one = self.parent[one];
        }
        one
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.find(a), self.find(b));
        if a != b {
            self.parent[a.max(b)] = a.min(b);
            self.sets -= 1;
        }
    }
}

/// How often close leaves are joined before the rest.
const STAGES_MAX: usize = 2;
/// About how many leaves are joined for a job, over all roots that are tried.
const EDGES_MAX: usize = 2_000;
/// How many roots are tried whatever the size of the job.
const ROOTS_MIN: usize = 2;
/// How many roots are tried of a small job.
const ROOTS_MAX: usize = 24;
