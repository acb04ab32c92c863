//! Ranks that write invalid entries into their rings, beside ranks that reduce (`tests/boards/run`).
//!
//!     hostile CONTROLLER SEED     run a controller at this address; start on a line on stdin, once the board is
//!     connected
//!
//! Each round is a job of two attached ranks with a group and keys. One violates the protocol, and the board's replies
//! are checked where it must reply. Meanwhile honest ranks reduce over zero-copy on the same board and check every
//! element. Exit status 101 if an expectation is not met.

mod seat;

use seat::{Edges, Random, Seat, join};
use std::io::stdin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use sumac::controller::{Controller, ControllerConfig};
use sumac::{Algo, CallOptions, Communicator, JoinConfig, Path, ReduceOp, Transport};
use sumac_hal::dma::{Address, RegionKey};
use sumac_hal::mmio::{AdminCommand, CompletionEntry, Contribution, EntryStatus, SubmissionEntry};
use sumac_hal::shm::{AttachRefusal, Message};

const HONEST: u32 = 3;
/// The honest ranks' longest operation, in elements.
const COUNT: usize = 20_000;
/// Rounds of each violation, with different values.
const ROUNDS: u64 = 2;

/// A violation, run on a newly attached rank.
type Way = fn(Seat, &mut Random);

const WAYS: [(&str, Way); 9] = [
    ("noise in the admin ring", |seat, random| noise(seat, random, 0)),
    ("noise in the data ring", |seat, random| noise(seat, random, 1)),
    ("indices that jump", jump),
    ("scribbling over its function", scribble),
    ("references to what is not its own", foreign),
    ("contributions with edge values", contribute_edges),
    ("registrations with edge values", register_edges),
    ("commands whose answers nobody reads", deaf),
    ("leaving in the middle", leave),
];

/// Malformed entries: the board detaches the rank.
fn noise(mut seat: Seat, random: &mut Random, queue: usize) {
    // Opcodes begin at 1, so the first one is none.
    seat.queues[queue].push(&[random.next() << 8, random.next(), 0, 0, 0, 0, 0, random.next()]);
    (0..50).for_each(|_| _ = seat.queues[queue].try_push(&[(); 8].map(|()| random.next())));
    seat.wait_for_end();
}

/// An impossible ring index: the board detaches the rank. The index of consumed completions is read only when the ring
/// is full, so that one may go undetected.
fn jump(mut seat: Seat, random: &mut Random) {
    let queue = random.below(2) as u32;
    // Farther from the current index than the ring has entries.
    let far = |random: &mut Random| 1_000 + random.below(1 << 31) as u32;
    seat.write_index(queue, true, far(random));
    let _ = seat.command(AdminCommand::Register { handle: 1, offset_bytes: 0, len_bytes: 8 });
    seat.write_index(queue, false, far(random));
    seat.wait_for_end();
}

/// Overwrites all registers and rings repeatedly while it submits.
fn scribble(mut seat: Seat, random: &mut Random) {
    for _ in 0..200 {
        seat.scribble(random, 500);
        let entry = seat.contribution(RegionKey { index: 0, generation: 1 });
        let _ = seat.queues[1].try_push(&SubmissionEntry::Contribution(entry).emit());
    }
}

/// Addresses in memory of others, of the board, or beyond its own: each is refused with a specific status.
fn foreign(mut seat: Seat, _random: &mut Random) {
    let own = seat.register(0, 8192).expect("its own arena");
    let mut expect = |address: Address, allowed: &[EntryStatus]| {
        for (src, dst) in [(Some(address), None), (None, Some(address)), (Some(address), Some(address))] {
            let good = seat.contribution(own);
            let entry = Contribution { src, dst: dst.or(good.dst), ..good };
            seat.queues[1].push(&SubmissionEntry::Contribution(entry).emit());
            match seat.answer(1) {
                CompletionEntry::Answer { status, .. } => assert!(allowed.contains(&status), "{address:?}: {status:?}"),
                other => panic!("{other:?}"),
            }
        }
    };
    let unknown = [EntryStatus::BadRegion, EntryStatus::StaleRegion];
    for index in (0..24).chain([511, 512, 513, u16::MAX]).filter(|&index| index != own.index) {
        for generation in [0, 1, 2, u32::MAX] {
            expect(Address { region: RegionKey { index, generation }, offset_bytes: 0 }, &unknown);
        }
    }
    expect(Address { region: RegionKey { generation: own.generation + 1, ..own }, offset_bytes: 0 }, &unknown);
    for offset_bytes in [8192, 8200, 1 << 40, (1 << 48) - 8] {
        expect(Address { region: own, offset_bytes }, &[EntryStatus::OutOfBounds]);
    }
}

/// Well-formed entries with arbitrary values: each completes, or waits forever in the rank's own ring.
fn contribute_edges(mut seat: Seat, random: &mut Random) {
    let own = seat.register(0, 1 << 16).expect("its own arena");
    for _ in 0..1_000 {
        let entry = seat.edge_contribution(own, random);
        if !seat.queues[1].try_push(&SubmissionEntry::Contribution(entry).emit()) {
            break;
        }
        while seat.queues[1].poll().is_some() {}
    }
}

fn register_edges(mut seat: Seat, random: &mut Random) {
    let edges = Edges::of(seat.arena_len_bytes);
    for _ in 0..300 {
        let [handle, offset_bytes, len_bytes] = [(); 3].map(|()| edges.pick(random));
        let fits = handle.checked_add(len_bytes).is_some_and(|end| end <= seat.arena_len_bytes);
        match seat.command(AdminCommand::Register { handle, offset_bytes, len_bytes }) {
            (EntryStatus::Result, _) => {
                assert!(fits && offset_bytes == 0 && len_bytes > 0 && handle % 8 == 0, "{handle:#x} {len_bytes:#x}");
            }
            (EntryStatus::NoResources, _) => {}
            _ => assert!(!fits || offset_bytes != 0 || len_bytes == 0 || handle % 8 != 0, "{handle:#x} {len_bytes:#x}"),
        }
    }
}

fn deaf(mut seat: Seat, random: &mut Random) {
    let (group, epoch) = (seat.tree.group, seat.tree.epoch);
    for nth in 0..3_000 {
        let region = RegionKey { index: random.below(512) as u16, generation: 1 };
        let command = match nth % 3 {
            0 => AdminCommand::Register { handle: 0, offset_bytes: 0, len_bytes: 8 },
            1 => AdminCommand::Deregister { region },
            _ => AdminCommand::Fence { group, epoch },
        };
        let _ = seat.queues[0].try_push(&SubmissionEntry::Admin { cookie: nth, command }.emit());
    }
    let _ = seat.queues[1].try_push(&[random.next(); 8]);
}

/// Leaves with a chunk in flight that never completes.
fn leave(mut seat: Seat, _random: &mut Random) {
    let own = seat.register(0, 8192).expect("its own arena");
    let entry = seat.contribution(own);
    seat.queues[1].push(&SubmissionEntry::Contribution(entry).emit());
    assert!(seat.queues[1].poll().is_none());
}

/// Invalid attach requests of ranks that have a group; the broker refuses them.
fn knock(tree: &sumac::controller::proto::TreeMembership, random: &mut Random) {
    let sumac::controller::proto::TreeMembership { group, child, key, .. } = *tree;
    let refused = |message| seat::refusal(&seat::connect(tree, &message));
    assert_eq!(refused(Message::Attach { group, child, key: random.next() }), AttachRefusal::UnknownChild);
    let other = sumac_hal::ids::ChildIndex(child.0 + 7);
    assert_eq!(refused(Message::Attach { group, child: other, key }), AttachRefusal::UnknownChild);
    // Disconnect before the reply.
    drop(seat::connect(tree, &Message::Attach { group, child, key: random.next() }));
}

/// State shared by the honest ranks.
#[derive(Default)]
struct Run {
    done: AtomicU64,
    stop: AtomicBool,
}

/// Reduce until rank 0 contributes the end to the sum.
fn reduce(controller: &Controller, number: u32, run: &Run) {
    let config =
        JoinConfig { transport: Transport::Shm, ..JoinConfig::new(controller.local_addr(), "honest", number, HONEST) };
    let comm = Communicator::join(config).expect("join");
    let tree = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
    let mut buffer = comm.alloc::<u64>(COUNT).expect("memory");
    for round in 0_u64.. {
        let len = 2 + (round * 7_919) as usize % (COUNT - 2);
        let part = &mut buffer[..len];
        part.iter_mut().zip(round..).for_each(|(value, index)| *value = index << number);
        part[0] = (number == 0 && run.stop.load(Ordering::Acquire)).into();
        let outcome = comm.all_reduce_with(part, ReduceOp::Sum, &tree).expect("the job is unaffected");
        assert!(outcome.path == Path::Tree && !outcome.recovered, "{outcome:?}");
        let wrong = part.iter().zip(round..).skip(1).filter(|&(&sum, index)| sum != index * ((1 << HONEST) - 1));
        assert_eq!(wrong.count(), 0, "round {round}");
        run.done.fetch_add(u64::from(number == 0), Ordering::Release);
        if part[0] > 0 {
            return comm.leave();
        }
    }
}

fn attack(controller: &Controller, random: &mut Random) {
    for round in 0..ROUNDS {
        for (name, way) in WAYS {
            let [hostile, other] = join(controller.local_addr(), &format!("{name} {round}"));
            knock(&hostile.tree, random);
            let (hostile, other) = (hostile.attach(), other.attach());
            way(hostile, random);
            drop(other);
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A failed rank ends the process, because others may wait for it.
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        say(info);
        std::process::exit(101);
    }));
    let usage = "usage: hostile CONTROLLER SEED";
    let mut args = std::env::args().skip(1);
    let listen = args.next().ok_or(usage)?.parse()?;
    let mut random = Random(args.next().ok_or(usage)?.parse()?);
    let controller = Controller::start(ControllerConfig { listen, ..ControllerConfig::new() })?;
    stdin().read_line(&mut String::new())?;
    let run = Run::default();
    thread::scope(|scope| {
        for number in 0..HONEST {
            let (controller, run) = (&controller, &run);
            scope.spawn(move || reduce(controller, number, run));
        }
        attack(&controller, &mut random);
        run.stop.store(true, Ordering::Release);
    });
    let (rounds, done) = (ROUNDS * WAYS.len() as u64, run.done.load(Ordering::Acquire));
    println!("{rounds} hostile ranks beside {done} operations, 0 wrong");
    Ok(())
}
