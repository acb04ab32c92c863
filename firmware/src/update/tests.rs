//! Both ends and a card's storage against each other: lost connections at every command, hostile peers, power cuts.

mod hostile;
mod installed;
mod transfers;

use super::*;
use crate::bfb::Builder;
use crate::manifest::{Manifest, SlotDigest, hex};
use crate::slots::{Event as SlotEvent, Policy, Slots, Updater};
use ed25519_dalek::SigningKey;
use sha2::{Digest, Sha256};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sumac_hal::ctrl::update::{PieceBytes, SlotsStatus, Transfer, UpdateOffer, UpdateRequest, UpdateStatus};
use sumac_hal::flash::{BlockDevice, Geometry};
use sumac_hal::time::Instant;

const BLOCK_LEN_BYTES: usize = 512;
const BLOCKS: u32 = 64;

/// The length of pieces in tests, in bytes: images are short.
const PART_BYTES: usize = 512;

/// A slot's device; copies are the same device.
#[derive(Debug, Clone)]
struct Ram(Arc<Mutex<Vec<u8>>>);

impl Ram {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(vec![0; BLOCK_LEN_BYTES * BLOCKS as usize])))
    }
}

impl BlockDevice for Ram {
    type Error = io::Error;

    fn geometry(&self) -> Geometry {
        Geometry { block_len_bytes: BLOCK_LEN_BYTES, blocks: BLOCKS }
    }

    fn read(&mut self, block: u32, buffer: &mut [u8]) -> io::Result<()> {
        let at = block as usize * BLOCK_LEN_BYTES;
        buffer.copy_from_slice(&self.0.lock().expect("no panic")[at..at + buffer.len()]);
        Ok(())
    }

    fn write(&mut self, block: u32, data: &[u8]) -> io::Result<()> {
        let at = block as usize * BLOCK_LEN_BYTES;
        self.0.lock().expect("no panic")[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

/// A slot's payload, and its signed manifest.
#[derive(Debug, Clone)]
struct Image {
    manifest: Vec<u8>,
    bytes: Vec<u8>,
    epoch: u64,
}

impl Image {
    fn new(version: &str, epoch: u64, signed_by: &SigningKey) -> Self {
        let bytes: Vec<u8> = version.as_bytes().iter().copied().cycle().take(7001).collect();
        Self { manifest: manifest(version, epoch, &bytes).seal(Some(signed_by)).expect("short"), bytes, epoch }
    }

    fn offer(&self) -> UpdateOffer {
        UpdateOffer {
            manifest_len_bytes: self.manifest.len() as u32,
            len_bytes: self.bytes.len() as u64,
            sha256: Sha256::digest(&self.bytes).into(),
        }
    }

    fn goal(&self) -> Goal {
        Goal::Update { offer: self.offer(), epoch: self.epoch }
    }

    /// Manifest and image, as they are sent.
    fn sent(&self) -> Vec<u8> {
        [&self.manifest[..], &self.bytes].concat()
    }
}

/// The manifest of a payload of any bytes.
fn manifest(version: &str, epoch: u64, payload: &[u8]) -> Manifest {
    let mut manifest = Manifest::of(&Builder::new(), version, epoch).expect("a version");
    let (len_bytes, sha256) = (payload.len() as u64, hex(&Sha256::digest(payload)));
    manifest.slot = Some(SlotDigest { len_bytes, sha256 });
    manifest
}

/// Counts what the card asks of its supervisor.
#[derive(Debug, Clone, Default)]
struct Recorder(Arc<Mutex<(u32, u32)>>);

impl Supervisor for Recorder {
    fn confirm(&mut self) -> io::Result<()> {
        self.0.lock().expect("no panic").0 += 1;
        Ok(())
    }

    fn restart(&mut self) -> io::Result<()> {
        self.0.lock().expect("no panic").1 += 1;
        Ok(())
    }
}

/// A card as it runs: what a restart loses.
struct Running {
    card: Card<Ram, NoBootOrder, Recorder>,
    session: Session,
    updater: Updater,
    recorder: Recorder,
}

/// A card: its storage, and what runs on it.
struct Rig {
    slots: [Ram; 2],
    running: Running,
    now: Instant,
    /// New images never report that they are healthy.
    is_sick: bool,
}

impl Rig {
    /// A card that runs version 1.0 of epoch 1 in slot A, confirmed.
    fn new() -> Self {
        let slots = [Ram::new(), Ram::new()];
        let mut both = Slots::new(slots.clone()).expect("large enough");
        let image = Image::new("1.0", 1, &key(1));
        let mut updater = Updater::new(Policy::default(), None, Instant::ZERO);
        let UpdateOffer { len_bytes, sha256, .. } = image.offer();
        let offer = crate::slots::Offer { version: "1.0".into(), epoch: 1, len_bytes, sha256 };
        for event in [SlotEvent::Begin(&offer), SlotEvent::Chunk(&image.bytes), SlotEvent::Finish] {
            updater.handle(event, &mut both).expect("installed");
        }
        let mut rig = Self { running: Self::start(&slots), slots, now: Instant::ZERO, is_sick: false };
        rig.become_healthy();
        rig
    }

    fn start(slots: &[Ram; 2]) -> Running {
        let mut both = Slots::new(slots.clone()).expect("large enough");
        let selected = both.select().expect("one starts");
        let updater = Updater::new(Policy::default(), Some(selected.clone()), Instant::ZERO);
        let recorder = Recorder::default();
        let card = Card::new(both, Some(selected.slot), key(1).verifying_key().into(), (NoBootOrder, recorder.clone()));
        Running { card, session: Session::default(), updater, recorder }
    }

    fn become_healthy(&mut self) {
        let mut both = Slots::new(self.slots.clone()).expect("large enough");
        self.running.updater.handle(SlotEvent::Healthy, &mut both).expect("a record");
    }

    fn restart(&mut self) {
        self.running = Self::start(&self.slots);
    }

    fn status(&mut self) -> SlotsStatus {
        self.running.card.status().expect("readable")
    }

    fn version(&mut self) -> String {
        self.status().running_image().expect("from a slot").version.to_string()
    }

    /// Carry out a request, and send the response.
    fn request(&mut self, request: UpdateRequest) -> Result<UpdateStatus, String> {
        let slots = self.status();
        let status = self.running.session.handle(request, &slots, self.now);
        if status.is_ok() {
            self.running.session.handle_sent();
        }
        status
    }

    /// Do some work of the session. What it leads to outside, happens.
    fn work(&mut self, steps: usize) {
        for _ in 0..steps {
            let Some((transfer, work)) = self.running.session.poll_work() else { break };
            let done = self.running.card.run(work);
            self.running.session.handle_done(transfer, done, self.now);
        }
        let (confirmations, restarts) = *self.running.recorder.0.lock().expect("no panic");
        if confirmations > 0 {
            self.become_healthy();
        }
        if restarts > 0 {
            self.restart();
            if !self.is_sick {
                self.become_healthy();
            }
        }
    }

    /// What a controller makes of a command, if pieces were even shorter.
    fn command(&mut self, command: Command, sent: &[u8]) -> Reply {
        let request = match command {
            Command::Status => UpdateRequest::Status,
            Command::Begin(offer) => UpdateRequest::Begin(offer),
            Command::Piece { offset, len_bytes } => {
                let bytes = &sent[offset as usize..][..len_bytes as usize];
                let mut reply = Reply::Away;
                for (part, bytes) in bytes.chunks(PART_BYTES).enumerate() {
                    let offset = offset + (part * PART_BYTES) as u64;
                    reply = self
                        .request(piece(offset, bytes))
                        .map_or_else(Reply::Refused, |status| Reply::Status(Box::new(status)));
                }
                return reply;
            }
            Command::Finish => UpdateRequest::Finish,
            Command::Restart(sha256) => UpdateRequest::Restart { sha256 },
            Command::RollBack => UpdateRequest::RollBack,
            Command::Confirm => UpdateRequest::Confirm,
        };
        self.request(request).map_or_else(Reply::Refused, |status| Reply::Status(Box::new(status)))
    }
}

fn piece(offset: u64, bytes: &[u8]) -> UpdateRequest {
    UpdateRequest::Piece { offset, bytes: PieceBytes::copy_of(bytes).expect("short") }
}

/// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
struct Rng(u64);

impl Rng {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % limit
    }
}

/// What happens to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Arrives,
    /// Neither it nor a reply.
    CommandLost,
    ReplyLost,
    /// The card loses power before it answers.
    PowerCut,
}

/// Pursue a goal, and return the outcome and how many commands there were.
fn pursue(
    rig: &mut Rig,
    goal: Goal,
    sent: &[u8],
    mut fate: impl FnMut(u32) -> Fate,
) -> (Result<Outcome, Failure>, u32) {
    let limits = Limits { total: Duration::from_secs(60), interval: Duration::from_millis(10), ..Limits::default() };
    let (mut now, mut commands) = (Instant::ZERO, 0);
    let mut sender = Sender::new(goal, limits, 2000, now);
    loop {
        if let Some(outcome) = sender.outcome() {
            return (outcome.clone(), commands);
        }
        if let Some(command) = sender.poll_transmit(now) {
            let fate = fate(commands);
            commands += 1;
            let reply = match fate {
                Fate::CommandLost => Reply::Lost("cut".into()),
                Fate::PowerCut => {
                    rig.restart();
                    rig.become_healthy();
                    Reply::Away
                }
                Fate::Arrives | Fate::ReplyLost => {
                    let reply = rig.command(command, sent);
                    if fate == Fate::Arrives { reply } else { Reply::Lost("cut".into()) }
                }
            };
            sender.handle_reply(reply, now);
            rig.now = now;
            rig.work(usize::MAX);
        } else {
            now = sender.poll_timeout().unwrap_or(now).max(now + Duration::from_millis(1));
            assert!(now < Instant::ZERO + Duration::from_secs(61), "it ends at its limit");
            sender.handle_timeout(now);
        }
    }
}

#[test]
fn signed_image_reaches_the_other_slot_and_is_confirmed() {
    let (mut rig, image) = (Rig::new(), Image::new("2.0", 2, &key(1)));
    let (outcome, _) = pursue(&mut rig, image.goal(), &image.sent(), |_| Fate::Arrives);
    let outcome = outcome.expect("updated");
    assert_eq!((outcome.slot, outcome.version.as_str(), outcome.epoch), (SlotId::B, "2.0", 2));
    assert!(outcome.is_confirmed && !outcome.was_so_before);
    let (again, commands) = pursue(&mut rig, image.goal(), &image.sent(), |_| Fate::Arrives);
    assert!(again.expect("as before").was_so_before);
    assert_eq!(commands, 1, "it asks, and sends nothing");
}

/// Its code is the same, and nothing older may follow it.
#[test]
fn same_payload_with_a_later_epoch_is_installed() {
    let (mut rig, image) = (Rig::new(), Image::new("1.0", 1, &key(1)));
    let (outcome, _) = pursue(&mut rig, image.goal(), &image.sent(), |_| Fate::Arrives);
    assert!(outcome.expect("as before").was_so_before);
    let bytes = image.bytes.clone();
    let later = Image { manifest: manifest("1.0", 3, &bytes).seal(Some(&key(1))).expect("short"), epoch: 3, bytes };
    let (outcome, _) = pursue(&mut rig, later.goal(), &later.sent(), |_| Fate::Arrives);
    let outcome = outcome.expect("updated");
    assert_eq!((outcome.slot, outcome.epoch, outcome.was_so_before), (SlotId::B, 3, false));
}

/// Every single command, its reply, or the card's power is lost; then pairs of them, and random ones.
#[test]
fn update_survives_every_loss_and_a_known_version_always_runs() {
    let image = Image::new("2.0", 2, &key(1));
    let (_, commands) = pursue(&mut Rig::new(), image.goal(), &image.sent(), |_| Fate::Arrives);
    assert!(commands > 8, "{commands} commands");
    let fates = [Fate::CommandLost, Fate::ReplyLost, Fate::PowerCut];
    for at in 0..commands + 2 {
        for lost in fates {
            let mut rig = Rig::new();
            let (outcome, _) =
                pursue(&mut rig, image.goal(), &image.sent(), |nth| if nth == at { lost } else { Fate::Arrives });
            assert!(outcome.is_ok(), "{lost:?} of command {at}: {outcome:?}");
            assert_eq!(rig.version(), "2.0", "{lost:?} of command {at}");
        }
    }
    for seed in 0..300 {
        let (mut rng, mut rig) = (Rng(seed), Rig::new());
        let one_in = 2 + rng.below(12);
        let fate = |_| match rng.below(one_in) {
            0 => fates[rng.below(3) as usize],
            _ => Fate::Arrives,
        };
        let (outcome, _) = pursue(&mut rig, image.goal(), &image.sent(), fate);
        let version = rig.version();
        match outcome {
            Ok(_) => assert_eq!(version, "2.0", "seed {seed}"),
            // Too much was lost, or a trial was cut short.
            Err(why) => assert!(["1.0", "2.0"].contains(&version.as_str()), "seed {seed}: {why}"),
        }
    }
}

#[test]
fn interrupted_transfer_goes_on_where_it_was_cut() {
    let (mut rig, image) = (Rig::new(), Image::new("2.0", 2, &key(1)));
    let sent = image.sent();
    rig.request(UpdateRequest::Begin(image.offer())).expect("begun");
    let half = sent.len() / 2;
    let (manifest, rest) = sent[..half].split_at(image.manifest.len());
    let mut offset = 0;
    for bytes in manifest.chunks(PART_BYTES).chain(rest.chunks(PART_BYTES)) {
        rig.request(piece(offset, bytes)).expect("in order");
        offset += bytes.len() as u64;
    }
    let mut first = None;
    let mut pieces = Vec::new();
    // The operator's command is started anew.
    let mut sender = Sender::new(image.goal(), Limits::default(), 2000, Instant::ZERO);
    let mut now = Instant::ZERO;
    while sender.outcome().is_none() {
        let Some(command) = sender.poll_transmit(now) else {
            now = sender.poll_timeout().expect("it waits");
            continue;
        };
        if let Command::Piece { offset, .. } = command {
            first.get_or_insert(offset);
            pieces.push(offset);
        }
        assert!(!matches!(command, Command::Begin(_)), "nothing starts over");
        let reply = rig.command(command, &sent);
        sender.handle_reply(reply, now);
        rig.work(usize::MAX);
    }
    assert_eq!(first, Some(offset), "{pieces:?}");
    assert_eq!(rig.version(), "2.0");
}

#[test]
fn image_that_never_becomes_healthy_is_reported_with_what_runs() {
    let (mut rig, image) = (Rig::new(), Image::new("2.0", 2, &key(1)));
    rig.is_sick = true;
    let (outcome, _) = pursue(&mut rig, image.goal(), &image.sent(), |_| Fate::Arrives);
    let why = outcome.expect_err("on trial for ever").to_string();
    assert!(why.contains("sumac card confirm") && why.contains("slot B, version 2.0, epoch 2, on trial"), "{why}");
    // It is restarted until it has no try left.
    rig.restart();
    rig.restart();
    assert_eq!(rig.version(), "1.0");
    let (outcome, _) = pursue(&mut rig, Goal::Confirm, &[], |_| Fate::Arrives);
    assert!(outcome.expect("confirmed before").was_so_before);
}

#[test]
fn operator_confirms_a_trial_or_rolls_it_back() {
    let (mut rig, image) = (Rig::new(), Image::new("2.0", 1, &key(1)));
    rig.is_sick = true;
    let on_trial = |rig: &mut Rig| {
        let limits = Limits { awaits_confirmation: false, ..Limits::default() };
        let mut sender = Sender::new(image.goal(), limits, 2000, Instant::ZERO);
        let mut now = Instant::ZERO;
        while sender.outcome().is_none() {
            match sender.poll_transmit(now) {
                Some(command) => {
                    let reply = rig.command(command, &image.sent());
                    sender.handle_reply(reply, now);
                    rig.work(usize::MAX);
                }
                None => now = sender.poll_timeout().expect("it waits"),
            }
        }
        let outcome = sender.outcome().cloned().expect("ended").expect("restarted");
        assert_eq!((outcome.slot, outcome.is_confirmed), (SlotId::B, false));
    };
    on_trial(&mut rig);
    // Another update would overwrite the only confirmed slot.
    let third = Image::new("3.0", 1, &key(1));
    let (outcome, _) = pursue(&mut rig, third.goal(), &third.sent(), |_| Fate::Arrives);
    assert!(outcome.expect_err("on trial").to_string().contains("on trial"));
    assert!(rig.request(UpdateRequest::Begin(third.offer())).expect_err("on trial").contains("on trial"));
    let (outcome, _) = pursue(&mut rig, Goal::RollBack, &[], |_| Fate::Arrives);
    assert_eq!(outcome.expect("rolled back").version, "1.0");
    assert_eq!(rig.version(), "1.0");

    on_trial(&mut rig);
    let (outcome, _) = pursue(&mut rig, Goal::Confirm, &[], |_| Fate::Arrives);
    assert!(outcome.expect("confirmed").is_confirmed);
    rig.is_sick = false;
    // A confirmed version is rolled back to one of the same epoch.
    let (outcome, _) = pursue(&mut rig, Goal::RollBack, &[], |_| Fate::Arrives);
    assert_eq!((outcome.expect("rolled back").slot, rig.version().as_str()), (SlotId::A, "1.0"));
}

#[test]
fn rollback_survives_every_loss() {
    for at in 0..12 {
        for lost in [Fate::CommandLost, Fate::ReplyLost, Fate::PowerCut] {
            let (mut rig, image) = (Rig::new(), Image::new("2.0", 1, &key(1)));
            pursue(&mut rig, image.goal(), &image.sent(), |_| Fate::Arrives).0.expect("updated");
            let fate = |nth| if nth == at { lost } else { Fate::Arrives };
            let (outcome, _) = pursue(&mut rig, Goal::RollBack, &[], fate);
            assert!(outcome.is_ok(), "{lost:?} of command {at}: {outcome:?}");
            assert_eq!(rig.version(), "1.0", "{lost:?} of command {at}");
        }
    }
}

#[test]
fn older_epoch_is_refused_by_both_ends() {
    let (mut rig, newer) = (Rig::new(), Image::new("2.0", 5, &key(1)));
    pursue(&mut rig, newer.goal(), &newer.sent(), |_| Fate::Arrives).0.expect("updated");
    let older = Image::new("3.0", 4, &key(1));
    let (outcome, commands) = pursue(&mut rig, older.goal(), &older.sent(), |_| Fate::Arrives);
    assert!(matches!(outcome, Err(Failure::OlderEpoch { epoch: 4, running: 5, .. })), "{outcome:?}");
    assert_eq!(commands, 1);
    // An operator's command that lies about the epoch.
    let lie = Goal::Update { offer: older.offer(), epoch: 9 };
    let (outcome, _) = pursue(&mut rig, lie, &older.sent(), |_| Fate::Arrives);
    let why = outcome.expect_err("refused").to_string();
    assert!(why.contains("epoch 4") && why.contains("epoch 5") && why.contains("the card runs slot B"), "{why}");
    // Slot A holds epoch 1.
    let (outcome, _) = pursue(&mut rig, Goal::RollBack, &[], |_| Fate::Arrives);
    let why = outcome.expect_err("refused").to_string();
    assert!(why.contains("older epochs are refused") || why.contains("holds nothing"), "{why}");
    assert_eq!(rig.version(), "2.0");
}

#[test]
fn update_key_is_the_middle_line_of_a_pem_file() {
    use ed25519_dalek::pkcs8::EncodePublicKey;
    let pem = key(1).verifying_key().to_public_key_pem(Default::default()).expect("encoded");
    let line = pem.lines().nth(1).expect("three lines");
    assert_eq!(line.parse(), Ok(UpdateKey::from(key(1).verifying_key())));
    for bad in ["", "abc", &line[1..], &pem] {
        assert_eq!(bad.parse::<UpdateKey>(), Err(UpdateKeyError), "{bad}");
    }
}
