//! An endpoint by reference on its device: rings, registered memory and the bounce buffer.
//!
//! The device wakes this side when it has put completions into a ring. A dead one wakes nobody, so a sleep is cut into
//! slices, and between them the connection and the heartbeat are looked at.

use super::Transfer;
use super::arena::{self, Arena};
use super::attach::{Attached, Seating};
use super::endpoint::{BounceConfig, Places, ReferenceConfig, ReferenceEndpoint};
use super::error::{AttachError, Breach, RegisterError};
use super::far::Way;
use super::memory::{Buffer, Registry};
use super::pulse::{Pulse, Sign};
use super::queue::{Admin, Answered, Ends, Purpose, Waker};
use super::redo::Redo;
use super::retire::{Fence, Life};
use crate::transport::packets::{Buffers, EndpointError, EndpointStats, Event, OpId, PostError, Verdict};
use std::time::{Duration, Instant};
use sumac_hal::dma::{Address, RegionKey, Span};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, DeviceStatus, EntryStatus, Features, HostControl, SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::op::{Dtype, OpDesc, Path};
use sumac_hal::ring::Patience;
use sumac_hal::shm::{Function, Region, Waiter};
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::{Limit, RankMask};

/// How long to sleep before the connection and the heartbeat are looked at.
const SLICE: Duration = Duration::from_millis(20);

/// The same where the device can wake nobody: some of its chunks' time.
const NAP: Duration = Duration::from_micros(300);

/// How long a device may take to register memory: it maps it, and may touch every page.
const REGISTER_LIMIT: Duration = Duration::from_secs(10);

/// How long the device's runtime may stand still while it is waited for: as long as a hop may be silent in packets.
const DEAD: Duration = HopTimers::DEFAULT.dead;

/// How often to yield before sleeping: some 30 us where nobody else wants the core, which is what a wake-up takes.
pub(super) const YIELDS: u32 = 100;

/// The same where results land apart, so that all of what is in flight has its place there.
const LANDING_LEN_BYTES: usize = 4 << 20;

/// Entries that are submitted or taken in at a time.
const BATCH: usize = 32;

/// The memory of a bounce buffer: four runs of what is copied at a time, few enough to stay in a cache.
const BOUNCE_LEN_BYTES: usize = 1 << 20;

/// A rank's side of one group by reference, on its device.
#[derive(Debug)]
pub struct ReferenceDriver {
    pub(super) device: String,
    pub(super) endpoint: ReferenceEndpoint,
    pub(super) config: ReferenceConfig,
    pub(super) way: Way,
    pub(super) function: Function,
    pub(super) admin: Admin,
    pub(super) data: Ends,
    pub(super) registry: Registry,
    pub(super) bounce: Region,
    /// Where the device's redo slots can be read.
    pub(super) redo: Option<Redo>,
    /// Where memory comes from, if the device does not reach all.
    pub(super) arena: Option<Arena>,
    /// How long to sleep before rings are looked at, woken or not.
    pub(super) slice: Duration,
    pub(super) waiter: Waiter,
    pub(super) waker: Waker,
    looked: Instant,
    /// The connection has hung up.
    pub(super) gone: bool,
    /// Watches a device that shows its heartbeat.
    pulse: Option<Pulse>,
    /// Its runtime stands still.
    pub(super) still: bool,
    /// What keeps the device from writing, once something does.
    pub(super) fenced: Option<Fence>,
    /// What was in the completion ring before memory was taken away from the device, and what came after that.
    pub(super) early: Vec<[u64; COMPLETION_WORDS]>,
    pub(super) late: Vec<[u64; COMPLETION_WORDS]>,
    /// There was more, or it can't be read.
    pub(super) is_garbled: bool,
    pub(super) is_retired: bool,
    next_handle: u64,
    pub(super) life: Life,
}

impl ReferenceDriver {
    /// Attach to the leaf device.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach(seating: &Seating) -> Result<Self, AttachError> {
        Self::with_life(seating, Life::PROCESS)
    }

    /// The same, where the device is perhaps no process of its own.
    pub(super) fn with_life(seating: &Seating, life: Life) -> Result<Self, AttachError> {
        let Attached { way, function, identity, admin, mut data, redo, mut arena } = Attached::open(seating)?;
        let chunk = usize::from(seating.chunk_len_bytes).next_multiple_of(64);
        let alignment = identity.dma.alignment_bytes.max(64) as usize;
        let lands_apart = matches!(way, Way::Far(_));
        let len_bytes = if lands_apart { LANDING_LEN_BYTES } else { BOUNCE_LEN_BYTES };
        let len_bytes = len_bytes.max(2 * chunk.next_multiple_of(alignment));
        let len_bytes = len_bytes.next_multiple_of(alignment);
        let failed = |reason| AttachError::Bounce { len_bytes: len_bytes as u64, reason };
        let (bounce, start) = match &mut arena {
            Some(arena) => arena.take(len_bytes).map_err(failed)?,
            None => (arena::own(len_bytes).map_err(failed)?, 0),
        };
        let slice = if identity.features.contains(Features::SILENT) { NAP } else { SLICE };
        // One place is left for the word of which operations differ.
        let in_flight_max = data.completions.capacity() - 1;
        let config = ReferenceConfig {
            group: seating.group,
            epoch: seating.epoch,
            rank: seating.rank,
            ranks: seating.ranks,
            chunk_len_bytes: seating.chunk_len_bytes,
            window_max: seating.window_max,
            table_version: seating.table_version,
            in_flight_max,
            alignment_bytes: identity.dma.alignment_bytes,
            bounce: BounceConfig { region: RegionKey::default(), len_bytes: len_bytes as u64 },
            lands_apart,
        };
        debug_assert!(!data.has_news(), "a fresh ring is empty");
        let mut driver = Self {
            device: seating.device.clone(),
            endpoint: ReferenceEndpoint::new(config.clone()),
            config,
            // Another rank gets the arena when this one has hung up, and buffers of this one may outlive it.
            registry: Registry::new(way.near().filter(|_| arena.is_some()).cloned()),
            waker: Waker::new(data.queue.clone(), way.event()),
            way,
            function,
            admin: Admin::new(admin),
            data,
            bounce,
            redo,
            arena,
            slice,
            // The ranks, the device, and the device's engine.
            waiter: Waiter::new(Patience::for_this_machine(seating.ranks_here + 2).with_yields(YIELDS)),
            looked: Instant::now(),
            gone: false,
            pulse: None,
            still: false,
            fenced: None,
            early: Vec::new(),
            late: Vec::new(),
            is_garbled: false,
            is_retired: false,
            next_handle: 1,
            life,
        };
        let beats = identity.features.contains(Features::HEARTBEAT);
        driver.pulse = beats.then(|| Pulse::new(DEAD, driver.function.bar().heartbeat(), Instant::now()));
        if driver.arena.is_none() {
            driver.way.hand_over(0, &driver.bounce, true).map_err(failed)?;
        }
        driver.config.bounce.region = driver.register(start, len_bytes).map_err(failed)?;
        driver.way.note(0, Some(driver.config.bounce.region));
        driver.endpoint = ReferenceEndpoint::new(driver.config.clone());
        Ok(driver)
    }

    /// Return the device's name.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Return zeroed memory that the device reaches.
    ///
    /// # Errors
    /// [`RegisterError`]; nothing else has changed.
    pub fn alloc<T: bytemuck::Pod>(&mut self, len: usize) -> Result<Buffer<T>, RegisterError> {
        let len_bytes = len.saturating_mul(size_of::<T>());
        if len_bytes == 0 {
            return Ok(Buffer::plain(len));
        }
        // Room for it may be what was dropped. What is wrong with the device, the next call says.
        if let Err(breach) = self.keep_house() {
            self.endpoint.fail(breach.into());
            return Err(breach.into());
        }
        let (region, handle) = self.memory(len_bytes)?;
        let handed = if self.arena.is_none() { self.way.hand_over(handle, &region, false) } else { Ok(()) };
        let registered = handed.and_then(|()| self.register(handle, len_bytes));
        self.way.note(handle, registered.as_ref().ok().copied());
        if let (Some(arena), Ok(_) | Err(RegisterError::Refused(_))) = (&mut self.arena, &registered) {
            arena.note(handle, registered.as_ref().ok().copied());
        }
        let registered = registered.and_then(|key| Ok(self.unused(key)?));
        match registered {
            Err(RegisterError::Broken(breach)) => self.endpoint.fail(breach.into()),
            Err(RegisterError::Gone) => self.endpoint.fail(EndpointError::DeviceLost),
            _ => {}
        }
        let key = registered?;
        Ok(self.registry.insert(region, key, len))
    }

    /// Return zeroed memory that the device can be told of, and the handle to do it by.
    fn memory(&mut self, len_bytes: usize) -> Result<(Region, u64), RegisterError> {
        if let Some(arena) = &mut self.arena {
            return arena.take(len_bytes);
        }
        let handle = self.next_handle;
        self.next_handle += 1;
        Ok((arena::own(len_bytes)?, handle))
    }

    /// Post an operation with these buffers, which are as long as the operation needs and stay where they are until it
    /// is complete or the group is retired ([`ReferenceDriver::retire`]).
    ///
    /// # Errors
    /// [`PostError`] if the group has failed or too much is in flight.
    pub fn post(&mut self, desc: OpDesc, path: Path, places: Places) -> Result<OpId, PostError> {
        self.endpoint.post(desc, path, places)
    }

    /// The same for an operation that does not wait longer than a limit for ranks to come to it. All ranks have to give
    /// the same.
    ///
    /// # Errors
    /// [`PostError`] if the group has failed or too much is in flight.
    pub fn post_within(
        &mut self,
        desc: OpDesc,
        path: Path,
        limit: Option<Limit>,
        places: Places,
    ) -> Result<OpId, PostError> {
        self.endpoint.post_within(desc, path, limit, places)
    }

    /// Return this rank's side of the protocol.
    pub(crate) const fn endpoint(&self) -> &ReferenceEndpoint {
        &self.endpoint
    }

    /// Return the ranks that have left the group.
    pub(crate) fn gone(&self) -> RankMask {
        self.endpoint.gone()
    }

    /// Return what is known of the operation whose completion was told last.
    pub fn verdict(&self) -> Verdict {
        self.endpoint.verdict()
    }

    /// Return where a slice of an operation's elements lies in registered memory, if its values are aligned there: an
    /// engine that combines them may want that, and only bytes can be elsewhere.
    pub fn place(&self, bytes: &[u8], desc: &OpDesc) -> Option<Address> {
        let value_bytes = desc.dtype.map_or(1, Dtype::size_bytes) as u64;
        self.registry.find(bytes).filter(|address| address.offset_bytes.is_multiple_of(value_bytes))
    }

    /// Return the pages of registered memory that hold nothing but these bytes: what the device itself may write to
    /// ([`Places::writable`]).
    pub fn whole_pages(&self, bytes: &[u8]) -> Option<Span> {
        self.registry.whole_pages(bytes)
    }

    /// Return the way of an operation whose buffers are `input_len` and `output_len` bytes long and lie at `places`.
    pub const fn transfer(&self, places: &Places, input_len: usize, output_len: usize) -> Transfer {
        // At its edges, any output may share pages with other memory.
        let is_edge = matches!(places.writable, Some(Span { len_bytes: 0, .. }));
        let output_bounces = places.output.is_none() || is_edge || self.config.lands_apart;
        let bounces = input_len > 0 && places.input.is_none() || output_len > 0 && output_bounces;
        if bounces { Transfer::Bounced } else { Transfer::Registered }
    }

    /// Return how many buffers the device has not let go of.
    #[cfg(test)]
    pub(super) fn registered(&self) -> usize {
        self.registry.len()
    }

    /// Do what can be done without waiting: take in answers, submit what may be. Returns zero if there is more at once,
    /// `None` if only the device can bring it on.
    pub fn pump(&mut self, buffers: &mut impl Buffers) -> Option<Duration> {
        if self.is_retired || self.has_severed() {
            return None;
        }
        self.carry();
        if let Err(breach) = self.keep_house() {
            self.endpoint.fail(breach.into());
        }
        let is_more = self.collect(buffers);
        if self.gone && !is_more {
            self.endpoint.fail(EndpointError::DeviceLost);
        }
        if let Err(breach) = self.submit(buffers) {
            self.endpoint.fail(breach.into());
        }
        self.carry();
        is_more.then_some(Duration::ZERO)
    }

    /// Return the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.endpoint.poll_event()
    }

    /// Return why the group is at its end, if it is.
    pub const fn error(&self) -> Option<EndpointError> {
        self.endpoint.error()
    }

    /// Return what was counted.
    pub const fn stats(&self) -> &EndpointStats {
        self.endpoint.stats()
    }

    /// Take in a batch of answers; true if there may be more.
    pub(super) fn collect(&mut self, buffers: &mut impl Buffers) -> bool {
        let mut batch = [[0; COMPLETION_WORDS]; BATCH];
        let count = match self.data.completions.pop_batch(&mut batch) {
            Ok(count) => count,
            Err(poisoned) => {
                self.endpoint.fail(Breach::from(poisoned).into());
                0
            }
        };
        self.take_in(&batch[..count], buffers);
        count == BATCH
    }

    /// Take in these answers.
    pub(super) fn take_in(&mut self, answers: &[[u64; COMPLETION_WORDS]], buffers: &mut impl Buffers) {
        let bounce = &self.bounce;
        for words in answers {
            self.endpoint.handle(words, |result| {
                let output = &mut buffers.output(result.op)[result.to..][..result.from.len()];
                bounce.read(result.from.start, output);
            });
        }
        let (redo, view) = (&self.redo, (self.config.group, self.config.epoch));
        let is_published = |seq| redo.as_ref().is_some_and(|redo| redo.is_published(view, seq));
        self.endpoint.keep(is_published, buffers);
    }

    /// Submit what may be.
    fn submit(&mut self, buffers: &impl Buffers) -> Result<(), Breach> {
        loop {
            let room = (self.data.submissions.room()? as usize).min(BATCH);
            let mut batch = [[0; SUBMISSION_WORDS]; BATCH];
            let mut count = 0;
            // A run may take a second entry, for its operation's limit.
            while count + 1 < room {
                let Some(run) = self.endpoint.next_run() else { break };
                let landing = run.contribution.dst.filter(|dst| dst.region == self.config.bounce.region);
                if let Some(landing) = landing {
                    // What is announced there from now on is of these chunks.
                    self.way.forget_landed(landing.offset_bytes, self.endpoint.landing_end(&run));
                }
                if let Some(limit) = run.limit {
                    batch[count] = SubmissionEntry::Limit(limit).emit();
                    count += 1;
                }
                batch[count] = SubmissionEntry::Contribution(run.contribution).emit();
                count += 1;
                if let Some(fill) = run.fill {
                    self.bounce.write(fill.to, &buffers.input(fill.op)[fill.from]);
                    // The device fetches this run while the next is copied.
                    break;
                }
            }
            if count == 0 {
                return Ok(());
            }
            self.data.submit(&batch[..count])?;
        }
    }

    /// See to dropped buffers, to answers that nobody waits for, and now and then to the connection.
    fn keep_house(&mut self) -> Result<(), Breach> {
        while let Some(region) = self.registry.next_dropped() {
            if self.admin.submit(AdminCommand::Deregister { region }, Purpose::Leaving(region))?.is_none() {
                self.registry.put_back(region);
                break;
            }
        }
        while self.admin.is_open()
            && let Some(answered) = self.admin.poll()?
        {
            self.note(&answered)?;
        }
        if self.looked.elapsed() >= SLICE {
            self.look()?;
        }
        Ok(())
    }

    /// Deal with an answer that nobody waits for.
    fn note(&mut self, answered: &Answered) -> Result<(), Breach> {
        match answered.purpose {
            Purpose::Leaving(region) if answered.status == EntryStatus::Result => {
                self.registry.remove(region);
                self.way.withdraw(region);
                self.arena.iter_mut().for_each(|arena| arena.give_back(region));
            }
            // What the device does not let go of stays mapped, and is not looked up by anybody.
            Purpose::Leaving(region) => {
                tracing::warn!(device = self.device, ?region, status = ?answered.status, "a region stays registered");
            }
            Purpose::Unwanted => {
                if let Some(region) = RegionKey::from_bits(answered.value)
                    && answered.status == EntryStatus::Result
                {
                    let command = AdminCommand::Deregister { region: self.unused(region)? };
                    self.admin.submit(command, Purpose::Leaving(region))?;
                }
            }
            Purpose::Awaited => {}
        }
        Ok(())
    }

    /// Look whether the device is still there.
    fn look(&mut self) -> Result<(), Breach> {
        self.looked = Instant::now();
        self.gone |= self.way.is_gone()?;
        if self.function.bar().status().contains(DeviceStatus::FAILED) {
            self.endpoint.fail(EndpointError::GroupLost);
        }
        self.feel();
        Ok(())
    }

    /// Look whether the device's runtime goes on, if anything is waited for.
    fn feel(&mut self) {
        let is_waited_for = self.endpoint.is_in_flight() || self.admin.is_open();
        let Some(pulse) = self.pulse.as_mut().filter(|_| !self.still) else { return };
        match pulse.look(self.function.bar().heartbeat(), is_waited_for, self.looked) {
            Sign::Goes => {}
            Sign::Ask => {
                self.data.ask();
                self.way.ask();
            }
            Sign::Dead => {
                tracing::warn!(device = self.device, limit = ?DEAD, "the device stands still");
                self.still = true;
                self.endpoint.fail(EndpointError::PathLost);
            }
        }
    }

    /// Register memory that was handed over.
    fn register(&mut self, handle: u64, len_bytes: usize) -> Result<RegionKey, RegisterError> {
        let command = AdminCommand::Register { handle, offset_bytes: 0, len_bytes: len_bytes as u64 };
        match self.command(command, REGISTER_LIMIT)? {
            (EntryStatus::Result, value) => {
                RegionKey::from_bits(value).ok_or(RegisterError::Broken(Breach::Misplaced { queue: 0 }))
            }
            (status, _) => Err(RegisterError::Refused(status)),
        }
    }

    /// Check that no other memory has this key: what is known by it is looked up and taken away by it.
    fn unused(&self, region: RegionKey) -> Result<RegionKey, Breach> {
        let used = region == self.config.bounce.region || self.registry.region(region).is_some();
        if used { Err(Breach::SameRegion { region }) } else { Ok(region) }
    }

    /// Have a command done, and return what was answered.
    pub(super) fn command(
        &mut self,
        command: AdminCommand,
        limit: Duration,
    ) -> Result<(EntryStatus, u64), RegisterError> {
        let deadline = Instant::now() + limit;
        let mut cookie = None;
        loop {
            if cookie.is_none() {
                cookie = self.admin.submit(command, Purpose::Awaited)?;
            }
            while let Some(answered) = self.admin.poll()? {
                if Some(answered.cookie) == cookie {
                    return Ok((answered.status, answered.value));
                }
                self.note(&answered)?;
            }
            // What it was told it finds, should it go on.
            if self.gone || self.still {
                cookie.into_iter().for_each(|cookie| self.admin.abandon(cookie));
                return Err(RegisterError::Gone);
            }
            let now = Instant::now();
            if now >= deadline {
                cookie.into_iter().for_each(|cookie| self.admin.abandon(cookie));
                return Err(RegisterError::Silent(limit));
            }
            let is_news = self.wait_for_answer(deadline.min(now + self.slice));
            if !is_news && self.looked.elapsed() >= SLICE {
                self.look()?;
            }
        }
    }
}

impl Drop for ReferenceDriver {
    fn drop(&mut self) {
        if self.registry.is_forked() {
            // The function is the parent's, and its registers are not mapped here.
            return;
        }
        self.retire();
        self.function.bar().set_control(HostControl::RESET);
    }
}
