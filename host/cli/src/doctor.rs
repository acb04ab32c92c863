//! `sumac doctor`: check this machine's capabilities.
//!
//! Capabilities are tried or read; nothing is changed. Each line is `ok`, `warn` (works below its potential), `missing`
//! (not available), `not built` (left out of this build) or `BROKEN` (needed, and does not work), with a remedy. The
//! exit status is 1 if something is broken. A table of the DMA engine profiles follows, and a summary. With `--env` it
//! shows instead what a rank reads from the environment.

mod environment;
mod shm;
mod verbs;

use crate::exit::Failure;
use crate::machine;
use clap::{Args, Command};
use serde::Serialize;
use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::thread;
use sumac_hal::port::Port;
use sumac_hal::udp::{UdpConfig, UdpPort};

/// `sumac doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Show what a rank started here reads from the environment: each variable, the launcher that set it, and the
    /// result. Start it by the launcher, as in `mpirun -np 4 sumac doctor --env`
    #[arg(long)]
    env: bool,
    /// With --env: check this configuration file, too, and list what it sets [default: SUMAC_CONFIG, else none]
    #[arg(long, value_name = "FILE", requires = "env")]
    config: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The state of a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Health {
    Ok,
    /// Works below its potential.
    Warn,
    /// Not available, and not needed.
    Missing,
    /// This build of the command leaves it out.
    NotBuilt,
    /// Needed, and does not work.
    Broken,
}

impl Health {
    /// The word in the table.
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Missing => "missing",
            Self::NotBuilt => "not built",
            Self::Broken => "BROKEN",
        }
    }
}

/// The result of a check.
#[derive(Debug, Serialize)]
struct Finding {
    health: Health,
    what: &'static str,
    found: String,
    /// The remedy or the consequence.
    advice: String,
}

/// How many capabilities are in each state.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Summary {
    ok: usize,
    warn: usize,
    missing: usize,
    not_built: usize,
    broken: usize,
}

impl Summary {
    fn of(findings: &[Finding]) -> Self {
        let count = |health| findings.iter().filter(|finding| finding.health == health).count();
        Self {
            ok: count(Health::Ok),
            warn: count(Health::Warn),
            missing: count(Health::Missing),
            not_built: count(Health::NotBuilt),
            broken: count(Health::Broken),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ok, warn, missing, not_built, broken } = self;
        write!(f, "{ok} ok, {warn} warn, {missing} missing, {not_built} not built in, {broken} broken: ")?;
        match broken {
            0 => f.write_str("`sumac perf` can run here"),
            _ => f.write_str("`sumac perf` cannot run here until what is BROKEN works"),
        }
    }
}

/// All findings, as JSON.
#[derive(Debug, Serialize)]
struct Report<'f> {
    findings: &'f [Finding],
    summary: &'f Summary,
    dma_profiles: Vec<shm::ProfileDescription>,
}

/// Check everything and print the findings. `command` is the whole command, whose options a configuration file sets.
pub(crate) fn run(args: &DoctorArgs, command: &Command) -> Result<(), Failure> {
    if args.env {
        return environment::run(args.json, args.config.as_deref(), command);
    }
    let mut findings = vec![cores(), round_trip(), simd()];
    findings.extend(udp());
    findings.extend([tcp(), huge_pages()]);
    findings.extend(shm::findings());
    findings.extend([cuda(), gpu_direct()]);
    findings.extend(verbs::findings());
    let summary = Summary::of(&findings);
    let mut out = io::stdout().lock();
    if args.json {
        let report = Report { findings: &findings, summary: &summary, dma_profiles: shm::profiles() };
        serde_json::to_writer_pretty(&mut out, &report).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        write_table(&mut out, &findings, &summary)?;
    }
    out.flush()?;
    if summary.broken > 0 { Err(Failure::Reported) } else { Ok(()) }
}

fn write_table(out: &mut impl Write, findings: &[Finding], summary: &Summary) -> io::Result<()> {
    for finding in findings {
        writeln!(out, "{:<9} {:<15} {}", finding.health.word(), finding.what, finding.found)?;
        if !finding.advice.is_empty() {
            writeln!(out, "{:<25} {}", "", finding.advice)?;
        }
    }
    writeln!(out, "DMA engines  capabilities and hardware of each profile (emulated by `sumac device --dma-profile`)")?;
    for shm::ProfileDescription { name, capabilities, hardware } in shm::profiles() {
        writeln!(out, "  {name:<14} {capabilities}\n  {:<14} {hardware}", "")?;
    }
    writeln!(out, "{summary}")
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
        Err(error) => (without_cuda(), error.to_string(), "ranks reduce in CPU memory instead".into()),
    };
    Finding { health, what: "CUDA memory", found, advice }
}

/// The state of what needs a GPU where there is none to use.
const fn without_cuda() -> Health {
    if cfg!(feature = "cuda") { Health::Missing } else { Health::NotBuilt }
}

fn gpu_direct() -> Finding {
    let staged = "GPU buffers are staged in pinned memory instead".to_owned();
    let (health, found, advice) = match sumac::gpu::direct::probe_direct() {
        Ok(Ok(device)) => {
            let found = format!("{device} registers the GPU's memory (dma-buf)");
            (Health::Ok, found, "communicators do not use it yet: GPU buffers are staged in pinned memory".into())
        }
        Ok(Err(why)) => (Health::Missing, why.to_string(), staged),
        Err(error) => (without_cuda(), error.to_string(), staged),
    };
    Finding { health, what: "GPUDirect RDMA", found, advice }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_each_state_and_tells_whether_perf_can_run() {
        let finding = |health| Finding { health, what: "x", found: String::new(), advice: String::new() };
        let mut findings: Vec<_> = [Health::Ok, Health::Ok, Health::Warn, Health::NotBuilt].map(finding).into();
        let text = Summary::of(&findings).to_string();
        assert_eq!(text, "2 ok, 1 warn, 0 missing, 1 not built in, 0 broken: `sumac perf` can run here");
        findings.push(finding(Health::Broken));
        let text = Summary::of(&findings).to_string();
        assert!(text.contains("1 broken: `sumac perf` cannot run here"), "{text}");
    }
}
