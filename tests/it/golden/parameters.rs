//! Golden cases of kind `optim` about parameter groups: layer-wise decay, and what is decayed at all.

use autodidact::optim::{AdamWConfig, Groups, LayerRule, OptimizerConfig, ParamSpec, ParameterRule, layer_scales};

use super::optim::elementwise;
use super::{Case, Checks, Outcome};

/// The parameters of a table, with a shape of the rank that each has in a vision transformer.
fn transformer(case: &Case) -> Vec<ParamSpec> {
    let names = case.manifest["names"].as_array().expect("a list of names").iter();
    let rank = |name: &str| match name.rsplit('.').next() {
        Some("bias" | "gamma") => 1,
        Some("weight") if name.contains("norm") => 1,
        Some("weight") if name.contains("patch_embed") => 4,
        Some("weight") => 2,
        _ => 3,
    };
    ParamSpec::layout(names.map(|name| {
        let name = name.as_str().expect("a name");
        (name.to_owned(), vec![1; rank(name)])
    }))
}

/// The rules of a recipe that spare what a list names, as timm's and MAE's `no_weight_decay_list`.
fn spare_listed(case: &Case) -> Vec<ParameterRule> {
    let list = case.args()["no_weight_decay_list"].as_array().expect("a list of names").iter();
    let names: Vec<&str> = list.map(|name| name.as_str().expect("a name")).collect();
    let rule = ParameterRule { decay_scale: Some(0.0), ..ParameterRule::matching(&names.join("|")) };
    if names.is_empty() { Vec::new() } else { vec![rule] }
}

pub(super) fn layer_decay(case: &Case) -> Outcome {
    let (specs, decay) = (transformer(case), case.arg_f64("layer_decay"));
    let timm = case.name.contains("timm");
    let rule = if timm { LayerRule::Timm } else { LayerRule::Mae };
    let paths: Vec<&str> = specs.iter().map(|spec| spec.path.as_str()).collect();
    let scales = layer_scales(&paths, decay, rule).expect("the network has blocks");
    let scales: Vec<f64> = scales.into_iter().map(|(_, scale)| scale).collect();

    let mut rules = spare_listed(case);
    rules.push(ParameterRule { layer_decay: Some(decay), ..ParameterRule::default() });
    let config = adamw(case.arg_f64("weight_decay"));
    let groups = Groups::new(&config, &specs, &rules, 1);
    if !timm && !paths.contains(&"reg_token") {
        // then the rule of a recipe is MAE's
        let of_recipe: Vec<f64> = groups.iter().map(|(_, group)| group.lr_scale).collect();
        assert_eq!(of_recipe, scales);
    }
    let mut checks = Checks::default();
    let (rel, abs) = (case.tolerance("rel"), case.tolerance("abs"));
    elementwise(&mut checks, "lr_scale", &scales, &case.tensor("lr_scale").values, rel, abs);
    elementwise(&mut checks, "weight_decay", &decays(&groups, &config), &case.tensor("weight_decay").values, rel, abs);
    Outcome::Compared(checks)
}

pub(super) fn weight_decay_tables(case: &Case) -> Outcome {
    let (specs, config) = (transformer(case), adamw(case.arg_f64("weight_decay")));
    let spare = |pattern: &str| ParameterRule { decay_scale: Some(0.0), ..ParameterRule::matching(pattern) };
    let tables = [
        ("timm_param_groups_weight_decay", spare_listed(case)),
        ("timm_param_groups_weight_decay_empty_list", Vec::new()),
        ("dino_get_params_groups", vec![spare("*.bias")]),
        ("dinov2_rule", vec![spare("*.bias|*norm*|*gamma*")]),
    ];
    let mut checks = Checks::default();
    for (what, rules) in tables {
        let got: Vec<f64> = decays(&Groups::new(&config, &specs, &rules, 1), &config);
        let got: Vec<f64> = got.into_iter().map(|decay| f64::from(decay as f32)).collect(); // they are stored as such
        elementwise(&mut checks, what, &got, &case.tensor(what).values, case.tolerance("rel"), case.tolerance("abs"));
    }
    Outcome::Compared(checks)
}

fn adamw(weight_decay: f64) -> OptimizerConfig {
    OptimizerConfig::Adamw(AdamWConfig { betas: [0.9, 0.999], eps: 1e-8, weight_decay, decay_all: false })
}

fn decays(groups: &Groups, config: &OptimizerConfig) -> Vec<f64> {
    groups.iter().map(|(_, group)| group.decay.at(config.weight_decay())).collect()
}
