//! Wake-ups that are never lost, and are sent only to a side that sleeps.
//!
//! A wake-up costs a system call or an interrupt, and most of the time the other side is awake. A side that is about to
//! sleep therefore arms its doorbell, *checks again* for work, and only then sleeps. A side that publishes work rings
//! the doorbell, which sends a wake-up only if it is armed. Both sides store, fence and load, in that order, so at
//! least one of them sees the other's store (Dekker's pattern): either the ringer sees the armed doorbell, or the
//! sleeper sees the work.
//!
//! ```text
//! sleeper                                 ringer
//! word = ASLEEP                           publish work
//! fence                                   fence
//! work? word = AWAKE, go on               word == ASLEEP? word = AWAKE, wake
//! sleep while word == ASLEEP              (otherwise one load of a shared line)
//! ```
//!
//! The sleep must compare the word and block atomically, as `futex(2)` does. A peer that writes garbage into the word
//! can cause spurious or missing wake-ups and nothing worse, so a sleeper that does not trust its peer limits its
//! sleep.

use core::sync::atomic::{AtomicU32, Ordering, fence};

/// A word that both sides can access.
pub trait Word {
    /// Load the word; relaxed ordering suffices.
    fn load(&self) -> u32;

    /// Store the word; relaxed ordering suffices.
    fn store(&self, value: u32);

    /// Exchange the word; relaxed ordering suffices.
    fn swap(&self, value: u32) -> u32;

    /// Execute a sequentially consistent fence.
    fn fence(&self);
}

impl Word for AtomicU32 {
    fn load(&self) -> u32 {
        u32::from_le(self.load(Ordering::Relaxed))
    }

    fn store(&self, value: u32) {
        self.store(value.to_le(), Ordering::Relaxed);
    }

    fn swap(&self, value: u32) -> u32 {
        u32::from_le(self.swap(value.to_le(), Ordering::Relaxed))
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

impl<W: Word + ?Sized> Word for &W {
    fn load(&self) -> u32 {
        (**self).load()
    }

    fn store(&self, value: u32) {
        (**self).store(value);
    }

    fn swap(&self, value: u32) -> u32 {
        (**self).swap(value)
    }

    fn fence(&self) {
        (**self).fence();
    }
}

/// A doorbell that wakes one sleeper. Any number of ringers may share it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Doorbell<W> {
    word: W,
}

impl<W: Word> Doorbell<W> {
    /// The word's value while the owner sleeps or is about to.
    pub const ASLEEP: u32 = 1;

    /// The word's value otherwise.
    pub const AWAKE: u32 = 0;

    /// Return a doorbell over a word that holds [`Doorbell::AWAKE`].
    pub const fn new(word: W) -> Self {
        Self { word }
    }

    /// Return the word. The owner sleeps while it is [`Doorbell::ASLEEP`].
    pub const fn word(&self) -> &W {
        &self.word
    }

    /// Announce a sleep. Check for work once more between this call and the sleep.
    pub fn arm(&self) {
        self.word.store(Self::ASLEEP);
        self.word.fence();
    }

    /// Revoke the announcement, after a sleep or in place of one.
    pub fn disarm(&self) {
        self.word.store(Self::AWAKE);
    }

    /// Call it after publishing work. Returns true if the caller, and no other ringer, must wake the sleeper.
    #[must_use = "if this returns true, the caller must wake the sleeper"]
    pub fn ring(&self) -> bool {
        self.word.fence();
        self.word.load() == Self::ASLEEP && self.word.swap(Self::AWAKE) == Self::ASLEEP
    }
}

/// The count at which a sleeper is to be woken, so that a rank that waits for a whole operation is not woken for each
/// chunk. virtio calls this `used_event`.
///
/// The sleeper sets the threshold before it arms its [`Doorbell`]. The other side compares its count after each
/// increase and rings the doorbell once the threshold is reached. Either it sees the new threshold, or the sleeper's
/// second check sees the count: this is the doorbell's pattern, with the same fences.
#[derive(Debug, Clone, Copy, Default)]
pub struct WakeThreshold<W> {
    word: W,
}

impl<W: Word> WakeThreshold<W> {
    /// Return the threshold that is stored in `word`.
    pub const fn new(word: W) -> Self {
        Self { word }
    }

    /// Set the threshold to `count`, modulo 2^32. Call it before [`Doorbell::arm`].
    pub fn set(&self, count: u32) {
        self.word.store(count);
    }

    /// Call it after publishing `count`. Returns whether the threshold is reached.
    pub fn is_reached(&self, count: u32) -> bool {
        self.word.fence();
        // Count and threshold are less than 2^31 apart.
        count.wrapping_sub(self.word.load()) as i32 >= 0
    }
}
