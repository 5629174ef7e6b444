//! Checks that several methods share.

use super::Inputs;
use crate::model::{Backbone, BackboneConfig, ConfigError, DinoHeadArch, Pool, Stem, Vit, VitConfig};
use crate::optim::{ParameterRule, RampConfig};
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

/// One view of each image. `does` is what the method does with it.
pub(super) fn one_view(method: &str, does: &str, inputs: &Inputs<'_>, found: &mut Numbers) {
    let views = inputs.num_views();
    if views != 1 {
        found.push(
            Problem::at("views", format!("`method.{method}` {does} 1 view of each image, but `views` makes {views}"))
                .hint("write one `[[views]]` table with `count = 1`"),
        );
    }
}

/// A vision transformer whose patches go through the final norm; returns its table. `does` is what the method does with patches.
pub(super) fn vit<'a>(method: &str, does: &str, inputs: &Inputs<'a>, found: &mut Numbers) -> Option<&'a VitConfig> {
    let BackboneConfig::Vit(vit) = inputs.backbone else {
        let name = inputs.backbone.name();
        let message =
            format!("`method.{method}` {does} patches and needs `backbone.vit`, but the backbone is `{name}`");
        found.push(
            Problem::at(format!("method.{method}"), message)
                .against("backbone")
                .hint(format!("write `[backbone.vit]`, or keep the {name} and write `[method.simclr]`")),
        );
        return None;
    };
    if vit.fc_norm {
        let message = format!(
            "`backbone.vit.fc_norm` is true, which leaves patches without the final norm that `method.{method}` trains"
        );
        found.push(Problem::at("backbone.vit.fc_norm", message).hint("remove it"));
    }
    Some(vit)
}

/// An image that its patches stand for: the method's loss never reaches the class token.
pub(super) fn mean_pool(method: &str, vit: &VitConfig, found: &mut Numbers) {
    if vit.pool == Pool::Class {
        let message = format!(
            "`backbone.vit.pool` is \"class\", but nothing in `method.{method}` trains what becomes of that token"
        );
        found.push(Problem::at("backbone.vit.pool", message).hint("write `pool = \"mean\"` under `[backbone.vit]`"));
    }
}

/// Returns the patches along each side of the first view, if they are a whole number (else another check says so).
pub(super) fn side(vit: &VitConfig, inputs: &Inputs<'_>) -> Option<usize> {
    let size = inputs.views.first()?.size as usize;
    (vit.patch > 0 && size > 0 && size.is_multiple_of(vit.patch)).then(|| size / vit.patch)
}

/// Returns the vision transformer that [`vit`] requires.
pub(super) fn encoder<'a>(method: &str, does: &str, backbone: &'a Backbone) -> Result<&'a Vit, ConfigError> {
    backbone.vit().ok_or_else(|| {
        let problem = format!("`{method}` {does} patches of a vision transformer, and another backbone has none");
        ConfigError::new("backbone", problem, "use `[backbone.vit]`, or `[method.simclr]` with this one")
    })
}

/// No decay of class token and learned positions, the `no_weight_decay` of `BEiT`'s and `SimMIM`'s code.
pub(super) fn undecayed_embeddings() -> Vec<ParameterRule> {
    let rule = ParameterRule::matching("backbone.cls_token|backbone.pos_embed");
    vec![ParameterRule { weight_decay: Some(0.0), ..rule }]
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

/// 1 GiB for each such matrix.
const MAX_SQUARED: usize = 16_384;

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
