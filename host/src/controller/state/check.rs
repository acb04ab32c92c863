//! Checks of requests to join, before they determine an allocation or are displayed.

use super::job::Member;
use crate::controller::limits::{NameKind, PINNED_MAX, RANKS_MAX, TREES_MAX, check_name};
use crate::controller::proto::{JoinRefusal, JoinRequest, RailOf, StripeOf, check_tenant, rail_name, stripe_name};
use crate::schedule::ShapeError;

/// Check a rank's request before it determines an allocation or is displayed.
pub(super) fn check_request(request: &JoinRequest, pinned: &[String]) -> Result<(), JoinRefusal> {
    check_tenant(&request.terms.tenant)?;
    check_name(NameKind::Job, "job", &request.job)?;
    let (rank, world) = (request.rank, request.world);
    if world > RANKS_MAX {
        return Err(JoinRefusal::TooManyRanks { world, limit: RANKS_MAX });
    }
    if rank.0 >= world {
        return Err(JoinRefusal::InvalidRank { rank, world });
    }
    if let Some(shape) = request.terms.shape {
        let refuse = |why: ShapeError| JoinRefusal::Shape { job: request.job.clone(), why: why.to_string() };
        shape.check(world).map_err(refuse)?;
    }
    if pinned.len() > PINNED_MAX {
        return Err(JoinRefusal::Limit { what: "pinned devices per job".into(), limit: PINNED_MAX as u64 });
    }
    if let Some(stripe) = &request.terms.stripe {
        check_stripe_name(&request.job, stripe)?;
    }
    if let Some(rail) = &request.terms.rail {
        check_rail_name(&request.job, rail, &request.terms.stripe)?;
    }
    pinned.iter().try_for_each(|device| check_name(NameKind::Fabric, "device", device))?;
    request.host.iter().try_for_each(|host| check_name(NameKind::Fabric, "host", host))?;
    Ok(request.machine.iter().try_for_each(|machine| check_name(NameKind::Fabric, "machine", machine))?)
}

/// Check that a stripe has the name that follows from its job's. So no job has more stripes than [`TREES_MAX`].
fn check_stripe_name(name: &str, stripe: &StripeOf) -> Result<(), JoinRefusal> {
    check_name(NameKind::Job, "job", &stripe.job)?;
    let refuse = |why: String| Err(JoinRefusal::Stripe { job: name.to_owned(), why });
    if !(1..TREES_MAX).contains(&stripe.index) {
        return refuse(format!("further trees have numbers from 1 to {}, not {}", TREES_MAX - 1, stripe.index));
    }
    if name != stripe_name(&stripe.job, stripe.index) {
        return refuse(format!("tree {} of job {:?} has another name", stripe.index, stripe.job));
    }
    Ok(())
}

/// Check that a rail has the name that follows from its job's, and is not a stripe, too.
fn check_rail_name(name: &str, rail: &RailOf, stripe: &Option<StripeOf>) -> Result<(), JoinRefusal> {
    check_name(NameKind::Job, "job", &rail.job)?;
    let refuse = |why: String| Err(JoinRefusal::Rail { job: name.to_owned(), why });
    if stripe.is_some() {
        return refuse("it is to be a further tree of a job, too".into());
    }
    if name != rail_name(&rail.job, rail.index) {
        return refuse(format!("rail {} of job {:?} has another name", rail.index, rail.job));
    }
    Ok(())
}

/// Check that a rank agrees with one that joined before on the job's parameters.
pub(super) fn agree(
    job: &str,
    (request, pinned): (&JoinRequest, &[String]),
    member: &Member,
) -> Result<(), JoinRefusal> {
    let first = &member.request;
    let disagree = |what: &str, mine: String, theirs: String| JoinRefusal::Mismatch {
        job: job.to_owned(),
        what: what.to_owned(),
        first: mine,
        other: theirs,
        rank: first.rank,
    };
    if request.world != first.world {
        return Err(disagree("the number of ranks", request.world.to_string(), first.world.to_string()));
    }
    if request.terms.tenant != first.terms.tenant {
        return Err(disagree("the tenant", request.terms.tenant.clone(), first.terms.tenant.clone()));
    }
    if request.terms.wait_ms != first.terms.wait_ms {
        let ms = |request: &JoinRequest| format!("{} ms", request.terms.wait_ms);
        return Err(disagree("the wait for a tree", ms(request), ms(first)));
    }
    if (request.terms.trees, &request.terms.stripe) != (first.terms.trees, &first.terms.stripe) {
        let trees = |request: &JoinRequest| format!("{} at most", request.terms.trees.max(1));
        return Err(disagree("the number of trees", trees(request), trees(first)));
    }
    if (request.terms.rail_jobs, &request.terms.rail) != (first.terms.rail_jobs, &first.terms.rail) {
        let rails = |request: &JoinRequest| match &request.terms.rail {
            Some(rail) => format!("rail {} of {:?}", rail.index, rail.job),
            None => request.terms.rail_jobs.to_string(),
        };
        return Err(disagree("which rails they join (SUMAC_HYBRID, SUMAC_RAB)", rails(request), rails(first)));
    }
    if request.terms.shape != first.terms.shape {
        let shape = |request: &JoinRequest| request.terms.shape.map_or("not set".into(), |shape| shape.to_string());
        return Err(disagree("the shape", shape(request), shape(first)));
    }
    if request.order != first.order {
        return Err(disagree("the order", format!("{:?}", request.order), format!("{:?}", first.order)));
    }
    if *pinned != member.pinned[..] {
        return Err(disagree("the devices", format!("{pinned:?}"), format!("{:?}", member.pinned)));
    }
    if request.host.is_some() != first.host.is_some() {
        let named = |host: &Option<String>| host.clone().unwrap_or_else(|| "none".into());
        return Err(disagree("whether hosts are named", named(&request.host), named(&first.host)));
    }
    Ok(())
}
