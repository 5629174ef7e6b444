//! Backbone, method and views, and what must fit together between them.

use super::number::Numbers;
use crate::augment::ViewConfig;
use crate::mask::num_kept;
use crate::method::{MethodConfig, mae, simclr};
use crate::model::{
    BackboneConfig, ConvNextArch, ConvNextConfig, Pool, PositionEmbedding, ResNetArch, ResNetConfig, VitArch, VitConfig,
};
use crate::recipe::{Problem, Recipe};

/// No network in use is wider or deeper by a factor of ten.
const MAX_WIDTH: usize = 65_536;
const MAX_DEPTH: usize = 1_000;
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
    match &recipe.method {
        MethodConfig::Simclr(config) => check_simclr(config, recipe, found),
        MethodConfig::Mae(config) => check_mae(config, recipe, found),
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
        other @ (BackboneConfig::Resnet(_) | BackboneConfig::Convnext(_)) => {
            let name = other.name();
            let message = format!("`method.mae` drops patches and needs `backbone.vit`, but the backbone is `{name}`");
            found.push(
                Problem::at("method.mae", message)
                    .against("backbone")
                    .hint(format!("write `[backbone.vit]`, or keep the {name} and write `[method.simclr]`")),
            );
        }
        BackboneConfig::Vit(vit) => {
            let unfit = [
                ("position", vit.position == PositionEmbedding::Rope, "positions of all patches", "use \"sincos\""),
                ("fc_norm", vit.fc_norm, "tokens that went through the final norm", "remove it"),
            ];
            for (name, _, needs, hint) in unfit.into_iter().filter(|(_, is_set, ..)| *is_set) {
                let key = format!("backbone.vit.{name}");
                let message = format!("`{key}` does not go with `method.mae`, whose decoder needs {needs}");
                found.push(Problem::at(key, message).against("method.mae").hint(hint));
            }
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::model::BackboneConfig;
    use crate::recipe::parse;

    fn recipe(backbone: &str, method: &str) -> String {
        let count = if method == "simclr" { 2 } else { 1 };
        format!(
            "[data]\nsource = \"sample\"\n[[views]]\ncount = {count}\nsize = 64\n[backbone.{backbone}]\n[method.{method}]\n\
             [batch]\nglobal = 64\nmicro = 32\n[optimizer.adamw]\n[schedule]\nsteps = 10\nlr = 0.1\n"
        )
    }

    fn report(text: &str, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        parse(Path::new("a.toml"), text, &overrides).expect_err("the recipe is wrong").render(false)
    }

    #[test]
    fn a_convnext_is_read_and_its_limits_are_checked() {
        let text = recipe("convnext]\nsize = \"small\"\ndepths = [1, 2, 3, 1]\n[log", "simclr");
        let loaded = parse(Path::new("a.toml"), &text, &[]).unwrap();
        let BackboneConfig::Convnext(config) = &loaded.recipe.backbone else { panic!("another backbone") };
        assert_eq!(config.sizes(), ([1, 2, 3, 1], [96, 192, 384, 768]));
        let cases = [
            ("backbone.convnext.depths=[3, 3, 0, 3]", "`backbone.convnext.depths.2` is 0, but must be at least 1"),
            (
                "backbone.convnext.dims=[99999, 1, 1, 1]",
                "`backbone.convnext.dims.0` is 99999, but must be at most 65536",
            ),
            ("backbone.convnext.dims=[1, 2]", "`backbone.convnext.dims`"),
            ("backbone.convnext.kernel=8", "is 8, but must be odd\nhint: use 7 or 9; 7 is usual"),
            ("backbone.convnext.drop_path=1", "less than 1"),
            ("backbone.convnext.layer_scale=-1", "at least 0"),
            ("views.0.size=31", "`views.0.size` is 31, but the stages of `backbone.convnext` shrink images 32 times"),
            (
                "backbone.convnext.patch=9",
                "`views.0.size` is 64, but the stages of `backbone.convnext` shrink images 72 times",
            ),
        ];
        for (change, expected) in cases {
            let message = report(&text, &[change]);
            assert!(message.contains(expected), "{change}: {message}");
        }
    }

    #[test]
    fn mae_needs_a_transformer_with_positions_it_can_use() {
        let message = report(&recipe("convnext", "mae"), &[]);
        assert!(message.contains("but the backbone is `convnext`"), "{message}");
        assert!(message.contains("or keep the convnext and write `[method.simclr]`"), "{message}");
        let vit = recipe("vit]\npatch = 8\n[log", "mae");
        for (change, expected) in [
            ("backbone.vit.position=rope", "`backbone.vit.position` does not go with `method.mae`"),
            ("backbone.vit.fc_norm=true", "`backbone.vit.fc_norm` does not go with `method.mae`"),
        ] {
            let message = report(&vit, &[change]);
            assert!(message.contains(expected), "{change}: {message}");
        }
    }

    #[test]
    fn rotary_positions_turn_pairs_in_two_directions() {
        let vit = recipe("vit]\npatch = 8\nposition = \"rope\"\n[log", "simclr");
        assert!(parse(Path::new("a.toml"), &vit, &[]).is_ok());
        for (changes, expected) in [
            (&["backbone.vit.dim=60", "backbone.vit.heads=6"][..], "is 60, which makes 6 heads of 10"),
            (&["backbone.vit.rope_base=0"], "`backbone.vit.rope_base` is 0, but must be greater than 0"),
            (&["backbone.vit.norm_eps=0"], "`backbone.vit.norm_eps` is 0, but must be greater than 0"),
        ] {
            let message = report(&vit, changes);
            assert!(message.contains(expected), "{changes:?}: {message}");
        }
    }
}
