//! Failures of a check, printed as they are found.

use std::io::Write;

/// More failures than this say nothing new: a broken context fails every call.
const ENOUGH: usize = 40;

/// What has failed so far.
#[derive(Default)]
pub(super) struct Findings {
    failed: usize,
}

impl Findings {
    /// Count and print a failure, if it is one.
    pub(super) fn note(&mut self, what: &str, result: Result<(), String>) {
        let Err(why) = result else { return };
        self.failed += 1;
        if self.failed <= ENOUGH {
            println!("FAILED: {what}: {why}");
            // What was found must survive if the process is killed.
            let _ = std::io::stdout().flush();
        }
    }

    /// Return whether more failures would say nothing new.
    pub(super) const fn are_too_many(&self) -> bool {
        self.failed >= ENOUGH
    }

    /// Return an error if anything failed.
    pub(super) fn end(&self) -> Result<(), String> {
        match self.failed {
            0 => Ok(()),
            failed => Err(format!("{failed} checks failed")),
        }
    }
}
