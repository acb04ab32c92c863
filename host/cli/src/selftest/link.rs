//! A link, its packet counters, and whether it is good.
//!
//! Loss is the number of retransmitted packets over the number of sent ones. Because a packet is also retransmitted
//! when it is merely late, loss is capped by the number of packets missing from the balance of all sent and received
//! ones. Where other jobs share the devices there is no such balance, and every retransmission counts as loss.

use super::snapshot::Snapshot;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The two ends of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Link {
    /// From this host to a device.
    ToDevice(String),
    /// Between two devices; the first is the child in the tests.
    Between(String, String),
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = self.ends();
        write!(f, "{from} - {to}")
    }
}

impl Link {
    /// Return the names of the lower and the upper end.
    pub(super) fn ends(&self) -> (&str, &str) {
        match self {
            Self::ToDevice(device) => (HERE, device),
            Self::Between(child, parent) => (child, parent),
        }
    }
}

/// The name of the end that is not a device.
pub(super) const HERE: &str = "rank";

/// Packets in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Flow {
    /// Packets sent.
    pub(super) sent: u64,
    /// Packets lost.
    pub(super) lost: u64,
}

/// Packets in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Flows {
    /// Towards the upper end.
    pub(super) up: Flow,
    /// Towards the lower end.
    pub(super) down: Flow,
}

impl Flows {
    /// Return the packets between two snapshots on the link to the only device of a job.
    pub(super) fn to_device(before: &Snapshot, after: &Snapshot, device: &str) -> Self {
        let rank = after.rank_since(before);
        let node = after.device_since(before, device);
        let up_missing = rank.packets_out.saturating_sub(node.received);
        let down_missing = node.packets_out.saturating_sub(rank.packets_in);
        let cap = |missing| if after.shared || before.shared { u64::MAX } else { missing };
        Self {
            up: Flow { sent: rank.packets_out, lost: rank.retransmits.min(cap(up_missing)) },
            down: Flow { sent: node.packets_out, lost: node.answers_resent.min(cap(down_missing)) },
        }
    }

    /// Return the packets on the link between the two devices of a job.
    pub(super) fn between(before: &Snapshot, after: &Snapshot, child: &str, parent: &str) -> Self {
        let rank = after.rank_since(before);
        let (child, parent) = (after.device_since(before, child), after.device_since(before, parent));
        let sent = rank.packets_out + child.packets_out + parent.packets_out;
        let received = rank.packets_in + child.received + parent.received;
        // Losses on the rank's own link do not count for this one.
        let missing = sent.saturating_sub(received).saturating_sub(rank.retransmits + child.answers_resent);
        let missing = if after.shared || before.shared { u64::MAX } else { missing };
        let up_lost = child.contributions_resent.min(missing);
        let down_lost = parent.answers_resent.min(missing - up_lost);
        Self {
            up: Flow { sent: parent.received + up_lost, lost: up_lost },
            down: Flow { sent: parent.packets_out, lost: down_lost },
        }
    }

    /// Return the share of lost packets over both directions.
    pub(super) fn loss(&self) -> f64 {
        let sent = self.up.sent + self.down.sent;
        if sent == 0 { 0.0 } else { (self.up.lost + self.down.lost) as f64 / sent as f64 }
    }
}

/// The measurements of a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Measured {
    /// Packets in both directions.
    pub(super) flows: Flows,
    /// Round trip over this link, in nanoseconds.
    pub(super) latency_ns: f64,
    /// Bandwidth in both directions at once, in 1e9 bytes per second.
    pub(super) bandwidth_gbytes_s: f64,
}

/// A tested link. Its fields are the keys of the JSON object, in this order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    /// The lower end: `rank`, `rank N` under a launcher, or a device.
    pub(super) from: String,
    /// The upper end: a device.
    pub(super) to: String,
    /// Whether the link is good.
    pub(super) ok: bool,
    /// Packets sent, in both directions.
    pub(super) packets: Option<u64>,
    /// Packets lost, in both directions.
    pub(super) lost: Option<u64>,
    /// The share of lost packets, in percent.
    pub(super) loss_percent: Option<f64>,
    /// Round trip, in microseconds.
    pub(super) latency_us: Option<f64>,
    /// Bandwidth in both directions at once, in 1e9 bytes per second.
    pub(super) bandwidth_gbytes_s: Option<f64>,
    /// The problem and its remedy.
    pub(super) problem: Option<String>,
}

impl Row {
    /// Rate a link that was measured.
    pub(super) fn measured(link: &Link, measured: &Measured, max_loss_percent: f64) -> Self {
        let Flows { up, down } = measured.flows;
        let loss_percent = 100.0 * measured.flows.loss();
        let ok = loss_percent <= max_loss_percent;
        Self {
            ok,
            packets: Some(up.sent + down.sent),
            lost: Some(up.lost + down.lost),
            loss_percent: Some(loss_percent),
            latency_us: Some((measured.latency_ns / 10.0).round() / 100.0),
            bandwidth_gbytes_s: Some(measured.bandwidth_gbytes_s),
            problem: (!ok).then(|| lossy(link, &measured.flows, max_loss_percent)),
            ..Self::unknown(link)
        }
    }

    /// Rate a link over which no result came back.
    pub(super) fn unreachable(link: &Link, why: &str) -> Self {
        let (from, to) = link.ends();
        let advice = match link {
            Link::ToDevice(_) => {
                "check that its process runs (`sumac status`), that its data port is reachable at the address that it \
                 advertises, and that no firewall drops UDP to it"
                    .to_owned()
            }
            Link::Between(..) => format!(
                "{from} is reachable from here, so check routes, firewalls and advertised addresses between the two \
                 devices"
            ),
        };
        Self { problem: Some(format!("{from} - {to} does not work: {why}; {advice}")), ..Self::unknown(link) }
    }

    /// Rate a link that could not be tested.
    pub(super) fn untested(link: &Link) -> Self {
        let (from, to) = link.ends();
        let why =
            format!("{from} - {to} was not tested: neither device is reachable from here; fix their own links first");
        Self { problem: Some(why), ..Self::unknown(link) }
    }

    fn unknown(link: &Link) -> Self {
        let (from, to) = link.ends();
        Self {
            from: from.into(),
            to: to.into(),
            ok: false,
            packets: None,
            lost: None,
            loss_percent: None,
            latency_us: None,
            bandwidth_gbytes_s: None,
            problem: None,
        }
    }
}

/// Describe the loss of a link, its direction, and the remedy.
fn lossy(link: &Link, flows: &Flows, max_loss_percent: f64) -> String {
    let (from, to) = link.ends();
    let share = |flow: &Flow| if flow.sent == 0 { 0.0 } else { flow.lost as f64 / flow.sent as f64 };
    let (up, down) = (share(&flows.up), share(&flows.down));
    let direction = match (up > 2.0 * down, down > 2.0 * up) {
        (true, _) => format!("mostly towards {to}"),
        (_, true) => format!("mostly towards {from}"),
        _ => "in both directions".to_owned(),
    };
    let loss = 100.0 * flows.loss();
    format!(
        "{from} - {to} loses {loss:.2} % of packets, {direction} (limit {max_loss_percent} %); check the error and drop \
         counters of the ports and cables between them, and the receive buffers of both ends (net.core.rmem_max, \
         `sumac doctor`)"
    )
}

#[cfg(test)]
mod tests;
