//! Host devices: who is asked for one, what is planned with them, and whom they serve.

use super::super::proto::{ClientReply, ClientRequest, HostLead};
use super::replan::{Raw, SOON, no_tree_reason, replan, request, tree_of};
use super::*;
use crate::plan::Child;
use std::net::Ipv4Addr;
use sumac_hal::ctrl::{JobTicket, Rejection};
use sumac_hal::port::VerbsAddr;

/// The ranks of each host, and the machine that they name.
type Hosts<'h> = &'h [(&'h str, &'h [u32])];

const TWO_HOSTS: Hosts<'static> = &[("a", &[0, 1]), ("b", &[2, 3])];

/// A rank of a job of four that shares its host.
fn rank_on(machine: &str, rank: u32) -> JoinRequest {
    let terms = Terms { hierarchical: true, ..request(rank, 4).terms };
    JoinRequest {
        transport: Transport::Auto,
        machine: Some(text(machine)),
        mesh_addr: SocketAddr::from(([10, 0, 0, machine.as_bytes()[0]], 1)),
        terms,
        ..request(rank, 4)
    }
}

/// Let the ranks of all hosts join, in order of rank.
fn join_on(controller: &Controller, hosts: Hosts<'_>) -> Vec<Raw> {
    let mut ranks: Vec<_> =
        hosts.iter().flat_map(|(machine, ranks)| ranks.iter().map(|&rank| (rank, *machine))).collect();
    ranks.sort_unstable();
    ranks.into_iter().map(|(rank, machine)| Raw::join_with(controller, rank_on(machine, rank), &[])).collect()
}

fn asked(rank: &mut Raw) -> HostLead {
    let reply = rank.recv();
    let ClientReply::LeadHost(host) = reply else { panic!("asked for a device: {reply:?}") };
    host
}

fn hello_of(host: &HostLead, job: &str, rank: u32, machine: &str) -> (Hello, Announce) {
    let attach_point = attach_point(1 << 20).map(|point| AttachPoint { machine: text(machine), ..point });
    let announce = announce(&host.device, 1, attach_point);
    let ticket = JobTicket { job: text(job), rank, proof: host.proof.bytes() };
    (Hello::HostDevice { announce: announce.clone(), ticket }, announce)
}

/// Start the device that a rank was asked for.
fn host_device(controller: &Controller, host: &HostLead, rank: u32, machine: &str) -> Device {
    let (hello, announce) = hello_of(host, "job", rank, machine);
    Device::serve_as(controller, &hello, announce, |_| Reply::Done)
}

/// Show a hello, and return what the controller says first.
fn first_request(controller: &Controller, hello: &Hello) -> Request {
    let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
    stream.set_read_timeout(Some(SOON)).expect("a socket");
    send(&mut stream, hello).expect("it listens");
    FrameReader::new(stream).recv::<Envelope<Request>>().expect("a message").message
}

fn ranks_of(numbers: &[u32]) -> Vec<Child> {
    numbers.iter().copied().map(Rank).map(Child::Rank).collect()
}

/// A job on two hosts, and its host devices.
fn start(controller: &Controller, hosts: Hosts<'_>) -> (Vec<Raw>, Vec<Device>, Vec<Membership>) {
    let mut ranks = join_on(controller, hosts);
    let devices = hosts.iter().map(|(machine, below)| {
        let host = asked(&mut ranks[below[0] as usize]);
        host_device(controller, &host, below[0], machine)
    });
    let devices = devices.collect();
    let memberships = ranks.iter_mut().map(Raw::joined).collect();
    (ranks, devices, memberships)
}

#[test]
fn two_hosts_of_two_ranks_contribute_once_each() {
    for (hosts, blocks) in [(TWO_HOSTS, [[0, 1], [2, 3]]), (&[("a", &[0, 2]), ("b", &[1, 3])], [[0, 2], [1, 3]])] {
        let controller = controller();
        let leaf = Device::start(&controller, "leaf0", None, None);
        let (_ranks, devices, memberships) = start(&controller, hosts);
        let expression = vec![vec![Child::Node(1), Child::Node(2)], ranks_of(&blocks[0]), ranks_of(&blocks[1])];
        for (rank, membership) in (0..).zip(&memberships) {
            assert_eq!(membership.expression, expression);
            let (block, tree) = (blocks.iter().position(|block| block.contains(&rank)), tree_of(membership));
            let block = block.expect("each rank has a host");
            assert_eq!(tree.leaf, format!("job#host{}", blocks[block][0]));
            assert_eq!(tree.child, ChildIndex(u16::from(rank != blocks[block][0])));
            assert_eq!((tree.facts.levels, tree.facts.zero_copy_ranks), (2, 4));
            assert!(tree.attach.is_some());
        }
        // The leaf has two children, and gets packets.
        assert!(leaf.group().zero_copy.is_empty());
        assert!(devices.iter().all(|device| children(device.group().zero_copy) == [0, 1]));
    }
}

#[test]
fn rank_whose_host_has_a_device_or_that_declines_is_not_asked() {
    let near = |machine| attach_point(1 << 20).map(|point| AttachPoint { machine: text(machine), ..point });
    let controller = controller();
    let _leaf = Device::start(&controller, "leaf0", near("a"), None);
    let mut ranks = join_on(&controller, &[("a", &[0, 1, 2, 3])]);
    assert_eq!(tree_of(&ranks[0].joined()).leaf, "leaf0");
    drop(ranks);
    // By its address.
    let mut announced = announce("leaf0", 1, None);
    announced.data_addrs = [Addr::Udp(SocketAddr::from(([10, 0, 0, b'b'], 9)))].into_iter().collect();
    let controller = super::controller();
    let _leaf = Device::serve(&controller, announced, |_| Reply::Done);
    let mut ranks = join_on(&controller, &[("b", &[0, 1, 2, 3])]);
    assert_eq!(tree_of(&ranks[0].joined()).leaf, "leaf0");
    // One rank of each host does not combine there, or belongs to another user.
    let controller = super::controller();
    let _leaf = Device::start(&controller, "leaf0", None, None);
    let mut ranks: Vec<_> = (0..4)
        .map(|rank| {
            let mut asked = rank_on(["a", "b"][rank as usize / 2], rank);
            asked.terms.hierarchical = rank != 1;
            asked.device_users.own += u32::from(rank == 2);
            Raw::join_with(&controller, asked, &[])
        })
        .collect();
    assert_eq!(tree_of(&ranks[0].joined()).leaf, "leaf0");
}

/// Host devices have one shard. What they take of a device is theirs: slots for the whole window.
#[test]
fn hosts_contribute_once_to_a_device_of_several_shards() {
    let controller = controller();
    let leaf = Device::serve(&controller, announce("leaf0", 3, None), |_| Reply::Done);
    let mut ranks = join_on(&controller, TWO_HOSTS);
    let (shown, parents) = std::sync::mpsc::channel();
    let devices = [0, 2].map(|rank: u32| {
        let (hello, announce) = hello_of(&asked(&mut ranks[rank as usize]), "job", rank, ["a", "b"][rank as usize / 2]);
        let shown = shown.clone();
        Device::serve_as(&controller, &hello, announce, move |request| {
            if let Request::InstallTree(tree) = request {
                let _ = shown.send(tree.parent.as_ref().map(|parent| parent.data_addrs.len()));
            }
            Reply::Done
        })
    });
    let memberships: Vec<_> = ranks.iter_mut().map(Raw::joined).collect();
    for (rank, membership) in (0..).zip(&memberships) {
        let tree = tree_of(membership);
        assert_eq!((&tree.leaf, tree.parents.len()), (&format!("job#host{}", rank / 2 * 2), 1));
        assert_eq!((tree.facts.levels, tree.facts.zero_copy_ranks, tree.facts.shards), (2, 4, 3));
    }
    let window = u64::from(tree_of(&memberships[0]).window_max);
    let shard = sumac_hal::shard::Shard::new(0, 3).expect("in range");
    assert!(window > 48, "over all shards: {window}");
    assert_eq!(u64::from(leaf.group().slots), 2 * shard.max_in_window(window));
    for device in &devices {
        let group = device.group();
        assert_eq!((u64::from(group.slots), group.parent_shared), (2 * window, None));
        assert_eq!(parents.recv_timeout(TEST_TIMEOUT), Ok(Some(3)));
    }
}

#[test]
fn devices_of_a_tree_have_equally_many_shards_but_host_devices() {
    // A host device with two shards fits no other number.
    for (shards, leaf_of_first) in [(1, "leaf0"), (2, "job#host0"), (3, "leaf0")] {
        let controller = controller();
        let _leaf = Device::serve(&controller, announce("leaf0", shards, None), |_| Reply::Done);
        let mut ranks = join_on(&controller, &[("a", &[0, 1, 2, 3])]);
        let host = asked(&mut ranks[0]);
        let (Hello::HostDevice { ticket, .. }, _) = hello_of(&host, "job", 0, "a") else { panic!("of a host") };
        let two = announce(&host.device, 2, None);
        let hello = Hello::HostDevice { announce: two.clone(), ticket };
        let _device = Device::serve_as(&controller, &hello, two, |_| Reply::Done);
        let membership = ranks[0].joined();
        assert_eq!(tree_of(&membership).leaf, leaf_of_first, "{shards}");
    }
    // Another device may not be undivided below one of several shards.
    let controller = controller();
    let _top = Device::serve(&controller, announce("top", 2, None), |_| Reply::Done);
    let _below = Device::serve(&controller, announce("below", 1, None), |_| Reply::Done);
    let mut pinned = Raw::join_with(&controller, request(0, 1), &["top", "below"]);
    let membership = pinned.joined();
    let why = no_tree_reason(&membership);
    assert!(why.contains("device below has 1 shards, device top above it has 2"), "{why}");
}

/// A host device that receives over verbs, as the devices above it do.
fn verbs_device(controller: &Controller, host: &HostLead, rank: u32, machine: &str) -> Device {
    let (Hello::HostDevice { ticket, .. }, announce) = hello_of(host, "job", rank, machine) else {
        panic!("of a host")
    };
    let at = Addr::Verbs(VerbsAddr { gid: [rank as u8; 16], lid: 0, qpn: 17 });
    let announce = Announce { data_addrs: [at].into_iter().collect(), ..announce };
    Device::serve_as(controller, &Hello::HostDevice { announce: announce.clone(), ticket }, announce, |_| Reply::Done)
}

fn leaf_over_verbs(controller: &Controller, name: &str, gid: [u8; 16]) -> Device {
    let at = |qpn| Addr::Verbs(VerbsAddr { gid, lid: 0, qpn });
    Device::serve(
        controller,
        Announce { data_addrs: [at(1), at(2)].into_iter().collect(), ..announce(name, 2, None) },
        |_| Reply::Done,
    )
}

/// A host with one rank has a host device, too: the rank sends over UDP.
#[test]
fn hosts_contribute_over_verbs_where_all_devices_do() {
    let controller = controller();
    let _leaf = leaf_over_verbs(&controller, "leaf0", [7; 16]);
    let mut ranks = join_on(&controller, &[("a", &[0, 1, 2]), ("b", &[3])]);
    let _devices = [(0, "a"), (3, "b")].map(|(rank, machine)| {
        let host = asked(&mut ranks[rank as usize]);
        assert!(host.over_verbs);
        verbs_device(&controller, &host, rank, machine)
    });
    let memberships: Vec<_> = ranks.iter_mut().map(Raw::joined).collect();
    let leaves: Vec<_> = memberships.iter().map(|membership| tree_of(membership).leaf.as_str()).collect();
    assert_eq!(leaves, ["job#host0", "job#host0", "job#host0", "job#host3"]);
    let facts = tree_of(&memberships[0]).facts;
    assert_eq!((facts.over_verbs, facts.zero_copy_ranks, facts.levels), (true, 4, 2));
    assert_eq!(memberships[0].expression, [vec![Child::Node(1), Child::Node(2)], ranks_of(&[0, 1, 2]), ranks_of(&[3])]);
}

#[test]
fn host_device_that_receives_the_other_way_is_not_used() {
    let controller = controller();
    let _leaf = leaf_over_verbs(&controller, "leaf0", [7; 16]);
    let mut ranks = join_on(&controller, &[("a", &[0, 1, 2, 3])]);
    let host = asked(&mut ranks[0]);
    let _device = host_device(&controller, &host, 0, "a");
    let membership = ranks[0].joined();
    let why = no_tree_reason(&membership);
    assert!(
        why.contains("sends over UDP, but its leaf device leaf0 receives over verbs; use transport `verbs`"),
        "{why}"
    );
    drop(ranks);
    // A device that receives over UDP is enough, for one of verbs may be out of reach.
    let controller = super::controller();
    let _devices = [leaf_over_verbs(&controller, "leaf0", [7; 16]), Device::start(&controller, "leaf1", None, None)];
    let mut ranks = join_on(&controller, TWO_HOSTS);
    let hosts = [0, 2].map(|rank: usize| asked(&mut ranks[rank]));
    assert!(hosts.iter().all(|host| !host.over_verbs));
    let _host_devices = [0, 1].map(|host| host_device(&controller, &hosts[host], 2 * host as u32, ["a", "b"][host]));
    for rank in &mut ranks {
        assert_eq!(rank.joined().expression[0], [Child::Node(1), Child::Node(2)]);
    }
}

/// The GID of a RoCE port is the address of its interface.
#[test]
fn rank_whose_host_has_a_device_over_verbs_is_not_asked() {
    let controller = controller();
    let gid = Ipv4Addr::new(10, 0, 0, b'a').to_ipv6_mapped().octets();
    let _leaf = leaf_over_verbs(&controller, "leaf0", gid);
    let mut ranks = join_on(&controller, &[("a", &[0, 1, 2, 3])]);
    let membership = ranks[0].joined();
    assert!(no_tree_reason(&membership).contains("receives over verbs"));
}

#[test]
fn no_rank_is_asked_where_no_device_can_be_above_a_host_device() {
    let controller = controller();
    let mut ranks = join_on(&controller, TWO_HOSTS);
    assert_eq!(no_tree_reason(&ranks[0].joined()), "no device is connected to the controller");
}

#[test]
fn job_is_planned_without_a_host_device_that_fails_or_is_late() {
    let controller = controller();
    let _leaf = Device::start(&controller, "leaf0", None, None);
    let mut ranks = join_on(&controller, TWO_HOSTS);
    let host = asked(&mut ranks[0]);
    asked(&mut ranks[2]);
    let _device = host_device(&controller, &host, 0, "a");
    ranks[2].send(ClientRequest::HostDeviceFailed { why: "no memory".into() });
    let leaves: Vec<_> = ranks.iter_mut().map(|rank| tree_of(&rank.joined()).leaf.clone()).collect();
    assert_eq!(leaves, ["job#host0", "job#host0", "leaf0", "leaf0"]);
    drop(ranks);
    // Nobody starts one; the time limit is shorter than the test's.
    let mut ranks = join_on(&controller, &[("c", &[0, 1, 2, 3])]);
    asked(&mut ranks[0]);
    ranks[0].extend_timeout();
    assert_eq!(tree_of(&ranks[0].joined()).leaf, "leaf0");
}

#[test]
fn ticket_is_good_for_its_job_and_rank_only() {
    let controller = controller();
    let _leaf = Device::start(&controller, "leaf0", None, None);
    let mut ranks = join_on(&controller, TWO_HOSTS);
    let hosts = [0, 2].map(|rank: usize| asked(&mut ranks[rank]));
    let refused = |hello: &Hello, why| assert_eq!(first_request(&controller, hello), Request::Rejected(why));
    let (hello, _) = hello_of(&hosts[0], "other", 0, "a");
    refused(&hello, Rejection::Ticket);
    for rank in [1, 2] {
        refused(&hello_of(&hosts[0], "job", rank, "a").0, Rejection::Ticket);
    }
    let false_proof = HostLead { proof: hosts[1].proof.clone(), ..hosts[0].clone() };
    refused(&hello_of(&false_proof, "job", 0, "a").0, Rejection::Ticket);
    for name in ["leaf0", "leaf1", "job#host2", "job#host1"] {
        let false_name = HostLead { device: name.into(), ..hosts[0].clone() };
        refused(&hello_of(&false_name, "job", 0, "a").0, Rejection::Name);
    }
    // Other devices have other names.
    refused(&Hello::Device(announce("job#host0", 1, None)), Rejection::Name);
    let _devices = [0_u32, 2].map(|rank| host_device(&controller, &hosts[rank as usize / 2], rank, "a"));
    let (again, _) = hello_of(&hosts[0], "job", 0, "a");
    assert!(matches!(first_request(&controller, &again), Request::Rejected(Rejection::NameTaken { .. })));
}

#[test]
fn host_device_serves_no_other_job_and_ends_with_its_own() {
    let controller = controller();
    let leaf = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, devices, _) = start(&controller, TWO_HOSTS);
    let other = JoinRequest { job: "other".into(), ..request(0, 1) };
    let mut pinned = Raw::join_with(&controller, other.clone(), &["job#host0"]);
    assert_eq!(no_tree_reason(&pinned.joined()), "device job#host0 is pinned, but not connected");
    assert!(ranks[0].report().devices.iter().all(|device| device.name == "leaf0"));
    // Without the leaf, there is no device for others.
    leaf.stream.shutdown(std::net::Shutdown::Both).expect("open");
    assert!(matches!(ranks[0].recv(), ClientReply::TreeLost { view: 0 }));
    let mut alone = Raw::join_with(&controller, JoinRequest { job: "third".into(), ..other }, &[]);
    assert_eq!(no_tree_reason(&alone.joined()), "no device is connected to the controller");
    drop(ranks);
    for Device { stream, .. } in devices {
        stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("a socket");
        let mut reader = FrameReader::new(stream);
        while reader.recv::<Envelope<Request>>().is_ok() {}
    }
}

#[test]
fn leader_that_leaves_is_released_with_the_last_rank_of_its_host() {
    let controller = controller();
    let _leaf = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, _devices, _) = start(&controller, TWO_HOSTS);
    let (mut last, mut leader) = (ranks.remove(1), ranks.remove(0));
    leader.send(ClientRequest::Leave);
    // On the other host, the leader is the last.
    for rank in ranks.iter_mut().rev() {
        rank.send(ClientRequest::Leave);
        assert_eq!(rank.recv(), ClientReply::Left);
    }
    // A report comes before the release.
    assert_eq!(leader.report().jobs[0].joined, 1);
    last.send(ClientRequest::Leave);
    assert_eq!((last.recv(), leader.recv()), (ClientReply::Left, ClientReply::Left));
}

#[test]
fn tree_that_is_planned_anew_keeps_the_blocks_of_hosts() {
    let controller = controller();
    let leaf = Device::start(&controller, "leaf0", None, None);
    let (mut ranks, devices, memberships) = start(&controller, TWO_HOSTS);
    let _other = Device::start(&controller, "leaf1", None, None);
    drop(leaf.stream.shutdown(std::net::Shutdown::Both));
    for rank in &mut ranks {
        assert!(matches!(rank.recv(), ClientReply::TreeLost { view: 0 }));
    }
    for membership in replan(&mut ranks, 0) {
        assert_eq!((tree_of(&membership).facts.levels, &membership.expression), (2, &memberships[0].expression));
    }
    // Without one of the host devices, no tree evaluates the declared expression.
    drop(devices[0].stream.shutdown(std::net::Shutdown::Both));
    for rank in &mut ranks {
        assert!(matches!(rank.recv(), ClientReply::TreeLost { view: 1 }));
    }
    for membership in replan(&mut ranks, 1) {
        let why = no_tree_reason(&membership);
        assert!(why.contains("would reduce in a different order"), "{why}");
    }
}

fn render(nodes: &[Vec<Child>], node: usize) -> String {
    let child = |child: &Child| match child {
        Child::Node(below) => render(nodes, *below),
        Child::Rank(rank) => rank.0.to_string(),
    };
    format!("({})", nodes[node].iter().map(child).collect::<Vec<_>>().join(" "))
}

/// Two machines of two rails each: a rail is a host of the fabric, at the leaf of that rail.
#[test]
fn host_with_two_rails_contributes_once_per_rail() {
    let fabric = crate::topo::LeafSpine { leaves: 2, spines: 1, hosts_per_leaf: 2, cables: 1, rate: None };
    let fabric = crate::topo::Fabric::leaf_spine(fabric).expect("a valid shape");
    let switches: Vec<String> = fabric.switches().iter().map(|switch| switch.name.clone()).collect();
    let rail = |machine: usize, rail: usize| fabric.hosts()[2 * rail + machine].name.clone();
    let hosts: Vec<String> = (0..8).map(|rank| rail(rank / 4, rank % 4 / 2)).collect();
    let config = ControllerConfig { fabric: Some(fabric), ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let _devices: Vec<_> = switches.iter().map(|name| Device::start(&controller, name, None, None)).collect();
    let mut ranks: Vec<_> = (0..8)
        .zip(&hosts)
        .map(|(rank, host)| {
            let machine = ["a", "b"][rank as usize / 4];
            Raw::join_with(
                &controller,
                JoinRequest { world: 8, host: Some(host.clone()), ..rank_on(machine, rank) },
                &[],
            )
        })
        .collect();
    let _host_devices = [0, 2, 4, 6].map(|rank: u32| {
        let host = asked(&mut ranks[rank as usize]);
        host_device(&controller, &host, rank, ["a", "b"][rank as usize / 4])
    });
    let memberships: Vec<_> = ranks.iter_mut().map(Raw::joined).collect();
    // The device of the first rail is the root, and that of the other rail is below it.
    assert_eq!(render(&memberships[0].expression, 0), "((0 1) ((2 3) (6 7)) (4 5))");
    for (rank, membership) in (0..).zip(&memberships) {
        let tree = tree_of(membership);
        assert_eq!((&tree.leaf, tree.facts.levels), (&format!("job#host{}", rank / 2 * 2), 3));
        assert_eq!(tree.host.as_ref(), Some(&hosts[rank]));
    }
}

/// Ranks of one host in a fabric, which a plan without host devices has no place for.
#[test]
fn ranks_that_share_a_host_of_a_fabric_get_a_tree() {
    let fabric = crate::topo::LeafSpine { leaves: 1, spines: 0, hosts_per_leaf: 2, cables: 1, rate: None };
    let fabric = crate::topo::Fabric::leaf_spine(fabric).expect("a valid shape");
    let host = |index: usize| fabric.hosts()[index].name.clone();
    let switch = fabric.switches()[0].name.clone();
    let (first, second) = (host(0), host(1));
    let config = ControllerConfig { fabric: Some(fabric), ..ControllerConfig::new() };
    let controller = Controller::start(config).expect("a port");
    let _leaf = Device::start(&controller, &switch, None, None);
    let mut ranks: Vec<_> = (0..4)
        .map(|rank| {
            let host = if rank < 2 { &first } else { &second };
            let asked = JoinRequest { host: Some(host.clone()), ..rank_on("a", rank) };
            Raw::join_with(&controller, asked, &[])
        })
        .collect();
    let _devices = [0, 2].map(|rank: u32| {
        let host = asked(&mut ranks[rank as usize]);
        host_device(&controller, &host, rank, "a")
    });
    let hosts = ranks.iter_mut().map(|rank| tree_of(&rank.joined()).host.clone().expect("of the fabric"));
    assert_eq!(hosts.collect::<Vec<_>>(), [&first, &first, &second, &second].map(String::as_str));
}
