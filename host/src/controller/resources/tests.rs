use super::*;
use proptest::prelude::*;

const DEVICES: [&str; 3] = ["a", "b", "c"];
const TENANTS: [&str; 3] = ["x", "y", "z"];

pub(in crate::controller) fn device(name: &str) -> DeviceKey {
    DeviceKey { name: name.into(), boot_id: BootId(1) }
}

pub(in crate::controller) fn capacity(groups: u64, slots: u64) -> Resources {
    Resources { groups, slots, memory_bytes: 1000, redo_memory_bytes: 500 }
}

fn need(slots: u64) -> Resources {
    Resources { groups: 1, slots, memory_bytes: 10 * slots, redo_memory_bytes: 3 * slots }
}

fn ledger(quotas: Quotas) -> ResourceLedger {
    let mut ledger = ResourceLedger::new(quotas);
    DEVICES.iter().for_each(|name| ledger.add_device(device(name), capacity(5, 64)));
    ledger
}

fn claim(group: u32, tenant: &str, devices: &[&str], slots: u64) -> Claim {
    let needs = devices.iter().map(|name| (device(name), need(slots))).collect();
    // Each in a communicator of its own.
    let communicator = format!("job{group}");
    Claim { group: GroupId(group), tenant: tenant.into(), communicator, needs, cables: Arc::default() }
}

fn quota(groups: u64, slots: u64, memory_bytes: u64) -> Quota {
    Quota { groups: Some(groups), slots: Some(slots), memory_bytes: Some(memory_bytes) }
}

#[test]
fn shortage_names_tenant_limit_and_usage() {
    let quotas = Quotas { other: Quota::default(), tenants: [("x".into(), quota(2, 40, 400))].into() };
    let mut ledger = ledger(quotas);
    ledger.claim(claim(1, "x", &["a"], 30)).expect("within everything");
    let short = |ledger: &ResourceLedger, tenant, devices: &[&str], slots| {
        let short = ledger.check(tenant, &claim(9, tenant, devices, slots).needs).expect_err("too much");
        (short.is_quota(), short.to_string())
    };
    let slots = "quota exceeded: tenant x holds 30 of 40 slots on device a and needs at least 12 more";
    assert_eq!(short(&ledger, "x", &["b", "a"], 12), (true, slots.into()));
    // 13 bytes a slot, of both kinds of memory: 31 slots have 403.
    let memory =
        "quota exceeded: tenant x holds 0 of 400 bytes of slot and redo memory on device b and needs at least 403 more";
    assert_eq!(short(&ledger, "x", &["b"], 31), (true, memory.into()));
    let total_claimed = "device a is full: 30 of 64 slots in use, at least 35 more needed";
    assert_eq!(short(&ledger, "y", &["c", "a"], 35), (false, total_claimed.into()));
    ledger.claim(claim(2, "x", &["b"], 1)).expect("within everything");
    let groups = "quota exceeded: tenant x holds 2 of 2 groups and needs 1 more";
    assert_eq!(short(&ledger, "x", &["c"], 1), (true, groups.into()));
    (3..7).for_each(|group| ledger.claim(claim(group, "y", &["a"], 1)).expect("within everything"));
    let full = "device a is full: 5 of 5 groups in use, at least 1 more needed";
    assert_eq!(short(&ledger, "y", &["a"], 1), (false, full.into()));
    assert!(ledger.without_quotas().check("x", &claim(9, "x", &["c"], 1).needs).is_ok());
    assert!(ledger.without_claims().check("x", &claim(9, "x", &["a"], 30).needs).is_ok());
    let gone = short(&ledger, "y", &["nowhere"], 1).1;
    assert!(gone.contains("device nowhere"), "{gone}");
}

/// The trees of one communicator count once, whichever of them are left; other tenants may use the same name.
#[test]
fn communicator_counts_once_until_its_last_tree_is_freed() {
    let quotas = Quotas { other: Quota { groups: Some(1), ..Quota::default() }, tenants: BTreeMap::new() };
    let mut ledger = ledger(quotas);
    let of = |communicator: &str, tenant, group, device| {
        let claim = claim(group, tenant, &[device], 1);
        Claim { communicator: communicator.into(), ..claim }
    };
    ledger.claim(of("job", "x", 1, "a")).expect("the first");
    ledger.claim(of("job", "x", 2, "b")).expect("a further tree");
    ledger.claim(of("job", "y", 3, "c")).expect("of another tenant");
    ledger.free(GroupId(1));
    let other = of("other", "x", 4, "a");
    let refused = ledger.claim(other.clone()).map_err(|short| short.to_string());
    assert_eq!(refused, Err("quota exceeded: tenant x holds 1 of 1 groups and needs 1 more".into()));
    assert_eq!(ledger.for_communicator("x", "other").available("x", &device("a")).groups, 0);
    assert_eq!(ledger.for_communicator("x", "job").available("x", &device("a")).groups, 5);
    ledger.claim(of("job", "x", 5, "a")).expect("the first tree again");
    assert!([2, 5].iter().all(|group| ledger.free(GroupId(*group))));
    ledger.claim(other).expect("nothing is held");
}

#[test]
fn claims_survive_a_reconnect_but_not_a_restart() {
    let mut ledger = ledger(Quotas::default());
    ledger.claim(claim(1, "x", &["a"], 60)).expect("free");
    ledger.remove_device(&device("a"));
    ledger.add_device(device("a"), capacity(5, 64));
    assert!(ledger.check("y", &claim(2, "y", &["a"], 5).needs).is_err());
    let restarted = DeviceKey { boot_id: BootId(2), ..device("a") };
    ledger.remove_device(&device("a"));
    ledger.add_device(restarted.clone(), capacity(5, 64));
    assert!(ledger.check("y", &[(restarted, need(64))]).is_ok());
}

#[test]
fn available_is_the_lesser_of_device_and_quota() {
    let quotas = Quotas { other: quota(3, 20, 100), tenants: BTreeMap::new() };
    let mut ledger = ledger(quotas);
    ledger.claim(claim(1, "x", &["a"], 5)).expect("free");
    let left = ledger.available("x", &device("a"));
    assert_eq!((left.groups, left.slots, left.memory_bytes, left.quota_memory_bytes), (2, 15, 950, 35));
    let left = ledger.available("y", &device("a"));
    assert_eq!((left.groups, left.slots, left.redo_memory_bytes, left.quota_memory_bytes), (3, 20, 485, 100));
    assert_eq!(ledger.available("y", &device("nowhere")).slots, 0);
    for tenant in ["x", "y"] {
        let everywhere = ledger.available_everywhere(tenant);
        for name in ["a", "b", "nowhere"] {
            assert_eq!(everywhere(&device(name)), ledger.available(tenant, &device(name)), "{tenant} {name}");
        }
    }
}

#[test]
fn load_of_cables_counts_the_edges_of_all_groups() {
    let mut ledger = ledger(Quotas::default());
    assert_eq!(ledger.load_of_cables(), None);
    for (group, cables) in [(1, [0, 2, 2]), (2, [2, 3, 0])] {
        let cables = cables.map(LinkId);
        ledger.claim(Claim { cables: Arc::from(cables), ..claim(group, "x", &["a"], 1) }).expect("free");
    }
    assert_eq!(ledger.load_of_cables().as_deref(), Some(&[2, 0, 3, 1][..]));
    ledger.free(GroupId(1));
    assert_eq!(ledger.load_of_cables().as_deref(), Some(&[1, 0, 1, 1][..]));
}

#[test]
fn host_device_is_limited_by_its_capacity_and_by_the_quota_of_groups() {
    let quotas = Quotas { other: quota(2, 20, 100), tenants: BTreeMap::new() };
    let (mut ledger, host) = (ledger(quotas), "job#host0");
    ledger.add_device(device(host), capacity(5, 64));
    let refusal =
        |ledger: &ResourceLedger, claim: &Claim| ledger.check("x", &claim.needs).map_err(|why| why.to_string());
    let at_leaf = refusal(&ledger, &claim(1, "x", &["a", host], 60)).expect_err("beyond the quota");
    assert_eq!(at_leaf, "quota exceeded: tenant x holds 0 of 20 slots on device a and needs at least 60 more");
    let left = ledger.available("x", &device(host));
    assert_eq!((left.groups, left.slots, left.memory_bytes, left.quota_memory_bytes), (2, 64, 1000, u64::MAX));
    ledger.claim(claim(1, "x", &[host], 60)).expect("within its capacity");
    let full = refusal(&ledger, &claim(2, "x", &[host], 5)).expect_err("beyond the capacity");
    assert_eq!(full, "device job#host0 is full: 60 of 64 slots in use, at least 5 more needed");
    assert_eq!(ledger.usage("x").0, Usage { groups: 1, ..Usage::default() });
    ledger.claim(claim(2, "x", &["a", host], 4)).expect("within the quota");
    let groups = refusal(&ledger, &claim(3, "x", &[host], 0)).expect_err("beyond the quota of groups");
    assert_eq!(groups, "quota exceeded: tenant x holds 2 of 2 groups and needs 1 more");
}

#[test]
fn dominant_share_is_the_largest_fraction_of_any_resource() {
    let mut ledger = ledger(Quotas::default());
    assert_eq!(ledger.dominant_share("x"), 0);
    // One of 15 groups, 6 of 192 slots, 60 of 3000 bytes, 18 of 1500.
    ledger.claim(claim(1, "x", &["a"], 6)).expect("free");
    assert_eq!(ledger.dominant_share("x"), 66_666);
    ledger.claim(claim(2, "x", &["b"], 40)).expect("free");
    assert_eq!(ledger.dominant_share("x"), 46 * 1_000_000 / 192);
    assert_eq!(ledger.dominant_share("y"), 0);
    ledger.remove_device(&device("b"));
    assert_eq!(ledger.dominant_share("x"), 100_000, "a device that is gone is no share of anything");
}

#[derive(Debug, Clone)]
enum DraftStep {
    Claim { tenant: usize, communicator: u8, devices: [bool; 3], slots: u64 },
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<DraftStep>> {
    let claim = (0..3_usize, 0..6_u8, any::<[bool; 3]>(), 1..40_u64);
    let claim = claim.prop_map(|(tenant, communicator, devices, slots)| DraftStep::Claim {
        tenant,
        communicator,
        devices,
        slots,
    });
    prop::collection::vec(prop_oneof![3 => claim, 1 => any::<usize>().prop_map(DraftStep::Free)], 1..80)
}

/// What the active claims hold on a device, added up independently of the ledger.
fn sum(active: &[Claim], tenant: Option<&str>, name: &str) -> Resources {
    let of = active.iter().filter(|claim| tenant.is_none_or(|tenant| claim.tenant == tenant));
    let needs = of.flat_map(|claim| &claim.needs).filter(|(key, _)| *key == device(name));
    needs.fold(Resources::default(), |sum, (_, need)| Resources {
        groups: sum.groups + need.groups,
        slots: sum.slots + need.slots,
        memory_bytes: sum.memory_bytes + need.memory_bytes,
        redo_memory_bytes: sum.redo_memory_bytes + need.redo_memory_bytes,
    })
}

/// Whether all claims are within devices' capacities and tenants' quotas.
fn is_within(active: &[Claim], quotas: &Quotas) -> bool {
    let capacity = capacity(5, 64);
    let fits = |held: Resources| {
        held.groups <= capacity.groups
            && held.slots <= capacity.slots
            && held.memory_bytes <= capacity.memory_bytes
            && held.redo_memory_bytes <= capacity.redo_memory_bytes
    };
    let allowed = |tenant: &&str| {
        let quota = quotas.of(tenant);
        let mut names: Vec<&str> =
            active.iter().filter(|claim| claim.tenant == **tenant).map(|claim| &claim.communicator[..]).collect();
        names.sort_unstable();
        names.dedup();
        let groups = names.len() as u64;
        let on = DEVICES.map(|name| sum(active, Some(tenant), name));
        groups <= quota.groups.unwrap_or(u64::MAX)
            && on.iter().all(|held| held.slots <= quota.slots.unwrap_or(u64::MAX))
            && on
                .iter()
                .all(|held| held.memory_bytes + held.redo_memory_bytes <= quota.memory_bytes.unwrap_or(u64::MAX))
    };
    DEVICES.iter().all(|name| fits(sum(active, None, name))) && TENANTS.iter().all(allowed)
}

proptest! {
    /// A claim succeeds exactly if all limits still hold with it, on all devices or on none. Once all claims are freed,
    /// nothing is held.
    #[test]
    fn claims_balance_and_succeed_exactly_within_limits(steps in steps(), x in (1..4_u64, 1..64_u64, 1..800_u64), y in 1..6_u64) {
        let quotas = Quotas {
            other: Quota::default(),
            tenants: [("x".into(), quota(x.0, x.1, x.2)), ("y".into(), Quota { groups: Some(y), ..Quota::default() })].into(),
        };
        let mut ledger = ledger(quotas.clone());
        let mut active: Vec<Claim> = Vec::new();
        for (group, step) in (0..).zip(steps) {
            match step {
                DraftStep::Claim { tenant, communicator, devices, slots } => {
                    let on: Vec<&str> = DEVICES.into_iter().zip(devices).filter(|(_, on)| *on).map(|(name, _)| name).collect();
                    let communicator = format!("job{communicator}");
                    let claim = Claim { communicator, ..claim(group, TENANTS[tenant], &on, slots) };
                    // A further tree takes no group of its tenant's quota, whether or not that is exhausted.
                    active.push(claim.clone());
                    let fits = is_within(&active, &quotas);
                    prop_assert_eq!(ledger.claim(claim).is_ok(), fits);
                    if !fits {
                        active.pop();
                    }
                }
                DraftStep::Free(which) if !active.is_empty() => {
                    let claim = active.swap_remove(which % active.len());
                    prop_assert!(ledger.free(claim.group));
                    prop_assert!(!ledger.free(claim.group), "once");
                }
                DraftStep::Free(_) => {}
            }
            for name in DEVICES {
                prop_assert_eq!(ledger.total_claimed(&device(name)), sum(&active, None, name));
            }
        }
        for claim in active {
            ledger.free(claim.group);
        }
        for name in DEVICES {
            prop_assert_eq!(ledger.total_claimed(&device(name)), Resources::default());
        }
        prop_assert!(TENANTS.iter().all(|tenant| ledger.usage(tenant).0 == Usage::default()));
    }
}
