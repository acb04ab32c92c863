//! Addresses: of a controller by number and name in both families, and of this host's ranks and devices.

mod common;

use common::{Server, exit_status, serve, stderr, stdout, sumac};
use serde_json::Value;
use std::process::{Child, Command, Output, Stdio};

/// Start a controller at an address of loopback, and return it with its address.
fn controller(listen: &str) -> (Server, String) {
    let mut controller = serve(&["controller", "--listen", listen]);
    let line = controller.line();
    (controller, line.strip_prefix("listening ").expect("an address").to_owned())
}

fn device(controller: &str, options: &[&str]) -> Server {
    let mut device = serve(&[&["device", "--name", "d", "--controller", controller], options].concat());
    assert_eq!(device.line(), "ready d");
    device
}

/// Return the address of the only device, as the controller reports it.
fn device_addr(controller: &str) -> String {
    let output = sumac(&["status", "--json", "--controller", controller]);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    let report: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    report["devices"][0]["data_addrs"][0]["Udp"].as_str().expect("an address").to_owned()
}

/// Start rank `rank` of two of a measurement.
fn rank(rank: &str, controller: &str, variables: &[(&str, &str)]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(["perf", "--json", "-b", "8", "-e", "64K", "-f", "8192", "-n", "2", "--algo", "tree,ring"]);
    command.args(["--transport", "udp", "--controller", controller]);
    command.env("SUMAC_RANK", rank).env("SUMAC_WORLD", "2").envs(variables.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started")
}

/// Run two ranks, and return the rows that rank 0 prints.
fn rows(controller: &str, variables: &[(&str, &str)]) -> Vec<Value> {
    let ranks = ["0", "1"].map(|number| rank(number, controller, variables));
    let outputs = ranks.map(|rank| rank.wait_with_output().expect("ended"));
    outputs.iter().for_each(|output| assert_eq!(exit_status(output), 0, "{}", stderr(output)));
    stdout(&outputs[0]).lines().map(|line| serde_json::from_str(line).expect("a row")).collect()
}

fn assert_tree_and_ring_work(controller: &str, variables: &[(&str, &str)]) {
    let rows = rows(controller, variables);
    let found: Vec<_> = rows.iter().map(|row| (row["path"].as_str(), row["wrong"].as_u64())).collect();
    assert_eq!(found, [(Some("tree"), Some(0)), (Some("ring"), Some(0))].repeat(2), "{rows:?}");
}

#[test]
fn ranks_devices_and_status_use_ipv6_where_the_controller_does() {
    let (_controller, addr) = controller("[::1]:0");
    assert!(addr.starts_with("[::1]:"), "{addr}");
    let _device = device(&addr, &[]);
    assert!(device_addr(&addr).starts_with("[::1]:"), "{}", device_addr(&addr));
    assert_tree_and_ring_work(&addr, &[]);
    let port = addr.rsplit(':').next().expect("a port");
    // `localhost` is of both families on most systems, and only one of them has the controller.
    let named = format!("localhost:{port}");
    let output = sumac(&["status", "--controller", &named]);
    if exit_status(&output) == 0 {
        assert_tree_and_ring_work(&named, &[]);
    } else {
        eprintln!("SKIPPED: localhost has no IPv6 address here");
    }
    let output = sumac(&["selftest", "--controller", &addr, "-n", "5", "-e", "64K"]);
    assert_eq!(exit_status(&output), 0, "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn device_of_a_named_controller_takes_the_family_that_answers() {
    for listen in ["127.0.0.1:0", "[::1]:0"] {
        let (_controller, addr) = controller(listen);
        let port = addr.rsplit(':').next().expect("a port");
        if exit_status(&sumac(&["status", "--controller", &format!("localhost:{port}")])) != 0 {
            eprintln!("SKIPPED: localhost is not {listen} here");
            continue;
        }
        let _device = device(&format!("localhost:{port}"), &[]);
        let ip = addr.rsplit_once(':').expect("an address").0;
        assert!(device_addr(&addr).starts_with(&format!("{ip}:")), "{} of {addr}", device_addr(&addr));
    }
}

#[test]
fn bind_and_ifname_choose_the_address_of_ranks_and_devices() {
    let (_controller, addr) = controller("127.0.0.1:0");
    let device = device(&addr, &["--bind", "127.0.0.5"]);
    assert!(device_addr(&addr).starts_with("127.0.0.5:"));
    assert_tree_and_ring_work(&addr, &[("SUMAC_BIND", "127.0.0.6")]);
    assert_tree_and_ring_work(&addr, &[("SUMAC_IFNAME", "=lo"), ("SUMAC_BIND", "localhost")]);
    drop(device);
}

/// Run a device that is expected to fail, or `doctor --env` as a rank.
fn refused(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
    command.args(args).env("SUMAC_RANK", "0").env("SUMAC_WORLD", "1").envs(variables.iter().copied());
    command.stdin(Stdio::null()).output().expect("the command runs")
}

#[test]
fn address_that_this_host_does_not_have_is_invalid_input_that_lists_the_interfaces() {
    let device = ["device", "--name", "d", "--controller", "127.0.0.1:9"];
    let doctor = ["doctor", "--env"];
    let perf = ["perf", "--controller", "127.0.0.1:9"];
    for (variable, value, named) in [
        // RFC 5737: no host has it.
        ("SUMAC_BIND", "192.0.2.1", "192.0.2.1, which is not an address of this host; interfaces that are up: lo ("),
        ("SUMAC_IFNAME", "=nonet7", "SUMAC_IFNAME==nonet7 selects no interface with an IPv4 address"),
        ("SUMAC_BIND", "::1", "::1 cannot reach the controller at 127.0.0.1"),
        ("SUMAC_BIND", "host.invalid", "host.invalid"),
        ("SUMAC_IFNAME", "^", "names no interface"),
    ] {
        for args in [&device[..], &doctor, &perf] {
            let output = refused(args, &[(variable, value)]);
            assert_eq!(exit_status(&output), 2, "{args:?} {value}: {}", stderr(&output));
            assert!(stderr(&output).contains(named), "{args:?} {value}: {}", stderr(&output));
        }
    }
}

/// A host with two networks, of which the controller is in the second: the script's namespace has no other.
const TWO_NETWORKS: &str = "
    ip link set lo up
    for net in 6 7; do
        ip link add eth$net type veth peer name peer$net && ip link set eth$net up && ip link set peer$net up &&
        ip addr add 10.$net.0.2/24 dev eth$net && ip -6 addr add fd0$net::2/64 dev eth$net nodad || exit 99
    done";

#[test]
fn default_address_is_the_one_that_routes_to_the_controller() {
    for (controller, ifname, found) in [
        ("10.7.0.1", "", "10.7.0.2"),
        ("10.6.0.1", "", "10.6.0.2"),
        ("[fd07::1]", "", "fd07::2"),
        ("10.7.0.1", "=eth6", "10.6.0.2"),
        ("10.7.0.1", "^eth7", "10.6.0.2"),
        ("[fd06::1]", "eth7", "fd07::2"),
    ] {
        let script = format!("{TWO_NETWORKS}\nexec {} doctor --env --json", env!("CARGO_BIN_EXE_sumac"));
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net", "sh", "-c", &script]).env("SUMAC_CONTROLLER", controller);
        command.env("SUMAC_RANK", "0").env("SUMAC_WORLD", "1").env("SUMAC_IFNAME", ifname);
        if ifname.is_empty() {
            command.env_remove("SUMAC_IFNAME");
        }
        let output = match command.output() {
            Ok(output) if exit_status(&output) == 0 => output,
            Ok(output) if !stdout(&output).is_empty() => panic!("{controller} {ifname}: {}", stdout(&output)),
            other => {
                let why = other.map_or_else(|error| error.to_string(), |output| stderr(&output));
                eprintln!("SKIPPED: no network namespaces or `ip` here: {why}");
                return;
            }
        };
        let report: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        assert_eq!(report["address"], found, "{controller} {ifname}");
    }
}
