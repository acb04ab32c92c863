//! A connection by which one side reads and writes the other's memory (RDMA READ and WRITE; a reliable connection).
//!
//! Both ends say who they are ([`OneSided::end`]) over the control plane, and connect to each other. Operations are queued
//! and leave together: a flush posts once and asks for one completion, for the last; as a reliable connection completes in
//! order, that one tells of all before it. The hardware sends again what is lost; a peer that does not answer for some
//! seconds is gone ([`LinkError::PeerGone`]).
//!
//! Invariants:
//! - Queueing, flushing and polling take no lock and allocate nothing.
//! - `done <= posted <= written <= done + OPERATIONS`.
//! - The first error ends the connection: what was queued behind it has not taken place, or not wholly.
//! - After [`OneSided::fence`] nothing that the peer has begun by this connection takes effect in memory of this side.

use super::config::VerbsError;
use super::datagrams::way;
use super::objects::Completions;
use super::pair::QueuePair;
use super::region::{ExposedRegion, VerbsDomain};
use super::shared_receives::SharedReceives;
use super::slots::Slots;
use crate::remote::{LinkError, RegionError, RemoteRegion};
use ibverbs_sys as ibv;
use serde::{Deserialize, Serialize};
use std::ptr;
use std::sync::Arc;
use thiserror::Error;

/// Operations in flight.
const OPERATIONS: usize = 128;

/// Completions taken in one look.
const BATCH: usize = 16;

/// 4.096 us * 2^16, so 268 ms, without an acknowledgement: sent again, so often (InfiniBand Architecture Specification,
/// 9.7.6.1.3). One more would be for ever: to every device for a peer that is not ready, to Soft-RoCE also for one that is
/// silent. A quarter of the time gives peers up that are there: on a lossy link between machines that share a processor,
/// seven losses in a row and pauses of half a second happen.
const TIMEOUT: u8 = 16;
const RETRIES: u8 = 6;

/// How often the kernel is asked to find the other host: about a second each time.
const FIND_TRIES: u32 = 3;

/// How often a stopped connection is asked for what it has left.
const DRAIN_LOOKS: u32 = 100_000;

/// An end of a connection, as the other has to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OneSidedEnd {
    /// Its port's global identifier.
    pub gid: [u8; 16],
    /// Its port's local identifier; 0 on RoCE.
    pub lid: u16,
    /// Its queue pair.
    pub qpn: u32,
    /// The number of its first packet, of 24 bits.
    pub psn: u32,
    /// The longest packet of its port in bytes.
    pub mtu_bytes: u16,
}

/// Why an operation was not queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PostError {
    /// As many as can be are in flight: flush and poll.
    #[error("{OPERATIONS} operations are in flight: flush and poll")]
    Full,
    /// The range here, or there.
    #[error(transparent)]
    Range(#[from] RegionError),
    /// Longer than any message.
    #[error("{len_bytes} bytes in one operation; the limit is {MESSAGE_MAX_BYTES}")]
    Length {
        /// What was asked for.
        len_bytes: u64,
    },
    /// The connection is at its end.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// The longest operation: that of Soft-RoCE, the shortest known.
pub(super) const MESSAGE_MAX_BYTES: u32 = 8 << 20;

/// How far the operations of a connection are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// All operations of a lower number are complete.
    pub done: u64,
    /// What ended the connection: the operation `done` is the one that failed.
    pub error: Option<LinkError>,
}

/// An end of a connection.
pub struct OneSided {
    pair: QueuePair,
    completions: Arc<Completions>,
    requests: Box<[ibv::ibv_send_wr]>,
    pieces: Box<[ibv::ibv_sge]>,
    taken: [ibv::ibv_wc; BATCH],
    written: u64,
    posted: u64,
    done: u64,
    error: Option<LinkError>,
    /// Completions of what was posted last, also failed ones.
    returned: u64,
    end: OneSidedEnd,
    from: super::objects::GidEntry,
    reads: u8,
    /// Where messages lie until they are acknowledged, on a connection that sends some.
    slots: Option<Slots>,
    stats: LinkStats,
}

/// What a connection has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LinkStats {
    /// Operations: reads, writes and messages.
    pub operations: u64,
    /// Calls that posted operations.
    pub posts: u64,
    /// Completions that were asked for: one a post.
    pub completions: u64,
    /// Looks at the completion queue, empty ones included.
    pub polls: u64,
    /// Bytes that were asked for from the peer's memory.
    pub read_bytes: u64,
    /// Bytes that were sent to the peer's memory.
    pub written_bytes: u64,
    /// Messages.
    pub messages: u64,
}

// SAFETY: the requests point to pieces of this connection, which moves as a whole.
unsafe impl Send for OneSided {}

impl OneSided {
    pub(super) fn new(domain: &VerbsDomain, receives: Option<&SharedReceives>) -> Result<Self, VerbsError> {
        let context = &domain.domain.context;
        let completions = Completions::new(context, OPERATIONS, receives.map(|receives| &receives.channel))?;
        let cap = ibv::ibv_qp_cap {
            max_send_wr: OPERATIONS as u32,
            // Nothing is received, which some devices take for a mistake.
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let kind = ibv::ibv_qp_type::IBV_QPT_RC;
        let arrivals = receives.map_or(&completions, |receives| &receives.completions);
        let srq = receives.map(|receives| &receives.srq);
        let (mut pair, _) = QueuePair::sharing(&domain.domain, kind, (&completions, arrivals, srq), cap)?;
        prepare(&mut pair, domain.gid.port)?;
        let mut pieces: Box<[_]> = (0..OPERATIONS).map(|_| ibv::ibv_sge::default()).collect();
        let request =
            |piece: &mut ibv::ibv_sge| ibv::ibv_send_wr { sg_list: piece, num_sge: 1, ..ibv::ibv_send_wr::default() };
        let requests = pieces.iter_mut().map(request).collect();
        let end = OneSidedEnd {
            gid: domain.gid.gid,
            lid: if domain.attr.is_ethernet { 0 } else { domain.attr.lid },
            qpn: pair.number(),
            psn: random_psn(context)?,
            // At most 4096.
            mtu_bytes: domain.attr.mtu_bytes as u16,
        };
        Ok(Self {
            pair,
            completions,
            requests,
            pieces,
            taken: [ibv::ibv_wc::default(); BATCH],
            written: 0,
            posted: 0,
            done: 0,
            error: None,
            returned: 0,
            end,
            from: domain.gid,
            reads: domain.reads,
            slots: receives.map(|_| Slots::new(&domain.domain)).transpose()?,
            stats: LinkStats::default(),
        })
    }

    /// Return what the other end has to know.
    pub const fn end(&self) -> OneSidedEnd {
        self.end
    }

    /// Connect to the other end, which does the same.
    ///
    /// # Errors
    /// [`VerbsError`], also if the other host is not found.
    pub fn connect(&mut self, peer: &OneSidedEnd) -> Result<(), VerbsError> {
        connect(&mut self.pair, &self.from, (&self.end, peer), self.reads)
    }

    /// Queue: read `len_bytes` at `there.1` of the peer's region into this side's at `here.1`. Returns the operation's
    /// number.
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

    /// Queue: write `len_bytes` of this side's region at `here.1` to the peer's at `there.1`. Returns the operation's number.
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

    /// Send a message of at most [`MESSAGE_LEN_BYTES`](crate::remote::MESSAGE_LEN_BYTES), behind what is queued, which leaves
    /// with it; false, and nothing, if there is no room now, or never on a connection without messages.
    ///
    /// # Errors
    /// [`LinkError`]: the connection is at its end.
    pub fn send(&mut self, message: &[u8]) -> Result<bool, LinkError> {
        self.error.map_or(Ok(()), Err)?;
        // Only when it looks full: what is waited for is polled for anyway.
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
        // It has room, and no error.
        let queued = self.queue_checked((opcode, None), here, (0, 0), message.len() as u32);
        debug_assert_eq!(queued, Ok(nth));
        self.stats.messages += 1;
        self.flush();
        self.error.map_or(Ok(true), Err)
    }

    fn has_room_for_message(&self) -> bool {
        self.room() > 0 && self.slots.as_ref().is_some_and(|slots| slots.has_room(self.done))
    }

    /// Return what was counted.
    pub const fn stats(&self) -> LinkStats {
        self.stats
    }

    /// Let the channel of the shared queue become readable when something is complete.
    pub(super) fn arm(&self) {
        self.completions.arm();
    }

    /// Queue what was checked: an address and key here, and there, and at most [`MESSAGE_MAX_BYTES`]; with a word for the peer
    /// if the opcode takes one.
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
        self.pieces[place(nth)] = ibv::ibv_sge { addr, length, lkey };
        let request = &mut self.requests[place(nth)];
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

    /// Return how many operations there is room for.
    pub(super) const fn room(&self) -> usize {
        // `written - done` never exceeds it.
        OPERATIONS - (self.written - self.done) as usize
    }

    /// Tell whether nothing is in flight.
    pub(super) const fn is_idle(&self) -> bool {
        self.written == self.done
    }

    /// Return what ended the connection, as far as was looked.
    pub const fn error(&self) -> Option<LinkError> {
        self.error
    }

    /// Let what is queued leave.
    pub fn flush(&mut self) {
        if self.posted == self.written || self.error.is_some() {
            return;
        }
        for nth in self.posted..self.written {
            let is_last = nth + 1 == self.written;
            let next: *mut _ = if is_last { ptr::null_mut() } else { &raw mut self.requests[place(nth + 1)] };
            let request = &mut self.requests[place(nth)];
            request.next = next;
            if is_last {
                request.send_flags = ibv::ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
        }
        self.stats.posts += 1;
        let first = &raw mut self.requests[place(self.posted)];
        // SAFETY: the chain is of this connection's requests, which stay where they are, as their pieces do; regions that
        // are dropped meanwhile are deregistered before their memory goes, so that the device refuses them.
        match unsafe { self.pair.post_send(first) } {
            Ok(()) => self.posted = self.written,
            Err(errno) => self.error = Some(LinkError::Status(errno.unsigned_abs())),
        }
    }

    /// Look how far the operations are.
    pub fn poll(&mut self) -> Progress {
        loop {
            self.stats.polls += 1;
            let count = self.completions.poll(&mut self.taken);
            self.stats.completions += count as u64;
            for completion in &self.taken[..count] {
                let nth = completion.wr_id();
                self.returned = self.returned.max(nth + 1);
                if self.error.is_some() {
                    continue;
                }
                match error_of(completion) {
                    None => self.done = nth + 1,
                    // In order: what is before it is complete.
                    error => (self.done, self.error) = (nth, error),
                }
            }
            if count < BATCH {
                return Progress { done: self.done, error: self.error };
            }
        }
    }

    /// End the connection: afterwards nothing that the peer has begun takes effect in memory of this side, and what this
    /// side has begun is complete or will not be. What this peer had keys of is revoked, so that it can't come by another
    /// connection either.
    ///
    /// # Errors
    /// [`VerbsError`]: then the peer may still reach the regions, and they must not be trusted.
    pub fn fence<'a>(&mut self, regions: impl IntoIterator<Item = &'a mut ExposedRegion>) -> Result<(), VerbsError> {
        self.pair.stop()?;
        for _ in 0..DRAIN_LOOKS {
            self.poll();
            if self.returned >= self.posted {
                break;
            }
            std::thread::yield_now();
        }
        self.error = self.error.or(Some(LinkError::Fenced));
        regions.into_iter().try_for_each(ExposedRegion::revoke)
    }
}

impl std::fmt::Debug for OneSided {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OneSided")
            .field("end", &self.end)
            .field("written", &self.written)
            .field("done", &self.done)
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

/// Open a new reliable queue pair of this port to peers' reads and writes.
pub(super) fn prepare(pair: &mut QueuePair, port: u8) -> Result<(), VerbsError> {
    let access = ibv::ibv_access_flags::IBV_ACCESS_REMOTE_READ | ibv::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
    let attr = ibv::ibv_qp_attr {
        qp_state: ibv::ibv_qp_state::IBV_QPS_INIT,
        port_num: port,
        qp_access_flags: access.0,
        ..ibv::ibv_qp_attr::default()
    };
    use ibv::ibv_qp_attr_mask as mask;
    pair.modify(attr, mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS)
}

/// Connect a prepared queue pair, of the end `here`, to `peer`.
pub(super) fn connect(
    pair: &mut QueuePair,
    from: &super::objects::GidEntry,
    (here, peer): (&OneSidedEnd, &OneSidedEnd),
    reads: u8,
) -> Result<(), VerbsError> {
    use ibv::ibv_qp_attr_mask as mask;
    let mtu_bytes = peer.mtu_bytes.min(here.mtu_bytes).max(256);
    let attr = ibv::ibv_qp_attr {
        qp_state: ibv::ibv_qp_state::IBV_QPS_RTR,
        // 256 bytes are 1, each doubling one more (enum ibv_mtu).
        path_mtu: mtu_bytes.ilog2() - 7,
        dest_qp_num: peer.qpn & PSN_MASK,
        rq_psn: peer.psn & PSN_MASK,
        max_dest_rd_atomic: reads,
        min_rnr_timer: 12,
        ah_attr: way(from, peer.gid, peer.lid),
        ..ibv::ibv_qp_attr::default()
    };
    let further = mask::IBV_QP_AV
        | mask::IBV_QP_PATH_MTU
        | mask::IBV_QP_DEST_QPN
        | mask::IBV_QP_RQ_PSN
        | mask::IBV_QP_MAX_DEST_RD_ATOMIC
        | mask::IBV_QP_MIN_RNR_TIMER;
    let mut tries = 1..FIND_TRIES;
    loop {
        match pair.modify(attr, further) {
            Ok(()) => break,
            // The kernel asks once for the other host's link address, and the question or its answer was lost.
            Err(VerbsError::Refused { source, .. })
                if source.kind() == std::io::ErrorKind::TimedOut && tries.next().is_some() => {}
            Err(error) => return Err(error),
        }
    }
    let attr = ibv::ibv_qp_attr {
        qp_state: ibv::ibv_qp_state::IBV_QPS_RTS,
        sq_psn: here.psn,
        timeout: TIMEOUT,
        retry_cnt: RETRIES,
        rnr_retry: RETRIES,
        max_rd_atomic: reads,
        ..ibv::ibv_qp_attr::default()
    };
    let further = mask::IBV_QP_SQ_PSN
        | mask::IBV_QP_TIMEOUT
        | mask::IBV_QP_RETRY_CNT
        | mask::IBV_QP_RNR_RETRY
        | mask::IBV_QP_MAX_QP_RD_ATOMIC;
    pair.modify(attr, further)
}

fn error_of(completion: &ibv::ibv_wc) -> Option<LinkError> {
    use ibv::ibv_wc_status as status;
    completion.error().map(|(found, _)| match found {
        status::IBV_WC_REM_ACCESS_ERR | status::IBV_WC_REM_INV_REQ_ERR | status::IBV_WC_REM_OP_ERR => {
            LinkError::RemoteAccess
        }
        status::IBV_WC_RETRY_EXC_ERR | status::IBV_WC_RNR_RETRY_EXC_ERR => LinkError::PeerGone,
        status::IBV_WC_WR_FLUSH_ERR => LinkError::Fenced,
        other => LinkError::Status(other),
    })
}

/// Numbers of packets and queue pairs have 24 bits.
const PSN_MASK: u32 = (1 << 24) - 1;

/// Draw the first packet's number: one that packets of an earlier connection do not have.
fn random_psn(context: &super::objects::Context) -> Result<u32, VerbsError> {
    let mut bytes = [0; 4];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(|errno| {
        VerbsError::Refused { what: "draw a packet number", device: context.name.clone(), source: errno.into() }
    })?;
    Ok(u32::from_ne_bytes(bytes) & PSN_MASK)
}

fn place(nth: u64) -> usize {
    (nth % OPERATIONS as u64) as usize
}
