use super::*;
use proptest::prelude::*;

const DEVICES: [&str; 3] = ["a", "b", "c"];
const TENANTS: [&str; 3] = ["x", "y", "z"];

pub(in crate::controller) fn device(name: &str) -> DeviceKey {
    DeviceKey { name: name.into(), boot_id: BootId(1) }
}

pub(in crate::controller) fn room(groups: u64, slots: u64) -> Amount {
    Amount { groups, slots, memory_bytes: 1000, redo_memory_bytes: 500 }
}

fn need(slots: u64) -> Amount {
    Amount { groups: 1, slots, memory_bytes: 10 * slots, redo_memory_bytes: 3 * slots }
}

fn books(quotas: Quotas) -> Books {
    let mut books = Books::new(quotas);
    DEVICES.iter().for_each(|name| books.open(device(name), room(5, 64)));
    books
}

fn claim(group: u32, tenant: &str, devices: &[&str], slots: u64) -> Claim {
    let needs = devices.iter().map(|name| (device(name), need(slots))).collect();
    Claim { group: GroupId(group), tenant: tenant.into(), needs }
}

fn quota(groups: u64, slots: u64, memory_bytes: u64) -> Quota {
    Quota { groups: Some(groups), slots: Some(slots), memory_bytes: Some(memory_bytes) }
}

#[test]
fn what_is_short_is_named_with_tenant_limit_and_use() {
    let quotas = Quotas { other: Quota::default(), tenants: [("x".into(), quota(2, 40, 400))].into() };
    let mut books = books(quotas);
    books.claim(claim(1, "x", &["a"], 30)).expect("within everything");
    let short = |books: &Books, tenant, devices: &[&str], slots| {
        let short = books.check(tenant, &claim(9, tenant, devices, slots).needs).expect_err("too much");
        (short.is_quota(), short.to_string())
    };
    let slots = "tenant x holds 30 of the 40 slots that its quota allows on device a, and the least that helps is 12";
    assert_eq!(short(&books, "x", &["b", "a"], 12), (true, slots.into()));
    // 13 bytes a slot, of both kinds of memory: 31 slots have 403.
    let memory = "tenant x holds 0 of the 400 bytes of slot and redo memory that its quota allows on device b, and the least \
                  that helps is 403";
    assert_eq!(short(&books, "x", &["b"], 31), (true, memory.into()));
    let taken = "30 of the 64 slots of device a are taken, and the least that helps is 35";
    assert_eq!(short(&books, "y", &["c", "a"], 35), (false, taken.into()));
    books.claim(claim(2, "x", &["b"], 1)).expect("within everything");
    let groups = "tenant x holds 2 of the 2 groups of its quota, and 1 more would be too many";
    assert_eq!(short(&books, "x", &["c"], 1), (true, groups.into()));
    (3..7).for_each(|group| books.claim(claim(group, "y", &["a"], 1)).expect("within everything"));
    let full = "5 of the 5 groups of device a are taken, and the least that helps is 1";
    assert_eq!(short(&books, "y", &["a"], 1), (false, full.into()));
    assert!(books.unlimited().check("x", &claim(9, "x", &["c"], 1).needs).is_ok());
    assert!(books.emptied().check("x", &claim(9, "x", &["a"], 30).needs).is_ok());
    let gone = short(&books, "y", &["nowhere"], 1).1;
    assert!(gone.contains("device nowhere"), "{gone}");
}

#[test]
fn a_device_that_dials_anew_has_its_groups_still_and_one_that_restarts_has_none() {
    let mut books = books(Quotas::default());
    books.claim(claim(1, "x", &["a"], 60)).expect("free");
    books.close(&device("a"));
    books.open(device("a"), room(5, 64));
    assert!(books.check("y", &claim(2, "y", &["a"], 5).needs).is_err());
    let restarted = DeviceKey { boot_id: BootId(2), ..device("a") };
    books.close(&device("a"));
    books.open(restarted.clone(), room(5, 64));
    assert!(books.check("y", &[(restarted, need(64))]).is_ok());
}

#[test]
fn what_is_left_is_the_lesser_of_device_and_quota() {
    let quotas = Quotas { other: quota(3, 20, 100), tenants: BTreeMap::new() };
    let mut books = books(quotas);
    books.claim(claim(1, "x", &["a"], 5)).expect("free");
    let left = books.left("x", &device("a"));
    assert_eq!((left.groups, left.slots, left.memory_bytes, left.quota_memory_bytes), (2, 15, 950, 35));
    let left = books.left("y", &device("a"));
    assert_eq!((left.groups, left.slots, left.redo_memory_bytes, left.quota_memory_bytes), (3, 20, 485, 100));
    assert_eq!(books.left("y", &device("nowhere")).slots, 0);
}

#[test]
fn a_share_is_the_largest_part_of_anything() {
    let mut books = books(Quotas::default());
    assert_eq!(books.share("x"), 0);
    // One of 15 groups, 6 of 192 slots, 60 of 3000 bytes, 18 of 1500.
    books.claim(claim(1, "x", &["a"], 6)).expect("free");
    assert_eq!(books.share("x"), 66_666);
    books.claim(claim(2, "x", &["b"], 40)).expect("free");
    assert_eq!(books.share("x"), 46 * 1_000_000 / 192);
    assert_eq!(books.share("y"), 0);
    books.close(&device("b"));
    assert_eq!(books.share("x"), 100_000, "a device that is gone is no share of anything");
}

#[derive(Debug, Clone)]
enum Step {
    Claim { tenant: usize, devices: [bool; 3], slots: u64 },
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let claim = (0..3_usize, any::<[bool; 3]>(), 1..40_u64).prop_map(|(tenant, devices, slots)| Step::Claim {
        tenant,
        devices,
        slots,
    });
    prop::collection::vec(prop_oneof![3 => claim, 1 => any::<usize>().prop_map(Step::Free)], 1..80)
}

/// What the claims that stand hold of a device, added up apart from the books.
fn sum(standing: &[Claim], tenant: Option<&str>, name: &str) -> Amount {
    let of = standing.iter().filter(|claim| tenant.is_none_or(|tenant| claim.tenant == tenant));
    let needs = of.flat_map(|claim| &claim.needs).filter(|(key, _)| *key == device(name));
    needs.fold(Amount::default(), |sum, (_, need)| Amount {
        groups: sum.groups + need.groups,
        slots: sum.slots + need.slots,
        memory_bytes: sum.memory_bytes + need.memory_bytes,
        redo_memory_bytes: sum.redo_memory_bytes + need.redo_memory_bytes,
    })
}

/// Tell whether no device holds more than it has, and no tenant more than it may.
fn is_within(standing: &[Claim], quotas: &Quotas) -> bool {
    let room = room(5, 64);
    let fits = |held: Amount| {
        held.groups <= room.groups
            && held.slots <= room.slots
            && held.memory_bytes <= room.memory_bytes
            && held.redo_memory_bytes <= room.redo_memory_bytes
    };
    let allowed = |tenant: &&str| {
        let quota = quotas.of(tenant);
        let groups = standing.iter().filter(|claim| claim.tenant == **tenant).count() as u64;
        let on = DEVICES.map(|name| sum(standing, Some(tenant), name));
        groups <= quota.groups.unwrap_or(u64::MAX)
            && on.iter().all(|held| held.slots <= quota.slots.unwrap_or(u64::MAX))
            && on
                .iter()
                .all(|held| held.memory_bytes + held.redo_memory_bytes <= quota.memory_bytes.unwrap_or(u64::MAX))
    };
    DEVICES.iter().all(|name| fits(sum(standing, None, name))) && TENANTS.iter().all(allowed)
}

proptest! {
    /// Claims stand exactly where they leave everything within its limits, on all devices or on none; and when all are
    /// freed, everything is.
    #[test]
    fn books_balance(steps in steps(), x in (1..4_u64, 1..64_u64, 1..800_u64), y in 1..6_u64) {
        let quotas = Quotas {
            other: Quota::default(),
            tenants: [("x".into(), quota(x.0, x.1, x.2)), ("y".into(), Quota { groups: Some(y), ..Quota::default() })].into(),
        };
        let mut books = books(quotas.clone());
        let mut standing: Vec<Claim> = Vec::new();
        for (group, step) in (0..).zip(steps) {
            match step {
                Step::Claim { tenant, devices, slots } => {
                    let on: Vec<&str> = DEVICES.into_iter().zip(devices).filter(|(_, on)| *on).map(|(name, _)| name).collect();
                    let claim = claim(group, TENANTS[tenant], &on, slots);
                    standing.push(claim.clone());
                    let fits = is_within(&standing, &quotas);
                    prop_assert_eq!(books.claim(claim).is_ok(), fits);
                    if !fits {
                        standing.pop();
                    }
                }
                Step::Free(which) if !standing.is_empty() => {
                    let claim = standing.swap_remove(which % standing.len());
                    prop_assert!(books.free(claim.group));
                    prop_assert!(!books.free(claim.group), "once");
                }
                Step::Free(_) => {}
            }
            for name in DEVICES {
                prop_assert_eq!(books.taken(&device(name)), sum(&standing, None, name));
            }
        }
        for claim in standing {
            books.free(claim.group);
        }
        for name in DEVICES {
            prop_assert_eq!(books.taken(&device(name)), Amount::default());
        }
        prop_assert!(TENANTS.iter().all(|tenant| books.held(tenant).0 == Held::default()));
    }
}
