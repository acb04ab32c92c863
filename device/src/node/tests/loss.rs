//! Loss recovery: gaps, probes, resends, and how little traffic they cause (PROTOCOL 3).

use super::*;

fn naks(sent: &[Sent], reason: NakReason) -> Vec<(Addr, u64)> {
    sent.iter().filter(|sent| sent.is_nak(reason)).map(|sent| (sent.to, sent.repr.seq.0)).collect()
}

#[test]
fn gap_naks_once_after_three_later_chunks() {
    let mut rig = Rig::new(Setup::default());
    for seq in [1, 2] {
        rig.data(0, seq, &[1.0]);
        assert_eq!(rig.drain(), [], "{seq}: may be reordered only");
    }
    rig.data(0, 3, &[1.0]);
    let sent = rig.drain();
    assert_eq!(naks(&sent, NakReason::Missing), [(child_addr(0), 0)]);
    assert_eq!((sent[0].repr.token, sent[0].repr.key), (token(0), key(0, 0)), "echoes the child's own token");
    for seq in [4, 6, 7] {
        rig.data(0, seq, &[1.0]);
        assert_eq!(rig.drain(), [], "{seq}: chunk 0 was asked for, chunk 5 has two later ones");
    }
    rig.data(0, 0, &[1.0]);
    rig.data(0, 5, &[1.0]);
    assert_eq!(rig.drain(), []);
    assert_eq!(rig.node.counters().naks, 1);
}

/// A resent chunk can be lost as well, and nothing else would show that before a probe.
#[test]
fn gap_naks_again_after_a_quarter_window() {
    let mut rig = Rig::new(Setup { window: 16, slots: 32, ..Setup::default() });
    let mut requested = Vec::new();
    for seq in 1..16 {
        rig.data(0, seq, &[1.0]);
        requested.extend(naks(&rig.drain(), NakReason::Missing).iter().map(|(_, missing)| (seq, *missing)));
    }
    assert_eq!(requested, [(3, 0), (10, 0)], "a quarter of the window of 16, plus three");
}

/// A chunk completes late because a contribution was lost, so its answer follows those of later chunks. A child that
/// requested it meanwhile gets it once.
#[test]
fn overtaken_answer_is_not_resent() {
    let mut rig = Rig::new(Setup { children: 2, window: 16, slots: 32, ..Setup::default() });
    (1..5).for_each(|seq| rig.all(seq));
    rig.drain();
    let missing = |rig: &mut Rig, top: u64| {
        let nak = Repr { reason: Some(NakReason::Missing), bits: top, count: 1, ..rig.up(Kind::Nak, 1, 0) };
        rig.put(child_addr(1), nak, &[]);
        rig.drain().iter().filter(|sent| sent.repr.kind == Kind::Result).count()
    };
    rig.all(0);
    assert_eq!(rig.drain().iter().filter(|sent| sent.repr.kind == Kind::Result).count(), 2);
    assert_eq!(missing(&mut rig, 3), 0, "chunk 3 was answered before chunk 0");
    assert_eq!(missing(&mut rig, 4), 0);
    rig.all(5);
    rig.drain();
    assert_eq!(missing(&mut rig, 5), 1, "chunk 5 was answered after it: it is lost");
}

#[test]
fn loss_naks_only_its_child_and_halves_the_window_once() {
    let mut rig = Rig::new(Setup { receive_buffer_bytes: 16 * 160, ..Setup::default() });
    (0..7).for_each(|seq| rig.data(1, seq, &[1.0]));
    assert_eq!(rig.drain(), []);
    // Chunks 0 and 1 are lost together: both are requested, and the window (8) is cut once.
    (2..7).for_each(|seq| rig.data(0, seq, &[1.0]));
    assert_eq!(naks(&rig.drain()[..2], NakReason::Missing), [(child_addr(0), 0), (child_addr(0), 1)]);
    assert_eq!(rig.node.counters().window_cuts, 1);
    rig.data(0, 0, &[1.0]);
    assert_eq!(rig.drain()[0].repr.window, 4, "halved, and growing by less than one per chunk");
}

#[test]
fn status_reports_received_chunks_and_sent_answers() {
    let mut rig = Rig::new(Setup { children: 2, ..Setup::default() });
    rig.all(0);
    rig.data(0, 1, &[1.0]);
    rig.data(1, 2, &[1.0]);
    rig.drain();
    rig.probe(0, 0, 4, 0b0001);
    let sent = rig.drain();
    let [status] = &sent[..] else { panic!("the child has chunk 0's answer already: {sent:?}") };
    assert_eq!((status.repr.kind, status.repr.token), (Kind::Status, 0x9999));
    assert_eq!((status.repr.seq.0, status.repr.count), (0, 4));
    assert_eq!((status.repr.bits, status.repr.bits2), (0b0011, 0b0001));
    // The other child probes another range, and lacks the answer: it may be on its way.
    rig.probe_for(1, 0, 64, 0, 0);
    let sent = rig.drain();
    assert_eq!(sent.len(), 1, "{sent:?}");
    assert_eq!((sent[0].repr.bits, sent[0].repr.bits2), (0b0101, 0b0001));
    // It requests the answer, which comes behind the Status.
    rig.probe_for(1, 0, 64, 0, 0b0001);
    let sent = rig.drain();
    assert_eq!((sent[0].repr.bits, sent[0].repr.bits2), (0b0101, 0));
    assert_eq!((sent[1].repr.kind, sent[1].repr.seq.0, sent[1].to), (Kind::Result, 0, child_addr(1)));
    assert_eq!(sent.len(), 2);
    assert_eq!(rig.node.counters().answers_resent, 1);
}

#[test]
fn probe_with_extreme_numbers_gets_an_empty_status() {
    let mut rig = Rig::new(Setup::default());
    rig.all(0);
    rig.drain();
    for (seq, count) in [(u64::MAX, 64), (u64::MAX - 5, u16::MAX), (0, 0), (1 << 63, 64)] {
        rig.probe(0, seq, count, 0);
        let sent = rig.drain();
        assert_eq!(sent.len(), 1, "{sent:?}");
        assert_eq!((sent[0].repr.kind, sent[0].repr.bits), (Kind::Status, 0));
    }
}

#[test]
fn resends_are_limited_by_credit() {
    let mut rig = Rig::new(Setup::default());
    rig.all(0);
    rig.drain();
    // One contribution earns one resend; a Nak earns none.
    for expected in [1, 0, 0] {
        rig.nak(0, NakReason::Missing, 0);
        assert_eq!(rig.drain().len(), expected);
    }
    // A probe earns the answer that it requests.
    for _ in 0..5 {
        rig.probe(0, 0, 1, 0);
        assert_eq!(rig.drain().len(), 2, "Status and Result");
    }
    assert_eq!(rig.node.counters().answers_resent, 6);
    // An answer that is about to be sent anyway is not sent twice.
    rig.all_have(1);
    rig.all(1);
    rig.nak(0, NakReason::Missing, 1);
    assert_eq!(rig.drain().len(), 2);
}

/// An overtaken probe requests an answer that its sender has reported to have since. Resending it would be useless, and
/// would keep the slot from the next chunk, which has arrived in the same burst.
#[test]
fn overtaken_probe_does_not_keep_a_slot_busy() {
    let mut rig = Rig::new(Setup { window: 1, slots: 2, ..Setup::default() });
    for seq in 0..2 {
        rig.all_have(seq);
        rig.all(seq);
        rig.drain();
    }
    rig.have[0] = 0;
    rig.probe(0, 0, 1, 0);
    rig.nak(0, NakReason::Missing, 0);
    rig.have[0] = 2;
    rig.data(0, 2, &[1.0]);
    assert_eq!(rig.dropped(DropReason::SlotBusy), 0);
    assert!(rig.drain().iter().all(|sent| sent.repr.kind == Kind::Status));
}

#[test]
fn unknown_senders_get_rate_limited_naks() {
    let mut rig = Rig::new(Setup::default());
    let unknown = Addr::Emu(500);
    type Change = fn(&mut Repr);
    let cases: [(NakReason, Change); 2] = [
        (NakReason::UnknownGroup, |repr| repr.group = GroupId(99)),
        (NakReason::WrongEpoch, |repr| repr.epoch = Epoch { term: 0, counter: 9 }),
    ];
    for (reason, change) in cases {
        for kind in [Kind::Data, Kind::Empty, Kind::Probe] {
            let mut repr = Repr { key: 0x77, token: 0x55, ..rig.up(kind, 1, 3) };
            change(&mut repr);
            rig.put(unknown, repr, &[]);
            let sent = rig.drain();
            let [nak] = &sent[..] else { panic!("one answer: {sent:?}") };
            assert!(nak.to == unknown && nak.is_nak(reason));
            let echo = |r: &Repr| (r.group, r.epoch, r.child, r.key, r.seq, r.token);
            assert_eq!(echo(&nak.repr), echo(&repr));
        }
        // Packets that are answers themselves are never answered: two nodes could go on forever.
        for kind in [Kind::Result, Kind::Done, Kind::Status] {
            let mut repr = rig.up(kind, 1, 3);
            change(&mut repr);
            rig.put(unknown, repr, &[]);
        }
        let mut nak = Repr { reason: Some(reason), ..rig.up(Kind::Nak, 1, 3) };
        change(&mut nak);
        rig.put(unknown, nak, &[]);
        assert_eq!(rig.drain(), []);
    }
    let flood = |rig: &mut Rig| {
        let repr = Repr { group: GroupId(99), ..rig.up(Kind::Probe, 0, 0) };
        (0..1000).for_each(|_| rig.put(unknown, repr, &[]));
        rig.drain().len()
    };
    rig.pass_ms(1);
    assert_eq!(flood(&mut rig), 16);
    assert_eq!(flood(&mut rig), 0, "in the same millisecond");
    rig.pass_ms(1);
    assert_eq!(flood(&mut rig), 16);
}

#[test]
fn uplink_probes_with_backoff_and_resends_only_missing_chunks() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    (0..3).for_each(|seq| rig.all(seq));
    assert_eq!(rig.drain().len(), 3);
    let due = rig.node.poll_timeout().expect("armed by the contributions");
    rig.now = due;
    rig.node.handle_timeout(due);
    let sent = rig.drain();
    let [probe] = &sent[..] else { panic!("a header, no payload: {sent:?}") };
    assert_eq!((probe.repr.kind, probe.repr.seq.0, probe.repr.count), (Kind::Probe, 0, 3));
    let later = rig.node.poll_timeout().expect("armed again");
    assert!(later > due);
    // The parent has 0 and 2; a Status that echoes another token is ignored.
    let wrong = Repr { bits: 0, count: 3, ..rig.down(Kind::Status, 0, probe.repr.token ^ 1) };
    rig.put(PARENT, wrong, &[]);
    assert_eq!(rig.drain(), []);
    let status = Repr { bits: 0b101, count: 3, ..rig.down(Kind::Status, 0, probe.repr.token) };
    rig.put(PARENT, status, &[]);
    let sent = rig.drain();
    assert_eq!(sent.iter().map(|sent| (sent.repr.kind, sent.repr.seq.0)).collect::<Vec<_>>(), [(Kind::Data, 1)]);
    rig.put(PARENT, status, &[]);
    assert_eq!(rig.drain(), [], "a duplicate Status counts once");
    assert_eq!(rig.node.counters().contributions_resent, 1);
    let missing = Repr { reason: Some(NakReason::Missing), ..rig.down(Kind::Nak, 2, probe.repr.token) };
    rig.put(PARENT, missing, &[]);
    assert_eq!(rig.drain(), [], "the probe's token has been used");
    rig.put(PARENT, Repr { token: sent[0].repr.token, ..missing }, &[]);
    assert_eq!(rig.drain()[0].repr.seq.0, 2);
}

#[test]
fn gap_in_the_parents_answers_naks_after_three_later_ones() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    (0..4).for_each(|seq| rig.all(seq));
    let own = rig.drain()[0].repr.token;
    for seq in 1..4 {
        let result = rig.down(Kind::Result, seq, own);
        rig.put(PARENT, result, &floats(&[1.0]));
        let requested = naks(&rig.drain(), NakReason::Missing);
        assert_eq!(requested, if seq == 3 { vec![(PARENT, 0)] } else { vec![] });
    }
}

#[test]
fn straggler_causes_header_only_probes() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    rig.all(0);
    let data_bytes: usize = rig.drain().iter().map(|sent| sent.payload.len()).sum();
    assert_eq!(data_bytes, 4);
    // Ten seconds without a result; the parent answers each probe: everything received, nothing complete.
    let end = rig.now + core::time::Duration::from_secs(10);
    let mut probes = 0;
    while let Some(due) = rig.node.poll_timeout().filter(|&at| at < end) {
        rig.now = due;
        rig.node.handle_timeout(due);
        for sent in rig.drain() {
            assert_eq!((sent.repr.kind, sent.payload.len()), (Kind::Probe, 0));
            probes += 1;
            let status = Repr { bits: 1, count: 1, ..rig.down(Kind::Status, 0, sent.repr.token) };
            rig.put(PARENT, status, &[]);
        }
    }
    assert!((90..150).contains(&probes), "{probes}: at most one each 100 ms, after the back-off");
    assert_eq!(rig.node.poll_event(), None, "and the hop is not dead");
}

/// Reports about chunks far beyond the window cut nothing, and do not suppress later cuts.
#[test]
fn only_chunks_within_the_window_cut_it() {
    let mut rig = Rig::new(Setup { window: 32, slots: 64, ..Setup::default() });
    let cuts = |rig: &Rig| rig.node.counters().window_cuts;
    rig.data(0, 0, &[1.0]);
    let far = 1 << 40;
    let marked = Repr { flags: Flags::WANT | Flags::CONGESTED, ..rig.up(Kind::Data, 0, far) };
    rig.put(child_addr(0), marked, &[0; 4]);
    let probe = |rig: &Rig, seq: u64| Repr { count: 8, ..rig.up(Kind::Probe, 0, seq) };
    let lost = probe(&rig, far);
    rig.put(child_addr(0), lost, &[]);
    assert_eq!(cuts(&rig), 0, "no such chunk is in flight");
    let lost = probe(&rig, 1);
    rig.put(child_addr(0), lost, &[]);
    assert_eq!(cuts(&rig), 1, "all eight are missing");
    let marked = Repr { flags: Flags::WANT | Flags::CONGESTED, ..rig.up(Kind::Data, 0, 20) };
    rig.put(child_addr(0), marked, &[0; 4]);
    assert_eq!(cuts(&rig), 2, "the next window's");
}

/// A congestion mark on the way up cuts the window like a loss, once per window; one on the way down is reported to the
/// parent once.
#[test]
fn congestion_mark_cuts_the_window_and_is_echoed_once() {
    let mut rig = Rig::new(Setup { window: 32, slots: 64, has_parent: true, ..Setup::default() });
    let contribute = |rig: &mut Rig, child: u16, seq: u64, marked: bool| {
        let repr = Repr { payload_len_bytes: 4, ..rig.up(Kind::Data, child, seq) };
        let mut bytes = vec![0; repr.packet_len()];
        repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(&[0; 4]));
        rig.node.handle(rig.now, child_addr(child), Ecn::from_mark(marked), &bytes);
    };
    let cuts = |rig: &Rig| rig.node.counters().window_cuts;
    contribute(&mut rig, 0, 0, false);
    assert_eq!(cuts(&rig), 0);
    contribute(&mut rig, 0, 1, true);
    contribute(&mut rig, 0, 1, true);
    assert_eq!(cuts(&rig), 1, "once a window");
    contribute(&mut rig, 0, 2, true);
    assert_eq!(cuts(&rig), 2, "the next window's");
    assert_eq!(rig.node.counters().marked, 3, "each marked packet is counted, the dropped one, too");
    // The other child's echo of a mark on the way down has the same effect.
    let echo = Repr { flags: Flags::WANT | Flags::CONGESTED, ..rig.up(Kind::Data, 1, 3) };
    rig.put(child_addr(1), echo, &[0; 4]);
    assert_eq!(cuts(&rig), 3);
    contribute(&mut rig, 1, 0, false);
    let up = rig.drain();
    let of_data = |sent: &[Sent]| sent.iter().filter(|sent| sent.repr.kind == Kind::Data).cloned().collect::<Vec<_>>();
    assert!(
        of_data(&up).iter().all(|sent| !sent.repr.flags.contains(Flags::CONGESTED)),
        "marks on the way up are not reported to the parent"
    );
    let result = rig.down(Kind::Result, 0, up[0].repr.token);
    let repr = Repr { payload_len_bytes: 4, ..result };
    let mut bytes = vec![0; repr.packet_len()];
    repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(&[0; 4]));
    rig.node.handle(rig.now, PARENT, Ecn::Ce, &bytes);
    (1..3).for_each(|seq| contribute(&mut rig, 1, seq, false));
    let echoed: Vec<bool> =
        of_data(&rig.drain()).iter().map(|sent| sent.repr.flags.contains(Flags::CONGESTED)).collect();
    assert_eq!(echoed, [true, false], "reported once");
}
