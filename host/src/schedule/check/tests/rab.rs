//! `rab` proved: its parts between ranks, around an all-reduce among the leaders.

use super::hybrid::{all_reduce_by_first, goal};
use super::*;
use crate::schedule::{Place, Region, Step, rab};
use std::collections::BTreeSet;

/// The three parts of a rank as one schedule. In place of the tree of its rail, which reduces a block, the first rank
/// of the rail collects in the order of servers and distributes the result: what the tree does in the network.
///
/// The checker holds that a value is finished only with every contribution included. The parts run one by one, so a
/// server's sum is finished where it is a partial value of the whole: here it is in `Work`, behind what else is there.
pub(super) fn around_rail(place: Place, [reduce, broadcast]: [Schedule; 2], rail: Option<(&[Rank], Span)>) -> Schedule {
    let (layout, count) = (*reduce.layout(), reduce.layout().output);
    let sum = |span: Span| Buffer::Work.at(Span { start: layout.work + span.start, ..span });
    let unfinished = |region: &mut Region| {
        if region.buffer == Buffer::Output {
            *region = sum(region.span);
        }
    };
    let mut all = Schedule::reducing(place, Layout { work: layout.work + count, work_in_output: false, ..layout });
    reduce.steps().for_each(|step| {
        let (mut recvs, mut locals) = (step.recvs.to_vec(), step.locals.to_vec());
        recvs.iter_mut().for_each(|recv| unfinished(&mut recv.landing.to));
        locals.iter_mut().for_each(|local| unfinished(&mut local.landing.to));
        all.push(Step { recvs: &recvs, locals: &locals, ..step });
    });
    if let Some((rail, block)) = rail {
        all_reduce_by_first(&mut all, rail, sum(block), Buffer::Output.at(block));
    }
    broadcast.steps().for_each(|step| all.push(step));
    all
}

fn whole(place: Place, count: usize, [servers, each]: [u32; 2]) -> Schedule {
    let parts = [rab::reduce_inside, rab::broadcast_inside].map(|part| part(place, count, each));
    let leaders: Vec<_> = (0..servers).map(|server| Rank(server * each)).collect();
    let rail = rab::is_leader(place.rank(), each).then_some((&leaders[..], Span::first(count)));
    around_rail(place, parts, rail)
}

fn schedules(ranks: u32, servers: [u32; 2], count: usize) -> Vec<Schedule> {
    Place::all(ranks).map(|place| whole(place, count, servers)).collect()
}

#[test]
fn parts_around_any_all_reduce_of_leaders_are_an_all_reduce_for_up_to_64_ranks() {
    let mut proved = 0;
    for ranks in 4..=64_u32 {
        for each in (2..=ranks / 2).filter(|&each| ranks.is_multiple_of(each)) {
            for count in [0, 1, 1000, 200_000] {
                check(goal(), &schedules(ranks, [ranks / each, each], count))
                    .unwrap_or_else(|error| panic!("servers of {each} of {ranks}, {count} elements: {error}"));
                proved += 1;
            }
        }
    }
    assert!(proved > 400, "{proved}");
}

#[test]
fn parts_inside_servers_take_the_algorithm_that_is_cheapest_for_the_count() {
    let names = |part: fn(usize, u32) -> &'static str| {
        let of = |each: u32| [1, 200_000, 20_000_000].map(|count| part(count, each));
        (2..=64).flat_map(of).collect::<BTreeSet<_>>()
    };
    assert_eq!(
        names(rab::reduction).into_iter().collect::<Vec<_>>(),
        ["binomial::reduce", "chain::reduce", "double_tree::reduce"]
    );
    assert_eq!(names(rab::broadcast).len(), 3);
    assert_eq!([rab::reduction(2, 4), rab::broadcast(2, 4)], ["binomial::reduce", "binomial::broadcast"]);
    assert_eq!(
        [rab::reduction(20_000_000, 3), rab::reduction(20_000_000, 8)],
        ["chain::reduce", "double_tree::reduce"]
    );
}

#[test]
fn parts_have_messages_inside_servers_alone() {
    for (servers, each, count) in [(2, 2, 1), (3, 4, 1000), (2, 8, 1 << 20), (2, 17, 1 << 20)] {
        for place in Place::all(servers * each) {
            let parts = [rab::reduce_inside, rab::broadcast_inside].map(|part| part(place, count, each));
            let is_inside = |peer: Rank| peer.0 / each == place.rank().0 / each && peer != place.rank();
            for part in &parts {
                let peers = part.steps().map(|step| {
                    let recvs = step.recvs.iter().map(|recv| recv.peer);
                    step.sends.iter().map(|send| send.peer).chain(recvs).collect::<Vec<_>>()
                });
                assert!(peers.flatten().all(is_inside), "{place:?}");
                assert_eq!((part.layout().input, part.layout().output), (count, count));
                assert_eq!(part.layout().in_place_at, Some(0));
            }
            // What a leader broadcasts is what it got from the others, not what it contributed.
            let reads_input = |step: Step<'_>| {
                let locals = step.locals.iter().map(|local| local.from.buffer);
                step.sends.iter().map(|send| send.from.buffer).chain(locals).any(|buffer| buffer == Buffer::Input)
            };
            assert!(!parts[1].steps().map(reads_input).any(|reads| reads), "{place:?}");
        }
    }
}

#[test]
fn planted_mistakes_in_the_parts_of_rab_are_found() {
    for (servers, count) in [([2, 3], 600), ([3, 2], 600), ([2, 4], 400_000)] {
        let good = schedules(servers[0] * servers[1], servers, count);
        planted::assert_mistakes_are_found(named("binomial::all_reduce"), goal(), &good);
    }
}
