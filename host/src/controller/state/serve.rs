//! What ranks ask, each on its connection.

use super::{Client, State};
use crate::controller::ControllerConfig;
use crate::controller::proto::{ClientReply, ClientRequest, JoinRefusal, JoinRequest};
use std::sync::Arc;
use sumac_hal::ids::Rank;

/// What is left to do for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::controller) enum Served {
    Done,
    /// A report is to be made, and sent.
    Report,
}

impl State {
    /// Do what a client asks, and answer it. `place` is the job and the rank that it has joined on this connection.
    pub(in crate::controller) fn serve(
        &mut self,
        config: &ControllerConfig,
        request: ClientRequest,
        client: &Arc<Client>,
        place: &mut Option<(String, Rank)>,
    ) -> Served {
        let here = place.as_ref();
        match request {
            ClientRequest::Join(request) => self.take_in(config, (request, Vec::new()), client, place),
            ClientRequest::JoinOn { request, devices } => self.take_in(config, (request, devices), client, place),
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
            ClientRequest::Over(over) => self.over(here, client, &over),
            ClientRequest::Survivors => self.survivors(here, client),
            ClientRequest::Forgo { view } => self.forgo(here, client, view),
            ClientRequest::Resume(resumption) => {
                let joined = self.check_single(client, place).and_then(|()| self.resume(config, *resumption, client));
                note(joined, client, place);
            }
        }
        Served::Done
    }

    /// Take in a rank, or tell it why not.
    fn take_in(
        &mut self,
        config: &ControllerConfig,
        (request, pinned): (JoinRequest, Vec<String>),
        client: &Arc<Client>,
        place: &mut Option<(String, Rank)>,
    ) {
        let joined = self.check_single(client, place).and_then(|()| self.join(config, request, pinned, client));
        note(joined, client, place);
    }

    /// Check that a client is no member yet: its connection stands for one rank of one job.
    fn check_single(&self, client: &Arc<Client>, place: &Option<(String, Rank)>) -> Result<(), JoinRefusal> {
        let Some((name, rank)) = place else { return Ok(()) };
        let resuming = self.resuming.iter().filter(|((other, _), _)| other == name).map(|(_, resuming)| &resuming.job);
        let is_member = self.jobs.get(name).into_iter().chain(resuming).any(|job| job.has(*rank, client));
        // A job that was given up before it began has no members.
        if is_member { Err(JoinRefusal::Member { rank: *rank, job: name.clone() }) } else { Ok(()) }
    }
}

/// Note what a client has joined, or tell it why it has not.
fn note(joined: Result<(String, Rank), JoinRefusal>, client: &Client, place: &mut Option<(String, Rank)>) {
    match joined {
        Ok(joined) => *place = Some(joined),
        Err(refusal) => client.send(&ClientReply::Refused(refusal)),
    }
}
