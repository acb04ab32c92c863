//! temp
use std::collections::BTreeMap;
use std::time::Duration;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;

#[derive(Debug)]
pub struct Fabric {
    seq: u64,
    state: u64,
    queue: BTreeMap<(u64, u64), (Addr, Addr, Vec<u8>)>,
    pub faults: RandomFaults,
    pub hash: u64,
    pub sent: u64,
}
#[derive(Debug, Clone, Copy, Default)]
pub struct RandomFaults {
    pub loss: u32,
    pub duplicate: u32,
    pub reorder: u32,
    pub corrupt: u32,
    pub delay_max: Duration,
}
pub struct Delivery {
    pub at: Instant,
    pub from: Addr,
    pub to: Addr,
    pub bytes: Vec<u8>,
}
impl Fabric {
    pub fn new(seed: u64, faults: RandomFaults) -> Self {
        Self { seq: 0, state: seed, queue: BTreeMap::new(), faults, hash: 0, sent: 0 }
    }
    fn rnd(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        crate::oracle::weight(&[self.state])
    }
    fn hit(&mut self, pm: u32) -> bool {
        (self.rnd() % 1000) < u64::from(pm)
    }
    fn push(&mut self, at: u64, from: Addr, to: Addr, bytes: Vec<u8>) {
        self.seq += 1;
        self.queue.insert((at, self.seq), (from, to, bytes));
    }
    pub fn send(&mut self, now: Instant, from: Addr, to: Addr, bytes: &[u8]) {
        self.sent += 1;
        let f = self.faults;
        let base = now.as_nanos() + 5_000;
        let mut bytes = bytes.to_vec();
        if self.hit(f.loss) {
            return;
        }
        if self.hit(f.corrupt) {
            let n = bytes.len() as u64;
            let i = (self.rnd() % n) as usize;
            bytes[i] ^= 1 << (self.rnd() % 8);
        }
        let dm = f.delay_max.as_nanos() as u64 + 1;
        if self.hit(f.duplicate) {
            let d = self.rnd() % dm;
            self.push(base + d, from, to, bytes.clone());
        }
        let d = if self.hit(f.reorder) { self.rnd() % dm } else { 0 };
        self.push(base + d, from, to, bytes);
    }
    pub fn next_event(&self) -> Option<Instant> {
        self.queue.keys().next().map(|k| Instant::from_nanos(k.0))
    }
    pub fn poll_delivery(&mut self, now: Instant) -> Option<Delivery> {
        let (&(at, _), _) = self.queue.iter().next()?;
        if at > now.as_nanos() {
            return None;
        }
        let ((at, _), (from, to, bytes)) = self.queue.pop_first()?;
        self.hash = crate::oracle::weight(&[self.hash, at, u64::from(sumac_hal::wire::crc32c(&bytes))]);
        Some(Delivery { at: Instant::from_nanos(at), from, to, bytes })
    }
}
