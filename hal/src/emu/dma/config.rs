//! What an engine is made of, why it was not started, and what it counts.

use crate::dma::{Profile, Status};
use crate::ring::Patience;
use std::io;

/// How much the engine minds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Strictness {
    /// As hardware: bounds and regions.
    #[default]
    Hardware,
    /// Also addresses that are no multiple of the size of their elements' values, and chains in flight that get in each other's way:
    /// they complete with an error, and are counted.
    Strict,
    /// As [`Strictness::Strict`], and [`Engine::poll`](crate::dma::Engine::poll) panics where a completion says that its user was wrong.
    Assert,
}

/// What an engine is made of.
#[derive(Debug, Clone, Copy)]
pub struct DmaConfig {
    /// What it plays.
    pub profile: Profile,
    /// How many threads work, each with a queue; 1 to [`DmaConfig::THREADS_MAX`], or 0 if the user helps.
    pub threads: usize,
    /// Steps that each queue has in flight, until they are polled: a power of two, at most [`crate::ring::CAPACITY_MAX`].
    pub queue_depth: u32,
    /// The most steps of a chain, at most `queue_depth`.
    pub max_steps: u32,
    /// How many regions can be mapped.
    pub regions: usize,
    /// What every address has to be a multiple of, in bytes: a power of two.
    pub alignment_bytes: u32,
    /// How much it minds.
    pub strictness: Strictness,
    /// How long threads look for work before they sleep.
    pub patience: Patience,
    /// Chains that write no more than this in all are done by the thread that submits them: a short one takes less time
    /// than waking another thread does. That thread has the default float environment. 0: none.
    pub inline_len_bytes: u64,
    /// The thread that submits takes its share of the other chains as well, by [`EmuEngine::work`](super::EmuEngine::work) or
    /// [`WaitEngine::wait`](crate::dma::WaitEngine::wait); then there may be no other threads.
    pub helps: bool,
    /// What each thread calls first, with its number: to take a core for its own, where the machine's owner wants that.
    pub on_start: Option<fn(usize)>,
}

impl DmaConfig {
    /// The most threads of an engine.
    pub const THREADS_MAX: usize = 64;

    /// Describe an engine of `threads` threads that suits this machine.
    pub fn new(profile: Profile, threads: usize) -> Self {
        Self {
            profile,
            threads,
            queue_depth: 1024,
            max_steps: 256,
            regions: 1024,
            alignment_bytes: 1,
            strictness: Strictness::Hardware,
            // Its user wants a core as well.
            patience: Patience::for_this_machine(threads + 1),
            inline_len_bytes: 0,
            helps: false,
            on_start: None,
        }
    }
}

/// What an engine's threads call; see [`EmuEngine::start_notifying`](super::EmuEngine::start_notifying).
pub type Notify = Box<dyn Fn(u32) + Send + Sync>;

/// Why an engine was not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A number is out of its range.
    #[error(
        "an engine has 1 to {} threads (0 if its user helps), a queue depth that is a power of two, at most {}, and at least as much as \
             a chain has steps, which is at least 1: not {config:?}",
        DmaConfig::THREADS_MAX,
        crate::ring::CAPACITY_MAX
    )]
    Config {
        /// What was asked for.
        config: Box<DmaConfig>,
    },
    /// The system has no thread to give.
    #[error("no thread for the engine: {0}")]
    Thread(#[from] io::Error),
}

/// What an engine has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DmaStats {
    /// Chains that it took.
    pub chains: u64,
    /// Steps of those.
    pub steps: u64,
    /// Chains that were polled, by [`Status`].
    pub ended: [u64; Status::ALL.len()],
}
