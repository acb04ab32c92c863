//! Fake devices: silent, crash-looping, or with the name of another device.

use crate::testbed::{JobConfig, LONG, RANKS, TestBed, Tools};
use crate::traffic::dial_within;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::Transport;
use sumac::controller::proto::DeviceStatus;
use sumac_hal::ctrl::{Announce, Envelope, FrameReader, Hello, Name, Rejection, Request, Response, send};
use sumac_hal::ids::BootId;

const OVER_UDP: JobConfig = JobConfig { transport: Transport::Udp, schedules: true };

/// Return the announcement of a device like `like` with another name.
fn announce(like: &DeviceStatus, name: &str, incarnation: u64) -> Announce {
    Announce {
        name: Name::try_from(name).expect("a short name"),
        boot_id: BootId(incarnation),
        capabilities: like.capabilities,
        data_addrs: like.data_addrs.iter().copied().collect(),
        attach: None,
        slots: None,
    }
}

fn register(testbed: &TestBed<'_>, announce: Announce) -> Option<TcpStream> {
    let mut stream = dial_within(testbed.addr, LONG)?;
    send(&mut stream, &Hello::Device(announce)).ok()?;
    Some(stream)
}

pub(crate) fn mute(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(OVER_UDP);
    let (before, real) = (testbed.count(), testbed.device_status("one"));
    let mute = (0..20).map(|nth| register(&testbed, announce(&real, &format!("mute{nth}"), nth)));
    let mute: Vec<_> = mute.map(|stream| stream.expect("the controller listens")).collect();
    // The first report may wait for them.
    testbed.report();
    let begun = Instant::now();
    (0..3).for_each(|_| drop(testbed.report()));
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "three reports took {took:?} beside devices that never answered");
    testbed.check_that_others_join("beside", OVER_UDP);
    drop(mute);
    testbed.check_unaffected(&before);
}

/// A device that crashes on each new group is not offered again at once; the job continues with host collectives.
pub(crate) fn crash_loop(tools: &Tools) {
    let mut testbed = TestBed::start(tools);
    let real = testbed.device_status("one");
    drop(testbed.devices.remove(0));
    let mut testbed = testbed.with_job(OVER_UDP);
    let (given, before) = (Arc::new(AtomicU64::new(0)), testbed.count());
    let until = Instant::now() + Duration::from_secs(6);
    let mut incarnations = 0;
    while Instant::now() < until {
        incarnations += 1;
        // The controller may refuse it for a while.
        let Some(stream) = register(&testbed, announce(&real, "loop", incarnations)) else { continue };
        let given = Arc::clone(&given);
        let incarnation = thread::spawn(move || live(stream, &given));
        incarnation.join().expect("no panic");
    }
    let (given, incarnations) = (given.load(Ordering::SeqCst), incarnations);
    assert!(given <= 8, "in 6 s and {incarnations} incarnations it was given {given} groups, and took none");
    let after = testbed.wait_for_rounds(10);
    assert_eq!((after.in_tree, testbed.count().repaired), (0, before.repaired));
    testbed.check_alive();
    assert_eq!(testbed.job_status("work").map(|job| job.joined), Some(RANKS));
    testbed.finish();
}

/// Serve requests until the first group, or until no request arrives for 300 ms.
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

/// A device with the name of a live device is always refused.
pub(crate) fn taken_name(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(JobConfig { transport: Transport::Shm, schedules: true });
    let (before, real) = (testbed.count(), testbed.device_status("one"));
    for incarnation in 0..300 {
        let stream = register(&testbed, announce(&real, "one", incarnation)).expect("the controller listens");
        stream.set_read_timeout(Some(LONG)).expect("a socket");
        let mut reader = FrameReader::new(stream);
        let answer = reader.recv::<Envelope<Request>>().map(|answer| answer.message);
        assert!(
            matches!(answer, Ok(Request::Rejected(Rejection::NameTaken { .. }))),
            "the impostor is told and gets no request: {answer:?}"
        );
        assert!(reader.recv::<Envelope<Request>>().is_err(), "the connection is closed");
    }
    assert_eq!(testbed.device_status("one").data_addrs, real.data_addrs);
    testbed.check_unaffected(&before);
}
