//! Devices that are there already: boards and other machines, in the place of emulated ones.

use super::{ClusterError, Limit, Supervisor};
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;
use sumac::controller::status;
use sumac_hal::port::Addr;
use thiserror::Error;

/// How long a device may take to dial the controller: as long as a card's restart.
const REGISTER_LIMIT: Duration = Duration::from_secs(120);

/// How often the controller is asked meanwhile.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// A device that is there already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GivenDevice {
    /// The node of the tree that it is; unsaid, the first leaf that is not named.
    pub(crate) name: Option<String>,
    /// Where its first shard receives packets.
    pub(crate) addr: SocketAddr,
}

/// What is no device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no device; give IP:PORT, where its first shard receives packets, or NAME=IP:PORT")]
pub(crate) struct NoDevice(String);

impl FromStr for GivenDevice {
    type Err = NoDevice;

    fn from_str(text: &str) -> Result<Self, NoDevice> {
        let (name, addr) = match text.split_once('=') {
            Some((name, addr)) => (Some(name), addr),
            None => (None, text),
        };
        let addr: SocketAddr = addr.parse().map_err(|_| NoDevice(text.to_owned()))?;
        let is_sound = addr.port() != 0 && name.is_none_or(|name| !name.is_empty());
        is_sound.then(|| Self { name: name.map(str::to_owned), addr }).ok_or_else(|| NoDevice(text.to_owned()))
    }
}

/// Return which of `devices` each of `given` is, or a sentence on why one is none.
///
/// # Errors
/// A name that the tree does not have, or twice; more devices than nodes.
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
        let place = place.ok_or_else(|| format!("{} devices are given, the tree has {has}", given.len()))?;
        Ok((place, device.addr))
    };
    given.iter().map(place).collect()
}

impl Supervisor {
    /// Wait until the controller at `controller` knows a device of this name that receives at this address.
    ///
    /// # Errors
    /// [`ClusterError::Stranger`] if it is somewhere else, [`ClusterError::Absent`] if it does not come; the end of a child.
    pub(super) fn wait_registered(
        &mut self,
        controller: SocketAddr,
        name: &str,
        addr: SocketAddr,
    ) -> Result<(), ClusterError> {
        let limit = Limit::new(REGISTER_LIMIT);
        loop {
            let report = status(controller).map_err(|error| ClusterError::Controller(Box::new(error)))?;
            if let Some(device) = report.devices.iter().find(|device| device.name == name) {
                let found = device.data_addrs.first().copied();
                return match found {
                    Some(Addr::Udp(found)) if found == addr => Ok(()),
                    found => Err(ClusterError::Stranger { name: name.to_owned(), addr, found }),
                };
            }
            if limit.is_over() {
                let names = report.devices.into_iter().map(|device| device.name).collect();
                return Err(ClusterError::Absent { name: name.to_owned(), controller, limit: limit.length, names });
            }
            self.pass(ASK_EVERY)?;
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
    fn devices_take_the_places_that_they_name_and_the_others_what_is_left() {
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
    fn what_is_no_device_is_refused() {
        for text in ["", "leaf0", "127.0.0.1", "127.0.0.1:0", "=127.0.0.1:1", "leaf0=", "a=b=127.0.0.1:1"] {
            assert_eq!(text.parse::<GivenDevice>(), Err(NoDevice(text.into())));
        }
    }
}
