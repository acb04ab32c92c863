//! Keys of the settings: read, written, overridden, refused.

use super::*;
use crate::disks::Target;
use std::time::Duration;
use sumac_firmware::slots::Slot;

const ALL: &str = "name=leaf0\ncontroller=127.0.0.1:7847\ninterface=p0\nip=10.0.2.15/24\ngateway=10.0.2.2\n\
    listen=7200\ndata=127.0.0.1:7300\nhost=10.0.2.2\nshards=2\ncores=2,3\npoll=busy\nverbs=mlx5_0:1\n\
    rdma=mlx5_2:1\nslots=/dev/vda,/dev/vdb\n\
    update-key=MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\nslot=B\nconfirm-after=90\nlog=debug\n";

/// The public key of the first test vector of RFC 8032, in its PEM file.
const KEY: &str = "MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";

#[test]
fn every_key_round_trips() {
    let settings = Settings::from_lines(ALL).expect("settings");
    assert_eq!(settings.to_lines(), ALL);
    assert_eq!(Settings::from_lines(&settings.to_lines()), Ok(settings.clone()));
    let config = settings.config().expect("a configuration");
    let expected = Config {
        name: "leaf0".into(),
        controller: SocketAddrV4::new(Ipv4Addr::LOCALHOST, 7847),
        interface: Some("p0".into()),
        ip: Some(Cidr { ip: Ipv4Addr::new(10, 0, 2, 15), prefix_len: 24 }),
        gateway: Some(Ipv4Addr::new(10, 0, 2, 2)),
        listen: 7200,
        data: Some(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 7300)),
        host: Some(Ipv4Addr::new(10, 0, 2, 2)),
        shards: 2,
        cores: vec![2, 3],
        poll: Polling::Busy,
        verbs: Verbs::Link("mlx5_0:1".into()),
        rdma: Some("mlx5_2:1".into()),
        slots: Some(SlotPaths::Files(["/dev/vda".into(), "/dev/vdb".into()])),
        update_key: KEY.parse().ok(),
        slot: Some(Slot::B),
        confirm_after: Duration::from_secs(90),
        log: "debug".into(),
        key: None,
    };
    assert!(config.update_key.is_some());
    assert_eq!(config, expected);
}

const SECRET: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

#[test]
fn key_round_trips_in_a_store_and_is_shown_nowhere() {
    let text = format!("{ALL}key=sumac-key-v1 0123456789abcdef {SECRET}\n");
    let settings = Settings::from_lines(&text).expect("settings");
    assert_eq!(*settings.to_secret_lines(), text);
    assert!(text.len() - ALL.len() <= DEVICE_KEY_LINE_MAX_BYTES);
    assert_eq!(settings.to_lines(), ALL);
    assert_eq!(settings.config().expect("a configuration").key, settings.key);
    assert_eq!(redact(&text), format!("{ALL}# key 0123456789abcdef\n"));
    assert!(!format!("{settings:?}{:?}", settings.config()).contains(&SECRET[..8]));
    let kept = settings.clone().overridden_by(&Settings::default());
    assert_eq!(kept.key, settings.key, "a command line has no key");
}

#[test]
fn malformed_key_and_one_on_a_command_line_are_refused_and_not_repeated() {
    let short = format!("key=sumac-key-v1 0123456789abcdef {}", &SECRET[2..]);
    let error = Settings::from_lines(&short).expect_err("too short").to_string();
    assert!(error.contains("64 hexadecimal digits") && !error.contains(&SECRET[2..10]), "{error}");
    assert!(!redact(&short).contains(&SECRET[2..10]));
    for word in [format!("sumac.key={SECRET}"), format!("sumac.key=sumac-key-v1 0123456789abcdef {SECRET}")] {
        let error = CommandLine::parse([&word[..]], PREFIX).expect_err("in clear").to_string();
        assert!(error.contains("sumac-agent enroll") && !error.contains(&SECRET[..8]), "{error}");
    }
}

#[test]
fn missing_optional_keys_have_defaults_and_required_ones_are_errors() {
    let settings = Settings::from_lines("# a card\n name = d \ncontroller=10.0.0.1:1 # there\n\n").expect("settings");
    let config = settings.config().expect("a configuration");
    assert_eq!((config.listen, config.shards, config.poll), (7100, 1, Polling::Sleep));
    assert_eq!((config.ip, config.data, config.log.as_str()), (None, None, "info"));
    assert_eq!(config.verbs, Verbs::Auto);
    assert_eq!((config.slots, config.update_key, config.confirm_after), (None, None, Duration::from_secs(60)));
    let keyless = Settings::from_words(["name=d", "controller=10.0.0.1:1", "slots=a,b"]).expect("settings");
    assert_eq!(keyless.config(), Err(ConfigError::Missing("update-key")));
    let off = Settings::from_words(["name=d", "controller=10.0.0.1:1", "verbs=off"]).and_then(|off| off.config());
    assert_eq!(off.map(|config| config.verbs), Ok(Verbs::Off));
    let none = Settings::default();
    assert_eq!(none.config(), Err(ConfigError::Missing("name")));
    let named = Settings::from_words(["name=d"]).expect("settings");
    assert_eq!(named.config(), Err(ConfigError::Missing("controller")));
}

#[test]
fn command_line_overrides_and_foreign_words_are_ignored() {
    let words = "console=ttyAMA0 sumac.name=other quiet sumac.store=/dev/vda sumac.keep=yes name=no".split(' ');
    let line = CommandLine::parse(words, PREFIX).expect("a command line");
    assert_eq!((line.store.as_deref(), line.keep), (Some("/dev/vda"), true));
    let settings = Settings::from_lines(ALL).expect("settings").overridden_by(&line.settings);
    assert_eq!(settings.to_lines(), ALL.replace("leaf0", "other"));
}

#[test]
fn command_line_says_slot_disk_key_and_trial() {
    // RFC 8410, 10.3.
    let key = "sumac.update-key=MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=";
    let words = ["sumac.slot=B", "sumac.install=/dev/nvme0n1,erase", key, "sumac.trial=90", "sumac.name=d"];
    let line = CommandLine::parse(words, PREFIX).expect("a command line");
    assert_eq!((line.slot, line.trial.confirm_within), (Some(Slot::B), Duration::from_secs(90)));
    assert_eq!(line.install, Target::parse("/dev/nvme0n1,erase").expect("a target"));
    assert_eq!(line.update_key.map(|key| key.verifying_key().as_bytes()[..2].to_vec()), Some(vec![0x19, 0xbf]));
    let none = CommandLine::parse([], PREFIX).expect("nothing");
    assert_eq!((none.slot, none.update_key, none.trial.confirm_within.as_secs()), (None, None, 300));
    for (word, named) in [
        ("sumac.slot=C", "A or B"),
        ("sumac.install=nvme0n1", "/dev/nvme0n1"),
        ("sumac.update-key=x", "PEM file"),
        ("sumac.trial=60", "from 90 to 86400"),
        ("sumac.trial=x", "from 90 to 86400"),
    ] {
        let message = CommandLine::parse([word], PREFIX).expect_err(word).to_string();
        assert!(message.contains(named), "{message}");
    }
}

#[test]
fn invalid_settings_are_named() {
    let long = format!("name={}", "x".repeat(65));
    let cases = [
        ("name", "\"name\" is not key=value"),
        ("nome=x", "unknown key \"nome\"; known are name, controller"),
        ("name=", "a name of 1 to 64 bytes"),
        (&long, "a name of 1 to 64 bytes"),
        ("controller=10.0.0.1", "an IPv4 address and a port"),
        ("data=10.0.0.1:0", "a port other than 0"),
        ("interface=../x", "the name of an interface"),
        ("ip=10.0.2.15", "such as 10.0.2.15/24"),
        ("ip=10.0.2.15/33", "such as 10.0.2.15/24"),
        ("ip=0.0.0.0/8", "such as 10.0.2.15/24"),
        ("host=x", "an IPv4 address"),
        ("listen=0", "a port from 1 to 65535"),
        ("shards=65", "a number from 1 to 8"),
        ("cores=1,,2", "processors, such as 2,3"),
        ("poll=never", "busy or sleep"),
        ("verbs=", "auto, off, or an RDMA port"),
        ("slots=/dev/vda", "two files or block devices"),
        ("slots=a,a", "two files or block devices"),
        ("slots=a,b,c", "two files or block devices"),
        ("update-key=MCow", "the middle line of its PEM file"),
        ("slot=C", "A or B"),
        ("confirm-after=soon", "a number of seconds"),
    ];
    for (word, named) in cases {
        let message = Settings::from_words([word]).expect_err(word).to_string();
        assert!(message.contains(named), "{message}");
    }
    assert!(CommandLine::parse(["sumac.keep=1"], PREFIX).is_err());
    assert!(CommandLine::parse(["sumac.nome=1"], PREFIX).is_err());
}

/// What `/init` hands on to the runtime of an installed version.
#[test]
fn disk_of_an_installed_version_reaches_the_runtime() {
    let mut settings = Settings::from_lines(ALL).expect("settings");
    settings.set_slots_of(Path::new("/dev/nvme0n1"));
    let read = Settings::from_lines(&settings.to_secret_lines()).expect("settings").config().expect("a configuration");
    assert_eq!(read.slots, Some(SlotPaths::Disk("/dev/nvme0n1".into())));
}

#[test]
fn installed_version_is_healthy_after_the_time_on_the_command_line() {
    let line = |words: &[&str]| CommandLine::parse(words.iter().copied(), PREFIX).expect("a command line");
    assert_eq!(line(&["sumac.confirm-after=20"]).confirm_after, Some(Duration::from_secs(20)));
    assert_eq!(line(&["sumac.confirm-after=20"]).settings.to_lines(), "confirm-after=20\n");
    assert_eq!(line(&[]).confirm_after, None);
}
