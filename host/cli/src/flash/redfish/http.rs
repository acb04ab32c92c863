//! Requests to one Redfish service, over TLS alone.
//!
//! Invariants:
//! - credentials and image go to the service that the URL names, whose certificate is checked: redirects are not
//!   followed, and links to other hosts are errors;
//! - answers have a limit of length and time.

use super::error::{RedfishError, messages_of_error};
use base64ct::{Base64, Encoding};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::Value;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};
use ureq::config::Config;
use ureq::http::{Response, Uri, header};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body, SendBody};
use zeroize::Zeroizing;

/// The longest answer. Inventories and tasks have some kilobytes.
const ANSWER_MAX_BYTES: u64 = 1 << 20;
/// The longest answer to a body without an own limit: how long a service may think about one.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// The longest time for a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// A user's name and password.
pub(super) struct Credentials {
    /// `NAME:PASSWORD` for HTTP's basic authentication (RFC 7617).
    pub(super) pair: Zeroizing<String>,
}

/// Certificates of the issuers that are trusted.
pub(super) type Issuers = Vec<Certificate<'static>>;

/// A Redfish service.
pub(super) struct Service {
    agent: Agent,
    /// `https://host:port`, without a slash.
    origin: String,
    authorization: Zeroizing<String>,
    /// The end of the time limit.
    deadline: Instant,
    limit: Duration,
}

/// An answer.
pub(super) struct Answer {
    pub(super) status: u16,
    /// The resource that was made or is to be watched.
    pub(super) location: Option<String>,
    /// Null if there is none.
    pub(super) body: Value,
}

impl Service {
    /// Name a service. `limit` is for all requests together.
    pub(super) fn new(
        url: &str,
        credentials: &Credentials,
        issuers: &Issuers,
        limit: Duration,
    ) -> Result<Self, RedfishError> {
        let origin = origin(url)?;
        // What ureq uses, and what an earlier call may have installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(issuers)).build();
        let config = Config::builder()
            .https_only(true)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_LIMIT))
            .tls_config(tls)
            .user_agent("sumac")
            .build();
        let encoded = Zeroizing::new(Base64::encode_string(credentials.pair.as_bytes()));
        let authorization = Zeroizing::new(format!("Basic {}", *encoded));
        Ok(Self { agent: config.new_agent(), origin, authorization, deadline: Instant::now() + limit, limit })
    }

    /// Return the time left, unless it is over.
    pub(super) fn left(&self, doing: &str) -> Result<Duration, RedfishError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let over = || RedfishError::TimeLimit { limit: self.limit, doing: doing.into() };
        Some(left).filter(|left| !left.is_zero()).ok_or_else(over)
    }

    /// Get a resource by its path, and return its object.
    pub(super) fn get(&self, path: &str) -> Result<Value, RedfishError> {
        let answer = self.get_any(path)?;
        if !answer.body.is_object() {
            return Err(RedfishError::Malformed { path: path.into(), why: "no object".into() });
        }
        Ok(answer.body)
    }

    /// Get what is at a path, also if it has no body.
    pub(super) fn get_any(&self, path: &str) -> Result<Answer, RedfishError> {
        let doing = format!("reading {path}");
        let limit = self.left(&doing)?.min(CALL_LIMIT);
        let request = self.agent.get(self.url(path)?).header(header::AUTHORIZATION, &*self.authorization);
        let request = request.config().timeout_global(Some(limit)).build();
        self.answer(path, &doing, request.call())
    }

    /// Post an object.
    pub(super) fn post(&self, path: &str, object: &Value) -> Result<Answer, RedfishError> {
        let text = object.to_string();
        self.post_body(path, "application/json", text.len() as u64, &mut text.as_bytes(), CALL_LIMIT)
    }

    /// Post a body of this length, within `limit`, or as long as there is time if that is longer.
    pub(super) fn post_body(
        &self,
        path: &str,
        content_type: &str,
        len_bytes: u64,
        mut body: &mut dyn Read,
        limit: Duration,
    ) -> Result<Answer, RedfishError> {
        let doing = format!("sending to {path}");
        let limit = self.left(&doing)?.min(limit);
        let request = self.agent.post(self.url(path)?).header(header::AUTHORIZATION, &*self.authorization);
        let request = request.header(header::CONTENT_TYPE, content_type).header(header::CONTENT_LENGTH, len_bytes);
        let request = request.config().timeout_global(Some(limit)).build();
        self.answer(path, &doing, request.send(SendBody::from_reader(&mut body)))
    }

    fn answer(
        &self,
        path: &str,
        doing: &str,
        called: Result<Response<Body>, ureq::Error>,
    ) -> Result<Answer, RedfishError> {
        let mut response = called.map_err(|error| self.failure(path, doing, error))?;
        let text = |name| {
            let value = response.headers().get(name)?;
            Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        let (status, location) = (response.status().as_u16(), text(header::LOCATION));
        if (300..400).contains(&status) {
            let location = location.unwrap_or_default();
            return Err(RedfishError::Redirect { path: path.into(), location });
        }
        let bytes = response.body_mut().with_config().limit(ANSWER_MAX_BYTES).read_to_vec();
        let bytes = bytes.map_err(|error| self.failure(path, doing, error))?;
        let parsed = serde_json::from_slice::<Value>(&bytes);
        if status >= 400 {
            // Not every error has a body in Redfish's form.
            let message = parsed.as_ref().map(messages_of_error).unwrap_or_default();
            return Err(RedfishError::Status { path: path.into(), status, message });
        }
        let body = match parsed {
            _ if bytes.is_empty() => Value::Null,
            parsed => parsed.map_err(|error| RedfishError::Malformed { path: path.into(), why: error.to_string() })?,
        };
        Ok(Answer { status, location, body })
    }

    fn failure(&self, path: &str, doing: &str, error: ureq::Error) -> RedfishError {
        let path = path.to_owned();
        match error {
            _ if self.left(doing).is_err() => RedfishError::TimeLimit { limit: self.limit, doing: doing.into() },
            ureq::Error::BodyExceedsLimit(limit_bytes) => RedfishError::TooLong { path, limit_bytes },
            ureq::Error::Rustls(error @ rustls::Error::InvalidCertificate(_)) => {
                RedfishError::Certificate { why: error.to_string() }
            }
            ureq::Error::Io(error) => match certificate_error(&error) {
                Some(why) => RedfishError::Certificate { why },
                None => RedfishError::Unreachable { path, why: error.to_string() },
            },
            error => RedfishError::Unreachable { path, why: error.to_string() },
        }
    }

    /// Return the URL of a link, which must be one of this service.
    fn url(&self, link: &str) -> Result<String, RedfishError> {
        self.path(link).map(|path| format!("{}{path}", self.origin))
    }

    /// Return the path of a link, which must be one of this service: a path, or a URL with its host and port.
    pub(super) fn path(&self, link: &str) -> Result<String, RedfishError> {
        let foreign = || RedfishError::ForeignLink { link: super::super::targets::shown(link) };
        let path = match link.strip_prefix(&self.origin) {
            Some(path) => path,
            None if link.starts_with('/') => link,
            None => return Err(foreign()),
        };
        // `//host/path` names another host, and so may what is no path.
        let is_path =
            path.starts_with('/') && !path.starts_with("//") && path.bytes().all(|byte| byte.is_ascii_graphic());
        if is_path { Ok(path.into()) } else { Err(foreign()) }
    }
}

/// Return the reason if a certificate is the cause of an error.
fn certificate_error(error: &std::io::Error) -> Option<String> {
    let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    matches!(error, rustls::Error::InvalidCertificate(_)).then(|| error.to_string())
}

/// Return `https://host:port` of the URL of a service.
fn origin(url: &str) -> Result<String, RedfishError> {
    let refused = |reason| RedfishError::Url { url: url.into(), reason };
    let uri = url.parse::<Uri>().map_err(|_| refused(""))?;
    let authority = uri.authority().filter(|authority| !authority.host().is_empty()).ok_or_else(|| refused(""))?;
    if uri.scheme_str() != Some("https") {
        return Err(refused(": without TLS, anyone on the way could read the credentials"));
    }
    if authority.as_str().contains('@') {
        return Err(refused(": credentials belong into a file, see --credentials"));
    }
    let is_root = matches!(uri.path(), "" | "/" | "/redfish" | "/redfish/v1" | "/redfish/v1/") && uri.query().is_none();
    if is_root { Ok(format!("https://{authority}")) } else { Err(refused("")) }
}

/// Return the issuers in a file, or those that this system trusts.
pub(super) fn issuers(file: Option<&Path>) -> anyhow::Result<Issuers> {
    let found = match file {
        Some(path) => {
            let why = |error| anyhow::anyhow!("--ca {}: {error}", path.display());
            CertificateDer::pem_file_iter(path).map_err(why)?.collect::<Result<Vec<_>, _>>().map_err(why)?
        }
        None => rustls_native_certs::load_native_certs().certs,
    };
    let what = match file {
        Some(path) => format!("--ca {}: no certificate in PEM form", path.display()),
        None => "this system trusts no issuer of certificates; name one with --ca".into(),
    };
    anyhow::ensure!(!found.is_empty(), what);
    Ok(found.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service() -> Service {
        let credentials = Credentials { pair: Zeroizing::new("a:b".into()) };
        Service::new("https://bmc:8443", &credentials, &Vec::new(), Duration::from_secs(1)).expect("a URL")
    }

    #[test]
    fn service_is_named_by_host_and_port_over_tls_and_without_credentials() {
        for (url, expected) in [
            ("https://bmc", "https://bmc"),
            ("https://10.0.0.7:8443/", "https://10.0.0.7:8443"),
            ("https://[fe80::1]/redfish/v1", "https://[fe80::1]"),
        ] {
            assert_eq!(origin(url).expect(url), expected);
        }
        for url in ["http://bmc", "bmc", "https://", "https://a:b@bmc", "https://bmc/x", "https://bmc/?x", "", "a b"] {
            assert!(origin(url).is_err(), "{url}");
        }
    }

    #[test]
    fn link_to_another_host_is_refused() {
        let service = service();
        for link in ["/redfish/v1/x", "https://bmc:8443/redfish/v1/x"] {
            assert_eq!(service.path(link).expect(link), "/redfish/v1/x");
        }
        let foreign = [
            "https://bmc/redfish/v1/x",
            "https://bmc:8443@evil/x",
            "https://bmc:84430/x",
            "//evil/x",
            "https://bmc:8443//evil/x",
            "http://bmc:8443/x",
            "x",
            "",
            "/a b",
            "/a\r\nHost: evil",
        ];
        for link in foreign {
            assert!(matches!(service.path(link), Err(RedfishError::ForeignLink { .. })), "{link}");
        }
    }
}
