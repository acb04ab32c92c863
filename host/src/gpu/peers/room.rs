//! What a group makes once and uses again: programs, code, and memory that the other ranks open.

use super::group::PeerGroup;
use super::hand::{PeerPlan, Words};
use super::join::show;
use super::{Bootstrap, PeerError, PeerFacts, Peered, WhyStaged, page};
use crate::gpu::GpuError;
use crate::gpu::group::PLANS_MAX;
use crate::gpu::nccl::Nccl;
use crate::gpu::program::Program;
use crate::schedule::{ALGORITHMS, Place, Problem};
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::reduce::Kernel;

impl<G: Peered + Nccl, B: Bootstrap> PeerGroup<G, B> {
    /// Return the program of an operation: the one that was made before, or a new one.
    pub(super) fn plan(&mut self, desc: &OpDesc, path: Path) -> Result<Arc<PeerPlan<G>>, PeerError> {
        if let Some(plan) = self.plans.get(&(*desc, path)) {
            return Ok(Arc::clone(plan));
        }
        let unknown = || GpuError::Invalid(format!("{desc} by {}: there is no such schedule", path.name()));
        let algorithm = ALGORITHMS
            .iter()
            .find(|algorithm| algorithm.path() == path && algorithm.pattern.collective() == desc.collective)
            .ok_or_else(unknown)?;
        let kernel = match desc.dtype.zip(desc.op) {
            Some((dtype, op)) => Some(Kernel::new(dtype, op).ok_or_else(|| GpuError::Kernel {
                kernel: format!("{dtype} {op}"),
                why: Kernel::why_not(dtype, op).unwrap_or("they do not go together").into(),
            })?),
            None => None,
        };
        let count = usize::try_from(desc.count).map_err(|_| GpuError::Invalid(format!("{desc} is too long")))?;
        let ranks = self.facts.len() as u32;
        if desc.root.0 >= ranks {
            return Err(GpuError::Invalid(format!("{desc} to {} in a group of {ranks}", desc.root)).into());
        }
        let tree = self.situation.declared.tree();
        let problem = |place| Problem { place, count, root: desc.root, tree };
        let schedules: Vec<_> = Place::all(ranks).map(|place| (algorithm.schedule)(&problem(place))).collect();
        let pieces = self.options.group.piece_bytes;
        let program = Program::new(&schedules, desc.element_bytes(), kernel.as_ref(), true, pieces)?;
        let code = match kernel {
            None => None,
            Some(kernel) => Some(match self.kernels.get(&kernel) {
                Some(code) => Arc::clone(code),
                None => {
                    let code = Arc::new(self.gpu.load(&kernel)?);
                    self.kernels.insert(kernel, Arc::clone(&code));
                    code
                }
            }),
        };
        let plan = Arc::new(PeerPlan::new(schedules, program, code));
        if self.plans.len() >= PLANS_MAX {
            self.plans.clear();
        }
        self.plans.insert((*desc, path), Arc::clone(&plan));
        Ok(plan)
    }

    /// See to the memory of partial values: all ranks know of each other how much each needs, and show it together.
    pub(super) fn grow_work(&mut self, wanted: &[usize], deadline: Instant) -> Result<(), PeerError> {
        if self.work_bytes.iter().zip(wanted).all(|(have, wanted)| have >= wanted) {
            return Ok(());
        }
        for (have, &wanted) in self.work_bytes.iter_mut().zip(wanted) {
            *have = wanted.max(*have);
        }
        self.all_landed(deadline)?;
        // The others' is closed before they free it: nobody passes the exchange with it.
        let old = self.work[self.me].take();
        self.work.iter_mut().for_each(|work| *work = None);
        let own = alloc_shown(&self.gpu, self.work_bytes[self.me])?;
        let number = self.shown;
        self.shown += 1;
        let seen = show(&self.gpu, &self.bootstrap, &self.facts, (number, &own, &self.work_bytes), deadline)?;
        drop(old);
        self.work = seen.map_err(PeerError::Staged)?.into_iter().map(Some).collect();
        Ok(())
    }
}

/// Allocate memory that others will open, in blocks of its own: the driver may put small allocations into one, and hand
/// out all of it.
fn alloc_shown<G: Peered>(gpu: &G, len_bytes: usize) -> Result<G::Memory, GpuError> {
    gpu.alloc(len_bytes.max(1).next_multiple_of(SHOWN_BYTES))
}

/// The size of the driver's blocks.
const SHOWN_BYTES: usize = 2 << 20;

/// Make this rank's words, and open everyone's.
pub(super) fn words<G: Peered>(
    gpu: &G,
    bootstrap: &impl Bootstrap,
    facts: &[PeerFacts],
    deadline: Instant,
) -> Result<Result<Words<G::Memory>, WhyStaged>, PeerError> {
    let page = alloc_shown(gpu, facts.len() * page::ENTRY_BYTES)?;
    gpu.set_now(page::whole(&page, facts.len()), &vec![0; facts.len() * page::ENTRY_BYTES / 4])?;
    let banner = gpu.alloc(page::BANNER_BYTES)?;
    gpu.set_now(page::banner(&banner), &[0; page::BANNER_BYTES / 4])?;
    let pages = show(gpu, bootstrap, facts, (0, &page, &vec![facts.len() * page::ENTRY_BYTES; facts.len()]), deadline)?;
    Ok(pages.map(|pages| Words { banner, pages }))
}
