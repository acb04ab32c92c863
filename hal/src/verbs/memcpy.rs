//! The DMA engine of a card, as mlx5 gives it away: `mlx5dv_wr_memcpy` (rdma-core; BlueField-2 and later).
//!
//! Copies are work of a reliable queue pair that is connected to itself, and move bytes between any memory that is
//! registered in its domain, by the card's own engine. Written by rdma-core's manual pages (mlx5dv_wr_post(3),
//! mlx5dv_create_qp(3)) and compiled against its header; not run on a card yet.
//!
//! Invariant: what is posted is of memory that [`Copying`] keeps registered until its completion, or until the queue pair is
//! gone.

use super::config::{VerbsConfig, VerbsError};
use super::copying::{Copier, Copy, Copying, DEPTH, Ended, MapMemoryError, NotPosted};
use super::discover::{self, Place};
use super::memory::Lent;
use super::mlx5::{MemcpyError, Mlx5, PairCalls};
use super::objects::{Completions, Context, Domain};
use super::one_sided::{OneSidedEnd, connect, prepare};
use super::pair::QueuePair;
use crate::dma::{
    Capabilities, Chain, Completion, DmaMemory, Engine, LocalMemory, RegionKey, Scope, Span, Status, SubmitError,
};
use ibverbs_sys as ibv;
use std::ptr::NonNull;
use std::sync::Arc;

/// Ask the device called `name` how many bytes a DMA copy of its may have.
///
/// # Errors
/// [`MemcpyError`]: why it does none.
pub fn max_memcpy_len_bytes(name: &str) -> Result<u32, MemcpyError> {
    Mlx5::load()?.max_memcpy_len_bytes(&*Context::open(name)?)
}

/// A card's DMA engine: it copies, and publishes; see [`Engine`] and [`LocalMemory`].
pub struct MemcpyEngine {
    engine: Copying<Queue>,
}

impl MemcpyEngine {
    /// Open the engine of the device that is asked for, for `regions` regions.
    ///
    /// # Errors
    /// [`MemcpyError`]
    pub fn open(config: &VerbsConfig, regions: usize) -> Result<Self, MemcpyError> {
        let mlx5 = Mlx5::load()?;
        let place = discover::find(config)?;
        let max_len_bytes = mlx5.max_memcpy_len_bytes(&place.context)?;
        Ok(Self { engine: Copying::new(Queue::new(mlx5, &place)?, max_len_bytes, regions) })
    }

    /// Let chains reach memory under `key`.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapMemoryError> {
        self.engine.map(key, memory, false)
    }

    /// The same for the device's own memory, which its processor works on as well.
    ///
    /// # Errors
    /// [`MapMemoryError`]
    pub fn map_local_memory(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapMemoryError> {
        self.engine.map(key, memory, true)
    }

    /// Take memory away; when this returns, the card does not touch it. False if it is not there.
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

/// The queue pair, and what it is used by.
struct Queue {
    /// `None`: given up.
    pair: Option<QueuePair>,
    extended: NonNull<ibv::ibv_qp_ex>,
    calls: NonNull<PairCalls>,
    completions: Arc<Completions>,
    domain: Arc<Domain>,
}

// SAFETY: as of `Context`; the pointers are into the queue pair, which is this value's.
unsafe impl Send for Queue {}

impl Queue {
    fn new(mlx5: Mlx5, place: &Place) -> Result<Self, VerbsError> {
        let Place { context, attr, gid } = place;
        let domain = Domain::new(context)?;
        // One for each copy, as a queue pair that fails gives all back.
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
        // SAFETY: just made, of these.
        let mut pair = unsafe { QueuePair::adopt(raw, &domain, (&completions, &completions)) };
        // SAFETY: a queue pair that was made with extended operations, which both calls only look up.
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
        let end = OneSidedEnd { gid: gid.gid, lid, qpn: pair.number(), psn: 0, mtu_bytes };
        prepare(&mut pair, gid.port)?;
        connect(&mut pair, gid, (&end, &end), 1)?;
        Ok(Self { pair: Some(pair), extended, calls, completions, domain })
    }
}

impl Copier for Queue {
    type Registration = Lent;

    fn register(&mut self, memory: &Arc<dyn DmaMemory>) -> Result<(Lent, u32), VerbsError> {
        let lent = Lent::new(&self.domain, memory)?;
        let lkey = lent.lkey();
        Ok((lent, lkey))
    }

    fn post(&mut self, copies: &[Copy], number: u64) -> Result<(), NotPosted> {
        if self.pair.is_none() {
            return Err(NotPosted::Failed);
        }
        let extended = self.extended.as_ptr();
        // SAFETY: the queue pair is there, and this thread has it; its driver has these calls, or is not asked. What is
        // copied stays registered, see the head of this file.
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

    fn poll(&mut self) -> Option<Ended> {
        let mut taken = [ibv::ibv_wc::default()];
        match self.completions.poll(&mut taken) {
            0 => None,
            _ => Some(if taken[0].error().is_none() { Ended::Done(taken[0].wr_id()) } else { Ended::Failed }),
        }
    }

    fn stop(&mut self) {
        // Destroyed: the card has let go of all that was posted.
        self.pair = None;
    }
}
