//! From a job without a tree to one with, and back.
//!
//! ```text
//!   seek: planned, fits? --- yes --> claimed --> Draft --> devices are asked, unlocked --> settle --> placed
//!            | no                                                                            | one refuses
//!            v                                                                               v
//!   without a tree, in the queue if it could have one later <-------------------------------- all is freed
//!            | something is freed, or comes (pump)
//!            v
//!   claimed for it, and offered to its ranks; or, while they still wait to join, made at once
//! ```

use super::{Job, State};
use crate::controller::ControllerConfig;
use crate::controller::admit::{Asking, Ids, Placement, Unreserved};
use crate::controller::books::Needs;
use crate::controller::device::{Asked, DeviceError, DeviceSession};
use crate::controller::proto::{ClientReply, JoinRequest};
use crate::controller::queue::{Queue, Scope, Standing, Waiting};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::{Order, Refusal};
use sumac_hal::ids::{Epoch, GroupId, TreeId};

/// How many trees are tried for a job, each without the devices that did not answer before.
const TRIES_MAX: u32 = 4;

/// What is kept of why a job has no tree, in characters: devices that were left out may be many.
const WHY_CHARS_MAX: usize = 1000;

/// A tree that is claimed in the books, and to be reserved on the devices.
#[derive(Debug)]
pub(in crate::controller) struct Draft {
    job: String,
    placement: Placement,
    order: Order,
    tries: u32,
    /// Of the devices when it was made.
    devices_version: u64,
}

impl Draft {
    pub(super) const fn new(job: String, placement: Placement, order: Order, tries: u32, devices_version: u64) -> Self {
        Self { job, placement, order, tries, devices_version }
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

/// What a job could wait for, and the least that helps.
pub(super) type Wait = (Scope, Needs);

/// Why there is no tree.
#[derive(Debug)]
pub(super) struct NoTree {
    pub(super) why: String,
    /// What the job could wait for before it begins.
    pub(super) wait: Option<Wait>,
    /// What it could wait for while it runs without.
    pub(super) wait_running: Option<Wait>,
}

impl NoTree {
    pub(super) const fn for_good(why: String) -> Self {
        Self { why, wait: None, wait_running: None }
    }

    pub(super) fn for_now(why: String, wait: Option<Wait>) -> Self {
        Self { why, wait_running: wait.clone(), wait }
    }
}

impl State {
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

    /// A job has no tree, by the books of that version, if it was tried: tell its ranks, unless they wait for one to join
    /// with.
    pub(super) fn without(&mut self, config: &ControllerConfig, name: &str, none: NoTree, tried: Option<u64>) {
        let now = self.now;
        let Some(job) = self.jobs.get_mut(name) else { return };
        let (view, is_new, why) = (job.view, job.placement.is_none(), none.why);
        let terms = |job: &Job| job.first().map(|member| member.request.terms.clone()).unwrap_or_default();
        let wait = Duration::from_millis(u64::from(terms(job).wait_ms));
        let until = *job.joins_by.get_or_insert_with(|| now + wait);
        let can_join_later = is_new && now < until;
        let can_wait = job.members.values().all(|member| member.request.terms.moves) || can_join_later;
        tracing::warn!(job = name, view, why, "no tree");
        let wait = if can_join_later { none.wait } else { none.wait_running };
        match wait.filter(|_| can_wait) {
            Some(wait) => {
                if can_join_later {
                    (job.waits_until, job.placing) = (Some(until), None);
                }
                self.wait_in_queue(name, wait, tried);
                if can_join_later {
                    // What has been freed since the plan was made counts.
                    self.pump();
                    self.tell_queue();
                    return;
                }
            }
            None => self.leave_queue(name),
        }
        self.finish(config, name, Err(why));
        self.pump();
        self.tell_queue();
    }

    /// A job that has no tree by the books of that version, if it was tried, waits for one.
    pub(super) fn wait_in_queue(&mut self, name: &str, (scope, wanted): Wait, tried: Option<u64>) {
        let Some(job) = self.jobs.get(name) else { return };
        let (tenant, ticket) = (job.tenant().to_owned(), self.queue.ticket());
        let standing = Standing::Waits;
        self.queue.enter(name, Waiting { tenant, ticket, passes: 0, scope, wanted, standing, tried });
    }

    /// Tell the ranks of a job what they have got.
    pub(super) fn finish(&mut self, config: &ControllerConfig, name: &str, placed: Result<Placement, String>) {
        let Some(job) = self.jobs.get_mut(name) else { return };
        (job.placing, job.waits_until) = (None, None);
        let is_new = job.placement.is_none();
        job.placement = Some(placed.map_err(|why| why.chars().take(WHY_CHARS_MAX).collect()));
        if is_new {
            job.declare();
            // A tree that it waits for may combine in another order than the one that is declared now.
            if let Some(entry) = self.queue.get(name).filter(|entry| entry.standing == Standing::Waits) {
                let tried = entry.tried;
                self.enter_queue(name, tried);
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
                self.pump();
                return None;
            }
            Ok(()) => {
                // Its ranks are gone meanwhile.
                self.release(&draft.placement);
                self.pump();
                return None;
            }
            Err(unreserved) => unreserved,
        };
        self.books.free(group);
        let next = if is_wanted { self.retry(config, &name, &mut draft, unreserved) } else { Ok(None) };
        let next = match next {
            Ok(Some(())) => Some(draft),
            Ok(None) => None,
            Err(Again::Seek) => {
                self.seek(&name, draft.tries + 1);
                None
            }
            Err(Again::Without(none)) => {
                let tried = Some(self.books.version());
                self.without(config, &name, none, tried);
                if draft.devices_version != self.planning.devices_version {
                    // A device that has come meanwhile found the job busy.
                    self.reconsider();
                }
                None
            }
        };
        self.pump();
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
            let requests: Vec<&JoinRequest> = job.members.values().map(|member| &*member.request).collect();
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
        let wait = is_short.then(|| (Scope::Devices, placement.least()));
        if is_short {
            let need = placement.claim(job.tenant()).needs[index].1.slots;
            self.note_crowded(&device, need, slots_used);
        }
        Err(Again::Without(NoTree::for_now(refused, wait)))
    }

    /// All ranks want another tree than the one that they have, or had.
    pub(super) fn move_on(&mut self, name: &str) {
        self.give_up_tree(name);
        self.seek(name, 0);
        self.pump();
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
