use super::super::groups::{Decay, Group};
use super::super::params::ParamSpec;
use super::*;

fn config(table: &str) -> OptimizerConfig {
    toml::from_str(table).unwrap()
}

fn sgd(momentum: f64, nesterov: bool, weight_decay: f64) -> OptimizerConfig {
    config(&format!("sgd = {{ momentum = {momentum}, nesterov = {nesterov}, weight_decay = {weight_decay} }}"))
}

fn adamw() -> OptimizerConfig {
    config("adamw = { betas = [0.9, 0.95], weight_decay = 0.1 }")
}

fn lars() -> OptimizerConfig {
    config("lars = { weight_decay = 0.01 }")
}

/// One of each kind, and each switch that changes elements.
fn all() -> Vec<OptimizerConfig> {
    let more = [
        "sgd = { dampening = 0.5, weight_decay = 0.1 }",
        "lars = { form = \"separate\", eps = 1e-8, trust = 0.02, clip_lr = true, nesterov = true }",
        "adam = { weight_decay = 0.1 }",
        "lamb = { max_grad_norm = 0.5 }",
        "lamb = { decoupled = true, grad_averaging = false, bias_correction = false, always_adapt = true, trust_clip = true }",
        "lion = { weight_decay = 0.1 }",
    ];
    let more = more.into_iter().map(config);
    [sgd(0.0, false, 0.1), sgd(0.9, true, 0.1), adamw(), lars()].into_iter().chain(more).collect()
}

fn groups(config: &OptimizerConfig) -> Groups {
    Groups::new(config, &specs(), &[], 10)
}

fn rates(config: &OptimizerConfig, lr: f64) -> Rates {
    Rates { lr, fixed_lr: 0.25, weight_decay: config.weight_decay() }
}

/// A matrix of 6 and a bias of 3.
fn specs() -> Vec<ParamSpec> {
    ParamSpec::layout([("w".to_owned(), vec![2, 3]), ("b".to_owned(), vec![3])])
}

fn values(seed: f32) -> Vec<f32> {
    (0..9).map(|i| (i as f32 * 1.7 + seed).sin()).collect()
}

/// Cuts a flat vector between the two parameters.
fn split(flat: &[f32]) -> Vec<Vec<f32>> {
    vec![flat[..6].to_vec(), flat[6..].to_vec()]
}

fn run(config: &OptimizerConfig, steps: usize) -> (Optimizer, Vec<f32>) {
    let (mut optimizer, mut weights) = (Optimizer::new(config, groups(config)), values(0.0));
    for step in 0..steps {
        optimizer.step(&mut weights, &split(&values(1.0 + step as f32)), &rates(config, 0.1));
    }
    (optimizer, weights)
}

fn close(got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.iter().zip(expected) {
        assert!((f64::from(*g) - e).abs() < 1e-6, "{got:?} {expected:?}");
    }
}

/// Runs `rule(p, g, memory, i)` in `f64`, each element with two numbers of memory.
fn definition(steps: usize, mut rule: impl FnMut(f64, f64, &mut [f64; 2], usize, usize) -> f64) -> Vec<f64> {
    let mut weights: Vec<f64> = values(0.0).into_iter().map(f64::from).collect();
    let mut memory = [[0.0; 2]; 9];
    for step in 0..steps {
        for (i, g) in values(1.0 + step as f32).into_iter().enumerate() {
            weights[i] = rule(weights[i], f64::from(g), &mut memory[i], i, step);
        }
    }
    weights
}

#[test]
fn sgd_follows_the_definition() {
    for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
        let expected = definition(4, |p, g, memory, i, step| {
            let d = g + if i < 6 { 0.01 * p } else { 0.0 };
            memory[0] = if step == 0 { d } else { momentum * memory[0] + d };
            p - 0.1 * if nesterov { d + momentum * memory[0] } else { memory[0] }
        });
        close(&run(&sgd(momentum, nesterov, 0.01), 4).1, &expected);
    }
}

#[test]
fn adamw_follows_the_definition() {
    let expected = definition(5, |p, g, memory, i, step| {
        let p = if i < 6 { p * (1.0 - 0.1 * 0.1) } else { p };
        *memory = [0.9 * memory[0] + 0.1 * g, 0.95 * memory[1] + 0.05 * g * g];
        let t = step as f64 + 1.0;
        let (mean, square) = (memory[0] / (1.0 - 0.9f64.powf(t)), memory[1] / (1.0 - 0.95f64.powf(t)));
        p - 0.1 * mean / (square.sqrt() + 1e-8)
    });
    close(&run(&adamw(), 5).1, &expected);
}

#[test]
fn lars_moves_a_matrix_by_the_trust_ratio_and_a_bias_by_its_gradient() {
    let (start, gradient) = (values(0.0), values(1.0));
    let (_, moved) = run(&lars(), 1);
    let decayed: Vec<f64> = (0..6).map(|i| f64::from(gradient[i]) + 0.01 * f64::from(start[i])).collect();
    let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    let weights: Vec<f64> = start.iter().map(|&v| f64::from(v)).collect();
    let ratio = 0.001 * norm(&weights[..6]) / norm(&decayed);
    let step = |i: usize| if i < 6 { ratio * decayed[i] } else { f64::from(gradient[i]) };
    close(&moved, &(0..9).map(|i| weights[i] - 0.1 * step(i)).collect::<Vec<_>>());
}

#[test]
fn lars_leaves_the_zero_matrix_unscaled_and_stays_finite() {
    let mut optimizer = Optimizer::new(&lars(), groups(&lars()));
    let mut weights = vec![0.0; 9];
    optimizer.step(&mut weights, &split(&[0.0; 9]), &rates(&lars(), 1.0));
    assert_eq!(weights, [0.0; 9]);
    optimizer.step(&mut weights, &split(&[1.0; 9]), &rates(&lars(), 1.0));
    assert_eq!(weights, [-1.0; 9]);
}

#[test]
fn separate_lars_divides_by_the_sum_of_the_norms() {
    let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    let [start, gradient] = [0.0, 1.0].map(|seed| values(seed).into_iter().map(f64::from).collect::<Vec<_>>());
    for (clip, lr) in [(false, 0.1), (true, 0.1), (true, 1e-4)] {
        let table =
            format!("lars = {{ form = \"separate\", eps = 0.5, trust = 0.02, clip_lr = {clip}, weight_decay = 0.1 }}");
        let lars = config(&table);
        let mut moved = values(0.0);
        Optimizer::new(&lars, groups(&lars)).step(&mut moved, &split(&values(1.0)), &rates(&lars, lr));
        let (weights, gradients) = (norm(&start[..6]), norm(&gradient[..6]));
        let ratio = 0.02 * weights / (gradients + 0.1 * weights + 0.5);
        let ratio = if clip { (ratio / lr).min(1.0) } else { ratio };
        let step = |i: usize| if i < 6 { ratio * (gradient[i] + 0.1 * start[i]) } else { gradient[i] };
        close(&moved, &(0..9).map(|i| start[i] - lr * step(i)).collect::<Vec<_>>());
    }
}

#[test]
fn adam_adds_the_decay_to_the_gradient() {
    let expected = definition(5, |p, g, memory, i, step| {
        let g = g + if i < 6 { 0.1 * p } else { 0.0 };
        *memory = [0.9 * memory[0] + 0.1 * g, 0.999 * memory[1] + 0.001 * g * g];
        let t = step as f64 + 1.0;
        let (mean, square) = (memory[0] / (1.0 - 0.9f64.powf(t)), memory[1] / (1.0 - 0.999f64.powf(t)));
        p - 0.1 * mean / (square.sqrt() + 1e-8)
    });
    close(&run(&config("adam = { weight_decay = 0.1 }"), 5).1, &expected);
}

#[test]
fn dampening_spares_the_first_gradient() {
    let expected = definition(4, |p, g, memory, _, step| {
        memory[0] = if step == 0 { g } else { 0.9 * memory[0] + 0.7 * g };
        p - 0.1 * memory[0]
    });
    close(&run(&config("sgd = { dampening = 0.3 }"), 4).1, &expected);
}

#[test]
fn lamb_follows_the_definition() {
    let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    for (decoupled, averaging, clip) in [(false, true, false), (true, false, true)] {
        let table = format!(
            "lamb = {{ weight_decay = 0.1, max_grad_norm = 0.5, eps = 1e-6, decoupled = {decoupled}, grad_averaging = {averaging}, trust_clip = {clip} }}"
        );
        let mut p: Vec<f64> = values(0.0).into_iter().map(f64::from).collect();
        let (mut mean, mut square) = ([0.0; 9], [0.0; 9]);
        for step in 0..3 {
            let g: Vec<f64> = values(1.0 + step as f32).into_iter().map(f64::from).collect();
            let shrink = (norm(&g) / 0.5).max(1.0);
            let t = f64::from(step) + 1.0;
            let mut update = [0.0; 9];
            for i in 0..9 {
                let g = g[i] / shrink;
                mean[i] = 0.9 * mean[i] + if averaging { 0.1 * g } else { g };
                square[i] = 0.999 * square[i] + 0.001 * g * g;
                let root = (square[i] / (1.0 - 0.999f64.powf(t))).sqrt();
                update[i] = mean[i] / (1.0 - 0.9f64.powf(t)) / (root + 1e-6);
                match (i < 6, decoupled) {
                    (true, true) => p[i] *= 1.0 - 0.1 * 0.1,
                    (true, false) => update[i] += 0.1 * p[i],
                    _ => {}
                }
            }
            let ratio = norm(&p[..6]) / norm(&update[..6]);
            let ratio = if clip { ratio.min(1.0) } else { ratio };
            for i in 0..9 {
                p[i] -= 0.1 * update[i] * if i < 6 { ratio } else { 1.0 };
            }
        }
        close(&run(&config(&table), 3).1, &p);
    }
}

#[test]
fn lion_steps_by_the_sign() {
    let expected = definition(4, |p, g, memory, i, _| {
        let direction = 0.9 * memory[0] + 0.1 * g;
        memory[0] = 0.99 * memory[0] + 0.01 * g;
        p * if i < 6 { 1.0 - 0.1 * 0.1 } else { 1.0 } - 0.1 * direction.signum()
    });
    let lion = config("lion = { weight_decay = 0.1 }");
    close(&run(&lion, 4).1, &expected);
    let mut still = values(0.0);
    let free = Rates { weight_decay: 0.0, ..rates(&lion, 0.1) };
    Optimizer::new(&lion, groups(&lion)).step(&mut still, &split(&[0.0; 9]), &free);
    assert_eq!(still, values(0.0));
}

#[test]
fn a_scale_multiplies_the_learning_rate_and_a_fixed_one_ignores_it() {
    let group = |lr_scale, fixed_lr| Group { decay: Decay::Scaled(0.0), lr_scale, fixed_lr, ..Group::default() };
    let groups =
        Groups::from_rule(&specs(), |spec| if spec.path == "w" { group(0.0, false) } else { group(0.5, false) });
    let fixed = Groups::from_rule(&specs(), |_| group(0.4, true));
    let whole = Groups::from_rule(&specs(), |_| group(1.0, false));
    for config in all() {
        let moved = |groups: &Groups, lr| {
            let mut weights = values(0.0);
            Optimizer::new(&config, groups.clone()).step(&mut weights, &split(&values(1.0)), &rates(&config, lr));
            weights
        };
        assert_eq!(moved(&groups, 0.1)[..6], values(0.0)[..6]);
        assert_eq!(moved(&groups, 0.1)[6..], moved(&whole, 0.05)[6..]);
        assert_eq!(moved(&fixed, 0.7), moved(&whole, 0.1)); // 0.4 of 0.25
    }
}

#[test]
fn the_weight_decay_of_a_step_is_the_schedules_where_a_group_has_none_of_its_own() {
    let own = |decay| Group { decay, ..Group::default() };
    let moved = |decay, weight_decay| {
        let groups = Groups::from_rule(&specs(), |_| own(decay));
        let mut weights = values(0.0);
        Optimizer::new(&adamw(), groups).step(
            &mut weights,
            &split(&values(1.0)),
            &Rates { lr: 0.1, fixed_lr: 0.1, weight_decay },
        );
        weights
    };
    assert_eq!(moved(Decay::Scaled(0.5), 0.4), moved(Decay::Fixed(0.2), 9.0));
    assert_ne!(moved(Decay::Scaled(1.0), 0.4), moved(Decay::Scaled(1.0), 0.2));
}

#[test]
fn a_frozen_parameter_starts_later_as_if_it_were_new() {
    let late = |spec: &ParamSpec| Group { frozen_steps: if spec.path == "w" { 2 } else { 0 }, ..Group::default() };
    for config in all() {
        let rates = rates(&config, 0.1);
        let mut optimizer = Optimizer::new(&config, Groups::from_rule(&specs(), late));
        let mut weights = values(0.0);
        for seed in [1.0, 2.0] {
            let mut gradients = split(&values(seed));
            optimizer.groups().cancel_frozen(optimizer.steps(), &mut gradients);
            optimizer.step(&mut weights, &gradients, &rates);
            assert_eq!(weights[..6], values(0.0)[..6]);
            assert!(optimizer.state().iter().all(|(_, values)| values[..6] == [0.0; 6]));
        }
        optimizer.step(&mut weights, &split(&values(3.0)), &rates);
        let mut fresh = values(0.0);
        let whole = Groups::from_rule(&specs(), |_| Group::default());
        Optimizer::new(&config, whole).step(&mut fresh, &split(&values(3.0)), &rates);
        assert_eq!(weights[..6], fresh[..6], "{}", config.name());
        assert_ne!(weights[6..], fresh[6..]);
    }
}

#[test]
fn threads_do_not_change_the_result() {
    for config in all() {
        let (expected, expected_weights) = run(&config, 3);
        for threads in [2, 3, 8] {
            let mut optimizer = Optimizer::new(&config, groups(&config)).on_threads(threads);
            let mut weights = values(0.0);
            for step in 0..3 {
                optimizer.step(&mut weights, &split(&values(1.0 + step as f32)), &rates(&config, 0.1));
            }
            assert_eq!((&weights, optimizer.state()), (&expected_weights, expected.state()), "{threads} threads");
        }
    }
}

#[test]
fn a_reloaded_state_continues_to_the_bit() {
    for config in all() {
        let (mut optimizer, mut weights) = run(&config, 3);
        let mut other = Optimizer::new(&config, groups(&config));
        other.load_state(optimizer.steps(), optimizer.state()).unwrap();
        let mut copied = weights.clone();
        optimizer.step(&mut weights, &split(&values(9.0)), &rates(&config, 0.1));
        other.step(&mut copied, &split(&values(9.0)), &rates(&config, 0.1));
        assert_eq!(weights, copied);
        assert_eq!(optimizer.state(), other.state());
        assert!(weights.iter().all(|weight| weight.is_finite()));
    }
}

#[test]
fn states_of_others_are_refused() {
    let mut optimizer = Optimizer::new(&adamw(), groups(&adamw()));
    let zeros = [0.0f32; 9];
    let full: &[f32] = &zeros;
    assert_eq!(optimizer.load_state(1, [("exp_avg", full)]), Err(StateError::Missing("exp_avg_sq")));
    assert_eq!(optimizer.load_state(1, [("mu", full)]), Err(StateError::Unexpected("mu".to_owned())));
    let short = optimizer.load_state(1, [("exp_avg", &zeros[..2]), ("exp_avg_sq", full)]);
    assert_eq!(short, Err(StateError::Length { name: "exp_avg".to_owned(), found: 2, expected: 9 }));
    assert_eq!(optimizer.steps(), 0);
}
