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
