//! Ending a group at this rank: afterwards the device writes nothing, and no chunk is half-written (PROTOCOL 5 to 7).
//!
//! The device's access is ended by the first of these that works:
//! 1. A fence: the device replies when nothing of the group can take effect any more.
//! 2. The end of the device's process, if the connection has closed and its peer is the device itself, not a broker.
//! 3. Revocation, if the device is silent, or disconnected but not dead: it keeps the memory it had, and this process
//!    gets fresh memory with the same contents at the same addresses
//!    ([`Region::sever`](sumac_hal::shm::Region::sever)).
//! 4. For a device on another host, closing the link: whatever is in flight is drained, and all keys are revoked
//!    ([`sumac_hal::remote`]).
//! 5. Killing the device's process, where the system has no memory for a revocation.
//!
//! Then each open chunk is looked up in its redo slot. The device publishes a result there before it writes it to any
//! rank. So an unpublished result has not touched its destination, and a published one is copied there whole, except
//! where this rank is excluded from it.
//!
//! Revocation takes time, and the device may keep running meanwhile. Answers posted before it are therefore taken out
//! of the ring first. A later answer proves nothing about revoked chunks, since writes after the copy did not reach
//! this process. For those only a redo record vouches, by the checksum of the result. With neither a record nor an
//! answer, nothing was published while the copy was made, and the copy holds the input; since the device answers before
//! it reuses a slot, records are read first and the ring after. With an answer but no record, the contents of the copy
//! are unknown ([`RecoverySource::is_unknown`]).
//!
//! Only the pages of open chunks are revoked. The device never had write access to a page that holds anything but the
//! output of an operation in flight ([`Places::writable`](super::Places)), so no other thread writes there.

use super::driver::ZeroCopyDriver;
use super::error::RegisterError;
use super::redo::Redo;
use super::remote::DeviceLink;
use crate::transport::RecoverySource;
use crate::transport::packets::{Buffers, EndpointError, Ops};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;
use sumac_hal::dma::{Address, DmaMemory, RegionKey};
use sumac_hal::ids::{Epoch, GroupId};
use sumac_hal::mmio::{AdminCommand, COMPLETION_WORDS, EntryStatus};
use sumac_hal::shm::{Peer, Region};

/// Limit for a fence: the engine completes or drops what it has, at most a window of chunks.
const FENCE_LIMIT: Duration = Duration::from_secs(1);

/// Limit for a process that has closed its connection to end.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Access to the device's process. Tests run devices in threads and substitute their own.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProcessControl {
    /// Wait until the process has ended; returns false if it has not, as far as that can be told.
    pub(super) has_ended: fn(&Peer, Duration) -> bool,
    /// Kill it.
    pub(super) kill: fn(&Peer),
}

impl ProcessControl {
    pub(super) const PROCESS: Self = Self {
        has_ended: |peer, limit| peer.wait(limit).unwrap_or(false),
        // The wait that follows shows whether this succeeded.
        kill: |peer| _ = peer.kill(),
    };
}

/// What keeps the device from writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fence {
    /// Nothing was in flight.
    NotNeeded,
    /// The device confirmed a fence.
    Confirmed,
    /// Its process has ended.
    ProcessExited,
    /// This rank's memory was revoked.
    Severed,
}

impl ZeroCopyDriver {
    /// End the group at this rank. Afterwards the device writes to no memory of the caller, each chunk there is wholly
    /// old or wholly new, and nothing can be posted.
    pub fn retire(&mut self) {
        if self.is_retired {
            return;
        }
        let fence = self.fence();
        // Empty if they were processed with outputs at hand.
        self.answers_before_sever.iter().for_each(|words| self.endpoint.note_landed(words));
        self.endpoint.close();
        let recovered = self.recover();
        if self.has_severed() {
            self.take_late_answers();
        }
        self.is_retired = true;
        if fence != Fence::NotNeeded {
            crate::log::debug!(device = self.device, ?fence, recovered, "group ended with chunks in flight");
        }
    }

    /// End the group, and land in `buffers` answered results that were not processed yet, as well as published ones
    /// that may not have been delivered, including those bound for the bounce buffer.
    ///
    /// An answer in the ring may be the only trace of a result: the device reuses a slot once it has answered.
    pub(crate) fn salvage(&mut self, buffers: &mut impl Buffers) {
        if !self.is_retired {
            // A live device may answer until it is fenced.
            self.fence();
            let view = (self.config.group, self.config.epoch);
            if let Some(redo) = &mut self.redo {
                redo.freeze(view, self.endpoint.recoverable_chunks());
            }
            let answers = if self.has_severed() {
                std::mem::take(&mut self.answers_before_sever)
            } else {
                // Messages that have arrived from a device on another host enter the ring now.
                self.device_link.drain();
                self.take_answers()
            };
            let mut error = None;
            for words in &answers {
                // An error among them does not undo the others.
                self.endpoint.reopen();
                self.process_answers(std::slice::from_ref(words), buffers);
                error = error.or(self.endpoint.error());
            }
            error.into_iter().for_each(|error| self.endpoint.fail(error));
            if self.has_severed() && matches!(self.endpoint.error(), Some(EndpointError::Protocol(_))) {
                // The device broke the protocol: its answers are not applied, and prove nothing.
                answers.iter().for_each(|words| self.endpoint.mark_unknown(words));
            }
        }
        self.retire();
        let open = self.endpoint.open_seqs();
        let landings: Vec<_> = open.clone().map(|seq| self.endpoint.landing(seq)).collect();
        let (sources, view) = ((&self.redo, &self.device_link, &self.bounce), (self.config.group, self.config.epoch));
        let published = |seq: u64, result: &mut [u8]| {
            let landing = seq.checked_sub(open.start).and_then(|index| landings.get(index as usize).copied().flatten());
            published(sources, view, (seq, landing), result)
        };
        self.endpoint.land_published(published, buffers);
        let (answers_after_sever, bounce) = (std::mem::take(&mut self.answers_after_sever), &self.bounce);
        for words in &answers_after_sever {
            self.endpoint.land_late_answers(words, |result| {
                let output = &mut buffers.output(result.op)[result.to..][..result.from.len()];
                bounce.read(result.from.start, output);
            });
        }
    }

    /// Return whether memory was revoked from a device that may keep running.
    pub(super) fn has_severed(&self) -> bool {
        self.fenced == Some(Fence::Severed) && matches!(self.device_link, DeviceLink::Local(_))
    }

    /// Take the answers that arrived since memory was revoked, after all published results were read.
    fn take_late_answers(&mut self) {
        self.answers_after_sever = self.take_answers();
        self.answers_after_sever.iter().for_each(|words| self.endpoint.mark_unknown(words));
        if self.is_garbled {
            self.endpoint.mark_all_unknown();
        }
    }

    /// Empty the completion ring.
    fn take_answers(&mut self) -> Vec<[u64; COMPLETION_WORDS]> {
        let mut answers = Vec::new();
        // Open chunks have at most this many answers, including the entries that precede them.
        for _ in 0..3 * (u64::from(self.config.in_flight_max) + 1) {
            match self.data.completions.pop() {
                Ok(Some(words)) => answers.push(words),
                Ok(None) => return answers,
                Err(_) => break,
            }
        }
        self.is_garbled = true;
        answers
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
            return Fence::NotNeeded;
        }
        let command = AdminCommand::Fence { group: self.config.group, epoch: self.config.epoch };
        match self.command(command, FENCE_LIMIT) {
            Ok((EntryStatus::Result, _)) => return Fence::Confirmed,
            // With an arena the peer is a broker, whose end is not the device's.
            Err(RegisterError::DeviceLost)
                if self.is_disconnected
                    && self.arena.is_none()
                    && self
                        .device_link
                        .peer()
                        .is_some_and(|peer| (self.process_control.has_ended)(peer, END_LIMIT)) =>
            {
                return Fence::ProcessExited;
            }
            other => {
                crate::log::info!(device = self.device, ?other, "fence failed; revoking the device's memory");
            }
        }
        if matches!(self.device_link, DeviceLink::Local(_)) {
            self.answers_before_sever = self.take_answers();
        }
        self.sever();
        Fence::Severed
    }

    /// Revoke the memory that open chunks are written to; for a device on another host, all memory.
    fn sever(&mut self) {
        if let DeviceLink::Remote(remote) = &mut self.device_link {
            if let Err(error) = remote.fence() {
                // It never writes to a caller's memory, and landed results are ignored from now on.
                let device = &self.device;
                crate::log::error!(device, %error, "cannot fence the link; ignoring results that have landed");
            }
            return;
        }
        let mut exposed: BTreeMap<RegionKey, Vec<Range<usize>>> = BTreeMap::new();
        for (_, Address { region, offset_bytes }, len) in self.endpoint.exposed() {
            let start = offset_bytes as usize;
            exposed.entry(region).or_default().push(start..start + len);
        }
        for (key, chunks) in exposed {
            let Some(region) = self.registry.region(key) else { continue };
            self.registry.withdraw_export(key);
            let mut region = region.lock().unwrap_or_else(PoisonError::into_inner);
            let pages = pages(chunks, region.page_len_bytes(), region.len_bytes());
            let severed = region.sever(&pages);
            drop(region);
            if let Err(error) = severed {
                let Some(peer) = self.device_link.peer() else { return };
                crate::log::error!(device = self.device, %error, "cannot revoke memory; killing the device process");
                (self.process_control.kill)(peer);
                // If even that fails, the caller's memory is at risk, and nothing more can be done.
                if !(self.process_control.has_ended)(peer, END_LIMIT) {
                    crate::log::error!(
                        device = self.device,
                        "the device process cannot be killed and may still write to this rank's memory"
                    );
                }
                return;
            }
        }
    }

    /// Copy published results that may not have been delivered; returns how many.
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

/// Return the pages, without duplicates, that contain these byte ranges of a memory of `whole` bytes.
fn pages(mut bytes: Vec<Range<usize>>, page: usize, whole: usize) -> Vec<Range<usize>> {
    bytes.retain(|range| !range.is_empty());
    bytes.sort_unstable_by_key(|range| range.start);
    let mut pages: Vec<Range<usize>> = Vec::new();
    for range in bytes {
        let (start, end) = (range.start / page * page, range.end.next_multiple_of(page).min(whole));
        match pages.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            _ => pages.push(start..end),
        }
    }
    pages
}

/// Read the result of a chunk from its redo slot or, for a device on another host, from where it has landed.
fn published(
    (redo, device_link, bounce): (&Option<Redo>, &DeviceLink, &Region),
    view: (GroupId, Epoch),
    (seq, landing): (u64, Option<u64>),
    result: &mut [u8],
) -> bool {
    match (redo, device_link, landing) {
        (Some(redo), ..) => redo.published(view, seq, result),
        (None, DeviceLink::Remote(remote), Some(at)) if remote.has_landed(at) => {
            bounce.read(at as usize, result);
            true
        }
        _ => false,
    }
}

impl RecoverySource for ZeroCopyDriver {
    fn ops(&self) -> &Ops {
        self.endpoint.ops()
    }

    fn is_answered(&self, seq: u64) -> bool {
        self.endpoint.has_landed(seq)
    }

    fn published(&self, seq: u64, result: &mut [u8]) -> bool {
        let sources = (&self.redo, &self.device_link, &self.bounce);
        let landing = self.endpoint.landing(seq);
        published(sources, (self.config.group, self.config.epoch), (seq, landing), result)
    }

    fn is_unknown(&self, seq: u64) -> bool {
        self.endpoint.is_unknown(seq)
    }
}
