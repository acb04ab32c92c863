//! Operations with a limit on waiting for ranks, and the report of the slowest rank.

use super::*;

const LIMIT: StragglerLimit = StragglerLimit { us: 5_000, cuts: true };

/// Post a sum of `count` elements with a limit, and return its id and the signature of its contributions.
fn post(rig: &mut Rig, count: u64) -> (OpId, u32) {
    rig.memory.0.push(1.0_f32.to_le_bytes().repeat(count as usize));
    let first = ChunkNo(rig.endpoint.ops.end());
    let id = rig.endpoint.post(sum(count), Path::Tree, Some(LIMIT)).expect("not failed");
    (id, LIMIT.sign(sum(count).tree_signature(Path::Tree, 1, first)))
}

fn mask(ranks: &[u32]) -> RankMask {
    ranks.iter().copied().map(Rank).collect()
}

fn result(signature: u32, seq: u64, view: u16) -> Repr {
    let (slowest, late_us) = (Some(Rank(30 + seq as u32)), 40 + seq as u32);
    Repr { signature, view, slowest, late_us, ..Rig::down(Kind::Result, seq) }
}

#[test]
fn contributions_carry_rank_and_limit() {
    let mut rig = Rig::new(8, 1);
    rig.post(1, 1.0);
    let (_, signature) = post(&mut rig, 2 * CHUNK);
    let sent: Vec<_> = rig.packets().iter().map(|(_, repr, _)| (repr.limit(), repr.slowest, repr.signature)).collect();
    let rank = Some(Rank(1));
    // The limit comes with the description.
    assert_eq!(sent[1..], [(Some((LIMIT, 0)), None, signature), (None, rank, signature), (None, rank, signature)]);
    assert_eq!((sent[0].0, sent[0].1), (None, rank));
    assert_ne!(signature, sum(2 * CHUNK).tree_signature(Path::Tree, 1, ChunkNo(1)));
}

#[test]
fn slowest_rank_is_taken_from_the_first_chunk() {
    let mut rig = Rig::new(8, 1);
    let (id, signature) = post(&mut rig, 2 * CHUNK);
    rig.drain();
    for seq in [1, 0] {
        rig.put(NODE, result(signature, seq, 0), &[0; 64]);
    }
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Completed(id)));
    let slowest = Some(Slowest { rank: Rank(30), late_us: 40 });
    assert_eq!(rig.endpoint.completion_info(), CompletionInfo { slowest, missing: RankMask::EMPTY });
}

#[test]
fn result_of_unknown_view_waits_for_the_decision() {
    let mut rig = Rig::new(8, 1);
    let (first, one) = post(&mut rig, 1);
    let (second, two) = post(&mut rig, 1);
    rig.drain();
    rig.put(NODE, result(one, 0, 1), &[0; 4]);
    rig.put(NODE, result(two, 1, 2), &[0; 4]);
    assert_eq!((rig.dropped(), rig.endpoint.poll_event()), (2, None));
    let asked = rig.drain();
    assert_eq!(asked.iter().map(|(_, repr, _)| (repr.kind, repr.view)).collect::<Vec<_>>(), [(Kind::Late, 1)]);
    // A later decision does not imply the earlier one.
    let cut = |view: u16, seq: u64| Repr { view, ..Rig::down(Kind::Cut, seq) };
    rig.put(NODE, cut(2, 1), &mask(&[3]).to_bytes());
    assert_eq!(rig.drain().len(), 1);
    rig.put(NODE, cut(1, 0), &mask(&[2]).to_bytes());
    rig.put(NODE, cut(1, 0), &mask(&[2]).to_bytes());
    rig.put(NODE, cut(2, 1), &mask(&[3]).to_bytes());
    rig.put(NODE, result(one, 0, 1), &[0; 4]);
    rig.put(NODE, result(two, 1, 2), &[0; 4]);
    for (id, missing) in [(first, mask(&[2])), (second, mask(&[2, 3]))] {
        assert_eq!(rig.endpoint.poll_event(), Some(Event::Completed(id)));
        assert_eq!(rig.endpoint.completion_info().missing, missing);
    }
    assert_eq!(rig.endpoint.excluded_ranks(), mask(&[2, 3]));
}

#[test]
fn excluded_rank_fails_at_once() {
    let mut rig = Rig::new(8, 1);
    post(&mut rig, 3 * CHUNK);
    rig.drain();
    rig.nak(NakReason::Excluded, 2, SALT ^ 1);
    assert_eq!(rig.endpoint.error(), None, "not an answer to anything of this incarnation");
    rig.nak(NakReason::Excluded, 2, SALT);
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Failed(EndpointError::Excluded)));

    let mut rig = Rig::new(8, 1);
    rig.put(NODE, Repr { view: 1, ..Rig::down(Kind::Cut, 0) }, &mask(&[1]).to_bytes());
    assert_eq!(rig.endpoint.error(), Some(EndpointError::Excluded));
}

#[test]
fn straggler_failure_names_missing_ranks_after_lower_chunks_land() {
    let mut rig = Rig::new(8, 1);
    let (id, signature) = post(&mut rig, 1);
    post(&mut rig, 1);
    rig.drain();
    let nak = Repr { reason: Some(NakReason::Stragglers), ..Rig::down(Kind::Nak, 1) };
    rig.put(NODE, nak, &[]);
    rig.put(NODE, nak, &mask(&[0, 3]).to_bytes());
    assert_eq!((rig.endpoint.error(), rig.dropped()), (None, 1), "a rank mask is required");
    rig.put(NODE, result(signature, 0, 0), &[0; 4]);
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Completed(id)));
    let error = EndpointError::Stragglers { missing: mask(&[0, 3]) };
    assert_eq!(rig.endpoint.poll_event(), Some(Event::Failed(error)));
    assert!(error.to_string().contains("ranks 0, 3 did not enter"), "{error}");
}
