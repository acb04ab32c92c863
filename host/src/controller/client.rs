//! A client's connection to a controller.

use super::proto::{ClientReply, ClientRequest, JoinRefusal, JoinRequest, Membership, StatusReport};
use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{FrameReader, Greeting, StreamError, send};
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Why a controller could not be asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Not reached.
    #[error("no controller at {addr}: {source}; start one with `sumac controller`")]
    Connect {
        /// The address.
        addr: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The connection broke, or what came was not a controller's.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// It would not.
    #[error(transparent)]
    Refused(#[from] JoinRefusal),
    /// The other ranks did not come in time.
    #[error("not all {world} ranks of job {job:?} have joined within {} s", timeout.as_secs())]
    Timeout {
        /// The job.
        job: String,
        /// How many ranks it has.
        world: u32,
        /// How long this one waited.
        timeout: Duration,
    },
    /// It answered something else.
    #[error("the controller answered what was not asked; it is of another version")]
    Answer,
}

/// A rank's connection while it takes part in a job.
#[derive(Debug)]
pub struct Session {
    stream: TcpStream,
    watcher: Option<JoinHandle<()>>,
}

fn connect(addr: SocketAddr) -> Result<(TcpStream, FrameReader<TcpStream>), ClientError> {
    let unreached = |source| ClientError::Connect { addr, source };
    let mut stream = TcpStream::connect_timeout(&addr, CONNECT_TIMEOUT).map_err(unreached)?;
    stream.set_nodelay(true).map_err(unreached)?;
    let reader = FrameReader::new(stream.try_clone().map_err(unreached)?);
    send(&mut stream, &Greeting::Client)?;
    Ok((stream, reader))
}

/// Ask a controller for its state.
///
/// # Errors
/// [`ClientError`] if it can't be reached or answers something else.
pub fn status(addr: SocketAddr) -> Result<StatusReport, ClientError> {
    let (mut stream, mut reader) = connect(addr)?;
    stream.set_read_timeout(Some(STATUS_TIMEOUT)).map_err(StreamError::from)?;
    send(&mut stream, &ClientRequest::Status)?;
    match reader.recv()? {
        ClientReply::Status(report) => Ok(report),
        _ => Err(ClientError::Answer),
    }
}

impl Session {
    /// Join a job and wait until all its ranks have, at most `timeout`. From then on, `on_lost` is called (on a
    /// thread of its own) with each rank that dies.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn join(
        addr: SocketAddr,
        request: JoinRequest,
        timeout: Duration,
        on_lost: impl Fn(Rank) + Send + 'static,
    ) -> Result<(Self, Membership), ClientError> {
        Self::join_on(addr, request, Vec::new(), timeout, on_lost)
    }

    /// The same on devices of the job's choice, each the parent of the next: the root first, all ranks at the last
    /// one. For tests of single links; no fabric is asked. No device is as [`Session::join`].
    ///
    /// # Errors
    /// [`ClientError`]. A device that is not connected is no error: it is why [`Membership::tree`] is none.
    pub fn join_on(
        addr: SocketAddr,
        request: JoinRequest,
        devices: Vec<String>,
        timeout: Duration,
        on_lost: impl Fn(Rank) + Send + 'static,
    ) -> Result<(Self, Membership), ClientError> {
        let (mut stream, mut reader) = connect(addr)?;
        let (job, world) = (request.job.clone(), request.world);
        let join =
            if devices.is_empty() { ClientRequest::Join(request) } else { ClientRequest::JoinOn { request, devices } };
        send(&mut stream, &join)?;
        let deadline = Instant::now() + timeout;
        stream.set_read_timeout(Some(timeout.max(Duration::from_millis(1)))).map_err(StreamError::from)?;
        let membership = match reader.recv() {
            Ok(ClientReply::Joined(membership)) => *membership,
            Ok(ClientReply::Refused(refusal)) => return Err(refusal.into()),
            Ok(_) => return Err(ClientError::Answer),
            Err(StreamError::Io(error))
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
                    && Instant::now() >= deadline =>
            {
                return Err(ClientError::Timeout { job, world, timeout });
            }
            Err(error) => return Err(error.into()),
        };
        stream.set_read_timeout(None).map_err(StreamError::from)?;
        let watcher = std::thread::Builder::new().name("controller".into()).spawn(move || {
            while let Ok(reply) = reader.recv() {
                if let ClientReply::RankLost(rank) = reply {
                    on_lost(rank);
                }
            }
        });
        let watcher = watcher.map_err(StreamError::from)?;
        Ok((Self { stream, watcher: Some(watcher) }, membership))
    }

    /// Tell the controller that this rank is done.
    pub fn leave(mut self) {
        // A controller that is gone has nothing to release.
        let _ = send(&mut self.stream, &ClientRequest::Leave);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Ends the watcher's read; what was sent before still arrives. Fails only if the peer was faster.
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Covers a device that does not answer the controller.
const STATUS_TIMEOUT: Duration = Duration::from_secs(30);
