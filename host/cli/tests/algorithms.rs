//! `sumac plan --algo`: what algorithms send, as text, JSON and drawings, and what that loads onto links.

mod common;

use common::{exit_status, stderr, stdout, sumac};
use serde_json::Value;
use std::path::Path;

/// The drawings of the guide: an algorithm, its collective, and how eight ranks lie.
const DRAWINGS: [(&str, &str, &str); 26] = [
    ("ring", "all_reduce", "line"),
    ("hd", "all_reduce", "line"),
    ("rd", "all_reduce", "line"),
    ("binomial", "all_reduce", "line"),
    ("pairwise", "all_reduce", "line"),
    ("host-tree", "all_reduce", "line"),
    ("star", "all_reduce", "line"),
    ("full-mesh", "all_reduce", "line"),
    ("one-shot", "all_reduce", "line"),
    ("dbt", "all_reduce", "line"),
    ("nhr", "all_reduce", "line"),
    ("swing", "all_reduce", "line"),
    ("swing-latency", "all_reduce", "line"),
    ("bine", "all_reduce", "line"),
    ("2d-ring", "all_reduce", "2x4"),
    ("2d-torus", "all_reduce", "2x4"),
    ("2d-mesh", "all_reduce", "2x4"),
    ("hier-ring", "all_reduce", "servers:4"),
    ("hybrid", "all_reduce", "servers:4"),
    ("rab", "all_reduce", "servers:4"),
    ("chain", "all_reduce", "line"),
    ("bruck", "all_gather", "line"),
    ("pat", "all_gather", "line"),
    ("van-de-geijn", "broadcast", "line"),
    ("hier-pairwise", "all_to_all", "servers:4"),
    ("dissemination", "barrier", "line"),
];

const IMAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/images/algorithms");
const GUIDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/drawings.md");

/// Run the command, which must succeed, and return what it prints.
fn printed(args: &[&str]) -> String {
    let output = sumac(args);
    assert_eq!(exit_status(&output), 0, "{args:?}: {}", stderr(&output));
    stdout(&output)
}

#[test]
fn messages_of_an_algorithm_are_printed_step_by_step() {
    let text = printed(&["plan", "--algo", "ring", "--ranks", "3"]);
    let expected = "ring: all_reduce of 3 elements, 3 ranks\n\
                    4 steps; the busiest rank sends 4 elements and combines 2; 12 messages in all\n\
                    step  1  0->1 +0  1->2 +1  2->0 +2\n\
                    step  2  0->1 +2  1->2 +0  2->0 +1\n\
                    step  3  0->1 1  1->2 2  2->0 0\n\
                    step  4  0->1 0  1->2 1  2->0 2\n";
    assert_eq!(text, expected);
    let rooted = printed(&["plan", "--algo=star", "--collective=broadcast", "--ranks=3", "--root=2", "--count=7"]);
    assert!(rooted.contains("step  1  2->0 0-6\nstep  2  2->1 0-6\n"), "{rooted}");
}

#[test]
fn json_has_each_message_and_the_busiest_links() {
    let text = printed(&["plan", "--algo=hd", "--ranks=4", "--links=torus", "--json"]);
    let json: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((&json["algo"], &json["ranks"], &json["count"]), (&"hd".into(), &4.into(), &4.into()));
    let steps = json["steps"].as_array().expect("steps");
    assert_eq!(steps.len(), 4);
    let first: Value = serde_json::json!({"from": 0, "to": 1, "elements": 2, "first": 2, "combined": true});
    assert_eq!(steps[0][0], first);
    // In the second and the third step two ranks send upward over the same link.
    assert_eq!(json["links"], serde_json::json!({"busiest": [2, 2, 2, 2], "congestion": 8}));
}

#[test]
fn hybrid_is_printed_with_the_trees_of_its_rails() {
    let args = ["plan", "--algo=hybrid", "--ranks=4", "--shape=servers:2", "--count=5"];
    let expected = "hybrid: all_reduce of 5 elements, 4 ranks, servers:2\n\
                    2 steps inside servers and 2 trees, which carry 3 elements at most; 8 messages in all\n\
                    step  1  0->1 +2-4  1->0 +0-1  2->3 +2-4  3->2 +0-1\n\
                    trees    0,2 +0-1  1,3 +2-4\n\
                    step  2  0->1 0-1  1->0 2-4  2->3 0-1  3->2 2-4\n";
    assert_eq!(printed(&args), expected);
    let json: Value = serde_json::from_str(&printed(&[&args[..], &["--json"]].concat())).expect("JSON");
    assert_eq!(json["steps"].as_array().map(Vec::len), Some(2));
    let rail = |ranks: [u32; 2], first: u32, elements: u32| serde_json::json!({"ranks": ranks, "first": first, "elements": elements});
    let expected = serde_json::json!({"after_steps": 1, "rails": [rail([0, 2], 0, 2), rail([1, 3], 2, 3)]});
    assert_eq!(json["trees"], expected);
}

#[test]
fn rab_is_printed_with_the_tree_of_the_leaders() {
    let args = ["plan", "--algo=rab", "--ranks=6", "--shape=servers:3", "--count=5"];
    let expected = "rab: all_reduce of 5 elements, 6 ranks, servers:3\n\
                    4 steps inside servers and 1 tree, which carries 5 elements at most; 8 messages in all\n\
                    step  1  1->2 +0-4  4->5 +0-4\n\
                    step  2  2->0 +0-4  5->3 +0-4\n\
                    trees    0,3 +0-4\n\
                    step  3  0->2 0-4  3->5 0-4\n\
                    step  4  0->1 0-4  3->4 0-4\n";
    assert_eq!(printed(&args), expected);
}

/// Each line of the table: the algorithm, its steps, what its busiest rank sends, and what the busiest links carry.
fn table(args: &[&str]) -> Vec<(String, [f64; 3])> {
    let text = printed(&[&["plan", "--algo", "all"], args].concat());
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_owned();
        let numbers: Vec<f64> = words.filter_map(|word| word.parse().ok()).collect();
        Some((name, numbers.try_into().ok()?))
    };
    text.lines().skip(2).filter_map(row).collect()
}

#[test]
fn algorithms_are_compared_by_the_links_that_they_load() {
    let on_torus = table(&["--ranks=16", "--shape=4x4", "--links=torus"]);
    let of = |name: &str| on_torus.iter().find(|(found, _)| found == name).map(|(_, numbers)| *numbers).expect("a row");
    assert_eq!(of("ring"), [30.0, 1.875, 1.875]);
    // Four links of each rank at once, against two and one.
    assert_eq!([of("swing")[2], of("2d-torus")[2], of("2d-ring")[2]], [0.469, 0.938, 1.875]);
    let in_line = table(&["--ranks=8", "--links=full-mesh"]);
    assert_eq!(in_line.len(), 15, "those for several dimensions are named with the reason: {in_line:?}");
    // Groups of 12: Bine crosses them with fewer bytes.
    let in_groups = table(&["--ranks=256", "--links=dragonfly:12+5"]);
    let of = |name: &str| in_groups.iter().find(|(found, _)| found == name).map(|(_, numbers)| numbers[2]);
    assert!(of("bine") < of("hd"), "{in_groups:?}");
}

/// Many ranks take seconds and little memory: what has too many messages is named.
#[test]
fn algorithms_of_too_many_messages_are_not_counted() {
    let text = printed(&["plan", "--algo=all", "--ranks=4096", "--shape=64x64", "--links=torus"]);
    let row = |name: &str| text.lines().find(|line| line.starts_with(&format!("{name} "))).expect("a row").to_owned();
    assert!(row("ring").contains("not counted: 33546240 messages"), "{text}");
    assert!(row("swing").ends_with("0.592"), "1.185 times what an uncongested link carries: {text}");
}

#[test]
fn invalid_request_is_refused_with_what_is_possible() {
    let refused: [(&[&str], &str); 14] = [
        (&["plan", "--algo=quick"], "possible values: ring, hd"),
        (&["plan", "--algo=tree"], "possible values"),
        (&["plan", "--algo=van-de-geijn"], "there is no all_reduce by it, but broadcast"),
        (&["plan", "--algo=2d-ring"], "set --shape, as 2x4"),
        (&["plan", "--algo=hybrid", "--ranks=4"], "set --shape, as servers:4"),
        (&["plan", "--algo=hybrid", "--ranks=4096", "--shape=servers:2048"], "are printed: use fewer --ranks\n"),
        (&["plan", "--algo=rab", "--ranks=4"], "--algo rab: it needs several servers of several ranks"),
        (&["plan", "--algo=hybrid", "--shape=servers:4", "--links=torus"], "its trees are in the network"),
        (&["plan", "--algo=hybrid", "--shape=servers:4", "--collective=reduce"], "there is no reduce by it"),
        (&["plan", "--algo=ring", "--ranks=6", "--shape=2x4"], "2x4 does not fit 6 ranks"),
        (&["plan", "--algo=ring", "--root=8"], "ranks count from 0 to 7"),
        (&["plan", "--algo=ring", "--ranks=500"], "at most 16384 are printed"),
        (&["plan", "--algo=ring", "--hosts=4"], "cannot be used with"),
        (&["plan", "--algo=all"], "--links"),
    ];
    for (args, why) in refused {
        let output = sumac(args);
        assert_eq!(exit_status(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(why), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn drawings_of_the_guide_are_up_to_date() {
    let guide = std::fs::read_to_string(GUIDE).expect("the guide");
    for (algo, collective, shape) in DRAWINGS {
        let drawn = printed(&["plan", "--algo", algo, "--collective", collective, "--shape", shape, "--svg"]);
        assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"), "{algo}");
        assert!(guide.contains(&format!("images/algorithms/{algo}.svg")), "{algo} is not in the guide");
        let file = Path::new(IMAGES).join(format!("{algo}.svg"));
        if std::env::var_os("SUMAC_TEST_BLESS").is_some() {
            std::fs::write(&file, &drawn).expect("a file");
        }
        let found = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(found == drawn, "{}: out of date; SUMAC_TEST_BLESS=1 writes it", file.display());
    }
}
