//! The three buffers of each rank, and moves between them.
//!
//! The buffer determines the *form* of its elements, so that a schedule never has to state it:
//! - [`Buffer::Input`]: the rank's own contribution, in the operation's type. Never written.
//! - [`Buffer::Work`]: partial values, in the accumulator's type (16-bit floats are 32-bit here). The executor's.
//! - [`Buffer::Output`]: finished elements, in the operation's type: what moves in is rounded, once.
//!
//! Elements travel in the form of the buffer that they are sent from. A schedule that only moves elements rounds
//! nothing; its three forms are the same bytes.
//!
//! Two buffers may share memory ([`Layout`]): the caller's if the collective runs in place, and `Work` with `Output` if
//! the accumulator has the operation's type, so that an all-reduce needs no second copy of its data. Invariant, proved
//! by [`super::check`]: a schedule reads an element only through the buffer through which it was last written, so its
//! result does not depend on which buffers share memory.

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

/// Lengths of a rank's buffers in elements, and which may share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Layout {
    /// The rank's contribution.
    pub input: usize,
    /// The rank's result.
    pub output: usize,
    /// Room for partial values.
    pub work: usize,
    /// `Work` may start where `Output` starts, if their elements have the same size; it is then no longer than
    /// `Output`.
    pub work_in_output: bool,
    /// Set if the collective can run in place: the shorter of `Input` and `Output` lies in the longer from this element
    /// on.
    pub in_place_at: Option<usize>,
}

impl Layout {
    /// The layout of an all-reduce that works in its result: `count` elements in and out.
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

/// The operand that landing elements combine with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operand {
    /// The other operand, as long as what lands: either the same elements as the destination, or disjoint from it.
    pub own: Region,
    /// The side of the landing elements, which together with the steps determines the whole expression.
    ///
    /// The operators of `sumac_hal::reduce` commute bit for bit, so their executor may use either side; for an operator
    /// that does not commute it must not.
    pub received: Side,
}

/// Processing of arriving elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Landing {
    /// Destination of the elements or their combination. Whatever goes to `Output` is rounded there.
    pub to: Region,
    /// The operand; `None`: they overwrite the destination.
    pub with: Option<Operand>,
}

impl Landing {
    /// Overwrite `to`.
    pub const fn copy(to: Region) -> Self {
        Self { to, with: None }
    }

    /// Store `own` combined with what arrives, which is the `received` operand, in `to`.
    pub const fn combine(own: Region, received: Side, to: Region) -> Self {
        Self { to, with: Some(Operand { own, received }) }
    }
}

/// An outgoing message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Send {
    /// The receiver.
    pub peer: Rank,
    /// The elements.
    pub from: Region,
}

/// An incoming message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Recv {
    /// The sender.
    pub peer: Rank,
    /// The buffer that the sender sends from: the form in which the elements travel.
    pub sent_from: Buffer,
    /// How they land; as many elements as are sent.
    pub landing: Landing,
}

/// A move within the rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Local {
    /// The elements; they stay where they are.
    pub from: Region,
    /// How they land, as if received from oneself.
    pub landing: Landing,
}

impl Local {
    /// Copy elements from one buffer to another, converting them to its form.
    pub const fn copy(from: Region, to: Region) -> Self {
        Self { from, landing: Landing::copy(to) }
    }
}
