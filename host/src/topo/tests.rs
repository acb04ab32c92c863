//! Tests the readers with fixtures, a real dump, malformed texts of every known kind, and a test-only writer.

mod formats;
mod groups;
mod inside;
mod selections;
mod shapes;

use super::*;
use proptest::prelude::*;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

const DUMP: &str = include_str!("../../tests/fixtures/two-leaves.ibnetdiscover");
const TOML: &str = include_str!("../../tests/fixtures/two-leaves.toml");

/// Read a shared input file; if it is missing, print that the test is skipped.
pub(crate) fn shared_input(name: &str) -> Option<Fabric> {
    shared_text(name).map(|text| Fabric::from_text(&text).unwrap_or_else(|error| panic!("{name}: {error}")))
}

/// Read the text of a shared input file; if it is missing, print that the test is skipped.
pub(crate) fn shared_text(name: &str) -> Option<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/inputs").join(name);
    if !path.exists() {
        // Not `eprintln!`, which the test harness hides.
        let _ = writeln!(std::io::stderr(), "SKIPPED: {} is not there", path.display());
        return None;
    }
    Some(std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}")))
}

fn names(fabric: &Fabric) -> Vec<&str> {
    fabric.hosts().iter().map(|host| host.name.as_str()).collect()
}

/// Write a fabric in the format of `ibnetdiscover`, as the oracle of the round trip.
pub(crate) fn write_dump(fabric: &Fabric, eol: &str) -> String {
    let mut records: Vec<(String, Vec<(u16, String)>)> = Vec::new();
    let id = |device: Device| match device {
        Device::Switch(switch) => format!("S-{:016x}", 0x1000 + switch.0),
        Device::Host(host) => format!("H-{:016x}", 0x2000 + host.0),
    };
    let listings = |device: Device| {
        let mut ports = Vec::new();
        for link in fabric.links() {
            let [a, b] = link.ends;
            for (near, far) in [(a, b), (b, a)] {
                if near.device == device {
                    let speed = if link.rate.is_some() { " 4xNDR" } else { "" };
                    ports.push((near.number, format!("\"{}\"[{}]\t# \"x\" lid 1{speed}", id(far.device), far.number)));
                }
            }
        }
        ports
    };
    for (switch, it) in fabric.switch_ids().zip(fabric.switches()) {
        let header = format!("Switch\t200 \"{}\"\t\t# \"{}\" enhanced port 0", id(Device::Switch(switch)), it.name);
        let mut ports = listings(Device::Switch(switch));
        if it.aggregation.is_some() {
            let node = format!("{:016x}", 0x3000 + switch.0);
            ports.push((200, format!("\"H-{node}\"[1]({node})\t# \"Mellanox Technologies Aggregation Node\"")));
            let up = (1, format!("\"{}\"[200]", id(Device::Switch(switch))));
            records.push((format!("Ca\t1 \"H-{node}\"\t# \"Mellanox Technologies Aggregation Node\""), vec![up]));
        }
        records.push((header, ports));
    }
    for (host, it) in fabric.host_ids().zip(fabric.hosts()) {
        let header = format!("Ca\t2 \"{}\"\t\t# \"{}\"", id(Device::Host(host)), it.name);
        records.push((header, listings(Device::Host(host))));
    }
    let mut text = format!("#{eol}# Topology file{eol}");
    for (header, ports) in records {
        let _ = write!(text, "{eol}vendid=0x2c9{eol}{header}{eol}");
        ports.iter().for_each(|(number, rest)| write!(text, "[{number}]\t{rest}{eol}").expect("writing to a String"));
    }
    text
}

#[test]
fn fixture_dump_parses_to_the_expected_fabric() {
    let fabric = Fabric::from_ibnetdiscover(DUMP).expect("valid");
    assert_eq!(names(&fabric), ["2000000000000002", "2000000000000003", "n1 mlx5_0", "n10 mlx5_0"]);
    let switches: Vec<_> = fabric.switches().iter().map(|s| (s.name.as_str(), s.aggregation.is_some())).collect();
    // The spine's aggregation node has no description and is identified by its device id.
    assert_eq!(switches, [("leaf1", true), ("leaf2", true), ("spine1", true)]);
    assert_eq!(fabric.links().len(), 8);
    assert_eq!(fabric.adjacent(SwitchId(0)).len(), 2, "parallel cables count apart");
    let n1 = fabric.host(fabric.find_host("0x2000000000000001").expect("known GUID"));
    assert_eq!(n1.uplinks.iter().map(|up| (up.port, up.switch.0)).collect::<Vec<_>>(), [(1, 0), (2, 1)]);
    let rate = |host: &str| fabric.link(fabric.host(fabric.find_host(host).expect("known")).uplinks[0].link).rate;
    assert_eq!(rate("n10 mlx5_0").map(Rate::gbits), Some(100.0));
    assert_eq!(rate("H-2000000000000003").map(Rate::gbits), Some(10.0));
    assert_eq!(fabric.warnings(), []);
}

#[test]
fn line_endings_and_record_order_do_not_matter() {
    let fabric = Fabric::from_ibnetdiscover(DUMP).expect("valid");
    assert_eq!(Fabric::from_ibnetdiscover(&DUMP.replace('\n', "\r\n")), Ok(fabric.clone()));
    let mut records: Vec<&str> = DUMP.split("\n\n").collect();
    records.reverse();
    assert_eq!(Fabric::from_ibnetdiscover(&records.join("\n\n")), Ok(fabric));
}

#[test]
fn description_equal_to_another_guid_is_not_used_as_name() {
    let text = DUMP.replace("\"n10 mlx5_0\"", "\"2000000000000002\"");
    let fabric = Fabric::from_ibnetdiscover(&text).expect("valid");
    assert_eq!(names(&fabric), ["2000000000000002", "2000000000000003", "2000000000000004", "n1 mlx5_0"]);
}

#[test]
fn real_superpod_parses_completely() {
    let Some(fabric) = shared_input("ndr-superpod.ibnetdiscover") else { return };
    assert_eq!((fabric.switches().len(), fabric.hosts().len()), (40, 542));
    assert!(fabric.switches().iter().all(|switch| switch.aggregation.is_some()));
    let between_switches = fabric.switch_ids().map(|switch| fabric.adjacent(switch).len()).sum::<usize>() / 2;
    assert_eq!((between_switches, fabric.links().len()), (532, 532 + 542));
    assert!(fabric.links().iter().all(|link| link.rate == Rate::from_width_and_speed("4xNDR")));
    assert_eq!(fabric.hosts().iter().filter(|host| host.name == host.guid).count(), 69, "named like many others");
    assert_eq!(fabric.hosts()[2].name, "a05-p1-dgx-01-c01 HCA-1");
    assert_eq!(fabric.warnings(), []);
}

#[test]
fn ibsim_file_parses() {
    let Some(fabric) = shared_input("ibsim-small.net") else { return };
    assert_eq!(names(&fabric), ["Hca1", "Hca2"]);
    assert_eq!((fabric.switches().len(), fabric.links().len()), (2, 4));
    assert!(fabric.switches().iter().all(|switch| switch.aggregation.is_none()));
    assert!(fabric.with_aggregation_everywhere().switches().iter().all(|switch| switch.aggregation.is_some()));
}

#[test]
fn malformed_dump_is_refused_with_its_line() {
    let switch = "Switch 4 \"S-0000000000000001\" # \"s\"\n";
    let cases = [
        ("", "no switch among the 0 records"),
        ("\n# nothing\n", "no switch among the 0 records"),
        ("vendid=0x2c9\nCa 1 \"H-0000000000000002\"\n", "no switch among the 1 records"),
        ("Swich 4 \"S-1\"\n", "line 1: found `Swich 4 \"S-1\"`, expected a record"),
        ("Switch four \"S-1\"\n", "line 1: found `four \"S-1\"`, expected the number of ports"),
        ("Switch 70000 \"S-1\"\n", "line 1: found `70000 \"S-1\"`, expected the number of ports"),
        ("Switch 4 S-1\n", "line 1: found `S-1`, expected the node's id in quotes"),
        ("Switch 4 \"S-1\n", "line 1: found `\"S-1`, expected a closing quote"),
        ("Switch 4\n", "line 1: found the end of the line, expected the node's id"),
        ("Switch 4 \"S-1\" leaf\n", "line 1: found `leaf`, expected a comment (#)"),
        ("\n[1] \"S-1\"[1]\n", "line 2: found `[1] \"S-1\"[1]`, expected a record"),
        ("{S}[x] \"S-1\"[1]\n", "line 2: found `[x] \"S-1\"[1]`, expected a port number"),
        ("{S}[0] \"S-1\"[1]\n", "line 2: found `[0] \"S-1\"[1]`, expected a port number"),
        ("{S}[5] \"S-1\"[1]\n", "line 2: found port 5, expected a port of `S-0000000000000001`, which has 4"),
        ("{S}[1] \"H-2\n", "line 2: found `\"H-2`, expected a closing quote"),
        ("{S}[1] \"H-2\"[1\n", "line 2: found `[1`, expected a port number"),
        ("{S}[1] \"H-2\"[1](00\n", "line 2: found `(00`, expected a closing `)`"),
        ("{S}[1] \"H-2\"[1] what\n", "line 2: found `what`, expected an attribute"),
        ("{S}[1] \"Hca2\"[1]\n", "line 2: a link leads to `Hca2`, which no record describes"),
        ("{S}[1] \"H-2\"[1]\n[1] \"H-3\"[1]\n", "line 3: port 1 of `S-0000000000000001` was already listed on line 2"),
        ("{S}\n{S}", "line 3: `S-0000000000000001` was already described on line 1"),
        ("{S}\nCa 1 \"H-0000000000000001\"\n", "line 3: `H-0000000000000001` was already described on line 1"),
        (
            "{S}[1] \"H-2\"[1]\n\nCa 2 \"H-2\"\n[1] \"S-0000000000000001\"[2]\n",
            "`H-2[1] to S-0000000000000001[2], unknown rate`",
        ),
        (
            "{S}[1] \"H-2\"[1] # \"n\" lid 1 4xNDR\n\nCa 2 \"H-2\"\n[1] \"S-0000000000000001\"[1] # \"s\" lid 1 4xHDR\n",
            "H-2[1] to S-0000000000000001[1], 200 Gbit/s",
        ),
        ("{S}[1] \"H-2\"[1]\n[2] \"H-2\"[1]\n", "line 3: port 1 of `H-2` was already listed on line 2"),
    ];
    for (text, message) in cases {
        let text = text.replace("{S}", switch);
        let error = Fabric::from_ibnetdiscover(&text).expect_err(&text).to_string();
        assert!(error.contains(message), "{text}\n-> {error}\nexpected {message}");
    }
}

#[test]
fn contradiction_names_both_lines() {
    let text = DUMP.replace("\"S-1000000000000010\"[6]", "\"S-1000000000000020\"[6]");
    let error = Fabric::from_ibnetdiscover(&text).expect_err("the cable of port 6 leads elsewhere").to_string();
    let (near, far) =
        ("S-1000000000000010[6] to S-1000000000000030[2]", "S-1000000000000030[2] to S-1000000000000020[6]");
    assert!(error.contains(near) && error.contains(far) && error.contains("line 12"), "{error}");
}

#[test]
fn odd_but_usable_input_is_kept_with_a_warning() {
    let text = concat!(
        "Switch 8 \"S-0000000000000001\" # \"s\"\n",
        "[1] \"H-0000000000000002\"[1] # \"n1\" lid 1 4x???\n", // no record, unknown speed
        "[2] \"S-0000000000000001\"[2]\n",                      // a loop-back plug
        "[3] \"S-0000000000000003\"[3](0)\n",                   // the other side is silent
        "[4][ext 9] \"R-0000000000000009\"[1]\n",               // a router
        "\nSwitch 8 \"S-0000000000000003\"\n",
        "\nCa 1 \"H-0000000000000004\" # \"Mellanox Technologies Aggregation Node\"\n", // cabled nowhere
        "\nCa 1 \"H-0000000000000005\" # \"n2\"\n[1] \"H-0000000000000006\"[1]\n",      // back to back
        "\nCa 1 \"H-0000000000000006\" # \"a \\\"quoted\\\" name\"\n[1] \"H-0000000000000005\"[1]\n",
    );
    let fabric = Fabric::from_ibnetdiscover(text).expect("usable");
    assert_eq!(names(&fabric), ["a \\\"quoted\\\" name", "n1", "n2"]);
    assert_eq!(fabric.links().len(), 2);
    assert_eq!(fabric.switches()[0].name, "0000000000000003", "a switch without description goes by its GUID");
    let warnings: Vec<String> = fabric.warnings().iter().map(ToString::to_string).collect();
    for part in ["line 2: `H-0000000000000002` has no", "line 3: `S-", "line 4: only", "line 9: aggregation", "back to"]
    {
        assert!(warnings.iter().any(|warning| warning.contains(part)), "{part} not in {warnings:#?}");
    }
}

#[test]
fn toml_fixture_parses_to_the_expected_fabric() {
    let fabric = Fabric::from_toml(TOML).expect("valid");
    assert_eq!(names(&fabric), ["n1", "n2", "n10"]);
    assert_eq!(fabric.find_host("2000000000000002"), Some(HostId(1)));
    assert_eq!((fabric.switches().len(), fabric.links().len()), (3, 6));
    assert_eq!(fabric.adjacent(SwitchId(2)).iter().map(|(next, _)| next.0).collect::<Vec<_>>(), [0, 0, 1]);
    let n10 = fabric.host(HostId(2)).uplinks[0];
    assert_eq!(fabric.link(n10.link).ends[0], Port { device: Device::Switch(SwitchId(1)), number: 7 });
}

#[test]
fn malformed_toml_is_refused_with_its_line() {
    let cases = [
        ("", "no switch among the 0 records"),
        ("switch = 1\n", "line 1: found `1`, expected a fabric file"),
        ("[[switch]]\nname = \"a\"\ncolour = 1\n", "line 3: found `colour = 1`"),
        ("[[switch]]\n\n[[switch]]\nname = \"b\"\n", "missing field `name`"),
        ("[[switch]]\nname = \"a:1\"\n", "line 2: found `a:1`, expected a name"),
        (
            "[[switch]]\nname = \"a\"\n[[host]]\nname = \"a\"\n",
            "line 4: found `a` again, expected a name that no other",
        ),
        ("[[switch]]\nname = \"a\"\n[[link]]\nends = [\"a\", \"b\"]\n", "line 4: a link leads to `b`"),
        ("[[switch]]\nname = \"a\"\n[[link]]\nends = [\"a\", \"a\"]\n", "line 4: found a link from `a` to itself"),
        ("{AB}ends = [\"a:0\", \"b\"]\n", "line 6: found port `0`, expected a port from 1"),
        ("{AB}ends = [\"a:1\", \"b\"]\ncount = 2\n", "line 6: found count = 2, expected a count"),
        ("{AB}ends = [\"a\", \"b\"]\nrate_gbits = -1\n", "line 6: found rate_gbits = -1, expected above 0"),
        (
            "{AB}ends = [\"a:1\", \"b\"]\n[[link]]\nends = [\"a:1\", \"b\"]\n",
            "line 8: port 1 of `a` was already listed on line 6",
        ),
        ("[[switch]\n", "line 1: found"),
    ];
    for (text, message) in cases {
        let text = text.replace("{AB}", "[[switch]]\nname = \"a\"\n[[host]]\nname = \"b\"\n[[link]]\n");
        let error = Fabric::from_toml(&text).expect_err(&text).to_string();
        assert!(error.contains(message), "{text}\n-> {error}\nexpected {message}");
    }
}

#[test]
fn read_errors_name_the_file() {
    let missing = Fabric::read("no/such/file.toml").expect_err("missing").to_string();
    assert!(missing.contains("no/such/file.toml"), "{missing}");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    assert_eq!(Fabric::read(fixtures.join("two-leaves.toml")).expect("valid").hosts().len(), 3);
    assert_eq!(Fabric::read(fixtures.join("two-leaves.ibnetdiscover")).expect("valid").hosts().len(), 4);
}

#[test]
fn generated_fabrics_have_their_textbook_sizes() {
    let rate = Rate::from_gbits(400.0);
    let shape = LeafSpine { leaves: 4, spines: 2, hosts_per_leaf: 16, cables: 3, rate };
    let fabric = Fabric::leaf_spine(shape).expect("a possible shape");
    assert_eq!((fabric.switches().len(), fabric.hosts().len(), fabric.links().len()), (6, 64, 64 + 4 * 2 * 3));
    assert_eq!(fabric.hosts()[10].name, "h10");
    let tree = Fabric::fat_tree(4, rate).expect("a possible shape");
    assert_eq!((tree.switches().len(), tree.hosts().len(), tree.links().len()), (20, 16, 48));
    assert!(tree.switch_ids().all(|switch| tree.adjacent(switch).len() + tree.hosts_at(switch) == 4));
    for (wrong, message) in [
        (Fabric::fat_tree(3, rate), "radix 3"),
        (Fabric::leaf_spine(LeafSpine { leaves: 0, ..shape }), "leaves 0"),
        (Fabric::leaf_spine(LeafSpine { spines: 0, ..shape }), "spines 0"),
        (Fabric::leaf_spine(LeafSpine { cables: 40_000, ..shape }), "ports per leaf"),
    ] {
        let error = wrong.expect_err(message).to_string();
        assert!(error.contains(message), "{error}");
    }
}

impl Fabric {
    fn hosts_at(&self, switch: SwitchId) -> usize {
        self.hosts.iter().flat_map(|host| &host.uplinks).filter(|uplink| uplink.switch == switch).count()
    }
}

proptest! {
    #[test]
    fn written_fabric_parses_back(
        (leaves, spines, hosts_per_leaf, cables) in (1usize..5, 1usize..4, 0usize..5, 1usize..4),
        failed in proptest::collection::btree_set((0u32..64).prop_map(LinkId), 0..12),
        crlf in any::<bool>(),
    ) {
        let shape = LeafSpine { leaves, spines, hosts_per_leaf, cables, rate: Rate::from_gbits(400.0) };
        let fabric = Fabric::leaf_spine(shape).expect("a possible shape").without_links(&failed);
        let read = Fabric::from_ibnetdiscover(&write_dump(&fabric, if crlf { "\r\n" } else { "\n" })).expect("valid");
        prop_assert_eq!(read.links(), fabric.links());
        prop_assert_eq!(names(&read), names(&fabric));
        for (a, b) in read.switches().iter().zip(fabric.switches()) {
            prop_assert_eq!((&a.name, a.aggregation.is_some()), (&b.name, b.aggregation.is_some()));
        }
        prop_assert!(read.warnings().is_empty());
    }

    #[test]
    fn truncated_or_corrupted_dump_never_panics(cut in 0usize..DUMP.len(), at in 0usize..DUMP.len(), byte in any::<u8>()) {
        let mut bytes = DUMP.as_bytes().to_vec();
        bytes[at] = byte;
        for text in [String::from_utf8_lossy(&bytes), String::from_utf8_lossy(&bytes[..cut])] {
            match Fabric::from_ibnetdiscover(&text) {
                Ok(fabric) => prop_assert!(!fabric.switches().is_empty()),
                Err(error) => prop_assert!(error.to_string().starts_with("line ") || text.len() < 300, "{}", error),
            }
        }
    }

    #[test]
    fn truncated_or_corrupted_toml_never_panics(cut in 0usize..TOML.len(), at in 0usize..TOML.len(), byte in any::<u8>()) {
        let mut bytes = TOML.as_bytes().to_vec();
        bytes[at] = byte;
        for text in [String::from_utf8_lossy(&bytes), String::from_utf8_lossy(&bytes[..cut])] {
            if let Err(error) = Fabric::from_toml(&text) {
                let error = error.to_string();
                prop_assert!(error.starts_with("line ") || error.starts_with("no switch"), "{}", error);
            }
        }
    }
}
