//! Top-k accuracy.

/// Returns the fraction of rows whose label is among the `k` largest scores.
///
/// Of equal scores the smaller class goes first; a NaN score never counts as right.
///
/// # Shapes
/// `scores`: `[labels.len(), classes]`, row by row.
///
/// # Panics
/// When the shapes disagree or there is no row.
pub fn top_k_accuracy(scores: &[f64], classes: usize, labels: &[u32], k: usize) -> f64 {
    assert!(classes > 0 && !labels.is_empty(), "accuracy needs rows and classes");
    assert_eq!(scores.len(), classes * labels.len(), "scores are not [labels, classes]");
    let rows = scores.chunks_exact(classes).zip(labels);
    let right = rows.filter(|(row, label)| place(row, **label as usize).is_some_and(|place| place < k)).count();
    right as f64 / labels.len() as f64
}

/// Returns the accuracy of always answering the most frequent class, 0 without labels: what a useful network exceeds.
pub fn chance(labels: &[u32]) -> f64 {
    let mut counts = std::collections::BTreeMap::new();
    for label in labels {
        *counts.entry(label).or_insert(0usize) += 1;
    }
    counts.values().max().map_or(0.0, |&most| most as f64 / labels.len() as f64)
}

/// Returns how many classes go before `class`; `None` for a class that has no score.
fn place(scores: &[f64], class: usize) -> Option<usize> {
    let own = *scores.get(class).filter(|score| !score.is_nan())?;
    let before = |other: usize| scores[other] > own || (scores[other] == own && other < class);
    Some((0..scores.len()).filter(|&other| before(other)).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chance_is_the_share_of_the_largest_class() {
        assert_eq!(chance(&[0, 1, 1, 3]), 0.5);
        assert_eq!(chance(&[7]), 1.0);
        assert_eq!(chance(&[]), 0.0);
    }

    #[test]
    fn ties_go_to_the_smaller_class_and_unknown_labels_are_wrong() {
        let scores = [1.0, 1.0, 0.0, f64::NAN, 2.0, 3.0];
        assert_eq!(top_k_accuracy(&scores, 3, &[0, 2], 1), 1.0);
        assert_eq!(top_k_accuracy(&scores, 3, &[1, 0], 1), 0.0);
        assert_eq!(top_k_accuracy(&scores, 3, &[1, 1], 2), 1.0);
        assert_eq!(top_k_accuracy(&scores, 3, &[7, 0], 3), 0.0);
    }
}
