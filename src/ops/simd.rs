//! Vector loops: one source, compiled for the instruction sets that matter, chosen at run time.

use std::sync::OnceLock;

/// Interleaved partial sums of a reduction over a row; part of the definition of a result, not of its speed alone.
pub(super) const LANES: usize = 32;

/// What the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// The target's baseline.
    Baseline,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 (foundation), AVX2 and FMA.
    Avx512,
}

/// Returns the name of the path that loops and matrix products take on this machine.
pub fn instruction_set() -> &'static str {
    match level() {
        Level::Avx512 => "avx512f",
        Level::Avx2 => "avx2+fma",
        Level::Baseline if cfg!(target_arch = "aarch64") => "neon",
        Level::Baseline => "portable",
    }
}

/// Tells what the machine has.
#[inline]
pub(crate) fn level() -> Level {
    static FOUND: OnceLock<Level> = OnceLock::new();
    *FOUND.get_or_init(|| {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            // `AUTODIDACT_TEST_SIMD=avx2 cargo test ops` tests a lower level; the matrix products stay as they are.
            let highest = match std::env::var("AUTODIDACT_TEST_SIMD").as_deref() {
                Ok("baseline") if cfg!(test) => Level::Baseline,
                Ok("avx2") if cfg!(test) => Level::Avx2,
                _ => Level::Avx512,
            };
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let found = match (avx2, is_x86_feature_detected!("avx512f")) {
                (true, true) => Level::Avx512,
                (true, false) => Level::Avx2,
                _ => Level::Baseline,
            };
            found.min(highest)
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        {
            Level::Baseline
        }
    })
}

/// Compiles functions for each [`Level`], behind one name.
///
/// In a body the constant `FMA` tells whether multiply-adds are fused; [`mul_add`] takes it; `WIDE` tells of AVX-512. Everything else is the same operations in the same
/// order, so AVX2 and AVX-512 give the same bits. A body must be inlined into all, so what it calls is `#[inline(always)]`.
macro_rules! vectorized {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => { $(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body<const FMA: bool, const WIDE: bool>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body::<true, false>($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body::<true, true>($($arg),*)
                }
                // SAFETY: the processor has the features that the function was compiled for.
                #[expect(unsafe_code)]
                match $crate::ops::simd::level() {
                    $crate::ops::simd::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    $crate::ops::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::ops::simd::Level::Baseline => {}
                }
            }
            body::<{ cfg!(target_arch = "aarch64") }, false>($($arg),*)
        }
    )* };
}
pub(crate) use vectorized;

/// Computes `a * b + c`, rounded once where the machine can.
#[inline(always)]
pub(super) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Sums `term(a, b, c)` over the elements of three rows of one length in [`LANES`] interleaved sums. For fewer rows give one twice.
#[inline(always)]
pub(super) fn reduce(a: &[f32], b: &[f32], c: &[f32], term: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let ((a, a_rest), (b, b_rest), (c, c_rest)) =
        (a.as_chunks::<LANES>(), b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    let mut lanes = [0.0f32; LANES];
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for i in 0..LANES {
            lanes[i] += term(a[i], b[i], c[i]);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    let mut sum = lanes[0];
    for ((a, b), c) in a_rest.iter().zip(b_rest).zip(c_rest) {
        sum += term(*a, *b, *c);
    }
    sum
}

/// Computes `e^x` within 2 units in the last place: `x = n ln 2 + r`, a polynomial for `e^r` (Cephes `expf`), `n` into the exponent.
/// Below -87 it stays at `e^-87`, about 1e-38; NaN stays NaN.
#[inline(always)]
#[expect(clippy::excessive_precision, reason = "as published")]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    /// Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = mul_add::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 in two parts, the first with few bits.
    let r = mul_add::<FMA>(n, -0.693_359_375, x);
    let r = mul_add::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_150_0e-4;
    p = mul_add::<FMA>(p, r, 1.398_199_950_7e-3);
    p = mul_add::<FMA>(p, r, 8.333_451_907_3e-3);
    p = mul_add::<FMA>(p, r, 4.166_579_589_4e-2);
    p = mul_add::<FMA>(p, r, 1.666_666_545_9e-1);
    p = mul_add::<FMA>(p, r, 5.000_000_120_1e-1);
    let p = mul_add::<FMA>(p, r * r, r) + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    p * f32::from_bits(exponent)
}

/// Computes the error function within 4e-7: a rational function of `x` on [-4, 4] (the one in Eigen and TensorFlow), +-1
/// outside; NaN stays NaN.
#[inline(always)]
#[expect(clippy::excessive_precision, reason = "as published")]
pub(super) fn erf<const FMA: bool>(x: f32) -> f32 {
    let x = if x < -4.0 { -4.0 } else { x };
    let x = if x > 4.0 { 4.0 } else { x };
    let square = x * x;
    let mut p = -2.726_142_258_013_06e-10;
    p = mul_add::<FMA>(p, square, 2.770_681_424_959_02e-8);
    p = mul_add::<FMA>(p, square, -2.101_024_020_825_08e-6);
    p = mul_add::<FMA>(p, square, -5.692_506_394_623_46e-5);
    p = mul_add::<FMA>(p, square, -7.349_906_303_268_55e-4);
    p = mul_add::<FMA>(p, square, -2.954_599_808_540_25e-3);
    p = mul_add::<FMA>(p, square, -1.609_603_332_624_15e-2);
    let mut q = -1.456_607_184_649_96e-5;
    q = mul_add::<FMA>(q, square, -2.133_740_552_789_05e-4);
    q = mul_add::<FMA>(q, square, -1.682_826_974_382_03e-3);
    q = mul_add::<FMA>(q, square, -7.373_329_167_204_68e-3);
    q = mul_add::<FMA>(q, square, -1.426_473_905_141_89e-2);
    x * p / q
}

vectorized! {
    /// Adds a slice to another.
    pub(super) fn add_assign(to: &mut [f32], from: &[f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to += *from;
        }
    }

    /// Multiplies a slice by another.
    pub(super) fn multiply(to: &mut [f32], by: &[f32]) {
        for (to, by) in to.iter_mut().zip(by) {
            *to *= *by;
        }
    }

    /// Adds a row vector to each row.
    pub(super) fn add_row(rows: &mut [f32], row: &[f32]) {
        for values in rows.chunks_exact_mut(row.len().max(1)) {
            for (value, add) in values.iter_mut().zip(row) {
                *value += *add;
            }
        }
    }

    /// Adds each row to a row of sums, top to bottom.
    fn add_rows_to(sums: &mut [f32], rows: &[f32]) {
        for row in rows.chunks_exact(sums.len().max(1)) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += *value;
            }
        }
    }
}

/// Rows per block of [`column_sums`] and of reductions like it.
pub(super) const SUM_ROWS: usize = 128;

/// Sums the columns of a row-major matrix: blocks of 128 rows in `f32`, blocks in `f64`, top to bottom.
pub(super) fn column_sums(matrix: &[f32], columns: usize) -> Vec<f32> {
    let mut totals = vec![0.0f64; columns];
    let mut sums = vec![0.0f32; columns];
    for block in matrix.chunks((SUM_ROWS * columns).max(1)) {
        sums.fill(0.0);
        add_rows_to(&mut sums, block);
        add_to_totals(&mut totals, &sums);
    }
    totals.into_iter().map(|total| total as f32).collect()
}

/// Adds a block's sums to the totals.
pub(super) fn add_to_totals(totals: &mut [f64], sums: &[f32]) {
    for (total, sum) in totals.iter_mut().zip(sums) {
        *total += f64::from(*sum);
    }
}

/// Values of neighbouring channels in a register.
///
/// The instructions exist on some machines only, so a first value is had from [`Lanes::zero`] alone, which is unsafe; all others come
/// from that one. Whoever has a value may use its instructions.
pub(super) trait Lanes: Copy {
    /// Number of values.
    const WIDTH: usize;
    /// Returns zeros.
    ///
    /// # Safety
    /// `__m256` needs a machine with AVX2 and FMA, `__m512` one with AVX-512.
    #[expect(unsafe_code, reason = "the promise that all other functions rest on")]
    unsafe fn zero() -> Self;
    /// Reads the first values of a slice.
    fn load(self, from: &[f32]) -> Self;
    /// Reads values that lie `step` apart, the first one at the start of a slice.
    #[inline(always)]
    fn gather(self, from: &[f32], step: usize) -> Self {
        let mut side_by_side = [0.0; 16];
        for i in 0..Self::WIDTH {
            side_by_side[i] = from[i * step];
        }
        self.load(&side_by_side)
    }
    /// Writes to the start of a slice.
    fn store(self, to: &mut [f32]);
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * factor`.
    fn scale(self, factor: f32) -> Self;
    /// `self + factor * other`.
    fn add_scaled(self, factor: f32, other: Self) -> Self;
    /// `self + a * b`.
    fn add_product(self, a: Self, b: Self) -> Self;
}

/// The zeros that a kernel starts from.
///
/// To be called in functions made by [`vectorized!`] alone: with `__m256` where their `FMA` is set, with `__m512` where `WIDE` is.
#[inline(always)]
#[expect(unsafe_code)]
pub(super) fn zero<T: Lanes>() -> T {
    // SAFETY: `vectorized!` sets `FMA` and `WIDE` in functions that run after the instruction set has been detected.
    unsafe { T::zero() }
}

impl Lanes for [f32; 8] {
    const WIDTH: usize = 8;
    #[inline(always)]
    fn load(self, from: &[f32]) -> Self {
        *from.first_chunk().expect("a whole register")
    }
    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        *to.first_chunk_mut().expect("a whole register") = self;
    }
    #[inline(always)]
    #[expect(unsafe_code, reason = "as the trait says; here there is nothing to promise")]
    unsafe fn zero() -> Self {
        [0.0; 8]
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] + other[i])
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] - other[i])
    }
    #[inline(always)]
    fn scale(self, factor: f32) -> Self {
        std::array::from_fn(|i| self[i] * factor)
    }
    #[inline(always)]
    fn add_scaled(self, factor: f32, other: Self) -> Self {
        std::array::from_fn(|i| mul_add::<{ cfg!(target_arch = "aarch64") }>(factor, other[i], self[i]))
    }
    #[inline(always)]
    fn add_product(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|i| mul_add::<{ cfg!(target_arch = "aarch64") }>(a[i], b[i], self[i]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![expect(unsafe_code, reason = "intrinsics")]
    use std::arch::x86_64::{
        __m256, __m512, _mm256_add_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_ps,
        _mm256_setzero_ps, _mm256_storeu_ps, _mm256_sub_ps, _mm512_add_ps, _mm512_fmadd_ps, _mm512_i32gather_ps,
        _mm512_loadu_ps, _mm512_mul_ps, _mm512_mullo_epi32, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32,
        _mm512_setzero_ps, _mm512_storeu_ps, _mm512_sub_ps,
    };

    macro_rules! lanes {
        ($register:ty, $width:literal, $load:ident $store:ident $zero:ident $set1:ident $add:ident $sub:ident $mul:ident $fmadd:ident $($more:item)*) => {
            impl super::Lanes for $register {
                const WIDTH: usize = $width;
                #[inline(always)]
                fn load(self, from: &[f32]) -> Self {
                    let from: &[f32; $width] = from.first_chunk().expect("a whole register");
                    // SAFETY: so many readable values; `self` shows that the machine has the instruction, here and below.
                    unsafe { $load(from.as_ptr()) }
                }
                #[inline(always)]
                fn store(self, to: &mut [f32]) {
                    let to: &mut [f32; $width] = to.first_chunk_mut().expect("a whole register");
                    // SAFETY: so many writable values.
                    unsafe { $store(to.as_mut_ptr(), self) }
                }
                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { $zero() }
                }
                #[inline(always)]
                fn add(self, other: Self) -> Self {
                    // SAFETY: registers only.
                    unsafe { $add(self, other) }
                }
                #[inline(always)]
                fn sub(self, other: Self) -> Self {
                    // SAFETY: registers only.
                    unsafe { $sub(self, other) }
                }
                #[inline(always)]
                fn scale(self, factor: f32) -> Self {
                    // SAFETY: registers only.
                    unsafe { $mul(self, $set1(factor)) }
                }
                #[inline(always)]
                fn add_scaled(self, factor: f32, other: Self) -> Self {
                    // SAFETY: registers only.
                    unsafe { $fmadd($set1(factor), other, self) }
                }
                #[inline(always)]
                fn add_product(self, a: Self, b: Self) -> Self {
                    // SAFETY: registers only.
                    unsafe { $fmadd(a, b, self) }
                }
                $($more)*
            }
        };
    }
    lanes!(__m256, 8, _mm256_loadu_ps _mm256_storeu_ps _mm256_setzero_ps _mm256_set1_ps _mm256_add_ps _mm256_sub_ps _mm256_mul_ps _mm256_fmadd_ps);
    lanes!(__m512, 16, _mm512_loadu_ps _mm512_storeu_ps _mm512_setzero_ps _mm512_set1_ps _mm512_add_ps _mm512_sub_ps _mm512_mul_ps _mm512_fmadd_ps
        #[inline(always)]
        fn gather(self, from: &[f32], step: usize) -> Self {
            assert!(15 * step < from.len(), "a register's values lie within the slice");
            let step = i32::try_from(15 * step).map(|last| last / 15).expect("values of one tensor lie less than 2^27 apart");
            // SAFETY: the last value is within the slice, as was asserted; `self` shows that the machine has the instructions.
            unsafe {
                let places = _mm512_mullo_epi32(
                    _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                    _mm512_set1_epi32(step),
                );
                _mm512_i32gather_ps::<4>(places, from.as_ptr())
            }
        }
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    vectorized! {
        fn both(x: &[f32], exps: &mut [f32], erfs: &mut [f32]) {
            for ((x, exp_x), erf_x) in x.iter().zip(exps).zip(erfs) {
                *exp_x = exp::<FMA>(*x);
                *erf_x = erf::<FMA>(*x);
            }
        }
    }

    #[test]
    fn exponential_and_error_function() {
        let x: Vec<f32> = (-86_999..88_000).map(|i| i as f32 * 1e-3).collect();
        let (mut exps, mut erfs) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        both(&x, &mut exps, &mut erfs);
        for ((x, exp_x), erf_x) in x.iter().zip(&exps).zip(&erfs) {
            let exact = f64::from(*x).exp();
            assert!((f64::from(*exp_x) - exact).abs() <= 2.5e-7 * exact, "exp({x}) = {exp_x}");
            if x.abs() < 6.0 {
                assert!((f64::from(*erf_x) - erf_series(f64::from(*x))).abs() < 5e-7, "erf({x}) = {erf_x}");
            }
        }
        both(&[f32::NAN, -1e30, 1e30], &mut exps[..3], &mut erfs[..3]);
        assert!(exps[0].is_nan() && erfs[0].is_nan());
        assert!(exps[1] < 1e-37 && exps[2] > 1e38 && erfs[1] < -0.999_999 && erfs[2] > 0.999_999);
    }

    /// Taylor's series; enough terms for 6.
    fn erf_series(x: f64) -> f64 {
        crate::ops::testing::erf(x)
    }

    #[test]
    fn column_sums_of_awkward_shapes() {
        for (rows, columns) in [(0, 3), (3, 0), (1, 1), (129, 7), (1000, 33)] {
            let matrix = crate::ops::testing::values(rows * columns, 5);
            let sums = column_sums(&matrix, columns);
            for (c, sum) in sums.iter().enumerate() {
                let exact: f64 = matrix.iter().skip(c).step_by(columns).map(|x| f64::from(*x)).sum();
                assert!((f64::from(*sum) - exact).abs() < 1e-5);
            }
        }
    }
}
