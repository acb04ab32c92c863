//! Host devices: where ranks of a job share a host without a device, the lowest of them runs one for all of them
//! ([`crate::transport::local`]). Where all devices receive over verbs, so do host devices; a host with a single rank
//! then has one, too, for its rank sends over UDP.
//!
//! ```text
//!   last rank joins -- LeadHost to the lowest rank of each such host --> the devices register, by their tickets
//!                                                                         | all have, or HOST_DEVICE_LIMIT later
//!                                                                         v
//!                                                                     request_tree
//! ```
//!
//! Invariants:
//! - A host device serves the job whose ticket it has, and no other. It is in no map of devices that jobs are planned
//!   with, but in its job.
//! - It ends with its job, and no earlier than the last of its ranks has left: its leader is told only
//!   then (`Left`).
//! - No host device delays a job for longer than the limit, and a job without them is planned as ever.

use super::{Job, State};
use crate::controller::ControllerConfig;
use crate::controller::admit::HostBlock;
use crate::controller::device::Device;
use crate::controller::limits::NAME_LEN_MAX;
use crate::controller::output::{ConnId, Outputs};
use crate::controller::proto::{ClientReply, HostLead, JoinRequest};
use crate::controller::resources::HOST_DEVICE_MARK;
use crate::secret::JobSecret;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::{Announce, JobTicket, Name, Rejection};
use sumac_hal::ids::Rank;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;

/// How long a job waits for its host devices before it is planned without those that are missing.
const HOST_DEVICE_LIMIT: Duration = Duration::from_secs(5);

/// A host with ranks of a job, and no device of its own.
#[derive(Debug)]
pub(super) struct JobHost {
    /// In order. The lowest one is the leader.
    pub(super) ranks: Vec<Rank>,
    /// The device, while it is connected.
    pub(super) device: Option<Arc<Device>>,
    /// The leader has no device.
    has_failed: bool,
    /// The connection of the leader, if it is leaving and others have not left.
    leaving: Option<ConnId>,
}

impl JobHost {
    fn leader(&self) -> Rank {
        self.ranks[0]
    }
}

impl Job {
    /// The hosts with so many ranks, at least, that may share memory with a device of the first one.
    fn shared_hosts(&self, ranks_min: usize) -> Vec<JobHost> {
        let may_share = |member: &&super::Member| member.pinned.is_empty() && member.request.terms.hierarchical;
        let mut hosts: BTreeMap<_, Vec<&JoinRequest>> = BTreeMap::new();
        for member in self.members.values().filter(may_share) {
            let request = &*member.request;
            if let Some(machine) = request.machine.as_ref().filter(|_| request.transport.may_share_memory()) {
                hosts.entry((machine, request.device_users.own, &request.host)).or_default().push(request);
            }
        }
        let hosts = hosts.into_values().filter(|ranks| ranks.len() >= ranks_min);
        let mut hosts: Vec<_> = hosts
            .map(|ranks| JobHost {
                ranks: ranks.iter().map(|request| request.rank).collect(),
                device: None,
                has_failed: false,
                leaving: None,
            })
            .collect();
        hosts.sort_by_key(JobHost::leader);
        hosts
    }

    /// Whether a device is on the host of a rank.
    fn is_near(&self, rank: Rank, device: &Device) -> bool {
        let Some(request) = self.members.get(&rank).map(|member| &member.request) else { return false };
        let shares_memory =
            device.announce.attach.as_ref().is_some_and(|at| Some(&at.machine) == request.machine.as_ref());
        let own = request.mesh_addr.ip().to_canonical();
        let is_here = |addr: &Addr| match addr {
            Addr::Udp(addr) => addr.ip().to_canonical() == own,
            // With RoCE, it is that of an interface.
            Addr::Verbs(addr) => IpAddr::from(addr.gid).to_canonical() == own,
            _ => false,
        };
        shares_memory || device.announce.data_addrs.iter().any(is_here)
    }

    /// The hosts whose devices are connected and accepted by all ranks.
    pub(super) fn host_blocks(&self) -> Vec<HostBlock> {
        let is_declined = |device: &Arc<Device>| self.declined_devices.iter().any(|known| Arc::ptr_eq(known, device));
        let block = |host: &JobHost| {
            let device = host.device.clone().filter(|device| !is_declined(device))?;
            Some(HostBlock { device, ranks: host.ranks.clone() })
        };
        self.hosts.iter().filter_map(block).collect()
    }

    fn proof(&self, leader: Rank) -> JobSecret {
        self.secret.derive(b"host device\0\0\0\0\0", &[leader.0.into()])
    }

    /// Tell a leader that it may stop its device, once the other ranks of its host are gone.
    pub(super) fn release_leaders(&mut self, output: &mut Outputs) {
        for host in &mut self.hosts {
            let is_used = host.ranks.iter().any(|rank| self.members.contains_key(rank));
            if let Some(client) = host.leaving.take_if(|_| !is_used) {
                output.send(client, &ClientReply::Left);
            }
        }
    }
}

impl State {
    /// All ranks have joined: start the job, after its host devices if it has any.
    pub(super) fn start_job(&mut self, name: &str) {
        let over_verbs = self.devices.values().all(|device| device.over_verbs());
        let hosts = self.jobs.get(name).map_or_else(Vec::new, |job| self.hosts_without_device(job, over_verbs));
        let Some(job) = self.jobs.get_mut(name) else { return };
        job.hosts = hosts;
        job.hosts_until = Some(self.now + HOST_DEVICE_LIMIT).filter(|_| !job.hosts.is_empty());
        for host in &job.hosts {
            let (leader, proof) = (host.leader(), job.proof(host.leader()));
            if let Some(member) = job.members.get(&leader) {
                let device = host_device_name(name, leader, &job.secret);
                self.output.send(member.client, &ClientReply::LeadHost(HostLead { device, proof, over_verbs }));
            }
        }
        self.start_with_hosts(name);
    }

    /// The shared hosts that have no device, if there is one that can be above theirs.
    fn hosts_without_device(&self, job: &Job, over_verbs: bool) -> Vec<JobHost> {
        if self.devices.is_empty() {
            return Vec::new();
        }
        let mut hosts = job.shared_hosts(if over_verbs { 1 } else { 2 });
        hosts.retain(|host| !self.devices.values().any(|device| job.is_near(host.leader(), device)));
        hosts
    }

    /// Plan a job that waits for no host device any more.
    fn start_with_hosts(&mut self, name: &str) {
        let now = self.now;
        let Some(job) = self.jobs.get_mut(name) else { return };
        let is_settled = job.hosts.iter().all(|host| host.device.is_some() || host.has_failed);
        if job.hosts_until.is_some_and(|until| now < until && !is_settled) {
            return;
        }
        job.hosts_until = None;
        self.request_tree(name, 0);
    }

    /// Plan jobs that have waited long enough for their host devices. Returns the next deadline.
    pub(super) fn expire_host_devices(&mut self) -> Option<Instant> {
        let now = self.now;
        let is_due = |job: &Job| job.hosts_until.is_some_and(|until| until <= now);
        let due: Vec<String> = self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect();
        for name in &due {
            tracing::warn!(job = name, "a host device has not registered in time; the job is planned without it");
            self.start_with_hosts(name);
        }
        self.jobs.values().filter_map(|job| job.hosts_until).min()
    }

    /// A rank that was asked to run a device for its host cannot.
    pub(super) fn fail_host_device(&mut self, place: Option<&(String, Rank)>, client: ConnId, why: &str) {
        let Some((name, rank)) = place else { return };
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client)) else { return };
        let Some(host) = job.hosts.iter_mut().find(|host| host.leader() == *rank) else { return };
        let why = crate::controller::limits::sanitize_reason(why);
        tracing::warn!(job = name, %rank, why, "no host device; the ranks of the host contribute one by one");
        host.has_failed = true;
        if job.hosts_until.is_some() {
            self.start_with_hosts(name);
        }
    }

    /// Return the tenant of the job that a ticket is good for.
    pub(in crate::controller) fn check_ticket(
        &self,
        announce: &Announce,
        ticket: &JobTicket,
    ) -> Result<&str, Rejection> {
        let name = ticket.job.as_str();
        let job = self.jobs.get(name).ok_or(Rejection::Ticket)?;
        let leader = Rank(ticket.rank);
        let is_asked = job.hosts.iter().any(|host| host.leader() == leader);
        if !is_asked || job.proof(leader) != JobSecret::new(ticket.proof) {
            return Err(Rejection::Ticket);
        }
        if host_device_name(name, leader, &job.secret) != announce.name.as_str() {
            return Err(Rejection::Name);
        }
        Ok(job.tenant())
    }

    /// Add a host device, whose ticket is valid, to its job.
    pub(in crate::controller) fn add_host_device(
        &mut self,
        config: &ControllerConfig,
        device: &Arc<Device>,
        ticket: &JobTicket,
    ) -> Result<(), Rejection> {
        if let Some(holder) = self.host_devices.get(device.name()).cloned() {
            return Err(self.refuse_name(&holder, device).rejection());
        }
        let limit = config.limits.connections;
        if self.host_devices.len() >= limit {
            return Err(Rejection::TooMany { limit: u32::try_from(limit).unwrap_or(u32::MAX) });
        }
        let name = ticket.job.as_str();
        let host = self.jobs.get_mut(name).and_then(|job| job.host_of(Rank(ticket.rank))).ok_or(Rejection::Ticket)?;
        host.device = Some(Arc::clone(device));
        self.links.add(&mut self.output, device);
        self.ledger.add_device(device.key(), device.capacity());
        self.host_devices.insert(device.name().to_owned(), Arc::clone(device));
        self.planning.devices_version += 1;
        self.end_reconnect_grace(&device.key());
        if self.jobs.get(name).is_some_and(|job| job.hosts_until.is_some()) {
            self.start_with_hosts(name);
        } else {
            self.reconsider();
        }
        Ok(())
    }

    /// Drop the records of a host device that has disconnected. Returns false if it is none.
    pub(super) fn remove_host_device(&mut self, device: &Arc<Device>) -> bool {
        if !self.host_devices.get(device.name()).is_some_and(|known| Arc::ptr_eq(known, device)) {
            return false;
        }
        self.host_devices.remove(device.name());
        for host in self.jobs.values_mut().flat_map(|job| &mut job.hosts) {
            host.device.take_if(|known| Arc::ptr_eq(known, device));
        }
        true
    }

    /// A rank leaves. Returns whether it is to wait until the other ranks of its host have left, which use its device.
    pub(super) fn defer_leader(&mut self, (name, rank): (&str, Rank), client: ConnId) -> bool {
        let Some(job) = self.jobs.get_mut(name) else { return false };
        let members = &job.members;
        let Some(host) = job.hosts.iter_mut().find(|host| host.leader() == rank) else { return false };
        let is_used = host.device.is_some() && host.ranks.iter().any(|rank| members.contains_key(rank));
        host.leaving = Some(client).filter(|_| is_used);
        is_used
    }

    /// A job has ended: its host devices end, too, and leaders that wait are told.
    pub(super) fn release_hosts(&mut self, job: &mut Job) {
        for host in &mut job.hosts {
            if let Some(client) = host.leaving.take() {
                self.output.send(client, &ClientReply::Left);
            }
            if let Some(device) = host.device.take() {
                self.output.close(device.conn);
            }
        }
    }

    /// A job has come back to this controller: its host devices may, too.
    pub(super) fn expect_hosts(job: &mut Job) {
        job.hosts = job.shared_hosts(1);
    }

    /// A connected device, or a connected host device.
    pub(super) fn connected(&self, name: &str) -> Option<&Arc<Device>> {
        self.devices.get(name).or_else(|| self.host_devices.get(name))
    }

    /// Whether this session of a device is connected.
    pub(super) fn is_connected(&self, device: &Arc<Device>) -> bool {
        self.connected(device.name()).is_some_and(|known| Arc::ptr_eq(known, device))
    }
}

impl Job {
    fn host_of(&mut self, leader: Rank) -> Option<&mut JobHost> {
        self.hosts.iter_mut().find(|host| host.leader() == leader)
    }
}

/// The name of a host device. The end of a long name of a job is replaced by a hash of its secret.
fn host_device_name(job: &str, leader: Rank, secret: &JobSecret) -> String {
    let whole = format!("{job}{HOST_DEVICE_MARK}{}", leader.0);
    if whole.len() <= NAME_LEN_MAX.min(Name::new().capacity()) {
        return whole;
    }
    let [a, b, c, d, ..] = secret.fingerprint();
    let begin: String = job.chars().take(JOB_NAME_BEGIN).collect();
    format!("{begin}~{:08x}{HOST_DEVICE_MARK}{}", u32::from_be_bytes([a, b, c, d]), leader.0)
}

/// How much of a long name of a job is in the names of its host devices.
const JOB_NAME_BEGIN: usize = 40;
