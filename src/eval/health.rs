//! Signs of collapse, as advice.

use serde::Serialize;

/// Something that a user should look at: which guard, what was seen, what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Stable name of the guard.
    pub code: &'static str,
    /// What was seen and what it means.
    pub reason: String,
    /// What to do.
    pub remedy: String,
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "warning[{}]: {}\nhint: {}", self.code, self.reason, self.remedy)
    }
}

/// Judges features by their embedding standard deviation and `RankMe` (epsilon 1e-7), `dim` being their width.
///
/// * `collapse`: `RankMe` below 2 or a standard deviation below `0.1 / sqrt(dim)`, a tenth of that of features that
///   fill the sphere (`1 / sqrt(dim)`, `SimSiam`, figure 2): the mean cosine of two images is then above 0.99, and all
///   images look the same. A value that is not a number counts as collapsed. Features of one dimension have rank 1 and
///   are judged by their deviation alone.
/// * `low-rank`: `RankMe` below `0.05 dim`: fewer than one dimension in twenty is in use (dimensional collapse, Jing et
///   al., 2022, <https://arxiv.org/abs/2110.09348>). Small data sets and early checkpoints show it too, so it is
///   advice.
pub fn health(std: f64, rankme: f64, dim: usize) -> Vec<Warning> {
    let full = 1.0 / (dim as f64).sqrt();
    let mut warnings = Vec::new();
    // a comparison with NaN is false, so that NaN warns
    let spread = std >= 0.1 * full;
    let ranked = rankme >= 2.0 || (dim < 2 && !rankme.is_nan());
    if !(spread && ranked) {
        warnings.push(Warning {
            code: "collapse",
            reason: format!(
                "all images get nearly the same features: embedding std {std:.4} (healthy about {full:.4}), \
                 RankMe {rankme:.1} of {dim}"
            ),
            remedy: "lower the learning rate, check that the views differ (`autodidact recipe show`), \
                     and start again from a checkpoint before the loss jumped"
                .to_owned(),
        });
    } else if rankme < 0.05 * dim as f64 {
        warnings.push(Warning {
            code: "low-rank",
            reason: format!("features use few of their dimensions: RankMe {rankme:.1} of {dim}"),
            remedy: "train longer or on more images, use stronger augmentation, or a narrower network".to_owned(),
        });
    }
    warnings
}

/// Judges a loss that should have left its starting point: `uniform` is its value when the network tells nothing apart,
/// such as the logarithm of the number of prototypes (DINO: 8.3178 for 4096, `SwAV`) or of candidates (SimCLR:
/// `ln(2B - 1)`).
pub fn plateau(loss: f64, uniform: f64) -> Option<Warning> {
    // a comparison with NaN is false, so that NaN warns
    let moved = (loss - uniform).abs() > 0.02 * uniform.abs();
    (!moved).then(|| Warning {
        code: "loss-plateau",
        reason: format!("the loss is {loss:.4}, and {uniform:.4} is what a network gets that tells nothing apart"),
        remedy: "lower the temperature, raise the learning rate or lengthen its warm-up; with few images use fewer prototypes and a lower \
                 teacher momentum"
            .to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(std: f64, rankme: f64, dim: usize) -> Vec<&'static str> {
        health(std, rankme, dim).into_iter().map(|warning| warning.code).collect()
    }

    #[test]
    fn thresholds() {
        let full = 1.0 / 512f64.sqrt();
        assert_eq!(codes(full, 200.0, 512), [""; 0]);
        assert_eq!(codes(0.11 * full, 26.0, 512), [""; 0]);
        assert_eq!(codes(0.09 * full, 200.0, 512), ["collapse"]);
        assert_eq!(codes(full, 1.9, 512), ["collapse"]);
        assert_eq!(codes(full, 25.0, 512), ["low-rank"]);
        assert_eq!(codes(f64::NAN, 200.0, 512), ["collapse"]);
        assert_eq!(codes(full, f64::NAN, 512), ["collapse"]);
        assert_eq!(codes(1.0, 1.0, 1), [""; 0]);
    }

    #[test]
    fn a_loss_at_its_starting_point_is_said() {
        let uniform = 4096f64.ln();
        assert!(plateau(8.3178, uniform).is_some());
        assert!(plateau(f64::NAN, uniform).is_some());
        assert!(plateau(7.0, uniform).is_none());
    }
}
