//! The optimum by trying everything: every root, every next hop and every cable of every branch.
//!
//! Written from the description of what is planned (the head of `plan`), with none of the planner's code.

use crate::topo::{Fabric, HostId, LinkId, SwitchId};
use std::collections::{BTreeMap, BTreeSet};

/// A branch in progress: the height of the tree that it carries.
type Branch = usize;

struct Brute<'a> {
    fabric: &'a Fabric,
    root: SwitchId,
    distance: Vec<Option<usize>>,
    /// Switches, the farthest from the root first.
    order: Vec<SwitchId>,
    leaves: BTreeSet<SwitchId>,
    best: Option<(usize, usize)>,
}

/// Return the fewest levels and then the least sharing, if any root reaches all hosts. Each host's switch must be able
/// to aggregate.
pub(super) fn optimum(fabric: &Fabric, hosts: &[HostId]) -> Option<(usize, usize)> {
    let leaves: BTreeSet<SwitchId> = hosts.iter().map(|host| fabric.host(*host).uplinks[0].switch).collect();
    let roots = fabric.switch_ids().filter(|switch| fabric.switch(*switch).aggregation.is_some());
    roots.filter_map(|root| optimum_at(fabric, root, &leaves)).min()
}

fn optimum_at(fabric: &Fabric, root: SwitchId, leaves: &BTreeSet<SwitchId>) -> Option<(usize, usize)> {
    let mut distance: Vec<Option<usize>> = vec![None; fabric.switches().len()];
    distance[root.0 as usize] = Some(0);
    // Relax until nothing changes: slow, and plainly right.
    while fabric.switch_ids().any(|at| {
        let near = fabric.adjacent(at).iter().filter_map(|(next, _)| distance[next.0 as usize]).min();
        let better = near.map(|near| near + 1).filter(|d| distance[at.0 as usize].is_none_or(|old| *d < old));
        better.is_some_and(|better| distance[at.0 as usize].replace(better) != Some(better))
    }) {}
    if leaves.iter().any(|leaf| distance[leaf.0 as usize].is_none()) {
        return None;
    }
    let mut order: Vec<SwitchId> = fabric.switch_ids().filter(|s| distance[s.0 as usize].is_some()).collect();
    order.sort_by_key(|switch| std::cmp::Reverse(distance[switch.0 as usize]));
    let mut brute = Brute { fabric, root, distance, order, leaves: leaves.clone(), best: None };
    brute.switch(0, BTreeMap::new(), BTreeMap::new());
    brute.best
}

impl Brute<'_> {
    /// Decide what happens at the switch `self.order[nth]`, given the branches that have arrived at each switch.
    fn switch(&mut self, nth: usize, mut arrived: BTreeMap<SwitchId, Vec<Branch>>, load: BTreeMap<LinkId, usize>) {
        let at = self.order[nth];
        let mut here = arrived.remove(&at).unwrap_or_default();
        let is_leaf = self.leaves.contains(&at);
        let combines = self.fabric.switch(at).aggregation.is_some();
        if at == self.root {
            let height = match (&here[..], is_leaf) {
                ([only], false) => *only,
                _ => 1 + here.into_iter().max().unwrap_or(0),
            };
            let score = (height, load.values().copied().max().unwrap_or(0).max(1));
            self.best = Some(self.best.map_or(score, |best| best.min(score)));
            return;
        }
        if combines && (is_leaf || here.len() > 1) {
            here = vec![1 + here.into_iter().max().unwrap_or(0)];
        }
        self.send(nth, here, arrived, load);
    }

    /// Try every next hop for each branch that leaves the switch.
    fn send(
        &mut self,
        nth: usize,
        mut left: Vec<Branch>,
        arrived: BTreeMap<SwitchId, Vec<Branch>>,
        load: BTreeMap<LinkId, usize>,
    ) {
        let Some(branch) = left.pop() else { return self.switch(nth + 1, arrived, load) };
        let at = self.order[nth];
        let here = self.distance[at.0 as usize];
        for (next, link) in self.fabric.adjacent(at) {
            if self.distance[next.0 as usize].map(|d| d + 1) == here {
                let (mut arrived, mut load) = (arrived.clone(), load.clone());
                arrived.entry(*next).or_default().push(branch);
                *load.entry(*link).or_default() += 1;
                self.send(nth, left.clone(), arrived, load);
            }
        }
    }
}
