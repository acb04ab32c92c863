//! Exit statuses and error messages.
//!
//! | status | meaning |
//! |---|---|
//! | 0 | success; every checked element was correct |
//! | 1 | the run failed, a result was wrong, or one of several cards could not be flashed |
//! | 2 | invalid input or usage; nothing was started or written |
//! | 10 to 30 | `flash` of one card failed; the status tells how, see `sumac_firmware::flash` |
//! | 128 + n | ended by signal n: 130 for Ctrl-C |

use std::io;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why the command ends with a status other than 0.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Status 2: invalid input or usage.
    Input(anyhow::Error),
    /// Status 1: the run failed.
    Run(anyhow::Error),
    /// Status 1 without a message: the failure has been printed already.
    Reported,
    /// This status without a message: the failure has been printed already.
    Status(u8),
    /// Status 128 + n: ended by signal n.
    Signal(i32),
}

impl Failure {
    /// Convert an error to [`Failure::Input`].
    pub(crate) fn input(error: impl Into<anyhow::Error>) -> Self {
        Self::Input(error.into())
    }

    /// Convert an error to [`Failure::Run`].
    pub(crate) fn run(error: impl Into<anyhow::Error>) -> Self {
        Self::Run(error.into())
    }
}

impl From<io::Error> for Failure {
    /// Convert an error of writing results. A closed pipe (`sumac plan | head`) needs no message.
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { Self::Reported } else { Self::run(error) }
    }
}

/// Whether notes and progress are left out: `--quiet`.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Leave out notes and progress from now on.
pub(crate) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Return whether notes and progress are left out.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Print a line on stderr, and ignore errors.
pub(crate) fn print_line(line: std::fmt::Arguments<'_>) {
    use std::io::Write;
    // There is no other place to report the error.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Print the failure, if there is one, and return the exit status.
pub(crate) fn report(outcome: Result<(), Failure>) -> ExitCode {
    let (error, status) = match outcome {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Reported) => return ExitCode::FAILURE,
        Err(Failure::Status(status)) => return ExitCode::from(status),
        Err(Failure::Signal(signal)) => {
            return ExitCode::from(128_u8.saturating_add(u8::try_from(signal).unwrap_or(0)));
        }
        Err(Failure::Run(error)) => (error, 1),
        Err(Failure::Input(error)) => (error, 2),
    };
    message!("error: {}", chain(&error));
    ExitCode::from(status)
}

/// Join an error and its causes, without causes that the message contains already.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        message if message.contains(&cause) => text,
        _ => format!("{text}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn repeated_cause_is_printed_once() {
        let error = anyhow::anyhow!("no such file").context("cannot read x: no such file");
        assert_eq!(chain(&error), "cannot read x: no such file");
        let error = Err::<(), _>(anyhow::anyhow!("inner")).context("outer").unwrap_err();
        assert_eq!(chain(&error), "outer: inner");
    }
}
