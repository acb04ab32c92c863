//! How a rank joins: Python's keyword arguments as a [`JoinConfig`], and those of a call as [`CallOptions`].

use crate::errors::Failure;
use crate::names;
use crate::request::seconds;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use sumac::comm::{DEFAULT_PORT, Progress};
use sumac::{CallOptions, JoinConfig};

/// Describe a rank by the environment, which need not say which rank of which job it is if `settings` do. Settings
/// replace what the environment says.
pub(crate) fn join_config(py: Python<'_>, settings: &Bound<'_, PyDict>) -> PyResult<JoinConfig> {
    let given = |name: &str| settings.get_item(name).map(|value| value.filter(|value| !value.is_none()));
    let config = match (given("job")?, given("rank")?, given("world")?) {
        (Some(job), Some(rank), Some(world)) => {
            JoinConfig::from_env_for(job.extract::<String>()?, rank.extract()?, world.extract()?)
        }
        _ => JoinConfig::from_env(),
    };
    let mut config = config.map_err(|error| Failure::Join(Arc::new(error)).raise(py))?;
    config.progress.get_or_insert(Progress::Thread);
    for (name, value) in settings {
        if !value.is_none() {
            set(&mut config, &name.extract::<String>()?, &value)?;
        }
    }
    // Waits of this module are for what the thread completes: without it they would never end.
    if matches!(config.progress, Some(Progress::Caller)) {
        return Err(PyValueError::new_err(
            "setting progress: Python needs the thread; leave it out, or set it or SUMAC_PROGRESS to \"thread\"",
        ));
    }
    Ok(config)
}

/// What [`join`](crate::communicator::join) takes, each by the name and in the format of [`JoinConfig::set`].
const SETTINGS: [&str; 25] = [
    "controller",
    "embedded_controller",
    "key",
    "job",
    "rank",
    "world",
    "host",
    "order",
    "algo",
    "shape",
    "deadline",
    "join_timeout",
    "wait_for_tree",
    "bind",
    "transport",
    "recover",
    "hierarchical",
    "trees",
    "hybrid",
    "rab",
    "tenant",
    "straggler",
    "progress",
    "memory",
    "wait_policy",
];

fn set(config: &mut JoinConfig, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    if !SETTINGS.contains(&name) {
        let known = SETTINGS.join(", ");
        return Err(PyTypeError::new_err(format!("{name:?} is no setting; choose from {known}")));
    }
    config.set(name, &text(name, value)?).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Return a value as the variable of its setting has it.
fn text(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(text) = value.extract::<String>() {
        return Ok(text);
    }
    if let Ok(flag) = value.extract::<bool>() {
        return Ok(if flag { "1" } else { "0" }.into());
    }
    if let Ok(number) = value.extract::<i64>() {
        return Ok(number.to_string());
    }
    if let Ok(number) = value.extract::<f64>() {
        return Ok(number.to_string());
    }
    let found = value.get_type().name()?;
    Err(PyTypeError::new_err(format!("setting {name}: it takes a text, a number, True or False, not {found}")))
}

/// Options of one call, as Python passes them.
pub(crate) fn call_options(options: Option<&Bound<'_, PyDict>>) -> PyResult<CallOptions> {
    let mut call = CallOptions::default();
    for (name, value) in options.into_iter().flatten() {
        if value.is_none() {
            continue;
        }
        match name.extract::<String>()?.as_str() {
            "algo" => call.algo = Some(default("algo", &value)?.algo),
            "deadline" => call.deadline = Some(seconds(value.extract()?)?),
            "scalar" => call.scalar = Some(value.extract()?),
            "straggler" => call.straggler = Some(default("straggler", &value)?.straggler),
            name => {
                let text = format!("{name:?} is no option; choose from algo, deadline, scalar, straggler");
                return Err(PyTypeError::new_err(text));
            }
        }
    }
    Ok(call)
}

/// Read an option that is also a setting, the default of calls: in one format.
fn default(name: &str, value: &Bound<'_, PyAny>) -> PyResult<JoinConfig> {
    let mut config = JoinConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)), "", 0, 1);
    set(&mut config, name, value)?;
    Ok(config)
}

/// Parse a call's operator, and check it against the elements.
pub(crate) fn operator(kind: names::ElementKind, op: Option<&str>) -> PyResult<Option<sumac::ReduceOp>> {
    let op = op.map(names::operator).transpose()?;
    op.map_or(Ok(()), |op| kind.check(op))?;
    Ok(op)
}
