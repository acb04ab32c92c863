//! The search: tries every usable switch as root and keeps the best tree.
//!
//! For each root, ranks are attached to leaves. Then the leaves are joined: by branches that meet only at the root if
//! they exist (two levels, exact), else layer by layer. Finally, nodes over their child limit are split.
//!
//! Invariants: a switch is at most one node of a tree; every rank has exactly one leaf; the search is deterministic.

use super::route::{Load, UNREACHABLE, closer, disjoint_paths, distances, shortest_path};
use super::{Child, Limits, Plan, PlanError, PlanNode, PlanRank, Refusal, aligned};
use crate::topo::{Fabric, HostId, LinkId, SwitchId, Uplink};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use sumac_hal::ids::Rank;

/// Find the best tree for the hosts; rank i is at `hosts[i]`.
pub(super) fn find_best(fabric: &Fabric, hosts: &[HostId], limits: &Limits) -> Result<Plan, PlanError> {
    let search = Search::new(fabric, hosts, limits)?;
    let mut best: Option<(Score, Plan)> = None;
    let mut first_error = None;
    for root in search.usable() {
        let Some(entries) = search.attach(root) else { continue };
        for draft in search.drafts(root, entries) {
            match search.split(draft) {
                Ok(draft) => {
                    let plan = search.build_plan(&draft);
                    let score = score(&plan);
                    if best.as_ref().is_none_or(|(least, _)| score < *least) {
                        best = Some((score, plan));
                    }
                }
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
    }
    let (_, mut plan) = best.ok_or_else(|| first_error.unwrap_or_else(|| search.disconnected()))?;
    plan.optimal = search.is_proved_optimal(&plan);
    search.name(&mut plan);
    Ok(plan)
}

/// The score of a tree, less is better, most important first: levels, sharing, not aligned, cables, nodes.
type Score = (usize, usize, bool, usize, usize);

fn score(plan: &Plan) -> Score {
    let cables = plan.nodes.iter().map(|node| node.path.len()).chain(plan.ranks.iter().map(|rank| rank.path.len()));
    (plan.levels, plan.max_link_sharing, !plan.aligned, cables.sum(), plan.nodes.len())
}

/// An entry point of a rank: a cable of its host, and a nearest switch that can aggregate.
#[derive(Debug, Clone, Copy)]
struct Entry {
    uplink: Uplink,
    leaf: SwitchId,
}

/// A tree by switches, before its nodes are numbered.
#[derive(Debug, Clone)]
struct Draft {
    root: SwitchId,
    /// For every node but the root: its parent and the path to it.
    parents: BTreeMap<SwitchId, (SwitchId, Vec<LinkId>)>,
    /// Per rank: the host's cable, the leaf and the whole path to it.
    ranks: Vec<(Uplink, SwitchId, Vec<LinkId>)>,
}

impl Draft {
    fn load(&self, fabric: &Fabric) -> Load {
        let mut load = Load::new(fabric);
        self.parents.values().for_each(|(_, path)| load.add(path));
        self.ranks.iter().for_each(|(_, _, path)| load.add(path));
        load
    }

    /// Every node's children in declared order; nodes are named by their switch.
    fn children(&self) -> BTreeMap<SwitchId, Vec<(u32, Option<SwitchId>)>> {
        let mut children: BTreeMap<SwitchId, Vec<(u32, Option<SwitchId>)>> = BTreeMap::new();
        let mut lowest: BTreeMap<SwitchId, u32> = BTreeMap::new();
        for (rank, (_, leaf, _)) in (0u32..).zip(&self.ranks) {
            children.entry(*leaf).or_default().push((rank, None));
            // Ranks are visited in order, so the first one below a node is its lowest.
            let mut at = *leaf;
            while !lowest.contains_key(&at) {
                lowest.insert(at, rank);
                at = self.parents.get(&at).map_or(at, |(parent, _)| *parent);
            }
        }
        for (node, (parent, _)) in &self.parents {
            children.entry(*parent).or_default().push((lowest.get(node).copied().unwrap_or(u32::MAX), Some(*node)));
        }
        children.values_mut().for_each(|list| list.sort());
        children
    }
}

/// How a branch chooses among equally loaded next hops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    /// Prefer switches that already aggregate, for fewer nodes.
    Gather,
    /// Avoid them, for fewer children per node.
    Spread,
}

struct Search<'a> {
    fabric: &'a Fabric,
    hosts: &'a [HostId],
    /// Per switch: the maximum number of children; 0 if it cannot be a node.
    children_max: Vec<usize>,
    /// Per rank: its possible entry points.
    entries: Vec<Vec<Entry>>,
    distances: Vec<OnceCell<Vec<u32>>>,
}

impl<'a> Search<'a> {
    fn new(fabric: &'a Fabric, hosts: &'a [HostId], limits: &Limits) -> Result<Self, PlanError> {
        if limits.max_children < 2 {
            return Err(PlanError::ChildLimitTooSmall { max_children: limits.max_children });
        }
        let usable: Vec<Result<usize, Refusal>> =
            fabric.switch_ids().map(|switch| limits.children_max(fabric, switch)).collect();
        if usable.iter().all(Result::is_err) {
            // Prefer the reason of a switch that has an aggregation node.
            let refused = fabric.switch_ids().zip(&usable).filter_map(|(switch, usable)| Some((switch, usable.err()?)));
            let first = refused.min_by_key(|(_, reason)| *reason == Refusal::NoAggregationNode);
            let (switch, reason) = first.unwrap_or((SwitchId(0), Refusal::NoAggregationNode));
            let first = fabric.switches().get(switch.0 as usize).map(|switch| switch.name.clone()).unwrap_or_default();
            return Err(PlanError::NoUsableNode { switches: usable.len(), first, reason });
        }
        let children_max = usable.into_iter().map(|usable| usable.unwrap_or(0)).collect();
        let distances = vec![OnceCell::new(); fabric.switches().len()];
        let mut search = Self { fabric, hosts, children_max, entries: Vec::new(), distances };
        search.entries = search.find_entry_points()?;
        Ok(search)
    }

    fn is_usable(&self, switch: SwitchId) -> bool {
        self.children_max[switch.0 as usize] > 0
    }

    fn usable(&self) -> impl Iterator<Item = SwitchId> + use<'_, 'a> {
        self.fabric.switch_ids().filter(|switch| self.is_usable(*switch))
    }

    /// The distance of every switch to `target`.
    fn distances_to(&self, target: SwitchId) -> &[u32] {
        self.distances[target.0 as usize].get_or_init(|| distances(self.fabric, target))
    }

    /// Find the nearest usable switches of each host.
    fn find_entry_points(&self) -> Result<Vec<Vec<Entry>>, PlanError> {
        let mut nearest: BTreeMap<SwitchId, (u32, Vec<SwitchId>)> = BTreeMap::new();
        let mut all = Vec::with_capacity(self.hosts.len());
        for host in self.hosts {
            let host = self.fabric.host(*host);
            let mut entries: Vec<(u32, Entry)> = Vec::new();
            for uplink in &host.uplinks {
                let (distance, leaves) = nearest.entry(uplink.switch).or_insert_with(|| self.nearest_to(uplink.switch));
                entries.extend(leaves.iter().map(|&leaf| (*distance, Entry { uplink: *uplink, leaf })));
            }
            let least = entries.iter().map(|(distance, _)| *distance).min();
            let entries: Vec<Entry> =
                entries.into_iter().filter(|(d, _)| Some(*d) == least).map(|(_, entry)| entry).collect();
            if entries.is_empty() {
                return Err(PlanError::Isolated { host: host.name.clone() });
            }
            all.push(entries);
        }
        Ok(all)
    }

    /// The usable switches nearest to a switch (possibly itself), and their distance.
    fn nearest_to(&self, switch: SwitchId) -> (u32, Vec<SwitchId>) {
        if self.is_usable(switch) {
            return (0, vec![switch]);
        }
        let distance = self.distances_to(switch);
        let least = self.usable().map(|usable| distance[usable.0 as usize]).min().unwrap_or(UNREACHABLE);
        let at_least = |usable: &SwitchId| least != UNREACHABLE && distance[usable.0 as usize] == least;
        (least, self.usable().filter(at_least).collect())
    }

    /// Choose a leaf for each rank: the root if possible, else a leaf of other ranks, else the one that serves most of
    /// the remaining ranks. `None` if a rank cannot reach the root.
    fn attach(&self, root: SwitchId) -> Option<Vec<Entry>> {
        let distance = self.distances_to(root);
        let reaches = |entry: &&Entry| distance[entry.leaf.0 as usize] != UNREACHABLE;
        let options: Vec<Vec<&Entry>> = self.entries.iter().map(|all| all.iter().filter(reaches).collect()).collect();
        let mut leaves = BTreeSet::from([root]);
        for list in &options {
            let first = list.first()?;
            if list.iter().all(|entry| entry.leaf == first.leaf) {
                leaves.insert(first.leaf);
            }
        }
        let pick = |list: &[&Entry], leaves: &BTreeSet<SwitchId>| {
            let at_root = list.iter().find(|entry| entry.leaf == root);
            at_root.or_else(|| list.iter().find(|entry| leaves.contains(&entry.leaf))).map(|entry| **entry)
        };
        let mut chosen: Vec<Option<Entry>> = options.iter().map(|list| pick(list, &leaves)).collect();
        while chosen.iter().any(Option::is_none) {
            let mut takes: BTreeMap<SwitchId, usize> = BTreeMap::new();
            let open = || (0..chosen.len()).filter(|rank| chosen[*rank].is_none());
            for rank in open() {
                let mut candidates: Vec<SwitchId> = options[rank].iter().map(|entry| entry.leaf).collect();
                candidates.dedup();
                candidates.into_iter().for_each(|leaf| *takes.entry(leaf).or_default() += 1);
            }
            let (leaf, _) = takes.into_iter().max_by_key(|(leaf, count)| (*count, std::cmp::Reverse(*leaf)))?;
            leaves.insert(leaf);
            let open: Vec<usize> = open().collect();
            open.into_iter().for_each(|rank| chosen[rank] = pick(&options[rank], &leaves));
        }
        chosen.into_iter().collect()
    }

    /// The candidate trees for a root: one if its branches can be disjoint within the limits, else also those whose
    /// branches join below it.
    fn drafts(&self, root: SwitchId, entries: Vec<Entry>) -> Vec<Draft> {
        let leaves: BTreeSet<SwitchId> = entries.iter().map(|entry| entry.leaf).collect();
        let sources: Vec<SwitchId> = leaves.iter().copied().filter(|leaf| *leaf != root).collect();
        let distance = self.distances_to(root);
        let mut drafts = Vec::new();
        let combines = |switch| self.is_usable(switch);
        if let Some(paths) = disjoint_paths(self.fabric, distance, root, &sources, combines) {
            let children = paths.len() + entries.iter().filter(|entry| entry.leaf == root).count();
            let parents = paths.into_iter().map(|(leaf, path)| (leaf, (root, path))).collect();
            drafts.push(self.draft(root, parents, &entries));
            if children <= self.children_max[root.0 as usize] {
                return drafts;
            }
        }
        for policy in [Policy::Gather, Policy::Spread] {
            let parents = self.join_by_layers(root, &leaves, policy);
            drafts.push(self.draft(root, parents, &entries));
        }
        drafts
    }

    /// Add the ranks to a tree of nodes, and drop a root with a single branch.
    fn draft(
        &self,
        root: SwitchId,
        mut parents: BTreeMap<SwitchId, (SwitchId, Vec<LinkId>)>,
        entries: &[Entry],
    ) -> Draft {
        let mut load = Load::new(self.fabric);
        parents.values().for_each(|(_, path)| load.add(path));
        let mut ranks = Vec::with_capacity(entries.len());
        for Entry { uplink, leaf } in entries {
            let mut path = vec![uplink.link];
            path.extend(shortest_path(self.fabric, self.distances_to(*leaf), uplink.switch, &mut load));
            ranks.push((*uplink, *leaf, path));
        }
        let mut below = parents.iter().filter(|(_, (parent, _))| *parent == root).map(|(node, _)| *node);
        let has_ranks = entries.iter().any(|entry| entry.leaf == root);
        if let (false, Some(only), None) = (has_ranks, below.next(), below.next()) {
            parents.remove(&only);
            return Draft { root: only, parents, ranks };
        }
        Draft { root, parents, ranks }
    }

    /// Join the leaves towards the root, the farthest switches first, aggregating wherever branches meet.
    fn join_by_layers(
        &self,
        root: SwitchId,
        leaves: &BTreeSet<SwitchId>,
        policy: Policy,
    ) -> BTreeMap<SwitchId, (SwitchId, Vec<LinkId>)> {
        let distance = self.distances_to(root);
        let mut load = Load::new(self.fabric);
        let mut parents = BTreeMap::new();
        // Per switch, the branches that have reached it: the node that each starts from, and its path so far.
        let mut branches: BTreeMap<SwitchId, Vec<(SwitchId, Vec<LinkId>)>> = BTreeMap::new();
        let mut order: Vec<SwitchId> =
            self.fabric.switch_ids().filter(|s| distance[s.0 as usize] != UNREACHABLE).collect();
        order.sort_by_key(|switch| (std::cmp::Reverse(distance[switch.0 as usize]), *switch));
        for at in order {
            let mut here = branches.remove(&at).unwrap_or_default();
            let is_leaf = leaves.contains(&at);
            if at == root || (self.is_usable(at) && (is_leaf || here.len() > 1)) {
                for (node, path) in here.drain(..) {
                    parents.insert(node, (at, path));
                }
                here.push((at, Vec::new()));
            }
            if at == root {
                break;
            }
            for (node, mut path) in here {
                let cost = |next: SwitchId, link: LinkId| {
                    let waiting = branches.get(&next).map_or(0, Vec::len) + usize::from(leaves.contains(&next));
                    let joins = if policy == Policy::Gather { usize::from(waiting == 0) } else { waiting };
                    (load.of(link), joins, next, link)
                };
                let Some((next, link)) =
                    closer(self.fabric, distance, at).min_by_key(|(next, link)| cost(*next, *link))
                else {
                    continue;
                };
                load.add(&[link]);
                path.push(link);
                branches.entry(next).or_default().push((node, path));
            }
        }
        parents
    }

    /// Move runs of children of every node over its limit to further nodes.
    fn split(&self, mut draft: Draft) -> Result<Draft, PlanError> {
        loop {
            let children = draft.children();
            let over = children.iter().find(|(node, below)| below.len() > self.children_max[node.0 as usize]);
            let Some((&node, below)) = over else { return Ok(draft) };
            let free = self.usable().filter(|switch| *switch != draft.root && !children.contains_key(switch)).collect();
            self.split_once(&mut draft, node, below, free)?;
        }
    }

    /// Move runs of a node's children to nodes of their own. Runs are as long as possible and a power of two, so that
    /// an aligned tree stays aligned.
    fn split_once(
        &self,
        draft: &mut Draft,
        node: SwitchId,
        children: &[(u32, Option<SwitchId>)],
        mut free: BTreeSet<SwitchId>,
    ) -> Result<(), PlanError> {
        let most = free.iter().map(|switch| self.children_max[switch.0 as usize]).max().unwrap_or(0);
        let most = most.min(children.len() - 1);
        let limit = self.children_max[node.0 as usize];
        let refuse = |chunk| PlanError::ChildLimit {
            node: self.fabric.switch(node).name.clone(),
            children: children.len(),
            limit,
            chunk,
        };
        let chunk = 1 << most.checked_ilog2().filter(|log2| *log2 > 0).ok_or_else(|| refuse(2))?;
        let mut load = draft.load(self.fabric);
        for run in children.chunks(chunk).filter(|run| run.len() > 1) {
            let inner = self.nearest_free(draft, &free, node, run).ok_or_else(|| refuse(run.len()))?;
            free.remove(&inner);
            let distance = self.distances_to(inner);
            for (rank, child) in run {
                let (from, path) = match child {
                    Some(child) => {
                        let Some((parent, path)) = draft.parents.get_mut(child) else { continue };
                        *parent = inner;
                        (*child, path)
                    }
                    None => {
                        let (uplink, leaf, path) = &mut draft.ranks[*rank as usize];
                        *leaf = inner;
                        (uplink.switch, path)
                    }
                };
                load.remove(path);
                // Keep the host's own cable; the rest of the path is new.
                path.truncate(usize::from(child.is_none()));
                load.add(path);
                path.extend(shortest_path(self.fabric, distance, from, &mut load));
            }
            let path = shortest_path(self.fabric, self.distances_to(node), inner, &mut load);
            draft.parents.insert(inner, (node, path));
        }
        Ok(())
    }

    /// The free switch that is nearest to a run of children and their node together, and can take them.
    fn nearest_free(
        &self,
        draft: &Draft,
        free: &BTreeSet<SwitchId>,
        node: SwitchId,
        run: &[(u32, Option<SwitchId>)],
    ) -> Option<SwitchId> {
        let ends = run.iter().map(|(rank, child)| child.unwrap_or(draft.ranks[*rank as usize].0.switch));
        let ends: Vec<SwitchId> = ends.chain([node]).collect();
        let detour = |switch: SwitchId| {
            let distance = self.distances_to(switch);
            ends.iter()
                .map(|end| distance[end.0 as usize])
                .try_fold(0u64, |sum, hops| (hops != UNREACHABLE).then(|| sum + u64::from(hops)))
        };
        let fits = free.iter().filter(|switch| self.children_max[switch.0 as usize] >= run.len());
        fits.filter_map(|switch| Some((detour(*switch)?, *switch))).min().map(|(_, switch)| switch)
    }

    /// Number the nodes breadth first; names are filled in for the chosen tree only.
    fn build_plan(&self, draft: &Draft) -> Plan {
        let mut children = draft.children();
        let mut plan = Plan {
            levels: 1,
            max_children: 0,
            max_link_sharing: draft.load(self.fabric).max() as usize,
            aligned: false,
            optimal: false,
            nodes: vec![new_node(draft.root, 0, None, Vec::new())],
            ranks: Vec::with_capacity(draft.ranks.len()),
        };
        let mut leaf_of = vec![0; draft.ranks.len()];
        let mut index = 0;
        while index < plan.nodes.len() {
            let level = plan.nodes[index].level;
            let below = children.remove(&plan.nodes[index].switch).unwrap_or_default();
            plan.max_children = plan.max_children.max(below.len());
            plan.levels = plan.levels.max(level + 1);
            for (rank, node) in below {
                let child = match node.and_then(|node| Some((node, draft.parents.get(&node)?))) {
                    Some((node, (_, path))) => {
                        plan.nodes.push(new_node(node, level + 1, Some(index), path.clone()));
                        Child::Node(plan.nodes.len() - 1)
                    }
                    None => {
                        leaf_of[rank as usize] = index;
                        Child::Rank(Rank(rank))
                    }
                };
                plan.nodes[index].children.push(child);
            }
            index += 1;
        }
        for ((rank, (_, _, path)), leaf) in (0u32..).zip(&draft.ranks).zip(leaf_of) {
            let host = self.hosts[rank as usize];
            let (name, guid) = (String::new(), String::new());
            plan.ranks.push(PlanRank { rank: Rank(rank), host, name, guid, leaf, path: path.clone() });
        }
        plan.aligned = aligned::is_aligned(&plan);
        plan
    }

    fn name(&self, plan: &mut Plan) {
        for node in &mut plan.nodes {
            let switch = self.fabric.switch(node.switch);
            (node.name, node.guid) = (switch.name.clone(), switch.guid.clone());
        }
        for rank in &mut plan.ranks {
            let host = self.fabric.host(rank.host);
            (rank.name, rank.guid) = (host.name.clone(), host.guid.clone());
        }
    }

    /// Whether the best tree is proved to have the fewest levels and then the least sharing.
    ///
    /// If the cables determine every rank's leaf (and none was moved for a child limit), one level needs a common leaf,
    /// and two levels were searched exactly over all roots. So three levels are the fewest if two were not found, and
    /// one edge per cable is the minimum.
    fn is_proved_optimal(&self, plan: &Plan) -> bool {
        let given = self.entries.iter().zip(&plan.ranks).all(|(entries, rank)| {
            let leaf = plan.nodes[rank.leaf].switch;
            entries.iter().all(|entry| entry.leaf == leaf && entry.uplink.switch == leaf)
        });
        match plan.levels {
            1 | 2 => plan.max_link_sharing == 1 || given,
            3 => plan.max_link_sharing == 1 && given,
            _ => false,
        }
    }

    /// Name two hosts that cannot be joined.
    fn disconnected(&self) -> PlanError {
        let name = |rank: usize| self.fabric.host(self.hosts[rank]).name.clone();
        let distance = self.distances_to(self.entries[0][0].leaf);
        let reached = |entries: &Vec<Entry>| entries.iter().any(|e| distance[e.leaf.0 as usize] != UNREACHABLE);
        let other = self.entries.iter().position(|entries| !reached(entries)).unwrap_or(self.entries.len() - 1);
        PlanError::Disconnected { one: name(0), other: name(other) }
    }
}

fn new_node(switch: SwitchId, level: usize, parent: Option<usize>, path: Vec<LinkId>) -> PlanNode {
    PlanNode { switch, name: String::new(), guid: String::new(), level, parent, children: Vec::new(), path }
}
