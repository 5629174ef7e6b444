//! Limits of single numbers, each with the value and the limit in the message.

use std::fmt::Display;

use super::Problem;

/// No network in use is wider or deeper by a factor of ten.
pub const MAX_WIDTH: usize = 65_536;
/// See [`MAX_WIDTH`].
pub const MAX_DEPTH: usize = 1_000;

/// Collects problems. Each check returns whether the value passed.
#[derive(Debug, Default)]
pub struct Numbers {
    /// What was found.
    pub problems: Vec<Problem>,
}

/// Where a product of two numbers is still a number.
const SINGLE: std::ops::RangeInclusive<f64> = 1e-30..=1e30;

impl Numbers {
    /// Adds a problem.
    pub fn push(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    /// Says what a value must be instead.
    pub fn limit(&mut self, key: &str, value: impl Display, limit: &str) {
        self.push(Problem::at(key, format!("`{key}` is {value}, but must be {limit}")));
    }

    fn require(&mut self, passed: bool, key: &str, value: impl Display, limit: &str) -> bool {
        if !passed {
            self.limit(key, value, limit);
        }
        passed
    }

    /// Requires at least 1.
    pub fn count(&mut self, key: &str, value: usize) -> bool {
        self.require(value >= 1, key, value, "at least 1")
    }

    /// A size that memory must hold: beyond `most` it is a slip of the finger, and would end in an abort for lack of memory.
    pub fn size(&mut self, key: &str, value: usize, most: usize) -> bool {
        self.count(key, value) && self.require(value <= most, key, value, &format!("at most {most}"))
    }

    /// Requires a finite number greater than 0.
    pub fn positive(&mut self, key: &str, value: f64) -> bool {
        self.require(value > 0.0 && value.is_finite(), key, value, "greater than 0 and finite")
            && self.require(
                SINGLE.contains(&value),
                key,
                value,
                "from 1e-30 to 1e30: networks compute in single precision",
            )
    }

    /// Requires a finite number of at least 0.
    pub fn not_negative(&mut self, key: &str, value: f64) -> bool {
        self.require(value >= 0.0 && value.is_finite(), key, value, "at least 0 and finite")
            && self.require(value <= *SINGLE.end(), key, value, "at most 1e30: networks compute in single precision")
    }

    /// Requires a number from 0 to 1.
    pub fn probability(&mut self, key: &str, value: f64) -> bool {
        self.require((0.0..=1.0).contains(&value), key, value, "from 0 to 1")
    }

    /// A factor of an exponential average: 1 would never move.
    pub fn momentum(&mut self, key: &str, value: f64) -> bool {
        self.require((0.0..1.0).contains(&value), key, value, "at least 0 and less than 1")
    }

    /// A range of positive numbers, smaller end first.
    pub fn range(&mut self, key: &str, [low, high]: [f64; 2]) -> bool {
        let shown = format!("[{low}, {high}]");
        self.require(low > 0.0 && high.is_finite(), key, &shown, "two finite numbers greater than 0")
            && self.require(low <= high, key, &shown, "a range with the smaller number first")
    }
}
