//! Golden cases of kind `losses`.

use autodidact::loss::{mae, nt_xent_per_anchor, total};
use burn::tensor::{Device, Tensor, TensorData};

use super::{Array, Case, Checks, Outcome};

pub(super) fn run(case: &Case) -> Outcome {
    match case.name.split('_').next() {
        Some("ntxent") => nt_xent(case),
        Some("mae") => reconstruction(case),
        _ => Outcome::NotYet("method not built yet".to_owned()),
    }
}

/// The loss over the gathered batch. What a rank of `w` has is cut from it: the losses of its anchors, the gradients of its projections.
fn nt_xent(case: &Case) -> Outcome {
    let mut checks = Checks::default();
    let leaves = ["z0", "z1"].map(|name| tensor::<2>(case.tensor(name)).require_grad());
    let [batch, _] = leaves[0].dims();
    let per_anchor = nt_xent_per_anchor(leaves[0].clone(), leaves[1].clone(), case.arg_f64("temperature"));
    let sum = total(per_anchor.clone());
    let losses: Vec<f64> = numbers(per_anchor).into_iter().map(f64::from).collect();
    let mean = f64::from(numbers(sum.clone())[0]) / (2 * batch) as f64;
    let tolerance = case.tolerance("loss_rel");
    checks.relative("loss", mean, case.tensor("loss").item(), tolerance);
    if let Some(expected) = case.tensors.get("loss_simclr_sum") {
        checks.relative("loss_simclr_sum", 2.0 * mean, expected.item(), tolerance);
    }
    let gradients = (sum / (2 * batch) as f64).backward();
    for (name, leaf) in ["z0", "z1"].iter().zip(&leaves) {
        let got = numbers(leaf.grad(&gradients).expect("a leaf of the loss"));
        compare_gradients(case, &mut checks, name, &got);
    }
    for (ranks, expected) in local_losses(case) {
        let shard = batch / ranks;
        for (rank, &expected) in expected.values.iter().enumerate() {
            let own = rank * shard..(rank + 1) * shard;
            let sum: f64 = own.map(|i| losses[i] + losses[batch + i]).sum();
            checks.relative(&format!("w{ranks} local loss {rank}"), sum / (2 * shard) as f64, expected, tolerance);
        }
    }
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
    for ranks in shard_counts(case, "grad_pred") {
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

/// Compares a global gradient with `grad_<name>` and with the same cut into shards along the batch.
fn compare_gradients(case: &Case, checks: &mut Checks, name: &str, got: &[f32]) {
    let key = format!("grad_{name}");
    let tolerance = case.tolerance("grad_rel_to_max");
    checks.relative_to_max(&key, got, case.tensor(&key), tolerance);
    for ranks in shard_counts(case, &key) {
        let expected = case.tensor(&format!("w{ranks}_{key}"));
        assert_eq!(expected.shape[0], ranks, "shards are stacked on the first axis");
        // contiguous shards of the first axis: the same values in the same order
        checks.relative_to_max(&format!("w{ranks}_{key}"), got, expected, tolerance);
    }
}

/// World sizes `w` for which the case has `w<w>_<key>`.
fn shard_counts(case: &Case, key: &str) -> Vec<usize> {
    let world = |name: &String| name.strip_prefix('w')?.strip_suffix(key)?.strip_suffix('_')?.parse().ok();
    case.tensors.keys().filter_map(world).collect()
}

fn local_losses(case: &Case) -> Vec<(usize, &Array)> {
    let of = |ranks: usize| (ranks, case.tensor(&format!("w{ranks}_local_loss")));
    shard_counts(case, "local_loss").into_iter().map(of).collect()
}

fn tensor<const D: usize>(array: &Array) -> Tensor<D> {
    Tensor::from_data(TensorData::new(array.f32(), array.shape.clone()), &Device::flex().autodiff())
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("float32")
}
