//! The buffers of operations in the tree: of a blocking call, and of started operations.

use super::extent::Extent;
use super::owned::Owned;
use crate::exec::Buffers;
use crate::transport::packets::{self, OpId};
use std::collections::BTreeMap;

/// The buffers of a started operation in the tree.
pub(super) struct TreeBuffers {
    pub(super) handle: u64,
    pub(super) buffers: Owned,
}

impl TreeBuffers {
    pub(super) fn input(&self) -> &[u8] {
        let Owned { memory, output, scaled, extent } = &self.buffers;
        match (scaled, output) {
            (Some(scaled), _) => scaled,
            (None, Some(_)) => memory.bytes(),
            (None, None) => &memory.bytes()[extent.input.clone()],
        }
    }

    pub(super) fn output(&mut self) -> &mut [u8] {
        let Owned { memory, output, extent, .. } = &mut self.buffers;
        match output {
            Some(output) => output.bytes_mut(),
            None => &mut memory.bytes_mut()[extent.output.clone()],
        }
    }
}

/// The buffers that a blocking call borrows from its caller.
pub(super) struct BorrowedBuffers<'c, 'b> {
    pub(super) op: OpId,
    pub(super) extent: &'c Extent,
    pub(super) buffers: &'c mut Buffers<'b>,
}

/// The buffers of all operations in the tree: of a blocking call, and of started operations.
pub(super) struct InFlight<'c, 'b> {
    pub(super) owned: &'c mut BTreeMap<OpId, TreeBuffers>,
    pub(super) borrowed: Option<BorrowedBuffers<'c, 'b>>,
}

impl packets::Buffers for InFlight<'_, '_> {
    fn input(&self, op: OpId) -> &[u8] {
        match &self.borrowed {
            Some(borrowed) if borrowed.op == op => borrowed.extent.input(borrowed.buffers),
            _ => self.owned.get(&op).map_or(&[], TreeBuffers::input),
        }
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        match &mut self.borrowed {
            Some(borrowed) if borrowed.op == op => borrowed.extent.output(borrowed.buffers),
            _ => self.owned.get_mut(&op).map_or(&mut [], TreeBuffers::output),
        }
    }
}
