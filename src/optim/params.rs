//! Where each parameter lies in the flat vector.

use std::ops::Range;

/// A parameter as a stretch of the flat vectors of weights and gradients. Module visit order gives the order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Module path, which is the checkpoint key.
    pub path: String,
    /// Shape of the tensor; its length is the rank.
    pub shape: Vec<usize>,
    /// First element in the flat vector.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl ParamSpec {
    /// Lays parameters one behind the other, in the order given.
    pub fn layout(params: impl IntoIterator<Item = (String, Vec<usize>)>) -> Vec<Self> {
        let mut offset = 0;
        let place = |(path, shape): (String, Vec<usize>)| {
            let len = shape.iter().product();
            let spec = Self { path, shape, offset, len };
            offset += len;
            spec
        };
        params.into_iter().map(place).collect()
    }

    /// Returns its stretch of the flat vector.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_lie_one_behind_the_other() {
        let specs = ParamSpec::layout([
            ("stem.weight".to_owned(), vec![4, 3]),
            ("stem.bias".to_owned(), vec![4]),
            ("scale".to_owned(), vec![]),
            ("cls_token".to_owned(), vec![1, 1, 4]),
        ]);
        let ranges: Vec<_> = specs.iter().map(ParamSpec::range).collect();
        assert_eq!(ranges, [0..12, 12..16, 16..17, 17..21]);
    }
}
