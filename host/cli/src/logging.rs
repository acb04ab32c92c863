//! Logging to stderr, so that stdout holds nothing but results.
//!
//! `SUMAC_LOG` is a filter in the syntax of `tracing` (`debug`, `sumac::controller=trace`) and overrides `-v`. By
//! default, warnings and errors are logged; with `--quiet`, errors.

use crate::exit;
use tracing_subscriber::EnvFilter;

/// The variable that holds the filter.
pub(crate) const LOG_VARIABLE: &str = "SUMAC_LOG";

/// Initialise logging; `verbose` is the number of `-v`.
pub(crate) fn init(verbose: u8) {
    let level = match verbose {
        0 if exit::is_quiet() => "error",
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let filter = std::env::var(LOG_VARIABLE).unwrap_or_default();
    let filter = if filter.is_empty() { EnvFilter::new(level) } else { EnvFilter::new(filter) };
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
}
