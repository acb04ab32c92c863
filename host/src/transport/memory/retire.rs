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
//! To sever takes time, and the device may go on meanwhile. So what it had answered is taken out of the ring before, and
//! an answer that comes later says nothing of chunks whose memory was taken away: what was written behind the copy is not
//! here. Of those only a record vouches, which has the checksum of the result's bytes. Where there is none, and no answer
//! either, nothing was published while the copy was made, and it holds the input: the device answers before it uses a slot
//! again, so records are looked at first, and the ring after them. Where there is none, but an answer, nobody knows what
//! the copy holds ([`Remains::is_unknown`]).
//!
//! Only the pages of open chunks are severed, and the device was never given a page that holds anything else than the
//! output of an operation in flight ([`Places::writable`](super::Places)): no other thread writes there.

use super::driver::ReferenceDriver;
use super::error::RegisterError;
use super::far::Way;
use super::redo::Redo;
use crate::recovery::Remains;
use crate::transport::packets::{Buffers, EndpointError, Ops};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;
use sumac_hal::dma::{Address, DmaMemory, RegionKey};
use sumac_hal::ids::{Epoch, GroupId};
use sumac_hal::mmio::{AdminCommand, COMPLETION_WORDS, EntryStatus};
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
        // None is left where outputs were at hand.
        self.early.iter().for_each(|words| self.endpoint.note_landed(words));
        self.endpoint.close();
        let recovered = self.recover();
        if self.has_severed() {
            self.doubt();
        }
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
            let view = (self.config.group, self.config.epoch);
            if let Some(redo) = &mut self.redo {
                redo.freeze(view, self.endpoint.looked_up());
            }
            let answers = if self.has_severed() {
                std::mem::take(&mut self.early)
            } else {
                // What has come of a device on another host comes into the ring now.
                self.way.drain();
                self.take_answers()
            };
            let mut error = None;
            for words in &answers {
                // An error among them takes nothing back of what else has landed.
                self.endpoint.reopen();
                self.take_in(std::slice::from_ref(words), buffers);
                error = error.or(self.endpoint.error());
            }
            error.into_iter().for_each(|error| self.endpoint.fail(error));
            if self.has_severed() && matches!(self.endpoint.error(), Some(EndpointError::Broken(_))) {
                // They make no sense: they are not taken in, and say nothing.
                answers.iter().for_each(|words| self.endpoint.doubt(words));
            }
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
        let (late, bounce) = (std::mem::take(&mut self.late), &self.bounce);
        for words in &late {
            self.endpoint.land_late(words, |result| {
                let output = &mut buffers.output(result.op)[result.to..][..result.from.len()];
                bounce.read(result.from.start, output);
            });
        }
    }

    /// Tell whether memory was taken away from a device that may go on.
    pub(super) fn has_severed(&self) -> bool {
        self.fenced == Some(Fence::Severed) && matches!(self.way, Way::Near(_))
    }

    /// Look at what the device has answered since its memory was taken away, once all that is published was looked at.
    fn doubt(&mut self) {
        self.late = self.take_answers();
        self.late.iter().for_each(|words| self.endpoint.doubt(words));
        if self.is_garbled {
            self.endpoint.doubt_all();
        }
    }

    /// Take out of the ring what is there.
    fn take_answers(&mut self) -> Vec<[u64; COMPLETION_WORDS]> {
        let mut answers = Vec::new();
        // All open chunks have fewer answers, with all that is said before them.
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
        if matches!(self.way, Way::Near(_)) {
            self.early = self.take_answers();
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
        let mut exposed: BTreeMap<RegionKey, Vec<Range<usize>>> = BTreeMap::new();
        for (_, Address { region, offset_bytes }, len) in self.endpoint.exposed() {
            let start = offset_bytes as usize;
            exposed.entry(region).or_default().push(start..start + len);
        }
        for (key, chunks) in exposed {
            let Some(region) = self.registry.region(key) else { continue };
            let mut region = region.lock().unwrap_or_else(PoisonError::into_inner);
            let pages = pages(chunks, region.page_len_bytes(), region.len_bytes());
            let severed = region.sever(&pages);
            drop(region);
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

/// Return the pages, each once, that these bytes of a memory of `whole` bytes lie in.
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

    fn is_unknown(&self, seq: u64) -> bool {
        self.endpoint.is_unknown(seq)
    }
}
