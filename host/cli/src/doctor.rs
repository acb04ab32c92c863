//! `sumac doctor`: what this machine can do, and why not.
//!
//! Everything is tried or read, nothing is changed. A line is `ok`, `warn` (works, but worse than it could) or `missing`
//! (not there), with what to do about it; the exit status is 1 if something that `perf` needs does not work. Below the
//! findings stands which DMA engines there are, and which hardware has which.

mod shm;
mod verbs;

use crate::exit::Failure;
use crate::machine;
use clap::Args;
use std::fs;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::thread;
use sumac_hal::port::Port;
use sumac_hal::udp::{UdpConfig, UdpPort};

/// `sumac doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {}

/// How well something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Ok,
    /// Works, but worse than it could.
    Warn,
    /// Not there; nothing that is needed.
    Missing,
    /// Needed, and does not work.
    Broken,
}

/// One finding.
#[derive(Debug)]
struct Finding {
    health: Health,
    what: &'static str,
    found: String,
    /// What to do about it.
    advice: String,
}

/// Look at everything and print it.
pub(crate) fn run(_args: &DoctorArgs) -> Result<(), Failure> {
    let mut findings = vec![cores(), round_trip(), simd()];
    findings.extend(udp());
    findings.extend([tcp(), huge_pages()]);
    findings.extend(shm::findings());
    findings.extend([cuda(), gpu_direct()]);
    findings.extend(verbs::findings());
    let mut out = io::stdout().lock();
    for finding in &findings {
        let health = match finding.health {
            Health::Ok => "ok",
            Health::Warn => "warn",
            Health::Missing => "missing",
            Health::Broken => "BROKEN",
        };
        writeln!(out, "{health:<8} {:<15} {}", finding.what, finding.found)?;
        if !finding.advice.is_empty() {
            writeln!(out, "{:<24} {}", "", finding.advice)?;
        }
    }
    for line in shm::profiles() {
        writeln!(out, "{line}")?;
    }
    out.flush()?;
    if findings.iter().any(|finding| finding.health == Health::Broken) { Err(Failure::Reported) } else { Ok(()) }
}

fn cores() -> Finding {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    // `perf` unasked: 4 ranks and 2 devices.
    let (health, advice) = match cores {
        7.. => (Health::Ok, String::new()),
        _ => (
            Health::Warn,
            "`perf` starts 4 ranks and 2 devices: they take turns here, and times hold the scheduler's share".into(),
        ),
    };
    Finding { health, what: "cores", found: cores.to_string(), advice }
}

fn round_trip() -> Finding {
    let (health, found, advice) = match machine::cache_line_round_trip_ns() {
        Some(ns) if ns < 200.0 => (Health::Ok, format!("{ns:.0} ns there and back"), ""),
        Some(ns) => {
            (Health::Warn, format!("{ns:.0} ns there and back"), "small messages are slow: the cores share no cache")
        }
        None => (Health::Missing, "not measured".into(), "there is one core, or another process keeps it busy"),
    };
    Finding { health, what: "cache line", found, advice: advice.into() }
}

fn simd() -> Finding {
    let (found, widest) = widest_vectors();
    let advice = if widest { "" } else { "reductions run on narrower vectors; results are the same to the bit" };
    let health = if widest { Health::Ok } else { Health::Warn };
    Finding { health, what: "vectors", found: found.into(), advice: advice.into() }
}

/// Return what the kernels run on, by the same features that they ask for, and whether it is the widest that they have.
fn widest_vectors() -> (&'static str, bool) {
    #[cfg(target_arch = "x86_64")]
    {
        let has_avx512 = std::is_x86_feature_detected!("avx512f")
            && std::is_x86_feature_detected!("avx512bw")
            && std::is_x86_feature_detected!("avx512dq")
            && std::is_x86_feature_detected!("avx512vl");
        if has_avx512 {
            ("AVX-512 (F, BW, DQ, VL)", true)
        } else if std::is_x86_feature_detected!("avx2") {
            ("AVX2", false)
        } else {
            ("SSE2", false)
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        ("NEON", true)
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        ("what the build's target has", false)
    }
}

fn udp() -> Vec<Finding> {
    let config = UdpConfig::default();
    let port = match UdpPort::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), &config) {
        Ok(port) => port,
        Err(error) => {
            let advice = "devices and ranks talk over UDP on loopback; is `lo` up?".into();
            return vec![Finding { health: Health::Broken, what: "UDP port", found: error.to_string(), advice }];
        }
    };
    let offload = |what, has: bool| Finding {
        health: if has { Health::Ok } else { Health::Warn },
        what,
        found: if has { "yes" } else { "no" }.into(),
        advice: if has { "" } else { "a system call carries fewer packets; Linux 5.0 and later have it" }.into(),
    };
    let (gso, gro) = port.offloads();
    let capabilities = port.capabilities();
    vec![
        Finding {
            health: Health::Ok,
            what: "UDP port",
            found: format!("packets of up to {} bytes on loopback", capabilities.max_packet_len_bytes),
            advice: String::new(),
        },
        offload("UDP GSO (send)", gso),
        offload("UDP GRO (recv)", gro),
        receive_buffer(capabilities.receive_buffer_bytes, config.receive_buffer_bytes),
    ]
}

fn receive_buffer(got_bytes: usize, wanted_bytes: usize) -> Finding {
    let limit = fs::read_to_string("/proc/sys/net/core/rmem_max").unwrap_or_else(|_| "unknown".into());
    let enough = got_bytes >= wanted_bytes;
    // The kernel counts its own overhead against the limit: 5/2 of the payload, see the port's documentation.
    let advice = format!("windows are smaller for it; `sysctl -w net.core.rmem_max={}` as root", wanted_bytes / 2 * 5);
    Finding {
        health: if enough { Health::Ok } else { Health::Warn },
        what: "receive buffer",
        found: format!("{got_bytes} of {wanted_bytes} bytes (net.core.rmem_max {})", limit.trim()),
        advice: if enough { String::new() } else { advice },
    }
}

fn tcp() -> Finding {
    match TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) {
        Ok(_) => Finding {
            health: Health::Ok,
            what: "TCP port",
            found: "loopback can be listened on".into(),
            advice: String::new(),
        },
        Err(error) => Finding {
            health: Health::Broken,
            what: "TCP port",
            found: error.to_string(),
            advice: "the controller and the schedules listen on loopback; is `lo` up?".into(),
        },
    }
}

fn huge_pages() -> Finding {
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let chosen = chosen(&setting);
    let (health, advice) = match chosen {
        Some("always") => (Health::Ok, ""),
        Some(_) => {
            (Health::Warn, "large buffers cost more TLB misses; write `always` to .../transparent_hugepage/enabled")
        }
        None => (Health::Missing, "the kernel has none; large buffers cost more TLB misses"),
    };
    Finding { health, what: "huge pages", found: chosen.unwrap_or("none").into(), advice: advice.into() }
}

/// Return the choice among a setting's values, as the kernel marks it: `always [madvise] never`.
fn chosen(setting: &str) -> Option<&str> {
    setting.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(chosen, _)| chosen)
}

fn cuda() -> Finding {
    let (health, found, advice) = match sumac::gpu::probe() {
        Ok(found) => (Health::Ok, found, String::new()),
        Err(error) => (Health::Missing, error.to_string(), "ranks reduce in CPU memory instead".into()),
    };
    Finding { health, what: "CUDA memory", found, advice }
}

fn gpu_direct() -> Finding {
    let staged = "GPU buffers go through pinned memory instead".to_owned();
    let (health, found, advice) = match sumac::gpu::direct::probe_direct() {
        Ok(Ok(device)) => {
            let found = format!("{device} registers the GPU's memory (dma-buf)");
            (Health::Ok, found, "communicators do not use it yet: GPU buffers go through pinned memory".into())
        }
        Ok(Err(why)) => (Health::Missing, why.to_string(), staged),
        Err(error) => (Health::Missing, error.to_string(), staged),
    };
    Finding { health, what: "GPUDirect RDMA", found, advice }
}
