//! The controller as a sans-I/O state machine: messages, ends of connections and the time go in; messages, deadlines
//! and jobs come out.
//!
//! ```text
//!   connect_device, connect_client, handle_response,        +---------+  poll_transmit --> messages, closes
//!   handle_request, handle_disconnects, handle_timeout  --> | Machine |  poll_timeout  --> when to call handle_timeout
//!                    handle_plan, handle_report         --> +---------+  poll_plan, poll_report --> jobs
//! ```
//!
//! After any call that takes `now`, poll all four. A job is run by the caller, outside of any lock, and its result is
//! handed in: a plan takes long on large fabrics, and a report may be long. The controller's threads and the simulator
//! drive this machine in the same way.
//!
//! The [`Connections`] in front of it decode and encode its messages, and bound what each peer may hold.

mod pair;

pub use super::connections::{CloseReason, Connections};
pub use super::entropy::Entropy;
pub use super::outbox::Frames;
pub use super::output::{ConnId, Output};
#[cfg(feature = "snapshot")]
pub use super::resources::ClaimRecord;
pub use super::state::{EncodedReport, Plan, PlanResult, ReportJob};

use super::device::Device;
use super::keys::Principal;
use super::limits::{NameKind, check_name, invalid_name, sanitize_reason};
use super::pair::Pair;
use super::proto::{ClientReply, ClientRequest, JoinRefusal};
use super::resources::is_host_device;
use super::state::State;
use super::{ControllerConfig, ControllerError, check};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use sumac_hal::ctrl::{Announce, Envelope, JobTicket, Refusal, Rejection, Request, Response};
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// A controller without threads, sockets or a clock.
#[derive(Debug)]
pub struct Machine {
    config: Arc<ControllerConfig>,
    state: State,
    /// The connected clients, and the job and rank that each has joined as.
    clients: BTreeMap<ConnId, Option<(String, Rank)>>,
    /// Whom the keys of connections stand for.
    principals: BTreeMap<ConnId, Arc<Principal>>,
    /// Something was handled since the last [`Machine::handle_timeout`].
    is_due: bool,
    /// The next deadline, as of then.
    due: Instant,
    /// A plan is being made.
    is_planning: bool,
    /// No new work is started.
    is_stopping: bool,
    /// This controller's part in a pair.
    pair: Option<Pair>,
    /// The clients that are told the term.
    failover_clients: BTreeSet<ConnId>,
    /// When the term was last claimed.
    claimed_at: Option<Instant>,
    /// When this incarnation started, in milliseconds after 1970.
    started_ms: u64,
    /// The zero of `started_ms`.
    began: Instant,
    /// The plan and the report that are being made are of an earlier role.
    drops_plan: bool,
    drops_report: bool,
    is_reporting: bool,
}

impl Machine {
    /// Start a controller `now`, `started_ms` after 1970, which tells its incarnations apart.
    ///
    /// # Errors
    /// [`ControllerError`] if `config` is invalid.
    pub fn new(
        config: Arc<ControllerConfig>,
        started_ms: u64,
        entropy: Entropy,
        now: Instant,
    ) -> Result<Self, ControllerError> {
        check(&config)?;
        let mut state = State::new(&config, started_ms, entropy, now);
        // Before anything waits for this machine.
        if let Some(fabric) = &config.fabric {
            state.index().groups(fabric);
        }
        let clients = BTreeMap::new();
        let principals = BTreeMap::new();
        let pair = config.pair.clone().map(|pair| Pair::new(pair, now));
        Ok(Self {
            config,
            state,
            clients,
            principals,
            is_due: true,
            due: now,
            is_planning: false,
            is_stopping: false,
            pair,
            failover_clients: BTreeSet::new(),
            claimed_at: None,
            started_ms,
            began: now,
            drops_plan: false,
            drops_report: false,
            is_reporting: false,
        })
    }

    /// Return whether there is a job.
    pub(super) fn has_jobs(&self) -> bool {
        self.state.has_jobs()
    }

    fn set_time(&mut self, now: Instant) {
        self.state.now = now;
        self.is_due = true;
        if let Some(change) = self.pair.as_mut().and_then(|pair| pair.set_time(now)) {
            self.change_role(change);
        }
    }

    /// The peer of a connection has proved that it has a key of `principal`. Call it before the peer connects as a
    /// device or a client.
    pub fn authenticate(&mut self, conn: ConnId, principal: Arc<Principal>) {
        self.principals.insert(conn, principal);
    }

    /// A device connects and announces itself. Returns false if it is refused; then it is told why, and its connection
    /// is closed.
    pub fn connect_device(&mut self, conn: ConnId, announce: Announce, now: Instant) -> bool {
        self.set_time(now);
        if let Err(why) = check_announce(&announce, false) {
            tracing::warn!(%why, "refusing a device");
            self.state.reject(conn, Rejection::Name);
            return false;
        }
        if let Err(rejection) = self.check_device(conn, &announce.name) {
            tracing::warn!(device = announce.name.as_str(), why = %rejection, "refusing a device");
            self.principals.remove(&conn);
            self.state.reject(conn, rejection);
            return false;
        }
        if let Some(active) = self.witness() {
            tracing::debug!(device = announce.name.as_str(), "refusing a device: this controller is the standby");
            self.principals.remove(&conn);
            self.state.reject(conn, Rejection::Standby { active });
            return false;
        }
        if let Some(claim) = self.claim() {
            self.state.output.request(conn, &Envelope { id: u32::MAX, message: Request::Claim(claim) });
        }
        let device = Arc::new(Device { conn, announce });
        if let Err(why) = self.state.add_device(&self.config, &device) {
            tracing::warn!(device = device.name(), %why, "refusing the device");
            self.state.reject(conn, why.rejection());
            return false;
        }
        tracing::info!(device = device.name(), boot_id = device.announce.boot_id.0, "device connected");
        true
    }

    /// A device that a rank runs for its job connects, as [`Machine::connect_device`].
    pub fn connect_host_device(&mut self, conn: ConnId, announce: Announce, ticket: &JobTicket, now: Instant) -> bool {
        self.set_time(now);
        let device = Arc::new(Device { conn, announce });
        let registered = self.check_host_device(&device, ticket).and_then(|()| {
            if let Some(claim) = self.claim() {
                self.state.output.request(conn, &Envelope { id: u32::MAX, message: Request::Claim(claim) });
            }
            self.state.add_host_device(&self.config, &device, ticket)
        });
        if let Err(rejection) = registered {
            tracing::debug!(device = device.name(), why = %rejection, "refusing a host device");
            self.principals.remove(&conn);
            self.state.reject(conn, rejection);
            return false;
        }
        tracing::info!(device = device.name(), job = ticket.job.as_str(), "host device connected");
        true
    }

    fn check_host_device(&mut self, device: &Device, ticket: &JobTicket) -> Result<(), Rejection> {
        check_announce(&device.announce, true).map_err(|_| Rejection::Name)?;
        if self.config.keys.is_some() && !self.principals.contains_key(&device.conn) {
            return Err(Rejection::KeyRequired);
        }
        if let Some(active) = self.witness() {
            return Err(Rejection::Standby { active });
        }
        let tenant = self.state.check_ticket(&device.announce, ticket)?;
        match self.principals.get(&device.conn) {
            Some(principal) if !principal.may_join(tenant, false) => Err(Rejection::KeyName),
            _ => Ok(()),
        }
    }

    /// A client connects. Returns false if it is refused, because it has no key; then it is told so.
    pub fn connect_client(&mut self, conn: ConnId) -> bool {
        if self.config.keys.is_some() && !self.principals.contains_key(&conn) {
            tracing::info!(conn = conn.0, "refusing a client without a key");
            self.state.output.send(conn, &ClientReply::Refused(JoinRefusal::KeyRequired));
            return false;
        }
        self.clients.insert(conn, None);
        true
    }

    /// Check that a device may register under this name.
    fn check_device(&self, conn: ConnId, name: &str) -> Result<(), Rejection> {
        if self.config.keys.is_none() {
            return Ok(());
        }
        let principal = self.principals.get(&conn).ok_or(Rejection::KeyRequired)?;
        if principal.may_register(name) { Ok(()) } else { Err(Rejection::KeyName) }
    }

    /// Check that a client's key is good for a request.
    fn check_request(&self, conn: ConnId, request: &ClientRequest) -> Result<(), JoinRefusal> {
        if self.config.keys.is_none() {
            return Ok(());
        }
        let principal = self.principals.get(&conn).ok_or(JoinRefusal::KeyRequired)?;
        let (join, devices): (_, &[String]) = match request {
            ClientRequest::Join(join) => (join, &[]),
            ClientRequest::JoinOn { request, devices } => (request, devices),
            ClientRequest::Resume(resumption) => (&resumption.request, &resumption.devices),
            ClientRequest::Status if matches!(**principal, Principal::Device { .. }) => {
                return Err(scope(principal, "reports".into()));
            }
            ClientRequest::Update(_) if **principal != Principal::Operator => {
                return Err(scope(principal, "updates of devices".into()));
            }
            ClientRequest::Peer(_) if **principal != Principal::Operator => {
                return Err(scope(principal, "another controller".into()));
            }
            // These concern the job that the client has joined.
            _ => return Ok(()),
        };
        let tenant = &join.terms.tenant;
        if principal.may_join(tenant, !devices.is_empty()) {
            return Ok(());
        }
        let tenant = sanitize_reason(tenant);
        let advice = match **principal {
            _ if !devices.is_empty() => " on chosen devices",
            Principal::Tenant { .. } => "; name the key's tenant in SUMAC_TENANT",
            _ => "",
        };
        Err(scope(principal, format!("jobs of tenant {tenant}{advice}")))
    }

    /// Handle a device's response.
    pub fn handle_response(&mut self, conn: ConnId, response: Envelope<Response>, now: Instant) {
        self.set_time(now);
        if let (Response::Refused(Refusal::OldTerm { seen }), Some(pair)) = (&response.message, &mut self.pair)
            && self.state.links.is_connected(conn)
        {
            pair.handle_refused_term(*seen);
            return self.update_role();
        }
        self.state.links.handle_response(conn, response);
    }

    /// Handle a client's request. Returns false if the controller is stopping; then close the connection.
    pub fn handle_request(&mut self, conn: ConnId, request: ClientRequest, now: Instant) -> bool {
        self.set_time(now);
        if self.is_stopping {
            return false;
        }
        if let Err(refusal) = self.check_request(conn, &request) {
            tracing::warn!(conn = conn.0, %refusal, "refusing a request");
            self.state.output.send(conn, &ClientReply::Refused(refusal));
            return true;
        }
        let request = match request {
            ClientRequest::Peer(report) => {
                let reply = self.answer_peer(report);
                self.state.output.send(conn, &reply);
                return true;
            }
            request => request,
        };
        if let Some(refusal) = self.refuse_as_standby(&request) {
            self.state.output.send(conn, &ClientReply::Refused(refusal));
            return true;
        }
        if let Some(place) = self.clients.get_mut(&conn) {
            let tenant = self.principals.get(&conn).and_then(|principal| match &**principal {
                Principal::Tenant { name } => Some(name.as_str()),
                _ => None,
            });
            self.state.serve(&self.config, request, (conn, tenant), place);
        }
        true
    }

    /// Whether a client has joined a job on this connection.
    pub fn has_joined(&self, conn: ConnId) -> bool {
        self.clients.get(&conn).is_some_and(Option::is_some)
    }

    /// Connections have ended, for whatever reason, and their memberships and devices with them. Lost ranks of one call
    /// are not notified of each other.
    pub fn handle_disconnects(&mut self, conns: impl IntoIterator<Item = ConnId>, now: Instant) {
        self.set_time(now);
        let (mut ranks, mut devices) = (Vec::new(), Vec::new());
        for conn in conns {
            self.principals.remove(&conn);
            self.failover_clients.remove(&conn);
            self.state.release_updates(conn);
            match self.clients.remove(&conn) {
                Some(Some(place)) => ranks.push((conn, place)),
                Some(None) => {}
                None => devices.push(conn),
            }
        }
        if !ranks.is_empty() {
            // Ranks that are cut off from here may be with the other controller, if that does not answer, either.
            let may_be_elsewhere = self.pair.as_ref().is_some_and(|pair| !pair.hears_peer());
            self.state.depart_all(ranks, may_be_elsewhere);
        }
        for conn in devices {
            if let Some(device) = self.state.remove_device(conn) {
                tracing::info!(device = device.name(), "device disconnected");
            }
        }
    }

    /// Handle deadlines that have passed, and take up what was handled since the last call. Call it at
    /// [`Machine::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Instant) {
        self.set_time(now);
        self.update_role();
        self.claim_again();
        self.state.pair = self.pair.as_ref().map(Pair::status);
        loop {
            let state = &mut self.state;
            state.links.expire(state.now);
            while let Some((purpose, replies)) = state.links.poll_finished() {
                state.proceed(&self.config, purpose, replies);
            }
            if self.is_stopping {
                (self.is_due, self.due) = (false, NEVER);
                break;
            }
            let expires = state.expire_all().into_iter().chain(state.expire_path_probes(&self.config)).min();
            let renews = state.renew_leases(&self.config);
            state.reserve_drafts(&self.config);
            state.start_report(&self.config);
            if !state.links.has_finished() {
                (self.is_due, self.due) = (false, expires.map_or(renews, |at| at.min(renews)));
                break;
            }
        }
    }

    /// The next deadline.
    pub fn poll_timeout(&self) -> Instant {
        let due = if self.is_due { self.state.now } else { self.due };
        let due = self.pair.as_ref().map_or(due, |pair| due.min(pair.next_due()));
        self.state.links.next_due().map_or(due, |at| at.min(due))
    }

    /// The next output and its connection.
    pub fn poll_transmit(&mut self) -> Option<(ConnId, Output)> {
        self.state.output.pop()
    }

    /// Whether a plan may have to be made. None is while another one is being made.
    pub fn has_plan(&self) -> bool {
        !self.is_planning && !self.is_stopping && self.state.has_plans()
    }

    /// The next plan to make. Hand in its result with [`Machine::handle_plan`]. If it turns out that nothing is to be
    /// planned, ranks learn their positions in the queue, so poll for output.
    pub fn poll_plan(&mut self) -> Option<Plan> {
        if !self.has_plan() {
            return None;
        }
        self.is_due = true;
        let plan = self.state.next_plan();
        self.is_planning = plan.is_some();
        plan
    }

    /// Handle the result of a plan.
    pub fn handle_plan(&mut self, result: PlanResult, now: Instant) {
        self.set_time(now);
        self.is_planning = false;
        if !std::mem::take(&mut self.drops_plan) && !self.is_stopping {
            self.state.apply_plan(&self.config, result);
        }
    }

    /// Whether a report is to be encoded.
    pub fn has_report(&self) -> bool {
        self.state.has_report()
    }

    /// The next report to encode. Hand in the result with [`Machine::handle_report`].
    pub fn poll_report(&mut self) -> Option<ReportJob> {
        let report = self.state.next_report(&self.config);
        self.is_reporting = report.is_some();
        report
    }

    /// Handle an encoded report.
    pub fn handle_report(&mut self, report: EncodedReport, now: Instant) {
        self.set_time(now);
        self.is_reporting = false;
        if !std::mem::take(&mut self.drops_report) {
            self.state.send_report(report);
        }
    }

    /// Release all groups and disconnect all ranks. [`Machine::has_stopped`] once devices have responded.
    pub fn stop(&mut self, now: Instant) {
        self.set_time(now);
        if !std::mem::replace(&mut self.is_stopping, true) {
            self.state.release_all();
        }
    }

    /// Whether [`Machine::stop`] was called.
    pub const fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    /// Whether all groups are released, or devices have not responded in time.
    pub const fn has_stopped(&self) -> bool {
        self.state.has_released_all
    }
}

/// For tests and the simulator.
#[cfg(any(test, feature = "snapshot"))]
impl Machine {
    /// The status report, without the devices' counters.
    pub fn report(&self) -> super::proto::StatusReport {
        self.state.report(&self.config).without_devices()
    }

    /// All claims in the ledger.
    #[cfg(feature = "snapshot")]
    pub fn claims(&self) -> Vec<ClaimRecord> {
        self.state.claim_records()
    }

    /// Whether no reservation is in flight or ready, or has its paths probed.
    pub fn has_no_drafts(&self) -> bool {
        let is_draft = |purpose: &super::state::Purpose| matches!(purpose, super::state::Purpose::Reserve(_));
        self.state.ready.is_empty() && self.state.path_probes.is_empty() && !self.state.links.purposes().any(is_draft)
    }

    /// The state, for tests of records.
    #[cfg(test)]
    pub(super) const fn state_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

#[cfg(feature = "planted")]
impl Machine {
    /// Plant a bug in this controller.
    pub const fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        self.state.plant(bug);
    }

    /// Adopt the claims of an earlier incarnation: a planted bug.
    pub fn inherit_claims(&mut self, earlier: Self) {
        self.state.inherit_claims(earlier.state);
    }
}

/// Check the names in a device's announcement, which are displayed.
/// Check the names in an announcement. Those of host devices, and no others, have their mark.
fn check_announce(announce: &Announce, is_of_job: bool) -> Result<(), super::limits::InvalidName> {
    check_name(NameKind::Fabric, "device", &announce.name)?;
    if is_host_device(&announce.name) != is_of_job {
        return Err(invalid_name(NameKind::Fabric, "device", &announce.name));
    }
    match &announce.attach {
        Some(bus) => check_name(NameKind::Fabric, "machine", &bus.machine),
        None => Ok(()),
    }
}

fn scope(principal: &Principal, request: String) -> JoinRefusal {
    JoinRefusal::KeyScope { principal: principal.to_string(), request }
}

/// No deadline.
const NEVER: Instant = Instant::from_nanos(u64::MAX);
