//! The connecting side's second half: ranks whose memory the device on the other machine reads and writes.

use super::device::{CHUNK, EXCHANGES, PLACES, SHORT, STREAMED};
use super::{LEN, Other, VICTIM_PORT, link_end_of, meet, numbers_of, numbers_of_end, rates};
use crate::LIMIT;
use crate::messages::{next, send};
use crate::one_sided::domain;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;
use sumac_hal::remote::{Access, Arrived, CREDITS, Link, LinkError, MESSAGE_LEN_BYTES, RankLink};
use sumac_hal::shm::{Pages, Region};
use sumac_hal::verbs::{RankEnd, VerbsLink};

struct Rank {
    end: RankEnd,
    /// The memory that the device may read.
    buffer: Region,
    /// The memory that the device may write.
    landing: Region,
}

/// All checks of the ranks' side.
pub(super) fn check(link: &VerbsLink, host: &str, other: &mut Other) {
    let [mut first, mut second] = [0, 1].map(|_| attach(link, other));
    talk(&mut [&mut first, &mut second]);
    latency(&mut first);
    meet(other);
    land(&mut first, other);
    fence_during_writes(&mut first, other);
    kill(link, host, other);
    let mut last = attach(link, other);
    talk(&mut [&mut second, &mut last]);
}

fn attach(link: &VerbsLink, other: &mut Other) -> Rank {
    let mut end = RankEnd::new(domain(link)).expect("an end");
    let memory = || Region::create(LEN, Pages::Normal).expect("memory");
    let again = |region: &Region| Region::open(region.file().try_clone_to_owned().expect("a file"), LEN as u64);
    let (buffer, landing) = (memory(), memory());
    let regions = [(&buffer, Access::Read), (&landing, Access::Land)]
        .map(|(region, access)| end.expose(again(region).expect("memory"), access).expect("registered"));
    let own = [numbers_of_end(&end.end()), numbers_of(&regions[0]), numbers_of(&regions[1])].concat();
    let received = other.exchange(&own);
    end.connect(&link_end_of(&received)).expect("connected");
    meet(other);
    Rank { end, buffer, landing }
}

fn talk(ranks: &mut [&mut Rank; 2]) {
    for round in 0..EXCHANGES {
        for rank in &mut *ranks {
            for nth in 0..CREDITS {
                send(&mut rank.end, &[1; 4 * SHORT][..SHORT + round + nth as usize]).expect("it goes on");
            }
        }
        for rank in &mut *ranks {
            assert_eq!(next(&mut rank.end), Ok(Arrived::Message(SHORT)));
        }
    }
}

fn latency(rank: &mut Rank) {
    let (start, mut times) = (Instant::now(), Vec::new());
    while rates::is_open(&times, start) {
        let sent = Instant::now();
        send(&mut rank.end, &[0; SHORT]).expect("it goes on");
        assert_eq!(rates::next(&mut rank.end), Ok(Arrived::Message(SHORT)));
        times.push(sent.elapsed());
    }
    send(&mut rank.end, &[0; SHORT + 1]).expect("it goes on");
    rates::print_latency("message", SHORT, 2, times);
}

/// The values that the device reads.
fn values() -> Vec<u8> {
    (0..CHUNK).map(|i| (i * 7 % 251) as u8).collect()
}

/// What is announced has been written completely, in order.
fn land(rank: &mut Rank, other: &mut Other) {
    rank.buffer.write(CHUNK as usize, &values());
    // The device reads after this.
    meet(other);
    for nth in 0..PLACES as u32 {
        assert_eq!(next(&mut rank.end), Ok(Arrived::Landed(nth * CHUNK)));
        let mut landed = vec![0; CHUNK as usize];
        rank.landing.read((nth * CHUNK) as usize, &mut landed);
        assert!(landed == values(), "place {nth}");
    }
    meet(other);
    let mut results = 0;
    while next(&mut rank.end) != Ok(Arrived::Message(SHORT)) {
        results += 1;
    }
    assert_eq!(other.exchange(&[results]), [results], "results that were written, and announced");
}

/// After a fence during a stream of writes nothing is written any more.
fn fence_during_writes(rank: &mut Rank, other: &mut Other) {
    let (start, mut message, mut first) = (Instant::now(), [0; MESSAGE_LEN_BYTES], [0]);
    while first != [STREAMED] {
        assert!(start.elapsed() < LIMIT, "no write takes effect");
        rank.end.receive(&mut message).expect("it goes on");
        rank.landing.read(0, &mut first);
    }
    rank.end.fence().expect("fenced");
    rank.landing.write(0, &[1; LEN]);
    // The device has seen an error by then, and will not write any more.
    meet(other);
    let mut found = vec![0; LEN];
    rank.landing.read(0, &mut found);
    assert!(found == [1; LEN], "something was written after the fence");
    loop {
        match rank.end.receive(&mut message) {
            Ok(Some(_)) => {}
            Err(error) => break assert_eq!(error, LinkError::Fenced),
            Ok(None) => panic!("the connection has not ended"),
        }
    }
}

/// Start another process with a rank, and kill it while the device writes to its memory.
fn kill(link: &VerbsLink, host: &str, other: &mut Other) {
    let program = std::env::current_exe().expect("a path");
    let mut victim = Command::new(program);
    let mut victim =
        victim.args(["victim", &link.to_string(), host]).stdout(Stdio::piped()).spawn().expect("a process");
    let mut line = String::new();
    BufReader::new(victim.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    // The device writes from now on.
    meet(other);
    victim.kill().expect("it runs");
    victim.wait().expect("it has ended");
    meet(other);
}

/// The process that gets killed: a rank with messages that the device does not take.
pub(crate) fn victim(link: &VerbsLink, host: &str) {
    let mut other = Other::connect(Some(host), VICTIM_PORT);
    let mut rank = attach(link, &mut other);
    for _ in 0..CREDITS {
        send(&mut rank.end, &[0; SHORT]).expect("it goes on");
    }
    meet(&mut other);
    for _ in 0..CREDITS {
        send(&mut rank.end, &[0; SHORT]).expect("it goes on");
    }
    println!("ready");
    // The other side ends after the parent that should have killed this process.
    _ = other.reader.read_line(&mut String::new());
}
