//! The operator's side of updates: commands for devices, sent to whichever controller is active.

use super::connect::{ActiveLink, ControllerAddr, connect_active};
use super::proto::{ClientReply, ClientRequest, UpdateCommand, UpdateDevice, UpdateReply};
use super::session::ClientError;
use std::io::ErrorKind;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{StreamError, send};

/// Longer than a controller waits for jobs to move, and for a device's answer.
const REPLY_LIMIT: Duration = Duration::from_secs(30);

/// Sends commands for devices, one at a time, and connects again when the connection was lost.
pub struct UpdateClient {
    controller: ControllerAddr,
    operator: String,
    link: Option<ActiveLink>,
    /// The highest term of a pair of controllers that was seen.
    seen: u64,
}

impl std::fmt::Debug for UpdateClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpdateClient").field("operator", &self.operator).finish_non_exhaustive()
    }
}

impl UpdateClient {
    /// A client of this controller, which needs an operator's key if the controller uses keys. Other operators are told
    /// `operator` while this one updates a device; it should name user, host and process.
    pub fn new(controller: impl Into<ControllerAddr>, operator: impl Into<String>) -> Self {
        Self { controller: controller.into(), operator: operator.into(), link: None, seen: 0 }
    }

    /// Send a command, and wait for the reply. After an error, nobody knows whether the device got it: ask for its
    /// status.
    ///
    /// # Errors
    /// [`ClientError`]: no controller is active, it refuses the client, or the connection was lost.
    pub fn command(&mut self, device: &str, command: UpdateCommand) -> Result<UpdateReply, ClientError> {
        let mut link = match self.link.take() {
            Some(link) => link,
            None => connect_active(&self.controller, self.seen)?,
        };
        self.seen = self.seen.max(link.term);
        let request = UpdateDevice { device: device.to_owned(), operator: self.operator.clone(), command };
        send(&mut link.writer, &ClientRequest::Update(Box::new(request)))?;
        let deadline = Instant::now() + REPLY_LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StreamError::Io(ErrorKind::TimedOut.into()).into());
            }
            let wait = link.silence.map_or(left, |silence| left.min(silence));
            link.writer.get_ref().set_read_timeout(Some(wait)).map_err(StreamError::from)?;
            match link.reader.recv()? {
                // An active controller of a pair says so regularly.
                ClientReply::Leading(claim) => self.seen = self.seen.max(claim.term),
                ClientReply::Updated(reply) => {
                    self.link = Some(link);
                    return Ok(*reply);
                }
                ClientReply::Refused(refusal) => return Err(refusal.into()),
                _ => return Err(ClientError::ReplanReply),
            }
        }
    }
}
