//! Dispatches client requests.

use super::{Client, State};
use crate::controller::ControllerConfig;
use crate::controller::proto::{ClientReply, ClientRequest, JoinRefusal, JoinRequest};
use std::sync::Arc;
use sumac_hal::ids::Rank;

/// What remains to be done for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::controller) enum Served {
    Done,
    /// Make a report and send it.
    Report,
}

impl State {
    /// Handle a request and reply to it. `place` is the job and rank that the client has joined as on this connection.
    pub(in crate::controller) fn serve(
        &mut self,
        config: &ControllerConfig,
        request: ClientRequest,
        client: &Arc<Client>,
        place: &mut Option<(String, Rank)>,
    ) -> Served {
        let here = place.as_ref();
        match request {
            ClientRequest::Join(request) => self.join_and_reply(config, (request, Vec::new()), client, place),
            ClientRequest::JoinOn { request, devices } => {
                self.join_and_reply(config, (request, devices), client, place)
            }
            ClientRequest::Leave => {
                if let Some((job, rank)) = place.take() {
                    self.depart((&job, rank), client, true);
                }
                client.send(&ClientReply::Left);
            }
            ClientRequest::Status => return Served::Report,
            ClientRequest::Suspect { view } => self.suspect(here, client, view),
            ClientRequest::Replan { view } => self.replan(here, client, view),
            ClientRequest::Pause { view, at } => self.pause(here, client, view, at),
            ClientRequest::Decline { view, device, why } => self.decline((here, client), view, (device, why)),
            ClientRequest::Abort(reason) => self.abort(here, client, &reason),
            ClientRequest::Survivors => self.survivors(here, client),
            ClientRequest::AbandonReplan { view } => self.abandon_replan(here, client, view),
            ClientRequest::Resume(resumption) => {
                let joined = self.check_single(client, place).and_then(|()| self.resume(config, *resumption, client));
                record_join(joined, client, place);
            }
        }
        Served::Done
    }

    /// Join a rank to a job, or reply with the refusal.
    fn join_and_reply(
        &mut self,
        config: &ControllerConfig,
        (request, pinned): (JoinRequest, Vec<String>),
        client: &Arc<Client>,
        place: &mut Option<(String, Rank)>,
    ) {
        let joined = self.check_single(client, place).and_then(|()| self.join(config, request, pinned, client));
        record_join(joined, client, place);
    }

    /// Check that the connection has not joined yet: it can stand for only one rank of one job.
    fn check_single(&self, client: &Arc<Client>, place: &Option<(String, Rank)>) -> Result<(), JoinRefusal> {
        let Some((name, rank)) = place else { return Ok(()) };
        let resuming = self.resuming.iter().filter(|((other, _), _)| other == name).map(|(_, resuming)| &resuming.job);
        let is_member = self.jobs.get(name).into_iter().chain(resuming).any(|job| job.has(*rank, client));
        // The membership may be stale: a job that was dropped before it started has no members.
        if is_member { Err(JoinRefusal::AlreadyJoined { rank: *rank, job: name.clone() }) } else { Ok(()) }
    }
}

/// Record the place that a client has joined as, or reply with the refusal.
fn record_join(joined: Result<(String, Rank), JoinRefusal>, client: &Client, place: &mut Option<(String, Rank)>) {
    match joined {
        Ok(joined) => *place = Some(joined),
        Err(refusal) => client.send(&ClientReply::Refused(refusal)),
    }
}
