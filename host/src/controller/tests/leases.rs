//! Leases: an expired group is released on all devices, and groups of an earlier controller are waited for.

use super::super::proto::{ClientReply, ClientRequest};
use super::replan::{Raw, no_tree_reason, recv_release, replan, request, tree_of};
use super::*;
use std::sync::atomic::{AtomicBool, AtomicU32};
use sumac_hal::ctrl::{Counters, Stats};

fn with_short_lease() -> Controller {
    let config = ControllerConfig { lease: Duration::from_secs(1), ..ControllerConfig::new() };
    Controller::start(config).expect("a port")
}

/// One of two devices in a chain has lost the group: the other one's is released, the ranks are notified, and both
/// devices can be used again.
#[test]
fn group_expired_on_one_node_is_released_on_all() {
    let controller = with_short_lease();
    let root = Device::start(&controller, "root", None, None);
    let is_expired = Arc::new(AtomicBool::new(false));
    let expired = Arc::clone(&is_expired);
    let answer = move |request: &Request| match *request {
        Request::RenewGroup(group) if expired.load(Ordering::Relaxed) => {
            Reply::with(Response::Refused(Refusal::NoGroup(group)))
        }
        _ => Reply::Done,
    };
    let _leaf = Device::serve(&controller, announce("leaf", 1, None), answer);
    let mut ranks: Vec<Raw> =
        (0..2).map(|rank| Raw::join_with(&controller, request(rank, 2), &["root", "leaf"])).collect();
    let before: Vec<Membership> = ranks.iter_mut().map(Raw::joined).collect();
    is_expired.store(true, Ordering::Relaxed);
    assert_eq!(recv_release(&root), tree_of(&before[0]).group);
    for rank in &mut ranks {
        assert_eq!(rank.recv_any(), ClientReply::TreeLost { view: 0 });
    }
    let report = ranks[0].report();
    let lost = report.jobs[0].tree.as_ref().expect("running").as_ref().expect_err("lost");
    assert_eq!(lost, "the lease of its group expired on device leaf");
    assert_eq!((report.tenants[0].groups, report.tenants[0].slots), (0, 0), "all is given back");
    is_expired.store(false, Ordering::Relaxed);
    // No device is excluded.
    let after = replan(&mut ranks, 0);
    assert!(after.iter().all(|membership| tree_of(membership).leaf == "leaf"));
    assert_ne!(tree_of(&after[0]).group, tree_of(&before[0]).group);
}

/// A device may hold groups of an earlier controller. A job that it refuses waits until their leases have expired.
#[test]
fn tree_is_offered_once_groups_of_an_earlier_controller_expire() {
    let controller = with_short_lease();
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
        _ => Reply::Done,
    };
    let _device = Device::serve(&controller, announce("leaf0", 1, None), answer);
    let mut rank = Raw::join_with(&controller, request(0, 1), &[]);
    let waits = rank.joined();
    assert!(
        no_tree_reason(&waits)
            .starts_with("device leaf0: refused: not enough free slots: the group needs 512 contiguous"),
        "{}",
        no_tree_reason(&waits)
    );
    assert!(waits.queue.is_some());
    // The device is queried every third of a lease. Nothing is offered while it is as full as before.
    let seen = asked.load(Ordering::Relaxed);
    while asked.load(Ordering::Relaxed) < seen + 2 {
        thread::yield_now();
    }
    assert!(!status(controller.local_addr()).expect("a report").jobs[0].is_offered);
    slots_used.store(0, Ordering::Relaxed);
    let ClientReply::Offer { view: 0 } = rank.recv_any() else { panic!("there is room now") };
    assert_eq!(tree_of(&replan(std::slice::from_mut(&mut rank), 0)[0]).leaf, "leaf0");
}

/// The slots were freed between the refusal and the count, so the device never reports fewer.
#[test]
fn refusal_with_free_slots_reported_is_retried() {
    let controller = with_short_lease();
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
        _ => Reply::Done,
    };
    let _device = Device::serve(&controller, announce("leaf0", 1, None), answer);
    let mut rank = Raw::join_with(&controller, request(0, 1), &[]);
    assert!(no_tree_reason(&rank.joined()).starts_with("device leaf0: refused"));
    while !matches!(rank.recv_any(), ClientReply::Offer { view: 0 }) {}
    assert_eq!(tree_of(&replan(std::slice::from_mut(&mut rank), 0)[0]).leaf, "leaf0");
}

/// An unresponsive device is excluded. Once it responds again, jobs placed without it are offered a tree.
#[test]
fn device_that_responds_again_after_a_timeout_is_used() {
    let controller = with_short_lease();
    let (wake, woken) = channel::<()>();
    let answer = move |request: &Request| {
        if matches!(request, Request::CreateGroup(_)) {
            // Blocks until the sender is dropped.
            let _ = woken.recv();
        }
        Reply::Done
    };
    let _device = Device::serve(&controller, announce("leaf0", 1, None), answer);
    let mut rank = Raw::join_with(&controller, request(0, 1), &[]);
    rank.extend_timeout();
    let waits = rank.joined();
    let reason = "no device is connected to the controller; excluded devices (not responding): leaf0";
    assert_eq!((no_tree_reason(&waits), waits.queue), (reason, None));
    drop(wake);
    let told = rank.recv_any();
    assert!(matches!(told, ClientReply::Offer { view: 0 } | ClientReply::Queued(_)), "{told:?}");
    assert_eq!(tree_of(&replan(std::slice::from_mut(&mut rank), 0)[0]).leaf, "leaf0");
}

/// Its lease would expire if a round of renewals waited for all responses of the previous one.
#[test]
fn unresponsive_device_delays_no_renewal_of_other_devices() {
    let controller = with_short_lease();
    let silent =
        Device::that_stops_responding(&controller, "leaf0", |request| matches!(request, Request::RenewGroup(_)));
    let (renews, renewed) = channel();
    let answer = move |request: &Request| {
        if matches!(request, Request::RenewGroup(_)) {
            let _ = renews.send(());
        }
        Reply::Done
    };
    let _other = Device::serve(&controller, announce("leaf1", 1, None), answer);
    let on = |job: &str, device| {
        let mut raw = Raw::join_with(&controller, JoinRequest { job: job.into(), ..request(0, 1) }, &[device]);
        assert_eq!(tree_of(&raw.joined()).leaf, device);
        raw
    };
    let _jobs = [on("first", "leaf0"), on("second", "leaf1")];
    silent.stopped.recv_timeout(TEST_TIMEOUT).expect("a renewal");
    // The device is given up on after five seconds.
    for nth in 0..4 {
        assert_eq!(renewed.recv_timeout(Duration::from_secs(1)), Ok(()), "renewal {nth}");
    }
}

/// The same if the device only missed a renewal.
#[test]
fn device_that_missed_a_renewal_is_used_again() {
    let controller = with_short_lease();
    let (wake, woken) = channel::<()>();
    let renewals = AtomicU64::new(0);
    let answer = move |request: &Request| {
        if matches!(request, Request::RenewGroup(_)) && renewals.fetch_add(1, Ordering::Relaxed) == 0 {
            let _ = woken.recv();
        }
        Reply::Done
    };
    let mut announce = announce("leaf0", 1, None);
    announce.capabilities.groups = 1;
    let device = Device::serve(&controller, announce, answer);
    let mut first = Raw::join_with(&controller, request(0, 1), &[]);
    let group = tree_of(&first.joined()).group;
    let silent = || {
        let mut machine = controller.shared.lock();
        let state = machine.state_mut();
        state.devices.values().any(|device| !state.links.is_responsive(device))
    };
    while !silent() {
        thread::yield_now();
    }
    first.send(ClientRequest::Leave);
    let other = JoinRequest { job: "other".into(), ..request(0, 1) };
    let mut second = Raw::join_with(&controller, other, &[]);
    second.extend_timeout();
    let waits = second.joined();
    assert_eq!(
        no_tree_reason(&waits),
        "no device is connected to the controller; excluded devices (not responding): leaf0"
    );
    drop(wake);
    assert_eq!(recv_release(&device), group);
    let told = second.recv_any();
    assert!(matches!(told, ClientReply::Offer { view: 0 } | ClientReply::Queued(_)), "{told:?}");
}

/// A machine that was reset closes no connection and reconnects under the same name.
#[test]
fn duplicate_device_name_probes_the_earlier_connection() {
    let controller = with_short_lease();
    let welcomed = AtomicBool::new(false);
    let answer = move |request: &Request| match request {
        Request::Identify if welcomed.swap(true, Ordering::Relaxed) => Reply::Silent,
        _ => Reply::Done,
    };
    let device = Device::serve(&controller, announce("leaf0", 1, None), answer);
    let mut again = TcpStream::connect(controller.local_addr()).expect("a controller");
    let next_incarnation = Announce { boot_id: BootId(2), ..announce("leaf0", 1, None) };
    send(&mut again, &Hello::Device(next_incarnation.clone())).expect("it listens");
    assert_eq!(device.stopped.recv_timeout(TEST_TIMEOUT), Ok(Request::Identify));
    // The reset machine answers packets of the unknown connection with a reset.
    device.stream.shutdown(std::net::Shutdown::Both).expect("it is open");
    while !status(controller.local_addr()).expect("a report").devices.is_empty() {
        thread::yield_now();
    }
    let _device = Device::serve(&controller, next_incarnation, |_| Reply::Done);
}
