//! What ranks ask, each on its connection.

use super::report::Report;
use super::{Client, Draft, State};
use crate::controller::ControllerConfig;
use crate::controller::proto::{ClientReply, ClientRequest, JoinRequest};
use std::sync::Arc;
use sumac_hal::ids::Rank;

/// What is left to do for a request.
pub(in crate::controller) enum Served {
    Done,
    /// To be carried out.
    Draft(Draft),
    /// To be completed by what devices say, and sent.
    Report(Report),
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
        let draft = match request {
            ClientRequest::Join(request) => self.take_in(config, (request, Vec::new()), client, place),
            ClientRequest::JoinOn { request, devices } => self.take_in(config, (request, devices), client, place),
            ClientRequest::Leave => {
                if let Some((job, rank)) = place.take() {
                    self.depart(config, (&job, rank), client, true);
                }
                client.send(&ClientReply::Left);
                None
            }
            ClientRequest::Status => return Served::Report(self.report(config)),
            ClientRequest::Suspect { view } => {
                self.suspect(place.as_ref(), client, view);
                None
            }
            ClientRequest::Replan { view } => self.replan(config, place.as_ref(), client, view),
            ClientRequest::Pause { view, at } => {
                self.pause(place.as_ref(), client, view, at);
                None
            }
            ClientRequest::Decline { view, device, why } => {
                self.decline(config, (place.as_ref(), client), view, (device, why));
                None
            }
            ClientRequest::Over(over) => {
                self.over(place.as_ref(), client, &over);
                None
            }
            ClientRequest::Survivors => {
                self.survivors(place.as_ref(), client);
                None
            }
            ClientRequest::Forgo { view } => {
                self.forgo(place.as_ref(), client, view);
                None
            }
            ClientRequest::Resume(resumption) => {
                match self.resume(config, *resumption, client) {
                    Ok(resumed) => *place = Some(resumed),
                    Err(refusal) => client.send(&ClientReply::Refused(refusal)),
                }
                None
            }
        };
        draft.map_or(Served::Done, Served::Draft)
    }

    /// Take in a rank, or tell it why not.
    fn take_in(
        &mut self,
        config: &ControllerConfig,
        (request, pinned): (JoinRequest, Vec<String>),
        client: &Arc<Client>,
        place: &mut Option<(String, Rank)>,
    ) -> Option<Draft> {
        match self.join(config, request, pinned, client) {
            Ok((joined, draft)) => {
                *place = Some(joined);
                draft
            }
            Err(refusal) => {
                client.send(&ClientReply::Refused(refusal));
                None
            }
        }
    }
}
