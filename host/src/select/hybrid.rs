//! The cost of `hybrid` and `rab`, and when they are possible.
//!
//! On G servers of m ranks, for n elements:
//!
//! | path | inside each server | between servers |
//! |---|---|---|
//! | `hybrid` | a ring reduce-scatter and a ring all-gather | the tree of each rail, n/m over G ranks, all rails at once |
//! | `rab` | a reduction to the leader and a broadcast from it | the tree of the leaders, n over G ranks |
//!
//! Short messages take one step in each part inside, and where the ranks of a server share memory, its board.
//!
//! The facts of these trees are agreed on when they are joined, so costs are the same on all ranks.

use super::model::{schedule_form, tree_form};
use super::{CurveKind, JobFacts, RuledOut, SelectionContext, TreeFacts};
use super::{bytes, copies_seconds, curve, depends_on_order, supports};
use crate::exec::board::is_for_board;
use crate::memory_kind::MemoryKind;
use crate::schedule::{Algorithm, Shape, hybrid, rab};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, OpDesc, Path, ReduceOp};

/// Return whether a path has parts inside servers and parts by their rails.
pub(crate) const fn is_by_rails(path: Path) -> bool {
    matches!(path, Path::Hybrid | Path::Rab)
}

/// Return the operation that servers and rails run parts of: the contributions to a sum have been scaled before, and an
/// average is divided after the last of them.
pub(crate) fn part_of(desc: &OpDesc) -> OpDesc {
    match desc.op {
        Some(ReduceOp::Avg | ReduceOp::PremulSum) => OpDesc { op: Some(ReduceOp::Sum), ..*desc },
        _ => *desc,
    }
}

/// The cost in seconds, or why it is not possible.
pub(super) fn cost(selection: &SelectionContext, desc: &OpDesc, by: Path) -> Result<f64, RuledOut> {
    let SelectionContext { ranks, shape, order, ref table, .. } = *selection;
    let path = by.name();
    let servers = hybrid::servers(shape, ranks).ok_or(RuledOut::Shape { path, shape, ranks })?;
    let trees = if by == Path::Rab { &selection.leaders } else { &selection.rails };
    let trees = trees.as_ref().map_err(|why| RuledOut::Rails { path, why: why.clone() })?;
    if depends_on_order(order, desc) {
        let why = "trees between servers combine what each server has combined before".into();
        return Err(RuledOut::Order { path, order, why });
    }
    let part = part_of(desc);
    if desc.op == Some(ReduceOp::Avg) && desc.element_bytes() != desc.partial_bytes() {
        // The sums between its steps would be of the narrow type, and overflow where the average does not.
        let why = format!("{desc} has partial sums of another type than its elements");
        return Err(RuledOut::Rails { path, why });
    }
    if !supports(trees, &part) {
        return Err(RuledOut::Unsupported(part));
    }
    let facts = selection.facts();
    let seconds = seconds_inside(selection, &facts, (&part, by), servers[1])
        + seconds_of_rail(selection, trees, (&part, by), servers);
    let kind = CurveKind::of(&facts, desc, by);
    Ok(seconds * kind.map_or(1.0, |kind| curve::correction(&table.curves, kind, ranks, bytes(desc) as u64)))
}

/// The parts among the ranks of a server.
fn seconds_inside(selection: &SelectionContext, facts: &JobFacts, (part, by): (&OpDesc, Path), each: u32) -> f64 {
    let ranks_per_host = facts.ranks_per_host.min(each);
    let server = JobFacts { ranks: each, ranks_per_host, shape: Shape::Line, tree: None };
    let constants = selection.table.constants_for(facts, Path::Ring);
    let count = usize::try_from(part.count).unwrap_or(usize::MAX);
    let is_short = is_for_board(part, Path::OneShot, each);
    let phases = |dtype| match by {
        Path::Rab if is_short => [
            ("one_shot::reduce", OpDesc { collective: Collective::Reduce, ..*part }),
            ("one_shot::broadcast", OpDesc::broadcast(dtype, Rank(0), part.count)),
        ],
        Path::Rab => [
            (rab::reduction(count, each), OpDesc { collective: Collective::Reduce, ..*part }),
            (rab::broadcast(count, each), OpDesc::broadcast(dtype, Rank(0), part.count)),
        ],
        _ if is_short => [
            ("one_shot::reduce_scatter", OpDesc { collective: Collective::ReduceScatter, ..*part }),
            ("one_shot::all_gather", OpDesc::all_gather(dtype, part.count)),
        ],
        _ => [
            ("ring::reduce_scatter", OpDesc { collective: Collective::ReduceScatter, ..*part }),
            ("ring::all_gather", OpDesc::all_gather(dtype, part.count)),
        ],
    };
    let seconds = |(name, desc): (&str, OpDesc)| {
        Algorithm::named(name).map_or(0.0, |algorithm| schedule_form(&server, &desc, algorithm).seconds(&constants))
    };
    part.dtype.into_iter().flat_map(phases).map(seconds).sum()
}

/// An all-reduce in the tree of a rail. Other rails, if there are any, send from the same hosts meanwhile.
fn seconds_of_rail(
    selection: &SelectionContext,
    tree: &TreeFacts,
    (part, by): (&OpDesc, Path),
    [servers, each]: [u32; 2],
) -> f64 {
    let (count, ranks_per_host) = match by {
        Path::Rab => (part.count, selection.ranks_per_host.div_ceil(each)),
        _ => (part.count.div_ceil(each.into()), selection.ranks_per_host),
    };
    let block = OpDesc { count, ..*part };
    let rail = JobFacts { ranks: servers, ranks_per_host, shape: Shape::Line, tree: Some(*tree) };
    let seconds = tree_form(&rail, tree, &block).seconds(&selection.table.constants_for(&rail, Path::Tree));
    match selection.memory {
        MemoryKind::Plain => seconds + copies_seconds(&selection.table, &rail, tree, &block),
        MemoryKind::Registered => seconds,
    }
}
