//! Hydra's name of a job: the address at which `mpiexec` serves the proxies of this one run.
//!
//! Each proxy starts the processes of its host and has the address on its command line
//! (`hydra_pmi_proxy --control-port HOST:PORT`), in MPICH as in Intel MPI.

use std::fs;

/// How many ancestors are looked at: scripts may stand between the proxy and this process.
const ANCESTORS_MAX: usize = 16;

/// Return a name of the job that Hydra has started this process for, if it has.
pub fn job() -> Option<String> {
    let mut pid = "self".to_owned();
    for _ in 0..ANCESTORS_MAX {
        pid = parent(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)?;
        if let Some(job) = fs::read(format!("/proc/{pid}/cmdline")).ok().and_then(|line| proxy_job(&line)) {
            return Some(job);
        }
    }
    None
}

/// Return the parent in the text of a process's `status`.
fn parent(status: &str) -> Option<String> {
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim();
    (parent != "0").then(|| parent.to_owned())
}

/// Return the name in a proxy's command line.
fn proxy_job(line: &[u8]) -> Option<String> {
    let line = String::from_utf8_lossy(line);
    let mut words = line.split('\0');
    let program = words.next()?.rsplit('/').next()?;
    if !program.starts_with("hydra") {
        return None;
    }
    words.find(|word| *word == "--control-port")?;
    words.next().filter(|addr| !addr.is_empty()).map(|addr| format!("pmi-{addr}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_is_the_control_port_of_the_proxy() {
        let line = b"/usr/bin/hydra_pmi_proxy\0--control-port\0n1:39211\0--rmk\0slurm\0--pgid\x000\0";
        assert_eq!(proxy_job(line).as_deref(), Some("pmi-n1:39211"));
        for other in
            [&b"bash\0--control-port\0n1:1\0"[..], b"hydra_pmi_proxy\0--control-port\0", b"hydra\0-n\x002\0", b""]
        {
            assert_eq!(proxy_job(other), None);
        }
    }

    #[test]
    fn ancestors_end_at_the_first_process() {
        assert_eq!(parent("Name:\tx\nPPid:\t17\nUid:\t0\n").as_deref(), Some("17"));
        assert_eq!(parent("Name:\tinit\nPPid:\t0\n"), None);
        assert_eq!(job(), None, "Hydra does not run the tests");
    }
}
