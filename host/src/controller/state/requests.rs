//! Dispatches client requests.

use super::State;
use crate::controller::ControllerConfig;
use crate::controller::output::ConnId;
use crate::controller::proto::{ClientReply, ClientRequest, JoinRefusal, JoinRequest};
use sumac_hal::ids::Rank;

impl State {
    /// Handle a request and reply to it. `place` is the job and rank that the client has joined as on this connection,
    /// and `tenant` whose key it has, if it has a tenant's.
    pub(in crate::controller) fn serve(
        &mut self,
        config: &ControllerConfig,
        request: ClientRequest,
        (client, tenant): (ConnId, Option<&str>),
        place: &mut Option<(String, Rank)>,
    ) {
        let here = place.as_ref();
        match request {
            ClientRequest::Join(request) => self.join_and_reply(config, (request, Vec::new()), client, place),
            ClientRequest::JoinOn { request, devices } => {
                self.join_and_reply(config, (request, devices), client, place)
            }
            ClientRequest::Leave => {
                let Some((job, rank)) = place.take() else { return self.output.send(client, &ClientReply::Left) };
                self.depart((&job, rank), client, true);
                if !self.defer_leader((&job, rank), client) {
                    self.output.send(client, &ClientReply::Left);
                }
            }
            // The machine has answered it.
            ClientRequest::Peer(_) => {}
            ClientRequest::Status => self.request_report(client, tenant),
            ClientRequest::Update(update) => self.update_device(client, *update),
            ClientRequest::Suspect { view } => self.suspect((here, client), view, false),
            ClientRequest::PathNarrowed { view } => self.suspect((here, client), view, true),
            ClientRequest::Replan { view } => self.replan(here, client, view),
            ClientRequest::Pause { view, at } => self.pause(here, client, view, at),
            ClientRequest::Decline { view, device, why } => self.decline((here, client), view, (device, why)),
            ClientRequest::Abort(reason) => self.abort(here, client, &reason),
            ClientRequest::Survivors => self.survivors(here, client),
            ClientRequest::HostDeviceFailed { why } => self.fail_host_device(here, client, &why),
            ClientRequest::PathProbed { group, max_packet_len_bytes } => {
                self.record_probed_path(config, (here, client), group, max_packet_len_bytes);
            }
            ClientRequest::AbandonReplan { view } => self.abandon_replan(here, client, view),
            ClientRequest::Resume(resumption) => {
                let joined = self.check_single(client, place).and_then(|()| self.resume(config, *resumption, client));
                self.record_join(joined, client, place);
            }
        }
    }

    /// Join a rank to a job, or reply with the refusal.
    fn join_and_reply(
        &mut self,
        config: &ControllerConfig,
        (request, pinned): (JoinRequest, Vec<String>),
        client: ConnId,
        place: &mut Option<(String, Rank)>,
    ) {
        let joined = self.check_single(client, place).and_then(|()| self.join(config, request, pinned, client));
        self.record_join(joined, client, place);
    }

    /// Check that the connection has not joined yet: it can stand for only one rank of one job.
    fn check_single(&self, client: ConnId, place: &Option<(String, Rank)>) -> Result<(), JoinRefusal> {
        let Some((name, rank)) = place else { return Ok(()) };
        let resuming = self.resuming.iter().filter(|((other, _), _)| other == name).map(|(_, resuming)| &resuming.job);
        let is_member = self.jobs.get(name).into_iter().chain(resuming).any(|job| job.has(*rank, client));
        // The membership may be stale: a job that was dropped before it started has no members.
        if is_member { Err(JoinRefusal::AlreadyJoined { rank: *rank, job: name.clone() }) } else { Ok(()) }
    }
    /// Record the place that a client has joined as, or reply with the refusal.
    fn record_join(
        &mut self,
        joined: Result<(String, Rank), JoinRefusal>,
        client: ConnId,
        place: &mut Option<(String, Rank)>,
    ) {
        match joined {
            Ok(joined) => *place = Some(joined),
            Err(refusal) => self.output.send(client, &ClientReply::Refused(refusal)),
        }
    }
}
