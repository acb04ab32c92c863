//! The queue of jobs that could have a tree, but for what others hold.
//!
//! The rule, in order:
//! 1. A job that was passed over [`PASSES_MAX`] times comes before all others, the one that has waited longest first, and
//!    nobody behind it gets anything of the devices that it wants; if its own quota is what is short, nobody of its tenant
//!    gets anything.
//! 2. Then comes the tenant that holds the least ([`Books::share`]), with what its jobs before would add; of one tenant, who
//!    came first.
//! 3. Down that order, whoever fits is served. A job is passed over when one that came later is served with something of a
//!    device that it wants, or, if its quota is short, one of its own tenant.
//!
//! So at most [`PASSES_MAX`] later ones get what a job waits for before it does, however small they are. Who is being served
//! keeps its entry until it has its tree, and neither blocks nor is passed over.

use super::books::{Books, Claim, DeviceKey, Needs};
use super::proto::QueuePlace;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use sumac_hal::planted;

/// How often a job may be passed over.
pub(super) const PASSES_MAX: u32 = 8;

/// What a job waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// Its tenant's quota.
    Tenant,
    /// Devices.
    Devices,
}

/// Whether a job can be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It waits.
    Waits,
    /// A tree is reserved for it.
    Served,
    /// It was offered a tree and did not come: nothing is reserved for it until it does.
    Parked,
}

/// A job in the queue.
#[derive(Debug, Clone)]
pub(super) struct Waiting {
    pub(super) tenant: String,
    /// When it came: counts up.
    pub(super) ticket: u64,
    pub(super) passes: u32,
    pub(super) scope: Scope,
    /// The least that helps, where it would be if nobody else were there.
    pub(super) wanted: Needs,
    pub(super) standing: Standing,
    /// The version of the books that it does not fit into.
    pub(super) tried: Option<u64>,
}

impl Waiting {
    fn is_starved(&self) -> bool {
        self.standing == Standing::Waits && self.passes >= PASSES_MAX
    }

    /// Tell whether a group of that tenant on those devices takes something that this job waits for.
    fn competes<'d>(&self, tenant: &str, mut devices: impl Iterator<Item = &'d DeviceKey>) -> bool {
        match self.scope {
            Scope::Tenant => self.tenant == tenant,
            Scope::Devices => devices.any(|device| self.wanted.iter().any(|(wanted, _)| wanted == device)),
        }
    }
}

/// What is kept for jobs that were passed over too often, and for which.
#[derive(Debug, Default)]
pub(super) struct Bars {
    pub(super) devices: BTreeMap<DeviceKey, String>,
    pub(super) tenants: BTreeMap<String, String>,
}

/// The queue.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: BTreeMap<String, Waiting>,
    next_ticket: u64,
    #[cfg(feature = "planted")]
    pub(super) bug: Option<sumac_hal::planted::Bug>,
}

impl Queue {
    /// Return a ticket for who comes now.
    pub(super) const fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    /// Let a job wait. One that is there keeps its ticket, and what it was passed over.
    pub(super) fn enter(&mut self, job: &str, mut entry: Waiting) {
        if let Some(known) = self.waiting.get(job) {
            (entry.ticket, entry.passes) = (known.ticket, known.passes);
        }
        self.waiting.insert(job.to_owned(), entry);
    }

    /// A job waits no more. True if that lets in others.
    pub(super) fn remove(&mut self, job: &str) -> bool {
        self.waiting.remove(job).is_some_and(|entry| entry.is_starved())
    }

    pub(super) fn get(&self, job: &str) -> Option<&Waiting> {
        self.waiting.get(job)
    }

    pub(super) fn get_mut(&mut self, job: &str) -> Option<&mut Waiting> {
        self.waiting.get_mut(job)
    }

    /// Return the jobs that wait, in the order in which they are looked at.
    pub(super) fn order(&self, books: &Books) -> Vec<String> {
        let waits = self.waiting.iter().filter(|(_, entry)| entry.standing == Standing::Waits);
        let (mut first, mut rest): (Vec<_>, Vec<_>) = waits.partition(|(_, entry)| entry.is_starved());
        first.sort_by_key(|(_, entry)| entry.ticket);
        rest.sort_by_key(|(_, entry)| entry.ticket);
        if planted!(self, NewestFirst) {
            rest.reverse();
        }
        // Of each tenant those that wait, and by share and place the first of each.
        let mut lines: BTreeMap<&str, VecDeque<(usize, &String, &Waiting)>> = BTreeMap::new();
        for (at, (job, entry)) in rest.into_iter().enumerate() {
            lines.entry(&entry.tenant).or_default().push_back((at, job, entry));
        }
        let head = |line: &VecDeque<(usize, &String, &Waiting)>| line.front().map(|(at, ..)| *at);
        let mut heads: BTreeSet<(u64, usize, &str)> =
            lines.iter().filter_map(|(tenant, line)| Some((books.share(tenant), head(line)?, *tenant))).collect();
        while let Some((share, _, tenant)) = heads.pop_first() {
            let Some(line) = lines.get_mut(tenant) else { continue };
            let Some((_, job, entry)) = line.pop_front() else { continue };
            if let Some(at) = head(line) {
                heads.insert((share.saturating_add(books.share_of(entry.wanted.iter())), at, tenant));
            }
            first.push((job, entry));
        }
        first.into_iter().map(|(job, _)| job.clone()).collect()
    }

    /// Return the places of all jobs that wait.
    pub(super) fn places(&self, books: &Books) -> BTreeMap<String, QueuePlace> {
        let order = self.order(books);
        let of = order.len() as u32;
        (1..).zip(order).map(|(position, job)| (job, QueuePlace { position, of })).collect()
    }

    /// Return a job's place, if it waits.
    pub(super) fn place(&self, job: &str, books: &Books) -> Option<QueuePlace> {
        self.waiting.get(job)?;
        self.places(books).remove(job)
    }

    /// Return what `job` may not have, be it in the queue or new.
    pub(super) fn bars(&self, job: &str) -> Bars {
        let own = self.waiting.get(job).filter(|entry| entry.is_starved()).map(|entry| entry.ticket);
        let before = |entry: &Waiting| own.is_none_or(|own| entry.ticket < own);
        let mut bars = Bars::default();
        for (other, entry) in &self.waiting {
            if other == job || !entry.is_starved() || !before(entry) {
                continue;
            }
            match entry.scope {
                Scope::Tenant => {
                    bars.tenants.insert(entry.tenant.clone(), other.clone());
                }
                Scope::Devices => {
                    bars.devices.extend(entry.wanted.iter().map(|(device, _)| (device.clone(), other.clone())));
                }
            }
        }
        bars
    }

    /// Something is given to a job that came with `ticket`: those before it who want the like are passed over. Who has been
    /// often enough is kept from less from here on, so the books count it as a change.
    pub(super) fn given(&mut self, ticket: u64, claim: &Claim, books: &mut Books) {
        for entry in self.waiting.values_mut() {
            let waits = entry.standing == Standing::Waits && entry.ticket < ticket;
            if waits && entry.competes(&claim.tenant, claim.needs.iter().map(|(device, _)| device)) {
                entry.passes += 1;
                if entry.passes == PASSES_MAX {
                    books.touch();
                }
            }
        }
    }

    /// Return who is looked at next: the first that has not been tried with these books.
    pub(super) fn candidate(&self, books: &Books) -> Option<Candidate> {
        let version = books.version();
        let is_untried = |job: &String| self.waiting.get(job).is_some_and(|entry| entry.tried != Some(version));
        let job = self.order(books).into_iter().find(is_untried)?;
        let ticket = self.waiting.get(&job)?.ticket;
        Some(Candidate { job, ticket, version })
    }

    /// Serve a candidate with that claim, or note that there is nothing for it. True if it was served; it is claimed in the
    /// books then. Who is served may leave room that was kept for it, and changes the order.
    pub(super) fn settle(&mut self, books: &mut Books, candidate: &Candidate, claim: Option<Claim>) -> bool {
        let waits = |entry: &&mut Waiting| entry.ticket == candidate.ticket && entry.standing == Standing::Waits;
        let Some(entry) = self.waiting.get_mut(&candidate.job).filter(waits) else { return false };
        let Some(claim) = claim.filter(|claim| books.claim(claim.clone()).is_ok()) else {
            let is_quota = books.check(&entry.tenant, &entry.wanted).is_err_and(|short| short.is_quota());
            entry.scope = if is_quota { Scope::Tenant } else { Scope::Devices };
            entry.tried = Some(candidate.version);
            return false;
        };
        if entry.is_starved() {
            books.touch();
        }
        entry.standing = Standing::Served;
        self.given(candidate.ticket, &claim, books);
        true
    }
}

/// A job that waits and is looked at.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) job: String,
    ticket: u64,
    /// Of the books.
    version: u64,
}

#[cfg(test)]
mod tests;
