//! Cached resources of a group: programs, kernels, and memory that other ranks open.

use super::group::PeerGroup;
use super::join::exchange_memory;
use super::plan::{PeerPlan, SignalPages};
use super::{Bootstrap, PeerError, PeerFacts, Peered, WhyStaged, page};
use crate::gpu::GpuError;
use crate::gpu::group::{PLANS_MAX, kernel_of, schedules};
use crate::gpu::nccl::Nccl;
use crate::gpu::plan::mover;
use crate::gpu::program::Program;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::reduce::Kernel;

impl<G: Peered + Nccl, B: Bootstrap> PeerGroup<G, B> {
    /// Return the program of an operation, cached or new.
    pub(super) fn plan(&mut self, desc: &OpDesc, path: Path) -> Result<Arc<PeerPlan<G>>, PeerError> {
        if let Some(plan) = self.plans.get(&(*desc, path)) {
            return Ok(Arc::clone(plan));
        }
        let kernel = kernel_of(desc)?;
        let schedules = schedules(desc, path, &self.selection)?;
        let pieces = self.options.group.piece_bytes;
        let program = Program::new(&schedules, desc.element_bytes(), kernel.as_ref(), true, pieces)?;
        let code = kernel.map(|kernel| self.kernel(kernel)).transpose()?;
        let mover = mover().map(|kernel| self.kernel(kernel)).transpose()?;
        let plan = Arc::new(PeerPlan::new(schedules, program, [code, mover]));
        if self.plans.len() >= PLANS_MAX {
            self.plans.clear();
        }
        self.plans.insert((*desc, path), Arc::clone(&plan));
        Ok(plan)
    }

    /// Return the code of a kernel, cached or new.
    fn kernel(&mut self, kernel: Kernel) -> Result<Arc<G::Kernel>, GpuError> {
        if let Some(code) = self.kernels.get(&kernel) {
            return Ok(Arc::clone(code));
        }
        let code = Arc::new(self.gpu.load(&kernel)?);
        self.kernels.insert(kernel, Arc::clone(&code));
        Ok(code)
    }

    /// Allocate memory for partial values. All ranks know how much each needs, and export it together.
    pub(super) fn grow_work(&mut self, needed: &[usize], deadline: Instant) -> Result<(), PeerError> {
        if self.work_bytes.iter().zip(needed).all(|(have, needed)| have >= needed) {
            return Ok(());
        }
        for (have, &needed) in self.work_bytes.iter_mut().zip(needed) {
            *have = needed.max(*have);
        }
        self.wait_all(deadline)?;
        // Other ranks close their mapping before the owner frees it: none passes the exchange with it open.
        let old = self.work[self.me].take();
        self.work.iter_mut().for_each(|work| *work = None);
        let own = alloc_exportable(&self.gpu, self.work_bytes[self.me])?;
        let number = self.exported;
        self.exported += 1;
        let opened_memory =
            exchange_memory(&self.gpu, &self.bootstrap, &self.facts, (number, &own, &self.work_bytes), deadline)?;
        drop(old);
        self.work = opened_memory.map_err(PeerError::Staged)?.into_iter().map(Some).collect();
        Ok(())
    }
}

/// Allocate exportable memory in whole driver blocks: the driver may place several small allocations in one block, and
/// a handle exports the whole block.
fn alloc_exportable<G: Peered>(gpu: &G, len_bytes: usize) -> Result<G::Memory, GpuError> {
    gpu.alloc(len_bytes.max(1).next_multiple_of(EXPORT_BLOCK_BYTES))
}

/// Size of the driver's blocks.
const EXPORT_BLOCK_BYTES: usize = 2 << 20;

/// Create this rank's page and banner, and open all pages.
pub(super) fn create_pages<G: Peered>(
    gpu: &G,
    bootstrap: &impl Bootstrap,
    facts: &[PeerFacts],
    deadline: Instant,
) -> Result<Result<SignalPages<G::Memory>, WhyStaged>, PeerError> {
    let page = alloc_exportable(gpu, facts.len() * page::ENTRY_BYTES)?;
    gpu.set_now(page::whole(&page, facts.len()), &vec![0; facts.len() * page::ENTRY_BYTES / 4])?;
    let banner = gpu.alloc(page::BANNER_BYTES)?;
    gpu.set_now(page::banner(&banner), &[0; page::BANNER_BYTES / 4])?;
    let pages = exchange_memory(
        gpu,
        bootstrap,
        facts,
        (0, &page, &vec![facts.len() * page::ENTRY_BYTES; facts.len()]),
        deadline,
    )?;
    Ok(pages.map(|pages| SignalPages { banner, pages }))
}
