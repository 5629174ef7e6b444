//! Ranks as threads of several processes.
//!
//! The ranks of a process are neighbours: process `p` of `P`, each with `T` rank threads, has the ranks `p T .. (p + 1) T`. Threads combine among
//! themselves first; what leaves a process goes through its first rank alone.

use std::sync::Arc;

use super::collective::{Aborted, Collective, Shared, Tensors, ThreadRank, value_from_leader};
use super::config::Reduction;
use super::transport::{Element, Link, cut, put};
use super::tree::{Node, Summand, TreeSum, share};

/// Elements of a gradient that are exchanged at a time: 25 MB, as in torch's DDP.
const BUCKET: usize = 25 << 18;

/// A rank that is a thread of one of several processes.
#[derive(Debug)]
pub struct ProcessRank {
    thread: ThreadRank,
    link: Arc<Link>,
    reduction: Reduction,
}

impl ProcessRank {
    /// Makes a thread of this process a rank of the whole run.
    #[must_use]
    pub fn new(thread: ThreadRank, link: Arc<Link>, reduction: Reduction) -> Self {
        Self { thread, link, reduction }
    }

    fn gather<T: Element>(&self, name: &str, values: Vec<T>) -> Result<Vec<T>, Aborted> {
        let local = self.thread.gather(values)?;
        let all = if self.leads() { Some(self.link.all_gather(name, &local)?.concat()) } else { None };
        Ok(Arc::unwrap_or_clone(value_from_leader(&self.thread, all)?))
    }

    /// Finishes the tree from the nodes that each process holds: every process adds up its share of each bucket, in the tree's order, and the shares
    /// are put together. So `2 (P - 1) / P` of the gradient leave a process, as in a ring, if it holds one node.
    fn finish(&self, leaves: usize, mut nodes: Vec<Node<Tensors>>) -> Result<Tensors, Aborted> {
        let length = nodes.first().map_or(0, |node| node.values.iter().map(Vec::len).sum());
        let processes = self.link.processes();
        let places: Vec<u64> = nodes.iter().flat_map(|node| [u64::from(node.level), node.index as u64]).collect();
        let places = self.link.all_gather("places in the tree", &places)?;
        for start in (0..length).step_by(BUCKET) {
            let bucket = length.min(start + BUCKET) - start;
            let shares = (0..processes).map(|process| share(bucket, process, processes));
            let parts: Vec<Vec<f32>> = shares
                .map(|share| {
                    let range = start + share.start..start + share.end;
                    let cuts: Vec<&[f32]> = nodes.iter().flat_map(|node| cut(&node.values, range.clone())).collect();
                    cuts.concat()
                })
                .collect();
            let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
            let received = self.link.exchange("reduce-scatter", bucket, &parts)?;
            let mine = share(bucket, self.link.process(), processes).len();
            let mut sum = TreeSum::new(leaves);
            for (places, mut values) in places.iter().zip(received) {
                let (places, _) = places.as_chunks::<2>();
                for &[level, index] in places {
                    let rest = values.split_off(mine.min(values.len()));
                    sum.push(Node { level: level as u32, index: index as usize, values });
                    values = rest;
                }
            }
            let reduced = if mine == 0 { Vec::new() } else { sum.finish() };
            let reduced = self.link.all_gather("all-gather of a bucket", &reduced)?.concat();
            // what was sent is not needed again, so the total takes its place
            put(&mut nodes[0].values, start..start + bucket, &reduced);
        }
        Ok(nodes.into_iter().next().map(|node| node.values).unwrap_or_default())
    }
}

impl Collective for ProcessRank {
    fn rank(&self) -> usize {
        self.link.process() * self.thread.world_size() + self.thread.rank()
    }

    fn world_size(&self) -> usize {
        self.link.processes() * self.thread.world_size()
    }

    fn all_gather(&self, values: Vec<f32>) -> Result<Vec<f32>, Aborted> {
        self.gather("all-gather", values)
    }

    fn all_gather_f64(&self, values: Vec<f64>) -> Result<Vec<f64>, Aborted> {
        self.gather("all-gather", values)
    }

    fn leads(&self) -> bool {
        self.thread.leads()
    }

    fn threads(&self) -> usize {
        self.thread.world_size()
    }

    fn reduce(&self, leaves: usize, nodes: Vec<Node<Tensors>>) -> Result<Option<Tensors>, Aborted> {
        let Some(nodes) = self.thread.combine(leaves, nodes)? else { return Ok(None) };
        Ok(Some(match self.reduction {
            Reduction::Canonical => self.finish(leaves, nodes)?,
            Reduction::Fast => {
                let mut nodes = nodes.into_iter().map(|node| node.values);
                let mut total = nodes.next().unwrap_or_default();
                nodes.for_each(|node| total.add(&node));
                self.link.sum("all-reduce", &mut total, BUCKET)?;
                total
            }
        }))
    }

    fn take_from_leader(&self, value: Option<Shared>) -> Result<Shared, Aborted> {
        self.thread.take_from_leader(value)
    }

    fn wait_for_processes(&self, why: &str) -> Result<(), Aborted> {
        if self.leads() { self.link.barrier(why) } else { Ok(()) }
    }

    fn abort(&self, reason: &str) {
        self.thread.abort(reason);
        self.link.abort(reason);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::collective::run_ranks;
    use super::super::transport::{Patience, Transport};
    use super::*;

    /// Processes that are threads of the test.
    struct Memory(ThreadRank);

    impl Transport for Memory {
        fn process(&self) -> usize {
            self.0.rank()
        }

        fn processes(&self) -> usize {
            self.0.world_size()
        }

        fn exchange(&self, _: &str, parts: Vec<Arc<Vec<u8>>>, _: Patience) -> Result<Vec<Vec<u8>>, Aborted> {
            let all = self.0.exchange(parts)?;
            Ok(all.iter().map(|parts| parts[self.process()].to_vec()).collect())
        }

        fn sum(&self, _: &str, values: Vec<f32>) -> Result<Vec<f32>, Aborted> {
            let all = self.0.exchange(values)?;
            Ok((0..all[0].len()).map(|at| all.iter().rev().map(|values| values[at]).sum()).collect())
        }

        fn abort(&self, reason: &str) {
            self.0.abort(reason);
        }
    }

    /// Runs `work` on `processes` with `threads` ranks each; results in rank order.
    fn run<R: Send>(
        processes: usize,
        threads: usize,
        work: impl Fn(ProcessRank) -> Result<R, Aborted> + Sync,
    ) -> Vec<Result<R, String>> {
        run_with(Reduction::Canonical, processes, threads, work)
    }

    fn run_with<R: Send>(
        reduction: Reduction,
        processes: usize,
        threads: usize,
        work: impl Fn(ProcessRank) -> Result<R, Aborted> + Sync,
    ) -> Vec<Result<R, String>> {
        let results = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for member in ThreadRank::world(processes) {
                let (results, work) = (&results, &work);
                scope.spawn(move || {
                    let process = member.rank();
                    let link = Arc::new(Link::new(Arc::new(Memory(member))));
                    let outcome = run_ranks(
                        threads,
                        |_, text| text,
                        |thread| {
                            work(ProcessRank::new(thread, Arc::clone(&link), reduction)).map_err(|error| error.reason)
                        },
                    );
                    if let Err(reason) = &outcome {
                        link.abort(reason);
                    }
                    results.lock().unwrap().push((process, outcome));
                });
            }
        });
        let mut results = results.into_inner().unwrap();
        results.sort_by_key(|(process, _)| *process);
        results
            .into_iter()
            .flat_map(|(_, outcome)| match outcome {
                Ok(all) => all.into_iter().map(Ok).collect(),
                Err(reason) => vec![Err(reason)],
            })
            .collect()
    }

    #[test]
    fn gathers_in_rank_order() {
        for (processes, threads) in [(1, 3), (2, 2), (3, 1)] {
            let all = run(processes, threads, |rank| {
                let mine = vec![rank.rank() as f64; rank.rank() % 2 + 1];
                let narrow = mine.iter().map(|&x| x as f32).collect();
                Ok((rank.all_gather_f64(mine)?, rank.all_gather(narrow)?, rank.leads(), rank.world_size()))
            });
            let ranks = processes * threads;
            let expected: Vec<f64> = (0..ranks).flat_map(|rank| vec![rank as f64; rank % 2 + 1]).collect();
            for (rank, result) in all.iter().enumerate() {
                let (wide, narrow, leads, world) = result.as_ref().unwrap();
                assert_eq!(wide, &expected);
                assert!(narrow.iter().zip(&expected).all(|(a, b)| f64::from(*a) == *b));
                assert_eq!((*leads, *world), (rank % threads == 0, ranks));
            }
        }
    }

    #[test]
    fn reduces_to_the_same_bits_on_any_processes_and_threads() {
        for (leaves, length) in [(8, 17), (12, 33), (5, 1), (8, 2 * BUCKET + 5), (6, 0)] {
            let values = |i: usize| (0..length).map(move |j| 1.0 / ((i * 31 + j % 1000 * 7 + 1) as f32));
            // tensors that end within buckets and within a process's share, one empty
            let cuts = [length / 3, length / 3, length - length / 7];
            let leaf = |i: usize| -> Tensors {
                let ends = cuts.iter().copied().chain([length]);
                let starts = [0].into_iter().chain(cuts);
                starts.zip(ends).map(|(start, end)| values(i).skip(start).take(end - start).collect()).collect()
            };
            let mut sum = TreeSum::new(leaves);
            (0..leaves).for_each(|i| sum.push_leaf(i, leaf(i)));
            let expected = sum.finish();
            let big = length > 1000;
            for (processes, threads) in [(1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (5, 1), (1, 5)] {
                if big && processes * threads > 2 {
                    continue;
                }
                let all = run(processes, threads, |rank| {
                    let mut sum = TreeSum::new(leaves);
                    share(leaves, rank.rank(), rank.world_size()).for_each(|i| sum.push_leaf(i, leaf(i)));
                    rank.reduce(leaves, sum.into_nodes())
                });
                for (rank, total) in all.into_iter().enumerate() {
                    let total = total.unwrap();
                    assert_eq!(total.is_some(), rank % threads == 0);
                    assert!(total.is_none_or(|total| total == expected), "{leaves} leaves, {processes} x {threads}");
                }
            }
        }
    }

    #[test]
    fn a_fast_reduction_is_the_same_sum_on_every_process() {
        let leaf =
            |i: usize| -> Tensors { vec![vec![0.1 * i as f32; 5], vec![], vec![1.0 / (i + 1) as f32; 2 * BUCKET]] };
        let mut sum = TreeSum::new(6);
        (0..6).for_each(|i| sum.push_leaf(i, leaf(i)));
        let expected = sum.finish();
        let all = run_with(Reduction::Fast, 3, 2, |rank| {
            let mut sum = TreeSum::new(6);
            share(6, rank.rank(), 6).for_each(|i| sum.push_leaf(i, leaf(i)));
            rank.reduce(6, sum.into_nodes())
        });
        let totals: Vec<Tensors> = all.into_iter().filter_map(|total| total.unwrap()).collect();
        assert!(totals.len() == 3 && totals.iter().all(|total| *total == totals[0]));
        for (got, expected) in totals[0].iter().flatten().zip(expected.iter().flatten()) {
            assert!((got - expected).abs() <= 1e-6, "{got} {expected}");
        }
    }

    #[test]
    fn processes_that_do_different_things_stop_and_say_where() {
        let all = run(2, 1, |rank| {
            rank.all_gather(vec![1.0])?;
            if rank.rank() == 1 {
                rank.all_gather_f64(vec![1.0]).map(|_| ())
            } else {
                rank.all_gather(vec![1.0]).map(|_| ())
            }
        });
        for result in all {
            let reason = result.unwrap_err();
            assert!(reason.contains("operation 1, all-gather of f32"), "{reason}");
            assert!(reason.contains("operation 1, all-gather of f64"), "{reason}");
        }
    }

    #[test]
    fn a_failing_rank_ends_all_processes_with_its_reason() {
        let all = run(2, 2, |rank| {
            if rank.rank() == 3 {
                return Err(Aborted { reason: "bad image".to_owned() });
            }
            rank.all_gather(vec![1.0]).map(|_| ())
        });
        assert_eq!(all.len(), 2);
        assert!(all.iter().all(|result| result.as_ref().unwrap_err().contains("bad image")), "{all:?}");
    }
}
