//! The all-to-all of blocks of any length through relays proved: its counts, and its elements.

use super::shapes::{factorisations, grid};
use super::*;
use crate::schedule::hierarchical_pairwise::relayed::{all_to_all_v, counts_between, counts_inside, servers};
use crate::schedule::pairwise::CountsError;

/// Counts from each rank to each, at `a * ranks + b`: some are zero, and one rank may send everything to one index.
fn counts_of(ranks: usize, salt: usize) -> Vec<usize> {
    let count = |pair: usize| match salt {
        0 => 0,
        3 => 9 * usize::from(pair / ranks == 1 && pair % ranks < 2),
        _ => (pair * 7919 + salt * 31) % 5 * salt,
    };
    (0..ranks * ranks).map(count).collect()
}

/// What the ranks of `place`'s server send to each rank of its index, as [`counts_inside`] tells it.
fn relayed(counts: &[usize], place: Place, [servers, each]: [u32; 2]) -> Vec<usize> {
    let (ranks, own) = (place.ranks() as usize, place.rank().0);
    let through = |server: u32, from: u32| {
        let (a, b) = (own / each * each + from, server * each + own % each);
        counts[a as usize * ranks + b as usize]
    };
    (0..servers).flat_map(|server| (0..each).map(move |from| (server, from))).map(|(s, f)| through(s, f)).collect()
}

fn schedules(counts: &[usize], ranks: u32, shape: Shape) -> Vec<Schedule> {
    let of = servers(shape, ranks).expect("servers");
    let part = |place: Place| {
        let (own, p) = (place.rank().0 as usize, ranks as usize);
        let recvs: Vec<usize> = counts.iter().skip(own).step_by(p).copied().collect();
        let relayed = relayed(counts, place, of);
        all_to_all_v(place, shape, [&counts[own * p..][..p], &recvs, &relayed]).expect("consistent")
    };
    Place::all(ranks).map(part).collect()
}

/// Every shape with servers, of so many ranks at most.
fn shapes(most: u32) -> impl Iterator<Item = (u32, Shape)> {
    let shapes = (1..=most).flat_map(|ranks| factorisations(ranks).into_iter().map(move |dims| (ranks, grid(&dims))));
    shapes.filter(|&(ranks, shape)| servers(shape, ranks).is_some())
}

#[test]
fn blocks_of_any_length_arrive_in_every_shape() {
    for (ranks, shape) in shapes(24) {
        for salt in 0..4 {
            let counts = counts_of(ranks as usize, salt);
            let schedules = schedules(&counts, ranks, shape);
            let report = check(Goal::AllToAllV { counts: &counts }, &schedules);
            let report = report.unwrap_or_else(|error| panic!("{shape} x {salt}: {error}"));
            let [servers, _] = servers(shape, ranks).expect("servers");
            assert!(report.steps <= servers as usize, "{shape}: {} steps", report.steps);
        }
    }
}

#[test]
fn message_goes_to_each_other_server_and_not_to_each_of_its_ranks() {
    for (ranks, shape) in shapes(24) {
        let [servers, each] = servers(shape, ranks).expect("servers");
        let schedules = schedules(&vec![3; (ranks * ranks) as usize], ranks, shape);
        let mut step = StepBuffer::default();
        for schedule in &schedules {
            let server = |rank: Rank| rank.0 / each;
            let between = (0..schedule.len()).map(|index| {
                assert!(schedule.read(index, &mut step));
                step.sends.iter().filter(|send| server(send.peer) != server(schedule.place().rank())).count() as u32
            });
            assert_eq!(between.sum::<u32>(), servers - 1, "{shape}");
        }
    }
}

#[test]
fn counts_reach_the_relay_and_the_receiver() {
    for (ranks, shape) in shapes(24) {
        let [servers, each] = servers(shape, ranks).expect("servers");
        for width in [1, 2, 8] {
            let among = |is_pair: &dyn Fn(u32, u32) -> bool, len: usize| -> Vec<usize> {
                let pairs = (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b)));
                pairs.map(|(a, b)| len * usize::from(is_pair(a, b))).collect()
            };
            let inside: Vec<_> = Place::all(ranks).map(|place| counts_inside(place, width, shape)).collect();
            let of_server = among(&|a, b| a / each == b / each, servers as usize * width);
            let report = check(Goal::AllToAllV { counts: &of_server }, &inside).expect("proved");
            assert_eq!((report.steps, report.messages), (1, u64::from(ranks * (each - 1))), "{shape}");
            let between: Vec<_> = Place::all(ranks).map(|place| counts_between(place, width, shape)).collect();
            let of_index = among(&|a, b| a % each == b % each, each as usize * width);
            let report = check(Goal::AllToAllV { counts: &of_index }, &between).expect("proved");
            assert_eq!((report.steps, report.messages), (1, u64::from(ranks * (servers - 1))), "{shape}");
        }
    }
}

#[test]
fn planted_mistakes_are_found_in_blocks_of_any_length() {
    for extents in [&[2, 3][..], &[3, 3], &[4, 2], &[2, 2, 2]] {
        let ranks = extents.iter().product();
        let counts: Vec<usize> = (0..ranks * ranks).map(|pair| 1 + pair as usize * 7919 % 5).collect();
        let good = schedules(&counts, ranks, grid(extents));
        let algorithm = named("hierarchical_pairwise::all_to_all");
        planted::assert_mistakes_are_found(algorithm, Goal::AllToAllV { counts: &counts }, &good);
    }
}

#[test]
fn contradicting_counts_are_refused() {
    let (place, shape) = (Place::new(Rank(1), 4).expect("inside"), grid(&[2, 2]));
    let refused = |counts: [&[usize]; 3]| all_to_all_v(place, shape, counts).expect_err("contradictory");
    let four: &[usize] = &[1, 2, 3, 4];
    assert_eq!(refused([&[1], four, four]), CountsError::Ranks { sends: 1, recvs: 4, ranks: 4 });
    assert_eq!(refused([four, four, &[1]]), CountsError::Blocks { counts: 1, ranks: 4 });
    assert_eq!(refused([four, &[1; 4], four]), CountsError::Own { rank: Rank(1), send: 2, recv: 1 });
    assert_eq!(refused([four, four, &[0, 0, usize::MAX, 1]]), CountsError::Overflow { rank: Rank(1) });
}
