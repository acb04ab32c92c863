//! A queue pair for unreliable datagrams, and the ways that they go by.

use super::config::VerbsError;
use super::objects::{Completions, Domain, GidEntry};
use ibverbs_sys as ibv;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// A way to a port, by which a queue pair sends datagrams.
pub(super) struct Path {
    raw: NonNull<ibv::ibv_ah>,
    _domain: Arc<Domain>,
}

// SAFETY: as of `Context`.
unsafe impl Send for Path {}

impl Path {
    /// Make a way from the identifier `from` to the port of `gid` and `lid`. On RoCE the kernel looks up the link address
    /// meanwhile, which takes as long as the other host takes to answer, at most about a second.
    pub(super) fn new(domain: &Arc<Domain>, from: &GidEntry, gid: [u8; 16], lid: u16) -> Result<Self, VerbsError> {
        let mut attr = ibv::ibv_ah_attr {
            grh: ibv::ibv_global_route {
                dgid: ibv::ibv_gid { raw: gid },
                sgid_index: from.index,
                hop_limit: HOP_LIMIT,
                traffic_class: ECT_0,
                ..ibv::ibv_global_route::default()
            },
            dlid: lid,
            is_global: 1,
            port_num: from.port,
            ..ibv::ibv_ah_attr::default()
        };
        // SAFETY: a domain, and attributes that are read only.
        let raw = NonNull::new(unsafe { ibv::ibv_create_ah(domain.raw.as_ptr(), &raw mut attr) });
        let raw = raw.ok_or_else(|| VerbsError::last("find the way to a peer", &domain.context.name))?;
        Ok(Self { raw, _domain: Arc::clone(domain) })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv::ibv_ah {
        self.raw.as_ptr()
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        // SAFETY: given back once, when nothing that goes by it is on its way.
        unsafe { ibv::ibv_destroy_ah(self.raw.as_ptr()) };
    }
}

/// As far as a packet may go: the default of Linux for IP.
const HOP_LIMIT: u8 = 64;

/// ECN-capable transport, ECT(0) (RFC 3168, section 5).
const ECT_0: u8 = 0b10;

/// A queue pair for unreliable datagrams.
pub(super) struct Datagrams {
    raw: NonNull<ibv::ibv_qp>,
    port: u8,
    pub(super) max_inline_len_bytes: usize,
    domain: Arc<Domain>,
    _send: Arc<Completions>,
    _receive: Arc<Completions>,
}

// SAFETY: as of `Context`.
unsafe impl Send for Datagrams {}

/// The key of all queue pairs of this kind, without which a datagram is dropped by the hardware. It is no secret: it keeps
/// the packets of other programs away ("SUMA" in ASCII; the top bit is the system's).
pub(super) const Q_KEY: u32 = 0x5355_4d41;

impl Datagrams {
    /// Make a queue pair with room for so many packets on their way out and in; it is not ready yet.
    pub(super) fn new(
        domain: &Arc<Domain>,
        port: u8,
        (send, sends): (&Arc<Completions>, usize),
        (receive, receives): (&Arc<Completions>, usize),
    ) -> Result<Self, VerbsError> {
        let count = |n| u32::try_from(n).unwrap_or(u32::MAX);
        // What is sent inline is a wish: not all devices have so much.
        for inline in [INLINE_LEN_BYTES, 0] {
            let mut init = ibv::ibv_qp_init_attr {
                send_cq: send.raw.as_ptr(),
                recv_cq: receive.raw.as_ptr(),
                cap: ibv::ibv_qp_cap {
                    max_send_wr: count(sends),
                    max_recv_wr: count(receives),
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: inline,
                },
                qp_type: ibv::ibv_qp_type::IBV_QPT_UD,
                ..ibv::ibv_qp_init_attr::default()
            };
            // SAFETY: a domain and two queues of one device; the attributes are valid for the call.
            let raw = unsafe { ibv::ibv_create_qp(domain.raw.as_ptr(), &raw mut init) };
            if let Some(raw) = NonNull::new(raw) {
                let max_inline_len_bytes = init.cap.max_inline_data as usize;
                let (domain, send, receive) = (Arc::clone(domain), Arc::clone(send), Arc::clone(receive));
                return Ok(Self { raw, port, max_inline_len_bytes, domain, _send: send, _receive: receive });
            }
        }
        Err(VerbsError::last("create a queue pair", &domain.context.name))
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: a queue pair that is still there; its number never changes.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// Make it ready to receive and to send, from whatever state it is in.
    pub(super) fn start(&mut self) -> Result<(), VerbsError> {
        use ibv::ibv_qp_attr_mask as mask;
        use ibv::ibv_qp_state as state;
        self.modify(state::IBV_QPS_RESET, mask(0))?;
        self.modify(state::IBV_QPS_INIT, mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_QKEY)?;
        self.modify(state::IBV_QPS_RTR, mask(0))?;
        self.modify(state::IBV_QPS_RTS, mask::IBV_QP_SQ_PSN)
    }

    /// Let everything that is on its way come back as failed.
    pub(super) fn stop(&mut self) -> Result<(), VerbsError> {
        self.modify(ibv::ibv_qp_state::IBV_QPS_ERR, ibv::ibv_qp_attr_mask(0))
    }

    fn modify(&mut self, qp_state: ibv::ibv_qp_state::Type, further: ibv::ibv_qp_attr_mask) -> Result<(), VerbsError> {
        let mut attr = ibv::ibv_qp_attr { qp_state, qkey: Q_KEY, port_num: self.port, ..ibv::ibv_qp_attr::default() };
        let mask = ibv::ibv_qp_attr_mask::IBV_QP_STATE | further;
        // SAFETY: a queue pair, and attributes of which the library reads those that the mask names.
        let status = unsafe { ibv::ibv_modify_qp(self.raw.as_ptr(), &raw mut attr, mask.0.cast_signed()) };
        self.domain.context.check(status, "change a queue pair's state")
    }

    /// Post a chain of packets to send. An error says that from some packet on they were not taken.
    ///
    /// # Safety
    /// The chain is valid: each request and its places stay until its completion, or a later one's, has been taken; its
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

impl Drop for Datagrams {
    fn drop(&mut self) {
        // SAFETY: given back once; afterwards the device touches none of its memory.
        unsafe { ibv::ibv_destroy_qp(self.raw.as_ptr()) };
    }
}

/// What is to be sent with the request itself: a header of the wire, and small payloads.
const INLINE_LEN_BYTES: u32 = 192;
