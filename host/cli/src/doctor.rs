//! `sumac doctor`: check this machine's capabilities.
//!
//! Capabilities are tried or read; nothing is changed. Each line is `ok`, `warn` (works below its potential), `missing`
//! (not available) or `BROKEN` (needed, and does not work), with a remedy. The exit status is 1 if something is broken.
//! A table of the DMA engine profiles follows.

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

/// The state of a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    Ok,
    /// Works below its potential.
    Warn,
    /// Not available, and not needed.
    Missing,
    /// Needed, and does not work.
    Broken,
}

/// The result of a check.
#[derive(Debug)]
struct Finding {
    health: Health,
    what: &'static str,
    found: String,
    /// The remedy or the consequence.
    advice: String,
}

/// Check everything and print the findings.
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
    // The defaults of `perf`: 4 ranks, 2 devices and a controller.
    let (health, advice) = match cores {
        7.. => (Health::Ok, String::new()),
        _ => (
            Health::Warn,
            "`perf` starts 4 ranks and 2 devices by default; they share cores here, and times include scheduling"
                .into(),
        ),
    };
    Finding { health, what: "cores", found: cores.to_string(), advice }
}

fn round_trip() -> Finding {
    let (health, found, advice) = match machine::cache_line_round_trip_ns() {
        Some(ns) if ns < 200.0 => (Health::Ok, format!("{ns:.0} ns round trip"), ""),
        Some(ns) => (
            Health::Warn,
            format!("{ns:.0} ns round trip"),
            "small messages are slow, because the cores share no cache",
        ),
        None => (Health::Missing, "not measured".into(), "there is only one core, or another process keeps it busy"),
    };
    Finding { health, what: "cache line", found, advice: advice.into() }
}

fn simd() -> Finding {
    let (found, widest) = widest_vectors();
    let advice = if widest { "" } else { "reductions use narrower vectors; results are bit-identical" };
    let health = if widest { Health::Ok } else { Health::Warn };
    Finding { health, what: "vectors", found: found.into(), advice: advice.into() }
}

/// Return the vector extension that the kernels use, and whether it is the widest that they support.
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
        ("the baseline of the build target", false)
    }
}

fn udp() -> Vec<Finding> {
    let config = UdpConfig::default();
    let port = match UdpPort::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), &config) {
        Ok(port) => port,
        Err(error) => {
            let advice = "devices and ranks use UDP on loopback; check that `lo` is up".into();
            return vec![Finding { health: Health::Broken, what: "UDP port", found: error.to_string(), advice }];
        }
    };
    let offload = |what, has: bool| Finding {
        health: if has { Health::Ok } else { Health::Warn },
        what,
        found: if has { "yes" } else { "no" }.into(),
        advice: if has { "" } else { "each system call carries fewer packets; Linux 5.0 and later support it" }.into(),
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
    let advice = format!("windows are smaller; run `sysctl -w net.core.rmem_max={}` as root", wanted_bytes / 2 * 5);
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
            found: "can listen on loopback".into(),
            advice: String::new(),
        },
        Err(error) => Finding {
            health: Health::Broken,
            what: "TCP port",
            found: error.to_string(),
            advice: "controllers and ranks listen on loopback; check that `lo` is up".into(),
        },
    }
}

fn huge_pages() -> Finding {
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let chosen = chosen(&setting);
    let (health, advice) = match chosen {
        Some("always") => (Health::Ok, ""),
        Some(_) => (
            Health::Warn,
            "large buffers cause more TLB misses; write `always` to /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        None => (Health::Missing, "the kernel has none; large buffers cause more TLB misses"),
    };
    Finding { health, what: "huge pages", found: chosen.unwrap_or("none").into(), advice: advice.into() }
}

/// Return the active value of a kernel setting, which is in brackets: `always [madvise] never`.
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
    let staged = "GPU buffers are staged in pinned memory instead".to_owned();
    let (health, found, advice) = match sumac::gpu::direct::probe_direct() {
        Ok(Ok(device)) => {
            let found = format!("{device} registers the GPU's memory (dma-buf)");
            (Health::Ok, found, "communicators do not use it yet: GPU buffers are staged in pinned memory".into())
        }
        Ok(Err(why)) => (Health::Missing, why.to_string(), staged),
        Err(error) => (Health::Missing, error.to_string(), staged),
    };
    Finding { health, what: "GPUDirect RDMA", found, advice }
}
