//! Matrix products over slices.

use std::ops::Range;

use super::memory::{WorkArea, buffer, work_area};
use super::simd::vectorized;

/// A matrix in a slice: element `(r, c)` is at `r * row_stride + c * column_stride`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix whose rows follow each other.
    pub(super) fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        Self::with_stride(values, rows, columns, columns)
    }

    /// A row-major matrix whose rows start `row_stride` apart.
    pub(super) fn with_stride(values: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        let matrix = Self { values, rows, columns, row_stride, column_stride: 1 };
        assert!(matrix.end() <= values.len(), "matrix of {rows} x {columns} reaches past its slice");
        matrix
    }

    /// The transposed matrix, same values.
    pub(super) fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Some of the rows.
    fn rows(self, rows: Range<usize>) -> Self {
        Self { values: &self.values[rows.start * self.row_stride..], rows: rows.len(), ..self }
    }

    /// One past the last element.
    fn end(&self) -> usize {
        end(self.rows, self.columns, self.row_stride, self.column_stride)
    }
}

fn end(rows: usize, columns: usize, row_stride: usize, column_stride: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row_stride + (columns - 1) * column_stride + 1 }
}

/// Writes `a * b` (or adds it, with `accumulate`) to the row-major `out`, whose rows start `row_stride` apart.
///
/// Runs on the calling thread; the order of additions depends on the shapes and the machine type alone.
///
/// # Panics
/// Panics if the inner sizes differ or `out` is too small.
pub(super) fn matmul(out: &mut [f32], row_stride: usize, a: Matrix, b: Matrix, accumulate: bool) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert_eq!(k, b.rows, "inner sizes of a matrix product differ");
    assert!(n <= row_stride && end(m, n, row_stride, 1) <= out.len(), "matrix product does not fit its output");
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !accumulate {
            out.chunks_mut(row_stride).take(m).for_each(|row| row[..n].fill(0.0));
        }
        return;
    }
    let stride = |s: usize| isize::try_from(s).expect("slices are no longer than isize::MAX");
    // SAFETY: `Matrix::with_stride` (kept by `t`) and the assertion above bound every element that the three matrices
    // touch, and `out` is borrowed mutably, so it overlaps neither `a` nor `b`.
    #[expect(unsafe_code)]
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(row_stride),
            accumulate,
            a.values.as_ptr(),
            stride(a.column_stride),
            stride(a.row_stride),
            b.values.as_ptr(),
            stride(b.column_stride),
            stride(b.row_stride),
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Rows per block of [`matmul_by_blocks`].
const BLOCK: usize = 256;

/// Multiplies `a * b` in blocks of rows and hands each block to `finish`, with the numbers of its rows.
///
/// A product written straight to fresh memory waits for each of its small tiles; written to a block that stays in the cache
/// and from there front to back, it runs at full speed (measured: a third faster for 192 x 576), and `finish` adds a bias or
/// applies a function on the way.
pub(super) fn matmul_by_blocks(a: Matrix, b: Matrix, mut finish: impl FnMut(Range<usize>, &mut [f32])) {
    let columns = b.columns;
    let mut product = work_area(BLOCK.min(a.rows) * columns);
    for start in (0..a.rows).step_by(BLOCK) {
        let rows = start..a.rows.min(start + BLOCK);
        let product = &mut product[..rows.len() * columns];
        matmul(product, columns, a.rows(rows.clone()), b, false);
        finish(rows, product);
    }
}

/// Multiplies `a * b`.
pub(super) fn product(a: Matrix, b: Matrix) -> Vec<f32> {
    let mut out = buffer(a.rows * b.columns);
    matmul(&mut out, b.columns, a, b, false);
    out
}

/// Copies the transposed matrix of a row-major one: products are fastest with both factors row-major, by 5 to 20 %.
pub(super) fn transposed(values: &[f32], rows: usize, columns: usize) -> WorkArea {
    let mut out = work_area(rows * columns);
    transpose(values, columns, columns, &mut out, rows);
    out
}

vectorized! {
    /// Transposes a matrix with rows of `columns` values that start `row_stride` apart; the result has rows of `rows` values.
    pub(super) fn transpose(values: &[f32], row_stride: usize, columns: usize, out: &mut [f32], rows: usize) {
        const SIDE: usize = 16; // a line of the cache in both
        let (whole_rows, whole_columns) = (rows / SIDE * SIDE, columns / SIDE * SIDE);
        for row in (0..whole_rows).step_by(SIDE) {
            for column in (0..whole_columns).step_by(SIDE) {
                let mut tile = [[0.0f32; SIDE]; SIDE];
                for (r, tile) in tile.iter_mut().enumerate() {
                    *tile = *values[(row + r) * row_stride + column..].first_chunk().expect("a tile within the matrix");
                }
                for c in 0..SIDE {
                    let mut turned = [0.0f32; SIDE];
                    for r in 0..SIDE {
                        turned[r] = tile[r][c];
                    }
                    // a copy of a slice would be a call
                    *out[(column + c) * rows + row..].first_chunk_mut().expect("a tile within the matrix") = turned;
                }
            }
        }
        for r in 0..rows {
            for c in if r < whole_rows { whole_columns } else { 0 }..columns {
                out[c * rows + r] = values[r * row_stride + c];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(a: Matrix, b: Matrix, r: usize, c: usize) -> f64 {
        let at = |m: Matrix, r: usize, c: usize| f64::from(m.values[r * m.row_stride + c * m.column_stride]);
        (0..a.columns).map(|k| at(a, r, k) * at(b, k, c)).sum()
    }

    #[test]
    fn products_of_awkward_shapes() {
        for (m, n, k) in [(0, 3, 2), (3, 0, 2), (3, 2, 0), (1, 1, 1), (5, 7, 3), (17, 33, 65), (1, 40, 9), (40, 1, 9)] {
            let a = crate::ops::testing::values(m * k, 1);
            let b = crate::ops::testing::values(n * k, 2);
            let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, n, k).t());
            let stride = n + 2;
            let mut out = vec![1.0; m * stride];
            matmul(&mut out, stride, a, b, false);
            for r in 0..m {
                for c in 0..n {
                    assert!((f64::from(out[r * stride + c]) - naive(a, b, r, c)).abs() < 1e-5);
                }
                assert_eq!(out[r * stride + n..][..2], [1.0, 1.0], "writes past the row");
            }
            let before = out.clone();
            matmul(&mut out, stride, a, b, true);
            for (after, before) in out.iter().zip(&before) {
                assert!((after - before).abs() < 1e-4 || (after - 2.0 * before).abs() < 1e-4);
            }
        }
    }

    #[test]
    #[should_panic(expected = "does not fit")]
    fn output_too_small() {
        matmul(&mut [0.0; 3], 2, Matrix::new(&[1.0; 2], 2, 1), Matrix::new(&[1.0; 2], 1, 2), false);
    }
}
