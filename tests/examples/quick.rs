use std::thread; use std::time::{Duration,Instant};
use sumac::controller::{Controller, ControllerConfig};
use sumac::topo::{Fabric, LeafSpine};
use sumac::{Algo, CallOptions, Communicator, JoinConfig, ReduceOp};
use sumac_firmware::emulated::{Board, BoardConfig};
fn env(n:&str,d:usize)->usize{std::env::var(n).ok().and_then(|x|x.parse().ok()).unwrap_or(d)}
fn main(){
    let leaves=env("LEAVES",1); let hosts=4/leaves;
    let fabric=Fabric::leaf_spine(LeafSpine{leaves,spines:usize::from(leaves>1),hosts_per_leaf:hosts,cables:1,rate:None}).unwrap();
    let names:Vec<String>=fabric.switches().iter().map(|s|s.name.clone()).collect();
    let mut config=ControllerConfig{fabric:Some(fabric),..ControllerConfig::new()};
    config.window_max=env("WINDOW",64) as u16; config.chunk_max_bytes=env("CHUNK",16384) as u16;
    let c=Controller::start(config).unwrap(); let addr=c.local_addr();
    let _b:Vec<Board>=names.into_iter().map(|n|{let b=Board::start(BoardConfig::new(n,addr)).unwrap();assert!(b.wait_registered(Duration::from_secs(5)));b}).collect();
    thread::scope(|s|{ for r in 0..4u32 { s.spawn(move||{
        let comm=Communicator::join(JoinConfig::new(addr,"q",r,4)).unwrap();
        for algo in if std::env::var("ALL").is_ok(){vec![Algo::Tree,Algo::Ring,Algo::HalvingDoubling]}else{vec![Algo::Tree]}{ for size in if std::env::var("BIG").is_ok(){vec![16<<20]}else{vec![8usize,4096,65536,1<<20,16<<20]}{
            let mut buf=vec![1f32;size/4]; let o=CallOptions{algo:Some(algo),..Default::default()};
            let n=if size<=65536{200}else{env("N",15)}; let mut t=Vec::new(); let mut wire=0; let mut re=0;
            for i in 0..n+3 { buf.fill(1.0); comm.barrier_with(&CallOptions{algo:Some(Algo::Tree),..Default::default()}).unwrap(); let t0=Instant::now(); let out=comm.all_reduce_with(&mut buf,ReduceOp::Sum,&o).unwrap(); if i>=3{t.push(t0.elapsed().as_secs_f64()*1e6);} wire=out.wire_bytes; re+=out.retransmits; assert!(buf.iter().all(|&x|x==4.0)); }
            t.sort_by(f64::total_cmp);
            if r==0 {println!("{algo} {size:>9} med {:>9.1} us  p99 {:>9.1} {:>7.3} GB/s wire {wire} retrans {re}",t[t.len()/2],t[t.len()*99/100],size as f64/t[t.len()/2]*1e-3);}
        }} comm.leave(); }); } });
    println!("{:?}", sumac::controller::status(addr).unwrap().devices.iter().map(|d|d.stats.clone().unwrap().counters).collect::<Vec<_>>());
}
