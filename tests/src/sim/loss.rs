//! Losses during operations and recoveries: devices, links, the controller; at drawn times, or right after a rare step.

use super::cluster::Cluster;
use super::coverage::Mark;
use super::deaths::Victim;
use super::faults::moment;
use super::incident::Alarm;
use super::options::{Draw, Options};
use super::paths::PathLimit;
use super::wiring::{node_addr, rank_addr};
use std::time::Duration;
use sumac_hal::emu::Partition;
use sumac_hal::port::Addr;

/// The kind of a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossKind {
    /// A device stops for good.
    Die(usize),
    /// A device restarts with empty tables.
    Restart(usize),
    /// One direction of a link above a rank, in the tree that its first group then has.
    Cut {
        /// The rank.
        rank: usize,
        /// Nodes between the rank and the link, modulo the length of its path.
        hop: usize,
        /// True if packets to the parent are lost, false if those to the child.
        up: bool,
        /// For how long.
        len: Duration,
    },
    /// The controller loses its state, and is away for a while.
    Controller(Duration),
    /// The controller is gone for good.
    NoController,
    /// Paths become narrower, or wider.
    Path(PathLimit),
    /// A rank dies.
    Kill(Victim),
    /// A partition: ranks on two sides cannot reach each other.
    Split {
        /// Determines the side of each rank.
        salt: u64,
        /// Share of ranks on the first side, in thousandths.
        share: u64,
        /// For how long.
        len: Duration,
    },
}

/// A step of an operation or a recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// A device has completed a chunk and sent nothing.
    Completed,
    /// A device has sent a packet.
    Sent,
    /// A rank has frozen its endpoint.
    Frozen,
    /// A rank has computed the plan of a recovery.
    Decided,
    /// A rank has stored a chunk delivered by a recovery.
    Landed,
    /// The controller has reserved a place on a device.
    Reserved,
    /// The controller has assigned a rank another tree.
    Assigned,
    /// A rank has completed a recovery.
    Committed,
    /// A rank has sent its report in a view change.
    Promised,
    /// A rank has reported its part of a view change as done.
    Done,
}

impl Point {
    /// The points of a recovery without dead ranks.
    const OF_RECOVERY: [Self; 8] = [
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

/// When a loss happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// At a time after the start.
    At(Duration),
    /// Right after the given number of such steps, by the device that is lost if devices make the step.
    After(Point, u64),
}

/// A loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// What is lost.
    pub kind: LossKind,
    /// When.
    pub when: Moment,
}

impl Loss {
    /// Draw the losses of a run: the first during operations, the others at any time.
    pub(super) fn draw_all(draw: &mut Draw, options: &Options, devices: usize) -> Vec<Self> {
        let count = draw.one_of(&[1, 1, 2, 3]);
        (0..count).map(|nth| Self::draw(draw, options, devices, nth == 0)).collect()
    }

    pub(super) fn draw(draw: &mut Draw, options: &Options, devices: usize, is_first: bool) -> Self {
        let device = draw.below(devices as u64) as usize;
        let kind = match draw.below(if is_first { 5 } else { 7 }) {
            0 | 1 => LossKind::Die(device),
            2 | 3 => LossKind::Restart(device),
            4 => LossKind::Cut {
                rank: draw.below(options.ranks as u64) as usize,
                hop: draw.below(4) as usize,
                up: draw.chance(500),
                len: Duration::from_secs(draw.one_of(&[1, 8, 30])),
            },
            _ => LossKind::Controller(Duration::from_millis(draw.one_of(&[5, 500, 4_000, 20_000]))),
        };
        Self { kind, when: Self::draw_moment(draw, options, is_first) }
    }

    /// Draw when a loss happens: the first during operations, the others at any time.
    pub(super) fn draw_moment(draw: &mut Draw, options: &Options, is_first: bool) -> Moment {
        let of_operations = [Point::Completed, Point::Sent];
        let point = if is_first { draw.one_of(&of_operations) } else { draw.one_of(&Point::OF_RECOVERY) };
        let most = match point {
            Point::Completed => 40,
            Point::Sent => 200,
            Point::Landed => 30,
            Point::Reserved => 6,
            _ => 2 * options.ranks as u64,
        };
        match draw.chance(300) {
            true => Moment::At(moment(draw)),
            false => Moment::After(point, 1 + draw.below(most)),
        }
    }
}

/// A loss that is due after some more steps.
pub(super) struct Pending {
    kind: LossKind,
    point: Point,
    left: u64,
}

impl Cluster<'_, '_> {
    pub(super) fn schedule_losses(&mut self, losses: &[Loss]) {
        for &Loss { kind, when } in losses {
            match when {
                Moment::At(at) => self.schedule(self.began + at, Alarm::Loss(kind)),
                Moment::After(point, left) => self.pending.push(Pending { kind, point, left }),
            }
        }
    }

    /// Count a step of a device or a rank, and trigger the losses that wait for it. Returns true if there were any.
    pub(super) fn reach(&mut self, point: Point, by: Option<usize>) -> bool {
        let mut struck = Vec::new();
        for pending in self.pending.iter_mut().filter(|pending| pending.point == point) {
            let concerns = match pending.kind {
                LossKind::Die(device) | LossKind::Restart(device) => by.is_none_or(|by| by == device),
                _ => true,
            };
            pending.left -= u64::from(concerns && pending.left > 0);
            if concerns && pending.left == 0 {
                struck.push(pending.kind);
            }
        }
        self.pending.retain(|pending| pending.left > 0);
        struck.iter().for_each(|&kind| self.apply_loss(kind));
        !struck.is_empty()
    }

    pub(super) fn apply_loss(&mut self, kind: LossKind) {
        let mut members = self.members.iter().flatten();
        if members.any(|member| member.membership.changing.is_some()) {
            self.seen.note(Mark::LossInRecovery);
        }
        match kind {
            LossKind::Die(device) => {
                self.seen.note(Mark::LossDevice);
                self.device_died(device);
            }
            // It stays away if there is no memory for another incarnation.
            LossKind::Restart(device) if !self.devices[device].alive || self.devices[device].spare.is_empty() => {
                self.device_died(device);
            }
            LossKind::Restart(device) => {
                self.seen.note(Mark::LossRestart);
                self.restart(device);
                self.device_restarted(device);
            }
            LossKind::Cut { rank, hop, up, len } => {
                self.seen.note(Mark::LossLink);
                if let Some((from, to)) = self.ends(rank, hop, up) {
                    self.fabric.add_rule(Partition { from, to, during: self.now..self.now + len });
                }
            }
            LossKind::Controller(len) => {
                self.seen.note(Mark::LossController);
                self.stop_controller(Some(len));
            }
            LossKind::NoController => {
                self.seen.note(Mark::ControllerGone);
                self.stop_controller(None);
            }
            LossKind::Path(limit) => {
                self.seen.note(Mark::PathChanged);
                self.limit_paths(&limit);
            }
            LossKind::Kill(who) => self.kill(who),
            LossKind::Split { salt, share, len } => {
                self.seen.note(Mark::RanksSplit);
                self.split(salt, share, len);
            }
        }
    }

    /// Return the senders and receivers of a link above a rank, if its group has a tree.
    fn ends(&self, rank: usize, hop: usize, up: bool) -> Option<(Vec<Addr>, Vec<Addr>)> {
        let devices: Vec<usize> = self.wiring_of(rank, 0)?.path(rank).collect();
        let hop = hop % devices.len();
        let shards = self.options.shards;
        let device = |device: usize| (0..shards).map(|shard| node_addr(device, shard)).collect();
        let below = match hop.checked_sub(1) {
            Some(below) => device(devices[below]),
            None => (0..self.options.groups.len()).map(|group| rank_addr(rank, group)).collect(),
        };
        let above = device(devices[hop]);
        Some(if up { (below, above) } else { (above, below) })
    }
}
