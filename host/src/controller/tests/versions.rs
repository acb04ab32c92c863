//! Peers of the next version of the control messages: both sides name both versions.

use super::super::proto::ClientRequest;
use super::replan::{SOON, request};
use super::*;
use std::io::{Read, Write};
use std::net::TcpListener;
use sumac_hal::ctrl::{FRAME_HEADER_LEN, FrameError, StreamError, VERSION, encode_frames};

/// Turn frames into those of the next version. Their checksum does not matter: the version is checked first.
fn next_version(mut frames: Vec<u8>) -> Vec<u8> {
    frames[2..4].copy_from_slice(&(VERSION + 1).to_le_bytes());
    frames
}

#[test]
fn controller_answers_a_peer_of_the_next_version_with_its_own_and_serves_others() {
    let controller = controller();
    for hello in [Hello::Client, Hello::Device(announce("leaf0", 1, None))] {
        let mut stream = TcpStream::connect(controller.local_addr()).expect("a controller");
        stream.set_read_timeout(Some(SOON)).expect("a socket");
        let mut frames = next_version(encode_frames(&hello).expect("short"));
        // What follows is not read.
        frames.extend(next_version(encode_frames(&ClientRequest::Status).expect("short")));
        stream.write_all(&frames).expect("it listens");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer, and the end");
        let header = answer.get(..FRAME_HEADER_LEN).expect("a frame");
        assert_eq!(u16::from_le_bytes([header[2], header[3]]), VERSION, "{hello:?}");
    }
    assert!(status(controller.local_addr()).is_ok_and(|report| report.devices.is_empty()));
}

#[test]
fn rank_names_both_versions_if_its_controller_is_newer() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("bound");
    let joins = thread::spawn(move || Session::join(addr, request(0, 1), TEST_TIMEOUT, |_| None).map(drop));
    let (mut stream, _) = listener.accept().expect("the rank");
    stream.write_all(&next_version(encode_frames(&()).expect("short"))).expect("it listens");
    let error = joins.join().expect("no panic").expect_err("another version");
    let expected = FrameError::Version(VERSION + 1);
    assert!(matches!(&error, ClientError::Stream(StreamError::Frame(found)) if *found == expected), "{error}");
    let text = error.to_string();
    assert!([VERSION, VERSION + 1].iter().all(|version| text.contains(&version.to_string())), "{text}");
}
