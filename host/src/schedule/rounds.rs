//! The messages of a collective in the order of time, to print and to draw them.
//!
//! A rank enters a step when the one before is done, and a message takes place once both of its ranks have entered the
//! steps that have it. All messages that can take place do so in one round. Invariant: of a schedule that [`check`]
//! accepts every message takes place, and there are as many rounds as the longest chain of dependent messages has.
//!
//! [`check`]: super::check

use super::{Buffer, Recv, Schedule, Send, Span, StepBuffer};
use sumac_hal::ids::Rank;

/// A message of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// The number of elements.
    pub elements: usize,
    /// Which of the collective's elements they are; `None` if they lie in other places of partial values.
    pub part: Option<Span>,
    /// Whether the receiver combines them with elements that it has.
    pub combines: bool,
}

/// Where a rank stands: its step, if it has come to one with messages, and which of them have taken place.
#[derive(Default)]
struct Progress {
    index: usize,
    step: StepBuffer,
    sent: Vec<bool>,
    received: Vec<bool>,
}

impl Progress {
    /// Enter the first step from the present index on that has messages.
    fn enter(&mut self, schedule: &Schedule) {
        while schedule.read(self.index, &mut self.step) && !self.step.step().has_messages() {
            self.index += 1;
        }
        self.sent.clear();
        self.sent.resize(self.step.sends.len(), false);
        self.received.clear();
        self.received.resize(self.step.recvs.len(), false);
    }

    fn is_step_done(&self) -> bool {
        self.sent.iter().chain(&self.received).all(|done| *done)
    }

    /// Return which receive of the step takes the next message from a rank, if one does.
    fn awaits(&self, rank: usize) -> Option<usize> {
        let recvs = &self.step.recvs;
        (0..recvs.len()).find(|slot| !self.received[*slot] && recvs[*slot].peer.0 as usize == rank)
    }
}

/// Return the messages of `count` elements' schedules, one for each rank in order, round by round. `None`: a message is
/// never received, so they are not the schedules of one collective.
pub fn rounds(schedules: &[Schedule], count: usize) -> Option<Vec<Vec<Message>>> {
    let mut progress: Vec<_> = schedules.iter().map(|_| Progress::default()).collect();
    progress.iter_mut().zip(schedules).for_each(|(at, schedule)| at.enter(schedule));
    let mut rounds = Vec::new();
    while progress.iter().zip(schedules).any(|(at, schedule)| at.index < schedule.len()) {
        let mut round = Vec::new();
        for (rank, schedule) in schedules.iter().enumerate() {
            for slot in 0..progress[rank].step.sends.len() {
                let send = progress[rank].step.sends[slot];
                let peer = send.peer.0 as usize;
                let awaited = progress.get(peer).and_then(|peer| peer.awaits(rank));
                let Some(at) = awaited.filter(|_| !progress[rank].sent[slot]) else { continue };
                (progress[rank].sent[slot], progress[peer].received[at]) = (true, true);
                round.push(message((schedule, &send), (&schedules[peer], &progress[peer].step.recvs[at]), count));
            }
        }
        if round.is_empty() {
            return None;
        }
        for (at, schedule) in progress.iter_mut().zip(schedules).filter(|(at, _)| at.is_step_done()) {
            at.index += 1;
            at.enter(schedule);
        }
        rounds.push(round);
    }
    Some(rounds)
}

fn message((sender, send): (&Schedule, &Send), (receiver, recv): (&Schedule, &Recv), count: usize) -> Message {
    let landing = &recv.landing;
    let is_whole = |buffer: Buffer, schedule: &Schedule| match buffer {
        Buffer::Input | Buffer::Output => schedule.layout().len(buffer) == count,
        Buffer::Work => schedule.layout().work_in_output,
    };
    let candidates =
        [landing.with.map(|operand| (operand.own, receiver)), Some((landing.to, receiver)), Some((send.from, sender))];
    let found = candidates.into_iter().flatten().find(|(region, schedule)| is_whole(region.buffer, schedule));
    Message {
        from: sender.place().rank(),
        to: receiver.place().rank(),
        elements: send.from.span.len,
        part: found.map(|(region, _)| region.span),
        combines: landing.with.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::tree::Tree;
    use crate::schedule::{ALGORITHMS, Algorithm, Place, Problem, Shape, ring};
    use sumac_hal::ctrl::Order;

    fn schedules(algorithm: &Algorithm, ranks: u32, count: usize) -> Vec<Schedule> {
        let tree = Tree::flat(ranks, Order::TreeFold).expect("a tree");
        let problem = |place| Problem { place, count, root: Rank(0), tree: &tree, shape: Shape::Line };
        Place::all(ranks).map(|place| (algorithm.schedule)(&problem(place))).collect()
    }

    #[test]
    fn ring_passes_blocks_on_and_adds_to_them_in_the_first_half() {
        let schedules: Vec<_> = Place::all(3).map(|place| ring::all_reduce(place, 6)).collect();
        let rounds = rounds(&schedules, 6).expect("one collective");
        assert_eq!(rounds.len(), 4);
        let of_rank_0: Vec<_> = rounds.iter().map(|round| round[0]).collect();
        for (message, (block, combines)) in of_rank_0.iter().zip([(0, true), (2, true), (1, false), (0, false)]) {
            let part = Some(Span { start: 2 * block, len: 2 });
            assert_eq!(*message, Message { from: Rank(0), to: Rank(1), elements: 2, part, combines });
        }
    }

    /// The checker counts the same.
    #[test]
    fn every_algorithm_has_as_many_rounds_as_its_cost_has_steps() {
        for algorithm in ALGORITHMS {
            for ranks in [1, 2, 3, 4, 7, 8] {
                let cost = algorithm.cost(ranks, Shape::Line, 840);
                let rounds = rounds(&schedules(algorithm, ranks, 840), 840).expect("one collective");
                let (found, expected) = (rounds.len() as f64, cost.steps);
                let is_as_expected = if cost.is_bound { found <= expected } else { found == expected };
                assert!(is_as_expected, "{algorithm:?} of {ranks} ranks: {found} rounds, {expected} steps");
                let sent = |rank| rounds.iter().flatten().filter(move |message| message.from.0 == rank);
                let busiest = (0..ranks).map(|rank| sent(rank).map(|message| message.elements).sum::<usize>()).max();
                assert!(busiest.unwrap_or(0) as f64 <= cost.sent_elements + 1e-6, "{algorithm:?} of {ranks} ranks");
            }
        }
    }

    #[test]
    fn schedules_that_do_not_match_are_no_collective() {
        let mut schedules: Vec<_> = Place::all(3).map(|place| ring::all_reduce(place, 6)).collect();
        schedules[1] = ring::all_gather(schedules[1].place(), 6);
        assert_eq!(rounds(&schedules, 6), None);
    }
}
