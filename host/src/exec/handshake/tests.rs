//! Unknown peers, squatters and replays against ranks of one process.

use super::*;
use crate::exec::auth::tests::shake_hands;
use crate::exec::auth::{AnswerError, Dialler};
use crate::exec::tests::{context, meshes, on_ranks, secret};
use crate::exec::{NoInterrupt, execute};
use crate::schedule::dissemination;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;
use sumac_hal::op::{OpDesc, Path};

fn barrier(mesh: &mut Mesh, op_index: u64) -> Result<(), ExecError> {
    let ctx = context(op_index, OpDesc::barrier(), Path::Ring);
    execute(mesh, &dissemination::barrier(mesh.place()), None, &mut [][..], &ctx, &mut NoInterrupt)
}

fn address(mesh: &Mesh) -> SocketAddr {
    mesh.acceptor.listener().local_addr().expect("bound")
}

/// Connect to a mesh, and let it accept.
fn connect(mesh: &mut Mesh) -> TcpStream {
    let stream = TcpStream::connect(address(mesh)).expect("listening");
    while mesh.accept(Instant::now()).is_none() {
        thread::yield_now();
    }
    stream
}

/// Advance the only pending connection until it is no longer pending.
fn finish(mesh: &mut Mesh) -> HandshakeOutcome {
    loop {
        match mesh.advance_handshake(0) {
            HandshakeOutcome::Incomplete => thread::yield_now(),
            outcome => return outcome,
        }
    }
}

/// Send bytes to a mesh, each part once there is an answer to the one before, and return what became of them.
fn replay(mesh: &mut Mesh, parts: &[&[u8]]) -> (HandshakeOutcome, Vec<u8>) {
    let mut stream = connect(mesh);
    thread::scope(|scope| {
        let replay = scope.spawn(move || {
            let mut received = Vec::new();
            for part in parts {
                stream.write_all(part).expect("small");
                let mut bytes = [0; 256];
                // Fails, too, if the mesh has closed the connection without reading it all.
                let n = stream.read(&mut bytes).unwrap_or(0);
                received.extend_from_slice(&bytes[..n]);
            }
            received
        });
        let outcome = finish(mesh);
        (outcome, replay.join().expect("no panic"))
    })
}

#[test]
fn unknown_peers_are_dropped_and_counted() {
    let mut meshes = meshes(2);
    let address = address(&meshes[1]);
    let (zero, one, two) = (Rank(0), Rank(1), Rank(2));
    let hello = |purpose, from, to| Hello::new(purpose, from, to, 1).expect("random bytes");
    let of_peer = |from, to| hello(Purpose::Peer, from, to);
    let unknown_peers = [
        (*b"GET / HTTP/1.1\r\nHost: strangers\r\nAccept: everything there is\r\n\r\n", None),
        (Hello { version: VERSION + 1, ..of_peer(zero, one) }.emit(), Some(Refusal::Version)),
        (of_peer(one, one).emit(), Some(Refusal::Rank)),
        (of_peer(two, one).emit(), Some(Refusal::Rank)),
        (of_peer(zero, zero).emit(), Some(Refusal::Rank)),
        (hello(Purpose::OutOfBand, zero, one).emit(), Some(Refusal::Rank)),
        (hello(Purpose::OneShot, zero, two).emit(), None),
    ];
    let mut connections: Vec<_> = unknown_peers
        .iter()
        .map(|(bytes, _)| {
            let mut stream = TcpStream::connect(address).expect("listening");
            stream.write_all(bytes).expect("small");
            stream
        })
        .collect();
    let silent = TcpStream::connect(address).expect("listening");
    assert_eq!(on_ranks(&mut meshes, |mesh| barrier(mesh, 0)), [Ok(()), Ok(())]);
    assert_eq!(meshes[1].foreign_dropped(), unknown_peers.len() as u64);
    for (stream, (_, reason)) in connections.iter_mut().zip(&unknown_peers) {
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("closed");
        let head = answer.first_chunk().copied();
        assert_eq!(head, reason.map(|reason| verdict(Some(reason))));
    }
    drop(silent);
    assert_eq!(on_ranks(&mut meshes, |mesh| barrier(mesh, 1)), [Ok(()), Ok(())]);
}

#[test]
fn stranger_with_a_wrong_secret_is_refused_and_counted() {
    let mut meshes = meshes(2);
    for purpose in [Purpose::Peer, Purpose::PointToPoint] {
        let mut stream = connect(&mut meshes[1]);
        let wrong = JobSecret::new([1; 32]);
        let stranger = thread::spawn(move || {
            let (_, verdict) = shake_hands(&mut stream, &wrong, (purpose, Rank(0), Rank(1)));
            (verdict, stream.read(&mut [0; 1]).expect("closed"))
        });
        assert!(matches!(finish(&mut meshes[1]), HandshakeOutcome::Dropped));
        let refused = Err(AnswerError::Refused(Refusal::Secret));
        assert_eq!(stranger.join().expect("no panic"), (refused, 0));
    }
    assert_eq!(meshes[1].foreign_dropped(), 2);
    assert_eq!(on_ranks(&mut meshes, |mesh| barrier(mesh, 0)), [Ok(()), Ok(())]);
}

/// The recording is of a rank that was accepted; its place is free again when it is replayed.
#[test]
fn recorded_handshake_opens_no_connection() {
    let mut meshes = meshes(3);
    let of_rank_0 = (Purpose::Peer, Rank(0), Rank(1));
    let mut stream = connect(&mut meshes[1]);
    let rank_0 = thread::spawn(move || shake_hands(&mut stream, &secret(), of_rank_0));
    assert!(matches!(finish(&mut meshes[1]), HandshakeOutcome::Joined));
    let (recorded, accepted) = rank_0.join().expect("no panic");
    assert_eq!(accepted, Ok(()));
    meshes[1].links[0] = crate::exec::link::Link::default();
    let (hello, proof) = recorded.split_at(HELLO_BYTES);
    let (outcome, received) = replay(&mut meshes[1], &[hello, proof]);
    assert!(matches!(outcome, HandshakeOutcome::Dropped), "{outcome:?}");
    assert_eq!(received[ANSWER_BYTES..], verdict(Some(Refusal::Secret)));
    assert!(matches!(meshes[1].links[0].state, State::Idle));
    // Nor with another rank.
    let (outcome, received) = replay(&mut meshes[2], &[hello]);
    assert!(matches!(outcome, HandshakeOutcome::Dropped), "{outcome:?}");
    assert_eq!(received[..8], verdict(Some(Refusal::Rank)));
    assert_eq!([meshes[1].foreign_dropped(), meshes[2].foreign_dropped()], [1, 1]);
}

/// A squatter has taken over rank 1's port. Its best answer is that of a rank that is still there.
#[test]
fn squatter_at_a_ranks_port_is_found_out() {
    for is_relayed in [false, true] {
        let mut meshes = meshes(3);
        let squatter = meshes.remove(1).acceptor;
        let squatter = squatter.listener().try_clone().expect("a socket");
        squatter.set_nonblocking(false).expect("a socket");
        let relayed = is_relayed.then(|| address(&meshes[1]));
        let squatter = thread::spawn(move || squat(&squatter, relayed));
        let results = on_ranks(&mut meshes, |mesh| barrier(mesh, 0));
        let error = Err(ExecError::Unproven { rank: Rank(0), peer: Rank(1) });
        assert_eq!(results, [error.clone(), error]);
        squatter.join().expect("no panic");
    }
}

/// Answer every connection with what `relayed` answers, or with noise, until the rank closes it.
fn squat(listener: &TcpListener, relayed: Option<SocketAddr>) {
    let (mut stream, _) = listener.accept().expect("a rank dials");
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello).expect("a hello");
    let mut answer = [7; ANSWER_BYTES];
    answer[..8].copy_from_slice(&verdict(None));
    if let Some(relayed) = relayed {
        let mut other = TcpStream::connect(relayed).expect("listening");
        other.write_all(&hello).expect("small");
        other.read_exact(&mut answer).expect("a refusal");
        assert_eq!(answer[..8], verdict(Some(Refusal::Rank)));
    }
    stream.write_all(&answer).expect("small");
    // Nothing more is said to it.
    assert_eq!(stream.read(&mut [0; 1]).expect("closed"), 0);
}

#[test]
fn half_open_connections_are_closed_at_the_limit() {
    let mut meshes = meshes(2);
    let of_rank_0 = Dialler::new(Purpose::Peer, Rank(0), Rank(1)).expect("random bytes");
    let (mut silent, mut half) = (connect(&mut meshes[1]), connect(&mut meshes[1]));
    half.write_all(of_rank_0.hello()).expect("small");
    let mut answer = [0; ANSWER_BYTES];
    while meshes[1].pending[1].answer.is_none() {
        assert!(matches!(meshes[1].advance_handshake(1), HandshakeOutcome::Incomplete));
    }
    meshes[1].pending.iter_mut().for_each(|pending| pending.since -= HELLO_LIMIT);
    assert_eq!(on_ranks(&mut meshes, |mesh| barrier(mesh, 0)), [Ok(()), Ok(())]);
    assert!(meshes[1].pending.is_empty());
    assert_eq!(meshes[1].foreign_dropped(), 2);
    half.read_exact(&mut answer).expect("our answer");
    assert_eq!([silent.read(&mut [0]).expect("closed"), half.read(&mut [0]).expect("closed")], [0, 0]);
}

#[test]
fn recorded_one_shot_is_refused() {
    let mut meshes = meshes(3);
    let call = Call::new(Rank(0), 0, 0, &OpDesc::barrier(), Path::Ring);
    let header = Header { number: 9, ..Header::bare(FrameKind::Announce, call, 0) }.emit();
    let abort = AbortFrame::new((call, 1), &ExecError::RankLost { rank: Rank(2) });
    let first = meshes[0].one_shot(Rank(1), &header).expect("random bytes");
    let second = meshes[0].one_shot(Rank(1), abort.bytes()).expect("random bytes");
    let mut forged = second.clone();
    forged[HELLO_BYTES + 8] ^= 1;
    let announced = replay(&mut meshes[1], &[&first]).0;
    assert!(matches!(announced, HandshakeOutcome::Announced(announced, 9) if announced == call));
    for refused in [&first, &forged] {
        assert!(matches!(replay(&mut meshes[1], &[refused]).0, HandshakeOutcome::Dropped));
    }
    assert!(matches!(replay(&mut meshes[1], &[&second]).0, HandshakeOutcome::Aborted(_)));
    for refused in [&first, &second] {
        assert!(matches!(replay(&mut meshes[1], &[refused]).0, HandshakeOutcome::Dropped));
    }
    assert!(matches!(replay(&mut meshes[2], &[&second]).0, HandshakeOutcome::Dropped));
    assert_eq!([meshes[1].foreign_dropped(), meshes[2].foreign_dropped()], [4, 1]);
}
