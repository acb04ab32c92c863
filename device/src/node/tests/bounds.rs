//! Limits: groups share the output fairly, and the work of each call is bounded.

use super::*;
use crate::node::{Event, MAX_EVENTS, MAX_REPLIES};

/// Bytes that a group may send per turn (deficit round robin), as in `transmit.rs`.
const QUANTUM_BYTES: i64 = 64 * 1024;

/// Let every child of `group` contribute `elements` elements to `seq`.
fn complete(rig: &mut Rig, group: usize, seq: u64, elements: usize) {
    for child in 0..rig.setup.children {
        let repr =
            Repr { group: group_id(group), key: key(group, child), mark: ChunkNo(0), ..rig.up(Kind::Data, child, seq) };
        rig.put(Addr::Emu(u32::from(child) + 100 * group as u32), repr, &vec![0; elements * 4]);
    }
}

#[test]
fn groups_share_the_output_by_bytes() {
    let chunk = 4096;
    let mut rig = Rig::new(Setup { groups: 3, window: 64, slots: 128, chunk_len_bytes: chunk, ..Setup::default() });
    // One group has large packets, one small ones, one none: bytes count, not packets.
    for seq in 0..64 {
        complete(&mut rig, 0, seq, usize::from(chunk) / 4);
        complete(&mut rig, 2, seq, 256);
    }
    let mut sent_bytes = [0_i64; 3];
    let mut left = [128, 0, 128];
    while let Some(sent) = rig.next() {
        let group = (sent.repr.group.0 - 7) as usize;
        sent_bytes[group] += sent.repr.packet_len() as i64;
        left[group] -= 1;
        if left[0] > 0 && left[2] > 0 {
            let lead = (sent_bytes[0] - sent_bytes[2]).abs();
            assert!(lead <= QUANTUM_BYTES + i64::from(chunk) + 96, "a lead of {lead} bytes");
        }
    }
    assert_eq!(left, [0; 3]);
}

#[test]
fn probe_resends_no_more_answers_than_credit() {
    let mut rig = Rig::new(Setup { window: 128, slots: 256, ..Setup::default() });
    (0..128).for_each(|seq| rig.all(seq));
    rig.drain();
    // The most that a header can request: 64 answers. The credit covers as many.
    rig.probe(0, 0, u16::MAX, 0);
    assert!(rig.drain().len() <= 65);
    rig.probe(0, 0, u16::MAX, 0);
    assert!(rig.drain().len() <= 2, "the credit is used up");
}

/// All gaps of a whole window at once: each is requested once, as far as the reply queue has room.
#[test]
fn burst_of_gaps_fills_the_reply_queue_and_counts_the_rest() {
    let mut rig = Rig::new(Setup { window: 256, slots: 512, ..Setup::default() });
    (253..256).for_each(|seq| rig.data(0, seq, &[1.0]));
    assert_eq!(rig.drain().len(), MAX_REPLIES);
    assert_eq!(rig.dropped(DropReason::QueueFull), 253 - MAX_REPLIES as u64, "the rest is counted");
    rig.probe(0, 0, 64, 0);
    assert_eq!(rig.drain().len(), 1, "Status reports what else is missing");
}

#[test]
fn event_queue_keeps_the_newest() {
    let mut rig = Rig::new(Setup::default());
    for _ in 0..MAX_EVENTS + 3 {
        rig.pass_ms(u64::from(LEASE_MS));
        let again = Request::CreateGroup(group_config(&rig.setup, 0));
        assert_eq!(rig.node.control(&again, rig.now), Response::Done);
    }
    let events = core::iter::from_fn(|| rig.node.poll_event()).count();
    assert_eq!(events, MAX_EVENTS);
    rig.pass_ms(u64::from(LEASE_MS));
    assert_eq!(rig.node.poll_event(), Some(Event::LeaseExpired(group_id(0))));
}

#[test]
fn unanswered_contribution_has_an_earlier_timeout_than_the_lease() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    let lease = rig.node.poll_timeout().expect("a lease at least");
    rig.all(0);
    rig.drain();
    assert!(rig.node.poll_timeout().expect("a probe") < lease);
}
