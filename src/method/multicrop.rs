//! Multi-crop: large views that teacher and student see, then small ones for the student alone.
//!
//! Caron et al., 2020, <https://arxiv.org/abs/2006.09882>, section 3.3, as DINO, iBOT and `DINOv2` use it: the first two views are the global ones.

use std::ops::Range;

use burn::tensor::Tensor;

use super::{Inputs, MicroBatch};
use crate::model::{Backbone, Pass};
use crate::problem::{Numbers, Problem};

/// Views at the front that the teacher sees; two in all released code.
pub(super) const GLOBAL_VIEWS: usize = 2;

/// Returns the number of global views: those at the start that are as large as the first. All are global where all have one size.
pub(super) fn num_global(inputs: &Inputs<'_>) -> usize {
    let first = inputs.view_sizes().next();
    inputs.view_sizes().take_while(|&size| Some(size) == first).count()
}

/// Runs some of the views through a network. Those of one size that follow each other go through it together, as in the released
/// `MultiCropWrapper`, so that batch norm sees them as one batch.
///
/// # Shapes
/// `[views * images, dim]`, view by view.
pub(super) fn pooled(backbone: &Backbone, batch: &MicroBatch, views: Range<usize>, pass: &mut Pass) -> Tensor<2> {
    let num_images = batch.images.len();
    let mut first = views.start;
    let mut features = Vec::new();
    for group in batch.views[views].chunk_by(|a, b| a.dims() == b.dims()) {
        let rows = first * num_images..(first + group.len()) * num_images;
        first += group.len();
        features.push(backbone.forward(Tensor::cat(group.to_vec(), 0), pass.for_rows(rows)).pooled);
    }
    Tensor::cat(features, 0)
}

/// Two views of one size in front, none larger behind.
pub(super) fn check(method: &str, inputs: &Inputs<'_>, found: &mut Numbers) {
    let num_views = inputs.num_views();
    if num_views < GLOBAL_VIEWS {
        found.push(
            Problem::at(
                "views",
                format!(
                    "`method.{method}` compares at least {GLOBAL_VIEWS} views of each image, but `views` makes {num_views}"
                ),
            )
            .hint("write two `[[views]]` tables of large crops, then one of small crops with `count = 8`"),
        );
        return;
    }
    let Some(first) = inputs.views.first() else { return };
    for (index, view) in inputs.views.iter().enumerate().skip(1) {
        let (key, size) = (format!("views.{index}.size"), first.size);
        if index == 1 && first.count < GLOBAL_VIEWS && view.size != size {
            let message = format!(
                "`{key}` is {}, but the first {GLOBAL_VIEWS} views, which the teacher sees, need one size, {size}",
                view.size
            );
            found.push(
                Problem::at(key, message)
                    .against("views")
                    .hint(format!("set it to {size}, or set `views.0.count = 2`")),
            );
        } else if view.size > size {
            let message =
                format!("`{key}` is {}, larger than the {size} pixels of the first {GLOBAL_VIEWS} views", view.size);
            found.push(
                Problem::at(key, message)
                    .against("views")
                    .hint("global views come first: move the table of the largest views to the front"),
            );
        }
    }
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
        let batch = MicroBatch { progress, images: vec![5, 9], labels: Vec::new(), views: views.clone() };
        let all = pooled(&network, &batch, 0..5, &mut Pass::eval());
        assert_eq!(all.dims(), [10, 24]);
        for (view, got) in views.into_iter().zip(all.chunk(5, 0)) {
            let alone = network.forward(view, &mut Pass::eval()).pooled;
            assert!((got - alone).abs().max().into_scalar::<f32>() < 1e-5);
        }
    }
}
