//! The ranks of a job grouped by host, and what that does to a tree.
//!
//! A tree is planned for the groups: each is one host, and stands for its lowest rank. Then each group of several ranks
//! becomes a node whose children are these ranks, in order. So the children of every node stay in order of their lowest
//! rank.

use crate::plan::Child;
use sumac_hal::ids::Rank;

/// The ranks of a job, grouped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostGroups {
    /// The ranks of each group in order, and the host that they share. Groups are in order of their lowest rank.
    groups: Vec<(Vec<Rank>, Option<usize>)>,
}

impl HostGroups {
    /// Group `ranks` ranks by the hosts that have a device. Ranks of no host are alone. `hosts` are disjoint, and list
    /// ranks in order.
    pub fn new(ranks: u32, hosts: &[Vec<Rank>]) -> Self {
        let mut host_of = vec![None; ranks as usize];
        for (host, ranks) in hosts.iter().enumerate() {
            for rank in ranks {
                if let Some(place) = host_of.get_mut(rank.0 as usize) {
                    *place = Some(host);
                }
            }
        }
        let mut groups: Vec<(Vec<Rank>, Option<usize>)> = Vec::new();
        let mut group_of = vec![None; hosts.len()];
        for (rank, host) in (0..ranks).map(Rank).zip(host_of) {
            match host.and_then(|host| group_of[host]) {
                Some(group) => {
                    let (ranks, _): &mut (Vec<Rank>, _) = &mut groups[group];
                    ranks.push(rank);
                }
                None => {
                    if let Some(host) = host {
                        group_of[host] = Some(groups.len());
                    }
                    groups.push((vec![rank], host));
                }
            }
        }
        Self { groups }
    }

    /// The number of groups.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether there is no group.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The lowest rank of each group.
    pub fn lowest(&self) -> impl Iterator<Item = Rank> {
        self.groups.iter().filter_map(|(ranks, _)| ranks.first().copied())
    }

    /// The group of each rank, in order of rank.
    pub fn group_of_ranks(&self) -> Vec<usize> {
        let mut of_ranks = vec![0; self.groups.iter().map(|(ranks, _)| ranks.len()).sum()];
        for (group, (ranks, _)) in self.groups.iter().enumerate() {
            ranks.iter().for_each(|rank| of_ranks[rank.0 as usize] = group);
        }
        of_ranks
    }

    /// Expand a tree over groups to one over ranks. `nodes` are the children of its nodes, root first, in which a rank
    /// stands for the group of that number. Returns the host of each node that was appended.
    pub fn expand(&self, nodes: &mut Vec<Vec<Child>>) -> Vec<usize> {
        let (mut below, mut hosts) = (Vec::new(), Vec::new());
        let first = nodes.len();
        for child in nodes.iter_mut().flatten() {
            let Child::Rank(group) = *child else { continue };
            match &self.groups[group.0 as usize] {
                (ranks, Some(host)) => {
                    *child = Child::Node(first + below.len());
                    below.push(ranks.iter().copied().map(Child::Rank).collect());
                    hosts.push(*host);
                }
                (ranks, None) => *child = Child::Rank(ranks[0]),
            }
        }
        nodes.append(&mut below);
        hosts
    }
}

/// The number of levels of a tree, of which `nodes` are the children, parents first.
pub(crate) fn levels(nodes: &[Vec<Child>]) -> u32 {
    let mut level = vec![1; nodes.len()];
    for (index, children) in nodes.iter().enumerate() {
        for child in children {
            if let Child::Node(below) = *child {
                level[below] = level[index] + 1;
            }
        }
    }
    level.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(numbers: &[u32]) -> Vec<Rank> {
        numbers.iter().copied().map(Rank).collect()
    }

    fn children(numbers: &[u32]) -> Vec<Child> {
        ranks(numbers).into_iter().map(Child::Rank).collect()
    }

    #[test]
    fn tree_over_two_hosts_has_one_child_a_host() {
        let groups = HostGroups::new(4, &[ranks(&[0, 1]), ranks(&[2, 3])]);
        assert_eq!((groups.len(), groups.lowest().collect::<Vec<_>>()), (2, ranks(&[0, 2])));
        let mut nodes = vec![children(&[0, 1])];
        assert_eq!(groups.expand(&mut nodes), [0, 1]);
        assert_eq!(nodes, [vec![Child::Node(1), Child::Node(2)], children(&[0, 1]), children(&[2, 3])]);
        assert_eq!(levels(&nodes), 2);
    }

    #[test]
    fn ranks_placed_round_robin_keep_their_order_within_each_host() {
        let groups = HostGroups::new(5, &[ranks(&[1, 3]), ranks(&[0, 2])]);
        assert_eq!(groups.lowest().collect::<Vec<_>>(), ranks(&[0, 1, 4]));
        assert_eq!(groups.group_of_ranks(), [0, 1, 0, 1, 2]);
        let mut nodes = vec![vec![Child::Node(1), Child::Rank(Rank(2))], children(&[0, 1])];
        assert_eq!(groups.expand(&mut nodes), [1, 0]);
        let above = vec![Child::Node(2), Child::Node(3)];
        let root = vec![Child::Node(1), Child::Rank(Rank(4))];
        assert_eq!(nodes, [root, above, children(&[0, 2]), children(&[1, 3])]);
        assert_eq!(levels(&nodes), 3);
    }

    #[test]
    fn tree_without_shared_hosts_stays_the_same() {
        let mut nodes = vec![children(&[0, 1, 2])];
        assert_eq!(HostGroups::new(3, &[]).expand(&mut nodes), [0; 0]);
        assert_eq!((nodes[0].clone(), levels(&nodes)), (children(&[0, 1, 2]), 1));
    }
}
