//! Goodput in virtual time, by loss and number of children: the table in `snapshots/goodput.txt`.
//!
//! Two levels with a window of twice bandwidth x delay must keep 70 % of their goodput at 1 % loss (4 children), and
//! complete at any loss, regardless of the table.
//!
//! The results do not depend on the machine, so changes of the protocol show in the table. `UPDATE=1` rewrites it;
//! review the difference before you commit it.

use std::fmt::Write as _;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::emu::LinkConfig;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::wire::SHORT_HEADER_LEN;
use sumac_tests::oracle::Shape;
use sumac_tests::sim::{Faults, GroupOptions, Options, Planted, Report, Scenario, Sharing, run};

const CHUNK_LEN_BYTES: u16 = 1008;
const CHUNKS: u64 = 64;
const CHILDREN: [usize; 3] = [2, 8, 32];
const LOSS_PER_MILLE: [u16; 5] = [0, 1, 10, 50, 200];

/// One all-reduce of 64 chunks through one node, over links of 12.5 GB/s and 2 us.
fn measure(children: usize, loss: u16) -> Report {
    let tree = Shape::Node((0..children).map(Shape::Rank).collect());
    let link = LinkConfig {
        latency: Duration::from_micros(2),
        bandwidth_bytes_per_s: Some(12_500_000_000),
        receive_queue_bytes: Some(1 << 20),
        mark_queue_bytes: None,
        max_packet_len_bytes: None,
    };
    all_reduce((tree, children), CHUNKS, 32, link, loss)
}

/// An all-reduce in a tree of `ranks` ranks.
fn all_reduce((tree, ranks): (Shape, usize), chunks: u64, window: u16, link: LinkConfig, loss: u16) -> Report {
    let count = chunks * u64::from(CHUNK_LEN_BYTES) / 4;
    let options = Options {
        seed: 1,
        trees: vec![tree],
        ranks,
        groups: vec![GroupOptions {
            tree: 0,
            order: Order::TreePairwise,
            ops: vec![OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count)],
        }],
        shards: 1,
        window,
        chunk_len_bytes: CHUNK_LEN_BYTES,
        link,
        sharing: Sharing::Off,
        spares: 0,
        faults: Faults { loss, ..Faults::default() },
        skew_max: Duration::ZERO,
        scenario: Scenario::Calm,
        planted: Planted::default(),
    };
    run(&options).unwrap_or_else(|violation| panic!("{ranks} ranks, {loss} per mille: {violation}"))
}

/// Nodes of so many children on two levels, two of them below the root: (children, chunks). The chunks are enough for
/// timers, of milliseconds, to be short beside the message.
const TWO_LEVELS: [(usize, u64); 2] = [(4, 1024), (32, 128)];
const LOSS_ON_TWO_LEVELS: [u16; 4] = [0, 1, 10, 100];

/// The window is twice bandwidth x delay: a leaf sends a result to each child and a contribution up for every chunk,
/// and a chunk has two hops up and two down.
fn on_two_levels(children: usize, chunks: u64, loss: u16) -> (u16, Report) {
    let link = LinkConfig {
        latency: Duration::from_micros(400),
        bandwidth_bytes_per_s: Some(62_500_000),
        receive_queue_bytes: Some(8 << 20),
        mark_queue_bytes: None,
        max_packet_len_bytes: None,
    };
    let packet_ns = u64::from(CHUNK_LEN_BYTES + SHORT_HEADER_LEN as u16) * 1_000_000_000 / 62_500_000;
    let chunk_ns = packet_ns * (children as u64 + 1);
    let delay_ns = 4 * 400_000 + 2 * chunk_ns;
    let window = 2 * delay_ns.div_ceil(chunk_ns) as u16;
    let leaf = |leaf: usize| Shape::Node((0..children).map(|child| Shape::Rank(leaf * children + child)).collect());
    let tree = Shape::Node((0..2).map(leaf).collect());
    (window, all_reduce((tree, 2 * children), chunks, window, link, loss))
}

/// Print and return the remaining goodput, and check its lower bound.
fn two_levels() -> String {
    let mut text = String::from(
        "One all-reduce through two levels, two leaves; links of 62.5 MB/s and 400 us; window 2 x bandwidth x delay.\n\
         children  chunks  window  loss/1000   time us  goodput %  retransmits  resent  probes  cuts\n",
    );
    for (children, chunks) in TWO_LEVELS {
        let mut without = 0;
        for loss in LOSS_ON_TWO_LEVELS {
            let (window, report) = on_two_levels(children, chunks, loss);
            let us = report.took.as_micros() as u64;
            without = if loss == 0 { us } else { without };
            let goodput = 100.0 * without as f64 / us as f64;
            let (resent, cuts) = (report.counters.answers_resent, report.counters.window_cuts);
            let (retransmits, probes) = (report.retransmits, report.probes);
            writeln!(
                text,
                "{children:>8}  {chunks:>6}  {window:>6}  {loss:>9}  {us:>8}  {goodput:>9.1}  {retransmits:>11}  \
                 {resent:>6}  {probes:>6}  {cuts:>4}"
            )
            .expect("strings take all");
            assert!(
                (children, loss) != (4, 10) || goodput >= 70.0,
                "4 children at 1 %: {goodput:.1} % remains\n{text}"
            );
        }
    }
    text
}

fn table() -> String {
    let mut text = String::from(
        "One all-reduce of 64 x 1008 B through one node; links of 12.5 GB/s and 2 us; virtual time.\n\
         children  loss/1000   time us  algbw MB/s  retransmits  resent  probes\n",
    );
    for children in CHILDREN {
        for loss in LOSS_PER_MILLE {
            let report = measure(children, loss);
            let ns = report.took.as_nanos() as u64;
            let algbw = (CHUNKS * u64::from(CHUNK_LEN_BYTES)) as f64 * 1e3 / ns as f64;
            let (resent, probes) = (report.counters.answers_resent, report.probes);
            let retransmits = report.retransmits;
            writeln!(
                text,
                "{children:>8}  {loss:>9}  {:>8}  {algbw:>10.1}  {retransmits:>11}  {resent:>6}  {probes:>6}",
                ns / 1000
            )
            .expect("strings take all");
        }
    }
    text
}

/// Links whose queues take longer than any probe's timer, and lose nothing: two leaves, ranks that send at 1 MB/s.
#[test]
fn long_queues_without_loss_have_nothing_sent_twice() {
    let link = LinkConfig {
        latency: Duration::from_micros(100),
        bandwidth_bytes_per_s: Some(1_000_000),
        receive_queue_bytes: None,
        mark_queue_bytes: None,
        max_packet_len_bytes: None,
    };
    for (children, window) in [(1, 16), (4, 64), (8, 200)] {
        let leaf = |leaf: usize| Shape::Node((0..children).map(|child| Shape::Rank(leaf * children + child)).collect());
        let tree = Shape::Node((0..2).map(leaf).collect());
        let report = all_reduce((tree, 2 * children), 512, window, link, 0);
        let counters = &report.counters;
        let twice = (report.retransmits, counters.contributions_resent, counters.answers_resent);
        assert_eq!(twice, (0, 0, 0), "{children} children, window {window}: {} probes", report.probes);
        assert!(children == 1 || report.probes > 0, "{children} children: no timer has expired");
    }
}

#[test]
fn goodput_under_loss_matches_its_snapshot() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/snapshots/goodput.txt");
    let found = format!("{}\n{}", table(), two_levels());
    println!("{found}");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, &found).expect("snapshots can be written");
    }
    let expected = std::fs::read_to_string(path).expect("the snapshot is checked in");
    assert!(found == expected, "the table differs from {path}:\n{found}\nUPDATE=1 writes it anew");
}
