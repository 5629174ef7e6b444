//! Where the numbers of a tensor lie.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use super::dtype::Dtype;
use super::error::Refusal;

/// Most dimensions of a tensor.
pub(super) const MAX_RANK: usize = 16;

/// A run of bytes in one of the files of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Storage {
    /// Which file.
    pub(super) file: usize,
    /// First byte.
    pub(super) start: u64,
    /// Number of bytes.
    pub(super) bytes: u64,
    /// Highest byte of a number first.
    pub(super) big_endian: bool,
}

/// A tensor of a file: a view of a storage, as torch has them. Offset and strides count elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
    pub(super) offset: usize,
    pub(super) storage: Storage,
}

impl Tensor {
    /// A tensor that fills its storage, row by row.
    pub(super) fn contiguous(dtype: Dtype, shape: Vec<usize>, storage: Storage) -> Self {
        let strides = row_major(&shape);
        Self { dtype, shape, strides, offset: 0, storage }
    }

    /// Returns the type of its numbers.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns its shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements, unless there are more than can be counted.
    pub(super) fn num_elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |count, &side| count.checked_mul(side))
    }

    /// Checks that every element lies in the storage, and that there are no more than `most`.
    ///
    /// A view may repeat elements (a stride of 0), so that its shape alone says nothing about what is there.
    pub(super) fn check(&self, most: u64) -> Result<(), Refusal> {
        let Self { shape, strides, .. } = self;
        if shape.len() != strides.len() || shape.len() > MAX_RANK {
            return Err(Refusal::malformed(format!(
                "a tensor has {} dimensions and {} strides",
                shape.len(),
                strides.len()
            )));
        }
        let count = self.num_elements().filter(|&count| count as u64 <= most);
        let Some(count) = count else {
            return Err(Refusal::malformed(format!(
                "a tensor claims the shape {shape:?}, more than the file can hold"
            )));
        };
        let end = if count == 0 { Some(self.offset) } else { self.last().and_then(|last| last.checked_add(1)) };
        let have = self.storage.bytes / self.dtype.size() as u64;
        if end.is_none_or(|end| end as u64 > have) {
            return Err(Refusal::damaged(format!(
                "a tensor of shape {shape:?} reaches beyond the {have} numbers of its storage"
            )));
        }
        Ok(())
    }

    /// Position of the last element.
    fn last(&self) -> Option<usize> {
        self.shape
            .iter()
            .zip(&self.strides)
            .try_fold(self.offset, |at, (&side, &stride)| at.checked_add(side.checked_sub(1)?.checked_mul(stride)?))
    }

    /// Reads its elements row by row. It has been checked.
    pub(super) fn read<T: Copy>(
        &self,
        mut file: &File,
        decode: fn(Dtype, &[u8], bool) -> Option<Vec<T>>,
    ) -> Result<Vec<T>, Refusal> {
        let count = self.num_elements().unwrap_or(0);
        let Some(last) = self.last().filter(|_| count > 0) else { return Ok(Vec::new()) };
        let size = self.dtype.size();
        let mut bytes = vec![0; (last + 1 - self.offset) * size];
        file.seek(SeekFrom::Start(self.storage.start + (self.offset * size) as u64))?;
        file.read_exact(&mut bytes)?;
        let Some(values) = decode(self.dtype, &bytes, self.storage.big_endian) else {
            return Err(Refusal::new(
                format!("a tensor is of type {}, which is not converted", self.dtype.name()),
                "save the weights as float32, float16 or bfloat16",
            ));
        };
        if self.strides == row_major(&self.shape) {
            return Ok(values);
        }
        drop(bytes);
        let mut out = Vec::with_capacity(count);
        let mut index = vec![0; self.shape.len()];
        let mut at = 0;
        for _ in 0..count {
            out.push(values[at]);
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                at += self.strides[axis];
                if index[axis] < self.shape[axis] {
                    break;
                }
                at -= self.strides[axis] * self.shape[axis];
                index[axis] = 0;
            }
        }
        Ok(out)
    }
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis]);
    }
    strides
}
