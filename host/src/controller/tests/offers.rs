//! Offers of a tree to running jobs without one, on raw connections.

use super::replan::{Raw, disconnect_device, join_all, no_tree_reason, replan, request, tree_of};
use super::*;
use crate::controller::proto::{ClientReply, ClientRequest};

fn recv_offer(rank: &mut Raw) -> u32 {
    let reply = rank.recv_any();
    let ClientReply::Offer { view } = reply else { panic!("a device has come: {reply:?}") };
    view
}

#[test]
fn ranks_move_at_the_highest_paused_call() {
    let controller = controller();
    let (mut ranks, before) = join_all(&controller, 3, &[]);
    assert_eq!(no_tree_reason(&before[0]), "no device is connected to the controller");
    let _device = Device::start(&controller, "late", None, None);
    assert!(ranks.iter_mut().all(|rank| recv_offer(rank) == 0));
    // A pause for another view is ignored.
    ranks[0].send(ClientRequest::Pause { view: 1, at: 999 });
    for (rank, at) in [(0, 7), (2, 16), (1, 12)] {
        ranks[rank].send(ClientRequest::Pause { view: 0, at });
    }
    for rank in &mut ranks {
        let reply = rank.recv_any();
        assert!(matches!(reply, ClientReply::MoveAt { view: 0, call: 16 }), "{reply:?}");
    }
    let after = replan(&mut ranks, 0);
    assert!(after.iter().all(|membership| tree_of(membership).leaf == "late"));
    // It has a tree now.
    let _another = Device::start(&controller, "later", None, None);
    assert!(ranks[0].report().devices.len() == 2, "and nothing was said before the report");
}

#[test]
fn offer_is_withdrawn_when_a_rank_is_lost() {
    let controller = controller();
    let (mut ranks, _) = join_all(&controller, 2, &[]);
    let _device = Device::start(&controller, "late", None, None);
    assert!(ranks.iter_mut().all(|rank| recv_offer(rank) == 0));
    ranks[0].send(ClientRequest::Pause { view: 0, at: 1 });
    drop(ranks.pop());
    assert!(matches!(ranks[0].recv_any(), ClientReply::RankLost(Rank(1))));
    assert!(matches!(ranks[0].recv_any(), ClientReply::OfferWithdrawn));
    let _another = Device::start(&controller, "later", None, None);
    assert_eq!(ranks[0].report().jobs[0].joined, 1, "nothing was offered to what is left");
}

#[test]
fn records_of_a_device_session_end_with_it() {
    let controller = controller();
    let mut ranks = Raw::join_with(&controller, request(0, 1), &[]);
    assert!(no_tree_reason(&ranks.joined()).contains("no device"));
    for _ in 0..2 {
        let device = Device::start(&controller, "leaf0", None, None);
        let view = wait_for_offer(&mut ranks);
        ranks.send(ClientRequest::Pause { view, at: 1 });
        assert!(matches!(ranks.recv(), ClientReply::MoveAt { .. }));
        ranks.send(ClientRequest::Replan { view });
        let (view, _) = ranks.replanned();
        ranks.send(ClientRequest::Decline { view, device: Some("leaf0".into()), why: "no way".into() });
        assert_eq!(ranks.report().jobs.len(), 1);
        assert_eq!(controller.shared.lock().state_mut().remembered_sessions("job"), 1);
        disconnect_device(device, &controller);
        assert_eq!(controller.shared.lock().state_mut().remembered_sessions("job"), 0);
    }
}

fn wait_for_offer(rank: &mut Raw) -> u32 {
    loop {
        if let ClientReply::Offer { view } = rank.recv_any() {
            return view;
        }
    }
}
