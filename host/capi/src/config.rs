//! How a rank joins: from the environment or from explicit values.

use crate::last_error::{Failure, guard};
use crate::status::Status;
use std::ffi::{CStr, c_char};
use std::net::{Ipv4Addr, SocketAddr};
use sumac::comm::DEFAULT_PORT;
use sumac::{JoinConfig, Progress};

/// How a rank joins its job. Make one with sumac_config_from_env() or sumac_config_new(), change it with
/// sumac_config_set(), pass it to sumac_join(), and free it with sumac_config_free(). One thread at a time may use it.
#[derive(Debug)]
pub struct Config(pub(crate) JoinConfig);

impl Config {
    /// Return the configuration that the environment describes.
    pub(crate) fn from_env() -> Result<Self, Failure> {
        Ok(Self::with_thread(JoinConfig::from_env()?))
    }

    fn with_thread(config: JoinConfig) -> Self {
        let progress = Some(config.progress.unwrap_or(Progress::Thread));
        Self(JoinConfig { progress, ..config })
    }
}

/// Return a C string.
///
/// # Safety
/// `text` is NULL or points to a C string that nobody changes while the result is in use.
pub(crate) unsafe fn text<'t>(text: *const c_char, name: &str) -> Result<&'t str, Failure> {
    if text.is_null() {
        return Err(Failure::null(name));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::argument(format!("{name} is not UTF-8")))
}

/// Return what a pointer from the caller points to.
///
/// # Safety
/// `handle` is NULL, or came from the function that makes it and has not been freed.
pub(crate) unsafe fn handle<'h, T>(handle: *const T, name: &str) -> Result<&'h T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_ref() }.ok_or_else(|| Failure::null(name))
}

/// Give a new object to the caller.
///
/// # Safety
/// `to` can be written to.
pub(crate) unsafe fn give<T>(to: *mut *mut T, value: T) {
    // SAFETY: the caller's promise.
    unsafe { to.write(Box::into_raw(Box::new(value))) };
}

/// Set the caller's pointer to NULL before it is made, so that it is never left uninitialised.
///
/// # Safety
/// `to` is NULL or can be written to.
pub(crate) unsafe fn clear<T>(to: *mut *mut T, name: &str) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::null(name));
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(std::ptr::null_mut()) };
    Ok(())
}

/// Drop an object that was given to the caller.
///
/// # Safety
/// `object` is NULL, or came from [`give`] and has not been freed.
pub(crate) unsafe fn free<T>(object: *mut T) {
    guard(None, || {
        if !object.is_null() {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(object) });
        }
        Ok(())
    });
}

/// Configure a rank by what torchrun, mpirun, srun and `sumac run` set, and by SUMAC_* variables. Unset variables leave
/// the defaults. `config` receives the configuration, or NULL.
///
/// # Safety
/// `config` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_config_from_env(config: *mut *mut Config) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        unsafe { clear(config, "config")? };
        let from_env = Config::from_env()?;
        // SAFETY: the caller's promise.
        unsafe { give(config, from_env) };
        Ok(())
    })
}

/// Configure a rank by values: `controller` is "HOST", "HOST:PORT", or both of a pair after a comma; ranks that give
/// the same `job` to the same controller form a job, whose ranks count from 0 to `world` - 1. The environment is not
/// read. `config` receives the configuration, or NULL.
///
/// # Safety
/// `controller` and `job` are C strings; `config` can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_config_new(
    controller: *const c_char,
    job: *const c_char,
    rank: u32,
    world: u32,
    config: *mut *mut Config,
) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        let (controller, job) = unsafe {
            clear(config, "config")?;
            (text(controller, "controller")?, text(job, "job")?)
        };
        let placeholder = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT));
        let mut made = JoinConfig::new(placeholder, job, rank, world);
        made.set("controller", controller)?;
        // SAFETY: the caller's promise.
        unsafe { give(config, Config::with_thread(made)) };
        Ok(())
    })
}

/// Change a setting: `name` is that of a SUMAC_* variable without "SUMAC_" and in lower case, and `value` is what the
/// variable would have. Examples: "order" "pairwise", "deadline" "2.5" (seconds), "key_file" "/etc/sumac/job.key",
/// "transport" "udp". The operations guide lists all of them. A refused setting changes nothing.
///
/// # Safety
/// `config` is a configuration; `name` and `value` are C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_config_set(config: *mut Config, name: *const c_char, value: *const c_char) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        let (config, name, value) = unsafe { (config.as_mut(), text(name, "name")?, text(value, "value")?) };
        config.ok_or_else(|| Failure::null("config"))?.0.set(name, value)?;
        Ok(())
    })
}

/// Choose whether started operations and messages go on by themselves, on a thread of the library, which blocking calls
/// are handed to as well. If not, what has been started advances only while another call of the communicator runs, and
/// sumac_test() may run a whole host collective. Not 0 stands for the thread, which is the default. Ranks may differ.
///
/// # Safety
/// `config` is a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_config_set_progress_thread(config: *mut Config, has_thread: i32) -> Status {
    guard(None, || {
        // SAFETY: the caller's promise.
        let config = unsafe { config.as_mut() }.ok_or_else(|| Failure::null("config"))?;
        config.0.progress = Some(if has_thread != 0 { Progress::Thread } else { Progress::Caller });
        Ok(())
    })
}

/// Free a configuration. NULL is allowed. Communicators that were made with it do not need it.
///
/// # Safety
/// `config` is NULL or a configuration, which is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sumac_config_free(config: *mut Config) {
    // SAFETY: the caller's promise.
    unsafe { free(config) };
}
