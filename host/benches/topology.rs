//! Reads generated fat trees as `ibnetdiscover` prints them: processor time and memory a size, and how the time grows.
//!
//! `cargo bench -p sumac --bench topology -- [RADIX...]`. The exponent is that of the growth from the line before: 1 is
//! linear. Processor time is that of this thread, so that other load counts little. Compare ratios within one run only:
//! absolute figures vary with the host.

use std::fmt::Write as _;
use sumac::topo::{Device, Fabric, Port, Rate};

fn main() {
    let mut radices: Vec<usize> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    if radices.is_empty() {
        // 1,024, 9,826 and 101,306 hosts.
        radices = vec![16, 34, 74];
    }
    println!(
        "{:>8} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "hosts", "bytes", "read ms", "MB/s", "exponent", "toml ms", "peak MiB"
    );
    let mut before: Option<(f64, f64)> = None;
    for radix in radices {
        let fabric = Fabric::fat_tree(radix, Rate::from_width_and_speed("4xNDR")).expect("an even radix");
        let (text, toml) = (dump(&fabric), fabric.to_toml());
        let hosts = fabric.hosts().len();
        drop(fabric);
        let seconds = shortest(|| assert_eq!(Fabric::from_text(&text).expect("a dump").hosts().len(), hosts));
        let peak = peak_mib();
        let toml_seconds = shortest(|| assert_eq!(Fabric::from_text(&toml).expect("TOML").hosts().len(), hosts));
        let exponent = before.map_or_else(String::new, |(size, time)| {
            format!("{:.2}", (seconds / time).ln() / (hosts as f64 / size).ln())
        });
        before = Some((hosts as f64, seconds));
        let (bytes, rate) = (text.len(), text.len() as f64 / seconds / 1e6);
        let (millis, toml_millis) = (seconds * 1e3, toml_seconds * 1e3);
        println!("{hosts:>8} {bytes:>10} {millis:>9.1} {rate:>9.1} {exponent:>9} {toml_millis:>9.1} {peak:>9.0}");
    }
}

/// The shortest of three runs, in seconds of this thread's processor time.
fn shortest(run: impl Fn()) -> f64 {
    let measured = (0..3).map(|_| {
        let start = processor_s();
        run();
        processor_s() - start
    });
    measured.min_by(f64::total_cmp).expect("three runs")
}

/// The processor time of this thread in seconds, from Linux's schedstat.
fn processor_s() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux's schedstat");
    text.split_whitespace().next().and_then(|ns| ns.parse::<f64>().ok()).expect("a number") / 1e9
}

/// The greatest resident memory of this process so far in MiB, with the generated fabric and texts.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).map_or(0.0, |kib| kib / 1024.0)
}

/// Print a fabric as `ibnetdiscover` does, with an aggregation node at every switch.
fn dump(fabric: &Fabric) -> String {
    let guid = |device: Device| match device {
        Device::Switch(switch) => 0x2c5e_ab03_0000_0000_u64 + u64::from(switch.0) * 16,
        Device::Host(host) => 0xe09d_7303_0000_0000 + u64::from(host.0),
    };
    let id = |device: Device| match device {
        Device::Switch(_) => format!("S-{:016x}", guid(device)),
        Device::Host(_) => format!("H-{:016x}", guid(device)),
    };
    let mut ports: Vec<(Port, Port)> =
        fabric.links().iter().flat_map(|link| [(link.ends[0], link.ends[1]), (link.ends[1], link.ends[0])]).collect();
    ports.sort();
    let mut text = String::from("#\n# Topology file\n#\n");
    let mut add = |part: std::fmt::Arguments<'_>| text.write_fmt(part).expect("a String");
    for own in ports.chunk_by(|a, b| a.0.device == b.0.device) {
        let device = own[0].0.device;
        let (number, name) = (guid(device), fabric.name(device));
        add(format_args!("\nvendid=0x2c9\ndevid=0x1021\nsysimgguid=0x{number:x}\n"));
        match device {
            Device::Switch(_) => {
                add(format_args!("switchguid=0x{number:x}({number:x})\n"));
                add(format_args!("Switch\t255 \"{}\"\t\t# \"{name}\" enhanced port 0 lid 73 lmc 0\n", id(device)));
            }
            Device::Host(_) => {
                add(format_args!("caguid=0x{number:x}\nCa\t1 \"{}\"\t\t# \"{name} mlx5_0\"\n", id(device)))
            }
        }
        for (near, far) in own {
            let (far_id, far_name, far_guid) = (id(far.device), fabric.name(far.device), guid(far.device));
            add(format_args!("[{}]\t\"{far_id}\"[{}]", near.number, far.number));
            match far.device {
                Device::Host(_) => add(format_args!("({far_guid:x}) \t\t# \"{far_name} mlx5_0\" lid 647 4xNDR\n")),
                Device::Switch(_) => add(format_args!("\t\t# \"{far_name}\" lid 236 4xNDR\n")),
            }
        }
        if let Device::Switch(_) = device {
            let node = number + 8;
            add(format_args!(
                "[255]\t\"H-{node:016x}\"[1]({node:x}) \t\t# \"Mellanox Technologies Aggregation Node\" lid 1 4xNDR\n"
            ));
            add(format_args!("\nCa\t1 \"H-{node:016x}\"\t\t# \"Mellanox Technologies Aggregation Node\"\n"));
            add(format_args!("[1]({node:x}) \t\"{}\"[255]\t\t# lid 1 lmc 0 \"{name}\" lid 73 4xNDR\n", id(device)));
        }
    }
    text
}
