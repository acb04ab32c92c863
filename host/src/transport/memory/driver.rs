//! Drives a zero-copy endpoint on its device: rings, registered memory and the bounce buffer.
//!
//! The device rings the host's doorbell when it has posted completions. A dead device wakes nobody, so sleeps are cut
//! into intervals, between which the connection and the heartbeat are checked.

mod admin;

use super::Transfer;
use super::arena::{self, Arena};
use super::attach::{AttachParams, Attached};
use super::endpoint::{BounceConfig, Places, ZeroCopyConfig, ZeroCopyEndpoint};
use super::error::{AttachError, ProtocolViolation, RegisterError};
use super::heartbeat::{Heartbeat, Liveness};
use super::queue::{Admin, HostQueue, Purpose, Waker};
use super::redo::Redo;
use super::registered::{Buffer, Registry};
use super::remote::DeviceLink;
use super::retire::{Fence, ProcessControl};
use crate::region_exports::RegionExports;
use crate::transport::packets::{Buffers, CompletionInfo, EndpointError, EndpointStats, Event, OpId, PostError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::dma::{Address, RegionKey, Span};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, DeviceStatus, Features, HostControl, SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::op::{Dtype, OpDesc, Path};
use sumac_hal::shm::{Function, Region, Waiter};
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::{RankMask, StragglerLimit};

/// The longest sleep before the connection and the heartbeat are checked again.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The same for a device that cannot ring doorbells: the time of a few chunks.
const IDLE_POLL: Duration = Duration::from_micros(300);

/// Limit for the registration of memory: the device maps it, and may touch every page.
const REGISTER_LIMIT: Duration = Duration::from_secs(10);

/// How long the heartbeat may be unchanged while this rank waits: the silence limit of a hop in packets.
const HEARTBEAT_TIMEOUT: Duration = HopTimers::DEFAULT.dead;

/// Yields before sleeping: about 30 us on an idle core, the cost of a wake-up.
pub(super) const YIELDS: u32 = 100;

/// Length of the bounce buffer where all results land there, so that everything in flight fits.
const LANDING_LEN_BYTES: usize = 4 << 20;

/// Entries submitted or processed at a time.
const BATCH: usize = 32;

/// Length of the bounce buffer: four runs of staged chunks, small enough to stay in a cache.
const BOUNCE_LEN_BYTES: usize = 1 << 20;

/// A rank's side of one group over the zero-copy transport.
#[derive(Debug)]
pub struct ZeroCopyDriver {
    pub(super) device: String,
    pub(super) endpoint: ZeroCopyEndpoint,
    pub(super) config: ZeroCopyConfig,
    pub(super) device_link: DeviceLink,
    pub(super) function: Function,
    pub(super) admin: Admin,
    pub(super) data: HostQueue,
    pub(super) registry: Registry,
    pub(super) bounce: Region,
    /// The device's redo slots, where they can be read.
    pub(super) redo: Option<Redo>,
    /// The only memory that the device reaches, if it does not reach all.
    pub(super) arena: Option<Arena>,
    /// The longest sleep before the rings are polled.
    pub(super) poll_interval: Duration,
    pub(super) waiter: Waiter,
    pub(super) long_waiter: Waiter,
    pub(super) waker: Waker,
    last_check: Instant,
    /// The device has closed the connection.
    pub(super) is_disconnected: bool,
    /// Watches the heartbeat of a device that has one.
    heartbeat: Option<Heartbeat>,
    /// The heartbeat has stopped.
    pub(super) is_stalled: bool,
    /// What keeps the device from writing, once the group is fenced.
    pub(super) fenced: Option<Fence>,
    /// Completions taken from the ring before memory was revoked, and after.
    pub(super) answers_before_sever: Vec<[u64; COMPLETION_WORDS]>,
    pub(super) answers_after_sever: Vec<[u64; COMPLETION_WORDS]>,
    /// The ring held more completions than are open, or could not be read.
    pub(super) is_garbled: bool,
    pub(super) is_retired: bool,
    next_handle: u64,
    pub(super) process_control: ProcessControl,
}

impl ZeroCopyDriver {
    /// Attach to the leaf device.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach(params: &AttachParams) -> Result<Self, AttachError> {
        Self::with_process_control(params, ProcessControl::PROCESS)
    }

    /// The same with another way to find out about the device's process, for tests that run the device in a thread.
    pub(super) fn with_process_control(
        params: &AttachParams,
        process_control: ProcessControl,
    ) -> Result<Self, AttachError> {
        let Attached { device_link, function, identity, admin, mut data, redo, mut arena } = Attached::open(params)?;
        let chunk = usize::from(params.chunk_len_bytes).next_multiple_of(64);
        let alignment = identity.dma.alignment_bytes.max(64) as usize;
        let lands_in_bounce = matches!(device_link, DeviceLink::Remote(_));
        let len_bytes = if lands_in_bounce { LANDING_LEN_BYTES } else { BOUNCE_LEN_BYTES };
        let len_bytes = len_bytes.max(2 * chunk.next_multiple_of(alignment));
        let len_bytes = len_bytes.next_multiple_of(alignment);
        let failed = |reason| AttachError::Bounce { len_bytes: len_bytes as u64, reason };
        let (bounce, start) = match &mut arena {
            Some(arena) => arena.take(len_bytes).map_err(failed)?,
            None => (arena::own(len_bytes).map_err(failed)?, 0),
        };
        let poll_interval = if identity.features.contains(Features::POLL_ONLY) { IDLE_POLL } else { POLL_INTERVAL };
        // One place is reserved for the entry that names mismatched operations.
        let in_flight_max = data.completions.capacity() - 1;
        let config = ZeroCopyConfig {
            group: params.group,
            epoch: params.epoch,
            rank: params.rank,
            ranks: params.ranks,
            chunk_len_bytes: params.chunk_len_bytes,
            window_max: params.window_max,
            table_version: params.table_version,
            in_flight_max,
            alignment_bytes: identity.dma.alignment_bytes,
            bounce: BounceConfig { region: RegionKey::default(), len_bytes: len_bytes as u64 },
            lands_in_bounce,
        };
        debug_assert!(!data.has_completions(), "a fresh ring is empty");
        // Those that want a core: the ranks, the device, and the device's engine.
        let threads = params.ranks_here + 2;
        let mut driver = Self {
            device: params.device.clone(),
            endpoint: ZeroCopyEndpoint::new(config.clone()),
            config,
            // The arena goes to another rank once this connection closes, and buffers may outlive the driver.
            registry: Registry::new(device_link.connection().filter(|_| arena.is_some()).cloned()),
            waker: Waker::new(data.queue.clone(), device_link.event()),
            device_link,
            function,
            admin: Admin::new(admin),
            data,
            bounce,
            redo,
            arena,
            poll_interval,
            waiter: Waiter::new(params.wait_policy.for_threads(threads)),
            long_waiter: Waiter::new(params.wait_policy.for_long_waits(threads)),
            last_check: Instant::now(),
            is_disconnected: false,
            heartbeat: None,
            is_stalled: false,
            fenced: None,
            answers_before_sever: Vec::new(),
            answers_after_sever: Vec::new(),
            is_garbled: false,
            is_retired: false,
            next_handle: 1,
            process_control,
        };
        let beats = identity.features.contains(Features::HEARTBEAT);
        driver.heartbeat =
            beats.then(|| Heartbeat::new(HEARTBEAT_TIMEOUT, driver.function.bar().heartbeat(), Instant::now()));
        if driver.arena.is_none() {
            driver.device_link.hand_over(0, &driver.bounce, true).map_err(failed)?;
        }
        driver.config.bounce.region = driver.register(start, len_bytes).map_err(failed)?;
        driver.device_link.bind_key(0, Some(driver.config.bounce.region));
        driver.endpoint = ZeroCopyEndpoint::new(driver.config.clone());
        Ok(driver)
    }

    /// Return the device's name.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Let other ranks of this machine map the memory that is allocated from now on.
    pub(crate) fn export_to(&mut self, exports: &Arc<RegionExports>) {
        // An arena is the device's memory, of which this rank has no descriptor.
        if self.arena.is_none() {
            self.registry.export_to(exports);
        }
    }

    /// Allocate zeroed memory that the device can reach.
    ///
    /// # Errors
    /// [`RegisterError`]; the group and other buffers are unaffected unless the device is lost or broke the protocol.
    pub fn alloc<T: bytemuck::Pod>(&mut self, len: usize) -> Result<Buffer<T>, RegisterError> {
        let len_bytes = len.saturating_mul(size_of::<T>());
        if len_bytes == 0 {
            return Ok(Buffer::plain(len));
        }
        // Dropped buffers may make room. An error of the device is reported by the next call as well.
        if let Err(violation) = self.run_housekeeping() {
            self.endpoint.fail(violation.into());
            return Err(violation.into());
        }
        let (region, handle) = self.memory(len_bytes)?;
        let handed = if self.arena.is_none() { self.device_link.hand_over(handle, &region, false) } else { Ok(()) };
        let registered = handed.and_then(|()| self.register(handle, len_bytes));
        self.device_link.bind_key(handle, registered.as_ref().ok().copied());
        if let (Some(arena), Ok(_) | Err(RegisterError::Refused(_))) = (&mut self.arena, &registered) {
            arena.note(handle, registered.as_ref().ok().copied());
        }
        let registered = registered.and_then(|key| Ok(self.check_unique(key)?));
        match registered {
            Err(RegisterError::Protocol(violation)) => self.endpoint.fail(violation.into()),
            Err(RegisterError::DeviceLost) => self.endpoint.fail(EndpointError::DeviceLost),
            _ => {}
        }
        let key = registered?;
        Ok(self.registry.insert(region, key, len))
    }

    /// Allocate zeroed memory, and return it with the handle by which the device will know it.
    fn memory(&mut self, len_bytes: usize) -> Result<(Region, u64), RegisterError> {
        if let Some(arena) = &mut self.arena {
            return arena.take(len_bytes);
        }
        let handle = self.next_handle;
        self.next_handle += 1;
        Ok((arena::own(len_bytes)?, handle))
    }

    /// Post an operation. Its buffers are as long as the operation requires, and must stay in place until it completes
    /// or the group is retired ([`ZeroCopyDriver::retire`]). `limit` is how long the operation waits for ranks; all
    /// ranks must pass the same.
    ///
    /// # Errors
    /// [`PostError`] if the group has failed or too much is in flight.
    pub fn post(
        &mut self,
        desc: OpDesc,
        path: Path,
        limit: Option<StragglerLimit>,
        places: Places,
    ) -> Result<OpId, PostError> {
        self.endpoint.post(desc, path, limit, places)
    }

    /// Return the endpoint.
    pub(crate) const fn endpoint(&self) -> &ZeroCopyEndpoint {
        &self.endpoint
    }

    /// Return the ranks that have been excluded from the group.
    pub(crate) fn excluded_ranks(&self) -> RankMask {
        self.endpoint.excluded_ranks()
    }

    /// Return details of the operation whose completion was polled last.
    pub fn completion_info(&self) -> CompletionInfo {
        self.endpoint.completion_info()
    }

    /// Return the address of these bytes in registered memory if they start at a multiple of the operation's element
    /// size: engines that combine values may need that alignment, and only byte elements can lie elsewhere.
    pub fn place(&self, bytes: &[u8], desc: &OpDesc) -> Option<Address> {
        let value_bytes = desc.dtype.map_or(1, Dtype::size_bytes) as u64;
        self.registry.find(bytes).filter(|address| address.offset_bytes.is_multiple_of(value_bytes))
    }

    /// Return the pages of registered memory that hold nothing but these bytes: those that the device itself may write
    /// to ([`Places::writable`]).
    pub fn whole_pages(&self, bytes: &[u8]) -> Option<Span> {
        self.registry.whole_pages(bytes)
    }

    /// Return how the payload of an operation travels, given the lengths of its buffers in bytes and their places.
    pub const fn transfer(&self, places: &Places, input_len: usize, output_len: usize) -> Transfer {
        // At its edges, any output may share pages with other memory.
        let is_edge = matches!(places.writable, Some(Span { len_bytes: 0, .. }));
        let output_bounces = places.output.is_none() || is_edge || self.config.lands_in_bounce;
        let bounces = input_len > 0 && places.input.is_none() || output_len > 0 && output_bounces;
        if bounces { Transfer::Bounced } else { Transfer::ZeroCopy }
    }

    /// Return the number of buffers that the device has not released.
    #[cfg(test)]
    pub(super) fn registered(&self) -> usize {
        self.registry.len()
    }

    /// Process completions and submit runs without blocking. Returns zero if there is more to do at once, `None` if
    /// only the device can make progress.
    pub fn pump(&mut self, buffers: &mut impl Buffers) -> Option<Duration> {
        if self.is_retired || self.has_severed() {
            return None;
        }
        self.poll_link();
        if let Err(violation) = self.run_housekeeping() {
            self.endpoint.fail(violation.into());
        }
        let is_more = self.collect(buffers);
        if self.is_disconnected && !is_more {
            self.endpoint.fail(EndpointError::DeviceLost);
        }
        if let Err(violation) = self.submit(buffers) {
            self.endpoint.fail(violation.into());
        }
        self.poll_link();
        is_more.then_some(Duration::ZERO)
    }

    /// Return the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.endpoint.poll_event()
    }

    /// Return the error that ended the group, if it has failed.
    pub const fn error(&self) -> Option<EndpointError> {
        self.endpoint.error()
    }

    /// Return the counters.
    pub const fn stats(&self) -> &EndpointStats {
        self.endpoint.stats()
    }

    /// Process a batch of completions; returns whether there may be more.
    pub(super) fn collect(&mut self, buffers: &mut impl Buffers) -> bool {
        let mut batch = [[0; COMPLETION_WORDS]; BATCH];
        let count = match self.data.completions.pop_batch(&mut batch) {
            Ok(count) => count,
            Err(poisoned) => {
                self.endpoint.fail(ProtocolViolation::from(poisoned).into());
                0
            }
        };
        self.process_answers(&batch[..count], buffers);
        count == BATCH
    }

    /// Process these completions.
    pub(super) fn process_answers(&mut self, answers: &[[u64; COMPLETION_WORDS]], buffers: &mut impl Buffers) {
        let bounce = &self.bounce;
        for words in answers {
            self.endpoint.handle(words, |result| {
                let output = &mut buffers.output(result.op)[result.to..][..result.from.len()];
                bounce.read(result.from.start, output);
            });
        }
        let (redo, view) = (&self.redo, (self.config.group, self.config.epoch));
        let is_published = |seq| redo.as_ref().is_some_and(|redo| redo.is_published(view, seq));
        self.endpoint.retain_completed(is_published, buffers);
    }

    /// Submit as many runs as fit.
    fn submit(&mut self, buffers: &impl Buffers) -> Result<(), ProtocolViolation> {
        loop {
            let room = (self.data.submissions.room()? as usize).min(BATCH);
            let mut batch = [[0; SUBMISSION_WORDS]; BATCH];
            let mut count = 0;
            // A run may need a second entry, for its operation's limit.
            while count + 1 < room {
                let Some(run) = self.endpoint.next_run() else { break };
                let landing = run.contribution.dst.filter(|dst| dst.region == self.config.bounce.region);
                if let Some(landing) = landing {
                    // Results announced there from now on belong to these chunks.
                    self.device_link.forget_landed(landing.offset_bytes, self.endpoint.landing_end(&run));
                }
                if let Some(limit) = run.limit {
                    batch[count] = SubmissionEntry::Limit(limit).emit();
                    count += 1;
                }
                batch[count] = SubmissionEntry::Contribution(run.contribution).emit();
                count += 1;
                if let Some(stage_in) = run.stage_in {
                    self.bounce.write(stage_in.to, &buffers.input(stage_in.op)[stage_in.from]);
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

    /// Deregister dropped buffers, process replies that nobody waits for, and check the device from time to time.
    fn run_housekeeping(&mut self) -> Result<(), ProtocolViolation> {
        while let Some(region) = self.registry.next_dropped() {
            if self.admin.submit(AdminCommand::Deregister { region }, Purpose::Deregister(region))?.is_none() {
                self.registry.put_back(region);
                break;
            }
        }
        while self.admin.is_open()
            && let Some(reply) = self.admin.poll()?
        {
            self.handle_reply(&reply)?;
        }
        if self.last_check.elapsed() >= POLL_INTERVAL {
            self.check_device()?;
        }
        Ok(())
    }

    /// Check the connection, the device status and the heartbeat.
    fn check_device(&mut self) -> Result<(), ProtocolViolation> {
        self.last_check = Instant::now();
        self.is_disconnected |= self.device_link.is_disconnected()?;
        if self.function.bar().status().contains(DeviceStatus::FAILED) {
            self.endpoint.fail(EndpointError::GroupLost);
        }
        self.check_heartbeat();
        Ok(())
    }

    /// Check the heartbeat, if anything is waited for.
    fn check_heartbeat(&mut self) {
        let is_waited_for = self.endpoint.is_in_flight() || self.admin.is_open();
        let Some(heartbeat) = self.heartbeat.as_mut().filter(|_| !self.is_stalled) else { return };
        match heartbeat.check(self.function.bar().heartbeat(), is_waited_for, self.last_check) {
            Liveness::Alive => {}
            Liveness::Ping => {
                self.data.ring_device();
                self.device_link.ping();
            }
            Liveness::Dead => {
                crate::log::info!(device = self.device, limit = ?HEARTBEAT_TIMEOUT, "the device's heartbeat has stopped");
                self.is_stalled = true;
                self.endpoint.fail(EndpointError::PathLost);
            }
        }
    }
}

impl Drop for ZeroCopyDriver {
    fn drop(&mut self) {
        if self.registry.is_forked() {
            // The function belongs to the parent, and its registers are not mapped here.
            return;
        }
        self.retire();
        self.function.bar().set_control(HostControl::RESET);
    }
}
