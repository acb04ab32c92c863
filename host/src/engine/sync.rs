//! What [`super::queue`] synchronises by. In its model in the tests, `loom`'s types have these names.

pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
