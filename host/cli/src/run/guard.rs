//! A process that outlives a killed `sumac run`, and kills the process groups of its ranks.
//!
//! The kernel kills the programs with their supervisor, but not what they have started. The guard reads the numbers of
//! their groups from a pipe. The end of the pipe is the end of the supervisor, however it came about.
//!
//! Invariant: the guard kills only groups that were never taken off its list; the supervisor takes them off before
//! their numbers can be used again.

use crate::cluster::SUPERVISOR_VARIABLE;
use crate::exit::Failure;
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::BTreeSet;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

/// The hidden subcommand.
const GUARD: &str = "guard";

/// The supervisor's end.
#[derive(Debug)]
pub(super) struct Guard {
    process: Child,
    groups: Option<ChildStdin>,
}

impl Guard {
    /// Start the process, out of reach of the terminal's signals.
    pub(super) fn start() -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(GUARD).env_remove(SUPERVISOR_VARIABLE).process_group(0);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        let groups = process.stdin.take();
        Ok(Self { process, groups })
    }

    /// Add a group to the list.
    pub(super) fn add(&mut self, group: u32) {
        self.send(format_args!("+{group}"));
    }

    /// Take a group off the list, as it has ended.
    pub(super) fn remove(&mut self, group: u32) {
        self.send(format_args!("-{group}"));
    }

    fn send(&mut self, line: std::fmt::Arguments<'_>) {
        if let Some(Err(error)) = self.groups.as_mut().map(|groups| writeln!(groups, "{line}")) {
            tracing::warn!(%error, "the guard process has ended; processes remain if this one is killed");
            self.groups = None;
        }
    }

    /// Return the process's number.
    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// End the guard, once these groups have ended.
    pub(super) fn end(mut self, groups: impl IntoIterator<Item = u32>) {
        groups.into_iter().for_each(|group| self.remove(group));
        drop(self.groups.take());
        // It ends with its pipe, and nobody needs its status.
        let _ = self.process.wait();
    }
}

/// Be the guard: read groups until the supervisor ends, and kill those that are on the list then.
pub(crate) fn watch() -> Result<(), Failure> {
    let groups = read(io::stdin().lock())?.into_iter().filter_map(Pid::from_raw);
    for group in groups {
        // It fails only if no process is left.
        let _ = kill_process_group(group, Signal::KILL);
    }
    Ok(())
}

/// Read the list: `+GROUP` adds a group, `-GROUP` takes it off.
fn read(from: impl BufRead) -> io::Result<BTreeSet<i32>> {
    let mut groups = BTreeSet::new();
    for line in from.lines() {
        let line = line?;
        let group = |text: &str| text.parse().ok().filter(|group: &i32| *group > 0);
        if let Some(group) = line.strip_prefix('+').and_then(group) {
            groups.insert(group);
        } else if let Some(group) = line.strip_prefix('-').and_then(group) {
            groups.remove(&group);
        }
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_the_groups_that_were_not_taken_off() {
        let groups = read(&b"+7\n+8\nnoise\n-7\n+9\n+-3\n"[..]).expect("memory");
        assert_eq!(groups.into_iter().collect::<Vec<_>>(), [8, 9]);
    }
}
