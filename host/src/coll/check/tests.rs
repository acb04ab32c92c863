//! Every algorithm proved for 1..=64 ranks, its costs compared with the formulas, and schedules broken on
//! purpose, each of which must get its own name.

use super::*;
use crate::coll::{Action, Place, Side, Transfer, dissemination, halving_doubling, ring};
use proptest::prelude::*;

type Algorithm = fn(Place, usize) -> Schedule;

fn of_all_ranks(algorithm: Algorithm, ranks: u32, count: usize) -> Vec<Schedule> {
    Place::all(ranks).map(|place| algorithm(place, count)).collect()
}

fn counts(ranks: u32) -> [usize; 8] {
    let ranks = ranks as usize;
    [0, 1, ranks - 1, ranks, ranks + 1, 7 * ranks + 3, 64 * 63 * 5, 1_000_003]
}

/// Rebuild a schedule with its steps passed through `edit`.
fn edited(schedule: &Schedule, edit: impl Fn(usize, &mut Vec<Transfer>, &mut Vec<Transfer>)) -> Schedule {
    let mut result = Schedule::new(schedule.place(), schedule.count());
    for (index, step) in schedule.steps().enumerate() {
        let (mut sends, mut recvs) = (step.sends.to_vec(), step.recvs.to_vec());
        edit(index, &mut sends, &mut recvs);
        result.push(&sends, &recvs);
    }
    result
}

fn transfer(peer: u32, start: usize, len: usize, action: Action) -> Transfer {
    Transfer { peer: Rank(peer), span: Span { start, len }, action }
}

const PARTIAL: Action = Action::Reduce { received: Side::Left, completes: false };

#[test]
fn ring_is_right_and_costs_what_the_formula_says() {
    for ranks in 1..=64 {
        for count in counts(ranks) {
            let report = check(Goal::AllReduce, &of_all_ranks(ring::all_reduce, ranks, count)).expect("proved");
            assert_eq!(report.steps, 2 * (ranks as usize - 1));
            let (p, n) = (u64::from(ranks), count as u64);
            let optimum = 2 * (p - 1) * n / p;
            assert!(report.sent_elements_max.abs_diff(optimum) <= 2 * (p - 1), "{ranks} ranks, {count}");
            if n % p == 0 {
                assert_eq!((report.sent_elements_max, report.path_elements), (optimum, optimum));
            }
        }
    }
}

#[test]
fn halving_doubling_is_right_and_costs_what_the_formula_says() {
    for ranks in 1..=64_u32 {
        for count in counts(ranks) {
            let schedules = of_all_ranks(halving_doubling::all_reduce, ranks, count);
            let report = check(Goal::AllReduce, &schedules).expect("proved");
            let extras = u64::from(!ranks.is_power_of_two());
            let levels = u64::from(ranks.ilog2());
            assert_eq!(report.steps as u64, 2 * levels + 2 * extras);
            let (survivors, n) = (1_u64 << levels, count as u64);
            let exchanged = 2 * (survivors - 1) * n / survivors;
            assert!(report.sent_elements_max.abs_diff(exchanged + extras * n) <= 2 * levels);
            if n % survivors == 0 {
                assert_eq!(report.sent_elements_max, exchanged + extras * n);
                assert_eq!(report.path_elements, exchanged + 2 * extras * n);
            }
        }
    }
}

#[test]
fn halving_doubling_computes_the_aligned_pairwise_tree() {
    for ranks in 1..=64 {
        let schedules = of_all_ranks(halving_doubling::all_reduce, ranks, 1000);
        let mut report = check(Goal::AllReduce, &schedules).expect("proved");
        let mut level: Vec<_> = (0..ranks).map(|rank| Expressions::input(Rank(rank))).collect();
        if let extras @ 1.. = level.len() - (1 << ranks.ilog2()) {
            let rest = level.split_off(2 * extras);
            level = pairs(&mut report.expressions, &level).into_iter().chain(rest).collect();
        }
        while level.len() > 1 {
            level = pairs(&mut report.expressions, &level);
        }
        for &(_, expression) in &report.blocks {
            assert_eq!(expression, level[0], "{}", report.expressions.written(expression));
            assert!(report.expressions.is_in_order(expression));
        }
    }
}

fn pairs(expressions: &mut Expressions, level: &[ExprId]) -> Vec<ExprId> {
    level.chunks(2).map(|pair| expressions.combine(pair[0], pair[1]).expect("disjoint")).collect()
}

#[test]
fn a_ring_follows_another_order_for_each_block() {
    let report = check(Goal::AllReduce, &of_all_ranks(ring::all_reduce, 3, 3)).expect("proved");
    let written: Vec<_> = report.blocks.iter().map(|&(_, id)| report.expressions.written(id)).collect();
    assert_eq!(written, ["((0+1)+2)", "((1+2)+0)", "((2+0)+1)"]);
    assert!(!report.expressions.is_in_order(report.blocks[1].1));
}

#[test]
fn dissemination_lets_nobody_through_early() {
    for ranks in 1..=64_u32 {
        let schedules: Vec<_> = Place::all(ranks).map(dissemination::barrier).collect();
        let report = check(Goal::Barrier, &schedules).expect("proved");
        assert_eq!(report.steps as u32, ranks.next_power_of_two().ilog2());
        assert_eq!(report.sent_elements_max, 0);
    }
}

#[test]
fn a_round_too_few_leaves_a_rank_unheard() {
    let last = 2;
    let cut = |schedule: Schedule| {
        edited(&schedule, |step, sends, recvs| {
            if step == last {
                sends.clear();
                recvs.clear();
            }
        })
    };
    let schedules: Vec<_> = Place::all(5).map(|place| cut(dissemination::barrier(place))).collect();
    assert_eq!(check(Goal::Barrier, &schedules).unwrap_err(), CheckError::NotHeard { rank: Rank(0), unheard: Rank(1) });
}

#[test]
fn a_step_missing_at_one_rank_is_an_unmatched_transfer() {
    for (sends_too, name) in [(false, "receive"), (true, "send")] {
        let mut schedules = of_all_ranks(ring::all_reduce, 4, 40);
        schedules[2] = edited(&schedules[2], |step, sends, recvs| {
            if step == 5 {
                if sends_too { sends.clear() } else { recvs.clear() }
            }
        });
        let error = check(Goal::AllReduce, &schedules).unwrap_err();
        match name {
            "send" => assert_eq!(error, CheckError::UnmatchedReceive { from: Rank(2), to: Rank(3), step: 5 }),
            _ => assert_eq!(error, CheckError::UnmatchedSend { from: Rank(1), to: Rank(2), step: 5 }),
        }
    }
}

#[test]
fn a_step_missing_at_every_rank_is_a_missing_contribution() {
    let cut = |schedule: &Schedule| {
        edited(schedule, |step, sends, recvs| {
            if step == 5 {
                sends.clear();
                recvs.clear();
            }
        })
    };
    let schedules: Vec<_> = of_all_ranks(ring::all_reduce, 4, 40).iter().map(cut).collect();
    assert!(matches!(check(Goal::AllReduce, &schedules), Err(CheckError::Missing { rank: Rank(0), .. })));
}

#[test]
fn a_doubled_contribution_has_a_name() {
    // 0 -> 1, then 1 -> 0, which now holds 0 twice.
    let mut a = Schedule::new(Place::new(Rank(0), 3).expect("inside"), 4);
    let mut b = Schedule::new(Place::new(Rank(1), 3).expect("inside"), 4);
    a.push(&[transfer(1, 0, 4, PARTIAL)], &[]);
    b.push(&[], &[transfer(0, 0, 4, PARTIAL)]);
    a.push(&[], &[transfer(1, 0, 4, PARTIAL)]);
    b.push(&[transfer(0, 0, 4, PARTIAL)], &[]);
    let c = Schedule::new(Place::new(Rank(2), 3).expect("inside"), 4);
    let error = check(Goal::AllReduce, &[a, b, c]).unwrap_err();
    assert_eq!(error, CheckError::Doubled { rank: Rank(0), step: 1, element: 0, twice: Rank(0) });
}

#[test]
fn a_swapped_range_has_a_name() {
    let mut schedules = of_all_ranks(halving_doubling::all_reduce, 4, 40);
    schedules[1] = edited(&schedules[1], |step, sends, recvs| {
        if step == 0 {
            std::mem::swap(&mut sends[0].span, &mut recvs[0].span);
        }
    });
    assert!(matches!(check(Goal::AllReduce, &schedules), Err(CheckError::SpanMismatch { from: Rank(0), .. })));
}

#[test]
fn a_swap_at_both_ends_is_found_by_its_values() {
    // All ranks agree to gather another block than the one that is finished.
    let shift = |schedule: &Schedule| {
        edited(schedule, |step, sends, recvs| {
            if step >= 2 {
                for transfer in sends.iter_mut().chain(recvs) {
                    transfer.span.start = (transfer.span.start + 10) % 30;
                }
            }
        })
    };
    let schedules: Vec<_> = of_all_ranks(ring::all_reduce, 3, 30).iter().map(shift).collect();
    assert!(matches!(check(Goal::AllReduce, &schedules), Err(CheckError::Stale { held: "partial", .. })));
}

#[test]
fn a_cyclic_wait_has_a_name() {
    // Everybody sends first and receives afterwards: right with buffers, a circle without.
    let split = |schedule: &Schedule| {
        let mut result = Schedule::new(schedule.place(), schedule.count());
        for step in schedule.steps() {
            result.push(step.sends, &[]);
            result.push(&[], step.recvs);
        }
        result
    };
    let schedules: Vec<_> = of_all_ranks(ring::all_reduce, 4, 40).iter().map(split).collect();
    let error = check(Goal::AllReduce, &schedules).unwrap_err();
    assert_eq!(error, CheckError::Deadlock { rank: Rank(0), step: 0, peer: Rank(1) });
}

#[test]
fn a_race_within_a_step_has_a_name() {
    let mut schedules = of_all_ranks(ring::all_reduce, 3, 30);
    for schedule in &mut schedules {
        *schedule = edited(schedule, |step, sends, recvs| {
            if step == 0 {
                recvs[0].span = Span { start: sends[0].span.start, len: 1 };
            }
        });
    }
    assert!(matches!(check(Goal::AllReduce, &schedules), Err(CheckError::Overlap { rank: Rank(0), step: 0, .. })));
}

#[test]
fn an_early_or_late_completion_has_a_name() {
    for early in [true, false] {
        let lie = |schedule: &Schedule| {
            edited(schedule, |step, sends, recvs| {
                for transfer in sends.iter_mut().chain(recvs) {
                    if let Action::Reduce { completes, .. } = &mut transfer.action
                        && step == usize::from(!early)
                    {
                        *completes = early;
                    }
                }
            })
        };
        let schedules: Vec<_> = of_all_ranks(ring::all_reduce, 3, 30).iter().map(lie).collect();
        assert!(matches!(check(Goal::AllReduce, &schedules), Err(CheckError::Completion { .. })), "{early}");
    }
}

#[test]
fn what_is_no_collective_at_all_is_refused() {
    let mut schedules = of_all_ranks(ring::all_reduce, 3, 30);
    schedules.swap(0, 1);
    assert_eq!(check(Goal::AllReduce, &schedules).unwrap_err(), CheckError::NotOneCollective { index: 0 });

    let mut schedules = of_all_ranks(ring::all_reduce, 3, 30);
    schedules[1] = edited(&schedules[1], |_, sends, _| sends[0].peer = Rank(1));
    assert!(matches!(check(Goal::AllReduce, &schedules), Err(CheckError::BadPeer { peer: Rank(1), .. })));

    let mut schedules = of_all_ranks(ring::all_reduce, 3, 30);
    schedules[2] = edited(&schedules[2], |_, _, recvs| recvs[0].span.len = 31);
    assert!(matches!(check(Goal::AllReduce, &schedules), Err(CheckError::OutOfBounds { rank: Rank(2), .. })));

    let mut schedules = of_all_ranks(ring::all_reduce, 3, 30);
    schedules[2] = edited(&schedules[2], |_, sends, _| sends[0].action = Action::Copy);
    assert!(matches!(check(Goal::AllReduce, &schedules), Err(CheckError::ActionMismatch { from: Rank(2), .. })));
}

proptest! {
    /// Whatever single transfer is taken out of a right schedule, the checker notices.
    #[test]
    fn no_transfer_is_superfluous(ranks in 2_u32..10, ring in any::<bool>(), rank in any::<prop::sample::Index>(),
                                  step in any::<prop::sample::Index>(), send in any::<bool>()) {
        let algorithm: Algorithm = if ring { ring::all_reduce } else { halving_doubling::all_reduce };
        let mut schedules = of_all_ranks(algorithm, ranks, 100);
        let rank = rank.index(schedules.len());
        let step = step.index(schedules[rank].len());
        let before = schedules[rank].clone();
        schedules[rank] = edited(&before, |at, sends, recvs| {
            if at == step {
                if send { sends.clear() } else { recvs.clear() }
            }
        });
        prop_assume!(schedules[rank] != before);
        prop_assert!(check(Goal::AllReduce, &schedules).is_err());
    }
}
