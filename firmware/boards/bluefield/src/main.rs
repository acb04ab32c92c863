//! `sumac-agent`: init of a card, its runtime, a service, or an editor of a configuration store.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use sumac_agent::supervisor::RUNTIME;
use sumac_agent::{init, runtime};

const HELP: &str = "\
Usage: sumac-agent [KEY=VALUE]...               serve, on a Linux that is set up already; status 75: start it again
       sumac-agent store FILE                   show the contents of a configuration store
       sumac-agent store FILE KEY=VALUE...      write it, creating the file if necessary
       sumac-agent enroll FILE KEY_FILE         write the device's key to it; KEY_FILE is - for stdin
As process 1 it sets the machine up first, and reads its settings from the kernel's command line (sumac.KEY=VALUE).";

/// The exit status of a service that is to be restarted (`EX_TEMPFAIL` of sysexits.h).
const RESTART_STATUS: u8 = 75;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if rustix::process::getpid().is_init() {
        // The kernel passes unknown parameters on as arguments; none is for this program.
        init::init()
    }
    let outcome = match arguments[..] {
        [] | ["-h" | "--help"] => print(HELP),
        [RUNTIME] => runtime::run().map_err(|error| error.to_string()),
        ["store", file] => {
            init::show_store(Path::new(file)).map_err(|error| error.to_string()).and_then(|text| print(&text))
        }
        ["store", file, ref words @ ..] => init::write_store(Path::new(file), words.iter().copied())
            .map_err(|error| error.to_string())
            .and_then(|text| print(&text)),
        ["enroll", file, key_file] => init::enroll(Path::new(file), Path::new(key_file))
            .map_err(|error| error.to_string())
            .and_then(|text| print(&text)),
        ref words => match init::serve(words.iter().copied()) {
            // For the service manager: start it again.
            Ok(()) => return ExitCode::from(RESTART_STATUS),
            Err(error) => Err(error.to_string()),
        },
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is closed, the exit status has to suffice.
            let _ = writeln!(io::stderr(), "sumac-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> Result<(), String> {
    writeln!(io::stdout(), "{}", text.trim_end()).map_err(|error| error.to_string())
}
