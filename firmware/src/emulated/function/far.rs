//! A rank on another host: its entries come as messages, and its memory is reached by RDMA.
//!
//! Invariants:
//! - What a rank tells of its memory is used for its own chains only; what is a lie, its own hardware refuses, and that is its
//!   end.
//! - What is kept of it is bounded: memory handed over and not registered, and messages by their credits.

use super::{Ended, HANDED_OVER_MAX};
use crate::emulated::engine::BoardEngine;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use sumac_device::function::Mappings;
use sumac_hal::dma::RegionKey;
use sumac_hal::mmio::{COMPLETION_WORDS, EntryStatus, SUBMISSION_WORDS};
use sumac_hal::remote::{Carrier, Heard, LinkError, Memory};
use sumac_hal::shm::FunctionQueue;

/// What is of a rank on another host.
pub(super) struct Far {
    /// That of the set-up. It hangs up when the rank's process ends.
    pub(super) stream: TcpStream,
    /// The engine's number of it.
    pub(super) peer: u16,
    carrier: Carrier<COMPLETION_WORDS, SUBMISSION_WORDS>,
    handed_over: BTreeMap<u64, Memory>,
}

impl Far {
    pub(super) fn new(stream: TcpStream, peer: u16, queues: &[FunctionQueue; 2]) -> Self {
        let carrier = Carrier::new(
            queues.each_ref().map(|queue| queue.completions.clone()),
            queues.each_ref().map(|queue| queue.submissions.clone()),
        );
        Self { stream, peer, carrier, handed_over: BTreeMap::new() }
    }

    /// Look whether the rank is there.
    pub(super) fn hear(&mut self) -> Result<(), Ended> {
        match self.stream.read(&mut [0]) {
            Ok(0) => Err(Ended::Left),
            Ok(_) => Err(Ended::Talks),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(_) => Err(Ended::Left),
        }
    }

    /// Take messages into the rings, and send what is in them; true if there was anything.
    pub(super) fn carry(&mut self, engine: &mut BoardEngine) -> Result<bool, Ended> {
        let Self { peer, carrier, handed_over, .. } = self;
        let mut is_much = false;
        let turned = engine.with_link(*peer, |link| {
            carrier.turn(link, |heard| {
                if let Heard::Memory(memory) = heard {
                    is_much |= handed_over.len() == HANDED_OVER_MAX;
                    if !is_much {
                        handed_over.insert(memory.handle, memory);
                    }
                }
            })
        });
        let any = turned.ok_or(Ended::Carrier(LinkError::Fenced.into()))?.map_err(Ended::Carrier)?;
        if is_much { Err(Ended::Memory) } else { Ok(any) }
    }

    pub(super) fn has_news(&mut self) -> bool {
        self.carrier.has_news()
    }

    pub(super) const fn beat(&mut self) {
        self.carrier.beat();
    }

    /// Reach its memory.
    pub(super) fn mappings<'a>(&'a mut self, engine: &'a mut BoardEngine) -> impl Mappings<End = Ended> + 'a {
        FarMemory { handed_over: &mut self.handed_over, engine, peer: self.peer }
    }
}

/// A rank's memory, as it has told of it.
struct FarMemory<'a> {
    handed_over: &'a mut BTreeMap<u64, Memory>,
    engine: &'a mut BoardEngine,
    peer: u16,
}

impl Mappings for FarMemory<'_> {
    type Memory = Memory;
    type End = Ended;

    fn find(&mut self, handle: u64) -> Result<Result<Memory, EntryStatus>, Ended> {
        // It was sent before the entry, over the same link.
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
