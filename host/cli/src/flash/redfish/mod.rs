//! `sumac flash --redfish`: update cards through their BMCs, on hosts without rshim (DMTF DSP0266, the schema
//! UpdateService).
//!
//! ```text
//! service root ──> UpdateService ──> FirmwareInventory ──> push, or SimpleUpdate ──> task ... ──> FirmwareInventory
//! ```
//!
//! Invariants: the image is checked before the first request; the credentials go to the named services alone, over TLS
//! whose certificates are checked ([`http`]); whatever a service answers, the command ends within its time limit.

mod credentials;
mod error;
mod http;
mod inventory;
mod task;
mod update;

use super::interrupts::Interrupts;
use super::one::Job;
use super::targets::{self, Reporter, Row};
use crate::exit::Failure as Exit;
use anyhow::{Context, anyhow};
use clap::Args;
use error::RedfishError;
use http::{Credentials, Issuers, Service};
use serde_json::json;
use std::io::Read;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use sumac_firmware::manifest::{hex, sha256_of};
use update::{Plan, Update};
use ureq::tls::{RootCerts, TlsConfig};

/// Options that are about cards of this host.
const OTHERS: [&str; 15] = [
    "rshim",
    "all",
    "continues",
    "if_different",
    "key_file",
    "config",
    "rootfs",
    "nic_mode",
    "runtime",
    "allow_rollback",
    "until",
    "tolerate_errors",
    "keep_log",
    "hosts",
    "follow_stdin",
];

/// The options for BMCs.
#[derive(Debug, Args)]
pub(crate) struct RedfishArgs {
    /// Update through these BMCs: https://HOST or https://HOST:PORT of their Redfish services; may be repeated
    #[arg(long = "redfish", value_name = "URL,...", value_delimiter = ',', conflicts_with_all = OTHERS)]
    pub(super) urls: Vec<String>,
    /// File whose first line is the BMCs' NAME:PASSWORD; `-` is stdin [default: ask on the terminal]
    #[arg(long, value_name = "FILE", requires = "urls")]
    credentials: Option<PathBuf>,
    /// Certificates (PEM) of the issuers of the BMCs' certificates [default: those that this system trusts]
    #[arg(long, value_name = "FILE", requires = "urls")]
    ca: Option<PathBuf>,
    /// Where the BMCs get the image themselves (SimpleUpdate), as https://HOST/PATH [default: push it]
    #[arg(long, value_name = "URI", requires = "urls")]
    image_uri: Option<String>,
    /// Components to update, as /redfish/v1/UpdateService/FirmwareInventory/DPU_OS [default: the BMC decides]
    #[arg(long = "target", value_name = "PATH", requires = "urls")]
    components: Vec<String>,
}

/// Update through the BMCs that the options name.
pub(super) fn run(job: &Job<'_>) -> Result<(), Exit> {
    let args = &job.args.redfish;
    let credentials = credentials::read(args.credentials.as_deref()).map_err(Exit::Input)?;
    let issuers = http::issuers(args.ca.as_deref()).map_err(Exit::Input)?;
    for (index, url) in args.urls.iter().enumerate() {
        Service::new(url, &credentials, &issuers, Duration::ZERO).map_err(Exit::input)?;
        if args.urls[..index].contains(url) {
            return Err(Exit::Input(anyhow!("--redfish names {url} twice")));
        }
    }
    let interrupts = Interrupts::watch()?;
    if let Some(uri) = &args.image_uri {
        check_image_at(uri, job, &issuers)?;
    }
    targets::run(("bmc", &args.urls), job.args.parallel.into(), job.args.json, &interrupts, |index, reporter| {
        let start = Instant::now();
        let updated = update(job, &args.urls[index], (&credentials, &issuers), reporter, &interrupts);
        let row = row(updated, start.elapsed());
        let Row { outcome, exit_status, message, seconds, .. } = &row;
        reporter.event(json!({ "event": "end", "outcome": outcome, "exit_status": exit_status, "message": message,
            "seconds": seconds }));
        vec![row]
    })
}

fn update(
    job: &Job<'_>,
    url: &str,
    (credentials, issuers): (&Credentials, &Issuers),
    reporter: &Reporter,
    interrupts: &Interrupts,
) -> Result<Option<Vec<String>>, RedfishError> {
    let (args, limits) = (&job.args.redfish, job.args.limits());
    let plan = Plan {
        image: &job.image.bytes,
        targets: &args.components,
        image_uri: args.image_uri.as_deref(),
        dry_run: job.args.dry_run,
        poll: limits.poll,
        gone_polls: limits.gone_polls,
    };
    let service = Service::new(url, credentials, issuers, limits.total)?;
    Update { service, plan, reporter, interrupts }.run()
}

fn row(updated: Result<Option<Vec<String>>, RedfishError>, time: Duration) -> Row {
    let seconds = time.as_secs_f64();
    let done = |outcome: &str, message: Option<String>| Row {
        card: None,
        serial: None,
        outcome: outcome.into(),
        exit_status: 0,
        message,
        seconds,
    };
    match updated {
        Ok(None) => done("dry-run", None),
        Ok(Some(changes)) if changes.is_empty() => done("done", Some("no version has changed".into())),
        Ok(Some(changes)) => done("done", Some(changes.join(", "))),
        Err(error) => Row::failed(error.name(), 1, &error.to_string(), seconds),
    }
}

/// Check that the image that BMCs will get is the one that was checked here, where its protocol allows that.
fn check_image_at(uri: &str, job: &Job<'_>, issuers: &Issuers) -> Result<(), Exit> {
    if !uri.contains("://") {
        return Err(Exit::Input(anyhow!("--image-uri {uri}: write PROTOCOL://HOST/PATH")));
    }
    if !(uri.starts_with("http://") || uri.starts_with("https://")) {
        note!("note: what {uri} has cannot be compared with the image, only http and https can");
        return Ok(());
    }
    let read = || -> anyhow::Result<[u8; 32]> {
        let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(issuers)).build();
        let config = ureq::Agent::config_builder().tls_config(tls).max_redirects(0);
        let agent = config.timeout_global(Some(job.args.timeout())).build().new_agent();
        let body = agent.get(uri).call()?.into_body().into_reader();
        // One byte more shows that it is longer.
        Ok(sha256_of(body.take(job.len_bytes() + 1))?)
    };
    let found = read().with_context(|| format!("--image-uri {uri}")).map_err(Exit::Input)?;
    let expected = sha256_of(job.image.bytes.contents()).map_err(Exit::run)?;
    if found != expected {
        let (found, expected) = (hex(&found[..8]), hex(&expected[..8]));
        return Err(Exit::input(RedfishError::OtherImage { uri: uri.into(), found, expected }));
    }
    Ok(())
}
