//! The end of a group at this rank: no write of the device may follow, and no chunk may be left half-written
//! (PROTOCOL 5 to 7).
//!
//! What ends the device's writes, in the order in which it is tried:
//! 1. The device itself: it answers a fence when nothing of the group can take effect any more.
//! 2. The end of its process, if its connection has hung up and is the device's own, not a broker's.
//! 3. A device that is there and silent, or gone but not dead, keeps the memory it had, and this process gets fresh
//!    memory with the same contents at the same addresses ([`Region::sever`](sumac_hal::shm::Region::sever)).
//! 4. A device on another host has nothing of this process but what its RDMA device lets in: the connection is ended, what is
//!    on its way is drained, and all keys are taken back ([`sumac_hal::remote`]).
//! 5. Where the system has no memory for that, the device's process is ended by force.
//!
//! Then each chunk that was open is looked up in its redo slot. The device publishes a result there before it writes
//! it to anybody, so an unpublished one has touched no destination, and a published one is copied to it whole; but none
//! of those that a rank that was left out has no part in.
//!
//! Severing copies a whole region. Who writes to *other* parts of the same [`Buffer`](super::Buffer) from another
//! thread at that moment may find that write undone; it happens to silent devices only.

use super::driver::ReferenceDriver;
use super::error::RegisterError;
use super::far::Way;
use super::redo::Redo;
use crate::endpoint::{Buffers, Ops};
use crate::repair::Remains;
use std::sync::PoisonError;
use std::time::Duration;
use sumac_hal::ids::{Epoch, GroupId};
use sumac_hal::mmio::{AdminCommand, EntryStatus};
use sumac_hal::shm::{Peer, Region};

/// How long a device may take for a fence: its engine finishes or drops what it has, at most a window of chunks.
const FENCE_LIMIT: Duration = Duration::from_secs(1);

/// How long a process that has closed its connection may take to end.
const END_LIMIT: Duration = Duration::from_secs(1);

/// What is known of the device's process. Tests have theirs in their own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Life {
    /// Wait until it has ended; false if it has not, as far as that can be told.
    pub(super) has_ended: fn(&Peer, Duration) -> bool,
    /// End it by force.
    pub(super) end: fn(&Peer),
}

impl Life {
    pub(super) const PROCESS: Self = Self {
        has_ended: |peer, limit| peer.wait(limit).unwrap_or(false),
        // Whether it could be done, the wait for its end tells.
        end: |peer| _ = peer.kill(),
    };
}

/// What keeps the device from writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fence {
    /// It had nothing.
    Nothing,
    /// It says so itself.
    Confirmed,
    /// Its process has ended.
    Ended,
    /// It no longer has this rank's memory.
    Severed,
}

impl ReferenceDriver {
    /// End the group at this rank. Afterwards the device writes to no memory of the caller's, and each chunk there is
    /// wholly old or wholly new. Nothing can be posted any more.
    pub fn retire(&mut self) {
        if self.is_retired {
            return;
        }
        let fence = self.fence();
        self.endpoint.close();
        let recovered = self.recover();
        self.is_retired = true;
        if fence != Fence::Nothing {
            tracing::debug!(device = self.device, ?fence, recovered, "group ended with chunks in flight");
        }
    }

    /// End the group, and land in `buffers` what the device has answered and this rank has not looked at, and what was
    /// published and perhaps not delivered, be it by way of the bounce buffer.
    ///
    /// An answer in the ring may be all that is left of a result: the device uses a slot again once it has answered.
    pub(crate) fn salvage(&mut self, buffers: &mut impl Buffers) {
        if !self.is_retired {
            // A device that lives may answer until it is fenced.
            self.fence();
            self.endpoint.reopen();
            // What has come of a device on another host comes into the ring now.
            self.way.drain();
            // More than the ring holds is not to be had, whatever the device does.
            let most = 0..=self.config.in_flight_max;
            _ = most.into_iter().find(|_| !self.collect(buffers));
        }
        self.retire();
        let open = self.endpoint.open_seqs();
        let landings: Vec<_> = open.clone().map(|seq| self.endpoint.landing(seq)).collect();
        let (left, view) = ((&self.redo, &self.way, &self.bounce), (self.config.group, self.config.epoch));
        let published = |seq: u64, result: &mut [u8]| {
            let landing = seq.checked_sub(open.start).and_then(|index| landings.get(index as usize).copied().flatten());
            published(left, view, (seq, landing), result)
        };
        self.endpoint.land_published(published, buffers);
    }

    pub(super) fn fence(&mut self) -> Fence {
        if let Some(fence) = self.fenced {
            return fence;
        }
        let fence = self.fence_once();
        self.fenced = Some(fence);
        fence
    }

    fn fence_once(&mut self) -> Fence {
        if !self.endpoint.is_in_flight() {
            return Fence::Nothing;
        }
        let command = AdminCommand::Fence { group: self.config.group, epoch: self.config.epoch };
        match self.command(command, FENCE_LIMIT) {
            Ok((EntryStatus::Result, _)) => return Fence::Confirmed,
            // Behind an arena the peer is a broker, whose end is not the device's.
            Err(RegisterError::Gone)
                if self.gone
                    && self.arena.is_none()
                    && self.way.peer().is_some_and(|peer| (self.life.has_ended)(peer, END_LIMIT)) =>
            {
                return Fence::Ended;
            }
            other => {
                tracing::warn!(device = self.device, ?other, "the device does not fence: taking its memory away");
            }
        }
        self.sever();
        Fence::Severed
    }

    /// Take away the memory that open chunks go to; from a device on another host all memory.
    fn sever(&mut self) {
        if let Way::Far(far) = &mut self.way {
            if let Err(error) = far.fence() {
                // It never writes to a caller's memory; what has landed is not looked at any more.
                tracing::error!(device = self.device, %error, "the link can't be fenced: what has landed is not trusted");
            }
            return;
        }
        let mut keys: Vec<_> = self.endpoint.exposed().map(|(_, address, _)| address.region).collect();
        keys.sort_unstable();
        keys.dedup();
        for key in keys {
            let Some(region) = self.registry.region(key) else { continue };
            let severed = region.lock().unwrap_or_else(PoisonError::into_inner).sever();
            if let Err(error) = severed {
                let Some(peer) = self.way.peer() else { return };
                tracing::error!(device = self.device, %error, "can't take memory away: ending the device");
                (self.life.end)(peer);
                // Where even that is refused, the caller's memory is in danger, and nothing is left to do.
                if !(self.life.has_ended)(peer, END_LIMIT) {
                    tracing::error!(device = self.device, "the device goes on, and may write to memory of this rank");
                }
                return;
            }
        }
    }

    /// Copy what was published and perhaps not delivered; returns how many chunks.
    fn recover(&mut self) -> usize {
        let (redo, view, registry) = (&self.redo, (self.config.group, self.config.epoch), &self.registry);
        self.endpoint.recover(
            |seq, result| redo.as_ref().is_some_and(|redo| redo.published(view, seq, result)),
            |address, result| {
                let Some(region) = registry.region(address.region) else { return false };
                let region = region.lock().unwrap_or_else(PoisonError::into_inner);
                region.write(address.offset_bytes as usize, result);
                true
            },
        )
    }
}

/// Read the result of a chunk: from its redo slot, or, of a device on another host, from where it has landed.
fn published(
    (redo, way, bounce): (&Option<Redo>, &Way, &Region),
    view: (GroupId, Epoch),
    (seq, landing): (u64, Option<u64>),
    result: &mut [u8],
) -> bool {
    match (redo, way, landing) {
        (Some(redo), ..) => redo.published(view, seq, result),
        (None, Way::Far(far), Some(at)) if far.has_landed(at) => {
            bounce.read(at as usize, result);
            true
        }
        _ => false,
    }
}

impl Remains for ReferenceDriver {
    fn ops(&self) -> &Ops {
        self.endpoint.ops()
    }

    fn is_answered(&self, seq: u64) -> bool {
        self.endpoint.has_landed(seq)
    }

    fn published(&self, seq: u64, result: &mut [u8]) -> bool {
        let left = (&self.redo, &self.way, &self.bounce);
        let landing = self.endpoint.landing(seq);
        published(left, (self.config.group, self.config.epoch), (seq, landing), result)
    }
}
