//! The same for blocks of any length.
//!
//! A rank knows how much it sends and receives itself. As a relay it must also know what the others of its server send
//! through it, before it can lay that out: a count for each of them and each server. So an all-to-all of blocks of any
//! length is three schedules, one after the other:
//!
//! | p = G m | what | steps |
//! |---|---|---|
//! | [`counts_inside`] | what each rank sends through each other one of its server: G counts | 1, of m-1 messages |
//! | [`counts_between`] | what this rank gets from each rank of another server: m counts | 1, of G-1 messages |
//! | [`all_to_all_v`] | the elements, when each rank has compared these counts with its own | 1 + G-1 |
//!
//! A rank sends 2(G-1) messages between servers, where [`pairwise`](crate::schedule::pairwise) sends m(G-1). What it
//! relays is the sum of what its server sends to the ranks of its index, which none of its own counts bounds: if all
//! send to one index, one relay passes on everything.

use super::super::pairwise::{CountsError, packed};
use super::super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Shape, Span, StepBuffer};
use super::super::{hierarchical_ring::servers_of, hybrid};
use sumac_hal::ids::Rank;

/// Return the number of servers and of ranks on each, at least two of both; `None` if the shape has no such servers.
pub fn servers(shape: Shape, ranks: u32) -> Option<[u32; 2]> {
    hybrid::servers(shape, ranks)
}

/// Schedule the exchange of counts inside servers. A count is `each` elements.
///
/// Input: for each rank of the own server, by index, what goes through it to each server, in the order of servers.
/// Output: the same of each rank of the own server, through this one.
pub fn counts_inside(place: Place, each: usize, shape: Shape) -> Schedule {
    let [servers, of_server] = servers_of(shape.dims(place.ranks()));
    let first = place.rank().0 / of_server * of_server;
    exchange_among(place, Members { first, stride: 1, count: of_server }, servers as usize * each)
}

/// Schedule the exchange of counts between servers, among the ranks of one index. A count is `each` elements.
///
/// Input: for each server, what its rank of the own index gets through this rank from each rank of the own server.
/// Output: what this rank gets from each rank, in rank order.
pub fn counts_between(place: Place, each: usize, shape: Shape) -> Schedule {
    let [servers, of_server] = servers_of(shape.dims(place.ranks()));
    let first = place.rank().0 % of_server;
    exchange_among(place, Members { first, stride: of_server, count: servers }, of_server as usize * each)
}

/// Schedule an all-to-all of blocks of any length, packed in rank order at both ends: `send_counts[s]` elements go to
/// rank s, `recv_counts[s]` come from it. From rank i of the own server, `relayed_counts[g * m + i]` elements go to the
/// rank of the own index on server g.
///
/// Blocks without elements are not sent: the counts must be those that [`counts_inside`] and [`counts_between`] have
/// shown to agree.
///
/// # Errors
/// [`CountsError`] if the counts contradict the communicator or each other.
pub fn all_to_all_v(
    place: Place,
    shape: Shape,
    [send_counts, recv_counts, relayed_counts]: [&[usize]; 3],
) -> Result<Schedule, CountsError> {
    let (ranks, rank) = (place.ranks() as usize, place.rank());
    if [send_counts, recv_counts].iter().any(|counts| counts.len() != ranks) {
        return Err(CountsError::Ranks { sends: send_counts.len(), recvs: recv_counts.len(), ranks: place.ranks() });
    }
    if relayed_counts.len() != ranks {
        return Err(CountsError::Blocks { counts: relayed_counts.len(), ranks: place.ranks() });
    }
    let (send, recv) = (send_counts[rank.0 as usize], recv_counts[rank.0 as usize]);
    if send != recv {
        return Err(CountsError::Own { rank, send, recv });
    }
    let [servers, each] = servers_of(shape.dims(place.ranks()));
    let (server, index) = (rank.0 / each, rank.0 % each);
    let own = (server * each) as usize..((server + 1) * each) as usize;
    // What the own server sends to this rank goes to its place, and through nobody.
    let passed: Vec<usize> = (0..ranks).map(|at| if own.contains(&at) { 0 } else { relayed_counts[at] }).collect();
    let packed = |counts: &[usize]| packed(counts).ok_or(CountsError::Overflow { rank });
    let relays = Relays {
        servers,
        each,
        server,
        index,
        given: packed(send_counts)?,
        taken: packed(recv_counts)?,
        passed: packed(&passed)?,
    };
    let end = |spans: &[Span]| spans.last().map_or(0, |span| span.end());
    let layout = Layout { work: end(&relays.passed), ..Layout::moves(end(&relays.given), end(&relays.taken), None) };
    let mut schedule = Schedule::moving(place, layout);
    schedule.compute(1 + servers as usize, move |step_index, step| match step_index {
        0 => relays.append_own(step),
        1 => relays.append_inside(step),
        distance => relays.append_between(distance as u32 - 1, step),
    });
    Ok(schedule)
}

/// Some ranks at equal distances.
#[derive(Clone, Copy)]
struct Members {
    first: u32,
    stride: u32,
    count: u32,
}

/// Schedule an exchange of equal blocks of `len` elements among some ranks, in one step.
fn exchange_among(place: Place, members: Members, len: usize) -> Schedule {
    let Members { first, stride, count } = members;
    let whole = count as usize * len;
    let mut schedule = Schedule::moving(place, Layout::moves(whole, whole, None));
    let own = (place.rank().0 - first) / stride;
    let block = move |member: u32| Span { start: member as usize * len, len };
    schedule.compute(1, move |_, step| {
        step.locals.push(Local::copy(Buffer::Input.at(block(own)), Buffer::Output.at(block(own))));
        for distance in 1..count {
            let (to, from) = ((own + distance) % count, (own + count - distance) % count);
            let landing = Landing::copy(Buffer::Output.at(block(from)));
            let recv = Recv { peer: Rank(first + from * stride), sent_from: Buffer::Input, landing };
            step.exchange(Send { peer: Rank(first + to * stride), from: Buffer::Input.at(block(to)) }, recv);
        }
    });
    schedule
}

/// G servers of m ranks, as one rank sees them, and where its blocks lie.
struct Relays {
    servers: u32,
    each: u32,
    /// The own server, and the own index there.
    server: u32,
    index: u32,
    /// The blocks for each rank in the input, and from each rank in the output.
    given: Vec<Span>,
    taken: Vec<Span>,
    /// The blocks that this rank passes on, in `Work`: to each server, from each rank of its own. Empty for its own.
    passed: Vec<Span>,
}

impl Relays {
    const fn rank(&self, server: u32, index: u32) -> Rank {
        Rank(server * self.each + index)
    }

    /// What this rank sends to a rank of another server, or of its own.
    fn given_to(&self, server: u32, index: u32) -> Region {
        Buffer::Input.at(self.given[self.rank(server, index).0 as usize])
    }

    /// Where a block of rank `index` of the own server for the own index on a server lands here.
    fn relayed(&self, server: u32, index: u32) -> Region {
        let at = self.rank(server, index).0 as usize;
        if server == self.server { Buffer::Output.at(self.taken[at]) } else { Buffer::Work.at(self.passed[at]) }
    }

    /// All blocks of a server's ranks, which lie behind each other.
    fn of_server(&self, spans: &[Span], server: u32) -> Span {
        let (first, last) = (self.rank(server, 0).0 as usize, self.rank(server, self.each - 1).0 as usize);
        Span { start: spans[first].start, len: spans[last].end() - spans[first].start }
    }

    /// What this rank sends to itself, and through itself.
    fn append_own(&self, step: &mut StepBuffer) {
        let local = |server| Local::copy(self.given_to(server, self.index), self.relayed(server, self.index));
        step.locals.extend((0..self.servers).map(local).filter(|local| local.landing.to.span.len > 0));
    }

    /// Each rank gives every other one of its server what goes to that one's index, a block for each server.
    fn append_inside(&self, step: &mut StepBuffer) {
        for distance in 1..self.each {
            let (to, from) = ((self.index + distance) % self.each, (self.index + self.each - distance) % self.each);
            for server in 0..self.servers {
                push_send(step, self.rank(self.server, to), self.given_to(server, to));
                push_recv(step, self.rank(self.server, from), (Buffer::Input, self.relayed(server, from)));
            }
        }
    }

    /// The ranks of one index exchange what they have collected for each other.
    fn append_between(&self, distance: u32, step: &mut StepBuffer) {
        let to = (self.server + distance) % self.servers;
        let from = (self.server + self.servers - distance) % self.servers;
        push_send(step, self.rank(to, self.index), Buffer::Work.at(self.of_server(&self.passed, to)));
        let arrived = Buffer::Output.at(self.of_server(&self.taken, from));
        push_recv(step, self.rank(from, self.index), (Buffer::Work, arrived));
    }
}

fn push_send(step: &mut StepBuffer, peer: Rank, from: Region) {
    if from.span.len > 0 {
        step.sends.push(Send { peer, from });
    }
}

fn push_recv(step: &mut StepBuffer, peer: Rank, (sent_from, to): (Buffer, Region)) {
    if to.span.len > 0 {
        step.recvs.push(Recv { peer, sent_from, landing: Landing::copy(to) });
    }
}
