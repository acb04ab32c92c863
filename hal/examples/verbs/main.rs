//! Checks the verbs port on a machine with RDMA ports: `verbs CHECK LINK...`.
//!
//! | check | contents |
//! |---|---|
//! | conform | the conformance suite, with ports on the links in turn |
//! | count | a burst is one post and one completion; small packets are inline; nothing is allocated |
//! | cycles | opening and closing a thousand ports leaks nothing in this process |
//! | sided | RDMA READ and WRITE: bounds, forged and revoked keys, fences, dead peers, a thousand connections |
//! | lossy | the same, on links that lose packets, where a refusal may read as a dead peer |
//! | engine | a DMA engine over such connections: pulls, combines and writes back the memory of two ranks; lost ranks |
//! | messages | messages through a shared receive queue: announcements of results, fences, counts of posts |
//! | memcpy | the DMA engine of a BlueField-2 or later, or that of LINK `emulated`: copies, refusals, its rate beside the processor's; then copies from and to memory by alias keys, that of this process or, with `memcpy LINK -`, what `export` grants, which is read from the input |
//! | export | memory of this host for the engine of its card: prints `grant GRANT`, and checks what the card writes |
//! | two | the other end is on another machine: `two LINK` waits for it, `two LINK HOST` connects to it. Packets, reads, writes with immediate data, a shared receive queue, a fence during writes, a killed process, rates and latencies |
//! | outage | packets flow again after a link was down: prints `down`, waits for a line, prints `up`, waits again |
//!
//! Prints `ok CHECK` and exits with status 0, or panics with the violated expectation. `memcpy` on a device without an
//! engine prints the reason and exits with status 1.

mod engine;
mod memcpy;
mod messages;
mod one_sided;
mod two;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::BufRead;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant as Clock};
use sumac_hal::port::conformance::{Testbed, WaitTestbed, run, run_wait};
use sumac_hal::port::{Addr, Port, RxToken, TxToken, WaitPort, Wake};
use sumac_hal::time::Instant;
use sumac_hal::verbs::{VerbsConfig, VerbsLink, VerbsPort};

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with a counter. It does not see the verbs library's own allocations.
struct Counting;

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Return the number of allocations of this process.
fn allocations() -> usize {
    COUNT.load(Ordering::Relaxed)
}

/// The limit of each wait.
const LIMIT: Duration = Duration::from_secs(20);

struct VerbsBed {
    links: Vec<VerbsLink>,
    opened: usize,
    start: Clock,
}

impl VerbsBed {
    fn open(&mut self) -> VerbsPort {
        let link = self.links[self.opened % self.links.len()].clone();
        self.opened += 1;
        VerbsPort::open(&VerbsConfig { link, ..VerbsConfig::default() }).expect("a port")
    }
}

impl Testbed for VerbsBed {
    type Port = VerbsPort;

    fn ports(&mut self, n: usize) -> Vec<VerbsPort> {
        (0..n).map(|_| self.open()).collect()
    }

    fn addr_of(&self, port: &VerbsPort) -> Addr {
        port.local_addr()
    }

    /// The number of a queue pair that is closed again; numbers are not reused soon.
    fn unused_addr(&mut self) -> Addr {
        self.open().local_addr()
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Yield a processor to the kernel's threads, which do Soft-RoCE's work.
    fn advance(&mut self) {
        std::thread::sleep(Duration::from_micros(50));
    }
}

impl WaitTestbed for VerbsBed {
    fn waker(&mut self, port: &VerbsPort) -> Box<dyn Fn() + Send> {
        let waker = port.waker();
        Box::new(move || waker.wake())
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let check = args.next().expect("a check");
    let words: Vec<String> = args.collect();
    let names = if ["two", "victim", "memcpy", "export"].contains(&&*check) { &words[..1] } else { &words[..] };
    let links: Vec<VerbsLink> = names.iter().map(|link| link.parse().expect("a link")).collect();
    let mut bed = VerbsBed { links, opened: 0, start: Clock::now() };
    match check.as_str() {
        "conform" => {
            assert_eq!(run(&mut bed), Ok(()));
            assert_eq!(run_wait(&mut bed), Ok(()));
        }
        "count" => count(&mut bed),
        "cycles" => {
            let mut peer = bed.open();
            cycles(|| burst(&mut bed.open(), &mut peer, 1, 64));
        }
        "two" => two::run(&bed.links[0], words.get(1).map(String::as_str)),
        // A process that `two` starts, and kills.
        "victim" => two::victim(&bed.links[0], &words[1]),
        "sided" => one_sided::run(&bed.links, one_sided::Loss::None),
        "lossy" => one_sided::run(&bed.links, one_sided::Loss::Some),
        "engine" => engine::check(&bed.links),
        "memcpy" => {
            // Arguments of a process are no secret; a line of input is.
            let grant = words.get(1).map(|word| {
                assert_eq!(word, "-", "a grant comes from the input");
                let text = std::io::read_to_string(std::io::stdin().lock()).expect("text");
                text.trim().parse().expect("a grant")
            });
            if let Err(why) = memcpy::check(&bed.links[0], grant.as_ref()) {
                eprintln!("no DMA engine: {why}");
                std::process::exit(1);
            }
        }
        "export" => {
            if let Err(why) = memcpy::export(&bed.links[0]) {
                eprintln!("no export: {why}");
                std::process::exit(1);
            }
        }
        "messages" => messages::check(&bed.links),
        "outage" => outage(&mut bed),
        other => panic!("{other} is no check"),
    }
    println!("ok {check}");
}

/// Send `packets` packets in one flush, and wait until they have arrived.
fn burst(from: &mut VerbsPort, to: &mut VerbsPort, packets: usize, len: usize) {
    burst_out(from, to.local_addr(), packets, len);
    burst_in(to, packets, len);
}

/// Send `packets` packets in one flush.
fn burst_out(from: &mut VerbsPort, to: Addr, packets: usize, len: usize) {
    let now = Instant::ZERO;
    for _ in 0..packets {
        from.transmit(now).expect("room").consume(to, |buffer| (buffer[..len].fill(7), (len, ())).1);
    }
    from.flush(now);
}

/// Wait until `packets` packets have arrived.
fn burst_in(to: &mut VerbsPort, packets: usize, len: usize) {
    for _ in 0..packets {
        loop {
            if let Some(token) = to.receive(Instant::ZERO) {
                assert_eq!(token.consume(|_, bytes| bytes.len()), len);
                break;
            }
            assert_eq!(to.wait(Some(LIMIT)), Wake::Packet, "a packet is missing");
        }
    }
}

fn count(bed: &mut VerbsBed) {
    const BURSTS: u64 = 50;
    const PACKETS: u64 = 32;
    let (mut a, mut b) = (bed.open(), bed.open());
    let longest = a.capabilities().max_packet_len_bytes;
    burst(&mut a, &mut b, 1, longest);
    for (len, is_small) in [(96, true), (longest, false)] {
        let (before, allocations) = (a.stats(), allocations());
        for _ in 0..BURSTS {
            burst(&mut a, &mut b, PACKETS as usize, len);
        }
        assert_eq!(self::allocations() - allocations, 0, "allocations on the data path");
        // The next flush polls the completions of the last burst.
        a.flush(Instant::ZERO);
        let stats = a.stats();
        assert_eq!(stats.sent_packets - before.sent_packets, BURSTS * PACKETS);
        assert_eq!(stats.send_posts - before.send_posts, BURSTS, "one post a burst");
        let completions = stats.send_completions - before.send_completions;
        assert!((BURSTS - 1..=BURSTS + 1).contains(&completions), "one completion a burst, not {completions}");
        assert_eq!(stats.sent_inline - before.sent_inline, if is_small { BURSTS * PACKETS } else { 0 });
    }
    let stats = b.stats();
    println!(
        "{} packets: {} polls, {} posts of buffers",
        stats.received_packets, stats.receive_polls, stats.receive_posts
    );
    assert_eq!((a.stats().restarts, stats.restarts, stats.receive_errors), (0, 0, 0));
    assert!(stats.receive_posts <= 16 + stats.receive_polls, "buffers go back in batches");
}

/// Repeat this a thousand times, and check that open files and resident memory have not grown.
fn cycles(mut once: impl FnMut()) {
    const CYCLES: usize = 1000;
    let mut before = None;
    for cycle in 0..CYCLES {
        once();
        // The first cycles include one-time allocations of libraries.
        if cycle == 10 {
            before = Some(held());
        }
    }
    let (files, kib) = held();
    let (files_before, kib_before) = before.expect("more than ten cycles");
    println!("open files {files_before} -> {files}, memory {kib_before} -> {kib} KiB");
    assert_eq!(files, files_before, "open files");
    assert!(kib < kib_before + 4096, "memory grows: {kib_before} -> {kib} KiB");
}

/// Return the number of open files of this process, and its resident memory in KiB.
fn held() -> (usize, u64) {
    let files = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a resident size");
    (files, line.trim().trim_end_matches(" kB").parse().expect("a number"))
}

fn outage(bed: &mut VerbsBed) {
    let (mut a, mut b) = (bed.open(), bed.open());
    let (to, now) = (b.local_addr(), Instant::ZERO);
    let addr = a.local_addr();
    burst(&mut a, &mut b, 10, 1000);
    let prompt = |what: &str| {
        println!("{what}");
        std::io::stdin().lock().read_line(&mut String::new()).expect("a line");
    };
    prompt("down");
    for _ in 0..100 {
        if let Some(token) = a.transmit(now) {
            token.consume(to, |buffer| (buffer[..1000].fill(1), (1000, ())).1);
        }
        a.flush(now);
        assert_eq!(a.wait(Some(Duration::from_millis(1))), Wake::Timeout, "nothing can arrive");
    }
    println!("while it was down: {:?}", a.stats());
    prompt("up");
    let start = Clock::now();
    loop {
        assert!(start.elapsed() < LIMIT, "nothing arrives after the outage: {a:?} {b:?}");
        if let Some(token) = a.transmit(now) {
            token.consume(to, |buffer| (buffer[..900].fill(2), (900, ())).1);
        }
        a.flush(now);
        b.wait(Some(Duration::from_millis(20)));
        let Some(token) = b.receive(now) else { continue };
        if token.consume(|from, bytes| (from, bytes.len())) == (addr, 900) {
            break;
        }
    }
    println!("after {} ms: {:?}", start.elapsed().as_millis(), a.stats());
}
