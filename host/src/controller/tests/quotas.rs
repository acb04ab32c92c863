//! Tenants, the queue, and trees that are not taken, as ranks on raw connections hear of them.

use super::super::proto::{ClientReply, ClientRequest, JobStatus, JoinRefusal, QueuePlace};
use super::replan::{Raw, SOON, end, of, released, replan, request, why};
use super::*;
use std::time::Instant;

/// A device with room for so many groups.
fn small(controller: &Controller, name: &str, groups: u16) -> Device {
    let mut announce = announce(name, 1, None);
    announce.capabilities.groups = groups;
    Device::serve(controller, announce, |_| Reply::Yes)
}

fn with_quotas(tenants: &[(&str, Quota)]) -> Controller {
    let tenants = tenants.iter().map(|(name, quota)| ((*name).to_owned(), *quota)).collect();
    let quotas = Quotas { other: Quota::default(), tenants };
    Controller::start(ControllerConfig { quotas, ..ControllerConfig::new() }).expect("a port")
}

/// Ask for a job of one rank of a tenant.
fn ask(controller: &Controller, job: &str, tenant: &str, wait_ms: u32) -> Raw {
    let terms = Terms { tenant: tenant.into(), wait_ms, moves: true };
    Raw::join_with(controller, JoinRequest { job: job.into(), terms, ..request(0, 1) }, &[])
}

fn begin(controller: &Controller, job: &str, tenant: &str) -> (Raw, Membership) {
    let mut rank = ask(controller, job, tenant, 0);
    let membership = rank.joined();
    (rank, membership)
}

fn job(controller: &Controller, name: &str) -> JobStatus {
    let report = status(controller.local_addr()).expect("a report");
    report.jobs.into_iter().find(|job| job.name == name).expect("such a job")
}

fn place(position: u32, of: u32) -> Option<QueuePlace> {
    Some(QueuePlace { position, of })
}

fn leave(mut rank: Raw) {
    rank.say(ClientRequest::Leave);
    while rank.hear() != ClientReply::Left {}
}

/// Wait for an offer, and take it.
fn take(rank: &mut Raw, view: u32) -> Membership {
    loop {
        match rank.hear_all() {
            ClientReply::Queued(_) => {}
            ClientReply::Offer { view: offered } => {
                assert_eq!(offered, view);
                break;
            }
            other => panic!("an offer: {other:?}"),
        }
    }
    rank.say(ClientRequest::Pause { view, at: 3 });
    assert_eq!(rank.hear(), ClientReply::MoveAt { view, call: 3 });
    rank.say(ClientRequest::Replan { view });
    let (new, membership) = rank.replanned();
    assert_eq!(new, view + 1);
    membership
}

/// All that the books hold is what the jobs in the report have.
fn assert_free(controller: &Controller) {
    let held = |tenant: &proto::TenantStatus| (tenant.groups, tenant.slots, tenant.memory_bytes);
    let report = status(controller.local_addr()).expect("a report");
    assert!(report.tenants.iter().all(|tenant| held(tenant) == (0, 0, 0)), "{:?}", report.tenants);
}

#[test]
fn who_finds_a_device_full_stands_in_the_queue_and_gets_the_tree_when_it_is_free() {
    let controller = controller();
    let device = small(&controller, "leaf0", 1);
    let (first, has) = begin(&controller, "first", "x");
    let group = of(&has).group;
    let (mut second, waits) = begin(&controller, "second", "y");
    assert_eq!(why(&waits), "1 of the 1 groups of device leaf0 are taken, and the least that helps is 1");
    assert_eq!(waits.queue, place(1, 1));
    let (mut third, waits) = begin(&controller, "third", "x");
    assert_eq!(waits.queue, place(2, 2));
    assert_eq!(second.hear_all(), ClientReply::Queued(place(1, 2)));
    let told = job(&controller, "third");
    assert_eq!((told.tenant.as_str(), told.queue, told.is_offered), ("x", place(2, 2), false));
    assert!(told.tree.expect("running").is_err());
    leave(first);
    assert_eq!(released(&device), group);
    while !job(&controller, "second").is_offered {
        thread::yield_now();
    }
    assert_eq!(of(&take(&mut second, 0)).leaf, "leaf0");
    assert_eq!(third.hear_all(), ClientReply::Queued(place(1, 1)));
    // A death is as good as leaving.
    drop(second);
    assert_eq!(of(&take(&mut third, 0)).leaf, "leaf0");
    assert_eq!(job(&controller, "third").queue, None);
    leave(third);
    assert_free(&controller);
}

/// A tree that a device has refused is not about to come.
#[test]
fn who_waits_after_a_refusal_is_offered_nothing() {
    let controller = controller();
    let full = |request: &Request| match request {
        Request::CreateGroup(_) => Reply::with(Response::Refused(Refusal::NoSlots { need: 1 })),
        _ => Reply::Yes,
    };
    let _device = Device::serve(&controller, announce("leaf0", 1, None), full);
    let _rank = ask(&controller, "job", "x", 60_000);
    let told = || status(controller.local_addr()).expect("a report").jobs.pop();
    let waits = loop {
        match told().filter(|job| job.queue.is_some()) {
            Some(job) => break job,
            None => thread::yield_now(),
        }
    };
    assert_eq!((waits.queue, waits.is_offered), (place(1, 1), false));
}

/// Also who waits to join stands in the queue, and those that run are told so.
#[test]
fn who_waits_to_join_is_counted_for_those_that_run() {
    let controller = controller();
    let _device = small(&controller, "leaf0", 1);
    let (_first, _) = begin(&controller, "first", "x");
    let (mut second, waits) = begin(&controller, "second", "y");
    assert_eq!(waits.queue, place(1, 1));
    let _third = ask(&controller, "third", "z", 60_000);
    assert_eq!(second.hear_all(), ClientReply::Queued(place(1, 2)));
}

#[test]
fn a_quota_is_named_and_holds_up_nobody_else() {
    let groups = |groups| Quota { groups: Some(groups), ..Quota::default() };
    let controller = with_quotas(&[("x", groups(1)), ("none", groups(0))]);
    let _device = small(&controller, "leaf0", 4);
    let (first, _) = begin(&controller, "first", "x");
    let (mut second, waits) = begin(&controller, "second", "x");
    assert_eq!(why(&waits), "tenant x holds 1 of the 1 groups of its quota, and 1 more would be too many");
    assert_eq!(waits.queue, place(1, 1));
    let (other, has) = begin(&controller, "other", "y");
    assert_eq!(of(&has).leaf, "leaf0");
    // What can never be does not wait.
    let (never, has_none) = begin(&controller, "never", "none");
    assert_eq!(why(&has_none), "tenant none holds 0 of the 0 groups of its quota, and 1 more would be too many");
    assert_eq!(has_none.queue, None);
    leave(other);
    leave(first);
    assert_eq!(of(&take(&mut second, 0)).leaf, "leaf0");
    leave(second);
    leave(never);
    assert_free(&controller);
}

#[test]
fn a_quota_cuts_the_window_on_each_device_before_it_refuses() {
    let slots = Quota { slots: Some(40), ..Quota::default() };
    let memory = Quota { memory_bytes: Some(20 * 960), ..Quota::default() };
    let controller = with_quotas(&[("slots", slots), ("memory", memory)]);
    let device = small(&controller, "leaf0", 8);
    let windows = |tenant| {
        let ranks: Vec<_> = (0..3).map(|nth| begin(&controller, &format!("{tenant}{nth}"), tenant)).collect();
        let windows: Vec<_> = ranks.iter().map(|(_, has)| has.tree.as_ref().map(|tree| tree.window_max)).collect();
        let why = windows.iter().find_map(|window| window.as_ref().err().map(|why| (*why).clone()));
        let windows = windows.iter().map(|window| window.as_ref().copied().unwrap_or(0)).collect::<Vec<_>>();
        (windows, why)
    };
    // 40 slots are 32 and 8; then none are left.
    let (found, why) = windows("slots");
    assert_eq!(found, [16, 4, 0]);
    let why = why.expect("the third has none");
    assert!(why.starts_with("tenant slots holds 40 of the 40 slots that its quota allows on device leaf0"), "{why}");
    assert_eq!([device.group().slots, device.group().slots], [32, 8]);
    let (found, why) = windows("memory");
    assert_eq!(found, [8, 2, 0]);
    let why = why.expect("the third has none");
    assert!(why.starts_with("tenant memory holds 19200 of the 19200 bytes of slot and redo memory"), "{why}");
}

#[test]
fn joining_waits_for_a_tree_as_long_as_it_is_told_to() {
    let controller = controller();
    let _device = small(&controller, "leaf0", 1);
    let (first, _) = begin(&controller, "first", "x");
    let mut second = ask(&controller, "second", "y", 60_000);
    while status(controller.local_addr()).expect("a report").jobs.len() < 2 {
        thread::yield_now();
    }
    let begun = Instant::now();
    let mut third = ask(&controller, "third", "z", 300);
    let waits = third.joined();
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    assert!(why(&waits).contains("1 of the 1 groups of device leaf0"), "{}", why(&waits));
    assert_eq!(waits.queue, place(2, 2));
    let told = job(&controller, "second");
    assert_eq!((told.running, told.joined, told.queue), (false, 1, place(1, 2)));
    leave(first);
    assert_eq!(of(&second.joined()).leaf, "leaf0");
    // Who dies while it waits is no job any more.
    let fourth = ask(&controller, "fourth", "x", 60_000);
    while status(controller.local_addr()).expect("a report").jobs.len() < 3 {
        thread::yield_now();
    }
    drop(fourth);
    leave(second);
    take(&mut third, 0);
    leave(third);
    while !status(controller.local_addr()).expect("a report").jobs.is_empty() {
        thread::yield_now();
    }
    assert_free(&controller);
}

#[test]
fn what_is_offered_is_held_for_the_job() {
    let controller = controller();
    let _device = small(&controller, "leaf0", 1);
    let (first, _) = begin(&controller, "first", "x");
    let (mut second, _) = begin(&controller, "second", "y");
    leave(first);
    while !job(&controller, "second").is_offered {
        thread::yield_now();
    }
    let (mut third, waits) = begin(&controller, "third", "z");
    assert_eq!((waits.tree.is_err(), waits.queue), (true, place(1, 1)));
    assert_eq!(of(&take(&mut second, 0)).leaf, "leaf0");
    // And who goes before he has taken it leaves it to the next.
    let (fourth, _) = begin(&controller, "fourth", "z");
    leave(second);
    while !job(&controller, "third").is_offered {
        thread::yield_now();
    }
    let (mut fifth, _) = begin(&controller, "fifth", "z");
    drop(fourth);
    third.say(ClientRequest::Leave);
    while third.hear_all() != ClientReply::Left {}
    assert_eq!(of(&take(&mut fifth, 0)).leaf, "leaf0");
}

/// Groups are reserved on all nodes of a tree or on none, whichever refuses.
#[test]
fn a_node_that_refuses_leaves_nothing_on_the_others() {
    for refusing in 0..3 {
        let controller = controller();
        let names = ["root", "middle", "leaf"];
        let devices: Vec<Device> = (0..3)
            .map(|nth| {
                let answer = move |request: &Request| match request {
                    Request::CreateGroup(_) if nth == refusing => {
                        Reply::with(Response::Refused(Refusal::NoSlots { need: 512 }))
                    }
                    _ => Reply::Yes,
                };
                Device::serve(&controller, announce(names[nth], 1, None), answer)
            })
            .collect();
        let mut rank = Raw::join_with(&controller, request(0, 1), &names);
        let reason = why(&rank.joined()).to_owned();
        assert!(reason.contains(names[refusing]) && reason.contains("512 slots are needed"), "{reason}");
        for (nth, device) in devices.iter().enumerate() {
            let group = released(device);
            assert_eq!(
                device.groups.try_iter().map(|config| config.group).collect::<Vec<_>>(),
                vec![group; usize::from(nth != refusing)]
            );
        }
        assert_free(&controller);
    }
}

/// A device that does not answer holds up its own job alone, and that one only until the next device is asked.
#[test]
fn nobody_waits_for_a_device_that_has_stopped_to_create_a_group() {
    let controller = controller();
    let stops = |request: &Request| matches!(request, Request::CreateGroup(_));
    let stopped = Device::that_stops(&controller, "leaf0", stops);
    let _other = Device::start(&controller, "leaf1", None, None);
    let mut slow = Raw::join_with(&controller, request(0, 1), &[]);
    stopped.stopped.recv_timeout(GREETING_TIMEOUT).expect("an order");
    // Meanwhile others join, leave, and are told.
    let begun = Instant::now();
    let fast = JoinRequest { job: "fast".into(), ..request(0, 1) };
    let mut fast = Raw::join_with(&controller, fast, &["leaf1"]);
    assert_eq!(of(&fast.joined()).leaf, "leaf1");
    leave(fast);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    // The first gets the other device; who insists on the one that is silent hears why not, at once.
    slow.patient();
    assert_eq!(of(&slow.joined()).leaf, "leaf1");
    let pinned = JoinRequest { job: "pinned".into(), ..request(0, 1) };
    let mut pinned = Raw::join_with(&controller, pinned, &["leaf0"]);
    assert_eq!(why(&pinned.joined()), "device leaf0 is pinned, and it does not answer");
}

#[test]
fn what_ranks_decline_is_freed_and_not_offered_again_before_something_has_changed() {
    let controller = controller();
    let first = Device::start(&controller, "leaf0", None, None);
    let mut ranks: Vec<Raw> = (0..2).map(|rank| Raw::join_with(&controller, request(rank, 2), &[])).collect();
    let group = of(&ranks[0].joined()).group;
    ranks[1].joined();
    let decline = |rank: &mut Raw, view, device: Option<&str>, why: &str| {
        rank.say(ClientRequest::Decline { view, device: device.map(Into::into), why: why.into() });
    };
    decline(&mut ranks[0], 1, None, "of another view");
    assert!(ranks[0].report().jobs[0].tree.as_ref().expect("running").is_ok());
    decline(&mut ranks[0], 0, None, "rank 1 is not in it");
    assert_eq!(released(&first), group);
    let told = |rank: &mut Raw| rank.report().jobs.remove(0).tree.expect("running").expect_err("declined");
    assert_eq!(told(&mut ranks[0]), "rank 0 declined its tree: rank 1 is not in it");
    assert_free(&controller);
    // The rank whose reason it is may come last; what the others say then is nothing new.
    decline(&mut ranks[1], 0, Some("leaf0"), "no memory could be mapped");
    assert_eq!(told(&mut ranks[1]), "rank 1 declined its tree: no memory could be mapped");
    decline(&mut ranks[0], 0, None, "rank 1 is not in it");
    assert_eq!(told(&mut ranks[0]), "rank 1 declined its tree: no memory could be mapped");
    // Something is freed; but it is on the device that they could not attach to.
    let other = JoinRequest { job: "other".into(), ..request(0, 1) };
    let mut other = Raw::join_with(&controller, other, &["leaf0"]);
    other.joined();
    leave(other);
    assert!(!job(&controller, "job").is_offered);
    let _second = Device::start(&controller, "leaf1", None, None);
    while !job(&controller, "job").is_offered {
        thread::yield_now();
    }
    let after = replan(&mut ranks, 0);
    assert!(after.iter().all(|membership| of(membership).leaf == "leaf1"));
    // Without a device to blame, the same tree is offered once something has changed, and not before.
    decline(&mut ranks[0], 1, None, "too late");
    while job(&controller, "job").queue.is_none() {
        thread::yield_now();
    }
    assert!(!job(&controller, "job").is_offered);
    let other = JoinRequest { job: "other".into(), ..request(0, 1) };
    let mut other = Raw::join_with(&controller, other, &["leaf1"]);
    other.joined();
    leave(other);
    while !job(&controller, "job").is_offered {
        thread::yield_now();
    }
    // One that restarts is another device.
    end(first, &controller);
    let _again = Device::start(&controller, "leaf0", None, None);
    assert_eq!(of(&replan(&mut ranks, 1)[0]).leaf, "leaf0");
}

/// Ranks may make no calls for hours. What is held for them goes to others then; when they come, they get what there is.
#[test]
fn who_does_not_come_for_what_is_offered_holds_it_only_so_long() {
    let controller = controller();
    let _device = small(&controller, "leaf0", 1);
    let (first, _) = begin(&controller, "first", "x");
    let (mut second, _) = begin(&controller, "second", "y");
    let (mut third, _) = begin(&controller, "third", "z");
    leave(first);
    while !job(&controller, "second").is_offered {
        thread::yield_now();
    }
    let expire = |seconds| {
        let shared = &controller.shared;
        let mut state = shared.lock();
        state.now += Duration::from_secs(seconds);
        state.expire_waits();
    };
    expire(50);
    assert_eq!(job(&controller, "third").queue, place(1, 1));
    expire(70);
    while !job(&controller, "third").is_offered {
        thread::yield_now();
    }
    // Its time is over as well, and nobody is left to be offered anything: it does not go back and forth.
    assert_eq!(of(&take(&mut third, 0)).leaf, "leaf0");
    second.say(ClientRequest::Pause { view: 0, at: 3 });
    assert_eq!(second.hear(), ClientReply::MoveAt { view: 0, call: 3 });
    second.say(ClientRequest::Replan { view: 0 });
    let (_, waits) = second.replanned();
    assert_eq!((waits.tree.is_err(), waits.queue), (true, place(1, 1)));
    leave(third);
    assert_eq!(of(&take(&mut second, 1)).leaf, "leaf0");
}

#[test]
fn a_job_that_does_not_move_is_told_why_and_does_not_wait() {
    let controller = controller();
    let _device = small(&controller, "leaf0", 1);
    let (first, _) = begin(&controller, "first", "x");
    let terms = Terms::default();
    let mut second = Raw::join_with(&controller, JoinRequest { job: "second".into(), terms, ..request(0, 1) }, &[]);
    let waits = second.joined();
    assert_eq!((why(&waits).contains("groups of device leaf0"), waits.queue), (true, None));
    leave(first);
    let told = job(&controller, "second");
    assert_eq!((told.queue, told.is_offered), (None, false));
}

/// Two switches with two hosts each.
fn two_leaves() -> Option<Fabric> {
    let text = "switch = [{ name = \"leaf0\", aggregation = true }, { name = \"leaf1\", aggregation = true }]\n\
                  host = [{ name = \"h0\" }, { name = \"h1\" }, { name = \"h2\" }, { name = \"h3\" }]\n\
                  link = [{ ends = [\"h0\", \"leaf0\"] }, { ends = [\"h1\", \"leaf0\"] }, { ends = [\"h2\", \"leaf1\"] }, \
                  { ends = [\"h3\", \"leaf1\"] }, { ends = [\"leaf0\", \"leaf1\"] }]\n";
    Some(Fabric::from_toml(text).expect("a fabric"))
}

/// A job with a declared order gets no tree that combines in another one, and so none is reserved for nothing.
#[test]
fn a_tree_of_another_order_is_not_reserved() {
    let fabric = two_leaves();
    let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a port");
    let first = Device::start(&controller, "leaf0", None, None);
    let second = Device::start(&controller, "leaf1", None, None);
    for (order, is_kept) in [(Order::TreeFold, false), (Order::Arrival, true)] {
        let asked = |rank| JoinRequest { order, ..request(rank, 4) };
        let mut ranks: Vec<Raw> = (0..4).map(|rank| Raw::join_with(&controller, asked(rank), &[])).collect();
        let before: Vec<Membership> = ranks.iter_mut().map(Raw::joined).collect();
        assert_eq!(of(&before[0]).facts.levels, 2);
        // The other leaf alone would take all four, in one level.
        ranks.iter_mut().for_each(|rank| {
            rank.say(ClientRequest::Decline { view: 0, device: Some("leaf1".into()), why: "no way there".into() })
        });
        while job(&controller, "job").tree.expect("running").is_ok() {
            thread::yield_now();
        }
        let after = replan(&mut ranks, 0);
        if is_kept {
            assert_eq!(of(&after[0]).facts.levels, 1);
        } else {
            let why = why(&after[0]);
            assert!(why.starts_with("a tree on leaf0 would combine in another order than the declared one"), "{why}");
            assert_eq!(after[0].queue, None, "waiting does not help");
            assert_free(&controller);
        }
        drop(ranks);
        while !status(controller.local_addr()).expect("a report").jobs.is_empty() {
            thread::yield_now();
        }
    }
    drop((first, second));
}

/// Who begins without a tree declares an order that only some trees keep: it does not wait for others.
#[test]
fn nobody_waits_for_a_tree_of_another_order() {
    let fabric = two_leaves();
    let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a port");
    let _devices = [small(&controller, "leaf0", 1), small(&controller, "leaf1", 1)];
    for (order, queue) in [(Order::TreeFold, None), (Order::Arrival, place(1, 1))] {
        let asked = |job: &str, rank| JoinRequest { job: job.into(), order, ..request(rank, 4) };
        let join = |job| {
            let mut ranks: Vec<Raw> = (0..4).map(|rank| Raw::join_with(&controller, asked(job, rank), &[])).collect();
            let told: Vec<Membership> = ranks.iter_mut().map(Raw::joined).collect();
            (ranks, told)
        };
        let (has, first) = join("first");
        assert_eq!(of(&first[0]).facts.levels, 2);
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
fn ranks_agree_on_the_tenant_and_on_how_long_they_wait() {
    let controller = controller();
    let ask = |rank, terms| Raw::join_with(&controller, JoinRequest { terms, ..request(rank, 2) }, &[]);
    let terms = |tenant: &str, wait_ms| Terms { tenant: tenant.into(), wait_ms, moves: true };
    let _first = ask(0, terms("x", 0));
    while status(controller.local_addr()).expect("a report").jobs.is_empty() {
        thread::yield_now();
    }
    for (terms, named) in [(terms("y", 0), "the tenant: y here, x at rank 0"), (terms("x", 5), "5 ms here, 0 ms at")] {
        let ClientReply::Refused(refusal) = ask(1, terms).hear() else { panic!("they disagree") };
        assert!(matches!(refusal, JoinRefusal::Disagree { .. }) && refusal.to_string().contains(named), "{refusal}");
    }
    for name in ["", "two words", &"x".repeat(65)] {
        let ClientReply::Refused(refusal) = ask(1, terms(name, 0)).hear() else { panic!("no name") };
        assert!(refusal.to_string().contains("is no tenant; a name has 1 to 64"), "{refusal}");
    }
}
