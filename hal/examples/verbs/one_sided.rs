//! Connections with one-sided reads and writes of the peer's memory, and the accesses that they must refuse.

use super::{LIMIT, allocations};
use std::time::{Duration, Instant};
use sumac_hal::verbs::{
    ExposedRegion, LinkError, OneSided, PostError, Progress, RemoteRegion, VerbsConfig, VerbsDomain, VerbsLink,
};

/// The length of each region in bytes.
const LEN: usize = 1 << 20;

pub(crate) fn domain(link: &VerbsLink) -> VerbsDomain {
    VerbsDomain::open(&VerbsConfig { link: link.clone(), ..VerbsConfig::default() }).expect("a domain")
}

pub(crate) fn connected(a: &VerbsDomain, b: &VerbsDomain) -> (OneSided, OneSided) {
    let (mut one, mut other) = (a.one_sided().expect("an end"), b.one_sided().expect("an end"));
    one.connect(&other.end()).expect("connected");
    other.connect(&one.end()).expect("connected");
    (one, other)
}

/// Flush the queue, and wait until all requests are complete or one has failed.
pub(crate) fn finish(link: &mut OneSided, count: u64) -> Progress {
    link.flush();
    let start = Instant::now();
    loop {
        let progress = link.poll();
        if progress.done >= count || progress.error.is_some() {
            return progress;
        }
        assert!(start.elapsed() < LIMIT, "neither done nor failed: {link:?}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

pub(crate) fn bytes(region: &ExposedRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len_bytes()];
    region.read(0, &mut bytes).expect("all of it");
    bytes
}

/// Whether the links lose packets. A responder that has refused an access stops answering, so the requester of a lost
/// refusal can only conclude that its peer is gone.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    None,
    Some,
}

impl Loss {
    /// Panic unless `error` is how a refused access ends on such links.
    fn assert_refused(self, error: Option<LinkError>, what: &str) -> LinkError {
        match error {
            Some(error @ LinkError::RemoteAccess) => error,
            Some(error @ LinkError::PeerGone) if self == Loss::Some => error,
            other => panic!("{what}: not refused: {other:?}"),
        }
    }
}

/// All checks, between two links.
pub(crate) fn run(links: &[VerbsLink], loss: Loss) {
    let [here, there, ..] = links else { panic!("two links") };
    let (a, b) = (domain(here), domain(there));
    moves(&a, &b);
    bounds_and_strangers(&a, &b, loss);
    fenced(&a, &b, loss);
    gone(&a, &b);
    cycles(&a, &b);
}

/// A chain of reads and a chain of writes each take one post and one completion, without allocations.
fn moves(a: &VerbsDomain, b: &VerbsDomain) {
    const PIECE: u64 = 64 << 10;
    let (mut near, mut far) = (a.expose(LEN).expect("memory"), b.expose(LEN).expect("memory"));
    let values: Vec<u8> = (0..LEN).map(|i| (i * 31 % 251) as u8).collect();
    far.write(0, &values).expect("inside");
    let (mut link, _peer) = connected(a, b);
    let remote = far.remote();
    let before = allocations();
    for at in (0..LEN as u64).step_by(PIECE as usize) {
        link.read((&mut near, at), (&remote, at), PIECE).expect("room");
    }
    let count = LEN as u64 / PIECE;
    assert_eq!(finish(&mut link, count), Progress { done: count, error: None });
    assert_eq!(allocations(), before, "allocations on the data path");
    assert!(bytes(&near) == values, "what was read");
    near.write(7, &[0xee; 100]).expect("inside");
    link.write((&near, 7), (&remote, 1000), 100).expect("room");
    assert_eq!(finish(&mut link, count + 1).error, None);
    assert_eq!(
        (bytes(&far)[999], &bytes(&far)[1000..1100], bytes(&far)[1100]),
        (values[999], &[0xee; 100][..], values[1100])
    );
    println!("{count} reads of {PIECE} bytes and a write");
}

/// Accesses out of bounds are refused locally by range and remotely by the hardware; other connections are unaffected.
fn bounds_and_strangers(a: &VerbsDomain, b: &VerbsDomain, loss: Loss) {
    let (mut near, mut far) = (a.expose(LEN).expect("memory"), b.expose(4096).expect("memory"));
    let (mut honest, _peer) = connected(a, b);
    let remote = far.remote();
    let outside = honest.write((&near, 0), (&remote, 4000), 97).expect_err("the range is checked");
    assert!(matches!(outside, PostError::Range(error) if error.region_len_bytes == 4096), "{outside}");
    let outside = honest.read((&mut near, LEN as u64), (&remote, 0), 1).expect_err("here as well");
    assert!(matches!(outside, PostError::Range(_)), "{outside}");
    let before = bytes(&far);
    near.write(0, &[0x55; 4096]).expect("inside");
    let revoked = remote;
    far.revoke().expect("another key");
    assert_eq!(far.remote().generation, 1);
    let forged = [
        ("a longer region", RemoteRegion { len_bytes: 1 << 30, ..far.remote() }, 4000),
        ("an address before it", RemoteRegion { addr: far.remote().addr - 64, ..far.remote() }, 0),
        ("an unknown key", RemoteRegion { rkey: far.remote().rkey ^ 0xff, ..far.remote() }, 0),
        ("a key that was revoked", revoked, 0),
    ];
    for (what, region, offset) in forged {
        let (mut hostile, _victim) = connected(a, b);
        hostile.write((&near, 0), (&region, offset), 4096).expect("its own bounds are kept");
        let progress = finish(&mut hostile, 1);
        assert_eq!(progress.done, 0, "{what}");
        let error = loss.assert_refused(progress.error, what);
        assert!(bytes(&far) == before, "{what}: nothing was written");
        println!("{what}: {error}");
        let after = hostile.write((&near, 0), (&far.remote(), 0), 1).expect_err("the connection is at its end");
        assert_eq!(after, PostError::Link(error));
    }
    honest.write((&near, 0), (&far.remote(), 0), 4096).expect("room");
    assert_eq!(finish(&mut honest, 1), Progress { done: 1, error: None });
    assert!(bytes(&far) == [0x55; 4096], "the holder of the new key can still write");
}

/// After a fence, further writes by the peer have no effect, on this connection or another.
fn fenced(a: &VerbsDomain, b: &VerbsDomain, loss: Loss) {
    let (mut near, mut far) = (a.expose(LEN).expect("memory"), b.expose(LEN).expect("memory"));
    near.write(0, &[9; LEN]).expect("inside");
    let (mut writer, mut owner) = connected(a, b);
    let (mut second, _second_owner) = connected(a, b);
    let remote = far.remote();
    // During a stream of writes, which ends only with the connection.
    let progress = std::thread::scope(|scope| {
        let (writer, near) = (&mut writer, &mut near);
        let stream = scope.spawn(move || {
            let start = Instant::now();
            loop {
                let full = loop {
                    match writer.write((near, 0), (&remote, 0), LEN as u64) {
                        Ok(_) => writer.flush(),
                        Err(why) => break why,
                    }
                };
                let progress = writer.poll();
                if progress.error.is_some() {
                    return progress;
                }
                assert!(matches!(full, PostError::Full | PostError::Link(_)), "{full}");
                assert!(start.elapsed() < 2 * LIMIT, "the stream of writes does not end: {writer:?}");
                std::thread::yield_now();
            }
        });
        let start = Instant::now();
        while bytes(&far)[0] != 9 {
            assert!(start.elapsed() < LIMIT, "no write takes effect");
        }
        owner.fence([&mut far]).expect("fenced");
        far.write(0, &[1; LEN]).expect("inside");
        stream.join().expect("it ended")
    });
    assert!(matches!(progress.error, Some(LinkError::PeerGone | LinkError::RemoteAccess)), "{progress:?}");
    second.write((&near, 0), (&remote, 0), LEN as u64).expect("room");
    loss.assert_refused(finish(&mut second, 1).error, "a write on another connection");
    assert!(bytes(&far) == [1; LEN], "nothing was written after the fence");
    let own = owner.write((&far, 0), (&near.remote(), 0), 1).expect_err("fenced here");
    assert_eq!(own, PostError::Link(LinkError::Fenced));
    println!("fenced after {} writes: {}", progress.done, progress.error.expect("an error"));
}

/// A lost peer is a specific error within a bounded time.
fn gone(a: &VerbsDomain, b: &VerbsDomain) {
    let (near, far) = (a.expose(4096).expect("memory"), b.expose(4096).expect("memory"));
    let (mut link, peer) = connected(a, b);
    drop(peer);
    link.write((&near, 0), (&far.remote(), 0), 4096).expect("room");
    let start = Instant::now();
    assert_eq!(finish(&mut link, 1).error, Some(LinkError::PeerGone));
    println!("a dead peer is noticed after {} ms", start.elapsed().as_millis());
}

/// A thousand connections that are created, used and closed leak nothing in this process.
fn cycles(a: &VerbsDomain, b: &VerbsDomain) {
    let (near, far) = (a.expose(4096).expect("memory"), b.expose(4096).expect("memory"));
    super::cycles(|| {
        let (mut link, _peer) = connected(a, b);
        link.write((&near, 0), (&far.remote(), 0), 64).expect("room");
        assert_eq!(finish(&mut link, 1).error, None);
    });
}
