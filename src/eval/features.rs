//! Features on the host: the input of every measure.

/// Reasons why a measure has no value.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EvalError {
    /// No image, or features without a dimension.
    #[error("there are no features to measure\nhint: the evaluation source has no images; check `eval` in the recipe")]
    Empty,
    /// A feature is NaN or infinite.
    #[error(
        "feature {column} of image {row} is {value}\n\
         hint: the weights are not finite or overflow; evaluate an earlier checkpoint and lower the learning rate"
    )]
    NotFinite {
        /// Index of the image.
        row: usize,
        /// Index of the feature.
        column: usize,
        /// What it is, as text.
        value: String,
    },
    /// The measure is not defined for so few images.
    #[error("{measure} needs at least {needed} images, found {found}")]
    TooFew {
        /// Name of the measure.
        measure: &'static str,
        /// Smallest number of images.
        needed: usize,
        /// Number given.
        found: usize,
    },
    /// The covariance within groups cannot be inverted.
    #[error("the covariance within groups of views is singular\nhint: use a larger delta than {delta}")]
    Singular {
        /// What was added to its diagonal.
        delta: f64,
    },
}

/// Finite features of at least one image, `[rows, dim]` row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Features {
    rows: usize,
    dim: usize,
    values: Vec<f32>,
}

impl Features {
    /// Takes features row by row and checks them once, so that no measure has to.
    ///
    /// # Errors
    /// When there is no feature, or one is not finite.
    ///
    /// # Panics
    /// When `values` are not whole rows of `dim`.
    pub fn new(values: Vec<f32>, dim: usize) -> Result<Self, EvalError> {
        if dim == 0 || values.is_empty() {
            return Err(EvalError::Empty);
        }
        assert_eq!(values.len() % dim, 0, "{} values are not whole rows of {dim}", values.len());
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(EvalError::NotFinite { row: at / dim, column: at % dim, value: values[at].to_string() });
        }
        Ok(Self { rows: values.len() / dim, dim, values })
    }

    /// Returns the number of images.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of features of an image.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Returns the features of one image.
    ///
    /// # Panics
    /// When there is no such image.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.dim..][..self.dim]
    }

    /// Returns the Euclidean length of each row, at least 1e-12: torch's `normalize` divides by no less, and a zero vector
    /// stays zero.
    pub(super) fn lengths(&self) -> Vec<f64> {
        let length = |row: &[f32]| row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        self.values.chunks_exact(self.dim).map(|row| length(row).max(1e-12)).collect()
    }

    /// Returns the rows in double precision.
    pub(super) fn to_f64(&self) -> Vec<f64> {
        self.values.iter().map(|&v| f64::from(v)).collect()
    }

    /// Returns the rows divided by their lengths.
    pub(super) fn normalized(&self) -> Vec<f64> {
        let mut values = self.to_f64();
        for (row, length) in values.chunks_exact_mut(self.dim).zip(self.lengths()) {
            row.iter_mut().for_each(|v| *v /= length);
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_and_non_finite_features_are_refused_with_their_place() {
        assert_eq!(Features::new(vec![], 3), Err(EvalError::Empty));
        assert_eq!(Features::new(vec![], 0), Err(EvalError::Empty));
        let error = Features::new(vec![0.0, 1.0, 2.0, f32::NAN], 2).unwrap_err().to_string();
        assert!(error.starts_with("feature 1 of image 1 is NaN"), "{error}");
        let error = Features::new(vec![f32::NEG_INFINITY], 1).unwrap_err().to_string();
        assert!(error.starts_with("feature 0 of image 0 is -inf"), "{error}");
    }

    #[test]
    fn a_zero_row_stays_zero_and_huge_values_do_not_overflow() {
        let features = Features::new(vec![0.0, 0.0, f32::MAX, f32::MAX], 2).unwrap();
        let normalized = features.normalized();
        assert_eq!(normalized[..2], [0.0, 0.0]);
        assert!((normalized[2] - 0.5f64.sqrt()).abs() < 1e-12);
    }
}
