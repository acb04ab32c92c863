//! Offers of a tree to jobs without one, as ranks on raw connections hear them.

use super::replan::{Raw, begin, of, replan, why};
use super::*;
use crate::controller::proto::{ClientReply, ClientRequest};

fn offered(rank: &mut Raw) -> u32 {
    let reply = rank.hear_all();
    let ClientReply::Offer { view } = reply else { panic!("a device has come: {reply:?}") };
    view
}

#[test]
fn all_ranks_move_at_the_greatest_call_that_one_has_named() {
    let controller = controller();
    let (mut ranks, before) = begin(&controller, 3, &[]);
    assert_eq!(why(&before[0]), "no device is connected to the controller");
    let _device = Device::start(&controller, "late", None, None);
    assert!(ranks.iter_mut().all(|rank| offered(rank) == 0));
    // One is of another view.
    ranks[0].say(ClientRequest::Pause { view: 1, at: 999 });
    for (rank, at) in [(0, 7), (2, 16), (1, 12)] {
        ranks[rank].say(ClientRequest::Pause { view: 0, at });
    }
    for rank in &mut ranks {
        let reply = rank.hear_all();
        assert!(matches!(reply, ClientReply::MoveAt { view: 0, call: 16 }), "{reply:?}");
    }
    let after = replan(&mut ranks, 0);
    assert!(after.iter().all(|membership| of(membership).leaf == "late"));
    // It has a tree now.
    let _another = Device::start(&controller, "later", None, None);
    assert!(ranks[0].report().devices.len() == 2, "and nothing was said before the report");
}

#[test]
fn an_offer_is_off_when_a_rank_is_gone() {
    let controller = controller();
    let (mut ranks, _) = begin(&controller, 2, &[]);
    let _device = Device::start(&controller, "late", None, None);
    assert!(ranks.iter_mut().all(|rank| offered(rank) == 0));
    ranks[0].say(ClientRequest::Pause { view: 0, at: 1 });
    drop(ranks.pop());
    assert!(matches!(ranks[0].hear_all(), ClientReply::RankLost(Rank(1))));
    assert!(matches!(ranks[0].hear_all(), ClientReply::Withdrawn));
    let _another = Device::start(&controller, "later", None, None);
    assert_eq!(ranks[0].report().jobs[0].joined, 1, "nothing was offered to what is left");
}
