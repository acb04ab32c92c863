//! A GPU's reducing copy engine as a DMA engine.
//!
//! [`GpuEngine`] executes chains over GPU memory like any other [`Engine`]: copies, reductions in the element type
//! ([`Profile::InlineReduce`]) and publications. Chains run one after the other on one stream, so steps take effect in
//! order. Regions are checked on submission, and kept until the chain is complete.
//!
//! The hardware's combinations of types and operators are not a product of two sets, but [`Capabilities`] describe one.
//! An engine therefore offers either sums of eight types or six operators of four ([`Family`]). Sums of narrow floats
//! round at every step. An H100 keeps subnormals, which PTX does not promise for f32, and its NaNs differ from the
//! CPU's: all ones but the sign for f16, bf16 and f32, an operand's for f64. So it must not be used for a declared
//! order of f32 sums.
//!
//! An abort only marks chains; what is in the stream still executes, which takes as long as what was submitted.

use super::error::GpuError;
use super::{Gpu, Part};
use std::collections::VecDeque;
use sumac_hal::dma::{
    Address, Capabilities, Chain, Completion, DtypeSet, Engine, OpSet, Profile, RegionKey, Scope, Status, Step,
    SubmitError, Tag,
};
use sumac_hal::op::{Dtype, ReduceOp};

/// A GPU whose copy engine reduces.
pub trait Bulk: Gpu {
    /// Check that the hardware supports it.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] if not.
    fn check_bulk(&self) -> Result<(), GpuError>;

    /// Compute `to = to op from`, element by element in the element type. Addresses and lengths must be multiples of
    /// 16.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] for types and operators other than those of [`bulk_instruction`]; the driver's error.
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
    /// The driver's error.
    fn publish(&self, on: &Self::Stream, to: Part<'_, Self::Memory>, words: [u64; 2]) -> Result<(), GpuError>;
}

/// Return the suffix of `cp.reduce.async.bulk.global.shared::cta.bulk_group` in PTX; `None` if there is no equivalent
/// instruction. Minima and maxima of floats are not IEEE 754's there.
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

/// Types and operators of an engine.
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

/// The copy engine of a GPU, as a DMA engine over regions of its memory; see the module documentation.
pub struct GpuEngine<G: Bulk> {
    gpu: G,
    stream: G::Stream,
    capabilities: Capabilities,
    /// By index: the generation, and the memory if registered.
    regions: Vec<(u32, Option<G::Memory>)>,
    in_flight: VecDeque<InFlight<G>>,
    queued_steps: usize,
    is_stopped: bool,
    /// Why the hardware failed last.
    error: Option<GpuError>,
}

/// A submitted chain.
struct InFlight<G: Gpu> {
    tag: Tag,
    scope: Scope,
    steps: usize,
    /// How it ends, unless aborted.
    end: (Status, usize),
    done: G::Event,
    _held: Vec<G::Memory>,
}

impl<G: Bulk> GpuEngine<G> {
    /// Create an engine on its own handle of a GPU.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] if the hardware does not support it; the driver's error.
    pub fn new(gpu: G, family: Family) -> Result<Self, GpuError> {
        gpu.check_bulk()?;
        let stream = gpu.stream()?;
        let mut capabilities = Capabilities::new(Profile::InlineReduce, STEPS_MAX, QUEUE_DEPTH).with_alignment(16);
        (capabilities.dtypes, capabilities.ops) = family.sets();
        let (regions, in_flight) = (Vec::new(), VecDeque::new());
        Ok(Self { gpu, stream, capabilities, regions, in_flight, queued_steps: 0, is_stopped: false, error: None })
    }

    /// Return the GPU.
    pub const fn gpu(&self) -> &G {
        &self.gpu
    }

    /// Return the GPU's error behind the last [`Status::Hardware`] or [`SubmitError::Stopped`].
    pub const fn error(&self) -> Option<&GpuError> {
        self.error.as_ref()
    }

    /// Register memory; `None` if no key is free.
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

    /// Deregister memory; submitted chains keep it. Returns false if the key is unknown.
    pub fn deregister(&mut self, key: RegionKey) -> bool {
        match self.regions.get_mut(usize::from(key.index)) {
            Some((generation, memory)) if *generation == key.generation && memory.is_some() => {
                *memory = None;
                true
            }
            _ => false,
        }
    }

    /// Look up `len_bytes` bytes of a region.
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

    /// Enqueue one step; `held` receives the memory that it accesses.
    fn enqueue(&mut self, step: &Step, held: &mut Vec<G::Memory>) -> Result<(), Status> {
        self.capabilities.check(step)?;
        let (len, to) = (step.dst_len_bytes(), self.find(step.dst(), step.dst_len_bytes())?);
        let from = step.src().map(|address| self.find(address, step.src_len_bytes())).transpose()?;
        if !len.is_multiple_of(16) || self.gpu.addresses(&to).start % 16 != 0 {
            return Err(Status::Misaligned);
        }
        let whole = |memory| Part { memory, at: 0, len_bytes: len as usize };
        let enqueued = match (step, &from) {
            // Streams have no instruction for checksums.
            (Step::Publish { covers, .. }, _) if !covers.is_empty() => return Err(Status::Unsupported),
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
        enqueued.map_err(|error| {
            self.error = Some(error);
            Status::Hardware
        })
    }

    /// Accept a chain of valid length.
    fn accept(&mut self, chain: &Chain<'_>) -> Result<(), GpuError> {
        let mut held = Vec::new();
        let failed = chain
            .steps
            .iter()
            .enumerate()
            .find_map(|(index, step)| self.enqueue(step, &mut held).err().map(|status| (status, index)));
        let done = self.gpu.event()?;
        self.gpu.record(&done, &self.stream)?;
        let (steps, end) = (chain.steps.len(), failed.unwrap_or((Status::Done, chain.steps.len())));
        self.in_flight.push_back(InFlight { tag: chain.tag, scope: chain.scope, steps, end, done, _held: held });
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
        self.accept(&chain).map_err(|error| {
            self.error = Some(error);
            self.is_stopped = true;
            SubmitError::Stopped
        })
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let mut count = 0;
        while let (Some(place), Some(flight)) = (completions.get_mut(count), self.in_flight.front()) {
            let (status, step) = match self.gpu.is_done(&flight.done) {
                Ok(false) => break,
                Ok(true) => flight.end,
                // The context is lost: nothing of it runs any more.
                Err(error) => {
                    self.error = Some(error);
                    self.is_stopped = true;
                    (Status::Hardware, 0)
                }
            };
            *place = Completion { tag: flight.tag, status, step: step as u16 };
            self.queued_steps -= flight.steps;
            self.in_flight.pop_front();
            count += 1;
        }
        count
    }

    fn abort(&mut self, scope: Scope) {
        for flight in self.in_flight.iter_mut().filter(|flight| flight.scope == scope && flight.end.0 == Status::Done) {
            flight.end = (Status::Aborted, 0);
        }
    }
}

/// Maximum number of steps of a chain.
const STEPS_MAX: u32 = 64;

/// Maximum number of queued steps.
const QUEUE_DEPTH: u32 = 1024;

#[cfg(test)]
mod tests;
