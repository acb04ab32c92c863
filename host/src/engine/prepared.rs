//! Operations that are checked and decided once, and run many times.
//!
//! Invariant: what was decided is used only while it is what a call would be decided to be: until the view, the tree or
//! the controller's offers change, which [`Selection::generation`](super::selection::Selection::generation) counts.
//! Then the next run decides anew.
//!
//! A run that is complete at once leaves everything settled for the next one ([`super::rounds`]). Whoever runs a
//! prepared operation holds the core's lock for nothing else.

use super::core::Core;
use super::decided::Decided;
use super::error::Error;
use super::extent::Extent;
use super::options::{CallOptions, Outcome};
use crate::exec::Buffers;
use sumac_hal::op::{OpDesc, Path, ReduceOp};

/// An operation, and what is known of it.
#[derive(Debug)]
pub(crate) struct PreparedCall {
    desc: OpDesc,
    options: CallOptions,
    extent: Extent,
    decided: Option<Decided>,
}

impl PreparedCall {
    pub(crate) const fn desc(&self) -> &OpDesc {
        &self.desc
    }

    pub(crate) const fn options(&self) -> &CallOptions {
        &self.options
    }
}

impl Core {
    /// Check an operation that will run on such buffers. Nothing is sent.
    ///
    /// # Errors
    /// As those of [`Core::run`] for wrong arguments and impossible paths.
    pub(crate) fn prepare(
        &mut self,
        desc: OpDesc,
        buffers: &Buffers<'_>,
        options: &CallOptions,
    ) -> Result<PreparedCall, Error> {
        self.check_usable()?;
        let extent = Extent::of(&desc, self.place())?;
        extent.check(&desc, buffers)?;
        if let (true, Some(why)) = (self.data.config.world > 1, self.explain(&desc, options).refusal()) {
            return Err(Error::NotPossible(why.clone()));
        }
        Ok(PreparedCall { desc, options: *options, extent, decided: None })
    }

    /// Run a prepared operation to completion. Its buffers may have got other lengths since it was prepared.
    ///
    /// # Errors
    /// As those of [`Core::run`].
    #[inline]
    pub(crate) fn run_prepared(&mut self, call: &mut PreparedCall, mut buffers: Buffers<'_>) -> Result<Outcome, Error> {
        let PreparedCall { desc, options, extent, decided } = call;
        // Whatever this run does, it must settle everything anew.
        if let (Some(settled), Some(decided)) = (self.settled.take(), decided.as_ref())
            && let Some(result) = self.run_settled((desc, options), (decided, settled), buffers.reborrow())
        {
            return result;
        }
        let changes = self.notices().changes();
        self.check_usable()?;
        let is_in_place = matches!(buffers, Buffers::InPlace(_));
        let run = |decided| self.run_round((desc, options), (decided, Some(changes)), buffers.reborrow());
        if let Some(result) = decided.as_ref().and_then(run) {
            return result;
        }
        extent.check(desc, &buffers)?;
        let result = self.run_checked((*desc, options), extent, &mut buffers, decided.as_ref());
        self.data.operations.calling = None;
        if result.is_ok() && !decided.as_ref().is_some_and(|decided| decided.is_of(self.data.generation().0)) {
            *decided = self.decide(desc, options, is_in_place);
        }
        result
    }

    /// Return how the next run is decided, if it runs between hosts: what is in the tree depends on the tree's state.
    pub(super) fn decide(&mut self, desc: &OpDesc, options: &CallOptions, is_in_place: bool) -> Option<Decided> {
        let generation = self.data.generation().0;
        let (call, algo) = (self.calls_begun(), self.data.algo(desc, options).ok()?);
        let chosen = self.data.choose_by((call, *desc, algo)).ok()?;
        let is_between_hosts = chosen.is_announced && chosen.path != Path::Tree && desc.op != Some(ReduceOp::PremulSum);
        if !is_between_hosts {
            return None;
        }
        let schedule = self.data.schedule(desc, chosen.path, is_in_place).ok()?;
        let decided = Decided { generation, chosen, schedule, round: None };
        let round = self.round((desc, options), &decided, is_in_place);
        Some(Decided { round, ..decided })
    }
}
