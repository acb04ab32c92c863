//! An engine's configuration, start errors and statistics.

use crate::dma::{Profile, Status};
use crate::ring::SpinPolicy;
use std::io;

/// How strictly the engine checks chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Strictness {
    /// Like hardware: regions and bounds.
    #[default]
    Hardware,
    /// Also the alignment of addresses to their elements' values, and conflicts between chains in flight. Such chains
    /// complete with an error.
    Strict,
    /// Like [`Strictness::Strict`], and [`Engine::poll`](crate::dma::Engine::poll) panics on a completion whose status
    /// is the user's error.
    Assert,
}

/// The configuration of an engine.
#[derive(Debug, Clone, Copy)]
pub struct DmaConfig {
    /// The profile to emulate.
    pub profile: Profile,
    /// The number of threads, each with a queue: 1 to [`DmaConfig::THREADS_MAX`], or 0 with `shares_work`.
    pub threads: usize,
    /// The number of steps that each queue can have in flight until they are polled: a power of two, at most
    /// [`crate::ring::CAPACITY_MAX`].
    pub queue_depth: u32,
    /// The maximum number of steps of a chain, at most `queue_depth`.
    pub max_steps: u32,
    /// The maximum number of mapped regions.
    pub regions: usize,
    /// The required alignment of every address, in bytes: a power of two.
    pub alignment_bytes: u32,
    /// How strictly chains are checked.
    pub strictness: Strictness,
    /// How long threads poll for work before they sleep.
    pub spin: SpinPolicy,
    /// Chains that write at most this many bytes run on the submitting thread, because running a short chain takes less
    /// time than waking another thread. That thread must have the default float environment. 0: no chain does.
    pub inline_len_bytes: u64,
    /// The submitting thread also takes a share of the other chains, which it runs in
    /// [`EmuEngine::work`](super::EmuEngine::work) and [`WaitEngine::wait`](crate::dma::WaitEngine::wait). The engine
    /// then needs no threads of its own.
    pub shares_work: bool,
    /// A function that each thread first calls with its number, for example to pin itself to a core.
    pub on_start: Option<fn(usize)>,
}

impl DmaConfig {
    /// The maximum number of threads.
    pub const THREADS_MAX: usize = 64;

    /// Return the default configuration for `threads` threads on this machine.
    pub fn new(profile: Profile, threads: usize) -> Self {
        Self {
            profile,
            threads,
            queue_depth: 1024,
            max_steps: 256,
            regions: 1024,
            alignment_bytes: 1,
            strictness: Strictness::Hardware,
            // The submitting thread needs a core as well.
            spin: SpinPolicy::for_this_machine(threads + 1),
            inline_len_bytes: 0,
            shares_work: false,
            on_start: None,
        }
    }
}

/// A function that the engine's threads call; see [`EmuEngine::start_notifying`](super::EmuEngine::start_notifying).
pub type Notify = Box<dyn Fn(u32) + Send + Sync>;

/// Why an engine cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration is invalid.
    #[error(
        "invalid DMA engine configuration: it needs 1 to {} threads (0 with shares_work), a queue depth that is a power \
         of two up to {}, 1 to queue_depth steps per chain, and an alignment that is a power of two: {config:?}",
        DmaConfig::THREADS_MAX,
        crate::ring::CAPACITY_MAX
    )]
    Config {
        /// The configuration.
        config: Box<DmaConfig>,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread for the DMA engine: {0}")]
    Thread(#[from] io::Error),
}

/// An engine's statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DmaStats {
    /// Chains accepted.
    pub chains: u64,
    /// Steps of the accepted chains.
    pub steps: u64,
    /// Completions that were polled, by [`Status`].
    pub completed: [u64; Status::ALL.len()],
}
