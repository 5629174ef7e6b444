//! 3x3 convolution with stride 1 by Winograd's algorithm F(4x4, 3x3).
//!
//! Four outputs of a 3-tap filter need 6 products instead of 12 (Toom-Cook: evaluate both polynomials at six points, multiply,
//! interpolate); nested in two dimensions, a 4x4 tile of the output needs 36 products per pair of channels instead of 144:
//!
//! ```text
//! U = G w G^T        V = B^T d B        Y = A^T (U . V summed over channels) A
//! ```
//!
//! where `d` is the 6x6 input tile that starts one pixel above and left of the output tile. The sums over channels are 36
//! matrix products `M_q[tile, out] = V_q[tile, channel] U_q[out, channel]^T`. The backward pass is the same algorithm transposed:
//!
//! ```text
//! dM = A dY A^T      dV = dM U      dd = B dV B^T, added where tiles overlap      dU = dM^T V      dw = G^T dU G
//! ```
//!
//! The points are `0, +-5/8, +-3/2, infinity`, exact in binary: worst error of all tests 1.4e-6 of the largest value, where
//! the textbook's `0, +-1, +-2` has 5.9e-6 and a plain matrix product 0.8e-6. That is why there is no F(2x2, 3x3), which would cost 1.8 times
//! the products. For points `+-a, +-b` the matrices follow from `p(x) = x (x^2 - a^2) (x^2 - b^2)`: a row of
//! `B^T` holds the coefficients of `p` without one root, `G` the powers of the point over that polynomial's value there, `A^T` the powers.
//!
//! Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", <https://arxiv.org/abs/1509.09308>.
#![allow(clippy::doc_markdown, reason = "formulas")]

use std::ops::Range;

use super::conv2d::Geometry;
use super::gemm::{Matrix, matmul};
use super::memory::{WorkArea, buffer, work_area};
use super::simd::{Lanes, vectorized, zero};

/// Tiles per block (at least one line of tiles): what is transformed, multiplied and transformed back while in the cache.
const BLOCK: usize = 128;
/// Output pixels per tile and direction, input pixels, and products per tile.
const OUT: usize = 4;
const IN: usize = 6;
const PLANES: usize = IN * IN;
/// Values between two planes beyond their size, so that the planes of a tile do not fall on the same cache sets.
const GAP: usize = 48;

/// The interpolation points are 0, +-A, +-B and infinity.
const A: f32 = 0.625;
const B: f32 = 1.5;
const A2: f32 = A * A;
const B2: f32 = B * B;
/// Values of `p` without one root, at that root.
const NORM_0: f32 = A2 * B2;
const NORM_A: f32 = 2.0 * A2 * (A2 - B2);
const NORM_B: f32 = 2.0 * B2 * (B2 - A2);

/// Tells whether the algorithm serves a convolution, and pays.
pub(super) fn applies(g: &Geometry) -> bool {
    let products = g.height.div_ceil(OUT) * g.width.div_ceil(OUT) * PLANES;
    g.kernel == [3, 3]
        && g.stride == [1, 1]
        && g.padding == [1, 1]
        && g.channels > 0
        && g.out_channels > 0
        && g.channels.is_multiple_of(8)
        && g.out_channels.is_multiple_of(8)
        && products * 3 <= g.height * g.width * 9 * 2
}

/// `B^T d`
#[inline(always)]
fn input<T: Lanes>(d: [T; 6]) -> [T; 6] {
    let even_a = d[4].add_scaled(-B2, d[2]);
    let odd_a = d[3].add_scaled(-B2, d[1]).scale(A);
    let even_b = d[4].add_scaled(-A2, d[2]);
    let odd_b = d[3].add_scaled(-A2, d[1]).scale(B);
    [
        d[4].add_scaled(-(A2 + B2), d[2]).add_scaled(A2 * B2, d[0]),
        even_a.add(odd_a),
        even_a.sub(odd_a),
        even_b.add(odd_b),
        even_b.sub(odd_b),
        d[5].add_scaled(-(A2 + B2), d[3]).add_scaled(A2 * B2, d[1]),
    ]
}

/// `B v`
#[inline(always)]
fn input_transposed<T: Lanes>(v: [T; 6]) -> [T; 6] {
    let (sum_a, diff_a) = (v[1].add(v[2]), v[1].sub(v[2]));
    let (sum_b, diff_b) = (v[3].add(v[4]), v[3].sub(v[4]));
    [
        v[0].scale(A2 * B2),
        v[5].scale(A2 * B2).add_scaled(-A * B2, diff_a).add_scaled(-B * A2, diff_b),
        v[0].scale(-(A2 + B2)).add_scaled(-B2, sum_a).add_scaled(-A2, sum_b),
        v[5].scale(-(A2 + B2)).add_scaled(A, diff_a).add_scaled(B, diff_b),
        v[0].add(sum_a).add(sum_b),
        v[5],
    ]
}

/// `A^T m`
#[inline(always)]
fn output<T: Lanes>(m: [T; 6]) -> [T; 4] {
    let (sum_a, diff_a) = (m[1].add(m[2]), m[1].sub(m[2]));
    let (sum_b, diff_b) = (m[3].add(m[4]), m[3].sub(m[4]));
    [
        m[0].add(sum_a).add(sum_b),
        diff_a.scale(A).add_scaled(B, diff_b),
        sum_a.scale(A2).add_scaled(B2, sum_b),
        m[5].add_scaled(A2 * A, diff_a).add_scaled(B2 * B, diff_b),
    ]
}

/// `A y`
#[inline(always)]
fn output_transposed<T: Lanes>(y: [T; 4]) -> [T; 6] {
    let even_a = y[0].add_scaled(A2, y[2]);
    let odd_a = y[1].scale(A).add_scaled(A2 * A, y[3]);
    let even_b = y[0].add_scaled(B2, y[2]);
    let odd_b = y[1].scale(B).add_scaled(B2 * B, y[3]);
    [y[0], even_a.add(odd_a), even_a.sub(odd_a), even_b.add(odd_b), even_b.sub(odd_b), y[3]]
}

/// `G w`
#[inline(always)]
fn filter<T: Lanes>(w: [T; 3]) -> [T; 6] {
    let even_a = w[0].scale(1.0 / NORM_A).add_scaled(A2 / NORM_A, w[2]);
    let even_b = w[0].scale(1.0 / NORM_B).add_scaled(B2 / NORM_B, w[2]);
    let (odd_a, odd_b) = (w[1].scale(A / NORM_A), w[1].scale(B / NORM_B));
    [w[0].scale(1.0 / NORM_0), even_a.add(odd_a), even_a.sub(odd_a), even_b.add(odd_b), even_b.sub(odd_b), w[2]]
}

/// `G^T u`
#[inline(always)]
fn filter_transposed<T: Lanes>(u: [T; 6]) -> [T; 3] {
    let (sum_a, diff_a) = (u[1].add(u[2]), u[1].sub(u[2]));
    let (sum_b, diff_b) = (u[3].add(u[4]), u[3].sub(u[4]));
    [
        u[0].scale(1.0 / NORM_0).add_scaled(1.0 / NORM_A, sum_a).add_scaled(1.0 / NORM_B, sum_b),
        diff_a.scale(A / NORM_A).add_scaled(B / NORM_B, diff_b),
        u[5].add_scaled(A2 / NORM_A, sum_a).add_scaled(B2 / NORM_B, sum_b),
    ]
}

/// Sizes of the tiling, and the channels of the tensor that is being transformed.
#[derive(Clone, Copy)]
struct Tiles {
    height: usize,
    width: usize,
    channels: usize,
    down: usize,
    across: usize,
}

impl Tiles {
    fn new(g: &Geometry, channels: usize) -> Self {
        let (down, across) = (g.height.div_ceil(OUT), g.width.div_ceil(OUT));
        Self { height: g.height, width: g.width, channels, down, across }
    }

    /// Values between two planes for so many lines of tiles.
    fn plane(&self, lines: usize) -> usize {
        lines * self.across * self.channels + GAP
    }

    /// Where pixel `(y, x)` of an image starts.
    fn pixel(&self, image: usize, y: usize, x: usize) -> usize {
        ((image * self.height + y) * self.width + x) * self.channels
    }

    /// The part of `0..size` that a tile covers which starts at `first - margin` and is `len` long: the first covered
    /// position, and the range within the tile.
    fn clip(first: usize, margin: usize, len: usize, size: usize) -> (usize, Range<usize>) {
        let before = margin.saturating_sub(first);
        let start = (first + before).saturating_sub(margin);
        (start, before..len.min((size + margin).saturating_sub(first)).max(before))
    }

    /// Lists image, tile row, tile column and offset in a plane of the tiles of some lines.
    fn list(self, lines: Range<usize>) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let tiles = lines.flat_map(move |line| (0..self.across).map(move |column| (line, column)));
        tiles
            .enumerate()
            .map(move |(tile, (line, column))| (line / self.down, line % self.down, column, tile * self.channels))
    }
}

// No register is touched in a closure below: one that is not inlined would be compiled without the instruction set of the function around
// it, and every intrinsic in it as a call.

#[inline(always)]
fn load<T: Lanes>(zero: T, from: &[f32], at: usize) -> T {
    zero.load(&from[at..])
}

#[inline(always)]
fn store<T: Lanes>(value: T, to: &mut [f32], at: usize) {
    value.store(&mut to[at..]);
}

/// `x -> V = B^T d B`
#[inline(always)]
fn transform_input<T: Lanes>(zero: T, x: &[f32], t: Tiles, lines: Range<usize>, v: &mut [f32], plane: usize) {
    for (image, row, column, at) in t.list(lines) {
        let (y0, rows) = Tiles::clip(row * OUT, 1, IN, t.height);
        let (x0, columns) = Tiles::clip(column * OUT, 1, IN, t.width);
        for channel in (0..t.channels).step_by(T::WIDTH) {
            let mut half = [[zero; IN]; IN]; // [column][row frequency]
            for s in columns.clone() {
                let mut from = t.pixel(image, y0, x0 + s - columns.start) + channel;
                let mut d = [zero; IN];
                for r in rows.clone() {
                    d[r] = load(zero, x, from);
                    from += t.width * t.channels;
                }
                half[s] = input(d);
            }
            let mut to = at + channel;
            for r in 0..IN {
                for value in input([half[0][r], half[1][r], half[2][r], half[3][r], half[4][r], half[5][r]]) {
                    store(value, v, to);
                    to += plane;
                }
            }
        }
    }
}

/// `dV -> dx += B dV B^T`; clears an image when it comes to its first line.
#[inline(always)]
fn transform_input_back<T: Lanes>(zero: T, v: &[f32], plane: usize, t: Tiles, lines: Range<usize>, dx: &mut [f32]) {
    for (image, row, column, at) in t.list(lines) {
        if row == 0 && column == 0 {
            dx[t.pixel(image, 0, 0)..t.pixel(image + 1, 0, 0)].fill(0.0);
        }
        let (y0, rows) = Tiles::clip(row * OUT, 1, IN, t.height);
        let (x0, columns) = Tiles::clip(column * OUT, 1, IN, t.width);
        for channel in (0..t.channels).step_by(T::WIDTH) {
            let mut half = columns_of(zero, v, plane, at + channel); // [column frequency][row]
            for column in &mut half {
                *column = input_transposed(*column);
            }
            for r in rows.clone() {
                let d = input_transposed([half[0][r], half[1][r], half[2][r], half[3][r], half[4][r], half[5][r]]);
                let mut to = t.pixel(image, y0 + r - rows.start, x0) + channel;
                for s in columns.clone() {
                    store(load(zero, dx, to).add(d[s]), dx, to);
                    to += t.channels;
                }
            }
        }
    }
}

/// `M -> y = A^T M A`
#[inline(always)]
fn transform_output<T: Lanes>(zero: T, m: &[f32], plane: usize, t: Tiles, lines: Range<usize>, y: &mut [f32]) {
    for (image, row, column, at) in t.list(lines) {
        let (y0, rows) = Tiles::clip(row * OUT, 0, OUT, t.height);
        let (x0, columns) = Tiles::clip(column * OUT, 0, OUT, t.width);
        for channel in (0..t.channels).step_by(T::WIDTH) {
            let tile = columns_of(zero, m, plane, at + channel);
            let mut half = [[zero; OUT]; IN]; // [column frequency][row]
            for s in 0..IN {
                half[s] = output(tile[s]);
            }
            for r in rows.clone() {
                let d = output([half[0][r], half[1][r], half[2][r], half[3][r], half[4][r], half[5][r]]);
                let mut to = t.pixel(image, y0 + r, x0) + channel;
                for s in columns.clone() {
                    store(d[s], y, to);
                    to += t.channels;
                }
            }
        }
    }
}

/// `dy -> dM = A dy A^T`
#[inline(always)]
fn transform_output_back<T: Lanes>(zero: T, dy: &[f32], t: Tiles, lines: Range<usize>, m: &mut [f32], plane: usize) {
    for (image, row, column, at) in t.list(lines) {
        let (y0, rows) = Tiles::clip(row * OUT, 0, OUT, t.height);
        let (x0, columns) = Tiles::clip(column * OUT, 0, OUT, t.width);
        for channel in (0..t.channels).step_by(T::WIDTH) {
            let mut half = [[zero; IN]; OUT]; // [column][row frequency]
            for s in columns.clone() {
                let mut from = t.pixel(image, y0, x0 + s) + channel;
                let mut d = [zero; OUT];
                for r in rows.clone() {
                    d[r] = load(zero, dy, from);
                    from += t.width * t.channels;
                }
                half[s] = output_transposed(d);
            }
            let mut to = at + channel;
            for r in 0..IN {
                for value in output_transposed([half[0][r], half[1][r], half[2][r], half[3][r]]) {
                    store(value, m, to);
                    to += plane;
                }
            }
        }
    }
}

/// Reads the 36 values of a tile. `[column][row]`
#[inline(always)]
fn columns_of<T: Lanes>(zero: T, planes: &[f32], plane: usize, at: usize) -> [[T; IN]; IN] {
    let mut columns = [[zero; IN]; IN];
    for (s, column) in columns.iter_mut().enumerate() {
        let mut from = at + s * plane;
        for value in column {
            *value = load(zero, planes, from);
            from += IN * plane;
        }
    }
    columns
}

/// A rectangle of the filters, of its own size or of all filters.
#[derive(Clone, Debug)]
struct Piece {
    outs: Range<usize>,
    channels: Range<usize>,
}

impl Piece {
    fn len(&self) -> usize {
        self.outs.len() * self.channels.len()
    }
}

/// `w -> U = G w G^T` for the pairs of a piece; planes `[out, channel]`, or `[channel, out]` if `turned`.
#[inline(always)]
fn transform_filter<T: Lanes>(
    zero: T,
    w: &[f32],
    all_channels: usize,
    piece: &Piece,
    turned: bool,
    u: &mut [f32],
    plane: usize,
) {
    let Piece { outs, channels } = piece;
    // lanes lie side by side in a plane, rows one below the other
    let (lane_step, row_step) = if turned { (9 * all_channels, 9) } else { (9, 9 * all_channels) };
    let (lanes, rows) = if turned { (outs.len(), channels.len()) } else { (channels.len(), outs.len()) };
    let first = 9 * (outs.start * all_channels + channels.start);
    // by outputs, as the weight lies
    let groups = lanes / T::WIDTH;
    let (outer, inner) = if turned { (groups, rows) } else { (rows, groups) };
    for a in 0..outer {
        for b in 0..inner {
            let (lane, row) = if turned { (a * T::WIDTH, b) } else { (b * T::WIDTH, a) };
            let from = first + lane * lane_step + row * row_step;
            let w = &w[from..];
            let mut half = [[zero; IN]; 3]; // [column][row frequency]
            for s in 0..3 {
                let column = [
                    zero.gather(&w[s..], lane_step),
                    zero.gather(&w[3 + s..], lane_step),
                    zero.gather(&w[6 + s..], lane_step),
                ];
                half[s] = filter(column);
            }
            let mut to = row * lanes + lane;
            for r in 0..IN {
                let values = filter([half[0][r], half[1][r], half[2][r]]);
                for s in 0..IN {
                    store(values[s], u, to);
                    to += plane;
                }
            }
        }
    }
}

/// `dU -> dw = G^T dU G` for the pairs of a piece; planes `[out, channel]`.
#[inline(always)]
fn transform_filter_back<T: Lanes>(
    zero: T,
    u: &[f32],
    plane: usize,
    all_channels: usize,
    piece: &Piece,
    dw: &mut [f32],
) {
    let Piece { outs, channels } = piece;
    for row in 0..outs.len() {
        for lane in (0..channels.len()).step_by(T::WIDTH) {
            let tile = columns_of(zero, u, plane, row * channels.len() + lane);
            let mut half = [[zero; 3]; IN];
            for s in 0..IN {
                half[s] = filter_transposed(tile[s]);
            }
            let mut taps = [[0.0f32; 16]; 9];
            for r in 0..3 {
                let values =
                    filter_transposed([half[0][r], half[1][r], half[2][r], half[3][r], half[4][r], half[5][r]]);
                for s in 0..3 {
                    values[s].store(&mut taps[r * 3 + s]);
                }
            }
            let first = 9 * ((outs.start + row) * all_channels + channels.start + lane);
            for (side, w) in dw[first..][..9 * T::WIDTH].chunks_exact_mut(9).enumerate() {
                for tap in 0..9 {
                    w[tap] = taps[tap][side];
                }
            }
        }
    }
}

/// Calls a generic transform with the register type of this instruction set; a wide one where it divides the channels.
macro_rules! with_lanes {
    ($fma:ident, $wide:expr, $transform:ident($($arg:expr),*)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            if $wide {
                return $transform(zero::<std::arch::x86_64::__m512>(), $($arg),*);
            }
            if $fma {
                return $transform(zero::<std::arch::x86_64::__m256>(), $($arg),*);
            }
        }
        $transform(zero::<[f32; 8]>(), $($arg),*);
    }};
}

vectorized! {
    fn input_to_v(x: &[f32], t: Tiles, lines: Range<usize>, v: &mut [f32], plane: usize) {
        with_lanes!(FMA, WIDE && t.channels.is_multiple_of(16), transform_input(x, t, lines, v, plane));
    }
    fn dv_to_input(v: &[f32], plane: usize, t: Tiles, lines: Range<usize>, dx: &mut [f32]) {
        with_lanes!(FMA, WIDE && t.channels.is_multiple_of(16), transform_input_back(v, plane, t, lines, dx));
    }
    fn m_to_output(m: &[f32], plane: usize, t: Tiles, lines: Range<usize>, y: &mut [f32]) {
        with_lanes!(FMA, WIDE && t.channels.is_multiple_of(16), transform_output(m, plane, t, lines, y));
    }
    fn output_to_dm(dy: &[f32], t: Tiles, lines: Range<usize>, m: &mut [f32], plane: usize) {
        with_lanes!(FMA, WIDE && t.channels.is_multiple_of(16), transform_output_back(dy, t, lines, m, plane));
    }
    fn filter_to_u(w: &[f32], channels: usize, piece: &Piece, turned: bool, u: &mut [f32], plane: usize) {
        let lanes = if turned { piece.outs.len() } else { piece.channels.len() };
        with_lanes!(FMA, WIDE && lanes.is_multiple_of(16), transform_filter(w, channels, piece, turned, u, plane));
    }
    fn du_to_filter(u: &[f32], plane: usize, channels: usize, piece: &Piece, dw: &mut [f32]) {
        let wide = WIDE && piece.channels.len().is_multiple_of(16);
        with_lanes!(FMA, wide, transform_filter_back(u, plane, channels, piece, dw));
    }
}

/// How filters are transformed.
///
/// In general all at once, ahead of the blocks of tiles. Where there is one block only, each transformed filter is used once, and many of them
/// (512 channels on 4x4 pixels: 37 MiB) would go to memory and come back: those are transformed in pieces that stay in the cache until
/// their products are done. Measured: half the time forward, three quarters backward. Forward, where the planes are turned, pieces
/// pay for fewer filters too.
struct Filters {
    pieces: Vec<Piece>,
    by_piece: bool,
    plane: usize,
}

impl Filters {
    /// The inner length of a product's piece and its width.
    const INNER: usize = 128;
    const WIDTH: usize = 64;
    /// Transformed filters that are too many for the cache.
    const MANY: usize = 4 << 20;

    /// Pieces of `outs` by `channels`, those of the same `outs` one after the other.
    fn new(g: &Geometry, by_piece: bool, outs: usize, channels: usize) -> Self {
        let (outs, channels) = if by_piece { (outs, channels) } else { (g.out_channels, g.channels) };
        let step = |start: usize, step: usize, end: usize| start..(start + step).min(end);
        let pieces: Vec<Piece> = (0..g.out_channels)
            .step_by(outs)
            .flat_map(|out| (0..g.channels).step_by(channels).map(move |channel| (out, channel)))
            .map(|(out, channel)| Piece {
                outs: step(out, outs, g.out_channels),
                channels: step(channel, channels, g.channels),
            })
            .collect();
        let plane = pieces.first().map_or(0, Piece::len) + GAP;
        Self { pieces, by_piece, plane }
    }

    fn work_area(&self) -> WorkArea {
        work_area(PLANES * self.plane)
    }
}

/// Lines of tiles per block, and the blocks.
fn blocks(g: &Geometry, tiles: &Tiles) -> (usize, impl Iterator<Item = Range<usize>>) {
    let lines = g.batch * tiles.down;
    let step = (BLOCK / tiles.across).clamp(1, lines.max(1));
    (step, (0..lines).step_by(step).map(move |start| start..(start + step).min(lines)))
}

/// Computes the convolution of `x` `[batch, h, w, channels]` with `weight` `[out, channels, 3, 3]`.
pub(super) fn forward(x: &[f32], weight: &[f32], g: &Geometry) -> Vec<f32> {
    let (tiles_in, tiles_out) = (Tiles::new(g, g.channels), Tiles::new(g, g.out_channels));
    let (step, blocks) = blocks(g, &tiles_in);
    let (plane_v, plane_m) = (tiles_in.plane(step), tiles_out.plane(step));
    let (mut v, mut m) = (work_area(PLANES * plane_v), work_area(PLANES * plane_m));
    let filters = Filters::new(g, step >= g.batch * tiles_in.down, Filters::WIDTH, Filters::INNER);
    let mut u = filters.work_area();
    if !filters.by_piece {
        filter_to_u(weight, g.channels, &filters.pieces[0], true, &mut u, filters.plane);
    }
    let mut y = buffer(g.pixels() * g.out_channels);
    for lines in blocks {
        let tiles = lines.len() * tiles_in.across;
        input_to_v(x, tiles_in, lines.clone(), &mut v, plane_v);
        for piece in &filters.pieces {
            if filters.by_piece {
                filter_to_u(weight, g.channels, piece, true, &mut u, filters.plane);
            }
            let Piece { outs, channels } = piece;
            for q in 0..PLANES {
                let v = Matrix::with_stride(&v[q * plane_v + channels.start..], tiles, channels.len(), g.channels);
                let u = Matrix::new(&u[q * filters.plane..], channels.len(), outs.len());
                matmul(&mut m[q * plane_m + outs.start..], g.out_channels, v, u, channels.start > 0);
            }
        }
        m_to_output(&m, plane_m, tiles_out, lines, &mut y);
    }
    y
}

/// Computes the gradients of input and weight, as far as they are wanted.
pub(super) fn backward(
    x: &[f32],
    weight: &[f32],
    dy: &[f32],
    g: &Geometry,
    want_dx: bool,
    want_dw: bool,
) -> (Option<Vec<f32>>, Option<Vec<f32>>) {
    let (tiles_in, tiles_out) = (Tiles::new(g, g.channels), Tiles::new(g, g.out_channels));
    let (step, blocks) = blocks(g, &tiles_in);
    let (plane_v, plane_m) = (tiles_in.plane(step), tiles_out.plane(step));
    let (mut v, mut m) = (work_area(PLANES * plane_v), work_area(PLANES * plane_m));

    let many = PLANES * g.out_channels * g.channels > Filters::MANY;
    let by_piece = many && step >= g.batch * tiles_in.down;
    let filters = Filters::new(g, by_piece, Filters::INNER, Filters::WIDTH);
    let mut u = filters.work_area();
    let mut dx = want_dx.then(|| buffer(x.len()));
    if want_dx && !by_piece {
        filter_to_u(weight, g.channels, &filters.pieces[0], false, &mut u, filters.plane);
    }
    let mut dw = want_dw.then(|| buffer(weight.len()));
    let mut du = filters.work_area();
    if g.batch == 0 {
        du.fill(0.0); // no block will
    }
    for lines in blocks {
        let tiles = lines.len() * tiles_in.across;
        output_to_dm(dy, tiles_out, lines.clone(), &mut m, plane_m);
        if let Some(dw) = &mut dw {
            input_to_v(x, tiles_in, lines.clone(), &mut v, plane_v);
            for piece in &filters.pieces {
                let Piece { outs, channels } = piece;
                for q in 0..PLANES {
                    let m = Matrix::with_stride(&m[q * plane_m + outs.start..], tiles, outs.len(), g.out_channels);
                    let v = Matrix::with_stride(&v[q * plane_v + channels.start..], tiles, channels.len(), g.channels);
                    let accumulate = !by_piece && lines.start > 0;
                    matmul(&mut du[q * filters.plane..], channels.len(), m.t(), v, accumulate);
                }
                if by_piece {
                    du_to_filter(&du, filters.plane, g.channels, piece, dw);
                }
            }
        }
        if let Some(dx) = &mut dx {
            for piece in &filters.pieces {
                if by_piece {
                    filter_to_u(weight, g.channels, piece, false, &mut u, filters.plane);
                }
                let Piece { outs, channels } = piece;
                for q in 0..PLANES {
                    let m = Matrix::with_stride(&m[q * plane_m + outs.start..], tiles, outs.len(), g.out_channels);
                    let u = Matrix::new(&u[q * filters.plane..], outs.len(), channels.len());
                    matmul(&mut v[q * plane_v + channels.start..], g.channels, m, u, outs.start > 0);
                }
            }
            dv_to_input(&v, plane_v, tiles_in, lines, dx);
        }
    }
    if let Some(dw) = &mut dw
        && (!by_piece || g.batch == 0)
    {
        filters.pieces.iter().for_each(|piece| du_to_filter(&du, filters.plane, g.channels, piece, dw));
    }
    (dx, dw)
}
