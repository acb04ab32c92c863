//! Splits nodes with more children than their limit: runs of children move to further nodes nearby.

use super::Search;
use super::draft::{Draft, Places};
use crate::plan::PlanError;
use crate::plan::route::{Load, route};
use crate::topo::SwitchId;
use std::collections::BTreeSet;
use std::rc::Rc;

impl Search<'_> {
    /// Move runs of children of every node over its limit to further nodes.
    pub(super) fn split(&self, mut draft: Draft, load: &mut Load<'_>) -> Result<Draft, PlanError> {
        loop {
            let counts = draft.child_counts();
            let Some((&node, _)) = counts.iter().find(|(node, count)| **count > self.node(**node).children_max) else {
                return Ok(draft);
            };
            let children = draft.children().remove(&node).unwrap_or_default();
            draft.put(load);
            self.split_once(&mut draft, (node, &children), counts.into_keys().collect(), load)?;
        }
    }

    /// Move runs of a node's children to nodes of their own. Runs are as long as possible and a power of two, so that
    /// an aligned tree stays aligned.
    fn split_once(
        &self,
        draft: &mut Draft,
        (node, children): (u32, &[(u32, Option<u32>)]),
        mut taken: BTreeSet<u32>,
        load: &mut Load<'_>,
    ) -> Result<(), PlanError> {
        let near = self.all_distances(node);
        let is_free = |switch: &u32| self.is_usable(*switch) && near.reaches(*switch);
        let mut free: Vec<u32> = (0..self.nodes.len() as u32).filter(is_free).collect();
        free.sort_by_key(|switch| (near.of(*switch), *switch));
        let limits = free.iter().filter(|switch| !taken.contains(switch)).map(|switch| self.node(*switch).children_max);
        let most = limits.max().unwrap_or(0).min(children.len() - 1);
        let refuse = |chunk| PlanError::ChildLimit {
            node: self.fabric.switch(SwitchId(node)).name.clone(),
            children: children.len(),
            limit: self.node(node).children_max,
            chunk,
        };
        let chunk = 1 << most.checked_ilog2().filter(|log2| *log2 > 0).ok_or_else(|| refuse(2))?;
        for run in children.chunks(chunk).filter(|run| run.len() > 1) {
            let ends: Vec<u32> = run
                .iter()
                .map(|(rank, child)| child.unwrap_or(draft.places.ranks[*rank as usize].0.switch.0))
                .collect();
            let fits = |switch: &&u32| !taken.contains(switch) && self.node(**switch).children_max >= run.len();
            let candidates = free.iter().copied().filter(|switch| fits(&switch)).take(NEAR_MAX);
            let inner = candidates.filter_map(|switch| Some((self.detour(&ends, switch, near.of(switch))?, switch)));
            let (_, inner) = inner.min().ok_or_else(|| refuse(run.len()))?;
            taken.insert(inner);
            self.move_run(draft, (node, inner), run, load).ok_or_else(|| refuse(run.len()))?;
        }
        Ok(())
    }

    /// The cables from the ends to a switch and on to their node.
    fn detour(&self, ends: &[u32], switch: u32, onward: u16) -> Option<u32> {
        let distances = self.all_distances(switch);
        ends.iter().try_fold(u32::from(onward), |sum, end| {
            distances.reaches(*end).then(|| sum + u32::from(distances.of(*end)))
        })
    }

    fn move_run(
        &self,
        draft: &mut Draft,
        (node, inner): (u32, u32),
        run: &[(u32, Option<u32>)],
        load: &mut Load<'_>,
    ) -> Option<()> {
        let distances = self.all_distances(inner);
        let routed = |from, load: &mut Load<'_>| route(self.index, self.routing, &distances, from, load);
        let moves_ranks = run.iter().any(|(_, child)| child.is_none());
        let mut places: Option<Places> = moves_ranks.then(|| Places::clone(&draft.places));
        for (rank, child) in run {
            match (child, &mut places) {
                (Some(child), _) => {
                    let (parent, old) = draft.parents.get_mut(child)?;
                    load.remove(old);
                    (*parent, *old) = (inner, routed(*child, load)?);
                }
                (None, Some(places)) => {
                    if let Some(old) = places.routes.remove(rank) {
                        load.remove(&old);
                    }
                    let (uplink, leaf) = &mut places.ranks[*rank as usize];
                    *leaf = inner;
                    if uplink.switch.0 != inner {
                        places.routes.insert(*rank, routed(uplink.switch.0, load)?);
                    }
                }
                (None, None) => {}
            }
        }
        if let Some(mut places) = places {
            places.count(self);
            draft.places = Rc::new(places);
        }
        let onward = self.all_distances(node);
        draft.parents.insert(inner, (node, route(self.index, self.routing, &onward, inner, load)?));
        Some(())
    }
}

/// How many of the nearest free switches are compared.
const NEAR_MAX: usize = 16;
