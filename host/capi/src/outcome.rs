//! How an operation was carried out, as values and as text.

use crate::config::{clear, free, give, handle};
use crate::last_error::{Failure, c_string, copy_ranks, guard_value, write};
use std::ffi::{CString, c_char};

/// How a completed operation was carried out. Free it with sumac_outcome_free().
#[derive(Debug)]
pub struct Outcome {
    outcome: sumac::Outcome,
    text: CString,
    path: CString,
    fallback: Option<CString>,
}

impl Outcome {
    pub(crate) fn new(outcome: sumac::Outcome) -> Self {
        let text = c_string(outcome.to_string());
        let path = c_string(outcome.path.name());
        let fallback = outcome.fallback.as_deref().map(c_string);
        Self { outcome, text, path, fallback }
    }
}

/// Set where an outcome is to be put to NULL; where it is NULL, the caller wants none.
///
/// # Safety
/// `outcome` is NULL or can be written to.
pub(crate) unsafe fn clear_outcome(outcome: *mut *mut Outcome) {
    if !outcome.is_null() {
        // SAFETY: the caller's promise. It is not NULL, so there is no error.
        let _ = unsafe { clear(outcome, "outcome") };
    }
}

/// Give an outcome to the caller, if it wants one and there is one.
///
/// # Safety
/// `to` is NULL or can be written to.
pub(crate) unsafe fn give_outcome(to: *mut *mut Outcome, outcome: Option<sumac::Outcome>) {
    if let Some(outcome) = outcome.filter(|_| !to.is_null()) {
        // SAFETY: the caller's promise.
        unsafe { give(to, Outcome::new(outcome)) };
    }
}

/// How the payload moved between this rank and its leaf device.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "names of C")]
pub enum Transfer {
    /// The operation did not use the tree.
    SUMAC_TRANSFER_NONE = 0,
    /// In packets.
    SUMAC_TRANSFER_PACKETS = 1,
    /// The device read and wrote registered memory directly.
    SUMAC_TRANSFER_ZERO_COPY = 2,
    /// At least in part through a bounce buffer.
    SUMAC_TRANSFER_BOUNCED = 3,
    /// In a way that this version of the interface has no number for.
    SUMAC_TRANSFER_OTHER = 4,
}

/// The paths of operations.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "names of C")]
pub enum Path {
    /// No path: the requested one is not possible.
    SUMAC_PATH_NONE = 0,
    /// The aggregation tree.
    SUMAC_PATH_TREE = 1,
    /// Ring.
    SUMAC_PATH_RING = 2,
    /// Recursive halving and doubling.
    SUMAC_PATH_HALVING_DOUBLING = 3,
    /// Dissemination.
    SUMAC_PATH_DISSEMINATION = 4,
    /// No communication: a communicator of one rank.
    SUMAC_PATH_LOCAL = 5,
    /// Recursive doubling.
    SUMAC_PATH_RECURSIVE_DOUBLING = 6,
    /// Binomial tree.
    SUMAC_PATH_BINOMIAL = 7,
    /// Bruck's algorithm.
    SUMAC_PATH_BRUCK = 8,
    /// Pairwise exchange.
    SUMAC_PATH_PAIRWISE = 9,
    /// The aggregation tree's expression, evaluated by ranks.
    SUMAC_PATH_HOST_TREE = 10,
    /// From one rank to another.
    SUMAC_PATH_POINT_TO_POINT = 11,
    /// NCCL, on GPU memory.
    SUMAC_PATH_NCCL = 12,
    /// One-shot exchange.
    SUMAC_PATH_ONE_SHOT = 13,
    /// A star.
    SUMAC_PATH_STAR = 20,
    /// Full mesh.
    SUMAC_PATH_FULL_MESH = 21,
    /// Double binary tree.
    SUMAC_PATH_DOUBLE_TREE = 22,
    /// Nonuniform hierarchical ring.
    SUMAC_PATH_NHR = 23,
    /// Parallel aggregated trees.
    SUMAC_PATH_PAT = 24,
    /// Swing, in its bandwidth form.
    SUMAC_PATH_SWING = 25,
    /// Swing, in its latency form.
    SUMAC_PATH_SWING_LATENCY = 26,
    /// Bine trees and butterflies.
    SUMAC_PATH_BINE = 27,
    /// Van de Geijn's broadcast.
    SUMAC_PATH_VAN_DE_GEIJN = 28,
    /// Rings along the dimensions of a grid, one after the other.
    SUMAC_PATH_RING_2D = 29,
    /// Rings along all dimensions of a torus at once.
    SUMAC_PATH_TORUS_2D = 30,
    /// Exchanges between neighbours of a mesh.
    SUMAC_PATH_MESH_2D = 31,
    /// Full meshes inside servers, and rings between them.
    SUMAC_PATH_HIERARCHICAL_RING = 32,
    /// Pipelined chain.
    SUMAC_PATH_CHAIN = 33,
    /// Full meshes inside servers, and pairwise exchange between them.
    SUMAC_PATH_HIERARCHICAL_PAIRWISE = 34,
    /// Reduce-scatter inside servers, a tree for each rail, all-gather inside.
    SUMAC_PATH_HYBRID = 35,
    /// Reduce inside servers, all-reduce of their leaders in a tree, broadcast inside.
    SUMAC_PATH_RAB = 36,
}

/// Read a value of an outcome; `absent` for NULL.
///
/// # Safety
/// `outcome` is NULL or an outcome.
unsafe fn read<T>(outcome: *const Outcome, absent: T, read: impl FnOnce(&Outcome) -> T) -> T {
    guard_value(absent, || {
        // SAFETY: the caller's promise.
        Ok::<_, Failure>(read(unsafe { handle(outcome, "outcome")? }))
    })
}

/// Return the outcome as one line: the path, and whatever is unusual. Valid until the outcome is freed; "" for NULL.
///
/// # Safety
/// `outcome` is NULL or an outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_text(outcome: *const Outcome) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { read(outcome, c"".as_ptr(), |outcome| outcome.text.as_ptr()) }
}

/// Return the path that the operation took: a sumac_path. Later versions may add some.
///
/// # Safety
/// `outcome` is NULL or an outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_path(outcome: *const Outcome) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { read(outcome, 0, |outcome| i32::from(outcome.outcome.path.to_wire())) }
}

/// Return the name of the path, such as "tree" or "ring". Valid until the outcome is freed; "" for NULL.
///
/// # Safety
/// `outcome` is NULL or an outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_path_name(outcome: *const Outcome) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { read(outcome, c"".as_ptr(), |outcome| outcome.path.as_ptr()) }
}

/// Return how many trees the operation was spread over; 0 if it took none.
///
/// # Safety
/// `outcome` is NULL or an outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_trees(outcome: *const Outcome) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { read(outcome, 0, |outcome| outcome.outcome.trees) }
}

/// Return how the payload moved between this rank and its leaf device: a sumac_transfer.
///
/// # Safety
/// `outcome` is NULL or an outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_transfer(outcome: *const Outcome) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        read(outcome, Transfer::SUMAC_TRANSFER_NONE as i32, |outcome| {
            let transfer = match outcome.outcome.transfer {
                None => Transfer::SUMAC_TRANSFER_NONE,
                Some(sumac::Transfer::Packets) => Transfer::SUMAC_TRANSFER_PACKETS,
                Some(sumac::Transfer::ZeroCopy) => Transfer::SUMAC_TRANSFER_ZERO_COPY,
                Some(sumac::Transfer::Bounced) => Transfer::SUMAC_TRANSFER_BOUNCED,
                Some(_) => Transfer::SUMAC_TRANSFER_OTHER,
            };
            transfer as i32
        })
    }
}

/// Return why the operation did not use the tree, if the algorithm was left open; NULL if it did, or was told which one
/// to use. Valid until the outcome is freed.
///
/// # Safety
/// `outcome` is NULL or an outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_fallback(outcome: *const Outcome) -> *const c_char {
    let absent = std::ptr::null();
    // SAFETY: the caller's promise.
    unsafe { read(outcome, absent, |outcome| outcome.fallback.as_ref().map_or(absent, |text| text.as_ptr())) }
}

/// Return the bytes that this rank sent during the operation, with headers, or that its leaf device read from its
/// memory.
///
/// # Safety
/// `outcome` is NULL or an outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_wire_bytes(outcome: *const Outcome) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { read(outcome, 0, |outcome| outcome.outcome.wire_bytes) }
}

/// Return how many contributions this rank retransmitted.
///
/// # Safety
/// `outcome` is NULL or an outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_retransmits(outcome: *const Outcome) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { read(outcome, 0, |outcome| outcome.outcome.retransmits) }
}

/// Return whether the operation was interrupted by a failure and recovered.
///
/// # Safety
/// `outcome` is NULL or an outcome.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_recovered(outcome: *const Outcome) -> bool {
    // SAFETY: the caller's promise.
    unsafe { read(outcome, false, |outcome| outcome.outcome.recovered) }
}

/// Read the rank that entered the operation last, and how many microseconds after the first one. Each pointer may be
/// NULL. Returns false, and writes nothing, if it is not known: for host collectives and after a recovery.
///
/// # Safety
/// `outcome` is NULL or an outcome; `rank` and `late_us` are NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_slowest(outcome: *const Outcome, rank: *mut u32, late_us: *mut u32) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(slowest) = read(outcome, None, |outcome| outcome.outcome.slowest) else { return false };
        write(rank, slowest.rank.0);
        write(late_us, slowest.late_us);
    }
    true
}

/// Copy the ranks that did not contribute to the result (SUMAC_STRAGGLER_PARTIAL), in ascending order. At most
/// `capacity` are copied; `ranks` may be NULL. Returns how many there are.
///
/// # Safety
/// `outcome` is NULL or an outcome; `ranks` is NULL, or `capacity` elements can be written to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_missing(outcome: *const Outcome, ranks: *mut u32, capacity: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe { read(outcome, 0, |outcome| copy_ranks(outcome.outcome.missing.iter(), ranks, capacity)) }
}

/// Free an outcome. NULL is allowed.
///
/// # Safety
/// `outcome` is NULL or an outcome, which is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_outcome_free(outcome: *mut Outcome) {
    // SAFETY: the caller's promise.
    unsafe { free(outcome) };
}
