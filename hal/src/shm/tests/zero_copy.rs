//! All parts together: ranks in processes of their own register memory and contribute zero-copy; a small device checks
//! their addresses, lets the emulated engine reduce in place, and answers.

use super::processes::{OtherProcess, accept_rank, attach, view};
use super::*;
use crate::dma::{
    Address, Chain, Completion, Engine, Profile, RegionKey, RegionTable, Scope, Status, Step, Tag, WaitEngine,
};
use crate::emu::dma::{DmaConfig, EmuEngine, HeapMemory, Strictness};
use crate::ids::{FunctionId, Rank};
use crate::mmio::{AdminCommand, CompletionEntry, Contribution, EntryStatus, SubmissionEntry};
use crate::op::{Collective, Dtype, ReduceOp};
use crate::ring::{Consumer, Producer};
use std::collections::HashMap;
use std::sync::Arc;

const RANKS: u32 = 3;
const COUNT: u32 = 10_000;
const HANDLE: u64 = 77;

/// The offset of each rank's values, so that offsets matter.
const OFFSET_BYTES: u64 = 256;

fn values(rank: u32) -> Vec<u8> {
    (0..COUNT).flat_map(|index| ((index * (rank + 1)) as f32).to_le_bytes()).collect()
}

/// Submit one entry and wait for its answer.
fn submit_and_wait(
    queue: &FunctionQueue,
    ends: &mut (Producer<FunctionRing<8>, 8>, Consumer<FunctionRing<4>, 4>),
    entry: &SubmissionEntry,
) -> CompletionEntry {
    assert_eq!(ends.0.push(&entry.emit()), Ok(true));
    ring(queue.device_bell());
    let ready = || ends.1.available().expect("valid ring indices") > 0;
    let waiter = Waiter::new(SpinPolicy::NONE);
    assert_eq!(waiter.wait(&[queue.host_bell()], Some(Instant::now() + LONG), ready), Ok(true));
    let words = ends.1.pop().expect("valid ring indices").expect("an answer");
    CompletionEntry::parse(&words).expect("an answer")
}

/// The rank, in a process of its own.
pub(super) fn rank_process(name: &str) {
    // The device numbers ranks in the order in which they connect.
    let (device, function) = attach(name);
    let queues = [0, 1].map(|index| function.queue(index).expect("a queue"));
    let [mut admin, mut data] =
        queues.each_ref().map(|q| (Producer::new(q.submissions.clone()), Consumer::new(q.completions.clone())));
    let region = Region::create(OFFSET_BYTES as usize + COUNT as usize * 4, Pages::Normal).expect("memory");
    device.send(&Message::Memory { handle: HANDLE }, Some(region.file())).expect("it is open");
    let whoami = device.receive(LONG).expect("a message").message;
    let Message::Attach { key: number, .. } = whoami else { panic!("a number") };
    region.write(OFFSET_BYTES as usize, &values(number as u32));

    let register = AdminCommand::Register { handle: HANDLE, offset_bytes: 0, len_bytes: region.len_bytes() as u64 };
    let mut command =
        |command| match submit_and_wait(&queues[0], &mut admin, &SubmissionEntry::Admin { cookie: 5, command }) {
            CompletionEntry::Admin { status, cookie: 5, value } => (status, value),
            other => panic!("{other:?}"),
        };
    let (status, value) = command(register);
    assert_eq!(status, EntryStatus::Result);
    let key = RegionKey::from_bits(value).expect("a key");

    let at = |offset_bytes| Address { region: key, offset_bytes };
    let mut contribute = |src: Address, dst: Address| {
        let (group, epoch, seq) = view();
        let contribution = Contribution {
            group,
            epoch,
            seq,
            count: 1,
            elements: COUNT,
            lag: 0,
            signature: 1,
            collective: Collective::AllReduce,
            dtype: Some(Dtype::F32),
            op: Some(ReduceOp::Sum),
            root: Rank(0),
            total: 0,
            src: Some(src),
            dst: Some(dst),
        };
        match submit_and_wait(&queues[1], &mut data, &SubmissionEntry::Contribution(contribution)) {
            CompletionEntry::Answer { status, .. } => status,
            other => panic!("{other:?}"),
        }
    };
    // Regions of other ranks are easily guessed, and refused; so are ranges beyond the own region.
    let foreign =
        Address { region: RegionKey { index: (key.index + 1) % RANKS as u16, generation: 1 }, offset_bytes: 0 };
    assert_eq!(contribute(foreign, at(0)), EntryStatus::BadRegion);
    assert_eq!(contribute(at(0), foreign), EntryStatus::BadRegion);
    assert_eq!(contribute(at(OFFSET_BYTES + 4), at(0)), EntryStatus::OutOfBounds);
    assert_eq!(contribute(at(OFFSET_BYTES), at(OFFSET_BYTES)), EntryStatus::Result);
    let sum: Vec<u8> = (0..COUNT).flat_map(|index| ((index * 6) as f32).to_le_bytes()).collect();
    assert_eq!(bytes_of(&region, OFFSET_BYTES as usize, sum.len()), sum);

    assert_eq!(command(AdminCommand::Deregister { region: key }).0, EntryStatus::Result);
    assert_eq!(command(AdminCommand::Deregister { region: key }).0, EntryStatus::StaleRegion);
}

/// The device's state of an attached rank.
struct AttachedRank {
    connection: Connection,
    function: Function,
    memory: HashMap<u64, Arc<Region>>,
    contribution: Option<Contribution>,
    leaving: bool,
}

struct Device {
    ranks: Vec<AttachedRank>,
    regions: RegionTable<8>,
    engine: EmuEngine,
}

const SLOT: RegionKey = RegionKey { index: 7, generation: 1 };

impl Device {
    fn admin(&mut self, rank: usize, cookie: u64, command: AdminCommand) -> CompletionEntry {
        let owner = FunctionId(rank as u32);
        let (status, value) = match command {
            AdminCommand::Register { handle, len_bytes, .. } => {
                let key = self.regions.register(owner, len_bytes).expect("room");
                self.engine.map(key, self.ranks[rank].memory[&handle].clone()).expect("an unused key");
                (EntryStatus::Result, key.to_bits())
            }
            AdminCommand::Deregister { region } => match self.regions.deregister(owner, region) {
                Ok(gone) => {
                    assert!(gone && self.engine.unmap(region), "nothing is in flight");
                    (EntryStatus::Result, 0)
                }
                Err(_) => {
                    self.ranks[rank].leaving = true;
                    (EntryStatus::StaleRegion, 0)
                }
            },
            other => panic!("{other:?}"),
        };
        CompletionEntry::Admin { status, cookie, value }
    }

    /// Check a contribution's addresses; keep it if they are valid.
    fn contribute(&mut self, rank: usize, contribution: Contribution) -> Option<EntryStatus> {
        let owner = FunctionId(rank as u32);
        let (src, dst) =
            (contribution.src.expect("zero-copy"), contribution.dst.expect("this rank receives the result"));
        let len_bytes = u64::from(contribution.elements) * 4;
        let held = self.regions.hold(owner, src, len_bytes);
        let held = held.and_then(|_| {
            self.regions.hold(owner, dst, len_bytes).inspect_err(|_| {
                self.regions.release(src.region);
            })
        });
        match held {
            Ok(_) => {
                self.ranks[rank].contribution = Some(contribution);
                None
            }
            Err(crate::dma::RegionError::OutOfBounds { .. }) => Some(EntryStatus::OutOfBounds),
            Err(_) => Some(EntryStatus::BadRegion),
        }
    }

    /// Reduce the contributions of all ranks.
    fn reduce(&mut self) {
        let (op, f32, count) = (ReduceOp::Sum, Dtype::F32, COUNT);
        let slot = Address { region: SLOT, offset_bytes: 64 };
        let all: Vec<_> =
            self.ranks.iter().map(|rank| rank.contribution.expect("every rank has contributed")).collect();
        let mut steps = vec![Step::Publish {
            dst: Address { region: SLOT, offset_bytes: 0 },
            words: [0, 0],
            covers: Default::default(),
        }];
        for (rank, contribution) in all.iter().enumerate() {
            let src = contribution.src.expect("zero-copy");
            steps.push(match rank {
                0 => Step::Load { source: f32, accumulator: f32, src, dst: slot, count },
                _ => Step::Reduce { op, source: f32, accumulator: f32, src, dst: slot, count },
            });
        }
        steps.push(Step::Publish {
            dst: Address { region: SLOT, offset_bytes: 0 },
            words: [1, 0],
            covers: Default::default(),
        });
        steps.extend(all.iter().map(|contribution| {
            let dst = contribution.dst.expect("this rank receives the result");
            Step::Store { op, accumulator: f32, output: f32, src: slot, dst, count, ranks: RANKS }
        }));
        let tag = Tag { seq: 0, slot: 0, attempt: 0 };
        self.engine.submit(Chain { tag, scope: Scope(0), steps: &steps }).expect("an empty queue");
        assert!(self.engine.wait(None));
        let mut completion = [Completion { tag, status: Status::Hardware, step: 0 }];
        assert_eq!((self.engine.poll(&mut completion), completion[0].status), (1, Status::Done));
        for contribution in all {
            self.regions.release(contribution.src.expect("zero-copy").region);
            self.regions.release(contribution.dst.expect("this rank receives the result").region);
        }
    }
}

#[test]
fn ranks_in_processes_get_their_sum_in_place() {
    let name = unique_name();
    let listener = Listener::bind(&name).expect("a free name");
    let others: Vec<_> = (0..RANKS).map(|_| OtherProcess::start("reduce", &name)).collect();
    let ranks: Vec<_> = (0..RANKS)
        .map(|number| {
            let (connection, function) = accept_rank(&listener);
            let Received { message: Message::Memory { handle }, file: Some(file) } =
                connection.receive(LONG).expect("a message")
            else {
                panic!("a rank hands memory over")
            };
            let region = Arc::new(Region::open(file, 1 << 20).expect("it is sealed"));
            connection.send(&numbered(number.into()), None).expect("it is open");
            let memory = HashMap::from([(handle, region)]);
            AttachedRank { connection, function, memory, contribution: None, leaving: false }
        })
        .collect();
    let strict = DmaConfig { strictness: Strictness::Assert, regions: 8, ..DmaConfig::new(Profile::Full, 1) };
    let mut engine = EmuEngine::start(strict).expect("a thread");
    engine.map(SLOT, Arc::new(HeapMemory::new(64 + COUNT as usize * 4))).expect("an unused key");
    let mut device = Device { ranks, regions: RegionTable::new(2), engine };

    let queues: Vec<[_; 2]> =
        device.ranks.iter().map(|rank| [0, 1].map(|index| rank.function.queue(index).expect("a queue"))).collect();
    let mut ends: Vec<[_; 2]> = queues
        .iter()
        .map(|queues| {
            queues.each_ref().map(|q| (Consumer::new(q.submissions.clone()), Producer::new(q.completions.clone())))
        })
        .collect();
    let bells: Vec<_> = queues.iter().flatten().map(FunctionQueue::device_bell).collect();
    let waiter = Waiter::new(SpinPolicy::for_this_machine(1 + RANKS as usize));
    while !device.ranks.iter().all(|rank| rank.leaving) {
        let ready = || ends.iter_mut().flatten().any(|(from, _)| from.available().expect("valid ring indices") > 0);
        assert_eq!(waiter.wait(&bells, Some(Instant::now() + LONG), ready), Ok(true));
        for rank in 0..RANKS as usize {
            for index in 0..2 {
                let Some(words) = ends[rank][index].0.pop().expect("valid ring indices") else { continue };
                let answer = match SubmissionEntry::parse(&words).expect("valid ring indices") {
                    SubmissionEntry::Admin { cookie, command } => Some(device.admin(rank, cookie, command)),
                    SubmissionEntry::Contribution(contribution) => {
                        device.contribute(rank, contribution).map(|status| answer(status, &contribution))
                    }
                    SubmissionEntry::Limit(limit) => panic!("{limit:?}"),
                };
                if let Some(answer) = answer {
                    assert_eq!(ends[rank][index].1.push(&answer.emit()), Ok(true));
                    ring(queues[rank][index].host_bell());
                }
            }
        }
        if device.ranks.iter().all(|rank| rank.contribution.is_some()) {
            device.reduce();
            for rank in 0..RANKS as usize {
                let contribution = device.ranks[rank].contribution.take().expect("every rank has contributed");
                let answer = answer(EntryStatus::Result, &contribution);
                assert_eq!(ends[rank][1].1.push(&answer.emit()), Ok(true));
                ring(queues[rank][1].host_bell());
            }
        }
    }
    assert!(others.into_iter().all(OtherProcess::succeeded));
    assert!(device.regions.is_empty());
    for rank in &device.ranks {
        assert!(matches!(rank.connection.receive(LONG), Err(SocketError::Closed)));
    }
}

fn answer(status: EntryStatus, contribution: &Contribution) -> CompletionEntry {
    let Contribution { group, epoch, seq, count, .. } = *contribution;
    CompletionEntry::Answer { status, group, epoch, seq, count, window: 1, stable: seq, slowest: None }
}
