//! Paths of a tree that are probed before its ranks get their places, and narrow ones.

use super::super::proto::{ClientReply, ClientRequest};
use super::replan::{Raw, SOON, request};
use super::*;
use crate::transport::path::PathToProbe;
use sumac_hal::wire::SHORT_HEADER_LEN;

const HEADER: u32 = SHORT_HEADER_LEN as u32;

/// A device that is not on this host.
fn far(name: &str, last: u8) -> Announce {
    Announce {
        data_addrs: [Addr::Udp(SocketAddr::from(([10, 0, 0, last], 9)))].into_iter().collect(),
        ..announce(name, 1, None)
    }
}

fn far_device(controller: &Controller) -> Device {
    Device::serve(controller, far("leaf0", 1), |_| Reply::Done)
}

fn join_all(controller: &Controller, world: u32, devices: &[&str]) -> Vec<Raw> {
    (0..world).map(|rank| Raw::join_with(controller, request(rank, world), devices)).collect()
}

fn path(rank: &mut Raw) -> PathToProbe {
    match rank.recv() {
        ClientReply::ProbePath(path) => *path,
        other => panic!("a path: {other:?}"),
    }
}

fn answer(rank: &mut Raw, group: GroupId, max_packet_len_bytes: Option<u32>) {
    rank.send(ClientRequest::PathProbed { group, max_packet_len_bytes });
}

/// Let a rank probe its path, which carries packets of this length.
fn probe(rank: &mut Raw, carries: u32) -> PathToProbe {
    let path = path(rank);
    answer(rank, path.group, Some(carries.min(path.packet_len_bytes)));
    path
}

fn chunk(rank: &mut Raw) -> u32 {
    u32::from(rank.joined().tree.expect("a tree").chunk_len_bytes)
}

#[test]
fn narrow_path_of_a_rank_gives_its_job_shorter_packets_before_it_starts() {
    let controller = controller();
    let device = far_device(&controller);
    let mut ranks = join_all(&controller, 2, &[]);
    let carries = [PACKET_LEN, 600];
    for (rank, carries) in ranks.iter_mut().zip(carries) {
        assert_eq!(probe(rank, carries).packet_len_bytes, PACKET_LEN);
    }
    let first = device.group();
    assert_eq!(device.released.recv_timeout(SOON), Ok(first.group), "it is given up");
    for (rank, carries) in ranks.iter_mut().zip(carries) {
        assert_eq!(probe(rank, carries).packet_len_bytes, 544 + HEADER, "in steps of 16 bytes");
    }
    let second = device.group();
    assert_ne!(second.group, first.group);
    assert!(second.window_max >= first.window_max, "a window of as many bytes");
    assert_eq!((first.chunk_len_bytes, second.chunk_len_bytes), (960, 544));
    assert_eq!(ranks.iter_mut().map(chunk).collect::<Vec<_>>(), [544; 2]);
}

#[test]
fn narrow_path_between_devices_gives_the_job_shorter_packets_before_it_starts() {
    let controller = controller();
    let root = Device::serve(&controller, far("root", 1), |_| Reply::Done);
    let asked = AtomicU64::new(0);
    let leaf = Announce { data_addrs: announce("leaf", 1, None).data_addrs, ..far("leaf", 2) };
    // It finds out at the third question.
    let leaf = Device::serve(&controller, leaf, move |request| match request {
        Request::ProbePath(_) => {
            let found = (asked.fetch_add(1, Ordering::Relaxed) >= 2).then_some(500);
            Reply::with(Response::Path { max_packet_len_bytes: found })
        }
        _ => Reply::Done,
    });
    let mut ranks = join_all(&controller, 2, &["root", "leaf"]);
    assert_eq!(ranks.iter_mut().map(chunk).collect::<Vec<_>>(), [448; 2], "ranks beside their leaf probe nothing");
    for device in [&root, &leaf] {
        assert_eq!([device.group().chunk_len_bytes, device.group().chunk_len_bytes], [960, 448]);
    }
}

#[test]
fn devices_and_ranks_that_cannot_tell_do_not_narrow_packets() {
    let controller = controller();
    let refuses = |request: &Request| match request {
        Request::ProbePath(group) => Reply::with(Response::Refused(Refusal::NoGroup(*group))),
        _ => Reply::Done,
    };
    let _root = Device::serve(&controller, far("root", 1), |_| Reply::Done);
    let _leaf = Device::serve(&controller, far("leaf", 2), refuses);
    let mut ranks = join_all(&controller, 2, &["root", "leaf"]);
    for rank in &mut ranks {
        let group = path(rank).group;
        answer(rank, group, None);
    }
    assert_eq!(ranks.iter_mut().map(chunk).collect::<Vec<_>>(), [960; 2]);
}

#[test]
fn tree_waits_for_silent_ranks_for_a_limited_time() {
    let controller = controller();
    let _device = far_device(&controller);
    let mut ranks = join_all(&controller, 2, &[]);
    ranks.iter_mut().for_each(Raw::extend_timeout);
    probe(&mut ranks[0], PACKET_LEN);
    assert_eq!(path(&mut ranks[1]).packet_len_bytes, PACKET_LEN);
    assert_eq!(ranks.iter_mut().map(chunk).collect::<Vec<_>>(), [960; 2]);
}

#[test]
fn reports_that_nobody_asked_for_change_nothing() {
    let controller = controller();
    let _device = far_device(&controller);
    let mut ranks = join_all(&controller, 2, &[]);
    let group = probe(&mut ranks[0], PACKET_LEN).group;
    answer(&mut ranks[0], group, Some(100));
    answer(&mut ranks[0], GroupId(group.0 ^ 1), Some(100));
    let mut stranger = Raw::dial(&controller);
    answer(&mut stranger, group, Some(100));
    let mut other = Raw::join_with(&controller, JoinRequest { job: "other".into(), ..request(1, 3) }, &[]);
    answer(&mut other, group, Some(100));
    // All of that has been handled.
    assert_eq!([&mut other, &mut stranger].map(|client| client.report().jobs.len()), [2; 2]);
    probe(&mut ranks[1], PACKET_LEN);
    assert_eq!(ranks.iter_mut().map(chunk).collect::<Vec<_>>(), [960; 2]);
}

#[test]
fn rank_that_is_lost_while_its_path_is_probed_frees_the_tree() {
    let controller = controller();
    let device = far_device(&controller);
    let mut ranks = join_all(&controller, 2, &[]);
    let group = path(&mut ranks[0]).group;
    drop(ranks.pop());
    assert_eq!(device.released.recv_timeout(SOON), Ok(group));
    assert!(matches!(ranks[0].recv(), ClientReply::Refused(_)));
}

#[test]
fn job_whose_paths_keep_getting_narrower_runs_without_a_tree() {
    let controller = controller();
    let _device = far_device(&controller);
    let mut rank = join_all(&controller, 1, &[]).remove(0);
    let mut last = u32::MAX;
    let reason = loop {
        match rank.recv() {
            ClientReply::ProbePath(path) => {
                assert!(path.packet_len_bytes < last, "shorter each time");
                last = path.packet_len_bytes;
                answer(&mut rank, path.group, Some(last - 1));
            }
            ClientReply::Joined(membership) => break membership.tree.expect_err("no tree"),
            other => panic!("{other:?}"),
        }
    };
    assert!(reason.contains("narrower"), "{reason}");
}

#[test]
fn path_too_narrow_for_any_chunk_is_the_reason_for_no_tree() {
    // A chunk of 64 bytes would fit 112, and packets with a full header would not.
    for carries in [80, 112, 127] {
        let controller = controller();
        let _device = far_device(&controller);
        let mut rank = join_all(&controller, 1, &[]).remove(0);
        probe(&mut rank, carries);
        let reason = rank.joined().tree.expect_err("no tree");
        assert!(reason.contains(&format!("{carries} bytes, is too short for a chunk")), "{reason}");
    }
}

#[test]
fn narrow_path_is_remembered_for_the_next_tree() {
    let controller = controller();
    let device = far_device(&controller);
    let mut ranks = join_all(&controller, 2, &[]);
    for carries in [[PACKET_LEN, 600], [PACKET_LEN, 600]] {
        ranks.iter_mut().zip(carries).for_each(|(rank, carries)| _ = probe(rank, carries));
    }
    ranks.iter_mut().for_each(|rank| assert_eq!(chunk(rank), 544));
    ranks[0].send(ClientRequest::Decline { view: 0, device: None, why: "test".into() });
    ranks.iter_mut().for_each(|rank| rank.send(ClientRequest::Replan { view: 0 }));
    for rank in &mut ranks {
        assert_eq!(probe(rank, 600).packet_len_bytes, 544 + HEADER, "known from the tree before");
    }
    for rank in &mut ranks {
        assert_eq!(rank.replanned().1.tree.expect("a tree").chunk_len_bytes, 544);
    }
    assert_eq!([(); 3].map(|()| device.group().chunk_len_bytes), [960, 544, 544]);
}

#[test]
fn tree_on_a_path_that_became_narrow_is_replaced_on_the_same_device() {
    let controller = controller();
    let device = far_device(&controller);
    let mut ranks = join_all(&controller, 2, &[]);
    ranks.iter_mut().for_each(|rank| _ = probe(rank, PACKET_LEN));
    ranks.iter_mut().for_each(|rank| assert_eq!(chunk(rank), 960));
    ranks[1].send(ClientRequest::PathNarrowed { view: 0 });
    for rank in &mut ranks {
        assert!(matches!(rank.recv(), ClientReply::TreeLost { view: 0 }));
        // The second one reports it only now, and not why.
        rank.send(ClientRequest::Suspect { view: 0 });
        rank.send(ClientRequest::Replan { view: 0 });
    }
    for carries in [[PACKET_LEN, 600]; 2] {
        ranks.iter_mut().zip(carries).for_each(|(rank, carries)| _ = probe(rank, carries));
    }
    for rank in &mut ranks {
        let tree = rank.replanned().1.tree.expect("a tree");
        assert_eq!((tree.leaf.as_str(), tree.chunk_len_bytes), ("leaf0", 544));
    }
    assert_eq!([(); 3].map(|()| device.group().chunk_len_bytes), [960, 960, 544]);
}
