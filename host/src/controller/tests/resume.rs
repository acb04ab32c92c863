//! Ranks whose controller was another one before: what they tell this one, and what becomes of their job.

use super::super::proto::{ClientReply, ClientRequest, Over, Resumption};
use super::super::{ClientError, Notice};
use super::replan::{Raw, SOON, begin, of, replan, request, why};
use super::*;
use crate::plan::Child;
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

const WORLD: u32 = 2;

fn resumption(rank: u32) -> Resumption {
    let expression = vec![(0..WORLD).map(|rank| Child::Rank(Rank(rank))).collect()];
    Resumption { request: request(rank, WORLD), devices: Vec::new(), view: 3, shrunk: 2, mesh_token: 77, expression }
}

fn resume(controller: &Controller, resumption: Resumption) -> Raw {
    let mut raw = Raw::dial(controller);
    raw.say(ClientRequest::Resume(Box::new(resumption)));
    raw
}

fn refusal(mut raw: Raw) -> String {
    let reply = raw.hear();
    let ClientReply::Refused(refusal) = reply else { panic!("refused: {reply:?}") };
    refusal.to_string()
}

#[test]
fn a_job_goes_on_when_all_its_ranks_have_come_back_and_is_offered_a_tree() {
    let controller = controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let mut ranks = vec![resume(&controller, resumption(0))];
    let report = ranks[0].report();
    assert_eq!((report.jobs[0].running, report.jobs[0].joined, report.jobs[0].world), (false, 1, 2));
    let joins = Raw::join_with(&controller, request(1, WORLD), &[]);
    assert!(refusal(joins).contains("running"));
    // Another one heard less of it.
    ranks.push(resume(&controller, Resumption { view: 1, shrunk: 0, ..resumption(1) }));
    for rank in &mut ranks {
        assert!(matches!(rank.hear_all(), ClientReply::Resumed { view: 4 }));
        let offer = loop {
            match rank.hear_all() {
                ClientReply::Queued(_) => {}
                reply => break reply,
            }
        };
        assert!(matches!(offer, ClientReply::Offer { view: 4 }), "{offer:?}");
        rank.say(ClientRequest::Pause { view: 4, at: 9 });
    }
    for rank in &mut ranks {
        assert!(matches!(rank.hear(), ClientReply::MoveAt { view: 4, call: 9 }));
    }
    let placed = replan(&mut ranks, 4);
    assert!(placed.iter().all(|membership| of(membership).leaf == "leaf0" && membership.mesh_token == 77));
    let report = ranks[0].report();
    assert_eq!((report.jobs[0].running, report.jobs[0].view), (true, 5));
    for rank in &mut ranks {
        rank.say(ClientRequest::Survivors);
    }
    for rank in &mut ranks {
        let told = rank.hear();
        let left = Ok(vec![Rank(0), Rank(1)]);
        assert_eq!(told, ClientReply::Survivors { round: 2, ranks: left }, "rounds go on");
    }
}

/// A view comes after each: a controller that took the last number from anybody would be at its end.
#[test]
fn numbers_that_no_job_comes_to_are_refused() {
    let controller = controller();
    for resumption in [Resumption { view: u32::MAX, ..resumption(0) }, Resumption { shrunk: u32::MAX, ..resumption(0) }]
    {
        let expression = vec![vec![Child::Rank(Rank(0))]];
        let alone = Resumption { request: request(0, 1), expression, ..resumption };
        let why = refusal(resume(&controller, alone));
        assert!(why.contains("4294967295"), "{why}");
    }
    assert_eq!(resume(&controller, resumption(0)).report().jobs.len(), 1, "it goes on");
}

#[test]
fn who_means_another_job_is_refused() {
    let controller = controller();
    let mut first = resume(&controller, resumption(0));
    assert_eq!(first.report().jobs.len(), 1);
    let refused = |resumption| refusal(resume(&controller, resumption));
    assert!(refused(resumption(0)).contains("there already"));
    assert!(refused(Resumption { devices: vec!["leaf0".into()], ..resumption(1) }).contains("devices"));
    let flipped = vec![vec![Child::Rank(Rank(1)), Child::Rank(Rank(0))]];
    assert!(refused(Resumption { expression: flipped, ..resumption(1) }).contains("expression"));
    let mut others = request(1, WORLD);
    others.terms.tenant = "others".into();
    assert!(refused(Resumption { request: others, ..resumption(1) }).contains("tenant"));
    let mut nobody = request(1, WORLD);
    nobody.terms.tenant = "a b".into();
    assert!(refused(Resumption { request: nobody, ..resumption(1) }).contains("no tenant"));
    assert!(refused(Resumption { expression: vec![vec![Child::Node(0)]], ..resumption(1) }).contains("expression"));
    let beyond = Resumption { request: request(2, WORLD), ..resumption(1) };
    assert!(refused(beyond).contains("ranks are numbered from 0"));
    // One that runs, or that is about to be joined, is none to come back to.
    let mut second = resume(&controller, resumption(1));
    assert!(matches!(second.hear(), ClientReply::Resumed { .. }));
    assert!(refused(resumption(1)).contains("there already"));
    assert!(refused(Resumption { mesh_token: 78, ..resumption(1) }).contains("running"));
    let mut other = request(0, WORLD);
    other.job = "other".into();
    let mut joins = Raw::join_with(&controller, other.clone(), &[]);
    assert_eq!(joins.report().jobs.len(), 2);
    other.rank = Rank(1);
    assert!(refused(Resumption { request: other, ..resumption(1) }).contains("running"));
}

#[test]
fn a_name_is_free_again_when_those_that_came_back_are_gone() {
    let controller = controller();
    let mut first = resume(&controller, resumption(0));
    assert_eq!(first.report().jobs.len(), 1);
    drop(first);
    let give_up = Instant::now() + SOON;
    while !status(controller.local_addr()).expect("a report").jobs.is_empty() {
        assert!(Instant::now() < give_up, "the job is still there");
    }
    let (_ranks, told) = begin(&controller, WORLD, &[]);
    assert_eq!(why(&told[0]), "no device is connected to the controller");
}

/// What has not come back within the limit is lost to those that have; what has left is not.
#[test]
fn a_rank_that_does_not_come_back_is_lost() {
    let controller = controller();
    let mut ranks: Vec<Raw> = (0..3)
        .map(|rank| {
            let expression = vec![(0..4).map(|rank| Child::Rank(Rank(rank))).collect()];
            let mut raw = resume(&controller, Resumption { request: request(rank, 4), expression, ..resumption(0) });
            assert_eq!(raw.report().jobs[0].joined, rank + 1);
            raw
        })
        .collect();
    ranks.iter_mut().for_each(Raw::patient);
    let mut leaves = ranks.pop().expect("three");
    leaves.say(ClientRequest::Leave);
    assert!(matches!(leaves.hear(), ClientReply::Left));
    for rank in &mut ranks {
        assert!(matches!(rank.hear_all(), ClientReply::Resumed { view: 4 }));
        let lost = rank.hear_all();
        assert!(matches!(lost, ClientReply::RankLost(Rank(3))), "{lost:?}");
        rank.say(ClientRequest::Survivors);
    }
    for rank in &mut ranks {
        let told = rank.hear_all();
        assert_eq!(told, ClientReply::Survivors { round: 2, ranks: Ok(vec![Rank(0), Rank(1)]) });
    }
}

/// One that comes later than that is told so, and fewer than most of the ranks are not resumed at all.
#[test]
fn most_ranks_go_on_and_no_others() {
    let controller = controller();
    let of_three = |rank| {
        let expression = vec![(0..3).map(|rank| Child::Rank(Rank(rank))).collect()];
        Resumption { request: request(rank, 3), expression, ..resumption(0) }
    };
    let mut most: Vec<Raw> = (0..2).map(|rank| resume(&controller, of_three(rank))).collect();
    let mut half = request(0, WORLD);
    half.job = "half".into();
    let mut half = resume(&controller, Resumption { request: half, ..resumption(0) });
    most.iter_mut().chain([&mut half]).for_each(Raw::patient);
    for rank in &mut most {
        assert!(matches!(rank.hear_all(), ClientReply::Resumed { view: 4 }));
        assert!(matches!(rank.hear_all(), ClientReply::RankLost(Rank(2))));
    }
    let late = refusal(resume(&controller, of_three(2)));
    assert!(late.contains("too late") && late.contains("counts it as lost"), "{late}");
    let few = refusal(half);
    assert!(few.contains("1 of the 2 ranks of job \"half\"") && few.contains("more than half"), "{few}");
    assert_eq!(most[0].report().jobs.len(), 1);
}

/// Whoever knows a job's name, and not its ranks' secret, takes no seat in it and keeps nobody from it.
#[test]
fn a_stranger_does_not_come_between_a_job_and_its_controller() {
    let controller = controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let stranger = |rank| Resumption { mesh_token: 666, ..resumption(rank) };
    let mut first = resume(&controller, stranger(0));
    assert_eq!(first.report().jobs.len(), 1);
    let mut ranks: Vec<Raw> = (0..WORLD).map(|rank| resume(&controller, resumption(rank))).collect();
    for rank in &mut ranks {
        assert!(matches!(rank.hear_all(), ClientReply::Resumed { view: 4 }));
    }
    assert!(refusal(first).contains("running"));
    assert!(refusal(resume(&controller, stranger(1))).contains("running"));
    let report = ranks[0].report();
    assert_eq!((report.jobs.len(), report.jobs[0].joined, report.jobs[0].running), (1, WORLD, true));
    // What it asks has no effect either.
    let mut other = Raw::dial(&controller);
    other.say(ClientRequest::Suspect { view: 4 });
    other.say(ClientRequest::Replan { view: 4 });
    assert!(matches!(other.hear(), ClientReply::NotReplanned { .. }));
    assert_eq!(ranks[0].report().jobs[0].view, 4);
}

/// A rank may have asked the controller of before: those that ask this one do not keep the job from a tree for ever.
#[test]
fn ranks_that_did_not_all_ask_are_offered_a_tree() {
    let controller = controller();
    let mut ranks: Vec<Raw> = (0..WORLD).map(|rank| resume(&controller, resumption(rank))).collect();
    for rank in &mut ranks {
        assert!(matches!(rank.hear_all(), ClientReply::Resumed { view: 4 }));
    }
    ranks[0].say(ClientRequest::Suspect { view: 4 });
    ranks[0].say(ClientRequest::Replan { view: 4 });
    for rank in &mut ranks {
        assert!(matches!(rank.hear(), ClientReply::Repair { view: 4 }));
    }
    let _device = Device::start(&controller, "leaf0", None, None);
    ranks[0].say(ClientRequest::Forgo { view: 4 });
    ranks.iter_mut().for_each(Raw::patient);
    for rank in &mut ranks {
        while !matches!(rank.hear_all(), ClientReply::Offer { view: 4 }) {}
    }
}

/// What a resumed job gets is its tenant's: with it, and without, the quota is kept.
#[test]
fn a_resumed_job_counts_against_the_quota_of_its_tenant() {
    let quotas = Quotas { other: Quota { groups: Some(1), ..Quota::default() }, ..Quotas::default() };
    let config = ControllerConfig { quotas, ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let device = Device::start(&controller, "leaf0", None, None);
    let mut ranks: Vec<Raw> = (0..WORLD).map(|rank| resume(&controller, resumption(rank))).collect();
    for rank in &mut ranks {
        assert!(matches!(rank.hear_all(), ClientReply::Resumed { view: 4 }));
        while !matches!(rank.hear_all(), ClientReply::Offer { view: 4 }) {}
    }
    // What it is offered is held for it.
    let second = join(&controller, "second", &[(Attach::Udp, None); 2]);
    let why_not = second[0].1.tree.as_ref().expect_err("one group");
    assert!(why_not.contains("1 of 1 groups") || why_not.contains("quota"), "{why_not}");
    let placed = replan(&mut ranks, 4);
    assert_eq!(of(&placed[0]).group, device.group().group);
    let tenant = &ranks[0].report().tenants[0];
    assert_eq!((tenant.groups, tenant.quota.groups), (1, Some(1)));
    drop(second);
}

/// It goes on in the tree from before, and waits for its turn.
#[test]
fn a_resumed_job_waits_for_what_others_have_got_before_it_came() {
    let quotas = Quotas { other: Quota { groups: Some(1), ..Quota::default() }, ..Quotas::default() };
    let controller = Controller::start(ControllerConfig { quotas, ..ControllerConfig::new() }).expect("a port");
    let _device = Device::start(&controller, "leaf0", None, None);
    let first = join(&controller, "first", &[(Attach::Udp, None); 2]);
    assert_eq!(of(&first[0].1).leaf, "leaf0");
    let mut ranks: Vec<Raw> = (0..WORLD).map(|rank| resume(&controller, resumption(rank))).collect();
    for rank in &mut ranks {
        assert!(matches!(rank.hear_all(), ClientReply::Resumed { view: 4 }));
        let told = rank.hear_all();
        assert!(matches!(told, ClientReply::Queued(Some(place)) if (place.position, place.of) == (1, 1)), "{told:?}");
    }
    let job = ranks[0].report().jobs.into_iter().find(|job| job.name == "job").expect("it is known");
    assert!(job.running && !job.is_offered && job.queue.is_some(), "{job:?}");
    assert!(job.tree.is_some_and(|tree| tree.is_err_and(|why| why.contains("from before this controller"))));
    first.into_iter().for_each(|(session, _)| session.leave());
    for rank in &mut ranks {
        while !matches!(rank.hear_all(), ClientReply::Offer { view: 4 }) {}
    }
    assert!(replan(&mut ranks, 4).iter().all(|membership| of(membership).leaf == "leaf0"));
}

/// Start one at an address that another has just left.
fn start_again(listen: SocketAddr) -> Controller {
    Controller::start(ControllerConfig { listen, ..ControllerConfig::new() }).expect("the port of before")
}

#[test]
fn a_session_finds_the_next_controller_and_asks_nothing_of_none() {
    let first = controller();
    let addr = first.local_addr();
    let (to, notices) = channel();
    let on_notice = move |notice| {
        let _ = to.send(notice);
        None
    };
    let mut request = request(0, 1);
    request.terms.moves = false;
    let (session, before) = Session::join(addr, request, GREETING_TIMEOUT, on_notice).expect("an answer");
    let hear = |wanted: Notice| {
        let heard = notices.iter().find(|notice| *notice != Notice::Queued(None));
        assert_eq!(heard, Some(wanted));
    };
    let mut first = Some(first);
    for view in [1, 3] {
        drop(first.take());
        hear(Notice::ControllerLost);
        let deadline = Instant::now() + SOON;
        let error = session.replan(0, deadline).expect_err("nobody is there");
        assert!(matches!(error, ClientError::Stream(_) | ClientError::Ended { view: 0 }), "{error}");
        assert!(session.survivors(deadline).is_err() && Instant::now() < deadline, "at once");
        let next = start_again(addr);
        // The views go on where they were.
        hear(Notice::ControllerBack { view });
        assert!(session.replan(view, Instant::now() + SOON).is_ok());
        let over = Over::Mismatch { first: OpDesc::barrier(), other: OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1) };
        session.over(over.clone());
        hear(Notice::Over(over));
        first = Some(next);
    }
    assert_eq!(status(addr).expect("a report").jobs[0].view, 4);
    assert_eq!(before.mesh.len(), 1);
    session.leave();
}

/// A controller that does not take a rank in is asked once, and the rank says from then on why it is alone.
#[test]
fn a_session_that_is_refused_says_why_and_does_not_dial_again() {
    let first = controller();
    let addr = first.local_addr();
    let (to, notices) = channel();
    let on_notice = move |notice| {
        let _ = to.send(notice);
        None
    };
    let joined = Session::join(addr, request(0, 1), GREETING_TIMEOUT, on_notice);
    let (session, _) = joined.expect("an answer");
    // Nobody dials before it is there.
    drop(first);
    let listener = TcpListener::bind(addr).expect("the port of before");
    let (stream, _) = listener.accept().expect("the rank dials");
    let (mut reader, mut stream) = (FrameReader::new(stream.try_clone().expect("a file")), stream);
    assert!(matches!(reader.recv(), Ok(Greeting::Client)));
    assert!(matches!(reader.recv(), Ok(ClientRequest::Resume(_))));
    let refusal = super::super::proto::JoinRefusal::Running { job: "job".into() };
    send(&mut stream, &ClientReply::Refused(refusal.clone())).expect("it listens");
    let heard = notices.iter().find(|notice| matches!(notice, Notice::NotResumed(_)));
    assert_eq!(heard, Some(Notice::NotResumed(refusal.clone())));
    // Nobody listens to a controller any more.
    assert_eq!(notices.recv_timeout(SOON), Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
    let error = session.replan(0, Instant::now() + SOON).expect_err("no controller");
    assert!(matches!(&error, ClientError::NotResumed { refusal: told } if *told == refusal), "{error}");
    let error = session.survivors(Instant::now() + SOON).expect_err("no controller");
    assert!(error.to_string().contains("no controller stands behind the job any more"), "{error}");
    listener.set_nonblocking(true).expect("a socket");
    assert_eq!(listener.accept().map(drop).map_err(|error| error.kind()), Err(std::io::ErrorKind::WouldBlock));
}
