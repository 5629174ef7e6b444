//! The classic trap of data-parallel training, watched for: ranks that see other samples, draw other augmentations or hold other weights train on, and nothing
//! says so.
//!
//! Before the first step of a process, and every [`EVERY`] steps, each rank hashes what must be the same everywhere; all compare, and a difference stops the run with the
//! rank and the first thing that differs. One image a time is augmented for that, another each time; weights are hashed once in a process.

use std::sync::Arc;

use super::error::EngineError;
use crate::augment::MultiView;
use crate::data::{Schedule, Source};
use crate::model::params;
use crate::parallel::Collective;
use crate::plan::Plan;

/// Steps between two comparisons.
pub(super) const EVERY: u64 = 100;

/// Something that must be the same on every rank, and its hash, where this rank knows it.
pub(super) type Fact = (&'static str, Option<u64>);

/// Hashes what a rank is about to do at `step`.
pub(super) fn facts(plan: &Plan, source: &Arc<dyn Source>, step: u64, weights: Option<u64>) -> Vec<Fact> {
    let recipe = &plan.recipe;
    let schedule = Schedule::new(recipe.seed, plan.data.images, recipe.batch.global, recipe.batch.micro);
    let samples: Vec<u64> = (0..plan.micro_batches).flat_map(|micro| schedule.images(step, micro)).collect();
    let numbers = |numbers: &[u64]| hash(numbers.iter().flat_map(|number| number.to_le_bytes()));
    let drawn = samples.first().and_then(|&index| {
        let image = source.load(index as usize).ok()?;
        let views = MultiView::new(&recipe.views);
        let epoch = schedule.epoch(step);
        let pixels = (0..views.num_views())
            .flat_map(|view| views.apply(&image, recipe.seed, epoch, index, view).into_raw())
            .collect::<Vec<u8>>();
        Some(hash(pixels))
    });
    vec![
        ("step", Some(numbers(&[step]))),
        ("seed", Some(numbers(&[recipe.seed]))),
        ("samples", Some(numbers(&samples))),
        ("image after augmentation", drawn),
        ("weights", weights),
    ]
}

/// Hashes weights and buffers.
pub(super) fn hash_of(weights: &[f32], buffers: &[f32]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    params::hash(&mut hasher, weights);
    params::hash(&mut hasher, buffers);
    first_bits(&hasher.finalize())
}

fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    first_bits(&blake3::hash(&bytes.into_iter().collect::<Vec<u8>>()))
}

/// As many bits as a double holds exactly, so that they travel as one.
fn first_bits(hash: &blake3::Hash) -> u64 {
    let (first, _) = hash.as_bytes().as_chunks::<8>();
    u64::from_le_bytes(first[0]) >> 11
}

/// Compares the facts of all ranks.
pub(super) fn compare(ranks: &dyn Collective, step: u64, facts: &[Fact]) -> Result<(), EngineError> {
    let own = facts.iter().map(|(_, hash)| hash.map_or(-1.0, |hash| hash as f64)).collect();
    let all = ranks.all_gather_f64(own)?;
    for (index, (what, _)) in facts.iter().enumerate() {
        let known: Vec<(usize, f64)> = all
            .chunks(facts.len())
            .enumerate()
            .map(|(rank, hashes)| (rank, hashes[index]))
            .filter(|(_, hash)| *hash >= 0.0)
            .collect();
        let votes = |hash: f64| known.iter().filter(|(_, other)| *other == hash).count();
        // what most ranks have, the first of them where it is a draw
        let Some(&(right, usual)) = known.iter().rev().max_by_key(|(_, hash)| votes(*hash)) else { continue };
        if let Some(&(rank, _)) = known.iter().find(|(_, hash)| *hash != usual) {
            return Err(EngineError::Diverged { step: step + 1, rank, other: right, what });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::run_ranks;

    /// What each rank says, rank 2 of 4 having something of its own.
    fn compared(planted: &'static str, ranks: usize, odd: usize) -> Result<(), String> {
        let work = |rank: crate::parallel::ThreadRank| {
            let own = u64::from(rank.rank() == odd);
            let fact = |what: &'static str, known: bool| (what, known.then_some(7 + u64::from(what == planted) * own));
            let facts = [fact("seed", true), fact("image after augmentation", true), fact("weights", rank.rank() != 1)];
            compare(&rank, 199, &facts)
        };
        run_ranks(ranks, |_, text| EngineError::Panicked { rank: 0, text }, work).map(drop).map_err(|e| e.to_string())
    }

    #[test]
    fn a_rank_that_draws_other_augmentations_is_named() {
        assert_eq!(compared("nothing", 4, 2), Ok(()));
        let error = compared("image after augmentation", 4, 2).unwrap_err();
        let start = "rank 2 has another image after augmentation than rank 0 in front of step 200: ";
        assert!(error.starts_with(start), "{error}");
        // the odd one is named, not the others
        let first = compared("seed", 4, 0).unwrap_err();
        assert!(first.starts_with("rank 0 has another seed than rank 1"), "{first}");
        // of two, nobody knows who is right
        let two = compared("seed", 2, 1).unwrap_err();
        assert!(two.starts_with("rank 1 has another seed than rank 0"), "{two}");
        // rank 1 does not know the weights
        assert!(compared("weights", 4, 3).unwrap_err().starts_with("rank 3 has other weights than rank 0"));
        assert_eq!(compared("weights", 4, 1), Ok(()));
    }
}
