//! The endpoint against an oracle, and the driver against small devices in threads of this process: honest, silent,
//! hostile and dying ones.

mod allocations;
mod answers;
mod collectives;
mod communicator;
mod device;
mod driver;
mod endings;
mod heartbeat;
mod remote;
mod retained;
mod severed;

use super::endpoint::{BounceConfig, ZeroCopyConfig, ZeroCopyEndpoint};
use sumac_hal::dma::RegionKey;
use sumac_hal::ids::{Epoch, GroupId, Rank};

const GROUP: GroupId = GroupId(7);
const EPOCH: Epoch = Epoch { term: 1, counter: 2 };
const BOUNCE: RegionKey = RegionKey { index: 3, generation: 1 };

fn config(rank: u32, ranks: u32, chunk_len_bytes: u16) -> ZeroCopyConfig {
    ZeroCopyConfig {
        group: GROUP,
        epoch: EPOCH,
        rank: Rank(rank),
        ranks,
        chunk_len_bytes,
        window_max: 64,
        table_version: 1,
        in_flight_max: 40,
        alignment_bytes: 1,
        bounce: BounceConfig { region: BOUNCE, len_bytes: 512 },
        lands_in_bounce: false,
    }
}

fn endpoint(rank: u32, ranks: u32) -> ZeroCopyEndpoint {
    ZeroCopyEndpoint::new(config(rank, ranks, 64))
}
