//! How edges of many jobs spread over the cables between switches.

use super::*;
use crate::topo::Device;
use std::collections::VecDeque;

fn is_between(fabric: &Fabric, link: LinkId) -> bool {
    fabric.link(link).ends.iter().all(|end| matches!(end.device, Device::Switch(_)))
}

/// The cables between switches that each edge of a plan takes.
fn cables_between<'a>(fabric: &'a Fabric, plan: &'a Plan) -> impl Iterator<Item = LinkId> + 'a {
    let paths = plan.nodes.iter().map(|node| &node.path).chain(plan.ranks.iter().map(|rank| &rank.path));
    paths.flatten().copied().filter(|link| is_between(fabric, *link))
}

fn beside(load: &[u32]) -> Limits {
    Limits { pricing: Pricing { load: Some(load.into()), ..Pricing::default() }, ..Limits::default() }
}

/// Let jobs come and go; return the most edges that a cable between switches has carried, and the most that it may.
fn run_jobs(radix: usize, (jobs, at_once): (usize, usize), ranks: std::ops::Range<usize>, seed: u64) -> (u32, u32) {
    let fabric = Fabric::fat_tree(radix, Rate::from_gbits(400.0)).expect("a possible shape");
    let planner = Planner::new(&fabric);
    let names: Vec<&str> = fabric.hosts().iter().map(|host| host.name.as_str()).collect();
    let mut state = seed;
    let mut below = |limit: usize| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 33) as usize % limit
    };
    let (mut load, mut leaving) = (vec![0_u32; fabric.links().len()], vec![0_u32; fabric.switches().len()]);
    let mut running: VecDeque<Plan> = VecDeque::new();
    let (mut most, mut allowed) = (0, 0);
    for _ in 0..jobs {
        if running.len() == at_once {
            let gone = running.remove(below(at_once)).expect("in range");
            gone.nodes.iter().skip(1).for_each(|node| leaving[node.switch.0 as usize] -= 1);
            let paths = gone.nodes.iter().map(|node| &node.path).chain(gone.ranks.iter().map(|rank| &rank.path));
            paths.flatten().for_each(|link| load[link.0 as usize] -= 1);
        }
        let count = ranks.start + below(ranks.len());
        let mut hosts = BTreeSet::new();
        while hosts.len() < count {
            hosts.insert(names[below(names.len())].to_owned());
        }
        let limits = beside(&load);
        let plan = planner.plan(&HostSelection::Named(hosts.into_iter().collect()), &limits).expect("a tree");
        verify(&fabric, &plan, &limits).unwrap_or_else(|error| panic!("{error}"));
        plan.nodes.iter().skip(1).for_each(|node| leaving[node.switch.0 as usize] += 1);
        let paths = plan.nodes.iter().map(|node| &node.path).chain(plan.ranks.iter().map(|rank| &rank.path));
        paths.flatten().for_each(|link| load[link.0 as usize] += 1);
        running.push_back(plan);
        let between = fabric.links().iter().zip(0..).map(|(_, id)| LinkId(id)).filter(|id| is_between(&fabric, *id));
        most = most.max(between.map(|link| load[link.0 as usize]).max().unwrap_or(0));
        let leaves: BTreeSet<SwitchId> = fabric.hosts().iter().map(|host| host.uplinks[0].switch).collect();
        let share = |leaf: &SwitchId| leaving[leaf.0 as usize].div_ceil(fabric.adjacent(*leaf).len() as u32) + 1;
        allowed = allowed.max(leaves.iter().map(share).max().unwrap_or(0));
    }
    (most, allowed)
}

#[test]
fn jobs_that_come_and_go_keep_to_an_even_spread() {
    for (radix, seed) in [(12, 1), (16, 2), (16, 3)] {
        let (most, allowed) = run_jobs(radix, (150, 30), 4..60, seed);
        assert!(most <= allowed, "radix {radix}, seed {seed}: {most} edges on a cable, {allowed} allowed");
    }
}

#[test]
fn edge_goes_around_a_crowded_cable_where_no_root_avoids_one() {
    let fabric = Fabric::fat_tree(4, Rate::from_gbits(400.0)).expect("a possible shape");
    let mut load = vec![0; fabric.links().len()];
    // So many edges on a host's cable that those between switches cost the tree nothing.
    let hosts: Vec<&str> = [0, 15].map(|host: usize| fabric.hosts()[host].name.as_str()).to_vec();
    for (host, plane) in [(0, 0), (15, 1)] {
        let uplink = fabric.hosts()[host].uplinks[0];
        load[uplink.link.0 as usize] = 20;
        // Either plane has a crowded cable at one of the leaves.
        load[fabric.adjacent(uplink.switch)[plane].1.0 as usize] = 9;
    }
    let limits = beside(&load);
    let plan = planned(&fabric, HostSelection::Named(hosts.iter().map(ToString::to_string).collect()), &limits);
    let crowded: Vec<LinkId> = cables_between(&fabric, &plan).filter(|link| load[link.0 as usize] > 0).collect();
    assert_eq!(crowded, [], "{}", plan.to_text());
    assert!(!plan.optimal && plan.gap > 0.0, "a faster tree crowds a cable");
    // On idle cables there is nothing to go around.
    let idle = planned(&fabric, HostSelection::Named(hosts.iter().map(ToString::to_string).collect()), &beside(&[]));
    assert!(idle.nodes.len() < plan.nodes.len() && idle.levels < plan.levels, "{}", plan.to_text());
}
