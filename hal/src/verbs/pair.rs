//! A queue pair, of either type.

use super::config::VerbsError;
use super::ibv;
use super::objects::{Completions, Domain};
use super::shared_receives::Srq;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// The number of the empty buffer behind everything that a stopped queue pair has received.
pub(super) const BARRIER: u64 = u64::MAX;

/// A queue pair.
pub(super) struct QueuePair {
    raw: NonNull<ibv::ibv_qp>,
    pub(super) domain: Arc<Domain>,
    _send: Arc<Completions>,
    _receive: Arc<Completions>,
    /// Kept alive, as the completion queues are.
    srq: Option<Arc<Srq>>,
}

// SAFETY: as of `Context`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Create a queue pair of this type and with these limits; returns also how many bytes can be sent inline.
    pub(super) fn new(
        domain: &Arc<Domain>,
        qp_type: ibv::ibv_qp_type::Type,
        (send, receive): (&Arc<Completions>, &Arc<Completions>),
        cap: ibv::ibv_qp_cap,
    ) -> Result<(Self, usize), VerbsError> {
        Self::sharing(domain, qp_type, (send, receive, None), cap)
    }

    /// As [`QueuePair::new`], receiving from a shared receive queue if `srq` is given.
    pub(super) fn sharing(
        domain: &Arc<Domain>,
        qp_type: ibv::ibv_qp_type::Type,
        (send, receive, srq): (&Arc<Completions>, &Arc<Completions>, Option<&Arc<Srq>>),
        cap: ibv::ibv_qp_cap,
    ) -> Result<(Self, usize), VerbsError> {
        let mut init = ibv::ibv_qp_init_attr {
            send_cq: send.raw.as_ptr(),
            recv_cq: receive.raw.as_ptr(),
            srq: srq.map_or(ptr::null_mut(), |srq| srq.raw().as_ptr()),
            cap,
            qp_type,
            ..ibv::ibv_qp_init_attr::default()
        };
        // SAFETY: a domain and queues of one device; the attributes are valid for the call.
        let raw = NonNull::new(unsafe { ibv::ibv_create_qp(domain.raw.as_ptr(), &raw mut init) });
        let raw = raw.ok_or_else(|| VerbsError::last("create a queue pair", &domain.context.name))?;
        // SAFETY: just created with these.
        let mut pair = unsafe { Self::adopt(raw, domain, (send, receive)) };
        pair.srq = srq.cloned();
        Ok((pair, init.cap.max_inline_data as usize))
    }

    /// Take ownership of a raw queue pair.
    ///
    /// # Safety
    /// It belongs to this domain and these queues, and nobody else destroys it.
    pub(super) unsafe fn adopt(
        raw: NonNull<ibv::ibv_qp>,
        domain: &Arc<Domain>,
        (send, receive): (&Arc<Completions>, &Arc<Completions>),
    ) -> Self {
        let (domain, send, receive) = (Arc::clone(domain), Arc::clone(send), Arc::clone(receive));
        Self { raw, domain, _send: send, _receive: receive, srq: None }
    }

    pub(super) const fn raw(&self) -> NonNull<ibv::ibv_qp> {
        self.raw
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the queue pair exists; its number never changes.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// Change the state, and the attributes in the mask.
    pub(super) fn modify(
        &mut self,
        mut attr: ibv::ibv_qp_attr,
        further: ibv::ibv_qp_attr_mask,
    ) -> Result<(), VerbsError> {
        let mask = ibv::ibv_qp_attr_mask::IBV_QP_STATE | further;
        // SAFETY: the queue pair exists; the library reads only the attributes in the mask.
        let status = unsafe { ibv::ibv_modify_qp(self.raw.as_ptr(), &raw mut attr, mask.0.cast_signed()) };
        self.domain.context.check(status, "change a queue pair's state")
    }

    /// Move to the error state: everything in flight completes with an error, and from then on the device performs no
    /// operation for a peer.
    pub(super) fn stop(&mut self) -> Result<(), VerbsError> {
        let attr = ibv::ibv_qp_attr { qp_state: ibv::ibv_qp_state::IBV_QPS_ERR, ..ibv::ibv_qp_attr::default() };
        self.modify(attr, ibv::ibv_qp_attr_mask(0))
    }

    /// Return whether it receives from a shared queue.
    pub(super) const fn is_sharing(&self) -> bool {
        self.srq.is_some()
    }

    /// After [`QueuePair::stop`], on a shared queue: return whether the device has reported that all that the peer had
    /// begun has reached memory, and all arrivals their completion queue (InfiniBand Architecture Specification,
    /// 11.5.2, "Last WQE Reached"). True once.
    pub(super) fn take_reached(&self) -> bool {
        let context = &self.domain.context;
        context.poll_events();
        context.events.take_reached(self.number())
    }

    /// After [`QueuePair::stop`], without a shared queue: post an empty buffer, whose completion, with the number
    /// [`BARRIER`], follows all that the peer had begun. False if there is no room.
    pub(super) fn post_barrier(&mut self) -> bool {
        let mut empty =
            ibv::ibv_recv_wr { wr_id: BARRIER, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };
        // SAFETY: a buffer without memory.
        unsafe { self.post_receive(&raw mut empty) }.is_ok()
    }

    /// Post a chain of send requests. On an error, the requests from some point of the chain on were not posted.
    ///
    /// # Safety
    /// The chain is valid: each request and its pieces stay in place until its completion, or a later one's, was
    /// polled; its memory is registered in this domain and not written meanwhile; its address handles belong to this
    /// domain.
    pub(super) unsafe fn post_send(&mut self, first: *mut ibv::ibv_send_wr) -> Result<(), i32> {
        let mut refused = ptr::null_mut();
        // SAFETY: the driver's own function for this device; the caller ensures the rest.
        let status = unsafe {
            let ops = &self.domain.context.raw.as_ref().ops;
            ops.post_send.map(|post| post(self.raw.as_ptr(), first, &raw mut refused))
        };
        if status == Some(0) { Ok(()) } else { Err(status.unwrap_or(libc::ENOSYS)) }
    }

    /// Post a chain of receive buffers. On an error, the buffers from some point of the chain on were not posted.
    ///
    /// # Safety
    /// The chain is valid during the call; its memory is registered in this domain and not accessed until its
    /// completion was polled, or this queue pair is destroyed or stopped.
    pub(super) unsafe fn post_receive(&mut self, first: *mut ibv::ibv_recv_wr) -> Result<(), i32> {
        let mut refused = ptr::null_mut();
        // SAFETY: as in `post_send`.
        let status = unsafe {
            let ops = &self.domain.context.raw.as_ref().ops;
            ops.post_recv.map(|post| post(self.raw.as_ptr(), first, &raw mut refused))
        };
        if status == Some(0) { Ok(()) } else { Err(status.unwrap_or(libc::ENOSYS)) }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let number = self.number();
        // SAFETY: destroyed once; afterwards the device does not access its memory.
        unsafe { ibv::ibv_destroy_qp(self.raw.as_ptr()) };
        self.domain.context.events.take_reached(number);
    }
}
