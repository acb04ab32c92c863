//! Devices and jobs, and what happens to them.

mod offer;
mod repair;

use super::ControllerConfig;
use super::admit::{Placement, admit, random_u64};
use super::device::DeviceSession;
use super::hang_up;
use super::proto::{
    ClientReply, DeviceStatus, FabricStatus, JobStatus, JobTree, JoinRefusal, JoinRequest, Membership, StatusReport,
};
use crate::plan::Child;
use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, PoisonError};
use sumac_hal::ctrl::send;
use sumac_hal::ids::{Epoch, GroupId, Rank, TreeId};

/// A connected client, as somebody to tell something.
#[derive(Debug)]
pub(super) struct Client {
    stream: Mutex<TcpStream>,
}

impl Client {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream: Mutex::new(stream) }
    }

    /// Tell it; a client that can't be told is hung up on, which its reader notices.
    pub(super) fn send(&self, reply: &ClientReply) {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = send(&mut *stream, reply) {
            tracing::debug!(%error, "client can't be told");
            hang_up(&stream);
        }
    }
}

/// One rank of a job.
#[derive(Debug)]
struct Member {
    request: JoinRequest,
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
    /// The ranks that wait for another tree than this view's.
    waiting: BTreeSet<Rank>,
    /// The devices of the last tree that was lost: they are not asked for the next one. One that restarts is another.
    lost: Vec<Arc<DeviceSession>>,
    /// While a tree is offered to a job without one: from which call on each rank waits.
    offer: Option<BTreeMap<Rank, u64>>,
    /// Those that have asked who is left.
    shrinking: BTreeSet<Rank>,
    /// How often they were told.
    shrunk: u32,
    /// This view's. `None` before the job is complete.
    placement: Option<Result<Placement, String>>,
}

impl Job {
    fn new(world: u32) -> Self {
        Self {
            world,
            members: BTreeMap::new(),
            mesh_token: random_u64(),
            view: 0,
            suspected: false,
            waiting: BTreeSet::new(),
            lost: Vec::new(),
            offer: None,
            shrinking: BTreeSet::new(),
            shrunk: 0,
            placement: None,
        }
    }

    fn has(&self, rank: Rank, client: &Arc<Client>) -> bool {
        self.members.get(&rank).is_some_and(|member| Arc::ptr_eq(&member.client, client))
    }

    /// Tell all ranks of a job that is placed their places.
    fn tell_places(&self, config: &ControllerConfig, reply: impl Fn(Box<Membership>) -> ClientReply) {
        let Some(placed) = &self.placement else { return };
        let mesh: Vec<_> = self.members.values().map(|member| member.request.mesh_addr).collect();
        let repair_mesh: Vec<_> = self.members.values().map(|member| member.request.repair_addr).collect();
        // Without a tree in the network all ranks are one node's, so that a declared order means something all the same.
        let flat = || vec![(0..self.world).map(|rank| Child::Rank(Rank(rank))).collect()];
        let expression = placed.as_ref().map_or_else(|_| flat(), Placement::expression);
        for (rank, member) in &self.members {
            let membership = Membership {
                tree: placed.as_ref().map(|placement| placement.membership(config, *rank)).map_err(Clone::clone),
                mesh: mesh.clone(),
                repair_mesh: repair_mesh.clone(),
                mesh_token: self.mesh_token,
                expression: expression.clone(),
                table: config.table.clone(),
            };
            member.client.send(&reply(Box::new(membership)));
        }
    }
}

/// Devices and jobs.
#[derive(Debug)]
pub(super) struct State {
    pub(super) devices: BTreeMap<String, Arc<DeviceSession>>,
    jobs: BTreeMap<String, Job>,
    next_view: NextView,
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
    pub(super) const fn new(started_ms: u64) -> Self {
        Self { devices: BTreeMap::new(), jobs: BTreeMap::new(), next_view: NextView::at(started_ms) }
    }

    /// Take in a device, and offer it to jobs without a tree; false if one of that name is there.
    pub(super) fn add_device(&mut self, session: &Arc<DeviceSession>) -> bool {
        let name = session.name().to_owned();
        if self.devices.contains_key(&name) {
            return false;
        }
        self.devices.insert(name, Arc::clone(session));
        self.offer();
        true
    }

    pub(super) fn remove_device(&mut self, session: &Arc<DeviceSession>) {
        if self.devices.get(session.name()).is_some_and(|known| Arc::ptr_eq(known, session)) {
            self.devices.remove(session.name());
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
        let (name, rank, world) = (request.job.clone(), request.rank, request.world);
        if rank.0 >= world {
            return Err(JoinRefusal::Rank { rank, world });
        }
        let job = self.jobs.entry(name.clone()).or_insert_with(|| Job::new(world));
        if job.placement.is_some() {
            return Err(JoinRefusal::Running { job: name });
        }
        if job.members.contains_key(&rank) {
            return Err(JoinRefusal::Taken { rank, job: name });
        }
        if let Some(member) = job.members.values().next() {
            agree(&name, (&request, &pinned), member)?;
        }
        job.members.insert(rank, Member { request, pinned, client: Arc::clone(client) });
        if job.members.len() == world as usize {
            self.begin(config, &name);
        }
        Ok((name, rank))
    }

    /// All ranks are there: place the job and tell them.
    fn begin(&mut self, config: &ControllerConfig, name: &str) {
        let Some(mut job) = self.jobs.remove(name) else { return };
        job.placement = Some(self.place(config, name, &job));
        job.tell_places(config, ClientReply::Joined);
        self.jobs.insert(name.to_owned(), job);
    }

    /// Place a job of which all ranks are there, and which is not among the jobs: what it holds does not count. The
    /// devices that it is on are not asked: they are lost.
    fn place(&mut self, config: &ControllerConfig, name: &str, job: &Job) -> Result<Placement, String> {
        let requests: Vec<&JoinRequest> = job.members.values().map(|member| &member.request).collect();
        let (group, epoch) = self.next_view.take();
        // It wraps after 65535 views: still another than the last one's.
        let epoch = Epoch { counter: job.view.wrapping_add(1) as u16, ..epoch };
        let tree = TreeId(group.0);
        let used = self.jobs.values().filter_map(|job| job.placement.as_ref()?.as_ref().ok());
        // The same at all ranks.
        let pinned = job.members.values().next().map_or(&[][..], |member| &member.pinned);
        let candidates = self.candidates(job, pinned);
        let placed = candidates.and_then(|(devices, left_out)| {
            let placed = admit(config, &devices, used, (&requests, pinned), (group, tree, epoch));
            placed.map_err(|why| if left_out.is_empty() { why } else { format!("{why}; {left_out}") })
        });
        match &placed {
            Ok(placement) => {
                let (view, levels, by_reference) = (job.view, placement.levels, placement.ranks_by_reference());
                let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
                tracing::info!(job = name, view, %group, levels, ?devices, by_reference, "job is placed");
            }
            Err(why) => tracing::warn!(job = name, view = job.view, %why, "job is placed without a tree"),
        }
        placed
    }

    /// A rank has left, or, unless `clean`, died; the job ends with its last rank.
    pub(super) fn depart(&mut self, name: &str, rank: Rank, client: &Arc<Client>, clean: bool) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        if !job.has(rank, client) {
            return;
        }
        job.members.remove(&rank);
        if job.placement.is_none() {
            // An incomplete job can't be completed by others waiting for somebody who may not come back.
            for member in job.members.values() {
                let gone = JoinRefusal::Gone { rank, job: name.to_owned() };
                member.client.send(&ClientReply::Refused(gone));
            }
            self.jobs.remove(name);
            return;
        }
        if !clean {
            tracing::warn!(job = name, %rank, "rank is lost");
            job.tell(&ClientReply::RankLost(rank));
        }
        job.refuse_waiting(name, rank);
        job.withdraw_offer();
        job.shrinking.remove(&rank);
        job.tell_survivors();
        if job.members.is_empty()
            && let Some(job) = self.jobs.remove(name)
        {
            tracing::info!(job = name, "job ends");
            if let Some(Ok(placement)) = job.placement {
                placement.release();
            }
        }
    }

    /// Return the leases of all running jobs: each group on each of its devices.
    pub(super) fn leases(&self) -> Vec<(Arc<DeviceSession>, GroupId)> {
        let placements = self.jobs.values().filter_map(|job| job.placement.as_ref()?.as_ref().ok());
        let leases = placements
            .flat_map(|placement| placement.nodes.iter().map(|node| (Arc::clone(&node.device), placement.group)));
        leases.collect()
    }

    /// Release everything: the controller ends.
    pub(super) fn release_all(&mut self) {
        for job in std::mem::take(&mut self.jobs).into_values() {
            if let Some(Ok(placement)) = job.placement {
                placement.release();
            }
        }
    }

    pub(super) fn report(&self, config: &ControllerConfig) -> StatusReport {
        let fabric = config.fabric.as_ref();
        let device = |session: &Arc<DeviceSession>| DeviceStatus {
            name: session.name().to_owned(),
            in_fabric: fabric.is_none_or(|fabric| fabric.find_switch(session.name()).is_some()),
            data_addrs: session.announce.data_addrs.iter().copied().collect(),
            capabilities: session.announce.capabilities,
            bus: session.announce.bus.clone(),
            stats: session.stats().map_err(|error| error.to_string()),
        };
        let job = |(name, job): (&String, &Job)| JobStatus {
            name: name.clone(),
            joined: job.members.len() as u32,
            world: job.world,
            running: job.placement.is_some(),
            view: job.view,
            tree: job.placement.as_ref().map(|placement| {
                placement.as_ref().map_err(Clone::clone).map(|placement| JobTree {
                    group: placement.group,
                    levels: placement.levels,
                    devices: placement.nodes.iter().map(|node| node.device.name().to_owned()).collect(),
                    by_reference: placement.ranks_by_reference(),
                })
            }),
        };
        StatusReport {
            fabric: fabric.map(|fabric| FabricStatus {
                switches: fabric.switches().len() as u32,
                hosts: fabric.hosts().len() as u32,
                aggregation_nodes: fabric.switches().iter().filter(|switch| switch.aggregation.is_some()).count()
                    as u32,
            }),
            devices: self.devices.values().map(device).collect(),
            jobs: self.jobs.iter().map(job).collect(),
        }
    }
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
