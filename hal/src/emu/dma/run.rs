//! Running one chain: resolve its steps, and do them tile by tile where that changes nothing but the speed.
//!
//! Steps over equally many elements, between two publications, form a group. If no two of its spans overlap, apart
//! from spans that are one and the same, then element i of every step depends on element i of others only, and the
//! group may be done for a tile of elements at a time: the accumulators then stay where they are combined
//! ([`Workspace`]) while all sources stream by, and are written once. Otherwise, and always across a publication, steps are
//! done one after the other.
//!
//! What overlaps is told by what memory is a part of ([`Backing`]), not by its address: of a file that is registered twice
//! each byte has two.
//!
//! Invariant: every span was checked against its pinned region before any pointer into it is used, and a step's
//! source and destination are disjoint, except where results take the place of accumulators.

use super::map::{Map, Pin};
use crate::crc::Crc32c;
use crate::dma::kernels::{Action, Elements, KEPT_LEN_BYTES, Workspace};
use crate::dma::shared::covers_word;
use crate::dma::{Address, Backing, Capabilities, Covers, RegionKey, Status, Step};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Bytes of each copy that a tile covers, where there are only copies: a part of any L2 cache, and long enough that the cost
/// of a tile does not show and that prefetchers get going. Tests have many tiles of few bytes.
const COPY_TILE_LEN_BYTES: usize = if cfg!(test) { 96 } else { 64 << 10 };

/// A step whose addresses have been found good.
struct Resolved {
    work: Work,
    dst: Span,
}

enum Work {
    /// Two words, and what they cover.
    Publish([u64; 2], Option<Span>),
    Elements {
        action: Action,
        src: Span,
        count: usize,
    },
}

/// Consecutive elements, `size_bytes` each.
#[derive(Clone, Copy)]
struct Span {
    /// Where they are for this process: one of the addresses that they may have.
    base: *mut u8,
    /// What they are a part of.
    backing: Backing,
    size_bytes: usize,
    len_bytes: usize,
}

impl Span {
    fn is_same(&self, other: &Self) -> bool {
        (self.backing, self.size_bytes, self.len_bytes) == (other.backing, other.size_bytes, other.len_bytes)
    }

    /// Tell whether both are the same bytes, whatever the elements.
    fn has_bytes_of(&self, other: &Self) -> bool {
        (self.backing, self.len_bytes) == (other.backing, other.len_bytes)
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.backing.overlaps(self.len_bytes, &other.backing, other.len_bytes)
    }

    /// Return `count` elements from `first` on.
    fn cut(&self, first: usize, count: usize) -> Elements {
        Elements { base: self.base.wrapping_add(first * self.size_bytes), len_bytes: count * self.size_bytes }
    }
}

/// What runs chains, one after the other, without allocating.
pub(super) struct Runner<'a> {
    map: &'a Map,
    capabilities: Capabilities,
    /// Whether addresses must be multiples of their elements' sizes.
    strict: bool,
    /// Regions of the chain, each once: threads that pin the same ones pass their cache lines back and forth.
    pins: Vec<(RegionKey, Pin<'a>)>,
    steps: Vec<Resolved>,
    spans: Vec<(Span, bool)>,
    workspace: Box<Workspace>,
}

// SAFETY: pins and pointers are of the chain that runs, and nobody sends a runner away while it runs; what it borrows
// is shared by all threads of the engine anyway.
unsafe impl Send for Runner<'_> {}

impl<'a> Runner<'a> {
    pub(super) fn new(map: &'a Map, capabilities: Capabilities, strict: bool) -> Self {
        let steps = capabilities.max_steps as usize;
        Self {
            map,
            capabilities,
            strict,
            pins: Vec::with_capacity(2 * steps),
            steps: Vec::with_capacity(steps),
            spans: Vec::with_capacity(2 * steps),
            workspace: Box::new(Workspace::new()),
        }
    }

    /// Run a chain until it ends, fails or `aborted` says so; return how it ended, and at which step.
    pub(super) fn run(&mut self, chain: &[Step], aborted: impl Fn() -> bool) -> (Status, u16) {
        let mut ended = (Status::Done, chain.len());
        for (at, step) in chain.iter().enumerate() {
            match self.resolve(step) {
                Ok(resolved) => self.steps.push(resolved),
                Err(status) => {
                    // Those before it still take effect.
                    ended = (status, at);
                    break;
                }
            }
        }
        let (mut at, mut sum) = (0, None);
        while at < self.steps.len() {
            if aborted() {
                ended = (Status::Aborted, at);
                break;
            }
            if let Work::Publish(words, covered) = self.steps[at].work {
                publish(self.steps[at].dst, words, covered, sum.take());
                at += 1;
                continue;
            }
            let (end, tiled) = self.group(at);
            sum = self.summed(at, end);
            // SAFETY: the regions of all steps are pinned until this returns.
            if !unsafe { run_group(&mut self.workspace, &self.steps[at..end], tiled, &mut sum, &aborted) } {
                ended = (Status::Aborted, at);
                break;
            }
            at = end;
        }
        self.steps.clear();
        self.pins.clear();
        self.spans.clear();
        (ended.0, ended.1 as u16)
    }

    fn resolve(&mut self, step: &Step) -> Result<Resolved, Status> {
        self.capabilities.check(step)?;
        // A pair is aligned where its values are.
        let values = match step {
            Step::Reduce { op, .. } | Step::Store { op, .. } if op.is_located() => 2,
            _ => 1,
        };
        let unit = |len_bytes: u64, count: usize| (len_bytes as usize / count, len_bytes as usize / count / values);
        let (action, count) = match *step {
            Step::Copy { len_bytes, .. } => (Some(Action::Copy), len_bytes),
            Step::Load { source, accumulator, count, .. } => (Action::load(source, accumulator), count),
            Step::Reduce { op, source, accumulator, count, .. } => (Action::reduce(op, source, accumulator), count),
            Step::Store { op, output, count, ranks, .. } => (Action::store(op, output, ranks), count),
            Step::Publish { words, covers, .. } => {
                let dst = self.span(step.dst(), step.dst_len_bytes(), (8, 8))?;
                if !dst.base.addr().is_multiple_of(8) {
                    return Err(Status::Misaligned);
                }
                let covered = match covers.at(step.dst()) {
                    _ if covers.is_nothing() => None,
                    None => return Err(Status::OutOfBounds),
                    Some(at) => Some(self.span(at, covers.len_bytes.into(), (covers.len_bytes as usize, 1))?),
                };
                return Ok(Resolved { work: Work::Publish(words, covered), dst });
            }
        };
        let (action, count) = (action.ok_or(Status::Unsupported)?, count as usize);
        let src =
            self.span(step.src().ok_or(Status::Unsupported)?, step.src_len_bytes(), unit(step.src_len_bytes(), count))?;
        let dst = self.span(step.dst(), step.dst_len_bytes(), unit(step.dst_len_bytes(), count))?;
        let action = match action {
            Action::Store(kernel, ranks) if src.is_same(&dst) => Action::Finish(kernel, ranks),
            _ if src.overlaps(&dst) => return Err(Status::Overlap),
            action => action,
        };
        Ok(Resolved { work: Work::Elements { action, src, count }, dst })
    }

    /// Return where `len_bytes` bytes of elements are: of a size each, with values of another.
    fn span(
        &mut self,
        address: Address,
        len_bytes: u64,
        (size_bytes, value_bytes): (usize, usize),
    ) -> Result<Span, Status> {
        let known = self.pins.iter().position(|(region, _)| *region == address.region);
        let index = known.unwrap_or(self.pins.len());
        if known.is_none() {
            self.pins.push((address.region, self.map.pin(address.region)?));
        }
        let (base, backing) = self.pins[index].1.translate(address.offset_bytes, len_bytes)?;
        if self.strict && !base.addr().is_multiple_of(value_bytes) {
            return Err(Status::Misaligned);
        }
        Ok(Span { base, backing, size_bytes, len_bytes: len_bytes as usize })
    }

    /// Find the steps from `first` on that form a group; return its end, and whether it may be done by tiles.
    fn group(&mut self, first: usize) -> (usize, bool) {
        // Copies come in bytes: they join a group if they are whole elements of it.
        let elements = self.steps[first..].iter().map_while(|step| match step.work {
            Work::Publish(..) => None,
            Work::Elements { action, count, .. } => Some((!matches!(action, Action::Copy), count)),
        });
        let mut count = 0;
        for (counts, elements) in elements {
            if count == 0 || counts {
                count = elements;
            }
            if counts {
                break;
            }
        }
        let mut end = first;
        self.spans.clear();
        while let Some(Resolved { work: Work::Elements { action, src, count: own }, dst }) = self.steps.get_mut(end) {
            let copies = matches!(action, Action::Copy);
            if *own != count && !(copies && dst.len_bytes.is_multiple_of(count)) {
                break;
            }
            let sized = |span: &Span| Span { size_bytes: span.len_bytes / count, ..*span };
            let (new_src, new_dst) = (sized(src), sized(dst));
            if !note(&mut self.spans, new_src, false) || !note(&mut self.spans, new_dst, true) {
                break;
            }
            *own = count;
            (*src, *dst) = (new_src, new_dst);
            end += 1;
        }
        // A first step that fits no group of its own count is done alone.
        if end == first { (first + 1, false) } else { (end, end - first > 1) }
    }

    /// Return the step of a group that writes what the publication right behind it covers, if it writes exactly that: its
    /// checksum is taken as it is written, while it is in the nearest cache.
    fn summed(&self, first: usize, end: usize) -> Option<Sum> {
        let Some(Resolved { work: Work::Publish(_, Some(covered)), .. }) = self.steps.get(end) else { return None };
        let last = self.steps[first..end].iter().rposition(|step| step.dst.overlaps(covered))?;
        let is_whole = self.steps[first + last].dst.has_bytes_of(covered);
        is_whole.then(|| Sum { step: last, crc: Crc32c::new() })
    }
}

/// The checksum of what a step of a group writes.
struct Sum {
    step: usize,
    crc: Crc32c,
}

/// Note a span of a group. False if it overlaps another in a way that ties different elements together.
fn note(spans: &mut Vec<(Span, bool)>, span: Span, written: bool) -> bool {
    let mut known = None;
    for (index, (other, other_written)) in spans.iter().enumerate() {
        if other.is_same(&span) {
            known = Some(index);
        } else if (written || *other_written) && other.overlaps(&span) {
            // Also for a span that is known: so far it may only have been read, beside others.
            return false;
        }
    }
    match known {
        Some(index) => spans[index].1 |= written,
        None => spans.push((span, written)),
    }
    true
}

/// Do the steps of a group; false if it was aborted half-way.
///
/// # Safety
/// The steps' spans lie in memory that is pinned until this returns.
unsafe fn run_group(
    workspace: &mut Workspace,
    steps: &[Resolved],
    tiled: bool,
    sum: &mut Option<Sum>,
    aborted: &impl Fn() -> bool,
) -> bool {
    let Some(Resolved { work: Work::Elements { count, .. }, .. }) = steps.first() else { return true };
    let mut widest = 1;
    for step in steps {
        // A copy is in bytes, and those of one element may be many: it is none that has to fit.
        let Work::Elements { action, src, .. } = &step.work else { continue };
        if !matches!(action, Action::Copy) || tiled {
            widest = widest.max(step.dst.size_bytes).max(src.size_bytes);
        }
    }
    // Copies alone combine nothing: what they copy stays in the L2 cache from the first to the last.
    let is_copy = |step: &Resolved| matches!(step.work, Work::Elements { action: Action::Copy, .. });
    let tile_len_bytes = if steps.iter().all(is_copy) { COPY_TILE_LEN_BYTES } else { KEPT_LEN_BYTES };
    let tile = (tile_len_bytes / widest).max(1);
    // Alone, a step goes by tiles as well: it is element by element.
    for from in (0..*count).step_by(tile) {
        if from > 0 && aborted() {
            return false;
        }
        let elements = tile.min(count - from);
        let cut = |span: &Span| span.cut(from, elements);
        for (index, step) in steps.iter().enumerate() {
            let Work::Elements { action, src, .. } = &step.work else { continue };
            let is_kept = steps.get(index + 1).is_some_and(|next| {
                let reads = matches!(&next.work, Work::Elements { src, .. } if src.is_same(&step.dst));
                reads || next.dst.is_same(&step.dst)
            });
            let crc = sum.as_mut().filter(|sum| sum.step == index).map(|sum| &mut sum.crc);
            // SAFETY: both lie within spans that were checked against pinned memory, which is valid for reads and writes
            // of any thread whatever anybody else does (`DmaMemory`). What a step writes is disjoint from what others
            // touch unless that is the same (`note`, `resolve`). Peers can write there at the same time, whenever they like:
            // nothing here is a reference to it, each byte is read once, by assembler, and no value read is an index
            // or a length, so it is their own numbers that they spoil.
            unsafe { workspace.step(*action, elements, cut(&step.dst), cut(src), is_kept, crc) };
        }
        // SAFETY: as above.
        unsafe { workspace.flush() };
    }
    true
}

/// Write two words so that they come after all writes before, and before all behind; and before them what they cover.
/// `sum` is the checksum of that, if it was taken as it was written.
fn publish(dst: Span, words: [u64; 2], covered: Option<Span>, sum: Option<Sum>) {
    if let Some(covered) = covered {
        let third = match sum {
            Some(sum) => Covers::word_of(sum.crc.value(), covered.len_bytes),
            // SAFETY: the span was checked against pinned memory, and a chain's steps are done one after the other across a
            // publication. Who writes there meanwhile, against the rules, gets a checksum that does not fit.
            None => unsafe { covers_word(covered.base, covered.len_bytes) },
        };
        // SAFETY: a publication that covers bytes is 24 bytes long, checked and aligned as below.
        let to_third = unsafe { AtomicU64::from_ptr(dst.base.wrapping_add(16).cast()) };
        to_third.store(third.to_le(), Ordering::Release);
    }
    // SAFETY: the 16 bytes were checked against pinned memory and are 8-byte aligned.
    let (first, second) =
        unsafe { (AtomicU64::from_ptr(dst.base.cast()), AtomicU64::from_ptr(dst.base.wrapping_add(8).cast())) };
    second.store(words[1].to_le(), Ordering::Release);
    first.store(words[0].to_le(), Ordering::Release);
    // What follows in the chain overwrites what this told about.
    fence(Ordering::SeqCst);
}
