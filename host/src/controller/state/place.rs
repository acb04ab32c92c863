//! From a job without a tree to one with, and back.
//!
//! ```text
//!   seek: fits the books? -- yes --> claimed --> Draft --> devices are asked, unlocked --> settle --> placed
//!            | no                                                                            | one refuses
//!            v                                                                               v
//!   without a tree, in the queue if it could have one later <-------------------------------- all is freed
//!            | something is freed, or comes (pump)
//!            v
//!   claimed for it, and offered to its ranks; or, while they still wait to join, made at once
//! ```

use super::{Job, State};
use crate::coll::tree::Tree;
use crate::controller::ControllerConfig;
use crate::controller::admit::{Asking, Devices, Ids, Placement, Unreserved, draft};
use crate::controller::books::{Books, Needs, Short};
use crate::controller::device::{Asked, DeviceError, DeviceSession};
use crate::controller::proto::{ClientReply, JoinRequest};
use crate::controller::queue::{Bars, Queue, Scope, Standing, Waiting};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::{Order, Refusal};
use sumac_hal::ids::{Epoch, GroupId, TreeId};

/// How many trees are tried for a job, each without the devices that did not answer before.
const TRIES_MAX: u32 = 4;

/// A tree that is claimed in the books, and to be reserved on the devices.
#[derive(Debug)]
pub(in crate::controller) struct Draft {
    job: String,
    placement: Placement,
    order: Order,
    tries: u32,
}

impl Draft {
    pub(super) const fn new(job: String, placement: Placement, order: Order) -> Self {
        Self { job, placement, order, tries: 0 }
    }

    /// Ask the devices. The state is not locked meanwhile.
    pub(in crate::controller) fn reserve(&self, config: &ControllerConfig) -> Result<(), Unreserved> {
        self.placement.reserve(config, self.order)
    }

    /// The same step by step.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) const fn by_steps(&self) -> (&Placement, Order) {
        (&self.placement, self.order)
    }
}

/// Why there is no tree.
#[derive(Debug)]
pub(super) struct NoTree {
    pub(super) why: String,
    /// What the job could wait for, and the least that helps.
    pub(super) wait: Option<(Scope, Needs)>,
}

impl NoTree {
    const fn for_good(why: String) -> Self {
        Self { why, wait: None }
    }
}

impl State {
    /// All ranks of a job are there and want a tree: claim one in the books, or place the job without.
    pub(super) fn seek(&mut self, config: &ControllerConfig, name: &str) -> Option<Draft> {
        self.try_seek(config, name, 0)
    }

    fn try_seek(&mut self, config: &ControllerConfig, name: &str, tries: u32) -> Option<Draft> {
        let held = self.jobs.get_mut(name)?.hold.take();
        if let Some((group, _)) = held {
            self.books.free(group);
        }
        // What was held for it is its own, whoever has come to starve meanwhile.
        let bars = if held.is_some() { Bars::default() } else { self.queue.bars(name) };
        let ids = self.next_ids(name);
        let fitted = self.fit(config, &self.jobs[name], &self.books, &bars, ids);
        let claimed = fitted.and_then(|placement| {
            let claim = placement.claim(self.jobs[name].tenant());
            let claimed = self.books.claim(claim.clone());
            claimed.map_err(|short| NoTree::for_good(short.to_string()))?;
            Ok((placement, claim))
        });
        let (placement, claim) = match claimed {
            Ok(claimed) => claimed,
            Err(none) => {
                self.without(config, name, none);
                return None;
            }
        };
        if held.is_none() {
            let ticket = self.queue.get(name).map(|entry| entry.ticket);
            let ticket = ticket.unwrap_or_else(|| self.queue.ticket());
            self.queue.given(ticket, &claim, &mut self.books);
        }
        let job = self.jobs.get_mut(name)?;
        job.placing = Some(placement.group);
        let order = job.first().map_or(Order::Arrival, |member| member.request.order);
        Some(Draft { job: name.to_owned(), placement, order, tries })
    }

    pub(super) fn next_ids(&mut self, name: &str) -> Ids {
        let (group, epoch) = self.next_view.take();
        let job = self.jobs.get(name);
        // A job's views count from 0, and its first group's epoch from 1. It wraps after 65535 views: still another than
        // the last one's.
        let counter = job.map_or(1, |job| job.view + u32::from(job.placement.is_some()) + 1) as u16;
        self.ids(group, Epoch { counter, ..epoch })
    }

    pub(super) const fn ids(&self, group: GroupId, epoch: Epoch) -> Ids {
        Ids {
            group,
            tree: TreeId(group.0),
            epoch,
            entropy: self.entropy,
            #[cfg(feature = "planted")]
            bug: self.bug,
        }
    }

    /// Draft a tree for a job, or say why there is none, and what it could wait for.
    pub(super) fn fit(
        &self,
        config: &ControllerConfig,
        job: &Job,
        books: &Books,
        bars: &Bars,
        ids: Ids,
    ) -> Result<Placement, NoTree> {
        let requests: Vec<&JoinRequest> = job.members.values().map(|member| &member.request).collect();
        let pinned = job.first().map_or(&[][..], |member| &member.pinned);
        let asking = Asking { tenant: job.tenant(), requests: &requests, pinned };
        let (devices, left_out) = self.usable(job, pinned).map_err(NoTree::for_good)?;
        let add = |why: String| if left_out.is_empty() { why } else { format!("{why}; {left_out}") };
        let drafted = |devices: &Devices, books: &Books| {
            draft(config, devices, books, asking, ids).and_then(|placement| job.keeps_order(placement))
        };
        let barred = bars.tenants.get(asking.tenant);
        let why = match self.fits(config, job, books, bars, ids) {
            Ok(placement) => return Ok(placement),
            Err(why) => why,
        };
        // Could it have one if nobody else were there?
        let Ok(ideal) = drafted(&devices, &books.emptied()) else {
            // Not even then: because of its quota, or for another reason, which is told.
            let short = drafted(&devices, &books.emptied().unlimited())
                .map(|ideal| books.emptied().check(asking.tenant, &ideal.least()));
            return Err(NoTree::for_good(match short {
                Ok(Err(short)) => short.to_string(),
                _ => add(why),
            }));
        };
        let least = ideal.least();
        let kept_for = least.iter().find_map(|(device, _)| bars.devices.get(device)).or(barred);
        let (scope, why) = match (kept_for, books.check(asking.tenant, &least)) {
            (_, Err(short)) if short.is_quota() => (Scope::Tenant, short.to_string()),
            (Some(other), _) => {
                let scope = if barred.is_some() { Scope::Tenant } else { Scope::Devices };
                (scope, format!("what it takes is kept for job {other:?}, which was passed over too often"))
            }
            (None, Err(short @ Short::Device { what: "groups", .. })) => (Scope::Devices, short.to_string()),
            (None, _) => (Scope::Devices, why),
        };
        Err(NoTree { why: add(why), wait: Some((scope, least)) })
    }

    /// Draft a tree for a job, or say why not, as far as that is known without a look at what could be.
    pub(super) fn fits(
        &self,
        config: &ControllerConfig,
        job: &Job,
        books: &Books,
        bars: &Bars,
        ids: Ids,
    ) -> Result<Placement, String> {
        let requests: Vec<&JoinRequest> = job.members.values().map(|member| &member.request).collect();
        let pinned = job.first().map_or(&[][..], |member| &member.pinned);
        let asking = Asking { tenant: job.tenant(), requests: &requests, pinned };
        if let Some(other) = bars.tenants.get(asking.tenant) {
            return Err(format!("job {other:?} of the same tenant is first"));
        }
        let (mut devices, _) = self.usable(job, pinned)?;
        devices.retain(|_, device| !bars.devices.contains_key(&device.key()));
        job.keeps_order(draft(config, &devices, books, asking, ids)?)
    }

    /// Return the devices that a job may be placed on, and, if some are left out, a clause that names them.
    fn usable(&self, job: &Job, pinned: &[String]) -> Result<(Devices, String), String> {
        let (devices, mut left_out) = self.candidates(job, pinned)?;
        let mut leave_out = |devices: Devices, why: &str, is_out: &dyn Fn(&DeviceSession) -> bool| {
            let (out, rest): (Devices, Devices) = devices.into_iter().partition(|(_, device)| is_out(device));
            if let Some(name) = pinned.iter().find(|name| out.contains_key(*name)) {
                return Err(format!("device {name} is pinned, and {why}"));
            }
            if !out.is_empty() {
                let names: Vec<&str> = out.keys().map(String::as_str).collect();
                let between = if left_out.is_empty() { "" } else { "; " };
                left_out.push_str(&format!("{between}not asked, as {why}: {}", names.join(", ")));
            }
            Ok(rest)
        };
        let devices = leave_out(devices, "it does not answer", &|device| !device.answers())?;
        let has_declined =
            |device: &DeviceSession| job.declined.iter().any(|declined| std::ptr::eq(&raw const **declined, device));
        let devices = leave_out(devices, "a rank could not attach to it", &has_declined)?;
        Ok((devices, left_out))
    }

    /// A job has no tree: tell its ranks, unless they wait for one to join with.
    fn without(&mut self, config: &ControllerConfig, name: &str, none: NoTree) {
        let now = self.now;
        let Some(job) = self.jobs.get_mut(name) else { return };
        let (view, is_new, why) = (job.view, job.placement.is_none(), none.why);
        let terms = |job: &Job| job.first().map(|member| member.request.terms.clone()).unwrap_or_default();
        let wait = Duration::from_millis(u64::from(terms(job).wait_ms));
        let until = *job.joins_by.get_or_insert_with(|| now + wait);
        let can_join_later = is_new && now < until;
        let can_wait = job.members.values().all(|member| member.request.terms.moves) || can_join_later;
        tracing::warn!(job = name, view, why, "no tree");
        match none.wait.filter(|_| can_wait) {
            Some((scope, wanted)) => {
                let (tenant, ticket) = (job.tenant().to_owned(), self.queue.ticket());
                let (standing, tried) = (Standing::Waits, Some(self.books.version()));
                self.queue.enter(name, Waiting { tenant, ticket, passes: 0, scope, wanted, standing, tried });
                if can_join_later {
                    (job.waits_until, job.placing) = (Some(until), None);
                    self.wake.notify_all();
                    self.tell_queue();
                    return;
                }
            }
            None => self.leave_queue(name),
        }
        self.finish(config, name, Err(why));
        self.tell_queue();
    }

    /// Tell the ranks of a job what they have got.
    pub(super) fn finish(&mut self, config: &ControllerConfig, name: &str, placed: Result<Placement, String>) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        (job.placing, job.waits_until) = (None, None);
        let is_new = job.placement.is_none();
        job.placement = Some(placed);
        if is_new {
            job.declare();
            // A tree that it waits for may combine in another order than the one that is declared now.
            if self.queue.get(name).is_some_and(|entry| entry.standing == Standing::Waits) {
                self.enter_queue(config, name);
            }
        }
        let place = self.queue.place(name, &self.books);
        let Some(job) = self.jobs.get_mut(name) else { return };
        if is_new {
            return job.tell_places(config, place, ClientReply::Joined);
        }
        job.view += 1;
        (job.suspected, job.is_moving, job.offer) = (false, false, None);
        job.forget_wishes();
        let view = job.view;
        job.tell_places(config, place, |membership| ClientReply::Replanned { view, membership });
    }

    /// Take in what the devices have said of a draft. Returns what is to be tried next.
    pub(in crate::controller) fn settle(
        &mut self,
        config: &ControllerConfig,
        mut draft: Draft,
        reserved: Result<(), Unreserved>,
    ) -> Option<Draft> {
        let (name, group) = (draft.job.clone(), draft.placement.group);
        let is_wanted = self.jobs.get(&name).is_some_and(|job| job.placing == Some(group));
        let unreserved = match reserved {
            Ok(()) if is_wanted => {
                let placement = &draft.placement;
                let (levels, by_reference) = (placement.levels, placement.ranks_by_reference());
                let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
                tracing::info!(job = name, %group, levels, ?devices, by_reference, "job is placed");
                self.leave_queue(&name);
                self.finish(config, &name, Ok(draft.placement));
                self.pump(config);
                return None;
            }
            Ok(()) => {
                // Its ranks are gone meanwhile.
                self.release(&draft.placement);
                self.pump(config);
                return None;
            }
            Err(unreserved) => unreserved,
        };
        self.books.free(group);
        let next = if is_wanted { self.retry(config, &name, &mut draft, unreserved) } else { Ok(None) };
        let next = match next {
            Ok(Some(())) => Some(draft),
            Ok(None) => None,
            Err(Again::Seek) => self.try_seek(config, &name, draft.tries + 1),
            Err(Again::Without(none)) => {
                self.without(config, &name, none);
                None
            }
        };
        self.pump(config);
        next
    }

    /// Say what becomes of a draft that could not be reserved.
    fn retry(
        &mut self,
        config: &ControllerConfig,
        name: &str,
        draft: &mut Draft,
        Unreserved { index, error, slots_used }: Unreserved,
    ) -> Result<Option<()>, Again> {
        let Some(job) = self.jobs.get(name) else { return Ok(None) };
        let placement = &mut draft.placement;
        let (device, is_by_reference) = (placement.nodes[index].device.clone(), placement.has_references(index));
        let refused = format!("device {}: {error}", device.name());
        let refusal = match error {
            DeviceError::Refused(refusal) => refusal,
            DeviceError::Gone if draft.tries + 1 < TRIES_MAX => {
                self.silent.insert(device.key());
                return Err(Again::Seek);
            }
            _ => return Err(Again::Without(NoTree::for_good(refused))),
        };
        if matches!(refusal, Refusal::NoBus(_) | Refusal::NoRedoMemory { .. }) && is_by_reference {
            let requests: Vec<&JoinRequest> = job.members.values().map(|member| &member.request).collect();
            let asking = Asking { tenant: job.tenant(), requests: &requests, pinned: &[] };
            let fitted = placement.refit_inline((index, &refusal.to_string()), config, &self.books, asking);
            fitted.map_err(|why| Again::Without(NoTree::for_good(why)))?;
            let claimed = self.books.claim(placement.claim(job.tenant()));
            claimed.map_err(|short| Again::Without(NoTree::for_good(short.to_string())))?;
            return Ok(Some(()));
        }
        let is_short = matches!(
            refusal,
            Refusal::NoEntry { .. }
                | Refusal::NoChildren { .. }
                | Refusal::NoSlots { .. }
                | Refusal::NoMemory { .. }
                | Refusal::NoRedoMemory { .. }
        );
        if let (true, Some(slots_used)) = (is_short, slots_used) {
            self.crowded.insert(device.key(), slots_used);
        }
        let wait = is_short.then(|| (Scope::Devices, placement.least()));
        Err(Again::Without(NoTree { why: refused, wait }))
    }

    /// All ranks want another tree than the one that they have, or had.
    pub(super) fn move_on(&mut self, config: &ControllerConfig, name: &str) -> Option<Draft> {
        self.give_up_tree(name);
        let draft = self.seek(config, name);
        self.pump(config);
        draft
    }

    /// Free a tree on all its devices, and in the books. Returns what devices have yet to answer, for who wants to wait.
    pub(super) fn release(&mut self, placement: &Placement) -> Vec<(Arc<DeviceSession>, Asked)> {
        self.books.free(placement.group);
        // They may have dialled anew.
        let devices = placement.nodes.iter().filter_map(|node| self.session(&node.device.key()));
        devices.filter_map(|device| placement.release_on(&device).map(|asked| (device, asked))).collect()
    }

    /// The controller ends: free everything, and hang up on all ranks. Returns what devices have yet to answer.
    pub(in crate::controller) fn release_all(&mut self) -> Vec<(Arc<DeviceSession>, Asked)> {
        self.queue = Queue::default();
        let (jobs, resuming) = (std::mem::take(&mut self.jobs), std::mem::take(&mut self.resuming));
        // Ranks look for the next controller from here on.
        let all = jobs.values().chain(resuming.values().map(|resuming| &resuming.job));
        all.flat_map(|job| job.members.values()).for_each(|member| member.client.hang_up());
        let placed = jobs.into_values().filter_map(|job| job.placement?.ok());
        let released: Vec<_> = placed.flat_map(|placement| self.release(&placement)).collect();
        released
    }
}

/// What to do about a draft that could not be reserved.
enum Again {
    /// Draft another one: the device that did not answer is left out.
    Seek,
    Without(NoTree),
}

impl Job {
    /// Let a placement pass that combines in the declared order of the job.
    fn keeps_order(&self, placement: Placement) -> Result<Placement, String> {
        let Some(declared) = &self.expression else { return Ok(placement) };
        let order = self.first().map_or(Order::Arrival, |member| member.request.order);
        if Tree::new(placement.expression(), self.world, order).is_ok_and(|tree| tree == *declared) {
            return Ok(placement);
        }
        let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
        Err(format!("a tree on {} would combine in another order than the declared one", devices.join(", ")))
    }
}
