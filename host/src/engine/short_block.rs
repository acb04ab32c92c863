//! Short blocks of a rail, which the thread of the communicator's call reduces itself ([`super::hybrid`]).
//!
//! A thread for each block costs tens of microseconds. The rail's call may however wait for ranks that come to it only
//! when the communicator's view has changed, so this rank must be able to drive the communicator beside it. A short
//! block is therefore started in memory of its own, if that waits for nothing, and driven for [`BRIEFLY`]. What takes
//! longer, or is more than to wait for the tree, is left to a thread as any other block.
//!
//! Invariants:
//! - nothing here waits for anything but the tree, or longer than [`BRIEFLY`];
//! - for the other ranks of the rail, the call is the same as any other of the operation.

use super::core::Core;
use super::error::Error;
use super::extent::Extent;
use super::operations::Started;
use super::options::{CallOptions, Outcome};
use super::owned::Owned;
use crate::select::Algo;
use std::time::{Duration, Instant};
use sumac_hal::op::{OpDesc, Path};

/// How long a block is driven by the thread of its call: many times what a short one takes in a tree, and little beside
/// what a communicator allows for a change of its view.
const BRIEFLY: Duration = Duration::from_millis(1);

impl Core {
    /// Start an operation in the tree, in place, if nothing else is under way. `None`: it has not begun.
    pub(super) fn start_at_once(&mut self, desc: OpDesc, block: &[u8], options: &CallOptions) -> Option<u64> {
        let excluded = self.data.tree.excluded_ranks();
        let is_usable = self.data.ended.is_none() && !self.notices().is_cancelled();
        let has_tree = self.data.tree.is_there() && self.data.tree.error().is_none() && !self.data.watch.is_tree_lost();
        if !is_usable || !has_tree || !self.is_quiet(excluded) || !self.data.has_room() {
            return None;
        }
        let call = self.notices().migration.count_open_call()?;
        self.data.operations.calling = Some(call);
        let started = self.start_counted((desc, call), block, options);
        self.data.operations.calling = None;
        if started.is_none() {
            self.uncount_call(call);
        }
        started
    }

    fn start_counted(&mut self, (desc, call): (OpDesc, u64), block: &[u8], options: &CallOptions) -> Option<u64> {
        let extent = Extent::of(&desc, self.data.place).ok()?;
        let chosen = self.data.choose_by((call, desc, Algo::Tree)).ok().filter(|chosen| chosen.path == Path::Tree)?;
        let (limit, begun) = (self.data.policy(options).limit(), self.data.snapshot(Instant::now()));
        let mut started = Started::new((desc, call), (Algo::Tree, chosen), limit, begun);
        let owned = Owned { memory: Box::new(block.to_vec()), output: None, scaled: None, extent };
        self.data.launch(self.data.operations.next_handle(), &mut started, owned).ok()?;
        Some(self.data.operations.start(started))
    }

    /// Drive a started operation for a short time. Returns whether it has ended.
    pub(super) fn drive_briefly(&mut self, handle: u64, options: &CallOptions) -> bool {
        let now = Instant::now();
        let (deadline, until) = (self.deadline_from(now, options), now + BRIEFLY);
        loop {
            self.data.try_finish(handle);
            if self.data.operations.unfinished(handle).is_none() {
                return true;
            }
            // What the data path stops for, it finds again when a thread waits for the operation.
            let Ok(wait) = self.data.advance(None, deadline) else { return false };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            if !wait.is_zero() {
                self.data.tree.wait(wait.min(left));
            }
        }
    }

    /// Wait for an operation that was started at once, and copy its result.
    ///
    /// # Errors
    /// The operation's.
    pub(super) fn finish_block(
        &mut self,
        handle: u64,
        block: &mut [u8],
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        let (owned, result) = self.finish(handle, options);
        let outcome = result?;
        let missing = || Error::Argument("the memory of a block is gone".into()).ending();
        block.copy_from_slice(owned.ok_or_else(missing)?.memory.bytes());
        Ok(outcome)
    }
}
