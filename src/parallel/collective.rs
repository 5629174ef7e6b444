//! Collective operations, and ranks as threads of this process.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::tree::{Node, merges, share_tensors};

/// Another rank failed, so this one cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stopped because {reason}")]
pub struct Aborted {
    /// What the failing rank said.
    pub reason: String,
}

impl Aborted {
    /// Returns what to do, where the rank that failed doesn't say it itself.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        if self.reason.contains("was not heard of")
            || self.reason.contains("were not heard of")
            || self.reason.contains("did not finish within")
        {
            "the same command goes on from the newest checkpoint, if there is one; if a process was only slow, raise `--timeout`"
        } else {
            ""
        }
    }
}

/// What ranks do together. Every rank calls the same operations in the same order.
///
/// Every operation returns [`Aborted`] once any rank has called [`Collective::abort`]; none waits for a rank that is gone.
pub trait Collective {
    /// This rank's number, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Returns the values of all ranks, in rank order; lengths may differ.
    ///
    /// # Errors
    /// When a rank has failed.
    fn all_gather(&self, values: Vec<f32>) -> Result<Vec<f32>, Aborted>;

    /// Same in double precision, for sums and counts.
    ///
    /// # Errors
    /// When a rank has failed.
    fn all_gather_f64(&self, values: Vec<f64>) -> Result<Vec<f64>, Aborted>;

    /// Tells whether this rank is the first of its process: the one that keeps what a process needs once.
    fn leads(&self) -> bool;

    /// Number of ranks of this process.
    fn threads(&self) -> usize;

    /// Finishes the canonical tree over `leaves` micro-batches from the complete nodes of every rank. The first rank of each
    /// process gets the total, the others nothing.
    ///
    /// # Errors
    /// When a rank has failed.
    fn reduce(&self, leaves: usize, nodes: Vec<Node<Tensors>>) -> Result<Option<Tensors>, Aborted>;

    /// Gives every rank of this process what its first rank has; the others bring nothing. See [`value_from_leader`].
    ///
    /// # Errors
    /// When a rank has failed.
    fn take_from_leader(&self, value: Option<Shared>) -> Result<Shared, Aborted>;

    /// Waits for the other processes, however long what only the first one does takes.
    ///
    /// # Errors
    /// When a rank has failed.
    fn wait_for_processes(&self, _why: &str) -> Result<(), Aborted> {
        Ok(())
    }

    /// Makes every rank's next or current operation fail with `reason`; the first reason stays.
    fn abort(&self, reason: &str);
}

/// The values of each tensor of a network, such as its gradients; never copied into one piece, which would cost their memory again.
pub type Tensors = Vec<Vec<f32>>;

/// A value that rank threads of one process have in common.
pub type Shared = Arc<dyn Any + Send + Sync>;

/// Gives every rank of this process the value that its first rank makes.
///
/// # Errors
/// When a rank has failed.
///
/// # Panics
/// If ranks do not call the same operations in the same order.
pub fn value_from_leader<T: Send + Sync + 'static>(
    ranks: &dyn Collective,
    value: Option<T>,
) -> Result<Arc<T>, Aborted> {
    let shared = ranks.take_from_leader(value.map(|value| Arc::new(value) as Shared))?;
    Ok(shared.downcast().expect("ranks call the same operation"))
}

/// A rank that is a thread of this process.
#[derive(Debug)]
pub struct ThreadRank {
    rank: usize,
    world: Arc<World>,
}

#[derive(Debug)]
struct World {
    size: usize,
    state: Mutex<Exchange>,
    changed: Condvar,
}

/// One exchange at a time: ranks deposit, the last one publishes, all collect; then the next may start.
#[derive(Debug)]
struct Exchange {
    deposits: Vec<Option<Shared>>,
    published: Option<Vec<Shared>>,
    collected: usize,
    aborted: Option<Aborted>,
}

impl World {
    fn lock(&self) -> MutexGuard<'_, Exchange> {
        // a panicking rank aborts the world in its own words; the state itself is always consistent
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready`, or until a rank has failed.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, Exchange>,
        ready: fn(&Exchange) -> bool,
    ) -> Result<MutexGuard<'a, Exchange>, Aborted> {
        let waiting = |state: &mut Exchange| state.aborted.is_none() && !ready(state);
        let state = self.changed.wait_while(state, waiting).unwrap_or_else(PoisonError::into_inner);
        match &state.aborted {
            Some(aborted) => Err(aborted.clone()),
            None => Ok(state),
        }
    }
}

impl ThreadRank {
    /// Makes the ranks of one world.
    #[must_use]
    pub fn world(size: usize) -> Vec<Self> {
        let state = Exchange { deposits: vec![None; size], published: None, collected: 0, aborted: None };
        let world = Arc::new(World { size, state: Mutex::new(state), changed: Condvar::new() });
        (0..size).map(|rank| Self { rank, world: Arc::clone(&world) }).collect()
    }

    /// Gives every rank the values of all, in rank order, without copying them.
    pub(super) fn exchange<T: Send + Sync + 'static>(&self, value: T) -> Result<Vec<Arc<T>>, Aborted> {
        let world = &*self.world;
        // the previous exchange must have been collected by everyone
        let mut state = world.wait(world.lock(), |state| state.published.is_none())?;
        state.deposits[self.rank] = Some(Arc::new(value));
        if state.deposits.iter().all(Option::is_some) {
            state.published = Some(state.deposits.iter_mut().filter_map(Option::take).collect());
            world.changed.notify_all();
        }
        let mut state = world.wait(state, |state| state.published.is_some())?;
        let values = state.published.clone().unwrap_or_default();
        state.collected += 1;
        if state.collected == world.size {
            state.collected = 0;
            state.published = None;
            world.changed.notify_all();
        }
        drop(state);
        let typed = values.into_iter().map(|value| value.downcast::<T>().expect("ranks call the same operation"));
        Ok(typed.collect())
    }

    pub(super) fn gather<T: Clone + Send + Sync + 'static>(&self, values: Vec<T>) -> Result<Vec<T>, Aborted> {
        if self.world.size == 1 {
            return Ok(values);
        }
        let parts = self.exchange(values)?;
        let mut all = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
        for part in &parts {
            all.extend_from_slice(part);
        }
        Ok(all)
    }
}

impl ThreadRank {
    /// Combines the nodes of all ranks as far as the tree allows. The first rank gets the result.
    ///
    /// Tensors change hands instead of being copied: each rank takes its share of them from all others, adds them up in place, in pieces that stay in
    /// the cache, and gives them to the first rank.
    pub(super) fn combine(
        &self,
        leaves: usize,
        nodes: Vec<Node<Tensors>>,
    ) -> Result<Option<Vec<Node<Tensors>>>, Aborted> {
        let (places, tensors): (Vec<_>, Vec<_>) =
            nodes.into_iter().map(|node| ((node.level, node.index), node.values)).unzip();
        let lengths = tensors.first().map_or_else(Vec::new, |first: &Tensors| first.iter().map(Vec::len).collect());
        let all = self.exchange(Nodes { places, lengths, tensors: tensors.into_iter().map(Hand::all).collect() })?;
        let lengths = all.iter().map(|nodes| &nodes.lengths).find(|lengths| !lengths.is_empty());
        let places: Vec<(u32, usize)> = all.iter().flat_map(|nodes| nodes.places.iter().copied()).collect();
        let (additions, left) = merges(leaves, &places);
        let hands: Vec<&Vec<Hand>> = all.iter().flat_map(|nodes| &nodes.tensors).collect();
        for at in share_tensors(lengths.map_or(&[], Vec::as_slice), self.world.size)[self.rank].clone() {
            let mut slots: Vec<Vec<f32>> = hands.iter().map(|hands| hands[at].take()).collect();
            add_up(&mut slots, &additions);
            for node in &left {
                hands[node.values][at].put(std::mem::take(&mut slots[node.values]));
            }
        }
        self.exchange(())?;
        let collect = |node: &Node<usize>| Node {
            level: node.level,
            index: node.index,
            values: hands[node.values].iter().map(Hand::take).collect(),
        };
        Ok(self.leads().then(|| left.iter().map(collect).collect()))
    }
}

/// The nodes of a rank, for others to take tensors from.
struct Nodes {
    places: Vec<(u32, usize)>,
    lengths: Vec<usize>,
    tensors: Vec<Vec<Hand>>,
}

/// A tensor that goes from thread to thread.
struct Hand(Mutex<Vec<f32>>);

impl Hand {
    fn all(tensors: Tensors) -> Vec<Self> {
        tensors.into_iter().map(|values| Self(Mutex::new(values))).collect()
    }

    fn take(&self) -> Vec<f32> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, values: Vec<f32>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = values;
    }
}

/// Carries out additions of whole vectors, one piece of all of them after another.
fn add_up(slots: &mut [Vec<f32>], additions: &[(usize, usize)]) {
    let length = slots.first().map_or(0, Vec::len);
    assert!(slots.iter().all(|slot| slot.len() == length), "nodes of one tree have one length");
    for start in (0..length).step_by(PIECE) {
        let piece = start..length.min(start + PIECE);
        for &(to, from) in additions {
            let Ok([to, from]) = slots.get_disjoint_mut([to, from]) else {
                unreachable!("a node isn't added to itself")
            };
            to[piece.clone()].iter_mut().zip(&from[piece.clone()]).for_each(|(a, b)| *a += *b);
        }
    }
}

/// Elements that are added up at a time.
const PIECE: usize = 1 << 14;

impl Collective for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world.size
    }

    fn all_gather(&self, values: Vec<f32>) -> Result<Vec<f32>, Aborted> {
        self.gather(values)
    }

    fn all_gather_f64(&self, values: Vec<f64>) -> Result<Vec<f64>, Aborted> {
        self.gather(values)
    }

    fn leads(&self) -> bool {
        self.rank == 0
    }

    fn threads(&self) -> usize {
        self.world.size
    }

    fn reduce(&self, leaves: usize, nodes: Vec<Node<Tensors>>) -> Result<Option<Tensors>, Aborted> {
        let nodes = self.combine(leaves, nodes)?;
        // the ranks of one process hold the whole tree
        Ok(nodes.map(|mut nodes| nodes.pop().map(|root| root.values).unwrap_or_default()))
    }

    fn take_from_leader(&self, value: Option<Shared>) -> Result<Shared, Aborted> {
        if self.world.size == 1 {
            return Ok(value.expect("the first rank brings the value"));
        }
        let all = self.exchange(value)?;
        Ok((*all[0]).clone().expect("the first rank brings the value"))
    }

    fn abort(&self, reason: &str) {
        let mut state = self.world.lock();
        if state.aborted.is_none() {
            state.aborted = Some(Aborted { reason: reason.to_owned() });
        }
        drop(state);
        self.world.changed.notify_all();
    }
}

/// Runs `work` on `size` rank threads, each inside a compute pool of one thread, and returns the results in rank order.
///
/// A rank that returns an error or panics aborts the others; the error that came first is returned, never an [`Aborted`] that it caused.
///
/// # Errors
/// The first error of any rank; a panic becomes an error through `panicked`.
pub fn run_ranks<R: Send, E: Send + std::fmt::Display>(
    size: usize,
    panicked: impl Fn(usize, String) -> E + Sync,
    work: impl Fn(ThreadRank) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let first: Mutex<Option<E>> = Mutex::new(None);
    let results: Vec<Option<R>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ThreadRank::world(size)
            .into_iter()
            .map(|rank| {
                let (first, panicked, work) = (&first, &panicked, &work);
                let run = move || {
                    let number = rank.rank;
                    let world = ThreadRank { rank: number, world: Arc::clone(&rank.world) };
                    let outcome =
                        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| in_pool_of_one(|| work(rank))));
                    let error = match outcome {
                        Ok(Ok(result)) => return Some(result),
                        Ok(Err(error)) => error,
                        Err(payload) => panicked(number, panic_text(payload.as_ref())),
                    };
                    let reason = format!("rank {number} failed: {error}");
                    let mut slot = first.lock().unwrap_or_else(PoisonError::into_inner);
                    slot.get_or_insert(error);
                    drop(slot);
                    world.abort(&reason);
                    None
                };
                scope.spawn(run)
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().ok().flatten()).collect()
    });
    match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// burn's CPU backend splits work over the current rayon pool; ranks are our way to use cores, so each computes alone.
fn in_pool_of_one<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    match rayon::ThreadPoolBuilder::new().num_threads(1).build() {
        Ok(pool) => pool.install(work),
        // without a second thread the global pool serves; results are the same
        Err(_) => work(),
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::tree::{TreeSum, share};
    use super::*;

    fn run<R: Send>(size: usize, work: impl Fn(ThreadRank) -> Result<R, String> + Sync) -> Result<Vec<R>, String> {
        run_ranks(size, |rank, text| format!("rank {rank} panicked: {text}"), work)
    }

    #[test]
    fn gathers_in_rank_order_again_and_again() {
        let all = run(3, |rank| {
            let mut seen = Vec::new();
            for round in 0..50 {
                let mine = vec![rank.rank() as f32 + round as f32; rank.rank() + 1];
                seen.push(rank.all_gather(mine).map_err(|e| e.to_string())?);
            }
            Ok(seen)
        })
        .unwrap();
        for seen in &all {
            for (round, values) in seen.iter().enumerate() {
                let r = round as f32;
                assert_eq!(values, &[r, r + 1.0, r + 1.0, r + 2.0, r + 2.0, r + 2.0]);
            }
        }
    }

    #[test]
    fn reduces_to_the_same_bits_on_any_number_of_ranks() {
        for (leaves, lengths) in
            [(1, vec![17]), (5, vec![1, 0, 17, 3]), (8, vec![17]), (12, vec![]), (5, vec![3 * PIECE + 17, 5])]
        {
            let tensor = |i: usize, length: usize| (0..length).map(|j| 1.0 / ((i * 31 + j * 7 + 1) as f32)).collect();
            let leaf = |i: usize| lengths.iter().map(|&length| tensor(i, length)).collect::<Tensors>();
            let totals: Vec<Tensors> = (1..=leaves.min(6))
                .map(|size| {
                    let work = |rank: ThreadRank| {
                        let mut sum = TreeSum::new(leaves);
                        share(leaves, rank.rank(), size).for_each(|i| sum.push_leaf(i, leaf(i)));
                        rank.reduce(leaves, sum.into_nodes()).map_err(|e| e.to_string())
                    };
                    let mut all = run(size, work).unwrap();
                    assert!(all[1..].iter().all(Option::is_none), "one copy in a process");
                    all.swap_remove(0).unwrap()
                })
                .collect();
            assert!(totals.windows(2).all(|pair| pair[0] == pair[1]), "{leaves} leaves");
        }
    }

    #[test]
    fn ranks_of_a_process_share_one_value() {
        for size in [1, 2, 3] {
            let all = run(size, |rank| {
                let mine = rank.leads().then(|| vec![rank.rank() as f32 + 7.0]);
                value_from_leader(&rank, mine).map_err(|e| e.to_string())
            })
            .unwrap();
            assert_eq!(all.len(), size);
            assert!(all.iter().all(|value| Arc::ptr_eq(value, &all[0]) && **value == [7.0]));
        }
    }

    #[test]
    fn a_failing_rank_ends_the_others_and_its_own_error_is_told() {
        for how in ["error", "panic"] {
            let result = run(4, |rank| {
                if rank.rank() == 2 {
                    assert!(how == "error", "on purpose");
                    return Err("bad image".to_owned());
                }
                rank.all_gather(vec![1.0]).map_err(|e| e.to_string())
            });
            let expected = if how == "error" { "bad image" } else { "rank 2 panicked: on purpose" };
            assert_eq!(result.unwrap_err(), expected);
        }
    }
}
