//! A queue pair of either kind: what both have in common.

use super::config::VerbsError;
use super::objects::{Completions, Domain};
use super::shared_receives::Srq;
use ibverbs_sys as ibv;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// A queue pair.
pub(super) struct QueuePair {
    raw: NonNull<ibv::ibv_qp>,
    pub(super) domain: Arc<Domain>,
    _send: Arc<Completions>,
    _receive: Arc<Completions>,
    /// Held, as the others are.
    srq: Option<Arc<Srq>>,
}

// SAFETY: as of `Context`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Make a queue pair of this type and these limits; returns with it how many bytes go inline.
    pub(super) fn new(
        domain: &Arc<Domain>,
        qp_type: ibv::ibv_qp_type::Type,
        (send, receive): (&Arc<Completions>, &Arc<Completions>),
        cap: ibv::ibv_qp_cap,
    ) -> Result<(Self, usize), VerbsError> {
        Self::sharing(domain, qp_type, (send, receive, None), cap)
    }

    /// The same for one that receives in a queue that others receive in, too, if there is one.
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
        // SAFETY: just made, of these.
        let mut pair = unsafe { Self::adopt(raw, domain, (send, receive)) };
        pair.srq = srq.cloned();
        Ok((pair, init.cap.max_inline_data as usize))
    }

    /// Own a queue pair that was made in another way.
    ///
    /// # Safety
    /// It is of this domain and these queues, and nobody else gives it back.
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
        // SAFETY: a queue pair that is still there; its number never changes.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// Change the state, and what else the mask names.
    pub(super) fn modify(
        &mut self,
        mut attr: ibv::ibv_qp_attr,
        further: ibv::ibv_qp_attr_mask,
    ) -> Result<(), VerbsError> {
        let mask = ibv::ibv_qp_attr_mask::IBV_QP_STATE | further;
        // SAFETY: a queue pair, and attributes of which the library reads those that the mask names.
        let status = unsafe { ibv::ibv_modify_qp(self.raw.as_ptr(), &raw mut attr, mask.0.cast_signed()) };
        self.domain.context.check(status, "change a queue pair's state")
    }

    /// Let everything that is on its way come back as failed; from then on the device does nothing more for a peer.
    pub(super) fn stop(&mut self) -> Result<(), VerbsError> {
        let attr = ibv::ibv_qp_attr { qp_state: ibv::ibv_qp_state::IBV_QPS_ERR, ..ibv::ibv_qp_attr::default() };
        self.modify(attr, ibv::ibv_qp_attr_mask(0))
    }

    /// Post a chain of requests to send. An error says that from some request on they were not taken.
    ///
    /// # Safety
    /// The chain is valid: each request and its pieces stay until its completion, or a later one's, has been taken; its
    /// memory is registered in this domain and nobody writes it meanwhile; its ways lead from this domain.
    pub(super) unsafe fn post_send(&mut self, first: *mut ibv::ibv_send_wr) -> Result<(), i32> {
        let mut refused = ptr::null_mut();
        // SAFETY: the driver's own function for this device, and the caller's promise.
        let status = unsafe {
            let ops = &self.domain.context.raw.as_ref().ops;
            ops.post_send.map(|post| post(self.raw.as_ptr(), first, &raw mut refused))
        };
        if status == Some(0) { Ok(()) } else { Err(status.unwrap_or(libc::ENOSYS)) }
    }

    /// Post a chain of buffers to receive in. An error says that from some buffer on they were not taken.
    ///
    /// # Safety
    /// The chain is valid during the call; its memory is registered in this domain, and nobody reads or writes it until
    /// its completion has been taken, or this queue pair is gone or stopped.
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
        // SAFETY: given back once; afterwards the device touches none of its memory.
        unsafe { ibv::ibv_destroy_qp(self.raw.as_ptr()) };
    }
}
