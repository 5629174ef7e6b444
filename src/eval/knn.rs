//! Weighted nearest-neighbour classification: what a network learnt, without training anything.
//!
//! Wu et al., 2018, <https://arxiv.org/abs/1805.01978> (section 3.4), with the settings of DINO (Caron et al., 2021,
//! <https://arxiv.org/abs/2104.14294>): the k most similar images of a labelled bank vote with weight `exp(cosine / T)`.

use burn::tensor::{Device, Tensor, TensorData};
use rayon::prelude::*;

use super::accuracy::top_k_accuracy;
use super::features::Features;

/// Similarities that are held at a time (64 MiB).
const BLOCK: usize = 1 << 24;

/// Settings of the vote.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Knn {
    /// Neighbours that vote; all of a smaller bank. DINO: 20, lightly: 200.
    pub k: usize,
    /// Temperature; the smaller, the more the nearest count. DINO: 0.07, lightly: 0.1.
    pub temperature: f64,
}

/// The votes of each query for each class.
#[derive(Clone, Debug, PartialEq)]
pub struct Votes {
    classes: usize,
    temperature: f64,
    /// Sums of `exp((cosine - nearest) / T)`: relative to the nearest neighbour, so that no temperature overflows.
    relative: Vec<f64>,
    /// Cosine of each query with its nearest neighbour.
    nearest: Vec<f64>,
}

impl Knn {
    /// Lets the bank vote on each query.
    ///
    /// Neighbours are exact: single-precision similarities choose candidates, double-precision ones decide. Of equally similar
    /// images the one with the smaller index goes first. A zero vector has cosine 0 with everything.
    ///
    /// # Panics
    /// When `k` or the temperature is not positive, the dimensions differ, or `labels` does not have one label per bank image.
    pub fn vote(&self, bank: &Features, labels: &[u32], queries: &Features) -> Votes {
        assert!(self.k > 0 && self.temperature > 0.0, "k and the temperature of kNN are positive");
        assert_eq!(bank.dim(), queries.dim(), "bank and queries come from the same network");
        assert_eq!(bank.rows(), labels.len(), "one label per bank image");
        let classes = labels.iter().max().map_or(0, |&label| label as usize + 1);
        let mut votes = Votes { classes, temperature: self.temperature, relative: Vec::new(), nearest: Vec::new() };
        self.each_neighbours(bank, queries, |neighbours| {
            let nearest = neighbours.first().map_or(0.0, |&(cosine, _)| cosine);
            let from = votes.relative.len();
            votes.relative.resize(from + classes, 0.0);
            for &(cosine, image) in neighbours {
                votes.relative[from + labels[image] as usize] += ((cosine - nearest) / self.temperature).exp();
            }
            votes.nearest.push(nearest);
        });
        votes
    }

    /// Calls `take` with the neighbours `(cosine, index)` of each query, nearest first.
    fn each_neighbours(&self, bank: &Features, queries: &Features, mut take: impl FnMut(&[(f64, usize)])) {
        let (rows, dim, k) = (bank.rows(), bank.dim(), self.k.min(bank.rows()));
        let (bank_lengths, query_lengths) = (bank.lengths(), queries.lengths());
        // A single-precision product of unit vectors errs by at most about dim * 2^-24, so that what is among the k largest lies
        // within twice that of the k-th largest.
        let slack = (dim as f32 + 8.0) * f32::EPSILON;
        let transposed = unit_rows(bank, 0..rows, &bank_lengths).transpose(); // [dim, rows]
        let block = (BLOCK / rows).clamp(1, 1024);
        for start in (0..queries.rows()).step_by(block) {
            let range = start..queries.rows().min(start + block);
            let product = unit_rows(queries, range.clone(), &query_lengths).matmul(transposed.clone()); // [block, rows]
            let similarities = product.try_into_vec_as::<f32>().expect("tensors of the host can be read");
            let found: Vec<_> = range
                .into_par_iter()
                .zip(similarities.par_chunks(rows))
                .map(|(query, similarities)| {
                    let mut sorted = similarities.to_vec();
                    let (_, &mut kth, _) = sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
                    let candidates = (0..rows).filter(|&image| similarities[image] >= kth - slack);
                    let cosine =
                        |image| dot(queries.row(query), bank.row(image)) / (query_lengths[query] * bank_lengths[image]);
                    let mut neighbours: Vec<_> = candidates.map(|image| (cosine(image), image)).collect();
                    neighbours.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                    neighbours.truncate(k);
                    neighbours
                })
                .collect();
            found.iter().for_each(|neighbours| take(neighbours));
        }
    }
}

impl Votes {
    /// Returns the number of queries.
    pub fn queries(&self) -> usize {
        self.nearest.len()
    }

    /// Returns the number of classes of the bank (largest label plus one).
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// Returns the sum of `exp(cosine / T)` of the neighbours of `query` that are of `class`.
    ///
    /// # Panics
    /// When there is no such query or class.
    pub fn score(&self, query: usize, class: usize) -> f64 {
        assert!(class < self.classes, "class {class} of {}", self.classes);
        self.relative[query * self.classes + class] * (self.nearest[query] / self.temperature).exp()
    }

    /// Returns the classes by falling votes; of equal votes the smaller class goes first.
    ///
    /// # Panics
    /// When there is no such query.
    pub fn ranking(&self, query: usize) -> Vec<u32> {
        let votes = &self.relative[query * self.classes..][..self.classes];
        let mut classes: Vec<u32> = (0..self.classes as u32).collect();
        classes.sort_by(|&a, &b| votes[b as usize].total_cmp(&votes[a as usize]));
        classes
    }

    /// Returns the class with the most votes for each query.
    pub fn predictions(&self) -> Vec<u32> {
        (0..self.queries()).map(|query| self.ranking(query)[0]).collect()
    }

    /// Returns the fraction of queries whose label is among the `top` classes with the most votes. A class without a vote is
    /// never right.
    ///
    /// # Panics
    /// When `labels` does not have one label per query.
    pub fn accuracy(&self, labels: &[u32], top: usize) -> f64 {
        let voted: Vec<f64> = self.relative.iter().map(|&v| if v > 0.0 { v } else { f64::NAN }).collect();
        top_k_accuracy(&voted, self.classes, labels, top)
    }
}

/// Returns a run of rows divided by their lengths, on the host.
fn unit_rows(features: &Features, range: std::ops::Range<usize>, lengths: &[f64]) -> Tensor<2> {
    let shape = [range.len(), features.dim()];
    let unit = |row: usize| features.row(row).iter().map(move |&v| (f64::from(v) / lengths[row]) as f32);
    let values: Vec<f32> = range.flat_map(unit).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// Returns the inner product in double precision, summed in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let (mut sums, whole) = ([0.0f64; 8], a.len() / 8 * 8);
    for (a, b) in a[..whole].chunks_exact(8).zip(b[..whole].chunks_exact(8)) {
        for lane in 0..8 {
            sums[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    let rest: f64 = a[whole..].iter().zip(&b[whole..]).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Purpose, Stream};
    use proptest::prelude::*;

    fn features(values: &[f32], dim: usize) -> Features {
        Features::new(values.to_vec(), dim).unwrap()
    }

    fn random(rows: usize, dim: usize, seed: u64) -> Features {
        let mut stream = Stream::new(seed, Purpose::Evaluation, &[]);
        Features::new((0..rows * dim).map(|_| stream.normal() as f32).collect(), dim).unwrap()
    }

    /// The definition, one query at a time and nothing clever.
    fn naive(knn: Knn, bank: &Features, labels: &[u32], query: &[f32]) -> Vec<f64> {
        let length = |v: &[f32]| v.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt().max(1e-12);
        let mut all: Vec<(f64, usize)> = (0..bank.rows())
            .map(|i| {
                let product: f64 = query.iter().zip(bank.row(i)).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                (product / length(query) / length(bank.row(i)), i)
            })
            .collect();
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut scores = vec![0.0; *labels.iter().max().unwrap() as usize + 1];
        all.iter().take(knn.k).for_each(|&(cosine, i)| scores[labels[i] as usize] += (cosine / knn.temperature).exp());
        scores
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn equals_the_definition(
            seed: u64, rows in 1usize..70, queries in 1usize..9, dim in 1usize..40, k in 1usize..90, classes in 1u64..8,
        ) {
            let (bank, asked) = (random(rows, dim, seed), random(queries, dim, seed ^ 1));
            let mut stream = Stream::new(seed, Purpose::Evaluation, &[9]);
            let labels: Vec<u32> = (0..rows).map(|_| stream.below(classes) as u32).collect();
            let knn = Knn { k, temperature: 0.02 + stream.unit() };
            let votes = knn.vote(&bank, &labels, &asked);
            for query in 0..queries {
                for (class, expected) in naive(knn, &bank, &labels, asked.row(query)).into_iter().enumerate() {
                    let got = votes.score(query, class);
                    prop_assert!((got - expected).abs() <= 1e-9 * expected, "{got} {expected}");
                }
            }
        }
    }

    #[test]
    fn result_does_not_depend_on_threads() {
        let (bank, queries) = (random(1500, 65, 1), random(130, 65, 2));
        let labels: Vec<u32> = (0..1500).map(|i| i % 10).collect();
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| Knn { k: 20, temperature: 0.07 }.vote(&bank, &labels, &queries))
        };
        assert_eq!(run(1), run(4));
    }

    #[test]
    fn ties_go_to_the_smaller_index_and_class() {
        let bank = features(&[1.0, 0.0, 2.0, 0.0, 0.0, 1.0, 3.0, 0.0], 2);
        let knn = Knn { k: 2, temperature: 0.1 };
        // images 0, 1 and 3 point the same way: 0 and 1 vote, for classes 2 and 1
        let votes = knn.vote(&bank, &[2, 1, 0, 0], &features(&[1.0, 0.0], 2));
        assert_eq!(votes.ranking(0), [1, 2, 0]);
        assert_eq!(votes.accuracy(&[1], 1), 1.0);
        assert_eq!(votes.accuracy(&[2], 1), 0.0);
        // class 0 has no vote: not among the top 5, though there are only three classes
        assert_eq!(votes.accuracy(&[0], 5), 0.0);
    }

    #[test]
    fn a_bank_smaller_than_k_one_class_and_a_cold_temperature() {
        let bank = features(&[1.0, 0.1, 0.9, 0.3], 2);
        let votes = Knn { k: 200, temperature: 1e-6 }.vote(&bank, &[0, 0], &features(&[1.0, 0.0, -1.0, 0.0], 2));
        assert_eq!(votes.predictions(), [0, 0]);
        assert_eq!(votes.accuracy(&[0, 1], 1), 0.5);
        assert!(votes.relative.iter().all(|v| v.is_finite()));
    }

    #[test]
    fn zero_vectors_are_at_cosine_zero_and_one_dimension_works() {
        let bank = features(&[0.0, 0.0, -1.0, 0.0], 2);
        let votes = Knn { k: 1, temperature: 0.5 }.vote(&bank, &[0, 1], &features(&[1.0, 0.0, 0.0, 0.0], 2));
        assert_eq!(votes.predictions(), [0, 0]);
        assert_eq!(votes.score(0, 0), 1.0);
        let votes =
            Knn { k: 2, temperature: 0.5 }.vote(&features(&[2.0, -5.0, 0.5], 1), &[0, 1, 2], &features(&[3.0], 1));
        assert_eq!(votes.ranking(0), [0, 2, 1]);
    }

    #[test]
    fn collapsed_features_vote_by_index() {
        let labels: Vec<u32> = (0..50).map(|i| i / 10).collect();
        let votes = Knn { k: 20, temperature: 0.07 }.vote(&features(&[0.7; 400], 8), &labels, &features(&[0.2; 8], 8));
        assert_eq!(votes.ranking(0), [0, 1, 2, 3, 4]);
        assert_eq!(votes.score(0, 0), votes.score(0, 1));
        assert_eq!(votes.score(0, 2), 0.0);
    }
}
