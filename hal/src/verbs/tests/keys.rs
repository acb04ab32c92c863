//! Keys of memory that peers access.

use super::*;
use crate::remote::{Access, RankLink};
use crate::shm::{Pages, Region};
use crate::verbs::RankEnd;

fn domain() -> VerbsDomain {
    machine(|machine| _ = machine.add("mlx5_0", ADDR));
    VerbsDomain::open(&VerbsConfig::default()).expect("a domain")
}

#[test]
fn revoked_key_opens_no_later_region() {
    let domain = domain();
    let mut region = domain.expose(4096).expect("memory");
    let mut revoked = vec![region.remote().rkey];
    for _ in 0..10 {
        region.revoke().expect("another key");
        let later = domain.expose(4096).expect("memory");
        assert!(![region.remote().rkey, later.remote().rkey].iter().any(|key| revoked.contains(key)), "{revoked:?}");
        revoked.extend([region.remote().rkey, later.remote().rkey]);
        drop(later);
        assert!(revoked[1..].contains(&region.remote().rkey));
    }
}

#[test]
fn withdrawn_key_opens_no_later_memory_of_a_rank() {
    let mut rank = RankEnd::new(domain()).expect("an end");
    let expose = |rank: &mut RankEnd| {
        let memory = Region::create(4096, Pages::Normal).expect("memory");
        rank.expose(memory, Access::Read).expect("exposed").rkey
    };
    let withdrawn = expose(&mut rank);
    rank.withdraw(withdrawn);
    assert_ne!(expose(&mut rank), withdrawn);
}
