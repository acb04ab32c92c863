//! One child process: how it is started, listened to, and kept from outliving its parent.

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

/// The variable that tells a process who supervises it.
const SUPERVISOR_VARIABLE: &str = "SUMAC_SUPERVISOR";

/// How many of a child's last lines an error shows.
const STDERR_LINES: usize = 8;

/// The longest line that is taken from a child, in bytes.
const LINE_MAX_BYTES: u64 = 16 << 20;

/// If this process is supervised, have the kernel kill it when the supervisor ends.
///
/// The parent may have ended before the kernel was asked: then the process ends here.
pub(crate) fn die_with_supervisor() {
    let Some(supervisor) = std::env::var(SUPERVISOR_VARIABLE).ok().and_then(|pid| pid.parse().ok()) else { return };
    let asked = set_parent_process_death_signal(Some(Signal::KILL));
    if asked.is_err() || getppid().map(Pid::as_raw_pid) != Some(supervisor) {
        std::process::exit(1);
    }
}

/// Return a command that runs this binary in a process group of its own, and ends with the thread that starts it.
pub(crate) fn supervised() -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(SUPERVISOR_VARIABLE, getpid().as_raw_pid().to_string()).process_group(0);
    Ok(command)
}

/// A child and what it says.
#[derive(Debug)]
pub(super) struct Child {
    /// What messages call it.
    pub(super) name: String,
    /// The process.
    pub(super) process: std::process::Child,
    /// Whether its end is in order, with status 0.
    pub(super) may_end: bool,
    /// Whether its end is in order, whatever its status.
    pub(super) may_fail: bool,
    /// Whether it has ended and been waited for.
    pub(super) ended: bool,
    /// What is written to its stdin, which stays open as long as this does.
    pub(super) stdin: Option<Sender<Vec<u8>>>,
    stderr: Arc<Mutex<VecDeque<String>>>,
    stderr_reader: Option<JoinHandle<()>>,
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
        let (may_end, may_fail, ended) = (false, false, false);
        let (stdin, told) = channel();
        let (name, stdin, stderr_reader) = (name.into(), Some(stdin), None);
        let mut child = Self { name, process, may_end, may_fail, ended, stdin, stderr, stderr_reader };
        let (Some(to), Some(from), Some(errors)) = pipes else { return Ok(child) };
        if let Err(error) = child.listen(id, (to, told), from, errors, events, bar) {
            let _ = child.process.kill();
            let _ = child.process.wait();
            return Err(error);
        }
        Ok(child)
    }

    fn listen(
        &mut self,
        id: ChildId,
        (mut to, told): (impl Write + Send + 'static, Receiver<Vec<u8>>),
        from: impl Read + Send + 'static,
        errors: impl Read + Send + 'static,
        events: &Sender<Event>,
        bar: &ProgressBar,
    ) -> io::Result<()> {
        let start = |what: &str| thread::Builder::new().name(format!("{} {what}", self.name));
        // A child that ends without reading all of it is reported by its end.
        start("stdin").spawn(move || drop(told.iter().try_for_each(|bytes| to.write_all(&bytes))))?;
        let events = events.clone();
        start("stdout").spawn(move || {
            each_line(from, |line| drop(events.send(Event::Line(id, line))));
            // Where nobody listens any more, the supervisor is ending the child.
            let _ = events.send(Event::Closed(id));
        })?;
        let (kept, name, bar) = (Arc::clone(&self.stderr), self.name.clone(), bar.clone());
        let reader = start("stderr").spawn(move || {
            each_line(errors, |line| {
                // The error that ends a child comes with the supervisor's own message.
                if !line.starts_with("error: ") {
                    bar.suspend(|| tell!("{name}: {line}"));
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

    /// Return the last lines on stderr of a child that has ended.
    pub(super) fn stderr_to_its_end(&mut self) -> Vec<String> {
        if let Some(reader) = self.stderr_reader.take() {
            // It ends with the pipe; had it panicked, what it kept is still there.
            let _ = reader.join();
        }
        self.stderr_so_far()
    }

    /// Return the last lines on stderr until now.
    pub(super) fn stderr_so_far(&mut self) -> Vec<String> {
        self.stderr.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Call `f` for each line until the end, an error, or a line that is too long; bytes that are no UTF-8 are replaced.
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
    fn lines_are_split_and_foreign_bytes_replaced() {
        let mut lines = Vec::new();
        each_line(&b"one\n\ntw\xffo"[..], |line| lines.push(line));
        assert_eq!(lines, ["one", "", "tw\u{fffd}o"]);
    }
}
