//! The steps of a line of ranks that reduce-scatters or all-gathers what its ranks have ([`super::dimensions`]).
//!
//! The blocks of a line of d ranks are numbered by their place there. Each form sends d(d-1) blocks in all.
//!
//! | form | steps, of at most | links | a link carries |
//! |---|---|---|---|
//! | [`Form::Ring`] | d-1, a block | to the next rank, around the end | d-1 blocks |
//! | [`Form::Mesh`] | d-1, a block in each direction | to both neighbours, none around the end | at most d-1 blocks |
//! | [`Form::FullMesh`] | 1, of d-1 blocks | to each other rank | a block |

use super::dimensions::SubStep;
use super::{Buffer, Landing, Local, Recv, Region, Send, Side, Span};
use sumac_hal::ids::Rank;

/// How the ranks of a line exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Round the ring, as [`super::ring`] does.
    Ring,
    /// Between neighbours in both directions, without a link around the end. A block's contributions from below and
    /// from above meet at its rank in the last step, so that they are combined in rank order.
    Mesh,
    /// Each with all others at once.
    FullMesh,
}

/// The line of ranks that differ from `rank` in one dimension alone.
#[derive(Debug, Clone, Copy)]
pub(super) struct Line {
    pub(super) form: Form,
    /// The number of ranks, at least 2.
    pub(super) len: u32,
    /// The place of `rank`.
    pub(super) own: u32,
    /// The distance between neighbours, in ranks.
    pub(super) stride: u32,
    pub(super) rank: Rank,
}

/// The pieces of a block.
type Blocks<'a> = &'a dyn Fn(u32) -> Vec<Span>;

/// Where what a rank gets of its own block goes.
#[derive(Clone, Copy)]
pub(super) struct Targets<'a> {
    /// The reduction of a piece.
    pub(super) finish: &'a dyn Fn(Span) -> Region,
    /// Another rank's contribution: a slot, and the index of a piece in it.
    pub(super) slot: &'a dyn Fn(u32, usize) -> Region,
}

impl Line {
    /// How many further copies of its block this rank holds for a time.
    pub(super) const fn slots(&self) -> u32 {
        match self.form {
            Form::Ring => 0,
            Form::Mesh => (0 < self.own && self.own + 1 < self.len) as u32,
            Form::FullMesh => self.len - 1,
        }
    }

    /// Append the steps of a reduce-scatter of what is in `source`. Partial values are at their place in `Work`, and
    /// those of this rank's block go to `targets`.
    pub(super) fn reduce_scatter(
        &self,
        source: Buffer,
        blocks: Blocks<'_>,
        targets: Targets<'_>,
        steps: &mut Vec<SubStep>,
    ) {
        match self.form {
            Form::Ring => self.push_ring_reduce_scatter(source, blocks, targets, steps),
            Form::Mesh => self.push_mesh_reduce_scatter(source, blocks, targets, steps),
            Form::FullMesh => self.push_full_mesh_reduce_scatter(source, blocks, targets, steps),
        }
    }

    fn push_ring_reduce_scatter(
        &self,
        source: Buffer,
        blocks: Blocks<'_>,
        Targets { finish, .. }: Targets<'_>,
        steps: &mut Vec<SubStep>,
    ) {
        for s in 0..self.len - 1 {
            let from = if s == 0 { source } else { Buffer::Work };
            let to = |piece| if s + 2 == self.len { finish(piece) } else { Buffer::Work.at(piece) };
            let mut step = SubStep::default();
            step.send(self.rank_at(self.before(self.len - 1)), from, &blocks(self.before(s + 1)));
            let landing = |piece| Landing::combine(source.at(piece), Side::Left, to(piece));
            step.receive(self.rank_at(self.before(1)), from, &blocks(self.before(s + 2)), &landing);
            steps.push(step);
        }
    }

    /// Contributions to block b rise from place 0 and descend from place d-1, farthest block first, and meet at b.
    fn push_mesh_reduce_scatter(
        &self,
        source: Buffer,
        blocks: Blocks<'_>,
        Targets { finish, slot }: Targets<'_>,
        steps: &mut Vec<SubStep>,
    ) {
        let (own, last) = (self.own, self.len - 1);
        let form_at = |place: u32, first: u32| if place == first { source } else { Buffer::Work };
        let meets = 0 < own && own < last;
        for s in 0..last {
            let mut step = SubStep::default();
            if own < last && s >= own {
                step.send(self.rank_at(own + 1), form_at(own, 0), &blocks(last + own - s));
            }
            if own > 0 && s + own >= last {
                step.send(self.rank_at(own - 1), form_at(own, last), &blocks(s + own - last));
            }
            if own > 0 && s + 1 >= own {
                let block = last + own - 1 - s;
                let to = |piece| if block == own && !meets { finish(piece) } else { Buffer::Work.at(piece) };
                let landing = |piece| Landing::combine(source.at(piece), Side::Left, to(piece));
                step.receive(self.rank_at(own - 1), form_at(own - 1, 0), &blocks(block), &landing);
            }
            if own < last && s + own + 1 >= last {
                let (block, peer) = (s + own + 1 - last, self.rank_at(own + 1));
                let sent_from = form_at(own + 1, last);
                if block == own && meets {
                    // What comes from below lands at the block's place in this step.
                    let land = |nth| Recv { peer, sent_from, landing: Landing::copy(slot(0, nth)) };
                    step.recvs.extend((0..blocks(own).len()).map(land));
                } else {
                    let to = |piece| if block == own { finish(piece) } else { Buffer::Work.at(piece) };
                    let landing = |piece| Landing::combine(source.at(piece), Side::Right, to(piece));
                    step.receive(peer, sent_from, &blocks(block), &landing);
                }
            }
            steps.push(step);
        }
        if meets {
            let combine = |(nth, &piece): (usize, &Span)| Local {
                from: slot(0, nth),
                landing: Landing::combine(Buffer::Work.at(piece), Side::Right, finish(piece)),
            };
            let locals = blocks(own).iter().enumerate().map(combine).collect();
            steps.push(SubStep { locals, ..SubStep::default() });
        }
    }

    /// What others send lands in slots, and is then combined in rank order.
    fn push_full_mesh_reduce_scatter(
        &self,
        source: Buffer,
        blocks: Blocks<'_>,
        Targets { finish, slot }: Targets<'_>,
        steps: &mut Vec<SubStep>,
    ) {
        let mut step = SubStep::default();
        let pieces = blocks(self.own);
        let slot_of = |place: u32| if place > self.own { place - 1 } else { place };
        for distance in 1..self.len {
            let [to, from] = [self.len - distance, distance].map(|distance| self.before(distance));
            step.send(self.rank_at(to), source, &blocks(to));
            let peer = self.rank_at(from);
            let land = |nth| Recv { peer, sent_from: source, landing: Landing::copy(slot(slot_of(from), nth)) };
            step.recvs.extend((0..pieces.len()).map(land));
        }
        steps.push(step);
        let mut locals = Vec::new();
        for (nth, &piece) in pieces.iter().enumerate() {
            let value = |place: u32| match place == self.own {
                true => source.at(piece),
                false => slot(slot_of(place), nth),
            };
            let mut sum = value(0);
            for place in 1..self.len {
                let to = if place + 1 == self.len { finish(piece) } else { Buffer::Work.at(piece) };
                locals.push(Local { from: value(place), landing: Landing::combine(sum, Side::Right, to) });
                sum = to;
            }
        }
        steps.push(SubStep { locals, ..SubStep::default() });
    }

    /// Append the steps of an all-gather of `Output`, where this rank has its block.
    pub(super) fn all_gather(&self, blocks: Blocks<'_>, steps: &mut Vec<SubStep>) {
        let (own, last) = (self.own, self.len - 1);
        let output = |piece| Landing::copy(Buffer::Output.at(piece));
        match self.form {
            Form::Ring => {
                for s in 0..last {
                    let mut step = SubStep::default();
                    step.send(self.rank_at(self.before(last)), Buffer::Output, &blocks(self.before(s)));
                    step.receive(self.rank_at(self.before(1)), Buffer::Output, &blocks(self.before(s + 1)), &output);
                    steps.push(step);
                }
            }
            // The reduce-scatter backwards: each block goes outwards in both directions.
            Form::Mesh => {
                for s in 0..last {
                    let mut step = SubStep::default();
                    if own < last && s <= own {
                        step.send(self.rank_at(own + 1), Buffer::Output, &blocks(own - s));
                    }
                    if own > 0 && own + s <= last {
                        step.send(self.rank_at(own - 1), Buffer::Output, &blocks(own + s));
                    }
                    if s < own {
                        step.receive(self.rank_at(own - 1), Buffer::Output, &blocks(own - 1 - s), &output);
                    }
                    if own + s < last {
                        step.receive(self.rank_at(own + 1), Buffer::Output, &blocks(own + 1 + s), &output);
                    }
                    steps.push(step);
                }
            }
            Form::FullMesh => {
                let mut step = SubStep::default();
                for distance in 1..self.len {
                    let [to, from] = [self.len - distance, distance].map(|distance| self.before(distance));
                    step.send(self.rank_at(to), Buffer::Output, &blocks(own));
                    step.receive(self.rank_at(from), Buffer::Output, &blocks(from), &output);
                }
                steps.push(step);
            }
        }
    }

    /// The place `distance` before this rank's, round the line.
    const fn before(&self, distance: u32) -> u32 {
        ((self.own as u64 + self.len as u64 - (distance % self.len) as u64) % self.len as u64) as u32
    }
}

impl SubStep {
    fn send(&mut self, peer: Rank, from: Buffer, pieces: &[Span]) {
        self.sends.extend(pieces.iter().map(|&piece| Send { peer, from: from.at(piece) }));
    }

    fn receive(&mut self, peer: Rank, sent_from: Buffer, pieces: &[Span], landing: &dyn Fn(Span) -> Landing) {
        self.recvs.extend(pieces.iter().map(|&piece| Recv { peer, sent_from, landing: landing(piece) }));
    }
}
