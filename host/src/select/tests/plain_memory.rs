//! What `auto` makes of plain memory: ranks copy it in and out of what they share with their device.

use super::*;
use crate::memory_kind::MemoryKind;

fn with(memory: MemoryKind, context: SelectionContext) -> SelectionContext {
    SelectionContext { ranks_per_host: context.ranks, memory, ..context }
}

#[test]
fn plain_memory_makes_the_tree_dearer_by_its_copies() {
    let shared = TreeFacts { zero_copy_ranks: 4, ..TREE };
    let extra = |desc: OpDesc, tree| {
        let [plain, registered] = [MemoryKind::Plain, MemoryKind::Registered]
            .map(|memory| cost(&with(memory, context(4, tree)), &desc, Path::Tree).expect("a cost"));
        plain - registered
    };
    // 240 bytes in and out, and those of three other ranks.
    assert_eq!(extra(sum(60), shared), 480.0 * 2.0 + 3.0 * 480.0 * 2e6);
    assert_eq!(extra(OpDesc::broadcast(Dtype::F32, Rank(0), 60), shared), 240.0 * 2.0 + 3.0 * 240.0 * 2e6);
    // Packets are filled from any memory, and a schedule takes it as it is.
    assert_eq!(extra(sum(60), TREE), 0.0);
    let ring = |memory| cost(&with(memory, context(4, shared)), &sum(60), Path::Ring);
    assert_eq!(ring(MemoryKind::Plain), ring(MemoryKind::Registered));
}

/// What was measured of the ring at a size corrects the copies, too.
#[test]
fn copies_take_as_long_for_each_byte_as_was_measured_of_a_ring() {
    let shared = TreeFacts { zero_copy_ranks: 4, ..TREE };
    let kind = CurveKind {
        collective: Collective::AllReduce,
        path: Path::Ring,
        tree: Some((TreeTransport::Shm, TREE.levels)),
        placement: RankPlacement::OneHost,
    };
    let curves = vec![Curve { kind, ranks: 4, points: vec![Point { bytes: 240, factor: 0.5 }] }];
    let table = CostTable { curves, ..round() };
    let at = |memory| {
        let context = SelectionContext { table: table.clone(), ..context(4, shared) };
        cost(&with(memory, context), &sum(60), Path::Tree).expect("a cost")
    };
    assert_eq!(at(MemoryKind::Plain) - at(MemoryKind::Registered), 240.0 * 2.0 + 3.0 * 240.0 * 2e6);
}

#[test]
fn ranks_of_one_host_take_the_device_for_registered_memory_only() {
    let tree = TreeFacts { levels: 1, max_children: 4, chunk_len_bytes: 64 << 10, zero_copy_ranks: 4, ..TREE };
    for bytes in [256 << 10, 1 << 20, 16 << 20, 64 << 20] {
        let chosen = |memory| {
            let context = with(memory, selection(4, Order::Arrival, Ok(tree)));
            explain(&context, &sum(bytes / 4), Algo::Auto).chosen.expect("possible")
        };
        assert_eq!(chosen(MemoryKind::Registered), Path::Tree, "{bytes} bytes");
        assert_ne!(chosen(MemoryKind::Plain), Path::Tree, "{bytes} bytes");
    }
}

/// Each rank's block goes through the tree of its rail: 20 elements of 60.
#[test]
fn hybrid_counts_the_copies_of_a_block() {
    let rails = TreeFacts { zero_copy_ranks: 2, ..TREE };
    let at = |memory| {
        let context = SelectionContext { rails: Ok(rails), memory, ..in_shape("servers:3", 6) };
        cost(&context, &sum(60), Path::Hybrid).expect("a cost")
    };
    assert_eq!(at(MemoryKind::Plain) - at(MemoryKind::Registered), 2.0 * 80.0 * 2.0);
}
