//! The listening side's second half: a device whose engine reads and writes the memory of ranks on the other machine.

use super::{LEN, Other, VICTIM_PORT, link_end_of, meet, numbers_of_end, rates, region_of};
use crate::LIMIT;
use crate::messages::{next, run, send};
use crate::one_sided::domain;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::dma::{Address, RegionKey, Status, Step};
use sumac_hal::remote::{Arrived, BUFFERS, CREDITS, LinkError};
use sumac_hal::shm::{Pages, Region};
use sumac_hal::verbs::{OneSidedEnd, PeerEngine, SharedReceives, VerbsDomain, VerbsLink};

/// The device's own memory.
const OWN: RegionKey = RegionKey { index: 0, generation: 1 };

/// Results of one chain.
pub(super) const PLACES: u64 = 16;

/// The length of a result in bytes.
pub(super) const CHUNK: u32 = (LEN as u64 / PLACES) as u32;

/// The length of the shortest messages.
pub(super) const SHORT: usize = 64;

/// How often each rank sends all the messages that it may, and receives a reply.
pub(super) const EXCHANGES: usize = 50;

/// What a device fills its memory with while it writes in streams.
pub(super) const STREAMED: u8 = 9;

/// A rank on the other machine.
#[derive(Clone, Copy)]
struct Rank {
    peer: u16,
    /// Its memory to read, and its memory to write.
    keys: [RegionKey; 2],
}

/// All checks of the device's side.
pub(super) fn check(link: &VerbsLink, other: &mut Other) {
    let a = domain(link);
    let receives = SharedReceives::new(&a, 3 * BUFFERS).expect("a queue");
    let mut engine = PeerEngine::with_receives(&a, 16, receives);
    let own = Arc::new(Region::create(LEN, Pages::Normal).expect("memory"));
    engine.map_local_memory(OWN, Arc::clone(&own) as _).expect("memory");
    let ranks = [0, 1].map(|number| attach(&mut engine, &a, other, number));
    talk(&mut engine, &ranks);
    echo(&mut engine, ranks[0].peer);
    meet(other);
    land(&mut engine, &ranks[0], other);
    stream_until_fenced(&mut engine, &ranks[0], &own, other);
    kill(&mut engine, &a, other);
    // As many messages as all buffers, several times.
    let last = attach(&mut engine, &a, other, 3);
    talk(&mut engine, &[ranks[1], last]);
}

fn copy(src: (RegionKey, u64), dst: (RegionKey, u64)) -> Step {
    let at = |(region, offset_bytes)| Address { region, offset_bytes };
    Step::Copy { src: at(src), dst: at(dst), len_bytes: CHUNK }
}

fn attach(engine: &mut PeerEngine, a: &VerbsDomain, other: &mut Other, number: u16) -> Rank {
    let mut connection = engine.messaging(a).expect("an end").expect("it has a queue");
    let own = numbers_of_end(&connection.end().to_link_end());
    let received = other.exchange(&[&own[..], &[0; 8]].concat());
    connection.connect(&OneSidedEnd::from_link_end(&link_end_of(&received))).expect("connected");
    let peer = engine.attach(connection);
    let keys = [1, 2].map(|place| RegionKey { index: 2 * number + place, generation: 1 });
    engine.map_remote(keys[0], peer, region_of(&received[4..])).expect("a free place");
    engine.map_landing(keys[1], peer, region_of(&received[8..])).expect("a free place");
    // Nobody sends before both are connected.
    meet(other);
    Rank { peer, keys }
}

/// Messages of several ranks arrive in one shared queue.
fn talk(engine: &mut PeerEngine, ranks: &[Rank; 2]) {
    let before = engine.stats(ranks[0].peer).1;
    for round in 0..EXCHANGES {
        for rank in ranks {
            for nth in 0..CREDITS {
                let mut link = engine.link(rank.peer).expect("a link");
                assert_eq!(next(&mut link), Ok(Arrived::Message(SHORT + round + nth as usize)));
            }
            send(&mut engine.link(rank.peer).expect("a link"), &[0; SHORT]).expect("it goes on");
        }
    }
    let received = engine.stats(ranks[0].peer).1;
    let (messages, posts) = (received.messages - before.messages, received.posts - before.posts);
    assert_eq!(messages, (2 * EXCHANGES * CREDITS as usize) as u64);
    println!("{messages} messages of two ranks in one queue of {} buffers, posted again in {posts} calls", 3 * BUFFERS);
}

/// Reply to messages, whose latency the rank measures, until one has another length.
fn echo(engine: &mut PeerEngine, peer: u16) {
    let mut link = engine.link(peer).expect("a link");
    while rates::next(&mut link) == Ok(Arrived::Message(SHORT)) {
        send(&mut link, &[0; SHORT]).expect("it goes on");
    }
}

/// Read values from the rank's memory and write them back as results, announced by immediate data.
fn land(engine: &mut PeerEngine, rank: &Rank, other: &mut Other) {
    let chunk = u64::from(CHUNK);
    meet(other);
    assert_eq!(run(engine, &[copy((rank.keys[0], chunk), (OWN, 0))]), Status::Done);
    let places = (0..PLACES).map(|nth| copy((OWN, 0), (rank.keys[1], nth * chunk))).collect::<Vec<_>>();
    assert_eq!(run(engine, &places), Status::Done);
    meet(other);
    let (start, mut results) = (Instant::now(), 0);
    while start.elapsed() < rates::MEASURED {
        assert_eq!(run(engine, &places), Status::Done);
        results += PLACES;
    }
    let took = start.elapsed();
    // The rank receives it after all results.
    send(&mut engine.link(rank.peer).expect("a link"), &[0; SHORT]).expect("it goes on");
    rates::print_rate("result", chunk, results * chunk, took);
    assert_eq!(other.exchange(&[results]), [results], "results that were written, and announced");
}

/// Write to the rank's memory until its fence.
fn stream_until_fenced(engine: &mut PeerEngine, rank: &Rank, own: &Region, other: &mut Other) {
    own.write(0, &[STREAMED; LEN]);
    let chunk = u64::from(CHUNK);
    let places = (0..PLACES).map(|nth| copy((OWN, nth * chunk), (rank.keys[1], nth * chunk)));
    let places: Vec<_> = places.collect();
    let (start, mut chains) = (Instant::now(), 0);
    while run(engine, &places) == Status::Done {
        assert!(start.elapsed() < 2 * LIMIT, "writes do not end with the fence");
        chains += 1;
    }
    let error = engine.error(rank.peer).expect("an error");
    assert!(matches!(error, LinkError::PeerGone | LinkError::RemoteAccess), "{error}");
    println!("fenced by the other machine after {chains} chains of writes: {error}");
    end(engine, rank);
    meet(other);
}

/// Lose a process during writes to its memory.
fn kill(engine: &mut PeerEngine, a: &VerbsDomain, other: &mut Other) {
    let mut victims = Other::connect(None, VICTIM_PORT);
    let victim = attach(engine, a, &mut victims, 2);
    for nth in 0..CREDITS {
        let arrived = next(&mut engine.link(victim.peer).expect("a link"));
        assert_eq!(arrived, Ok(Arrived::Message(SHORT)), "message {nth}");
    }
    // It fills the queue with messages that are under way, or not taken, when it ends.
    meet(&mut victims);
    meet(other);
    let chain = [copy((OWN, 0), (victim.keys[1], 0))];
    let start = Instant::now();
    while run(engine, &chain) == Status::Done {
        assert!(start.elapsed() < 2 * LIMIT, "a killed process is not noticed");
    }
    let error = engine.error(victim.peer).expect("an error");
    assert!(matches!(error, LinkError::PeerGone | LinkError::RemoteAccess), "{error}");
    println!("a killed process is noticed within {} ms: {error}", start.elapsed().as_millis());
    end(engine, &victim);
    meet(other);
}

fn end(engine: &mut PeerEngine, rank: &Rank) {
    engine.detach(rank.peer).expect("stopped");
    rank.keys.iter().for_each(|&key| assert!(engine.unmap(key)));
}
