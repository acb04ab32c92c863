//! What both transports hold of a group that has ended, from which [`crate::recovery`] completes its operations.

use super::packets::Ops;

/// A rank's side of a group that has ended: it processes nothing more, and nobody writes to its buffers any more.
pub(crate) trait RecoverySource {
    /// The operations.
    fn ops(&self) -> &Ops;

    /// Return whether this rank has its answer to a chunk of an operation in flight.
    fn is_answered(&self, seq: u64) -> bool;

    /// Read the whole result of a chunk from where its device had published it; false, and anything in `result`, if
    /// that is not to be had.
    fn published(&self, seq: u64, result: &mut [u8]) -> bool;

    /// Return whether the contents of this rank's memory are unknown for a chunk that it has no answer to, as the
    /// device may have written while the memory was revoked. Such contents are neither a result nor a contribution.
    fn is_unknown(&self, _seq: u64) -> bool {
        false
    }
}
