//! Logs go to stderr, so that stdout stays the result.
//!
//! `SUMAC_LOG` holds a filter in `tracing`'s syntax (`debug`, `sumac::controller=trace`) and wins over `-v`; without either,
//! warnings and errors are shown.

use tracing_subscriber::EnvFilter;

/// The variable with the filter.
pub(crate) const LOG_VARIABLE: &str = "SUMAC_LOG";

/// Start logging; `verbose` is how often `-v` was given.
pub(crate) fn init(verbose: u8) {
    let level = match verbose {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let asked = std::env::var(LOG_VARIABLE).unwrap_or_default();
    let filter = if asked.is_empty() { EnvFilter::new(level) } else { EnvFilter::new(asked) };
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
}
