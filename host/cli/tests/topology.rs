//! `sumac topology`, and how `sumac plan` takes hosts of a fabric.

mod common;

use common::{Dir, exit_status, stderr, stdout, sumac};
use serde_json::Value;

const DUMP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/two-leaves.ibnetdiscover");

/// Run the command, which must succeed, and return what it prints.
fn printed(args: &[&str]) -> String {
    let output = sumac(args);
    assert_eq!(exit_status(&output), 0, "{args:?}: {}", stderr(&output));
    stdout(&output)
}

#[test]
fn generated_fabric_is_shown_planned_and_compared() {
    let dir = Dir::new("generated");
    let shape =
        ["rails", "--servers", "8", "--rails", "2", "--servers-per-leaf", "4", "--spines", "1", "--rate", "400"];
    let toml = printed(&[&["topology", "generate"], &shape[..]].concat());
    let file = dir.write("rails.toml", toml.as_bytes());
    let shown = printed(&["topology", "show", "--topology", &file, "--servers"]);
    for line in [
        "format    a fabric in TOML",
        "switches  6, 6 with a device",
        "servers   8 with 16 adapters",
        "cables    20 of 400 Gbit/s",
        "server    n3: n3 rail0, n3 rail1",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line} not in\n{shown}");
    }
    let plan = printed(&["plan", "--topology", &file, "--hosts", "n[0-3],n6"]);
    assert!(
        plan.starts_with("5 hosts: n0, n1, n2, n3, n6\neach host is one rank, at `rail0` of its 2 adapters\n"),
        "{plan}"
    );
    let plan = printed(&["plan", "--topology", &file, "--adapters", "all", "--exclude", "* rail1", "--json"]);
    let plan: Value = serde_json::from_str(&plan).expect("JSON");
    assert_eq!(plan["ranks"].as_array().map(Vec::len), Some(8));
    assert_eq!(plan["selected"][0], "8 adapters: n0 rail0, n1 rail0, …, n7 rail0");
    assert_eq!(plan["assumptions"], Value::Array(Vec::new()));
    assert_eq!(printed(&["topology", "diff", &file, &file]), "");
    let cut = toml.trim_end().rsplit_once("[[link]]").expect("cables").0;
    let cut = dir.write("cut.toml", cut.as_bytes());
    let difference = printed(&["topology", "diff", &file, &cut]);
    assert!(difference.starts_with("- cable ") && difference.lines().count() == 1, "{difference}");
    let net = printed(&["topology", "generate", "torus", "3x3", "--format", "ibsim"]);
    assert_eq!(net.lines().filter(|line| line.starts_with("Switch ")).count(), 9, "{net}");
}

#[test]
fn file_without_cables_is_planned_with_its_assumptions() {
    let dir = Dir::new("slurm");
    let file = dir.write(
        "topology.conf",
        b"SwitchName=s0 Nodes=n[1-4]\nSwitchName=s1 Nodes=n[5-8]\nSwitchName=t Switches=s[0-1]\n",
    );
    let plan = printed(&["plan", "--topology", &file, "--hosts", "all"]);
    let assumed: Vec<&str> = plan.lines().filter(|line| line.starts_with("assumed: ")).collect();
    // And further ones, of costs and routes.
    assert!(assumed.len() > 3, "{plan}");
    assert!(assumed[0].contains("names no cables") && assumed[2].contains("rates of 10 of 10"), "{plan}");
    let dot = printed(&["plan", "--topology", &file, "--hosts", "all", "--dot"]);
    assert!(dot.starts_with("// assumed: ") && dot.contains("\ndigraph "), "{dot}");
}

#[test]
fn inside_of_a_server_is_joined_by_its_guid() {
    let dir = Dir::new("inside");
    let xml = r#"<system version="1"><cpu numaid="0"><pci busid="a" class="0x060400" link_speed="16 GT/s" link_width="16">
        <pci busid="b" class="0x030200" link_speed="16 GT/s" link_width="16"/>
        <pci busid="c" class="0x020700" link_speed="16 GT/s" link_width="8">
        <nic><net name="mlx5_0" speed="400000" guid="0x2000000000000001"/></nic></pci></pci></cpu></system>"#;
    let file = dir.write("node.xml", xml.as_bytes());
    let shown = printed(&["topology", "show", "--topology", DUMP, "--inside", &file]);
    assert!(shown.contains("inside    n1: 1 GPUs, 1 adapters\n  GPU b: PCIe 252.062 Gbit/s, near mlx5_0\n"), "{shown}");
    assert!(shown.contains("  adapter mlx5_0: PCIe 126.031 Gbit/s, port 400 Gbit/s\n"), "{shown}");
    let alone = sumac(&["plan", "--topology", &file, "--hosts", "1"]);
    assert_eq!(exit_status(&alone), 2);
    assert!(stderr(&alone).contains("an NCCL topology, which holds no fabric"), "{}", stderr(&alone));
}

#[test]
fn invalid_topologies_and_hosts_exit_with_2() {
    let dir = Dir::new("invalid");
    let tables = dir.write("ft.lfts", b"Unicast lids [0x0-0x24] of switch DR path slid 0; dlid 0; 0 guid 0x1 (a):\n");
    let cases: [(&[&str], &str); 9] = [
        (&["plan", "--topology", DUMP], "--hosts"),
        (&["plan", "--topology", DUMP, "--hosts", "1", "--adapters", "1"], "cannot be used with"),
        (&["plan", "--topology", DUMP, "--hosts", "n[1"], "a `[` without a `]`"),
        (&["plan", "--topology", DUMP, "--hosts", "all", "--exclude", "m*"], "nothing to exclude matches `m*`"),
        (&["plan", "--topology", &tables, "--hosts", "1"], "this is forwarding tables"),
        (&["topology", "show", "--topology", DUMP, "--inside", "/nonexistent"], "/nonexistent"),
        (&["topology", "generate", "torus", "4x"], "4x4"),
        (&["topology", "generate", "fat-tree", "--radix", "5"], "radix 5"),
        (&["topology", "generate", "star", "--hosts", "2", "--rate", "fast"], "Gbit/s above 0"),
    ];
    for (args, named) in cases {
        let output = sumac(args);
        assert_eq!(exit_status(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{args:?}: {}", stderr(&output));
        assert!(stdout(&output).is_empty(), "{args:?}");
    }
}
