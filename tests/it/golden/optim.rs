//! Golden cases of kind `optim`.

use autodidact::optim::published::{self, Dino, IjepaLr, Lightly};
use autodidact::optim::{
    AdamConfig, AdamWConfig, Decay, Group, Groups, LambConfig, LarsConfig, LarsForm, Optimizer, OptimizerConfig,
    ParamSpec, Rates, Schedule, SgdConfig, clip_each_norm, clip_global_norm, ema, norm,
};
use autodidact::precision::LossScaler;

use super::{Array, Case, Checks, Outcome, parameters};

pub(super) fn run(case: &Case) -> Outcome {
    let name = case.name.as_str();
    let starts = |prefix: &str| name.starts_with(prefix);
    if starts("sched_") {
        schedule(case)
    } else if ["sgd", "adam", "lars", "lamb"].into_iter().any(starts) {
        optimizer(case)
    } else if starts("clipping") {
        clipping(case)
    } else if starts("ema_update") {
        moving_average(case)
    } else if starts("grad_scaler") {
        grad_scaler(case)
    } else if starts("layer_decay") {
        parameters::layer_decay(case)
    } else if starts("weight_decay_tables") {
        parameters::weight_decay_tables(case)
    } else {
        Outcome::NotYet("not part of the product yet".to_owned())
    }
}

/// The optimizer that a case's name and arguments describe; what isn't given is as in the source. None where we have no such switch.
fn config(case: &Case) -> Result<OptimizerConfig, String> {
    let known = [
        "lr",
        "lr_per_step",
        "weight_decay",
        "momentum",
        "dampening",
        "nesterov",
        "betas",
        "eps",
        "eta",
        "trust_coefficient",
        "clip_lr",
        "excluded",
        "no_decay",
        "exclude_bias_n_norm",
        "max_grad_norm",
        "bias_correction",
        "grad_averaging",
        "decoupled",
        "decoupled_decay",
        "always_adapt",
        "trust_clip",
        "order",
    ];
    let off = ["amsgrad", "maximize", "caution", "corrected_weight_decay"];
    let args = case.args().as_object().expect("args are a table");
    let is_known =
        |key: &str, value: &serde_json::Value| known.contains(&key) || (off.contains(&key) && value == false);
    if let Some((other, _)) = args.iter().find(|(key, value)| !is_known(key, value)) {
        return Err(format!("argument `{other}` isn't known"));
    }
    let number = |name: &str, default: f64| args.get(name).and_then(serde_json::Value::as_f64).unwrap_or(default);
    let flag = |name: &str, default: bool| args.get(name).and_then(serde_json::Value::as_bool).unwrap_or(default);
    let beta = |i: usize, default| args.get("betas").map_or(default, |betas| betas[i].as_f64().expect("a number"));
    let betas = [beta(0, 0.9), beta(1, 0.999)]; // the defaults of torch and timm
    let (momentum, dampening, nesterov) = (number("momentum", 0.0), number("dampening", 0.0), flag("nesterov", false));
    let starts = |prefix: &str| case.name.starts_with(prefix);
    let decay_all = true; // what isn't decayed is said by the groups
    Ok(if starts("sgd") {
        let weight_decay = number("weight_decay", 0.0);
        OptimizerConfig::Sgd(SgdConfig { momentum, dampening, nesterov, weight_decay, decay_all })
    } else if starts("lars") {
        let separate = is_separate(case);
        OptimizerConfig::Lars(LarsConfig {
            momentum,
            dampening,
            nesterov,
            weight_decay: number("weight_decay", 0.0),
            trust: number("trust_coefficient", number("eta", 0.001)),
            form: if separate { LarsForm::Separate } else { LarsForm::Joint },
            eps: number("eps", if separate { 1e-8 } else { 0.0 }),
            clip_lr: flag("clip_lr", false),
            decay_all,
        })
    } else if starts("lamb") {
        OptimizerConfig::Lamb(LambConfig {
            betas,
            eps: number("eps", 1e-6),
            weight_decay: number("weight_decay", 0.01),
            decay_all,
            max_grad_norm: if args.get("max_grad_norm").is_some_and(serde_json::Value::is_null) {
                0.0
            } else {
                number("max_grad_norm", 1.0)
            },
            bias_correction: flag("bias_correction", true),
            grad_averaging: flag("grad_averaging", true),
            decoupled: flag("decoupled", flag("decoupled_decay", false)),
            always_adapt: flag("always_adapt", false),
            trust_clip: flag("trust_clip", false),
        })
    } else if starts("adamw") {
        OptimizerConfig::Adamw(AdamWConfig {
            betas,
            eps: number("eps", 1e-8),
            weight_decay: number("weight_decay", 0.01),
            decay_all,
        })
    } else {
        OptimizerConfig::Adam(AdamConfig {
            betas,
            eps: number("eps", 1e-8),
            weight_decay: number("weight_decay", 0.0),
            decay_all,
        })
    })
}

/// lightly's and solo-learn's LARS, and apex's LARC.
fn is_separate(case: &Case) -> bool {
    ["lightly", "solo", "larc", "swav"].into_iter().any(|source| case.name.contains(source))
}

/// How the parameters of a case are treated, in the terms of its source.
fn groups(case: &Case, config: &OptimizerConfig, specs: &[ParamSpec]) -> Result<Groups, String> {
    let args = case.args();
    let excluded = |spec: &ParamSpec| -> Result<bool, String> {
        for rule in ["excluded", "no_decay"] {
            return Ok(match &args[rule] {
                serde_json::Value::Null => continue,
                serde_json::Value::Array(names) => names.iter().any(|name| name == spec.path.as_str()),
                serde_json::Value::String(rule) if rule.starts_with("ndim <= 1") => spec.shape.len() <= 1,
                serde_json::Value::String(rule) if rule.starts_with("ndim == 1") => spec.shape.len() == 1,
                other => return Err(format!("unknown rule for what is excluded: {other}")),
            });
        }
        // solo-learn's default
        Ok(case.name.contains("solo") && args["exclude_bias_n_norm"] == true && spec.shape.len() == 1)
    };
    let exempt = specs.iter().map(excluded).collect::<Result<Vec<bool>, String>>()?;
    let is_exempt = |spec: &ParamSpec| exempt[specs.iter().position(|other| other == spec).expect("one of them")];
    let decays = config.weight_decay() != 0.0;
    let groups = Groups::from_rule(specs, |spec| Group {
        decay: Decay::Scaled(if is_exempt(spec) { 0.0 } else { 1.0 }),
        adapt: match config {
            // lightly adapts what it decays
            OptimizerConfig::Lars(_) => !is_exempt(spec) && (decays || !case.name.contains("lightly")),
            OptimizerConfig::Lamb(lamb) => lamb.always_adapt || (!is_exempt(spec) && decays),
            _ => false,
        },
        ..Group::default()
    });
    // where the exempt are those of rank <= 1, these are the groups of a recipe
    if specs.iter().zip(&exempt).all(|(spec, &exempt)| exempt == (spec.shape.len() <= 1)) && decays {
        let mut table = toml::Value::try_from(config).expect("configurations are tables");
        let inner = table.as_table_mut().and_then(|table| table.get_mut(config.name())?.as_table_mut());
        inner.expect("one table").insert("decay_all".to_owned(), false.into());
        let of_recipe: OptimizerConfig = table.try_into().expect("the same table");
        assert_eq!(groups, Groups::new(&of_recipe, specs, &[], 1));
    }
    Ok(groups)
}

/// Steps from `p0` with the gradients `g<k>`; compares every `p<k + 1>` and the final state.
fn optimizer(case: &Case) -> Outcome {
    let specs = specs(case, "p0/");
    let both = config(case).and_then(|config| Ok((groups(case, &config, &specs)?, config)));
    let (groups, config) = match both {
        Ok(both) => both,
        Err(why) => return Outcome::NotYet(why),
    };
    let args = case.args();
    let mut optimizer = Optimizer::new(&config, groups);
    let mut weights = flat(case, &specs, "p0/");
    let mut checks = Checks::default();
    let is_gradient = |key: &&String| key.starts_with('g') && key.ends_with(&format!("/{}", specs[0].path));
    let steps = case.tensors.keys().filter(is_gradient).count();
    let after = |step: usize| flat(case, &specs, &format!("p{step}/"));
    // Files seen so far hold the final parameters under every p1, p2, ..., against their manifests (the generator stored one
    // buffer many times: in `sgd_plain`, p0 - lr * sum of all gradients is "p1"). Then only the last is a reference.
    let repeated = steps > 1 && (1..steps).all(|step| after(step) == after(steps));
    if repeated {
        super::say(&format!(
            "golden optim: {}: p1 to p{} repeat p{steps}, which alone is compared",
            case.name,
            steps - 1
        ));
    }
    for step in 0..steps {
        let lr = match args.get("lr_per_step") {
            Some(list) => list[step].as_f64().expect("one learning rate a step"),
            None => case.arg_f64("lr"),
        };
        let rates = Rates { lr, fixed_lr: lr, weight_decay: config.weight_decay() };
        optimizer.step(&mut weights, &split(&specs, &flat(case, &specs, &format!("g{step}/"))), &rates);
        if !repeated || step + 1 == steps {
            compare(case, &mut checks, &specs, &format!("p{}/", step + 1), &weights);
        }
    }
    // LARC leaves the momentum to torch's SGD, plain descent has no state
    for (name, values) in optimizer.state() {
        compare(case, &mut checks, &specs, &format!("state/{name}/"), values);
    }
    Outcome::Compared(checks)
}

/// The scale before every step of a pattern of overflows.
fn grad_scaler(case: &Case) -> Outcome {
    let (scale, interval) = (case.arg_f64("init_scale") as f32, case.arg_usize("growth_interval") as u64);
    let mut scaler = LossScaler::new(scale, case.arg_f64("growth_factor"), case.arg_f64("backoff_factor"), interval);
    let pattern = case.args()["pattern"].as_str().expect("a pattern");
    let (mut scales, mut stepped, mut counters) = (Vec::new(), Vec::new(), Vec::new());
    for overflow in pattern.chars().map(|step| step == '1') {
        scales.push(f64::from(scaler.scale()));
        stepped.push(f64::from(u8::from(!overflow)));
        scaler.update(overflow);
        counters.push(scaler.good_steps() as f64);
    }
    let mut checks = Checks::default();
    let last = vec![f64::from(scaler.scale())];
    for (what, got) in [("scale", scales), ("stepped", stepped), ("growth_tracker", counters), ("final_scale", last)] {
        let expected = &case.tensor(what).values;
        elementwise(&mut checks, what, &got, expected, case.tolerance("rel"), case.tolerance("abs"));
    }
    Outcome::Compared(checks)
}

/// A vector for each parameter.
fn split(specs: &[ParamSpec], flat: &[f32]) -> Vec<Vec<f32>> {
    specs.iter().map(|spec| flat[spec.range()].to_vec()).collect()
}

fn clipping(case: &Case) -> Outcome {
    let mut checks = Checks::default();
    let specs = specs(case, "g/");
    let max_norm = case.arg_f64("max_norm");
    let gradients = split(&specs, &flat(case, &specs, "g/"));
    let (rel, abs) = (case.tolerance("rel"), case.tolerance("abs"));

    let mut global = gradients.clone();
    let total = clip_global_norm(&mut global, max_norm);
    let mut each = gradients.clone();
    clip_each_norm(&mut each, max_norm);
    let norms: Vec<f64> = gradients.iter().map(|gradient| norm(gradient)).collect();

    elementwise(&mut checks, "total_norm", &[total], &case.tensor("total_norm").values, rel, abs);
    elementwise(&mut checks, "per_param_norms", &norms, &case.tensor("per_param_norms").values, rel, abs);
    for (prefix, values) in [("global/", global), ("per_param/", each)] {
        for (spec, values) in specs.iter().zip(values) {
            let got: Vec<f64> = values.iter().map(|&v| f64::from(v)).collect();
            let what = format!("{prefix}{}", spec.path);
            elementwise(&mut checks, &what, &got, &case.tensor(&what).values, rel, abs);
        }
    }
    Outcome::Compared(checks)
}

fn moving_average(case: &Case) -> Outcome {
    let mut checks = Checks::default();
    let weights = case.tensor("online").f32();
    let mut average = case.tensor("target0").f32();
    for update in 1.. {
        let Some(expected) = case.tensors.get(&format!("target{update}")) else { break };
        ema::update(&mut average, &weights, case.arg_f64("m"));
        let got: Vec<f64> = average.iter().map(|&v| f64::from(v)).collect();
        elementwise(
            &mut checks,
            &format!("target{update}"),
            &got,
            &expected.values,
            case.tolerance("rel"),
            case.tolerance("abs"),
        );
    }
    Outcome::Compared(checks)
}

fn schedule(case: &Case) -> Outcome {
    let f = |name: &str| case.arg_f64(name);
    let f_or = |name: &str, default: f64| case.args()[name].as_f64().unwrap_or(default);
    let n = |name: &str| case.arg_usize(name) as u64;
    let n_or = |name: &str, default: u64| case.args()[name].as_u64().unwrap_or(default);
    let name = case.name.strip_prefix("sched_").expect("checked by the caller");
    // longest prefix first
    let value: Box<dyn Fn(u64) -> f64> = if name.starts_with("mae") || name.starts_with("mocov3_lr") {
        let (warmup_epochs, epochs) = (f("warmup_epochs"), f("epochs"));
        let schedule = Schedule {
            lr: f("lr"),
            min_lr: f_or("min_lr", 0.0),
            warmup_epochs,
            epochs,
            steps_per_epoch: n("iters_per_epoch"),
            ..Schedule::default()
        };
        Box::new(move |step| schedule.lr_at(step))
    } else if name.starts_with("mocov3_momentum") {
        let (total, base, per_epoch) = (f("epochs"), f("moco_m"), f("iters_per_epoch"));
        Box::new(move |step| published::byol_momentum(step as f64 / per_epoch, total, base))
    } else if name.starts_with("byol_lr") {
        let (warmup, total, peak) =
            (n("warmup_steps"), n("total_steps"), f("base_learning_rate") * f("batch_size") / 256.0);
        Box::new(move |step| published::byol_lr(step, warmup, total, peak))
    } else if name.starts_with("byol_ema") {
        let (total, base) = (f("max_steps"), f("base_ema"));
        Box::new(move |step| published::byol_momentum(step as f64, total, base))
    } else if name.starts_with("barlowtwins") {
        let rate = if name.contains("bias") { "learning_rate_biases" } else { "learning_rate_weights" };
        let (per_epoch, peak) = (n("iters_per_epoch"), f(rate) * f("batch_size") / 256.0);
        let (warmup, total) = (n_or("warmup_epochs", 10) * per_epoch, n("epochs") * per_epoch); // 10: fixed in the released code
        Box::new(move |step| published::barlow_lr(step, warmup, total, peak))
    } else if name.starts_with("dinov2") {
        let (frozen, warmup, total) = (n_or("freeze_iters", 0), n_or("warmup_iters", 0), n("total_iters"));
        let (warmup_start, base, end) = (f_or("start_warmup_value", 0.0), f("base_value"), f("final_value"));
        let dino = Dino { frozen, warmup, total, warmup_start, base, end };
        Box::new(move |step| dino.at(step))
    } else if name.starts_with("dino_") {
        let per_epoch = n("niter_per_ep");
        let (warmup, total) = (n_or("warmup_epochs", 0) * per_epoch, n("epochs") * per_epoch);
        let (warmup_start, base, end) = (f_or("start_warmup_value", 0.0), f("base_value"), f("final_value"));
        let dino = Dino { frozen: 0, warmup, total, warmup_start, base, end };
        Box::new(move |step| dino.at(step))
    } else if name.starts_with("ijepa_lr") {
        let (warmup, total) = (n("warmup_steps"), n("T_max"));
        let lr = IjepaLr { warmup, total, start: f("start_lr"), peak: f("ref_lr"), end: f_or("final_lr", 0.0) };
        Box::new(move |step| lr.at(step))
    } else if name.starts_with("ijepa_wd") {
        let (total, start, end) = (n("T_max"), f("ref_wd"), f_or("final_wd", 0.0));
        Box::new(move |step| published::ijepa_weight_decay(step, total, start, end))
    } else if name.starts_with("ijepa_ema") {
        let ends = [0, 1].map(|i| case.args()["ema"][i].as_f64().expect("two numbers"));
        let total = f("ipe") * f("num_epochs") * f_or("ipe_scale", 1.0);
        Box::new(move |step| published::ijepa_momentum(step, total, ends[0], ends[1]))
    } else if name.starts_with("lightly_cosine_schedule") {
        let (total, start, end, period) =
            (n("max_steps"), f("start_value"), f("end_value"), case.args()["period"].as_u64());
        Box::new(move |step| published::lightly_cosine(step, total, start, end, period))
    } else if name.starts_with("lightly_cosine_warmup") {
        let (warmup, total, period) = (n("warmup_epochs"), n("max_epochs"), case.args()["period"].as_u64());
        let (start, end) = (f_or("start_value", 1.0), f_or("end_value", 0.001)); // lightly's defaults
        let (warmup_start, warmup_end) = (f_or("warmup_start_value", 0.0), f_or("warmup_end_value", start));
        let lightly = Lightly { warmup, total, warmup_start, warmup_end, start, end, period };
        Box::new(move |step| lightly.at(step))
    } else {
        return Outcome::NotYet("schedule not built".to_owned());
    };

    let expected: Vec<f64> = match case.manifest["values_float64"].as_array() {
        Some(list) => list.iter().map(|v| v.as_f64().expect("a number")).collect(),
        None => case.tensor("values").values.clone(),
    };
    let got: Vec<f64> = (0..expected.len() as u64).map(value).collect();
    let mut checks = Checks::default();
    elementwise(&mut checks, "value", &got, &expected, case.tolerance("rel"), case.tolerance("abs"));
    Outcome::Compared(checks)
}

/// Each element within the relative or the absolute tolerance, whichever is larger.
pub(super) fn elementwise(checks: &mut Checks, what: &str, got: &[f64], expected: &[f64], rel: f64, abs: f64) {
    assert_eq!(got.len(), expected.len(), "{what}: number of values");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        checks.note(&format!("{what}[{i}]"), (g - e).abs(), (rel * e.abs()).max(abs));
    }
}

/// Each parameter within `rel_to_max` of its largest value, or within `abs` where that is larger.
fn compare(case: &Case, checks: &mut Checks, specs: &[ParamSpec], prefix: &str, got: &[f32]) {
    for spec in specs {
        let what = format!("{prefix}{}", spec.path);
        let expected: &Array = case.tensor(&what);
        let largest = expected.values.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        let tolerance = (case.tolerance("rel_to_max") * largest).max(case.tolerance("abs"));
        checks.absolute(&what, &got[spec.range()], expected, tolerance);
    }
}

/// The parameters of a case, in the order of `args.order` if it has one.
fn specs(case: &Case, prefix: &str) -> Vec<ParamSpec> {
    let names: Vec<&str> = match case.args()["order"].as_array() {
        Some(order) => order.iter().map(|name| name.as_str().expect("a name")).collect(),
        None => case.tensors.keys().filter_map(|name| name.strip_prefix(prefix)).collect(),
    };
    ParamSpec::layout(
        names.iter().map(|name| ((*name).to_owned(), case.tensor(&format!("{prefix}{name}")).shape.clone())),
    )
}

fn flat(case: &Case, specs: &[ParamSpec], prefix: &str) -> Vec<f32> {
    specs.iter().flat_map(|spec| case.tensor(&format!("{prefix}{}", spec.path)).f32()).collect()
}
