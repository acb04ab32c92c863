//! Tenants and quotas, the queue, and declined trees, on raw connections.

use super::super::proto::{ClientReply, ClientRequest, JobStatus, JoinRefusal, QueuePosition};
use super::replan::{Raw, SOON, disconnect_device, no_tree_reason, recv_release, replan, request, tree_of};
use super::*;
use std::time::Instant;

/// A device with room for `groups` groups.
fn device_with_groups(controller: &Controller, name: &str, groups: u16) -> Device {
    let mut announce = announce(name, 1, None);
    announce.capabilities.groups = groups;
    Device::serve(controller, announce, |_| Reply::Done)
}

fn with_quotas(tenants: &[(&str, Quota)]) -> Controller {
    let tenants = tenants.iter().map(|(name, quota)| ((*name).to_owned(), *quota)).collect();
    let quotas = Quotas { other: Quota::default(), tenants };
    Controller::start(ControllerConfig { quotas, ..ControllerConfig::new() }).expect("a port")
}

/// Request a job of one rank for a tenant.
fn request_job(controller: &Controller, job: &str, tenant: &str, wait_ms: u32) -> Raw {
    let terms = Terms { tenant: tenant.into(), wait_ms, accepts_migration: true, ..Terms::default() };
    Raw::join_with(controller, JoinRequest { job: job.into(), terms, ..request(0, 1) }, &[])
}

fn join_one(controller: &Controller, job: &str, tenant: &str) -> (Raw, Membership) {
    let mut rank = request_job(controller, job, tenant, 0);
    let membership = rank.joined();
    (rank, membership)
}

fn job(controller: &Controller, name: &str) -> JobStatus {
    let report = status(controller.local_addr()).expect("a report");
    report.jobs.into_iter().find(|job| job.name == name).expect("such a job")
}

fn place(position: u32, of: u32) -> Option<QueuePosition> {
    Some(QueuePosition { position, of })
}

pub(super) fn leave_job(mut rank: Raw) {
    rank.send(ClientRequest::Leave);
    while rank.recv() != ClientReply::Left {}
}

/// Wait for an offer and accept it.
fn accept_offer(rank: &mut Raw, view: u32) -> Membership {
    loop {
        match rank.recv_any() {
            ClientReply::Queued(_) => {}
            ClientReply::Offer { view: offered } => {
                assert_eq!(offered, view);
                break;
            }
            other => panic!("an offer: {other:?}"),
        }
    }
    rank.send(ClientRequest::Pause { view, at: 3 });
    assert_eq!(rank.recv(), ClientReply::MoveAt { view, call: 3 });
    rank.send(ClientRequest::Replan { view });
    let (new, membership) = rank.replanned();
    assert_eq!(new, view + 1);
    membership
}

/// Assert that the ledger holds nothing.
fn assert_nothing_held(controller: &Controller) {
    let held = |tenant: &proto::TenantStatus| (tenant.groups, tenant.slots, tenant.memory_bytes);
    let report = status(controller.local_addr()).expect("a report");
    assert!(report.tenants.iter().all(|tenant| held(tenant) == (0, 0, 0)), "{:?}", report.tenants);
}

#[test]
fn full_device_queues_jobs_and_serves_them_when_freed() {
    let controller = controller();
    let device = device_with_groups(&controller, "leaf0", 1);
    let (first, has) = join_one(&controller, "first", "x");
    let group = tree_of(&has).group;
    let (mut second, waits) = join_one(&controller, "second", "y");
    assert_eq!(no_tree_reason(&waits), "device leaf0 is full: 1 of 1 groups in use, at least 1 more needed");
    assert_eq!(waits.queue, place(1, 1));
    let (mut third, waits) = join_one(&controller, "third", "x");
    assert_eq!(waits.queue, place(2, 2));
    assert_eq!(second.recv_any(), ClientReply::Queued(place(1, 2)));
    let told = job(&controller, "third");
    assert_eq!((told.tenant.as_str(), told.queue, told.is_offered), ("x", place(2, 2), false));
    assert!(told.tree.expect("running").is_err());
    leave_job(first);
    assert_eq!(recv_release(&device), group);
    while !job(&controller, "second").is_offered {
        thread::yield_now();
    }
    assert_eq!(tree_of(&accept_offer(&mut second, 0)).leaf, "leaf0");
    assert_eq!(third.recv_any(), ClientReply::Queued(place(1, 1)));
    // A lost rank frees its resources like one that leaves.
    drop(second);
    assert_eq!(tree_of(&accept_offer(&mut third, 0)).leaf, "leaf0");
    assert_eq!(job(&controller, "third").queue, None);
    leave_job(third);
    assert_nothing_held(&controller);
}

/// A tree that a device has refused does not count as an offer.
#[test]
fn refused_job_is_queued_without_an_offer() {
    let controller = controller();
    let full = |request: &Request| match request {
        Request::CreateGroup(_) => Reply::with(Response::Refused(Refusal::NoSlots { need: 1 })),
        _ => Reply::Done,
    };
    let _device = Device::serve(&controller, announce("leaf0", 1, None), full);
    let _rank = request_job(&controller, "job", "x", 60_000);
    let told = || status(controller.local_addr()).expect("a report").jobs.pop();
    let waits = loop {
        match told().filter(|job| job.queue.is_some()) {
            Some(job) => break job,
            None => thread::yield_now(),
        }
    };
    assert_eq!((waits.queue, waits.is_offered), (place(1, 1), false));
}

/// Jobs that wait to join are queued, too, and change the positions of running jobs.
#[test]
fn joining_job_counts_in_the_queue_of_running_jobs() {
    let controller = controller();
    let _device = device_with_groups(&controller, "leaf0", 1);
    let (_first, _) = join_one(&controller, "first", "x");
    let (mut second, waits) = join_one(&controller, "second", "y");
    assert_eq!(waits.queue, place(1, 1));
    let _third = request_job(&controller, "third", "z", 60_000);
    assert_eq!(second.recv_any(), ClientReply::Queued(place(1, 2)));
}

#[test]
fn exhausted_quota_is_reported_and_queues_only_its_tenant() {
    let groups = |groups| Quota { groups: Some(groups), ..Quota::default() };
    let controller = with_quotas(&[("x", groups(1)), ("none", groups(0))]);
    let _device = device_with_groups(&controller, "leaf0", 4);
    let (first, _) = join_one(&controller, "first", "x");
    let (mut second, waits) = join_one(&controller, "second", "x");
    assert_eq!(no_tree_reason(&waits), "quota exceeded: tenant x holds 1 of 1 groups and needs 1 more");
    assert_eq!(waits.queue, place(1, 1));
    let (other, has) = join_one(&controller, "other", "y");
    assert_eq!(tree_of(&has).leaf, "leaf0");
    // A job that can never fit is not queued.
    let (never, has_none) = join_one(&controller, "never", "none");
    assert_eq!(no_tree_reason(&has_none), "quota exceeded: tenant none holds 0 of 0 groups and needs 1 more");
    assert_eq!(has_none.queue, None);
    leave_job(other);
    leave_job(first);
    assert_eq!(tree_of(&accept_offer(&mut second, 0)).leaf, "leaf0");
    leave_job(second);
    leave_job(never);
    assert_nothing_held(&controller);
}

#[test]
fn quota_shrinks_the_window_before_it_refuses() {
    let slots = Quota { slots: Some(40), ..Quota::default() };
    let memory = Quota { memory_bytes: Some(20 * 960), ..Quota::default() };
    let controller = with_quotas(&[("slots", slots), ("memory", memory)]);
    let device = device_with_groups(&controller, "leaf0", 8);
    let windows = |tenant| {
        let ranks: Vec<_> = (0..3).map(|nth| join_one(&controller, &format!("{tenant}{nth}"), tenant)).collect();
        let windows: Vec<_> = ranks.iter().map(|(_, has)| has.tree.as_ref().map(|tree| tree.window_max)).collect();
        let why = windows.iter().find_map(|window| window.as_ref().err().map(|why| (*why).clone()));
        let windows = windows.iter().map(|window| window.as_ref().copied().unwrap_or(0)).collect::<Vec<_>>();
        (windows, why)
    };
    // 40 slots are 32 and 8; then none are left.
    let (found, why) = windows("slots");
    assert_eq!(found, [16, 4, 0]);
    let why = why.expect("the third has none");
    assert!(why.starts_with("quota exceeded: tenant slots holds 40 of 40 slots on device leaf0"), "{why}");
    assert_eq!([device.group().slots, device.group().slots], [32, 8]);
    let (found, why) = windows("memory");
    assert_eq!(found, [8, 2, 0]);
    let why = why.expect("the third has none");
    assert!(
        why.starts_with("quota exceeded: tenant memory holds 19200 of 19200 bytes of slot and redo memory"),
        "{why}"
    );
}

#[test]
fn joining_waits_up_to_the_requested_time() {
    let controller = controller();
    let _device = device_with_groups(&controller, "leaf0", 1);
    let (first, _) = join_one(&controller, "first", "x");
    let mut second = request_job(&controller, "second", "y", 60_000);
    while status(controller.local_addr()).expect("a report").jobs.len() < 2 {
        thread::yield_now();
    }
    let begun = Instant::now();
    let mut third = request_job(&controller, "third", "z", 300);
    let waits = third.joined();
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    assert!(no_tree_reason(&waits).contains("device leaf0 is full: 1 of 1 groups"), "{}", no_tree_reason(&waits));
    assert_eq!(waits.queue, place(2, 2));
    let told = job(&controller, "second");
    assert_eq!((told.running, told.joined, told.queue), (false, 1, place(1, 2)));
    leave_job(first);
    assert_eq!(tree_of(&second.joined()).leaf, "leaf0");
    // A job that is lost while waiting to join is removed.
    let fourth = request_job(&controller, "fourth", "x", 60_000);
    while status(controller.local_addr()).expect("a report").jobs.len() < 3 {
        thread::yield_now();
    }
    drop(fourth);
    leave_job(second);
    accept_offer(&mut third, 0);
    leave_job(third);
    while !status(controller.local_addr()).expect("a report").jobs.is_empty() {
        thread::yield_now();
    }
    assert_nothing_held(&controller);
}

#[test]
fn offered_resources_stay_claimed_for_the_job() {
    let controller = controller();
    let _device = device_with_groups(&controller, "leaf0", 1);
    let (first, _) = join_one(&controller, "first", "x");
    let (mut second, _) = join_one(&controller, "second", "y");
    leave_job(first);
    while !job(&controller, "second").is_offered {
        thread::yield_now();
    }
    let (mut third, waits) = join_one(&controller, "third", "z");
    assert_eq!((waits.tree.is_err(), waits.queue), (true, place(1, 1)));
    assert_eq!(tree_of(&accept_offer(&mut second, 0)).leaf, "leaf0");
    // A job that ends before it accepts its offer passes the resources on.
    let (fourth, _) = join_one(&controller, "fourth", "z");
    leave_job(second);
    while !job(&controller, "third").is_offered {
        thread::yield_now();
    }
    let (mut fifth, _) = join_one(&controller, "fifth", "z");
    drop(fourth);
    third.send(ClientRequest::Leave);
    while third.recv_any() != ClientReply::Left {}
    assert_eq!(tree_of(&accept_offer(&mut fifth, 0)).leaf, "leaf0");
}

/// Groups are reserved on all nodes of a tree or on none, whichever refuses.
#[test]
fn refusal_by_one_node_rolls_back_all_nodes() {
    for refusing in 0..3 {
        let controller = controller();
        let names = ["root", "middle", "leaf"];
        let devices: Vec<Device> = (0..3)
            .map(|nth| {
                let answer = move |request: &Request| match request {
                    Request::CreateGroup(_) if nth == refusing => {
                        Reply::with(Response::Refused(Refusal::NoSlots { need: 512 }))
                    }
                    _ => Reply::Done,
                };
                Device::serve(&controller, announce(names[nth], 1, None), answer)
            })
            .collect();
        let mut rank = Raw::join_with(&controller, request(0, 1), &names);
        let reason = no_tree_reason(&rank.joined()).to_owned();
        assert!(reason.contains(names[refusing]) && reason.contains("the group needs 512 contiguous"), "{reason}");
        for (nth, device) in devices.iter().enumerate() {
            let group = recv_release(device);
            assert_eq!(
                device.groups.try_iter().map(|config| config.group).collect::<Vec<_>>(),
                vec![group; usize::from(nth != refusing)]
            );
        }
        assert_nothing_held(&controller);
    }
}

/// An unresponsive device delays only its own job, and only until the next device is tried.
#[test]
fn unresponsive_device_delays_only_its_own_job() {
    let controller = controller();
    let stops = |request: &Request| matches!(request, Request::CreateGroup(_));
    let stopped = Device::that_stops_responding(&controller, "leaf0", stops);
    let _other = Device::start(&controller, "leaf1", None, None);
    let mut slow = Raw::join_with(&controller, request(0, 1), &[]);
    stopped.stopped.recv_timeout(TEST_TIMEOUT).expect("an order");
    // Meanwhile other jobs join and leave.
    let begun = Instant::now();
    let fast = JoinRequest { job: "fast".into(), ..request(0, 1) };
    let mut fast = Raw::join_with(&controller, fast, &["leaf1"]);
    assert_eq!(tree_of(&fast.joined()).leaf, "leaf1");
    leave_job(fast);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    // The first job gets the other device; a job that pins the unresponsive one is refused at once.
    slow.extend_timeout();
    assert_eq!(tree_of(&slow.joined()).leaf, "leaf1");
    let pinned = JoinRequest { job: "pinned".into(), ..request(0, 1) };
    let mut pinned = Raw::join_with(&controller, pinned, &["leaf0"]);
    assert_eq!(no_tree_reason(&pinned.joined()), "device leaf0 is pinned, but it does not respond");
}

#[test]
fn declined_tree_is_released_and_not_offered_until_something_changes() {
    let controller = controller();
    let first = Device::start(&controller, "leaf0", None, None);
    let mut ranks: Vec<Raw> = (0..2).map(|rank| Raw::join_with(&controller, request(rank, 2), &[])).collect();
    let group = tree_of(&ranks[0].joined()).group;
    ranks[1].joined();
    let decline = |rank: &mut Raw, view, device: Option<&str>, why: &str| {
        rank.send(ClientRequest::Decline { view, device: device.map(Into::into), why: why.into() });
    };
    decline(&mut ranks[0], 1, None, "of another view");
    assert!(ranks[0].report().jobs[0].tree.as_ref().expect("running").is_ok());
    decline(&mut ranks[0], 0, None, "rank 1 is not in it");
    assert_eq!(recv_release(&first), group);
    let told = |rank: &mut Raw| rank.report().jobs.remove(0).tree.expect("running").expect_err("declined");
    assert_eq!(told(&mut ranks[0]), "rank 0 declined its tree: rank 1 is not in it");
    assert_nothing_held(&controller);
    // The rank that names the device may come last; later reports of the others are ignored.
    decline(&mut ranks[1], 0, Some("leaf0"), "no memory could be mapped");
    assert_eq!(told(&mut ranks[1]), "rank 1 declined its tree: no memory could be mapped");
    decline(&mut ranks[0], 0, None, "rank 1 is not in it");
    assert_eq!(told(&mut ranks[0]), "rank 1 declined its tree: no memory could be mapped");
    // Freed resources do not help on the device that they could not attach to.
    let other = JoinRequest { job: "other".into(), ..request(0, 1) };
    let mut other = Raw::join_with(&controller, other, &["leaf0"]);
    other.joined();
    leave_job(other);
    assert!(!job(&controller, "job").is_offered);
    let _second = Device::start(&controller, "leaf1", None, None);
    while !job(&controller, "job").is_offered {
        thread::yield_now();
    }
    let after = replan(&mut ranks, 0);
    assert!(after.iter().all(|membership| tree_of(membership).leaf == "leaf1"));
    // If no device was named, the same tree is offered once something has changed, and not before.
    decline(&mut ranks[0], 1, None, "too late");
    while job(&controller, "job").queue.is_none() {
        thread::yield_now();
    }
    assert!(!job(&controller, "job").is_offered);
    let other = JoinRequest { job: "other".into(), ..request(0, 1) };
    let mut other = Raw::join_with(&controller, other, &["leaf1"]);
    other.joined();
    leave_job(other);
    while !job(&controller, "job").is_offered {
        thread::yield_now();
    }
    // A restarted device is eligible again.
    disconnect_device(first, &controller);
    let _again = Device::start(&controller, "leaf0", None, None);
    assert_eq!(tree_of(&replan(&mut ranks, 1)[0]).leaf, "leaf0");
}

/// Ranks may make no calls for hours. Their offer then goes to other jobs, and they get what is available when they
/// ask.
#[test]
fn unaccepted_offer_expires_and_goes_to_the_next_job() {
    let controller = controller();
    let _device = device_with_groups(&controller, "leaf0", 1);
    let (first, _) = join_one(&controller, "first", "x");
    let (mut second, _) = join_one(&controller, "second", "y");
    let (mut third, _) = join_one(&controller, "third", "z");
    leave_job(first);
    while !job(&controller, "second").is_offered {
        thread::yield_now();
    }
    let expire = |seconds| {
        let shared = &controller.shared;
        let mut machine = shared.lock();
        let state = machine.state_mut();
        state.now = state.now + Duration::from_secs(seconds);
        state.expire_waits();
        shared.notifier.wake();
    };
    expire(50);
    assert_eq!(job(&controller, "third").queue, place(1, 1));
    expire(70);
    while !job(&controller, "third").is_offered {
        thread::yield_now();
    }
    // The expired job is parked, so the offer does not go back to it.
    assert_eq!(tree_of(&accept_offer(&mut third, 0)).leaf, "leaf0");
    second.send(ClientRequest::Pause { view: 0, at: 3 });
    assert_eq!(second.recv(), ClientReply::MoveAt { view: 0, call: 3 });
    second.send(ClientRequest::Replan { view: 0 });
    let (_, waits) = second.replanned();
    assert_eq!((waits.tree.is_err(), waits.queue), (true, place(1, 1)));
    leave_job(third);
    assert_eq!(tree_of(&accept_offer(&mut second, 1)).leaf, "leaf0");
}

#[test]
fn job_without_migration_is_not_queued() {
    let controller = controller();
    let _device = device_with_groups(&controller, "leaf0", 1);
    let (first, _) = join_one(&controller, "first", "x");
    let terms = Terms::default();
    let mut second = Raw::join_with(&controller, JoinRequest { job: "second".into(), terms, ..request(0, 1) }, &[]);
    let waits = second.joined();
    assert_eq!((no_tree_reason(&waits).contains("device leaf0 is full"), waits.queue), (true, None));
    leave_job(first);
    let told = job(&controller, "second");
    assert_eq!((told.queue, told.is_offered), (None, false));
}

/// Two switches with two hosts each.
pub(super) fn two_leaves() -> Option<Fabric> {
    let text = "switch = [{ name = \"leaf0\", aggregation = true }, { name = \"leaf1\", aggregation = true }]\n\
                  host = [{ name = \"h0\" }, { name = \"h1\" }, { name = \"h2\" }, { name = \"h3\" }]\n\
                  link = [{ ends = [\"h0\", \"leaf0\"] }, { ends = [\"h1\", \"leaf0\"] }, { ends = [\"h2\", \"leaf1\"] }, \
                  { ends = [\"h3\", \"leaf1\"] }, { ends = [\"leaf0\", \"leaf1\"] }]\n";
    Some(Fabric::from_toml(text).expect("a fabric"))
}

/// A job with a declared order gets no tree that reduces in another order, and none is reserved in vain.
#[test]
fn tree_with_another_order_is_not_reserved() {
    let fabric = two_leaves();
    let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a port");
    let first = Device::start(&controller, "leaf0", None, None);
    let second = Device::start(&controller, "leaf1", None, None);
    for (order, is_kept) in [(Order::TreeFold, false), (Order::Arrival, true)] {
        let asked = |rank| JoinRequest { order, ..request(rank, 4) };
        let mut ranks: Vec<Raw> = (0..4).map(|rank| Raw::join_with(&controller, asked(rank), &[])).collect();
        let before: Vec<Membership> = ranks.iter_mut().map(Raw::joined).collect();
        assert_eq!(tree_of(&before[0]).facts.levels, 2);
        // The other leaf alone could take all four ranks, in one level.
        ranks.iter_mut().for_each(|rank| {
            rank.send(ClientRequest::Decline { view: 0, device: Some("leaf1".into()), why: "no way there".into() })
        });
        while job(&controller, "job").tree.expect("running").is_ok() {
            thread::yield_now();
        }
        let after = replan(&mut ranks, 0);
        if is_kept {
            assert_eq!(tree_of(&after[0]).facts.levels, 1);
        } else {
            let why = no_tree_reason(&after[0]);
            assert!(
                why.starts_with("a tree on leaf0 would reduce in a different order than the declared one"),
                "{why}"
            );
            assert_eq!(after[0].queue, None, "waiting does not help");
            assert_nothing_held(&controller);
        }
        drop(ranks);
        while !status(controller.local_addr()).expect("a report").jobs.is_empty() {
            thread::yield_now();
        }
    }
    drop((first, second));
}

/// A job that starts without a tree declares an order that few trees preserve, so it does not wait for others.
#[test]
fn job_with_a_declared_order_is_not_queued() {
    let fabric = two_leaves();
    let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a port");
    let _devices = [device_with_groups(&controller, "leaf0", 1), device_with_groups(&controller, "leaf1", 1)];
    for (order, queue) in [(Order::TreeFold, None), (Order::Arrival, place(1, 1))] {
        let asked = |job: &str, rank| JoinRequest { job: job.into(), order, ..request(rank, 4) };
        let join = |job| {
            let mut ranks: Vec<Raw> = (0..4).map(|rank| Raw::join_with(&controller, asked(job, rank), &[])).collect();
            let told: Vec<Membership> = ranks.iter_mut().map(Raw::joined).collect();
            (ranks, told)
        };
        let (has, first) = join("first");
        assert_eq!(tree_of(&first[0]).facts.levels, 2);
        let (waits, second) = join("second");
        assert!(second.iter().all(|told| told.tree.is_err()));
        assert_eq!(second[0].queue, queue, "{order:?}");
        drop((has, waits));
        while !status(controller.local_addr()).expect("a report").jobs.is_empty() {
            thread::yield_now();
        }
    }
}

#[test]
fn mismatched_tenant_or_wait_is_refused() {
    let controller = controller();
    let request_job = |rank, terms| Raw::join_with(&controller, JoinRequest { terms, ..request(rank, 2) }, &[]);
    let terms =
        |tenant: &str, wait_ms| Terms { tenant: tenant.into(), wait_ms, accepts_migration: true, ..Terms::default() };
    let _first = request_job(0, terms("x", 0));
    while status(controller.local_addr()).expect("a report").jobs.is_empty() {
        thread::yield_now();
    }
    for (terms, named) in [(terms("y", 0), "the tenant: y here, x at rank 0"), (terms("x", 5), "5 ms here, 0 ms at")] {
        let ClientReply::Refused(refusal) = request_job(1, terms).recv() else { panic!("they disagree") };
        assert!(matches!(refusal, JoinRefusal::Mismatch { .. }) && refusal.to_string().contains(named), "{refusal}");
    }
    for name in ["", "two words", &"x".repeat(65)] {
        let ClientReply::Refused(refusal) = request_job(1, terms(name, 0)).recv() else { panic!("no name") };
        assert!(refusal.to_string().contains("is not a valid tenant name; use 1 to 64"), "{refusal}");
    }
}
