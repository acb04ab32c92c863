//! `hybrid` proved: its parts between ranks, around an all-reduce of each block among its rail.

use super::*;
use crate::schedule::{Place, Recv, Region, Send, Side, Step, hybrid};

/// The three parts of a rank as one schedule. In place of its tree, the rail's first rank collects the blocks in the
/// order of servers and distributes the result: what the tree does in the network.
///
/// The checker holds that a value is finished only with every contribution included. The parts run one by one, so a
/// server's sum is finished where it is a partial value of the whole: here it is in `Work`, which has the same place.
fn whole(place: Place, count: usize, [servers, each]: [u32; 2]) -> Schedule {
    let scatter = hybrid::reduce_scatter_inside(place, count, each);
    let gather = hybrid::all_gather_inside(place, count, each);
    let mut all = Schedule::reducing(place, *scatter.layout());
    scatter.steps().for_each(|step| {
        let mut recvs = step.recvs.to_vec();
        for recv in recvs.iter_mut().filter(|recv| recv.landing.to.buffer == Buffer::Output) {
            recv.landing.to.buffer = Buffer::Work;
        }
        all.push(Step { recvs: &recvs, ..step });
    });
    let block = hybrid::block_of(place, count, each);
    let (work, output) = (Buffer::Work.at(block), Buffer::Output.at(block));
    let first = Rank(place.rank().0 % each);
    let ranks = (0..servers).map(|server| Rank(server * each + first.0));
    all_reduce_by_first(&mut all, &ranks.collect::<Vec<_>>(), work, output);
    gather.steps().for_each(|step| all.push(step));
    all
}

/// Append what the tree of a rail does in the network: the first of its ranks collects partial values in their order,
/// and distributes the result.
pub(super) fn all_reduce_by_first(all: &mut Schedule, rail: &[Rank], work: Region, output: Region) {
    let (first, others) = rail.split_first().expect("ranks");
    if all.place().rank() != *first {
        all.exchange(&[Send { peer: *first, from: work }], &[]);
        let landing = Landing::copy(output);
        all.exchange(&[], &[Recv { peer: *first, sent_from: Buffer::Output, landing }]);
        return;
    }
    for (nth, &peer) in others.iter().enumerate() {
        let to = if nth + 1 == others.len() { output } else { work };
        let landing = Landing::combine(work, Side::Left, to);
        all.exchange(&[], &[Recv { peer, sent_from: Buffer::Work, landing }]);
    }
    let sends: Vec<Send> = others.iter().map(|&peer| Send { peer, from: output }).collect();
    all.exchange(&sends, &[]);
}

fn schedules(ranks: u32, servers: [u32; 2], count: usize) -> Vec<Schedule> {
    Place::all(ranks).map(|place| whole(place, count, servers)).collect()
}

pub(super) fn goal() -> Goal<'static> {
    Goal::of(Pattern::AllReduce, Rank(0))
}

#[test]
fn parts_around_any_all_reduce_of_the_rails_are_an_all_reduce_for_up_to_64_ranks() {
    let mut proved = 0;
    for ranks in 4..=64_u32 {
        for each in (2..=ranks / 2).filter(|&each| ranks.is_multiple_of(each)) {
            let (servers, p) = ([ranks / each, each], ranks as usize);
            assert_eq!(hybrid::servers(format!("servers:{each}").parse().expect("a shape"), ranks), Some(servers));
            for count in [0, 1, each as usize - 1, p, 7 * p + 3, 24 * p] {
                check(goal(), &schedules(ranks, servers, count))
                    .unwrap_or_else(|error| panic!("{servers:?}, {count} elements: {error}"));
                proved += 1;
            }
        }
    }
    assert!(proved > 600, "{proved}");
}

/// The closed form of the part inside servers: m-1 messages of a block each way, and no memory beside the result.
#[test]
fn parts_inside_servers_send_a_block_in_each_of_their_steps() {
    for (servers, each) in [(2, 2), (3, 4), (4, 8)] {
        let (ranks, count) = (servers * each, 240 * each as usize);
        for place in Place::all(ranks) {
            let parts = [hybrid::reduce_scatter_inside, hybrid::all_gather_inside].map(|part| part(place, count, each));
            for part in &parts {
                assert_eq!((part.len() as u32, part.messages() as u32), (each - 1, 2 * (each - 1)));
                assert_eq!(part.sent_bytes(1, 1), u64::from(each - 1) * 240);
                let is_inside = |peer: Rank| peer.0 / each == place.rank().0 / each && peer != place.rank();
                let peers = part.steps().map(|step| {
                    let recvs = step.recvs.iter().map(|recv| recv.peer);
                    step.sends.iter().map(|send| send.peer).chain(recvs).collect::<Vec<_>>()
                });
                assert!(peers.flatten().all(is_inside), "{place:?}");
            }
            assert_eq!(*parts[0].layout(), Layout::all_reduce(count));
            assert_eq!(parts[1].layout().work, 0);
        }
    }
}

#[test]
fn planted_mistakes_in_the_parts_are_found() {
    for (servers, count) in [([2, 3], 600), ([3, 2], 600), ([2, 2], 400)] {
        let good = schedules(servers[0] * servers[1], servers, count);
        planted::assert_mistakes_are_found(named("hierarchical_ring::all_reduce"), goal(), &good);
    }
}

#[test]
fn shape_without_several_servers_of_several_ranks_has_no_rails() {
    for (shape, ranks) in [("line", 6), ("servers:6", 6), ("servers:1", 6), ("6x1", 6), ("servers:4", 6), ("2x4", 6)] {
        assert_eq!(hybrid::servers(shape.parse().expect("a shape"), ranks), None, "{shape}");
    }
    assert_eq!(hybrid::servers("2x3x4".parse().expect("a shape"), 24), Some([6, 4]));
}
