//! One card's update: the machine ([`Sender`]), a connection to the controller, and the payload.

use super::show::Show;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant as Clock};
use sumac::controller::proto::{JoinRefusal, UPDATE_PIECE_MAX_BYTES, UpdateCommand, UpdateRefusal};
use sumac::controller::{ClientError, ControllerAddr, UpdateClient};
use sumac_firmware::update::{Command, Failure, Goal, Limits, Outcome, Reply, Sender};
use sumac_hal::time::Instant;

/// What is to be done on each card.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) goal: Goal,
    pub(super) manifest: Vec<u8>,
    pub(super) payload: Option<File>,
}

impl Task {
    /// Return how much is sent to a card, in bytes.
    pub(super) const fn total_bytes(&self) -> u64 {
        match &self.goal {
            Goal::Update { offer, .. } => offer.total_bytes(),
            _ => 0,
        }
    }

    /// Return the bytes of manifest and payload from `offset` on.
    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let manifest = self.manifest.len() as u64;
        if offset < manifest {
            let at = offset as usize;
            return Ok(self.manifest[at..self.manifest.len().min(at + len)].to_vec());
        }
        let mut bytes = vec![0; len];
        let payload = self.payload.as_ref().ok_or(io::ErrorKind::NotFound)?;
        payload.read_exact_at(&mut bytes, offset - manifest)?;
        Ok(bytes)
    }
}

/// Pursue a task on one card.
pub(super) fn pursue(
    controller: &ControllerAddr,
    device: &str,
    task: &Task,
    limits: Limits,
    show: &Show,
) -> Result<Outcome, String> {
    let began = Clock::now();
    let now = || Instant::ZERO + began.elapsed();
    let mut client = UpdateClient::new(controller.clone(), operator());
    let mut sender = Sender::new(task.goal.clone(), limits, UPDATE_PIECE_MAX_BYTES as u32, now());
    let mut has_answered = false;
    loop {
        while let Some(event) = sender.poll_event() {
            show.event(device, &event);
        }
        if let Some(outcome) = sender.outcome() {
            return outcome.clone().map_err(|failure: Failure| failure.to_string());
        }
        let Some(command) = sender.poll_transmit(now()) else {
            let wait = sender.poll_timeout().map_or(Duration::ZERO, |at| at.saturating_since(now()));
            std::thread::sleep(wait);
            continue;
        };
        let command = match command {
            Command::Status => UpdateCommand::Status,
            Command::Begin(offer) => UpdateCommand::Begin(offer),
            Command::Piece { offset, len_bytes } => {
                let bytes = task.read(offset, len_bytes as usize);
                UpdateCommand::Piece {
                    offset,
                    bytes: bytes.map_err(|error| format!("cannot read the payload: {error}"))?,
                }
            }
            Command::Finish => UpdateCommand::Finish,
            Command::Restart(sha256) => UpdateCommand::Restart(sha256),
            Command::RollBack => UpdateCommand::RollBack,
            Command::Confirm => UpdateCommand::Confirm,
            other => return Err(format!("unknown command {other:?}")),
        };
        let reply = match client.command(device, command) {
            Ok(Ok(status)) => Reply::Status(Box::new(status)),
            // What is not there at first is a mistake; later, it may be restarting.
            Ok(Err(refusal @ UpdateRefusal::NotConnected { .. })) if !has_answered => return Err(refusal.to_string()),
            Ok(Err(refusal)) if refusal.is_away() => Reply::Away,
            Ok(Err(refusal)) => Reply::Refused(refusal.to_string()),
            Err(error) if is_final(&error, has_answered) => return Err(error.to_string()),
            Err(error) => Reply::Lost(error.to_string()),
        };
        has_answered |= matches!(reply, Reply::Status(_) | Reply::Refused(_));
        sender.handle_reply(reply, now());
    }
}

/// Whether trying again is futile: what was never reached, or refuses the key.
fn is_final(error: &ClientError, has_answered: bool) -> bool {
    match error {
        ClientError::Refused(JoinRefusal::Standby { .. }) => false,
        ClientError::Refused(_) | ClientError::Key { .. } => true,
        _ => !has_answered,
    }
}

/// Name this command for other operators: user, host and process.
fn operator() -> String {
    let user = std::env::var("USER").or_else(|_| std::env::var("LOGNAME"));
    let user = user.unwrap_or_else(|_| rustix::process::getuid().as_raw().to_string());
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{user}@{host}, process {}", std::process::id())
}
