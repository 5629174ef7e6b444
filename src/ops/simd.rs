//! Vector loops: one source, compiled for the instruction sets that matter, chosen at run time.

use std::sync::OnceLock;

/// Interleaved partial sums of a reduction over a row; part of the definition of a result, not of its speed alone.
pub(super) const LANES: usize = 32;

/// Returns the name of the path that the loops take on this machine.
pub fn instruction_set() -> &'static str {
    if has_fma() {
        "avx2+fma"
    } else if cfg!(target_arch = "aarch64") {
        "neon"
    } else {
        "portable"
    }
}

/// Tells whether the machine has AVX2 and FMA.
#[inline]
pub(super) fn has_fma() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        {
            false
        }
    })
}

/// Compiles functions twice, for AVX2 with FMA and for the target's baseline, behind one name.
///
/// In a body the constant `FMA` tells which one it is; [`mul_add`] takes it. A body must be inlined into both, so what it
/// calls is `#[inline(always)]`.
macro_rules! vectorized {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => { $(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments, clippy::inline_always)]
            fn body<const FMA: bool>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body::<true>($($arg),*)
                }
                if $crate::ops::simd::has_fma() {
                    // SAFETY: the processor has the features that the function was compiled for.
                    #[expect(unsafe_code)]
                    return unsafe { avx2($($arg),*) };
                }
            }
            body::<{ cfg!(target_arch = "aarch64") }>($($arg),*)
        }
    )* };
}
pub(super) use vectorized;

/// Computes `a * b + c`, rounded once where the machine can.
#[inline(always)]
#[expect(clippy::inline_always, reason = "must take on the caller's target features")]
pub(super) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Sums `term(i)` for `i` in `0..len` in [`LANES`] interleaved sums.
#[inline(always)]
#[expect(clippy::inline_always, reason = "must take on the caller's target features")]
pub(super) fn reduce(len: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = len / LANES * LANES;
    let mut start = 0;
    while start < whole {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += term(start + lane);
        }
        start += LANES;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    let mut sum = lanes[0];
    while start < len {
        sum += term(start);
        start += 1;
    }
    sum
}

vectorized! {
    /// Adds a slice to another.
    pub(super) fn add_assign(to: &mut [f32], from: &[f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to += *from;
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

/// Rows per block of [`column_sums`].
const SUM_ROWS: usize = 128;

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

/// Eight values of neighbouring channels in a register.
///
/// # Safety of implementations
///
/// `__m256` needs AVX and FMA: use it only below a function compiled for them (`vectorized!` with `FMA`).
pub(super) trait Octet: Copy {
    /// Reads eight values.
    fn load(from: &[f32; 8]) -> Self;
    /// Writes eight values.
    fn store(self, to: &mut [f32; 8]);
    /// Eight zeros.
    fn zero() -> Self;
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * factor`.
    fn scale(self, factor: f32) -> Self;
    /// `self + factor * other`.
    fn add_scaled(self, factor: f32, other: Self) -> Self;
}

#[expect(clippy::inline_always, reason = "must take on the caller's target features")]
impl Octet for [f32; 8] {
    #[inline(always)]
    fn load(from: &[f32; 8]) -> Self {
        *from
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 8]) {
        *to = self;
    }
    #[inline(always)]
    fn zero() -> Self {
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
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    #![expect(unsafe_code, reason = "intrinsics; the trait states when they may be used")]
    use std::arch::x86_64::{
        __m256, _mm256_add_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_ps, _mm256_setzero_ps,
        _mm256_storeu_ps, _mm256_sub_ps,
    };

    #[expect(clippy::inline_always, reason = "must take on the caller's target features")]
    impl super::Octet for __m256 {
        #[inline(always)]
        fn load(from: &[f32; 8]) -> Self {
            // SAFETY: eight readable values; AVX by the trait's condition, here and below.
            unsafe { _mm256_loadu_ps(from.as_ptr()) }
        }
        #[inline(always)]
        fn store(self, to: &mut [f32; 8]) {
            // SAFETY: eight writable values.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), self) }
        }
        #[inline(always)]
        fn zero() -> Self {
            // SAFETY: registers only, as in the rest.
            unsafe { _mm256_setzero_ps() }
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: registers only.
            unsafe { _mm256_add_ps(self, other) }
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            // SAFETY: registers only.
            unsafe { _mm256_sub_ps(self, other) }
        }
        #[inline(always)]
        fn scale(self, factor: f32) -> Self {
            // SAFETY: registers only.
            unsafe { _mm256_mul_ps(self, _mm256_set1_ps(factor)) }
        }
        #[inline(always)]
        fn add_scaled(self, factor: f32, other: Self) -> Self {
            // SAFETY: registers only.
            unsafe { _mm256_fmadd_ps(_mm256_set1_ps(factor), other, self) }
        }
    }
}
