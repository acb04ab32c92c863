//! Randomness: the machine's virtio entropy source, else the processor's own. There is nothing else to fall back to.

use crate::cpu;
use sumac_virtio::{EntropySource, Slots};

static mut SOURCE: Option<EntropySource> = None;

/// Take the machine's entropy source. Only the first core may call this, and only before [`bytes`].
pub(crate) fn start(slots: Slots) {
    // SAFETY: only this core accesses it, and `bytes` is not running.
    unsafe { *&raw mut SOURCE = slots.entropy() };
}

/// Return random bytes; `None` if there is no source of them. Only the first core may call this.
pub(crate) fn bytes<const N: usize>() -> Option<[u8; N]> {
    // SAFETY: only this core accesses it, and neither function calls the other.
    let source = unsafe { &mut *&raw mut SOURCE };
    if let Some(bytes) = source.as_mut().and_then(EntropySource::bytes) {
        return Some(bytes);
    }
    let mut bytes = [0; N];
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&cpu::random()?.to_le_bytes()[..chunk.len()]);
    }
    Some(bytes)
}
