//! The state machine of devices and jobs.
//!
//! Nothing here waits for a device. A tree to be reserved is returned as a [`Draft`]: the caller reserves it while the
//! state is unlocked and reports the result with [`State::finish_reservation`]. Its resources are claimed in the ledger
//! meanwhile.

mod crash_loop;
mod lease;
mod membership;
mod offer;
mod placement;
mod planning;
mod reconnect;
mod recovery;
mod replan;
mod report;
mod requests;
mod resume;
mod wait;

pub(super) use reconnect::RECONNECT_GRACE;

#[cfg(feature = "snapshot")]
pub(super) use lease::PendingRenewals;
pub(super) use placement::Draft;
pub(super) use report::encode as encode_report;
pub(super) use requests::Served;

use super::ControllerConfig;
use super::admit::{Devices, Placement};
use super::device::DeviceSession;
use super::entropy::Entropy;
use super::limits::{NameKind, PINNED_MAX, RANKS_MAX, check_name};
use super::outbox::{Frames, MessageSink};
use super::proto::{ClientReply, JoinRefusal, JoinRequest, Membership, QueuePosition, RecoveryOutcome, check_tenant};
use super::queue::Queue;
use super::resources::{DeviceKey, ResourceLedger};
use crate::plan::Child;
use crate::schedule::tree::Tree;
use crash_loop::CrashLoops;
use membership::{MembershipMessages, SharedFields};
use planning::Planning;
use recovery::RecoveryLog;
use resume::Resuming;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar};
use std::time::Instant;
use sumac_hal::ctrl::{Order, Rejection};
use sumac_hal::ids::{Epoch, GroupId, Rank};
use sumac_hal::port::Addr;

/// A connected client.
#[derive(Debug)]
pub(super) struct Client {
    sink: Box<dyn MessageSink>,
}

impl Client {
    pub(super) fn new(sink: Box<dyn MessageSink>) -> Self {
        Self { sink }
    }

    /// Close the connection; the connection thread then ends the membership.
    fn disconnect(&self) {
        self.sink.disconnect();
    }

    /// Send a message. If that fails, close the connection.
    pub(super) fn send(&self, reply: &ClientReply) {
        match Frames::of(reply) {
            Ok(frames) => self.put(&[frames]),
            Err(error) => {
                tracing::error!(%error, "cannot encode a message; disconnecting the client");
                self.disconnect();
            }
        }
    }

    /// Send an encoded message, which other clients may share.
    pub(super) fn put(&self, parts: &[Frames]) {
        self.sink.put(parts);
    }
}

/// One rank of a job.
#[derive(Debug)]
struct Member {
    request: Arc<JoinRequest>,
    /// The devices that the job is pinned to, root first; empty if the controller plans the tree.
    pinned: Vec<String>,
    client: Arc<Client>,
}

#[derive(Debug)]
struct Job {
    world: u32,
    members: BTreeMap<Rank, Member>,
    /// The job's secret, the same in every view.
    mesh_token: u64,
    /// The current view: how often the job was placed anew.
    view: u32,
    /// Whether the ranks were notified that the tree of this view is lost.
    tree_suspected: bool,
    /// Whether the ranks were notified of an abort.
    is_aborted: bool,
    /// Whether the ranks were notified of a lost rank, which makes others end.
    has_lost_ranks: bool,
    /// The ranks that have requested a replacement for this view's tree.
    replan_requests: BTreeSet<Rank>,
    /// Those of `replan_requests` that have stopped waiting, and when their requests expire if no other rank is
    /// waiting.
    replan_abandoned: BTreeSet<Rank>,
    replan_abandoned_until: Option<Instant>,
    /// For a resumed job: when to offer a tree at the earliest, so that devices have time to reconnect.
    offer_not_before: Option<Instant>,
    /// The devices of the last lost tree, excluded from the next one. A device that restarts has another session.
    lost_devices: Vec<Arc<DeviceSession>>,
    /// While a tree is on offer: the call that each rank named in `Pause`.
    offer: Option<BTreeMap<Rank, u64>>,
    /// The ranks that have requested the list of survivors.
    survivor_requests: BTreeSet<Rank>,
    /// How many lists of survivors were sent.
    shrink_count: u32,
    /// The tree of this view, or why there is none. `None` before the job has started.
    placement: Option<Result<Placement, String>>,
    /// The group that is being planned or reserved.
    placing: Option<GroupId>,
    /// The group claimed for the job while a tree is on offer, and until when.
    offer_claim: Option<(GroupId, Instant)>,
    /// Whether `MoveAt` was sent to all ranks.
    is_moving: bool,
    /// Until when joining waits for a tree.
    join_waits_until: Option<Instant>,
    /// The latest time at which joining returns, set once it has to wait.
    join_deadline: Option<Instant>,
    /// Devices that a rank could not attach to. A device that restarts has another session.
    declined_devices: Vec<Arc<DeviceSession>>,
    /// How often the ranks declined a tree without naming a device, and whether to offer one again.
    decline_count: u32,
    offer_again_due: bool,
    /// The expression of a declared order, fixed when the job started.
    expression: Option<Tree>,
    /// The position in the queue that was last sent to the ranks.
    reported_position: Option<QueuePosition>,
}

impl Job {
    fn new(world: u32, mesh_token: u64) -> Self {
        Self {
            world,
            members: BTreeMap::new(),
            mesh_token,
            view: 0,
            tree_suspected: false,
            is_aborted: false,
            has_lost_ranks: false,
            replan_requests: BTreeSet::new(),
            replan_abandoned: BTreeSet::new(),
            replan_abandoned_until: None,
            offer_not_before: None,
            lost_devices: Vec::new(),
            offer: None,
            survivor_requests: BTreeSet::new(),
            shrink_count: 0,
            placement: None,
            placing: None,
            offer_claim: None,
            is_moving: false,
            join_waits_until: None,
            join_deadline: None,
            declined_devices: Vec::new(),
            decline_count: 0,
            offer_again_due: false,
            expression: None,
            reported_position: None,
        }
    }

    /// The request of any rank: parameters of the job are the same on all ranks.
    fn first(&self) -> Option<&Member> {
        self.members.values().next()
    }

    fn tenant(&self) -> &str {
        self.first().map_or("", |member| &member.request.terms.tenant)
    }

    fn has(&self, rank: Rank, client: &Arc<Client>) -> bool {
        self.members.get(&rank).is_some_and(|member| Arc::ptr_eq(&member.client, client))
    }

    /// The expression that the job evaluates. Without a tree, it is one node with all ranks, so that a declared order
    /// is still defined.
    fn expression_of(&self, placed: &Result<Placement, String>) -> Vec<Vec<Child>> {
        let flat = || vec![(0..self.world).map(|rank| Child::Rank(Rank(rank))).collect()];
        placed.as_ref().map_or_else(|_| flat(), Placement::expression)
    }

    /// Fix the expression of a declared order when the job starts.
    fn declare(&mut self) {
        let Some(placed) = &self.placement else { return };
        let order = self.first().map_or(Order::Arrival, |member| member.request.order);
        if self.expression.is_none() && order != Order::Arrival {
            self.expression = Tree::new(self.expression_of(placed), self.world, order).ok();
        }
    }

    /// Send each rank its membership.
    fn send_memberships(
        &mut self,
        config: &ControllerConfig,
        queue: Option<QueuePosition>,
        reply: impl Fn(Box<Membership>) -> ClientReply,
    ) {
        self.reported_position = queue;
        let Some(placed) = &self.placement else { return };
        let mesh: Vec<_> = self.members.values().map(|member| member.request.mesh_addr).collect();
        let recovery_mesh: Vec<_> = self.members.values().map(|member| member.request.recovery_addr).collect();
        let expression = self.expression_of(placed);
        let (mesh_token, table) = (self.mesh_token, config.table.clone());
        let messages = MembershipMessages::new(SharedFields { mesh, recovery_mesh, mesh_token, expression, table });
        for (rank, member) in &self.members {
            let tree = placed.as_ref().map(|placement| placement.membership(config, *rank)).map_err(Clone::clone);
            messages.send(&member.client, (tree, queue), &reply);
        }
    }
}

/// The devices and jobs of a controller.
#[derive(Debug)]
pub(super) struct State {
    pub(super) devices: Devices,
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
    /// The current time, set by whoever locks the state.
    pub(super) now: Instant,
    /// Drafts to be reserved.
    pub(super) ready: VecDeque<Draft>,
    /// Notified when `ready` grows, something must be planned, or a deadline is added.
    wake: Arc<Condvar>,
    /// Devices that refused although the ledger has resources left, with the slots that they reported in use: they hold
    /// groups that this controller does not know.
    crowded: BTreeMap<DeviceKey, u32>,
    /// Devices that did not respond to a reservation or renewal: jobs may have been placed without them.
    unresponsive: BTreeSet<DeviceKey>,
    /// Disconnected devices, and when their trees count as lost.
    disconnected: BTreeMap<DeviceKey, Instant>,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
}

/// The next group and its epoch as one number, with the epoch's term in the high half and the group in the low half.
///
/// It counts up from the controller's start time, with [`GROUPS_PER_MS`] numbers per millisecond. So no two
/// incarnations of a controller issue the same pair unless the clock is set back in between, and terms never decrease
/// (PROTOCOL 4).
#[derive(Debug)]
struct NextView(u64);

/// More groups than a controller can create per millisecond, so that the counter never overtakes the clock.
const GROUPS_PER_MS: u64 = 256;

impl NextView {
    /// The first number of a controller that started `started_ms` after 1970. The term wraps after 34 years.
    const fn at(started_ms: u64) -> Self {
        Self(started_ms.wrapping_mul(GROUPS_PER_MS))
    }

    const fn take(&mut self) -> (GroupId, Epoch) {
        let view = (GroupId(self.0 as u32), Epoch { term: (self.0 >> 32) as u16, counter: 1 });
        self.0 = self.0.wrapping_add(1);
        view
    }
}

impl State {
    /// Create a state without devices and jobs, for a controller that started `started_ms` after 1970.
    pub(super) fn new(config: &ControllerConfig, started_ms: u64, entropy: Entropy, wake: Arc<Condvar>) -> Self {
        Self {
            devices: BTreeMap::new(),
            jobs: BTreeMap::new(),
            resuming: BTreeMap::new(),
            ledger: ResourceLedger::new(config.quotas.clone()),
            queue: Queue::default(),
            planning: Planning::default(),
            crash_loops: CrashLoops::new(config.limits.device_backoff),
            recoveries: RecoveryLog::default(),
            next_view: NextView::at(started_ms),
            entropy,
            devices_settled_at: Instant::now() + RECONNECT_GRACE,
            now: Instant::now(),
            ready: VecDeque::new(),
            wake,
            crowded: BTreeMap::new(),
            unresponsive: BTreeSet::new(),
            disconnected: BTreeMap::new(),
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    /// Plant a bug in the state, its ledger and its queue.
    #[cfg(all(feature = "planted", feature = "snapshot"))]
    pub(super) const fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        (self.bug, self.ledger.bug, self.queue.bug) = (Some(bug), Some(bug), Some(bug));
    }

    /// Adopt the claims of an earlier incarnation: a planted bug.
    #[cfg(all(feature = "planted", feature = "snapshot"))]
    pub(super) fn inherit_claims(&mut self, earlier: Self) {
        self.ledger.inherit_claims(earlier.ledger);
    }

    /// Add a device, and consider it for jobs without a tree.
    pub(super) fn add_device(
        &mut self,
        config: &ControllerConfig,
        session: &Arc<DeviceSession>,
    ) -> Result<(), DeviceRefused> {
        let name = session.name().to_owned();
        if let Some(holder) = self.devices.get(&name) {
            return Err(taken(holder, session, self.now));
        }
        let limit = config.limits.devices;
        if self.devices.len() >= limit {
            return Err(DeviceRefused::Limit { limit });
        }
        self.ledger.add_device(session.key(), session.capacity());
        self.devices.insert(name, Arc::clone(session));
        self.planning.devices_version += 1;
        self.end_reconnect_grace(&session.key());
        self.record_connect(session);
        self.reconsider();
        Ok(())
    }

    /// Drop all records of a device's session that has ended.
    fn forget(&mut self, session: &Arc<DeviceSession>) {
        for job in self.jobs.values_mut().chain(self.resuming.values_mut().map(|resuming| &mut resuming.job)) {
            job.declined_devices.retain(|device| !Arc::ptr_eq(device, session));
            job.lost_devices.retain(|device| !Arc::ptr_eq(device, session));
        }
        self.crowded.remove(&session.key());
        self.unresponsive.remove(&session.key());
    }

    /// How many records of device sessions exist, of a job and in total.
    #[cfg(test)]
    pub(super) fn remembered_sessions(&self, name: &str) -> usize {
        let of_job = self.jobs.get(name).map_or(0, |job| job.declined_devices.len() + job.lost_devices.len());
        of_job + self.crowded.len() + self.unresponsive.len()
    }

    pub(super) fn remove_device(&mut self, session: &Arc<DeviceSession>) {
        if self.devices.get(session.name()).is_some_and(|known| Arc::ptr_eq(known, session)) {
            self.devices.remove(session.name());
            self.planning.devices_version += 1;
            self.forget(session);
            self.ledger.remove_device(&session.key());
            self.start_reconnect_grace(session.key());
            self.record_disconnect(session);
            self.reconsider();
        }
    }

    /// Add a rank to a job, which starts with its last rank. Returns the place that [`State::depart`] expects.
    pub(super) fn join(
        &mut self,
        config: &ControllerConfig,
        request: JoinRequest,
        pinned: Vec<String>,
        client: &Arc<Client>,
    ) -> Result<(String, Rank), JoinRefusal> {
        check_request(&request, &pinned)?;
        let (name, rank, world) = (request.job.clone(), request.rank, request.world);
        if !self.jobs.contains_key(&name) {
            self.check_jobs(config)?;
        }
        let token = self.entropy.number([self.next_view.0, self.jobs.len() as u64]);
        if self.resuming.keys().any(|(other, _)| *other == name) {
            return Err(JoinRefusal::Running { job: name });
        }
        let job = self.jobs.entry(name.clone()).or_insert_with(|| Job::new(world, token));
        if job.placement.is_some() || job.members.len() == job.world as usize {
            return Err(JoinRefusal::Running { job: name });
        }
        if job.members.contains_key(&rank) {
            return Err(JoinRefusal::RankTaken { rank, job: name });
        }
        if let Some(member) = job.members.values().next() {
            agree(&name, (&request, &pinned), member)?;
        }
        job.members.insert(rank, Member { request: Arc::new(request), pinned, client: Arc::clone(client) });
        if job.members.len() == world as usize {
            self.request_tree(&name, 0);
        }
        Ok((name, rank))
    }

    /// Check the limit on jobs.
    fn check_jobs(&self, config: &ControllerConfig) -> Result<(), JoinRefusal> {
        let limit = config.limits.jobs;
        if self.jobs.len() + self.resuming.len() < limit {
            return Ok(());
        }
        Err(JoinRefusal::Limit { what: "jobs".into(), limit: limit as u64 })
    }

    /// A rank has left or, unless `clean`, is lost. The job ends with its last rank.
    pub(super) fn depart(&mut self, (name, rank): (&str, Rank), client: &Arc<Client>, clean: bool) {
        if self.jobs.get(name).is_some_and(|job| job.has(rank, client)) {
            self.depart_from(name, &[rank], clean);
        } else {
            self.depart_resuming((name, rank), client, clean);
        }
    }

    /// Ranks were lost together: notify only the survivors.
    pub(super) fn depart_all(&mut self, gone: Vec<(Arc<Client>, (String, Rank))>) {
        let mut by_job: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
        for (client, (name, rank)) in gone {
            if self.jobs.get(&name).is_some_and(|job| job.has(rank, &client)) {
                by_job.entry(name).or_default().push(rank);
            } else {
                self.depart_resuming((&name, rank), &client, false);
            }
        }
        by_job.iter().for_each(|(name, ranks)| self.depart_from(name, ranks, false));
    }

    fn depart_from(&mut self, name: &str, ranks: &[Rank], clean: bool) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        for rank in ranks {
            job.members.remove(rank);
            job.survivor_requests.remove(rank);
        }
        // A tree needs all ranks, so a pending one is dropped.
        job.placing = None;
        let held = job.offer_claim.take();
        let is_begun = job.placement.is_some();
        let Some(first) = ranks.first() else { return };
        if is_begun {
            if !clean {
                // One line for all ranks that are lost together.
                let others = ranks.len() - 1;
                if std::mem::replace(&mut job.has_lost_ranks, true) || job.is_aborted {
                    tracing::info!(job = name, rank = %first, others, "rank disconnected after its job failed");
                } else {
                    tracing::warn!(job = name, rank = %first, others, "rank is lost");
                    let cause = if others == 0 {
                        format!("{first} is lost")
                    } else {
                        format!("{} ranks are lost", ranks.len())
                    };
                    self.recoveries.begin(name, job.view, &cause, self.now);
                }
                job.broadcast_all(ranks.iter().map(|rank| ClientReply::RankLost(*rank)));
            }
            job.refuse_replans(name, *first);
            job.withdraw_offer();
            if let Some(ranks) = job.try_report_survivors() {
                self.recoveries.end(name, RecoveryOutcome::Survivors { ranks }, self.now);
            }
        } else {
            // Do not let the other ranks wait for one that may not come back.
            job.broadcast(&ClientReply::Refused(JoinRefusal::RankLost { rank: *first, job: name.to_owned() }));
        }
        let is_over = !is_begun || job.members.is_empty();
        if is_over && let Some(job) = self.jobs.remove(name) {
            tracing::info!(job = name, "job ends");
            self.recoveries.end(name, RecoveryOutcome::JobEnded, self.now);
            if let Some(Ok(placement)) = job.placement {
                self.release(&placement);
            }
        }
        if let Some((group, _)) = held {
            self.ledger.free(group);
        }
        self.leave_queue(name);
        self.serve_queue();
    }
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

/// Refuse `session`, whose name `holder` has, and probe the holder. A machine that was reset closes none of its
/// connections: they end when something is sent on them, and then the device's next incarnation is accepted.
fn taken(holder: &DeviceSession, session: &DeviceSession, now: Instant) -> DeviceRefused {
    let has_answered = holder.probe(now);
    // A device that reconnects before its previous connection has ended finds nobody but itself.
    let is_alive = has_answered && holder.key() != session.key();
    DeviceRefused::Taken { holder: holder.announce.data_addrs.first().copied(), is_alive }
}

/// Check a rank's request before it determines an allocation or is displayed.
fn check_request(request: &JoinRequest, pinned: &[String]) -> Result<(), JoinRefusal> {
    check_tenant(&request.terms.tenant)?;
    check_name(NameKind::Job, "job", &request.job)?;
    let (rank, world) = (request.rank, request.world);
    if world > RANKS_MAX {
        return Err(JoinRefusal::TooManyRanks { world, limit: RANKS_MAX });
    }
    if rank.0 >= world {
        return Err(JoinRefusal::InvalidRank { rank, world });
    }
    if pinned.len() > PINNED_MAX {
        return Err(JoinRefusal::Limit { what: "pinned devices per job".into(), limit: PINNED_MAX as u64 });
    }
    pinned.iter().try_for_each(|device| check_name(NameKind::Fabric, "device", device))?;
    request.host.iter().try_for_each(|host| check_name(NameKind::Fabric, "host", host))?;
    Ok(request.machine.iter().try_for_each(|machine| check_name(NameKind::Fabric, "machine", machine))?)
}

/// Check that a rank agrees with one that joined before on the job's parameters.
fn agree(job: &str, (request, pinned): (&JoinRequest, &[String]), member: &Member) -> Result<(), JoinRefusal> {
    let first = &member.request;
    let disagree = |what: &str, mine: String, theirs: String| JoinRefusal::Mismatch {
        job: job.to_owned(),
        what: what.to_owned(),
        first: mine,
        other: theirs,
        rank: first.rank,
    };
    if request.world != first.world {
        return Err(disagree("the number of ranks", request.world.to_string(), first.world.to_string()));
    }
    if request.terms.tenant != first.terms.tenant {
        return Err(disagree("the tenant", request.terms.tenant.clone(), first.terms.tenant.clone()));
    }
    if request.terms.wait_ms != first.terms.wait_ms {
        let ms = |request: &JoinRequest| format!("{} ms", request.terms.wait_ms);
        return Err(disagree("the wait for a tree", ms(request), ms(first)));
    }
    if request.order != first.order {
        return Err(disagree("the order", format!("{:?}", request.order), format!("{:?}", first.order)));
    }
    if *pinned != member.pinned[..] {
        return Err(disagree("the devices", format!("{pinned:?}"), format!("{:?}", member.pinned)));
    }
    if request.host.is_some() != first.host.is_some() {
        let named = |host: &Option<String>| host.clone().unwrap_or_else(|| "none".into());
        return Err(disagree("whether hosts are named", named(&request.host), named(&first.host)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Restarts one millisecond later, an hour later, and at the end of a term.
    #[test]
    fn restarted_controller_issues_no_group_of_its_predecessor() {
        let last_of_term = (1 << 32) / GROUPS_PER_MS - 1;
        for (started_ms, later_ms) in [(1_750_000_000_000, 1), (1_750_000_000_000, 3_600_000), (last_of_term, 1)] {
            let views = |ms| {
                let mut next = NextView::at(ms);
                (0..GROUPS_PER_MS).map(|_| next.take()).collect::<Vec<_>>()
            };
            let (first, second) = (views(started_ms), views(started_ms + later_ms));
            assert!(second.iter().all(|view| !first.contains(view)), "{started_ms}: {:?} twice", second[0]);
            assert!(first[0].1 <= second[0].1, "terms do not fall");
        }
    }
}
