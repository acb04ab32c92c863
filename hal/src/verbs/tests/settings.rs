//! Settings of a link, as the device gets them.

use super::*;
use crate::verbs::{VerbsLink, VerbsPort};

fn open(link: &str) -> Result<VerbsDomain, crate::verbs::VerbsError> {
    let link: VerbsLink = link.parse().expect("a name");
    VerbsDomain::open(&VerbsConfig { link, ..VerbsConfig::default() })
}

fn connected(domain: &VerbsDomain) -> OneSided {
    let (mut one, mut other) = (domain.one_sided().expect("an end"), domain.one_sided().expect("an end"));
    one.connect(&other.end()).expect("connected");
    other.connect(&one.end()).expect("connected");
    one
}

#[test]
fn connections_have_their_service_level_and_partition() {
    machine(|machine| machine.add("mlx5_0", ADDR).partition_keys = vec![0xffff, 0x8002, 0x0001]);
    for (link, index, level) in [("auto", 0, 0), ("auto/sl=3/pkey=0x8002", 1, 3), ("auto/pkey=0x8001", 2, 0)] {
        let end = connected(&open(link).expect("a domain"));
        let attr = machine(|machine| machine.attr(end.end().qpn));
        assert_eq!((attr.pkey_index, attr.ah_attr.sl), (index, level), "{link}");
    }
    let error = open("auto/pkey=0x8009").expect_err("no member").to_string();
    assert!(error.contains("port 1 of mlx5_0 has no partition key 0x8009"), "{error}");
}

#[test]
fn relaxed_ordering_applies_to_all_memory_of_a_domain() {
    use crate::verbs::ibv::ibv_access_flags;
    machine(|machine| _ = machine.add("mlx5_0", ADDR));
    for (link, is_relaxed) in [("auto", false), ("auto/relaxed", true)] {
        let domain = open(link).expect("a domain");
        let key = domain.expose(4096).expect("memory").remote().rkey;
        assert_eq!(machine(|machine| machine.access(key)), None, "dropped");
        let region = domain.expose(4096).expect("memory");
        let access = machine(|machine| machine.access(region.remote().rkey)).expect("registered");
        assert_eq!(access & ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0 != 0, is_relaxed, "{link}");
    }
}

#[test]
fn reads_in_flight_are_limited_by_what_the_peer_serves() {
    machine(|machine| _ = machine.add("mlx5_0", ADDR));
    machine(|machine| machine.add("mlx5_1", Ipv4Addr::new(10, 0, 0, 2)).reads = 4);
    let (many, few) = (open("mlx5_0").expect("a domain"), open("mlx5_1").expect("a domain"));
    let (mut one, mut other) = (many.one_sided().expect("an end"), few.one_sided().expect("an end"));
    let through = |end: &OneSided| crate::verbs::OneSidedEnd::from_link_end(&end.end().to_link_end());
    let (to_one, to_other) = (through(&one), through(&other));
    one.connect(&to_other).expect("connected");
    other.connect(&crate::verbs::OneSidedEnd { reads: 0, ..to_one }).expect("connected");
    let attr = |end: &OneSided| machine(|machine| machine.attr(end.end().qpn));
    assert_eq!((attr(&one).max_rd_atomic, attr(&one).max_dest_rd_atomic), (4, 16));
    assert_eq!((attr(&other).max_rd_atomic, attr(&other).max_dest_rd_atomic), (4, 4), "not known: as many as here");
}

#[test]
fn port_waits_on_its_completion_vector_modulo_those_of_the_device() {
    machine(|machine| machine.add("mlx5_0", ADDR).vectors = 3);
    // What has been sent wakes nobody: its queue is of the first vector.
    for (vector, used) in [(0, [0, 0]), (1, [0, 1]), (2, [0, 2]), (4, [0, 1]), (u32::MAX, [0, 0])] {
        let _port = VerbsPort::open(&VerbsConfig { vector, ..VerbsConfig::default() }).expect("a port");
        assert_eq!(machine(|machine| machine.vectors()), used.into(), "vector {vector}");
    }
}
