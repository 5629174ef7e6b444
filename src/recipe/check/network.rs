//! Backbone, method and views, and what must fit together between them.

use crate::augment::ViewConfig;
use crate::model::{
    BackboneConfig, ConvNextArch, ConvNextConfig, Pool, PositionEmbedding, ResNetArch, ResNetConfig, VitArch, VitConfig,
};
use crate::problem::{MAX_DEPTH, MAX_WIDTH, Numbers, Problem, multiple, multiple_of_four, near_multiples};
use crate::recipe::Recipe;

const MAX_MLP_RATIO: f64 = 64.0;
const MAX_KERNEL: usize = 63;

pub(super) fn check(recipe: &Recipe, found: &mut Numbers) {
    let before = found.problems.len();
    match &recipe.backbone {
        BackboneConfig::Resnet(resnet) => check_resnet(resnet, found),
        BackboneConfig::Vit(vit) => check_vit(vit, &recipe.views, found),
        BackboneConfig::Convnext(convnext) => check_convnext(convnext, &recipe.views, found),
    }
    // The network's own checks have the last word, on whatever those above let pass.
    if found.problems.len() == before {
        for view in &recipe.views {
            let refused = match &recipe.backbone {
                BackboneConfig::Resnet(resnet) => ResNetArch::from_config(resnet).err(),
                BackboneConfig::Vit(vit) => VitArch::from_config(vit, view.size).err(),
                BackboneConfig::Convnext(convnext) => ConvNextArch::from_config(convnext).check().err(),
            };
            if let Some(error) = refused {
                let message = format!("`{}`: {}", error.key, error.problem);
                found.push(Problem::at(error.key, message).hint(error.hint));
                break;
            }
        }
    }
    if !recipe.views.is_empty() {
        recipe.method.check(&recipe.inputs(), found);
    }
}

fn check_resnet(resnet: &ResNetConfig, found: &mut Numbers) {
    if ![18, 34, 50, 101, 152].contains(&resnet.depth) {
        found.limit("backbone.resnet.depth", resnet.depth, "18, 34, 50, 101 or 152");
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
        if vit.position == PositionEmbedding::Rope && dim.is_multiple_of(heads) && !(dim / heads).is_multiple_of(4) {
            let (width, of) = (dim / heads, 4 * heads);
            let message = format!(
                "`backbone.vit.dim` is {dim}, which makes {heads} heads of {width}, but `position = \"rope\"` needs a multiple of 4"
            );
            found.push(
                Problem::at("backbone.vit.dim", message).against("backbone.vit.position").hint(near_multiples(dim, of)),
            );
        }
    }
    found.positive("backbone.vit.rope_base", vit.rope_base);
    found.positive("backbone.vit.norm_eps", vit.norm_eps);
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

fn check_convnext(convnext: &ConvNextConfig, views: &[ViewConfig], found: &mut Numbers) {
    let (depths, dims) = convnext.sizes();
    for (stage, (depth, dim)) in depths.into_iter().zip(dims).enumerate() {
        found.size(&format!("backbone.convnext.depths.{stage}"), depth, MAX_DEPTH);
        found.size(&format!("backbone.convnext.dims.{stage}"), dim, MAX_WIDTH);
    }
    let key = "backbone.convnext.kernel";
    if found.size(key, convnext.kernel, MAX_KERNEL) && convnext.kernel.is_multiple_of(2) {
        let (below, above) = (convnext.kernel - 1, convnext.kernel + 1);
        let message = format!("`{key}` is {}, but must be odd", convnext.kernel);
        found.push(Problem::at(key, message).hint(format!("use {below} or {above}; 7 is usual")));
    }
    found.not_negative("backbone.convnext.layer_scale", convnext.layer_scale);
    found.momentum("backbone.convnext.drop_path", convnext.drop_path);
    if found.size("backbone.convnext.patch", convnext.patch, MAX_WIDTH) {
        let least = ConvNextArch::from_config(convnext).min_image();
        for (index, view) in views.iter().enumerate().filter(|(_, view)| (view.size as usize) < least) {
            let key = format!("views.{index}.size");
            let message =
                format!("`{key}` is {}, but the stages of `backbone.convnext` shrink images {least} times", view.size);
            found.push(
                Problem::at(key, message)
                    .against("backbone.convnext.patch")
                    .hint(format!("use at least {least}, or a smaller `backbone.convnext.patch`; 1 suits 32 pixels")),
            );
        }
    }
}
