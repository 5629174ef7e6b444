//! Mixing images of a batch: mixup and `CutMix`, as draws; the pixels are mixed where the batch is.
//!
//! Mixup (Zhang et al., 2017, <https://arxiv.org/abs/1710.09412>), `CutMix` (Yun et al., 2019, <https://arxiv.org/abs/1905.04899>), both as in timm's
//! `data/mixup.py`: image i of a batch is mixed with image `B - 1 - i`, the share of its own pixels is drawn from `Beta(alpha, alpha)`, and a pasted box
//! corrects the share to its area.
//!
//! Deviation: the batch is a micro-batch, so that the partner does not depend on the ranks; every draw is keyed by `(seed, step, image)`.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rng::{Purpose, Stream};

/// Mixup and `CutMix`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MixConfig {
    /// Mixup's alpha; 0: none. 0.8 in MAE's fine-tuning.
    pub mixup: f64,
    /// `CutMix`'s alpha; 0: none. 1.0 in MAE's fine-tuning.
    pub cutmix: f64,
    /// Probability of mixing at all.
    pub prob: f64,
    /// Probability of `CutMix` where both are on.
    pub switch_prob: f64,
    /// Whether the images of a micro-batch share a draw.
    pub mode: MixMode,
}

impl Default for MixConfig {
    fn default() -> Self {
        Self { mixup: 0.0, cutmix: 0.0, prob: 1.0, switch_prob: 0.5, mode: MixMode::Batch }
    }
}

/// Who shares a draw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MixMode {
    /// The images of a micro-batch.
    #[default]
    Batch,
    /// Nobody: each image has its own.
    Elem,
}

/// How an image is mixed with its partner.
#[derive(Clone, Debug, PartialEq)]
pub enum Mix {
    /// Not at all.
    None,
    /// Both, the own with this share.
    Blend(f64),
    /// The partner's pixels in this box.
    Paste {
        /// Rows of the box.
        rows: Range<usize>,
        /// Columns of the box.
        columns: Range<usize>,
    },
}

impl Mix {
    /// Returns the share of the own label in an image of `size` x `size` pixels.
    #[must_use]
    pub fn share(&self, size: usize) -> f64 {
        match self {
            Self::None => 1.0,
            Self::Blend(share) => *share,
            Self::Paste { rows, columns } => 1.0 - (rows.len() * columns.len()) as f64 / (size * size).max(1) as f64,
        }
    }

    /// Writes the weight of each own pixel; the partner's is what is left to 1.
    ///
    /// # Shapes
    /// `out`: `[size, size]`.
    pub fn weights(&self, size: usize, out: &mut [f32]) {
        match self {
            Self::None => out.fill(1.0),
            Self::Blend(share) => out.fill(*share as f32),
            Self::Paste { rows, columns } => {
                out.fill(1.0);
                rows.clone().for_each(|row| out[row * size..][columns.clone()].fill(0.0));
            }
        }
    }
}

impl MixConfig {
    /// Tells whether anything is ever mixed.
    #[must_use]
    pub fn is_on(&self) -> bool {
        (self.mixup > 0.0 || self.cutmix > 0.0) && self.prob > 0.0
    }

    /// Draws how each image of a micro-batch of `size` x `size` pixels is mixed.
    #[must_use]
    pub fn draw(&self, seed: u64, step: u64, images: &[u64], size: usize) -> Vec<Mix> {
        let of = |&image: &u64| self.draw_one(&mut Stream::new(seed, Purpose::Mix, &[step, image]), size);
        match self.mode {
            MixMode::Elem => images.iter().map(of).collect(),
            MixMode::Batch => vec![images.first().map_or(Mix::None, of); images.len()],
        }
    }

    fn draw_one(&self, stream: &mut Stream, size: usize) -> Mix {
        if !self.is_on() || !stream.chance(self.prob) {
            return Mix::None;
        }
        let paste = match (self.mixup > 0.0, self.cutmix > 0.0) {
            (true, true) => stream.chance(self.switch_prob),
            (_, cutmix) => cutmix,
        };
        if !paste {
            return Mix::Blend(beta(self.mixup, stream));
        }
        // timm's `rand_bbox`: a box of that area around any pixel, cut off at the borders
        let side = (size as f64 * (1.0 - beta(self.cutmix, stream)).sqrt()) as usize;
        let mut range = || {
            let centre = stream.below(size.max(1) as u64) as usize;
            centre.saturating_sub(side / 2)..(centre + side / 2).min(size)
        };
        let rows = range();
        Mix::Paste { rows, columns: range() }
    }
}

/// Draws from `Beta(alpha, alpha)`: a gamma over the sum of two.
fn beta(alpha: f64, stream: &mut Stream) -> f64 {
    let (a, b) = (log_gamma_draw(alpha, stream), log_gamma_draw(alpha, stream));
    // of logarithms, since a gamma of a small shape is often below the smallest number
    1.0 / (1.0 + (b - a).exp())
}

/// Draws the logarithm of a gamma variable (Marsaglia and Tsang, 2000, <https://doi.org/10.1145/358407.358414>; of shapes below 1 by their boost).
fn log_gamma_draw(shape: f64, stream: &mut Stream) -> f64 {
    if shape < 1.0 {
        let boost = (1.0 - stream.unit()).ln() / shape;
        return log_gamma_draw(shape + 1.0, stream) + boost;
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = stream.normal();
        let v = (1.0 + c * x).powi(3);
        let u = 1.0 - stream.unit();
        if v > 0.0 && u.ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return (d * v).ln();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(config: &MixConfig, count: u64) -> Vec<Mix> {
        let images: Vec<u64> = (0..count).collect();
        MixConfig { mode: MixMode::Elem, ..config.clone() }.draw(1, 2, &images, 32)
    }

    #[test]
    fn shares_of_mixup_follow_the_beta_distribution() {
        for alpha in [0.2, 0.8, 1.0, 3.0] {
            let config = MixConfig { mixup: alpha, ..MixConfig::default() };
            let shares: Vec<f64> = draws(&config, 20_000).iter().map(|mix| mix.share(32)).collect();
            let mean = shares.iter().sum::<f64>() / 20_000.0;
            let var = shares.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / 20_000.0;
            // variance of Beta(a, a): 1 / (4 (2 a + 1))
            let expected = 1.0 / (4.0 * (2.0 * alpha + 1.0));
            assert!((mean - 0.5).abs() < 0.01, "{alpha}: mean {mean}");
            assert!((var - expected).abs() < 0.03 * expected, "{alpha}: variance {var}, expected {expected}");
        }
        // of a tiny alpha nearly every share is 0 or 1, and none is lost to underflow
        let tiny = draws(&MixConfig { mixup: 1e-3, ..MixConfig::default() }, 1000);
        assert!(tiny.iter().all(|mix| (0.0..=1.0).contains(&mix.share(32))));
    }

    #[test]
    fn a_pasted_box_is_its_share() {
        let config = MixConfig { cutmix: 1.0, ..MixConfig::default() };
        let mut areas = Vec::new();
        for mix in draws(&config, 4000) {
            let mut weights = vec![0.0; 32 * 32];
            mix.weights(32, &mut weights);
            let own = weights.iter().map(|&weight| f64::from(weight)).sum::<f64>() / 1024.0;
            assert!((own - mix.share(32)).abs() < 1e-6, "{mix:?}");
            areas.push(1.0 - own);
        }
        // numpy, timm's `rand_bbox` with Beta(1, 1) on 32 px, 400000 draws: the mean area is 0.2989
        let mean = areas.iter().sum::<f64>() / areas.len() as f64;
        assert!((mean - 0.2989).abs() < 0.015, "{mean}");
    }

    #[test]
    fn probabilities_and_modes() {
        let both = MixConfig { mixup: 0.8, cutmix: 1.0, prob: 0.7, switch_prob: 0.25, mode: MixMode::Elem };
        let all = draws(&both, 10_000);
        let share = |is: fn(&Mix) -> bool| all.iter().filter(|mix| is(mix)).count() as f64 / 10_000.0;
        assert!((share(|mix| *mix == Mix::None) - 0.3).abs() < 0.02);
        assert!((share(|mix| matches!(mix, Mix::Paste { .. })) - 0.7 * 0.25).abs() < 0.02);
        let batch = MixConfig { mode: MixMode::Batch, prob: 1.0, ..both.clone() };
        let together = batch.draw(1, 2, &[4, 5, 6, 7], 32);
        assert!(together.windows(2).all(|pair| pair[0] == pair[1]));
        assert_ne!(batch.draw(1, 3, &[4, 5, 6, 7], 32), together);
        assert_ne!(batch.draw(2, 2, &[4, 5, 6, 7], 32), together);
        // of its key alone
        assert_eq!(both.draw(1, 2, &[4, 5], 32)[1], both.draw(1, 2, &[9, 5, 3], 32)[1]);
        assert_eq!(MixConfig::default().draw(1, 2, &[4], 32), [Mix::None]);
    }
}
