//! A node and its three children in one process: an all-reduce of four numbers.
//!
//! `cargo run -p sumac-device --features testing --example node`

use sumac_device::{Memory, Node, NodeConfig, testing};
use sumac_hal::ids::BootId;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;

const INPUTS: [[f32; 4]; 3] = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [0.5; 4]];

fn main() {
    // Room for one group of three children, with eight chunks of 64 bytes in flight.
    let mut memory = Memory::<1, 3, 8, { 8 * 64 }>::new();
    let (shard, boot_id) = (Shard::WHOLE, BootId(1));
    let config = NodeConfig { shard, boot_id, max_packet_len_bytes: 1472, receive_buffer_bytes: 1 << 20 };
    let mut node = Node::new(config, memory.storage());
    let group = testing::Group::new(3, 8, 64);
    let (now, mut buffer) = (Instant::ZERO, [0; 1472]);
    group.install(&mut node, now).expect("the node has room");

    // Each child sends its numbers to the node, from an address of its own...
    let sum = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 4);
    for (index, input) in (0..).zip(INPUTS) {
        let elements = input.map(f32::to_le_bytes);
        let packet = group.child(index, sum).contribute(0, elements.as_flattened(), &mut buffer);
        node.handle(now, Addr::Emu(index.into()), Ecn::Unmarked, packet);
    }
    // ... and the node sends each the sum.
    while let Some(transmit) = node.poll_transmit(now) {
        let Addr::Emu(index) = transmit.to else { unreachable!("children have these addresses") };
        let packet = transmit.write(node.payload(&transmit), &mut buffer);
        let result = group.child(index as u16, sum).result(0, packet).expect("its result");
        let numbers: Vec<f32> = result.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        println!("child {index}: {numbers:?}");
        assert_eq!(numbers, [11.5, 22.5, 33.5, 44.5]);
    }
    assert_eq!(node.counters().answers, 3, "each child has its result");
}

#[test]
fn node_gives_every_child_the_sum() {
    main();
}
