//! `sumac image run`: a board in QEMU, with a network to this host, and its log as text.
//!
//! The board's network is QEMU's own (user mode): the board dials the controller through a gateway that is this host, and
//! this host's UDP port is forwarded to the board's. So nothing needs privileges, and nothing else reaches the board.

use super::build::{BareBoard, default_image};
use super::bus::{Broker, Told};
use super::log::LogText;
use crate::cluster;
use crate::exit::Failure;
use anyhow::{Context, anyhow};
use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt::Write as _;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use sumac::comm::DEFAULT_PORT;
use sumac_bare::{BoardOptions, OPTIONS_MAX_BYTES};
use sumac_hal::ctrl::MAX_NAME_LEN;

/// `sumac image run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Kind of board
    #[arg(long, value_enum)]
    board: BareBoard,
    /// The image [default: the one that `image build` has made in this checkout]
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
    /// The device's name: that of its switch in the fabric
    #[arg(long, value_name = "NAME", default_value = "leaf0")]
    name: String,
    /// The controller to serve
    #[arg(long, value_name = "ADDRESS", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)))]
    controller: SocketAddr,
    /// Cores, each with a shard and a network card of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4))]
    cores: u16,
    /// The UDP port of this host where peers send the packets of the board's first core to; others take the next ones
    #[arg(long, value_name = "PORT", default_value_t = 7100, value_parser = clap::value_parser!(u16).range(1..=65_532))]
    data_port: u16,
    /// Ranks of this machine that may contribute by reference at a time, each in memory that it shares with the board
    /// (ivshmem); a rank takes a seat for each of its communicators. qemu-virt with one core
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=16))]
    seats: u16,
    /// The memory of each seat in MiB, a power of two up to 32: what a rank's buffers may take together, and a little more
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = seat_mib)]
    seat_mib: u16,
    /// A further option of the board, as `watchdog_ms=5000`; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = option)]
    option: Vec<String>,
    /// A further argument of QEMU; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    qemu_arg: Vec<String>,
}

/// `sumac emulate` (hidden): become the emulator.
#[derive(Debug, Args)]
pub(crate) struct EmulateArgs {
    /// What to become, and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    command: Vec<String>,
}

/// Become another program: what was arranged for this process's end holds for it.
pub(crate) fn emulate(args: &EmulateArgs) -> Result<(), Failure> {
    let Some((program, rest)) = args.command.split_first() else {
        return Err(Failure::Input(anyhow!("no program")));
    };
    let error = Command::new(program).args(rest).exec();
    Err(Failure::Input(anyhow!("can't start {program}: {error}; Debian: apt-get install qemu-system-arm")))
}

/// Run a board until it ends or this process is told to.
pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    let image = args.image.clone().or_else(|| default_image(args.board));
    let image = image.ok_or_else(|| {
        Failure::Input(anyhow!("no image: `sumac image build --board KIND` makes one, or --image names one"))
    })?;
    let SocketAddr::V4(controller) = args.controller else {
        return Err(Failure::Input(anyhow!("--controller {}: the board speaks IPv4", args.controller)));
    };
    if args.name.is_empty() || args.name.len() > MAX_NAME_LEN || args.name.contains(['\n', '#', ',']) {
        return Err(Failure::Input(anyhow!(
            "--name {:?}: a name has 1 to {MAX_NAME_LEN} bytes, none of them , or #",
            args.name
        )));
    }
    let log = match args.board {
        BareBoard::QemuVirt => Some(LogText::of_image(&image).map_err(Failure::Input)?),
        BareBoard::X86Microvm if args.cores > 1 => {
            return Err(Failure::Input(anyhow!("--cores {}: this board has one", args.cores)));
        }
        // Its log is text already.
        BareBoard::X86Microvm => None,
    };
    let folder = tempfile::tempdir().context("no folder for the board's options").map_err(Failure::Run)?;
    let options = folder.path().join("options");
    let port = args.data_port;
    let mut lines = String::new();
    // Writing to a string can't fail.
    let _ = writeln!(lines, "name={}\ncontroller={controller}", args.name);
    let _ = writeln!(lines, "ip={GUEST}/24\ngateway={GATEWAY}\nlisten={port}\ndata=127.0.0.1:{port}");
    let bus = start_bus(args)?;
    if let Some((_, told)) = &bus {
        lines += &told.options;
    }
    let lines = with_options(lines, &args.option).map_err(Failure::Input)?;
    std::fs::write(&options, lines).context("can't write the board's options").map_err(Failure::Run)?;
    let mut command = cluster::supervised().map_err(Failure::run)?;
    command.arg("emulate").arg("--").args(qemu(args.board, port, args.cores));
    command.arg("-fw_cfg").arg(format!("name=opt/sumac/options,file={}", options.display()));
    command.args(bus.iter().flat_map(|(_, told)| &told.arguments));
    command.arg("-kernel").arg(&image).args(&args.qemu_arg);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    supervise(command, log.as_ref())
}

/// Add further options, each of which the board has to be able to read: one that can't would begin life after life with it.
fn with_options(mut lines: String, further: &[String]) -> anyhow::Result<String> {
    // Tests have images that fail when they are told to; only those know this key.
    let is_known = |line: &&str| !line.starts_with("fault=");
    for option in further {
        let _ = writeln!(lines, "{option}");
        let known: Vec<_> = lines.lines().filter(is_known).collect();
        BoardOptions::parse(&known.join("\n")).with_context(|| format!("--option {option}"))?;
    }
    match lines.len() {
        0..=OPTIONS_MAX_BYTES => Ok(lines),
        len => Err(anyhow!("--option: all options together are {len} bytes, and a board keeps {OPTIONS_MAX_BYTES}")),
    }
}

/// Start the broker, if ranks are to be seated.
fn start_bus(args: &RunArgs) -> Result<Option<(Broker, Told)>, Failure> {
    if args.seats == 0 {
        return Ok(None);
    }
    if args.board != BareBoard::QemuVirt || args.cores > 1 {
        return Err(Failure::Input(anyhow!("--seats {}: only qemu-virt with one core has a bus", args.seats)));
    }
    Broker::start(args.seats, usize::from(args.seat_mib) << 20).map(Some).map_err(Failure::Run)
}

/// Read the size of a seat: what a BAR can have.
fn seat_mib(text: &str) -> Result<u16, String> {
    let size = text.parse().ok().filter(|size: &u16| size.is_power_of_two() && *size <= 32);
    size.ok_or_else(|| format!("{text:?} is not a power of two from 1 to 32"))
}

/// Check what the board is to check again.
fn option(text: &str) -> Result<String, String> {
    let is_line = text.contains('=') && !text.contains(['\n', '#']);
    is_line.then(|| text.to_owned()).ok_or_else(|| format!("{text:?} is not KEY=VALUE"))
}

/// Where QEMU's user network has its guest and this host (its documentation, "Network emulation").
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// Return QEMU and the arguments that make up the board, with its serial port on stdout.
fn qemu(board: BareBoard, port: u16, cores: u16) -> Vec<String> {
    let machine = match board {
        BareBoard::QemuVirt => "qemu-system-aarch64 -M virt -cpu cortex-a72 -m 128M",
        BareBoard::X86Microvm => "qemu-system-x86_64 -M microvm,acpi=off,rtc=off -accel tcg -cpu max -m 128M",
    };
    // QEMU gives the first card the last of the board's slots: so the last core's comes first.
    let network = (0..cores).rev().map(|core| {
        let port = port + core;
        let forward = format!("hostfwd=udp:127.0.0.1:{port}-{GUEST}:{port}");
        format!("-netdev user,id=net{core},{forward} -device virtio-net-device,netdev=net{core}")
    });
    let rest = format!(
        "-global virtio-mmio.force-legacy=false -smp {cores} -nodefaults -display none -monitor none -serial stdio -device virtio-rng-device"
    );
    let parts = [machine.to_owned()].into_iter().chain(network).chain([rest]);
    parts.flat_map(|part| part.split(' ').map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Print the board's log until it ends; a signal ends it.
fn supervise(mut command: Command, text: Option<&LogText>) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(Failure::run)?;
    let mut child = command.spawn().context("can't start the emulator").map_err(Failure::Run)?;
    let log = child.stdout.take();
    let ended_by = Arc::new(AtomicI32::new(0));
    let (handle, seen) = (signals.handle(), Arc::clone(&ended_by));
    let pid = rustix::process::Pid::from_child(&child);
    let watcher = thread::spawn(move || {
        for signal in signals.forever() {
            seen.store(signal, Ordering::Release);
            // It may have ended by itself meanwhile; it is not waited for before this thread has ended.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    });
    let copied = log.map_or(Ok(()), |mut log| match text {
        Some(text) => text.copy(log, &mut io::stdout()),
        None => io::copy(&mut log, &mut io::stdout()).map(drop),
    });
    if copied.is_err() {
        // Nobody reads the log any more.
        let _ = child.kill();
    }
    handle.close();
    let _ = watcher.join();
    let status = child.wait().context("waiting for the emulator").map_err(Failure::Run)?;
    match ended_by.load(Ordering::Acquire) {
        0 => {}
        signal => return Err(Failure::Signal(signal)),
    }
    copied?;
    match status.code() {
        Some(0) => Ok(()),
        // What it said is on stderr.
        Some(code) => Err(Failure::Run(anyhow!("the emulator ended with status {code}"))),
        None => Err(Failure::Run(anyhow!("the emulator was ended ({status})"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_the_board_can_t_read_are_named_before_it_boots() {
        let base = "name=leaf0\ncontroller=127.0.0.1:1\nip=10.0.2.15/24\ngateway=10.0.2.2\nlisten=7100\n";
        let with = |options: &[&str]| {
            let options: Vec<_> = options.iter().map(|&option| option.into()).collect();
            with_options(base.into(), &options).map_err(|error| format!("{error:#}"))
        };
        let good = with(&["watchdog_ms=5000", "fault=panic"]).expect("the board takes it");
        assert_eq!(good, format!("{base}watchdog_ms=5000\nfault=panic\n"));
        for (options, says) in [
            (&["watchdog_ms=5000", "watchdg_ms=5000"][..], "--option watchdg_ms=5000: line 7: unknown key"),
            (&["watchdog_ms=5"], "--option watchdog_ms=5: watchdog_ms=\"5\" is not a time from 100 to 600000 ms"),
            (&["data=here"], "--option data=here: data=\"here\" is not an IPv4 address and port"),
            (&["machine=m"], "--option machine=m: no socket"),
        ] {
            let error = with(options).expect_err("wrong");
            assert!(error.contains(says), "{error}");
        }
        let error = with(&[&format!("{:500}=x", "#"), "watchdog_ms=5000"]).expect_err("too long");
        assert!(error.contains("a board keeps 512"), "{error}");
    }
}
