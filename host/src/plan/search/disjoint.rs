//! Packs trees that share no cable into a network without tiers, such as a torus, where the leaves are each other's
//! neighbours.
//!
//! Trees grow side by side from different roots. Vertices that one of them misses then are reached by moving cables
//! between trees: the augmenting paths of matroid union (Edmonds, J. Res. NBS 69B, 1965), which find as many disjoint
//! spanning trees as there are. At last, cables are exchanged while that makes deep trees shallower, with a bound on
//! the work.
//!
//! Invariants: no cable is in two trees; a tree has no cycle; the result depends on the input alone.

use crate::topo::LinkId;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

/// A tree whose edges are single cables.
#[derive(Debug, Clone)]
pub(in crate::plan) struct Shape {
    pub(super) root: u32,
    /// For every switch but the root: its parent and the cable to it.
    pub(super) parents: BTreeMap<u32, (u32, LinkId)>,
}

/// A cable between two switches.
#[derive(Debug, Clone, Copy)]
pub(in crate::plan) struct Cable {
    pub(in crate::plan) link: LinkId,
    pub(in crate::plan) ends: [u32; 2],
}

/// Find `count` trees that span all switches and share no cable. `None` if there are not so many.
pub(in crate::plan) fn spanning_trees(switches: &[u32], cables: &[Cable], count: usize) -> Option<Vec<Shape>> {
    if switches.len() < 2 || cables.len() > CABLES_MAX || count * (switches.len() - 1) > cables.len() {
        return None;
    }
    let number: BTreeMap<u32, usize> = switches.iter().copied().zip(0..).collect();
    let ends = cables.iter().map(|cable| Some([*number.get(&cable.ends[0])?, *number.get(&cable.ends[1])?]));
    let ends = ends.collect::<Option<Vec<_>>>()?;
    let mut packing = Packing { vertices: switches.len(), count, tree_of: vec![None; ends.len()], ends };
    packing.grow();
    packing.complete()?;
    packing.flatten();
    let shape = |tree| {
        let walk = packing.walk(tree, packing.center(tree));
        let parents = (0..switches.len()).filter_map(|at| {
            let (parent, cable) = walk.parent[at]?;
            Some((switches[at], (switches[parent], cables[cable].link)))
        });
        Shape { root: switches[walk.order[0]], parents: parents.collect() }
    };
    Some((0..count).map(shape).collect())
}

/// The tree that each edge of a graph is in.
struct Packing {
    vertices: usize,
    count: usize,
    ends: Vec<[usize; 2]>,
    tree_of: Vec<Option<usize>>,
}

/// A tree as it is walked from a root.
struct Walk {
    /// The vertices that are reached, each behind its parent.
    order: Vec<usize>,
    /// The parent of each vertex and the edge to it.
    parent: Vec<Option<(usize, usize)>>,
    depth: Vec<u32>,
}

impl Packing {
    /// Grow all trees by turns, each by the edge nearest to its root.
    fn grow(&mut self) {
        let mut depth: Vec<Vec<Option<u32>>> = vec![vec![None; self.vertices]; self.count];
        let mut free = vec![0_u32; self.vertices];
        self.ends.iter().flatten().for_each(|at| free[*at] += 1);
        for (tree, depth) in depth.iter_mut().enumerate() {
            depth[tree * self.vertices / self.count] = Some(0);
        }
        let mut grows = true;
        while std::mem::take(&mut grows) {
            for (tree, depth) in depth.iter_mut().enumerate() {
                let edges = (0..self.ends.len()).filter(|edge| self.tree_of[*edge].is_none());
                let outward = edges.filter_map(|edge| match self.ends[edge] {
                    [a, b] if depth[a].is_some() && depth[b].is_none() => Some((depth[a]?, free[b], edge, b)),
                    [a, b] if depth[b].is_some() && depth[a].is_none() => Some((depth[b]?, free[a], edge, a)),
                    _ => None,
                });
                // Of equally near vertices, those first that have the fewest edges left.
                let Some((near, _, edge, vertex)) = outward.min() else { continue };
                depth[vertex] = Some(near + 1);
                self.tree_of[edge] = Some(tree);
                self.ends[edge].iter().for_each(|end| free[*end] -= 1);
                grows = true;
            }
        }
    }

    /// Take edges in until all trees span all vertices.
    fn complete(&mut self) -> Option<()> {
        let wanted = self.count * (self.vertices - 1);
        let mut taken = self.tree_of.iter().flatten().count();
        for edge in 0..self.ends.len() {
            if taken == wanted {
                break;
            }
            if self.tree_of[edge].is_none() && self.augment(edge) {
                taken += 1;
            }
        }
        (taken == wanted).then_some(())
    }

    /// Take an edge in, moving others between trees if needed.
    fn augment(&mut self, new: usize) -> bool {
        let forests: Vec<Walk> = (0..self.count).map(|tree| self.walk_all(tree)).collect();
        // The edge that wants the place of each edge.
        let mut wanted_by: BTreeMap<usize, Option<usize>> = BTreeMap::from([(new, None)]);
        let mut open = VecDeque::from([new]);
        while let Some(edge) = open.pop_front() {
            let [a, b] = self.ends[edge];
            for (tree, forest) in forests.iter().enumerate().filter(|(tree, _)| self.tree_of[edge] != Some(*tree)) {
                let Some(cycle) = forest.path(a, b) else {
                    let (mut at, mut to) = (edge, tree);
                    loop {
                        let left = self.tree_of[at].replace(to);
                        match (wanted_by[&at], left) {
                            (Some(next), Some(left)) => (at, to) = (next, left),
                            _ => return true,
                        }
                    }
                };
                for other in cycle {
                    if let Entry::Vacant(free) = wanted_by.entry(other) {
                        free.insert(Some(edge));
                        open.push_back(other);
                    }
                }
            }
        }
        false
    }

    fn edges_at(&self, tree: usize) -> Vec<Vec<(usize, usize)>> {
        let mut at = vec![Vec::new(); self.vertices];
        for (edge, [a, b]) in self.ends.iter().enumerate().filter(|(edge, _)| self.tree_of[*edge] == Some(tree)) {
            at[*a].push((*b, edge));
            at[*b].push((*a, edge));
        }
        at
    }

    /// Walk one tree from a root.
    fn walk(&self, tree: usize, root: usize) -> Walk {
        let mut walk = Walk::new(self.vertices);
        walk.extend(root, &self.edges_at(tree));
        walk
    }

    /// Walk all parts of a forest.
    fn walk_all(&self, tree: usize) -> Walk {
        let (mut walk, edges) = (Walk::new(self.vertices), self.edges_at(tree));
        for vertex in 0..self.vertices {
            walk.extend(vertex, &edges);
        }
        walk
    }

    /// A vertex in the middle of a tree's longest path.
    fn center(&self, tree: usize) -> usize {
        let last = |walk: &Walk| walk.order.last().copied().unwrap_or(0);
        let walk = self.walk(tree, last(&self.walk(tree, 0)));
        let mut at = last(&walk);
        for _ in 0..walk.depth[at] / 2 {
            at = walk.parent[at].map_or(at, |(parent, _)| parent);
        }
        at
    }

    /// What the depths of a tree cost: deep vertices count most.
    fn cost(&self, tree: usize) -> f64 {
        let walk = self.walk(tree, self.center(tree));
        walk.order.iter().map(|vertex| f64::from(walk.depth[*vertex]).exp2()).sum()
    }

    /// Exchange edges between trees, and with those that are in none, while trees become shallower.
    fn flatten(&mut self) {
        let mut work = 0;
        let mut costs: Vec<f64> = (0..self.count).map(|tree| self.cost(tree)).collect();
        let mut improves = true;
        while std::mem::take(&mut improves) {
            let mut trees: Vec<usize> = (0..self.count).collect();
            trees.sort_by(|a, b| costs[*b].total_cmp(&costs[*a]).then(a.cmp(b)));
            for tree in trees {
                let Some(better) = self.shallower(tree, &costs, &mut work) else { continue };
                for (changed, cost) in better {
                    costs[changed] = cost;
                }
                improves = true;
                break;
            }
        }
    }

    /// Exchange an edge on the way to the deepest vertex of a tree for another one, if that makes trees shallower.
    /// Returns the new costs of the trees that changed.
    fn shallower(&mut self, tree: usize, costs: &[f64], work: &mut usize) -> Option<Vec<(usize, f64)>> {
        let walk = self.walk(tree, self.center(tree));
        let mut at = *walk.order.last()?;
        while let Some((parent, edge)) = walk.parent[at] {
            let below = walk.below(at);
            at = parent;
            for other in 0..self.ends.len() {
                let [a, b] = self.ends[other];
                let owner = self.tree_of[other];
                if owner == Some(tree) || below[a] == below[b] {
                    continue;
                }
                *work += self.vertices;
                if *work > WORK_MAX {
                    return None;
                }
                (self.tree_of[edge], self.tree_of[other]) = (owner, Some(tree));
                let changed: Vec<usize> = [Some(tree), owner].into_iter().flatten().collect();
                let spans = owner.is_none_or(|owner| self.walk(owner, 0).order.len() == self.vertices);
                if spans {
                    let new: Vec<(usize, f64)> = changed.iter().map(|tree| (*tree, self.cost(*tree))).collect();
                    let before: f64 = changed.iter().map(|tree| costs[*tree]).sum();
                    if new.iter().map(|(_, cost)| cost).sum::<f64>() < before {
                        return Some(new);
                    }
                }
                (self.tree_of[edge], self.tree_of[other]) = (Some(tree), owner);
            }
        }
        None
    }
}

impl Walk {
    fn new(vertices: usize) -> Self {
        Self { order: Vec::new(), parent: vec![None; vertices], depth: vec![u32::MAX; vertices] }
    }

    /// Walk the part that a vertex is in, unless it was walked before.
    fn extend(&mut self, root: usize, edges: &[Vec<(usize, usize)>]) {
        if self.depth[root] != u32::MAX {
            return;
        }
        let mut next = self.order.len();
        self.order.push(root);
        self.depth[root] = 0;
        while let Some(at) = self.order.get(next).copied() {
            next += 1;
            for &(to, edge) in &edges[at] {
                if self.depth[to] == u32::MAX {
                    self.depth[to] = self.depth[at] + 1;
                    self.parent[to] = Some((at, edge));
                    self.order.push(to);
                }
            }
        }
    }

    /// The edges between two vertices; `None` if they are in different parts.
    fn path(&self, mut a: usize, mut b: usize) -> Option<Vec<usize>> {
        let mut edges = Vec::new();
        while a != b {
            let lower = if self.depth[a] >= self.depth[b] { &mut a } else { &mut b };
            let (parent, edge) = self.parent[*lower]?;
            edges.push(edge);
            *lower = parent;
        }
        Some(edges)
    }

    /// Whether each vertex is below another one, or that one.
    fn below(&self, top: usize) -> Vec<bool> {
        let mut below = vec![false; self.depth.len()];
        for &at in &self.order {
            below[at] = at == top || self.parent[at].is_some_and(|(parent, _)| below[parent]);
        }
        below
    }
}

/// In how many cables trees are packed at most.
const CABLES_MAX: usize = 8192;
/// How many vertices are visited at most to make trees shallower.
const WORK_MAX: usize = 4_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    /// The cables of a torus of `size` by `size` switches.
    fn torus(size: u32) -> (Vec<u32>, Vec<Cable>) {
        let at = |x: u32, y: u32| (x % size) * size + y % size;
        let ends = (0..size * size).flat_map(|n| {
            let (x, y) = (n / size, n % size);
            [[n, at(x + 1, y)], [n, at(x, y + 1)]]
        });
        let cables = (0..).map(LinkId).zip(ends).map(|(link, ends)| Cable { link, ends }).collect();
        ((0..size * size).collect(), cables)
    }

    #[test]
    fn torus_holds_two_disjoint_spanning_trees_that_are_not_deep() {
        for size in [3, 4, 8, 16] {
            let (switches, cables) = torus(size);
            let trees = spanning_trees(&switches, &cables, 2).expect("two trees");
            let mut used = std::collections::BTreeSet::new();
            for tree in &trees {
                assert_eq!(tree.parents.len() + 1, switches.len());
                assert!(tree.parents.values().all(|(_, link)| used.insert(*link)), "a cable is in two trees");
                let depth = |mut at: u32| {
                    let mut depth = 0;
                    while let Some((parent, _)) = tree.parents.get(&at) {
                        (at, depth) = (*parent, depth + 1);
                        assert!(depth <= switches.len(), "a cycle");
                    }
                    assert_eq!(at, tree.root);
                    depth
                };
                let deepest = switches.iter().map(|at| depth(*at)).max().unwrap_or(0);
                assert!(deepest <= 2 * size as usize, "{deepest} deep in a torus of {size}");
            }
            assert!(spanning_trees(&switches, &cables, 3).is_none());
        }
    }

    #[test]
    fn trees_that_block_each_other_as_they_grow_are_untangled() {
        // Two trees exist in a complete graph of four; a star is one that leaves no other.
        let ends = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]];
        let cables: Vec<Cable> = (0..).map(LinkId).zip(ends).map(|(link, ends)| Cable { link, ends }).collect();
        let mut packing = Packing {
            vertices: 4,
            count: 2,
            ends: ends.map(|ends| ends.map(|end| end as usize)).to_vec(),
            tree_of: vec![Some(0), Some(0), Some(0), Some(1), Some(1), None],
        };
        assert_eq!(packing.complete(), Some(()));
        assert!((0..2).all(|tree| packing.walk(tree, 0).order.len() == 4), "{:?}", packing.tree_of);
        assert!(spanning_trees(&[0, 1, 2, 3], &cables, 2).is_some());
        assert!(spanning_trees(&[0, 1, 2, 3], &cables[..5], 2).is_none());
    }
}
