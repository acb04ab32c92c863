//! Polls components: packets to send, events, and the next timer.

use super::{Actor, Cluster};
use crate::sim::check::{check_queues, check_return};
use crate::sim::clock::{Clock, ClockOwner};
use crate::sim::coverage::Mark;
use crate::sim::loss::Point;
use crate::sim::report::Violation;
use crate::sim::route::{Route, is_loss_of_tree};
use crate::sim::wiring::{emulated, node_addr, rank_addr, sharer};
use sumac::transport::packets::Event;
use sumac_hal::time::Instant;

impl Cluster<'_, '_> {
    /// Poll touched components for output, and record their timers.
    pub(super) fn poll_touched(&mut self) -> Result<(), Violation> {
        for actor in std::mem::take(&mut self.touched) {
            let wake_at = match actor {
                Actor::Node { device, shard } => self.poll_node(device, shard)?,
                Actor::Rank { rank, group } => self.poll_rank(rank, group)?,
                Actor::Prober { rank, group } => self.poll_prober(rank, group)?,
            };
            if let Some(at) = self.timer_of.remove(&actor) {
                self.timers.remove(&(at, actor));
            }
            if let Some(at) = wake_at {
                self.timers.insert((at, actor));
                self.timer_of.insert(actor, at);
            }
        }
        Ok(())
    }

    fn poll_node(&mut self, device: usize, shard: usize) -> Result<Option<Instant>, Violation> {
        let now = self.device_time(device);
        let from = node_addr(device, shard as u16);
        // A port with a busy link accepts nothing more until the link is free.
        while self.devices[device].alive && self.fabric.ready_at(from) <= self.now {
            let node = &mut self.devices[device].shards[shard];
            let Some(sent) = node.poll_transmit(now) else { break };
            let len_bytes = sent.gather(node.payload(&sent)).write(&mut self.buffer);
            let bytes = &self.buffer[..len_bytes];
            if let Some(sharer) = sharer(sent.to) {
                // Copies diverge where they are made; each has its own fate.
                let wiring = self.wiring_at(device, sharer.1);
                let listeners = wiring.map_or_else(Vec::new, |wiring| wiring.listeners(self.options, sharer));
                listeners.iter().for_each(|&to| self.fabric.send(self.now, from, to, bytes));
                self.shared_sent += 1;
                self.shared_copies += listeners.len() as u64;
            } else {
                let to = emulated(sent.to);
                self.fabric.send(self.now, from, to, bytes);
                if self.options.has_paths() {
                    let sent = bytes.to_vec();
                    self.watch_sent(from, to, &sent)?;
                }
            }
            self.reach(Point::Sent, Some(device));
        }
        if !self.devices[device].alive {
            return Ok(None);
        }
        let node = &mut self.devices[device].shards[shard];
        while let Some(event) = node.poll_event() {
            self.seen.device_event(event);
        }
        let clock = Clock::draw(self.options.seed, ClockOwner::Device(device));
        let busy = Some(self.fabric.ready_at(from)).filter(|&at| at > self.now && node.poll_destination().is_some());
        let wake_at = node.poll_timeout().map(|at| clock.when(at)).into_iter().chain(busy).min();
        self.observe_slots(device, shard);
        Ok(wake_at)
    }

    fn poll_rank(&mut self, rank: usize, group: usize) -> Result<Option<Instant>, Violation> {
        if self.deaths.is_dead(rank) {
            return Ok(None);
        }
        let now = self.rank_time(rank);
        check_queues(self.options, &self.members[rank][group])?;
        let member = &mut self.members[rank][group];
        let from = rank_addr(rank, group);
        let mut probes = Vec::new();
        while self.fabric.ready_at(from) <= self.now
            && let Some(sent) = member.endpoint.poll_transmit(now, &member.memory)
        {
            let to = emulated(sent.to);
            let bytes = sent.write(sent.payload, &mut self.buffer);
            self.fabric.send(self.now, from, to, bytes);
            if self.options.has_paths() {
                probes.push((to, bytes.to_vec()));
            }
        }
        for (to, bytes) in probes {
            self.watch_sent(from, to, &bytes)?;
        }
        if self.collect(rank, group)? {
            self.check_stable(group, rank)?;
        }
        let member = &mut self.members[rank][group];
        let clock = Clock::draw(self.options.seed, ClockOwner::Rank(rank));
        let busy = self.fabric.ready_at(rank_addr(rank, group));
        let busy = Some(busy).filter(|&at| at > self.now && member.endpoint.poll_destination().is_some());
        let wake_at = member.endpoint.poll_timeout().map(|at| clock.when(at)).into_iter().chain(busy).min();
        let progress = member.endpoint.progress();
        if progress != member.progress {
            self.seen.endpoint(&member.progress, &progress);
            member.progress = progress;
        }
        Ok(wake_at)
    }

    /// Process the events of a rank's endpoint. Returns true if an operation has returned.
    pub(in crate::sim) fn collect(&mut self, rank: usize, group: usize) -> Result<bool, Violation> {
        let mut returned = false;
        loop {
            let member = &mut self.members[rank][group];
            let Some(event) = member.endpoint.poll_event() else { return Ok(returned) };
            let expected = member.done.wrapping_sub(member.first as u64);
            match event {
                Event::Completed(id) if id.0 == expected && member.error.is_none() => {
                    check_return(self.options, member, (group, rank, member.done as usize), &self.called)?;
                    self.seen.note(Mark::OpReturned);
                    returned = true;
                    if self.options.recovers() {
                        self.finish_op(rank, group)?;
                    } else {
                        member.done += 1;
                    }
                }
                Event::Completed(id) => {
                    return Err(Violation::Completion { group, rank, found: id.0, expected });
                }
                // Expected: the endpoint was frozen.
                Event::Failed(_) if member.membership.is_frozen() || member.route == Route::HostCollectives => {}
                Event::Failed(error) => {
                    self.seen.endpoint_error(error);
                    if self.options.recovers() && is_loss_of_tree(error) {
                        self.lose_tree(rank, group)?;
                    } else {
                        member.error = Some(error);
                    }
                }
                other => panic!("unknown event {other:?}"),
            }
        }
    }
}
