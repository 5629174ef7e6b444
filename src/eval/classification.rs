//! What a classifier gets right and wrong.
//!
//! Precision, recall and F1 as scikit-learn's with `zero_division = 0`; expected calibration error of Guo et al., 2017,
//! <https://arxiv.org/abs/1706.04599>, equation 3, with 15 bins of the largest probability, open at the lower end.

use std::collections::BTreeMap;

use serde::Serialize;

use super::accuracy::{chance, top_k_accuracy};
use super::features::{EvalError, Features};
use super::multi_label::MultiLabel;

/// Bins of the calibration error; Guo et al.'s number.
const BINS: usize = 15;

/// How labelled images were classified, as fractions.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Classification {
    /// What the images are: `test` or `validation`.
    pub on: &'static str,
    /// Number of images.
    pub images: usize,
    /// Share with the right class first.
    pub top1: f64,
    /// Share with the right class among the first five.
    pub top5: f64,
    /// Mean cross-entropy.
    pub loss: f64,
    /// Mean recall of the classes that have images.
    pub balanced_accuracy: f64,
    /// Mean F1 of the classes that have images or were answered.
    pub macro_f1: f64,
    /// Expected calibration error, 15 bins.
    pub calibration_error: f64,
    /// Accuracy of always answering the most frequent class.
    pub chance: f64,
    /// Each class.
    #[serde(skip)]
    pub classes: Vec<ClassResult>,
    /// Images of each pair of a class and the class answered, where there are any: of a million classes most pairs have none.
    #[serde(skip)]
    pub confusion: BTreeMap<(usize, usize), usize>,
}

/// How a classifier did.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Classified {
    /// Images of one class each.
    One(Classification),
    /// Images of several classes, or none.
    Several(MultiLabel),
}

/// How the images of one class were classified.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassResult {
    /// Images of the class.
    pub images: usize,
    /// Share of the answers that are right; 0 without an answer.
    pub precision: f64,
    /// Share of the images that are found; 0 without an image.
    pub recall: f64,
    /// Harmonic mean of both.
    pub f1: f64,
}

impl Classification {
    /// Judges logits, a row for each label. Of equal logits the smaller class is answered.
    ///
    /// # Errors
    /// When there is no row, or a logit is not finite.
    ///
    /// # Panics
    /// When the shapes disagree, or a label is none of the classes.
    pub fn of(on: &'static str, logits: Vec<f32>, classes: usize, labels: &[u32]) -> Result<Self, EvalError> {
        let logits = Features::new(logits, classes)?;
        assert_eq!(logits.rows(), labels.len(), "a label for each row of logits");
        let images = labels.len() as f64;
        let scores: Vec<f64> =
            (0..labels.len()).flat_map(|row| logits.row(row).iter().map(|&s| f64::from(s))).collect();
        let mut confusion = BTreeMap::new();
        let mut bins = [(0usize, 0usize, 0.0f64); BINS]; // images, right ones, sum of confidences
        let mut loss = 0.0;
        for (row, &label) in scores.chunks_exact(classes).zip(labels) {
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let answer = row.iter().position(|&score| score == largest).expect("finite scores have a largest");
            let sum: f64 = row.iter().map(|score| (score - largest).exp()).sum();
            loss += sum.ln() + largest - row[label as usize];
            *confusion.entry((label as usize, answer)).or_insert(0usize) += 1;
            let confidence = 1.0 / sum;
            let bin = ((confidence * BINS as f64).ceil() as usize).clamp(1, BINS) - 1;
            bins[bin].0 += 1;
            bins[bin].1 += usize::from(answer == label as usize);
            bins[bin].2 += confidence;
        }
        let gaps = bins.iter().map(|&(_, right, confidence)| (right as f64 - confidence).abs());
        let mut counts = vec![Counts::default(); classes];
        for (&(class, answer), &images) in &confusion {
            counts[class].images += images;
            counts[answer].answers += images;
            counts[class].right += if class == answer { images } else { 0 };
        }
        let per_class: Vec<ClassResult> = counts.iter().map(Counts::result).collect();
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let recalls = per_class.iter().filter(|class| class.images > 0).map(|class| class.recall).collect();
        let seen = per_class.iter().enumerate().filter(|(index, class)| class.images > 0 || counts[*index].answers > 0);
        Ok(Self {
            on,
            images: labels.len(),
            top1: top_k_accuracy(&scores, classes, labels, 1),
            top5: top_k_accuracy(&scores, classes, labels, 5),
            loss: loss / images,
            balanced_accuracy: mean(recalls),
            macro_f1: mean(seen.map(|(_, class)| class.f1).collect()),
            calibration_error: gaps.sum::<f64>() / images,
            chance: chance(labels),
            classes: per_class,
            confusion,
        })
    }
}

/// What is counted of one class.
#[derive(Clone, Debug, Default)]
struct Counts {
    images: usize,
    answers: usize,
    right: usize,
}

impl Counts {
    fn result(&self) -> ClassResult {
        let Self { images, answers, right } = *self;
        let share = |of: usize| if of == 0 { 0.0 } else { right as f64 / of as f64 };
        let both = images + answers;
        let f1 = if both == 0 { 0.0 } else { 2.0 * right as f64 / both as f64 };
        ClassResult { images, precision: share(answers), recall: share(images), f1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_scikit_learn_and_torchmetrics() {
        // scikit-learn 1.9.1 on the same float32 logits: precision_recall_fscore_support(zero_division=0), log_loss, balanced_accuracy_score,
        // f1_score(average="macro"); torchmetrics: multiclass_calibration_error(n_bins=15, norm="l1")
        let (rows, classes) = (40, 6);
        let logits: Vec<f32> = (0..rows * classes)
            .map(|i| ((i * i % 97) as f32 / 97.0 - 0.5) * 6.0 * ((i % 7) as f32 / 7.0 + 0.3))
            .collect();
        let labels: Vec<u32> = (0..rows).map(|i| ((i * 5 + i / 7) % 5) as u32).collect();
        let result = Classification::of("test", logits, classes, &labels).unwrap();
        let close = |got: f64, expected: f64| assert!((got - expected).abs() < 1e-6, "{got}, expected {expected}");
        close(result.top1, 0.225);
        close(result.top5, 0.875);
        close(result.loss, 2.346_190_938);
        close(result.balanced_accuracy, 0.221_428_571);
        close(result.macro_f1, 0.194_688_645);
        close(result.calibration_error, 0.320_704_987);
        let expected = [(0.375, 0.25, 0.3), (0.0, 0.0, 0.0), (0.285_714_286, 0.285_714_286, 0.285_714_286)];
        let more = [(0.166_666_667, 0.142_857_143, 0.153_846_154), (0.428_571_429, 0.428_571_429, 0.428_571_429)];
        for (class, (precision, recall, f1)) in result.classes.iter().zip(expected.into_iter().chain(more)) {
            close(class.precision, precision);
            close(class.recall, recall);
            close(class.f1, f1);
        }
        assert_eq!(result.confusion.values().sum::<usize>(), rows);
        assert_eq!(result.classes[5].images, 0);
    }

    #[test]
    fn certain_and_right_is_calibrated_and_uncertain_is_a_coin() {
        let logits = vec![50.0, 0.0, 0.0, 50.0];
        let result = Classification::of("test", logits, 2, &[0, 1]).unwrap();
        assert!(result.calibration_error < 1e-12 && result.loss < 1e-12);
        assert_eq!((result.top1, result.macro_f1, result.balanced_accuracy, result.chance), (1.0, 1.0, 1.0, 0.5));
        let coin = Classification::of("test", vec![0.0; 4], 2, &[0, 1]).unwrap();
        assert_eq!((coin.top1, coin.calibration_error), (0.5, 0.0));
        assert!((coin.loss - 2.0f64.ln()).abs() < 1e-12);
        assert_eq!(coin.classes[1], ClassResult { images: 1, ..ClassResult::default() });
        // sure of the wrong class
        let wrong = Classification::of("test", vec![50.0, 0.0], 2, &[1]).unwrap();
        assert!((wrong.calibration_error - 1.0).abs() < 1e-9 && (wrong.loss - 50.0).abs() < 1e-9);
    }

    #[test]
    fn a_hundred_thousand_classes_need_no_square_of_them() {
        let classes = 100_000;
        let mut logits = vec![0.0; 2 * classes];
        logits[classes - 1] = 1.0;
        let result = Classification::of("test", logits, classes, &[classes as u32 - 1, 7]).unwrap();
        assert_eq!((result.top1, result.confusion.len()), (0.5, 2));
        assert_eq!((result.classes[classes - 1].recall, result.classes[7].recall), (1.0, 0.0));
    }

    #[test]
    fn what_is_not_finite_is_an_error() {
        assert!(Classification::of("test", vec![f32::NAN, 0.0], 2, &[0]).is_err());
        assert!(Classification::of("test", Vec::new(), 2, &[]).is_err());
    }
}
