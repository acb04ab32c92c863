//! Options of single calls.

use crate::config::{clear, free, give, text};
use crate::last_error::{Failure, guard};
use crate::status::Status;
use std::ffi::c_char;
use std::time::Duration;
use sumac::{Algo, CallOptions, Straggler};

/// Options of a call. Every function that takes them takes NULL as well, for the communicator's defaults. A new object
/// has these defaults, too. It may be used for any number of calls; one thread at a time may change it.
#[derive(Debug, Default)]
pub struct Options(pub(crate) CallOptions);

/// What to do if ranks are late. Must be the same on all ranks.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "names of C")]
pub enum StragglerPolicy {
    /// Wait for late ranks until the call's deadline.
    SUMAC_STRAGGLER_WAIT = 0,
    /// Fail on all ranks with SUMAC_ERROR_STRAGGLERS.
    SUMAC_STRAGGLER_DEADLINE = 1,
    /// Complete without late ranks, which are removed from the communicator with SUMAC_ERROR_EXCLUDED.
    SUMAC_STRAGGLER_PARTIAL = 2,
}

/// Return the options of a call; the defaults for NULL.
///
/// # Safety
/// `options` is NULL, or options.
pub(crate) unsafe fn options_or_default(options: *const Options) -> CallOptions {
    // SAFETY: the caller's promise.
    unsafe { options.as_ref() }.map_or_else(CallOptions::default, |options| options.0)
}

/// Return a duration of seconds.
pub(crate) fn duration(seconds: f64, name: &str) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Failure::argument(format!("{name} is {seconds}; it must be a number of seconds, 0 or more")))
}

/// Make options with the communicator's defaults. `options` receives them, or NULL.
///
/// # Safety
/// `options` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_options_new(options: *mut *mut Options) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        unsafe {
            clear(options, "options")?;
            give(options, Options::default());
        }
        Ok(())
    })
}

/// Change options: run `change` on them.
///
/// # Safety
/// `options` is NULL, or options that nobody else uses.
unsafe fn change(options: *mut Options, change: impl FnOnce(&mut CallOptions) -> Result<(), Failure>) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        let options = unsafe { options.as_mut() }.ok_or_else(|| Failure::null("options"))?;
        change(&mut options.0)
    })
}

/// Set the algorithm by name, such as "auto", "tree", "ring" or "hd". Must be the same on all ranks. One that is not
/// possible is an error of the call; no other one takes its place.
///
/// # Safety
/// `options` are options; `algo` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_options_set_algo(options: *mut Options, algo: *const c_char) -> Status {
    // SAFETY: the caller's promise.
    unsafe {
        change(options, |options| {
            options.algo = Some(algo_of(text(algo, "algo")?)?);
            Ok(())
        })
    }
}

pub(crate) fn algo_of(name: &str) -> Result<Algo, Failure> {
    name.parse().map_err(|error: sumac::select::UnknownAlgo| Failure::argument(error.to_string()))
}

/// Set how long the call may take, in seconds.
///
/// # Safety
/// `options` are options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_options_set_deadline(options: *mut Options, seconds: f64) -> Status {
    // SAFETY: the caller's promise.
    unsafe {
        change(options, |options| {
            options.deadline = Some(duration(seconds, "the deadline")?);
            Ok(())
        })
    }
}

/// Set the factor that scales this rank's contribution, for SUMAC_PREMUL_SUM only. Default 1.
///
/// # Safety
/// `options` are options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_options_set_scalar(options: *mut Options, scalar: f64) -> Status {
    // SAFETY: the caller's promise.
    unsafe {
        change(options, |options| {
            options.scalar = Some(scalar);
            Ok(())
        })
    }
}

/// Set what to do if ranks enter the operation later than `seconds` after the first one: a sumac_straggler.
/// SUMAC_STRAGGLER_WAIT ignores `seconds`.
///
/// # Safety
/// `options` are options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_options_set_straggler(options: *mut Options, policy: i32, seconds: f64) -> Status {
    // SAFETY: the caller's promise.
    unsafe {
        change(options, |options| {
            let limit = || duration(seconds, "the straggler limit");
            options.straggler = Some(match policy {
                0 => Straggler::Wait,
                1 => Straggler::Deadline(limit()?),
                2 => Straggler::Partial(limit()?),
                other => return Err(Failure::argument(format!("{other} is not a sumac_straggler"))),
            });
            Ok(())
        })
    }
}

/// Free options. NULL is allowed.
///
/// # Safety
/// `options` are NULL or options, which are not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_options_free(options: *mut Options) {
    // SAFETY: the caller's promise.
    unsafe { free(options) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_take_values_and_refuse_invalid_ones() {
        let mut options = Options::default();
        let at = &raw mut options;
        // SAFETY: the options live until the end, and the names are C strings.
        unsafe {
            assert_eq!(sumac_options_set_algo(at, c"ring".as_ptr()), Status::SUMAC_OK);
            assert_eq!(sumac_options_set_deadline(at, 0.5), Status::SUMAC_OK);
            assert_eq!(sumac_options_set_scalar(at, 2.0), Status::SUMAC_OK);
            assert_eq!(sumac_options_set_straggler(at, 2, 1.5), Status::SUMAC_OK);
            for status in [
                sumac_options_set_algo(at, c"comet".as_ptr()),
                sumac_options_set_algo(at, std::ptr::null()),
                sumac_options_set_algo(at, c"\xff".as_ptr()),
                sumac_options_set_deadline(at, -1.0),
                sumac_options_set_deadline(at, f64::NAN),
                sumac_options_set_straggler(at, 3, 1.0),
                sumac_options_set_straggler(at, 1, -1.0),
                sumac_options_set_deadline(std::ptr::null_mut(), 1.0),
                sumac_options_new(std::ptr::null_mut()),
            ] {
                assert_eq!(status, Status::SUMAC_ERROR_ARGUMENT);
            }
            sumac_options_free(std::ptr::null_mut());
        }
        let expected = CallOptions {
            algo: Some(Algo::Ring),
            deadline: Some(Duration::from_millis(500)),
            scalar: Some(2.0),
            straggler: Some(Straggler::Partial(Duration::from_millis(1500))),
        };
        assert_eq!(options.0, expected);
    }
}
