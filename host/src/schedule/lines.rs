//! The steps of a line of ranks that reduce-scatters or all-gathers what its ranks have ([`super::dimensions`]).
//!
//! The blocks of a line of d ranks are numbered by their place there. Each form sends d(d-1) blocks in all.
//!
//! | form | steps, of at most | links | a link carries |
//! |---|---|---|---|
//! | [`Form::Ring`] | d-1, a block | to the next rank, around the end | d-1 blocks |
//! | [`Form::Mesh`] | d-1, a block in each direction | to both neighbours, none around the end | at most d-1 blocks |
//! | [`Form::FullMesh`] | 1, of d-1 blocks | to each other rank | a block |
//!
//! A step is computed from its index.

use super::dimensions::Blocks;
use super::{Buffer, Landing, Local, Recv, Send, Side, StepBuffer};
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

impl Line {
    /// How many further copies of its block this rank holds for a time.
    pub(super) const fn slots(&self) -> u32 {
        match self.form {
            Form::Ring => 0,
            Form::Mesh => (0 < self.own && self.own + 1 < self.len) as u32,
            Form::FullMesh => self.len - 1,
        }
    }

    /// Return how many steps a reduce-scatter has here.
    pub(super) const fn reduce_scatter_steps(&self) -> usize {
        match self.form {
            Form::Ring => self.len as usize - 1,
            Form::Mesh => (self.len - 1 - self.idle_steps() + self.slots()) as usize,
            Form::FullMesh => 2,
        }
    }

    /// The first steps of a mesh's reduce-scatter, and the last ones of its all-gather, in which this rank has nothing
    /// to do.
    const fn idle_steps(&self) -> u32 {
        let to_the_end = self.len - 1 - self.own;
        (if self.own < to_the_end { self.own } else { to_the_end }).saturating_sub(1)
    }

    /// Append step `index` of a reduce-scatter of what is in `source`. Partial values are at their place in `Work`.
    pub(super) fn reduce_scatter(&self, index: usize, source: Buffer, blocks: &Blocks<'_>, step: &mut StepBuffer) {
        match self.form {
            Form::Ring => self.ring_reduce_scatter(index as u32, source, blocks, step),
            Form::Mesh => self.mesh_reduce_scatter(index as u32 + self.idle_steps(), source, blocks, step),
            Form::FullMesh if index == 0 => self.full_mesh_collect(source, blocks, step),
            Form::FullMesh => self.full_mesh_combine(source, blocks, step),
        }
    }

    fn ring_reduce_scatter(&self, s: u32, source: Buffer, blocks: &Blocks<'_>, step: &mut StepBuffer) {
        let from = if s == 0 { source } else { Buffer::Work };
        send(step, self.rank_at(self.before(self.len - 1)), from, blocks, self.before(s + 1));
        let peer = self.rank_at(self.before(1));
        step.recvs.extend(blocks.pieces(self.before(s + 2)).map(|piece| {
            let to = if s + 2 == self.len { blocks.finished(piece) } else { Buffer::Work.at(piece) };
            Recv { peer, sent_from: from, landing: Landing::combine(source.at(piece), Side::Left, to) }
        }));
    }

    /// Contributions to block b rise from place 0 and descend from place d-1, farthest block first, and meet at b.
    fn mesh_reduce_scatter(&self, s: u32, source: Buffer, blocks: &Blocks<'_>, step: &mut StepBuffer) {
        let (own, last) = (self.own, self.len - 1);
        let form_at = |place: u32, first: u32| if place == first { source } else { Buffer::Work };
        let meets = self.slots() > 0;
        if s == last {
            let combine = |(piece, from)| Local {
                from,
                landing: Landing::combine(Buffer::Work.at(piece), Side::Right, blocks.finished(piece)),
            };
            step.locals.extend(blocks.pieces(own).zip(blocks.slot(0)).map(combine));
            return;
        }
        if own < last && s >= own {
            send(step, self.rank_at(own + 1), form_at(own, 0), blocks, last + own - s);
        }
        if own > 0 && s + own >= last {
            send(step, self.rank_at(own - 1), form_at(own, last), blocks, s + own - last);
        }
        let to = |block: u32, piece| match block == own && !meets {
            true => blocks.finished(piece),
            false => Buffer::Work.at(piece),
        };
        if own > 0 && s + 1 >= own {
            let (block, peer, sent_from) = (last + own - 1 - s, self.rank_at(own - 1), form_at(own - 1, 0));
            let landing = |piece| Landing::combine(source.at(piece), Side::Left, to(block, piece));
            step.recvs.extend(blocks.pieces(block).map(|piece| Recv { peer, sent_from, landing: landing(piece) }));
        }
        if own < last && s + own + 1 >= last {
            let (block, peer, sent_from) = (s + own + 1 - last, self.rank_at(own + 1), form_at(own + 1, last));
            if block == own && meets {
                // What comes from below lands at the block's place in this step.
                let land = |slot| Recv { peer, sent_from, landing: Landing::copy(slot) };
                step.recvs.extend(blocks.slot(0).map(land));
            } else {
                let landing = |piece| Landing::combine(source.at(piece), Side::Right, to(block, piece));
                step.recvs.extend(blocks.pieces(block).map(|piece| Recv { peer, sent_from, landing: landing(piece) }));
            }
        }
    }

    /// What others send lands in slots.
    fn full_mesh_collect(&self, source: Buffer, blocks: &Blocks<'_>, step: &mut StepBuffer) {
        for distance in 1..self.len {
            let [to, from] = [self.len - distance, distance].map(|distance| self.before(distance));
            send(step, self.rank_at(to), source, blocks, to);
            let peer = self.rank_at(from);
            let land = |slot| Recv { peer, sent_from: source, landing: Landing::copy(slot) };
            step.recvs.extend(blocks.slot(self.slot_of(from)).map(land));
        }
    }

    /// It is then combined in rank order.
    fn full_mesh_combine(&self, source: Buffer, blocks: &Blocks<'_>, step: &mut StepBuffer) {
        for (piece, first_slot) in blocks.pieces(self.own).zip(blocks.slot(0)) {
            let value = |place: u32| match place == self.own {
                true => source.at(piece),
                false => blocks.in_slot(self.slot_of(place), first_slot),
            };
            let mut sum = value(0);
            for place in 1..self.len {
                let to = if place + 1 == self.len { blocks.finished(piece) } else { Buffer::Work.at(piece) };
                step.locals.push(Local { from: value(place), landing: Landing::combine(sum, Side::Right, to) });
                sum = to;
            }
        }
    }

    /// The slot of what comes from another place of a full mesh.
    const fn slot_of(&self, place: u32) -> u32 {
        if place > self.own { place - 1 } else { place }
    }

    /// Return how many steps an all-gather has here.
    pub(super) const fn all_gather_steps(&self) -> usize {
        match self.form {
            Form::Ring => self.len as usize - 1,
            Form::Mesh => (self.len - 1 - self.idle_steps()) as usize,
            Form::FullMesh => 1,
        }
    }

    /// Append step `index` of an all-gather of `Output`, where this rank has its block.
    pub(super) fn all_gather(&self, index: usize, blocks: &Blocks<'_>, step: &mut StepBuffer) {
        let (own, last, s) = (self.own, self.len - 1, index as u32);
        let mut pass = |to: Option<(u32, u32)>, from: Option<(u32, u32)>| {
            if let Some((place, block)) = to {
                send(step, self.rank_at(place), Buffer::Output, blocks, block);
            }
            if let Some((place, block)) = from {
                let (peer, landing) = (self.rank_at(place), |piece| Landing::copy(Buffer::Output.at(piece)));
                let land = |piece| Recv { peer, sent_from: Buffer::Output, landing: landing(piece) };
                step.recvs.extend(blocks.pieces(block).map(land));
            }
        };
        match self.form {
            Form::Ring => {
                pass(Some((self.before(last), self.before(s))), Some((self.before(1), self.before(s + 1))));
            }
            // The reduce-scatter backwards: each block goes outwards in both directions.
            Form::Mesh => {
                let below = (own > 0 && own + s <= last).then(|| (own - 1, own + s));
                let above = (own < last && s <= own).then(|| (own + 1, own - s));
                pass(above, (s < own).then(|| (own - 1, own - 1 - s)));
                pass(below, (own + s < last).then(|| (own + 1, own + 1 + s)));
            }
            Form::FullMesh => {
                for distance in 1..self.len {
                    let [to, from] = [self.len - distance, distance].map(|distance| self.before(distance));
                    pass(Some((to, own)), Some((from, from)));
                }
            }
        }
    }

    /// The place `distance` before this rank's, round the line.
    const fn before(&self, distance: u32) -> u32 {
        ((self.own as u64 + self.len as u64 - (distance % self.len) as u64) % self.len as u64) as u32
    }
}

/// Append the pieces of a block, sent from their place in a buffer.
fn send(step: &mut StepBuffer, peer: Rank, from: Buffer, blocks: &Blocks<'_>, block: u32) {
    step.sends.extend(blocks.pieces(block).map(|piece| Send { peer, from: from.at(piece) }));
}
