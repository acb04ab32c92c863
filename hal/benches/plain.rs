//! Two transports of plain memory to a device's processor on the same machine, which adds it up: copied by the rank to
//! a bounce buffer, as it is done, and copied by the device out of the rank's memory, by `process_vm_readv(2)`.
//!
//! Rank and device are threads of one process; the kernel does the same work as between processes. Printed are medians
//! of the time that an input takes: through the bounce buffer with a core for each side, which then work at the same
//! time, or with one core for both, which take turns; and by `process_vm_readv`, for which the rank does nothing.
//!
//! Run with `cargo bench -p sumac-hal --features std --bench plain`. It asserts only that all was added up.

#[cfg(target_os = "linux")]
fn main() {
    // `cargo bench` passes `--bench`. `cargo test --benches` does not; there is nothing to test.
    if std::env::args().any(|arg| arg == "--bench") {
        linux::main();
    } else {
        println!("nothing measured: use `cargo bench`, or pass --bench");
    }
}

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("nothing measured: process_vm_readv is Linux's");
}

#[cfg(target_os = "linux")]
mod linux {
    use std::cell::UnsafeCell;
    use std::hint::spin_loop;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};
    use sumac_hal::op::{Dtype, ReduceOp};
    use sumac_hal::reduce::Kernel;

    /// The length of a chunk of a tree of one device, in bytes.
    const CHUNK_LEN_BYTES: usize = 60 << 10;

    /// The chunks of a bounce buffer of 1 MiB.
    const BOUNCE_CHUNKS: usize = (1 << 20) / CHUNK_LEN_BYTES;

    const ROUNDS: usize = 31;

    pub(super) fn main() {
        println!("{:>5} {:>16} {:>16} {:>16}", "MiB", "two cores ms", "one core ms", "readv ms");
        for mib in [1, 4, 16] {
            let input: Vec<u8> = (0..mib << 18).flat_map(|_| 1_f32.to_le_bytes()).collect();
            let all: [Transport; 3] = [side_by_side, in_turns, read_out];
            let [two, one, readv] = all.map(|transport| run(&input, transport));
            println!("{mib:>5} {two:>16.3} {one:>16.3} {readv:>16.3}");
        }
    }

    /// A bounce buffer: chunks below `filled` were written, those below `added` are free again.
    struct Bounce {
        chunks: Vec<UnsafeCell<[u8; CHUNK_LEN_BYTES]>>,
        /// The rank has its core, and begins once it may.
        is_ready: AtomicBool,
        may_begin: AtomicBool,
        filled: AtomicUsize,
        added: AtomicUsize,
    }

    // SAFETY: a chunk is written by one thread before `filled` passes it, read by the other before `added` does, and
    // written again only then.
    unsafe impl Sync for Bounce {}

    /// Takes an input to `add`, chunk by chunk, and returns the time.
    type Transport = fn(&[u8], &Bounce, &mut dyn FnMut(&[u8])) -> Duration;

    /// Return the median of the time, in milliseconds.
    fn run(input: &[u8], transport: Transport) -> f64 {
        let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("f32 sums are supported");
        let mut took: Vec<Duration> = Vec::new();
        for _ in 0..ROUNDS {
            let chunks = (0..BOUNCE_CHUNKS).map(|_| UnsafeCell::new([1; CHUNK_LEN_BYTES])).collect();
            let [is_ready, may_begin] = [false; 2].map(AtomicBool::new);
            let [filled, added] = [0; 2].map(AtomicUsize::new);
            let bounce = Bounce { chunks, is_ready, may_begin, filled, added };
            let (mut acc, mut seen) = (vec![0; CHUNK_LEN_BYTES], 0);
            pin(1);
            took.push(transport(input, &bounce, &mut |chunk| {
                kernel.combine(&mut acc[..chunk.len()], chunk, false);
                seen += chunk.len();
            }));
            assert_eq!(seen, input.len(), "all chunks came");
            let (sums, chunks) = (acc.as_chunks::<4>().0, input.len() / CHUNK_LEN_BYTES);
            assert!(f32::from_le_bytes(sums[0]) >= chunks as f32, "every chunk was added");
        }
        took.sort_unstable();
        took[took.len() / 2].as_secs_f64() * 1e3
    }

    fn side_by_side(input: &[u8], bounce: &Bounce, add: &mut dyn FnMut(&[u8])) -> Duration {
        thread::scope(|scope| {
            scope.spawn(|| {
                pin(0);
                bounce.is_ready.store(true, Ordering::Release);
                while !bounce.may_begin.load(Ordering::Acquire) {
                    spin_loop();
                }
                for (nth, chunk) in input.chunks(CHUNK_LEN_BYTES).enumerate() {
                    while nth >= bounce.added.load(Ordering::Acquire) + BOUNCE_CHUNKS {
                        spin_loop();
                    }
                    let place = bounce.chunks[nth % BOUNCE_CHUNKS].get();
                    // SAFETY: the other thread has added up what was here before (`Bounce`).
                    unsafe { (&mut *place)[..chunk.len()].copy_from_slice(chunk) };
                    bounce.filled.store(nth + 1, Ordering::Release);
                }
            });
            while !bounce.is_ready.load(Ordering::Acquire) {
                thread::yield_now();
            }
            let start = Instant::now();
            bounce.may_begin.store(true, Ordering::Release);
            for (nth, chunk) in input.chunks(CHUNK_LEN_BYTES).enumerate() {
                while bounce.filled.load(Ordering::Acquire) <= nth {
                    spin_loop();
                }
                // SAFETY: the other thread has written this chunk and waits until it is added up (`Bounce`).
                add(unsafe { &(&*bounce.chunks[nth % BOUNCE_CHUNKS].get())[..chunk.len()] });
                bounce.added.store(nth + 1, Ordering::Release);
            }
            start.elapsed()
        })
    }

    fn in_turns(input: &[u8], bounce: &Bounce, add: &mut dyn FnMut(&[u8])) -> Duration {
        let start = Instant::now();
        for (nth, chunk) in input.chunks(CHUNK_LEN_BYTES).enumerate() {
            // SAFETY: only this thread uses the buffer.
            let place = unsafe { &mut (&mut *bounce.chunks[nth % BOUNCE_CHUNKS].get())[..chunk.len()] };
            place.copy_from_slice(chunk);
            add(std::hint::black_box(place));
        }
        start.elapsed()
    }

    fn read_out(input: &[u8], _: &Bounce, add: &mut dyn FnMut(&[u8])) -> Duration {
        let mut staging = vec![1_u8; CHUNK_LEN_BYTES];
        let start = Instant::now();
        for chunk in input.chunks(CHUNK_LEN_BYTES) {
            let to = libc::iovec { iov_base: staging.as_mut_ptr().cast(), iov_len: chunk.len() };
            let from = libc::iovec { iov_base: chunk.as_ptr().cast_mut().cast(), iov_len: chunk.len() };
            // SAFETY: the kernel reads the chunk, which is borrowed, and writes as many bytes to the staging buffer,
            // which is borrowed mutably and as long.
            let copied = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
            assert_eq!(usize::try_from(copied), Ok(chunk.len()), "the kernel permits it within a process");
            add(&staging[..chunk.len()]);
        }
        start.elapsed()
    }

    /// Pin this thread to one core. If the core is not available, the thread is not pinned.
    fn pin(core: usize) {
        let mut cores = rustix::thread::CpuSet::new();
        cores.set(core);
        let _ = rustix::thread::sched_setaffinity(None, &cores);
    }
}
