//! Moves packets between a port and a node: what every board's loop calls.

use crate::node::Node;
use sumac_hal::port::{Port, RxToken, TxToken};
use sumac_hal::time::Instant;

/// Receive rounds in one poll: bounds its work, so that a flood can't keep control requests waiting.
const ROUNDS: usize = 4;

/// Do what can be done at `now` without waiting: take in up to a few bursts of packets, do what is due, send
/// what there is to send. Returns when to poll again if nothing arrives before; `Some(now)` if there is more to
/// do at once.
pub fn poll<P: Port>(node: &mut Node<'_>, port: &mut P, now: Instant) -> Option<Instant> {
    let burst = port.capabilities().burst_packets.max(1);
    let mut busy = false;
    for _ in 0..ROUNDS {
        let mut received = 0;
        while received < burst {
            let Some(token) = port.receive(now) else { break };
            token.consume(|from, packet| node.handle(from, packet, now));
            received += 1;
        }
        if node.poll_timeout().is_some_and(|at| at <= now) {
            node.handle_timeout(now);
        }
        let blocked = !transmit(node, port, now);
        port.flush(now);
        busy = blocked || received == burst;
        if received < burst {
            break;
        }
    }
    if busy { Some(now) } else { node.poll_timeout() }
}

/// Send what the node has; false if the port could not take all of it.
fn transmit<P: Port>(node: &mut Node<'_>, port: &mut P, now: Instant) -> bool {
    while let Some(to) = node.poll_destination() {
        let Some(token) = port.transmit(to, now) else { return false };
        token.consume(|buffer| {
            let sent = node.poll_transmit(buffer, now);
            (sent.map_or(0, |sent| sent.len_bytes), ())
        });
    }
    true
}
