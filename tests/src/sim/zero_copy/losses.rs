//! Every single loss of a device in small zero-copy clusters, for searches that leave nothing to chance.
//!
//! Two or three ranks on one device call two all-reduces, the first out of place and the second in place. Every caller
//! overwrites its buffers as soon as an operation returns. The device is lost at each point of each chunk, in each way.

use super::draw::{CrashPoint, Fate, Mishap, Setup, When, ZeroCopy};
use crate::oracle::{Shape, weight};
use crate::sim::options::{GroupOptions, Options, Sharing};
use crate::sim::planted::Planted;
use crate::sim::{Faults, Scenario};
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::dma::Profile;
use sumac_hal::emu::LinkConfig;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// Payload limit of a chunk, in bytes.
const CHUNK_LEN_BYTES: u16 = 64;

/// Elements of an operation: two chunks, the second one partial.
const ELEMENTS: u64 = 10;

/// How often a point is reached at most: once per chunk, contribution and answer.
const OCCURRENCES: u64 = 12;

/// Return a cluster for each combination.
pub fn every_device_loss(planted: Planted) -> impl Iterator<Item = Options> {
    let shapes = [(2, 1), (2, 2), (3, 2)].into_iter();
    let all = shapes.flat_map(|shape| [9, 64].map(|max_steps| (shape, max_steps)));
    let all = all.flat_map(|by| [0, 1000].map(|registered| (by, registered)));
    let all = all.flat_map(|by| CrashPoint::ALL.map(|point| (by, point)));
    let all = all.flat_map(|by| (1..=OCCURRENCES).map(move |nth| (by, nth)));
    let fates = || [Fate::Dies, Fate::Restarts(Duration::from_millis(30)), Fate::Stands(Duration::from_secs(8))];
    let all = all.flat_map(move |by| fates().map(|fate| (by, fate)));
    all.map(move |((((((ranks, window), max_steps), registered), point), nth), fate)| {
        let setup = Setup { max_steps, depth: 2 * max_steps, registered, ..SETUP };
        let mishap = Mishap::Device { device: 0, when: When::Point(point, nth), fate };
        cluster((ranks, window), ZeroCopy { setup, mishaps: vec![mishap], severs: false }, planted)
    })
}

const SETUP: Setup = Setup {
    share: 1000,
    profile: Profile::Full,
    max_steps: 64,
    depth: 64,
    alignment_bytes: 1,
    step: Duration::from_nanos(400),
    ring: 16,
    bounce_chunks: 4,
    registered: 1000,
    lag: Duration::from_micros(50),
    severing: Duration::from_millis(1),
};

fn cluster((ranks, window): (usize, u16), by: ZeroCopy, planted: Planted) -> Options {
    let op = OpDesc::all_reduce(Dtype::U64, ReduceOp::Sum, ELEMENTS);
    // Whether an operation is in place follows from the seed (`OpMemory::before`).
    let seed = (0..).find(|&seed| [0, 1].map(|op| weight(&[seed, 0, op]) & 1) == [0, 1]).unwrap_or(0);
    Options {
        seed,
        trees: vec![Shape::Node((0..ranks).map(Shape::Rank).collect())],
        ranks,
        groups: vec![GroupOptions { tree: 0, order: Order::TreeFold, ops: vec![op; 2] }],
        shards: 1,
        window,
        chunk_len_bytes: CHUNK_LEN_BYTES,
        link: LinkConfig::default(),
        sharing: Sharing::Off,
        spares: 1,
        faults: Faults::default(),
        skew_max: Duration::ZERO,
        scenario: Scenario::ZeroCopy(by),
        planted,
    }
}
