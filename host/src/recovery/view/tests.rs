//! What a view does as time passes, which the search leaves out.

use super::*;

type Two = View<u8, u8>;

fn at(ms: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(ms)
}

/// Let two ranks hear what they say, until neither says more.
fn talk(views: &mut [Two; 2], now: Instant) {
    while let Some((from, (to, said))) =
        (0..2).find_map(|rank| views[rank].poll_transmit().map(|transmit| (rank, transmit)))
    {
        views[to.0 as usize].handle(Rank(from as u32), said, now);
    }
}

fn two() -> [Two; 2] {
    [0, 1].map(|rank| View::new((Rank(rank), 2), Dead::new(), true, at(10_000)))
}

/// Let both promise; returns the ballot that is planned.
fn plan(views: &mut [Two; 2], now: Instant) -> Ballot {
    views[0].begin();
    let mut planned = None;
    loop {
        talk(views, now);
        let mut moved = false;
        for view in views.iter_mut() {
            match view.poll_event() {
                Some(Event::Promise { ballot }) => view.promise(ballot, 1),
                Some(Event::Run { ballot, accounts }) => {
                    assert_eq!(accounts.len(), 2);
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
fn a_deadline_says_whether_others_may_have_committed() {
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
fn a_plan_that_comes_to_nothing_is_tried_again() {
    let mut views = two();
    let first = plan(&mut views, at(0));
    views[1].failed(first, at(5));
    talk(&mut views, at(5));
    assert_eq!(views[0].poll_timeout(), at(5) + RETRY);
    views[0].handle_timeout(at(5) + RETRY);
    talk(&mut views, at(400));
    assert!(matches!(views[1].poll_event(), Some(Event::Promise { ballot }) if ballot > first));
}

/// Connections take along what was on its way: it is said again.
#[test]
fn what_was_not_answered_is_said_again() {
    let mut views = two();
    let ballot = plan(&mut views, at(0));
    for rank in [0, 1] {
        views[rank].done(ballot, 3, 4);
    }
    assert!(matches!(views[1].poll_transmit(), Some((Rank(0), Message::Done { .. }))), "and it is lost");
    talk(&mut views, at(1));
    views[0].handle_timeout(at(1));
    talk(&mut views, at(1));
    assert_eq!(views[0].poll_event(), None);
    let resend = views[0].poll_timeout();
    assert_eq!(resend, at(1) + RESEND);
    views[0].handle_timeout(resend);
    talk(&mut views, resend);
    let outcome = Outcome { dead: vec![], decision: 3, word: 4 };
    for view in &mut views {
        assert_eq!(view.poll_event(), Some(Event::Committed(outcome.clone())));
    }
}

/// Who takes no further part says so, and is waited for no longer.
#[test]
fn who_gives_up_is_dead_to_the_others() {
    let mut views = two();
    plan(&mut views, at(0));
    views[1].give_up();
    talk(&mut views, at(1));
    assert_eq!(views[0].dead().get(&Rank(1)), Some(&Authority::Word));
    assert!(matches!(views[0].poll_event(), Some(Event::Promise { .. })));
    assert_eq!(views[0].awaited(), []);
}

/// It had committed with the words of all, which those that are left do not know: what one of them hears late of that is
/// not what they adopt.
#[test]
fn a_commit_of_the_dead_is_not_heard_once_others_go_on() {
    let mut views: [Two; 3] = [0, 1, 2].map(|rank| View::new((Rank(rank), 3), Dead::new(), true, at(10_000)));
    let (mut late, mut committed) = (Vec::new(), Vec::new());
    views[0].begin();
    loop {
        let mut moved = false;
        for rank in 0..3 {
            while let Some((to, said)) = views[rank].poll_transmit() {
                moved = true;
                let is_commit = matches!(said, Message::Commit { .. });
                if is_commit && rank == 0 {
                    late.push((to, said));
                    continue;
                }
                // It comes while the commit of the next attempt is on its way.
                if let Some((_, said)) = late.iter().find(|(of, _)| is_commit && *of == to) {
                    views[to.0 as usize].handle(Rank(0), said.clone(), at(1));
                }
                views[to.0 as usize].handle(Rank(rank as u32), said, at(1));
            }
            while let Some(event) = views[rank].poll_event() {
                moved = true;
                match event {
                    Event::Promise { ballot } => views[rank].promise(ballot, 1),
                    // The first has got no tree.
                    Event::Run { ballot, .. } => views[rank].done(ballot, 3, if rank == 0 { 0 } else { 5 }),
                    Event::Committed(outcome) if rank == 0 => assert_eq!(outcome.word, 0),
                    Event::Committed(outcome) => committed.push(outcome),
                    Event::Ended(end) => panic!("{end:?}"),
                }
            }
            if late.len() == 2 && views[1].dead().is_empty() {
                views[1].rank_died(Rank(0), Authority::Word);
                views[2].rank_died(Rank(0), Authority::Word);
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    assert!(committed.len() == 2 && committed[0] == committed[1], "{committed:?}");
}

/// It may live behind a broken line, and wait.
#[test]
fn who_only_seems_dead_is_told_that_the_others_go_on() {
    let mut views: [Two; 3] = [0, 1, 2].map(|rank| View::new((Rank(rank), 3), Dead::new(), false, at(10_000)));
    for rank in [0, 1] {
        views[rank].rank_died(Rank(2), Authority::Suspicion);
    }
    let mut is_told = false;
    let mut committed = 0;
    for _ in 0..20 {
        for rank in 0..3 {
            while let Some((to, said)) = views[rank].poll_transmit() {
                is_told |= (to, &said) == (Rank(2), &Message::Excluded);
                views[to.0 as usize].handle(Rank(rank as u32), said, at(1));
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
