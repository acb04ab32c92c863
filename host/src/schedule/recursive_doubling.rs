//! Recursive doubling: the fewest steps, for messages whose cost is latency.
//!
//! p = 2^k: k steps, in each of which every rank exchanges all n elements:
//! `log2(p) alpha + log2(p) n beta + log2(p) n gamma`; other p, with p' = 2^floor(log2 p): 2 more steps, 2n more on
//! the path and n more reduced (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
//! in MPICH", IJHPCA 19(1), 2005).
//!
//! Distances run 1, 2, 4, ... with the lower block of ranks on the left: the expression, and so the bits, are those
//! of [`super::halving_doubling::all_reduce`].

use super::fold::{Fold, Role};
use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Side, Span, Step};

/// Schedule an all-reduce of `count` elements by recursive doubling.
///
/// A rank sends everything that it has while it receives as much, so two halves of `Work` alternate. What comes last is
/// combined in the output, unless the rank sends its input meanwhile, which may be there.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    schedule(place, count, Some(0))
}

/// The same for separate buffers: what comes last is always combined in the output.
pub fn all_reduce_apart(place: Place, count: usize) -> Schedule {
    schedule(place, count, None)
}

fn schedule(place: Place, count: usize, in_place_at: Option<usize>) -> Schedule {
    let fold = Fold::of(place.ranks());
    let role = fold.role(place);
    let whole = Span::first(count);
    let result = Buffer::Output.at(whole);
    // It sends from `Work` last if it has received anything before.
    let landings = fold.levels() + u32::from(matches!(role, Role::Survivor { extra: Some(_), .. }));
    let ends_in_output = landings > 1 || in_place_at.is_none();
    let halves = if ends_in_output { landings.saturating_sub(1) } else { landings };
    let work = if matches!(role, Role::Extra { .. }) { 0 } else { halves.min(2) as usize * count };
    let layout = Layout { input: count, output: count, work, work_in_output: false, in_place_at };
    let mut schedule = Schedule::reducing(place, layout);
    let (position, extra) = match role {
        Role::Extra { survivor } => {
            schedule.exchange(&[Send { peer: survivor, from: Buffer::Input.at(whole) }], &[]);
            let landing = Landing::copy(result);
            schedule.exchange(&[], &[Recv { peer: survivor, sent_from: Buffer::Output, landing }]);
            return schedule;
        }
        Role::Survivor { position, extra } => (position, extra),
    };
    let halves = [Buffer::Work.at(whole), Buffer::Work.at(Span { start: count, len: count })];
    let mut held = Buffer::Input.at(whole);
    let mut turn = 0;
    let mut take = |schedule: &mut Schedule, sends: &[Send], peer, sent_from, received, is_last, held: &mut Region| {
        let to = if is_last && ends_in_output { result } else { halves[turn] };
        let landing = Landing::combine(*held, received, to);
        schedule.exchange(sends, &[Recv { peer, sent_from, landing }]);
        *held = to;
        turn = 1 - turn;
    };
    if let Some(peer) = extra {
        take(&mut schedule, &[], peer, Buffer::Input, Side::Right, false, &mut held);
    }
    for level in 0..fold.levels() {
        let other = position ^ (1 << level);
        let sent_from = if level == 0 && !fold.has_extra(other) { Buffer::Input } else { Buffer::Work };
        let received = if position < other { Side::Right } else { Side::Left };
        let peer = fold.rank_at(other);
        let is_last = level + 1 == fold.levels();
        take(&mut schedule, &[Send { peer, from: held }], peer, sent_from, received, is_last, &mut held);
    }
    let out = extra.map(|peer| Send { peer, from: result });
    let kept = (held != result).then(|| Local::copy(held, result));
    if kept.is_some() || out.is_some() {
        schedule.push(Step { locals: kept.as_slice(), sends: out.as_slice(), recvs: &[] });
    }
    schedule
}
