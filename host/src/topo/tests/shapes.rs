//! Generated fabrics against the closed forms of their shapes: counts, degrees, distances.

use super::*;
use generate::{Dragonfly, DragonflyPlus, Rails};
use std::collections::VecDeque;

/// Switches, hosts, cables between switches, the least and greatest number of them at a switch, and the greatest
/// distance of two switches with hosts.
type Form = (usize, usize, usize, (usize, usize), usize);

/// Count and measure a fabric.
fn form(fabric: &Fabric) -> Form {
    let degrees = || fabric.switch_ids().map(|switch| fabric.adjacent(switch).len());
    let between = degrees().sum::<usize>() / 2;
    let bounds = (degrees().min().unwrap_or(0), degrees().max().unwrap_or(0));
    let leaves: BTreeSet<SwitchId> = fabric.hosts().iter().flat_map(|host| &host.uplinks).map(|up| up.switch).collect();
    assert_eq!(fabric.links().len(), between + fabric.hosts().len(), "one cable a host");
    let diameter = leaves.iter().map(|leaf| farthest(fabric, *leaf, &leaves)).max().unwrap_or(0);
    (fabric.switches().len(), fabric.hosts().len(), between, bounds, diameter)
}

/// The distance of the farthest of the switches from one of them, by breadth-first search.
fn farthest(fabric: &Fabric, from: SwitchId, to: &BTreeSet<SwitchId>) -> usize {
    let mut distances = vec![usize::MAX; fabric.switches().len()];
    distances[from.0 as usize] = 0;
    let mut open = VecDeque::from([from]);
    while let Some(switch) = open.pop_front() {
        for (next, _) in fabric.adjacent(switch) {
            if distances[next.0 as usize] == usize::MAX {
                distances[next.0 as usize] = distances[switch.0 as usize] + 1;
                open.push_back(*next);
            }
        }
    }
    to.iter().map(|switch| distances[switch.0 as usize]).max().unwrap_or(0)
}

#[test]
fn direct_networks_have_their_closed_forms() {
    let rate = Rate::from_gbits(200.0);
    let golden: [(&str, Result<Fabric, FabricError>, Form); 12] = [
        ("star of 9", generate::star(9, rate), (1, 9, 0, (0, 0), 0)),
        ("ring of 7", generate::ring(7, 2, rate), (7, 14, 7, (2, 2), 3)),
        ("ring of 2", generate::ring(2, 1, rate), (2, 2, 1, (1, 1), 1)),
        ("full mesh of 6", generate::full_mesh(6, 3, rate), (6, 18, 15, (5, 5), 1)),
        ("4x4 torus", generate::torus(&[4, 4], 1, rate), (16, 16, 32, (4, 4), 4)),
        ("5x3 torus", generate::torus(&[5, 3], 2, rate), (15, 30, 30, (4, 4), 2 + 1)),
        ("3x4x5 torus", generate::torus(&[3, 4, 5], 1, rate), (60, 60, 180, (6, 6), 1 + 2 + 2)),
        ("2x4 torus", generate::torus(&[2, 4], 1, rate), (8, 8, 4 + 8, (3, 3), 1 + 2)),
        ("4x5 mesh", generate::mesh(&[4, 5], 1, rate), (20, 20, 3 * 5 + 4 * 4, (2, 4), 3 + 4)),
        ("3x3x3 mesh", generate::mesh(&[3, 3, 3], 1, rate), (27, 27, 3 * 2 * 9, (3, 6), 6)),
        ("hypercube of 5", generate::hypercube(5, 1, rate), (32, 32, 5 * 16, (5, 5), 5)),
        ("hypercube of 1", generate::hypercube(1, 4, rate), (2, 8, 1, (1, 1), 1)),
    ];
    for (name, fabric, expected) in golden {
        let fabric = fabric.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(form(&fabric), expected, "{name}");
        assert!(fabric.links().iter().all(|link| link.rate == rate), "{name}");
        assert_eq!(fabric.hosts()[0].uplinks[0].switch, SwitchId(0), "{name}: hosts are numbered switch by switch");
    }
}

#[test]
fn grouped_networks_have_their_closed_forms() {
    let rate = None;
    // Dragonfly of a, h, p: g = a h + 1 groups; each router a - 1 + h cables; any two groups one.
    for (routers, global, hosts) in [(4, 2, 2), (2, 1, 1), (3, 3, 1), (1, 4, 2)] {
        let fabric = generate::dragonfly(Dragonfly { routers, global, hosts, rate }).expect("a shape");
        let groups = routers * global + 1;
        let cables = groups * routers * (routers - 1) / 2 + groups * (groups - 1) / 2;
        let degree = routers - 1 + global;
        let diameter = if routers > 1 { 3 } else { 1 };
        let expected = (groups * routers, groups * routers * hosts, cables, (degree, degree), diameter);
        assert_eq!(form(&fabric), expected, "{routers} {global} {hosts}");
    }
    // Dragonfly+: spines take g - 1 cables of other groups in turn; leaf, spine, spine, leaf.
    for (groups, leaves, spines, hosts, cables) in [(5, 2, 2, 2, 1), (3, 4, 4, 1, 4), (2, 1, 1, 1, 1)] {
        let shape = DragonflyPlus { groups, leaves, spines, hosts, cables, rate };
        let fabric = generate::dragonfly_plus(shape).expect("a shape");
        let (switches, servers, between, _, diameter) = form(&fabric);
        assert_eq!((switches, servers), (groups * (leaves + spines), groups * leaves * hosts));
        assert_eq!(between, groups * leaves * spines + groups * (groups - 1) / 2 * cables);
        assert!((3..=5).contains(&diameter), "{diameter}");
        let outward: Vec<usize> = fabric
            .switch_ids()
            .filter(|id| fabric.switch(*id).name.starts_with("spine"))
            .map(|id| fabric.adjacent(id).len() - leaves)
            .collect();
        let most = ((groups - 1) * cables).div_ceil(spines);
        assert!(outward.iter().all(|count| *count == most || *count + 1 == most), "even: {outward:?}");
    }
}

#[test]
fn rails_are_apart_and_belong_to_servers() {
    let rate = Rate::from_gbits(400.0);
    let fabric =
        generate::rails(Rails { servers: 64, rails: 8, servers_per_leaf: 32, spines: 4, rate }).expect("a shape");
    assert_eq!((fabric.switches().len(), fabric.hosts().len(), fabric.servers().len()), (8 * (2 + 4), 512, 64));
    assert_eq!(fabric.links().len(), 512 + 8 * 2 * 4);
    assert!(fabric.servers().iter().all(|server| server.adapters.len() == 8));
    let leaf_of = |host: HostId| fabric.switch(fabric.host(host).uplinks[0].switch).name.clone();
    let n63 = fabric.server(fabric.find_server("n63").expect("there"));
    let leaves: Vec<String> = n63.adapters.iter().map(|host| leaf_of(*host)).collect();
    assert_eq!(leaves, (0..8).map(|rail| format!("leaf{rail}-1")).collect::<Vec<_>>());
    let single = Rails { servers: 3, rails: 2, servers_per_leaf: 4, spines: 0, rate };
    assert_eq!(generate::rails(single).expect("a shape").switches().len(), 2);
}

#[test]
fn oversubscribed_leaf_spine_has_fewer_uplinks_than_hosts() {
    let shape = LeafSpine { leaves: 8, spines: 2, hosts_per_leaf: 16, cables: 2, rate: None };
    let fabric = Fabric::leaf_spine(shape).expect("a shape");
    assert_eq!(form(&fabric), (10, 128, 32, (4, 16), 2), "16 hosts to 4 uplinks: 4 to 1");
    let tree = Fabric::fat_tree(6, None).expect("a shape");
    assert_eq!(form(&tree), (45, 54, 108, (3, 6), 4));
}

#[test]
fn impossible_shapes_are_refused_with_the_limit() {
    let rate = None;
    for (made, message) in [
        (generate::torus(&[], 1, rate), "dimensions 0"),
        (generate::torus(&[4, 1], 1, rate), "a dimension of 1"),
        (generate::torus(&[60_000, 60_000, 60_000, 60_000, 60_000], 1, rate), "switches"),
        (generate::mesh(&[300, 300], 1, rate), "switches 90000"),
        (generate::hypercube(17, 1, rate), "dimensions 17"),
        (generate::full_mesh(2000, 1, rate), "cables 1999000"),
        (generate::star(65_536, rate), "hosts a switch 65536"),
        (generate::ring(1, 1, rate), "a dimension of 1"),
        (generate::ring(60_000, 60_000, rate), "hosts 3600000000"),
        (generate::dragonfly(Dragonfly { routers: 0, global: 1, hosts: 1, rate }), "routers a group 0"),
        (generate::dragonfly(Dragonfly { routers: 256, global: 256, hosts: 1, rate }), "routers 16777472"),
        (
            generate::dragonfly_plus(DragonflyPlus { groups: 1, leaves: 1, spines: 1, hosts: 1, cables: 1, rate }),
            "groups 1",
        ),
        (generate::rails(Rails { servers: 5, rails: 1, servers_per_leaf: 4, spines: 0, rate }), "spines 0"),
    ] {
        let error = made.expect_err(message).to_string();
        assert!(error.contains(message), "{error}\nexpected {message}");
    }
}
