//! One child process: starting it, reading its output, and ending it with its parent.

use super::ChildId;
use super::events::Event;
use indicatif::ProgressBar;
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// The variable in which a process finds the process id of its supervisor.
pub(crate) const SUPERVISOR_VARIABLE: &str = "SUMAC_SUPERVISOR";

/// The number of last lines of a child's stderr that an error shows.
const STDERR_LINES: usize = 8;

/// The longest line that is read from a child, in bytes.
const LINE_MAX_BYTES: u64 = 16 << 20;

/// If this process is supervised, have the kernel kill it when the supervisor ends.
///
/// If the supervisor ended before the kernel was asked, the process exits here.
pub(crate) fn die_with_supervisor() {
    let Some(supervisor) = std::env::var(SUPERVISOR_VARIABLE).ok().and_then(|pid| pid.parse().ok()) else { return };
    let is_set = set_parent_process_death_signal(Some(Signal::KILL));
    if is_set.is_err() || getppid().map(Pid::as_raw_pid) != Some(supervisor) {
        std::process::exit(1);
    }
}

/// Whether another process of this binary started this one.
pub(crate) fn is_supervised() -> bool {
    std::env::var_os(SUPERVISOR_VARIABLE).is_some()
}

/// Return a command that runs this binary in its own process group and is killed with the thread that starts it.
pub(crate) fn supervised() -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(SUPERVISOR_VARIABLE, getpid().as_raw_pid().to_string()).process_group(0);
    Ok(command)
}

/// A child and the ends of its pipes.
#[derive(Debug)]
pub(super) struct Child {
    /// Its name in messages.
    pub(super) name: String,
    /// The process.
    pub(super) process: std::process::Child,
    /// Whether it may end with status 0.
    pub(super) may_end: bool,
    /// Whether it may end with any status.
    pub(super) may_fail: bool,
    /// Whether it is asked to end before it is killed.
    pub(super) ends_in_order: bool,
    /// Whether it has ended and has been reaped.
    pub(super) ended: bool,
    /// Bytes to write to its stdin, which stays open as long as this sender.
    pub(super) stdin: Option<Sender<Vec<u8>>>,
    pub(super) stderr: Arc<Mutex<VecDeque<String>>>,
    pub(super) stderr_reader: Option<JoinHandle<()>>,
}

impl Child {
    /// Start this binary with `args`, in a process group of its own.
    pub(super) fn spawn(
        id: ChildId,
        name: &str,
        args: &[String],
        events: &Sender<Event>,
        bar: &ProgressBar,
    ) -> io::Result<Self> {
        let mut command = supervised()?;
        command.args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn()?;
        let pipes = (process.stdin.take(), process.stdout.take(), process.stderr.take());
        let stderr = Arc::default();
        let (may_end, may_fail, ends_in_order, ended) = (false, false, false, false);
        let (stdin, to_write) = channel();
        let (name, stdin, stderr_reader) = (name.into(), Some(stdin), None);
        let mut child = Self { name, process, may_end, may_fail, ends_in_order, ended, stdin, stderr, stderr_reader };
        let (Some(to), Some(from), Some(errors)) = pipes else { return Ok(child) };
        if let Err(error) = child.listen(id, (to, to_write), from, errors, events, bar) {
            let _ = child.process.kill();
            let _ = child.process.wait();
            return Err(error);
        }
        Ok(child)
    }

    fn listen(
        &mut self,
        id: ChildId,
        (mut to, to_write): (impl Write + Send + 'static, Receiver<Vec<u8>>),
        from: impl Read + Send + 'static,
        errors: impl Read + Send + 'static,
        events: &Sender<Event>,
        bar: &ProgressBar,
    ) -> io::Result<()> {
        let start = |what: &str| thread::Builder::new().name(format!("{} {what}", self.name));
        // A child that ends before it has read everything is reported as ended.
        start("stdin").spawn(move || drop(to_write.iter().try_for_each(|bytes| to.write_all(&bytes))))?;
        let events = events.clone();
        start("stdout").spawn(move || {
            each_line(from, |line| drop(events.send(Event::Line(id, line))));
            // If the receiver is gone, the supervisor is ending the child.
            let _ = events.send(Event::Closed(id));
        })?;
        let (kept, name, bar) = (Arc::clone(&self.stderr), self.name.clone(), bar.clone());
        let reader = start("stderr").spawn(move || {
            each_line(errors, |line| {
                // The supervisor's own message repeats the error with which a child ends.
                if !line.starts_with("error: ") {
                    bar.suspend(|| message!("{name}: {line}"));
                }
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if kept.len() == STDERR_LINES {
                    kept.pop_front();
                }
                kept.push_back(line);
            });
        })?;
        self.stderr_reader = Some(reader);
        Ok(())
    }

    /// Return the last lines of stderr of a child that has ended.
    pub(super) fn final_stderr(&mut self) -> Vec<String> {
        if let Some(reader) = self.stderr_reader.take() {
            // The reader ends with the pipe. The lines it kept remain even if it panicked.
            let _ = reader.join();
        }
        self.stderr_so_far()
    }

    /// Return the last lines of stderr until now.
    pub(super) fn stderr_so_far(&mut self) -> Vec<String> {
        self.stderr.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Call `f` for each line until the end, an error, or an overlong line. Invalid UTF-8 is replaced.
fn each_line(from: impl Read, mut f: impl FnMut(String)) {
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        match from.by_ref().take(LINE_MAX_BYTES).read_until(b'\n', &mut line) {
            Ok(len) if len > 0 => f(String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(&line)).into_owned()),
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_and_invalid_utf8_is_replaced() {
        let mut lines = Vec::new();
        each_line(&b"one\n\ntw\xffo"[..], |line| lines.push(line));
        assert_eq!(lines, ["one", "", "tw\u{fffd}o"]);
    }
}
