//! Jobs on several trees, on raw connections.

use super::super::proto::{ClientReply, ClientRequest, JoinRefusal, ResumeRequest, StripeOf, stripe_name};
use super::quotas::leave_job;
use super::replan::{Raw, disconnect_device, no_tree_reason, replan, request, tree_of};
use super::*;
use crate::secret::JobSecret;
use crate::topo::{DevicePlace, Fabric, LeafSpine, Rate};
use sumac_hal::op::Path;

fn with_group_quota(groups: u64) -> Controller {
    let quotas = Quotas { other: Quota { groups: Some(groups), ..Quota::default() }, ..Quotas::default() };
    Controller::start(ControllerConfig { quotas, ..ControllerConfig::new() }).expect("a port")
}

fn job_request(rank: u32, trees: u8) -> JoinRequest {
    let terms = Terms { trees, ..request(rank, 2).terms };
    JoinRequest { terms, ..request(rank, 2) }
}

fn stripe_request(rank: u32, index: u8) -> JoinRequest {
    let stripe = Some(StripeOf { job: "job".into(), index });
    let terms = Terms { stripe, ..request(rank, 2).terms };
    JoinRequest { job: stripe_name("job", index), terms, ..request(rank, 2) }
}

/// Join all ranks of a job or of a stripe.
fn join_both(controller: &Controller, request: impl Fn(u32) -> JoinRequest) -> (Vec<Raw>, Membership) {
    let mut ranks: Vec<_> = (0..2).map(|rank| Raw::join_with(controller, request(rank), &[])).collect();
    let mut memberships: Vec<_> = ranks.iter_mut().map(Raw::joined).collect();
    (ranks, memberships.swap_remove(0))
}

/// Leave a job with all ranks, and wait until the controller has ended it.
fn leave(controller: &Controller, name: &str, ranks: Vec<Raw>) {
    ranks.into_iter().for_each(leave_job);
    while status(controller.local_addr()).expect("a report").jobs.iter().any(|job| job.name == name) {
        std::thread::yield_now();
    }
}

fn refusal(controller: &Controller, request: JoinRequest) -> String {
    let reply = Raw::join_with(controller, request, &[]).recv();
    let ClientReply::Refused(JoinRefusal::Stripe { why, .. }) = reply else { panic!("refused: {reply:?}") };
    why
}

#[test]
fn planned_stripes_get_the_devices_that_are_left_within_a_quota_of_one_group() {
    let controller = with_group_quota(1);
    let _devices: Vec<_> = ["a", "b", "c"].map(|name| Device::start(&controller, name, None, None)).into();
    let (_ranks, first) = join_both(&controller, |rank| job_request(rank, 3));
    assert_eq!((tree_of(&first).leaf.as_str(), &first.striping.shares[..]), ("a", &[1, 1, 1][..]));
    let (_second, second) = join_both(&controller, |rank| stripe_request(rank, 1));
    let (_third, third) = join_both(&controller, |rank| stripe_request(rank, 2));
    assert_eq!((tree_of(&second).leaf.as_str(), tree_of(&third).leaf.as_str()), ("b", "c"));
    let report = status(controller.local_addr()).expect("a report");
    assert_eq!(report.tenants[0].groups, 1, "three trees are one group");
    let shown: Vec<_> = report.jobs.iter().map(|job| (job.name.as_str(), job.trees(), job.stripes.len())).collect();
    assert_eq!(shown, [("job", 3, 2)]);
    // Another job of the tenant is beyond its quota, stripes or not.
    let other = |rank| JoinRequest { job: "other".into(), ..job_request(rank, 1) };
    let (_other, without) = join_both(&controller, other);
    assert!(no_tree_reason(&without).contains("holds 1 of 1 groups"), "{:?}", without.tree);
}

#[test]
fn stripe_that_was_not_planned_or_of_another_job_is_refused() {
    let controller = controller();
    let _devices: Vec<_> = ["a", "b"].map(|name| Device::start(&controller, name, None, None)).into();
    assert_eq!(refusal(&controller, stripe_request(0, 1)), "job \"job\" is not running");
    let (_ranks, first) = join_both(&controller, |rank| job_request(rank, 4));
    let why = first.striping.reason.expect("there are two devices");
    assert!(first.striping.shares == [1, 1] && why.starts_with("2 of 4 trees: "), "{why}");
    assert_eq!(refusal(&controller, stripe_request(0, 2)), "job \"job\" has 2 trees");
    assert_eq!(refusal(&controller, stripe_request(0, 0)), "further trees have numbers from 1 to 15, not 0");
    assert_eq!(refusal(&controller, stripe_request(0, 16)), "further trees have numbers from 1 to 15, not 16");
    let named = JoinRequest { job: "mine".into(), ..stripe_request(0, 1) };
    assert_eq!(refusal(&controller, named.clone()), "tree 1 of job \"job\" has another name");
    // Nor can ranks resume more stripes than jobs have.
    let expression = vec![vec![]];
    let (devices, secret) = (Vec::new(), JobSecret::new([7; 32]));
    let resumption = ResumeRequest { request: named, devices, view: 3, shrink_count: 0, secret, expression };
    let mut resumes = Raw::dial(&controller);
    resumes.send(ClientRequest::Resume(Box::new(resumption)));
    let reply = resumes.recv();
    assert!(matches!(reply, ClientReply::Refused(JoinRefusal::Stripe { .. })), "{reply:?}");
    let mut other = stripe_request(0, 1);
    other.terms.tenant = "other".into();
    assert_eq!(refusal(&controller, other), "job \"job\" has another tenant or number of ranks");
    let unordered = JoinRequest { order: Order::Arrival, ..stripe_request(0, 1) };
    assert_eq!(refusal(&controller, unordered), "job \"job\" has declared another order");
}

/// Ranks learn what the cables of their tree allow, and so choose it only if its share of the bytes is small enough.
#[test]
fn membership_tells_what_cables_allow_the_tree_of_each_share() {
    let mut toml = String::from("[[switch]]\nname = \"switch\"\n");
    for device in ["a", "b"] {
        toml += &format!("[[switch]]\nname = {device:?}\naggregation = true\n");
    }
    toml += "[[host]]\nname = \"h0\"\n[[host]]\nname = \"h1\"\n";
    for end in ["a", "b", "h0", "h1"] {
        toml += &format!("[[link]]\nends = [{end:?}, \"switch\"]\nrate_gbits = 8\n");
    }
    let fabric = Some(Fabric::from_toml(&toml).expect("valid"));
    let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a port");
    let _devices: Vec<_> = ["a", "b"].map(|name| Device::start(&controller, name, None, None)).into();
    let at = |request: JoinRequest| JoinRequest { host: Some(format!("h{}", request.rank.0)), ..request };
    let (_ranks, first) = join_both(&controller, |rank| at(job_request(rank, 2)));
    // A nanosecond a byte; both ranks' bytes pass the device's port.
    let links = |reply: &Membership| tree_of(reply).facts.links.expect("the rates are known");
    let one = links(&first);
    assert_eq!((first.striping.shares.len(), one.tree_byte_ps, one.others_byte_ps), (2, 2_000, 1_000));
    for path in [Path::Ring, Path::HalvingDoubling, Path::Bine] {
        assert_eq!(one.schedule_byte_ps.get(path), Some(1_000), "{path}");
    }
    let (_stripe, second) = join_both(&controller, |rank| at(stripe_request(rank, 1)));
    assert_eq!(links(&second), one, "the first tree takes other bytes");
}

/// Devices at the ports of hosts register by the names that plans have for them.
#[test]
fn device_at_the_port_of_a_host_is_a_node_of_trees() {
    let shape = LeafSpine { leaves: 1, spines: 0, hosts_per_leaf: 2, cables: 1, rate: Rate::from_gbits(8.0) };
    let fabric = Fabric::leaf_spine(shape).expect("a valid shape");
    let names: Vec<String> = fabric.hosts().iter().map(|host| host.name.clone()).collect();
    let places: Vec<_> = fabric.host_ids().map(DevicePlace::Host).collect();
    let fabric = Some(fabric.with_devices(&places).expect("free places"));
    let controller = Controller::start(ControllerConfig { fabric, ..ControllerConfig::new() }).expect("a port");
    let _elsewhere = Device::start(&controller, "leaf0", None, None);
    let dpu = format!("{}/dpu", names[1]);
    let _device = Device::start(&controller, &dpu, None, None);
    let at = |rank| JoinRequest { host: Some(names[rank as usize].clone()), ..job_request(rank, 1) };
    let (_ranks, first) = join_both(&controller, at);
    assert_eq!(tree_of(&first).leaf, dpu, "devices in switches were not placed");
}

/// Two hosts and two devices, each behind a port of one switch, of this rate.
fn behind_ports(gbits: f64) -> Fabric {
    let (hosts, devices) = (["h0", "h1"], ["d0", "d1"]);
    let mut text = "[[switch]]\nname = \"switch\"\n".to_owned();
    devices.iter().for_each(|name| text += &format!("[[switch]]\nname = \"{name}\"\naggregation = true\n"));
    hosts.iter().for_each(|name| text += &format!("[[host]]\nname = \"{name}\"\n"));
    let ends = hosts.iter().chain(&devices);
    ends.for_each(|end| text += &format!("[[link]]\nends = [\"{end}\", \"switch\"]\nrate_gbits = {gbits}\n"));
    Fabric::from_toml(&text).expect("a fabric")
}

/// A rank fills the windows of one tree after the other, so large ones delay the start of all but the first.
#[test]
fn windows_of_several_trees_hold_what_their_cables_take_in_a_short_time() {
    let windows = |gbits: f64, trees: u8| {
        let config = ControllerConfig { fabric: Some(behind_ports(gbits)), ..ControllerConfig::new() };
        let controller = Controller::start(config).expect("a port");
        let _devices = ["d0", "d1"].map(|name| Device::start(&controller, name, None, None));
        let at = |request: JoinRequest| JoinRequest { host: Some(format!("h{}", request.rank.0)), ..request };
        let (_ranks, first) = join_both(&controller, |rank| at(job_request(rank, trees)));
        assert_eq!(first.striping.shares.len(), if trees > 1 { 2 } else { 0 }, "{:?}", first.striping);
        let further = (trees > 1).then(|| join_both(&controller, |rank| at(stripe_request(rank, 1))));
        let further = further.map(|(_ranks, further)| tree_of(&further).window_max);
        (u64::from(tree_of(&first).facts.chunk_len_bytes), tree_of(&first).window_max, further)
    };
    // A port takes the contributions of both ranks: 100 Mbit/s are 25,000 bytes of an operation in 4 ms.
    let (chunk, first, further) = windows(0.1, 2);
    assert_eq!((u64::from(first), further), (25_000 / chunk, Some(first)));
    assert_eq!(windows(0.001, 2).1, 4);
    assert_eq!(windows(100.0, 2).1, 256);
    assert_eq!(windows(0.001, 1).1, 256, "a single tree");
}

/// Another tenant resumes a job by the name of a stripe. It hides nothing, and is shown and counted as its own.
#[test]
fn stripe_that_another_tenant_resumes_is_a_job_of_its_own() {
    let controller = with_group_quota(1);
    let _devices: Vec<_> = ["a", "b", "c"].map(|name| Device::start(&controller, name, None, None)).into();
    let (_ranks, _) = join_both(&controller, |rank| job_request(rank, 2));
    let _strangers: Vec<Raw> = (0..2)
        .map(|rank| {
            let mut request = stripe_request(rank, 1);
            request.terms.tenant = "other".into();
            let expression = vec![(0..2).map(|rank| crate::plan::Child::Rank(Rank(rank))).collect()];
            let (devices, secret) = (Vec::new(), JobSecret::new([7; 32]));
            let resumption = ResumeRequest { request, devices, view: 3, shrink_count: 0, secret, expression };
            let mut raw = Raw::dial(&controller);
            raw.send(ClientRequest::Resume(Box::new(resumption)));
            raw
        })
        .collect();
    let shown = loop {
        let report = status(controller.local_addr()).expect("a report");
        if report.jobs.iter().any(|job| job.name == "job/tree1" && job.running) {
            break report;
        }
        std::thread::yield_now();
    };
    let trees: Vec<_> = shown.jobs.iter().map(|job| (job.name.as_str(), job.stripes.len())).collect();
    assert_eq!(trees, [("job", 0), ("job/tree1", 0)]);
    let mine = Raw::join_with(&controller, stripe_request(0, 1), &[]).recv();
    assert!(matches!(mine, ClientReply::Refused(JoinRefusal::Running { .. })), "{mine:?}");
}

/// Stripes hold their job's group of the quota for as long as any of them has a tree.
#[test]
fn stripe_that_outlives_its_job_counts_against_the_quota() {
    let controller = with_group_quota(1);
    let _devices: Vec<_> = ["a", "b", "c"].map(|name| Device::start(&controller, name, None, None)).into();
    let (ranks, _) = join_both(&controller, |rank| job_request(rank, 2));
    let (stripe, _) = join_both(&controller, |rank| stripe_request(rank, 1));
    leave(&controller, "job", ranks);
    let other = |name: &'static str| move |rank| JoinRequest { job: name.into(), ..job_request(rank, 1) };
    let (without, refused) = join_both(&controller, other("second"));
    assert!(no_tree_reason(&refused).contains("holds 1 of 1 groups"), "{:?}", refused.tree);
    leave(&controller, "second", without);
    leave(&controller, "job/tree1", stripe);
    let (_third, placed) = join_both(&controller, other("third"));
    tree_of(&placed);
}

/// A stripe whose device is lost never takes that of another tree, and takes a spare one.
#[test]
fn lost_tree_is_replaced_on_a_device_that_no_other_tree_has() {
    let controller = controller();
    let mut devices: Vec<_> = ["a", "b"].map(|name| Device::start(&controller, name, None, None)).into();
    let (_ranks, _) = join_both(&controller, |rank| job_request(rank, 2));
    let (mut stripe, placed) = join_both(&controller, |rank| stripe_request(rank, 1));
    assert_eq!(tree_of(&placed).leaf, "b");
    disconnect_device(devices.remove(1), &controller);
    let without = replan(&mut stripe, 0);
    assert!(no_tree_reason(&without[0]).contains("of other trees of the job): a"), "{:?}", without[0].tree);
    let _spare = Device::start(&controller, "c", None, None);
    let with = replan(&mut stripe, 1);
    assert_eq!(tree_of(&with[0]).leaf, "c");
}
