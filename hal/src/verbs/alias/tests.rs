use super::firmware::{Firmware, FunctionHandle, Key};
use super::*;
use crate::dma::{Address, Chain, Completion, Engine, RegionKey, Scope, Status, Step, Tag};
use crate::verbs::copying::tests::Words;
use crate::verbs::copying::{BatchOutcome, Copier, Copy, CopyEngine, MapMemoryError, NotPosted};
use crate::verbs::fake::machine;
use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicU64, Ordering};

const HOST: u16 = 1;
const CARD: u16 = 7;
const LEN: usize = 256;

impl Words {
    fn of(value: u64) -> Arc<Self> {
        Arc::new(Self((0..LEN / 8).map(|nth| AtomicU64::new(value + nth as u64)).collect()))
    }

    fn all(&self) -> Vec<u64> {
        self.0.iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }
}

/// A protection domain on a card of this machine.
fn domain() -> Arc<Domain> {
    machine(|machine| _ = machine.add("mlx5_2", Ipv4Addr::LOCALHOST));
    Domain::new(&Context::open("mlx5_2").expect("a card"), false).expect("a domain")
}

/// A host's function and a card's on one device.
fn functions() -> (FunctionHandle, FunctionHandle) {
    let firmware = Firmware::default();
    (firmware.add(HOST), firmware.add(CARD))
}

fn export(host: &FunctionHandle, memory: &Arc<Words>) -> Result<Export<FunctionHandle>, AliasError> {
    Export::new(host.clone(), &domain(), Arc::clone(memory) as Arc<dyn DmaMemory>)
}

fn attach(card: &FunctionHandle, grant: &MemoryGrant) -> Result<Alias<FunctionHandle>, AliasError> {
    Alias::attach(card.clone(), &domain(), grant)
}

fn is_empty(function: &FunctionHandle) -> bool {
    function.with(|function| function.keys.is_empty() && function.pinned.is_empty())
}

/// The card's engine: copies by local keys of its function.
struct Queue {
    card: FunctionHandle,
    outcomes: VecDeque<BatchOutcome>,
}

enum Held {
    Registered { key: u32, card: FunctionHandle },
    Attached { _alias: Alias<FunctionHandle> },
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Self::Registered { key, card } = self {
            card.with(|function| _ = function.keys.remove(&(*key >> 8)));
        }
    }
}

impl Queue {
    fn address(&self, key: u32, addr: u64, len_bytes: u32) -> Option<usize> {
        let addr = self.card.firmware.resolve(self.card.number, key, addr, len_bytes.into())?;
        usize::try_from(addr).ok()
    }
}

impl Copier for Queue {
    type Registration = Held;

    fn register(&mut self, memory: &Arc<dyn DmaMemory>) -> Result<(Held, u32), VerbsError> {
        let key = self.card.register(&**memory);
        Ok((Held::Registered { key, card: self.card.clone() }, key))
    }

    fn post(&mut self, copies: &[Copy], number: u64) -> Result<(), NotPosted> {
        for copy in copies {
            let src = self.address(copy.src.key, copy.src.addr, copy.len_bytes);
            let dst = self.address(copy.dst.key, copy.dst.addr, copy.len_bytes);
            let (Some(src), Some(dst)) = (src, dst) else {
                self.outcomes.push_back(BatchOutcome::Failed);
                return Ok(());
            };
            let (src, dst) = (with_exposed_provenance::<u8>(src), with_exposed_provenance_mut::<u8>(dst));
            // SAFETY: inside memory that is pinned.
            unsafe { dst.copy_from(src, copy.len_bytes as usize) };
        }
        self.outcomes.push_back(BatchOutcome::Done(number));
        Ok(())
    }

    fn poll(&mut self) -> Option<BatchOutcome> {
        self.outcomes.pop_front()
    }

    fn stop(&mut self) {}
}

const fn key(index: u16) -> RegionKey {
    RegionKey { index, generation: 1 }
}

fn engine(card: &FunctionHandle) -> CopyEngine<Queue> {
    CopyEngine::new(Queue { card: card.clone(), outcomes: VecDeque::new() }, 1 << 20, 4)
}

fn map_alias(engine: &mut CopyEngine<Queue>, key: RegionKey, grant: &MemoryGrant) -> Result<(), MapMemoryError> {
    engine.map_alias(key, grant, |queue| {
        let alias = attach(&queue.card, grant)?;
        let lkey = alias.lkey();
        Ok((Held::Attached { _alias: alias }, lkey))
    })
}

fn run(engine: &mut CopyEngine<Queue>, (src, dst): (RegionKey, RegionKey), len_bytes: u32) -> Status {
    let at = |region| Address { region, offset_bytes: 0 };
    let step = Step::Copy { src: at(src), dst: at(dst), len_bytes };
    engine.submit(Chain { tag: Tag::default(), scope: Scope(0), steps: &[step] }).expect("room");
    let mut completions = [Completion { tag: Tag::default(), status: Status::Done, step: 0 }];
    assert_eq!(engine.poll(&mut completions), 1);
    completions[0].status
}

#[test]
fn granted_memory_is_read_and_written_by_the_cards_engine() {
    let (host, card) = functions();
    let (theirs, own) = (Words::of(1000), Words::of(2000));
    let exported = export(&host, &theirs).expect("exported");
    let mut engine = engine(&card);
    engine.map(key(0), Arc::clone(&own) as Arc<dyn DmaMemory>, true).expect("registered");
    map_alias(&mut engine, key(1), &exported.grant).expect("attached");

    assert_eq!(run(&mut engine, (key(1), key(0)), LEN as u32), Status::Done);
    assert_eq!(own.all(), Words::of(1000).all());
    own.0[0].store(77, Ordering::Relaxed);
    assert_eq!(run(&mut engine, (key(0), key(1)), 8), Status::Done);
    assert_eq!(theirs.all()[..2], [77, 1001]);
    assert_eq!(run(&mut engine, (key(1), key(0)), LEN as u32 + 1), Status::OutOfBounds, "beyond the grant");

    assert!(engine.unmap(key(1)));
    assert!(
        !card.with(|card| card.keys.values().any(|(_, key)| matches!(key, Key::Alias { .. }))),
        "the alias has ended"
    );
    assert_eq!(run(&mut engine, (key(1), key(0)), 8), Status::StaleRegion);
    drop((engine, exported));
    assert!(is_empty(&host));
}

#[test]
fn equal_addresses_of_two_functions_are_different_memory() {
    let (host, card) = functions();
    let words = Words::of(5);
    let exported = export(&host, &words).expect("exported");
    let mut engine = engine(&card);
    engine.map(key(0), Arc::clone(&words) as Arc<dyn DmaMemory>, true).expect("registered");
    map_alias(&mut engine, key(1), &exported.grant).expect("attached");
    let step = |offset_bytes| Step::Copy {
        src: Address { region: key(1), offset_bytes },
        dst: Address { region: key(0), offset_bytes: 0 },
        len_bytes: 8,
    };
    // On the card, the host's address may be that of other memory: the copy is posted.
    engine.submit(Chain { tag: Tag::default(), scope: Scope(0), steps: &[step(8)] }).expect("room");
    engine.submit(Chain { tag: Tag::default(), scope: Scope(0), steps: &[step(4)] }).expect("room");
    let mut completions = [Completion { tag: Tag::default(), status: Status::Aborted, step: 0 }; 2];
    assert_eq!(engine.poll(&mut completions), 2);
    assert!(completions.iter().all(|completion| completion.status == Status::Done), "{completions:?}");
    assert_eq!(run(&mut engine, (key(1), key(1)), 8), Status::Overlap, "the same alias");
}

#[test]
fn ended_export_closes_its_aliases() {
    let (host, card) = functions();
    let (theirs, own) = (Words::of(1000), Words::of(2000));
    let exported = export(&host, &theirs).expect("exported");
    let mut engine = engine(&card);
    engine.map(key(0), own, true).expect("registered");
    map_alias(&mut engine, key(1), &exported.grant).expect("attached");
    let grant = exported.grant;
    drop(exported);
    assert!(is_empty(&host));
    assert_eq!(run(&mut engine, (key(1), key(0)), 8), Status::Hardware);
    assert!(matches!(attach(&card, &grant), Err(AliasError::Rejected { .. })), "a grant that has ended");
}

#[test]
fn wrong_grants_attach_nothing() {
    let (host, card) = functions();
    let words = Words::of(0);
    let grant = export(&host, &words).map(|exported| {
        let grant = exported.grant;
        std::mem::forget(exported);
        grant
    });
    let grant = grant.expect("exported");
    let mut wrong_access = grant.access;
    wrong_access.0[31] ^= 1;
    for wrong in [
        MemoryGrant { access: wrong_access, ..grant },
        MemoryGrant { mkey: grant.mkey + 0x100, ..grant },
        MemoryGrant { function: 3, ..grant },
        // Keys of `ibv_reg_mr` are not shared.
        MemoryGrant { mkey: host.register(&*words), ..grant },
    ] {
        let error = attach(&card, &wrong).err().expect("nothing to attach");
        assert!(matches!(error, AliasError::Rejected { status: 5, syndrome: 0x00c0_ffee, .. }), "{error}");
        assert!(error.to_string().contains("bad resource (status 0x5, syndrome 0xc0ffee)"), "{error}");
        assert!(is_empty(&card));
    }
    card.with(|card| card.alias_state = 2);
    assert!(matches!(attach(&card, &grant), Err(AliasError::BadState { state: 2, .. })));
    assert!(is_empty(&card), "an alias in a bad state is destroyed");
    // An occupied key attaches nothing.
    card.with(|card| card.alias_state = 0);
    let mut engine = engine(&card);
    map_alias(&mut engine, key(1), &grant).expect("attached");
    assert!(matches!(map_alias(&mut engine, key(1), &grant), Err(MapMemoryError::Taken { .. })));
    assert_eq!(card.with(|card| card.keys.len()), 1);
}

#[test]
fn missing_capability_is_named_and_nothing_is_left() {
    let (host, _) = functions();
    for (allowed, supported, name) in [
        (0, 0x100, "allowed_object_for_other_vhca_access"),
        (0x4, 0, "cross_vhca_object_to_object_supported"),
        (!0x4, !0x100, "allowed_object_for_other_vhca_access"),
    ] {
        host.with(|host| (host.allowed_objects, host.supported_pairs) = (allowed, supported));
        let error = export(&host, &Words::of(0)).err().expect("it lacks a capability");
        assert!(error.to_string().contains(name), "{error}");
        assert!(is_empty(&host));
    }
    host.with(|host| (host.allowed_objects, host.supported_pairs) = (0x4, 0x100));
    assert_eq!(support(&host).expect("supported"), AliasSupport { function: HOST });
    host.with(|host| host.has_no_devx = true);
    let error = export(&host, &Words::of(0)).err().expect("no commands");
    assert!(matches!(&error, AliasError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("CAP_NET_RAW"), "{error}");
}

/// The kernel says that it went well, and the firmware's answer that it did not.
#[test]
fn object_with_a_bad_status_is_destroyed_and_opens_nothing() {
    let (host, card) = functions();
    let words = Words::of(0);
    host.with(|host| host.created_status = 5);
    let error = export(&host, &words).err().expect("a bad status");
    assert!(matches!(error, AliasError::Rejected { status: 5, .. }), "{error}");
    assert!(is_empty(&host));
    assert_eq!(Arc::strong_count(&words), 1);
    host.with(|host| host.created_status = 0);
    let exported = export(&host, &words).expect("exported");
    card.with(|card| card.created_status = 9);
    let error = attach(&card, &exported.grant).err().expect("a bad status");
    assert!(matches!(error, AliasError::Rejected { status: 9, .. }), "{error}");
    assert!(is_empty(&card));
    // The key cannot be destroyed either: its memory stays.
    host.with(|host| (host.created_status, host.fails_to_destroy) = (5, true));
    let other = Words::of(0);
    export(&host, &other).err().expect("a bad status");
    assert_eq!(Arc::strong_count(&other), 2, "leaked");
}

/// A key has 24 bits for the number, and one that is cut off is that of other memory.
#[test]
fn number_of_more_than_24_bits_is_refused_and_nothing_is_left() {
    let (host, card) = functions();
    let words = Words::of(0);
    // The next number is that of a protection domain.
    host.with(|host| host.next = 0xff_ffff);
    let error = export(&host, &words).err().expect("a domain's number");
    assert!(error.to_string().contains("a protection domain 0x1000000"), "{error}");
    assert!(is_empty(&host));
    host.with(|host| host.next = 0x1000);
    let exported = export(&host, &words).expect("exported");
    // The domain's number is the last one.
    card.with(|card| card.next = 0xff_fffe);
    let error = attach(&card, &exported.grant).err().expect("an alias's number");
    assert!(matches!(error, AliasError::BadNumber { number: 0x100_0000, .. }), "{error}");
    assert!(is_empty(&card));
}

#[test]
fn memory_that_cannot_be_pinned_leaves_nothing() {
    let (host, _) = functions();
    host.with(|host| host.pins_at_most = LEN - 1);
    let words = Words::of(0);
    let error = export(&host, &words).err().expect("the limit");
    assert!(matches!(error, AliasError::Pin { len_bytes: LEN, .. }), "{error}");
    assert!(is_empty(&host));
    assert_eq!(Arc::strong_count(&words), 1);
}

#[test]
fn memory_stays_while_its_key_is_not_destroyed() {
    let (host, card) = functions();
    let words = Words::of(3);
    let exported = export(&host, &words).expect("exported");
    host.with(|host| host.fails_to_destroy = true);
    let grant = exported.grant;
    drop(exported);
    assert!(!is_empty(&host));
    assert_eq!(Arc::strong_count(&words), 2, "leaked: the card could still write it");
    let lkey = attach(&card, &grant).map(|alias| card.firmware.resolve(CARD, alias.lkey(), grant.addr, 8));
    assert_eq!(lkey.expect("the key exists"), Some(grant.addr));
}

#[test]
fn each_export_has_its_own_access_key() {
    let (host, _) = functions();
    let words = Words::of(0);
    let (a, b) = (export(&host, &words).expect("exported"), export(&host, &words).expect("exported"));
    assert_ne!(a.grant.access, b.grant.access);
    assert_ne!(a.grant.access, AccessKey([0; 32]));
    assert_ne!(a.grant.mkey >> 8, b.grant.mkey >> 8);
}

#[test]
fn grant_survives_as_text_and_hides_its_access_key_in_logs() {
    let access = AccessKey(std::array::from_fn(|nth| nth as u8 + 0xd0));
    let grant = MemoryGrant {
        function: 0x0102,
        mkey: 0x0304_0506,
        addr: u64::MAX - 1,
        len_bytes: 0x0708_090a_0b0c_0d0e,
        access,
    };
    assert_eq!(grant.to_hex().parse(), Ok(grant));
    assert!(grant.to_hex().starts_with("010203040506fffffffffffffffe0708090a0b0c0d0ed0d1"));
    assert!(!format!("{grant:?}").contains("208") && format!("{grant:?}").contains("AccessKey(..)"));
    let text = grant.to_hex();
    for wrong in ["", "12", &text[1..], &format!("{text}0"), &text.replace('f', "g"), &format!("+{}", &text[1..])] {
        assert_eq!(wrong.parse::<MemoryGrant>(), Err(ParseGrantError), "{wrong}");
    }
}

#[test]
fn double_refuses_what_the_header_does_not_allow() {
    let (host, card) = functions();
    let words = Words::of(0);
    let exported = export(&host, &words).expect("exported");
    let grant = exported.grant;
    let refused = |function: &FunctionHandle, request: &[u8], len: usize| {
        let mut answer = vec![0; len];
        function.create(request, &mut answer).err().map(|_| answer[0])
    };
    let alias = create_alias(grant.function, grant.mkey, &grant.access, 1);
    assert_eq!(refused(&card, &alias[..79], ALIAS_CREATED_LEN), Some(0x50));
    assert_eq!(refused(&card, &alias, 16), Some(0x51));
    // A bit in each reserved range of an alias's request: uid, vhca_tunnel_id, obj_id, and those of its context.
    for at in [2, 4, 8, 15, 18, 19, 24, 31, 68, 79] {
        let mut wrong = alias;
        wrong[at] |= 1;
        assert_eq!(refused(&card, &wrong, ALIAS_CREATED_LEN), Some(0x03), "byte {at}");
    }
    let mut wrong = alias;
    wrong[1] = 0x05;
    assert_eq!(refused(&card, &wrong, ALIAS_CREATED_LEN), Some(0x02), "another opcode");
}
