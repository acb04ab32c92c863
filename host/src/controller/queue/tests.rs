use super::super::resources::{Quota, Quotas, ResourceLedger, Resources};
use super::*;
use proptest::prelude::*;
use std::sync::Arc;
use sumac_hal::ids::{BootId, GroupId};

fn device(nth: usize) -> DeviceKey {
    DeviceKey { name: format!("d{nth}"), boot_id: BootId(1) }
}

fn ledger(quotas: Quotas) -> ResourceLedger {
    let mut ledger = ResourceLedger::new(quotas);
    let room = Resources { groups: 100, slots: 10, memory_bytes: 0, redo_memory_bytes: 0 };
    (0..3).for_each(|nth| ledger.add_device(device(nth), room));
    ledger
}

fn needs(devices: &[usize], slots: u64) -> Needs {
    let need = Resources { groups: 1, slots, ..Resources::default() };
    devices.iter().map(|&nth| (device(nth), need)).collect()
}

/// A minimal controller: each job needs a fixed number of slots on fixed devices.
struct Model {
    ledger: ResourceLedger,
    queue: Queue,
    /// Each job's tenant and needs.
    needs_of: BTreeMap<String, (String, Needs)>,
    running: Vec<(String, Claim)>,
    /// How often each waiting job was overtaken on its devices by a later one; counted independently of the queue.
    skipped: BTreeMap<String, u32>,
}

impl Model {
    fn new(quotas: Quotas) -> Self {
        let (queue, skipped) = (Queue::default(), BTreeMap::new());
        Self { ledger: ledger(quotas), queue, needs_of: BTreeMap::new(), running: Vec::new(), skipped }
    }

    fn claim(&self, job: &str) -> Claim {
        let (tenant, needs) = self.needs_of[job].clone();
        // Job names are numbers.
        Claim {
            group: GroupId(job.parse().expect("a number")),
            tenant,
            communicator: job.to_owned(),
            needs,
            cables: Arc::default(),
        }
    }

    fn fits(claim: &Claim, ledger: &ResourceLedger, reservations: &Reservations) -> Result<(), BlockedOn> {
        if reservations.tenants.contains_key(&claim.tenant) {
            return Err(BlockedOn::Quota);
        }
        if claim.needs.iter().any(|(device, _)| reservations.devices.contains_key(device)) {
            return Err(BlockedOn::Devices);
        }
        let blocked_on = |short: crate::controller::resources::Shortage| {
            if short.is_quota() { BlockedOn::Quota } else { BlockedOn::Devices }
        };
        ledger.check(&claim.tenant, &claim.needs).map_err(blocked_on)
    }

    fn arrive(&mut self, number: u32, tenant: &str, devices: &[usize], slots: u64) {
        let job = number.to_string();
        self.needs_of.insert(job.clone(), (tenant.into(), needs(devices, slots)));
        let claim = self.claim(&job);
        let reservations = self.queue.reservations(&job);
        let ticket = self.queue.ticket();
        match Self::fits(&claim, &self.ledger, &reservations) {
            Ok(()) => {
                self.ledger.claim(claim.clone()).expect("it fits");
                self.queue.record_grant(ticket, &claim, &mut self.ledger);
                self.note_given(&job, &claim);
                self.running.push((job, claim));
                self.serve();
            }
            Err(blocked_on) => {
                let (tenant, wanted) = self.needs_of[&job].clone();
                let (status, tried_version) = (EntryStatus::Waiting, Some(self.ledger.version()));
                let refused_version = None;
                self.queue.enter(
                    &job,
                    QueueEntry {
                        tenant,
                        communicator: job.clone(),
                        ticket,
                        skips: 0,
                        blocked_on,
                        wanted,
                        status,
                        tried_version,
                        refused_version,
                    },
                );
                self.skipped.insert(job, 0);
            }
        }
    }

    /// Count the jobs that `job` has overtaken.
    fn note_given(&mut self, job: &str, claim: &Claim) {
        self.skipped.remove(job);
        let number = |job: &str| job.parse::<u32>().expect("a number");
        for (other, times) in &mut self.skipped {
            let shares =
                claim.needs.iter().any(|(device, _)| self.needs_of[other].1.iter().any(|(key, _)| key == device));
            *times += u32::from(shares && number(other) < number(job));
        }
    }

    /// End a job and serve the queue. Returns the served jobs.
    fn end(&mut self, which: usize) -> Vec<String> {
        let (_, claim) = self.running.swap_remove(which);
        self.ledger.free(claim.group);
        self.serve()
    }

    fn serve(&mut self) -> Vec<String> {
        let mut served = Vec::new();
        while let Some(candidate) = self.queue.candidate(&self.ledger) {
            let job = candidate.job.clone();
            let (tenant, needs) = self.needs_of[&job].clone();
            let claim = Claim {
                group: GroupId(job.parse().expect("a number")),
                tenant,
                communicator: job.clone(),
                needs,
                cables: Arc::default(),
            };
            let fits = Self::fits(&claim, &self.ledger, &self.queue.reservations(&job)).is_ok();
            if self.queue.try_serve(&mut self.ledger, &candidate, fits.then_some(claim)) {
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
        self.queue.order(&self.ledger)
    }
}

#[test]
fn queue_orders_tenants_by_share_and_their_jobs_by_arrival() {
    let mut model = Model::new(Quotas::default());
    model.arrive(1, "much", &[0], 6);
    model.arrive(2, "little", &[0], 4);
    for (number, tenant) in [(3, "much"), (4, "much"), (5, "little"), (6, "none"), (7, "none"), (8, "none")] {
        model.arrive(number, tenant, &[0], 3);
    }
    // In slots of 30: much has 6, little 4, none 0; each further job adds 3.
    assert_eq!(model.order(), ["6", "7", "5", "3", "8", "4"]);
    assert_eq!(model.queue.position("5", &model.ledger), Some(QueuePosition { position: 3, of: 6 }));
    assert_eq!(model.queue.position("1", &model.ledger), None);
    // Only `little` still holds anything; the others are served in order of arrival.
    assert_eq!(model.end_job(1), ["3", "6"]);
    assert_eq!(model.end_job(2), ["5"]);
}

#[test]
fn job_that_fits_is_served_past_an_earlier_one_that_does_not() {
    let mut model = Model::new(Quotas::default());
    model.arrive(1, "x", &[0], 10);
    model.arrive(2, "x", &[1], 10);
    model.arrive(3, "y", &[0, 1], 5);
    model.arrive(4, "y", &[1], 10);
    assert_eq!(model.end_job(2), ["4"], "it fits, and who was first does not");
    assert_eq!(model.queue.get("3").map(|entry| entry.skips), Some(1));
}

#[test]
fn job_skipped_eight_times_gets_a_reservation() {
    let mut model = Model::new(Quotas::default());
    model.arrive(0, "x", &[0], 5);
    model.arrive(1, "x", &[0], 5);
    model.arrive(2, "y", &[0, 1], 10);
    let mut number = 3;
    // Small jobs come and go; one is always running.
    for _ in 0..SKIPS_MAX {
        model.end_job(if number == 3 { 0 } else { number - 1 });
        model.arrive(number, "z", &[0], 5);
        assert!(model.running.iter().any(|(job, _)| *job == number.to_string()), "there is room for {number}");
        number += 1;
    }
    model.end_job(number - 1);
    model.arrive(number, "z", &[0], 5);
    model.arrive(number + 1, "z", &[1], 1);
    model.arrive(number + 2, "z", &[2], 1);
    let running: Vec<&str> = model.running.iter().map(|(job, _)| job.as_str()).collect();
    assert_eq!(running, ["1", &(number + 2).to_string()], "its devices are kept for it, the other one is not");
    assert_eq!(model.order()[0], "2", "before tenants that hold nothing");
    // Once it is served, the others get the rest.
    assert_eq!(model.end_job(1), ["2"]);
    assert_eq!(model.end_job(2).len(), 2);
}

/// Two jobs that a device refuses, though the ledger has room, do not retry because of each other's rollbacks.
#[test]
fn refused_job_is_tried_again_only_after_the_ledger_has_settled() {
    let mut model = Model::new(Quotas::default());
    model.arrive(1, "x", &[0], 10);
    model.arrive(2, "x", &[0], 1);
    model.arrive(3, "y", &[0], 1);
    model.ledger.free(GroupId(1));
    // The queue serves the next job, and the device refuses it.
    let refuse = |model: &mut Model| {
        let candidate = model.queue.candidate(&model.ledger)?;
        let claim = model.claim(&candidate.job);
        let group = claim.group;
        assert!(model.queue.try_serve(&mut model.ledger, &candidate, Some(claim)), "the ledger has room");
        assert!(model.ledger.roll_back(group));
        let version = Some(model.ledger.version());
        let entry = model.queue.get_mut(&candidate.job).expect("it is queued");
        (entry.status, entry.tried_version, entry.refused_version) = (EntryStatus::Waiting, version, version);
        Some(candidate.job)
    };
    assert_eq!([(); 3].map(|()| refuse(&mut model)), [Some("2".into()), Some("3".into()), None]);
    model.ledger.settle();
    assert_eq!([(); 2].map(|()| refuse(&mut model)), [Some("2".into()), None], "2 was rolled back before 3");
    model.arrive(4, "z", &[1], 1);
    model.ledger.free(GroupId(4));
    assert_eq!(
        [(); 3].map(|()| refuse(&mut model)),
        [Some("2".into()), Some("3".into()), None],
        "resources were freed"
    );
}

#[test]
fn quota_bound_job_reserves_against_its_own_tenant_only() {
    let quota = Quota { slots: Some(6), ..Quota::default() };
    let mut model = Model::new(Quotas { other: Quota::default(), tenants: [("x".into(), quota)].into() });
    model.arrive(1, "x", &[0], 3);
    model.arrive(2, "x", &[0], 6);
    assert_eq!(model.queue.get("2").map(|entry| entry.blocked_on), Some(BlockedOn::Quota));
    for number in 3..3 + SKIPS_MAX {
        model.arrive(number, "y", &[0], 1);
        model.end_job(number);
    }
    assert_eq!(model.queue.get("2").map(|entry| entry.skips), Some(0));
    for number in 20..20 + SKIPS_MAX {
        model.arrive(number, "x", &[0], 1);
        model.end_job(number);
    }
    model.arrive(40, "x", &[1], 1);
    model.arrive(41, "y", &[0], 1);
    let runs = |job: &str| model.running.iter().any(|(running, _)| running == job);
    assert!(!runs("40") && runs("41"), "passed over by its own, it bars its own");
    assert_eq!(model.end_job(1), ["2", "40"]);
}

#[test]
fn serving_and_parked_jobs_hold_no_reservation() {
    let mut model = Model::new(Quotas::default());
    model.arrive(1, "x", &[0], 10);
    model.arrive(2, "x", &[0], 8);
    model.queue.get_mut("2").expect("it waits").skips = SKIPS_MAX;
    model.arrive(3, "y", &[0], 2);
    for status in [EntryStatus::Serving, EntryStatus::Parked] {
        model.queue.get_mut("2").expect("it waits").status = status;
        assert_eq!(model.order(), ["3"]);
        assert!(model.queue.reservations("4").devices.is_empty());
    }
    model.queue.get_mut("2").expect("it waits").status = EntryStatus::Waiting;
    assert_eq!(model.queue.reservations("4").devices.get(&device(0)).map(String::as_str), Some("2"));
    assert!(model.queue.remove("2") && !model.queue.remove("3"), "only the first lets in others by going");
}

#[derive(Debug, Clone)]
enum DraftStep {
    Arrive { tenant: usize, devices: Vec<usize>, slots: u64 },
    End(usize),
}

fn steps() -> impl Strategy<Value = Vec<DraftStep>> {
    let devices = prop::sample::subsequence(vec![0, 1, 2], 1..=3);
    // Mostly small jobs, which large ones have to wait for.
    let slots = prop_oneof![4 => 1..4_u64, 1 => 7..=10_u64];
    let arrive =
        (0..3_usize, devices, slots).prop_map(|(tenant, devices, slots)| DraftStep::Arrive { tenant, devices, slots });
    prop::collection::vec(prop_oneof![arrive, any::<usize>().prop_map(DraftStep::End)], 1..300)
}

fn run(
    quotas: Quotas,
    steps: Vec<DraftStep>,
    check: impl Fn(&Model) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut model = Model::new(quotas);
    for (number, step) in (0..).zip(steps) {
        match step {
            DraftStep::Arrive { tenant, devices, slots } => {
                model.arrive(number, ["x", "y", "z"][tenant], &devices, slots)
            }
            DraftStep::End(which) if !model.running.is_empty() => drop(model.end(which % model.running.len())),
            DraftStep::End(_) => {}
        }
        check(&model)?;
    }
    // No more arrivals: as jobs end, every waiting job is served.
    while !model.running.is_empty() {
        model.end(0);
        check(&model)?;
    }
    prop_assert_eq!(model.order(), Vec::<String>::new());
    for nth in 0..3 {
        prop_assert_eq!(model.ledger.total_claimed(&device(nth)), Resources::default());
    }
    Ok(())
}

proptest! {
    /// However large a job is, at most [`SKIPS_MAX`] later jobs get resources of its devices before it does.
    #[test]
    fn job_is_skipped_at_most_eight_times(steps in steps()) {
        run(Quotas::default(), steps, |model| {
            let worst = model.skipped.iter().max_by_key(|(_, times)| **times);
            prop_assert!(worst.is_none_or(|(_, times)| *times <= SKIPS_MAX), "{:?}", worst);
            // And no job waits that would fit, unless a reservation keeps it back.
            for job in model.order() {
                let fits = Model::fits(&model.claim(&job), &model.ledger, &model.queue.reservations(&job));
                prop_assert!(fits.is_err(), "job {} could run", job);
            }
            Ok(())
        })?;
    }

    /// With quotas, too, every job is served, and no tenant exceeds its quota.
    #[test]
    fn quotas_hold_and_every_job_is_served(steps in steps(), groups in 1..3_u64, slots in 10..12_u64) {
        let quota = Quota { groups: Some(groups), slots: Some(slots), memory_bytes: None };
        let quotas = Quotas { other: Quota::default(), tenants: [("x".into(), quota)].into() };
        run(quotas, steps, |model| {
            let (held, _) = model.ledger.usage("x");
            prop_assert!(held.groups <= groups && held.slots <= slots, "{:?}", held);
            Ok(())
        })?;
    }
}
