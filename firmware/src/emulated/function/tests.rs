//! A function by itself, on a connection of the test's own.

use super::*;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use sumac_hal::dma::{Address, Engine, Profile};
use sumac_hal::emu::dma::{DmaConfig, EmuEngine};
use sumac_hal::shm::{Listener, Pages};

const LONG: Duration = Duration::from_secs(20);
const OWNER: FunctionId = FunctionId(1);

/// A rank's connection, and its function.
struct Rig {
    rank: Connection,
    function: Attached,
    engine: BoardEngine,
    regions: Box<RegionTable<8>>,
}

impl Rig {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sumac-function-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let listener = Listener::bind(&name).expect("a free name");
        let rank = Connection::open(&name, LONG).expect("it listens");
        let connection = listener.accept(LONG).expect("welcome").expect("it waits");
        let engine = EmuEngine::start(DmaConfig::new(Profile::Full, 1)).expect("an engine");
        let engine = BoardEngine::Emulated(Box::new(engine));
        let redo = Region::create(4096, Pages::Normal).expect("memory");
        let device = (BootId(1), *engine.capabilities());
        let bells = Bells::new().expect("an epoll");
        let function = Attached::create(OWNER, connection, device, (&redo, (0, 4096, 1)), &bells);
        let function = function.expect("a function");
        Self { rank, function, engine, regions: Box::new(RegionTable::new(8)) }
    }

    /// The device's end.
    fn connection(&self) -> &Connection {
        let Way::Near { hearing, .. } = &self.function.way else { panic!("it is near") };
        &hearing.connection
    }

    fn hand_over(&self, handle: u64, region: &Region) {
        self.rank.send(&Message::Memory { handle }, Some(region.file())).expect("it is open");
    }

    fn register(&mut self, handle: u64, len_bytes: u64) -> Result<RegionKey, EntryStatus> {
        let Attached { way: Way::Near { hearing, .. }, rings, .. } = &mut self.function else { panic!("it is near") };
        let mut files = Files { hearing, engine: &mut self.engine };
        rings.register(handle, (0, len_bytes), &mut self.regions, &mut files).expect("it has not hung up")
    }
}

/// A rank that never stops talking is not the only one there.
#[test]
fn a_call_hears_so_many_messages_and_no_more() {
    let mut rig = Rig::new();
    let region = Region::create(4096, Pages::Normal).expect("memory");
    // The same handle again and again, so that it is never too much memory.
    (0..3 * MESSAGES_PER_TURN).for_each(|_| rig.hand_over(1, &region));
    rig.function.hear().expect("nothing wrong");
    let left = (0..).take_while(|_| rig.connection().receive(Duration::ZERO).is_ok()).count();
    assert_eq!(left, 2 * MESSAGES_PER_TURN);
}

/// The longest file that a rank may hand over costs the device no more than what is registered of it.
#[test]
fn memory_beyond_the_quota_of_bytes_is_refused_and_deregistering_gives_it_back() {
    let mut rig = Rig::new();
    *rig.regions = RegionTable::new(8).with_max_bytes(12 << 10, 1 << 20);
    let region = Region::create(1 << 20, Pages::Normal).expect("memory");
    let register = |rig: &mut Rig, len_bytes| {
        rig.hand_over(1, &region);
        rig.function.hear().expect("nothing wrong");
        rig.register(1, len_bytes)
    };
    let first = register(&mut rig, 8 << 10).expect("within the quota");
    assert_eq!(register(&mut rig, (4 << 10) + 1), Err(EntryStatus::Quota));
    assert_eq!(register(&mut rig, u64::MAX), Err(EntryStatus::Quota));
    assert!(register(&mut rig, 4 << 10).is_ok(), "a refusal has taken nothing");
    let beyond = Address { region: first, offset_bytes: 4 << 10 };
    assert!(rig.regions.hold(OWNER, beyond, (4 << 10) + 1).is_err(), "the file is longer, the region is not");
    assert_eq!(rig.regions.deregister(OWNER, first), Ok(true));
    assert!(rig.engine.unmap(first));
    assert!(register(&mut rig, 8 << 10).is_ok());
    // All ranks together.
    *rig.regions = RegionTable::new(8).with_max_bytes(1 << 20, 4096);
    assert_eq!(register(&mut rig, 4097), Err(EntryStatus::NoRoom));
}

#[test]
fn memory_beyond_a_limit_is_not_mapped() {
    let mut rig = Rig::new();
    let region = Region::create(4096, Pages::Normal).expect("memory");
    let mut register = |handle, len_bytes| {
        rig.hand_over(handle, &region);
        rig.function.hear().expect("nothing wrong");
        let registered = rig.register(handle, len_bytes);
        (registered, rig.regions.len())
    };
    assert_eq!(register(0, 4097), (Err(EntryStatus::OutOfBounds), 0));
    assert_eq!(register(0, 0), (Err(EntryStatus::OutOfBounds), 0));
    (0..8).for_each(|handle| assert!(register(handle, 4096).0.is_ok()));
    assert_eq!(register(8, 4096), (Err(EntryStatus::NoRoom), 8));
}

/// What a rank has deregistered is gone when the rank goes; what is in use goes later.
#[test]
fn memory_of_a_rank_that_goes_is_taken_away_once() {
    let mut rig = Rig::new();
    let region = Region::create(4096, Pages::Normal).expect("memory");
    let mut keys = [1, 2, 3].map(|handle| {
        rig.hand_over(handle, &region);
        rig.function.hear().expect("nothing wrong");
        rig.register(handle, 4096).expect("room")
    });
    let Rig { regions, engine, .. } = &mut rig;
    let [deregistered, used, _] = keys;
    assert!(regions.deregister(OWNER, deregistered) == Ok(true) && engine.unmap(deregistered));
    regions.hold(OWNER, Address { region: used, offset_bytes: 0 }, 1).expect("it is there");
    let gone = keys.map(|key| take_away(OWNER, key, regions, engine));
    assert_eq!(gone, [true, false, true]);
    assert!(regions.release(used) && engine.unmap(used), "it was in use until now");
    keys.reverse();
    assert!(keys.iter().all(|&key| !regions.contains(key) && !engine.unmap(key)), "nothing is left");
}

/// A device without room for descriptors refuses memory, and keeps the rank. In a process of its own, which runs out of
/// them.
#[test]
fn memory_whose_descriptor_had_no_room_is_refused() {
    let test = "emulated::function::tests::other_process_without_room";
    let mut program = Command::new(std::env::current_exe().expect("the test program"));
    let output = program.args(["--exact", "--ignored", "--nocapture", test]).output().expect("a process");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "the other process of another test"]
fn other_process_without_room() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let mut rig = Rig::new();
    let region = Region::create(4096, Pages::Normal).expect("memory");
    rig.hand_over(1, &region);
    let limit = getrlimit(Resource::Nofile);
    // What is open stays open.
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).expect("less than before");
    rig.function.hear().expect("it is not the rank's fault");
    setrlimit(Resource::Nofile, limit).expect("as before");
    assert_eq!(rig.register(1, 4096), Err(EntryStatus::NoRoom));
    rig.hand_over(2, &region);
    rig.function.hear().expect("nothing wrong");
    assert!(rig.register(2, 4096).is_ok());
}
