//! Jobs that have no tree and could have one: how they come into the queue, what they get when something is freed, and
//! when they give up.
//!
//! What its ranks have declined a job is not offered again before something has changed, and never on a device that one of
//! them could not attach to. What is offered is held for it, for [`OFFER_LIMIT`].

use super::{Client, Draft, Job, State};
use crate::controller::ControllerConfig;
use crate::controller::proto::{ClientReply, QueuePlace};
use crate::controller::queue::{Bars, Scope, Standing, Waiting};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::{Epoch, GroupId, Rank};

/// How long what an offered tree takes is held for a job that does not come.
const OFFER_LIMIT: Duration = Duration::from_secs(60);

impl State {
    /// A rank says that the tree of a view is not taken: the job is without one from here on.
    pub(in crate::controller) fn decline(
        &mut self,
        config: &ControllerConfig,
        (place, client): (Option<&(String, Rank)>, &Arc<Client>),
        view: u32,
        (device, why): (Option<String>, String),
    ) {
        let Some((name, rank)) = place else { return };
        let device = device.and_then(|device| self.devices.get(&device).cloned());
        let Some(job) = self.jobs.get_mut(name).filter(|job| job.has(*rank, client) && job.view == view) else {
            return;
        };
        if job.placement.is_none() || job.placing.is_some() {
            return;
        }
        let is_first = matches!(job.placement, Some(Ok(_)));
        // Those who only heard of it may be faster than the one whose reason it is.
        if is_first || device.is_some() {
            tracing::warn!(job = name, %rank, view, why, "tree is declined");
            let placed = job.placement.replace(Err(format!("{rank} declined its tree: {why}")));
            job.declined.extend(device.filter(|device| !job.declined.iter().any(|known| Arc::ptr_eq(known, device))));
            if let Some(Ok(placement)) = placed {
                self.release(&placement);
            }
            self.enter_queue(config, name);
            self.pump(config);
        }
    }

    /// Let a job that has no tree wait for one, if there could be one, from the next change on.
    pub(super) fn enter_queue(&mut self, config: &ControllerConfig, name: &str) {
        let Some(job) = self.jobs.get(name) else { return };
        let ids = self.ids(GroupId(0), Epoch::default());
        let wait = match self.fit(config, job, &self.books, &Bars::default(), ids) {
            Ok(placement) => Some((Scope::Devices, placement.least())),
            Err(none) => none.wait,
        };
        let moves = job.members.values().all(|member| member.request.terms.moves) || job.waits_until.is_some();
        let Some((scope, wanted)) = wait.filter(|_| moves) else { return self.leave_queue(name) };
        let (tenant, ticket) = (job.tenant().to_owned(), self.queue.ticket());
        let (standing, tried) = (Standing::Waits, Some(self.books.version()));
        self.queue.enter(name, Waiting { tenant, ticket, passes: 0, scope, wanted, standing, tried });
    }

    /// A device has come or gone: jobs that could not have a tree may have one, or the other way round.
    pub(super) fn reconsider(&mut self, config: &ControllerConfig) {
        let without = self.jobs.iter().filter(|(_, job)| job.can_move() || job.waits_until.is_some());
        let names: Vec<String> = without.map(|(name, _)| name.clone()).collect();
        for name in names {
            if self.queue.get(&name).is_none_or(|entry| entry.standing == Standing::Waits) {
                self.enter_queue(config, &name);
            }
            if let Some(entry) = self.queue.get_mut(&name) {
                entry.tried = None;
            }
        }
        self.pump(config);
    }

    /// Give what is free to those who wait for it.
    pub(super) fn pump(&mut self, config: &ControllerConfig) {
        let (mut queue, mut books) = (std::mem::take(&mut self.queue), std::mem::take(&mut self.books));
        let mut found = BTreeMap::new();
        let served = queue.serve(&mut books, |name, books, bars| {
            let ids = self.next_ids(name);
            let job = self.jobs.get(name).filter(|job| job.can_move() || job.waits_until.is_some());
            let placement = self.fits(config, job?, books, bars, ids).ok()?;
            let claim = placement.claim(job?.tenant());
            found.insert(name.to_owned(), placement);
            Some(claim)
        });
        (self.queue, self.books) = (queue, books);
        let until = self.now + OFFER_LIMIT;
        for name in served {
            if let (Some(job), Some(placement)) = (self.jobs.get_mut(&name), found.remove(&name)) {
                let group = placement.group;
                if job.waits_until.take().is_some() {
                    job.placing = Some(group);
                    let order = job.first().map_or(Order::Arrival, |member| member.request.order);
                    self.ready.push_back(Draft::new(name, placement, order));
                } else {
                    tracing::info!(job = name, view = job.view, "a tree is offered");
                    job.hold = Some((group, until));
                    job.make_offer();
                }
                self.wake.notify_all();
            }
        }
        self.tell_queue();
    }

    /// Tell the ranks of jobs whose place in the queue has changed.
    pub(super) fn tell_queue(&mut self) {
        let order = self.queue.order(&self.books);
        let of = order.len() as u32;
        let places: BTreeMap<String, QueuePlace> =
            (1..).zip(order).map(|(position, name)| (name, QueuePlace { position, of })).collect();
        for (name, job) in &mut self.jobs {
            let place = places.get(name).copied();
            if job.placement.is_some() && job.placing.is_none() && job.told != place {
                job.told = place;
                job.tell(&ClientReply::Queued(place));
            }
        }
    }

    /// Give up what was held or waited for until now, devices and ranks included. Returns when the next is due.
    pub(in crate::controller) fn expire_all(&mut self, config: &ControllerConfig) -> Option<Instant> {
        let waits = self.expire_waits(config).into_iter().chain(self.expire_absent());
        waits.chain(self.expire_resuming(config)).chain(self.expire_forgone(config)).min()
    }

    /// Give up what was held or waited for until now. Returns when the next is due.
    pub(in crate::controller) fn expire_waits(&mut self, config: &ControllerConfig) -> Option<Instant> {
        let now = self.now;
        let due = |job: &Job| job.waits_until.into_iter().chain(job.hold.map(|(_, until)| until)).min();
        let is_due = |job: &Job| due(job).is_some_and(|at| at <= now);
        let names: Vec<String> =
            self.jobs.iter().filter(|(_, job)| is_due(job)).map(|(name, _)| name.clone()).collect();
        for name in &names {
            self.give_up(config, name);
        }
        if !names.is_empty() {
            self.pump(config);
        }
        self.jobs.values().filter_map(due).min()
    }

    fn give_up(&mut self, config: &ControllerConfig, name: &str) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        if let Some((group, _)) = job.hold.take() {
            tracing::warn!(job = name, "no rank has come for the tree that was offered: it is given away");
            self.books.free(group);
            if let Some(entry) = self.queue.get_mut(name) {
                entry.standing = Standing::Parked;
            }
        }
        if job.waits_until.take().is_none() {
            return;
        }
        // The reason as it is now.
        let (moves, wait) = (job.members.values().all(|member| member.request.terms.moves), job.tenant().to_owned());
        tracing::warn!(job = name, tenant = wait, "the time to wait for a tree is over");
        let ids = self.next_ids(name);
        let bars = self.queue.bars(name);
        let why = match self.fit(config, &self.jobs[name], &self.books, &bars, ids) {
            Ok(_) => "others came first".to_owned(),
            Err(none) => none.why,
        };
        if !moves {
            self.leave_queue(name);
        }
        self.finish(config, name, Err(why));
    }

    /// A job waits no more.
    pub(super) fn leave_queue(&mut self, name: &str) {
        if self.queue.remove(name) {
            self.books.touch();
        }
    }
}
