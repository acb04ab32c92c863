//! Requests to devices, matched to responses by number.
//!
//! A device executes requests in the order in which they are sent. Requests whose responses are awaited together are an
//! [`Exchange`]: it ends when all responses have arrived, or at its deadline. Several exchanges may be in flight, and
//! what a released group frees can be reserved again before its release is confirmed. A device that leaves too many
//! requests unanswered is disconnected.

use super::output::{ConnId, Outputs};
use super::resources::{DeviceKey, Resources};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::{Announce, Envelope, Refusal, Request, Response, Stats};
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;
use thiserror::Error;

/// Why a request to a device failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(super) enum DeviceError {
    /// The device refused.
    #[error("refused: {0}")]
    Refused(#[from] Refusal),
    /// The device is disconnected or does not respond.
    #[error("no response within {} s, or disconnected", REPLY_TIMEOUT.as_secs())]
    Unreachable,
    /// The response does not match the request.
    #[error("unexpected response")]
    UnexpectedResponse,
}

/// A connected device. A device that reconnects is another one.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) conn: ConnId,
    pub(super) announce: Announce,
}

impl Device {
    /// The device's name and incarnation.
    pub(super) fn key(&self) -> DeviceKey {
        DeviceKey { name: self.name().to_owned(), boot_id: self.announce.boot_id }
    }

    /// The resources that the device announced.
    pub(super) fn capacity(&self) -> Resources {
        let capabilities = &self.announce.capabilities;
        Resources {
            groups: u64::from(capabilities.groups),
            slots: u64::from(capabilities.slots),
            memory_bytes: capabilities.slot_memory_bytes,
            redo_memory_bytes: self.announce.attach.as_ref().map_or(0, |bus| bus.redo_memory_bytes),
        }
    }

    pub(super) fn name(&self) -> &str {
        self.announce.name.as_str()
    }

    /// Whether it receives packets over RDMA verbs.
    pub(super) fn over_verbs(&self) -> bool {
        matches!(self.announce.data_addrs.first(), Some(Addr::Verbs(_)))
    }
}

/// The response to a request that was awaited.
pub(super) type Reply = Result<Response, DeviceError>;

/// Expect the response to a request that is answered with `Done` or a refusal.
pub(super) fn expect_done(reply: Reply) -> Result<(), DeviceError> {
    match reply? {
        Response::Done => Ok(()),
        _ => Err(DeviceError::UnexpectedResponse),
    }
}

/// Expect the response to [`Request::Stats`].
pub(super) fn expect_stats(reply: Reply) -> Result<Stats, DeviceError> {
    match reply? {
        Response::Stats(stats) => Ok(stats),
        _ => Err(DeviceError::UnexpectedResponse),
    }
}

/// What a missing response says about its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnTimeout {
    /// The device is unresponsive, and no job is placed on it until it responds.
    Normal,
    /// The deadline is short: the device only owes its counters.
    Report,
}

/// The connection to a device.
#[derive(Debug)]
struct Link {
    device: Arc<Device>,
    next_id: u32,
    /// Unanswered requests, and the exchange and position that each belongs to.
    waiting: BTreeMap<u32, Option<(u64, usize)>>,
    /// A request timed out, and nothing has been received since.
    is_unresponsive: bool,
    /// The first request for counters that timed out, until its response arrives.
    overdue_stats: Option<u32>,
    /// The request of [`Links::probe`] that counts, and when it was posted.
    probe: Option<(u32, Instant)>,
    /// When a probe was last posted.
    probed_at: Option<Instant>,
    /// The device was disconnected.
    is_closed: bool,
}

/// Requests whose responses are awaited together.
#[derive(Debug)]
struct Exchange<P> {
    purpose: P,
    on_timeout: OnTimeout,
    due: Instant,
    /// The devices, and the numbers of the requests.
    asked: Vec<(Arc<Device>, u32)>,
    replies: Vec<Option<Reply>>,
    missing: usize,
}

/// The connections to all devices, and the exchanges in flight. `P` says what an exchange is for.
#[derive(Debug)]
pub(super) struct Links<P> {
    links: BTreeMap<ConnId, Link>,
    exchanges: BTreeMap<u64, Exchange<P>>,
    next_exchange: u64,
    /// Exchanges that have all their responses.
    finished: VecDeque<u64>,
    deadlines: BTreeSet<(Instant, u64)>,
}

impl<P> Default for Links<P> {
    fn default() -> Self {
        Self {
            links: BTreeMap::new(),
            exchanges: BTreeMap::new(),
            next_exchange: 0,
            finished: VecDeque::new(),
            deadlines: BTreeSet::new(),
        }
    }
}

impl<P> Links<P> {
    /// Add a device, and confirm its registration. The response repeats the announcement and is ignored.
    pub(super) fn add(&mut self, output: &mut Outputs, device: &Arc<Device>) {
        output.request(device.conn, &Envelope { id: u32::MAX, message: Request::Identify });
        let link = Link {
            device: Arc::clone(device),
            next_id: 0,
            waiting: BTreeMap::new(),
            is_unresponsive: false,
            overdue_stats: None,
            probe: None,
            probed_at: None,
            is_closed: false,
        };
        self.links.insert(device.conn, link);
    }

    /// A connection has ended: its outstanding requests fail.
    pub(super) fn remove(&mut self, conn: ConnId) -> Option<Arc<Device>> {
        let link = self.links.remove(&conn)?;
        link.waiting.into_values().flatten().for_each(|place| self.record(place, Err(DeviceError::Unreachable)));
        Some(link.device)
    }

    /// Whether a device is connected on this connection.
    pub(super) fn is_connected(&self, conn: ConnId) -> bool {
        self.links.contains_key(&conn)
    }

    /// Whether the device is connected and its last request did not time out.
    pub(super) fn is_responsive(&self, device: &Device) -> bool {
        self.links.get(&device.conn).is_some_and(|link| !link.is_unresponsive && !link.is_closed)
    }

    /// Whether a request for counters timed out and is still unanswered. Reports do not query the device meanwhile.
    pub(super) fn has_overdue_stats(&self, device: &Device) -> bool {
        self.links.get(&device.conn).is_some_and(|link| link.overdue_stats.is_some())
    }

    /// Send a request whose response nobody waits for.
    pub(super) fn post(&mut self, output: &mut Outputs, device: &Device, request: Request) -> Result<(), DeviceError> {
        self.send(output, device, request, None).map(drop)
    }

    /// Find out whether the device is alive: return whether it has answered an earlier probe, if that was a moment ago,
    /// and post another one. Posting also ends the connection of a machine that was reset.
    pub(super) fn probe(&mut self, output: &mut Outputs, device: &Device, now: Instant) -> bool {
        let Some(link) = self.links.get(&device.conn) else { return false };
        let (is_pending, is_alive) = link.probe.map_or((false, false), |(id, at)| {
            let is_pending = link.waiting.contains_key(&id);
            (is_pending, !is_pending && now - at < PROBE_VALIDITY)
        });
        // Whoever uses the device's name causes a probe. Too many unanswered ones would end the connection of a device
        // that is only busy.
        if link.probed_at.is_some_and(|at| now - at < PROBE_INTERVAL) {
            return is_alive;
        }
        let posted = self.send(output, device, Request::Identify, None);
        if let (Ok(id), Some(link)) = (posted, self.links.get_mut(&device.conn)) {
            link.probed_at = Some(now);
            // Frequent probes must not replace one that the device has yet to answer.
            if !is_pending {
                link.probe = Some((id, now));
            }
        }
        is_alive
    }

    fn send(
        &mut self,
        output: &mut Outputs,
        device: &Device,
        request: Request,
        place: Option<(u64, usize)>,
    ) -> Result<u32, DeviceError> {
        let link = self.links.get_mut(&device.conn).filter(|link| !link.is_closed);
        let link = link.ok_or(DeviceError::Unreachable)?;
        let id = link.next_id;
        link.next_id = id.wrapping_add(1) % u32::MAX;
        // Each round of renewals posts one request per group.
        let groups = usize::from(device.announce.capabilities.groups).min(UNANSWERED_GROUPS_MAX);
        if link.waiting.len() >= UNANSWERED_MAX + 4 * groups
            || !output.request(device.conn, &Envelope { id, message: request })
        {
            link.is_closed = true;
            output.close(device.conn);
            return Err(DeviceError::Unreachable);
        }
        link.waiting.insert(id, place);
        Ok(id)
    }

    /// Send requests whose responses are awaited together, until `due` at most. [`Links::poll_finished`] returns them.
    pub(super) fn exchange(
        &mut self,
        output: &mut Outputs,
        (purpose, on_timeout, due): (P, OnTimeout, Instant),
        requests: impl IntoIterator<Item = (Arc<Device>, Request)>,
    ) {
        let exchange = self.next_exchange;
        self.next_exchange += 1;
        let (mut asked, mut replies) = (Vec::new(), Vec::new());
        for (index, (device, request)) in requests.into_iter().enumerate() {
            let sent = self.send(output, &device, request, Some((exchange, index)));
            asked.push((device, *sent.as_ref().unwrap_or(&0)));
            replies.push(sent.err().map(Err));
        }
        let missing = replies.iter().filter(|reply| reply.is_none()).count();
        self.exchanges.insert(exchange, Exchange { purpose, on_timeout, due, asked, replies, missing });
        match missing {
            0 => self.finished.push_back(exchange),
            _ => _ = self.deadlines.insert((due, exchange)),
        }
    }

    /// Handle a response. Returns false if there is no such device.
    pub(super) fn handle_response(&mut self, conn: ConnId, Envelope { id, message }: Envelope<Response>) -> bool {
        let Some(link) = self.links.get_mut(&conn) else { return false };
        link.is_unresponsive = false;
        link.overdue_stats = link.overdue_stats.filter(|late| *late != id);
        if let Some(Some(place)) = link.waiting.remove(&id) {
            let reply = match message {
                Response::Refused(refusal) => Err(refusal.into()),
                response => Ok(response),
            };
            self.record(place, reply);
        }
        true
    }

    fn record(&mut self, (number, index): (u64, usize), reply: Reply) {
        // The exchange may have ended at its deadline.
        let Some(exchange) = self.exchanges.get_mut(&number) else { return };
        if exchange.replies[index].replace(reply).is_none() {
            exchange.missing -= 1;
            if exchange.missing == 0 {
                self.deadlines.remove(&(exchange.due, number));
                self.finished.push_back(number);
            }
        }
    }

    /// End exchanges whose deadline has passed: missing responses count as [`DeviceError::Unreachable`].
    pub(super) fn expire(&mut self, now: Instant) {
        while self.deadlines.first().is_some_and(|(due, _)| *due <= now) {
            self.finished.extend(self.deadlines.pop_first().map(|(_, number)| number));
        }
    }

    /// When the next exchange ends at the latest.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.deadlines.first().map(|(due, _)| *due)
    }

    /// Whether an exchange has ended.
    pub(super) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// The purposes of all exchanges in flight.
    #[cfg(any(test, feature = "snapshot"))]
    pub(super) fn purposes(&self) -> impl Iterator<Item = &P> {
        self.exchanges.values().map(|exchange| &exchange.purpose)
    }

    /// Take an exchange that has ended, with one reply per request.
    pub(super) fn poll_finished(&mut self) -> Option<(P, Vec<Reply>)> {
        let Exchange { purpose, on_timeout, asked, replies, .. } =
            self.exchanges.remove(&self.finished.pop_front()?)?;
        let replies = asked.into_iter().zip(replies).map(|((device, id), reply)| {
            if matches!(reply, None | Some(Err(DeviceError::Unreachable)))
                && let Some(link) = self.links.get_mut(&device.conn)
            {
                match on_timeout {
                    OnTimeout::Normal => link.is_unresponsive = true,
                    OnTimeout::Report => _ = link.overdue_stats.get_or_insert(id),
                }
            }
            reply.unwrap_or(Err(DeviceError::Unreachable))
        });
        let replies = replies.collect();
        Some((purpose, replies))
    }
}

/// How long an answered probe proves that a device is alive. Devices dial twice a second.
const PROBE_VALIDITY: Duration = Duration::from_secs(3);

/// The shortest time between two probes of a device: as devices dial.
const PROBE_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum number of unanswered requests, plus an allowance per group.
const UNANSWERED_MAX: usize = 256;

/// Maximum number of groups that count towards the allowance, whatever the device announces.
const UNANSWERED_GROUPS_MAX: usize = 4096;

/// How long a device may take to respond.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
