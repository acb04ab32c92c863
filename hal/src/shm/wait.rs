//! Sleeping on doorbells and ringing them, across processes.
//!
//! A sleep is `futex(2)`, which compares the doorbell's word and blocks in one step, or `futex_waitv(2)` (Linux 5.16)
//! for a device that several ranks can wake. Invariant: between announcing a sleep and sleeping, the news is looked at
//! again; see [`Doorbell`]. A peer that spoils the word delays this side only until the deadline of its sleep.

use crate::ring::{Doorbell, Patience, Pause};
use rustix::io::Errno;
use rustix::thread::ClockId;
use rustix::thread::futex::{self, Flags, Timespec, Wait, WaitFlags, WaitPtr, WaitvFlags};
use rustix::time::clock_gettime;
use std::sync::atomic::AtomicU32;
use std::thread;
use std::time::{Duration, Instant};

/// The most doorbells that one can sleep on: the kernel's limit.
pub const SLEEPER_BELLS_MAX: usize = 128;

const ASLEEP: u32 = Doorbell::<&AtomicU32>::ASLEEP;

/// Why nobody can sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// Nothing could wake the sleeper, or the kernel takes fewer.
    #[error("one sleeps on 1 to {SLEEPER_BELLS_MAX} doorbells: not {0}")]
    Bells(usize),
    /// The kernel is too old.
    #[error("sleeping on several doorbells needs futex_waitv, which Linux has since 5.16")]
    OldKernel,
    /// The system refuses.
    #[error("futex: {0}")]
    System(Errno),
}

/// Wake whoever sleeps on a doorbell, after something was published for it.
pub fn ring(bell: Doorbell<&AtomicU32>) {
    if bell.ring() {
        wake(bell);
    }
}

fn wake(bell: Doorbell<&AtomicU32>) {
    // It can fail only for an address that is none. One sleeper has one word.
    let _ = futex::wake(bell.word(), Flags::empty(), 1);
}

/// How one thread waits for news.
#[derive(Debug, Clone, Copy)]
pub struct Waiter {
    patience: Patience,
}

impl Waiter {
    /// Wait with this patience.
    pub const fn new(patience: Patience) -> Self {
        Self { patience }
    }

    /// Wait until there is news or `deadline` has passed (`None`: no limit); true if there is news.
    ///
    /// Whoever makes news rings one of the bells afterwards. `news` is called often, and has to be quick.
    ///
    /// # Errors
    /// [`WaitError`], where it would have to sleep and can't.
    pub fn wait(
        &self,
        bells: &[Doorbell<&AtomicU32>],
        deadline: Option<Instant>,
        mut news: impl FnMut() -> bool,
    ) -> Result<bool, WaitError> {
        let mut looks = 0;
        loop {
            if news() {
                return Ok(true);
            }
            match self.patience.after(looks) {
                Pause::Spin => std::hint::spin_loop(),
                Pause::Yield => thread::yield_now(),
                Pause::Sleep => {
                    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left.is_some_and(|left| left.is_zero()) {
                        return Ok(false);
                    }
                    bells.iter().for_each(Doorbell::announce);
                    let slept = if news() { Ok(()) } else { sleep(bells, left) };
                    bells.iter().for_each(Doorbell::awake);
                    slept?;
                }
            }
            looks = looks.saturating_add(1);
        }
    }
}

/// Sleep while no bell was rung; also return for no reason.
fn sleep(bells: &[Doorbell<&AtomicU32>], left: Option<Duration>) -> Result<(), WaitError> {
    // Out of the structure's range means never: 292 billion years.
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    let slept = match bells {
        [bell] => futex::wait(bell.word(), Flags::empty(), ASLEEP.to_le(), left.as_ref()),
        [_, _, ..] if bells.len() <= SLEEPER_BELLS_MAX => sleep_on_many(bells, left),
        _ => return Err(WaitError::Bells(bells.len())),
    };
    match slept {
        // Rung before the sleep, rung while asleep, a signal, or time is up.
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
    // This call takes a time of the clock, the other one a duration.
    let until = left.map(|left| clock_gettime(ClockId::Monotonic) + left);
    futex::waitv(&waits[..bells.len()], WaitvFlags::empty(), until.as_ref(), ClockId::Monotonic).map(|_| ())
}
