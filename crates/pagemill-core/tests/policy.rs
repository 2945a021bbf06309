//! C4.3: how much a list moves and holds adapts, between bounds.
use pagemill_core::{ListPolicy, SlowEvent};

fn after(events: &[SlowEvent], limit_max: u32) -> ListPolicy {
    let share = ListPolicy { limit: ListPolicy::LIMIT_MIN.min(limit_max), ..ListPolicy::START };
    events.iter().fold(share, |policy, &event| policy.after(event, limit_max))
}

#[test]
fn the_batch_doubles_while_all_goes_one_way() {
    for event in [SlowEvent::Refill, SlowEvent::Drain] {
        let batches: Vec<u32> = (1..=8).map(|n| after(&vec![event; n], 2016).batch).collect();
        let mut expected = ListPolicy::BATCH_MIN;
        for batch in batches {
            // Half of the list at most, which starts with room for four smallest batches.
            assert_eq!(batch, expected.min(ListPolicy::LIMIT_MIN / 2), "{event:?}");
            expected = (expected * 2).min(ListPolicy::BATCH_MAX);
        }
    }
}

#[test]
fn the_limit_grows_while_callers_swing() {
    use SlowEvent::{Drain, Refill};
    let start = after(&[Refill], 2016);
    let swung = after(&[Refill, Drain, Refill, Drain], 2016);
    assert_eq!(swung.limit, start.limit + 3 * ListPolicy::BATCH_MIN);
    // A turn begins with a small step again.
    assert_eq!(after(&[Refill, Refill, Refill, Drain], 2016).batch, ListPolicy::BATCH_MIN);
}

#[test]
fn both_stay_between_their_bounds() {
    let mut random = 1u64;
    for limit_max in [1, 2, 3, 63, 64, 65, 200, 256, 2016] {
        let mut policy = after(&[], limit_max);
        for _ in 0..10_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let event = if random >> 63 == 0 { SlowEvent::Refill } else { SlowEvent::Drain };
            policy = policy.after(event, limit_max);
            assert!(policy.limit <= limit_max, "{policy:?} above {limit_max}");
            assert!((1..=ListPolicy::BATCH_MAX).contains(&policy.batch), "{policy:?}");
            assert!(policy.batch <= policy.limit.div_ceil(2), "{policy:?} drains more than half of the list");
            assert!(policy.batch < 64 || policy.batch.is_multiple_of(64), "{policy:?} moves a part of a section");
            assert_eq!(ListPolicy::from_word(policy.as_word()), policy);
        }
    }
}
