//! Control requests: each [`Refusal`], and that a refused request changes nothing.

use super::*;
use sumac_hal::ctrl::Refusal;

/// A node with a tree and no group.
fn with_tree(setup: &Setup) -> Node<'static> {
    let mut node = bare(setup);
    assert_eq!(node.control(&Request::InstallTree(tree_config(setup)), Instant::ZERO), Response::Done);
    node
}

/// Check that `request` is refused and changes nothing.
fn refused(node: &mut Node<'static>, request: &Request, refusal: Refusal) {
    let before = node.stats();
    assert_eq!(node.control(request, Instant::ZERO), Response::Refused(refusal));
    assert_eq!(node.stats(), before, "a refused request changes nothing");
}

fn create(node: &mut Node<'static>, config: GroupConfig) {
    assert_eq!(node.control(&Request::CreateGroup(config), Instant::ZERO), Response::Done);
}

#[test]
fn missing_or_existing_groups_and_trees_are_refused() {
    let setup = Setup { groups: 2, ..Setup::default() };
    let mut node = with_tree(&setup);
    let group = group_config(&setup, 0);
    refused(&mut node, &Request::RenewGroup(group.group), Refusal::NoGroup(group.group));
    refused(&mut node, &Request::ReleaseGroup(group.group), Refusal::NoGroup(group.group));
    refused(&mut node, &Request::RemoveTree(TreeId(2)), Refusal::NoTree(TreeId(2)));
    let foreign = GroupConfig { tree: TreeId(2), ..group };
    refused(&mut node, &Request::CreateGroup(foreign), Refusal::NoTree(TreeId(2)));
    create(&mut node, group);
    refused(&mut node, &Request::CreateGroup(group), Refusal::GroupExists(group.group));
    refused(&mut node, &Request::RemoveTree(TreeId(1)), Refusal::TreeInUse(TreeId(1)));
    refused(&mut node, &Request::InstallTree(tree_config(&setup)), Refusal::TreeInUse(TreeId(1)));
    refused(&mut node, &Request::Identify, Refusal::Unknown);
    for request in [Request::ReleaseGroup(group.group), Request::RemoveTree(TreeId(1))] {
        assert_eq!(node.control(&request, Instant::ZERO), Response::Done);
    }
    assert_eq!((node.stats().groups, node.stats().trees), (0, 0));
}

#[test]
fn tree_size_out_of_range_is_refused() {
    let setup = Setup { children: 4, has_parent: true, shard: Shard::new(0, 2).unwrap(), ..Setup::default() };
    let mut node = bare(&setup);
    let tree = tree_config(&setup);
    for children in [0, 5, 257, u16::MAX] {
        let request = Request::InstallTree(TreeConfig { children, ..tree.clone() });
        refused(&mut node, &request, Refusal::Children { children, limit: 4 });
    }
    for count in [0, 1, 3, 8] {
        let parent = NodeParent { data_addrs: (0..count).map(|_| PARENT).collect(), child: OWN_PLACE };
        let request = Request::InstallTree(TreeConfig { parent: Some(parent), ..tree.clone() });
        refused(&mut node, &request, Refusal::Shards { parent: count, own: 2 });
    }
    let install = |node: &mut Node<'_>, id| {
        node.control(&Request::InstallTree(TreeConfig { tree: TreeId(id), ..tree.clone() }), Instant::ZERO)
    };
    assert_eq!(install(&mut node, 1), Response::Done);
    assert_eq!(install(&mut node, 1), Response::Done, "reinstalling takes no second entry");
    create(&mut node, group_config(&setup, 0));
    assert_eq!(install(&mut node, 2), Response::Refused(Refusal::NoEntry { limit: 1 }));
}

/// A controller that died removes no trees. Unused trees make room, the oldest first; trees in use never do.
#[test]
fn install_evicts_the_oldest_unused_tree() {
    let setup = Setup { groups: 3, ..Setup::default() };
    let mut node = bare(&setup);
    let install = |node: &mut Node<'_>, id| {
        let tree = TreeConfig { tree: TreeId(id), ..tree_config(&setup) };
        node.control(&Request::InstallTree(tree), Instant::ZERO)
    };
    for id in 1..=3 {
        assert_eq!(install(&mut node, id), Response::Done);
    }
    create(&mut node, group_config(&setup, 0));
    for id in 4..=5 {
        assert_eq!(install(&mut node, id), Response::Done);
    }
    assert_eq!(node.stats().trees, 3);
    for (index, (id, is_gone)) in [(2, true), (3, true), (4, false), (5, false)].into_iter().enumerate() {
        let group = GroupConfig { tree: TreeId(id), ..group_config(&setup, 1 + index) };
        match is_gone {
            true => refused(&mut node, &Request::CreateGroup(group), Refusal::NoTree(TreeId(id))),
            false => create(&mut node, group),
        }
    }
    assert_eq!(install(&mut node, 6), Response::Refused(Refusal::NoEntry { limit: 3 }));
}

#[test]
fn window_beyond_half_the_slots_is_refused() {
    let setup = Setup::default();
    let mut node = with_tree(&setup);
    let group = group_config(&setup, 0);
    // With fewer than two slots per chunk of the window, a slot could be needed again before every child has its answer
    // (PROTOCOL 1).
    for (window, slots) in [(0, 16), (9, 16), (8, 15), (1, 1), (2, 3), (1, 0), (257, 514), (256, 513), (u16::MAX, 16)] {
        let config = GroupConfig { window_max: window, slots, ..group };
        refused(&mut node, &Request::CreateGroup(config), Refusal::Window { window, slots });
    }
    create(&mut node, group);
}

#[test]
fn shard_needs_twice_its_share_of_the_window_in_slots() {
    let setup = Setup { shard: Shard::new(0, 2).unwrap(), window: 40, slots: 48, ..Setup::default() };
    let mut node = with_tree(&setup);
    let group = group_config(&setup, 0);
    // Of 40 seqs in a row, 24 can fall into one of two shards (16 + 8).
    let short = GroupConfig { slots: 47, ..group };
    refused(&mut node, &Request::CreateGroup(short), Refusal::Window { window: 40, slots: 47 });
    create(&mut node, group);
}

#[test]
fn invalid_chunk_length_is_refused() {
    let setup = Setup { chunk_len_bytes: 8944, ..Setup::default() };
    let mut node = with_tree(&setup);
    let group = group_config(&setup, 0);
    for chunk_len_bytes in [0, 48, 65, 72, 8960, u16::MAX] {
        let config = GroupConfig { chunk_len_bytes, ..group };
        refused(&mut node, &Request::CreateGroup(config), Refusal::Chunk { chunk_len_bytes, limit: 9000 - 48 });
    }
    create(&mut node, group);
}

/// The tables have room for exactly two groups; the refusal names the table that is full.
#[test]
fn full_table_is_named_in_the_refusal() {
    let setup = Setup { groups: 2, order: Order::TreeFold, ..Setup::default() };
    let config = |group| group_config(&setup, group);
    let mut node = with_tree(&setup);
    let whole = GroupConfig { slots: 32, window_max: 16, ..config(0) };
    create(&mut node, config(1));
    refused(&mut node, &Request::CreateGroup(whole), Refusal::NoSlots { need: 32 });
    let wide = GroupConfig { chunk_len_bytes: 80, ..config(0) };
    refused(&mut node, &Request::CreateGroup(wide), Refusal::NoMemory { need: 16 * 2 * 80 });
    create(&mut node, config(0));
    refused(&mut node, &Request::CreateGroup(config(2)), Refusal::NoEntry { limit: 2 });
    assert_eq!((node.stats().slots_used, node.stats().slot_memory_used_bytes), (32, 32 * 2 * 64));

    // A group with all children leaves none for a second one.
    let mut node = bare(&setup);
    let tree = TreeConfig { children: 4, ..tree_config(&setup) };
    assert_eq!(node.control(&Request::InstallTree(tree), Instant::ZERO), Response::Done);
    let small = |group| GroupConfig { slots: 2, window_max: 1, ..config(group) };
    create(&mut node, small(0));
    refused(&mut node, &Request::CreateGroup(small(1)), Refusal::NoChildren { need: 4 });
    assert_eq!(node.control(&Request::Reset, Instant::ZERO), Response::Done);
    assert_eq!((node.stats().groups, node.stats().trees, node.stats().slots_used), (0, 0, 0));
}

#[test]
fn new_group_inherits_no_state() {
    let mut rig = Rig::new(Setup::default());
    (0..3).for_each(|seq| rig.all(seq));
    rig.data(0, 3, &[100.0]);
    assert_eq!(rig.node.control(&Request::ReleaseGroup(group_id(0)), rig.now), Response::Done);
    assert_eq!(rig.drain(), [], "its answers are no longer sent");
    assert_eq!(rig.node.control(&Request::CreateGroup(group_config(&rig.setup, 0)), rig.now), Response::Done);
    let repr = rig.up(Kind::Data, 0, 0);
    rig.put(Addr::Emu(60), repr, &floats(&[1.0]));
    let repr = rig.up(Kind::Data, 1, 0);
    rig.put(Addr::Emu(61), repr, &floats(&[2.0]));
    assert!(rig.drain().iter().all(|sent| sent.floats() == [3.0]));
}

#[test]
fn capabilities_match_the_tables() {
    let setup = Setup { groups: 3, children: 5, ..Setup::default() };
    let capabilities = bare(&setup).capabilities();
    assert_eq!((capabilities.groups, capabilities.children, capabilities.slots), (3, 15, 48));
    assert_eq!(capabilities.slot_memory_bytes, 48 * 64);
    assert_eq!(capabilities.dtypes, Dtype::ALL.iter().fold(0, |mask, dtype| mask | 1 << dtype.to_wire()));
    assert_eq!(capabilities.ops.count_ones() as usize, ReduceOp::ALL.len());
}
