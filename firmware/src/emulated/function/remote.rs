//! A rank on another host: its ring entries arrive as messages, and its memory is accessed by RDMA.
//!
//! Invariants:
//! - A rank's description of its memory is used for its own chains only; if it is wrong, the rank's own hardware
//!   refuses the access, which detaches the rank.
//! - The state kept for it is bounded: memory handed over and not registered by a limit, messages by their credits.

use super::{DetachReason, HANDED_OVER_MAX};
use crate::emulated::engine::BoardEngine;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use sumac_device::function::Mappings;
use sumac_hal::dma::RegionKey;
use sumac_hal::mmio::{COMPLETION_WORDS, EntryStatus, SUBMISSION_WORDS};
use sumac_hal::remote::{Carrier, CarrierError, CarrierEvent, LinkError, Memory};
use sumac_hal::shm::FunctionQueue;

/// The connection and link of a rank on another host.
pub(super) struct RemoteRank {
    /// The connection of the handshake, which closes when the rank's process ends.
    pub(super) stream: TcpStream,
    /// The engine's peer number.
    pub(super) peer: u16,
    carrier: Carrier<COMPLETION_WORDS, SUBMISSION_WORDS>,
    handed_over: BTreeMap<u64, Memory>,
}

impl RemoteRank {
    pub(super) fn new(stream: TcpStream, peer: u16, queues: &[FunctionQueue; 2]) -> Self {
        let carrier = Carrier::new(
            queues.each_ref().map(|queue| queue.completions.clone()),
            queues.each_ref().map(|queue| queue.submissions.clone()),
        );
        Self { stream, peer, carrier, handed_over: BTreeMap::new() }
    }

    /// Check whether the rank has closed the connection.
    pub(super) fn poll_connection(&mut self) -> Result<(), DetachReason> {
        check_open(&mut self.stream)
    }

    /// Move received entries into the rings, and send the rings' completions; true if there were any.
    pub(super) fn carry(&mut self, engine: &mut BoardEngine) -> Result<bool, DetachReason> {
        let Self { peer, carrier, handed_over, .. } = self;
        let mut is_over_limit = false;
        let polled = engine.with_link(*peer, |link| {
            carrier.poll(link, |event| {
                if let CarrierEvent::Memory(memory) = event {
                    is_over_limit |= handed_over.len() == HANDED_OVER_MAX;
                    if !is_over_limit {
                        handed_over.insert(memory.handle, memory);
                    }
                }
            })
        });
        let polled = polled.ok_or(DetachReason::Carrier(LinkError::Fenced.into()))?;
        let any = polled.map_err(|error| reason(error, &mut self.stream))?;
        if is_over_limit { Err(DetachReason::Memory) } else { Ok(any) }
    }

    pub(super) fn has_work(&mut self) -> bool {
        self.carrier.has_work()
    }

    pub(super) const fn advance_heartbeat(&mut self) {
        self.carrier.advance_heartbeat();
    }

    /// Return the mappings of its memory.
    pub(super) fn mappings<'a>(&'a mut self, engine: &'a mut BoardEngine) -> impl Mappings<Error = DetachReason> + 'a {
        RemoteMemory { handed_over: &mut self.handed_over, engine, peer: self.peer }
    }
}

/// Check whether the other side has closed the connection of the handshake.
fn check_open(stream: &mut TcpStream) -> Result<(), DetachReason> {
    match stream.read(&mut [0]) {
        Ok(0) => Err(DetachReason::Left),
        Ok(_) => Err(DetachReason::UnexpectedData),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
        Err(_) => Err(DetachReason::Left),
    }
}

/// Return why a rank is detached whose link has ended with `error`: if its connection has ended as well, its process
/// has. A process that is killed looks first as if it had given out wrong keys.
fn reason(error: CarrierError, stream: &mut TcpStream) -> DetachReason {
    match error {
        CarrierError::Link(_) if matches!(check_open(stream), Err(DetachReason::Left)) => DetachReason::Left,
        error => DetachReason::Carrier(error),
    }
}

/// Maps the memory that a rank described into the engine.
struct RemoteMemory<'a> {
    handed_over: &'a mut BTreeMap<u64, Memory>,
    engine: &'a mut BoardEngine,
    peer: u16,
}

impl Mappings for RemoteMemory<'_> {
    type Memory = Memory;
    type Error = DetachReason;

    fn find(&mut self, handle: u64) -> Result<Result<Memory, EntryStatus>, DetachReason> {
        // The message was sent before the entry, over the same link.
        Ok(self.handed_over.remove(&handle).ok_or(EntryStatus::BadRegion))
    }

    fn map(&mut self, key: RegionKey, memory: Memory, offset_bytes: u64, len_bytes: u64) -> Result<(), EntryStatus> {
        if offset_bytes != 0 || len_bytes > memory.region.len_bytes {
            return Err(EntryStatus::OutOfBounds);
        }
        self.engine.map_remote(key, self.peer, &memory)
    }

    fn unmap(&mut self, key: RegionKey) {
        self.engine.unmap(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    #[test]
    fn refused_access_of_a_process_that_has_ended_reads_as_its_end() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let rank = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let (mut stream, _) = listener.accept().expect("accepted");
        stream.set_nonblocking(true).expect("set");
        let refused = CarrierError::Link(LinkError::RemoteAccess);
        assert!(matches!(reason(refused, &mut stream), DetachReason::Carrier(error) if error == refused));
        drop(rank);
        stream.set_nonblocking(false).expect("set");
        assert!(matches!(reason(refused, &mut stream), DetachReason::Left));
        assert!(matches!(reason(CarrierError::Flood, &mut stream), DetachReason::Carrier(CarrierError::Flood)));
    }
}
