//! The cost of `hybrid`, and when it is possible.
//!
//! On G servers of m ranks: a ring reduce-scatter of n elements inside each server, the tree of each rail for n/m
//! elements over G ranks, all rails at once, and a ring all-gather inside. The facts of the rails are agreed on when
//! they are joined, so the cost is the same on all ranks.

use super::model::{schedule_form, tree_form};
use super::{CurveKind, JobFacts, RuledOut, SelectionContext, TreeFacts};
use super::{bytes, copies_seconds, curve, depends_on_order, supports};
use crate::memory_kind::MemoryKind;
use crate::schedule::{Algorithm, Shape, hybrid};
use sumac_hal::op::{OpDesc, Path, ReduceOp};

/// Return the operation that servers and rails run parts of: the contributions to a sum have been scaled before, and an
/// average is divided after the last of them.
pub(crate) fn hybrid_part(desc: &OpDesc) -> OpDesc {
    match desc.op {
        Some(ReduceOp::Avg | ReduceOp::PremulSum) => OpDesc { op: Some(ReduceOp::Sum), ..*desc },
        _ => *desc,
    }
}

/// The cost in seconds, or why it is not possible.
pub(super) fn cost(selection: &SelectionContext, desc: &OpDesc) -> Result<f64, RuledOut> {
    let SelectionContext { ranks, shape, order, ref rails, ref table, .. } = *selection;
    let path = Path::Hybrid.name();
    let [servers, each] = hybrid::servers(shape, ranks).ok_or(RuledOut::Shape { path, shape, ranks })?;
    let rails = rails.as_ref().map_err(|why| RuledOut::Hybrid(why.clone()))?;
    if depends_on_order(order, desc) {
        let why = "each rail combines in its own tree what servers have combined before".into();
        return Err(RuledOut::Order { path, order, why });
    }
    let part = hybrid_part(desc);
    if desc.op == Some(ReduceOp::Avg) && desc.element_bytes() != desc.partial_bytes() {
        // The sums between its steps would be of the narrow type, and overflow where the average does not.
        return Err(RuledOut::Hybrid(format!("{desc} has partial sums of another type than its elements")));
    }
    if !supports(rails, &part) {
        return Err(RuledOut::Unsupported(part));
    }
    let facts = selection.facts();
    let seconds = seconds_inside(selection, &facts, &part, each)
        + seconds_of_rail(
            selection,
            &facts,
            rails,
            &OpDesc { count: desc.count.div_ceil(each.into()), ..part },
            servers,
        );
    let kind = CurveKind::of(&facts, desc, Path::Hybrid);
    Ok(seconds * kind.map_or(1.0, |kind| curve::correction(&table.curves, kind, ranks, bytes(desc) as u64)))
}

/// A reduce-scatter and an all-gather among the ranks of a server.
fn seconds_inside(selection: &SelectionContext, facts: &JobFacts, part: &OpDesc, each: u32) -> f64 {
    let ranks_per_host = facts.ranks_per_host.min(each);
    let server = JobFacts { ranks: each, ranks_per_host, shape: Shape::Line, tree: None };
    let constants = selection.table.constants_for(facts, Path::Ring);
    let dtype = part.dtype.into_iter();
    let phases = dtype.flat_map(|dtype| {
        [("ring::reduce_scatter", *part), ("ring::all_gather", OpDesc::all_gather(dtype, part.count))]
    });
    let seconds = |(name, desc): (&str, OpDesc)| {
        Algorithm::named(name).map_or(0.0, |algorithm| schedule_form(&server, &desc, algorithm).seconds(&constants))
    };
    phases.map(seconds).sum()
}

/// An all-reduce in the tree of a rail. The other rails send from the same hosts meanwhile.
fn seconds_of_rail(
    selection: &SelectionContext,
    facts: &JobFacts,
    rails: &TreeFacts,
    block: &OpDesc,
    servers: u32,
) -> f64 {
    let ranks_per_host = facts.ranks_per_host;
    let rail = JobFacts { ranks: servers, ranks_per_host, shape: Shape::Line, tree: Some(*rails) };
    let seconds = tree_form(&rail, rails, block).seconds(&selection.table.constants_for(&rail, Path::Tree));
    match selection.memory {
        MemoryKind::Plain => seconds + copies_seconds(&selection.table, &rail, rails, block),
        MemoryKind::Registered => seconds,
    }
}
