//! How much memory RDMA locks, for checks of the limit before anything is opened.
//!
//! The kernel counts registered memory and, with mlx5, the queues themselves against the process's limit
//! (`RLIMIT_MEMLOCK`, getrlimit(2)), so that a limit that is too low already shows when a completion queue is created.
//!
//! Invariant: the results are upper bounds of what this crate registers for itself (tested), plus the queues in mlx5's
//! layout. Memory that a caller registers for its operations comes on top.

use super::one_sided::OPERATIONS;
use super::rank::LANDED_MAX;
use super::shared_receives::REPOST_BATCH;
use super::{GUARANTEED_LEN_BYTES, rx, tx};
use crate::remote::{BUFFERS, MESSAGE_LEN_BYTES};

/// A page of the kernel; every queue and every buffer starts at one.
const PAGE_LEN_BYTES: usize = 4096;

/// The length of an mlx5 completion, of a receive request, and of a send request with inline data.
const COMPLETION_LEN_BYTES: usize = 64;
const RECEIVE_LEN_BYTES: usize = 32;
const SEND_LEN_BYTES: usize = 256;

/// mlx5 has as many entries as the next power of two.
const fn queue(entries: usize, entry_len_bytes: usize) -> usize {
    (entries.next_power_of_two() * entry_len_bytes).next_multiple_of(PAGE_LEN_BYTES)
}

/// A shared receive queue for messages.
const fn receives(buffers: usize) -> usize {
    let buffers = buffers + REPOST_BATCH - 1;
    let memory = (buffers * MESSAGE_LEN_BYTES).next_multiple_of(PAGE_LEN_BYTES);
    memory + queue(buffers, RECEIVE_LEN_BYTES) + queue(buffers, COMPLETION_LEN_BYTES)
}

/// A connection with messages.
const fn connection() -> usize {
    let slots = (BUFFERS * MESSAGE_LEN_BYTES).next_multiple_of(PAGE_LEN_BYTES);
    slots + queue(OPERATIONS, SEND_LEN_BYTES) + queue(OPERATIONS + 1, COMPLETION_LEN_BYTES)
}

/// Return how many bytes a port for packets locks, see [`VerbsConfig`](super::VerbsConfig).
pub const fn port_locked_bytes(receive_buffer_bytes: usize) -> u64 {
    let buffers = receive_buffer_bytes / GUARANTEED_LEN_BYTES;
    let buffers = if buffers < 2 * rx::BATCH { 2 * rx::BATCH } else { buffers };
    let received = (buffers * rx::STRIDE_LEN_BYTES).next_multiple_of(PAGE_LEN_BYTES)
        + queue(buffers, RECEIVE_LEN_BYTES)
        + queue(buffers, COMPLETION_LEN_BYTES);
    let sent = tx::PACKETS * rx::LONGEST_LEN_BYTES
        + queue(tx::PACKETS, SEND_LEN_BYTES)
        + queue(tx::PACKETS, COMPLETION_LEN_BYTES);
    (received + sent) as u64
}

/// Return how many bytes a rank's zero-copy link locks, without the memory that it exposes.
pub const fn rank_locked_bytes() -> u64 {
    (receives(LANDED_MAX + BUFFERS) + connection()) as u64
}

/// Return how many bytes a device locks for the zero-copy links of `ranks` ranks, of at most `ranks_max`, without its
/// own memory.
pub const fn device_locked_bytes(ranks: usize, ranks_max: usize) -> u64 {
    (receives(ranks_max * BUFFERS) + ranks * connection()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::fake::machine;
    use crate::verbs::{RankEnd, SharedReceives, VerbsConfig, VerbsDomain, VerbsPort};
    use std::net::Ipv4Addr;

    /// Check that what was registered is within the bound, and most of it.
    fn check(bound: u64) {
        let registered = machine(|machine| machine.registered_bytes());
        assert!(registered <= bound && bound < 2 * registered, "{registered} registered, {bound} computed");
    }

    #[test]
    fn bounds_cover_what_is_registered() {
        machine(|machine| _ = machine.add("mlx5_0", Ipv4Addr::LOCALHOST));
        for receive_buffer_bytes in [0, 1 << 20, 4 << 20] {
            let config = VerbsConfig { receive_buffer_bytes, ..VerbsConfig::default() };
            let _port = VerbsPort::open(&config).expect("a port");
            check(port_locked_bytes(receive_buffer_bytes));
        }
        let domain = || VerbsDomain::open(&VerbsConfig::default()).expect("a domain");
        let rank = RankEnd::new(domain()).expect("an end");
        check(rank_locked_bytes());
        drop(rank);
        let domain = domain();
        let receives = SharedReceives::new(&domain, 4 * BUFFERS).expect("a queue");
        let _ends: Vec<_> = (0..3).map(|_| domain.messaging(&receives).expect("an end")).collect();
        check(device_locked_bytes(3, 4));
    }
}
