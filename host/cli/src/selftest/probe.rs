//! A rank in this process, alone on given devices, that sends packets over the links under test.
//!
//! It drives an endpoint directly, because a communicator of one rank would not use the network.
//!
//! Invariant: every result is compared with the contribution, because the sum of one rank is its own contribution.

use crate::cluster::ClusterError;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};
use sumac::controller::proto::{JoinRequest, Terms, Transport, TreeMembership};
use sumac::controller::{ClientError, ControllerAddr, Session};
use sumac::local_address::{self, LocalAddressError};
use sumac::transport::memory::{AttachError, AttachParams, Places, Remote, ZeroCopyDriver};
use sumac::transport::packets::TreeDriver;
use sumac::transport::packets::{Buffers, Endpoint, EndpointError, EndpointStats, Event, OpId, PostError};
use sumac::{Dtype, OpDesc, Order, Path, ReduceOp, WaitPolicy};
use sumac_hal::hosted::{HostedError, HostedPort};
use sumac_hal::ids::Rank;
use sumac_hal::port::Port;
use sumac_hal::shm::DeviceUsers;
use sumac_hal::traffic_class::TrafficClass;
use sumac_hal::udp::UdpConfig;
use thiserror::Error;

/// Why a link cannot be measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(super) enum ProbeError {
    /// The controller failed or refused.
    #[error(transparent)]
    Controller(#[from] ClientError),
    /// The controller gave no tree on these devices.
    #[error("{0}")]
    NoTree(String),
    /// No address of this host reaches the controller.
    #[error(transparent)]
    Address(#[from] LocalAddressError),
    /// The data port cannot be opened.
    #[error("data port: {0}")]
    Port(#[from] HostedError),
    /// The device does not accept a zero-copy rank.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The operation cannot be posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The operation ended without a result.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// There was no result before the deadline.
    #[error("no result within {} s", .0.as_secs_f64())]
    Deadline(Duration),
    /// A signal arrived, or a process of the cluster ended; no link is to blame.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The result differs from the contribution.
    #[error("{wrong} of {len} bytes of the result are wrong")]
    Wrong {
        /// Bytes that differ.
        wrong: usize,
        /// All bytes.
        len: usize,
    },
}

/// How a rank reaches its device.
#[derive(Debug, Clone)]
pub(super) struct Route {
    /// Packets over UDP or verbs, or zero-copy over RDMA.
    pub(super) transport: Transport,
    /// The RDMA port for verbs and RDMA.
    pub(super) link: String,
}

/// The rank's end of the link to its device.
enum Driver {
    Packets(Box<TreeDriver<HostedPort>>),
    ZeroCopy(Box<ZeroCopyDriver>),
}

impl Driver {
    fn post(&mut self, desc: OpDesc) -> Result<OpId, PostError> {
        match self {
            Self::Packets(driver) => driver.endpoint_mut().post(desc, Path::Tree, None),
            Self::ZeroCopy(driver) => driver.post(desc, Path::Tree, None, Places::default()),
        }
    }

    fn pump(&mut self, buffer: &mut OneBuffer) -> Option<Duration> {
        match self {
            Self::Packets(driver) => driver.pump(buffer),
            Self::ZeroCopy(driver) => driver.pump(buffer),
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        match self {
            Self::Packets(driver) => driver.wait(timeout),
            Self::ZeroCopy(driver) => driver.wait(timeout),
        }
    }

    fn poll_event(&mut self) -> Option<Event> {
        match self {
            Self::Packets(driver) => driver.endpoint_mut().poll_event(),
            Self::ZeroCopy(driver) => driver.poll_event(),
        }
    }

    fn stats(&self) -> EndpointStats {
        match self {
            Self::Packets(driver) => *driver.endpoint().stats(),
            Self::ZeroCopy(driver) => *driver.stats(),
        }
    }
}

/// The only rank of a job. Dropping it leaves the job in order, whatever the outcome of the test.
pub(super) struct Probe {
    session: Option<Session>,
    driver: Driver,
    buffer: OneBuffer,
    sent: Vec<u8>,
    /// The number of operations so far.
    salt: u64,
    timeout: Duration,
}

impl Probe {
    /// Join a job of one rank on `devices`, the root first.
    pub(super) fn join(
        controller: ControllerAddr,
        (job, terms): (String, Terms),
        devices: Vec<String>,
        (timeout, route): (Duration, &Route),
    ) -> Result<Self, ProbeError> {
        let local = SocketAddr::new(local_address::choose(controller.addr, Ipv4Addr::UNSPECIFIED.into(), None)?, 0);
        let verbs = (route.transport == Transport::Verbs).then_some(route.link.as_str());
        let port = HostedPort::open(local, &UdpConfig::default(), verbs)?;
        let request = JoinRequest {
            job,
            rank: Rank(0),
            world: 1,
            host: None,
            order: Order::Arrival,
            // No other rank connects to it.
            mesh_addr: local,
            recovery_addr: local,
            max_packet_len_bytes: u32::try_from(port.capabilities().max_packet_len_bytes).unwrap_or(u32::MAX),
            // Shared memory would bypass the links.
            transport: route.transport,
            machine: None,
            device_users: DeviceUsers::own(),
            terms,
        };
        let (session, membership) = Session::join_on(controller, request, devices, timeout, |_| None)?;
        let tree = membership.tree.map_err(ProbeError::NoTree)?;
        if tree.parents.is_empty() || tree.window_max == 0 {
            return Err(ProbeError::NoTree(format!("the tree of leaf {:?} has no address to send to", tree.leaf)));
        }
        let driver = if route.transport == Transport::Rdma {
            let params = attach_params(&tree, membership.table.version, local, &route.link)?;
            Driver::ZeroCopy(Box::new(ZeroCopyDriver::attach(&params)?))
        } else {
            // A single rank does not share results with others.
            let endpoint = Endpoint::new(tree.endpoint((Rank(0), 1), None, membership.table.version));
            Driver::Packets(Box::new(TreeDriver::new(endpoint, port)))
        };
        Ok(Self { session: Some(session), driver, buffer: OneBuffer(Vec::new()), sent: Vec::new(), salt: 0, timeout })
    }

    /// Reduce `len_bytes` bytes of 64-bit words through the devices, and return the time.
    pub(super) fn round_trip(&mut self, len_bytes: usize) -> Result<Duration, ProbeError> {
        self.fill(len_bytes);
        let start = Instant::now();
        let desc = OpDesc::all_reduce(Dtype::U64, ReduceOp::Sum, (len_bytes / 8) as u64);
        let op = self.driver.post(desc)?;
        loop {
            let next = self.driver.pump(&mut self.buffer);
            if self.is_complete(op)? {
                break;
            }
            let left = self.timeout.checked_sub(start.elapsed()).ok_or(ProbeError::Deadline(self.timeout))?;
            let wait = next.map_or(left, |next| next.min(left));
            if !wait.is_zero() {
                self.driver.wait(Some(wait));
            }
        }
        let time = start.elapsed();
        let wrong = self.buffer.0.iter().zip(&self.sent).filter(|(received, sent)| received != sent).count();
        if wrong > 0 {
            return Err(ProbeError::Wrong { wrong, len: len_bytes });
        }
        Ok(time)
    }

    /// Receive pending packets and return the counters.
    pub(super) fn stats(&mut self) -> EndpointStats {
        let _ = self.driver.pump(&mut self.buffer);
        self.driver.stats()
    }

    /// Fill the buffer with values that no other operation of this length has had.
    fn fill(&mut self, len_bytes: usize) {
        self.salt += 1;
        let salt = self.salt;
        self.sent.clear();
        let words = (0..(len_bytes / 8) as u64).map(|word| (word ^ salt.rotate_left(32)).wrapping_mul(ODD));
        self.sent.extend(words.flat_map(u64::to_le_bytes));
        self.buffer.0.clone_from(&self.sent);
    }

    /// Handle pending events and return whether `op` is complete.
    fn is_complete(&mut self, op: OpId) -> Result<bool, ProbeError> {
        while let Some(event) = self.driver.poll_event() {
            match event {
                Event::Completed(done) if done == op => return Ok(true),
                Event::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        Ok(false)
    }
}

/// Describe how to attach to a leaf device over RDMA.
fn attach_params(
    tree: &TreeMembership,
    table_version: u32,
    local: SocketAddr,
    link: &str,
) -> Result<AttachParams, ProbeError> {
    let addr = tree.attach.as_ref().and_then(|attach| attach.remote);
    let addr = addr.ok_or_else(|| ProbeError::NoTree(format!("device {:?} accepts no RDMA", tree.leaf)))?;
    let remote = Remote { addr, link: link.to_owned(), prefer: local.ip(), traffic_class: TrafficClass::default() };
    Ok(AttachParams {
        device: tree.leaf.clone(),
        socket: String::new(),
        remote: Some(remote),
        group: tree.group,
        epoch: tree.epoch,
        child: tree.child,
        key: tree.key,
        rank: Rank(0),
        ranks: 1,
        ranks_here: 1,
        wait_policy: WaitPolicy::default(),
        chunk_len_bytes: tree.chunk_len_bytes,
        window_max: tree.window_max,
        table_version,
    })
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            session.leave();
        }
    }
}

/// The buffer of the one operation that is in flight.
struct OneBuffer(Vec<u8>);

impl Buffers for OneBuffer {
    fn input(&self, _op: OpId) -> &[u8] {
        &self.0
    }

    fn output(&mut self, _op: OpId) -> &mut [u8] {
        &mut self.0
    }
}

/// Spreads consecutive numbers over all bits (2^64 divided by the golden ratio; Knuth, TAOCP 3, 6.4).
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
