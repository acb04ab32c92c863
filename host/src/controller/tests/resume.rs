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
        assert!(matches!(rank.hear_all(), ClientReply::Resumed));
        let offer = loop {
            match rank.hear_all() {
                ClientReply::Queued(_) => {}
                reply => break reply,
            }
        };
        assert!(matches!(offer, ClientReply::Offer { view: 3 }), "{offer:?}");
        rank.say(ClientRequest::Pause { view: 3, at: 9 });
    }
    for rank in &mut ranks {
        assert!(matches!(rank.hear(), ClientReply::MoveAt { view: 3, call: 9 }));
    }
    let placed = replan(&mut ranks, 3);
    assert!(placed.iter().all(|membership| of(membership).leaf == "leaf0" && membership.mesh_token == 77));
    let report = ranks[0].report();
    assert_eq!((report.jobs[0].running, report.jobs[0].view), (true, 4));
    for rank in &mut ranks {
        rank.say(ClientRequest::Survivors);
    }
    for rank in &mut ranks {
        let told = rank.hear();
        let left = Ok(vec![Rank(0), Rank(1)]);
        assert_eq!(told, ClientReply::Survivors { round: 2, ranks: left }, "rounds go on");
    }
}

#[test]
fn who_means_another_job_is_refused() {
    let controller = controller();
    let mut first = resume(&controller, resumption(0));
    assert_eq!(first.report().jobs.len(), 1);
    let refused = |resumption| refusal(resume(&controller, resumption));
    assert!(refused(Resumption { mesh_token: 78, ..resumption(1) }).contains("token"));
    assert!(refused(resumption(0)).contains("there already"));
    assert!(refused(Resumption { devices: vec!["leaf0".into()], ..resumption(1) }).contains("devices"));
    let flipped = vec![vec![Child::Rank(Rank(1)), Child::Rank(Rank(0))]];
    assert!(refused(Resumption { expression: flipped, ..resumption(1) }).contains("order"));
    assert!(refused(Resumption { expression: vec![vec![Child::Node(0)]], ..resumption(1) }).contains("expression"));
    let beyond = Resumption { request: request(2, WORLD), ..resumption(1) };
    assert!(refused(beyond).contains("ranks are numbered from 0"));
    // One that runs, or that is about to be joined, is none to come back to.
    let mut second = resume(&controller, resumption(1));
    assert!(matches!(second.hear(), ClientReply::Resumed));
    assert!(refused(resumption(1)).contains("running"));
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
        assert!(matches!(rank.hear_all(), ClientReply::Resumed));
        let lost = rank.hear_all();
        assert!(matches!(lost, ClientReply::RankLost(Rank(3))), "{lost:?}");
        rank.say(ClientRequest::Survivors);
    }
    for rank in &mut ranks {
        let told = rank.hear_all();
        assert_eq!(told, ClientReply::Survivors { round: 2, ranks: Ok(vec![Rank(0), Rank(1)]) });
    }
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
    for _ in 0..2 {
        drop(first.take());
        hear(Notice::ControllerLost);
        let deadline = Instant::now() + SOON;
        let error = session.replan(0, deadline).expect_err("nobody is there");
        assert!(matches!(error, ClientError::Stream(_) | ClientError::Ended { view: 0 }), "{error}");
        assert!(session.survivors(deadline).is_err() && Instant::now() < deadline, "at once");
        let next = start_again(addr);
        hear(Notice::ControllerBack);
        let after = session.replan(0, Instant::now() + SOON);
        // The views go on where they were.
        assert!(matches!(after, Ok(_) | Err(ClientError::NotReplanned { .. })), "{after:?}");
        let over = Over::Mismatch { first: OpDesc::barrier(), other: OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1) };
        session.over(over.clone());
        hear(Notice::Over(over));
        first = Some(next);
    }
    assert_eq!(status(addr).expect("a report").jobs[0].view, 1);
    assert_eq!(before.mesh.len(), 1);
    session.leave();
}
