//! What `auto` takes among the ranks of one host: what was measured decides.

use super::*;

/// What was measured decides: posts are fastest where they are possible, and zero-copy where ranks are many, too. Two
/// ranks copy each other's halves in the time that an emulated device takes, and in half of it from ordinary memory.
#[test]
fn ranks_of_one_host_post_what_is_short_and_take_the_device_for_what_is_long() {
    for (ranks, long) in [(2, Path::Ring), (4, Path::Tree), (8, Path::Tree)] {
        let tree =
            TreeFacts { levels: 1, max_children: ranks, chunk_len_bytes: 64 << 10, zero_copy_ranks: ranks, ..TREE };
        let chosen = |bytes: u64, tree| {
            let context = selection(ranks, Order::Arrival, tree);
            let context = SelectionContext { ranks_per_host: ranks, ..context };
            explain(&context, &sum(bytes / 4), Algo::Auto).chosen.expect("possible")
        };
        assert_eq!(chosen(8, Ok(tree)), Path::OneShot, "{ranks} ranks");
        assert_eq!(chosen(1 << 10, Ok(tree)), Path::OneShot, "{ranks} ranks");
        assert_eq!(chosen(16 << 20, Ok(tree)), long, "{ranks} ranks");
        assert_ne!(chosen(16 << 20, Ok(TreeFacts { zero_copy_ranks: 0, ..tree })), Path::Tree, "packets cost more");
        assert_eq!(chosen(8, Err("no device".into())), Path::OneShot);
    }
}

/// Schedules that move all bytes along a chain of ranks took up to twice as long as those that move a part at a time.
#[test]
fn ranks_of_one_host_without_a_tree_split_what_is_longer_than_a_post() {
    for (ranks, bytes) in [2_u32, 4].into_iter().flat_map(|ranks| [24, 32, 64, 256].map(|kib| (ranks, kib << 10))) {
        let context = selection(ranks, Order::Arrival, Err("no device".into()));
        let context = SelectionContext { ranks_per_host: ranks, ..context };
        let chosen = explain(&context, &sum(bytes / 4), Algo::Auto).chosen.expect("possible");
        let splits = [Path::Ring, Path::HalvingDoubling, Path::Nhr, Path::Bine, Path::Swing];
        assert!(splits.contains(&chosen), "{ranks} ranks, {bytes} B: {chosen}");
    }
}
