//! Costs, reasons and selections.

mod one_host;
mod plain_memory;
mod rails;

use super::*;
use sumac_hal::ids::Rank;
use sumac_hal::op::Dtype;

const TREE: TreeFacts = TreeFacts {
    levels: 2,
    max_children: 2,
    chunk_len_bytes: 100,
    dtypes: u32::MAX,
    ops: u32::MAX,
    collectives: u32::MAX,
    zero_copy_ranks: 0,
    rdma_ranks: 0,
    over_verbs: false,
    shards: 1,
    links: None,
};

fn selection(ranks: u32, order: Order, tree: Result<TreeFacts, String>) -> SelectionContext {
    let declared = Declared::flat(ranks, order, Shape::Line);
    SelectionContext {
        ranks,
        ranks_per_host: 1,
        shape: Shape::Line,
        order,
        tree,
        rails: Err("not joined".into()),
        leaders: Err("not joined".into()),
        table: CostTable::emulated(),
        declared,
        memory: crate::MemoryKind::Registered,
    }
}

fn sum(count: u64) -> OpDesc {
    OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count)
}

fn cost(selection: &SelectionContext, desc: &OpDesc, path: Path) -> Result<f64, RuledOut> {
    let explanation = explain(selection, desc, Algo::Auto);
    let mut candidates = explanation.candidates.into_iter();
    candidates.find(|candidate| candidate.path == path).expect("a candidate").cost_s
}

/// Constants chosen so that each term of a sum is recognisable.
fn round() -> CostTable {
    let constants = Constants {
        alpha_tree_s: 1.0,
        packet_node_s: 1e4,
        beta_tree_s: 100.0,
        beta_tree_shared_s: 1e6,
        beta_node_s: 1.0,
        alpha_step_s: 1.0,
        alpha_shared_s: 1e4,
        beta_step_s: 1.0,
        beta_shared_s: 1e6,
        alpha_post_s: 0.125,
        alpha_shm_step_s: 0.5,
        alpha_shm_shared_s: 2e4,
        beta_shm_step_s: 2.0,
        beta_shm_shared_s: 2e6,
        gamma_s: 0.0,
        alpha_zero_copy_s: 0.25,
        chunk_zero_copy_s: 1e5,
        beta_zero_copy_s: 0.5,
    };
    CostTable::new(Origin::DataSheets, constants)
}

fn context(ranks: u32, tree: TreeFacts) -> SelectionContext {
    SelectionContext { table: round(), ..selection(ranks, Order::Arrival, Ok(tree)) }
}

#[test]
fn costs_follow_the_formulas() {
    let at = |ranks, desc: OpDesc, path| cost(&context(ranks, TREE), &desc, path);
    // 240 bytes in 3 chunks; of the first, 100 bytes fill the second level.
    assert_eq!(at(4, sum(60), Path::Tree), Ok(4.0 + 4.0 * (3e4 + 340.0) + 240.0 * 200.0));
    let broadcast = OpDesc::broadcast(Dtype::F32, Rank(0), 60);
    assert_eq!(at(4, broadcast, Path::Tree), Ok(4.0 + 3.0 * (3e4 + 340.0) + 240.0 * 100.0));
    let all_gather = OpDesc::all_gather(Dtype::F32, 60);
    assert_eq!(at(4, all_gather, Path::Tree), Ok(4.0 + 3.0 * (3e4 + 340.0) + 240.0 * 125.0));
    assert_eq!(at(4, OpDesc::barrier(), Path::Tree), Ok(4.0 + 4e4));
    assert_eq!(at(4, sum(60), Path::Ring), Ok(6.0 + 360.0));
    assert_eq!(at(4, sum(60), Path::HalvingDoubling), Ok(4.0 + 360.0));
    assert_eq!(at(6, sum(60), Path::HalvingDoubling), Ok(6.0 + 360.0 + 480.0));
    assert_eq!(at(4, OpDesc::barrier(), Path::Dissemination), Ok(2.0));
    // All three messages are in one step.
    assert_eq!(at(4, sum(60), Path::OneShot), Ok(1.0 + 2e4 + 720.0));
    assert_eq!(at(4, broadcast, Path::OneShot), Ok(1.0 + 2e4 + 720.0), "the root sends one after another");
}

#[test]
fn ranks_that_share_a_host_pay_for_its_processors() {
    let shared = SelectionContext { ranks_per_host: 3, ..context(4, TREE) };
    assert_eq!(cost(&shared, &sum(60), Path::Ring), Ok(6.0 + 360.0 + 2.0 * (6e4 + 360e6)));
    let tree = cost(&context(4, TREE), &sum(60), Path::Tree).expect("possible");
    assert_eq!(cost(&shared, &sum(60), Path::Tree), Ok(tree + 2.0 * 2.0 * 240.0 * 1e6));
}

#[test]
fn ranks_of_one_host_pay_for_shared_memory() {
    let here = |desc, path| cost(&SelectionContext { ranks_per_host: 4, ..context(4, TREE) }, &desc, path);
    assert_eq!(here(sum(6000), Path::Ring), Ok(3.0 + 72_000.0 + (24.0 - 6.0) * 2e4 + 3.0 * 36_000.0 * 2e6));
    // Short operations are posts, one in each step.
    assert_eq!(here(sum(60), Path::Ring), Ok(6.0 * 0.125 + 2.0 * 360.0));
    assert_eq!(here(sum(60), Path::RecursiveDoubling), Ok(2.0 * 0.125 + 2.0 * 480.0));
    assert_eq!(here(sum(60), Path::OneShot), Ok(0.125 + 2.0 * 720.0));
    assert_eq!(here(OpDesc::broadcast(Dtype::F32, Rank(0), 60), Path::OneShot), Ok(0.125 + 2.0 * 720.0));
    assert_eq!(here(OpDesc::barrier(), Path::OneShot), Ok(0.125));
    assert_eq!(here(OpDesc::reduce_scatter(Dtype::F32, ReduceOp::Sum, 60), Path::OneShot), Ok(0.125 + 2.0 * 180.0));
    // Longer than a post.
    let long = 0.5 + 11.0 * 2e4 + 2.0 * 3.0 * 8196.0 + 9.0 * 8196.0 * 2e6;
    assert_eq!(here(sum(2049), Path::OneShot), Ok(long));
}

#[test]
fn zero_copy_tree_costs_the_leaf_or_what_is_above_it_whichever_is_slower() {
    let at = |levels, table: &CostTable, desc: OpDesc| {
        let tree = TreeFacts { levels, zero_copy_ranks: 4, ..TREE };
        let context = SelectionContext { table: table.clone(), ..context(4, tree) };
        cost(&context, &desc, Path::Tree)
    };
    // 240 bytes in 3 chunks, 2 children.
    let leaf = 4.0 * (3e5 + 120.0);
    assert_eq!(at(1, &round(), sum(60)), Ok(0.5 + leaf));
    assert_eq!(at(2, &round(), sum(60)), Ok(0.5 + 2.0 + leaf), "the leaf is slower");
    let constants = Constants { packet_node_s: 1e6, ..round().constants };
    let slow_above = CostTable::new(Origin::DataSheets, constants);
    assert_eq!(at(2, &slow_above, sum(60)), Ok(0.5 + 2.0 + 4.0 * (3e6 + 240.0) + 240.0 * 200.0));
    assert_eq!(at(3, &round(), OpDesc::barrier()), Ok(4.5 + 4e5));
}

/// Known rates of cables replace the links of data sheets, and are the least that measured links can take.
#[test]
fn operation_takes_no_less_time_than_its_busiest_cable() {
    let of_data_sheets = |tree| {
        let context = SelectionContext { table: CostTable::data_sheets(), ..context(4, tree) };
        [Path::Tree, Path::Ring, Path::HalvingDoubling, Path::Binomial].map(|path| cost(&context, &sum(1 << 20), path))
    };
    let known = [(Path::Ring, 1_000), (Path::HalvingDoubling, 2_000)];
    let links = LinkFacts { tree_byte_ps: 8_000, schedule_byte_ps: known.into_iter().collect(), others_byte_ps: 3_000 };
    let n = f64::from(4 << 20);
    let near = |found: Result<f64, RuledOut>, expected: f64| {
        let found = found.expect("possible");
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} where {expected} is expected");
    };
    let [tree, ring, halving, binomial] = of_data_sheets(TreeFacts { links: Some(links), ..TREE });
    near(tree, 4.0 * 12e-6 + n * 8e-9);
    near(ring, 6.0 * 12e-6 + 1.5 * n * 1e-9);
    near(halving, 4.0 * 12e-6 + 1.5 * n * 2e-9);
    near(binomial, 4.0 * 12e-6 + 4.0 * n * 3e-9);
    // Of cables that are faster than the data sheets', only combining is left, which devices do meanwhile.
    let none = PathTimes::from_iter([]);
    let fast = LinkFacts { tree_byte_ps: 1, schedule_byte_ps: none, others_byte_ps: 1 };
    let [tree, ring, ..] = of_data_sheets(TreeFacts { links: Some(fast), ..TREE });
    near(tree, 4.0 * 12e-6 + n * 1e-12);
    near(ring, 6.0 * 12e-6 + 0.75 * n * 0.02e-9);
    // Measured constants stay, where cables are not slower.
    let calibrated = |links| {
        let table = CostTable::new(Origin::Calibrated { date: String::new(), error: 0.0 }, round().constants);
        cost(&SelectionContext { table, ..context(4, TreeFacts { links, ..TREE }) }, &sum(60), Path::Ring)
    };
    assert_eq!(calibrated(Some(links)), calibrated(None));
    let slow = LinkFacts { schedule_byte_ps: none, others_byte_ps: 2_000_000_000_000, ..links };
    assert_eq!(calibrated(Some(slow)), Ok(6.0 + 2.0 * 360.0));
    // Ranks that share memory with their only device send nothing over cables.
    let here = TreeFacts { levels: 1, zero_copy_ranks: 4, links: Some(links), ..TREE };
    assert_eq!(of_data_sheets(here)[0], of_data_sheets(TreeFacts { links: None, ..here })[0]);
}

/// 256 ranks of a dragonfly, as `plan` counts them: in groups of 20, and in aligned ones of 16.
#[test]
fn butterfly_is_chosen_by_what_cables_between_groups_carry() {
    let chosen = |halving_doubling_ps, bine_ps| {
        let known = [(Path::HalvingDoubling, halving_doubling_ps), (Path::Bine, bine_ps)];
        let (slow, schedule_byte_ps) = (100_000, known.into_iter().collect());
        let links = LinkFacts { tree_byte_ps: slow, schedule_byte_ps, others_byte_ps: slow };
        let tree = TreeFacts { links: Some(links), ..TREE };
        let context = SelectionContext { table: CostTable::data_sheets(), ..context(256, tree) };
        explain(&context, &sum(1 << 24), Algo::Auto).chosen
    };
    assert_eq!(chosen(210, 117), Some(Path::Bine));
    assert_eq!(chosen(99, 109), Some(Path::HalvingDoubling));
}

#[test]
fn times_of_paths_survive_serialization() {
    let times: PathTimes = [(Path::Bine, 7), (Path::Ring, 0)].into_iter().collect();
    let bytes = postcard::to_stdvec(&times).expect("serialized");
    assert_eq!(postcard::from_bytes::<PathTimes>(&bytes), Ok(times));
    assert_eq!((times.get(Path::Bine), times.get(Path::Ring), times.get(Path::Nhr)), (Some(7), Some(0), None));
    let all: PathTimes = Path::ALL.iter().map(|path| (*path, u64::MAX)).collect();
    assert!(Path::ALL.iter().all(|path| all.get(*path) == Some(u64::from(u32::MAX) - 1)), "each has a place");
}

/// Nobody has calibrated the network, and no fabric is known.
#[test]
fn device_in_a_switch_is_preferred_by_data_sheets() {
    for (ranks, children) in [(4, 4), (8, 8), (64, 64)] {
        let tree = TreeFacts { levels: 1, max_children: children, ..TREE };
        let context = SelectionContext { table: CostTable::data_sheets(), ..context(ranks, tree) };
        for count in [2, 1 << 10, 1 << 18, 1 << 20, 1 << 28] {
            let explanation = explain(&context, &sum(count), Algo::Auto);
            assert_eq!(explanation.chosen, Some(Path::Tree), "{ranks} ranks, {count} elements: {explanation}");
        }
    }
}

#[test]
fn measured_curve_corrects_the_cost_of_its_kind() {
    let kind = CurveKind {
        collective: Collective::AllReduce,
        path: Path::Ring,
        tree: None,
        placement: RankPlacement::PerHost(1),
    };
    let points = vec![Point { bytes: 240, factor: 0.5 }];
    let table = CostTable { curves: vec![Curve { kind, ranks: 4, points }], ..round() };
    let corrected = SelectionContext { table, ..context(4, TREE) };
    assert_eq!(cost(&corrected, &sum(60), Path::Ring), Ok(183.0));
    assert_eq!(cost(&corrected, &sum(60), Path::HalvingDoubling), Ok(364.0));
}

/// Of 4 bytes, NHR costs 12.9 on 6 ranks where pairwise exchange costs 14.7, and 16.2 against 22.3 on 12 ranks.
#[test]
fn path_that_nobody_measured_is_chosen_only_if_cheaper_by_a_quarter() {
    let chosen = |ranks, table| {
        let context = SelectionContext { table, ..context(ranks, TREE) };
        explain(&context, &sum(1), Algo::Auto).chosen
    };
    assert_eq!(chosen(6, round()), Some(Path::Pairwise));
    assert_eq!(chosen(12, round()), Some(Path::Nhr));
    let kind = CurveKind {
        collective: Collective::AllReduce,
        path: Path::Nhr,
        tree: None,
        placement: RankPlacement::PerHost(1),
    };
    let measured = |factor| {
        let points = vec![Point { bytes: 4, factor }];
        CostTable { curves: vec![Curve { kind, ranks: 6, points }], ..round() }
    };
    assert_eq!(chosen(6, measured(1.0)), Some(Path::Nhr), "measured, it competes like any other");
    assert_eq!(chosen(12, measured(2.0)), Some(Path::Pairwise));
}

/// A full mesh has two steps, but its processors have three messages to send in each.
#[test]
fn further_messages_and_pieces_of_a_step_have_a_price() {
    let at = |ranks, path| cost(&context(ranks, TREE), &sum(60), path);
    assert_eq!(at(4, Path::FullMesh), Ok(2.0 + 4e4 + 360.0));
    assert_eq!(at(4, Path::Swing), Ok(4.0 + 4e4 + 360.0));
    assert_eq!(at(4, Path::Nhr), Ok(4.0 + 2.0 / 16.0 + 360.0));
    assert_eq!(at(4, Path::Star), Ok(6.0 + 6.0 * 240.0));
}

#[test]
fn emulators_constants_are_not_used_between_hosts() {
    let toml = "[[override]]\npath = \"tree\"\n";
    let emulated = CostTable::emulated().with_overrides(toml).expect("an override file");
    assert_eq!(emulated.for_hosts(1), emulated);
    let network = emulated.for_hosts(2);
    assert_eq!((&network.origin, &network.overrides), (&Origin::DataSheets, &emulated.overrides));
    assert!(network.constants == CostTable::data_sheets().constants && network.version != emulated.version);
    let calibrated = CostTable::new(Origin::Calibrated { date: String::new(), error: 0.0 }, emulated.constants);
    assert_eq!(calibrated.for_hosts(2), calibrated);
}

#[test]
fn explanation_names_the_transport() {
    let told = |zero_copy_ranks| {
        let tree = TreeFacts { zero_copy_ranks, ..TREE };
        explain(&selection(4, Order::Arrival, Ok(tree)), &sum(8), Algo::Tree)
    };
    let ways = [(0, "udp", "us  packets"), (3, "mixed", "us  3 of 4 ranks zero-copy"), (4, "shm", "us  zero-copy")];
    for (ranks, name, words) in ways {
        let text = told(ranks).to_string();
        assert_eq!(text.lines().filter(|line| line.contains("* tree") && line.ends_with(words)).count(), 1, "{text}");
        assert_eq!(
            (text.matches(words).count(), told(ranks).transport.map(TreeTransport::name)),
            (1, Some(name)),
            "{text}"
        );
    }
    let cost = |ranks| told(ranks).candidates[0].cost_s.clone();
    assert!(cost(0) == cost(3) && cost(3) != cost(4), "a mixed tree is as slow as its packets");
    assert_eq!(explain(&selection(4, Order::Arrival, Err("none".into())), &sum(8), Algo::Ring).transport, None);
}

#[test]
fn forced_path_is_chosen_or_refused_with_the_reason() {
    let none = selection(4, Order::Arrival, Err("device leaf0 is not connected".into()));
    let forced = explain(&none, &sum(8), Algo::Tree);
    assert_eq!(forced.chosen, None);
    assert_eq!(forced.refusal(), Some(&RuledOut::NoTree("device leaf0 is not connected".into())));
    assert_eq!(forced.fallback(), None);
    let open = explain(&none, &sum(8), Algo::Auto);
    assert!(open.chosen.is_some() && open.fallback().is_some(), "{open}");
    let ring = explain(&selection(4, Order::Arrival, Ok(TREE)), &sum(8), Algo::Ring);
    assert_eq!((ring.chosen, ring.fallback()), (Some(Path::Ring), None));
    let barrier = explain(&selection(4, Order::Arrival, Ok(TREE)), &OpDesc::barrier(), Algo::Ring);
    let collective = Collective::Barrier;
    assert_eq!(barrier.refusal(), Some(&RuledOut::Collective { path: "ring", collective }));
}

/// Every collective has a schedule, so that it works without a tree.
#[test]
fn every_collective_has_a_host_schedule() {
    for &collective in Collective::ALL.iter().filter(|&&collective| collective != Collective::AllToAllV) {
        let op = collective.reduces().then_some(ReduceOp::Sum);
        let desc = OpDesc { collective, dtype: Some(Dtype::F32), op, root: Rank(1), count: 100 };
        for order in [Order::Arrival, Order::TreeFold, Order::TreePairwise] {
            let found = explain(&selection(5, order, Err("none".into())), &desc, Algo::Auto);
            assert!(found.chosen.is_some(), "{desc} {order:?}: {found}");
        }
    }
}

#[test]
fn order_rules_schedules_out() {
    let possible = |order, ranks, path, desc: OpDesc| cost(&selection(ranks, order, Ok(TREE)), &desc, path).is_ok();
    let (ring, hd) = (Path::Ring, Path::HalvingDoubling);
    assert!(!possible(Order::TreePairwise, 4, ring, sum(8)));
    assert!(possible(Order::TreePairwise, 4, hd, sum(8)));
    assert!(!possible(Order::TreeFold, 4, hd, sum(8)));
    assert!(possible(Order::TreeFold, 6, Path::HostTree, sum(8)));
    let max = OpDesc::all_reduce(Dtype::F32, ReduceOp::Max, 8);
    assert!(possible(Order::TreeFold, 6, ring, max), "maxima don't depend on the order");
    let wrapping = OpDesc::all_reduce(Dtype::U8, ReduceOp::Prod, 8);
    assert!(possible(Order::TreeFold, 6, ring, wrapping), "nor does what wraps");
    let why = cost(&selection(4, Order::TreeFold, Ok(TREE)), &sum(8), ring).expect_err("ruled out").to_string();
    assert!(why.contains("ring") && why.contains("TreeFold"), "{why}");
}

#[test]
fn missing_capability_rules_out_the_tree() {
    let tree = TreeFacts { dtypes: 0, ..TREE };
    let found = explain(&selection(4, Order::Arrival, Ok(tree)), &sum(8), Algo::Tree);
    assert_eq!(found.refusal(), Some(&RuledOut::Unsupported(sum(8))));
}

#[test]
fn overrides_beat_costs_but_not_the_caller() {
    let toml = "[[override]]\npath = \"ring\"\nmin_bytes = 32";
    let table = CostTable::emulated().with_overrides(toml).expect("an override file");
    let with = |order| SelectionContext { table: table.clone(), ..selection(4, order, Ok(TREE)) };
    let taken = |order, count, algo| explain(&with(order), &sum(count), algo).chosen;
    assert_eq!(taken(Order::Arrival, 8, Algo::Auto), Some(Path::Ring));
    assert_ne!(taken(Order::Arrival, 7, Algo::Auto), Some(Path::Ring));
    assert_eq!(taken(Order::Arrival, 8, Algo::HalvingDoubling), Some(Path::HalvingDoubling));
    assert_ne!(taken(Order::TreeFold, 8, Algo::Auto), Some(Path::Ring), "not possible in this order");
    let broadcast = explain(&with(Order::Arrival), &OpDesc::broadcast(Dtype::F32, Rank(0), 8), Algo::Auto);
    let told = broadcast.candidates.iter().find(|candidate| candidate.path == Path::Ring).expect("a reason");
    assert!(matches!(told.cost_s, Err(RuledOut::Collective { .. })) && broadcast.chosen.is_some());
}

#[test]
fn nccl_is_refused_for_host_memory() {
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 8);
    let explanation = explain(&selection(4, Order::Arrival, Ok(TREE)), &desc, Algo::Nccl);
    let why = explanation.refusal().map(ToString::to_string).unwrap_or_default();
    assert!(why.contains("not of a GPU"), "{why}");
    assert!(explanation.to_string().contains("nccl          ruled out: NCCL unavailable: "), "{explanation}");
}

fn in_shape(shape: &str, ranks: u32) -> SelectionContext {
    let shape = shape.parse().expect("a shape");
    SelectionContext { shape, declared: Declared::flat(ranks, Order::Arrival, shape), ..context(ranks, TREE) }
}

const SHAPED: [Path; 4] = [Path::Ring2d, Path::Torus2d, Path::Mesh2d, Path::HierarchicalRing];

#[test]
fn algorithms_of_several_dimensions_are_refused_in_one_by_name() {
    for shape in ["line", "6", "1x6", "servers:6", "servers:1", "2x4"] {
        let context = in_shape(shape, 6);
        for path in SHAPED {
            let refused = cost(&context, &sum(60), path).expect_err("one dimension");
            let shape = context.shape;
            assert_eq!(refused, RuledOut::Shape { path: path.name(), shape, ranks: 6 });
            let asked = explain(&context, &sum(60), path.name().parse().expect("a name"));
            assert_eq!((asked.chosen, asked.refusal()), (None, Some(&refused)));
            let why = "needs at least two dimensions of at least two ranks, and these 6 ranks have the shape";
            let text = asked.to_string();
            let line = text.lines().find(|line| line.trim_start().starts_with(path.name())).expect("a line");
            assert!(line.contains("ruled out: ") && line.contains(why) && line.contains("set SUMAC_SHAPE"), "{line}");
        }
    }
}

#[test]
fn algorithms_of_several_dimensions_are_priced_by_the_shape() {
    // Three servers of two, and grids; 240 B, of which 400 B go through each port in both ways.
    let at = |shape, path| cost(&in_shape(shape, 6), &sum(60), path);
    assert_eq!(at("2x3", Path::Ring2d), Ok(6.0 + 400.0));
    // In four of its six steps a message in each dimension, in the others two shares in one.
    assert_eq!(at("2x3", Path::Torus2d), Ok(6.0 + 2.0 / 16.0 + 4e4 + 400.0));
    assert_eq!(at("2x3", Path::Mesh2d), Ok(6.0 + 4e4 + 720.0));
    assert_eq!(at("2x3", Path::HierarchicalRing), Ok(4.0 + 2e4 + 400.0));
    assert_eq!(at("servers:2", Path::HierarchicalRing), Ok(6.0 + 400.0));
    assert_eq!(at("line", Path::Swing), at("2x3", Path::Swing), "three ranks are no dimension of its torus");
    let on_torus = cost(&in_shape("4x4", 16), &sum(60), Path::Swing).expect("possible");
    assert!(on_torus > cost(&in_shape("line", 16), &sum(60), Path::Swing).expect("possible"), "four messages a step");
}

#[test]
fn hierarchical_all_to_all_is_refused_in_a_line_and_priced_by_its_servers() {
    let exchange = OpDesc { collective: Collective::AllToAll, op: None, ..sum(60) };
    let at = |shape, path| cost(&in_shape(shape, 6), &exchange, path);
    let near = |shape, path, expected: f64| {
        let found = at(shape, path).expect("possible");
        assert!((found / expected - 1.0).abs() < 1e-9, "{shape}: {found} where {expected} is expected");
    };
    assert!(matches!(at("line", Path::HierarchicalPairwise), Err(RuledOut::Shape { path: "hier-pairwise", .. })));
    // 240 B: 160 and 120 B, and a message for each other server, not five. In the first step a rank of a server of
    // three sends two messages.
    near("2x3", Path::HierarchicalPairwise, 2.0 + 2.0 / 16.0 + 1e4 + 280.0);
    near("servers:2", Path::HierarchicalPairwise, 3.0 + 2.0 / 16.0 + 280.0);
    near("2x3", Path::Pairwise, 5.0 + 200.0);
}

#[test]
fn large_messages_in_a_declared_order_are_priced_in_segments() {
    let context = SelectionContext { order: Order::TreePairwise, ..selection(64, Order::TreePairwise, Ok(TREE)) };
    let reduce = |count| OpDesc { collective: Collective::Reduce, ..sum(count) };
    let per_byte = |count: u64| cost(&context, &reduce(count), Path::HostTree).expect("possible") / (4 * count) as f64;
    // Node by node the root receives 63 times as much as it sends.
    assert!(per_byte(1 << 26) < per_byte(1 << 12) / 10.0, "{} {}", per_byte(1 << 26), per_byte(1 << 12));
}

#[test]
fn survivors_of_a_communicator_are_in_a_line() {
    let whole = in_shape("2x3", 6);
    assert_eq!((whole.for_ranks(6).shape, whole.for_ranks(4).shape), (whole.shape, Shape::Line));
    assert_eq!(in_shape("servers:2", 6).for_ranks(4).shape, Shape::Line, "others than the servers had");
}
