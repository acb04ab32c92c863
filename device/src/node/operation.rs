//! The operations that a group's Data names by signature (PROTOCOL 1).
//!
//! Most Data has the short header, which has no room for what an operation is. A child describes an operation before
//! its first Data, or with it; the node keeps the latest descriptions of a group, whichever child they came from. The
//! number kept is a matter of speed only: Data of an operation that the node does not know, or knows no more, is never
//! combined. Its sender is asked to describe it, and sends it again.

use super::GroupCtx;
use crate::node::group::Child;
use sumac_hal::ctrl::DropReason;
use sumac_hal::op::OpDesc;
use sumac_hal::planted;
use sumac_hal::wire::{Flags, HEADER_LEN, Kind, NakReason, Repr, SHORT_HEADER_LEN, StragglerLimit};

/// The shortest payload under a short header: no Nak is longer than the Data that it answers.
pub(super) const SHORT_PAYLOAD_MIN_BYTES: usize = HEADER_LEN - SHORT_HEADER_LEN;

/// Operations kept per group: those that children at different speeds contribute to at the same time, few of which have
/// several chunks.
const OPERATIONS_KEPT: usize = 8;

/// An operation as a child described it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Operation {
    pub(super) signature: u32,
    pub(super) op: OpDesc,
    /// The limit on waiting for stragglers, and the operation's first chunk.
    pub(super) limit: Option<(StragglerLimit, u64)>,
}

/// The operations that were described last.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct Operations {
    known: [Option<Operation>; OPERATIONS_KEPT],
    /// The entry of the operation described last.
    latest: usize,
}

impl Operations {
    /// Record a description, in place of an earlier one with the same signature, or of the oldest.
    pub(super) fn learn(&mut self, operation: Operation) {
        let position = self.position(operation.signature).unwrap_or_else(|| {
            self.latest = (self.latest + 1) % OPERATIONS_KEPT;
            self.latest
        });
        self.known[position] = Some(operation);
    }

    /// Return the operation with this signature, if it is known.
    pub(super) fn find(&self, signature: u32) -> Option<&Operation> {
        self.known[self.position(signature)?].as_ref()
    }

    fn position(&self, signature: u32) -> Option<usize> {
        self.known.iter().position(|known| known.is_some_and(|known| known.signature == signature))
    }
}

impl GroupCtx<'_> {
    /// Handle a child's description of the operation that its Data is about to name.
    pub(super) fn on_operation(&mut self, child: usize, repr: &Repr) {
        let Some(op) = repr.op_desc() else {
            return self.common.drop_packet(DropReason::BadKind);
        };
        self.children[child].token = repr.token;
        self.learn(op, repr);
    }

    /// Return the operation that a contribution to slot `index` belongs to, which may hold chunk `local`; `None` if it
    /// is not known.
    pub(super) fn operation_of(&mut self, index: usize, local: u64, repr: &Repr) -> Option<Operation> {
        if let Some(op) = repr.op_desc() {
            return Some(self.learn(op, repr));
        }
        let (slot, signature) = (&self.slots[index], repr.signature);
        if slot.holds(local) && slot.signature == signature {
            return Some(Operation { signature, op: slot.op, limit: None });
        }
        let operations = &self.group.operations;
        let any = planted!(self.common, UnknownOperationCombined);
        let latest = || operations.known[operations.latest].as_ref().filter(|_| any);
        let known = *operations.find(signature).or_else(latest)?;
        // A chunk before the first one that was described is no honest child's.
        let limit = known.limit.filter(|&(_, first)| is_from(repr.seq.0, first));
        Some(Operation { limit, ..known })
    }

    /// Ask a child to describe the operation of its Data, which is dropped.
    pub(super) fn request_operation(&mut self, child: usize, repr: &Repr) {
        self.common.drop_packet(DropReason::UnknownOperation);
        let Child { addr: Some(to), .. } = self.children[child] else { return };
        let nak = self.down_header(Kind::Nak, child, repr.seq, repr.token);
        self.common.reply(to, Repr { reason: Some(NakReason::UnknownOperation), ..nak });
    }

    /// Record the operation of a header that describes it. A subtree's Nak describes the first of two that differ.
    fn learn(&mut self, op: OpDesc, repr: &Repr) -> Operation {
        let first = |(limit, distance): (_, u32)| Some((limit, repr.seq.0.checked_sub(distance.into())?));
        let operation = Operation { signature: repr.signature, op, limit: repr.limit().and_then(first) };
        if repr.kind != Kind::Nak {
            self.group.operations.learn(operation);
        }
        operation
    }
}

/// Return whether chunk `seq` may belong to an operation whose first chunk is `first`.
fn is_from(seq: u64, first: u64) -> bool {
    seq.checked_sub(first).is_some_and(|distance| u32::try_from(distance).is_ok())
}

/// Return whether a contribution names its operation by signature only.
pub(super) fn is_short(repr: &Repr) -> bool {
    repr.flags.contains(Flags::SHORT)
}
