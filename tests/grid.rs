//! Every offloaded collective x element type x operator x number of ranks x number of elements, through a simulated
//! tree with loss, duplication, reordering and corruption; results are compared with the oracle's.

use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::emu::LinkConfig;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_tests::oracle::Shape;
use sumac_tests::sim::{Faults, GroupOptions, Options, Planted, Scenario, Sharing, run};

const CHUNK_LEN_BYTES: u16 = 128;

/// The number of operations in a run.
const OPS: usize = 40;

/// Return a root with leaves of at most three ranks, and one rank of its own.
fn tree(ranks: usize) -> Shape {
    let ranks: Vec<Shape> = (0..ranks).map(Shape::Rank).collect();
    let (first, rest) = ranks.split_at(1);
    Shape::Node(first.iter().cloned().chain(rest.chunks(3).map(|leaf| Shape::Node(leaf.to_vec()))).collect())
}

/// Return all operations for a number of ranks: every valid pair of type and operator in each reducing collective, and
/// every type in the others; with none, one, an odd number and many chunks of elements.
fn operations(ranks: usize) -> Vec<OpDesc> {
    let root = Rank(ranks as u32 - 1);
    let mut all = Vec::new();
    for &dtype in Dtype::ALL {
        let mut shapes = vec![OpDesc::broadcast(dtype, root, 0), OpDesc::all_gather(dtype, 0)];
        for &op in ReduceOp::ALL.iter().filter(|&&op| Kernel::new(dtype, op).is_some()) {
            shapes.push(OpDesc::all_reduce(dtype, op, 0));
            shapes.push(OpDesc::reduce(dtype, op, root, 0));
            shapes.push(OpDesc::reduce_scatter(dtype, op, 0));
        }
        for desc in shapes {
            let large = 5 * u64::from(CHUNK_LEN_BYTES) / desc.partial_bytes() as u64 + 3;
            all.extend([0, 1, 13, large].map(|count| OpDesc { count, ..desc }));
        }
    }
    all.push(OpDesc::barrier());
    all
}

#[test]
fn every_collective_type_and_operator_gives_exact_results() {
    let mut packets = 0;
    let mut done = 0;
    for (nth, ranks) in [1, 2, 3, 4, 7, 8].into_iter().enumerate() {
        let orders = [Order::Arrival, Order::TreeFold, Order::TreePairwise];
        for (index, ops) in operations(ranks).chunks(OPS).enumerate() {
            let options = Options {
                seed: (nth * 1000 + index) as u64,
                trees: vec![tree(ranks)],
                ranks,
                groups: vec![GroupOptions { tree: 0, order: orders[index % 3], ops: ops.to_vec() }],
                shards: 1 + index as u16 % 2,
                window: 8,
                chunk_len_bytes: CHUNK_LEN_BYTES,
                link: LinkConfig {
                    latency: Duration::from_micros(5),
                    bandwidth_bytes_per_s: None,
                    receive_queue_bytes: None,
                    mark_queue_bytes: None,
                    max_packet_len_bytes: None,
                },
                sharing: if index % 2 == 0 { Sharing::All } else { Sharing::Off },
                spares: 0,
                faults: Faults {
                    loss: 50,
                    duplicate: 50,
                    reorder: 50,
                    corrupt: 20,
                    delay_max: Duration::from_micros(100),
                    ..Faults::default()
                },
                skew_max: Duration::from_micros(50),
                scenario: Scenario::Calm,
                planted: Planted::default(),
            };
            let report = run(&options).unwrap_or_else(|violation| panic!("{ranks} ranks, {ops:?}: {violation}"));
            packets += report.packets;
            done += ops.len();
        }
    }
    println!("{done} operations, {packets} packets");
}
