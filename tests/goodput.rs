//! Goodput on virtual time, by loss and by children: the table in `snapshots/goodput.txt`.
//!
//! Nothing here depends on the machine, so a change of the protocol shows as a change of the table. `UPDATE=1` writes
//! it anew; look at the difference before it is committed.

use std::fmt::Write as _;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::emu::LinkConfig;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_tests::oracle::Shape;
use sumac_tests::sim::{Faults, GroupOptions, Options, Planted, Report, Scenario, Sharing, run};

const CHUNK_LEN_BYTES: u16 = 1008;
const CHUNKS: u64 = 64;
const CHILDREN: [usize; 3] = [2, 8, 32];
const LOSS_PER_MILLE: [u16; 5] = [0, 1, 10, 50, 200];

/// One all-reduce of 64 chunks through one node, over links of 12.5 GB/s and 2 us.
fn measure(children: usize, loss: u16) -> Report {
    let count = CHUNKS * u64::from(CHUNK_LEN_BYTES) / 4;
    let options = Options {
        seed: 1,
        trees: vec![Shape::Node((0..children).map(Shape::Rank).collect())],
        ranks: children,
        groups: vec![GroupOptions {
            tree: 0,
            order: Order::TreePairwise,
            ops: vec![OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count)],
        }],
        shards: 1,
        window: 32,
        chunk_len_bytes: CHUNK_LEN_BYTES,
        link: LinkConfig {
            latency: Duration::from_micros(2),
            bandwidth_bytes_per_s: Some(12_500_000_000),
            receive_queue_bytes: Some(1 << 20),
            mark_queue_bytes: None,
        },
        sharing: Sharing::Off,
        spares: 0,
        faults: Faults { loss, ..Faults::default() },
        skew_max: Duration::ZERO,
        scenario: Scenario::Calm,
        planted: Planted::default(),
    };
    run(&options).unwrap_or_else(|violation| panic!("{children} children, {loss} per mille: {violation}"))
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

#[test]
fn goodput_is_as_it_was() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/snapshots/goodput.txt");
    let found = table();
    println!("{found}");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, &found).expect("snapshots can be written");
    }
    let expected = std::fs::read_to_string(path).expect("the snapshot is checked in");
    assert!(found == expected, "the table differs from {path}:\n{found}\nUPDATE=1 writes it anew");
}
