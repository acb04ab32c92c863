//! Writes fabrics: as TOML, which [`Fabric::from_toml`] reads, and as a `.net` file for ibsim.
//!
//! Invariant: what is written reads back as the same switches, hosts, servers, cables, ports, and (in TOML) rates.

use super::{Device, Fabric, FabricError, KnownBy, Port};
use std::fmt::Write as _;

impl Fabric {
    /// Write the fabric as TOML.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let mut add = |line: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{line}");
        };
        for switch in &self.switches {
            let aggregation = if switch.aggregation.is_some() { "\naggregation = true" } else { "" };
            add(format_args!("[[switch]]\nname = {}{aggregation}", quoted(&switch.name)));
        }
        for host in &self.hosts {
            add(format_args!("[[host]]\nname = {}", quoted(&host.name)));
            if host.guid != host.name {
                add(format_args!("guid = {}", quoted(&host.guid)));
            }
            let server = &self.servers[host.server.0 as usize];
            if server.known_by == KnownBy::Name || server.adapters.len() > 1 {
                add(format_args!("server = {}", quoted(&server.name)));
            }
        }
        for link in &self.links {
            let end = |port: Port| quoted(&format!("{}:{}", self.name(port.device), port.number));
            add(format_args!("[[link]]\nends = [{}, {}]", end(link.ends[0]), end(link.ends[1])));
            if let Some(rate) = link.rate {
                add(format_args!("rate_gbits = {}", rate.gbits()));
            }
        }
        text
    }

    /// Write the fabric as a `.net` file for ibsim. It has no devices; ibsim's link rates end at 4xQDR, so it has none
    /// of those either.
    ///
    /// # Errors
    /// [`FabricError::Shape`] if a node has ports above 254, or a name longer than 63 bytes, which ibsim does not take.
    pub fn to_ibsim(&self) -> Result<String, FabricError> {
        let mut ports: Vec<(Port, Port)> =
            self.links.iter().flat_map(|link| [(link.ends[0], link.ends[1]), (link.ends[1], link.ends[0])]).collect();
        ports.sort();
        let mut text = String::new();
        for device in self.switch_ids().map(Device::Switch).chain(self.host_ids().map(Device::Host)) {
            let from = ports.partition_point(|(near, _)| near.device < device);
            let to = ports.partition_point(|(near, _)| near.device <= device);
            let own = &ports[from..to];
            let last = own.iter().map(|(near, _)| near.number).max().unwrap_or(1);
            if last > IBSIM_PORT_MAX {
                return Err(FabricError::Shape { what: "port", value: last.into(), expected: "at most 254 for ibsim" });
            }
            let kind = if matches!(device, Device::Switch(_)) { "Switch" } else { "Hca" };
            let _ = writeln!(text, "{kind} {last} \"{}\"", self.ibsim_name(device)?);
            for (near, far) in own {
                let _ = writeln!(text, "[{}] \"{}\"[{}]", near.number, self.ibsim_name(far.device)?, far.number);
            }
            text.push('\n');
        }
        Ok(text)
    }

    fn ibsim_name(&self, device: Device) -> Result<String, FabricError> {
        let name = self.name(device).replace('"', "'");
        if name.len() > IBSIM_NAME_MAX_BYTES {
            return Err(FabricError::Shape {
                what: "name's bytes",
                value: name.len(),
                expected: "at most 63 for ibsim",
            });
        }
        Ok(name)
    }
}

/// The highest port of a node in ibsim.
const IBSIM_PORT_MAX: u16 = 254;
/// The longest name of a node in ibsim.
const IBSIM_NAME_MAX_BYTES: usize = 63;

/// A TOML string.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}
