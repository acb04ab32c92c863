//! The engine's threads. Each takes descriptors from its submission ring, runs chains, and puts completions into its
//! completion ring.
//!
//! Invariants:
//! - an accepted chain completes once, in the order of its queue;
//! - a thread, of the engine or of its user, sleeps only after it has armed its doorbell and checked once more.

use super::Notify;
use super::map::Map;
use super::run::Runner;
use crate::dma::{Capabilities, Completion, DESCRIPTOR_WORDS, Descriptor, Scope, Status, Step, Tag};
use crate::ring::{Consumer, Doorbell, OwnedRing, Pause, Producer, SpinPolicy};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};

/// The length of a completion in words: seq; slot and attempt; status and step.
pub(super) const COMPLETION_WORDS: usize = 3;

/// The number of descriptors that a thread takes from its ring at a time.
const BATCH: usize = 32;

/// A thread that sleeps and can be woken.
#[derive(Default)]
pub(super) struct Sleeper {
    bell: Doorbell<AtomicU32>,
    thread: Mutex<Option<Thread>>,
    gone: AtomicBool,
}

/// Notifies the engine's user when a thread exits, even by a panic.
pub(super) struct ExitNotice {
    pub(super) shared: Arc<Shared>,
    pub(super) sleeper: Arc<Sleeper>,
}

impl Drop for ExitNotice {
    fn drop(&mut self) {
        self.sleeper.gone.store(true, Ordering::Release);
        self.shared.user.ring();
        if let Some(notify) = &self.shared.notify {
            notify(0);
        }
    }
}

impl Sleeper {
    /// Wake the thread if it sleeps. Call it after publishing work.
    pub(super) fn ring(&self) {
        if self.bell.ring() {
            self.wake();
        }
    }

    /// Return whether the thread has exited. Everything that it did is visible then.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Return whether the thread sleeps or is about to.
    #[cfg(test)]
    pub(super) fn sleeps(&self) -> bool {
        self.bell.word().load(Ordering::Relaxed) != 0
    }

    /// Wake the thread unconditionally.
    pub(super) fn wake(&self) {
        if let Some(thread) = &*self.thread.lock().unwrap_or_else(PoisonError::into_inner) {
            thread.unpark();
        }
    }

    /// Wait until `ready` returns true or `deadline` passes, polling as `spin` specifies before sleeping. Returns
    /// whether it is ready.
    pub(super) fn wait(
        &self,
        spin: SpinPolicy,
        deadline: Option<std::time::Instant>,
        mut ready: impl FnMut() -> bool,
    ) -> bool {
        let mut polls = 0;
        loop {
            if ready() {
                return true;
            }
            match spin.after(polls) {
                Pause::Spin => std::hint::spin_loop(),
                Pause::Yield => thread::yield_now(),
                Pause::Sleep => {
                    let left = deadline.map(|deadline| deadline.saturating_duration_since(std::time::Instant::now()));
                    if left.is_some_and(|left| left.is_zero()) {
                        return false;
                    }
                    *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
                    self.bell.arm();
                    if ready() {
                        self.bell.disarm();
                        return true;
                    }
                    match left {
                        Some(left) => thread::park_timeout(left),
                        None => thread::park(),
                    }
                    self.bell.disarm();
                }
            }
            polls = polls.saturating_add(1);
        }
    }
}

/// State shared by the engine's threads and its user.
pub(super) struct Shared {
    pub(super) map: Map,
    pub(super) stop: AtomicBool,
    /// How often each scope was aborted, modulo 2^16.
    pub(super) scopes: [AtomicU16; 1 << u8::BITS],
    /// The user's thread while it waits for completions.
    pub(super) user: Sleeper,
    /// Chains that threads have accepted and not completed.
    pub(super) in_flight: AtomicU32,
    /// Called after a completion, for a user that waits elsewhere.
    pub(super) notify: Option<Notify>,
}

impl Shared {
    pub(super) fn generation(&self, scope: Scope) -> u16 {
        self.scopes[usize::from(scope.0)].load(Ordering::Acquire)
    }
}

/// One engine thread.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) sleeper: Arc<Sleeper>,
    pub(super) submissions: Consumer<OwnedRing<DESCRIPTOR_WORDS>, DESCRIPTOR_WORDS>,
    pub(super) completions: Producer<OwnedRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
    pub(super) capabilities: Capabilities,
    pub(super) strict: bool,
    pub(super) spin: SpinPolicy,
}

impl Worker {
    /// Run until the engine stops.
    pub(super) fn run(mut self) {
        default_float_environment();
        let shared = self.shared.clone();
        let mut runner = Runner::new(&shared.map, self.capabilities, self.strict);
        let mut batch = [[0; DESCRIPTOR_WORDS]; BATCH];
        let mut chain: Vec<Step> = Vec::with_capacity(self.capabilities.max_steps as usize);
        while !shared.stop.load(Ordering::Acquire) {
            // Both rings are private to this process, so poisoning would be a bug in this module.
            let taken = self.submissions.pop_batch(&mut batch).expect("the engine's own ring");
            if taken == 0 {
                let (submissions, stop) = (&mut self.submissions, &shared.stop);
                self.sleeper.wait(self.spin, None, || {
                    stop.load(Ordering::Acquire) || submissions.available().expect("the engine's own ring") > 0
                });
                continue;
            }
            for words in &batch[..taken] {
                let descriptor = Descriptor::parse(words).expect("the engine's own descriptors");
                chain.push(descriptor.step);
                if descriptor.more {
                    continue;
                }
                let aborted = || shared.generation(descriptor.scope) != descriptor.scope_generation;
                let (status, step) = if aborted() { (Status::Aborted, 0) } else { runner.run(&chain, aborted) };
                chain.clear();
                self.complete(Completion { tag: descriptor.tag, status, step });
            }
        }
    }

    fn complete(&mut self, completion: Completion) {
        // The user submits no more chains than there is room for completions.
        let pushed = self.completions.push(&to_words(&completion)).expect("the engine's own ring");
        assert!(pushed, "there is room for the completion of every chain in flight");
        let left = self.shared.in_flight.fetch_sub(1, Ordering::Relaxed) - 1;
        self.shared.user.ring();
        if let Some(notify) = &self.shared.notify {
            notify(left);
        }
    }
}

fn to_words(completion: &Completion) -> [u64; COMPLETION_WORDS] {
    let Completion { tag, status, step } = *completion;
    [tag.seq, u64::from(tag.slot) | u64::from(tag.attempt) << 32, u64::from(status as u8) | u64::from(step) << 16]
}

pub(super) fn from_words(words: [u64; COMPLETION_WORDS]) -> Completion {
    Completion {
        tag: Tag { seq: words[0], slot: words[1] as u32, attempt: (words[1] >> 32) as u32 },
        status: Status::from_wire(words[2] as u8).unwrap_or(Status::Hardware),
        step: (words[2] >> 16) as u16,
    }
}

/// Set rounding to nearest even and keep subnormals, whatever the parent thread has set: results must not depend on it
/// (PROTOCOL 9).
fn default_float_environment() {
    // Miri does not support assembly, and always has the default environment.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        const MXCSR_DEFAULT: u32 = 0x1f80;
        let mxcsr = MXCSR_DEFAULT;
        // SAFETY: sets the value that Rust assumes (x86-64 psABI, 3.2.1).
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mxcsr, options(nostack, readonly)) };
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    {
        // SAFETY: sets the value that Rust assumes (AAPCS64, 6.1.2).
        unsafe { std::arch::asm!("msr fpcr, xzr", options(nomem, nostack)) };
    }
}
