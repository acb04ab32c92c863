//! The thread that reports to the other controller of a pair, and hands its reports to the machine.

use super::connect::{ControllerAddr, report_to_peer};
use super::keys::{KeyStore, Principal};
use super::machine::Machine;
use super::proto::{JoinRefusal, PeerReport};
use super::session::ClientError;
use super::{ControllerConfig, PairConfig, Shared};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::secure::Key;
use sumac_hal::traffic_class::TrafficClass;

/// Where the other controller is, and how to authenticate to it.
#[derive(Debug)]
pub(super) struct PeerLink {
    config: PairConfig,
    key: Option<Key>,
    traffic_class: TrafficClass,
    keys_file: Option<PathBuf>,
}

impl PeerLink {
    /// The link of a controller that has a pair.
    pub(super) fn new(config: &ControllerConfig) -> Option<Self> {
        let key = config.keys.as_deref().and_then(operator_key);
        let (keys_file, traffic_class) = (config.keys_file.clone(), config.traffic_class);
        Some(Self { config: config.pair.clone()?, key, traffic_class, keys_file })
    }

    pub(super) const fn addr(&self) -> SocketAddr {
        self.config.peer
    }

    /// Report before anything else runs. Returns why the other controller refuses, if it does.
    pub(super) fn ask_first(&self, machine: &Machine) -> Option<JoinRefusal> {
        match self.ask(machine.peer_report()?) {
            Err(ClientError::Refused(refusal @ (JoinRefusal::NoPair | JoinRefusal::SameSide { .. }))) => Some(refusal),
            _ => None,
        }
    }

    fn ask(&self, report: PeerReport) -> Result<PeerReport, ClientError> {
        let controller =
            ControllerAddr { key: self.key.clone(), traffic_class: self.traffic_class, ..self.config.peer.into() };
        report_to_peer(&controller, report, self.config.silence / 2)
    }

    /// Report until the controller stops.
    pub(super) fn run(mut self, shared: &Shared) {
        let mut refused = None;
        loop {
            let Some(report) = shared.lock().peer_report() else { return };
            let (asked, asked_at) = (Instant::now(), shared.now());
            let answer = self.ask(report);
            match &answer {
                Err(ClientError::Refused(refusal)) if refused.as_ref() != Some(refusal) => {
                    tracing::error!(peer = %self.config.peer, %refusal, "the other controller of the pair refuses");
                    refused = Some(refusal.clone());
                }
                Err(ClientError::Key { .. }) => self.read_key(),
                Err(error) => tracing::debug!(peer = %self.config.peer, %error, "the other controller does not answer"),
                Ok(_) => refused = None,
            }
            let mut machine = shared.lock();
            machine.handle_peer_answer(answer.ok(), asked_at, shared.now());
            shared.notifier.wake();
            let until = asked + self.config.interval();
            while !machine.is_stopping() {
                let left = until.saturating_duration_since(Instant::now());
                if left == Duration::ZERO {
                    break;
                }
                machine = shared.work.wait_timeout(machine, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            if machine.is_stopping() {
                return;
            }
        }
    }

    /// The key may have been replaced.
    fn read_key(&mut self) {
        let store = self.keys_file.as_deref().and_then(|path| KeyStore::read(path).ok());
        if let Some(key) = store.as_ref().and_then(operator_key) {
            self.key = Some(key);
        }
    }
}

/// The operator's key that the controllers of a pair use.
pub(super) fn operator_key(store: &KeyStore) -> Option<Key> {
    let mut keys = store.records().filter(|record| *record.principal == Principal::Operator);
    keys.find(|record| !record.is_revoked && !record.has_expired()).map(|record| record.key.clone())
}
