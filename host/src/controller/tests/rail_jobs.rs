//! Jobs that are rails of another one, on raw connections.

use super::super::proto::{ClientReply, JoinRefusal, RailJobs, RailOf, StripeOf, rail_name};
use super::replan::{Raw, request, tree_of};
use super::*;
use sumac_hal::ctrl::Order;

/// A rank of a job with rails.
fn job_request(rank: u32, world: u32) -> JoinRequest {
    let shape = "servers:2".parse().ok();
    let like = request(rank, world);
    JoinRequest { terms: Terms { rail_jobs: RailJobs::All, trees: 1, shape, ..like.terms.clone() }, ..like }
}

/// A rank of a rail of `job`.
fn rail_request(index: u32, server: u32, servers: u32) -> JoinRequest {
    let rail = Some(RailOf { job: "job".into(), index });
    let like = request(server, servers);
    JoinRequest { job: rail_name("job", index), terms: Terms { rail, trees: 1, ..like.terms.clone() }, ..like }
}

fn refusal(controller: &Controller, request: JoinRequest) -> String {
    let reply = Raw::join_with(controller, request, &[]).recv();
    let ClientReply::Refused(JoinRefusal::Rail { why, .. }) = reply else { panic!("refused: {reply:?}") };
    why
}

fn join_all(controller: &Controller, requests: impl Iterator<Item = JoinRequest>) -> (Vec<Raw>, Membership) {
    let mut ranks: Vec<_> = requests.map(|request| Raw::join_with(controller, request, &[])).collect();
    let mut memberships: Vec<_> = ranks.iter_mut().map(Raw::joined).collect();
    (ranks, memberships.swap_remove(0))
}

#[test]
fn rails_take_different_devices_and_count_once_with_their_job() {
    let quotas = Quotas { other: Quota { groups: Some(1), ..Quota::default() }, ..Quotas::default() };
    let controller = Controller::start(ControllerConfig { quotas, ..ControllerConfig::new() }).expect("a port");
    let _devices: Vec<_> = ["a", "b"].map(|name| Device::start(&controller, name, None, None)).into();
    let (_job, own) = join_all(&controller, (0..6).map(|rank| job_request(rank, 6)));
    assert_eq!(tree_of(&own).leaf, "a");
    let rails: Vec<_> =
        (0..2).map(|index| join_all(&controller, (0..3).map(move |server| rail_request(index, server, 3)))).collect();
    let leaves: Vec<_> = rails.iter().map(|(_, of)| tree_of(of).leaf.clone()).collect();
    assert_eq!(leaves, ["a", "b"], "the communicator's own tree is idle while they run");
    assert_eq!(status(controller.local_addr()).expect("a report").tenants[0].groups, 1);
}

#[test]
fn rail_that_its_job_does_not_have_is_refused() {
    let controller = controller();
    let _device = Device::start(&controller, "a", None, None);
    assert_eq!(refusal(&controller, rail_request(0, 0, 2)), "job \"job\" is not running");
    let (_job, _) = join_all(&controller, (0..4).map(|rank| job_request(rank, 4)));
    // Rails of fewer ranks would be groups that no quota counts.
    for (index, servers) in [(2, 2), (0, 3), (3, 1), (0, 4)] {
        let why = refusal(&controller, rail_request(index, 0, servers));
        let expected = format!("4 ranks of shape servers:2 have no rail {index} of {servers} ranks; ");
        assert!(why.starts_with(&expected), "{why}");
    }
    let named = JoinRequest { job: "mine".into(), ..rail_request(0, 0, 2) };
    assert_eq!(refusal(&controller, named), "rail 0 of job \"job\" has another name");
    let mut stripe = rail_request(0, 0, 2);
    stripe.terms.stripe = Some(StripeOf { job: "job".into(), index: 1 });
    stripe.job = super::super::proto::stripe_name("job", 1);
    assert_eq!(refusal(&controller, stripe), "it is to be a further tree of a job, too");
    let mut other = rail_request(0, 0, 2);
    other.terms.tenant = "other".into();
    assert_eq!(refusal(&controller, other), "job \"job\" has another tenant or order");
    let order = match rail_request(0, 0, 2).order {
        Order::Arrival => Order::TreeFold,
        _ => Order::Arrival,
    };
    let ordered = JoinRequest { order, ..rail_request(0, 0, 2) };
    assert_eq!(refusal(&controller, ordered), "job \"job\" has another tenant or order");
}

/// A job has that rail alone, for which servers may have any number of ranks.
#[test]
fn job_of_leaders_has_one_rail_whatever_its_servers_have() {
    let controller = controller();
    let _device = Device::start(&controller, "a", None, None);
    let of_leaders = |rank| {
        let like = job_request(rank, 34);
        let shape = "servers:17".parse().ok();
        JoinRequest { terms: Terms { rail_jobs: RailJobs::Leaders, shape, ..like.terms.clone() }, ..like }
    };
    let (_job, _) = join_all(&controller, (0..34).map(of_leaders));
    let why = refusal(&controller, rail_request(1, 0, 2));
    assert_eq!(why, "job \"job\" has no rail but that of its leaders, 0");
    assert!(refusal(&controller, rail_request(0, 0, 3)).contains("have no rail 0 of 3 ranks"));
    let (_leaders, of) = join_all(&controller, (0..2).map(|server| rail_request(0, server, 2)));
    assert_eq!(tree_of(&of).leaf, "a");
}

#[test]
fn servers_of_more_ranks_than_a_job_has_trees_have_no_rails() {
    let controller = controller();
    let _device = Device::start(&controller, "a", None, None);
    let on_servers = |rank| {
        let like = job_request(rank, 34);
        JoinRequest { terms: Terms { shape: "servers:17".parse().ok(), ..like.terms.clone() }, ..like }
    };
    let (_job, _) = join_all(&controller, (0..34).map(on_servers));
    let why = refusal(&controller, rail_request(0, 0, 2));
    assert!(why.contains("at most 16 rails"), "{why}");
}

#[test]
fn rail_of_a_job_that_joins_none_is_refused() {
    let controller = controller();
    let _device = Device::start(&controller, "a", None, None);
    let plain = |rank| JoinRequest { job: "job".into(), ..request(rank, 4) };
    let (_job, _) = join_all(&controller, (0..4).map(plain));
    assert_eq!(refusal(&controller, rail_request(0, 0, 2)), "job \"job\" has no rails");
}
