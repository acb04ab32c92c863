//! Variables, their precedence and the messages of invalid ones.

use super::file::key_of;
use super::file::tests::config_with;
use super::*;
use crate::controller::proto::Transport;
use crate::select::Algo;

fn config(variables: &[(&str, &str)]) -> Result<JoinConfig, JoinError> {
    let all = [("RANK", "1"), ("WORLD_SIZE", "2")].iter().chain(variables).rev();
    let variable = |name: &str| all.clone().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    read(launcher::read(variable, || None).placement, variable)
}

#[test]
fn unset_variables_leave_the_defaults() {
    let config = config(&[]).expect("RANK and WORLD_SIZE suffice");
    let controller = SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT));
    assert_eq!(format!("{config:?}"), format!("{:?}", JoinConfig::new(controller, "default", 1, 2)));
}

#[test]
fn each_variable_sets_its_field() {
    let set = [
        ("SUMAC_PORT", "9"),
        ("SUMAC_JOB", "j"),
        ("SUMAC_EMBEDDED_CONTROLLER", "1"),
        ("SUMAC_HOST", "node7"),
        ("SUMAC_ORDER", "fold"),
        ("SUMAC_ALGO", "ring"),
        ("SUMAC_DEADLINE", "0.25"),
        ("SUMAC_JOIN_TIMEOUT", "5"),
        ("SUMAC_BIND", "10.0.0.7, 10.1.0.7,10.2.0.7"),
        ("SUMAC_IFNAME", "^docker,lo"),
        ("SUMAC_TRANSPORT", "verbs"),
        ("SUMAC_VERBS", "mlx5_0:1"),
        ("SUMAC_RECOVER", "0"),
        ("SUMAC_PROGRESS", "thread"),
        ("SUMAC_MEMORY", "plain"),
        ("SUMAC_WAIT_POLICY", "yield"),
        ("SUMAC_TENANT", "team-a"),
        ("SUMAC_WAIT_FOR_TREE", "90"),
        ("SUMAC_STRAGGLER", "partial:1.5"),
        ("SUMAC_TREES", "8"),
        ("SUMAC_HYBRID", "1"),
        ("SUMAC_RAB", "1"),
        ("SUMAC_UDP_MAX_PACKET", "8192"),
        ("SUMAC_UDP_PEER", "10.0.0.1:7000"),
        ("SUMAC_UDP_RECEIVE_BUFFER", "65536"),
        ("SUMAC_UDP_SEND_BUFFER", "32768"),
        ("SUMAC_UDP_GSO", "off"),
        ("SUMAC_UDP_GRO", "off"),
        ("SUMAC_UDP_SPIN_US", "15"),
        ("SUMAC_TRAFFIC_CLASS", "184"),
    ];
    let read = config(&set).expect("all are valid");
    let by_file: String = set.iter().skip(2).map(|(name, value)| format!("{} = '{value}'\n", key_of(name))).collect();
    let environment = [("SUMAC_PORT", "9"), ("SUMAC_JOB", "j")];
    let by_file = config_with(&environment, &by_file).expect("all are valid");
    assert_eq!(format!("{by_file:?}"), format!("{read:?}"));
    let mut expected = JoinConfig::new(SocketAddr::from(([127, 0, 0, 1], 9)), "j", 1, 2);
    (expected.host, expected.embedded_controller) = (Some("node7".into()), true);
    (expected.order, expected.algo) = (Order::TreeFold, Algo::Ring);
    (expected.deadline, expected.join_timeout) = (Duration::from_millis(250), Duration::from_secs(5));
    expected.bind = "10.0.0.7".parse().expect("an address");
    expected.rails = ["10.1.0.7", "10.2.0.7"].map(|addr| addr.parse().expect("an address")).into();
    expected.interfaces = Some("^docker,lo".parse().expect("a filter"));
    (expected.transport, expected.verbs) = (Transport::Verbs, Some("mlx5_0:1".into()));
    (expected.recover, expected.tenant) = (false, "team-a".into());
    (expected.wait_for_tree, expected.straggler) =
        (Duration::from_secs(90), Straggler::Partial(Duration::from_millis(1500)));
    (expected.trees, expected.hybrid, expected.rab) = (8, true, true);
    expected.progress = Some(Progress::Thread);
    (expected.memory, expected.wait_policy) = (MemoryKind::Plain, WaitPolicy::Yield);
    expected.udp.max_packet_len_bytes = Some(8192);
    expected.udp.peer = Some("10.0.0.1:7000".parse().expect("an address"));
    (expected.udp.receive_buffer_bytes, expected.udp.send_buffer_bytes) = (65_536, 32_768);
    (expected.udp.gso, expected.udp.gro) = (Offload::Off, Offload::Off);
    expected.udp.spin = Duration::from_micros(15);
    expected.udp.traffic_class = "184".parse().expect("EF");
    assert_eq!(format!("{read:?}"), format!("{expected:?}"));
    assert!(set.iter().all(|(name, _)| KNOWN.contains(name)), "a variable is missing from KNOWN");
}

#[test]
fn controller_variable_beats_master_addr_and_port() {
    let read = |text| config(&[("SUMAC_CONTROLLER", text), ("MASTER_ADDR", "10.0.0.1"), ("SUMAC_PORT", "9")]);
    let given = read("[::1]:7850").expect("an address");
    assert_eq!(given.controller, "[::1]:7850".parse().expect("valid"));
    let named = read("localhost").expect("every system knows it");
    let all = named.controller_alternatives.iter().chain([&named.controller]);
    assert!(all.into_iter().all(|addr| addr.ip().is_loopback() && addr.port() == DEFAULT_PORT), "{named:?}");
    let error = read("localhost:port").expect_err("no port").to_string();
    assert!(error.contains("SUMAC_CONTROLLER") && error.contains("localhost:port"), "{error}");
}

#[test]
fn key_variables_give_a_key_and_their_errors_hide_it() {
    let secret = "07".repeat(32);
    let text = format!("# tenant ml\nsumac-key-v1 0000000000000009 {secret}\n");
    let key = config(&[("SUMAC_KEY", &text)]).expect("valid").key.expect("a key");
    assert_eq!((key.id().to_string(), key.reveal_secret().to_string()), ("0000000000000009".into(), secret.clone()));
    let both = config(&[("SUMAC_KEY", &text), ("SUMAC_KEY_FILE", "-")]).expect_err("ambiguous").to_string();
    let absent = config(&[("SUMAC_KEY_FILE", "/nonexistent/key")]).expect_err("no file").to_string();
    let malformed = config(&[("SUMAC_KEY", &text.replace("-v1", ""))]).expect_err("malformed").to_string();
    assert!(both.contains("one of them") && absent.contains("/nonexistent/key"), "{both} {absent}");
    assert!(malformed.contains("SUMAC_KEY") && malformed.contains("sumac key new"), "{malformed}");
    assert!([both, absent, malformed].iter().all(|error| !error.contains("0707")));
}

#[test]
fn transport_variable_beats_its_deprecated_name() {
    let old = config(&[("SUMAC_ATTACH", "shm")]).expect("the old name still works");
    assert_eq!(old.transport, Transport::Shm);
    let both = config(&[("SUMAC_ATTACH", "shm"), ("SUMAC_TRANSPORT", "udp")]).expect("both are valid");
    assert_eq!(both.transport, Transport::Udp);
}

#[test]
fn recover_variable_beats_its_deprecated_name() {
    let recover = |variables: &[_]| config(variables).expect("all are valid").recover;
    assert!(!recover(&[("SUMAC_REPAIR", "0")]), "the old name still works");
    assert!(recover(&[("SUMAC_REPAIR", "0"), ("SUMAC_RECOVER", "1")]));
    assert!(!recover(&[("SUMAC_REPAIR", "1"), ("SUMAC_RECOVER", "0")]));
}

#[test]
fn invalid_value_error_names_variable_value_and_choices() {
    for (name, value, selection_cache) in [
        ("SUMAC_TRANSPORT", "roce", "auto, udp, shm, verbs, rdma"),
        ("SUMAC_ATTACH", "roce", "auto, udp, shm, verbs, rdma"),
        ("SUMAC_PORT", "70000", "port"),
        ("RANK", "first", "number"),
        ("SUMAC_TENANT", "a=b", "letters, digits"),
        ("SUMAC_WAIT_FOR_TREE", "soon", "number of seconds"),
        ("SUMAC_DEADLINE", "-1", "number of seconds"),
        ("SUMAC_ORDER", "random", "arrival, fold, pairwise"),
        ("SUMAC_ALGO", "comet", "tree"),
        ("SUMAC_RECOVER", "maybe", "1, 0"),
        ("SUMAC_PROGRESS", "gpu", "caller, thread"),
        ("SUMAC_MEMORY", "pinned", "registered, plain"),
        ("SUMAC_WAIT_POLICY", "active", "auto, spin, yield, sleep"),
        ("SUMAC_STRAGGLER", "partial", "partial:SECONDS"),
        ("SUMAC_TREES", "many", "number of trees"),
        ("SUMAC_BIND", "eth0.invalid", "IP address"),
        ("SUMAC_BIND", "10.0.0.7,", "IP address"),
        (
            "SUMAC_BIND",
            "1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,\
          1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1",
            "lists 17 addresses; list at most 16",
        ),
        ("SUMAC_IFNAME", "^", "names no interface"),
        ("SUMAC_UDP_GSO", "on", "auto, off"),
        ("SUMAC_TRAFFIC_CLASS", "186", "give a multiple of 4, as 184"),
        ("SUMAC_TRAFFIC_CLASS", "256", "from 0 to 252"),
        ("SUMAC_EMBEDDED_CONTROLLER", "yes", "1, 0"),
    ] {
        let error = config(&[(name, value)]).expect_err("refused").to_string();
        assert!(error.contains(name) && error.contains(value) && error.contains(selection_cache), "{error}");
    }
}

#[test]
fn unknown_variable_warning_suggests_the_closest_name() {
    let text = |name| warning(name).map(|warning| warning.to_string());
    assert_eq!(
        text("SUMAC_TENNANT").as_deref(),
        Some("unknown environment variable SUMAC_TENNANT; did you mean SUMAC_TENANT?")
    );
    assert_eq!(text("SUMAC_COLOUR").as_deref(), Some("unknown environment variable SUMAC_COLOUR"));
    assert_eq!(text("SUMAC_ATTACH").as_deref(), Some("SUMAC_ATTACH is deprecated; use SUMAC_TRANSPORT"));
    for quiet in ["SUMAC_TRANSPORT", "SUMAC_TEST_ROLE", "SUMACH", "RANK"] {
        assert_eq!(text(quiet), None);
    }
}
