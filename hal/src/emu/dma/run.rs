//! Execution of one chain: resolve its steps, and run them tile by tile where the result is the same.
//!
//! Steps over equally many elements between two publications form a group. If its spans are pairwise disjoint or
//! identical, element i of each step depends only on element i of others. The group can then run on one tile of
//! elements at a time: the accumulators stay in the [`Workspace`] while the sources are read, and are written once.
//! Otherwise, and always across a publication, steps run one after the other.
//!
//! Overlaps are determined by the memory's [`Backing`], not by addresses: if a file is registered twice, each byte has
//! two addresses.
//!
//! Invariant: every span is checked against its pinned region before a pointer into it is used. A step's source and
//! destination are disjoint, or identical where results replace accumulators.

use super::map::{Map, Pin};
use crate::crc::Crc32c;
use crate::dma::kernels::{Action, Elements, WORKSPACE_LEN_BYTES, Workspace};
use crate::dma::shared::covers_word;
use crate::dma::{Address, Backing, Capabilities, Coverage, RegionKey, Status, Step};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The size of a tile of each copy, if a group has only copies, in bytes. It fits any L2 cache, and is long enough to
/// amortize the overhead of a tile and for prefetchers. Tests use small tiles to cover many of them.
const COPY_TILE_LEN_BYTES: usize = if cfg!(test) { 96 } else { 64 << 10 };

/// A step whose addresses have been checked and translated.
struct Resolved {
    work: Work,
    dst: Span,
}

enum Work {
    /// The two words, and the bytes that they cover.
    Publish([u64; 2], Option<Span>),
    Elements {
        action: Action,
        src: Span,
        count: usize,
    },
}

/// Contiguous elements of `size_bytes` each.
#[derive(Clone, Copy)]
struct Span {
    /// Their address in this process; there may be others.
    base: *mut u8,
    /// The memory that backs them.
    backing: Backing,
    size_bytes: usize,
    len_bytes: usize,
}

impl Span {
    fn is_same(&self, other: &Self) -> bool {
        (self.backing, self.size_bytes, self.len_bytes) == (other.backing, other.size_bytes, other.len_bytes)
    }

    /// Return whether both are the same bytes, regardless of the element size.
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

/// Runs chains, one after the other, without allocation.
pub(super) struct Runner<'a> {
    map: &'a Map,
    capabilities: Capabilities,
    /// Whether addresses must be aligned to their elements' values.
    strict: bool,
    /// The pinned regions of the chain. Each is pinned only once, to reduce contention between threads.
    pins: Vec<(RegionKey, Pin<'a>)>,
    steps: Vec<Resolved>,
    spans: Vec<(Span, bool)>,
    workspace: Box<Workspace>,
}

// SAFETY: pins and pointers exist only while a chain runs, and a runner is not moved between threads then. What it
// borrows is shared by all threads of the engine.
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

    /// Run a chain until it completes, fails, or `aborted` returns true. Returns its status and the index of the step
    /// that failed, or the number of steps.
    pub(super) fn run(&mut self, chain: &[Step], aborted: impl Fn() -> bool) -> (Status, u16) {
        let mut completed = (Status::Done, chain.len());
        for (at, step) in chain.iter().enumerate() {
            match self.resolve(step) {
                Ok(resolved) => self.steps.push(resolved),
                Err(status) => {
                    // Earlier steps still take effect.
                    completed = (status, at);
                    break;
                }
            }
        }
        let (mut at, mut sum) = (0, None);
        while at < self.steps.len() {
            if aborted() {
                completed = (Status::Aborted, at);
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
                completed = (Status::Aborted, at);
                break;
            }
            at = end;
        }
        self.steps.clear();
        self.pins.clear();
        self.spans.clear();
        (completed.0, completed.1 as u16)
    }

    fn resolve(&mut self, step: &Step) -> Result<Resolved, Status> {
        self.capabilities.check(step)?;
        // A pair only needs the alignment of its values.
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
                    _ if covers.is_empty() => None,
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

    /// Translate an address to a span of `len_bytes` bytes, with elements of `size_bytes` and values of `value_bytes`.
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

    /// Return the end of the group that starts at step `first`, and whether it may run tile by tile.
    fn group(&mut self, first: usize) -> (usize, bool) {
        // The length of a copy is in bytes: it can join a group if its length is a multiple of the number of elements.
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
        while let Some(Resolved { work: Work::Elements { action, src, count: step_count }, dst }) =
            self.steps.get_mut(end)
        {
            let copies = matches!(action, Action::Copy);
            if *step_count != count && !(copies && dst.len_bytes.is_multiple_of(count)) {
                break;
            }
            let sized = |span: &Span| Span { size_bytes: span.len_bytes / count, ..*span };
            let (new_src, new_dst) = (sized(src), sized(dst));
            if !add_span(&mut self.spans, new_src, false) || !add_span(&mut self.spans, new_dst, true) {
                break;
            }
            *step_count = count;
            (*src, *dst) = (new_src, new_dst);
            end += 1;
        }
        // A first step that cannot form a group runs alone.
        if end == first { (first + 1, false) } else { (end, end - first > 1) }
    }

    /// Return the step of a group that writes exactly what the next publication covers, if there is one. The checksum
    /// is then computed while the step writes the bytes, when they are in the nearest cache.
    fn summed(&self, first: usize, end: usize) -> Option<Checksum> {
        let Some(Resolved { work: Work::Publish(_, Some(covered)), .. }) = self.steps.get(end) else { return None };
        let last = self.steps[first..end].iter().rposition(|step| step.dst.overlaps(covered))?;
        let is_whole = self.steps[first + last].dst.has_bytes_of(covered);
        is_whole.then(|| Checksum { step: last, crc: Crc32c::new() })
    }
}

/// The checksum of the bytes that a step of a group writes.
struct Checksum {
    step: usize,
    crc: Crc32c,
}

/// Add a span to a group. Returns false if it overlaps another so that different elements would depend on each other.
fn add_span(spans: &mut Vec<(Span, bool)>, span: Span, written: bool) -> bool {
    let mut known = None;
    for (index, (other, other_written)) in spans.iter().enumerate() {
        if other.is_same(&span) {
            known = Some(index);
        } else if (written || *other_written) && other.overlaps(&span) {
            // Also checked for a known span: it may only have been read so far, together with overlapping ones.
            return false;
        }
    }
    match known {
        Some(index) => spans[index].1 |= written,
        None => spans.push((span, written)),
    }
    true
}

/// Run the steps of a group. Returns false if it was aborted half-way.
///
/// # Safety
/// The steps' spans must lie in memory that is pinned until this returns.
unsafe fn run_group(
    workspace: &mut Workspace,
    steps: &[Resolved],
    tiled: bool,
    sum: &mut Option<Checksum>,
    aborted: &impl Fn() -> bool,
) -> bool {
    let Some(Resolved { work: Work::Elements { count, .. }, .. }) = steps.first() else { return true };
    let mut widest = 1;
    for step in steps {
        // A single copy does not use the workspace, so its elements do not have to fit.
        let Work::Elements { action, src, .. } = &step.work else { continue };
        if !matches!(action, Action::Copy) || tiled {
            widest = widest.max(step.dst.size_bytes).max(src.size_bytes);
        }
    }
    // In a group of copies only, the bytes stay in the L2 cache from the first copy to the last.
    let is_copy = |step: &Resolved| matches!(step.work, Work::Elements { action: Action::Copy, .. });
    let tile_len_bytes = if steps.iter().all(is_copy) { COPY_TILE_LEN_BYTES } else { WORKSPACE_LEN_BYTES };
    let tile = (tile_len_bytes / widest).max(1);
    // A single step can also run tile by tile, because it works element by element.
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
            // SAFETY: both lie within spans that were checked against pinned memory, which is valid for reads and
            // writes from any thread, whatever peers do (`DmaMemory`). What a step writes is disjoint from, or
            // identical to, what other steps access (`add_span`, `resolve`). Peers can write there at any time: there
            // are no references to the memory, each byte is read once, by assembly, and no value is an index or a
            // length. So they only corrupt values.
            unsafe { workspace.step(*action, elements, cut(&step.dst), cut(src), is_kept, crc) };
        }
        // SAFETY: see above.
        unsafe { workspace.flush() };
    }
    true
}

/// Write the two words, preceded by the checksum of what they cover, after all earlier and before all later writes.
/// `sum` is the checksum if it was computed while the bytes were written.
fn publish(dst: Span, words: [u64; 2], covered: Option<Span>, sum: Option<Checksum>) {
    if let Some(covered) = covered {
        let third = match sum {
            Some(sum) => Coverage::checksum_word_of(sum.crc.value(), covered.len_bytes),
            // SAFETY: the span was checked against pinned memory, and steps run one after the other across a
            // publication. A peer that writes there meanwhile, against the rules, only makes the checksum wrong.
            None => unsafe { covers_word(covered.base, covered.len_bytes) },
        };
        // SAFETY: a publication that covers bytes is 24 bytes long; it is checked and aligned as below.
        let to_third = unsafe { AtomicU64::from_ptr(dst.base.wrapping_add(16).cast()) };
        to_third.store(third.to_le(), Ordering::Release);
    }
    // SAFETY: the 16 bytes were checked against pinned memory and are 8-byte aligned.
    let (first, second) =
        unsafe { (AtomicU64::from_ptr(dst.base.cast()), AtomicU64::from_ptr(dst.base.wrapping_add(8).cast())) };
    second.store(words[1].to_le(), Ordering::Release);
    first.store(words[0].to_le(), Ordering::Release);
    // Later steps of the chain overwrite the inputs of the published result.
    fence(Ordering::SeqCst);
}
