//! Layout of the words by which ranks synchronize.
//!
//! A page has four words for each rank, written by that rank: its progress counter, then, at the end of an operation,
//! its outcome: the operation's signature, whether the rank has given up, and the counter's value at the end. A rank's
//! banner holds an outcome, and its stream copies it into all pages. Only the host writes the given-up word, so that
//! work enqueued before a rank gave up cannot report success.
//!
//! The number is part of what it is about, and its last word, so that who has seen it has the whole outcome, in
//! whatever order the writes of the counter and of the outcome arrive.

use crate::gpu::Part;

/// Length of a rank's words in bytes.
pub(super) const ENTRY_BYTES: usize = 16;

/// Length of a banner in bytes.
pub(super) const BANNER_BYTES: usize = 12;

const WORD_BYTES: usize = 4;

/// Return a rank's counter in a page.
pub(super) const fn counter<M>(page: &M, of: usize) -> Part<'_, M> {
    Part { memory: page, at: of * ENTRY_BYTES, len_bytes: WORD_BYTES }
}

/// Return the number of a rank's outcome in a page.
pub(super) const fn published<M>(page: &M, of: usize) -> Part<'_, M> {
    Part { memory: page, at: of * ENTRY_BYTES + 3 * WORD_BYTES, len_bytes: WORD_BYTES }
}

/// Return a rank's outcome.
pub(super) const fn outcome<M>(page: &M, of: usize) -> Part<'_, M> {
    Part { memory: page, at: of * ENTRY_BYTES + WORD_BYTES, len_bytes: BANNER_BYTES }
}

/// Return the whole page.
pub(super) const fn whole<M>(page: &M, ranks: usize) -> Part<'_, M> {
    Part { memory: page, at: 0, len_bytes: ranks * ENTRY_BYTES }
}

/// Return the banner's signature word.
pub(super) const fn signature<M>(banner: &M) -> Part<'_, M> {
    Part { memory: banner, at: 0, len_bytes: WORD_BYTES }
}

/// Return the banner's given-up word.
pub(super) const fn given_up<M>(banner: &M) -> Part<'_, M> {
    Part { memory: banner, at: WORD_BYTES, len_bytes: WORD_BYTES }
}

/// Return the banner's number.
pub(super) const fn sequence<M>(banner: &M) -> Part<'_, M> {
    Part { memory: banner, at: 2 * WORD_BYTES, len_bytes: WORD_BYTES }
}

/// Return the banner.
pub(super) const fn banner<M>(banner: &M) -> Part<'_, M> {
    Part { memory: banner, at: 0, len_bytes: BANNER_BYTES }
}

/// Value of the given-up word of a rank that has given up.
pub(super) const GIVEN_UP: u32 = 1;

/// How far ahead a counter is set to end all waits for it: as far as wrapping numbers allow.
pub(super) const FAR_AHEAD: u32 = 1 << 30;
