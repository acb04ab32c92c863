//! What is lost in the middle of operations and of repairs: devices, links, the controller; at drawn moments, or right
//! after something of which there are few moments.

use super::cluster::Cluster;
use super::coverage::Mark;
use super::deaths::Victim;
use super::faults::moment;
use super::incident::Alarm;
use super::options::{Draw, Options};
use super::wiring::{node_addr, rank_addr};
use std::time::Duration;
use sumac_hal::emu::Partition;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;

/// What is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ill {
    /// A device stops for good.
    Die(usize),
    /// A device starts with empty tables.
    Restart(usize),
    /// One way of the link above a rank, so many nodes up, of the tree that its first group has then.
    Cut {
        /// The rank.
        rank: usize,
        /// Nodes between it and the link, modulo the length of its way.
        hop: usize,
        /// Packets to the parent are lost, else those to the child.
        up: bool,
        /// For how long.
        len: Duration,
    },
    /// The controller forgets everything, and is away for a while.
    Controller(Duration),
    /// The controller is gone for good.
    NoController,
    /// A rank dies.
    Kill(Victim),
    /// Ranks do not hear each other across two sides.
    Split {
        /// Says who is on which side.
        salt: u64,
        /// Which share of the ranks is on the first, in thousandths.
        share: u64,
        /// For how long.
        len: Duration,
    },
}

/// A step of an operation or a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// A device has completed a chunk, and told nobody.
    Completed,
    /// A device has sent a packet.
    Sent,
    /// A rank has frozen its endpoint.
    Frozen,
    /// A rank has worked out what is to be done.
    Decided,
    /// A rank has landed a chunk that a repair brought.
    Landed,
    /// The controller has reserved a place on a device.
    Reserved,
    /// The controller has told a rank of another tree.
    Assigned,
    /// A rank has left a repair.
    Committed,
    /// A rank has promised, in a view change.
    Promised,
    /// A rank has said that it has done its part, in a view change.
    Done,
}

impl Point {
    /// Those of a repair in which all ranks live.
    const OF_REPAIR: [Self; 8] = [
        Self::Completed,
        Self::Sent,
        Self::Frozen,
        Self::Decided,
        Self::Landed,
        Self::Reserved,
        Self::Assigned,
        Self::Committed,
    ];
}

/// When something is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// At a time.
    At(Duration),
    /// Right after a step was made so many times: by the device that is lost, if devices make it.
    After(Point, u64),
}

/// Something that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// What.
    pub ill: Ill,
    /// When.
    pub when: Moment,
}

impl Loss {
    /// Draw what is lost in a run: the first in the middle of operations, the others whenever.
    pub(super) fn draw_all(draw: &mut Draw, options: &Options, devices: usize) -> Vec<Self> {
        let count = draw.one_of(&[1, 1, 2, 3]);
        (0..count).map(|nth| Self::draw(draw, options, devices, nth == 0)).collect()
    }

    pub(super) fn draw(draw: &mut Draw, options: &Options, devices: usize, is_first: bool) -> Self {
        let device = draw.below(devices as u64) as usize;
        let ill = match draw.below(if is_first { 5 } else { 7 }) {
            0 | 1 => Ill::Die(device),
            2 | 3 => Ill::Restart(device),
            4 => Ill::Cut {
                rank: draw.below(options.ranks as u64) as usize,
                hop: draw.below(4) as usize,
                up: draw.chance(500),
                len: Duration::from_secs(draw.one_of(&[1, 8, 30])),
            },
            _ => Ill::Controller(Duration::from_millis(draw.one_of(&[5, 500, 4_000, 20_000]))),
        };
        let of_operations = [Point::Completed, Point::Sent];
        let point = if is_first { draw.one_of(&of_operations) } else { draw.one_of(&Point::OF_REPAIR) };
        let most = match point {
            Point::Completed => 40,
            Point::Sent => 200,
            Point::Landed => 30,
            Point::Reserved => 6,
            _ => 2 * options.ranks as u64,
        };
        let when = match draw.chance(300) {
            true => Moment::At(moment(draw)),
            false => Moment::After(point, 1 + draw.below(most)),
        };
        Self { ill, when }
    }
}

/// A loss that is still to come after so many more steps.
pub(super) struct Pending {
    ill: Ill,
    point: Point,
    left: u64,
}

impl Cluster<'_, '_> {
    pub(super) fn schedule_losses(&mut self, losses: &[Loss]) {
        for &Loss { ill, when } in losses {
            match when {
                Moment::At(at) => self.schedule(Instant::ZERO + at, Alarm::Strike(ill)),
                Moment::After(point, left) => self.pending.push(Pending { ill, point, left }),
            }
        }
    }

    /// Count a step, made by a device or by others; whatever waits for it is lost. True if something was.
    pub(super) fn reach(&mut self, point: Point, by: Option<usize>) -> bool {
        let mut struck = Vec::new();
        for pending in self.pending.iter_mut().filter(|pending| pending.point == point) {
            let concerns = match pending.ill {
                Ill::Die(device) | Ill::Restart(device) => by.is_none_or(|by| by == device),
                _ => true,
            };
            pending.left -= u64::from(concerns && pending.left > 0);
            if concerns && pending.left == 0 {
                struck.push(pending.ill);
            }
        }
        self.pending.retain(|pending| pending.left > 0);
        struck.iter().for_each(|&ill| self.strike(ill));
        !struck.is_empty()
    }

    pub(super) fn strike(&mut self, ill: Ill) {
        let mut members = self.members.iter().flatten();
        let in_repair = members.any(|member| member.repair.is_some() || member.membership.changing.is_some());
        if in_repair {
            self.seen.note(Mark::LossInRepair);
        }
        match ill {
            Ill::Die(device) => {
                self.seen.note(Mark::LossDevice);
                self.devices[device].alive = false;
            }
            // Without memory for one more life it stays away.
            Ill::Restart(device) if !self.devices[device].alive || self.devices[device].spare.is_empty() => {
                self.devices[device].alive = false;
            }
            Ill::Restart(device) => {
                self.seen.note(Mark::LossRestart);
                self.restart(device);
            }
            Ill::Cut { rank, hop, up, len } => {
                self.seen.note(Mark::LossLink);
                let (from, to) = self.ends(rank, hop, up);
                self.fabric.add_rule(Partition { from, to, during: self.now..self.now + len });
            }
            Ill::Controller(len) => {
                self.seen.note(Mark::LossController);
                self.stop_controller(len);
            }
            Ill::NoController => {
                self.seen.note(Mark::ControllerGone);
                self.lose_controller();
            }
            Ill::Kill(who) => self.kill(who),
            Ill::Split { salt, share, len } => {
                self.seen.note(Mark::RanksSplit);
                self.split(salt, share, len);
            }
        }
    }

    /// Return who sends and who receives on a link above a rank.
    fn ends(&self, rank: usize, hop: usize, up: bool) -> (Vec<Addr>, Vec<Addr>) {
        let devices: Vec<usize> = self.wiring_of(rank, 0).path(rank).collect();
        let hop = hop % devices.len();
        let shards = self.options.shards;
        let device = |device: usize| (0..shards).map(|shard| node_addr(device, shard)).collect();
        let below = match hop.checked_sub(1) {
            Some(below) => device(devices[below]),
            None => (0..self.options.groups.len()).map(|group| rank_addr(rank, group)).collect(),
        };
        let above = device(devices[hop]);
        if up { (below, above) } else { (above, below) }
    }
}
