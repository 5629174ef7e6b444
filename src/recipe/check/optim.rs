//! Optimizer, schedule and rules for some of the parameters.

use crate::optim::{LrDecay, OptimizerConfig, ParameterRule, ScheduleConfig};
use crate::problem::Numbers;
use crate::recipe::Problem;

pub(super) fn optimizer(optimizer: &OptimizerConfig, found: &mut Numbers) {
    let at = format!("optimizer.{}", optimizer.name());
    match optimizer {
        OptimizerConfig::Sgd(sgd) => momentum(&at, sgd.momentum, sgd.dampening, sgd.nesterov, found),
        OptimizerConfig::Lars(lars) => {
            momentum(&at, lars.momentum, lars.dampening, lars.nesterov, found);
            found.positive(&format!("{at}.trust"), lars.trust);
            found.not_negative(&format!("{at}.eps"), lars.eps);
        }
        OptimizerConfig::Adamw(adamw) => moments(&at, adamw.betas, adamw.eps, found),
        OptimizerConfig::Adam(adam) => moments(&at, adam.betas, adam.eps, found),
        OptimizerConfig::Lamb(lamb) => {
            moments(&at, lamb.betas, lamb.eps, found);
            found.not_negative(&format!("{at}.max_grad_norm"), lamb.max_grad_norm);
        }
        OptimizerConfig::Lion(lion) => betas(&at, lion.betas, found),
    }
    found.not_negative(&format!("{at}.weight_decay"), optimizer.weight_decay());
}

fn momentum(at: &str, momentum: f64, dampening: f64, nesterov: bool, found: &mut Numbers) {
    found.momentum(&format!("{at}.momentum"), momentum);
    found.momentum(&format!("{at}.dampening"), dampening);
    let key = format!("{at}.nesterov");
    if nesterov && momentum == 0.0 {
        found.push(
            Problem::at(&key, format!("`{key}` needs a momentum, but it is 0"))
                .hint("set `momentum = 0.9`, or remove `nesterov`"),
        );
    } else if nesterov && dampening != 0.0 {
        found.push(
            Problem::at(&key, format!("`{key}` needs all of each gradient, but `dampening` is {dampening}"))
                .hint("remove `dampening` or `nesterov`"),
        );
    }
}

fn moments(at: &str, both: [f64; 2], eps: f64, found: &mut Numbers) {
    betas(at, both, found);
    found.positive(&format!("{at}.eps"), eps);
}

fn betas(at: &str, betas: [f64; 2], found: &mut Numbers) {
    for (index, &beta) in betas.iter().enumerate() {
        found.momentum(&format!("{at}.betas.{index}"), beta);
    }
}

pub(super) fn schedule(schedule: &ScheduleConfig, optimizer: &OptimizerConfig, found: &mut Numbers) {
    match (schedule.epochs, schedule.steps) {
        (Some(epochs), None) => {
            if found.positive("schedule.epochs", epochs) && schedule.warmup_epochs > epochs {
                let warmup = schedule.warmup_epochs;
                found.push(
                    Problem::at(
                        "schedule.warmup_epochs",
                        format!("`schedule.warmup_epochs` is {warmup}, longer than the {epochs} epochs of the run"),
                    )
                    .against("schedule.epochs")
                    .hint("a tenth of the run is usual; 0 for none"),
                );
            }
        }
        (None, Some(steps)) => {
            found.count("schedule.steps", steps as usize);
        }
        (None, None) => found.push(
            Problem::at("schedule", "`schedule` gives no duration").hint("set `epochs` or `steps` under `[schedule]`"),
        ),
        (Some(_), Some(_)) => found.push(
            Problem::at("schedule.steps", "`schedule` gives both `epochs` and `steps`").hint("remove one of them"),
        ),
    }
    found.not_negative("schedule.warmup_epochs", schedule.warmup_epochs);
    let lr = found.positive("schedule.lr", schedule.lr);
    for (key, value) in [("schedule.min_lr", schedule.min_lr), ("schedule.warmup_lr", schedule.warmup_lr)] {
        if found.not_negative(key, value) && lr && value > schedule.lr {
            found.limit(key, value, &format!("at most `schedule.lr`, {}", schedule.lr));
        }
    }
    way_down(schedule, found);
    if let Some(end) = schedule.weight_decay_end
        && found.not_negative("schedule.weight_decay_end", end)
        && matches!(optimizer, OptimizerConfig::Lamb(lamb) if lamb.weight_decay == 0.0 && !lamb.always_adapt)
    {
        let message = format!(
            "`schedule.weight_decay_end` is {end}, but `optimizer.lamb.weight_decay` is 0, with which LAMB adapts nothing"
        );
        found.push(
            Problem::at("schedule.weight_decay_end", message)
                .against("optimizer.lamb.weight_decay")
                .hint("start at a weight decay above 0, or set `always_adapt = true`"),
        );
    }
    for (key, norm) in
        [("schedule.clip_norm", schedule.clip_norm), ("schedule.clip_each_norm", schedule.clip_each_norm)]
    {
        norm.map(|norm| found.positive(key, norm));
    }
    if let (Some(_), Some(each)) = (schedule.clip_norm, schedule.clip_each_norm) {
        let message = format!("`schedule.clip_each_norm` is {each}, but `schedule.clip_norm` clips too");
        found.push(
            Problem::at("schedule.clip_each_norm", message)
                .against("schedule.clip_norm")
                .hint("keep one: the whole gradient, or each parameter's (DINO)"),
        );
    }
}

fn way_down(schedule: &ScheduleConfig, found: &mut Numbers) {
    let multistep = schedule.decay == LrDecay::Multistep;
    let milestones = &schedule.milestones;
    if multistep && milestones.is_empty() {
        found.push(
            Problem::at("schedule.decay", "`schedule.decay` is \"multistep\", but `schedule.milestones` is empty")
                .against("schedule.milestones")
                .hint("write `milestones = [60, 80]`, in epochs"),
        );
    } else if !multistep && !milestones.is_empty() {
        found.push(
            Problem::at(
                "schedule.milestones",
                "`schedule.milestones` has no effect, as `schedule.decay` is not \"multistep\"",
            )
            .against("schedule.decay")
            .hint("set `decay = \"multistep\"`, or remove `milestones`"),
        );
    }
    for (index, &milestone) in milestones.iter().enumerate() {
        found.positive(&format!("schedule.milestones.{index}"), milestone);
    }
    if milestones.windows(2).any(|pair| pair[0] >= pair[1]) {
        found.limit("schedule.milestones", format!("{milestones:?}"), "a list of rising epochs");
    }
    found.positive("schedule.gamma", schedule.gamma);
    if schedule.min_lr != 0.0 && matches!(schedule.decay, LrDecay::Multistep | LrDecay::Constant) {
        let message = format!("`schedule.min_lr` is {}, but `schedule.decay` doesn't go there", schedule.min_lr);
        found.push(
            Problem::at("schedule.min_lr", message)
                .against("schedule.decay")
                .hint("use `decay = \"cosine\"` or \"linear\", or remove `min_lr`"),
        );
    }
}

pub(super) fn parameters(rules: &[ParameterRule], found: &mut Numbers) {
    for (index, rule) in rules.iter().enumerate() {
        let key = |name: &str| format!("parameters.{index}.{name}");
        let plain = ParameterRule { max_rank: rule.max_rank, ..ParameterRule::matching(&rule.pattern) };
        if *rule == plain {
            let at = format!("parameters.{index}");
            found.push(
                Problem::at(&at, format!("`{at}` changes nothing for \"{}\"", rule.pattern))
                    .hint("set `weight_decay`, `lr_scale`, `layer_decay`, `frozen` or another of its keys"),
            );
        }
        for (name, value) in
            [("weight_decay", rule.weight_decay), ("decay_scale", rule.decay_scale), ("lr_scale", rule.lr_scale)]
        {
            value.map(|value| found.not_negative(&key(name), value));
        }
        if let Some(decay) = rule.layer_decay.filter(|decay| !(*decay > 0.0 && *decay <= 1.0)) {
            found.limit(&key("layer_decay"), decay, "greater than 0 and at most 1");
        }
        rule.freeze_epochs.map(|epochs| found.not_negative(&key("freeze_epochs"), epochs));
        let conflicts = [
            ("weight_decay", rule.weight_decay.is_some(), "decay_scale", rule.decay_scale.is_some()),
            ("freeze_epochs", rule.freeze_epochs.is_some(), "freeze_steps", rule.freeze_steps.is_some()),
            ("frozen", rule.frozen.is_some(), "freeze_epochs", rule.freeze_epochs.is_some()),
            ("frozen", rule.frozen.is_some(), "freeze_steps", rule.freeze_steps.is_some()),
        ];
        for (one, has_one, other, has_other) in conflicts {
            if has_one && has_other {
                let message = format!("`parameters.{index}` gives both `{one}` and `{other}`");
                found.push(Problem::at(key(other), message).hint("remove one of them"));
            }
        }
    }
}
