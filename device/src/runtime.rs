//! Moves packets between a port and a node: what every board's loop calls.

use crate::node::{Node, Outgoing};
use heapless::Vec;
use sumac_hal::port::{Gather, Port, RxToken};
use sumac_hal::time::Instant;

/// Receive rounds in one poll: bounds its work, so that a flood can't keep control requests waiting.
const ROUNDS: usize = 4;

/// Packets handed to the port at a time: enough for long runs to each child, few enough for a small stack.
const BATCH: usize = 32;

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
            let is_marked = token.is_marked();
            token.consume(|from, packet| match is_marked {
                true => node.handle_marked(from, packet, now),
                false => node.handle(from, packet, now),
            });
            received += 1;
        }
        if node.poll_timeout().is_some_and(|at| at <= now) {
            node.handle_timeout(now);
        }
        // What the port refused earlier goes first.
        port.flush(now);
        let blocked = !transmit(node, port, now);
        busy = blocked || received == burst;
        if received < burst {
            break;
        }
    }
    if busy { Some(now) } else { node.poll_timeout() }
}

/// Send what the node has, payloads from where they are; false if the port could not take all of it.
fn transmit<P: Port>(node: &mut Node<'_>, port: &mut P, now: Instant) -> bool {
    loop {
        let room = port.room().min(BATCH);
        if room == 0 {
            return false;
        }
        let mut batch: Vec<Outgoing, BATCH> = Vec::new();
        while batch.len() < room {
            let Some(out) = node.poll_outgoing(now) else { break };
            // There is room: the batch is as long as what was asked for.
            let _ = batch.push(out);
        }
        if batch.is_empty() {
            return true;
        }
        let node = &*node;
        port.transmit_gather(
            batch.iter().map(|out| Gather { to: out.to, header: &out.header, payload: node.payload(out) }),
            now,
        );
    }
}
