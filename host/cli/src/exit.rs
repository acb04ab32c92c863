//! Exit statuses, and how a failure reaches the user.
//!
//! | status | meaning |
//! |---|---|
//! | 0 | done, every element right |
//! | 1 | the run failed, or a result was wrong |
//! | 2 | bad input or usage; nothing was started and nothing written |
//! | 10 to 30 | `flash` failed; each way has its own, see `sumac_firmware::flash` |
//! | 128 + n | ended by signal n: 130 for Ctrl-C |

use std::io;
use std::process::ExitCode;

/// Why the command ends with a status other than 0.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Status 2: the user can put it right by asking for something else.
    Input(anyhow::Error),
    /// Status 1: it was tried and went wrong.
    Run(anyhow::Error),
    /// Status 1 without a message: what is wrong has been printed already.
    Reported,
    /// This status, without a message: what is wrong has been printed already.
    Status(u8),
    /// Status 128 + n: signal n asked for it.
    Signal(i32),
}

impl Failure {
    /// Call something a fault of the input.
    pub(crate) fn input(error: impl Into<anyhow::Error>) -> Self {
        Self::Input(error.into())
    }

    /// Call something a fault of the run.
    pub(crate) fn run(error: impl Into<anyhow::Error>) -> Self {
        Self::Run(error.into())
    }
}

impl From<io::Error> for Failure {
    /// Writing results failed; a reader that went away (`sumac plan | head`) needs no message.
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { Self::Reported } else { Self::run(error) }
    }
}

/// Print a line on stderr, for whoever still reads it.
pub(crate) fn tell(line: std::fmt::Arguments<'_>) {
    use std::io::Write;
    // Nobody is left to be told that it failed.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Print the failure, if there is one, and return the status.
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
    tell!("error: {}", chain(&error));
    ExitCode::from(status)
}

/// Join an error and its causes, leaving out a cause that the message names already.
fn chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        told if told.contains(&cause) => text,
        _ => format!("{text}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_said_once() {
        let error = anyhow::anyhow!("no such file").context("cannot read x: no such file");
        assert_eq!(chain(&error), "cannot read x: no such file");
        let error = Err::<(), _>(anyhow::anyhow!("inner")).context("outer").unwrap_err();
        assert_eq!(chain(&error), "outer: inner");
    }
}
