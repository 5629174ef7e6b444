//! I-JEPA: from a context block, predict what a slowly moving average of the encoder makes of other blocks of the image.
//!
//! Assran et al., 2023, <https://arxiv.org/abs/2301.08243>, section 3; official code
//! `facebookresearch/ijepa`. The target encoder sees the whole image and its tokens are layer-normed; the encoder sees the patches of the context alone;
//! a narrow predictor gets its tokens and mask tokens with the places of one target block at a time. The loss is the smooth L1 error
//! (beta 1), averaged over all tokens (the paper writes a squared error). The target encoder is evaluated, as in the paper.
//!
//! Deviations: how the masks of a batch get equal sizes, and that an image's mask depends on neither its neighbours nor its rank, is told at
//! [`MultiBlock`]. `min_keep` is about contexts only. There is one context block (as in all released settings). A class token, where
//! `backbone.vit` has one, is encoded but not predicted from.

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::latent::{ijepa_targets, smooth_l1};
use crate::mask::{self, ImageMask, MultiBlock};
use crate::model::{Backbone, ConfigError, Pass, Predictor, PredictorArch, Scope, Vit, VitConfig, gather_tokens};
use crate::optim::{RampConfig, RampShape};
use crate::problem::{MAX_DEPTH, MAX_WIDTH, Numbers, Problem, multiple, multiple_of_four};

/// Error up to which the loss is quadratic, torch's default.
const BETA: f64 = 1.0;
/// More blocks than these cover any grid.
const MAX_TARGETS: usize = 64;

/// The `[method.ijepa]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Target blocks of an image.
    pub targets: usize,
    /// Range of a target block's area, as a fraction of the image.
    pub target_scale: [f64; 2],
    /// Range of a target block's height / width.
    pub target_aspect: [f64; 2],
    /// Range of the area of the (square) context block, as a fraction of the image.
    pub context_scale: [f64; 2],
    /// A context has more patches than this after target blocks are taken out.
    pub min_keep: usize,
    /// Width of the predictor.
    pub predictor_dim: usize,
    /// Blocks of the predictor (6 for ViT-B in the paper, 12 for larger ones).
    pub predictor_depth: usize,
    /// Attention heads of the predictor; absent: those of the encoder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predictor_heads: Option<usize>,
    /// Momentum of the target encoder.
    pub momentum: RampConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            targets: 4,
            target_scale: [0.15, 0.2],
            target_aspect: [0.75, 1.5],
            context_scale: [0.85, 1.0],
            min_keep: 10,
            predictor_dim: 384,
            predictor_depth: 12,
            predictor_heads: None,
            momentum: RampConfig { shape: RampShape::Linear, ..RampConfig::cosine(0.996, 1.0) },
        }
    }
}

impl Config {
    fn masks(&self, grid: [usize; 2]) -> MultiBlock {
        let Self { targets, target_scale, target_aspect, context_scale, min_keep, .. } = *self;
        MultiBlock { grid, targets, target_scale, target_aspect, context_scale, min_keep }
    }
}

/// Encoder, predictor and target encoder.
#[derive(Module, Debug)]
pub struct IJepa {
    backbone: Backbone,
    predictor: Predictor,
    teacher: Target,
    #[module(skip)]
    masks: MultiBlock,
    #[module(skip)]
    momentum: RampConfig,
}

/// The moving average.
#[derive(Module, Debug)]
struct Target {
    backbone: Backbone,
}

impl IJepa {
    fn encoder(&self) -> &Vit {
        self.backbone.vit().expect("`build` accepts vision transformers only")
    }

    /// Draws the mask of each image.
    fn draw(&self, batch: &MicroBatch) -> Vec<ImageMask> {
        let Progress { seed, step, .. } = batch.progress;
        let masks = self.masks.at_step(seed, step);
        let draw = |&image: &u64| masks.draw(&mut mask::stream(seed, batch.progress.epoch(), image, 0));
        batch.images.iter().map(draw).collect()
    }

    /// What the target encoder makes of the target blocks, `[b, m, k, d]`.
    fn targets(&self, images: Tensor<4>, blocks: &[Vec<usize>], pass: &mut Pass) -> Tensor<4> {
        let [num_images, targets] = [images.dims()[0], self.masks.targets];
        let tokens = self.teacher.backbone.forward(images, pass).patches.expect("a transformer has patches");
        let place = |&patch: &usize| i64::try_from(patch).expect("a grid has fewer than 2^63 cells");
        let index: Vec<i64> = blocks.iter().flatten().map(place).collect();
        let index = TensorData::new(index, [num_images, targets, blocks[0].len()]);
        let index = Tensor::<3, Int>::from_data(index, &tokens.device());
        ijepa_targets(tokens, index.swap_dims(0, 1), 1).swap_dims(0, 1)
    }
}

impl Method for IJepa {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let network = |scope: &Scope| Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"));
        let backbone = network(scope)?;
        let arch = check::encoder("ijepa", "predicts", &backbone)?.arch();
        let heads = config.predictor_heads.unwrap_or(arch.heads);
        let predictor = PredictorArch::for_encoder(arch, config.predictor_dim, config.predictor_depth, heads);
        let predictor = Predictor::new(&predictor, &scope.enter("predictor"));
        let (masks, momentum) = (config.masks(arch.grid()), config.momentum);
        let teacher = Target { backbone: network(&scope.untrained())? };
        Ok(Self { backbone, predictor, teacher, masks, momentum })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        check::one_view("ijepa", "masks", inputs, found);
        let mut blocks = found.size("method.ijepa.targets", config.targets, MAX_TARGETS);
        blocks &= found.range("method.ijepa.target_aspect", config.target_aspect);
        for (key, scale) in [("target_scale", config.target_scale), ("context_scale", config.context_scale)] {
            let key = format!("method.ijepa.{key}");
            let in_range = found.range(&key, scale);
            if in_range && scale[1] > 1.0 {
                found.limit(&key, scale[1], "at most 1, the whole image");
            }
            blocks &= in_range && scale[1] <= 1.0;
        }
        check::momentum("method.ijepa.momentum", &config.momentum, found);
        let dim = found.size("method.ijepa.predictor_dim", config.predictor_dim, MAX_WIDTH);
        found.size("method.ijepa.predictor_depth", config.predictor_depth, MAX_DEPTH);
        let heads =
            config.predictor_heads.is_none_or(|heads| found.size("method.ijepa.predictor_heads", heads, MAX_WIDTH));
        let Some(vit) = check::vit("ijepa", "predicts", inputs, found) else { return };
        check::mean_pool("ijepa", vit, found);
        if dim && heads {
            predictor_width(config, vit, found);
        }
        if let Some(side) = check::side(vit, inputs).filter(|_| blocks) {
            room(config, side, found);
        }
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let (encoder, images) = (self.encoder(), batch.views[0].clone());
        let (mut contexts, mut blocks) = (Vec::new(), Vec::new());
        for ImageMask { context, targets } in self.draw(batch) {
            contexts.push(context);
            blocks.extend(targets);
        }
        let seen = gather_tokens(encoder.embed_patches(images.clone()), &contexts);
        let encoded = encoder.encode_tokens_at(seen, encoder.arch().grid(), Some(&contexts), pass);
        let predictions = self.predictor.forward(encoder.patches(encoded), &contexts, &blocks, pass); // [b * m, k, d]
        let targets = self.targets(images, &blocks, &mut pass.without_noise()).flatten::<2>(1, 3); // [b, m * k * d]
        Outputs { tensors: vec![predictions.reshape(targets.dims())], constants: vec![targets] }
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [predictions]: [Tensor<2>; 1] = outputs.tensors.try_into().expect("`encode` returns one tensor");
        let [targets]: [Tensor<2>; 1] = outputs.constants.try_into().expect("`encode` returns one constant");
        let ([num_images, values], dim) = (predictions.dims(), self.backbone.dim());
        let tokens = [num_images * (values / dim), dim];
        let sum = smooth_l1(predictions.reshape(tokens), targets.clone().reshape(tokens), BETA);
        // the mean over an image's tokens: a teacher that knows positions alone gives every image the same
        let shown = targets.reshape([num_images, values / dim, dim]).mean_dim(1).reshape([num_images, dim]);
        Loss::new(sum, tokens[0] as f64).with_embeddings(shown)
    }

    fn backbone(&self) -> &Backbone {
        &self.teacher.backbone
    }

    fn teacher_momentum(&self, progress: &Progress) -> Option<f64> {
        Some(progress.at(&self.momentum))
    }
}

/// Width and heads of the predictor.
fn predictor_width(config: &Config, vit: &VitConfig, found: &mut Numbers) {
    let (key, dim) = ("method.ijepa.predictor_dim", config.predictor_dim);
    multiple_of_four(key, dim, "its sine-cosine positions need", "method.ijepa", found);
    let (_, _, encoder_heads) = vit.sizes();
    match config.predictor_heads {
        Some(heads) => multiple(key, dim, heads, "method.ijepa.predictor_heads", found),
        None if encoder_heads > 0 => multiple(key, dim, encoder_heads, "backbone.vit.heads", found),
        None => {}
    }
}

/// Room for target blocks and a context beside them, without which there would be no mask to draw.
fn room(config: &Config, side: usize, found: &mut Numbers) {
    let (target, context) = config.masks([side; 2]).least();
    let grid = format!("a grid of {side} x {side} patches");
    if target == 0 || context == 0 {
        let message = format!("`method.ijepa` needs room for blocks and a context, but `views.0.size` makes {grid}");
        found.push(
            Problem::at("views.0.size", message)
                .against("backbone.vit.patch")
                .hint("use larger views or a smaller patch; 8 x 8 patches and more work well"),
        );
    } else if context <= config.min_keep {
        let key = "method.ijepa.min_keep";
        let message =
            format!("`{key}` is {}, but on {grid} a context may have no more than {context}", config.min_keep);
        found.push(
            Problem::at(key, message)
                .against("backbone.vit.patch")
                .against("views")
                .hint(format!("use larger views, a smaller patch, or `min_keep` of at most {}", context - 1)),
        );
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::loss::latent::layer_norm;
    use crate::method::testing::{batch, inputs, problems, stays_finite, values};

    const DIM: usize = 8;
    const VIT: &str = "[vit]\npatch = 2\ndim = 8\ndepth = 2\nheads = 2\npool = \"mean\"\nclass_token = false";

    fn config() -> Config {
        Config { min_keep: 4, predictor_dim: 8, predictor_depth: 1, ..Config::default() }
    }

    fn method() -> IJepa {
        let (backbone, views) = inputs(VIT, "size = 16");
        let inputs = Inputs { backbone: &backbone, views: &views, global: 4, micro: 4 };
        IJepa::build(&config(), &inputs, &Scope::new(1, &Device::flex())).unwrap()
    }

    #[test]
    fn targets_are_the_teachers_tokens_block_by_block() {
        let net = method();
        let batch = batch(&[5, 9], 16, 0);
        let tokens = net.teacher.backbone.forward(batch.views[0].clone(), &mut Pass::eval()).patches.unwrap();
        let tokens: Vec<f32> = layer_norm(tokens).into_data().try_to_vec().unwrap();
        let mut expected = Vec::new();
        for (image, mask) in net.draw(&batch).iter().enumerate() {
            for patch in mask.targets.iter().flatten() {
                expected.extend_from_slice(&tokens[(image * 64 + patch) * DIM..][..DIM]);
            }
        }
        let outputs = net.encode(&batch, &mut Pass::eval());
        assert_eq!(outputs.tensors[0].dims(), outputs.constants[0].dims());
        assert_eq!(values(outputs.constants[0].clone()), expected);
    }

    #[test]
    fn what_cannot_fit_is_refused() {
        assert_eq!(problems::<IJepa>(&config(), VIT, "size = 16"), [""; 0]);
        let default = Config::default();
        for (config, view, expected) in [
            (config(), "size = 4", "room for blocks and a context, but `views.0.size` makes a grid of 2 x 2 patches"),
            (default, "size = 8", "is 10, but on a grid of 4 x 4 patches a context may have no more than 8"),
            (config(), "size = 16\ncount = 2", "masks 1 view of each image, but `views` makes 2"),
            (Config { predictor_heads: Some(3), ..config() }, "size = 16", "must be a multiple of"),
            (Config { target_scale: [0.2, 1.5], ..config() }, "size = 16", "`method.ijepa.target_scale` is 1.5"),
        ] {
            let found = problems::<IJepa>(&config, VIT, view);
            assert!(found.iter().any(|message| message.contains(expected)), "{expected}: {found:?}");
        }
    }

    #[test]
    fn flat_and_equal_images_keep_everything_finite() {
        let (backbone, views) = inputs(VIT, "size = 16");
        stays_finite::<IJepa>(&config(), &backbone, &views);
    }

    #[test]
    fn masks_do_not_depend_on_who_shares_the_micro_batch() {
        let net = method();
        let all = net.draw(&batch(&[3, 1, 4, 15], 16, 0));
        assert_eq!(all, [net.draw(&batch(&[3, 1], 16, 0)), net.draw(&batch(&[4, 15], 16, 0))].concat());
        assert_ne!(all, net.draw(&batch(&[3, 1, 4, 15], 16, 10)), "the next epoch");
    }
}
