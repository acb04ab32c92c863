//! Two streams between two processes: bytes in both directions, references, and memory that is not what it should be.

use super::processes::OtherProcess;
use super::*;
use crate::ring::{StreamConsumer, StreamProducer};

/// The capacity of a stream in the tests.
const CAPACITY_BYTES: u32 = 0x1000;
/// Bytes that go through a stream: many times its capacity.
const SENT_BYTES: usize = 1 << 20;
/// The length of what the other process refers to.
const REFERRED_BYTES: usize = 300_000;

fn byte(at: usize) -> u8 {
    (at * 31 + at / 4096) as u8
}

/// Send `SENT_BYTES`, as far as there is room, while the same number is received and checked.
fn exchange(
    tx: &mut StreamProducer<DuplexStream>,
    rx: &mut StreamConsumer<DuplexStream>,
    (own, other): (Doorbell<&AtomicU32>, Doorbell<&AtomicU32>),
) {
    let (mut sent, mut received) = (0, 0);
    let mut buffer = [0; 700];
    while sent < SENT_BYTES || received < SENT_BYTES {
        let piece: Vec<u8> = (sent..SENT_BYTES.min(sent + 900)).map(byte).collect();
        let (head, body) = piece.split_at(piece.len().min(64));
        let moved_out = tx.write(&[head, body]).expect("the peer is correct");
        // No more: an address may already follow the last byte.
        let left = buffer.len().min(SENT_BYTES - received);
        let moved_in = rx.read(&mut buffer[..left]).expect("the peer is correct");
        assert!((received..).map(byte).zip(&buffer[..moved_in]).all(|(right, found)| right == *found));
        sent += moved_out;
        received += moved_in;
        if moved_in + moved_out > 0 {
            ring(other);
            continue;
        }
        let ready = || {
            (sent < SENT_BYTES && tx.room_bytes() != Ok(0)) || (received < SENT_BYTES && rx.available_bytes() != Ok(0))
        };
        assert_eq!(Waiter::new(SpinPolicy::NONE).wait(&[own], Some(Instant::now() + LONG), ready), Ok(true));
    }
}

/// What the other process does: it opens the memory, exchanges bytes, and refers to its own memory until it is told to
/// end.
pub(super) fn refer(name: &str) {
    let connection = Connection::open(name, LONG).expect("a device");
    let file = connection.receive(LONG).expect("memory").file.expect("a descriptor");
    let duplex = Duplex::open(file, 0x5eed).expect("sealed");
    let (mut tx, mut rx) = duplex.streams();
    exchange(&mut tx, &mut rx, (duplex.own_bell(), duplex.peer_bell()));
    let referred: Vec<u8> = (0..REFERRED_BYTES).map(byte).collect();
    let address = referred.as_ptr().expose_provenance() as u64;
    // The peer may not have read all of the other bytes yet.
    let has_room = || tx.room_bytes().is_ok_and(|room| room >= 8);
    assert_eq!(
        Waiter::new(SpinPolicy::NONE).wait(&[duplex.own_bell()], Some(Instant::now() + LONG), has_room),
        Ok(true)
    );
    assert_eq!(tx.write(&[&address.to_le_bytes()]), Ok(8));
    ring(duplex.peer_bell());
    let taken = || duplex.taken_by_peer() == 1;
    assert_eq!(Waiter::new(SpinPolicy::NONE).wait(&[duplex.own_bell()], Some(Instant::now() + LONG), taken), Ok(true));
}

#[test]
fn processes_exchange_bytes_and_read_each_others_memory() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let process = OtherProcess::start("refer", &name);
    let connection = listener.accept(LONG).expect("the other process").expect("in time");
    let duplex = Duplex::create(CAPACITY_BYTES, 1).expect("memory");
    connection.send(&Message::Memory { handle: 0 }, Some(duplex.file())).expect("it listens");
    let (mut tx, mut rx) = duplex.streams();
    exchange(&mut tx, &mut rx, (duplex.own_bell(), duplex.peer_bell()));
    let mut address = [0; 8];
    // All eight bytes were published by one store.
    let filled = || rx.read(&mut address) == Ok(8);
    assert_eq!(Waiter::new(SpinPolicy::NONE).wait(&[duplex.own_bell()], Some(Instant::now() + LONG), filled), Ok(true));
    assert!(!duplex.is_read_by_peer(), "it has not tried");
    let memory = duplex.probe_peer(connection.into_peer()).expect("one user's processes");
    let mut copied = vec![0; REFERRED_BYTES];
    memory.read(u64::from_le_bytes(address), &mut copied).expect("it is there");
    assert!((0..).map(byte).zip(&copied).all(|(right, found)| right == *found));
    for bad in [0, 8, u64::MAX, u64::MAX - 7, 1 << 47] {
        let refused = memory.read(bad, &mut copied).expect_err("nothing is there");
        assert!(matches!(refused, PeerMemoryError::Read { .. }), "{bad:#x}: {refused}");
    }
    assert!(duplex.take_reference());
    ring(duplex.peer_bell());
    assert!(process.succeeded());
    let gone = memory.read(u64::from_le_bytes(address), &mut copied).expect_err("the process has ended");
    assert!(matches!(gone, PeerMemoryError::Read { .. } | PeerMemoryError::Ended { .. }), "{gone}");
}

#[test]
fn memory_of_another_length_or_that_can_be_resized_is_refused() {
    for len_bytes in [0x1000, 0x2000, 0x3000 - 8, 0x3000 + 8, 0x4000, 0x1000 + 6 * 0x1000] {
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("memory");
        ftruncate(&file, len_bytes).expect("it is new");
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("allowed");
        let refused = Duplex::open(file, 0).expect_err("no two streams");
        assert!(matches!(refused, DuplexError::Capacity { .. }), "{len_bytes:#x}: {refused}");
    }
    let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&file, 0x3000).expect("it is new");
    assert_eq!(Duplex::open(file, 0).expect_err("not sealed"), DuplexError::Memory(MemoryError::Unsealed));
    for capacity_bytes in [0, 1, 0x800, 0x1800, u32::MAX, 1 << 25] {
        let refused = Duplex::create(capacity_bytes, 0).expect_err("no capacity");
        assert!(matches!(refused, DuplexError::Capacity { .. }), "{capacity_bytes:#x}: {refused}");
    }
}

#[test]
fn withdrawn_reference_is_not_counted() {
    let ours = Duplex::create(CAPACITY_BYTES, 1).expect("memory");
    let theirs = Duplex::open(duplicate(ours.file()), 2).expect("it is sealed");
    assert!(theirs.take_reference());
    assert_eq!((ours.taken_by_peer(), theirs.taken_by_peer()), (1, 0));
    ours.withdraw();
    assert!(!theirs.take_reference());
    assert_eq!(ours.taken_by_peer(), 1);
    assert!(ours.take_reference(), "the other direction goes on");
}
