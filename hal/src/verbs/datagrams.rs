//! An unreliable-datagram queue pair, and the address handles that it sends with.

use super::config::VerbsError;
use super::ibv;
use super::objects::{Completions, Domain, GidEntry};
use super::pair::QueuePair;
use crate::traffic_class::TrafficClass;
use std::ptr::NonNull;
use std::sync::Arc;

/// An address handle: the route to a port.
pub(super) struct AddressHandle {
    raw: NonNull<ibv::ibv_ah>,
    _domain: Arc<Domain>,
}

// SAFETY: as of `Context`.
unsafe impl Send for AddressHandle {}

impl AddressHandle {
    /// Create a handle for the port of `gid` and `lid`, with `from` as the source. On RoCE the kernel resolves the link
    /// address during this call, which blocks until the other host answers, for at most about a second.
    pub(super) fn new(domain: &Arc<Domain>, from: &Source, gid: [u8; 16], lid: u16) -> Result<Self, VerbsError> {
        let mut attr = address_attr(from, gid, lid);
        // SAFETY: a domain, and attributes that are read only.
        let raw = NonNull::new(unsafe { ibv::ibv_create_ah(domain.raw.as_ptr(), &raw mut attr) });
        let raw = raw.ok_or_else(|| VerbsError::last("resolve a peer's address", &domain.context.name))?;
        Ok(Self { raw, _domain: Arc::clone(domain) })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv::ibv_ah {
        self.raw.as_ptr()
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // SAFETY: destroyed once, when no packet that uses it is in flight.
        unsafe { ibv::ibv_destroy_ah(self.raw.as_ptr()) };
    }
}

/// Where packets come from, and how networks treat them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source {
    pub(super) gid: GidEntry,
    pub(super) traffic_class: TrafficClass,
    pub(super) service_level: u8,
    /// The index of the partition key.
    pub(super) partition_index: u16,
}

/// Return the attributes of the route from `from` to the port of `gid` and `lid`.
pub(super) fn address_attr(from: &Source, gid: [u8; 16], lid: u16) -> ibv::ibv_ah_attr {
    ibv::ibv_ah_attr {
        grh: ibv::ibv_global_route {
            dgid: ibv::ibv_gid { raw: gid },
            sgid_index: from.gid.index,
            hop_limit: HOP_LIMIT,
            traffic_class: from.traffic_class.bits() | ECT_0,
            ..ibv::ibv_global_route::default()
        },
        dlid: lid,
        sl: from.service_level,
        is_global: 1,
        port_num: from.gid.port,
        ..ibv::ibv_ah_attr::default()
    }
}

/// The default of Linux for IP.
const HOP_LIMIT: u8 = 64;

/// ECN-capable transport, ECT(0) (RFC 3168, section 5).
const ECT_0: u8 = 0b10;

/// An unreliable-datagram queue pair.
pub(super) struct Datagrams {
    pub(super) pair: QueuePair,
    port: u8,
    partition_index: u16,
    pub(super) max_inline_len_bytes: usize,
}

/// The Q_Key of all these queue pairs: the hardware drops datagrams with another one. It is not secret, but keeps
/// packets of other programs away ("SUMA" in ASCII; the top bit is reserved).
pub(super) const Q_KEY: u32 = 0x5355_4d41;

impl Datagrams {
    /// Create a queue pair with room for `sends` and `receives` packets; it is not ready yet.
    pub(super) fn new(
        domain: &Arc<Domain>,
        from: &Source,
        (send, sends): (&Arc<Completions>, usize),
        (receive, receives): (&Arc<Completions>, usize),
    ) -> Result<Self, VerbsError> {
        let count = |n| u32::try_from(n).unwrap_or(u32::MAX);
        let with_inline = |max_inline_data| {
            let cap = ibv::ibv_qp_cap {
                max_send_wr: count(sends),
                max_recv_wr: count(receives),
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data,
            };
            QueuePair::new(domain, ibv::ibv_qp_type::IBV_QPT_UD, (send, receive), cap)
        };
        // Inline sends are optional: not all devices support as much.
        let (pair, max_inline_len_bytes) = with_inline(INLINE_LEN_BYTES).or_else(|_| with_inline(0))?;
        Ok(Self { pair, port: from.gid.port, partition_index: from.partition_index, max_inline_len_bytes })
    }

    pub(super) const fn port(&self) -> u8 {
        self.port
    }

    /// Bring it to ready-to-send, from any state.
    pub(super) fn start(&mut self) -> Result<(), VerbsError> {
        use ibv::ibv_qp_attr_mask as mask;
        use ibv::ibv_qp_state as state;
        let steps = [
            (state::IBV_QPS_RESET, mask(0)),
            (state::IBV_QPS_INIT, mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_QKEY),
            (state::IBV_QPS_RTR, mask(0)),
            (state::IBV_QPS_RTS, mask::IBV_QP_SQ_PSN),
        ];
        steps.into_iter().try_for_each(|(qp_state, further)| {
            let attr = ibv::ibv_qp_attr {
                qp_state,
                qkey: Q_KEY,
                port_num: self.port,
                pkey_index: self.partition_index,
                ..ibv::ibv_qp_attr::default()
            };
            self.pair.modify(attr, further)
        })
    }
}

/// The length of packets to send inline: a wire header and small payloads.
const INLINE_LEN_BYTES: u32 = 192;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_has_the_traffic_class_beside_ecn() {
        let gid = GidEntry { gid: [7; 16], port: 2, index: 3, is_v2: true };
        for (bits, expected) in [(0, 0b10), (0xb8, 0xba), (0xfc, 0xfe)] {
            let traffic_class = TrafficClass::try_from(bits).expect("no bits of ECN");
            let attr = address_attr(&Source { gid, traffic_class, service_level: 5, partition_index: 0 }, [9; 16], 0);
            assert_eq!((attr.grh.traffic_class, attr.grh.sgid_index, attr.port_num, attr.sl), (expected, 3, 2, 5));
        }
    }
}
