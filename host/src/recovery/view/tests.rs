//! Timeouts of a view change, which the exhaustive search leaves out.

use super::*;

type Two = View<u8, u8>;

fn at(ms: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(ms)
}

/// Exchange the messages of two ranks until neither sends more.
fn exchange(views: &mut [Two; 2], now: Instant) {
    while let Some((from, (to, message))) =
        (0..2).find_map(|rank| views[rank].poll_transmit().map(|transmit| (rank, transmit)))
    {
        views[to.0 as usize].handle(Rank(from as u32), message, now);
    }
}

fn two() -> [Two; 2] {
    [0, 1].map(|rank| View::new((Rank(rank), 2), Dead::new(), true, at(10_000)))
}

/// Let both ranks promise; returns the ballot with the plan.
fn plan(views: &mut [Two; 2], now: Instant) -> Ballot {
    views[0].begin();
    let mut planned = None;
    loop {
        exchange(views, now);
        let mut moved = false;
        for view in views.iter_mut() {
            match view.poll_event() {
                Some(Event::Promise { ballot }) => view.promise(ballot, 1),
                Some(Event::Run { ballot, reports }) => {
                    assert_eq!(reports.len(), 2);
                    planned = Some(ballot);
                }
                Some(event) => panic!("{event:?}"),
                None => continue,
            }
            moved = true;
        }
        if !moved {
            return planned.expect("a plan");
        }
    }
}

#[test]
fn deadline_reports_whether_other_ranks_may_have_committed() {
    let mut views = two();
    let ballot = plan(&mut views, at(0));
    views[1].done(ballot, 3, 0);
    for (view, end) in views.iter_mut().zip([End::Deadline, End::Unknown]) {
        view.handle_timeout(at(9_999));
        assert_eq!(view.poll_event(), None);
        view.handle_timeout(at(10_000));
        assert_eq!(view.poll_event(), Some(Event::Ended(end)));
    }
}

#[test]
fn failed_plan_is_retried_after_a_delay() {
    let mut views = two();
    let first = plan(&mut views, at(0));
    views[1].failed(first, at(5));
    exchange(&mut views, at(5));
    assert_eq!(views[0].poll_timeout(), at(5) + RETRY);
    views[0].handle_timeout(at(5) + RETRY);
    exchange(&mut views, at(400));
    assert!(matches!(views[1].poll_event(), Some(Event::Promise { ballot }) if ballot > first));
}

/// A message that is lost with its connection is repeated.
#[test]
fn unanswered_plan_is_resent_and_committed() {
    let mut views = two();
    let ballot = plan(&mut views, at(0));
    for rank in [0, 1] {
        views[rank].done(ballot, 3, 4);
    }
    assert!(matches!(views[1].poll_transmit(), Some((Rank(0), Message::Done { .. }))), "and it is lost");
    exchange(&mut views, at(1));
    views[0].handle_timeout(at(1));
    exchange(&mut views, at(1));
    assert_eq!(views[0].poll_event(), None);
    let resend = views[0].poll_timeout();
    assert_eq!(resend, at(1) + RESEND);
    views[0].handle_timeout(resend);
    exchange(&mut views, resend);
    let outcome = Outcome { dead: vec![], decision: 3, vote: 4 };
    for view in &mut views {
        assert_eq!(view.poll_event(), Some(Event::Committed(outcome.clone())));
    }
}

/// A rank that takes no further part reports that, and is no longer waited for.
#[test]
fn rank_that_gives_up_is_dead_to_the_others() {
    let mut views = two();
    plan(&mut views, at(0));
    views[1].give_up();
    exchange(&mut views, at(1));
    assert_eq!(views[0].dead().get(&Rank(1)), Some(&Authority::Confirmed));
    assert!(matches!(views[0].poll_event(), Some(Event::Promise { .. })));
    assert_eq!(views[0].awaited(), []);
}

/// The dead rank committed with the votes of all, which the survivors do not know. A late copy of that commit is not
/// adopted.
#[test]
fn late_commit_of_a_dead_rank_is_ignored() {
    let mut views: [Two; 3] = [0, 1, 2].map(|rank| View::new((Rank(rank), 3), Dead::new(), true, at(10_000)));
    let (mut late, mut committed) = (Vec::new(), Vec::new());
    views[0].begin();
    loop {
        let mut moved = false;
        for rank in 0..3 {
            while let Some((to, message)) = views[rank].poll_transmit() {
                moved = true;
                let is_commit = matches!(message, Message::Commit { .. });
                if is_commit && rank == 0 {
                    late.push((to, message));
                    continue;
                }
                // It arrives while the commit of the next attempt is in flight.
                if let Some((_, message)) = late.iter().find(|(of, _)| is_commit && *of == to) {
                    views[to.0 as usize].handle(Rank(0), message.clone(), at(1));
                }
                views[to.0 as usize].handle(Rank(rank as u32), message, at(1));
            }
            while let Some(event) = views[rank].poll_event() {
                moved = true;
                match event {
                    Event::Promise { ballot } => views[rank].promise(ballot, 1),
                    // Rank 0 has no tree.
                    Event::Run { ballot, .. } => views[rank].done(ballot, 3, if rank == 0 { 0 } else { 5 }),
                    Event::Committed(outcome) if rank == 0 => assert_eq!(outcome.vote, 0),
                    Event::Committed(outcome) => committed.push(outcome),
                    Event::Ended(end) => panic!("{end:?}"),
                }
            }
            if late.len() == 2 && views[1].dead().is_empty() {
                views[1].rank_died(Rank(0), Authority::Confirmed);
                views[2].rank_died(Rank(0), Authority::Confirmed);
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    assert!(committed.len() == 2 && committed[0] == committed[1], "{committed:?}");
}

/// The suspected rank may be alive behind a broken link, and wait.
#[test]
fn suspected_rank_receives_its_exclusion() {
    let mut views: [Two; 3] = [0, 1, 2].map(|rank| View::new((Rank(rank), 3), Dead::new(), false, at(10_000)));
    for rank in [0, 1] {
        views[rank].rank_died(Rank(2), Authority::Suspicion);
    }
    let mut is_told = false;
    let mut committed = 0;
    for _ in 0..20 {
        for rank in 0..3 {
            while let Some((to, message)) = views[rank].poll_transmit() {
                is_told |= (to, &message) == (Rank(2), &Message::Excluded);
                views[to.0 as usize].handle(Rank(rank as u32), message, at(1));
            }
            match views[rank].poll_event() {
                Some(Event::Promise { ballot }) => views[rank].promise(ballot, 1),
                Some(Event::Run { ballot, .. }) => views[rank].done(ballot, 3, 0),
                Some(Event::Committed(outcome)) => committed += usize::from(outcome.dead == [Rank(2)]),
                Some(Event::Ended(end)) => assert_eq!((rank, end), (2, End::Partitioned)),
                None => {}
            }
        }
    }
    assert_eq!((committed, is_told), (2, true));
}
