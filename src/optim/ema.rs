//! Exponential moving average of the weights.

/// Moves the average: `average = momentum * average + (1 - momentum) * weights`, element by element.
///
/// The target network of BYOL (Grill et al., 2020, <https://arxiv.org/abs/2006.07733>, equation 1), MoCo's key encoder, DINO's teacher.
/// Computed as `average += (1 - momentum) * (weights - average)`: with both factors rounded to `f32` their sum isn't 1, and at momentum 0.9999
/// the average of constant weights would settle 2e-4 below them.
///
/// # Panics
/// If the lengths differ.
pub fn update(average: &mut [f32], weights: &[f32], momentum: f64) {
    assert_eq!(average.len(), weights.len(), "one average a weight");
    let take = (1.0 - momentum) as f32;
    for (average, &weight) in average.iter_mut().zip(weights) {
        *average += take * (weight - *average);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_closed_form() {
        let mut average = [0.0f32, 1.0];
        for _ in 0..10 {
            update(&mut average, &[1.0, -1.0], 0.9);
        }
        let left = 0.9f64.powi(10); // weight of the start
        assert!((f64::from(average[0]) - (1.0 - left)).abs() < 1e-6);
        assert!((f64::from(average[1]) - (2.0 * left - 1.0)).abs() < 1e-6);
    }

    #[test]
    fn constant_weights_are_their_own_average() {
        let mut average = [0.7f32, -1.3];
        for _ in 0..100_000 {
            update(&mut average, &[0.7, -1.3], 0.9999);
        }
        assert_eq!(average, [0.7, -1.3]);
    }

    #[test]
    fn momentum_one_freezes() {
        let mut average = [0.25f32, 0.5];
        update(&mut average, &[3.0, 4.0], 1.0);
        assert_eq!(average, [0.25, 0.5]);
    }
}
