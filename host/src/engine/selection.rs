//! Path selection of a communicator.

use super::config::JoinConfig;
use super::error::Error;
use super::notices::Notices;
use super::selection_cache::SelectionCache;
use crate::controller::proto::QueuePosition;
use crate::select::{Algo, Explanation, SelectionContext, explain};
use sumac_hal::op::{OpDesc, Path};

/// What paths are selected by. Invariant: a cached selection is of the present context and queue position.
pub(super) struct Selection {
    context: SelectionContext,
    cache: SelectionCache,
    /// The queue position that the cached selections depend on.
    queue_position: Option<QueuePosition>,
    fallback_logged: bool,
}

impl Selection {
    pub(super) fn new(context: SelectionContext) -> Self {
        // Joining has logged why there is no tree.
        let fallback_logged = context.tree.is_err();
        Self { context, cache: SelectionCache::default(), queue_position: None, fallback_logged }
    }

    pub(super) const fn context(&self) -> &SelectionContext {
        &self.context
    }

    /// Continue with another context.
    pub(super) fn install(&mut self, context: SelectionContext) {
        self.context = context;
        self.clear();
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
        self.cache = SelectionCache::default();
        self.fallback_logged = false;
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

    /// Select the path. If the algorithm was left open and the tree is unavailable, that is a fallback, which is logged
    /// once.
    pub(super) fn choose(
        &mut self,
        desc: &OpDesc,
        algo: Algo,
        (config, notices): (&JoinConfig, &Notices),
    ) -> Result<(Path, Option<String>), Error> {
        let queue_position = notices.queue_position();
        if std::mem::replace(&mut self.queue_position, queue_position) != queue_position {
            self.clear();
        }
        if let Some(chosen) = self.cache.find(desc, algo) {
            return Ok(chosen);
        }
        let explanation = self.explain(desc, algo, queue_position);
        let Some(path) = explanation.chosen else {
            let reason = explanation.refusal().cloned();
            return Err(reason.map_or_else(|| Error::Argument(format!("no path for {desc}")), Error::NotPossible));
        };
        let fallback = explanation.fallback().map(ToString::to_string);
        if let Some(why) = fallback.as_ref().filter(|_| !self.fallback_logged) {
            let (job, rank) = (&config.job, config.rank);
            crate::log::warn!(job, rank, path = path.name(), %why, "falling back from the tree (logged once)");
            self.fallback_logged = true;
        }
        let chosen = (path, fallback);
        self.cache.keep(*desc, algo, &chosen);
        Ok(chosen)
    }
}
