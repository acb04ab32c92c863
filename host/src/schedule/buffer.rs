//! Where a schedule's elements are: three buffers at every rank, and what moves between them.
//!
//! A buffer's name says in which *form* its elements are, so that a schedule never has to say it twice:
//! - [`Buffer::Input`]: the rank's own contribution, in the operation's type. Never written.
//! - [`Buffer::Work`]: partial values, in the accumulator's type (16-bit floats are 32-bit here). The executor's.
//! - [`Buffer::Output`]: finished elements, in the operation's type: what moves in is rounded, once.
//!
//! Elements travel in the form of the buffer that they are sent from. A schedule that only moves elements rounds
//! nothing; its three forms are the same bytes.
//!
//! Two buffers may lie in the same memory ([`Layout`]): the caller's where the collective runs in place, and `Work`
//! in `Output` where the accumulator has the operation's type, so that an all-reduce needs no second copy of its
//! data. Invariant, proved by [`super::check`]: a schedule reads an element only through the name through which it
//! was last written, so what a schedule computes does not depend on which buffers share memory.

use super::Span;
use sumac_hal::ids::Rank;

/// One of a rank's three buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Buffer {
    /// The rank's own contribution.
    Input,
    /// Partial values.
    Work,
    /// Finished elements.
    Output,
}

impl Buffer {
    /// Return these elements of the buffer.
    pub const fn at(self, span: Span) -> Region {
        Region { buffer: self, span }
    }
}

/// A run of elements of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    /// The buffer.
    pub buffer: Buffer,
    /// Its elements.
    pub span: Span,
}

/// How long a rank's buffers are, in elements, and which may share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Layout {
    /// The rank's contribution.
    pub input: usize,
    /// The rank's result.
    pub output: usize,
    /// Room for partial values.
    pub work: usize,
    /// `Work` may start where `Output` starts, if their elements have one size; then it is no longer than `Output`.
    pub work_in_output: bool,
    /// The collective can run in place: of `Input` and `Output`, the shorter lies in the longer from this element on.
    pub in_place_at: Option<usize>,
}

impl Layout {
    /// The layout of an all-reduce that works in its result: `count` elements in, as many out.
    pub const fn all_reduce(count: usize) -> Self {
        Self { input: count, output: count, work: count, work_in_output: true, in_place_at: Some(0) }
    }

    /// A layout without `Work`.
    pub const fn moves(input: usize, output: usize, in_place_at: Option<usize>) -> Self {
        Self { input, output, work: 0, work_in_output: false, in_place_at }
    }

    /// Return a buffer's length.
    pub const fn len(&self, buffer: Buffer) -> usize {
        match buffer {
            Buffer::Input => self.input,
            Buffer::Work => self.work,
            Buffer::Output => self.output,
        }
    }
}

/// The side of the operator on which an operand stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// `received op own`.
    Left,
    /// `own op received`.
    Right,
}

/// With what elements combine when they land.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operand {
    /// The other operand, as long as what lands: the same elements as where it lands, or none of them.
    pub own: Region,
    /// The side of what lands, which together with the steps fixes the whole expression.
    ///
    /// The operators of `sumac_hal::reduce` commute to the bit, so an executor of these may put it on either; an
    /// operator that does not commute must not.
    pub received: Side,
}

/// What becomes of elements that arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Landing {
    /// Where they, or the combination, go. Whatever goes to `Output` is rounded there.
    pub to: Region,
    /// With what they combine; `None`: they overwrite.
    pub with: Option<Operand>,
}

impl Landing {
    /// Overwrite `to`.
    pub const fn copy(to: Region) -> Self {
        Self { to, with: None }
    }

    /// Put `own` combined with what arrives, which is its `received` operand, into `to`.
    pub const fn combine(own: Region, received: Side, to: Region) -> Self {
        Self { to, with: Some(Operand { own, received }) }
    }
}

/// A message out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Send {
    /// The receiver.
    pub peer: Rank,
    /// The elements.
    pub from: Region,
}

/// A message in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Recv {
    /// The sender.
    pub peer: Rank,
    /// From which of its buffers the sender sends: the form in which the elements travel.
    pub sent_from: Buffer,
    /// What becomes of them; as many elements as are sent.
    pub landing: Landing,
}

/// A move within the rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Local {
    /// The elements; they stay where they are.
    pub from: Region,
    /// What becomes of them: like something received from oneself.
    pub landing: Landing,
}

impl Local {
    /// Copy elements from one buffer to another, and to its form.
    pub const fn copy(from: Region, to: Region) -> Self {
        Self { from, landing: Landing::copy(to) }
    }
}
