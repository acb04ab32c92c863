//! Incarnations of the group: devices boot, ranks attach, and after a recovery all continue in another epoch on another
//! tree.

use super::board::{Board, Completions, Place, Submissions, ranks_of};
use super::change::SLICE;
use super::driver::{Driver, Fence, Registered};
use super::world::{Alarm, Stage, Transport, World};
use crate::oracle::weight;
use crate::sim::coverage::Mark;
use crate::sim::options::Draw;
use crate::sim::report::Violation;
use crate::sim::wiring::{Wiring, group_id};
use std::sync::Arc;
use std::time::Duration;
use sumac::harness::{Landed, RedoPlace, RedoSlots};
use sumac::transport::memory::{BounceConfig, ZeroCopyConfig, ZeroCopyEndpoint};
use sumac::transport::packets::Endpoint;
use sumac_hal::ctrl::Request;
use sumac_hal::dma::DmaMemory;
use sumac_hal::emu::dma::HeapMemory;
use sumac_hal::ids::{Epoch, FunctionId, Rank, TreeId};

impl World<'_, '_> {
    /// Start a device with empty tables and the content of its redo memory.
    pub(super) fn boot(&mut self, index: usize) {
        let Some(tables) = self.spare.pop() else { return };
        let device = &mut self.devices[index];
        let boot_id = weight(&[self.options.seed, index as u64, device.incarnations, 0x626f_6f74]);
        let failing = self.by.failing(index);
        device.board = Some(Board::boot(
            self.options,
            &self.by.setup,
            (boot_id, device.incarnations, tables),
            &device.redo,
            failing,
        ));
        device.incarnations += 1;
        device.wake = Some(self.now);
    }

    /// Find another tree, and continue there in another epoch.
    pub(super) fn replan(&mut self) -> Result<(), Violation> {
        for device in &mut self.devices {
            device.is_lost |= device.stalled_until.is_some();
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
            if self.devices[index].stalled_until.is_none() {
                let board = self.devices[index].board.as_mut().expect("it is up");
                if board.node.has_group(group_id(0)) {
                    board.node.control(&Request::ReleaseGroup(group_id(0)), self.now);
                }
            }
            for (function, _) in functions {
                let after = self.random_delay(SLICE);
                self.schedule(after, Alarm::Detach { device: index, function });
            }
            self.wake_device(index, Duration::ZERO);
        }
        for (rank, member) in self.members.iter().enumerate() {
            let Transport::ZeroCopy(driver) = &member.transport else { continue };
            if driver.fence != Some(Fence::Severed) {
                let keys = driver.regions.keys().chain([&driver.bounce_key]);
                self.closed.extend(keys.map(|&key| ((driver.device, driver.device_incarnation, key), rank)));
            }
        }
        self.incarnation += 1;
        self.epoch = Epoch { counter: self.epoch.counter + 1, ..self.epoch };
        let mut devices = Vec::new();
        for _ in 0..self.wiring.nodes.len() {
            devices.push(free.swap_remove(self.draw.below(free.len() as u64) as usize));
        }
        self.wiring = Wiring::on(self.options, 0, TreeId(self.incarnation as u32 + 1), devices);
        self.seen.note(Mark::CommitTree);
        self.install()
    }

    /// Return whether a rank is zero-copy in this incarnation.
    fn is_zero_copy(&self, rank: usize) -> bool {
        self.by.setup.is_zero_copy(self.options.seed, self.incarnation, rank)
    }

    /// Create the group, attach the ranks, and post incomplete operations.
    pub(super) fn install(&mut self) -> Result<(), Violation> {
        for node in 0..self.wiring.nodes.len() {
            let device = self.wiring.nodes[node].device;
            let ranks: Vec<_> =
                ranks_of(&self.wiring, node).into_iter().filter(|&(rank, _)| self.is_zero_copy(rank)).collect();
            let children: Vec<_> = ranks.iter().map(|&(_, child)| child).collect();
            let config = self.wiring.group(self.options, node, 0, self.epoch);
            let refused = |response| Violation::Refused { device, response };
            let board = self.devices[device].board.as_mut().ok_or_else(|| refused("it is down".to_owned()))?;
            let tree = self.wiring.tree(node, 1);
            let (functions, place) = board.join((tree, config), &children, self.now).map_err(refused)?;
            self.seen.note(Mark::GroupCreated);
            for (&(rank, _), &function) in ranks.iter().zip(&functions) {
                let driver = self.driver(rank, (device, function), place.expect("a zero-copy child"));
                self.members[rank].transport = Transport::ZeroCopy(Box::new(driver));
            }
            self.wake_device(device, Duration::ZERO);
        }
        for rank in 0..self.members.len() {
            let (incarnation, zero_copy) = (self.incarnation, self.is_zero_copy(rank));
            let config = self.wiring.endpoint(self.options, (rank, 0), incarnation, self.epoch);
            let member = &mut self.members[rank];
            if !zero_copy {
                member.transport = Transport::Packets(Box::new(Endpoint::new(config)));
            }
            member.memory.first = member.done;
            (member.stage, member.landed) = (Stage::Running, Landed::default());
            member.wake = Some(self.now);
            (member.done..member.called).for_each(|op| self.post(rank, op));
        }
        Ok(())
    }

    /// Attach a rank to its leaf.
    fn driver(&mut self, rank: usize, at: (usize, FunctionId), place: Place) -> Driver {
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
        let config = ZeroCopyConfig {
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
            lands_in_bounce: false,
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
        Driver::new(
            (ZeroCopyEndpoint::new(config), redo),
            (at, device.incarnations),
            (submissions, completions),
            (bounce, region),
        )
    }

    /// Register the buffers of an operation, as many as are drawn.
    pub(super) fn register(&mut self, rank: usize, op: usize) {
        let (seed, incarnation, setup) = (self.options.seed, self.incarnation, &self.by.setup);
        let member = &mut self.members[rank];
        let Transport::ZeroCopy(driver) = &mut member.transport else { return };
        let device = &mut self.devices[driver.device];
        let Some(board) = device.board.as_mut().filter(|_| device.stalled_until.is_none()) else { return };
        for (buffer, bytes) in member.memory.ops[op].buffers().into_iter().enumerate() {
            let mut draw = Draw::new(weight(&[seed, incarnation, rank as u64, op as u64, buffer as u64]));
            if bytes.is_empty() || !draw.chance(setup.registered) {
                continue;
            }
            let base = draw.one_of(&[0, 0, 64, 64, 8, 3]);
            let memory = Arc::new(HeapMemory::new(base + bytes.len()));
            memory.write(base, bytes);
            if let Some(key) = board.register(driver.function, &memory) {
                self.seen.note(Mark::RefRegistered);
                driver.regions.insert(key, Registered { memory, op, buffer, base });
            }
        }
    }
}

/// Interval at which the controller retries to find devices.
const REPLAN_AGAIN: Duration = Duration::from_millis(100);
