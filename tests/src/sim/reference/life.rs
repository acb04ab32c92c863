//! The group's lives: devices boot, ranks attach, and after a repair all go on in another epoch on another tree.

use super::board::{Board, Completions, Place, Submissions, ranks_of};
use super::change::SLICE;
use super::seat::{Fence, Registered, Seat};
use super::world::{Alarm, Stage, Way, World};
use crate::oracle::weight;
use crate::sim::coverage::Mark;
use crate::sim::options::Draw;
use crate::sim::report::Violation;
use crate::sim::wiring::{Wiring, group_id};
use std::sync::Arc;
use std::time::Duration;
use sumac::rehearsal::{Landed, RedoPlace, RedoSlots};
use sumac::transport::memory::{BounceConfig, ReferenceConfig, ReferenceEndpoint};
use sumac::transport::packets::Endpoint;
use sumac_hal::ctrl::Request;
use sumac_hal::dma::DmaMemory;
use sumac_hal::emu::dma::HeapMemory;
use sumac_hal::ids::{Epoch, FunctionId, Rank, TreeId};

impl World<'_, '_> {
    /// Start a device, with empty tables and whatever its redo memory holds.
    pub(super) fn boot(&mut self, index: usize) {
        let Some(tables) = self.spare.pop() else { return };
        let device = &mut self.devices[index];
        let boot_id = weight(&[self.options.seed, index as u64, device.lives, 0x626f_6f74]);
        let failing = self.by.failing(index);
        device.board =
            Some(Board::boot(self.options, &self.by.setup, (boot_id, device.lives, tables), &device.redo, failing));
        device.lives += 1;
        device.wake = Some(self.now);
    }

    /// Find another tree, and go on there in another epoch.
    pub(super) fn replan(&mut self) -> Result<(), Violation> {
        for device in &mut self.devices {
            device.is_lost |= device.stands_until.is_some();
        }
        let up = |index: &usize| {
            let device = &self.devices[*index];
            device.board.is_some() && !device.is_lost
        };
        let mut free: Vec<usize> = (0..self.devices.len()).filter(up).collect();
        if free.len() < self.wiring.nodes.len() {
            self.schedule(REPLAN_AGAIN, Alarm::Replan);
            return Ok(());
        }
        for index in 0..self.devices.len() {
            let Some(board) = self.devices[index].board.as_mut() else { continue };
            let functions = board.attached();
            if self.devices[index].stands_until.is_none() {
                let board = self.devices[index].board.as_mut().expect("it is up");
                if board.node.has_group(group_id(0)) {
                    board.node.control(&Request::ReleaseGroup(group_id(0)), self.now);
                }
            }
            for (function, _) in functions {
                let after = self.a_while(SLICE);
                self.schedule(after, Alarm::Detach { device: index, function });
            }
            self.wake_device(index, Duration::ZERO);
        }
        for (rank, member) in self.members.iter().enumerate() {
            let Way::References(seat) = &member.way else { continue };
            if seat.fence != Some(Fence::Severed) {
                let keys = seat.regions.keys().chain([&seat.bounce_key]);
                self.closed.extend(keys.map(|&key| ((seat.device, seat.device_life, key), rank)));
            }
        }
        self.life += 1;
        self.epoch = Epoch { counter: self.epoch.counter + 1, ..self.epoch };
        let mut devices = Vec::new();
        for _ in 0..self.wiring.nodes.len() {
            devices.push(free.swap_remove(self.draw.below(free.len() as u64) as usize));
        }
        self.wiring = Wiring::on(self.options, 0, TreeId(self.life as u32 + 1), devices);
        self.seen.note(Mark::CommitTree);
        self.install()
    }

    /// Tell whether a rank contributes by reference in this life.
    fn is_by_reference(&self, rank: usize) -> bool {
        self.by.setup.is_by_reference(self.options.seed, self.life, rank)
    }

    /// Create the group, let ranks join it, and post what is not complete.
    pub(super) fn install(&mut self) -> Result<(), Violation> {
        for node in 0..self.wiring.nodes.len() {
            let device = self.wiring.nodes[node].device;
            let ranks: Vec<_> =
                ranks_of(&self.wiring, node).into_iter().filter(|&(rank, _)| self.is_by_reference(rank)).collect();
            let children: Vec<_> = ranks.iter().map(|&(_, child)| child).collect();
            let config = self.wiring.group(self.options, node, 0, self.epoch);
            let refused = |response| Violation::Refused { device, response };
            let board = self.devices[device].board.as_mut().ok_or_else(|| refused("it is down".to_owned()))?;
            let tree = self.wiring.tree(node, 1);
            let (functions, place) = board.join((tree, config), &children, self.now).map_err(refused)?;
            self.seen.note(Mark::GroupCreated);
            for (&(rank, _), &function) in ranks.iter().zip(&functions) {
                let seat = self.seat(rank, (device, function), place.expect("somebody is by reference"));
                self.members[rank].way = Way::References(Box::new(seat));
            }
            self.wake_device(device, Duration::ZERO);
        }
        for rank in 0..self.members.len() {
            let (life, by_reference) = (self.life, self.is_by_reference(rank));
            let config = self.wiring.endpoint(self.options, (rank, 0), life, self.epoch);
            let member = &mut self.members[rank];
            if !by_reference {
                member.way = Way::Packets(Box::new(Endpoint::new(config)));
            }
            member.memory.first = member.done;
            (member.stage, member.landed) = (Stage::Running, Landed::default());
            member.wake = Some(self.now);
            (member.done..member.called).for_each(|op| self.post(rank, op));
        }
        Ok(())
    }

    /// Attach a rank to its leaf.
    fn seat(&mut self, rank: usize, at: (usize, FunctionId), place: Place) -> Seat {
        let (options, setup, epoch) = (self.options, &self.by.setup, self.epoch);
        let device = &mut self.devices[at.0];
        let board = device.board.as_mut().expect("it has just joined");
        let submissions = Submissions::new(setup.ring).expect("a power of two");
        let completions = Completions::new(setup.ring).expect("a power of two");
        board.attach((at.1, rank, epoch), submissions.clone(), completions.clone());
        let alignment = u64::from(setup.alignment_bytes.max(64));
        let len_bytes = setup.bounce_chunks * u64::from(options.chunk_len_bytes).next_multiple_of(alignment);
        let bounce = Arc::new(HeapMemory::new(len_bytes as usize));
        let region = board.register(at.1, &bounce).expect("the first of its regions");
        let config = ReferenceConfig {
            group: group_id(0),
            epoch,
            rank: Rank(rank as u32),
            ranks: options.ranks as u32,
            chunk_len_bytes: options.chunk_len_bytes,
            window_max: options.window,
            table_version: 1,
            in_flight_max: setup.ring - 1,
            alignment_bytes: setup.alignment_bytes,
            bounce: BounceConfig { region, len_bytes },
            lands_apart: false,
        };
        let (offset_bytes, slot_len_bytes, slots) = (place.0, place.1 as u64, place.2 as u64);
        let chunk_len_bytes = options.chunk_len_bytes.into();
        let redo_place = RedoPlace { group: group_id(0), epoch, offset_bytes, slot_len_bytes, slots, chunk_len_bytes };
        let memory = Arc::clone(&device.redo);
        let read = move |at: u64, bytes: &mut [u8]| {
            let fits = at + bytes.len() as u64 <= memory.len_bytes() as u64;
            if fits {
                memory.read(at as usize, bytes);
            }
            fits
        };
        let redo = RedoSlots::new(redo_place, Box::new(read));
        Seat::new(
            (ReferenceEndpoint::new(config), redo),
            (at, device.lives),
            (submissions, completions),
            (bounce, region),
        )
    }

    /// Register the buffers of an operation, as many as are drawn.
    pub(super) fn register(&mut self, rank: usize, op: usize) {
        let (seed, life, setup) = (self.options.seed, self.life, &self.by.setup);
        let member = &mut self.members[rank];
        let Way::References(seat) = &mut member.way else { return };
        let device = &mut self.devices[seat.device];
        let Some(board) = device.board.as_mut().filter(|_| device.stands_until.is_none()) else { return };
        for (buffer, bytes) in member.memory.ops[op].buffers().into_iter().enumerate() {
            let mut draw = Draw::new(weight(&[seed, life, rank as u64, op as u64, buffer as u64]));
            if bytes.is_empty() || !draw.chance(setup.registered) {
                continue;
            }
            let base = draw.one_of(&[0, 0, 64, 64, 8, 3]);
            let memory = Arc::new(HeapMemory::new(base + bytes.len()));
            memory.write(base, bytes);
            if let Some(key) = board.register(seat.function, &memory) {
                self.seen.note(Mark::RefRegistered);
                seat.regions.insert(key, Registered { memory, op, buffer, base });
            }
        }
    }
}

/// When the controller looks again for devices.
const REPLAN_AGAIN: Duration = Duration::from_millis(100);
