//! An update of what a service manages: by a push of the image, or by the address where the service gets it.

use super::super::interrupts::Interrupts;
use super::super::targets::{Reporter, shown};
use super::error::RedfishError;
use super::http::{Answer, Service};
use super::inventory::Inventory;
use super::task::{self, Progress, Task};
use rustix::rand::{GetRandomFlags, getrandom};
use serde_json::{Value, json};
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use sumac_firmware::flash::SealedImage;
use sumac_firmware::manifest::hex;

/// The service root (DSP0266, "Service root").
const ROOT: &str = "/redfish/v1/";
/// The number of events about what was written of an image.
const WRITTEN_EVENTS: u64 = 16;
/// The longest push, if there is that much time.
const PUSH_LIMIT: Duration = Duration::from_secs(86_400);

/// What to update, and how.
pub(super) struct Plan<'a> {
    /// The image, and the payload that follows it if it is to be installed.
    pub(super) image: &'a SealedImage,
    /// The components to update; the service decides if there are none.
    pub(super) targets: &'a [String],
    /// Where the service gets the image.
    pub(super) image_uri: Option<&'a str>,
    pub(super) dry_run: bool,
    pub(super) poll: Duration,
    /// How many answers in a row may be missing.
    pub(super) gone_polls: u32,
}

/// How the image gets to the service.
enum Method {
    Push { path: String },
    Simple { path: String, uri: String, protocol: String },
}

/// One update.
pub(super) struct Update<'a> {
    pub(super) service: Service,
    pub(super) plan: Plan<'a>,
    pub(super) reporter: &'a Reporter,
    pub(super) interrupts: &'a Interrupts,
}

impl Update<'_> {
    /// Update, and return the changed versions; `None` after a dry run.
    pub(super) fn run(&self) -> Result<Option<Vec<String>>, RedfishError> {
        let root = self.service.get(ROOT)?;
        let text = |name: &str| root[name].as_str().map(shown);
        let known =
            [text("Vendor"), text("Product"), text("RedfishVersion").map(|version| format!("Redfish {version}"))];
        self.reporter.note(&known.into_iter().flatten().collect::<Vec<_>>().join(", "));
        let link = link(&root, "UpdateService").ok_or(RedfishError::NotOffered { why: "there is no UpdateService" })?;
        let offer = self.service.get(&link)?;
        let method = self.method(&offer)?;
        for target in self.plan.targets {
            self.service.get(target)?;
        }
        let before = self.inventory(&offer, "before")?;
        if self.plan.dry_run {
            return Ok(None);
        }
        self.check_interrupt("before anything was sent")?;
        let answer = match &method {
            Method::Push { path } => self.push(path)?,
            Method::Simple { path, uri, protocol } => {
                self.stage("asking the service to get the image");
                let mut request = json!({ "ImageURI": uri, "TransferProtocol": protocol });
                self.insert_targets(&mut request);
                self.service.post(path, &request)?
            }
        };
        self.follow(&answer)?;
        let after = self.inventory(&offer, "after")?;
        Ok(Some(before.changes(&after)))
    }

    /// Choose how the image gets there.
    fn method(&self, offer: &Value) -> Result<Method, RedfishError> {
        let refused = |why| Err(RedfishError::NotOffered { why });
        if offer["ServiceEnabled"] == false {
            return refused("the UpdateService is disabled");
        }
        let len_bytes = self.len_bytes();
        if let Some(limit_bytes) = offer["MaxImageSizeBytes"].as_u64().filter(|limit| len_bytes > *limit) {
            return Err(RedfishError::ImageTooLong { len_bytes, limit_bytes });
        }
        let simple = &offer["Actions"]["#UpdateService.SimpleUpdate"];
        match (self.plan.image_uri, offer["MultipartHttpPushUri"].as_str(), simple["target"].as_str()) {
            (Some(_), _, None) => refused("there is no SimpleUpdate; leave out --image-uri"),
            (Some(uri), _, Some(path)) => {
                let protocol = uri.split("://").next().unwrap_or_default().to_ascii_uppercase();
                let allowed = simple["TransferProtocol@Redfish.AllowableValues"].as_array();
                if allowed.is_some_and(|allowed| !allowed.iter().any(|allowed| *allowed == *protocol)) {
                    return refused("SimpleUpdate does not take the protocol of --image-uri");
                }
                Ok(Method::Simple { path: self.service.path(path)?, uri: uri.into(), protocol })
            }
            (None, Some(path), _) => Ok(Method::Push { path: self.service.path(path)? }),
            (None, None, Some(_)) => {
                refused("it gets images itself (SimpleUpdate): serve the image, and give --image-uri")
            }
            (None, None, None) => refused("neither a multipart push nor SimpleUpdate"),
        }
    }

    /// Return the length of the image and of what follows it, in bytes.
    fn len_bytes(&self) -> u64 {
        self.plan.image.len_bytes() + self.plan.image.tail_len_bytes()
    }

    /// Read and report the versions of what can be updated. A service without an inventory has an empty one.
    fn inventory(&self, offer: &Value, when: &str) -> Result<Inventory, RedfishError> {
        let found = match link(offer, "FirmwareInventory") {
            Some(link) => Inventory::read(&self.service, &link),
            None => Ok(Inventory::default()),
        };
        let inventory = match found {
            Err(RedfishError::Status { status: 404, .. }) => Inventory::default(),
            found => found?,
        };
        self.reporter.event(json!({ "event": "inventory", "when": when, "versions": inventory.json() }));
        self.reporter.note(&format!("{when}: {}", inventory.line()));
        Ok(inventory)
    }

    fn insert_targets(&self, request: &mut Value) {
        if !self.plan.targets.is_empty() {
            request["Targets"] = self.plan.targets.into();
        }
    }

    /// Push the image as multipart form data (DSP0266, "Multipart HTTP push updates"; RFC 7578).
    fn push(&self, path: &str) -> Result<Answer, RedfishError> {
        self.stage("pushing the image");
        let mut random = [0; 16];
        // Kernels since 3.17 have it, and 16 bytes never come in parts.
        let _ = getrandom(&mut random, GetRandomFlags::empty());
        let boundary = format!("sumac-{}", hex(&random));
        let mut parameters = json!({});
        self.insert_targets(&mut parameters);
        let head = format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"UpdateParameters\"\r\n\
             Content-Type: application/json\r\n\r\n{parameters}\r\n\
             --{boundary}\r\nContent-Disposition: form-data; name=\"UpdateFile\"; filename=\"image.bfb\"\r\n\
             Content-Type: application/octet-stream\r\n\r\n"
        );
        let tail = format!("\r\n--{boundary}--\r\n");
        let len_bytes = head.len() as u64 + self.len_bytes() + tail.len() as u64;
        let mut body = Watched {
            inner: head.as_bytes().chain(self.plan.image.contents()).chain(tail.as_bytes()),
            total_bytes: len_bytes,
            sent_bytes: 0,
            update: self,
        };
        let content_type = format!("multipart/form-data; boundary={boundary}");
        let sent = self.service.post_body(path, &content_type, len_bytes, &mut body, PUSH_LIMIT);
        // The reader's error ends it.
        self.check_interrupt("while the image was sent")?;
        sent
    }

    /// Follow the task of an accepted request to its end.
    fn follow(&self, accepted: &Answer) -> Result<(), RedfishError> {
        let Some(link) = task::link(accepted) else {
            return match accepted.status {
                202 => {
                    Err(RedfishError::Malformed { path: "the update".into(), why: "accepted without a task".into() })
                }
                _ => Ok(()),
            };
        };
        let path = self.service.path(&link)?;
        self.stage("waiting for the task");
        let (sender, signals) = channel();
        // The receiver may have gone.
        self.interrupts.listen(move |signal| sender.send(signal).unwrap_or_default());
        let (mut shown, mut missing) = (Progress::default(), 0);
        loop {
            let state = shown.state.clone().unwrap_or_else(|| "accepted".into());
            let left = self.service.left(&format!("the task is {state}"))?;
            match self.service.get_any(&path) {
                Ok(answer) => match task::read(&answer) {
                    Task::Done => return Ok(()),
                    Task::Failed { state, message } => return Err(RedfishError::Task { state, message }),
                    Task::Running(progress) => {
                        missing = 0;
                        self.show(&shown, &progress);
                        shown = progress;
                    }
                },
                Err(RedfishError::Status { status: 404, .. }) => return Err(RedfishError::TaskGone { path, state }),
                Err(RedfishError::TimeLimit { limit, doing }) => {
                    return Err(RedfishError::TimeLimit { limit, doing: format!("the task is {state}; {doing}") });
                }
                // It may be busy, or start again because of the update.
                Err(error) if is_passing(&error) && missing + 1 < self.plan.gone_polls => missing += 1,
                Err(error) => return Err(error),
            }
            wait(&signals, self.plan.poll.min(left))?;
        }
    }

    /// Report what is new about a task.
    fn show(&self, before: &Progress, now: &Progress) {
        if before == now {
            return;
        }
        let Progress { state, percent, messages } = now;
        self.reporter.event(json!({ "event": "task", "state": state, "percent": percent, "messages": messages }));
        if (&before.state, before.percent) != (state, *percent) {
            let percent = percent.map_or_else(String::new, |percent| format!(", {percent} %"));
            self.reporter.note(&format!("task: {}{percent}", state.as_deref().unwrap_or("going on")));
        }
        messages.iter().filter(|message| !before.messages.contains(message)).for_each(|text| self.reporter.note(text));
    }

    fn stage(&self, stage: &str) {
        self.reporter.event(json!({ "event": "stage", "stage": stage }));
        self.reporter.note(stage);
    }

    fn check_interrupt(&self, doing: &'static str) -> Result<(), RedfishError> {
        self.interrupts.signal().map_or(Ok(()), |_| Err(RedfishError::Interrupted { doing }))
    }
}

/// Whether an error may be over at the next request.
fn is_passing(error: &RedfishError) -> bool {
    matches!(error, RedfishError::Unreachable { .. } | RedfishError::Status { status: 500..=599, .. })
}

/// Wait for the next look at a task, or a signal.
fn wait(signals: &Receiver<i32>, time: Duration) -> Result<(), RedfishError> {
    let doing = "while the task goes on: the service cannot be stopped from here; do not cut the card's power";
    signals.recv_timeout(time).map_or(Ok(()), |_| Err(RedfishError::Interrupted { doing }))
}

/// Return the link to a resource.
fn link(object: &Value, name: &str) -> Option<String> {
    object[name]["@odata.id"].as_str().map(str::to_owned)
}

/// A body that reports how much of it was read, and ends with an error after a signal.
struct Watched<'a, R> {
    inner: R,
    total_bytes: u64,
    sent_bytes: u64,
    update: &'a Update<'a>,
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.update.interrupts.signal().is_some() {
            return Err(io::Error::other("interrupted"));
        }
        let len = self.inner.read(buffer)?;
        let part = |bytes: u64| bytes.saturating_mul(WRITTEN_EVENTS) / self.total_bytes.max(1);
        let (before, now) = (part(self.sent_bytes), part(self.sent_bytes + len as u64));
        self.sent_bytes += len as u64;
        if now > before {
            let (bytes, total) = (self.sent_bytes, self.total_bytes);
            self.update.reporter.event(json!({ "event": "written", "bytes": bytes, "total_bytes": total }));
        }
        Ok(len)
    }
}
