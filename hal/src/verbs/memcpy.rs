//! The DMA engine of an mlx5 card: `mlx5dv_wr_memcpy` (rdma-core; BlueField-2 and later).
//!
//! Copies are work requests of a reliable queue pair that is connected to itself; the card's engine moves the bytes
//! between memory registered in its domain, and memory of other functions that was attached to it (`alias`).
//! Written from rdma-core's manual pages (mlx5dv_wr_post(3),
//! mlx5dv_create_qp(3)) and compiled against its header; not run on a card yet.
//!
//! Invariant: a posted copy refers only to memory that [`CopyEngine`] keeps registered until its completion, or until
//! the queue pair is destroyed.

use super::alias::{Alias, AliasError, MemoryGrant};
use super::config::{VerbsConfig, VerbsError};
use super::copying::{BatchOutcome, Copier, Copy, CopyEngine, DEPTH, MapMemoryError, NotPosted};
use super::datagrams::Source;
use super::discover::{self, PortLocation};
use super::ibv;
use super::memory::Registration;
use super::mlx5::{Devx, MemcpyError, Mlx5, PairCalls};
use super::objects::{Completions, Context, Domain};
use super::one_sided::{OneSidedEnd, connect, prepare};
use super::pair::QueuePair;
use crate::dma::{
    Capabilities, Chain, Completion, DmaMemory, Engine, LocalMemory, RegionKey, Scope, Span, Status, SubmitError,
};
use crate::traffic_class::TrafficClass;
use std::ptr::NonNull;
use std::sync::Arc;

/// Return the maximum length of a DMA copy of the device `name`, in bytes.
///
/// # Errors
/// [`MemcpyError`] if it supports none.
pub fn max_memcpy_len_bytes(name: &str) -> Result<u32, MemcpyError> {
    Mlx5::load()?.max_memcpy_len_bytes(&*Context::open(name)?)
}

/// A card's DMA engine, which supports copies and publications; see [`Engine`] and [`LocalMemory`].
pub struct MemcpyEngine {
    engine: CopyEngine<Queue>,
}

impl MemcpyEngine {
    /// Open the engine of the configured device, for `regions` regions.
    ///
    /// # Errors
    /// [`MemcpyError`]
    pub fn open(config: &VerbsConfig, regions: usize) -> Result<Self, MemcpyError> {
        let mlx5 = Mlx5::load()?;
        let place = discover::find(config)?;
        let max_len_bytes = mlx5.max_memcpy_len_bytes(&place.context)?;
        Ok(Self { engine: CopyEngine::new(Queue::new(mlx5, &place)?, max_len_bytes, regions) })
    }

    /// Map memory for chains under `key`.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapMemoryError> {
        self.engine.map(key, memory, false)
    }

    /// Map the device's own memory, which its processor accesses as well.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map_local_memory(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapMemoryError> {
        self.engine.map(key, memory, true)
    }

    /// Map memory that another function of the device exports ([`ExportedMemory`](super::ExportedMemory)), such as the
    /// host's, if the device has alias keys. Publications to it are not supported. Map memory once: the order of copies
    /// by two keys is not that of their chain. If the export ends first, the next copy fails, and stops the engine.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map_alias(&mut self, key: RegionKey, grant: &MemoryGrant) -> Result<(), MapMemoryError> {
        self.engine.map_alias(key, grant, |queue| queue.attach(grant))
    }

    /// Return the name of the device.
    pub fn device(&self) -> &str {
        &self.engine.copier().domain.context.name
    }

    /// Unmap memory; afterwards the card does not access it. False if it was not mapped.
    pub fn unmap(&mut self, key: RegionKey) -> bool {
        self.engine.unmap(key)
    }
}

impl Engine for MemcpyEngine {
    fn capabilities(&self) -> &Capabilities {
        self.engine.capabilities()
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        self.engine.submit(chain)
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        self.engine.poll(completions)
    }

    fn abort(&mut self, scope: Scope) {
        self.engine.abort(scope);
    }
}

impl LocalMemory for MemcpyEngine {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        self.engine.with_local(dst, src, work)
    }
}

impl std::fmt::Debug for MemcpyEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemcpyEngine").field("capabilities", self.engine.capabilities()).finish_non_exhaustive()
    }
}

/// What keeps a key valid.
enum Held {
    Registered { _registration: Registration },
    Attached { _alias: Alias<Devx> },
}

/// The queue pair and its extended operations.
struct Queue {
    /// `None` after it was stopped.
    pair: Option<QueuePair>,
    extended: NonNull<ibv::ibv_qp_ex>,
    calls: NonNull<PairCalls>,
    completions: Arc<Completions>,
    domain: Arc<Domain>,
    mlx5: Mlx5,
}

// SAFETY: as of `Context`; the pointers refer to the queue pair, which this value owns, and to the library, which stays
// loaded.
unsafe impl Send for Queue {}

impl Queue {
    fn new(mlx5: Mlx5, place: &PortLocation) -> Result<Self, VerbsError> {
        let PortLocation { context, attr, gid } = place;
        let domain = Domain::new(context, false)?;
        // One entry for each copy, because a failed queue pair completes every one.
        let completions = Completions::new(context, DEPTH as usize, None)?;
        let what = "create a queue pair for DMA copies";
        let init = ibv::ibv_qp_init_attr_ex {
            send_cq: completions.raw.as_ptr(),
            recv_cq: completions.raw.as_ptr(),
            cap: ibv::ibv_qp_cap {
                max_send_wr: DEPTH,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ibv::ibv_qp_type::IBV_QPT_RC,
            comp_mask: ibv::IBV_QP_INIT_ATTR_PD | ibv::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            pd: domain.raw.as_ptr(),
            send_ops_flags: u64::from(ibv::IBV_QP_EX_WITH_SEND),
            ..ibv::ibv_qp_init_attr_ex::default()
        };
        // SAFETY: domain and queues of this device.
        let raw = NonNull::new(unsafe { mlx5.create_pair(context, init) });
        let raw = raw.ok_or_else(|| VerbsError::last(what, &context.name))?;
        // SAFETY: just created with these.
        let mut pair = unsafe { QueuePair::adopt(raw, &domain, (&completions, &completions)) };
        // SAFETY: the queue pair was created with extended operations, which both calls only look up.
        let (extended, calls) = unsafe {
            let extended = ibv::ibv_qp_to_qp_ex(pair.raw().as_ptr());
            (NonNull::new(extended), NonNull::new(extended).and_then(|_| NonNull::new(mlx5.calls_of(extended))))
        };
        let (Some(extended), Some(calls)) = (extended, calls) else {
            return Err(VerbsError::last(what, &context.name));
        };
        let lid = if attr.is_ethernet { 0 } else { attr.lid };
        // At most 4096.
        let mtu_bytes = attr.mtu_bytes as u16;
        let end = OneSidedEnd { gid: gid.gid, lid, qpn: pair.number(), psn: 0, mtu_bytes, reads: 1 };
        // Its packets do not leave the device.
        let from = Source { gid: *gid, traffic_class: TrafficClass::default(), service_level: 0, partition_index: 0 };
        prepare(&mut pair, &from)?;
        connect(&mut pair, &from, (&end, &end))?;
        Ok(Self { pair: Some(pair), extended, calls, completions, domain, mlx5 })
    }
}

impl Queue {
    /// Attach another function's memory; returns also its local key.
    fn attach(&self, grant: &MemoryGrant) -> Result<(Held, u32), AliasError> {
        let devx = self.mlx5.devx(&self.domain.context)?;
        let alias = Alias::attach(devx, &self.domain, grant)?;
        let lkey = alias.lkey();
        Ok((Held::Attached { _alias: alias }, lkey))
    }
}

impl Copier for Queue {
    type Registration = Held;

    fn register(&mut self, memory: &Arc<dyn DmaMemory>) -> Result<(Held, u32), VerbsError> {
        let registration = Registration::new(&self.domain, memory)?;
        let lkey = registration.lkey();
        Ok((Held::Registered { _registration: registration }, lkey))
    }

    fn post(&mut self, copies: &[Copy], number: u64) -> Result<(), NotPosted> {
        if self.pair.is_none() {
            return Err(NotPosted::Failed);
        }
        let extended = self.extended.as_ptr();
        // SAFETY: the queue pair exists and is used by this thread only; operations that its driver lacks are not
        // called. Memory stays registered, see the module's invariant.
        unsafe {
            let (Some(start), Some(complete), Some(abort)) =
                ((*extended).wr_start, (*extended).wr_complete, (*extended).wr_abort)
            else {
                return Err(NotPosted::Failed);
            };
            start(extended);
            for (nth, copy) in copies.iter().enumerate() {
                let is_last = nth + 1 == copies.len();
                (*extended).wr_id = number;
                (*extended).wr_flags = if is_last { ibv::ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
                let (dst, src) = ((copy.dst.key, copy.dst.addr), (copy.src.key, copy.src.addr));
                if !PairCalls::memcpy(self.calls.as_ptr(), dst, src, copy.len_bytes as usize) {
                    abort(extended);
                    return Err(NotPosted::Failed);
                }
            }
            if complete(extended) == 0 { Ok(()) } else { Err(NotPosted::Failed) }
        }
    }

    fn poll(&mut self) -> Option<BatchOutcome> {
        let mut taken = [ibv::ibv_wc::default()];
        match self.completions.poll(&mut taken) {
            0 => None,
            _ => Some(if taken[0].error().is_none() {
                BatchOutcome::Done(taken[0].wr_id())
            } else {
                BatchOutcome::Failed
            }),
        }
    }

    fn stop(&mut self) {
        // Destroying the queue pair ends everything that was posted.
        self.pair = None;
    }
}
