//! Checks for zero-copy over shared memory: the system calls on which `sumac_hal::shm` is built.
//!
//! None of them is needed, because packets do the same. A failed check is `missing`, never `BROKEN`.

use super::{Finding, Health};
use serde::Serialize;
use std::fmt::Display;
use std::fs;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};
use sumac_hal::dma::Profile;
use sumac_hal::ring::{Doorbell, SpinPolicy};
use sumac_hal::shm::{Connection, Listener, Pages, Region, Waiter, machine};

/// What ranks do without shared memory.
const USE_PACKETS: &str = "ranks and devices on this machine exchange packets instead (`--transport udp`)";

/// Run all checks.
pub(super) fn findings() -> Vec<Finding> {
    vec![
        finding(
            "shared memory",
            machine().ok_or("/proc does not identify this machine").map(|name| format!("machine {name}")),
        ),
        finding("memfd", Region::create(4096, Pages::Normal).map(|_| "sealed shared memory".into())),
        finding("pidfd", pidfd().map(|()| "can wait for the end of a peer".into())),
        finding("futex", futex().map(|()| "can wait on several words at once".into())),
        huge_pages(),
    ]
}

fn finding<E: Display>(what: &'static str, found: Result<String, E>) -> Finding {
    let (health, found, advice) = match found {
        Ok(found) => (Health::Ok, found, ""),
        Err(error) => (Health::Missing, error.to_string(), USE_PACKETS),
    };
    Finding { health, what, found, advice: advice.into() }
}

/// Connect to this process itself, which opens a pidfd of the peer.
fn pidfd() -> Result<(), String> {
    let name = format!("sumac-doctor-{}", std::process::id());
    let listener = Listener::bind(&name).map_err(|error| error.to_string())?;
    let connection = Connection::open(&name, Duration::from_secs(1)).map_err(|error| error.to_string())?;
    let ended = connection.peer().wait(Duration::ZERO).map_err(|error| error.to_string())?;
    drop(listener);
    if ended { Err("a live process is reported as ended".into()) } else { Ok(()) }
}

/// Sleep briefly on two words that do not change.
fn futex() -> Result<(), String> {
    let words = [const { AtomicU32::new(Doorbell::<&AtomicU32>::AWAKE) }; 2];
    let bells = [Doorbell::new(&words[0]), Doorbell::new(&words[1])];
    // Configured for one core, it sleeps without spinning.
    let waiter = Waiter::new(SpinPolicy::new(2, 1));
    let slept = waiter.wait(&bells, Some(Instant::now() + Duration::from_millis(1)), || false);
    slept.map(drop).map_err(|error| error.to_string())
}

/// Check for huge pages, of which registered memory can be made.
fn huge_pages() -> Finding {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let setting = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let chosen = super::chosen(&setting).unwrap_or("none");
    let pool = read("/proc/sys/vm/nr_hugepages").trim().parse().unwrap_or(0_u64);
    let good = matches!(chosen, "always" | "within_size" | "advise" | "force") || pool > 0;
    let advice = "registered buffers use small pages; write `advise` to /sys/kernel/mm/transparent_hugepage/\
                  shmem_enabled as root";
    Finding {
        health: if good { Health::Ok } else { Health::Warn },
        what: "shared pages",
        found: format!("huge pages for shared memory: {chosen}; pool of {pool}"),
        advice: if good { String::new() } else { advice.into() },
    }
}

/// A DMA engine profile.
#[derive(Debug, Serialize)]
pub(super) struct ProfileDescription {
    pub(super) name: &'static str,
    pub(super) capabilities: &'static str,
    pub(super) hardware: &'static str,
}

/// Return all DMA engine profiles.
pub(super) fn profiles() -> Vec<ProfileDescription> {
    let described = |profile: Profile| {
        let (capabilities, hardware) = describe(profile);
        ProfileDescription { name: profile.name(), capabilities, hardware }
    };
    Profile::ALL.map(described).into()
}

/// Return the capabilities and the hardware of a profile, as documented at [`Profile`].
fn describe(profile: Profile) -> (&'static str, &'static str) {
    match profile {
        Profile::CopyOnly => (
            "copies bytes; the runtime's kernels do the arithmetic",
            "NVIDIA BlueField (DOCA DMA, mlx5 MMO), Intel DSA, AMD SDMA, copy engines of GPUs",
        ),
        Profile::InlineReduce => (
            "also reduces in the element type: sum, min and max of i8, i16, i32, f16, bf16 and f32",
            "Huawei Ascend's SDMA",
        ),
        Profile::Full => (
            "also widens, accumulates in the accumulator type and rounds once, for every type and operator",
            "no engine on the market; the default of the emulated one",
        ),
        _ => ("not known to this version", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_available_here() {
        // All zero-copy tests need it.
        for found in findings().iter().filter(|found| found.what != "shared pages") {
            assert_eq!(found.health, Health::Ok, "{found:?}");
        }
    }

    #[test]
    fn missing_capability_advises_the_udp_transport() {
        let found = finding("memfd", Err::<String, _>("not permitted"));
        assert_eq!((found.health, found.found.as_str()), (Health::Missing, "not permitted"));
        assert!(found.advice.contains("--transport udp"), "{found:?}");
    }

    #[test]
    fn table_lists_every_profile_and_its_hardware() {
        let text = format!("{:?}", profiles());
        for name in Profile::ALL.map(Profile::name).iter().chain(&["BlueField", "Ascend", "Intel DSA", "emulated"]) {
            assert!(text.contains(name), "{text}");
        }
        assert!(!text.contains("not known"), "{text}");
    }
}
