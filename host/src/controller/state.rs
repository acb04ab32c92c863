//! Devices and jobs, and what happens to them.
//!
//! Nothing here waits for a device: what has to be asked of one is returned as a [`Draft`], for the caller to carry out
//! when the state is unlocked, and to bring back by [`State::settle`]. Its place in the books is taken meanwhile.

mod absence;
mod lease;
mod offer;
mod place;
mod places;
mod planning;
mod repair;
mod report;
mod restarts;
mod resume;
mod serve;
mod wait;

pub(super) use absence::ABSENCE;

#[cfg(feature = "snapshot")]
pub(super) use lease::Renewing;
pub(super) use place::Draft;
pub(super) use report::encode as encode_report;
pub(super) use serve::Served;

use super::ControllerConfig;
use super::admit::{Devices, Placement};
use super::books::{Books, DeviceKey};
use super::device::DeviceSession;
use super::entropy::Entropy;
use super::limits::{NameKind, PINNED_MAX, RANKS_MAX, check_name};
use super::line::{Frames, Line};
use super::proto::{ClientReply, JoinRefusal, JoinRequest, Membership, QueuePlace, check_tenant};
use super::queue::Queue;
use crate::plan::Child;
use crate::schedule::tree::Tree;
use places::{Places, PlacesTail};
use planning::Planning;
use restarts::Restarts;
use resume::Resuming;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar};
use std::time::Instant;
use sumac_hal::ctrl::{Order, Request};
use sumac_hal::ids::{Epoch, GroupId, Rank};

/// A connected client, as somebody to tell something.
#[derive(Debug)]
pub(super) struct Client {
    line: Box<dyn Line>,
}

impl Client {
    pub(super) fn new(line: Box<dyn Line>) -> Self {
        Self { line }
    }

    /// End the connection, which its reader notices.
    fn hang_up(&self) {
        self.line.hang_up();
    }

    /// Tell it; a client that can't be told is hung up on, which its reader notices.
    pub(super) fn send(&self, reply: &ClientReply) {
        match Frames::of(reply) {
            Ok(frames) => self.put(&[frames]),
            Err(error) => {
                tracing::error!(%error, "client can't be told");
                self.hang_up();
            }
        }
    }

    /// Tell it what others are told, too.
    pub(super) fn put(&self, parts: &[Frames]) {
        self.line.put(parts);
    }
}

/// One rank of a job.
#[derive(Debug)]
struct Member {
    request: Arc<JoinRequest>,
    /// The devices that the job is pinned to, the root first; empty where the controller plans.
    pinned: Vec<String>,
    client: Arc<Client>,
}

#[derive(Debug)]
struct Job {
    world: u32,
    members: BTreeMap<Rank, Member>,
    /// What the connections of its schedules say first, in every view.
    mesh_token: u64,
    /// How often it was placed anew.
    view: u32,
    /// Whether its ranks were told that the tree of this view is lost.
    suspected: bool,
    /// Whether its ranks were told that the job is over.
    is_over: bool,
    /// Whether they were told that one of them is lost: others end for that.
    has_lost: bool,
    /// The ranks that wait for another tree than this view's.
    waiting: BTreeSet<Rank>,
    /// Those of them that wait no more, and from when on the wishes are void if no other rank does.
    forgone: BTreeSet<Rank>,
    forgone_until: Option<Instant>,
    /// Until when devices may come back, of a job from before this controller, before it is offered a tree.
    settles_at: Option<Instant>,
    /// The devices of the last tree that was lost: they are not asked for the next one. One that restarts is another.
    lost: Vec<Arc<DeviceSession>>,
    /// While a tree is offered to a job without one: from which call on each rank waits.
    offer: Option<BTreeMap<Rank, u64>>,
    /// Those that have asked who is left.
    shrinking: BTreeSet<Rank>,
    /// How often they were told.
    shrunk: u32,
    /// This view's. `None` before its ranks have been told one.
    placement: Option<Result<Placement, String>>,
    /// The group that devices are being asked for.
    placing: Option<GroupId>,
    /// What is held for it while a tree is offered, and until when.
    hold: Option<(GroupId, Instant)>,
    /// All ranks have been told where to move.
    is_moving: bool,
    /// How long its ranks wait for a tree before they are told that there is none.
    waits_until: Option<Instant>,
    /// Until when they wait at most, once they have to.
    joins_by: Option<Instant>,
    /// Devices that a rank could not attach to. One that restarts is another.
    declined: Vec<Arc<DeviceSession>>,
    /// How often its ranks have declined a tree for no device's sake, and whether they are to be offered one again.
    declines: u32,
    has_declined: bool,
    /// What a declared order has meant since it began.
    expression: Option<Tree>,
    /// Its place in the queue as its ranks were told last.
    told: Option<QueuePlace>,
}

impl Job {
    fn new(world: u32, mesh_token: u64) -> Self {
        Self {
            world,
            members: BTreeMap::new(),
            mesh_token,
            view: 0,
            suspected: false,
            is_over: false,
            has_lost: false,
            waiting: BTreeSet::new(),
            forgone: BTreeSet::new(),
            forgone_until: None,
            settles_at: None,
            lost: Vec::new(),
            offer: None,
            shrinking: BTreeSet::new(),
            shrunk: 0,
            placement: None,
            placing: None,
            hold: None,
            is_moving: false,
            waits_until: None,
            joins_by: None,
            declined: Vec::new(),
            declines: 0,
            has_declined: false,
            expression: None,
            told: None,
        }
    }

    /// Return what a rank said of the job when it joined: what matters is the same at all ranks.
    fn first(&self) -> Option<&Member> {
        self.members.values().next()
    }

    fn tenant(&self) -> &str {
        self.first().map_or("", |member| &member.request.terms.tenant)
    }

    fn has(&self, rank: Rank, client: &Arc<Client>) -> bool {
        self.members.get(&rank).is_some_and(|member| Arc::ptr_eq(&member.client, client))
    }

    /// Return what the job would combine. Without a tree in the network all ranks are one node's, so that a declared order
    /// means something all the same.
    fn expression_of(&self, placed: &Result<Placement, String>) -> Vec<Vec<Child>> {
        let flat = || vec![(0..self.world).map(|rank| Child::Rank(Rank(rank))).collect()];
        placed.as_ref().map_or_else(|_| flat(), Placement::expression)
    }

    /// The job begins: what a declared order means is what it combines now.
    fn declare(&mut self) {
        let Some(placed) = &self.placement else { return };
        let order = self.first().map_or(Order::Arrival, |member| member.request.order);
        if self.expression.is_none() && order != Order::Arrival {
            self.expression = Tree::new(self.expression_of(placed), self.world, order).ok();
        }
    }

    /// Tell all ranks of a job that is placed their places.
    fn tell_places(
        &mut self,
        config: &ControllerConfig,
        queue: Option<QueuePlace>,
        reply: impl Fn(Box<Membership>) -> ClientReply,
    ) {
        self.told = queue;
        let Some(placed) = &self.placement else { return };
        let mesh: Vec<_> = self.members.values().map(|member| member.request.mesh_addr).collect();
        let repair_mesh: Vec<_> = self.members.values().map(|member| member.request.repair_addr).collect();
        let expression = self.expression_of(placed);
        let (mesh_token, table) = (self.mesh_token, config.table.clone());
        let places = Places::new(PlacesTail { mesh, repair_mesh, mesh_token, expression, table });
        for (rank, member) in &self.members {
            let tree = placed.as_ref().map(|placement| placement.membership(config, *rank)).map_err(Clone::clone);
            places.tell(&member.client, (tree, queue), &reply);
        }
    }
}

/// Devices and jobs.
#[derive(Debug)]
pub(super) struct State {
    pub(super) devices: Devices,
    jobs: BTreeMap<String, Job>,
    /// Those from before this controller whose ranks come back.
    resuming: BTreeMap<resume::Key, Resuming>,
    books: Books,
    queue: Queue,
    planning: Planning,
    restarts: Restarts,
    next_view: NextView,
    entropy: Entropy,
    /// When devices that an earlier life of the controller had should be back.
    devices_by: Instant,
    /// The time, as whoever opens the state says.
    pub(super) now: Instant,
    /// What is to be carried out for jobs whose ranks wait for a tree.
    pub(super) ready: VecDeque<Draft>,
    /// Told when there is something in `ready`, or something to expire.
    wake: Arc<Condvar>,
    /// Devices that have refused what the books leave of them, and the slots that they counted: groups live there that this
    /// controller does not know.
    crowded: BTreeMap<DeviceKey, u32>,
    /// Devices that did not answer when a tree was to be made: jobs may do without them meanwhile.
    silent: BTreeSet<DeviceKey>,
    /// Devices whose connection has ended, and when their trees are lost for that.
    absent: BTreeMap<DeviceKey, Instant>,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
}

/// The next group and its epoch, as one number: the epoch's term above the group. It counts groups, from a place that
/// the time of the controller's start says: each millisecond is room for [`GROUPS_PER_MS`]. So no two lives of a
/// controller give out the same pair, unless the clock is set back in between, and terms do not fall (PROTOCOL 4).
#[derive(Debug)]
struct NextView(u64);

/// More than a controller can begin, so that a life never catches up with the clock.
const GROUPS_PER_MS: u64 = 256;

impl NextView {
    /// The first of a controller that started so many milliseconds after 1970. The term comes round after 34 years.
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
    /// Begin without devices and jobs, at a controller that started so many milliseconds after 1970.
    pub(super) fn new(config: &ControllerConfig, started_ms: u64, entropy: Entropy, wake: Arc<Condvar>) -> Self {
        Self {
            devices: BTreeMap::new(),
            jobs: BTreeMap::new(),
            resuming: BTreeMap::new(),
            books: Books::new(config.quotas.clone()),
            queue: Queue::default(),
            planning: Planning::default(),
            restarts: Restarts::new(config.limits.device_backoff),
            next_view: NextView::at(started_ms),
            entropy,
            devices_by: Instant::now() + ABSENCE,
            now: Instant::now(),
            ready: VecDeque::new(),
            wake,
            crowded: BTreeMap::new(),
            silent: BTreeSet::new(),
            absent: BTreeMap::new(),
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    /// Give the state, its books and its queue a bug.
    #[cfg(all(feature = "planted", feature = "snapshot"))]
    pub(super) const fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        (self.bug, self.books.bug, self.queue.bug) = (Some(bug), Some(bug), Some(bug));
    }

    /// Take what an earlier life had booked for this one's.
    #[cfg(all(feature = "planted", feature = "snapshot"))]
    pub(super) fn believe(&mut self, earlier: Self) {
        self.books.believe(earlier.books);
    }

    /// Take in a device, and offer it to jobs without a tree; or say why not.
    pub(super) fn add_device(
        &mut self,
        config: &ControllerConfig,
        session: &Arc<DeviceSession>,
    ) -> Result<(), DeviceRefused> {
        let name = session.name().to_owned();
        if self.devices.contains_key(&name) {
            self.ask_whether_it_lives(&name);
            return Err(DeviceRefused::Taken);
        }
        let limit = config.limits.devices;
        if self.devices.len() >= limit {
            return Err(DeviceRefused::Limit { limit });
        }
        self.books.open(session.key(), session.room());
        self.devices.insert(name, Arc::clone(session));
        self.planning.devices_version += 1;
        self.note_present(&session.key());
        self.note_come(session);
        self.reconsider();
        Ok(())
    }

    /// Ask a device whether it is there. A machine that was reset tells nobody that its connections are no more: they end
    /// when something is sent to them, and then the next life is let in.
    fn ask_whether_it_lives(&self, name: &str) {
        if let Some(device) = self.devices.get(name) {
            // Its answer is waited for by nobody; too many that are missing end the connection, too.
            let _ = device.post(Request::Hello);
        }
    }

    /// Forget what was noted of a connection that has ended: one that comes after it is another.
    fn forget(&mut self, session: &Arc<DeviceSession>) {
        for job in self.jobs.values_mut().chain(self.resuming.values_mut().map(|resuming| &mut resuming.job)) {
            job.declined.retain(|device| !Arc::ptr_eq(device, session));
            job.lost.retain(|device| !Arc::ptr_eq(device, session));
        }
        self.crowded.remove(&session.key());
        self.silent.remove(&session.key());
    }

    /// Return how many connections of devices are noted of a job, and beside it.
    #[cfg(test)]
    pub(super) fn remembered_of(&self, name: &str) -> usize {
        let of_job = self.jobs.get(name).map_or(0, |job| job.declined.len() + job.lost.len());
        of_job + self.crowded.len() + self.silent.len()
    }

    pub(super) fn remove_device(&mut self, session: &Arc<DeviceSession>) {
        if self.devices.get(session.name()).is_some_and(|known| Arc::ptr_eq(known, session)) {
            self.devices.remove(session.name());
            self.planning.devices_version += 1;
            self.forget(session);
            self.books.close(&session.key());
            self.note_absent(session.key());
            self.note_gone(session);
            self.reconsider();
        }
    }

    /// Take in a rank; the job begins if it was the last one missing. Returns what [`State::depart`] wants.
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
            return Err(JoinRefusal::Taken { rank, job: name });
        }
        if let Some(member) = job.members.values().next() {
            agree(&name, (&request, &pinned), member)?;
        }
        job.members.insert(rank, Member { request: Arc::new(request), pinned, client: Arc::clone(client) });
        if job.members.len() == world as usize {
            self.seek(&name, 0);
        }
        Ok((name, rank))
    }

    /// Check that there is room for another job.
    fn check_jobs(&self, config: &ControllerConfig) -> Result<(), JoinRefusal> {
        let limit = config.limits.jobs;
        if self.jobs.len() + self.resuming.len() < limit {
            return Ok(());
        }
        Err(JoinRefusal::Limit { what: "jobs".into(), limit: limit as u64 })
    }

    /// A rank has left, or, unless `clean`, died; the job ends with its last rank.
    pub(super) fn depart(&mut self, (name, rank): (&str, Rank), client: &Arc<Client>, clean: bool) {
        if self.jobs.get(name).is_some_and(|job| job.has(rank, client)) {
            self.depart_from(name, &[rank], clean);
        } else {
            self.depart_early((name, rank), client, clean);
        }
    }

    /// Ranks have died together: only those that are left are told.
    pub(super) fn depart_all(&mut self, gone: Vec<(Arc<Client>, (String, Rank))>) {
        let mut by_job: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
        for (client, (name, rank)) in gone {
            if self.jobs.get(&name).is_some_and(|job| job.has(rank, &client)) {
                by_job.entry(name).or_default().push(rank);
            } else {
                self.depart_early((&name, rank), &client, false);
            }
        }
        by_job.iter().for_each(|(name, ranks)| self.depart_from(name, ranks, false));
    }

    fn depart_from(&mut self, name: &str, ranks: &[Rank], clean: bool) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        for rank in ranks {
            job.members.remove(rank);
            job.shrinking.remove(rank);
        }
        // A tree is for all ranks: none is made for the others.
        job.placing = None;
        let held = job.hold.take();
        let is_begun = job.placement.is_some();
        let Some(first) = ranks.first() else { return };
        if is_begun {
            if !clean {
                // As many as die together are one line.
                let others = ranks.len() - 1;
                if std::mem::replace(&mut job.has_lost, true) || job.is_over {
                    tracing::info!(job = name, rank = %first, others, "rank has ended without leaving, as its job has failed");
                } else {
                    tracing::warn!(job = name, rank = %first, others, "rank is lost");
                }
                job.tell_all(ranks.iter().map(|rank| ClientReply::RankLost(*rank)));
            }
            job.refuse_waiting(name, *first);
            job.withdraw_offer();
            job.tell_survivors();
        } else {
            // An incomplete job can't be completed by others waiting for somebody who may not come back.
            job.tell(&ClientReply::Refused(JoinRefusal::Gone { rank: *first, job: name.to_owned() }));
        }
        let is_over = !is_begun || job.members.is_empty();
        if is_over && let Some(job) = self.jobs.remove(name) {
            tracing::info!(job = name, "job ends");
            if let Some(Ok(placement)) = job.placement {
                self.release(&placement);
            }
        }
        if let Some((group, _)) = held {
            self.books.free(group);
        }
        self.leave_queue(name);
        self.pump();
    }
}

/// Why a device is not taken in.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeviceRefused {
    /// Its name is taken.
    #[error("a device of that name is connected")]
    Taken,
    /// There are enough.
    #[error("there are {limit} devices already, which is the limit")]
    Limit { limit: usize },
}

/// Check what a rank says of itself, before it sizes anything or is shown to anybody.
fn check_request(request: &JoinRequest, pinned: &[String]) -> Result<(), JoinRefusal> {
    check_tenant(&request.terms.tenant)?;
    check_name(NameKind::Job, "job", &request.job)?;
    let (rank, world) = (request.rank, request.world);
    if world > RANKS_MAX {
        return Err(JoinRefusal::Ranks { world, limit: RANKS_MAX });
    }
    if rank.0 >= world {
        return Err(JoinRefusal::Rank { rank, world });
    }
    if pinned.len() > PINNED_MAX {
        return Err(JoinRefusal::Limit { what: "devices that a job is pinned to".into(), limit: PINNED_MAX as u64 });
    }
    pinned.iter().try_for_each(|device| check_name(NameKind::Fabric, "device", device))?;
    request.host.iter().try_for_each(|host| check_name(NameKind::Fabric, "host", host))?;
    Ok(request.machine.iter().try_for_each(|machine| check_name(NameKind::Fabric, "machine", machine))?)
}

/// Check that two ranks mean the same job.
fn agree(job: &str, (request, pinned): (&JoinRequest, &[String]), member: &Member) -> Result<(), JoinRefusal> {
    let first = &member.request;
    let disagree = |what: &str, mine: String, theirs: String| JoinRefusal::Disagree {
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
        return Err(disagree("how long to wait for a tree", ms(request), ms(first)));
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

    /// A restart within the same second, one an hour later, one at the end of a term.
    #[test]
    fn no_life_gives_out_a_view_of_another() {
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
