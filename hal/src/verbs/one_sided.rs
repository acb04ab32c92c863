//! A reliable connection through which one side accesses the other's memory with RDMA READ and WRITE.
//!
//! Both ends exchange their addresses ([`OneSided::end`]) over the control plane and connect to each other. Operations
//! are queued and posted together: a flush posts once and requests one completion, for the last operation; a reliable
//! connection completes in order, so this covers all before it. The hardware retransmits lost packets; a peer that does
//! not acknowledge for some seconds is considered dead ([`LinkError::PeerGone`]).
//!
//! Invariants:
//! - Queueing, flushing and polling take no lock and allocate nothing.
//! - `done <= posted <= written <= done + OPERATIONS`.
//! - The first error ends the connection: operations queued after the failed one did not take place, or only in part.
//! - After [`OneSided::fence`] no operation that the peer has begun through this connection takes effect in local
//!   memory.

mod connection;
mod ending;

use connection::random_psn;
pub(super) use connection::{connect, prepare};

use super::config::VerbsError;
use super::datagrams::Source;
use super::ibv;
use super::objects::{Completions, Context};
use super::pair::{BARRIER, QueuePair};
use super::region::{ExposedRegion, VerbsDomain};
use super::shared_receives::SharedReceives;
use super::slots::Slots;
use crate::remote::{LinkError, RegionError, RemoteRegion};
use serde::{Deserialize, Serialize};
use std::ptr;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// The maximum number of operations in flight.
pub(super) const OPERATIONS: usize = 128;

/// The length of messages to send inline: a few ring entries.
const INLINE_LEN_BYTES: u32 = 192;

/// Completions fetched in one call.
const BATCH: usize = 16;

/// The address of one end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OneSidedEnd {
    /// The GID of its port.
    pub gid: [u8; 16],
    /// The LID of its port; 0 on RoCE.
    pub lid: u16,
    /// The number of its queue pair.
    pub qpn: u32,
    /// Its initial packet sequence number, 24 bits.
    pub psn: u32,
    /// The MTU of its port in bytes.
    pub mtu_bytes: u16,
    /// The RDMA READs that it serves at a time; 0: not known, as of earlier releases.
    pub reads: u8,
}

/// Why an operation was not queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PostError {
    /// The maximum number of operations is in flight: flush and poll.
    #[error("{OPERATIONS} operations are in flight: flush and poll")]
    Full,
    /// The local or remote range is out of bounds.
    #[error(transparent)]
    Range(#[from] RegionError),
    /// The operation is too long.
    #[error("{len_bytes} bytes in one operation; the limit is {MESSAGE_MAX_BYTES}")]
    Length {
        /// The requested length.
        len_bytes: u64,
    },
    /// The connection has ended.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// The maximum length of an operation: Soft-RoCE's limit, the lowest known.
pub(super) const MESSAGE_MAX_BYTES: u32 = 8 << 20;

/// The progress of a connection's operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// All operations of a lower number are complete.
    pub done: u64,
    /// The error that ended the connection; operation `done` is the one that failed.
    pub error: Option<LinkError>,
}

/// One end of a connection.
pub struct OneSided {
    /// `None` once it is destroyed.
    pair: Option<QueuePair>,
    completions: Arc<Completions>,
    requests: Box<[ibv::ibv_send_wr]>,
    pieces: Box<[ibv::ibv_sge]>,
    taken: [ibv::ibv_wc; BATCH],
    written: u64,
    posted: u64,
    done: u64,
    error: Option<LinkError>,
    /// The number after the last completed operation, also a failed one.
    returned: u64,
    /// All that the peer had begun before the connection was stopped has taken effect.
    is_settled: bool,
    /// The length of messages that are copied into their request, so that the device need not read them from memory.
    max_inline_len_bytes: usize,
    end: OneSidedEnd,
    context: Arc<Context>,
    /// Polls without a completion.
    idle_polls: u32,
    /// Since when nothing has completed, though operations are in flight.
    stalled: Option<Instant>,
    from: Source,
    /// Buffers of messages until they are acknowledged, on a connection with messages.
    slots: Option<Slots>,
    stats: LinkStats,
}

/// Counters of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LinkStats {
    /// Operations queued: reads, writes and messages.
    pub operations: u64,
    /// Calls that posted operations.
    pub posts: u64,
    /// Completions received: one per post.
    pub completions: u64,
    /// Polls of the completion queue, empty ones included.
    pub polls: u64,
    /// Bytes read from the peer's memory.
    pub read_bytes: u64,
    /// Bytes written to the peer's memory.
    pub written_bytes: u64,
    /// Messages sent.
    pub messages: u64,
    /// Messages that the device did not have to read from memory.
    pub inline_messages: u64,
    /// The vendor's error (`vendor_err`) of the completion that ended the connection; 0 if none did.
    pub vendor_error: u32,
}

// SAFETY: the requests point to pieces of this connection, in heap memory that moves with it.
unsafe impl Send for OneSided {}

impl OneSided {
    pub(super) fn new(domain: &VerbsDomain, receives: Option<&SharedReceives>) -> Result<Self, VerbsError> {
        let context = &domain.domain.context;
        let completions = Completions::new(context, OPERATIONS + 1, receives.map(|receives| &receives.channel))?;
        let cap = |max_inline_data| ibv::ibv_qp_cap {
            max_send_wr: OPERATIONS as u32,
            // For the barrier of a fence.
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data,
        };
        let kind = ibv::ibv_qp_type::IBV_QPT_RC;
        let arrivals = receives.map_or(&completions, |receives| &receives.completions);
        let srq = receives.map(|receives| &receives.srq);
        let create = |inline| QueuePair::sharing(&domain.domain, kind, (&completions, arrivals, srq), cap(inline));
        // Only messages are sent inline, and not all devices support as much.
        let inline = if receives.is_some() { INLINE_LEN_BYTES } else { 0 };
        let (mut pair, max_inline_len_bytes) = create(inline).or_else(|_| create(0))?;
        prepare(&mut pair, &domain.from)?;
        let mut pieces: Box<[_]> = (0..OPERATIONS).map(|_| ibv::ibv_sge::default()).collect();
        let request =
            |piece: &mut ibv::ibv_sge| ibv::ibv_send_wr { sg_list: piece, num_sge: 1, ..ibv::ibv_send_wr::default() };
        let requests = pieces.iter_mut().map(request).collect();
        let end = OneSidedEnd {
            gid: domain.from.gid.gid,
            lid: if domain.attr.is_ethernet { 0 } else { domain.attr.lid },
            qpn: pair.number(),
            psn: random_psn(context)?,
            // At most 4096.
            mtu_bytes: domain.attr.mtu_bytes as u16,
            reads: domain.reads,
        };
        Ok(Self {
            pair: Some(pair),
            completions,
            requests,
            pieces,
            taken: [ibv::ibv_wc::default(); BATCH],
            written: 0,
            posted: 0,
            done: 0,
            error: None,
            returned: 0,
            is_settled: false,
            max_inline_len_bytes,
            end,
            context: Arc::clone(context),
            idle_polls: 0,
            stalled: None,
            from: domain.from,
            slots: receives.map(|_| Slots::new(&domain.domain)).transpose()?,
            stats: LinkStats::default(),
        })
    }

    /// Return the address of this end, for the other one.
    pub const fn end(&self) -> OneSidedEnd {
        self.end
    }

    /// Connect to the other end, which has to do the same.
    ///
    /// # Errors
    /// [`VerbsError`], also if the other host cannot be resolved.
    pub fn connect(&mut self, peer: &OneSidedEnd) -> Result<(), VerbsError> {
        let pair = self.pair.as_mut().ok_or_else(|| VerbsError::Refused {
            what: "connect a fenced queue pair",
            device: self.context.name.clone(),
            source: std::io::ErrorKind::NotConnected.into(),
        })?;
        connect(pair, &self.from, (&self.end, peer))
    }

    /// Queue an RDMA READ of `len_bytes` from the peer's region at offset `there.1` into the local region at offset
    /// `here.1`. Returns the operation's number.
    ///
    /// # Errors
    /// [`PostError`]; nothing is queued then.
    pub fn read(
        &mut self,
        here: (&mut ExposedRegion, u64),
        there: (&RemoteRegion, u64),
        len_bytes: u64,
    ) -> Result<u64, PostError> {
        self.queue(ibv::ibv_wr_opcode::IBV_WR_RDMA_READ, (here.0, here.1), there, len_bytes)
    }

    /// Queue an RDMA WRITE of `len_bytes` from the local region at offset `here.1` to the peer's at offset `there.1`.
    /// Returns the operation's number.
    ///
    /// # Errors
    /// [`PostError`]; nothing is queued then.
    pub fn write(
        &mut self,
        here: (&ExposedRegion, u64),
        there: (&RemoteRegion, u64),
        len_bytes: u64,
    ) -> Result<u64, PostError> {
        self.queue(ibv::ibv_wr_opcode::IBV_WR_RDMA_WRITE, here, there, len_bytes)
    }

    fn queue(
        &mut self,
        opcode: ibv::ibv_wr_opcode::Type,
        here: (&ExposedRegion, u64),
        there: (&RemoteRegion, u64),
        len_bytes: u64,
    ) -> Result<u64, PostError> {
        let length = u32::try_from(len_bytes).ok().filter(|_| len_bytes <= u64::from(MESSAGE_MAX_BYTES));
        let length = length.ok_or(PostError::Length { len_bytes })?;
        let here = here.0.local(here.1, len_bytes)?;
        let remote_addr = there.0.at(there.1, len_bytes)?;
        self.queue_checked((opcode, None), here, (remote_addr, there.0.rkey), length)
    }

    /// Send a message of at most [`MESSAGE_LEN_BYTES`](crate::remote::MESSAGE_LEN_BYTES), together with the operations
    /// queued before it. Returns false, and sends nothing, if there is no room now, or if the connection has no
    /// messages.
    ///
    /// # Errors
    /// [`LinkError`] if the connection has ended.
    pub fn send(&mut self, message: &[u8]) -> Result<bool, LinkError> {
        self.error.map_or(Ok(()), Err)?;
        // Poll only if it looks full: completions that somebody waits for are polled for anyway.
        if !self.has_room_for_message() {
            self.poll().error.map_or(Ok(()), Err)?;
        }
        if !self.has_room_for_message() {
            return Ok(false);
        }
        let nth = self.written;
        let Some(slots) = &mut self.slots else { return Ok(false) };
        let here = slots.write(message, nth);
        let opcode = ibv::ibv_wr_opcode::IBV_WR_SEND;
        // Cannot fail: there is room, and no error.
        let queued = self.queue_checked((opcode, None), here, (0, 0), message.len() as u32);
        debug_assert_eq!(queued, Ok(nth));
        if message.len() <= self.max_inline_len_bytes {
            self.requests[ring_index(nth)].send_flags = ibv::ibv_send_flags::IBV_SEND_INLINE.0;
            self.stats.inline_messages += 1;
        }
        self.stats.messages += 1;
        self.flush();
        self.error.map_or(Ok(true), Err)
    }

    fn has_room_for_message(&self) -> bool {
        self.room() > 0 && self.slots.as_ref().is_some_and(|slots| slots.has_room(self.done))
    }

    /// Return the counters.
    pub const fn stats(&self) -> LinkStats {
        self.stats
    }

    /// Let the channel of the shared queue become readable on the next completion.
    pub(super) fn arm(&self) {
        self.completions.arm();
    }

    /// Queue an operation that was checked: local address and key, remote address and key, and at most
    /// [`MESSAGE_MAX_BYTES`]; with immediate data if the opcode takes it.
    pub(super) fn queue_checked(
        &mut self,
        (opcode, word): (ibv::ibv_wr_opcode::Type, Option<u32>),
        (addr, lkey): (u64, u32),
        (remote_addr, rkey): (u64, u32),
        length: u32,
    ) -> Result<u64, PostError> {
        self.error.map_or(Ok(()), Err)?;
        if self.written - self.done >= OPERATIONS as u64 {
            return Err(PostError::Full);
        }
        let nth = self.written;
        self.pieces[ring_index(nth)] = ibv::ibv_sge { addr, length, lkey };
        let request = &mut self.requests[ring_index(nth)];
        (request.wr_id, request.opcode, request.send_flags) = (nth, opcode, 0);
        request.__bindgen_anon_1.imm_data = word.unwrap_or(0).to_be();
        request.wr.rdma = ibv::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
        self.written += 1;
        self.stats.operations += 1;
        match opcode {
            ibv::ibv_wr_opcode::IBV_WR_RDMA_READ => self.stats.read_bytes += u64::from(length),
            ibv::ibv_wr_opcode::IBV_WR_SEND => {}
            _ => self.stats.written_bytes += u64::from(length),
        }
        Ok(nth)
    }

    /// Return how many more operations can be queued.
    pub(super) const fn room(&self) -> usize {
        // `written - done` never exceeds `OPERATIONS`.
        OPERATIONS - (self.written - self.done) as usize
    }

    /// Return whether nothing is in flight.
    pub(super) const fn is_idle(&self) -> bool {
        self.written == self.done
    }

    /// Return the error that ended the connection, if one was polled.
    pub const fn error(&self) -> Option<LinkError> {
        self.error
    }

    /// Post the queued operations.
    pub fn flush(&mut self) {
        let Some(pair) = self.pair.as_mut().filter(|_| self.posted < self.written && self.error.is_none()) else {
            return;
        };
        for nth in self.posted..self.written {
            let is_last = nth + 1 == self.written;
            let next: *mut _ = if is_last { ptr::null_mut() } else { &raw mut self.requests[ring_index(nth + 1)] };
            let request = &mut self.requests[ring_index(nth)];
            request.next = next;
            if is_last {
                request.send_flags |= ibv::ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
        }
        self.stats.posts += 1;
        let first = &raw mut self.requests[ring_index(self.posted)];
        // SAFETY: the chain consists of this connection's requests, which stay in place with their pieces; regions
        // dropped meanwhile are deregistered before their memory is freed, so the device refuses them.
        match unsafe { pair.post_send(first) } {
            Ok(()) => self.posted = self.written,
            Err(errno) => self.error = Some(LinkError::Status { status: errno.unsigned_abs(), vendor: 0 }),
        }
    }

    /// Poll for completions; return the progress.
    pub fn poll(&mut self) -> Progress {
        loop {
            self.stats.polls += 1;
            let count = self.completions.poll(&mut self.taken);
            self.stats.completions += count as u64;
            for completion in &self.taken[..count] {
                let nth = completion.wr_id();
                if nth == BARRIER {
                    self.is_settled = true;
                    continue;
                }
                self.returned = self.returned.max(nth + 1);
                if self.error.is_some() {
                    continue;
                }
                match error_of(completion) {
                    None => self.done = nth + 1,
                    // Completions are in order: all operations before it are complete.
                    error => {
                        (self.done, self.error) = (nth, error);
                        self.stats.vendor_error = completion.error().map_or(0, |(_, vendor)| vendor);
                    }
                }
            }
            if count < BATCH {
                self.check_device(count > 0);
                return Progress { done: self.done, error: self.error };
            }
        }
    }
}

impl std::fmt::Debug for OneSided {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OneSided")
            .field("end", &self.end)
            .field("written", &self.written)
            .field("done", &self.done)
            .field("error", &self.error)
            .field("vendor_error", &self.stats.vendor_error)
            .finish_non_exhaustive()
    }
}

fn error_of(completion: &ibv::ibv_wc) -> Option<LinkError> {
    use ibv::ibv_wc_status as status;
    completion.error().map(|(found, vendor)| match found {
        status::IBV_WC_REM_ACCESS_ERR | status::IBV_WC_REM_INV_REQ_ERR | status::IBV_WC_REM_OP_ERR => {
            LinkError::RemoteAccess
        }
        status::IBV_WC_RETRY_EXC_ERR | status::IBV_WC_RNR_RETRY_EXC_ERR => LinkError::PeerGone,
        status::IBV_WC_WR_FLUSH_ERR => LinkError::Fenced,
        status => LinkError::Status { status, vendor },
    })
}

fn ring_index(nth: u64) -> usize {
    (nth % OPERATIONS as u64) as usize
}
