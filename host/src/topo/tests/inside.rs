//! What is inside a server.

use super::*;

const DUMPED: &str = r#"<?xml version="1.0"?>
<system version="1">
  <cpu numaid="0" arch="x86_64">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="8">
      <pci busid="0000:11:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="0000:c1:00.0" count="18" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:12:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x2000000000000001" gdr="1"/></nic>
      </pci>
    </pci>
    <pci busid="0000:13:00.0" class="0x020000" link_speed="8.0 GT/s PCIe" link_width="4">
      <nic><net name="eth0" dev="1" speed="25000" guid="0x0"/></nic>
    </pci>
  </cpu>
  <cpu numaid="1"><pci busid="0000:c1:00.0" class="0x030200" link_speed="5 GT/s" link_width="16"/></cpu>
</system>"#;

#[test]
fn dumped_topology_parses_to_the_expected_server() {
    let inside = Inside::from_nccl(DUMPED).expect("valid");
    let [near, far] = inside.gpus.as_slice() else { panic!("{inside:?}") };
    let [ib, ethernet] = inside.adapters.as_slice() else { panic!("{inside:?}") };
    // 32 GT/s x 8 lanes of the switch above, less 128b/130b; 5 GT/s x 16 less 8b/10b.
    let gbits = |rate: Option<Rate>| rate.map(Rate::gbits);
    assert_eq!((gbits(near.pcie), gbits(far.pcie)), (Some(252.062), Some(64.0)));
    assert_eq!((near.number, far.number), (Some(0), None));
    assert_eq!(near.nvlinks, [NvLink { to: "0000:c1:00.0".into(), count: 18, rate: Rate::from_gbits(3600.0) }]);
    assert_eq!((ib.name.as_deref(), ib.guid.as_deref()), (Some("mlx5_0"), Some("2000000000000001")));
    assert_eq!((gbits(ib.rate), ethernet.guid.as_deref()), (Some(400.0), None));
    assert_eq!(Inside::locality(near, ib), Locality::SameSwitch);
    assert_eq!(Inside::locality(near, ethernet), Locality::SameCpu);
    assert_eq!(Inside::locality(far, ib), Locality::OtherCpu);
}

#[test]
fn topology_joins_the_server_with_its_guids_or_name() {
    let inside = Inside::from_nccl(DUMPED).expect("valid");
    let mut fabric = Fabric::from_ibnetdiscover(DUMP).expect("valid");
    let n1 = fabric.find_server("n1").expect("there");
    assert_eq!(fabric.join_inside(None, &inside), Ok(vec![n1]));
    assert_eq!(fabric.inside(n1), Some(&inside));
    assert_eq!(fabric.join_inside(Some("n*"), &inside).map(|servers| servers.len()), Ok(2));
    let error = fabric.join_inside(Some("n7"), &inside).expect_err("no such server").to_string();
    assert!(error.contains("no server of the fabric matches `n7`; did you mean `n1`"), "{error}");
    let nameless = Inside::from_nccl(&DUMPED.replace("0x2000000000000001", "0x0")).expect("valid");
    assert_eq!(fabric.join_inside(None, &nameless), Err(JoinError::NoGuids));
    let other = Inside::from_nccl(&DUMPED.replace("0x2000000000000001", "0x99")).expect("valid");
    assert!(matches!(fabric.join_inside(None, &other), Err(JoinError::UnknownGuids { .. })));
}

#[test]
fn malformed_or_hostile_topology_is_refused() {
    let deep = format!("<system>{}{}</system>", "<pci>".repeat(20_000), "</pci>".repeat(20_000));
    let wide = format!("<system>{}</system>", "<pci/>".repeat(70_000));
    let entities = "<!DOCTYPE a [<!ENTITY b \"xxxx\"><!ENTITY c \"&b;&b;&b;\">]><system>&c;</system>";
    let cases = [
        ("<system><cpu></system>", "line 1: found malformed XML"),
        ("<system>\n<cpu>\n", "malformed XML"),
        ("<system/>", "line 1: found neither a GPU nor an adapter"),
        ("<graph/>", "line 1: found <graph>, expected <system>"),
        (&deep, "nested deeper than 16"),
        (&wide, "malformed XML"),
        (entities, "malformed XML"),
    ];
    for (text, message) in cases {
        let error = Inside::from_nccl(text).expect_err(message).to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn real_cloud_topologies_have_their_gpus_and_adapters() {
    for (name, gpus, adapters, gbits) in [
        ("nccl-aws-p4d.xml", 8, 4, 126.031),
        ("nccl-azure-ndv4.xml", 8, 8, 252.062),
        ("nccl-azure-ndv5.xml", 8, 8, 504.123),
    ] {
        let Some(text) = shared_text(name) else { return };
        let inside = Inside::from_nccl(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((inside.gpus.len(), inside.adapters.len()), (gpus, adapters), "{name}");
        assert!(inside.gpus.iter().all(|gpu| gpu.pcie.map(Rate::gbits) == Some(gbits)), "{name}: {:?}", inside.gpus[0]);
        assert_eq!(Inside::locality(&inside.gpus[0], &inside.adapters[0]), Locality::SameSwitch, "{name}");
        let alone = Fabric::from_text(&text).expect_err(name).to_string();
        assert!(alone.contains("an NCCL topology") && alone.contains(&format!("{adapters} adapters")), "{alone}");
    }
}
