//! The header and the list of what is exported; panics.

use crate::comm::{Comm, sumac_comm_free, with_comm};
use crate::config::give;
use crate::last_error::{Failure, sumac_last_error, sumac_last_error_cause};
use crate::status::Status;
use std::collections::BTreeSet;
use std::ffi::CStr;
use std::path::Path;
use sumac::testing::LocalCluster;

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn generated_header() -> String {
    let config = cbindgen::Config::from_file(folder().join("cbindgen.toml")).expect("a configuration");
    // It follows the modules, so that each function is declared once.
    let builder = cbindgen::Builder::new().with_config(config).with_src(folder().join("src/lib.rs"));
    let mut header = Vec::new();
    builder.generate().expect("a header").write(&mut header);
    // C has no sections of Markdown.
    String::from_utf8(header).expect("text").replace(" * # Safety\n", " * The caller promises:\n")
}

fn committed(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap_or_default()
}

/// SUMAC_TEST_BLESS=1 writes it.
#[test]
fn header_matches_the_sources() {
    let header = generated_header();
    if std::env::var_os("SUMAC_TEST_BLESS").is_some() {
        std::fs::write(folder().join("include/sumac.h"), &header).expect("written");
    }
    let is_same = header == committed("include/sumac.h");
    assert!(is_same, "include/sumac.h differs: SUMAC_TEST_BLESS=1 cargo test -p sumac-capi header_matches");
}

/// Return functions and constants of the header, as the lines of `abi.txt` have them.
fn exported() -> BTreeSet<String> {
    let header = committed("include/sumac.h");
    let mut found = BTreeSet::new();
    for line in header.lines() {
        let line = line.trim().trim_end_matches(',');
        if let Some((name, number)) = line.split_once(" = ").filter(|(name, _)| name.starts_with("SUMAC_")) {
            found.insert(format!("constant {name} {number}"));
        } else if let Some((name, value)) = line.strip_prefix("#define ").and_then(|rest| rest.split_once(' ')) {
            found.insert(format!("constant {name} {value}"));
        } else if !line.starts_with(['*', '/'])
            && let Some((before, _)) = line.split_once('(')
            && let Some(at) = before.rfind("sumac_")
        {
            found.insert(format!("function {}", &before[at..]));
        }
    }
    found
}

#[test]
fn abi_list_has_all_that_is_exported_and_nothing_else() {
    let text = committed("abi.txt");
    let listed: BTreeSet<String> =
        text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(str::to_owned).collect();
    let exported = exported();
    let gone: Vec<_> = listed.difference(&exported).collect();
    assert!(gone.is_empty(), "programs may use these, so they must stay as they are: {gone:?}");
    let new: Vec<_> = exported.difference(&listed).collect();
    assert!(new.is_empty(), "add to abi.txt: {new:#?}");
    assert!(exported.iter().any(|line| line == "function sumac_join"), "{exported:?}");
    assert!(exported.contains("constant SUMAC_ERROR_MISMATCH 1"), "{exported:?}");
}

fn last_error() -> String {
    // SAFETY: it is a C string, and no call fails meanwhile.
    unsafe { CStr::from_ptr(sumac_last_error()) }.to_string_lossy().into_owned()
}

#[test]
fn panic_becomes_an_error_and_ends_the_communicator_on_all_ranks() {
    let cluster = LocalCluster::start(2).expect("a cluster");
    cluster.run(|comm| {
        let rank = comm.rank();
        let mut object = std::ptr::null_mut();
        // SAFETY: the communicator is used before it is freed, on this thread only.
        unsafe {
            give(&raw mut object, Comm::new(comm, std::time::Duration::from_secs(60), sumac::Progress::Caller));
            let barrier = || crate::sumac_barrier(object, std::ptr::null(), std::ptr::null_mut());
            assert_eq!(barrier(), Status::SUMAC_OK);
            if rank == 0 {
                let status = with_comm(object, |_| -> Result<(), Failure> { panic!("planted") });
                assert_eq!(status, Status::SUMAC_ERROR_PANIC);
                assert!(last_error().contains("planted"), "{}", last_error());
                assert_eq!(barrier(), Status::SUMAC_ERROR_CANCELLED);
                assert_eq!(barrier(), Status::SUMAC_ERROR_ENDED);
                assert_eq!(sumac_last_error_cause(), Status::SUMAC_ERROR_CANCELLED);
            } else {
                assert_eq!(barrier(), Status::SUMAC_ERROR_RANKS_FAILED);
            }
            sumac_comm_free(object);
        }
    });
}
