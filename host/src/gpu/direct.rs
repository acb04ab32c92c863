//! GPU memory for network adapters: exported as dma-buf and registered, as GPUDirect RDMA requires.
//!
//! This requires a GPU that exports memory ([`Exported`]), an adapter that registers it ([`Adapter`]), and a network
//! that sends from there. [`route`] tries the first two for a piece of memory, and reports which one failed. The third
//! is not implemented: communicators send from host memory, so GPU buffers are staged
//! ([`Staging::why_pinned`](super::Staging::why_pinned)).

use super::Gpu;
use super::error::GpuError;
use std::os::fd::OwnedFd;
use thiserror::Error;

/// Why a network adapter cannot access GPU memory directly.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WhyPinned {
    /// The GPU or its driver cannot export memory.
    #[error("the GPU cannot export memory as dma-buf: {0}")]
    Gpu(String),
    /// The RDMA verbs library is missing or too old.
    #[error("libibverbs cannot register dma-bufs: {0}")]
    Library(String),
    /// There is no RDMA device.
    #[error("no RDMA device: /sys/class/infiniband is empty, or the device's provider library is missing")]
    NoDevice,
    /// The device could not register this memory.
    #[error("{device} cannot register the GPU's memory: {why}")]
    Refused {
        /// The device.
        device: String,
        /// The system's reason.
        why: String,
    },
    /// The network sends from host memory.
    #[error("communicators send from host memory")]
    Network,
}

/// GPU memory exported as a dma-buf.
#[derive(Debug)]
pub struct DmaBuf {
    /// The dma-buf.
    pub fd: OwnedFd,
    /// Offset of the memory in it.
    pub at: u64,
    /// Length of the memory in bytes.
    pub len_bytes: u64,
    /// Its address on the GPU, under which an adapter registers it.
    pub address: u64,
}

/// A GPU whose memory can be exported.
pub trait Exported: Gpu {
    /// Export memory.
    ///
    /// # Errors
    /// [`WhyPinned::Gpu`].
    fn dma_buf(&self, memory: &Self::Memory) -> Result<DmaBuf, WhyPinned>;
}

/// Registers GPU memory.
pub trait Adapter {
    /// A registration, which ends when dropped.
    type Region;

    /// Register memory.
    ///
    /// # Errors
    /// [`WhyPinned::Refused`].
    fn register(&self, memory: DmaBuf) -> Result<Self::Region, WhyPinned>;
}

/// How the network accesses GPU memory.
#[derive(Debug)]
pub enum Route<R> {
    /// Directly.
    Direct(R),
    /// Through pinned host memory, for this reason.
    Pinned(WhyPinned),
}

/// Register GPU memory with an adapter, or return why it must be staged.
pub fn route<G: Exported, A: Adapter>(gpu: &G, memory: &G::Memory, adapter: Result<&A, WhyPinned>) -> Route<A::Region> {
    let registered = adapter.and_then(|adapter| adapter.register(gpu.dma_buf(memory)?));
    registered.map_or_else(Route::Pinned, Route::Direct)
}

/// Test whether an adapter of this machine can register memory of its GPU; returns which.
///
/// # Errors
/// [`GpuError::Unavailable`] without a GPU or the feature `cuda`.
pub fn probe_direct() -> Result<Result<String, WhyPinned>, GpuError> {
    #[cfg(feature = "cuda")]
    return crate::gpu::cuda::probe_direct();
    #[cfg(not(feature = "cuda"))]
    Err(super::Unavailable::Feature.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{FakeGpu, Staging};
    use std::cell::RefCell;
    use std::rc::Rc;

    /// An adapter with room for some regions.
    struct Card {
        regions: Rc<RefCell<Vec<(u64, u64)>>>,
        room: usize,
    }

    struct CardRegion {
        regions: Rc<RefCell<Vec<(u64, u64)>>>,
        what: (u64, u64),
    }

    impl Drop for CardRegion {
        fn drop(&mut self) {
            self.regions.borrow_mut().retain(|region| *region != self.what);
        }
    }

    impl Adapter for Card {
        type Region = CardRegion;

        fn register(&self, memory: DmaBuf) -> Result<CardRegion, WhyPinned> {
            let what = (memory.address, memory.len_bytes);
            if self.regions.borrow().len() == self.room {
                return Err(WhyPinned::Refused { device: "card".into(), why: "no room".into() });
            }
            self.regions.borrow_mut().push(what);
            Ok(CardRegion { regions: Rc::clone(&self.regions), what })
        }
    }

    #[test]
    fn route_registers_memory_or_returns_the_reason() {
        let gpu = FakeGpu::new(1, 1 << 20);
        let card = Card { regions: Rc::default(), room: 1 };
        let (a, b) = (gpu.alloc(100).expect("room"), gpu.alloc(200).expect("room"));
        let first = route(&gpu, &gpu.part(&a, 20, 50), Ok(&card));
        assert!(matches!(first, Route::Direct(_)));
        assert_eq!(*card.regions.borrow(), [(gpu.addresses(&a).start + 20, 50)]);
        let why = |route: Route<CardRegion>| match route {
            Route::Direct(_) => panic!("registered"),
            Route::Pinned(why) => why.to_string(),
        };
        assert_eq!(why(route(&gpu, &b, Ok(&card))), "card cannot register the GPU's memory: no room");
        drop(first);
        assert!(card.regions.borrow().is_empty(), "dropping ends the registration");
        assert!(matches!(route(&gpu, &b, Ok(&card)), Route::Direct(_)));
        let no_card: Result<&Card, WhyPinned> = Err(WhyPinned::NoDevice);
        assert!(why(route(&gpu, &b, no_card)).contains("no RDMA device"));
        gpu.without_dma_buf("its kernel module is of another kind");
        assert!(why(route(&gpu, &b, Ok(&card))).ends_with("its kernel module is of another kind"));
    }

    #[test]
    fn staging_reports_why_it_is_pinned() {
        let staging = Staging::new(&FakeGpu::new(1, 1 << 20), 64).expect("room");
        assert_eq!(staging.why_pinned(), &WhyPinned::Network);
    }

    #[test]
    fn missing_gpu_or_adapter_is_reported() {
        match probe_direct() {
            Ok(Ok(device)) => assert!(!device.is_empty()),
            Ok(Err(why)) => assert!(!why.to_string().is_empty()),
            Err(error) => assert!(error.to_string().starts_with("CUDA unavailable: "), "{error}"),
        }
    }
}
