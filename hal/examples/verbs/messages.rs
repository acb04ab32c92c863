//! Messages in addition to reads and writes: a device with a shared receive queue, and two ranks on another link.

use super::one_sided::domain;
use super::{LIMIT, allocations};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::dma::{Address, Chain, Completion, Engine, RegionKey, Scope, Status, Step, Tag};
use sumac_hal::remote::{Access, Arrived, BUFFERS, CREDITS, Link, LinkError, MESSAGE_LEN_BYTES, RankLink};
use sumac_hal::shm::{Pages, Region};
use sumac_hal::verbs::{PeerEngine, RankEnd, SharedReceives, VerbsDomain, VerbsLink};

/// The length of each memory in bytes.
const LEN: usize = 64 << 10;

/// The length of a chunk in bytes.
const CHUNK: u32 = 4096;

/// The device's own memory.
const OWN: RegionKey = RegionKey { index: 0, generation: 1 };

struct Rank {
    end: RankEnd,
    /// The memory that the device may read.
    buffer: Region,
    /// The memory that the device may write.
    landing: Region,
    peer: u16,
    keys: [RegionKey; 2],
}

/// Wait for the next arrival on a link.
pub(crate) fn next(link: &mut dyn Link) -> Result<Arrived, LinkError> {
    let (start, mut message) = (Instant::now(), [0; MESSAGE_LEN_BYTES]);
    loop {
        match link.receive(&mut message) {
            Ok(None) => assert!(start.elapsed() < LIMIT, "nothing comes"),
            Ok(Some(arrived)) => return Ok(arrived),
            Err(error) => return Err(error),
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

pub(crate) fn send(link: &mut dyn Link, message: &[u8]) -> Result<(), LinkError> {
    let start = Instant::now();
    while !link.send(message)? {
        assert!(start.elapsed() < LIMIT, "no room");
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

pub(crate) fn run(engine: &mut PeerEngine, steps: &[Step]) -> Status {
    engine.submit(Chain { tag: Tag::default(), scope: Scope(0), steps }).expect("room");
    let mut completions = [Completion { tag: Tag::default(), status: Status::Done, step: 0 }];
    let start = Instant::now();
    while engine.poll(&mut completions) == 0 {
        assert!(start.elapsed() < LIMIT, "neither done nor failed");
        std::thread::sleep(Duration::from_micros(50));
    }
    completions[0].status
}

fn copy(src: (RegionKey, u64), dst: (RegionKey, u64)) -> Step {
    let at = |(region, offset_bytes)| Address { region, offset_bytes };
    Step::Copy { src: at(src), dst: at(dst), len_bytes: CHUNK }
}

fn bytes(region: &Region, offset: usize) -> Vec<u8> {
    let mut bytes = vec![0; CHUNK as usize];
    region.read(offset, &mut bytes);
    bytes
}

/// Attach a rank with memory to read and memory to write.
fn attach(engine: &mut PeerEngine, a: &VerbsDomain, rank_at: VerbsDomain, number: u16) -> Rank {
    let mut end = RankEnd::new(rank_at).expect("an end");
    let mut connection = engine.messaging(a).expect("an end").expect("it has a queue");
    connection.connect(&sumac_hal::verbs::OneSidedEnd::from_link_end(&end.end())).expect("connected");
    end.connect(&connection.end().to_link_end()).expect("connected");
    let peer = engine.attach(connection);
    let memory = || Region::create(LEN, Pages::Normal).expect("memory");
    let again = |region: &Region| Region::open(region.file().try_clone_to_owned().expect("a file"), LEN as u64);
    let (buffer, landing) = (memory(), memory());
    let regions = [(&buffer, Access::Read), (&landing, Access::Land)]
        .map(|(region, access)| end.expose(again(region).expect("memory"), access).expect("registered"));
    let keys = [1, 2].map(|place| RegionKey { index: 2 * number + place, generation: 1 });
    engine.map_remote(keys[0], peer, regions[0]).expect("a free place");
    engine.map_landing(keys[1], peer, regions[1]).expect("a free place");
    Rank { end, buffer, landing, peer, keys }
}

/// All checks, between two links.
pub(crate) fn check(links: &[VerbsLink]) {
    let [here, there, ..] = links else { panic!("two links") };
    let a = domain(here);
    let receives = SharedReceives::new(&a, 2 * BUFFERS).expect("a queue");
    let mut engine = PeerEngine::with_receives(&a, 16, receives);
    let own = Arc::new(Region::create(LEN, Pages::Normal).expect("memory"));
    engine.map_local_memory(OWN, own).expect("memory");
    let mut ranks = [0, 1].map(|number| attach(&mut engine, &a, domain(there), number));
    talk(&mut engine, &mut ranks);
    land(&mut engine, &mut ranks[0]);
    hostile(&mut engine, &a, domain(there));
    fenced(&mut engine, &mut ranks);
    gone(&mut engine, ranks);
}

/// Messages of both ranks arrive in order through one queue; each takes one post, and buffers are reposted in batches.
fn talk(engine: &mut PeerEngine, ranks: &mut [Rank; 2]) {
    const ROUNDS: usize = 100;
    let before = allocations();
    let mut message = [0; MESSAGE_LEN_BYTES];
    for round in 0..ROUNDS {
        for rank in &mut *ranks {
            for nth in 0..CREDITS {
                message[0] = nth as u8;
                send(&mut rank.end, &message[..64 + round]).expect("it goes on");
            }
        }
        for rank in &mut *ranks {
            for _ in 0..CREDITS {
                let arrived = next(&mut engine.link(rank.peer).expect("a link")).expect("it goes on");
                assert_eq!(arrived, Arrived::Message(64 + round));
            }
            send(&mut engine.link(rank.peer).expect("a link"), &message[..round + 1]).expect("it goes on");
            assert_eq!(next(&mut rank.end), Ok(Arrived::Message(round + 1)));
        }
    }
    assert_eq!(allocations(), before, "allocations on the data path");
    let messages = (ROUNDS * CREDITS as usize) as u64;
    for rank in &*ranks {
        let (sent, _) = rank.end.stats();
        assert_eq!((sent.messages, sent.posts, sent.read_bytes, sent.written_bytes), (messages, messages, 0, 0));
        assert!(sent.completions <= sent.posts);
    }
    let (_, received) = engine.stats(ranks[0].peer);
    assert_eq!(received.messages, 2 * messages);
    assert!(received.posts <= 2 * messages / 16 + 1, "{received:?}");
    println!("{} messages of two ranks in one queue of {} buffers: {received:?}", received.messages, 2 * BUFFERS);
}

/// An announced result has been written completely; a batch is one post and one completion.
fn land(engine: &mut PeerEngine, rank: &mut Rank) {
    let values: Vec<u8> = (0..CHUNK).map(|i| (i * 7 % 251) as u8).collect();
    rank.buffer.write(CHUNK as usize, &values);
    let chunk = u64::from(CHUNK);
    let (start, mut nothing) = (Instant::now(), [0; MESSAGE_LEN_BYTES]);
    let before = loop {
        // This also polls the completions of the earlier replies.
        assert_eq!(engine.link(rank.peer).expect("a link").receive(&mut nothing), Ok(None));
        let (stats, _) = engine.stats(rank.peer);
        if stats.completions == stats.posts {
            break stats;
        }
        assert!(start.elapsed() < LIMIT, "not complete");
    };
    assert_eq!(run(engine, &[copy((rank.keys[0], chunk), (OWN, 0))]), Status::Done);
    let steps: Vec<Step> = (0..8).map(|nth| copy((OWN, 0), (rank.keys[1], nth * chunk))).collect();
    assert_eq!(run(engine, &steps), Status::Done);
    // The device has seen the completion of all writes, so all are announced, even if it fails now.
    for nth in 0..8 {
        assert_eq!(next(&mut rank.end), Ok(Arrived::Landed(nth * CHUNK)));
        assert!(bytes(&rank.landing, (nth * CHUNK) as usize) == values, "place {nth}");
    }
    let (after, _) = engine.stats(rank.peer);
    assert_eq!((after.posts - before.posts, after.completions - before.completions), (2, 2));
    assert_eq!((after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes), (chunk, 8 * chunk));
    println!("8 results landed and announced by one post; a chunk was read by another");
}

/// Read-only memory cannot be written, and ranks cannot reach each other's memory.
fn hostile(engine: &mut PeerEngine, a: &VerbsDomain, there: VerbsDomain) {
    let mut rank = attach(engine, a, there, 4);
    rank.buffer.write(0, &[5; CHUNK as usize]);
    assert_eq!(run(engine, &[copy((OWN, 0), (rank.keys[0], 0))]), Status::Hardware);
    assert_eq!(engine.error(rank.peer), Some(LinkError::RemoteAccess));
    assert!(bytes(&rank.buffer, 0) == [5; CHUNK as usize], "nothing was written");
    assert!(engine.link(rank.peer).is_none_or(|mut link| link.send(&[1]).is_err()));
    engine.detach(rank.peer).expect("ended");
    rank.keys.into_iter().for_each(|key| assert!(engine.unmap(key)));
    rank.end.fence().expect("ended");
    println!("a device that writes to what it may read only: the peer's memory is not open to this access");
}

/// After a rank's fence nothing is written; earlier announcements can still be received.
fn fenced(engine: &mut PeerEngine, ranks: &mut [Rank; 2]) {
    let rank = &mut ranks[0];
    assert_eq!(run(engine, &[copy((OWN, 0), (rank.keys[1], 0))]), Status::Done);
    rank.end.fence().expect("fenced");
    rank.landing.write(0, &[9; CHUNK as usize]);
    assert_eq!(run(engine, &[copy((OWN, 0), (rank.keys[1], 0))]), Status::Hardware);
    assert!(bytes(&rank.landing, 0) == [9; CHUNK as usize], "nothing was written after the fence");
    assert_eq!(next(&mut rank.end), Ok(Arrived::Landed(0)), "what came before");
    assert_eq!(next(&mut rank.end), Err(LinkError::Fenced));
    println!("fenced: {}", engine.error(rank.peer).expect("an error"));
}

/// A lost rank is a specific error at the device and vice versa; sleeping waiters are woken.
fn gone(engine: &mut PeerEngine, ranks: [Rank; 2]) {
    let [_, mut two] = ranks;
    engine.arm();
    assert!(!engine.has_work(), "nothing is under way");
    send(&mut two.end, &[1]).expect("it goes on");
    let file = engine.file().expect("it has a queue").as_fd().try_clone_to_owned().expect("a file");
    let mut fds = [rustix::event::PollFd::new(&file, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1), "no waiter is woken");
    assert_eq!(next(&mut engine.link(two.peer).expect("a link")), Ok(Arrived::Message(1)));
    let peer = two.peer;
    drop(two);
    let start = Instant::now();
    send(&mut engine.link(peer).expect("a link"), &[1]).expect("the loss is not detected yet");
    assert_eq!(next(&mut engine.link(peer).expect("a link")), Err(LinkError::PeerGone));
    println!("a dead rank is noticed after {} ms", start.elapsed().as_millis());
}
