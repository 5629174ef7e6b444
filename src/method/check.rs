//! Checks that several methods share.

use super::Inputs;
use crate::model::{BackboneConfig, Stem};
use crate::optim::RampConfig;
use crate::problem::{MAX_DEPTH, MAX_WIDTH, Numbers, Problem};

/// Sizes of a projection head in the table `at`.
pub(super) fn head(at: &str, hidden: usize, out: usize, layers: usize, found: &mut Numbers) {
    found.size(&format!("{at}.hidden"), hidden, MAX_WIDTH);
    found.size(&format!("{at}.out"), out, MAX_WIDTH);
    found.size(&format!("{at}.layers"), layers, MAX_DEPTH);
}

/// Two views of each image, of one size.
pub(super) fn pair_of_views(method: &str, inputs: &Inputs<'_>, found: &mut Numbers) {
    let views = inputs.num_views();
    if views != 2 {
        found.push(
            Problem::at(
                "views",
                format!("`method.{method}` compares 2 views of each image, but `views` makes {views}"),
            )
            .hint("write one `[[views]]` table with `count = 2`, or two tables"),
        );
    }
    if let [first, .., last] = inputs.views
        && first.size != last.size
    {
        let index = inputs.views.len() - 1;
        let (a, b) = (first.size, last.size);
        found.push(
            Problem::at(
                format!("views.{index}.size"),
                format!("`method.{method}` needs views of equal size, but they have {a} and {b} pixels"),
            )
            .hint(format!("set both to {a}, or both to {b}")),
        );
    }
}

/// A global batch of more than one image.
pub(super) fn other_images(method: &str, inputs: &Inputs<'_>, found: &mut Numbers) {
    if inputs.global == 1 {
        found.push(
            Problem::at(
                "batch.global",
                format!("`batch.global` is 1, but `method.{method}` needs other images to compare with"),
            )
            .hint("use at least 2; 256 and more work well"),
        );
    }
}

/// Two images at least in a micro-batch, for heads that normalise the rows of one view.
pub(super) fn images_to_normalise(method: &str, inputs: &Inputs<'_>, found: &mut Numbers) {
    if inputs.micro == 1 {
        let message = format!(
            "`batch.micro` is 1, but the heads of `method.{method}` normalise over the images of a micro-batch"
        );
        found.push(Problem::at("batch.micro", message).hint("use at least 2; 32 and more work well"));
    }
}

/// More than one value of each channel for the batch norm of a resnet that `images` pass through at once.
pub(super) fn lone_pixels(method: &str, inputs: &Inputs<'_>, images: usize, found: &mut Numbers) {
    let BackboneConfig::Resnet(resnet) = inputs.backbone else { return };
    let stride = match resnet.stem {
        Stem::Imagenet => 32,
        Stem::Cifar => 8,
    };
    let smallest = inputs.views.iter().map(|view| view.size).min();
    if let Some(size) = smallest.filter(|&size| images == 1 && size <= stride) {
        let message = format!(
            "`method.{method}` passes single images through the resnet, whose last maps are single pixels at {size} px: \
             batch norm has nothing to normalise over"
        );
        found.push(
            Problem::at("batch.micro", message)
                .against("views")
                .hint(format!("use a larger `batch.micro`, or views of more than {stride} px")),
        );
    }
}

/// Both ends of a teacher's momentum.
pub(super) fn momentum(at: &str, momentum: &RampConfig, found: &mut Numbers) {
    found.probability(&format!("{at}.start"), momentum.start);
    found.probability(&format!("{at}.end"), momentum.end);
    ramp(at, momentum, found);
}

/// Both ends of a temperature.
#[expect(dead_code, reason = "for DINO")]
pub(super) fn temperature(at: &str, temperature: &RampConfig, found: &mut Numbers) {
    found.positive(&format!("{at}.start"), temperature.start);
    found.positive(&format!("{at}.end"), temperature.end);
    ramp(at, temperature, found);
}

fn ramp(at: &str, ramp: &RampConfig, found: &mut Numbers) {
    if let Err((key, problem)) = ramp.check() {
        let key = format!("{at}.{key}");
        found.push(Problem::at(&key, format!("`{key}` {problem}")));
    }
}
