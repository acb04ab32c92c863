//! The events of a supervisor, on one channel: lines and ends of children, and signals.

use super::ChildId;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::sync::mpsc::Sender;
use std::thread;

/// An event.
#[derive(Debug)]
pub(super) enum Event {
    /// A child printed a line on stdout.
    Line(ChildId, String),
    /// A child closed its stdout.
    Closed(ChildId),
    /// This process was sent a signal.
    Signal(i32),
}

/// Send an event for each signal that asks the process to end.
///
/// The thread blocks in a read until the process ends. Signals that arrive after the supervisor is gone have no effect.
pub(super) fn watch_signals(sender: Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in &mut signals {
            // If the supervisor is gone, there is nothing left to end.
            let _ = sender.send(Event::Signal(signal));
        }
    })?;
    Ok(())
}
