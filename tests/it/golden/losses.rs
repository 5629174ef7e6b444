//! Golden cases of kind `losses`.
//!
//! The engine evaluates a loss of the global batch on the gathered outputs, so a rank's gradient is a slice of one gradient, and its share of the
//! loss the terms of its images. Where a peer's rank has other terms (its own mean beside global statistics), they are put together here.

use autodidact::loss::{
    barlow_twins, cosine, dcl, dino, gram, ibot, info_nce, koleo, l2_normalize, latent, mae, mmcr, nt_xent_per_anchor,
    sigreg, simmim, sinkhorn, soft_cross_entropy, swav, tico, total, vicreg, vicregl, visreg,
};
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};

use super::{Array, Case, Checks, Outcome};

pub(super) fn run(case: &Case) -> Outcome {
    let mut checks = Checks::default();
    let run = match case.name.split('_').next().unwrap_or_default() {
        "ntxent" => return nt_xent(case),
        "mae" => return reconstruction(case),
        "barlow" => barlow,
        "byol" | "simsiam" => predictor,
        "data2vec" => data2vec,
        "dcl" | "dclw" => decoupled,
        "dino" => dino,
        "dinov2" if case.tensors.contains_key("mask") => dinov2_ibot,
        "dinov2" => dinov2_cls,
        "dinov3" => gram,
        "ibot" => ibot,
        "ijepa" => ijepa,
        "koleo" => koleo,
        "lejepa" => lejepa,
        "mmcr" => mmcr,
        "moco" => moco,
        "mocov3" => moco_v3,
        "nnclr" => nnclr,
        "sigreg" => sigreg,
        "simmim" => simmim,
        "swav" => swav,
        "tico" => tico,
        "vicreg" => vicreg,
        "vicregl" => vicregl,
        "visreg" => visreg,
        _ => return Outcome::NotYet("method not built yet".to_owned()),
    };
    run(case, &mut checks);
    Outcome::Compared(checks)
}

/// The loss over the gathered batch. What a rank of `w` has is cut from it: the losses of its anchors, the gradients of its projections.
fn nt_xent(case: &Case) -> Outcome {
    let mut checks = Checks::default();
    let leaves = ["z0", "z1"].map(|name| (name, leaf::<2>(case, name)));
    let [batch, _] = leaves[0].1.dims();
    let per_anchor = nt_xent_per_anchor(leaves[0].1.clone(), leaves[1].1.clone(), case.arg_f64("temperature"));
    let mean = total(per_anchor.clone()) / (2 * batch) as f64;
    if case.tensors.contains_key("loss_simclr_sum") {
        scalar(case, &mut checks, "loss_simclr_sum", mean.clone() * 2.0);
    }
    local_losses(case, &mut checks, &images(per_anchor.chunk(2, 0)));
    compare(case, &mut checks, &mean, &leaves);
    Outcome::Compared(checks)
}

/// One pass over the whole batch, then one a shard; only the count of removed patches is global.
fn reconstruction(case: &Case) -> Outcome {
    let mut checks = Checks::default();
    let patches = mae::patchify(tensor::<4>(case.tensor("imgs")), case.arg_usize("patch_size"));
    checks.absolute("patches", &numbers(patches.clone()), case.tensor("patches"), case.tolerance("other_abs"));
    let norm_pix = case.args()["norm_pix_loss"].as_bool().expect("args.norm_pix_loss");
    let target = if norm_pix { mae::normalize_patches(patches) } else { patches };
    let (pred, mask) = (tensor::<3>(case.tensor("pred")), tensor::<2>(case.tensor("mask")));
    let count: f64 = case.tensor("mask").values.iter().sum();
    let [batch, ..] = pred.dims();

    // loss sum of a shard, its count, and the gradient of the global mean
    let pass = |rank: usize, ranks: usize| {
        let (from, rows) = (rank * (batch / ranks), batch / ranks);
        let leaf = pred.clone().narrow(0, from, rows).detach().require_grad();
        let mask = mask.clone().narrow(0, from, rows);
        let sum = mae::reconstruction(leaf.clone(), target.clone().narrow(0, from, rows), mask.clone());
        let gradients = (sum.clone() / count).backward();
        let own: f64 = numbers(mask).into_iter().map(f64::from).sum();
        (f64::from(numbers(sum)[0]), own, numbers(leaf.grad(&gradients).expect("a leaf of the loss")))
    };
    let (sum, _, gradient) = pass(0, 1);
    checks.relative("loss", sum / count, case.tensor("loss").item(), case.tolerance("loss_rel"));
    checks.relative_to_max("grad_pred", &gradient, case.tensor("grad_pred"), case.tolerance("grad_rel_to_max"));
    for ranks in shard_counts(case, "", "grad_pred") {
        let passes: Vec<_> = (0..ranks).map(|rank| pass(rank, ranks)).collect();
        let sum: f64 = passes.iter().map(|(sum, ..)| sum).sum();
        checks.relative(&format!("w{ranks} loss"), sum / count, case.tensor("loss").item(), case.tolerance("loss_rel"));
        let gradient: Vec<f32> = passes.iter().flat_map(|(.., gradient)| gradient.clone()).collect();
        let name = format!("w{ranks}_grad_pred");
        checks.relative_to_max(&name, &gradient, case.tensor(&name), case.tolerance("grad_rel_to_max"));
        if let Some(expected) = case.tensors.get(&format!("w{ranks}_local_loss")) {
            for ((sum, own, _), &expected) in passes.iter().zip(&expected.values) {
                checks.relative(&format!("w{ranks} local loss"), sum / own, expected, case.tolerance("loss_rel"));
            }
        }
    }
    Outcome::Compared(checks)
}

fn decoupled(case: &Case, checks: &mut Checks) {
    let leaves = ["z0", "z1"].map(|name| (name, leaf::<2>(case, name)));
    let [batch, _] = leaves[0].1.dims();
    let sigma = case.args()["sigma"].as_f64();
    let per_anchor = dcl::dcl_per_anchor(leaves[0].1.clone(), leaves[1].1.clone(), case.arg_f64("temperature"), sigma);
    let local = images([per_anchor.clone().narrow(0, 0, batch), per_anchor.clone().narrow(0, batch, batch)]);
    for ranks in shard_counts(case, "wrong", "local_loss") {
        let wrong = case.tensor(&format!("wrong_w{ranks}_local_loss"));
        for (got, &wrong) in means(&local, ranks).into_iter().zip(&wrong.values) {
            let same = (got - wrong).abs() <= case.tolerance("loss_rel") * wrong.abs();
            checks.note("a softmax over a rank's images", if same { f64::INFINITY } else { 0.0 }, 0.0);
        }
    }
    local_losses(case, checks, &local);
    compare(case, checks, &(total(per_anchor) / (2 * batch) as f64), &leaves);
}

fn moco(case: &Case, checks: &mut Checks) {
    let (query, key) = (leaf::<2>(case, "q"), tensor::<2>(case.tensor("k")));
    let queue = tensor::<2>(case.tensor("queue")).transpose();
    let temperature = case.arg_f64("temperature");
    let [batch, _] = query.dims();
    let logits = info_nce::moco_logits(query.clone(), key.clone(), queue.clone(), temperature);
    output(case, checks, "logits", logits);
    let (new_queue, next) = info_nce::enqueue(queue.clone(), l2_normalize(key.clone(), 1e-12), case.arg_usize("ptr"));
    output(case, checks, "new_queue", new_queue.transpose());
    checks.note("new_ptr", (next as f64 - case.tensor("new_ptr").item()).abs(), 0.0);
    local_losses(
        case,
        checks,
        &images([info_nce::moco_per_image(query.clone(), key.clone(), queue.clone(), temperature)]),
    );
    compare(case, checks, &(info_nce::moco(query.clone(), key, queue, temperature) / batch as f64), &[("q", query)]);
}

fn moco_v3(case: &Case, checks: &mut Checks) {
    let [q1, q2] = ["q1", "q2"].map(|name| leaf::<2>(case, name));
    let [k1, k2] = ["k1", "k2"].map(|name| tensor::<2>(case.tensor(name)));
    let temperature = case.arg_f64("temperature");
    let batch = q1.dims()[0] as f64;
    let first = info_nce::moco_v3_per_image(q1.clone(), k2.clone(), temperature);
    let second = info_nce::moco_v3_per_image(q2.clone(), k1.clone(), temperature);
    scalar(case, checks, "loss_q1k2", total(first.clone()) / batch);
    scalar(case, checks, "loss_q2k1", total(second.clone()) / batch);
    local_losses(case, checks, &images([first + second]));
    let loss = info_nce::moco_v3([q1.clone(), q2.clone()], [k1, k2], temperature) / batch;
    compare(case, checks, &loss, &[("q1", q1), ("q2", q2)]);
}

fn nnclr(case: &Case, checks: &mut Checks) {
    let bank = tensor::<2>(case.tensor("bank"));
    let neighbors = ["z0", "z1"].map(|name| info_nce::nearest_neighbors(tensor(case.tensor(name)), bank.clone()));
    output(case, checks, "nn0", neighbors[0].clone());
    output(case, checks, "nn1", neighbors[1].clone());
    let leaves = ["p0", "p1"].map(|name| (name, leaf::<2>(case, name)));
    let predictions = [leaves[0].1.clone(), leaves[1].1.clone()];
    let [batch, _] = predictions[0].dims();
    let per_anchor = info_nce::nnclr_per_anchor(neighbors, predictions, case.arg_f64("temperature"));
    local_losses(case, checks, &images(per_anchor.clone().chunk(4, 0)));
    compare(case, checks, &(total(per_anchor) / (4 * batch) as f64), &leaves);
}

/// BYOL and `SimSiam`.
fn predictor(case: &Case, checks: &mut Checks) {
    let leaves = ["p1", "p2"].map(|name| (name, leaf::<2>(case, name)));
    let targets = ["z1", "z2"].map(|name| tensor::<2>(case.tensor(name)));
    let predictions = [leaves[0].1.clone(), leaves[1].1.clone()];
    let [batch, _] = targets[0].dims();
    let loss = if case.name.starts_with("byol") { cosine::byol_per_image } else { cosine::simsiam_per_image };
    let per_image = loss(predictions, targets);
    local_losses(case, checks, &images([per_image.clone()]));
    compare(case, checks, &(total(per_image) / batch as f64), &leaves);
}

fn barlow(case: &Case, checks: &mut Checks) {
    let leaves = ["z1", "z2"].map(|name| (name, leaf::<2>(case, name)));
    let [first, second] = [leaves[0].1.clone(), leaves[1].1.clone()];
    output(case, checks, "cross_correlation", barlow_twins::cross_correlation(first.clone(), second.clone()));
    compare(case, checks, &barlow_twins::barlow_twins(first, second, case.arg_f64("lambda_")), &leaves);
}

fn vicreg(case: &Case, checks: &mut Checks) {
    let leaves = ["x", "y"].map(|name| (name, leaf::<2>(case, name)));
    let [first, second] = [leaves[0].1.clone(), leaves[1].1.clone()];
    let [sim, std, cov] = ["sim", "std", "cov"].map(|name| case.arg_f64(name));
    let weights = vicreg::Weights { invariance: sim, variance: std, covariance: cov };
    let loss = vicreg::vicreg(first.clone(), second.clone(), weights);
    // a rank has the invariance of its images and the statistics of all
    let distance = (first - second).square().mean_dim(1).squeeze_dim::<1>(1) * sim;
    local_losses(case, checks, &beside_statistics(&distance, &loss));
    compare(case, checks, &loss, &leaves);
}

fn vicregl(case: &Case, checks: &mut Checks) {
    let mut wholes = Vec::new();
    let mut maps = Vec::new();
    let mut views = |prefix: &str| -> Vec<vicregl::View> {
        let views = numbered(case, prefix)
            .into_iter()
            .zip(numbered(case, &format!("{prefix}l")))
            .zip(numbered(case, &format!("{prefix}grid")));
        views
            .map(|((whole, map), grid)| {
                let view = vicregl::View {
                    whole: leaf(case, &whole),
                    map: leaf(case, &map),
                    grid: tensor(case.tensor(&grid)),
                };
                wholes.push((whole, view.whole.clone()));
                maps.push((map, view.map.clone()));
                view
            })
            .collect()
    };
    let (global, local) = (views("g"), views("l"));
    let matches = [0, 1].map(|i| case.args()["num_matches"][i].as_u64().map_or(usize::MAX, |count| count as usize));
    let [invariance, variance, covariance] = ["lambda_", "mu", "nu"].map(|name| case.arg_f64(name));
    let weights = vicreg::Weights { invariance, variance, covariance };
    let loss = vicregl::vicregl(&global, &local, case.arg_f64("alpha"), matches, weights);
    scalar(case, checks, "loss", loss.clone());
    let gradients = loss.backward();
    for (name, leaf) in &wholes {
        compare_gradient(case, checks, name, leaf, &gradients);
    }
    for (name, leaf) in &maps {
        compare_gradient(case, checks, name, leaf, &gradients);
    }
}

fn swav(case: &Case, checks: &mut Checks) {
    let names = numbered(case, "z");
    let leaves: Vec<_> = names.iter().map(|name| (name.as_str(), leaf::<2>(case, name))).collect();
    let prototypes = l2_normalize(tensor::<2>(case.tensor("w")), 1e-12).require_grad();
    let scores: Vec<_> = leaves.iter().map(|(_, z)| swav::scores(z.clone(), prototypes.clone())).collect();
    let coded = numbered(case, "q").len();
    let codes: Vec<_> = (0..coded)
        .map(|crop| {
            let queue = case.tensors.get("queue").filter(|queue| queue.values.len() > 1).map(|queue| {
                tensor::<3>(queue).narrow(0, crop, 1).squeeze_dim::<2>(0).matmul(prototypes.clone().transpose())
            });
            let iterations = case.arg_usize("sinkhorn_iterations");
            swav::codes(scores[crop].clone(), queue, case.arg_f64("epsilon"), iterations)
        })
        .collect();
    for (crop, codes) in codes.iter().enumerate() {
        output(case, checks, &format!("q{crop}"), codes.clone());
    }
    let per_image = swav::swav_per_image(&scores, &codes, case.arg_f64("temperature"));
    let batch = per_image.dims()[0] as f64;
    local_losses(case, checks, &images([per_image.clone()]));
    let loss = total(per_image) / batch;
    scalar(case, checks, "loss", loss.clone());
    let gradients = loss.backward();
    for (name, leaf) in &leaves {
        compare_gradient(case, checks, name, leaf, &gradients);
    }
    compare_gradient(case, checks, "w_normalised", &prototypes, &gradients);
}

fn sigreg(case: &Case, checks: &mut Checks) {
    let z = leaf::<2>(case, "z");
    let directions = tensor::<2>(case.tensor("A"));
    let views = z.clone().unsqueeze_dim::<3>(0);
    let loss = sigreg::sigreg(views, directions, case.arg_usize("knots"), case.arg_f64("t_max"));
    // the statistic is one of the whole batch on each rank
    let value = number(loss.clone());
    local_losses(case, checks, &vec![value; z.dims()[0]]);
    compare(case, checks, &loss, &[("z", z)]);
}

/// Views `zg` and `zl`, or `z` where all are global.
fn views(case: &Case) -> (Vec<(&'static str, Tensor<3>)>, Tensor<3>, usize) {
    let names: &[&str] = if case.tensors.contains_key("z") { &["z"] } else { &["zg", "zl"] };
    let leaves: Vec<_> =
        names.iter().filter(|n| case.tensors.contains_key(**n)).map(|name| (*name, leaf::<3>(case, name))).collect();
    let global = leaves[0].1.dims()[0];
    let views = Tensor::cat(leaves.iter().map(|(_, leaf)| leaf.clone()).collect(), 0);
    (leaves, views, global)
}

/// The squared distance of each image's views from their centre, as a mean.
fn distances(views: &Tensor<3>, global: usize) -> Tensor<1> {
    let [_, batch, _] = views.dims();
    let image = |i: usize| sigreg::invariance(views.clone().narrow(1, i, 1), global);
    Tensor::cat((0..batch).map(image).collect(), 0)
}

fn lejepa(case: &Case, checks: &mut Checks) {
    let (leaves, views, global) = views(case);
    let directions = tensor::<2>(case.tensor("A"));
    let (lambda, knots, t_max) = (case.arg_f64("lambda_"), case.arg_usize("knots"), case.arg_f64("t_max"));
    let batch = views.dims()[1] as f64;
    scalar(case, checks, "sigreg", sigreg::sigreg(views.clone(), directions.clone(), knots, t_max));
    scalar(case, checks, "invariance", sigreg::invariance(views.clone(), global) / batch);
    let loss = sigreg::lejepa(views.clone(), global, directions, lambda, knots, t_max);
    local_losses(case, checks, &beside_statistics(&(distances(&views, global) * (1.0 - lambda)), &loss));
    compare(case, checks, &loss, &leaves);
}

fn visreg(case: &Case, checks: &mut Checks) {
    let (leaves, views, global) = views(case);
    let directions = tensor::<2>(case.tensor("A"));
    let (lambda, eps) = (case.arg_f64("lambda_"), case.arg_f64("eps"));
    let [scale, shape, center] = ["lambda_scale", "lambda_shape", "lambda_center"].map(|name| case.arg_f64(name));
    let batch = views.dims()[1] as f64;
    scalar(case, checks, "pred", sigreg::invariance(views.clone(), global) / batch);
    scalar(case, checks, "scale", visreg::scale(views.clone()));
    scalar(case, checks, "shape", visreg::shape(views.clone(), directions.clone(), eps));
    scalar(case, checks, "center_loss", visreg::center(views.clone()));
    let weights = visreg::Weights { scale, shape, center };
    let loss = visreg::visreg(views.clone(), global, directions, lambda, weights, eps);
    local_losses(case, checks, &beside_statistics(&(distances(&views, global) * (1.0 - lambda)), &loss));
    compare(case, checks, &loss, &leaves);
}

fn dino(case: &Case, checks: &mut Checks) {
    let students = numbered(case, "s");
    let leaves: Vec<_> = students.iter().map(|name| (name.as_str(), leaf::<2>(case, name))).collect();
    let teachers: Vec<Tensor<2>> = numbered(case, "t").iter().map(|name| tensor(case.tensor(name))).collect();
    let center = tensor::<2>(case.tensor("center"));
    let temperature = dino::teacher_temperature(
        case.arg_usize("epoch"),
        case.arg_usize("warmup_teacher_temp_epochs"),
        case.arg_f64("warmup_teacher_temp"),
        case.arg_f64("teacher_temp"),
    );
    checks.relative("teacher_temp", temperature, case.tensor("teacher_temp").item(), case.tolerance("loss_rel"));
    let probs: Vec<_> =
        teachers.iter().map(|t| dino::centered_softmax(t.clone(), center.clone(), temperature)).collect();
    let outputs: Vec<_> = leaves.iter().map(|(_, leaf)| leaf.clone()).collect();
    let per_image = dino::dino_per_image(&outputs, &probs, case.arg_f64("student_temp"));
    let momentum = case.arg_f64("center_momentum");
    output(case, checks, "new_center", dino::update_center(center, Tensor::cat(teachers, 0), momentum));
    local_losses(case, checks, &images([per_image.clone()]));
    let batch = per_image.dims()[0] as f64;
    compare(case, checks, &(total(per_image) / batch), &leaves);
}

fn dinov2_cls(case: &Case, checks: &mut Checks) {
    let leaves: Vec<_> = ["sg", "sl"]
        .into_iter()
        .filter(|name| case.tensors.contains_key(*name))
        .map(|name| (name, leaf::<3>(case, name)))
        .collect();
    let teacher = tensor::<3>(case.tensor("t"));
    let [views, batch, k] = teacher.dims();
    let temperature = case.arg_f64("teacher_temp");
    let probs = sinkhorn(teacher.reshape([views * batch, k]), temperature, case.arg_usize("n_iterations"));
    output(case, checks, "teacher_probs", probs.clone());
    let teachers = probs.chunk(views, 0);
    let students: Vec<Vec<Tensor<2>>> = leaves.iter().map(|(_, leaf)| unstack(leaf)).collect();
    let student_temperature = case.arg_f64("student_temp");
    let all: Vec<Tensor<2>> = students.iter().flatten().cloned().collect();
    let per_image = dino::dino_per_image(&all, &teachers, student_temperature);

    // the two terms that the official code reports
    let terms = (teachers.len() * (all.len() - 1)) as f64;
    for (which, name) in ["loss_global", "loss_local"].iter().enumerate().take(students.len()) {
        let mut sum = 0.0;
        for (v, student) in students[which].iter().enumerate() {
            for (_, probs) in teachers.iter().enumerate().filter(|(t, _)| which == 1 || *t != v) {
                sum += number(total(soft_cross_entropy(probs.clone(), student.clone(), student_temperature)));
            }
        }
        checks.relative(name, sum / terms / batch as f64, case.tensor(name).item(), case.tolerance("loss_rel"));
    }
    local_losses(case, checks, &images([per_image.clone()]));
    compare(case, checks, &(total(per_image) / batch as f64), &leaves);
}

fn dinov2_ibot(case: &Case, checks: &mut Checks) {
    let (student, teacher) = (leaf::<2>(case, "s"), tensor::<2>(case.tensor("t")));
    let [_, k] = teacher.dims();
    let mask = case.tensor("mask");
    let images = mask.shape[0];
    let weights = ibot::mask_weights(tensor::<2>(mask));
    let weights = weights.reshape([mask.values.len()]).select(0, masked_positions(mask));
    let temperature = case.arg_f64("teacher_temp");
    let probs = match case.tensors.get("center") {
        Some(center) => {
            let center = Tensor::from_data(TensorData::new(center.f32(), [1, k]), &teacher.device());
            let moved = dino::update_center(center.clone(), teacher.clone(), case.arg_f64("center_momentum"));
            output(case, checks, "new_center", moved);
            dino::centered_softmax(teacher, center, temperature)
        }
        None => sinkhorn(teacher, temperature, case.arg_usize("n_iterations")),
    };
    output(case, checks, "teacher_probs", probs.clone());
    let loss = ibot::ibot_masked(student.clone(), probs, weights, case.arg_f64("student_temp")) / images as f64;
    compare(case, checks, &loss, &[("s", student)]);
}

fn ibot(case: &Case, checks: &mut Checks) {
    let (cls, patch) = (leaf::<3>(case, "s_cls"), leaf::<4>(case, "s_patch"));
    let local = case.tensors.contains_key("s_local").then(|| leaf::<3>(case, "s_local"));
    let [views, batch, patches, k] = patch.dims();
    let student_temperature = case.arg_f64("student_temp");
    let momentum = case.arg_f64("center_momentum");

    let t_cls = tensor::<3>(case.tensor("t_cls"));
    let center = tensor::<2>(case.tensor("center"));
    let temperature = case.arg_f64("teacher_temp");
    let teachers: Vec<_> =
        unstack(&t_cls).into_iter().map(|t| dino::centered_softmax(t, center.clone(), temperature)).collect();
    let students: Vec<_> = unstack(&cls).into_iter().chain(local.iter().flat_map(unstack)).collect();
    let per_image_cls = dino::dino_per_image(&students, &teachers, student_temperature) * case.arg_f64("lambda1");
    output(case, checks, "new_center", dino::update_center(center, Tensor::cat(unstack(&t_cls), 0), momentum));

    // one row a view of an image
    let rows = [views * batch * patches, k];
    let t_patch = tensor::<4>(case.tensor("t_patch")).reshape(rows);
    let center = tensor::<3>(case.tensor("center2")).reshape([1, k]);
    let probs = dino::centered_softmax(t_patch.clone(), center.clone(), case.arg_f64("teacher_temp_patch"));
    output(case, checks, "new_center2", dino::update_center(center, t_patch, momentum));
    let mask = tensor::<4>(case.tensor("mask")).reshape([views * batch, patches]);
    let stacked = [views * batch, patches, k];
    let per_view =
        ibot::ibot_per_image(patch.clone().reshape(stacked), probs.reshape(stacked), mask, student_temperature);
    let per_image_patch = per_view.reshape([views, batch]).mean_dim(0).reshape([batch]) * case.arg_f64("lambda2");

    scalar(case, checks, "loss_cls", total(per_image_cls.clone()) / batch as f64);
    scalar(case, checks, "loss_patch", total(per_image_patch.clone()) / batch as f64);
    let per_image = per_image_cls + per_image_patch;
    local_losses(case, checks, &images([per_image.clone()]));
    let loss = total(per_image) / batch as f64;
    scalar(case, checks, "loss", loss.clone());
    let gradients = loss.backward();
    compare_gradient(case, checks, "s_cls", &cls, &gradients);
    compare_gradient(case, checks, "s_patch", &patch, &gradients);
    if let Some(local) = &local {
        compare_gradient(case, checks, "s_local", local, &gradients);
    }
}

/// The published loss takes neighbours from a rank's batch: a shard's value and gradient come from its own rows.
fn koleo(case: &Case, checks: &mut Checks) {
    let x = leaf::<2>(case, "x");
    let ([batch, _], eps) = (x.dims(), case.arg_f64("eps"));
    for ranks in shard_counts(case, "", "local_loss") {
        let rows = batch / ranks;
        let mut gradient = Vec::new();
        for (rank, &expected) in case.tensor(&format!("w{ranks}_local_loss")).values.iter().enumerate() {
            let own = x.clone().narrow(0, rank * rows, rows).detach().require_grad();
            let loss = koleo::koleo(own.clone(), eps) / rows as f64;
            let what = format!("w{ranks} local loss {rank}");
            checks.relative(&what, number(loss.clone()), expected, case.tolerance("loss_rel"));
            gradient.extend(numbers(own.grad(&loss.backward()).expect("a leaf of the loss")));
        }
        let key = format!("w{ranks}_local_grad_x");
        checks.relative_to_max(&key, &gradient, case.tensor(&key), case.tolerance("grad_rel_to_max"));
    }
    compare(case, checks, &(koleo::koleo(x.clone(), eps) / batch as f64), &[("x", x)]);
}

fn gram(case: &Case, checks: &mut Checks) {
    let student = leaf::<3>(case, "s");
    let teacher = tensor::<3>(case.tensor("t"));
    let [batch, patches, dim] = student.dims();
    let flag = |name: &str| case.args()[name].as_bool();
    let negatives = if flag("remove_neg").expect("args.remove_neg") {
        gram::Negatives::Zero
    } else if flag("remove_only_teacher_neg") == Some(true) {
        gram::Negatives::ZeroOfTeacher
    } else {
        gram::Negatives::Keep
    };
    let normalize = flag("apply_norm").expect("args.apply_norm");
    if flag("img_level") == Some(false) {
        let whole = [1, batch * patches, dim];
        let teacher = teacher.clone().reshape([1, batch * patches, teacher.dims()[2]]);
        compare(
            case,
            checks,
            &gram::gram(student.clone().reshape(whole), teacher, normalize, negatives),
            &[("s", student)],
        );
        return;
    }
    let image = |i: usize| {
        let own = |t: &Tensor<3>| t.clone().narrow(0, i, 1);
        number(gram::gram(own(&student), own(&teacher), normalize, negatives))
    };
    local_losses(case, checks, &(0..batch).map(image).collect::<Vec<_>>());
    let loss = gram::gram(student.clone(), teacher, normalize, negatives) / batch as f64;
    compare(case, checks, &loss, &[("s", student)]);
}

fn simmim(case: &Case, checks: &mut Checks) {
    let (images, mask) = (tensor::<4>(case.tensor("x")), tensor::<3>(case.tensor("mask")));
    let reconstruction = leaf::<4>(case, "rec");
    let [batch, channels, ..] = images.dims();
    let patch = case.arg_usize("patch_size");
    let masks = &case.tensor("mask").values;
    for ranks in shard_counts(case, "", "local_loss") {
        let rows = batch / ranks;
        for (rank, &expected) in case.tensor(&format!("w{ranks}_local_loss")).values.iter().enumerate() {
            let from = rank * rows;
            let (x, rec) = (images.clone().narrow(0, from, rows), reconstruction.clone().narrow(0, from, rows));
            let sum = number(simmim::simmim(x, rec, mask.clone().narrow(0, from, rows)));
            let masked: f64 = masks.chunks(masks.len() / ranks).nth(rank).expect("a shard").iter().sum();
            let got = sum / simmim::simmim_count(masked, patch, channels);
            checks.relative(&format!("w{ranks} local loss {rank}"), got, expected, case.tolerance("loss_rel"));
        }
    }
    let count = simmim::simmim_count(masks.iter().sum(), patch, channels);
    compare(case, checks, &(simmim::simmim(images, reconstruction.clone(), mask) / count), &[("rec", reconstruction)]);
}

fn ijepa(case: &Case, checks: &mut Checks) {
    let z = leaf::<4>(case, "z");
    let masks = case.tensor("masks_pred");
    let index: Vec<i64> = masks.values.iter().map(|&v| v as i64).collect();
    let index = Tensor::<3, Int>::from_data(TensorData::new(index, masks.shape.clone()), &z.device());
    let targets = latent::ijepa_targets(tensor(case.tensor("h")), index, case.arg_usize("n_enc_masks"));
    output(case, checks, "targets", targets.clone());
    let beta = case.args()["beta"].as_f64().unwrap_or(1.0);
    let [blocks, batch, tokens, _] = z.dims();
    let image = |i: usize| {
        let own = |t: &Tensor<4>| t.clone().narrow(1, i, 1);
        number(latent::smooth_l1(own(&z), own(&targets), beta)) / (blocks * tokens) as f64
    };
    local_losses(case, checks, &(0..batch).map(image).collect::<Vec<_>>());
    let loss = latent::smooth_l1(z.clone(), targets, beta) / (blocks * batch * tokens) as f64;
    compare(case, checks, &loss, &[("z", z)]);
}

fn data2vec(case: &Case, checks: &mut Checks) {
    let layers = tensor::<4>(case.tensor("layers"));
    let mask = case.tensor("mask");
    let normalize =
        !case.name.contains("nopost") && !case.manifest["source"].as_str().unwrap_or("").contains("layer_norm=False");
    let targets = latent::data2vec_targets(layers, normalize);
    let targets = latent::select_tokens(targets, masked_positions(mask));
    output(case, checks, "targets", targets.clone());
    let [tokens, dim] = targets.dims();
    let beta = case.arg_f64("beta");
    let leaf = Tensor::<2>::from_data(TensorData::new(case.tensor("out").f32(), [tokens, dim]), &targets.device());
    let leaf = leaf.require_grad();
    // the mean over a rank's tokens
    for ranks in shard_counts(case, "", "local_loss") {
        let mut from = 0;
        for (rank, &expected) in case.tensor(&format!("w{ranks}_local_loss")).values.iter().enumerate() {
            let shard = mask.values.chunks(mask.values.len() / ranks).nth(rank).expect("a shard");
            let own = shard.iter().sum::<f64>() as usize;
            let sum = latent::smooth_l1(leaf.clone().narrow(0, from, own), targets.clone().narrow(0, from, own), beta);
            let what = format!("w{ranks} local loss {rank}");
            checks.relative(&what, number(sum) / own as f64, expected, case.tolerance("loss_rel"));
            from += own;
        }
    }
    compare(case, checks, &(latent::smooth_l1(leaf.clone(), targets, beta) / tokens as f64), &[("out", leaf)]);
}

fn mmcr(case: &Case, checks: &mut Checks) {
    let online = leaf::<3>(case, "online");
    let loss = mmcr::mmcr(online.clone(), tensor(case.tensor("momentum")), case.arg_f64("lmda"));
    compare(case, checks, &loss, &[("online", online)]);
}

fn tico(case: &Case, checks: &mut Checks) {
    let leaves = ["z_a", "z_b"].map(|name| (name, leaf::<2>(case, name)));
    let [first, second] = [leaves[0].1.clone(), leaves[1].1.clone()];
    let old = case.tensors.get("C").map(tensor::<2>);
    let [batch, dim] = first.dims();
    let old = old.unwrap_or_else(|| Tensor::zeros([dim, dim], &first.device()));
    let covariance = tico::update_covariance(first.clone(), old, case.arg_f64("beta"));
    output(case, checks, "new_C", covariance.clone());
    let loss = tico::tico(first, second, covariance, case.arg_f64("rho")) / batch as f64;
    // each rank of the peer gathers both views and has the loss of the whole batch
    local_losses(case, checks, &vec![number(loss.clone()); batch]);
    compare(case, checks, &loss, &leaves);
}

/// Compares loss and gradients.
fn compare<const D: usize>(case: &Case, checks: &mut Checks, loss: &Tensor<1>, leaves: &[(&str, Tensor<D>)]) {
    scalar(case, checks, "loss", loss.clone());
    let gradients = loss.backward();
    for (name, leaf) in leaves {
        compare_gradient(case, checks, name, leaf, &gradients);
    }
}

fn compare_gradient<const D: usize>(
    case: &Case,
    checks: &mut Checks,
    name: &str,
    leaf: &Tensor<D>,
    gradients: &Gradients,
) {
    compare_gradients(case, checks, name, &numbers(leaf.grad(gradients).expect("a leaf of the loss")));
}

/// Compares a number with the case's, relatively.
fn scalar(case: &Case, checks: &mut Checks, name: &str, got: Tensor<1>) {
    checks.relative(name, number(got), case.tensor(name).item(), case.tolerance("loss_rel"));
}

/// Compares a state or an intermediate tensor.
fn output<const D: usize>(case: &Case, checks: &mut Checks, name: &str, got: Tensor<D>) {
    checks.absolute(name, &numbers(got), case.tensor(name), case.tolerance("other_abs"));
}

/// Compares the mean over each rank's images with the losses of the ranks.
fn local_losses(case: &Case, checks: &mut Checks, per_image: &[f64]) {
    for ranks in shard_counts(case, "", "local_loss") {
        let expected = &case.tensor(&format!("w{ranks}_local_loss")).values;
        for (rank, (got, &expected)) in means(per_image, ranks).into_iter().zip(expected).enumerate() {
            checks.relative(&format!("w{ranks} local loss {rank}"), got, expected, case.tolerance("loss_rel"));
        }
    }
}

fn means(per_image: &[f64], ranks: usize) -> Vec<f64> {
    let rows = per_image.len() / ranks;
    per_image.chunks(rows).map(|own| own.iter().sum::<f64>() / rows as f64).collect()
}

/// Averages several losses of each image.
fn images(terms: impl IntoIterator<Item = Tensor<1>>) -> Vec<f64> {
    let terms: Vec<Vec<f32>> = terms.into_iter().map(numbers).collect();
    (0..terms[0].len()).map(|i| terms.iter().map(|t| f64::from(t[i])).sum::<f64>() / terms.len() as f64).collect()
}

/// The tensors `<prefix>0`, `<prefix>1`, ... that the case has.
fn numbered(case: &Case, prefix: &str) -> Vec<String> {
    (0..case.tensors.len()).map(|i| format!("{prefix}{i}")).take_while(|name| case.tensors.contains_key(name)).collect()
}

/// The loss of each image: its own term, and the rest of the batch's loss, which is the same for all.
fn beside_statistics(own: &Tensor<1>, loss: &Tensor<1>) -> Vec<f64> {
    let own = images([own.clone()]);
    let rest = number(loss.clone()) - own.iter().sum::<f64>() / own.len() as f64;
    own.iter().map(|own| own + rest).collect()
}

/// Cuts `[v, b, k]` into `v` times `[b, k]`.
fn unstack(views: &Tensor<3>) -> Vec<Tensor<2>> {
    let [count, ..] = views.dims();
    (0..count).map(|view| views.clone().narrow(0, view, 1).squeeze_dim(0)).collect()
}

/// Flat positions of the ones of a mask.
fn masked_positions(mask: &Array) -> Tensor<1, Int> {
    let positions: Vec<i64> =
        (0..).zip(&mask.values).filter(|(_, value)| **value != 0.0).map(|(position, _)| position).collect();
    let count = positions.len();
    Tensor::from_data(TensorData::new(positions, [count]), &Device::flex().autodiff())
}

/// Compares a global gradient with `grad_<name>` and with the same cut into shards along the batch.
fn compare_gradients(case: &Case, checks: &mut Checks, name: &str, got: &[f32]) {
    let key = format!("grad_{name}");
    let tolerance = case.tolerance("grad_rel_to_max");
    checks.relative_to_max(&key, got, case.tensor(&key), tolerance);
    for ranks in shard_counts(case, "", &key) {
        let expected = case.tensor(&format!("w{ranks}_{key}"));
        assert_eq!(expected.shape[0], ranks, "shards are stacked on the first axis");
        let axis = case.manifest["shard_dims"][name].as_u64().expect("shard_dims of an input") as usize;
        let got = cut(got, &case.tensor(&key).shape, axis, ranks);
        checks.relative_to_max(&format!("w{ranks}_{key}"), &got, expected, tolerance);
    }
}

/// Cuts an array into `ranks` shards along `axis` and stacks them.
fn cut(values: &[f32], shape: &[usize], axis: usize, ranks: usize) -> Vec<f32> {
    let inner: usize = shape[axis + 1..].iter().product();
    let (row, own) = (shape[axis] * inner, shape[axis] / ranks * inner);
    let shard = |rank: usize| values.chunks(row).flat_map(move |row| row[rank * own..(rank + 1) * own].to_vec());
    (0..ranks).flat_map(shard).collect()
}

/// World sizes `w` for which the case has `w<w>_<key>`, or `<prefix>_w<w>_<key>`.
fn shard_counts(case: &Case, prefix: &str, key: &str) -> Vec<usize> {
    let world = |name: &String| {
        let name = if prefix.is_empty() { name } else { name.strip_prefix(prefix)?.strip_prefix('_')? };
        name.strip_prefix('w')?.strip_suffix(key)?.strip_suffix('_')?.parse().ok()
    };
    case.tensors.keys().filter_map(world).collect()
}

fn leaf<const D: usize>(case: &Case, name: &str) -> Tensor<D> {
    tensor(case.tensor(name)).require_grad()
}

fn tensor<const D: usize>(array: &Array) -> Tensor<D> {
    Tensor::from_data(TensorData::new(array.f32(), array.shape.clone()), &Device::flex().autodiff())
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("float32")
}

fn number(tensor: Tensor<1>) -> f64 {
    f64::from(numbers(tensor)[0])
}
