//! What layers put out, looked at while a step is explained.

use std::cell::RefCell;

use burn::module::ParamId;
use burn::tensor::Tensor;

/// Values of one tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// How many there are.
    pub count: u64,
    /// How many of them are NaN or infinite.
    pub not_finite: u64,
    /// Smallest finite value; 0 where there is none.
    pub min: f64,
    /// Largest finite value.
    pub max: f64,
    /// Root of the mean square of the finite values.
    pub rms: f64,
}

impl Spread {
    /// Looks at values.
    #[must_use]
    pub fn of(values: &[f32]) -> Self {
        let finite = || values.iter().filter(|value| value.is_finite()).map(|value| f64::from(*value));
        let count = finite().count();
        if count == 0 {
            return Self { count: values.len() as u64, not_finite: values.len() as u64, ..Self::default() };
        }
        let squares: f64 = finite().map(|value| value * value).sum();
        Self {
            count: values.len() as u64,
            not_finite: (values.len() - count) as u64,
            min: finite().fold(f64::INFINITY, f64::min),
            max: finite().fold(f64::NEG_INFINITY, f64::max),
            rms: (squares / count as f64).sqrt(),
        }
    }
}

/// What a layer put out; it is known by one of its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// One of the layer's parameters.
    pub layer: ParamId,
    /// Its output.
    pub output: Spread,
}

thread_local! {
    static SEEN: RefCell<Option<Vec<Seen>>> = const { RefCell::new(None) };
}

/// Runs a forward pass on this thread and tells what its layers put out, in the order they ran.
pub fn traced<R>(pass: impl FnOnce() -> R) -> (R, Vec<Seen>) {
    SEEN.set(Some(Vec::new()));
    let result = pass();
    (result, SEEN.take().unwrap_or_default())
}

/// Notes a layer's output, if somebody looks.
pub(super) fn seen<const D: usize>(layer: ParamId, output: &Tensor<D>) {
    let watched = SEEN.with_borrow(Option::is_some);
    if !watched {
        return;
    }
    let values = output.clone().into_data().try_to_vec::<f32>().expect("layers put out fp32");
    let output = Spread::of(&values);
    SEEN.with_borrow_mut(|seen| seen.iter_mut().for_each(|seen| seen.push(Seen { layer, output })));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_not_finite_are_counted_apart() {
        let spread = Spread::of(&[3.0, f32::NAN, -4.0, f32::INFINITY]);
        let rms = 12.5f64.sqrt();
        assert_eq!(spread, Spread { count: 4, not_finite: 2, min: -4.0, max: 3.0, rms });
        assert_eq!(Spread::of(&[f32::NAN]), Spread { count: 1, not_finite: 1, ..Spread::default() });
        assert_eq!(Spread::of(&[]), Spread::default());
    }
}
