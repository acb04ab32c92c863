//! Links between ranks and a device, and what ends them.

use super::*;
use crate::remote::BUFFERS;

#[test]
fn detached_peers_leave_their_unread_buffers_to_others() {
    let (domain, mut engine) = engine(3 * BUFFERS);
    for crash in 0..50 {
        let (_receives, mut end) = rank();
        let peer = attach(&domain, &mut engine, &mut end);
        for _ in 0..8 {
            assert_eq!(end.send(b"unread"), Ok(true), "after {crash} crashes");
        }
        engine.detach(peer).expect("fenced");
    }
    let (_receives, mut end) = rank();
    let peer = attach(&domain, &mut engine, &mut end);
    for _ in 0..BUFFERS {
        assert_eq!(end.send(b"read"), Ok(true));
    }
    assert_eq!(arrivals(&mut engine, peer), (BUFFERS, None));
}

#[test]
fn peer_that_cannot_be_stopped_is_destroyed() {
    let (domain, mut engine) = engine(3 * BUFFERS);
    let (_receives, mut end) = rank();
    let peer = attach(&domain, &mut engine, &mut end);
    machine(|machine| machine.refuses_changes = true);
    assert!(engine.detach(peer).is_err());
    assert!(engine.link(peer).is_none(), "its connection is gone");
    assert_eq!(end.send(b"to nobody"), Ok(true), "posted");
    assert_eq!(end.poll().error, Some(LinkError::PeerGone));
}

#[test]
fn queue_suffices_while_free_buffers_wait_to_be_posted_together() {
    let (domain, mut engine) = engine(BUFFERS);
    let (_receives, mut end) = rank();
    let peer = attach(&domain, &mut engine, &mut end);
    for round in 0..20 {
        for _ in 0..BUFFERS {
            assert_eq!(end.send(b"a message"), Ok(true), "round {round}");
        }
        assert_eq!(arrivals(&mut engine, peer), (BUFFERS, None), "round {round}");
        assert_eq!(end.poll().error, None, "round {round}");
    }
}

#[test]
fn receiver_without_buffers_is_waited_for_as_long_as_one_that_does_not_answer() {
    let (domain, mut engine) = engine(BUFFERS);
    let (_receives, mut end) = rank();
    attach(&domain, &mut engine, &mut end);
    let attr = machine(|machine| machine.attr(end.end().qpn));
    // InfiniBand Architecture Specification, table 45: this is 40.96 ms.
    assert_eq!(attr.min_rnr_timer, 24);
}

#[test]
fn refused_access_keeps_the_vendors_error() {
    let (domain, mut engine) = engine(BUFFERS);
    let (_receives, mut end) = rank();
    let peer = attach(&domain, &mut engine, &mut end);
    let exposed = domain.expose(4096).expect("memory");
    let far = crate::remote::RemoteRegion { rkey: 0xdead, ..exposed.remote() };
    end.write((&exposed, 0), (&far, 0), 8).expect("queued");
    end.flush();
    assert_eq!(end.poll().error, Some(LinkError::RemoteAccess));
    assert_eq!(end.stats().vendor_error, 0x88);
    assert_eq!(end.send(b"more"), Err(LinkError::RemoteAccess));
    assert_eq!(arrivals(&mut engine, peer), (0, None));
}

#[test]
fn link_that_does_not_settle_keeps_the_error_that_ended_it() {
    use crate::dma::{Address, Chain, Completion, Engine, RegionKey, Scope, Status, Step, Tag};
    use crate::shm::{Pages, Region};
    let (domain, mut engine) = engine(BUFFERS);
    let (_receives, mut end) = rank();
    let peer = attach(&domain, &mut engine, &mut end);
    let (own, theirs) = (RegionKey { index: 0, generation: 1 }, RegionKey { index: 1, generation: 1 });
    let memory = std::sync::Arc::new(Region::create(4096, Pages::Normal).expect("memory"));
    engine.map_local_memory(own, memory).expect("mapped");
    engine.map_remote(theirs, peer, domain.expose(4096).expect("memory").remote()).expect("mapped");
    machine(|machine| machine.stops_late = true);
    drop(end);
    let at = |region| Address { region, offset_bytes: 0 };
    let steps = [Step::Copy { src: at(theirs), dst: at(own), len_bytes: 64 }];
    engine.submit(Chain { tag: Tag::default(), scope: Scope::default(), steps: &steps }).expect("submitted");
    let mut ended = [Completion { tag: Tag::default(), status: Status::Done, step: 0 }];
    assert_eq!(engine.poll(&mut ended), 1);
    assert_eq!((ended[0].status, engine.error(peer)), (Status::Hardware, Some(LinkError::PeerGone)));
    engine.detach(peer).expect("ended");
    assert_eq!(engine.error(peer), Some(LinkError::Fenced));
}

#[test]
fn short_messages_are_sent_inline() {
    let (domain, mut engine) = engine(BUFFERS);
    let (_receives, mut end) = rank();
    let peer = attach(&domain, &mut engine, &mut end);
    assert_eq!([end.send(&[1; 192]), end.send(&[2; 193]), end.send(&[3; 8])], [Ok(true); 3]);
    assert_eq!((end.stats().messages, end.stats().inline_messages), (3, 2));
    let mut message = [0; MESSAGE_LEN_BYTES];
    for (len, byte) in [(192, 1), (193, 2), (8, 3)] {
        let arrived = engine.link(peer).expect("a link").receive(&mut message);
        assert_eq!(arrived, Ok(Some(Arrived::Message(len))));
        assert!(message[..len].iter().all(|found| *found == byte));
    }
    assert_eq!(end.poll().error, None, "each was acknowledged");
}
