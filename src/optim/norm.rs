//! Euclidean norms of flat vectors with one order of additions on every machine.

/// Independent accumulators: what vector units of 512 bits add at once, and enough to hide the latency of narrower ones.
const LANES: usize = 8;

/// Returns the sum of squares in `f64`.
///
/// The order is fixed: element `i` goes to lane `i % 8`, each lane adds from left to right, and the lanes are added as
/// `((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))`. A square of two `f32` is exact in `f64`, so only the additions round.
#[must_use]
pub fn sum_of_squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let (rows, rest) = values.as_chunks::<LANES>();
    for row in rows {
        for (lane, &value) in lanes.iter_mut().zip(row) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(value) * f64::from(value);
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Returns the Euclidean norm; see [`sum_of_squares`] for the order of additions.
#[must_use]
pub fn norm(values: &[f32]) -> f64 {
    sum_of_squares(values).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_a_plain_sum() {
        for len in [0, 1, 7, 8, 9, 1000] {
            let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
            let plain: f64 = values.iter().map(|&v| f64::from(v).powi(2)).sum();
            assert!((sum_of_squares(&values) - plain).abs() <= 1e-12 * plain, "{len}");
        }
    }

    #[test]
    fn neither_overflows_nor_hides_nan() {
        assert_eq!(norm(&[3e30, 4e30]), f64::from(3e30f32).hypot(f64::from(4e30f32)));
        assert!(norm(&[1.0, f32::NAN]).is_nan());
        assert_eq!(norm(&[1.0, f32::INFINITY]), f64::INFINITY);
    }
}
