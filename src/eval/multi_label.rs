//! How well several labels an image are told.
//!
//! Average precision, area under the ROC curve, precision, recall and F1 as scikit-learn's with `zero_division = 0`; a class is answered where its probability is
//! at least one half.

use serde::Serialize;

use super::features::{EvalError, Features};

/// How labelled images were told, as fractions. What a class without, or with nothing but, positive images cannot tell is left out of the means.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MultiLabel {
    /// What the images are: `test` or `validation`.
    pub on: &'static str,
    /// Number of images.
    pub images: usize,
    /// Mean average precision of the classes that have an image.
    pub mean_average_precision: f64,
    /// Mean area under the ROC curve of the classes that have an image, and lack one; none: there is no such class.
    pub mean_auroc: Option<f64>,
    /// Mean F1 of the classes that have an image or were answered.
    pub macro_f1: f64,
    /// F1 over all pairs of image and class.
    pub micro_f1: f64,
    /// Share of the images whose classes are told without an error.
    pub exact_match: f64,
    /// Share of the pairs of image and class that are told wrongly.
    pub hamming_loss: f64,
    /// Mean binary cross-entropy over images and classes.
    pub loss: f64,
    /// Mean average precision of scores that tell nothing: the mean share of images of these classes.
    pub chance: f64,
    /// Each class.
    #[serde(skip)]
    pub classes: Vec<LabelResult>,
}

/// How one class was told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LabelResult {
    /// Images of the class.
    pub images: usize,
    /// Share of the answers that are right; 0 without an answer.
    pub precision: f64,
    /// Share of the images that are found; 0 without an image.
    pub recall: f64,
    /// Harmonic mean of both.
    pub f1: f64,
    /// Sum of precisions at each score, weighted by the recall that it adds.
    pub average_precision: Option<f64>,
    /// Chance that an image of the class has a higher score than another; equal ones count half.
    pub auroc: Option<f64>,
}

impl MultiLabel {
    /// Judges logits, a row for each set of labels.
    ///
    /// # Errors
    /// When there is no row, or a logit is not finite.
    ///
    /// # Panics
    /// When the shapes disagree, or a label is none of the classes.
    pub fn of(on: &'static str, logits: Vec<f32>, classes: usize, labels: &[Vec<u32>]) -> Result<Self, EvalError> {
        let logits = Features::new(logits, classes)?;
        assert_eq!(logits.rows(), labels.len(), "labels for each row of logits");
        let images = labels.len();
        let mut wanted = vec![false; images * classes];
        for (row, labels) in wanted.chunks_exact_mut(classes).zip(labels) {
            for &label in labels {
                row[label as usize] = true;
            }
        }
        let scores: Vec<f64> = (0..images).flat_map(|row| logits.row(row).iter().map(|&s| f64::from(s))).collect();
        let (mut wrong, mut exact, mut loss) = (0usize, 0usize, 0.0);
        for (scores, wanted) in scores.chunks_exact(classes).zip(wanted.chunks_exact(classes)) {
            let missed = scores.iter().zip(wanted).filter(|&(&score, &wanted)| (score >= 0.0) != wanted).count();
            wrong += missed;
            exact += usize::from(missed == 0);
            loss += scores.iter().zip(wanted).map(|(&score, &wanted)| entropy(score, wanted)).sum::<f64>();
        }
        let each: Vec<LabelResult> = (0..classes)
            .map(|class| {
                let of = |values: usize| values * classes + class;
                label_result((0..images).map(|image| (scores[of(image)], wanted[of(image)])).collect())
            })
            .collect();
        let answered: Vec<usize> = (0..classes)
            .map(|class| (0..images).filter(|image| scores[image * classes + class] >= 0.0).count())
            .collect();
        let positives: usize = each.iter().map(|class| class.images).sum();
        let answers: usize = answered.iter().sum();
        let right = (positives + answers - wrong) as f64 / 2.0;
        let seen = each.iter().zip(&answered).filter(|(class, answered)| class.images > 0 || **answered > 0);
        let present = || each.iter().filter(|class| class.images > 0);
        let pairs = (images * classes) as f64;
        Ok(Self {
            on,
            images,
            mean_average_precision: mean(present().filter_map(|class| class.average_precision)).unwrap_or(0.0),
            mean_auroc: mean(each.iter().filter_map(|class| class.auroc)),
            macro_f1: mean(seen.map(|(class, _)| class.f1)).unwrap_or(0.0),
            micro_f1: if positives + answers == 0 { 0.0 } else { 2.0 * right / (positives + answers) as f64 },
            exact_match: exact as f64 / images as f64,
            hamming_loss: wrong as f64 / pairs,
            loss: loss / pairs,
            chance: mean(present().map(|class| class.images as f64 / images as f64)).unwrap_or(0.0),
            classes: each,
        })
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0usize), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

/// Binary cross-entropy of a logit.
fn entropy(logit: f64, wanted: bool) -> f64 {
    let towards = if wanted { logit } else { -logit };
    (-towards).max(0.0) + (-towards.abs()).exp().ln_1p()
}

/// Judges the logits of one class, each with whether its image is of the class.
fn label_result(mut scored: Vec<(f64, bool)>) -> LabelResult {
    let total = scored.len();
    let images = scored.iter().filter(|(_, wanted)| *wanted).count();
    let answers = scored.iter().filter(|(score, _)| *score >= 0.0).count();
    let right = scored.iter().filter(|(score, wanted)| *score >= 0.0 && *wanted).count();
    let share = |of: usize| if of == 0 { 0.0 } else { right as f64 / of as f64 };
    let f1 = if images + answers == 0 { 0.0 } else { 2.0 * right as f64 / (images + answers) as f64 };
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (mut found, mut seen, mut precisions, mut above) = (0usize, 0usize, 0.0, 0.0);
    // images of one score together: their order says nothing
    for same in scored.chunk_by(|a, b| a.0 == b.0) {
        let more = same.iter().filter(|(_, wanted)| *wanted).count();
        let others = (same.len() - more) as f64;
        // pairs of an image of the class and another one below it
        above += others * (found as f64 + 0.5 * more as f64);
        found += more;
        seen += same.len();
        precisions += more as f64 * found as f64 / seen as f64;
    }
    let others = total - images;
    LabelResult {
        images,
        precision: share(answers),
        recall: share(images),
        f1,
        average_precision: (images > 0).then(|| precisions / images as f64),
        auroc: (images > 0 && others > 0).then(|| above / (images as f64 * others as f64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_scikit_learn() {
        // scikit-learn on the same float32 logits: average_precision_score, roc_auc_score, f1_score(zero_division=0), hamming_loss, accuracy_score; the loss by
        // torch's binary_cross_entropy_with_logits
        let (rows, classes) = (40usize, 4usize);
        let logits: Vec<f32> = (0..rows * classes).map(|i| (((i * i) % 23) as f32 - 11.0) / 4.0).collect();
        let labels: Vec<Vec<u32>> = (0..rows)
            .map(|row| {
                (0..classes - 1).filter(|class| (row * 7 + class * 3) % 5 < 2).map(|class| class as u32).collect()
            })
            .collect();
        let result = MultiLabel::of("test", logits, classes, &labels).unwrap();
        let close = |got: f64, expected: f64| assert!((got - expected).abs() < 1e-6, "{got}, expected {expected}");
        close(result.mean_average_precision, 0.414_727_795);
        close(result.mean_auroc.unwrap(), 0.480_034_722);
        close(result.macro_f1, 0.266_666_667);
        close(result.micro_f1, 0.307_692_308);
        close(result.exact_match, 0.125);
        close(result.hamming_loss, 0.45);
        close(result.loss, 0.840_206_348);
        assert_eq!(result.classes[3].average_precision, None);
        assert_eq!(result.classes[3].images, 0);
    }

    #[test]
    fn equal_scores_tell_nothing() {
        let labels = [vec![0], vec![], vec![0, 1], vec![1]];
        let result = MultiLabel::of("test", vec![0.0; 8], 2, &labels).unwrap();
        assert_eq!((result.mean_average_precision, result.mean_auroc, result.chance), (0.5, Some(0.5), 0.5));
        assert!((result.loss - 2.0f64.ln()).abs() < 1e-12);
        let sure = vec![9.0, -9.0, -9.0, -9.0, 9.0, 9.0, -9.0, 9.0];
        let right = MultiLabel::of("test", sure, 2, &labels).unwrap();
        assert_eq!((right.mean_average_precision, right.mean_auroc, right.exact_match), (1.0, Some(1.0), 1.0));
        assert_eq!((right.micro_f1, right.macro_f1, right.hamming_loss), (1.0, 1.0, 0.0));
        assert!(MultiLabel::of("test", vec![f32::NAN, 0.0], 2, &labels[..1]).is_err());
    }

    #[test]
    fn a_class_of_all_images_or_none_has_no_roc_curve() {
        let result = MultiLabel::of("test", vec![1.0, -1.0, 2.0, -3.0], 2, &[vec![0], vec![0]]).unwrap();
        assert_eq!(result.mean_auroc, None);
        assert_eq!((result.classes[0].auroc, result.classes[1].average_precision), (None, None));
        assert_eq!((result.mean_average_precision, result.micro_f1), (1.0, 1.0));
    }
}
