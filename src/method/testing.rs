//! What the tests of the methods share: a small recipe's tables and a batch of made-up images.

use burn::tensor::{Device, Tensor, TensorData};

use super::{Inputs, Method, MicroBatch, Progress};
use crate::augment::ViewConfig;
use crate::model::params::{self, Layout};
use crate::model::{BackboneConfig, Noise, Pass, Scope};
use crate::problem::Numbers;

/// The tables of a backbone and of one group of views.
pub(super) fn inputs(backbone: &str, view: &str) -> (BackboneConfig, [ViewConfig; 1]) {
    (toml::from_str(backbone).unwrap(), [toml::from_str(view).unwrap()])
}

/// What a method says about a table and these inputs.
pub(super) fn problems<M: Method>(config: &M::Config, backbone: &str, view: &str) -> Vec<String> {
    let (backbone, views) = inputs(backbone, view);
    let mut found = Numbers::default();
    M::check(config, &Inputs { backbone: &backbone, views: &views, global: 8, micro: 4 }, &mut found);
    found.problems.into_iter().map(|problem| problem.message).collect()
}

fn progress(step: u64) -> Progress {
    Progress { seed: 11, step, steps: 100, steps_per_epoch: 10 }
}

/// One view of each of these images, of `size` pixels, at a step of a run with 10 steps an epoch.
pub(super) fn batch(images: &[u64], size: usize, step: u64) -> MicroBatch {
    let each = 3 * size * size;
    let pixels = images.iter().flat_map(|&image| (0..each).map(move |i| (image as f32 + i as f32 * 0.37).sin()));
    let shape = [images.len(), 3, size, size];
    let view = Tensor::from_data(TensorData::new(pixels.collect::<Vec<f32>>(), shape), &Device::flex());
    MicroBatch { progress: progress(step), images: images.to_vec(), labels: Vec::new(), views: vec![view] }
}

pub(super) fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Checks that loss and gradients of a method with one view are finite for two equal images without any contrast.
pub(super) fn stays_finite<M: Method>(config: &M::Config, backbone: &BackboneConfig, views: &[ViewConfig]) {
    let device = Device::flex().autodiff();
    let inputs = Inputs { backbone, views, global: 2, micro: 2 };
    let net = M::build(config, &inputs, &Scope::new(1, &device)).unwrap();
    let size = views[0].size as usize;
    for pixel in [0.0f32, 2.5] {
        let view = Tensor::<4>::full([2, 3, size, size], pixel, &device);
        let batch =
            MicroBatch { progress: progress(3), images: vec![7, 7], labels: vec![vec![0], vec![1]], views: vec![view] };
        let noise = Noise { seed: 11, step: 3, rows: vec![(7, 0), (7, 0)] };
        let loss = net.loss(net.encode(&batch, &mut Pass::train(noise)), &batch.progress);
        assert!(loss.count > 0.0 && loss.sum.clone().into_scalar::<f32>().is_finite());
        let mut gradients = loss.sum.backward();
        let gradients = params::read_gradients(&net, &Layout::of(&net), &mut gradients).concat();
        assert!(gradients.iter().all(|g| g.is_finite()) && gradients.iter().any(|&g| g != 0.0));
    }
}
