//! A rank: its endpoint, and the buffers that the endpoint borrows.

use crate::device::searched;
use crate::machine::{Act, Event, Facts, Machine, ViolationKind};
use crate::scope::{Data, ELEMENTS, Scope, Wiring};
use std::ops::Range;
use sumac::transport::packets::{Buffers, Endpoint, EndpointError, Event as Told, OpId};
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::time::Instant;
use sumac_hal::uplink::Uplink;
use sumac_hal::wire::{Kind, Packet, Repr, payload_crc};

/// A packed rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Member {
    index: usize,
    epoch: u16,
    /// The number of [`Scope::calls`] made.
    called: usize,
    /// Completions seen.
    done: u64,
    error: Option<EndpointError>,
    endpoint: Endpoint,
    memory: Memory,
}

/// Buffers of all operations, input and output in one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Memory(pub(crate) Vec<Vec<u8>>);

impl Buffers for Memory {
    fn input(&self, op: OpId) -> &[u8] {
        &self.0[op.0 as usize]
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        &mut self.0[op.0 as usize]
    }
}

impl Member {
    /// Create a rank that has called nothing.
    pub(crate) fn new(scope: &Scope, wiring: &Wiring, index: usize, epoch: u16) -> Self {
        let data = Data::new(wiring.ranks.len(), epoch);
        let buffer = |(desc, seqs): &(OpDesc, Range<u64>)| {
            let elements = 0..desc.count;
            elements.flat_map(|i| data.before(desc, index, seqs.start + i / ELEMENTS).to_le_bytes()).collect()
        };
        Self {
            index,
            epoch,
            called: 0,
            done: 0,
            error: None,
            endpoint: Endpoint::new(wiring.endpoint(scope, index, epoch)),
            memory: Memory(scope.ops().iter().map(buffer).collect()),
        }
    }

    /// Return the state of the group: the endpoint, the numbers of called and of returned operations, and the buffers.
    pub(crate) fn leave(&self, scope: &Scope) -> (Endpoint, u64, u64, Memory) {
        let called = scope.calls[..self.called].iter().flatten().count() as u64;
        (self.endpoint.clone(), called, self.done, self.memory.clone())
    }

    fn call(&mut self, scope: &Scope) {
        for desc in &scope.calls[self.called] {
            self.endpoint.post(*desc, Path::Tree, None).expect("calls of a group that has not failed");
        }
        self.called += 1;
    }

    /// Apply an event, and return the packets sent.
    pub(crate) fn meet(
        &mut self,
        scope: &Scope,
        wiring: &Wiring,
        event: Event<'_>,
        now: Instant,
    ) -> Vec<(Addr, Vec<u8>)> {
        match event {
            Event::Packets(packets) => {
                for (from, bytes) in packets {
                    let counted = scope.rules.counted.then(|| self.counted(scope, bytes));
                    let bytes = counted.as_deref().unwrap_or(bytes);
                    self.endpoint.handle(now, *from, Ecn::Unmarked, bytes, &mut self.memory);
                }
            }
            Event::Timer => self.endpoint.handle_timeout(now),
            Event::Calm => self.endpoint.forget_probes(),
            Event::Call => self.call(scope),
            Event::Renew => {
                // It continues its calls from the same position, with new data.
                let called = self.called;
                *self = Self::new(scope, wiring, self.index, scope.last_epoch());
                (0..called).for_each(|_| self.call(scope));
            }
            Event::Restart => panic!("ranks do not restart"),
        }
        let mut buffer = [0; 1500];
        let mut sent = Vec::new();
        while let Some(out) = self.endpoint.poll_transmit(now, &self.memory) {
            sent.extend(searched(scope, out.write(out.payload, &mut buffer)).map(|bytes| (out.to, bytes)));
        }
        sent
    }

    /// Return the time of the next timer.
    pub(crate) fn timeout(&self) -> Option<Instant> {
        self.endpoint.poll_timeout()
    }

    /// Apply an event, and check the next state.
    pub(crate) fn act(&self, scope: &Scope, wiring: &Wiring, event: Event<'_>) -> Act {
        let mut next = self.clone();
        let sent = next.meet(scope, wiring, event, Uplink::RESUME_AT);
        let dropped = next.endpoint.stats().dropped > 0;
        let mut flaw = next.listen(scope);
        next.endpoint.rest();
        flaw = flaw.or_else(|| next.check(scope, wiring));
        let inert = sent.is_empty() && (dropped || self.error.is_some()) && next == *self;
        Act { next: Machine::Rank(Box::new(next)), sent, inert, flaw }
    }

    /// Process the endpoint's events.
    fn listen(&mut self, scope: &Scope) -> Option<(ViolationKind, String)> {
        while let Some(event) = self.endpoint.poll_event() {
            match event {
                Told::Completed(id) if id.0 == self.done => self.done += 1,
                Told::Failed(error @ (EndpointError::PathLost | EndpointError::GroupLost))
                    if self.epoch < scope.last_epoch() =>
                {
                    self.error = Some(error);
                }
                other => return Some((ViolationKind::Failed, format!("{other:?} after {} operations", self.done))),
            }
        }
        None
    }

    /// Check the buffers: results of completed chunks, inputs elsewhere.
    fn check(&self, scope: &Scope, wiring: &Wiring) -> Option<(ViolationKind, String)> {
        let data = Data::new(wiring.ranks.len(), self.epoch);
        for ((desc, seqs), buffer) in scope.ops().iter().zip(&self.memory.0) {
            for (i, bytes) in buffer.chunks_exact(8).enumerate() {
                let seq = seqs.start + i as u64 / ELEMENTS;
                let found = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
                let expected = match self.endpoint.holds(seq) {
                    true => data.after(desc, self.index, seq),
                    false => data.before(desc, self.index, seq),
                };
                if found != expected {
                    let text = format!("chunk {seq} of {desc}: {found:#x} in place of {expected:#x}");
                    return Some((ViolationKind::WrongBytes, text));
                }
            }
        }
        None
    }

    /// Return the answer with a window that lets the rank keep `scope.window` chunks in flight, wherever they are. As
    /// the rank sends below `have` + window, the window grows by the completed chunks above `have`, this answer's
    /// included.
    fn counted(&self, scope: &Scope, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        let packet = Packet::new_checked(&bytes[..]).expect("packets arrive whole");
        let mut repr = Repr::parse(&packet).expect("packets are well-formed");
        let mut held = self.held(scope);
        if matches!(repr.kind, Kind::Result | Kind::Done) {
            (repr.seq.0..repr.seq.0 + u64::from(repr.count)).for_each(|seq| held |= 1 << seq);
        }
        repr.window = (held.count_ones() - held.trailing_ones()) as u16 + scope.window;
        let crc = payload_crc(&bytes[repr.header_len()..]);
        repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), crc);
        bytes
    }

    fn held(&self, scope: &Scope) -> u64 {
        let seqs = scope.ops().last().map_or(0, |(_, seqs)| seqs.end);
        (0..seqs).filter(|&seq| self.endpoint.holds(seq)).fold(0, |held, seq| held | 1 << seq)
    }

    /// Return the facts for the oracles.
    pub(crate) fn facts(&self, scope: &Scope) -> Facts {
        Facts {
            epoch: self.epoch,
            armed: self.timeout().is_some(),
            can_call: self.called < scope.calls.len() && self.error.is_none(),
            done: self.done == scope.calls.iter().flatten().count() as u64,
            held: self.held(scope),
            stable: self.endpoint.stable().0,
            ..Facts::default()
        }
    }
}
