//! Notes between ranks of one process.

use super::*;
use std::net::Ipv4Addr;
use std::sync::mpsc::{Receiver, channel};

const LONG: Duration = Duration::from_secs(20);

fn listeners(ranks: usize) -> (Vec<TcpListener>, Vec<SocketAddr>) {
    let bind = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
    let listeners: Vec<TcpListener> = (0..ranks).map(bind).collect();
    let addresses = listeners.iter().map(|listener| listener.local_addr().expect("bound")).collect();
    (listeners, addresses)
}

fn start(rank: u32, listener: TcpListener, addresses: &[SocketAddr]) -> (Notes, Receiver<Heard>) {
    let (to, heard) = channel();
    let on_heard = move |what| {
        let answer = matches!(&what, Heard::Note(_, note) if note == b"and you?").then(|| b"fine".to_vec());
        // The test may be over.
        let _ = to.send(what);
        answer
    };
    let own = (Rank(rank), JobToken(5), 1 << 20);
    (Notes::start(own, listener, addresses.to_vec(), on_heard).expect("a thread"), heard)
}

#[test]
fn notes_come_in_order_and_are_answered() {
    let (listeners, addresses) = listeners(2);
    let mut ends = (0..).zip(listeners).map(|(rank, listener)| start(rank, listener, &addresses));
    let ((a, at_a), (b, at_b)) = (ends.next().expect("two"), ends.next().expect("two"));
    let long = vec![7; 1 << 20];
    a.sender().send(Rank(1), long.clone());
    a.sender().send(Rank(1), b"and you?".to_vec());
    assert_eq!(at_b.recv_timeout(LONG), Ok(Heard::Note(Rank(0), long)));
    assert_eq!(at_b.recv_timeout(LONG), Ok(Heard::Note(Rank(0), b"and you?".to_vec())));
    assert_eq!(at_a.recv_timeout(LONG), Ok(Heard::Note(Rank(1), b"fine".to_vec())));
    // What was said last arrives, also if the one who said it has gone.
    b.sender().send(Rank(0), b"bye".to_vec());
    drop(b);
    assert_eq!(at_a.recv_timeout(LONG), Ok(Heard::Note(Rank(1), b"bye".to_vec())));
    a.sender().watch([Rank(1)]);
    assert_eq!(at_a.recv_timeout(LONG), Ok(Heard::Gone(Rank(1))));
}

/// It may have left in good order, and nobody waits for it.
#[test]
fn nobody_hears_that_a_rank_is_gone_that_is_not_watched() {
    let (listeners, addresses) = listeners(3);
    let mut ends: Vec<_> = (0..).zip(listeners).map(|(rank, listener)| start(rank, listener, &addresses)).collect();
    let (gone, at_gone) = ends.remove(1);
    let (a, at_a) = &ends[0];
    a.sender().send(Rank(1), b"hello".to_vec());
    assert_eq!(at_gone.recv_timeout(LONG), Ok(Heard::Note(Rank(0), b"hello".to_vec())));
    drop(gone);
    // A note to nobody, and then one that says that the first has been looked after.
    a.sender().send(Rank(1), b"hello?".to_vec());
    a.sender().send(Rank(2), b"and you?".to_vec());
    assert_eq!(at_a.recv_timeout(LONG), Ok(Heard::Note(Rank(2), b"fine".to_vec())));
    assert!(at_a.try_recv().is_err());
}

#[test]
fn who_listens_and_says_nothing_is_silent() {
    let (mut listeners, addresses) = listeners(2);
    let stopped = listeners.pop();
    let (a, at_a) = start(0, listeners.remove(0), &addresses);
    let began = Instant::now();
    a.sender().watch([Rank(1)]);
    assert_eq!(at_a.recv_timeout(LONG), Ok(Heard::Silent(Rank(1))));
    assert!(began.elapsed() >= SILENCE);
    drop(stopped);
}

#[test]
fn strangers_are_not_heard() {
    let (mut listeners, addresses) = listeners(2);
    let (_a, at_a) = start(0, listeners.remove(0), &addresses);
    let note = |token, from: u32, to: u32| {
        let mut stream = TcpStream::connect(addresses[0]).expect("it listens");
        let mut bytes = hello(JobToken(token), Rank(from), Rank(to)).to_vec();
        bytes.extend([2, 0, 0, 0, b'h', b'i']);
        stream.write_all(&bytes).expect("it listens");
        // It hangs up, perhaps by now.
        let _ = stream.shutdown(Shutdown::Write);
        stream.read(&mut [0; 1]).map_or(0, |n| n)
    };
    assert_eq!([note(6, 1, 0), note(5, 2, 0), note(5, 0, 0), note(5, 1, 1)], [0; 4]);
    note(5, 1, 0);
    assert_eq!(at_a.recv_timeout(LONG), Ok(Heard::Note(Rank(1), b"hi".to_vec())));
    assert!(at_a.try_recv().is_err());
}

/// Connect as often as told, keeping the last `kept` connections, and say nothing on any of them.
fn crowd(address: SocketAddr, connections: usize, kept: usize) -> VecDeque<TcpStream> {
    let mut open = VecDeque::new();
    for _ in 0..connections {
        open.push_back(TcpStream::connect(address).expect("it listens"));
        if open.len() > kept {
            open.pop_front();
        }
    }
    open
}

#[test]
fn idle_strangers_take_no_place_of_a_rank() {
    let (mut listeners, addresses) = listeners(2);
    let (_a, at_a) = start(0, listeners.remove(0), &addresses);
    let strangers = crowd(addresses[0], 3 * STRANGERS_MAX, 3 * STRANGERS_MAX);
    let (b, at_b) = start(1, listeners.remove(0), &addresses);
    b.sender().watch([Rank(0)]);
    b.sender().send(Rank(0), b"and you?".to_vec());
    assert_eq!(at_a.recv_timeout(LONG), Ok(Heard::Note(Rank(1), b"and you?".to_vec())));
    assert_eq!(at_b.recv_timeout(LONG), Ok(Heard::Note(Rank(0), b"fine".to_vec())));
    drop(strangers);
}

#[test]
fn flood_of_connections_loses_no_note_and_no_rank() {
    let (listeners, addresses) = listeners(2);
    let mut ends: Vec<_> = (0..).zip(listeners).map(|(rank, listener)| start(rank, listener, &addresses)).collect();
    let ((b, _at_b), (a, at_a)) = (ends.pop().expect("two"), ends.pop().expect("two"));
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| crowd(addresses[1], 20_000, 10).len());
        a.sender().watch([Rank(1)]);
        while !flood.is_finished() {
            a.sender().send(Rank(1), b"and you?".to_vec());
            assert_eq!(at_a.recv_timeout(LONG), Ok(Heard::Note(Rank(1), b"fine".to_vec())));
        }
        assert_eq!(flood.join().expect("no panic"), 10);
    });
    drop(b);
}

/// The time that a greeting has is for all of it, not for each byte.
#[test]
fn greeting_byte_by_byte_is_hung_up_on() {
    let (mut listeners, addresses) = listeners(2);
    let (_a, _at_a) = start(0, listeners.remove(0), &addresses);
    let mut stream = TcpStream::connect(addresses[0]).expect("it listens");
    let pause = HELLO_LIMIT * 2 / HELLO_BYTES as u32;
    stream.set_read_timeout(Some(pause)).expect("a pause");
    let hello = hello(JobToken(5), Rank(1), Rank(0));
    let hung_up = hello.iter().position(|byte| {
        // It fails once the other end is gone, and so does what follows.
        let _ = stream.write(&[*byte]);
        !matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
    });
    assert!(hung_up.is_some_and(|at| at < HELLO_BYTES - 1), "{hung_up:?}");
}

/// What listens in place of a rank hangs up a few times, as one does that is crowded with strangers.
#[test]
fn note_waits_for_the_connection_that_is_accepted() {
    let (mut listeners, addresses) = listeners(2);
    let listener = listeners.pop().expect("two");
    let (a, at_a) = start(0, listeners.remove(0), &addresses);
    a.sender().watch([Rank(1)]);
    a.sender().send(Rank(1), b"hi".to_vec());
    for _ in 0..5 {
        drop(listener.accept().expect("it dials again"));
    }
    let (b, at_b) = start(1, listener, &addresses);
    assert_eq!(at_b.recv_timeout(LONG), Ok(Heard::Note(Rank(0), b"hi".to_vec())));
    assert!(at_a.try_recv().is_err());
    drop(b);
}
