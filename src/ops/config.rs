//! The `[ops]` table of a recipe.

use std::sync::atomic::{AtomicU8, Ordering};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which operations compute on the CPU; each choice has bits of its own. On other devices burn's compute anyway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OpsConfig {
    /// Every convolution is a plain matrix product: Winograd's algorithm, whose error is up to twice as large, is not used. Changes nothing beside `plain`.
    pub exact: bool,
    /// burn's own operations instead of ours: a few times slower on the CPU, to compare with.
    pub plain: bool,
}

const EXACT: u8 = 1;
const PLAIN: u8 = 2;
static CHOSEN: AtomicU8 = AtomicU8::new(0);

/// Sets what the whole process computes with, from the next forward pass on; a graph recorded before keeps its algorithms.
pub fn configure(config: OpsConfig) {
    let OpsConfig { exact, plain } = config;
    CHOSEN.store(u8::from(exact) * EXACT + u8::from(plain) * PLAIN, Ordering::Relaxed);
}

/// See [`OpsConfig::exact`].
pub(super) fn is_exact() -> bool {
    CHOSEN.load(Ordering::Relaxed) & EXACT != 0
}

/// See [`OpsConfig::plain`].
pub(super) fn is_plain() -> bool {
    CHOSEN.load(Ordering::Relaxed) & PLAIN != 0
}
