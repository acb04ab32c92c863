//! A GPU's memory in the hands of a network adapter: exported as dma-buf and registered, as GPUDirect RDMA has it.
//!
//! It takes three: a GPU that exports memory ([`Exported`]), an adapter that registers it ([`Adapter`]), and a
//! network whose packets an adapter takes from there. [`route`] tries the first two for a piece of memory and says
//! which one it was that could not. The third is missing so far: communicators send from memory of this process, so
//! what goes through them is staged ([`Staging::why_pinned`](super::Staging::why_pinned)).

use super::Gpu;
use super::error::GpuError;
use std::os::fd::OwnedFd;
use thiserror::Error;

/// Why a network adapter can't reach a GPU's memory.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NoDirect {
    /// The GPU or its driver does not export memory.
    #[error("the GPU exports no memory as dma-buf: {0}")]
    Gpu(String),
    /// There is no library of RDMA verbs, or it is too old.
    #[error("libibverbs registers no dma-buf: {0}")]
    Library(String),
    /// There is no RDMA device.
    #[error("there is no RDMA device: /sys/class/infiniband has none, or its driver's library is missing")]
    NoDevice,
    /// The device refused this memory.
    #[error("{device} does not register the GPU's memory: {why}")]
    Refused {
        /// The device.
        device: String,
        /// The system's reason.
        why: String,
    },
    /// The network takes what it sends from this process's memory.
    #[error("communicators send from memory of this process")]
    Network,
}

/// Memory of a GPU as the kernel hands it around.
#[derive(Debug)]
pub struct DmaBuf {
    /// What names it.
    pub fd: OwnedFd,
    /// Where the memory begins in it.
    pub at: u64,
    /// How long the memory is.
    pub len_bytes: u64,
    /// Its address on the GPU, by which an adapter is to know it.
    pub address: u64,
}

/// A GPU whose memory can be exported.
pub trait Exported: Gpu {
    /// Export memory.
    ///
    /// # Errors
    /// [`NoDirect::Gpu`].
    fn dma_buf(&self, memory: &Self::Memory) -> Result<DmaBuf, NoDirect>;
}

/// What registers memory of GPUs.
pub trait Adapter {
    /// What is registered; dropping it ends that.
    type Region;

    /// Register memory.
    ///
    /// # Errors
    /// [`NoDirect::Refused`].
    fn register(&self, memory: DmaBuf) -> Result<Self::Region, NoDirect>;
}

/// How a network gets at a GPU's memory.
#[derive(Debug)]
pub enum Route<R> {
    /// By itself.
    Direct(R),
    /// Through pinned memory of the process, and why.
    Pinned(NoDirect),
}

/// Let an adapter register a piece of memory, if there is one, or say why what goes through the network is staged.
pub fn route<G: Exported, A: Adapter>(gpu: &G, memory: &G::Memory, adapter: Result<&A, NoDirect>) -> Route<A::Region> {
    let registered = adapter.and_then(|adapter| adapter.register(gpu.dma_buf(memory)?));
    registered.map_or_else(Route::Pinned, Route::Direct)
}

/// Tell whether an adapter of this machine can register memory of its GPU, by trying: which it is.
///
/// # Errors
/// [`GpuError::Absent`] without a GPU or without the feature `cuda`.
pub fn probe_direct() -> Result<Result<String, NoDirect>, GpuError> {
    #[cfg(feature = "cuda")]
    return crate::gpu::cuda::probe_direct();
    #[cfg(not(feature = "cuda"))]
    Err(super::Absent::Feature.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Double, Staging};
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

        fn register(&self, memory: DmaBuf) -> Result<CardRegion, NoDirect> {
            let what = (memory.address, memory.len_bytes);
            if self.regions.borrow().len() == self.room {
                return Err(NoDirect::Refused { device: "card".into(), why: "no room".into() });
            }
            self.regions.borrow_mut().push(what);
            Ok(CardRegion { regions: Rc::clone(&self.regions), what })
        }
    }

    #[test]
    fn memory_is_registered_or_the_reason_named() {
        let gpu = Double::new(1, 1 << 20);
        let card = Card { regions: Rc::default(), room: 1 };
        let (a, b) = (gpu.alloc(100).expect("room"), gpu.alloc(200).expect("room"));
        let first = route(&gpu, &gpu.part(&a, 20, 50), Ok(&card));
        assert!(matches!(first, Route::Direct(_)));
        assert_eq!(*card.regions.borrow(), [(gpu.addresses(&a).start + 20, 50)]);
        let why = |route: Route<CardRegion>| match route {
            Route::Direct(_) => panic!("registered"),
            Route::Pinned(why) => why.to_string(),
        };
        assert_eq!(why(route(&gpu, &b, Ok(&card))), "card does not register the GPU's memory: no room");
        drop(first);
        assert!(card.regions.borrow().is_empty(), "what is dropped is registered no longer");
        assert!(matches!(route(&gpu, &b, Ok(&card)), Route::Direct(_)));
        let no_card: Result<&Card, NoDirect> = Err(NoDirect::NoDevice);
        assert!(why(route(&gpu, &b, no_card)).contains("no RDMA device"));
        gpu.without_dma_buf("its kernel module is of another kind");
        assert!(why(route(&gpu, &b, Ok(&card))).ends_with("its kernel module is of another kind"));
    }

    #[test]
    fn what_is_staged_says_why() {
        let staging = Staging::new(&Double::new(1, 1 << 20), 64).expect("room");
        assert_eq!(staging.why_pinned(), &NoDirect::Network);
    }

    #[test]
    fn a_machine_without_gpu_or_adapter_says_so() {
        match probe_direct() {
            Ok(Ok(device)) => assert!(!device.is_empty()),
            Ok(Err(why)) => assert!(!why.to_string().is_empty()),
            Err(error) => assert!(error.to_string().starts_with("no CUDA here, because "), "{error}"),
        }
    }
}
