//! Kinds of violations of a recovery, and rules that a search breaks on purpose.

use sumac::harness::Flaw;

/// What was wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ViolationKind {
    /// An operation returned, or begins again, and its buffer is not what it has to be.
    Result,
    /// An operation failed, and a chunk of its buffer is not what the error says of it.
    Chunks,
    /// Data is lost though no rank that held it is dead.
    Unrepairable,
    /// Ranks do different plans, have committed different ones, or are on different ways afterwards.
    Disagreement,
    /// An operation fails at one rank that has returned at another.
    Contradiction,
    /// A live rank is reported as dead.
    Named,
    /// A rank ends without a cause.
    End,
    /// The end is no longer reachable.
    Stuck,
    /// A message considered inert has an effect.
    Revived,
    /// Production code panicked.
    Panicked,
}

/// Rules that are broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Rules {
    /// Ranks keep nothing of what has returned (PROTOCOL 5).
    pub(super) keeps_nothing: bool,
    /// Nothing is frozen: what was on its way still arrives (PROTOCOL 6).
    pub(super) unfenced: bool,
    /// What an attempt has landed does not count as held in the next: it is added up again (PROTOCOL 8).
    pub(super) forgets_landed: bool,
    /// Operations return when their rank has done its plan, not when all have (PROTOCOL 8).
    pub(super) returns_early: bool,
    /// One of the rules of the view change.
    pub(super) view: Option<Flaw>,
}
