//! Which path an operation would take, as values and as text.

use crate::calls::described_operation;
use crate::comm::{Comm, with_comm};
use crate::config::{clear, free, give, handle, text};
use crate::last_error::{Failure, c_string, guard_value, write};
use crate::options::algo_of;
use crate::status::Status;
use std::ffi::{CString, c_char};
use sumac::Algo;
use sumac::select::Candidate;

/// Why an operation would take a path: all paths with their costs, or why they are ruled out. Free it with
/// sumac_explanation_free().
#[derive(Debug)]
pub struct Explanation {
    text: CString,
    chosen: i32,
    candidates: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    path: i32,
    cost_s: f64,
    name: CString,
    ruled_out: Option<CString>,
}

impl Row {
    fn new(candidate: &Candidate) -> Self {
        let Candidate { path, cost_s } = candidate;
        Self {
            path: i32::from(path.to_wire()),
            cost_s: *cost_s.as_ref().unwrap_or(&f64::INFINITY),
            name: c_string(path.name()),
            ruled_out: cost_s.as_ref().err().map(|why| c_string(why.to_string())),
        }
    }
}

/// Explain which path an operation would take, with the numbers of sumac_run(). `algo` is the name of an algorithm, or
/// NULL for "auto". Runs nothing, and is no collective call. `explanation` receives the explanation, or NULL.
///
/// # Safety
/// `comm` is a communicator, `algo` is NULL or a C string, and `explanation` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_explain(
    comm: *const Comm,
    collective: i32,
    dtype: i32,
    op: i32,
    root: u32,
    count: u64,
    algo: *const c_char,
    explanation: *mut *mut Explanation,
) -> Status {
    let body = |comm: &Comm| {
        // SAFETY: the caller's promise.
        let algo = unsafe {
            clear(explanation, "explanation")?;
            if algo.is_null() { Algo::Auto } else { algo_of(text(algo, "algo")?)? }
        };
        let desc = described_operation((collective, dtype, op, root, count))?;
        let explained = comm.comm.explain(&desc, algo);
        let made = Explanation {
            text: c_string(explained.to_string()),
            chosen: explained.chosen.map_or(0, |path| i32::from(path.to_wire())),
            candidates: explained.candidates.iter().map(Row::new).collect(),
        };
        // SAFETY: the caller's promise.
        unsafe { give(explanation, made) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { with_comm(comm, body) }
}

/// Read a value of an explanation; `absent` for NULL.
///
/// # Safety
/// `explanation` is NULL or an explanation.
unsafe fn read<T>(explanation: *const Explanation, absent: T, read: impl FnOnce(&Explanation) -> T) -> T {
    guard_value(absent, || {
        // SAFETY: the caller's promise.
        Ok::<_, Failure>(read(unsafe { handle(explanation, "explanation")? }))
    })
}

/// Return the explanation as a table, one path a line. Valid until the explanation is freed; "" for NULL.
///
/// # Safety
/// `explanation` is NULL or an explanation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_explanation_text(explanation: *const Explanation) -> *const c_char {
    // SAFETY: the caller's promise.
    unsafe { read(explanation, c"".as_ptr(), |explanation| explanation.text.as_ptr()) }
}

/// Return the path that would be taken: a sumac_path, SUMAC_PATH_NONE if the requested one is not possible.
///
/// # Safety
/// `explanation` is NULL or an explanation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_explanation_chosen(explanation: *const Explanation) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { read(explanation, 0, |explanation| explanation.chosen) }
}

/// Return the number of paths that were compared.
///
/// # Safety
/// `explanation` is NULL or an explanation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_explanation_candidates(explanation: *const Explanation) -> usize {
    // SAFETY: the caller's promise.
    unsafe { read(explanation, 0, |explanation| explanation.candidates.len()) }
}

/// Read a path that was compared, from 0: its number, its name, its cost in seconds (infinite if it is ruled out), and
/// why it is ruled out (NULL if it is not). Each pointer may be NULL; texts are valid until the explanation is freed.
/// Returns false, and writes nothing, if there is no such path.
///
/// # Safety
/// `explanation` is NULL or an explanation; the others are NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_explanation_candidate(
    explanation: *const Explanation,
    index: usize,
    path: *mut i32,
    name: *mut *const c_char,
    cost_s: *mut f64,
    ruled_out: *mut *const c_char,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        read(explanation, false, |explanation| {
            let Some(row) = explanation.candidates.get(index) else { return false };
            write(path, row.path);
            write(name, row.name.as_ptr());
            write(cost_s, row.cost_s);
            write(ruled_out, row.ruled_out.as_ref().map_or(std::ptr::null(), |text| text.as_ptr()));
            true
        })
    }
}

/// Free an explanation. NULL is allowed.
///
/// # Safety
/// `explanation` is NULL or an explanation, which is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_explanation_free(explanation: *mut Explanation) {
    // SAFETY: the caller's promise.
    unsafe { free(explanation) };
}
