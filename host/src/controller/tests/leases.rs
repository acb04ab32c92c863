//! Leases as the controller keeps them: what a device has freed is freed everywhere, and what an earlier controller has
//! left is waited for.

use super::super::proto::{ClientReply, ClientRequest};
use super::replan::{Raw, of, released, replan, request, why};
use super::*;
use std::sync::atomic::{AtomicBool, AtomicU32};
use sumac_hal::ctrl::{Counters, Stats};

fn quick() -> Controller {
    let config = ControllerConfig { lease: Duration::from_secs(1), ..ControllerConfig::new() };
    Controller::start(config).expect("a port")
}

/// A chain of two devices of which one has lost the group: the other one's is released, the ranks are told, and both
/// devices are free for the job's next tree, and for others.
#[test]
fn a_group_that_one_node_has_freed_is_freed_on_all_and_its_job_told() {
    let controller = quick();
    let root = Device::start(&controller, "root", None, None);
    let is_expired = Arc::new(AtomicBool::new(false));
    let expired = Arc::clone(&is_expired);
    let answer = move |request: &Request| match *request {
        Request::RenewGroup(group) if expired.load(Ordering::Relaxed) => {
            Reply::with(Response::Refused(Refusal::NoGroup(group)))
        }
        _ => Reply::Yes,
    };
    let _leaf = Device::serve(&controller, announce("leaf", 1, None), answer);
    let mut ranks: Vec<Raw> =
        (0..2).map(|rank| Raw::join_with(&controller, request(rank, 2), &["root", "leaf"])).collect();
    let before: Vec<Membership> = ranks.iter_mut().map(Raw::joined).collect();
    is_expired.store(true, Ordering::Relaxed);
    assert_eq!(released(&root), of(&before[0]).group);
    for rank in &mut ranks {
        assert_eq!(rank.hear_all(), ClientReply::Repair { view: 0 });
    }
    let report = ranks[0].report();
    let lost = report.jobs[0].tree.as_ref().expect("running").as_ref().expect_err("lost");
    assert_eq!(lost, "the lease of its group ran out on device leaf");
    assert_eq!((report.tenants[0].groups, report.tenants[0].slots), (0, 0), "all is given back");
    is_expired.store(false, Ordering::Relaxed);
    // No device is to blame.
    let after = replan(&mut ranks, 0);
    assert!(after.iter().all(|membership| of(membership).leaf == "leaf"));
    assert_ne!(of(&after[0]).group, of(&before[0]).group);
}

/// A device may hold groups that this controller knows nothing of: of an earlier one. Whom it refuses waits until those
/// leases have run out.
#[test]
fn what_an_earlier_controller_has_left_is_waited_for() {
    let controller = quick();
    let (slots_used, asked) = (Arc::new(AtomicU32::new(900)), Arc::new(AtomicU32::new(0)));
    let (used, times) = (Arc::clone(&slots_used), Arc::clone(&asked));
    let answer = move |request: &Request| match request {
        Request::CreateGroup(_) if used.load(Ordering::Relaxed) > 0 => {
            Reply::with(Response::Refused(Refusal::NoSlots { need: 512 }))
        }
        Request::Stats => {
            times.fetch_add(1, Ordering::Relaxed);
            Reply::with(Response::Stats(Stats {
                boot_id: BootId(1),
                groups: 1,
                trees: 1,
                slots_used: used.load(Ordering::Relaxed),
                slot_memory_used_bytes: 0,
                stack: None,
                counters: Counters::default(),
            }))
        }
        _ => Reply::Yes,
    };
    let _device = Device::serve(&controller, announce("leaf0", 1, None), answer);
    let mut rank = Raw::join_with(&controller, request(0, 1), &[]);
    let waits = rank.joined();
    assert!(why(&waits).starts_with("device leaf0: it refused: 512 slots are needed"), "{}", why(&waits));
    assert!(waits.queue.is_some());
    // It is asked, a third of the lease apart, and nothing is offered while it is as full as before.
    let seen = asked.load(Ordering::Relaxed);
    while asked.load(Ordering::Relaxed) < seen + 2 {
        thread::yield_now();
    }
    assert!(!status(controller.local_addr()).expect("a report").jobs[0].is_offered);
    slots_used.store(0, Ordering::Relaxed);
    let ClientReply::Offer { view: 0 } = rank.hear_all() else { panic!("there is room now") };
    assert_eq!(of(&replan(std::slice::from_mut(&mut rank), 0)[0]).leaf, "leaf0");
}

/// What the device was short of was freed after it had refused, and before it counted: it never counts fewer.
#[test]
fn refusal_that_was_stale_when_the_device_counted_is_tried_again() {
    let controller = quick();
    let has_refused = AtomicBool::new(false);
    let answer = move |request: &Request| match request {
        Request::CreateGroup(_) if !has_refused.swap(true, Ordering::Relaxed) => {
            Reply::with(Response::Refused(Refusal::NoSlots { need: 512 }))
        }
        Request::Stats => Reply::with(Response::Stats(Stats {
            boot_id: BootId(1),
            groups: 0,
            trees: 0,
            slots_used: 0,
            slot_memory_used_bytes: 0,
            stack: None,
            counters: Counters::default(),
        })),
        _ => Reply::Yes,
    };
    let _device = Device::serve(&controller, announce("leaf0", 1, None), answer);
    let mut rank = Raw::join_with(&controller, request(0, 1), &[]);
    assert!(why(&rank.joined()).starts_with("device leaf0: it refused"));
    while !matches!(rank.hear_all(), ClientReply::Offer { view: 0 }) {}
    assert_eq!(of(&replan(std::slice::from_mut(&mut rank), 0)[0]).leaf, "leaf0");
}

/// A device that is silent is not asked; when it answers again, though late, who went without it is offered a tree.
#[test]
fn a_device_that_was_silent_for_a_while_is_used_again() {
    let controller = quick();
    let (wake, woken) = channel::<()>();
    let answer = move |request: &Request| {
        if matches!(request, Request::CreateGroup(_)) {
            // Ends when the other side is dropped, or has said so.
            let _ = woken.recv();
        }
        Reply::Yes
    };
    let _device = Device::serve(&controller, announce("leaf0", 1, None), answer);
    let mut rank = Raw::join_with(&controller, request(0, 1), &[]);
    rank.patient();
    let waits = rank.joined();
    let reason = "no device is connected to the controller; not asked, as it does not answer: leaf0";
    assert_eq!((why(&waits), waits.queue), (reason, None));
    drop(wake);
    let told = rank.hear_all();
    assert!(matches!(told, ClientReply::Offer { view: 0 } | ClientReply::Queued(_)), "{told:?}");
    assert_eq!(of(&replan(std::slice::from_mut(&mut rank), 0)[0]).leaf, "leaf0");
}

/// The same where nobody has asked it for a tree meanwhile, but only to renew a lease.
#[test]
fn a_device_that_did_not_renew_in_time_is_used_again() {
    let controller = quick();
    let (wake, woken) = channel::<()>();
    let renewals = AtomicU64::new(0);
    let answer = move |request: &Request| {
        if matches!(request, Request::RenewGroup(_)) && renewals.fetch_add(1, Ordering::Relaxed) == 0 {
            let _ = woken.recv();
        }
        Reply::Yes
    };
    let mut announce = announce("leaf0", 1, None);
    announce.capabilities.groups = 1;
    let device = Device::serve(&controller, announce, answer);
    let mut first = Raw::join_with(&controller, request(0, 1), &[]);
    let group = of(&first.joined()).group;
    let silent = || controller.shared.lock().devices.values().any(|device| !device.answers());
    while !silent() {
        thread::yield_now();
    }
    first.say(ClientRequest::Leave);
    let other = JoinRequest { job: "other".into(), ..request(0, 1) };
    let mut second = Raw::join_with(&controller, other, &[]);
    second.patient();
    let waits = second.joined();
    assert_eq!(why(&waits), "no device is connected to the controller; not asked, as it does not answer: leaf0");
    drop(wake);
    assert_eq!(released(&device), group);
    let told = second.hear_all();
    assert!(matches!(told, ClientReply::Offer { view: 0 } | ClientReply::Queued(_)), "{told:?}");
}

/// A machine that is reset closes no connection, and comes back under its name.
#[test]
fn a_device_that_comes_again_has_the_controller_ask_its_earlier_life() {
    let controller = quick();
    let welcomed = AtomicBool::new(false);
    let answer = move |request: &Request| match request {
        Request::Hello if welcomed.swap(true, Ordering::Relaxed) => Reply::NoneAnyMore,
        _ => Reply::Yes,
    };
    let device = Device::serve(&controller, announce("leaf0", 1, None), answer);
    let mut again = TcpStream::connect(controller.local_addr()).expect("a controller");
    let next_life = Announce { boot_id: BootId(2), ..announce("leaf0", 1, None) };
    send(&mut again, &Greeting::Device(next_life.clone())).expect("it listens");
    assert_eq!(device.stopped.recv_timeout(GREETING_TIMEOUT), Ok(Request::Hello));
    // What a machine says to packets of a connection that it does not know.
    device.stream.shutdown(std::net::Shutdown::Both).expect("it is open");
    while !status(controller.local_addr()).expect("a report").devices.is_empty() {
        thread::yield_now();
    }
    let _device = Device::serve(&controller, next_life, |_| Reply::Yes);
}
