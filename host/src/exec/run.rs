//! Executes one rank's schedule.
//!
//! Invariants:
//! - A step begins when the one before is done: all its bytes are received, and all its sends are in the kernel.
//! - Sends and receives of a step progress concurrently, so two ranks that send each other more than the sockets hold
//!   do not deadlock.
//! - A frame is used only if operation, signature and order match.

mod frames;
mod interrupt;
mod peers;

use super::announce::RetryTimer;
use super::board::{BoardScope, BoardUse};
use super::error::{Call, ExecError};
use super::frame::FrameKind;
use super::link::{COPY_MAX_BYTES, IoOutcome, State};
use super::memory::{Buffers, Memory, copy_bytes};
use super::mesh::Mesh;
use super::message::Message;
use super::poll_backoff::{NextPoll, PollBackoff};
use crate::schedule::{Recv, Schedule, Send, StepBuffer};
pub use interrupt::{Interrupt, NoInterrupt};
pub(super) use peers::{HasPeer, is_next, open};
use std::fmt;
use std::time::Instant;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::reduce::Kernel;

/// Parameters of one operation. All ranks must agree on everything but the deadline.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// Number of the operation on this mesh; increases by one with each.
    pub op_index: u64,
    /// The number of the call among all of its communicator, from 1, modulo 2^32; 0 if it is none. It tells a rank that
    /// is in another kind of operation whether others are in the same call.
    pub number: u32,
    /// The signature that ranks compare ([`OpDesc::signature`]).
    pub signature: u32,
    /// The operation, for error messages.
    pub desc: OpDesc,
    /// The algorithm of the schedule.
    pub path: Path,
    /// The deadline.
    pub deadline: Instant,
}

/// Where an operation stands when its caller gets control back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Status {
    /// It is complete.
    Done,
    /// Its interrupt has paused it. It continues where it was when it is driven again.
    Paused,
}

/// An operation on a mesh, from [`Execution::new`] until it is done or failed.
pub struct Execution<'a>(pub(super) Run<'a>);

impl fmt::Debug for Execution<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution").field("call", &self.0.call).field("step", &self.0.index).finish_non_exhaustive()
    }
}

impl<'a> Execution<'a> {
    /// Prepare to run `schedule` over `mesh`, in `buffers`: one buffer for input and output, or two.
    ///
    /// Buffers hold as many elements of the type of `ctx.desc` as [`Schedule::layout`] specifies. `kernel` is required
    /// if the schedule reduces. Every rank must do this with the same operations in the same order. The schedule must
    /// be one that [`crate::schedule::check`] accepts.
    ///
    /// # Errors
    /// [`ExecError::Invalid`] if the arguments contradict each other: nothing has been sent. The mesh's own error if it
    /// has ended.
    pub fn new(
        mesh: &'a mut Mesh,
        schedule: &'a Schedule,
        kernel: Option<&'a Kernel>,
        buffers: impl Into<Buffers<'a>>,
        ctx: &Context,
    ) -> Result<Self, ExecError> {
        if let Some(error) = &mesh.poisoned {
            return Err(error.clone());
        }
        if schedule.place() != mesh.place {
            let what = format!("a schedule for {:?} on the mesh of {:?}", schedule.place(), mesh.place);
            return Err(ExecError::Invalid { what });
        }
        let memory = Memory::new(schedule, ctx.desc.element_bytes(), kernel, buffers.into(), &mut mesh.work)?;
        let call = Call::new(mesh.rank(), ctx.op_index, ctx.signature, &ctx.desc, ctx.path);
        let run = Run::new(mesh, schedule, memory, (call, ctx.deadline), Vec::new(), false);
        Ok(Self(Run { number: ctx.number, ..run }))
    }

    /// Drive the operation until it is complete or paused.
    ///
    /// # Errors
    /// An error ends the operation on all ranks, and the mesh: further calls return it again. The contents of the
    /// output, and of a buffer for both, are then unspecified.
    pub fn drive(&mut self, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError> {
        if let Some(error) = &self.0.mesh.poisoned {
            return Err(error.clone());
        }
        self.0.run_steps(interrupt).map_err(|failure| self.0.fail(failure))
    }

    /// End the operation on all ranks, and the mesh, with an error of the caller's.
    pub fn cancel(&mut self, error: ExecError) {
        self.0.fail(Failure::Local(error));
    }

    /// Return the mesh, to post messages while the operation is paused.
    pub const fn mesh(&mut self) -> &mut Mesh {
        self.0.mesh
    }
}

impl Drop for Execution<'_> {
    fn drop(&mut self) {
        self.0.mesh.work = std::mem::take(&mut self.0.memory.work);
        self.0.mesh.step = std::mem::take(&mut self.0.step);
        // The caller gets its memory back, even in the middle of an operation.
        self.0.mesh.withdraw_references();
    }
}

/// Run `schedule` over `mesh` to completion, as [`Execution`] does; a pause is not waited for.
///
/// # Errors
/// As for [`Execution::new`] and [`Execution::drive`].
pub fn execute<'a>(
    mesh: &'a mut Mesh,
    schedule: &'a Schedule,
    kernel: Option<&'a Kernel>,
    buffers: impl Into<Buffers<'a>>,
    ctx: &Context,
    interrupt: &mut dyn Interrupt,
) -> Result<(), ExecError> {
    let mut execution = Execution::new(mesh, schedule, kernel, buffers, ctx)?;
    while execution.drive(interrupt)? == Status::Paused {}
    Ok(())
}

/// An operation in progress.
pub(super) struct Run<'a> {
    pub(super) mesh: &'a mut Mesh,
    pub(super) schedule: &'a Schedule,
    pub(super) memory: Memory<'a>,
    pub(super) call: Call,
    pub(super) number: u32,
    pub(super) deadline: Instant,
    /// Whether its frames and connections are prepared.
    is_begun: bool,
    polls: PollBackoff,
    /// What it does with the board.
    pub(super) board_use: BoardUse,
    /// Whose board that is.
    pub(super) scope: BoardScope,
    /// An attempt has begun it ([`super::round`]), and posted what the step sends or not.
    pub(super) attempted: Option<bool>,
    /// The current step, the only one in memory: in the mesh's room, which an [`Execution`] gives back.
    pub(super) index: usize,
    pub(super) step: StepBuffer,
    pub(super) announce_timer: RetryTimer,
    /// The messages of the call.
    pub(super) borrowed: Vec<Message<'a>>,
    /// There is no schedule, only messages: frames from peers belong to a later operation.
    pub(super) messages_only: bool,
}

/// Progress of a transfer of the current step.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    pub(super) bytes: usize,
    pub(super) done: bool,
}

/// Why an operation ends early.
#[derive(Debug)]
pub(super) enum Failure {
    /// Detected by this rank: all others must be notified.
    Local(ExecError),
    /// Reported by another rank: those connected to this one are notified too.
    Remote(ExecError),
}

impl From<ExecError> for Failure {
    fn from(error: ExecError) -> Self {
        Self::Local(error)
    }
}

impl<'a> Run<'a> {
    pub(super) fn new(
        mesh: &'a mut Mesh,
        schedule: &'a Schedule,
        memory: Memory<'a>,
        (call, deadline): (Call, Instant),
        borrowed: Vec<Message<'a>>,
        messages_only: bool,
    ) -> Self {
        let mut step = if messages_only { StepBuffer::default() } else { std::mem::take(&mut mesh.step) };
        // Nothing of it is posted before the operation begins.
        step.clear();
        let (polls, announce_timer) = (PollBackoff::new(mesh.waiting), RetryTimer::default());
        let (is_begun, index, board_use) = (false, 0, BoardUse::None);
        Self {
            mesh,
            schedule,
            memory,
            call,
            number: 0,
            deadline,
            is_begun,
            board_use,
            scope: BoardScope::default(),
            attempted: None,
            polls,
            index,
            step,
            announce_timer,
            borrowed,
            messages_only,
        }
    }

    /// End the operation and the mesh. Returns the error.
    pub(super) fn fail(&mut self, failure: Failure) -> ExecError {
        let failure = self.cause(failure);
        self.abort(&failure);
        let (Failure::Local(error) | Failure::Remote(error)) = failure;
        self.mesh.poisoned = Some(error.clone());
        error
    }

    /// Run the rest of the steps.
    fn run_steps(&mut self, interrupt: &mut dyn Interrupt) -> Result<Status, Failure> {
        if !std::mem::replace(&mut self.is_begun, true) {
            self.begin()?;
            if self.mesh.is_settling() && self.poll_sockets(false, interrupt)? == Status::Paused {
                return Ok(Status::Paused);
            }
        }
        while self.index < self.schedule.len() {
            while !self.is_step_done() {
                let moved = if self.board_use == BoardUse::Runs { self.move_on_board()? } else { self.move_bytes()? };
                let next = self.polls.after(moved);
                if self.wait(next, interrupt)? == Status::Paused {
                    return Ok(Status::Paused);
                }
            }
            self.index += 1;
            self.enter_step();
            self.begin_later_round();
        }
        self.end_on_board();
        self.mesh.next_op = self.mesh.next_op.max(self.call.op_index + u64::from(!self.messages_only));
        Ok(Status::Done)
    }

    /// Wait as the backoff says.
    pub(super) fn wait(&mut self, next: NextPoll, interrupt: &mut dyn Interrupt) -> Result<Status, Failure> {
        match next {
            NextPoll::Continue => Ok(Status::Done),
            NextPoll::Spin => {
                std::hint::spin_loop();
                Ok(Status::Done)
            }
            NextPoll::Yield => {
                self.mesh.yield_core();
                Ok(Status::Done)
            }
            NextPoll::Poll => self.poll_sockets(false, interrupt),
            NextPoll::Block => self.poll_sockets(true, interrupt),
        }
    }

    fn begin(&mut self) -> Result<(), Failure> {
        self.mesh.links.iter_mut().for_each(|link| link.begin_operation(self.number));
        self.mesh.withdraw_freed();
        self.begin_on_board()?;
        self.dial_peers()?;
        for peer in 0..self.mesh.links.len() {
            // Frames of a peer that was ahead belong to this operation now, or are an error.
            if let Some(header) = self.mesh.links[peer].rx.frame {
                self.check_frame(&header)?;
            }
        }
        self.mesh.announcements.clear();
        self.mesh.announced.clear();
        self.enter_step();
        self.continue_attempt();
        Ok(())
    }

    /// Begin the current step, unless all are done.
    fn enter_step(&mut self) {
        if self.index == self.schedule.len() || !self.schedule.read(self.index, &mut self.step) {
            return;
        }
        reset(&mut self.mesh.sends, self.step.sends.len());
        reset(&mut self.mesh.recvs, self.step.recvs.len());
        for local in &self.step.locals {
            self.memory.run_local(local, &mut self.mesh.scratch, &mut self.mesh.spare);
        }
    }

    pub(super) fn is_step_done(&self) -> bool {
        self.mesh.sends.iter().chain(&self.mesh.recvs).all(|progress| progress.done)
    }

    /// Give each open transfer of the step a few system calls; returns whether any byte moved.
    fn move_bytes(&mut self) -> Result<bool, Failure> {
        let mut moved = false;
        // Sends first: peers copy what references name, while a receive here copies for as long.
        for slot in 0..self.step.sends.len() {
            if is_next(&self.step.sends, &self.mesh.sends, slot) {
                moved |= self.send(slot)?;
            }
        }
        for slot in 0..self.step.recvs.len() {
            if is_next(&self.step.recvs, &self.mesh.recvs, slot) {
                moved |= self.receive(slot)?;
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
        match link.write_transfer(&self.call, self.memory.outgoing(from), self.mesh.sends[slot].bytes) {
            IoOutcome::WouldBlock => Ok(false),
            IoOutcome::Ended => Err(self.closing_error(peer)),
            IoOutcome::Bytes(n) => {
                self.note_sent(slot, n);
                Ok(true)
            }
        }
    }

    /// Note that `n` bytes of a send have left.
    fn note_sent(&mut self, slot: usize, n: usize) {
        let Send { peer, from } = self.step.sends[slot];
        let (tx, progress) = (&mut self.mesh.links[peer.0 as usize].tx, &mut self.mesh.sends[slot]);
        progress.bytes += n;
        self.mesh.sent_bytes += n as u64;
        if tx.is_between_frames() && progress.bytes == self.memory.outgoing(from).len() {
            progress.done = true;
            tx.transfers += 1;
        }
    }

    /// Note a reference that a peer has taken before it left.
    pub(super) fn note_taken(&mut self, peer: Rank) {
        let (sends, progress) = (&self.step.sends, &self.mesh.sends);
        let mut slots = (0..sends.len()).filter(|slot| sends[*slot].peer == peer && is_next(sends, progress, *slot));
        let (Some(slot), link) = (slots.next(), &mut self.mesh.links[peer.0 as usize]) else { return };
        let outcome = link.tx.reference.map(|number| link.finish_reference(number));
        if let Some(IoOutcome::Bytes(n)) = outcome {
            self.note_sent(slot, n);
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
                IoOutcome::Bytes(n) => self.mesh.recvs[slot].bytes += n,
                IoOutcome::WouldBlock => return Ok(false),
                // The peer may have withdrawn the payload, and say why.
                IoOutcome::Ended => return Err(self.closing_error(peer)),
            }
        }
        let rx = &mut self.mesh.links[index].rx;
        if rx.left_bytes == 0 {
            rx.frame = None;
            if self.mesh.recvs[slot].bytes == total {
                self.mesh.recvs[slot].done = true;
                rx.transfers += 1;
                self.note_board(&header);
            }
        }
        Ok(true)
    }

    /// Receive payload; out of memory that this rank has mapped, many pieces.
    fn land(&mut self, slot: usize, recv: &Recv) -> IoOutcome {
        let (mut landed, first) = (0, self.mesh.recvs[slot].bytes);
        loop {
            match self.land_piece(first + landed, recv) {
                IoOutcome::Bytes(n) => landed += n,
                other => return other,
            }
            if landed >= COPY_MAX_BYTES || !self.mesh.links[recv.peer.0 as usize].rx.is_mapped() {
                return IoOutcome::Bytes(landed);
            }
        }
    }

    /// Receive a piece of payload: directly into its destination or, if it must be processed, through the scratch
    /// memory.
    fn land_piece(&mut self, at_bytes: usize, recv: &Recv) -> IoOutcome {
        let link = &mut self.mesh.links[recv.peer.0 as usize];
        let carried = link.rx.carry_len;
        let mut scratch = link.aligned(&mut self.mesh.scratch, carried);
        if link.rx.is_mapped() {
            scratch = &mut scratch[..carried + MAPPED_PIECE_BYTES];
        }
        if let Some(place) = self.memory.direct(recv) {
            let place = &mut place[at_bytes..];
            if link.is_fast_to(place) {
                return link.read_payload(place);
            }
            let moved = link.read_payload(scratch);
            if let IoOutcome::Bytes(n) = moved {
                copy_bytes(&mut place[..n], &scratch[..n]);
            }
            return moved;
        }
        scratch[..carried].copy_from_slice(&link.rx.carry[..carried]);
        let moved = link.read_payload(&mut scratch[carried..]);
        let IoOutcome::Bytes(n) = moved else { return moved };
        let held = carried + n;
        let each = self.memory.bytes_each(recv.sent_from);
        let (whole, tail) = scratch[..held].split_at(held - held % each);
        link.rx.carry[..tail.len()].copy_from_slice(tail);
        link.rx.carry_len = tail.len();
        let at = (at_bytes - carried) / each;
        self.memory.land(recv.sent_from, &recv.landing, at, whole, &mut self.mesh.spare);
        moved
    }
}

fn reset(progress: &mut Vec<Progress>, len: usize) {
    progress.clear();
    progress.resize(len, Progress::default());
}

/// Mapped memory copied at a time to be processed: it stays in the core's first-level cache until it is.
const MAPPED_PIECE_BYTES: usize = 8 << 10;
