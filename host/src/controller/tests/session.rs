//! A rank's session: what it returns for a lost tree and a lost controller.

use super::super::proto::{ClientReply, ClientRequest};
use super::super::{ClientError, Notice};
use super::replan::{SOON, request, tree_of, wait_until_no_tree};
use super::*;
use crate::secret::JobSecret;
use crate::transport::path::PathToProbe;
use std::time::Instant;
use sumac_hal::ids::Epoch;

#[test]
fn sessions_replace_a_lost_tree_together() {
    let controller = controller();
    let _devices = ["leaf0", "leaf1"].map(|name| Device::start(&controller, name, None, None));
    let addr = controller.local_addr();
    let (told, notices) = channel();
    let joining: Vec<_> = (0..2)
        .map(|rank| {
            let told = told.clone();
            let told = move |notice| {
                if !matches!(notice, Notice::OfferWithdrawn | Notice::Queued(_) | Notice::ControllerLost) {
                    told.send((rank, notice)).expect("somebody listens");
                }
                None
            };
            thread::spawn(move || Session::join(addr, request(rank, 2), SOON, told).expect("an answer"))
        })
        .collect();
    let ranks: Vec<_> = joining.into_iter().map(|rank| rank.join().expect("no panic")).collect();
    ranks[1].0.suspect(0);
    let mut heard = [(); 2].map(|()| notices.recv_timeout(SOON).expect("a notice"));
    heard.sort_by_key(|(rank, _)| *rank);
    assert_eq!(heard, [0, 1].map(|rank| (rank, Notice::TreeLost { view: 0 })));
    // Rank 0 times out before rank 1 asks. Its request stays valid, but it declines the tree that arrives too late.
    let error = ranks[0].0.replan(0, Instant::now()).expect_err("alone");
    assert!(matches!(error, ClientError::ReplanTimeout { view: 0, .. }), "{error}");
    let later = Instant::now() + SOON;
    let second = ranks[1].0.replan(0, later).expect("all have asked");
    assert_eq!(tree_of(&second).leaf, "leaf1");
    let declined = wait_until_no_tree(&controller);
    assert_eq!(declined, "rank 0 declined its tree: it arrived after a rank had stopped waiting");
    let error = ranks[0].0.replan(0, later).expect_err("stale").to_string();
    assert_eq!(error, "cannot replace the tree of view 0: job \"job\" is at view 1");
    thread::scope(|scope| {
        let first = scope.spawn(|| ranks[0].0.replan(1, later));
        let second = ranks[1].0.replan(1, later).expect("all have asked");
        let first = first.join().expect("no panic").expect("all have asked");
        assert_eq!([&first, &second].map(|membership| tree_of(membership).epoch.counter), [3; 2]);
    });
    let error = ranks[0].0.replan(1, later).expect_err("stale").to_string();
    assert_eq!(error, "cannot replace the tree of view 1: job \"job\" is at view 2");
}

/// A scripted controller: answers one Join, then one Replan with `answers`, and disconnects.
fn scripted(answers: Vec<ClientReply>) -> (SocketAddr, thread::JoinHandle<()>) {
    scripted_with(None, answers)
}

/// The same; before the answers to Replan it has a path probed, which carries 1200 bytes.
fn scripted_with(path: Option<PathToProbe>, answers: Vec<ClientReply>) -> (SocketAddr, thread::JoinHandle<()>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let addr = listener.local_addr().expect("bound");
    let serve = move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut reader = FrameReader::new(stream.try_clone().expect("a file"));
        assert_eq!(reader.recv::<Hello>().expect("a greeting"), Hello::Client);
        assert!(matches!(reader.recv(), Ok(ClientRequest::Join(_))));
        send(&mut stream, &ClientReply::Joined(Box::new(membership_without_tree(1)))).expect("a client");
        assert_eq!(reader.recv::<ClientRequest>().expect("a wish"), ClientRequest::Replan { view: 3 });
        if let Some(path) = path {
            let found = ClientRequest::PathProbed { group: path.group, max_packet_len_bytes: Some(1200) };
            send(&mut stream, &ClientReply::ProbePath(Box::new(path))).expect("a client");
            assert_eq!(reader.recv::<ClientRequest>().expect("an answer"), found);
        }
        answers.iter().for_each(|answer| send(&mut stream, answer).expect("a client"));
    };
    (addr, thread::spawn(serve))
}

fn membership_without_tree(secret: u8) -> Membership {
    let table = crate::select::CostTable::emulated();
    Membership {
        tree: Err("none".into()),
        queue: None,
        striping: Default::default(),
        mesh: Vec::new(),
        recovery_mesh: Vec::new(),
        secret: JobSecret::new([secret; 32]),
        expression: Vec::new(),
        table,
        shape: Default::default(),
    }
}

#[test]
fn replan_replies_for_other_views_are_ignored() {
    let replanned = |view| ClientReply::Replanned { view, membership: Box::new(membership_without_tree(view as u8)) };
    let stale = ClientReply::ReplanRefused { view: 2, reason: "stale".into() };
    let (addr, serving) = scripted(vec![replanned(0), stale, replanned(3), replanned(5), replanned(4)]);
    let (session, _) = Session::join(addr, request(0, 1), SOON, |_| None).expect("an answer");
    assert_eq!(session.replan(3, Instant::now() + SOON).expect("an answer").secret, JobSecret::new([4; 32]));
    serving.join().expect("as scripted");
}

#[test]
fn lost_controller_fails_a_pending_replan() {
    fn shared<T: Send + Sync>(session: T) -> T {
        session
    }
    let (addr, serving) = scripted(Vec::new());
    let (session, _) = Session::join(addr, request(0, 1), SOON, |_| None).expect("an answer");
    let session = shared(session);
    // The deadline is longer than the test may take.
    let error = session.replan(3, Instant::now() + Duration::from_secs(3600)).expect_err("it is gone");
    assert!(matches!(error, ClientError::ControllerLost { view: 3 }), "{error}");
    serving.join().expect("as scripted");
    // Ignored without a controller.
    session.suspect(3);
}

#[test]
fn path_is_probed_while_a_replan_waits() {
    let path = PathToProbe {
        group: GroupId(7),
        epoch: Epoch::default(),
        child: ChildIndex(0),
        key: 1,
        parents: Vec::new(),
        packet_len_bytes: 1472,
    };
    let replanned = ClientReply::Replanned { view: 4, membership: Box::new(membership_without_tree(9)) };
    let (addr, serving) = scripted_with(Some(path.clone()), vec![replanned]);
    let (session, _) = Session::join(addr, request(0, 1), SOON, |_| None).expect("an answer");
    let probe = |asked: &PathToProbe| {
        assert_eq!(*asked, path);
        Some(1200)
    };
    let membership = session.replan_with(3, Instant::now() + SOON, probe).expect("an answer");
    assert_eq!(membership.secret, JobSecret::new([9; 32]));
    serving.join().expect("as scripted");
}
