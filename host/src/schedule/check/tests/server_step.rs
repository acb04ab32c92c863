//! The parts of one step proved, around an all-reduce of the leaders or of each rail.

use super::hybrid::goal;
use super::rab::around_rail;
use super::*;
use crate::schedule::server_step::{ServerStep, all_gather, broadcast, reduce, reduce_scatter};
use crate::schedule::{Place, StepBuffer, hybrid, rab};
use sumac_hal::op::Collective;

fn by_leaders(place: Place, count: usize, [servers, each]: [u32; 2]) -> Schedule {
    let leaders: Vec<_> = (0..servers).map(|server| Rank(server * each)).collect();
    let rail = rab::is_leader(place.rank(), each).then_some((&leaders[..], Span::first(count)));
    around_rail(place, [reduce, broadcast].map(|part| part(place, count, each)), rail)
}

fn by_rails(place: Place, count: usize, [servers, each]: [u32; 2]) -> Schedule {
    let rail: Vec<_> = (0..servers).map(|server| Rank(server * each + place.rank().0 % each)).collect();
    let block = hybrid::block_of(place, count, each);
    around_rail(place, [reduce_scatter, all_gather].map(|part| part(place, count, each)), Some((&rail, block)))
}

type Whole = fn(Place, usize, [u32; 2]) -> Schedule;

fn schedules(whole: Whole, ranks: u32, servers: [u32; 2], count: usize) -> Vec<Schedule> {
    Place::all(ranks).map(|place| whole(place, count, servers)).collect()
}

#[test]
fn parts_of_one_step_around_any_all_reduce_are_an_all_reduce_for_up_to_64_ranks() {
    let mut proved = 0;
    for ranks in 4..=64_u32 {
        for each in (2..=ranks / 2).filter(|&each| ranks.is_multiple_of(each)) {
            for (whole, name) in [(by_leaders as Whole, "rab"), (by_rails, "hybrid")] {
                for count in [0, 1, each as usize - 1, 7 * each as usize + 3, 1000] {
                    check(goal(), &schedules(whole, ranks, [ranks / each, each], count))
                        .unwrap_or_else(|error| panic!("{name}: servers of {each} of {ranks}, {count}: {error}"));
                    proved += 1;
                }
            }
        }
    }
    assert!(proved > 1000, "{proved}");
}

#[test]
fn planted_mistakes_in_the_parts_of_one_step_are_found() {
    for (servers, count) in [([2, 3], 600), ([3, 2], 600), ([2, 4], 400)] {
        for (whole, like) in
            [(by_leaders as Whole, "binomial::all_reduce"), (by_rails, "hierarchical_ring::all_reduce")]
        {
            let good = schedules(whole, servers[0] * servers[1], servers, count);
            planted::assert_mistakes_are_found(named(like), goal(), &good);
        }
    }
}

/// Ranks agree on a board by what they hear in such a step, and post in it once.
#[test]
fn parts_of_one_step_join_each_rank_with_those_of_its_server_for_any_count() {
    let parts = [
        (reduce as fn(Place, usize, u32) -> Schedule, Collective::Reduce),
        (broadcast, Collective::Broadcast),
        (reduce_scatter, Collective::ReduceScatter),
        (all_gather, Collective::AllGather),
    ];
    for ((part, collective), count) in parts.into_iter().flat_map(|part| [0, 1, 9, 1000].map(|count| (part, count))) {
        for (servers, each) in [(2, 2), (3, 4), (2, 8)] {
            for place in Place::all(servers * each) {
                let schedule = part(place, count, each);
                assert_eq!(schedule.server_step(), Some(ServerStep { collective, each }));
                assert_eq!(schedule.clone().stored().server_step(), schedule.server_step());
                let mut first = StepBuffer::default();
                assert!(schedule.read(0, &mut first) && first.locals.is_empty());
                let later = schedule.steps().map(|step| step.has_messages()).skip(1).any(|has_messages| has_messages);
                assert!(!later, "{collective}: messages in one step");
                let (leader, own) = (Rank(place.rank().0 / each * each), place.rank());
                let server: Vec<Rank> = (leader.0..leader.0 + each).map(Rank).filter(|peer| *peer != own).collect();
                let (sends, recvs): (&[Rank], &[Rank]) = match (collective, own == leader) {
                    (Collective::Reduce, true) | (Collective::Broadcast, false) => (&[], &server),
                    (Collective::Reduce, false) | (Collective::Broadcast, true) => (&server, &[]),
                    _ => (&server, &server),
                };
                let is_leaders = matches!(collective, Collective::Reduce | Collective::Broadcast) && own != leader;
                let expected =
                    |peers: &[Rank]| if is_leaders && !peers.is_empty() { vec![leader] } else { peers.to_vec() };
                let sorted = |mut peers: Vec<Rank>| {
                    peers.sort_unstable();
                    peers
                };
                assert_eq!(sorted(first.sends.iter().map(|send| send.peer).collect()), expected(sends));
                assert_eq!(sorted(first.recvs.iter().map(|recv| recv.peer).collect()), expected(recvs));
            }
        }
    }
}
