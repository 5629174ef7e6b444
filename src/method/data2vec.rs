//! data2vec: predict, at masked patches, what a slowly moving average of the network makes of the whole image.
//!
//! Baevski, Hsu, Xu, Babu, Gu, Auli, 2022, <https://arxiv.org/abs/2202.03555>, section 3, for images; official code
//! `facebookresearch/data2vec_vision` (on top of `BEiT`), command of its README. The teacher sees the image without mask; targets are the outputs of
//! its last blocks, each layer-normed, averaged, layer-normed again; the student sees mask tokens in `BEiT`'s rectangles and predicts the targets
//! there through one linear layer, by a smooth L1 loss, averaged over masked patches.
//!
//! The paper lets the average's momentum rise; for images the released command has it constant, as is the default here. The student is
//! evaluated, as the official fine-tuning does.
//!
//! Deviations: every image has the same number of masked patches (`BEiT`'s generator stops short now and then); absolute positions instead of
//! a relative position bias shared by the blocks; no dropout of attention weights (0.05 in the official command); `BEiT`'s division of the last
//! layers' first weights by `sqrt(2 * block)` is left out. Masks are keyed by image and epoch.

use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::latent::{data2vec_targets, smooth_l1};
use crate::mask;
use crate::model::layers::Linear;
use crate::model::{Backbone, ConfigError, Init, Pass, Scope, Vit, gather_tokens};
use crate::optim::{ParameterRule, RampConfig};
use crate::problem::{MAX_DEPTH, Numbers, Problem};

/// The `[method.data2vec]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Fraction of the patches that are masked; their number is rounded to the nearest (0.612: 120 of 196).
    pub mask_ratio: f64,
    /// Patches of the smallest rectangle; absent: 16 of 196, as many of other grids in proportion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_block: Option<usize>,
    /// Last blocks of the teacher whose outputs are averaged.
    pub target_blocks: usize,
    /// Error up to which the loss is quadratic; 0: absolute error.
    pub beta: f64,
    /// Momentum of the teacher.
    pub momentum: RampConfig,
}

impl Default for Config {
    fn default() -> Self {
        let momentum = RampConfig::constant(0.9998);
        Self { mask_ratio: 0.612, min_block: None, target_blocks: 6, beta: 2.0, momentum }
    }
}

/// Student with mask token and head, and teacher.
#[derive(Module, Debug)]
pub struct Data2Vec {
    backbone: Backbone,
    mask_token: Param<Tensor<3>>,
    head: Linear,
    teacher: Teacher,
    #[module(skip)]
    config: Config,
}

/// The moving average.
#[derive(Module, Debug)]
struct Teacher {
    backbone: Backbone,
}

fn num_masked(patches: usize, ratio: f64) -> usize {
    (patches as f64 * ratio).round() as usize
}

fn vit(backbone: &Backbone) -> &Vit {
    backbone.vit().expect("`build` accepts vision transformers only")
}

impl Data2Vec {
    /// Draws the masked patches of each image, ascending.
    fn masked(&self, batch: &MicroBatch) -> Vec<Vec<usize>> {
        let grid = vit(&self.backbone).arch().grid();
        let patches = grid[0] * grid[1];
        let count = num_masked(patches, self.config.mask_ratio);
        let smallest = self.config.min_block.unwrap_or_else(|| num_masked(patches, 16.0 / 196.0).max(1));
        let progress = &batch.progress;
        let draw = |&image: &u64| {
            let mut stream = mask::stream(progress.seed, progress.epoch(), image, 0);
            let mask = mask::rectangle_mask(grid, count, smallest, &mut stream);
            (0..patches).filter(|&patch| mask[patch]).collect()
        };
        batch.images.iter().map(draw).collect()
    }

    /// What the teacher makes of every patch, `[b, l, d]`.
    fn targets(&self, images: Tensor<4>, pass: &mut Pass) -> Tensor<3> {
        let teacher = vit(&self.teacher.backbone);
        let depth = teacher.arch().depth;
        let outputs = teacher.block_outputs(images, depth, pass).into_iter().skip(depth - self.config.target_blocks);
        data2vec_targets(Tensor::stack(outputs.map(|tokens| teacher.patches(tokens)).collect(), 0), true)
    }
}

impl Method for Data2Vec {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let network = |scope: &Scope| Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"));
        let backbone = network(scope)?;
        check::encoder("data2vec", "masks", &backbone)?;
        let dim = backbone.dim();
        let mask_token = scope.param("mask_token", [1, 1, dim], Init::TruncatedNormal(0.02));
        let head = Linear::new(dim, dim, Init::TruncatedNormal(0.02), Some(Init::Zeros), &scope.enter("head"));
        let teacher = Teacher { backbone: network(&scope.untrained())? };
        Ok(Self { backbone, mask_token, head, teacher, config: config.clone() })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        check::one_view("data2vec", "masks", inputs, found);
        let (key, ratio) = ("method.data2vec.mask_ratio", config.mask_ratio);
        let in_range = ratio > 0.0 && ratio < 1.0;
        if !in_range {
            found.limit(key, ratio, "greater than 0 and less than 1");
        }
        found.not_negative("method.data2vec.beta", config.beta);
        check::momentum("method.data2vec.momentum", &config.momentum, found);
        let counted = found.size("method.data2vec.target_blocks", config.target_blocks, MAX_DEPTH);
        let Some(vit) = check::vit("data2vec", "masks", inputs, found) else { return };
        check::mean_pool("data2vec", vit, found);
        let (_, depth, _) = vit.sizes();
        if counted && config.target_blocks > depth {
            let message = format!(
                "`method.data2vec.target_blocks` is {}, but the backbone has {depth} blocks",
                config.target_blocks
            );
            found.push(
                Problem::at("method.data2vec.target_blocks", message)
                    .against("backbone.vit.depth")
                    .hint(format!("use at most {depth}; about half of them are usual")),
            );
        }
        let Some(patches) = check::side(vit, inputs).map(|side| side.saturating_mul(side)) else { return };
        let masked = num_masked(patches, ratio);
        if in_range && (masked == 0 || masked == patches) {
            let message = format!("`{key}` is {ratio}, which masks {masked} of {patches} patches");
            found.push(
                Problem::at(key, message)
                    .against("backbone.vit.patch")
                    .against("views")
                    .hint("some must be masked and some not: use larger views, a smaller patch or another ratio"),
            );
        }
        if let Some(smallest) = config.min_block
            && found.count("method.data2vec.min_block", smallest)
            && in_range
            && smallest > masked
        {
            let limit = format!("at most {masked}, the masked patches of {patches}");
            found.limit("method.data2vec.min_block", smallest, &limit);
        }
    }

    fn rules(_config: &Config) -> Vec<ParameterRule> {
        check::undecayed_embeddings()
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let (student, images) = (vit(&self.backbone), batch.views[0].clone());
        let [rows, columns] = student.arch().grid();
        let masked = self.masked(batch);
        let mut mask = vec![0.0f32; masked.len() * rows * columns];
        for (image, patches) in masked.iter().enumerate() {
            for patch in patches {
                mask[image * rows * columns + patch] = 1.0;
            }
        }
        let mask = Tensor::from_data(TensorData::new(mask, [masked.len(), rows * columns, 1]), &images.device());

        let tokens = student.embed_masked(images.clone(), self.mask_token.val(), mask);
        let encoded = student.patches(student.encode_tokens(tokens, pass));
        let predictions = self.head.forward(gather_tokens(encoded, &masked)); // [b, masked, d]
        let targets = gather_tokens(self.targets(images, &mut pass.without_noise()), &masked);
        Outputs { tensors: vec![predictions.flatten(1, 2)], constants: vec![targets.flatten(1, 2)] }
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [predictions]: [Tensor<2>; 1] = outputs.tensors.try_into().expect("`encode` returns one tensor");
        let [targets]: [Tensor<2>; 1] = outputs.constants.try_into().expect("`encode` returns one constant");
        let dim = self.backbone.dim();
        let [num_images, values] = predictions.dims();
        let tokens = [num_images * (values / dim), dim];
        let sum = smooth_l1(predictions.reshape(tokens), targets.clone().reshape(tokens), self.config.beta);
        // the mean over an image's tokens: a teacher that knows positions alone gives every image the same
        let shown = targets.reshape([num_images, values / dim, dim]).mean_dim(1).reshape([num_images, dim]);
        Loss::new(sum, tokens[0] as f64).with_embeddings(shown)
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn teacher_momentum(&self, progress: &Progress) -> Option<f64> {
        Some(progress.at(&self.config.momentum))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::method::testing::{batch, inputs, problems, stays_finite, values};

    const DIM: usize = 8;

    fn method() -> Data2Vec {
        let (backbone, views) = inputs("[vit]\npatch = 4\ndim = 8\ndepth = 3\nheads = 2\npool = \"mean\"", "size = 16");
        let inputs = Inputs { backbone: &backbone, views: &views, global: 4, micro: 4 };
        let config = Config { target_blocks: 2, ..Config::default() };
        Data2Vec::build(&config, &inputs, &Scope::new(1, &Device::flex())).unwrap()
    }

    fn normed(row: &[f32]) -> Vec<f32> {
        let mean = row.iter().sum::<f32>() / row.len() as f32;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / row.len() as f32;
        row.iter().map(|v| (v - mean) / (variance + 1e-5).sqrt()).collect()
    }

    #[test]
    fn targets_are_the_mean_of_the_last_blocks_at_the_masked_patches() {
        let net = method();
        let batch = batch(&[5, 9], 16, 0);
        let masked = net.masked(&batch);
        assert!(masked.iter().all(|list| list.len() == 10), "0.612 of 16");
        let got = values(net.encode(&batch, &mut Pass::eval()).constants.remove(0));
        let teacher = vit(&net.teacher.backbone);
        let outputs: Vec<Vec<f32>> = teacher
            .block_outputs(batch.views[0].clone(), 3, &mut Pass::eval())
            .into_iter()
            .map(|tokens| tokens.into_data().try_to_vec().unwrap())
            .collect();
        let mut rows = got.chunks(DIM);
        for (image, list) in masked.iter().enumerate() {
            for patch in list {
                let at = (image * 17 + 1 + patch) * DIM; // a class token comes first
                let (a, b) = (normed(&outputs[1][at..at + DIM]), normed(&outputs[2][at..at + DIM]));
                let mean: Vec<f32> = a.iter().zip(&b).map(|(a, b)| (a + b) / 2.0).collect();
                let row = rows.next().unwrap();
                assert!(normed(&mean).iter().zip(row).all(|(e, g)| (e - g).abs() < 1e-4), "{row:?}");
            }
        }
        assert!(rows.next().is_none());
    }

    #[test]
    fn what_cannot_fit_is_refused() {
        let vit = "[vit]\npatch = 4\npool = \"mean\"";
        assert_eq!(problems::<Data2Vec>(&Config::default(), vit, "size = 32"), [""; 0]);
        let with = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            config
        };
        for (config, backbone, expected) in [
            (with(|c| c.target_blocks = 13), vit, "is 13, but the backbone has 12 blocks"),
            (with(|c| c.mask_ratio = 0.999), vit, "masks 64 of 64 patches"),
            (with(|c| c.mask_ratio = 1.0), vit, "greater than 0 and less than 1"),
            (with(|c| c.min_block = Some(40)), vit, "at most 39, the masked patches of 64"),
            (with(|c| c.beta = -1.0), vit, "`method.data2vec.beta` is -1"),
            (with(|_| ()), "[vit]\npatch = 4", "nothing in `method.data2vec` trains"),
            (with(|_| ()), "[convnext]", "needs `backbone.vit`, but the backbone is `convnext`"),
        ] {
            let found = problems::<Data2Vec>(&config, backbone, "size = 32");
            assert!(found.iter().any(|message| message.contains(expected)), "{expected}: {found:?}");
        }
    }

    #[test]
    fn flat_and_equal_images_keep_everything_finite() {
        let (backbone, views) = inputs("[vit]\npatch = 4\ndim = 8\ndepth = 2\nheads = 2\npool = \"mean\"", "size = 16");
        stays_finite::<Data2Vec>(&Config { target_blocks: 2, ..Config::default() }, &backbone, &views);
    }

    #[test]
    fn masks_do_not_depend_on_who_shares_the_micro_batch() {
        let net = method();
        let all = net.masked(&batch(&[3, 1, 4, 15], 16, 0));
        let halves = [net.masked(&batch(&[3, 1], 16, 0)), net.masked(&batch(&[4, 15], 16, 0))];
        assert_eq!(all, halves.concat());
        assert_ne!(all, net.masked(&batch(&[3, 1, 4, 15], 16, 10)), "the next epoch");
    }
}
