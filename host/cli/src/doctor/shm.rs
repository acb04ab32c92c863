//! Whether ranks here can contribute by reference: what `sumac_hal::shm` is made of, tried out.
//!
//! None of it is needed, as packets do the same: what is not there is `missing`, never `BROKEN`.

use super::{Finding, Health};
use std::fmt::Display;
use std::fs;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};
use sumac_hal::dma::Profile;
use sumac_hal::ring::{Doorbell, Patience};
use sumac_hal::shm::{Connection, Listener, Pages, Region, Waiter, machine};

/// What to do where contributions by reference are not possible.
const BY_PACKETS: &str = "ranks and devices on this machine exchange packets instead (`--attach udp`)";

/// Try everything.
pub(super) fn findings() -> Vec<Finding> {
    vec![
        finding(
            "shared memory",
            machine().ok_or("the system tells no name of this machine").map(|name| format!("machine {name}")),
        ),
        finding("memfd", Region::create(4096, Pages::Normal).map(|_| "memory that can't be resized".into())),
        finding("pidfd", pidfd().map(|()| "the end of a peer can be waited for".into())),
        finding("futex", futex().map(|()| "threads wait on several words at once".into())),
        huge_pages(),
    ]
}

fn finding<E: Display>(what: &'static str, found: Result<String, E>) -> Finding {
    let (health, found, advice) = match found {
        Ok(found) => (Health::Ok, found, ""),
        Err(error) => (Health::Missing, error.to_string(), BY_PACKETS),
    };
    Finding { health, what, found, advice: advice.into() }
}

/// Connect to this process itself, which takes hold of it as a peer.
fn pidfd() -> Result<(), String> {
    let name = format!("sumac-doctor-{}", std::process::id());
    let listener = Listener::bind(&name).map_err(|error| error.to_string())?;
    let connection = Connection::open(&name, Duration::from_secs(1)).map_err(|error| error.to_string())?;
    let ended = connection.peer().wait(Duration::ZERO).map_err(|error| error.to_string())?;
    drop(listener);
    if ended { Err("a process that is alive counts as ended".into()) } else { Ok(()) }
}

/// Sleep on two words that nobody changes, for a moment.
fn futex() -> Result<(), String> {
    let words = [const { AtomicU32::new(Doorbell::<&AtomicU32>::AWAKE) }; 2];
    let bells = [Doorbell::new(&words[0]), Doorbell::new(&words[1])];
    // Alone on one core, it sleeps at once.
    let waiter = Waiter::new(Patience::new(2, 1));
    let slept = waiter.wait(&bells, Some(Instant::now() + Duration::from_millis(1)), || false);
    slept.map(drop).map_err(|error| error.to_string())
}

/// What registered memory is made of, besides pages of 4 KiB.
fn huge_pages() -> Finding {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let setting = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let chosen = super::chosen(&setting).unwrap_or("none");
    let pool = read("/proc/sys/vm/nr_hugepages").trim().parse().unwrap_or(0_u64);
    let good = matches!(chosen, "always" | "within_size" | "advise" | "force") || pool > 0;
    let advice = "registered buffers are in small pages; write `advise` to /sys/kernel/mm/transparent_hugepage/\
                  shmem_enabled as root";
    Finding {
        health: if good { Health::Ok } else { Health::Warn },
        what: "shared pages",
        found: format!("huge pages for shared memory: {chosen}; pool of {pool}"),
        advice: if good { String::new() } else { advice.into() },
    }
}

/// Return the table of DMA profiles, line by line.
pub(super) fn profiles() -> Vec<String> {
    let head =
        "DMA engines  what they do, and which hardware has it; a device emulates each (`sumac device --dma-profile`)";
    let line = |profile: Profile| {
        let (does, hardware) = describe(profile);
        format!("  {:<14} {does}\n  {:<14} {hardware}", profile.name(), "")
    };
    std::iter::once(head.to_owned()).chain(Profile::ALL.map(line)).collect()
}

/// Say what a profile's engines do, and which they are: as [`Profile`] has it.
fn describe(profile: Profile) -> (&'static str, &'static str) {
    match profile {
        Profile::CopyOnly => (
            "moves bytes; the runtime's kernels do the arithmetic",
            "NVIDIA BlueField (DOCA DMA, mlx5 MMO), Intel DSA, AMD SDMA, copy engines of GPUs",
        ),
        Profile::InlineReduce => (
            "also combines in the element type: sum, min and max of i8, i16, i32, f16, bf16 and f32",
            "Huawei Ascend's SDMA",
        ),
        Profile::Full => (
            "also widens, accumulates in the accumulator type and rounds once, every type and operator",
            "no engine that can be bought; the emulated one, unasked",
        ),
        _ => ("not known to this version", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_shared_memory_is_made_of_is_there() {
        // The tests of everything by reference need it.
        for found in findings().iter().filter(|found| found.what != "shared pages") {
            assert_eq!(found.health, Health::Ok, "{found:?}");
        }
    }

    #[test]
    fn what_is_missing_names_the_way_without_it() {
        let found = finding("memfd", Err::<String, _>("not permitted"));
        assert_eq!((found.health, found.found.as_str()), (Health::Missing, "not permitted"));
        assert!(found.advice.contains("--attach udp"), "{found:?}");
    }

    #[test]
    fn every_profile_is_in_the_table() {
        let text = profiles().join("\n");
        for name in Profile::ALL.map(Profile::name).iter().chain(&["BlueField", "Ascend", "Intel DSA", "emulated"]) {
            assert!(text.contains(name), "{text}");
        }
        assert!(!text.contains("not known"), "{text}");
    }
}
