//! A queue of rows that is saved with the network: new rows take the place of the oldest.

use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData};

use super::Update;
use crate::loss::info_nce::enqueue;
use crate::loss::l2_normalize;
use crate::model::{Init, Scope};

/// Longest queue: 16 times MoCo's, 512 MiB at a width of 128. Counts up to twice this are exact in `f32`.
pub(super) const MAX_QUEUE: usize = 1 << 20;

/// A ring of rows. The batch need not divide its size.
#[derive(Module, Debug)]
pub(super) struct Queue {
    rows: Param<Tensor<2>>,
    /// Rows written so far; once the queue is full, whole rounds but one are left out. Its remainder is the place of the next row.
    written: Param<Tensor<1>>,
}

impl Queue {
    /// Starts with random directions of length 1, as MoCo's `normalize(randn(dim, K))`.
    pub(super) fn random(size: usize, dim: usize, scope: &Scope) -> Self {
        let drawn = scope.untrained().param("rows", [size, dim], Init::Normal(1.0)).val();
        Self::holding(host(l2_normalize(drawn, 1e-12)), [size, dim], scope)
    }

    /// Starts with zeros, which nobody should read before it is full.
    pub(super) fn empty(size: usize, dim: usize, scope: &Scope) -> Self {
        Self::holding(vec![0.0; size * dim], [size, dim], scope)
    }

    fn holding(rows: Vec<f32>, shape: [usize; 2], scope: &Scope) -> Self {
        Self { rows: scope.buffer("rows", rows, shape), written: scope.buffer("written", vec![0.0], [1]) }
    }

    /// Returns the rows, `[size, dim]`, in no order that matters.
    pub(super) fn rows(&self) -> Tensor<2> {
        self.rows.val()
    }

    /// Tells whether every row has been written.
    pub(super) fn is_full(&self) -> bool {
        self.written() >= self.rows.dims()[0]
    }

    /// Writes rows (row-major) over the oldest ones.
    pub(super) fn push(&self, rows: &[f32]) -> [Update; 2] {
        let [size, dim] = self.rows.dims();
        let (queue, written) = (self.rows.val(), self.written());
        let count = rows.len() / dim;
        let rows = Tensor::from_data(TensorData::new(rows.to_vec(), [count, dim]), &queue.device());
        let (queue, next) = enqueue(queue, rows, written % size);
        let written = written + count;
        let written = if written < 2 * size { written } else { size + next };
        [Update { id: self.rows.id, values: host(queue) }, Update { id: self.written.id, values: vec![written as f32] }]
    }

    fn written(&self) -> usize {
        host(self.written.val())[0] as usize
    }
}

fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec::<f32>().expect("networks compute in fp32")
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use burn::tensor::Device;

    use super::*;
    use crate::model::params::{Flat, Layout, read_buffers, write};

    /// Pushes in any portions keep the newest rows, through any number of rounds, as a deque does.
    #[test]
    fn holds_the_newest_rows() {
        for (size, batch) in [(5, 2), (4, 4), (3, 7), (6, 6), (1, 1)] {
            let device = Device::flex();
            let mut queue = Queue::empty(size, 1, &Scope::new(0, &device));
            let layout = Layout::of(&queue);
            let mut naive: VecDeque<f32> = VecDeque::new();
            for round in 0..20 {
                let rows: Vec<f32> = (0..batch).map(|row| (round * batch + row + 1) as f32).collect();
                let mut buffers = read_buffers(&queue, &layout);
                for Update { id, values } in queue.push(&rows) {
                    buffers[layout.entry(id).range()].copy_from_slice(&values);
                }
                queue = write(queue, &layout, &Flat::upload(Vec::new(), buffers, &device), &device);
                naive.extend(rows);
                naive.drain(..naive.len().saturating_sub(size));
                assert_eq!(queue.is_full(), naive.len() == size, "{size} {batch} {round}");
                let mut held: Vec<f32> = host(queue.rows()).into_iter().filter(|&row| row != 0.0).collect();
                held.sort_by(f32::total_cmp);
                assert_eq!(held, naive.iter().copied().collect::<Vec<_>>(), "{size} {batch} {round}");
            }
        }
    }

    #[test]
    fn starts_with_unit_rows_of_its_own_path() {
        let rows = |path: &str| host(Queue::random(4, 8, &Scope::new(0, &Device::flex()).enter(path)).rows());
        assert!(rows("a").chunks(8).all(|row| (row.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5));
        assert!(rows("a") == rows("a") && rows("a") != rows("b"));
    }
}
