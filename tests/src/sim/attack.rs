//! An off-path attacker: it lacks the keys of other groups, but can send anything from any address, replay packets it
//! has seen, and is a regular member of a group of its own on the same devices.

use super::cluster::Cluster;
use super::incident::Alarm;
use super::options::Draw;
use super::wiring::{ATTACKER, Wiring, node_addr, rank_addr};
use std::collections::VecDeque;
use std::time::Duration;
use sumac_hal::emu::Delivery;
use sumac_hal::ids::{ChunkNo, Epoch};
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::port::Addr;
use sumac_hal::wire::{Flags, Kind, MAGIC, NakReason, Packet, Repr, VERSION, pack_op, payload_crc};

/// What the attacker has seen and sent.
pub(super) struct Attacker {
    draw: Draw,
    seen: VecDeque<Delivery>,
    sent: u64,
}

impl Attacker {
    pub(super) fn new(seed: u64) -> Self {
        Self { draw: Draw::new(seed ^ 0x6261_6421), seen: VecDeque::new(), sent: 0 }
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Count packets that others have forged.
    pub(super) fn count(&mut self, packets: u64) {
        self.sent += packets;
    }

    pub(super) fn record_packet(&mut self, delivery: Delivery) {
        if self.seen.len() == MEMORY_PACKETS {
            self.seen.pop_front();
        }
        self.seen.push_back(delivery);
    }

    /// Draw a packet seen before, and its header.
    fn recall(&mut self) -> Option<(Delivery, Repr)> {
        if self.seen.is_empty() {
            return None;
        }
        let seen = self.seen[self.draw.below(self.seen.len() as u64) as usize].clone();
        let repr = Repr::parse(&Packet::new_checked(&seen.bytes[..]).ok()?).ok()?;
        Some((seen, repr))
    }

    /// Forge a packet: (from, to, bytes).
    fn forge(&mut self, cluster: &Scene<'_>) -> Option<(Addr, Addr, Vec<u8>)> {
        let choice = self.draw.below(8);
        if choice == 0 {
            let mut bytes: Vec<u8> = (0..self.draw.below(300)).map(|_| self.draw.bits() as u8).collect();
            if let [magic, version, ..] = &mut bytes[..]
                && self.draw.chance(500)
            {
                // Of another version.
                (*magic, *version) = (MAGIC, VERSION + 1);
            }
            return Some((ATTACKER, self.recall()?.0.to, bytes));
        }
        if choice <= 2 {
            return Some(self.as_member(cluster));
        }
        let (seen, mut repr) = self.recall()?;
        let payload = seen.bytes[repr.header_len()..].to_vec();
        let mut from = seen.from;
        match choice {
            // Late copies of delivered packets, like duplicates of the network.
            3 => return Some((seen.from, seen.to, seen.bytes)),
            // The same from another address, to one that knows the real sender.
            4 => from = ATTACKER,
            // From another incarnation of the group, which had other keys.
            5 => {
                repr.epoch = Epoch { counter: self.draw.below(3) as u16, ..repr.epoch };
                repr.key = wrong_key(repr.key, &mut self.draw);
            }
            6 => repr.key = wrong_key(repr.key, &mut self.draw),
            // Packets that would end a group if keys or tokens were not checked.
            _ => {
                repr.kind = Kind::Nak;
                repr.flags.remove(Flags::SHORT);
                repr.reason = NakReason::from_wire(1 + self.draw.below(7) as u8);
                repr.bits2 = pack_op(&OpDesc::barrier());
                repr.collective = Some(OpDesc::barrier().collective);
                repr.key = wrong_key(repr.key, &mut self.draw);
            }
        }
        let payload = if repr.kind == Kind::Nak { Vec::new() } else { payload };
        Some((from, seen.to, sealed(repr, &payload)))
    }

    /// Anything that a member of another group can send, with a valid key, from its own address.
    fn as_member(&mut self, scene: &Scene<'_>) -> (Addr, Addr, Vec<u8>) {
        let draw = &mut self.draw;
        let rank = draw.below(scene.ranks as u64) as usize;
        let config = scene.wiring.endpoint(scene.options, (rank, scene.group), 0, scene.epoch);
        let numbers = [0, 1, 2, 3, 5, 17, 63, 64, 255, 1 << 20, u64::MAX - 1, u64::MAX];
        let op = OpDesc::all_reduce(draw.one_of(Dtype::ALL), draw.one_of(ReduceOp::ALL), draw.one_of(&numbers));
        let kinds = [
            Kind::Data,
            Kind::Data,
            Kind::Operation,
            Kind::Empty,
            Kind::Probe,
            Kind::Nak,
            Kind::Ref,
            Kind::Result,
            Kind::Status,
        ];
        let kind = draw.one_of(&kinds);
        let reason = (kind == Kind::Nak).then(|| NakReason::from_wire(1 + draw.below(7) as u8)).flatten();
        let repr = Repr {
            flags: Flags::from_bits_truncate(draw.bits() as u8),
            collective: Some(op.collective),
            dtype: op.dtype,
            op: op.op,
            bits: op.count,
            reason,
            child: if draw.chance(50) { sumac_hal::ids::ChildIndex(draw.bits() as u16) } else { config.child },
            count: draw.one_of(&[1, 1, 1, 0, 64, u16::MAX]),
            seq: ChunkNo(draw.one_of(&numbers)),
            mark: ChunkNo(if draw.chance(700) { 0 } else { draw.one_of(&numbers) }),
            signature: draw.below(2) as u32,
            token: draw.bits() as u32,
            bits2: draw.bits(),
            ..Repr::new(kind, config.group, config.epoch, config.child, config.key)
        };
        let payload: Vec<u8> = (0..draw.one_of(&[0, 4, 8, 16, 64, 300])).map(|_| draw.bits() as u8).collect();
        let shard = draw.below(config.parents.len() as u64) as u16;
        let Addr::Emu(leaf) = config.parents[0] else { unreachable!("emulated addresses only") };
        (rank_addr(rank, scene.group), node_addr(leaf as usize / 16, shard), sealed(repr, &payload))
    }
}

/// What the attacker knows of the cluster.
struct Scene<'a> {
    options: &'a super::options::Options,
    wiring: &'a Wiring,
    /// Its own group.
    group: usize,
    epoch: Epoch,
    ranks: usize,
}

impl Cluster<'_, '_> {
    /// Send a few forged packets, and repeat as long as ranks are active.
    pub(super) fn attack(&mut self) {
        let scene = Scene {
            options: self.options,
            wiring: &self.wirings[0],
            group: self.options.groups.len(),
            epoch: self.epoch,
            ranks: self.options.ranks,
        };
        for _ in 0..1 + self.attacker.draw.below(8) {
            if let Some((from, to, bytes)) = self.attacker.forge(&scene) {
                self.fabric.send(self.now, from, to, &bytes);
                self.attacker.sent += 1;
            }
        }
        if self.attacker.draw.chance(FLOODS_PER_MILLE) {
            self.flood(&scene);
        }
        if self.attacker.sent < ATTACKS_MAX {
            let pause = self.attacker.draw.one_of(&[1_000, 10_000, 100_000, 1_000_000]);
            let next = self.now + Duration::from_nanos(self.attacker.draw.below(pause));
            self.schedule(next, Alarm::Attack);
        }
    }
}

impl Cluster<'_, '_> {
    /// Send so many requests at once that a device's reply queue overflows.
    fn flood(&mut self, scene: &Scene<'_>) {
        let rank = self.attacker.draw.below(scene.ranks as u64) as usize;
        let config = scene.wiring.endpoint(scene.options, (rank, scene.group), 0, scene.epoch);
        let probe = Repr { count: 1, ..Repr::new(Kind::Probe, config.group, config.epoch, config.child, config.key) };
        let bytes = sealed(probe, &[]);
        for _ in 0..FLOOD_PACKETS {
            self.fabric.send(self.now, rank_addr(rank, scene.group), config.parents[0], &bytes);
        }
        self.attacker.sent += FLOOD_PACKETS;
    }
}

/// A wrong key that does not become valid by being corrupted again, as forged packets are also overheard.
pub(super) fn wrong_key(key: u64, draw: &mut Draw) -> u64 {
    key.wrapping_add(1 + draw.below(1 << 32))
}

pub(super) fn sealed(repr: Repr, payload: &[u8]) -> Vec<u8> {
    let repr = Repr { payload_len_bytes: payload.len() as u16, ..repr };
    let mut bytes = vec![0; repr.packet_len()];
    bytes[repr.header_len()..].copy_from_slice(payload);
    repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), payload_crc(payload));
    bytes
}

/// More packets than a device has room for replies, and as many as a port returns at once.
const FLOOD_PACKETS: u64 = 128;
/// Frequency of floods, in thousandths.
const FLOODS_PER_MILLE: u64 = 20;
const MEMORY_PACKETS: usize = 64;
const ATTACKS_MAX: u64 = 3_000;
