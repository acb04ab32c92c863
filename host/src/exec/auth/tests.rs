use super::*;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::TcpStream;

fn secret(byte: u8) -> JobSecret {
    JobSecret::new([byte; 32])
}

/// Play the dialling rank of a handshake, as far as it goes. Returns the bytes sent, and what the peer made of them; it
/// is unproven, too, if the peer ends the connection.
pub(in crate::exec) fn shake_hands(
    stream: &mut TcpStream,
    secret: &JobSecret,
    (purpose, from, to): (Purpose, Rank, Rank),
) -> (Vec<u8>, Result<(), AnswerError>) {
    let dialler = Dialler::new(purpose, from, to).expect("random bytes");
    let mut sent = dialler.hello().to_vec();
    stream.write_all(&sent).expect("small");
    let mut answer = [0; ANSWER_BYTES];
    if stream.read_exact(&mut answer).is_err() {
        return (sent, Err(AnswerError::Unproven));
    }
    // Whoever does not know the secret goes on all the same.
    let proof = match dialler.prove(secret, &answer) {
        Err(AnswerError::Unproven) => proof(secret, dialler.hello(), &answer).finalize().into_bytes().into(),
        Err(refused) => return (sent, Err(refused)),
        Ok(proof) => proof,
    };
    stream.write_all(&proof).expect("small");
    sent.extend(proof);
    let mut verdict = [0; VERDICT_BYTES];
    let read = stream.read_exact(&mut verdict).map_err(|_| AnswerError::Unproven);
    (sent, read.and_then(|()| check_head(&verdict)))
}

fn hello() -> Hello {
    let nonce = std::array::from_fn(|index| 0x40 + index as u8);
    Hello { version: 4, purpose: Purpose::OutOfBand, from: Rank(0x0102), to: Rank(0x0304), number: 0x0506, nonce }
}

/// The MACs are those of Python's `hmac` over the documented bytes.
#[test]
fn golden_bytes_of_version_4() {
    assert_eq!(VERSION, 4, "new bytes need a new version, and new golden bytes");
    let bytes = *b"SMCH\x04\0\x05\0\x02\x01\0\0\x04\x03\0\0\x06\x05\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
                   @ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_";
    assert_eq!(hello().emit(), bytes);
    assert_eq!(Hello::parse(&bytes), Some(hello()));
    assert_eq!(verdict(Some(Refusal::Rank)), *b"SMCA\x04\0\x03\0");
    let answer = *b"SMCA\x04\0\0\0abcdefghijklmnopqrstuvwx";
    let mac = answer_mac(&secret(7), Rank(0x0304), &bytes, &answer).finalize().into_bytes();
    assert_eq!(hex(&mac), "a7cffe6f4ff900a1443bcc501f50695caf06917f2bbfc3bdb0373192c9c4a428");
    let answer: [u8; ANSWER_BYTES] = [&answer[..], &mac].concat().try_into().expect("64 bytes");
    let proof = Dialler { hello: bytes }.prove(&secret(7), &answer).expect("it is proven");
    assert_eq!(hex(&proof), "33872210771a6a9d5ef4340fbeb0218bba1c53efc54b01079563e38d4e873fb8");
    let sealed = one_shot(&secret(7), &hello(), b"frame");
    assert_eq!(sealed[..HELLO_BYTES + 5], [&bytes[..], b"frame"].concat());
    assert_eq!(hex(&sealed[HELLO_BYTES + 5..]), "3d924c1de4d29fb6cba4d13fe9af7bbc29c91b3a2bcb333074499847f92d6ea1");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn dialler() -> Dialler {
    Dialler { hello: hello().emit() }
}

fn answer(secret: &JobSecret, dialler: &Dialler, refusal: Option<Refusal>) -> Answer {
    Answer::new(secret, hello().to, dialler.hello(), refusal).expect("random bytes")
}

#[test]
fn only_ranks_with_the_same_secret_accept_each_other() {
    let right = answer(&secret(1), &dialler(), None);
    let proof = dialler().prove(&secret(1), right.bytes()).expect("the same secret");
    assert!(right.is_proven(&secret(1), &proof) && !right.is_proven(&secret(2), &proof));
    assert_eq!(dialler().prove(&secret(2), right.bytes()), Err(AnswerError::Unproven));
    // Whoever does not know the secret cannot refuse, either.
    let refusal = answer(&secret(2), &dialler(), Some(Refusal::Version));
    assert_eq!(dialler().prove(&secret(1), refusal.bytes()), Err(AnswerError::Unproven));
    let refusal = answer(&secret(1), &dialler(), Some(Refusal::Version));
    assert_eq!(dialler().prove(&secret(1), refusal.bytes()), Err(AnswerError::Refused(Refusal::Version)));
}

#[test]
fn recorded_answers_and_proofs_are_worth_nothing() {
    let again = || Dialler::new(Purpose::OutOfBand, hello().from, hello().to).expect("random bytes");
    let (first, second) = (again(), again());
    let recorded = answer(&secret(1), &first, None);
    let proof = first.prove(&secret(1), recorded.bytes()).expect("its own");
    assert_eq!(second.prove(&secret(1), recorded.bytes()), Err(AnswerError::Unproven));
    // The same hello again: the answer has another nonce.
    assert!(!answer(&secret(1), &first, None).is_proven(&secret(1), &proof));
    // Nor is an answer's MAC a proof.
    assert!(!recorded.is_proven(&secret(1), &array_at(recorded.bytes(), ANSWER_BYTES - PROOF_BYTES)));
}

#[test]
fn answer_of_another_rank_is_not_proven() {
    for refusal in [None, Some(Refusal::Rank)] {
        let other = Answer::new(&secret(1), Rank(9), dialler().hello(), refusal).expect("random bytes");
        assert_eq!(dialler().prove(&secret(1), other.bytes()), Err(AnswerError::Unproven));
    }
}

#[test]
fn every_changed_bit_is_noticed() {
    let right = answer(&secret(1), &dialler(), None);
    let proof = dialler().prove(&secret(1), right.bytes()).expect("the same secret");
    let sealed = one_shot(&secret(1), &hello(), b"frame");
    let flip = |bytes: &mut [u8], bit: usize| bytes[bit / 8] ^= 1 << (bit % 8);
    for bit in 0..8 * HELLO_BYTES {
        let mut changed = right.clone();
        flip(&mut changed.hello, bit);
        assert!(!changed.is_proven(&secret(1), &proof), "bit {bit} of the hello");
        let changed = Dialler { hello: changed.hello };
        assert_eq!(changed.prove(&secret(1), right.bytes()), Err(AnswerError::Unproven), "bit {bit} of the hello");
        let mut changed = *right.bytes();
        flip(&mut changed, bit);
        assert_eq!(dialler().prove(&secret(1), &changed), Err(AnswerError::Unproven), "bit {bit} of the answer");
    }
    for bit in 0..8 * PROOF_BYTES {
        let mut changed = proof;
        flip(&mut changed, bit);
        assert!(!right.is_proven(&secret(1), &changed), "bit {bit} of the proof");
    }
    let is_proven = |sealed: &[u8]| {
        let (signed, mac) = sealed.split_at(sealed.len() - PROOF_BYTES);
        is_one_shot_proven(&secret(1), signed, &array_at(mac, 0))
    };
    assert!(is_proven(&sealed));
    for bit in 0..8 * sealed.len() {
        let mut changed = sealed.clone();
        flip(&mut changed, bit);
        assert!(!is_proven(&changed), "bit {bit} of the one-shot");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_never_accepted(bytes in any::<[u8; HELLO_BYTES]>(), is_headed in any::<bool>()) {
        let mut bytes = bytes;
        if is_headed {
            bytes[..4].copy_from_slice(b"SMCH");
        }
        if let Some(hello) = Hello::parse(&bytes) {
            let reserved_is_zero = bytes[24..32] == [0; 8];
            prop_assert!(is_headed && (hello.emit() == bytes) == reserved_is_zero);
        }
        if is_headed {
            bytes[..VERDICT_BYTES].copy_from_slice(&verdict(None));
        }
        prop_assert_eq!(dialler().prove(&secret(1), &bytes), Err(AnswerError::Unproven));
        prop_assert!(!answer(&secret(1), &dialler(), None).is_proven(&secret(1), &array_at(&bytes, 0)));
    }
}
