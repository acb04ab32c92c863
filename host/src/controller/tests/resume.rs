//! Jobs that resume with a restarted controller.

use super::super::proto::{AbortReason, ClientReply, ClientRequest, ResumeRequest};
use super::super::{ClientError, Notice};
use super::replan::{Raw, SOON, join_all, no_tree_reason, replan, request, tree_of};
use super::*;
use crate::plan::Child;
use crate::secret::JobSecret;
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

const WORLD: u32 = 2;

fn resumption(rank: u32) -> ResumeRequest {
    let expression = vec![(0..WORLD).map(|rank| Child::Rank(Rank(rank))).collect()];
    ResumeRequest {
        request: request(rank, WORLD),
        devices: Vec::new(),
        view: 3,
        shrink_count: 2,
        secret: JobSecret::new([77; 32]),
        expression,
    }
}

fn resume(controller: &Controller, resumption: ResumeRequest) -> Raw {
    let mut raw = Raw::dial(controller);
    raw.send(ClientRequest::Resume(Box::new(resumption)));
    raw
}

fn refusal(mut raw: Raw) -> String {
    let reply = raw.recv();
    let ClientReply::Refused(refusal) = reply else { panic!("refused: {reply:?}") };
    refusal.to_string()
}

#[test]
fn job_resumes_with_all_ranks_and_is_offered_a_tree() {
    let controller = controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let mut ranks = vec![resume(&controller, resumption(0))];
    let report = ranks[0].report();
    assert_eq!((report.jobs[0].running, report.jobs[0].joined, report.jobs[0].world), (false, 1, 2));
    let joins = Raw::join_with(&controller, request(1, WORLD), &[]);
    assert!(refusal(joins).contains("running"));
    // The other rank missed the latest views.
    ranks.push(resume(&controller, ResumeRequest { view: 1, shrink_count: 0, ..resumption(1) }));
    for rank in &mut ranks {
        assert!(matches!(rank.recv_any(), ClientReply::Resumed { view: 4 }));
        let offer = loop {
            match rank.recv_any() {
                ClientReply::Queued(_) => {}
                reply => break reply,
            }
        };
        assert!(matches!(offer, ClientReply::Offer { view: 4 }), "{offer:?}");
        rank.send(ClientRequest::Pause { view: 4, at: 9 });
    }
    for rank in &mut ranks {
        assert!(matches!(rank.recv(), ClientReply::MoveAt { view: 4, call: 9 }));
    }
    let placed = replan(&mut ranks, 4);
    assert!(
        placed
            .iter()
            .all(|membership| tree_of(membership).leaf == "leaf0" && membership.secret == JobSecret::new([77; 32]))
    );
    let report = ranks[0].report();
    assert_eq!((report.jobs[0].running, report.jobs[0].view), (true, 5));
    for rank in &mut ranks {
        rank.send(ClientRequest::Survivors);
    }
    for rank in &mut ranks {
        let told = rank.recv();
        let left = Ok(vec![Rank(0), Rank(1)]);
        assert_eq!(told, ClientReply::Survivors { round: 2, ranks: left }, "rounds go on");
    }
}

/// Counters are incremented, so accepting the maximum would overflow.
#[test]
fn counters_out_of_range_are_refused_on_resume() {
    let controller = controller();
    for resumption in
        [ResumeRequest { view: u32::MAX, ..resumption(0) }, ResumeRequest { shrink_count: u32::MAX, ..resumption(0) }]
    {
        let expression = vec![vec![Child::Rank(Rank(0))]];
        let alone = ResumeRequest { request: request(0, 1), expression, ..resumption };
        let why = refusal(resume(&controller, alone));
        assert!(why.contains("4294967295"), "{why}");
    }
    assert_eq!(resume(&controller, resumption(0)).report().jobs.len(), 1, "it goes on");
}

#[test]
fn resume_with_mismatched_parameters_is_refused() {
    let controller = controller();
    let mut first = resume(&controller, resumption(0));
    assert_eq!(first.report().jobs.len(), 1);
    let refused = |resumption| refusal(resume(&controller, resumption));
    assert!(refused(resumption(0)).contains("already joined"));
    assert!(refused(ResumeRequest { devices: vec!["leaf0".into()], ..resumption(1) }).contains("devices"));
    let flipped = vec![vec![Child::Rank(Rank(1)), Child::Rank(Rank(0))]];
    assert!(refused(ResumeRequest { expression: flipped, ..resumption(1) }).contains("expression"));
    let mut others = request(1, WORLD);
    others.terms.tenant = "others".into();
    assert!(refused(ResumeRequest { request: others, ..resumption(1) }).contains("tenant"));
    let mut nobody = request(1, WORLD);
    nobody.terms.tenant = "a b".into();
    assert!(refused(ResumeRequest { request: nobody, ..resumption(1) }).contains("not a valid tenant"));
    assert!(refused(ResumeRequest { expression: vec![vec![Child::Node(0)]], ..resumption(1) }).contains("expression"));
    let beyond = ResumeRequest { request: request(2, WORLD), ..resumption(1) };
    assert!(refused(beyond).contains("ranks are numbered from 0"));
    // A job that is running or being joined cannot be resumed.
    let mut second = resume(&controller, resumption(1));
    assert!(matches!(second.recv(), ClientReply::Resumed { .. }));
    assert!(refused(resumption(1)).contains("already joined"));
    assert!(refused(ResumeRequest { secret: JobSecret::new([78; 32]), ..resumption(1) }).contains("running"));
    let mut other = request(0, WORLD);
    other.job = "other".into();
    let mut joins = Raw::join_with(&controller, other.clone(), &[]);
    assert_eq!(joins.report().jobs.len(), 2);
    other.rank = Rank(1);
    assert!(refused(ResumeRequest { request: other, ..resumption(1) }).contains("running"));
}

#[test]
fn job_name_is_free_after_resuming_ranks_disconnect() {
    let controller = controller();
    let mut first = resume(&controller, resumption(0));
    assert_eq!(first.report().jobs.len(), 1);
    drop(first);
    let give_up = Instant::now() + SOON;
    while !status(controller.local_addr()).expect("a report").jobs.is_empty() {
        assert!(Instant::now() < give_up, "the job is still there");
    }
    let (_ranks, told) = join_all(&controller, WORLD, &[]);
    assert_eq!(no_tree_reason(&told[0]), "no device is connected to the controller");
}

/// A rank that does not come back within the limit is lost; one that came back and left is not.
#[test]
fn rank_that_does_not_reconnect_is_lost() {
    let controller = controller();
    let mut ranks: Vec<Raw> = (0..3)
        .map(|rank| {
            let expression = vec![(0..4).map(|rank| Child::Rank(Rank(rank))).collect()];
            let mut raw = resume(&controller, ResumeRequest { request: request(rank, 4), expression, ..resumption(0) });
            assert_eq!(raw.report().jobs[0].joined, rank + 1);
            raw
        })
        .collect();
    ranks.iter_mut().for_each(Raw::extend_timeout);
    let mut leaves = ranks.pop().expect("three");
    leaves.send(ClientRequest::Leave);
    assert!(matches!(leaves.recv(), ClientReply::Left));
    for rank in &mut ranks {
        assert!(matches!(rank.recv_any(), ClientReply::Resumed { view: 4 }));
        let lost = rank.recv_any();
        assert!(matches!(lost, ClientReply::RankLost(Rank(3))), "{lost:?}");
        rank.send(ClientRequest::Survivors);
    }
    for rank in &mut ranks {
        let told = rank.recv_any();
        assert_eq!(told, ClientReply::Survivors { round: 2, ranks: Ok(vec![Rank(0), Rank(1)]) });
    }
}

/// Late ranks are refused, and half of the ranks or fewer cannot resume a job.
#[test]
fn only_a_majority_resumes_and_late_ranks_are_refused() {
    let controller = controller();
    let of_three = |rank| {
        let expression = vec![(0..3).map(|rank| Child::Rank(Rank(rank))).collect()];
        ResumeRequest { request: request(rank, 3), expression, ..resumption(0) }
    };
    let mut most: Vec<Raw> = (0..2).map(|rank| resume(&controller, of_three(rank))).collect();
    let mut half = request(0, WORLD);
    half.job = "half".into();
    let mut half = resume(&controller, ResumeRequest { request: half, ..resumption(0) });
    most.iter_mut().chain([&mut half]).for_each(Raw::extend_timeout);
    for rank in &mut most {
        assert!(matches!(rank.recv_any(), ClientReply::Resumed { view: 4 }));
        assert!(matches!(rank.recv_any(), ClientReply::RankLost(Rank(2))));
    }
    let late = refusal(resume(&controller, of_three(2)));
    assert!(late.contains("too late") && late.contains("counts it as lost"), "{late}");
    let few = refusal(half);
    assert!(few.contains("1 of the 2 ranks of job \"half\"") && few.contains("more than half"), "{few}");
    assert_eq!(most[0].report().jobs.len(), 1);
}

/// A client that knows the job's name but not its secret cannot join it or block its ranks.
#[test]
fn client_without_the_secret_cannot_interfere_with_a_resume() {
    let controller = controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let stranger = |rank| ResumeRequest { secret: JobSecret::new([66; 32]), ..resumption(rank) };
    let mut first = resume(&controller, stranger(0));
    assert_eq!(first.report().jobs.len(), 1);
    let mut ranks: Vec<Raw> = (0..WORLD).map(|rank| resume(&controller, resumption(rank))).collect();
    for rank in &mut ranks {
        assert!(matches!(rank.recv_any(), ClientReply::Resumed { view: 4 }));
    }
    assert!(refusal(first).contains("running"));
    assert!(refusal(resume(&controller, stranger(1))).contains("running"));
    let report = ranks[0].report();
    assert_eq!((report.jobs.len(), report.jobs[0].joined, report.jobs[0].running), (1, WORLD, true));
    // Its other requests have no effect either.
    let mut other = Raw::dial(&controller);
    other.send(ClientRequest::Suspect { view: 4 });
    other.send(ClientRequest::Replan { view: 4 });
    assert!(matches!(other.recv(), ClientReply::ReplanRefused { .. }));
    assert_eq!(ranks[0].report().jobs[0].view, 4);
}

/// Some ranks may have sent their replan request to the earlier controller. The others' requests must expire.
#[test]
fn abandoned_replan_expires_and_a_tree_is_offered() {
    let controller = controller();
    let mut ranks: Vec<Raw> = (0..WORLD).map(|rank| resume(&controller, resumption(rank))).collect();
    for rank in &mut ranks {
        assert!(matches!(rank.recv_any(), ClientReply::Resumed { view: 4 }));
    }
    ranks[0].send(ClientRequest::Suspect { view: 4 });
    ranks[0].send(ClientRequest::Replan { view: 4 });
    for rank in &mut ranks {
        assert!(matches!(rank.recv(), ClientReply::TreeLost { view: 4 }));
    }
    let _device = Device::start(&controller, "leaf0", None, None);
    ranks[0].send(ClientRequest::AbandonReplan { view: 4 });
    ranks.iter_mut().for_each(Raw::extend_timeout);
    for rank in &mut ranks {
        while !matches!(rank.recv_any(), ClientReply::Offer { view: 4 }) {}
    }
}

/// A resumed job's new tree counts against the quota of its tenant.
#[test]
fn resumed_job_counts_against_its_tenants_quota() {
    let quotas = Quotas { other: Quota { groups: Some(1), ..Quota::default() }, ..Quotas::default() };
    let config = ControllerConfig { quotas, ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let device = Device::start(&controller, "leaf0", None, None);
    let mut ranks: Vec<Raw> = (0..WORLD).map(|rank| resume(&controller, resumption(rank))).collect();
    for rank in &mut ranks {
        assert!(matches!(rank.recv_any(), ClientReply::Resumed { view: 4 }));
        while !matches!(rank.recv_any(), ClientReply::Offer { view: 4 }) {}
    }
    // The offered resources are claimed for it.
    let second = join(&controller, "second", &[(Transport::Udp, None); 2]);
    let why_not = second[0].1.tree.as_ref().expect_err("one group");
    assert!(why_not.contains("1 of 1 groups") || why_not.contains("quota"), "{why_not}");
    let placed = replan(&mut ranks, 4);
    assert_eq!(tree_of(&placed[0]).group, device.group().group);
    let tenant = &ranks[0].report().tenants[0];
    assert_eq!((tenant.groups, tenant.quota.groups), (1, Some(1)));
    drop(second);
}

/// It keeps running on its old tree meanwhile.
#[test]
fn resumed_job_queues_behind_earlier_claims() {
    let quotas = Quotas { other: Quota { groups: Some(1), ..Quota::default() }, ..Quotas::default() };
    let controller = Controller::start(ControllerConfig { quotas, ..ControllerConfig::new() }).expect("a port");
    let _device = Device::start(&controller, "leaf0", None, None);
    let first = join(&controller, "first", &[(Transport::Udp, None); 2]);
    assert_eq!(tree_of(&first[0].1).leaf, "leaf0");
    let mut ranks: Vec<Raw> = (0..WORLD).map(|rank| resume(&controller, resumption(rank))).collect();
    for rank in &mut ranks {
        assert!(matches!(rank.recv_any(), ClientReply::Resumed { view: 4 }));
        let told = rank.recv_any();
        assert!(matches!(told, ClientReply::Queued(Some(place)) if (place.position, place.of) == (1, 1)), "{told:?}");
    }
    let job = ranks[0].report().jobs.into_iter().find(|job| job.name == "job").expect("it is known");
    assert!(job.running && !job.is_offered && job.queue.is_some(), "{job:?}");
    assert!(job.tree.is_some_and(|tree| tree.is_err_and(|why| why.contains("an earlier controller"))));
    first.into_iter().for_each(|(session, _)| session.leave());
    for rank in &mut ranks {
        while !matches!(rank.recv_any(), ClientReply::Offer { view: 4 }) {}
    }
    assert!(replan(&mut ranks, 4).iter().all(|membership| tree_of(membership).leaf == "leaf0"));
}

/// Start a controller at an address that another has just released.
fn start_again(listen: SocketAddr) -> Controller {
    Controller::start(ControllerConfig { listen, ..ControllerConfig::new() }).expect("the port of before")
}

#[test]
fn session_reconnects_and_fails_requests_meanwhile() {
    let first = controller();
    let addr = first.local_addr();
    let (to, notices) = channel();
    let on_notice = move |notice| {
        let _ = to.send(notice);
        None
    };
    let mut request = request(0, 1);
    request.terms.accepts_migration = false;
    let (session, before) = Session::join(addr, request, TEST_TIMEOUT, on_notice).expect("an answer");
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
        assert!(matches!(error, ClientError::Stream(_) | ClientError::ControllerLost { view: 0 }), "{error}");
        assert!(session.survivors(deadline).is_err() && Instant::now() < deadline, "at once");
        let next = start_again(addr);
        // Views continue from the last one.
        hear(Notice::ControllerBack { view });
        assert!(session.replan(view, Instant::now() + SOON).is_ok());
        let over =
            AbortReason::Mismatch { first: OpDesc::barrier(), other: OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1) };
        session.abort(over.clone());
        hear(Notice::Aborted(over));
        first = Some(next);
    }
    assert_eq!(status(addr).expect("a report").jobs[0].view, 4);
    assert_eq!(before.mesh.len(), 1);
    session.leave();
}

/// After a refusal the session does not reconnect, and every request returns the refusal.
#[test]
fn refused_session_reports_why_and_stops_dialling() {
    let first = controller();
    let addr = first.local_addr();
    let (to, notices) = channel();
    let on_notice = move |notice| {
        let _ = to.send(notice);
        None
    };
    let joined = Session::join(addr, request(0, 1), TEST_TIMEOUT, on_notice);
    let (session, _) = joined.expect("an answer");
    // The session reconnects as soon as the listener exists.
    drop(first);
    let listener = TcpListener::bind(addr).expect("the port of before");
    let (stream, _) = listener.accept().expect("the rank dials");
    let (mut reader, mut stream) = (FrameReader::new(stream.try_clone().expect("a file")), stream);
    assert!(matches!(reader.recv(), Ok(Hello::Client)));
    assert!(matches!(reader.recv(), Ok(ClientRequest::Resume(_))));
    let refusal = super::super::proto::JoinRefusal::Running { job: "job".into() };
    send(&mut stream, &ClientReply::Refused(refusal.clone())).expect("it listens");
    let heard = notices.iter().find(|notice| matches!(notice, Notice::ResumeRefused(_)));
    assert_eq!(heard, Some(Notice::ResumeRefused(refusal.clone())));
    // The reader thread has ended.
    assert_eq!(notices.recv_timeout(SOON), Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
    let error = session.replan(0, Instant::now() + SOON).expect_err("no controller");
    assert!(matches!(&error, ClientError::ResumeRefused { refusal: told } if *told == refusal), "{error}");
    let error = session.survivors(Instant::now() + SOON).expect_err("no controller");
    assert!(error.to_string().contains("the restarted controller refused this rank"), "{error}");
    listener.set_nonblocking(true).expect("a socket");
    assert_eq!(listener.accept().map(drop).map_err(|error| error.kind()), Err(std::io::ErrorKind::WouldBlock));
}
