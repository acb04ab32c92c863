//! The agent as a service, and a service manager that starts it again when it says so.

use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use sumac_agent::{init, runtime};

/// The argument that makes this executable the agent.
pub(crate) const AGENT: &str = "agent";

/// The exit status with which the agent asks to be started again.
const RESTART_STATUS: u8 = 75;

/// Be the agent, as its own program is.
pub(crate) fn run_agent(words: &[String]) -> ExitCode {
    match init::serve(words.iter().map(String::as_str)) {
        Ok(()) => ExitCode::from(RESTART_STATUS),
        Err(error) => {
            eprintln!("agent: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Be the runtime that the agent starts.
pub(crate) fn run_runtime() -> ExitCode {
    let error = runtime::run().expect_err("it serves until it fails");
    eprintln!("runtime: {error}");
    ExitCode::FAILURE
}

/// A service that runs until it is dropped.
pub(crate) struct Service {
    shared: Arc<Shared>,
    manager: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    agent: Mutex<Option<Child>>,
    starts: AtomicU32,
    has_ended: AtomicBool,
}

impl Service {
    pub(crate) fn start(words: Vec<String>) -> Self {
        let shared = Arc::<Shared>::default();
        let of_thread = Arc::clone(&shared);
        let manager = Some(std::thread::spawn(move || manage(&of_thread, &words)));
        Self { shared, manager }
    }

    /// How often the agent was started.
    pub(crate) fn starts(&self) -> u32 {
        self.shared.starts.load(Ordering::SeqCst)
    }
}

fn manage(shared: &Shared, words: &[String]) {
    loop {
        let program = std::env::current_exe().expect("this test");
        {
            let mut agent = shared.agent.lock().expect("no panic");
            if shared.has_ended.load(Ordering::SeqCst) {
                return;
            }
            let started = Command::new(program).arg(AGENT).args(words).stdin(Stdio::null()).spawn();
            *agent = Some(started.expect("an agent"));
            shared.starts.fetch_add(1, Ordering::SeqCst);
        }
        let status = loop {
            let ended = shared.agent.lock().expect("no panic").as_mut().map(Child::try_wait);
            match ended {
                Some(Ok(None)) => std::thread::sleep(std::time::Duration::from_millis(20)),
                Some(Ok(Some(status))) => break status,
                other => panic!("no agent: {other:?}"),
            }
        };
        if shared.has_ended.load(Ordering::SeqCst) {
            return;
        }
        assert_eq!(status.code(), Some(RESTART_STATUS.into()), "the agent asks to be started again, or runs");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        if let Ok(mut agent) = self.shared.agent.lock()
            && let Some(agent) = agent.as_mut()
        {
            // Its runtime dies with it.
            let _ = agent.kill();
        }
        if let Some(manager) = self.manager.take() {
            let _ = manager.join();
        }
    }
}
