//! Views of several sizes: large ones of most of an image (global), small ones of a part of it (local).

use burn::tensor::Tensor;

use super::{Inputs, MicroBatch};
use crate::model::{Backbone, Pass};

/// Returns the number of global views: those at the start that are as large as the first. All are global where all have one size.
pub(super) fn num_global(inputs: &Inputs<'_>) -> usize {
    let first = inputs.view_sizes().next();
    inputs.view_sizes().take_while(|&size| Some(size) == first).count()
}

/// Runs the backbone on all views. Those of one size go through together (as `MultiCropWrapper` in the released code of DINO), so batch norm sees
/// them as one batch.
///
/// # Shapes
/// Views of b images each to `[v * b, dim]`, view after view.
pub(super) fn features(backbone: &Backbone, batch: &MicroBatch, pass: &mut Pass) -> Tensor<2> {
    let num_images = batch.images.len();
    let mut start = 0;
    let mut features = Vec::new();
    for views in batch.views.chunk_by(|a, b| a.dims() == b.dims()) {
        let end = start + views.len();
        pass.for_rows(start * num_images..end * num_images);
        features.push(backbone.forward(Tensor::cat(views.to_vec(), 0), pass).pooled);
        start = end;
    }
    Tensor::cat(features, 0)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::augment::ViewConfig;
    use crate::method::Progress;
    use crate::model::{BackboneConfig, Scope};

    #[test]
    fn views_keep_their_order_and_the_first_ones_are_global() {
        let table = |count, size| -> ViewConfig { toml::from_str(&format!("count = {count}\nsize = {size}")).unwrap() };
        let backbone: BackboneConfig = toml::from_str("[vit]\npatch = 4\ndim = 24\ndepth = 1\nheads = 2").unwrap();
        let tables = [table(1, 16), table(2, 16), table(2, 8)];
        let inputs = |views| Inputs { backbone: &backbone, views, global: 4, micro: 2 };
        assert_eq!(num_global(&inputs(&tables)), 3);
        assert_eq!(num_global(&inputs(&tables[2..])), 2, "all of one size");

        let device = Device::flex();
        let network = Backbone::new(&backbone, 16, &Scope::new(1, &device)).unwrap();
        let view = |index: usize, size: usize| {
            let values =
                (0..2 * 3 * size * size).map(|i| ((i * 31 + index * 7) % 97) as f32 / 97.0).collect::<Vec<_>>();
            Tensor::from_data(TensorData::new(values, [2, 3, size, size]), &device)
        };
        let views: Vec<Tensor<4>> = [16, 16, 16, 8, 8].into_iter().enumerate().map(|(i, size)| view(i, size)).collect();
        let progress = Progress { seed: 1, step: 0, steps: 1, steps_per_epoch: 1 };
        let batch = MicroBatch { progress, images: vec![5, 9], views: views.clone() };
        let all = features(&network, &batch, &mut Pass::eval());
        assert_eq!(all.dims(), [10, 24]);
        for (view, got) in views.into_iter().zip(all.chunk(5, 0)) {
            let alone = network.forward(view, &mut Pass::eval()).pooled;
            assert!((got - alone).abs().max().into_scalar::<f32>() < 1e-5);
        }
    }
}
