//! `sumac image run`: run a board in QEMU, connect it to this host, and print its log.
//!
//! The board uses QEMU's user-mode network: it reaches the controller through a gateway that stands for this host, and
//! a UDP port of this host is forwarded to the board. This needs no privileges, and nothing else reaches the board.

use super::build::{BareBoard, default_image};
use super::bus::{BoardSetup, Broker};
use super::log::LogText;
use crate::address;
use crate::cluster;
use crate::exit::Failure;
use crate::key::KeyOption;
use anyhow::{Context, anyhow};
use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt::Write as _;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use sumac::comm::DEFAULT_PORT;
use sumac_bare::{BoardOptions, OPTIONS_MAX_BYTES};
use sumac_hal::ctrl::MAX_NAME_LEN;
use sumac_hal::ctrl::secure::replace_private;
use zeroize::Zeroizing;

/// `sumac image run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Kind of board
    #[arg(long, value_enum)]
    board: BareBoard,
    /// Image [default: the one built by `image build` in this checkout]
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
    /// Name of the device: that of its switch in the fabric
    #[arg(long, value_name = "NAME", default_value = "leaf0", value_parser = crate::options::device_name)]
    name: String,
    /// Controller to register with, by its first IPv4 address
    #[arg(long, value_name = "HOST:PORT", env = "SUMAC_CONTROLLER", hide_env = true,
          default_value_t = format!("127.0.0.1:{DEFAULT_PORT}"))]
    controller: String,
    #[command(flatten)]
    key: KeyOption,
    /// Number of cores, each with a shard and a network card of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4))]
    cores: u16,
    /// UDP port of this host that is forwarded to the board's first core; the other cores take the next ones
    #[arg(long, value_name = "PORT", default_value_t = 7100, value_parser = clap::value_parser!(u16).range(1..=65_532))]
    data_port: u16,
    /// Maximum number of ranks of this machine that contribute zero-copy, each in memory that it shares with the board
    /// (ivshmem); each communicator of a rank counts. Needs qemu-virt with one core
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=16))]
    ranks_max: u16,
    /// Memory for each of these ranks in MiB, a power of two up to 32: room for all its buffers and some overhead
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = rank_memory_mib)]
    rank_memory_mib: u16,
    /// Additional option of the board, as in `watchdog_ms=5000`; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = option)]
    option: Vec<String>,
    /// Additional argument for QEMU; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    qemu_arg: Vec<String>,
}

/// `sumac emulate` (hidden): run the emulator.
#[derive(Debug, Args)]
pub(crate) struct EmulateArgs {
    /// The program to run, and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    command: Vec<String>,
}

/// Replace this process by another program, which then also ends with the supervisor.
pub(crate) fn emulate(args: &EmulateArgs) -> Result<(), Failure> {
    let Some((program, rest)) = args.command.split_first() else {
        return Err(Failure::Input(anyhow!("no program given")));
    };
    let error = Command::new(program).args(rest).exec();
    Err(Failure::Input(anyhow!(
        "cannot start {program}: {error}; on Debian, run `apt-get install {}`",
        package(program)
    )))
}

/// Return Debian's package with an emulator.
fn package(program: &str) -> &'static str {
    match program {
        program if program.contains("x86_64") => "qemu-system-x86",
        program if program.contains("riscv64") => "qemu-system-misc",
        _ => "qemu-system-arm",
    }
}

/// Run a board until it ends or a signal arrives.
pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    let image = args.image.clone().or_else(|| default_image(args.board));
    let image = image.ok_or_else(|| {
        Failure::Input(anyhow!("no image; build one with `sumac image build --board KIND`, or name one with --image"))
    })?;
    let mut controllers = address::all("--controller", &args.controller, DEFAULT_PORT)?.into_iter();
    let Some(controller) = controllers.find(SocketAddr::is_ipv4) else {
        return Err(Failure::Input(anyhow!("--controller {}: boards support IPv4 only", args.controller)));
    };
    if args.name.is_empty() || args.name.len() > MAX_NAME_LEN || args.name.contains(['\n', '#', ',']) {
        return Err(Failure::Input(anyhow!(
            "--name {:?}: a name has 1 to {MAX_NAME_LEN} bytes, without line feeds, commas and #",
            args.name
        )));
    }
    let log = match args.board {
        BareBoard::QemuVirt => Some(LogText::of_image(&image).map_err(Failure::Input)?),
        BareBoard::X86Microvm | BareBoard::RiscvVirt if args.cores > 1 => {
            return Err(Failure::Input(anyhow!("--cores {}: this board has one core", args.cores)));
        }
        // These boards log text, which needs no decoding.
        BareBoard::X86Microvm | BareBoard::RiscvVirt => None,
    };
    let key = args.key.read()?;
    let folder = tempfile::tempdir().context("cannot create a folder for the board's options").map_err(Failure::Run)?;
    let options = folder.path().join("options");
    let port = args.data_port;
    // Of its final length, so that growing leaves no copies of the key behind.
    let mut lines = Zeroizing::new(String::with_capacity(2 * OPTIONS_MAX_BYTES));
    // Writing to a string cannot fail.
    let _ = writeln!(lines, "name={}\ncontroller={controller}", args.name);
    let _ = writeln!(lines, "ip={GUEST}/24\ngateway={GATEWAY}\nlisten={port}\ndata=127.0.0.1:{port}");
    let bus = start_bus(args)?;
    if let Some((_, setup)) = &bus {
        lines.push_str(&setup.options);
    }
    if let Some(key) = key {
        let _ = writeln!(lines, "key={}", key.reveal());
    }
    let lines = with_options(lines, &args.option).map_err(Failure::Input)?;
    replace_private(&options, &lines).context("cannot write the board's options").map_err(Failure::Run)?;
    let mut command = cluster::supervised().map_err(Failure::run)?;
    command.arg("emulate").arg("--").args(qemu(args.board, port, args.cores));
    command.args(pass(args.board, &options));
    command.args(bus.iter().flat_map(|(_, setup)| &setup.arguments));
    command.arg("-kernel").arg(&image).args(&args.qemu_arg);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    supervise(command, log.as_ref())
}

/// Append additional options after checking that the board can parse them. With an invalid option, the board would
/// restart for ever.
fn with_options(mut lines: Zeroizing<String>, further: &[String]) -> anyhow::Result<Zeroizing<String>> {
    // Only the test images with injected faults know this key.
    let is_known = |line: &&str| !line.starts_with("fault=");
    for option in further {
        let _ = writeln!(lines, "{option}");
        let known: Vec<_> = lines.lines().filter(is_known).collect();
        BoardOptions::parse(&Zeroizing::new(known.join("\n"))).with_context(|| format!("--option {option}"))?;
    }
    match lines.len() {
        0..=OPTIONS_MAX_BYTES => Ok(lines),
        len => Err(anyhow!("--option: all options together have {len} bytes; the limit is {OPTIONS_MAX_BYTES}")),
    }
}

/// Start the broker, if ranks may contribute zero-copy.
fn start_bus(args: &RunArgs) -> Result<Option<(Broker, BoardSetup)>, Failure> {
    if args.ranks_max == 0 {
        return Ok(None);
    }
    if args.board != BareBoard::QemuVirt || args.cores > 1 {
        return Err(Failure::Input(anyhow!(
            "--ranks-max {}: only qemu-virt with one core shares memory",
            args.ranks_max
        )));
    }
    Broker::start(args.ranks_max, usize::from(args.rank_memory_mib) << 20).map(Some).map_err(Failure::Run)
}

/// Parse the memory of a rank, which must be a valid size of a BAR.
fn rank_memory_mib(text: &str) -> Result<u16, String> {
    let size = text.parse().ok().filter(|size: &u16| size.is_power_of_two() && *size <= 32);
    size.ok_or_else(|| format!("{text:?} is not a power of two from 1 to 32"))
}

/// Check the form of an option of the board.
fn option(text: &str) -> Result<String, String> {
    let is_line = text.contains('=') && !text.contains(['\n', '#']);
    if text.split('=').next().is_some_and(|key| key.trim() == "key") {
        return Err("a key must not be on a command line, which others can read; use --key-file".to_owned());
    }
    is_line.then(|| text.to_owned()).ok_or_else(|| format!("{text:?} is not KEY=VALUE"))
}

/// The addresses of the guest and of this host in QEMU's user-mode network (QEMU documentation, "Network emulation").
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// Return the QEMU command line of the board, with its serial port on stdout.
fn qemu(board: BareBoard, port: u16, cores: u16) -> Vec<String> {
    let machine = match board {
        BareBoard::QemuVirt => "qemu-system-aarch64 -M virt -cpu cortex-a72 -m 128M",
        BareBoard::X86Microvm => "qemu-system-x86_64 -M microvm,acpi=off,rtc=off -accel tcg -cpu max -m 128M",
        // In machine mode, without a firmware.
        BareBoard::RiscvVirt => "qemu-system-riscv64 -M virt -bios none -m 128M",
    };
    // QEMU assigns the board's slots in reverse order, so the card of the last core comes first.
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

/// Return the arguments with which QEMU passes a file of options to the board.
fn pass(board: BareBoard, options: &Path) -> [String; 2] {
    let file = options.display();
    match board {
        BareBoard::QemuVirt | BareBoard::X86Microvm => {
            ["-fw_cfg".into(), format!("name=opt/sumac/options,file={file}")]
        }
        BareBoard::RiscvVirt => ["-device".into(), format!("loader,file={file},addr=0x81000000,force-raw=on")],
    }
}

/// Print the board's log until it ends or a signal arrives.
fn supervise(mut command: Command, text: Option<&LogText>) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(Failure::run)?;
    let mut child = command.spawn().context("cannot start the emulator").map_err(Failure::Run)?;
    let log = child.stdout.take();
    let ended_by = Arc::new(AtomicI32::new(0));
    let (handle, seen) = (signals.handle(), Arc::clone(&ended_by));
    let pid = rustix::process::Pid::from_child(&child);
    let watcher = thread::spawn(move || {
        for signal in signals.forever() {
            seen.store(signal, Ordering::Release);
            // It may have ended already. Its process id is still valid, because it is reaped only after this thread
            // ends.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    });
    let copied = log.map_or(Ok(()), |mut log| match text {
        Some(text) => text.copy(log, &mut io::stdout()),
        None => io::copy(&mut log, &mut io::stdout()).map(drop),
    });
    if copied.is_err() {
        // The reader of the log is gone.
        let _ = child.kill();
    }
    handle.close();
    let _ = watcher.join();
    let status = child.wait().context("cannot wait for the emulator").map_err(Failure::Run)?;
    match ended_by.load(Ordering::Acquire) {
        0 => {}
        signal => return Err(Failure::Signal(signal)),
    }
    copied?;
    match status.code() {
        Some(0) => Ok(()),
        // Its messages are on stderr.
        Some(code) => Err(Failure::Run(anyhow!("the emulator ended with status {code}"))),
        None => Err(Failure::Run(anyhow!("the emulator was killed ({status})"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_board_options_are_refused_before_the_boot() {
        let base = "name=leaf0\ncontroller=127.0.0.1:1\nip=10.0.2.15/24\ngateway=10.0.2.2\nlisten=7100\n";
        let with = |options: &[&str]| {
            let options: Vec<_> = options.iter().map(|&option| option.into()).collect();
            with_options(Zeroizing::new(base.into()), &options).map_err(|error| format!("{error:#}"))
        };
        let good = with(&["watchdog_ms=5000", "fault=panic"]).expect("the board takes it");
        assert_eq!(*good, format!("{base}watchdog_ms=5000\nfault=panic\n"));
        for (options, message) in [
            (&["watchdog_ms=5000", "watchdg_ms=5000"][..], "--option watchdg_ms=5000: line 7: unknown key"),
            (&["watchdog_ms=5"], "--option watchdog_ms=5: watchdog_ms=\"5\" is not a time from 100 to 600000 ms"),
            (&["data=here"], "--option data=here: data=\"here\" is not an IPv4 address and port"),
            (&["machine=m"], "--option machine=m: socket is missing"),
        ] {
            let error = with(options).expect_err("wrong");
            assert!(error.contains(message), "{error}");
        }
        let error = with(&[&format!("{:640}=x", "#"), "watchdog_ms=5000"]).expect_err("too long");
        assert!(error.contains("the limit is 640"), "{error}");
    }

    #[test]
    fn missing_emulator_is_named_with_its_own_package() {
        let package = |board| package(&qemu(board, 7100, 1)[0]);
        assert_eq!(package(BareBoard::QemuVirt), "qemu-system-arm");
        assert_eq!(package(BareBoard::X86Microvm), "qemu-system-x86");
        assert_eq!(package(BareBoard::RiscvVirt), "qemu-system-misc");
    }

    #[test]
    fn key_on_the_command_line_is_refused() {
        for text in ["key=sumac-key-v1 07 07", " key = x"] {
            assert!(option(text).is_err_and(|error| error.contains("--key-file")), "{text}");
        }
        assert_eq!(option("user=7"), Ok("user=7".into()));
    }
}
