//! Products of small dense matrices that lie in the cache.
//!
//! A general matrix product copies its factors into the order in which its inner loop reads them. Winograd's algorithm makes its factors itself, so it
//! writes them in that order: dense panels of at most [`WIDTH`] columns, and nothing is copied. The inner loop holds [`ROWS`] rows of the result in
//! registers, and adds for each inner index a row of `b` times one value of `a` each.
//!
//! Measured in ResNet-18's shapes, AVX-512: 150 to 168 GFLOP/s a core, where the general product has 115 to 145 on the strided matrices that it needs.

use super::gemm::{self, Matrix};
use super::simd::{Lanes, Level, level, vectorized, zero};

/// Most columns of a panel: four AVX-512 registers, and 64 rows of it are half of a first-level cache.
pub(super) const WIDTH: usize = 64;
/// Rows of the result in registers.
const ROWS: usize = 4;

/// Sizes of a product: rows of the result, columns of the result, inner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) inner: usize,
}

/// Computes `out = a b`, or `out += a b` if `add`.
///
/// `out` `[rows, columns]` and `b` `[inner, columns]` are dense; so is `a`, `[rows, inner]` or, if `turned`, `[inner, rows]`. Every value of `out`
/// is one chain of multiply-adds over the inner index, first to last (added to what is there at its end), so its bits do not depend on the other sizes. A multiple of 8 columns.
///
/// # Panics
/// Panics if a slice is too short.
pub(super) fn multiply(out: &mut [f32], a: &[f32], turned: bool, b: &[f32], size: Size, add: bool) {
    debug_assert!(size.columns.is_multiple_of(8));
    if size.rows == 0 || size.inner == 0 {
        if !add {
            out[..size.rows * size.columns].fill(0.0);
        }
        return;
    }
    if level() == Level::Baseline {
        // the general product's loops are better there than what a compiler makes of these
        let Size { rows, columns, inner } = size;
        let a = if turned { Matrix::new(a, inner, rows).t() } else { Matrix::new(a, rows, inner) };
        return gemm::matmul(out, columns, a, Matrix::new(b, inner, columns), add);
    }
    vectors(out, a, turned, b, size, add);
}

vectorized! {
    fn vectors(out: &mut [f32], a: &[f32], turned: bool, b: &[f32], size: Size, add: bool) {
        let mut column = 0;
        #[cfg(target_arch = "x86_64")]
        if WIDE {
            let zero = zero::<std::arch::x86_64::__m512>();
            column = columns::<_, 4>(zero, out, a, turned, b, size, add, column);
            column = columns::<_, 2>(zero, out, a, turned, b, size, add, column);
            column = columns::<_, 1>(zero, out, a, turned, b, size, add, column);
        }
        #[cfg(target_arch = "x86_64")]
        if FMA {
            let zero = zero::<std::arch::x86_64::__m256>();
            column = columns::<_, 2>(zero, out, a, turned, b, size, add, column);
            column = columns::<_, 1>(zero, out, a, turned, b, size, add, column);
        }
        columns::<_, 1>(zero::<[f32; 8]>(), out, a, turned, b, size, add, column);
    }
}

/// Computes the columns from one on, as long as there are `V` registers of them; returns the first column that is left.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn columns<T: Lanes, const V: usize>(
    zero: T,
    out: &mut [f32],
    a: &[f32],
    turned: bool,
    b: &[f32],
    size: Size,
    add: bool,
    mut column: usize,
) -> usize {
    while column + V * T::WIDTH <= size.columns {
        if turned {
            rows::<T, V, true>(zero, &mut out[column..], a, &b[column..], size, add);
        } else {
            rows::<T, V, false>(zero, &mut out[column..], a, &b[column..], size, add);
        }
        column += V * T::WIDTH;
    }
    column
}

#[inline(always)]
fn rows<T: Lanes, const V: usize, const TURNED: bool>(
    zero: T,
    out: &mut [f32],
    a: &[f32],
    b: &[f32],
    size: Size,
    add: bool,
) {
    let step = if TURNED { 1 } else { size.inner };
    let mut row = 0;
    while row + ROWS <= size.rows {
        tile::<T, ROWS, V, TURNED>(zero, &mut out[row * size.columns..], &a[row * step..], b, size, add);
        row += ROWS;
    }
    while row < size.rows {
        tile::<T, 1, V, TURNED>(zero, &mut out[row * size.columns..], &a[row * step..], b, size, add);
        row += 1;
    }
}

/// Computes `R` rows by `V` registers.
#[inline(always)]
fn tile<T: Lanes, const R: usize, const V: usize, const TURNED: bool>(
    zero: T,
    out: &mut [f32],
    a: &[f32],
    b: &[f32],
    size: Size,
    add: bool,
) {
    let Size { rows, columns, inner } = size;
    let mut sums = [[zero; V]; R];
    // one check a row here, so that there is none in the loop
    let mut lines = [&a[..0]; R];
    if !TURNED {
        for r in 0..R {
            lines[r] = &a[r * inner..][..inner];
        }
    }
    for k in 0..inner {
        let row = &b[k * columns..][..V * T::WIDTH];
        let mut values = [zero; V];
        for v in 0..V {
            values[v] = zero.load(&row[v * T::WIDTH..]);
        }
        let factors: [f32; R] = if TURNED {
            *a[k * rows..].first_chunk().expect("as many values as rows")
        } else {
            let mut factors = [0.0; R];
            for r in 0..R {
                factors[r] = lines[r][k];
            }
            factors
        };
        for r in 0..R {
            for v in 0..V {
                sums[r][v] = sums[r][v].add_scaled(factors[r], values[v]);
            }
        }
    }
    for r in 0..R {
        let row = &mut out[r * columns..][..V * T::WIDTH];
        for v in 0..V {
            let at = v * T::WIDTH;
            // not where the chain starts: that would be one long chain over all products that are added up, and a larger error
            let sum = if add { zero.load(&row[at..]).add(sums[r][v]) } else { sums[r][v] };
            sum.store(&mut row[at..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::values;

    #[test]
    fn against_float64() {
        for rows in [0, 1, 3, 4, 7, 64] {
            for columns in [8, 16, 24, 40, 56, 64] {
                for inner in [0, 1, 5, 64] {
                    for (turned, add) in [(false, false), (true, false), (false, true), (true, true)] {
                        let size = Size { rows, columns, inner };
                        let (a, b) = (values(rows * inner, 1), values(inner * columns, 2));
                        let before = values(rows * columns, 3);
                        let mut out = before.clone();
                        if !add {
                            out.fill(f32::NAN);
                        }
                        multiply(&mut out, &a, turned, &b, size, add);
                        for r in 0..rows {
                            for c in 0..columns {
                                let mut exact = if add { f64::from(before[r * columns + c]) } else { 0.0 };
                                for k in 0..inner {
                                    let a = if turned { a[k * rows + r] } else { a[r * inner + k] };
                                    exact += f64::from(a) * f64::from(b[k * columns + c]);
                                }
                                let found = f64::from(out[r * columns + c]);
                                assert!((found - exact).abs() < 2e-5, "{size:?} turned {turned}: {found} for {exact}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bits_of_a_value_do_not_depend_on_its_neighbours() {
        if level() == Level::Baseline {
            eprintln!("skipped: the general product makes no such promise, and is used on this instruction set");
            return;
        }
        let (a, b) = (values(7 * 33, 1), values(33 * 56, 2));
        let mut all = vec![0.0; 7 * 56];
        multiply(&mut all, &a, false, &b, Size { rows: 7, columns: 56, inner: 33 }, false);
        for row in 0..7 {
            let mut one = vec![0.0; 56];
            multiply(&mut one, &a[row * 33..], false, &b, Size { rows: 1, columns: 56, inner: 33 }, false);
            assert_eq!(one, all[row * 56..][..56]);
        }
    }
}
