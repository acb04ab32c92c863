//! Prepares an operation: its algorithm, its program (cached by shape), its code and its memory.

use super::{Group, Request};
use crate::gpu::Gpu;
use crate::gpu::buffers::{GpuBuffers, check};
use crate::gpu::error::GpuError;
use crate::gpu::plan::{Plan, Prepared, Scaling};
use crate::gpu::program::Program;
use crate::schedule::{ALGORITHMS, Place, Problem, Schedule};
use crate::select::SelectionContext;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use sumac_hal::op::{OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

/// Buffers, and the multiplications to run first.
type Scaled<G> = (Vec<GpuBuffers<<G as Gpu>::Memory>>, Vec<Scaling<<G as Gpu>::Memory>>);

/// Key of a program.
pub(super) type Shape = (OpDesc, Path, bool);

impl<G: Gpu> Group<G> {
    /// Check an operation, select its algorithm, and prepare its program, code and memory.
    pub(super) fn prepare(
        &mut self,
        request: &Request<'_, G::Memory>,
    ) -> Result<(Prepared<G>, Arc<Plan<G>>), GpuError> {
        let desc = request.desc;
        let explanation = self.explain(&desc, request.algo);
        let Some(path) = explanation.chosen else {
            let why = explanation.refusal().map_or_else(|| "no path".to_owned(), ToString::to_string);
            return Err(GpuError::Invalid(format!("{desc}: {why}")));
        };
        let fallback = explanation.fallback().map(ToString::to_string);
        let (buffers, scalings) = self.scaled(request)?;
        let is_in_place = buffers.first().is_some_and(GpuBuffers::is_in_place);
        let shape = (desc, path, is_in_place);
        let plan = self.plan(shape)?;
        check(&self.gpu, &plan.schedules, desc.element_bytes(), &buffers)?;
        self.grow_work(&plan.program.work_bytes)?;
        let work: Vec<_> = self.work.iter().map(|work| work.as_ref().map(|(_, memory)| memory.clone())).collect();
        let mut held: Vec<G::Memory> = work.iter().flatten().cloned().collect();
        for each in request.buffers.iter().chain(&buffers) {
            match each {
                GpuBuffers::InPlace(buffer) => held.push(buffer.clone()),
                GpuBuffers::Separate { input, output } => held.extend([input.clone(), output.clone()]),
            }
        }
        Ok((Prepared { shape, path, fallback, buffers, scalings, work, held }, plan))
    }

    /// Return the buffers that the schedules use, and the multiplications to run first.
    fn scaled(&self, request: &Request<'_, G::Memory>) -> Result<Scaled<G>, GpuError> {
        let mut buffers = request.buffers.to_vec();
        let mut scalings = Vec::new();
        if request.scalars.is_empty() {
            return Ok((buffers, scalings));
        }
        if request.desc.op != Some(ReduceOp::PremulSum) || request.scalars.len() != buffers.len() {
            let what = format!("{} scalars for {}: premul_sum takes one a rank", request.scalars.len(), request.desc);
            return Err(GpuError::Invalid(what));
        }
        for (rank, (each, &scalar)) in buffers.iter_mut().zip(request.scalars).enumerate() {
            let from = each.input().clone();
            let to = if each.is_in_place() { from.clone() } else { self.gpu.alloc(self.len_bytes(&from))? };
            if !each.is_in_place() {
                *each = each.with_input(to.clone());
            }
            scalings.push(Scaling { rank, from, to, scalar });
        }
        Ok((buffers, scalings))
    }

    /// Return the program of a shape, cached or new.
    fn plan(&mut self, shape: Shape) -> Result<Arc<Plan<G>>, GpuError> {
        if let Some(plan) = self.plans.get(&shape) {
            return Ok(Arc::clone(plan));
        }
        let (desc, path, is_in_place) = shape;
        let kernel = kernel_of(&desc)?;
        let schedules = schedules(&desc, path, &self.selection)?;
        let piece_bytes = self.options.piece_bytes;
        let program = Program::new(&schedules, desc.element_bytes(), kernel.as_ref(), is_in_place, piece_bytes)?;
        let code = kernel.map(|kernel| self.code(kernel)).transpose()?;
        let is_serial = program.moved_bytes() <= self.options.serial_bytes.saturating_mul(program.ops.len() as u64);
        let plan = Arc::new(Plan::new(&self.gpu, schedules, program, code, is_serial)?);
        if self.plans.len() >= PLANS_MAX {
            self.plans.clear();
        }
        self.plans.insert(shape, Arc::clone(&plan));
        Ok(plan)
    }

    fn code(&mut self, kernel: Kernel) -> Result<Arc<G::Kernel>, GpuError> {
        Ok(match self.kernels.entry(kernel) {
            Entry::Occupied(known) => Arc::clone(known.get()),
            Entry::Vacant(free) => Arc::clone(free.insert(Arc::new(self.gpu.load(&kernel)?))),
        })
    }

    /// Allocate memory for partial values. Replaced memory stays alive with the operations that use it.
    fn grow_work(&mut self, needed: &[usize]) -> Result<(), GpuError> {
        for (work, &needed) in self.work.iter_mut().zip(needed) {
            if work.as_ref().map_or(0, |(len, _)| *len) < needed {
                *work = Some((needed, self.gpu.alloc(needed)?));
            }
        }
        Ok(())
    }
}

/// Return the kernel of an operation; `None` if it only moves data.
pub(in crate::gpu) fn kernel_of(desc: &OpDesc) -> Result<Option<Kernel>, GpuError> {
    let Some((dtype, op)) = desc.dtype.zip(desc.op) else { return Ok(None) };
    let kernel = Kernel::new(dtype, op).ok_or_else(|| GpuError::Kernel {
        kernel: format!("{dtype} {op}"),
        why: Kernel::unsupported_reason(dtype, op).unwrap_or("type and operator are incompatible").into(),
    })?;
    Ok(Some(kernel))
}

/// Return the schedules of all ranks for an operation on a path.
pub(in crate::gpu) fn schedules(
    desc: &OpDesc,
    path: Path,
    selection: &SelectionContext,
) -> Result<Vec<Schedule>, GpuError> {
    let &SelectionContext { ranks, shape, ref declared, .. } = selection;
    let known = ALGORITHMS
        .iter()
        .find(|algorithm| algorithm.path() == path && algorithm.pattern.collective() == desc.collective);
    let algorithm = known.ok_or_else(|| GpuError::Invalid(format!("{desc} by {}: no such algorithm", path.name())))?;
    let count = usize::try_from(desc.count).map_err(|_| GpuError::Invalid(format!("{desc} is too long")))?;
    if desc.root.0 >= ranks {
        return Err(GpuError::Invalid(format!("{desc} to {} in a group of {ranks}", desc.root)));
    }
    let problem = |place| Problem { place, count, root: desc.root, tree: declared.tree(), shape };
    Ok(Place::all(ranks).map(|place| (algorithm.schedule)(&problem(place))).collect())
}

/// Programs cached by a group: enough for a training step; then the cache is cleared.
pub(in crate::gpu) const PLANS_MAX: usize = 256;
