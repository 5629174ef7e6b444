//! Checks that several methods share.

use super::Inputs;
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

/// Micro-batches of more than one image, for heads whose batch norms see one view at a time.
pub(super) fn batch_norm(method: &str, inputs: &Inputs<'_>, found: &mut Numbers) {
    if inputs.micro == 1 {
        let message = format!(
            "`batch.micro` is 1, but the batch norms of `method.{method}` take their statistics over at least 2 images"
        );
        found.push(
            Problem::at("batch.micro", message).against("batch.global").hint("use at least 2; 32 and more work well"),
        );
    }
}

/// A width whose square is the size of a matrix in the loss.
pub(super) fn squared_width(at: &str, width: usize, found: &mut Numbers) {
    // A mistake beyond MAX_WIDTH is reported by `head`.
    if (MAX_SQUARED + 1..=MAX_WIDTH).contains(&width) {
        let key = format!("{at}.out");
        let message =
            format!("`{key}` is {width}, but must be at most {MAX_SQUARED}: the loss has `out` x `out` numbers");
        found.push(Problem::at(key, message).hint("8192 is the paper's, 2048 is enough for small data"));
    }
}

/// 1 GiB for each such matrix.
const MAX_SQUARED: usize = 16_384;

/// At least two views, global ones (as large as the first) before smaller ones.
pub(super) fn global_views_first(method: &str, inputs: &Inputs<'_>, found: &mut Numbers) {
    let views = inputs.num_views();
    if views == 1 {
        found.push(
            Problem::at("views", format!("`method.{method}` compares views of an image, but `views` makes 1"))
                .hint("2 global and 6 local views are the paper's: `count = 2`, and a second `[[views]]` table"),
        );
    }
    for (index, pair) in inputs.views.windows(2).enumerate() {
        let (before, size) = (pair[0].size, pair[1].size);
        if size > before {
            let key = format!("views.{}.size", index + 1);
            let message = format!(
                "`{key}` is {size}, larger than the {before} of the table before, but `method.{method}` takes the first \
                 views for the global ones"
            );
            found.push(Problem::at(key, message).against("views").hint("write the tables of larger views first"));
        }
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
