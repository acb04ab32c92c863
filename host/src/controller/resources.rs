//! The resource ledger: what the groups of all jobs hold on each device, and the quotas of tenants.
//!
//! A group is claimed on all nodes of its tree or on none, before any request is sent to a device, and freed once. So
//! resources count as taken while they are being reserved, and nothing waits for a device while the ledger is locked. A
//! group never grows: it holds its claim unchanged until it is freed (PROTOCOL 10).
//!
//! Invariants: on no device do claims exceed its capacity; no tenant has more communicators with a tree than its quota
//! of groups allows, nor more slots or memory on any device but its own host devices.

use crate::topo::LinkId;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use sumac_hal::ids::{BootId, GroupId};
use sumac_hal::planted;
use thiserror::Error;

/// A tenant's quota. `None` means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Quota {
    /// Groups: jobs with a tree, including sub-communicators. A communicator on several trees counts once.
    pub groups: Option<u64>,
    /// Slots per shard of a device.
    pub slots: Option<u64>,
    /// Memory per shard of a device, for slots and redo slots together, in bytes.
    pub memory_bytes: Option<u64>,
}

impl Quota {
    /// The limits on a device. Host devices have none: they are processes of the tenant, and serve nobody else.
    fn on(self, device: &DeviceKey) -> Self {
        if is_host_device(&device.name) { Self { groups: self.groups, ..Self::default() } } else { self }
    }
}

/// The quotas of all tenants.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Quotas {
    /// The quota of tenants without one of their own.
    pub other: Quota,
    /// Quotas by tenant.
    pub tenants: BTreeMap<String, Quota>,
}

impl Quotas {
    /// The quota of a tenant.
    pub fn of(&self, tenant: &str) -> Quota {
        self.tenants.get(tenant).copied().unwrap_or(self.other)
    }
}

/// An incarnation of a device. Within one incarnation it may reconnect and keeps its groups.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DeviceKey {
    pub(super) name: String,
    pub(super) boot_id: BootId,
}

/// What names of host devices contain, and names of others do not.
pub(super) const HOST_DEVICE_MARK: &str = "#host";

/// Whether a device of this name serves one job, whose rank runs it ([`crate::transport::local`]).
pub fn is_host_device(name: &str) -> bool {
    name.contains(HOST_DEVICE_MARK)
}

/// Resources of a device: its capacity, or what is held of it. All but `groups` are per shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Resources {
    pub(super) groups: u64,
    pub(super) slots: u64,
    pub(super) memory_bytes: u64,
    pub(super) redo_memory_bytes: u64,
}

impl Resources {
    fn add(self, other: Self) -> Self {
        Self {
            groups: self.groups.saturating_add(other.groups),
            slots: self.slots.saturating_add(other.slots),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            redo_memory_bytes: self.redo_memory_bytes.saturating_add(other.redo_memory_bytes),
        }
    }

    /// Memory for slots and redo slots together.
    const fn all_memory_bytes(self) -> u64 {
        self.memory_bytes.saturating_add(self.redo_memory_bytes)
    }
}

/// What a group needs on each device of its tree.
pub(super) type Needs = Vec<(DeviceKey, Resources)>;

/// A group, its tenant, and what it holds.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    pub(super) group: GroupId,
    pub(super) tenant: String,
    /// The job whose communicator uses the group. All trees of a communicator count once in the quota of groups.
    pub(super) communicator: String,
    pub(super) needs: Needs,
    /// The cables of its tree's edges, once for each edge.
    pub(super) cables: Arc<[LinkId]>,
}

/// What a group holds on a device, for tests of conservation.
#[cfg(feature = "snapshot")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRecord {
    /// The group.
    pub group: GroupId,
    /// The group's tenant.
    pub tenant: String,
    /// The job whose communicator uses the group.
    pub communicator: String,
    /// The device.
    pub device: String,
    /// The device's incarnation.
    pub boot_id: BootId,
    /// Slots held.
    pub slots: u64,
    /// Slot memory held, in bytes.
    pub memory_bytes: u64,
}

/// What is available to a tenant on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Available {
    /// The lesser of what the device and the quota leave; likewise for `slots`.
    pub(super) groups: u64,
    pub(super) slots: u64,
    /// What the device leaves; likewise for `redo_memory_bytes`.
    pub(super) memory_bytes: u64,
    pub(super) redo_memory_bytes: u64,
    /// What the quota leaves, for both kinds of memory together.
    pub(super) quota_memory_bytes: u64,
}

/// Why a claim is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum Shortage {
    /// The tenant's quota of groups is exhausted.
    #[error("quota exceeded: tenant {tenant} holds {used} of {limit} groups and needs {need} more")]
    Groups { tenant: String, used: u64, limit: u64, need: u64 },
    /// The tenant's quota on a device is exhausted.
    #[error(
        "quota exceeded: tenant {tenant} holds {used} of {limit} {what} on device {device} and needs at least {need} \
         more"
    )]
    Quota { tenant: String, device: String, what: &'static str, used: u64, limit: u64, need: u64 },
    /// The device is full.
    #[error("device {device} is full: {used} of {limit} {what} in use, at least {need} more needed")]
    Device { device: String, what: &'static str, used: u64, limit: u64, need: u64 },
}

impl Shortage {
    /// Whether the tenant's quota is exhausted, rather than a device.
    pub(super) const fn is_quota(&self) -> bool {
        matches!(self, Self::Groups { .. } | Self::Quota { .. })
    }
}

/// What a tenant holds; slots and memory as the maximum over devices that its quota limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Usage {
    pub(super) groups: u64,
    pub(super) slots: u64,
    pub(super) memory_bytes: u64,
}

/// Tracks claims on devices and enforces quotas.
#[derive(Debug, Clone, Default)]
pub(super) struct ResourceLedger {
    quotas: Quotas,
    /// The capacity of each connected device.
    capacities: BTreeMap<DeviceKey, Resources>,
    claims: BTreeMap<GroupId, Claim>,
    /// Incremented by every change that may let a queued job fit.
    version: u64,
    /// The version as of the last change that counts for jobs that a device refused. See [`ResourceLedger::roll_back`].
    settled_version: u64,
    #[cfg(feature = "planted")]
    pub(super) bug: Option<sumac_hal::planted::Bug>,
}

impl ResourceLedger {
    pub(super) fn new(quotas: Quotas) -> Self {
        Self { quotas, ..Self::default() }
    }

    /// Add a connected device. Claims from an earlier connection of the same incarnation still count.
    pub(super) fn add_device(&mut self, device: DeviceKey, capacity: Resources) {
        self.capacities.insert(device, capacity);
        self.bump_version();
    }

    /// Remove a disconnected device. Claims on it stay until their groups are freed.
    pub(super) fn remove_device(&mut self, device: &DeviceKey) {
        self.capacities.remove(device);
    }

    /// Record another change that may let a queued job fit.
    pub(super) const fn bump_version(&mut self) {
        self.version += 1;
        self.settle();
    }

    /// Let rollbacks count for jobs that a device refused. Called once per round of renewals: otherwise two such jobs
    /// would retry because of each other's rollbacks, as fast as the device refuses.
    pub(super) const fn settle(&mut self) {
        self.settled_version = self.version;
    }

    pub(super) const fn version(&self) -> u64 {
        self.version
    }

    pub(super) const fn settled_version(&self) -> u64 {
        self.settled_version
    }

    /// A copy without any claims.
    pub(super) fn without_claims(&self) -> Self {
        Self { claims: BTreeMap::new(), ..self.clone() }
    }

    /// A copy without quotas.
    pub(super) fn without_quotas(&self) -> Self {
        Self { quotas: Quotas::default(), ..self.clone() }
    }

    /// Claim resources for a group on all its devices, or on none.
    pub(super) fn claim(&mut self, claim: Claim) -> Result<(), Shortage> {
        debug_assert!(!self.claims.contains_key(&claim.group), "{} is claimed twice", claim.group);
        let checked = self.check_claim(&claim);
        if checked.is_ok() || planted!(self, QuotaAfterBooking) {
            self.claims.insert(claim.group, claim);
        }
        checked
    }

    /// Free a group. Returns false if it holds nothing.
    pub(super) fn free(&mut self, group: GroupId) -> bool {
        let was_held = self.roll_back(group);
        if was_held {
            self.settle();
        }
        was_held
    }

    /// Withdraw the claim of a reservation that failed. That may let jobs fit which the ledger had no room for; devices
    /// have no more free than before. Returns false if the group holds nothing.
    pub(super) fn roll_back(&mut self, group: GroupId) -> bool {
        let was_held = self.claims.remove(&group).is_some();
        self.version += u64::from(was_held);
        was_held
    }

    /// The ledger to plan a tree of a communicator with: without the quota of groups if the communicator is counted in
    /// it already.
    pub(super) fn for_communicator(&self, tenant: &str, communicator: &str) -> Self {
        if self.counts(tenant, communicator) { self.without_group_quota(tenant) } else { self.clone() }
    }

    /// A copy in which a tenant has no quota of groups, to plan further trees of its communicators.
    pub(super) fn without_group_quota(&self, tenant: &str) -> Self {
        let mut ledger = self.clone();
        let quota = Quota { groups: None, ..self.quotas.of(tenant) };
        ledger.quotas.tenants.insert(tenant.to_owned(), quota);
        ledger
    }

    /// Check whether a claim would succeed. Returns the first shortage.
    pub(super) fn check_claim(&self, claim: &Claim) -> Result<(), Shortage> {
        match self.counts(&claim.tenant, &claim.communicator) {
            true => self.check_devices(&claim.tenant, &claim.needs),
            false => self.check(&claim.tenant, &claim.needs),
        }
    }

    /// Check whether a claim of a communicator without any tree would succeed. Returns the first shortage.
    pub(super) fn check(&self, tenant: &str, needs: &[(DeviceKey, Resources)]) -> Result<(), Shortage> {
        let (used, limit) = (self.groups_of(tenant), self.quotas.of(tenant).groups.unwrap_or(u64::MAX));
        if used >= limit {
            return Err(Shortage::Groups { tenant: tenant.to_owned(), used, limit, need: 1 });
        }
        self.check_devices(tenant, needs)
    }

    fn check_devices(&self, tenant: &str, needs: &[(DeviceKey, Resources)]) -> Result<(), Shortage> {
        let quota = self.quotas.of(tenant);
        needs.iter().try_for_each(|(device, need)| self.check_on(tenant, &quota.on(device), device, *need))
    }

    fn check_on(&self, tenant: &str, quota: &Quota, key: &DeviceKey, need: Resources) -> Result<(), Shortage> {
        let capacity = self.capacities.get(key).copied().unwrap_or_default();
        let (used, own) = (self.used(key, None), self.used(key, Some(tenant)));
        let device = || key.name.clone();
        let on_device = |what, used: u64, limit, need| {
            let fits = used.checked_add(need).is_some_and(|all| all <= limit);
            if fits { Ok(()) } else { Err(Shortage::Device { device: device(), what, used, limit, need }) }
        };
        let in_quota = |what, used: u64, limit: Option<u64>, need| {
            let Some(limit) = limit else { return Ok(()) };
            let fits = used.checked_add(need).is_some_and(|all| all <= limit);
            let tenant = tenant.to_owned();
            if fits { Ok(()) } else { Err(Shortage::Quota { tenant, device: device(), what, used, limit, need }) }
        };
        on_device("groups", used.groups, capacity.groups, need.groups)?;
        in_quota("slots", own.slots, quota.slots, need.slots)?;
        on_device("slots", used.slots, capacity.slots, need.slots)?;
        let (own, all) = (own.all_memory_bytes(), need.all_memory_bytes());
        in_quota("bytes of slot and redo memory", own, quota.memory_bytes, all)?;
        on_device("bytes of slot memory", used.memory_bytes, capacity.memory_bytes, need.memory_bytes)?;
        let (used, limit, need) = (used.redo_memory_bytes, capacity.redo_memory_bytes, need.redo_memory_bytes);
        on_device("bytes of redo memory", used, limit, need)
    }

    /// What a tenant could claim on a device.
    pub(super) fn available(&self, tenant: &str, device: &DeviceKey) -> Available {
        self.left(tenant, device, (self.used(device, None), self.used(device, Some(tenant))), self.groups_of(tenant))
    }

    /// What a tenant could claim on each device. Counts all claims once, for many devices.
    pub(super) fn available_everywhere(&self, tenant: &str) -> impl Fn(&DeviceKey) -> Available {
        let mut used: BTreeMap<&DeviceKey, (Resources, Resources)> = BTreeMap::new();
        for claim in self.claims.values() {
            for (device, need) in &claim.needs {
                let (all, own) = used.entry(device).or_default();
                *all = all.add(*need);
                if claim.tenant == tenant {
                    *own = own.add(*need);
                }
            }
        }
        let groups = self.groups_of(tenant);
        move |device| self.left(tenant, device, used.get(device).copied().unwrap_or_default(), groups)
    }

    /// What a tenant could claim of a device of which `used` is claimed, by all and by the tenant.
    fn left(
        &self,
        tenant: &str,
        device: &DeviceKey,
        (used, own): (Resources, Resources),
        tenant_groups: u64,
    ) -> Available {
        let capacity = self.capacities.get(device).copied().unwrap_or_default();
        let quota =
            if planted!(self, QuotaAfterBooking) { Quota::default() } else { self.quotas.of(tenant).on(device) };
        let allowed = |limit: Option<u64>, own| limit.map_or(u64::MAX, |limit| limit.saturating_sub(own));
        let groups = allowed(quota.groups, tenant_groups);
        Available {
            groups: capacity.groups.saturating_sub(used.groups).min(groups),
            slots: capacity.slots.saturating_sub(used.slots).min(allowed(quota.slots, own.slots)),
            memory_bytes: capacity.memory_bytes.saturating_sub(used.memory_bytes),
            redo_memory_bytes: capacity.redo_memory_bytes.saturating_sub(used.redo_memory_bytes),
            quota_memory_bytes: allowed(quota.memory_bytes, own.all_memory_bytes()),
        }
    }

    /// How many edges of all trees each cable carries, by its id; `None` if there are none.
    pub(super) fn load_of_cables(&self) -> Option<Arc<[u32]>> {
        self.load_by(|_| true)
    }

    /// As [`ResourceLedger::load_of_cables`], without the trees of a communicator.
    pub(super) fn load_by_others(&self, tenant: &str, communicator: &str) -> Option<Arc<[u32]>> {
        self.load_by(|claim| claim.tenant != tenant || claim.communicator != communicator)
    }

    fn load_by(&self, counts: impl Fn(&Claim) -> bool) -> Option<Arc<[u32]>> {
        let cables = || self.claims.values().filter(|claim| counts(claim)).flat_map(|claim| claim.cables.iter());
        let mut load = vec![0; cables().map(|link| link.0 as usize + 1).max()?];
        cables().for_each(|link| load[link.0 as usize] += 1);
        Some(load.into())
    }

    /// What is claimed on a device, by one tenant or by all.
    fn used(&self, device: &DeviceKey, tenant: Option<&str>) -> Resources {
        let claims = self.claims.values().filter(|claim| tenant.is_none_or(|tenant| claim.tenant == tenant));
        let needs = claims.flat_map(|claim| &claim.needs).filter(|(key, _)| key == device);
        needs.fold(Resources::default(), |sum, (_, need)| sum.add(*need))
    }

    /// How many communicators of a tenant have a tree.
    fn groups_of(&self, tenant: &str) -> u64 {
        let claims = self.claims.values().filter(|claim| claim.tenant == tenant);
        claims.map(|claim| &claim.communicator).collect::<BTreeSet<_>>().len() as u64
    }

    /// Whether a communicator of a tenant has a tree.
    fn counts(&self, tenant: &str, communicator: &str) -> bool {
        self.claims.values().any(|claim| claim.tenant == tenant && claim.communicator == communicator)
    }

    /// The tenants that hold something or have a quota, with repetitions.
    pub(super) fn tenants(&self) -> impl Iterator<Item = String> {
        let named = self.quotas.tenants.keys();
        named.chain(self.claims.values().map(|claim| &claim.tenant)).cloned()
    }

    /// A tenant's usage and quota.
    pub(super) fn usage(&self, tenant: &str) -> (Usage, Quota) {
        let on = |device: &DeviceKey| self.used(device, Some(tenant));
        let claims = self.claims.values().filter(|claim| claim.tenant == tenant);
        let devices = claims.flat_map(|claim| claim.needs.iter().map(|(device, _)| device));
        let devices = devices.filter(|device| !is_host_device(&device.name)).map(on);
        let held = devices.fold(Usage { groups: self.groups_of(tenant), ..Usage::default() }, |held, used| Usage {
            slots: held.slots.max(used.slots),
            memory_bytes: held.memory_bytes.max(used.all_memory_bytes()),
            ..held
        });
        (held, self.quotas.of(tenant))
    }

    /// A tenant's dominant share (Ghodsi et al., NSDI 2011) in millionths: the largest fraction that it holds of any
    /// resource of all connected devices together.
    pub(super) fn dominant_share(&self, tenant: &str) -> u64 {
        let claims = self.claims.values().filter(|claim| claim.tenant == tenant);
        self.dominant_share_of(claims.flat_map(|claim| &claim.needs))
    }

    /// The dominant share that `needs` would be.
    pub(super) fn dominant_share_of<'n>(&self, needs: impl Iterator<Item = &'n (DeviceKey, Resources)>) -> u64 {
        let here = needs.filter(|(device, _)| self.capacities.contains_key(device) && !is_host_device(&device.name));
        let held = here.fold(Resources::default(), |sum, (_, need)| sum.add(*need));
        // Their ranks determine what host devices announce.
        let common = self.capacities.iter().filter(|(device, _)| !is_host_device(&device.name));
        let all = common.map(|(_, capacity)| capacity).fold(Resources::default(), |sum, capacity| sum.add(*capacity));
        let part = |held: u64, all: u64| (u128::from(held) * 1_000_000 / u128::from(all.max(1))) as u64;
        let parts = [
            part(held.groups, all.groups),
            part(held.slots, all.slots),
            part(held.memory_bytes, all.memory_bytes),
            part(held.redo_memory_bytes, all.redo_memory_bytes),
        ];
        parts.into_iter().max().unwrap_or(0)
    }

    /// The devices that a group holds something on.
    pub(super) fn devices_of(&self, group: GroupId) -> impl Iterator<Item = &DeviceKey> {
        self.claims.get(&group).into_iter().flat_map(|claim| &claim.needs).map(|(device, _)| device)
    }

    /// All claims.
    #[cfg(feature = "snapshot")]
    pub(super) fn claims(&self) -> impl Iterator<Item = &Claim> {
        self.claims.values()
    }

    /// Adopt the claims of an earlier incarnation: a planted bug.
    #[cfg(feature = "planted")]
    pub(super) fn inherit_claims(&mut self, earlier: Self) {
        self.claims = earlier.claims;
    }

    /// What all tenants hold on a device, for tests of conservation.
    #[cfg(test)]
    pub(super) fn total_claimed(&self, device: &DeviceKey) -> Resources {
        self.used(device, None)
    }
}

#[cfg(test)]
mod tests;
