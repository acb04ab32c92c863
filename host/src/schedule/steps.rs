//! Parts of a schedule: places, spans of elements, and steps, which are stored or computed one at a time.
//!
//! All lengths are in elements; bytes matter only where a type is known (the executor, the cost model). Invariant: a
//! [`Place`] always lies inside its communicator, so that index arithmetic needs no checks. A step is a function of its
//! index alone: it can be read in any order, as often as wanted, with no other step in memory.

use super::buffer::{Buffer, Layout, Local, Recv, Send};
use super::server_step::ServerStep;
use std::fmt;
use std::sync::Arc;
use sumac_hal::ids::Rank;
use thiserror::Error;

/// One rank's place in a communicator: `rank < ranks`, `ranks >= 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    rank: u32,
    ranks: u32,
}

impl Place {
    /// Return the place of rank `rank` among `ranks`.
    ///
    /// # Errors
    /// [`PlaceError`] if `rank` is not below `ranks`.
    pub const fn new(rank: Rank, ranks: u32) -> Result<Self, PlaceError> {
        if rank.0 < ranks { Ok(Self { rank: rank.0, ranks }) } else { Err(PlaceError { rank: rank.0, ranks }) }
    }

    /// Return every place of a communicator, in rank order.
    pub fn all(ranks: u32) -> impl Iterator<Item = Self> {
        (0..ranks).map(move |rank| Self { rank, ranks })
    }

    /// Return the rank.
    pub const fn rank(self) -> Rank {
        Rank(self.rank)
    }

    /// Return the number of ranks.
    pub const fn ranks(self) -> u32 {
        self.ranks
    }

    /// Return the place among the ranks of its row of `each` ranks, at least one.
    pub(super) const fn in_row(self, each: u32) -> Self {
        Self { rank: self.rank % each, ranks: each }
    }

    /// Return the rank `distance` places after this one, modulo the number of ranks.
    pub(crate) const fn after(self, distance: u32) -> Rank {
        Rank(((self.rank as u64 + distance as u64) % self.ranks as u64) as u32)
    }

    /// Return the rank `distance` places before this one, modulo the number of ranks.
    pub(crate) const fn before(self, distance: u32) -> Rank {
        self.after(self.ranks - distance % self.ranks)
    }
}

/// A rank outside its communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("rank {rank} is not in a communicator of {ranks} ranks; ranks count from 0")]
pub struct PlaceError {
    /// The rank.
    pub rank: u32,
    /// The size of the communicator.
    pub ranks: u32,
}

/// A run of elements; it may be empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Span {
    /// The first element.
    pub start: usize,
    /// The number of elements.
    pub len: usize,
}

impl Span {
    /// No elements: a message that only signals presence.
    pub const EMPTY: Self = Self { start: 0, len: 0 };

    /// Return blocks `first..last` of `count` elements divided into `blocks` blocks.
    ///
    /// Block b starts at `floor(b * count / blocks)`. So any run of m blocks is within one element of `m * count /
    /// blocks`, any count can be divided (0, 1, fewer elements than blocks), and a run of blocks is a span.
    pub(crate) fn of_blocks(count: usize, blocks: u32, first: u32, last: u32) -> Self {
        let (each, rest) = (count / blocks as usize, (count % blocks as usize) as u64);
        // rest < blocks < 2^32: the product fits.
        let start_of = |block: u32| block as usize * each + (u64::from(block) * rest / u64::from(blocks)) as usize;
        Self { start: start_of(first), len: start_of(last) - start_of(first) }
    }

    /// Return block `index` of `blocks`; see [`Self::of_blocks`].
    pub(crate) fn of_block(count: usize, blocks: u32, index: u32) -> Self {
        Self::of_blocks(count, blocks, index, index + 1)
    }

    /// Return the first `len` elements.
    pub const fn first(len: usize) -> Self {
        Self { start: 0, len }
    }

    /// Return the element after the last.
    pub const fn end(self) -> usize {
        self.start + self.len
    }
}

/// A step: its local moves run first, in order; then its messages, concurrently, in any order between peers and in this
/// order for each peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Step<'a> {
    /// Moves within the rank.
    pub locals: &'a [Local],
    /// Messages sent. Their values are those from before the step's messages.
    pub sends: &'a [Send],
    /// Messages received.
    pub recvs: &'a [Recv],
}

impl Step<'_> {
    /// Return whether the step sends or receives.
    pub const fn has_messages(&self) -> bool {
        !(self.sends.is_empty() && self.recvs.is_empty())
    }
}

/// Room for one step, which is used again for the next one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepBuffer {
    /// Moves within the rank.
    pub locals: Vec<Local>,
    /// Messages sent.
    pub sends: Vec<Send>,
    /// Messages received.
    pub recvs: Vec<Recv>,
}

impl StepBuffer {
    /// Return the step that it holds.
    pub fn step(&self) -> Step<'_> {
        Step { locals: &self.locals, sends: &self.sends, recvs: &self.recvs }
    }

    /// Empty it; its room stays.
    pub fn clear(&mut self) {
        self.locals.clear();
        self.sends.clear();
        self.recvs.clear();
    }

    /// Append a message in each direction.
    pub(super) fn exchange(&mut self, send: Send, recv: Recv) {
        self.sends.push(send);
        self.recvs.push(recv);
    }

    fn append(&mut self, step: Step<'_>) {
        self.locals.extend_from_slice(step.locals);
        self.sends.extend_from_slice(step.sends);
        self.recvs.extend_from_slice(step.recvs);
    }
}

/// One rank's part of a collective: steps that run in order.
///
/// Step k of one rank is unrelated to step k of another: messages match by their order between two ranks. Empty spans
/// are sent as messages without payload: they let ranks detect mismatched calls, and keep a rank from returning before
/// all others have entered.
///
/// A schedule is a header and *parts*, which follow one another. The steps of a part are either stored
/// ([`Self::push`]), or computed one at a time from their index ([`Self::compute`]). An algorithm whose steps grow with
/// the number of ranks computes them, so that a schedule takes as much memory over 16,384 ranks as over two. Users hold
/// the step that they are in, in a [`StepBuffer`], and no other.
#[derive(Clone)]
pub struct Schedule {
    place: Place,
    layout: Layout,
    reduces: bool,
    len: usize,
    parts: Vec<Part>,
    server_step: Option<ServerStep>,
}

/// Steps that follow one another.
#[derive(Clone)]
struct Part {
    /// The index of its first step in the schedule.
    first: usize,
    source: Source,
}

#[derive(Clone)]
enum Source {
    Stored(Stored),
    Computed(Arc<Compute>),
}

/// Appends the step of this index, counted from the part's first one, to an empty buffer.
type Compute = dyn Fn(usize, &mut StepBuffer) + std::marker::Send + Sync;

/// Stored steps, one behind the other.
#[derive(Debug, Clone, Default)]
struct Stored {
    all: StepBuffer,
    /// For each step, its end in these three lists.
    ends: Vec<Ends>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Ends {
    locals: usize,
    sends: usize,
    recvs: usize,
}

impl Stored {
    fn push(&mut self, step: Step<'_>) {
        self.all.append(step);
        let StepBuffer { locals, sends, recvs } = &self.all;
        self.ends.push(Ends { locals: locals.len(), sends: sends.len(), recvs: recvs.len() });
    }

    fn step(&self, index: usize) -> Step<'_> {
        let end = self.ends[index];
        let start = if index == 0 { Ends::default() } else { self.ends[index - 1] };
        Step {
            locals: &self.all.locals[start.locals..end.locals],
            sends: &self.all.sends[start.sends..end.sends],
            recvs: &self.all.recvs[start.recvs..end.recvs],
        }
    }
}

impl Schedule {
    /// Create an empty schedule that only moves elements.
    pub const fn moving(place: Place, layout: Layout) -> Self {
        Self::empty(place, layout, false)
    }

    /// Create an empty schedule that combines elements: it needs a kernel, and rounds finished values.
    pub const fn reducing(place: Place, layout: Layout) -> Self {
        Self::empty(place, layout, true)
    }

    const fn empty(place: Place, layout: Layout, reduces: bool) -> Self {
        Self { place, layout, reduces, len: 0, parts: Vec::new(), server_step: None }
    }

    /// Say that its messages are those of one step among the ranks of each server.
    #[must_use]
    pub(super) const fn in_servers(mut self, step: ServerStep) -> Self {
        self.server_step = Some(step);
        self
    }

    /// Return what it is among the ranks of each server, if its messages are those of one step there.
    pub const fn server_step(&self) -> Option<ServerStep> {
        self.server_step
    }

    /// Append a step.
    pub fn push(&mut self, step: Step<'_>) {
        if !matches!(self.parts.last(), Some(Part { source: Source::Stored(_), .. })) {
            self.parts.push(Part { first: self.len, source: Source::Stored(Stored::default()) });
        }
        if let Some(Part { source: Source::Stored(stored), .. }) = self.parts.last_mut() {
            stored.push(step);
            self.len += 1;
        }
    }

    /// Append `steps` steps: `step` appends that of an index, from 0 on, to an empty buffer whenever it is read.
    ///
    /// It must append the same each time. Read by the executor, it should allocate nothing beyond the buffer's room.
    pub fn compute(
        &mut self,
        steps: usize,
        step: impl Fn(usize, &mut StepBuffer) + std::marker::Send + Sync + 'static,
    ) {
        if steps > 0 {
            self.parts.push(Part { first: self.len, source: Source::Computed(Arc::new(step)) });
            self.len += steps;
        }
    }

    /// Append a step of messages.
    pub fn exchange(&mut self, sends: &[Send], recvs: &[Recv]) {
        self.push(Step { locals: &[], sends, recvs });
    }

    /// Append a step of local moves.
    pub fn move_locally(&mut self, locals: &[Local]) {
        self.push(Step { locals, ..Step::default() });
    }

    /// Store the computed steps too, as a schedule of few steps should be that runs many times.
    #[must_use]
    pub fn stored(self) -> Self {
        if self.parts.iter().all(|part| matches!(part.source, Source::Stored(_))) {
            return self;
        }
        let empty = Self::empty(self.place, self.layout, self.reduces);
        let mut stored = Self { server_step: self.server_step, ..empty };
        self.steps().for_each(|step| stored.push(step));
        stored
    }

    /// Return the rank whose part this is.
    pub const fn place(&self) -> Place {
        self.place
    }

    /// Return the lengths of this rank's buffers.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Set the length of `Work`, once the steps are known.
    pub(super) const fn set_work(&mut self, elements: usize) {
        self.layout.work = elements;
    }

    /// Return whether the collective combines elements, even if this rank (alone, or a leaf) combines none.
    pub const fn reduces(&self) -> bool {
        self.reduces
    }

    /// Return the number of steps.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Return whether it has no steps.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Read step `index` into a buffer, or empty it if there is none; returns whether there is.
    pub fn read(&self, index: usize, buffer: &mut StepBuffer) -> bool {
        buffer.clear();
        // The last part that begins at the step or before it; there are a few at most.
        let part = self.parts.iter().rfind(|part| part.first <= index).filter(|_| index < self.len);
        let Some(Part { first, source }) = part else { return false };
        match source {
            Source::Stored(stored) => buffer.append(stored.step(index - first)),
            Source::Computed(compute) => compute(index - first, buffer),
        }
        true
    }

    /// Return step `index`, if there is one, in a buffer.
    pub fn step<'b>(&self, index: usize, buffer: &'b mut StepBuffer) -> Option<Step<'b>> {
        self.read(index, buffer).then(|| buffer.step())
    }

    /// Return the steps in order, one at a time.
    pub const fn steps(&self) -> Steps<'_> {
        let buffer = StepBuffer { locals: Vec::new(), sends: Vec::new(), recvs: Vec::new() };
        Steps { schedule: self, next: 0, buffer }
    }

    /// Return the number of messages that this rank sends and receives, which takes a pass over its steps.
    pub fn messages(&self) -> usize {
        self.steps().map(|step| step.sends.len() + step.recvs.len()).sum()
    }

    /// Return the bytes that this rank sends, with elements of `element_bytes` and partial ones of `partial_bytes`;
    /// frame headers are not counted. It takes a pass over the steps.
    pub fn sent_bytes(&self, element_bytes: usize, partial_bytes: usize) -> u64 {
        let bytes = |send: &Send| match send.from.buffer {
            Buffer::Work => send.from.span.len as u64 * partial_bytes as u64,
            Buffer::Input | Buffer::Output => send.from.span.len as u64 * element_bytes as u64,
        };
        self.steps().map(|step| step.sends.iter().map(bytes).sum::<u64>()).sum()
    }
}

/// Schedules are equal if their steps are, stored or computed.
impl PartialEq for Schedule {
    fn eq(&self, other: &Self) -> bool {
        let header = |of: &Self| (of.place, of.layout, of.reduces, of.len, of.server_step);
        let (mut ours, mut theirs) = (self.steps(), other.steps());
        header(self) == header(other) && (0..self.len).all(|_| ours.next() == theirs.next())
    }
}

impl Eq for Schedule {}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, layout, reduces, len, .. } = self;
        let mut described = f.debug_struct("Schedule");
        described.field("place", place).field("layout", layout).field("reduces", reduces).field("len", len);
        described.finish_non_exhaustive()
    }
}

/// The steps of a schedule, each of which is there until the next one is asked for.
#[derive(Debug, Clone)]
pub struct Steps<'a> {
    schedule: &'a Schedule,
    next: usize,
    buffer: StepBuffer,
}

impl Steps<'_> {
    /// Return the next step, if there is one.
    #[allow(clippy::should_implement_trait, reason = "an iterator cannot lend what it holds")]
    pub fn next(&mut self) -> Option<Step<'_>> {
        let step = self.schedule.step(self.next, &mut self.buffer)?;
        self.next += 1;
        Some(step)
    }

    /// Call `each` for the steps that are left.
    pub fn for_each(mut self, mut each: impl FnMut(Step<'_>)) {
        while let Some(step) = self.next() {
            each(step);
        }
    }

    /// Return what `of` makes of the steps that are left.
    pub fn map<T>(mut self, mut of: impl FnMut(Step<'_>) -> T) -> impl Iterator<Item = T> {
        std::iter::from_fn(move || self.next().map(&mut of))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn place_requires_a_rank_below_ranks() {
        assert_eq!(Place::new(Rank(3), 3), Err(PlaceError { rank: 3, ranks: 3 }));
        assert!(Place::new(Rank(0), 0).is_err());
        let place = Place::new(Rank(1), 5).expect("inside");
        assert_eq!((place.after(4), place.before(2), place.before(5)), (Rank(0), Rank(4), Rank(1)));
    }

    /// A stored step, three computed ones, and another stored one.
    fn in_parts() -> Schedule {
        let mut schedule = Schedule::moving(Place { rank: 0, ranks: 9 }, Layout::default());
        let send = |rank: usize| Send { peer: Rank(rank as u32), from: Buffer::Input.at(Span::first(rank)) };
        schedule.exchange(&[send(1)], &[]);
        schedule.compute(0, |_, _| unreachable!("there is no step"));
        schedule.compute(3, move |index, step| step.sends.extend((0..=index).map(|_| send(2 + index))));
        schedule.exchange(&[send(5), send(5)], &[]);
        schedule
    }

    #[test]
    fn steps_of_all_parts_are_read_by_their_index() {
        let (schedule, mut room) = (in_parts(), StepBuffer::default());
        let mut peers = |index| {
            let step = schedule.step(index, &mut room)?;
            Some(step.sends.iter().map(|send| send.peer.0).collect::<Vec<_>>())
        };
        let expected = [vec![1], vec![2], vec![3, 3], vec![4, 4, 4], vec![5, 5]];
        for index in [4, 0, 3, 1, 2] {
            assert_eq!(peers(index).as_ref(), Some(&expected[index]));
        }
        assert_eq!(peers(5), None);
        assert!(!schedule.read(5, &mut room) && room == StepBuffer::default());
        let in_order = schedule.steps().map(|step| step.sends.len()).collect::<Vec<_>>();
        assert_eq!((in_order, schedule.len(), schedule.messages()), (vec![1, 1, 2, 3, 2], 5, 9));
        assert_eq!(schedule.sent_bytes(10, 0), 10 * (1 + 2 + 2 * 3 + 3 * 4 + 2 * 5));
    }

    #[test]
    fn stored_schedule_is_equal_and_other_steps_are_not() {
        let schedule = in_parts();
        assert_eq!(schedule.clone().stored(), schedule);
        assert_eq!(schedule.clone().stored().parts.len(), 1);
        let mut longer = schedule.clone();
        longer.exchange(&[], &[]);
        assert_ne!(longer, schedule);
        let mut other = Schedule::moving(schedule.place, schedule.layout);
        other.compute(5, |_, _| ());
        assert_ne!(other, schedule);
    }

    proptest! {
        #[test]
        fn blocks_tile_the_elements(count in 0_usize..10_000, blocks in 1_u32..200) {
            let mut end = 0;
            for index in 0..blocks {
                let block = Span::of_blocks(count, blocks, index, index + 1);
                prop_assert_eq!(block.start, end);
                prop_assert!(block.len.abs_diff(count / blocks as usize) <= 1);
                end = block.end();
            }
            prop_assert_eq!(end, count);
        }
    }
}
