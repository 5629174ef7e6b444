//! Golden cases of kind `adapters`: position embeddings that are computed or resized.

use autodidact::interop::{adapt_channels, resample_patches};
use autodidact::model::position::{Bicubic, resize_matrix, sincos_table};

use super::{Array, Case, Checks, Outcome};

pub(super) fn run(case: &Case) -> Outcome {
    let name = case.name.as_str();
    if name.starts_with("sincos_pos_embed") {
        sincos(case)
    } else if name.starts_with("timm_pos_embed") {
        let bicubic = [("out_bicubic_aa", Bicubic::Antialias), ("out_bicubic_noaa", Bicubic::Plain)];
        resized(case, &bicubic, case.arg_usize("num_prefix_tokens"))
    } else if name.starts_with("mae_pos_embed") {
        resized(case, &[("out", Bicubic::Plain)], 1)
    } else if name.starts_with("dinov2_pos_embed") {
        resized(case, &[("out_offset0_aa", Bicubic::Antialias), ("out_offset0_noaa", Bicubic::Plain)], 1)
    } else if name.starts_with("timm_patch_embed") {
        patches(case)
    } else if name.starts_with("timm_adapt_input_conv") {
        channels(case)
    } else {
        Outcome::NotYet("no runner for this adapter yet".to_owned())
    }
}

fn patches(case: &Case) -> Outcome {
    let (from, to, weight) = (pair(case, "old"), pair(case, "new"), case.tensor("weight"));
    let mut checks = Checks::default();
    for (name, kind) in [("out_aa", Bicubic::Antialias), ("out_noaa", Bicubic::Plain)] {
        let Some(expected) = case.tensors.get(name) else { continue };
        let got = resample_patches(&weight.f32(), from, to, kind).expect("resizing has a pseudo-inverse");
        checks.relative_to_max(name, &got, expected, case.tolerance("rel_to_max"));
    }
    Outcome::Compared(checks)
}

fn channels(case: &Case) -> Outcome {
    let weight = case.tensor("weight");
    let area = weight.shape[2] * weight.shape[3];
    let mut checks = Checks::default();
    for (name, expected) in case.tensors.iter().filter(|(name, _)| name.starts_with("out_")) {
        let got = adapt_channels(&weight.f32(), weight.shape[1], expected.shape[1], area);
        checks.absolute(name, &got, expected, case.tolerance("abs"));
    }
    Outcome::Compared(checks)
}

/// A count or a pair of them.
fn pair(case: &Case, name: &str) -> [usize; 2] {
    let value = &case.args()[name];
    let count = |value: &serde_json::Value| value.as_u64().map(|n| n as usize);
    let both = value.as_array().map_or([count(value); 2], |pair| [count(&pair[0]), count(&pair[1])]);
    both.map(|n| n.unwrap_or_else(|| panic!("{}: args.{name} is no size", case.name)))
}

/// The table of MAE; that of MoCo v3 is read from checkpoints, not computed.
fn sincos(case: &Case) -> Outcome {
    let dim = case.arg_usize("dim");
    let mut checks = Checks::default();
    let mut table = vec![0.0; dim];
    table.extend(sincos_table(pair(case, "mae_grid"), dim));
    checks.absolute("mae", &table, case.tensor("mae"), case.tolerance("abs"));
    Outcome::Compared(checks)
}

fn resized(case: &Case, kinds: &[(&str, Bicubic)], num_prefix: usize) -> Outcome {
    let (from, to) = (pair(case, "old"), pair(case, "new"));
    let table = case.tensor("pos_embed");
    let dim = table.shape[2];
    let mut checks = Checks::default();
    for (name, kind) in kinds {
        let Some(expected) = case.tensors.get(*name) else { continue };
        let got = resize(table, from, to, *kind, num_prefix * dim, dim);
        checks.absolute(name, &got, expected, case.tolerance("abs"));
    }
    Outcome::Compared(checks)
}

fn resize(table: &Array, from: [usize; 2], to: [usize; 2], kind: Bicubic, prefix: usize, dim: usize) -> Vec<f32> {
    let (fixed, grid) = table.values.split_at(prefix);
    let mut out: Vec<f32> = fixed.iter().map(|&value| value as f32).collect();
    for row in resize_matrix(from, to, kind).chunks(from[0] * from[1]) {
        for channel in 0..dim {
            let value: f64 = row.iter().zip(grid.chunks(dim)).map(|(w, token)| f64::from(*w) * token[channel]).sum();
            out.push(value as f32);
        }
    }
    out
}
