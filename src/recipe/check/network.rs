//! Backbone, method and views, and what must fit together between them.

use super::number::Numbers;
use crate::augment::ViewConfig;
use crate::mask::num_kept;
use crate::method::{MethodConfig, mae, simclr};
use crate::model::{BackboneConfig, Pool, PositionEmbedding, ResNetArch, ResNetConfig, VitArch, VitConfig};
use crate::recipe::{Problem, Recipe};

/// No network in use is wider or deeper by a factor of ten.
const MAX_WIDTH: usize = 65_536;
const MAX_DEPTH: usize = 1_000;
const MAX_MLP_RATIO: f64 = 64.0;

pub(super) fn check(recipe: &Recipe, found: &mut Numbers) {
    let before = found.problems.len();
    match &recipe.backbone {
        BackboneConfig::Resnet(resnet) => check_resnet(resnet, found),
        BackboneConfig::Vit(vit) => check_vit(vit, &recipe.views, found),
    }
    // The network's own checks have the last word, on whatever those above let pass.
    if found.problems.len() == before {
        for view in &recipe.views {
            let refused = match &recipe.backbone {
                BackboneConfig::Resnet(resnet) => ResNetArch::from_config(resnet).err(),
                BackboneConfig::Vit(vit) => VitArch::from_config(vit, view.size).err(),
            };
            if let Some(error) = refused {
                let message = format!("`{}`: {}", error.key, error.problem);
                found.push(Problem::at(error.key, message).hint(error.hint));
                break;
            }
        }
    }
    match &recipe.method {
        MethodConfig::Simclr(config) => check_simclr(config, recipe, found),
        MethodConfig::Mae(config) => check_mae(config, recipe, found),
    }
}

fn check_resnet(resnet: &ResNetConfig, found: &mut Numbers) {
    if ![18, 34, 50].contains(&resnet.depth) {
        found.limit("backbone.resnet.depth", resnet.depth, "18, 34 or 50");
    }
    let key = "backbone.resnet.width";
    let channels = (64.0 * resnet.width).round();
    if found.positive(key, resnet.width) && !(1.0..=4096.0).contains(&channels) {
        let message = format!("`{key}` is {}, which makes {channels} channels of 64", resnet.width);
        found.push(Problem::at(key, message).hint("from 1 to 4096 are possible; 0.25 makes 16"));
    }
}

fn check_vit(vit: &VitConfig, views: &[ViewConfig], found: &mut Numbers) {
    let (dim, depth, heads) = vit.sizes();
    let counted = [found.size("backbone.vit.dim", dim, MAX_WIDTH), found.size("backbone.vit.heads", heads, MAX_WIDTH)];
    found.size("backbone.vit.depth", depth, MAX_DEPTH);
    if counted == [true, true] {
        multiple("backbone.vit.dim", dim, heads, "backbone.vit.heads", found);
        if vit.position == PositionEmbedding::Sincos {
            multiple_of_four("backbone.vit.dim", dim, "`position = \"sincos\"` needs", "backbone.vit.position", found);
        }
    }
    if found.positive("backbone.vit.mlp_ratio", vit.mlp_ratio) && (dim as f64 * vit.mlp_ratio) < 1.0 {
        found.limit("backbone.vit.mlp_ratio", vit.mlp_ratio, &format!("at least 1 / {dim}"));
    }
    if vit.mlp_ratio > MAX_MLP_RATIO {
        found.limit("backbone.vit.mlp_ratio", vit.mlp_ratio, &format!("at most {MAX_MLP_RATIO}"));
    }
    if vit.registers > MAX_WIDTH {
        found.limit("backbone.vit.registers", vit.registers, &format!("at most {MAX_WIDTH}"));
    }
    if let Some(scale) = vit.layer_scale {
        found.positive("backbone.vit.layer_scale", scale);
    }
    found.momentum("backbone.vit.drop_path", vit.drop_path);
    if vit.pool == Pool::Class && !vit.class_token {
        found.push(
            Problem::at("backbone.vit.class_token", "`backbone.vit.pool` is \"class\", but there is no class token")
                .against("backbone.vit.pool")
                .hint("set `pool = \"mean\"`, or remove `class_token = false`"),
        );
    }
    if found.size("backbone.vit.patch", vit.patch, MAX_WIDTH) {
        for (index, view) in views.iter().enumerate() {
            let key = format!("views.{index}.size");
            multiple(&key, view.size as usize, vit.patch, "backbone.vit.patch", found);
        }
    }
}

fn check_simclr(config: &simclr::Config, recipe: &Recipe, found: &mut Numbers) {
    found.positive("method.simclr.temperature", config.temperature);
    found.size("method.simclr.hidden", config.hidden, MAX_WIDTH);
    found.size("method.simclr.out", config.out, MAX_WIDTH);
    found.size("method.simclr.layers", config.layers, MAX_DEPTH);
    let views = recipe.num_views();
    if views != 2 && !recipe.views.is_empty() {
        found.push(
            Problem::at("views", format!("`method.simclr` compares 2 views of each image, but `views` makes {views}"))
                .hint("write one `[[views]]` table with `count = 2`, or two tables"),
        );
    }
    if let [first, .., last] = recipe.views.as_slice()
        && first.size != last.size
    {
        let index = recipe.views.len() - 1;
        let (a, b) = (first.size, last.size);
        found.push(
            Problem::at(
                format!("views.{index}.size"),
                format!("`method.simclr` needs views of equal size, but they have {a} and {b} pixels"),
            )
            .hint(format!("set both to {a}, or both to {b}")),
        );
    }
    if recipe.batch.global == 1 {
        found.push(
            Problem::at("batch.global", "`batch.global` is 1, but `method.simclr` needs other images to compare with")
                .hint("use at least 2; 256 and more work well"),
        );
    }
}

fn check_mae(config: &mae::Config, recipe: &Recipe, found: &mut Numbers) {
    let views = recipe.num_views();
    if views != 1 && !recipe.views.is_empty() {
        found.push(
            Problem::at("views", format!("`method.mae` reconstructs 1 view of each image, but `views` makes {views}"))
                .hint("write one `[[views]]` table with `count = 1`"),
        );
    }
    let counted = [
        found.size("method.mae.decoder_dim", config.decoder_dim, MAX_WIDTH),
        found.size("method.mae.decoder_heads", config.decoder_heads, MAX_WIDTH),
    ];
    found.size("method.mae.decoder_depth", config.decoder_depth, MAX_DEPTH);
    if counted == [true, true] {
        let dim = "method.mae.decoder_dim";
        multiple(dim, config.decoder_dim, config.decoder_heads, "method.mae.decoder_heads", found);
        multiple_of_four(dim, config.decoder_dim, "its sine-cosine positions need", "method.mae", found);
    }
    let ratio = config.mask_ratio;
    let in_range = ratio > 0.0 && ratio < 1.0;
    if !in_range {
        found.limit("method.mae.mask_ratio", ratio, "greater than 0 and less than 1");
    }
    match &recipe.backbone {
        BackboneConfig::Resnet(_) => found.push(
            Problem::at(
                "method.mae",
                "`method.mae` drops patches and needs `backbone.vit`, but the backbone is `resnet`",
            )
            .against("backbone")
            .hint("write `[backbone.vit]`, or keep the resnet and write `[method.simclr]`"),
        ),
        BackboneConfig::Vit(vit) => {
            let side = recipe.views.first().map_or(0, |view| view.size as usize / vit.patch.max(1));
            let patches = side.saturating_mul(side);
            let kept = num_kept(patches, ratio);
            if patches == 1 {
                let (size, least) = (vit.patch, 2 * vit.patch);
                let message = format!(
                    "`views.0.size` is {size}, a single patch, but `method.mae` needs some to keep and some to remove"
                );
                found.push(
                    Problem::at("views.0.size", message)
                        .against("backbone.vit.patch")
                        .hint(format!("use at least {least}, or a smaller patch")),
                );
            } else if in_range && patches > 1 && (kept == 0 || kept == patches) {
                let what = if kept == 0 { "keeps" } else { "removes" };
                let least = (1000.0 / patches as f64).ceil() / 1000.0;
                found.push(
                    Problem::at(
                        "method.mae.mask_ratio",
                        format!("`method.mae.mask_ratio` is {ratio}, which {what} none of the {patches} patches"),
                    )
                    .against("backbone.vit.patch")
                    .against("views")
                    .hint(format!("use from {least} to {}", 1.0 - least)),
                );
            }
        }
    }
}

fn multiple(key: &str, value: usize, of: usize, of_key: &'static str, found: &mut Numbers) {
    if !value.is_multiple_of(of) {
        let message = format!("`{key}` is {value}, but must be a multiple of `{of_key}`, {of}");
        found.push(Problem::at(key, message).against(of_key).hint(near_multiples(value, of)));
    }
}

fn multiple_of_four(key: &str, value: usize, why: &str, why_key: &'static str, found: &mut Numbers) {
    if !value.is_multiple_of(4) {
        let message = format!("`{key}` is {value}, but must be a multiple of 4, as {why}");
        found.push(Problem::at(key, message).against(why_key).hint(near_multiples(value, 4)));
    }
}

fn near_multiples(value: usize, of: usize) -> String {
    let below = value / of * of;
    if below == 0 { format!("use {of}") } else { format!("use {below} or {}", below.saturating_add(of)) }
}
