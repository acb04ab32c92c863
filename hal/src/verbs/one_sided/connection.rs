//! The states of a reliable queue pair: prepared on a port, then connected to its peer.

use super::OneSidedEnd;
use crate::verbs::config::VerbsError;
use crate::verbs::datagrams::{Source, address_attr};
use crate::verbs::ibv;
use crate::verbs::objects::Context;
use crate::verbs::pair::QueuePair;

/// The acknowledgement timeout, 4.096 us * 2^16 = 268 ms, and the number of retries (InfiniBand Architecture
/// Specification, 9.7.6.1.3). 7 retries would mean unlimited: on every device for a receiver that is not ready, on
/// Soft-RoCE also for one that sends nothing. A quarter of the timeout ends connections to peers that still run: on a
/// lossy link between machines that share a processor, seven losses in a row and pauses of half a second occur.
const TIMEOUT: u8 = 16;
const RETRIES: u8 = 6;

/// How long the peer waits before it tries again to send to a queue without buffers: 40.96 ms (table 45). With as many
/// retries as above that is as long as one acknowledgement timeout. Buffers suffice for all that may be outstanding, so
/// this is for a process that does not run.
const RECEIVER_NOT_READY: u8 = 24;

/// How often the kernel tries to resolve the other host, about a second each time.
const FIND_TRIES: u32 = 3;

/// Initialise a new reliable queue pair on the port of `from`, with remote read and write access.
pub(in crate::verbs) fn prepare(pair: &mut QueuePair, from: &Source) -> Result<(), VerbsError> {
    let access = ibv::ibv_access_flags::IBV_ACCESS_REMOTE_READ | ibv::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
    let attr = ibv::ibv_qp_attr {
        qp_state: ibv::ibv_qp_state::IBV_QPS_INIT,
        port_num: from.gid.port,
        pkey_index: from.partition_index,
        qp_access_flags: access.0,
        ..ibv::ibv_qp_attr::default()
    };
    use ibv::ibv_qp_attr_mask as mask;
    pair.modify(attr, mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS)
}

/// Connect a prepared queue pair, of the end `here`, to `peer`.
pub(in crate::verbs) fn connect(
    pair: &mut QueuePair,
    from: &Source,
    (here, peer): (&OneSidedEnd, &OneSidedEnd),
) -> Result<(), VerbsError> {
    use ibv::ibv_qp_attr_mask as mask;
    let mtu_bytes = peer.mtu_bytes.min(here.mtu_bytes).max(256);
    let attr = ibv::ibv_qp_attr {
        qp_state: ibv::ibv_qp_state::IBV_QPS_RTR,
        // `enum ibv_mtu`: 256 bytes are 1, each doubling adds 1.
        path_mtu: mtu_bytes.ilog2() - 7,
        dest_qp_num: peer.qpn & PSN_MASK,
        rq_psn: peer.psn & PSN_MASK,
        max_dest_rd_atomic: here.reads,
        min_rnr_timer: RECEIVER_NOT_READY,
        ah_attr: address_attr(from, peer.gid, peer.lid),
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
            // The kernel asks only once for the other host's link address, and the request or its answer may have been
            // lost.
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
        max_rd_atomic: if peer.reads == 0 { here.reads } else { here.reads.min(peer.reads) },
        ..ibv::ibv_qp_attr::default()
    };
    let further = mask::IBV_QP_SQ_PSN
        | mask::IBV_QP_TIMEOUT
        | mask::IBV_QP_RETRY_CNT
        | mask::IBV_QP_RNR_RETRY
        | mask::IBV_QP_MAX_QP_RD_ATOMIC;
    pair.modify(attr, further)
}

/// Packet sequence numbers and queue pair numbers have 24 bits.
const PSN_MASK: u32 = (1 << 24) - 1;

/// Draw a random initial packet sequence number, so that packets of an earlier connection are not accepted.
pub(super) fn random_psn(context: &Context) -> Result<u32, VerbsError> {
    let mut bytes = [0; 4];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).map_err(|errno| {
        VerbsError::Refused { what: "draw a packet number", device: context.name.clone(), source: errno.into() }
    })?;
    Ok(u32::from_ne_bytes(bytes) & PSN_MASK)
}
