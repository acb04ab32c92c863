//! The books: what the groups of all jobs hold of each device, and what each tenant may hold.
//!
//! A group is claimed on all nodes of its tree or on none, before any device is asked, and freed once; so what is being
//! asked for is as good as taken, and nobody waits for a device with the books open. Nothing is borrowed later
//! (PROTOCOL 10): a group holds what it was claimed with until it is freed.
//!
//! Invariants: on no device do claims add up to more than it has; no tenant holds more groups than its quota, nor more
//! slots or memory of any device.

use std::collections::BTreeMap;
use sumac_hal::ids::{BootId, GroupId};
use sumac_hal::planted;
use thiserror::Error;

/// What a tenant may hold; `None`: as much as there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Quota {
    /// Groups at a time: jobs that have a tree, sub-communicators too.
    pub groups: Option<u64>,
    /// Slots of a device, in each of its shards.
    pub slots: Option<u64>,
    /// Memory of a device in each of its shards, for slots and redo slots together, in bytes.
    pub memory_bytes: Option<u64>,
}

/// The quotas of all tenants.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Quotas {
    /// Of tenants that are not named.
    pub other: Quota,
    /// Of those that are.
    pub tenants: BTreeMap<String, Quota>,
}

impl Quotas {
    /// Return a tenant's quota.
    pub fn of(&self, tenant: &str) -> Quota {
        self.tenants.get(tenant).copied().unwrap_or(self.other)
    }
}

/// One life of a device; it may dial several times in it, and keeps its groups.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DeviceKey {
    pub(super) name: String,
    pub(super) boot_id: BootId,
}

/// What there is, or is held, of a device: in each shard, but for groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Amount {
    pub(super) groups: u64,
    pub(super) slots: u64,
    pub(super) memory_bytes: u64,
    pub(super) redo_memory_bytes: u64,
}

impl Amount {
    fn add(self, other: Self) -> Self {
        Self {
            groups: self.groups.saturating_add(other.groups),
            slots: self.slots.saturating_add(other.slots),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            redo_memory_bytes: self.redo_memory_bytes.saturating_add(other.redo_memory_bytes),
        }
    }

    /// Memory for slots and for redo slots.
    const fn all_memory_bytes(self) -> u64 {
        self.memory_bytes.saturating_add(self.redo_memory_bytes)
    }
}

/// What a group holds of each device of its tree.
pub(super) type Needs = Vec<(DeviceKey, Amount)>;

/// A group, whose it is, and what it holds.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    pub(super) group: GroupId,
    pub(super) tenant: String,
    pub(super) needs: Needs,
}

/// What is left of a device for a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Left {
    /// Of the device, or of the quota where that leaves less.
    pub(super) groups: u64,
    pub(super) slots: u64,
    /// Of the device alone.
    pub(super) memory_bytes: u64,
    pub(super) redo_memory_bytes: u64,
    /// Of the quota, for both kinds of memory.
    pub(super) quota_memory_bytes: u64,
}

/// Why a claim can't be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum Short {
    /// The tenant has its groups.
    #[error("tenant {tenant} holds {used} of the {limit} groups of its quota, and {need} more would be too many")]
    Groups { tenant: String, used: u64, limit: u64, need: u64 },
    /// The tenant has its part of a device.
    #[error(
        "tenant {tenant} holds {used} of the {limit} {what} that its quota allows on device {device}, and the least that \
         helps is {need}"
    )]
    Quota { tenant: String, device: String, what: &'static str, used: u64, limit: u64, need: u64 },
    /// The device is full.
    #[error("{used} of the {limit} {what} of device {device} are taken, and the least that helps is {need}")]
    Device { device: String, what: &'static str, used: u64, limit: u64, need: u64 },
}

impl Short {
    /// Tell whether it is the tenant's quota that is short, and not a device.
    pub(super) const fn is_quota(&self) -> bool {
        matches!(self, Self::Groups { .. } | Self::Quota { .. })
    }
}

/// What a tenant holds, for reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Held {
    pub(super) groups: u64,
    /// The most on one device.
    pub(super) slots: u64,
    pub(super) memory_bytes: u64,
}

/// The books.
#[derive(Debug, Clone, Default)]
pub(super) struct Books {
    quotas: Quotas,
    /// What each connected device has.
    rooms: BTreeMap<DeviceKey, Amount>,
    claims: BTreeMap<GroupId, Claim>,
    /// Counts what may let somebody in who did not fit before.
    version: u64,
    #[cfg(feature = "planted")]
    pub(super) bug: Option<sumac_hal::planted::Bug>,
}

impl Books {
    pub(super) fn new(quotas: Quotas) -> Self {
        Self { quotas, ..Self::default() }
    }

    /// A device is there. Claims of an earlier connection of the same life still count.
    pub(super) fn open(&mut self, device: DeviceKey, room: Amount) {
        self.rooms.insert(device, room);
        self.version += 1;
    }

    /// A device is gone; who holds something of it frees it in his time.
    pub(super) fn close(&mut self, device: &DeviceKey) {
        self.rooms.remove(device);
    }

    /// Something else has changed that may let somebody in.
    pub(super) const fn touch(&mut self) {
        self.version += 1;
    }

    pub(super) const fn version(&self) -> u64 {
        self.version
    }

    /// Return the same devices and quotas with nothing held.
    pub(super) fn emptied(&self) -> Self {
        Self { claims: BTreeMap::new(), ..self.clone() }
    }

    /// Return the same without quotas.
    pub(super) fn unlimited(&self) -> Self {
        Self { quotas: Quotas::default(), ..self.clone() }
    }

    /// Claim a group on all its devices, or on none.
    pub(super) fn claim(&mut self, claim: Claim) -> Result<(), Short> {
        debug_assert!(!self.claims.contains_key(&claim.group), "{} is claimed twice", claim.group);
        let checked = self.check(&claim.tenant, &claim.needs);
        if checked.is_ok() || planted!(self, QuotaAfterBooking) {
            self.claims.insert(claim.group, claim);
        }
        checked
    }

    /// Free a group; false if it is free.
    pub(super) fn free(&mut self, group: GroupId) -> bool {
        let was_held = self.claims.remove(&group).is_some();
        self.version += u64::from(was_held);
        was_held
    }

    /// Say whether that could be claimed, or what is short first.
    pub(super) fn check(&self, tenant: &str, needs: &[(DeviceKey, Amount)]) -> Result<(), Short> {
        let quota = self.quotas.of(tenant);
        let (used, limit) = (self.groups_of(tenant), quota.groups.unwrap_or(u64::MAX));
        if used >= limit {
            return Err(Short::Groups { tenant: tenant.to_owned(), used, limit, need: 1 });
        }
        needs.iter().try_for_each(|(device, need)| self.check_on(tenant, &quota, device, *need))
    }

    fn check_on(&self, tenant: &str, quota: &Quota, key: &DeviceKey, need: Amount) -> Result<(), Short> {
        let room = self.rooms.get(key).copied().unwrap_or_default();
        let (used, own) = (self.used(key, None), self.used(key, Some(tenant)));
        let device = || key.name.clone();
        let on_device = |what, used: u64, limit, need| {
            let fits = used.checked_add(need).is_some_and(|all| all <= limit);
            if fits { Ok(()) } else { Err(Short::Device { device: device(), what, used, limit, need }) }
        };
        let in_quota = |what, used: u64, limit: Option<u64>, need| {
            let Some(limit) = limit else { return Ok(()) };
            let fits = used.checked_add(need).is_some_and(|all| all <= limit);
            let tenant = tenant.to_owned();
            if fits { Ok(()) } else { Err(Short::Quota { tenant, device: device(), what, used, limit, need }) }
        };
        on_device("groups", used.groups, room.groups, need.groups)?;
        in_quota("slots", own.slots, quota.slots, need.slots)?;
        on_device("slots", used.slots, room.slots, need.slots)?;
        let (own, all) = (own.all_memory_bytes(), need.all_memory_bytes());
        in_quota("bytes of slot and redo memory", own, quota.memory_bytes, all)?;
        on_device("bytes of slot memory", used.memory_bytes, room.memory_bytes, need.memory_bytes)?;
        let (used, limit, need) = (used.redo_memory_bytes, room.redo_memory_bytes, need.redo_memory_bytes);
        on_device("bytes of redo memory", used, limit, need)
    }

    /// Return what is left of a device for a tenant.
    pub(super) fn left(&self, tenant: &str, device: &DeviceKey) -> Left {
        let room = self.rooms.get(device).copied().unwrap_or_default();
        let (used, own) = (self.used(device, None), self.used(device, Some(tenant)));
        let quota = if planted!(self, QuotaAfterBooking) { Quota::default() } else { self.quotas.of(tenant) };
        let allowed = |limit: Option<u64>, own| limit.map_or(u64::MAX, |limit| limit.saturating_sub(own));
        let groups = allowed(quota.groups, self.groups_of(tenant));
        Left {
            groups: room.groups.saturating_sub(used.groups).min(groups),
            slots: room.slots.saturating_sub(used.slots).min(allowed(quota.slots, own.slots)),
            memory_bytes: room.memory_bytes.saturating_sub(used.memory_bytes),
            redo_memory_bytes: room.redo_memory_bytes.saturating_sub(used.redo_memory_bytes),
            quota_memory_bytes: allowed(quota.memory_bytes, own.all_memory_bytes()),
        }
    }

    /// What is held of a device, by a tenant or by all.
    fn used(&self, device: &DeviceKey, tenant: Option<&str>) -> Amount {
        let claims = self.claims.values().filter(|claim| tenant.is_none_or(|tenant| claim.tenant == tenant));
        let needs = claims.flat_map(|claim| &claim.needs).filter(|(key, _)| key == device);
        needs.fold(Amount::default(), |sum, (_, need)| sum.add(*need))
    }

    fn groups_of(&self, tenant: &str) -> u64 {
        self.claims.values().filter(|claim| claim.tenant == tenant).count() as u64
    }

    /// Return the tenants that hold something or are named in a quota.
    pub(super) fn tenants(&self) -> impl Iterator<Item = String> {
        let named = self.quotas.tenants.keys();
        named.chain(self.claims.values().map(|claim| &claim.tenant)).cloned()
    }

    /// Return what a tenant holds, and may.
    pub(super) fn held(&self, tenant: &str) -> (Held, Quota) {
        let on = |device: &DeviceKey| self.used(device, Some(tenant));
        let claims = self.claims.values().filter(|claim| claim.tenant == tenant);
        let devices = claims.flat_map(|claim| claim.needs.iter().map(|(device, _)| on(device)));
        let held = devices.fold(Held { groups: self.groups_of(tenant), ..Held::default() }, |held, used| Held {
            slots: held.slots.max(used.slots),
            memory_bytes: held.memory_bytes.max(used.all_memory_bytes()),
            ..held
        });
        (held, self.quotas.of(tenant))
    }

    /// Return a tenant's share: the largest part that it holds of anything that the connected devices have together, in
    /// millionths (the dominant share of Ghodsi et al., NSDI 2011).
    pub(super) fn share(&self, tenant: &str) -> u64 {
        let claims = self.claims.values().filter(|claim| claim.tenant == tenant);
        self.share_of(claims.flat_map(|claim| &claim.needs))
    }

    /// Return which share that would be.
    pub(super) fn share_of<'n>(&self, needs: impl Iterator<Item = &'n (DeviceKey, Amount)>) -> u64 {
        let here = needs.filter(|(device, _)| self.rooms.contains_key(device));
        let held = here.fold(Amount::default(), |sum, (_, need)| sum.add(*need));
        let all = self.rooms.values().fold(Amount::default(), |sum, room| sum.add(*room));
        let part = |held: u64, all: u64| (u128::from(held) * 1_000_000 / u128::from(all.max(1))) as u64;
        let parts = [
            part(held.groups, all.groups),
            part(held.slots, all.slots),
            part(held.memory_bytes, all.memory_bytes),
            part(held.redo_memory_bytes, all.redo_memory_bytes),
        ];
        parts.into_iter().max().unwrap_or(0)
    }

    /// Return all that is claimed.
    #[cfg(feature = "snapshot")]
    pub(super) fn claims(&self) -> impl Iterator<Item = &Claim> {
        self.claims.values()
    }

    /// Take the claims of an earlier life for its own.
    #[cfg(all(feature = "planted", feature = "snapshot"))]
    pub(super) fn believe(&mut self, earlier: Self) {
        self.claims = earlier.claims;
    }

    /// Return what is held of a device by all, for tests of conservation.
    #[cfg(test)]
    pub(super) fn taken(&self, device: &DeviceKey) -> Amount {
        self.used(device, None)
    }
}

#[cfg(test)]
mod tests;
