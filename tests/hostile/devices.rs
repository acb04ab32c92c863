//! Devices that are none: mute ones, ones that come and go, ones that call themselves like another.

use crate::place::{LONG, Place, RANKS, Tools, Way};
use crate::strangers::dial_within;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::Attach;
use sumac::controller::proto::DeviceStatus;
use sumac_hal::ctrl::{Announce, Envelope, FrameReader, Greeting, Name, Request, Response, send};
use sumac_hal::ids::BootId;

const BY_PACKETS: Way = Way { attach: Attach::Udp, schedules: true };

/// What a device of another name would announce.
fn announce(like: &DeviceStatus, name: &str, life: u64) -> Announce {
    Announce {
        name: Name::try_from(name).expect("a short name"),
        boot_id: BootId(life),
        capabilities: like.capabilities,
        data_addrs: like.data_addrs.iter().copied().collect(),
        bus: None,
    }
}

fn register(place: &Place<'_>, announce: Announce) -> Option<TcpStream> {
    let mut stream = dial_within(place.addr, LONG)?;
    send(&mut stream, &Greeting::Device(announce)).ok()?;
    Some(stream)
}

pub(crate) fn mute(tools: &Tools) {
    let mut place = Place::start(tools).with_job(BY_PACKETS);
    let (before, real) = (place.count(), place.device_status("one"));
    let mute = (0..20).map(|nth| register(&place, announce(&real, &format!("mute{nth}"), nth)));
    let mute: Vec<_> = mute.map(|stream| stream.expect("the controller listens")).collect();
    // Once it may wait for them.
    place.report();
    let begun = Instant::now();
    (0..3).for_each(|_| drop(place.report()));
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "three reports took {took:?} beside devices that never answered");
    place.check_that_others_join("beside", BY_PACKETS);
    drop(mute);
    place.check_unhurt(&before);
}

/// A device that is gone as soon as it is given a group is not given the next at once: a job without any other goes on by
/// schedules.
pub(crate) fn crash_loop(tools: &Tools) {
    let mut place = Place::start(tools);
    let real = place.device_status("one");
    drop(place.devices.remove(0));
    let mut place = place.with_job(BY_PACKETS);
    let (given, before) = (Arc::new(AtomicU64::new(0)), place.count());
    let until = Instant::now() + Duration::from_secs(6);
    let mut lives = 0;
    while Instant::now() < until {
        lives += 1;
        // It may be kept away for a while.
        let Some(stream) = register(&place, announce(&real, "loop", lives)) else { continue };
        let given = Arc::clone(&given);
        let life = thread::spawn(move || live(stream, &given));
        life.join().expect("no panic");
    }
    let (given, lives) = (given.load(Ordering::SeqCst), lives);
    assert!(given <= 8, "in 6 s and {lives} lives it was given {given} groups, and took none");
    let after = place.wait_for_rounds(10);
    assert_eq!((after.in_tree, place.count().repaired), (0, before.repaired));
    place.check_alive();
    assert_eq!(place.job_status("work").map(|job| job.joined), Some(RANKS));
    place.finish();
}

/// Do what is asked, up to the first group; or nothing is asked for a while.
fn live(stream: TcpStream, given: &AtomicU64) {
    stream.set_read_timeout(Some(Duration::from_millis(300))).expect("a socket");
    let mut to = stream.try_clone().expect("a descriptor");
    let mut reader = FrameReader::new(stream);
    while let Ok(Envelope { id, message }) = reader.recv::<Envelope<Request>>() {
        if let Request::CreateGroup(_) = message {
            given.fetch_add(1, Ordering::SeqCst);
            return;
        }
        if send(&mut to, &Envelope { id, message: Response::Done }).is_err() {
            return;
        }
    }
}

/// Whoever comes with a name that a live device has is sent away, however often.
pub(crate) fn taken_name(tools: &Tools) {
    let mut place = Place::start(tools).with_job(Way { attach: Attach::Shm, schedules: true });
    let (before, real) = (place.count(), place.device_status("one"));
    for life in 0..300 {
        let stream = register(&place, announce(&real, "one", life)).expect("the controller listens");
        stream.set_read_timeout(Some(LONG)).expect("a socket");
        let answer = FrameReader::new(stream).recv::<Envelope<Request>>();
        assert!(answer.is_err(), "it is welcomed: {answer:?}");
    }
    assert_eq!(place.device_status("one").data_addrs, real.data_addrs);
    place.check_unhurt(&before);
}
