use super::super::books::{Amount, Books, Quota, Quotas};
use super::*;
use proptest::prelude::*;
use sumac_hal::ids::{BootId, GroupId};

fn device(nth: usize) -> DeviceKey {
    DeviceKey { name: format!("d{nth}"), boot_id: BootId(1) }
}

fn books(quotas: Quotas) -> Books {
    let mut books = Books::new(quotas);
    let room = Amount { groups: 100, slots: 10, memory_bytes: 0, redo_memory_bytes: 0 };
    (0..3).for_each(|nth| books.open(device(nth), room));
    books
}

fn needs(devices: &[usize], slots: u64) -> Needs {
    let need = Amount { groups: 1, slots, ..Amount::default() };
    devices.iter().map(|&nth| (device(nth), need)).collect()
}

/// A controller in small: jobs that want fixed slots of fixed devices.
struct Small {
    books: Books,
    queue: Queue,
    /// Each job's tenant and wish.
    wishes: BTreeMap<String, (String, Needs)>,
    running: Vec<(String, Claim)>,
    /// How often a job was overtaken by later ones with something of its devices, counted apart from the queue.
    overtaken: BTreeMap<String, u32>,
}

impl Small {
    fn new(quotas: Quotas) -> Self {
        let (queue, overtaken) = (Queue::default(), BTreeMap::new());
        Self { books: books(quotas), queue, wishes: BTreeMap::new(), running: Vec::new(), overtaken }
    }

    fn claim(&self, job: &str) -> Claim {
        let (tenant, needs) = self.wishes[job].clone();
        // Jobs are numbered.
        Claim { group: GroupId(job.parse().expect("a number")), tenant, needs }
    }

    fn fits(claim: &Claim, books: &Books, bars: &Bars) -> Result<(), Scope> {
        if bars.tenants.contains_key(&claim.tenant) {
            return Err(Scope::Tenant);
        }
        if claim.needs.iter().any(|(device, _)| bars.devices.contains_key(device)) {
            return Err(Scope::Devices);
        }
        let scope =
            |short: crate::controller::books::Short| if short.is_quota() { Scope::Tenant } else { Scope::Devices };
        books.check(&claim.tenant, &claim.needs).map_err(scope)
    }

    fn arrive(&mut self, number: u32, tenant: &str, devices: &[usize], slots: u64) {
        let job = number.to_string();
        self.wishes.insert(job.clone(), (tenant.into(), needs(devices, slots)));
        let claim = self.claim(&job);
        let bars = self.queue.bars(&job);
        let ticket = self.queue.ticket();
        match Self::fits(&claim, &self.books, &bars) {
            Ok(()) => {
                self.books.claim(claim.clone()).expect("it fits");
                self.queue.given(ticket, &claim, &mut self.books);
                self.note_given(&job, &claim);
                self.running.push((job, claim));
                self.serve();
            }
            Err(scope) => {
                let (tenant, wanted) = self.wishes[&job].clone();
                let (standing, tried) = (Standing::Waits, Some(self.books.version()));
                self.queue.enter(&job, Waiting { tenant, ticket, passes: 0, scope, wanted, standing, tried });
                self.overtaken.insert(job, 0);
            }
        }
    }

    /// A later job has got something.
    fn note_given(&mut self, job: &str, claim: &Claim) {
        self.overtaken.remove(job);
        let number = |job: &str| job.parse::<u32>().expect("a number");
        for (other, times) in &mut self.overtaken {
            let shares =
                claim.needs.iter().any(|(device, _)| self.wishes[other].1.iter().any(|(key, _)| key == device));
            *times += u32::from(shares && number(other) < number(job));
        }
    }

    /// A job ends, and what it held goes to others.
    fn end(&mut self, which: usize) -> Vec<String> {
        let (_, claim) = self.running.swap_remove(which);
        self.books.free(claim.group);
        self.serve()
    }

    fn serve(&mut self) -> Vec<String> {
        let mut served = Vec::new();
        while let Some(candidate) = self.queue.candidate(&self.books) {
            let job = candidate.job.clone();
            let (tenant, needs) = self.wishes[&job].clone();
            let claim = Claim { group: GroupId(job.parse().expect("a number")), tenant, needs };
            let fits = Self::fits(&claim, &self.books, &self.queue.bars(&job)).is_ok();
            if self.queue.settle(&mut self.books, &candidate, fits.then_some(claim)) {
                served.push(job);
            }
        }
        for job in &served {
            let claim = self.claim(job);
            self.note_given(job, &claim);
            self.queue.remove(job);
            self.running.push((job.clone(), claim));
        }
        served
    }

    fn end_job(&mut self, number: u32) -> Vec<String> {
        let which = self.running.iter().position(|(job, _)| *job == number.to_string()).expect("it runs");
        self.end(which)
    }

    fn order(&self) -> Vec<String> {
        self.queue.order(&self.books)
    }
}

#[test]
fn the_tenant_with_the_smallest_share_is_first_and_within_one_who_came_first() {
    let mut small = Small::new(Quotas::default());
    small.arrive(1, "much", &[0], 6);
    small.arrive(2, "little", &[0], 4);
    for (number, tenant) in [(3, "much"), (4, "much"), (5, "little"), (6, "none"), (7, "none"), (8, "none")] {
        small.arrive(number, tenant, &[0], 3);
    }
    // In slots of 30: much has 6, little 4, none 0; each further job adds 3.
    assert_eq!(small.order(), ["6", "7", "5", "3", "8", "4"]);
    assert_eq!(small.queue.place("5", &small.books), Some(QueuePlace { position: 3, of: 6 }));
    assert_eq!(small.queue.place("1", &small.books), None);
    // Now nobody but little holds anything; who came first is first.
    assert_eq!(small.end_job(1), ["3", "6"]);
    assert_eq!(small.end_job(2), ["5"]);
}

#[test]
fn who_waits_on_other_devices_is_not_held_up() {
    let mut small = Small::new(Quotas::default());
    small.arrive(1, "x", &[0], 10);
    small.arrive(2, "x", &[1], 10);
    small.arrive(3, "y", &[0, 1], 5);
    small.arrive(4, "y", &[1], 10);
    assert_eq!(small.end_job(2), ["4"], "it fits, and who was first does not");
    assert_eq!(small.queue.get("3").map(|entry| entry.passes), Some(1));
}

#[test]
fn a_large_job_is_passed_over_only_so_often() {
    let mut small = Small::new(Quotas::default());
    small.arrive(0, "x", &[0], 5);
    small.arrive(1, "x", &[0], 5);
    small.arrive(2, "y", &[0, 1], 10);
    let mut number = 3;
    // Small ones come and go, always one at work.
    for _ in 0..PASSES_MAX {
        small.end_job(if number == 3 { 0 } else { number - 1 });
        small.arrive(number, "z", &[0], 5);
        assert!(small.running.iter().any(|(job, _)| *job == number.to_string()), "there is room for {number}");
        number += 1;
    }
    small.end_job(number - 1);
    small.arrive(number, "z", &[0], 5);
    small.arrive(number + 1, "z", &[1], 1);
    small.arrive(number + 2, "z", &[2], 1);
    let running: Vec<&str> = small.running.iter().map(|(job, _)| job.as_str()).collect();
    assert_eq!(running, ["1", &(number + 2).to_string()], "its devices are kept for it, the other one is not");
    assert_eq!(small.order()[0], "2", "before tenants that hold nothing");
    // When it has what it waited for, the others get the rest.
    assert_eq!(small.end_job(1), ["2"]);
    assert_eq!(small.end_job(2).len(), 2);
}

#[test]
fn a_quota_holds_up_its_own_tenant_alone() {
    let quota = Quota { slots: Some(6), ..Quota::default() };
    let mut small = Small::new(Quotas { other: Quota::default(), tenants: [("x".into(), quota)].into() });
    small.arrive(1, "x", &[0], 3);
    small.arrive(2, "x", &[0], 6);
    assert_eq!(small.queue.get("2").map(|entry| entry.scope), Some(Scope::Tenant));
    for number in 3..3 + PASSES_MAX {
        small.arrive(number, "y", &[0], 1);
        small.end_job(number);
    }
    assert_eq!(small.queue.get("2").map(|entry| entry.passes), Some(0));
    for number in 20..20 + PASSES_MAX {
        small.arrive(number, "x", &[0], 1);
        small.end_job(number);
    }
    small.arrive(40, "x", &[1], 1);
    small.arrive(41, "y", &[0], 1);
    let runs = |job: &str| small.running.iter().any(|(running, _)| running == job);
    assert!(!runs("40") && runs("41"), "passed over by its own, it bars its own");
    assert_eq!(small.end_job(1), ["2", "40"]);
}

#[test]
fn who_is_served_or_does_not_come_is_in_nobodys_way() {
    let mut small = Small::new(Quotas::default());
    small.arrive(1, "x", &[0], 10);
    small.arrive(2, "x", &[0], 8);
    small.queue.get_mut("2").expect("it waits").passes = PASSES_MAX;
    small.arrive(3, "y", &[0], 2);
    for standing in [Standing::Served, Standing::Parked] {
        small.queue.get_mut("2").expect("it waits").standing = standing;
        assert_eq!(small.order(), ["3"]);
        assert!(small.queue.bars("4").devices.is_empty());
    }
    small.queue.get_mut("2").expect("it waits").standing = Standing::Waits;
    assert_eq!(small.queue.bars("4").devices.get(&device(0)).map(String::as_str), Some("2"));
    assert!(small.queue.remove("2") && !small.queue.remove("3"), "only the first lets in others by going");
}

#[derive(Debug, Clone)]
enum Step {
    Arrive { tenant: usize, devices: Vec<usize>, slots: u64 },
    End(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let devices = prop::sample::subsequence(vec![0, 1, 2], 1..=3);
    // Mostly small ones, which large ones have to wait for.
    let slots = prop_oneof![4 => 1..4_u64, 1 => 7..=10_u64];
    let arrive =
        (0..3_usize, devices, slots).prop_map(|(tenant, devices, slots)| Step::Arrive { tenant, devices, slots });
    prop::collection::vec(prop_oneof![arrive, any::<usize>().prop_map(Step::End)], 1..300)
}

fn run(
    quotas: Quotas,
    steps: Vec<Step>,
    check: impl Fn(&Small) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut small = Small::new(quotas);
    for (number, step) in (0..).zip(steps) {
        match step {
            Step::Arrive { tenant, devices, slots } => small.arrive(number, ["x", "y", "z"][tenant], &devices, slots),
            Step::End(which) if !small.running.is_empty() => drop(small.end(which % small.running.len())),
            Step::End(_) => {}
        }
        check(&small)?;
    }
    // Nobody comes any more: as jobs end, everybody has his turn.
    while !small.running.is_empty() {
        small.end(0);
        check(&small)?;
    }
    prop_assert_eq!(small.order(), Vec::<String>::new());
    for nth in 0..3 {
        prop_assert_eq!(small.books.taken(&device(nth)), Amount::default());
    }
    Ok(())
}

proptest! {
    /// However large a job is and whoever comes: at most [`PASSES_MAX`] later ones get something of its devices before it.
    #[test]
    fn nobody_starves(steps in steps()) {
        run(Quotas::default(), steps, |small| {
            let worst = small.overtaken.iter().max_by_key(|(_, times)| **times);
            prop_assert!(worst.is_none_or(|(_, times)| *times <= PASSES_MAX), "{:?}", worst);
            // And nobody who could run is left waiting, unless for one who was passed over too often.
            for job in small.order() {
                let fits = Small::fits(&small.claim(&job), &small.books, &small.queue.bars(&job));
                prop_assert!(fits.is_err(), "job {} could run", job);
            }
            Ok(())
        })?;
    }

    /// With quotas, too, everybody has his turn, and nobody more than he may.
    #[test]
    fn quotas_hold_and_everybody_has_his_turn(steps in steps(), groups in 1..3_u64, slots in 10..12_u64) {
        let quota = Quota { groups: Some(groups), slots: Some(slots), memory_bytes: None };
        let quotas = Quotas { other: Quota::default(), tenants: [("x".into(), quota)].into() };
        run(quotas, steps, |small| {
            let (held, _) = small.books.held("x");
            prop_assert!(held.groups <= groups && held.slots <= slots, "{:?}", held);
            Ok(())
        })?;
    }
}
