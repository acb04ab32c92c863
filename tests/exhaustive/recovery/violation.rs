//! Kinds of violations of a recovery, and rules that a search breaks on purpose.

use sumac::harness::Flaw;

/// A kind of violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ViolationKind {
    /// An operation returned or restarts with wrong contents of its buffer.
    Result,
    /// An operation failed, and a chunk of its buffer differs from what the error reports.
    Chunks,
    /// Data is lost although every rank that held it is alive.
    Unrecoverable,
    /// Ranks run different plans, commit different outcomes, or continue on different paths.
    Disagreement,
    /// An operation fails at one rank but has returned at another.
    Contradiction,
    /// A live rank is reported as dead.
    Named,
    /// A rank is excluded without a cause.
    End,
    /// The end is no longer reachable.
    Stuck,
    /// A message considered inert has an effect.
    Revived,
    /// Production code panicked.
    Panicked,
}

/// Rules that a search breaks on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Rules {
    /// Ranks do not retain data of returned operations (PROTOCOL 5).
    pub(super) keeps_nothing: bool,
    /// Endpoints are not frozen: packets in flight still arrive (PROTOCOL 6).
    pub(super) unfenced: bool,
    /// Chunks that landed in an attempt do not count as held in the next one and are summed again (PROTOCOL 8).
    pub(super) forgets_landed: bool,
    /// Operations return when their rank has completed its plan, not when all ranks have (PROTOCOL 8).
    pub(super) returns_early: bool,
    /// One of the rules of the view change.
    pub(super) view: Option<Flaw>,
}
