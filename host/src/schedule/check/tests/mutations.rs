//! Deliberately broken schedules, each of which must be detected with its own error.

use super::*;
use crate::schedule::{Local, Operand, Side};

/// Rebuild a schedule, passing its steps through `edit`.
pub(super) fn edited(schedule: &Schedule, mut edit: impl FnMut(usize, &mut StepBuffer)) -> Schedule {
    let new = if schedule.reduces() { Schedule::reducing } else { Schedule::moving };
    let mut result = new(schedule.place(), *schedule.layout());
    let mut parts = StepBuffer::default();
    for index in 0..schedule.len() {
        assert!(schedule.read(index, &mut parts));
        edit(index, &mut parts);
        result.push(parts.step());
    }
    result
}

fn rings(ranks: u32, count: usize) -> Vec<Schedule> {
    schedules(named("ring::all_reduce"), ranks, count, Rank(0))
}

fn place(rank: u32, ranks: u32) -> Place {
    Place::new(Rank(rank), ranks).expect("inside")
}

fn all_reduce_error(schedules: &[Schedule]) -> CheckError {
    check(Goal::AllReduce, schedules).expect_err("broken")
}

#[test]
fn missing_barrier_round_is_detected() {
    let cut = |schedule: &Schedule| {
        edited(schedule, |step, parts| {
            if step == 2 {
                *parts = StepBuffer::default();
            }
        })
    };
    let schedules: Vec<_> = schedules(named("dissemination::barrier"), 5, 0, Rank(0)).iter().map(cut).collect();
    assert_eq!(
        check(Goal::Barrier, &schedules).unwrap_err(),
        CheckError::BarrierNotSynchronized { rank: Rank(0), missing: Rank(1) }
    );
}

#[test]
fn step_missing_at_one_rank_is_an_unmatched_message() {
    let broken = |sends_too: bool| {
        let mut schedules = rings(4, 40);
        schedules[2] = edited(&schedules[2], |step, parts| {
            if step == 5 {
                if sends_too { parts.sends.clear() } else { parts.recvs.clear() }
            }
        });
        all_reduce_error(&schedules)
    };
    assert_eq!(broken(true), CheckError::UnmatchedReceive { from: Rank(2), to: Rank(3), step: 5 });
    assert_eq!(broken(false), CheckError::UnmatchedSend { from: Rank(1), to: Rank(2), step: 5 });
}

#[test]
fn step_missing_at_every_rank_leaves_elements_unfinished() {
    let cut = |schedule: &Schedule| {
        edited(schedule, |step, parts| {
            if step == 5 {
                *parts = StepBuffer::default();
            }
        })
    };
    let schedules: Vec<_> = rings(4, 40).iter().map(cut).collect();
    let error = all_reduce_error(&schedules);
    assert_eq!(error, CheckError::Unfinished { rank: Rank(0), element: 20, held: Some(Buffer::Work) });
}

#[test]
fn doubled_contribution_is_detected() {
    // 0 -> 1, then 1 -> 0, which now holds 0 twice.
    let whole = Span::first(4);
    let (input, work) = (Buffer::Input.at(whole), Buffer::Work.at(whole));
    let new = |rank| Schedule::reducing(place(rank, 3), Layout { work_in_output: false, ..Layout::all_reduce(4) });
    let (mut a, mut b, c) = (new(0), new(1), new(2));
    let landing = Landing::combine(input, Side::Left, work);
    a.exchange(&[Send { peer: Rank(1), from: input }], &[]);
    b.exchange(&[], &[Recv { peer: Rank(0), sent_from: Buffer::Input, landing }]);
    a.exchange(&[], &[Recv { peer: Rank(1), sent_from: Buffer::Work, landing }]);
    b.exchange(&[Send { peer: Rank(0), from: work }], &[]);
    let error = all_reduce_error(&[a, b, c]);
    assert_eq!(error, CheckError::Doubled { rank: Rank(0), step: 1, element: 0, twice: Rank(0) });
}

#[test]
fn length_mismatch_is_detected() {
    let mut schedules = schedules(named("halving_doubling::all_reduce"), 4, 41, Rank(0));
    schedules[1] = edited(&schedules[1], |step, parts| {
        if step == 0 {
            parts.sends[0].from.span.len -= 1;
        }
    });
    assert!(matches!(all_reduce_error(&schedules), CheckError::LengthMismatch { from: Rank(1), to: Rank(0), .. }));
}

#[test]
fn misplaced_ranges_are_detected_by_value() {
    // A partial value lands beside its own: other elements are combined.
    let mut wrong = schedules(named("binomial::reduce"), 2, 40, Rank(0));
    wrong[1] = edited(&wrong[1], |_, parts| parts.sends[0].from.span = Span { start: 1, len: 39 });
    wrong[0] = edited(&wrong[0], |_, parts| {
        let landing = &mut parts.recvs[0].landing;
        landing.to.span.len = 39;
        landing.with.iter_mut().for_each(|operand| operand.own.span.len = 39);
    });
    let error = check(Goal::Reduce { root: Rank(0) }, &wrong).unwrap_err();
    assert_eq!(error, CheckError::ElementMismatch { rank: Rank(0), step: 0, own: 0, other: 1 });
    // All ranks agree to gather another block than the finished one.
    let shift = |schedule: &Schedule| {
        edited(schedule, |step, parts| {
            if step >= 2 {
                let sent = parts.sends.iter_mut().map(|send| &mut send.from.span);
                for span in sent.chain(parts.recvs.iter_mut().map(|recv| &mut recv.landing.to.span)) {
                    span.start = (span.start + 10) % 30;
                }
            }
        })
    };
    let schedules: Vec<_> = rings(3, 30).iter().map(shift).collect();
    let error = all_reduce_error(&schedules);
    assert!(
        matches!(error, CheckError::WrongForm { held: Some(Buffer::Work), expected: Buffer::Output, .. }),
        "{error}"
    );
}

#[test]
fn misplaced_moves_are_detected() {
    let moving = ALGORITHMS.iter().filter(|algorithm| {
        matches!(
            algorithm.pattern,
            Pattern::AllGather | Pattern::Gather | Pattern::Scatter | Pattern::AllToAll | Pattern::Broadcast
        )
    });
    for algorithm in moving {
        for root in [Rank(0), Rank(2)] {
            let goal = Goal::of(algorithm.pattern, root);
            let good = schedules(algorithm, 5, 50, root);
            check(goal, &good).expect("proved");
            let mut found = 0;
            for rank in 0..5 {
                for step in 0..good[rank].len() {
                    let mut broken = good.clone();
                    let mut is_changed = false;
                    // One element too far to the left: the first one is missing, or another appears.
                    broken[rank] = edited(&good[rank], |at, parts| {
                        let landings = parts.recvs.iter_mut().map(|recv| &mut recv.landing.to);
                        let sent = parts.sends.iter_mut().map(|send| &mut send.from);
                        let moved = parts.locals.iter_mut().flat_map(|local| [&mut local.from, &mut local.landing.to]);
                        for region in landings.chain(sent).chain(moved) {
                            if at == step && region.span.start > 0 && region.span.len > 0 {
                                region.span.start -= 1;
                                is_changed = true;
                                break;
                            }
                        }
                    });
                    if is_changed {
                        let error = check(goal, &broken).expect_err("broken");
                        let is_named = matches!(
                            error,
                            CheckError::Misplaced { .. }
                                | CheckError::Unfinished { .. }
                                | CheckError::WrongForm { .. }
                                | CheckError::Overlap { .. }
                        );
                        assert!(is_named, "{algorithm:?} {rank} {step}: {error}");
                        found += 1;
                    }
                }
            }
            assert!(found > 0 || algorithm.pattern == Pattern::Broadcast, "{algorithm:?}");
        }
    }
}

#[test]
fn broadcast_from_wrong_root_is_detected() {
    let schedules = schedules(named("binomial::broadcast"), 4, 10, Rank(1));
    let error = check(Goal::Broadcast { root: Rank(0) }, &schedules).unwrap_err();
    assert_eq!(error, CheckError::NotOneCollective { index: 0 });
}

#[test]
fn result_at_wrong_rank_is_detected() {
    // Every rank stores its own block in its neighbour's place.
    let swap = |schedule: &Schedule| {
        edited(schedule, |step, parts| {
            if step == 0 {
                parts.locals[0].landing.to.span.start = (parts.locals[0].landing.to.span.start + 10) % 40;
            } else {
                let sent = parts.sends.iter_mut().map(|send| &mut send.from.span);
                for span in sent.chain(parts.recvs.iter_mut().map(|recv| &mut recv.landing.to.span)) {
                    span.start = (span.start + 10) % 40;
                }
            }
        })
    };
    let apart = |schedule: Schedule| {
        let mut apart = Schedule::moving(schedule.place(), Layout { in_place_at: None, ..*schedule.layout() });
        schedule.steps().for_each(|step| apart.push(step));
        apart
    };
    let schedules: Vec<_> = schedules(named("ring::all_gather"), 4, 40, Rank(0)).iter().map(swap).map(apart).collect();
    assert_eq!(check(Goal::AllGather, &schedules).unwrap_err(), CheckError::Misplaced { rank: Rank(0), element: 0 });
}

#[test]
fn cyclic_wait_is_a_deadlock() {
    // All ranks send first and receive afterwards: correct with buffering, a cycle without.
    let split = |schedule: &Schedule| {
        let mut result = Schedule::reducing(schedule.place(), *schedule.layout());
        schedule.steps().for_each(|step| {
            result.exchange(step.sends, &[]);
            result.exchange(&[], step.recvs);
        });
        result
    };
    let schedules: Vec<_> = rings(4, 40).iter().map(split).collect();
    assert_eq!(all_reduce_error(&schedules), CheckError::Deadlock { rank: Rank(0), step: 0, peer: Rank(1) });
}

#[test]
fn race_within_a_step_is_an_overlap() {
    for (name, goal) in [
        ("ring::all_reduce", Goal::AllReduce),
        ("ring::all_gather", Goal::AllGather),
        ("bruck::all_gather", Goal::AllGather),
        ("recursive_doubling::all_reduce", Goal::AllReduce),
    ] {
        let mut schedules = schedules(named(name), 8, 40, Rank(0));
        for schedule in &mut schedules {
            *schedule = edited(schedule, |_, parts| {
                if let ([send, ..], [recv, ..]) = (&parts.sends[..], &mut parts.recvs[..])
                    && send.from.buffer == recv.landing.to.buffer
                {
                    recv.landing.to.span.start = send.from.span.start;
                }
            });
        }
        assert!(matches!(check(goal, &schedules), Err(CheckError::Overlap { rank: Rank(0), .. })), "{name}");
    }
}

/// What is safe with separate buffers may not be in place: the checker examines the harder case.
#[test]
fn overlapping_buffers_are_checked() {
    // A plain all-to-all, declared to run in place: blocks arrive where others have not been sent yet.
    let mut schedules = schedules(named("pairwise::all_to_all"), 4, 40, Rank(0));
    check(Goal::AllToAll, &schedules).expect("right with two buffers");
    for schedule in &mut schedules {
        let mut shared = Schedule::moving(schedule.place(), Layout { in_place_at: Some(0), ..*schedule.layout() });
        schedule.steps().for_each(|step| shared.push(step));
        *schedule = shared;
    }
    let error = check(Goal::AllToAll, &schedules).unwrap_err();
    assert!(matches!(error, CheckError::Overlap { .. }), "{error}");
    // If no two blocks are in use at once, blocks sent later have been overwritten.
    let schedules = schedules.iter().map(|schedule| {
        let mut slow = Schedule::moving(schedule.place(), Layout { work: 10, ..*schedule.layout() });
        schedule.steps().for_each(|step| {
            let staged = Buffer::Work.at(Span::first(10));
            let recvs: Vec<_> =
                step.recvs.iter().map(|recv| Recv { landing: Landing::copy(staged), ..*recv }).collect();
            slow.push(Step { recvs: &recvs, ..step });
            let landed: Vec<_> = step.recvs.iter().map(|recv| Local::copy(staged, recv.landing.to)).collect();
            slow.move_locally(&landed);
        });
        slow
    });
    let schedules: Vec<_> = schedules.collect();
    let error = check(Goal::AllToAll, &schedules).unwrap_err();
    assert!(
        matches!(error, CheckError::WrongForm { held: Some(Buffer::Output), expected: Buffer::Input, .. }),
        "{error}"
    );
    // A buffer that exceeds the one it lies in.
    let out = Schedule::moving(place(0, 1), Layout { in_place_at: Some(1), ..*schedules[0].layout() });
    assert_eq!(well_formed(&out, &mut Counts::default()), Err(CheckError::Layout { rank: Rank(0) }));
}

#[test]
fn early_rounding_and_reduction_of_results_are_detected() {
    let early = |schedule: &Schedule| {
        edited(schedule, |step, parts| {
            if step == 0 {
                parts.recvs[0].landing.to.buffer = Buffer::Output;
            }
        })
    };
    let schedules: Vec<_> = rings(3, 30).iter().map(early).collect();
    let error = all_reduce_error(&schedules);
    assert!(matches!(error, CheckError::RoundedEarly { step: 0, contributions: 2, .. }), "{error}");

    let refine = |schedule: &Schedule| {
        edited(schedule, |step, parts| {
            if step == 2 {
                let landing = &mut parts.recvs[0].landing;
                landing.with = Some(Operand { own: Buffer::Input.at(landing.to.span), received: Side::Left });
            }
        })
    };
    let apart = |schedule: &Schedule| {
        let layout = Layout { in_place_at: None, work_in_output: false, ..*schedule.layout() };
        let mut apart = Schedule::reducing(schedule.place(), layout);
        schedule.steps().for_each(|step| apart.push(step));
        refine(&apart)
    };
    let schedules: Vec<_> = rings(3, 30).iter().map(apart).collect();
    let error = all_reduce_error(&schedules);
    assert!(matches!(error, CheckError::Doubled { .. } | CheckError::FinishedOperand { .. }), "{error}");
}

#[test]
fn differing_combination_orders_are_detected() {
    // Both ranks combine the other's contribution on the right: 0+1 here, 1+0 there.
    let mut schedules = schedules(named("recursive_doubling::all_reduce"), 2, 10, Rank(0));
    for schedule in &mut schedules {
        *schedule = edited(schedule, |_, parts| {
            for recv in &mut parts.recvs {
                recv.landing.with.iter_mut().for_each(|operand| operand.received = Side::Right);
            }
        });
    }
    let error = all_reduce_error(&schedules);
    assert_eq!(error, CheckError::Differs { rank: Rank(1), element: 0, other: Rank(0) });
}

#[test]
fn malformed_schedules_are_refused() {
    let mut schedules = rings(3, 30);
    schedules.swap(0, 1);
    assert_eq!(all_reduce_error(&schedules), CheckError::NotOneCollective { index: 0 });
    assert_eq!(check(Goal::AllGather, &rings(3, 30)).unwrap_err(), CheckError::NotOneCollective { index: 0 });

    let broken = |rank: usize, edit: &dyn Fn(&mut StepBuffer)| {
        let mut schedules = rings(3, 30);
        schedules[rank] = edited(&schedules[rank], |_, parts| edit(parts));
        all_reduce_error(&schedules)
    };
    assert!(matches!(broken(1, &|parts| parts.sends[0].peer = Rank(1)), CheckError::BadPeer { peer: Rank(1), .. }));
    assert!(matches!(broken(1, &|parts| parts.sends[0].peer = Rank(3)), CheckError::BadPeer { peer: Rank(3), .. }));
    let error = broken(2, &|parts| parts.sends[0].from.span.len = 31);
    assert!(matches!(error, CheckError::OutOfBounds { rank: Rank(2), len: 30, .. }), "{error}");
    let error = broken(2, &|parts| parts.recvs[0].landing.to.span.len = 9);
    assert!(matches!(error, CheckError::BadOperand { rank: Rank(2), step: 0 }), "{error}");
    let error = broken(2, &|parts| parts.recvs[0].landing.to.buffer = Buffer::Input);
    assert!(matches!(error, CheckError::WritesInput { rank: Rank(2), step: 0 }), "{error}");
    let error = broken(2, &|parts| parts.recvs[0].sent_from = Buffer::Output);
    assert!(matches!(error, CheckError::FormMismatch { to: Rank(2), .. }), "{error}");
}

proptest! {
    /// Removing any single end of a message from a correct schedule is detected.
    #[test]
    fn removing_any_message_is_detected(
        ranks in 2_u32..10,
        algorithm in 0..ALGORITHMS.len(),
        rank in any::<prop::sample::Index>(),
        step in any::<prop::sample::Index>(),
        send in any::<bool>(),
    ) {
        let algorithm = &ALGORITHMS[algorithm];
        let mut schedules = schedules(algorithm, ranks, 100, Rank(ranks - 1));
        let rank = rank.index(schedules.len());
        let step = step.index(schedules[rank].len());
        let before = schedules[rank].clone();
        schedules[rank] = edited(&before, |at, parts| {
            if at == step {
                if send { parts.sends.clear() } else { parts.recvs.clear() }
            }
        });
        prop_assume!(schedules[rank] != before);
        prop_assert!(check(Goal::of(algorithm.pattern, Rank(ranks - 1)), &schedules).is_err());
    }

    /// So is removing any local move, unless it stays where it is.
    #[test]
    fn removing_any_local_move_is_detected(
        ranks in 1_u32..10,
        algorithm in 0..ALGORITHMS.len(),
        rank in any::<prop::sample::Index>(),
        nth in any::<prop::sample::Index>(),
    ) {
        let algorithm = &ALGORITHMS[algorithm];
        let mut schedules = schedules(algorithm, ranks, 100, Rank(0));
        let rank = rank.index(schedules.len());
        let locals = schedules[rank].steps().map(|step| step.locals.len()).sum::<usize>();
        prop_assume!(locals > 0);
        let mut left = nth.index(locals) as isize;
        schedules[rank] = edited(&schedules[rank], |_, parts| {
            let len = parts.locals.len() as isize;
            if (0..len).contains(&left) {
                parts.locals.remove(left as usize);
            }
            left -= len;
        });
        prop_assert!(check(Goal::of(algorithm.pattern, Rank(0)), &schedules).is_err());
    }
}
