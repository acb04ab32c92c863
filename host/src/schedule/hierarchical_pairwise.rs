//! Full meshes inside servers, and pairwise exchange between them.
//!
//! On G servers of m ranks, rank j of a server first collects what all ranks of that server send to the ranks of its
//! own index j on all servers, in one step inside the server. Then the ranks of one index exchange what they have
//! collected, one server for each step. So a rank sends G-1 messages between servers, each m times as long, where
//! pairwise exchange sends m(G-1); what goes to other servers moves twice (Hwang et al., "Tutel: Adaptive
//! mixture-of-experts at scale", MLSys 2023, section 4.2: two-dimensional hierarchical all-to-all).
//!
//! | p = G m | cost |
//! |---|---|
//! | [`all_to_all`] | 1 + (G-1) steps, one of them of m-1 messages; n ((m-1)/m + (G-1)/G) beta |
//!
//! The servers of a grid are its rows, those of the last dimension. A line is servers of one rank each: pairwise
//! exchange.
//!
//! Blocks of any length take counts first ([`relayed`]).

pub mod relayed;

use super::hierarchical_ring::servers_of;
use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Shape, Span, StepBuffer, pairwise};
use sumac_hal::ids::Rank;

/// Schedule an all-to-all: rank r sends `count` elements in p blocks, block s to rank s, and receives block r of each.
///
/// The blocks are those of [`super::pairwise::all_to_all`].
pub fn all_to_all(place: Place, count: usize, shape: Shape) -> Schedule {
    let servers = Servers::new(place, count, shape, false);
    let own = servers.block(place.rank()).len;
    let layout = Layout::moves(count, own * place.ranks() as usize, None);
    if servers.each == 1 { pairwise::all_to_all(place, count) } else { servers.schedule(layout) }
}

/// Schedule an all-to-all in place: block s of p, each of `each` elements, goes to rank s, and rank s's block replaces
/// it.
///
/// The messages are those of [`all_to_all`], so some ranks may run in place and others not. What comes from the own
/// server waits in `Work` until all blocks have left. In a line it is [`pairwise::all_to_all_in_place`].
pub fn all_to_all_in_place(place: Place, each: usize, shape: Shape) -> Schedule {
    let whole = each * place.ranks() as usize;
    let servers = Servers::new(place, whole, shape, true);
    if servers.each == 1 {
        return pairwise::all_to_all_in_place(place, each);
    }
    servers.schedule(Layout::moves(whole, whole, Some(0)))
}

/// G servers of m ranks, as one rank sees them.
struct Servers {
    place: Place,
    count: usize,
    servers: u32,
    each: u32,
    /// The own server, and the own index there.
    server: u32,
    index: u32,
    in_place: bool,
}

impl Servers {
    fn new(place: Place, count: usize, shape: Shape, in_place: bool) -> Self {
        let [servers, each] = servers_of(shape.dims(place.ranks()));
        let rank = place.rank().0;
        Self { place, count, servers, each, server: rank / each, index: rank % each, in_place }
    }

    fn schedule(self, layout: Layout) -> Schedule {
        let end = self.collected(self.servers).span;
        let mut schedule = Schedule::moving(self.place, Layout { work: end.start, ..layout });
        // What is local, the step inside, and in place another local one.
        let (first, between) = (2 + usize::from(self.in_place), self.servers as usize - 1);
        schedule.compute(first + between, move |index, step| match index {
            0 => self.append_own(step),
            1 => self.append_inside(step),
            index if index < first => step.locals.push(self.unload()),
            index => self.append_between((index - first) as u32 + 1, step),
        });
        schedule
    }

    const fn rank(&self, server: u32, index: u32) -> Rank {
        Rank(server * self.each + index)
    }

    /// The block of each input that goes to a rank.
    fn block(&self, rank: Rank) -> Span {
        Span::of_block(self.count, self.place.ranks(), rank.0)
    }

    /// Where what this rank collects for its index on a server lies: a block of each rank of its own server, behind
    /// those for servers before that one. What the own server needs itself goes straight to the output, unless in
    /// place.
    fn collected(&self, server: u32) -> Region {
        let len = |server: u32| match server {
            server if server == self.server && !self.in_place => 0,
            server => self.block(self.rank(server, self.index)).len * self.each as usize,
        };
        let end = server == self.servers;
        Buffer::Work.at(Span { start: (0..server).map(len).sum(), len: if end { 0 } else { len(server) } })
    }

    /// Where what arrives from a server's rank lies in the output.
    fn arrived(&self, from: Rank) -> Region {
        let len = self.block(self.place.rank()).len;
        Buffer::Output.at(Span { start: from.0 as usize * len, len })
    }

    /// Where a block of rank `index` of the own server lands at the relay, this rank, on its way to a server.
    fn relayed(&self, server: u32, index: u32) -> Region {
        if server == self.server && !self.in_place {
            return self.arrived(self.rank(server, index));
        }
        let len = self.block(self.rank(server, self.index)).len;
        let start = self.collected(server).span.start + index as usize * len;
        Buffer::Work.at(Span { start, len })
    }

    /// What this rank sends to itself, and through itself.
    fn append_own(&self, step: &mut StepBuffer) {
        let local = |server| {
            let from = Buffer::Input.at(self.block(self.rank(server, self.index)));
            Local::copy(from, self.relayed(server, self.index))
        };
        step.locals.extend((0..self.servers).map(local));
    }

    /// Each rank gives every other one of its server what goes to that one's index, a piece for each server.
    fn append_inside(&self, step: &mut StepBuffer) {
        for distance in 1..self.each {
            let (to, from) = ((self.index + distance) % self.each, (self.index + self.each - distance) % self.each);
            for server in 0..self.servers {
                let piece = Buffer::Input.at(self.block(self.rank(server, to)));
                step.sends.push(Send { peer: self.rank(self.server, to), from: piece });
                let landing = Landing::copy(self.relayed(server, from));
                step.recvs.push(Recv { peer: self.rank(self.server, from), sent_from: Buffer::Input, landing });
            }
        }
    }

    /// In place: what came from the own server, once all blocks have left.
    fn unload(&self) -> Local {
        let first = self.arrived(self.rank(self.server, 0)).span;
        let from = self.collected(self.server);
        Local::copy(from, Buffer::Output.at(Span { len: from.span.len, ..first }))
    }

    /// The ranks of one index exchange what they have collected for each other.
    fn append_between(&self, distance: u32, step: &mut StepBuffer) {
        let to = (self.server + distance) % self.servers;
        let from = (self.server + self.servers - distance) % self.servers;
        let first = self.arrived(self.rank(from, 0)).span;
        let arrived = Span { len: first.len * self.each as usize, ..first };
        let landing = Landing::copy(Buffer::Output.at(arrived));
        step.sends.push(Send { peer: self.rank(to, self.index), from: self.collected(to) });
        step.recvs.push(Recv { peer: self.rank(from, self.index), sent_from: Buffer::Work, landing });
    }
}
