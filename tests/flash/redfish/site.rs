//! A site with an emulated BMC: certificates, credentials, and runs of the command.

use super::{PUSH, USER};
use crate::Bench;
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};

/// A BMC, which ends with this.
pub(super) struct Bmc {
    pub(super) folder: PathBuf,
    process: Child,
    _stdin: Option<ChildStdin>,
    port: u64,
}

/// A folder with certificates and an image.
pub(super) struct Site {
    pub(super) bench: Bench,
}

pub(super) fn openssl(folder: &Path, line: &str) {
    let output = Command::new("openssl").args(line.split_whitespace()).current_dir(folder).output().expect("openssl");
    assert!(output.status.success(), "{line}: {output:?}");
}

/// Make a certificate of an issuer `ca`, for a name of the form `IP:127.0.0.1`.
pub(super) fn certify(folder: &Path, ca: &str, name: &str) {
    if !folder.join(format!("{ca}.pem")).exists() {
        let subject = format!("-subj /CN={ca} -addext basicConstraints=critical,CA:TRUE");
        let line = format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {ca}.key -out {ca}.pem {subject} -days 2"
        );
        openssl(folder, &line);
    }
    openssl(
        folder,
        "req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out request.pem -subj /CN=bmc",
    );
    fs::write(folder.join("extensions"), format!("subjectAltName={name}\nbasicConstraints=critical,CA:FALSE\n"))
        .expect("written");
    let line = format!(
        "x509 -req -in request.pem -CA {ca}.pem -CAkey {ca}.key -CAcreateserial -out cert.pem -days 2 -extfile extensions"
    );
    openssl(folder, &line);
}

impl Site {
    pub(super) fn new() -> Self {
        let bench = Bench::new();
        certify(bench.folder.path(), "ca", "IP:127.0.0.1");
        fs::write(bench.path("bmc-user"), USER).expect("written");
        fs::set_permissions(bench.path("bmc-user"), Permissions::from_mode(0o600)).expect("own");
        Self { bench }
    }

    /// Start a BMC with a script, over the usual one.
    pub(super) fn bmc(&self, name: &str, script: Value) -> Bmc {
        let mut all = json!({
            "user": USER,
            "push": PUSH,
            "parts": { "BMC": "24.10", "DPU_OS": "1.0.0", "NIC": null },
            "after": { "BMC": "24.10", "DPU_OS": "1.2.3", "NIC": null },
            "tasks": [
                { "TaskState": "Starting", "PercentComplete": 0 },
                { "TaskState": "Running", "PercentComplete": 40, "Messages": [{ "Message": "Writing the image." }] },
                { "TaskState": "Completed", "PercentComplete": 100 },
            ],
        });
        for (key, value) in script.as_object().expect("an object") {
            all[key] = value.clone();
        }
        let folder = self.bench.path(name);
        fs::create_dir_all(&folder).expect("made");
        for file in ["cert.pem", "key.pem"] {
            if !folder.join(file).exists() {
                fs::copy(self.bench.path(file), folder.join(file)).expect("copied");
            }
        }
        fs::write(folder.join("script.json"), all.to_string()).expect("written");
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/flash/bmc.py");
        let mut start = Command::new("python3");
        start.arg(program).arg(&folder).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = start.spawn().expect("python3");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut line).expect("text");
        let ports: [u64; 2] = serde_json::from_str(&line).expect("ports");
        let stdin = process.stdin.take();
        Bmc { folder, process, _stdin: stdin, port: ports[0] }
    }

    pub(super) fn args(&self, urls: &str, more: &[&str]) -> Vec<String> {
        let path = |name: &str| self.bench.path(name).display().to_string();
        let files = [path("image.bfb"), path("pub.pem"), path("bmc-user"), path("ca.pem")];
        let args = ["flash", &files[0], "--key", &files[1], "--redfish", urls, "--json", "--poll-ms", "20"];
        let mut args: Vec<_> = args.iter().chain(more).map(|text| text.to_string()).collect();
        for (option, value) in [("--credentials", &files[2]), ("--ca", &files[3]), ("--timeout", &"300".into())] {
            if !more.contains(&option) {
                args.extend([option.into(), value.clone()]);
            }
        }
        args
    }

    pub(super) fn command(&self, urls: &str, more: &[&str]) -> Command {
        let args = self.args(urls, more);
        let mut command = self.bench.command(&args.iter().map(String::as_str).collect::<Vec<_>>());
        // The service is on this host.
        for name in ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
            command.env_remove(name);
        }
        command
    }

    pub(super) fn update(&self, bmc: &Bmc, more: &[&str]) -> Ran {
        Ran::new(self.command(&bmc.url(), more).output().expect("the command runs"))
    }
}

impl Bmc {
    pub(super) fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    pub(super) fn lines(&self, file: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.folder.join(file)).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// The requests so far.
    pub(super) fn seen(&self) -> Vec<Value> {
        self.lines("seen.jsonl")
    }

    /// The updates that were asked for.
    pub(super) fn updates(&self) -> Vec<Value> {
        self.seen().into_iter().filter(|request| request["method"] == "POST").collect()
    }
}

impl Drop for Bmc {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A run of the command.
pub(super) struct Ran {
    pub(super) status: Option<i32>,
    pub(super) events: Vec<Value>,
    stdout: String,
    pub(super) stderr: String,
}

impl Ran {
    pub(super) fn new(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        for text in [&stdout, &stderr] {
            assert!(!text.contains("s3cr"), "the password is shown: {text}");
            assert!(!text.contains('\x1b'), "a terminal would obey: {text:?}");
        }
        let events = stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Self { status: output.status.code(), events, stdout, stderr }
    }

    pub(super) fn of(&self, kind: &str) -> Vec<&Value> {
        self.events.iter().filter(|event| event["event"] == kind).collect()
    }

    /// The outcome and message of the only BMC.
    pub(super) fn end(&self) -> (&str, &str) {
        let ends = self.of("end");
        assert_eq!(ends.len(), 1, "{}{}", self.stdout, self.stderr);
        (ends[0]["outcome"].as_str().expect("text"), ends[0]["message"].as_str().unwrap_or_default())
    }
}
