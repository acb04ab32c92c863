//! Executes one rank's schedule.
//!
//! Invariants:
//! - a step begins when the one before it is done: all its bytes are received, and all its sends are in the kernel;
//! - sends and receives of a step go on side by side, so two ranks that send each other more than the sockets
//!   hold don't wait for each other;
//! - a frame is used only if operation, signature and order are the expected ones.

use super::announce::Patience;
use super::error::{Call, ExecError};
use super::frame::{AbortFrame, FrameKind, HEADER_BYTES, Header};
use super::link::{Moved, State};
use super::memory::{Buffers, Memory};
use super::mesh::Mesh;
use super::message::Message;
use super::polls::{Polling, Polls};
use crate::schedule::{Recv, Schedule, Send, Step};
use std::os::fd::BorrowedFd;
use std::time::Instant;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::reduce::Kernel;

/// What all ranks must agree on about one operation, and how long it may take.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// The number of the operation among those that run over this mesh; it rises by one with each.
    pub op_index: u64,
    /// The signature that ranks compare ([`OpDesc::signature`]).
    pub signature: u32,
    /// The operation, for the message if it differs.
    pub desc: OpDesc,
    /// The algorithm that made the schedule.
    pub path: Path,
    /// When to give up.
    pub deadline: Instant,
}

/// Another state machine that lives in the executor's poll loop, as an endpoint of a tree on its socket.
pub trait Interrupt {
    /// Return what to watch for input.
    fn poll_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Run the state machine: its socket is readable, or its time has come.
    ///
    /// # Errors
    /// What ends the operation, at this and then at all other ranks.
    fn check(&mut self) -> Result<(), ExecError>;

    /// Return when [`Self::check`] must run even without input.
    fn wake_at(&self) -> Option<Instant> {
        None
    }
}

/// Nothing else to do.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoInterrupt;

impl Interrupt for NoInterrupt {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<(), ExecError> {
        Ok(())
    }
}

/// Run `schedule` over `mesh`, in `buffers`: one buffer for input and output, or two.
///
/// They hold as many elements of the type of `ctx.desc` as [`Schedule::layout`] says; `kernel` is needed where the
/// schedule reduces. Every rank must call this with the same operation in the same order. The schedule is one that
/// [`crate::schedule::check`] lets pass.
///
/// # Errors
/// [`ExecError::Invalid`] if the arguments contradict each other: nothing has been sent. Any other error is the
/// operation's end at all ranks, and the mesh's: further calls return it again. The contents of the output, and of
/// a buffer for both, are then unspecified.
pub fn execute<'a>(
    mesh: &mut Mesh,
    schedule: &Schedule,
    kernel: Option<&Kernel>,
    buffers: impl Into<Buffers<'a>>,
    ctx: &Context,
    interrupt: &mut dyn Interrupt,
) -> Result<(), ExecError> {
    if let Some(error) = &mesh.poisoned {
        return Err(error.clone());
    }
    if schedule.place() != mesh.place {
        let what = format!("a schedule for {:?} on the mesh of {:?}", schedule.place(), mesh.place);
        return Err(ExecError::Invalid { what });
    }
    let element_bytes = ctx.desc.element_bytes();
    let mut work = std::mem::take(&mut mesh.work);
    let result = Memory::new(schedule, element_bytes, kernel, buffers.into(), &mut work).and_then(|memory| {
        let call = Call::new(mesh.rank(), ctx.op_index, ctx.signature, &ctx.desc, ctx.path);
        let step = Step::default();
        let (deadline, patience) = (ctx.deadline, Patience::default());
        let mut run = Run {
            mesh: &mut *mesh,
            schedule,
            memory,
            call,
            deadline,
            interrupt,
            index: 0,
            step,
            patience,
            lent: Vec::new(),
            is_between: false,
        };
        let Err(failure) = run.operation() else { return Ok(()) };
        run.abort(&failure);
        let (Failure::Found(error) | Failure::Told(error)) = failure;
        mesh.poisoned = Some(error.clone());
        Err(error)
    });
    mesh.work = work;
    result
}

/// One operation on its way.
pub(super) struct Run<'a> {
    pub(super) mesh: &'a mut Mesh,
    pub(super) schedule: &'a Schedule,
    pub(super) memory: Memory<'a>,
    pub(super) call: Call,
    pub(super) deadline: Instant,
    pub(super) interrupt: &'a mut dyn Interrupt,
    /// The present step.
    pub(super) index: usize,
    pub(super) step: Step<'a>,
    pub(super) patience: Patience,
    /// The messages of the call.
    pub(super) lent: Vec<Message<'a>>,
    /// There is no schedule, only messages: what peers send belongs to a later operation.
    pub(super) is_between: bool,
}

/// How far a transfer of the present step is.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    pub(super) bytes: usize,
    pub(super) done: bool,
}

/// Why an operation ends early.
#[derive(Debug)]
pub(super) enum Failure {
    /// This rank has found it: all others must be told.
    Found(ExecError),
    /// Another rank has told it: those connected to this one are told too.
    Told(ExecError),
}

impl From<ExecError> for Failure {
    fn from(error: ExecError) -> Self {
        Self::Found(error)
    }
}

impl Run<'_> {
    /// Run all steps.
    fn operation(&mut self) -> Result<(), Failure> {
        self.mesh.links.iter_mut().for_each(|link| link.begin_operation());
        self.dial_peers()?;
        for peer in 0..self.mesh.links.len() {
            // What a peer that was ahead has sent belongs to this operation now, or it should not be there.
            if let Some(header) = self.mesh.links[peer].rx.frame {
                self.admit(&header)?;
            }
        }
        self.mesh.wants.clear();
        let mut polls = Polls::default();
        let schedule = self.schedule;
        while let Some(step) = schedule.step(self.index) {
            self.step = step;
            reset(&mut self.mesh.sends, step.sends.len());
            reset(&mut self.mesh.recvs, step.recvs.len());
            for local in step.locals {
                self.memory.run_local(local, &mut self.mesh.scratch, &mut self.mesh.spare);
            }
            while !self.is_step_done() {
                let moved = self.move_bytes()?;
                match polls.after(moved) {
                    Polling::Not => {}
                    Polling::Yield => std::thread::yield_now(),
                    Polling::Look => self.watch(false)?,
                    Polling::Block => self.watch(true)?,
                }
            }
            self.index += 1;
        }
        Ok(())
    }

    /// Dial the higher ranks of all steps at once, so that the steps don't wait for connections one by one.
    fn dial_peers(&mut self) -> Result<(), ExecError> {
        for step in self.schedule.steps() {
            for peer in step.sends.iter().map(Send::peer).chain(step.recvs.iter().map(Recv::peer)) {
                if peer > self.mesh.rank() && matches!(self.mesh.links[peer.0 as usize].state, State::Idle) {
                    self.mesh.dial(peer)?;
                }
            }
        }
        Ok(())
    }

    fn is_step_done(&self) -> bool {
        self.mesh.sends.iter().chain(&self.mesh.recvs).all(|progress| progress.done)
    }

    /// Give each open transfer of the step one system call or a few; return whether any byte moved.
    fn move_bytes(&mut self) -> Result<bool, Failure> {
        let mut moved = false;
        for slot in 0..self.step.recvs.len() {
            if is_next(self.step.recvs, &self.mesh.recvs, slot) {
                moved |= self.receive(slot)?;
            }
        }
        for slot in 0..self.step.sends.len() {
            if is_next(self.step.sends, &self.mesh.sends, slot) {
                moved |= self.send(slot)?;
            }
        }
        Ok(moved)
    }

    fn send(&mut self, slot: usize) -> Result<bool, Failure> {
        let Send { peer, from } = self.step.sends[slot];
        let link = &mut self.mesh.links[peer.0 as usize];
        match link.state {
            State::Ready(_) => {}
            State::Ended => return Err(ExecError::RankLost { rank: peer }.into()),
            _ => return Ok(false),
        }
        let progress = &mut self.mesh.sends[slot];
        let bytes = self.memory.outgoing(from);
        match link.write_transfer(&self.call, bytes, progress.bytes) {
            Moved::WouldBlock => Ok(false),
            Moved::Ended => Err(self.last_words(peer)),
            Moved::Bytes(n) => {
                progress.bytes += n;
                self.mesh.sent_bytes += n as u64;
                if link.tx.is_between_frames() && progress.bytes == bytes.len() {
                    progress.done = true;
                    link.tx.turn += 1;
                }
                Ok(true)
            }
        }
    }

    fn receive(&mut self, slot: usize) -> Result<bool, Failure> {
        let recv = self.step.recvs[slot];
        let peer = recv.peer;
        let index = peer.0 as usize;
        match self.mesh.links[index].state {
            State::Ready(_) => {}
            State::Ended => return Err(ExecError::RankLost { rank: peer }.into()),
            _ => return Ok(false),
        }
        let total = self.memory.len_bytes(&recv);
        let header = match self.mesh.links[index].rx.frame {
            Some(header) => header,
            None => match self.receive_header(peer)? {
                Some(header) => header,
                None => return Ok(false),
            },
        };
        if header.kind == FrameKind::Abort {
            return self.receive_abort(peer).map(|()| false);
        }
        if header.transfer_bytes != total as u64 {
            let (from, to, op_index) = (peer, self.call.rank, self.call.op_index);
            let (sent_bytes, expected_bytes) = (header.transfer_bytes, total as u64);
            return Err(ExecError::Length { from, to, op_index, sent_bytes, expected_bytes }.into());
        }
        let rx = &self.mesh.links[index].rx;
        let room = total - self.mesh.recvs[slot].bytes;
        if rx.left_bytes == header.len_bytes && (header.len_bytes > room || header.len_bytes == 0 && total != 0) {
            let what = format!("a frame of {} bytes where {room} are expected", header.len_bytes);
            return Err(ExecError::protocol(peer, what).into());
        }
        if rx.left_bytes != 0 {
            match self.land(slot, &recv) {
                Moved::Bytes(n) => self.mesh.recvs[slot].bytes += n,
                Moved::WouldBlock => return Ok(false),
                Moved::Ended => return Err(ExecError::RankLost { rank: peer }.into()),
            }
        }
        let rx = &mut self.mesh.links[index].rx;
        if rx.left_bytes == 0 {
            rx.frame = None;
            if self.mesh.recvs[slot].bytes == total {
                self.mesh.recvs[slot].done = true;
                rx.turn += 1;
            }
        }
        Ok(true)
    }

    /// Receive payload: straight to its place, or, where something is to be done with it, through the scratch memory.
    fn land(&mut self, slot: usize, recv: &Recv) -> Moved {
        let link = &mut self.mesh.links[recv.peer.0 as usize];
        let at_bytes = self.mesh.recvs[slot].bytes;
        if let Some(place) = self.memory.direct(recv) {
            return link.read_payload(&mut place[at_bytes..]);
        }
        let carried = link.rx.carry_len;
        let scratch = &mut self.mesh.scratch;
        scratch[..carried].copy_from_slice(&link.rx.carry[..carried]);
        let moved = link.read_payload(&mut scratch[carried..]);
        let Moved::Bytes(n) = moved else { return moved };
        let held = carried + n;
        let each = self.memory.bytes_each(recv.sent_from);
        let (whole, tail) = scratch[..held].split_at(held - held % each);
        link.rx.carry[..tail.len()].copy_from_slice(tail);
        link.rx.carry_len = tail.len();
        let at = (at_bytes - carried) / each;
        self.memory.land(recv.sent_from, &recv.landing, at, whole, &mut self.mesh.spare);
        moved
    }

    /// Receive a header; `None` if it is not complete yet.
    pub(super) fn receive_header(&mut self, peer: Rank) -> Result<Option<Header>, Failure> {
        let link = &mut self.mesh.links[peer.0 as usize];
        match link.fill_header(HEADER_BYTES) {
            Moved::WouldBlock => return Ok(None),
            Moved::Ended => {
                link.state = State::Ended;
                return if self.needs(peer) || self.mesh.messages.awaits_lane(peer) {
                    Err(ExecError::RankLost { rank: peer }.into())
                } else {
                    Ok(None)
                };
            }
            Moved::Bytes(_) => {}
        }
        let header = Header::parse(peer, &link.rx.bytes)?;
        link.rx.frame = Some(header);
        link.rx.left_bytes = header.len_bytes;
        self.admit(&header)?;
        Ok((header.kind == FrameKind::Data).then_some(header))
    }

    /// Check a frame against the operation: use it, hold it for later, or fail.
    pub(super) fn admit(&mut self, header: &Header) -> Result<(), Failure> {
        let peer = header.call.rank;
        if header.kind == FrameKind::Abort {
            return self.receive_abort(peer);
        }
        let is_want = header.kind == FrameKind::Want;
        let theirs = &header.call;
        if self.is_between || theirs.op_index > self.call.op_index && !self.awaits(peer) {
            return Ok(());
        }
        // A want may be old: what its rank waited for was on its way.
        if !(is_want && theirs.op_index < self.call.op_index) {
            self.compare(theirs)?;
        }
        if is_want {
            self.mesh.links[peer.0 as usize].rx.frame = None;
            return Ok(());
        }
        let turn = self.mesh.links[peer.0 as usize].rx.turn;
        if header.step != turn {
            return Err(ExecError::protocol(peer, format!("transfer {} where {turn} is next", header.step)).into());
        }
        Ok(())
    }

    /// Check that a peer is in the same operation.
    pub(super) fn compare(&self, theirs: &Call) -> Result<(), ExecError> {
        if theirs.op_index != self.call.op_index || theirs.signature != self.call.signature {
            return Err(ExecError::mismatch(self.call, *theirs));
        }
        Ok(())
    }

    /// Receive the payload of an abort; fails with what it tells once it is complete.
    pub(super) fn receive_abort(&mut self, peer: Rank) -> Result<(), Failure> {
        let link = &mut self.mesh.links[peer.0 as usize];
        while link.rx.left_bytes != 0 {
            let mut piece = [0; 64];
            match link.read_payload(&mut piece) {
                Moved::Bytes(n) => link.rx.abort.extend_from_slice(&piece[..n]),
                Moved::WouldBlock => return Ok(()),
                Moved::Ended => return Err(ExecError::RankLost { rank: peer }.into()),
            }
        }
        Err(Failure::Told(AbortFrame::parse(peer, &link.rx.abort)))
    }

    /// Find out why `peer` takes nothing any more: what it has sent before it closed may say so.
    pub(super) fn last_words(&mut self, peer: Rank) -> Failure {
        let index = peer.0 as usize;
        loop {
            match self.mesh.links[index].rx.frame {
                Some(Header { kind: FrameKind::Data | FrameKind::Want, .. })
                    if self.mesh.links[index].rx.left_bytes == 0 =>
                {
                    self.mesh.links[index].rx.frame = None;
                }
                Some(Header { kind: FrameKind::Data, .. }) => {
                    let moved = self.mesh.links[index].read_payload(&mut self.mesh.scratch);
                    if !matches!(moved, Moved::Bytes(_)) {
                        return ExecError::RankLost { rank: peer }.into();
                    }
                }
                Some(_) => match self.receive_abort(peer) {
                    Ok(()) => return ExecError::RankLost { rank: peer }.into(),
                    Err(failure) => return failure,
                },
                None => match self.receive_header(peer) {
                    // The order of frames does not matter any more, only whether there is an abort.
                    Ok(Some(_)) | Err(Failure::Found(ExecError::Protocol { .. })) => {}
                    Ok(None) => return ExecError::RankLost { rank: peer }.into(),
                    Err(failure) => return failure,
                },
            }
        }
    }

    /// Return whether the rest of the schedule receives from `peer`.
    fn awaits(&self, peer: Rank) -> bool {
        let open = open(self.step.recvs, &self.mesh.recvs).any(|recv| recv.peer == peer);
        open || self.later_steps().any(|step| step.recvs.iter().any(|recv| recv.peer == peer))
    }

    /// Return whether the rest of the schedule has anything to do with `peer`.
    pub(super) fn needs(&self, peer: Rank) -> bool {
        let open = open(self.step.sends, &self.mesh.sends).any(|send| send.peer == peer);
        let later = |step: Step<'_>| step.sends.iter().any(|send| send.peer == peer);
        open || self.awaits(peer) || self.later_steps().any(later)
    }

    fn later_steps(&self) -> impl Iterator<Item = Step<'_>> {
        (self.index + 1..self.schedule.len()).filter_map(|index| self.schedule.step(index))
    }
}

/// One end of a message.
pub(super) trait End {
    fn peer(&self) -> Rank;
}

impl End for Send {
    fn peer(&self) -> Rank {
        self.peer
    }
}

impl End for Recv {
    fn peer(&self) -> Rank {
        self.peer
    }
}

/// Return whether message `slot` is open, and the first open one with its peer.
pub(super) fn is_next<T: End>(messages: &[T], progress: &[Progress], slot: usize) -> bool {
    !progress[slot].done && open(&messages[..slot], progress).all(|other| other.peer() != messages[slot].peer())
}

/// Return the messages that are not done.
pub(super) fn open<'a, T: End>(messages: &'a [T], progress: &'a [Progress]) -> impl Iterator<Item = &'a T> {
    messages.iter().zip(progress).filter(|(_, progress)| !progress.done).map(|(message, _)| message)
}

fn reset(progress: &mut Vec<Progress>, len: usize) {
    progress.clear();
    progress.resize(len, Progress::default());
}
