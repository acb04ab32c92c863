//! Where ranks enter the tree: at the nearest switch with a usable node.

use super::Search;
use super::draft::Places;
use crate::plan::PlanError;
use crate::plan::cost::SATURATED_S;
use crate::plan::index::Distances;
use crate::plan::route::{Load, route};
use crate::topo::Uplink;
use std::collections::{BTreeMap, BTreeSet};

/// An entry point of a rank: a cable of its host, and a nearest switch that can aggregate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) uplink: Uplink,
    pub(super) leaf: u32,
}

impl Search<'_> {
    /// Find the nearest usable switches of each host.
    pub(super) fn find_entry_points(&self) -> Result<Vec<Vec<Entry>>, PlanError> {
        let mut nearest: BTreeMap<u32, (u16, Vec<u32>)> = BTreeMap::new();
        let mut all = Vec::with_capacity(self.ranks.len());
        for adapters in self.ranks.iter() {
            let uplinks = || adapters.iter().flat_map(|host| &self.fabric.host(*host).uplinks);
            let is_free = |uplink: &&Uplink| self.byte_s[uplink.link.0 as usize] < SATURATED_S;
            // A full cable is only used for want of another.
            let has_free = uplinks().any(|uplink| is_free(&uplink));
            let mut entries: Vec<(u16, Entry)> = Vec::new();
            for uplink in uplinks().filter(|uplink| !has_free || is_free(uplink)) {
                let switch = uplink.switch.0;
                let (distance, leaves) = nearest.entry(switch).or_insert_with(|| self.nearest_to(switch));
                entries.extend(leaves.iter().map(|&leaf| (*distance, Entry { uplink: *uplink, leaf })));
            }
            let least = entries.iter().map(|(distance, _)| *distance).min();
            entries.retain(|(distance, _)| Some(*distance) == least);
            if entries.is_empty() {
                return Err(PlanError::Isolated { host: self.fabric.host(adapters[0]).name.clone() });
            }
            all.push(entries.into_iter().map(|(_, entry)| entry).collect());
        }
        Ok(all)
    }

    /// The usable switches nearest to a switch (possibly itself), and their distance.
    fn nearest_to(&self, switch: u32) -> (u16, Vec<u32>) {
        let (mut least, mut found) = (0, Vec::new());
        Distances::explore(self.index, self.routing, switch, |near, distance| {
            if self.is_usable(near) {
                least = distance;
                found.push(near);
            }
            !found.is_empty()
        });
        found.sort_unstable();
        (least, found)
    }

    /// The ways to attach the ranks that are worth a try.
    pub(super) fn attachments(&self, load: &mut Load<'_>) -> Vec<Places> {
        let mut takes: BTreeMap<u32, usize> = BTreeMap::new();
        let mut is_given = true;
        for entries in &self.entries {
            if let [only] = &entries[..] {
                *takes.entry(only.leaf).or_default() += 1;
                continue;
            }
            is_given = false;
            let leaves: BTreeSet<u32> = entries.iter().map(|entry| entry.leaf).collect();
            leaves.into_iter().for_each(|leaf| *takes.entry(leaf).or_default() += 1);
        }
        let mut all: Vec<Places> = self.attach(None, load).into_iter().collect();
        if !is_given {
            let mut preferred: Vec<(usize, u32)> = takes.into_iter().map(|(leaf, count)| (count, leaf)).collect();
            preferred.sort_unstable_by_key(|(count, leaf)| (std::cmp::Reverse(*count), *leaf));
            for (_, leaf) in preferred.into_iter().take(PREFERRED_MAX) {
                all.extend(self.attach(Some(leaf), load).filter(|places| {
                    all.iter().all(|other| other.leaves.keys().ne(places.leaves.keys()) || !same(other, places))
                }));
            }
        }
        all
    }

    /// Choose a leaf for each rank: the preferred one if possible, else a leaf of other ranks, else the one that serves
    /// most of the remaining ranks. `None` if a rank cannot reach its leaf.
    fn attach(&self, preferred: Option<u32>, load: &mut Load<'_>) -> Option<Places> {
        let mut leaves: BTreeSet<u32> = preferred.into_iter().collect();
        for entries in &self.entries {
            if entries.iter().all(|entry| entry.leaf == entries[0].leaf) {
                leaves.insert(entries[0].leaf);
            }
        }
        let pick = |entries: &[Entry], leaves: &BTreeSet<u32>| {
            let here = entries.iter().filter(|entry| Some(entry.leaf) == preferred);
            let known = entries.iter().filter(|entry| leaves.contains(&entry.leaf));
            let rate = |entry: &&Entry| self.uplink_byte_s(entry.uplink.link);
            let best = here.min_by(|a, b| rate(a).total_cmp(&rate(b)));
            best.or_else(|| known.min_by(|a, b| rate(a).total_cmp(&rate(b)))).copied()
        };
        let mut chosen: Vec<Option<Entry>> = self.entries.iter().map(|entries| pick(entries, &leaves)).collect();
        loop {
            let open: Vec<usize> = (0..chosen.len()).filter(|rank| chosen[*rank].is_none()).collect();
            if open.is_empty() {
                break;
            }
            let mut takes: BTreeMap<u32, usize> = BTreeMap::new();
            for rank in &open {
                let candidates: BTreeSet<u32> = self.entries[*rank].iter().map(|entry| entry.leaf).collect();
                candidates.into_iter().for_each(|leaf| *takes.entry(leaf).or_default() += 1);
            }
            let (leaf, _) = takes.into_iter().max_by_key(|(leaf, count)| (*count, std::cmp::Reverse(*leaf)))?;
            leaves.insert(leaf);
            open.into_iter().for_each(|rank| chosen[rank] = pick(&self.entries[rank], &leaves));
        }
        load.clear();
        let mut routes = BTreeMap::new();
        let mut ranks = Vec::with_capacity(chosen.len());
        for (rank, entry) in (0u32..).zip(chosen) {
            let Entry { uplink, leaf } = entry?;
            if uplink.switch.0 != leaf {
                let distances = self.distances(leaf);
                routes.insert(rank, route(self.index, self.routing, &distances, uplink.switch.0, load)?);
            }
            ranks.push((uplink, leaf));
        }
        Some(Places::new(self, ranks, routes))
    }
}

fn same(a: &Places, b: &Places) -> bool {
    a.ranks.iter().zip(&b.ranks).all(|(a, b)| (a.0.link, a.1) == (b.0.link, b.1))
}

/// How many leaves are tried as the preferred one of all ranks.
const PREFERRED_MAX: usize = 8;
