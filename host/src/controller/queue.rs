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
use std::collections::{BTreeMap, BTreeSet};
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
        let mut shares: BTreeMap<&str, u64> = BTreeMap::new();
        while !rest.is_empty() {
            // The first of each tenant stands for it: `rest` is in order of tickets.
            let mut seen = BTreeSet::new();
            let heads = rest.iter().enumerate().filter(|(_, (_, entry))| seen.insert(entry.tenant.as_str()));
            let share = |(_, (_, entry)): &(usize, &(&String, &Waiting))| {
                shares.get(entry.tenant.as_str()).copied().unwrap_or_else(|| books.share(&entry.tenant))
            };
            let Some((next, _)) = heads.min_by_key(share) else { break };
            let (job, entry) = rest.remove(next);
            let share = shares.entry(&entry.tenant).or_insert_with(|| books.share(&entry.tenant));
            *share = share.saturating_add(books.share_of(entry.wanted.iter()));
            first.push((job, entry));
        }
        first.into_iter().map(|(job, _)| job.clone()).collect()
    }

    /// Return a job's place, if it waits.
    pub(super) fn place(&self, job: &str, books: &Books) -> Option<QueuePlace> {
        let order = self.order(books);
        let ahead = order.iter().position(|other| other == job)?;
        Some(QueuePlace { position: ahead as u32 + 1, of: order.len() as u32 })
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

    /// Serve all who fit; `fit` says what a job would be given, if that is possible. Returns who was served; it is claimed in
    /// the books.
    pub(super) fn serve(
        &mut self,
        books: &mut Books,
        mut fit: impl FnMut(&str, &Books, &Bars) -> Option<Claim>,
    ) -> Vec<String> {
        let mut served = Vec::new();
        // Each round serves somebody: who is served may leave room that was kept for it, and changes the order.
        while let Some(job) = self.serve_one(books, &mut fit) {
            served.push(job);
        }
        served
    }

    fn serve_one(
        &mut self,
        books: &mut Books,
        fit: &mut impl FnMut(&str, &Books, &Bars) -> Option<Claim>,
    ) -> Option<String> {
        for job in self.order(books) {
            let version = books.version();
            let bars = self.bars(&job);
            let entry = self.waiting.get_mut(&job).filter(|entry| entry.tried != Some(version));
            let Some(entry) = entry else { continue };
            let claim = fit(&job, books, &bars).filter(|claim| books.claim(claim.clone()).is_ok());
            let Some(claim) = claim else {
                let is_quota = books.check(&entry.tenant, &entry.wanted).is_err_and(|short| short.is_quota());
                entry.scope = if is_quota { Scope::Tenant } else { Scope::Devices };
                entry.tried = Some(version);
                continue;
            };
            if entry.is_starved() {
                books.touch();
            }
            entry.standing = Standing::Served;
            let ticket = entry.ticket;
            self.given(ticket, &claim, books);
            return Some(job);
        }
        None
    }
}

#[cfg(test)]
mod tests;
