//! Multinomial logistic regression on frozen features: the linear probe with one answer.
//!
//! Minimises `|W|^2 / 2 + C * sum of cross-entropies` over weights `[classes, dim]` and biases (not penalised): scikit-learn's
//! `LogisticRegression`, which DINOv2 (Oquab et al., 2023, <https://arxiv.org/abs/2304.07193>) evaluates with too. The problem is convex, so there
//! is nothing to tune but `C`, and no seed. Solved by L-BFGS (Nocedal & Wright, Numerical Optimization, algorithm 7.5) in `f64`.

use super::features::{EvalError, Features};

/// Pairs of steps that L-BFGS remembers.
const HISTORY: usize = 10;
/// Rows whose loss is added up by one thread at a time; sums of chunks are added in their order.
const CHUNK: usize = 256;

/// Settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogisticRegression {
    /// Weight of the data against the penalty.
    pub c: f64,
    /// Iterations at most.
    pub max_iterations: usize,
    /// Ends when no element of the gradient is larger than this times that of the start.
    pub tolerance: f64,
}

impl LogisticRegression {
    /// Settings that converge to three digits of the probabilities.
    #[must_use]
    pub fn with_c(c: f64) -> Self {
        Self { c, max_iterations: 500, tolerance: 1e-5 }
    }

    /// Fits `classes` classes on `threads` threads; the result does not depend on their number.
    ///
    /// # Errors
    /// When there are fewer labels than features, or no class.
    ///
    /// # Panics
    /// When a label is not below `classes`.
    pub fn fit(
        &self,
        features: &Features,
        labels: &[u32],
        classes: usize,
        threads: usize,
    ) -> Result<LinearClassifier, EvalError> {
        if classes == 0 || labels.len() != features.rows() {
            return Err(EvalError::Empty);
        }
        assert!(labels.iter().all(|&label| (label as usize) < classes), "a label is no class");
        let problem = Problem { features, labels, classes, c: self.c, threads };
        let mut x = vec![0.0; classes * (features.dim() + 1)];
        let (mut value, mut gradient) = problem.evaluate(&x);
        let start = largest(&gradient);
        let mut memory: Vec<Pair> = Vec::new();
        for _ in 0..self.max_iterations {
            if largest(&gradient) <= self.tolerance * start {
                break;
            }
            let mut direction = descend(&memory, &gradient);
            let mut slope = dot(&direction, &gradient);
            if slope >= 0.0 {
                // rounding has spoilt the memory: begin again with the steepest descent
                memory.clear();
                direction = gradient.iter().map(|g| -g).collect();
                slope = dot(&direction, &gradient);
            }
            // without memory the length of the gradient says nothing about that of the step
            let mut step = if memory.is_empty() { 1.0 / dot(&gradient, &gradient).sqrt().max(1.0) } else { 1.0 };
            let mut found = None;
            for _ in 0..40 {
                let trial: Vec<f64> = x.iter().zip(&direction).map(|(x, d)| x + step * d).collect();
                let (trial_value, trial_gradient) = problem.evaluate(&trial);
                if trial_value <= value + 1e-4 * step * slope {
                    found = Some((trial, trial_value, trial_gradient));
                    break;
                }
                step *= 0.5;
            }
            let Some((next, next_value, next_gradient)) = found else { break }; // at the limit of rounding
            let s: Vec<f64> = next.iter().zip(&x).map(|(a, b)| a - b).collect();
            let y: Vec<f64> = next_gradient.iter().zip(&gradient).map(|(a, b)| a - b).collect();
            let curvature = dot(&s, &y);
            if curvature > 0.0 {
                if memory.len() == HISTORY {
                    memory.remove(0);
                }
                memory.push(Pair { inverse: 1.0 / curvature, scale: curvature / dot(&y, &y), s, y });
            }
            (x, value, gradient) = (next, next_value, next_gradient);
        }
        Ok(LinearClassifier { classes, dim: features.dim(), values: x })
    }
}

/// A step and what it changed in the gradient.
struct Pair {
    s: Vec<f64>,
    y: Vec<f64>,
    inverse: f64,
    scale: f64,
}

/// Returns `-H gradient`, the two-loop recursion.
fn descend(memory: &[Pair], gradient: &[f64]) -> Vec<f64> {
    let mut q: Vec<f64> = gradient.iter().map(|g| -g).collect();
    let mut alphas = Vec::with_capacity(memory.len());
    for pair in memory.iter().rev() {
        let alpha = pair.inverse * dot(&pair.s, &q);
        add_scaled(&mut q, -alpha, &pair.y);
        alphas.push(alpha);
    }
    if let Some(last) = memory.last() {
        for q in &mut q {
            *q *= last.scale;
        }
    }
    for (pair, alpha) in memory.iter().zip(alphas.into_iter().rev()) {
        let beta = pair.inverse * dot(&pair.y, &q);
        add_scaled(&mut q, alpha - beta, &pair.s);
    }
    q
}

struct Problem<'a> {
    features: &'a Features,
    labels: &'a [u32],
    classes: usize,
    c: f64,
    threads: usize,
}

impl Problem<'_> {
    /// Returns the objective and its gradient.
    fn evaluate(&self, x: &[f64]) -> (f64, Vec<f64>) {
        let (classes, dim) = (self.classes, self.features.dim());
        let width = dim + 1;
        let rows: Vec<usize> = (0..self.features.rows()).step_by(CHUNK).collect();
        let chunk = |&start: &usize| -> (f64, Vec<f64>) {
            let mut gradient = vec![0.0; x.len()];
            let mut loss = 0.0;
            for row in start..(start + CHUNK).min(self.features.rows()) {
                let features = self.features.row(row);
                let mut logits: Vec<f64> =
                    x.chunks_exact(width).map(|w| mixed_dot(&w[..dim], features) + w[dim]).collect();
                loss += log_softmax(&mut logits, self.labels[row] as usize);
                for (class, (gradient, &p)) in gradient.chunks_exact_mut(width).zip(&logits).enumerate() {
                    let residual = p - f64::from(u8::from(class == self.labels[row] as usize));
                    for (g, &f) in gradient[..dim].iter_mut().zip(features) {
                        *g += residual * f64::from(f);
                    }
                    gradient[dim] += residual;
                }
            }
            (loss, gradient)
        };
        let per_thread = rows.len().div_ceil(self.threads.max(1)).max(1);
        let parts: Vec<(f64, Vec<f64>)> = std::thread::scope(|scope| {
            let workers: Vec<_> = rows
                .chunks(per_thread)
                .map(|rows| scope.spawn(move || rows.iter().map(chunk).collect::<Vec<_>>()))
                .collect();
            workers.into_iter().flat_map(|worker| worker.join().expect("a sum does not panic")).collect()
        });
        let mut gradient = vec![0.0; x.len()];
        let mut loss = 0.0;
        for (part, part_gradient) in &parts {
            loss += part;
            add_scaled(&mut gradient, 1.0, part_gradient);
        }
        let mut value = self.c * loss;
        for class in 0..classes {
            for at in 0..width {
                let g = &mut gradient[class * width + at];
                *g *= self.c;
                if at < dim {
                    let w = x[class * width + at];
                    value += 0.5 * w * w;
                    *g += w;
                }
            }
        }
        (value, gradient)
    }
}

/// Turns logits into probabilities and returns the cross-entropy with `label`.
fn log_softmax(logits: &mut [f64], label: usize) -> f64 {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let own = logits[label] - most;
    let mut sum = 0.0;
    for logit in logits.iter_mut() {
        *logit = (*logit - most).exp();
        sum += *logit;
    }
    for p in logits {
        *p /= sum;
    }
    sum.ln() - own
}

/// A linear classifier: weights and a bias for each class.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearClassifier {
    classes: usize,
    dim: usize,
    /// `[classes, dim + 1]`, the bias last.
    values: Vec<f64>,
}

impl LinearClassifier {
    /// Returns the scores of the classes. `[rows, classes]`
    ///
    /// # Panics
    /// When the features have another width.
    #[must_use]
    pub fn scores(&self, features: &Features) -> Vec<f64> {
        assert_eq!(features.dim(), self.dim, "features of another width");
        let width = self.dim + 1;
        let score = |row: usize| {
            let features = features.row(row);
            self.values.chunks_exact(width).map(move |w| mixed_dot(&w[..self.dim], features) + w[self.dim])
        };
        (0..features.rows()).flat_map(score).collect()
    }

    /// Number of classes.
    #[must_use]
    pub fn classes(&self) -> usize {
        self.classes
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// In lanes, so that it compiles to vector instructions.
fn mixed_dot(a: &[f64], b: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..8 {
            lanes[i] += a[i] * f64::from(b[i]);
        }
    }
    lanes.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, &b)| a * f64::from(b)).sum::<f64>()
}

fn add_scaled(to: &mut [f64], factor: f64, from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, value| value.abs().max(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three clouds in the plane that overlap a little.
    fn clouds() -> (Features, Vec<u32>) {
        let (mut values, mut labels) = (Vec::new(), Vec::new());
        for i in 0..300u32 {
            let (class, t) = (i % 3, f64::from(i) * 2.399_963);
            let radius = 0.9 * (f64::from(i % 17) / 17.0 + 0.3);
            let center = [(0.0, 1.0), (-1.0, -0.6), (1.0, -0.6)][class as usize];
            values.extend([(center.0 + radius * t.cos()) as f32, (center.1 + radius * t.sin()) as f32]);
            labels.push(class);
        }
        (Features::new(values, 2).unwrap(), labels)
    }

    #[test]
    fn the_gradient_vanishes_at_the_solution_on_any_number_of_threads() {
        let (features, labels) = clouds();
        let settings = LogisticRegression { tolerance: 1e-10, ..LogisticRegression::with_c(1.0) };
        let one = settings.fit(&features, &labels, 3, 1).unwrap();
        let problem = Problem { features: &features, labels: &labels, classes: 3, c: 1.0, threads: 1 };
        let (value, gradient) = problem.evaluate(&one.values);
        assert!(largest(&gradient) < 1e-6, "{gradient:?}");
        assert_eq!(settings.fit(&features, &labels, 3, 4).unwrap(), one);
        // the gradient is that of the objective
        let mut moved = one.values.clone();
        moved[4] += 0.1;
        let (_, at) = problem.evaluate(&moved);
        let h = 1e-5;
        let value_at = |delta: f64| {
            let mut x = moved.clone();
            x[4] += delta;
            problem.evaluate(&x).0
        };
        assert!(((value_at(h) - value_at(-h)) / (2.0 * h) - at[4]).abs() < 1e-4);
        assert!(value_at(0.0) > value);
    }

    #[test]
    fn one_class_and_separable_data_end() {
        let features = Features::new(vec![1.0, 2.0, -1.0, -3.0], 1).unwrap();
        let only = LogisticRegression::with_c(1.0).fit(&features, &[0; 4], 1, 2).unwrap();
        assert_eq!(only.scores(&features), [0.0; 4]);
        let separable = LogisticRegression::with_c(1e6).fit(&features, &[0, 0, 1, 1], 2, 2).unwrap();
        let scores = separable.scores(&features);
        assert!(scores.iter().all(|s| s.is_finite()) && scores[0] > scores[1] && scores[6] < scores[7]);
        assert!(LogisticRegression::with_c(1.0).fit(&features, &[0], 1, 1).is_err());
    }
}
