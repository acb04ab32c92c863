//! Randomness: the machine's virtio entropy source. This machine's processor has none of its own.

use sumac_virtio::{EntropySource, Slots};

static mut SOURCE: Option<EntropySource> = None;

/// Take the machine's entropy source. It must be called before [`bytes`].
pub(crate) fn start(slots: Slots) {
    // SAFETY: there is one hart, and `bytes` is not running.
    unsafe { *&raw mut SOURCE = slots.entropy() };
}

/// Return random bytes; `None` if there is no source of them.
pub(crate) fn bytes<const N: usize>() -> Option<[u8; N]> {
    // SAFETY: there is one hart, and neither function calls the other.
    let source = unsafe { &mut *&raw mut SOURCE };
    source.as_mut().and_then(EntropySource::bytes)
}
