//! Host devices: who is asked for one, what is planned with them, and whom they serve.

use super::super::proto::{ClientReply, ClientRequest, HostLead};
use super::replan::{Raw, SOON, no_tree_reason, replan, request, tree_of};
use super::*;
use crate::plan::Child;
use sumac_hal::ctrl::{JobTicket, Rejection};

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

#[test]
fn no_rank_is_asked_where_no_device_can_be_above_a_host_device() {
    for several_shards in [true, false] {
        let controller = controller();
        let shards = if several_shards { 2 } else { 1 };
        let _leaf = Device::serve(&controller, announce("leaf0", shards, None), |_| Reply::Done);
        let mut ranks = join_on(&controller, TWO_HOSTS);
        if several_shards {
            let memberships: Vec<_> = ranks.iter_mut().map(Raw::joined).collect();
            assert!(memberships.iter().all(|membership| tree_of(membership).leaf == "leaf0"));
        } else {
            for rank in [0, 2] {
                asked(&mut ranks[rank]);
            }
        }
    }
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
