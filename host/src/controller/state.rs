//! The devices and jobs of a controller: every decision about them, one module per subject.
//!
//! Nothing here waits, and nothing reads a clock. Messages are queued in [`Outputs`]; requests to devices whose
//! responses decide something are an exchange ([`Links`]) with a [`Purpose`], which [`State::proceed`] takes up again.
//! Plans are made outside ([`State::next_plan`]).

mod check;
mod crash_loop;
mod departure;
mod hosts;
mod job;
mod lease;
mod lost_devices;
mod membership;
mod offer;
mod paths;
mod placement;
mod plan;
mod planning;
mod rails;
mod reconnect;
mod recovery;
mod replan;
mod report;
mod reporting;
mod requests;
mod reservation;
mod resume;
mod stripes;
mod update;
mod wait;

#[cfg(test)]
pub(super) use placement::Draft;
pub use plan::{Plan, PlanResult};
pub(super) use reconnect::RECONNECT_GRACE;
pub use reporting::{EncodedReport, ReportJob};
#[cfg(test)]
pub(super) use reservation::ReservationFailure;
pub(super) use stripes::PlannedTrees;

use super::ControllerConfig;
use super::admit::Devices;
use super::device::{Device, Links, Reply};
use super::entropy::Entropy;
use super::output::{ConnId, Outputs};
use super::proto::{JoinRefusal, JoinRequest, PairStatus};
use super::queue::Queue;
use super::resources::{DeviceKey, ResourceLedger};
use crate::secret::JobSecret;
use check::{agree, check_request};
use crash_loop::CrashLoops;
use job::{Job, Member};
use lease::LeaseRound;
use paths::{AskedNodes, PathProbes};
use placement::Draft as PendingDraft;
use planning::Planning;
use recovery::RecoveryLog;
use reporting::{PendingReport, Reporting};
use reservation::Reserving;
use resume::Resuming;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use sumac_hal::ctrl::{Envelope, Rejection, Request};
use sumac_hal::ids::{Epoch, GroupId, Rank};
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;
use update::{Relayed, Updates};

/// What the responses of devices are awaited for.
#[derive(Debug)]
pub(super) enum Purpose {
    Reserve(Box<Reserving>),
    ProbePaths(AskedNodes),
    Renew(LeaseRound),
    Report(PendingReport),
    Update(Relayed),
    Stop,
}

/// The devices and jobs of a controller.
#[derive(Debug)]
pub(super) struct State {
    pub(super) devices: Devices,
    /// The devices that serve one job each.
    pub(super) host_devices: Devices,
    jobs: BTreeMap<String, Job>,
    /// Jobs of an earlier controller whose ranks are coming back.
    resuming: BTreeMap<resume::Key, Resuming>,
    ledger: ResourceLedger,
    queue: Queue,
    planning: Planning,
    crash_loops: CrashLoops,
    recoveries: RecoveryLog,
    next_view: NextView,
    entropy: Entropy,
    /// When devices of an earlier incarnation of the controller should have reconnected.
    devices_settled_at: Instant,
    /// The current time, set by whoever calls.
    pub(super) now: Instant,
    /// Drafts to be reserved.
    pub(super) ready: VecDeque<PendingDraft>,
    /// Reserved trees whose paths are probed.
    pub(super) path_probes: PathProbes,
    /// What is to be sent.
    pub(super) output: Outputs,
    /// The connections to devices.
    pub(super) links: Links<Purpose>,
    /// When the next round of renewals starts.
    renews_at: Instant,
    reporting: Reporting,
    /// All groups are released, for shutdown.
    pub(super) has_released_all: bool,
    /// Devices that refused although the ledger has resources left, with the slots that they reported in use: they hold
    /// groups that this controller does not know.
    crowded: BTreeMap<DeviceKey, u32>,
    /// Devices that did not respond to a reservation or renewal: jobs may have been placed without them.
    unresponsive: BTreeSet<DeviceKey>,
    /// Disconnected devices, and when their trees count as lost.
    disconnected: BTreeMap<DeviceKey, Instant>,
    /// What operators do to devices.
    updates: Updates,
    /// The controller's part in a pair, for reports.
    pub(super) pair: Option<PairStatus>,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
}

/// The next group and its epoch as one number, with the epoch's term in the high half and the group in the low half.
///
/// It counts up from the controller's start time, with [`GROUPS_PER_MS`] numbers per millisecond. So no two
/// incarnations of a controller issue the same pair unless the clock is set back in between, and terms never decrease
/// (PROTOCOL 4). Of two controllers that stand in for each other, one issues even numbers and the other one odd ones,
/// so that their clocks do not matter.
#[derive(Debug)]
struct NextView(u64);

/// More than twice the groups that a controller can create per millisecond, so that the counter never overtakes the
/// clock.
const GROUPS_PER_MS: u64 = 256;

impl NextView {
    /// The first number of a controller that started `started_ms` after 1970. The term wraps after 34 years.
    const fn at(started_ms: u64, is_second: bool) -> Self {
        Self(started_ms.wrapping_mul(GROUPS_PER_MS) + is_second as u64)
    }

    const fn take(&mut self) -> (GroupId, Epoch) {
        let view = (GroupId(self.0 as u32), Epoch { term: (self.0 >> 32) as u16, counter: 1 });
        self.0 = self.0.wrapping_add(2);
        view
    }
}

impl State {
    /// Create a state without devices and jobs, for a controller that starts `now`, `started_ms` after 1970.
    pub(super) fn new(config: &ControllerConfig, started_ms: u64, entropy: Entropy, now: Instant) -> Self {
        Self {
            devices: BTreeMap::new(),
            host_devices: BTreeMap::new(),
            jobs: BTreeMap::new(),
            resuming: BTreeMap::new(),
            ledger: ResourceLedger::new(config.quotas.clone()),
            queue: Queue::default(),
            planning: Planning::default(),
            crash_loops: CrashLoops::new(config.limits.device_backoff),
            recoveries: RecoveryLog::default(),
            next_view: NextView::at(started_ms, is_second(config)),
            entropy,
            devices_settled_at: now + RECONNECT_GRACE,
            now,
            ready: VecDeque::new(),
            path_probes: PathProbes::default(),
            output: Outputs::default(),
            links: Links::default(),
            renews_at: now + config.lease / 3,
            reporting: Reporting::default(),
            has_released_all: false,
            crowded: BTreeMap::new(),
            unresponsive: BTreeSet::new(),
            disconnected: BTreeMap::new(),
            updates: Updates::default(),
            pair: None,
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    /// The controller becomes active, `started_ms` after 1970: number groups from here, and wait for the devices.
    pub(super) fn activate(&mut self, config: &ControllerConfig, started_ms: u64) {
        self.next_view = NextView::at(started_ms, is_second(config));
        self.devices_settled_at = self.now + RECONNECT_GRACE;
    }

    /// The source of secrets.
    pub(super) const fn entropy(&self) -> Entropy {
        self.entropy
    }

    /// Take up what an exchange with devices was for.
    pub(super) fn proceed(&mut self, config: &ControllerConfig, purpose: Purpose, replies: Vec<Reply>) {
        match purpose {
            Purpose::Reserve(reserving) => self.continue_reservation(config, *reserving, replies),
            Purpose::ProbePaths(asked) => self.continue_path_probes(config, asked, replies),
            Purpose::Renew(round) => self.finish_lease_round(round, replies),
            Purpose::Report(report) => self.finish_report(report, replies),
            Purpose::Update(relayed) => self.finish_update(relayed, replies),
            Purpose::Stop => self.has_released_all = true,
        }
    }

    /// Plant a bug in the state, its ledger and its queue.
    #[cfg(feature = "planted")]
    pub(super) const fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        (self.bug, self.ledger.bug, self.queue.bug) = (Some(bug), Some(bug), Some(bug));
    }

    /// Adopt the claims of an earlier incarnation: a planted bug.
    #[cfg(feature = "planted")]
    pub(super) fn inherit_claims(&mut self, earlier: Self) {
        self.ledger.inherit_claims(earlier.ledger);
    }

    /// Add a device, and consider it for jobs without a tree.
    pub(super) fn add_device(&mut self, config: &ControllerConfig, device: &Arc<Device>) -> Result<(), DeviceRefused> {
        let name = device.name().to_owned();
        if let Some(holder) = self.devices.get(&name).cloned() {
            return Err(self.refuse_name(&holder, device));
        }
        let limit = config.limits.devices;
        if self.devices.len() >= limit {
            return Err(DeviceRefused::Limit { limit });
        }
        self.links.add(&mut self.output, device);
        self.ledger.add_device(device.key(), device.capacity());
        self.devices.insert(name, Arc::clone(device));
        self.planning.devices_version += 1;
        self.end_reconnect_grace(&device.key());
        self.record_connect(device);
        self.reconsider();
        Ok(())
    }

    /// Refuse `device`, whose name `holder` has, and probe the holder. A machine that was reset closes none of its
    /// connections: they end when something is sent on them, and then the device's next incarnation is accepted.
    fn refuse_name(&mut self, holder: &Device, device: &Device) -> DeviceRefused {
        let has_answered = self.links.probe(&mut self.output, holder, self.now);
        // A device that reconnects before its previous connection has ended finds nobody but itself.
        let is_alive = has_answered && holder.key() != device.key();
        DeviceRefused::Taken { holder: holder.announce.data_addrs.first().copied(), is_alive }
    }

    /// Tell a device why it is not registered, and close the connection.
    pub(super) fn reject(&mut self, conn: ConnId, rejection: Rejection) {
        self.output.request(conn, &Envelope { id: u32::MAX, message: Request::Rejected(rejection) });
        self.output.close(conn);
    }

    /// Drop all records of a device's session that has ended.
    fn forget(&mut self, session: &Arc<Device>) {
        for job in self.jobs.values_mut().chain(self.resuming.values_mut().map(|resuming| &mut resuming.job)) {
            job.declined_devices.retain(|device| !Arc::ptr_eq(device, session));
            job.lost_devices.disconnected(session);
        }
        self.crowded.remove(&session.key());
        self.unresponsive.remove(&session.key());
    }

    /// How many records of device sessions exist, of a job and in total.
    #[cfg(test)]
    pub(super) fn remembered_sessions(&self, name: &str) -> usize {
        let of_job = self.jobs.get(name).map_or(0, |job| job.declined_devices.len() + job.lost_devices.devices().len());
        of_job + self.crowded.len() + self.unresponsive.len()
    }

    /// The connection of a device has ended. Returns the device, if there was one.
    pub(super) fn remove_device(&mut self, conn: ConnId) -> Option<Arc<Device>> {
        let device = self.links.remove(conn)?;
        let is_host_device = self.remove_host_device(&device);
        if !is_host_device {
            self.devices.remove(device.name());
        }
        self.planning.devices_version += 1;
        self.forget(&device);
        self.forget_update(&device);
        self.ledger.remove_device(&device.key());
        self.start_reconnect_grace(device.key());
        if !is_host_device {
            self.record_disconnect(&device);
        }
        self.reconsider();
        Some(device)
    }

    /// Add a rank to a job, which starts with its last rank. Returns the place that [`State::depart`] expects.
    pub(super) fn join(
        &mut self,
        config: &ControllerConfig,
        request: JoinRequest,
        pinned: Vec<String>,
        client: ConnId,
    ) -> Result<(String, Rank), JoinRefusal> {
        check_request(&request, &pinned)?;
        let (name, rank, world) = (request.job.clone(), request.rank, request.world);
        let expression = match &request.terms.stripe {
            Some(stripe) => self.check_stripe(&request, stripe)?,
            None => None,
        };
        if let Some(rail) = &request.terms.rail {
            self.check_rail(config, &request, rail)?;
        }
        if !self.jobs.contains_key(&name) {
            self.check_jobs(config)?;
        }
        let secret = JobSecret::new(self.entropy.bytes([self.next_view.0, self.jobs.len() as u64]));
        if self.resuming.keys().any(|(other, _)| *other == name) {
            return Err(JoinRefusal::Running { job: name });
        }
        let job = self.jobs.entry(name.clone()).or_insert_with(|| Job { expression, ..Job::new(world, secret) });
        if job.placement.is_some() || job.members.len() == job.world as usize {
            return Err(JoinRefusal::Running { job: name });
        }
        if job.members.contains_key(&rank) {
            return Err(JoinRefusal::RankTaken { rank, job: name });
        }
        if let Some(member) = job.members.values().next() {
            agree(&name, (&request, &pinned), member)?;
        }
        job.members.insert(rank, Member { request: Arc::new(request), pinned, client });
        if job.members.len() == world as usize {
            self.start_job(&name);
        }
        Ok((name, rank))
    }

    pub(super) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Check the limit on jobs.
    fn check_jobs(&self, config: &ControllerConfig) -> Result<(), JoinRefusal> {
        let limit = config.limits.jobs;
        if self.jobs.len() + self.resuming.len() < limit {
            return Ok(());
        }
        Err(JoinRefusal::Limit { what: "jobs".into(), limit: limit as u64 })
    }
}

/// Whether the controller is the second one of a pair.
fn is_second(config: &ControllerConfig) -> bool {
    config.pair.as_ref().is_some_and(|pair| pair.is_second)
}

/// Why a device is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeviceRefused {
    /// The name is in use.
    #[error("a device of that name is already connected")]
    Taken { holder: Option<Addr>, is_alive: bool },
    /// The limit on devices is reached.
    #[error("the limit of {limit} devices is reached; start the controller with a higher limit")]
    Limit { limit: usize },
}

impl DeviceRefused {
    /// What the refused device is told.
    pub(super) fn rejection(&self) -> Rejection {
        match *self {
            Self::Taken { holder, is_alive } => Rejection::NameTaken { holder, is_alive },
            Self::Limit { limit } => Rejection::TooMany { limit: u32::try_from(limit).unwrap_or(u32::MAX) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Restarts one millisecond later, an hour later, and at the end of a term.
    #[test]
    fn restarted_controller_issues_no_group_of_its_predecessor() {
        let last_of_term = (1 << 32) / GROUPS_PER_MS - 1;
        for (started_ms, later_ms) in [(1_750_000_000_000, 1), (1_750_000_000_000, 3_600_000), (last_of_term, 1)] {
            let views = |ms, is_second| {
                let mut next = NextView::at(ms, is_second);
                (0..GROUPS_PER_MS / 2).map(|_| next.take()).collect::<Vec<_>>()
            };
            let (first, second) = (views(started_ms, false), views(started_ms + later_ms, false));
            let other = views(started_ms, true);
            assert!(other.iter().all(|view| !first.contains(view)), "{started_ms}: both of a pair have {:?}", other[0]);
            assert!(second.iter().all(|view| !first.contains(view)), "{started_ms}: {:?} twice", second[0]);
            assert!(first[0].1 <= second[0].1, "terms do not fall");
        }
    }
}
