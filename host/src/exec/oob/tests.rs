//! Out-of-band channels between ranks of one process.

use super::inbound::UNKNOWN_PEERS_MAX;
use super::*;
use crate::exec::auth::tests::shake_hands;
use crate::exec::auth::{ANSWER_BYTES, AnswerError, Dialler, HELLO_BYTES, PROOF_BYTES, Purpose};
use crate::exec::error::Refusal;
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

const LONG: Duration = Duration::from_secs(20);

fn listeners(ranks: usize) -> (Vec<TcpListener>, Vec<SocketAddr>) {
    let bind = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
    let listeners: Vec<TcpListener> = (0..ranks).map(bind).collect();
    let addresses = listeners.iter().map(|listener| listener.local_addr().expect("bound")).collect();
    (listeners, addresses)
}

fn start(rank: u32, listener: TcpListener, addresses: &[SocketAddr]) -> (OobChannel, Receiver<OobEvent>) {
    let (to, event) = channel();
    let on_event = move |what| {
        let answer = matches!(&what, OobEvent::Message(_, message) if message == b"and you?").then(|| b"fine".to_vec());
        // The test may be over.
        let _ = to.send(what);
        answer
    };
    let own = (Rank(rank), JobSecret::new([5; 32]), 1 << 20);
    (OobChannel::start(own, listener, addresses.to_vec(), on_event).expect("a thread"), event)
}

#[test]
fn messages_arrive_in_order_and_are_answered() {
    let (listeners, addresses) = listeners(2);
    let mut ends = (0..).zip(listeners).map(|(rank, listener)| start(rank, listener, &addresses));
    let ((a, at_a), (b, at_b)) = (ends.next().expect("two"), ends.next().expect("two"));
    let long = vec![7; 1 << 20];
    a.sender().send(Rank(1), long.clone());
    a.sender().send(Rank(1), b"and you?".to_vec());
    assert_eq!(at_b.recv_timeout(LONG), Ok(OobEvent::Message(Rank(0), long)));
    assert_eq!(at_b.recv_timeout(LONG), Ok(OobEvent::Message(Rank(0), b"and you?".to_vec())));
    assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Message(Rank(1), b"fine".to_vec())));
    // The last message arrives even if its sender has lost.
    b.sender().send(Rank(0), b"bye".to_vec());
    drop(b);
    assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Message(Rank(1), b"bye".to_vec())));
    a.sender().watch([Rank(1)]);
    assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Gone(Rank(1))));
}

/// It may have left in good order, and nobody waits for it.
#[test]
fn loss_of_an_unwatched_rank_is_not_reported() {
    let (listeners, addresses) = listeners(3);
    let mut ends: Vec<_> = (0..).zip(listeners).map(|(rank, listener)| start(rank, listener, &addresses)).collect();
    let (lost, at_lost) = ends.remove(1);
    let (a, at_a) = &ends[0];
    a.sender().send(Rank(1), b"hello".to_vec());
    assert_eq!(at_lost.recv_timeout(LONG), Ok(OobEvent::Message(Rank(0), b"hello".to_vec())));
    drop(lost);
    // A message to nobody, then one whose answer shows that the first has been handled.
    a.sender().send(Rank(1), b"hello?".to_vec());
    a.sender().send(Rank(2), b"and you?".to_vec());
    assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Message(Rank(2), b"fine".to_vec())));
    assert!(at_a.try_recv().is_err());
}

#[test]
fn watched_rank_that_never_answers_is_silent() {
    let (mut listeners, addresses) = listeners(2);
    let stopped = listeners.pop();
    let (a, at_a) = start(0, listeners.remove(0), &addresses);
    let began = Instant::now();
    a.sender().watch([Rank(1)]);
    assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Silent(Rank(1))));
    assert!(began.elapsed() >= SILENCE_LIMIT);
    drop(stopped);
}

#[test]
fn unknown_peers_are_rejected() {
    let (mut listeners, addresses) = listeners(2);
    let (_a, at_a) = start(0, listeners.remove(0), &addresses);
    let message = |secret, (purpose, from, to): (Purpose, u32, u32)| {
        let mut stream = TcpStream::connect(addresses[0]).expect("it listens");
        let (_, accepted) = shake_hands(&mut stream, &JobSecret::new([secret; 32]), (purpose, Rank(from), Rank(to)));
        // Fails if it has closed the connection.
        let _ = stream.write_all(&[2, 0, 0, 0, b'h', b'i']);
        accepted
    };
    let (oob, refused) = (Purpose::OutOfBand, |reason| Err(AnswerError::Refused(reason)));
    assert_eq!(message(6, (oob, 1, 0)), refused(Refusal::Secret));
    for other in [(oob, 2, 0), (oob, 0, 0), (oob, 1, 1), (Purpose::Peer, 1, 0)] {
        // An answer counts only as that of the rank that was asked for.
        let expected = if other.2 == 0 { refused(Refusal::Rank) } else { Err(AnswerError::Unproven) };
        assert_eq!(message(5, other), expected, "{other:?}");
    }
    assert!(at_a.try_recv().is_err());
    assert_eq!(message(5, (oob, 1, 0)), Ok(()));
    assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Message(Rank(1), b"hi".to_vec())));
    assert!(at_a.try_recv().is_err());
}

#[test]
fn recorded_connection_delivers_no_message() {
    let (mut listeners, addresses) = listeners(2);
    let (_a, at_a) = start(0, listeners.remove(0), &addresses);
    let secret = JobSecret::new([5; 32]);
    let mut stream = TcpStream::connect(addresses[0]).expect("it listens");
    let (mut recorded, accepted) = shake_hands(&mut stream, &secret, (Purpose::OutOfBand, Rank(1), Rank(0)));
    assert_eq!(accepted, Ok(()));
    stream.write_all(&[2, 0, 0, 0, b'h', b'i']).expect("small");
    assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Message(Rank(1), b"hi".to_vec())));
    recorded.extend([2, 0, 0, 0, b'h', b'i']);
    let mut stream = TcpStream::connect(addresses[0]).expect("it listens");
    stream.write_all(&recorded[..HELLO_BYTES]).expect("small");
    stream.read_exact(&mut [0; ANSWER_BYTES]).expect("an answer");
    stream.write_all(&recorded[HELLO_BYTES..HELLO_BYTES + PROOF_BYTES]).expect("small");
    let mut verdict = Vec::new();
    stream.read_to_end(&mut verdict).expect("it is closed");
    assert_eq!(verdict, crate::exec::auth::verdict(Some(Refusal::Secret)));
    assert!(at_a.try_recv().is_err());
}

/// It does not know the secret, so the rank is gone as if nobody listened there.
#[test]
fn squatter_at_a_ranks_address_counts_as_nobody() {
    let (mut listeners, addresses) = listeners(2);
    let squatter = listeners.pop().expect("two");
    let (a, at_a) = start(0, listeners.remove(0), &addresses);
    a.sender().watch([Rank(1)]);
    a.sender().send(Rank(1), b"a secret".to_vec());
    let (mut stream, _) = squatter.accept().expect("it dials");
    stream.read_exact(&mut [0; HELLO_BYTES]).expect("a hello");
    stream.write_all(&[1; ANSWER_BYTES]).expect("small");
    assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Gone(Rank(1))));
    assert_eq!(stream.read(&mut [0]).expect("it is closed"), 0, "and it hears nothing more");
}

/// Open `connections` connections, keep the last `retained`, and send nothing.
fn crowd(address: SocketAddr, connections: usize, retained: usize) -> VecDeque<TcpStream> {
    let mut open = VecDeque::new();
    for _ in 0..connections {
        open.push_back(TcpStream::connect(address).expect("it listens"));
        if open.len() > retained {
            open.pop_front();
        }
    }
    open
}

#[test]
fn idle_unknown_peers_do_not_displace_ranks() {
    let (mut listeners, addresses) = listeners(2);
    let (_a, at_a) = start(0, listeners.remove(0), &addresses);
    let unknown_peers = crowd(addresses[0], 3 * UNKNOWN_PEERS_MAX, 3 * UNKNOWN_PEERS_MAX);
    let (b, at_b) = start(1, listeners.remove(0), &addresses);
    b.sender().watch([Rank(0)]);
    b.sender().send(Rank(0), b"and you?".to_vec());
    assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Message(Rank(1), b"and you?".to_vec())));
    assert_eq!(at_b.recv_timeout(LONG), Ok(OobEvent::Message(Rank(0), b"fine".to_vec())));
    drop(unknown_peers);
}

#[test]
fn connection_flood_loses_no_message_and_no_rank() {
    let (listeners, addresses) = listeners(2);
    let mut ends: Vec<_> = (0..).zip(listeners).map(|(rank, listener)| start(rank, listener, &addresses)).collect();
    let ((b, _at_b), (a, at_a)) = (ends.pop().expect("two"), ends.pop().expect("two"));
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| crowd(addresses[1], 20_000, 10).len());
        a.sender().watch([Rank(1)]);
        while !flood.is_finished() {
            a.sender().send(Rank(1), b"and you?".to_vec());
            assert_eq!(at_a.recv_timeout(LONG), Ok(OobEvent::Message(Rank(1), b"fine".to_vec())));
        }
        assert_eq!(flood.join().expect("no panic"), 10);
    });
    drop(b);
}

/// The time limit applies to the whole handshake, not to each byte.
#[test]
fn slow_handshake_is_closed_at_the_limit() {
    let (mut listeners, addresses) = listeners(2);
    let (_a, _at_a) = start(0, listeners.remove(0), &addresses);
    let mut stream = TcpStream::connect(addresses[0]).expect("it listens");
    let pause = HELLO_LIMIT * 2 / HELLO_BYTES as u32;
    stream.set_read_timeout(Some(pause)).expect("a pause");
    let dialler = Dialler::new(Purpose::OutOfBand, Rank(1), Rank(0)).expect("random bytes");
    let hello = dialler.hello();
    let hung_up = hello.iter().position(|byte| {
        // Fails once the other end is closed, and so does what follows.
        let _ = stream.write(&[*byte]);
        !matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
    });
    assert!(hung_up.is_some_and(|at| at < HELLO_BYTES - 1), "{hung_up:?}");
}

/// The listener in place of a rank closes some connections first, as one does that is crowded by unknown peers.
#[test]
fn message_waits_for_an_accepted_connection() {
    let (mut listeners, addresses) = listeners(2);
    let listener = listeners.pop().expect("two");
    let (a, at_a) = start(0, listeners.remove(0), &addresses);
    a.sender().watch([Rank(1)]);
    a.sender().send(Rank(1), b"hi".to_vec());
    for _ in 0..5 {
        drop(listener.accept().expect("it dials again"));
    }
    let (b, at_b) = start(1, listener, &addresses);
    assert_eq!(at_b.recv_timeout(LONG), Ok(OobEvent::Message(Rank(0), b"hi".to_vec())));
    assert!(at_a.try_recv().is_err());
    drop(b);
}
