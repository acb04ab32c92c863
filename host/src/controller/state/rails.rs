//! Jobs that are rails of another one ([`RailOf`]): who may join one, and which devices it prefers.
//!
//! Invariants:
//! - ranks join rails of a running job of the same tenant and order only, with as many ranks as that job's shape has
//!   servers;
//! - of a job whose leaders alone join a rail, there is that one;
//! - a job and its rails, at most [`TREES_MAX`], count once in the quota of groups ([`JoinRequest::communicator`]), as
//!   a job's further trees do: more rails would be groups that no quota counts;
//! - without a fabric, a rail takes a device that no other rail of the job has, where there is one: all of them run at
//!   once. On a fabric, the plan of each follows the cables of its ranks' adapters.

use super::State;
use super::job::Job;
use crate::controller::ControllerConfig;
use crate::controller::limits::TREES_MAX;
use crate::controller::proto::{JoinRefusal, JoinRequest, RailJobs, RailOf};
use crate::schedule::hybrid;
use std::collections::BTreeSet;

impl Job {
    /// The job and place of this one, if it is a rail.
    fn rail_of(&self) -> Option<&RailOf> {
        self.first()?.request.terms.rail.as_ref()
    }
}

impl State {
    /// Check that a rank may join a rail.
    pub(super) fn check_rail(
        &self,
        config: &ControllerConfig,
        request: &JoinRequest,
        rail: &RailOf,
    ) -> Result<(), JoinRefusal> {
        let refuse = |why: String| Err(JoinRefusal::Rail { job: request.job.clone(), why });
        let job = self.jobs.get(&rail.job).filter(|job| job.placement.is_some() && !job.members.is_empty());
        let Some((job, first)) = job.and_then(|job| Some((job, job.first()?))) else {
            return refuse(format!("job {:?} is not running", rail.job));
        };
        let rail_jobs = first.request.terms.rail_jobs;
        if rail_jobs == RailJobs::None {
            return refuse(format!("job {:?} has no rails", rail.job));
        }
        if rail_jobs == RailJobs::Leaders && rail.index > 0 {
            return refuse(format!("job {:?} has no rail but that of its leaders, 0", rail.job));
        }
        let shape = job.shape((config, &self.planning.index));
        let Some([servers, each]) = hybrid::servers(shape, job.world) else {
            return refuse(format!("{} ranks of shape {shape} are not on servers of several", job.world));
        };
        if request.world != servers || rail.index >= each || rail_jobs == RailJobs::All && each > TREES_MAX.into() {
            let (index, world, ranks) = (rail.index, job.world, request.world);
            return refuse(format!(
                "{world} ranks of shape {shape} have no rail {index} of {ranks} ranks; each of at most {TREES_MAX} rails \
                 has a rank on each server"
            ));
        }
        if job.tenant() != request.terms.tenant || first.request.order != request.order {
            return refuse(format!("job {:?} has another tenant or order", rail.job));
        }
        Ok(())
    }

    /// The devices of the other rails of a job's communicator, if it is a rail.
    pub(super) fn devices_of_other_rails(&self, name: &str) -> BTreeSet<String> {
        let Some(job) = self.jobs.get(name) else { return BTreeSet::new() };
        let Some(rail) = job.rail_of() else { return BTreeSet::new() };
        let is_other = |other: &&Job| {
            other.tenant() == job.tenant() && other.rail_of().is_some_and(|of| of.job == rail.job && of != rail)
        };
        let groups = self.jobs.values().filter(is_other).flat_map(|other| {
            let placed = other.placement.as_ref().and_then(|placed| placed.as_ref().ok());
            placed.map(|placed| placed.group).into_iter().chain(other.placing)
        });
        groups.flat_map(|group| self.ledger.devices_of(group)).map(|device| device.name.clone()).collect()
    }
}
