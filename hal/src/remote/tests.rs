//! Carriers over the double: what arrives, in which order, and what ends them.

use super::message::{Body, HEAD_LEN_BYTES, Head};
use super::*;
use crate::dma::{Capabilities, Profile};
use crate::ids::BootId;
use crate::mmio::{COMPLETION_WORDS, Features, FunctionConfig, SUBMISSION_WORDS};
use crate::ring::{Consumer, Producer};
use crate::shm::{Function, FunctionRing};
use std::vec::Vec;

const DEPTH: u32 = 64;

/// A link that loses nothing, with room for so many messages.
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

/// A side: its carrier, and the other ends of the rings.
struct Side<const OUT: usize, const IN: usize> {
    carrier: Carrier<OUT, IN>,
    into: [Producer<FunctionRing<OUT>, OUT>; 2],
    from: [Consumer<FunctionRing<IN>, IN>; 2],
    pipe: Pipe,
    heard: Vec<Heard>,
    _function: Function,
}

impl<const OUT: usize, const IN: usize> Side<OUT, IN> {
    fn new(function: Function, from: [FunctionRing<OUT>; 2], into: [FunctionRing<IN>; 2]) -> Self {
        let (out, taken) = (from.clone().map(Producer::new), into.clone().map(Consumer::new));
        let pipe = Pipe { room: 1000, ..Pipe::default() };
        let carrier = Carrier::new(from, into);
        Self { carrier, into: out, from: taken, pipe, heard: Vec::new(), _function: function }
    }

    fn turn(&mut self) -> Result<bool, CarrierError> {
        let heard = &mut self.heard;
        self.carrier.turn(&mut self.pipe, |word| heard.push(word))
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

/// Carry what each has sent to the other.
fn exchange(rank: &mut Rank, device: &mut Device) {
    device.pipe.arrived.extend(rank.pipe.sent.drain(..));
    rank.pipe.arrived.extend(device.pipe.sent.drain(..));
}

/// A thousand entries go through rings of 64 and a link of one message, in order, each once, whoever is slow.
#[test]
fn entries_arrive_in_order_each_once_however_little_room_there_is() {
    let (mut rank, mut device) = sides();
    (rank.pipe.room, device.pipe.room) = (1, 1);
    let (mut submitted, mut taken, mut answered, mut heard) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut turns = 0;
    while heard < 1000 {
        turns += 1;
        assert!(turns < 100_000, "stuck at {submitted} {taken} {answered} {heard}");
        while submitted < 1000 && rank.into[1].push(&[submitted; 8]).expect("whole") {
            submitted += 1;
        }
        rank.turn().expect("it goes on");
        device.turn().expect("it goes on");
        exchange(&mut rank, &mut device);
        // A device that takes three at a time, and a rank that looks now and then.
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
                assert_eq!(entry, [heard; 4]);
                heard += 1;
            }
        }
        assert!(device.pipe.arrived.len() <= BUFFERS && rank.pipe.arrived.len() <= BUFFERS);
    }
    let (sent, came) = (rank.carrier.stats(), device.carrier.stats());
    assert_eq!((sent.sent_entries, came.sent_entries), (1000, 1000));
    // As many as fit: rings of 64 make messages of 32 entries.
    assert!(sent.sent_messages < 500, "{sent:?}");
}

/// A whole batch is one message, and an idle side says nothing but the credit that it owes.
#[test]
fn a_batch_is_one_message_and_silence_is_none() {
    let (mut rank, mut device) = sides();
    for batch in 0..3 {
        assert_eq!(rank.into[1].push_batch(&[[batch; 8]; 32]), Ok(32));
        rank.turn().expect("it goes on");
    }
    assert_eq!(rank.pipe.sent.len(), 3);
    exchange(&mut rank, &mut device);
    for _ in 0..10 {
        device.turn().expect("it goes on");
    }
    assert!(device.pipe.sent.is_empty(), "three are not half of the credits, and there are no answers");
    rank.carrier.ask();
    rank.turn().expect("it goes on");
    exchange(&mut rank, &mut device);
    device.carrier.beat();
    device.turn().expect("it goes on");
    exchange(&mut rank, &mut device);
    rank.turn().expect("it goes on");
    assert_eq!(rank.heard, [Heard::Beat(1)], "who is asked says so");
}

/// Who takes nothing out gets so many messages and no more; then nothing is lost.
#[test]
fn without_credit_nothing_is_sent() {
    let (mut rank, mut device) = sides();
    let mut count = 0;
    for _ in 0..20 {
        count += rank.into[1].push_batch(&[[7; 8]; 8]).expect("whole");
        rank.turn().expect("it goes on");
    }
    assert_eq!(rank.pipe.sent.len(), CREDITS as usize);
    let mut taken = 0;
    for _ in 0..20 {
        exchange(&mut rank, &mut device);
        device.turn().expect("it goes on");
        exchange(&mut rank, &mut device);
        rank.turn().expect("it goes on");
        while device.from[1].pop().expect("whole").is_some() {
            taken += 1;
        }
    }
    assert_eq!(taken, count);
}

#[test]
fn memory_goes_before_the_entry_that_speaks_of_it() {
    let (mut rank, mut device) = sides();
    let region = RemoteRegion { addr: 1, len_bytes: 2, rkey: 3, generation: 4 };
    let memory = Memory { handle: 5, region, lands: true };
    rank.into[0].push(&[9; 8]).expect("whole");
    rank.carrier.hand_over(memory);
    rank.turn().expect("it goes on");
    exchange(&mut rank, &mut device);
    device.turn().expect("it goes on");
    assert_eq!(device.heard, [Heard::Beat(0), Heard::Memory(memory), Heard::Beat(0)]);
    assert_eq!(device.from[0].pop(), Ok(Some([9; 8])));
}

/// One message of a peer that does not keep the rules.
fn said(head: Head, body: &[u8]) -> Vec<u8> {
    let mut message = std::vec![0; HEAD_LEN_BYTES];
    head.emit(&mut message);
    message.extend_from_slice(body);
    message
}

#[test]
fn who_does_not_keep_the_rules_is_at_its_end() {
    let entry = Head { body: Body::Entries { queue: 1, count: 1 }, taken: 0, beat: 0, asks: false };
    let nothing = Head { body: Body::Nothing, ..entry };
    let ends = |messages: &[Vec<u8>]| {
        let (_, mut device) = sides();
        device.pipe.room = 0;
        device.pipe.arrived.extend(messages.iter().cloned());
        device.turn().expect_err("it is at its end")
    };
    assert!(matches!(ends(&[std::vec![1, 2, 3]]), CarrierError::Message(_)));
    assert!(matches!(ends(&[said(entry, &[0; 32])]), CarrierError::Message(_)), "an entry of the other direction");
    assert!(matches!(ends(&[said(Head { taken: 1, ..nothing }, &[])]), CarrierError::Credit { said: 1, sent: 0, .. }));
    let flood: Vec<_> = (0..=CREDITS).map(|_| said(entry, &[0; 64])).collect();
    assert_eq!(ends(&flood), CarrierError::Flood);
}
