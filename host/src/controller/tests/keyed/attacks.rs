//! Attacks on connections with keys: strangers, recordings, changed bytes, squatters, floods.

use super::*;
use rustix::net::{AddressFamily, SocketType};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use sumac_hal::ctrl::StreamError;
use sumac_hal::ctrl::secure::{HELLO_LEN, RECORD_OVERHEAD_LEN};

/// Return what a controller answers to a key exchange without the secret: the head of its challenge, which has a nonce,
/// and its refusal.
fn answers_without_the_secret(controller: &Controller, id: KeyId) -> (Vec<u8>, Vec<u8>) {
    let (initiator, hello) = Initiator::new(&Key::new(id, [9; 32]), [5; 32]);
    let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
    stream.write_all(&hello).expect("small");
    let mut challenge = [0; CHALLENGE_LEN];
    stream.read_exact(&mut challenge).expect("a challenge");
    let (_, message) = initiator.handle_challenge(&challenge).expect("no refusal yet");
    stream.write_all(&message).expect("small");
    let mut refusal = Vec::new();
    stream.read_to_end(&mut refusal).expect("closed");
    (challenge[..4].to_vec(), refusal)
}

#[test]
fn strangers_do_not_learn_which_keys_there_are() {
    let mut keys = Keys::new();
    keys.store.revoke(keys.other.id()).expect("it has that key");
    let expired = keys.store.add(Principal::Operator, Some(1), &Zeroizing::new([5; 40])).expect("valid").id();
    let controller = keys.controller();
    let unknown = answers_without_the_secret(&controller, KeyId(9));
    assert_eq!((unknown.0.len(), unknown.1.len()), (4, REPLY_LEN));
    for id in [keys.ml.id(), keys.other.id(), expired] {
        assert_eq!(answers_without_the_secret(&controller, id), unknown);
    }
}

/// Record a connection that requests a report, from the initiator's side.
fn record(controller: &Controller, key: &Key) -> Vec<u8> {
    let relay = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = relay.local_addr().expect("bound");
    let target = controller.local_addr();
    let relaying = thread::spawn(move || {
        let (mut here, _) = relay.accept().expect("a client");
        let mut there = TcpStream::connect(target).expect("a controller");
        let (mut back_from, mut back_to) = (there.try_clone().expect("a file"), here.try_clone().expect("a file"));
        thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
        let mut recorded = Vec::new();
        let mut chunk = [0; 4096];
        while let Ok(len @ 1..) = here.read(&mut chunk) {
            recorded.extend_from_slice(&chunk[..len]);
            there.write_all(&chunk[..len]).expect("it listens");
        }
        recorded
    });
    assert!(status(ControllerAddr { key: Some(key.clone()), ..addr.into() }).is_ok());
    relaying.join().expect("no panic")
}

#[test]
fn recorded_connection_shows_nothing_and_is_worthless_when_replayed() {
    let keys = Keys::new();
    let controller = keys.controller();
    let recorded = record(&controller, &keys.operator);
    assert!(recorded.len() > HELLO_LEN + MESSAGE_LEN + 2 * RECORD_OVERHEAD_LEN, "hello, message, two requests");
    // Two bytes alone would occur in one of some hundred records by chance.
    let [low, high] = sumac_hal::ctrl::VERSION.to_le_bytes();
    let frame = [b'S', b'c', low, high];
    assert!(!recorded.windows(4).skip(HELLO_LEN).any(|bytes| bytes == frame), "no frame is in clear");
    let mut replay = TcpStream::connect(controller.local_addr()).expect("a controller");
    replay.set_read_timeout(Some(SOON)).expect("a socket");
    // Whether it comes in pieces or at once.
    replay.write_all(&recorded[..HELLO_LEN]).expect("it listens");
    let mut challenge = [0; CHALLENGE_LEN];
    replay.read_exact(&mut challenge).expect("a challenge");
    replay.write_all(&recorded[HELLO_LEN..]).expect("it listens");
    let mut answer = Vec::new();
    let ended = replay.read_to_end(&mut answer);
    assert!(ended.is_ok() || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    assert!(answer.is_empty() || answer.len() == REPLY_LEN && answer[2] == 2, "refused as a wrong key: {answer:?}");
}

#[test]
fn changed_record_ends_its_connection_only() {
    let keys = Keys::new();
    let controller = keys.controller();
    let (_job, _) = join_one(&controller, &keys.ml, "ml", "job").expect("its own job");
    let (writer, mut reader) = dial(&controller, Some(&keys.ml));
    writer
        .get_ref()
        .write_all(&[20, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20])
        .expect("sent");
    let ended = reader.recv::<ClientReply>();
    assert!(matches!(ended, Err(StreamError::Closed | StreamError::Io(_))), "{ended:?}");
    assert_eq!(status(at(&controller, &keys.operator)).expect("a report").jobs[0].joined, 1);
}

/// Whoever takes a controller's address gets a key's id and a message that proves nothing, and no request.
/// The limits are those of a whole message, so a byte now and then does not extend them.
#[test]
fn record_that_arrives_byte_by_byte_ends_its_connection_at_the_limit() {
    let keys = Keys::new();
    let limit = Duration::from_millis(400);
    let limits = Limits { greeting: limit, idle: limit, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..keys.config() }).expect("a port");
    for has_greeted in [false, true] {
        let (mut writer, _) = dial(&controller, Some(&keys.leaf));
        if has_greeted {
            send(&mut writer, &Hello::Device(announce("leaf0", 1, None))).expect("it listens");
        }
        let mut stream = writer.get_ref();
        stream.set_read_timeout(Some(limit / 20)).expect("a socket");
        let began = Instant::now();
        // The length of a record, and then one byte of it in each round.
        let mut bytes = 4000_u16.to_le_bytes().into_iter().chain(std::iter::repeat(0));
        while began.elapsed() < TEST_TIMEOUT {
            // Fails once the other end is closed.
            let _ = stream.write(&[bytes.next().expect("endless")]);
            match stream.read(&mut [0; 256]) {
                Ok(0) => break,
                Err(error) if error.kind() != ErrorKind::WouldBlock => break,
                _ => {}
            }
        }
        assert!(began.elapsed() >= limit / 2 && began.elapsed() < TEST_TIMEOUT, "{has_greeted}: {:?}", began.elapsed());
    }
}

#[test]
fn squatter_of_an_address_learns_nothing() {
    let keys = Keys::new();
    let squatter = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = squatter.local_addr().expect("bound");
    let listening = thread::spawn(move || {
        let (mut stream, _) = squatter.accept().expect("a client");
        let mut learned = vec![0; HELLO_LEN];
        stream.read_exact(&mut learned).expect("a hello");
        let mut challenge = [7; CHALLENGE_LEN];
        challenge[..4].copy_from_slice(b"Sk\0\0");
        stream.write_all(&challenge).expect("it reads");
        learned.resize(HELLO_LEN + MESSAGE_LEN, 0);
        stream.read_exact(&mut learned[HELLO_LEN..]).expect("a message");
        let mut reply = [7; REPLY_LEN];
        reply[..4].copy_from_slice(b"Sk\0\0");
        stream.write_all(&reply).expect("it reads");
        stream.read_to_end(&mut learned).expect("the end");
        learned
    });
    let refused = text_of(status(ControllerAddr { key: Some(keys.operator.clone()), ..addr.into() }));
    assert!(refused.contains("does not prove"), "{refused}");
    let learned = listening.join().expect("no panic");
    assert_eq!(learned.len(), HELLO_LEN + MESSAGE_LEN);
    assert_eq!(learned[4..HELLO_LEN], keys.operator.id().0.to_le_bytes());
}

#[test]
fn flood_of_half_handshakes_evicts_its_own_and_lets_ranks_in() {
    let keys = Keys::new();
    // So many may fail that only their number at a time counts.
    let limits = Limits { handshakes: 16, handshake_rate: 1_000_000, connections: 64, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..keys.config() }).expect("a port");
    let (_job, _) = join_one(&controller, &keys.ml, "ml", "runs").expect("its own job");
    let mut hello = Vec::from(*b"Sk\x01\0");
    hello.extend(keys.ml.id().0.to_le_bytes());
    let mut held: Vec<TcpStream> = Vec::new();
    for nth in 0..200 {
        let mut half = TcpStream::connect(controller.local_addr()).expect("a controller");
        half.write_all(&hello[..nth % (HELLO_LEN + 1)]).expect("sent");
        held.push(half);
    }
    let (_second, _) = join_one(&controller, &keys.ml, "ml", "joins").expect("it is not kept out");
    let report = status(at(&controller, &keys.operator)).expect("a report");
    assert_eq!(report.jobs.len(), 2, "the running job stays");
    // The oldest have been closed.
    let deadline = Instant::now() + TEST_TIMEOUT;
    held[0].set_read_timeout(Some(SOON)).expect("a socket");
    let ended = held[0].read(&mut [0; 64]);
    assert!(Instant::now() < deadline && !matches!(ended, Ok(1..)), "{ended:?}");
    // Those that remain are at most the limit: they are answered by the end of their time, and no more are.
    let open = held.iter().filter(|half| {
        let mut half: &TcpStream = half;
        half.set_nonblocking(true).expect("a socket");
        let mut bytes = [0; CHALLENGE_LEN + 1];
        loop {
            match half.read(&mut bytes) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
    });
    assert!(open.count() <= 16 + 1, "one may be on its way out");
}

/// Connect from an address of this host, and send a hello for a key and a message that proves nothing. Returns whether
/// the controller has answered.
fn is_answered(from: [u8; 4], controller: &Controller, key: &Key) -> bool {
    let stream = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    rustix::net::bind(&stream, &SocketAddr::from((from, 0))).expect("an address of loopback");
    rustix::net::connect(&stream, &controller.local_addr()).expect("a controller");
    let mut stream = TcpStream::from(stream);
    stream.set_read_timeout(Some(SOON)).expect("a socket");
    let mut flood = Vec::from(*b"Sk\x01\0");
    flood.extend(key.id().0.to_le_bytes());
    flood.extend([0; MESSAGE_LEN]);
    // It may be closed before.
    let _ = stream.write_all(&flood);
    stream.read_exact(&mut [0; CHALLENGE_LEN]).is_ok()
}

/// A controller with a budget of `burst` failed exchanges, and one more an hour.
fn controller_with_budget(keys: &Keys, burst: usize) -> Controller {
    let limits = Limits { handshakes: burst, handshake_rate: 0, ..Limits::default() };
    Controller::start(ControllerConfig { limits, ..keys.config() }).expect("a port")
}

#[test]
fn flood_from_one_address_leaves_half_of_the_budget_to_others() {
    let keys = Keys::new();
    let controller = controller_with_budget(&keys, 16);
    let answered = |from, count| (0..count).filter(|_| is_answered(from, &controller, &keys.ml)).count();
    assert_eq!(answered([127, 0, 0, 2], 100), 8);
    // At once, and each by its first attempt.
    for _ in 0..20 {
        dial(&controller, Some(&keys.ml));
    }
    assert_eq!((answered([127, 0, 0, 3], 6), answered([127, 0, 0, 2], 10)), (6, 0));
    // Two are left for all addresses.
    assert_eq!((answered([127, 0, 0, 4], 10), answered([127, 0, 0, 5], 10)), (2, 0));
}

#[test]
fn exchanges_of_peers_with_a_key_are_not_limited() {
    let keys = Keys::new();
    let controller = controller_with_budget(&keys, 8);
    assert!(!(0..100).all(|_| is_answered([127, 0, 0, 2], &controller, &keys.ml)));
    let held: Vec<_> = (0..100).map(|_| dial(&controller, Some(&keys.ml))).collect();
    let report = status(at(&controller, &keys.operator)).expect("a report");
    assert!(held.len() == 100 && report.jobs.is_empty());
}

#[test]
fn ranks_join_during_a_flood_from_their_own_address() {
    let keys = Keys::new();
    let limits = Limits { handshakes: 16, handshake_rate: 100, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..keys.config() }).expect("a port");
    let is_over = AtomicBool::new(false);
    let began = Instant::now();
    let (answered, closed) = thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let (mut answered, mut closed) = (0, 0);
            while (!is_over.load(Ordering::Acquire) || closed == 0) && began.elapsed() < TEST_TIMEOUT {
                *if is_answered([127, 0, 0, 1], &controller, &keys.ml) { &mut answered } else { &mut closed } += 1;
                // A few times what may fail, so that a rank needs a few attempts.
                thread::sleep(Duration::from_millis(5));
            }
            (answered, closed)
        });
        let join = |nth| join_one(&controller, &keys.ml, "ml", &format!("job{nth}")).map(drop);
        let joined: Vec<_> = (0..5).map(join).collect();
        is_over.store(true, Ordering::Release);
        let counts = flood.join().expect("no panic");
        joined.into_iter().for_each(|joined| joined.expect("during the flood"));
        counts
    });
    let most = 8 + began.elapsed().as_millis() as usize * 50 / 1000 + 1;
    assert!(answered <= most && closed > 0, "{answered} of at most {most} answered, {closed} closed");
}
