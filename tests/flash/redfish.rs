//! Updates through an emulated BMC (`bmc.py`), which also fails in the ways of a hostile or broken service.
//!
//! Needs python3 and openssl, as all tests do.

mod site;

use super::success::tail;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use site::{Bmc, Ran, Site, certify};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

const DPU_OS: &str = "/redfish/v1/UpdateService/FirmwareInventory/DPU_OS";
const UPDATES: &str = "/redfish/v1/UpdateService";
const PUSH: &str = "/redfish/v1/UpdateService/update-multipart";
/// With characters that a shell, a URL or a header would mistake.
const USER: &str = "root:s3cr€t:'&%40";

/// Return the SHA-256 of some bytes, in hexadecimal.
fn digest(bytes: &[u8]) -> String {
    sumac_firmware::manifest::hex(&sumac_firmware::manifest::sha256_of(bytes).expect("memory"))
}

#[test]
fn pushed_image_is_followed_to_the_end_of_its_task_and_changes_versions() {
    let site = Site::new();
    let bmc = site.bmc("bmc", json!({}));
    let ran = site.update(&bmc, &["--target", DPU_OS]);
    assert_eq!((ran.status, ran.end()), (Some(0), ("done", "DPU_OS: 1.0.0 -> 1.2.3")), "{}", ran.stderr);
    let updates = bmc.updates();
    assert_eq!(updates.len(), 1, "{updates:?}");
    // As the BMC writes what it gets to the card's boot FIFO, the agent finds its payload behind the stream.
    assert_eq!(updates[0]["UpdateFile"], digest(&[&site.bench.image[..], &tail(&site.bench)].concat()));
    assert_eq!(updates[0]["parameters"], json!({ "Targets": [DPU_OS] }));
    assert_eq!(updates[0]["parameters_type"], "application/json");
    let inventories = ran.of("inventory");
    assert_eq!(inventories[0]["versions"], json!({ "BMC": "24.10", "DPU_OS": "1.0.0", "NIC": null }));
    assert_eq!((&inventories[1]["when"], &inventories[1]["versions"]["DPU_OS"]), (&"after".into(), &"1.2.3".into()));
    let percents: Vec<_> = ran.of("task").iter().filter_map(|task| task["percent"].as_u64()).collect();
    assert_eq!(percents, [0, 40]);
    assert!(ran.stderr.contains("Writing the image."), "{}", ran.stderr);
    let written = ran.of("written").last().expect("progress")["bytes"].as_u64().expect("a number");
    assert!(written > site.bench.image.len() as u64);
    assert!(ran.events.iter().all(|event| event["event"] == "summary" || event["bmc"] == bmc.url()));
    assert!(ran.events.iter().all(|event| event["time"].is_string()));
    assert_eq!(ran.of("summary")[0]["counts"]["done"], 1);
}

#[test]
fn image_that_runs_from_memory_is_pushed_alone() {
    let site = Site::new();
    let bmc = site.bmc("bmc", json!({}));
    let ran = site.update(&bmc, &["--target", DPU_OS, "--ram"]);
    assert_eq!((ran.status, ran.end().0), (Some(0), "done"), "{}", ran.stderr);
    assert_eq!(bmc.updates()[0]["UpdateFile"], digest(&site.bench.image));
    assert!(ran.stderr.contains("from the cards' memory"), "{}", ran.stderr);
}

#[test]
fn service_gets_the_image_itself_if_it_is_the_checked_one() {
    let site = Site::new();
    let bmc = site.bmc("bmc", json!({ "push": null, "simple": true }));
    let uri = format!("{}/image.bfb", bmc.url());
    let ran = site.update(&bmc, &[]);
    assert_eq!((ran.status, ran.end().0), (Some(1), "refused"), "{}", ran.stderr);
    assert!(ran.end().1.contains("--image-uri"), "{:?}", ran.end());
    let whole = [&site.bench.image[..], &tail(&site.bench)].concat();
    fs::write(bmc.folder.join("served"), &whole).expect("written");
    let ran = site.update(&bmc, &["--image-uri", &uri, "--target", DPU_OS]);
    assert_eq!((ran.status, ran.end().0), (Some(0), "done"), "{}", ran.stderr);
    let request = json!({ "ImageURI": uri, "TransferProtocol": "HTTPS", "Targets": [DPU_OS] });
    assert_eq!(bmc.updates()[0]["request"], request);
    for (served, why) in
        // The stream alone would not be installed.
        [(&site.bench.image[..], "another file"), (&[&whole[..], b"x"].concat()[..], "another file")]
    {
        fs::write(bmc.folder.join("served"), served).expect("written");
        let ran = site.update(&bmc, &["--image-uri", &uri]);
        assert!(ran.status == Some(2) && ran.stderr.contains(why), "{}", ran.stderr);
    }
    let ran = site.update(&bmc, &["--image-uri", "scp://host/image.bfb"]);
    assert!(ran.end().0 == "refused" && ran.end().1.contains("protocol"), "{:?}", ran.end());
    assert_eq!(bmc.updates().len(), 1);
}

#[test]
fn dry_run_shows_the_inventory_and_asks_for_no_update() {
    let site = Site::new();
    let bmc = site.bmc("bmc", json!({}));
    let ran = site.update(&bmc, &["--dry-run"]);
    assert_eq!((ran.status, ran.end().0), (Some(0), "dry-run"), "{}", ran.stderr);
    assert!(ran.stderr.contains("DPU_OS 1.0.0") && bmc.updates().is_empty(), "{}", ran.stderr);
    let ran = site.update(&bmc, &["--target", "/redfish/v1/UpdateService/FirmwareInventory/DPU_0S"]);
    assert_eq!((ran.end().0, bmc.updates().len()), ("status", 0), "a component that does not exist");
}

/// What a service answers before it gets the image, and how the command ends.
#[test]
fn service_that_breaks_the_rules_gets_no_image() {
    let site = Site::new();
    let at = |path: &str, answer: Value| json!({ "answers": { path: answer } });
    let escape = "\u{1b}[2Jgone\u{7}";
    let secret = "https://127.0.0.1:9/";
    for (index, (script, outcome, message)) in [
        (json!({ "user": "root:other" }), "permission", "The user is not known."),
        (json!({ "enabled": false }), "refused", "disabled"),
        (json!({ "push": null }), "refused", "neither a multipart push nor SimpleUpdate"),
        (json!({ "max_image_bytes": 1000 }), "refused", "at most 1000"),
        (json!({ "push": "OTHERX/update" }), "protocol", "not its own"),
        (json!({ "push": "//127.0.0.1/update" }), "protocol", "not its own"),
        (at(UPDATES, json!({ "status": 302, "location": "OTHER/redfish/v1/UpdateService" })), "protocol", "redirects"),
        (at(UPDATES, json!({ "status": 308, "location": secret })), "protocol", "redirects"),
        (at(UPDATES, json!({ "endless": true })), "protocol", "exceeds 1048576 bytes"),
        (at(UPDATES, json!({ "raw": "<html>" })), "protocol", "not Redfish"),
        (at(UPDATES, json!({ "body": [1] })), "protocol", "no object"),
        (at(UPDATES, json!({ "status": 503, "raw": "<html>" })), "status", "status 503"),
        (at("/redfish/v1/", json!({ "body": {} })), "refused", "no UpdateService"),
        (at("/redfish/v1/", json!({ "body": { "Product": escape } })), "refused", "no UpdateService"),
        (
            at(
                "/redfish/v1/UpdateService/FirmwareInventory",
                json!({ "body": { "Members": vec![json!({ "@odata.id": DPU_OS }); 300] } }),
            ),
            "protocol",
            "more than 256 members",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let bmc = site.bmc(&format!("bmc{index}"), script.clone());
        let ran = site.update(&bmc, &[]);
        let (found, text) = ran.end();
        assert!(ran.status == Some(1) && found == outcome && text.contains(message), "{script}: {found}: {text}");
        assert!(ran.stderr.contains(&format!("error: {}: {text}", bmc.url())), "{}", ran.stderr);
        assert_eq!((bmc.updates().len(), bmc.lines("other.jsonl").len()), (0, 0), "{script}");
    }
}

#[test]
fn untrusted_certificate_gets_no_request() {
    let site = Site::new();
    for (name, ca, subject) in [("stranger", "ca2", "IP:127.0.0.1"), ("renamed", "ca", "DNS:other.lab")] {
        let folder = site.bench.path(name);
        fs::create_dir(&folder).expect("made");
        for file in ["ca.pem", "ca.key"] {
            fs::copy(site.bench.path(file), folder.join(file)).expect("copied");
        }
        certify(&folder, ca, subject);
        let bmc = site.bmc(name, json!({}));
        let ran = site.update(&bmc, &[]);
        assert_eq!((ran.status, ran.end().0), (Some(1), "certificate"), "{name}: {:?}", ran.end());
        assert!(bmc.seen().is_empty(), "{:?}", bmc.seen());
    }
    // Neither do this system's issuers know the test's.
    let bmc = site.bmc("bmc", json!({}));
    let args: Vec<_> = site.args(&bmc.url(), &[]).into_iter().collect();
    let at = args.iter().position(|arg| arg == "--ca").expect("there");
    let without: Vec<_> = args
        .iter()
        .enumerate()
        .filter(|(index, _)| *index != at && *index != at + 1)
        .map(|(_, arg)| arg.as_str())
        .collect();
    let ran = Ran::new(site.bench.sumac(&without));
    // A system without any issuer is refused before.
    let is_refused = ran.status == Some(2) && ran.stderr.contains("trusts no issuer");
    assert!((is_refused || ran.end().0 == "certificate") && bmc.seen().is_empty(), "{}", ran.stderr);
}

#[test]
fn failure_of_the_update_is_reported_as_the_service_tells_it() {
    let site = Site::new();
    let told = json!({ "error": { "message": "x", "@Message.ExtendedInfo": [
        { "Message": "The image is \u{1b}[31mnot signed.", "Resolution": "Sign it." },
    ] } });
    let failed =
        json!({ "TaskState": "Exception", "TaskStatus": "Critical", "Messages": [{ "Message": "eMMC is full." }] });
    let running = json!({ "TaskState": "Running" });
    for (index, (script, outcome, message)) in [
        (json!({ "accept": { "status": 400, "body": told } }), "status", "not signed. (Sign it.)"),
        (json!({ "accept": { "status": 413 } }), "status", "status 413"),
        (json!({ "accept": { "status": 307, "location": "OTHER/x" } }), "protocol", "redirects"),
        (json!({ "accept": { "status": 202 } }), "protocol", "without a task"),
        (json!({ "accept": { "status": 202, "location": "https://127.0.0.1:9/task" } }), "protocol", "not its own"),
        (json!({ "tasks": [running, failed] }), "task", "Exception: eMMC is full."),
        (json!({ "tasks": [{ "TaskState": "Completed", "TaskStatus": "Critical" }] }), "task", "Critical"),
        (json!({ "tasks": [{ "TaskState": "Cancelled" }] }), "task", "Cancelled"),
        (json!({ "tasks": [running, 404] }), "task", "has gone while it was Running"),
        (json!({ "tasks": [running, 401] }), "permission", "Gone, or busy."),
        (json!({ "tasks": [running, "drop"] }), "unreachable", "cannot reach"),
        (json!({ "tasks": [running, 503] }), "status", "status 503"),
    ]
    .into_iter()
    .enumerate()
    {
        let bmc = site.bmc(&format!("bmc{index}"), script.clone());
        let ran = site.update(&bmc, &["--gone-polls", "4"]);
        let (found, text) = ran.end();
        assert!(ran.status == Some(1) && found == outcome && text.contains(message), "{script}: {found}: {text}");
        assert_eq!((bmc.updates().len(), bmc.lines("other.jsonl").len()), (1, 0), "{script}");
    }
}

#[test]
fn update_without_a_task_is_done_once_it_is_accepted() {
    let site = Site::new();
    let bmc = site.bmc("bmc", json!({ "accept": { "status": 200, "body": { "Message": "Done." } } }));
    let ran = site.update(&bmc, &[]);
    assert_eq!((ran.status, ran.end()), (Some(0), ("done", "no version has changed")), "{}", ran.stderr);
}

#[test]
fn service_that_starts_again_during_the_update_is_waited_for() {
    let site = Site::new();
    let running = json!({ "TaskState": "Running" });
    let tasks = json!([running, "drop", 503, "drop", running, "drop", "drop", 500, { "TaskState": "Completed" }]);
    let bmc = site.bmc("bmc", json!({ "tasks": tasks }));
    let ran = site.update(&bmc, &["--gone-polls", "4"]);
    assert_eq!((ran.status, ran.end().0), (Some(0), "done"), "{:?}", ran.end());
}

/// The limits grow until the run comes that far before it, as machines differ in speed.
#[test]
fn task_or_answer_without_an_end_ends_at_the_time_limit() {
    let site = Site::new();
    for (index, (script, doing)) in [
        (json!({ "tasks": [{ "TaskState": "Running" }] }), "the task is Running"),
        (json!({ "tasks": ["hang"] }), "reading /redfish/v1/TaskService/Tasks/7"),
        (json!({ "answers": { UPDATES: { "hang": true } } }), "reading /redfish/v1/UpdateService)"),
        (json!({ "accept": { "hang": true } }), "sending to "),
    ]
    .into_iter()
    .enumerate()
    {
        let reaches = |timeout_s: &&str| {
            let bmc = site.bmc(&format!("bmc{index}-{timeout_s}"), script.clone());
            let ran = site.update(&bmc, &["--timeout", timeout_s]);
            assert_eq!((ran.status, ran.end().0), (Some(1), "time-limit"), "{script}: {:?}", ran.end());
            ran.end().1.contains(doing)
        };
        assert!(["2", "10", "50"].iter().any(reaches), "it never came to {doing}");
    }
}

#[test]
fn failing_service_does_not_stop_others() {
    let site = Site::new();
    let good: Vec<_> = (0..3).map(|number| site.bmc(&format!("good{number}"), json!({}))).collect();
    let bad = site.bmc("bad", json!({ "tasks": [{ "TaskState": "Killed" }] }));
    let urls: Vec<_> = [&good[0], &bad, &good[1], &good[2]].map(Bmc::url).to_vec();
    let mut command = site.command(&urls.join(","), &["--parallel", "2"]);
    let ran = Ran::new(command.output().expect("it runs"));
    let summary = ran.of("summary")[0];
    assert_eq!(summary["counts"], json!({ "done": 3, "unchanged": 0, "failed": 1, "not_started": 0 }));
    let outcomes: Vec<_> =
        summary["cards"].as_array().expect("rows").iter().map(|row| (&row["bmc"], &row["outcome"])).collect();
    let expected = ["done", "task", "done", "done"].map(Value::from);
    let urls: Vec<Value> = urls.into_iter().map(Value::from).collect();
    assert_eq!(outcomes, urls.iter().zip(&expected).collect::<Vec<_>>());
    assert_eq!(ran.status, Some(1));
}

#[test]
fn signal_ends_the_push_and_the_wait_for_the_task() {
    let site = Site::new();
    let running = json!([{ "TaskState": "Running" }]);
    for (name, script, stage, message) in [
        ("push", json!({ "slow": true }), "pushing the image", "while the image was sent"),
        ("wait", json!({ "tasks": running }), "waiting for the task", "the service cannot be stopped from here"),
    ] {
        let bmc = site.bmc(name, script);
        // More than the buffers of a connection hold.
        let mut command = site.command(&bmc.url(), &[]);
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
        let mut stdout = BufReader::new(process.stdout.take().expect("a pipe"));
        let mut text = String::new();
        while !text.contains(stage) {
            assert_ne!(stdout.read_line(&mut text).expect("text"), 0, "{text}");
        }
        kill_process(Pid::from_child(&process), Signal::INT).expect("sent");
        stdout.read_to_string(&mut text).expect("text");
        let output = process.wait_with_output().expect("ended");
        let ran = Ran::new(Output { stdout: text.into_bytes(), ..output });
        assert_eq!((ran.status, ran.end().0), (Some(130), "interrupted"), "{name}: {}", ran.stderr);
        assert!(ran.end().1.contains(message), "{:?}", ran.end());
    }
}

#[test]
fn unsuitable_usage_is_refused_before_any_request() {
    let site = Site::new();
    let bmc = site.bmc("bmc", json!({}));
    let path = |name: &str| site.bench.path(name).display().to_string();
    fs::write(site.bench.path("open-user"), USER).expect("written");
    fs::set_permissions(site.bench.path("open-user"), Permissions::from_mode(0o644)).expect("own");
    let url = bmc.url();
    let plain = url.replace("https", "http");
    let with_user = url.replace("//", "//root:x@");
    let twice = format!("{url},{url}");
    for (urls, more, why) in [
        (&plain, &[][..], "without TLS"),
        (&with_user, &[], "credentials belong into a file"),
        (&twice, &[], "twice"),
        (&url, &["--credentials", &path("open-user")], "chmod 600"),
        (&url, &["--credentials", &path("absent")], "No such file"),
        (&url, &["--ca", &path("image.bfb")], "--ca"),
        (&url, &["--rshim", "rshim0"], "cannot be used with"),
        (&url, &["--allow-rollback"], "cannot be used with"),
    ] {
        let ran = Ran::new(site.command(urls, more).output().expect("it runs"));
        assert!(ran.status == Some(2) && ran.stderr.contains(why), "{more:?}: {}", ran.stderr);
    }
    // The image is checked first.
    fs::write(site.bench.path("image.bfb"), &site.bench.image[..1000]).expect("written");
    assert_eq!(site.update(&bmc, &[]).status, Some(2));
    assert!(bmc.seen().is_empty(), "{:?}", bmc.seen());
}

/// Python's pty module is the terminal.
#[test]
fn credentials_are_asked_for_on_a_terminal_and_not_echoed() {
    let site = Site::new();
    let bmc = site.bmc("bmc", json!({}));
    let args = site.args(&bmc.url(), &[]);
    let at = args.iter().position(|arg| arg == "--credentials").expect("there");
    let without: Vec<_> = [&args[..at], &args[at + 2..]].concat();
    let script = "
import os, pty, sys, termios
name, password = sys.argv[1].split(':', 1)
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.argv[2], sys.argv[2:])
shown = b''
def until(text):
    global shown
    while text not in shown:
        shown += os.read(terminal, 4096)
until(b'BMC user: ')
os.write(terminal, name.encode() + b'\\n')
until(b'Password: ')
# The echo ends just after the prompt, and a person types later.
while termios.tcgetattr(terminal)[3] & termios.ECHO:
    os.sched_yield()
os.write(terminal, password.encode() + b'\\n')
try:
    while piece := os.read(terminal, 4096):
        shown += piece
except OSError:
    pass
sys.stdout.buffer.write(shown)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";
    let mut command = Command::new("python3");
    command
        .args(["-c", script, USER, env!("CARGO_BIN_EXE_sumac")])
        .args(without)
        .env_remove("HTTPS_PROXY")
        .stdin(Stdio::null());
    let output = command.output().expect("python3");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{shown}{}", String::from_utf8_lossy(&output.stderr));
    assert!(shown.contains("DPU_OS: 1.0.0 -> 1.2.3") && !shown.contains("s3cr"), "{shown}");
    // Without a terminal there is no one to ask.
    let mut detached = Command::new("setsid");
    let args = site.args(&bmc.url(), &[]);
    detached.arg(env!("CARGO_BIN_EXE_sumac")).args([&args[..at], &args[at + 2..]].concat()).stdin(Stdio::piped());
    let mut process = detached.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("setsid");
    process.stdin.take().expect("a pipe").write_all(b"root\n").expect("written");
    let ran = Ran::new(process.wait_with_output().expect("ended"));
    assert!(ran.status == Some(2) && ran.stderr.contains("give --credentials"), "{}", ran.stderr);
}
