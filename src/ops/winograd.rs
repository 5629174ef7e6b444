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
use super::memory::{WorkArea, buffer, work_area};
use super::panel::{self, Size, multiply};
use super::simd::{Lanes, vectorized, zero};

/// Tiles per block (at least one line of tiles): what is transformed, multiplied and transformed back while in the cache.
const BLOCK: usize = 64;
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
}

/// The 36 planes of a block of tiles, `[tile, channel]` each, in panels of up to 64 channels: `[panel][plane][tile][channel of the panel]`.
#[derive(Clone, Copy)]
struct Panels {
    channels: usize,
    tiles: usize,
}

impl Panels {
    fn work_area(self) -> WorkArea {
        work_area(self.channels.div_ceil(panel::WIDTH) * self.size())
    }

    /// Values between two panels.
    fn size(self) -> usize {
        PLANES * (panel::WIDTH * self.tiles + GAP)
    }

    /// Channels of the panel that starts with a channel.
    fn width(self, first: usize) -> usize {
        panel::WIDTH.min(self.channels - first)
    }

    /// Where a channel of a tile is in the first plane, and how far it is to the next plane.
    #[inline(always)]
    fn place(self, tile: usize, channel: usize) -> (usize, usize) {
        let within = channel % panel::WIDTH;
        let width = self.width(channel - within);
        (channel / panel::WIDTH * self.size() + tile * width + within, width * self.tiles + GAP)
    }

    /// A plane of the panel that starts with a channel.
    fn plane(self, first: usize, q: usize) -> Range<usize> {
        let (start, step) = self.place(0, first);
        start + q * step..start + q * step + self.width(first) * self.tiles
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

/// Values that are read by columns: the pixels of a tile, zero outside the image, or what lies in 36 planes.
struct Window<'a, const N: usize> {
    values: &'a [f32],
    /// Where the first row and column are; wraps around where that is before the slice.
    start: usize,
    row_step: usize,
    column_step: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<const N: usize> Window<'_, N> {
    /// Reads a column.
    #[inline(always)]
    fn column<T: Lanes>(&self, zero: T, s: usize) -> [T; N] {
        let mut column = [zero; N];
        if self.columns.contains(&s) {
            let mut at = self.start.wrapping_add(s * self.column_step);
            for r in 0..N {
                if self.rows.contains(&r) {
                    column[r] = load(zero, self.values, at);
                }
                at = at.wrapping_add(self.row_step);
            }
        }
        column
    }
}

/// Where a tile's pixels are: those of its `N` by `N` that lie within the image.
#[derive(Clone, Debug)]
struct Covered<const N: usize> {
    rows: Range<usize>,
    columns: Range<usize>,
    /// The first of them in the image's tensor.
    start: usize,
    row_step: usize,
    column_step: usize,
}

impl<const N: usize> Covered<N> {
    /// Those of a tile that starts `margin` before its outputs.
    #[inline(always)]
    fn new(t: Tiles, image: usize, row: usize, column: usize, margin: usize) -> Self {
        let (y, rows) = Tiles::clip(row * OUT, margin, N, t.height);
        let (x, columns) = Tiles::clip(column * OUT, margin, N, t.width);
        Self { rows, columns, start: t.pixel(image, y, x), row_step: t.width * t.channels, column_step: t.channels }
    }

    #[inline(always)]
    fn is_all(&self) -> bool {
        self.rows.len() == N && self.columns.len() == N
    }

    #[inline(always)]
    fn window<'a>(&self, values: &'a [f32], channel: usize) -> Window<'a, N> {
        let Self { row_step, column_step, .. } = *self;
        let before = self.rows.start * row_step + self.columns.start * column_step;
        let start = (self.start + channel).wrapping_sub(before);
        Window { values, start, row_step, column_step, rows: self.rows.clone(), columns: self.columns.clone() }
    }
}

/// `x -> V = B^T d B`
#[inline(always)]
fn transform_input<T: Lanes>(zero: T, x: &[f32], t: Tiles, lines: Range<usize>, v: &mut [f32], planes: Panels) {
    let mut tile = 0;
    for line in lines {
        for column in 0..t.across {
            let covered = Covered::<IN>::new(t, line / t.down, line % t.down, column, 1);
            for channel in (0..t.channels).step_by(T::WIDTH) {
                let d = covered.window(x, channel);
                let mut half = [[zero; IN]; IN]; // [column][row frequency]
                for s in 0..IN {
                    half[s] = input(d.column(zero, s));
                }
                let (mut to, plane) = planes.place(tile, channel);
                for r in 0..IN {
                    let values = input([half[0][r], half[1][r], half[2][r], half[3][r], half[4][r], half[5][r]]);
                    for s in 0..IN {
                        store(values[s], v, to);
                        to += plane;
                    }
                }
            }
            tile += 1;
        }
    }
}

/// `dV -> dx += B dV B^T`. A tile shares its first `IN - OUT` rows and columns with the tiles above and left, which came before; the pixels
/// that it is the first to reach are written, not added to.
#[inline(always)]
fn transform_input_back<T: Lanes>(zero: T, v: &[f32], planes: Panels, t: Tiles, lines: Range<usize>, dx: &mut [f32]) {
    let mut tile = 0;
    for line in lines {
        let row = line % t.down;
        for column in 0..t.across {
            let covered = Covered::<IN>::new(t, line / t.down, row, column, 1);
            let Covered { rows, columns, .. } = covered.clone();
            let reached = if column == 0 { columns.start } else { (IN - OUT).min(columns.end) };
            for channel in (0..t.channels).step_by(T::WIDTH) {
                let (from, plane) = planes.place(tile, channel);
                let values = frequencies(v, from, plane);
                let mut half = [[zero; IN]; IN]; // [column frequency][row]
                for s in 0..IN {
                    half[s] = input_transposed(values.column(zero, s));
                }
                let mut d = [[zero; IN]; IN]; // [row][column]
                for r in 0..IN {
                    d[r] = input_transposed([half[0][r], half[1][r], half[2][r], half[3][r], half[4][r], half[5][r]]);
                }
                let mut line = covered.start + channel;
                for r in rows.clone() {
                    let reached = if row > 0 && r < IN - OUT { columns.end } else { reached };
                    let mut to = line;
                    for s in columns.start..reached {
                        store(load(zero, dx, to).add(d[r][s]), dx, to);
                        to += covered.column_step;
                    }
                    for s in reached..columns.end {
                        store(d[r][s], dx, to);
                        to += covered.column_step;
                    }
                    line += covered.row_step;
                }
            }
            tile += 1;
        }
    }
}

/// `M -> y = A^T M A`
#[inline(always)]
fn transform_output<T: Lanes>(zero: T, m: &[f32], planes: Panels, t: Tiles, lines: Range<usize>, y: &mut [f32]) {
    let mut tile = 0;
    for line in lines {
        for column in 0..t.across {
            let covered = Covered::<OUT>::new(t, line / t.down, line % t.down, column, 0);
            for channel in (0..t.channels).step_by(T::WIDTH) {
                let (from, plane) = planes.place(tile, channel);
                let values = frequencies(m, from, plane);
                let mut half = [[zero; OUT]; IN]; // [column frequency][row]
                for s in 0..IN {
                    half[s] = output(values.column(zero, s));
                }
                let mut d = [[zero; OUT]; OUT]; // [row][column]
                for r in 0..OUT {
                    d[r] = output([half[0][r], half[1][r], half[2][r], half[3][r], half[4][r], half[5][r]]);
                }
                let at = covered.start + channel;
                if covered.is_all() {
                    for r in 0..OUT {
                        for s in 0..OUT {
                            store(d[r][s], y, at + r * covered.row_step + s * covered.column_step);
                        }
                    }
                } else {
                    for r in covered.rows.clone() {
                        for s in covered.columns.clone() {
                            store(d[r][s], y, at + r * covered.row_step + s * covered.column_step);
                        }
                    }
                }
            }
            tile += 1;
        }
    }
}

/// `dy -> dM = A dy A^T`
#[inline(always)]
fn transform_output_back<T: Lanes>(zero: T, dy: &[f32], t: Tiles, lines: Range<usize>, m: &mut [f32], planes: Panels) {
    let mut tile = 0;
    for line in lines {
        for column in 0..t.across {
            let covered = Covered::<OUT>::new(t, line / t.down, line % t.down, column, 0);
            for channel in (0..t.channels).step_by(T::WIDTH) {
                let d = covered.window(dy, channel);
                let mut half = [[zero; IN]; OUT]; // [column][row frequency]
                for s in 0..OUT {
                    half[s] = output_transposed(d.column(zero, s));
                }
                let (mut to, plane) = planes.place(tile, channel);
                for r in 0..IN {
                    let values = output_transposed([half[0][r], half[1][r], half[2][r], half[3][r]]);
                    for s in 0..IN {
                        store(values[s], m, to);
                        to += plane;
                    }
                }
            }
            tile += 1;
        }
    }
}

/// The 36 values of a tile, or of a pair of channels, from their planes; columns and rows are frequencies.
#[inline(always)]
fn frequencies(values: &[f32], start: usize, plane: usize) -> Window<'_, IN> {
    Window { values, start, row_step: IN * plane, column_step: plane, rows: 0..IN, columns: 0..IN }
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
            let values = frequencies(u, row * channels.len() + lane, plane);
            let mut half = [[zero; 3]; IN];
            for s in 0..IN {
                half[s] = filter_transposed(values.column(zero, s));
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
    fn input_to_v(x: &[f32], t: Tiles, lines: Range<usize>, v: &mut [f32], planes: Panels) {
        with_lanes!(FMA, WIDE && t.channels.is_multiple_of(16), transform_input(x, t, lines, v, planes));
    }
    fn dv_to_input(v: &[f32], planes: Panels, t: Tiles, lines: Range<usize>, dx: &mut [f32]) {
        with_lanes!(FMA, WIDE && t.channels.is_multiple_of(16), transform_input_back(v, planes, t, lines, dx));
    }
    fn m_to_output(m: &[f32], planes: Panels, t: Tiles, lines: Range<usize>, y: &mut [f32]) {
        with_lanes!(FMA, WIDE && t.channels.is_multiple_of(16), transform_output(m, planes, t, lines, y));
    }
    fn output_to_dm(dy: &[f32], t: Tiles, lines: Range<usize>, m: &mut [f32], planes: Panels) {
        with_lanes!(FMA, WIDE && t.channels.is_multiple_of(16), transform_output_back(dy, t, lines, m, planes));
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

/// The transformed filters, in pieces of up to 64 by 64: `[outputs' piece][channels' piece][plane][row][column]`.
///
/// In general all are transformed at once, ahead of the blocks of tiles. Where there is one block only, each transformed filter is used once, and many of them
/// (512 channels on 4x4 pixels: 37 MiB) would go to memory and come back: those are transformed piece by piece, and stay in the cache until
/// their products are done. Measured: half the time forward, three quarters backward.
struct Filters {
    /// Those of the same outputs one after the other.
    pieces: Vec<Piece>,
    piece_by_piece: bool,
}

impl Filters {
    /// Transformed filters that are too many for the cache.
    const MANY: usize = 1 << 20;
    /// Values between two pieces.
    const SIZE: usize = PLANES * (panel::WIDTH * panel::WIDTH + GAP);

    fn new(g: &Geometry, one_block: bool) -> Self {
        let ranges = |end: usize| (0..end).step_by(panel::WIDTH).map(move |at| at..(at + panel::WIDTH).min(end));
        let pieces = ranges(g.out_channels)
            .flat_map(|outs| ranges(g.channels).map(move |channels| Piece { outs: outs.clone(), channels }));
        let many = PLANES * g.out_channels * g.channels > Self::MANY;
        Self { pieces: pieces.collect(), piece_by_piece: one_block && many }
    }

    fn work_area(&self) -> WorkArea {
        work_area(Self::SIZE * if self.piece_by_piece { 1 } else { self.pieces.len() })
    }

    /// Where a piece starts.
    fn start(&self, piece: usize) -> usize {
        if self.piece_by_piece { 0 } else { piece * Self::SIZE }
    }

    /// A plane of a piece.
    fn plane(&self, piece: usize, q: usize) -> Range<usize> {
        let len = self.pieces[piece].len();
        let start = self.start(piece) + q * (len + GAP);
        start..start + len
    }

    /// Transforms a piece.
    fn transform(&self, piece: usize, w: &[f32], channels: usize, turned: bool, u: &mut [f32]) {
        let plane = self.pieces[piece].len() + GAP;
        filter_to_u(w, channels, &self.pieces[piece], turned, &mut u[self.start(piece)..], plane);
    }

    /// Transforms all pieces, unless they are transformed one by one.
    fn transform_ahead(&self, w: &[f32], channels: usize, turned: bool, u: &mut [f32]) {
        if !self.piece_by_piece {
            for piece in 0..self.pieces.len() {
                self.transform(piece, w, channels, turned, u);
            }
        }
    }

    /// Transforms a piece's gradient back.
    fn transform_back(&self, piece: usize, du: &[f32], channels: usize, dw: &mut [f32]) {
        let plane = self.pieces[piece].len() + GAP;
        du_to_filter(&du[self.start(piece)..], plane, channels, &self.pieces[piece], dw);
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
    let tiles = step * tiles_in.across;
    let (planes_v, planes_m) = (Panels { channels: g.channels, tiles }, Panels { channels: g.out_channels, tiles });
    let (mut v, mut m) = (planes_v.work_area(), planes_m.work_area());
    let filters = Filters::new(g, step >= g.batch * tiles_in.down);
    let mut u = filters.work_area();
    filters.transform_ahead(weight, g.channels, true, &mut u);
    let mut y = buffer(g.pixels() * g.out_channels);
    for lines in blocks {
        input_to_v(x, tiles_in, lines.clone(), &mut v, planes_v);
        for (piece, Piece { outs, channels }) in filters.pieces.iter().enumerate() {
            if filters.piece_by_piece {
                filters.transform(piece, weight, g.channels, true, &mut u);
            }
            let size = Size { rows: lines.len() * tiles_in.across, columns: outs.len(), inner: channels.len() };
            for q in 0..PLANES {
                let (m, v) = (&mut m[planes_m.plane(outs.start, q)], &v[planes_v.plane(channels.start, q)]);
                multiply(m, v, false, &u[filters.plane(piece, q)], size, channels.start > 0);
            }
        }
        m_to_output(&m, planes_m, tiles_out, lines, &mut y);
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
    let tiles = step * tiles_in.across;
    let (planes_v, planes_m) = (Panels { channels: g.channels, tiles }, Panels { channels: g.out_channels, tiles });
    let (mut v, mut m) = (planes_v.work_area(), planes_m.work_area());

    let filters = Filters::new(g, step >= g.batch * tiles_in.down);
    let (mut u, mut du) = (filters.work_area(), filters.work_area());
    let mut dx = want_dx.then(|| buffer(x.len()));
    if want_dx {
        filters.transform_ahead(weight, g.channels, false, &mut u);
    }
    let mut dw = want_dw.then(|| buffer(weight.len()));
    if g.batch == 0 {
        du.fill(0.0); // no block will
    }
    for lines in blocks {
        let tiles = lines.len() * tiles_in.across;
        output_to_dm(dy, tiles_out, lines.clone(), &mut m, planes_m);
        if let Some(dw) = &mut dw {
            input_to_v(x, tiles_in, lines.clone(), &mut v, planes_v);
            for (piece, Piece { outs, channels }) in filters.pieces.iter().enumerate() {
                let size = Size { rows: outs.len(), columns: channels.len(), inner: tiles };
                for q in 0..PLANES {
                    let (m, v) = (&m[planes_m.plane(outs.start, q)], &v[planes_v.plane(channels.start, q)]);
                    let add = !filters.piece_by_piece && lines.start > 0;
                    multiply(&mut du[filters.plane(piece, q)], m, true, v, size, add);
                }
                if filters.piece_by_piece {
                    filters.transform_back(piece, &du, g.channels, dw);
                }
            }
        }
        if let Some(dx) = &mut dx {
            for (piece, Piece { outs, channels }) in filters.pieces.iter().enumerate() {
                if filters.piece_by_piece {
                    filters.transform(piece, weight, g.channels, false, &mut u);
                }
                let size = Size { rows: tiles, columns: channels.len(), inner: outs.len() };
                for q in 0..PLANES {
                    let (v, m) = (&mut v[planes_v.plane(channels.start, q)], &m[planes_m.plane(outs.start, q)]);
                    multiply(v, m, false, &u[filters.plane(piece, q)], size, outs.start > 0);
                }
            }
            dv_to_input(&v, planes_v, tiles_in, lines, dx);
        }
    }
    if let Some(dw) = &mut dw
        && (!filters.piece_by_piece || g.batch == 0)
    {
        for piece in 0..filters.pieces.len() {
            filters.transform_back(piece, &du, g.channels, dw);
        }
    }
    (dx, dw)
}
