//! Boards: what is posted is read by all, cells are reused only when all are done, and memory that is no board.

use super::*;
use std::thread;

const DESCRIPTION: [u8; 64] = [7; 64];

/// Return the views of all members.
fn boards(members: u32) -> Vec<Board> {
    let first = Board::create(members).expect("memory");
    let others: Vec<_> =
        (1..members).map(|own| Board::open(duplicate(first.file()), members, own).expect("a board")).collect();
    [first].into_iter().chain(others).collect()
}

fn bytes_of(member: u32, round: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u64 * 3 + round * 7 + u64::from(member)) as u8).collect()
}

#[test]
fn members_read_what_each_has_posted_in_every_round() {
    let lens = [0, 1, 8, 40, 127, 128, 129, Board::CAPACITY_BYTES];
    for members in [2, 3, 5] {
        let threads: Vec<_> = boards(members)
            .into_iter()
            .enumerate()
            .map(|(own, mut board)| {
                thread::spawn(move || {
                    for round in 1..2000_u64 {
                        let len = lens[round as usize % lens.len()];
                        assert!(board.post(round * 11, &DESCRIPTION, &bytes_of(own as u32, round, len)));
                        for member in (0..members).filter(|member| *member != own as u32) {
                            while board.tag_of(member).is_none() {
                                thread::yield_now();
                            }
                            assert_eq!(board.tag_of(member), Some(round * 11));
                            let mut found = vec![0; len];
                            board.read(member, 0, &mut found);
                            assert!(found == bytes_of(member, round, len), "member {member} in round {round}");
                            let start = len / 3;
                            board.read(member, start, &mut found[start..]);
                            assert!(
                                found == bytes_of(member, round, len),
                                "member {member} in round {round} from {start}"
                            );
                        }
                        board.finish_round(true);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    }
}

#[test]
fn member_that_is_ahead_posts_again_only_when_all_are_done() {
    let mut boards = boards(3);
    for round in 1..=4 {
        assert!(boards[0].post(round, &DESCRIPTION, &bytes_of(0, round, 9)));
        boards[0].finish_round(false);
    }
    assert!(!boards[0].post(5, &DESCRIPTION, &[]), "round 1 is unread");
    boards[1].finish_round(false);
    assert!(!boards[0].can_post(), "member 2 is not done");
    assert_eq!(boards[2].tag_of(0), Some(1));
    let mut found = [0; 9];
    boards[2].read(0, 0, &mut found);
    assert_eq!(found[..], bytes_of(0, 1, 9));
    boards[2].finish_round(false);
    assert!(boards[0].post(5, &DESCRIPTION, &[]));
    assert_eq!(boards[2].tag_of(0), Some(2), "the others' cells are as they were");
    assert_eq!(boards[2].description_of(0, 0), Some(DESCRIPTION));
    assert_eq!(boards[2].description_of(0, 1), None, "written again");
    assert_eq!(boards[2].description_of(1, 0), None, "nothing posted");
    assert_eq!(boards[2].description_of(0, 2), None, "no such round");
    assert_eq!(boards[2].tag_of(1), None);
}

#[test]
fn memory_that_is_no_board_for_these_members_is_refused() {
    for members in [0, 1, 65, u32::MAX] {
        assert_eq!(Board::create(members).expect_err("too few or many"), BoardError::Members { members });
    }
    let board = Board::create(3).expect("memory");
    let refused = Board::open(duplicate(board.file()), 4, 1).expect_err("a board for three");
    assert!(matches!(refused, BoardError::Length { members: 4, .. }), "{refused}");
    let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&file, 1 << 16).expect("it is new");
    assert_eq!(Board::open(file, 3, 1).expect_err("not sealed"), BoardError::Memory(MemoryError::Unsealed));
}
