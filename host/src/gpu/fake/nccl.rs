//! The fake GPU's NCCL: enqueued calls run once all ranks have reached them, and combine in rank order in the element
//! type, which rounds.

use super::state::{NcclShare, State, Task};
use super::{FakeGpu, FakeMemory, FakeStream, place};
use crate::gpu::nccl::{MIN_VERSION, Nccl, NcclId};
use crate::gpu::{GpuError, Part, Unavailable};
use std::collections::BTreeMap;
use std::time::Instant;
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The machine's NCCL.
#[derive(Debug)]
pub(super) struct Library {
    version: Option<u32>,
    ids: u64,
    comms: Vec<Comm>,
}

impl Default for Library {
    fn default() -> Self {
        Self { version: Some(MIN_VERSION), ids: 0, comms: Vec::new() }
    }
}

impl Library {
    pub(super) fn version(&self) -> Result<u32, String> {
        self.version.ok_or_else(|| Unavailable::Nccl.to_string())
    }
}

#[derive(Debug)]
struct Comm {
    id: NcclId,
    /// Whether each rank has joined.
    joined: Vec<bool>,
    /// The number of calls that each rank has enqueued, and of those that have run.
    calls: Vec<(usize, usize)>,
    aborted: Vec<bool>,
    /// Results of calls that some rank has run.
    results: BTreeMap<usize, Vec<u8>>,
}

/// One rank of a communicator.
#[derive(Debug)]
pub struct FakeNccl {
    comm: usize,
    rank: usize,
}

impl FakeGpu {
    /// Set the version of this machine's NCCL; `None` for no NCCL.
    pub fn with_nccl(&self, version: Option<u32>) {
        self.lock().machine.nccl.version = version;
    }
}

impl State {
    /// Return whether all ranks have reached a call, or this one need not wait any more.
    pub(super) fn nccl_is_ready(&self, comm: usize, rank: usize, call: usize) -> bool {
        let state = &self.machine.nccl.comms[comm];
        let at_front = |wanted: usize| {
            self.streams.iter().any(|stream| {
                matches!(stream.queue.front(), Some((_, Task::Nccl { comm: other, rank, call: at, .. }))
                    if (*other, *rank, *at) == (comm, wanted, call))
            })
        };
        state.aborted[rank] || (0..state.calls.len()).all(|rank| state.calls[rank].1 > call || at_front(rank))
    }

    pub(super) fn nccl_run(
        &mut self,
        process: u64,
        comm: usize,
        rank: usize,
        share: &NcclShare,
    ) -> Result<(), GpuError> {
        let call = self.machine.nccl.comms[comm].calls[rank].1;
        self.machine.nccl.comms[comm].calls[rank].1 += 1;
        if self.machine.nccl.comms[comm].aborted[rank] {
            return Ok(());
        }
        if !self.machine.nccl.comms[comm].results.contains_key(&call) {
            let result = self.nccl_combine(comm, call, (process, rank, share))?;
            self.machine.nccl.comms[comm].results.insert(call, result);
        }
        let result = self.machine.nccl.comms[comm].results[&call].clone();
        self.write(process, &share.to)?.copy_from_slice(&result);
        let comm = &mut self.machine.nccl.comms[comm];
        if comm.calls.iter().all(|&(_, ran)| ran > call) {
            comm.results.remove(&call);
        }
        Ok(())
    }

    /// Combine the shares of all ranks; those of the others are next on their streams.
    fn nccl_combine(
        &self,
        comm: usize,
        call: usize,
        (process, rank, share): (u64, usize, &NcclShare),
    ) -> Result<Vec<u8>, GpuError> {
        let mut shares = BTreeMap::from([(rank, (process, share))]);
        for stream in &self.streams {
            if let Some((_, Task::Nccl { comm: other, rank, call: at, share })) = stream.queue.front()
                && (*other, *at) == (comm, call)
            {
                shares.insert(*rank, (stream.process, share));
            }
        }
        let kernel = share.kernel;
        let ranks = shares.len() as u32;
        let mut result: Vec<u8> = Vec::new();
        for (process, share) in shares.values() {
            let bytes = self.read(*process, &share.from)?;
            if result.is_empty() {
                result = bytes.to_vec();
                continue;
            }
            let mut accumulators = vec![0; bytes.len() / kernel.element_bytes() * kernel.accumulator_bytes()];
            kernel.load(&mut accumulators, &result, false);
            kernel.combine(&mut accumulators, bytes, false);
            kernel.store(&mut result, &accumulators, 1);
        }
        if kernel.op() == ReduceOp::Avg {
            let mut accumulators = vec![0; result.len() / kernel.element_bytes() * kernel.accumulator_bytes()];
            kernel.load(&mut accumulators, &result, false);
            kernel.store(&mut result, &accumulators, ranks);
        }
        Ok(result)
    }
}

impl Nccl for FakeGpu {
    type Comm = FakeNccl;

    fn nccl_version(&self) -> Result<u32, GpuError> {
        self.lock().machine.nccl.version.ok_or_else(|| Unavailable::Nccl.into())
    }

    fn nccl_id(&self) -> Result<NcclId, GpuError> {
        let library = &mut self.lock().machine.nccl;
        library.ids += 1;
        let mut id = [0; 128];
        id[..8].copy_from_slice(&library.ids.to_le_bytes());
        Ok(NcclId(id.to_vec()))
    }

    fn nccl_init(&self, id: &NcclId, rank: u32, ranks: u32) -> Result<FakeNccl, GpuError> {
        let comms = &mut self.lock().machine.nccl.comms;
        let rank = rank as usize;
        let comm = comms.iter().position(|comm| comm.id == *id).unwrap_or_else(|| {
            let each = ranks as usize;
            comms.push(Comm {
                id: id.clone(),
                joined: vec![false; each],
                calls: vec![(0, 0); each],
                aborted: vec![false; each],
                results: BTreeMap::new(),
            });
            comms.len() - 1
        });
        comms[comm].joined[rank] = true;
        Ok(FakeNccl { comm, rank })
    }

    fn nccl_is_ready(&self, comm: &FakeNccl) -> Result<bool, GpuError> {
        Ok(self.lock().machine.nccl.comms[comm.comm].joined.iter().all(|&joined| joined))
    }

    fn nccl_all_reduce(
        &self,
        comm: &FakeNccl,
        on: &FakeStream,
        (dtype, op): (Dtype, ReduceOp),
        (to, from): (Part<'_, FakeMemory>, Part<'_, FakeMemory>),
    ) -> Result<(), GpuError> {
        let kernel = Kernel::new(dtype, op).ok_or_else(|| GpuError::Kernel {
            kernel: format!("{dtype} {op}"),
            why: "NCCL does not support this reduction".into(),
        })?;
        let share = Box::new(NcclShare { kernel, from: place(&from), to: place(&to) });
        let mut state = self.lock();
        let calls = &mut state.machine.nccl.comms[comm.comm].calls[comm.rank].0;
        let call = *calls;
        *calls += 1;
        state.push(on.0, Task::Nccl { comm: comm.comm, rank: comm.rank, call, share })
    }

    fn nccl_abort(&self, comm: &FakeNccl, until: Instant) -> bool {
        self.lock().machine.nccl.comms[comm.comm].aborted[comm.rank] = true;
        super::machine::block(&self.state, self.process, until)
    }
}
