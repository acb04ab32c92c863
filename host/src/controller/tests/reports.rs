//! What reports tell of jobs, and what refused devices are told.

use super::super::proto::{ClientRequest, RankRange, RecoveryOutcome};
use super::replan::{Raw, join_all, replan, request};
use super::*;
use std::sync::atomic::AtomicBool;
use sumac_hal::ctrl::Rejection;

fn range(first: u32, last: u32) -> RankRange {
    RankRange { first, last }
}

#[test]
fn report_lists_the_ranks_that_have_not_joined_or_are_gone() {
    let controller = controller();
    let mut ranks: Vec<_> = [1, 4].map(|rank| Raw::join_with(&controller, request(rank, 7), &[])).into();
    let missing = |rank: &mut Raw| rank.report().jobs[0].missing.clone();
    assert_eq!(missing(&mut ranks[1]), [range(0, 0), range(2, 3), range(5, 6)]);
    ranks.extend([0, 2, 3, 5, 6].map(|rank| Raw::join_with(&controller, request(rank, 7), &[])));
    ranks.iter_mut().for_each(|rank| _ = rank.joined());
    assert_eq!(missing(&mut ranks[0]), []);
    drop(ranks.pop());
    // The notification precedes the report.
    let mut rank = ranks.remove(0);
    rank.recv();
    assert_eq!(missing(&mut rank), [range(6, 6)]);
    assert_eq!(rank.report().recoveries[0].cause, "rank 6 is lost");
}

#[test]
fn report_tells_what_jobs_recovered_from_even_after_their_end() {
    let controller = controller();
    let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let (mut ranks, _) = join_all(&controller, 2, &[]);
    assert_eq!(ranks[0].report().recoveries, []);
    assert_eq!(ranks[0].report().jobs[0].tree.as_ref().expect("it runs").as_ref().expect("a tree").transport, "udp");
    ranks[1].send(ClientRequest::Suspect { view: 0 });
    ranks.iter_mut().for_each(|rank| _ = rank.recv());
    let recovering = ranks[0].report().recoveries.remove(0);
    assert_eq!((recovering.job.as_str(), recovering.view), ("job", 0));
    assert_eq!((recovering.took_ms, recovering.outcome), (None, None));
    assert_eq!(recovering.cause, "tree lost: reported by rank 1");
    replan(&mut ranks, 0);
    let recovered = ranks[0].report().recoveries.remove(0);
    assert_eq!((recovered.cause, recovered.outcome), (recovering.cause, Some(RecoveryOutcome::NewTree)));
    assert!(recovered.took_ms.is_some_and(|took_ms| took_ms <= recovered.began_ms_ago), "{:?}", recovered.took_ms);
    for rank in &mut ranks {
        rank.send(ClientRequest::Leave);
        rank.recv();
    }
    let report = ranks[0].report();
    assert_eq!((report.jobs.len(), report.recoveries.len()), (0, 1));
}

/// Announce a device, and return the rejection with which the controller ends the connection.
fn rejection(controller: &Controller, announce: Announce) -> Rejection {
    let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
    stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a socket");
    send(&mut stream, &Hello::Device(announce)).expect("it listens");
    let mut reader = FrameReader::new(stream);
    let Request::Rejected(rejection) = reader.recv::<Envelope<Request>>().expect("a message").message else {
        panic!("the device is registered");
    };
    reader.recv::<Envelope<Request>>().expect_err("the connection is closed");
    rejection
}

#[test]
fn device_is_told_its_name_is_taken_once_the_holder_has_answered() {
    let controller = controller();
    let holder = announce("leaf0", 1, None);
    let device = Device::serve(&controller, holder.clone(), |_| Reply::Done);
    let addr = holder.data_addrs.first().copied();
    let first = rejection(&controller, announce("leaf0", 1, None));
    assert_eq!(first, Rejection::NameTaken { holder: addr, is_alive: false });
    assert!(!first.is_final());
    // The holder answers the probe of an earlier attempt.
    let limit = std::time::Instant::now() + TEST_TIMEOUT;
    loop {
        let next = rejection(&controller, announce("leaf0", 1, None));
        if next.is_final() {
            assert_eq!(next, Rejection::NameTaken { holder: addr, is_alive: true });
            break;
        }
        assert!(std::time::Instant::now() < limit, "{next:?}");
    }
    // Its own earlier connection is no reason to give up.
    assert!(!rejection(&controller, holder).is_final());
    drop(device);
}

#[test]
fn device_whose_holder_does_not_answer_keeps_trying() {
    let controller = controller();
    let welcomed = AtomicBool::new(false);
    let mute = move |_: &Request| if welcomed.swap(true, Ordering::Relaxed) { Reply::Silent } else { Reply::Done };
    let device = Device::serve(&controller, announce("leaf0", 1, None), mute);
    for _ in 0..10 {
        assert!(!rejection(&controller, announce("leaf0", 1, None)).is_final());
    }
    device.stopped.recv_timeout(TEST_TIMEOUT).expect("it was probed");
    assert!(!rejection(&controller, announce("leaf0", 1, None)).is_final());
}

/// Each attempt probes the holder, which may be busy for a moment.
#[test]
fn flood_of_attempts_on_a_taken_name_does_not_end_the_holder() {
    let controller = controller();
    let (release, gate) = channel::<()>();
    let welcomed = AtomicBool::new(false);
    let busy = move |_: &Request| {
        if welcomed.swap(true, Ordering::Relaxed) {
            // Until the test ends the flood.
            let _ = gate.recv();
        }
        Reply::Done
    };
    let _device = Device::serve(&controller, announce("leaf0", 1, None), busy);
    for _ in 0..400 {
        rejection(&controller, announce("leaf0", 1, None));
    }
    let report = status(controller.local_addr()).expect("a report");
    assert_eq!(report.devices.len(), 1, "a stranger has ended the device's connection");
    drop(release);
}

#[test]
fn device_beyond_the_limit_or_with_an_invalid_name_is_told_so() {
    let limits = Limits { devices: 0, ..Limits::default() };
    let controller = Controller::start(ControllerConfig { limits, ..ControllerConfig::new() }).expect("a port");
    assert_eq!(rejection(&controller, announce("leaf0", 1, None)), Rejection::TooMany { limit: 0 });
    assert_eq!(rejection(&controller, announce("a\u{1b}[2J", 1, None)), Rejection::Name);
}
