//! An undivided node below a parent of several shards (PROTOCOL 1): one hop to each shard.

use super::*;
use sumac_hal::ctrl::Refusal;
use sumac_hal::shard::RUN;
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::SHORT_HEADER_LEN;

const SHARDS: u16 = 3;
/// A window over two runs of each shard.
const WINDOW: u16 = 6 * RUN as u16;

fn rig() -> Rig {
    Rig::new(Setup { window: WINDOW, slots: 2 * WINDOW, has_parent: true, parent_shards: SHARDS, ..Setup::default() })
}

fn shard_of(seq: u64) -> u16 {
    Shard::of(ChunkNo(seq), SHARDS)
}

/// Let the parent's shard of a chunk answer it.
fn answer(rig: &mut Rig, seq: u64, token: u32) {
    let result = rig.down(Kind::Result, seq, token);
    rig.put(parent_shard(shard_of(seq)), result, &floats(&[seq as f32]));
}

fn kinds(sent: &[Sent], kind: Kind) -> Vec<(Addr, u64)> {
    sent.iter().filter(|sent| sent.repr.kind == kind).map(|sent| (sent.to, sent.repr.seq.0)).collect()
}

#[test]
fn each_chunk_goes_to_its_shard_and_its_answer_to_all_children() {
    let mut rig = rig();
    let seqs = || 0..u64::from(WINDOW);
    seqs().for_each(|seq| rig.all(seq));
    let sent = rig.drain();
    let expected: Vec<_> = seqs().map(|seq| (parent_shard(shard_of(seq)), seq)).collect();
    assert_eq!(kinds(&sent, Kind::Data), expected);
    assert!(sent.iter().all(|sent| (sent.repr.key, sent.repr.child) == (PARENT_KEY, OWN_PLACE)));
    // The shards answer independently: here the last one first.
    let token = sent[0].repr.token;
    for shard in (0..SHARDS).rev() {
        seqs().filter(|seq| shard_of(*seq) == shard).for_each(|seq| answer(&mut rig, seq, token));
    }
    let down = rig.drain();
    for child in 0..2 {
        let mut values: Vec<_> = down
            .iter()
            .filter(|sent| sent.to == child_addr(child))
            .map(|sent| (sent.repr.seq.0, sent.floats()))
            .collect();
        values.sort_by_key(|(seq, _)| *seq);
        assert_eq!(values, seqs().map(|seq| (seq, vec![seq as f32])).collect::<Vec<_>>());
    }
    assert_eq!(rig.node.poll_timeout(), Some(rig.now + core::time::Duration::from_millis(LEASE_MS.into())), "idle");
}

#[test]
fn each_shard_is_told_of_the_operation() {
    const CHUNK: u16 = 128;
    let elements = usize::from(CHUNK) / 4;
    let mut rig = Rig::new(Setup {
        window: WINDOW,
        slots: 2 * WINDOW,
        has_parent: true,
        parent_shards: SHARDS,
        chunk_len_bytes: CHUNK,
        ..Setup::default()
    });
    for seq in 0..u64::from(WINDOW) {
        (0..2).for_each(|child| rig.data(child, seq, &vec![1.0; elements]));
    }
    let sent = rig.drain();
    let told: Vec<_> = kinds(&sent, Kind::Operation).into_iter().map(|(to, _)| to).collect();
    assert_eq!(told, (0..SHARDS).map(parent_shard).collect::<Vec<_>>());
    assert!(sent.iter().filter(|sent| sent.repr.kind == Kind::Data).all(|sent| sent.repr.flags.contains(Flags::SHORT)));
    let nak = rig.down(Kind::Nak, RUN, sent[0].repr.token);
    rig.put(parent_shard(1), Repr { reason: Some(NakReason::UnknownOperation), ..nak }, &[]);
    let again = rig.drain();
    assert_eq!(kinds(&again, Kind::Operation), [(parent_shard(1), RUN)], "described to that shard again");
    assert_eq!(kinds(&again, Kind::Data), [(parent_shard(1), RUN)]);
}

#[test]
fn answer_of_another_shard_is_dropped() {
    let mut rig = rig();
    rig.all(0);
    let token = rig.drain()[0].repr.token;
    for other in 1..SHARDS {
        let result = rig.down(Kind::Result, 0, token);
        rig.put(parent_shard(other), result, &floats(&[9.0]));
    }
    assert_eq!((rig.drain(), rig.dropped(DropReason::BadShard)), (vec![], 2));
    let foreign = rig.down(Kind::Result, 0, token);
    rig.put(parent_shard(SHARDS), foreign, &floats(&[9.0]));
    assert_eq!(rig.drain(), [], "no shard of the parent has this address");
    answer(&mut rig, 0, token);
    assert_eq!(kinds(&rig.drain(), Kind::Result).len(), 2);
}

#[test]
fn contribution_lost_on_the_way_to_a_shard_is_sent_to_it_again() {
    let mut rig = rig();
    (0..4 * RUN).for_each(|seq| rig.all(seq));
    let token = rig.drain()[0].repr.token;
    // All but the second shard answer; that one gets its first chunk only.
    (0..4 * RUN).filter(|seq| shard_of(*seq) != 1).for_each(|seq| answer(&mut rig, seq, token));
    rig.drain();
    rig.now = rig.node.poll_timeout().expect("armed by the contributions");
    rig.node.handle_timeout(rig.now);
    let sent = rig.drain();
    let [probe] = &sent[..] else { panic!("one shard owes answers: {sent:?}") };
    assert_eq!((probe.to, probe.repr.kind, probe.repr.seq.0), (parent_shard(1), Kind::Probe, RUN));
    assert_eq!(u64::from(probe.repr.count), RUN, "chunks of that shard only");
    let status = Repr { bits: 0b11, count: probe.repr.count, ..rig.down(Kind::Status, RUN, probe.repr.token) };
    rig.put(parent_shard(2), status, &[]);
    assert_eq!(rig.drain(), [], "nobody asked that shard");
    rig.put(parent_shard(1), status, &[]);
    let again = kinds(&rig.drain(), Kind::Data);
    assert_eq!(again, (RUN + 2..2 * RUN).map(|seq| (parent_shard(1), seq)).collect::<Vec<_>>());
}

#[test]
fn gap_in_the_answers_of_a_shard_is_requested_from_it() {
    let mut rig = rig();
    (0..3 * RUN).for_each(|seq| rig.all(seq));
    let token = rig.drain()[0].repr.token;
    // Answers of other shards say nothing about chunk 0.
    (RUN..3 * RUN).for_each(|seq| answer(&mut rig, seq, token));
    assert_eq!(kinds(&rig.drain(), Kind::Nak), []);
    (1..4).for_each(|seq| answer(&mut rig, seq, token));
    let sent = rig.drain();
    let [nak] = &sent.iter().filter(|sent| sent.repr.kind == Kind::Nak).collect::<Vec<_>>()[..] else {
        panic!("{sent:?}")
    };
    assert_eq!((nak.to, nak.repr.seq.0, nak.is_nak(NakReason::Missing)), (parent_shard(0), 0, true));
}

#[test]
fn silent_shard_fails_the_group_once_from_its_first_chunk_without_an_answer() {
    let mut rig = rig();
    (0..3 * RUN).for_each(|seq| rig.all(seq));
    let token = rig.drain()[0].repr.token;
    answer(&mut rig, RUN, token);
    (2 * RUN..3 * RUN - 1).for_each(|seq| answer(&mut rig, seq, token));
    rig.drain();
    // The first and the last shard go on to answer probes; the second one is silent.
    let dead = rig.now + HopTimers::DEFAULT.dead;
    let mut failed = Vec::new();
    while rig.now < dead + core::time::Duration::from_secs(1) {
        rig.now = rig.node.poll_timeout().expect("chunks are open");
        rig.node.handle_timeout(rig.now);
        for sent in rig.drain() {
            if sent.repr.kind == Kind::Probe && sent.to != parent_shard(1) {
                let status =
                    Repr { bits: u64::MAX, count: 16, ..rig.down(Kind::Status, sent.repr.seq.0, sent.repr.token) };
                rig.put(sent.to, status, &[]);
            } else if sent.is_nak(NakReason::PathLost) && sent.to == child_addr(0) {
                failed.push(sent.repr.seq.0);
            }
        }
    }
    let event = crate::Event::GroupFailed { group: group_id(0), from: ChunkNo(RUN + 1), reason: NakReason::PathLost };
    assert_eq!((rig.node.poll_event(), rig.node.poll_event()), (Some(event), None));
    failed.sort_unstable();
    let open: Vec<u64> = (RUN + 1..2 * RUN).chain([3 * RUN - 1]).collect();
    assert_eq!(failed, open, "chunks behind the failure that have no answer");
    // A chunk gets one answer: nothing of another shard follows the Nak.
    answer(&mut rig, 3 * RUN - 1, token);
    assert_eq!(rig.drain(), []);
    // Chunks before the failure are still answered.
    (0..RUN).for_each(|seq| answer(&mut rig, seq, token));
    assert_eq!(kinds(&rig.drain(), Kind::Result).len(), 2 * RUN as usize);
}

#[test]
fn window_is_the_smallest_that_a_shard_grants() {
    let mut rig = rig();
    (0..2 * RUN).for_each(|seq| rig.all(seq));
    let token = rig.drain()[0].repr.token;
    let mut grant = |seq: u64, window: u16| {
        let result = Repr { window, ..rig.down(Kind::Result, seq, token) };
        rig.put(parent_shard(shard_of(seq)), result, &floats(&[1.0]));
        rig.drain()[0].repr.window
    };
    assert_eq!([grant(0, 20), grant(RUN, 7), grant(1, 30), grant(RUN + 1, 40)], [20, 7, 7, 30]);
}

#[test]
fn paths_to_all_shards_are_probed_and_the_narrowest_counts() {
    const CHUNK: u16 = 1424;
    let longest = usize::from(CHUNK) + SHORT_HEADER_LEN;
    let mut rig = Rig::new(Setup { has_parent: true, parent_shards: 2, chunk_len_bytes: CHUNK, ..Setup::default() });
    let ask = |rig: &mut Rig| rig.node.control(&Request::ProbePath(group_id(0)), rig.now);
    let path = |max_packet_len_bytes| Response::Path { max_packet_len_bytes };
    assert_eq!(ask(&mut rig), path(None));
    for carries in [[longest, 0], [longest, 1296]] {
        for _ in 0..500 {
            rig.pass_ms(1);
            for sent in rig.drain() {
                let shard = usize::from(sent.to == parent_shard(1));
                if sent.repr.packet_len() <= carries[shard] {
                    let status = Repr { count: 0, ..rig.down(Kind::Status, 0, sent.repr.token) };
                    rig.put(sent.to, status, &sent.payload);
                }
            }
        }
        let known = (carries[1] > 0).then_some(1296);
        assert_eq!(ask(&mut rig), path(known), "{carries:?}");
    }
}

#[test]
fn parent_of_several_shards_needs_as_many_free_hops() {
    let of_one = Setup { has_parent: true, groups: 2, ..Setup::default() };
    let refusal = |parent| Response::Refused(Refusal::Shards { parent, own: 1 });
    let ask = |node: &mut Node<'_>, request| node.control(&request, Instant::ZERO);
    // The board has two hops in all.
    let mut node = bare(&of_one);
    for (parent_shards, answer) in [(3, refusal(3)), (8, refusal(8)), (2, Response::Done)] {
        let tree = tree_config(&Setup { parent_shards, ..of_one });
        assert_eq!(ask(&mut node, Request::InstallTree(tree)), answer, "{parent_shards}");
    }
    let no_addr = NodeParent { data_addrs: Default::default(), child: OWN_PLACE };
    let tree = TreeConfig { parent: Some(no_addr), ..tree_config(&of_one) };
    assert_eq!(ask(&mut node, Request::InstallTree(tree)), refusal(0));
    let [first, second] = [0, 1].map(|group| Request::CreateGroup(group_config(&of_one, group)));
    assert_eq!(ask(&mut node, first.clone()), Response::Done);
    assert_eq!(ask(&mut node, second.clone()), refusal(2), "both are in use");
    assert_eq!(node.stats().groups, 1);
    assert_eq!(ask(&mut node, Request::ReleaseGroup(group_id(0))), Response::Done);
    assert_eq!(ask(&mut node, second), Response::Done);
}

/// Shards of the root do not decide together, so nobody may be held back or excluded below them.
#[test]
fn node_below_several_shards_neither_introduces_itself_nor_decides() {
    let setup = Setup { has_parent: true, parent_shards: SHARDS, ranks: &[0, 1], ..Setup::default() };
    let mut rig = Rig::new(setup);
    rig.pass_ms(200);
    assert_eq!(rig.drain(), [], "no introduction");
    let limit = sumac_hal::wire::StragglerLimit { us: 1000, cuts: true };
    let mut repr = rig.up(Kind::Data, 0, 0);
    repr.set_limit(limit, 0);
    rig.put(child_addr(0), repr, &floats(&[1.0]));
    rig.pass_ms(500);
    assert_eq!(rig.drain(), [], "it waits");
}
