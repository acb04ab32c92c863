//! Controllers and clusters in this process: for jobs that have no controller of their own, and for tests.

use crate::shared::blocking;
use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};
use sumac::controller::keys::{KeyStore, Principal};
use sumac::controller::proto::DEFAULT_TENANT;
use sumac::controller::{self, ControllerConfig};
use sumac::testing::{LocalCluster, LocalClusterConfig};

/// A controller in this process for the ranks that have its key. It knows no devices: jobs run on host collectives.
#[pyclass(frozen, module = "sumac._sumac")]
pub(crate) struct Controller {
    /// `None` once it is closed.
    running: Mutex<Option<controller::Controller>>,
    address: String,
    key: String,
    pid: u32,
}

#[pymethods]
impl Controller {
    /// Listen on an address, `IP:PORT`; port 0 selects any free one.
    #[new]
    fn new(listen: &str) -> PyResult<Self> {
        let mut store = KeyStore::default();
        let key = store.add_random(Principal::Tenant { name: DEFAULT_TENANT.into() });
        let key = key.map_err(|error| PyRuntimeError::new_err(error.to_string()))?.reveal().to_string();
        let mut config = ControllerConfig::new();
        config.listen = listen.parse().map_err(|error| PyValueError::new_err(format!("listen {listen:?}: {error}")))?;
        config.keys = Some(Arc::new(store));
        let running = controller::Controller::start(config);
        let running = running.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        let address = running.local_addr().to_string();
        Ok(Self { running: Mutex::new(Some(running)), address, key, pid: std::process::id() })
    }

    /// The address that it listens on.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// The key that ranks connect with.
    #[getter]
    fn key(&self) -> &str {
        &self.key
    }

    /// Wait until it has no jobs, at most for `timeout` seconds, and stop. Returns whether it had none.
    fn close(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let limit = crate::request::seconds(timeout)?;
        if std::process::id() != self.pid {
            return Ok(false);
        }
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(running) = running else { return Ok(true) };
        blocking(py, move || running.wait_until_idle(limit))
    }
}

/// A controller, emulated devices and the environments of ranks, for tests of programs.
#[pyclass(frozen, module = "sumac._sumac")]
pub(crate) struct Cluster {
    running: Mutex<Option<Arc<LocalCluster>>>,
}

impl Cluster {
    fn running(&self) -> PyResult<Arc<LocalCluster>> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).clone();
        running.ok_or_else(|| PyRuntimeError::new_err("the cluster has stopped"))
    }

    fn device(&self, device: usize) -> PyResult<Arc<LocalCluster>> {
        let running = self.running()?;
        match running.device_names().len() {
            len if device < len => Ok(running),
            len => Err(PyIndexError::new_err(format!("device {device}; the cluster has {len}"))),
        }
    }
}

#[pymethods]
impl Cluster {
    /// Start a controller and devices, and wait until the devices have registered.
    #[new]
    fn new(py: Python<'_>, ranks: u32, levels: u8, devices: usize, transport: &str) -> PyResult<Self> {
        let mut config = LocalClusterConfig::new(ranks);
        let transport = transport
            .parse()
            .map_err(|error: sumac::controller::proto::UnknownTransport| PyValueError::new_err(error.to_string()));
        (config.levels, config.devices, config.transport) = (levels, devices, transport?);
        let running = blocking(py, || LocalCluster::start_with(config))?;
        let running = running.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        Ok(Self { running: Mutex::new(Some(Arc::new(running))) })
    }

    /// The environments of the ranks of a new job, for programs that join by their environment.
    fn environments(&self) -> PyResult<Vec<Vec<(&'static str, String)>>> {
        Ok(self.running()?.environments())
    }

    /// The numbers of the devices that trees of running jobs use.
    fn devices_in_use(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        let running = self.running()?;
        blocking(py, move || running.devices_in_use())
    }

    /// Kill a device, as if its process had died.
    fn kill_device(&self, py: Python<'_>, device: usize) -> PyResult<()> {
        let running = self.device(device)?;
        blocking(py, move || running.kill_device(device))
    }

    /// Start a device again that was killed.
    fn start_device(&self, py: Python<'_>, device: usize) -> PyResult<()> {
        let running = self.device(device)?;
        let started = blocking(py, move || running.start_device(device))?;
        started.map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// Stop everything.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        blocking(py, move || drop(running))
    }
}
