//! What a step's time goes to on each rank, and which rank holds the others up.

use crate::report::Pace;

/// Steps that are looked at together: one slow step is nobody's fault.
const WINDOW: usize = 20;
/// How much longer than the middle rank one may need.
const TOLERATED: f64 = 1.3;

/// Watches the ranks of a run.
#[derive(Debug)]
pub(super) struct Stragglers {
    /// Micro-batches of each rank.
    shares: Vec<usize>,
    /// Seconds of work of each rank in the steps of this window.
    work: Vec<Vec<f64>>,
    /// Ranks that were named.
    named: Vec<usize>,
}

impl Stragglers {
    /// Watches ranks with so many micro-batches each.
    pub(super) fn new(shares: Vec<usize>) -> Self {
        Self { work: vec![Vec::new(); shares.len()], shares, named: Vec::new() }
    }

    /// Takes a step's times, two a rank: for its input, and for its forward and backward passes. Names a rank that is slow again and again, once.
    pub(super) fn observe(&mut self, times: &[[f64; 2]]) -> (Pace, Option<String>) {
        let work: Vec<f64> = times.iter().map(|[_, work]| *work).collect();
        let (median, slowest) = (middle(&work), slowest(&work));
        let input = times.iter().map(|[input, _]| *input).fold(0.0, f64::max);
        let pace = Pace { input_s: input, median_s: work[median], slowest_s: work[slowest], slowest_rank: slowest };
        self.work.iter_mut().zip(&work).for_each(|(all, work)| all.push(*work));
        (pace, (self.work[0].len() == WINDOW).then(|| self.name()).flatten())
    }

    fn name(&mut self) -> Option<String> {
        // of the steps the one in the middle; ranks may have a micro-batch more than others
        let each = |(work, share): (&Vec<f64>, &usize)| work[middle(work)] / (*share).max(1) as f64;
        let usual: Vec<f64> = self.work.iter().zip(&self.shares).map(each).collect();
        self.work.iter_mut().for_each(Vec::clear);
        let (median, slowest) = (middle(&usual), slowest(&usual));
        let times = usual[slowest] / usual[median].max(1e-9);
        if times <= TOLERATED || self.named.contains(&slowest) {
            return None;
        }
        self.named.push(slowest);
        Some(format!(
            "note: rank {slowest} needs {:.3} s for a micro-batch, {times:.1} times as long as rank {median} in the middle: all ranks wait for it; look at the load, clock and \
             cores of its node (`pace` in metrics.jsonl has every step)",
            usual[slowest]
        ))
    }
}

/// The place of the number in the middle, the smaller of two.
fn middle(work: &[f64]) -> usize {
    let mut order: Vec<usize> = (0..work.len()).collect();
    order.sort_by(|&a, &b| work[a].total_cmp(&work[b]));
    order[(order.len() - 1) / 2]
}

fn slowest(work: &[f64]) -> usize {
    (0..work.len()).max_by(|&a, &b| work[a].total_cmp(&work[b])).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(shares: &[usize], work: &[f64], windows: usize) -> Vec<String> {
        let mut stragglers = Stragglers::new(shares.to_vec());
        let times: Vec<[f64; 2]> = work.iter().map(|work| [0.01, *work]).collect();
        (0..windows * WINDOW).filter_map(|_| stragglers.observe(&times).1).collect()
    }

    #[test]
    fn a_slow_rank_is_named_once() {
        assert_eq!(noted(&[1; 4], &[0.5, 0.52, 0.49, 0.6], 3), [""; 0]);
        let notes = noted(&[2; 4], &[0.5, 0.52, 1.0, 0.5], 3);
        let start = "note: rank 2 needs 0.500 s for a micro-batch, 2.0 times as long as rank";
        assert!(notes.len() == 1 && notes[0].starts_with(start), "{notes:?}");
        assert_eq!(noted(&[1; 2], &[0.5, 1.0], 1).len(), 1, "of two ranks, the other is the middle");
        assert_eq!(noted(&[3, 3, 2], &[0.9, 0.9, 0.6], 2), [""; 0], "an uneven share is no fault");
    }

    #[test]
    fn a_hiccup_is_no_slow_rank() {
        let mut stragglers = Stragglers::new(vec![1; 2]);
        let work = |step: usize| if step % 7 == 3 { 30.0 } else { 0.5 };
        assert!((0..5 * WINDOW).all(|step| stragglers.observe(&[[0.0, 0.5], [0.0, work(step)]]).1.is_none()));
    }

    #[test]
    fn a_step_tells_who_was_slowest() {
        let (pace, _) = Stragglers::new(vec![1; 3]).observe(&[[0.0, 1.0], [0.25, 3.0], [0.125, 2.0]]);
        assert_eq!(pace, Pace { input_s: 0.25, median_s: 2.0, slowest_s: 3.0, slowest_rank: 1 });
    }
}
