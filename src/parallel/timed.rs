//! How long a rank waits for others.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::collective::{Aborted, Collective, Shared, Tensors};
use super::tree::Node;

/// A rank whose waiting is measured: the time that its collective operations take.
pub struct Timed<'a> {
    ranks: &'a dyn Collective,
    waited: Cell<Duration>,
    /// How long it had waited when its last gradient was ready, and when that was.
    ready: Cell<(Duration, Instant)>,
}

impl<'a> Timed<'a> {
    /// Measures a rank from now on.
    #[must_use]
    pub fn new(ranks: &'a dyn Collective) -> Self {
        Self { ranks, waited: Cell::default(), ready: Cell::new((Duration::ZERO, Instant::now())) }
    }

    /// Returns how long it has waited.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// Returns how long it has worked, from `start`, when it had waited for `waited`, until its last gradient was ready.
    #[must_use]
    pub fn worked(&self, start: Instant, waited: Duration) -> Duration {
        let (had_waited, ready) = self.ready.get();
        ready.saturating_duration_since(start).saturating_sub(had_waited.saturating_sub(waited))
    }

    fn time<R>(&self, operation: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = operation();
        self.waited.set(self.waited.get() + start.elapsed());
        result
    }
}

impl Collective for Timed<'_> {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn world_size(&self) -> usize {
        self.ranks.world_size()
    }

    fn all_gather(&self, values: Vec<f32>) -> Result<Vec<f32>, Aborted> {
        self.time(|| self.ranks.all_gather(values))
    }

    fn all_gather_f64(&self, values: Vec<f64>) -> Result<Vec<f64>, Aborted> {
        self.time(|| self.ranks.all_gather_f64(values))
    }

    fn leads(&self) -> bool {
        self.ranks.leads()
    }

    fn threads(&self) -> usize {
        self.ranks.threads()
    }

    fn reduce(&self, leaves: usize, nodes: Vec<Node<Tensors>>) -> Result<Option<Tensors>, Aborted> {
        self.ready.set((self.waited.get(), Instant::now()));
        self.time(|| self.ranks.reduce(leaves, nodes))
    }

    fn take_from_leader(&self, value: Option<Shared>) -> Result<Shared, Aborted> {
        self.time(|| self.ranks.take_from_leader(value))
    }

    fn wait_for_processes(&self, why: &str) -> Result<(), Aborted> {
        self.time(|| self.ranks.wait_for_processes(why))
    }

    fn abort(&self, reason: &str) {
        self.ranks.abort(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::super::collective::run_ranks;
    use super::*;

    #[test]
    fn waiting_for_a_slow_rank_is_not_work() {
        let times = run_ranks(
            2,
            |_, text| text,
            |rank| {
                let timed = Timed::new(&rank);
                let (start, waited) = (Instant::now(), timed.waited());
                timed.all_gather(vec![1.0]).map_err(|e| e.reason)?;
                std::thread::sleep(Duration::from_millis(if timed.rank() == 1 { 300 } else { 0 }));
                timed.all_gather(vec![1.0]).map_err(|e| e.reason)?;
                timed.reduce(2, vec![Node { level: 0, index: timed.rank(), values: vec![] }]).map_err(|e| e.reason)?;
                Ok((timed.worked(start, waited), timed.waited()))
            },
        )
        .unwrap();
        let limit = Duration::from_millis(150);
        assert!(times[0].0 < limit && times[0].1 > limit, "{times:?}");
        assert!(times[1].0 > limit, "{times:?}");
    }
}
