//! Servers and selections.

use super::*;

/// A dump of one switch with these adapters: description and system image.
fn adapters(list: &[(&str, u64)]) -> Fabric {
    let mut text = String::from("Switch 60 \"S-00000000000000ff\" # \"leaf\"\n\n");
    for (index, (description, image)) in (1..).zip(list) {
        let _ = write!(
            text,
            "sysimgguid=0x{image:x}\nCa 1 \"H-{index:016x}\" # \"{description}\"\n[1] \"S-00000000000000ff\"[{index}]\n\n"
        );
    }
    Fabric::from_ibnetdiscover(&text).expect("valid")
}

fn groups(fabric: &Fabric) -> Vec<(&str, Vec<u32>)> {
    fabric.servers().iter().map(|s| (s.name.as_str(), s.adapters.iter().map(|host| host.0).collect())).collect()
}

fn taken(fabric: &Fabric, unit: Unit, which: &str, exclude: &[&str]) -> Result<Taken, SelectError> {
    let which = which.parse().expect("infallible");
    Selection { unit, which, exclude: exclude.iter().map(ToString::to_string).collect() }.resolve(fabric)
}

fn hosts<'a>(fabric: &'a Fabric, taken: &Taken) -> Vec<&'a str> {
    taken.hosts.iter().map(|host| fabric.host(*host).name.as_str()).collect()
}

#[test]
fn adapters_of_one_machine_are_one_server() {
    let fabric = adapters(&[
        ("n10 HCA-1", 1),
        ("n2 HCA-2", 2),
        ("n2 HCA-1", 3),
        ("MT4129 ConnectX7   Mellanox Technologies", 4),
        ("MT4129 ConnectX7   Mellanox Technologies", 4),
        ("MT4129 ConnectX7   Mellanox Technologies", 2),
        ("MT4129 ConnectX7   Mellanox Technologies", 0),
        ("n2", 7),
    ]);
    // The sixth has the image of `n2 HCA-2`; the fourth and fifth are two ports of one adapter; the seventh is alone.
    let sixth = fabric.find_host("0000000000000006").expect("there").0;
    let names: Vec<(&str, usize)> = groups(&fabric).iter().map(|(name, hosts)| (*name, hosts.len())).collect();
    assert_eq!(names, [("n2", 4), ("n10", 1), ("0000000000000004", 2), ("0000000000000007", 1)]);
    assert!(fabric.servers()[0].adapters.contains(&HostId(sixth)));
    for (id, server) in fabric.server_ids().zip(fabric.servers()) {
        assert!(server.adapters.iter().all(|host| fabric.host(*host).server == id));
        assert_eq!(fabric.find_server(&server.name), Some(id));
    }
}

#[test]
fn description_that_two_machines_share_names_neither() {
    let fabric = adapters(&[("localhost HCA-1", 1), ("localhost HCA-1", 2), ("n1 HCA-1", 3), ("n1 HCA-1", 3)]);
    let names: Vec<(&str, usize)> = groups(&fabric).iter().map(|(name, hosts)| (*name, hosts.len())).collect();
    assert_eq!(names, [("n1", 2), ("0000000000000001", 1), ("0000000000000002", 1)]);
    assert!(fabric.warnings()[0].to_string().starts_with("adapters of several machines are called `localhost HCA-1`"));
}

#[test]
fn rank_of_a_server_is_at_the_rail_that_most_have() {
    let fabric =
        adapters(&[("a HCA-1", 1), ("a HCA-2", 2), ("b HCA-2", 3), ("b HCA-3", 4), ("c HCA-3", 5), ("c HCA-2", 6)]);
    let all = taken(&fabric, Unit::Server, "all", &[]).expect("three");
    assert_eq!(hosts(&fabric, &all), ["a HCA-2", "b HCA-2", "c HCA-2"]);
    assert_eq!(all.rails.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 2]);
    assert_eq!(all.describe(&fabric), ["3 hosts: a, b, c", "each host is one rank, at `HCA-2` of its 2 adapters"]);
    let two = taken(&fabric, Unit::Server, "c,b HCA-3", &[]).expect("two");
    assert_eq!(hosts(&fabric, &two), ["c HCA-2", "b HCA-3"], "a named adapter is taken as such");
    assert_eq!(
        hosts(&fabric, &taken(&fabric, Unit::Adapter, "3", &[]).expect("three")),
        ["a HCA-1", "a HCA-2", "b HCA-2"]
    );
    let less = taken(&fabric, Unit::Server, "2", &["a", "* HCA-2"]).expect("two");
    assert_eq!(hosts(&fabric, &less), ["b HCA-3", "c HCA-3"]);
    assert!(less.describe(&fabric)[1].starts_with("left out by --exclude: 4 adapters: a HCA-1, a HCA-2"), "{less:?}");
}

#[test]
fn wrong_selections_are_refused_with_a_hint() {
    let fabric = adapters(&[("node1 HCA-1", 1), ("node2 HCA-1", 2), ("x", 3), ("x", 4), ("ufm1 HCA-1", 5)]);
    let cases = [
        (Unit::Server, "5", &[][..], "5 hosts requested, but the fabric has 4 besides 1 left out"),
        (Unit::Adapter, "9", &[], "9 adapters requested, but the fabric has 4 besides 1 left out"),
        (Unit::Server, "nod1", &[], "no host is named `nod1`; did you mean `node1`"),
        (Unit::Adapter, "node1", &[], "no adapter is named `node1`; did you mean `node1 HCA-1`"),
        (Unit::Server, "x", &[], "2 hosts are named `x`; select one by its GUID"),
        (Unit::Server, "node1,node1", &[], "host `node1` is listed twice"),
        (Unit::Server, "node1,node1 HCA-1", &[], "is listed twice"),
        (Unit::Server, "node[1", &[], "`node[1` is not a list of hosts: a `[` without a `]`"),
        (Unit::Server, "node[0-999999]", &[], "it names more than 262144"),
        (Unit::Server, "", &[], "an empty item"),
        (Unit::Server, "0", &[], "no host is selected"),
        (Unit::Server, "all", &["*"], "no host is selected"),
        (Unit::Server, "node1", &["node1"], "no host is selected"),
        (Unit::Server, "all", &["nodes*"], "nothing to exclude matches `nodes*`"),
    ];
    for (unit, which, exclude, message) in cases {
        let error = taken(&fabric, unit, which, exclude).expect_err(message).to_string();
        assert!(error.contains(message), "{which} {exclude:?} -> {error}\nexpected {message}");
    }
}

#[test]
fn fabric_managers_machine_is_taken_by_name_only() {
    let fabric = adapters(&[("A-UFM-1 mlx5_0", 1), ("A-UFM-1 mlx5_1", 2), ("n1 mlx5_0", 3), ("n2 mlx5_0", 4)]);
    let all = taken(&fabric, Unit::Server, "all", &[]).expect("two");
    assert_eq!(hosts(&fabric, &all), ["n1 mlx5_0", "n2 mlx5_0"]);
    assert!(
        all.describe(&fabric)
            .contains(&"left out: A-UFM-1, the fabric manager's by its name; list it to take it".into())
    );
    assert_eq!(taken(&fabric, Unit::Adapter, "all", &[]).expect("two").hosts.len(), 2);
    let named = taken(&fabric, Unit::Server, "n[1-2],A-UFM-1", &[]).expect("three");
    assert_eq!(hosts(&fabric, &named), ["n1 mlx5_0", "n2 mlx5_0", "A-UFM-1 mlx5_0"]);
}

#[test]
fn sixteen_hosts_of_a_real_superpod_are_sixteen_servers() {
    let Some(fabric) = shared_input("ndr-superpod.ibnetdiscover") else { return };
    let sixteen = taken(&fabric, Unit::Server, "16", &[]).expect("enough");
    let servers: BTreeSet<ServerId> = sixteen.hosts.iter().map(|host| fabric.host(*host).server).collect();
    assert_eq!((sixteen.hosts.len(), servers.len()), (16, 16));
    let machines = |id: &ServerId| fabric.server(*id).name.clone();
    assert_eq!(servers.iter().map(machines).next().as_deref(), Some("a05-p1-dgx-01-c01"));
    assert!(sixteen.hosts.iter().all(|host| fabric.host(*host).rail() == Some("HCA-1")), "one rail");
    assert_eq!(sixteen.managers.iter().map(machines).collect::<Vec<_>>(), ["B11-P1-CUFM-02"]);
    let plan = crate::plan::HostSelection::Named(hosts(&fabric, &sixteen).iter().map(ToString::to_string).collect());
    let plan = crate::plan::plan(&fabric, &plan, &crate::plan::Limits::default()).expect("a tree");
    assert_eq!(plan.ranks.len(), 16);
    let all = taken(&fabric, Unit::Server, "all", &[]).expect("all");
    let lines = all.describe(&fabric);
    assert!(lines.iter().any(|line| line.starts_with("69 adapters in no machine by name")), "{lines:?}");
}

#[test]
fn patterns_match_as_a_whole() {
    let golden = [
        ("n1", "n1", true),
        ("n1", "n11", false),
        ("n*", "n", true),
        ("*-c0?", "a05-c01", true),
        ("*a*b*", "xxaybz", true),
        ("*a*b*", "xxbya", false),
        ("", "", true),
        ("?", "", false),
        ("*", "", true),
    ];
    for (pattern, text, matches) in golden {
        assert_eq!(super::super::select::glob(pattern, text), matches, "{pattern} {text}");
    }
}
