//! Golden cases of kind `evaluation`.

use autodidact::augment::Mix;
use autodidact::eval::{
    Features, Knn, LogisticRegression, alignment, embedding_std, lidar, linear_cka, rankme, singular_values,
    top_k_accuracy, uniformity,
};
use autodidact::loss::classification::{cross_entropy, targets};
use autodidact::method::classify::mixed;
use burn::tensor::{Device, Tensor, TensorData};

use super::{Array, Case, Checks, Outcome};

pub(super) fn run(case: &Case) -> Outcome {
    let has = |name: &str| case.tensors.contains_key(name);
    let run = if has("train_features") && has("query_features") {
        knn
    } else if has("uniformity_x") {
        spread
    } else if has("lidar") {
        discriminant_rank
    } else if has("cka") {
        similarity
    } else if has("singular_values") {
        rank
    } else if has("top") && has("logits") {
        accuracy
    } else if case.name.starts_with("logreg") {
        logistic_regression
    } else if has("x_mixup") || has("x_cutmix") {
        mixing
    } else {
        return Outcome::NotYet("no measure of that name".to_owned());
    };
    let mut checks = Checks::default();
    run(case, &mut checks);
    Outcome::Compared(checks)
}

fn logistic_regression(case: &Case, checks: &mut Checks) {
    let (train, queries) = (features(case, "X"), features(case, "Xq"));
    let classes = case.tensor("b").shape[0];
    let settings = LogisticRegression { tolerance: 1e-9, ..LogisticRegression::with_c(case.arg_f64("C")) };
    let fitted = settings.fit(&train, &labels(case, "y"), classes, 2).expect("a fit");
    let scores = fitted.scores(&queries);
    let probabilities: Vec<f32> = scores
        .chunks(classes)
        .flat_map(|row| {
            let sum: f64 = row.iter().map(|s| s.exp()).sum();
            row.iter().map(move |s| (s.exp() / sum) as f32)
        })
        .collect();
    checks.absolute("proba", &probabilities, case.tensor("proba"), case.tolerance("proba_abs"));
    // softmax doesn't see a shift of a row
    let centered = |row: &[f64]| -> Vec<f32> {
        let mean = row.iter().sum::<f64>() / classes as f64;
        row.iter().map(|s| (s - mean) as f32).collect()
    };
    let got: Vec<f32> = scores.chunks(classes).flat_map(centered).collect();
    let expected = case.tensor("logits");
    let expected = Array {
        shape: expected.shape.clone(),
        values: expected
            .values
            .chunks(classes)
            .flat_map(|row| {
                let mean = row.iter().sum::<f64>() / classes as f64;
                row.iter().map(move |s| s - mean).collect::<Vec<_>>()
            })
            .collect(),
    };
    checks.absolute("logits", &got, &expected, case.tolerance("logits_abs"));
    for (row, &class) in scores.chunks(classes).zip(&labels(case, "pred")) {
        let most = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(class, _)| class);
        assert_eq!(most, Some(class as usize), "{}", case.name);
    }
}

fn features(case: &Case, name: &str) -> Features {
    let array = case.tensor(name);
    Features::new(array.f32(), array.shape[1]).unwrap_or_else(|e| panic!("{}: {name}: {e}", case.name))
}

fn labels(case: &Case, name: &str) -> Vec<u32> {
    case.tensor(name).values.iter().map(|&v| v as u32).collect()
}

/// Compares within `abs + rel * |expected|`.
fn close(case: &Case, checks: &mut Checks, what: &str, got: f64, expected: f64) {
    checks.note(what, (got - expected).abs(), case.tolerance("abs") + case.tolerance("rel") * expected.abs());
}

fn close_to(case: &Case, checks: &mut Checks, name: &str, got: f64) {
    close(case, checks, name, got, case.tensor(name).item());
}

fn knn(case: &Case, checks: &mut Checks) {
    let (bank, queries) = (features(case, "train_features"), features(case, "query_features"));
    let (bank_labels, query_labels) = (labels(case, "train_labels"), labels(case, "query_labels"));
    for name in case.tensors.keys().filter_map(|name| name.strip_suffix(".scores")) {
        // "k20_t0.07"
        let (k, temperature) = name.strip_prefix('k').and_then(|rest| rest.split_once("_t")).expect("k<K>_t<T>");
        let knn = Knn { k: k.parse().expect("k"), temperature: temperature.parse().expect("T") };
        let votes = knn.vote(&bank, &bank_labels, &queries);

        let expected = case.tensor(&format!("{name}.scores"));
        let classes = expected.shape[1];
        let score = |query: usize, class: usize| if class < votes.classes() { votes.score(query, class) } else { 0.0 };
        for (at, &value) in expected.values.iter().enumerate() {
            let got = score(at / classes, at % classes);
            checks.note(
                &format!("{name} score"),
                (got - value).abs() / value.abs().max(f64::MIN_POSITIVE),
                case.tolerance("scores_rel"),
            );
        }
        let best = case.tensor(&format!("{name}.pred_rank"));
        let margins = case.tensor(&format!("{name}.margin"));
        compare_ranking(checks, name, best, expected, margins, |query| votes.ranking(query));

        if let Some(top1) = case.manifest["accuracy"][name]["top1"].as_f64() {
            let unclear = margins.values.iter().filter(|&&margin| margin <= 1e-5).count() as f64;
            let allowed = 1e-9 + 100.0 * unclear / queries.rows() as f64;
            checks.note(&format!("{name} top-1"), (100.0 * votes.accuracy(&query_labels, 1) - top1).abs(), allowed);
        }
    }
}

/// The first class must be equal where the margin is clear; further down, equal scores may swap their classes.
fn compare_ranking(
    checks: &mut Checks,
    name: &str,
    best: &Array,
    scores: &Array,
    margins: &Array,
    ranking: impl Fn(usize) -> Vec<u32>,
) {
    let classes = best.shape[1];
    for (query, &margin) in margins.values.iter().enumerate() {
        let (row, got) = (&best.values[query * classes..][..classes], ranking(query));
        if margin > 1e-5 {
            checks.note(&format!("{name} class of query {query}"), (f64::from(got[0]) - row[0]).abs(), 0.0);
        }
        for (&got, &expected) in got.iter().zip(row) {
            let score = |class: usize| scores.values[query * classes + class];
            let (a, b) = (score(got as usize), score(expected as usize));
            checks.note(&format!("{name} ranking"), (a - b).abs() / b.abs().max(1.0), 1e-4);
        }
    }
}

fn spread(case: &Case, checks: &mut Checks) {
    let views = [("x", features(case, "x")), ("y", features(case, "y"))];
    let argument = |name: &str| case.args()[name].as_f64().unwrap_or(2.0);
    close_to(case, checks, "alignment", alignment(&views[0].1, &views[1].1, argument("alpha")));
    for (name, view) in &views {
        close_to(case, checks, &format!("uniformity_{name}"), uniformity(view, argument("t")).expect("two rows"));
        close_to(case, checks, &format!("z_std_{name}"), embedding_std(view).expect("two rows"));
    }
}

fn discriminant_rank(case: &Case, checks: &mut Checks) {
    let (q, groups) = (case.arg_usize("samples_per_class"), case.arg_usize("n_classes"));
    let all = features(case, "embeddings");
    let used: Vec<f32> = (0..all.rows().min(q * groups)).flat_map(|row| all.row(row).to_vec()).collect();
    let used = Features::new(used, all.dim()).expect("finite");
    let got = lidar(&used, q, case.arg_f64("delta"), case.arg_f64("epsilon")).expect("two groups");
    close_to(case, checks, "lidar", got.rank);
    close_to(case, checks, "entropy", got.entropy);
    close_to(case, checks, "top_eigenvalue", got.top_eigenvalue);
}

fn similarity(case: &Case, checks: &mut Checks) {
    close_to(case, checks, "cka", linear_cka(&features(case, "X"), &features(case, "Y")));
}

fn rank(case: &Case, checks: &mut Checks) {
    let embeddings = features(case, "Z");
    let (got, expected) = (singular_values(&embeddings), case.tensor("singular_values"));
    assert_eq!(got.len(), expected.values.len(), "{}: number of singular values", case.name);
    for (got, &expected) in got.iter().zip(&expected.values) {
        close(case, checks, "singular value", *got, expected);
    }
    for name in case.tensors.keys().filter(|name| name.starts_with("rankme_")) {
        let epsilon = match name.strip_prefix("rankme_eps") {
            Some(epsilon) => epsilon.parse().expect("epsilon in the name"),
            None => 0.0,
        };
        close_to(case, checks, name, rankme(&embeddings, epsilon));
    }
}

/// Images and targets mixed with the batch in reverse, and the losses of smoothed and mixed targets.
fn mixing(case: &Case, checks: &mut Checks) {
    let labels = labels(case, "y");
    let x = case.tensor("x");
    let [count, channels, size, width]: [usize; 4] = x.shape.clone().try_into().expect("images");
    assert_eq!(size, width, "{}: square images", case.name);
    let (classes, smoothing) = (case.arg_usize("num_classes"), case.arg_f64("smoothing"));
    let range = |name: &str| {
        let ends: Vec<usize> = serde_json::from_value(case.args()[name].clone()).expect("two ends");
        ends[0]..ends[1]
    };
    let device = Device::flex().autodiff();
    let image = || Tensor::<4>::from_data(TensorData::new(x.f32(), [count, channels, size, width]), &device);
    let mut soft = Vec::new();
    for (name, mix) in [
        ("mixup", Mix::Blend(case.arg_f64("lam"))),
        ("cutmix", Mix::Paste { rows: range("box_y"), columns: range("box_x") }),
    ] {
        let mixes = vec![mix.clone(); count];
        let got = mixed(image(), &mixes).into_data().try_to_vec::<f32>().unwrap();
        checks.absolute(&format!("x_{name}"), &got, case.tensor(&format!("x_{name}")), case.tolerance("abs"));
        let got = targets(&labels, &vec![mix.share(size); count], classes, smoothing);
        checks.absolute(&format!("target_{name}"), &got, case.tensor(&format!("target_{name}")), case.tolerance("abs"));
        if name == "mixup" {
            soft = got;
        } else {
            checks.relative("cutmix_lam", mix.share(size), case.arg_f64("cutmix_lam"), case.tolerance("rel"));
        }
    }
    let smoothed = targets(&labels, &vec![1.0; count], classes, smoothing);
    for (name, targets) in [("ce_label_smoothing", smoothed), ("ce_soft_mixup", soft)] {
        let tensor = |values: Vec<f32>| Tensor::<2>::from_data(TensorData::new(values, [count, classes]), &device);
        let logits = tensor(case.tensor("logits").f32()).require_grad();
        let loss = cross_entropy(logits.clone(), tensor(targets), None).sum() / count as f64;
        let value = f64::from(loss.clone().into_scalar::<f32>());
        checks.relative(name, value, case.tensor(name).item(), case.tolerance("rel"));
        let gradient = logits.grad(&loss.backward()).unwrap().into_data().try_to_vec::<f32>().unwrap();
        let name = format!("grad_{name}");
        checks.relative_to_max(&name, &gradient, case.tensor(&name), case.tolerance("rel"));
    }
    let timm = case.tensor("ce_label_smoothing_timm").item();
    checks.relative("ce_label_smoothing_timm", case.tensor("ce_label_smoothing").item(), timm, case.tolerance("rel"));
}

fn accuracy(case: &Case, checks: &mut Checks) {
    let (logits, labels) = (case.tensor("logits"), labels(case, "y"));
    // "top1, top3, top5"
    let meaning = case.manifest["tensors"]["top"]["meaning"].as_str().expect("a meaning");
    let tops: Vec<usize> =
        meaning.split(", ").map(|top| top.trim_start_matches("top").parse().expect("topK")).collect();
    for (&k, &expected) in tops.iter().zip(&case.tensor("top").values) {
        let got = 100.0 * top_k_accuracy(&logits.values, logits.shape[1], &labels, k);
        close(case, checks, &format!("top-{k}"), got, expected);
    }
}
