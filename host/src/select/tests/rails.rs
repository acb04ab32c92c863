//! The costs of `hybrid` and `rab`, and why they are refused.

use super::*;

#[test]
fn hybrid_is_refused_without_servers_or_rails_with_the_reason() {
    let joined = |shape| SelectionContext { rails: Ok(TREE), ..in_shape(shape, 6) };
    for shape in ["line", "6", "servers:6", "servers:1"] {
        let context = joined(shape);
        let (path, shape) = ("hybrid", context.shape);
        assert_eq!(cost(&context, &sum(60), Path::Hybrid), Err(RuledOut::Shape { path, shape, ranks: 6 }));
    }
    let without = in_shape("servers:2", 6);
    assert_eq!(
        cost(&without, &sum(60), Path::Hybrid),
        Err(RuledOut::Rails { path: "hybrid", why: "not joined".into() })
    );
    let asked = explain(&without, &sum(60), Algo::Hybrid);
    assert_eq!(asked.chosen, None);
    assert!(asked.to_string().contains("hybrid        ruled out: hybrid is not possible: not joined"), "{asked}");
    let context = joined("servers:2");
    let unsupported = SelectionContext { rails: Ok(TreeFacts { ops: 0, ..TREE }), ..context.clone() };
    assert_eq!(cost(&unsupported, &sum(60), Path::Hybrid), Err(RuledOut::Unsupported(sum(60))));
    // Sums of halves between the steps would overflow where the average does not.
    let average = |dtype| cost(&context, &OpDesc::all_reduce(dtype, ReduceOp::Avg, 60), Path::Hybrid);
    assert!(average(Dtype::F32).is_ok());
    assert!(average(Dtype::F16).expect_err("narrow").to_string().contains("partial sums of another type"));
    let ordered = SelectionContext { order: Order::TreeFold, ..context };
    assert!(matches!(cost(&ordered, &sum(60), Path::Hybrid), Err(RuledOut::Order { path: "hybrid", .. })));
    let integers = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 60);
    assert!(cost(&ordered, &integers, Path::Hybrid).is_ok());
}

/// Three servers of two: parts inside carry half each way, in one step or by rings, and the tree of a rail half.
#[test]
fn hybrid_is_priced_by_its_parts() {
    let context = SelectionContext { ranks_per_host: 2, rails: Ok(TREE), ..in_shape("servers:2", 6) };
    let server = SelectionContext { ranks_per_host: 2, ..in_shape("line", 2) };
    for (count, path) in [(60, Path::OneShot), (3000, Path::Ring)] {
        let inside = [OpDesc::reduce_scatter(Dtype::F32, ReduceOp::Sum, count), OpDesc::all_gather(Dtype::F32, count)]
            .map(|desc| cost(&server, &desc, path).expect("possible"));
        let rail = SelectionContext { ranks_per_host: 2, ..in_shape("line", 3) };
        let rail = cost(&rail, &sum(count / 2), Path::Tree).expect("possible");
        let whole = cost(&context, &sum(count), Path::Hybrid).expect("possible");
        assert!((whole - (inside[0] + inside[1] + rail)).abs() < 1e-9 * whole, "{whole}: {inside:?}, {rail}");
    }
    // Nobody has measured it, so it has to be cheaper by a quarter.
    assert!(!has_fitted_constants(Path::Hybrid));
}

#[test]
fn rab_is_refused_without_servers_or_a_tree_of_leaders_with_the_reason() {
    let without = SelectionContext { rails: Ok(TREE), ..in_shape("servers:2", 6) };
    assert_eq!(cost(&without, &sum(60), Path::Rab), Err(RuledOut::Rails { path: "rab", why: "not joined".into() }));
    let asked = explain(&without, &sum(60), Algo::Rab);
    assert_eq!(asked.chosen, None);
    assert!(asked.to_string().contains("rab           ruled out: rab is not possible: not joined"), "{asked}");
    let context = SelectionContext { leaders: Ok(TREE), ..in_shape("servers:2", 6) };
    assert!(cost(&context, &sum(60), Path::Rab).is_ok());
    assert!(cost(&context, &sum(60), Path::Hybrid).is_err(), "the rails have not joined");
    let in_line = SelectionContext { leaders: Ok(TREE), ..in_shape("line", 6) };
    assert!(matches!(cost(&in_line, &sum(60), Path::Rab), Err(RuledOut::Shape { path: "rab", .. })));
    let ordered = SelectionContext { order: Order::TreeFold, ..context };
    assert!(matches!(cost(&ordered, &sum(60), Path::Rab), Err(RuledOut::Order { path: "rab", .. })));
}

/// Three servers of two: everything to each leader and back in shared memory, and in the tree of three leaders.
#[test]
fn rab_is_priced_by_shared_memory_inside_and_the_tree_of_leaders() {
    let context = SelectionContext { ranks_per_host: 2, leaders: Ok(TREE), ..in_shape("servers:2", 6) };
    let server = SelectionContext { ranks_per_host: 2, ..in_shape("line", 2) };
    for (count, path) in [(60, Path::OneShot), (3000, Path::Binomial)] {
        let root = Rank(0);
        let inside =
            [OpDesc::reduce(Dtype::F32, ReduceOp::Sum, root, count), OpDesc::broadcast(Dtype::F32, root, count)]
                .map(|desc| cost(&server, &desc, path).expect("possible"));
        let leaders = SelectionContext { ranks_per_host: 1, ..in_shape("line", 3) };
        let leaders = cost(&leaders, &sum(count), Path::Tree).expect("possible");
        let whole = cost(&context, &sum(count), Path::Rab).expect("possible");
        assert!((whole - (inside[0] + inside[1] + leaders)).abs() < 1e-9 * whole, "{whole}: {inside:?}, {leaders}");
    }
    assert!(!has_fitted_constants(Path::Rab));
}

/// Up to the capacity of a board, and where the ranks of a server share memory.
#[test]
fn short_parts_inside_servers_cost_a_post_each() {
    let posts = |ranks_per_host, count, path| {
        let context = SelectionContext { ranks_per_host, ..in_shape("servers:2", 6) };
        let context = SelectionContext { rails: Ok(TREE), leaders: Ok(TREE), ..context };
        let mut dear = context.clone();
        dear.table.constants.alpha_post_s += 1000.0;
        let [without, with] = [context, dear].map(|context| cost(&context, &sum(count), path).expect("possible"));
        ((with - without) / 1000.0).round()
    };
    for path in [Path::Rab, Path::Hybrid] {
        assert_eq!([posts(2, 2048, path), posts(2, 2049, path), posts(1, 2048, path)], [2.0, 0.0, 0.0]);
    }
}

/// Every other way has steps between servers, of which ranks that share no tree take several.
#[test]
fn auto_takes_rab_where_steps_between_servers_are_dear() {
    let mut table = round();
    table.constants.alpha_step_s = 1e9;
    let tree = Err("no tree for all ranks".into());
    let context = SelectionContext { ranks_per_host: 4, tree, table, leaders: Ok(TREE), ..in_shape("servers:4", 16) };
    assert_eq!(explain(&context, &sum(1), Algo::Auto).chosen, Some(Path::Rab));
    let cheap = SelectionContext { table: round(), ..context.clone() };
    assert_ne!(explain(&cheap, &sum(1), Algo::Auto).chosen, Some(Path::Rab));
    let without = SelectionContext { leaders: Err("not joined".into()), ..context };
    assert_ne!(explain(&without, &sum(1), Algo::Auto).chosen, Some(Path::Rab));
}
