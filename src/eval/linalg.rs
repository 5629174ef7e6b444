//! The little linear algebra that the measures need, in double precision and with a fixed order of every sum.

use rayon::prelude::*;

/// Samples that one pass of [`products`] reads: the block of a 512-wide matrix fits a second-level cache.
const BLOCK: usize = 256;

/// Rows below which [`eigenvalues`] stays on one thread.
const PARALLEL_ROWS: usize = 192;

/// Returns the inner product; eight running sums, so that the compiler may use vectors.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (mut sums, whole) = ([0.0f64; 8], a.len() / 8 * 8);
    for (a, b) in a[..whole].chunks_exact(8).zip(b[..whole].chunks_exact(8)) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f64 = a[whole..].iter().zip(&b[whole..]).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

/// Returns all inner products of the rows of `a` with the rows of `b`, `[a rows, b rows]`.
pub(super) fn products(a: &[f64], b: &[f64], length: usize) -> Vec<f64> {
    let columns = b.len() / length;
    let mut out = vec![0.0; a.len() / length * columns];
    for start in (0..length).step_by(BLOCK) {
        let block = start..length.min(start + BLOCK);
        out.par_chunks_mut(columns).enumerate().for_each(|(row, sums)| {
            let left = &a[row * length..][block.clone()];
            for (sum, right) in sums.iter_mut().zip(b.chunks_exact(length)) {
                *sum += dot(left, &right[block.clone()]);
            }
        });
    }
    out
}

/// Returns the transpose of a matrix with rows of `columns`.
pub(super) fn transpose(matrix: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|column| matrix.iter().skip(column).step_by(columns).copied()).collect()
}

/// Returns the columns of a matrix, each minus its mean, as rows.
pub(super) fn centered_columns(matrix: &[f64], columns: usize) -> Vec<f64> {
    let rows = matrix.len() / columns;
    let mut out = transpose(matrix, columns);
    for column in out.chunks_exact_mut(rows) {
        let mean = column.iter().sum::<f64>() / rows as f64;
        column.iter_mut().for_each(|v| *v -= mean);
    }
    out
}

/// Replaces a positive definite matrix by its Cholesky factor (lower triangle); false when it is not positive definite.
pub(super) fn cholesky(matrix: &mut [f64], n: usize) -> bool {
    for row in 0..n {
        for column in 0..=row {
            let (a, b) = (&matrix[row * n..][..column], &matrix[column * n..][..column]);
            let rest = matrix[row * n + column] - dot(a, b);
            if row != column {
                matrix[row * n + column] = rest / matrix[column * n + column];
            } else if rest > 0.0 {
                matrix[row * n + row] = rest.sqrt();
            } else {
                return false;
            }
        }
    }
    true
}

/// Solves `L x = b` in place for each row `b` of `rows`, `L` being a lower triangle.
pub(super) fn solve_lower(lower: &[f64], n: usize, rows: &mut [f64]) {
    rows.par_chunks_mut(n).for_each(|x| {
        for i in 0..n {
            x[i] = (x[i] - dot(&lower[i * n..][..i], &x[..i])) / lower[i * n + i];
        }
    });
}

/// Returns the eigenvalues of a symmetric matrix in descending order.
///
/// Householder reduction to tridiagonal form, then implicit QL (Golub and Van Loan, Matrix Computations, 4th edition, 8.3).
/// Absolute error about `1e-16 * n * largest`.
pub(super) fn eigenvalues(mut matrix: Vec<f64>, n: usize) -> Vec<f64> {
    assert_eq!(matrix.len(), n * n, "a square matrix");
    let (mut diagonal, mut beside) = (Vec::with_capacity(n), Vec::with_capacity(n));
    for k in 0..n {
        let (head, tail) = matrix.split_at_mut((k + 1) * n);
        diagonal.push(head[k * n + k]);
        // row k equals column k: what reflects it onto the first axis
        let reflector = &mut head[k * n + k + 1..];
        beside.push(reflect(reflector, tail, n, k + 1));
    }
    ql(&mut diagonal, &mut beside);
    diagonal.sort_by(|a, b| b.total_cmp(a));
    diagonal
}

/// Turns `x` into the vector of the reflection that maps it onto the first axis, applies the reflection to both sides of the
/// trailing matrix (`rows`, from column `from` on), and returns the first coordinate of the mapped `x`.
fn reflect(x: &mut [f64], rows: &mut [f64], n: usize, from: usize) -> f64 {
    let Some(&first) = x.first() else { return 0.0 };
    if x[1..].iter().all(|&v| v == 0.0) {
        return first;
    }
    let mapped = -dot(x, x).sqrt().copysign(first);
    x[0] -= mapped;
    let v = &*x;
    let beta = 2.0 / dot(v, v);
    let threads = if v.len() < PARALLEL_ROWS { usize::MAX } else { 16 };
    let mut w: Vec<f64> = rows.par_chunks(n).with_min_len(threads).map(|row| beta * dot(&row[from..], v)).collect();
    let half = 0.5 * beta * dot(&w, v);
    w.iter_mut().zip(v).for_each(|(w, v)| *w -= half * v);
    rows.par_chunks_mut(n).with_min_len(threads).enumerate().for_each(|(i, row)| {
        let (vi, wi) = (v[i], w[i]);
        for ((a, v), w) in row[from..].iter_mut().zip(v).zip(&w) {
            *a -= vi * w + wi * v;
        }
    });
    mapped
}

/// Replaces the diagonal of a tridiagonal matrix by its eigenvalues; `e[i]` lies beside `d[i]` and `d[i + 1]`.
fn ql(d: &mut [f64], e: &mut [f64]) {
    let n = d.len();
    let scale = d.iter().chain(e.iter()).fold(0.0f64, |m, v| m.max(v.abs()));
    let floor = f64::EPSILON * f64::EPSILON * scale;
    for low in 0..n {
        // three rounds an eigenvalue are usual; a hundred never happen with finite numbers
        for _ in 0..100 {
            let small = |i: usize| e[i].abs() <= f64::EPSILON * (d[i].abs() + d[i + 1].abs()) + floor;
            let high = (low..n - 1).find(|&i| small(i)).unwrap_or(n - 1);
            if high == low {
                break;
            }
            ql_round(d, e, low, high);
        }
    }
}

/// One implicit QL step on the block `low..=high`.
fn ql_round(d: &mut [f64], e: &mut [f64], low: usize, high: usize) {
    let slope = (d[low + 1] - d[low]) / (2.0 * e[low]);
    let shift = e[low] / (slope + slope.hypot(1.0).copysign(slope));
    let (mut g, mut sine, mut cosine, mut p) = (d[high] - d[low] + shift, 1.0, 1.0, 0.0);
    for i in (low..high).rev() {
        let (f, b) = (sine * e[i], cosine * e[i]);
        let radius = f64::hypot(f, g);
        e[i + 1] = radius;
        if radius == 0.0 {
            d[i + 1] -= p;
            e[high] = 0.0;
            return;
        }
        (sine, cosine) = (f / radius, g / radius);
        g = d[i + 1] - p;
        let r = (d[i] - g) * sine + 2.0 * cosine * b;
        p = sine * r;
        d[i + 1] = g + p;
        g = cosine * r - b;
    }
    d[low] -= p;
    e[low] = g;
    e[high] = 0.0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Purpose, Stream};

    fn random(count: usize, seed: u64) -> Vec<f64> {
        let mut stream = Stream::new(seed, Purpose::Evaluation, &[]);
        (0..count).map(|_| stream.normal()).collect()
    }

    #[test]
    fn eigenvalues_of_known_matrices() {
        assert_eq!(eigenvalues(vec![3.0], 1), [3.0]);
        assert_eq!(eigenvalues(vec![0.0; 25], 5), [0.0; 5]);
        assert_eq!(eigenvalues(vec![1.0, 0.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0, 5.0], 3), [5.0, 1.0, -2.0]);
        // the second difference has eigenvalues 2 - 2 cos(pi i / (n + 1))
        for n in [2usize, 3, 17, 64] {
            let mut matrix = vec![0.0; n * n];
            for i in 0..n {
                matrix[i * n + i] = 2.0;
                if i + 1 < n {
                    matrix[i * n + i + 1] = -1.0;
                    matrix[(i + 1) * n + i] = -1.0;
                }
            }
            for (i, got) in eigenvalues(matrix, n).into_iter().rev().enumerate() {
                let expected = 2.0 - 2.0 * (std::f64::consts::PI * (i + 1) as f64 / (n + 1) as f64).cos();
                assert!((got - expected).abs() < 1e-13, "{n} {i} {got} {expected}");
            }
        }
    }

    #[test]
    fn eigenvalues_keep_trace_and_square_sum_on_any_number_of_threads() {
        let n = 300;
        let raw = random(n * n, 5);
        let symmetric: Vec<f64> = (0..n * n).map(|at| raw[at] + raw[at % n * n + at / n]).collect();
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| eigenvalues(symmetric.clone(), n))
        };
        let got = run(1);
        assert_eq!(got, run(3));
        let trace: f64 = (0..n).map(|i| symmetric[i * n + i]).sum();
        assert!((got.iter().sum::<f64>() - trace).abs() < 1e-9);
        assert!((dot(&got, &got) / dot(&symmetric, &symmetric) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn products_match_a_plain_loop() {
        for (rows, others, length) in [(1, 1, 1), (3, 5, 7), (4, 2, 600)] {
            let (a, b) = (random(rows * length, 1), random(others * length, 2));
            for (at, got) in products(&a, &b, length).into_iter().enumerate() {
                let (i, j) = (at / others, at % others);
                let expected: f64 = (0..length).map(|t| a[i * length + t] * b[j * length + t]).sum();
                assert!((got - expected).abs() < 1e-11);
            }
        }
    }

    #[test]
    fn cholesky_solves_and_refuses() {
        let mut matrix = vec![4.0, 2.0, 2.0, 5.0];
        assert!(cholesky(&mut matrix, 2));
        let mut x = vec![2.0, 5.0];
        solve_lower(&matrix, 2, &mut x);
        assert_eq!(x, [1.0, 2.0]);
        assert!(!cholesky(&mut [1.0, 2.0, 2.0, 1.0], 2));
    }
}
