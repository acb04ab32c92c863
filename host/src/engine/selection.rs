//! Path selection of a communicator.

use super::config::JoinConfig;
use super::decided::{Chosen, Decided};
use super::error::Error;
use super::notices::Notices;
use super::recent::Recent;
use crate::controller::proto::QueuePosition;
use crate::recovery::CallPaths;
use crate::schedule::Schedule;
use crate::select::{Algo, Explanation, SelectionContext, explain};
use std::sync::Arc;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::wire::RankMask;

/// A path, and why it is not the tree if the algorithm was left open.
type Selected = (Path, Option<Arc<str>>);

/// The most messages of a schedule that is kept, with its steps: those of a long one take little time to compute beside
/// its messages.
const KEPT_MESSAGES_MAX: usize = 256;

/// What paths are selected by. Invariant: a cached selection is of the present context and queue position.
pub(super) struct Selection {
    context: SelectionContext,
    selected: Recent<(OpDesc, Algo), Selected>,
    /// The schedules of paths at this rank's place, in place or not.
    schedules: Recent<(OpDesc, Path, bool), Arc<Schedule>>,
    /// How short operations of the board were decided, in place or not ([`super::rounds`]).
    pub(super) decided: Recent<(OpDesc, Algo, bool), Arc<Decided>>,
    /// The queue position that the cached selections depend on.
    queue_position: Option<QueuePosition>,
    /// The ranks without which operations go on.
    excluded: RankMask,
    fallback_logged: bool,
    /// How often anything else that paths are selected by has changed.
    generation: u64,
    /// Calls that ranks had begun in earlier views.
    earlier: CallPaths<SelectionContext>,
    /// The context of the tree that the ranks are migrating to. Some may use it already.
    migrating_to: Option<SelectionContext>,
}

impl Selection {
    pub(super) fn new(context: SelectionContext) -> Self {
        // Joining has logged why there is no tree.
        let fallback_logged = context.tree.is_err();
        Self {
            context,
            selected: Recent::default(),
            schedules: Recent::default(),
            decided: Recent::default(),
            queue_position: None,
            excluded: RankMask::EMPTY,
            fallback_logged,
            generation: 0,
            earlier: CallPaths::default(),
            migrating_to: None,
        }
    }

    pub(super) const fn context(&self) -> &SelectionContext {
        &self.context
    }

    /// Return whether all ranks are on one machine.
    pub(super) const fn is_on_one_machine(&self) -> bool {
        self.context.ranks_per_host == self.context.ranks
    }

    /// Continue with another context.
    pub(super) fn install(&mut self, context: SelectionContext) {
        self.context = context;
        self.clear();
    }

    /// The ranks are migrating to the tree of this context, or have ended that.
    pub(super) fn migrate_to(&mut self, context: Option<SelectionContext>) {
        self.forget_decided();
        self.migrating_to = context;
    }

    /// The view has changed. The ranks had begun `begun` calls at most, and selected by `before`, or, if they were
    /// ahead of this rank in a migration, by the tree that it is migrating to.
    pub(super) fn view_changed(&mut self, begun: u64, before: SelectionContext, is_behind: bool) {
        self.forget_decided();
        let migrated = self.migrating_to.take().filter(|_| is_behind);
        self.earlier.view_changed(begun, migrated.unwrap_or(before));
    }

    /// Return a number that changes whenever calls may be selected another path than before, or for another reason.
    #[inline]
    pub(super) fn generation(&mut self, queue_position: Option<QueuePosition>, excluded: RankMask) -> u64 {
        self.note_queue_position(queue_position);
        if self.excluded != excluded {
            self.excluded = excluded;
            self.forget_decided();
        }
        self.generation
    }

    fn note_queue_position(&mut self, queue_position: Option<QueuePosition>) {
        if self.queue_position != queue_position {
            self.queue_position = queue_position;
            self.clear();
        }
    }

    /// Return whether the host collective of a call is announced in the present tree.
    pub(super) fn is_announced(&self, call: u64) -> bool {
        self.earlier.is_past(call)
    }

    /// There is no tree any more, or still none.
    pub(super) fn without_tree(&mut self, why: String) {
        self.context.tree = Err(why);
        self.clear();
    }

    /// Return why there is no tree.
    pub(super) fn no_tree(&self) -> Option<&String> {
        self.context.tree.as_ref().err()
    }

    /// Record whether the log says why operations do not use the tree.
    pub(super) const fn set_fallback_logged(&mut self, is_logged: bool) {
        self.fallback_logged = is_logged;
    }

    /// Invalidate cached selections: available paths have changed.
    fn clear(&mut self) {
        self.forget_decided();
        (self.selected, self.schedules) = (Recent::default(), Recent::default());
        self.fallback_logged = false;
    }

    /// What was decided earlier may be decided otherwise now.
    fn forget_decided(&mut self) {
        self.generation += 1;
        self.decided = Recent::default();
    }

    pub(super) fn explain(&self, desc: &OpDesc, algo: Algo, queue_position: Option<QueuePosition>) -> Explanation {
        // Only the reason why there is no tree depends on the queue.
        match (&self.context.tree, queue_position) {
            (Err(why), Some(place)) => {
                let tree = Err(format!("{why}; {place}"));
                explain(&SelectionContext { tree, ..self.context.clone() }, desc, algo)
            }
            _ => explain(&self.context, desc, algo),
        }
    }

    /// Select the path of a call: that of the ranks that began it in an earlier view, or by the present context. If the
    /// algorithm was left open and the tree is unavailable, that is a fallback, which is logged once.
    pub(super) fn choose(
        &mut self,
        (call, desc, algo): (u64, &OpDesc, Algo),
        (config, notices): (&JoinConfig, &Notices),
    ) -> Result<Chosen, Error> {
        let earlier = self.earlier.select(call, |before| match path(explain(before, desc, algo), desc) {
            Ok((Path::Tree, _)) => None,
            selected => Some(selected),
        });
        match earlier {
            Some(selected) => selected.map(|(path, fallback)| Chosen { path, fallback, is_announced: false }),
            None => {
                let (path, fallback) = self.choose_now(desc, algo, (config, notices))?;
                Ok(Chosen { path, fallback, is_announced: true })
            }
        }
    }

    /// Return the schedule of an operation by a path: the one that `make` made for it last, or a new one. What is kept
    /// is stored, so that calling again computes nothing.
    pub(super) fn schedule(
        &mut self,
        (desc, path, is_in_place): (&OpDesc, Path, bool),
        make: impl FnOnce(&Self) -> Result<Schedule, Error>,
    ) -> Result<Arc<Schedule>, Error> {
        let key = (*desc, path, is_in_place);
        if let Some(schedule) = self.schedules.find(&key) {
            return Ok(schedule);
        }
        let schedule = make(self)?;
        // Most of many steps have messages: they need not be counted.
        if schedule.len() > KEPT_MESSAGES_MAX || schedule.messages() > KEPT_MESSAGES_MAX {
            return Ok(Arc::new(schedule));
        }
        let schedule = Arc::new(schedule.stored());
        self.schedules.keep(key, Arc::clone(&schedule));
        Ok(schedule)
    }

    /// Select the path by the present context.
    fn choose_now(
        &mut self,
        desc: &OpDesc,
        algo: Algo,
        (config, notices): (&JoinConfig, &Notices),
    ) -> Result<Selected, Error> {
        let queue_position = notices.queue_position();
        self.note_queue_position(queue_position);
        if let Some(chosen) = self.selected.find(&(*desc, algo)) {
            return Ok(chosen);
        }
        let (path, fallback) = path(self.explain(desc, algo, queue_position), desc)?;
        if let Some(why) = fallback.as_ref().filter(|_| !self.fallback_logged) {
            let (job, rank) = (&config.job, config.rank);
            crate::log::warn!(job, rank, path = path.name(), %why, "falling back from the tree (logged once)");
            self.fallback_logged = true;
        }
        let chosen = (path, fallback);
        self.selected.keep((*desc, algo), chosen.clone());
        Ok(chosen)
    }
}

/// Return the path, and why it is not the tree if the algorithm was left open.
fn path(explanation: Explanation, desc: &OpDesc) -> Result<Selected, Error> {
    let Some(path) = explanation.chosen else {
        let reason = explanation.refusal().cloned();
        return Err(reason.map_or_else(|| Error::Argument(format!("no path for {desc}")), Error::NotPossible));
    };
    Ok((path, explanation.fallback().map(|why| why.to_string().into())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Child;
    use crate::schedule::Shape;
    use crate::select::{CostTable, Declared};
    use std::cell::Cell;
    use sumac_hal::ctrl::Order;
    use sumac_hal::ids::Rank;

    fn context() -> SelectionContext {
        let children = (0..2).map(|rank| Child::Rank(Rank(rank))).collect();
        let declared = Declared::new(vec![children], 2, Order::Arrival, Shape::Line).expect("a tree");
        let (table, tree) = (CostTable::emulated(), Err("queued".into()));
        SelectionContext {
            ranks: 2,
            ranks_per_host: 1,
            shape: Shape::Line,
            order: Order::Arrival,
            tree,
            rails: Err("not joined".into()),
            leaders: Err("not joined".into()),
            table,
            declared,
            memory: crate::MemoryKind::Registered,
        }
    }

    /// What was decided earlier is used while the number stays.
    #[test]
    fn generation_changes_with_all_that_calls_are_selected_by() {
        let mut selection = Selection::new(context());
        let (mut known, excluded) = (Vec::new(), Cell::new(RankMask::EMPTY));
        let mut is_new = |selection: &mut Selection, place| {
            let generation = selection.generation(place, excluded.get());
            assert_eq!(selection.generation(place, excluded.get()), generation, "nothing has changed");
            let is_new = !known.contains(&generation);
            known.push(generation);
            is_new
        };
        assert!(is_new(&mut selection, None));
        let place = |position| Some(QueuePosition { position, of: 3 });
        assert!(is_new(&mut selection, place(2)) && is_new(&mut selection, place(1)) && is_new(&mut selection, None));
        selection.migrate_to(Some(context()));
        assert!(is_new(&mut selection, None));
        selection.view_changed(0, context(), false);
        assert!(is_new(&mut selection, None));
        selection.install(context());
        assert!(is_new(&mut selection, None));
        selection.without_tree("it is gone".into());
        assert!(is_new(&mut selection, None));
        let mut one = RankMask::EMPTY;
        one.insert(Rank(1));
        excluded.set(one);
        assert!(is_new(&mut selection, None));
    }
}
