//! A GPU's copy engine that reduces on the way, as one more DMA engine.
//!
//! [`GpuEngine`] takes chains over memory of the GPU like any other [`Engine`]: copies, reductions in the element type
//! ([`Profile::InlineReduce`]) and publications. Chains run one after the other on a stream of their own, so steps take
//! effect in order; regions are checked when a chain is submitted, and kept until it is done.
//!
//! Which types go with which operators is no rectangle in hardware, and [`Capabilities`] are one: so an engine has
//! either sums of eight types or six operators of four ([`Family`]). Sums of narrow floats round at every step;
//! whether f32 keeps subnormals is the hardware's affair, so a declared order of f32 sums is not for it.
//!
//! An abort marks chains; what is in the stream runs out, which takes as long as what was submitted.

use super::error::GpuError;
use super::{Gpu, Part};
use std::collections::VecDeque;
use sumac_hal::dma::{
    Address, Capabilities, Chain, Completion, DtypeSet, Engine, OpSet, Profile, RegionKey, Scope, Status, Step,
    SubmitError, Tag,
};
use sumac_hal::op::{Dtype, ReduceOp};

/// A GPU whose copy engine reduces on the way.
pub trait Bulk: Gpu {
    /// Check that the hardware has it.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] if not.
    fn check_bulk(&self) -> Result<(), GpuError>;

    /// Do `to = to op from`, element by element in the element type; addresses and lengths are multiples of 16.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] for other types and operators than those of [`bulk_instruction`]; the driver's words.
    fn bulk_reduce(
        &self,
        on: &Self::Stream,
        types: (Dtype, ReduceOp),
        to: Part<'_, Self::Memory>,
        from: Part<'_, Self::Memory>,
    ) -> Result<(), GpuError>;

    /// Write two words, the second before the first.
    ///
    /// # Errors
    /// The driver's words.
    fn publish(&self, on: &Self::Stream, to: Part<'_, Self::Memory>, words: [u64; 2]) -> Result<(), GpuError>;
}

/// Return what stands behind `cp.reduce.async.bulk.global.shared::cta.bulk_group` in PTX; `None` if it has nothing of
/// the kind, or nothing that means the same. Minima and maxima of floats are not IEEE's there.
pub const fn bulk_instruction(dtype: Dtype, op: ReduceOp) -> Option<&'static str> {
    use Dtype::{Bf16, F16, F32, F64, I32, I64, U32, U64};
    Some(match (op, dtype) {
        // Signed sums have the bits of unsigned ones.
        (ReduceOp::Sum, I32 | U32) => "add.u32",
        (ReduceOp::Sum, I64 | U64) => "add.u64",
        (ReduceOp::Sum, F16) => "add.noftz.f16",
        (ReduceOp::Sum, Bf16) => "add.noftz.bf16",
        (ReduceOp::Sum, F32) => "add.f32",
        (ReduceOp::Sum, F64) => "add.f64",
        (ReduceOp::Min, I32) => "min.s32",
        (ReduceOp::Min, U32) => "min.u32",
        (ReduceOp::Min, I64) => "min.s64",
        (ReduceOp::Min, U64) => "min.u64",
        (ReduceOp::Max, I32) => "max.s32",
        (ReduceOp::Max, U32) => "max.u32",
        (ReduceOp::Max, I64) => "max.s64",
        (ReduceOp::Max, U64) => "max.u64",
        (ReduceOp::Band, I32 | U32) => "and.b32",
        (ReduceOp::Band, I64 | U64) => "and.b64",
        (ReduceOp::Bor, I32 | U32) => "or.b32",
        (ReduceOp::Bor, I64 | U64) => "or.b64",
        (ReduceOp::Bxor, I32 | U32) => "xor.b32",
        (ReduceOp::Bxor, I64 | U64) => "xor.b64",
        _ => return None,
    })
}

/// Which types and operators an engine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Sums of i32, u32, i64, u64, f16, bf16, f32 and f64.
    Sums,
    /// Sum, min, max, and, or and exclusive or of i32, u32, i64 and u64.
    Integers,
}

impl Family {
    const fn sets(self) -> (DtypeSet, OpSet) {
        use Dtype::{Bf16, F16, F32, F64, I32, I64, U32, U64};
        use ReduceOp::{Band, Bor, Bxor, Max, Min, Sum};
        match self {
            Self::Sums => (DtypeSet::of(&[I32, U32, I64, U64, F16, Bf16, F32, F64]), OpSet::of(&[Sum])),
            Self::Integers => (DtypeSet::of(&[I32, U32, I64, U64]), OpSet::of(&[Sum, Min, Max, Band, Bor, Bxor])),
        }
    }
}

/// The copy engine of a GPU, as a DMA engine over regions of its memory. See the head of this file's module.
pub struct GpuEngine<G: Bulk> {
    gpu: G,
    stream: G::Stream,
    capabilities: Capabilities,
    /// By index: the generation of what is or was there, and the memory.
    regions: Vec<(u32, Option<G::Memory>)>,
    flights: VecDeque<Flight<G>>,
    queued_steps: usize,
    is_stopped: bool,
}

/// A chain that was taken.
struct Flight<G: Gpu> {
    tag: Tag,
    scope: Scope,
    steps: usize,
    /// How it ends, if nothing comes in between.
    end: (Status, usize),
    done: G::Event,
    _held: Vec<G::Memory>,
}

impl<G: Bulk> GpuEngine<G> {
    /// Set up an engine on a GPU of its own handle.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] if the hardware has none; the driver's words.
    pub fn new(gpu: G, family: Family) -> Result<Self, GpuError> {
        gpu.check_bulk()?;
        let stream = gpu.stream()?;
        let mut capabilities = Capabilities::new(Profile::InlineReduce, STEPS_MAX, QUEUE_DEPTH).with_alignment(16);
        (capabilities.dtypes, capabilities.ops) = family.sets();
        let (regions, flights) = (Vec::new(), VecDeque::new());
        Ok(Self { gpu, stream, capabilities, regions, flights, queued_steps: 0, is_stopped: false })
    }

    /// Return the GPU.
    pub const fn gpu(&self) -> &G {
        &self.gpu
    }

    /// Let chains name memory; `None` if there are as many regions as keys.
    pub fn register(&mut self, memory: G::Memory) -> Option<RegionKey> {
        let free = self.regions.iter().position(|(generation, memory)| memory.is_none() && *generation < u32::MAX);
        let at = free.unwrap_or(self.regions.len());
        let index = u16::try_from(at).ok()?;
        if at == self.regions.len() {
            self.regions.push((0, None));
        }
        let region = &mut self.regions[at];
        *region = (region.0 + 1, Some(memory));
        Some(RegionKey { index, generation: region.0 })
    }

    /// Let chains name it no longer; those that were submitted keep it. False if the key names nothing.
    pub fn deregister(&mut self, key: RegionKey) -> bool {
        match self.regions.get_mut(usize::from(key.index)) {
            Some((generation, memory)) if *generation == key.generation && memory.is_some() => {
                *memory = None;
                true
            }
            _ => false,
        }
    }

    /// Find `len_bytes` bytes of a region.
    fn find(&self, address: Address, len_bytes: u64) -> Result<G::Memory, Status> {
        let (generation, memory) = self.regions.get(usize::from(address.region.index)).ok_or(Status::BadRegion)?;
        let memory = match memory {
            Some(memory) if *generation == address.region.generation => memory,
            _ if address.region.generation == 0 || address.region.generation > *generation => {
                return Err(Status::BadRegion);
            }
            _ => return Err(Status::StaleRegion),
        };
        let range = self.gpu.addresses(memory);
        let end = address.offset_bytes.checked_add(len_bytes).filter(|&end| end <= range.end - range.start);
        end.ok_or(Status::OutOfBounds)?;
        Ok(self.gpu.part(memory, address.offset_bytes as usize, len_bytes as usize))
    }

    /// Hand one step to the stream; `held` gets what it touches.
    fn hand(&self, step: &Step, held: &mut Vec<G::Memory>) -> Result<(), Status> {
        self.capabilities.check(step)?;
        let (len, to) = (step.dst_len_bytes(), self.find(step.dst(), step.dst_len_bytes())?);
        let from = step.src().map(|address| self.find(address, step.src_len_bytes())).transpose()?;
        if !len.is_multiple_of(16) || self.gpu.addresses(&to).start % 16 != 0 {
            return Err(Status::Misaligned);
        }
        let whole = |memory| Part { memory, at: 0, len_bytes: len as usize };
        let handed = match (step, &from) {
            // A stream has no instruction for checksums.
            (Step::Publish { covers, .. }, _) if !covers.is_nothing() => return Err(Status::Unsupported),
            (Step::Publish { words, .. }, _) => self.gpu.publish(&self.stream, whole(&to), *words),
            (_, Some(from)) => {
                let (a, b) = (self.gpu.addresses(&to), self.gpu.addresses(from));
                if a.start < b.end && b.start < a.end {
                    return Err(Status::Overlap);
                }
                match *step {
                    Step::Copy { .. } => self.gpu.copy(&self.stream, whole(&to), whole(from)),
                    Step::Reduce { op, source, .. } => {
                        self.gpu.bulk_reduce(&self.stream, (source, op), whole(&to), whole(from))
                    }
                    _ => return Err(Status::Unsupported),
                }
            }
            _ => return Err(Status::Unsupported),
        };
        held.extend([Some(to), from].into_iter().flatten());
        handed.map_err(|_| Status::Hardware)
    }

    /// Take a chain whose length is right.
    fn take(&mut self, chain: &Chain<'_>) -> Result<(), GpuError> {
        let mut held = Vec::new();
        let failed = chain
            .steps
            .iter()
            .enumerate()
            .find_map(|(index, step)| self.hand(step, &mut held).err().map(|status| (status, index)));
        let done = self.gpu.event()?;
        self.gpu.record(&done, &self.stream)?;
        let (steps, end) = (chain.steps.len(), failed.unwrap_or((Status::Done, chain.steps.len())));
        self.flights.push_back(Flight { tag: chain.tag, scope: chain.scope, steps, end, done, _held: held });
        self.queued_steps += steps;
        Ok(())
    }
}

impl<G: Bulk> Engine for GpuEngine<G> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        let steps = chain.steps.len();
        if steps == 0 || steps > STEPS_MAX as usize {
            return Err(SubmitError::Length { steps, max: STEPS_MAX });
        }
        if self.is_stopped {
            return Err(SubmitError::Stopped);
        }
        if self.queued_steps + steps > QUEUE_DEPTH as usize {
            return Err(SubmitError::Full { depth: QUEUE_DEPTH });
        }
        self.take(&chain).map_err(|_| {
            self.is_stopped = true;
            SubmitError::Stopped
        })
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let mut count = 0;
        while let (Some(place), Some(flight)) = (completions.get_mut(count), self.flights.front()) {
            let (status, step) = match self.gpu.is_done(&flight.done) {
                Ok(false) => break,
                Ok(true) => flight.end,
                // The context is gone: nothing of it runs any more.
                Err(_) => {
                    self.is_stopped = true;
                    (Status::Hardware, 0)
                }
            };
            *place = Completion { tag: flight.tag, status, step: step as u16 };
            self.queued_steps -= flight.steps;
            self.flights.pop_front();
            count += 1;
        }
        count
    }

    fn abort(&mut self, scope: Scope) {
        for flight in self.flights.iter_mut().filter(|flight| flight.scope == scope && flight.end.0 == Status::Done) {
            flight.end = (Status::Aborted, 0);
        }
    }
}

/// The most steps of a chain.
const STEPS_MAX: u32 = 64;

/// The most steps on their way.
const QUEUE_DEPTH: u32 = 1024;

#[cfg(test)]
mod tests;
