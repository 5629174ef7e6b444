//! Global views with hidden blocks of patches, as the student of iBOT and `DINOv2` sees them.

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::multicrop::GLOBAL_VIEWS;
use super::{Inputs, MicroBatch};
use crate::mask;
use crate::model::{Backbone, BackboneConfig, ConfigError, Vit};
use crate::problem::{Numbers, Problem};
use crate::rng::{Purpose, Stream};

/// Patches that a view needs each way, so that a block can be smaller than the view.
const LEAST_SIDE: usize = 4;

/// How views are masked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Masking {
    /// Probability that a view is masked at all.
    pub(super) prob: f64,
    /// Range of the share of patches that are hidden then.
    pub(super) ratio: [f64; 2],
    /// Smallest area of a block, in patches.
    pub(super) least: usize,
}

/// The hidden patches of all global views of a micro-batch.
pub(super) struct Masks {
    /// Of each view of each image, view by view.
    hidden: Vec<Vec<bool>>,
}

impl Masking {
    /// Draws masks by seed, epoch, image and view.
    pub(super) fn draw(&self, batch: &MicroBatch, grid: [usize; 2]) -> Masks {
        let (progress, patches) = (&batch.progress, (grid[0] * grid[1]) as f64);
        let view = |view: usize| {
            batch.images.iter().map(move |&image| {
                let key = [progress.epoch(), image, view as u64];
                let mut stream = Stream::new(progress.seed, Purpose::Mask, &key);
                let masked = stream.chance(self.prob);
                let ratio = stream.uniform(self.ratio[0], self.ratio[1]);
                let target = if masked { (patches * ratio) as usize } else { 0 };
                mask::block_mask(&mut stream, grid, target, self.least, [0.3, 1.0 / 0.3])
            })
        };
        Masks { hidden: (0..GLOBAL_VIEWS).flat_map(view).collect() }
    }
}

impl Masks {
    /// One where a patch is hidden, `[views * images, patches, 1]`.
    pub(super) fn tensor(&self, device: &Device) -> Tensor<3> {
        let values: Vec<f32> = self.hidden.iter().flatten().map(|&hidden| f32::from(u8::from(hidden))).collect();
        let [rows, patches] = [self.hidden.len(), self.hidden[0].len()];
        Tensor::from_data(TensorData::new(values, [rows, patches, 1]), device)
    }

    /// Picks the hidden patches, `[views * images, patches, dim]` to `[hidden, dim]`; none where nothing is hidden.
    pub(super) fn select(&self, tokens: Tensor<3>) -> Option<Tensor<2>> {
        let [rows, patches, dim] = tokens.dims();
        let all = (0_i64..).zip(self.hidden.iter().flatten());
        let places: Vec<i64> = all.filter(|(_, hidden)| **hidden).map(|(place, _)| place).collect();
        if places.is_empty() {
            return None;
        }
        let count = places.len();
        let places = Tensor::<1, Int>::from_data(TensorData::new(places, [count]), &tokens.device());
        Some(tokens.reshape([rows * patches, dim]).select(0, places))
    }

    /// Returns for each hidden patch one over the number of those of its view, `[hidden, 1]`.
    pub(super) fn weights(&self, device: &Device) -> Tensor<2> {
        let mut weights = Vec::new();
        for view in &self.hidden {
            let count = view.iter().filter(|&&hidden| hidden).count();
            weights.extend(std::iter::repeat_n(1.0 / count as f32, count));
        }
        let count = weights.len();
        Tensor::from_data(TensorData::new(weights, [count, 1]), device)
    }
}

/// Returns the vision transformer.
///
/// # Errors
/// When the backbone is a residual network.
pub(super) fn encoder<'a>(method: &str, backbone: &'a Backbone) -> Result<&'a Vit, ConfigError> {
    backbone.vit().ok_or_else(|| {
        let problem = format!("`{method}` hides patches from a vision transformer, and another backbone has none");
        ConfigError::new("backbone", problem, "use `[backbone.vit]`, or `[method.dino]` with this one")
    })
}

/// A vision transformer with enough patches, and masks that can be.
pub(super) fn check(method: &str, prob: f64, ratio: [f64; 2], inputs: &Inputs<'_>, found: &mut Numbers) {
    let at = |key: &str| format!("method.{method}.{key}");
    found.probability(&at("mask_prob"), prob);
    let key = at("mask_ratio");
    if found.range(&key, ratio) && ratio[1] >= 1.0 {
        found.limit(&key, ratio[1], "less than 1: a view needs patches that are seen");
    }
    match inputs.backbone {
        other @ (BackboneConfig::Resnet(_) | BackboneConfig::Convnext(_)) => {
            let name = other.name();
            let message =
                format!("`method.{method}` hides patches and needs `backbone.vit`, but the backbone is `{name}`");
            found.push(
                Problem::at(format!("method.{method}"), message)
                    .against("backbone")
                    .hint(format!("write `[backbone.vit]`, or keep the {name} and write `[method.dino]`")),
            );
        }
        BackboneConfig::Vit(vit) => {
            if vit.fc_norm {
                let message = format!(
                    "`backbone.vit.fc_norm` is true, which leaves patches without the final norm that `method.{method}` trains"
                );
                found.push(Problem::at("backbone.vit.fc_norm", message).hint("remove it"));
            }
            let Some(size) = inputs.views.first().map(|view| view.size as usize) else { return };
            let (patch, side) = (vit.patch.max(1), size / vit.patch.max(1));
            if side < LEAST_SIDE {
                let least = patch.saturating_mul(LEAST_SIDE);
                let message = format!(
                    "`views.0.size` is {size}, {side} x {side} patches, but `method.{method}` hides blocks of at least {LEAST_SIDE} x {LEAST_SIDE}"
                );
                found.push(
                    Problem::at("views.0.size", message)
                        .against("backbone.vit.patch")
                        .hint(format!("use at least {least}, or a smaller patch")),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::method::Progress;

    const MASKING: Masking = Masking { prob: 0.5, ratio: [0.1, 0.5], least: 4 };

    fn draw(images: &[u64], step: u64) -> Vec<Vec<bool>> {
        let progress = Progress { seed: 3, step, steps: 100, steps_per_epoch: 10 };
        let batch = MicroBatch { progress, images: images.to_vec(), labels: Vec::new(), views: Vec::new() };
        MASKING.draw(&batch, [8, 8]).hidden
    }

    #[test]
    fn masks_follow_image_view_and_epoch_wherever_the_image_is() {
        let images: Vec<u64> = (0..200).collect();
        let all = draw(&images, 0);
        // a rank that has some of the images draws the same for them
        let part = draw(&images[50..80], 9);
        assert_eq!(part[..30], all[50..80]);
        assert_eq!(part[30..], all[250..280], "the second view");
        assert_ne!(all[..200], all[200..]);
        assert_ne!(all, draw(&images, 10), "the next epoch");

        let counts: Vec<usize> = all.iter().map(|mask| mask.iter().filter(|&&hidden| hidden).count()).collect();
        let masked = counts.iter().filter(|&&count| count > 0).count();
        assert!((160..=240).contains(&masked), "{masked} of 400");
        assert!(counts.iter().all(|&count| count <= 32), "at most half of 64");
        let mean = counts.iter().sum::<usize>() as f64 / masked as f64;
        assert!((14.0..24.0).contains(&mean), "{mean}, 0.3 of 64 is 19.2");
        let distinct: std::collections::HashSet<_> = all.iter().filter(|mask| mask.contains(&true)).collect();
        assert!(distinct.len() * 10 > masked * 9, "{} of {masked}", distinct.len());
    }

    #[test]
    fn selection_and_weights_go_together() {
        let masks = Masks { hidden: vec![vec![true, false, true], vec![false; 3], vec![false, true, false]] };
        let device = Device::flex();
        let tokens = Tensor::<1, Int>::arange(0..9, &device).float().reshape([3, 3, 1]);
        let numbers = |tensor: Tensor<2>| tensor.into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(numbers(masks.select(tokens.clone()).unwrap()), [0.0, 2.0, 7.0]);
        assert_eq!(numbers(masks.weights(&device)), [0.5, 0.5, 1.0]);
        assert!(Masks { hidden: vec![vec![false; 3]; 3] }.select(tokens).is_none());
    }
}
