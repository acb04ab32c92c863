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
    let trees = ["plan", "--topology", &file, "--hosts", "all", "--trees", "8"];
    let text = printed(&trees);
    assert!(text.contains("\n2 trees: rate 800.0 of 800.0 Gbit/s (min-cut bound"), "{text}");
    assert!(text.contains("\ntree 1: 50.0 % of a message, 400.0 Gbit/s"), "{text}");
    let json: Value = serde_json::from_str(&printed(&[&trees[..], &["--json"]].concat())).expect("JSON");
    assert_eq!(json["rate"]["gbits"], 800.0);
    let explained = printed(&[&trees[..], &["--explain"]].concat());
    for line in ["algorithms, in the order of ranks (", "fastest: ", "  hd ", "  seconds of ", "root "] {
        assert!(explained.lines().any(|explained| explained.starts_with(line)), "{line} not in\n{explained}");
    }
    assert!(explained.contains("algorithms, in the order of ranks (servers:4):\n"), "four hosts a leaf: {explained}");
    let in_line = printed(&[&trees[..], &["--explain", "--shape", "line"]].concat());
    assert!(explained.contains("  2d-torus") && !in_line.contains("2d-torus"), "{in_line}");
    let explained: Value =
        serde_json::from_str(&printed(&[&trees[..], &["--explain", "--json"]].concat())).expect("JSON");
    assert_eq!(explained["explanation"]["algorithms"][1]["name"], "2 trees");
    assert_eq!(explained["explanation"]["shape"], "servers:4");
    let shaped = printed(&[&trees[..], &["--explain", "--shape", "2x4"]].concat());
    // What the rows send first, four ranks of a leaf send over one cable.
    let is_torus = |line: &str| line.starts_with("  2d-torus") && line.contains(" 8 steps; load 3.250; 4 messages on");
    assert!(shaped.lines().any(is_torus), "{shaped}");
    assert_eq!(explained["rate"], json["rate"]);
    assert_eq!((&json["share"], &json["further_trees"][0]["share"]), (&0.5.into(), &0.5.into()));
    let ends = |tree: &Value| tree["paths"][0]["cables"][0]["ends"].clone();
    assert_eq!(ends(&json), serde_json::json!(["leaf0-0:1", "n0 rail0:1"]));
    assert_eq!(ends(&json["further_trees"][0]), serde_json::json!(["leaf1-0:1", "n0 rail1:1"]));
    assert_eq!(printed(&["topology", "diff", &file, &file]), "");
    let cut = toml.trim_end().rsplit_once("[[link]]").expect("cables").0;
    let cut = dir.write("cut.toml", cut.as_bytes());
    let difference = printed(&["topology", "diff", &file, &cut]);
    assert!(difference.starts_with("- cable ") && difference.lines().count() == 1, "{difference}");
    let net = printed(&["topology", "generate", "torus", "3x3", "--format", "ibsim"]);
    assert_eq!(net.lines().filter(|line| line.starts_with("Switch ")).count(), 9, "{net}");
}

#[test]
fn devices_are_planned_where_they_are_said_to_be() {
    let dir = Dir::new("placed");
    let shape = ["leaf-spine", "--leaves", "2", "--spines", "2", "--hosts", "4", "--rate", "100"];
    let file = dir.write("fabric.toml", printed(&[&["topology", "generate"], &shape[..]].concat()).as_bytes());
    let plan = |args: &[&str]| printed(&[&["plan", "--topology", &file, "--hosts", "4"], args].concat());
    assert!(plan(&[]).contains("rate: 100.0 of 100.0 Gbit/s"), "a device in the switch takes in all ports");
    let text = plan(&["--devices", "switches"]);
    assert!(text.contains("leaf0  4 children"), "{text}");
    let text = plan(&["--devices", "hosts"]);
    assert!(text.contains("rate: 33.3 of 100.0 Gbit/s") && text.contains("limited by 3 edges on the cable"), "{text}");
    let text = plan(&["--devices", "hosts", "--trees", "8"]);
    assert!(text.contains("4 trees: rate 66.7 of 100.0 Gbit/s") && text.contains("h3/dpu  4 children"), "{text}");
    let devices = dir.write("devices.toml", b"[[device]]\nswitch = \"leaf*\"\nport_gbits = 200\n");
    let text = plan(&["--devices", &devices]);
    assert!(text.contains("rate: 50.0 of 100.0 Gbit/s") && text.contains("leaf0/device0  4 children"), "{text}");
    let wrong = dir.write("wrong.toml", b"[[device]]\nswitch = \"leef0\"\n");
    for (given, told) in [(wrong.as_str(), "did you mean `leaf0`"), ("nowhere.toml", "nowhere.toml")] {
        for command in [&["plan", "--hosts", "4"][..], &["controller", "--listen", "127.0.0.1:0"]] {
            let output = sumac(&[command, &["--topology", &file, "--devices", given]].concat());
            assert_eq!(exit_status(&output), 2, "{command:?} {given}");
            assert!(stderr(&output).contains(told), "{}", stderr(&output));
        }
    }
    for (option, topology) in [("--devices", &[][..]), ("--routes", &[]), ("--routes", &["--topology", &file])] {
        let command = ["controller", "--listen", "127.0.0.1:0", option, &wrong];
        let output = sumac(&[&command[..], topology].concat());
        assert_eq!(exit_status(&output), 2, "{option} with {topology:?}");
        let told = if topology.is_empty() { "--topology" } else { "wrong.toml" };
        assert!(stderr(&output).contains(told), "{}", stderr(&output));
    }
}

#[test]
fn plan_says_which_routes_it_follows() {
    let dir = Dir::new("routed");
    let mut net = String::new();
    for leaf in 0..2 {
        net +=
            &format!("switchguid=0x20000{leaf}(20000{leaf})\nSwitch 4 \"S-000000000020000{leaf}\" # \"leaf{leaf}\"\n");
        net += &format!("[1] \"H-000000000010000{leaf}\"[1](10000{leaf}) # \"n{leaf}\" lid {} 4xSDR\n", leaf + 1);
        for cable in 2..4 {
            net +=
                &format!("[{cable}] \"S-000000000020000{}\"[{cable}] # \"leaf{}\" lid 9 4xSDR\n", 1 - leaf, 1 - leaf);
        }
        net += &format!("\ncaguid=0x10000{leaf}\nCa 1 \"H-000000000010000{leaf}\" # \"n{leaf}\"\n");
        net += &format!("[1](10000{leaf}) \"S-000000000020000{leaf}\"[1] # lid 1 lmc 0 \"leaf{leaf}\" lid 9 4xSDR\n\n");
    }
    let fabric = dir.write("net.ibnetdiscover", net.as_bytes());
    let mut tables = String::new();
    for leaf in 0..2 {
        tables += &format!("Unicast lids [0x0-0x2] of switch Lid 9 guid 0x000000000020000{leaf} (leaf{leaf}):\n");
        tables += "  Lid  Out   Destination\n       Port     Info\n";
        for host in 0..2 {
            let port = if host == leaf { 1 } else { 3 };
            tables += &format!(
                "0x000{} 00{port} : (Channel Adapter portguid 0x000000000010000{host}: 'n{host}')\n",
                host + 1
            );
        }
    }
    let tables = dir.write("net.lfts", tables.as_bytes());
    let plan = ["plan", "--topology", &fabric, "--hosts", "all"];
    let text = printed(&plan);
    assert!(text.contains("assumed: ") && text.contains("shortest up*/down* routes"), "{text}");
    let text = printed(&[&plan[..], &["--routes", &tables]].concat());
    assert!(text.contains("the routes of the given forwarding tables, on the way up"), "{text}");
    let json = printed(&[&plan[..], &["--routes", &tables, "--json"]].concat());
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let paths = json["paths"].as_array().expect("paths");
    // The tables take the second of two parallel cables, the assumed route the first.
    let over = |port: &str| paths.iter().any(|path| path["cables"].to_string().contains(&format!("\"leaf0:{port}\"")));
    assert!(over("3") && !over("2"), "{json:#}");
    let output = sumac(&[&plan[..], &["--routes", &fabric]].concat());
    assert_eq!(exit_status(&output), 2);
    assert!(stderr(&output).contains("--routes") && stderr(&output).contains("have no table"), "{}", stderr(&output));
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
