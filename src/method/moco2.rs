//! MoCo v2: a query must pick out its key from a long queue of earlier keys, which a slowly moving average of the network makes.
//!
//! He, Fan, Wu, Xie, Girshick, 2019, <https://arxiv.org/abs/1911.05722>, equations 1 and 2, algorithm 1; Chen, Fan, Girshick, He, 2020,
//! <https://arxiv.org/abs/2003.04297> (MLP head, cosine schedule); official code `facebookresearch/moco`. View 1 makes queries, view 2 keys;
//! the keys enter the queue after the loss has used it.
//!
//! As published, the learning rate moves between epochs and every parameter decays; that is the recipe's (`each = "epoch"`, `decay_all`).
//!
//! The official code averages the key encoder in front of each step, here it happens behind each: the same networks meet, as both start equal.
//!
//! Deviations:
//! - Shuffled batch norm. A query must not share its batch statistics with its key, or the network recognises the key by them (section 3.3). The
//!   official code shuffles keys over all GPUs, so that statistics come from other images; here nothing crosses micro-batches. A micro-batch is cut into
//!   `batch_norm_groups`, contiguous ones for the queries, transposed ones for the keys (every n-th image), each with its own ("ghost") statistics:
//!   the group of a query and that of its key share one image in `batch_norm_groups`, as they would after a shuffle over as many GPUs. With one group it is
//!   plain ghost batch norm, and the leak is there.
//! - The queue is `[K, D]` and its size need not be a multiple of the batch (`K % B == 0` in the official code).

use burn::module::Module;
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::queue::{MAX_QUEUE, Queue};
use super::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, RunFacts, Sees, Update, check};
use crate::loss::info_nce::moco;
use crate::loss::l2_normalize;
use crate::model::{Backbone, ConfigError, LastLayer, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use crate::optim::RampConfig;
use crate::problem::{MAX_WIDTH, Numbers, Problem};

/// The `[method.moco2]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Divides the similarities; positive.
    pub temperature: f64,
    /// Hidden width of the head (the paper: as wide as the features).
    pub hidden: usize,
    /// Width of queries and keys.
    pub out: usize,
    /// Earlier keys to tell apart from a query's own. More than there are images makes an image's own earlier keys negatives.
    pub queue: usize,
    /// Momentum of the key encoder.
    pub momentum: RampConfig,
    /// Groups of a micro-batch with batch statistics of their own; divides `batch.micro`. The paper has 8 GPUs with 32 images. Without effect
    /// on a network without batch norm.
    pub batch_norm_groups: usize,
}

impl Default for Config {
    fn default() -> Self {
        let momentum = RampConfig::constant(0.999);
        Self { temperature: 0.2, hidden: 2048, out: 128, queue: 65_536, momentum, batch_norm_groups: 4 }
    }
}

/// Query encoder, key encoder and queue.
#[derive(Module, Debug)]
pub struct MoCo2 {
    backbone: Backbone,
    head: ProjectionHead,
    teacher: KeyEncoder,
    queue: Queue,
    temperature: f64,
    batch_norm_groups: usize,
    #[module(skip)]
    momentum: RampConfig,
}

/// The moving average.
#[derive(Module, Debug)]
struct KeyEncoder {
    backbone: Backbone,
    head: ProjectionHead,
}

impl Method for MoCo2 {
    type Config = Config;

    const SEES: Sees = Sees::GlobalBatch;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let network = |scope: &Scope| -> Result<(Backbone, ProjectionHead), ConfigError> {
            let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
            let last = LastLayer::Linear { bias: true };
            let arch = ProjectionHeadArch::mlp(backbone.dim(), config.hidden, config.out, 2, last).without_norm();
            let head = ProjectionHead::new(&arch, &scope.enter("head"));
            Ok((backbone, head))
        };
        let (backbone, head) = network(scope)?;
        let keys = network(&scope.untrained())?;
        Ok(Self {
            backbone,
            head,
            teacher: KeyEncoder { backbone: keys.0, head: keys.1 },
            queue: Queue::random(config.queue, config.out, &scope.enter("queue")),
            temperature: config.temperature,
            batch_norm_groups: config.batch_norm_groups,
            momentum: config.momentum,
        })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        found.positive("method.moco2.temperature", config.temperature);
        found.size("method.moco2.hidden", config.hidden, MAX_WIDTH);
        found.size("method.moco2.out", config.out, MAX_WIDTH);
        found.size("method.moco2.queue", config.queue, MAX_QUEUE);
        check::momentum("method.moco2.momentum", &config.momentum, found);
        check::pair_of_views("moco2", inputs, found);
        let (key, groups, micro) = ("method.moco2.batch_norm_groups", config.batch_norm_groups, inputs.micro);
        if !found.count(key, groups) {
            return;
        }
        if micro.is_multiple_of(groups) {
            check::lone_pixels("moco2", inputs, micro / groups, found);
        } else {
            let fitting = (1..groups.min(micro)).rev().find(|&fewer| micro.is_multiple_of(fewer)).unwrap_or(1);
            let message = format!("`{key}` is {groups}, which does not divide `batch.micro`, {micro}");
            found.push(
                Problem::at(key, message)
                    .against("batch.micro")
                    .hint(format!("use {fitting}, or a `batch.micro` that is a multiple of {groups}")),
            );
        }
    }

    fn resolve(config: &mut Config, facts: &RunFacts) -> Vec<String> {
        let (queue, images) = (config.queue, facts.images);
        if queue <= images {
            return Vec::new();
        }
        let note = format!(
            "`method.moco2.queue` is {queue}, more than the {images} images: among the negatives of a query are its image's own earlier keys"
        );
        vec![note]
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let (num_images, groups) = (batch.images.len(), self.batch_norm_groups);
        let each = num_images / groups;
        let mut keys_pass = pass.without_noise();
        let (mut queries, mut keys) = (Vec::with_capacity(groups), Vec::with_capacity(groups));
        let key_images = transpose(batch.views[1].clone(), groups);
        for group in 0..groups {
            pass.for_rows(group * each..(group + 1) * each);
            let images = batch.views[0].clone().narrow(0, group * each, each);
            queries.push(self.head.forward(self.backbone.forward(images, pass).pooled, pass)); // [each, out]
            let images = key_images.clone().narrow(0, group * each, each);
            let pooled = self.teacher.backbone.forward(images, &mut keys_pass).pooled;
            keys.push(self.teacher.head.forward(pooled, &mut keys_pass));
        }
        pass.absorb(keys_pass);
        let keys = transpose(Tensor::cat(keys, 0), each); // in the order of the images again
        Outputs { tensors: vec![Tensor::cat(queries, 0)], constants: vec![l2_normalize(keys, 1e-6)] }
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [queries]: [Tensor<2>; 1] = outputs.tensors.try_into().expect("`encode` returns one tensor");
        let [keys]: [Tensor<2>; 1] = outputs.constants.try_into().expect("`encode` returns one constant");
        let images = queries.dims()[0];
        let sum = moco(queries, keys.clone(), self.queue.rows(), self.temperature);
        let candidates = 1 + self.queue.rows().dims()[0];
        let loss = Loss::new(sum, images as f64).with_uniform((candidates as f64).ln()).with_embeddings(keys.clone());
        Loss { statistics: vec![keys.flatten(0, 1)], ..loss }
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn teacher_momentum(&self, progress: &Progress) -> Option<f64> {
        Some(progress.at(&self.momentum))
    }

    fn update(&self, statistics: &[Vec<f32>], _progress: &Progress) -> Vec<Update> {
        self.queue.push(&statistics[0]).into()
    }
}

/// Deals rows round: of `[groups, n]` rows makes `[n, groups]`. Dealing again with `n` brings them back.
fn transpose<const D: usize>(rows: Tensor<D>, groups: usize) -> Tensor<D> {
    let dims = rows.dims();
    let (count, flat) = (dims[0], dims[1..].iter().product::<usize>());
    rows.reshape([groups, count / groups, flat]).swap_dims(0, 1).reshape(dims)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    #[test]
    fn a_query_and_its_key_share_one_image_in_groups() {
        let (images, groups) = (16, 4);
        let each = images / groups;
        let rows: Vec<f32> = (0..images).map(|row| row as f32).collect();
        let rows = Tensor::<2>::from_data(TensorData::new(rows, [images, 1]), &Device::flex());
        let host = |rows: Tensor<2>| rows.into_data().try_to_vec::<f32>().unwrap();
        let dealt = transpose(rows.clone(), groups);
        assert_eq!(host(transpose(dealt.clone(), each)), host(rows), "the way back");
        let dealt = host(dealt);
        for keys in dealt.chunks(each) {
            for group in 0..groups {
                let queries = (group * each) as f32..((group + 1) * each) as f32;
                assert_eq!(keys.iter().filter(|&&image| queries.contains(&image)).count(), each / groups);
            }
        }
    }
}
