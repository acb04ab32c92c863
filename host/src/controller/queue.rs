//! The queue of jobs that wait for resources held by others.
//!
//! Order of service:
//! 1. Jobs that were skipped [`SKIPS_MAX`] times come first, oldest first, and have a reservation: jobs behind them get
//!    nothing on the devices that they want. If such a job's own quota is exhausted, its tenant's other jobs get
//!    nothing.
//! 2. Then tenants by [dominant share](ResourceLedger::dominant_share), smallest first, counting what their jobs ahead
//!    in the queue would add; jobs of one tenant in order of arrival.
//! 3. In that order, every job that fits is served. A job is skipped when a later arrival is served with resources of a
//!    device that it wants or, if its quota is exhausted, when a later job of its own tenant is served.
//!
//! So at most [`SKIPS_MAX`] later jobs get resources that a job waits for before it does, however small they are. A job
//! that is being served keeps its entry until it has its tree; meanwhile it neither blocks others nor is skipped.

use super::proto::QueuePosition;
use super::resources::{Claim, DeviceKey, Needs, ResourceLedger};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use sumac_hal::planted;

/// How often a job may be skipped before it gets a reservation.
pub(super) const SKIPS_MAX: u32 = 8;

/// What keeps a job waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockedOn {
    /// Its tenant's quota.
    Quota,
    /// Devices.
    Devices,
}

/// The state of a queue entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryStatus {
    /// Waiting for resources.
    Waiting,
    /// Resources are claimed for it.
    Serving,
    /// It did not accept an offered tree in time. Nothing is claimed for it until it requests one.
    Parked,
}

/// A job in the queue.
#[derive(Debug, Clone)]
pub(super) struct QueueEntry {
    pub(super) tenant: String,
    /// The job whose communicator it serves.
    pub(super) communicator: String,
    /// Its place in the order of arrival.
    pub(super) ticket: u64,
    pub(super) skips: u32,
    pub(super) blocked_on: BlockedOn,
    /// The minimum that it needs, on the devices that it would get if it were alone.
    pub(super) wanted: Needs,
    pub(super) status: EntryStatus,
    /// The ledger version in which it was found not to fit.
    pub(super) tried_version: Option<u64>,
    /// The ledger version after a device refused it although the ledger had room.
    pub(super) refused_version: Option<u64>,
}

impl QueueEntry {
    fn is_starved(&self) -> bool {
        self.status == EntryStatus::Waiting && self.skips >= SKIPS_MAX
    }

    /// Whether a group of `tenant` on `devices` takes resources that this job waits for.
    fn competes<'d>(&self, tenant: &str, mut devices: impl Iterator<Item = &'d DeviceKey>) -> bool {
        match self.blocked_on {
            BlockedOn::Quota => self.tenant == tenant,
            BlockedOn::Devices => devices.any(|device| self.wanted.iter().any(|(wanted, _)| wanted == device)),
        }
    }
}

/// What is reserved for jobs that were skipped too often, with the name of the job.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    pub(super) devices: BTreeMap<DeviceKey, String>,
    pub(super) tenants: BTreeMap<String, String>,
}

/// The queue of jobs without a tree.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: BTreeMap<String, QueueEntry>,
    next_ticket: u64,
    #[cfg(feature = "planted")]
    pub(super) bug: Option<sumac_hal::planted::Bug>,
}

impl Queue {
    /// Issue a ticket for a new arrival.
    pub(super) const fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// Insert or update a job's entry. A known job keeps its ticket, its skips and its last refusal.
    pub(super) fn enter(&mut self, job: &str, mut entry: QueueEntry) {
        if let Some(known) = self.waiting.get(job) {
            (entry.ticket, entry.skips) = (known.ticket, known.skips);
            entry.refused_version = known.refused_version;
        }
        self.waiting.insert(job.to_owned(), entry);
    }

    /// Remove a job. Returns true if that lifts a reservation.
    pub(super) fn remove(&mut self, job: &str) -> bool {
        self.waiting.remove(job).is_some_and(|entry| entry.is_starved())
    }

    pub(super) fn get(&self, job: &str) -> Option<&QueueEntry> {
        self.waiting.get(job)
    }

    pub(super) fn get_mut(&mut self, job: &str) -> Option<&mut QueueEntry> {
        self.waiting.get_mut(job)
    }

    /// The waiting jobs in order of service.
    pub(super) fn order(&self, ledger: &ResourceLedger) -> Vec<String> {
        let waits = self.waiting.iter().filter(|(_, entry)| entry.status == EntryStatus::Waiting);
        let (mut first, mut rest): (Vec<_>, Vec<_>) = waits.partition(|(_, entry)| entry.is_starved());
        first.sort_by_key(|(_, entry)| entry.ticket);
        rest.sort_by_key(|(_, entry)| entry.ticket);
        if planted!(self, NewestFirst) {
            rest.reverse();
        }
        // The waiting jobs of each tenant, and the heads of these, ordered by share and arrival.
        let mut fifos: BTreeMap<&str, VecDeque<(usize, &String, &QueueEntry)>> = BTreeMap::new();
        for (at, (job, entry)) in rest.into_iter().enumerate() {
            fifos.entry(&entry.tenant).or_default().push_back((at, job, entry));
        }
        let head = |fifo: &VecDeque<(usize, &String, &QueueEntry)>| fifo.front().map(|(at, ..)| *at);
        let mut heads: BTreeSet<(u64, usize, &str)> = fifos
            .iter()
            .filter_map(|(tenant, fifo)| Some((ledger.dominant_share(tenant), head(fifo)?, *tenant)))
            .collect();
        while let Some((share, _, tenant)) = heads.pop_first() {
            let Some(fifo) = fifos.get_mut(tenant) else { continue };
            let Some((_, job, entry)) = fifo.pop_front() else { continue };
            if let Some(at) = head(fifo) {
                heads.insert((share.saturating_add(ledger.dominant_share_of(entry.wanted.iter())), at, tenant));
            }
            first.push((job, entry));
        }
        first.into_iter().map(|(job, _)| job.clone()).collect()
    }

    /// The positions of all waiting jobs.
    pub(super) fn positions(&self, ledger: &ResourceLedger) -> BTreeMap<String, QueuePosition> {
        let order = self.order(ledger);
        let of = order.len() as u32;
        (1..).zip(order).map(|(position, job)| (job, QueuePosition { position, of })).collect()
    }

    /// A job's position, if it is waiting.
    pub(super) fn position(&self, job: &str, ledger: &ResourceLedger) -> Option<QueuePosition> {
        self.waiting.get(job)?;
        self.positions(ledger).remove(job)
    }

    /// The reservations that `job` must respect, whether it is queued or new.
    pub(super) fn reservations(&self, job: &str) -> Reservations {
        let own = self.waiting.get(job).filter(|entry| entry.is_starved()).map(|entry| entry.ticket);
        let before = |entry: &QueueEntry| own.is_none_or(|own| entry.ticket < own);
        let mut reservations = Reservations::default();
        for (other, entry) in &self.waiting {
            if other == job || !entry.is_starved() || !before(entry) {
                continue;
            }
            match entry.blocked_on {
                BlockedOn::Quota => {
                    reservations.tenants.insert(entry.tenant.clone(), other.clone());
                }
                BlockedOn::Devices => {
                    reservations.devices.extend(entry.wanted.iter().map(|(device, _)| (device.clone(), other.clone())));
                }
            }
        }
        reservations
    }

    /// Record that the job with `ticket` was granted `claim`: earlier jobs that compete for it count a skip. A job that
    /// reaches [`SKIPS_MAX`] changes what others may claim, so the ledger's version increases.
    pub(super) fn record_grant(&mut self, ticket: u64, claim: &Claim, ledger: &mut ResourceLedger) {
        for entry in self.waiting.values_mut() {
            let waits = entry.status == EntryStatus::Waiting && entry.ticket < ticket;
            if waits && entry.competes(&claim.tenant, claim.needs.iter().map(|(device, _)| device)) {
                entry.skips += 1;
                if entry.skips == SKIPS_MAX {
                    ledger.bump_version();
                }
            }
        }
    }

    /// The next job to plan for: the first that has not been tried with the ledger's current version. A job that a
    /// device refused is tried again once the ledger has settled since.
    pub(super) fn candidate(&self, ledger: &ResourceLedger) -> Option<Candidate> {
        let version = ledger.version();
        let is_refused =
            |entry: &QueueEntry| entry.refused_version.is_some_and(|refused| refused >= ledger.settled_version());
        let is_untried = |job: &String| {
            self.waiting.get(job).is_some_and(|entry| entry.tried_version != Some(version) && !is_refused(entry))
        };
        let job = self.order(ledger).into_iter().find(is_untried)?;
        let ticket = self.waiting.get(&job)?.ticket;
        Some(Candidate { job, ticket, version })
    }

    /// Serve a candidate with `claim`, or record that nothing fits. Returns true if the claim was entered in the
    /// ledger. Serving a job that had a reservation may free resources for others.
    pub(super) fn try_serve(
        &mut self,
        ledger: &mut ResourceLedger,
        candidate: &Candidate,
        claim: Option<Claim>,
    ) -> bool {
        let waits = |entry: &&mut QueueEntry| entry.ticket == candidate.ticket && entry.status == EntryStatus::Waiting;
        let Some(entry) = self.waiting.get_mut(&candidate.job).filter(waits) else { return false };
        let Some(claim) = claim.filter(|claim| ledger.claim(claim.clone()).is_ok()) else {
            let ledger = ledger.for_communicator(&entry.tenant, &entry.communicator);
            let is_quota = ledger.check(&entry.tenant, &entry.wanted).is_err_and(|short| short.is_quota());
            entry.blocked_on = if is_quota { BlockedOn::Quota } else { BlockedOn::Devices };
            entry.tried_version = Some(candidate.version);
            return false;
        };
        if entry.is_starved() {
            ledger.bump_version();
        }
        entry.status = EntryStatus::Serving;
        self.record_grant(candidate.ticket, &claim, ledger);
        true
    }
}

/// The waiting job to plan for next.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) job: String,
    ticket: u64,
    /// The ledger's version.
    version: u64,
}

#[cfg(test)]
mod tests;
