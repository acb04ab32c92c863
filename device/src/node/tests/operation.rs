//! Data that names its operation by signature: combined only if the node knows the operation, and asked about else.

use super::*;
use sumac_hal::op::Collective;
use sumac_hal::wire::StragglerLimit;

/// As many values as fill a chunk.
const FULL: usize = 16;

/// Operation `number` of a sequence: they differ in their counts.
fn op(number: u64) -> OpDesc {
    OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1000 + number)
}

impl Rig {
    /// A header of a contribution to an operation, in the full form.
    fn header_of(&self, kind: Kind, child: u16, seq: u64, desc: &OpDesc) -> Repr {
        let mut repr = Repr { signature: desc.signature(Path::Tree, 1), ..self.up(kind, child, seq) };
        repr.set_op(desc);
        repr
    }

    /// Let `child` contribute a whole chunk of `value`, under a short header.
    fn short(&mut self, child: u16, seq: u64, desc: &OpDesc, value: f32) {
        let mut repr = self.header_of(Kind::Data, child, seq, desc);
        repr.flags |= Flags::SHORT;
        self.put(child_addr(child), repr, &floats(&[value; FULL]));
    }

    fn describe(&mut self, child: u16, seq: u64, desc: &OpDesc) {
        let repr = self.header_of(Kind::Operation, child, seq, desc);
        self.put(child_addr(child), repr, &[]);
    }

    /// Check that the node asks `child` about the operation of `seq`, and sends nothing else.
    fn expect_question(&mut self, child: u16, seq: u64) {
        let sent = self.drain();
        let [nak] = &sent[..] else { panic!("one packet: {sent:?}") };
        assert!(nak.is_nak(NakReason::UnknownOperation), "{nak:?}");
        assert_eq!((nak.to, nak.repr.seq, nak.repr.token), (child_addr(child), ChunkNo(seq), token(child)));
    }

    fn sums(&mut self) -> Vec<f32> {
        let results = self.drain().into_iter().filter(|sent| sent.repr.kind == Kind::Result);
        results.map(|sent| sent.floats()[0]).collect()
    }
}

#[test]
fn operation_that_one_child_describes_is_known_of_all() {
    let mut rig = Rig::new(Setup::default());
    rig.describe(0, 0, &OP);
    for seq in 0..3 {
        rig.short(0, seq, &OP, 1.0);
        rig.short(1, seq, &OP, 2.0);
        assert_eq!(rig.sums(), [3.0, 3.0], "chunk {seq}");
    }
    assert_eq!(rig.dropped(DropReason::UnknownOperation), 0);
}

#[test]
fn full_header_describes_its_operation() {
    let mut rig = Rig::new(Setup::default());
    rig.data(0, 0, &[1.0]);
    rig.short(1, 1, &OP, 2.0);
    rig.short(0, 1, &OP, 1.0);
    assert_eq!(rig.sums(), [3.0, 3.0]);
}

#[test]
fn chunk_of_an_unknown_operation_is_not_combined_but_asked_about() {
    let mut rig = Rig::new(Setup::default());
    rig.describe(1, 0, &op(1));
    rig.short(0, 0, &OP, 64.0);
    rig.expect_question(0, 0);
    assert_eq!(rig.dropped(DropReason::UnknownOperation), 1);
    // No slot was begun, so another operation can have the chunk.
    rig.short(1, 0, &op(1), 2.0);
    rig.short(0, 0, &op(1), 1.0);
    assert_eq!(rig.sums(), [3.0, 3.0]);
    // The sender describes it, and sends the chunk again.
    rig.short(0, 1, &OP, 64.0);
    rig.expect_question(0, 1);
    rig.describe(0, 1, &OP);
    rig.short(0, 1, &OP, 5.0);
    rig.short(1, 1, &OP, 6.0);
    assert_eq!(rig.sums(), [11.0, 11.0]);
}

#[test]
fn operation_is_forgotten_after_others_and_asked_about_again() {
    let mut rig = Rig::new(Setup::default());
    rig.describe(0, 0, &OP);
    (1..=8).for_each(|number| rig.describe(0, 0, &op(number)));
    rig.short(0, 0, &OP, 1.0);
    rig.expect_question(0, 0);
    rig.describe(0, 0, &OP);
    rig.short(0, 0, &OP, 1.0);
    (1..=8).for_each(|number| rig.describe(0, 0, &op(number)));
    rig.short(1, 0, &OP, 2.0);
    assert_eq!(rig.sums(), [3.0, 3.0], "the slot knows its operation");
}

#[test]
fn differing_operations_are_compared_before_any_data_is_combined() {
    let mut rig = Rig::new(Setup::default());
    rig.describe(0, 0, &OP);
    rig.short(0, 0, &OP, 1.0);
    // One that the node does not know is no mismatch yet: nobody could name it.
    rig.short(1, 0, &op(1), 2.0);
    rig.expect_question(1, 0);
    rig.describe(1, 0, &op(1));
    rig.short(1, 0, &op(1), 2.0);
    let sent = rig.drain();
    assert_eq!(sent.len(), 2);
    for nak in &sent {
        assert!(nak.is_nak(NakReason::Mismatch), "{nak:?}");
        assert_eq!((nak.repr.op_desc(), sumac_hal::wire::unpack_op(nak.repr.bits2)), (Some(OP), Some(op(1))));
    }
}

#[test]
fn short_packet_smaller_than_the_nak_that_answers_it_is_dropped() {
    let mut rig = Rig::new(Setup::default());
    rig.describe(0, 0, &OP);
    let repr = Repr { flags: Flags::SHORT, ..rig.up(Kind::Data, 0, 0) };
    rig.put(child_addr(0), repr, &floats(&[1.0; 9]));
    assert_eq!((rig.dropped(DropReason::BadShape), rig.drain()), (1, vec![]));
    rig.put(child_addr(0), repr, &floats(&[1.0; 10]));
    assert_eq!(rig.node.counters().contributions, 1);
    // Nor is anyone answered who is not a child.
    let unknown = Repr { group: GroupId(99), ..repr };
    rig.put(child_addr(0), unknown, &floats(&[1.0; 9]));
    assert_eq!(rig.drain(), []);
    rig.put(child_addr(0), unknown, &floats(&[1.0; 10]));
    assert!(rig.drain()[0].is_nak(NakReason::UnknownGroup));
}

#[test]
fn description_without_a_collective_is_dropped() {
    let mut rig = Rig::new(Setup::default());
    let repr = Repr { collective: None, ..rig.up(Kind::Operation, 0, 0) };
    rig.put(child_addr(0), repr, &[]);
    assert_eq!(rig.dropped(DropReason::BadKind), 1);
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    let repr = Repr { collective: Some(Collective::AllReduce), ..rig.down(Kind::Operation, 0, 0) };
    rig.put(PARENT, repr, &[]);
    assert_eq!(rig.dropped(DropReason::BadKind), 1, "a parent describes nothing");
}

#[test]
fn limit_of_an_operation_comes_with_its_description() {
    let mut rig = Rig::new(Setup::default());
    let mut repr = rig.header_of(Kind::Operation, 0, 2, &OP);
    let limit = StragglerLimit { us: 700, cuts: true };
    repr.set_limit(limit, 2);
    rig.put(child_addr(0), repr, &[]);
    rig.short(0, 3, &OP, 1.0);
    let slot = &rig.node.storage.slots[3];
    assert_eq!((slot.limit, slot.op_first), (Some(limit), 0));
}

/// The chunk would be the root's to wait for, at a negative distance from its operation's first.
#[test]
fn limit_is_ignored_by_a_chunk_before_the_described_operation() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    let mut repr = rig.header_of(Kind::Operation, 0, 3, &OP);
    repr.set_limit(StragglerLimit { us: 700, cuts: true }, 0);
    rig.put(child_addr(0), repr, &[]);
    (0..2).for_each(|child| rig.short(child, 2, &OP, 1.0));
    assert_eq!(rig.node.storage.slots[2].limit, None);
    assert_eq!(rig.drain().last().map(Sent::floats), Some(vec![2.0; FULL]));
}

#[test]
fn inner_node_describes_an_operation_once_and_again_when_asked() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    rig.describe(0, 0, &OP);
    let kinds = |sent: &[Sent]| -> Vec<(Kind, bool)> {
        sent.iter().map(|sent| (sent.repr.kind, sent.repr.flags.contains(Flags::SHORT))).collect()
    };
    let (described, short) = ((Kind::Operation, false), (Kind::Data, true));
    for (seq, expected) in [(0, &[described, short][..]), (1, &[short])] {
        rig.short(0, seq, &OP, 1.0);
        rig.short(1, seq, &OP, 2.0);
        let sent = rig.drain();
        assert_eq!(kinds(&sent), expected, "chunk {seq}");
        assert!(sent.iter().all(|sent| sent.to == PARENT && sent.repr.signature == OP.signature(Path::Tree, 1)));
        assert!(sent.iter().all(|sent| sent.repr.kind == Kind::Data || sent.repr.op_desc() == Some(OP)));
        assert_eq!(sent.last().map(Sent::floats), Some(vec![3.0; FULL]));
    }
    let own = rig.node.storage.groups[0].as_ref().expect("the group").token;
    let nak = Repr { reason: Some(NakReason::UnknownOperation), ..rig.down(Kind::Nak, 1, own) };
    rig.put(PARENT, Repr { token: own ^ 1, ..nak }, &[]);
    assert_eq!(rig.drain(), [], "not our token");
    rig.put(PARENT, nak, &[]);
    assert_eq!(kinds(&rig.drain()), [described, short]);
    // The description of a small operation takes no packet of its own.
    for child in 0..2 {
        let repr = rig.header_of(Kind::Data, child, 2, &op(1));
        rig.put(child_addr(child), repr, &floats(&[1.0; 6]));
    }
    assert_eq!(kinds(&rig.drain()), [(Kind::Data, false)]);
}

#[test]
fn answer_with_another_signature_is_dropped() {
    let mut rig = Rig::new(Setup { has_parent: true, ..Setup::default() });
    rig.all(0);
    rig.drain();
    let result = rig.down(Kind::Result, 0, 0);
    rig.put(PARENT, Repr { signature: result.signature ^ 1, ..result }, &floats(&[9.0]));
    assert_eq!((rig.dropped(DropReason::Unexpected), rig.drain()), (1, vec![]));
    rig.put(PARENT, result, &floats(&[9.0]));
    assert_eq!(rig.drain().len(), 2);
}
