//! The board's DMA engine: an emulated one, which accesses memory of this machine's processes; an RDMA device's, which
//! also accesses that of ranks on other hosts; or an in-process stand-in for the latter, for tests.
//!
//! All connections share one protection domain, in which nothing is exposed to peers: ranks only send messages, and the
//! board's own memory is registered for local access. Each rank has a protection domain of its own, so no rank's key
//! grants access to another's memory.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use sumac_hal::dma::{
    Capabilities, Chain, Completion, Engine, LocalMemory, RegionKey, Scope, Span, Status, SubmitError,
};
use sumac_hal::emu::dma::EmuEngine;
use sumac_hal::mmio::EntryStatus;
use sumac_hal::remote::{Exchange, ExchangeDevice, Link, LinkEnd, LinkFailure, Memory};
use sumac_hal::shm::Region;
use sumac_hal::traffic_class::TrafficClass;
#[cfg(feature = "verbs")]
use sumac_hal::{
    remote::BUFFERS,
    verbs::{OneSidedEnd, PeerEngine, SharedReceives, VerbsConfig, VerbsDomain, VerbsError, VerbsLink},
};

/// The maximum number of ranks on other hosts.
#[cfg(feature = "verbs")]
const RANKS_MAX: usize = 128;

/// An RDMA device's engine, and its protection domain.
#[cfg(feature = "verbs")]
pub(super) struct VerbsEngine {
    engine: PeerEngine,
    domain: VerbsDomain,
}

/// A board's DMA engine.
pub(super) enum BoardEngine {
    Emulated(Box<EmuEngine>),
    Exchange(Box<ExchangeDevice>),
    #[cfg(feature = "verbs")]
    Verbs(Box<VerbsEngine>),
}

/// Evaluates an expression on whichever engine there is.
macro_rules! each {
    ($board:expr, $engine:ident => $does:expr) => {
        match $board {
            BoardEngine::Emulated($engine) => $does,
            BoardEngine::Exchange($engine) => $does,
            #[cfg(feature = "verbs")]
            BoardEngine::Verbs(verbs) => {
                let $engine = &mut verbs.engine;
                $does
            }
        }
    };
}

impl BoardEngine {
    /// Open the engine of the RDMA port `name` for `regions` regions, preferring the GID of the address `prefer`; or
    /// connect the emulated engine to the in-process exchange of that name.
    pub(super) fn remote(
        emulated: EmuEngine,
        name: &str,
        (prefer, traffic_class): (std::net::IpAddr, TrafficClass),
        regions: usize,
    ) -> Result<Self, LinkFailure> {
        if let Some(exchange) = Exchange::named(name) {
            return Ok(Self::Exchange(Box::new(ExchangeDevice::new(emulated, exchange)?)));
        }
        #[cfg(feature = "verbs")]
        {
            let link = name.parse::<VerbsLink>().map_err(|why| LinkFailure(why.to_string()))?;
            let config = VerbsConfig { link, prefer: Some(prefer), traffic_class, ..VerbsConfig::default() };
            let open = || -> Result<VerbsEngine, VerbsError> {
                let domain = VerbsDomain::open(&config)?;
                let receives = SharedReceives::new(&domain, RANKS_MAX * BUFFERS)?;
                Ok(VerbsEngine { engine: PeerEngine::with_receives(&domain, regions, receives), domain })
            };
            Ok(Self::Verbs(Box::new(open().map_err(failure)?)))
        }
        #[cfg(not(feature = "verbs"))]
        {
            let _ = regions;
            // Fails with what is missing.
            sumac_hal::rank_link::open(name, prefer, traffic_class).map(|_| Self::Emulated(Box::new(emulated)))
        }
    }

    /// Return whether there are completions or messages.
    pub(super) fn has_work(&mut self) -> bool {
        match self {
            Self::Emulated(engine) => engine.has_completions(),
            Self::Exchange(device) => device.has_work() || device.engine().has_completions(),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => verbs.engine.has_work(),
        }
    }

    /// Return whether the RDMA device has failed.
    pub(super) fn has_failed(&self) -> bool {
        match self {
            Self::Emulated(_) | Self::Exchange(_) => false,
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => verbs.engine.has_failed(),
        }
    }

    /// Do the caller's share of the engine's work; false if there is none.
    pub(super) fn work(&mut self) -> bool {
        match self {
            Self::Emulated(engine) => engine.work(),
            Self::Exchange(device) => device.engine().work(),
            // The card does all of it.
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => false,
        }
    }

    /// Map memory of a process on this machine.
    pub(super) fn map(&mut self, key: RegionKey, memory: Arc<Region>) -> Result<(), EntryStatus> {
        match self {
            Self::Emulated(engine) => engine.map(key, memory).map_err(|_| EntryStatus::NoResources),
            Self::Exchange(device) => device.engine().map(key, memory).map_err(|_| EntryStatus::NoResources),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => verbs.engine.map_memory(key, memory).map_err(|_| EntryStatus::NoResources),
        }
    }

    /// Map memory of a rank on another host.
    pub(super) fn map_remote(&mut self, key: RegionKey, peer: u16, memory: &Memory) -> Result<(), EntryStatus> {
        match self {
            Self::Emulated(_) => Err(EntryStatus::BadRegion),
            Self::Exchange(device) => device
                .map_remote(key, (peer, &memory.region), memory.lands)
                .map_err(|error| error.map_or(EntryStatus::BadRegion, |_| EntryStatus::NoResources)),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => {
                let (engine, region) = (&mut verbs.engine, memory.region);
                let mapped = match memory.lands {
                    true => engine.map_landing(key, peer, region),
                    false => engine.map_remote(key, peer, region),
                };
                mapped.map_err(|_| EntryStatus::NoResources)
            }
        }
    }

    /// Map the board's own memory, for the engine and its processor.
    pub(super) fn map_own(&mut self, key: RegionKey, memory: Arc<Region>) -> Result<(), LinkFailure> {
        match self {
            Self::Emulated(engine) => {
                engine.map_local_memory(key, memory).map_err(|error| LinkFailure(error.to_string()))
            }
            Self::Exchange(device) => {
                device.engine().map_local_memory(key, memory).map_err(|error| LinkFailure(error.to_string()))
            }
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => {
                verbs.engine.map_local_memory(key, memory).map_err(|error| LinkFailure(error.to_string()))
            }
        }
    }

    /// Unmap memory; afterwards the engine does not access it. False if it was not mapped.
    pub(super) fn unmap(&mut self, key: RegionKey) -> bool {
        each!(self, engine => engine.unmap(key))
    }

    /// Connect to a rank on another host; returns the peer number and the address of this end.
    pub(super) fn connect(&mut self, rank: &LinkEnd) -> Result<(u16, LinkEnd), LinkFailure> {
        match self {
            Self::Emulated(_) => Err(LinkFailure("the board has no RDMA port".into())),
            Self::Exchange(device) => device.connect(rank),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => {
                let VerbsEngine { engine, domain } = &mut **verbs;
                if engine.peers() == RANKS_MAX {
                    return Err(LinkFailure(format!("the limit of {RANKS_MAX} ranks on other hosts is reached")));
                }
                let connection = engine.messaging(domain).map_err(failure)?;
                let mut connection = connection.ok_or_else(|| LinkFailure("the engine has no queue".into()))?;
                connection.connect(&OneSidedEnd::from_link_end(rank)).map_err(failure)?;
                let end = connection.end().to_link_end();
                Ok((engine.attach(connection), end))
            }
        }
    }

    /// End a rank's connection. Afterwards no operation takes effect in its memory, and its chains end.
    pub(super) fn close(&mut self, peer: u16) {
        match self {
            Self::Emulated(_) => {}
            Self::Exchange(device) => device.close(peer),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => {
                if let Err(error) = verbs.engine.detach(peer) {
                    tracing::error!(%error, "could not stop a rank's connection; it was destroyed");
                }
            }
        }
    }

    /// Call `does` with a rank's link; `None` if it has ended.
    pub(super) fn with_link<R>(&mut self, peer: u16, does: impl FnOnce(&mut dyn Link) -> R) -> Option<R> {
        match self {
            Self::Emulated(_) => None,
            Self::Exchange(device) => device.link(peer).map(does),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => verbs.engine.link(peer).map(|mut link| does(&mut link)),
        }
    }

    /// Let [`BoardEngine::file`] become readable on the next completion or message. Poll once more after this call.
    pub(super) fn arm(&mut self) {
        match self {
            Self::Emulated(_) => {}
            Self::Exchange(device) => device.arm(),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => verbs.engine.arm(),
        }
    }

    /// Return the descriptor that becomes readable, if there is one.
    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Emulated(_) => None,
            Self::Exchange(device) => Some(device.file()),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => verbs.engine.file(),
        }
    }
}

#[cfg(feature = "verbs")]
fn failure(error: VerbsError) -> LinkFailure {
    LinkFailure(error.to_string())
}

impl Engine for BoardEngine {
    fn capabilities(&self) -> &Capabilities {
        match self {
            Self::Emulated(engine) => engine.capabilities(),
            Self::Exchange(device) => device.capabilities(),
            #[cfg(feature = "verbs")]
            Self::Verbs(verbs) => verbs.engine.capabilities(),
        }
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        each!(self, engine => engine.submit(chain))
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        each!(self, engine => engine.poll(completions))
    }

    fn abort(&mut self, scope: Scope) {
        each!(self, engine => engine.abort(scope));
    }
}

impl LocalMemory for BoardEngine {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        each!(self, engine => engine.with_local(dst, src, work))
    }
}
