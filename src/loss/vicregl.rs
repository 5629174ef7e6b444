//! `VICRegL`: `VICReg` of whole images and of matched places.
//!
//! Bardes, Ponce, `LeCun`, 2022, <https://arxiv.org/abs/2210.01571>, equations 1 to 4, with the weights of the released code: whole images
//! count the covariance once a view (the mean over views), places half of `VICReg`'s. Places are matched with their nearest neighbour in the other view,
//! by features and by position in the image; the best `matches` pairs count, sorted by distance.
//!
//! Deviation: equal distances are ordered by place; torch leaves their order open.

use burn::tensor::{Int, Tensor, TensorData};

use super::vicreg::{self, Weights};

/// Embeddings of one view of each image.
#[derive(Clone, Debug)]
pub struct View {
    /// Of the whole view, `[b, d]`.
    pub whole: Tensor<2>,
    /// Of its places, `[b, h, w, c]`.
    pub map: Tensor<4>,
    /// Where the places lie in the image, `[b, h, w, 2]`.
    pub grid: Tensor<4>,
}

/// Returns the loss of a batch; its count is 1.
///
/// # Shapes
/// - `global`, `local`: views of the same images; each global view meets every other view.
/// - `alpha`: share of the loss of whole images, places have the rest.
/// - `matches`: pairs that count when the first view of a pair of views looks for neighbours, and when the second does; all its
///   places where it has fewer.
/// - output: `[1]`
///
/// # Panics
/// If there is no pair of views, the shapes don't fit, or there are fewer than two images.
#[must_use]
pub fn vicregl(global: &[View], local: &[View], alpha: f64, matches: [usize; 2], weights: Weights) -> Tensor<1> {
    let others = |a: usize| global.iter().enumerate().filter(move |(b, _)| *b != a).map(|(_, v)| v).chain(local);
    let pairs: Vec<(&View, &View)> =
        global.iter().enumerate().flat_map(|(a, view)| others(a).map(move |other| (view, other))).collect();
    assert!(!pairs.is_empty(), "a global view and another one are needed");

    let whole = |view: &View| view.whole.clone().unsqueeze_dim::<3>(1); // [b, 1, d]
    let invariance = mean(pairs.iter().map(|(a, b)| vicreg::invariance(whole(a), whole(b))));
    let variance = mean(global.iter().chain(local).map(|view| vicreg::variance(whole(view))));
    let covariance = mean(global.iter().chain(local).map(|view| vicreg::covariance(whole(view))));
    let images = invariance * weights.invariance + variance * weights.variance + covariance * weights.covariance;

    let places = mean(pairs.iter().map(|(a, b)| {
        let (map_a, map_b) = (flat(a.map.clone()), flat(b.map.clone()));
        let (grid_a, grid_b) = (flat(a.grid.clone()), flat(b.grid.clone()));
        let maps = [&map_a, &map_b];
        matched(maps, maps, matches, weights) + matched(maps, [&grid_a, &grid_b], matches, weights)
    }));
    images * alpha + places * (1.0 - alpha)
}

/// `VICReg` of the places of two views matched by the distance of their keys, in both directions, averaged.
fn matched(
    [a, b]: [&Tensor<3>; 2],
    [key_a, key_b]: [&Tensor<3>; 2],
    [from_a, from_b]: [usize; 2],
    weights: Weights,
) -> Tensor<1> {
    let direction = |input: &Tensor<3>, candidates: &Tensor<3>, keys: [&Tensor<3>; 2], count: usize| {
        let [own, other] = nearest(keys[0], keys[1], count);
        let [_, _, dim] = input.dims();
        let pick = |map: &Tensor<3>, index: Tensor<2, Int>| {
            let [batch, count] = index.dims();
            map.clone().gather(1, index.unsqueeze_dim::<3>(2).expand([batch, count, dim]))
        };
        let (first, second) = (pick(input, own), pick(candidates, other));
        let variance = (vicreg::variance(first.clone()) + vicreg::variance(second.clone())) * 0.5;
        let covariance = (vicreg::covariance(first.clone()) + vicreg::covariance(second.clone())) * 0.5;
        vicreg::invariance(first, second) * weights.invariance
            + variance * weights.variance
            + covariance * weights.covariance
    };
    (direction(a, b, [key_a, key_b], from_a) + direction(b, a, [key_b, key_a], from_b)) * 0.5
}

/// Finds the nearest candidate of each place, and of these pairs the `count` closest, in order of distance: indices of places and of
/// candidates, each `[b, count]`. On the host in float64, so that no close call is decided by rounding.
fn nearest(keys: &Tensor<3>, candidates: &Tensor<3>, count: usize) -> [Tensor<2, Int>; 2] {
    let ([batch, places, dim], [_, others, _]) = (keys.dims(), candidates.dims());
    let count = count.min(places);
    let device = keys.device();
    let (keys, candidates) = (host(keys), host(candidates));
    let (mut own, mut other) = (Vec::new(), Vec::new());
    for (keys, candidates) in keys.chunks(places * dim).zip(candidates.chunks(others * dim)) {
        let closest = |key: &[f32]| {
            let distance = |candidate: &[f32]| {
                key.iter().zip(candidate).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>()
            };
            // the first of equals
            let closer = |a: (f64, i64), b: (f64, i64)| if b.0 < a.0 { b } else { a };
            candidates.chunks(dim).map(distance).zip(0..).fold((f64::INFINITY, 0), closer)
        };
        let mut pairs: Vec<(f64, i64, i64)> = (0..)
            .zip(keys.chunks(dim).map(closest))
            .map(|(place, (distance, other))| (distance, place, other))
            .collect();
        pairs.sort_by(|a, b| a.0.total_cmp(&b.0)); // stable: equals stay in the order of places
        own.extend(pairs[..count].iter().map(|pair| pair.1));
        other.extend(pairs[..count].iter().map(|pair| pair.2));
    }
    [own, other].map(|index| Tensor::from_data(TensorData::new(index, [batch, count]), &device))
}

fn host(tensor: &Tensor<3>) -> Vec<f32> {
    tensor.clone().detach().into_data().try_to_vec().expect("embeddings are float32")
}

/// `[b, h, w, c]` to `[b, h * w, c]`.
fn flat(map: Tensor<4>) -> Tensor<3> {
    let [batch, height, width, channels] = map.dims();
    map.reshape([batch, height * width, channels])
}

/// Averages one term or more.
fn mean(terms: impl Iterator<Item = Tensor<1>>) -> Tensor<1> {
    let terms: Vec<_> = terms.collect();
    let count = terms.len() as f64;
    terms.into_iter().reduce(|a, b| a + b).expect("there is a pair of views") / count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::testing::{agrees, finite, numbers, tensor, values};

    const WEIGHTS: Weights = Weights { invariance: 25.0, variance: 25.0, covariance: 1.0 };

    /// Values without the regular gaps of `values`, whose distances tie.
    fn irregular(len: usize, seed: f64) -> Vec<f64> {
        values(len, seed)
            .iter()
            .enumerate()
            .map(|(i, v)| f64::from(((i * i) as f64 + 5.0 * v + seed).sin() as f32))
            .collect()
    }

    fn view(whole: &[f64], map: &[f64], grid: &[f64]) -> View {
        View {
            whole: tensor(whole, [2, whole.len() / 2]),
            map: tensor(map, [2, 2, 2, 3]),
            grid: tensor(grid, [2, 2, 2, 2]),
        }
    }

    #[test]
    fn neighbours_come_in_order_of_distance() {
        let keys = tensor::<3>(&[0.0, 5.0, 1.0], [1, 3, 1]);
        let candidates = tensor::<3>(&[1.25, 4.0, -0.5, 1.25], [1, 4, 1]);
        let index = |t: Tensor<2, Int>| t.into_data().convert::<i64>().try_to_vec::<i64>().unwrap();
        let [own, other] = nearest(&keys, &candidates, 2).map(index);
        assert_eq!((own, other), (vec![2, 0], vec![0, 2])); // the first of equals
        let [own, _] = nearest(&keys, &candidates, 99).map(index);
        assert_eq!(own, [2, 0, 1]);
    }

    #[test]
    fn two_views_of_equal_places_are_vicreg_of_each_place() {
        // grids equal, features matched to themselves: only invariance vanishes
        let (map, grid) = (values(24, 0.1), values(16, 0.2));
        let whole = values(8, 0.5);
        let views = [view(&whole, &map, &grid), view(&whole, &map, &grid)];
        let got = numbers(vicregl(&views, &[], 0.0, [20, 20], WEIGHTS))[0];
        let map = tensor::<3>(&map, [2, 4, 3]);
        let expected = numbers(vicreg::variance(map.clone()) * 25.0 + vicreg::covariance(map))[0];
        assert!((got - 2.0 * expected).abs() < 1e-4 * got, "{got} {expected}"); // by feature and by position
    }

    #[test]
    fn gradients_agree_with_finite_differences() {
        let (batch, dim) = (2, 3);
        let whole = [values(batch * dim, 0.15), values(batch * dim, 0.65)];
        let build = |maps: &[Tensor<4>]| {
            let of = |i: usize| View {
                whole: tensor(&whole[i], [batch, dim]),
                map: maps[i].clone(),
                grid: tensor(&irregular(16, 0.3 + 0.2 * i as f64), [2, 2, 2, 2]),
            };
            vicregl(&[of(0)], &[of(1)], 0.25, [3, 2], WEIGHTS)
        };
        let inputs = [(irregular(24, 0.1), [2, 2, 2, 3]), (irregular(24, 0.45), [2, 2, 2, 3])];
        agrees(&inputs, |x| build(&x), |x| naive(x, &whole));
    }

    /// One global and one local view, in float64 with plain loops.
    fn naive(maps: &[Vec<f64>], whole: &[Vec<f64>; 2]) -> f64 {
        let term = |a: &[Vec<f64>], b: &[Vec<f64>], half: f64| {
            // rows: `[image][places * features]`
            let (n, dim) = (a[0].len() / 3, 3);
            let mse = a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).powi(2)).sum::<f64>()
                / (a.len() * a[0].len()) as f64;
            let moments = |x: &[Vec<f64>]| {
                let mut sums = (0.0, 0.0);
                for place in 0..n {
                    let rows: Vec<f64> = x.iter().flat_map(|r| r[place * dim..(place + 1) * dim].to_vec()).collect();
                    let (v, c) = crate::loss::vicreg::tests::moments(&rows, x.len(), dim);
                    sums = (sums.0 + v / n as f64, sums.1 + c / n as f64);
                }
                sums
            };
            let ((v1, c1), (v2, c2)) = (moments(a), moments(b));
            25.0 * mse + 25.0 * (v1 + v2) / 2.0 + half * (c1 + c2)
        };
        let rows = |x: &[f64]| x.chunks(x.len() / 2).map(<[f64]>::to_vec).collect::<Vec<_>>();
        let images = term(&rows(&whole[0]), &rows(&whole[1]), 0.5);
        let grids = [irregular(16, 0.3), irregular(16, 0.5)];
        let distance = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        let direction = |from: usize, keys: [&[f64]; 2], count: usize| {
            let (mut own, mut other) = (vec![Vec::new(); 2], vec![Vec::new(); 2]);
            for image in 0..2 {
                let width = keys[0].len() / 8;
                let key = |i: usize, p: usize| &keys[i][(image * 4 + p) * width..(image * 4 + p + 1) * width];
                let mut pairs: Vec<(f64, usize, usize)> = (0..4)
                    .map(|p| {
                        (0..4)
                            .map(|c| (distance(key(0, p), key(1, c)), p, c))
                            .min_by(|a, b| a.0.total_cmp(&b.0))
                            .unwrap()
                    })
                    .collect();
                pairs.sort_by(|a, b| a.0.total_cmp(&b.0));
                for &(_, p, c) in &pairs[..count] {
                    own[image].extend(&maps[from][(image * 4 + p) * 3..(image * 4 + p + 1) * 3]);
                    other[image].extend(&maps[1 - from][(image * 4 + c) * 3..(image * 4 + c + 1) * 3]);
                }
            }
            term(&own, &other, 0.5)
        };
        let by = |keys: [&[f64]; 2]| f64::midpoint(direction(0, keys, 3), direction(1, [keys[1], keys[0]], 2));
        0.25 * images + 0.75 * (by([&maps[0], &maps[1]]) + by([&grids[0], &grids[1]]))
    }

    #[test]
    fn ugly_inputs_stay_finite() {
        for map in [vec![0.0; 24], vec![1.0; 24], values(3, 0.1).repeat(8)] {
            finite(&[(map, [2, 2, 2, 3])], |x| {
                let of = |map: Tensor<4>| View {
                    whole: map.clone().mean_dim(1).mean_dim(2).reshape([2, 3]),
                    grid: Tensor::zeros([2, 2, 2, 2], &map.device()),
                    map,
                };
                vicregl(&[of(x[0].clone()), of(x[0].clone())], &[of(x[0].clone())], 0.75, [6, 3], WEIGHTS)
            });
        }
    }
}
