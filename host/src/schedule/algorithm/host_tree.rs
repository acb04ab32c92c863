//! Costs of a declared expression of one node, evaluated between hosts ([`tree`](crate::schedule::tree)).

use super::size::{Size, cost};
use super::{Cost, Pattern};
use crate::schedule::combinations::Profile;

/// Exact where both orders are played node by node, otherwise a bound of both.
pub(super) fn cost_of(s: &Size, pattern: Pattern) -> Cost {
    let [pairs, fold] = [false, true].map(|is_fold| in_order(s, pattern, Profile::flat(s.p as u32, is_fold)));
    if !pairs.is_bound && !fold.is_bound {
        return pairs;
    }
    cost(
        pairs.steps.max(fold.steps),
        pairs.path_elements.max(fold.path_elements),
        pairs.reduced_elements.max(fold.reduced_elements),
        pairs.sent_elements.max(fold.sent_elements),
    )
    .by_all((pairs.messages.max(fold.messages), pairs.moved_elements.max(fold.moved_elements)))
    .with_extra(pairs.extra_messages.max(fold.extra_messages), 0.0)
    .bound()
}

fn in_order(s: &Size, pattern: Pattern, profile: Profile) -> Cost {
    let (ranks, count) = (s.p as u32, s.n as usize);
    let (ways, segments, back, sent) = match pattern {
        Pattern::AllReduce => (2.0, profile.segments_of_all_reduce(ranks, count), s.log_ceil, s.log_ceil),
        _ => (1.0, profile.segments(count), 0.0, s.others()),
    };
    if segments == 1 {
        let steps = s.p - 1.0 + back;
        return cost(steps, s.n * steps, s.once(), s.n * sent).by_all((ways * (s.p - 1.0), ways * s.once()));
    }
    let (depth, k) = (f64::from(profile.depth), f64::from(segments));
    let width = match pattern {
        Pattern::AllReduce => profile.width(ranks),
        _ => Profile::WIDTH_MAX,
    };
    let whole = ways * width * s.n;
    // For each value that travels up, one goes down.
    let values = (width + ways - 1.0) * (s.p - 1.0);
    cost(ways * depth + k, whole * (1.0 + depth / k), s.n, whole)
        .by_all((k * values, s.n * values))
        .with_extra((ways * width - 1.0) * k, 0.0)
        .bound()
}
