//! Groups of fabrics against those that their shapes have, and the shape of ranks on them.

use super::*;
use generate::{Dragonfly, DragonflyPlus, Rails};

/// The shape of ranks at these hosts, by index.
fn shape_of(fabric: &Fabric, hosts: impl IntoIterator<Item = usize>) -> String {
    let ranks: Vec<HostId> = hosts.into_iter().map(|host| HostId(host as u32)).collect();
    let shape = Groups::new(fabric).shape_of(fabric, &ranks);
    shape.check(ranks.len() as u32).expect("it fits");
    shape.to_string()
}

fn shape_of_all(fabric: &Fabric) -> String {
    shape_of(fabric, 0..fabric.hosts().len())
}

#[test]
fn ranks_on_a_torus_or_mesh_are_a_grid() {
    for extents in
        [&[2, 2][..], &[2, 3], &[3, 2], &[4, 4], &[5, 3], &[2, 4, 3], &[4, 2, 2], &[3, 3, 3, 3], &[2, 2, 2, 2]]
    {
        let text = |extents: &[usize]| extents.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
        for fabric in [generate::torus(extents, 1, None), generate::mesh(extents, 1, None)] {
            assert_eq!(shape_of_all(&fabric.expect("valid")), text(extents));
        }
        // Hosts at one switch are the last dimension, where there may be one more.
        let several = generate::torus(extents, 3, None).expect("valid");
        let expected = if extents.len() < 4 { text(&[extents, &[3]].concat()) } else { "servers:3".into() };
        assert_eq!(shape_of_all(&several), expected);
    }
    let cube = generate::hypercube(3, 1, None).expect("valid");
    assert_eq!(shape_of_all(&cube), "2x2x2");
    for one in [generate::ring(6, 1, None), generate::full_mesh(6, 1, None), generate::star(6, None)] {
        assert_eq!(shape_of_all(&one.expect("valid")), "line");
    }
    assert_eq!(shape_of_all(&generate::ring(6, 2, None).expect("valid")), "servers:2");
    let of_six = generate::torus(&[2, 2, 2, 2, 2, 2], 1, None).expect("valid");
    assert_eq!(shape_of_all(&of_six), "line", "more dimensions than a shape has");
}

#[test]
fn ranks_on_a_hyperx_are_a_grid() {
    // Each switch is joined to all others of its row and of its column.
    let mut text = String::new();
    for at in 0..12 {
        text += &format!("[[switch]]\nname = \"s{at}\"\n[[host]]\nname = \"h{at}\"\n");
        text += &format!("[[link]]\nends = [\"h{at}\", \"s{at}\"]\n");
        let joined = (at + 1..12).filter(|to| to / 4 == at / 4 || to % 4 == at % 4);
        joined.for_each(|to| text += &format!("[[link]]\nends = [\"s{at}\", \"s{to}\"]\n"));
    }
    assert_eq!(shape_of_all(&Fabric::from_toml(&text).expect("valid")), "3x4");
}

#[test]
fn ranks_on_a_part_of_a_torus_are_the_grid_of_that_part() {
    let torus = generate::torus(&[4, 4], 1, None).expect("valid");
    assert_eq!(shape_of(&torus, 0..8), "2x4");
    assert_eq!(shape_of(&torus, [0, 1, 4, 5]), "2x2");
    assert_eq!(shape_of(&torus, [0, 3, 12, 15]), "2x2", "around the ends");
    // In another order, with a gap, or as a line.
    for hosts in [&[0, 4, 1, 5, 2, 6][..], &[0, 2, 4, 6]] {
        assert_ne!(shape_of(&torus, hosts.iter().copied()), format!("2x{}", hosts.len() / 2), "{hosts:?}");
    }
    for hosts in [&[0, 1, 2, 3][..], &[0, 5, 10, 15], &[0, 1, 5, 4], &[0, 1, 2, 3, 4, 5, 6], &[0, 1, 0, 1], &[]] {
        assert_eq!(shape_of(&torus, hosts.iter().copied()), "line", "{hosts:?}");
    }
}

#[test]
fn grid_of_which_a_cable_is_missing_is_none() {
    let torus = generate::torus(&[4, 4], 1, None).expect("valid");
    let between = |a: &str, b: &str| {
        let ends = [a, b].map(|name| torus.find_switch(name).expect("a switch"));
        let (_, link) = torus.adjacent(ends[0]).iter().find(|(to, _)| *to == ends[1]).expect("joined");
        torus.without_links(&BTreeSet::from([*link]))
    };
    assert_eq!(shape_of_all(&between("s1-1", "s1-2")), "line");
    assert_eq!(shape_of_all(&between("s1-1", "s2-1")), "line");
    assert_eq!(shape_of_all(&between("s0-0", "s0-3")), "4x4", "that around the end is not needed");
}

#[test]
fn groups_of_a_dragonfly_are_found() {
    for (routers, global, hosts) in [(3, 1, 1), (4, 2, 2), (5, 3, 1), (6, 3, 3), (7, 5, 1), (8, 4, 4)] {
        let fabric = generate::dragonfly(Dragonfly { routers, global, hosts, rate: None }).expect("valid");
        let groups = routers * global + 1;
        assert_eq!(shape_of_all(&fabric), format!("servers:{}", routers * hosts), "{routers} {global} {hosts}");
        // Two ranks of each group, and one.
        let some = |each: usize| {
            let of_group = move |group: usize| (0..each).map(move |rank| group * routers * hosts + rank);
            shape_of(&fabric, (0..groups).flat_map(of_group))
        };
        assert_eq!((some(2), some(1)), ("servers:2".into(), "line".into()));
        let mixed = (0..routers * hosts).flat_map(|rank| [rank, routers * hosts + rank]);
        assert_eq!(shape_of(&fabric, mixed), "line", "ranks of both groups by turns");
    }
}

#[test]
fn dragonfly_that_lost_cables_keeps_its_groups() {
    let fabric = generate::dragonfly(Dragonfly { routers: 8, global: 3, hosts: 1, rate: None }).expect("valid");
    let name = |link: &LinkId| fabric.link(*link).ends.map(|end| fabric.name(end.device)[..2].to_owned());
    let links: Vec<LinkId> = (0..fabric.links().len() as u32).map(LinkId).collect();
    let inside: Vec<&LinkId> = links.iter().filter(|link| name(link) == ["r3", "r3"]).collect();
    let between = links.iter().find(|link| name(link) == ["r1", "r4"]).expect("a cable between groups");
    assert_eq!(inside.len(), 28);
    for lost in inside.windows(2) {
        let lost = BTreeSet::from([*lost[0], *lost[1], *between]);
        assert_eq!(shape_of_all(&fabric.without_links(&lost)), "servers:8", "without {lost:?}");
    }
}

#[test]
fn groups_of_a_dragonfly_plus_are_found() {
    let of = |groups, leaves, spines, hosts, cables| {
        let shape = DragonflyPlus { groups, leaves, spines, hosts, cables, rate: None };
        shape_of_all(&generate::dragonfly_plus(shape).expect("valid"))
    };
    assert_eq!(of(2, 2, 2, 1, 1), "servers:2");
    assert_eq!(of(5, 4, 4, 8, 2), "servers:32");
    assert_eq!(of(3, 3, 2, 2, 2), "servers:6");
    // 8 cables leave a group of 6 hosts, and 2 a leaf of 2.
    assert_eq!(of(3, 3, 2, 2, 4), "servers:2");
}

#[test]
fn ranks_below_leaves_are_groups_of_the_narrowest_level() {
    let leaf_spine = |leaves, spines| {
        let shape = LeafSpine { leaves, spines, hosts_per_leaf: 4, cables: 1, rate: None };
        Fabric::leaf_spine(shape).expect("valid")
    };
    assert_eq!(shape_of_all(&leaf_spine(3, 4)), "servers:4");
    assert_eq!(shape_of_all(&leaf_spine(1, 0)), "line");
    assert_eq!(shape_of(&leaf_spine(3, 4), [0, 1, 4, 5]), "servers:2");
    assert_eq!(shape_of(&leaf_spine(3, 4), [0, 1, 2, 4, 5]), "line", "more below one leaf");
    // Pods of four leaves of four hosts. Where as much leaves a pod as leaves its leaves, leaves are the groups.
    for (cores, expected) in [(4, "servers:4"), (2, "servers:16")] {
        let fabric = pods(cores, |_| String::new());
        assert_eq!(shape_of_all(&fabric), expected, "{cores} cables to the core from each switch of a pod");
        let pair = (0..8).map(|rank| rank * 4);
        assert_eq!(shape_of(&fabric, pair), "servers:4", "one rank below each leaf");
    }
    // The same by the rates of cables.
    let slow = |tier: &str| format!("rate_gbits = {}\n", if tier == "core" { 100 } else { 200 });
    assert_eq!(shape_of_all(&pods(4, slow)), "servers:16");
}

/// Two pods of four leaves, each leaf with four hosts and a cable to each of four switches of its pod, each with cables
/// to so many switches of the core.
fn pods(cores: usize, rate: impl Fn(&str) -> String) -> Fabric {
    let (mut text, hosts) = (String::new(), 4);
    (0..cores).for_each(|core| text += &format!("[[switch]]\nname = \"core{core}\"\n"));
    let cable = |a: &str, b: &str, tier: &str| format!("[[link]]\nends = [{a:?}, {b:?}]\n{}", rate(tier));
    for pod in 0..2 {
        for at in 0..4 {
            text += &format!("[[switch]]\nname = \"leaf{pod}-{at}\"\n[[switch]]\nname = \"top{pod}-{at}\"\n");
        }
        for at in 0..4 {
            let (leaf, top) = (format!("leaf{pod}-{at}"), format!("top{pod}-{at}"));
            for host in 0..hosts {
                let host = format!("h{}", (pod * 4 + at) * hosts + host);
                text += &format!("[[host]]\nname = {host:?}\n{}", cable(&host, &leaf, "host"));
            }
            (0..4).for_each(|other| text += &cable(&leaf, &format!("top{pod}-{other}"), "leaf"));
            (0..cores).for_each(|core| text += &cable(&top, &format!("core{core}"), "core"));
        }
    }
    Fabric::from_toml(&text).expect("valid")
}

#[test]
fn ranks_at_the_first_adapters_of_rails_are_groups_of_their_leaves() {
    let shape = Rails { servers: 8, rails: 2, servers_per_leaf: 4, spines: 2, rate: None };
    let fabric = generate::rails(shape).expect("valid");
    let first: Vec<usize> = fabric.servers().iter().map(|server| server.adapters[0].0 as usize).collect();
    assert_eq!(shape_of(&fabric, first), "servers:4");
}

#[test]
fn device_between_a_host_and_its_switch_changes_nothing() {
    let fabric = generate::torus(&[4, 4], 1, None).expect("valid");
    let places: Vec<DevicePlace> = fabric.host_ids().map(DevicePlace::Host).collect();
    assert_eq!(shape_of_all(&fabric.with_devices(&places).expect("room")), "4x4");
}

#[test]
fn real_dumps_have_the_shapes_of_their_fabrics() {
    for (file, expected) in [("real-t44", "4x4"), ("real-dfp", "servers:4"), ("real-ft4", "servers:2")] {
        let Some(fabric) = shared_input(&format!("{file}.ibnetdiscover")) else { continue };
        assert_eq!(shape_of_all(&fabric), expected, "{file}");
    }
}
