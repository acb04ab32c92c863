//! Updates of devices: what is relayed, who is refused, and how jobs move off a device before it restarts.

use super::super::machine::{ConnId, Frames, Machine, Output};
use super::super::proto::{
    ClientReply, ClientRequest, UPDATE_PIECE_MAX_BYTES, UpdateCommand, UpdateDevice, UpdateRefusal, UpdateReply,
};
use super::replan::{Raw, SOON, disconnect_device, join_all, no_tree_reason, recv_release, replan, tree_of};
use super::*;
use std::sync::mpsc::{Receiver, Sender, channel};
use sumac_hal::ctrl::FrameBuffer;
use sumac_hal::ctrl::update::{
    SlotId, SlotImage, SlotTrust, SlotsStatus, TRANSFER_LEASE, Transfer, UpdateOffer, UpdateRequest, UpdateStatus,
};
use sumac_hal::time::Instant;

const NEW: [u8; 32] = [2; 32];

fn slots() -> SlotsStatus {
    let image = |version: &str, byte, trust| {
        let version = version.try_into().expect("short");
        Some(SlotImage { version, epoch: 1, sha256: [byte; 32], trust })
    };
    let trial = SlotTrust::Trial { tries_left: 2 };
    let images = [image("1.0", 1, SlotTrust::Confirmed), image("2.0", 2, trial)];
    SlotsStatus { running: Some(SlotId::A), images }
}

fn with_slots(name: &str) -> Announce {
    Announce { slots: Some(slots()), ..announce(name, 1, None) }
}

/// A device that reports each request for an update, and accepts it.
fn updatable(controller: &Controller, name: &str) -> (Device, Receiver<UpdateRequest>) {
    updatable_unless(controller, name, None)
}

/// Like [`updatable`], but it refuses a restart, once `refuses` tells it to.
fn updatable_unless(
    controller: &Controller,
    name: &str,
    refuses: Option<Receiver<()>>,
) -> (Device, Receiver<UpdateRequest>) {
    let (sender, requests): (Sender<UpdateRequest>, _) = channel();
    let device = Device::serve(controller, with_slots(name), move |request| match request {
        Request::Update(request) => {
            // The test may have ended.
            let _ = sender.send(request.clone());
            Reply::with(match request {
                UpdateRequest::Restart { .. } if refuses.is_some() => {
                    // The test may have ended.
                    let _ = refuses.as_ref().map(Receiver::recv);
                    Response::UpdateRefused("not today\u{7}".try_into().expect("short"))
                }
                _ => Response::Update(UpdateStatus { slots: slots(), transfer: Transfer::None }),
            })
        }
        _ => Reply::Done,
    });
    (device, requests)
}

fn client(controller: &Controller, operator: &str) -> UpdateClient {
    UpdateClient::new(controller.local_addr(), operator)
}

fn command(client: &mut UpdateClient, command: UpdateCommand) -> Result<UpdateStatus, UpdateRefusal> {
    client.command("leaf0", command).expect("a reply")
}

fn next(requests: &Receiver<UpdateRequest>) -> UpdateRequest {
    requests.recv_timeout(TEST_TIMEOUT).expect("a request")
}

#[test]
fn each_command_is_relayed_in_one_request() {
    let controller = controller();
    let (_device, requests) = updatable(&controller, "leaf0");
    let mut operator = client(&controller, "ann@ops:1");
    let status = command(&mut operator, UpdateCommand::Status).expect("a status");
    assert_eq!((status.slots, next(&requests)), (slots(), UpdateRequest::Status));
    let offer = UpdateOffer { manifest_len_bytes: 5, len_bytes: 9, sha256: NEW };
    command(&mut operator, UpdateCommand::Begin(offer)).expect("relayed");
    assert_eq!(next(&requests), UpdateRequest::Begin(offer));
    let bytes: Vec<u8> = (0..UPDATE_PIECE_MAX_BYTES).map(|at| (at / 300) as u8).collect();
    for len in [1, 513, UPDATE_PIECE_MAX_BYTES] {
        let bytes = &bytes[..len];
        command(&mut operator, UpdateCommand::Piece { offset: 77, bytes: bytes.to_vec() }).expect("relayed");
        let UpdateRequest::Piece { offset, bytes: relayed } = next(&requests) else { panic!("a piece") };
        assert_eq!((offset, &relayed[..]), (77, bytes));
        assert!(requests.try_recv().is_err(), "one request");
    }
    for len in [0, UPDATE_PIECE_MAX_BYTES + 1] {
        let refusal = command(&mut operator, UpdateCommand::Piece { offset: 0, bytes: vec![0; len] });
        assert_eq!(refusal, Err(UpdateRefusal::Piece { len: len as u64 }));
    }
    let bytes = vec![0; 9];
    assert!(command(&mut operator, UpdateCommand::Piece { offset: u64::MAX, bytes }).is_err(), "beyond all offsets");
}

#[test]
fn second_operator_is_refused_by_name_until_the_first_has_gone() {
    let controller = controller();
    let (_device, _requests) = updatable(&controller, "leaf0");
    let offer = UpdateOffer { manifest_len_bytes: 5, len_bytes: 9, sha256: NEW };
    let (mut ann, mut bob) = (client(&controller, "ann@ops:1"), client(&controller, "bob@ops:2\u{7}"));
    command(&mut ann, UpdateCommand::Begin(offer)).expect("the first");
    command(&mut bob, UpdateCommand::Status).expect("anyone may ask");
    for refused in
        [UpdateCommand::Begin(offer), UpdateCommand::Finish, UpdateCommand::Restart(NEW), UpdateCommand::RollBack]
    {
        let refusal = command(&mut bob, refused).expect_err("held").to_string();
        assert!(refusal.contains("leaf0") && refusal.contains("ann@ops:1"), "{refusal}");
    }
    // Her connection was cut, and the controller has not noticed.
    let mut again = client(&controller, "ann@ops:1");
    command(&mut again, UpdateCommand::Begin(offer)).expect("the same operator");
    drop((ann, again));
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    while let Err(refusal) = command(&mut bob, UpdateCommand::Begin(offer)) {
        assert!(std::time::Instant::now() < deadline, "{refusal}");
        thread::yield_now();
    }
    let refusal =
        command(&mut client(&controller, "ann@ops:1"), UpdateCommand::Begin(offer)).expect_err("held").to_string();
    assert!(refusal.contains("bob@ops:2") && !refusal.contains('\u{7}'), "{refusal}");
}

/// A controller on a virtual clock, with one device.
struct Steps {
    machine: Machine,
    now: Instant,
}

const DEVICE: ConnId = ConnId(9);

impl Steps {
    fn new() -> Self {
        let config = Arc::new(ControllerConfig::new());
        let mut machine = Machine::new(config, 1, Entropy::Seeded(1), Instant::ZERO).expect("valid");
        machine.connect_device(DEVICE, with_slots("leaf0"), Instant::ZERO);
        Self { machine, now: Instant::ZERO }
    }

    /// Send an operator's command, which the device accepts; returns the reply.
    fn command(&mut self, conn: ConnId, operator: &str, command: UpdateCommand) -> UpdateReply {
        let update = UpdateDevice { device: "leaf0".into(), operator: operator.into(), command };
        self.machine.handle_request(conn, ClientRequest::Update(Box::new(update)), self.now);
        loop {
            self.machine.handle_timeout(self.now);
            let (to, output) = self.machine.poll_transmit().expect("a reply");
            let Output::Frames(parts) = output else { panic!("a message") };
            let mut buffer = FrameBuffer::new(1 << 20);
            parts.iter().map(Frames::bytes).for_each(|bytes| buffer.push(bytes));
            if to == conn {
                let ClientReply::Updated(reply) = buffer.take_message().expect("valid").expect("whole") else {
                    panic!("a reply")
                };
                return *reply;
            }
            while let Some(Envelope { id, message }) = buffer.take_message::<Envelope<Request>>().expect("valid") {
                if let Request::Update(_) = message {
                    let status = UpdateStatus { slots: slots(), transfer: Transfer::None };
                    let message = Response::Update(status);
                    self.machine.handle_response(DEVICE, Envelope { id, message }, self.now);
                }
            }
        }
    }
}

/// Its machine has lost power, and its connection looks alive.
#[test]
fn silent_operator_holds_a_device_for_a_lease_only() {
    const MOMENT: Duration = Duration::from_millis(1);
    let mut steps = Steps::new();
    let (ann, bob) = (ConnId(1), ConnId(2));
    assert!(steps.machine.connect_client(ann) && steps.machine.connect_client(bob));
    let begin = UpdateCommand::Begin(UpdateOffer { manifest_len_bytes: 5, len_bytes: 9, sha256: NEW });
    steps.command(ann, "ann", begin.clone()).expect("the first");
    // Her command waits for the card, and asks for its status.
    steps.now = steps.now + (TRANSFER_LEASE - MOMENT);
    steps.command(ann, "ann", UpdateCommand::Status).expect("a status");
    steps.now = steps.now + (TRANSFER_LEASE - MOMENT);
    // That somebody else asks renews nothing.
    steps.command(bob, "bob", UpdateCommand::Status).expect("a status");
    let refusal = steps.command(bob, "bob", begin.clone()).expect_err("held");
    assert!(matches!(&refusal, UpdateRefusal::Busy { operator, for_s: 119, .. } if operator == "ann"), "{refusal}");
    steps.now = steps.now + MOMENT;
    steps.command(bob, "bob", begin.clone()).expect("the lease is over");
    let refusal = steps.command(ann, "ann", begin).expect_err("held");
    assert!(matches!(&refusal, UpdateRefusal::Busy { operator, for_s: 0, .. } if operator == "bob"), "{refusal}");
}

#[test]
fn device_without_slots_and_absent_device_are_refused_with_the_advice() {
    let controller = controller();
    let _device = Device::start(&controller, "leaf0", None, None);
    let mut operator = client(&controller, "ann");
    let refusal = command(&mut operator, UpdateCommand::Status).expect_err("no slots").to_string();
    assert!(refusal.contains("sumac flash") && refusal.contains("update-key"), "{refusal}");
    let refusal = operator.command("leaf\u{7}9", UpdateCommand::Status).expect("a reply").expect_err("absent");
    assert!(refusal.is_away() && !refusal.to_string().contains('\u{7}'), "{refusal}");
}

#[test]
fn client_with_two_commands_at_once_is_refused() {
    let controller = controller();
    let silent = |request: &Request| matches!(request, Request::Update(_));
    let _device =
        Device::serve(
            &controller,
            with_slots("leaf0"),
            move |request| {
                if silent(request) { Reply::Silent } else { Reply::Done }
            },
        );
    let mut raw = Raw::dial(&controller);
    for _ in 0..2 {
        let update = UpdateDevice { device: "leaf0".into(), operator: "ann".into(), command: UpdateCommand::Status };
        raw.send(ClientRequest::Update(Box::new(update)));
    }
    let ClientReply::Updated(reply) = raw.recv() else { panic!("a refusal") };
    assert_eq!(*reply, Err(UpdateRefusal::OneAtATime));
    // The device does not answer in time.
    raw.extend_timeout();
    let ClientReply::Updated(reply) = raw.recv() else { panic!("a refusal") };
    assert_eq!(*reply, Err(UpdateRefusal::NoAnswer { device: "leaf0".into() }));
}

#[test]
fn jobs_move_off_a_device_before_it_restarts_and_come_back_after_it() {
    let controller = controller();
    let (device, requests) = updatable(&controller, "leaf0");
    let (mut ranks, memberships) = join_all(&controller, 2, &[]);
    let group = tree_of(&memberships[0]).group;
    let addr = controller.local_addr();
    let restart = thread::spawn(move || {
        let mut operator = UpdateClient::new(addr, "ann");
        (operator.command("leaf0", UpdateCommand::Restart(NEW)).expect("a reply"), operator)
    });
    for rank in &mut ranks {
        assert_eq!(rank.recv(), ClientReply::TreeLost { view: 0 });
    }
    assert!(requests.try_recv().is_err(), "the job still uses the device");
    let memberships = replan(&mut ranks, 0);
    let reason = no_tree_reason(&memberships[0]);
    assert_eq!(reason, "device leaf0 restarts for an update to 2.0");
    assert_eq!(recv_release(&device), group, "its group is released first");
    assert_eq!(next(&requests), UpdateRequest::Restart { sha256: NEW });
    let (reply, _operator) = restart.join().expect("no panic");
    reply.expect("restarting");
    let report = status(addr).expect("a report");
    let recovery = &report.recoveries[0];
    assert!(recovery.cause.contains("restarts for an update to 2.0"), "{recovery:?}");
    assert_eq!(report.jobs[0].tree, Some(Err(reason.to_owned())), "it says so until the device is back");
    // It restarts: another incarnation.
    disconnect_device(device, &controller);
    let (_device, _requests) = updatable(&controller, "leaf0");
    for rank in &mut ranks {
        loop {
            match rank.recv_any() {
                ClientReply::Offer { view: 1 } => break,
                ClientReply::Queued(_) => {}
                other => panic!("an offer, not {other:?}"),
            }
        }
        rank.send(ClientRequest::Pause { view: 1, at: 5 });
    }
    for rank in &mut ranks {
        assert_eq!(rank.recv(), ClientReply::MoveAt { view: 1, call: 5 });
    }
    assert_eq!(tree_of(&replan(&mut ranks, 1)[0]).leaf, "leaf0");
}

#[test]
fn refused_restart_gives_the_device_back_to_jobs() {
    let controller = controller();
    let (refuse, refuses) = channel();
    let (_device, requests) = updatable_unless(&controller, "leaf0", Some(refuses));
    let (mut ranks, _) = join_all(&controller, 2, &[]);
    let addr = controller.local_addr();
    let restart = thread::spawn(move || UpdateClient::new(addr, "ann").command("leaf0", UpdateCommand::Restart(NEW)));
    for rank in &mut ranks {
        assert_eq!(rank.recv(), ClientReply::TreeLost { view: 0 });
    }
    // The device refuses after this plan, which would otherwise use it, without an offer.
    assert!(replan(&mut ranks, 0).iter().all(|membership| membership.tree.is_err()));
    next(&requests);
    refuse.send(()).expect("it serves");
    let refusal = restart.join().expect("no panic").expect("a reply").expect_err("refused").to_string();
    assert!(refusal.contains("not today") && !refusal.contains('\u{7}'), "{refusal}");
    for rank in &mut ranks {
        loop {
            match rank.recv_any() {
                ClientReply::Offer { view: 1 } => break,
                ClientReply::Queued(_) => {}
                other => panic!("an offer, not {other:?}"),
            }
        }
    }
}

/// Ranks that make no call keep their tree for a while, and then the device restarts nevertheless.
#[test]
fn idle_job_delays_a_restart_for_a_limited_time() {
    let controller = controller();
    let (_device, requests) = updatable(&controller, "leaf0");
    let (_ranks, _) = join_all(&controller, 2, &[]);
    let addr = controller.local_addr();
    let began = std::time::Instant::now();
    let restart = thread::spawn(move || UpdateClient::new(addr, "ann").command("leaf0", UpdateCommand::RollBack));
    let request = requests.recv_timeout(2 * TEST_TIMEOUT).expect("after the limit");
    assert_eq!(request, UpdateRequest::RollBack);
    assert!(began.elapsed() > SOON, "{:?}", began.elapsed());
    restart.join().expect("no panic").expect("a reply").expect("restarting");
}

#[test]
fn report_has_the_slots_of_devices_as_they_are() {
    let controller = controller();
    let confirmed = |request: &Request| match request {
        Request::Update(UpdateRequest::Status) => {
            let mut slots = slots();
            slots.running = Some(SlotId::B);
            Reply::with(Response::Update(UpdateStatus { slots, transfer: Transfer::None }))
        }
        _ => Reply::Done,
    };
    let _new = Device::serve(&controller, with_slots("leaf0"), confirmed);
    // It answers no such request.
    let _announced = Device::serve(&controller, with_slots("leaf1"), |_| Reply::Done);
    let _none = Device::start(&controller, "leaf2", None, None);
    let report = status(controller.local_addr()).expect("a report");
    let running: Vec<_> =
        report.devices.iter().map(|device| device.slots.as_ref().map(|slots| slots.running)).collect();
    assert_eq!(running, [Some(Some(SlotId::B)), Some(Some(SlotId::A)), None]);
}
