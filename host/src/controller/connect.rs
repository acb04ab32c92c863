//! How clients reach a controller: connections, key exchanges, and which of two controllers is the active one.

use super::limits::REPLY_LEN_MAX;
use super::proto::{ClientReply, ClientRequest, HostLead, JoinRefusal, Membership, PeerReport};
use super::session::ClientError;
use crate::transport::path::PathToProbe;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::secure::{self, ConnectError, ControlReader, ControlWriter, HandshakeError, Key, KeyRefusal};
use sumac_hal::ctrl::{FrameReader, Hello, StreamError, send};
use sumac_hal::traffic_class::TrafficClass;

/// Where a controller is, and the key to connect with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerAddr {
    /// The address.
    pub addr: SocketAddr,
    /// Further addresses, which are tried in turn: of the same controller, or of the other one of a pair.
    pub alternatives: Vec<SocketAddr>,
    /// The key. With a key, only a controller that has it is talked to; without, only one that uses none.
    pub key: Option<Key>,
    /// The traffic class of the connection.
    pub traffic_class: TrafficClass,
}

impl From<SocketAddr> for ControllerAddr {
    /// A controller without keys.
    fn from(addr: SocketAddr) -> Self {
        Self { addr, alternatives: Vec::new(), key: None, traffic_class: TrafficClass::default() }
    }
}

impl ControllerAddr {
    /// All addresses.
    pub(crate) fn all(&self) -> impl Iterator<Item = SocketAddr> {
        std::iter::once(self.addr).chain(self.alternatives.iter().copied())
    }
}

/// The two directions of a connection to a controller.
pub(super) type Link = (ControlWriter<TcpStream>, FrameReader<ControlReader<TcpStream>>);

/// A connection to the active controller.
pub(super) struct ActiveLink {
    pub(super) writer: ControlWriter<TcpStream>,
    pub(super) reader: FrameReader<ControlReader<TcpStream>>,
    /// The controller's term; 0 if it has no pair.
    pub(super) term: u64,
    /// How long the controller may be silent.
    pub(super) silence: Option<Duration>,
}

/// Connect to the first address at which a controller is active, whose term is not below `seen`. If none is, the error
/// is that of a standby, or else that of the first address.
pub(super) fn connect_active(controller: &ControllerAddr, seen: u64) -> Result<ActiveLink, ClientError> {
    let mut failed: Option<ClientError> = None;
    for addr in controller.all() {
        match connect_active_at(controller, addr, seen) {
            Ok(link) => return Ok(link),
            Err(error) if is_standby(&error) => failed = Some(error),
            Err(error) => failed = Some(failed.unwrap_or(error)),
        }
    }
    // There is at least one address.
    Err(failed.unwrap_or(ClientError::ReplanReply))
}

/// Connect to one address. A client that knows only this one does not ask for the term.
fn connect_active_at(controller: &ControllerAddr, addr: SocketAddr, seen: u64) -> Result<ActiveLink, ClientError> {
    if controller.alternatives.is_empty() {
        let (writer, reader) = connect(controller, addr, &Hello::Client)?;
        return Ok(ActiveLink { writer, reader, term: 0, silence: None });
    }
    let (writer, mut reader) = connect(controller, addr, &Hello::FailoverClient { seen })?;
    writer.get_ref().set_read_timeout(Some(CONNECT_TIMEOUT)).map_err(StreamError::from)?;
    let claim = match reader.recv()? {
        ClientReply::Leading(claim) if claim.term < seen => {
            return Err(ClientError::OldTerm { addr, term: claim.term, seen });
        }
        ClientReply::Leading(claim) => claim,
        ClientReply::Refused(refusal) => return Err(refusal.into()),
        _ => return Err(ClientError::ReplanReply),
    };
    let silence = (claim.silence_ms > 0).then(|| Duration::from_millis(claim.silence_ms.into()));
    writer.get_ref().set_read_timeout(silence).map_err(StreamError::from)?;
    Ok(ActiveLink { writer, reader, term: claim.term, silence })
}

/// Whether the controller is a standby.
pub(super) const fn is_standby(error: &ClientError) -> bool {
    matches!(error, ClientError::Refused(JoinRefusal::Standby { .. }))
}

/// Connect to one of the addresses. A controller that is too busy for a key exchange, or ends it, is tried again for a
/// while.
pub(super) fn connect(controller: &ControllerAddr, addr: SocketAddr, hello: &Hello) -> Result<Link, ClientError> {
    connect_within(controller, addr, hello, CONNECT_TIMEOUT)
}

fn connect_within(
    controller: &ControllerAddr,
    addr: SocketAddr,
    hello: &Hello,
    limit: Duration,
) -> Result<Link, ClientError> {
    let began = Instant::now();
    loop {
        match connect_once(controller, addr, hello, limit) {
            Err(ClientError::Key { source, .. }) if is_busy(&source) && began.elapsed() < limit => {
                std::thread::sleep(BUSY_INTERVAL);
            }
            connected => return connected,
        }
    }
}

fn connect_once(
    controller: &ControllerAddr,
    addr: SocketAddr,
    hello: &Hello,
    timeout: Duration,
) -> Result<Link, ClientError> {
    let unreached = |source| ClientError::Connect { addr, source };
    let stream = TcpStream::connect_timeout(&addr, timeout).map_err(unreached)?;
    controller.traffic_class.apply(&stream).map_err(unreached)?;
    stream.set_nodelay(true).map_err(unreached)?;
    let channel = controller.key.as_ref().map(|key| secure::connect_within(&stream, key, timeout));
    let channel = channel.transpose().map_err(|source| ClientError::Key { addr, source })?;
    let (sealer, opener) = channel.unzip();
    let reader = ControlReader::new(stream.try_clone().map_err(unreached)?, opener);
    let mut writer = ControlWriter::new(stream, sealer);
    send(&mut writer, hello)?;
    Ok((writer, FrameReader::with_limit(reader, REPLY_LEN_MAX)))
}

/// Whether a key exchange may succeed at once if it is tried again.
fn is_busy(error: &ConnectError) -> bool {
    match error {
        ConnectError::Handshake(HandshakeError::Refused { refusal, .. }) => *refusal == KeyRefusal::Busy,
        ConnectError::Io(error) => {
            matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
        }
        _ => false,
    }
}

/// Whether the controller was too busy to exchange keys in time: a rank that can wait tries again.
fn is_overloaded(error: &ClientError) -> bool {
    let ClientError::Key { source, .. } = error else { return false };
    match source {
        ConnectError::Timeout { .. } => true,
        ConnectError::Handshake(HandshakeError::Refused { refusal, .. }) => *refusal == KeyRefusal::Busy,
        _ => false,
    }
}

/// What to do about a failed key exchange.
pub(super) const fn key_advice(error: &ConnectError) -> &'static str {
    if let ConnectError::Timeout { .. } = error {
        return "; the controller is overloaded, or another program listens there";
    }
    let ConnectError::Handshake(HandshakeError::Refused { refusal, .. }) = error else { return "" };
    match refusal {
        KeyRefusal::NoKeys => "; leave the key out, or start the controller with --keys",
        KeyRefusal::Unknown | KeyRefusal::Wrong | KeyRefusal::Revoked | KeyRefusal::Expired => {
            "; get another one from the operator, who makes it with `sumac key new`"
        }
        _ => "",
    }
}

/// Report to the other controller of a pair, and return its report.
pub(super) fn report_to_peer(
    controller: &ControllerAddr,
    report: PeerReport,
    timeout: Duration,
) -> Result<PeerReport, ClientError> {
    let (mut stream, mut reader) = connect_within(controller, controller.addr, &Hello::Client, timeout)?;
    stream.get_ref().set_read_timeout(Some(timeout)).map_err(StreamError::from)?;
    send(&mut stream, &ClientRequest::Peer(report))?;
    match reader.recv()? {
        ClientReply::Peer(report) => Ok(report),
        ClientReply::Refused(refusal) => Err(refusal.into()),
        _ => Err(ClientError::ReplanReply),
    }
}

/// Why a rank could not join.
pub(super) enum JoinFailed {
    /// The other ranks did not join in time.
    Timeout,
    /// Another controller may take over, or this one be less busy.
    MayRetry(ClientError),
    Final(ClientError),
}

/// What a rank does for the controller while it waits for its place.
pub trait WhileJoining {
    /// Start a device for the ranks on this rank's host.
    ///
    /// # Errors
    /// The reason why there is none.
    fn lead(&mut self, host: HostLead) -> Result<(), String>;

    /// Return the longest packet that a path carries, in bytes; `None` if that is not known.
    fn probe(&mut self, path: &PathToProbe) -> Option<u32>;
}

impl<T: WhileJoining + ?Sized> WhileJoining for &mut T {
    fn lead(&mut self, host: HostLead) -> Result<(), String> {
        (**self).lead(host)
    }

    fn probe(&mut self, path: &PathToProbe) -> Option<u32> {
        (**self).probe(path)
    }
}

/// Does nothing, and says so.
pub(super) struct NothingWhileJoining;

impl WhileJoining for NothingWhileJoining {
    fn lead(&mut self, _host: HostLead) -> Result<(), String> {
        Err("it was not asked for".to_owned())
    }

    fn probe(&mut self, _path: &PathToProbe) -> Option<u32> {
        None
    }
}

/// Join at the active controller, and wait for the other ranks until `deadline`.
pub(super) fn join_at_active(
    controller: &ControllerAddr,
    join: &ClientRequest,
    deadline: Instant,
    tasks: &mut dyn WhileJoining,
) -> Result<(ActiveLink, Membership), JoinFailed> {
    let has_pair = !controller.alternatives.is_empty();
    let mut link =
        connect_active(controller, 0).map_err(|error| match is_standby(&error) || is_overloaded(&error) {
            true => JoinFailed::MayRetry(error),
            false => JoinFailed::Final(error),
        })?;
    let lost = |error: StreamError| {
        if has_pair && link.silence.is_some() {
            JoinFailed::MayRetry(error.into())
        } else {
            JoinFailed::Final(error.into())
        }
    };
    send(&mut link.writer, join).map_err(lost)?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let wait = link.silence.map_or(left, |silence| left.min(silence)).max(Duration::from_millis(1));
        link.writer.get_ref().set_read_timeout(Some(wait)).map_err(|error| lost(error.into()))?;
        return match link.reader.recv() {
            Ok(ClientReply::Leading(_)) if Instant::now() < deadline => continue,
            Ok(ClientReply::Leading(_)) => Err(JoinFailed::Timeout),
            Ok(ClientReply::LeadHost(host)) => {
                if let Err(why) = tasks.lead(host) {
                    send(&mut link.writer, &ClientRequest::HostDeviceFailed { why }).map_err(lost)?;
                }
                continue;
            }
            Ok(ClientReply::ProbePath(path)) => {
                let answer = ClientRequest::PathProbed { group: path.group, max_packet_len_bytes: tasks.probe(&path) };
                send(&mut link.writer, &answer).map_err(lost)?;
                continue;
            }
            Ok(ClientReply::Joined(membership)) => Ok((link, *membership)),
            Ok(ClientReply::Refused(refusal @ JoinRefusal::Standby { .. })) if has_pair => {
                Err(JoinFailed::MayRetry(refusal.into()))
            }
            Ok(ClientReply::Refused(refusal)) => Err(JoinFailed::Final(refusal.into())),
            Ok(_) => Err(JoinFailed::Final(ClientError::ReplanReply)),
            Err(StreamError::Io(error))
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
                    && Instant::now() >= deadline =>
            {
                Err(JoinFailed::Timeout)
            }
            Err(error) => Err(lost(error)),
        };
    }
}

/// How long an address may take to accept a connection.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause before a key exchange is tried again.
const BUSY_INTERVAL: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_has_the_traffic_class_of_the_address() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("bound");
        let traffic_class = TrafficClass::try_from(0x68).expect("AF31");
        let controller = ControllerAddr { traffic_class, ..addr.into() };
        let (writer, _) = connect(&controller, addr, &Hello::Client).expect("connected");
        assert_eq!(TrafficClass::of(writer.get_ref()).expect("a socket"), traffic_class);
    }
}
