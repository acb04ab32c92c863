//! Golden vectors, and what a peer or somebody on the path may do to a channel.

use super::crypto::{ChaChaPoly, Sensitive, Sha256, X25519};
use super::*;
use noise_protocol::HandshakeState;
use noise_protocol::patterns::noise_nn_psk0;
use std::string::ToString;
use std::vec::Vec;

fn bytes(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks_exact(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn array<const N: usize>(digits: &str) -> [u8; N] {
    bytes(digits).try_into().unwrap()
}

fn key() -> Key {
    Key::new(KeyId(0x0102_0304_0506_0708), *b"This is my Austrian perspective!")
}

const INITIATOR: [u8; 32] = [0x11; 32];
const RESPONDER: [u8; 32] = [0x22; 32];
const NONCE: [u8; NONCE_LEN] = [0x33; NONCE_LEN];

/// The four messages of a handshake, and the ciphers of both sides: initiator's, responder's.
struct Handshake {
    hello: [u8; HELLO_LEN],
    challenge: [u8; CHALLENGE_LEN],
    message: [u8; MESSAGE_LEN],
    reply: [u8; REPLY_LEN],
    initiator: (Sealer, Opener),
    responder: (Sealer, Opener),
}

fn handshake() -> Handshake {
    let (initiator, hello) = Initiator::new(&key(), INITIATOR);
    let (responder, challenge) = Responder::new(&hello, &key(), &NONCE);
    let (awaiting, message) = initiator.handle_challenge(&challenge).unwrap();
    let (reply, sealer, opener) = responder.handle_message(&message, RESPONDER).unwrap();
    let initiator = awaiting.handle_reply(&reply).unwrap();
    Handshake { hello, challenge, message, reply, initiator, responder: (sealer, opener) }
}

fn seal(sealer: &mut Sealer, plaintext: &[u8]) -> Vec<u8> {
    let mut record = [0; RECORD_LEN_MAX];
    let len = sealer.seal(plaintext, &mut record).unwrap();
    record[..len].to_vec()
}

/// From cacophony's test vectors, which other implementations share.
#[test]
fn noise_pattern_gives_the_bytes_of_other_implementations() {
    type State = HandshakeState<X25519, ChaChaPoly, Sha256>;
    let side = |is_initiator, ephemeral: &str| {
        let ephemeral = Some(Sensitive::new(array(ephemeral)));
        let prologue = bytes("4a6f686e2047616c74");
        let mut state = State::new(noise_nn_psk0(), is_initiator, prologue, None, ephemeral, None, None);
        state.push_psk(b"This is my Austrian perspective!");
        state
    };
    let mut initiator = side(true, "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a");
    let mut responder = side(false, "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b");
    let vectors = [
        (
            "4c756477696720766f6e204d69736573",
            "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c794479b962b8aff8485742ac32f905ba4536\
             9e2465fb59e138a93d67a0d1266b6a54",
        ),
        (
            "4d757272617920526f746862617264",
            "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843d6062704d5a9c422a8e834423f8c1fea\
             da7e8d0d910a1a2cd030fb584221e3",
        ),
    ];
    for ((payload, expected), is_up) in vectors.into_iter().zip([true, false]) {
        let (from, to) = if is_up { (&mut initiator, &mut responder) } else { (&mut responder, &mut initiator) };
        let (payload, expected) = (bytes(payload), bytes(expected));
        let mut sent = std::vec![0; payload.len() + 48];
        from.write_message(&payload, &mut sent).unwrap();
        assert_eq!(sent, expected);
        let mut received = std::vec![0; payload.len()];
        to.read_message(&sent, &mut received).unwrap();
        assert_eq!(received, payload);
    }
    let hash = bytes("f4d03dc34495c95729ea6de9e1b59004b59733102488b3e24bc441e0be208eaf");
    assert_eq!((initiator.get_hash(), responder.get_hash()), (&hash[..], &hash[..]));
    let (mut up, mut down) = initiator.get_ciphers();
    let mut sealed = [0; 27];
    up.encrypt(&bytes("462e20412e20486179656b"), &mut sealed);
    assert_eq!(sealed, array("e632c3763d7669067383433197a3baddf146e9e70ad4b4e9e59e0f"));
    down.encrypt(&bytes("4361726c204d656e676572"), &mut sealed);
    assert_eq!(sealed, array("64c6bee32ea91c8474bb4c21d7a700109ad45af77b29764ba5eb1e"));
}

/// The bytes on the wire; who changes them changes `VERSION`.
#[test]
fn handshake_and_records_have_golden_bytes() {
    let mut made = handshake();
    assert_eq!(made.hello, array("536b01000807060504030201"));
    assert_eq!(made.challenge, array("536b000033333333333333333333333333333333"));
    assert_eq!(made.message, array(GOLDEN[0]));
    assert_eq!(made.reply, array(GOLDEN[1]));
    assert_eq!(seal(&mut made.initiator.0, b"frame"), bytes(GOLDEN[2]));
    assert_eq!(seal(&mut made.responder.0, b"frame"), bytes(GOLDEN[3]));
}

const GOLDEN: [&str; 4] = [
    "7b4e909bbe7ffe44c465a220037d608ee35897d31ef972f07f74892cb0f73f13946b7ff7265c4883ac7fbb572eb48635",
    "536b00000faa684ed28867b97f4a6a2dee5df8ce974e76b7018e3f22a1c4cf2678570f2059cdcc32bb2444e0e48d2942\
     ebcb93a9",
    "15004fb114ca8d849b6e2bd38e3d3fa547b711f0ad4416",
    "1500761e877a91954c72f30957e42f3f8f512c74c6c2e6",
];

#[test]
fn both_directions_carry_bytes_after_the_handshake() {
    let mut made = handshake();
    for round in 0..3_usize {
        for len in [1, 17, 1000, RECORD_PLAINTEXT_MAX] {
            let text = std::vec![round as u8; len];
            let mut up = seal(&mut made.initiator.0, &text);
            assert_eq!(record_len(&up), Ok(Some(up.len())));
            assert_eq!(made.responder.1.open(&mut up), Ok(&text[..]));
            let mut down = seal(&mut made.responder.0, &text);
            assert_ne!(up, down);
            assert_eq!(made.initiator.1.open(&mut down), Ok(&text[..]));
        }
    }
}

/// Change one bit of each byte of each message in turn: one of the two sides must notice before it sends anything.
#[test]
fn every_changed_byte_of_the_handshake_is_found() {
    for (which, len) in [HELLO_LEN, CHALLENGE_LEN, MESSAGE_LEN, REPLY_LEN].into_iter().enumerate() {
        for index in 0..len {
            let change = |stage: usize, bytes: &mut [u8]| {
                if stage == which {
                    bytes[index] ^= 0x80;
                }
            };
            let run = || {
                let (initiator, mut hello) = Initiator::new(&key(), INITIATOR);
                change(0, &mut hello);
                if key_id(&hello)? != key().id() {
                    return Err(HandshakeError::Refused { id: key().id(), refusal: KeyRefusal::Unknown });
                }
                let (responder, mut challenge) = Responder::new(&hello, &key(), &NONCE);
                change(1, &mut challenge);
                let (awaiting, mut message) = initiator.handle_challenge(&challenge)?;
                change(2, &mut message);
                let (mut reply, ..) = responder.handle_message(&message, RESPONDER)?;
                change(3, &mut reply);
                awaiting.handle_reply(&reply)
            };
            // The top bit of a public key is ignored (RFC 7748), but not by the hash.
            assert!(run().is_err(), "message {which}, byte {index}");
        }
    }
}

#[test]
fn every_changed_byte_of_a_record_is_found_and_ends_the_channel() {
    let record = seal(&mut handshake().initiator.0, b"a frame of the control protocol");
    for index in 0..record.len() {
        let mut made = handshake();
        let mut changed = record.clone();
        changed[index] ^= 1;
        assert!(made.responder.1.open(&mut changed).is_err(), "byte {index}");
        assert_eq!(made.responder.1.open(&mut record.clone()), Err(RecordError::Ended));
    }
}

#[test]
fn repeated_reordered_dropped_truncated_and_reflected_records_fail() {
    let attack = |pick: fn(&[Vec<u8>]) -> Vec<Vec<u8>>| {
        let mut made = handshake();
        let records: Vec<_> = (0..3).map(|index| seal(&mut made.initiator.0, &[index; 8])).collect();
        let opened = pick(&records).iter_mut().try_for_each(|record| made.responder.1.open(record).map(|_| ()));
        opened.expect_err("found")
    };
    let authentication = RecordError::Authentication;
    assert_eq!(attack(|all| [&all[0], &all[0]].map(Clone::clone).to_vec()), authentication);
    assert_eq!(attack(|all| [&all[1], &all[0]].map(Clone::clone).to_vec()), authentication);
    assert_eq!(attack(|all| [&all[0], &all[2]].map(Clone::clone).to_vec()), authentication);
    assert_eq!(attack(|all| std::vec![all[0][..20].to_vec()]), RecordError::Length { len: 20 });
    let mut made = handshake();
    let mut own = seal(&mut made.initiator.0, b"back to its sender");
    assert_eq!(made.initiator.1.open(&mut own), Err(authentication));
}

#[test]
fn recorded_handshake_fails_against_another_challenge() {
    let recorded = handshake();
    let (responder, challenge) = Responder::new(&recorded.hello, &key(), &[0x34; NONCE_LEN]);
    assert_ne!(challenge, recorded.challenge);
    let replayed = responder.handle_message(&recorded.message, RESPONDER).err();
    assert_eq!(replayed, Some(HandshakeError::Proof(key().id())));
    // Nor does a recorded reply convince an initiator.
    let (initiator, _) = Initiator::new(&key(), [0x12; 32]);
    let (awaiting, _) = initiator.handle_challenge(&recorded.challenge).unwrap();
    assert_eq!(awaiting.handle_reply(&recorded.reply).err(), Some(HandshakeError::Proof(key().id())));
}

#[test]
fn other_secret_under_the_same_id_proves_nothing_to_either_side() {
    let other = Key::new(key().id(), [9; 32]);
    let (initiator, hello) = Initiator::new(&other, INITIATOR);
    let (responder, challenge) = Responder::new(&hello, &key(), &NONCE);
    let (_, message) = initiator.handle_challenge(&challenge).unwrap();
    let wrong = HandshakeError::Proof(key().id());
    assert_eq!(responder.handle_message(&message, RESPONDER).err(), Some(wrong));
    assert_eq!(KeyRefusal::from(wrong), KeyRefusal::Wrong);
    // A squatter that answers without the key.
    let (initiator, hello) = Initiator::new(&key(), INITIATOR);
    let (squatter, challenge) = Responder::new(&hello, &other, &NONCE);
    let (awaiting, message) = initiator.handle_challenge(&challenge).unwrap();
    assert!(squatter.handle_message(&message, RESPONDER).is_err());
    let (_, hello) = Initiator::new(&other, INITIATOR);
    let (accomplice, _) = Responder::new(&hello, &other, &NONCE);
    let (forger, _) = Initiator::new(&other, INITIATOR);
    let (_, forged) = forger.handle_challenge(&challenge).unwrap();
    let (reply, ..) = accomplice.handle_message(&forged, RESPONDER).unwrap();
    assert_eq!(awaiting.handle_reply(&reply).err(), Some(wrong));
}

#[test]
fn refusals_reach_the_initiator_with_their_reason() {
    let reasons = [
        KeyRefusal::Unknown,
        KeyRefusal::Wrong,
        KeyRefusal::Revoked,
        KeyRefusal::Expired,
        KeyRefusal::NoKeys,
        KeyRefusal::Busy,
        KeyRefusal::Version(1),
        KeyRefusal::Other(77),
    ];
    for refusal in reasons {
        let expected = Some(HandshakeError::Refused { id: key().id(), refusal });
        let begun = || Initiator::new(&key(), INITIATOR).0;
        assert_eq!(begun().handle_challenge(&refusal_to_hello(refusal)).err(), expected);
        let (awaiting, _) = begun().handle_challenge(&handshake().challenge).unwrap();
        assert_eq!(awaiting.handle_reply(&refusal_to_message(refusal)).err(), expected);
    }
    let mut hello = handshake().hello;
    hello[2] = 9;
    assert_eq!(key_id(&hello), Err(HandshakeError::Version(9)));
    assert_eq!(key_id(b"Sc0123456789"), Err(HandshakeError::Magic));
    assert!(is_hello(&hello) && !is_hello(b"S") && !is_hello(b"Sc"));
}

#[test]
fn point_of_small_order_is_refused() {
    // The neutral element: every private key turns it into the same secret.
    let (_, hello) = Initiator::new(&key(), INITIATOR);
    let (responder, challenge) = Responder::new(&hello, &key(), &NONCE);
    let prologue = [&hello[..], &challenge].concat();
    let mut state = HandshakeState::<Zero, ChaChaPoly, Sha256>::new(
        noise_nn_psk0(),
        true,
        prologue,
        None,
        Some(Sensitive::new([0; 32])),
        None,
        None,
    );
    state.push_psk(key().secret());
    let mut message = [0; MESSAGE_LEN];
    state.write_message(&[], &mut message).unwrap();
    assert_eq!(message[..32], [0; 32]);
    assert!(responder.handle_message(&message, RESPONDER).is_err());
}

/// A Diffie-Hellman function whose public keys are zero.
enum Zero {}

impl noise_protocol::DH for Zero {
    type Key = Sensitive;
    type Pubkey = [u8; 32];
    type Output = Sensitive;

    fn name() -> &'static str {
        "25519"
    }

    fn genkey() -> Sensitive {
        unreachable!("it is given")
    }

    fn pubkey(_: &Sensitive) -> [u8; 32] {
        [0; 32]
    }

    fn dh(_: &Sensitive, _: &[u8; 32]) -> Result<Sensitive, ()> {
        Ok(Sensitive::new([0; 32]))
    }
}

#[test]
fn key_as_text_round_trips_and_is_hidden_elsewhere() {
    let text = key().reveal().to_string();
    assert_eq!(text, "sumac-key-v1 0102030405060708 54686973206973206d7920417573747269616e20706572737065637469766521");
    assert_eq!(text.parse(), Ok(key()));
    assert_eq!(std::format!(" {text}\n").parse(), Ok(key()));
    let secret = key().reveal_secret().to_string();
    assert_eq!(Key::from_parts(key().id(), &secret), Ok(key()));
    let shown = std::format!("{:?}", key());
    assert!(
        shown.contains("0102030405060708") && !shown.contains(&secret[..8]) && !shown.contains("84, 104"),
        "{shown}"
    );
    for (text, error) in [
        ("", KeyError::Form),
        ("sumac-key-v1 0102030405060708", KeyError::Form),
        ("sumac-key-v2 0102030405060708 00", KeyError::Form),
        ("sumac-key-v1 01020304050607 00", KeyError::Id),
        ("sumac-key-v1 010203040506070g 00", KeyError::Id),
        ("sumac-key-v1 0102030405060708 00", KeyError::Secret),
        ("sumac-key-v1 0102030405060708 54 55", KeyError::Form),
    ] {
        assert_eq!(text.parse::<Key>(), Err(error), "{text}");
    }
    // Not a character boundary in the middle of a byte.
    assert_eq!("\u{e9}1234567890123\u{e9}".parse::<KeyId>(), Err(KeyError::Id));
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(32))]

    /// Whatever a peer sends, nothing panics, and nothing is accepted.
    #[test]
    fn arbitrary_bytes_are_never_accepted(bytes in proptest::collection::vec(proptest::num::u8::ANY, 80), is_headed: bool) {
        let mut bytes = bytes;
        if is_headed {
            // Past the check of magic and code.
            bytes[..4].copy_from_slice(b"Sk\0\0");
        }
        let _ = key_id(bytes.first_chunk().unwrap());
        let (initiator, hello) = Initiator::new(&key(), INITIATOR);
        let (responder, _) = Responder::new(&hello, &key(), &NONCE);
        assert!(responder.handle_message(bytes.first_chunk().unwrap(), RESPONDER).is_err());
        if let Ok((awaiting, _)) = initiator.handle_challenge(bytes.first_chunk().unwrap()) {
            assert!(is_headed && awaiting.handle_reply(bytes.last_chunk().unwrap()).is_err());
        }
        let mut made = handshake();
        for len in [0, 1, 2, 3, 18, 19, 80] {
            assert!(made.responder.1.open(&mut bytes[..len]).is_err());
            made = handshake();
        }
    }
}
