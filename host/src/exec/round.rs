//! Short operations on the board ([`super::board`]) that were laid out before: what they do while no rank is late.
//!
//! An [`Execution`](super::Execution) prepares for everything that may happen in an operation, which costs more than to
//! post and read a few bytes. [`Mesh::attempt`] does only that, for as long as a rank that waits would spin or yield
//! between two looks at its sockets. If it is not complete by then, an `Execution` continues from there.
//!
//! Invariant: an attempt that is not complete has written nothing to the caller's memory but what the steps write that
//! it has done.

use super::Buffers;
use super::board::{BoardScope, is_for_board, post_header, region_to_post, start_in_post};
use super::error::{Call, ExecError};
use super::frame::{HEADER_BYTES, Header};
use super::memory::Memory;
use super::memory_layout::{MemoryLayout, Store, lengths};
use super::mesh::Mesh;
use super::poll_backoff::{NextPoll, PollBackoff};
use super::run::{Execution, Run};
use super::shared::SharedLink;
use crate::schedule::{Local, Recv, Region, Schedule, StepBuffer};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::reduce::Kernel;

/// A short operation on the board: its description and its memory's layout.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    /// What all its calls have in common.
    call: Call,
    schedule: Arc<Schedule>,
    kernel: Option<Kernel>,
    layout: MemoryLayout,
    /// The lengths of its input, if that has a buffer of its own, and of its output.
    lengths: (Option<usize>, usize),
    /// The header of what it posts, but for the numbers of the call.
    header: [u8; HEADER_BYTES],
    /// Where what it posts lies, if it posts anything.
    posts: Option<(Store, Range<usize>)>,
    recvs: Box<[Recv]>,
    rest: Rest,
    /// What is left to do when all is read.
    locals: Box<[Local]>,
    /// The length of what it sends, to all ranks.
    sent_bytes: u64,
    /// Where in each post the bytes for this rank begin.
    start_bytes: usize,
}

/// What it does besides its first step.
#[derive(Debug, Clone)]
enum Rest {
    /// Nothing, and that step reads what each other rank sends into these places in the output.
    Copies(Box<[Range<usize>]>),
    /// What is local.
    Locals,
    /// Further steps, in each of which it exchanges one message, and then what is local.
    Steps(Box<[LaterStep]>),
}

/// A step after the first one.
#[derive(Debug, Clone)]
struct LaterStep {
    /// Its index in the schedule.
    index: u32,
    /// The header of what it posts, but for the numbers of the call.
    header: [u8; HEADER_BYTES],
    posts: (Store, Range<usize>),
    recv: Recv,
}

/// How far an attempt came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// The operation is complete.
    Complete,
    /// The operation has begun, and some rank is late.
    Begun(Begun),
}

/// Where an attempt stands that is not complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Begun {
    /// The index of the step in the schedule.
    step: u32,
    /// What this rank sends in that step is posted.
    has_posted: bool,
}

impl Round {
    /// Lay out an operation, if it is one for the board.
    ///
    /// # Errors
    /// As those of [`Execution::new`](super::Execution::new).
    pub(crate) fn new(
        (desc, path): (&OpDesc, Path),
        table_version: u32,
        schedule: &Arc<Schedule>,
        kernel: Option<Kernel>,
        is_in_place: bool,
    ) -> Result<Option<Self>, ExecError> {
        let place = schedule.place();
        let mut step = StepBuffer::default();
        if !is_for_board(desc, path, place.ranks()) || !schedule.read(0, &mut step) || !step.locals.is_empty() {
            return Ok(None);
        }
        let layout = MemoryLayout::new(schedule, desc.element_bytes(), kernel.as_ref(), is_in_place)?;
        let call = Call::new(place.rank(), 0, desc.signature(path, table_version), desc, path);
        let (mut later, mut locals, mut steps) = (StepBuffer::default(), Vec::new(), Vec::new());
        for index in 1..schedule.len() {
            schedule.read(index, &mut later);
            if later.step().has_messages() {
                let (&[send], &[recv], &[], []) = (&*later.sends, &*later.recvs, &*later.locals, &*locals) else {
                    return Ok(None);
                };
                let posts = layout.locate(send.from);
                let Ok(index) = u32::try_from(index) else { return Ok(None) };
                steps.push(LaterStep { index, header: post_header(call, 0, posts.1.len()), posts, recv });
            }
            locals.append(&mut later.locals);
        }
        let len_bytes = |region: Region| (region.span.len * layout.bytes_each(region.buffer)) as u64;
        let sent_bytes = step.sends.iter().map(|send| len_bytes(send.from)).sum::<u64>()
            + steps.iter().map(|step: &LaterStep| step.posts.1.len() as u64).sum::<u64>();
        let posts = (!step.sends.is_empty()).then(|| layout.locate(region_to_post(desc.collective, &step.sends)));
        locals.retain(|local| !layout.is_in_place(local));
        let locals: Box<[Local]> = locals.into();
        let recvs: Box<[Recv]> = step.recvs.into();
        let is_work = posts.as_ref().is_some_and(|(store, _): &(Store, _)| *store == Store::Work);
        let reads = if is_work || !locals.is_empty() { None } else { direct_reads(&layout, &recvs) };
        let rest = match reads {
            _ if !steps.is_empty() => Rest::Steps(steps.into()),
            Some(places) => Rest::Copies(places),
            None => Rest::Locals,
        };
        let header = post_header(call, 0, posts.as_ref().map_or(0, |(_, range): &(_, Range<usize>)| range.len()));
        let Some(lengths) = lengths(schedule.layout(), layout.element_bytes, is_in_place) else { return Ok(None) };
        let start_bytes = start_in_post(desc, place) * desc.element_bytes();
        let schedule = Arc::clone(schedule);
        Ok(Some(Self {
            call,
            schedule,
            kernel,
            layout,
            lengths,
            header,
            posts,
            recvs,
            rest,
            locals,
            sent_bytes,
            start_bytes,
        }))
    }

    /// Return the length of what it sends, to all ranks.
    pub(crate) const fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Return its call of this index.
    const fn call(&self, op_index: u64) -> Call {
        Call { op_index, ..self.call }
    }

    /// Return whether buffers have its lengths.
    #[inline]
    pub(crate) fn fits(&self, buffers: &Buffers<'_>) -> bool {
        self.lengths
            == match buffers {
                Buffers::InPlace(buffer) => (None, buffer.len()),
                Buffers::Separate { input, output } => (Some(input.len()), output.len()),
            }
    }

    /// Return its memory, in buffers of its lengths.
    fn memory<'a>(&'a self, buffers: Buffers<'a>, work: &mut Vec<u8>) -> Memory<'a> {
        Memory::fitting(self.layout, &self.schedule, self.kernel.as_ref(), buffers, work)
    }
}

/// Return where in the output transfers land, if they land there as they are.
fn direct_reads(layout: &MemoryLayout, recvs: &[Recv]) -> Option<Box<[Range<usize>]>> {
    let place = |recv: &Recv| {
        let (store, range) = layout.locate(recv.landing.to);
        (store == Store::User && layout.is_plain(recv.sent_from, &recv.landing)).then_some(range)
    };
    recvs.iter().map(place).collect()
}

impl<'a> Execution<'a> {
    /// Continue an operation that [`Mesh::attempt`] has begun, in the same buffers. The numbers are the attempt's.
    pub(crate) fn continued(
        mesh: &'a mut Mesh,
        (round, begun): (&'a Round, Begun),
        buffers: Buffers<'a>,
        ((op_index, number), deadline): ((u64, u32), Instant),
    ) -> Self {
        let memory = round.memory(buffers, &mut mesh.work);
        let mut run = Run::new(mesh, &round.schedule, memory, (round.call(op_index), deadline), Vec::new(), false);
        (run.number, run.index, run.attempted) = (number, begun.step as usize, Some(begun.has_posted));
        Self(run)
    }
}

impl Mesh {
    /// Return whether the next call can be an attempt. Until an operation other than an attempt, it is the same for
    /// all.
    pub(crate) fn can_attempt(&mut self) -> bool {
        self.poisoned.is_none() && self.uses_board() && !self.is_settling()
    }

    /// Run a round as the operation of this index, if all ranks are here. `number` is that of the call
    /// ([`Context::number`](super::Context::number)). Such attempts are possible ([`Mesh::can_attempt`]), and the
    /// buffers have its lengths ([`Round::fits`]).
    pub(crate) fn attempt(&mut self, round: &Round, (op_index, number): (u64, u32), buffers: Buffers<'_>) -> Attempt {
        self.boards.all.push(&round.call, op_index);
        let mut header = round.header;
        Header::set_numbers(&mut header, op_index, number);
        let attempt = if let Rest::Copies(places) = &round.rest {
            self.attempt_directly(round, places, &header, buffers)
        } else {
            let mut memory = round.memory(buffers, &mut self.work);
            let mut attempt = self.attempt_in(round, &header, &mut memory);
            if let (Attempt::Complete, Rest::Steps(steps)) = (attempt, &round.rest) {
                attempt = self.attempt_steps(round, steps, (op_index, number), &mut memory);
            }
            self.work = std::mem::take(&mut memory.work);
            attempt
        };
        if attempt == Attempt::Complete {
            self.next_op = op_index + 1;
        }
        attempt
    }

    /// Attempt the steps after the first one.
    fn attempt_steps(
        &mut self,
        round: &Round,
        steps: &[LaterStep],
        (op_index, number): (u64, u32),
        memory: &mut Memory<'_>,
    ) -> Attempt {
        for step in steps {
            self.boards.all.push(&round.call, op_index);
            let mut header = step.header;
            Header::set_numbers(&mut header, op_index, number);
            let (store, range) = &step.posts;
            let has_posted = self.post_for_all(BoardScope::All, &header, memory.bytes(*store, range.clone()));
            if !has_posted || !self.await_posts(std::slice::from_ref(&step.recv)) {
                return Attempt::Begun(Begun { step: step.index, has_posted });
            }
            self.read_post(BoardScope::All, &step.recv, 0, memory);
            self.finish_round(BoardScope::All, 1);
        }
        round.locals.iter().for_each(|local| memory.run_local(local, &mut self.scratch, &mut self.spare));
        self.sent_bytes += round.sent_bytes;
        Attempt::Complete
    }

    /// Attempt the first step, and what is local if there are no others.
    fn attempt_in(&mut self, round: &Round, header: &[u8; HEADER_BYTES], memory: &mut Memory<'_>) -> Attempt {
        let has_posted = round.posts.as_ref().is_none_or(|(store, range)| {
            let bytes = memory.bytes(*store, range.clone());
            self.post_for_all(BoardScope::All, header, bytes)
        });
        if !has_posted || !self.await_posts(&round.recvs) {
            return Attempt::Begun(Begun { step: 0, has_posted });
        }
        round.recvs.iter().for_each(|recv| self.read_post(BoardScope::All, recv, round.start_bytes, memory));
        self.finish_round(BoardScope::All, round.recvs.len());
        if let Rest::Steps(_) = round.rest {
            return Attempt::Complete;
        }
        round.locals.iter().for_each(|local| memory.run_local(local, &mut self.scratch, &mut self.spare));
        self.sent_bytes += round.sent_bytes;
        Attempt::Complete
    }

    /// Attempt a round that only copies.
    fn attempt_directly(
        &mut self,
        round: &Round,
        places: &[Range<usize>],
        header: &[u8; HEADER_BYTES],
        buffers: Buffers<'_>,
    ) -> Attempt {
        let (input, user) = buffers.into_slices();
        let has_posted = round.posts.as_ref().is_none_or(|(store, range)| {
            let from = if *store == Store::Input { input } else { &*user };
            self.post_for_all(BoardScope::All, header, &from[range.clone()])
        });
        let begun = Attempt::Begun(Begun { step: 0, has_posted });
        if !has_posted || !self.await_posts(&round.recvs) {
            return begun;
        }
        let Some(board) = &self.boards.all.board else { return begun };
        for (recv, place) in round.recvs.iter().zip(places) {
            board.read(recv.peer.0, round.start_bytes, &mut user[place.clone()]);
        }
        self.finish_round(BoardScope::All, places.len());
        self.sent_bytes += round.sent_bytes;
        Attempt::Complete
    }

    /// Post what a call sends to all ranks of a board. Returns whether there was room.
    #[inline]
    pub(super) fn post_for_all(&mut self, scope: BoardScope, header: &[u8; HEADER_BYTES], bytes: &[u8]) -> bool {
        self.boards.get_mut(scope).with_tag().is_some_and(|(board, tag)| board.post(tag, header, bytes))
    }

    /// Wait for posts of the present round until it is time to look at the sockets. Returns whether all are there.
    fn await_posts(&mut self, recvs: &[Recv]) -> bool {
        let mut missing = recvs;
        let mut backoff = None;
        loop {
            let Some((board, tag)) = self.boards.all.with_tag() else { return false };
            while let Some((recv, rest)) = missing.split_first() {
                // The board is of all ranks.
                match board.tag_of(recv.peer.0) {
                    Some(found) if found == tag => missing = rest,
                    // Of other calls: the operation tells which.
                    Some(_) => return false,
                    None => break,
                }
            }
            if missing.is_empty() {
                return true;
            }
            let next = backoff.get_or_insert_with(|| {
                // The rank that is late may sleep, and wait for what this one has posted.
                self.ring_all(BoardScope::All);
                PollBackoff::new(self.waiting)
            });
            match next.after(false) {
                NextPoll::Continue | NextPoll::Spin => std::hint::spin_loop(),
                NextPoll::Yield => self.yield_core(),
                NextPoll::Poll | NextPoll::Block => return false,
            }
        }
    }

    /// Read what the sender of a transfer has posted in the present round.
    #[inline]
    pub(super) fn read_post(&mut self, scope: BoardScope, recv: &Recv, start_bytes: usize, memory: &mut Memory<'_>) {
        let board = self.boards.get(scope);
        if let Some(place) = memory.direct(recv) {
            board.read(recv.peer, start_bytes, place);
            return;
        }
        let bytes = &mut self.scratch[..memory.len_bytes(recv)];
        board.read(recv.peer, start_bytes, bytes);
        memory.land(recv.sent_from, &recv.landing, 0, bytes, &mut self.spare);
    }

    /// Everything of the present round is read, of so many ranks: end it, and wake those that sleep.
    #[inline]
    pub(super) fn finish_round(&mut self, scope: BoardScope, read: usize) {
        self.boards.get_mut(scope).finish_round(read);
        self.ring_all(scope);
    }

    /// Wake the ranks of a board that sleep, after something was published there: all their connections are shared.
    #[inline]
    pub(super) fn ring_all(&self, scope: BoardScope) {
        let links = match scope {
            BoardScope::All => &self.links[..],
            BoardScope::Server => self.boards.server.links(&self.links),
        };
        links.iter().filter_map(|link| link.shared.as_deref()).for_each(SharedLink::ring);
    }
}
