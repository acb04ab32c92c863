//! The words by which ranks tell each other how far they are.
//!
//! A page has four words for each rank, which that rank writes: how far it is; what it took part in, and whether it has
//! given up, both at the end of an operation; one is free. A rank's banner has the second and third, from where its
//! stream copies them into all pages: the given-up word is the host's alone, so that what was handed over before a
//! rank gave up can't say that all is well.

use crate::gpu::Part;

/// The bytes of a rank's words.
pub(super) const ENTRY_BYTES: usize = 16;

/// The bytes of a banner.
pub(super) const BANNER_BYTES: usize = 8;

const WORD_BYTES: usize = 4;

/// Return a rank's counter in a page.
pub(super) const fn counter<M>(page: &M, of: usize) -> Part<'_, M> {
    Part { memory: page, at: of * ENTRY_BYTES, len_bytes: WORD_BYTES }
}

/// Return what a rank says at the end.
pub(super) const fn verdict<M>(page: &M, of: usize) -> Part<'_, M> {
    Part { memory: page, at: of * ENTRY_BYTES + WORD_BYTES, len_bytes: BANNER_BYTES }
}

/// Return the whole page.
pub(super) const fn whole<M>(page: &M, ranks: usize) -> Part<'_, M> {
    Part { memory: page, at: 0, len_bytes: ranks * ENTRY_BYTES }
}

/// Return the banner's word for what its rank takes part in.
pub(super) const fn signature<M>(banner: &M) -> Part<'_, M> {
    Part { memory: banner, at: 0, len_bytes: WORD_BYTES }
}

/// Return the banner's word for having given up.
pub(super) const fn given_up<M>(banner: &M) -> Part<'_, M> {
    Part { memory: banner, at: WORD_BYTES, len_bytes: WORD_BYTES }
}

/// Return the banner.
pub(super) const fn banner<M>(banner: &M) -> Part<'_, M> {
    Part { memory: banner, at: 0, len_bytes: BANNER_BYTES }
}

/// What a rank that has given up says.
pub(super) const GIVEN_UP: u32 = 1;

/// How far ahead a counter is set so that no wait for it goes on: as far as numbers that go round allow.
pub(super) const FAR_AHEAD: u32 = 1 << 30;
