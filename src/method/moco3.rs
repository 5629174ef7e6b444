//! MoCo v3: queries of each view must pick out the other view's key among the keys of the whole batch.
//!
//! Chen, Xie, He, 2021, <https://arxiv.org/abs/2104.02057>, algorithm 1; official code `facebookresearch/moco-v3`, `moco/builder.py`: the
//! cross-entropies are multiplied by `2 T` and both directions are added. There is no queue. The patch projection of a vision transformer is kept
//! as it was drawn (section 4.2), which takes away the spikes of the gradient.
//!
//! The official code averages the momentum encoder in front of each step, with that step's momentum. Here it happens behind each, with the momentum of
//! the step to come: the same networks meet. As there, averages are of weights alone and the momentum encoder normalises with batch statistics.
//!
//! Deviations: batch norm takes its statistics over a micro-batch, not over all replicas; fixed positions are MAE's, whose rows and columns
//! are the other way round.

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, check};
use crate::loss::info_nce::moco_v3;
use crate::model::layers::Affine;
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::optim::{ParameterRule, RampConfig};
use crate::problem::{MAX_DEPTH, MAX_WIDTH, Numbers};

/// The `[method.moco3]` table. The defaults are those of vision transformers; a resnet has `projector_layers = 2`, `predictor_norm = false` and
/// `temperature = 1.0`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Divides the similarities; positive.
    pub temperature: f64,
    /// Hidden width of projector and predictor.
    pub hidden: usize,
    /// Width of queries and keys.
    pub out: usize,
    /// Linear layers of the projector (the predictor has 2).
    pub projector_layers: usize,
    /// Batch norm without scale and offset behind the predictor's last layer (the projector has it always).
    pub predictor_norm: bool,
    /// Momentum of the momentum encoder.
    pub momentum: RampConfig,
    /// Leaves the patch projection of a vision transformer untrained. A resnet has none.
    pub freeze_patch_embed: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            temperature: 0.2,
            hidden: 4096,
            out: 256,
            projector_layers: 3,
            predictor_norm: true,
            momentum: RampConfig::cosine(0.99, 1.0),
            freeze_patch_embed: true,
        }
    }
}

/// Encoder with predictor, and momentum encoder.
#[derive(Module, Debug)]
pub struct MoCo3 {
    backbone: Backbone,
    projector: ProjectionHead,
    predictor: ProjectionHead,
    teacher: MomentumEncoder,
    temperature: f64,
    #[module(skip)]
    momentum: RampConfig,
}

/// The moving average.
#[derive(Module, Debug)]
struct MomentumEncoder {
    backbone: Backbone,
    projector: ProjectionHead,
}

impl Method for MoCo3 {
    type Config = Config;

    const SEES: Sees = Sees::GlobalBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let Config { hidden, out, projector_layers, .. } = *config;
        let norm = LastLayer::Norm(Affine::None);
        let network = |scope: &Scope| -> Result<(Backbone, ProjectionHead), ConfigError> {
            let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
            let arch = ProjectionHeadArch::mlp(backbone.dim(), hidden, out, projector_layers, norm);
            let projector = ProjectionHead::new(&arch, &scope.enter("projector"));
            Ok((backbone, projector))
        };
        let (backbone, projector) = network(scope)?;
        let last = if config.predictor_norm { norm } else { LastLayer::Linear { bias: false } };
        let arch = ProjectionHeadArch::mlp(out, hidden, out, 2, last);
        let predictor = ProjectionHead::new(&arch, &scope.enter("predictor"));
        let average = network(&scope.untrained())?;
        let teacher = MomentumEncoder { backbone: average.0, projector: average.1 };
        let Config { temperature, momentum, .. } = *config;
        Ok(Self { backbone, projector, predictor, teacher, temperature, momentum })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        found.positive("method.moco3.temperature", config.temperature);
        found.size("method.moco3.hidden", config.hidden, MAX_WIDTH);
        found.size("method.moco3.out", config.out, MAX_WIDTH);
        found.size("method.moco3.projector_layers", config.projector_layers, MAX_DEPTH);
        check::momentum("method.moco3.momentum", &config.momentum, found);
        check::pair_of_views("moco3", inputs, found);
        check::other_images("moco3", inputs, found);
        check::images_to_normalise("moco3", inputs, found);
    }

    fn rules(config: &Config) -> Vec<ParameterRule> {
        let patches = ParameterRule { frozen: Some(true), ..ParameterRule::matching("backbone.patch_embed.*") };
        if config.freeze_patch_embed { vec![patches] } else { Vec::new() }
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let num_images = batch.images.len();
        let mut keys_pass = pass.without_noise();
        let mut outputs = Outputs::default();
        for (view, images) in batch.views.iter().enumerate() {
            pass.for_rows(view * num_images..(view + 1) * num_images);
            let projection = self.projector.forward(self.backbone.forward(images.clone(), pass).pooled, pass);
            outputs.tensors.push(self.predictor.forward(projection, pass)); // [micro, out]
            let pooled = self.teacher.backbone.forward(images.clone(), &mut keys_pass).pooled;
            outputs.constants.push(self.teacher.projector.forward(pooled, &mut keys_pass));
        }
        pass.absorb(keys_pass);
        outputs
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let queries: [Tensor<2>; 2] = outputs.tensors.try_into().expect("`encode` returns two tensors");
        let keys: [Tensor<2>; 2] = outputs.constants.try_into().expect("`encode` returns two constants");
        let images = queries[0].dims()[0];
        let embeddings = keys[0].clone();
        let uniform = 4.0 * self.temperature * (images as f64).ln(); // two directions, times 2 T each
        Loss::new(moco_v3(queries, keys, self.temperature), images as f64)
            .with_uniform(uniform)
            .with_embeddings(embeddings)
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn teacher_momentum(&self, progress: &Progress) -> Option<f64> {
        let next = Progress { step: progress.step + 1, ..*progress };
        Some(next.at(&self.momentum))
    }
}
