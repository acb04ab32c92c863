//! The driver on a device on another host, over an emulated link: what survives its death, and which peers are
//! rejected.

use super::device::{CHUNK, params};
use super::driver::{BorrowedBuffers, all_reduce, drive, post};
use super::{EPOCH, GROUP};
use crate::transport::RecoverySource;
use crate::transport::memory::driver::ZeroCopyDriver;
use crate::transport::memory::{AttachError, AttachParams, Remote, Transfer};
use crate::transport::packets::{EndpointError, Event};
use std::collections::HashMap;
use std::net::{Ipv4Addr, TcpListener};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{FrameReader, send};
use sumac_hal::dma::{Capabilities, Profile, RegionKey};
use sumac_hal::ids::{BootId, ChunkNo};
use sumac_hal::mmio::{AdminCommand, CompletionEntry, EntryStatus, Features, FunctionConfig, SubmissionEntry};
use sumac_hal::remote::handshake::{AttachReply, AttachRequest, Attachment, Challenge, VERSION};
use sumac_hal::remote::{Carrier, CarrierEvent, Exchange, Memory, RankLink};
use sumac_hal::ring::{Consumer, Producer};
use sumac_hal::shm::Function;
use sumac_hal::traffic_class::TrafficClass;

const LONG: Duration = Duration::from_secs(30);
const KEY: u64 = 42;
const DEPTH: u32 = 64;
/// What the device does to values: it flips their signs, and a bit of their fractions.
const FLIPPED: u32 = 1 << 31 | 1 << 3;

/// Elements in a chunk.
const EACH: usize = CHUNK as usize / 4;
const CHUNKS: usize = 5;

/// What the device does with a chunk before it dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Answers,
    /// Its answer is lost.
    Lands,
    /// Its write is lost.
    Nothing,
}

/// Start a device for one rank. It authenticates with `key`, and ends after one operation, or when the rank hangs up.
fn start(name: &str, key: u64, does: [Does; CHUNKS]) -> (AttachParams, JoinHandle<()>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let addr = listener.local_addr().expect("bound");
    let remote =
        Remote { addr, link: name.into(), prefer: Ipv4Addr::LOCALHOST.into(), traffic_class: TrafficClass::default() };
    let exchange = Exchange::named(name).expect("a name of one");
    let thread = std::thread::spawn(move || serve(&listener, &exchange, key, does));
    (AttachParams { remote: Some(remote), ..params("", 0, 1) }, thread)
}

fn serve(listener: &TcpListener, exchange: &Exchange, key: u64, does: [Does; CHUNKS]) {
    let (mut stream, _) = listener.accept().expect("a rank");
    let mut reader = FrameReader::new(stream.try_clone().expect("a descriptor"));
    let challenge = Challenge { version: VERSION, nonce: [3; 16] };
    send(&mut stream, &challenge).expect("it listens");
    let call: AttachRequest = reader.recv().expect("a call");
    assert!(call.is_proven(KEY, &challenge) && (call.group, call.child.0) == (GROUP, 0));
    let mut link = exchange.rank_link().expect("an end");
    link.connect(&call.end).expect("it is there");
    let dma = Capabilities::new(Profile::CopyOnly, 8, 8);
    let seat = Attachment::new(link.end(), BootId(1), DEPTH, &dma).prove(key, (&challenge, &call));
    send(&mut stream, &AttachReply::Accepted(seat)).expect("it listens");
    let config = FunctionConfig { boot_id: BootId(1), features: Features::all(), queues: 2, depth: DEPTH, dma };
    let function = Function::create(&config).expect("memory");
    let queues = [0, 1].map(|index| function.queue(index).expect("two"));
    let mut carrier = Carrier::new(
        queues.each_ref().map(|queue| queue.completions.clone()),
        queues.each_ref().map(|queue| queue.submissions.clone()),
    );
    let mut from = queues.each_ref().map(|queue| Consumer::new(queue.submissions.clone()));
    let mut to = queues.each_ref().map(|queue| Producer::new(queue.completions.clone()));
    let (mut announced, mut regions): (HashMap<u64, Memory>, HashMap<RegionKey, Memory>) = Default::default();
    let mut seen = 0;
    loop {
        let on_event = |event| {
            if let CarrierEvent::Memory(memory) = event {
                announced.insert(memory.handle, memory);
            }
        };
        if carrier.poll(&mut link, on_event).is_err() || seen >= CHUNKS {
            // The answers of this iteration are out; nothing follows.
            return;
        }
        while let Some(words) = from[0].pop().expect("whole") {
            let SubmissionEntry::Admin { cookie, command } = SubmissionEntry::parse(&words).expect("an entry") else {
                panic!("on the wrong queue");
            };
            let AdminCommand::Register { handle, .. } = command else { panic!("{command:?}") };
            let key = RegionKey { index: regions.len() as u16 + 1, generation: 1 };
            regions.insert(key, announced.remove(&handle).expect("handed over before"));
            let (status, value) = (EntryStatus::Result, key.to_bits());
            assert_eq!(to[0].push(&CompletionEntry::Admin { status, cookie, value }.emit()), Ok(true));
        }
        while let Some(words) = from[1].pop().expect("whole") {
            let SubmissionEntry::Contribution(entry) = SubmissionEntry::parse(&words).expect("an entry") else {
                panic!("not asked for");
            };
            let (src, dst) = (entry.src.expect("an input"), entry.dst.expect("an output"));
            let (input, landing) = (regions[&src.region], regions[&dst.region]);
            assert!(landing.lands && !input.lands, "the caller's memory is for reading");
            for nth in 0..entry.count {
                let skip = u64::from(nth) * u64::from(CHUNK);
                let mut values = [0; CHUNK as usize];
                link.read_peer(&input.region, src.offset_bytes + skip, &mut values);
                let (words, _) = values.as_chunks_mut::<4>();
                words.iter_mut().for_each(|word| *word = (u32::from_le_bytes(*word) ^ FLIPPED).to_le_bytes());
                let seq = ChunkNo(entry.seq.0 + u64::from(nth));
                let does = does[seq.0 as usize];
                if does != Does::Nothing {
                    link.land(&landing.region, (dst.offset_bytes + skip) as u32, &values);
                }
                if does == Does::Answers {
                    let (group, epoch, status, stable) = (GROUP, EPOCH, EntryStatus::Result, ChunkNo(0));
                    let (count, window, slowest) = (1, 8, None);
                    let answer = CompletionEntry::Answer { status, group, epoch, seq, count, window, stable, slowest };
                    assert_eq!(to[1].push(&answer.emit()), Ok(true));
                }
                seen += 1;
            }
        }
    }
}

fn input() -> Vec<f32> {
    (0..EACH * CHUNKS).map(|i| i as f32).collect()
}

fn flipped(values: &[f32]) -> Vec<f32> {
    values.iter().map(|value| f32::from_bits(value.to_bits() ^ FLIPPED)).collect()
}

/// A result whose answer was lost with the device is salvaged, as it was announced when it was written. Where nothing
/// was written, the input is intact although the call was in place.
#[test]
fn landed_results_are_salvaged_and_other_inputs_stay_intact() {
    use Does::{Answers, Lands, Nothing};
    let does = [Answers, Lands, Nothing, Lands, Nothing];
    let (params, device) = start("exchange:host-salvage", KEY, does);
    let mut driver = ZeroCopyDriver::attach(&params).expect("attached");
    let mut buffer = driver.alloc::<f32>(EACH * CHUNKS).expect("memory");
    buffer.copy_from_slice(&input());
    {
        let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut buffer));
        let (_, transfer) = post(&mut driver, all_reduce(EACH * CHUNKS), &mut buffers);
        assert_eq!(transfer, Transfer::Bounced);
        let deadline = Instant::now() + LONG;
        let error = loop {
            let next = driver.pump(&mut buffers);
            if let Some(Event::Failed(error)) = driver.poll_event() {
                break error;
            }
            assert!(Instant::now() < deadline, "loss not detected: {driver:?}");
            if next.is_none() {
                driver.wait(Some(LONG));
            }
        };
        assert_eq!(error, EndpointError::DeviceLost);
        driver.salvage(&mut buffers);
    }
    let (before, after) = (input(), flipped(&input()));
    for (nth, does) in does.into_iter().enumerate() {
        let chunk = nth * EACH..(nth + 1) * EACH;
        let expected = if does == Nothing { &before } else { &after };
        assert!(buffer[chunk.clone()] == expected[chunk], "chunk {nth}, of which the device {does:?}");
        let remains = driver.is_answered(nth as u64) || driver.published(nth as u64, &mut [0; CHUNK as usize]);
        assert_eq!(remains, does != Nothing, "chunk {nth}");
    }
    device.join().expect("the device");
}

/// Completed results are retained until they are stable, as no redo slot can be read.
#[test]
fn completed_results_are_retained() {
    let (params, device) = start("exchange:host-kept", KEY, [Does::Answers; CHUNKS]);
    let mut driver = ZeroCopyDriver::attach(&params).expect("attached");
    let mut values = driver.alloc::<f32>(EACH * CHUNKS).expect("memory");
    values.copy_from_slice(&input());
    let mut buffers = BorrowedBuffers::InPlace(bytemuck::cast_slice_mut(&mut values));
    let (op, _) = post(&mut driver, all_reduce(EACH * CHUNKS), &mut buffers);
    assert_eq!(drive(&mut driver, op, &mut buffers), Ok(()));
    let kept: Vec<_> = driver.ops().retained().map(|kept| (kept.from, kept.has_bytes())).collect();
    assert_eq!(kept, [(0, true)]);
    assert_eq!(values[..], flipped(&input()));
    device.join().expect("the device");
}

#[test]
fn device_without_the_key_is_rejected() {
    let (params, device) = start("exchange:host-stranger", KEY ^ 1, [Does::Nothing; CHUNKS]);
    let error = ZeroCopyDriver::attach(&params).map(drop).expect_err("a stranger");
    assert!(matches!(&error, AttachError::Remote(why) if why.contains("is not the leaf device")), "{error}");
    device.join().expect("the device");
}

#[test]
fn unreachable_device_and_unknown_port_are_named() {
    let (params, device) = start("exchange:host-absent", KEY, [Does::Nothing; CHUNKS]);
    let remote = params.remote.clone().expect("it has one");
    drop(ZeroCopyDriver::attach(&params));
    device.join().expect("the device");
    let error = ZeroCopyDriver::attach(&params).map(drop).expect_err("nobody listens").to_string();
    assert!(error.contains(&remote.addr.to_string()), "{error}");
    let remote = Some(Remote { link: "no:such:port:at:all".into(), ..remote });
    let error = ZeroCopyDriver::attach(&AttachParams { remote, ..params }).map(drop).expect_err("no port").to_string();
    assert!(error.contains("RDMA port"), "{error}");
}
