//! Tests of shared memory, sockets and doorbells, between two processes where necessary.
//!
//! The other process is this test program again, running only `other_process` with a role in its environment.

mod board;
mod duplex;
mod processes;
mod signals;
#[cfg(feature = "emu")]
mod zero_copy;

use super::*;
use crate::dma::DmaMemory;
use crate::ids::{ChildIndex, GroupId};
use crate::ring::{Doorbell, SpinPolicy};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create, open,
};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A timeout for a busy machine; a passing test never waits this long.
const LONG: Duration = Duration::from_secs(60);

fn unique_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("sumac-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn duplicate(file: std::os::fd::BorrowedFd<'_>) -> OwnedFd {
    file.try_clone_to_owned().expect("a descriptor")
}

fn bytes_of(region: &Region, offset_bytes: usize, len_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes];
    region.read(offset_bytes, &mut bytes);
    bytes
}

/// A message that carries a number and no descriptor.
fn numbered(number: u64) -> Message {
    Message::Attach { group: GroupId(0), child: ChildIndex(0), key: number }
}

#[test]
fn region_opened_twice_shares_its_bytes() {
    let ours = Region::create(10_000, Pages::Normal).expect("memory");
    let theirs = Region::open(duplicate(ours.file()), 10_000).expect("it is sealed");
    assert_ne!(ours.base(), theirs.base());
    assert_eq!((ours.len_bytes(), theirs.len_bytes()), (10_000, 10_000));
    ours.write(9_990, &[1, 2, 3]);
    assert_eq!(bytes_of(&theirs, 9_989, 5), [0, 1, 2, 3, 0]);
    // SAFETY: no other thread or process has this memory.
    assert_eq!(unsafe { theirs.as_slice() }[9_991], 2);
}

#[test]
#[should_panic(expected = "2 bytes at 9999 reach beyond 10000 bytes")]
fn write_beyond_region_panics() {
    Region::create(10_000, Pages::Normal).expect("memory").write(9_999, &[0; 2]);
}

#[test]
fn region_cannot_be_resized() {
    let region = Region::create(10_000, Pages::Normal).expect("memory");
    for len_bytes in [0, 5_000, 20_000] {
        assert!(ftruncate(region.file(), len_bytes).is_err());
    }
}

#[test]
fn read_only_file_cannot_be_reopened_for_writing() {
    let ours = Region::create(10_000, Pages::Normal).expect("memory");
    let file = ours.read_only_file().expect("the file was not shared");
    // The holder of a descriptor can reopen its file and ask for write access.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let again = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).expect("the file's mode allows it");
    let refused = Region::open(duplicate(again.as_fd()), 10_000).expect_err("it is sealed");
    assert_eq!(refused, MemoryError::System { call: "mmap", len_bytes: 10_000, errno: Errno::PERM });
    assert_eq!(rustix::io::write(&again, &[1]), Err(Errno::PERM));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&again, hole, 0, 4096), Err(Errno::PERM));
    let theirs = ReadOnly::open(file, 10_000).expect("it is sealed");
    ours.write(9_990, &[1, 2, 3]);
    let mut found = [0; 4];
    assert!(theirs.read(9_989, &mut found));
    assert_eq!(found, [0, 1, 2, 3], "the owner can still write");
    assert!(ours.read_only_file().is_ok(), "it can be handed over again");
    // Write access that was given cannot be revoked.
    let shared = Region::create(10_000, Pages::Normal).expect("memory");
    let _ = duplicate(shared.file());
    assert_eq!(shared.read_only_file().expect_err("it was handed over as writable"), MemoryError::Writable);
}

#[test]
fn unsealed_or_oversized_memory_is_refused() {
    let memfd = |flags| {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | flags).expect("memory");
        ftruncate(&file, 4096).expect("memory");
        file
    };
    let refused = |file| Region::open(file, 4096).expect_err("it can be resized");
    assert_eq!(refused(memfd(MemfdFlags::empty())), MemoryError::Unsealed);
    assert_eq!(refused(memfd(MemfdFlags::ALLOW_SEALING)), MemoryError::Unsealed);
    let half = memfd(MemfdFlags::ALLOW_SEALING);
    fcntl_add_seals(&half, SealFlags::GROW | SealFlags::SEAL).expect("seals");
    assert_eq!(refused(half), MemoryError::Unsealed);
    let (no_memory, _writer) = rustix::pipe::pipe().expect("a pipe");
    assert_eq!(refused(no_memory), MemoryError::Unsealed);
    let region = Region::create(4097, Pages::Normal).expect("memory");
    let error = Region::open(duplicate(region.file()), 4096).expect_err("it is longer");
    assert_eq!(error, MemoryError::Length { len_bytes: 4097, max: 4096 });
    assert!(matches!(Region::create(0, Pages::Normal), Err(MemoryError::Length { len_bytes: 0, .. })));
}

/// A device maps whatever ranks hand over, of any size and for any time.
#[test]
fn opened_region_keeps_no_descriptor_and_touches_no_page() {
    let name = unique_name();
    let theirs = memfd_create(&name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&theirs, 64 << 20).expect("memory");
    fcntl_add_seals(&theirs, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("seals");
    let region = Region::open(duplicate(theirs.as_fd()), 64 << 20).expect("it is sealed");
    assert_eq!(rustix::fs::fstat(&theirs).expect("a file").st_blocks, 0, "no page is populated");
    let descriptors = || {
        let files = std::fs::read_dir("/proc/self/fd").expect("/proc is mounted");
        let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        links.filter(|link| link.to_string_lossy().contains(&name)).count()
    };
    assert_eq!(descriptors(), 1, "only the peer's own descriptor");
    drop(theirs);
    assert_eq!((descriptors(), bytes_of(&region, (64 << 20) - 4, 4)), (0, vec![0; 4]));
}

#[test]
fn severed_region_keeps_address_and_contents_but_is_not_shared() {
    let mut ours = Region::create(10_000, Pages::Normal).expect("memory");
    let device = Region::open(duplicate(ours.file()), 10_000).expect("it is sealed");
    ours.write(100, b"before");
    let base = ours.base();
    ours.sever(std::slice::from_ref(&(0..10_000))).expect("memory");
    device.write(100, b"zombie");
    assert_eq!((ours.base(), bytes_of(&ours, 100, 6)), (base, b"before".to_vec()));
    ours.write(100, b"after ");
    assert_eq!(bytes_of(&device, 100, 6), b"zombie");
    drop(device);
    assert_eq!(bytes_of(&ours, 100, 6), b"after ");
}

#[test]
fn severing_some_pages_leaves_the_others_shared() {
    let page = Region::create(1, Pages::Normal).expect("memory").page_len_bytes();
    let mut ours = Region::create(5 * page + 10, Pages::Normal).expect("memory");
    let device = Region::open(duplicate(ours.file()), 1 << 20).expect("it is sealed");
    (0..6).for_each(|nth| ours.write(nth * page, &[nth as u8; 10]));
    ours.sever(&[page..2 * page, 3 * page..4 * page, 5 * page..5 * page + 10]).expect("memory");
    // Overlaps pages that are severed already.
    ours.sever(std::slice::from_ref(&(page..3 * page))).expect("memory");
    for nth in 0..6 {
        assert_eq!(bytes_of(&ours, nth * page, 10), [nth as u8; 10], "page {nth}");
        device.write(nth * page, &[9; 10]);
        let expected = if nth == 0 || nth == 4 { 9 } else { nth as u8 };
        assert_eq!(bytes_of(&ours, nth * page, 10), [expected; 10], "page {nth}");
    }
}

#[test]
#[should_panic(expected = "not a range of whole pages")]
fn severing_part_of_a_page_panics() {
    let mut ours = Region::create(10_000, Pages::Normal).expect("memory");
    let _ = ours.sever(std::slice::from_ref(&(0..100)));
}

/// Safe Rust lets two threads hold parts of one buffer: severing one part must not undo writes to the other.
#[test]
fn severing_pages_keeps_concurrent_writes_to_adjacent_pages() {
    use std::sync::atomic::{AtomicBool, Ordering};
    const ROUNDS: usize = 200;
    let page = Region::create(1, Pages::Normal).expect("memory").page_len_bytes();
    let mut ours = Region::create(16 * page, Pages::Normal).expect("memory");
    let (base, over) = (ours.base().as_ptr().expose_provenance(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            // SAFETY: the memory outlives the scope, and these words, at both edges of what is severed, are this
            // thread's.
            let words = [page - 8, 15 * page].map(|at| unsafe {
                std::sync::atomic::AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(base + at))
            });
            let (mut written, mut undone) = (0_u64, 0_u64);
            while !over.load(Ordering::Relaxed) {
                undone += words.iter().filter(|word| word.load(Ordering::Relaxed) != written).count() as u64;
                written += 1;
                words.iter().for_each(|word| word.store(written, Ordering::Relaxed));
            }
            (written, undone)
        });
        (0..ROUNDS).for_each(|_| ours.sever(std::slice::from_ref(&(page..15 * page))).expect("memory"));
        over.store(true, Ordering::Relaxed);
        let (written, undone) = writer.join().expect("no panic");
        assert_eq!(undone, 0, "of {written} writes");
    });
}

/// What is left of a connection hands memory over without waiting, for reading only.
#[test]
fn channel_hands_memory_over_for_reading_and_withdraws_it() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let rank = Connection::open(&name, LONG).expect("a listener");
    let device = listener.accept(LONG).expect("accepted").expect("a connection");
    let region = Region::create(4096, Pages::Normal).expect("memory");
    region.write(0, b"handed over");
    let ((to_device, _), (from_rank, _)) = (rank.into_channel(), device.into_channel());
    assert!(matches!(from_rank.receive(), Ok(None)));
    to_device.hand_over(7, region.reader_file().expect("a descriptor").as_fd()).expect("it is open");
    to_device.withdraw(7).expect("it is open");
    let received = from_rank.receive().expect("no error").expect("a message");
    assert_eq!(received.message, Message::Memory { handle: 7 });
    let file = received.file.expect("memory comes with it");
    let writable = Region::open(file.try_clone().expect("a descriptor"), u64::MAX);
    assert!(matches!(writable, Err(MemoryError::System { call: "mmap", errno: Errno::ACCESS, .. })), "{writable:?}");
    let mut found = [0; 11];
    assert!(ReadOnly::open(file, u64::MAX).expect("it is sealed").read(0, &mut found) && found == *b"handed over");
    let received = from_rank.receive().expect("no error").expect("a message");
    assert_eq!((received.message, received.file.is_none()), (Message::Withdrawn { handle: 7 }, true));
    drop(to_device);
    assert!(matches!(from_rank.receive(), Err(SocketError::Closed)));
}

#[test]
fn messages_arrive_with_their_descriptors_until_closed() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    assert!(matches!(Listener::bind(&name), Err(SocketError::Name { call: "bind", .. })));
    let rank = Connection::open(&name, LONG).expect("a listener");
    let device = listener.accept(LONG).expect("accepted").expect("a connection");
    assert_eq!((rank.peer().pid(), device.peer().pid()), (std::process::id() as i32, std::process::id() as i32));

    let region = Region::create(4096, Pages::Normal).expect("memory");
    region.write(0, b"handed over");
    let attach = Message::Attach { group: GroupId(u32::MAX), child: ChildIndex(u16::MAX), key: u64::MAX };
    rank.send(&attach, None).expect("it is open");
    rank.send(&Message::Memory { handle: 9 }, Some(region.file())).expect("it is open");
    let received = device.receive(LONG).expect("a message");
    assert_eq!((received.message, received.file.is_some()), (attach, false));
    let received = device.receive(LONG).expect("a message");
    assert_eq!(received.message, Message::Memory { handle: 9 });
    let theirs = Region::open(received.file.expect("memory comes with it"), 4096).expect("it is sealed");
    assert_eq!(bytes_of(&theirs, 0, 11), b"handed over");

    let arena = Message::Arena { offset_bytes: 1 << 40, len_bytes: u64::MAX };
    device.send(&arena, Some(region.file())).expect("it is open");
    let received = rank.receive(LONG).expect("a message");
    assert_eq!((received.message, received.file.is_some()), (arena, true));

    assert!(matches!(rank.send(&attach, Some(region.file())), Err(SocketError::Malformed)));
    assert!(matches!(rank.send(&Message::Function, None), Err(SocketError::Malformed)));
    assert!(matches!(device.receive(Duration::ZERO), Err(SocketError::Timeout(_))));
    drop(rank);
    assert!(matches!(device.receive(LONG), Err(SocketError::Closed)));
    assert!(matches!(
        device.send(&Message::Refused { reason: AttachRefusal::UnknownChild }, None),
        Err(SocketError::Closed)
    ));
    drop((device, listener));
    assert!(matches!(Connection::open(&name, LONG), Err(SocketError::Name { call: "connect", .. })));
}

#[test]
fn connect_to_a_full_backlog_times_out() {
    let name = unique_name();
    let _listener = Listener::bind(&name).expect("a free name");
    let limit = Duration::from_millis(50);
    // Fills the backlog and one more.
    let connections: Result<Vec<_>, _> = (0..1000).map(|_| Connection::open(&name, limit)).collect();
    assert!(matches!(connections, Err(SocketError::Timeout(waited)) if waited == limit), "{connections:?}");
}

#[test]
fn send_to_a_peer_that_does_not_receive_times_out() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let limit = Duration::from_millis(50);
    let rank = Connection::open(&name, limit).expect("a listener");
    let _device = listener.accept(LONG).expect("accepted").expect("a connection");
    let sent = (0..100_000).try_for_each(|number| rank.send(&numbered(number), None));
    assert!(matches!(sent, Err(SocketError::Timeout(waited)) if waited == limit), "{sent:?}");
}

#[test]
fn malformed_messages_are_refused_and_later_ones_accepted() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType, connect, send, socket};
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let rank = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    connect(&rank, &SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("short")).expect("a listener");
    let device = listener.accept(LONG).expect("accepted").expect("a connection");
    let mut good = [0; 32];
    good[..9].copy_from_slice(b"SUMS\x01\0\x04\0\x01");
    let mut cases = vec![vec![0; 32], good[..31].to_vec(), [&good[..], &[0]].concat(), vec![0xff; 4096]];
    for (at, value) in
        [(0, 0), (4, 2), (5, 1), (6, 7), (7, 1), (8, 0), (8, 4), (16, 1), (31, 1), (6, 2), (6, 3), (6, 5), (6, 6)]
    {
        let mut bad = good;
        bad[at] = value;
        cases.push(bad.to_vec());
    }
    for case in cases {
        send(&rank, &case, SendFlags::empty()).expect("it is open");
        assert!(matches!(device.receive(LONG), Err(SocketError::Malformed)), "{case:?}");
    }
    send(&rank, &good, SendFlags::empty()).expect("it is open");
    assert_eq!(
        device.receive(LONG).expect("a message").message,
        Message::Refused { reason: AttachRefusal::UnknownChild }
    );
}

#[test]
fn open_at_maps_the_range_and_refuses_one_beyond_the_end() {
    let whole = Region::create(3 * 4096, Pages::Normal).expect("memory");
    let open = |offset_bytes, len_bytes| Region::open_at(whole.file(), offset_bytes, len_bytes);
    let part = open(4096, 8192).expect("it is there");
    part.write(8191, b"e");
    assert_eq!((part.len_bytes(), bytes_of(&whole, 3 * 4096 - 1, 1)), (8192, b"e".to_vec()));
    for (offset_bytes, len_bytes) in [(4096, 8193), (3 * 4096, 1), (0, 0), (u64::MAX - 4095, 4096), (8192, usize::MAX)]
    {
        let refused = open(offset_bytes, len_bytes).expect_err("it is not all there");
        assert!(matches!(refused, MemoryError::Length { .. }), "{refused}");
    }
    let unsealed = memfd_create("sumac-test", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&unsealed, 4096).expect("memory");
    assert_eq!(Region::open_at(unsealed.as_fd(), 0, 4096).expect_err("it can be resized"), MemoryError::Unsealed);
}

#[test]
fn wait_ends_at_its_deadline_and_refuses_no_or_too_many_bells() {
    let word = AtomicU32::new(0);
    let waiter = Waiter::new(SpinPolicy::NONE);
    let soon = Some(Instant::now() + Duration::from_millis(1));
    assert_eq!(waiter.wait(&[Doorbell::new(&word)], soon, || false), Ok(false));
    let bells = [Doorbell::new(&word); SLEEPER_BELLS_MAX + 1];
    let soon = Some(Instant::now() + Duration::from_millis(1));
    assert_eq!(waiter.wait(&bells[..2], soon, || false), Ok(false));
    let late = Some(Instant::now() + LONG);
    assert_eq!(waiter.wait(&[], late, || false), Err(WaitError::Bells(0)));
    assert_eq!(waiter.wait(&bells, late, || false), Err(WaitError::Bells(SLEEPER_BELLS_MAX + 1)));
    assert_eq!(waiter.wait(&[], late, || true), Ok(true), "no sleep is needed");
    assert_eq!(word.load(Ordering::Relaxed), 0, "no thread sleeps");
}

/// A condition that becomes true between the first check and the announcement rings no bell: only the second check
/// finds it.
#[test]
fn sleeper_checks_again_after_announcing_its_sleep() {
    let word = AtomicU32::new(0);
    let bell = Doorbell::new(&word);
    let mut polls = Vec::new();
    // Reached only by a sleeper that does not check again.
    let late = Some(Instant::now() + LONG);
    let ready = || {
        polls.push(word.load(Ordering::Relaxed));
        assert!(polls.len() > 1 || !bell.ring(), "no thread sleeps yet");
        polls.len() > 1
    };
    assert_eq!(Waiter::new(SpinPolicy::NONE).wait(&[bell], late, ready), Ok(true));
    assert_eq!(polls[..2], [0, Doorbell::<&AtomicU32>::ASLEEP]);
    assert_eq!(word.load(Ordering::Relaxed), 0, "no thread sleeps");
}
