//! A board with a key and a controller, which has that key, another one, or none.

use super::*;
use sumac_hal::ctrl::secure::{
    CHALLENGE_LEN, HELLO_LEN, HandshakeError, Key, KeyId, KeyRefusal, MESSAGE_LEN, Opener, RECORD_LEN_MAX, REPLY_LEN,
    RecordError, Responder, Sealer, key_id, record_len, refusal_to_hello,
};

pub(super) fn key() -> Key {
    Key::new(KeyId(0x5a), [0xa7; 32])
}

impl Controlled {
    fn keyed() -> Self {
        let mut bed = Self::new();
        let address = SocketAddrV4::new(Ipv4Addr::new(10, 0, 1, 2), CONTROLLER);
        bed.control = Control::new(address, announce(), Some(key()), 7);
        // Not random, so that the tests are repeatable.
        bed.control.set_entropy(|| Some([9; 32]));
        bed
    }

    /// Let time pass until the controller has received so many bytes.
    fn receive_bytes<const N: usize>(&mut self) -> [u8; N] {
        for _ in 0..1_000 {
            if let Some(bytes) = self.received.first_chunk().copied() {
                self.received.drain(..N);
                return bytes;
            }
            self.pass().expect("a connection");
        }
        panic!("the controller did not receive {N} bytes within a second");
    }

    /// Answer the board's hello, with this key.
    fn challenge(&mut self, key: &Key) -> Responder {
        let hello: [u8; HELLO_LEN] = self.receive_bytes();
        assert_eq!(key_id(&hello), Ok(key.id()));
        let (responder, challenge) = Responder::new(&hello, key, &[4; 16]);
        // In pieces, as from a stream.
        let (head, tail) = challenge.split_at(5);
        self.send(head);
        self.pass().expect("a connection");
        self.send(tail);
        responder
    }

    /// Complete the handshake.
    fn accept(&mut self) -> (Sealer, Opener) {
        let responder = self.challenge(&key());
        let message: [u8; MESSAGE_LEN] = self.receive_bytes();
        let (reply, sealer, opener) = responder.handle_message(&message, [5; 32]).expect("the same key");
        self.send(&reply);
        (sealer, opener)
    }

    /// Let time pass until the controller has received a record, and open it.
    fn receive_record(&mut self, opener: &mut Opener) -> Vec<u8> {
        let header: [u8; 2] = self.receive_bytes();
        let len = record_len(&header).expect("a record").expect("its length");
        while self.received.len() < len - header.len() {
            self.pass().expect("a connection");
        }
        let mut record = header.to_vec();
        record.extend(self.received.drain(..len - header.len()));
        opener.open(&mut record).expect("authentic").to_vec()
    }
}

fn seal(sealer: &mut Sealer, plaintext: &[u8]) -> Vec<u8> {
    let mut record = [0; RECORD_LEN_MAX];
    let len = sealer.seal(plaintext, &mut record).expect("a record");
    record[..len].to_vec()
}

#[test]
fn board_with_a_key_serves_requests_over_an_encrypted_connection() {
    let mut bed = Controlled::keyed();
    let (mut sealer, mut opener) = bed.accept();
    let hello = bed.receive_record(&mut opener);
    assert_eq!(decode::<Hello>(&hello).expect("a message").expect("all of it").0, Hello::Device(announce()));
    assert!(!bed.control.is_up());
    // Two messages in two records, of which each has parts of both.
    let remove = Request::RemoveTree(TreeId(3));
    let both = [request(1, Request::Identify), request(2, remove.clone())].concat();
    let (head, tail) = both.split_at(17);
    let records = [seal(&mut sealer, head), seal(&mut sealer, tail)].concat();
    bed.send(&records[..30]);
    bed.pass().expect("a connection");
    bed.send(&records[30..]);
    for (id, message) in [(1, Response::Announce(announce())), (2, Response::Done)] {
        let response = bed.receive_record(&mut opener);
        let response = decode::<Envelope<Response>>(&response).expect("a message").expect("all of it").0;
        assert_eq!(response, Envelope { id, message });
    }
    assert_eq!(bed.executed, [remove]);
    assert!(bed.control.is_up());
}

/// Nothing wakes a board for a record that has already arrived.
#[test]
fn message_in_two_records_that_have_arrived_is_served_in_one_step() {
    let mut bed = Controlled::keyed();
    let (mut sealer, mut opener) = bed.accept();
    bed.receive_record(&mut opener);
    let removal = request(1, Request::RemoveTree(TreeId(3)));
    let (head, tail) = removal.split_at(7);
    let records = [seal(&mut sealer, head), seal(&mut sealer, tail)].concat();
    bed.send(&records);
    while bed.board.control().0.recv_queue() < records.len() {
        bed.bed.now_us += 1_000;
        let now = bed.bed.now();
        bed.controller.poll(now);
        bed.board.poll(now);
    }
    bed.pass().expect("a connection");
    assert_eq!(bed.executed, [Request::RemoveTree(TreeId(3))]);
}

/// Requests that together exceed the board's buffer, in as few records as possible: none is lost at its end.
#[test]
fn requests_beyond_the_buffer_are_all_served() {
    let mut bed = Controlled::keyed();
    let (mut sealer, mut opener) = bed.accept();
    bed.receive_record(&mut opener);
    let mut requests = Vec::new();
    let count = (1..).take_while(|&id| {
        requests.extend(request(id, Request::RemoveTree(TreeId(id))));
        requests.len() < 10_000
    });
    let count = count.count() as u32 + 1;
    let mut to_send: VecDeque<_> = requests.chunks(4096).flat_map(|chunk| seal(&mut sealer, chunk)).collect();
    for id in 1..=count {
        loop {
            let bytes = to_send.make_contiguous();
            let sent = bed.controller.control().0.send_slice(bytes).expect("a connection");
            to_send.drain(..sent);
            if bed.received.len() > 2 {
                break;
            }
            bed.pass().expect("a connection");
        }
        let response = bed.receive_record(&mut opener);
        let response = decode::<Envelope<Response>>(&response).expect("a message").expect("all of it").0;
        assert_eq!(response, Envelope { id, message: Response::Done });
    }
    assert_eq!(bed.executed.len(), count as usize);
}

#[test]
fn board_without_randomness_sends_nothing_and_says_so() {
    let mut bed = Controlled::keyed();
    bed.control.set_entropy(|| None);
    for _ in 0..3 {
        assert_eq!(bed.end(), ControlError::NoRandomness);
    }
    assert_eq!(bed.controller.control().0.state(), tcp::State::Listen, "it does not even connect");
    // Without a key there is nothing to be random.
    let mut bed = Controlled::new();
    assert_eq!(bed.receive::<Hello>(), Hello::Device(announce()));
}

#[test]
fn ephemeral_keys_are_drawn_anew_for_each_connection() {
    use core::sync::atomic::{AtomicU8, Ordering};
    static DRAWN: AtomicU8 = AtomicU8::new(0);
    let mut bed = Controlled::keyed();
    bed.control.set_entropy(|| Some([DRAWN.fetch_add(1, Ordering::Relaxed); 32]));
    let mut messages = Vec::new();
    for _ in 0..2 {
        let _ = bed.challenge(&key());
        messages.push(bed.receive_bytes::<MESSAGE_LEN>());
        bed.controller.control().0.abort();
        assert_eq!(bed.end(), ControlError::Closed);
        bed.controller.control().0.listen(CONTROLLER).expect("a port");
    }
    assert_ne!(messages[0], messages[1]);
}

#[test]
fn controller_that_does_not_prove_the_key_learns_only_its_id() {
    let mut bed = Controlled::keyed();
    let responder = bed.challenge(&Key::new(KeyId(0x5a), [1; 32]));
    let message: [u8; MESSAGE_LEN] = bed.receive_bytes();
    assert!(responder.handle_message(&message, [5; 32]).is_err(), "the board has another secret");
    // Whatever it replies, and whatever it asks in clear.
    let mut reply = [0x33; REPLY_LEN];
    reply[..4].copy_from_slice(b"Sk\0\0");
    bed.send(&reply);
    bed.send(&request(1, Request::Identify));
    assert_eq!(bed.end(), ControlError::Key(HandshakeError::Proof(KeyId(0x5a))));
    assert!(bed.received.is_empty() && bed.executed.is_empty());
}

#[test]
fn refusal_of_the_key_is_named() {
    let mut bed = Controlled::keyed();
    let _: [u8; HELLO_LEN] = bed.receive_bytes();
    bed.send(&refusal_to_hello(KeyRefusal::Revoked));
    bed.controller.control().0.close();
    let refused = HandshakeError::Refused { id: KeyId(0x5a), refusal: KeyRefusal::Revoked };
    assert_eq!(bed.end(), ControlError::Key(refused));
}

#[test]
fn plain_request_instead_of_a_challenge_is_not_executed() {
    let mut bed = Controlled::keyed();
    let _: [u8; HELLO_LEN] = bed.receive_bytes();
    let mut requests = request(1, Request::RemoveTree(TreeId(3)));
    requests.resize(CHALLENGE_LEN.max(requests.len()), 0);
    bed.send(&requests);
    assert_eq!(bed.end(), ControlError::Key(HandshakeError::Magic));
    assert!(bed.received.is_empty() && bed.executed.is_empty());
}

#[test]
fn changed_and_repeated_records_end_the_connection() {
    for is_repeated in [false, true] {
        let mut bed = Controlled::keyed();
        let (mut sealer, mut opener) = bed.accept();
        bed.receive_record(&mut opener);
        let mut record = seal(&mut sealer, &request(1, Request::RemoveTree(TreeId(3))));
        if is_repeated {
            bed.send(&record);
            bed.receive_record(&mut opener);
        } else {
            *record.last_mut().expect("a tag") ^= 1;
        }
        bed.send(&record);
        assert_eq!(bed.end(), ControlError::Record(RecordError::Authentication));
        assert_eq!(bed.executed.len(), usize::from(is_repeated));
    }
}

#[test]
fn controller_that_never_answers_the_hello_is_given_up_after_5_s() {
    let mut bed = Controlled::keyed();
    let _: [u8; HELLO_LEN] = bed.receive_bytes();
    let before = bed.bed.now();
    assert!(bed.control.poll_at().is_some_and(|at| at <= before + Duration::from_secs(5)), "the board wakes up for it");
    assert_eq!(bed.end(), ControlError::KeyTimeout);
    let waited = bed.bed.now() - before;
    assert!(waited <= Duration::from_secs(5) && waited > Duration::from_secs(4), "{waited:?}");
}
