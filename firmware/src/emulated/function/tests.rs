//! Tests of a function, with the test as its rank.

use super::*;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use sumac_hal::dma::{Address, Engine, Profile};
use sumac_hal::emu::dma::{DmaConfig, EmuEngine};
use sumac_hal::shm::{Listener, Pages};

const LONG: Duration = Duration::from_secs(20);
const OWNER: FunctionId = FunctionId(1);

/// A rank's connection and its function.
struct Rig {
    rank: Connection,
    function: AttachedRank,
    engine: BoardEngine,
    regions: Box<RegionTable<8>>,
}

impl Rig {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sumac-function-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let listener = Listener::bind(&name).expect("a free name");
        let rank = Connection::open(&name, LONG).expect("it listens");
        let connection = listener.accept(LONG).expect("accepted").expect("it waits");
        let engine = EmuEngine::start(DmaConfig::new(Profile::Full, 1)).expect("an engine");
        let engine = BoardEngine::Emulated(Box::new(engine));
        let redo = Region::create(4096, Pages::Normal).expect("memory");
        let device = (BootId(1), *engine.capabilities());
        let bells = BellSet::new().expect("an epoll");
        let function = AttachedRank::create(OWNER, connection, device, (&redo, (0, 4096, 1)), &bells);
        let function = function.expect("a function");
        Self { rank, function, engine, regions: Box::new(RegionTable::new(8)) }
    }

    /// The device's end.
    fn connection(&self) -> &Connection {
        let Transport::Shm { local, .. } = &self.function.transport else { panic!("on this machine") };
        &local.connection
    }

    fn hand_over(&self, handle: u64, region: &Region) {
        self.rank.send(&Message::Memory { handle }, Some(region.file())).expect("it is open");
    }

    fn register(&mut self, handle: u64, len_bytes: u64) -> Result<RegionKey, EntryStatus> {
        let AttachedRank { transport: Transport::Shm { local, .. }, rings, .. } = &mut self.function else {
            panic!("on this machine")
        };
        let mut files = Files { local, engine: &mut self.engine };
        rings.register(handle, (0, len_bytes), &mut self.regions, &mut files).expect("it has not hung up")
    }
}

/// A rank that never stops sending does not starve others.
#[test]
fn poll_connection_receives_a_bounded_number_of_messages() {
    let mut rig = Rig::new();
    let region = Region::create(4096, Pages::Normal).expect("memory");
    // Always the same handle, to stay below the limit of memory files.
    (0..3 * MESSAGES_PER_TURN).for_each(|_| rig.hand_over(1, &region));
    rig.function.poll_connection().expect("nothing wrong");
    let left = (0..).take_while(|_| rig.connection().receive(Duration::ZERO).is_ok()).count();
    assert_eq!(left, 2 * MESSAGES_PER_TURN);
}

/// However long a file is, it costs the device no more than what is registered of it.
#[test]
fn register_beyond_the_quota_is_refused_and_deregister_returns_it() {
    let mut rig = Rig::new();
    *rig.regions = RegionTable::new(8).with_max_bytes(12 << 10, 1 << 20);
    let region = Region::create(1 << 20, Pages::Normal).expect("memory");
    let register = |rig: &mut Rig, len_bytes| {
        rig.hand_over(1, &region);
        rig.function.poll_connection().expect("nothing wrong");
        rig.register(1, len_bytes)
    };
    let first = register(&mut rig, 8 << 10).expect("within the quota");
    assert_eq!(register(&mut rig, (4 << 10) + 1), Err(EntryStatus::Quota));
    assert_eq!(register(&mut rig, u64::MAX), Err(EntryStatus::Quota));
    assert!(register(&mut rig, 4 << 10).is_ok(), "a refusal uses no quota");
    let beyond = Address { region: first, offset_bytes: 4 << 10 };
    assert!(rig.regions.hold(OWNER, beyond, (4 << 10) + 1).is_err(), "the file is longer, the region is not");
    assert_eq!(rig.regions.deregister(OWNER, first), Ok(true));
    assert!(rig.engine.unmap(first));
    assert!(register(&mut rig, 8 << 10).is_ok());
    // The limit of all ranks together.
    *rig.regions = RegionTable::new(8).with_max_bytes(1 << 20, 4096);
    assert_eq!(register(&mut rig, 4097), Err(EntryStatus::NoResources));
}

#[test]
fn register_beyond_file_or_table_is_refused() {
    let mut rig = Rig::new();
    let region = Region::create(4096, Pages::Normal).expect("memory");
    let mut register = |handle, len_bytes| {
        rig.hand_over(handle, &region);
        rig.function.poll_connection().expect("nothing wrong");
        let registered = rig.register(handle, len_bytes);
        (registered, rig.regions.len())
    };
    assert_eq!(register(0, 4097), (Err(EntryStatus::OutOfBounds), 0));
    assert_eq!(register(0, 0), (Err(EntryStatus::OutOfBounds), 0));
    (0..8).for_each(|handle| assert!(register(handle, 4096).0.is_ok()));
    assert_eq!(register(8, 4096), (Err(EntryStatus::NoResources), 8));
}

/// Memory that the rank deregistered is already gone when the rank goes; memory in use is unmapped later.
#[test]
fn unregister_skips_memory_in_use_until_released() {
    let mut rig = Rig::new();
    let region = Region::create(4096, Pages::Normal).expect("memory");
    let mut keys = [1, 2, 3].map(|handle| {
        rig.hand_over(handle, &region);
        rig.function.poll_connection().expect("nothing wrong");
        rig.register(handle, 4096).expect("room")
    });
    let Rig { regions, engine, .. } = &mut rig;
    let [deregistered, used, _] = keys;
    assert!(regions.deregister(OWNER, deregistered) == Ok(true) && engine.unmap(deregistered));
    regions.hold(OWNER, Address { region: used, offset_bytes: 0 }, 1).expect("it is there");
    let gone = keys.map(|key| unregister(OWNER, key, regions, engine));
    assert_eq!(gone, [true, false, true]);
    assert!(regions.release(used) && engine.unmap(used), "it was in use until now");
    keys.reverse();
    assert!(keys.iter().all(|&key| !regions.contains(key) && !engine.unmap(key)), "nothing is left");
}

/// A device that is out of descriptors refuses memory and keeps the rank; tested in a process of its own, which runs
/// out of them.
#[test]
fn memory_without_a_free_descriptor_is_refused_and_the_rank_stays() {
    let test = "emulated::function::tests::other_process_without_descriptors";
    let mut program = Command::new(std::env::current_exe().expect("the test program"));
    let output = program.args(["--exact", "--ignored", "--nocapture", test]).output().expect("a process");
    let output_text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && output_text.contains("1 passed"), "{output_text}");
}

#[test]
#[ignore = "the other process of another test"]
fn other_process_without_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let mut rig = Rig::new();
    let region = Region::create(4096, Pages::Normal).expect("memory");
    rig.hand_over(1, &region);
    let limit = getrlimit(Resource::Nofile);
    // Open descriptors stay open.
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).expect("less than before");
    rig.function.poll_connection().expect("it is not the rank's fault");
    setrlimit(Resource::Nofile, limit).expect("as before");
    assert_eq!(rig.register(1, 4096), Err(EntryStatus::NoResources));
    rig.hand_over(2, &region);
    rig.function.poll_connection().expect("nothing wrong");
    assert!(rig.register(2, 4096).is_ok());
}
