//! Updates of devices: one operator's command at a time is relayed, and jobs move off a device before it restarts.
//!
//! ```text
//!  operator                     controller                      device
//!    | -- Begin, Piece ... --->   |  -- Update(Begin, Piece ...) ->|     the first of them takes the device's hold
//!    | <- status ------------- -  |  <------------------- status - |
//!    | -- Restart ------------>   |  ranks: TreeLost               |     no job is placed on it from here on
//!    |                            |  (no job uses it, or DRAIN_LIMIT)
//!    |                            |  -- Update(Restart) ---------->|
//!    | <- status --------------   |  <------------------- status - |     it restarts, and connects again
//! ```
//!
//! Invariants:
//! - a client has one command in flight, so what is queued for a device is one piece per operator;
//! - the bytes of an image pass through: none are kept;
//! - a device has one hold. It ends with its client's connection, and when its client has sent no command for
//!   [`TRANSFER_LEASE`]: that one may have gone without a word;
//! - a drain ends: with the device's connection, a refusal, or [`RETURN_LIMIT`].

use super::{Purpose, State};
use crate::controller::device::{Device, DeviceError, OnTimeout, REPLY_TIMEOUT, Reply};
use crate::controller::limits::{NAME_LEN_MAX, sanitize_reason};
use crate::controller::output::ConnId;
use crate::controller::proto::{ClientReply, UpdateCommand, UpdateDevice, UpdateRefusal, UpdateReply};
use crate::controller::resources::DeviceKey;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::update::{PieceBytes, SlotImage, SlotsStatus, TRANSFER_LEASE, UpdateRequest};
use sumac_hal::ctrl::{Request, Response};
use sumac_hal::time::Instant;

/// How long jobs may take to move off a device before it restarts nevertheless. Their ranks recover then.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// How long a device may take from its answer to its restart.
const RETURN_LIMIT: Duration = Duration::from_secs(60);

/// A command whose answer is awaited.
#[derive(Debug)]
pub(in crate::controller) struct Relayed {
    client: ConnId,
    device: Arc<Device>,
    restarts: bool,
}

/// Who updates a device.
#[derive(Debug)]
struct Hold {
    client: ConnId,
    operator: String,
    since: Instant,
    /// When the client sent its last command.
    renewed: Instant,
}

/// A device that jobs move off.
#[derive(Debug)]
struct Drain {
    device: Arc<Device>,
    client: ConnId,
    request: Option<UpdateRequest>,
    reason: String,
    until: Instant,
}

/// The updates of all devices.
#[derive(Debug, Default)]
pub(in crate::controller) struct Updates {
    /// By device name.
    holds: BTreeMap<String, Hold>,
    drains: BTreeMap<DeviceKey, Drain>,
    /// Clients with a command in flight.
    in_flight: BTreeSet<ConnId>,
    /// The slots as devices reported them last.
    slots: BTreeMap<DeviceKey, SlotsStatus>,
}

impl State {
    /// An operator commands a device.
    pub(super) fn update_device(&mut self, client: ConnId, request: UpdateDevice) {
        let UpdateDevice { device, operator, command } = request;
        if let Err(refusal) = self.try_update(client, (&device, &operator), command) {
            self.reply_update(client, Err(refusal));
        }
    }

    fn reply_update(&mut self, client: ConnId, reply: UpdateReply) {
        self.output.send(client, &ClientReply::Updated(Box::new(reply)));
    }

    fn try_update(
        &mut self,
        client: ConnId,
        (name, operator): (&str, &str),
        command: UpdateCommand,
    ) -> Result<(), UpdateRefusal> {
        if self.updates.in_flight.contains(&client) {
            return Err(UpdateRefusal::OneAtATime);
        }
        let shown = || sanitize_reason(name);
        let device = self.devices.get(name).cloned().ok_or_else(|| UpdateRefusal::NotConnected { device: shown() })?;
        if device.announce.slots.is_none() {
            return Err(UpdateRefusal::NoSlots { device: shown() });
        }
        match command {
            UpdateCommand::Status => self.renew_hold(client, name),
            _ => self.take_hold(client, name, operator)?,
        }
        let request = match command {
            UpdateCommand::Piece { offset, bytes } => piece(offset, &bytes)?,
            UpdateCommand::Status => UpdateRequest::Status,
            UpdateCommand::Begin(offer) => UpdateRequest::Begin(offer),
            UpdateCommand::Finish => UpdateRequest::Finish,
            UpdateCommand::Confirm => UpdateRequest::Confirm,
            UpdateCommand::Restart(sha256) => {
                let slots = self.known_slots(&device);
                let image = slots.images.iter().flatten().find(|image| image.sha256 == sha256);
                let version = image.map(|image| format!("an update to {}", version(image)));
                self.drain(client, &device, UpdateRequest::Restart { sha256 }, version.as_deref());
                return Ok(());
            }
            UpdateCommand::RollBack => {
                let slots = self.known_slots(&device);
                let image = slots.running.and_then(|running| slots.image(running.other()));
                let version = image.map(|image| format!("a rollback to {}", version(image)));
                self.drain(client, &device, UpdateRequest::RollBack, version.as_deref());
                return Ok(());
            }
        };
        self.relay((client, device, false), request);
        Ok(())
    }

    /// Reserve a device for a client. The same operator's next connection replaces the one that was cut.
    fn take_hold(&mut self, client: ConnId, device: &str, operator: &str) -> Result<(), UpdateRefusal> {
        let operator: String = sanitize_reason(operator).chars().take(NAME_LEN_MAX).collect();
        let hold = self.updates.holds.get(device).filter(|hold| self.now - hold.renewed < TRANSFER_LEASE);
        if let Some(hold) = hold.filter(|hold| hold.client != client && hold.operator != operator) {
            let (operator, for_s) = (hold.operator.clone(), (self.now - hold.since).as_secs());
            return Err(UpdateRefusal::Busy { device: device.to_owned(), operator, for_s });
        }
        let since = hold.map_or(self.now, |hold| hold.since);
        self.updates.holds.insert(device.to_owned(), Hold { client, operator, since, renewed: self.now });
        Ok(())
    }

    /// The client that holds a device asks for its status.
    fn renew_hold(&mut self, client: ConnId, device: &str) {
        if let Some(hold) = self.updates.holds.get_mut(device).filter(|hold| hold.client == client) {
            hold.renewed = self.now;
        }
    }

    fn relay(&mut self, (client, device, restarts): (ConnId, Arc<Device>, bool), request: UpdateRequest) {
        self.updates.in_flight.insert(client);
        let requests = [(Arc::clone(&device), Request::Update(request))];
        let purpose = Purpose::Update(Relayed { client, device, restarts });
        self.links.exchange(&mut self.output, (purpose, OnTimeout::Normal, self.now + REPLY_TIMEOUT), requests);
    }

    /// A device has answered a command.
    pub(super) fn finish_update(&mut self, relayed: Relayed, replies: Vec<Reply>) {
        let Relayed { client, device, restarts } = relayed;
        self.updates.in_flight.remove(&client);
        // One, as there was one request.
        let reply = match replies.into_iter().next() {
            Some(Ok(Response::Update(status))) => Ok(status),
            Some(Ok(Response::UpdateRefused(why))) => Err(UpdateRefusal::Device { why: sanitize_reason(&why) }),
            Some(Err(DeviceError::Refused(refusal))) => Err(UpdateRefusal::Device { why: refusal.to_string() }),
            _ => Err(UpdateRefusal::NoAnswer { device: device.name().to_owned() }),
        };
        if let Ok(status) = &reply
            && self.is_connected(&device)
        {
            self.updates.slots.insert(device.key(), status.slots.clone());
        }
        if restarts && matches!(reply, Err(UpdateRefusal::Device { .. })) {
            self.end_drain(&device.key());
        }
        self.reply_update(client, reply);
    }

    /// The slots of a device, as it reported them last.
    pub(super) fn known_slots(&self, device: &Device) -> SlotsStatus {
        let announced = || device.announce.slots.clone();
        let none = SlotsStatus { running: None, images: [None, None] };
        self.updates.slots.get(&device.key()).cloned().or_else(announced).unwrap_or(none)
    }

    /// Move jobs off a device, and then let it restart.
    fn drain(&mut self, client: ConnId, device: &Arc<Device>, request: UpdateRequest, what: Option<&str>) {
        let reason = format!("device {} restarts for {}", device.name(), what.unwrap_or("an update"));
        tracing::info!(device = device.name(), reason, "moving jobs off the device");
        self.updates.in_flight.insert(client);
        let (key, until) = (device.key(), self.now + DRAIN_LIMIT);
        let drain = Drain { device: Arc::clone(device), client, request: Some(request), reason, until };
        let earlier = self.updates.drains.insert(key.clone(), drain);
        if let Some(earlier) = earlier.filter(|earlier| earlier.request.is_some() && earlier.client != client) {
            // The same operator's earlier connection was cut.
            self.updates.in_flight.remove(&earlier.client);
        }
        self.planning.devices_version += 1;
        self.move_jobs_off(&key);
    }

    /// Tell the ranks of jobs on a draining device that their tree ends.
    fn move_jobs_off(&mut self, key: &DeviceKey) {
        let Some(Drain { reason, .. }) = self.updates.drains.get(key) else { return };
        for (name, job) in &mut self.jobs {
            let Some(Ok(placement)) = &job.placement else { continue };
            let is_there = placement.nodes.iter().any(|node| node.device.key() == *key);
            if is_there && !std::mem::replace(&mut job.tree_suspected, true) {
                tracing::info!(job = name, view = job.view, reason, "the job's tree ends");
                // The other devices of the tree may be used again at once.
                job.spares_devices = true;
                self.recoveries.begin(name, job.view, reason, self.now);
                job.broadcast(&mut self.output, &ClientReply::TreeLost { view: job.view });
            }
        }
    }

    /// Let devices restart that no job uses any more, or whose time is over. Returns the next deadline.
    pub(super) fn advance_drains(&mut self) -> Option<Instant> {
        let keys: Vec<_> = self.updates.drains.keys().cloned().collect();
        for key in keys {
            // A tree may have been reserved on it before the drain, and be placed only now.
            self.move_jobs_off(&key);
            let is_used = self.jobs.values().any(|job| {
                let placement = job.placement.as_ref().and_then(|placed| placed.as_ref().ok());
                placement.is_some_and(|placement| placement.nodes.iter().any(|node| node.device.key() == key))
            });
            let now = self.now;
            let Some(drain) = self.updates.drains.get_mut(&key) else { continue };
            match drain.request.take_if(|_| !is_used || drain.until <= now) {
                Some(request) => {
                    drain.until = now + RETURN_LIMIT;
                    let (client, device) = (drain.client, Arc::clone(&drain.device));
                    tracing::info!(device = device.name(), is_used, "the device restarts");
                    self.relay((client, device, true), request);
                }
                None if drain.request.is_none() && drain.until <= now => {
                    tracing::warn!(device = key.name, "the device has not restarted; jobs may be placed on it again");
                    self.end_drain(&key);
                }
                None => {}
            }
        }
        self.updates.drains.values().map(|drain| drain.until).min()
    }

    fn end_drain(&mut self, key: &DeviceKey) {
        if self.updates.drains.remove(key).is_some() {
            self.planning.devices_version += 1;
            self.reconsider();
        }
    }

    /// Why jobs are not placed on devices that are about to restart, by name.
    pub(super) fn drain_reasons(&self) -> BTreeMap<String, String> {
        self.updates.drains.iter().map(|(key, drain)| (key.name.clone(), drain.reason.clone())).collect()
    }

    /// Whether a device is about to restart.
    pub(super) fn is_draining(&self, device: &Device) -> bool {
        !self.updates.drains.is_empty() && self.updates.drains.contains_key(&device.key())
    }

    /// A device has disconnected.
    pub(super) fn forget_update(&mut self, device: &Device) {
        let key = device.key();
        self.updates.slots.remove(&key);
        if let Some(Drain { client, request: Some(_), .. }) = self.updates.drains.remove(&key) {
            self.updates.in_flight.remove(&client);
            self.reply_update(client, Err(UpdateRefusal::NoAnswer { device: key.name }));
        }
    }

    /// A client has disconnected.
    pub(in crate::controller) fn release_updates(&mut self, client: ConnId) {
        self.updates.holds.retain(|_, hold| hold.client != client);
        self.updates.in_flight.remove(&client);
    }
}

/// Return the request for a piece.
fn piece(offset: u64, bytes: &[u8]) -> Result<UpdateRequest, UpdateRefusal> {
    let len = bytes.len() as u64;
    match PieceBytes::copy_of(bytes) {
        Some(bytes) if len > 0 && offset.checked_add(len).is_some() => Ok(UpdateRequest::Piece { offset, bytes }),
        _ => Err(UpdateRefusal::Piece { len }),
    }
}

fn version(image: &SlotImage) -> String {
    sanitize_reason(&image.version)
}
