//! The operator's end of an update: replies and the time go in, commands and an outcome come out.
//!
//! ```text
//! Asking ── Begin ──> Sending ── Finish ──> Checking ──> Restarting ──> Returning ──> Confirming ──> Done
//!   └── the card has the image already ──────────────────────┴──────────────┴─────────────┘
//! ```
//!
//! Whatever is lost on the way, the machine asks the card for its state and goes on from there: a lost reply, a
//! controller that was restarted or taken over from, a card's runtime that was restarted. There is one command at a
//! time.

use super::messages::{Command, Described, Event, Failure, Goal, Limits, Outcome, Reply};
use std::time::Duration;
use sumac_hal::ctrl::update::{
    SlotId, SlotImage, SlotTrust, SlotsStatus, Transfer, UPDATE_WINDOW_BYTES, UpdateOffer, UpdateStatus,
};
use sumac_hal::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Find out what the card has.
    Asking,
    Sending,
    Checking,
    /// A restart, or what leads to it, is to be commanded.
    Restarting,
    /// The card restarts.
    Returning,
    /// The restarted card is on trial.
    Trial,
}

/// The operator's end of an update.
#[derive(Debug)]
pub struct Sender {
    goal: Goal,
    limits: Limits,
    state: State,
    /// What is to be sent next, and not before.
    next: Option<(Command, Instant)>,
    /// The slot to be reached.
    target: Option<SlotId>,
    /// The card as it reported last.
    known: Option<SlotsStatus>,
    started: Instant,
    piece_max: u32,
    /// How often the image was offered: it may be refused for what another operator did.
    offers: u32,
    /// How often a restart was commanded: the reply may have been lost, or the restart have led back.
    restarts: u32,
    has_changed: bool,
    lost: Option<String>,
    events: std::collections::VecDeque<Event>,
    outcome: Option<Result<Outcome, Failure>>,
}

/// How often an image is offered before a refusal counts.
const OFFERS_MAX: u32 = 5;

/// How often a restart is commanded.
const RESTARTS_MAX: u32 = 3;

impl Sender {
    /// Start at `now`, with pieces of at most `piece_max` bytes.
    pub fn new(goal: Goal, limits: Limits, piece_max: u32, now: Instant) -> Self {
        Self {
            goal,
            limits,
            state: State::Asking,
            next: Some((Command::Status, now)),
            target: None,
            known: None,
            started: now,
            piece_max: piece_max.max(1),
            offers: 0,
            restarts: 0,
            has_changed: false,
            lost: None,
            events: std::collections::VecDeque::new(),
            outcome: None,
        }
    }

    /// Return the next command, if it is time. Hand in its reply with [`Sender::handle_reply`] before the next call.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Command> {
        self.handle_timeout(now);
        let (command, _) = self.next.take_if(|(_, at)| *at <= now)?;
        Some(command)
    }

    /// Return when to call [`Sender::poll_transmit`] again, unless a reply is awaited.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.next.map(|(_, at)| at.min(self.deadline()))
    }

    /// Return the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Return the outcome, once there is one.
    pub const fn outcome(&self) -> Option<&Result<Outcome, Failure>> {
        self.outcome.as_ref()
    }

    /// End if the time is over.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.outcome.is_none() && now >= self.deadline() {
            let during = match (self.state, &self.lost) {
                (State::Asking, Some(why)) => format!("asking the card for its state ({why})"),
                (State::Asking, None) => "asking the card for its state".into(),
                (State::Sending, _) => "sending the image".into(),
                (State::Checking, _) => "while the card checked the image".into(),
                (State::Restarting | State::Returning, _) => "waiting for the card's return".into(),
                (State::Trial, _) => "waiting until it is healthy; `sumac card confirm` confirms it".into(),
            };
            let (limit_s, state) = (self.limits.total.as_secs(), self.describe());
            self.end(Err(Failure::TimeLimit { limit_s, during, state }));
        }
    }

    fn deadline(&self) -> Instant {
        self.started + self.limits.total
    }

    /// Process the reply to the last command.
    pub fn handle_reply(&mut self, reply: Reply, now: Instant) {
        match reply {
            _ if self.outcome.is_some() => {}
            Reply::Status(status) => {
                self.lost = None;
                self.known = Some(status.slots.clone());
                self.handle_status(&status, now);
            }
            Reply::Refused(why) => self.handle_refusal(why, now),
            Reply::Away => self.ask_later("the card is not connected to the controller".into(), now),
            Reply::Lost(why) => self.ask_later(why, now),
        }
        self.handle_timeout(now);
    }

    /// Nobody knows what of the last command has happened: ask.
    fn ask_later(&mut self, why: String, now: Instant) {
        if self.lost.as_ref() != Some(&why) && self.state != State::Returning {
            self.events.push_back(Event::Retries(why.clone()));
        }
        self.lost = Some(why);
        if matches!(self.state, State::Sending | State::Checking) {
            self.state = State::Asking;
        }
        self.ask_after(self.limits.interval, now);
    }

    fn ask_after(&mut self, wait: Duration, now: Instant) {
        self.next = Some((Command::Status, now + wait));
    }

    fn send(&mut self, command: Command, now: Instant) {
        self.next = Some((command, now));
    }

    fn end(&mut self, outcome: Result<Outcome, Failure>) {
        (self.outcome, self.next) = (Some(outcome), None);
    }

    /// A refused piece may be one that arrived twice, and a refused image one that another operator has replaced.
    fn handle_refusal(&mut self, why: String, now: Instant) {
        let may_retry = matches!(self.state, State::Sending | State::Checking) && self.offers < OFFERS_MAX;
        if may_retry {
            self.state = State::Asking;
            self.ask_later(why, now);
        } else {
            let state = self.describe();
            self.end(Err(Failure::Refused { why, state }));
        }
    }

    fn handle_status(&mut self, status: &UpdateStatus, now: Instant) {
        match self.goal.clone() {
            Goal::Update { offer, epoch } => self.pursue_update((&offer, epoch), status, now),
            Goal::RollBack => self.pursue_rollback(status, now),
            Goal::Confirm => self.pursue_confirmation(status, now),
        }
    }

    fn pursue_update(&mut self, (offer, epoch): (&UpdateOffer, u64), status: &UpdateStatus, now: Instant) {
        let sha256 = offer.sha256;
        // The same payload may be signed again with a later epoch.
        let is_it = |image: &SlotImage| (image.sha256, image.epoch) == (sha256, epoch);
        if status.slots.running_image().is_some_and(is_it) {
            return self.watch_trial(status, now);
        }
        if let Transfer::Restarting = status.transfer {
            // What it restarts into is seen when it is back.
            self.state = State::Returning;
            return self.ask_after(self.limits.interval, now);
        }
        if matches!(self.state, State::Returning | State::Trial) {
            let state = self.describe();
            return self.end(Err(Failure::FellBack { state }));
        }
        match &status.transfer {
            Transfer::Receiving { sha256: of, received_bytes, written_bytes } if *of == sha256 => {
                self.go_on(offer, (*received_bytes, *written_bytes), now);
            }
            Transfer::Checking { .. } => {
                if std::mem::replace(&mut self.state, State::Checking) != State::Checking {
                    self.events.push_back(Event::Checks);
                }
                self.ask_after(self.limits.interval, now);
            }
            Transfer::Failed { sha256: of, why } if *of == sha256 && self.has_changed => {
                let (why, state) = (why.to_string(), self.describe());
                self.end(Err(Failure::Refused { why, state }));
            }
            _ if holds_on_trial(&status.slots, is_it) => self.restart(Command::Restart(sha256), now),
            _ => self.offer(offer, epoch, status, now),
        }
    }

    fn offer(&mut self, offer: &UpdateOffer, epoch: u64, status: &UpdateStatus, now: Instant) {
        if let Some(running) = status.slots.running_image().map(|image| image.epoch).filter(|running| epoch < *running)
        {
            let state = self.describe();
            return self.end(Err(Failure::OlderEpoch { epoch, running, state }));
        }
        if status.slots.running_image().is_some_and(|image| image.trust != SlotTrust::Confirmed) {
            let why = "it is on trial; `sumac card confirm` or `rollback` ends the trial".to_owned();
            let state = self.describe();
            return self.end(Err(Failure::Refused { why, state }));
        }
        if self.restarts > 0 {
            // It was on trial, and has no try left.
            let state = self.describe();
            return self.end(Err(Failure::FellBack { state }));
        }
        self.offers += 1;
        if self.offers > OFFERS_MAX {
            let (why, state) = ("the image does not stay in the other slot".to_owned(), self.describe());
            return self.end(Err(Failure::Refused { why, state }));
        }
        (self.state, self.has_changed) = (State::Sending, true);
        self.send(Command::Begin(*offer), now);
    }

    /// Send the next piece, or wait until the card has written more.
    fn go_on(&mut self, offer: &UpdateOffer, (received, written): (u64, u64), now: Instant) {
        (self.state, self.has_changed) = (State::Sending, true);
        let (manifest, total) = (u64::from(offer.manifest_len_bytes), offer.total_bytes());
        if self.events.back().is_none_or(|event| !matches!(event, Event::Progress(bytes) if *bytes == received)) {
            self.events.push_back(Event::Progress(received));
        }
        if received >= total {
            return self.send(Command::Finish, now);
        }
        // A piece does not reach from the manifest into the image.
        let end = if received < manifest { manifest } else { total };
        let len = (end - received).min(self.piece_max.into());
        if received.saturating_sub(written).saturating_add(len) > UPDATE_WINDOW_BYTES {
            return self.ask_after(self.limits.interval / 10, now);
        }
        self.send(Command::Piece { offset: received, len_bytes: len as u32 }, now);
    }

    fn restart(&mut self, command: Command, now: Instant) {
        if std::mem::replace(&mut self.state, State::Restarting) != State::Restarting {
            self.events.push_back(Event::Restarts);
        }
        self.restarts += 1;
        if self.restarts > RESTARTS_MAX {
            let state = self.describe();
            return self.end(Err(Failure::FellBack { state }));
        }
        self.has_changed = true;
        self.send(command, now);
    }

    fn pursue_rollback(&mut self, status: &UpdateStatus, now: Instant) {
        let Some(running) = status.slots.running else {
            let state = self.describe();
            return self.end(Err(Failure::Refused { why: "the card was not started from a slot".into(), state }));
        };
        let target = *self.target.get_or_insert(running.other());
        if running == target {
            return self.watch_trial(status, now);
        }
        match (&status.transfer, self.state) {
            (Transfer::Restarting, _) => {
                self.state = State::Returning;
                self.ask_after(self.limits.interval, now);
            }
            (Transfer::Failed { why, .. }, State::Restarting | State::Returning) => {
                let (why, state) = (why.to_string(), self.describe());
                self.end(Err(Failure::Refused { why, state }));
            }
            (_, State::Returning) => {
                let state = self.describe();
                self.end(Err(Failure::FellBack { state }));
            }
            _ => self.restart(Command::RollBack, now),
        }
    }

    fn pursue_confirmation(&mut self, status: &UpdateStatus, now: Instant) {
        let is_on_trial = status.slots.running_image().map(|image| image.trust != SlotTrust::Confirmed);
        match (is_on_trial, self.state) {
            (None, _) => {
                let state = self.describe();
                self.end(Err(Failure::Refused { why: "the card was not started from a slot".into(), state }));
            }
            (Some(true), State::Asking) => {
                (self.state, self.has_changed) = (State::Trial, true);
                self.send(Command::Confirm, now);
            }
            _ => self.watch_trial(status, now),
        }
    }

    /// The card runs what it should: wait until it is confirmed.
    fn watch_trial(&mut self, status: &UpdateStatus, now: Instant) {
        let (Some(slot), Some(image)) = (status.slots.running, status.slots.running_image()) else {
            let state = self.describe();
            return self.end(Err(Failure::FellBack { state }));
        };
        let is_confirmed = image.trust == SlotTrust::Confirmed;
        if !is_confirmed && std::mem::replace(&mut self.state, State::Trial) != State::Trial {
            self.events.push_back(Event::OnTrial(slot));
        }
        if !is_confirmed && self.limits.awaits_confirmation {
            return self.ask_after(self.limits.interval, now);
        }
        let (version, epoch) = (image.version.to_string(), image.epoch);
        self.end(Ok(Outcome { slot, version, epoch, is_confirmed, was_so_before: !self.has_changed }));
    }

    /// Describe what the card runs, as far as is known.
    fn describe(&self) -> String {
        let Some(slots) = &self.known else { return "nothing was changed".into() };
        Described(slots).to_string()
    }
}

/// Return whether the slot that does not run holds this image, on trial.
fn holds_on_trial(slots: &SlotsStatus, is_it: impl Fn(&SlotImage) -> bool) -> bool {
    let others = [SlotId::A, SlotId::B].into_iter().filter(|slot| Some(*slot) != slots.running);
    others.filter_map(|slot| slots.image(slot)).any(|image| is_it(image) && image.trust != SlotTrust::Confirmed)
}
