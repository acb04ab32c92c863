//! Carriers over an in-memory pipe: delivery order, flow control, and protocol violations.

use super::message::{Body, HEAD_LEN_BYTES, Head};
use super::*;
use crate::dma::{Capabilities, Profile};
use crate::ids::BootId;
use crate::mmio::{COMPLETION_WORDS, Features, FunctionConfig, SUBMISSION_WORDS};
use crate::ring::{Consumer, Producer};
use crate::shm::{Function, FunctionRing};
use std::vec::Vec;

const DEPTH: u32 = 64;

/// A lossless link with room for `room` messages.
#[derive(Default)]
struct Pipe {
    sent: Vec<Vec<u8>>,
    arrived: std::collections::VecDeque<Vec<u8>>,
    room: usize,
}

impl Link for Pipe {
    fn send(&mut self, message: &[u8]) -> Result<bool, LinkError> {
        if self.sent.len() == self.room {
            return Ok(false);
        }
        self.sent.push(message.to_vec());
        Ok(true)
    }

    fn receive(&mut self, into: &mut [u8; MESSAGE_LEN_BYTES]) -> Result<Option<Arrived>, LinkError> {
        Ok(self.arrived.pop_front().map(|message| {
            into[..message.len()].copy_from_slice(&message);
            Arrived::Message(message.len())
        }))
    }
}

/// One side: its carrier, and the other ends of its rings.
struct Side<const OUT: usize, const IN: usize> {
    carrier: Carrier<OUT, IN>,
    into: [Producer<FunctionRing<OUT>, OUT>; 2],
    from: [Consumer<FunctionRing<IN>, IN>; 2],
    pipe: Pipe,
    events: Vec<CarrierEvent>,
    _function: Function,
}

impl<const OUT: usize, const IN: usize> Side<OUT, IN> {
    fn new(function: Function, from: [FunctionRing<OUT>; 2], into: [FunctionRing<IN>; 2]) -> Self {
        let (out, taken) = (from.clone().map(Producer::new), into.clone().map(Consumer::new));
        let pipe = Pipe { room: 1000, ..Pipe::default() };
        let carrier = Carrier::new(from, into);
        Self { carrier, into: out, from: taken, pipe, events: Vec::new(), _function: function }
    }

    fn poll(&mut self) -> Result<bool, CarrierError> {
        let events = &mut self.events;
        self.carrier.poll(&mut self.pipe, |event| events.push(event))
    }
}

fn function() -> Function {
    let dma = Capabilities::new(Profile::Full, 8, 8);
    let config = FunctionConfig { boot_id: BootId(1), features: Features::all(), queues: 2, depth: DEPTH, dma };
    Function::create(&config).expect("memory")
}

type Rank = Side<SUBMISSION_WORDS, COMPLETION_WORDS>;
type Device = Side<COMPLETION_WORDS, SUBMISSION_WORDS>;

fn sides() -> (Rank, Device) {
    let side = || {
        let function = function();
        let queues = [0, 1].map(|index| function.queue(index).expect("two"));
        let submissions = queues.clone().map(|queue| queue.submissions);
        (function, submissions, queues.map(|queue| queue.completions))
    };
    let (function, submissions, completions) = side();
    let rank = Side::new(function, submissions, completions);
    let (function, submissions, completions) = side();
    (rank, Side::new(function, completions, submissions))
}

/// Deliver each side's messages to the other.
fn exchange(rank: &mut Rank, device: &mut Device) {
    device.pipe.arrived.extend(rank.pipe.sent.drain(..));
    rank.pipe.arrived.extend(device.pipe.sent.drain(..));
}

/// A thousand entries pass through rings of 64 and a link with room for one message.
#[test]
fn entries_arrive_once_and_in_order_with_room_for_one_message() {
    let (mut rank, mut device) = sides();
    (rank.pipe.room, device.pipe.room) = (1, 1);
    let (mut submitted, mut taken, mut answered, mut received) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut turns = 0;
    while received < 1000 {
        turns += 1;
        assert!(turns < 100_000, "stuck at {submitted} {taken} {answered} {received}");
        while submitted < 1000 && rank.into[1].push(&[submitted; 8]).expect("whole") {
            submitted += 1;
        }
        rank.poll().expect("no error");
        device.poll().expect("no error");
        exchange(&mut rank, &mut device);
        // The device takes three entries a round, the rank polls every seventh round.
        for _ in 0..3 {
            if let Some(entry) = device.from[1].pop().expect("whole") {
                assert_eq!(entry, [taken; 8]);
                taken += 1;
            }
        }
        while answered < taken && device.into[1].push(&[answered; 4]).expect("whole") {
            answered += 1;
        }
        if turns % 7 == 0 {
            while let Some(entry) = rank.from[1].pop().expect("whole") {
                assert_eq!(entry, [received; 4]);
                received += 1;
            }
        }
        assert!(device.pipe.arrived.len() <= BUFFERS && rank.pipe.arrived.len() <= BUFFERS);
    }
    let (sent, received) = (rank.carrier.stats(), device.carrier.stats());
    assert_eq!((sent.sent_entries, received.sent_entries), (1000, 1000));
    // Messages are filled: rings of 64 make messages of 32 entries.
    assert!(sent.sent_messages < 500, "{sent:?}");
}

/// A batch is sent as one message; an idle side sends only the credit that it has not returned yet.
#[test]
fn batch_is_one_message_and_idle_side_sends_nothing_unasked() {
    let (mut rank, mut device) = sides();
    for batch in 0..3 {
        assert_eq!(rank.into[1].push_batch(&[[batch; 8]; 32]), Ok(32));
        rank.poll().expect("no error");
    }
    assert_eq!(rank.pipe.sent.len(), 3);
    exchange(&mut rank, &mut device);
    for _ in 0..10 {
        device.poll().expect("no error");
    }
    assert!(device.pipe.sent.is_empty(), "three messages are less than half of the credits, and nothing was answered");
    rank.carrier.request_heartbeat();
    rank.poll().expect("no error");
    exchange(&mut rank, &mut device);
    device.carrier.advance_heartbeat();
    device.poll().expect("no error");
    exchange(&mut rank, &mut device);
    rank.poll().expect("no error");
    assert_eq!(rank.events, [CarrierEvent::Heartbeat(1)], "a requested heartbeat is sent");
}

/// A receiver that consumes nothing gets `CREDITS` messages; nothing is lost once it does.
#[test]
fn sender_without_credit_stops_and_resumes_without_loss() {
    let (mut rank, mut device) = sides();
    let mut count = 0;
    for _ in 0..20 {
        count += rank.into[1].push_batch(&[[7; 8]; 8]).expect("whole");
        rank.poll().expect("no error");
    }
    assert_eq!(rank.pipe.sent.len(), CREDITS as usize);
    let mut taken = 0;
    for _ in 0..20 {
        exchange(&mut rank, &mut device);
        device.poll().expect("no error");
        exchange(&mut rank, &mut device);
        rank.poll().expect("no error");
        while device.from[1].pop().expect("whole").is_some() {
            taken += 1;
        }
    }
    assert_eq!(taken, count);
}

#[test]
fn memory_is_sent_before_the_entry_that_refers_to_it() {
    let (mut rank, mut device) = sides();
    let region = RemoteRegion { addr: 1, len_bytes: 2, rkey: 3, generation: 4 };
    let memory = Memory { handle: 5, region, lands: true };
    rank.into[0].push(&[9; 8]).expect("whole");
    rank.carrier.hand_over(memory);
    rank.poll().expect("no error");
    exchange(&mut rank, &mut device);
    device.poll().expect("no error");
    assert_eq!(device.events, [CarrierEvent::Heartbeat(0), CarrierEvent::Memory(memory), CarrierEvent::Heartbeat(0)]);
    assert_eq!(device.from[0].pop(), Ok(Some([9; 8])));
}

/// A message of a peer that violates the protocol.
fn message(head: Head, body: &[u8]) -> Vec<u8> {
    let mut message = std::vec![0; HEAD_LEN_BYTES];
    head.emit(&mut message);
    message.extend_from_slice(body);
    message
}

#[test]
fn protocol_violation_ends_the_connection() {
    let entry =
        Head { body: Body::Entries { queue: 1, count: 1 }, consumed: 0, heartbeat: 0, requests_heartbeat: false };
    let nothing = Head { body: Body::Nothing, ..entry };
    let ends = |messages: &[Vec<u8>]| {
        let (_, mut device) = sides();
        device.pipe.room = 0;
        device.pipe.arrived.extend(messages.iter().cloned());
        device.poll().expect_err("a protocol violation")
    };
    assert!(matches!(ends(&[std::vec![1, 2, 3]]), CarrierError::Message(_)));
    assert!(matches!(ends(&[message(entry, &[0; 32])]), CarrierError::Message(_)), "an entry of the other direction");
    assert!(matches!(
        ends(&[message(Head { consumed: 1, ..nothing }, &[])]),
        CarrierError::Credit { acked: 1, sent: 0, .. }
    ));
    let flood: Vec<_> = (0..=CREDITS).map(|_| message(entry, &[0; 64])).collect();
    assert_eq!(ends(&flood), CarrierError::Flood);
}
