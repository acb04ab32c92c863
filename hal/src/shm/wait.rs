//! Sleeps on doorbells and rings them, across processes.
//!
//! A thread sleeps in `futex(2)`, which compares the doorbell's word and blocks in one step, or in `futex_waitv(2)`
//! (Linux 5.16) if several ranks can wake it. Invariant: after a sleep is announced and before the thread blocks, the
//! condition is checked again; see [`Doorbell`]. A peer that corrupts the word can delay this side only until its
//! deadline.

use crate::ring::{Doorbell, Pause, SpinPolicy};
use rustix::io::Errno;
use rustix::thread::ClockId;
use rustix::thread::futex::{self, Flags, Timespec, Wait, WaitFlags, WaitPtr, WaitvFlags};
use rustix::time::clock_gettime;
use std::sync::atomic::AtomicU32;
use std::thread;
use std::time::{Duration, Instant};

/// The maximum number of doorbells a thread can sleep on: the kernel's limit.
pub const SLEEPER_BELLS_MAX: usize = 128;

const ASLEEP: u32 = Doorbell::<&AtomicU32>::ASLEEP;

/// Why a thread cannot sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// No doorbell, or more than the kernel accepts.
    #[error("a thread can sleep on 1 to {SLEEPER_BELLS_MAX} doorbells, not {0}")]
    Bells(usize),
    /// The kernel lacks `futex_waitv`.
    #[error("sleeping on several doorbells needs futex_waitv: use Linux 5.16 or later")]
    OldKernel,
    /// The system call failed.
    #[error("futex: {0}")]
    System(Errno),
}

/// How often a thread polls between two looks at the clock.
const DEADLINE_POLLS: u32 = 64;

/// Wake the thread that sleeps on a doorbell, after something was published for it.
pub fn ring(bell: Doorbell<&AtomicU32>) {
    if bell.ring() {
        wake(bell);
    }
}

fn wake(bell: Doorbell<&AtomicU32>) {
    // This fails only for an invalid address. Each word has at most one sleeper.
    let _ = futex::wake(bell.word(), Flags::empty(), 1);
}

/// Waits for a condition: spins, yields, then sleeps on doorbells.
#[derive(Debug, Clone, Copy)]
pub struct Waiter {
    spin: SpinPolicy,
}

impl Waiter {
    /// Wait with this spin.
    pub const fn new(spin: SpinPolicy) -> Self {
        Self { spin }
    }

    /// Wait until `ready` returns true or `deadline` has passed (`None`: no limit); true if it is ready.
    ///
    /// The thread or process that makes the condition true rings one of the bells afterwards. `ready` is called often
    /// and has to be cheap.
    ///
    /// # Errors
    /// [`WaitError`] if the thread has to sleep and cannot.
    pub fn wait(
        &self,
        bells: &[Doorbell<&AtomicU32>],
        deadline: Option<Instant>,
        mut ready: impl FnMut() -> bool,
    ) -> Result<bool, WaitError> {
        let mut polls = 0;
        loop {
            if ready() {
                return Ok(true);
            }
            let pause = self.spin.after(polls);
            let is_awake = pause != Pause::Sleep;
            if is_awake
                && polls % DEADLINE_POLLS == DEADLINE_POLLS - 1
                && deadline.is_some_and(|at| at <= Instant::now())
            {
                return Ok(false);
            }
            match pause {
                Pause::Spin => std::hint::spin_loop(),
                Pause::Yield => thread::yield_now(),
                Pause::Sleep => {
                    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left.is_some_and(|left| left.is_zero()) {
                        return Ok(false);
                    }
                    bells.iter().for_each(Doorbell::arm);
                    let slept = if ready() { Ok(()) } else { sleep(bells, left) };
                    bells.iter().for_each(Doorbell::disarm);
                    slept?;
                }
            }
            polls = polls.saturating_add(1);
        }
    }
}

/// Sleep until a bell is rung; may also return spuriously.
fn sleep(bells: &[Doorbell<&AtomicU32>], left: Option<Duration>) -> Result<(), WaitError> {
    // A duration out of the structure's range (292 billion years) means no timeout.
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    let slept = match bells {
        [bell] => futex::wait(bell.word(), Flags::empty(), ASLEEP.to_le(), left.as_ref()),
        [_, _, ..] if bells.len() <= SLEEPER_BELLS_MAX => sleep_on_many(bells, left),
        _ => return Err(WaitError::Bells(bells.len())),
    };
    match slept {
        // Rung before or during the sleep, interrupted by a signal, or timed out.
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
        Err(Errno::NOSYS) => Err(WaitError::OldKernel),
        Err(errno) => Err(WaitError::System(errno)),
    }
}

fn sleep_on_many(bells: &[Doorbell<&AtomicU32>], left: Option<Timespec>) -> Result<(), Errno> {
    let mut waits = [Wait::new(); SLEEPER_BELLS_MAX];
    for (wait, bell) in waits.iter_mut().zip(bells) {
        wait.val = ASLEEP.to_le().into();
        wait.uaddr = WaitPtr::new(std::ptr::from_ref(*bell.word()).cast_mut().cast());
        wait.flags = WaitFlags::SIZE_U32;
    }
    // This call takes an absolute time, the other one a duration.
    let until = left.map(|left| clock_gettime(ClockId::Monotonic) + left);
    futex::waitv(&waits[..bells.len()], WaitvFlags::empty(), until.as_ref(), ClockId::Monotonic).map(|_| ())
}
