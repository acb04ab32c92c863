//! Waking a sleeper, and nobody else, without losing a wake-up.
//!
//! A wake-up is a system call (or an interrupt), and most of the time the other side is awake. So who is about to
//! sleep says so in one word, *looks again*, and only then sleeps; who has published something wakes a sleeper that
//! has said so. Both sides store, fence and load, in that order, so at least one of them sees the other's store
//! (Dekker's pattern): either the ringer sees the announcement, or the sleeper sees the news.
//!
//! ```text
//! sleeper                                 ringer
//! word = ASLEEP                           publish news
//! fence                                   fence
//! news there? word = AWAKE, go on         word == ASLEEP? word = AWAKE, wake
//! sleep while word == ASLEEP              (else nothing: a load of a shared line)
//! ```
//!
//! The sleep itself has to compare the word and block in one step, as `futex(2)` does. The word only ever delays:
//! a peer that writes nonsense into it can wake the sleeper for nothing or not at all, so a sleeper that does not
//! trust its peer bounds its sleep.

use core::sync::atomic::{AtomicU32, Ordering, fence};

/// A word that both sides can reach.
pub trait Word {
    /// Load the word; no order is needed.
    fn load(&self) -> u32;

    /// Store the word; no order is needed.
    fn store(&self, value: u32);

    /// Exchange the word; no order is needed.
    fn swap(&self, value: u32) -> u32;

    /// A sequentially consistent fence.
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

/// What one sleeper is woken by; any number of others may ring it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Doorbell<W> {
    word: W,
}

impl<W: Word> Doorbell<W> {
    /// The word's value while its owner sleeps, or is about to.
    pub const ASLEEP: u32 = 1;

    /// The word's value otherwise.
    pub const AWAKE: u32 = 0;

    /// Make a doorbell of a word that holds [`Doorbell::AWAKE`].
    pub const fn new(word: W) -> Self {
        Self { word }
    }

    /// Return the word, to sleep on while it is [`Doorbell::ASLEEP`].
    pub const fn word(&self) -> &W {
        &self.word
    }

    /// Announce a sleep. What is waited for must be looked at once more between this and the sleep.
    pub fn announce(&self) {
        self.word.store(Self::ASLEEP);
        self.word.fence();
    }

    /// Take the announcement back: after a sleep, or instead of one.
    pub fn awake(&self) {
        self.word.store(Self::AWAKE);
    }

    /// Tell, after something was published, whether a sleeper has to be woken, by exactly the caller.
    #[must_use = "a sleeper that nobody wakes sleeps on"]
    pub fn ring(&self) -> bool {
        self.word.fence();
        self.word.load() == Self::ASLEEP && self.word.swap(Self::AWAKE) == Self::ASLEEP
    }
}

/// How far a count has to come before a sleeper wants to be woken: who waits for a whole operation is not woken for each
/// of its chunks.
///
/// The sleeper sets it before it announces its sleep. Whoever has brought the count on looks at it, and rings the
/// [`Doorbell`] if it is reached. Either that look sees the new word, or the sleeper's second look sees the news: it is
/// the doorbell's own pattern, with the same fences.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted<W> {
    word: W,
}

impl<W: Word> Wanted<W> {
    /// Make one of a word; what it holds counts as wanted.
    pub const fn new(word: W) -> Self {
        Self { word }
    }

    /// Say, before [`Doorbell::announce`], that the sleeper waits until the count is `wanted`, modulo 2^32.
    pub fn set(&self, wanted: u32) {
        self.word.store(wanted);
    }

    /// Tell, after the news was published, whether the sleeper has waited for no more than `count`.
    pub fn is_reached(&self, count: u32) -> bool {
        self.word.fence();
        // The two are less than 2^31 apart.
        count.wrapping_sub(self.word.load()) as i32 >= 0
    }
}
