//! Checks of requests to join, before they determine an allocation or are displayed.

use super::job::Member;
use crate::controller::limits::{NameKind, PINNED_MAX, RANKS_MAX, check_name};
use crate::controller::proto::{JoinRefusal, JoinRequest, check_tenant};

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
    if pinned.len() > PINNED_MAX {
        return Err(JoinRefusal::Limit { what: "pinned devices per job".into(), limit: PINNED_MAX as u64 });
    }
    pinned.iter().try_for_each(|device| check_name(NameKind::Fabric, "device", device))?;
    request.host.iter().try_for_each(|host| check_name(NameKind::Fabric, "host", host))?;
    Ok(request.machine.iter().try_for_each(|machine| check_name(NameKind::Fabric, "machine", machine))?)
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
