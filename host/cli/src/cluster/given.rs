//! Existing devices (boards, other machines) that take the place of emulated ones.

use super::{ClusterError, Limit, Supervisor};
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;
use sumac::controller::{ControllerAddr, status};
use sumac_hal::port::Addr;
use thiserror::Error;

/// How long a device may take to register: as long as the restart of a card.
const REGISTER_LIMIT: Duration = Duration::from_secs(120);

/// How often to poll the controller meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// An existing device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GivenDevice {
    /// The tree node that it replaces; `None`: the first one that no other device names.
    pub(crate) name: Option<String>,
    /// Where its first shard receives packets.
    pub(crate) addr: SocketAddr,
}

/// A value of --device that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not [NAME=]IP:PORT, the address at which a device's first shard receives packets")]
pub(crate) struct InvalidDevice(String);

impl FromStr for GivenDevice {
    type Err = InvalidDevice;

    fn from_str(text: &str) -> Result<Self, InvalidDevice> {
        let (name, addr) = match text.split_once('=') {
            Some((name, addr)) => (Some(name), addr),
            None => (None, text),
        };
        let addr: SocketAddr = addr.parse().map_err(|_| InvalidDevice(text.to_owned()))?;
        let is_sound = addr.port() != 0 && name.is_none_or(|name| !name.is_empty());
        is_sound.then(|| Self { name: name.map(str::to_owned), addr }).ok_or_else(|| InvalidDevice(text.to_owned()))
    }
}

/// Return the index in `devices` and the address of each given device.
///
/// # Errors
/// A message: a name that the tree does not have or that is given twice, or more devices than nodes.
pub(crate) fn places(devices: &[String], given: &[GivenDevice]) -> Result<Vec<(usize, SocketAddr)>, String> {
    let has = devices.join(", ");
    let mut taken = Vec::new();
    for name in given.iter().filter_map(|device| device.name.as_ref()) {
        let place = devices.iter().position(|device| device == name);
        let place = place.ok_or_else(|| format!("--device {name}=...: the tree has {has}"))?;
        if taken.contains(&place) {
            return Err(format!("--device {name}=... is given twice"));
        }
        taken.push(place);
    }
    let mut named = taken.clone().into_iter();
    let mut free = (0..devices.len()).filter(|place| !taken.contains(place));
    let place = |device: &GivenDevice| {
        let place = if device.name.is_some() { named.next() } else { free.next() };
        let place = place.ok_or_else(|| format!("{} devices are given, but the tree has only {has}", given.len()))?;
        Ok((place, device.addr))
    };
    given.iter().map(place).collect()
}

impl Supervisor {
    /// Wait until a device of this name and address has registered with the controller.
    ///
    /// # Errors
    /// [`ClusterError::WrongAddress`] if it receives at another address, [`ClusterError::Absent`] if it does not
    /// register, and the end of a child.
    pub(super) fn wait_registered(
        &mut self,
        controller: &ControllerAddr,
        name: &str,
        addr: SocketAddr,
    ) -> Result<(), ClusterError> {
        let limit = Limit::new(REGISTER_LIMIT);
        let mut is_waiting = false;
        loop {
            let report = status(controller.clone()).map_err(|error| ClusterError::Controller(Box::new(error)))?;
            if let Some(device) = report.devices.iter().find(|device| device.name == name) {
                let found = device.data_addrs.first().copied();
                return match found {
                    Some(Addr::Udp(found)) if found == addr => Ok(()),
                    found => Err(ClusterError::WrongAddress { name: name.to_owned(), addr, found }),
                };
            }
            if limit.is_over() {
                let names = report.devices.into_iter().map(|device| device.name).collect();
                let (name, controller) = (name.to_owned(), controller.addr);
                return Err(ClusterError::Absent { name, controller, limit: limit.length, names });
            }
            if !is_waiting {
                is_waiting = true;
                let wait_s = REGISTER_LIMIT.as_secs();
                let what = format!("device {name} to register with the controller at {}", controller.addr);
                self.bar.suspend(|| note!("waiting up to {wait_s} s for {what}"));
            }
            self.sleep(POLL_INTERVAL)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(text: &str) -> GivenDevice {
        text.parse().expect("a device")
    }

    #[test]
    fn named_devices_replace_their_nodes_and_unnamed_ones_the_rest() {
        let devices = ["root", "left", "right"].map(String::from);
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let all = [given("127.0.0.1:1"), given("root=127.0.0.1:2"), given("127.0.0.1:3")];
        assert_eq!(places(&devices, &all), Ok(vec![(1, at(1)), (0, at(2)), (2, at(3))]));
        let refused = |all: &[GivenDevice]| places(&devices, all).expect_err("refused");
        assert_eq!(refused(&[given("up=127.0.0.1:2")]), "--device up=...: the tree has root, left, right");
        assert_eq!(refused(&[all[1].clone(), all[1].clone()]), "--device root=... is given twice");
        assert!(refused(&[all[0].clone(), all[0].clone(), all[2].clone(), all[2].clone()]).starts_with("4 devices"));
    }

    #[test]
    fn invalid_devices_are_refused() {
        for text in ["", "leaf0", "127.0.0.1", "127.0.0.1:0", "=127.0.0.1:1", "leaf0=", "a=b=127.0.0.1:1"] {
            assert_eq!(text.parse::<GivenDevice>(), Err(InvalidDevice(text.into())));
        }
    }
}
