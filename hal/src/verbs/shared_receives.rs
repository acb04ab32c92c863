//! A shared receive queue (SRQ) for the messages of all connections of a domain: buffers are needed for what arrives at
//! a time, not for each connection.
//!
//! Invariants:
//! - A buffer is owned by the device, or holds one message of one connection until it is posted again.
//! - Polling takes no lock and allocates nothing; many buffers are posted again in one call.

use super::config::VerbsError;
use super::ibv;
use super::memory::RegisteredBuffer;
use super::objects::{Channel, Completions, Domain};
use super::region::VerbsDomain;
use crate::remote::{Arrived, MESSAGE_LEN_BYTES};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Completions fetched in one call.
const BATCH: usize = 32;

/// Free buffers that trigger a post.
pub(super) const REPOST_BATCH: usize = 16;

/// A shared receive queue, kept alive by the queue pairs that use it.
pub(super) struct Srq {
    raw: NonNull<ibv::ibv_srq>,
    domain: Arc<Domain>,
}

// SAFETY: as of `Context`.
unsafe impl Send for Srq {}
// SAFETY: as of `Context`.
unsafe impl Sync for Srq {}

impl Srq {
    fn new(domain: &Arc<Domain>, buffers: usize) -> Result<Arc<Self>, VerbsError> {
        let max_wr = u32::try_from(buffers).unwrap_or(u32::MAX);
        let attr = ibv::ibv_srq_attr { max_wr, max_sge: 1, srq_limit: 0 };
        let mut init = ibv::ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: a domain, and attributes that are valid for the call.
        let raw = NonNull::new(unsafe { ibv::ibv_create_srq(domain.raw.as_ptr(), &raw mut init) });
        let raw = raw.ok_or_else(|| VerbsError::last("create a shared receive queue", &domain.context.name))?;
        Ok(Arc::new(Self { raw, domain: Arc::clone(domain) }))
    }

    pub(super) const fn raw(&self) -> NonNull<ibv::ibv_srq> {
        self.raw
    }

    /// Post a chain of buffers.
    ///
    /// # Safety
    /// As for `QueuePair::post_receive`.
    unsafe fn post(&self, first: *mut ibv::ibv_recv_wr) -> bool {
        let mut refused = ptr::null_mut();
        // SAFETY: the driver's own function for this device; the caller ensures the rest.
        let status = unsafe {
            let ops = &self.domain.context.raw.as_ref().ops;
            ops.post_srq_recv.map(|post| post(self.raw.as_ptr(), first, &raw mut refused))
        };
        status == Some(0)
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: destroyed once, after the queue pairs that used it.
        unsafe { ibv::ibv_destroy_srq(self.raw.as_ptr()) };
    }
}

/// A message in its buffer, or the announcement of a result.
#[derive(Debug, Clone, Copy)]
pub(super) enum Received {
    Message { buffer: u32, len: u32 },
    Landed(u32),
}

/// Counters of a shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ReceiveStats {
    /// Messages received.
    pub messages: u64,
    /// Results announced.
    pub landed: u64,
    /// Polls of the completion queue, empty ones included.
    pub polls: u64,
    /// Calls that posted buffers.
    pub posts: u64,
}

/// The receive queue for the messages of a domain's connections.
pub struct SharedReceives {
    pub(super) srq: Arc<Srq>,
    pub(super) completions: Arc<Completions>,
    pub(super) channel: Arc<Channel>,
    requests: Box<[ibv::ibv_recv_wr]>,
    _pieces: Box<[ibv::ibv_sge]>,
    taken: [ibv::ibv_wc; BATCH],
    /// Buffers to post again.
    free: Vec<u32>,
    stats: ReceiveStats,
    // Dropped after everything that could still write to it.
    memory: RegisteredBuffer,
}

// SAFETY: the requests point to pieces of this value, in heap memory that moves with it.
unsafe impl Send for SharedReceives {}

impl SharedReceives {
    /// Create a queue in which `buffers` buffers are always posted or hold a message that was not taken; a few
    /// more wait to be posted together.
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn new(domain: &VerbsDomain, buffers: usize) -> Result<Self, VerbsError> {
        let buffers = buffers + REPOST_BATCH - 1;
        let context = &domain.domain.context;
        let channel = Channel::new(context)?;
        let completions = Completions::new(context, buffers, Some(&channel))?;
        let srq = Srq::new(&domain.domain, buffers)?;
        let memory = RegisteredBuffer::new(&domain.domain, buffers * MESSAGE_LEN_BYTES)?;
        let piece = |buffer: usize| ibv::ibv_sge {
            addr: memory.device_addr(buffer * MESSAGE_LEN_BYTES, MESSAGE_LEN_BYTES),
            length: MESSAGE_LEN_BYTES as u32,
            lkey: memory.lkey(),
        };
        let mut pieces: Box<[_]> = (0..buffers).map(piece).collect();
        let request =
            |piece: &mut ibv::ibv_sge| ibv::ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: piece, num_sge: 1 };
        let requests = pieces.iter_mut().map(request).collect();
        let mut receives = Self {
            srq,
            completions,
            channel,
            requests,
            _pieces: pieces,
            taken: [ibv::ibv_wc::default(); BATCH],
            free: (0..buffers as u32).collect(),
            stats: ReceiveStats::default(),
            memory,
        };
        if receives.repost() { Ok(receives) } else { Err(VerbsError::last("post buffers", &context.name)) }
    }

    /// Return the counters.
    pub const fn stats(&self) -> ReceiveStats {
        self.stats
    }

    /// Call `each` for every arrival, with the number of its queue pair; an arrival for which it returns false is
    /// discarded. Returns whether there was any.
    pub(super) fn poll(&mut self, mut each: impl FnMut(u32, Received) -> bool) -> bool {
        let mut any = false;
        loop {
            self.stats.polls += 1;
            let count = self.completions.poll(&mut self.taken);
            for completion in &self.taken[..count] {
                let buffer = completion.wr_id() as u32;
                // Buffers returned by a connection that has ended are empty.
                if !completion.is_valid() {
                    self.free.push(buffer);
                    continue;
                }
                match completion.imm_data() {
                    Some(landed) => {
                        self.stats.landed += 1;
                        self.free.push(buffer);
                        each(completion.qp_num, Received::Landed(u32::from_be(landed)));
                    }
                    None => {
                        self.stats.messages += 1;
                        // At most the length of the buffer.
                        let len = completion.len() as u32;
                        if !each(completion.qp_num, Received::Message { buffer, len }) {
                            self.free.push(buffer);
                        }
                    }
                }
            }
            any |= count > 0;
            if self.free.len() >= REPOST_BATCH {
                self.repost();
            }
            if count < BATCH {
                return any;
            }
        }
    }

    /// Copy a message out and release its buffer.
    pub(super) fn take(&mut self, received: Received, into: &mut [u8; MESSAGE_LEN_BYTES]) -> Arrived {
        match received {
            Received::Landed(offset) => Arrived::Landed(offset),
            Received::Message { buffer, len } => {
                let len = (len as usize).min(MESSAGE_LEN_BYTES);
                self.memory.copy_out(buffer as usize * MESSAGE_LEN_BYTES, &mut into[..len]);
                self.discard(received);
                Arrived::Message(len)
            }
        }
    }

    /// Release a message's buffer unread.
    pub(super) fn discard(&mut self, received: Received) {
        if let Received::Message { buffer, .. } = received {
            self.free.push(buffer);
            if self.free.len() >= REPOST_BATCH {
                self.repost();
            }
        }
    }

    /// Post all free buffers. They stay free if the device does not accept them now.
    fn repost(&mut self) -> bool {
        let mut next: *mut ibv::ibv_recv_wr = ptr::null_mut();
        for &buffer in &self.free {
            let request = &mut self.requests[buffer as usize];
            (request.wr_id, request.next) = (u64::from(buffer), next);
            next = request;
        }
        if next.is_null() {
            return true;
        }
        self.stats.posts += 1;
        // SAFETY: the chain consists of this value's requests, whose buffers are read only between their completion and
        // this post.
        let posted = unsafe { self.srq.post(next) };
        if posted {
            self.free.clear();
        }
        posted
    }

    /// Let the channel become readable on the next arrival.
    pub(super) fn arm(&self) {
        self.channel.take_events();
        self.completions.arm();
    }
}

impl std::fmt::Debug for SharedReceives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedReceives").field("stats", &self.stats).finish_non_exhaustive()
    }
}
