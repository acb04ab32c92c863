//! Formats: told by content, read to the expected fabric, and refused with their kind.

use super::*;

#[test]
fn kinds_without_a_fabric_are_named_with_what_to_use() {
    let cases = [
        ("Unicast lids [0x0-0x24] of switch DR path slid 0 guid 0x1 (a):\n  Lid  Out\n", "forwarding tables"),
        ("CA: node1 HCA-1:\n      0x0002c903000a1b2d\n", "output of `iblinkinfo`"),
        ("Switch: 0x0002c902004045b8 MF0;leaf:SX6036/U1:\n", "output of `iblinkinfo`"),
        ("Ca\t: 0x0002c903000a1b2c ports 1 \"node1 HCA-1\"\n", "a list of nodes"),
        ("SW  2 19 0x0002c902004045b8 4x QDR - CA 1 1 0x1 ( 'a' - 'b' )\n", "a list of ports"),
        ("{ CA Ports:01 SystemGUID:0002c9030 NodeGUID:1 }\n", "a subnet list"),
        ("START_NODES\nNodeDesc,NumPorts\n", "tables of ibdiagnet"),
        ("SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[0-3]\n", "output of `scontrol show topology`"),
        ("BlockName=b0 BlockIndex=0 Nodes=n[0-3]\n", "output of `scontrol show topology`"),
        ("---\n- topology: default\n  tree:\n", "Slurm's topology.yaml"),
        ("# cluster\nClusterName=a\n", "slurm.conf"),
        ("digraph plan {\n", "a graph for Graphviz"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\n", "output of `nvidia-smi topo`"),
        ("Machine (503GB total)\n", "output of `lstopo`"),
        ("CA 'mlx5_0'\n\tCA type: MT4129\n", "output of `ibstat`"),
        ("0x0002c903000a1b2c 0x0001 0x0001\n\n", "opensm's table of GUIDs"),
        ("<?xml version='1.0'?>\n<graphs version=\"1\"><graph id=\"0\"/></graphs>", "NCCL's graphs"),
        ("<?xml version='1.0'?><!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\"/>", "hwloc's XML"),
        ("<!-- a > b --><platform version=\"4.1\"/>", "a platform of SimGrid"),
        ("<html><body/></html>", "XML of another kind"),
        ("{\"lldp\": {\"interface\": []}}", "neighbours of one machine"),
        ("{\"levels\": 1, \"max_link_sharing\": 1}", "a plan of this command"),
        ("[{\"a\": 1}]", "JSON of another kind"),
        (
            "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"1\" class=\"0x030200\"/></cpu></system>",
            "1 GPUs, 0 adapters",
        ),
    ];
    for (text, kind) in cases {
        let error = Fabric::from_text(text).expect_err(text).to_string();
        assert!(error.contains(kind) && error.contains("which holds no fabric; use "), "{text}\n-> {error}");
    }
    let error = Fabric::from_text("\n\nhello there\n").expect_err("prose").to_string();
    assert!(error.starts_with("line 3: found `hello there`, expected a fabric: output of ibnetdiscover"), "{error}");
}

#[test]
fn format_is_told_by_content_whatever_the_name() {
    let golden = [
        (DUMP, Format::Ibnetdiscover),
        (TOML, Format::Toml),
        ("Switch 8 \"a\"\n[1] \"b\"[1]\n\nHca 1 \"b\"\n[1] \"a\"[1]\n", Format::Ibsim),
        ("\u{feff}# by hand\r\nSWITCHNAME=a nodes=b\r\n", Format::SlurmTree),
        ("BlockSizes=2\nBlockName=a Nodes=b\n", Format::SlurmBlock),
        ("host = [{ name = \"n1\" }]\nswitch = [{ name = \"leaf1\" }]\n", Format::Toml),
        (NETQ, Format::NetQ),
    ];
    for (text, format) in golden {
        assert_eq!(Format::of(text), Ok(format), "{text}");
        assert_eq!(Fabric::from_text(text).map(|fabric| fabric.format()), Ok(format), "{text}");
    }
}

#[test]
fn slurm_tree_has_one_cable_an_edge_and_says_so() {
    let text = "# a comment\nSwitchName=top Switches=leaf[1-2] LinkSpeed=5\nswitchname=leaf1 \\\n  Nodes=n[08-10]\n\
                SwitchName=leaf2 Nodes=n11,m[1,3]";
    let fabric = Fabric::from_text(text).expect("valid");
    assert_eq!(names(&fabric), ["m1", "m3", "n08", "n09", "n10", "n11"]);
    assert_eq!((fabric.switches().len(), fabric.links().len()), (3, 2 + 6));
    assert_eq!(fabric.servers().len(), 6);
    let told: Vec<String> = fabric.with_devices_assumed().assumptions().iter().map(ToString::to_string).collect();
    for (part, line) in ["names no cables", "at each of the 3 switches", "rates of 8 of 8 cables"].iter().zip(&told) {
        assert!(line.contains(part), "{part} not in {told:?}");
    }
    assert_eq!(told.len(), 3);
}

#[test]
fn slurm_blocks_are_joined_by_an_assumed_switch() {
    let text = "BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\nBlockSizes=4,8\n";
    let fabric = Fabric::from_text(text).expect("valid");
    assert_eq!(fabric.switches().iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["b1", "b2", "between-blocks"]);
    assert_eq!(fabric.links().len(), 8 + 2);
    assert!(fabric.assumptions().contains(&Assumption::BlocksJoined { blocks: 2 }));
    let one = Fabric::from_text("BlockName=b1 Nodes=n[1-4]\n").expect("valid");
    assert_eq!(one.switches().len(), 1);
}

#[test]
fn malformed_slurm_file_is_refused_with_its_line() {
    let cases = [
        ("SwitchName=a Nodes=n[1-\n", "line 1: found `n[1-`, expected a list such as"),
        ("SwitchName=a Nodes=n[0-999999]\n", "line 1: the lists name more than 262144 nodes"),
        ("SwitchName=a Switches=b\n", "line 1: a link leads to `b`"),
        ("SwitchName=a Switches=a\n", "line 1: found `a` below itself"),
        ("SwitchName=a Nodes=n1\n\nSwitchName=a Nodes=n2\n", "line 3: `a` was already described on line 1"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=a\n", "line 2: `a` was already described on line 1"),
        ("SwitchName=a Node=n1\n", "line 1: found `Node=n1`, expected SwitchName"),
        ("SwitchName=a[1-2] Nodes=n1\n", "of one switch or block"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", "line 2: found BlockName among SwitchName"),
        ("SwitchName=a Nodes=n1\nBlockName\n", "line 2: found `BlockName`, expected Key=value"),
    ];
    for (text, message) in cases {
        let error = Fabric::from_slurm(text).expect_err(text).to_string();
        assert!(error.contains(message), "{text}\n-> {error}\nexpected {message}");
    }
}

/// Two servers with two adapters each, a leaf, a spine and a management network.
pub(super) const NETQ: &str = r#"[{
  "links": [
    { "id": "n1-*-n2", "compounded_links": [
        { "interfaces": [{ "interface": "swp10", "node": "n1" }, { "interface": "ens1", "node": "n3" }] },
        { "interfaces": [{ "interface": "swp2s1", "node": "n1" }, { "interface": "ens2", "node": "n3" }] },
        { "interfaces": [{ "interface": "ens2", "node": "n3" }, { "interface": "swp2s1", "node": "n1" }] },
        { "interfaces": [{ "interface": "ens1", "node": "n4" }, { "interface": "swp2s0", "node": "n1" }] },
        { "interfaces": [{ "interface": "swp1", "node": "n1" }, { "interface": "swp7", "node": "n2" }] },
        { "interfaces": [{ "interface": "swp1", "node": "n1" }, { "interface": "swp8", "node": "n2" }] },
        { "interfaces": [{ "interface": "eth0", "node": "n1" }, { "interface": "swp9", "node": "n5" }] },
        { "interfaces": [{ "interface": "swp1", "node": "n1" }] }
    ] }
  ],
  "nodes": [
    { "compounded_nodes": [{ "id": "n1", "name": "leaf1", "device_type": "switch", "tier": 1 }] },
    { "compounded_nodes": [{ "id": "n2", "name": "spine1", "device_type": "switch", "tier": 2 }] },
    { "compounded_nodes": [{ "id": "n3", "name": "dgx-01", "device_type": "discovered_via_lldp", "tier": -1 },
                           { "id": "n4", "name": "dgx-02", "device_type": "host", "tier": 0 }] }
  ]
}]"#;

#[test]
fn netq_graph_parses_to_the_expected_fabric() {
    let fabric = Fabric::from_netq(NETQ).expect("valid");
    assert_eq!(names(&fabric), ["dgx-01 ens1", "dgx-01 ens2", "dgx-02 ens1"]);
    let servers: Vec<_> = fabric.servers().iter().map(|server| (server.name.as_str(), server.adapters.len())).collect();
    assert_eq!(servers, [("dgx-01", 2), ("dgx-02", 1)]);
    assert_eq!((fabric.switches().len(), fabric.links().len()), (2, 3 + 1));
    let labels: Vec<_> = fabric.links().iter().map(|link| fabric.port_name(link.ends[0]).unwrap_or("?")).collect();
    assert_eq!(labels, ["swp1", "swp2s0", "swp2s1", "swp10"], "ports are in natural order of their names");
    let warnings: Vec<String> = fabric.warnings().iter().map(ToString::to_string).collect();
    for part in ["`swp1` of `n1` is in two cables", "1 cables of management", "1 cables without two"] {
        assert!(warnings.iter().any(|warning| warning.contains(part)), "{part} not in {warnings:?}");
    }
    for (text, message) in [
        ("{\"links\": 3, \"compounded_links\": 1}", "line 1: found malformed JSON"),
        ("[{\"links\": [],\n \"compounded_links\": []}", "line 2: found malformed JSON"),
        ("[{\"compounded_links\": []}]", "no switch among the 0 records"),
    ] {
        let error = Fabric::from_text(text).expect_err(text).to_string();
        assert!(error.contains(message), "{text} -> {error}");
    }
}

#[test]
fn real_fabrics_without_aggregation_nodes_get_assumed_devices() {
    for (name, cables) in [("real-ft4", 48), ("real-dfp", 0), ("real-dfp-unlinked", 0), ("real-t44", 48)] {
        let Some(fabric) = shared_input(&format!("{name}.ibnetdiscover")) else { return };
        assert_eq!((fabric.switches().len(), fabric.hosts().len(), fabric.servers().len()).1, fabric.servers().len());
        assert!(cables == 0 || fabric.links().len() == cables, "{name}: {}", fabric.links().len());
        assert!(fabric.links().iter().all(|link| link.rate == Rate::from_gbits(10.0)), "{name}");
        assert_eq!(fabric.assumptions(), []);
        let switches = fabric.switches().len();
        let assumed = fabric.with_devices_assumed();
        assert_eq!(assumed.assumptions(), [Assumption::DevicesAtSwitches { switches }]);
        let plan = crate::plan::plan(&assumed, &crate::plan::HostSelection::All, &crate::plan::Limits::default());
        assert!(plan.is_ok(), "{name}: {plan:?}");
    }
}

#[test]
fn cut_cable_of_a_real_fabric_is_the_difference() {
    let (Some(before), Some(after)) =
        (shared_input("real-dfp.ibnetdiscover"), shared_input("real-dfp-unlinked.ibnetdiscover"))
    else {
        return;
    };
    let difference = Difference::between(&before, &after);
    assert_eq!((difference.lost.len(), difference.gained.len()), (1, 0), "{difference}");
    assert!(difference.lost[0].starts_with("cable "), "{difference}");
    assert!(Difference::between(&before, &before).is_empty());
}

#[test]
fn real_slurm_file_parses_completely() {
    let Some(fabric) = shared_input("slurm-529-switches.topology.conf") else { return };
    assert_eq!((fabric.format(), fabric.switches().len()), (Format::SlurmTree, 529));
    assert_eq!(fabric.links().len(), 528 + fabric.hosts().len(), "a tree");
    assert_eq!(fabric.servers().len(), fabric.hosts().len());
    assert!(fabric.find_host("peta10000").is_some());
    assert!(fabric.assumptions().contains(&Assumption::OneCableEach));
}

#[test]
fn real_forwarding_tables_are_no_fabric() {
    let Some(text) = shared_text("real-ft4.lfts") else { return };
    let error = Fabric::from_text(&text).expect_err("tables").to_string();
    assert!(error.contains("forwarding tables"), "{error}");
}

/// Hosts whose names are GUIDs or vendors' texts, each in a server of its own.
fn unnamed(fabric: &Fabric) -> usize {
    let is_guid = |name: &str| name.len() == 16 && name.bytes().all(|c| c.is_ascii_hexdigit());
    fabric.hosts().iter().filter(|host| is_guid(&host.name) || host.name.contains("ConnectX")).count()
}

#[test]
fn written_toml_and_net_file_read_back_as_the_same_fabric() {
    let mut fabrics = vec![
        Fabric::from_ibnetdiscover(DUMP).expect("valid"),
        Fabric::from_netq(NETQ).expect("valid"),
        generate::rails(generate::Rails {
            servers: 4,
            rails: 2,
            servers_per_leaf: 2,
            spines: 2,
            rate: Rate::from_gbits(2.5),
        })
        .expect("a shape"),
    ];
    fabrics.extend(shared_input("ndr-superpod.ibnetdiscover"));
    for fabric in fabrics {
        let read = Fabric::from_toml(&fabric.to_toml()).expect("valid");
        assert!(Difference::between(&fabric, &read).lost.iter().all(|part| part.contains('[')), "labels only");
        assert_eq!((read.links(), names(&read)), (fabric.links(), names(&fabric)));
        let groups = |fabric: &Fabric| fabric.servers().iter().map(|s| s.adapters.clone()).collect::<Vec<_>>();
        let sorted = |fabric: &Fabric| BTreeSet::from_iter(groups(fabric));
        assert_eq!(sorted(&read), sorted(&fabric));
        let net = Fabric::from_text(&fabric.to_ibsim().expect("short names")).expect("valid");
        assert_eq!((net.format(), names(&net)), (Format::Ibsim, names(&fabric)));
        let cables = |fabric: &Fabric| fabric.links().iter().map(|link| link.ends).collect::<Vec<_>>();
        assert_eq!(cables(&net), cables(&fabric));
        assert_eq!(
            net.servers().iter().filter(|s| s.known_by == KnownBy::Name).count(),
            net.servers().len() - unnamed(&net)
        );
    }
    let wide = generate::star(300, None).expect("a shape").to_ibsim().expect_err("too many ports").to_string();
    assert!(wide.contains("port 300") && wide.contains("254 for ibsim"), "{wide}");
}
