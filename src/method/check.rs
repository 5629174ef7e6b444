//! Checks that several methods share.

use super::Inputs;
use crate::model::DinoHeadArch;
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

/// Both ends of a teacher's momentum.
pub(super) fn momentum(at: &str, momentum: &RampConfig, found: &mut Numbers) {
    found.probability(&format!("{at}.start"), momentum.start);
    found.probability(&format!("{at}.end"), momentum.end);
    ramp(at, momentum, found);
}

/// Both ends of a temperature.
pub(super) fn temperature(at: &str, temperature: &RampConfig, found: &mut Numbers) {
    found.positive(&format!("{at}.start"), temperature.start);
    found.positive(&format!("{at}.end"), temperature.end);
    ramp(at, temperature, found);
}

/// Most prototypes of a head; `DINOv3`'s largest has 262144.
pub(super) const MAX_PROTOTYPES: usize = 1 << 20;

/// Sizes of a DINO head in the table `at`.
pub(super) fn dino_head(at: &str, arch: &DinoHeadArch, found: &mut Numbers) {
    found.size(&format!("{at}.hidden"), arch.hidden, MAX_WIDTH);
    found.size(&format!("{at}.layers"), arch.layers, MAX_DEPTH);
    found.size(&format!("{at}.bottleneck"), arch.bottleneck, MAX_WIDTH);
    let key = format!("{at}.prototypes");
    if found.size(&key, arch.prototypes, MAX_PROTOTYPES) && arch.prototypes == 1 {
        found.limit(&key, 1, "at least 2: with a single prototype there is nothing to tell apart");
    }
}

/// How long a DINO head's last layer is frozen: in epochs or in steps.
pub(super) fn freeze(at: &str, epochs: Option<f64>, steps: Option<u64>, found: &mut Numbers) {
    epochs.map(|epochs| found.not_negative(&format!("{at}.freeze_epochs"), epochs));
    if let (Some(_), Some(steps)) = (epochs, steps) {
        let key = format!("{at}.freeze_steps");
        found.push(
            Problem::at(&key, format!("`{key}` is {steps}, but `freeze_epochs` says it too"))
                .hint("remove one of them"),
        );
    }
}

fn ramp(at: &str, ramp: &RampConfig, found: &mut Numbers) {
    if let Err((key, problem)) = ramp.check() {
        let key = format!("{at}.{key}");
        found.push(Problem::at(&key, format!("`{key}` {problem}")));
    }
}
