//! The runtime process: `sumac-firmware`'s board, on the card's network.
//!
//! It reads its configuration, with the address of the data ports, from stdin, reports its status line by line on
//! stdout, and logs to stderr. A panic of any thread ends the process: the next one has all shards again.

use crate::config::{Cidr, Config, ConfigError, Polling, Settings, Verbs};
use crate::self_test;
use crate::supervisor::{JOINED, PASSES, SERVES};
use crate::update::{self, SlotsError};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use sumac_firmware::emulated::{Board, BoardConfig, BoardError, ZeroCopyConfig};
use sumac_hal::udp::UdpConfig;
use thiserror::Error;
use tracing_subscriber::EnvFilter;
use zeroize::Zeroizing;

/// The maximum length of the configuration in bytes.
const SETTINGS_MAX_BYTES: u64 = 64 << 10;

/// The spin time of a shard that polls: longer than any idle time of a card in use.
const BUSY: Duration = Duration::from_secs(365 * 24 * 3600);

/// The receive buffer that an emulated machine can guarantee, in bytes: its packets first wait in the gateway's socket
/// of Linux's default size (`net.core.rmem_default`, 208 KiB), which holds two fifths of that in packets.
const GATEWAY_BYTES: usize = 80 << 10;

/// The interval of waiting for the controller.
const REGISTER_WAIT: Duration = Duration::from_secs(3600);

/// Why the runtime ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The configuration is invalid.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The configuration lacks the address of the data ports.
    #[error("no address for the data ports")]
    NoAddress,
    /// The shards' ports are out of range.
    #[error(
        "data={data} and {shards} shards exceed the range of ports, 1 to 65535: choose another first port or fewer shards"
    )]
    DataPorts {
        /// The first shard's address.
        data: SocketAddr,
        /// The number of shards.
        shards: u16,
    },
    /// RDMA ports have no UDP addresses.
    #[error("verbs={0}: data= and host= apply to UDP only; remove them, or set verbs=off")]
    NoUdp(String),
    /// Zero-copy needs one shard.
    #[error("rdma={rdma}: ranks are served zero-copy by one shard, and shards={shards}; remove one of the settings")]
    RdmaShards {
        /// The RDMA port.
        rdma: String,
        /// The number of shards.
        shards: u16,
    },
    /// The self-test failed.
    #[error("self-test: {0}")]
    SelfTest(String),
    /// The board could not be started.
    #[error("{0}")]
    Board(#[from] BoardError),
    /// The pipe to the supervisor failed.
    #[error("pipe to the supervisor: {0}")]
    Pipe(#[from] io::Error),
    /// The slots of updates cannot be used.
    #[error("{0}")]
    Slots(#[from] SlotsError),
    /// A shard has ended, which is a bug.
    #[error("a shard has ended")]
    Ended,
}

/// Select the RDMA port for the data ports at address `ip`; `None`: UDP. `link_at` finds the port with an address.
fn choose_link(
    config: &Config,
    ip: Cidr,
    link_at: impl FnOnce(IpAddr) -> Option<String>,
) -> Result<Option<String>, RuntimeError> {
    let is_udp = config.data.is_some() || config.host.is_some();
    match &config.verbs {
        Verbs::Link(link) if is_udp => Err(RuntimeError::NoUdp(link.clone())),
        Verbs::Link(link) => Ok(Some(link.clone())),
        Verbs::Auto if !is_udp => Ok(link_at(IpAddr::V4(ip.ip))),
        Verbs::Auto | Verbs::Off => Ok(None),
    }
}

/// Find the RDMA port with this address, and log the result.
#[cfg(feature = "verbs")]
fn link_at(addr: IpAddr) -> Option<String> {
    match sumac_hal::verbs::link_at(addr) {
        Ok(link) => {
            tracing::info!(%addr, %link, "data ports are over verbs");
            Some(link.to_string())
        }
        // On a card with RDMA this is a fault of its configuration, as when the address is that of an uplink, whose
        // representor has no RoCE. The error names each device's reason.
        Err(error) => {
            tracing::warn!(%addr, %error, "data ports are over UDP");
            None
        }
    }
}

#[cfg(not(feature = "verbs"))]
fn link_at(addr: IpAddr) -> Option<String> {
    tracing::debug!(%addr, "data ports are over UDP: this build has no verbs");
    None
}

/// Return the configuration of the board.
fn board_config(config: &Config, ip: Cidr, verbs: Option<String>) -> Result<BoardConfig, RuntimeError> {
    let mut udp = UdpConfig { loopback_at: config.host, ..BoardConfig::new("", config.controller.into()).udp };
    if config.host.is_some() {
        udp.receive_buffer_bytes = GATEWAY_BYTES;
    }
    let spin = match config.poll {
        Polling::Busy => BUSY,
        Polling::Sleep => udp.spin,
    };
    let udp = UdpConfig { spin, ..udp };
    let advertise = config.data.map(|data| {
        let port = |index| data.port().checked_add(index).map(|port| SocketAddr::from((*data.ip(), port)));
        let ports: Option<Vec<_>> = (0..config.shards).map(port).collect();
        ports.ok_or(RuntimeError::DataPorts { data: data.into(), shards: config.shards })
    });
    if let (Some(rdma), shards @ 2..) = (&config.rdma, config.shards) {
        return Err(RuntimeError::RdmaShards { rdma: rdma.clone(), shards });
    }
    Ok(BoardConfig {
        controller: udp.to_network_addr(config.controller.into()),
        bind: IpAddr::V4(ip.ip),
        data_port: Some(config.listen),
        advertise: advertise.transpose()?,
        shards: config.shards,
        cores: config.cores.clone(),
        udp,
        verbs,
        key: config.key.clone(),
        // Ranks are on other hosts, whose memory only RDMA reaches.
        zero_copy: config.rdma.is_some().then(ZeroCopyConfig::default),
        rdma: config.rdma.clone(),
        ..BoardConfig::new(config.name.clone(), config.controller.into())
    })
}

/// Serve until the process is killed or a shard ends.
///
/// # Errors
/// [`RuntimeError`]: why it could not start, or ended.
pub fn run() -> Result<(), RuntimeError> {
    // Die with the supervisor: a new supervisor starts another runtime, and two cannot use the same ports.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        std::process::abort();
    }));
    // Of its final length, so that growing leaves no copies of the key behind.
    let mut text = Zeroizing::new(String::with_capacity(SETTINGS_MAX_BYTES as usize));
    io::stdin().take(SETTINGS_MAX_BYTES).read_to_string(&mut text)?;
    let config = Settings::from_lines(&text)?.config()?;
    let filter = EnvFilter::new(&config.log);
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(false).init();
    let ip = config.ip.ok_or(RuntimeError::NoAddress)?;
    let verbs = choose_link(&config, ip, link_at)?;
    self_test::run().map_err(RuntimeError::SelfTest)?;
    report(PASSES)?;
    let maintenance = update::maintenance(&config)?;
    let board = Board::start(BoardConfig { maintenance, ..board_config(&config, ip, verbs)? })?;
    let addrs: Vec<_> = board.data_addrs().map(|addr| addr.to_string()).collect();
    report(&format!(
        "{SERVES} as {}, boot id {:016x}, at {}",
        config.name,
        board.announce().boot_id.0,
        addrs.join(" ")
    ))?;
    while !board.wait_registered(REGISTER_WAIT) {}
    report(&format!("{JOINED} at {}", config.controller))?;
    board.serve();
    Err(RuntimeError::Ended)
}

/// Write a line of the runtime's status.
pub(crate) fn report(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(words: &[&str]) -> Result<(Config, Cidr), ConfigError> {
        let words = ["name=d", "controller=127.0.0.1:7847"].iter().chain(words).copied();
        Ok((Settings::from_words(words)?.config()?, "10.0.2.15/24".parse().expect("an address")))
    }

    fn board(words: &[&str]) -> Result<BoardConfig, RuntimeError> {
        let (config, ip) = config(words)?;
        board_config(&config, ip, None)
    }

    #[test]
    fn rdma_port_is_chosen_by_address_or_name_unless_udp_is_required() {
        let choose = |words: &[&str], there: Option<&str>| {
            let (config, ip) = config(words)?;
            let mut looked_up = None;
            let link = choose_link(&config, ip, |addr| {
                looked_up = Some(addr.to_string());
                there.map(str::to_owned)
            })?;
            Ok::<_, RuntimeError>((link, looked_up))
        };
        let (found, own) = (Some("mlx5_1:1:3"), Some("10.0.2.15".to_owned()));
        let link = |link: &str| Some(link.to_owned());
        assert_eq!(choose(&[], found).expect("verbs"), (link("mlx5_1:1:3"), own.clone()));
        assert_eq!(choose(&["verbs=auto"], None).expect("UDP"), (None, own));
        assert_eq!(choose(&["verbs=off"], found).expect("UDP"), (None, None), "not looked up");
        assert_eq!(choose(&["verbs=mlx5_0"], found).expect("that one"), (link("mlx5_0"), None));
        for udp in ["data=10.0.0.1:7100", "host=10.0.2.2"] {
            assert_eq!(choose(&[udp], found).expect("UDP"), (None, None), "{udp}");
            let error = choose(&[udp, "verbs=mlx5_0"], found).expect_err(udp).to_string();
            assert!(error.contains("verbs=mlx5_0: data= and host= apply to UDP only"), "{error}");
        }
        let (config, ip) = config(&[]).expect("a configuration");
        assert_eq!(board_config(&config, ip, link("mlx5_1")).expect("a board").verbs, link("mlx5_1"));
    }

    /// Without RDMA hardware, or without the feature, the default is UDP and a named port is an error.
    #[test]
    fn rdma_serves_ranks_zero_copy_with_one_shard() {
        let (settings, ip) = config(&["rdma=mlx5_2:1"]).expect("a configuration");
        let board = board_config(&settings, ip, None).expect("a board");
        assert_eq!((board.rdma.as_deref(), board.zero_copy.is_some()), (Some("mlx5_2:1"), true));
        let (settings, ip) = config(&["rdma=mlx5_2:1", "shards=2"]).expect("a configuration");
        let error = board_config(&settings, ip, None).expect_err("one shard only").to_string();
        assert!(error.contains("rdma=mlx5_2:1") && error.contains("shards=2"), "{error}");
    }

    #[test]
    fn missing_rdma_port_is_an_error_only_if_named() {
        let nowhere = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
        assert_eq!(link_at(nowhere), None);
        let (config, _) = config(&["verbs=none0"]).expect("a configuration");
        let local = "127.0.0.1/8".parse().expect("an address");
        let link = choose_link(&config, local, link_at).expect("the named port");
        let error = Board::start(board_config(&config, local, link).expect("a board")).expect_err("no such port");
        let expected = if cfg!(feature = "verbs") { "RDMA device" } else { "--features verbs" };
        assert!(error.to_string().contains(expected), "{error}");
    }

    fn addr(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn loopback_addresses_denote_the_configured_host() {
        let plain = board(&[]).expect("a board");
        assert_eq!((plain.controller, plain.udp.loopback_at), (addr("127.0.0.1:7847"), None));
        let emulated = board(&["host=10.0.2.2", "data=127.0.0.1:7300", "shards=2", "cores=1"]).expect("a board");
        assert_eq!(emulated.controller, addr("10.0.2.2:7847"));
        assert_eq!(emulated.udp.loopback_at, Some("10.0.2.2".parse().expect("an address")));
        assert_eq!(emulated.advertise, Some(vec![addr("127.0.0.1:7300"), addr("127.0.0.1:7301")]));
        assert_eq!((&emulated.cores[..], emulated.shards, emulated.data_port), (&[1][..], 2, Some(7100)));
        assert!(emulated.zero_copy.is_none() && emulated.rdma.is_none());
        let buffers = [&plain, &emulated].map(|board| board.udp.receive_buffer_bytes);
        assert!(buffers[1] == GATEWAY_BYTES && buffers[0] > 10 * GATEWAY_BYTES, "{buffers:?}");
    }

    #[test]
    fn busy_polling_sets_the_spin_time() {
        assert_eq!(board(&[]).expect("a board").udp.spin, UdpConfig::default().spin);
        assert_eq!(board(&["poll=busy"]).expect("a board").udp.spin, BUSY);
    }

    #[test]
    fn ports_beyond_65535_are_refused() {
        let error = board(&["data=10.0.0.1:65535", "shards=2"]).expect_err("no port 65536").to_string();
        assert!(error.contains("data=10.0.0.1:65535 and 2 shards"), "{error}");
    }
}
